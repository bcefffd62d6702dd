#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes Qwen2.5's tokenizer.json, 7 MB, from the 0.5 MB that the tree holds of it.

    make_qwen2_5_tokenizer.py OUT_DIR

The vocabulary is not stored, because it follows from the merges: first the 256 characters that
stand for bytes, then what each merge makes, in order. tests/golden/tokenizers/qwen2.5/ has the
merges and, in skeleton.json, everything else. The result is compared with the SHA-256 in
tokenizer.sha256 before anything is written.
"""
import bz2
import hashlib
import json
import os
import sys

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizers", "qwen2.5")


def byte_characters():
    """GPT-2's alphabet in the order of its ids: printable bytes of Latin-1, then all others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def canonical_sha256(tokenizer):
    """SHA-256 of the content: it does not depend on white space or on the order of the keys."""
    text = json.dumps(tokenizer, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def make_tokenizer():
    with open(os.path.join(SOURCE, "merges.txt.bz2"), "rb") as file:
        merges = bz2.decompress(file.read()).decode("utf-8").split("\n")[:-1]
    with open(os.path.join(SOURCE, "skeleton.json"), encoding="utf-8") as file:
        tokenizer = json.load(file)
    tokens = byte_characters() + [merge.replace(" ", "") for merge in merges]
    tokenizer["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
    tokenizer["model"]["merges"] = merges
    return tokenizer


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_qwen2_5_tokenizer.py OUT_DIR")
    tokenizer = make_tokenizer()
    with open(os.path.join(SOURCE, "tokenizer.sha256"), encoding="ascii") as file:
        expected = file.read().split()[0]
    found = canonical_sha256(tokenizer)
    if found != expected:
        sys.exit(f"{SOURCE}: expected content with SHA-256 {expected}, found {found}")
    os.makedirs(sys.argv[1], exist_ok=True)
    path = os.path.join(sys.argv[1], "tokenizer.json")
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(tokenizer, file, ensure_ascii=False, indent=1)
        file.write("\n")
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
