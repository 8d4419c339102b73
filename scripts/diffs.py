#!/usr/bin/env python3
"""What an extension costs: docs/guide/diffs holds one of each kind, and this shows that they work.

    scripts/diffs.py                 applies each to a copy of the tree, builds and runs its test
    scripts/diffs.py dtype family    only these
    scripts/diffs.py --check         only looks whether all apply, and whether they say the truth
    scripts/diffs.py --one           checks all and builds one, another for each commit: for CI

A diff begins with text that git ignores:

    A dtype: float8_e4m3fn ...
    Files: 1 of at most 3            files of the library that it touches, tests and documents aside
    Build: tensor_float8_test        targets
    Run: tests/tensor_float8_test    a command in the build folder; several lines are several
    Then build: ..., Then run: ...   more of both, which --one leaves out

The copy and its build are kept in build/diffs, so that the next run builds what differs.
"""
import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIFFS = ROOT / "docs/guide/diffs"
COPY = ROOT / "build/diffs/tree"
NOT_LIBRARY = ("tests/", "docs/", "bench/", "examples/")


class Diff:
    def __init__(self, path):
        self.path = path
        self.name = path.stem
        head, _, body = path.read_text().partition("diff --git ")
        self.touched = re.findall(r"^\+\+\+ b/(\S+)|^--- a/(\S+)", body, re.M)
        self.touched = sorted({a or b for a, b in self.touched})
        self.files = [f for f in self.touched if not f.startswith(NOT_LIBRARY)]
        counts = re.search(r"^Files: (\d+) of at most (\d+)$", head, re.M)
        self.said, self.most = (int(counts[1]), int(counts[2])) if counts else (-1, -1)
        lines = lambda key: re.findall(rf"^{key}: (.+)$", head, re.M)
        self.targets = " ".join(lines("Build")).split()
        self.commands = lines("Run")
        self.more_targets = " ".join(lines("Then build")).split()
        self.more_commands = lines("Then run")

    def problems(self):
        if not self.targets or not self.commands:
            yield "its head needs the lines Build: and Run:"
        if self.said != len(self.files):
            yield f"its head says Files: {self.said}, but it touches {', '.join(self.files)}"
        if self.said > self.most:
            yield f"it touches {self.said} files of the library, more than {self.most}"
        if not any(f.startswith("tests/") for f in self.touched):
            yield "it has no test"
        applied = subprocess.run(["git", "apply", "--check", self.path], cwd=ROOT, text=True,
                                 capture_output=True)
        if applied.returncode:
            yield f"it does not apply: {applied.stderr.strip()}"


def tree_files():
    """Of the tree as it is, without what is built."""
    found = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                           capture_output=True)
    if found.returncode == 0:
        return [f for f in found.stdout.split("\n") if f and (ROOT / f).is_file()]
    return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")
            if p.is_file() and not p.relative_to(ROOT).parts[0].startswith(("build", ".git"))]


def refresh_copy():
    """COPY becomes the tree again; what is the same keeps its time, for ninja."""
    files = set(tree_files())
    for path in [p for p in COPY.rglob("*") if p.is_file()]:
        name = path.relative_to(COPY)
        if name.parts[0] != "build" and str(name) not in files:
            path.unlink()
    for name in files:
        source, target = ROOT / name, COPY / name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
    for folder in sorted((p for p in COPY.rglob("*") if p.is_dir()), reverse=True):
        if folder.relative_to(COPY).parts[0] != "build" and not any(folder.iterdir()):
            folder.rmdir()  # of a diff


def run(command, cwd):
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, shell=isinstance(command, str))
    if done.returncode:
        print(done.stdout[-6000:])
        print(f"failed: {command if isinstance(command, str) else ' '.join(map(str, command))}")
    return done.returncode == 0


def build(diff, most):
    """Builds and runs what the head says, with `most` all of it."""
    start = time.time()
    targets = diff.targets + (diff.more_targets if most else [])
    commands = diff.commands + (diff.more_commands if most else [])
    refresh_copy()
    # Of its own repository, or git would look for the files in that of the tree around it.
    if not (COPY / ".git").exists() and not run(["git", "init", "-q"], COPY):
        return False
    if not run(["git", "apply", diff.path], COPY):
        return False
    jobs = str(len(os.sched_getaffinity(0)))
    steps = [["cmake", "--preset", "release"],
             ["cmake", "--build", "--preset", "release", "-j", jobs, "--target", *targets]]
    if not all(run(step, COPY) for step in steps):
        return False
    if not all(run(command, COPY / "build/release") for command in commands):
        return False
    print(f"{diff.name}: {diff.said} files, builds and passes ({time.time() - start:.0f} s)")
    return True


def todays(diffs):
    """Another one for each commit; without history by what the tree holds."""
    count = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, text=True,
                           capture_output=True)
    if count.returncode == 0:
        return diffs[int(count.stdout) % len(diffs)]
    tree = hashlib.sha256()
    for name in sorted(tree_files()):
        tree.update(name.encode() + (ROOT / name).read_bytes())
    return diffs[int.from_bytes(tree.digest()[:8], "big") % len(diffs)]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of diffs; default: all")
    parser.add_argument("--check", action="store_true", help="build nothing")
    parser.add_argument("--one", action="store_true", help="build one")
    options = parser.parse_args()
    diffs = [Diff(path) for path in sorted(DIFFS.glob("*.diff"))]
    unknown = set(options.names) - {d.name for d in diffs}
    if unknown or not diffs:
        sys.exit(f"there is no {', '.join(unknown) or 'diff'}: {', '.join(d.name for d in diffs)}")
    good = True
    for diff in diffs:
        for problem in diff.problems():
            print(f"{diff.path.relative_to(ROOT)}: {problem}")
            good = False
    if good:
        print(f"{len(diffs)} diffs apply")
    if not good or options.check:
        return 0 if good else 1
    chosen = [todays(diffs)] if options.one else [
        d for d in diffs if d.name in options.names or not options.names]
    return 0 if all([build(diff, most=not options.one) for diff in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
