#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts the floating-point tensors of a safetensors file to another type.

Values are rounded to the nearest, ties to even; a value that the target cannot hold is an error.
Tensors of other types are copied as they are. Python's standard library only.
"""
import argparse
import contextlib
import json
import os
import struct
import sys

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
         "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}
FLOATS = ("F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000
CHUNK_ELEMENTS = 1 << 16


def read_header(source, path):
    """The tensors of an open file as {name: entry}, its metadata, and where the data begins."""
    length_bytes = source.read(8)
    if len(length_bytes) != 8:
        raise ValueError(f"{path}: expected 8 bytes of header length, found {len(length_bytes)}")
    (length,) = struct.unpack("<Q", length_bytes)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: header length: expected at most {MAX_HEADER_BYTES}, "
                         f"found {length}")
    header_bytes = source.read(length)
    if len(header_bytes) != length:
        raise ValueError(f"{path}: header: expected {length} bytes, found {len(header_bytes)}")
    header = json.loads(header_bytes)
    metadata = header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in SIZES:
            raise ValueError(f"{path}: {name}: dtype: expected one of {', '.join(SIZES)}, "
                             f"found {entry['dtype']}")
    return header, metadata, 8 + length


def write_header(target, tensors, metadata):
    """Writes the header as the reference writer does: compact, padded to 8 bytes with spaces.

    `tensors` is a list of (name, dtype, shape, num_bytes) in the order of their data.
    """
    header = {}
    if metadata is not None:
        header["__metadata__"] = metadata
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        begin, offset = offset, offset + num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, offset]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    target.write(struct.pack("<Q", len(text)) + text)


def widen(chunk, dtype):
    """Little-endian bytes of a float type to a tuple of Python floats, exactly."""
    if dtype == "F32":
        return struct.unpack(f"<{len(chunk) // 4}f", chunk)
    if dtype == "F16":
        return struct.unpack(f"<{len(chunk) // 2}e", chunk)
    wide = bytearray(2 * len(chunk))
    wide[2::4] = chunk[0::2]
    wide[3::4] = chunk[1::2]
    return struct.unpack(f"<{len(chunk) // 2}f", bytes(wide))


def bf16_bits(bits):
    """The upper half of an fp32 pattern, rounded to nearest even; a NaN stays a NaN."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def narrow(values, dtype):
    if dtype == "F32":
        return struct.pack(f"<{len(values)}f", *values)
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    wide = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    return struct.pack(f"<{len(values)}H", *map(bf16_bits, wide))


@contextlib.contextmanager
def replacing(path):
    """A file under another name, which takes the place of `path` when it is whole."""
    partial_path = f"{path}.partial"
    try:
        with open(partial_path, "wb") as file:
            yield file
        os.replace(partial_path, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial_path)
        raise


def copy_tensor(source, source_path, name, num_bytes, old_dtype, new_dtype, target):
    """Casts num_bytes of the open source, from where it stands."""
    left = num_bytes
    while left > 0:
        chunk = source.read(min(left, CHUNK_ELEMENTS * SIZES[old_dtype]))
        if not chunk or len(chunk) % SIZES[old_dtype]:
            raise ValueError(f"{source_path}: {name}: expected {num_bytes} bytes, the file ends "
                             f"{left} bytes earlier")
        left -= len(chunk)
        if new_dtype != old_dtype:
            try:
                chunk = narrow(widen(chunk, old_dtype), new_dtype)
            except OverflowError:
                raise ValueError(f"{source_path}: {name}: expected values in the range of "
                                 f"{new_dtype}, found a larger one") from None
        target.write(chunk)


def cast(source_path, target_path, dtype):
    with open(source_path, "rb") as source:
        header, metadata, data_begin = read_header(source, source_path)
        tensors = []
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            new_dtype = dtype if entry["dtype"] in FLOATS else entry["dtype"]
            num_elements = (end - begin) // SIZES[entry["dtype"]]
            tensors.append((name, new_dtype, entry["shape"], num_elements * SIZES[new_dtype]))
        # Wide types first, then by name: every tensor stays aligned to its own type.
        tensors.sort(key=lambda tensor: (-SIZES[tensor[1]], tensor[0]))
        with replacing(target_path) as target:
            write_header(target, tensors, metadata)
            for name, new_dtype, _, _ in tensors:
                begin, end = header[name]["data_offsets"]
                source.seek(data_begin + begin)
                copy_tensor(source, source_path, name, end - begin, header[name]["dtype"],
                            new_dtype, target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="IN", help="a .safetensors file")
    parser.add_argument("target", metavar="OUT", help="the file to write")
    parser.add_argument("--dtype", choices=FLOATS, required=True, help="type of the result")
    arguments = parser.parse_args()
    try:
        cast(arguments.source, arguments.target, arguments.dtype)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"safetensors_cast: {error}")


if __name__ == "__main__":
    main()
