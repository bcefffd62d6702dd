#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex kv-sim: options, and that tables, JSON and page tell the same. The traces are tiny; what a
replay must find is tested with the replayer."""
import html.parser
import json
import os
import random
import re
import shutil
import signal
import subprocess
import unittest

from support import IMBREX, TIMEOUT_S, TestCase, open_terminal, run

OPTIONS = {"trace", "starts", "session-span", "warm", "hint-error", "seed", "policy", "ablations",
           "sensitivity", "capacity", "block", "slots", "target-queue", "prefill-rate", "decode-ms",
           "prefetch", "fetch-ratio", "live", "tier", "token-bytes",
           "json", "html", "help"}
POLICIES = ["lru", "lfu", "s3fifo", "arc", "gdsf", "seed", "queue", "predictive"]
# Elements without an end tag.
VOID = {"meta", "br", "hr", "img", "input", "link"}
NUMBER = r"-?\d+(?:\.\d+)?"


def chat_trace(num_sessions=30, num_turns=4, seed=3):
    """Sessions whose every turn repeats the last one's blocks, all after a common first block."""
    generator = random.Random(seed)
    requests = []
    next_id = 1
    for _ in range(num_sessions):
        blocks = [0]
        time = generator.uniform(0, 60000)
        for _ in range(num_turns):
            new = generator.randint(1, 4)
            blocks = blocks + list(range(next_id, next_id + new))
            next_id += new
            requests.append({"timestamp": round(time), "input_length": 512 * len(blocks),
                             "output_length": generator.randint(1, 200), "hash_ids": blocks})
            time += generator.expovariate(1 / 20000)
    requests.sort(key=lambda request: request["timestamp"])
    return "".join(json.dumps(request) + "\n" for request in requests)


def agent_trace(num_sessions=4, num_requests=5):
    """Sessions of the kind whose starts are not recorded; 64 tokens a block."""
    sessions = []
    for i in range(num_sessions):
        requests = [{"t": 7.0 * j, "type": "s", "in": 64 * 16 * (j + 1) + 5, "out": 20,
                     "hash_ids": list(range(1, 16 * (j + 1) + 1)), "stop": "tool_use",
                     "api_time": 2.0, "think_time": 5.0 if j else 0.0}
                    for j in range(num_requests)]
        sessions.append({"id": f"trace_{i}", "models": ["m"], "block_size": 64,
                         "hash_id_scope": "local", "tool_tokens": 0, "system_tokens": 0,
                         "requests": requests})
    return "".join(json.dumps(session) + "\n" for session in sessions)


class Page(html.parser.HTMLParser):
    """The page's parts; fails on elements that are not closed in order."""

    def __init__(self, test, text):
        super().__init__(convert_charrefs=True)
        self.test, self.open = test, []
        self.elements, self.texts, self.tables = [], [], []
        self.text = text
        self.feed(text)
        self.close()
        test.assertEqual(self.open, [])

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))
        if tag == "table":
            self.tables.append({"caption": "", "rows": []})
        if tag == "tr":
            self.tables[-1]["rows"].append([])
        if tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append("")
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))

    def handle_endtag(self, tag):
        self.test.assertTrue(self.open, f"</{tag}>")
        self.test.assertEqual(self.open.pop()[0], tag)

    def handle_data(self, data):
        names = [name for name, _ in self.open]
        self.texts.append((names, data))
        if "caption" in names:
            self.tables[-1]["caption"] += data
        elif "td" in names or "th" in names:
            self.tables[-1]["rows"][-1][-1] += data if "span" not in names else " " + data

    def of(self, tag):
        return [attributes for name, attributes, _ in self.elements if name == tag]

    def table(self, caption):
        """{name of the row: cells} of the tables whose caption begins so."""
        return [{row[0]: row[1:] for row in table["rows"]} for table in self.tables
                if table["caption"].startswith(caption)]


class KvSimTestCase(TestCase):
    def trace(self, name="chat.jsonl", **options):
        return self.write(name, chat_trace(**options))

    def sim(self, *arguments, policies=("lru", "predictive"), stderr=b""):
        """The report as JSON, checked for what holds for every one."""
        result = run("kv-sim", *arguments, *(["--policy", ",".join(policies)] if policies else []),
                     "--json", "-")
        self.assert_ok(result)
        self.assertEqual(result.stderr, stderr)
        report = json.loads(result.stdout)
        self.assert_consistent(report)
        return report

    def assert_consistent(self, report):
        self.assertFalse(report["interrupted"])
        is_live = report["options"]["timeline"] == "live"
        for table in report["tables"]:
            groups = {}
            for row in table["rows"]:
                groups.setdefault(row["capacity_tokens"], []).append(row)
            self.assertEqual(list(groups), report["options"]["capacities"])
            for rows in groups.values():
                names = [row["policy"] for row in rows]
                self.assertEqual(names[0], "lru")
                self.assertEqual(names[-1], "infinite")
                self.assertEqual(names[-2] == "MIN", not is_live)
                self.assertEqual(len(set(names)), len(names))
                self.assert_rows(table, {row["policy"]: row for row in rows})
            self.assertEqual([[row["policy"] for row in rows] for rows in groups.values()],
                             [names] * len(groups))

    def assert_rows(self, table, rows):
        for row in rows.values():
            self.assertGreaterEqual(row["hit_rate"], 0)
            self.assertLessEqual(row["hit_rate"], rows["infinite"]["hit_rate"] + 1e-9)
            self.assertEqual(row["num_requests"], rows["lru"]["num_requests"])
            self.assertGreater(row["prefill_tokens_per_s"], 0)
            self.assertLessEqual(row["ttft_s"]["p50"], row["ttft_s"]["p90"])
            self.assertLessEqual(row["ttft_s"]["p90"], row["ttft_s"]["p99"])
            if "MIN" in rows:
                gap = rows["MIN"]["hit_rate"] - rows["lru"]["hit_rate"]
                self.assertGreaterEqual(gap, -1e-9)
                self.assertEqual(row["closure"] is None,
                                 row["policy"] == "infinite" or abs(gap) < 1e-12)
                if row["closure"] is not None:
                    self.assertAlmostEqual(row["closure"] * gap,
                                           row["hit_rate"] - rows["lru"]["hit_rate"], delta=1e-6)
            else:
                self.assertIsNone(row["closure"])
        if table["prefill_tokens_per_s"] is not None:
            self.assertAlmostEqual(rows["lru"]["prefill_tokens_per_s"],
                                   table["prefill_tokens_per_s"], delta=1e-3)


