#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex tune where no GPU can be used: support.py hides those there are. What is to be measured is
read before the GPU is opened."""
import json
import os
import re
import unittest

from support import TestCase, run

# What a run that got as far as the GPU ends with.
NO_GPU = re.compile("(?i)cuda")
USUAL = ("tune: --shapes", "qwen2.5", "7B", "3584x18944", "a file")


class Tune(TestCase):
    def tune(self, *arguments, **options):
        return run("tune", *arguments, **options)

    def assert_no_gpu(self, result):
        self.assert_error(result, 2, NO_GPU)
        self.assertEqual(result.stdout, b"")

    # Fault: a GPU that is not there ends the program without its reason, or a table is left.
    def test_no_gpu(self):
        environment = dict(os.environ, XDG_CACHE_HOME=self.path("cache"))
        for options in ((), ("--dry-run",), ("--device", "cuda:3"), ("-o", self.path("t.json")),
                        ("--again", "--seconds", "1", "--shapes", "7B,64x128", "--m", "1,2")):
            self.assert_no_gpu(self.tune(*options, env=environment))
        self.assertEqual(os.listdir(self.folder), [])

    # Fault: an argument that means nothing is taken for something, or refused without what is
    # expected.
    def test_bad_arguments(self):
        for device in ("cpu", "", "gpu", "cuda:", "cuda:x"):
            self.assert_error(self.tune("--device", device), 2, "tune: --device",
                              "cuda or cuda:N", f'"{device}"')
        for rows in ("", "0", "1,", "x", "16777217", "1,2,3.5"):
            self.assert_error(self.tune("--m", rows), 2, "tune: --m", "whole numbers from 1")
        for word in ("8B", "7b", "64x", "0x64", "64x64x64", "/no/such/file", ""):
            self.assert_error(self.tune("--shapes", word), 2, *USUAL, f'"{word}"')
        self.assert_error(self.tune("--shapes", "7B,8B"), 2, *USUAL, '"8B"')
        self.assert_error(self.tune("model"), 2, "expected no model", "model")
        self.assert_error(self.tune("--seconds", "0"), 2, "--seconds")
        self.assert_error(self.tune("--near", "0.9"), 2, "--near")
        self.assert_error(self.tune("--op", "gemv"), 2, "--op", "gemm_swiglu")

    # Fault: shapes in a file that are good and refused, or a bad one without its line told.
    def test_lines(self):
        good = "# two models\n7B\n\n  64x128\t# one more\r\ngemm_swiglu 1 8 64\ngemm 16777216 8 8"
        self.assert_no_gpu(self.tune("--shapes", self.write("good.txt", good)))
        self.assert_no_gpu(self.tune("--shapes", "-", input=b"qwen2.5\n"))
        for line in ("8B", "7B 14B", "gemm 1 2", "gemm 1 2 3 4", "gemv 1 2 3", "gemm 0 8 8",
                     "gemm 1 8 16777217", "gemm -1 8 8", "gemm 1.5 8 8", "x" * 100,
                     "gemm 1 8 " + "9" * 40):
            path = self.write("bad.txt", f"7B\n# fine\n{line}\n72B\n")
            self.assert_error(self.tune("--shapes", path), 2, "bad.txt: line 3: expected",
                              line[:60])
        for empty in ("", "\n# nothing\n"):
            self.assert_error(self.tune("--shapes", self.write("none.txt", empty)), 2,
                              "none.txt: expected shapes, found none")
        self.assert_error(self.tune("--shapes", self.write("nul.txt", b"7B\n\0\n")), 2, "nul.txt")
        self.assert_error(self.tune("--shapes", self.folder), 2)

    # Fault: the same of JSON: without line and column, or without the entry and its field.
    def test_json(self):
        good = ["7B", "64x128", {"op": "gemm", "m": 1, "n": 8, "k": 64},
                {"op": "gemm_swiglu", "m": 5, "n": 8, "k": 64, "note": "mine"}]
        self.assert_no_gpu(self.tune("--shapes", self.write("good.json", json.dumps(good))))
        product = {"op": "gemm", "m": 1, "n": 8, "k": 64}
        for entry, parts in (("8B", ("7B",)), (7, ("a string, or an object",)),
                             ([], ("a string, or an object",)), ({}, ("op",)),
                             (dict(product, op="gemv"), ("op", "gemm_swiglu")),
                             (dict(product, op=1), ("op",)),
                             (dict(product, m=0), ("m", "whole number")),
                             (dict(product, n=1.5), ("n", "whole number")),
                             (dict(product, k="64"), ("k", "whole number")),
                             (dict(product, k=1 << 40), ("k", "whole number"))):
            path = self.write("bad.json", json.dumps(["7B", entry]))
            self.assert_error(self.tune("--shapes", path), 2, "bad.json: shapes[1]", *parts)
        self.assert_error(self.tune("--shapes", self.write("cut.json", '["7B",\n "14B"')), 2,
                          "cut.json:2", "JSON")
        self.assert_error(self.tune("--shapes", self.write("object.json", "{}")), 2,
                          "object.json: expected an array")
        self.assert_error(self.tune("--shapes", self.write("none.json", "[]")), 2,
                          "none.json: expected shapes")

    # Fault: what lies in the folder of tables matters on a CPU, or is spoken of there.
    def test_tables_are_a_gpu_s(self):
        folder = self.path("cache/imbrex/tune")
        os.makedirs(folder)
        for name in ("x.json", "nvidia-h200-132sm-1980mhz-700w.json"):
            self.write(f"cache/imbrex/tune/{name}", "no table")
        for home in (self.path("cache"), "relative", ""):
            result = run("run", "-p", "Once", "-n", "4", "--temp", "0",
                         env=dict(os.environ, XDG_CACHE_HOME=home))
            self.assert_ok(result)
            self.assertNotIn(b"tune", result.stderr)
        self.assert_error(run("bench", "ops", "--device", "cpu", "--tuned", folder), 2,
                          "bench ops: --tuned", "cuda")
        for option in ("--baselines", "--streams"):
            value = "none" if option == "--baselines" else "2"
            self.assert_error(run("bench", "ops", "--device", "cpu", option, value), 2,
                              f"bench ops: {option}", "cuda")


if __name__ == "__main__":
    unittest.main()
