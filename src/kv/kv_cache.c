/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_cache.h"

#include <assert.h>
#include <stdlib.h>

#include "kv/kv_table.h"
#include "kv/kv_tree.h"
#include "kv/kv_wanted.h"
#include "kv/lineage.h"

/* Ends of prompts that are remembered to know the turns of sessions by. */
enum { MARKS_PER_BLOCK = 16, MAX_MARKS = 65536 };

struct kv_cache {
    struct kv_pool *pool;
    struct kv_policy *policy;
    struct lineage *lineage;
    struct kv_tree tree;
    struct kv_table table;
    struct kv_wanted wanted;
    int32_t *free_requests; /* [num_free_requests] stack of request indices */
    int32_t num_free_requests, max_requests;
    int64_t now_ns; /* of the last call: the pool's hooks have no time of their own */
    void (*forgets)(void *user, const struct kv_key *key, const int32_t *token_ids,
                    int32_t block_idx);
    void *user;
    /* Where the eviction of this victim's descendants stopped, so that a victim with a long tail is
     * not walked down again for each block. -1: nowhere. */
    int32_t last_victim, last_parent;
    struct kv_cache_metrics metrics;
};

/* ---- what the policy is told ----------------------------------------------------------------- */

static void tell_request(struct kv_cache *cache, const struct kv_request *request,
                         void (*event)(struct kv_policy *policy,
                                       const struct kv_policy_request *request, int64_t now_ns))
{
    if (event == NULL) {
        return;
    }
    const struct kv_policy_request told = {
        .request_idx = request->request_idx,
        .fingerprint = &request->fingerprint,
        .blocks = request->blocks,
        .num_blocks = request->num_blocks,
        .num_path_blocks = request->num_keys,
        .arrival_ns = request->arrival_ns,
        .admission_ns = request->admission_ns,
    };
    event(cache->policy, &told, cache->now_ns);
}

static void tell_hit(struct kv_cache *cache, int32_t block_idx, int32_t request_idx)
{
    if (cache->policy->functions->hit != NULL) {
        cache->policy->functions->hit(cache->policy, block_idx, request_idx, cache->now_ns);
    }
}

/* ---- the pool's keeper ----------------------------------------------------------------------- */

static void on_idle(void *user, int32_t block_idx)
{
    struct kv_cache *cache = user;
    if (cache->policy->functions->idle != NULL) {
        cache->policy->functions->idle(cache->policy, block_idx, cache->now_ns);
    }
}

static void on_busy(void *user, int32_t block_idx)
{
    struct kv_cache *cache = user;
    if (cache->policy->functions->busy != NULL) {
        cache->policy->functions->busy(cache->policy, block_idx);
    }
}

/* The policy sees the block while it is still in its place. */
static void forget(struct kv_cache *cache, int32_t block_idx)
{
    if (cache->policy->functions->evict != NULL) {
        cache->policy->functions->evict(cache->policy, block_idx);
    }
    if (cache->forgets != NULL) {
        cache->forgets(cache->user, &cache->tree.keys[block_idx],
                       kv_cache_token_ids(cache, block_idx), block_idx);
    }
    struct kv_want *nearest = cache->tree.nodes[block_idx].nearest;
    if (nearest != NULL) {
        nearest->block_idx = -1;
        cache->tree.nodes[block_idx].nearest = NULL;
    }
    if (block_idx == cache->last_victim || block_idx == cache->last_parent) {
        cache->last_victim = -1;
        cache->last_parent = -1;
    }
    kv_table_remove(&cache->table, block_idx);
    kv_tree_remove(&cache->tree, block_idx);
    kv_pool_forget(cache->pool, block_idx);
    cache->metrics.num_evicted++;
}

/* The policy's next victim, and the tail behind it that goes first. -1: the policy is wrong, or
 * somebody pinned a block and not those before it. */
