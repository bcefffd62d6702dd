/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/prefix_prefetch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kv/key_table.h"

enum {
    MAX_PATH = 512,  /* missing blocks of one prediction that are followed */
    MAX_FETCHES = 4, /* from the tiers below the host, in one look */
    /* The last free blocks, one in so many of the pool's, are as good as taken: of a cache that is
     * full some are free between two requests, and the next one makes room for those that are not
     * any more. */
    SCARCE_SHARE = 8,
};

/* After so long without a request nothing is expected any more. */
#define MAX_IDLE_NS INT64_C(3600000000000)

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
    int32_t begin;       /* those before it have come up since */
    int32_t fetch_begin; /* those before it are in the host tier, or were */
    double value;
};

struct prefix_prefetch {
    struct prefix_cache *cache;
    struct kv_tiers *tiers;
    struct prefetch_planner *planner;
    struct known_block *known; /* [max_known] a ring */
    struct key_table table;    /* hash of a key -> known */
    int32_t max_known, num_known, next_known;
    int32_t percent;     /* of the link's time */
    int32_t max_fetched; /* blocks of all paths that the host tier is to have: they are never
                          * fetched in each other's place */
    bool *is_ahead;      /* [num_blocks] was brought up, or is coming, and nobody has used it */
    struct path *paths;
    int32_t num_paths;
    int64_t predicted_ns; /* -1: never */
    int64_t changed_ns;   /* when a block last went down or was used */
    int64_t due_ns;       /* of the next look */
};

/* ---- create and destroy ---------------------------------------------------------------------- */

enum imbrex_status prefix_prefetch_create(const struct prefix_prefetch_options *options,
                                          struct prefix_cache *cache, struct kv_tiers *tiers,
                                          struct prefix_prefetch **prefetch,
                                          struct imbrex_error *err)
{
    enum imbrex_status status;
    struct kv_tiers_metrics metrics;
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
    created->percent = options->percent;
    kv_tiers_read_metrics(tiers, &metrics);
    created->max_fetched = (int32_t)(metrics.max_host_blocks / 2);
    created->predicted_ns = -1;
    created->due_ns = INT64_MAX;
    TRY_OR_FAIL(prefetch_planner_create(&planner_options, &created->planner, err));
    TRY_OR_FAIL(key_table_init(options->max_known, &created->table, err));
    created->known = calloc(max_known, sizeof(*created->known));
    created->is_ahead = calloc((size_t)options->num_blocks, sizeof(*created->is_ahead));
    created->paths = calloc(PREFETCH_MAX_PREDICTIONS, sizeof(*created->paths));
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
    prefetch->changed_ns = prefetch->cache->now_ns;
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
            path->fetch_begin = 0;
            return true;
        }
        known = find_known(prefetch, known->parent_key.words[0]);
    }
    return false;
}

