/* SPDX-License-Identifier: Apache-2.0 */
/* What measured values have in the middle and near their ends: the one definition of the median and
 * of other quantiles for all that times something. */
#ifndef IMBREX_CLI_SPREAD_H
#define IMBREX_CLI_SPREAD_H

#include <stdint.h>

struct spread {
    double median, p10, p90;
};

/* The value that `share` of all, in [0, 1], are not above, on the line between the two nearest. The
 * values may be in any order and stay so; 0 of none, or without the memory to sort them. */
double spread_quantile(const double *values, int32_t count, double share);
/* Of at least one value; sorts them. */
struct spread spread_of(double *values, int32_t count);

#endif
