/* SPDX-License-Identifier: Apache-2.0 */
/* Between the engine and its prefix cache: which tokens a request's blocks hold, what of them the
 * scheduler need not have computed, and when a block may be found by others.
 *
 *   submit, any thread   hash the prompt's full blocks
 *   scheduler            arrive -> admit: the table begins with cached blocks -> finish
 *   a step is done       insert the blocks it has filled, no earlier
 *
 * Of a request with several choices the first one alone is known to the cache; the others share
 * its blocks as long as they live. */
#ifndef IMBREX_ENGINE_PREFIX_H
#define IMBREX_ENGINE_PREFIX_H

#include "engine/metrics.h"
#include "engine/scheduler.h"
#include "kv/kv_cache.h"

struct checkpoint;
struct imbrex_model;

struct request_prefix {
    struct kv_request kv; /* its keys, ids, wants and blocks are the ones below */
    struct kv_key root;
    struct kv_key *keys; /* [max_blocks] of full blocks, prompt and output; kv.num_keys are known */
    int32_t *token_ids;  /* [max_blocks * KV_BLOCK_SIZE] of those */
    struct kv_want *wants; /* [max_blocks] */
    int32_t *blocks;       /* [max_blocks] */
    int32_t max_blocks;
    bool is_known; /* the cache has it, waiting or running */
    bool has_run;
    /* While it waits: its next block is on its way up, for which it is held back until then. */
    bool is_loading;
    int64_t held_until_ns; /* 0: it has not been held back */
    /* It is the next one, and all its blocks below lie in RAM: they come up while it runs. */
    bool starts_in_layers;
    bool was_spoilt; /* they did not once: not again */
};

struct request_prefix_options {
    const struct kv_identity *identity;
    const void *salt;
    size_t salt_bytes;
    const int32_t *prompt_ids; /* [num_prompt_ids] */
    int32_t num_prompt_ids;
    int32_t max_tokens; /* prompt and output */
};

/* Room for all blocks that the request can ever fill, and the keys of its prompt. Any thread. */
enum imbrex_status request_prefix_create(const struct request_prefix_options *options,
                                         struct request_prefix *prefix, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void request_prefix_destroy(struct request_prefix *prefix);

struct prefix_tiers;

struct prefix_cache_options {
    struct kv_cache_options cache;
    /* What else the bits of a block depend on: kernels, type, modes; NUL-terminated. */
    const char *computation;
    /* [32] that keys begin with: blocks may be found by another engine, which must know the weights
     * by their bytes; all are read for it. NULL: drawn anew; blocks are this open model's, whatever
     * its files hold. */
    const unsigned char *kept_secret;
};

struct prefix_cache {
    struct kv_cache *cache; /* NULL: there is none */
    struct kv_pool *pool;
    struct kv_hasher *hasher;
    struct kv_identity identity;
    char layout[256];
    struct metrics *metrics;
    struct prefix_tiers *tiers; /* below it; NULL: none */
    int64_t now_ns;             /* set by the engine before each part of a step */
};

/* Sets everything but metrics, tiers and now_ns. The struct may not move afterwards. */
enum imbrex_status prefix_cache_create(const struct imbrex_model *model,
                                       const struct prefix_cache_options *options,
                                       struct kv_pool *pool, struct prefix_cache *prefix,
                                       struct imbrex_error *err);
/* Of all tensors, every byte, and of the seed that makes those of a model without files. */
void prefix_weight_digest(struct kv_hasher *hasher, const struct checkpoint *checkpoint,
                          unsigned char weight_digest[32]);
/* The same, and of what the configuration says about the computation. */
void prefix_model_digest(struct kv_hasher *hasher, const struct imbrex_model *model,
                         unsigned char model_digest[32]);
/* Safe on a zeroed struct. */
void prefix_cache_destroy(struct prefix_cache *prefix);

/* Of a sequence that the cache may know; NULL for any other. */
struct request_prefix *prefix_of(const struct sequence *sequence);

/* The calls of scheduler.h, for sequences that lie in a struct request_choice. */
struct scheduler_cache prefix_scheduler_cache(struct prefix_cache *prefix);

/* The row's step is done, the scheduler does not know yet: its full blocks are inserted, and a
 * table entry whose contents were there already becomes the block that was. While another step
 * holds the sequence, the old block is pinned and appended to pinned_blocks. Blocks that came up
 * while the sequence ran are inserted like those that it filled, if they have not been yet. */
void prefix_insert(struct prefix_cache *cache, const struct step_row *row, int32_t *table,
                   int32_t *pinned_blocks, int32_t *num_pinned_blocks);

#endif
