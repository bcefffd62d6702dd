#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""imbrex inspect."""
import json
import math
import os
import re
import unittest

from support import SMALL_CONFIG, TestCase, run

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class Inspect(TestCase):
    def inspect(self, *arguments):
        result = run("inspect", *arguments, "--json")
        self.assert_ok(result)
        return json.loads(result.stdout)

    # Fault: sums that do not follow from the tensors, or tensors that are left out.
    def test_sums(self):
        for arguments in ([], [self.model().folder]):
            shown = self.inspect(*arguments)
            for tensor in shown["tensors"]:
                self.assertEqual(tensor["bytes"],
                                 math.prod(tensor["shape"]) * ELEMENT_BYTES[tensor["dtype"]])
            self.assertEqual(shown["weight_bytes"], sum(one["bytes"] for one in shown["tensors"]))
            self.assertEqual(shown["parameters"],
                             sum(math.prod(one["shape"]) for one in shown["tensors"]))
            names = [one["name"] for one in shown["tensors"]]
            self.assertEqual(names, sorted(names))
            self.assertEqual(len(names), 2 + 9 * shown["config"]["num_layers"])

    # Fault: fields read from the wrong place.
    def test_small_model(self):
        model = self.model()
        shown = self.inspect(model.folder)
        config = shown["config"]
        for field in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings",
                      "rope_theta", "rms_norm_eps"):
            self.assertEqual(config[field], SMALL_CONFIG[field], field)
        self.assertEqual((config["num_layers"], config["num_heads"], config["num_kv_heads"],
                          config["head_dim"]), (2, 4, 2, 8))
        self.assertEqual(shown["model"], model.folder)
        self.assertEqual(shown["architecture"], "llama")
        self.assertTrue(shown["tied"])
        self.assertEqual([token["id"] for token in shown["end_tokens"]], [2])
        self.assertEqual(shown["tokenizer_vocab_size"], 512)
        self.assertEqual({one["file"] for one in shown["tensors"]}, {model.weights})

    # Fault: a scaling or a window that is in use and not shown.
    def test_scaling_and_window(self):
        model = self.model()
        model.config.update(model_type="mistral", architectures=["MistralForCausalLM"],
                            sliding_window=64, rope_scaling={"type": "yarn", "factor": 4.0})
        model.write()
        config = self.inspect(model.folder)["config"]
        self.assertEqual((config["rope_scaling"], config["rope_scaling_factor"],
                          config["sliding_window"], config["num_sliding_layers"]),
                         ("yarn", 4.0, 64, 2))
        text = run("inspect", model.folder).stdout.decode()
        self.assertRegex(text, r"(?m)^positions .*, rope scaling yarn by 4$")
        self.assertRegex(text, r"(?m)^window +64 positions in 2 layers$")
        model.config.update(sliding_window=None, rope_scaling=None)
        model.write()
        text = run("inspect", model.folder).stdout.decode()
        self.assertNotRegex(text, r"(?m)^window|rope scaling")

    # Fault: the plan does not follow the options, or its parts do not fit each other.
    def test_memory_plan(self):
        folder = self.model().folder
        plan = self.inspect(folder)["memory_plan"]
        self.assertEqual(plan["context_size"], 4096)
        shown = self.inspect(folder, "--ctx-size", "1000", "--threads", "3", "--cpu", "ref")
        plan = shown["memory_plan"]
        self.assertEqual((plan["context_size"], plan["num_threads"], plan["kernels"]),
                         (1000, 3, "ref"))
        self.assertGreaterEqual(plan["kv_block_size"] * plan["kv_num_blocks"], 1000)
        self.assertGreaterEqual(plan["kv_bytes"], 1000 * shown["kv_bytes_per_token"])
        self.assertEqual(plan["weight_bytes"], shown["weight_bytes"])

    # Fault: the size of the KV cache or its policy are not those that were asked for.
    def test_kv_cache(self):
        folder = self.model().folder
        shown = self.inspect(folder)
        self.assertEqual(shown["memory_plan"]["kv_policy"], "lru")
        block_bytes = shown["memory_plan"]["kv_block_size"] * shown["kv_bytes_per_token"]
        for amount, num_blocks in (("4800", 300), ("4M", (4 << 20) // block_bytes),
                                   ("9000K", (9000 << 10) // block_bytes)):
            plan = self.inspect(folder, "--kv-cache", amount, "--kv-policy", "lfu")["memory_plan"]
            self.assertEqual((plan["kv_num_blocks"], plan["kv_policy"]), (num_blocks, "lfu"))
        text = run("inspect", folder, "--kv-policy", "none").stdout.decode()
        self.assertRegex(text, r"(?m)^  KV +.* blocks of \d+ tokens in fp32, policy none$")
        for amount in ("", "0", "x", "M", "3X", "3MB", "-3", "1.5M", "999999999999T"):
            self.assert_error(run("inspect", folder, "--kv-cache", amount), 2, "--kv-cache",
                              f'found "{amount}"')
        for amount in ("2", "1K", "99999999999", "900G"):
            self.assert_error(run("inspect", folder, "--kv-cache", amount), 2, "--kv-cache",
                              "context of 4096 tokens, at most 1073741824", f"found {amount}")
        self.assert_error(run("inspect", folder, "--kv-policy", "lur"), 2,
                          "--kv-policy: expected one of lru,", ', none, found "lur"')

    # Fault: sampling defaults that are not generation_config.json's, or not named as such.
    def test_sampling(self):
        model = self.model()
        self.assertEqual(self.inspect(model.folder)["sampling"]["from_checkpoint"], [])
        model.write_json("generation_config.json", {
            "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
            "repetition_penalty": 1.1, "eos_token_id": [2, 1]})
        shown = self.inspect(model.folder)
        self.assertEqual(shown["sampling"], {
            "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0, "repetition_penalty": 1.1,
            "from_checkpoint": ["temperature", "top_k", "top_p", "repetition_penalty"]})
        self.assertEqual(sorted(token["id"] for token in shown["end_tokens"]), [1, 2])
        text = run("inspect", model.folder).stdout.decode()
        self.assertRegex(text, r"(?m)^sampling .*temperature 0\.7, top_k 20, top_p 0\.8, "
                               r"repetition_penalty 1\.1 \(from generation_config\.json\)$")

    # Fault: a temperature that the file does not name is not shown; one that is not in use is.
    def test_sampling_without_values(self):
        model = self.model()
        model.write_json("generation_config.json", {"do_sample": True})
        text = run("inspect", model.folder).stdout.decode()
        self.assertRegex(text, r"(?m)^sampling +temperature 1 \(from generation_config\.json\)$")
        model.write_json("generation_config.json", {"temperature": 0.7})
        text = run("inspect", model.folder).stdout.decode()
        self.assertRegex(text, r"(?m)^sampling +the most likely token$")
        sampling = self.inspect(model.folder)["sampling"]
        self.assertEqual((sampling["temperature"], sampling["from_checkpoint"]), (0, []))

    # Fault: the text for people leaves out what the JSON has.
    def test_human(self):
        shown = self.inspect()
        text = run("inspect", "--tensors").stdout.decode()
        for value in ("llama", str(shown["parameters"]), f"({shown['weight_bytes']} bytes)",
                      f"{shown['kv_bytes_per_token']} bytes", f"tensors {'':10}47\n",
                      shown["tied_reason"], "1 '<s>', 2 '</s>'", shown["memory_plan"]["kernels"]):
            self.assertIn(value, text)
        for tensor in shown["tensors"]:
            self.assertRegex(text, rf"(?m)^{re.escape(tensor['name'])}  {tensor['dtype']} "
                                   rf"{re.escape(str(tensor['shape']))}  {tensor['bytes']} bytes")
        self.assertNotIn(shown["tensors"][0]["name"], run("inspect").stdout.decode())

    # Fault: JSON that is not JSON, or no output at all, for a folder whose name is not UTF-8.
    def test_path_that_is_not_utf8(self):
        model = self.model()
        folder = os.fsencode(self.folder) + b"/m\xff"
        os.rename(os.fsencode(model.folder), folder)
        self.assertTrue(self.inspect(folder)["model"].endswith("/m?"))
        self.assertIn(b"/m\\xff\n", run("inspect", folder).stdout)

    # Fault: names in a file control the reader's terminal.
    def test_no_control_characters(self):
        model = self.model()
        folder = self.path("a\x1b[31mb\n")
        os.rename(model.folder, folder)
        result = run("inspect", folder, "--tensors")
        self.assert_ok(result)
        self.assertNotIn(b"\x1b", result.stdout)

    # Fault: results are lost without a word when nobody can read them.
    def test_output_that_fails(self):
        with open("/dev/full", "wb") as full:
            for arguments in ([], ["--json"]):
                self.assert_error(run("inspect", *arguments, stdout=full), 1, "standard output",
                                  "No space left")


if __name__ == "__main__":
    unittest.main()
