#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint with random weights: a Hugging Face folder or a GGUF file of any shape.

The weights are about N(0, 1/in_features), so that activations stay finite and logits differ; norms
are about 1. A tensor depends on the seed, its name, its shape and the type only, not on the other
tensors or the number of files. Python's standard library only, with bounded memory.
"""
import argparse
import glob
import json
import math
import os
import random
import shutil
import statistics
import struct
import sys

import gguf_write
from safetensors_cast import SIZES, narrow, replacing, widen, write_header

DTYPES = {"bf16": ("BF16", "bfloat16"), "f16": ("F16", "float16"), "f32": ("F32", "float32")}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json")
CHUNK_ELEMENTS = 1 << 20
NORM_DEVIATION = 0.05
BIAS_DEVIATION = 0.1
SPARE_BYTES = 1 << 20  # of disk, for the small files


def qwen2_5(hidden_size, intermediate_size, layers, heads, kv_heads, vocab_size, tied):
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
            "hidden_size": hidden_size, "intermediate_size": intermediate_size,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab_size,
            "tie_word_embeddings": tied, "max_position_embeddings": 32768,
            "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "hidden_act": "silu",
            "use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151645}


def qwen3(hidden_size, intermediate_size, layers, heads, tied):
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "hidden_size": hidden_size, "intermediate_size": intermediate_size,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "tie_word_embeddings": tied, "max_position_embeddings": 40960,
            "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-06,
            "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
            "sliding_window": None, "max_window_layers": layers, "bos_token_id": 151643,
            "eos_token_id": 151645}


def llama(hidden_size, intermediate_size, layers, heads, kv_heads, vocab_size, positions,
          rope_theta, eos_token_id):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": hidden_size, "intermediate_size": intermediate_size,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab_size,
            "tie_word_embeddings": False, "max_position_embeddings": positions,
            "rope_theta": rope_theta, "rms_norm_eps": 1e-05, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "bos_token_id": eos_token_id - 1,
            "eos_token_id": eos_token_id}


SHAPES = {
    "qwen2.5-0.5b": qwen2_5(896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": qwen2_5(1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": qwen2_5(2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": qwen2_5(3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": qwen2_5(5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": qwen2_5(5120, 27648, 64, 40, 8, 152064, False),
    "qwen2.5-72b": qwen2_5(8192, 29568, 80, 64, 8, 152064, False),
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": qwen3(5120, 25600, 64, 64, False),
    "tinyllama-1.1b": llama(2048, 5632, 22, 32, 4, 32000, 2048, 10000.0, 2),
    "llama-2-7b": llama(4096, 11008, 32, 32, 32, 32000, 4096, 10000.0, 2),
    "llama-3-8b": llama(4096, 14336, 32, 32, 8, 128256, 8192, 500000.0, 128001),
    "llama-3.1-8b": {**llama(4096, 14336, 32, 32, 8, 128256, 131072, 500000.0, 128001),
                     "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "rope_type": "llama3",
                                      "original_max_position_embeddings": 8192}},
    "mistral-7b": {**llama(4096, 14336, 32, 32, 8, 32000, 32768, 10000.0, 2),
                   "architectures": ["MistralForCausalLM"], "model_type": "mistral",
                   "sliding_window": 4096},
}


MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")


class Error(Exception):
    """Something the user can mend; the text says what."""


# ---- shapes -------------------------------------------------------------------------------------

def load_config(shape):
    """The configuration of a named shape, or of a config.json or a folder with one."""
    if shape in SHAPES:
        return dict(SHAPES[shape])
    path = os.path.join(shape, "config.json") if os.path.isdir(shape) else shape
    if not os.path.exists(path):
        raise Error(f"{shape}: expected a config.json or one of {', '.join(SHAPES)}")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except ValueError as error:
        raise Error(f"{path}: expected JSON: {error}") from None
    if not isinstance(config, dict):
        raise Error(f"{path}: expected a JSON object, found {type(config).__name__}")
    if config.get("model_type") not in MODEL_TYPES:
        raise Error(f"{path}: model_type: expected {', '.join(MODEL_TYPES)}, "
                    f"found {config.get('model_type')!r}")
    return config


def dimension(config, field, default=None):
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Error(f"config.json: {field}: expected a positive integer, found {value!r}")
    return value


def tensor_list(config):
    """(name, shape, mean, deviation) of every tensor, in the order of a forward pass."""
    hidden = dimension(config, "hidden_size")
    intermediate = dimension(config, "intermediate_size")
    heads = dimension(config, "num_attention_heads")
    kv_heads = dimension(config, "num_key_value_heads", heads)
    model_type = config["model_type"]
    head_dim = dimension(config, "head_dim", 128 if model_type == "qwen3" else hidden // heads)
    vocab_size = dimension(config, "vocab_size")
    o_bias = model_type in ("llama", "qwen3") and bool(config.get("attention_bias"))
    qkv_bias = o_bias or model_type == "qwen2"
    mlp_bias = model_type == "llama" and bool(config.get("mlp_bias"))
    tensors = []

    def matrix(name, rows, columns, has_bias=False):
        tensors.append((f"{name}.weight", [rows, columns], 0.0, 1.0 / math.sqrt(columns)))
        if has_bias:
            tensors.append((f"{name}.bias", [rows], 0.0, BIAS_DEVIATION))

    def norm(name, width=hidden):
        tensors.append((f"{name}.weight", [width], 1.0, NORM_DEVIATION))

    matrix("model.embed_tokens", vocab_size, hidden)
    for layer in range(dimension(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm")
        if model_type == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        matrix(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
        matrix(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
        matrix(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
        matrix(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, o_bias)
        norm(f"{prefix}.post_attention_layernorm")
        matrix(f"{prefix}.mlp.gate_proj", intermediate, hidden, mlp_bias)
        matrix(f"{prefix}.mlp.up_proj", intermediate, hidden, mlp_bias)
        matrix(f"{prefix}.mlp.down_proj", hidden, intermediate, mlp_bias)
    norm("model.norm")
    if not config.get("tie_word_embeddings"):
        matrix("lm_head", vocab_size, hidden)
    return tensors


# ---- random numbers -----------------------------------------------------------------------------

def quantiles():
    """256 equally likely values of N(0, 1), scaled to a variance of exactly 1."""
    normal = statistics.NormalDist()
    values = [normal.inv_cdf((i + 0.5) / 256) for i in range(256)]
    deviation = math.sqrt(sum(value * value for value in values) / 256)
    return [value / deviation for value in values]


QUANTILES = quantiles()


class Generator:
    """The bytes of one tensor, chunk by chunk.

    A random byte picks one of 256 quantiles: two translation tables give the two upper bytes of its
    pattern. Further random bits replace the low bits of the mantissa (up to 6 % of the value), so
    that a tensor has thousands of distinct values. All of it is done by C loops over whole chunks.
    """

    def __init__(self, seed, name, dtype, mean, deviation):
        self.random = random.Random(f"imbrex/{seed}/{name}")
        self.dtype = dtype
        pack = "<e" if dtype == "F16" else "<f"
        patterns = [struct.pack(pack, mean + deviation * value)[-2:] for value in QUANTILES]
        # 3 of bf16's 7 mantissa bits, 6 of f16's 10; fp32 has 16 more random bits below.
        mask = 0x3F if dtype == "F16" else 0x07
        self.mask_byte = bytes([mask])
        self.low = bytes(pattern[0] & ~mask for pattern in patterns)
        self.high = bytes(pattern[1] for pattern in patterns)

    def chunk(self, num_elements):
        picks = self.random.getrandbits(8 * num_elements).to_bytes(num_elements, "little")
        mask = int.from_bytes(self.mask_byte * num_elements, "little")
        low = int.from_bytes(picks.translate(self.low), "little")
        low |= self.random.getrandbits(8 * num_elements) & mask
        width = SIZES[self.dtype]
        elements = bytearray(width * num_elements)
        elements[width - 2::width] = low.to_bytes(num_elements, "little")
        elements[width - 1::width] = picks.translate(self.high)
        if width == 4:
            tail = self.random.getrandbits(16 * num_elements).to_bytes(2 * num_elements, "little")
            elements[0::4] = tail[0::2]
            elements[1::4] = tail[1::2]
        return elements


# ---- files --------------------------------------------------------------------------------------

def split(tensors, dtype, shard_bytes):
    """The tensors in groups of at most shard_bytes, but at least one each; all, if it is None."""
    shards, used = [[]], 0
    for tensor in tensors:
        num_bytes = math.prod(tensor[1]) * SIZES[dtype]
        if shard_bytes and shards[-1] and used + num_bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += num_bytes
    return shards


def chunks_of(tensor, seed, dtype):
    """The bytes of a tensor, piece by piece."""
    name, shape, mean, deviation = tensor
    generator = Generator(seed, name, dtype, mean, deviation)
    left = math.prod(shape)
    while left > 0:
        num_elements = min(left, CHUNK_ELEMENTS)
        yield generator.chunk(num_elements)
        left -= num_elements


def write_shard(path, tensors, seed, dtype):
    with replacing(path) as file:
        write_header(file, [(name, dtype, shape, math.prod(shape) * SIZES[dtype])
                            for name, shape, _, _ in tensors], {"format": "pt"})
        for tensor in tensors:
            for chunk in chunks_of(tensor, seed, dtype):
                file.write(chunk)


def gguf_chunks(tensor, seed, dtype, config):
    """The same bytes as a GGUF file has them: vectors as F32, rows of llama's q and k reordered."""
    name, shape, _, _ = tensor
    chunks = chunks_of(tensor, seed, dtype)
    width = SIZES[dtype]
    if len(shape) == 1:
        chunks = (narrow(widen(bytes(chunk), dtype), "F32") for chunk in chunks)
        width = SIZES["F32"]
    if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        chunks = gguf_write.interleaved(chunks, width * math.prod(shape[1:]), head_dim)
    return chunks


