/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of the replays over tiers: for each number of tiers some of the whole, and some of
 * each tier. */
#ifndef IMBREX_CLI_KV_STACKS_H
#define IMBREX_CLI_KV_STACKS_H

#include "cli/kv_report.h"

#define KV_STACK_TITLE_BYTES 192

struct kv_stack_measure;

struct kv_stack_table {
    const struct kv_stack_measure *measure;
    size_t stack_idx, tier_idx;       /* the first stack_idx + 1 tiers; the tier it tells of */
    double token_bytes;               /* 0: it tells tokens */
    char title[KV_STACK_TITLE_BYTES]; /* "cache + host: hit rate %" */
};

/* The table_idx'th; false beyond the last. */
bool kv_stack_table(const struct kv_report *report, size_t table_idx, struct kv_stack_table *table);
/* Whether the row's policy has a place in it: MIN and infinite know no tiers. */
bool kv_stack_was_replayed(const struct kv_stack_table *table, const struct imbrex_kv_sim_row *row);
void kv_cell_stack(const struct kv_stack_table *table, const struct imbrex_kv_sim_row *row,
                   struct kv_cell *cell);

#endif
