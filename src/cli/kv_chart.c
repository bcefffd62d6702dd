/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/kv_chart.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "cli/html_writer.h"
#include "cli/kv_report.h"

/* Units of the drawings: they are shown about as wide as a phone, or somewhat wider. */
#define CHART_WIDTH 360.0
#define LINES_HEIGHT 290.0
#define LINES_LEFT 34.0
#define LINES_RIGHT 256.0 /* names stand to the right */
#define LINES_TOP 12.0
#define LINES_BOTTOM 254.0
#define NAME_GAP 11.0     /* between the names of two lines */
#define CAPACITY_GAP 34.0 /* between two numbers below the axis */
#define ROWS_LEFT 112.0   /* names stand to the left */
#define ROWS_RIGHT 298.0  /* figures to the right */
#define ROWS_TOP 6.0
#define ROW_HEIGHT 17.0
#define AXIS_HEIGHT 22.0
#define MAX_NAMES 64 /* lines whose names are kept apart; more are more than can be read */

/* Hues that stay apart with the common kinds of colour blindness, darker on white and lighter on
 * black, so that a thin line has a contrast of at least 3 to 1. */
static const char style[] =
    ":root{--ink:#1b1b1b;--soft:#5c5c5c;--rule:#d9d9d9;--page:#fff;--card:#f6f6f4;--tint:#00000012;"
    "--c0:#0072b2;--c1:#00785a;--c2:#a2478a;--c3:#8a6100;--c4:#5a3e99;--hot:#c84e00}\n"
    "@media (prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#a8a8a8;--rule:#3d3d3d;"
    "--page:#161616;--card:#202020;--tint:#ffffff14;--c0:#56b4e9;--c1:#2ec99a;--c2:#e08fc0;"
    "--c3:#e6b422;--c4:#a99bff;--hot:#ff8a3d}}\n"
    "svg{display:block;width:100%;height:auto;max-width:34rem}\n"
    "svg text{font:10px system-ui,sans-serif;fill:var(--ink)}svg .soft{fill:var(--soft)}\n"
    "svg .end{text-anchor:end}svg .middle{text-anchor:middle}\n"
    "svg .rule{stroke:var(--rule);stroke-width:1;fill:none}svg .zero{stroke:var(--soft)}\n"
    "svg .gap{fill:var(--tint)}svg .line{fill:none;stroke:currentColor;stroke-width:1.4}\n"
    "svg .mark{fill:var(--page);stroke:currentColor;stroke-width:1.4}\n"
    "svg .bar{fill:currentColor;opacity:.85}svg .leader{fill:none;stroke:currentColor;"
    "stroke-width:.6;opacity:.7}\n"
    ".c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}"
    ".c4{color:var(--c4)}.part{color:var(--hot)}.hot{color:var(--hot)}.ink{color:var(--ink)}"
    ".far{color:var(--soft)}\n"
    "svg .hot .line,svg .ink .line{stroke-width:2.6}svg .hot text{font-weight:700}\n"
    "@media (max-width:30rem){svg text{font-size:11px}}\n";

void chart_write_style(FILE *file)
{
    fputs(style, file);
}

struct chart_look chart_look_of(const char *policy, size_t order)
{
    static const char *const classes[] = {"c0", "c1", "c2", "c3", "c4"};
    static const char *const dashes[] = {"", "5 3", "2 2"};
    size_t num_classes = sizeof(classes) / sizeof(classes[0]);

    if (strcmp(policy, "lru") == 0) {
        return (struct chart_look){"ink", "", 0};
    }
    if (strcmp(policy, "predictive") == 0) {
        return (struct chart_look){"hot", "", 3};
    }
    if (strcmp(policy, "MIN") == 0) {
        return (struct chart_look){"ink", "", 2};
    }
    if (strcmp(policy, "infinite") == 0) {
        return (struct chart_look){"far", "1 3", 1};
    }
    if (strncmp(policy, "predictive ", strlen("predictive ")) == 0) {
        return (struct chart_look){"part", "4 2", (int32_t)(order % 6)};
    }
    return (struct chart_look){classes[order % num_classes],
                               dashes[order / num_classes % (sizeof(dashes) / sizeof(dashes[0]))],
                               (int32_t)(order % 6)};
}

