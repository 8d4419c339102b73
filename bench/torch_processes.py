"""Collectives of two processes over gloo by torch.distributed: what bench_processes does on ours.

Started by bench/compare_torch once per rank; rank 0 prints lines "<name> <bytes> <us>".
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

SIZES = ((4 << 10, 2000), (1 << 20, 40), (64 << 20, 1))  # bytes, calls per batch


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for size, iterations in SIZES:
        whole, part = torch.ones(size // 4), torch.ones(size // 4 // world)
        calls = {"all_reduce": lambda: dist.all_reduce(whole),
                 "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
                 "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole)}
        for name, call in calls.items():
            times = []
            for _ in range(rounds + 1):
                whole.fill_(1.0)
                dist.barrier()
                start = time.perf_counter()
                for _ in range(iterations):
                    call()
                times.append((time.perf_counter() - start) / iterations)
            if rank == 0:  # the first warms up
                print(name, size, f"{statistics.median(times[1:]) * 1e6:.3f}", flush=True)
    dist.barrier()
    # gloo's threads sometimes end the process with std::terminate on a regular exit.
    os._exit(0)


if __name__ == "__main__":
    main()
