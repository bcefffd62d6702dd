/* SPDX-License-Identifier: Apache-2.0 */
/* The patterns by which the GPT-2, Llama-3 and Qwen2 families cut a text into the words that are
 * merged apart from each other. They are one pattern with a few differences, which struct
 * word_rules names. The alternatives are tried in their order at each place, written out by hand:
 * every word is found in one or two passes over it, so a text takes linear time, which a
 * backtracking engine does not promise. */
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "model/unicode_kind.h"

struct word_rules {
    const char *pattern;
    bool folds_contractions; /* 'S is as good as 's */
    bool takes_any_prefix;   /* before letters: any character but these and line breaks; else " " */
    bool takes_line_breaks;  /* after punctuation, and white space up to them is a word */
    bool digits_take_space;  /* one before them */
    size_t max_digits;       /* of one word */
};

/* Hugging Face's files of GPT2Tokenizer (ByteLevel's own pattern), Qwen2Tokenizer and Llama-3. */
static const struct word_rules rules_of[NUM_WORD_PATTERNS] = {
    [WORD_PATTERN_GPT2] =
        {
            .pattern = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
                       "|\\s+(?!\\S)|\\s+",
            .digits_take_space = true,
            .max_digits = SIZE_MAX,
        },
    [WORD_PATTERN_QWEN2] =
        {
            .pattern = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
                       "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
            .folds_contractions = true,
            .takes_any_prefix = true,
            .takes_line_breaks = true,
            .max_digits = 1,
        },
    [WORD_PATTERN_LLAMA3] =
        {
            .pattern = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
                       "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
            .folds_contractions = true,
            .takes_any_prefix = true,
            .takes_line_breaks = true,
            .max_digits = 3,
        },
};

const char *word_pattern_text(enum word_pattern pattern)
{
    return rules_of[pattern].pattern;
}

bool word_pattern_find(const char *text, enum word_pattern *pattern)
{
    for (int i = 0; i < NUM_WORD_PATTERNS; i++) {
        if (strcmp(text, rules_of[i].pattern) == 0) {
            *pattern = (enum word_pattern)i;
            return true;
        }
    }
    return false;
}

/* Each character is of one kind. */
enum char_kind {
    KIND_OTHER,
    KIND_LETTER,  /* \p{L} */
    KIND_NUMBER,  /* \p{N} */
    KIND_SPACE,   /* \s but [\r\n] */
    KIND_NEWLINE, /* [\r\n] */
    KIND_END,     /* the text ends */
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

/* The kind of the character at `at`, and where the next one begins. */
static enum char_kind kind_at(const char *text, size_t num_bytes, size_t at, size_t *next)
{
    static const unsigned char kind_of[] = {
        [UNICODE_OTHER] = KIND_OTHER,  [UNICODE_LETTER] = KIND_LETTER,
        [UNICODE_DIGIT] = KIND_NUMBER, [UNICODE_NUMBER] = KIND_NUMBER,
        [UNICODE_SPACE] = KIND_SPACE,  [UNICODE_WORD] = KIND_OTHER,
    };
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
    return (enum char_kind)kind_of[unicode_kind(step.code_point)];
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

static size_t digits_end(const char *text, size_t num_bytes, size_t at, size_t max_digits)
{
    size_t next;
    for (size_t i = 0; i < max_digits && kind_at(text, num_bytes, at, &next) == KIND_NUMBER; i++) {
        at = next;
    }
    return at;
}

/* 's 't 're 've 'm 'll 'd; 0 if there is none. U+017F, a long s, folds to s. */
static size_t contraction_bytes(const char *text, size_t num_bytes, bool folds)
{
    if (num_bytes < 2 || text[0] != '\'') {
        return 0;
    }
    int folded_bit = folds ? 0x20 : 0;
    int first = text[1] | folded_bit, second = num_bytes > 2 ? text[2] | folded_bit : 0;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') {
        return 2;
    }
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
        (first == 'l' && second == 'l')) {
        return 3;
    }
    return folds && num_bytes > 2 && text[1] == '\xc5' && text[2] == '\xbf' ? 3 : 0;
}

/* A run of white space that no other alternative takes: up to its last line break, if it has one
 * (\s*[\r\n]+); else all of it at the end of the text, or all but the last character before more
 * (\s+(?!\S)); else that one character (\s+). */
static size_t space_bytes(const char *text, size_t num_bytes, bool takes_line_breaks)
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
    if (takes_line_breaks && last_newline_end > 0) {
        return last_newline_end;
    }
    return at == num_bytes || last_begin == 0 ? at : last_begin;
}

size_t word_next(enum word_pattern pattern, const char *text, size_t num_bytes)
{
    const struct word_rules *rules = &rules_of[pattern];
    size_t contraction = contraction_bytes(text, num_bytes, rules->folds_contractions);
    if (contraction > 0) {
        return contraction;
    }
    size_t second, third;
    enum char_kind kind = kind_at(text, num_bytes, 0, &second);
    if (kind == KIND_LETTER) {
        return run_end(text, num_bytes, second, KIND_LETTER);
    }
    if (kind == KIND_NUMBER) {
        return digits_end(text, num_bytes, 0, rules->max_digits);
    }
    if (kind == KIND_NEWLINE) {
        return space_bytes(text, num_bytes, rules->takes_line_breaks);
    }
    enum char_kind second_kind = kind_at(text, num_bytes, second, &third);
    if (second_kind == KIND_LETTER && (rules->takes_any_prefix || text[0] == ' ')) {
        return run_end(text, num_bytes, third, KIND_LETTER);
    }
    if (second_kind == KIND_NUMBER && rules->digits_take_space && text[0] == ' ') {
        return digits_end(text, num_bytes, second, rules->max_digits);
    }
    bool is_punctuation = kind == KIND_OTHER || (text[0] == ' ' && second_kind == KIND_OTHER);
    if (is_punctuation) {
        size_t end = run_end(text, num_bytes, second, KIND_OTHER);
        return rules->takes_line_breaks ? run_end(text, num_bytes, end, KIND_NEWLINE) : end;
    }
    return space_bytes(text, num_bytes, rules->takes_line_breaks);
}
