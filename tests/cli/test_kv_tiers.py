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
import struct
import subprocess
import time
import unittest

from support import IMBREX, ROOT, TestCase, run

TINY = os.path.join(ROOT, "tests", "golden", "qwen2-tiny-4m")
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
                    for at in range(4096 + 2048 * 128, 4096 + 2048 * 128 + 4 * 20480, 1000):
                        file.seek(at)
                        byte = file.read(1)[0] ^ 4
                        file.seek(at)
                        file.write(bytes([byte]))
        result = run("run", "-p", PROMPT, "-n", "20", "--temp", "0", "-t", "1", *option)
        self.assert_ok(result)
        self.assertEqual(result.stdout, alone[0])
        self.assertIn(b"damaged", result.stderr)

    # Fault: a process that is killed and leaves nothing of what it had not evicted; one that leaves
    # it although it was told not to write before.
    def test_killed(self):
        folder = os.path.join(self.folder, "cache")
        segment = os.path.join(folder, "00000000.imbrex-kv")

        def has_three():
            try:
                with open(segment, "rb") as file:
                    file.seek(4096 + 2 * 128)
                    return any(file.read(128))
            except FileNotFoundError:
                return False
        for when, expected in (("demoted", 0), ("computed", 48)):
            with subprocess.Popen([IMBREX, "run", "-p", PROMPT, "-n", "100000", "--ignore-eos",
                                   "-c", "100100", "-t", "1", "--kv-write", when, "--kv-disk",
                                   folder + ":1G"], stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL) as process:
                self.addCleanup(process.kill)
                self.assertNotEqual(process.stdout.read(200), b"")
                deadline = time.monotonic() + 60
                while expected > 0 and not has_three() and time.monotonic() < deadline:
                    time.sleep(0.01)
                process.kill()
            text, cached, _, from_disk = self.generate("--kv-disk", folder + ":1G")
            self.assertEqual((text, cached, from_disk), (self.generate()[0], expected, expected))
            shutil.rmtree(folder)

    # Fault: packed blocks that give another text, that are not found by a run that does not pack,
    # or that are not packed at all. (The built-in model's blocks would save less than a page.)
    def test_zstd(self):
        folder = os.path.join(self.folder, "cache")
        alone = self.generate(TINY)
        self.assertEqual(self.generate(TINY, "--kv-disk", folder + ":1G,zstd"), alone)
        with open(os.path.join(folder, "00000000.imbrex-kv"), "rb") as file:
            file.seek(4096 + 96)
            _, stored = struct.unpack("=II", file.read(8))
        self.assertTrue(0 < stored <= 65536 - 4096, stored)
        for option in (":1G", ":1G,zstd=19"):
            text, cached, _, from_disk = self.generate(TINY, "--kv-disk", folder + option)
            self.assertEqual((text, cached), (alone[0], from_disk))
            self.assertGreater(from_disk, 0)

    # Fault: an option that is taken without its half, or a message that does not name it.
    def test_bad_options(self):
        for options, message in ((("--kv-disk", "somewhere"), "--kv-disk: expected a folder"),
                                 (("--kv-disk", "somewhere:5"), "--kv-disk: expected a whole"),
                                 (("--kv-disk", "somewhere:10MB"), "K, M, G or T"),
                                 (("--kv-disk", ":5G"), "--kv-disk: expected a folder"),
                                 (("--kv-disk", "some:5G:5G"), "expected one size behind"),
                                 (("--kv-disk", "x/" * 3000 + ":5G"),
                                  "a folder's path of at most 1023 bytes, found one of 6000"),
                                 (("--kv-disk", "some:5G,lz4"), "--kv-disk: expected zstd"),
                                 (("--kv-disk", "some:5G,zstd=0"), "level from 1 to 19"),
                                 (("--kv-disk", "some:5G,zstd=20"), "level from 1 to 19"),
                                 (("--kv-disk", "some:5G,zstd= 3"), "level from 1 to 19"),
                                 (("--kv-disk", "some:5G,zstd="), "level from 1 to 19"),
                                 (("--kv-disk", "some:5G,zstd=3,"), "level from 1 to 19"),
                                 (("--kv-disk", "some:5,zstd"), "--kv-disk: expected a whole"),
                                 (("--kv-host", "much"), "--kv-host: expected a whole"),
                                 (("--kv-disk", "some,zstd=3:5G"), "expected zstd=3 behind"),
                                 (("--kv-disk=~/some:5G",), "--kv-disk: expected a folder whose ~"),
                                 (("--kv-host", "1K"), "--kv-host: expected at least"),
                                 (("--kv-host", "1024T"), "--kv-host: expected at most"),
                                  (("--kv-write", "late"), "--kv-write: expected one of computed"),
                                  (("--kv-write", "demoted", "--kv-host", "64M"),
                                   "--kv-write: expected a tier"),
                                 (("--kv-disk", self.folder + ":1M"), "--kv-disk: expected"),
                                 (("--kv-disk", self.folder + ":1M"), "(41 MiB)"),
                                 (("--kv-disk", "/proc/a/b:1G"), "--kv-disk: KV folder")):
            result = run("run", "-p", "hi", *options)
            self.assert_error(result, 2, message)

    # Fault: a message of the library that calls an option by the name of its field in C, of which
    # a user of the program knows nothing.
    def test_names(self):
        secret = self.path("secret")
        remote = ("--kv-remote", "redis://127.0.0.1:1")
        if b"hiredis" in run("inspect", *remote).stderr:
            self.skipTest("a build without hiredis")
        for options, message in ((("--kv-host", "1K"), "--kv-host: "),
                                 (("--kv-disk", self.folder + ":1M"), "--kv-disk: "),
                                 (("--kv-remote", "127.0.0.1"), "--kv-remote: expected redis://"),
                                 (("--kv-remote", "redis://h:99999"), "--kv-remote: PORT: "),
                                 (("--kv-remote-secret", secret), "--kv-remote-secret: expected"),
                                 ((*remote, "--kv-remote-secret", secret),
                                  f"--kv-remote-secret: {secret}: "),
                                 ((*remote, "--kv-policy", "none"), "--kv-policy: expected")):
            result = run("bench", "engine", "--requests", "1", *options)
            self.assert_error(result, 2, message)
            self.assertNotIn("kv_", result.stderr.decode())

    # Fault: an option that does nothing, without a word; a warning where it does something.
    def test_prefetch(self):
        tier = ("--kv-host", "64M", "--kv-prefetch", "20")
        result = run("inspect", *tier, "--kv-policy", "lru")
        self.assert_ok(result)
        self.assertIn(b"the policy lru expects no blocks; those that do, where --kv-policy "
                      b"chooses: seed, predictive", result.stderr)
        for options, message in ((("--kv-prefetch", "101"), "--kv-prefetch: expected"),
                                 (("--kv-prefetch", "20"), "--kv-prefetch: expected a tier")):
            self.assert_error(run("inspect", *options), 2, message)
        # One text alone: there is nothing to bring up ahead.
        self.assert_error(run("run", "-p", "hi", *tier), 2, "unknown option --kv-prefetch")
        for options in ((*tier, "--kv-policy", "predictive"), ("--kv-prefetch", "0")):
            result = run("inspect", *options)
            self.assert_ok(result)
            self.assertEqual(result.stderr, b"")

    # Fault: more than the disk has is promised without a word; a warning where there is room.
    def test_room(self):
        folder = os.path.join(self.folder, "some", "where")
        room = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
        for size, is_told in ((room // 2 >> 20, False), (room * 2 >> 20, True)):
            result = run("inspect", "--kv-disk", f"{folder}:{size}M")
            self.assert_ok(result)
            self.assertEqual(b"--kv-disk: " + folder.encode() + b" may take" in result.stderr,
                             is_told, result.stderr)
        self.assertFalse(os.path.exists(folder))

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

    # Fault: a disk without room for a whole segment keeps nothing although blocks would fit; blocks
    # that it does not take at all are lost without a word, or for another reason, or without what
    # would be enough.
    def test_full_disk(self):
        folder = os.path.join(self.folder, "cache")
        def run_with(limit_bytes):
            def limit():
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
            result = run("run", "-p", PROMPT, "-n", "4", "--kv-disk", folder + ":1G",
                         preexec_fn=limit)
            self.assert_ok(result)
            return result.stderr.decode()
        self.assertRegex(run_with(8192), r"3 blocks lost, [^\n]*: 3 without room on the disk "
                         r"\(File too large: expected room for one block, 28672 bytes\), 1 file "
                         r"that could not be made \(File too large\)")
        self.assertNotIn("lost", run_with(1 << 20))
        self.assertIn("48 from disk", run_with(1 << 20))

    # Fault: a folder that goes while the program runs ends it, is not told of, or keeps nothing
    # from then on.
    def test_folder_goes(self):
        folder = os.path.join(self.folder, "cache")
        with subprocess.Popen([IMBREX, "chat", "--chat-template", "chatml", "-n", "40",
                               "--kv-write", "demoted", "--kv-disk", folder + ":1G"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as chat:
            chat.stdin.write(b"Hello\n")
            chat.stdin.flush()
            self.assertNotEqual(chat.stdout.read(1), b"")
            shutil.rmtree(folder)
            _, errors = chat.communicate()
            self.assertEqual(chat.returncode, 0, errors)
        self.assertIn(f"KV folder {folder}: it or its lock was removed, or is out of reach: it was "
                      "made anew", errors.decode())
        self.assertEqual(os.path.getsize(os.path.join(folder, "imbrex-kv.secret")), 32)
        self.assertTrue(any(name.endswith(".imbrex-kv") for name in os.listdir(folder)))

    # Fault: somebody else's file, named as ours are, that is removed, written over, or not told of.
    def test_strange_file(self):
        folder = os.path.join(self.folder, "cache")
        os.mkdir(folder)
        path = os.path.join(folder, "00000000.imbrex-kv")
        with open(path, "w", encoding="ascii") as file:
            file.write("a letter")
        # Room for two segments: the older ones go again and again.
        for i in range(4):
            result = run("run", "-p", f"{i} {PROMPT}", "-n", "2", "--kv-disk", folder + ":41M")
            self.assert_ok(result)
            self.assertIn(f"{path}: expected a file of KV blocks, as its name says, found "
                          "something else: it is left alone", result.stderr.decode())
        with open(path, encoding="ascii") as file:
            self.assertEqual(file.read(), "a letter")

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

    def redis_command(self, port, *words):
        """A command's answer, as far as one line tells it."""
        with socket.create_connection(("127.0.0.1", port)) as connection:
            parts = [word if isinstance(word, bytes) else word.encode() for word in words]
            connection.sendall(b"*%d\r\n" % len(parts) +
                               b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
            with connection.makefile("rb") as answers:
                first = answers.readline()
                if first[:1] != b"*":
                    return first
                lines = [answers.readline() for _ in range(2 * int(first[1:]))]
                return [line.strip() for line in lines[1::2]]

    # Fault: a secret that was cut off is replaced, and with it all that the folder has, unsaid.
    def test_cut_secret(self):
        option = ("--kv-disk", self.folder + ":1G")
        alone = self.generate(*option)
        os.truncate(os.path.join(self.folder, "imbrex-kv.secret"), 20)
        result = run("run", "-p", PROMPT, "-n", "20", "--temp", "0", "-t", "1", *option)
        self.assert_ok(result)
        self.assertEqual(result.stdout, alone[0])
        self.assertIn(b"imbrex-kv.secret: expected 32 bytes, found 20: a new one was made",
                      result.stderr)
        self.assertNotIn(b"imbrex-kv.secret", run("run", "-p", "hi", "-n", "1", *option).stderr)

    # Fault: something else under a block's key breaks the connection, or is fetched and refused, by
    # every run until its time is over; a fault that is not told.
    def test_foreign_values(self):
        port = self.redis()
        option = ("--kv-remote", f"redis://127.0.0.1:{port}")
        if b"hiredis" in run("inspect", *option).stderr:
            self.skipTest("a build without hiredis")
        alone = self.generate(*option)
        keys = self.redis_command(port, "KEYS", "imbrex-kv:*")
        self.assertEqual(len(keys), 4)
        for spoil in (lambda key: self.redis_command(port, "SET", key, bytes(4 << 20)),
                      lambda key: self.redis_command(port, "SET", key, b"short"),
                      lambda key: self.redis_command(port, "SET", key, bytes(20480)),
                      lambda key: (self.redis_command(port, "DEL", key),
                                   self.redis_command(port, "RPUSH", key, b"a list"))):
            for key in keys:
                spoil(key)
            # A value of the right length is noticed by who fetches it, and a run that computes
            # faster than a busy machine answers does not wait for that.
            told = b""
            for _ in range(10):
                result = run("run", "-p", PROMPT, "-n", "20", "--temp", "0", "-t", "1", *option)
                self.assert_ok(result)
                self.assertEqual(result.stdout, alone[0])
                if b"48 from the remote tier" in result.stderr and \
                        b"warning" not in result.stderr:
                    break
                told += result.stderr
            else:
                self.fail(told.decode())
            self.assertRegex(told.decode(), r"\d damaged values?, computed again and then "
                             r"written over; it is there now; last: under a block's key is ")

    def test_inspect(self):
        result = run("inspect", "--kv-host", "64M", "--kv-disk", self.folder + ":1G", "--json")
        self.assert_ok(result)
        plan = json.loads(result.stdout)["memory_plan"]
        self.assertEqual(plan["kv_host_bytes"], (64 << 20) // 20480 * 20480)
        self.assertEqual(plan["kv_disk_bytes"], 1 << 30)
        shown = run("inspect", "--kv-host", "64M")
        self.assert_ok(shown)
        self.assertRegex(shown.stdout.decode(), r"below the KV cache\n +host +64\.0 MiB")

    # Fault: a plan that no engine here can have, without a word.
    def test_inspect_too_much(self):
        result = run("inspect", "--kv-host", "1000T")
        self.assert_ok(result)
        self.assertRegex(result.stderr.decode(), r"refused here: RAM for KV blocks: expected at "
                         r"most the \d+ bytes \(\d+ MiB\) that this machine")
        self.assertNotIn(b"warning", run("inspect", "--kv-host", "64M").stderr)

    # Fault: a report that does not tell how the tiers were made, or that tells a password.
    def test_bench_header(self):
        options = ("bench", "engine", "--requests", "2", "--prompt-tokens", "20",
                   "--output-tokens", "2", "--warmup", "0", "--kv-prefetch", "20", "--kv-policy",
                   "predictive", "--kv-dtype", "int8", "--kv-disk", self.path("kv") + ":1G,zstd=3",
                   "--kv-remote", "redis://:hunter2@127.0.0.1:1/2?ttl=60")
        if b"hiredis" in run("inspect", *options[-2:]).stderr:
            self.skipTest("a build without hiredis")
        result = run(*options)
        self.assert_ok(result)
        self.assertRegex(result.stdout.decode(), r"in int8,\n(.*\n)* +below it: RAM .*, disk 1\.0 "
                         r"GiB .*, zstd 3\n +remote 127\.0\.0\.1:1/2\?ttl=60\n +up to 20 % of the ")
        shown = run(*options, "--json", "-")
        engine = json.loads(shown.stdout)["engine"]
        self.assertEqual([engine[name] for name in
                          ("kv_dtype", "kv_disk_zstd_level", "kv_remote", "kv_prefetch_percent",
                           "kv_write")], ["int8", 3, "127.0.0.1:1/2?ttl=60", 20, "computed"])
        self.assertNotIn(b"hunter2", result.stdout + result.stderr + shown.stdout)

    # Fault: blocks that went to the disk as they were computed, reported as "0 blocks copied down".
    def test_written(self):
        options = ("bench", "engine", "--requests", "20", "--concurrency", "4", "--prompt-tokens",
                   "100", "--output-tokens", "20", "--warmup", "0", "-t", "1",
                   "--kv-disk", self.path("kv") + ":1G")
        result = run(*options)
        self.assert_ok(result)
        self.assertRegex(result.stdout.decode(), r"\n +[1-9]\d* blocks copied down, [1-9]\d* of "
                         r"them while the KV cache kept them; 0 gone for want of room below")
        cold = (*options[:-1], self.path("cold") + ":1G", "--json", "-")
        shown = json.loads(run(*cold).stdout)["result"]
        self.assertGreater(shown["kv_written"], 0)

    # Fault: hits of tiers that are not reported.
    def test_bench(self):
        result = run("bench", "engine", "--requests", "60", "--concurrency", "4",
                     "--prompt-tokens", "100", "--output-tokens", "20", "--shared-prefix", "64",
                     "--warmup", "0", "--kv-cache", "512", "--kv-host", "64M", "--json", "-")
        self.assert_ok(result)
        shown = json.loads(result.stdout)
        self.assertGreater(shown["engine"]["kv_host_bytes"], 0)
        self.assertEqual(shown["result"]["kv_faults"], 0)
        self.assertGreater(shown["result"]["kv_block_ns"], 0)
        self.assertGreater(shown["result"]["kv_recompute_ns"], 0)
        self.assertGreater(shown["result"]["kv_demoted"], 0)
        self.assertEqual(shown["result"]["kv_written"], 0)
        self.assertEqual(shown["result"]["disk_tokens"], 0)


if __name__ == "__main__":
    unittest.main()
