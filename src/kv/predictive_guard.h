/* SPDX-License-Identifier: Apache-2.0 */
/* What lru would have found: a cache of the same size without blocks, keys only. `predictive` keeps
 * its own hits beside it, and follows lru for a while where it loses; each time it loses again it
 * waits four times as long, so that what it can lose in all is bounded. */
#ifndef IMBREX_KV_PREDICTIVE_GUARD_H
#define IMBREX_KV_PREDICTIVE_GUARD_H

#include "kv/block_list.h"
#include "kv/key_table.h"
#include "kv/kv_policy.h"

struct predictive_guard {
    struct key_table table;   /* key -> entry */
    struct block_links links; /* by entry */
    struct block_list idle, unused;
    uint64_t *keys;     /* [num_blocks] by entry */
    int32_t *num_users; /* [num_blocks] by entry */
    int32_t num_blocks;
    int64_t horizon, growth; /* requests over which counters forget, and the first rest; factor */
    double lead;

    /* Blocks found and asked for, forgotten over the horizon. */
    double num_own, num_lru, num_asked;
    int64_t num_rest;    /* requests until it may try again */
    int64_t next_rest;   /* requests that the next fall will cost */
    int64_t num_trusted; /* requests since it last began to decide */
    bool follows_lru;
};

enum imbrex_status predictive_guard_init(const struct kv_predictive_knobs *knobs,
                                         int32_t num_blocks, struct predictive_guard *guard,
                                         struct imbrex_error *err);
void predictive_guard_deinit(struct predictive_guard *guard);
size_t predictive_guard_bytes(const struct predictive_guard *guard);

/* A running request uses a block; was_found: it was in the real cache. */
void predictive_guard_use(struct predictive_guard *guard, uint64_t key, bool was_found);
/* It no longer uses the block; of one request tails first. */
void predictive_guard_release(struct predictive_guard *guard, uint64_t key);
/* A request has ended. True if follows_lru changed. */
bool predictive_guard_judge(struct predictive_guard *guard);

#endif
