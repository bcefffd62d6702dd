/* SPDX-License-Identifier: Apache-2.0 */
/* The page of `imbrex kv-sim --html`: one file that needs no other, no script and no network. Every
 * chart has its figures as a table below it. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/html_writer.h"
#include "cli/kv_chart.h"
#include "cli/kv_report.h"
#include "cli/kv_stacks.h"
#include "cli/machine.h"
#include "cli/output.h"

struct page {
    FILE *file;
    const struct kv_report *report;
    struct kv_table table; /* of the section that is being written */
    size_t num_charts;     /* so far; numbers them */
    /* Room for one chart. */
    double *values; /* [num_policies, num_capacities] */
    struct chart_series *series;
    struct chart_bar *bars;
    struct chart_range *ranges;
    int64_t *capacities;
    char (*names)[KV_NUMBER_BYTES]; /* of capacities */
};

static const struct kv_term policy_terms[] = {
    {"lru", "forgets what was used longest ago; what the others are measured against"},
    {"lfu", "forgets what was used least often"},
    {"s3fifo", "three first-in-first-out queues: new blocks must be used again to stay"},
    {"arc", "two lru lists, of blocks used once and more often, whose sizes adapt"},
    {"gdsf", "forgets what has the least uses times cost of computing it again; the rest ages"},
    {"seed", "patterns of requests: the chance that one returns, times how recent it is"},
    {"queue", "lru, but what a waiting request needs stays, the nearest the longest"},
    {"predictive", "the same for what is waited for; the rest stays by how soon and how surely "
                   "requests of its kind came back before"},
    {NULL, NULL},
};

static const char page_style[] =
    "*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:76rem;color:var(--ink);"
    "background:var(--page);font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}\n"
    "h1{font-size:1.6rem;margin:.5rem 0}h2{font-size:1.25rem;margin:2.5rem 0 .5rem;"
    "border-top:1px solid var(--rule);padding-top:1rem}h3{font-size:1.05rem;margin:1.5rem 0 "
    ".5rem}\n"
    "p{max-width:46rem;margin:.5rem 0}.soft{color:var(--soft)}a{color:inherit}\n"
    ".grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr))"
    "}"
    "\nfigure{margin:0;padding:.75rem;background:var(--card);border-radius:.4rem}"
    ".wide{max-width:36rem}figcaption{font-weight:600;margin-bottom:.25rem}\n"
    "dl{max-width:46rem}dt{font-weight:600}dd{margin:0 0 .5rem 1rem}\n"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;margin:.5rem 0;font-size:.9rem;"
    "font-variant-numeric:tabular-nums}caption{text-align:left;padding:.25rem 0;"
    "color:var(--soft)}th,td{padding:.2rem .6rem;border-bottom:1px solid var(--rule);"
    "text-align:right;white-space:nowrap}th:first-child{text-align:left}th[scope=row]{font-weight:"
    "400}"
    ".plain td{text-align:left;white-space:normal}td .soft{margin-left:.35rem}\n"
    "details{margin:.5rem 0}summary{cursor:pointer}pre{overflow-x:auto;padding:.75rem;"
    "background:var(--card);border-radius:.4rem;white-space:pre-wrap}\n"
    ".warn{border-left:.25rem solid var(--hot);padding-left:.75rem}\n";

/* ---- tables ---------------------------------------------------------------------------------- */

static void write_capacity(const struct page *page, size_t capacity_idx)
{
    char number[KV_NUMBER_BYTES];

    html_text(
        page->file,
        kv_format_tokens(number, kv_table_row(&page->table, capacity_idx, 0)->capacity_tokens));
}

static void open_table(const struct page *page, const char *summary, const char *caption)
{
    if (summary != NULL) {
        html_markup(page->file, "<details><summary>%s</summary>", summary);
    }
    html_markup(page->file,
                "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"%s\"><table>"
                "<caption>%s</caption>\n<thead><tr><th scope=\"col\">policy</th>",
                caption, caption);
    for (size_t i = 0; i < page->table.num_capacities; i++) {
        html_markup(page->file, "<th scope=\"col\">");
        write_capacity(page, i);
        html_markup(page->file, "</th>");
    }
    html_markup(page->file, "</tr></thead>\n<tbody>\n");
}

