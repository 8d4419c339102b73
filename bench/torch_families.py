"""What bench_families does, in torch on one thread: one function after the other.

Started by bench/compare_torch; prints lines "<family>.<name> 1 <us>": the least CPU time of many
calls.
"""
import sys
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(1)
torch.set_grad_enabled(False)
ONLY = sys.argv[1] if len(sys.argv) > 1 else ""


def row(name, body, seconds=0.2):
    if ONLY not in name:
        return
    body()
    least, end = 1e9, time.perf_counter() + seconds
    while True:
        start = time.process_time()  # a busy machine does not count
        body()
        took = time.process_time() - start
        if took > 0:  # a virtual machine's clock may stand still
            least = min(least, took)
        if time.perf_counter() >= end:
            break
    print(f"{name} 1 {least * 1e6:.3f}", flush=True)


x, y = torch.randn(1024, 1024), torch.randn(1024, 1024)
p = torch.rand(1024, 1024) * 0.98 + 0.01
first = y[0]
for name, body in {
    "add": lambda: x + y, "mul_scalar": lambda: x * 1.5, "div": lambda: x / p,
    "pow_scalar": lambda: p ** 1.7, "pow": lambda: p ** y, "maximum": lambda: torch.maximum(x, y),
    "where": lambda: torch.where(x > 0, x, y), "clamp": lambda: x.clamp(-0.5, 0.5),
    "exp": x.exp, "expm1": x.expm1, "log": p.log, "log1p": p.log1p, "sqrt": p.sqrt,
    "rsqrt": p.rsqrt, "sin": x.sin, "cos": x.cos, "tan": x.tan, "asin": p.asin, "atan": x.atan,
    "atan2": lambda: torch.atan2(x, y), "sinh": x.sinh, "tanh": x.tanh,
    "acosh": lambda: (p + 1).acosh(), "erf": x.erf, "erfc": x.erfc, "erfinv": p.erfinv,
    "lgamma": p.lgamma, "digamma": p.digamma, "logit": p.logit,
    "xlogy": lambda: torch.xlogy(x, p), "logaddexp": lambda: torch.logaddexp(x, y),
    "hypot": lambda: torch.hypot(x, y), "fmod": lambda: torch.fmod(x, p),
    "remainder": lambda: torch.remainder(x, p), "floor_divide": lambda: x // p, "round": x.round,
    "sigmoid": x.sigmoid, "relu": x.relu, "gelu": lambda: F.gelu(x),
    "gelu_tanh": lambda: F.gelu(x, approximate="tanh"), "silu": lambda: F.silu(x),
    "softplus": lambda: F.softplus(x), "mish": lambda: F.mish(x), "elu": lambda: F.elu(x),
    "hardswish": lambda: F.hardswish(x), "logsigmoid": lambda: F.logsigmoid(x),
    "nan_to_num": x.nan_to_num, "isfinite": x.isfinite, "lt": lambda: x < y,
    "lerp": lambda: torch.lerp(x, y, 0.3), "addcmul": lambda: torch.addcmul(x, y, p),
    "broadcast": lambda: x + first, "transposed": lambda: x + y.t(),
}.items():
    row("pointwise." + name, body)

for name, body in {
    "sum_all": x.sum, "sum_rows": lambda: x.sum(1), "sum_columns": lambda: x.sum(0),
    "mean_rows": lambda: x.mean(1), "prod_rows": lambda: x.prod(1), "amax_rows": lambda: x.amax(1),
    "amax_columns": lambda: x.amax(0), "argmax_rows": lambda: x.argmax(1),
    "max_rows": lambda: x.max(1), "var_rows": lambda: x.var(1), "std_all": x.std,
    "norm_all": x.norm, "logsumexp_rows": lambda: x.logsumexp(1),
    "any_rows": lambda: (x > 3).any(1), "count_nonzero": x.count_nonzero,
}.items():
    row("reduction." + name, body)

w, b, classes = torch.rand(1024), torch.rand(1024), torch.randint(0, 1024, (1024,))
for name, body in {
    "softmax": lambda: x.softmax(1), "softmax_columns": lambda: x.softmax(0),
    "log_softmax": lambda: x.log_softmax(1), "layer_norm": lambda: F.layer_norm(x, (1024,), w, b),
    "rms_norm": lambda: F.rms_norm(x, (1024,), w),
    "group_norm": lambda: F.group_norm(x.reshape(16, 64, 1024), 8),
    "cross_entropy": lambda: F.cross_entropy(x, classes),
}.items():
    row("norm." + name, body)

for name, body in {
    "clone": x.clone, "transpose": lambda: x.t().contiguous(),
    "permute": lambda: x.reshape(64, 128, 128).permute(2, 0, 1).contiguous(),
    "cat_rows": lambda: torch.cat([x, y], 0), "cat_columns": lambda: torch.cat([x, y], 1),
    "to_bf16": x.bfloat16, "to_int": x.long, "flip": lambda: x.flip(1),
    "roll": lambda: x.roll(5, 1), "tril": x.tril,
}.items():
    row("copy." + name, body)

for name, body in {
    "sort": lambda: x.sort(1), "argsort_stable": lambda: x.argsort(dim=1, stable=True),
    "topk": lambda: x.topk(32, 1), "kthvalue": lambda: x.kthvalue(100, 1),
    "median": lambda: x.median(1), "cumsum": lambda: x.cumsum(1),
    "cumsum_columns": lambda: x.cumsum(0), "cumprod": lambda: x.cumprod(1),
    "cummax": lambda: x.cummax(1), "logcumsumexp": lambda: x.logcumsumexp(1),
    "searchsorted": lambda: torch.searchsorted(x[0].sort()[0], y),
}.items():
    row("sort." + name, body)

at, at_row = torch.randint(0, 1024, (1024, 1024)), torch.randint(0, 1024, (1024,))
mask = x > 0
for name, body in {
    "gather_columns": lambda: x.gather(1, at), "gather_rows": lambda: x.gather(0, at),
    "index_select": lambda: x.index_select(0, at_row), "embedding": lambda: F.embedding(at_row, x),
    "scatter": lambda: x.scatter(1, at, y), "scatter_add": lambda: x.scatter_add(1, at, y),
    "index_add": lambda: x.index_add(0, at_row, y), "masked_fill": lambda: x.masked_fill(mask, 0),
    "masked_select": lambda: x.masked_select(mask), "nonzero": mask.nonzero,
}.items():
    row("index." + name, body)

image, k3, k1 = torch.randn(8, 32, 64, 64), torch.randn(32, 32, 3, 3), torch.randn(64, 32, 1, 1)
for name, body in {
    "conv2d_3x3": lambda: F.conv2d(image, k3, padding=1), "conv2d_1x1": lambda: F.conv2d(image, k1),
    "conv2d_stride": lambda: F.conv2d(image, k3, stride=2, padding=1),
    "conv_transpose2d": lambda: F.conv_transpose2d(image, k3, stride=2),
    "max_pool2d": lambda: F.max_pool2d(image, 2), "avg_pool2d": lambda: F.avg_pool2d(image, 2),
    "bilinear": lambda: F.interpolate(image, scale_factor=2.0, mode="bilinear"),
}.items():
    row("conv." + name, body)
