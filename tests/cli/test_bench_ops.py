#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex bench ops: what is read before a GPU is looked for."""
import re
import unittest

from support import TestCase, run

OPTIONS = {"device", "op", "shapes", "m", "plans", "near", "weights", "numerics", "pairs",
           "replay-ms", "clock", "energy-ms", "group-m", "no-overlap", "cublaslt", "output", "help"}


class BenchOps(TestCase):
    def refused(self, arguments, *words):
        result = run("bench", "ops", *arguments)
        self.assertEqual(result.returncode, 2, result.stderr)
        message = result.stderr.decode()
        for word in words:
            self.assertIn(word, message)
        self.assertEqual(message.count("\n"), 1, message)

    # Fault: an option that is parsed but not in --help, or listed twice.
    def test_every_option_is_listed_once(self):
        text = run("help", "bench", "ops").stdout.decode()
        listed = re.findall(r"^  (?:-\w, |    )--([\w-]+)", text, re.M)
        self.assertEqual(sorted(listed), sorted(OPTIONS))

    # Fault: a list whose bad word is read as something else, or reported without its name.
    def test_bad_lists(self):
        self.refused(["--shapes", "8B"], "--shapes", '"8B"')
        self.refused(["--shapes", "7B,"], "--shapes", '""')
        self.refused(["--shapes", "3584x"], "--shapes", '"3584x"')
        self.refused(["--shapes", "0x128"], "--shapes", '"0x128"')
        self.refused(["--shapes", "128x64y"], "--shapes", '"128x64y"')
        self.refused(["--shapes", ",".join(["7B"] * 33)], "--shapes", "at most 32")
        self.refused(["--m", "128,-1"], "--m", '"-1"')
        self.refused(["--m", "16777217"], "--m", '"16777217"')
        self.refused(["--m", ",".join(["1"] * 33)], "--m", "at most 32")

    # Fault: another device that is taken for the first GPU.
    def test_bad_device(self):
        for name in ("gpu", "cuda:", "cuda:x", "cuda:1x", "cuda:-1"):
            self.refused(["--device", name], "--device", name)

    # Fault: a model that is silently left alone.
    def test_no_model(self):
        self.refused(["model.gguf"], "model.gguf")

    # Fault: a machine without a GPU gets no reason, or an exit code of success.
    def test_without_a_gpu(self):
        result = run("bench", "ops", "--shapes", "64x64", "--m", "1", "--pairs", "1")
        if result.returncode == 0:
            self.skipTest("there is a GPU")
        message = result.stderr.decode()
        self.assertEqual(message.count("\n"), 1, message)
        self.assertIn("CUDA", message)


if __name__ == "__main__":
    unittest.main()