class Replays(KvSimTestCase):
    # Fault: a policy, a capacity or a load is left out, or its rows stand elsewhere.
    def test_all(self):
        report = self.sim("--trace", self.trace(), "--capacity", "80k,0.04M", "--target-queue",
                          "0.2,1.5", policies=None)
        self.assertEqual([table["target_queue"] for table in report["tables"]], [0.2, 1.5])
        self.assertEqual(report["options"]["capacities"], [80000, 40000])
        # A longer queue comes of a slower machine.
        light, heavy = ([row["prefill_tokens_per_s"] for row in table["rows"]]
                        for table in report["tables"])
        for light_rate, heavy_rate in zip(light, heavy, strict=True):
            self.assertGreater(light_rate, heavy_rate)
        for table in report["tables"]:
            self.assertIsNone(table["prefill_tokens_per_s"])
            self.assertEqual([row["policy"] for row in table["rows"]],
                             (POLICIES + ["MIN", "infinite"]) * 2)
            self.assertEqual((table["trace"]["trace"], table["trace"]["format"],
                              table["trace"]["num_requests"], table["trace"]["bad_lines"]),
                             ("chat.jsonl", "mooncake", 120, None))

    # Fault: options do not reach the replayer, or not the one that was meant.
    def test_options(self):
        path = self.trace()
        report = self.sim("--trace", path, "--capacity", "16384", "--block", "1024", "--slots",
                          "7", "--prefill-rate", "12.5k", "--decode-ms", "0.1", "--seed", "9",
                          "--warm", "0.25", "--hint-error", "0.1", "--session-span", "100")
        self.assertEqual(
            report["options"],
            {"traces": [path], "starts": None, "session_span_s": 100.0, "capacities": [16384],
             "block_size": 1024, "num_slots": 7, "decode_s_per_token": 0.0001, "seed": 9,
             "warm": 0.25, "timeline": "frozen", "hint_error": 0.1, "ablations": False,
             "sensitivity": False, "fetch_ratio": None, "prefetch": False, "tiers": [],
             "token_bytes": None})
        table = report["tables"][0]
        self.assertEqual((table["prefill_tokens_per_s"], table["target_queue"]), (12500.0, None))
        self.assertEqual(table["rows"][0]["num_requests"], 90)

    # Fault: several traces are mixed up, or only one of them is replayed.
    def test_several_traces(self):
        paths = [self.trace("a.jsonl", num_sessions=10), self.trace("b.jsonl", num_sessions=20)]
        report = self.sim("--trace", paths[0], "--capacity", "8k", "--trace", paths[1])
        self.assertEqual([(table["trace"]["trace"], table["trace"]["num_requests"])
                          for table in report["tables"]], [("a.jsonl", 40), ("b.jsonl", 80)])

    # Fault: lru does not stand first because another policy was named before it.
    def test_policies(self):
        for policies in (("queue", "lru"), ("queue",), ("lru", "queue")):
            report = self.sim("--trace", self.trace(), "--capacity", "8k", policies=policies)
            self.assertEqual([row["policy"] for row in report["tables"][0]["rows"]],
                             ["lru", "queue", "MIN", "infinite"])

    # Fault: there is a MIN of a timeline that moves, or --live changes nothing.
    def test_live(self):
        report = self.sim("--trace", self.trace(), "--capacity", "8k", "--live")
        self.assertEqual(report["options"]["timeline"], "live")
        self.assertEqual([row["policy"] for row in report["tables"][0]["rows"]],
                         ["lru", "predictive", "infinite"])

    # Fault: the rows of the ablations are missing, or stand without the whole.
    def test_ablations(self):
        report = self.sim("--trace", self.trace(), "--capacity", "8k", "--ablations")
        names = [row["policy"] for row in report["tables"][0]["rows"]]
        self.assertEqual(names[:2], ["lru", "predictive"])
        self.assertEqual(names[-2:], ["MIN", "infinite"])
        self.assertGreaterEqual(len(names), 6)
        for name in names[2:-2]:
            self.assertRegex(name, r"\Apredictive -\w+\Z")

    # Fault: figures of one run are not those of the next.
    def test_repeatable(self):
        def figures():
            report = self.sim("--trace", self.trace(), "--capacity", "8k", policies=None)
            for table in report["tables"]:
                for row in table["rows"]:
                    del row["accesses_per_s"]
            return report["tables"]

        self.assertEqual(figures(), figures())

    # Fault: the command line that is shown gives other figures, or is no shell's.
    def test_command_line(self):
        path = self.trace("it's a & <b>.jsonl")
        report = self.sim("--trace", path, "--capacity", "8k,16k", "--prefill-rate", "40k",
                          "--decode-ms", "0.25", "--warm", "0.3", "--live")
        result = subprocess.run(
            ["sh", "-c", report["command_line"].replace("imbrex", '"$IMBREX"', 1) + " --json -"],
            env={**os.environ, "IMBREX": IMBREX}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=TIMEOUT_S, check=False)
        self.assert_ok(result)
        again = json.loads(result.stdout)
        for one in (report, again):
            for table in one["tables"]:
                for row in table["rows"]:
                    del row["accesses_per_s"]
        self.assertEqual(report, again)

    # Fault: --starts is not read, or a file of another trace's starts is taken.
    def test_starts(self):
        path = self.write("agents.jsonl", agent_trace())
        starts = self.write("starts.txt", "0\n5000\n10\n20.5\n")
        arguments = ["--trace", path, "--capacity", "8k", "--prefill-rate", "50k"]
        report = self.sim(*arguments, "--starts", starts)
        trace = report["tables"][0]["trace"]
        self.assertEqual((report["options"]["starts"], trace["format"], trace["num_sessions"],
                          trace["num_requests"]), (starts, "weka", 4, 20))
        self.assertGreaterEqual(trace["span_s"], 5000)
        span_s = self.sim(*arguments, "--session-span", "40")["tables"][0]["trace"]["span_s"]
        self.assertLess(span_s, 1000)
        for content in ("0\n1\n2\n", "0\n1\nx\n3\n"):
            starts = self.write("starts.txt", content)
            self.assert_error(run("kv-sim", *arguments, "--starts", starts), 2, "start")

    # Fault: a compressed trace is not read, or as something else than its content.
    def test_compressed(self):
        if shutil.which("zstd") is None:
            self.skipTest("no zstd to compress a trace with")
        path = self.trace()
        subprocess.run(["zstd", "-q", path], check=True, timeout=TIMEOUT_S)
        result = run("kv-sim", "--trace", path + ".zst", "--capacity", "8k", "--policy", "lru",
                     "--json", "-")
        if b"libzstd" in result.stderr:
            self.skipTest("built without libzstd")
        self.assert_ok(result)
        table = json.loads(result.stdout)["tables"][0]
        plain = self.sim("--trace", path, "--capacity", "8k", policies=["lru"])["tables"][0]
        self.assertEqual([row["hit_rate"] for row in table["rows"]],
                         [row["hit_rate"] for row in plain["rows"]])

    # Fault: a trace from a pipe is not read.
    def test_standard_input(self):
        result = run("kv-sim", "--trace", "-", "--capacity", "8k", "--policy", "lru", "--json", "-",
                     input=chat_trace().encode())
        self.assert_ok(result)
        self.assertEqual(json.loads(result.stdout)["tables"][0]["trace"]["num_requests"], 120)


