#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex bench model: its tests, samples and report. No speed is asserted."""
import json
import os
import re
import resource
import signal
import statistics
import unittest

from support import TIMEOUT_S, TestCase, run, start

OPTIONS = {"model", "prompt", "generate", "depth", "batch", "repetitions", "no-warmup", "no-roofs",
           "device", "compute", "kv-dtype", "beside-kv", "ablate", "tuned", "shares",
           "batch-invariant", "nvtx", "threads", "max-step-tokens", "cpu", "energy-ms", "output",
           "json", "help"}


class BenchModel(TestCase):
    def rows(self, *arguments):
        """The rows of the JSON report, checked for what holds for every one."""
        result = run("bench", "model", *arguments, "-o", "json")
        self.assert_ok(result)
        report = json.loads(result.stdout)
        self.assertEqual((report["benchmark"], report["interrupted"]), ("model", False))
        self.assertGreater(report["machine"]["num_cpus"], 0)
        for row in report["rows"]:
            tokens = row["prompt"] + row["generate"]
            tokens *= row["batch"]
            rates = [tokens * 1e9 / nanoseconds for nanoseconds in row["samples_ns"]]
            self.assertAlmostEqual(row["tokens_per_s"], statistics.mean(rates),
                                   delta=1e-6 * max(rates))
            self.assertAlmostEqual(row["median_tokens_per_s"], statistics.median(rates),
                                   delta=1e-6 * max(rates))
            if len(rates) > 1:
                self.assertAlmostEqual(row["deviation"], statistics.stdev(rates),
                                       delta=1e-6 * max(rates))
        return report["rows"]

    def refused(self, arguments, *words):
        self.assert_error(run("bench", "model", *arguments), 2, *words)

    # Fault: a test that is left out, run twice, or run with another one's tokens or threads.
    def test_every_combination_once(self):
        rows = self.rows("-p", "24,5", "-n", "3,0", "-d", "0,32", "-t", "1,2", "-r", "2",
                         "--no-roofs")
        found = [(row["threads"], row["test"], row["prompt"], row["generate"], row["depth"])
                 for row in rows]
        expected = [(threads, name + suffix, prompt, generate, depth)
                    for threads in (1, 2) for depth, suffix in ((0, ""), (32, " @ d32"))
                    for name, prompt, generate in (("pp24", 24, 0), ("pp5", 5, 0), ("tg3", 0, 3))]
        self.assertEqual(found, expected)
        for row in rows:
            self.assertEqual(len(row["samples_ns"]), 2)
            self.assertIsNone(row["roof"])
            self.assertGreater(min(row["samples_ns"]), 0)

    # Fault: contexts that the model was not made for are measured without a word, or refused; a
    # warning of one that it was made for.
    def test_long_contexts(self):
        for tokens, is_warned in (("512", False), ("520", True)):
            result = run("bench", "model", "-p", tokens, "-n", "0", "-r", "1", "--no-warmup",
                         "--no-roofs")
            self.assert_ok(result)
            self.assertEqual("contexts of up to 520 tokens, more than the 512" in
                             result.stderr.decode(), is_warned)

    # Fault: a report that does not fit on the disk leaves half of it in place of the one before.
    def test_full_disk(self):
        path = self.path("report.json")
        with open(path, "w", encoding="ascii") as file:
            file.write("the one before")
        result = run("bench", "model", "-p", "0", "-n", "1", "-r", "1", "--no-roofs", "--json",
                     path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)))
        self.assert_error(result, 1, path, "File too large")
        with open(path, encoding="ascii") as file:
            self.assertEqual(file.read(), "the one before")
        self.assertFalse(os.path.exists(path + ".partial"))

    # Fault: a run that ends without a report leaves an empty one, which looks like one to whoever
    # comes next.
    def test_no_report(self):
        path = self.path("new.json")
        full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))}
        for arguments in (("model", "-p", "0", "-n", "1", "-r", "1", "--no-roofs"),
                          ("engine", "--requests", "1")):
            self.assert_error(run("bench", *arguments, "--json", path, **full), 1, path,
                              "File too large")
            self.assertFalse(os.path.exists(path) or os.path.exists(path + ".partial"))

    # Fault: random weights that no memory is there for are drawn until the system ends somebody.
    def test_more_weights_than_memory(self):
        with open("/proc/meminfo", encoding="ascii") as file:
            if int(re.search(r"MemTotal: +(\d+)", file.read())[1]) * 1024 > 140e9:
                self.skipTest("this machine may have the memory of a 72B model")
        model = "random:qwen2.5-72b"
        self.assert_error(run("bench", "model", model, "-p", "1", "-n", "0"), 2,
                          f"{model}: expected weights of at most the ", "has left, found ")

    # Fault: Ctrl-C while random weights are drawn waits until all of them are, for an empty table.
    def test_interrupt_while_opening(self):
        with start("bench", "model", "random:qwen2.5-0.5b", "-p", "0", "-n", "1") as process:
            self.addCleanup(process.kill)
            resident_pages = 0
            while resident_pages * 4096 < 100e6:
                with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
                    resident_pages = int(file.read().split()[1])
            process.send_signal(signal.SIGINT)
            text = process.communicate(timeout=TIMEOUT_S)[0]
        self.assertEqual((process.returncode, text), (130, b""))

    # Fault: types of keys and values beside it that are measured under another name, with other
    # samples, or not at all; a word that is none.
    def test_beside_kv(self):
        row, = self.rows("-p", "16", "-n", "0", "-r", "3", "--no-roofs", "--beside-kv", "int8,fp16")
        self.assertEqual([beside["name"] for beside in row["beside_kv"]], ["int8", "fp16"])
        for beside in row["beside_kv"]:
            self.assertEqual(len(beside["samples_ns"]), 3)
            ratios = [ns / full for ns, full in zip(beside["samples_ns"], row["samples_ns"])]
            self.assertAlmostEqual(beside["time_over_full"]["median"], sorted(ratios)[1], places=6)
        self.refused(["--beside-kv", "int8,q4"], "--beside-kv", '"q4"')

    # Fault: work that is counted for other tokens than the test's, by which the shares of the roofs
    # are wrong. The model has 5 layers, 64 hidden units, 8 heads and 4 for keys, 172 units between,
    # 512 ids, and weights of two bytes.
    def test_work(self):
        prompt, generate = self.rows("-p", "16", "-n", "2", "-d", "32", "-r", "1", "--no-roofs")
        layer = 64 * (2 * 64 + 2 * 32 + 3 * 172)
        keys = sum(range(33, 49))
        self.assertEqual(prompt["flops"],
                         2 * 16 * 5 * layer + 4 * 64 * 5 * keys + 2 * 64 * 512)
        keys = 33 + 34
        self.assertEqual(generate["flops"],
                         2 * 2 * 5 * layer + 4 * 64 * 5 * keys + 2 * 2 * 64 * 512)
        self.assertEqual(generate["bytes"],
                         2 * generate["weight_bytes"] + 5 * keys * 2 * 32 * 4)

    # Fault: a batch whose sequences do not generate together, share a context, or are counted once;
    # bytes of weights that are counted for each sequence.
    def test_batches(self):
        rows = self.rows("-p", "0", "-n", "4", "-d", "0,480", "-b", "1,33", "-r", "2", "--no-roofs",
                         "--device", "cpu")
        self.assertEqual([(row["test"], row["batch"]) for row in rows],
                         [("tg4", 1), ("tg4 x33", 33), ("tg4 @ d480", 1), ("tg4 x33 @ d480", 33)])
        layer = 64 * (2 * 64 + 2 * 32 + 3 * 172)
        for row in rows:
            self.assertGreaterEqual(row["mean_context"], row["depth"])
            self.assertLessEqual(row["mean_context"], row["depth"] + row["batch"])
            keys = 4 * row["mean_context"] + 10
            self.assertAlmostEqual(row["flops"], row["batch"] * (
                2 * 4 * 5 * layer + 4 * 64 * 5 * keys + 2 * 4 * 64 * 512))
            self.assertAlmostEqual(row["bytes"], 4 * row["weight_bytes"] +
                                   row["batch"] * 5 * keys * 2 * 32 * 4)
            self.assertGreater(row["step_ms"], 0)

    # Fault: a roof that is not measured beside each sample, or is that of the other kind of test.
    def test_roofs(self):
        prompt, generate = self.rows("-p", "8", "-n", "2", "-r", "3")
        for row, kind in ((prompt, "fp32"), (generate, "read")):
            roof = row["roof"]
            self.assertEqual((roof["kind"], len(roof["samples"])), (kind, 3))
            self.assertGreater(min(roof["samples"]), 0)
            work = row["flops"] if kind == "fp32" else row["bytes"]
            shares = [100 * work * 1e9 / nanoseconds / rate
                      for nanoseconds, rate in zip(row["samples_ns"], roof["samples"])]
            self.assertAlmostEqual(roof["percent"], statistics.median(shares),
                                   delta=1e-5 * max(shares))

    # Fault: a table that shows other tests than the JSON, or JSON that goes to one place only.
    def test_table_and_file(self):
        path = self.path("out.json")
        result = run("bench", "model", "-p", "8", "-n", "2", "-r", "2", "--no-roofs", "--json",
                     path)
        self.assert_ok(result)
        lines = result.stdout.decode().splitlines()
        self.assertEqual(len(lines), 4)
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        self.assertEqual(cells[0][:6], ["model", "size", "params", "backend", "threads", "test"])
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)["rows"]
        for row, shown in zip(rows, cells[2:], strict=True):
            self.assertEqual(shown[5], row["test"])
            self.assertEqual(shown[3], "CPU " + row["kernels"])
            self.assertRegex(shown[6], r"^\d+\.\d\d ± \d+\.\d\d$")

    # Fault: of several models the first is measured again, or names and types are mixed up.
    def test_models(self):
        model = self.model()
        path = self.path("small.gguf")
        self.assert_ok(run("quantize", model.folder, path, "--type", "q8_0"))
        rows = self.rows("-m", model.folder, "-m", path, "-p", "4", "-n", "0", "-r", "1",
                         "--no-roofs", "--cpu", "ref")
        self.assertEqual([(row["path"], row["file_type"], row["kernels"]) for row in rows],
                         [(model.folder, None, "ref"), (path, "Q8_0", "ref")])
        self.assertTrue(rows[0]["model"].endswith(" F32"), rows[0]["model"])

    # Fault: a prompt that is cut into steps of another size than asked for.
    def test_step_size(self):
        self.assertEqual(self.rows("-p", "40", "-n", "0", "-r", "1", "--no-roofs",
                                   "--max-step-tokens", "16")[0]["max_step_tokens"], 16)
        self.assertEqual(self.rows("-p", "40", "-n", "0", "-r", "1",
                                   "--no-roofs")[0]["max_step_tokens"], 512)

    # Fault: an option that is parsed but not in --help, or listed twice.
    def test_every_option_is_listed_once(self):
        text = run("help", "bench", "model").stdout.decode()
        listed = re.findall(r"^  (?:-\w, |    )--([\w-]+)", text, re.M)
        self.assertEqual(sorted(listed), sorted(OPTIONS))

    # Fault: a list whose bad word is read as something else, or reported without its option.
    def test_bad_lists(self):
        for option in ("--prompt", "--generate", "--depth", "--batch", "--threads"):
            self.refused([option, "4,x"], option, '"x"')
            self.refused([option, "4,"], option, '""')
            self.refused([option, "-1"], option, '"-1"')
            self.refused([option, ",".join(["16"] * 33)], option, "at most 32")
        self.refused(["--threads", "0"], "--threads", '"0"')
        self.refused(["--batch", "0"], "--batch", '"0"')
        self.refused(["--prompt", "1048577"], "--prompt", "1048576")
        self.refused(["-p", "0", "-n", "0"], "--prompt", "--generate")

    # Fault: a combination that is silently taken for another one.
    def test_bad_combinations(self):
        self.refused(["--shares", "--device", "cpu"], "--shares", "GPU")
        self.refused(["--energy-ms", "500", "--device", "cpu"], "--energy-ms", "GPU")
        self.refused(["--ablate", "mlp", "--device", "cpu"], "--ablate", "GPU")
        self.refused(["a.gguf", "-m", "b.gguf"], "MODEL", "--model")
        self.refused(["-d", "8", "-p", "16", "--no-roofs"], "--depth", "16")
        self.refused(["-b", "1,32", "-u", "16"], "--batch", "at most 1 ", "found 32")
        self.refused(["--json", ""], "--json")
        self.refused(["-m", self.path("none.gguf")], "none.gguf")


if __name__ == "__main__":
    unittest.main()
