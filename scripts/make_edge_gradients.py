#!/usr/bin/env python3
"""Writes tests/data/ops/edge_gradients.json: values and gradients of PyTorch's pointwise ops at NaN,
infinities, zeros of both signs and numbers between, in float64.

    scripts/make_edge_gradients.py          # with a python that has torch

A case: op, number (of ops that take one, else absent), inputs, output, and the gradient of each
input for upstream gradients `dy`. Numbers are strings, because JSON has no NaN.
"""
import itertools
import json
import os

import torch
import torch.nn.functional as F

EDGES = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.5, -1.5, 1.0, 80.0, -700.0]
UPSTREAM = [1.0, -2.0, 0.0, float("inf")]
UNARY = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu,
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
}
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum,
}
NUMBER = {
    "mul_scalar": lambda x, s: x * s, "div_scalar": lambda x, s: x / s,
    "rdiv_scalar": lambda x, s: s / x, "pow_scalar": torch.pow,
    "rpow_scalar": lambda x, s: torch.pow(s, x),
}
NUMBERS = [0.0, 1.0, 2.0, 3.0, 0.5, -1.0, 2.5]


def texts(t):
    return [repr(v) for v in t.tolist()]


def case(op, fn, inputs, dy, number=None):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = fn(*leaves) if number is None else fn(*leaves, number)
    grads = torch.autograd.grad(y, leaves, dy)
    entry = {"op": op, "inputs": [texts(x) for x in inputs], "dy": texts(dy),
             "output": texts(y.detach()), "gradients": [texts(g) for g in grads]}
    if number is not None:
        entry["number"] = repr(number)
    return entry


def columns(rows):
    return [torch.tensor(c, dtype=torch.float64) for c in zip(*rows)]


def main():
    x, dx = columns(itertools.product(EDGES, UPSTREAM))
    a, b, dab = columns(itertools.product(EDGES, EDGES, UPSTREAM))
    cases = [case(op, fn, [x], dx) for op, fn in UNARY.items()]
    cases += [case(op, fn, [a, b], dab) for op, fn in BINARY.items()]
    cases += [case(op, fn, [x], dx, s) for op, fn in NUMBER.items() for s in NUMBERS]
    path = os.path.join(os.path.dirname(__file__), "..", "tests", "data", "ops",
                        "edge_gradients.json")
    with open(path, "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
    print(len(cases), "cases")


if __name__ == "__main__":
    main()
