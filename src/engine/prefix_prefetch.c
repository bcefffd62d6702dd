/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/prefix_prefetch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kv/key_table.h"

enum {
    MAX_PREDICTIONS = 8,
    MAX_PATH = 512,  /* missing blocks of one prediction that are followed */
    MAX_FETCHES = 4, /* from the tiers below the host, in one look */
};

/* Predictions are asked for anew after so long, as in a replay (sim/sim_tier.c). */
#define PREDICTION_LIFE_NS INT64_C(1000000000)
/* A prediction must be worth so many times the block that goes for it. */
#define PREDICTION_MARGIN 4.0

/* A block that went down. */
struct known_block {
    struct kv_key key, parent_key;
    int32_t token_ids[KV_BLOCK_SIZE];
    bool has_parent;
};

/* What was missing of a predicted path when it was predicted. */
struct path {
    uint64_t hashes[MAX_PATH]; /* [num_blocks] from the head on */
    int32_t num_blocks;
    int32_t begin; /* those before it have come up since */
    double value;
};

struct prefix_prefetch {
    struct prefix_cache *cache;
    struct kv_tiers *tiers;
    struct prefetch_planner *planner;
    struct known_block *known; /* [max_known] a ring */
    struct key_table table;    /* hash of a key -> known */
    int32_t max_known, num_known, next_known;
    bool *is_ahead; /* [num_blocks] was brought up, or is coming, and nobody has used it */
    struct path *paths;
    int32_t num_paths;
    int64_t predicted_ns; /* -1: never */
};

/* ---- create and destroy ---------------------------------------------------------------------- */

enum imbrex_status prefix_prefetch_create(const struct prefix_prefetch_options *options,
                                          struct prefix_cache *cache, struct kv_tiers *tiers,
                                          struct prefix_prefetch **prefetch,
                                          struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t max_known = (size_t)options->max_known;
    struct prefix_prefetch *created = calloc(1, sizeof(*created));
    const struct prefetch_options planner_options = {
        .block_ns = options->block_ns * 100 / options->percent,
        .horizon_ns = PREFIX_PREFETCH_HORIZON_NS,
        .max_tracked = options->num_blocks,
    };
    assert(options->max_known >= 1 && options->percent >= 1 && options->percent <= 100);
    if (created == NULL) {
        return error_out_of_memory(err, "the prefetch executor", sizeof(*created));
    }
    created->cache = cache;
    created->tiers = tiers;
    created->max_known = options->max_known;
    created->predicted_ns = -1;
    TRY_OR_FAIL(prefetch_planner_create(&planner_options, &created->planner, err));
    TRY_OR_FAIL(key_table_init(options->max_known, &created->table, err));
    created->known = calloc(max_known, sizeof(*created->known));
    created->is_ahead = calloc((size_t)options->num_blocks, sizeof(*created->is_ahead));
    created->paths = calloc(MAX_PREDICTIONS, sizeof(*created->paths));
    if (created->known == NULL || created->is_ahead == NULL || created->paths == NULL) {
        status =
            error_out_of_memory(err, "the prefetch executor", max_known * sizeof(*created->known));
        goto fail;
    }
    *prefetch = created;
    return IMBREX_STATUS_OK;

fail:
    prefix_prefetch_destroy(created);
    return status;
}

void prefix_prefetch_destroy(struct prefix_prefetch *prefetch)
{
    if (prefetch != NULL) {
        prefetch_planner_destroy(prefetch->planner);
        key_table_deinit(&prefetch->table);
        free(prefetch->known);
        free(prefetch->is_ahead);
        free(prefetch->paths);
        free(prefetch);
    }
}

/* ---- what is below --------------------------------------------------------------------------- */

/* NULL: not known. */
static const struct known_block *find_known(const struct prefix_prefetch *prefetch, uint64_t hash)
{
    int32_t i = key_table_find(&prefetch->table, hash);
    return i >= 0 ? &prefetch->known[i] : NULL;
}

/* The place for a block of that hash: the one it has, or that of the block that went down longest
 * ago. */
static struct known_block *take_known(struct prefix_prefetch *prefetch, uint64_t hash)
{
    int32_t i = key_table_find(&prefetch->table, hash);
    if (i >= 0) {
        return &prefetch->known[i];
    }
    i = prefetch->next_known;
    prefetch->next_known = (i + 1) % prefetch->max_known;
    if (prefetch->num_known == prefetch->max_known) {
        key_table_remove(&prefetch->table, prefetch->known[i].key.words[0]);
    } else {
        prefetch->num_known++;
    }
    (void)key_table_put(&prefetch->table, hash, i);
    return &prefetch->known[i];
}

