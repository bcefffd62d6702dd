/* SPDX-License-Identifier: Apache-2.0 */
/* Between the engine's prefix cache and the tiers below it: what goes down when the cache forgets
 * it, what comes up because a waiting request has it in its prompt, and how long that request may
 * wait for it.
 *
 *   each step   look: waiting requests, nearest first: what is below is fetched and promoted; if
 *               nobody waits for anything, what the policy expects (prefix_prefetch.h)
 *               plan: the cache forgets, the tiers take; a request whose next block is on its way
 *               is held back, no longer than computing the blocks would take
 *               start: the step goes behind the copies of what it may write over
 *               collect: what came up under the step
 *               write: what it filled goes down as well, if it is to (prefix_write.h)
 *
 * The layer-wise start. If all that the next request lacks lies in RAM, and comes up about as fast
 * as the step computes, it is not held: it is admitted with blocks that are still to be filled,
 * which come up in slices, group of layers by group of layers, and the step waits for each group's
 * event before its first layer. The blocks are the request's from then on, and pinned; the cache
 * knows them when their copies are known to be good, before anything that the request computed
 * behind them. If a copy fails, the request starts again as if it had been preempted: nothing that
 * it computed is given out or kept. One request at a time starts so. */
#ifndef IMBREX_ENGINE_PREFIX_TIERS_H
#define IMBREX_ENGINE_PREFIX_TIERS_H

#include "engine/executor.h"
#include "engine/prefix_prefetch.h"
#include "engine/prefix_write.h"

/* The request that runs while blocks of it come up. */
struct prefix_arrival {
    struct sequence *sequence;              /* NULL: there is none, or it has ended */
    struct imbrex_request_metrics *metrics; /* NULL: they do not count any more */
    int32_t next_block;                     /* of its table: the next that poll tells of */
    int32_t num_left;                       /* that poll has not told of */
    int32_t num_tokens, score_begin;        /* of the sequence when it was admitted */
    bool is_waited_for;                     /* by a step that was given since */
};

struct prefix_tiers {
    struct kv_tiers *tiers; /* NULL: there are none */
    struct kv_folder folder;
    /* With a remote tier: what keys begin with, so that engines that share it have the same. */
    unsigned char shared_secret[32];
    struct prefix_cache *cache;
    struct prefix_prefetch *prefetch; /* NULL: nothing is brought up ahead */
    struct prefix_write *write;       /* NULL: nothing goes down before it is demoted */
    enum kv_tier
        *origins;     /* [num_blocks] of the pool: where it was promoted from, until it is used */
    int64_t block_ns; /* to bring a block up from the host tier, as it was lately */
    int64_t token_ns; /* to compute a token of a prompt, as it was lately; 0: unknown yet */
    int64_t held_since_ns; /* the head of the queue, without a break; 0: it is not held */
    int64_t patience_ns;   /* how long a request waits for its blocks; 0: by token_ns */
    /* Groups of layers that come up one behind the other; 1: no request starts before all. */
    int32_t first_layers[KV_TIERS_MAX_SLICES]; /* [num_groups] */
    int32_t num_groups;
    int64_t sliced_block_ns; /* as block_ns, in groups */
    int64_t max_layered_ns;  /* the longest load that others run beside; 0: as long as computing */
    struct prefix_arrival arrival;
};

struct prefix_tiers_options {
    size_t host_bytes;
    const char *disk_path; /* NULL: no disk */
    size_t disk_bytes;
    int32_t disk_zstd_level;        /* 0: blocks lie there as they are */
    const char *remote_url;         /* NULL: no remote tier */
    const char *remote_secret_path; /* NULL: anybody may know its keys, and make values */
    int32_t num_blocks;             /* of the first tier */
    int32_t prefetch_percent; /* of the link's time, for what nobody has asked for yet; 0: none */
    bool writes_through;      /* to disk and remote, as soon as blocks are computed */
    struct device *device;
    const struct kv_view *kv;
    const struct log *log;
};

