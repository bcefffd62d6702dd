/* SPDX-License-Identifier: Apache-2.0 */
/* Brings up what the policy expects to be asked for, before anybody asks: the executor of
 * kv/prefetch_plan.h over the tiers. Waiting requests go first, and prefix_tiers.h sees to them;
 * this is what the link does when none of them needs it.
 *
 *   forget     a block goes down: its key, its ids and the block before it are remembered
 *   predict    once in a while the policy names the ends of paths; what is missing of a path is
 *              looked for, from the head on
 *   plan       a block in RAM is promoted into a free block or a victim's, if the planner lets it;
 *              from below a few are fetched at a time
 *   used, lost what came of it pays for the next ones
 *
 * The planner's link is as fast as it was lately (kv_tiers_block_ns), and predictions may take a
 * share of its time. */
#ifndef IMBREX_ENGINE_PREFIX_PREFETCH_H
#define IMBREX_ENGINE_PREFIX_PREFETCH_H

#include "engine/prefix.h"
#include "kv/kv_tiers.h"
#include "kv/prefetch_plan.h"

/* Moves are planned for about as long as a step takes: there is no other moment to plan more. */
#define PREFIX_PREFETCH_HORIZON_NS INT64_C(10000000)
/* Of one look, as there is one a step: half the link of a GPU for 10 ms, in blocks of 1 MiB. */
#define PREFIX_PREFETCH_MAX_PROMOTIONS 256

struct prefix_prefetch_options {
    int32_t num_blocks; /* of the first tier */
    int32_t max_known;  /* blocks below it that are remembered; >= 1 */
    int64_t block_ns;   /* to bring one up over the whole link, until the tiers know; > 0 */
    int32_t percent;    /* of the link's time, 1..100 */
};

struct prefix_prefetch;

/* cache and tiers outlive it. */
enum imbrex_status prefix_prefetch_create(const struct prefix_prefetch_options *options,
                                          struct prefix_cache *cache, struct kv_tiers *tiers,
                                          struct prefix_prefetch **prefetch,
                                          struct imbrex_error *err);
/* NULL does nothing, here and below. */
void prefix_prefetch_destroy(struct prefix_prefetch *prefetch);

/* The cache forgets the block, which has not been taken out of its tree yet. */
void prefix_prefetch_forget(struct prefix_prefetch *prefetch, const struct kv_key *key,
                            const int32_t *token_ids, int32_t block_idx);
/* Between kv_tiers_begin_look and kv_tiers_end_look, after all that wait. */
void prefix_prefetch_look(struct prefix_prefetch *prefetch);
/* When the next look is due although nobody has asked for anything since the last one; INT64_MAX:
 * never. Hazards change with the logarithm of the age, so looks of an idle engine become rare. */
int64_t prefix_prefetch_due_ns(const struct prefix_prefetch *prefetch);
/* A promotion into the block is over; is_kept: the cache has it now. */
void prefix_prefetch_promoted(struct prefix_prefetch *prefetch, const struct kv_key *key,
                              int32_t block_idx, bool is_kept);
/* A request runs with the block. */
void prefix_prefetch_used(struct prefix_prefetch *prefetch, int32_t block_idx);

/* Zeroed for NULL. */
void prefix_prefetch_read_metrics(const struct prefix_prefetch *prefetch,
                                  struct prefetch_metrics *metrics);

#endif
