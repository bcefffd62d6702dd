#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex bench kv: the load, what the engines find of it, the report, bad input."""
import json
import os
import re
import unittest

from support import TestCase, run

OPTIONS = {"sessions", "session-rate", "turns", "think", "system-tokens", "turn-tokens",
           "output-tokens", "trace", "starts", "requests", "scale", "speed", "concurrency", "seed",
           "policy", "rounds", "kv-cache", "tiers", "kv-host", "kv-disk", "kv-prefetch",
           "kv-write", "max-running", "ctx-size", "threads", "cpu", "device", "kv-dtype",
           "write-trace", "json", "help"}
# One after the other: what is found depends on no time.
ONE = ("--concurrency", "1", "--kv-cache", "4096", "--policy", "lru")
# Short conversations.
SHORT = ("--turns", "3", "--system-tokens", "64", "--turn-tokens", "32", "--output-tokens", "16",
         "--think", "1")
# Blocks of 16 tokens instead of 512.
SCALE = ("--scale", "0.03125")


def mooncake(*paths, times=None):
    return "".join(json.dumps({"timestamp": times[i] if times else 10 * i,
                               "input_length": 512 * len(path), "output_length": 64,
                               "hash_ids": list(path)}) + "\n" for i, path in enumerate(paths))


def weka(*sessions, scope="local"):
    return "".join(json.dumps({"block_size": 64, "hash_id_scope": scope, "requests": session})
                   + "\n" for session in sessions)


def turn(at, *ids):
    return {"t": at, "in": 64 * len(ids) + 7, "out": 32, "hash_ids": list(ids)}


class KvTestCase(TestCase):
    def bench(self, *arguments):
        result = run("bench", "kv", "--threads", "1", *arguments, "--json", "-")
        self.assert_ok(result)
        report = json.loads(result.stdout)
        self.assertFalse(report["interrupted"])
        for one in report["runs"]:
            self.assertEqual(one["completed"], report["load"]["requests"])
            self.assertEqual(one["queried_tokens"], one["prompt_tokens"])
            self.assertEqual(one["computed_tokens"], one["prompt_tokens"] - one["cached_tokens"])
            self.assertAlmostEqual(one["hit_rate"], one["cached_tokens"] / one["queried_tokens"])
            order = [one["ttft_ms"][name] for name in ("p50", "p90", "p99", "max")]
            self.assertEqual(order, sorted(order))
        return report

    def cached(self, *arguments):
        """Of the only run: tokens that were found, and all."""
        runs = self.bench(*ONE, *arguments)["runs"]
        self.assertEqual(len(runs), 1)
        return runs[0]["cached_tokens"], runs[0]["prompt_tokens"]


class Conversations(KvTestCase):
    # Fault: a turn does not begin with the one before, conversations do not share their system
    # prompt, or share more than that.
    def test_shared_beginnings(self):
        turns, prompts = 96 + 144, 96 + 144 + 192
        self.assertEqual(self.cached(*SHORT, "--sessions", "1"), (turns, prompts))
        self.assertEqual(self.cached(*SHORT, "--sessions", "3"),
                         (3 * turns + 2 * 64, 3 * prompts))
        self.assertEqual(self.cached(*SHORT, "--sessions", "3", "--system-tokens", "0"),
                         (3 * (32 + 80), 3 * (32 + 80 + 128)))

    # Fault: a request that waits for its time is lost, or sent twice.
    def test_times(self):
        report = self.bench(*SHORT, "--sessions", "4", "--speed", "50", "--policy", "lru",
                            "--kv-cache", "4096")
        self.assertEqual((report["load"]["concurrency"], report["load"]["requests"]), (0, 12))
        self.assertEqual(report["runs"][0]["prompt_tokens"], 4 * 432)

    # Fault: the seed changes nothing, or the load is another one each time.
    def test_seed(self):
        one, again, other = (self.bench("--sessions", "5", "--seed", seed, *ONE)["load"]
                             for seed in ("7", "7", "8"))
        self.assertEqual(one, again)
        self.assertNotEqual(one["different_tokens"], other["different_tokens"])


