#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex bench ops: what is read before a GPU is looked for, and the CPU's cells. No speed is
asserted."""
import json
import re
import unittest

from support import TestCase, run

OPTIONS = {"device", "op", "shapes", "m", "plans", "near", "baselines", "streams", "tuned",
           "weights", "numerics", "pairs", "replay-ms", "clock", "rest-ms", "energy-ms", "group-m",
           "no-overlap", "portable", "cublaslt", "output", "help", "dtype", "cpu", "threads",
           "no-roofs", "activation", "rounding", "interleave", "bias", "hidden-share", "trace",
           "ways"}
CPU_OPS = ["embedding", "rmsnorm", "qkv_proj", "rope_kv", "attention", "o_proj", "down_proj",
           "gemm_swiglu", "lm_head"]


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
        self.refused(["--shapes", "99999999999x2"], "from 1 to 16777216", '"99999999999x2"')
        self.refused(["--shapes", "128x64y"], "--shapes", '"128x64y"')
        self.refused(["--shapes", ",".join(["7B"] * 33)], "--shapes", "at most 32")
        self.refused(["--m", "128,-1"], "--m", '"-1"')
        self.refused(["--m", "16777217"], "--m", '"16777217"')
        self.refused(["--m", ",".join(["1"] * 33)], "--m", "at most 32")
        self.refused(["--device", "cuda", "--activation", "silu,swish"], "--activation",
                     '"swish"')
        self.refused(["--device", "cuda", "--activation", ",".join(["relu"] * 9)], "--activation",
                     "at most 8")
        self.refused(["--device", "cpu", "--dtype", "bf16,q9_0"], "--dtype", '"q9_0"')
        self.refused(["--device", "cpu", "--dtype", ",".join(["f16"] * 17)], "--dtype",
                     "at most 16")

    # Fault: another device that is taken for the first GPU.
    def test_bad_device(self):
        for name in ("gpu", "cpu:1", "cuda:", "cuda:x", "cuda:1x", "cuda:-1"):
            self.refused(["--device", name], "--device", name)

    # Fault: a look at gate_first that is taken of another op, of a CPU, or of one of many cells.
    def test_gate_first(self):
        for option in (["--hidden-share"], ["--trace", "t.json"]):
            name = option[0]
            self.refused([*option, "--device", "cpu"], name, "cuda")
            self.refused([*option, "--device", "cuda", "--op", "gemm"], name, "gemm_swiglu")
            self.refused([*option, "--device", "cuda", "--bias"], name, "--bias")
        self.refused(["--trace", "t.json", "--device", "cuda", "--shapes", "7B", "--m", "1,2"],
                     "--trace", "one shape", "1 and 2")

    # Fault: a model that is silently left alone.
    def test_no_model(self):
        self.refused(["model.gguf"], "model.gguf")

    # Fault: a machine without a GPU gets no reason, or an exit code of success.
    def test_without_a_gpu(self):
        result = run("bench", "ops", "--device", "cuda", "--shapes", "64x64", "--m", "1", "--pairs",
                     "1")
        if result.returncode == 0:
            self.skipTest("there is a GPU")
        self.assertEqual(result.returncode, 2)
        message = result.stderr.decode()
        self.assertEqual(message.count("\n"), 1, message)
        self.assertIn("CUDA", message)

    # Fault: an option of one device that the other one ignores.
    def test_options_of_the_other_device(self):
        for option in (["--plans", "all"], ["--weights", "separate"], ["--numerics"],
                       ["--replay-ms", "1"], ["--clock", "burst"], ["--rest-ms", "1"],
                       ["--energy-ms", "1"], ["--group-m", "1"], ["--no-overlap"], ["--portable"],
                       ["--cublaslt", "x.so"], ["--op", "gemm"], ["--activation", "gelu"],
                       ["--interleave", "8"], ["--rounding", "match-unfused"], ["--bias"]):
            self.refused(["--device", "cpu", *option], option[0], "--device cuda")
        for option in (["--dtype", "bf16"], ["--cpu", "ref"], ["--threads", "1"],
                       ["--no-roofs"], ["--op", "lm_head"]):
            self.refused(["--device", "cuda", *option], option[0], "--device cpu")

    # Fault: an option of gemm_swiglu that a plain product ignores, or two that exclude each other.
    def test_options_of_gemm_swiglu(self):
        for option in (["--activation", "gelu"], ["--rounding", "exact"], ["--interleave", "1"],
                       ["--bias"]):
            self.refused(["--device", "cuda", "--op", "gemm", *option], option[0],
                         "--op gemm_swiglu")
        self.refused(["--device", "cuda", "--interleave", "1", "--weights", "separate"],
                     "--interleave", "separate")

    def cpu_report(self, *arguments):
        path = self.path("ops.json")
        result = run("bench", "ops", "--device", "cpu", "--pairs", "2", "-o", path, *arguments)
        self.assert_ok(result)
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual((report["benchmark"], report["device"], report["interrupted"]),
                         ("ops", "cpu", False))
        printed = result.stdout.decode().splitlines()
        num_contestants = sum(len(row["contestants"]) for row in report["rows"])
        self.assertEqual(len(printed), 1 + num_contestants + len(report["left_out"]))
        for row in report["rows"]:
            has_roof = "--no-roofs" not in arguments and row["bound_by"] != "cache"
            self.assertEqual(row["roof_us"] > 0, has_roof)
            for contestant in row["contestants"]:
                self.assertLessEqual(contestant["us"]["p10"], contestant["us"]["median"])
                self.assertLessEqual(contestant["us"]["median"], contestant["us"]["p90"])
                self.assertEqual(contestant["percent_of_roof"]["p10"] > 0, row["roof_us"] > 0)
                self.assertLessEqual(contestant["error"], 1e-4)
        return report

    # Fault: rows, types or kernels that are left out or measured twice; a pair for what is no MLP;
    # work or temporary memory of another size.
    def test_mlp(self):
        report = self.cpu_report("--shapes", "256x512", "--m", "1,3", "--dtype", "bf16,q8_0,q4_k",
                                 "--op", "gemm_swiglu", "--threads", "2", "--no-roofs")
        self.assertEqual(report["threads"], 2)
        self.assertEqual([(row["dtype"], row["m"]) for row in report["rows"]],
                         [(dtype, m) for dtype in ("BF16", "Q8_0", "Q4_K") for m in (1, 3)])
        paths = [entry["path"] for entry in report["rows"][0]["contestants"]]
        self.assertEqual(paths[-2:], ["ref", "ref"])
        self.assertEqual(len(set(paths)) * 2, len(paths))
        for row in report["rows"]:
            self.assertEqual(row["flops"], 4 * row["m"] * 256 * 512)
            for fused, unfused in zip(row["contestants"][::2], row["contestants"][1::2]):
                self.assertEqual((fused["kind"], unfused["kind"]), ("op", "unfused"))
                self.assertEqual((fused["temporary_bytes"], unfused["temporary_bytes"]),
                                 (0, 2 * 4 * row["m"] * 512))
                self.assertGreater(fused["unfused_over_fused"]["median"], 0)
                self.assertNotIn("unfused_over_fused", unfused)

    # Fault: a way that is left out, or offered where there is no choice: for many tokens, several
    # of quantised weights, these on AVX2, or the reference.
    def test_ways(self):
        report = self.cpu_report("--shapes", "256x512", "--m", "1,8,9", "--dtype", "bf16,q8_0",
                                 "--op", "down_proj", "--threads", "2", "--no-roofs", "--ways")
        for row in report["rows"]:
            kinds = {}
            for entry in row["contestants"]:
                kinds.setdefault(entry["path"], []).append(entry["kind"])
            self.assertEqual(kinds.pop("ref"), ["op"])
            for path, found in kinds.items():
                has_ways = (row["m"] <= 8 if row["dtype"] == "BF16" else
                            row["m"] == 1 and path not in ("avx2", "avx512"))
                self.assertEqual(found, ["op", "streams", "ordered"] if has_ways else ["op"], path)

    # Fault: an op of the shape that is not there, or one that a type or shape has not is measured
    # all the same.
    def test_left_out(self):
        report = self.cpu_report("--shapes", "96x256", "--m", "2", "--dtype", "q4_k", "--cpu",
                                 "ref", "--no-roofs")
        self.assertEqual([row["op"] for row in report["rows"]], ["rmsnorm", "down_proj"])
        self.assertEqual(sorted([entry["op"] for entry in report["left_out"]] +
                                ["rmsnorm", "down_proj"]), sorted(CPU_OPS))

    # Fault: defaults that take minutes on a CPU, or leave cells out without saying which.
    def test_cpu_defaults(self):
        path = self.path("ops.json")
        result = run("bench", "ops", "--device", "cpu", "--op", "rmsnorm", "--pairs", "1",
                     "--no-roofs", "-o", path)
        self.assert_ok(result)
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)["rows"]
        self.assertEqual([(row["shape"], row["m"]) for row in rows], [("0.5B", 1), ("0.5B", 512)])
        printed = result.stdout.decode()
        for option in ("--shapes qwen2.5", "--m 1,8,64,512"):
            self.assertIn(option, printed)

    # Fault: what lies in caches is said to reach a share of the rate of memory.
    def test_cached_ops(self):
        for op, is_cached in (("rmsnorm", True), ("rope_kv", True), ("attention", False)):
            report = self.cpu_report("--op", op, "--shapes", "0.5B", "--m", "1", "--cpu",
                                     "ref")
            # Which of the two rates bounds attention is for this machine to say.
            self.assertEqual([row["bound_by"] == "cache" for row in report["rows"]], [is_cached])

    # Fault: kernels that round activations are measured against bounds of those that do not.
    def test_rounding_kernels(self):
        self.refused(["--device", "cpu", "--cpu", "amx-bf16"], "--cpu", 'found "amx-bf16"')

    # Fault: kernels by name that are not those, or of which others run beside them.
    def test_one_path(self):
        report = self.cpu_report("--shapes", "64x64", "--m", "1", "--op", "down_proj", "--cpu",
                                 "ref")
        self.assertEqual([entry["path"] for entry in report["rows"][0]["contestants"]], ["ref"])


if __name__ == "__main__":
    unittest.main()
