#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex bench engine. No test asserts a speed: they count, and check that figures fit together."""
import json
import os
import re
import signal
import statistics
import subprocess
import unittest

from support import IMBREX, SANITIZED, TIMEOUT_S, TestCase, open_terminal, run

OPTIONS = {"requests", "concurrency", "rate", "prompt-tokens", "output-tokens", "trace", "speed",
           "clip", "n", "priority-mix", "temp", "seed", "warmup", "ctx-size", "kv-cache",
           "max-running", "max-step-tokens", "no-batch-invariant", "compare-invariant", "threads",
           "cpu", "slo-ttft", "slo-itl", "json", "help", "kv-policy", "kv-dtype", "kv-host",
           "kv-disk", "kv-prefetch", "kv-remote", "kv-remote-secret", "kv-write", "shared-prefix",
           "device", "compute", "ablate", "tuned", "nvtx", "batch-invariant"}
MEASURES = ("ttft_ms", "itl_ms", "tpot_ms", "queue_ms", "end_to_end_ms")
AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
         "2023-11-16 18:15:46.6805900,37,4\r\n"
         "2023-11-16 18:15:46.6815900,9,6\r\n"
         "2023-11-16 18:15:46.7805900,5,11")


class BenchTestCase(TestCase):
    def bench(self, *arguments):
        """The report as JSON, checked for what holds for every one."""
        result = run("bench", "engine", *arguments, "--json", "-")
        self.assert_ok(result)
        report = json.loads(result.stdout)
        self.assertFalse(report["interrupted"])
        if report["result"] is not None:
            self.assert_consistent(report, report["result"])
        return report

    def assert_consistent(self, report, result):
        self.assertEqual(result["completed"] + result["failed"] + result["cancelled"],
                         report["load"]["requests"])
        self.assertLessEqual(result["good"], result["completed"])
        self.assertEqual(sum(group["completed"] for group in result["priorities"]),
                         result["completed"])
        for measure in MEASURES:
            figures = result[measure]
            self.assertLessEqual(figures["min"], figures["mean"])
            self.assertLessEqual(figures["mean"], figures["max"])
            order = [figures[name] for name in ("min", "p50", "p90", "p99", "max")]
            self.assertEqual(order, sorted(order), measure)
        choices = report["load"]["choices"]
        for measure in ("ttft_ms", "queue_ms", "end_to_end_ms"):
            self.assertEqual(result[measure]["count"], result["completed"])
        # Each text has one gap less than tokens.
        self.assertEqual(result["itl_ms"]["count"], result["output_tokens"] -
                         result["unfinished_output_tokens"] - choices * result["completed"])
        for tokens in ("prompt_tokens", "output_tokens"):
            self.assertAlmostEqual(result[tokens + "_per_s"] * result["duration_s"],
                                   result[tokens], delta=1e-3 * result[tokens])
        steps = result["steps"]
        self.assertGreater(steps["count"], 0)
        self.assertEqual(steps["failed"], 0)
        self.assertLess(steps["forward_ms"], steps["mean_ms"])
        self.assertGreater(steps["overhead_ms"], 0)
        self.assertAlmostEqual(steps["overhead_percent"],
                               100 * steps["overhead_ms"] / steps["mean_ms"], delta=1e-3)


