#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/paper.py without a GPU: what it makes of a measurement, and what it refuses."""
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True

SCRIPTS = {name: os.path.join("bench", name + ".py") for name in ("paper", "hf_patch")}


def way(us, flops=4.0 * 4096 * 3584 * 18944):
    return {"us": us, "p10": us - 1.0, "p90": us + 1.0, "calls": 3, "tflops": flops / us * 1e-6}


def make_report():
    """One cell whose ratios are known, one where ways are missing, and mismatches."""
    return {
        "benchmark": "paper", "date": "2026-11-30T08:00:00Z", "gpu": "NVIDIA H200",
        "driver": "580.1", "torch": "2.11", "triton": "3.6", "commit": "abc", "rounds": 7,
        "sample_ms": 4.0, "left_out": ["compile 7B 4096", "compile 3B 512"],
        "cells": [
            {"shape": "7B", "tokens": 4096, "mhz": 1400, "watts": 690, "ways": {
                "eager": way(2000.0), "eager plain": way(3000.0), "products": way(1600.0),
                "down": way(800.0), "gemm": way(1500.0), "act": way(1700.0), "ours": way(1600.0),
                "ours plain": way(2000.0), "gate_first": way(1650.0),
                "quack": {"left_out": "QuACK is not installed"}}},
            {"shape": "0.5B", "tokens": 128, "mhz": None, "watts": None, "ways": {
                "eager": way(16.0), "ours": way(10.0),
                "quack": {"left_out": "QuACK is not installed"}}}],
        "numerics": [
            {"shape": shape, "tokens": 512, "scale": scale, "ways": {
                "eager": {"bitwise": 0.42, "ulp": share, "tolerance": 0.001},
                "ours": {"bitwise": 0.001, "ulp": 0.0005, "tolerance": 0.0}}}
            for shape, share in (("0.5B", 0.015), ("7B", 0.016)) for scale in (1.0, 10.0)]}


