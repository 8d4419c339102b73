"""What bench_kernels does, in torch on one thread: attention and products.

Started by bench/compare_torch; prints lines "<name> 1 <us>": the least CPU time of many calls.
"""
import time

import torch
import torch.nn.functional as F


def best(body, seconds=0.6):
    body()
    least, end = 1e9, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.process_time()  # a busy machine does not count
        body()
        took = time.process_time() - start
        if took > 0:  # a virtual machine's clock may stand still
            least = min(least, took)
    return least * 1e6


def attention():
    q, k, v = (torch.randn(1, 8, 2048, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 8, 2048, 64)
    mask = (torch.arange(2048) < 1500).view(1, 1, 1, 2048)

    def step(**how):
        q.grad = k.grad = v.grad = None
        F.scaled_dot_product_attention(q, k, v, **how).backward(dout)

    def forward():
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    print("attention 1", best(lambda: step(is_causal=True), 3))
    print("attention_forward 1", best(forward))
    print("attention_mask 1", best(lambda: step(attn_mask=mask), 3))


def products():
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        for m, k, n in ((512, 1024, 1024), (64, 576, 1536), (1, 576, 1536), (1, 576, 49152)):
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            with torch.no_grad():
                print(f"{name}_{m}x{k}x{n} 1", best(lambda: F.linear(x, w)))


torch.set_num_threads(1)
torch.manual_seed(1)
attention()
products()