void prefix_prefetch_forget(struct prefix_prefetch *prefetch, const struct kv_key *key,
                            const int32_t *token_ids, int32_t block_idx)
{
    if (prefetch == NULL) {
        return;
    }
    const struct kv_cache *cache = prefetch->cache->cache;
    struct known_block *known = take_known(prefetch, key->words[0]);
    int32_t parent = kv_cache_parent(cache, block_idx);
    known->key = *key;
    known->has_parent = parent != -1;
    known->parent_key = parent != -1 ? *kv_cache_key(cache, parent) : (struct kv_key){{0}};
    memcpy(known->token_ids, token_ids, sizeof(known->token_ids));
    if (prefetch->is_ahead[block_idx]) {
        prefetch->is_ahead[block_idx] = false;
        prefetch_lost(prefetch->planner, key->words[0]);
    }
}

/* ---- predictions ----------------------------------------------------------------------------- */

/* What is missing up to the block of that hash. False: the path begins nowhere, or nothing is. */
static bool find_path(const struct prefix_prefetch *prefetch, uint64_t hash, struct path *path)
{
    const struct kv_cache *cache = prefetch->cache->cache;
    const struct known_block *known = find_known(prefetch, hash);
    int32_t num_blocks = 0;
    while (known != NULL && !kv_cache_has(cache, &known->key) && num_blocks < MAX_PATH) {
        path->hashes[num_blocks] = known->key.words[0];
        num_blocks++;
        if (!known->has_parent || kv_cache_has(cache, &known->parent_key)) {
            /* From the head on. */
            for (int32_t i = 0; i < num_blocks / 2; i++) {
                uint64_t swapped = path->hashes[i];
                path->hashes[i] = path->hashes[num_blocks - 1 - i];
                path->hashes[num_blocks - 1 - i] = swapped;
            }
            path->num_blocks = num_blocks;
            path->begin = 0;
            return true;
        }
        known = find_known(prefetch, known->parent_key.words[0]);
    }
    return false;
}

static void renew_paths(struct prefix_prefetch *prefetch, int64_t now_ns)
{
    struct kv_policy *policy = kv_cache_policy(prefetch->cache->cache);
    struct kv_prediction predictions[MAX_PREDICTIONS];
    if (prefetch->predicted_ns >= 0 && now_ns - prefetch->predicted_ns < PREDICTION_LIFE_NS) {
        return;
    }
    prefetch->predicted_ns = now_ns;
    prefetch->num_paths = 0;
    int32_t num_told = policy->functions->predict(policy, predictions, MAX_PREDICTIONS, now_ns);
    for (int32_t i = 0; i < num_told; i++) {
        struct path *path = &prefetch->paths[prefetch->num_paths];
        if (find_path(prefetch, predictions[i].key_hash, path)) {
            path->value = predictions[i].value / PREDICTION_MARGIN;
            prefetch->num_paths++;
        }
    }
}

/* ---- moves ----------------------------------------------------------------------------------- */

/* Whether the planner lets the block come up, and with whose block it does: a pinned one without a
 * user. */
static bool take_block(struct prefix_prefetch *prefetch, const struct path *path,
                       const struct known_block *known, int32_t *block_idx)
{
    struct kv_cache *cache = prefetch->cache->cache;
    struct kv_pool *pool = prefetch->cache->pool;
    struct kv_policy *policy = kv_cache_policy(cache);
    int64_t now_ns = prefetch->cache->now_ns;
    struct prefetch_victim victim = {.block_idx = -1};
    struct prefetch_step step;
    int32_t num_steps = 0;
    if (pool->num_free == 0) {
        victim.block_idx = kv_cache_next_victim(cache, now_ns);
        /* What it follows on may not go for it. */
        if (victim.block_idx == -1 ||
            (known->has_parent &&
             kv_key_equal(kv_cache_key(cache, victim.block_idx), &known->parent_key))) {
            return false;
        }
        victim.place = kv_cache_wanted(cache, victim.block_idx);
        victim.value = policy->functions->value(policy, victim.block_idx, now_ns);
    }
    const struct prefetch_request request = {
        .place = INT64_MAX,
        .needed_ns = INT64_MAX,
        .value = path->value,
        .keys = &known->key.words[0],
        .num_keys = 1,
    };
    if (prefetch_plan(prefetch->planner, now_ns, &request, 1, &victim, victim.block_idx != -1,
                      pool->num_free, &step, 1, &num_steps) != IMBREX_STATUS_OK ||
        num_steps == 0) {
        return false;
    }
    if (step.victim_block != -1) {
        kv_cache_make_room(cache, 1, now_ns);
    }
    if (kv_pool_acquire(pool, block_idx) != IMBREX_STATUS_OK) {
        prefetch_lost(prefetch->planner, known->key.words[0]);
        return false;
    }
    kv_pool_pin(pool, *block_idx);
    kv_pool_release(pool, *block_idx);
    return true;
}