static int32_t find_victim(struct kv_cache *cache, int32_t *victim)
{
    *victim = cache->policy->functions->victim(cache->policy, cache->now_ns);
    if (*victim < 0 || *victim >= cache->pool->num_blocks || !kv_cache_is_idle(cache, *victim)) {
        assert(!"a victim is idle");
        return -1;
    }
    int32_t block_idx =
        kv_tree_tail(&cache->tree, *victim == cache->last_victim ? cache->last_parent : *victim);
    if (!kv_cache_is_idle(cache, block_idx)) {
        assert(!"an idle block has idle descendants");
        return -1;
    }
    return block_idx;
}

/* Forgets up to num_blocks of the policy's next victim and its descendants: from a tail upwards as
 * long as the path has no other branch, at least one block. Where it branches the policy is asked
 * again, and goes on from there if its answer is the same. False if nothing could be forgotten. */
static bool forget_victim(struct kv_cache *cache, int32_t num_blocks)
{
    int32_t victim, block_idx = find_victim(cache, &victim);
    if (block_idx < 0) {
        return false;
    }
    for (;;) {
        int32_t parent = cache->tree.nodes[block_idx].parent;
        forget(cache, block_idx);
        num_blocks--;
        if (block_idx == victim) {
            return true;
        }
        cache->last_victim = victim;
        cache->last_parent = parent;
        if (num_blocks == 0 || kv_cache_num_children(cache, parent) > 0) {
            return true;
        }
        block_idx = parent;
    }
}

static void make_room(struct kv_cache *cache, int32_t num_blocks)
{
    const struct kv_pool *pool = cache->pool;
    while (pool->num_free < num_blocks && pool->num_cached > 0 &&
           forget_victim(cache, num_blocks - pool->num_free)) {
    }
}

static void on_make_room(void *user)
{
    make_room(user, 1);
}

/* ---- create and destroy ---------------------------------------------------------------------- */

enum imbrex_status kv_cache_create(const struct kv_cache_options *options, struct kv_pool *pool,
                                   struct kv_cache **cache, struct imbrex_error *err)
{
    enum imbrex_status status;
    struct kv_policy_options policy_options = options->policy_options;
    struct kv_cache *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the prefix cache", sizeof(*created));
    }
    assert(options->max_requests >= 1 && options->block_size >= 1 && pool->keeper.user == NULL);
    *created = (struct kv_cache){
        .pool = pool,
        .num_free_requests = options->max_requests,
        .max_requests = options->max_requests,
        .last_victim = -1,
        .last_parent = -1,
        .forgets = options->forgets,
        .user = options->user,
    };
    TRY_OR_FAIL(kv_tree_create(pool->num_blocks, options->block_size, options->has_token_ids,
                               &created->tree, err));
    TRY_OR_FAIL(kv_table_create(pool->num_blocks, created->tree.keys, &created->table, err));
    TRY_OR_FAIL(kv_wanted_create(pool->num_blocks, &created->wanted, err));
    int64_t max_marks = (int64_t)MARKS_PER_BLOCK * pool->num_blocks;
    TRY_OR_FAIL(lineage_create(max_marks < MAX_MARKS ? (int32_t)max_marks : MAX_MARKS,
                               &created->lineage, err));
    created->free_requests =
        malloc((size_t)options->max_requests * sizeof(*created->free_requests));
    if (created->free_requests == NULL) {
        status =
            error_out_of_memory(err, "the prefix cache's requests",
                                (size_t)options->max_requests * sizeof(*created->free_requests));
        goto fail;
    }
    for (int32_t i = 0; i < options->max_requests; i++) {
        created->free_requests[i] = options->max_requests - 1 - i;
    }
    policy_options.num_blocks = pool->num_blocks;
    policy_options.max_requests = options->max_requests;
    policy_options.block_size = options->block_size;
    TRY_OR_FAIL(kv_policy_create(options->policy, &policy_options, &created->policy, err));
    created->policy->cache = created;
    pool->keeper = (struct kv_pool_keeper){
        .user = created,
        .idle = on_idle,
        .busy = on_busy,
        .make_room = on_make_room,
    };
    *cache = created;
    return IMBREX_STATUS_OK;

