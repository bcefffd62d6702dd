#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of README.md is that of the result files."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

PAGE = "before\n<!-- summary: begin -->\nold\n<!-- summary: end -->\nafter\n"


def run(*arguments):
    result = subprocess.run([sys.executable, os.path.join("tools", "make_summary.py"), *arguments],
                            capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def paper(date, microseconds):
    cells = [{"ways": {"ours": {"us": ours}, "eager": {"us": 20.0}, "act": {"us": 12.0},
                       "gemm": {"us": 9.0}}} for ours in microseconds]
    return {"date": date, "gpu": "A GPU", "cells": cells}


def llama(date, **ratios):
    return {"date": date, "rows": [{"test": test, "ratio": {"median": ratio}}
                                   for test, ratio in ratios.items()]}


def model_row(test, step_ms, kind, percent, **counts):
    return {"model": "qwen2 7.62B BF16", "test": test, "step_ms": step_ms, "batch": 1,
            "roof": {"kind": kind, "percent": percent}, **counts}


def peer_row(test, kind, tokens, depth, step_ms):
    return {"model": "7b", "parameters": 7615616512, "test": test, "kind": kind, "batch": 1,
            "tokens": tokens, "depth": depth, "step_ms": step_ms}


def tiers_run(policy, has_tiers, p99):
    return {"policy": policy, "has_host": has_tiers, "has_disk": has_tiers, "ttft_ms": {"p99": p99}}


class Summary(unittest.TestCase):
    def test_page_of_this_tree(self):
        """Catches result files that were renewed without the page, and figures typed into it."""
        self.assertEqual(run("--check"), (0, ""))

    def tree(self, results, page=PAGE):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.makedirs(os.path.join(folder.name, "bench", "results"))
        for name, content in results.items():
            path = os.path.join(folder.name, "bench", "results", f"2026-01-01-{name}.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(content, file)
        with open(os.path.join(folder.name, "README.md"), "w", encoding="utf-8") as file:
            file.write(page)
        return folder.name

    def rows(self, results):
        root = self.tree(results)
        self.assertEqual(run(root), (0, ""))
        self.assertEqual(run("--check", root), (0, ""))
        with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
            page = file.read()
        self.assertTrue(page.startswith("before\n") and page.endswith("after\n"))
        lines = [line for line in page.splitlines() if line.startswith("| ")]
        return [line.strip("| ").split(" | ")[:3] for line in lines[1:]]

    def test_newest(self):
        """Catches an older file, or the last by its name, in place of the newest."""
        rows = self.rows({"a-paper": paper("2026-01-03T00:00:00Z", [10.0, 5.0]),
                          "z-paper": paper("2026-01-02T00:00:00Z", [1.0])})
        self.assertEqual([row[2] for row in rows],
                         ["2.83x (2.00-4.00, 2 sizes)", "1.70x (1.20-2.40, 2 sizes)",
                          "1.27x (0.90-1.80, 2 sizes)"])

    def test_llama(self):
        """Catches a processor or a type under another's name, and halves of two files mixed up."""
        rows = self.rows({
            "epyc-avx2-llama-cpp-0.5b-bf16": llama("2026-01-02T00:00:00Z", tg32=1.5, pp512=2.5),
            "epyc-avx2-b-llama-cpp-0.5b-bf16": llama("2026-01-03T00:00:00Z", tg64=1.75),
            "xeon-llama-cpp-0.5b-q4_0": llama("2026-01-02T00:00:00Z", pp512=3.0),
            "xeon-llama-cpp-0.5b-bf16-activations": llama("2026-01-02T00:00:00Z", pp512=4.0)})
        self.assertEqual(rows, [
            ["2 cores, Zen 3, AVX2: 0.5B bf16", "llama.cpp, the same file",
             "decode 1.75x, prompt 2.50x"],
            ["2 cores, Sapphire Rapids, AVX-512: 0.5B bf16, activations rounded as llama.cpp does",
             "llama.cpp, the same file", "prompt 4.00x"],
            ["2 cores, Sapphire Rapids, AVX-512: 0.5B Q4_0", "llama.cpp, the same file",
             "prompt 3.00x"]])

    def test_gpu(self):
        """Catches another test beside the peer's, and the time of a part left out as ours."""
        gpu = {"gpu": {"name": "A GPU"}, "date": "2026-01-02T00:00:00Z"}
        decode = model_row("tg64 @ d512", 2.0, "read", 88.5, prompt=0, generate=64, depth=512)
        prompt = model_row("pp16384", 4.0, "bf16", 66.5, prompt=16384, generate=0, depth=0)
        slower = {**decode, "step_ms": 4.0, "without": [1]}
        peer = {"transformers": "5.0", "date": "2026-01-01T00:00:00Z"}
        rows = self.rows({
            "box-model-7b": {**gpu, "rows": [slower, decode, prompt]},
            "box-hf-decode": {**peer, "rows": [
                peer_row("decode x1 @ d512", "decode", 64, 512, 3.0)]},
            "box-hf-prefill": {**peer, "rows": [
                peer_row("prefill 2048", "prefill", 2048, 0, 1.0),
                peer_row("prefill 16384", "prefill", 16384, 0, 5.0)]}})
        self.assertEqual([row[2] for row in rows],
                         ["1.50x; 88 % of the measured read rate",
                          "1.25x; 66 % of the bf16 peak of the data sheet"])

    def test_cache(self):
        """Catches the tiers of one policy beside none of another."""
        header = {"date": "2026-01-02T00:00:00Z", "gpu": {"name": "A GPU"}}
        rows = self.rows({
            "h200-kv-tiers-chat": {**header, "runs": [
                tiers_run("predictive", False, 250.0), tiers_run("predictive", True, 125.0),
                tiers_run("lru", False, 300.0), tiers_run("lru", True, 100.0)]},
            "h200-kv-move-7b": {**header, "modes": [
                {"mode": mode, "in_over_pinned": {"median": share},
                 "step_over_none": {"median": 1 + share / 100}}
                for mode, share in (("none", 0.0), ("full", 0.875), ("budget", 0.5))]}})
        self.assertEqual([row[2] for row in rows],
                         ["TTFT p99 300 -> 100 ms",
                          "88 % of their rate; a step takes 0.9 % longer"])

    def test_changed_figure(self):
        """Catches a check that cannot fail."""
        root = self.tree({"a-paper": paper("2026-01-03T00:00:00Z", [10.0])})
        status, output = run("--check", root)
        self.assertEqual(status, 1)
        self.assertIn("make_summary.py", output)

    def test_no_markers(self):
        """Catches a page that is overwritten where it has no place for the table."""
        status, output = run(self.tree({}, "nothing\n"))
        self.assertEqual(status, 1)
        self.assertIn("markers", output)


if __name__ == "__main__":
    unittest.main()