class Loads(BenchTestCase):
    # Fault: requests or tokens that are lost, counted twice, or counted with those of the warm-up.
    def test_closed_loop(self):
        report = self.bench("--requests", "7", "--concurrency", "3", "--prompt-tokens", "20",
                            "--output-tokens", "6", "--warmup", "5", "--threads", "2")
        result = report["result"]
        self.assertEqual((result["completed"], result["prompt_tokens"], result["output_tokens"]),
                         (7, 7 * 20, 7 * 6))
        self.assertEqual(result["tpot_ms"]["count"], 7)
        self.assertEqual((report["load"]["concurrency"], report["load"]["rate"]), (3, None))
        self.assertEqual((report["engine"]["context_size"], report["engine"]["num_threads"]),
                         (26, 2))
        self.assertGreater(result["mean_running"], 0)
        self.assertLessEqual(result["mean_running"], 3)
        self.assertEqual(result["preemptions"], 0)
        # At most three requests share a step, and each token but the first takes one.
        self.assertGreaterEqual(result["steps"]["count"], 7 * 6 / 3)

    # Fault: the machine, the model or the engine that figures belong to is not told.
    def test_circumstances(self):
        report = self.bench("--requests", "1", "--output-tokens", "1", "--cpu", "ref",
                            "--no-batch-invariant", "--max-running", "5", "--max-step-tokens", "64")
        self.assertEqual(report["machine"]["version"],
                         run("--version").stdout.decode().split()[1])
        self.assertGreater(report["machine"]["num_cpus"], 0)
        self.assertTrue(report["machine"]["cpu"])
        self.assertEqual(report["model"]["path"], "builtin:stories260K")
        engine = report["engine"]
        self.assertEqual((engine["kernels"], engine["batch_invariant"], engine["max_running"],
                          engine["max_step_tokens"]), ("ref", False, 5, 64))

    # Fault: an open loop that waits for answers, or forgets requests that are due at the end.
    def test_open_loop(self):
        report = self.bench("--requests", "9", "--rate", "500", "--prompt-tokens", "5",
                            "--output-tokens", "3")
        self.assertEqual((report["result"]["completed"], report["result"]["output_tokens"]),
                         (9, 27))
        self.assertEqual((report["load"]["concurrency"], report["load"]["rate"]), (None, 500))

    # Fault: continuations beyond the first are not counted, or their gaps are mixed up.
    def test_choices(self):
        result = self.bench("--requests", "3", "--n", "4", "--prompt-tokens", "5",
                            "--output-tokens", "6", "--temp", "1")["result"]
        self.assertEqual((result["output_tokens"], result["prompt_tokens"]), (3 * 4 * 6, 15))
        self.assertEqual(result["tpot_ms"]["count"], 12)

    # Fault: lengths outside of the range, always the same, or not repeated by the seed.
    def test_range(self):
        def tokens(seed):
            result = self.bench("--requests", "40", "--prompt-tokens", "2-9", "--output-tokens",
                                "1-3", "--seed", seed)["result"]
            self.assertEqual(result["completed"], 40)
            self.assertGreater(result["prompt_tokens"], 40 * 2)
            self.assertLess(result["prompt_tokens"], 40 * 9)
            self.assertGreater(result["output_tokens"], 40)
            self.assertLess(result["output_tokens"], 40 * 3)
            return result["prompt_tokens"], result["output_tokens"]

        self.assertEqual(tokens("1"), tokens("1"))
        self.assertGreater(len({tokens(seed) for seed in "1234"}), 1)

    # Fault: MEAN is not the mean of the tokens but, say, that of the normal distribution below.
    def test_lognormal(self):
        result = self.bench("--requests", "300", "--prompt-tokens", "lognormal:30,0.8",
                            "--output-tokens", "1", "--concurrency", "32")["result"]
        self.assertAlmostEqual(result["prompt_tokens"] / 300, 30, delta=5)
        self.assertEqual(result["itl_ms"]["count"], 0)

    # Fault: priorities are not given, or requests are shown under another one.
    def test_priorities(self):
        groups = self.bench("--requests", "60", "--priority-mix", "0=9,10=1,-5=2",
                            "--prompt-tokens", "2", "--output-tokens", "1")["result"]["priorities"]
        self.assertEqual([group["priority"] for group in groups], [10, 0, -5])
        self.assertGreater(groups[1]["completed"], groups[0]["completed"] + groups[2]["completed"])
        for group in groups:
            self.assertEqual(group["ttft_ms"]["count"], group["completed"])

    # Fault: a sum of weights that is infinite gives all requests one priority.
    def test_large_weights(self):
        groups = self.bench("--requests", "60", "--priority-mix", "0=1e308,1=1e308",
                            "--prompt-tokens", "2", "--output-tokens", "1")["result"]["priorities"]
        self.assertEqual([group["priority"] for group in groups], [1, 0])
        for group in groups:
            self.assertGreater(group["completed"], 10)

    # Fault: limits are not applied, or one of two is enough.
    def test_goodput(self):
        for limits, expected in (([], 5), (["--slo-ttft", "1e9"], 5),
                                 (["--slo-itl", "1e9", "--slo-ttft", "1e-6"], 0),
                                 (["--slo-itl", "1e-6", "--slo-ttft", "1e9"], 0)):
            report = self.bench("--requests", "5", "--output-tokens", "3", *limits)
            self.assertEqual(report["result"]["good"], expected, limits)
            self.assertEqual(report["result"]["goodput_per_s"] > 0, expected > 0)

    # Fault: a model without a tokenizer cannot be measured.
    def test_no_tokenizer(self):
        model = self.model()
        arguments = [model.folder, "--requests", "2", "--prompt-tokens", "4", "--output-tokens",
                     "3"]
        self.assertTrue(self.bench(*arguments)["load"]["has_text"])
        os.remove(model.path("tokenizer.json"))
        report = self.bench(*arguments)
        self.assertEqual(report["result"]["output_tokens"], 6)
        self.assertEqual((report["model"]["path"], report["load"]["has_text"]),
                         (model.folder, False))

    # Fault: MODEL cannot be a random one, which has neither files nor a tokenizer.
    @unittest.skipIf(SANITIZED, "its 494 million weights take long to make")
    def test_random_model(self):
        report = self.bench("random:qwen2.5-0.5b", "--requests", "1", "--prompt-tokens", "4",
                            "--output-tokens", "2", "--warmup", "0")
        self.assertEqual(report["result"]["output_tokens"], 2)
        self.assertEqual((report["model"]["format"], report["load"]["has_text"]), ("random", False))

    # Fault: the cache that is chosen does not hold all that runs at once.
    def test_chosen_kv_cache(self):
        report = self.bench("--requests", "60", "--concurrency", "60", "--prompt-tokens", "5-20",
                            "--output-tokens", "28")
        engine = report["engine"]
        self.assertEqual((report["result"]["preemptions"], engine["max_running"]), (0, 64))
        self.assertLessEqual(engine["kv_num_blocks"], 60 * 3)

    # Fault: with requests of one block the cache that is chosen has one block, so that one runs at
    # a time; or more continuations than run at once do not count.
    def test_chosen_kv_cache_of_short_requests(self):
        for arguments, num_sequences in (
                (["--requests", "64", "--prompt-tokens", "3", "--output-tokens", "10"], 8),
                (["--requests", "4", "--n", "20", "--prompt-tokens", "10", "--output-tokens", "6"],
                 64),
                (["--requests", "200", "--concurrency", "200", "--prompt-tokens", "1",
                  "--output-tokens", "1", "--max-running", "100"], 100)):
            engine = self.bench(*arguments)["engine"]
            self.assertGreaterEqual(engine["kv_num_blocks"], num_sequences, arguments)
            self.assertEqual(engine["max_running"], max(num_sequences, 64), arguments)
        engine = self.bench("--requests", "1", "--prompt-tokens", "1", "--output-tokens", "1",
                            "--concurrency", "1", "--max-running", "7")["engine"]
        self.assertEqual(engine["max_running"], 7)

    # Fault: less KV cache than the requests need hangs, fails them, or loses tokens.
    def test_small_kv_cache(self):
        result = self.bench("--requests", "6", "--concurrency", "6", "--prompt-tokens", "8",
                            "--output-tokens", "60", "--kv-cache", "96")["result"]
        self.assertEqual((result["completed"], result["output_tokens"]), (6, 360))
        self.assertGreater(result["preemptions"], 0)

    # Fault: prompts do not begin alike, or alike for longer than was asked for; the share is that
    # of something else, or shown where nothing is kept.
    def test_shared_prefix(self):
        arguments = ["--requests", "7", "--concurrency", "1", "--prompt-tokens", "64",
                     "--output-tokens", "2", "--warmup", "2", "--kv-cache", "2048"]
        alike = [*arguments, "--shared-prefix", "48"]
        report = self.bench(*alike)
        result = report["result"]
        self.assertEqual((report["engine"]["kv_policy"], report["load"]["shared_prefix"]),
                         ("lru", 48))
        self.assertEqual((result["queried_tokens"], result["cached_tokens"]), (7 * 64, 6 * 48))
        self.assertAlmostEqual(result["cached_share"], 6 * 48 / (7 * 64))
        self.assertRegex(run("bench", "engine", *alike).stdout.decode(),
                         r"(?m)^cached +288 of 448 prompt tokens \(64\.3 %\)$")
        self.assertEqual(self.bench(*arguments)["result"]["cached_tokens"], 0)
        report = self.bench(*alike, "--kv-policy", "none")
        self.assertEqual((report["engine"]["kv_policy"], report["result"]["cached_tokens"]),
                         ("none", 0))
        text = run("bench", "engine", *alike, "--kv-policy", "none").stdout.decode()
        self.assertNotIn("cached", text)

    # Fault: a run of the comparison finds what an earlier one left.
    def test_compare_without_cache(self):
        report = self.bench("--requests", "2", "--output-tokens", "2", "--compare-invariant")
        self.assertEqual(report["engine"]["kv_policy"], "none")
        for pair in report["compare_invariant"]["pairs"]:
            self.assertEqual((pair["on"]["cached_tokens"], pair["off"]["cached_tokens"]), (0, 0))

    # Fault: the cost is not that of the pairs that are shown.
    def test_compare_invariant(self):
        report = self.bench("--requests", "4", "--output-tokens", "4", "--compare-invariant")
        self.assertIsNone(report["result"])
        self.assertIsNone(report["engine"]["batch_invariant"])
        comparison = report["compare_invariant"]
        self.assertEqual(len(comparison["pairs"]), 3)
        for pair in comparison["pairs"]:
            for result in (pair["on"], pair["off"]):
                self.assert_consistent(report, result)
                self.assertEqual(result["output_tokens"], 16)
            self.assertAlmostEqual(
                pair["cost_percent"],
                100 * (1 - pair["on"]["output_tokens_per_s"] / pair["off"]["output_tokens_per_s"]),
                delta=1e-3)
        costs = [pair["cost_percent"] for pair in comparison["pairs"]]
        self.assertAlmostEqual(comparison["cost_percent"], statistics.median(costs), delta=1e-6)
        self.assertEqual((comparison["cost_min_percent"], comparison["cost_max_percent"]),
                         (min(costs), max(costs)))
        self.assertEqual(comparison["is_noise"],
                         max(costs) - min(costs) > abs(statistics.median(costs)))

    # Fault: the table shows a cost without how it is computed or how sure it is.
    def test_compare_invariant_table(self):
        path = self.path("report.json")
        result = run("bench", "engine", "--requests", "4", "--output-tokens", "4",
                     "--compare-invariant", "--json", path)
        self.assert_ok(result)
        text = result.stdout.decode()
        with open(path, encoding="utf-8") as file:
            comparison = json.load(file)["compare_invariant"]
        median, least, most = (f"{comparison[key + '_percent']:.2f} %"
                               for key in ("cost", "cost_min", "cost_max"))
        self.assertIn(f"{median}, min {least}, max {most}", text)
        self.assertIn("(off - on) / off", text)
        self.assertEqual("\nnoise: " in text, comparison["is_noise"])