fail:
    kv_cache_destroy(created);
    return status;
}

void kv_cache_destroy(struct kv_cache *cache)
{
    if (cache == NULL) {
        return;
    }
    struct kv_pool *pool = cache->pool;
    if (pool->keeper.user == cache) {
        for (int32_t i = 0; i < pool->num_blocks; i++) {
            if (pool->is_kept[i]) {
                kv_pool_forget(pool, i);
            }
        }
        pool->keeper = (struct kv_pool_keeper){0};
    }
    kv_policy_destroy(cache->policy);
    lineage_destroy(cache->lineage);
    kv_tree_destroy(&cache->tree);
    kv_table_destroy(&cache->table);
    kv_wanted_destroy(&cache->wanted);
    free(cache->free_requests);
    free(cache);
}

/* ---- requests -------------------------------------------------------------------------------- */

static const int32_t *ids_of(const struct kv_cache *cache, const struct kv_request *request,
                             int32_t key_idx)
{
    return request->token_ids == NULL
               ? NULL
               : request->token_ids + (size_t)key_idx * (size_t)cache->tree.block_size;
}

/* Blocks that hold the prompt's head; also into blocks, unless it is NULL. */
static int32_t match(const struct kv_cache *cache, const struct kv_request *request,
                     int32_t max_blocks, int32_t *blocks, bool *has_collided)
{
    int32_t num_blocks = 0, parent = -1;
    *has_collided = false;
    while (num_blocks < request->num_keys && num_blocks < max_blocks) {
        int32_t block_idx = kv_table_find(&cache->table, &request->keys[num_blocks]);
        if (block_idx == -1) {
            break;
        }
        if (!kv_tree_is_same(&cache->tree, block_idx, parent, ids_of(cache, request, num_blocks))) {
            *has_collided = true;
            break;
        }
        if (blocks != NULL) {
            blocks[num_blocks] = block_idx;
        }
        parent = block_idx;
        num_blocks++;
    }
    return num_blocks;
}

static void join_queue(struct kv_cache *cache, struct kv_request *request)
{
    request->is_waiting = true;
    for (int32_t i = 0; i < request->num_keys; i++) {
        struct kv_want *want = kv_wanted_add(&cache->wanted, request, i);
        if (want != &request->wants[i]) {
            continue;
        }
        if (want->block_idx == -1) {
            want->block_idx = i < request->num_blocks
                                  ? request->blocks[i]
                                  : kv_table_find(&cache->table, &request->keys[i]);
        }
        if (want->block_idx != -1) {
            cache->tree.nodes[want->block_idx].nearest = want;
        }
    }
}

static void leave_queue(struct kv_cache *cache, struct kv_request *request)
{
    assert(request->is_waiting);
    for (int32_t i = 0; i < request->num_keys; i++) {
        int32_t block_idx = request->wants[i].block_idx;
        struct kv_want *nearest = kv_wanted_remove(&cache->wanted, &request->wants[i]);
        if (block_idx != -1) {
            cache->tree.nodes[block_idx].nearest = nearest;
        }
    }
    request->is_waiting = false;
}

