"""One-rank costs of torch DTensor ops on a fake process group: what bench_dispatch does on ours.

Started by bench/compare_torch; prints lines "<mode> <world> <us>": the median of many short
batches.
"""
import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def timed(body, iterations, batches=9):
    body()
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(iterations):
            body()
        times.append((time.perf_counter() - start) / iterations)
    return statistics.median(times) * 1e6


def misses(op, mesh, n=40):
    """Every call has shapes of its own; the tensors are made before."""
    xs = [DTensor.from_local(torch.ones(1 + i % 100, 11 + i // 100), mesh, [Shard(0)],
                             run_check=False)
          for i in range(n)]
    times = []
    for x in xs:
        start = time.perf_counter()
        op(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--world", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=a.world)
    mesh = init_device_mesh("cpu", (a.world,), mesh_dim_names=("tp",))
    local = torch.ones(10 // a.world, 10)  # of a global [10, 10]
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    y = DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False)
    whole = DTensor.from_local(torch.ones(10, 10), mesh, [Replicate()], run_check=False)
    pending = DTensor.from_local(torch.ones(10, 10), mesh, [Partial()], run_check=False)
    w = x.detach().requires_grad_()
    modes = {
        "add": (lambda: x + y, 300),
        "mm": (lambda: x @ whole, 300),
        "add_grad": (lambda: w + y, 300),
        "from_local": (lambda: DTensor.from_local(local, mesh, [Shard(0)], run_check=False), 300),
        "view": (lambda: x.view(10, 2, 5), 300),
        "detach": (lambda: x.detach(), 300),
        "add_": (lambda: x.add_(y), 300),
        "redistribute": (lambda: x.redistribute(mesh, [Replicate()]), 50),
        "redistribute_rs": (lambda: whole.redistribute(mesh, [Shard(0)]), 50),
        "redistribute_pr": (lambda: pending.redistribute(mesh, [Replicate()]), 50),
    }
    for name, (body, iterations) in modes.items():
        print(name, a.world, f"{timed(body, iterations):.4f}")
    print("miss", a.world, f"{misses(lambda t: t + t, mesh):.4f}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