/* Before the cache is created: opens the folder, reads the shared secret, of which the cache needs
 * one, and makes prefix_tiers_forget safe. */
enum imbrex_status prefix_tiers_prepare(const struct prefix_tiers_options *options,
                                        struct prefix_tiers *tiers, struct imbrex_error *err);
/* [32] that the cache's keys begin with; NULL: no tier outlives the engine. */
const unsigned char *prefix_tiers_secret(const struct prefix_tiers *tiers,
                                         const struct prefix_tiers_options *options);
/* After it. Neither struct may move afterwards. */
enum imbrex_status prefix_tiers_create(const struct prefix_tiers_options *options,
                                       struct prefix_cache *cache, struct prefix_tiers *tiers,
                                       struct imbrex_error *err);
/* Parts the layers into num_groups, fewer if there are fewer layers, whatever the size of a block,
 * and forgets what copying them so took. While nothing comes up. For tests and measurements. */
void prefix_tiers_set_groups(struct prefix_tiers *tiers, const struct kv_view *kv,
                             int32_t num_groups);
/* Before the cache is destroyed. keeps: what the cache has goes to the disk first. Safe on a zeroed
 * struct. */
void prefix_tiers_destroy(struct prefix_tiers *tiers, bool keeps);

/* kv_cache_options.forgets; user: the struct. */
void prefix_tiers_forget(void *user, const struct kv_key *key, const int32_t *token_ids,
                         int32_t block_idx);

/* The cache has taken in a block that was computed. */
void prefix_tiers_insert(struct prefix_tiers *tiers, int32_t block_idx);

/* Of the scheduler's waiting requests, before it plans. */
void prefix_tiers_look(struct prefix_tiers *tiers, struct scheduler *scheduler);
/* Before the planned step is given to the device. DEVICE: it must not be. */
enum imbrex_status prefix_tiers_start(struct prefix_tiers *tiers);
/* Then, what that step has to wait for: the caller gives it to the device with the step. Steps
 * behind it need not, unless prefix_tiers_step_failed. */
void prefix_tiers_take_waits(struct prefix_tiers *tiers, struct executor_waits *waits);
/* A step that was started is done, and nothing of it has been looked at yet: whoever computed on
 * blocks that did not come up is spoilt from now on (scheduler_restart). */
void prefix_tiers_collect(struct prefix_tiers *tiers, struct scheduler *scheduler,
                          const struct step_plan *plan);
/* One that was started has failed: what it was to wait for is forgotten. */
void prefix_tiers_step_failed(struct prefix_tiers *tiers);
/* After a step has been collected, or when there is no step: what is to go down early does. */
void prefix_tiers_write(struct prefix_tiers *tiers);
/* When the next look is due although nobody asks for anything; INT64_MAX: never. */
int64_t prefix_tiers_due_ns(const struct prefix_tiers *tiers);
/* Whether something comes up for which the engine should wait if it has nothing else to do. */
bool prefix_tiers_is_moving(const struct prefix_tiers *tiers);
/* Waits for it a little. */
void prefix_tiers_wait(struct prefix_tiers *tiers);

/* Whether the request, the head of the queue, is to wait for what comes up. NULL: the cache does
 * not know it. */
bool prefix_tiers_is_held(struct prefix_tiers *tiers, const struct request_prefix *prefix);
/* The request runs with the blocks that it found, which are in the table, and, if it starts in
 * layers, with those that come up: they are appended, no more than max_blocks in all. Returns how
 * many these are. metrics: of the request, NULL: they do not count any more. */
int32_t prefix_tiers_admit(struct prefix_tiers *tiers, struct sequence *sequence,
                           struct imbrex_request_metrics *metrics, int32_t max_blocks,
                           int32_t *table);
/* Its blocks are about to be released. */
void prefix_tiers_finish(struct prefix_tiers *tiers, const struct sequence *sequence);
/* A step of num_tokens took so long. */
void prefix_tiers_observe_step(struct prefix_tiers *tiers, int32_t num_tokens, int64_t step_ns);
void prefix_tiers_publish(const struct prefix_tiers *tiers);

#endif