def write_gguf(path, config, tensors, seed, dtype):
    with replacing(path) as file:
        name = os.path.splitext(os.path.basename(path))[0]
        gguf_write.write_header(
            file, gguf_write.metadata(config, dtype, name),
            [(gguf_write.tensor_name(tensor[0]), dtype if len(tensor[1]) > 1 else "F32", tensor[1])
             for tensor in tensors])
        for tensor in tensors:
            begin = file.tell()
            for chunk in gguf_chunks(tensor, seed, dtype, config):
                file.write(chunk)
            file.write(gguf_write.padding(file.tell() - begin))


def write_json(path, value):
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")


def check_disk(path, needed_bytes):
    parent = os.path.abspath(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise Error(f"{path}: expected {needed_bytes:,} bytes of free disk, found {free:,}")


def prepare_folder(folder, force, needed_bytes):
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise Error(f"{folder}: expected a folder or nothing, found a file")
    if os.path.isdir(folder) and os.listdir(folder) and not force:
        raise Error(f"{folder}: expected an empty folder, found files in it (--force overwrites)")
    check_disk(folder, needed_bytes)
    os.makedirs(folder, exist_ok=True)
    # Of an earlier run: weights that a loader might prefer to the new ones, and the configuration,
    # which comes last, so that a folder without one is known to be unfinished.
    for pattern in ("config.json", "model.safetensors", "model-*-of-*.safetensors",
                    "model.safetensors.index.json"):
        for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
            os.remove(path)


def make_gguf(arguments, config, dtype):
    path = arguments.out_dir
    if arguments.tokenizer or arguments.shard_bytes:
        raise Error(f"{path}: expected neither --tokenizer nor --shard-bytes with --gguf "
                    "(imbrex quantize FOLDER OUT.gguf writes a tokenizer)")
    if os.path.isdir(path) or (os.path.exists(path) and not arguments.force):
        raise Error(f"{path}: expected the name of a new file, found "
                    + ("a folder" if os.path.isdir(path) else "a file (--force overwrites)"))
    tensors = tensor_list(config)
    total_bytes = sum(math.prod(shape) * SIZES[dtype] for _, shape, _, _ in tensors)
    check_disk(path, total_bytes + SPARE_BYTES)
    write_gguf(path, config, tensors, arguments.seed, dtype)
    print(f"{path}: {config['model_type']}, "
          f"{sum(math.prod(tensor[1]) for tensor in tensors):,} parameters, "
          f"{os.path.getsize(path):,} bytes of GGUF")


def make_model(arguments):
    config = load_config(arguments.shape)
    if arguments.layers is not None:
        if config.get("layer_types"):
            kinds = config["layer_types"]
            config["layer_types"] = [kinds[i % len(kinds)] for i in range(arguments.layers)]
        config["num_hidden_layers"] = arguments.layers
    dtype, dtype_long = DTYPES[arguments.dtype]
    if arguments.gguf:
        make_gguf(arguments, config, dtype)
        return
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype_long
    if arguments.tokenizer and not os.path.isfile(os.path.join(arguments.tokenizer,
                                                               "tokenizer.json")):
        raise Error(f"{arguments.tokenizer}: expected a folder with tokenizer.json")

    tensors = tensor_list(config)
    num_parameters = sum(math.prod(shape) for _, shape, _, _ in tensors)
    total_bytes = num_parameters * SIZES[dtype]
    folder = arguments.out_dir
    prepare_folder(folder, arguments.force, total_bytes + SPARE_BYTES)

    shards = split(tensors, dtype, arguments.shard_bytes)
    weight_map = {}
    for i, shard in enumerate(shards):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        weight_map.update((tensor[0], name) for tensor in shard)
        write_shard(os.path.join(folder, name), shard, arguments.seed, dtype)
    if len(shards) > 1:
        write_json(os.path.join(folder, "model.safetensors.index.json"),
                   {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    if arguments.tokenizer:
        for name in TOKENIZER_FILES:
            path = os.path.join(arguments.tokenizer, name)
            if os.path.isfile(path):
                shutil.copyfile(path, os.path.join(folder, name))
    generation = {"do_sample": False}
    for field in ("bos_token_id", "eos_token_id"):
        if config.get(field) is not None:
            generation[field] = config[field]
    write_json(os.path.join(folder, "generation_config.json"), generation)
    write_json(os.path.join(folder, "config.json"), config)
    print(f"{folder}: {config['model_type']}, {num_parameters:,} parameters, "
          f"{total_bytes:,} bytes of {dtype} in {len(shards)} file(s)")


def positive(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog=f"Shapes: {', '.join(SHAPES)}.")
    parser.add_argument("shape", metavar="SHAPE|config.json",
                        help="a shape named below, or a configuration (qwen2, llama)")
    parser.add_argument("out_dir", metavar="OUT",
                        help="the folder to make; with --gguf, the file")
    parser.add_argument("--gguf", action="store_true",
                        help="write a GGUF file, without a tokenizer, instead of a folder")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16",
                        help="type of the weights (default bf16)")
    parser.add_argument("--shard-bytes", type=positive, metavar="N",
                        help="start a new file before one gets more than N bytes of tensors")
    parser.add_argument("--tokenizer", metavar="DIR",
                        help="copy the tokenizer files of this folder")
    parser.add_argument("--layers", type=positive, metavar="N", help="another number of layers")
    parser.add_argument("--force", action="store_true",
                        help="write into a folder that is not empty, replacing its weights")
    arguments = parser.parse_args()
    try:
        make_model(arguments)
    except (Error, OSError) as error:
        sys.exit(f"make_model: {error}")
    except KeyboardInterrupt:
        sys.exit("make_model: interrupted")


if __name__ == "__main__":
    main()
