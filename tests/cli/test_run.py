#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex run: prompts, sampling, output, signals."""
import json
import os
import re
import resource
import signal
import subprocess
import unittest

from support import BUILD, BUILTIN, IMBREX, ROOT, TIMEOUT_S, TestCase, run, start

PROMPT = "Once upon a time"
QWEN_SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
                 "repetition_penalty": 1.1}


class Prompt(TestCase):
    # Fault: without a prompt the built-in model does not start from its begin token.
    def test_story(self):
        with open(os.path.join(ROOT, "tests", "golden", "stories260K", "greedy_golden.json"),
                  encoding="utf-8") as file:
            story = json.load(file)["text"]
        result = run("run")
        self.assert_ok(result)
        # The built-in weights are F16, the recorded ones F32: they may part late in the story.
        self.assertTrue(result.stdout.decode().startswith(story[:100]), result.stdout)

    # Fault: the prompt is lost, printed twice or glued to the text; --no-echo shows it still.
    def test_echo(self):
        echoed = run("run", "-p", PROMPT, "-n", "20")
        self.assert_ok(echoed)
        plain = run("run", "-p", PROMPT, "-n", "20", "--no-echo")
        self.assertEqual(echoed.stdout, PROMPT.encode() + plain.stdout)
        self.assertTrue(plain.stdout.startswith(b", "), plain.stdout)
        self.assertTrue(plain.stdout.endswith(b"\n"))

    # Fault: -f changes the text, or - is not standard input.
    def test_file(self):
        expected = run("run", "-p", PROMPT + "\n", "-n", "8").stdout
        path = self.write("prompt", PROMPT + "\n")
        self.assertEqual(run("run", "-f", path, "-n", "8").stdout, expected)
        self.assertEqual(run("run", "-f", "-", "-n", "8", input=PROMPT.encode() + b"\n").stdout,
                         expected)

    # Fault: a prompt of many prefill chunks is cut, or counted wrong.
    def test_long_prompt(self):
        prompt = "The cat sat. " * 300
        path = self.write("prompt", prompt)
        result = run("run", self.model().folder, "-f", path, "-n", "1", "--temp", "0")
        self.assert_ok(result)
        self.assertTrue(result.stdout.decode().startswith(prompt))
        ids = json.loads(run("tokenize", "--file", path, "--json").stdout)
        self.assertIn(f"prompt {len(ids)} tokens", result.stderr.decode())

    # Fault: a prompt of 4096 tokens or more has no context unless -n is given.
    def test_very_long_prompt(self):
        prompt = "The cat sat. " * 700
        path = self.write("prompt", prompt)
        ids = json.loads(run("tokenize", "--file", path, "--json").stdout)
        self.assertGreater(len(ids), 4096)
        model = self.model()
        model.config["max_position_embeddings"] = len(ids) + 20
        model.write()
        result = run("run", model.folder, "-f", path, "--temp", "0", "--ignore-eos")
        self.assert_ok(result)
        self.assertIn("end: the context is full", result.stderr.decode())
        self.assertIn("generated 2", result.stderr.decode())

    # Fault: special tokens written in a prompt cannot be kept from being ones.
    def test_no_parse_special(self):
        prompt = "a</s>b"
        arguments = ["run", "-p", prompt, "-n", "1"]
        for option in ([], ["--no-parse-special"]):
            ids = json.loads(run("tokenize", "--text", prompt, "--json", *option).stdout)
            self.assertIn(f"prompt {len(ids)} tokens", run(*arguments, *option).stderr.decode())
        self.assertNotEqual(ids, json.loads(run("tokenize", "--text", prompt, "--json").stdout))

    # Fault: an empty prompt reaches the model as no tokens at all.
    def test_no_tokens(self):
        model = self.model()
        with open(model.path("tokenizer.json"), encoding="utf-8") as file:
            tokenizer = json.load(file)
        tokenizer["post_processor"] = None
        model.write_json("tokenizer.json", tokenizer)
        self.assert_error(run("run", model.folder, "-p", ""), 2, "prompt", "at least one token")

    # Fault: an unreadable prompt is an empty one.
    def test_bad_file(self):
        self.assert_error(run("run", "-f", self.path("none")), 2, self.path("none"), "No such file")
        self.assert_error(run("run", "-f", self.folder), 2, self.folder, "Is a directory")


