#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/first_token.py on the built-in model."""
import json
import os
import statistics
import subprocess
import sys
import unittest

from support import BUILTIN, IMBREX, ROOT, TIMEOUT_S, TestCase

SCRIPT = os.path.join(ROOT, "bench", "first_token.py")


class FirstToken(TestCase):
    def script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPT, "-i", IMBREX, *arguments],
                              timeout=TIMEOUT_S, capture_output=True, text=True, check=False)

    # Fault: the round that warms up counts, a model is left out, or the report lacks samples.
    def test_report(self):
        path = self.path("out.json")
        result = self.script("-r", "3", "-t", "1", "-o", path, BUILTIN)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual(report["benchmark"], "first_token")
        self.assertTrue(report["machine"]["cpu"])
        self.assertEqual([row["model"] for row in report["rows"]], ["stories260K"])
        samples = report["rows"][0]["s"]["samples"]
        self.assertEqual(len(samples), 3)
        self.assertEqual(report["rows"][0]["s"]["median"], statistics.median(samples))
        self.assertIn("stories260K: median", result.stdout)

    # Fault: a model that cannot be run is timed all the same, or its message is lost.
    def test_failure(self):
        result = self.script("-r", "1", self.path("none"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("first_token.py:", result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertEqual(self.script("-r", "0", BUILTIN).returncode, 2)


if __name__ == "__main__":
    unittest.main()
