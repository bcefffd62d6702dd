/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/kv_report.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/kv_stacks.h"
#include "cli/machine.h"
#include "cli/output.h"
#include "cli/report_header.h"

/* Columns of a table: a figure, a space, what stands beside it. */
#define MAIN_COLUMNS 8
#define ASIDE_COLUMNS 8

const struct kv_term kv_terms[] = {
    {"hit rate", "the share of all prompt tokens that were found in the cache, in whole blocks and "
                 "from the beginning of the prompt on, and so need not be computed"},
    {"MIN", "the optimum of somebody who knows the future: it forgets what is needed last, so on "
            "the same timeline no policy can find more"},
    {"infinite", "a cache that never forgets: whatever is not found there was never seen before"},
    {"closure", "the share of the way from lru (0 %) to MIN (100 %) that a policy goes; below 0 it "
                "is worse than lru"},
    {"frozen", "the times at which requests wait, run and end are recorded once under lru and used "
               "for every policy, which makes their hit rates comparable; the TTFT is what the "
               "hits would have given"},
    {"live", "what a policy finds shortens its own queue and so moves its own timeline; there is "
             "no MIN then"},
    {"TTFT", "time to first token: from a request's arrival until its prompt has been computed"},
    {"queue", "how many requests waited already when one arrived, on average"},
    {"prefetch", "blocks that are fetched ahead of their use from a slower tier, which keeps what "
                 "the cache forgets, in a replay of its own. Used and wasted: by a request, or "
                 "forgotten again without; precision is used / (used + wasted). Late: computed "
                 "again although the tier had them, for a request that had waited; unforeseen: for "
                 "one that had not; recall is used / (used + late + unforeseen). Cancelled: taken "
                 "back before they began"},
    {"tiers",
     "the replay over the first tier below the cache, and over more of them. What the cache "
     "forgets is copied down, and from tier to tier; what waiting requests need comes up "
     "ahead, with --prefetch also what the policy expects; a request is held until what is "
     "below has come, but no longer than computing it would take. Kept: found in the cache "
     "where it was computed. Up and down: over the tier's link. Lost: gone before it was copied on "
     "to the next tier"},
    {NULL, NULL},
};

/* ---- tables ---------------------------------------------------------------------------------- */

bool kv_report_table(const struct kv_report *report, size_t load_idx, size_t trace_idx,
                     struct kv_table *table)
{
    const struct kv_load *load = &report->loads[load_idx];
    const struct imbrex_kv_sim_result *result = load->result;

    if (result == NULL || trace_idx >= result->num_traces) {
        return false;
    }
    size_t num_capacities = report->options->num_capacities;
    size_t rows_per_trace = result->num_rows / result->num_traces;
    assert(rows_per_trace * result->num_traces == result->num_rows);
    assert(rows_per_trace % num_capacities == 0);
    *table = (struct kv_table){
        .load = load,
        .trace = &result->traces[trace_idx],
        .rows = result->rows + trace_idx * rows_per_trace,
        .num_capacities = num_capacities,
        .num_policies = rows_per_trace / num_capacities,
    };
    return true;
}

const struct imbrex_kv_sim_row *kv_table_row(const struct kv_table *table, size_t capacity_idx,
                                             size_t policy_idx)
{
    return &table->rows[capacity_idx * table->num_policies + policy_idx];
}

const char *kv_table_policy(const struct kv_table *table, size_t policy_idx)
{
    return table->rows[policy_idx].policy;
}

bool kv_table_plans(const struct kv_table *table, size_t policy_idx)
{
    return kv_table_row(table, 0, policy_idx)->prefetch.was_replayed;
}

bool kv_table_misses_load(const struct kv_table *table, size_t capacity_idx)
{
    /* A search that succeeds ends well inside of this. */
    double tolerance = 0.02 + 0.1 * table->load->target_queue;
    double found = kv_table_row(table, capacity_idx, 0)->mean_queue;

    return table->load->prefill_tokens_per_s == 0 &&
           !(fabs(found - table->load->target_queue) <= tolerance);
}

