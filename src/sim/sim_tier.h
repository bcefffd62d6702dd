/* SPDX-License-Identifier: Apache-2.0 */
/* Slower tiers under a replayed cache (sim_levels.h), and who fetches from them ahead: the engine's
 * planner (kv/prefetch_plan.h), fed with the real queue, the policy's predictions and the policy's
 * victims.
 *
 *   down   every block that the cache forgets is copied to the first tier
 *   up     from the first tier one block at a time. A move takes a free block, or the policy's next
 *          victim's, when it is planned; at its end the block is an idle one of the cache. It is
 *          planned only if the planner finds it in time and no nearer request needs what goes for
 *          it. What lies deeper is read into the first tier for whoever is planned for
 *   miss   what is not there when a request is admitted is computed again, also if a tier has it;
 *          or, if they may wait, the request is held back until its blocks have come, but no longer
 *          than computing all that lay below when it arrived would take: what has not come by then
 *          is computed. It does not begin either before what goes for it has been copied down
 *
 * When a request will run is estimated from what an engine knows: its place in the queue, and how
 * far apart admissions were lately while somebody waited. */
#ifndef IMBREX_SIM_SIM_TIER_H
#define IMBREX_SIM_SIM_TIER_H

#include "kv/kv_cache.h"
#include "kv/prefetch_plan.h"
#include "sim/sim_levels.h"
#include "sim/sim_trace.h"

/* Moves that are planned and have not ended, at most. */
enum { SIM_TIER_MAX_MOVES = 8 };

struct sim_tier_metrics {
    /* Blocks: planned to be brought up; of these used by a request, forgotten unused, taken back
     * before they began. What is left is still there, or on its way. */
    int64_t num_planned, num_used, num_wasted, num_cancelled;
    int64_t num_predicted, num_predicted_used; /* of those planned and used: nobody waited then */
    /* Blocks that an admitted request found in the slower tier alone: it had waited, or not, in
     * which case no queue could tell of it. */
    int64_t num_late, num_unforeseen;
    /* Of scored requests: blocks that were found in the cache where they had been computed, and
     * those that came from each tier, ahead or while the request was held. */
    int64_t num_kept, num_from[SIM_MAX_LEVELS];
    int64_t held_ns;                                 /* that they were held, all together */
    struct sim_level_metrics levels[SIM_MAX_LEVELS]; /* since the first of them came */
};

/* A move as it is planned; for tests. */
struct sim_tier_move {
    int32_t node, request_idx; /* request_idx: of the waiting one, below 0: a prediction */
    bool has_victim;           /* else a free block is taken */
    uint64_t victim_key_hash;  /* of what goes for it */
    int64_t now_ns, begin_ns, end_ns;
};

struct sim_tier_options {
    struct sim_level_options levels[SIM_MAX_LEVELS]; /* [num_levels] the nearest first */
    int32_t num_levels;
    bool predicts;            /* what the policy expects is fetched too */
    bool waits;               /* requests may be held back for what lies below */
    int64_t compute_block_ns; /* to compute a block instead; where requests wait */
    int32_t first_scored;     /* by order of arrival: metrics count from its arrival on */
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
/* Blocks behind those that were found that came, or will have come, from a tier: they need not be
 * computed. Of the admission before. */
int32_t sim_tier_num_loaded(const struct sim_tier *tier);
/* It has all its blocks. Returns how long its prefill has to wait for moves. */
int64_t sim_tier_computed(struct sim_tier *tier, int32_t request_idx, int32_t num_blocks,
                          int64_t now_ns);
void sim_tier_read_metrics(const struct sim_tier *tier, struct sim_tier_metrics *metrics);

/* Whether the tiers agree with themselves and the cache. For tests. */
bool sim_tier_check(const struct sim_tier *tier);

/* The key of a block of a trace. */
struct kv_key sim_node_key(int32_t node);

#endif
