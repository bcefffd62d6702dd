/* SPDX-License-Identifier: Apache-2.0 */
/* Reads JSON of one line in passing: no tree, no allocation, for traces whose lines are megabytes
 * of numbers. It accepts all of JSON and a little more (it does not look into strings that it
 * skips); a line it refuses has a reason: field, expected, found.
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
#define SCAN_REASON_BYTES 160

struct scan {
    const char *at, *end;
    const char *key; /* [key_bytes] the last that was read; NULL: none */
    size_t key_bytes;
    bool is_first; /* in an object or array of which nothing was read yet */
    bool has_failed;
    char reason[SCAN_REASON_BYTES]; /* printable; "" while it has not failed */
};

struct scan scan_begin(const char *line, size_t num_bytes);
/* These keep the first reason, and return false. Of what stands at the cursor, which belongs to the
 * last key: */
bool scan_fail(struct scan *scan, const char *expected);
/* Of what was read already: `field` is NULL if it is the line itself. */
__attribute__((format(printf, 4, 5))) bool scan_refuse(struct scan *scan, const char *field,
                                                       const char *expected, const char *found,
                                                       ...);
/* The reason of `failed`, a copy of the scan that read on by itself. */
bool scan_fail_as(struct scan *scan, const struct scan *failed);
static inline bool scan_is_good(const struct scan *scan)
{
    return !scan->has_failed;
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