class Length(TestCase):
    # Fault: -n counts otherwise than people do, or the reason of the end is not told.
    def test_max_tokens(self):
        result = run("run", "-p", PROMPT, "-n", "7")
        self.assertIn("generated 7 tokens", result.stderr.decode())
        self.assertIn("end: limit of -n", result.stderr.decode())

    # Fault: the text goes on after the stop text, or contains it.
    def test_stop(self):
        whole = run("run", "-n", "60", "-q").stdout.decode()
        self.assertIn("named", whole)
        result = run("run", "-n", "60", "--stop", "no such text", "--stop", "named")
        self.assert_ok(result)
        self.assertEqual(result.stdout.decode(), whole[:whole.index("named")] + "\n")
        self.assertIn("end: stop text", result.stderr.decode())

    # Fault: the end token is ignored without being told to, or heeded although told to ignore it.
    def test_end_token(self):
        result = run("run")
        self.assertIn("end: end token", result.stderr.decode())
        result = run("run", "--ignore-eos")
        self.assert_ok(result)
        self.assertIn("end: the context is full", result.stderr.decode())

    # Fault: the end token ends a text before --min-tokens, or goes on being forbidden.
    def test_min_tokens(self):
        ended = run("run")
        count = int(re.search(r"generated (\d+) tokens", ended.stderr.decode()).group(1))
        longer = run("run", "--min-tokens", str(count + 3))
        self.assert_ok(longer)
        text = longer.stderr.decode()
        self.assertGreaterEqual(int(re.search(r"generated (\d+) tokens", text).group(1)), count + 3)
        self.assertTrue(longer.stdout.startswith(ended.stdout[:-1]), longer.stdout)
        self.assertEqual(run("run", "--min-tokens", "2").stdout, ended.stdout)

    # Fault: a full context crashes, or overwrites what was said.
    def test_context_full(self):
        result = run("run", "-p", PROMPT, "--ctx-size", "16")
        self.assert_ok(result)
        self.assertIn("end: the context is full", result.stderr.decode())

    # Fault: the context is smaller than what -n asks for although the model allows it.
    def test_context_grows_with_n(self):
        result = run("run", self.model().folder, "-p", PROMPT, "-n", "4200", "--ignore-eos")
        self.assert_ok(result)
        self.assertIn("generated 4200 tokens", result.stderr.decode())

    # Fault: a prompt that does not fit is cut, or the message lacks a number.
    def test_prompt_too_long(self):
        prompt = "a" * 5000
        ids = json.loads(run("tokenize", "--text", prompt, "--json").stdout)
        self.assert_error(run("run", "-p", prompt), 2, "prompt", "512", f"found {len(ids)}")
        self.assert_error(run("run", "-p", PROMPT, "-c", "4"), 2, "prompt", "4", "found 5")