class BadLines(KvSimTestCase):
    # Fault: lines that cannot be read are skipped without a word, or end the run.
    def test_reported(self):
        lines = chat_trace().split("\n")
        lines[6] = '{"timestamp": "x", "bad'
        lines[9] = "nonsense"
        path = self.write("bad.jsonl", "\n".join(lines))
        arguments = ["kv-sim", "--trace", path, "--capacity", "8k", "--policy", "lru"]
        page = self.path("page.html")
        result = run(*arguments, "--html", page)
        self.assert_ok(result)
        self.assertEqual(result.stderr, b"")
        self.assertRegex(result.stdout.decode(), r"(?m)^skipped +2 lines; the first is line 7: "
                         r'timestamp: expected a number, found "x"$')
        with open(page, encoding="utf-8") as file:
            texts = "".join(text for _, text in Page(self, file.read()).texts)
        self.assertRegex(texts, r"2 lines could not be read and were skipped; the first is line 7:")
        # Without a table standard error tells.
        result = run(*arguments, "--json", "-")
        self.assert_ok(result)
        self.assertRegex(result.stderr.decode(),
                         r"\Aimbrex: warning: kv-sim: bad.jsonl: 2 lines skipped; the first is "
                         r"line 7: [^\n]+\n\Z")
        trace = json.loads(result.stdout)["tables"][0]["trace"]
        self.assertEqual((trace["bad_lines"]["count"], trace["bad_lines"]["first_line"],
                          trace["num_requests"]), (2, 7, 118))
        self.assertTrue(trace["bad_lines"]["first_reason"])

    # Fault: requests that came before those above them are sorted without a word.
    def test_early(self):
        lines = chat_trace().split("\n")
        path = self.write("early.jsonl", "\n".join([lines[20], *lines[:20]]))
        arguments = ["kv-sim", "--trace", path, "--capacity", "8k", "--policy", "lru"]
        text = "20 requests with a time before one above: put in order of time"
        result = run(*arguments)
        self.assertRegex(result.stdout.decode(), rf"(?m)^order +{text}$")
        result = run(*arguments, "--json", "-")
        self.assertIn(f"early.jsonl: {text}", result.stderr.decode())
        self.assertEqual(json.loads(result.stdout)["tables"][0]["trace"]["early_requests"], 20)

    # Fault: a message that calls an option by the name of its field in C.
    def test_field_names(self):
        self.assert_error(run("kv-sim", "--trace", self.trace(), "--capacity", "10k", "--tier",
                              "host:511:4"), 2,
                          "--tier: capacity_tokens: expected at least a block, 512 tokens, found "
                          "511")
        self.assert_error(run("kv-sim", "--trace", self.trace(), "--capacity", "10k", "--block",
                              "100"), 2,
                          "--block: expected a multiple of the 512 tokens of an id in ")
        self.assert_error(run("kv-sim", "--trace", self.trace(), "--capacity", "10"), 2,
                          "error: --capacity: expected at least a block, 512 tokens, found 10")

    # Fault: a trace without a readable line, or without block ids, looks like an empty cache.
    def test_refused(self):
        path = self.write("none.jsonl", "x\ny\n")
        self.assert_error(run("kv-sim", "--trace", path, "--capacity", "8k"), 2, "none.jsonl")
        path = self.write("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
                                       "2023-11-16 18:15:46.6805900,37,4\n")
        self.assert_error(run("kv-sim", "--trace", path, "--capacity", "8k"), 2, "azure.csv")
        self.assert_error(run("kv-sim", "--trace", self.path("none"), "--capacity", "8k"), 2,
                          self.path("none"))
        starts = self.write("starts.txt", "1\n")
        self.assert_error(run("kv-sim", "--trace", self.trace(), "--starts", starts, "--capacity",
                              "8k"), 2, "starts", "chat.jsonl")


