#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex quantize: its report, its files, and what is left when it ends early."""
import fcntl
import hashlib
import json
import os
import resource
import shutil
import signal
import unittest

from support import BUILTIN, ROOT, TestCase, run, small_tensors, start

TOKENIZERS = os.path.join(ROOT, "tests", "golden", "tokenizers")

FIELDS = {"type", "tensors", "num_tensors", "from_bytes", "to_bytes", "file_bytes", "rms_error",
          "nll_before", "nll_after"}


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class Quantize(TestCase):
    def quantize(self, model, name, *arguments):
        path = self.path(name)
        result = run("quantize", model, path, "--json", *arguments)
        self.assert_ok(result)
        return path, json.loads(result.stdout)

    # Fault: a report that leaves out a tensor or its fallback, or totals that are others' sums.
    def test_report(self):
        path, report = self.quantize(BUILTIN, "out.gguf", "--type", "q4_0")
        self.assertEqual(report.keys(), FIELDS)
        tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
        self.assertEqual(len(tensors), 47)
        self.assertEqual(report["num_tensors"], 47)
        down, gate = tensors["blk.2.ffn_down.weight"], tensors["blk.2.ffn_gate.weight"]
        self.assertEqual((down["to"], down["reason"]),
                         ("F16", "rows of 172 are no multiple of 32"))
        self.assertEqual((gate["to"], gate["reason"], gate["to_bytes"]), ("Q4_0", None, 6192))
        self.assertEqual(tensors["output_norm.weight"]["to"], "F32")
        self.assertTrue(0.01 < gate["rms_error"] < 0.2, gate)
        self.assertEqual(down["rms_error"], 0)
        for side in ("from_bytes", "to_bytes"):
            self.assertEqual(report[side], sum(tensor[side] for tensor in tensors.values()))
        self.assertEqual(report["file_bytes"], os.path.getsize(path))
        self.assertIsNone(report["nll_before"])
        text = run("quantize", BUILTIN, path, "--type", "q4_0", "--force")
        self.assert_ok(text)
        self.assertIn(b"blk.2.ffn_down.weight  [64, 172]  F16 -> F16  22016 -> 22016 bytes  "
                      b"rms error 0  (rows of 172 are no multiple of 32)\n", text.stdout)
        self.assertEqual(text.stdout.count(b" -> "), 2 * 47 + 1)

    # Fault: kernels that the machine has not are taken without a word where no engine runs.
    def test_missing_kernels(self):
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            if "amx_int8" in file.read():
                self.skipTest("this machine has AMX")
        path = self.path("out.gguf")
        self.assert_error(run("quantize", BUILTIN, path, "--cpu", "amx-int8"), 2,
                          "--cpu amx-int8: expected a machine with these instructions")
        self.assertFalse(os.path.exists(path))

    # Fault: bytes that depend on the number of threads.
    def test_threads(self):
        one, _ = self.quantize(BUILTIN, "one.gguf", "--type", "q8_0", "--threads", "1")
        five, _ = self.quantize(BUILTIN, "five.gguf", "--type", "q8_0", "--threads", "5")
        self.assertEqual(digest(one), digest(five))

    # Fault: a file that changes each time it is written again, or from which another type comes
    # out than from the folder.
    def test_from_gguf(self):
        first, _ = self.quantize(BUILTIN, "first.gguf", "--type", "f16")
        second, report = self.quantize(first, "second.gguf", "--type", "f16")
        third, _ = self.quantize(second, "third.gguf", "--type", "f16")
        self.assertEqual(report["rms_error"], 0)
        self.assertEqual(digest(second), digest(third))
        folder, _ = self.quantize(BUILTIN, "folder.gguf", "--type", "q8_0")
        again, _ = self.quantize(first, "again.gguf", "--type", "q8_0")
        listings = [json.loads(run("inspect", path, "--json").stdout) for path in (folder, again)]
        for listing in listings:
            self.assertEqual(listing["format"], "GGUF v3")
            self.assertEqual(listing["file_type"], "Q8_0")
            self.assertEqual(listing["types"]["Q8_0"]["tensors"], 31)
            for tensor in listing["tensors"]:
                del tensor["file"]
        self.assertEqual(listings[0]["tensors"], listings[1]["tensors"])
        texts = [run("run", path, "-p", "Once upon a time", "-n", "20").stdout
                 for path in (folder, again, first)]
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[2],
                         run("run", BUILTIN, "-p", "Once upon a time", "-n", "20").stdout)
        # Back to more bits: no error is added.
        _, report = self.quantize(folder, "back.gguf", "--type", "f32")
        self.assertEqual(report["rms_error"], 0)

    # Fault: the file of a model without a tokenizer does not say so, without which llama.cpp does
    # not open it, or is refused here because of it.
    def test_no_tokenizer(self):
        model = self.model()
        os.remove(model.path("tokenizer.json"))
        path, _ = self.quantize(model.folder, "ids.gguf", "--type", "f16")
        again, _ = self.quantize(path, "again.gguf", "--type", "f16")
        for name in (path, again):
            with open(name, "rb") as file:
                key = b"tokenizer.ggml.model\x08\0\0\0\x08" + 7 * b"\0" + b"no_vocab"
                self.assertEqual(file.read().count(key), 1)
        ids = self.write("ids.json", json.dumps(list(range(3, 40))))
        score = run("perplexity", path, "--ids", ids, "--json")
        self.assertEqual(score.returncode, 0, score.stderr)
        self.assertIn(b"has no tokenizer", score.stderr)

    # Fault: scores of one model given for both.
    def test_perplexity(self):
        ids = self.write("ids.json", json.dumps([1] + [(7 * i) % 250 + 260 for i in range(80)]))
        _, report = self.quantize(BUILTIN, "f16.gguf", "--type", "f16", "--perplexity", ids)
        self.assertAlmostEqual(report["nll_before"], report["nll_after"], 4)
        path, report = self.quantize(BUILTIN, "q4.gguf", "--type", "q4_0", "--perplexity", ids)
        score = json.loads(run("perplexity", path, "--ids", ids, "--json").stdout)
        self.assertAlmostEqual(report["nll_after"], score["nll"], 6)
        self.assertNotEqual(report["nll_before"], report["nll_after"])
        text = run("quantize", BUILTIN, path, "--type", "q4_0", "--perplexity", ids, "--force")
        self.assertRegex(text.stdout.decode(), r"\nnll \d+\.\d+ -> \d+\.\d+ per token \([+-]")

    # Fault: a tokenizer that is lost or changed on the way.
    def test_tokenizer(self):
        path, _ = self.quantize(BUILTIN, "f16.gguf", "--type", "f16")
        text = self.write("text", "Once  upon a \u00e9\u4e2d time\n\tend <s> x")
        results = [run("tokenize", model, "--file", text) for model in (BUILTIN, path)]
        for result in results:
            self.assert_ok(result)
        self.assertEqual(results[0].stdout, results[1].stdout)

    # Fault: a tokenizer that becomes another one without a word: flags of added tokens, say.
    def test_tokenizers(self):
        refusals = {}
        for name in sorted(os.listdir(TOKENIZERS)):
            path = os.path.join(TOKENIZERS, name, "tokenizer.json")
            if not os.path.exists(path):
                continue
            with open(path, encoding="utf-8") as file:
                self.tokenizer_model.write_json("tokenizer.json", json.load(file))
            out = self.path(name + ".gguf")
            result = run("quantize", self.tokenizer_model.folder, out, "--type", "f16")
            if result.returncode != 0:
                self.assert_error(result, 2, "tokenizer.json: ", ": expected ")
                self.assertFalse(os.path.exists(out) or os.path.exists(out + ".partial"))
                refusals[name] = result.stderr.decode()
                continue
            cases = os.path.join(TOKENIZERS, name, "cases.jsonl")
            result = run("tokenize", out, "--jsonl", cases)
            self.assert_ok(result)
            with open(cases, encoding="utf-8") as file:
                expected = [json.loads(line)["ids"] for line in file]
            self.assertEqual([json.loads(line) for line in result.stdout.splitlines()], expected,
                             name)
        self.assertIn("llama3", os.listdir(TOKENIZERS))
        self.assertNotIn("llama3", refusals)
        self.assertIn('added token "<mask>": lstrip: expected false, which is all a GGUF file can '
                      "say, found true", refusals["gpt2"])
        self.assertIn('added token "<tool>": normalized: expected false', refusals["llama2"])

    # Fault: a flag of added tokens that is lost; one that changes nothing and is refused.
    def test_added_tokens(self):
        model = self.tokenizer_model
        with open(os.path.join(TOKENIZERS, "gpt2", "tokenizer.json"), encoding="utf-8") as file:
            tokenizer = json.load(file)
        plain = dict(lstrip=False, rstrip=False, single_word=False, normalized=False)
        out = self.path("x.gguf")
        for flag, is_refused in (("lstrip", True), ("rstrip", True), ("single_word", True),
                                 ("normalized", False)):
            for token in tokenizer["added_tokens"]:
                token.update(plain)
            tokenizer["added_tokens"][2][flag] = True
            model.write_json("tokenizer.json", tokenizer)
            result = run("quantize", model.folder, out, "--type", "f16", "--force")
            if is_refused:
                self.assert_error(result, 2, f'added token "<right>": {flag}: expected false')
                self.assertEqual(os.listdir(self.folder), ["model"])
            else:
                self.assert_ok(result)
                cases = os.path.join(TOKENIZERS, "gpt2", "cases.jsonl")
                ids = [run("tokenize", path, "--jsonl", cases) for path in (model.folder, out)]
                self.assert_ok(ids[0])
                self.assertEqual(ids[0].stdout, ids[1].stdout)

    @property
    def tokenizer_model(self):
        """One whose vocabulary has room for the small tokenizers."""
        if not hasattr(self, "_model"):
            self._model = self.model()
            self._model.config["vocab_size"] = 1005
            self._model.tensors = small_tensors(self._model.config)
            self._model.write()
        return self._model

    # Fault: two runs that write into one file, and a killed run that is in the way of the next.
    def test_partial(self):
        path = self.path("x.gguf")
        with open(path + ".partial", "wb") as partial:
            fcntl.flock(partial, fcntl.LOCK_EX)
            for force in ((), ("--force",)):
                self.assert_error(run("quantize", BUILTIN, path, *force), 2, "x.gguf.partial",
                                  "another run writes it")
            partial.write(b"x" * 5000000)
        self.assert_ok(run("quantize", BUILTIN, path))
        self.assertEqual(os.listdir(self.folder), ["x.gguf"])
        self.assert_ok(run("inspect", path))

    # Fault: a type that the help names and that does not work, or the reverse.
    def test_types(self):
        names = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k",
                 "q6_k")
        text = " ".join(run("quantize", "--help").stdout.decode().split())
        self.assertIn(", ".join(names[:-1]) + " or q6_k", text)
        for name in names + ("Q4_K",):
            self.quantize(BUILTIN, "x.gguf", "--type", name, "--force")

    # Fault: arguments that are ignored, files that are replaced without --force, a model opened
    # for nothing.
    def test_refusals(self):
        path = self.path("out.gguf")
        self.assert_error(run("quantize"), 2, "MODEL and OUT.gguf", "neither")
        self.assert_error(run("quantize", BUILTIN), 2, "MODEL and OUT.gguf", "one of them")
        self.assert_error(run("quantize", BUILTIN, path, "x"), 2, 'unexpected argument "x"')
        self.assert_error(run("quantize", BUILTIN, path, "--type", "q3_k"), 2,
                          "--type: expected f32,", "q5_k or q6_k, found q3_k")
        self.assertFalse(os.path.exists(path))
        self.write("out.gguf", "kept")
        self.assert_error(run("quantize", BUILTIN, path), 2, path, "found a file there", "--force")
        self.assertEqual(os.path.getsize(path), 4)
        self.assert_error(run("quantize", BUILTIN, self.folder), 2, "found a folder")
        self.assert_error(run("quantize", BUILTIN, self.path("none/x.gguf")), 2, "cannot create")
        self.assert_error(run("quantize", self.path("none"), ""), 2, "OUT.gguf",
                          'expected the name of a new file, found ""')
        self.assertEqual(os.listdir(self.folder), ["out.gguf"])
        os.symlink("nothing", self.path("link"))
        self.assert_error(run("quantize", BUILTIN, self.path("link")), 2, "link to nothing")

    # Fault: a folder that loses its weights to what is made of them, by whatever path.
    def test_own_files(self):
        folder = self.path("model")
        shutil.copytree(BUILTIN, folder)
        weights = os.path.join(folder, "model.safetensors")
        before = digest(weights)
        os.symlink("model/model.safetensors", self.path("link"))
        os.link(weights, self.path("same"))
        for path in (weights, self.path("link"), self.path("same")):
            result = run("quantize", folder, path, "--type", "q8_0", "--force")
            self.assert_error(result, 2, path, "none of the model's own")
        self.assertEqual(digest(weights), before)

    # Fault: an infinite weight written as if it were a number, or one that F16 does not hold.
    def test_elements(self):
        model = self.model()
        name = "model.layers.1.mlp.up_proj.weight"
        content = bytearray(model.tensors[name]["content"])
        for value, parts in ((b"\x00\x00\x80\x7f", (name, "finite elements")),
                             (b"\x00\x00\x80\x49", (name, "elements that F16 can hold"))):
            content[400:404] = value
            model.tensors[name]["content"] = bytes(content)
            model.write()
            self.assert_error(run("quantize", model.folder, self.path("x.gguf"), "--type", "f16"),
                              2, *parts)
        self.assertEqual(os.listdir(self.folder), ["model"])

    # Fault: half a file left by a full disk, for which a limit on file sizes stands.
    def test_full_disk(self):
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        result = run("quantize", BUILTIN, self.path("x.gguf"), preexec_fn=limit)
        self.assertIn(b"x.gguf: cannot write: File too large", result.stderr)
        self.assertEqual(result.returncode, 1)
        self.assertEqual(os.listdir(self.folder), [])

    # Fault: half a file left by Ctrl-C, or a run that does not end.
    def test_interrupt(self):
        model = self.model()
        layers = 200
        model.config["num_hidden_layers"] = layers
        for name in list(model.tensors):
            if ".layers.0." in name:
                for layer in range(2, layers):
                    other = name.replace(".layers.0.", f".layers.{layer}.")
                    model.tensors[other] = model.tensors[name]
        model.write()
        path = self.path("x.gguf")
        # The report does not fit the pipe: the program waits for us in the middle of its work.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process = start("quantize", model.folder, path, pipe_bytes=65536)
            first = process.stdout.read(1)
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
            self.assertEqual((process.returncode, errors), (128 + number, b""))
            self.assertLess((first + output).count(b"\n"), 9 * layers)
            self.assertEqual(os.listdir(self.folder), ["model"])


if __name__ == "__main__":
    unittest.main()
