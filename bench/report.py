"""What the comparing benches share: running programs, reading their lines, printing ratios."""
import json
import statistics
import subprocess


def run(command, env=None, timeout=900):
    """stdout of a program; raises with its stderr if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def read_lines(text):
    """{(name, bytes): microseconds} of lines "<name> <bytes> <us>"."""
    found = {}
    for line in text.splitlines():
        parts = line.split()
        if len(parts) == 3 and parts[1].isdigit():
            found[parts[0], int(parts[1])] = float(parts[2])
    return found


class Report:
    """Pairs of measurements taken one after the other; per row the medians, the median of the
    pairs' ratios, the goal, and PASS or miss. Measured are times or, with rates=True, rates: a ratio
    above 1 says that ours is faster."""

    def __init__(self, title, theirs, ours, rates=False):
        self.title, self.theirs, self.ours, self.rates = title, theirs, ours, rates
        self.rows = {}

    def add(self, name, theirs, ours, goal=None):
        self.rows.setdefault(name, (goal, []))[1].append((theirs, ours))

    def results(self):
        out = {}
        for name, (goal, pairs) in self.rows.items():
            theirs, ours = (statistics.median(x) for x in zip(*pairs))
            out[name] = {"theirs": round(theirs, 4), "ours": round(ours, 4), "goal": goal,
                         "ratio": round(statistics.median(
                             o / t if self.rates else t / o for t, o in pairs), 3)}
        return out

    def print(self):
        print(f"{self.title:36} {self.theirs:>12} {self.ours:>12} {'ratio':>8} {'goal':>6}")
        missed = 0
        for name, r in self.results().items():
            mark = ""
            if r["goal"] is not None:
                mark = "PASS" if r["ratio"] >= r["goal"] else "miss"
                missed += mark == "miss"
            goal = "-" if r["goal"] is None else f"{r['goal']:g}"
            print(f"{name:36} {r['theirs']:12.3f} {r['ours']:12.3f} {r['ratio']:8.2f} "
                  f"{goal:>6} {mark}", flush=True)
        return missed

    def finish(self, path=None):
        missed = self.print()
        if path:
            save(path, {self.title: self.results()})
        return 1 if missed else 0


def save(path, results):
    with open(path, "w") as f:
        json.dump(results, f, indent=2)
        f.write("\n")
