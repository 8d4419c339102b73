#!/usr/bin/env python3
"""The texts that SmolLM2 is known to write, by the program `generate`: on two ranks that are
threads, and that are processes, by dtensor-run and by mpirun where they are there.

    texts.py BUILD MODEL GOLDEN

Exit code 1 where a text is another one."""
import json
import os
import re
import shutil
import subprocess
import sys

MPI = dict(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
           OMPI_MCA_rmaps_base_oversubscribe="1")


def continuation(case):
    """What follows the prompt, without the marks of the template."""
    text = case["text"].split("<|im_start|>assistant\n")[1]
    return text.removesuffix("<|im_end|>")


def main():
    build, model, golden = sys.argv[1:]
    generate, launcher = (os.path.join(build, "examples", name) for name in ("generate", "dtensor-run"))
    ways = {"threads": [generate, "--ranks", "2"]}
    for way, found, command in (
            ("dtensor-run", os.path.exists(launcher), [launcher, "--nproc-per-node", "2", "--", generate]),
            ("mpirun", shutil.which("mpirun"), ["mpirun", "-n", "2", generate])):
        if found:
            ways[way] = command
        else:
            print(f"skipped: {way} is not there")
    with open(golden) as file:
        cases = json.load(file)["cases"]
    wrong = 0
    for way, command in ways.items():
        for case in cases:
            run = subprocess.run(
                [*command, "--model", model, "--chat", "--prompt", case["prompt"], "--max-new",
                 str(len(case["greedy"]))],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=dict(os.environ, **MPI))
            text = re.sub(r"^\[rank 0\] ", "", run.stdout, flags=re.MULTILINE).removesuffix("\n")
            same = run.returncode == 0 and text == continuation(case)
            wrong += not same
            print(f"{'ok   ' if same else 'WRONG'} 2 ranks by {way}: {case['prompt']}")
            if not same:
                print(f"exit code {run.returncode}, {text!r}, not {continuation(case)!r}", run.stderr,
                      sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