/* ---- parts ----------------------------------------------------------------------------------- */

static void open_chart(FILE *file, const struct chart_label *label, double height)
{
    html_markup(file,
                "<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-labelledby=\"t%zu d%zu\">"
                "<title id=\"t%zu\">",
                CHART_WIDTH, height, label->id, label->id, label->id);
    html_text(file, label->title);
    html_markup(file, "</title><desc id=\"d%zu\">", label->id);
    html_text(file, label->description);
    html_markup(file, "</desc>\n");
}

static void write_text(FILE *file, double x, double y, const char *css_class, const char *text)
{
    html_markup(file, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, css_class);
    html_text(file, text);
    html_markup(file, "</text>");
}

static void write_line(FILE *file, double x1, double y1, double x2, double y2,
                       const char *css_class)
{
    html_markup(file, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>", x1,
                y1, x2, y2, css_class);
}

static void write_marker(FILE *file, double x, double y, int32_t marker)
{
    static const char *const shapes[] = {
        "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", /* circle */
        "m-2.7-2.7h5.4v5.4h-5.4z",            /* square */
        "m0-3.6l3.4 6h-6.8z",                 /* triangle */
        "m0-3.8l3.8 3.8l-3.8 3.8l-3.8-3.8z",  /* diamond */
        "m0 3.6l3.4-6h-6.8z",                 /* triangle, downwards */
        "m-3-3l6 6m0-6l-6 6",                 /* cross */
    };

    html_markup(file, "<path d=\"M%.1f %.1f%s\" class=\"mark\"/>", x, y, shapes[marker]);
}

/* 1, 2 or 5 times a power of ten, so that at most `max_steps` make up the length. */
static double choose_step(double length, int32_t max_steps)
{
    static const double factors[] = {1, 2, 5, 10};
    double power = pow(10, floor(log10(length / max_steps)));

    for (size_t i = 0; i < sizeof(factors) / sizeof(factors[0]); i++) {
        if (factors[i] * power * max_steps >= length * (1 - 1e-9)) {
            return factors[i] * power;
        }
    }
    return 10 * power;
}

/* ---- lines ----------------------------------------------------------------------------------- */

struct lines_scale {
    double min_log, max_log; /* of the capacities */
    double min, max, step;   /* of the values */
};

static double lines_x(const struct lines_scale *scale, int64_t capacity)
{
    double length = scale->max_log - scale->min_log;
    double share = length > 0 ? (log((double)capacity) - scale->min_log) / length : 0.5;

    return LINES_LEFT + 8 + share * (LINES_RIGHT - LINES_LEFT - 16);
}

static double lines_y(const struct lines_scale *scale, double value)
{
    double share = (value - scale->min) / (scale->max - scale->min);

    return LINES_BOTTOM - share * (LINES_BOTTOM - LINES_TOP);
}

static struct lines_scale choose_scale(const struct chart_lines *chart)
{
    struct lines_scale scale = {INFINITY, -INFINITY, INFINITY, -INFINITY, 0};

    for (size_t i = 0; i < chart->num_points; i++) {
        double position = log((double)chart->capacities[i]);
        scale.min_log = fmin(scale.min_log, position);
        scale.max_log = fmax(scale.max_log, position);
    }
    for (size_t i = 0; i < chart->num_series; i++) {
        for (size_t j = 0; j < chart->num_points; j++) {
            /* fmin and fmax pass over NaN. */
            scale.min = fmin(scale.min, chart->series[i].values[j]);
            scale.max = fmax(scale.max, chart->series[i].values[j]);
        }
    }
    if (!(scale.min <= scale.max)) {
        scale.min = 0;
        scale.max = 1;
    }
    /* From 0 on where that costs little. */
    scale.min = scale.min < scale.max / 2 ? 0 : scale.min;
    scale.max = scale.max > scale.min ? scale.max : scale.min + 1;
    scale.step = choose_step(scale.max - scale.min, 6);
    scale.min = floor(scale.min / scale.step + 1e-9) * scale.step;
    scale.max = ceil(scale.max / scale.step - 1e-9) * scale.step;
    return scale;
}