static void close_table(const struct page *page, bool has_summary)
{
    html_markup(page->file, "</tbody></table></div>%s\n", has_summary ? "</details>" : "");
}

typedef void cell_fn(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);

static void open_row(const struct page *page, const char *name)
{
    html_markup(page->file, "<tr><th scope=\"row\">");
    html_text(page->file, name);
    html_markup(page->file, "</th>");
}

static void write_cell(const struct page *page, const struct kv_cell *cell)
{
    html_markup(page->file, "<td>");
    html_text(page->file, cell->main);
    if (cell->aside[0] != '\0') {
        html_markup(page->file, "<span class=\"soft\">");
        html_text(page->file, cell->aside);
        html_markup(page->file, "</span>");
    }
    html_markup(page->file, "</td>");
}

static void write_row(const struct page *page, const char *name, size_t policy_idx, cell_fn *format)
{
    struct kv_cell cell;

    open_row(page, name);
    for (size_t i = 0; i < page->table.num_capacities; i++) {
        format(kv_table_row(&page->table, i, policy_idx), &cell);
        write_cell(page, &cell);
    }
    html_markup(page->file, "</tr>\n");
}

/* Of all policies. Caption and summary are markup. */
static void write_table(const struct page *page, const char *summary, const char *caption,
                        cell_fn *format)
{
    open_table(page, summary, caption);
    for (size_t i = 0; i < page->table.num_policies; i++) {
        write_row(page, kv_table_policy(&page->table, i), i, format);
    }
    close_table(page, summary != NULL);
}

static void format_middle(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];

    snprintf(cell->main, sizeof(cell->main), "%s", kv_format_number(number, row->ttft.p50));
    snprintf(cell->aside, sizeof(cell->aside), "/ %s", kv_format_number(number, row->ttft.p90));
}

static void format_prefill_rate(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    *cell = (struct kv_cell){.aside = ""};
    snprintf(cell->main, sizeof(cell->main), "%.0f", row->prefill_tokens_per_s);
}

static void format_evicted(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    *cell = (struct kv_cell){.aside = ""};
    snprintf(cell->main, sizeof(cell->main), "%" PRId64, row->num_evicted);
}

/* Millions of accesses a second, and the policy's memory. */
static void format_cost(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];

    *cell = (struct kv_cell){.main = "-"};
    if (row->accesses_per_s > 0) {
        snprintf(cell->main, sizeof(cell->main), "%s",
                 kv_format_number(number, row->accesses_per_s / 1e6));
    }
    if (row->state_bytes > 0) {
        snprintf(cell->aside, sizeof(cell->aside), "/ %s",
                 kv_format_number(number, (double)row->state_bytes / 1e6));
    }
}

/* ---- charts ---------------------------------------------------------------------------------- */

static struct chart_look look_of(const struct page *page, size_t policy_idx)
{
    static const char *const own_looks[] = {"lru", "predictive", "MIN", "infinite"};
    size_t order = 0;

    for (size_t i = 0; i < policy_idx; i++) {
        bool has_own = false;
        for (size_t j = 0; j < sizeof(own_looks) / sizeof(own_looks[0]); j++) {
            has_own = has_own || strcmp(kv_table_policy(&page->table, i), own_looks[j]) == 0;
        }
        order += !has_own;
    }
    return chart_look_of(kv_table_policy(&page->table, policy_idx), order);
}

static size_t find_policy(const struct page *page, const char *name)
{
    for (size_t i = 0; i < page->table.num_policies; i++) {
        if (strcmp(kv_table_policy(&page->table, i), name) == 0) {
            return i;
        }
    }
    return SIZE_MAX;
}

