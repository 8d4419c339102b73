"""One training step of the Llama-like model on torch DTensor tensor parallel (CPU, gloo).

Started by bench/compare_torch once per rank; prints the median milliseconds of a step on rank 0.
"""
import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, loss_parallel,
                                               parallelize_module)


class Block(nn.Module):
    def __init__(self, hidden, ffn, heads):
        super().__init__()
        self.head_dim = hidden // heads
        self.norm1 = nn.RMSNorm(hidden)
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, hidden, bias=False)
        self.wv = nn.Linear(hidden, hidden, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(b, s, -1, self.head_dim).transpose(1, 2)
                   for w in (self.wq, self.wk, self.wv))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(o.transpose(1, 2).reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, vocab, hidden, ffn, layers, heads):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, ffn, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model, mesh):
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for i in range(len(model.blocks)):
        for name in ("wq", "wk", "wv", "gate", "up"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel()
        for name in ("wo", "down"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def main():
    p = argparse.ArgumentParser()
    for name, default in (("hidden", 1024), ("ffn", 2688), ("vocab", 4096), ("layers", 2),
                          ("heads", 8), ("seq", 512), ("steps", 5)):
        p.add_argument("--" + name, type=int, default=default)
    a = p.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model(a.vocab, a.hidden, a.ffn, a.layers, a.heads)
    if world > 1:
        parallelize(model, mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, a.vocab, (1, a.seq + 1))
    times = []
    for _ in range(a.steps + 2):
        dist.barrier()
        start = time.perf_counter()
        if world > 1:
            with loss_parallel():
                logits = model(ids[:, :-1])
                F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        else:
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optim.step()
        optim.zero_grad()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(f"ms {1000 * statistics.median(times[2:]):.3f}", flush=True)
    dist.barrier()
    # gloo's threads sometimes end the process with std::terminate on a regular exit.
    os._exit(0)


if __name__ == "__main__":
    main()
