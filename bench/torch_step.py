"""One training step of the Llama of bench_llama_step on torch DTensor tensor parallel (CPU, gloo).

Started by bench/compare_torch once per rank; prints the least milliseconds of a step on rank 0.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput,
                                               RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)


def rotation(seq, size, dtype, theta=10000.0):
    inverse = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(seq, dtype=torch.float64)[:, None] * inverse
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv):
        super().__init__()
        self.head_dim = hidden // heads
        self.repeats = heads // kv
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, kv * self.head_dim, bias=False)
        self.wv = nn.Linear(hidden, kv * self.head_dim, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim).transpose(1, 2)
                   for w in (self.wq, self.wk, self.wv))
        # As torchtitan does: faster on the CPU than enable_gqa.
        k, v = (t.repeat_interleave(self.repeats, 1) for t in (rotate(k, cos, sin), v))
        o = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden, ffn, heads, kv):
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads, kv)
        self.norm2 = nn.RMSNorm(hidden)
        self.mlp = MLP(hidden, ffn)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab, hidden, ffn, layers, heads, kv):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, ffn, heads, kv) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids, cos, sin):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def parallelize(model, mesh, by_sequence):
    """torchtitan's plan for Llama, with or without sequence parallel."""
    stream = Shard(1) if by_sequence else Replicate()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1),
                                    use_local_output=False)}
    if by_sequence:
        plan["norm"] = SequenceParallel()
    for i in range(len(model.blocks)):
        b = f"blocks.{i}."
        for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up"):
            plan[b + name] = ColwiseParallel()
        for name in ("attention.wo", "mlp.down"):
            plan[b + name] = RowwiseParallel(output_layouts=stream)
        if by_sequence:
            plan[b + "norm1"] = plan[b + "norm2"] = SequenceParallel()
            plan[b + "attention"] = PrepareModuleInput(
                input_layouts=(Shard(1), None, None),
                desired_input_layouts=(Replicate(), None, None))
            plan[b + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),),
                                                 desired_input_layouts=(Replicate(),))
    parallelize_module(model, mesh, plan)


def main():
    p = argparse.ArgumentParser()
    for name, default in (("hidden", 1024), ("ffn", 2688), ("vocab", 4096), ("layers", 2),
                          ("heads", 16), ("kv", 4), ("seq", 512), ("steps", 5), ("sp", 0),
                          ("bf16", 0)):
        p.add_argument("--" + name, type=int, default=default)
    a = p.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if a.bf16 else torch.float32
    model = Model(a.vocab, a.hidden, a.ffn, a.layers, a.heads, a.kv).to(dtype)
    parallelize(model, mesh, a.sp)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, a.vocab, (1, a.seq + 1))
    cos, sin = rotation(a.seq, a.hidden // a.heads, dtype)
    times = []
    for _ in range(a.steps + 2):
        dist.barrier()
        start = time.perf_counter()
        with loss_parallel():
            logits = model(ids[:, :-1], cos, sin)
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optim.step()
        optim.zero_grad()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(f"ms {1000 * min(times[2:]):.3f}", flush=True)
    dist.barrier()
    # gloo's threads sometimes end the process with std::terminate on a regular exit.
    os._exit(0)


if __name__ == "__main__":
    main()