static const struct imbrex_kv_sim_row *row_of(const struct page *page, size_t capacity_idx,
                                              size_t policy_idx)
{
    return kv_table_row(&page->table, capacity_idx, policy_idx);
}

static void write_hit_rates(struct page *page)
{
    const struct kv_table *table = &page->table;

    for (size_t i = 0; i < table->num_policies; i++) {
        double *values = page->values + i * table->num_capacities;
        for (size_t j = 0; j < table->num_capacities; j++) {
            values[j] = 100 * row_of(page, j, i)->hit_rate;
        }
        page->series[i] =
            (struct chart_series){kv_table_policy(table, i), look_of(page, i), values};
    }
    for (size_t j = 0; j < table->num_capacities; j++) {
        page->capacities[j] = row_of(page, j, 0)->capacity_tokens;
    }
    struct chart_lines chart = {
        .label = {page->num_charts++, "Hit rate against capacity",
                  "A line for each policy over the capacity of the cache in tokens, on a "
                  "logarithmic axis. The area between lru and MIN is what a policy can win. The "
                  "table below has the figures."},
        .capacities = page->capacities,
        .num_points = table->num_capacities,
        .series = page->series,
        .num_series = table->num_policies,
        .lower_series = find_policy(page, "lru"),
        .upper_series = find_policy(page, "MIN"),
    };
    html_markup(page->file, "<h3>Hit rate</h3>\n<figure class=\"wide\"><figcaption>Tokens found in "
                            "the cache, %% of all prompt tokens</figcaption>\n");
    chart_write_lines(page->file, &chart);
    html_markup(page->file, "</figure>\n");
    write_table(page, NULL, "Hit rate in % (closure in %), by capacity in tokens",
                kv_cell_hit_rate);
}

/* A chart for each capacity, beside each other where there is room. */
static void open_chart_of(const struct page *page, size_t capacity_idx)
{
    html_markup(page->file, "<figure><figcaption>");
    write_capacity(page, capacity_idx);
    html_markup(page->file, " tokens</figcaption>\n");
}

typedef double value_fn(const struct imbrex_kv_sim_row *row);

static double closure_percent(const struct imbrex_kv_sim_row *row)
{
    return 100 * kv_row_closure(row);
}

static double queue_of(const struct imbrex_kv_sim_row *row)
{
    return row->mean_queue;
}

static double precision_percent(const struct imbrex_kv_sim_row *row)
{
    return 100 * row->prefetch.precision;
}

/* The ends of all values of the table, 0 among them; MIN and infinite count if they are shown. */
static void find_ends(const struct page *page, value_fn *value_of, double *min, double *max)
{
    *min = 0;
    *max = 0;
    for (size_t i = 0; i < page->table.num_capacities * page->table.num_policies; i++) {
        double value = value_of(&page->table.rows[i]);
        *min = fmin(*min, value);
        *max = fmax(*max, value);
    }
}

/* Policies without a value anywhere have no bar. */
static bool has_value(const struct page *page, size_t policy_idx, value_fn *value_of)
{
    for (size_t i = 0; i < page->table.num_capacities; i++) {
        if (!isnan(value_of(row_of(page, i, policy_idx)))) {
            return true;
        }
    }
    return false;
}

static bool has_values(const struct page *page, value_fn *value_of)
{
    for (size_t i = 0; i < page->table.num_policies; i++) {
        if (has_value(page, i, value_of)) {
            return true;
        }
    }
    return false;
}

static void write_bars(struct page *page, struct chart_bars chart, value_fn *value_of)
{
    html_markup(page->file, "<div class=\"grid\">\n");
    for (size_t i = 0; i < page->table.num_capacities; i++) {
        size_t count = 0;
        for (size_t j = 0; j < page->table.num_policies; j++) {
            if (has_value(page, j, value_of)) {
                page->bars[count++] =
                    (struct chart_bar){kv_table_policy(&page->table, j), look_of(page, j),
                                       value_of(row_of(page, i, j))};
            }
        }
        chart.label.id = page->num_charts++;
        chart.bars = page->bars;
        chart.num_bars = count;
        open_chart_of(page, i);
        chart_write_bars(page->file, &chart);
        html_markup(page->file, "</figure>\n");
    }
    html_markup(page->file, "</div>\n");
}

