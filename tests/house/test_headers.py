#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each public header compiles alone, as C17 and as C++17, without a warning."""
import os
import shutil
import subprocess
import unittest

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
C_COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)] or ["cc"]
CXX_COMPILERS = [name for name in ("g++", "clang++", "c++") if shutil.which(name)]
HEADERS = sorted(name for name in os.listdir("include") if name.endswith(".h"))


class Headers(unittest.TestCase):
    def compile(self, compiler, header, *options):
        # Twice: the second must be stopped by the include guard.
        text = f'#include "{header}"\n#include "{header}"\n'
        result = subprocess.run([compiler, *WARNINGS, "-Iinclude", "-fsyntax-only", *options, "-"],
                                input=text, capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_there_are_headers(self):
        self.assertIn("imbrex.h", HEADERS)

    def test_c17(self):
        """Catches a header that needs another one included before it, or a GNU extension."""
        for compiler in C_COMPILERS:
            for header in HEADERS:
                with self.subTest(compiler=compiler, header=header):
                    self.compile(compiler, header, "-std=c17", "-Wstrict-prototypes", "-xc")

    def test_cxx17(self):
        """Catches C that is not C++: a keyword as a name, a missing extern "C"."""
        if not CXX_COMPILERS:
            self.skipTest("no C++ compiler here")
        for compiler in CXX_COMPILERS:
            for header in HEADERS:
                with self.subTest(compiler=compiler, header=header):
                    self.compile(compiler, header, "-std=c++17", "-xc++")


if __name__ == "__main__":
    unittest.main()
