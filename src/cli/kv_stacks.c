/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/kv_stacks.h"

#include <stdio.h>

struct kv_stack_measure {
    const char *title;
    void (*format)(const struct kv_stack_table *table, const struct imbrex_kv_sim_stack *stack,
                   struct kv_cell *cell);
};

static void format_hit_rate(const struct kv_stack_table *table,
                            const struct imbrex_kv_sim_stack *stack, struct kv_cell *cell)
{
    (void)table;
    *cell = (struct kv_cell){.aside = ""};
    snprintf(cell->main, sizeof(cell->main), "%.2f", 100 * stack->prefetch.hit_rate);
}

static void format_ttft(const struct kv_stack_table *table, const struct imbrex_kv_sim_stack *stack,
                        struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];
    const struct imbrex_kv_sim_spread *ttft = &stack->prefetch.ttft;

    (void)table;
    snprintf(cell->main, sizeof(cell->main), "%s", kv_format_number(number, ttft->p50));
    snprintf(cell->aside, sizeof(cell->aside), "/ %s", kv_format_number(number, ttft->p99));
}

static void format_computed(const struct kv_stack_table *table,
                            const struct imbrex_kv_sim_stack *stack, struct kv_cell *cell)
{
    (void)table;
    kv_cell_counts(stack->num_computed, stack->num_kept, cell);
}

static void format_held(const struct kv_stack_table *table, const struct imbrex_kv_sim_stack *stack,
                        struct kv_cell *cell)
{
    char number[KV_NUMBER_BYTES];

    (void)table;
    *cell = (struct kv_cell){.aside = ""};
    snprintf(cell->main, sizeof(cell->main), "%s", kv_format_number(number, stack->held_s));
}

static void format_precision(const struct kv_stack_table *table,
                             const struct imbrex_kv_sim_stack *stack, struct kv_cell *cell)
{
    struct imbrex_kv_sim_row row = {.prefetch = stack->prefetch};

    (void)table;
    kv_cell_prefetch(&row, cell);
}

static void format_planned(const struct kv_stack_table *table,
                           const struct imbrex_kv_sim_stack *stack, struct kv_cell *cell)
{
    (void)table;
    kv_cell_counts(stack->prefetch.num_planned, stack->prefetch.num_wasted, cell);
}

static void format_predicted(const struct kv_stack_table *table,
                             const struct imbrex_kv_sim_stack *stack, struct kv_cell *cell)
{
    (void)table;
    kv_cell_counts(stack->prefetch.num_predicted, stack->prefetch.num_predicted_used, cell);
}

static void format_from(const struct kv_stack_table *table, const struct imbrex_kv_sim_stack *stack,
                        struct kv_cell *cell)
{
    kv_cell_counts(stack->num_from[table->tier_idx], stack->num_lost[table->tier_idx], cell);
}

static void format_link(const struct kv_stack_table *table, const struct imbrex_kv_sim_stack *stack,
                        struct kv_cell *cell)
{
    double scale = table->token_bytes > 0 ? table->token_bytes : 1;

    kv_cell_counts((int64_t)((double)stack->num_up[table->tier_idx] * scale),
                   (int64_t)((double)stack->num_down[table->tier_idx] * scale), cell);
}

static const struct kv_stack_measure of_stacks[] = {
    {"hit rate %", format_hit_rate},
    {"TTFT, p50 / p99 in s", format_ttft},
    {"tokens computed / kept", format_computed},
    {"s held for blocks, in sum", format_held},
    {"fetched ahead, precision / recall in %", format_precision},
    {"fetched ahead, blocks planned / wasted", format_planned},
    {"fetched ahead, blocks predicted / used", format_predicted},
};
static const struct kv_stack_measure from_measure = {"tokens from it / lost", format_from};
static const struct kv_stack_measure token_measure = {"tokens up / down", format_link};
static const struct kv_stack_measure byte_measure = {"bytes up / down", format_link};

enum { NUM_OF_STACK = sizeof(of_stacks) / sizeof(of_stacks[0]), NUM_OF_TIER = 2 };

/* "cache + host + disk: hit rate %", "cache + host + disk, host: tokens up / down" */
static void write_title(const struct kv_report *report, bool is_of_tier,
                        struct kv_stack_table *table)
{
    size_t length = (size_t)snprintf(table->title, KV_STACK_TITLE_BYTES, "cache");

    for (size_t i = 0; i <= table->stack_idx; i++) {
        length += (size_t)snprintf(table->title + length, KV_STACK_TITLE_BYTES - length, " + %s",
                                   report->tiers[i].name);
    }
    if (is_of_tier) {
        length += (size_t)snprintf(table->title + length, KV_STACK_TITLE_BYTES - length, ", %s",
                                   report->tiers[table->tier_idx].name);
    }
    (void)snprintf(table->title + length, KV_STACK_TITLE_BYTES - length, ": %s",
                   table->measure->title);
}

bool kv_stack_table(const struct kv_report *report, size_t table_idx, struct kv_stack_table *table)
{
    size_t rest = table_idx, stack_idx = 0;

    while (stack_idx < report->options->num_tiers &&
           rest >= NUM_OF_STACK + NUM_OF_TIER * (stack_idx + 1)) {
        rest -= NUM_OF_STACK + NUM_OF_TIER * (stack_idx + 1);
        stack_idx++;
    }
    if (stack_idx == report->options->num_tiers) {
        return false;
    }
    *table = (struct kv_stack_table){.stack_idx = stack_idx, .token_bytes = report->token_bytes};
    if (rest < NUM_OF_STACK) {
        table->measure = &of_stacks[rest];
    } else {
        table->tier_idx = (rest - NUM_OF_STACK) / NUM_OF_TIER;
        table->measure = (rest - NUM_OF_STACK) % NUM_OF_TIER == 0 ? &from_measure
                         : report->token_bytes > 0                ? &byte_measure
                                                                  : &token_measure;
    }
    write_title(report, rest >= NUM_OF_STACK, table);
    return true;
}

bool kv_stack_was_replayed(const struct kv_stack_table *table, const struct imbrex_kv_sim_row *row)
{
    return row->stacks[table->stack_idx].prefetch.was_replayed;
}

void kv_cell_stack(const struct kv_stack_table *table, const struct imbrex_kv_sim_row *row,
                   struct kv_cell *cell)
{
    table->measure->format(table, &row->stacks[table->stack_idx], cell);
}
