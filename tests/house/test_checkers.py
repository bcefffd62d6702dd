#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The checkers themselves: a tree with one fault must be refused, and the fault named."""
import os
import subprocess
import sys
import tempfile
import unittest

LICENCE = "/* SPDX-License-Identifier: Apache-2.0 */\n"


def run(tool, *arguments):
    result = subprocess.run([sys.executable, os.path.join("tools", tool), *arguments],
                            capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


class Tree(unittest.TestCase):
    def setUp(self):
        build = os.environ.get("IMBREX_BUILD", "build")
        os.makedirs(build, exist_ok=True)
        self.folder = tempfile.TemporaryDirectory(dir=build)
        self.addCleanup(self.folder.cleanup)
        self.root = self.folder.name
        self.write("include/imbrex.h", LICENCE + "#include <stddef.h>\n")
        self.write("src/base/status.h", LICENCE + '#include "imbrex.h"\n')
        self.write("src/ops/ops.h", LICENCE + '#include "base/status.h"\n')
        self.write("src/model/config.h", LICENCE + '#include "ops/ops.h"\n')
        self.write("src/kv/kv_pool.h", LICENCE + '#include "ops/ops.h"\n')
        self.write("src/engine/engine.h",
                   LICENCE + '#include "kv/kv_pool.h"\n#include "model/config.h"\n')
        self.write("src/cli/main.c", LICENCE + '#include <stdio.h>\n#include "imbrex.h"\n')

    def write(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)

    def refused(self, tool, *expected):
        status, output = run(tool, self.root)
        self.assertEqual(status, 1, output)
        for text in expected:
            self.assertIn(text, output)
        self.assertEqual(len(output.strip().split("\n")), 1, output)


class Layers(Tree):
    def test_clean_tree_passes(self):
        """Catches a checker that refuses what is allowed: then nobody runs it."""
        self.assertEqual(run("check_layers", self.root), (0, ""))

    def test_include_of_a_higher_layer(self):
        """Catches a dependency that points up."""
        self.write("src/base/log.c", LICENCE + '#include "base/status.h"\n#include "ops/ops.h"\n')
        self.refused("check_layers", "src/base/log.c:3: includes ops/ops.h",
                     "base may include only base, imbrex.h")

    def test_kernel_api_belongs_to_ops(self):
        """Catches a header that is refused where it is implemented or used, or allowed below."""
        self.write("include/imbrex_ops.h", LICENCE + '#include "imbrex.h"\n')
        self.write("src/ops/cuda/cuda_device.c", LICENCE + '#include "imbrex_ops.h"\n')
        self.write("src/cli/bench_ops.c", LICENCE + '#include "imbrex_ops.h"\n')
        self.assertEqual(run("check_layers", self.root), (0, ""))
        self.write("src/base/log.c", LICENCE + '#include "imbrex_ops.h"\n')
        self.refused("check_layers", "src/base/log.c:2: includes imbrex_ops.h")

    def test_model_and_kv_are_apart(self):
        """Catches a model that knows the cache, in both directions."""
        self.write("src/model/forward.c", LICENCE + '# include  "kv/kv_pool.h"\n')
        self.refused("check_layers", "src/model/forward.c:2: includes kv/kv_pool.h")
        self.write("src/model/forward.c", LICENCE)
        self.write("src/kv/pool.c", LICENCE + '#include <model/config.h>\n')
        self.refused("check_layers", "src/kv/pool.c:2: includes model/config.h")

    def test_program_sees_the_public_header_only(self):
        """Catches a command that uses what a user of the library could not."""
        self.write("src/cli/run.c", LICENCE + '#include "base/status.h"\n')
        self.refused("check_layers", "src/cli/run.c:2: includes base/status.h",
                     "cli may include only cli, imbrex.h")

    def test_public_header_sees_nothing_of_the_sources(self):
        """Catches a public header that cannot be installed alone."""
        self.write("include/imbrex.h", LICENCE + '#include "base/status.h"\n')
        self.refused("check_layers", "include/imbrex.h:2: includes base/status.h")

    def test_path_is_written_from_src(self):
        """Catches an include that means another file when the including one moves."""
        self.write("src/ops/cpu/gemm.c", LICENCE + '#include "../ops.h"\n')
        self.refused("check_layers", "src/ops/cpu/gemm.c:2: includes ../ops.h")

    def test_name_is_used_once(self):
        """Catches two files that one name stands for."""
        self.write("src/model/status.h", LICENCE)
        self.refused("check_layers", "src/model/status.h:1: the name status.h is taken by "
                     "src/base/status.h")

    def test_folder_without_a_layer(self):
        """Catches code that escapes the rule by standing in a new folder."""
        self.write("src/misc/all.c", LICENCE)
        self.refused("check_layers", "src/misc/all.c:1: not in a layer")

    def test_empty_tree(self):
        """Catches a checker that is pointed at the wrong place and content with it."""
        status, output = run("check_layers", os.path.join(self.root, "include"))
        self.assertEqual(status, 1, output)


class Style(Tree):
    def test_clean_tree_passes(self):
        self.write("tools/run", "#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n")
        self.write("README.md", "# imbrex " + 200 * "x" + "\n")
        self.assertEqual(run("check_style", self.root), (0, ""))

    def test_each_fault(self):
        """Catches a rule that is written down and not enforced."""
        faults = {
            "trailing space": ("src/base/a.c", LICENCE + "int a; \n"),
            "a tab": ("src/base/a.c", LICENCE + "\tint a;\n"),
            "101 columns": ("src/base/a.c", LICENCE + "/* " + 95 * "x" + " */\n"),
            "does not begin with its SPDX": ("src/base/a.c", "\n" + LICENCE),
            "more than 1500 lines": ("src/base/a.c", LICENCE + 1500 * "\n"),
            "no newline at the end": ("src/base/a.c", LICENCE + "int a;"),
            "a mark for later": ("src/base/a.c", LICENCE + "/* TO" "DO: more */\n"),
            "not UTF-8": ("src/base/b.py", "\ud800"),
        }
        for expected, (path, text) in faults.items():
            with self.subTest(expected):
                full_path = os.path.join(self.root, path)
                with open(full_path, "wb") as file:
                    file.write(text.encode("utf-8", "surrogatepass"))
                self.refused("check_style", path + ":", expected)
                os.remove(full_path)

    def test_mark_with_an_issue_is_allowed(self):
        self.write("src/base/a.c", LICENCE + "/* TO" "DO(#12): more */\n")
        self.assertEqual(run("check_style", self.root), (0, ""))


class Ptxas(Tree):
    CLEAN = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gemm_64x64' for 'sm_90a'
ptxas info    : Function properties for gemm_64x64
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
"""

    def judge(self, text):
        self.write("kernels.ptxas", text)
        return run("check_ptxas", os.path.join(self.root, "kernels.ptxas"))

    def test_clean_output_passes(self):
        """Catches a checker that refuses every build."""
        self.assertEqual(self.judge(self.CLEAN), (0, ""))

    def test_spills(self):
        """Catches a kernel that keeps its accumulators in memory: it is right, and slow."""
        for before, after in (("0 bytes spill stores", "12 bytes spill stores"),
                              ("0 bytes spill loads", "44 bytes spill loads")):
            status, output = self.judge(self.CLEAN.replace(before, after))
            self.assertEqual(status, 1)
            self.assertIn("gemm_64x64", output)
            self.assertIn(after.split()[0], output)

    def test_serialized_matrix_instructions(self):
        """Catches what ptxas says in passing and costs most of the speed."""
        for line in ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async "
                     "instructions are serialized due to insufficient register resources\n",
                     "ptxas warning : setmaxnreg ignored to maintain minimum requirement\n"):
            status, output = self.judge(self.CLEAN + line)
            self.assertEqual(status, 1)
            self.assertIn(":6: ", output)

    def test_nothing_to_read(self):
        """Catches options of the compiler under which the check has nothing to check."""
        status, output = self.judge("")
        self.assertEqual(status, 1)
        self.assertIn("no kernels", output)


if __name__ == "__main__":
    unittest.main()