enum imbrex_status kv_cache_arrive(struct kv_cache *cache, struct kv_request *request,
                                   int64_t now_ns)
{
    const struct kv_policy_functions *functions = cache->policy->functions;
    bool has_collided;
    if (cache->num_free_requests == 0) {
        return IMBREX_STATUS_CAPACITY;
    }
    assert(cache->tree.token_ids == NULL || request->token_ids != NULL || request->num_keys == 0);
    cache->now_ns = now_ns;
    cache->num_free_requests--;
    request->request_idx = cache->free_requests[cache->num_free_requests];
    request->arrival_ns = now_ns;
    request->admission_ns = -1;
    request->is_cut = false;
    request->fingerprint.prefix_class = request->num_keys > 0 ? request->keys[0].words[0] : 0;
    lineage_arrive(cache->lineage, request->keys, request->num_keys, now_ns, &request->fingerprint);
    request->num_blocks = match(cache, request, request->num_keys, request->blocks, &has_collided);
    join_queue(cache, request);
    tell_request(cache, request, functions->arrive);
    if (functions->miss != NULL) {
        for (int32_t i = request->num_blocks; i < request->num_keys; i++) {
            functions->miss(cache->policy, request->keys[i].words[0], now_ns);
        }
    }
    return IMBREX_STATUS_OK;
}

static void release_idx(struct kv_cache *cache, struct kv_request *request)
{
    assert(cache->num_free_requests < cache->max_requests);
    cache->free_requests[cache->num_free_requests] = request->request_idx;
    cache->num_free_requests++;
    request->request_idx = -1;
}

void kv_cache_leave(struct kv_cache *cache, struct kv_request *request, int64_t now_ns)
{
    cache->now_ns = now_ns;
    leave_queue(cache, request);
    /* What was there when it came may hold something else by now. */
    bool has_collided;
    request->num_blocks = match(cache, request, request->num_keys, request->blocks, &has_collided);
    tell_request(cache, request, cache->policy->functions->leave);
    release_idx(cache, request);
}

int32_t kv_cache_match(const struct kv_cache *cache, const struct kv_request *request,
                       int32_t max_blocks)
{
    bool has_collided;
    return match(cache, request, max_blocks, NULL, &has_collided);
}

void kv_cache_admit(struct kv_cache *cache, struct kv_request *request, int32_t max_blocks,
                    bool is_recomputed, int64_t now_ns)
{
    bool has_collided;
    cache->now_ns = now_ns;
    leave_queue(cache, request);
    request->admission_ns = now_ns;
    request->num_blocks = match(cache, request, max_blocks, request->blocks, &has_collided);
    cache->metrics.num_collisions += has_collided;
    if (!is_recomputed) {
        cache->metrics.num_queried += (uint64_t)request->num_keys;
        cache->metrics.num_hit += (uint64_t)request->num_blocks;
    }
    for (int32_t i = 0; i < request->num_blocks; i++) {
        tell_hit(cache, request->blocks[i], request->request_idx);
        kv_pool_retain(cache->pool, request->blocks[i]);
    }
    tell_request(cache, request, cache->policy->functions->admit);
}

/* A busy block that is not in the tree; request_idx: -1 for nobody. */
static void add_block(struct kv_cache *cache, const struct kv_key *key, int32_t parent,
                      const int32_t *token_ids, int32_t block_idx, int32_t request_idx)
{
    kv_tree_add(&cache->tree, block_idx, parent, key, token_ids);
    kv_table_add(&cache->table, block_idx);
    kv_pool_keep(cache->pool, block_idx);
    struct kv_want *nearest = kv_wanted_find(&cache->wanted, key);
    if (nearest != NULL) {
        nearest->block_idx = block_idx;
        cache->tree.nodes[block_idx].nearest = nearest;
    }
    if (cache->policy->functions->insert != NULL) {
        cache->policy->functions->insert(cache->policy, block_idx, request_idx, cache->now_ns);
    }
}

bool kv_cache_promote(struct kv_cache *cache, const struct kv_key *key,
                      const struct kv_key *parent_key, const int32_t *token_ids, int32_t block_idx,
                      int64_t now_ns)
{
    int32_t parent = parent_key != NULL ? kv_table_find(&cache->table, parent_key) : -1;
    if ((parent_key != NULL && parent == -1) || kv_table_find(&cache->table, key) != -1) {
        return false;
    }
    cache->now_ns = now_ns;
    add_block(cache, key, parent, token_ids, block_idx, -1);
    cache->metrics.num_promoted++;
    kv_pool_release(cache->pool, block_idx);
    return true;
}

