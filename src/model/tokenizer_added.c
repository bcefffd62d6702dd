/* SPDX-License-Identifier: Apache-2.0 */
/* Finds added tokens ("<|im_end|>") in a text: sorted by content, those that begin as the text does
 * are narrowed down byte by byte. What counts as found is what Hugging Face's tokenizers find:
 * first the leftmost and longest of all tokens, then the conditions that it may have. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "model/unicode_kind.h"

static int content_compare(const void *a, const void *b)
{
    const struct added_token *left = a, *right = b;
    size_t shared = left->num_bytes < right->num_bytes ? left->num_bytes : right->num_bytes;
    int order = memcmp(left->content, right->content, shared);
    if (order != 0) {
        return order;
    }
    return (left->num_bytes > right->num_bytes) - (left->num_bytes < right->num_bytes);
}

static unsigned char content_byte(const struct added_token *token, size_t at)
{
    return (unsigned char)token->content[at];
}

enum imbrex_status added_tokens_build(const char *path, struct added_token *tokens,
                                      int32_t num_tokens, struct added_tokens *added,
                                      struct imbrex_error *err)
{
    *added = (struct added_tokens){.tokens = tokens, .num_tokens = num_tokens};
    if (num_tokens == 0) {
        return IMBREX_STATUS_OK;
    }
    qsort(tokens, (size_t)num_tokens, sizeof(*tokens), content_compare);
    for (int32_t i = 1; i < num_tokens; i++) {
        if (content_compare(&tokens[i - 1], &tokens[i]) == 0) {
            return error_set(err, IMBREX_STATUS_FORMAT,
                             "%s: added_tokens: expected each content once, found \"%.*s\" with "
                             "ids %d and %d",
                             path, (int)(tokens[i].num_bytes < 60 ? tokens[i].num_bytes : 60),
                             tokens[i].content, tokens[i - 1].id, tokens[i].id);
        }
    }
    for (int32_t i = 0; i < num_tokens; i++) {
        added->first[content_byte(&tokens[i], 0) + 1]++;
    }
    for (int i = 1; i < 257; i++) {
        added->first[i] += added->first[i - 1];
    }
    return IMBREX_STATUS_OK;
}

void added_tokens_release(struct added_tokens *added)
{
    free(added->tokens);
    *added = (struct added_tokens){0};
}

/* The first token in [low, high), which agree in [0, at), whose byte at `at` is >= `byte`. All of
 * them are longer than `at`. */
static int32_t lower_bound(const struct added_tokens *added, int32_t low, int32_t high, size_t at,
                           unsigned byte)
{
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (content_byte(&added->tokens[middle], at) < byte) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

void special_rule_pass(struct special_rule *rule, size_t position)
{
    while (rule->num_inputs > 0 && rule->inputs[0].end <= position) {
        rule->inputs++;
        rule->num_inputs--;
    }
}

/* Bytes from `at` on in which a special token must lie for the inputs' sake. */
static size_t special_room(struct special_rule *rule, size_t at)
{
    size_t position = rule->origin + at;
    special_rule_pass(rule, position);
    if (rule->num_inputs == 0) {
        return SIZE_MAX;
    }
    return rule->inputs[0].begin > position ? rule->inputs[0].begin - position : 0;
}

/* The longest token that the text begins with, special ones of at most special_bytes; num_bytes >=
 * 1. */
static const struct added_token *longest_token(const struct added_tokens *added, const char *text,
                                               size_t num_bytes, size_t special_bytes)
{
    const struct added_token *longest = NULL;
    unsigned byte = (unsigned char)text[0];
    int32_t low = added->first[byte], high = added->first[byte + 1];
    for (size_t matched = 1; low < high; matched++) {
        const struct added_token *shortest = &added->tokens[low];
        if (shortest->num_bytes == matched) {
            if (!shortest->is_special || matched <= special_bytes) {
                longest = shortest;
            }
            low++;
        }
        if (matched == num_bytes) {
            break;
        }
        byte = (unsigned char)text[matched];
        low = lower_bound(added, low, high, matched, byte);
        high = lower_bound(added, low, high, matched, byte + 1);
    }
    return longest;
}

/* The character that ends at `end` >= 1. */
static uint32_t code_point_before(const char *text, size_t end, size_t *begin)
{
    *begin = end - 1;
    while (*begin > 0 && ((unsigned char)text[*begin] & 0xc0) == 0x80) {
        (*begin)--;
    }
    return utf8_next(text + *begin, end - *begin).code_point;
}

static bool stands_alone(const char *text, size_t num_bytes, size_t begin, size_t end)
{
    size_t before;
    if (begin > 0 && unicode_is_word(code_point_before(text, begin, &before))) {
        return false;
    }
    return end == num_bytes || !unicode_is_word(utf8_next(text + end, num_bytes - end).code_point);
}

/* Where the white space that ends at `end` begins, but not before `limit`. */
static size_t space_begin(const char *text, size_t limit, size_t end)
{
    size_t begin;
    while (end > limit && unicode_is_space(code_point_before(text, end, &begin))) {
        end = begin;
    }
    return end;
}

static size_t space_end(const char *text, size_t num_bytes, size_t begin)
{
    while (begin < num_bytes) {
        struct utf8_step step = utf8_next(text + begin, num_bytes - begin);
        if (!unicode_is_space(step.code_point)) {
            break;
        }
        begin += step.num_bytes;
    }
    return begin;
}

bool added_tokens_next(const struct added_tokens *added, const char *text, size_t num_bytes,
                       struct special_rule *rule, const struct added_match *previous,
                       struct added_match *match)
{
    size_t taken = previous->end;
    for (size_t at = previous->search_from; added->num_tokens > 0 && at < num_bytes;) {
        unsigned byte = (unsigned char)text[at];
        const struct added_token *token =
            added->first[byte] == added->first[byte + 1]
                ? NULL
                : longest_token(added, text + at, num_bytes - at, special_room(rule, at));
        if (token == NULL) {
            at++;
            continue;
        }
        size_t begin = at, end = at + token->num_bytes;
        at = end;
        if ((token->is_special && !rule->parse_special) ||
            (token->is_single_word && !stands_alone(text, num_bytes, begin, end))) {
            continue;
        }
        if (token->strips_left) {
            begin = space_begin(text, taken < begin ? taken : begin, begin);
        }
        /* White space that the previous token took may be the start of this one. */
        *match = (struct added_match){
            .token = token,
            .begin = begin > taken ? begin : taken,
            .end = token->strips_right ? space_end(text, num_bytes, end) : end,
            .search_from = end,
        };
        return true;
    }
    return false;
}
