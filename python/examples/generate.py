#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Continues a prompt and prints tokens as they come: generate.py [PROMPT [MODEL]]"""
import os
import sys

import imbrex

prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"
model = sys.argv[2] if len(sys.argv) > 2 else "builtin:stories260K"

try:
    with imbrex.Engine(model, device="auto") as engine:
        print(prompt, end="", flush=True)
        for token in engine.generate(prompt, max_tokens=100):
            print(token.text, end="", flush=True)
        print()
except imbrex.Error as error:
    sys.exit(str(error))
except BrokenPipeError:  # the reader has enough; what is still in the buffer goes nowhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