class Paper(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content if isinstance(content, str) else json.dumps(content))
        return path

    def run_script(self, script, *arguments):
        # A Python without PyTorch, whatever is installed here.
        self.write("torch.py", "raise ImportError('no torch in this test')\n")
        environment = dict(os.environ, PYTHONPATH=self.folder)
        return subprocess.run([sys.executable, SCRIPTS[script], *arguments], capture_output=True,
                              text=True, timeout=120, env=environment)

    def report(self, *contents, options=()):
        paths = [self.write(f"{i}.json", content) for i, content in enumerate(contents)]
        return self.run_script("paper", "report", *paths, *options)

    def test_table(self):
        """Catches a ratio taken the wrong way round, a share of the wrong whole, a way that is
        left out without its reason."""
        result = self.report(make_report())
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                for line in result.stdout.split("\n") if line.startswith("|")]
        names = rows[0]
        small, large = (dict(zip(names, row)) for row in rows[2:4])
        self.assertEqual((small["shape"], large["shape"]), ("0.5B", "7B"))
        self.assertEqual(large["eager / ours"], "1.250")
        self.assertEqual(large["plain"], "1.500")
        # (2000 - 1600) / (2000 + 800)
        self.assertEqual(large["lost %"], "14.3")
        self.assertEqual(large["TFLOP/s"], "695")
        self.assertEqual(large["% of peak"], "70.3")
        self.assertEqual(small["eager / ours"], "1.600")
        self.assertEqual((small["lost %"], small["plain"], small["MHz"]), ("-", "-", "-"))
        # sqrt(1.25 * 1.6)
        self.assertIn("eager from a graph / ours: geometric mean 1.414 over 2 cells; the most "
                      "1.600 (0.5B, 128), the least 1.250 (7B, 4096)", result.stdout)
        self.assertIn("gate_first / ours: geometric mean 1.031 over 1 cell;", result.stdout)
        self.assertIn("quack: left out: QuACK is not installed", result.stdout)
        self.assertIn("time was spent: compile 7B 4096, compile 3B 512.", result.stdout)
        self.assertNotIn("torch.compile / ours", result.stdout)

    def test_mismatches(self):
        """Catches shares of another scale or criterion."""
        output = self.report(make_report()).stdout
        self.assertIn("| 1 | 42-42 / 1.5-1.6 / 0.1-0.1 | 0.1-0.1 / 0.05-0.05 / 0-0 |", output)

    def test_into(self):
        """Catches a document that loses what stands around its tables, or an old table left in."""
        mark = "<!-- paper-tables: {} -->\n"
        path = self.write("page.md", f"before\n{mark.format('begin')}old\n{mark.format('end')}"
                                     "after\n")
        for _ in range(2):
            self.assertEqual(self.report(make_report(), options=["--into", path]).returncode, 0)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        self.assertTrue(text.startswith("before\n<!--") and text.endswith("-->\nafter\n"), text)
        self.assertEqual((text.count("| 7B | 4096 |"), text.count("old")), (1, 0))
        result = self.report(make_report(), options=["--into", self.write("none.md", "text\n")])
        self.assertEqual(result.returncode, 1)
        self.assertIn("none.md: expected one section", result.stderr)

    def test_empty(self):
        """Catches a run whose budget was over at once and cannot be reported."""
        report = {**make_report(), "cells": [], "numerics": []}
        result = self.report(report)
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_refusals(self):
        """Catches a traceback, or a table of something else."""
        for content in ("{", "[]", {"benchmark": "hf_decode"}):
            result = self.report(content)
            self.assertEqual(result.returncode, 1)
            self.assertTrue(result.stderr.startswith("paper.py: "), result.stderr)
            self.assertIn("0.json", result.stderr)
        for arguments in (["run", "-o", "x", "--shapes", "8B"], ["run", "-o", "x", "--tokens", "a"],
                          ["run", "-o", "x", "--rounds", "0"], ["run"], []):
            self.assertEqual(self.run_script("paper", *arguments).returncode, 2, arguments)
        self.assertEqual(self.run_script("hf_patch", "--models", "9b").returncode, 2)

    def test_no_torch(self):
        """Catches a traceback where PyTorch is missing."""
        for script, arguments in (("paper", ["run", "-o", os.path.join(self.folder, "x")]),
                                  ("hf_patch", [])):
            result = self.run_script(script, *arguments)
            self.assertEqual(result.returncode, 1)
            self.assertEqual(result.stderr.count("\n"), 1)
            self.assertIn("expected the Python packages torch", result.stderr)

    def test_plots(self):
        """Catches a plot that a missing way, an empty part or one cell alone breaks."""
        if importlib.util.find_spec("matplotlib") is None:
            self.skipTest("no matplotlib here")
        prefix = os.path.join(self.folder, "plot")
        for report in (make_report(), {**make_report(), "cells": [], "numerics": []}):
            result = self.report(report, options=["--plots", prefix])
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            for name in ("speed-up", "lost", "utilisation", "mismatch"):
                for ending in ("png", "svg"):
                    path = f"{prefix}-{name}.{ending}"
                    self.assertGreater(os.path.getsize(path), 1000)
                    os.remove(path)


class Documents(unittest.TestCase):
    def test_links(self):
        """Catches a figure whose file is not there, or a page that names what has moved."""
        for name in ("claims.md", "python.md"):
            with open(os.path.join("docs", name), encoding="utf-8") as file:
                links = re.findall(r"\]\(([^)#]+)[)#]", file.read())
            self.assertGreater(len(links), 2)
            for link in links:
                self.assertTrue(os.path.exists(os.path.join("docs", link)), f"{name}: {link}")

    def test_shapes(self):
        """Catches a benchmark of other shapes than those of `imbrex bench ops`."""
        spec = importlib.util.spec_from_file_location("paper", SCRIPTS["paper"])
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        with open(os.path.join("src", "cli", "bench_ops.c"), encoding="utf-8") as file:
            text = file.read()
        for name, (hidden, intermediate) in script.SHAPES.items():
            self.assertIn(f'{{"{name}", {hidden}, {intermediate}, ', text)


if __name__ == "__main__":
    unittest.main()
