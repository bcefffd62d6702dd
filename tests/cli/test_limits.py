#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory: how little the program needs, what it does with less, and model files that shrink."""
import os
import resource
import re
import shutil
import signal
import subprocess
import unittest

from support import BUILTIN, IMBREX, SANITIZED, TIMEOUT_S, Model, TestCase, start

MIB = 1 << 20
NO_MEMORY = re.compile("memory|cannot allocate|could not be started")


def run_limited(limit_kib, *arguments):
    """Under `ulimit -v`."""
    return subprocess.run(["sh", "-c", 'ulimit -v "$1" && shift && exec "$@"', "sh",
                           str(limit_kib), IMBREX, *arguments],
                          stdin=subprocess.DEVNULL, capture_output=True, check=False,
                          timeout=TIMEOUT_S)


@unittest.skipIf(SANITIZED, "the sanitizer needs memory of its own")
class AddressSpace(TestCase):
    def first_limit(self):
        """KiB with which the program itself can start: below, the loader's message is seen."""
        for limit_kib in range(1024, 65536, 16):
            if run_limited(limit_kib, "--version").returncode == 0:
                return limit_kib
        return self.fail("the program does not start")

    # Fault: a failed allocation crashes, hangs, or is reported badly; less memory, other text.
    # Reading tokens or a model takes so little that every limit may do.
    def test_every_limit_is_an_error_or_success(self):
        first = self.first_limit()
        for arguments in (["run", "-q", "-n", "8", "--threads", "2"], ["inspect", "--json"],
                          ["tokenize", "--text", "Once upon a time"]):
            texts = set()
            failed = 0
            limit_kib = first
            while True:
                result = run_limited(limit_kib, *arguments)
                if result.returncode == 0:
                    texts.add(result.stdout)
                    if limit_kib > first + 40 * 1024:
                        break
                else:
                    failed += 1
                    self.assert_error(result, 1, NO_MEMORY)
                limit_kib += 127 if limit_kib < first + 3 * 1024 else 1021
                self.assertLess(limit_kib, 1 << 20, "no limit is enough")
            self.assertTrue(failed or arguments[0] != "run", arguments)
            self.assertEqual(len(texts), 1, arguments)

    # Fault: a context that does not fit is an error only after the user has waited, or a crash;
    # neither the limit that was met is named nor what would do with less.
    def test_large_context(self):
        model = self.model()
        model.config["max_position_embeddings"] = 1 << 20
        model.write()
        self.assert_error(run_limited(200 * 1024, "run", model.folder, "-p", "a", "-q", "-c",
                                      str(1 << 20)), 1, NO_MEMORY,
                          "less is taken with less of --ctx-size, --threads",
                          "ulimit -v lets this process have 204800 KiB")

    # Fault: a limit that was met is not named.
    def test_few_files(self):
        result = subprocess.run(["sh", "-c", 'ulimit -n 4 && exec "$@"', "sh", IMBREX, "run", "-q",
                                 "--kv-disk", f"{self.path('folder')}:128M"],
                                stdin=subprocess.DEVNULL, capture_output=True, check=False,
                                timeout=TIMEOUT_S)
        self.assert_error(result, 2, "Too many open files (ulimit -n says how many")


@unittest.skipIf(SANITIZED, "the sanitizer needs memory of its own")
class ResidentMemory(TestCase):
    # Fault: the built-in model takes more than 24 MiB, by copies of weights or eager buffers.
    def test_builtin_model(self):
        for arguments in (["-p", "Once upon a time"], ["--ignore-eos"]):
            process = start("run", "-q", *arguments, pipe_bytes=65536)
            text = process.stdout.read()
            process.stdout.close()
            process.stderr.close()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(process.returncode, 0)
            self.assertGreater(len(text), 100)
            # ru_maxrss is at least the test's own size at the fork.
            own_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.assertLessEqual(usage.ru_maxrss, max(24 * MIB // 1024, own_kib))


class ShrinkingFile(TestCase):
    name = "model"

    def cut_while_running(self, cut, *arguments):
        """Spoils the file after the first text. The small pipe keeps the program from ending."""
        model = Model(self.path(self.name))
        process = start("run", model.folder, "-p", "Once", "-n", "3000", "--ignore-eos", "--temp",
                        "1", "--seed", "1", "--no-echo", *arguments)
        self.addCleanup(process.kill)
        first = process.stdout.read(1)
        cut(model, process)
        rest, errors = process.communicate(timeout=TIMEOUT_S)
        return model, process.returncode, first + rest, errors.decode()

    # Fault: SIGBUS kills the program, or the message does not tell which file changed.
    def test_truncated_while_running(self):
        for threads in ("1", "2"):
            model, exit_code, text, errors = self.cut_while_running(
                lambda model, _: model.truncate(0), "--threads", threads)
            self.assertEqual(exit_code, 2, errors)
            self.assertGreater(len(text), 0)
            self.assertEqual(errors.split("\n")[1:],
                             [f"imbrex: error: {model.weights}: the file changed while it was "
                              "mapped (truncated, or its disk failed)", ""])
            shutil.rmtree(model.folder)

    # Fault: the name of the file controls the reader's terminal.
    def test_name_of_truncated_file(self):
        self.name = "m\x1b[31m\n"
        model, exit_code, _, errors = self.cut_while_running(lambda model, _: model.truncate(0),
                                                             "-q")
        self.assertEqual(exit_code, 2, errors)
        self.assertRegex(errors, r"\A[^\x1b\n]*m\?\[31m\?/model\.safetensors: the file changed "
                                 r"[^\x1b\n]*\n\Z")

    # Fault: a file that is replaced, as downloads do, disturbs a run that has the old one.
    def test_replaced_while_running(self):
        def replace(model, _):
            shutil.copy(model.weights, model.path("new"))
            os.truncate(model.path("new"), 100)
            os.replace(model.path("new"), model.weights)

        _, exit_code, _, errors = self.cut_while_running(replace)
        self.assertEqual(exit_code, 0, errors)
        self.assertIn("generated 3000 tokens", errors)

    # Fault: a signal that somebody sent is taken for a file that shrank.
    def test_sent_signal(self):
        _, exit_code, _, errors = self.cut_while_running(
            lambda model, process: process.send_signal(signal.SIGBUS), "-q")
        self.assertEqual((exit_code, errors), (-signal.SIGBUS, ""))


if __name__ == "__main__":
    unittest.main()
