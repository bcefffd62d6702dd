#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/deps.sh on systems that lack something: a PATH that holds only what the test puts there.

apt-get is replaced by a script that keeps its arguments and pretends to have worked.
"""
import os
import shutil
import subprocess
import tempfile
import unittest

BASICS = ["sh", "env", "mktemp", "rm", "cut", "sed", "cat", "head"]
BUILD_TOOLS = ["make", "ar", "as", "ld"]


class Deps(unittest.TestCase):
    def setUp(self):
        build = os.environ.get("IMBREX_BUILD", os.path.abspath("build"))
        os.makedirs(build, exist_ok=True)
        self.folder = tempfile.TemporaryDirectory(dir=build)
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "bin")
        self.calls = os.path.join(self.folder.name, "calls")
        os.makedirs(self.path)
        for name in BASICS + BUILD_TOOLS:
            self.link(name)
        self.script("apt-get", f'echo "$@" >> "{self.calls}"')
        self.script("apt-cache", "exit 0")
        self.script("id", "echo 0")

    def link(self, name):
        os.symlink(shutil.which(name), os.path.join(self.path, name))

    def script(self, name, text):
        path = os.path.join(self.path, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{text}\n")
        os.chmod(path, 0o755)

    def deps(self, level):
        environment = {"PATH": self.path, "TMPDIR": self.folder.name}
        result = subprocess.run([shutil.which("sh"), "tools/deps.sh", level], env=environment,
                                capture_output=True, text=True, timeout=60)
        calls = []
        if os.path.exists(self.calls):
            with open(self.calls, encoding="utf-8") as file:
                calls = file.read().strip().split("\n")
        return result.returncode, result.stdout, result.stderr, calls

    def compiler(self):
        """A compiler that works, found by its full path."""
        self.script("cc", f'PATH={os.environ["PATH"]} exec {shutil.which("cc")} "$@"')

    def test_nothing_missing(self):
        """Catches a script that asks for root or the network when there is nothing to do."""
        self.compiler()
        self.assertEqual(self.deps("build"), (0, "", "", []))

    def test_nothing_there(self):
        """Catches a package that a fresh system needs and is not told of."""
        for name in BUILD_TOOLS:
            os.remove(os.path.join(self.path, name))
        status, output, _, calls = self.deps("build")
        line = "gcc libc6-dev make binutils libjansson-dev libutf8proc-dev libpcre2-dev " \
               "libssl-dev libzstd-dev libxxhash-dev libhiredis-dev liburing-dev"
        self.assertEqual(status, 0)
        self.assertEqual(output, f"apt-get install -y --no-install-recommends {line}\n")
        self.assertEqual(calls, [f"install -y -qq --no-install-recommends {line}"])

    def test_library_missing(self):
        """Catches a library that is taken for there because its package once was."""
        self.script("cc", 'for file in "$@"; do case $file in *.c) source=$file;; esac; done\n'
                          'if sed -n "/jansson/q1" "$source"; then :; else exit 1; fi')
        status, output, _, calls = self.deps("build")
        self.assertEqual(status, 0)
        self.assertEqual(output, "apt-get install -y --no-install-recommends libjansson-dev\n")
        self.assertEqual(len(calls), 1)

    def test_lists_are_fetched_if_a_package_is_unknown(self):
        """Catches a fresh container, whose lists are empty."""
        self.script("apt-cache", "exit 100")
        status, _, _, calls = self.deps("build")
        self.assertEqual(status, 0)
        self.assertEqual(calls[0], "update -qq")
        self.assertEqual(len(calls), 2)

    def test_sudo_is_used_only_where_needed(self):
        """Catches an apt-get that fails for want of rights although sudo is there."""
        self.script("id", "echo 1000")
        self.script("sudo", f'echo "sudo $1" >> "{self.calls}"; exec "$@"')
        status, output, _, calls = self.deps("build")
        self.assertEqual(status, 0)
        self.assertTrue(output.startswith("sudo apt-get install"), output)
        self.assertEqual(calls[0], "sudo env")

    def test_no_rights_and_no_apt(self):
        """Catches a script that goes on, or does not say what to install."""
        self.script("id", "echo 1000")
        status, output, errors, calls = self.deps("build")
        self.assertEqual((status, output, calls), (1, "", []))
        self.assertIn("libjansson-dev", errors)
        os.remove(os.path.join(self.path, "apt-get"))
        self.script("id", "echo 0")
        status, _, errors, _ = self.deps("check")
        self.assertEqual(status, 1)
        self.assertIn("clang-format", errors)
        self.assertIn("the sanitizer runtime of clang", errors)

    def test_runtime_is_named_for_the_clang_of_the_system(self):
        """Catches a version of clang written into the script."""
        self.script("apt-cache", 'case "$1 $2" in "depends clang") '
                                 'printf "clang\\n  Depends: clang-19\\n";; esac')
        _, output, _, _ = self.deps("check")
        self.assertIn("libclang-rt-19-dev", output)

    def test_apt_fails(self):
        """Catches a failed installation that is taken for done."""
        self.script("apt-get", "echo 'E: no space left'; exit 100")
        status, _, errors, _ = self.deps("build")
        self.assertEqual(status, 1)
        self.assertIn("no space left", errors)

    def test_unknown_level(self):
        self.assertEqual(self.deps("all")[0], 2)


if __name__ == "__main__":
    unittest.main()
