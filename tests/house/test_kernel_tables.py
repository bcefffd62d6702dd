#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/kernels.md, cpu-figures.md and gpu.md are those of the result files."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join("tools", "make_kernel_tables.py")
PAGE = os.path.join("docs", "kernels.md")
CPU_PAGE = os.path.join("docs", "cpu-figures.md")
GPU_PAGE = os.path.join("docs", "gpu.md")
HEADER = {"date": "2026-11-30T01:02:03Z",
          "machine": {"cpu": "A CPU", "num_cpus": 2, "version": "0.1.0", "commit": "abc1234"}}


def spread(value):
    return {"median": value, "p10": value - 0.01, "p90": value + 0.01}


def contestant(path, kind, microseconds, **more):
    return {"path": path, "kind": kind, "us": spread(microseconds), "percent_of_roof": spread(87.0),
            **more}


OPS = {**HEADER, "benchmark": "ops", "threads": 2, "rows": [
    {"op": "gemm_swiglu", "shape": "0.5B", "dtype": "BF16", "m": m, "out_features": 4864,
     "bound_by": "read", "contestants": [
         contestant("vnni", "op", 123.4 * m, unfused_over_fused=spread(1.25)),
         contestant("vnni", "unfused", 154.25 * m), contestant("avx2", "op", 234.5 * m)]}
    for m in (1, 8)]}
MODEL = {**HEADER, "benchmark": "model", "rows": [
    {"model": "qwen2 494M BF16", "kernels": "vnni", "threads": 2, "test": "tg128",
     "tokens_per_s": 33.25, "deviation": 0.5, "median_tokens_per_s": 33.5,
     "roof": {"kind": "read", "percent": 91.0, "samples": [36e9, 38e9]}},
    {"model": "qwen2 494M BF16", "kernels": "vnni", "threads": 2, "test": "pp512",
     "tokens_per_s": 210.5, "deviation": 1.5, "median_tokens_per_s": 211.5, "roof": None}]}
LLAMA = {**HEADER, "benchmark": "llama_cpp", "pairs": 10,
         "llama_cpp": {"commit": "fedcba9", "package": "0.3.36", "compiler": "c++ 12"}, "rows": [
             {"file": "qwen.gguf", "kernels": "vnni", "threads": 2, "test": "tg128",
              "peer": {"median": 25.5}, "ours": {"median": 30.75}, "ratio": spread(1.205)}]}


def engine(name, omitted, over_full):
    return {"name": name, "omitted": omitted, "time_over_full": spread(over_full)}


GPU_MODEL = {**HEADER, "benchmark": "model", "gpu": {"name": "A GPU", "driver": "580.1"}, "rows": [
    {"model": "qwen2 494M BF16", "test": "tg128 x8 @ d512", "prompt": 0, "generate": 128,
     "depth": 512, "batch": 8, "tokens_per_s": 3333.25, "deviation": 1.5, "step_ms": 2.4,
     "step_bytes": 1.25e9, "roof": {"kind": "read", "percent": 62.5, "samples": [4.5e12]},
     "joules_per_token": 0.125, "sm_clock_mhz": 1980.0, "watts": None, "samples_ns": [1, 2, 3],
     "without": [engine("mlp", False, 1.25), engine("MLP", True, 0.375)]},
    {"model": "qwen2 494M BF16", "test": "pp2048", "prompt": 2048, "generate": 0, "depth": 0,
     "batch": 1, "tokens_per_s": 200000.0, "deviation": 0.5, "step_ms": 10.0, "step_bytes": None,
     "roof": {"kind": "bf16", "percent": 31.25, "samples": [989.4e12]}, "joules_per_token": None,
     "sm_clock_mhz": None, "watts": None, "samples_ns": [1, 2, 3],
     "without": [engine("mlp", False, 1.5), engine("MLP", True, 0.5)]}]}
HF = {**HEADER, "benchmark": "hf_decode", "gpu": "A GPU", "torch": "2.11", "transformers": "5.17",
      "rows": [{"model": "0.5b", "parameters": 494032768, "kind": "decode", "batch": 8,
                "tokens": 64, "depth": 512, "test": "decode x8 @ d512", "step_ms": 3.0},
               {"model": "0.5b", "parameters": 494032768, "kind": "prefill", "batch": 1,
                "tokens": 16384, "depth": 0, "test": "prefill 16384", "step_ms": 66.0},
               {"model": "7b", "parameters": 7615616512, "kind": "decode", "batch": 8,
                "tokens": 64, "depth": 512, "test": "decode x8 @ d512", "error": "left out"}]}


