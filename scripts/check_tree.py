#!/usr/bin/env python3
"""Refuses includes against the chain of folders, code that knows one device, state that belongs to
threads, files that have outgrown their budget, citations of documents that are not here, documents
that name files, functions or other code that is not there, and a program in the README that is not
the one that is built and run; mutants of texts that are gone; and cases of tests that no turn of
.ci/run would come to."""
import json
import math
import pathlib
import re
import subprocess
import sys

CHAIN = ["tensor", "mesh", "rng", "dtensor", "ops", "parallel", "examples"]
# Kernels know arrays, not distribution.
CUDA_MAY = re.compile(r"^dtensor/(tensor/|rng/(philox|values|draw|device_draw)\.h$"
                      r"|ops/(cpu/\w+\.h|conv/(grid_points|taps|window)\.h|matmul/(activation|dim_group)\.h"
                      r"|\w+/\w+\.inc)$)")
# What belongs to a thread: the pointer to its rank's state, the device and context of threads that
# are no rank, what tells threads apart, and caches and queues that any thread's would serve as well.
THREAD_MAY = {"tensor/free_lists.h", "tensor/rank_state.h", "tensor/rank_state.cc", "tensor/device.cc", "mesh/launch.cc",
              "tensor/cpu/gemm.cc", "tensor/cpu/bf16_gemm.cc", "tensor/cpu/conv.cc",
              "tensor/cuda/device.cu", "tensor/cuda/kernels/blas.cu", "tensor/cuda/numbers.h",
              "dtensor/memo.cc", "dtensor/autograd.cc", "dtensor/impl.h"}
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
        # Nothing above tensor/ may ask which device it is; kernels say for which one they are.
        if (folder not in ("tensor", "examples") and "DeviceType::kCpu" in line
                and "RegisterKernel(" not in line):
            yield f"{path}:{number}: names the CPU: a backend of tensor/device.h knows"
        if re.match(r"\s*(\w+ )*thread_local\b", line) and str(path) not in THREAD_MAY:
            yield (f"{path}:{number}: what changes belongs to a rank (tensor/rank_state.h), not to a "
                   "thread")
        found = INCLUDE.match(line)
        if not found:
            continue
        target = found.group(1)
        parts = target.split("/")
        # "dtensor/ops/ops.h" is ops/ops.h, "dtensor/op.h" the engine's.
        top = parts[1] if parts[0] == "dtensor" and parts[1] in CHAIN else parts[0]
        if parts[0] in CHAIN and parts[0] not in ("dtensor", "examples"):
            yield f'{path}:{number}: {target}: write "dtensor/{target}", as its users do'
        if target == "dtensor/dtensor.h" and folder != "examples":
            yield f"{path}:{number}: the library includes what it uses, not {target}"
        if str(path) == "dtensor/dtensor.h":
            continue  # for users: everything
        # The plugin of CUDA has the element functions of all folders, and links none of them.
        if path.suffix == ".cu" or path.parts[:2] == ("tensor", "cuda"):
            if not CUDA_MAY.match(target):
                yield (f"{path}:{number}: device code may include tensor/ and the plain headers of "
                       f"rng/ and ops/, not {target}")
            continue
        if top in ("tests", "bench"):
            yield f"{path}:{number}: {target}: {folder}/ may not include {top}/"
        if top in CHAIN and CHAIN.index(top) > CHAIN.index(folder):
            yield (f"{path}:{number}: {target}: {folder}/ stands left of {top}/ in "
                   + " -> ".join(CHAIN))


DOCUMENT = re.compile(r"[\w./-]*\w\.md\b")


def document_problems(path, known):
    """Documents that are cited must be here to be read."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for cited in DOCUMENT.findall(line):
            if not any(str(document).endswith(cited.lstrip("./")) for document in known):
                yield f"{path}:{number}: {cited} is not in the tree"


# In backticks: `mesh/comm.h`, or with functions that are in it, `mesh/comm.cc: Run, Comm::Trace`.
NAMED = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/[\w.-]+\.\w+)(?:: ([^`]+))?`")
NAMES_OF = re.compile(r"[\w:~]+(?:\(\))?")


def name_problems(path):
    """Files that a document names must be there, and the functions that it says are in them."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for file, names in NAMED.findall(line):
            top = file.split("/")[0]
            if not pathlib.Path(top).is_dir() or top == "build":
                continue  # of another tree, or an example
            if not pathlib.Path(file).is_file():
                yield f"{path}:{number}: there is no {file}"
                continue
            text = pathlib.Path(file).read_text()
            for name in names.split(", ") if names else []:
                if not NAMES_OF.fullmatch(name):
                    yield f"{path}:{number}: `{file}: {name}`: names of functions are separated by ', '"
                    continue
                last = re.escape(name.split("::")[-1])  # in its class it has no prefix
                if not re.search(rf"(?<!\w){last}\(", text):
                    yield f"{path}:{number}: {file} has no function {name}"


# In backticks, anywhere: `SpecRef`, `Comm::Trace`, `AllReduce(x, x, ReduceOp::kSum)`.
SPAN = re.compile(r"`([^`]+)`")
FENCED = re.compile(r"```.*?```", re.S)
CODE_NAME = re.compile(r"\b(?:\w+::)*~?[A-Z]\w*")
OTHERS = {"CMakeLists", "TiedLinear"}  # a file's; nanotron's


