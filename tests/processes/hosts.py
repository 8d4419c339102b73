#!/usr/bin/env python3
"""Trainings on two and three hosts: network namespaces of this machine, joined by a switch, each by a
link of 1 Gbit/s (and 5 ms, where the kernel can delay packets).

    hosts.py DTENSOR_RUN PROCESSES_TRAINING CALIBRATE

A training has the losses of threads, bit by bit; the ranks know which of them share a host, and the
order of mesh dims that Explain finds faster moves fewer bytes between the hosts than the other one,
counted at the links; what hosts have for each other they send once; `calibrate` measures the links between hosts; and when a cable is cut in the
middle of a step, all end within the deadline, and those who can still hear each other name who is
cut off.
Wants root, ip and tc (apt: iproute2); exits with 77 where it may not make namespaces."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

TIMEOUT_S = 3  # of waits for peers, where a cable is cut
RUNS_S = 120   # a run that takes longer hangs


def sh(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


class Hosts:
    """Namespaces host0, host1, ... with addresses 10.77.0.1, .2, ... on a switch."""

    def __init__(self, count):
        self.names = [f"dt{os.getpid()}h{i}" for i in range(count)]
        self.switch = f"dt{os.getpid()}sw"
        self.limits = ""
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self):
        sh("ip", "netns", "add", self.switch)
        sh("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        sh("ip", "-n", self.switch, "link", "set", "switch", "up")
        for i, name in enumerate(self.names):
            sh("ip", "netns", "add", name)
            sh("ip", "link", "add", "eth0", "netns", name, "type", "veth",
               "peer", "name", f"port{i}", "netns", self.switch)
            sh("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "switch", "up")
            sh("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
            limit = ["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root"]
            try:
                sh(*limit, "netem", "rate", "1gbit", "delay", "5ms", "limit", "10000")
                self.limits = "1 Gbit/s, 5 ms"
            except subprocess.CalledProcessError:  # no such module
                sh(*limit, "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms")
                self.limits = "1 Gbit/s; this kernel delays no packets (no sch_netem)"

    def address(self, i):
        return f"10.77.0.{i + 1}"

    def sent_bytes(self):
        """What has left all hosts so far."""
        total = 0
        for name in self.names:
            link = json.loads(sh("ip", "-n", name, "-s", "-j", "link", "show", "eth0"))
            total += link[0]["stats64"]["tx"]["bytes"]
        return total

    def cut(self, i):
        sh("ip", "-n", self.switch, "link", "set", f"port{i}", "down")

    def close(self):
        for name in self.names + [self.switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Run:
    """The program on all hosts, two ranks on each; each launcher's output in a file."""

    def __init__(self, hosts, launcher, command, folder, timeout_s=60, **more):
        environment = dict(os.environ, DTENSOR_TOKEN="of hosts.py",
                           DTENSOR_TIMEOUT_S=str(timeout_s), **more)
        self.outputs, self.processes = [], []
        for i, name in enumerate(hosts.names):
            self.outputs.append(folder / f"host{i}.txt")
            flags = ["--nnodes", str(len(hosts.names)), "--node-rank", str(i), "--nproc-per-node",
                     "2", "--rdzv-endpoint", f"{hosts.address(0)}:29400"]
            with open(self.outputs[-1], "w") as output:
                self.processes.append(subprocess.Popen(
                    ["ip", "netns", "exec", name, launcher, *flags, "--", *command],
                    stdout=output, stderr=subprocess.STDOUT, env=environment))

    def text(self, i):
        return self.outputs[i].read_text()

    def end(self):
        """Exit codes, and how long each took to end from now on."""
        start, codes, took = time.monotonic(), {}, {}
        while len(codes) < len(self.processes):
            for i, process in enumerate(self.processes):
                if i not in codes and process.poll() is not None:
                    codes[i], took[i] = process.returncode, time.monotonic() - start
            if time.monotonic() - start > RUNS_S:
                for process in self.processes:
                    process.kill()
                fail("it hangs", *(self.text(i) for i in range(len(self.processes))))
            time.sleep(0.02)
        return [codes[i] for i in sorted(codes)], [took[i] for i in sorted(took)]


