#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Logits of Hugging Face transformers in bf16 against fp64, on the models of check_gpu_model.

usage: check_gpu_model random --write FOLDER && compare_logits.py FOLDER

Prints, for each model, the largest difference from the fp64 logits and the root of the mean square,
both relative as check_gpu_model prints them, once as the model gives them and once with a product
of lm_head that is not rounded to bf16.
"""
import array
import glob
import json
import os
import sys

try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    sys.exit(f"compare_logits.py: expected the Python packages torch, transformers and "
             f"safetensors: {error}")


def load_model(path, config):
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        tie_word_embeddings=True, max_position_embeddings=32768, **config))
    missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    if unexpected or missing not in ([], ["lm_head.weight"]):
        sys.exit(f"{path}: tensors missing: {missing}, unexpected: {unexpected}")
    model.tie_weights()
    return model.to(device="cuda", dtype=torch.bfloat16).eval()


def describe(found, expected):
    error = found.double() - expected
    return (f"{error.abs().max() / expected.abs().max():.2g} of {expected.abs().max():.1f} "
            f"(rms {(error.square().sum() / expected.square().sum()).sqrt():.2g})")


def compare(path):
    with open(path, encoding="utf-8") as file:
        described = json.load(file)
    base = path[:-len(".json")]
    model = load_model(base + ".safetensors", described["config"])
    logits = array.array("d")
    with open(base + ".logits", "rb") as file:
        logits.frombytes(file.read())
    ids = torch.tensor([described["ids"]], device="cuda")
    expected = torch.tensor(logits, dtype=torch.float64, device="cuda").view(ids.shape[1], -1)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
            hidden = output.hidden_states[-1][0]
            unrounded = hidden.float() @ model.lm_head.weight.float().T
        print(f"{os.path.basename(base)}, {attention}: {describe(output.logits[0], expected)}, "
              f"logits not rounded {describe(unrounded, expected)}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.backends.cuda.matmul.allow_tf32 = False
    for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.json"))):
        compare(path)


if __name__ == "__main__":
    main()