bool kv_cache_promote_for(struct kv_cache *cache, struct kv_request *request,
                          const struct kv_key *key, const int32_t *token_ids, int32_t block_idx,
                          bool is_recomputed, int64_t now_ns)
{
    assert(request->request_idx != -1 && !request->is_waiting);
    if (request->is_cut || kv_table_find(&cache->table, key) != -1) {
        return false;
    }
    cache->now_ns = now_ns;
    add_block(cache, key, request->num_blocks > 0 ? request->blocks[request->num_blocks - 1] : -1,
              token_ids, block_idx, -1);
    tell_hit(cache, block_idx, request->request_idx);
    request->blocks[request->num_blocks] = block_idx;
    request->num_blocks++;
    cache->metrics.num_promoted++;
    cache->metrics.num_hit += !is_recomputed;
    return true;
}

int32_t kv_cache_insert(struct kv_cache *cache, struct kv_request *request,
                        const struct kv_key *key, const int32_t *token_ids, int32_t block_idx,
                        int64_t now_ns)
{
    assert(request->request_idx != -1 && !request->is_waiting);
    cache->now_ns = now_ns;
    if (request->is_cut) {
        return block_idx;
    }
    int32_t parent = request->num_blocks > 0 ? request->blocks[request->num_blocks - 1] : -1;
    int32_t existing = kv_table_find(&cache->table, key);
    if (existing != -1 && !kv_tree_is_same(&cache->tree, existing, parent, token_ids)) {
        cache->metrics.num_collisions++;
        request->is_cut = true;
        return block_idx;
    }
    if (existing == -1) {
        add_block(cache, key, parent, token_ids, block_idx, request->request_idx);
        cache->metrics.num_inserted++;
    } else if (existing != block_idx) { /* else: two choices of one request share it already */
        tell_hit(cache, existing, request->request_idx);
        kv_pool_retain(cache->pool, existing);
        kv_pool_release(cache->pool, block_idx);
        cache->metrics.num_duplicates++;
        block_idx = existing;
    }
    request->blocks[request->num_blocks] = block_idx;
    request->num_blocks++;
    return block_idx;
}

void kv_cache_finish(struct kv_cache *cache, struct kv_request *request, int64_t now_ns)
{
    assert(!request->is_waiting);
    cache->now_ns = now_ns;
    tell_request(cache, request, cache->policy->functions->finish);
    lineage_finish(cache->lineage, request->keys, request->num_keys, now_ns, &request->fingerprint);
    release_idx(cache, request);
}

int32_t kv_cache_next_victim(struct kv_cache *cache, int64_t now_ns)
{
    int32_t victim;
    cache->now_ns = now_ns;
    return cache->pool->num_cached > 0 ? find_victim(cache, &victim) : -1;
}

void kv_cache_make_room(struct kv_cache *cache, int32_t num_blocks, int64_t now_ns)
{
    cache->now_ns = now_ns;
    make_room(cache, num_blocks);
}

void kv_cache_clear(struct kv_cache *cache, int64_t now_ns)
{
    kv_cache_make_room(cache, cache->pool->num_blocks, now_ns);
}

/* ---- questions ------------------------------------------------------------------------------- */

int32_t kv_cache_parent(const struct kv_cache *cache, int32_t block_idx)
{
    return cache->tree.nodes[block_idx].parent;
}

int32_t kv_cache_depth(const struct kv_cache *cache, int32_t block_idx)
{
    return cache->tree.nodes[block_idx].depth;
}

bool kv_cache_is_idle(const struct kv_cache *cache, int32_t block_idx)
{
    return kv_pool_is_cached(cache->pool, block_idx);
}

