#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is kept in bench/results is what the documentation reads from it."""
import glob
import itertools
import os
import re
import unittest

RESULTS = os.path.join("bench", "results")
NAME = re.compile(r"[\w.{},-]+\.(?:json|txt)")
CHOICE = re.compile(r"\{([^{}]*)\}")


def expand(name):
    """The names that a name with choices in braces, `a-{1,2}.json`, stands for."""
    parts = CHOICE.split(name)
    return ["".join(chosen) for chosen in
            itertools.product(*(part.split(",") if i % 2 else [part]
                                for i, part in enumerate(parts)))]


def names_on_pages():
    names = set()
    for page in [*glob.glob("*.md"), *glob.glob(os.path.join("docs", "*.md"))]:
        with open(page, encoding="utf-8") as file:
            for name in NAME.findall(file.read()):
                names.update(expand(name))
    return names


class Results(unittest.TestCase):
    def test_read(self):
        """Catches result files that no page names any more."""
        unread = set(os.listdir(RESULTS)) - names_on_pages()
        self.assertEqual(sorted(unread), [])

    def test_there(self):
        """Catches a page that names a result file which has gone."""
        missing = {name for name in names_on_pages() if re.match(r"20\d\d-\d\d-\d\d-", name)
                   and not os.path.exists(os.path.join(RESULTS, name))}
        self.assertEqual(sorted(missing), [])

    def test_expand(self):
        """Catches choices that are left out."""
        self.assertEqual(expand("a-{b,c}-{1,2}.json"),
                         ["a-b-1.json", "a-b-2.json", "a-c-1.json", "a-c-2.json"])


if __name__ == "__main__":
    unittest.main()