static void renew_paths(struct prefix_prefetch *prefetch, int64_t now_ns)
{
    struct kv_policy *policy = kv_cache_policy(prefetch->cache->cache);
    struct kv_prediction predictions[PREFETCH_MAX_PREDICTIONS];
    if (prefetch->predicted_ns >= 0 &&
        now_ns - prefetch->predicted_ns < PREFETCH_PREDICTION_LIFE_NS) {
        return;
    }
    prefetch->predicted_ns = now_ns;
    prefetch->num_paths = 0;
    int32_t num_told =
        policy->functions->predict(policy, predictions, PREFETCH_MAX_PREDICTIONS, now_ns);
    for (int32_t i = 0; i < num_told; i++) {
        struct path *path = &prefetch->paths[prefetch->num_paths];
        if (find_path(prefetch, predictions[i].key_hash, path)) {
            path->value = predictions[i].value / PREFETCH_PREDICTION_MARGIN;
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
    int32_t num_steps = 0, num_scarce = pool->num_blocks / SCARCE_SHARE;
    int32_t num_free = pool->num_free > num_scarce ? pool->num_free - num_scarce : 0;
    if (num_free == 0) {
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
                      num_free, &step, 1, &num_steps) != IMBREX_STATUS_OK ||
        num_steps == 0) {
        return false;
    }
    kv_cache_make_room(cache, 1, now_ns);
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
    /* What goes for it is remembered too, perhaps in its place. */
    const struct known_block block = *known;
    int32_t block_idx;
    if (!kv_tiers_can_promote(prefetch->tiers) || !take_block(prefetch, path, &block, &block_idx)) {
        return false;
    }
    if (!kv_tiers_promote(prefetch->tiers, &block.key, block.has_parent ? &block.parent_key : NULL,
                          block.token_ids, block_idx)) {
        kv_pool_unpin(prefetch->cache->pool, block_idx);
        prefetch_lost(prefetch->planner, block.key.words[0]);
        return false;
    }
    prefetch->is_ahead[block_idx] = true;
    return true;
}

/* Promotes what of the path may come up now. False: nothing of less value may either. */
static bool promote_path(struct prefix_prefetch *prefetch, struct path *path,
                         int32_t *num_promotions)
{
    const struct kv_cache *cache = prefetch->cache->cache;
    for (int32_t i = path->begin; i < path->num_blocks; i++) {
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
        /* A block can be promoted behind one that is there, or will be. */
        enum kv_place place = kv_tiers_look(prefetch->tiers, &known->key, known->token_ids);
        if (place == KV_PLACE_MOVING) {
            continue;
        }
        if (place != KV_PLACE_HOST) {
            return true;
        }
        if (*num_promotions == PREFIX_PREFETCH_MAX_PROMOTIONS || !promote(prefetch, path, known)) {
            return false;
        }
        (*num_promotions)++;
    }
    return true;
}

/* Fetches what of the path, as far as max_blocks, lies below the host tier: into that one,
 * whether it may come up yet or not. What is on its way has to be looked for each time. */
static void fetch_path(struct prefix_prefetch *prefetch, struct path *path, int32_t max_blocks,
                       int32_t *num_fetches)
{
    int32_t num_blocks = path->num_blocks < max_blocks ? path->num_blocks : max_blocks;
    for (int32_t i = path->fetch_begin; i < num_blocks; i++) {
        const struct known_block *known = find_known(prefetch, path->hashes[i]);
        if (known == NULL) {
            return;
        }
        if (kv_cache_has(prefetch->cache->cache, &known->key)) {
            path->fetch_begin += path->fetch_begin == i;
            continue;
        }
        switch (kv_tiers_look(prefetch->tiers, &known->key, known->token_ids)) {
        case KV_PLACE_NONE:
            return;
        case KV_PLACE_REMOTE:
        case KV_PLACE_DISK:
            if (*num_fetches == MAX_FETCHES ||
                !kv_tiers_fetch(prefetch->tiers, &known->key, known->token_ids)) {
                return;
            }
            (*num_fetches)++;
            break;
        case KV_PLACE_ASKED:
        case KV_PLACE_COMING:
            break;
        case KV_PLACE_HOST:
        case KV_PLACE_MOVING:
            path->fetch_begin += path->fetch_begin == i;
            break;
        }
    }
}

/* While something moves, when more of it can be planned; else after as long again as nothing has
 * changed. */
static int64_t next_look(const struct prefix_prefetch *prefetch, bool is_moving)
{
    int64_t now_ns = prefetch->cache->now_ns, idle_ns = now_ns - prefetch->changed_ns;
    if (is_moving) {
        return now_ns + PREFIX_PREFETCH_HORIZON_NS;
    }
    if (prefetch->num_known == 0 || idle_ns > MAX_IDLE_NS) {
        return INT64_MAX;
    }
    return now_ns + (idle_ns > PREFETCH_PREDICTION_LIFE_NS ? idle_ns : PREFETCH_PREDICTION_LIFE_NS);
}

void prefix_prefetch_look(struct prefix_prefetch *prefetch)
{
    int32_t num_promotions = 0, num_fetches = 0;
    bool may_promote = true;
    if (prefetch == NULL) {
        return;
    }
    int64_t block_ns = kv_tiers_block_ns(prefetch->tiers);
    if (block_ns > 0) {
        prefetch_set_block_ns(prefetch->planner, block_ns * 100 / prefetch->percent);
    }
    renew_paths(prefetch, prefetch->cache->now_ns);
    int32_t num_left = prefetch->max_fetched;
    for (int32_t i = 0; i < prefetch->num_paths; i++) {
        struct path *path = &prefetch->paths[i];
        may_promote = may_promote && promote_path(prefetch, path, &num_promotions);
        fetch_path(prefetch, path, num_left, &num_fetches);
        num_left -= path->num_blocks < num_left ? path->num_blocks : num_left;
    }
    prefetch->due_ns = next_look(prefetch, num_promotions + num_fetches > 0 ||
                                               kv_tiers_is_moving(prefetch->tiers));
}

int64_t prefix_prefetch_due_ns(const struct prefix_prefetch *prefetch)
{
    return prefetch != NULL ? prefetch->due_ns : INT64_MAX;
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
    if (prefetch == NULL) {
        return;
    }
    prefetch->changed_ns = prefetch->cache->now_ns;
    if (prefetch->is_ahead[block_idx]) {
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