static void write_lines_axes(FILE *file, const struct chart_lines *chart,
                             const struct lines_scale *scale)
{
    char number[KV_NUMBER_BYTES];
    int32_t num_steps = (int32_t)lround((scale->max - scale->min) / scale->step);

    for (int32_t i = 0; i <= num_steps; i++) {
        double value = scale->min + i * scale->step;
        double y = lines_y(scale, value);
        write_line(file, LINES_LEFT, y, LINES_RIGHT, y, "rule");
        snprintf(number, sizeof(number), "%.4g", value);
        write_text(file, LINES_LEFT - 4, y + 3.5, "soft end", number);
    }
    /* Numbers that would touch are left out; the table has them all. The capacities may stand in
     * any order. */
    for (size_t i = 0; i < chart->num_points; i++) {
        double x = lines_x(scale, chart->capacities[i]);
        bool is_free = true;
        for (size_t j = 0; j < i; j++) {
            is_free = is_free && fabs(lines_x(scale, chart->capacities[j]) - x) >= CAPACITY_GAP;
        }
        write_line(file, x, LINES_BOTTOM, x, LINES_BOTTOM + 3, "rule zero");
        if (is_free) {
            write_text(file, x, LINES_BOTTOM + 14, "soft middle",
                       kv_format_tokens(number, chart->capacities[i]));
        }
    }
    write_text(file, (LINES_LEFT + LINES_RIGHT) / 2, LINES_BOTTOM + 29, "soft middle",
               "capacity, tokens");
    html_markup(file, "\n");
}

/* Neighbours in the order of the capacities; SIZE_MAX beyond the ends. */
static size_t next_point(const struct chart_lines *chart, int64_t above)
{
    size_t next = SIZE_MAX;

    for (size_t i = 0; i < chart->num_points; i++) {
        if (chart->capacities[i] > above &&
            (next == SIZE_MAX || chart->capacities[i] < chart->capacities[next])) {
            next = i;
        }
    }
    return next;
}

static size_t previous_point(const struct chart_lines *chart, int64_t below)
{
    size_t previous = SIZE_MAX;

    for (size_t i = 0; i < chart->num_points; i++) {
        if (chart->capacities[i] < below &&
            (previous == SIZE_MAX || chart->capacities[i] > chart->capacities[previous])) {
            previous = i;
        }
    }
    return previous;
}

static void write_point(FILE *file, const struct chart_lines *chart,
                        const struct lines_scale *scale, const double *values, size_t idx)
{
    if (!isnan(values[idx])) {
        html_markup(file, "%.1f,%.1f ", lines_x(scale, chart->capacities[idx]),
                    lines_y(scale, values[idx]));
    }
}

static void write_rising(FILE *file, const struct chart_lines *chart,
                         const struct lines_scale *scale, const double *values)
{
    for (size_t i = next_point(chart, 0); i != SIZE_MAX;
         i = next_point(chart, chart->capacities[i])) {
        write_point(file, chart, scale, values, i);
    }
}

static void write_area(FILE *file, const struct chart_lines *chart, const struct lines_scale *scale)
{
    if (chart->lower_series == SIZE_MAX || chart->upper_series == SIZE_MAX) {
        return;
    }
    const double *upper = chart->series[chart->upper_series].values;
    html_markup(file, "<polygon class=\"gap\" points=\"");
    write_rising(file, chart, scale, chart->series[chart->lower_series].values);
    for (size_t i = previous_point(chart, INT64_MAX); i != SIZE_MAX;
         i = previous_point(chart, chart->capacities[i])) {
        write_point(file, chart, scale, upper, i);
    }
    html_markup(file, "\"/>\n");
}

