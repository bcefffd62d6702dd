#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes src/model/unicode_tables.c. usage: make_unicode_tables.py >src/model/unicode_tables.c

Needs Unicode 16.0, which Hugging Face's tokenizers split by (PyPI: unicodedata2==16.0.0), and
Unicode 14.0, which Debian 12's PCRE2 knows (Python 3.11's unicodedata).
"""
import sys
import unicodedata as older

import unicodedata2 as newer

# As in unicode_kind.h.
OTHER, LETTER, DIGIT, NUMBER, SPACE, WORD = range(6)
BLOCK = 128
WHITE_SPACE = (
    {*range(0x9, 0xE), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)}
    | {0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
)
# Alphabetic (Other_Alphabetic, PropList.txt) but neither letter, number nor mark; Join_Control.
WORD_EXTRA = {*range(0x24B6, 0x24EA), *range(0x1F130, 0x1F14A), *range(0x1F150, 0x1F16A),
              *range(0x1F170, 0x1F18A), 0x200C, 0x200D}


def kind(code_point):
    category = newer.category(chr(code_point))
    if code_point in WHITE_SPACE:
        return SPACE
    if category[0] == "L":
        return LETTER
    if category in ("Nd", "Nl"):
        return DIGIT
    if category == "No":
        return NUMBER
    if category[0] == "M" or category == "Pc" or code_point in WORD_EXTRA:
        return WORD
    return OTHER


def print_array(declaration, values, form):
    print(f"{declaration} = {{")
    line = "   "
    for value in values:
        item = f" {form.format(value)},"
        if len(line) + len(item) > 100:
            print(line)
            line = "   "
        line += item
    print(line)
    print("};")


def later_ranges():
    """(first, last, category) of what Unicode 14.0 had not assigned."""
    ranges = []
    for code_point in range(0x110000):
        before, now = older.category(chr(code_point)), newer.category(chr(code_point))
        if before == now:
            continue
        if before != "Cn":
            print(f"U+{code_point:04X} was {before}, is {now}", file=sys.stderr)
            continue
        if ranges and ranges[-1][1] == code_point - 1 and ranges[-1][2] == now:
            ranges[-1][1] = code_point
        else:
            ranges.append([code_point, code_point, now])
    return ranges


def main():
    if (newer.unidata_version, older.unidata_version) != ("16.0.0", "14.0.0"):
        sys.exit(f"make_unicode_tables.py: expected Unicode 16.0.0 and 14.0.0, found "
                 f"{newer.unidata_version} and {older.unidata_version}")
    kinds = [kind(code_point) for code_point in range(0x110000)]
    # Beyond the last letter there are only variation selectors, which unicode_kind() knows.
    end = max(c for c in range(0xE0000) if kinds[c] != OTHER) + 1
    end += -end % BLOCK
    for code_point in range(end, 0x110000):
        expected = WORD if 0xE0100 <= code_point <= 0xE01EF else OTHER
        assert kinds[code_point] == expected, hex(code_point)
    blocks, block_of = [], []
    for begin in range(0, end, BLOCK):
        block = tuple(kinds[begin:begin + BLOCK])
        if block not in blocks:
            blocks.append(block)
        block_of.append(blocks.index(block))
    assert len(blocks) <= 256
    print("/* SPDX-License-Identifier: Apache-2.0 */")
    print("/* Made by tools/make_unicode_tables.py from Unicode 16.0; see unicode_kind.h. */")
    print("/* clang-format off */")
    print('#include "model/unicode_kind.h"\n')
    print_array(f"const uint8_t unicode_block_of[UNICODE_NUM_BLOCKS]", block_of, "{}")
    print()
    packed = [block[i] | block[i + 1] << 4 for block in blocks for i in range(0, BLOCK, 2)]
    print_array(f"const uint8_t unicode_kind_pairs[{len(packed)}]", packed, "0x{:02x}")
    print()
    ranges = later_ranges()
    items = [f'{{0x{first:04x}, 0x{last:04x}, "{category}"}}' for first, last, category in ranges]
    print_array("const struct unicode_later_range unicode_later_ranges[]", items, "{}")
    print("const size_t unicode_num_later_ranges =")
    print("    sizeof(unicode_later_ranges) / sizeof(unicode_later_ranges[0]);")
    print(f"unicode blocks: {end // BLOCK}, {len(blocks)} distinct", file=sys.stderr)


main()
