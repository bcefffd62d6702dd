/* SPDX-License-Identifier: Apache-2.0 */
/* What `imbrex kv-sim` shows of its replays: tables for a terminal, JSON, and a page to look at.
 * All three take their figures from here. */
#ifndef IMBREX_CLI_KV_REPORT_H
#define IMBREX_CLI_KV_REPORT_H

#include <stdbool.h>
#include <stddef.h>

#include "cli/tier_option.h"
#include "imbrex_kv.h"

/* How hard the traces were replayed. One of the two is given. */
struct kv_load {
    double prefill_tokens_per_s;         /* 0: found for target_queue */
    double target_queue;                 /* mean number waiting under lru */
    struct imbrex_kv_sim_result *result; /* NULL: not replayed */
};

struct kv_report {
    const struct imbrex_kv_sim_options *options; /* what all loads have in common */
    const struct kv_load *loads;                 /* [num_loads] */
    size_t num_loads;
    const struct tier_option *tiers; /* [options->num_tiers] */
    double token_bytes;              /* of keys and values; 0: tables tell tokens */
    const char *command_line;        /* that gives the same figures again */
    bool was_interrupted;
};

/* One trace under one load. */
struct kv_table {
    const struct kv_load *load;
    const struct imbrex_kv_sim_trace *trace;
    const struct imbrex_kv_sim_row *rows; /* [num_capacities, num_policies] */
    size_t num_capacities, num_policies;
};

/* False if the load was not replayed. */
bool kv_report_table(const struct kv_report *report, size_t load_idx, size_t trace_idx,
                     struct kv_table *table);
const struct imbrex_kv_sim_row *kv_table_row(const struct kv_table *table, size_t capacity_idx,
                                             size_t policy_idx);
/* The policies in the order of the rows, MIN and infinite among them. */
const char *kv_table_policy(const struct kv_table *table, size_t policy_idx);
/* Whether the policy was replayed over a slower tier. */
bool kv_table_plans(const struct kv_table *table, size_t policy_idx);

/* Whether no rate was found that gives the load: blocks that running requests hold leave no room,
 * or the queue jumps from one side of the target to the other. */
bool kv_table_misses_load(const struct kv_table *table, size_t capacity_idx);

/* NaN for infinite: it has no place between lru and MIN, as it has no capacity. */
double kv_row_closure(const struct imbrex_kv_sim_row *row);

/* A figure as text: what is read first and what stands beside it, "" for nothing. */
#define KV_CELL_BYTES 40
struct kv_cell {
    char main[KV_CELL_BYTES], aside[KV_CELL_BYTES];
};
void kv_cell_hit_rate(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
void kv_cell_ttft(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
void kv_cell_queue(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
/* Of the replay over a slower tier: precision / recall; hit rate (points won); TTFT; blocks. */
void kv_cell_prefetch(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
void kv_cell_prefetch_hits(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
void kv_cell_prefetch_ttft(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
void kv_cell_planned(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
void kv_cell_wasted(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
void kv_cell_late(const struct imbrex_kv_sim_row *row, struct kv_cell *cell);
/* "1.2M / 3k" */
void kv_cell_counts(int64_t count, int64_t beside, struct kv_cell *cell);

#define KV_NUMBER_BYTES 32
/* "3.1M", "512"; returns `text`. */
const char *kv_format_tokens(char text[KV_NUMBER_BYTES], int64_t num_tokens);
/* Three digits, "-" for NaN; returns `text`. */
const char *kv_format_number(char text[KV_NUMBER_BYTES], double value);

/* What the words of the tables mean, a sentence each. */
struct kv_term {
    const char *word, *meaning;
};
extern const struct kv_term kv_terms[]; /* ended by a NULL word */

/* To standard output: what holds for all, one load's tables, and the meaning of the words. */
void kv_report_print_head(const struct kv_report *report);
void kv_report_print_load(const struct kv_report *report, size_t load_idx);
/* What each number of predictive is worth: the change of its average closure over all rows of the
 * run. Nothing if it was not asked for, or no load was replayed. */
void kv_report_print_sensitivity(const struct kv_report *report);
void kv_report_print_terms(const struct kv_report *report);

/* *text is freed by the caller with free(). Exit codes; failures are reported. */
int kv_report_format_json(const struct kv_report *report, char **text);
int kv_report_format_html(const struct kv_report *report, char **text);

/* What a replay has done with requests whose time is before one above them. Static. */
const char *kv_report_early_text(const struct imbrex_kv_sim_trace *trace);

#endif
