#!/usr/bin/env python3
"""Refuses includes against the chain of folders, and files that have outgrown their budget."""
import pathlib
import re
import subprocess
import sys

CHAIN = ["tensor", "mesh", "rng", "dtensor", "ops", "parallel", "examples"]
CUDA_MAY = re.compile(r"^(tensor/|rng/philox\.h$)")  # kernels know arrays, not distribution
MAX_LINES = 800
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def problems_of(path):
    text = path.read_text()
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{path}: {len(lines)} lines, at most {MAX_LINES}: split it by idea"
    folder = path.parts[0]
    if folder not in CHAIN:
        return
    for number, line in enumerate(lines, 1):
        found = INCLUDE.match(line)
        if not found:
            continue
        target = found.group(1)
        top = target.split("/")[0]
        if path.suffix == ".cu" and not CUDA_MAY.match(target):
            yield f"{path}:{number}: a .cu file may include tensor/ and rng/philox.h, not {target}"
        if top in ("tests", "bench"):
            yield f"{path}:{number}: {target}: {folder}/ may not include {top}/"
        if top in CHAIN and CHAIN.index(top) > CHAIN.index(folder):
            yield (f"{path}:{number}: {target}: {folder}/ stands left of {top}/ in "
                   + " -> ".join(CHAIN))


def main():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], check=True,
                            capture_output=True, text=True).stdout.split("\n")
    paths = [pathlib.Path(p) for p in listed
             if p.endswith((".h", ".cc", ".cu", ".inc", ".py")) and pathlib.Path(p).exists()]
    found = [problem for path in paths for problem in problems_of(path)]
    print("\n".join(found) if found else f"{len(paths)} files: includes and sizes are fine")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