class Traces(BenchTestCase):
    def assert_refused(self, content, *parts):
        path = self.write("trace.csv", content)
        self.assert_error(run("bench", "engine", "--trace", path), 2, path, *parts)

    # Fault: columns are taken by their place, lines or lengths are lost, CRLF is part of a number.
    def test_columns(self):
        own = ("x, output_tokens ,Arrival_MS,prompt_tokens\n"
               "a,4,0.5,37\n\nb,6,0.5,9\nc,11,1e1,5\n")
        for content in (AZURE, own, own.replace("Arrival_MS", "arrival_s").replace("1e1", "0.51")):
            report = self.bench("--trace", self.write("trace.csv", content))
            result = report["result"]
            self.assertEqual((result["completed"], result["prompt_tokens"],
                              result["output_tokens"]), (3, 51, 21))
            self.assertEqual(report["engine"]["context_size"], 41)
            self.assertEqual(report["load"]["speed"], 1)

    # Fault: --requests, --speed or another way to arrive is ignored with a trace.
    def test_options(self):
        path = self.write("trace.csv", AZURE)
        report = self.bench("--trace", path, "--requests", "2", "--speed", "3")
        self.assertEqual((report["load"]["speed"], report["result"]["prompt_tokens"]), (3, 46))
        for option in ("--concurrency", "--rate"):
            report = self.bench("--trace", path, option, "100")
            self.assertIsNone(report["load"]["speed"])
            self.assertEqual(report["result"]["output_tokens"], 21)
        result = run("bench", "engine", "--trace", "-", "--json", "-", input=AZURE.encode())
        self.assertEqual(json.loads(result.stdout)["result"]["completed"], 3)

    # Fault: times that are not used are asked for, or read all the same.
    def test_unused_times(self):
        for content in ("prompt_tokens,output_tokens\n37,4\n9,6\n",
                        "arrival_s,prompt_tokens,output_tokens,arrival_ms\n5,37,4,x\n3,9,6,\n"):
            path = self.write("trace.csv", content)
            for option in ("--concurrency", "--rate"):
                result = self.bench("--trace", path, option, "100")["result"]
                self.assertEqual((result["prompt_tokens"], result["output_tokens"]), (46, 10))
        self.assert_refused("prompt_tokens,output_tokens\n37,4\n", "line 1", "arrival_s")

    # Fault: a byte order mark or quotes become part of a field, or a comma in quotes ends it.
    def test_byte_order_mark_and_quotes(self):
        own = ('\ufeff"arrival_s",note, "prompt_tokens" ,"output_tokens"\r\n'
               '"0","a, ""b"", c","37","4"\r\n0,,9,6\r\n"0.01","", "5" ,11\r\n')
        for content in (own, "\ufeff" + AZURE):
            result = self.bench("--trace", self.write("trace.csv", content))["result"]
            self.assertEqual((result["completed"], result["prompt_tokens"],
                              result["output_tokens"]), (3, 51, 21))
        self.assert_refused("\ufeff", "an empty file")
        header = "arrival_s,prompt_tokens,output_tokens\n"
        for line, column in (('1,"2,3', 2), ('1,"2"x,3', 2), ('"1""', 1), ('1,2,"', 3)):
            self.assert_refused(f"{header}{line}\n", f"line 2, column {column}: expected",
                                "quoted")
        self.assert_refused('"arrival_s\n', "line 1, column 1: expected", "quoted")

    # Fault: a time that is too late is said to be below 0.
    def test_late_times(self):
        for name, expected in (("arrival_s", "[0, 9e9] s"), ("arrival_ms", "[0, 9e12] ms")):
            self.assert_refused(f"{name},prompt_tokens,output_tokens\n1e308,1,1\n",
                                f"line 2, column 1 ({name})", expected, '"1e308"')

    # Fault: a wrong line is skipped, or the message does not tell which and why.
    def test_bad_traces(self):
        header = "arrival_s,prompt_tokens,output_tokens\n"
        self.assert_refused("", "an empty file")
        self.assert_refused(header, "no request")
        self.assert_refused("1,2,3\n", "line 1", "arrival_s", "found none")
        self.assert_refused("arrival_s,prompt_tokens\n", "line 1", "output_tokens", "found none")
        self.assert_refused("arrival_s,prompt_tokens,arrival_ms,output_tokens\n", "line 1",
                            "column 3", "found two")
        for line, column, name, found in (
                ("1,0,3", 2, "prompt_tokens", '"0"'), ("1,2,x", 3, "output_tokens", '"x"'),
                ("1,2,-3", 3, "output_tokens", '"-3"'), ("1,2.5,3", 2, "prompt_tokens", '"2.5"'),
                ("1,2,16777217", 3, "output_tokens", '"16777217"'),
                ("1,99999999999999999999,3", 2, "prompt_tokens", "99999"),
                (",2,3", 1, "arrival_s", '""'), ("-1,2,3", 1, "arrival_s", '"-1"'),
                ("nan,2,3", 1, "arrival_s", '"nan"'), ("inf,2,3", 1, "arrival_s", '"inf"'),
                ("1,2", 3, "output_tokens", "end of the line"),
                ("0.1,2,3", 1, "arrival_s", '"0.1"')):
            self.assert_refused(f"{header}0.5,1,1\n{line}\n",
                                f"line 3, column {column} ({name}): expected", found)
        for time in ("1", "2023-13-01 00:00:00", "2023-11-16", "2023-11-16 18:15:46.5x"):
            self.assert_refused(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{time},1,1\n",
                                "line 2, column 1 (TIMESTAMP): expected", f'"{time}"')
        self.assert_error(run("bench", "engine", "--trace", self.path("none")), 2,
                          self.path("none"), "No such file")

    # Fault: a request that cannot fit reaches the engine, or is cut without being asked for.
    def test_too_long(self):
        path = self.write("trace.csv", AZURE + "\n2023-11-16 18:15:46.7805900,600,5\n")
        self.assert_error(run("bench", "engine", "--trace", path), 2, f"{path}: line 5", "512",
                          "600 and 5", "--clip")
        result = self.bench("--trace", path, "--clip")["result"]
        self.assertEqual((result["prompt_tokens"], result["output_tokens"]), (51 + 507, 26))
        self.assert_error(run("bench", "engine", "-c", "30"), 2, "30 tokens of --ctx-size",
                          "128 and 64")
        result = self.bench("--requests", "2", "-c", "30", "--clip")["result"]
        self.assertEqual((result["prompt_tokens"], result["output_tokens"]), (2, 58))

    # Fault: the lengths that are shown with --clip are those before the cut, without a word.
    def test_clipped_load(self):
        path = self.path("report.json")
        arguments = ["--requests", "3", "--prompt-tokens", "20", "--output-tokens", "5", "--clip",
                     "--json", path]
        for size, num_cut in (("12", 3), ("25", 0)):
            text = run("bench", "engine", "-c", size, *arguments).stdout.decode()
            self.assertEqual(f"{num_cut} cut to {size} together" in text, num_cut > 0, text)
            with open(path, encoding="utf-8") as file:
                self.assertEqual(json.load(file)["load"]["cut"], num_cut)


