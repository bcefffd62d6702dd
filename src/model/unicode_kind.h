/* SPDX-License-Identifier: Apache-2.0 */
/* What kind of character a code point is, by Unicode 16.0: the version that Hugging Face's
 * tokenizers split by. The tables are part of the tree (tools/make_unicode_tables.py) rather than
 * taken from an installed library, so that the same text gives the same ids everywhere; a lookup
 * is two loads. */
#ifndef IMBREX_MODEL_UNICODE_KIND_H
#define IMBREX_MODEL_UNICODE_KIND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum unicode_kind {
    UNICODE_OTHER,
    UNICODE_LETTER, /* \p{L} */
    UNICODE_DIGIT,  /* \p{Nd}, \p{Nl} */
    UNICODE_NUMBER, /* \p{No} */
    UNICODE_SPACE,  /* White_Space: \s */
    UNICODE_WORD,   /* \w that is none of those: marks, connectors, circled letters, joiners */
};

#define UNICODE_BLOCK 128
#define UNICODE_NUM_BLOCKS 1608
#define UNICODE_END (UNICODE_NUM_BLOCKS * UNICODE_BLOCK)

/* The distinct blocks, two kinds a byte, the first one in the low half. */
extern const uint8_t unicode_block_of[UNICODE_NUM_BLOCKS];
extern const uint8_t unicode_kind_pairs[];

static inline enum unicode_kind unicode_kind(uint32_t code_point)
{
    if (code_point >= UNICODE_END) {
        return code_point >= 0xe0100 && code_point <= 0xe01ef ? UNICODE_WORD : UNICODE_OTHER;
    }
    size_t at = (size_t)unicode_block_of[code_point / UNICODE_BLOCK] * UNICODE_BLOCK +
                code_point % UNICODE_BLOCK;
    return (enum unicode_kind)(unicode_kind_pairs[at / 2] >> at % 2 * 4 & 0xf);
}

static inline bool unicode_is_number(uint32_t code_point)
{
    enum unicode_kind kind = unicode_kind(code_point);
    return kind == UNICODE_DIGIT || kind == UNICODE_NUMBER;
}

static inline bool unicode_is_space(uint32_t code_point)
{
    return unicode_kind(code_point) == UNICODE_SPACE;
}

/* \w: Alphabetic, marks, decimal numbers, connectors and joiners. */
static inline bool unicode_is_word(uint32_t code_point)
{
    enum unicode_kind kind = unicode_kind(code_point);
    return kind == UNICODE_LETTER || kind == UNICODE_DIGIT || kind == UNICODE_WORD;
}

/* What Unicode 14.0, which PCRE2 10.42 knows, had not assigned yet. */
struct unicode_later_range {
    uint32_t first, last;
    char category[3]; /* "Lu" */
};
extern const struct unicode_later_range unicode_later_ranges[];
extern const size_t unicode_num_later_ranges;

#endif
