#!/usr/bin/env python3
"""Breaks the PTX of a built program or plugin, one instruction at a time, and asks whether its tests
notice. Nothing is compiled: the text is changed where it lies, by text of the same length.

    scripts/mutate_ptx.py --count 40 --seed 1 --work /tmp/ptx FILE -- COMMAND... {} ...

runs COMMAND once with {} as FILE, which must pass (exit 0) and print the counters of the stand-in of
tests/cusim (the script sets DT_CUSIM_REPORT and DT_CUSIM_STRICT): only kernels that ran are changed.
Then it runs with copies in which a barrier is dropped, a bound is widened, a mask of lanes is cut,
an address is off, or an operator is another. A mutant whose run fails, reports or takes ten times as
long is killed; the others survive and are printed with their kernel and line.
"""
import argparse
import os
import pathlib
import random
import re
import subprocess
import sys
import time

# What is replaced, by what: of one length.
RULES = [("barrier", rb"bar(rier)?\.sync\s+0;", lambda m: b" " * len(m.group())),
         ("bound", rb"setp\.(ge|lt|gt|le)\.",
          lambda m: b"setp." + {b"ge": b"gt", b"lt": b"le", b"gt": b"ge", b"le": b"lt"}[m.group(1)]
          + b"."),
         ("mask", rb"shfl\.sync\.[^;]*, -1;", lambda m: m.group()[:-3] + b"15;"),
         ("address", rb"add\.s64 ", lambda m: b"sub.s64 "),
         ("operator", rb"add\.(rn\.)?f(32|64)", lambda m: b"sub" + m.group()[3:]),
         ("operator", rb"(min|max)\.", lambda m: {b"min": b"max", b"max": b"min"}[m.group(1)] + b"."),
         ("step", rb"shl\.b(32|64) ", lambda m: b"shr" + m.group()[3:])]


def kernels(image):
    """Name, begin and end of each kernel's text."""
    for entry in re.finditer(rb"\.entry ([\w$]+)\(", image):
        end = image.find(b"\n}", entry.end())
        yield entry.group(1).decode(), entry.end(), end


def places(image, ran):
    """Kind, begin, old, new and kernel of all that can be changed in kernels that ran."""
    for name, begin, end in kernels(image):
        if name not in ran:
            continue
        body = image[begin:end]
        for kind, pattern, change in RULES:
            for match in re.finditer(pattern, body):
                yield kind, begin + match.start(), match.group(), change(match), name


def run(command, file, limit):
    """Whether it failed or took too long, and what it printed."""
    environment = dict(os.environ, DT_CUSIM_REPORT="1", DT_CUSIM_STRICT="1",
                       DT_CUSIM_LIMIT="50000000")
    try:
        done = subprocess.run([part.replace("{}", str(file)) for part in command], timeout=limit,
                              env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return True, b"too long"
    return done.returncode != 0, done.stdout


def line_of(image, at):
    """The source line of an instruction: of the last .loc before it."""
    found = re.findall(rb"\.loc\t(\d+) (\d+)", image[max(0, at - 4000):at])
    return found[-1][1].decode() if found else "?"


def main():
    parser = argparse.ArgumentParser(usage=__doc__, add_help=True)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    options, command = parser.parse_known_args(sys.argv[1:sys.argv.index("--")])[0], \
        sys.argv[sys.argv.index("--") + 1:]
    options.work.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    failed, said = run(command, options.file, 600)
    if failed:
        sys.exit("it fails as it is:\n" + said.decode(errors="replace")[-2000:])
    limit = 10 * (time.time() - begin) + 10
    ran = set(re.findall(r"conflicts: ([\w$]+)", said.decode(errors="replace")))
    image = options.file.read_bytes()
    by_kind = {}
    for place in places(image, ran):
        by_kind.setdefault(place[0], []).append(place)
    generator = random.Random(options.seed)
    copy = options.work / options.file.name
    copy.write_bytes(image)
    copy.chmod(0o755)
    killed = {}
    for number in range(options.count):
        kind, at, old, new, kernel = generator.choice(by_kind[generator.choice(sorted(by_kind))])
        with copy.open("r+b") as file:
            file.seek(at)
            file.write(new)
        failed, said = run(command, copy, limit)
        with copy.open("r+b") as file:
            file.seek(at)
            file.write(old)
        why = re.search(rb"cusim: ([a-z ]+): ", said)
        why = why.group(1).decode() if why else "other results" if failed else "SURVIVES"
        killed.setdefault(kind, []).append(failed)
        print(f"{number + 1}: {kind}, {kernel[-60:]} line {line_of(image, at)}, "
              f"{' '.join(old.decode().split())[:30]}: {why}", flush=True)
    for kind, results in sorted(killed.items()):
        print(f"{kind}: {sum(results)} of {len(results)} killed")
    every = [one for results in killed.values() for one in results]
    print(f"{sum(every)} of {len(every)} killed, {len(ran)} kernels")


if __name__ == "__main__":
    main()
