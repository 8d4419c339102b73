#!/usr/bin/env python3
"""Copies the samples of some ops out of a collection of known answers (its README describes the
format) into tests/data/ops: one manifest.json and one samples.safetensors.

    scripts/select_torch_samples.py COLLECTION tests/data/ops
"""
import json
import os
import struct
import sys

# What ops/*/cases.cc and tests/parallel/optim_test.cc can take.
OPS = """
abs add amax arange bfloat16 bmm bool cat clip_grad_norm_ clone contiguous cross_entropy div double
embedding eq exp expand flatten float full ge gelu gt half int layer_norm le linear log log_softmax
logical_not long lt masked_fill matmul maximum mean minimum mm mul mv ne neg nll_loss ones ones_like
permute pow ravel relu reshape rms_norm rsqrt rsub scaled_dot_product_attention select sigmoid silu
slice softmax split split_with_sizes sqrt squeeze stack sub sum tanh to transpose swapaxes
true_divide unflatten unsqueeze view where zeros zeros_like
AdamW SGD
""".split()


def load(path):
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(size))
        data = f.read()
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[slice(*v["data_offsets"])]) for k, v in header.items()}


def name_of(op):
    return op.get("op") or op["call"].split(".")[-1]


def main():
    source, target = sys.argv[1:]
    with open(os.path.join(source, "manifest.json")) as f:
        manifest = json.load(f)
    ops = [op for op in manifest["ops"] if name_of(op) in OPS or op["call"].split(".")[-1] in OPS]
    missing = set(OPS) - {name_of(op) for op in ops} - {op["call"].split(".")[-1] for op in ops}
    if missing:
        sys.exit(f"not in the collection: {sorted(missing)}")
    tensors = {}
    for group in sorted({op["group"] for op in ops}):
        tensors.update(load(os.path.join(source, group + ".safetensors")))
    text = json.dumps(ops)
    used = sorted(k for k in tensors if f'"{k}"' in text)
    os.makedirs(target, exist_ok=True)
    with open(os.path.join(target, "manifest.json"), "w") as f:
        f.write('{"made_with": ' + json.dumps(manifest["made_with"]) + ', "ops": [\n')
        f.write(",\n".join(json.dumps(op, separators=(",", ":")) for op in ops) + "\n]}\n")
    header, offset = {}, 0
    for key in used:
        dtype, shape, data = tensors[key]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(os.path.join(target, "samples.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for key in used:
            f.write(tensors[key][2])
    samples = sum(len(op["samples"]) for op in ops)
    print(f"{len(ops)} ops, {samples} samples, {len(used)} tensors, {offset} bytes of data")


if __name__ == "__main__":
    main()