static void write_closure(struct page *page)
{
    double min, max;

    if (find_policy(page, "MIN") == SIZE_MAX) {
        return;
    }
    if (!has_values(page, closure_percent)) {
        html_markup(page->file, "<h3>Closure</h3>\n<p>lru finds all that MIN does.</p>\n");
        return;
    }
    find_ends(page, closure_percent, &min, &max);
    html_markup(page->file, "<h3>Closure</h3>\n<p>The share of the way from lru (0 %%) to MIN "
                            "(100 %%) that each policy goes, %%.</p>\n");
    write_bars(page,
               (struct chart_bars){
                   .label = {.title = "Closure of each policy",
                             .description = "A bar for each policy; lru is 0 and MIN 100 percent. "
                                            "The table of the hit rates has the figures in "
                                            "parentheses."},
                   .unit = "",
                   .min = fmax(min, -100),
                   .max = fmax(100, fmin(max, 200)),
                   .is_whole = true,
               },
               closure_percent);
}

/* Powers of ten around all times of the table. */
static void choose_exponents(const struct page *page, int32_t *min_exponent, int32_t *max_exponent)
{
    double min = INFINITY, max = 0;

    for (size_t i = 0; i < page->table.num_capacities * page->table.num_policies; i++) {
        const struct imbrex_kv_sim_spread *ttft = &page->table.rows[i].ttft;
        if (ttft->p50 > 0) {
            min = fmin(min, ttft->p50);
        }
        max = fmax(max, fmax(ttft->p99, ttft->mean));
    }
    /* Nothing under 10 us or over a day is told apart. */
    *min_exponent = isfinite(min) ? (int32_t)floor(log10(fmax(min, 1e-5))) : -2;
    *max_exponent = max > 0 ? (int32_t)ceil(log10(fmin(max, 1e5))) : 0;
    if (*max_exponent <= *min_exponent) {
        *max_exponent = *min_exponent + 1;
    }
}

static void write_ttft(struct page *page)
{
    struct chart_ranges chart = {
        .label = {.title = "Time to first token of each policy",
                  .description = "A line for each policy from the median to the 99th percentile in "
                                 "seconds, on a logarithmic axis. The tables below have the "
                                 "figures."},
        .ranges = page->ranges,
        .num_ranges = page->table.num_policies,
    };

    choose_exponents(page, &chart.min_exponent, &chart.max_exponent);
    html_markup(page->file,
                "<h3>Time to first token</h3>\n<p>%s Circle: median, diamond: mean, "
                "short bar: 90th percentile, long bar: 99th percentile. Numbers: mean "
                "and 99th percentile in s.</p>\n<div class=\"grid\">\n",
                page->report->options->is_live
                    ? "Each policy on its own timeline."
                    : "On the frozen timeline: what the hits would have given.");
    for (size_t i = 0; i < page->table.num_capacities; i++) {
        for (size_t j = 0; j < page->table.num_policies; j++) {
            const struct imbrex_kv_sim_spread *ttft = &row_of(page, i, j)->ttft;
            page->ranges[j] = (struct chart_range){kv_table_policy(&page->table, j),
                                                   look_of(page, j),
                                                   ttft->mean,
                                                   ttft->p50,
                                                   ttft->p90,
                                                   ttft->p99};
        }
        chart.label.id = page->num_charts++;
        open_chart_of(page, i);
        chart_write_ranges(page->file, &chart);
        html_markup(page->file, "</figure>\n");
    }
    html_markup(page->file, "</div>\n");
    write_table(page, "Mean and 99th percentile as a table",
                "Time to first token in s, mean / p99, by capacity in tokens", kv_cell_ttft);
    write_table(page, "Median and 90th percentile as a table",
                "Time to first token in s, p50 / p90, by capacity in tokens", format_middle);
}