def code_words(paths):
    """All identifiers of the code, without comments; of constants also without their k, as codes of
    errors are spoken of."""
    words = set()
    for path in paths:
        if path.name != "check_tree.py":  # which has names that are not ours
            comment = "#.*" if path.suffix == ".py" else "//.*"
            words.update(re.findall(r"\w+", re.sub(comment, "", path.read_text())))
    return words | {word[1:] for word in words if re.match("k[A-Z]", word)} | OTHERS


def code_name_problems(path, words):
    """Names with two capitals that a document has in backticks are names of the code."""
    text = FENCED.sub(lambda block: "\n" * block.group().count("\n"), path.read_text())
    for span in SPAN.finditer(text):
        for name in CODE_NAME.findall(span.group(1)):
            if name.upper() == name or sum(c.isupper() for c in name) < 2:
                continue
            gone = [part for part in re.split("::~?", name) if part not in words]
            if gone:
                line = text.count("\n", 0, span.start()) + 1
                yield f"{path}:{line}: `{name}`: there is no {gone[0]} in the code"


def readme_problems():
    block = re.search(r"```cpp\n(.*?)```", pathlib.Path("README.md").read_text(), re.S).group(1)
    program = pathlib.Path("examples/quickstart.cc").read_text().split("\n", 1)[1]
    if block != program:
        yield "README.md: its first program differs from examples/quickstart.cc"


def guide_problems():
    """What guides show is taken from what CI runs, but for white space: the examples, and where ops
    are written."""
    squeeze = lambda text: re.sub(r"\s+", "", text)
    shown = [squeeze(p.read_text()) for top in ("examples", "ops")
             for p in pathlib.Path(top).rglob("*") if p.suffix in (".cc", ".inc")]
    for guide in pathlib.Path("docs/guide").glob("*.md"):
        for block in re.findall(r"```cpp\n(.*?)```", guide.read_text(), re.S):
            if not any(squeeze(block) in text for text in shown):
                yield f"{guide}: in no program under examples/ or ops/:\n{block}"


def mutant_problems():
    """What a listed mutant replaces is there, once."""
    for mutants in pathlib.Path("scripts").glob("*_mutants.jsonl"):
        for number, line in enumerate(mutants.read_text().splitlines(), 1):
            if line.startswith("["):
                path, old = json.loads(line)[:2]
                found = pathlib.Path(path).read_text().count(old)
                if found != 1:
                    yield f"{mutants}:{number}: {path} has this text {found} times"


# InPart(i, 8), InTurn(number++, kParts), and by hand: (samples + turn) % 4, $((${DT_PART:-0} % 4)).
PARTS = re.compile(r"\bIn(?:Part|Turn)\([^;{]*?, (\w+)\)|\bturn\) % (\d+)|DT_PART[:\-0}]* % (\d+)")


def turn_problems():
    """Tests that take every n-th case take all of them over the turns of .ci/run, in each kind of
    turn: what is built for one kind only runs nowhere else."""
    asked = {}  # the n, and who takes every n-th
    for path in sorted(pathlib.Path("tests").rglob("*")):
        if path.suffix not in (".cc", ".h", "") or not path.is_file():
            continue
        text = path.read_text()
        for found in PARTS.finditer(text):
            number = next(group for group in found.groups() if group)
            if not number.isdigit():
                constant = re.search(rf"\b{number} = (\d+);", text)
                if constant is None:
                    continue  # the parameter of thin.h's own
                number = constant[1]
            asked.setdefault(int(number), path)
    if not asked:
        yield "tests/: scripts/check_tree.py finds nothing that takes every n-th case by DT_PART"
        return
    # Kinds of turns, seeds of the far device, and of the stand-in for CUDA.
    rounds = 5 * math.lcm(3, 5, *asked)
    lines = subprocess.run([".ci/run", "turns", str(rounds)], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    turns = [tuple(map(int, line.split())) for line in lines]
    for kind in sorted({kind for kind, *_ in turns}):
        for number, path in sorted(asked.items()):
            rest = set(range(number)) - {part % number for of, part, *_ in turns if of == kind}
            if rest:
                yield (f".ci/run: in turns of kind {kind} DT_PART modulo {number} is never "
                       f"{', '.join(map(str, sorted(rest)))}, so {path} never takes some cases")
        if {seed for of, _, seed, _ in turns if of == kind} != {0, 1, 2}:
            yield f".ci/run: in turns of kind {kind} not every seed of the far device comes"
        if {seed for of, _, _, seed in turns if of == kind} != set(range(5)):
            yield f".ci/run: in turns of kind {kind} not every schedule of CUDA's stand-in comes"


def main():
    paths = [p for top in CHAIN + ["tests", "bench", "scripts"]
             for p in pathlib.Path(top).rglob("*")
             if p.suffix in (".h", ".cc", ".cu", ".inc", ".py")]
    found = [problem for path in paths for problem in problems_of(path)]
    documents = [p for p in pathlib.Path(".").glob("*.md")] + [
        p for p in pathlib.Path("docs").rglob("*.md")]
    cites = paths + documents + [pathlib.Path("dev"), pathlib.Path(".ci/run")]
    found += [problem for path in cites for problem in document_problems(path, documents)]
    named = [p for p in documents if p.name != "CHANGELOG.md"]  # which tells of what was
    found += [problem for path in named for problem in name_problems(path)]
    words = code_words(paths)
    found += [problem for path in named for problem in code_name_problems(path, words)]
    found += readme_problems()
    found += guide_problems()
    found += mutant_problems()
    found += turn_problems()
    print("\n".join(found) if found else f"{len(paths)} files: includes and sizes are fine")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
