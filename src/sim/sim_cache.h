/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's pool, cache and policies as a store: what a server would do with the trace. */
#ifndef IMBREX_SIM_SIM_CACHE_H
#define IMBREX_SIM_SIM_CACHE_H

#include "kv/kv_cache.h"
#include "sim/sim_hints.h"
#include "sim/sim_store.h"
#include "sim/sim_tier.h"

struct sim_cache_options {
    const char *policy;
    struct kv_policy_options policy_options; /* the switches; sizes are filled in */
    int32_t capacity, max_requests;
    const struct sim_hints *hints; /* NULL: clients say nothing */
    bool is_live;                  /* will be asked for room */
    /* A slower tier and its prefetches. NULL: what is forgotten is gone. */
    const struct sim_tier_options *tier;
};

enum imbrex_status sim_cache_create(const struct sim_trace *trace,
                                    const struct sim_cache_options *options,
                                    struct sim_store **store, struct imbrex_error *err);
/* The policy's, at its largest so far. */
size_t sim_cache_state_bytes(const struct sim_store *store);
/* False: it has no slower tier. */
bool sim_cache_read_tier(const struct sim_store *store, struct sim_tier_metrics *metrics);
/* Whether pool, cache and policy agree with each other. For tests. */
bool sim_cache_check(const struct sim_store *store);

#endif
