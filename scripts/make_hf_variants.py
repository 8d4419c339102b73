#!/usr/bin/env python3
"""Writes tests/data/hf/variants: tiny Llama and GPT-2 folders whose configs say what the larger
ones beside them do not, with logits, losses and gradients that transformers computes of them.

  python3 -m venv VENV && VENV/bin/pip install torch transformers safetensors
  VENV/bin/python scripts/make_hf_variants.py

A folder without model.safetensors has the weights of the one that its golden.json names.
"""
import contextlib
import json
import pathlib
import shutil

import safetensors.torch
import torch
import transformers

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "hf" / "variants"
BATCH, SEQ, VOCAB = 2, 15, 43
PROMPT = 8  # of the dynamic variant: the tokens after it come one by one
# Of the rows of variants that look at the number of tokens: of the first ones 13, beyond the
# positions of one, and 9.
PADDING = {"llama-dynamic": (2, 9), "llama-longrope": (6, 9)}

LLAMA = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=38, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             attention_bias=True, mlp_bias=True, attention_dropout=0.1)
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_inner=38, n_layer=2, n_head=4, n_positions=24)


def rope(kind, theta=100.0, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


# name -> config, whose weights (its own where it is None), and the dtype that they are stored in.
VARIANTS = {
    "llama": (LLAMA | rope("default"), None, torch.float32),
    "llama-linear": (LLAMA | rope("linear", factor=3.0) | {"pad_token_id": 3}, "llama",
                     torch.float32),
    "llama-dynamic": (LLAMA | rope("dynamic", factor=2.0) | {"max_position_embeddings": 10},
                      "llama", torch.float32),
    "llama-yarn": (LLAMA | rope("yarn", factor=4.0, original_max_position_embeddings=16,
                                beta_fast=2.0, beta_slow=0.25), "llama", torch.float32),
    "llama-yarn-mscale": (LLAMA | rope("yarn", factor=None, original_max_position_embeddings=16,
                                       beta_fast=1.5, beta_slow=0.1, mscale=1.5, mscale_all_dim=0.5,
                                       truncate=False), "llama", torch.float32),
    "llama-longrope": (LLAMA | rope("longrope", original_max_position_embeddings=12,
                                    short_factor=[1.0, 1.25, 1.5, 1.75],
                                    long_factor=[1.5, 2.0, 3.0, 4.0]), "llama", torch.float32),
    "llama-f16": (LLAMA | rope("default") | {"mlp_bias": False, "num_key_value_heads": 1}, None,
                  torch.float16),
    "llama-bf16": (LLAMA | rope("default") | {"attention_bias": False, "tie_word_embeddings": True,
                                              "head_dim": 6, "pad_token_id": 3}, None,
                   torch.bfloat16),
    "gpt2": (GPT2, None, torch.float32),
    "gpt2-gelu_pytorch_tanh": (GPT2 | {"activation_function": "gelu_pytorch_tanh"}, "gpt2",
                               torch.float32),
    "gpt2-gelu": (GPT2 | {"activation_function": "gelu"}, "gpt2", torch.float32),
    "gpt2-relu": (GPT2 | {"activation_function": "relu"}, "gpt2", torch.float32),
    "gpt2-silu": (GPT2 | {"activation_function": "silu"}, "gpt2", torch.float32),
    "gpt2-by-layer": (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "gpt2", torch.float32),
    "gpt2-unscaled": (GPT2 | {"scale_attn_weights": False}, "gpt2", torch.float32),
    "gpt2-f16": (GPT2 | {"tie_word_embeddings": False}, None, torch.float16),
}


@contextlib.contextmanager
def double_for_single():
    """What transformers computes in float32 whatever the model's dtype is (norms, rotations,
    softmax) is computed in float64."""
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept
        torch.set_default_dtype(torch.float32)


def config_of(name):
    kind = transformers.LlamaConfig if name.startswith("llama") else transformers.GPT2Config
    return kind(**VARIANTS[name][0], attn_implementation="eager")


def model_of(config):
    kind = (transformers.LlamaForCausalLM if config.model_type == "llama"
            else transformers.GPT2LMHeadModel)
    return kind(config).eval()


def copy_of(model):
    """One that has seen no tokens: rotations remember how many there were."""
    fresh = model_of(model.config)
    fresh.load_state_dict(model.state_dict())
    return fresh


def draw(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            norm = "norm.weight" in name or ".ln_" in name and name.endswith("weight")
            p.copy_(1 + 0.2 * noise if norm else 0.2 * noise)


def run(model, ids, labels):
    """Logits, loss (of float32 logits at least, as transformers takes it) and gradients."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(),
                                             labels[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return logits.detach(), loss.item(), {n: p.grad.double() for n, p in model.named_parameters()}


def off(x, exact):
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()


def in_steps(model, ids):
    """Logits of the tokens after the prompt, each computed with the cache of those before."""
    out = model(input_ids=ids[:, :PROMPT], use_cache=True)
    logits = []
    for i in range(PROMPT, ids.shape[1]):
        out = model(input_ids=ids[:, i:i + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1).detach()


def padded(model, ids, padding):
    """Logits of the tokens that are none of the padding's."""
    mask = torch.stack([torch.arange(SEQ) >= n for n in padding])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions,
                   use_cache=False).logits
    return logits[mask].detach()


def write(name, number, exact_of):
    config, source, dtype = config_of(name), VARIANTS[name][1], VARIANTS[name][2]
    folder = OUT / name
    folder.mkdir(parents=True)
    plain = model_of(config)
    if source is None:
        draw(plain, 100 + number)
    else:
        plain.load_state_dict(safetensors.torch.load_file(OUT / source / "model.safetensors"),
                              strict=False)
        plain.tie_weights()
    plain.to(dtype).save_pretrained(folder)
    if source is not None:
        (folder / "model.safetensors").unlink()
        (folder / "generation_config.json").unlink()
    weights = plain.state_dict()
    with double_for_single():
        exact = model_of(config)
        exact.load_state_dict({n: w.double() for n, w in weights.items()})
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    ids[1, ::5] = 3  # which some configs pad with
    labels = ids.clone()
    labels[0, 4:7] = -100
    with double_for_single():
        logits, loss, grads = run(exact, ids, labels)
    assert logits.dtype == torch.float64 and all(g.dtype == torch.float64 for g in grads.values())
    tensors = {"input_ids": ids, "labels": labels, "logits": logits}
    golden = {"weights": source or name, "loss": loss, "gradients": {}}
    for n, g in grads.items():
        wave = torch.sin(torch.arange(1, g.numel() + 1, dtype=torch.float64))
        golden["gradients"][n] = {"norm": g.norm().item(), "wave": (g.flatten() @ wave).item()}
    with double_for_single():
        if name == "llama-dynamic":
            tensors["steps"] = in_steps(copy_of(exact), ids)
        if name in PADDING:
            tensors["padded"] = padded(copy_of(exact), ids, PADDING[name])

    # As the library itself computes it, in float32 and in the dtype of the file.
    if dtype == torch.float32:
        assert off(run(plain, ids, labels)[0], logits) < 1e-5, name
    else:
        narrow = type(plain).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        near, near_loss, near_grads = run(narrow.eval(), ids, labels)
        tensors["logits_narrow"] = near
        golden["narrow"] = {
            "logits": off(near, logits), "loss": abs(near_loss - loss) / loss,
            "gradients": {n: ((g - grads[n]).norm() / grads[n].norm()).item()
                          for n, g in near_grads.items()}}
    # What the config says must show.
    exact_of[name] = logits
    same = "gpt2" if name == "gpt2-gelu_pytorch_tanh" else None
    if source is not None:
        difference = off(logits, exact_of[source])
        print(f"{name}: {difference:.2e} from {source}")
        assert (difference < 1e-12) if same else (difference > 1e-4), name
    safetensors.torch.save_file(tensors, folder / "golden.safetensors")
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


transformers.logging.set_verbosity_error()
shutil.rmtree(OUT, ignore_errors=True)
exact_of = {}
for number, name in enumerate(VARIANTS):
    write(name, number, exact_of)
