"""Two-rank redistributions of torch DTensor over gloo: what bench_collectives does on ours.

Started by bench/compare_torch once per rank; rank 0 prints lines "<move> <bytes> <us>".
"""
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

SIZES = ((32, 100), (512, 30), (4096, 2))  # side of a square float32 matrix, calls per batch
MOVES = (("P->R", Partial(), Replicate()), ("S->R", Shard(0), Replicate()),
         ("P->S", Partial(), Shard(0)), ("S->S", Shard(0), Shard(1)))


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for side, iterations in SIZES:
        for name, source, target in MOVES:
            rows = side if isinstance(source, Partial) else side // world
            x = DTensor.from_local(torch.ones(rows, side), mesh, [source], run_check=False)
            x.redistribute(mesh, [target])
            times = []
            for _ in range(3):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(iterations):
                    x.redistribute(mesh, [target])
                times.append((time.perf_counter() - start) / iterations)
            if rank == 0:
                print(name, 4 * side * side, f"{statistics.median(times) * 1e6:.3f}", flush=True)
    dist.barrier()
    # gloo's threads sometimes end the process with std::terminate on a regular exit.
    os._exit(0)


if __name__ == "__main__":
    main()
