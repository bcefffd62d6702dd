#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/kv-figures.md and kv-cache.md are those of the result files."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

PAGE = "before\n<!-- kv-tables: begin -->\n\nold\n\n<!-- kv-tables: end -->\nafter\n"


def run(*arguments):
    result = subprocess.run([sys.executable, os.path.join("tools", "make_kv_tables.py"),
                             *arguments], capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def row(policy, capacity, hit_rate, closure):
    return {"policy": policy, "capacity_tokens": capacity, "hit_rate": hit_rate,
            "closure": closure, "prefill_tokens_per_s": 92277.4, "mean_queue": 0.301,
            "ttft_s": {"mean": 0.19, "p50": 0.1, "p90": 0.52, "p99": 12.34}, "num_requests": 6000}


def report(**changes):
    rows = [row(policy, capacity, hit_rate, closure) for capacity in (1000000, 3100000)
            for policy, hit_rate, closure in (("lru", 0.0547, 0.0), ("predictive", 0.1006, 0.297),
                                              ("MIN", 0.2092, 1.0), ("infinite", 0.398, None))]
    trace = {"trace": "a|b.jsonl", "num_requests": 12031, "num_sessions": 9000, "bad_lines": None}
    return {"machine": {"cpu": "a processor", "version": "0.1.0", "commit": None},
            "command_line": "imbrex kv-sim --trace a.jsonl", "interrupted": False,
            "options": {"timeline": "frozen", "traces": ["a.jsonl"], "starts": None},
            "tables": [{"prefill_tokens_per_s": None, "target_queue": 0.3, "trace": trace,
                        "rows": rows}], **changes}


class Tables(unittest.TestCase):
    def test_page_of_this_tree(self):
        """Catches result files that were renewed without the page, and figures typed into it."""
        self.assertEqual(run("--check"), (0, ""))

    def tree(self, page, **reports):
        build = os.environ.get("IMBREX_BUILD", "build")
        os.makedirs(build, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=build)
        self.addCleanup(folder.cleanup)
        os.makedirs(os.path.join(folder.name, "docs"))
        os.makedirs(os.path.join(folder.name, "bench", "results"))
        with open(os.path.join(folder.name, "docs", "kv-figures.md"), "w",
                  encoding="utf-8") as file:
            file.write(page)
        for name, content in reports.items():
            name = name.replace("_", "-") if "kv_" in name else f"{name}-kv-sim"
            path = os.path.join(folder.name, "bench", "results", f"{name}.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(content, file)
        return folder.name

    def page(self, root):
        with open(os.path.join(root, "docs", "kv-figures.md"), encoding="utf-8") as file:
            return file.read()

    def test_made(self):
        """Catches a figure in another row or column, and text around the tables that is lost."""
        root = self.tree(PAGE, b=report(), a=report(command_line="imbrex kv-sim --trace first"))
        status, output = run("--check", root)
        self.assertEqual(status, 1)
        self.assertIn("make_kv_tables.py", output)
        self.assertEqual(self.page(root), PAGE)
        self.assertEqual(run(root), (0, ""))
        text = self.page(root)
        self.assertTrue(text.startswith("before\n<!-- kv-tables: begin -->\n\nFrom "))
        self.assertTrue(text.endswith("<!-- kv-tables: end -->\nafter\n"))
        self.assertNotIn("old", text)
        self.assertLess(text.index("--trace first"), text.index("--trace a.jsonl"))
        for line in ("| hit rate % (closure %) | 1M | 3.1M |", "| lru | 5.47 (0) | 5.47 (0) |",
                     "| predictive | 10.06 (30) | 10.06 (30) |", "| infinite | 39.80 | 39.80 |",
                     "| lru | 0.190 / 12.3 | 0.190 / 12.3 |", "| waiting, lru | 0.301 | 0.301 |",
                     "| prefill tokens/s | 92277 | 92277 |"):
            self.assertEqual(text.count(line + "\n"), 2, line)
        self.assertNotIn("  \n", text)
        self.assertEqual(run("--check", root), (0, ""))

    def test_sensitivity(self):
        """Catches the change of one number shown as another's, and an average of averages."""
        def rows(closures):
            return [row(policy, capacity, 0.1, closure)
                    for capacity, given in enumerate(closures, start=1)
                    for policy, closure in zip(("lru", "predictive", "predictive fan_out 2", "MIN"),
                                               (0.0, *given, 1.0))]

        def sensitivity(name, closures):
            made = report(options={"timeline": "frozen", "traces": ["a.jsonl"], "starts": None,
                                   "sensitivity": True})
            made["tables"][0]["trace"] = {**made["tables"][0]["trace"], "trace": name}
            made["tables"][0]["rows"] = rows(closures)
            return made

        root = self.tree(PAGE, a=sensitivity("a", [(0.3, 0.25), (0.2, 0.25)]),
                         b=sensitivity("b", [(0.5, 0.1)]), c=report())
        self.assertEqual(run(root), (0, ""))
        text = self.page(root)
        for line in ("| average closure, %, and its change in points | a, 2 rows | b, 1 rows "
                     "| all 3 rows |",
                     "| predictive | 25.00 | 50.00 | 33.33 |",
                     "| `fan_out 2` | +0.00 | -40.00 | -13.33 |"):
            self.assertEqual(text.count(line + "\n"), 1, line)
        self.assertEqual(text.count("| hit rate % (closure %) |"), 1)

    def test_prefetch(self):
        """Catches a figure of the slower tier in another's place."""
        made = report()
        for made_row in made["tables"][0]["rows"]:
            made_row["prefetch"] = None if made_row["policy"] in ("MIN", "infinite") else {
                "num_planned": 1234, "num_used": 900, "num_wasted": 100, "num_cancelled": 34,
                "num_late": 50, "num_unforeseen": 1050, "precision": 0.9, "recall": 0.45,
                "hit_rate": made_row["hit_rate"] + 0.0123,
                "ttft_s": {"mean": 0.17, "p50": 0.1, "p90": 0.52, "p99": 11.34}}
        root = self.tree(PAGE, a=made)
        self.assertEqual(run(root), (0, ""))
        text = self.page(root)
        for line in ("| lru | 6.70 (+1.2) | 6.70 (+1.2) |", "| lru | 90.0 / 45.0 | 90.0 / 45.0 |",
                     "| lru | 0.170 / 11.3 | 0.170 / 11.3 |",
                     "| predictive | 1.234k / 900 | 1.234k / 900 |",
                     "| lru | 100 / 34 | 100 / 34 |", "| lru | 50 / 1.05k | 50 / 1.05k |"):
            self.assertEqual(text.count(line + "\n"), 1, line)

    def tiers(self):
        """A measured load and its replay."""
        def spread(value):
            return {"mean": value, "p50": value, "p90": value, "p99": 2 * value}

        def one(has_host, has_disk, scale):
            return {"policy": "lru", "round": 1, "has_host": has_host, "has_disk": has_disk,
                    "hit_rate": 0.1 * scale, "computed_tokens": 1000 - 100 * scale,
                    "host_tokens": 7 * has_host * scale, "disk_tokens": 3 * has_disk * scale,
                    "ttft_ms": {**spread(1000.0 * scale), "max": 9e3}}

        measured = {"machine": {"cpu": "a processor", "version": "0.1.0", "commit": None},
                    "command_line": "imbrex bench kv --tiers", "interrupted": False,
                    "model": "random:x",
                    "load": {"requests": 5, "different_tokens": 1234},
                    "engine": {"kv_num_blocks": 20, "kv_block_size": 16, "kv_token_bytes": 1 << 20,
                               "kv_host_bytes": 3 << 20, "kv_disk_bytes": 128 << 20,
                               "device": "cpu"},
                    "alone": {"prefill_tokens_per_s": 99.6, "decode_s_per_token": 0.0125},
                    "runs": [one(False, False, 1), one(True, False, 2), one(True, True, 3)]}
        stacks = [{"num_from": num_from, "prefetch": {"hit_rate": hit_rate, "ttft_s": spread(ttft)}}
                  for num_from, hit_rate, ttft in (([40], 0.5, 0.25), ([50, 60], 0.75, 0.125))]
        made = report()
        made["options"] = {**made["options"], "warm": 0,
                           "tiers": [{"name": "host"}, {"name": "disk"}]}
        made["tables"][0]["trace"] = {**made["tables"][0]["trace"], "num_tokens": 2000}
        made["tables"][0]["rows"] = [{**row("lru", 320, 0.25, 0.0), "stacks": stacks},
                                     {**row("MIN", 320, 0.5, 1.0), "stacks": []}]
        return measured, made

    def test_tiers(self):
        """Catches measured and simulated figures in each other's place, or of other tiers."""
        measured, simulated = self.tiers()
        root = self.tree(PAGE, d_kv_tiers_chat=measured, d_kv_tiers_chat_sim=simulated)
        self.assertEqual(run(root), (0, ""))
        text = self.page(root)
        for line in ("### Tiers, chat, random:x on cpu: measured / simulated",
                     "    imbrex bench kv --tiers",
                     "| lru | 10.0 / 25.0 | 0 / 0 | 0 / 0 | 900 / 1500 | 1.00 / 0.100 "
                     "| 2.00 / 12.3 |",
                     "| lru + host | 20.0 / 50.0 | 14 / 40 | 0 / 0 | 800 / 1000 | 2.00 / 0.250 "
                     "| 4.00 / 0.500 |",
                     "| lru + host + disk | 30.0 / 75.0 | 21 / 50 | 9 / 60 | 700 / 500 "
                     "| 3.00 / 0.125 | 6.00 / 0.250 |"):
            self.assertEqual(text.count(line + "\n"), 1, line)
        self.assertIn("KV cache of 320 tokens (320.0 MiB), RAM of 3.0 MiB, disk of 128 MiB", text)
        self.assertIn("100 prompt tokens/s, 12.5 ms a token of output.\n", text)
        self.assertEqual(text.count("### "), 1)

    def test_tiers_gpu(self):
        """Catches figures of a GPU that do not say at which clock and power they were made."""
        measured, simulated = self.tiers()
        measured["gpu"] = {"name": "a GPU", "driver": "1.2"}
        for i, one in enumerate(measured["runs"]):
            one.update(sm_clock_mhz=1900 + 10 * i, watts=300 + 2 * i)
        root = self.tree(PAGE, d_kv_tiers_chat=measured, d_kv_tiers_chat_sim=simulated)
        self.assertEqual(run(root), (0, ""))
        self.assertIn("a token of output. a GPU, driver 1.2, 1910 MHz, on average 302 W.\n",
                      self.page(root))

    def test_tiers_refused(self):
        """Catches a replay of half the requests, or of other tiers, beside a whole load."""
        measured, simulated = self.tiers()
        for changes in ({"warm": 0.5}, {"tiers": [{"name": "host"}]}):
            changed = {**simulated, "options": {**simulated["options"], **changes}}
            root = self.tree(PAGE, d_kv_tiers_chat=measured, d_kv_tiers_chat_sim=changed)
            status, output = run(root)
            self.assertEqual(status, 1)
            self.assertIn("all requests scored", output)

    def test_moves(self):
        """Catches a rate in another's column, a slow-down that is shown as a ratio, and figures of
        a mode without moves."""
        def spread(value):
            return {"median": value, "p10": value - 0.01, "p90": value + 0.01}

        def mode(name, step, rate, out):
            return {"mode": name, "step_ms": spread(step), "step_over_none": spread(step / 2),
                    "in_gb_per_s": spread(rate), "in_over_pinned": spread(rate / 50),
                    "in_over_pinned_beside_decode": spread(rate / 40), "out_gb_per_s": spread(out),
                    "sm_clock_mhz": 1980.0, "watts": 345.4}

        names = ("pinned in", "pinned out", "pinned in of both", "pinned out of both", "promotions")
        made = {"machine": {"cpu": "a processor", "version": "0.1.0", "commit": "abc"},
                "gpu": {"name": "a GPU", "driver": "1.2"}, "model": "random:x", "sequences": 16,
                "context": 2048, "rounds": 5, "block_bytes": 192 << 10, "budget_percent": 50,
                "idle_gb_per_s": {name: spread(50.0 + i) for i, name in enumerate(names)},
                "modes": [mode("none", 2.0, 0.0, 0.0), mode("budget", 2.04, 20.0, 0.0),
                          mode("both", 2.1, 48.0, 47.0)]}
        root = self.tree(PAGE, d_kv_move_x={**made, "block_bytes": 448 << 10}, e_kv_move_y=made)
        self.assertEqual(run(root), (0, ""))
        text = self.page(root)
        for line in ("| nothing | 2.000 (1.990, 2.010) |  |  |  |  |  | 1980 | 345 |",
                     "| promotions for nobody, at 50 % of the link | 2.040 (2.030, 2.050) "
                     "| 2.0 (1.0 to 3.0) | 20.0 | 40.0 | 50.0 |  | 1980 | 345 |",
                     "| promotions, each into a block that is demoted for it "
                     "| 2.100 (2.090, 2.110) | 5.0 (4.0 to 6.0) | 48.0 | 96.0 | 120.0 | 47.0 "
                     "| 1980 | 345 |"):
            self.assertEqual(text.count(line + "\n"), 2, line)
        self.assertLess(text.index("blocks of 192 KiB"), text.index("blocks of 448 KiB"))
        self.assertIn("pinned memory 50.0 in, 51.0 out, both at once 52.0 and 53.0; "
                      "promotions 54.0", text)

    def layers(self, beside):
        """A report of two modes."""
        def row(mode, groups, ttft_ms):
            return {"mode": mode, "groups": groups, "layered": 5 * (groups > 1),
                    "block_ns": 1000 * groups, "ttft_ms": ttft_ms, "p10_ms": ttft_ms - 1,
                    "p90_ms": ttft_ms + 1}

        def decoders(p50_ms):
            return {"gaps": 40, "p50_ms": p50_ms, "p99_ms": 2 * p50_ms, "longest_ms": 3 * p50_ms}

        rows = [row("held", 1, 13.5), row("own", 4, 10.25)]
        made = {"machine": {"cpu": "a processor", "version": "0.1.0", "commit": "abc"},
                "gpu": {"name": "a GPU", "driver": "1.2"}, "model": "random:x",
                "block_bytes": 896 << 10, "cached_tokens": 4096, "new_tokens": 256, "rounds": 5,
                "alone": {"rows": rows, "sm_clock_mhz": 1980.0, "watts": 345.4}}
        if beside:
            made["beside"] = {
                "sequences": 8, "context": 2048, "other_ids": 1, "by_themselves": decoders(5.0),
                "sm_clock_mhz": 1970.0, "watts": 400.0,
                "rows": [{**row, "ttft_ms": row["ttft_ms"] + 5, "decoders": decoders(7.0),
                          "lost_ms": 2.5, "lost_p90_ms": 3.5} for row in rows]}
        return made

    def test_layers(self):
        """Catches a time alone and one beside others in each other's place, or of another mode."""
        root = self.tree(PAGE, d_kv_layers_x=self.layers(True), e_kv_layers_y=self.layers(False))
        self.assertEqual(run(root), (0, ""))
        text = self.page(root)
        for line in ("| held | 1 | 1.0 | 13.50 (12.50, 14.50) | 18.50 (12.50, 14.50) | 0 "
                     "| 7.00 / 14.00 / 21.00 | 2.50 (3.50) |",
                     "| own | 4 | 4.0 | 10.25 (9.25, 11.25) | 15.25 (9.25, 11.25) | 5 "
                     "| 7.00 / 14.00 / 21.00 | 2.50 (3.50) |",
                     "| held | 1 | 1.0 | 13.50 (12.50, 14.50) |",
                     "| own | 4 | 4.0 | 10.25 (9.25, 11.25) |"):
            self.assertEqual(text.count(line + "\n"), 1, line)
        self.assertIn("a GPU, driver 1.2: 5 rounds; alone (1980 MHz, 345 W), and beside 8 "
                      "sequences behind 2,048 tokens and more (1970 MHz, 400 W), which by "
                      "themselves have 5.00 ms between two tokens (p99 10.00, longest 15.00)",
                      text)
        self.assertIn("5 rounds; alone (1980 MHz, 345 W).\n", text)

    def test_refused(self):
        """Catches a page without its markers, half a run that passes for a whole one, and a
        command line that works on one machine only."""
        status, output = run(self.tree("no markers\n", a=report()))
        self.assertEqual(status, 1)
        self.assertIn("kv-tables: begin", output)
        absolute = {"timeline": "frozen", "traces": ["/a.jsonl"], "starts": None}
        for changes, expected in (({"interrupted": True}, "interrupted"),
                                  ({"options": absolute}, "/a.jsonl")):
            root = self.tree(PAGE, a=report(**changes))
            status, output = run(root)
            self.assertEqual(status, 1)
            self.assertIn(expected, output)
            self.assertEqual(self.page(root), PAGE)


class KvDtypeTables(unittest.TestCase):
    PAGE = "x\n<!-- kv-dtype-tables: begin -->\n<!-- kv-dtype-tables: end -->\ny\n"

    def report(self, *arguments):
        result = subprocess.run([sys.executable, os.path.join("bench", "kv_dtype.py"), "report",
                                 *arguments], capture_output=True, text=True, timeout=60)
        return result.returncode, result.stdout + result.stderr

    def test_page_of_this_tree(self):
        """Catches result files that were renewed without the page, and figures typed into it."""
        self.assertEqual(self.report("--check"), (0, ""))

    def test_table(self):
        """Catches figures in another row or column, and a page that is not noticed to be old."""
        rows = [{"kv_dtype": name, "nll": nll, "tokens": 100, "token_bytes": token_bytes}
                for name, nll, token_bytes in (("fp32", 2.0, 1280), ("fp8", 2.01, 400))]
        speed = [{"kv_dtype": name, "test": test, "tokens_per_s": rate, "deviation": 0.5}
                 for name, test, rate in (("fp32", "pp512", 10.0), ("fp32", "tg16", 20.0),
                                          ("fp8", "pp512", 11.0), ("fp8", "tg16", 22.0))]
        report = {"date": "2026-01-02T03:04:05Z", "gpu": None, "speed_model": "m", "speed": speed,
                  "machine": {"cpu": "a processor", "num_cpus": 2, "commit": "abc"},
                  "texts": [{"text": "stories", "rows": rows}]}
        with tempfile.TemporaryDirectory(dir=os.environ.get("IMBREX_BUILD", "build")) as root:
            os.makedirs(os.path.join(root, "docs"))
            os.makedirs(os.path.join(root, "bench", "results"))
            page = os.path.join(root, "docs", "kv-cache.md")
            with open(page, "w", encoding="utf-8") as file:
                file.write(self.PAGE)
            with open(os.path.join(root, "bench", "results", "a-kv-dtype.json"), "w",
                      encoding="utf-8") as file:
                json.dump(report, file)
            self.assertNotEqual(self.report("--check", root)[0], 0)
            self.assertEqual(self.report(root), (0, ""))
            self.assertEqual(self.report("--check", root), (0, ""))
            with open(page, encoding="utf-8") as file:
                text = file.read()
        for line in ("a processor, 2 CPUs, 2026-01-02, commit abc",
                     "| fp32 | 1280 | 2.00000 |  |", "| fp8 | 400 | 2.01000 | +0.500 % |",
                     "| fp32 | 10.00 ± 0.50 | 20.00 ± 0.50 |", "| m, t/s | pp512 | tg16 |"):
            self.assertIn(line, text)


if __name__ == "__main__":
    unittest.main()
