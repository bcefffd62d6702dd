#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tests of python/, which pytest runs: its count is told in the words of tools/run_tests."""
import os
import re
import subprocess
import sys

SKIP_STATUS = 77
ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def has_pytest(python):
    try:
        return subprocess.run([python, "-c", "import pytest"], capture_output=True).returncode == 0
    except OSError:
        return False


def main():
    # A distribution's pytest belongs to its own Python, which may not be the first one found.
    pythons = [python for python in (sys.executable, "/usr/bin/python3") if has_pytest(python)]
    if not pythons:
        print("no pytest here (python3-pytest)")
        return SKIP_STATUS
    result = subprocess.run([pythons[0], "-m", "pytest", "-q", "--tb=short", "-rs",
                             *sys.argv[1:], os.path.join(ROOT, "python", "tests")],
                            stdout=subprocess.PIPE, text=True, cwd=os.path.join(ROOT, "python"))
    print(result.stdout)
    summary = result.stdout.strip().rsplit("\n", 1)[-1]
    counts = {word: int(number) for number, word in
              re.findall(r"(\d+) (passed|failed|errors?|skipped)", summary)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    print(f"{counts.get('passed', 0)} passed, {failed} failed, {counts.get('skipped', 0)} skipped")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
