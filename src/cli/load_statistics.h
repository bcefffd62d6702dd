/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of a measure, all of them kept, so that percentiles are exact. */
#ifndef IMBREX_CLI_LOAD_STATISTICS_H
#define IMBREX_CLI_LOAD_STATISTICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct load_samples {
    int64_t *values; /* [count], ns */
    size_t count, capacity;
};

/* Room for that many. False if there is no memory. */
bool load_samples_init(struct load_samples *samples, size_t capacity);
void load_samples_release(struct load_samples *samples);
/* Drops the value if there is no room. */
void load_samples_add(struct load_samples *samples, int64_t value);

struct load_summary {
    size_t count;
    double mean, min, p50, p90, p99, max; /* ns; 0 without samples */
};

/* Sorts the samples. A percentile is the smallest sample that so many percent do not exceed. */
struct load_summary load_samples_summarize(struct load_samples *samples);

#endif
