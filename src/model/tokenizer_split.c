/* SPDX-License-Identifier: Apache-2.0 */
/* Qwen2's pre-tokenizer: cuts a text into the words that are merged apart from each other. The
 * pattern is Qwen2Tokenizer's PRETOKENIZE_REGEX (Hugging Face transformers, tokenization_qwen2.py).
 * Its alternatives are tried in their order at each place, written out by hand: every word is found
 * in one or two passes over it, so a text takes linear time, which a backtracking engine does not
 * promise. */
#include <utf8proc.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"

const char qwen2_split_pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* Each character is of one kind. */
enum char_kind {
    KIND_OTHER,
    KIND_LETTER,  /* \p{L} */
    KIND_NUMBER,  /* \p{N} */
    KIND_SPACE,   /* \s but [\r\n] */
    KIND_NEWLINE, /* [\r\n] */
    KIND_END,     /* the text ends */
};

/* Letters and numbers that Unicode 15.1 and 16.0 added. Hugging Face's tokenizers know them, Debian
 * 12's utf8proc 2.8 (Unicode 15.0) does not. */
struct kind_range {
    uint32_t first, last;
    enum char_kind kind;
};

static const struct kind_range newer_ranges[] = {
    {0x01c89, 0x01c8a, KIND_LETTER}, {0x0a7cb, 0x0a7cd, KIND_LETTER},
    {0x0a7da, 0x0a7dc, KIND_LETTER}, {0x105c0, 0x105f3, KIND_LETTER},
    {0x10d40, 0x10d49, KIND_NUMBER}, {0x10d4a, 0x10d65, KIND_LETTER},
    {0x10d6f, 0x10d85, KIND_LETTER}, {0x10ec2, 0x10ec4, KIND_LETTER},
    {0x11380, 0x11389, KIND_LETTER}, {0x1138b, 0x1138b, KIND_LETTER},
    {0x1138e, 0x1138e, KIND_LETTER}, {0x11390, 0x113b5, KIND_LETTER},
    {0x113b7, 0x113b7, KIND_LETTER}, {0x113d1, 0x113d1, KIND_LETTER},
    {0x113d3, 0x113d3, KIND_LETTER}, {0x116d0, 0x116e3, KIND_NUMBER},
    {0x11bc0, 0x11be0, KIND_LETTER}, {0x11bf0, 0x11bf9, KIND_NUMBER},
    {0x13460, 0x143fa, KIND_LETTER}, {0x16100, 0x1611d, KIND_LETTER},
    {0x16130, 0x16139, KIND_NUMBER}, {0x16d40, 0x16d6c, KIND_LETTER},
    {0x16d70, 0x16d79, KIND_NUMBER}, {0x18cff, 0x18cff, KIND_LETTER},
    {0x1ccf0, 0x1ccf9, KIND_NUMBER}, {0x1e5d0, 0x1e5ed, KIND_LETTER},
    {0x1e5f0, 0x1e5f0, KIND_LETTER}, {0x1e5f1, 0x1e5fa, KIND_NUMBER},
    {0x2ebf0, 0x2ee5d, KIND_LETTER},
};