class Policies(KvTestCase):
    # Fault: a tier that is not below its run, or is below the others; less that is found with it.
    def test_host(self):
        runs = self.bench("--sessions", "8", "--concurrency", "1", "--policy", "none,lru",
                          "--kv-cache", "256", "--ctx-size", "256", "--kv-host", "16M",
                          *SHORT)["runs"]
        self.assertEqual([(one["policy"], one["has_host"]) for one in runs],
                         [("none", False), ("lru", False), ("lru", True)])
        self.assertEqual([one["host_tokens"] > 0 for one in runs], [False, False, True])
        self.assertGreater(runs[2]["cached_tokens"], runs[1]["cached_tokens"])

    # Fault: what one run left is found by the next, the order stays the same, or a policy's figures
    # are shown as another's.
    def test_rounds(self):
        runs = self.bench("--sessions", "6", *SHORT, "--concurrency", "1", "--policy", "none,lru",
                          "--rounds", "2", "--kv-cache", "300", "--ctx-size", "256")["runs"]
        self.assertEqual([(one["policy"], one["round"]) for one in runs],
                         [("none", 1), ("lru", 1), ("lru", 2), ("none", 2)])
        self.assertEqual(runs[1]["cached_tokens"], runs[2]["cached_tokens"])
        self.assertGreater(runs[1]["cached_tokens"], 0)
        self.assertEqual(len({one["output_tokens"] for one in runs}), 1)

    # The engine counts nothing without a cache.
    def bench(self, *arguments):
        result = run("bench", "kv", *arguments, "--json", "-")
        self.assert_ok(result)
        report = json.loads(result.stdout)
        for one in report["runs"]:
            if one["policy"] == "none":
                self.assertEqual((one["cached_tokens"], one["hit_rate"]), (0, 0))
        return report

    # Fault: a smaller cache finds as much: its size is not what was asked for.
    def test_cache_size(self):
        small, large = (self.bench("--sessions", "8", *SHORT, "--concurrency", "1", "--policy",
                                   "lru", "--kv-cache", size) for size in ("512", "8192"))
        self.assertEqual((small["engine"]["kv_num_blocks"], large["engine"]["kv_num_blocks"]),
                         (32, 512))
        self.assertLess(small["runs"][0]["cached_tokens"], large["runs"][0]["cached_tokens"])

    # Fault: the table lacks a row, or shows other figures than the JSON.
    def test_table(self):
        arguments = ["--sessions", "4", *SHORT, "--concurrency", "1", "--policy", "lru,lfu"]
        result = run("bench", "kv", *arguments)
        self.assert_ok(result)
        text = result.stdout.decode()
        for one in self.bench(*arguments)["runs"]:
            self.assertRegex(text, rf"(?m)^{one['policy']} +1 +{100 * one['hit_rate']:.2f} +"
                                   rf"{one['cached_tokens']} +{one['prompt_tokens']} +"
                                   rf"{one['computed_tokens']} ")


