"""What bench_gpu does, in torch on a CUDA device.

Started by bench/compare_gpu; prints lines "<name> 1 <us>": the least time of a call, of many in a
row until the device is done; "enqueue..." is what the host takes for a call alone. "gpt2..." is a
training step of GPT-2 (124M), float32 parameters under autocast to bfloat16, fused AdamW; "_graph"
the same through torch.compile.
"""
import argparse
import sys
import time

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="on the CPU, of small tensors, to see it run")
options = parser.parse_args()
if not options.tiny and not torch.cuda.is_available():
    sys.exit("torch_gpu.py: torch has no CUDA device")
torch.set_default_device("cpu" if options.tiny else "cuda")
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(1)


def wait():
    if not options.tiny:
        torch.cuda.synchronize()


def row(name, calls, body, host_only=False):
    calls = 2 if options.tiny else calls
    body()
    wait()
    least = 1e12
    for _ in range(1 if options.tiny else 7):
        begin = time.perf_counter()
        for _ in range(calls):
            body()
        end = time.perf_counter()
        wait()
        if not host_only:
            end = time.perf_counter()
        least = min(least, (end - begin) / calls * 1e6)
    print(name, 1, f"{least:.3f}", flush=True)


def products():
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        for size in (256, 2048, 8192):
            n = size // 256 if options.tiny else size
            a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
            row(f"matmul.{name}_{size}", 10, lambda: a @ b)


def host():
    x, y = torch.ones(10, 10), torch.ones(10, 10)
    row("enqueue.add", 10000, lambda: x + y, True)
    row("enqueue.matmul", 10000, lambda: x @ y, True)


def memory():
    shape = (32, 32) if options.tiny else (8192, 8192)
    x, y = torch.rand(shape), torch.rand(shape)
    row("memory.fill", 20, lambda: torch.zeros(shape))
    row("memory.rand", 20, lambda: torch.rand(shape))
    row("memory.randn", 20, lambda: torch.randn(shape))
    row("memory.add", 20, lambda: x + y)
    row("memory.gelu", 20, lambda: F.gelu(x))
    row("memory.sum_rows", 20, lambda: x.sum(1))
    row("memory.softmax", 20, lambda: x.softmax(1))
    row("memory.layer_norm", 20, lambda: F.layer_norm(x, shape[1:]))
    row("memory.transpose", 20, lambda: x.t().contiguous())


def attention():
    shape = (1, 2, 70, 16) if options.tiny else (8, 12, 1024, 64)
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        q, k, v, dout = (torch.randn(shape).to(dtype) for _ in range(4))
        row(f"attention.{name}_forward", 10,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        for x in (q, k, v):
            x.requires_grad_()

        def step():
            q.grad = k.grad = v.grad = None
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(dout)

        row(f"attention.{name}_step", 10, step)


class Block(torch.nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(h, dim=2))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(o.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(torch.nn.Module):
    def __init__(self, vocab, hidden, layers, heads, positions):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocab, hidden)
        self.positions = torch.nn.Embedding(positions, hidden)
        self.blocks = torch.nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(hidden)
        for table in (self.tokens, self.positions):
            torch.nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def steps():
    batch, seq = (1, 4) if options.tiny else (8, 1024)
    sizes = (24, 16, 1, 4, seq) if options.tiny else (50257, 768, 12, 12, seq)
    ids, targets = (torch.randint(sizes[0], (batch, seq)) for _ in range(2))
    for name in ("step", "graph"):
        model = GPT2(*sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if name == "graph":  # tiny: seen to run without a compiler
            model = torch.compile(model, backend="eager" if options.tiny else "inductor")

        def step():
            optimizer.zero_grad()
            with torch.autocast(ids.device.type, torch.bfloat16):
                loss = model(ids, targets)
            loss.backward()
            optimizer.step()

        row(f"gpt2.bf16_{name}", 5, step)


with torch.no_grad():
    products()
    host()
    memory()
attention()
steps()
