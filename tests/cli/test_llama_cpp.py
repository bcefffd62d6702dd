#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/peers/llama_cpp.sh with a program in llama-bench's place: it is not built here."""
import json
import os
import statistics
import subprocess
import unittest

from support import BUILTIN, IMBREX, ROOT, TIMEOUT_S, TestCase, run

SCRIPT = os.path.join(ROOT, "bench", "peers", "llama_cpp.sh")
# Notes its arguments, and is as fast as it was called often.
PEER = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
echo peer >> "$(dirname "$0")/order"
count=$(wc -l < "$(dirname "$0")/calls")
echo "[{\\"build_commit\\": \\"abc\\", \\"build_number\\": 1, \\"avg_ts\\": ${count}00.5}]"
"""


class LlamaCpp(TestCase):
    def setUp(self):
        super().setUp()
        self.gguf = self.path("small.gguf")
        self.assert_ok(run("quantize", BUILTIN, self.gguf, "--type", "q8_0"))

    def script(self, *arguments):
        return subprocess.run([SCRIPT, "-c", self.path("cache"), *arguments], timeout=TIMEOUT_S,
                              capture_output=True, text=True, check=False)

    def make_build(self, version="0.1.2"):
        programs = self.path(f"cache/llama_cpp_python-{version}/build/bin")
        os.makedirs(programs)
        with open(os.path.join(programs, "llama-bench"), "w", encoding="utf-8") as file:
            file.write(PEER)
        os.chmod(os.path.join(programs, "llama-bench"), 0o755)
        self.write(f"cache/llama_cpp_python-{version}/built",
                   f"package {version}\ncommit fedcba9\ncompiler cc 12\nflags -Da -Db\n")
        return programs

    # Fault: a finished build is not found, so that each call builds again; or an older one is used.
    def test_build_is_used_again(self):
        self.make_build("0.1.9")
        programs = self.make_build("0.1.10")
        for arguments, expected in (([], programs), (["-v", "0.1.9"],
                                                     programs.replace("0.1.10", "0.1.9"))):
            result = self.script("-B", *arguments)
            self.assertEqual((result.returncode, result.stdout, result.stderr),
                             (0, expected + "\n", ""))

    # Fault: tests that are left out, pairs that do not change who begins, ratios of medians or of
    # other runs than a pair's.
    def test_pairs(self):
        programs = self.make_build()
        path = self.path("out.json")
        ours = self.write("imbrex", f"#!/bin/sh\necho ours >> {programs}/order\n"
                          f"exec {IMBREX} \"$@\"\n")
        os.chmod(ours, 0o755)
        result = self.script("-i", ours, "-t", "1,2", "-p", "8", "-n", "3", "-r", "3", "-o", path,
                             self.gguf)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        with open(os.path.join(programs, "calls"), encoding="utf-8") as file:
            calls = file.read().splitlines()
        self.assertEqual(calls, [f"-m {self.gguf} {test} -d 0 -t {threads} -r 1 -o json"
                                 for threads in (1, 2) for test in ("-p 8 -n 0", "-n 3 -p 0")
                                 for _ in range(3)])
        with open(os.path.join(programs, "order"), encoding="utf-8") as file:
            self.assertEqual(file.read().split(), 4 * ["peer", "ours", "ours", "peer", "peer",
                                                       "ours"])
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual((report["benchmark"], report["pairs"]), ("llama_cpp", 3))
        self.assertEqual(report["llama_cpp"], {"package": "0.1.2", "commit": "fedcba9",
                                               "compiler": "cc 12", "flags": "-Da -Db"})
        self.assertTrue(report["machine"]["cpu"])
        self.assertEqual([(row["threads"], row["test"], row["file"]) for row in report["rows"]],
                         [(threads, test, "small.gguf") for threads in (1, 2)
                          for test in ("pp8", "tg3")])
        for idx, row in enumerate(report["rows"]):
            peer = [float(f"{3 * idx + call}00.5") for call in (1, 2, 3)]
            self.assertEqual(row["peer"]["samples"], peer)
            ratios = [ours / theirs for ours, theirs in zip(row["ours"]["samples"], peer)]
            self.assertAlmostEqual(row["ratio"]["median"], statistics.median(ratios))
            self.assertLessEqual(row["ratio"]["p10"], row["ratio"]["p90"])
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 4 + len(report["rows"]))

    # Fault: a mistake is found after a build of many minutes, or not named.
    def test_refusals(self):
        for arguments, words in (([], "GGUF file"), (["-r", "0", self.gguf], "-r"),
                                 (["-i", "none", self.gguf], "-i"),
                                 ([self.path("none.gguf")], "none.gguf"),
                                 (["-q", "Q4_K_M", self.gguf], "-q")):
            result = self.script("-i", IMBREX, *arguments)
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(words, result.stderr)
            self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertFalse(os.path.exists(self.path("cache")))

    # Fault: a program that fails leaves a report, or its message is lost.
    def test_failure(self):
        programs = self.make_build()
        self.write(os.path.relpath(os.path.join(programs, "llama-bench"), self.folder),
                   "#!/bin/sh\necho no luck >&2\nexit 3\n")
        result = self.script("-i", IMBREX, "-p", "8", "-r", "1", self.gguf)
        self.assertEqual(result.returncode, 1)
        self.assertIn("no luck", result.stderr)

    # Fault: numbers and files that end in a traceback, or in a run of nothing.
    def test_values(self):
        self.make_build()
        for arguments, *expected in (
                (("-t", "0"), "at least 1 thread, found 0"),
                (("-p", "0", "-n", "0"), "found 0 in both"),
                (("-o", self.path("none/x.json")), "none/x.json", "No such file")):
            result = self.script("-i", IMBREX, *arguments, self.gguf)
            self.assertNotEqual(result.returncode, 0)
            self.assertNotIn("Traceback", result.stderr)
            for text in expected:
                self.assertIn(text, result.stderr)


if __name__ == "__main__":
    unittest.main()
