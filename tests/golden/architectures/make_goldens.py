#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the golden files of tests/golden/architectures with Hugging Face transformers.

Each case is a tiny random model of one architecture or RoPE variant, stored in bf16, and what
transformers computes over those weights in fp32 arithmetic on the CPU: the logits after a prompt,
the negative log-likelihood of its ids, and a greedy continuation. Needs torch and transformers;
run once, by hand: make_goldens.py OUT_DIR. The tests need only its output.
"""
import json
import os
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

PROMPT_TOKENS = 96
GREEDY_TOKENS = 24
BASE = dict(hidden_size=32, intermediate_size=72, num_hidden_layers=3, vocab_size=260,
            max_position_embeddings=256, initializer_range=0.35, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, torch_dtype="bfloat16")


def rope(kind, theta, **more):
    return dict(rope_type=kind, rope_theta=theta, **more)


CASES = {
    "qwen3": Qwen3Config(**BASE, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         tie_word_embeddings=True, rope_parameters=rope("default", 1e6)),
    "qwen3-bias": Qwen3Config(**BASE, num_attention_heads=3, num_key_value_heads=1, head_dim=8,
                              attention_bias=True, tie_word_embeddings=False,
                              rope_parameters=rope("default", 1e4)),
    "mistral-window": MistralConfig(**BASE, num_attention_heads=4, num_key_value_heads=2,
                                    head_dim=16, sliding_window=16, tie_word_embeddings=False,
                                    rope_parameters=rope("default", 1e4)),
    "qwen2-window": Qwen2Config(**BASE, num_attention_heads=4, num_key_value_heads=4,
                                use_sliding_window=True, sliding_window=20, max_window_layers=1,
                                tie_word_embeddings=True, rope_parameters=rope("default", 1e4)),
    "llama3-rope": LlamaConfig(**BASE, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
                               tie_word_embeddings=True,
                               rope_parameters=rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0,
                                                    high_freq_factor=4.0,
                                                    original_max_position_embeddings=64)),
    "llama-linear-bias": LlamaConfig(**BASE, num_attention_heads=8, num_key_value_heads=2,
                                     head_dim=8, attention_bias=True, mlp_bias=True,
                                     tie_word_embeddings=False,
                                     rope_parameters=rope("linear", 1e4, factor=4.0)),
    "qwen2-yarn": Qwen2Config(**BASE, num_attention_heads=2, num_key_value_heads=2,
                              tie_word_embeddings=True,
                              rope_parameters=rope("yarn", 1e6, factor=4.0,
                                                   original_max_position_embeddings=64)),
    "llama-yarn-factors": LlamaConfig(**BASE, num_attention_heads=2, num_key_value_heads=2,
                                      head_dim=16, tie_word_embeddings=False,
                                      rope_parameters=rope("yarn", 1e4, factor=8.0,
                                                           attention_factor=1.3, beta_fast=16.0,
                                                           beta_slow=2.0,
                                                           original_max_position_embeddings=32)),
}


def randomize(model, generator):
    """Biases and norms too: transformers starts them at 0 and 1, which would hide mistakes."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data.copy_(1.0 + 0.2 * noise)
        elif name.endswith("bias"):
            parameter.data.copy_(0.3 * noise)
        else:
            parameter.data.copy_(0.25 * noise)


def make(name, config, out_dir):
    generator = torch.Generator().manual_seed(20261129)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager",
                                             torch_dtype=torch.float32)
    randomize(model, generator)
    model = model.to(torch.bfloat16)
    folder = os.path.join(out_dir, name)
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager",
                                                 torch_dtype=torch.float32).eval()
    prompt = torch.randint(3, config.vocab_size, (1, PROMPT_TOKENS), generator=generator)
    with torch.no_grad():
        logits = model(prompt).logits[0].double()
        ids = prompt
        greedy, gaps = [], []
        for _ in range(GREEDY_TOKENS):
            step = model(ids).logits[0, -1].double()
            best = torch.topk(step, 2)
            greedy.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[:1].reshape(1, 1)], dim=1)
    nll = torch.nn.functional.cross_entropy(logits[:-1], prompt[0, 1:], reduction="none")
    golden = {
        "source": f"Hugging Face transformers {transformers.__version__}, fp32 on a CPU, eager",
        "prompt_ids": prompt[0].tolist(),
        "last_logits": [round(x, 6) for x in logits[-1].tolist()],
        "nll": [round(x, 6) for x in nll.tolist()],
        "greedy_ids": greedy,
        "greedy_gaps": [round(x, 6) for x in gaps],
    }
    with open(os.path.join(folder, "golden.json"), "w", encoding="utf-8") as file:
        json.dump(golden, file)
        file.write("\n")
    print(name, "max |logit|", float(logits.abs().max()), "least gap", min(gaps),
          "mean nll", float(nll.mean()))


def main():
    torch.set_num_threads(8)
    for name, config in CASES.items():
        make(name, config, sys.argv[1])


if __name__ == "__main__":
    main()
