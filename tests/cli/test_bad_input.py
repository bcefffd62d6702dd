#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Damaged, missing and unsupported model files: each gives one line that names the file, the field
or tensor, what was expected and what was found, and exit code 2. Faults caught: crashes, hangs,
reads beyond the file, wrong numbers in silence, and messages that help nobody."""
import json
import os
import re
import struct
import unittest

from support import TestCase, run, safetensors_header, small_tensors, tensor, write_safetensors

EXPECTED_FOUND = re.compile(r"expected .*, found")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


class BadInput(TestCase):
    """A good model, which each test spoils in one place."""

    def setUp(self):
        super().setUp()
        self.small = self.model()

    def assert_refused(self, *parts, model=None):
        """By every command that opens a model."""
        folder = model or self.small.folder
        for arguments in (["run", folder, "-p", "a", "-n", "1"], ["inspect", folder]):
            self.assert_error(run(*arguments), 2, EXPECTED_FOUND, *parts)


class Folder(BadInput):
    # Fault: a path that does not exist.
    def test_missing_path(self):
        self.assert_refused(self.path("none"), model=self.path("none"))

    # Fault: a folder that holds no model.
    def test_no_config(self):
        os.remove(self.small.path("config.json"))
        self.assert_refused(self.small.path("config.json"))

    # Fault: a file where a folder belongs.
    def test_file_as_model(self):
        self.assert_refused(self.small.weights, model=self.small.weights)

    # Fault: folders without weights.
    def test_no_weights(self):
        os.remove(self.small.weights)
        self.assert_refused("model.safetensors")

    # Fault: a folder where a file belongs.
    def test_folder_as_weights(self):
        os.remove(self.small.weights)
        os.mkdir(self.small.weights)
        self.assert_refused(self.small.weights)

    # Fault: waiting for ever for the writer of a pipe.
    def test_fifo(self):
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            os.rename(self.small.path(name), self.path("kept"))
            os.mkfifo(self.small.path(name))
            self.assert_refused(name)
            os.replace(self.path("kept"), self.small.path(name))

    # Fault: a device is read without end.
    def test_device(self):
        os.remove(self.small.weights)
        os.symlink("/dev/zero", self.small.weights)
        self.assert_refused(self.small.weights)

    # Fault: an empty file.
    def test_empty_files(self):
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            os.rename(self.small.path(name), self.path("kept"))
            self.small_file(name, b"")
            self.assert_refused(name)
            os.replace(self.path("kept"), self.small.path(name))

    def small_file(self, name, content):
        with open(self.small.path(name), "wb") as file:
            file.write(content)


class Safetensors(BadInput):
    def write_raw(self, content):
        with open(self.small.weights, "wb") as file:
            file.write(content)

    # Fault: a header that ends early.
    def test_truncated_header(self):
        for num_bytes in (4, 8, 100):
            self.small.truncate(num_bytes)
            self.assert_refused(self.small.weights, str(num_bytes))
            self.small.write()

    # Fault: tensors beyond the end of the file, found out only when they are read.
    def test_truncated_data(self):
        size = os.path.getsize(self.small.weights)
        for cut in (1, 4096):
            self.small.truncate(size - cut)
            self.assert_refused(self.small.weights)
            self.small.write()

    # Fault: sums with a header length near 2^63 or 2^64 that wrap around.
    def test_huge_header_length(self):
        for length in (2**63 - 1, 2**63, 2**63 - 8, 2**64 - 1, 2**64 - 8, 2**32, 100000001):
            self.write_raw(struct.pack("<Q", length) + b"{}" + b" " * 100)
            self.assert_refused(self.small.weights, str(length))

    # Fault: headers that are no JSON, or another kind of it.
    def test_bad_json(self):
        for header in (b"{", b"[]", b"{}x", b'{"a": 1}', b"[" * 100000, b"\xff\xfe", b"\0" * 16):
            self.small.write(header)
            self.assert_refused(self.small.weights)

    # Fault: two tensors in the same bytes.
    def test_overlap(self):
        header = safetensors_header(self.small.tensors)
        begin, end = header[Q_PROJ]["data_offsets"]
        other = header["model.layers.1.self_attn.o_proj.weight"]
        self.assertEqual(other["data_offsets"][1] - other["data_offsets"][0], end - begin)
        other["data_offsets"] = [begin, end]
        self.small.write(header)
        self.assert_refused(self.small.weights, "model.layers.1.self_attn.")

    # Fault: offsets outside the file, backwards, negative, too large for 64 bits, or no numbers.
    def test_out_of_range(self):
        right = safetensors_header(self.small.tensors)
        size = right[Q_PROJ]["data_offsets"][1] - right[Q_PROJ]["data_offsets"][0]
        for offsets in ([10**9, 10**9 + size], [size, 0], [-size, 0], [2**63 - size, 2**63],
                        [2**64 - size, 2**64], [0.5, size + 0.5], ["0", size], [0], None, 7):
            header = json.loads(json.dumps(right))
            header[Q_PROJ]["data_offsets"] = offsets
            self.small.write(header)
            self.assert_refused(self.small.weights)

    # Fault: a shape and an offset that contradict each other; products that overflow.
    def test_shape_against_bytes(self):
        right = safetensors_header(self.small.tensors)
        for shape in ([32, 31], [2**32, 2**32, 32], [2**62, 4], [-32, -32], [32.0, 32], "32",
                      [1] * 100):
            header = json.loads(json.dumps(right))
            header[Q_PROJ]["shape"] = shape
            self.small.write(header)
            self.assert_refused(self.small.weights, Q_PROJ)

    # Fault: integers read as numbers with a fraction.
    def test_wrong_dtype(self):
        for dtype, size in (("I32", 4), ("I8", 1), ("F64", 8), ("F8_E4M3", 1)):
            shape = self.small.tensors[Q_PROJ]["shape"]
            self.small.tensors[Q_PROJ] = tensor(dtype, shape, bytes(32 * 32 * size))
            self.small.write()
            self.assert_refused(self.small.weights, Q_PROJ, dtype)

    # Fault: a type that the format does not have.
    def test_unknown_dtype(self):
        self.small.tensors[Q_PROJ]["dtype"] = "F31"
        self.small.write()
        self.assert_refused(self.small.weights, Q_PROJ, "F31")

    # Fault: a matrix of another size than config.json says.
    def test_wrong_shape(self):
        self.small.tensors[Q_PROJ] = tensor("F32", [16, 64], bytes(4096))
        self.small.write()
        self.assert_refused(self.small.weights, Q_PROJ, "[32, 32]", "[16, 64]")
        self.small.tensors[Q_PROJ] = tensor("F32", [1024], bytes(4096))
        self.small.write()
        self.assert_refused(self.small.weights, Q_PROJ, "[32, 32]", "[1024]")

    # Fault: a missing or an unknown tensor.
    def test_names(self):
        moved = self.small.tensors.pop(Q_PROJ)
        self.small.write()
        self.assert_refused(self.small.folder, Q_PROJ)
        self.small.tensors[Q_PROJ] = moved
        self.small.tensors["model.layers.1.self_attn.surprise.weight"] = moved
        self.small.write()
        self.assert_refused(self.small.folder, "model.layers.1.self_attn.surprise.weight")


class Shards(BadInput):
    def setUp(self):
        super().setUp()
        tensors = self.small.tensors
        names = list(tensors)
        self.names = {"model-00001-of-00002.safetensors": names[:7],
                      "model-00002-of-00002.safetensors": names[7:]}
        for name, part in self.names.items():
            write_safetensors(self.small.path(name), {one: tensors[one] for one in part})
        os.remove(self.small.weights)
        self.weight_map = {one: name for name, part in self.names.items() for one in part}
        self.write_index()

    def write_index(self):
        self.small.write_json("model.safetensors.index.json",
                              {"metadata": {}, "weight_map": self.weight_map})

    # The shards themselves must be fine.
    def test_good(self):
        self.assert_ok(run("run", self.small.folder, "-p", "a", "-n", "1"))

    # Fault: a shard that was not downloaded.
    def test_missing_shard(self):
        os.remove(self.small.path("model-00002-of-00002.safetensors"))
        self.assert_refused("model-00002-of-00002.safetensors")

    # Fault: the index and the shards do not fit.
    def test_wrong_shard(self):
        self.weight_map[Q_PROJ] = "model-00001-of-00002.safetensors"
        self.write_index()
        self.assert_refused(Q_PROJ, "model-00001-of-00002.safetensors")

    # Fault: an index that reaches out of the folder.
    def test_outside(self):
        for name in ("../other.safetensors", "/etc/passwd", "a/../../b.safetensors"):
            self.weight_map[Q_PROJ] = name
            self.write_index()
            self.assert_refused("model.safetensors.index.json", name)


class Config(BadInput):
    def assert_config_refused(self, *parts, **fields):
        config = dict(self.small.config, **fields)
        self.small.write_json("config.json", {key: value for key, value in config.items()
                                              if value is not ...})
        self.assert_refused(self.small.path("config.json"), *parts)

    # Fault: another architecture is run as if it were llama.
    def test_architecture(self):
        self.assert_config_refused("model_type", "gpt2", architectures=["GPT2LMHeadModel"],
                                   model_type="gpt2")

    # Fault: quantised weights are read as they are.
    def test_quantization(self):
        for method in ("gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"):
            self.assert_config_refused("quantization_config", method,
                                       quantization_config={"quant_method": method, "bits": 4})

    # Fault: sizes that are missing, of another type, or out of range.
    def test_fields(self):
        self.assert_config_refused("hidden_size", hidden_size=...)
        self.assert_config_refused("hidden_size", "a string", hidden_size="32")
        self.assert_config_refused("hidden_size", "found 0", hidden_size=0)
        self.assert_config_refused("vocab_size", "-1", vocab_size=-1)
        self.assert_config_refused("num_hidden_layers", num_hidden_layers=2**40)
        self.assert_config_refused("num_attention_heads", num_attention_heads=3)
        self.assert_config_refused("num_key_value_heads", num_key_value_heads=3)
        self.assert_config_refused("hidden_act", "gelu", hidden_act="gelu")
        self.assert_config_refused("rms_norm_eps", rms_norm_eps=-1)

    # Fault: positions that are scaled in a way that imbrex does not know are run unscaled.
    def test_rope(self):
        for kind in ("dynamic", "longrope"):
            self.assert_config_refused("rope_scaling", kind,
                                       rope_scaling={"rope_type": kind, "factor": 8.0})

    # Fault: a mixture of experts or a vision model is run as if it were dense text.
    def test_kind(self):
        self.assert_config_refused("mixtral", "mixture of experts", model_type="mixtral",
                                   architectures=["MixtralForCausalLM"])
        self.assert_config_refused("num_experts", "mixture of experts", num_experts=64)
        self.assert_config_refused("vision_config", "vision model", vision_config={})

    # Fault: an adapter's folder is reported as a damaged model, or run without the adapter unsaid.
    def test_adapter(self):
        self.small.write_json("adapter_config.json", {"peft_type": "LORA"})
        result = run("run", self.small.folder, "-p", "a", "-n", "1")
        self.assert_ok(result)
        self.assertIn(b"adapter_config.json is ignored", result.stderr)
        os.remove(self.small.weights)
        os.remove(self.small.path("config.json"))
        self.assert_refused("adapter_config.json", "LoRA adapter")

    # Fault: files that are no JSON.
    def test_bad_json(self):
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            path = self.small.path(name)
            old = None
            if os.path.exists(path):
                with open(path, "rb") as file:
                    old = file.read()
            for content in (b"{", b"[]", b"[" * 100000, b"\xff", b"\0"):
                with open(path, "wb") as file:
                    file.write(content)
                self.assert_refused(path)
            os.remove(path)
            if old is not None:
                with open(path, "wb") as file:
                    file.write(old)

    # Fault: sampling values that no sampler can use.
    def test_generation_config(self):
        for field, value in (("temperature", -1), ("top_p", 1.5), ("top_k", "many"),
                             ("repetition_penalty", 0), ("eos_token_id", "end")):
            self.small.write_json("generation_config.json", {"do_sample": True, field: value})
            self.assert_refused("generation_config.json", field)

    # Fault: a tokenizer of another kind is read as one that it is not.
    def test_tokenizer(self):
        with open(self.small.path("tokenizer.json"), encoding="utf-8") as file:
            tokenizer = json.load(file)
        tokenizer["model"] = {"type": "Unigram", "vocab": []}
        self.small.write_json("tokenizer.json", tokenizer)
        self.assert_refused("tokenizer.json", "Unigram")

    # Fault: a tokenizer with more ids than the matrix has rows.
    def test_tokenizer_too_large(self):
        self.small.config["vocab_size"] = 500
        self.small.tensors = small_tensors(self.small.config)
        self.small.write()
        self.assert_refused("512", "500")


class Good(BadInput):
    # The small model itself must be fine, or the tests above prove nothing.
    def test_the_model_is_good(self):
        self.assert_ok(run("run", self.small.folder, "-p", "a", "-n", "1"))


if __name__ == "__main__":
    unittest.main()
