#!/usr/bin/env python3
"""Launches processes_program again and again, under mpirun and dtensor-run, does something to one of its
processes at a random time, and looks at how all end.

    soak.py PROGRAM DTENSOR_RUN [--seconds 3600] [--faults 200] [--seed N]

Ends after so many seconds or injected faults, whichever is later. Of every launch: it ends in time;
no number is wrong; where nothing was done to it, or a process was only held for less than the
timeout, all ranks are through; else every rank that lives names the one that something was done to.
Nothing is left: no process, no file of shared memory, no folder but those that the launcher names.
Prints a line for each fault and a summary; exit code 1 if anything was wrong. Counted apart is what
Open MPI 4.1 does itself: where a process dies while it says hello to mpirun, mpirun sometimes (2 of
103 tries) never ends, though all processes have; where one dies in MPI_Init, MPI may end the others,
and names nobody."""
import argparse
import collections
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TIMEOUT_S = 3   # of waits for peers
LIMIT_S = 120   # a launch that takes longer hangs
ACTIONS = ("nothing", "hold", "kill", "stop", "abort", "terminate")


def descendants(pid):
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        for task in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                queue += [int(child) for child in task.read_text().split()]
            except OSError:
                pass
        found.append(parent)
    return found[1:]


def ranks_of(launcher, program):
    """The processes of a launch that run the program, by rank."""
    found = {}
    for pid in descendants(launcher):
        try:
            if os.readlink(f"/proc/{pid}/exe") != program:
                continue
            environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            name, _, value = entry.partition(b"=")
            if name in (b"OMPI_COMM_WORLD_RANK", b"DTENSOR_RANK"):
                found[int(value)] = pid
    return found


def has_ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def send(pid, number):
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


