/* SPDX-License-Identifier: Apache-2.0 */
/* How tiers tell of what went wrong: one line that says what, how often and why, when it is new,
 * and once a minute as long as there is more of it. */
#ifndef IMBREX_KV_KV_FAULT_LOG_H
#define IMBREX_KV_KV_FAULT_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zeroed at first. */
struct kv_fault_log {
    uint64_t num_told; /* faults that the log knows */
    int64_t last_ns;
    bool has_told;
};

/* Whether these faults, counted since the beginning, are to be told now; then they count as told.
 */
bool kv_fault_log_is_due(struct kv_fault_log *log, uint64_t num_faults, int64_t now_ns);

/* Parts of a line, between commas. Zeroed at first. */
struct kv_fault_text {
    char bytes[400]; /* NUL-terminated; what has no room is left out */
    size_t length;
};

/* Adds "COUNT ONE" or "COUNT MANY", and " (WHY)" unless it is empty; nothing for a count of 0. */
void kv_fault_text_add(struct kv_fault_text *text, uint64_t count, const char *one,
                       const char *many, const char *why);

#endif