/* Where the names of the lines go: beside the last point, but NAME_GAP apart. y is [num_series],
 * NaN where a line has no last point. */
static void place_names(const struct chart_lines *chart, const struct lines_scale *scale, double *y)
{
    size_t last = previous_point(chart, INT64_MAX);
    size_t order[MAX_NAMES], count = 0;

    for (size_t i = 0; i < chart->num_series && i < MAX_NAMES; i++) {
        double value = chart->series[i].values[last];
        y[i] = isnan(value) ? value : lines_y(scale, value);
        size_t at = count;
        if (isnan(y[i])) {
            continue;
        }
        for (; at > 0 && y[order[at - 1]] > y[i]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
        count++;
    }
    /* Down, then up again from the bottom where the last ones fell out. */
    for (size_t i = 1; i < count; i++) {
        y[order[i]] = fmax(y[order[i]], y[order[i - 1]] + NAME_GAP);
    }
    double limit = LINES_HEIGHT - 4;
    for (size_t i = count; i-- > 0;) {
        y[order[i]] = fmin(y[order[i]], limit);
        limit = y[order[i]] - NAME_GAP;
    }
}

static void write_series(FILE *file, const struct chart_lines *chart,
                         const struct lines_scale *scale, size_t idx, double name_y)
{
    const struct chart_series *series = &chart->series[idx];
    size_t last = previous_point(chart, INT64_MAX);

    html_markup(file, "<g class=\"%s\"><polyline class=\"line\" stroke-dasharray=\"%s\" points=\"",
                series->look.css_class, series->look.dash[0] != '\0' ? series->look.dash : "none");
    write_rising(file, chart, scale, series->values);
    html_markup(file, "\"/>");
    for (size_t i = 0; i < chart->num_points; i++) {
        if (!isnan(series->values[i])) {
            write_marker(file, lines_x(scale, chart->capacities[i]),
                         lines_y(scale, series->values[i]), series->look.marker);
        }
    }
    if (!isnan(name_y)) {
        write_line(file, lines_x(scale, chart->capacities[last]) + 4,
                   lines_y(scale, series->values[last]), LINES_RIGHT + 2, name_y, "leader");
        write_text(file, LINES_RIGHT + 5, name_y + 3.5, "name", series->name);
    }
    html_markup(file, "</g>\n");
}

void chart_write_lines(FILE *file, const struct chart_lines *chart)
{
    struct lines_scale scale = choose_scale(chart);
    double name_y[MAX_NAMES];

    open_chart(file, &chart->label, LINES_HEIGHT);
    write_lines_axes(file, chart, &scale);
    write_area(file, chart, &scale);
    place_names(chart, &scale, name_y);
    for (size_t i = 0; i < chart->num_series; i++) {
        write_series(file, chart, &scale, i, i < MAX_NAMES ? name_y[i] : NAN);
    }
    html_markup(file, "</svg>\n");
}

/* ---- rows ------------------------------------------------------------------------------------ */

static double row_y(size_t row_idx)
{
    return ROWS_TOP + ROW_HEIGHT * (double)row_idx;
}

static void write_row_name(FILE *file, size_t row_idx, const char *name, const char *figures)
{
    double y = row_y(row_idx) + ROW_HEIGHT / 2 + 3.5;

    write_text(file, ROWS_LEFT - 6, y, "end", name);
    write_text(file, CHART_WIDTH - 2, y, "end", figures);
}

static void write_row_tick(FILE *file, size_t num_rows, double x, bool is_zero, const char *number)
{
    double bottom = row_y(num_rows) + 2;

    write_line(file, x, ROWS_TOP, x, bottom, is_zero ? "rule zero" : "rule");
    write_text(file, x, bottom + 12, "soft middle", number);
}

void chart_write_bars(FILE *file, const struct chart_bars *chart)
{
    double length = chart->max - chart->min;
    double scale = (ROWS_RIGHT - ROWS_LEFT) / length;
    double step = choose_step(length, 4), zero = ROWS_LEFT - chart->min * scale;
    char number[KV_NUMBER_BYTES];

    open_chart(file, &chart->label, row_y(chart->num_bars) + AXIS_HEIGHT);
    for (double i = ceil(chart->min / step - 1e-9); i * step <= chart->max + 1e-9 * length; i++) {
        snprintf(number, sizeof(number), "%.4g%s", i * step + 0.0, chart->unit);
        write_row_tick(file, chart->num_bars, ROWS_LEFT + (i * step - chart->min) * scale, i == 0,
                       number);
    }
    html_markup(file, "\n");
    for (size_t i = 0; i < chart->num_bars; i++) {
        const struct chart_bar *bar = &chart->bars[i];
        double value = fmin(fmax(bar->value, chart->min), chart->max);
        html_markup(file, "<g class=\"%s\">", bar->look.css_class);
        if (!isnan(bar->value)) {
            html_markup(
                file, "<rect class=\"bar\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%g\"/>",
                zero + fmin(value, 0) * scale, row_y(i) + 3, fabs(value) * scale, ROW_HEIGHT - 6);
        }
        kv_format_number(number, bar->value);
        if (chart->is_whole && !isnan(bar->value)) {
            snprintf(number, sizeof(number), "%.0f", round(bar->value) + 0.0);
        }
        write_row_name(file, i, bar->name, number);
        html_markup(file, "</g>\n");
    }
    html_markup(file, "</svg>\n");
}

static double ranges_x(const struct chart_ranges *chart, double value)
{
    double length = chart->max_exponent - chart->min_exponent;
    double share = value > 0 ? (log10(value) - chart->min_exponent) / length : 0;

    return ROWS_LEFT + fmin(fmax(share, 0), 1) * (ROWS_RIGHT - ROWS_LEFT);
}

static void write_range(FILE *file, const struct chart_ranges *chart, size_t row_idx)
{
    const struct chart_range *range = &chart->ranges[row_idx];
    double y = row_y(row_idx) + ROW_HEIGHT / 2;
    double p90 = ranges_x(chart, range->p90), p99 = ranges_x(chart, range->p99);
    char mean_text[KV_NUMBER_BYTES], p99_text[KV_NUMBER_BYTES];
    char figures[2 * KV_NUMBER_BYTES + 4];

    html_markup(file, "<g class=\"%s\">", range->look.css_class);
    if (!isnan(range->p50) && !isnan(range->p99)) {
        write_line(file, ranges_x(chart, range->p50), y, p99, y, "line");
        write_line(file, p90, y - 3, p90, y + 3, "line");
        write_line(file, p99, y - 5, p99, y + 5, "line");
        write_marker(file, ranges_x(chart, range->p50), y, 0);
        write_marker(file, ranges_x(chart, range->mean), y, 3);
    }
    snprintf(figures, sizeof(figures), "%s / %s", kv_format_number(mean_text, range->mean),
             kv_format_number(p99_text, range->p99));
    write_row_name(file, row_idx, range->name, figures);
    html_markup(file, "</g>\n");
}

void chart_write_ranges(FILE *file, const struct chart_ranges *chart)
{
    char number[KV_NUMBER_BYTES];

    open_chart(file, &chart->label, row_y(chart->num_ranges) + AXIS_HEIGHT);
    /* Numbers that would touch are left out. */
    int32_t step = 1 + (chart->max_exponent - chart->min_exponent - 1) / 5;
    for (int32_t i = chart->min_exponent; i <= chart->max_exponent; i += step) {
        snprintf(number, sizeof(number), "%g s", pow(10, i));
        write_row_tick(file, chart->num_ranges, ranges_x(chart, pow(10, i)), false, number);
    }
    html_markup(file, "\n");
    for (size_t i = 0; i < chart->num_ranges; i++) {
        write_range(file, chart, i);
    }
    html_markup(file, "</svg>\n");
}