class Sampling(TestCase):
    def sampling_line(self, *arguments):
        result = run("run", *arguments)
        self.assert_ok(result)
        return result.stderr.decode().split("\n")[0]

    # Fault: the same seed gives another text, or every seed the same.
    def test_seeds(self):
        model = self.model()
        texts = [run("run", model.folder, "-p", PROMPT, "-n", "30", "--temp", "1", "--seed", seed,
                     "--threads", threads).stdout
                 for seed, threads in (("7", "1"), ("7", "2"), ("8", "1"))]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    # Fault: without a seed every run is the same, or the printed seed does not repeat the run.
    def test_random_seed_is_printed(self):
        arguments = ["-p", PROMPT, "-n", "40", "--temp", "1.5"]
        results = [run("run", *arguments) for _ in range(3)]
        seeds = [re.search(r"; seed (\d+)\n", result.stderr.decode()).group(1)
                 for result in results]
        self.assertGreater(len(set(seeds)), 1)
        again = run("run", *arguments, "--seed", seeds[0])
        self.assertEqual(again.stdout, results[0].stdout)

    # Fault: generation_config.json is not used, or its values are not named.
    def test_generation_config(self):
        model = self.model()
        model.write_json("generation_config.json", QWEN_SAMPLING)
        arguments = [model.folder, "-p", PROMPT, "-n", "30", "--seed", "42"]
        self.assertEqual(
            self.sampling_line(*arguments),
            "sampling: temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.1 (from "
            "generation_config.json); seed 42")
        from_file = run("run", *arguments).stdout
        os.remove(model.path("generation_config.json"))
        given = run("run", *arguments, "--temp", "0.7", "--top-k", "20", "--top-p", "0.8",
                    "--repeat-penalty", "1.1")
        self.assertEqual(given.stdout, from_file)
        self.assertIn("(from the command line); seed 42", given.stderr.decode())

    # Fault: given values do not win over the file's, or are named as the file's.
    def test_command_line_wins(self):
        model = self.model()
        model.write_json("generation_config.json", QWEN_SAMPLING)
        self.assertEqual(
            self.sampling_line(model.folder, "-p", PROMPT, "-n", "1", "--top-k", "5", "--top-p",
                               "1", "--min-p", "0.1", "--seed", "3"),
            "sampling: temperature 0.7, repetition_penalty 1.1 (from generation_config.json); "
            "top_k 5, min_p 0.1 (from the command line); seed 3")

    # Fault: a temperature that nobody gave is said to be from the command line.
    def test_temperature_of_do_sample(self):
        model = self.model()
        model.write_json("generation_config.json", {"do_sample": True})
        line = self.sampling_line(model.folder, "-p", PROMPT, "-n", "1", "--seed", "3")
        self.assertEqual(line, "sampling: temperature 1 (from generation_config.json); seed 3")
        line = self.sampling_line(model.folder, "-p", PROMPT, "-n", "1", "--temp", "1", "--seed",
                                  "3")
        self.assertEqual(line, "sampling: temperature 1 (from the command line); seed 3")

    # Fault: --temp 0 lets the file's penalties change the most likely token.
    def test_temperature_0_is_argmax(self):
        model = self.model()
        arguments = [model.folder, "-p", PROMPT, "-n", "40", "--temp", "0"]
        expected = run("run", *arguments).stdout
        penalised = run("run", *arguments, "--repeat-penalty", "1.5")
        self.assertNotEqual(penalised.stdout, expected)
        model.write_json("generation_config.json", dict(QWEN_SAMPLING, repetition_penalty=1.5))
        result = run("run", *arguments)
        self.assertEqual(result.stdout, expected)
        self.assertTrue(result.stderr.startswith(b"sampling: the most likely token\n"))
        # Given on the command line, the penalty counts.
        again = run("run", *arguments, "--repeat-penalty", "1.5")
        self.assertEqual(again.stdout, penalised.stdout)
        self.assertIn("repetition_penalty 1.5 (from the command line)", again.stderr.decode())

    # Fault: a penalty has no effect, has the other's, or counts the prompt's tokens.
    def test_penalties(self):
        arguments = ["-p", PROMPT, "-n", "60", "--temp", "0"]
        texts = [run("run", *arguments).stdout]
        for name in ("frequency", "presence"):
            result = run("run", *arguments, f"--{name}-penalty", "2")
            self.assert_ok(result)
            self.assertIn(f"; {name}_penalty 2 (from the command line)", result.stderr.decode())
            texts.append(result.stdout)
        self.assertEqual(len(set(texts)), 3)
        # No token was generated before the first one.
        first = {run("run", "-p", PROMPT, "-n", "1", "--temp", "0", *option).stdout
                 for option in ([], ["--frequency-penalty", "2"], ["--presence-penalty", "2"])}
        self.assertEqual(len(first), 1)

    # Fault: options that cannot do anything are accepted in silence.
    def test_warning_without_temperature(self):
        for option, value in (("--top-k", "5"), ("--top-p", "0.5"), ("--min-p", "0.1")):
            result = run("run", "-p", PROMPT, "-n", "1", "-q", option, value)
            self.assert_ok(result)
            self.assertRegex(result.stderr.decode(), rf"\Aimbrex: warning: {option} has no effect")
            result = run("run", "-p", PROMPT, "-n", "1", "-q", option, value, "--temp", "1")
            self.assertEqual(result.stderr, b"")


class Engine(TestCase):
    # Fault: the text depends on the number of threads.
    def test_threads(self):
        texts = {run("run", "-n", "100", "--threads", count).stdout for count in ("1", "2", "5")}
        self.assertEqual(len(texts), 1)

    # Fault: the plain C kernels cannot be chosen, or write something else.
    def test_kernels(self):
        result = run("run", "-n", "60", "--cpu", "ref")
        self.assert_ok(result)
        self.assertEqual(result.stdout, run("run", "-n", "60").stdout)

    # Fault: the built-in model and a folder with the same files differ.
    def test_folder(self):
        self.assertEqual(run("run", BUILTIN, "-p", PROMPT, "-n", "60").stdout,
                         run("run", "-p", PROMPT, "-n", "60").stdout)

    # Fault: a context beyond what the model was made for goes unmentioned.
    def test_context_beyond_the_model(self):
        result = run("run", "-p", PROMPT, "-n", "1", "-q", "--ctx-size", "600")
        self.assert_ok(result)
        self.assertRegex(result.stderr.decode(), r"\Aimbrex: warning: [^\n]*600[^\n]*512[^\n]*\n\Z")

    # Fault: the example of the public API is stale: it prints another story than the program.
    def test_example(self):
        example = os.path.join(BUILD, "examples", "generate")
        if not os.path.exists(example):
            self.skipTest("examples are not built here")
        result = subprocess.run([example, PROMPT], capture_output=True, check=False,
                                timeout=TIMEOUT_S)
        self.assert_ok(result)
        self.assertEqual(result.stdout, run("run", "-p", PROMPT, "-n", "100").stdout)