class Reports(KvSimTestCase):
    def reports(self, *arguments):
        """Tables, JSON and page of one run."""
        json_path, html_path = self.path("report.json"), self.path("report.html")
        result = run("kv-sim", *arguments, "--json", json_path, "--html", html_path)
        self.assert_ok(result)
        self.assertEqual(result.stderr, b"")
        with open(json_path, encoding="utf-8") as file:
            report = json.load(file)
        self.assert_consistent(report)
        with open(html_path, encoding="utf-8") as file:
            page = Page(self, file.read())
        return result.stdout.decode(), report, page

    def printed(self, text, title):
        """{name of the row: cells} of each table with that title."""
        tables = []
        for body in re.findall(rf"(?m)^{re.escape(title)}\n.*\n((?:.+\n)+)", text):
            rows = {}
            for line in body.split("\n")[:-1]:
                name = re.match(r"(?:predictive -\w+|prefill tokens/s|\S+)", line).group()
                rows[name] = line[len(name):]
            tables.append(rows)
        return tables

    # Fault: tables, JSON and page differ in a figure, an order or a row.
    def test_same_figures(self):
        for live in ([], ["--live"]):
            text, report, page = self.reports("--trace", self.trace(), "--capacity", "4k,8k,33k",
                                              "--target-queue", "0.3,2", *live)
            rates = self.printed(text, "hit rate % (closure %), by capacity in tokens")
            ttfts = self.printed(text, "TTFT, mean / p99 in s")
            self.assertEqual((len(rates), len(ttfts)), (2, 2))
            shown = page.table("Hit rate")
            self.assertEqual(len(shown), 2)
            for i, table in enumerate(report["tables"]):
                names = list(dict.fromkeys(row["policy"] for row in table["rows"]))
                self.assertEqual(list(rates[i]), names)
                self.assertEqual(list(ttfts[i]), names)
                self.assertEqual(list(shown[i])[1:], names)
                self.assertEqual(shown[i]["policy"], ["4k", "8k", "33k"])
                for name in names:
                    rows = [row for row in table["rows"] if row["policy"] == name]
                    expected = []
                    for row in rows:
                        closure = row["closure"]
                        expected.append(f"{100 * row['hit_rate']:.2f}")
                        if closure is not None:
                            expected[-1] += f" ({round(100 * closure) + 0:d})"
                    self.assertEqual(rates[i][name].split(), " ".join(expected).split())
                    self.assertEqual(shown[i][name], expected)
                    means = re.findall(rf"({NUMBER}) +/ +{NUMBER}", ttfts[i][name])
                    for mean, row in zip(means, rows, strict=True):
                        self.assertAlmostEqual(float(mean), row["ttft_s"]["mean"],
                                               delta=0.006 * row["ttft_s"]["mean"] + 6e-4)
            self.assertEqual("waiting" in text.split("TTFT, mean")[1].split("\n\n")[1], not live
                             or "requests waiting on average" in text)

    # Fault: a load that does not exist is shown as if it had been found.
    def test_missed_load(self):
        for capacity, is_missed in (("8k", True), ("40k", False)):
            text, report, page = self.reports("--trace", self.trace(), "--capacity", capacity,
                                              "--policy", "lru")
            queue = report["tables"][0]["rows"][0]["mean_queue"]
            self.assertEqual(abs(queue - 0.3) > 0.05, is_missed)
            self.assertEqual("note: at 8k no prefill rate gives" in text, is_missed)
            texts = "".join(text for _, text in page.texts)
            self.assertEqual("At 8k no prefill rate gives" in texts, is_missed)

    # Fault: the words that a reader needs are not said.
    def test_words(self):
        text, _, page = self.reports("--trace", self.trace(), "--capacity", "8k", "--policy", "lru")
        listed = [data for names, data in page.texts if "dt" in names]
        for word in ("hit rate", "MIN", "infinite", "closure", "frozen", "live", "TTFT", "queue"):
            self.assertRegex(text, rf"(?m)^{word} +[\w-]+ [\w-]+ ")
            self.assertIn(word, listed)
        for policy in POLICIES:
            self.assertIn(policy, listed)

    # Fault: a page that needs a network, a script, another file, or a reader who sees.
    def test_page(self):
        _, report, page = self.reports("--trace", self.trace(), "--capacity", "4k,8k",
                                       "--ablations")
        for tag, attributes, _ in page.elements:
            self.assertNotIn(tag, ("script", "link", "iframe", "object", "embed", "base", "img"))
            for name, value in attributes.items():
                self.assertFalse(name.startswith("on"), name)
                self.assertNotIn(name, ("src", "srcset", "xlink:href", "style"))
                self.assertNotRegex(value or "", r"(?i)https?:|//|url\(|javascript:")
        style = "".join(text for names, text in page.texts if "style" in names)
        self.assertNotRegex(style, r"(?i)url\(|@import|https?:")
        self.assertIn("prefers-color-scheme:dark", style)
        self.assertTrue(any(attributes.get("name") == "viewport" for attributes in page.of("meta")))
        ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
        self.assertEqual(len(set(ids)), len(ids))
        for attributes in page.of("a"):
            self.assertIn(attributes["href"].removeprefix("#"), ids)
        charts = page.of("svg")
        # Lines; closure, TTFT at both capacities; the queue.
        self.assertGreaterEqual(len(charts), 1 + 2 + 2 + 1)
        for attributes in charts:
            self.assertEqual(attributes["role"], "img")
            for label in attributes["aria-labelledby"].split():
                self.assertIn(label, ids)
        self.assertEqual(page.of("html"), [{"lang": "en"}])
        for attributes in page.of("th"):
            self.assertIn(attributes["scope"], ("row", "col"))
        for table in page.tables:
            self.assertTrue(table["caption"])
        drawn = page.text.split("<svg", 1)[1].split("</svg>", 1)[0]
        for row in report["tables"][0]["rows"]:
            self.assertIn(f">{row['policy']}</text>", drawn)
        code = "".join(text for names, text in page.texts if "code" in names)
        self.assertEqual(code, report["command_line"])

    # Fault: coordinates that are no numbers, or lie outside of the drawing.
    def test_drawing(self):
        for capacities in ("8k", "512", "4k,8k,9k,64k,1G"):
            _, _, page = self.reports("--trace", self.trace(), "--capacity", capacities)
            self.assertNotRegex(page.text, r'="[^"]*\b(?:nan|inf)\b')
            width = 0
            for tag, attributes, _ in page.elements:
                if tag == "svg":
                    _, _, width, height = map(float, attributes["viewbox"].split())
                for name in ("x", "x1", "x2", "y", "y1", "y2", "width", "height"):
                    if name in attributes:
                        limit = width if name[0] in "xw" else height
                        self.assertGreaterEqual(float(attributes[name]), 0)
                        self.assertLessEqual(float(attributes[name]), limit)
                for point in attributes.get("points", "").split():
                    x, y = map(float, point.split(","))
                    self.assertTrue(0 <= x <= width and 0 <= y <= height, point)

    # Fault: names of files become markup.
    def test_escaping(self):
        name = "<script>&amp;\"'.jsonl"
        _, report, page = self.reports("--trace", self.trace(name), "--capacity", "8k")
        self.assertEqual(report["tables"][0]["trace"]["trace"], name)
        self.assertFalse(page.of("script"))
        headings = ["".join(text) for names, text in page.texts if "h2" in names]
        self.assertTrue(any(name in heading for heading in headings), headings)

    # Fault: a name that is no UTF-8 makes a report that is none either.
    def test_name_without_encoding(self):
        path = os.path.join(os.fsencode(self.folder), b"a\xff\x01.jsonl")
        with open(path, "wb") as file:
            file.write(chat_trace().encode())
        page = self.path("page.html")
        result = run("kv-sim", "--trace", path, "--capacity", "8k", "--json", "-")
        self.assert_ok(result)
        self.assertIsNone(json.loads(result.stdout)["tables"][0]["trace"]["trace"])
        self.assert_ok(run("kv-sim", "--trace", path, "--capacity", "8k", "--html", page))
        with open(page, encoding="utf-8") as file:
            self.assertIn("a\ufffd\ufffd.jsonl", "".join(text for _, text in
                                                        Page(self, file.read()).texts))

    # Fault: the page is not alone on standard output.
    def test_page_to_standard_output(self):
        result = run("kv-sim", "--trace", self.trace(), "--capacity", "8k", "--html", "-")
        self.assert_ok(result)
        text = result.stdout.decode()
        self.assertTrue(text.startswith("<!DOCTYPE html>"))
        Page(self, text)

    # Fault: a second report is written behind the first.
    def test_files_are_replaced(self):
        for option, begin in (("--json", "{"), ("--html", "<!DOCTYPE html>")):
            path = self.write("report", "x" * 1000000)
            self.assert_ok(run("kv-sim", "--trace", self.trace(), "--capacity", "8k", "--policy",
                               "lru", option, path))
            with open(path, encoding="utf-8") as file:
                text = file.read()
            self.assertTrue(text.startswith(begin))
            self.assertNotIn("xxx", text)

    # Fault: a report that cannot be written is lost without a word, or costs a whole run.
    def test_unwritable(self):
        arguments = ["kv-sim", "--trace", self.trace(), "--capacity", "8k", "--policy", "lru"]
        for option in ("--json", "--html"):
            path = self.path("none/report")
            result = run(*arguments, option, path)
            self.assert_error(result, 1, path, "No such file")
            self.assertEqual(result.stdout, b"")
            self.assert_error(run(*arguments, option, "/dev/full"), 1, "/dev/full",
                              "No space left")
            with open("/dev/full", "wb") as full:
                self.assert_error(run(*arguments, option, "-", stdout=full), 1, "standard output",
                                  "No space left")
        with open("/dev/full", "wb") as full:
            self.assert_error(run(*arguments, stdout=full), 1, "standard output", "No space left")

    # Fault: a report replaces the trace that it is about, or the other report.
    def test_reports_have_files_of_their_own(self):
        trace = self.trace()
        with open(trace, "rb") as file:
            content = file.read()
        link = self.path("link.json")
        os.symlink(trace, link)
        arguments = ["kv-sim", "--trace", trace, "--capacity", "8k", "--policy", "lru"]
        for option in ("--json", "--html"):
            for path in (trace, link):
                self.assert_error(run(*arguments, option, path), 2, option, "found the trace", path)
        path = self.path("report")
        self.assert_error(run(*arguments, "--json", path, "--html", path), 2, "two files", path)
        with open(trace, "rb") as file:
            self.assertEqual(file.read(), content)

    # Fault: Ctrl-C waits for the end of the run, or is told as an error; no progress is shown.
    def test_interrupt(self):
        terminal, stderr = open_terminal(self)
        path = self.path("report.json")
        # Loads enough for many minutes: the signal comes while they run.
        loads = ",".join(str(1 + i / 1000) for i in range(3000))
        with subprocess.Popen([IMBREX, "kv-sim", "--trace", self.trace(num_sessions=300),
                               "--capacity", "8k,16k", "--target-queue", loads, "--json", path],
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=stderr) as process:
            self.addCleanup(process.kill)
            os.close(stderr)
            shown = b""
            while not re.search(rb"\[[# ]{30}\] +\d+ % \w+ chat.jsonl lru", shown):
                shown += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            try:
                while os.read(terminal, 4096):
                    pass
            except OSError:
                pass  # the other end is closed
            process.wait(timeout=TIMEOUT_S)
        os.close(terminal)
        self.assertEqual(process.returncode, 130)
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        self.assertTrue(report["interrupted"])
        self.assertLess(len(report["tables"]), 3000)


    # Fault: a number in another form that is another number.
    def test_forms_of_numbers(self):
        trace = self.trace(num_sessions=10)
        report = self.sim("--trace", trace, "--capacity", "8e3,1.6E+4,0.02M", "--prefill-rate",
                          "1e4")
        self.assertEqual(report["options"]["capacities"], [8000, 16000, 20000])
        self.assertEqual(report["tables"][0]["prefill_tokens_per_s"], 10000.0)

    # Fault: a run that cannot be ended while it reads, or waits for what it reads.
    def test_interrupt_while_reading(self):
        terminal, stderr = open_terminal(self)
        with subprocess.Popen([IMBREX, "kv-sim", "--trace", "-", "--capacity", "8k"],
                              stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                              stderr=stderr) as process:
            self.addCleanup(process.kill)
            os.close(stderr)
            shown = b""
            while b"reading" not in shown:
                shown += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            try:
                while os.read(terminal, 4096):
                    pass
            except OSError:
                pass  # the other end is closed
            process.wait(timeout=TIMEOUT_S)
        os.close(terminal)
        self.assertEqual(process.returncode, 130)

    # Fault: replays over a slower tier that change the figures of the cache alone; figures that
    # differ between tables, JSON and page.
    def test_prefetch(self):
        trace = self.trace(num_sessions=60)
        arguments = ["--trace", trace, "--capacity", "8k,24k", "--target-queue", "2", "--policy",
                     "lru,seed,predictive"]
        plain = self.reports(*arguments)[1]
        text, report, page = self.reports(*arguments, "--prefetch", "--fetch-ratio", "20")
        self.assertIn("--prefetch --fetch-ratio 20", report["command_line"])
        rows, num_used = report["tables"][0]["rows"], 0
        for row, alone in zip(rows, plain["tables"][0]["rows"], strict=True):
            self.assertIsNone(alone["prefetch"])
            for key in ("policy", "hit_rate", "closure", "ttft_s", "mean_queue", "num_evicted"):
                self.assertEqual(row[key], alone[key])
            self.assertEqual(row["prefetch"] is None, row["policy"] in ("MIN", "infinite"))
            if row["prefetch"] is not None:
                prefetch = row["prefetch"]
                used = prefetch["num_used"]
                missed = prefetch["num_late"] + prefetch["num_unforeseen"]
                num_used += used
                if used + prefetch["num_wasted"]:
                    self.assertAlmostEqual(prefetch["precision"],
                                           used / (used + prefetch["num_wasted"]), delta=1e-6)
                if used + missed:
                    self.assertAlmostEqual(prefetch["recall"], used / (used + missed), delta=1e-6)
        self.assertGreater(num_used, 0)
        shown = self.printed(text, "prefetch: blocks planned / used")[0]
        self.assertEqual(list(shown), ["lru", "seed", "predictive"])
        for name, cells in shown.items():
            expected = [str(row["prefetch"][key]) for row in rows if row["policy"] == name
                        for key in ("num_planned", "num_used")]
            self.assertEqual(cells.replace("/", " ").split(), expected)
        tables = page.table("Blocks planned / used")
        self.assertEqual(list(tables[0])[1:], ["lru", "seed", "predictive"])
        self.assertIn("Prefetch precision of each policy", page.text)

    # Fault: tiers that change the figures of the cache alone; tokens that are counted twice or not
    # at all; a tier that is another's; figures that differ between tables, JSON and page.
    def test_tiers(self):
        arguments = ["--trace", self.trace(num_sessions=60), "--capacity", "8k,24k",
                     "--prefill-rate", "6k", "--policy", "lru,predictive"]
        plain = self.reports(*arguments)[1]
        tiers = ["--tier", "host:16k:40k:1ms", "--tier", "disk:2048kB:20kB/s:0.02s"]
        text, report, page = self.reports(*arguments, *tiers, "--token-bytes", "2")
        self.assertIn(" ".join([*tiers, "--token-bytes", "2"]), report["command_line"])
        self.assertEqual(report["options"]["tiers"],
                         [{"name": "host", "capacity_tokens": 16000, "tokens_per_s": 40000.0,
                           "latency_s": 0.001},
                          {"name": "disk", "capacity_tokens": 1024000, "tokens_per_s": 10000.0,
                           "latency_s": 0.02}])
        rows = report["tables"][0]["rows"]
        found = [0, 0]
        for row, alone in zip(rows, plain["tables"][0]["rows"], strict=True):
            self.assertEqual(alone["stacks"], [])
            for key in ("policy", "hit_rate", "closure", "ttft_s", "mean_queue", "num_evicted",
                        "prefetch"):
                self.assertEqual(row[key], alone[key])
            self.assertEqual(len(row["stacks"]), 0 if row["policy"] in ("MIN", "infinite") else 2)
            for i, stack in enumerate(row["stacks"], start=1):
                self.assertEqual([len(stack[key]) for key in ("num_from", "num_up", "num_down",
                                                              "num_lost")], [i] * 4)
                hits = stack["num_kept"] + sum(stack["num_from"])
                self.assertAlmostEqual(stack["prefetch"]["hit_rate"],
                                       hits / (hits + stack["num_computed"]), delta=1e-6)
                self.assertLessEqual(sum(stack["num_from"]), stack["num_up"][0])
                for k, tokens in enumerate(stack["num_from"]):
                    found[k] += tokens
        self.assertGreater(min(found), 0)
        for title, key, scale in (("cache + host: tokens computed / kept",
                                   lambda stacks: (stacks[0]["num_computed"],
                                                   stacks[0]["num_kept"]), 1),
                                  ("cache + host + disk, disk: bytes up / down",
                                   lambda stacks: (stacks[1]["num_up"][1],
                                                   stacks[1]["num_down"][1]), 2),
                                  ("cache + host + disk, host: tokens from it / lost",
                                   lambda stacks: (stacks[1]["num_from"][0],
                                                   stacks[1]["num_lost"][0]), 1)):
            shown = self.printed(text, title)[0]
            self.assertEqual(list(shown), ["lru", "predictive"])
            self.assertEqual(list(page.table(title)[0])[1:], ["lru", "predictive"])
            for name, cells in shown.items():
                expected = [scale * count for row in rows if row["policy"] == name
                            for count in key(row["stacks"])]
                self.assertEqual([round(float(cell.rstrip("kM"))
                                        * (1e6 if cell[-1] == "M" else 1e3 if cell[-1] == "k"
                                           else 1)) for cell in cells.replace("/", " ").split()],
                                 [float(f"{count:.4g}") for count in expected])

    # Fault: predictions are fetched although nobody asked for them, or not when they were asked
    # for; a second run that differs.
    def test_tiers_with_prefetch(self):
        arguments = ["--trace", self.trace(num_sessions=60), "--capacity", "40k", "--prefill-rate",
                     "20k", "--live", "--tier", "host:1M:400k"]
        asked, again, predicted = (self.sim(*arguments, *more, policies=("lru", "seed"))
                                   for more in ([], [], ["--prefetch"]))
        for one, other in zip(asked["tables"][0]["rows"], again["tables"][0]["rows"]):
            self.assertEqual(one["stacks"], other["stacks"])
        planned = [[row["stacks"][0]["prefetch"]["num_planned"]
                    for row in report["tables"][0]["rows"] if row["stacks"]]
                   for report in (asked, predicted)]
        self.assertEqual(planned[0][0], planned[1][0])  # lru expects nothing
        self.assertGreater(planned[1][1], planned[0][1])
        self.assertIsNone(predicted["options"]["fetch_ratio"])
        # Nothing ever comes over a link like this, and no time overflows.
        slow = self.sim(*arguments[:-1], "host:1M:0.000001:1e6s", policies=("lru",))
        self.assertEqual(slow["tables"][0]["rows"][0]["stacks"][0]["num_from"], [0])
        self.assertIn("--tier host:1M:400k --prefetch", predicted["command_line"])

    # Fault: a number that is not changed, or whose change is that of another.
    def test_sensitivity(self):
        text, report, _ = self.reports("--trace", self.trace(num_sessions=60), "--capacity",
                                       "8k,24k", "--policy", "predictive", "--sensitivity")
        rows = report["tables"][0]["rows"]
        names = [row["policy"] for row in rows if row["policy"].startswith("predictive ")]
        self.assertEqual(len(names), 2 * len(set(names)))
        self.assertIn("predictive fan_out 2", names)

        def average(policy):
            closures = [row["closure"] for row in rows if row["policy"] == policy]
            return 100 * sum(closures) / len(closures)

        head, *lines = re.search(r"(?m)^sensitivity: .*\n((?:  .*\n)+)", text).group().splitlines()
        self.assertIn(f"{average('predictive'):.2f} %", head)
        self.assertEqual(len(lines), len(set(names)))
        for line in lines:
            name, change = line.rsplit(None, 1)
            self.assertAlmostEqual(float(change), average("predictive " + name.strip()) -
                                   average("predictive"), delta=0.006)


    # Fault: "nan %" where no policy can lose anything, so that there is nothing to close.
    def test_sensitivity_of_nothing(self):
        result = run("kv-sim", "--trace", self.trace(num_sessions=1, num_turns=1), "--capacity",
                     "1M", "--policy", "predictive", "--sensitivity")
        self.assert_ok(result)
        self.assertIn(b"sensitivity: there is nothing between lru and the optimum", result.stdout)
        self.assertNotIn(b"nan", result.stdout)