class Launch:
    def __init__(self, options, chance, folder):
        self.backend = chance.choice(("mpi", "gloo"))
        self.ranks = chance.choice((2, 3, 4))
        self.action = chance.choice(ACTIONS)
        self.victim = chance.randrange(self.ranks)
        self.after = chance.uniform(0.0, 4.0)  # seconds
        self.held = chance.uniform(0.05, 0.6 * TIMEOUT_S)
        self.seed = chance.randrange(1 << 20)
        self.options, self.folder, self.done_to_it = options, folder, False
        self.launcher_hangs = self.mpi_gives_up = False

    def __str__(self):
        return (f"{self.backend} {self.ranks} ranks, {self.action} rank {self.victim} "
                f"after {self.after:.2f} s, seed {self.seed}")

    def command(self):
        program = [self.options.program, "soak", str(self.seed)]
        if self.backend == "gloo":
            return [self.options.launcher, "--nproc-per-node", str(self.ranks), "--", *program]
        return ["mpirun", "--enable-recovery", "-n", str(self.ranks), *program]

    def run(self):
        """What was wrong; empty: nothing."""
        environment = dict(
            os.environ, DTENSOR_TIMEOUT_S=str(TIMEOUT_S), TMPDIR=str(self.folder),
            OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_mpi_yield_when_idle="1",
            OMPI_MCA_btl_vader_backing_directory=str(self.folder))
        with tempfile.TemporaryFile("w+") as output:
            launcher = subprocess.Popen(self.command(), stdout=output, stderr=subprocess.STDOUT,
                                        env=environment, start_new_session=True)
            started = time.monotonic()
            all_pids = self.inject(launcher, started)
            hangs = False
            try:
                launcher.wait(timeout=max(1.0, LIMIT_S - (time.monotonic() - started)))
            except subprocess.TimeoutExpired:
                hangs = True
                self.launcher_hangs = all(map(has_ended, descendants(launcher.pid)))
                for pid in descendants(launcher.pid) + [launcher.pid]:
                    send(pid, signal.SIGKILL)
                launcher.wait()
                if self.launcher_hangs:  # its own files it would have taken away
                    for left in self.folder.glob(f"ompi.*/pid.{launcher.pid}"):
                        shutil.rmtree(left)
            output.seek(0)
            text = output.read()
        wrong = self.judge(text, launcher.returncode)
        self.mpi_gives_up = self.done_to_it and "MPI_INIT has failed" in text
        if self.mpi_gives_up:
            wrong = ""
        for named in self.folder.glob("dtensor-run-*"):
            if str(named) in text:
                shutil.rmtree(named)
        if hangs:
            wrong = "" if self.launcher_hangs else "it hangs"
        left = [pid for pid in all_pids if not has_ended(pid)]
        if not wrong and left:
            wrong = f"processes are left: {left}"
        return wrong, text

    def inject(self, launcher, started):
        """Returns the processes that were seen."""
        seen = set()
        while launcher.poll() is None and time.monotonic() - started < self.after:
            time.sleep(0.01)
        if launcher.poll() is not None:
            return seen
        pids = ranks_of(launcher.pid, self.options.program)
        seen.update(pids.values())
        pid = pids.get(self.victim)
        if self.action == "nothing" or pid is None:
            return seen
        number = {"hold": signal.SIGSTOP, "stop": signal.SIGSTOP, "kill": signal.SIGKILL,
                  "abort": signal.SIGABRT, "terminate": signal.SIGTERM}[self.action]
        self.done_to_it = send(pid, number)
        if self.action == "hold":
            time.sleep(self.held)
            send(pid, signal.SIGCONT)
        elif self.action == "stop":
            # mpirun waits for it: ended once the others had their time.
            limit = time.monotonic() + 4 * TIMEOUT_S
            while time.monotonic() < limit and launcher.poll() is None:
                if len(ranks_of(launcher.pid, self.options.program)) == 1:
                    break
                time.sleep(0.1)
            send(pid, signal.SIGKILL)
        return seen

    def judge(self, text, code):
        if "a sum of" in text or "overlapped sum" in text or "a wrong gather" in text \
                or "other bytes" in text:
            return "a number is wrong"
        through = text.count("is done\n")
        if not self.done_to_it or self.action in ("nothing", "hold"):
            return "" if through == self.ranks and code == 0 else "not all are through"
        if through == self.ranks:
            return ""  # it was through
        errors = [line for line in text.splitlines() if re.search(r"\berror: ", line)]
        named = [line for line in errors
                 if re.search(rf"\b(ranks? [\d, ]*\b{self.victim}\b|of the {self.ranks} processes)",
                              line)]
        if f"failed; first rank {self.victim} " in text:
            return ""  # before the ranks had met the launcher knows
        survivors = self.ranks - 1
        # Who was through when it happened says nothing.
        if len(named) + through < survivors:
            return f"{len(named)} of {survivors} name the rank"
        return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=os.path.realpath)
    parser.add_argument("launcher", type=os.path.realpath)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    started, launches, faults, bad = time.monotonic(), 0, 0, 0
    count = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        while time.monotonic() - started < options.seconds or faults < options.faults:
            launch = Launch(options, chance, folder)
            wrong, text = launch.run()
            launches += 1
            count[f"{launch.backend} {launch.action if launch.done_to_it else 'nothing'}"] += 1
            if launch.done_to_it and launch.action != "hold":
                faults += 1
            count["mpirun itself hung"] += launch.launcher_hangs
            count["MPI_Init ended all"] += launch.mpi_gives_up
            if wrong:
                bad += 1
                print(f"WRONG: {launch}: {wrong}\n{text}", flush=True)
            elif launch.done_to_it:
                print(f"{time.monotonic() - started:7.1f} s: {launch}: well", flush=True)
        left = [str(path) for path in folder.rglob("*") if path.is_file()]
        if left:
            bad += 1
            print("WRONG: files are left:", *left, sep="\n")
    print(f"{launches} launches in {time.monotonic() - started:.0f} s, {faults} faults, "
          f"{bad} went wrong; " + ", ".join(f"{n} {what}" for what, n in sorted(count.items())))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
