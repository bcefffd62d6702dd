#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commands, options and --help."""
import re
import unittest

from support import TestCase, run

GPU = {"device", "compute", "kv-dtype", "ablate", "tuned", "nvtx", "batch-invariant"}
COMMANDS = {
    "run": {"prompt", "file", "no-parse-special", "no-echo", "max-tokens", "min-tokens", "stop",
            "ignore-eos", "temp", "top-k", "top-p", "min-p", "repeat-penalty", "frequency-penalty",
            "presence-penalty", "seed", "ctx-size", "threads", "cpu", "quiet", "chat", "system",
            "chat-template", "kv-host", "kv-disk", "kv-remote", "kv-remote-secret",
            "kv-write", "help", *GPU},
    "chat": {"system", "chat-template", "max-tokens", "min-tokens", "stop", "ignore-eos", "temp",
             "top-k", "top-p", "min-p", "repeat-penalty", "frequency-penalty", "presence-penalty",
             "seed", "ctx-size", "kv-policy", "kv-cache", "kv-host", "kv-disk", "kv-prefetch",
             "kv-remote", "kv-remote-secret", "kv-write", "threads", "cpu", "verbose", "quiet",
             "help", *GPU},
    "inspect": {"json", "tensors", "ctx-size", "kv-policy", "kv-cache", "kv-host", "kv-disk",
                "kv-prefetch", "kv-remote", "kv-remote-secret", "kv-write", "threads", "cpu",
                "help", "device", "compute", "kv-dtype", "tuned"},
    "tokenize": {"text", "file", "jsonl", "json", "no-special", "no-parse-special", "chat",
                 "tools", "no-generation-prompt", "chat-template", "help"},
    "tune": {"device", "shapes", "m", "op", "near", "seconds", "again", "dry-run", "output",
             "help"},
    "perplexity": {"ids", "text", "window", "json", "threads", "cpu", "help", *GPU},
}


class Help(TestCase):
    # Fault: an option that is parsed but not in --help, or listed twice.
    def test_every_option_is_listed_once(self):
        for command, options in COMMANDS.items():
            text = run(command, "--help").stdout.decode()
            listed = re.findall(r"^  (?:-\w, |    )--([\w-]+)", text, re.M)
            self.assertEqual(sorted(listed), sorted(options), command)

    # Fault: the three ways to ask for help differ, or one of them is an error.
    def test_ways_to_ask(self):
        for command in COMMANDS:
            long_form = run(command, "--help")
            self.assert_ok(long_form)
            self.assertEqual(run("help", command).stdout, long_form.stdout)
            self.assertEqual(run(command, "-h").stdout, long_form.stdout)
        for arguments in (["help"], ["-h"], ["help", "help"]):
            self.assertEqual(run(*arguments).stdout, run("--help").stdout)

    # Fault: help that wraps in a terminal of 80 columns, or trails spaces.
    def test_fits_80_columns(self):
        for arguments in (["--help"], *(["help", command] for command in COMMANDS)):
            for line in run(*arguments).stdout.decode().split("\n"):
                self.assertLessEqual(len(line), 80, line)
                self.assertEqual(line, line.rstrip())

    # Fault: a command that the overview forgets.
    def test_overview_lists_the_commands(self):
        text = run("--help").stdout.decode()
        for command in COMMANDS:
            self.assertRegex(text, rf"(?m)^  {command} +\w")

    # Fault: defaults that --help does not show.
    def test_defaults_are_shown(self):
        self.assertRegex(run("help", "perplexity").stdout.decode(), r"\[default:\s+512\]")
        self.assertRegex(run("help", "run").stdout.decode(), r"\[default:\s+auto\]")

    # Fault: help that a buffer of fixed size cuts.
    def test_nothing_is_cut(self):
        for command in (*COMMANDS, "quantize"):
            text = run("help", command).stdout.decode()
            options = text[text.index("\n\n") : text.index("\nOther:")]
            for default in re.findall(r"\[default:[^\]]*\]?", options):
                self.assertNotRegex(default, r"\n\n|\n  (-|    --)", command)
                self.assertTrue(default.endswith("]"), default)
            self.assertEqual(options.count("["), options.count("]"), command)
        self.assertRegex(run("help", "run").stdout.decode(),
                         r"at\s+most\s+what\s+the\s+model\s+was\s+made\s+for\]")

    # Fault: a version line that scripts cannot read.
    def test_version(self):
        self.assertRegex(run("--version").stdout.decode(), r"\Aimbrex \d+\.\d+\.\d+\n\Z")


