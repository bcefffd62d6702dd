#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--kv-host, --kv-disk and --kv-remote."""
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
import unittest

from support import IMBREX, TestCase, run

PROMPT = ("Once upon a time there was a little girl named Lily who liked to play outside in the "
          "park with her dog and her friends every single day of the summer because")


class KvTiers(TestCase):
    def generate(self, *options, prompt=PROMPT):
        """(text, cached, from RAM, from disk)"""
        result = run("run", "-p", prompt, "-n", "20", "--temp", "0", "-t", "1", *options)
        self.assert_ok(result)
        shown = result.stderr.decode()
        found = re.search(r", (\d+) cached \((\d+) from RAM, (\d+) from disk\)", shown)
        return (result.stdout, *(map(int, found.groups()) if found else (0, 0, 0)))

    # Fault: a folder that is cold after a restart, or a text that differs with it; blocks of one
    # model taken for another's; a damaged block that is used, or that ends the program.
    def test_restart(self):
        folder = os.path.join(self.folder, "cache")
        option = ("--kv-disk", folder + ":1G")
        alone = self.generate()
        self.assertEqual(alone[1:], (0, 0, 0))
        self.assertEqual(self.generate(*option), alone)
        text, cached, _, from_disk = self.generate(*option)
        self.assertEqual(text, alone[0])
        self.assertEqual((cached, from_disk), (48, 48))
        _, cached, _, _ = self.generate(*option, "--cpu", "ref")
        self.assertEqual(cached, 0)
        for name in os.listdir(folder):
            if name.endswith(".imbrex-kv"):
                with open(os.path.join(folder, name), "r+b") as file:
                    for at in range(4096 + 1024 * 128, 4096 + 1024 * 128 + 4 * 20480, 1000):
                        file.seek(at)
                        byte = file.read(1)[0] ^ 4
                        file.seek(at)
                        file.write(bytes([byte]))
        result = run("run", "-p", PROMPT, "-n", "20", "--temp", "0", "-t", "1", *option)
        self.assert_ok(result)
        self.assertEqual(result.stdout, alone[0])
        self.assertIn(b"damaged", result.stderr)

    # Fault: an option that is taken without its half, or a message that does not name it.
    def test_bad_options(self):
        for options, message in ((("--kv-disk", "somewhere"), "--kv-disk: expected a folder"),
                                 (("--kv-disk", "somewhere:5"), "--kv-disk: expected a whole"),
                                 (("--kv-disk", "somewhere:10MB"), "K, M, G or T"),
                                 (("--kv-disk", ":5G"), "--kv-disk: expected a folder"),
                                 (("--kv-host", "much"), "--kv-host: expected a whole"),
                                 (("--kv-host", "1K"), "kv_host_bytes: expected room"),
                                 (("--kv-prefetch", "101"), "--kv-prefetch: expected"),
                                 (("--kv-disk", self.folder + ":1M"), "(41 MiB)"),
                                 (("--kv-remote", "127.0.0.1:6379"), "expected redis://"),
                                 (("--kv-remote-secret", "secret"), "found it alone"),
                                 (("--kv-disk", "/proc/a/b:1G"), "KV folder")):
            result = run("run", "-p", "hi", *options)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(message, result.stderr.decode())

    # Fault: a folder whose parents are missing is refused; units are those of other programs only.
    def test_new_folder(self):
        folder = os.path.join(self.folder, "some", "where")
        self.assertEqual(self.generate("--kv-disk", folder + ":1GiB")[1], 0)
        self.assertEqual(self.generate("--kv-disk", folder + ":1G")[1], 48)
        self.assertEqual(os.stat(folder).st_mode & 0o777, 0o700)

    # Fault: a file that is none makes the program wait for ever, or another file is written through
    # a symbolic link.
    def test_odd_files(self):
        folder = os.path.join(self.folder, "cache")
        option = ("--kv-disk", folder + ":1G")
        text = self.generate(*option)[0]
        segment = os.path.join(folder, "00000000.imbrex-kv")
        os.unlink(segment)
        os.mkfifo(segment)
        self.assertEqual(self.generate(*option)[:2], (text, 0))
        victim = os.path.join(self.folder, "victim")
        for name in ("imbrex-kv.lock", "imbrex-kv.secret"):
            for make, found in ((os.mkfifo, "something else"),
                                (lambda path: os.symlink(victim, path), "a symbolic link")):
                with open(victim, "w", encoding="ascii") as file:
                    file.write("precious")
                path = os.path.join(folder, name)
                os.unlink(path)
                make(path)
                result = run("run", "-p", "hi", *option)
                self.assert_error(result, 2, f"{name}: expected a regular file, found {found}")
                with open(victim, encoding="ascii") as file:
                    self.assertEqual(file.read(), "precious")
                os.unlink(path)
                self.assertEqual(self.generate(*option)[0], text)

    # Fault: blocks that a full disk does not take are lost without a word, or for another reason.
    def test_full_disk(self):
        folder = os.path.join(self.folder, "cache")
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        result = run("run", "-p", PROMPT, "-n", "4", "--kv-disk", folder + ":1G", preexec_fn=limit)
        self.assert_ok(result)
        self.assertIn(b"no room could be made on the disk; last: File too large", result.stderr)

    # Fault: two processes that write one folder.
    def test_two_processes(self):
        folder = os.path.join(self.folder, "cache")
        with subprocess.Popen([IMBREX, "chat", "--chat-template", "chatml", "-n", "4", "--kv-disk",
                               folder + ":1G"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as first:
            first.stdin.write(b"Hello\n")
            first.stdin.flush()
            self.assertNotEqual(first.stdout.read(1), b"")
            result = run("run", "-p", "hi", "--kv-disk", folder + ":1G")
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(f"locked by process {first.pid}", result.stderr.decode())
            first.stdin.close()
            first.stdout.read()
            first.stderr.read()
            self.assertEqual(first.wait(), 0)
        self.assert_ok(run("run", "-p", "hi", "-n", "2", "--kv-disk", folder + ":1G"))

    def redis(self, *options):
        """Debian's server on a free port, until the test ends; the port."""
        if shutil.which("redis-server") is None:
            self.skipTest("there is no redis-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1",
                                   "--save", "", "--dir", self.folder, *options],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        for _ in range(1000):
            self.assertIsNone(server.poll())
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    probe.sendall(b"PING\r\n")
                    if probe.recv(1):
                        return port
            time.sleep(0.02)
        self.fail("redis-server does not answer")

    # Fault: blocks that the next run does not find on the server, a text that differs with them, a
    # password in what is shown.
    def test_remote(self):
        port = self.redis("--requirepass", "hunter/2")
        option = ("--kv-remote", f"redis://:hunter%2F2@127.0.0.1:{port}?ttl=60")
        if b"hiredis" in run("inspect", *option).stderr:
            self.skipTest("a build without hiredis")
        alone = self.generate()
        self.assertEqual(self.generate(*option), alone)
        result = run("run", "-p", PROMPT, "-n", "20", "--temp", "0", "-t", "1", *option)
        self.assert_ok(result)
        self.assertEqual(result.stdout, alone[0])
        self.assertIn(b"48 cached (0 from RAM, 0 from disk, 48 from the remote tier)",
                      result.stderr)
        self.assertNotIn(b"hunter", result.stderr)
        shown = run("inspect", *option)
        self.assert_ok(shown)
        self.assertRegex(shown.stdout.decode(), rf"remote +127\.0\.0\.1:{port}\?ttl=60\n")
        self.assertNotIn(b"hunter", shown.stdout)
        wrong = run("run", "-p", PROMPT, "-n", "20", "--temp", "0", "-t", "1", "--kv-remote",
                    f"redis://:another@127.0.0.1:{port}")
        self.assert_ok(wrong)
        self.assertEqual(wrong.stdout, alone[0])
        self.assertIn(b"WRONGPASS", wrong.stderr)
        self.assertNotIn(b":another", wrong.stderr)

    # Fault: a plan without the tiers.
    def test_inspect(self):
        result = run("inspect", "--kv-host", "64M", "--kv-disk", self.folder + ":1G", "--json")
        self.assert_ok(result)
        plan = json.loads(result.stdout)["memory_plan"]
        self.assertEqual(plan["kv_host_bytes"], (64 << 20) // 20480 * 20480)
        self.assertEqual(plan["kv_disk_bytes"], 1 << 30)
        shown = run("inspect", "--kv-host", "64M")
        self.assert_ok(shown)
        self.assertRegex(shown.stdout.decode(), r"below the KV cache\n +host +64\.0 MiB")

    # Fault: hits of tiers that are not reported.
    def test_bench(self):
        result = run("bench", "engine", "--requests", "60", "--concurrency", "4",
                     "--prompt-tokens", "100", "--output-tokens", "20", "--shared-prefix", "64",
                     "--warmup", "0", "--kv-tokens", "512", "--kv-host", "64M", "--json", "-")
        self.assert_ok(result)
        shown = json.loads(result.stdout)
        self.assertGreater(shown["engine"]["kv_host_bytes"], 0)
        self.assertEqual(shown["result"]["kv_faults"], 0)
        self.assertGreater(shown["result"]["kv_block_ns"], 0)
        self.assertGreater(shown["result"]["kv_recompute_ns"], 0)
        self.assertGreater(shown["result"]["kv_demoted"], 0)
        self.assertEqual(shown["result"]["disk_tokens"], 0)


if __name__ == "__main__":
    unittest.main()
