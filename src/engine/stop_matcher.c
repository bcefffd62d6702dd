/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/stop_matcher.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

enum imbrex_status stop_matcher_create(const char *const *strings, size_t num_strings,
                                       size_t max_piece_bytes, struct stop_matcher *matcher,
                                       struct imbrex_error *err)
{
    struct stop_matcher created = {0};
    size_t max_string_bytes = 0;

    created.strings = calloc(num_strings + 1, sizeof(*created.strings));
    created.string_bytes = calloc(num_strings + 1, sizeof(*created.string_bytes));
    if (created.strings == NULL || created.string_bytes == NULL) {
        goto out_of_memory;
    }
    for (size_t i = 0; i < num_strings; i++) {
        size_t num_bytes = strings[i] == NULL ? 0 : strlen(strings[i]);
        if (num_bytes == 0) {
            stop_matcher_destroy(&created);
            return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                             "stop[%zu]: expected a text, found an empty one", i);
        }
        created.strings[i] = malloc(num_bytes);
        if (created.strings[i] == NULL) {
            goto out_of_memory;
        }
        memcpy(created.strings[i], strings[i], num_bytes);
        created.string_bytes[i] = num_bytes;
        created.num_strings = i + 1;
        max_string_bytes = num_bytes > max_string_bytes ? num_bytes : max_string_bytes;
    }
    if (!size_add(max_string_bytes, max_piece_bytes, &created.capacity)) {
        goto out_of_memory;
    }
    created.text = malloc(created.capacity + 1);
    if (created.text == NULL) {
        goto out_of_memory;
    }
    *matcher = created;
    return IMBREX_STATUS_OK;
out_of_memory:
    stop_matcher_destroy(&created);
    return error_out_of_memory(err, "the stop strings", max_string_bytes);
}

void stop_matcher_destroy(struct stop_matcher *matcher)
{
    for (size_t i = 0; i < matcher->num_strings; i++) {
        free(matcher->strings[i]);
    }
    free(matcher->strings);
    free(matcher->string_bytes);
    free(matcher->text);
    *matcher = (struct stop_matcher){0};
}

char *stop_matcher_piece(struct stop_matcher *matcher)
{
    return matcher->text + matcher->num_bytes;
}

/* Whether the text from `begin` on is a stop string (*is_whole), or the start of one. */
static bool may_be_stop(const struct stop_matcher *matcher, size_t begin, bool *is_whole)
{
    size_t num_left = matcher->num_bytes - begin;
    bool is_start = false;
    *is_whole = false;
    for (size_t i = 0; i < matcher->num_strings; i++) {
        size_t num_bytes = matcher->string_bytes[i];
        size_t num_compared = num_bytes < num_left ? num_bytes : num_left;
        if (memcmp(matcher->text + begin, matcher->strings[i], num_compared) == 0) {
            is_start = true;
            *is_whole = *is_whole || num_compared == num_bytes;
        }
    }
    return is_start;
}

bool stop_matcher_push(struct stop_matcher *matcher, size_t num_bytes, bool is_last,
                       size_t *num_ready)
{
    matcher->num_bytes += num_bytes;
    for (size_t begin = 0; begin < matcher->num_bytes; begin++) {
        bool is_whole;
        if (may_be_stop(matcher, begin, &is_whole) && (is_whole || !is_last)) {
            *num_ready = begin;
            return is_whole;
        }
    }
    *num_ready = matcher->num_bytes;
    return false;
}

void stop_matcher_drop(struct stop_matcher *matcher, size_t num_ready)
{
    matcher->num_bytes -= num_ready;
    memmove(matcher->text, matcher->text + num_ready, matcher->num_bytes);
}
