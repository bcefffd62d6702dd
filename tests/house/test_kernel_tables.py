#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/kernels.md are those of the result files."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join("tools", "make_kernel_tables.py")
PAGE = os.path.join("docs", "kernels.md")


def run(*arguments):
    result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
                            timeout=60)
    return result.returncode, result.stdout + result.stderr


class Tables(unittest.TestCase):
    def test_page_of_this_tree(self):
        """Catches result files that were renewed without the page, and figures typed into it."""
        self.assertEqual(run("--check"), (0, ""))

    def test_changed_figure(self):
        """Catches a check that cannot fail, and a page that is not restored."""
        with tempfile.TemporaryDirectory() as root:
            for folder in ("docs", os.path.join("bench", "results")):
                shutil.copytree(folder, os.path.join(root, folder))
            with open(os.path.join(root, PAGE), encoding="utf-8") as file:
                page = file.read()
            self.assertIn("| 0.5B | 128 |", page)
            with open(os.path.join(root, PAGE), "w", encoding="utf-8") as file:
                file.write(page.replace("| 0.5B | 128 |", "| 0.5B | 127 |"))
            status, output = run("--check", root)
            self.assertEqual(status, 1)
            self.assertIn("make_kernel_tables.py", output)
            self.assertEqual(run(root), (0, ""))
            with open(os.path.join(root, PAGE), encoding="utf-8") as file:
                self.assertEqual(file.read(), page)

    def test_no_markers(self):
        """Catches a page that is overwritten where it has no place for tables."""
        with tempfile.TemporaryDirectory() as root:
            os.mkdir(os.path.join(root, "docs"))
            with open(os.path.join(root, PAGE), "w", encoding="utf-8") as file:
                file.write("nothing\n")
            status, output = run(root)
            self.assertEqual(status, 1)
            self.assertIn("markers", output)


if __name__ == "__main__":
    unittest.main()
