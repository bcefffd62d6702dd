/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_options.h"

#include <stdio.h>
#include <string.h>

static enum imbrex_status refuse(struct imbrex_error *err, const char *field, const char *expected,
                                 double found)
{
    return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field, ": expected %s, found %g",
                           expected, found);
}

static enum imbrex_status refuse_tier(struct imbrex_error *err, const char *member,
                                      const char *expected, double found)
{
    return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "tiers",
                           ": %s: expected %s, found %g", member, expected, found);
}

static enum imbrex_status refuse_null(struct imbrex_error *err, const char *field,
                                      const char *expected)
{
    return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field, ": expected %s, found NULL",
                           expected);
}

/* [count] names, none of them NULL. */
static enum imbrex_status check_texts(const char *field, const char *const *texts, size_t count,
                                      struct imbrex_error *err)
{
    for (size_t i = 0; i < count; i++) {
        if (texts == NULL || texts[i] == NULL) {
            return refuse_null(err, field, "texts");
        }
    }
    return IMBREX_STATUS_OK;
}

/* [count] names of which none is there twice: the rows of one have a place. */
static enum imbrex_status check_different(const char *field, const char *const *texts, size_t count,
                                          struct imbrex_error *err)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < i; j++) {
            if (strcmp(texts[i], texts[j]) == 0) {
                return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field,
                                       ": expected each name once, found \"%s\" again", texts[i]);
            }
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_tiers(const struct imbrex_kv_sim_options *options,
                                      struct imbrex_error *err)
{
    if (options->num_tiers > IMBREX_KV_SIM_MAX_TIERS) {
        return refuse(err, "tiers", "at most 4", (double)options->num_tiers);
    }
    if (options->num_tiers > 0 && options->tiers == NULL) {
        return refuse_null(err, "tiers", "structs");
    }
    for (size_t i = 0; i < options->num_tiers; i++) {
        const struct imbrex_kv_sim_tier *tier = &options->tiers[i];
        if (!(tier->tokens_per_s > 0 && tier->tokens_per_s <= 1e15)) {
            return refuse_tier(err, "tokens_per_s", "more than 0, at most 1e15",
                               tier->tokens_per_s);
        }
        if (!(tier->latency_s >= 0 && tier->latency_s <= 1e6)) {
            return refuse_tier(err, "latency_s", "0 to 1e6", tier->latency_s);
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_options_check_block(const struct imbrex_kv_sim_options *options,
                                           int32_t block_size, struct imbrex_error *err)
{
    char expected[64];

    (void)snprintf(expected, sizeof(expected), "at least a block, %d tokens", block_size);
    for (size_t i = 0; i < options->num_capacities; i++) {
        if (options->capacities[i] < block_size) {
            return refuse(err, "capacities", expected, (double)options->capacities[i]);
        }
    }
    for (size_t i = 0; i < options->num_tiers; i++) {
        if (options->tiers[i].capacity_tokens < block_size) {
            return refuse_tier(err, "capacity_tokens", expected,
                               (double)options->tiers[i].capacity_tokens);
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_options_check(const struct imbrex_kv_sim_options *options,
                                     struct imbrex_error *err)
{
    if (options == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "options: expected a struct, found "
                         "NULL");
    }
    TRY(check_texts("traces", options->traces, options->num_traces, err));
    if (options->policies != NULL) {
        TRY(check_texts("policies", options->policies, options->num_policies, err));
        TRY(check_different("policies", options->policies, options->num_policies, err));
    }
    if (options->capacities == NULL && options->num_capacities > 0) {
        return refuse_null(err, "capacities", "numbers");
    }
    if (options->num_traces < 1) {
        return refuse(err, "traces", "one or more", 0);
    }
    if (options->num_capacities < 1) {
        return refuse(err, "capacities", "one or more", 0);
    }
    if (options->block_size < 0) {
        return refuse(err, "block_size", "0 or more", options->block_size);
    }
    if (options->num_slots < 1) {
        return refuse(err, "num_slots", "1 or more", options->num_slots);
    }
    /* Turned round so that NaN is refused too. */
    if (!(options->prefill_tokens_per_s >= 0 && options->prefill_tokens_per_s <= 1e15)) {
        return refuse(err, "prefill_tokens_per_s", "0 to 1e15", options->prefill_tokens_per_s);
    }
    if (options->prefill_tokens_per_s == 0 &&
        !(options->target_queue > 0 && options->target_queue <= 1e6)) {
        return refuse(err, "target_queue", "more than 0, at most 1e6", options->target_queue);
    }
    if (!(options->decode_s_per_token >= 0 && options->decode_s_per_token <= 1e3)) {
        return refuse(err, "decode_s_per_token", "0 to 1000", options->decode_s_per_token);
    }
    if (!(options->session_span_s >= 0 && options->session_span_s <= 1e9)) {
        return refuse(err, "session_span_s", "0 to 1e9", options->session_span_s);
    }
    if (!(options->warm >= 0 && options->warm < 1)) {
        return refuse(err, "warm", "0 or more, less than 1", options->warm);
    }
    TRY(check_tiers(options, err));
    TRY(sim_options_check_block(options, options->block_size > 0 ? options->block_size : 1, err));
    if (options->has_prefetch && options->num_tiers == 0 &&
        !(options->fetch_ratio > 0 && options->fetch_ratio <= 1e6)) {
        return refuse(err, "fetch_ratio", "more than 0, at most 1e6", options->fetch_ratio);
    }
    if (!(options->hint_error <= 1)) {
        return refuse(err, "hint_error", "at most 1", options->hint_error);
    }
    return IMBREX_STATUS_OK;
}
