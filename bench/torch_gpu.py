"""What bench_gpu does, in torch on a CUDA device.

Started by bench/compare_gpu; prints lines "<name> 1 <us>": the least time of a call, of many in a
row until the device is done; "enqueue..." is what the host takes for a call alone.
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


with torch.no_grad():
    products()
    host()
    memory()
attention()