static void write_queue(struct page *page)
{
    double min, max;

    html_markup(page->file, "<h3>Queue</h3>\n");
    if (page->report->options->is_live) {
        find_ends(page, queue_of, &min, &max);
        html_markup(page->file, "<p>Requests that waited already when one arrived, on "
                                "average.</p>\n");
        write_bars(page,
                   (struct chart_bars){
                       .label = {.title = "Mean queue of each policy",
                                 .description = "A bar for each policy: requests that wait, on "
                                                "average. The table below has the figures."},
                       .unit = "",
                       .max = max > 0 ? max : 1,
                   },
                   queue_of);
        write_table(page, "As a table", "Requests waiting on average, by capacity in tokens",
                    kv_cell_queue);
        return;
    }
    /* One bar a capacity: the timeline is the same for every policy. */
    struct chart_bars chart = {
        .label = {page->num_charts++, "Mean queue at each capacity",
                  "A bar for each capacity: requests that wait, on average. The table below has "
                  "the figures."},
        .unit = "",
        .bars = page->bars,
        .num_bars = page->table.num_capacities,
        .max = 1,
    };
    for (size_t i = 0; i < page->table.num_capacities; i++) {
        const struct imbrex_kv_sim_row *row = row_of(page, i, 0);
        page->bars[i] = (struct chart_bar){kv_format_tokens(page->names[i], row->capacity_tokens),
                                           look_of(page, 0), row->mean_queue};
        chart.max = fmax(chart.max, row->mean_queue);
    }
    html_markup(page->file, "<figure class=\"wide\"><figcaption>Requests waiting, on average, the "
                            "same for every policy</figcaption>\n");
    chart_write_bars(page->file, &chart);
    html_markup(page->file, "</figure>\n");
}

/* Of the policies that were replayed over a slower tier. */
static void write_prefetch_table(const struct page *page, const char *summary, const char *caption,
                                 cell_fn *format)
{
    open_table(page, summary, caption);
    for (size_t i = 0; i < page->table.num_policies; i++) {
        if (kv_table_plans(&page->table, i)) {
            write_row(page, kv_table_policy(&page->table, i), i, format);
        }
    }
    close_table(page, true);
}

static void write_prefetch(struct page *page)
{
    html_markup(page->file, "<h3>Prefetch</h3>\n");
    if (!has_values(page, precision_percent)) {
        html_markup(page->file, "<p>Nothing was fetched ahead in this run.</p>\n");
        return;
    }
    html_markup(page->file, "<p>Precision in %%: of the blocks that were fetched ahead of their "
                            "use from a slower tier, and then used or forgotten again, those that "
                            "were used. Each policy was replayed once more for this; all other "
                            "charts are of the cache alone.</p>\n");
    write_bars(page,
               (struct chart_bars){
                   .label = {.title = "Prefetch precision of each policy",
                             .description = "A bar for each policy that plans to fetch ahead. The "
                                            "table below has the figures."},
                   .unit = "",
                   .max = 100,
               },
               precision_percent);
    write_prefetch_table(page, "As a table, with recall",
                         "Prefetch precision / recall in %, by capacity in tokens",
                         kv_cell_prefetch);
    write_prefetch_table(page, "Hit rate with it",
                         "Hit rate in % with prefetch (points won), by "
                         "capacity in tokens",
                         kv_cell_prefetch_hits);
    write_prefetch_table(page, "Time to first token with it",
                         "Time to first token in s with "
                         "prefetch, mean / p99, by capacity in tokens",
                         kv_cell_prefetch_ttft);
    write_prefetch_table(page, "Blocks planned / used",
                         "Blocks planned / used, by capacity in "
                         "tokens",
                         kv_cell_planned);
    write_prefetch_table(page, "Blocks wasted / cancelled",
                         "Blocks wasted / cancelled, by capacity "
                         "in tokens",
                         kv_cell_wasted);
    write_prefetch_table(page, "Blocks late / unforeseen",
                         "Blocks late / unforeseen, by capacity "
                         "in tokens",
                         kv_cell_late);
}