class Reports(BenchTestCase):
    # Fault: the table leaves out what the JSON has, or goes into the same stream.
    def test_table(self):
        path = self.path("report.json")
        result = run("bench", "engine", "--requests", "4", "--output-tokens", "5", "--json", path)
        self.assert_ok(result)
        self.assertEqual(result.stderr, b"")
        text = result.stdout.decode()
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        self.assert_consistent(report, report["result"])
        for label in ("model", "machine", "engine", "load", "requests", "duration", "prompts",
                      "outputs", "goodput", "TTFT", "ITL", "TPOT", "queue time", "end to end",
                      "steps", "step", "mean running", "preemptions"):
            self.assertRegex(text, rf"(?m)^{label} +\S")
        self.assertIn("4 completed, 0 failed", text)
        self.assertIn("(20 tokens)", text)
        self.assertRegex(text, rf"(?m)^TTFT +{report['result']['ttft_ms']['mean']:.3f} ")

    # Fault: one of a thing is shown as many.
    def test_singular(self):
        result = run("bench", "engine", "--requests", "1", "--prompt-tokens", "1",
                     "--output-tokens", "1", "--kv-cache", "2", "--max-running", "1")
        self.assert_ok(result)
        text = result.stdout.decode()
        for words in ("1 KV block of", "at most 1 sequence and 2 tokens", " 1 request,",
                      "prompts of 1 token, outputs of 1", "(1 token)"):
            self.assertIn(words, text)

    # Fault: a second report is written behind the first.
    def test_json_is_replaced(self):
        path = self.write("report.json", "x" * 10000)
        self.assert_ok(run("bench", "engine", "--requests", "1", "--output-tokens", "1", "--json",
                           path))
        with open(path, encoding="utf-8") as file:
            self.assertEqual(json.load(file)["result"]["completed"], 1)

    # Fault: a report that cannot be written is lost without a word, or costs a whole run.
    def test_unwritable_json(self):
        path = self.path("none/report.json")
        self.assert_error(run("bench", "engine", "--json", path), 1, path, "No such file")
        result = run("bench", "engine", "--requests", "1", "--json", "/dev/full")
        self.assert_error(result, 1, "/dev/full", "No space left")

    def interrupt(self, until, *arguments):
        """The table and the JSON of a run that gets SIGINT once `until` is shown."""
        terminal, stderr = open_terminal(self)
        path = self.path("report.json")
        with subprocess.Popen([IMBREX, "bench", "engine", *arguments, "--json", path],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=stderr) as process:
            self.addCleanup(process.kill)
            os.close(stderr)
            shown = b""
            while not re.search(until, shown):
                shown += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            text = process.communicate(timeout=TIMEOUT_S)[0].decode()
        os.close(terminal)
        self.assertEqual(process.returncode, 130, text)
        self.assertIn("ended early by a signal", text)
        self.assertRegex(text, r"(?m)^duration .* s, until the signal$")
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        self.assertTrue(report["interrupted"])
        self.assertEqual(report["result"]["failed"], 0)
        return text, report

    # Fault: Ctrl-C loses what was measured, or waits for the end of the load.
    def test_interrupt(self):
        # The warm-up shows none of these.
        _, report = self.interrupt(rb" of 1000000 requests", "--requests", "1000000",
                                   "--prompt-tokens", "4", "--output-tokens", "4")
        result = report["result"]
        self.assert_consistent(report, result)
        self.assertGreater(result["cancelled"], 0)
        self.assertEqual(result["output_tokens"],
                         4 * result["completed"] + result["unfinished_output_tokens"])

    # Fault: the steps of requests that a signal ends are counted, but not their tokens, their time
    # or their part in what ran.
    def test_interrupted_requests(self):
        text, report = self.interrupt(rb"0 of 3 requests, 3 running", "--requests", "3",
                                      "--warmup", "0", "--prompt-tokens", "5", "--output-tokens",
                                      "50000", "-c", "50005", "--kv-cache", "50005")
        result = report["result"]
        self.assertEqual((result["completed"], result["cancelled"]), (0, 3))
        self.assertGreater(result["output_tokens"], 0)
        self.assertEqual(result["unfinished_output_tokens"], result["output_tokens"])
        self.assertEqual(result["unfinished_prompt_tokens"], result["prompt_tokens"])
        self.assertGreater(result["mean_running"], 0)
        self.assertIn(f"{result['output_tokens']} of unfinished requests", text)

    # Fault: the time between the last request that ended and the signal is left out.
    def test_interrupted_pause(self):
        trace = self.write("trace.csv", "arrival_s,prompt_tokens,output_tokens\n0,3,1\n9e5,3,1\n")
        text, report = self.interrupt(rb"1 of 2 requests, 0 running", "--trace", trace, "--warmup",
                                      "0")
        result = report["result"]
        self.assertEqual((result["completed"], result["cancelled"]), (1, 1))
        # Both begin with the load; the slack is what JSON rounds away.
        self.assertGreater(1e3 * result["duration_s"], result["end_to_end_ms"]["max"] + 1e-5)
        self.assertNotIn("of unfinished requests", text)


