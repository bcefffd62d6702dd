#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the files beside it. Needs gguf and numpy; run by hand: make_goldens.py [FOLDER]

<type>.blocks     random blocks, any bits; scales mostly finite
<type>.f32        what gguf.quants.dequantize makes of them
rows.f32          16 rows of 256 values, each with a difficulty of its own
<type>.quantized  what gguf.quants.quantize makes of the rows (types that the package quantises)
"""
import os
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

DEQUANTIZED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
QUANTIZED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
NUM_VALUES = {1: 512, 32: 768, 256: 1536}
# Where a block's F16 scales lie.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(rng, name):
    block_size, block_bytes = GGML_QUANT_SIZES[Type[name]]
    num_blocks = NUM_VALUES[block_size] // block_size
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    for offset in SCALES.get(name, ()):
        # Any finite half, subnormal ones and zero included; the last block keeps its random bits.
        bits = rng.integers(0, 0x7c00, num_blocks - 1).astype(np.uint16)
        bits |= rng.integers(0, 2, num_blocks - 1).astype(np.uint16) << 15
        bits[0] = 0x0001
        bits[1] = 0x8000
        blocks[:-1, offset:offset + 2] = bits.view(np.uint8).reshape(-1, 2)
    return blocks


def make_rows(rng):
    rows = rng.standard_normal((16, 256)).astype(np.float32)
    rows[1] = 0
    rows[2] = 0.37
    rows[3] = -2.5
    rows[4, 100] = 1000                              # one huge element
    rows[5] = np.round(rows[5] * 4) / 4              # ties
    rows[6] = np.arange(256) - 127.5                 # halves after division by 1
    rows[7] *= np.float32(1e-7)                      # scales that F16 holds as subnormals
    rows[8] *= np.float32(1e-20)                     # and not at all
    rows[9] = np.abs(rows[9])
    rows[10] = -np.abs(rows[10])
    rows[11] *= np.float32(3e4)                      # near the end of F16
    rows[12, ::2] = 0
    rows[13] = np.where(np.arange(256) % 32 == 31, -1.0, 1.0)  # equal magnitudes, two signs
    rows[14] = rng.standard_t(2, 256)
    rows[15] = np.float32(0.02) * rows[15]
    return rows.astype(np.float32)


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    rng = np.random.default_rng(20240229)

    def write(name, array):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(np.ascontiguousarray(array).tobytes())

    with np.errstate(all="ignore"):
        for name in DEQUANTIZED:
            blocks = random_blocks(rng, name)
            write(name + ".blocks", blocks)
            write(name + ".f32", dequantize(blocks, Type[name]).astype(np.float32))
        rows = make_rows(rng)
        write("rows.f32", rows)
        for name in QUANTIZED:
            write(name + ".quantized", quantize(rows, Type[name]))


if __name__ == "__main__":
    main()
