"""Random numbers that torch draws on this machine's GPU, as a file for examples/rng_check.

    python bench/torch_rng.py FILE

Every operation and dtype at four sizes, the last beyond what the GPU has threads; of many numbers
some. The format is that of tests/data/rng-vectors.json; docs/reference/random.md tells what decides
the numbers.
"""
import json
import random
import sys

import torch

if len(sys.argv) != 2:
    sys.exit(__doc__)
if not torch.cuda.is_available():
    sys.exit("torch_rng.py: torch has no CUDA device")

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FLOATS = (F64, F32, BF16, F16)
WHOLES = (torch.int64, torch.int32, torch.uint8)
# By significand: sin, cos and log of a GPU and of a CPU differ in the last places.
RELATIVE = {F64: 1e-13, F32: 2e-6, BF16: 2**-7, F16: 2**-9}
# Where that is not what differs: torch's logarithm of float32 has an absolute error, and near its
# poles the tangent has the argument's, by the square of the value.
TOLERANCES = {("exponential_", F32): "3e-7 of 1 + |value|",
              ("cauchy_", F32): "1e-6 of 1 + value^2", ("cauchy_", F64): "1e-15 of 1 + value^2"}
GPU = torch.cuda.get_device_properties(0)
PROFILE = f"custom:{GPU.multi_processor_count}x{GPU.max_threads_per_multi_processor}"
CAP = GPU.multi_processor_count * GPU.max_threads_per_multi_processor
SIZES = (1, 1000, 4 * CAP + 3, 9 * CAP + 1)

# name, arguments in the file, draw(x), dtypes, whether bits are the same
OPS = (
    ("uniform_", {"from": 0.0, "to": 1.0}, lambda x: x.uniform_(0, 1), FLOATS, True),
    ("normal_", {"mean": 0.0, "std": 1.0}, lambda x: x.normal_(0, 1), FLOATS, False),
    ("log_normal_", {"mean": 0.5, "std": 0.25}, lambda x: x.log_normal_(0.5, 0.25), FLOATS, False),
    ("exponential_", {"lambda": 1.5}, lambda x: x.exponential_(1.5), FLOATS, False),
    ("cauchy_", {"median": 1.0, "sigma": 2.0}, lambda x: x.cauchy_(1, 2), FLOATS, False),
    ("geometric_", {"p": 0.25}, lambda x: x.geometric_(0.25), (F64, F32), False),
    ("bernoulli_scalar", {"p": 0.3}, lambda x: x.bernoulli_(0.3), FLOATS + WHOLES, True),
    ("random_", {}, lambda x: x.random_(), FLOATS + WHOLES, True),
    ("random_from_to", {"from": -5, "to": 100}, lambda x: x.random_(-5, 100),
     (F64, F32, torch.int64, torch.int32), True),
    ("random_from_to", {"from": 0, "to": 2**40}, lambda x: x.random_(0, 2**40), (torch.int64,), True),
)


def dropout(x):
    return torch.native_dropout(torch.ones_like(x), 0.1, True)[1]


OPS += (("native_dropout_mask", {"p": 0.1}, dropout, FLOATS, True),)


def bits(x):
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return [hex(v & (1 << 8 * x.element_size()) - 1) for v in x.contiguous().view(width).tolist()]


def vector(number, op, n):
    name, arguments, draw, _, exact = op[0], op[1], op[2], op[3], op[4]
    dtype = op[5]
    generator = torch.cuda.default_generators[0]
    seed = 1000 + number
    torch.cuda.manual_seed(seed)
    drawn = draw(torch.empty(n, dtype=dtype, device="cuda"))
    picked = list(range(n)) if n <= 64 else sorted(random.Random(number).sample(range(n), 64))
    some = drawn[torch.tensor(picked, device="cuda")].cpu()
    made = {"id": f"{name}.{str(dtype)[6:]}.{n}.{number}", "op": name, "dtype": str(dtype)[6:],
            "shape": [n], "numel": n, "seed": seed, "offset": 0,
            "offset_after": generator.get_offset(), "params": arguments, "profile": PROFILE,
            "indices": picked, "exact": exact,
            "values": some.tolist() if dtype in WHOLES or some.dtype == torch.bool
            else some.double().tolist()}
    if exact and some.dtype in FLOATS:
        made["bits"] = bits(some)
    if not exact:
        usual = 8 * RELATIVE[dtype] if name in ("normal_", "cauchy_") \
            else f"{RELATIVE[dtype]} relative"
        made["abs_tol"] = TOLERANCES.get((name, dtype), usual)
    return made


def main():
    vectors = []
    for op in OPS:
        for dtype in op[3]:
            for n in SIZES:
                vectors.append(vector(len(vectors), (*op, dtype), n))
    with open(sys.argv[1], "w") as file:
        json.dump({"about": f"torch {torch.__version__} on {GPU.name}, written by bench/torch_rng.py",
                   "vectors": vectors}, file)
        file.write("\n")
    print(f"{len(vectors)} vectors of {GPU.name}, torch {torch.__version__}")


main()