/* Of the policies that were replayed over tiers. */
static void write_stacks(const struct page *page)
{
    struct kv_stack_table stack_table;
    struct kv_cell cell;

    html_markup(page->file, "<h3>Tiers</h3>\n<p>Each policy was replayed once more over the first "
                            "tier below the cache, over the first two, and so on; all charts are "
                            "of the cache alone.</p>\n");
    for (size_t i = 0; kv_stack_table(page->report, i, &stack_table); i++) {
        open_table(page, stack_table.title, stack_table.title);
        for (size_t j = 0; j < page->table.num_policies; j++) {
            if (!kv_stack_was_replayed(&stack_table, row_of(page, 0, j))) {
                continue;
            }
            open_row(page, kv_table_policy(&page->table, j));
            for (size_t k = 0; k < page->table.num_capacities; k++) {
                kv_cell_stack(&stack_table, row_of(page, k, j), &cell);
                write_cell(page, &cell);
            }
            html_markup(page->file, "</tr>\n");
        }
        close_table(page, true);
    }
}

static void write_cost(const struct page *page)
{
    open_table(page, "The load, for each capacity", "By capacity in tokens");
    write_row(page, "requests waiting under lru", 0, kv_cell_queue);
    write_row(page, "uncached prompt tokens/s", 0, format_prefill_rate);
    close_table(page, true);
    write_table(page, "What the policies cost",
                "Million block accesses/s in this replay / MB of the policy&#39;s state at its "
                "largest, by capacity in tokens",
                format_cost);
    write_table(page, "Blocks evicted", "Blocks evicted, by capacity in tokens", format_evicted);
}

/* ---- sections -------------------------------------------------------------------------------- */

static void write_load(const struct page *page, const struct kv_load *load)
{
    if (load->prefill_tokens_per_s > 0) {
        html_markup(page->file, "%.9g uncached prompt tokens/s", load->prefill_tokens_per_s);
    } else {
        html_markup(page->file, "queue of %g under lru", load->target_queue);
    }
}

static void write_trace(const struct page *page)
{
    const struct imbrex_kv_sim_trace *trace = page->table.trace;

    html_markup(page->file, "<p>Format %s: %" PRId64 " requests", trace->format,
                trace->num_requests);
    /* Some formats do not tell them. */
    if (trace->num_sessions > 0) {
        html_markup(page->file, " of %" PRId64 " sessions", trace->num_sessions);
    }
    html_markup(page->file,
                " in %.0f s, %" PRId64 " prompt tokens in %" PRId64 " full blocks; ids of %" PRId32
                " tokens; %" PRId64 " requests scored.</p>\n",
                trace->span_s, trace->num_tokens, trace->num_blocks, trace->trace_block_size,
                page->table.rows[0].num_requests);
    if (trace->num_bad_lines > 0) {
        html_markup(page->file,
                    "<p class=\"warn\">%" PRId64 " line%s could not be read and %s skipped; the "
                    "first is line %" PRId64 ": ",
                    trace->num_bad_lines, output_plural((uint64_t)trace->num_bad_lines),
                    trace->num_bad_lines == 1 ? "was" : "were", trace->first_bad_line);
        html_text(page->file, trace->first_bad_reason);
        html_markup(page->file, "</p>\n");
    }
}

static void write_missed_loads(const struct page *page)
{
    for (size_t i = 0; i < page->table.num_capacities; i++) {
        if (kv_table_misses_load(&page->table, i)) {
            html_markup(page->file, "<p class=\"warn\">At ");
            write_capacity(page, i);
            html_markup(page->file, " no prefill rate gives the load that was asked for.</p>\n");
        }
    }
}