class Tiers(KvTestCase):
    SHAPE = ("--sessions", "8", *SHORT)

    # Fault: sizes that are not those of the load, a disk that is not below its run, or finds what
    # an earlier run left; folders that stay.
    def test_stacks(self):
        folder = self.path("folder")
        os.mkdir(folder)
        report = self.bench(*self.SHAPE, "--tiers", "--concurrency", "1", "--policy", "lru",
                            "--kv-host", "160K", "--kv-disk", f"{folder}:128M")
        token_bytes = report["engine"]["kv_token_bytes"]
        distinct = report["load"]["different_tokens"]
        self.assertEqual(report["engine"]["kv_num_blocks"], -(-(distinct // 3) // 16))
        self.assertEqual(report["engine"]["kv_host_bytes"], 160 << 10)
        self.assertEqual(report["engine"]["kv_disk_bytes"], 128 << 20)
        self.assertLess(160 << 10, distinct * token_bytes)
        runs = report["runs"]
        self.assertEqual([(one["policy"], one["has_host"], one["has_disk"]) for one in runs],
                         [("lru", False, False), ("lru", True, False), ("lru", True, True)])
        self.assertEqual([one["disk_tokens"] > 0 for one in runs], [False, False, True])
        self.assertGreaterEqual(runs[1]["cached_tokens"], runs[0]["cached_tokens"])
        self.assertGreater(runs[2]["cached_tokens"], runs[1]["cached_tokens"])
        self.assertEqual(os.listdir(folder), [])
        for one in runs:
            self.assertLessEqual(one["kv_ahead_used"] + one["kv_ahead_wasted"], one["kv_ahead"])
        # Those without tiers have no links.
        self.assertEqual([one["kv_block_ns"] > 0 for one in runs], [False, True, True])
        self.assertGreater(report["alone"]["prefill_tokens_per_s"], 0)
        self.assertGreater(report["alone"]["decode_s_per_token"], 0)

    # Fault: --tiers leaves a size to none, or the JSON goes to the terminal.
    def test_chosen(self):
        path = self.path("out.json")
        result = run("bench", "kv", *self.SHAPE, "--tiers", "--speed", "50", "--policy", "lru",
                     "--json", path)
        self.assert_ok(result)
        self.assertRegex(result.stdout.decode(), r"(?m)^lru \+host\+disk +1 ")
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual(report["benchmark"], "kv")
        self.assertEqual(report["command_line"],
                         "imbrex bench kv --sessions 8 --session-rate 4 --turns 3 --think 1 "
                         "--system-tokens 64 --turn-tokens 32 --output-tokens 16 --speed 50 "
                         "--seed 1 --policy lru --tiers --device auto")
        self.assertEqual(report["engine"]["kv_host_bytes"],
                         report["load"]["different_tokens"] * report["engine"]["kv_token_bytes"]
                         // 3)
        self.assertEqual(len(report["runs"]), 3)

    # Fault: a disk alone is not tried, or not in a folder that is not there yet; folders that were
    # made for the runs stay, or others go; a command line that gives another engine.
    def test_disk_alone(self):
        os.mkdir(self.path("some"))
        report = self.bench(*self.SHAPE, "--concurrency", "1", "--kv-cache", "256", "--ctx-size",
                            "256", "--policy", "lru", "--kv-dtype", "int8", "--cpu", "ref",
                            "--kv-disk", f"{self.path('some')}//where/else/:128M")
        runs = report["runs"]
        self.assertEqual(os.listdir(self.path("some")), [])
        self.assertIn(" --kv-dtype int8 --cpu ref", report["command_line"])
        self.assertEqual([(one["has_host"], one["has_disk"]) for one in runs],
                         [(False, False), (False, True)])
        # What has just passed through RAM on its way to the disk is found there, and is the disk's.
        self.assertGreater(runs[1]["disk_tokens"], 0)
        self.assertEqual(runs[1]["host_tokens"], 0)
        # Blocks go down as they are computed.
        self.assertGreater(runs[1]["kv_written"], 0)
        self.assertEqual(runs[0]["kv_written"], 0)
        self.assertGreater(runs[1]["cached_tokens"], runs[0]["cached_tokens"])

    # Fault: kv-sim replays another load than the engine had: other prompts, equal blocks that are
    # not, times.
    def test_written_trace(self):
        path = self.path("load.jsonl")
        shape = (*self.SHAPE, "--turn-tokens", "20", "--policy", "lru", "--kv-cache", "8192")
        report = self.bench(*shape, "--speed", "50", "--write-trace", path)
        with open(path, encoding="utf-8") as file:
            requests = [json.loads(line) for line in file]
        self.assertEqual(len(requests), report["load"]["requests"])
        self.assertEqual(sum(one["input_length"] for one in requests),
                         report["runs"][0]["prompt_tokens"])
        times = [one["timestamp"] for one in requests]
        self.assertEqual(times, sorted(times))
        self.assertEqual({len(one["hash_ids"]) - one["input_length"] // 16 for one in requests},
                         {0})
        paths = {tuple(one["hash_ids"][:length]) for one in requests
                 for length in range(1, len(one["hash_ids"]) + 1)}
        # All begin with the same 64 tokens; then each session is alone, turn upon turn.
        self.assertEqual({len({one["hash_ids"][i] for one in requests}) for i in range(4)}, {1})
        last_of = 64 + 3 * 20 + 2 * 16
        self.assertEqual(len(paths), 4 + 8 * ((last_of - 64) // 16))
        # The replay takes the block size of the engine, which stands in the trace.
        result = run("kv-sim", "--trace", path, "--capacity", "8192", "--policy", "lru",
                     "--prefill-rate", "1G", "--warm", "0", "--json", "-")
        self.assert_ok(result)
        table = json.loads(result.stdout)["tables"][0]
        self.assertEqual((table["trace"]["block_size"], table["trace"]["early_requests"]), (16, 0))
        row = table["rows"][-1]
        self.assertEqual(row["policy"], "infinite")
        hits = round(row["hit_rate"] * report["runs"][0]["prompt_tokens"])
        self.assertEqual(hits, sum(one["input_length"] // 16 for one in requests) * 16
                         - len(paths) * 16)
        # Played again, times are still seconds, blocks of 16 tokens; what fills none is left out.
        again = self.bench("--policy", "lru", "--kv-cache", "8192", "--speed", "10", "--trace",
                           path)
        self.assertEqual((again["load"]["block_tokens"], again["load"]["requests"]),
                         (16, len(requests)))
        self.assertEqual(again["load"]["different_tokens"], 16 * len(paths))
        self.assertEqual(again["runs"][0]["prompt_tokens"],
                         sum(16 * len(one["hash_ids"]) for one in requests))


class Traces(KvTestCase):
    # Fault: equal ids are other tokens, or other ids are equal ones.
    def test_mooncake(self):
        path = self.write("trace.jsonl", mooncake((1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 4, 6)))
        report = self.bench(*ONE, *SCALE, "--trace", path)
        self.assertEqual((report["load"]["block_tokens"], report["load"]["different_tokens"]),
                         (16, 6 * 16))
        one = report["runs"][0]
        self.assertEqual((one["cached_tokens"], one["prompt_tokens"], one["output_tokens"]),
                         (32 + 0 + 48, 13 * 16, 4 * 2))
        self.assertEqual(self.cached(*SCALE, "--trace", path, "--requests", "2"), (32, 96))
        result = run("bench", "kv", *ONE, *SCALE, "--trace", "-", "--json", "-",
                     input=mooncake((1, 2)).encode())
        self.assertEqual(json.loads(result.stdout)["load"]["requests"], 1)

    # Fault: sessions share ids that are their own, do not share global ones, or an agent's requests
    # are lost.
    def test_weka(self):
        agent = {"type": "subagent", "t": 9, "duration_ms": 2000,
                 "requests": [turn(0, 1, 2), turn(1, 1, 2, 8)]}
        sessions = [[turn(0, 1, 2), agent, turn(20, 1, 2, 3)], [turn(0, 1, 2)]]
        scale = ("--scale", "0.25", "--trace")
        local = self.write("local.jsonl", weka(*sessions))
        self.assertEqual(self.bench(*ONE, *scale, local)["load"]["requests"], 5)
        # The last block of a prompt is never found whole: its last token is computed.
        self.assertEqual(self.cached(*scale, local), (16 + 32 + 32, (2 + 2 + 3 + 3 + 2) * 16))
        shared = self.write("global.jsonl", weka(*sessions, scope="global"))
        self.assertEqual(self.cached(*scale, shared)[0], 16 + 32 + 32 + 16)

    # Fault: the starts are not those of the file, in the order of its lines.
    def test_starts(self):
        path = self.write("trace.jsonl", weka([turn(0, 1)], [turn(0, 1, 2, 3)], scope="global"))
        arguments = (*ONE, "--scale", "0.25", "--requests", "1", "--trace", path)
        # Only the first of both is sent: the sessions in front that have so many requests.
        self.assertEqual(self.bench(*arguments)["runs"][0]["prompt_tokens"], 16)
        # What is left out of a session counts for nothing.
        turns = self.write("turns.jsonl", weka([turn(0, 1), turn(1, 1, 2)]))
        report = self.bench(*ONE, "--scale", "0.25", "--requests", "1", "--trace", turns)
        self.assertEqual(report["load"]["different_tokens"], 16)
        arguments = (*ONE, "--scale", "0.25", "--requests", "2", "--trace", path)
        # The prompt of one block is found by the longer one, not the other way round.
        for content, expected in (("5\n0.5\n", 0), ("0.5\n5\n", 16)):
            starts = self.write("starts.txt", content)
            report = self.bench(*arguments, "--starts", starts)
            self.assertEqual(report["runs"][0]["cached_tokens"], expected)
        # Times at the far end are no undefined ones.
        late = self.write("late.jsonl", weka([turn(0, 1)], [turn(9e9, 1)]))
        starts = self.write("starts.txt", "0\n9e9\n")
        self.assertEqual(self.cached(*arguments, "--trace", late, "--starts", starts), (0, 32))
        for content, expected in (("1\n", "only 1"), ("1\nx\n", "line 2"), ("-1\n1\n", "line 1")):
            starts = self.write("starts.txt", content)
            self.assert_error(run("bench", "kv", *arguments, "--starts", starts), 2, "starts.txt",
                              "start", expected)

    # Fault: a prompt that is longer than the context ends the run, or is cut without a word.
    def test_cut(self):
        path = self.write("trace.jsonl", mooncake(range(50), range(3)))
        report = self.bench(*ONE, *SCALE, "--trace", path)
        self.assertEqual((report["load"]["cut"], report["engine"]["context_size"]), (1, 512))


class Mistakes(TestCase):
    def assert_refused(self, *arguments):
        *arguments, expected = arguments
        self.assert_error(run("bench", "kv", *arguments), 2, *expected)

    # Fault: a line that is no request is read as one, or the message does not name it.
    def test_lines(self):
        good = json.loads(mooncake((1, 2)))
        for field, value, found in (
                ("hash_ids", [1], "1"), ("hash_ids", [1, -1], "-1"), ("hash_ids", [1, "x"], '"x"'),
                ("hash_ids", None, "null"), ("input_length", "x", '"x"'),
                ("output_length", -1, "-1"), ("timestamp", -1, "-1"), ("timestamp", None, "null"),
                ("timestamp", [0] * 99, "[0,0"), ("block_size", 16, "16")):
            path = self.write("trace.jsonl",
                              mooncake((1, 2)) + json.dumps({**good, field: value}))
            self.assert_refused("--trace", path, [f"trace.jsonl: line 2: {field}: expected ",
                                                  f", found {found}"])
        for content, expected in (
                ("nonsense\n", "expected a JSON object, found "),
                ("[]\n", "expected a JSON object, found another value"),
                ("3\n", "expected a JSON object, found "),
                ("{}\n", "timestamp: expected a number of ms in"),
                ('{"requests": 3, "block_size": 4}\n', "requests: expected an array, found 3"),
                ('{"requests": [], "block_size": 0}\n', "block_size: expected 1 or more"),
                (weka([{"t": 1}]), "in: expected a number of tokens")):
            self.assert_refused("--trace", self.write("trace.jsonl", content),
                                [f"line 1: {expected}"])
        self.assert_refused("--trace", self.write("trace.jsonl", mooncake((1,), (1,),
                                                                          times=[5, 4])),
                            ["line 2", "not before"])
        self.assert_refused("--trace", self.write("trace.jsonl", "\n"), ["at least one request"])
        mixed = weka([turn(0, 1)]) + mooncake((1,))
        self.assert_refused("--trace", self.write("trace.jsonl", mixed), ["line 2", "block_size"])
        self.assert_refused("--trace", self.path("missing"), ["missing"])

    # Fault: an option without effect is taken without a word, or a slip is answered without help.
    def test_options(self):
        self.assert_refused("--requests", "3", ["--requests", "--trace"])
        self.assert_refused("--write-trace", "x", "--concurrency", "1",
                            ["--write-trace", "--concurrency"])
        self.assert_refused("--write-trace", "-", "--json", "-", ["--json", "--write-trace"])
        self.assert_refused("--json", "", ["--json", '""'])
        self.assert_refused("--kv-disk", "x", ["--kv-disk", '"x"'])
        self.assert_refused("--kv-host", "3", ["--kv-host", '"3"'])
        file = self.write("file", "")
        self.assert_refused("--sessions", "1", "--concurrency", "1", "--kv-disk", f"{file}/x:128M",
                            ["--kv-disk", file, "Not a directory"])
        self.assert_refused("--scale", "1", ["--scale", "--trace"])
        self.assert_refused("--starts", "x", ["--starts", "--trace"])
        self.assert_refused("--speed", "3", "--concurrency", "2", ["both"])
        self.assert_refused("--kv-cache", "9", ["--kv-cache", "context", "9"])
        self.assert_refused("--turns", "3-", ["bench kv: --turns", '"3-"'])
        for names in ("", "lru,", "lru,,lfu", "lur", "lru lfu", "x" * 40):
            self.assert_refused("--policy", names, ["--policy: expected one of lru,", "none"])
        self.assert_refused("--policy", ",".join(["lru"] * 17), ["at most 16"])
        path = self.write("trace.jsonl", mooncake((1,)))
        self.assert_refused("--trace", path, "--starts", self.write("starts", "1\n"),
                            ["sessions with --starts"])

    # Fault: an option that is parsed but not in --help, or help that wraps.
    def test_help(self):
        text = run("bench", "kv", "--help").stdout.decode()
        listed = re.findall(r"^  (?:-\w, |    )--([\w-]+)", text, re.M)
        self.assertEqual(sorted(listed), sorted(OPTIONS))
        for line in text.split("\n"):
            self.assertLessEqual(len(line), 80, line)


if __name__ == "__main__":
    unittest.main()
