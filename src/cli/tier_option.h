/* SPDX-License-Identifier: Apache-2.0 */
/* --tier of imbrex kv-sim. */
#ifndef IMBREX_CLI_TIER_OPTION_H
#define IMBREX_CLI_TIER_OPTION_H

#include "imbrex_kv.h"

#define TIER_OPTION_NAME_BYTES 16

struct tier_option {
    char name[TIER_OPTION_NAME_BYTES];
    struct imbrex_kv_sim_tier options;
};

/* Reads NAME:SIZE:RATE[:LATENCY] into tiers[tier_idx], whose name none before it may have. SIZE is
 * in tokens, at least block_size of them, or in bytes; RATE is one of them a second, LATENCY a time
 * in ns, us, ms or s. token_bytes: of keys and values; 0: not given, so that bytes are refused.
 * Each refusal names the value, the part, what was expected and what was found. Returns an exit
 * code. */
int tier_option_parse(const char *text, double token_bytes, int32_t block_size,
                      struct tier_option *tiers, size_t tier_idx);
/* What --token-bytes says: a number, or a model's layers and heads with 2 bytes an element. Returns
 * an exit code. */
int tier_option_token_bytes(const char *text, double *token_bytes);

#endif
