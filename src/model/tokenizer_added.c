/* SPDX-License-Identifier: Apache-2.0 */
/* Finds added tokens ("<|im_end|>") in a text: sorted by content, those that begin as the text does
 * are narrowed down byte by byte. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "model/tokenizer_internal.h"

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
                             "%s: added_tokens: expected each content once, found \"%.60s\" with "
                             "ids %d and %d",
                             path, tokens[i].content, tokens[i - 1].id, tokens[i].id);
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

/* The longest token that the text begins with; num_bytes >= 1. */
static const struct added_token *longest_token(const struct added_tokens *added, const char *text,
                                               size_t num_bytes, bool parse_special)
{
    const struct added_token *longest = NULL;
    unsigned byte = (unsigned char)text[0];
    int32_t low = added->first[byte], high = added->first[byte + 1];
    for (size_t matched = 1; low < high; matched++) {
        const struct added_token *shortest = &added->tokens[low];
        if (shortest->num_bytes == matched) {
            if (parse_special || !shortest->is_special) {
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

const struct added_token *added_tokens_find(const struct added_tokens *added, const char *text,
                                            size_t num_bytes, size_t begin, bool parse_special,
                                            size_t *position)
{
    if (added->num_tokens == 0) {
        return NULL;
    }
    for (size_t at = begin; at < num_bytes; at++) {
        unsigned byte = (unsigned char)text[at];
        if (added->first[byte] == added->first[byte + 1]) {
            continue;
        }
        const struct added_token *token =
            longest_token(added, text + at, num_bytes - at, parse_special);
        if (token != NULL) {
            *position = at;
            return token;
        }
    }
    return NULL;
}