class Messages(TestCase):
    # Fault: statistics on standard output, without numbers, or although -q was given.
    def test_statistics(self):
        result = run("run", "-p", PROMPT, "-n", "20")
        self.assertRegex(
            result.stderr.decode(),
            r"\Asampling: the most likely token\n"
            r"prompt 5 tokens, [\d.e+]+ ms \([\d.e+]+ tokens/s\); generated 20 tokens, "
            r"[\d.e+]+ ms \([\d.e+]+ tokens/s\); first token after [\d.e+]+ ms; "
            r"end: limit of -n\n\Z")
        quiet = run("run", "-p", PROMPT, "-n", "20", "-q")
        self.assertEqual(quiet.stderr, b"")
        self.assertEqual(quiet.stdout, result.stdout)


class Ends(TestCase):
    """The text is longer than its pipe: the program cannot end before somebody reads it."""

    def start_long(self, *arguments, **options):
        process = start("run", self.model().folder, "-p", PROMPT, "-n", "3000", "--ignore-eos",
                        "--temp", "1", "--seed", "1", *arguments, **options)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        return process

    def read_prompt_and_text(self, process):
        text = b""
        while len(text) < len(PROMPT) + 20:
            piece = process.stdout.read(100)
            self.assertTrue(piece, "ended early")
            text += piece
        return text

    # Fault: Ctrl-C loses text, kills without a word, or lets the run go on.
    def test_interrupt(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.start_long()
            text = self.read_prompt_and_text(process)
            process.send_signal(number)
            rest, errors = process.communicate(timeout=TIMEOUT_S)
            text += rest
            self.assertEqual(process.returncode, 128 + number, errors)
            self.assertTrue(text.startswith(PROMPT.encode()))
            self.assertTrue(text.endswith(b"\n"))
            generated = int(re.search(rb"generated (\d+) tokens", errors).group(1))
            self.assertLess(generated, 3000)
            self.assertIn(b"end: cancelled\n", errors)

    # Fault: a speed is made up for a prompt that was not read to its end.
    def test_interrupt_in_prompt(self):
        path = self.write("prompt", "The cat sat. " * 1000)
        process = start("run", self.model().folder, "-f", path, "-n", "5")
        self.addCleanup(process.kill)
        text = process.stdout.read(1)
        # The echo is longer than the pipe: the signal comes before the first step.
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 130, errors)
        self.assertEqual((text + rest).decode(), "The cat sat. " * 1000 + "\n")
        self.assertRegex(errors.decode(), r"\nprompt \d+ tokens, [\d.e+-]+ ms; generated 0 tokens; "
                                          r"end: cancelled\n\Z")

    # Fault: signals that nohup or a shell switched off end the program.
    def test_ignored_signals(self):
        def ignore():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        process = self.start_long(preexec_fn=ignore)
        self.read_prompt_and_text(process)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 0, errors)
        self.assertIn(b"generated 3000 tokens", errors)

    # Fault: a limit on the size of files kills the program without a word.
    def test_file_size_limit(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))

        with open(self.path("out"), "wb") as out:
            result = run("run", "-q", "-n", "20", stdout=out, preexec_fn=limit)
        self.assert_error(result, 1, "standard output", "File too large")

    # Fault: the second Ctrl-C waits too, so that a blocked program cannot be ended.
    def test_second_interrupt(self):
        process = self.start_long()
        self.read_prompt_and_text(process)
        # Nobody reads: the program stays blocked in its write, and only the handler runs.
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
        self.assertEqual(process.returncode, 130)

    # Fault: a reader that goes away, as head does, is not noticed, or is told of as an error.
    def test_closed_output(self):
        process = self.start_long("-q")
        self.read_prompt_and_text(process)
        process.stdout.close()
        errors = process.stderr.read()
        self.assertEqual((process.wait(TIMEOUT_S), errors), (128 + signal.SIGPIPE, b""))

    # Fault: text that cannot be written is lost without a word.
    def test_full_device(self):
        for arguments in (["-p", PROMPT], ["--no-echo"]):
            with open("/dev/full", "wb") as full:
                self.assert_error(run("run", "-q", "-n", "5", *arguments, stdout=full), 1,
                                  "standard output", "No space left")

    # Fault: a closed standard output lets the text go into another file of the program.
    def test_no_output(self):
        result = subprocess.run(["sh", "-c", '"$@" >&-', "sh", IMBREX, "run",
                                 "-q", "-n", "5"], capture_output=True, check=False,
                                timeout=TIMEOUT_S)
        self.assert_error(result, 1, "standard output")


if __name__ == "__main__":
    unittest.main()