def run(*arguments):
    result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
                            timeout=60)
    return result.returncode, result.stdout + result.stderr


class Tables(unittest.TestCase):
    def test_page_of_this_tree(self):
        """Catches result files that were renewed without the page, and figures typed into it."""
        self.assertEqual(run("--check"), (0, ""))

    def test_changed_figure(self):
        """Catches a check that cannot fail, and a page that is not restored."""
        with tempfile.TemporaryDirectory() as root:
            for folder in ("docs", os.path.join("bench", "results")):
                shutil.copytree(folder, os.path.join(root, folder))
            with open(os.path.join(root, PAGE), encoding="utf-8") as file:
                page = file.read()
            self.assertIn("| 0.5B | 128 |", page)
            with open(os.path.join(root, PAGE), "w", encoding="utf-8") as file:
                file.write(page.replace("| 0.5B | 128 |", "| 0.5B | 127 |"))
            status, output = run("--check", root)
            self.assertEqual(status, 1)
            self.assertIn("make_kernel_tables.py", output)
            self.assertEqual(run(root), (0, ""))
            with open(os.path.join(root, PAGE), encoding="utf-8") as file:
                self.assertEqual(file.read(), page)

    def test_cpu_results(self):
        """Catches a kind of result that is left out of the page, or stands in another's place."""
        with tempfile.TemporaryDirectory() as root:
            for folder in ("docs", os.path.join("bench", "results")):
                shutil.copytree(folder, os.path.join(root, folder))
            for name, result in (("ops-x", OPS), ("model-x", MODEL), ("llama-cpp-x", LLAMA)):
                path = os.path.join(root, "bench", "results", f"2026-11-30-box-{name}.json")
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(result, file)
            self.assertEqual(run("--check", root)[0], 1)
            self.assertEqual(run(root), (0, ""))
            with open(os.path.join(root, CPU_PAGE), encoding="utf-8") as file:
                page = file.read()
            for line in ("| gemm_swiglu | 0.5B | BF16 | 123.4 (87 % read) | 987.2 (87 % read) |",
                         "| gemm_swiglu | BF16 | 8 | 987.2 | 1876 |",
                         "| 0.5B | BF16 | 1.250 (1.240-1.260) | 1.250 (1.240-1.260) | 0 | 38912 |",
                         "| qwen2 494M BF16 | vnni | 2 | tg128 | 33.25 ± 0.50 | 33.50 | "
                         "91 % of 38 GB/s read | 2026-11-30 abc1234 | "
                         "[box-model-x](../bench/results/2026-11-30-box-model-x.json) |",
                         "| qwen2 494M BF16 | vnni | 2 | pp512 | 210.50 ± 1.50 | 211.50 |  | "
                         "2026-11-30 abc1234 | "
                         "[box-model-x](../bench/results/2026-11-30-box-model-x.json) |",
                         "| qwen.gguf | vnni | 2 | tg128 | 25.50 | 30.75 | 1.205 | 1.195-1.215 | "
                         "10 | 2026-11-30 abc1234 | "
                         "[box-llama-cpp-x](../bench/results/2026-11-30-box-llama-cpp-x.json) |"):
                self.assertEqual(page.count(line + "\n"), 1, line)
            self.assertEqual(run("--check", root), (0, ""))

    def test_gate_first_results(self):
        """Catches gate_first taken for the choice, a plan of it that is not its fastest, and shares
        of the wrong kind."""
        def ours(schedule, microseconds, gain):
            return {"kind": "imbrex", "us": spread(microseconds), "speedup_over_gemm": spread(gain),
                    "plan": {"schedule": schedule, "block_m": 128, "block_n": 192, "cluster_m": 1,
                             "cluster_n": 2, "num_tiles_n": 0}}
        header = {"benchmark": "ops", "op": "gemm_swiglu", "gpu": "A GPU", "driver": "580.1",
                  "date": "2026-11-30T01:02:03Z", "commit": "abc1234", "clock": "warm", "pairs": 15,
                  "replay_ms": 4.0}
        cells = {**header, "summary": {"gate_first": {"cells": 1, "geomean_over_gemm": 0.875,
                                                      "geomean_over_chosen": 0.8}},
                 "rows": [{"shape": "9B", "m": 128, "contestants": [
                     ours("pingpong", 80.0, 1.125), ours("gate_first", 110.0, 0.818),
                     ours("gate_first", 100.0, 0.875)]}]}
        hidden = {**header, "rows": [
            {"shape": "9B", "m": 128, "contestants": [ours("gate_first", time, 0.0)
                                                      for time in (100.0, 104.0, 99.5, 101.0)],
             "hidden": {"share": spread(0.9), "share_of_swish": spread(0.8)}}]}
        with tempfile.TemporaryDirectory() as root:
            for folder in ("docs", os.path.join("bench", "results")):
                shutil.copytree(folder, os.path.join(root, folder))
            for name, result in (("cells-x", cells), ("hidden-x", hidden)):
                path = os.path.join(root, "bench", "results",
                                    f"2026-01-01-box-gate_first-{name}.json")
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(result, file)
            self.assertEqual(run(root), (0, ""))
            with open(os.path.join(root, PAGE), encoding="utf-8") as file:
                page = file.read()
            for line in ("| 9B | 0.875 0.800 |",
                         "| 9B | 128 | gf 128x192 c1x2 | 100.0 | 104.0 | 99.5 | 101.0 | "
                         "90.0 (89.0-91.0) | 80.0 (79.0-81.0) |"):
                self.assertEqual(page.count(line + "\n"), 1, line)
            self.assertEqual(run("--check", root), (0, ""))

    def test_gpu_results(self):
        """Catches a GPU's results among those of CPUs, and a peer's row beside another test or
        another run."""
        with tempfile.TemporaryDirectory() as root:
            for folder in ("docs", os.path.join("bench", "results")):
                shutil.copytree(folder, os.path.join(root, folder))
            other_run = {**GPU_MODEL, "date": "2026-01-09T01:02:03Z",
                         "rows": [{**GPU_MODEL["rows"][0], "step_ms": 1.5}]}
            for name, result in (("model-a", other_run), ("model-x", GPU_MODEL), ("hf-x", HF)):
                path = os.path.join(root, "bench", "results", f"2026-01-01-box-{name}.json")
                with open(path, "w", encoding="utf-8") as file:
                    json.dump(result, file)
            self.assertEqual(run("--check", root)[0], 1)
            self.assertEqual(run(root), (0, ""))
            with open(os.path.join(root, GPU_PAGE), encoding="utf-8") as file:
                page = file.read()
            for line in ("| qwen2 494M BF16 | tg128 x8 @ d512 | 3333.2 ± 1.5 | 2.400 | 1.250 | "
                         "62.5 % of 4.50 TB/s | 62 % |  | 0.1250 | 1980 |  |",
                         "| qwen2 494M BF16 | pp2048 | 200000.0 ± 0.5 | 10.000 |  | "
                         "31.2 % of 989 TFLOP/s | 50 % |  |  |  |  |",
                         "| qwen2 494M BF16 | pp2048 | 10.000 | 1.500 (1.490-1.510) |",
                         "| 0.5b | decode x8 @ d512 | 3.000 | 2.400 | 1.25 |",
                         "| 0.5b | prefill 16384 | 66.000 |  |  |"):
                self.assertEqual(page.count(line + "\n"), 1, line)
            with open(os.path.join(root, CPU_PAGE), encoding="utf-8") as file:
                self.assertNotIn("A GPU", file.read())
            self.assertEqual(run("--check", root), (0, ""))

    def test_no_markers(self):
        """Catches a page that is overwritten where it has no place for tables."""
        with tempfile.TemporaryDirectory() as root:
            os.mkdir(os.path.join(root, "docs"))
            for page in (PAGE, CPU_PAGE, GPU_PAGE):
                with open(os.path.join(root, page), "w", encoding="utf-8") as file:
                    file.write("nothing\n")
            status, output = run(root)
            self.assertEqual(status, 1)
            self.assertIn("markers", output)


if __name__ == "__main__":
    unittest.main()
