/* SPDX-License-Identifier: Apache-2.0 */
/* Reads JSON of one line in passing: no tree, no allocation, for traces whose lines are megabytes
 * of numbers. It accepts all of JSON and a little more (it does not look into strings that it
 * skips); a line it refuses has a reason.
 *
 *   scan_object(...), then while (scan_key(...)): read or skip the value
 *   scan_array(...), then while (scan_element(...)): read or skip the element
 * and at the end is_good says whether all of it was there. */
#ifndef IMBREX_SIM_SIM_SCAN_H
#define IMBREX_SIM_SIM_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SCAN_MAX_DEPTH 64

struct scan {
    const char *at, *end;
    const char *reason; /* why it failed; NULL: it did not. Static */
    bool is_first;      /* in an object or array of which nothing was read yet */
};

struct scan scan_begin(const char *line, size_t num_bytes);
/* Keeps the first reason. Returns false. */
bool scan_fail(struct scan *scan, const char *reason);
static inline bool scan_is_good(const struct scan *scan)
{
    return scan->reason == NULL;
}

bool scan_object(struct scan *scan);
/* The next key, without its quotes and with escapes as they stand; false behind the last. */
bool scan_key(struct scan *scan, const char **key, size_t *key_bytes);
bool scan_array(struct scan *scan);
bool scan_element(struct scan *scan);

bool scan_string(struct scan *scan, const char **text, size_t *num_bytes);
/* A whole number in [0, max]. */
bool scan_whole(struct scan *scan, uint64_t max, uint64_t *value);
/* A number in [-max, max]. */
bool scan_number(struct scan *scan, double max, double *value);
/* One value of any kind. */
bool scan_skip(struct scan *scan);
/* True if the next value is null, which is then passed. */
bool scan_null(struct scan *scan);
/* Nothing but blanks may follow. */
bool scan_end(struct scan *scan);

bool scan_equal(const char *text, size_t num_bytes, const char *name);

#endif
