# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF files of unquantised tensors, as far as make_model.py needs it.

Python's standard library only. Source: docs/gguf.md of ggml-org/ggml.
"""
import math
import struct

ALIGNMENT = 32
TENSOR_TYPES = {"F32": (0, 4), "F16": (1, 2), "BF16": (30, 2)}
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's numbers

MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
               "lm_head": "output"}
LAYER_NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
               "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
               "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
               "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def tensor_name(name):
    """GGUF's name of a tensor, by Hugging Face's."""
    stem, kind = name.rsplit(".", 1)
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def metadata(config, dtype, name):
    """The keys of a configuration: {key: value}, ints as UINT32 and floats as FLOAT32."""
    architecture = config["model_type"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[dtype],
        f"{architecture}.vocab_size": config["vocab_size"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": config.get("num_key_value_heads", heads),
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.rope.dimension_count": head_dim,
        f"{architecture}.rope.freq_base": float(config.get("rope_theta", 10000.0)),
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    for field in ("bos_token_id", "eos_token_id"):
        if isinstance(config.get(field), int):
            values[f"tokenizer.ggml.{field}"] = config[field]
    return values


def text(value):
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def value_bytes(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def padding(num_bytes):
    return bytes(-num_bytes % ALIGNMENT)


def write_header(file, values, tensors):
    """Everything before the tensors' bytes. tensors: (name, dtype, shape) in their order."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    header += b"".join(text(key) + value_bytes(value) for key, value in values.items())
    offset = 0
    for name, dtype, shape in tensors:
        type_id, width = TENSOR_TYPES[dtype]
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", type_id, offset)
        num_bytes = math.prod(shape) * width
        offset += num_bytes + len(padding(num_bytes))
    file.write(header + padding(len(header)))


def interleave(head, row_bytes):
    """The rows of one head of q or k: halves become neighbours, as converters order them."""
    num_rows = len(head) // row_bytes
    rows = [head[i * row_bytes:(i + 1) * row_bytes] for i in range(num_rows)]
    return b"".join(rows[i % 2 * (num_rows // 2) + i // 2] for i in range(num_rows))


def interleaved(chunks, row_bytes, head_dim):
    """The chunks of a tensor with the rows of each head reordered; memory: a chunk and a head."""
    held, head_bytes = bytearray(), row_bytes * head_dim
    for chunk in chunks:
        held += chunk
        end = len(held) // head_bytes * head_bytes
        for begin in range(0, end, head_bytes):
            yield interleave(bytes(held[begin:begin + head_bytes]), row_bytes)
        del held[:end]
