/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/spread.h"

#include <stdlib.h>
#include <string.h>

static int compare_rising(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;

    return (left > right) - (left < right);
}

static double quantile_of_sorted(const double *sorted, int32_t count, double share)
{
    double at = share * (count - 1);
    int32_t below = (int32_t)at, above = below + 1 < count ? below + 1 : below;

    return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
}

double spread_quantile(const double *values, int32_t count, double share)
{
    double *sorted = count > 0 ? malloc((size_t)count * sizeof(*sorted)) : NULL;
    double quantile = 0;

    if (sorted != NULL) {
        memcpy(sorted, values, (size_t)count * sizeof(*sorted));
        qsort(sorted, (size_t)count, sizeof(*sorted), compare_rising);
        quantile = quantile_of_sorted(sorted, count, share);
    }
    free(sorted);
    return quantile;
}

struct spread spread_of(double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof(*values), compare_rising);
    return (struct spread){.median = quantile_of_sorted(values, count, 0.5),
                           .p10 = quantile_of_sorted(values, count, 0.1),
                           .p90 = quantile_of_sorted(values, count, 0.9)};
}