/* Room for the charts of the page's table. */
static bool reserve(struct page *page)
{
    size_t num_policies = page->table.num_policies, num_capacities = page->table.num_capacities;
    size_t num_bars = num_policies > num_capacities ? num_policies : num_capacities;

    page->values = calloc(num_policies * num_capacities, sizeof(*page->values));
    page->series = calloc(num_policies, sizeof(*page->series));
    page->bars = calloc(num_bars, sizeof(*page->bars));
    page->ranges = calloc(num_policies, sizeof(*page->ranges));
    page->capacities = calloc(num_capacities, sizeof(*page->capacities));
    page->names = calloc(num_capacities, sizeof(*page->names));
    return page->names != NULL && page->values != NULL && page->series != NULL &&
           page->bars != NULL && page->ranges != NULL && page->capacities != NULL;
}

static void release(struct page *page)
{
    free(page->names);
    free(page->values);
    free(page->series);
    free(page->bars);
    free(page->ranges);
    free(page->capacities);
}

static bool write_section(struct page *page, size_t load_idx, size_t trace_idx)
{
    bool is_reserved = reserve(page);

    if (is_reserved) {
        html_markup(page->file, "<section id=\"s%zu-%zu\">\n<h2>", load_idx, trace_idx);
        html_text(page->file, page->table.trace->trace);
        html_markup(page->file, ", ");
        write_load(page, page->table.load);
        html_markup(page->file, "</h2>\n");
        write_trace(page);
        write_missed_loads(page);
        write_hit_rates(page);
        write_closure(page);
        write_ttft(page);
        write_queue(page);
        if (page->report->options->num_tiers > 0) {
            write_stacks(page);
        } else {
            write_prefetch(page);
        }
        write_cost(page);
        html_markup(page->file, "</section>\n");
    }
    release(page);
    return is_reserved;
}

static void write_head(const struct page *page)
{
    html_markup(page->file,
                "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
                "<meta name=\"color-scheme\" content=\"light dark\">\n"
                "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src &#39;none&#39;;"
                " style-src &#39;unsafe-inline&#39;\">\n<title>Prefix cache replay</title>\n"
                "<style>\n");
    chart_write_style(page->file);
    fputs(page_style, page->file);
    html_markup(page->file, "</style>\n</head>\n<body>\n<main>\n<h1>Prefix cache replay</h1>\n"
                            "<p>Recorded requests, replayed through the prefix cache of an engine "
                            "for large language models. A prompt whose beginning was computed "
                            "before need not be computed again, if the cache still has it; the "
                            "policies below decide what it forgets when it is full.</p>\n");
    if (page->report->was_interrupted) {
        html_markup(page->file, "<p class=\"warn\">The run was ended early: loads are missing."
                                "</p>\n");
    }
}

static void write_contents(struct page *page)
{
    html_markup(page->file, "<nav aria-label=\"Contents\"><ul>\n");
    for (size_t i = 0; i < page->report->num_loads; i++) {
        for (size_t j = 0; kv_report_table(page->report, i, j, &page->table); j++) {
            html_markup(page->file, "<li><a href=\"#s%zu-%zu\">", i, j);
            html_text(page->file, page->table.trace->trace);
            html_markup(page->file, ", ");
            write_load(page, page->table.load);
            html_markup(page->file, "</a></li>\n");
        }
    }
    html_markup(page->file, "<li><a href=\"#words\">What the words mean</a></li>\n"
                            "<li><a href=\"#run\">The run, and how to repeat it</a></li>\n"
                            "</ul></nav>\n");
}

static void write_terms(const struct page *page, const struct kv_term *terms)
{
    html_markup(page->file, "<dl>\n");
    for (const struct kv_term *term = terms; term->word != NULL; term++) {
        html_markup(page->file, "<dt>%s</dt><dd>%s.</dd>\n", term->word, term->meaning);
    }
    html_markup(page->file, "</dl>\n");
}

static void write_words(const struct page *page)
{
    html_markup(page->file, "<section id=\"words\">\n<h2>What the words mean</h2>\n");
    write_terms(page, kv_terms);
    html_markup(page->file, "<details><summary>The policies</summary>\n");
    write_terms(page, policy_terms);
    html_markup(page->file, "<p>A name such as <i>predictive -queue</i> is predictive with that "
                            "component off.</p></details>\n</section>\n");
}

