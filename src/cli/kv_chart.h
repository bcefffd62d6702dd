/* SPDX-License-Identifier: Apache-2.0 */
/* Charts as inline SVG. Colours, lines and fonts are classes of the page's style sheet, so that
 * they follow its light and dark scheme; series also differ by marker and dash, and bear their
 * names, so that no colour has to be told from another. */
#ifndef IMBREX_CLI_KV_CHART_H
#define IMBREX_CLI_KV_CHART_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* The style sheet of all charts. */
void chart_write_style(FILE *file);

/* How a series looks wherever it is shown. */
struct chart_look {
    const char *css_class; /* its colour and the thickness of its line */
    const char *dash;      /* of the line, "" for none */
    int32_t marker;
};
/* Of the order'th of the policies that have no look of their own: all but lru, predictive, MIN and
 * infinite. */
struct chart_look chart_look_of(const char *policy, size_t order);

/* What a reader who does not see the chart is told. */
struct chart_label {
    size_t id; /* unique on the page */
    const char *title, *description;
};

struct chart_series {
    const char *name;
    struct chart_look look;
    const double *values; /* [num_points], in percent; NaN: none */
};
struct chart_lines {
    struct chart_label label;
    const int64_t *capacities; /* [num_points], along a logarithmic axis */
    size_t num_points;
    const struct chart_series *series; /* [num_series] */
    size_t num_series;
    /* Between these the area is tinted; SIZE_MAX: no area. */
    size_t lower_series, upper_series;
};
void chart_write_lines(FILE *file, const struct chart_lines *chart);

struct chart_bar {
    const char *name;
    struct chart_look look;
    double value; /* NaN: none */
};
struct chart_bars {
    struct chart_label label;
    const char *unit;             /* behind the numbers of the axis */
    const struct chart_bar *bars; /* [num_bars] */
    size_t num_bars;
    double min, max; /* of the axis; longer bars are cut, their numbers tell */
    bool is_whole;   /* numbers without decimals */
};
void chart_write_bars(FILE *file, const struct chart_bars *chart);

/* A time's distribution: a line from the median to p99 with marks at mean and p90. */
struct chart_range {
    const char *name;
    struct chart_look look;
    double mean, p50, p90, p99; /* s */
};
struct chart_ranges {
    struct chart_label label;
    const struct chart_range *ranges; /* [num_ranges] */
    size_t num_ranges;
    int32_t min_exponent, max_exponent; /* of the axis, powers of ten */
};
void chart_write_ranges(FILE *file, const struct chart_ranges *chart);

#endif
