/* SPDX-License-Identifier: Apache-2.0 */
/* What `seed` would fetch ahead: the patterns it takes for the likeliest next ones. */
#ifndef IMBREX_KV_POLICY_SEED_H
#define IMBREX_KV_POLICY_SEED_H

#include "kv/kv_policy.h"

enum { SEED_NUM_PREFETCH = 3 };

/* Patterns of the next request, likeliest first; returns how many there are, at most
 * SEED_NUM_PREFETCH. */
int32_t kv_policy_seed_prefetch(const struct kv_policy *policy,
                                int32_t patterns[SEED_NUM_PREFETCH]);
/* The pattern of a fingerprint. */
int32_t kv_policy_seed_pattern(const struct kv_fingerprint *fingerprint);

#endif