static enum char_kind ascii_kind(unsigned char byte)
{
    if ((byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z')) {
        return KIND_LETTER;
    }
    if (byte >= '0' && byte <= '9') {
        return KIND_NUMBER;
    }
    if (byte == '\n' || byte == '\r') {
        return KIND_NEWLINE;
    }
    if (byte == ' ' || (byte >= '\t' && byte <= '\r')) {
        return KIND_SPACE;
    }
    return KIND_OTHER;
}

/* White_Space beyond ASCII, as PropList.txt has it. */
static bool is_unicode_space(uint32_t code_point)
{
    return code_point == 0x85 || code_point == 0xa0 || code_point == 0x1680 ||
           (code_point >= 0x2000 && code_point <= 0x200a) || code_point == 0x2028 ||
           code_point == 0x2029 || code_point == 0x202f || code_point == 0x205f ||
           code_point == 0x3000;
}

static enum char_kind newer_kind(uint32_t code_point)
{
    for (size_t i = 0; i < sizeof(newer_ranges) / sizeof(newer_ranges[0]); i++) {
        if (code_point >= newer_ranges[i].first && code_point <= newer_ranges[i].last) {
            return newer_ranges[i].kind;
        }
    }
    return KIND_OTHER;
}

static enum char_kind unicode_kind(uint32_t code_point)
{
    if (is_unicode_space(code_point)) {
        return KIND_SPACE;
    }
    switch (utf8proc_category((utf8proc_int32_t)code_point)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
        return KIND_LETTER;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        return KIND_NUMBER;
    case UTF8PROC_CATEGORY_CN:
        return newer_kind(code_point);
    default:
        return KIND_OTHER;
    }
}

/* The kind of the character at `at`, and where the next one begins. */
static enum char_kind kind_at(const char *text, size_t num_bytes, size_t at, size_t *next)
{
    *next = at;
    if (at == num_bytes) {
        return KIND_END;
    }
    unsigned char byte = (unsigned char)text[at];
    if (byte < 0x80) {
        *next = at + 1;
        return ascii_kind(byte);
    }
    struct utf8_step step = utf8_next(text + at, num_bytes - at);
    *next = at + step.num_bytes;
    return unicode_kind(step.code_point);
}

/* Where the run of characters of this kind that begins at `at` ends. */
static size_t run_end(const char *text, size_t num_bytes, size_t at, enum char_kind kind)
{
    size_t next;
    while (kind_at(text, num_bytes, at, &next) == kind) {
        at = next;
    }
    return at;
}

/* 's 't 're 've 'm 'll 'd in either case; 0 if there is none. U+017F, a long s, folds to s. */
static size_t contraction_bytes(const char *text, size_t num_bytes)
{
    if (num_bytes < 2 || text[0] != '\'') {
        return 0;
    }
    int first = text[1] | 0x20, second = num_bytes > 2 ? text[2] | 0x20 : 0;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') {
        return 2;
    }
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
        (first == 'l' && second == 'l')) {
        return 3;
    }
    return num_bytes > 2 && text[1] == '\xc5' && text[2] == '\xbf' ? 3 : 0;
}

/* A run of white space that no other alternative takes: up to its last line break, if it has one
 * (\s*[\r\n]+); else all of it at the end of the text, or all but the last character before more
 * (\s+(?!\S)); else that one character (\s+). */
static size_t space_bytes(const char *text, size_t num_bytes)
{
    size_t at = 0, next, last_begin = 0, last_newline_end = 0;
    for (;;) {
        enum char_kind kind = kind_at(text, num_bytes, at, &next);
        if (kind != KIND_SPACE && kind != KIND_NEWLINE) {
            break;
        }
        last_begin = at;
        at = next;
        if (kind == KIND_NEWLINE) {
            last_newline_end = at;
        }
    }
    if (last_newline_end > 0) {
        return last_newline_end;
    }
    return at == num_bytes || last_begin == 0 ? at : last_begin;
}

size_t qwen2_split_next(const char *text, size_t num_bytes)
{
    size_t contraction = contraction_bytes(text, num_bytes);
    if (contraction > 0) {
        return contraction;
    }
    size_t second, third;
    enum char_kind kind = kind_at(text, num_bytes, 0, &second);
    if (kind == KIND_LETTER) {
        return run_end(text, num_bytes, second, KIND_LETTER);
    }
    if (kind == KIND_NUMBER) {
        return second;
    }
    if (kind == KIND_NEWLINE) {
        return space_bytes(text, num_bytes);
    }
    enum char_kind second_kind = kind_at(text, num_bytes, second, &third);
    if (second_kind == KIND_LETTER) {
        return run_end(text, num_bytes, third, KIND_LETTER);
    }
    bool is_punctuation = kind == KIND_OTHER || (text[0] == ' ' && second_kind == KIND_OTHER);
    if (is_punctuation) {
        size_t end = run_end(text, num_bytes, second, KIND_OTHER);
        return run_end(text, num_bytes, end, KIND_NEWLINE);
    }
    return space_bytes(text, num_bytes);
}