def fail(*why):
    print(*why, sep="\n")
    sys.exit(1)


def line_of(text, first):
    """The last line that has `first`, from there on."""
    lines = [line[line.index(first):] for line in text.splitlines() if first in line]
    return lines[-1] if lines else ""


def calibrates(hosts, launcher, calibrate, folder):
    """No machine is so busy that a link carries more than it can."""
    n, most = len(hosts.names), 2 << 20
    file = folder / f"cost{n}.json"
    run = Run(hosts, launcher, [calibrate, f"--ranks={2 * n}", f"--out={file}", "--repeats=1",
                                f"--most_bytes={most}"], folder)
    codes, _ = run.end()
    if any(codes):
        fail(f"calibrate: exit codes {codes}", *(run.text(i) for i in range(n)))
    inside, between = run.text(0).split("intra_node: ")
    took = [float(re.search(rf"all_gather +{size} +([\d.]+)", text)[1])
            for size, text in ((most, inside), (most * (n - 1), between))]
    print(f"{n} hosts, calibrate: an all-gather of 2 MiB takes {took[0] / 1000:.1f} ms inside of one, "
          f"{took[1] / 1000:.1f} ms between them")
    # 1 Gbit/s are 125 bytes/us, after what the limit lets pass at once.
    if json.loads(file.read_text())["ranks_per_node"] != 2 or took[1] < (most - (512 << 10)) / 125:
        fail(file.read_text(), run.text(0))


def trains(hosts, launcher, program, folder):
    n = len(hosts.names)
    cost = folder / "cost.json"  # not what was measured: on a busy machine all links are slow
    cost.write_text(json.dumps({"intra_node.latency_us": 50, "intra_node.bytes_per_us": 1500,
                                "inter_node.latency_us": 5000, "inter_node.bytes_per_us": 125,
                                "ranks_per_node": 1}))
    sent, modelled = {}, {}
    for mesh in (f"dp={n},tp=2", f"tp=2,dp={n}"):
        threads = sh(program, "none", "1", mesh, "8", f"--ranks={2 * n}")
        explains = Run(hosts, launcher, [program, "explain", "1", mesh, "8"], folder,
                       DTENSOR_COST_MODEL=str(cost))
        codes, _ = explains.end()
        explained = line_of(explains.text(0), "modelled ")
        if any(codes) or not explained.endswith("2 ranks on a machine"):
            fail(f"{mesh}: exit codes {codes}", *(explains.text(i) for i in range(n)))
        modelled[mesh] = float(explained.split()[1])
        before = hosts.sent_bytes()
        run = Run(hosts, launcher, [program, "none", "1", mesh, "8"], folder)
        codes, _ = run.end()
        sent[mesh] = hosts.sent_bytes() - before
        if any(codes):
            fail(f"{mesh}: exit codes {codes}", *(run.text(i) for i in range(n)))
        losses = line_of(run.text(0), "losses ")
        if not losses or losses != line_of(threads, "losses "):
            fail(f"{mesh}: {losses}, on threads {line_of(threads, 'losses ')}")
        print(f"{n} hosts, {mesh}: the losses of threads; {sent[mesh]} bytes between hosts in 8 steps; "
              f"collectives of a step by Explain {modelled[mesh] / 1000:.0f} ms")
    if min(sent, key=sent.get) != min(modelled, key=modelled.get):
        fail("the order that Explain finds faster moves more bytes between hosts")