class Mistakes(KvSimTestCase):
    def assert_refused(self, *arguments):
        *arguments, expected = arguments
        self.assert_error(run("kv-sim", *arguments), 2, "kv-sim: ", *expected)

    # Fault: an option that is parsed but not in --help, listed twice, or help that wraps.
    def test_help(self):
        text = run("kv-sim", "--help").stdout.decode()
        self.assertEqual(run("help", "kv-sim").stdout.decode(), text)
        listed = re.findall(r"^  (?:-\w, |    )--([\w-]+)", text, re.M)
        self.assertEqual(sorted(listed), sorted(OPTIONS))
        for line in text.split("\n"):
            self.assertLessEqual(len(line), 80, line)
        self.assertRegex(run("--help").stdout.decode(), r"(?m)^  kv-sim +\w")

    # Fault: a capacity or a load that is read as another one.
    def test_numbers(self):
        for option in ("--capacity", "--target-queue", "--prefill-rate"):
            for item in ("", "0", "-1", "x", "1T", "1MM", "1 M", "0x10", "1e", "1e-3",
                         "1e3.5", "e3", "1e+", "1e13k", "inf", "nan",
                         "1.2.3", ".", "M", "1M ", "99999999999999G"):
                for listed in (item, "5k," + item):
                    arguments = ["--trace", "x", option, listed]
                    if option != "--capacity":
                        arguments += ["--capacity", "1M"]
                    self.assert_refused(*arguments, [f"{option}: expected", f'found "{item}"'])
        self.assert_refused("--trace", "x", "--capacity", "1.5", ["--capacity", '"1.5"'])
        self.assert_refused("--trace", "x", "--capacity", "1.0005k", ["--capacity", '"1.0005k"'])
        self.assert_refused("--trace", "x", "--capacity", "1M,1000k", ["once", '"1000k" again'])
        for option, value in (("--warm", "1"), ("--warm", "-0.1"), ("--hint-error", "1.1"),
                              ("--block", "0"), ("--slots", "0"), ("--decode-ms", "0"),
                              ("--session-span", "0"), ("--seed", "-1")):
            self.assert_refused("--trace", "x", "--capacity", "1M", option, value,
                                [f"{option}: expected", f'found "{value}"'])

    # Fault: a policy that does not exist is taken for another, or left out.
    def test_policies(self):
        for listed, found in (("prediktive", "prediktive"), ("lru,", ""), ("all,lru", "all"),
                              ("LRU", "LRU"), ("MIN", "MIN")):
            self.assert_refused("--trace", "x", "--capacity", "1M", "--policy", listed,
                                ["--policy: expected", "predictive", f'found "{found}"'])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--policy", "prediktive",
                            ["did you mean predictive?"])
        for listed in ("lru,lru", "arc,lru,arc"):
            self.assert_refused("--trace", "x", "--capacity", "1M", "--policy", listed,
                                ["once", "again"])

    # Fault: a part of a tier that is no such thing is taken for 0, or for another part; a message
    # that does not say which part.
    def test_tiers(self):
        form = "expected NAME:SIZE:RATE[:LATENCY]"
        for tier, expected in (
                ("", form), ("host", form), ("host:3M", form), ("host:3M:4:5us:6", form),
                ("host:3M:4:5us:", form), (":3M:4", 'NAME: expected 1 to 15 of a-z'),
                ("Host:3M:4", 'found "Host"'), ("h" * 16 + ":3M:4", "NAME: expected"),
                ("host:0:4", "SIZE: expected at least a block"),
                ("host:x:4", "SIZE: expected tokens such as 3M"), ("host:-1M:4", 'found "-1M"'),
                ("host:nan:4", "SIZE: expected"), ("host:2e12:4", "at most 1e12"),
                ("host:1GB:4", "bytes with --token-bytes"), ("host:1Gib:4", 'found "1Gib"'),
                ("host:3M:", "RATE: expected tokens a second"), ("host:3M:0", "more than 0"),
                ("host:3M:1e99", "at most 1e15"), ("host:3M:1GB/s", "bytes with --token-bytes"),
                ("host:3M:4/h", 'found "4/h"'), ("host:3M:4:", "LATENCY: expected a time"),
                ("host:3M:4:5", 'LATENCY: expected a time such as 20us, 5ms or 0.1s'),
                ("host:3M:4:-1s", 'found "-1s"'), ("host:3M:4:2e6s", "at most 1e6 s")):
            self.assert_refused("--trace", "x", "--capacity", "1M", "--tier", tier,
                                ["--tier", expected, f'"{tier}"'])
        arguments = ("--trace", "x", "--capacity", "1M", "--tier", "host:1GB:1GB/s")
        for count in ("0", "2e9", "5q"):
            self.assert_refused(*arguments, "--token-bytes", count,
                                ["--token-bytes: expected more than 0", f'found "{count}"'])
        self.assert_error(run("kv-sim", *arguments, "--token-bytes", "random:none"), 2,
                          "random:none", "qwen2.5-7b")
        self.assert_refused("--trace", "x", "--capacity", "1M", "--token-bytes", "4",
                            ["--token-bytes", "--tier"])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--tier", "a:1M:1", "--tier",
                            "a:1M:1", ["each name once", 'found "a"'])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--tier", "a:1M:1", "--prefetch",
                            "--fetch-ratio", "2", ["--fetch-ratio", "--tier"])
        many = [word for name in "abcde" for word in ("--tier", f"{name}:1M:1")]
        self.assert_refused("--trace", "x", "--capacity", "1M", *many, ["at most 4", "found 5"])

    # Fault: what is missing or contradicts itself is resolved by chance.
    def test_contradictions(self):
        self.assert_refused("--capacity", "1M", ["--trace", "found none"])
        self.assert_refused("--trace", "x", ["--capacity", "found none"])
        self.assert_refused("x.jsonl", "--capacity", "1M", ['"x.jsonl"', "--trace"])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--target-queue", "1",
                            "--prefill-rate", "1", ["both"])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--json", "-", "--html", "-",
                            ["both"])
        self.assert_refused("--trace", "-", "--trace", "-", "--capacity", "1M", ["once"])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--policy", "lru,queue",
                            "--ablations", ["--ablations", "predictive"])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--policy", "lru,queue",
                            "--sensitivity", ["--sensitivity", "predictive"])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--sensitivity", "--live",
                            ["--sensitivity", "--live"])
        self.assert_refused("--trace", "x", "--capacity", "1M", "--fetch-ratio", "2",
                            ["--fetch-ratio", "--prefetch"])
        self.assert_refused("--trace", "-", "--capacity", "1M", "--target-queue", "1,2",
                            ["standard input"])


if __name__ == "__main__":
    unittest.main()
