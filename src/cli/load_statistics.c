/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/load_statistics.h"

#include <stdlib.h>

bool load_samples_init(struct load_samples *samples, size_t capacity)
{
    int64_t *values = malloc((capacity > 0 ? capacity : 1) * sizeof(*values));

    *samples = (struct load_samples){.values = values, .capacity = values != NULL ? capacity : 0};
    return values != NULL;
}

void load_samples_release(struct load_samples *samples)
{
    free(samples->values);
    *samples = (struct load_samples){.values = NULL};
}

void load_samples_add(struct load_samples *samples, int64_t value)
{
    if (samples->count < samples->capacity) {
        samples->values[samples->count++] = value;
    }
}

static int compare_rising(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;

    return (left > right) - (left < right);
}

/* Nearest rank: the first index from which on at least `percent` % of the samples are covered. */
static double percentile(const struct load_samples *samples, size_t percent)
{
    size_t rank = (samples->count * percent + 99) / 100;

    return (double)samples->values[rank > 0 ? rank - 1 : 0];
}

struct load_summary load_samples_summarize(struct load_samples *samples)
{
    struct load_summary summary = {.count = samples->count};
    double sum = 0;

    if (samples->count == 0) {
        return summary;
    }
    qsort(samples->values, samples->count, sizeof(*samples->values), compare_rising);
    for (size_t i = 0; i < samples->count; i++) {
        sum += (double)samples->values[i];
    }
    summary.mean = sum / (double)samples->count;
    summary.min = (double)samples->values[0];
    summary.p50 = percentile(samples, 50);
    summary.p90 = percentile(samples, 90);
    summary.p99 = percentile(samples, 99);
    summary.max = (double)samples->values[samples->count - 1];
    return summary;
}
