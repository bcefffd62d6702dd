#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--kv-dtype."""
import json
import os
import re
import unittest

from support import TestCase, run

NAMES = ("fp32", "fp16", "bf16", "int8", "fp8")
# stories260K: 5 layers, K and V, 4 heads of 8, whose groups have a scale of two bytes each.
TOKEN_BYTES = {"fp32": 1280, "fp16": 640, "bf16": 640, "int8": 400, "fp8": 400}
COMMANDS = (("run", "-p", "x"), ("chat",), ("inspect",), ("perplexity", "--text", "x"),
            ("bench", "model"), ("bench", "engine"), ("bench", "kv"))


class KvDtype(TestCase):
    def inspect(self, *options):
        result = run("inspect", "--json", *options)
        self.assert_ok(result)
        return json.loads(result.stdout)

    # Fault: a command that does not know the option, or a message without the names that there are.
    def test_wrong_name(self):
        for command in COMMANDS:
            for name in ("int4", "FP8", "f16", ""):
                self.assert_error(run(*command, "--kv-dtype", name), 2,
                                  "--kv-dtype: expected one of auto, bf16, fp16, fp32, int8, fp8",
                                  f'found "{name}"')

    # Fault: a plan that is not of the type that was asked for, or sizes that do not follow it.
    def test_inspect(self):
        self.assertEqual(self.inspect()["memory_plan"]["kv_dtype"], "fp32")
        for name in NAMES:
            shown = self.inspect("--kv-dtype", name, "--kv-cache", "8M")
            plan = shown["memory_plan"]
            self.assertEqual(plan["kv_dtype"], name)
            self.assertEqual(shown["kv_bytes_per_token"], TOKEN_BYTES[name])
            block_bytes = -(-TOKEN_BYTES[name] * plan["kv_block_size"] // 4096) * 4096
            self.assertEqual(plan["kv_num_blocks"], (8 << 20) // block_bytes)
            self.assertEqual(plan["kv_bytes"], plan["kv_num_blocks"] * block_bytes)
            text = run("inspect", "--kv-dtype", name).stdout.decode()
            self.assertRegex(text, rf"(?m)^KV per token .*\b{TOKEN_BYTES[name]} bytes\)?$")
            self.assertRegex(text, rf"(?m)^  KV .* blocks of 16 tokens in {name}, policy lru$")

    # Fault: a type that changes more of a text than it may, or none that is used at all.
    def test_perplexity(self):
        path = self.path("text")
        text = run("run", "-p", "Once upon", "-n", "150", "--temp", "1", "--seed", "3").stdout
        with open(path, "wb") as file:
            file.write(text)
        nll = {}
        for name in ("auto", *NAMES):
            result = run("perplexity", "--text", path, "--json", "--kv-dtype", name)
            self.assert_ok(result)
            nll[name] = json.loads(result.stdout)["nll"]
        self.assertEqual(nll["auto"], nll["fp32"])
        self.assertEqual(len({nll[name] for name in NAMES}), len(NAMES))
        for name in NAMES:
            self.assertLess(abs(nll[name] / nll["fp32"] - 1), 0.03)

    # Fault: blocks on a disk that another type takes for its own, that the same type does not find
    # again, a folder of which nobody says that it is of no use, or a note on it that comes each
    # time to those who share one.
    def test_folder(self):
        folder = os.path.join(self.folder, "cache")

        def generate(name):
            result = run("run", "-p", "Once upon a time there was a girl " * 8, "-n", "20",
                         "--temp", "0", "--kv-disk", folder + ":1G", "--kv-dtype", name)
            self.assert_ok(result)
            shown = result.stderr.decode()
            found = re.search(r", (\d+) cached", shown)
            is_told = f"blocks of another model, KV type (here it is {name})" in shown
            return result.stdout, int(found.group(1)) if found else 0, is_told

        first = generate("int8")
        self.assertEqual(first[1:], (0, False))
        again = generate("int8")
        self.assertEqual((again[0], again[2]), (first[0], False))
        self.assertGreater(again[1], 0)
        self.assertEqual(generate("fp8")[1:], (0, True))
        # Two types share the folder now.
        again = generate("fp8")
        self.assertEqual((again[1] > 0, again[2]), (True, False))

    # Fault: a report that does not say what it measured.
    def test_reports(self):
        result = run("bench", "model", "--kv-dtype", "fp8", "-p", "8", "-n", "2", "-r", "1",
                     "--no-roofs", "-o", "json")
        self.assert_ok(result)
        self.assertEqual({row["kv_dtype"] for row in json.loads(result.stdout)["rows"]}, {"fp8"})
        result = run("bench", "engine", "--kv-dtype", "int8", "--requests", "4", "--output-tokens",
                     "4", "--json", "-")
        self.assert_ok(result)
        self.assertEqual(json.loads(result.stdout)["engine"]["kv_dtype"], "int8")


if __name__ == "__main__":
    unittest.main()
