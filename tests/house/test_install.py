#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`make install`, and what a user does next: build a program against what was installed."""
import os
import re
import shutil
import shlex
import subprocess
import tempfile
import unittest

# Relative, because make does not take a folder whose path has a space in it.
BUILD = os.path.relpath(os.environ.get("IMBREX_BUILD", "build"))
# -o: what is built stays as it is, whatever compiler or options it was built with.
MAKE = ["make", *[part for name in ("imbrex", "libimbrex.a", "libimbrex.so")
                  for part in ("-o", os.path.join(BUILD, name))], f"BUILD={BUILD}"]
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
        # A sysroot with a space is more than pkg-config files of others bear.
        cls.destination = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.destination)
        cls.root = cls.destination + PREFIX
        cls.make("install")

    @classmethod
    def make(cls, target):
        run(*MAKE, f"DESTDIR={cls.destination}", f"PREFIX={PREFIX}", target)

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
        declared = set()
        for name in ("imbrex.h", "imbrex_ops.h"):
            with open(os.path.join(self.root, "include", name), encoding="utf-8") as file:
                header = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
            declared |= set(re.findall(r"IMBREX_API[^;]*?\b(imbrex_\w+)\s*\(", header))
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

    def test_what_the_readme_says(self):
        """Catches lines of README.md that do not work as they stand, and an example that crashes on
        a model without a tokenizer."""
        if not shutil.which("pkg-config"):
            self.skipTest("no pkg-config here")
        with open("README.md", encoding="utf-8") as file:
            lines = re.search(r"(?:^    .*\n)*^    make install PREFIX=.*\n(?:^    .*\n)+",
                              file.read(), re.M).group()
        with tempfile.TemporaryDirectory() as home:
            # The commands run as in the tree, but neither build nor write into it.
            os.mkdir(os.path.join(home, "bin"))
            os.symlink(os.path.abspath("examples"), os.path.join(home, "examples"))
            make = os.path.join(home, "bin", "make")
            with open(make, "w", encoding="utf-8") as file:
                command = [shutil.which("make"), "-C", os.getcwd(), *MAKE[1:]]
                file.write(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            os.chmod(make, 0o755)
            environment = {name: value for name, value in os.environ.items()
                           if name not in ("PKG_CONFIG_PATH", "LD_LIBRARY_PATH")}
            environment.update(HOME=home, PATH=os.path.join(home, "bin") + ":" + os.environ["PATH"])
            run("sh", "-e", "-c", lines, cwd=home, env=environment)
            program = os.path.join(home, "generate")
            self.assertRegex(run(program, "Once", env=environment), "^Once .{100}")

            model = os.path.join(home, "model")
            os.mkdir(model)
            for name in ("config.json", "model.safetensors"):
                shutil.copy(os.path.join("models/stories260K", name), model)
            result = subprocess.run([program, "Once", model], capture_output=True, text=True,
                                    timeout=120, env=environment)
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertRegex(result.stderr, "^INVALID_ARGUMENT: tokenizer: .*found NULL")

    def test_places_with_a_space(self):
        """Catches a path that the shell takes for two, or that splits in the pkg-config file."""
        with tempfile.TemporaryDirectory(prefix="a b") as folder:
            options = [f"DESTDIR={folder}/c d", "PREFIX=/e f"]
            run(*MAKE, *options, "install")
            self.assertEqual(os.listdir(folder), ["c d"])
            root = os.path.join(folder, "c d", "e f")
            self.assertEqual(sorted(os.listdir(root)), ["bin", "include", "lib"])
            if shutil.which("pkg-config"):
                path = os.path.join(root, "lib", "pkgconfig")
                found = run("pkg-config", "--cflags", "--libs", "imbrex",
                            env=dict(os.environ, PKG_CONFIG_PATH=path))
                self.assertIn("-I/e f/include", shlex.split(found))
                self.assertIn("-L/e f/lib", shlex.split(found))
            run(*MAKE, *options, "uninstall")
            self.assertEqual([names for _, _, names in os.walk(folder) if names], [])

    def test_relative_places_are_refused(self):
        """Catches a pkg-config file that is right in one folder only."""
        for option in ("PREFIX=here", "PREFIX=", "LIBDIR=lib"):
            for target in ("install", "uninstall"):
                result = subprocess.run([*MAKE, f"DESTDIR={self.destination}/none", option, target],
                                        capture_output=True, text=True, timeout=120)
                self.assertEqual(result.returncode, 2)
                self.assertIn("expected an absolute path, found", result.stderr)
        self.assertFalse(os.path.exists(self.destination + "/none"))

    def test_uninstall_leaves_nothing(self):
        """Catches a file that install makes and uninstall does not know."""
        self.addCleanup(self.make, "install")
        self.make("uninstall")
        left = [os.path.join(parent, name)
                for parent, _, names in os.walk(self.root) for name in names]
        self.assertEqual(left, [])


if __name__ == "__main__":
    unittest.main()