class Mistakes(TestCase):
    def assert_refused(self, *arguments):
        *arguments, expected = arguments
        self.assert_error(run("bench", "engine", *arguments), 2, "bench engine: ", *expected)

    # Fault: a slip in the second word is answered without naming it, or without a way on.
    def test_commands(self):
        self.assert_error(run("bench"), 2, "bench: expected a command behind it",
                          "imbrex bench --help")
        self.assert_error(run("bench", "enigne"), 2, "enigne", "did you mean engine?",
                          "imbrex bench --help")
        self.assert_error(run("bench", "-x"), 2, "unknown option -x")
        self.assert_error(run("help", "bench", "frob"), 2, "unknown command frob")
        self.assert_error(run("help", "bench", "engine", "x"), 2, '"x" after engine')
        self.assert_error(run("bench", "engine", "a", "b"), 2, '"b" after a')
        self.assert_error(run("bench", "engine", "--raet", "1"), 2, "did you mean --rate?",
                          "imbrex bench engine --help")

    # Fault: an option that is parsed but not in --help, listed twice, or help that wraps.
    def test_help(self):
        for arguments in (["bench", "--help"], ["help", "bench"]):
            text = run(*arguments).stdout.decode()
            self.assertRegex(text, r"(?m)^  engine +\w")
        text = run("bench", "engine", "--help").stdout.decode()
        self.assertEqual(run("help", "bench", "engine").stdout.decode(), text)
        listed = re.findall(r"^  (?:-\w, |    )--([\w-]+)", text, re.M)
        self.assertEqual(sorted(listed), sorted(OPTIONS))
        for line in text.split("\n"):
            self.assertLessEqual(len(line), 80, line)
        self.assertRegex(run("--help").stdout.decode(), r"(?m)^  bench +\w")

    # Fault: a length that is read as another one.
    def test_lengths(self):
        for option in ("--prompt-tokens", "--output-tokens"):
            for length in ("0", "", "-3", "3-", "5-4", "0-4", "1-16777217", "x", "3x", "3-4-5",
                           "1e3", "lognormal:3", "lognormal:0,1", "lognormal:9,6", "lognormal:9,-1",
                           "lognormal:nan,1", "lognormal:9,1,", "normal:9,1", "99999999999999999"):
                self.assert_refused(option, length, [f"{option}: expected N, MIN-MAX or "
                                                     "lognormal:MEAN,SIGMA", f'found "{length}"'])

    # Fault: a value is refused with a range that it is in, by a name that is no option's, or with
    # the name of no file.
    def test_values(self):
        self.assert_refused("--rate", "1e-300", ["--rate", "[1e-06, 1e+06]", '"1e-300"'])
        self.assert_refused("--speed", "1e-300", ["--speed", "[1e-06, 1e+06]"])
        self.assert_refused("--slo-ttft", "1e-300", ["--slo-ttft", "[1e-06, 1e+09]"])
        self.assert_refused("--slo-itl", "1e-300", ["--slo-itl", "[1e-06, 1e+09]"])
        self.assert_refused("--max-running", "4097", ["--max-running", "[1, 4096]", "4097"])
        self.assert_refused("--max-step-tokens", "65537", ["--max-step-tokens", "[1, 65536]"])
        self.assert_error(run("bench", "engine", "--kv-cache", "191"), 2,
                          "--kv-cache: expected at least the context of 192 tokens", "found 191")
        self.assert_refused("--json", "", ["--json", "name of a file", '""'])
        self.assert_refused("--trace", "", ["--trace", "name of a file", '""'])

    # Fault: options that contradict each other are resolved by chance.
    def test_contradictions(self):
        self.assert_refused("--rate", "1", "--concurrency", "2",
                            ["--concurrency and --rate", "both"])
        self.assert_refused("--speed", "2", ["--speed", "--trace"])
        self.assert_refused("--trace", "x", "--rate", "1", "--speed", "2", ["--speed"])
        self.assert_refused("--trace", "x", "--prompt-tokens", "2", ["--trace", "--prompt-tokens"])
        self.assert_refused("--trace", "x", "--output-tokens", "2", ["--trace", "--output-tokens"])
        self.assert_refused("--compare-invariant", "--rate", "1", ["closed loop"])
        self.assert_refused("--compare-invariant", "--no-batch-invariant", ["both"])
        self.assert_refused("--compare-invariant", "--kv-policy", "lru", ["--kv-policy none"])
        self.assert_refused("--compare-invariant", "--kv-host", "8M",
                            ["--compare-invariant", "--kv-host"])
        for mix in ("", "3", "3=", "3=0", "3=1,", "2000=1", "=1", "1=1;2=1", "1=x",
                    ",".join(["1=1"] * 9)):
            self.assert_refused("--priority-mix", mix, ["PRIORITY=WEIGHT", f'found "{mix}"'])


if __name__ == "__main__":
    unittest.main()