class Mistakes(TestCase):
    # Fault: a slip is answered without naming it, or without a way on.
    def test_unknown_names(self):
        self.assert_error(run(), 2, "--help")
        self.assert_error(run("rnu"), 2, "rnu", "did you mean run?", "--help")
        self.assert_error(run("quantum"), 2, "quantum", "--help")
        self.assert_error(run("help", "inspct"), 2, "inspct", "did you mean inspect?")
        self.assert_error(run("run", "--tmep", "1"), 2, "--tmep", "did you mean --temp?",
                          "imbrex run --help")
        self.assert_error(run("tokenize", "--jsnl=x"), 2, "--jsnl", "did you mean --jsonl?")
        self.assert_error(run("run", "--frobnicate"), 2, "unknown option --frobnicate")
        self.assert_error(run("run", "-x"), 2, "unknown option -x")
        self.assert_error(run("run", "--t"), 2, "--t ", "several options")

    # Fault: an unknown letter of several bytes is shown as half a character.
    def test_unknown_letters(self):
        self.assert_error(run("run", "-é"), 2, "unknown option -é; see")
        self.assert_error(run("run", "x", "-qé", "y"), 2, "unknown option -é; see")
        self.assert_error(run("run", "-\U0001f600x"), 2, "unknown option -\U0001f600; see")
        for argument in (b"-\xc3", b"-\xc3x", b"-\xff"):
            self.assert_error(run("run", argument), 2,
                              f"unknown option -\\x{argument[1]:02x}; see")

    # Fault: an option that swallows the next one, or takes what it should not.
    def test_arguments_of_options(self):
        self.assert_error(run("run", "--temp"), 2, "--temp needs an argument")
        self.assert_error(run("run", "-n"), 2, "--max-tokens needs an argument")
        self.assert_error(run("run", "--no-echo=1"), 2, "--no-echo takes no argument")

    # Fault: numbers that are cut, wrapped or silently read as 0.
    def test_numbers(self):
        cases = [
            ("--temp", "abc", "[0, 100]"), ("--temp", "nan", "[0, 100]"), ("--temp", "-1", "found"),
            ("--temp", "", "found"), ("--top-p", "0", "(0, 1]"), ("--top-p", "1.5", "(0, 1]"),
            # These round to an end of the range that is not allowed, as the library sees them.
            ("--top-p", "1e-50", "(0, 1]"), ("--min-p", "0.999999999999", "[0, 1)"),
            ("--repeat-penalty", "1e-50", "[0.01, 100]"),
            ("--repeat-penalty", "0.0099", "[0.01, 100]"),
            ("--temp", "1e300", "[0, 100]"), ("--max-tokens", "16777217", "16777216]"),
            ("--ctx-size", "16777217", "16777216]"),
            ("--min-p", "1", "[0, 1)"), ("--repeat-penalty", "0", "[0.01, 100]"),
            ("--top-k", "2.5", "[0, 2147483647]"), ("--top-k", "4294967296", "2147483647]"),
            ("--frequency-penalty", "-2.5", "[-2, 2]"), ("--presence-penalty", "3", "[-2, 2]"),
            ("--max-tokens", "-1", "[0, 16777216]"), ("--max-tokens", "12x", "found"),
            ("--threads", "0", "[1, "), ("--ctx-size", "1", "[2, 16777216]"),
            ("--seed", "-1", "[0, "),
            ("--seed", "18446744073709551616", "18446744073709551615]"),
            ("--cpu", "mmx",
             "auto, bf16, amx-bf16, avx512-bf16, amx-int8, vnni, avx512, avx2, ref"),
        ]
        for option, value, expected in cases:
            self.assert_error(run("run", "-p", "a", option, value), 2, f"{option}: expected",
                              f'found "{value}"', expected)

    # Fault: a prompt given as an argument is taken for something else.
    def test_operands(self):
        self.assert_error(run("run", ".", "hello"), 2, 'unexpected argument "hello"')

    # Fault: words behind what takes none are dropped in silence.
    def test_extra_words(self):
        for arguments in (["--version", "extra"], ["help", "run", "extra"],
                          ["--help", "run", "extra"]):
            result = run(*arguments)
            self.assert_error(result, 2, f'unexpected argument "extra" after {arguments[-2]}')
            self.assertEqual(result.stdout, b"")

    # Fault: a control character in an argument breaks the one line of an error.
    def test_message_stays_one_line(self):
        self.assert_error(run("run", "--cpu", "a\nb\x1b[31m"), 2, "a?b?[31m")

    # Fault: contradicting or missing sources of input are resolved by chance.
    def test_one_input(self):
        self.assert_error(run("run", "-p", "a", "-f", "b"), 2, "-p", "-f", "both")
        self.assert_error(run("run", "."), 2, "expected a prompt", "-p", "-f")
        self.assert_error(run("run", "-p", "a", "--stop", ""), 2, "--stop", "empty")
        self.assert_error(run("run", "-p", "a", "-n", "3", "--min-tokens", "4"), 2, "--min-tokens",
                          "at most the 3 of --max-tokens", "found 4")
        self.assert_error(run("tokenize"), 2, "--text", "--file", "--jsonl", "none")
        self.assert_error(run("tokenize", "--text", "a", "--file", "b"), 2, "several")
        self.assert_error(run("perplexity"), 2, "--ids", "--text", "none")
        self.assert_error(run("perplexity", "--ids", "a", "--text", "b"), 2, "both")


if __name__ == "__main__":
    unittest.main()