int32_t kv_cache_num_children(const struct kv_cache *cache, int32_t block_idx)
{
    return cache->tree.nodes[block_idx].num_children;
}

bool kv_cache_has(const struct kv_cache *cache, const struct kv_key *key)
{
    return kv_table_find(&cache->table, key) != -1;
}

const struct kv_key *kv_cache_key(const struct kv_cache *cache, int32_t block_idx)
{
    return &cache->tree.keys[block_idx];
}

const int32_t *kv_cache_token_ids(const struct kv_cache *cache, int32_t block_idx)
{
    const int32_t *token_ids = cache->tree.token_ids;
    return token_ids == NULL ? NULL
                             : token_ids + (size_t)block_idx * (size_t)cache->tree.block_size;
}

uint64_t kv_cache_key_hash(const struct kv_cache *cache, int32_t block_idx)
{
    return cache->tree.keys[block_idx].words[0];
}

int64_t kv_cache_wanted(const struct kv_cache *cache, int32_t block_idx)
{
    const struct kv_want *nearest = cache->tree.nodes[block_idx].nearest;
    return nearest != NULL ? nearest->request->order : INT64_MAX;
}

void kv_cache_read_metrics(const struct kv_cache *cache, struct kv_cache_metrics *metrics)
{
    *metrics = cache->metrics;
    metrics->num_cached = cache->pool->num_cached;
    metrics->num_free = cache->pool->num_free;
    metrics->num_used = cache->pool->num_blocks - kv_pool_num_available(cache->pool);
}

struct kv_policy *kv_cache_policy(struct kv_cache *cache)
{
    return cache->policy;
}

size_t kv_cache_state_bytes(const struct kv_cache *cache)
{
    return sizeof(*cache) + kv_tree_bytes(&cache->tree) + lineage_bytes(cache->lineage) +
           ((size_t)cache->table.mask + 1) * sizeof(*cache->table.slots) +
           ((size_t)cache->wanted.mask + 1) * sizeof(struct kv_want *) +
           (size_t)cache->max_requests * sizeof(*cache->free_requests);
}

/* A kept block: in the table, below a kept parent that is in use if it is, known to its waiters. */
static bool check_block(const struct kv_cache *cache, int32_t block_idx)
{
    const struct kv_tree_node *node = &cache->tree.nodes[block_idx];
    const struct kv_key *key = &cache->tree.keys[block_idx];
    struct kv_want *nearest = kv_wanted_find(&cache->wanted, key);
    return kv_table_find(&cache->table, key) == block_idx &&
           kv_tree_check(&cache->tree, block_idx) && node->nearest == nearest &&
           (nearest == NULL || nearest->block_idx == block_idx) &&
           (node->parent == -1 ||
            (cache->pool->is_kept[node->parent] &&
             (!kv_cache_is_idle(cache, node->parent) || kv_cache_is_idle(cache, block_idx))));
}

bool kv_cache_check(const struct kv_cache *cache)
{
    const struct kv_pool *pool = cache->pool;
    int32_t num_kept = 0, num_below = 0, num_children = 0;
    if (!kv_pool_check(pool) || !kv_wanted_check(&cache->wanted)) {
        return false;
    }
    for (int32_t i = 0; i < pool->num_blocks; i++) {
        if (!pool->is_kept[i]) {
            continue;
        }
        if (!check_block(cache, i)) {
            return false;
        }
        num_kept++;
        num_below += cache->tree.nodes[i].parent != -1;
        num_children += cache->tree.nodes[i].num_children;
    }
    for (size_t i = 0; i <= cache->wanted.mask; i++) {
        for (const struct kv_want *want = cache->wanted.chains[i]; want != NULL;
             want = want->chain) {
            if (want->block_idx != -1 && cache->tree.nodes[want->block_idx].nearest != want) {
                return false;
            }
        }
    }
    return num_kept == cache->table.num_entries && num_below == num_children;
}
