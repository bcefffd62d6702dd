#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model with fused MLPs: patch_qwen2.py [FOLDER]. Without a folder, a random one."""
import sys

import torch
import transformers

from imbrex.integrations import hf

device = "cuda" if torch.cuda.is_available() else "cpu"
if len(sys.argv) > 1:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
else:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000))
model = model.to(device, torch.bfloat16).eval()

with torch.inference_mode():
    ids = torch.arange(64, device=device).reshape(1, 64)
    before = model(ids).logits
    print(hf.patch(model))
    after = model(ids).logits
    print(f"largest change of a logit: {(after - before).abs().max().item():.4f}")
