#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/run_tests: what it counts is what the project claims, so it is tested like the rest."""
import os
import re
import subprocess
import sys
import tempfile
import unittest


class Runner(unittest.TestCase):
    def setUp(self):
        build = os.environ.get("IMBREX_BUILD", "build")
        os.makedirs(build, exist_ok=True)
        self.folder = tempfile.TemporaryDirectory(dir=build)
        self.addCleanup(self.folder.cleanup)
        self.programs = []

    def add(self, name, text, kind="#!/bin/sh"):
        path = os.path.join(self.folder.name, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(kind + "\n" + text)
        os.chmod(path, 0o755)
        self.programs.append(path)

    def run_all(self, *options):
        result = subprocess.run(
            [sys.executable, "tools/run_tests", "--build", self.folder.name, *options,
             *self.programs], capture_output=True, text=True, timeout=60)
        lines = (result.stdout + result.stderr).rstrip("\n").split("\n")
        return result.returncode, lines[-1], "\n".join(lines[:-1])

    def test_cases_are_counted_not_programs(self):
        """Catches a summary of programs, and one kind of program that is not understood."""
        self.add("unit", "echo '[==========] Running 3 test(s).'\n"
                         "echo '[  PASSED  ] 2 test(s).'\n"
                         "echo '[  SKIPPED ] group: 1 test(s), listed below:'\n"
                         "echo '[  SKIPPED ] test_large'\n"
                         "echo '[  PASSED  ] 4 test(s).'\n")
        self.add("check_op", "echo '17 passed, 0 failed'\n")
        self.add("plain", "echo hello\n")
        self.add("test_script.py",
                 "import unittest\n"
                 "class T(unittest.TestCase):\n"
                 "    def test_a(self): pass\n"
                 "    def test_b(self): self.skipTest('no')\n"
                 "unittest.main()\n", "# python")
        status, total, _ = self.run_all()
        self.assertEqual(total, "25 passed, 0 failed, 2 skipped")
        self.assertEqual(status, 0)

    def test_failures_are_counted_and_shown(self):
        """Catches a failure that is hidden by the programs after it, or shown without its cause."""
        self.add("unit", "echo 'assert: 1 != 2'\n"
                         "for i in $(seq 100); do\n"
                         "echo '[ RUN      ] fine'; echo '[       OK ] fine'; done\n"
                         "echo '[  PASSED  ] 2 test(s).'\n"
                         "echo '[  FAILED  ] group: 1 test(s), listed below:'\nexit 1\n")
        self.add("test_script.py",
                 "import unittest\n"
                 "class T(unittest.TestCase):\n"
                 "    def test_a(self): self.fail()\n"
                 "    def test_b(self): 1 / 0\n"
                 "unittest.main()\n", "# python")
        self.add("fine", "exit 0\n")
        status, total, shown = self.run_all()
        self.assertEqual(total, "3 passed, 3 failed, 0 skipped")
        self.assertEqual(status, 1)
        self.assertIn("assert: 1 != 2", shown)

    def test_exit_status_counts_also_without_a_failed_case(self):
        """Catches a leak or crash after the last test case, which only the exit status tells."""
        self.add("leaks", "echo '[  PASSED  ] 2 test(s).'\nexit 1\n")
        self.add("crashes", "kill -SEGV $$\n")
        status, total, shown = self.run_all()
        self.assertEqual(total, "2 passed, 2 failed, 0 skipped")
        self.assertEqual(status, 1)
        self.assertIn("SIGSEGV", shown)

    def test_skipped_program(self):
        """Catches a skip that looks like a pass, or one without its reason."""
        self.add("gpu", "echo 'no GPU here'\nexit 77\n")
        self.add("fine", "exit 0\n")
        status, total, shown = self.run_all()
        self.assertEqual(total, "1 passed, 0 failed, 1 skipped")
        self.assertEqual(status, 0)
        self.assertIn("skipped: no GPU here", shown)

    def test_nothing_ran(self):
        """Catches a green run of nothing: no programs, all skipped, or a suite that is empty."""
        self.assertEqual(self.run_all()[0], 1)
        self.add("gpu", "exit 77\n")
        self.assertEqual(self.run_all()[0], 1)
        self.add("empty", "echo '0 passed, 0 failed'\n")
        status, total, _ = self.run_all()
        self.assertEqual((status, total), (1, "0 passed, 1 failed, 1 skipped"))

    def test_hang_fails(self):
        """Catches a run that waits for ever for one program, or leaves its children running."""
        self.add("hangs", "sleep 1000 & sleep 1000\n")
        status, total, shown = self.run_all("--limit", "0.5")
        self.assertEqual((status, total), (1, "0 passed, 1 failed, 0 skipped"))
        self.assertIn("did not end within 0.5 s", shown)

    def test_side_by_side(self):
        """Catches programs that still wait for each other, and results in the order of their ends.

        Each of the first two ends only once the other one has begun."""
        for name, other in (("first", "second"), ("second", "first")):
            self.add(name, f"cd {os.path.abspath(self.folder.name)}; touch {name}.began\n"
                           f"while [ ! -e {other}.began ]; do sleep 0.01; done\n")
        self.add("third", "exit 1\n")
        status, total, shown = self.run_all("--jobs", "2", "--limit", "30")
        self.assertEqual((status, total), (1, "2 passed, 1 failed, 0 skipped"))
        self.assertEqual(re.findall("^(first|second|third) ", shown, re.M),
                         ["first", "second", "third"])

    def test_slowest_are_named(self):
        """Catches CPU time without that of what a program started, which is most of a script's."""
        self.add("quick", "exit 0\n")
        self.add("busy", "sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done'\n")
        shown = self.run_all()[2]
        table = shown[shown.index("most CPU time"):]
        self.assertRegex(table, r"(?s) s  busy\n.* s  quick\n")

    def test_parts(self):
        """Catches a part that is not run or not counted, one that is run with the others, and a
        choice that takes the whole program for one part or nothing for the program."""
        self.add("unit", "case $1 in --list) echo one; echo two;;\n"
                         "one) echo '2 passed, 0 failed';;\n"
                         "two) echo '0 passed, 1 failed'; exit 1;; *) exit 2; esac\n")
        self.add("other", "exit 0\n")
        status, total, shown = self.run_all("--parts", "unit")
        self.assertEqual((status, total), (1, "3 passed, 1 failed, 0 skipped"))
        self.assertRegex(shown, r"(?m)^unit\.one .* 2 passed$")
        self.assertEqual(self.run_all("--parts", "unit", "--only", "unit.one other")[:2],
                         (0, "3 passed, 0 failed, 0 skipped"))
        self.assertEqual(self.run_all("--parts", "unit", "--only", "unit")[1],
                         "2 passed, 1 failed, 0 skipped")

    def test_some_parts(self):
        """Catches parts that run though they are not among some, and one of the rest that cannot be
        asked for by its name."""
        self.add("unit", "case $1 in --list) echo one; echo two;; --threaded) echo two;;\n"
                         "one) exit 1;; two) echo '2 passed, 0 failed';; *) exit 2; esac\n")
        options = ("--parts", "unit", "--some", "threaded")
        self.assertEqual(self.run_all(*options)[:2], (0, "2 passed, 0 failed, 0 skipped"))
        self.assertEqual(self.run_all(*options, "--only", "unit.one")[1],
                         "0 passed, 1 failed, 0 skipped")

    def test_only(self):
        """Catches a selection that runs everything, or a misspelt name that runs nothing."""
        self.add("one", "exit 0\n")
        self.add("two", "exit 1\n")
        self.assertEqual(self.run_all("--only", "one")[:2], (0, "1 passed, 0 failed, 0 skipped"))
        status, message, _ = self.run_all("--only", "tree")
        self.assertEqual(status, 1)
        self.assertIn("no test named tree", message)

    def test_two_programs_of_one_name(self):
        """Catches a program that is never run because another one took its name."""
        self.add("one", "exit 0\n")
        self.add("one.py", "", "# python")
        self.assertEqual(self.run_all()[0], 1)


if __name__ == "__main__":
    unittest.main()
