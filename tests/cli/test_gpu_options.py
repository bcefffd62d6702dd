#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The options of devices where no GPU can be used: support.py hides those there are."""
import json
import re
import unittest

from support import TestCase, run

IDS = "[1, 403, 407, 261, 378, 432]"
# What goes before and after the options.
COMMANDS = {
    "run": (["run"], ["-p", "Once", "-n", "4", "--temp", "0"]),
    "chat": (["chat"], ["--chat-template", "chatml", "-n", "4"]),
    "perplexity": (["perplexity"], ["--ids", "-"]),
    "bench engine": (["bench", "engine"], ["--requests", "2", "--warmup", "0", "--prompt-tokens",
                                           "8", "--output-tokens", "4"]),
    "bench model": (["bench", "model"], ["-p", "8", "-n", "4", "-r", "1", "--no-roofs"]),
    "inspect": (["inspect"], []),
}
# Those that have all of the options.
FULL = [name for name in COMMANDS if name != "inspect"]


class GpuOptions(TestCase):
    def run_command(self, name, *options):
        before, behind = COMMANDS[name]
        return run(*before, *options, *behind, input=IDS.encode())

    # Fault: a GPU that is not there is used, or ends the program without its reason.
    def test_no_gpu(self):
        for name in FULL:
            for device in ("cuda", "cuda:1"):
                result = self.run_command(name, "--device", device)
                self.assertIn(result.returncode, (1, 2), name)
                self.assert_error(result, result.returncode, re.compile("(?i)cuda"))

    # Fault: the default is not auto, auto fails without a GPU, or speaks of what nobody misses.
    def test_auto_is_the_cpu(self):
        for name in COMMANDS:
            outputs = []
            for options in ((), ("--device", "auto"), ("--device", "cpu")):
                result = self.run_command(name, *options)
                self.assert_ok(result)
                self.assertNotRegex(result.stderr, rb"auto|GPU|CUDA")
                outputs.append(result.stdout)
            if not name.startswith("bench"):
                self.assertEqual(len(set(outputs)), 1, name)

    # Fault: a name that is taken for another device, or refused without what is expected.
    def test_bad_devices(self):
        for name in COMMANDS:
            for device in ("gpu", "", "cpu:0", "cuda:", "cuda:x", "cuda:1x", "cuda:-1", "CUDA"):
                self.assert_error(self.run_command(name, "--device", device), 2, "--device",
                                  "auto, cpu, cuda or cuda:N", f'"{device}"')

    # Fault: one of several words is skipped, or a part of a word is taken.
    def test_bad_ablations(self):
        for name in FULL:
            for words, bad in (("mlp,x", "x"), ("", ""), ("mlp,", ""), ("graphs", "graphs"),
                               ("att", "att")):
                self.assert_error(self.run_command(name, "--ablate", words), 2, "--ablate",
                                  "mlp, attention, pdl, graph, hopper", f'"{bad}"')

    # Fault: options that mean nothing on a CPU are dropped in silence.
    def test_gpu_options_on_a_cpu(self):
        for name in FULL:
            self.assert_error(self.run_command(name, "--ablate", "mlp,graph"), 2, "--ablate", "CPU")
            self.assert_error(self.run_command(name, "--tuned", "none"), 2, "--tuned", "CPU")
            self.assert_error(self.run_command(name, "--tuned", ""), 2, "--tuned", "a file")
            self.assert_error(self.run_command(name, "--device", "cpu", "--compute", "bf16"), 2,
                              "compute", "BF16")
            self.assert_error(self.run_command(name, "--device", "cuda", "--cpu", "ref"), 2,
                              "--cpu", "cuda")
            self.assert_error(self.run_command(name, "--compute", "f16"), 2, "--compute", '"f16"')

    # Fault: --nvtx, --compute f32 or --batch-invariant change a text on a CPU; --nvtx is dropped in
    # silence by a program that has no ranges.
    def test_what_changes_nothing(self):
        plain = self.run_command("run")
        for options in (("--nvtx",), ("--compute", "f32"), ("--batch-invariant",)):
            result = self.run_command("run", *options)
            if result.returncode == 2:
                self.assert_error(result, 2, "--nvtx", "built", "toolkit")
            else:
                self.assert_ok(result)
                self.assertEqual(result.stdout, plain.stdout)

    # Fault: a plan that does not say what it is for.
    def test_plan_says_the_device(self):
        plan = json.loads(run("inspect", "--json").stdout)["memory_plan"]
        self.assertEqual((plan["device"], plan["compute"], plan["device_weight_bytes"]),
                         ("cpu", "F32", 0))


if __name__ == "__main__":
    unittest.main()
