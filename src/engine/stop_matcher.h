/* SPDX-License-Identifier: Apache-2.0 */
/* Finds stop strings in a text that arrives in pieces. Text is passed on as soon as no stop string
 * can begin in it any more, so that a stop string is never shown, not even in part. */
#ifndef IMBREX_ENGINE_STOP_MATCHER_H
#define IMBREX_ENGINE_STOP_MATCHER_H

#include <stdbool.h>

#include "base/status.h"

struct stop_matcher {
    char **strings; /* [num_strings], none empty */
    size_t *string_bytes;
    size_t num_strings;
    char *text; /* [capacity]: what is held back, then the newest piece */
    size_t num_bytes, capacity;
};

/* Copies the strings; pieces may have up to max_piece_bytes. INVALID_ARGUMENT for an empty one. */
enum imbrex_status stop_matcher_create(const char *const *strings, size_t num_strings,
                                       size_t max_piece_bytes, struct stop_matcher *matcher,
                                       struct imbrex_error *err);
/* Safe on a zeroed struct. */
void stop_matcher_destroy(struct stop_matcher *matcher);

/* Where the caller writes the next piece: max_piece_bytes of room. */
char *stop_matcher_piece(struct stop_matcher *matcher);

/* Takes the num_bytes written there; is_last says that no more will come. The text to pass on is
 * [0, *num_ready) of matcher->text, to be read before stop_matcher_drop. Returns true if a stop
 * string begins right after it; of several, the one that begins first. */
bool stop_matcher_push(struct stop_matcher *matcher, size_t num_bytes, bool is_last,
                       size_t *num_ready);

/* Forgets the num_ready bytes that were passed on. */
void stop_matcher_drop(struct stop_matcher *matcher, size_t num_ready);

#endif
