#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`make install`, and what a user does next: build a program against what was installed."""
import os
import re
import shutil
import subprocess
import unittest

BUILD = os.environ.get("IMBREX_BUILD", os.path.abspath("build"))
PREFIX = "/opt/imbrex"
PROGRAM = """
#include <imbrex.h>
#include <stdio.h>
#include <string.h>
int main(void)
{
    struct imbrex_error err;
    struct imbrex_model *model;
    if (strcmp(imbrex_version(), IMBREX_VERSION) != 0) {
        return 2;
    }
    if (imbrex_model_open(NULL, NULL, &model, &err) != IMBREX_STATUS_OK) {
        puts(err.message);
        return 3;
    }
    imbrex_model_close(model);
    puts("opened");
    return 0;
}
"""


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: {result.returncode}\n"
                             f"{result.stdout}{result.stderr}")
    return result.stdout


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.destination = os.path.join(BUILD, "tests", "install")
        shutil.rmtree(cls.destination, ignore_errors=True)
        cls.root = cls.destination + PREFIX
        cls.make("install")

    @classmethod
    def make(cls, target):
        # -o: what is built stays as it is, whatever compiler or options it was built with.
        built = [os.path.join(BUILD, name) for name in ("imbrex", "libimbrex.a", "libimbrex.so")]
        run("make", *[part for path in built for part in ("-o", path)], f"BUILD={BUILD}",
            f"DESTDIR={cls.destination}", f"PREFIX={PREFIX}", target)

    def pkg_config(self, *options):
        if not shutil.which("pkg-config"):
            self.skipTest("no pkg-config here")
        environment = dict(os.environ,
                           PKG_CONFIG_SYSROOT_DIR=self.destination)
        default = run("pkg-config", "--variable=pc_path", "pkg-config").strip()
        # The two libraries' own files have to be found without the sysroot in front of them.
        environment["PKG_CONFIG_PATH"] = os.path.join(self.root, "lib", "pkgconfig")
        environment["PKG_CONFIG_LIBDIR"] = default
        return run("pkg-config", *options, "imbrex", env=environment).split()

    def build_and_run(self, name, options, environment):
        source = os.path.join(self.destination, name + ".c")
        program = os.path.join(self.destination, name)
        with open(source, "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        run("cc", "-std=c17", "-Wall", "-Werror", source, "-o", program, *options)
        self.assertEqual(run(program, env=dict(os.environ, **environment)), "opened\n")
        return program

    def test_files(self):
        """Catches a file that is forgotten, or a link that leads nowhere."""
        with open("include/imbrex.h", encoding="utf-8") as header:
            version = re.search(r'IMBREX_VERSION "(.*)"', header.read()).group(1)
        library = os.path.join(self.root, "lib", "libimbrex.so")
        self.assertEqual(os.path.realpath(library),
                         os.path.realpath(f"{library}.{version}"))
        self.assertTrue(os.path.isfile(library + ".0"))
        self.assertTrue(os.access(os.path.join(self.root, "bin", "imbrex"), os.X_OK))
        with open(os.path.join(self.root, "lib", "pkgconfig", "imbrex.pc"), encoding="utf-8") as pc:
            text = pc.read()
        self.assertNotIn("@", text)
        self.assertNotIn(self.destination, text)
        self.assertIn(f"prefix={PREFIX}\n", text)
        self.assertIn(f"Version: {version}\n", text)

    def test_program_with_the_shared_library(self):
        """Catches a wrong soname, a symbol that is not exported, a pkg-config file that lies."""
        options = self.pkg_config("--cflags", "--libs")
        self.assertNotIn("-ljansson", options)
        program = self.build_and_run("shared", options,
                                     {"LD_LIBRARY_PATH": os.path.join(self.root, "lib")})
        needed = run("objdump", "-p", program)
        self.assertIn("libimbrex.so.0", needed)
        self.assertNotIn("libjansson", needed)

    def test_program_with_the_static_library(self):
        """Catches a library that libimbrex.a needs and the pkg-config file does not name."""
        options = self.pkg_config("--static", "--cflags", "--libs")
        self.assertIn("-ljansson", options)
        options = [os.path.join(self.root, "lib", "libimbrex.a") if option == "-limbrex" else option
                   for option in options]
        program = self.build_and_run("static", options, {})
        self.assertNotIn("libimbrex", run("objdump", "-p", program))

    def test_only_the_public_api_leaves_the_library(self):
        """Catches an internal name in the ABI, and a public function that stayed inside."""
        lines = run("nm", "-D", "--defined-only", os.path.join(self.root, "lib", "libimbrex.so"))
        exported = {line.split()[-1].split("@")[0] for line in lines.strip().split("\n")}
        with open("include/imbrex.h", encoding="utf-8") as file:
            header = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
        declared = set(re.findall(r"IMBREX_API[^;]*?\b(imbrex_\w+)\s*\(", header))
        self.assertGreater(len(declared), 20)
        self.assertEqual(exported, declared)

    def test_program_needs_libc_only(self):
        """Catches a program that does not start on a machine without the build's packages. Where
        these have no static library there is nothing to check."""
        if not os.path.isabs(run("cc", "-print-file-name=libjansson.a").strip()):
            self.skipTest("no static jansson here")
        needed = re.findall(r"NEEDED\s+(\S+)",
                            run("objdump", "-p", os.path.join(self.root, "bin", "imbrex")))
        for name in needed:
            self.assertRegex(name, r"^(libc|libm|libpthread|ld-linux.*)\.so\.\d+$")

    def test_uninstall_leaves_nothing(self):
        """Catches a file that install makes and uninstall does not know."""
        self.addCleanup(self.make, "install")
        self.make("uninstall")
        left = [os.path.join(parent, name)
                for parent, _, names in os.walk(self.root) for name in names]
        self.assertEqual(left, [])


if __name__ == "__main__":
    unittest.main()