def sends_once(hosts, launcher, program, folder):
    """What hosts have for each other they send once: as though all ranks were on one node it goes to
    each rank."""
    n, mib = len(hosts.names), 16
    sent, told = {}, {}
    for node in ("", "all"):
        before = hosts.sent_bytes()
        run = Run(hosts, launcher, [program, "sums", str(mib)], folder,
                  **({"DTENSOR_NODE": node} if node else {}))
        codes, _ = run.end()
        sent[node] = hosts.sent_bytes() - before
        told[node] = run.text(0)
        if any(codes):
            fail(f"sums: exit codes {codes}", *(run.text(i) for i in range(n)))
        print(f"{n} hosts, all-reduce and all-gather of {mib} MiB"
              f"{' as on one node' if node else ''}: {line_of(told[node], 'sums ')}, "
              f"{sent[node] >> 20} MiB between hosts")
    threads = sh(program, "sums", str(mib), f"--ranks={2 * n}")
    if len({line_of(text, "hash ") for text in (*told.values(), threads)}) != 1:
        fail("the sums are not those of threads", *told.values(), threads)
    # Sums go n - 1 times from one host to the next until they are whole, and n - 1 times until all
    # have them; every host gives its own part to all others.
    all_reduce, gather = 2 * (n - 1), n - 1
    if sent[""] > 1.25 * (all_reduce + gather) * (mib << 20):
        fail(f"{sent['']} bytes between hosts")


def cut(hosts, launcher, program, folder):
    """The last host's cable."""
    n = len(hosts.names)
    command = [program, "none", "1", f"dp={n},tp=2", "100000"]
    run = Run(hosts, launcher, command, folder, TIMEOUT_S)
    start = time.monotonic()
    while "step 3/" not in run.text(0):
        if time.monotonic() - start > RUNS_S or run.processes[0].poll() is not None:
            fail("it does not begin", *(run.text(i) for i in range(n)))
        time.sleep(0.05)
    hosts.cut(n - 1)
    codes, took = run.end()
    texts = [run.text(i) for i in range(n)]
    # Alone or among others that wait for them: "rank 4", "ranks 2, 4". The error is that of the wait
    # that ended first, which may be for a rank that waits itself: then its report goes on to say who
    # holds up all.
    lost = re.compile(rf"\branks? (\d+, )*({2 * n - 2}|{2 * n - 1})\b")
    holding = re.compile(lost.pattern + r"(, \d+)* holds? up the others")
    if not all(codes):
        fail(f"exit codes {codes}", *texts)
    for i in range(n - 1):
        lines = texts[i].splitlines()
        errors = [k for k, line in enumerate(lines) if "error: " in line]
        if not errors or not all(lost.search(lines[k]) or
                                 any(holding.search(line) for line in lines[k + 1:k + 3])
                                 for k in errors):
            fail(f"host {i} does not name the ranks that are cut off", *texts)
    if "rank 0" not in texts[n - 1] and "the launcher of node 0 is gone" not in texts[n - 1]:
        fail(f"host {n - 1} names neither rank 0 nor its host, which it cannot reach", *texts)
    # Errors come at the deadline; the launchers give their processes, and each other, a while.
    print(f"{n} hosts, cable of the last cut: ended after "
          + ", ".join(f"{seconds:.1f}" for seconds in took) + f" s (deadline {TIMEOUT_S} s)")
    if max(took) > TIMEOUT_S + 15:
        fail(f"not within the deadline: {took}", *texts)


def main():
    launcher, program, calibrate = (os.path.abspath(path) for path in sys.argv[1:4])
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("skipped: wants root, ip and tc (apt: iproute2)")
        sys.exit(77)
    try:
        Hosts(2).close()
    except subprocess.CalledProcessError as error:
        print("skipped:", error.stderr.strip())
        sys.exit(77)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for count in (2, 3):
            hosts = Hosts(count)
            try:
                print(f"{count} hosts, 2 ranks each, links of {hosts.limits}")
                calibrates(hosts, launcher, calibrate, folder)
                trains(hosts, launcher, program, folder)
                sends_once(hosts, launcher, program, folder)
                cut(hosts, launcher, program, folder)
            finally:
                hosts.close()


if __name__ == "__main__":
    main()
