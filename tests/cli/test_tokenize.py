#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex tokenize."""
import json
import os
import shutil
import subprocess
import unittest

from support import BUILTIN, IMBREX, TIMEOUT_S, TestCase, run


def ids_of(result):
    return json.loads(result.stdout)


class Tokenize(TestCase):
    # Fault: the built-in model's begin token or its tokens are wrong; --no-special adds it still.
    def test_builtin(self):
        result = run("tokenize", "--text", "Once upon a time", "--json")
        self.assert_ok(result)
        self.assertEqual(ids_of(result), [1, 403, 407, 261, 378])
        result = run("tokenize", "--text", "Once upon a time", "--json", "--no-special")
        self.assertEqual(ids_of(result), [403, 407, 261, 378])

    # Fault: the list for people shows other ids, or bytes that spoil a terminal.
    def test_list(self):
        result = run("tokenize", "--text", "Once\nupon\x1b \u00e9")
        self.assert_ok(result)
        ids = ids_of(run("tokenize", "--text", "Once\nupon\x1b \u00e9", "--json"))
        lines = result.stdout.decode().split("\n")
        self.assertEqual([int(line.split()[0]) for line in lines[:len(ids)]], ids)
        self.assertEqual(lines[len(ids):], [f"{len(ids)} tokens", ""])
        self.assertIn("'\\n'", result.stdout.decode())
        self.assertIn("'\\x1b'", result.stdout.decode())
        self.assertNotIn(b"\x1b", result.stdout)

    # Fault: special tokens in a text are read as such although --no-parse-special was given.
    def test_parse_special(self):
        parsed = ids_of(run("tokenize", "--text", "</s>", "--json", "--no-special"))
        plain = ids_of(run("tokenize", "--text", "</s>", "--json", "--no-special",
                           "--no-parse-special"))
        self.assertEqual(parsed, [2])
        self.assertNotIn(2, plain)

    # Fault: a folder without weights, or the file itself, is refused.
    def test_folder_with_tokenizer_only(self):
        shutil.copy(os.path.join(BUILTIN, "tokenizer.json"), self.folder)
        expected = ids_of(run("tokenize", "--text", "a b", "--json"))
        for model in (self.folder, self.path("tokenizer.json")):
            self.assertEqual(ids_of(run("tokenize", model, "--text", "a b", "--json")), expected)

    # Fault: files lose their last line end or their NUL bytes, or standard input is not read.
    def test_files(self):
        content = b"Once upon\0a time\n"
        path = self.write("text", content)
        from_file = run("tokenize", "--file", path, "--json")
        self.assert_ok(from_file)
        self.assertEqual(run("tokenize", "--file", "-", "--json", input=content).stdout,
                         from_file.stdout)
        line = json.dumps({"text": content.decode()}) + "\n"
        self.assertEqual(run("tokenize", "--jsonl", "-", input=line.encode()).stdout,
                         from_file.stdout)

    # Fault: a long text from a pipe, which comes in pieces, is cut.
    def test_long_file(self):
        content = b"The cat sat. " * 20000
        result = run("tokenize", "--file", "-", "--json", "--no-special", input=content)
        self.assert_ok(result)
        once = ids_of(run("tokenize", "--text", "The cat sat. The cat sat. ", "--json",
                          "--no-special"))
        twice = ids_of(run("tokenize", "--text", "The cat sat. " * 3, "--json", "--no-special"))
        a_cat = len(twice) - len(once)
        self.assertEqual(len(ids_of(result)), len(once) + (20000 - 2) * a_cat)

    # Fault: --jsonl cuts a text at NUL, or gives not exactly one array a line.
    def test_jsonl(self):
        texts = ["", "a", "a\0b", "\u00e9\U0001f600", "line\nbreak", "\\", "a" * 20000]
        lines = "".join(json.dumps({"other": [1], "text": text}) + "\n" for text in texts)
        result = run("tokenize", "--jsonl", self.write("texts", lines))
        self.assert_ok(result)
        arrays = result.stdout.decode().splitlines()
        self.assertEqual(len(arrays), len(texts))
        for text, line in zip(texts, arrays):
            if "\0" not in text:
                self.assertEqual(json.loads(line),
                                 ids_of(run("tokenize", "--text", text, "--json")), text[:20])
        # The byte tokens of "\0" lie between those of its neighbours.
        self.assertEqual(len(json.loads(arrays[2])), len(json.loads(arrays[1])) + 2)

    # Fault: a last line without a line end is lost.
    def test_jsonl_without_last_line_end(self):
        result = run("tokenize", "--jsonl", "-", input=b'{"text": "a"}\n{"text": "b"}')
        self.assertEqual(len(result.stdout.splitlines()), 2)

    # Fault: an array is held back until the next line, so that a caller who waits for it hangs.
    def test_jsonl_answers_each_line(self):
        with subprocess.Popen([IMBREX, "tokenize", "--jsonl", "-"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, bufsize=0) as process:
            for _ in range(3):
                process.stdin.write(b'{"text": "Once upon a time"}\n')
                self.assertEqual(json.loads(process.stdout.readline()), [1, 403, 407, 261, 378])
            process.stdin.close()
            self.assertEqual(process.wait(TIMEOUT_S), 0)

    # Fault: a bad line is skipped, or its number is not told; lines before it are lost.
    def test_jsonl_bad_lines(self):
        cases = [
            (b"[1]", "no object"), (b"", "line 2"), (b'{"text": 3}', "another type"),
            (b"{}", "without"), (b'{"text": "a"', "line 2"), (b'{"text": "\\ud800"}', "D800"),
            (b'{"text": "\xff"}', "line 2"), (b'{"text": "a"} x', "line 2"),
            (b"[" * 100000, "line 2"), (b"\0", "line 2"),
        ]
        for line, part in cases:
            path = self.write("texts", b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
            result = run("tokenize", "--jsonl", path)
            self.assert_error(result, 2, path, "line 2", part)
            self.assertEqual(len(result.stdout.splitlines()), 1, line[:20])

    # Fault: a line without an end takes all memory; a long one is cut or refused.
    def test_jsonl_long_lines(self):
        self.assert_error(run("tokenize", "--jsonl", "/dev/zero"), 2, "/dev/zero", "line 1",
                          "at most 67108864 bytes")
        long_line = '{"text": "' + "a " * 100_000 + '"}\n'
        result = run("tokenize", "--jsonl", self.write("texts", '{"text": "a"}\n' + long_line * 3))
        self.assert_ok(result)
        lengths = [len(json.loads(line)) for line in result.stdout.splitlines()]
        self.assertEqual(len(lengths), 4)
        self.assertEqual(lengths[1:], [lengths[1]] * 3)
        self.assertGreater(lengths[1], 100_000)

    # Fault: an unreadable file is read as an empty one.
    def test_bad_files(self):
        for option in ("--file", "--jsonl"):
            self.assert_error(run("tokenize", option, self.path("none")), 2, self.path("none"),
                              "No such file")
            self.assert_error(run("tokenize", option, self.folder), 2, self.folder,
                              "Is a directory")
        self.assert_error(run("tokenize", self.path("none"), "--text", "a"), 2, self.path("none"))
        os.mkdir(self.path("empty"))
        self.assert_error(run("tokenize", self.path("empty"), "--text", "a"), 2, "tokenizer.json")

    # Fault: results are lost without a word when nobody can read them.
    def test_output_that_fails(self):
        with open("/dev/full", "wb") as full:
            for arguments in (["--text", "a"], ["--jsonl", self.write("one", '{"text": "a"}\n')]):
                self.assert_error(run("tokenize", *arguments, stdout=full), 1, "standard output",
                                  "No space left")


if __name__ == "__main__":
    unittest.main()