/* ---- figures --------------------------------------------------------------------------------- */

const char *kv_format_tokens(char text[KV_NUMBER_BYTES], int64_t num_tokens)
{
    static const struct {
        int64_t scale;
        const char *suffix;
    } units[] = {{1000000000, "G"}, {1000000, "M"}, {1000, "k"}};

    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (num_tokens >= units[i].scale) {
            snprintf(text, KV_NUMBER_BYTES, "%.4g%s", (double)num_tokens / (double)units[i].scale,
                     units[i].suffix);
            return text;
        }
    }
    snprintf(text, KV_NUMBER_BYTES, "%" PRId64, num_tokens);
    return text;
}

const char *kv_format_number(char text[KV_NUMBER_BYTES], double value)
{
    double size = fabs(value);

    if (isnan(value)) {
        snprintf(text, KV_NUMBER_BYTES, "-");
    } else {
        snprintf(text, KV_NUMBER_BYTES, "%.*f",
                 size >= 100  ? 0
                 : size >= 10 ? 1
                 : size >= 1  ? 2
                              : 3,
                 value);
    }
    return text;
}

/* A share in whole percent. Adding 0 turns -0 into 0. */
static double whole_percent(double share)
{
    return round(100 * share) + 0.0;
}

double kv_row_closure(const struct imbrex_kv_sim_row *row)
{
    return strcmp(row->policy, "infinite") == 0 ? NAN : row->closure;
}

void kv_cell_hit_rate(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    *cell = (struct kv_cell){.aside = ""};
    snprintf(cell->main, sizeof(cell->main), "%.2f", 100 * row->hit_rate);
    if (!isnan(kv_row_closure(row))) {
        snprintf(cell->aside, sizeof(cell->aside), "(%.0f)", whole_percent(kv_row_closure(row)));
    }
}

void kv_cell_ttft(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];

    snprintf(cell->main, sizeof(cell->main), "%s", kv_format_number(number, row->ttft.mean));
    snprintf(cell->aside, sizeof(cell->aside), "/ %s", kv_format_number(number, row->ttft.p99));
}

void kv_cell_queue(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];

    *cell = (struct kv_cell){.aside = ""};
    snprintf(cell->main, sizeof(cell->main), "%s", kv_format_number(number, row->mean_queue));
}

void kv_cell_prefetch(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    *cell = (struct kv_cell){.main = "-"};
    if (!isnan(row->prefetch.precision)) {
        snprintf(cell->main, sizeof(cell->main), "%.1f", 100 * row->prefetch.precision);
    }
    if (!isnan(row->prefetch.recall)) {
        snprintf(cell->aside, sizeof(cell->aside), "/ %.1f", 100 * row->prefetch.recall);
    }
}

void kv_cell_prefetch_hits(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    double won = row->prefetch.hit_rate - row->hit_rate;

    snprintf(cell->main, sizeof(cell->main), "%.2f", 100 * row->prefetch.hit_rate);
    snprintf(cell->aside, sizeof(cell->aside), "(%+.1f)", round(1000 * won) / 10 + 0.0);
}

void kv_cell_prefetch_ttft(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];
    const struct imbrex_kv_sim_spread *ttft = &row->prefetch.ttft;

    snprintf(cell->main, sizeof(cell->main), "%s", kv_format_number(number, ttft->mean));
    snprintf(cell->aside, sizeof(cell->aside), "/ %s", kv_format_number(number, ttft->p99));
}

void kv_cell_counts(int64_t count, int64_t beside, struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];

    snprintf(cell->main, sizeof(cell->main), "%s", kv_format_tokens(number, count));
    snprintf(cell->aside, sizeof(cell->aside), "/ %s", kv_format_tokens(number, beside));
}

void kv_cell_planned(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    kv_cell_counts(row->prefetch.num_planned, row->prefetch.num_used, cell);
}

void kv_cell_wasted(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    kv_cell_counts(row->prefetch.num_wasted, row->prefetch.num_cancelled, cell);
}

