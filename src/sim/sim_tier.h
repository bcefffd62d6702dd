/* SPDX-License-Identifier: Apache-2.0 */
/* A slower tier under a replayed cache, and who fetches from it ahead: the engine's planner
 * (kv/prefetch_plan.h), fed with the real queue, the policy's predictions and the policy's victims.
 *
 *   down   every block that the cache forgets is copied to the slower tier, which forgets nothing;
 *          copies down cost no time
 *   up     one block at a time over one link, each as long as block_ns. A move takes a free block,
 *          or the policy's next victim's, when it is planned; at its end the block is an idle one
 *          of the cache. It is planned only if the planner finds it in time and no nearer request
 *          needs what goes for it
 *   miss   what is not there when a request is admitted is computed again, also if the slower tier
 *          has it: only planned moves bring anything up
 *
 * When a request will run is estimated from what an engine knows: its place in the queue, and how
 * far apart admissions were lately while somebody waited. */
#ifndef IMBREX_SIM_SIM_TIER_H
#define IMBREX_SIM_SIM_TIER_H

#include "kv/kv_cache.h"
#include "kv/prefetch_plan.h"
#include "sim/sim_trace.h"

/* Moves that are planned and have not ended, at most. */
enum { SIM_TIER_MAX_MOVES = 8 };

struct sim_tier_metrics {
    /* Blocks: planned to be brought up; of these used by a request, forgotten unused, taken back
     * before they began. What is left is still there, or on its way. */
    int64_t num_planned, num_used, num_wasted, num_cancelled;
    /* Blocks that an admitted request found in the slower tier alone: it had waited, or not, in
     * which case no queue could tell of it. */
    int64_t num_late, num_unforeseen;
};

/* A move as it is planned; for tests. */
struct sim_tier_move {
    int32_t node, request_idx; /* request_idx: of the waiting one, below 0: a prediction */
    bool has_victim;           /* else a free block is taken */
    uint64_t victim_key_hash;  /* of what goes for it */
    int64_t now_ns, begin_ns, end_ns;
};

struct sim_tier_options {
    int64_t block_ns;     /* to bring up a block */
    int32_t first_scored; /* by order of arrival: metrics count from its arrival on */
    void (*sees_move)(void *user, const struct sim_tier_move *move); /* NULL: nobody */
    void *user;
};

struct sim_tier;

/* num_blocks: of the cache. */
enum imbrex_status sim_tier_create(const struct sim_trace *trace,
                                   const struct sim_tier_options *options, int32_t num_blocks,
                                   struct sim_tier **tier, struct imbrex_error *err);
/* NULL does nothing. */
void sim_tier_destroy(struct sim_tier *tier);

/* kv_cache_options.forgets, with the tier as its user. */
void sim_tier_forgets(void *user, const struct kv_key *key, const int32_t *token_ids,
                      int32_t block_idx);
/* Before the first event. */
void sim_tier_attach(struct sim_tier *tier, struct kv_cache *cache, struct kv_pool *pool);

/* Plans what the events of the last moment call for, ends what has ended by now, and plans on.
 * Before an event. */
void sim_tier_advance(struct sim_tier *tier, int64_t now_ns);
/* The request has joined the queue. */
void sim_tier_arrive(struct sim_tier *tier, int32_t request_idx, int32_t order, int64_t now_ns);
/* The first one of the queue was admitted and found num_hits of num_blocks; before it takes blocks
 * for the rest. Leaves at least as many blocks free or idle as it takes, if moves held them. */
void sim_tier_admit(struct sim_tier *tier, int32_t request_idx, int32_t num_hits,
                    int32_t num_blocks, int64_t now_ns);
/* It has all its blocks. */
void sim_tier_computed(struct sim_tier *tier, int32_t request_idx, int32_t num_blocks);
void sim_tier_read_metrics(const struct sim_tier *tier, struct sim_tier_metrics *metrics);

/* The key of a block of a trace. */
struct kv_key sim_node_key(int32_t node);

#endif