static bool promote(struct prefix_prefetch *prefetch, const struct path *path,
                    const struct known_block *known)
{
    int32_t block_idx;
    if (!kv_tiers_can_promote(prefetch->tiers) || !take_block(prefetch, path, known, &block_idx)) {
        return false;
    }
    if (!kv_tiers_promote(prefetch->tiers, &known->key,
                          known->has_parent ? &known->parent_key : NULL, known->token_ids,
                          block_idx)) {
        kv_pool_unpin(prefetch->cache->pool, block_idx);
        prefetch_lost(prefetch->planner, known->key.words[0]);
        return false;
    }
    prefetch->is_ahead[block_idx] = true;
    return true;
}

/* Moves of one path, as far as they may go now. False: none of less value may either. */
static bool move_path(struct prefix_prefetch *prefetch, struct path *path, int32_t *num_promotions,
                      int32_t *num_fetches)
{
    /* A block can be promoted behind one that is there, or will be. */
    bool is_chained = true;
    for (int32_t i = path->begin; i < path->num_blocks; i++) {
        const struct kv_cache *cache = prefetch->cache->cache;
        const struct known_block *known = find_known(prefetch, path->hashes[i]);
        if (known == NULL) {
            return true;
        }
        if (kv_cache_has(cache, &known->key)) {
            path->begin += path->begin == i;
            continue;
        }
        /* What has come up may have gone again: the next predictions begin anew. */
        if (i == path->begin && known->has_parent && !kv_cache_has(cache, &known->parent_key)) {
            return true;
        }
        switch (kv_tiers_look(prefetch->tiers, &known->key, known->token_ids)) {
        case KV_PLACE_NONE:
            return true;
        case KV_PLACE_REMOTE:
        case KV_PLACE_DISK:
            is_chained = false;
            if (*num_fetches == MAX_FETCHES ||
                !kv_tiers_fetch(prefetch->tiers, &known->key, known->token_ids)) {
                return true;
            }
            (*num_fetches)++;
            break;
        case KV_PLACE_ASKED:
        case KV_PLACE_COMING:
            is_chained = false;
            break;
        case KV_PLACE_HOST:
            if (!is_chained) {
                break;
            }
            if (*num_promotions == PREFIX_PREFETCH_MAX_PROMOTIONS ||
                !promote(prefetch, path, known)) {
                return false;
            }
            (*num_promotions)++;
            break;
        case KV_PLACE_MOVING:
            break;
        }
    }
    return true;
}

void prefix_prefetch_look(struct prefix_prefetch *prefetch)
{
    int32_t num_promotions = 0, num_fetches = 0;
    if (prefetch == NULL) {
        return;
    }
    renew_paths(prefetch, prefetch->cache->now_ns);
    for (int32_t i = 0; i < prefetch->num_paths; i++) {
        if (!move_path(prefetch, &prefetch->paths[i], &num_promotions, &num_fetches)) {
            return;
        }
    }
}

/* ---- what came of it ------------------------------------------------------------------------- */

void prefix_prefetch_promoted(struct prefix_prefetch *prefetch, const struct kv_key *key,
                              int32_t block_idx, bool is_kept)
{
    if (prefetch != NULL && prefetch->is_ahead[block_idx] && !is_kept) {
        prefetch->is_ahead[block_idx] = false;
        prefetch_lost(prefetch->planner, key->words[0]);
    }
}

void prefix_prefetch_used(struct prefix_prefetch *prefetch, int32_t block_idx)
{
    if (prefetch != NULL && prefetch->is_ahead[block_idx]) {
        prefetch->is_ahead[block_idx] = false;
        prefetch_used(prefetch->planner, kv_cache_key(prefetch->cache->cache, block_idx)->words[0]);
    }
}

void prefix_prefetch_read_metrics(const struct prefix_prefetch *prefetch,
                                  struct prefetch_metrics *metrics)
{
    *metrics = (struct prefetch_metrics){0};
    if (prefetch != NULL) {
        prefetch_read_metrics(prefetch->planner, metrics);
    }
}