void kv_cell_late(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    kv_cell_counts(row->prefetch.num_late, row->prefetch.num_unforeseen, cell);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_label(const char *label)
{
    output_printf("%-14s", label);
}

void kv_report_print_head(const struct kv_report *report)
{
    const struct imbrex_kv_sim_options *options = report->options;
    struct machine machine;

    machine_describe(&machine);
    print_label("machine");
    output_escaped(machine.cpu_name, strlen(machine.cpu_name));
    output_printf("; imbrex %s", machine.version);
    if (machine.commit != NULL) {
        output_printf(" (%s)", machine.commit);
    }
    output_printf("\n");
    print_label("replay");
    output_printf("%s timeline, %" PRId32 " request%s at once,\n",
                  options->is_live ? "live" : "frozen", options->num_slots,
                  output_plural((uint64_t)options->num_slots));
    print_label("");
    output_printf("the first %g %% of the requests not scored, seed %" PRIu64, 100 * options->warm,
                  options->seed);
    if (options->hint_error >= 0) {
        output_printf(", hints wrong in %g %%", 100 * options->hint_error);
    }
    output_printf("\n");
    for (size_t i = 0; i < options->num_tiers; i++) {
        const struct imbrex_kv_sim_tier *tier = &options->tiers[i];
        char number[KV_NUMBER_BYTES];
        print_label(i == 0 ? "tiers" : "");
        output_printf("%s: %s tokens, %.4g tokens/s, %g us\n", report->tiers[i].name,
                      kv_format_tokens(number, tier->capacity_tokens), tier->tokens_per_s,
                      1e6 * tier->latency_s);
    }
}

const char *kv_report_early_text(const struct imbrex_kv_sim_trace *trace)
{
    return strcmp(trace->format, "weka") == 0 ? "left where they stand in their session"
                                              : "put in order of time";
}

static void print_trace(const struct imbrex_kv_sim_trace *trace)
{
    char number[KV_NUMBER_BYTES];

    output_printf("\n");
    print_label("trace");
    output_escaped(trace->trace, strlen(trace->trace));
    output_printf(" (%s)\n", trace->format);
    print_label("");
    output_printf("%" PRId64 " request%s", trace->num_requests,
                  output_plural((uint64_t)trace->num_requests));
    /* Some formats do not tell them. */
    if (trace->num_sessions > 0) {
        output_printf(" of %" PRId64 " session%s", trace->num_sessions,
                      output_plural((uint64_t)trace->num_sessions));
    }
    output_printf(" in %.0f s,\n", trace->span_s);
    print_label("");
    output_printf(
        "%s prompt tokens in %" PRId64 " full block%s of %" PRId32 ", ids of %" PRId32 " tokens\n",
        kv_format_tokens(number, trace->num_tokens), trace->num_blocks,
        output_plural((uint64_t)trace->num_blocks), trace->block_size, trace->trace_block_size);
    if (trace->num_early > 0) {
        print_label("order");
        output_printf("%" PRId64 " request%s with a time before one above: %s\n", trace->num_early,
                      output_plural((uint64_t)trace->num_early), kv_report_early_text(trace));
    }
    if (trace->num_bad_lines > 0) {
        print_label("skipped");
        output_printf("%" PRId64 " line%s; the first is line %" PRId64 ": ", trace->num_bad_lines,
                      output_plural((uint64_t)trace->num_bad_lines), trace->first_bad_line);
        output_escaped(trace->first_bad_reason, strlen(trace->first_bad_reason));
        output_printf("\n");
    }
}

static int label_columns(const struct kv_table *table)
{
    size_t columns = strlen("prefill tokens/s");

    for (size_t i = 0; i < table->num_policies; i++) {
        size_t length = strlen(kv_table_policy(table, i));
        columns = length > columns ? length : columns;
    }
    return (int)columns;
}

static void print_capacities(const struct kv_table *table, const char *title)
{
    char number[KV_NUMBER_BYTES];

    output_printf("\n%s\n%-*s", title, label_columns(table), "");
    for (size_t i = 0; i < table->num_capacities; i++) {
        output_printf(" %*s%*s", MAIN_COLUMNS,
                      kv_format_tokens(number, kv_table_row(table, i, 0)->capacity_tokens),
                      i + 1 < table->num_capacities ? ASIDE_COLUMNS + 1 : 0, "");
    }
    output_printf("\n");
}

typedef void cell_fn(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);

/* Spaces are owed until something follows them. */
static void print_cell(const struct kv_cell *cell, int *num_owed)
{
    output_printf("%*s %*s", *num_owed, "", MAIN_COLUMNS, cell->main);
    *num_owed = ASIDE_COLUMNS + 1;
    if (cell->aside[0] != '\0') {
        output_printf(" %s", cell->aside);
        *num_owed -= 1 + (int)strlen(cell->aside);
    }
    *num_owed = *num_owed > 0 ? *num_owed : 0;
}

/* A row of figures, without spaces at its end. */
static void print_row(const struct kv_table *table, const char *label, size_t policy_idx,
                      cell_fn *format)
{
    struct kv_cell cell;
    int num_owed = 0;

    output_printf("%-*s", label_columns(table), label);
    for (size_t i = 0; i < table->num_capacities; i++) {
        format(kv_table_row(table, i, policy_idx), &cell);
        print_cell(&cell, &num_owed);
    }
    output_printf("\n");
}

static void print_measure(const struct kv_table *table, const char *title, cell_fn *format)
{
    print_capacities(table, title);
    for (size_t i = 0; i < table->num_policies; i++) {
        print_row(table, kv_table_policy(table, i), i, format);
    }
}

static void format_prefill_rate(const struct imbrex_kv_sim_row *row, struct kv_cell *cell)
{
    *cell = (struct kv_cell){.aside = ""};
    snprintf(cell->main, sizeof(cell->main), "%.0f", row->prefill_tokens_per_s);
}

static void print_missed_loads(const struct kv_table *table)
{
    char number[KV_NUMBER_BYTES];

    for (size_t i = 0; i < table->num_capacities; i++) {
        const struct imbrex_kv_sim_row *row = kv_table_row(table, i, 0);
        if (kv_table_misses_load(table, i)) {
            output_printf("note: at %s no prefill rate gives the load that was asked for\n",
                          kv_format_tokens(number, row->capacity_tokens));
        }
    }
}

static void print_prefetch(const struct kv_table *table)
{
    static const struct {
        const char *title;
        cell_fn *format;
    } measures[] = {
        {"prefetch: hit rate % with it (points won)", kv_cell_prefetch_hits},
        {"prefetch: TTFT with it, mean / p99 in s", kv_cell_prefetch_ttft},
        {"prefetch: precision / recall in %", kv_cell_prefetch},
        {"prefetch: blocks planned / used", kv_cell_planned},
        {"prefetch: blocks wasted / cancelled", kv_cell_wasted},
        {"prefetch: blocks late / unforeseen", kv_cell_late},
    };

    for (size_t i = 0; i < sizeof(measures) / sizeof(measures[0]) && kv_table_plans(table, 0);
         i++) {
        print_capacities(table, measures[i].title);
        for (size_t j = 0; j < table->num_policies; j++) {
            if (kv_table_plans(table, j)) {
                print_row(table, kv_table_policy(table, j), j, measures[i].format);
            }
        }
    }
}

static void print_stacks(const struct kv_report *report, const struct kv_table *table)
{
    struct kv_stack_table stack_table;
    struct kv_cell cell;

    for (size_t i = 0; kv_stack_table(report, i, &stack_table); i++) {
        print_capacities(table, stack_table.title);
        for (size_t j = 0; j < table->num_policies; j++) {
            int num_owed = 0;
            if (!kv_stack_was_replayed(&stack_table, kv_table_row(table, 0, j))) {
                continue;
            }
            output_printf("%-*s", label_columns(table), kv_table_policy(table, j));
            for (size_t k = 0; k < table->num_capacities; k++) {
                kv_cell_stack(&stack_table, kv_table_row(table, k, j), &cell);
                print_cell(&cell, &num_owed);
            }
            output_printf("\n");
        }
    }
}

void kv_report_print_load(const struct kv_report *report, size_t load_idx)
{
    struct kv_table table;

    for (size_t i = 0; kv_report_table(report, load_idx, i, &table); i++) {
        print_trace(table.trace);
        print_label("load");
        if (table.load->prefill_tokens_per_s > 0) {
            output_printf("%.9g uncached prompt tokens a second\n",
                          table.load->prefill_tokens_per_s);
        } else {
            output_printf("%g requests waiting on average under lru\n", table.load->target_queue);
        }
        print_measure(&table, "hit rate % (closure %), by capacity in tokens", kv_cell_hit_rate);
        print_measure(&table, "TTFT, mean / p99 in s", kv_cell_ttft);
        print_capacities(&table, report->options->is_live ? "requests waiting on average"
                                                          : "load, the same for every policy");
        for (size_t j = 0; j < (report->options->is_live ? table.num_policies : 1); j++) {
            print_row(&table, report->options->is_live ? kv_table_policy(&table, j) : "waiting", j,
                      kv_cell_queue);
        }
        print_row(&table, "prefill tokens/s", 0, format_prefill_rate);
        print_missed_loads(&table);
        print_prefetch(&table);
        print_stacks(report, &table);
    }
}

/* Over all loads, traces and capacities at which lru and MIN differ. NaN: there is none. */
static double average_closure(const struct kv_report *report, size_t policy_idx)
{
    struct kv_table table;
    double sum = 0;
    int64_t count = 0;

    for (size_t i = 0; i < report->num_loads; i++) {
        for (size_t j = 0; kv_report_table(report, i, j, &table); j++) {
            for (size_t k = 0; k < table.num_capacities; k++) {
                double closure = kv_row_closure(kv_table_row(&table, k, policy_idx));
                sum += isnan(closure) ? 0 : closure;
                count += !isnan(closure);
            }
        }
    }
    return count > 0 ? sum / (double)count : NAN;
}

void kv_report_print_sensitivity(const struct kv_report *report)
{
    static const char prefix[] = "predictive ";
    struct kv_table table;
    double whole = NAN;

    if (!report->options->has_sensitivity || !kv_report_table(report, 0, 0, &table)) {
        return;
    }
    for (size_t i = 0; i < table.num_policies; i++) {
        const char *policy = kv_table_policy(&table, i);
        if (strcmp(policy, "predictive") == 0) {
            whole = average_closure(report, i);
            if (isnan(whole)) {
                output_printf("\nsensitivity: there is nothing between lru and the optimum to "
                              "measure it by\n");
                return;
            }
            output_printf(
                "\nsensitivity: average closure of predictive, %.2f %%, and its change in "
                "points\n",
                100 * whole);
        } else if (strncmp(policy, prefix, strlen(prefix)) == 0 && policy[strlen(prefix)] != '-') {
            output_printf("  %-24s %+6.2f\n", policy + strlen(prefix),
                          100 * (average_closure(report, i) - whole));
        }
    }
}

void kv_report_print_terms(const struct kv_report *report)
{
    if (report->was_interrupted) {
        output_printf("\nended early by a signal\n");
    }
    output_printf("\n");
    for (const struct kv_term *term = kv_terms; term->word != NULL; term++) {
        output_printf("%-10s", term->word);
        options_print_wrapped(term->meaning, 10, true);
    }
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static json_t *json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *json_given(double value, bool is_given)
{
    return is_given ? json_real(value) : json_null();
}

/* Takes `entry`; both are freed and NULL returned if there is no memory. */
static json_t *append(json_t *list, json_t *entry)
{
    if (list == NULL || json_array_append_new(list, entry) != 0) {
        json_decref(list);
        return NULL;
    }
    return list;
}

static json_t *json_texts(const char *const *texts, size_t count)
{
    json_t *list = json_array();

    for (size_t i = 0; i < count && list != NULL; i++) {
        list = append(list, report_text(texts[i]));
    }
    return list;
}

static json_t *json_tiers(const struct kv_report *report)
{
    json_t *list = json_array();

    for (size_t i = 0; i < report->options->num_tiers && list != NULL; i++) {
        const struct imbrex_kv_sim_tier *tier = &report->options->tiers[i];
        list = append(list,
                      json_pack("{s:s, s:I, s:f, s:f}", "name", report->tiers[i].name,
                                "capacity_tokens", (json_int_t)tier->capacity_tokens,
                                "tokens_per_s", tier->tokens_per_s, "latency_s", tier->latency_s));
    }
    return list;
}

static json_t *json_options(const struct kv_report *report)
{
    const struct imbrex_kv_sim_options *options = report->options;
    json_t *capacities = json_array();

    for (size_t i = 0; i < options->num_capacities && capacities != NULL; i++) {
        capacities = append(capacities, json_integer(options->capacities[i]));
    }
    return json_pack(
        "{s:o, s:o, s:f, s:o, s:o, s:i, s:o, s:o, s:f, s:s, s:o, s:b, s:b, s:o, s:b, s:o, "
        "s:o}",
        "traces", json_texts(options->traces, options->num_traces), "starts",
        report_text(options->starts), "session_span_s", options->session_span_s, "capacities",
        capacities, "block_size",
        options->block_size > 0 ? json_integer(options->block_size) : json_null(), "num_slots",
        (int)options->num_slots, "decode_s_per_token",
        json_given(options->decode_s_per_token, options->decode_s_per_token > 0), "seed",
        json_integer((json_int_t)options->seed), "warm", options->warm, "timeline",
        options->is_live ? "live" : "frozen", "hint_error",
        json_given(options->hint_error, options->hint_error >= 0), "ablations",
        (int)options->has_ablations, "sensitivity", (int)options->has_sensitivity, "fetch_ratio",
        json_given(options->fetch_ratio, options->has_prefetch && options->num_tiers == 0),
        "prefetch", (int)options->has_prefetch, "tiers", json_tiers(report), "token_bytes",
        json_given(report->token_bytes, report->token_bytes > 0));
}

static json_t *json_bad_lines(const struct imbrex_kv_sim_trace *trace)
{
    if (trace->num_bad_lines == 0) {
        return json_null();
    }
    return json_pack("{s:I, s:I, s:o}", "count", (json_int_t)trace->num_bad_lines, "first_line",
                     (json_int_t)trace->first_bad_line, "first_reason",
                     report_text(trace->first_bad_reason));
}

static json_t *json_trace(const struct imbrex_kv_sim_trace *trace)
{
    return json_pack("{s:o, s:s, s:I, s:I, s:I, s:I, s:i, s:i, s:f, s:o, s:I}", "trace",
                     report_text(trace->trace), "format", trace->format, "num_requests",
                     (json_int_t)trace->num_requests, "num_sessions",
                     (json_int_t)trace->num_sessions, "num_blocks", (json_int_t)trace->num_blocks,
                     "num_tokens", (json_int_t)trace->num_tokens, "trace_block_size",
                     (int)trace->trace_block_size, "block_size", (int)trace->block_size, "span_s",
                     trace->span_s, "bad_lines", json_bad_lines(trace), "early_requests",
                     (json_int_t)trace->num_early);
}

static json_t *json_spread(const struct imbrex_kv_sim_spread *spread)
{
    return json_pack("{s:o, s:o, s:o, s:o}", "mean", json_number(spread->mean), "p50",
                     json_number(spread->p50), "p90", json_number(spread->p90), "p99",
                     json_number(spread->p99));
}

static json_t *json_prefetch(const struct imbrex_kv_sim_prefetch *prefetch)
{
    if (!prefetch->was_replayed) {
        return json_null();
    }
    return json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "num_planned",
        (json_int_t)prefetch->num_planned, "num_used", (json_int_t)prefetch->num_used, "num_wasted",
        (json_int_t)prefetch->num_wasted, "num_cancelled", (json_int_t)prefetch->num_cancelled,
        "num_late", (json_int_t)prefetch->num_late, "num_unforeseen",
        (json_int_t)prefetch->num_unforeseen, "num_predicted", (json_int_t)prefetch->num_predicted,
        "num_predicted_used", (json_int_t)prefetch->num_predicted_used, "precision",
        json_number(prefetch->precision), "recall", json_number(prefetch->recall), "hit_rate",
        json_number(prefetch->hit_rate), "ttft_s", json_spread(&prefetch->ttft));
}

/* [count] numbers. */
static json_t *json_counts(const int64_t *counts, size_t count)
{
    json_t *list = json_array();

    for (size_t i = 0; i < count && list != NULL; i++) {
        list = append(list, json_integer(counts[i]));
    }
    return list;
}

/* Over the first num_tiers. */
static json_t *json_stack(const struct imbrex_kv_sim_stack *stack, size_t num_tiers)
{
    return json_pack(
        "{s:I, s:o, s:I, s:o, s:o, s:o, s:o, s:o}", "num_kept", (json_int_t)stack->num_kept,
        "num_from", json_counts(stack->num_from, num_tiers), "num_computed",
        (json_int_t)stack->num_computed, "num_up", json_counts(stack->num_up, num_tiers),
        "num_down", json_counts(stack->num_down, num_tiers), "num_lost",
        json_counts(stack->num_lost, num_tiers), "held_s", json_number(stack->held_s), "prefetch",
        json_prefetch(&stack->prefetch));
}

static json_t *json_stacks(const struct imbrex_kv_sim_row *row, size_t num_tiers)
{
    json_t *list = json_array();

    for (size_t i = 0; i < num_tiers && row->stacks[i].prefetch.was_replayed && list != NULL; i++) {
        list = append(list, json_stack(&row->stacks[i], i + 1));
    }
    return list;
}

static json_t *json_row(const struct imbrex_kv_sim_row *row, size_t num_tiers)
{
    return json_pack(
        "{s:I, s:s, s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:I, s:o, s:I, s:o, s:o}", "capacity_tokens",
        (json_int_t)row->capacity_tokens, "policy", row->policy, "hit_rate",
        json_number(row->hit_rate), "closure", json_number(kv_row_closure(row)),
        "prefill_tokens_per_s", json_number(row->prefill_tokens_per_s), "mean_queue",
        json_number(row->mean_queue), "ttft_s", json_spread(&row->ttft), "num_requests",
        (json_int_t)row->num_requests, "num_blocks", (json_int_t)row->num_blocks, "num_evicted",
        (json_int_t)row->num_evicted, "accesses_per_s", json_number(row->accesses_per_s),
        "state_bytes", (json_int_t)row->state_bytes, "prefetch", json_prefetch(&row->prefetch),
        "stacks", json_stacks(row, num_tiers));
}

static json_t *json_table(const struct kv_table *table, size_t num_tiers)
{
    const struct kv_load *load = table->load;
    bool has_rate = load->prefill_tokens_per_s > 0;
    json_t *rows = json_array();

    for (size_t i = 0; i < table->num_capacities * table->num_policies && rows != NULL; i++) {
        rows = append(rows, json_row(&table->rows[i], num_tiers));
    }
    return json_pack("{s:o, s:o, s:o, s:o}", "prefill_tokens_per_s",
                     json_given(load->prefill_tokens_per_s, has_rate), "target_queue",
                     json_given(load->target_queue, !has_rate), "trace", json_trace(table->trace),
                     "rows", rows);
}

int kv_report_format_json(const struct kv_report *report, char **text)
{
    struct kv_table table;
    json_t *tables = json_array();

    for (size_t i = 0; i < report->num_loads; i++) {
        for (size_t j = 0; tables != NULL && kv_report_table(report, i, j, &table); j++) {
            tables = append(tables, json_table(&table, report->options->num_tiers));
        }
    }
    /* json_pack fails only for want of memory: what it packs is made above. */
    json_t *root =
        json_pack("{s:o, s:o, s:o, s:b, s:o}", "machine", report_machine(), "command_line",
                  report_text(report->command_line), "options", json_options(report), "interrupted",
                  (int)report->was_interrupted, "tables", tables);

    return report_dump(root, REPORT_DIGITS, text);
}
