#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/peers/hf_decode.py where there is no GPU: what it is asked for is read before anything."""
import importlib.util
import os
import re
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
SCRIPT = os.path.join("bench", "peers", "hf_decode.py")
# As the library has them: names, and the shapes behind random:qwen2.5-<name>.
SHAPES = os.path.join("src", "cli", "bench_ops.c")


def run(*arguments):
    result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
                            timeout=120)
    return result.returncode, result.stdout + result.stderr


class HfDecode(unittest.TestCase):
    def test_bad_words(self):
        """Catches a model or row that is skipped in silence, or a message without its word."""
        for option, word in (("--models", "0.5b,9b"), ("--rows", "decode1,decode"),
                             ("--rows", "prefill0"), ("--rows", "decodex")):
            status, output = run(option, word)
            self.assertEqual(status, 2, output)
            self.assertIn(option, output)
            self.assertIn(repr(word.split(",")[-1]), output)

    def test_missing(self):
        """Catches an end without a reason where there is no torch or no GPU."""
        status, output = run("--models", "0.5b", "--rows", "decode1")
        if status == 0:
            self.skipTest("there is a GPU, and all that is needed")
        self.assertRegex(output, r"hf_decode.py: expected (the Python packages|a GPU)")

    def test_shapes(self):
        """Catches a peer that runs another model than imbrex does."""
        spec = importlib.util.spec_from_file_location("hf_decode", SCRIPT)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        with open(SHAPES, encoding="utf-8") as file:
            text = file.read()
        for name, (hidden, intermediate, _, heads, kv_heads, vocabulary, _) in \
                script.MODELS.items():
            head_dim = hidden // heads
            row = (f'{{"{name.upper()}", {hidden}, {intermediate}, {heads}, {kv_heads}, '
                   f'{head_dim}, {vocabulary}}}')
            self.assertEqual(len(re.findall(re.escape(row), text)), 1, row)
        # Source: "safetensors parameters" of the models' pages.
        self.assertEqual(script.num_parameters("0.5b"), 494032768)
        self.assertEqual(script.num_parameters("7b"), 7615616512)


if __name__ == "__main__":
    unittest.main()
