#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex perplexity."""
import json
import math
import os
import struct
import unittest

from support import TestCase, open_terminal, run

TEXT = ("Once upon a time, there was a little girl named Lily. She loved to play outside in the "
        "park. One day, she saw a big, red ball.")


def ids_of(text):
    return json.loads(run("tokenize", "--text", text, "--json").stdout)


class Perplexity(TestCase):
    def score(self, ids, *arguments):
        result = run("perplexity", "--ids", self.write("ids.json", json.dumps(ids)), "--json",
                     *arguments)
        self.assert_ok(result)
        return json.loads(result.stdout)

    # Fault: fields are missing, perplexity is not the exponential, the first token is counted.
    def test_json(self):
        ids = ids_of(TEXT)
        score = self.score(ids)
        self.assertEqual(sorted(score), ["nll", "perplexity", "tokens"])
        self.assertEqual(score["tokens"], len(ids) - 1)
        self.assertAlmostEqual(score["perplexity"], math.exp(score["nll"]), delta=1e-5)
        # The model was trained on such text: far better than the ln(512) = 6.24 of guessing.
        self.assertLess(score["nll"], 2.5)

    # Fault: the scores do not depend on the order of the tokens, that is, not on the context.
    def test_order_matters(self):
        ids = ids_of(TEXT)
        self.assertGreater(self.score(ids[::-1])["nll"], self.score(ids)["nll"] + 1)

    # Fault: windows see each other, the last one is lost, or means are not weighted by tokens.
    def test_windows(self):
        ids = ids_of(TEXT)
        window = 10
        parts = [ids[begin:begin + window] for begin in range(0, len(ids), window)]
        alone = [self.score(part) for part in parts if len(part) >= 2]
        tokens = sum(score["tokens"] for score in alone)
        together = self.score(ids, "--window", str(window))
        self.assertEqual(together["tokens"], tokens)
        self.assertAlmostEqual(together["nll"],
                               sum(score["nll"] * score["tokens"] for score in alone) / tokens,
                               delta=1e-6)

    # Fault: a last window of one token, which has nothing to score, fails or is counted.
    def test_last_window_of_one(self):
        ids = ids_of(TEXT)[:11]
        self.assertEqual(self.score(ids, "--window", "10")["tokens"], 9)

    # Fault: --text scores other tokens than --ids does.
    def test_text(self):
        result = run("perplexity", "--text", self.write("text", TEXT), "--json")
        self.assert_ok(result)
        self.assertEqual(json.loads(result.stdout), self.score(ids_of(TEXT)))

    # Fault: results that depend on the number of threads.
    def test_threads(self):
        ids = ids_of(TEXT)
        scores = [self.score(ids, "--threads", str(count)) for count in (1, 2, 5)]
        self.assertEqual(scores[0], scores[1])
        self.assertEqual(scores[0], scores[2])

    # Fault: the reference kernels and the chosen ones are far apart.
    def test_kernels(self):
        ids = ids_of(TEXT)
        self.assertAlmostEqual(self.score(ids, "--cpu", "ref")["nll"], self.score(ids)["nll"],
                               delta=1e-3)

    # Fault: the line for people tells other numbers.
    def test_human(self):
        path = self.write("ids.json", json.dumps(ids_of(TEXT)))
        text = run("perplexity", "--ids", path).stdout.decode()
        score = self.score(ids_of(TEXT))
        self.assertIn(f"nll {score['nll']:.6f}", text)
        self.assertIn(f"perplexity {score['perplexity']:.4f}", text)
        self.assertIn(f"{score['tokens']} tokens", text)

    # Fault: ids that the model does not have are read from beyond its matrix.
    def test_bad_ids(self):
        cases = [
            ("[1, 2, 512]", "element 2", "[0, 512)", "found 512"),
            ("[1, -1]", "element 1", "[0, 512)", "found -1"),
            ("[1, 4294967297]", "element 1", "found 4294967297"),
            ("[1, 99999999999999999999]", "line 1", "too big"),
            ("[1, 2.0]", "element 1", "fraction"), ('[1, "2"]', "element 1", "a string"),
            ("[[1, 2]]", "element 0", "an array"), ("{}", "array of token ids", "an object"),
            ("[1", "line 1", "not JSON"), ("", "not JSON"), ("[]", "at least 2", "found 0"),
            ("[1]", "at least 2", "found 1"), ("[" * 100000, "not JSON"),
        ]
        for content, *parts in cases:
            path = self.write("ids.json", content)
            self.assert_error(run("perplexity", "--ids", path), 2, path, *parts)
        self.assert_error(run("perplexity", "--ids", self.path("none")), 2, self.path("none"))

    # Fault: on a terminal, an error is glued to the progress before it.
    def test_error_after_progress(self):
        model = self.model()
        model.config["tie_word_embeddings"] = False
        model.tensors["lm_head.weight"] = dict(model.tensors["model.embed_tokens.weight"])
        rows = bytearray(model.tensors["model.embed_tokens.weight"]["content"])
        rows[300 * 32 * 4:301 * 32 * 4] = struct.pack("<32f", *[math.nan] * 32)
        model.tensors["model.embed_tokens.weight"]["content"] = bytes(rows)
        model.write()
        path = self.write("ids.json", "[1, 2, 300, 3]")
        controller, terminal = open_terminal(self)
        self.addCleanup(os.close, controller)
        result = run("perplexity", model.folder, "--ids", path, "--window", "2", stderr=terminal)
        os.close(terminal)
        self.assertNotEqual(result.returncode, 0)
        text = os.read(controller, 65536).decode()
        self.assertRegex(text, r"\A\r2 of 4 tokens, nll [\d.]+ \r\x1b\[Kimbrex: error: ")

    # Fault: a window for which the model has no positions.
    def test_window_too_long(self):
        path = self.write("ids.json", "[1, 2]")
        self.assert_error(run("perplexity", "--ids", path, "--window", "513"), 2, "--window",
                          "512", "513")
        self.assert_error(run("perplexity", "--ids", path, "--window", "1"), 2, "--window", "[2, ")

    # Fault: the default window is refused by a model with fewer positions, though nobody asked.
    def test_default_window_fits(self):
        model = self.model()
        model.config["max_position_embeddings"] = 64
        model.write()
        path = self.write("ids.json", json.dumps(ids_of(TEXT * 2)))
        result = run("perplexity", model.folder, "--ids", path)
        self.assert_ok(result)
        self.assertIn("windows of 64", result.stdout.decode())


if __name__ == "__main__":
    unittest.main()