static void open_parameter(const struct page *page, const char *name)
{
    html_markup(page->file, "<tr><th scope=\"row\">%s</th><td>", name);
}

static void write_text_parameter(const struct page *page, const char *name, const char *value)
{
    open_parameter(page, name);
    html_text(page->file, value);
    html_markup(page->file, "</td></tr>\n");
}

static void write_number_parameter(const struct page *page, const char *name, double value)
{
    open_parameter(page, name);
    html_markup(page->file, "%.15g</td></tr>\n", value);
}

static void write_machine(const struct page *page)
{
    struct machine machine;

    machine_describe(&machine);
    write_text_parameter(page, "processor", machine.cpu_name);
    open_parameter(page, "imbrex");
    html_text(page->file, machine.version);
    if (machine.commit != NULL) {
        html_markup(page->file, " (");
        html_text(page->file, machine.commit);
        html_markup(page->file, ")");
    }
    html_markup(page->file, "</td></tr>\n");
}

static void write_run(const struct page *page)
{
    const struct imbrex_kv_sim_options *options = page->report->options;

    html_markup(page->file, "<section id=\"run\">\n<h2>The run, and how to repeat it</h2>\n"
                            "<div class=\"scroll\" tabindex=\"0\" role=\"group\" "
                            "aria-label=\"Parameters\"><table class=\"plain\">"
                            "<caption>Parameters</caption>\n<tbody>\n");
    for (size_t i = 0; i < options->num_traces; i++) {
        write_text_parameter(page, "trace", options->traces[i]);
    }
    write_text_parameter(page, "starts of sessions",
                         options->starts != NULL ? options->starts : "drawn, where not recorded");
    write_text_parameter(page, "timeline", options->is_live ? "live" : "frozen");
    if (options->block_size > 0) {
        write_number_parameter(page, "tokens of a block", options->block_size);
    } else {
        write_text_parameter(page, "tokens of a block", "of each trace its own");
    }
    write_number_parameter(page, "requests that run at once", options->num_slots);
    if (options->decode_s_per_token > 0) {
        write_number_parameter(page, "ms for an output token", 1e3 * options->decode_s_per_token);
    } else {
        write_text_parameter(page, "ms for an output token", "20 for chats, 10 for agents");
    }
    write_number_parameter(page, "% of the requests not scored", 100 * options->warm);
    if (options->hint_error >= 0) {
        write_number_parameter(page, "% of the hints wrong", 100 * options->hint_error);
    } else {
        write_text_parameter(page, "hints", "none");
    }
    write_number_parameter(page, "seed", (double)options->seed);
    write_machine(page);
    html_markup(page->file, "</tbody></table></div>\n<p>The same figures again, but for the speeds "
                            "of the replay:</p>\n<pre><code>");
    html_text(page->file, page->report->command_line);
    html_markup(page->file, "</code></pre>\n</section>\n</main>\n</body>\n</html>");
}

static bool write_page(struct page *page)
{
    write_head(page);
    write_contents(page);
    for (size_t i = 0; i < page->report->num_loads; i++) {
        for (size_t j = 0; kv_report_table(page->report, i, j, &page->table); j++) {
            if (!write_section(page, i, j)) {
                return false;
            }
        }
    }
    write_words(page);
    write_run(page);
    return ferror(page->file) == 0;
}

int kv_report_format_html(const struct kv_report *report, char **text)
{
    char *written = NULL;
    size_t num_bytes;
    struct page page = {.file = open_memstream(&written, &num_bytes), .report = report};
    bool is_written = page.file != NULL && write_page(&page);

    if (page.file != NULL && fclose(page.file) != 0) {
        is_written = false;
    }
    if (!is_written) {
        free(written);
        return output_out_of_memory();
    }
    *text = written;
    return EXIT_CODE_OK;
}
