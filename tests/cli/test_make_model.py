#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/make_model.py and tools/safetensors_cast.py: what they write, and that imbrex opens it."""
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import unittest

from support import BUILTIN, ROOT, TestCase, run

SIZES = {"BF16": 2, "F16": 2, "F32": 4}
CONFIG = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
          "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 2}


def run_tool(name, *arguments):
    return subprocess.run([sys.executable, os.path.join(ROOT, "tools", name), *map(str, arguments)],
                          capture_output=True, text=True, timeout=120, check=False)


def values_of(dtype, content):
    if dtype == "BF16":
        wide = bytearray(2 * len(content))
        wide[2::4], wide[3::4] = content[0::2], content[1::2]
        dtype, content = "F32", bytes(wide)
    code = "e" if dtype == "F16" else "f"
    return struct.unpack(f"<{len(content) // SIZES[dtype]}{code}", content)


def read_file(path):
    """{name: (dtype, shape, bytes)}, with the header's own rules checked on the way."""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0, f"{path}: the data is not aligned"
    header = json.loads(content[8:8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors, end = {}, 0
    for name, entry in header.items():
        begin, last = entry["data_offsets"]
        assert begin == end, f"{name}: a hole or overlap"
        assert last - begin == math.prod(entry["shape"]) * SIZES[entry["dtype"]], name
        end = last
        tensors[name] = (entry["dtype"], entry["shape"],
                         content[8 + length + begin:8 + length + last])
    assert len(content) == 8 + length + end, f"{path}: bytes behind the last tensor"
    return tensors


def read_folder(folder):
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_file(os.path.join(folder, "model.safetensors"))
    with open(index, encoding="utf-8") as file:
        weight_map = json.load(file)["weight_map"]
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_file(os.path.join(folder, shard)).items():
            assert weight_map[name] == shard and name not in tensors, name
            tensors[name] = tensor
    assert tensors.keys() == weight_map.keys()
    return tensors


class MakeModel(TestCase):
    def setUp(self):
        super().setUp()
        self.config = self.write("config.json", json.dumps(CONFIG))

    def make(self, name, *arguments):
        folder = self.path(name)
        result = run_tool("make_model.py", self.config, folder, *arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertFalse([file for file in os.listdir(folder) if file.endswith(".partial")])
        return folder

    def refuse(self, arguments, *parts):
        result = run_tool("make_model.py", *arguments)
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    # Fault: bytes that depend on the run, or do not depend on the seed.
    def test_seed_decides(self):
        first, again = self.make("first"), self.make("again")
        other = self.make("other", "--seed", 1)
        first, again, other = map(read_folder, (first, again, other))
        self.assertEqual(first, again)
        self.assertEqual(first.keys(), other.keys())
        for name in first:
            self.assertNotEqual(first[name][2], other[name][2], name)
        self.assertEqual(len({tensor[2] for tensor in first.values()}), len(first))

    # Fault: another release of Python, or a change here, that makes another model of the same seed.
    def test_known_bytes(self):
        tensor = read_folder(self.make("known"))["model.layers.1.mlp.up_proj.weight"]
        self.assertEqual(tensor[2][:16].hex(), KNOWN_BYTES)

    # Fault: a GGUF file that holds another model than the folder of the same seed: rows of q and k
    # in another order, norms of another type, a tensor or a number under another name.
    def test_gguf_holds_the_same(self):
        ids = self.write("ids.json", json.dumps([(7 * i * i + i) % 512 for i in range(100)]))
        llama = dict(CONFIG, model_type="llama", attention_bias=True, num_key_value_heads=4,
                     tie_word_embeddings=True)
        for name, config in (("qwen2", CONFIG), ("llama", llama)):
            self.config = self.write("config.json", json.dumps(config))
            for dtype in ("bf16", "f16", "f32"):
                folder = self.make(f"{name}-{dtype}", "--dtype", dtype)
                path = folder + ".gguf"
                result = run_tool("make_model.py", self.config, path, "--gguf", "--dtype", dtype)
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                scores = []
                for model in (folder, path):
                    result = run("perplexity", model, "--ids", ids, "--json")
                    self.assert_ok(result)
                    scores.append(json.loads(result.stdout)["nll"])
                # The order of the sums over a head differs, and so the last digits.
                self.assertAlmostEqual(scores[0], scores[1], 5, (name, dtype))
        self.refuse((self.config, path, "--gguf"), path, "--force")
        self.refuse((self.config, self.folder, "--gguf"), "found a folder")
        self.refuse((self.config, path, "--gguf", "--tokenizer", BUILTIN), "--tokenizer")

    # Fault: a tensor that depends on the file it is in, or an index that names another file.
    def test_shards_hold_the_same(self):
        whole = self.make("whole")
        shards = self.make("shards", "--shard-bytes", 50000)
        self.assertGreater(len([file for file in os.listdir(shards) if "-of-" in file]), 3)
        self.assertEqual(read_folder(whole), read_folder(shards))

    # Fault: weights so large or small that activations overflow or all logits are equal.
    def test_statistics(self):
        for dtype, exact in (("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")):
            tensors = read_folder(self.make(dtype, "--dtype", dtype))
            for name, (stored, shape, content) in tensors.items():
                self.assertEqual(stored, exact)
                values = values_of(stored, content)
                mean, deviation = statistics.fmean(values), statistics.pstdev(values)
                self.assertTrue(all(map(math.isfinite, values)), name)
                if len(shape) == 2:
                    expected = 1 / math.sqrt(shape[1])
                    self.assertAlmostEqual(deviation / expected, 1, delta=0.05, msg=name)
                    self.assertLess(abs(mean), 0.1 * expected, name)
                    # Most draws differ, as far as the type can tell them apart.
                    self.assertGreater(len(set(values)), min(len(values) // 4, 900), name)
                    self.assertLess(max(map(abs, values)), 5 * expected, name)
                elif name.endswith("norm.weight") or "layernorm" in name:
                    self.assertAlmostEqual(mean, 1, delta=0.1, msg=name)
                    self.assertGreater(deviation, 0.01, name)

    # Fault: a folder that the loader refuses: a bias, a shape or a name that is not the model's.
    def test_imbrex_opens_it(self):
        for name, changes in (("qwen2", {}),
                              ("tied", {"tie_word_embeddings": True}),
                              ("llama", {"model_type": "llama"}),
                              ("qwen3", {"model_type": "qwen3"}),
                              ("qwen3-bias", {"model_type": "qwen3", "head_dim": 8,
                                              "attention_bias": True}),
                              ("mistral", {"model_type": "mistral", "sliding_window": 16,
                                           "rope_scaling": {"type": "yarn", "factor": 2.0}}),
                              ("biases", {"model_type": "llama", "attention_bias": True,
                                          "mlp_bias": True, "head_dim": 32})):
            self.config = self.write("config.json", json.dumps({**CONFIG, **changes}))
            folder = self.make(name, "--layers", 3, "--shard-bytes", 60000, "--tokenizer", BUILTIN)
            shown = run("inspect", folder, "--json")
            self.assert_ok(shown)
            self.assertEqual(json.loads(shown.stdout)["config"]["num_layers"], 3)
            self.assert_ok(run("run", folder, "-p", "Once", "-n", "4", "--temp", "0"))

    # Fault: a stale file of an earlier run that is loaded instead of the new one.
    def test_force(self):
        folder = self.make("model")
        kept = os.path.join(folder, "notes.partial")
        with open(kept, "w", encoding="utf-8") as file:
            file.write("mine")
        self.refuse([self.config, folder], folder, "--force")
        self.assertTrue(os.path.exists(os.path.join(folder, "model.safetensors")))
        result = run_tool("make_model.py", self.config, folder, "--force", "--shard-bytes", 60000,
                          "--seed", 5)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertFalse(os.path.exists(os.path.join(folder, "model.safetensors")))
        self.assertTrue(os.path.exists(kept))
        os.remove(kept)
        self.assertEqual(read_folder(folder), read_folder(self.make("fresh", "--seed", 5)))

    # Fault: a mistake that ends in a traceback, or in half a model.
    def test_refusals(self):
        target = self.path("target")
        self.refuse(["qwen2.5-1b", target], "qwen2.5-1b", "qwen2.5-0.5b", "llama-3-8b")
        self.refuse([self.write("a.json", "{"), target], "a.json", "JSON")
        self.refuse([self.write("b.json", "[]"), target], "b.json", "object")
        self.refuse([self.write("c.json", '{"model_type":"gpt2"}'), target], "model_type", "gpt2")
        self.refuse([self.write("d.json", json.dumps({**CONFIG, "hidden_size": "64"})), target],
                    "hidden_size", "positive integer", "'64'")
        self.refuse([self.config, self.config], self.config, "folder")
        self.refuse([self.config, target, "--tokenizer", self.folder], "tokenizer.json")
        huge = {**CONFIG, "vocab_size": 1 << 50}
        self.refuse([self.write("e.json", json.dumps(huge)), target], "free disk")
        self.assertFalse(os.path.exists(target))
        for wrong in (["--dtype", "int8"], ["--shard-bytes", "0"], ["--layers", "-1"]):
            result = run_tool("make_model.py", self.config, target, *wrong)
            self.assertEqual(result.returncode, 2)
            self.assertIn(wrong[0], result.stderr)

    # Fault: the named shapes drifting from the published ones (parameters on the model cards).
    def test_named_shapes(self):
        sys.path.insert(0, os.path.join(ROOT, "tools"))
        import make_model
        for shape, expected in (("qwen2.5-0.5b", 494032768), ("qwen2.5-1.5b", 1543714304),
                                ("qwen2.5-3b", 3085938688), ("qwen2.5-7b", 7615616512),
                                ("qwen2.5-14b", 14770033664), ("qwen2.5-32b", 32763876352),
                                ("qwen2.5-72b", 72706203648), ("tinyllama-1.1b", 1100048384),
                                ("llama-2-7b", 6738415616), ("llama-3-8b", 8030261248),
                                ("llama-3.1-8b", 8030261248), ("mistral-7b", 7241732096),
                                ("qwen3-0.6b", 596049920), ("qwen3-1.7b", 1720574976),
                                ("qwen3-4b", 4022468096), ("qwen3-8b", 8190735360),
                                ("qwen3-14b", 14768307200), ("qwen3-32b", 32762123264)):
            tensors = make_model.tensor_list(make_model.load_config(shape))
            self.assertEqual(sum(math.prod(tensor[1]) for tensor in tensors), expected, shape)


class SafetensorsCast(TestCase):
    def cast(self, source, dtype):
        target = self.path(f"{dtype}.safetensors")
        result = run_tool("safetensors_cast.py", source, target, "--dtype", dtype)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return target

    def write_one(self, dtype, content):
        header = json.dumps({"__metadata__": {"format": "pt"}, "t": {
            "dtype": dtype, "shape": [len(content) // SIZES[dtype]],
            "data_offsets": [0, len(content)]}}).encode()
        header += b" " * (-len(header) % 8)
        return self.write("one.safetensors", struct.pack("<Q", len(header)) + header + content)

    # Fault: truncation instead of rounding, ties that go up, subnormals flushed.
    def test_rounding(self):
        rows = [(1.0, 0x3C00, 0x3F80), (-2.5, 0xC100, 0xC020),
                (1 + 2**-11, 0x3C00, 0x3F80), (1 + 3 * 2**-11, 0x3C02, 0x3F80),
                (1 + 2**-8, 0x3C04, 0x3F80), (1 + 3 * 2**-8, 0x3C0C, 0x3F82),
                (1 + 2**-8 + 2**-20, 0x3C04, 0x3F81), (2**-24, 0x0001, 0x3380),
                (65504.0, 0x7BFF, 0x4780), (0.0, 0, 0), (-0.0, 0x8000, 0x8000)]
        source = self.write_one("F32", struct.pack(f"<{len(rows)}f", *(row[0] for row in rows)))
        for dtype, column in (("F16", 1), ("BF16", 2)):
            _, _, content = read_file(self.cast(source, dtype))["t"]
            self.assertEqual([hex(bits) for bits in struct.unpack(f"<{len(rows)}H", content)],
                             [hex(row[column]) for row in rows])

    # Fault: widening that is not exact, or a copy that is not one.
    def test_there_and_back(self):
        source = os.path.join(BUILTIN, "model.safetensors")
        there = self.cast(source, "F32")
        back = self.cast(there, "F16")
        self.assertEqual(read_file(source), read_file(back))
        with open(source, "rb") as first, open(back, "rb") as second:
            self.assertEqual(first.read(), second.read())

    # Fault: a value beyond F16 that becomes infinity silently.
    def test_overflow_is_refused(self):
        source = self.write_one("F32", struct.pack("<f", 1e6))
        target = self.path("out.safetensors")
        result = run_tool("safetensors_cast.py", source, target, "--dtype", "F16")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("t: expected values in the range of F16", result.stderr)
        self.assertFalse(os.path.exists(target))
        self.assertFalse(os.path.exists(target + ".partial"))


KNOWN_BYTES = "cd3d203ea5bc88bd4b3d4abb963df1bd"

if __name__ == "__main__":
    unittest.main()
