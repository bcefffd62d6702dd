/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_cache.h"

#include <assert.h>
#include <stdlib.h>

#include "base/memory.h"

#define FINISHES_A_LOOK 64 /* at the policy's state */

/* A request that waits or runs; used again for others. */
struct live_request {
    struct kv_request request;
    struct kv_key *keys;
    int32_t max_blocks; /* of keys, wants and blocks */
    struct live_request *next_free;
};

struct sim_cache {
    struct sim_store base; /* users: NULL unless it is asked for room */
    struct kv_pool pool;
    struct kv_cache *cache;
    struct sim_tier *tier; /* NULL: none */
    const struct sim_hints *hints;
    struct live_request **live; /* [num_requests] NULL: not live */
    struct live_request *free;
    int32_t context_size;
    int64_t num_finished;
    size_t state_bytes;
};

static void free_live(struct live_request *live)
{
    if (live != NULL) {
        free(live->keys);
        free(live->request.wants);
        free(live->request.blocks);
        free(live);
    }
}

static enum imbrex_status make_live(struct sim_cache *cache, int32_t num_blocks,
                                    struct live_request **live, struct imbrex_error *err)
{
    struct live_request *made = cache->free;

    if (made != NULL && made->max_blocks >= num_blocks) {
        cache->free = made->next_free;
        *live = made;
        return IMBREX_STATUS_OK;
    }
    if (made != NULL) {
        cache->free = made->next_free;
        free_live(made);
    }
    size_t max_blocks = (size_t)num_blocks + (size_t)num_blocks / 4 + 8;
    made = calloc(1, sizeof(*made));
    if (made != NULL) {
        made->max_blocks = (int32_t)max_blocks;
        made->keys = malloc(max_blocks * sizeof(*made->keys));
        made->request.wants = malloc(max_blocks * sizeof(*made->request.wants));
        made->request.blocks = malloc(max_blocks * sizeof(*made->request.blocks));
    }
    if (made == NULL || made->keys == NULL || made->request.wants == NULL ||
        made->request.blocks == NULL) {
        free_live(made);
        return error_out_of_memory(err, "a request of a replay",
                                   max_blocks * sizeof(struct kv_want));
    }
    *live = made;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cache_arrive(struct sim_store *store, int32_t request_idx, int64_t order,
                                       int64_t now_ns, struct imbrex_error *err)
{
    struct sim_cache *cache = (struct sim_cache *)store;
    const struct sim_request *request = &store->trace->requests[request_idx];
    const int32_t *path = sim_trace_path(store->trace, request_idx);
    int32_t num_blocks = sim_store_num_blocks(store, request_idx);
    struct live_request *live = NULL;

    TRY(make_live(cache, num_blocks, &live, err));
    if (cache->tier != NULL) {
        sim_tier_advance(cache->tier, now_ns);
    }
    for (int32_t i = 0; i < num_blocks; i++) {
        live->keys[i] = sim_node_key(path[i]);
    }
    live->request.keys = live->keys;
    live->request.num_keys = num_blocks;
    live->request.order = order;
    live->request.fingerprint = (struct kv_fingerprint){
        .last_gap_ns = -1,
        .num_prompt_tokens = request->num_tokens,
        .context_size = cache->context_size,
        .temperature = 1,
    };
    if (cache->hints != NULL) {
        sim_hints_fill(cache->hints, request_idx, &live->request.fingerprint);
    }
    enum imbrex_status status = kv_cache_arrive(cache->cache, &live->request, now_ns);
    if (status != IMBREX_STATUS_OK) {
        free_live(live);
        return error_set(err, status, "more requests wait or run than the replay expected");
    }
    cache->live[request_idx] = live;
    if (cache->tier != NULL) {
        sim_tier_arrive(cache->tier, request_idx, (int32_t)order, now_ns);
    }
    return IMBREX_STATUS_OK;
}

static void count_users(struct sim_store *store, int32_t request_idx, int32_t change)
{
    const int32_t *path = sim_trace_path(store->trace, request_idx);
    int32_t num_blocks = store->users != NULL ? sim_store_num_blocks(store, request_idx) : 0;

    for (int32_t i = 0; i < num_blocks; i++) {
        int32_t before = store->users[path[i]];
        store->users[path[i]] += change;
        store->num_used += (store->users[path[i]] > 0) - (before > 0);
    }
}

static enum imbrex_status cache_admit(struct sim_store *store, int32_t request_idx, int64_t now_ns,
                                      struct sim_found *found, struct imbrex_error *err)
{
    struct sim_cache *cache = (struct sim_cache *)store;
    struct kv_request *request = &cache->live[request_idx]->request;

    if (cache->tier != NULL) {
        sim_tier_advance(cache->tier, now_ns);
    }
    kv_cache_admit(cache->cache, request, request->num_keys, false, now_ns);
    *found = (struct sim_found){.num_hits = request->num_blocks};
    if (cache->tier != NULL) {
        sim_tier_admit(cache->tier, request_idx, found->num_hits, request->num_keys, now_ns);
        found->num_hits += sim_tier_num_loaded(cache->tier);
    }
    kv_cache_make_room(cache->cache, request->num_keys - request->num_blocks, now_ns);
    while (request->num_blocks < request->num_keys) {
        const struct kv_key *key = &request->keys[request->num_blocks];
        int32_t block_idx = -1;
        enum imbrex_status status = kv_pool_acquire(&cache->pool, &block_idx);
        if (status != IMBREX_STATUS_OK) {
            return error_set(err, IMBREX_STATUS_INTERNAL,
                             "a replay found no room where the timeline has some");
        }
        kv_cache_insert(cache->cache, request, key, NULL, block_idx, now_ns);
        if (request->is_cut) {
            kv_pool_release(&cache->pool, block_idx);
            return error_set(err, IMBREX_STATUS_INTERNAL, "two blocks of a replay have one key");
        }
    }
    if (cache->tier != NULL) {
        found->wait_ns = sim_tier_computed(cache->tier, request_idx, request->num_keys, now_ns);
    }
    count_users(store, request_idx, 1);
    return IMBREX_STATUS_OK;
}

static void look_at_state(struct sim_cache *cache)
{
    const struct kv_policy *policy = kv_cache_policy(cache->cache);
    size_t state_bytes = policy->functions->state_bytes(policy);
    struct kv_cache_metrics metrics;

    kv_cache_read_metrics(cache->cache, &metrics);
    cache->base.num_evicted = (int64_t)metrics.num_evicted;
    if (state_bytes > cache->state_bytes) {
        cache->state_bytes = state_bytes;
    }
}

static void cache_finish(struct sim_store *store, int32_t request_idx, int64_t now_ns)
{
    struct sim_cache *cache = (struct sim_cache *)store;
    const struct sim_request *traced = &store->trace->requests[request_idx];
    struct live_request *live = cache->live[request_idx];
    struct kv_request *request = &live->request;

    if (cache->tier != NULL) {
        sim_tier_advance(cache->tier, now_ns);
    }
    request->fingerprint.num_output_tokens = traced->num_output;
    request->fingerprint.finish = (enum kv_finish)traced->finish;
    kv_cache_finish(cache->cache, request, now_ns);
    for (int32_t i = request->num_blocks - 1; i >= 0; i--) {
        kv_pool_release(&cache->pool, request->blocks[i]);
    }
    count_users(store, request_idx, -1);
    cache->live[request_idx] = NULL;
    live->next_free = cache->free;
    cache->free = live;
    if (cache->num_finished++ % FINISHES_A_LOOK == 0 ||
        cache->num_finished == store->trace->num_requests) {
        look_at_state(cache);
    }
}

static void cache_destroy(struct sim_store *store)
{
    struct sim_cache *cache = (struct sim_cache *)store;

    sim_tier_destroy(cache->tier);
    kv_cache_destroy(cache->cache);
    kv_pool_destroy(&cache->pool);
    for (int32_t i = 0; cache->live != NULL && i < store->trace->num_requests; i++) {
        free_live(cache->live[i]);
    }
    while (cache->free != NULL) {
        struct live_request *next = cache->free->next_free;
        free_live(cache->free);
        cache->free = next;
    }
    free(cache->live);
    free(store->users);
    free(cache);
}

static const struct sim_store_functions cache_functions = {
    .destroy = cache_destroy,
    .arrive = cache_arrive,
    .admit = cache_admit,
    .finish = cache_finish,
};

static int32_t context_size_of(const struct sim_trace *trace)
{
    int64_t largest = 1;

    for (int32_t i = 0; i < trace->num_requests; i++) {
        int64_t num_tokens = (int64_t)trace->requests[i].num_tokens + trace->requests[i].num_output;
        largest = num_tokens > largest ? num_tokens : largest;
    }
    return largest < INT32_MAX ? (int32_t)largest : INT32_MAX;
}

enum imbrex_status sim_cache_create(const struct sim_trace *trace,
                                    const struct sim_cache_options *options,
                                    struct sim_store **store, struct imbrex_error *err)
{
    struct sim_cache *cache = calloc(1, sizeof(*cache));
    size_t num_requests = (size_t)trace->num_requests;
    struct kv_cache_options cache_options = {.max_requests = options->max_requests,
                                             .block_size = trace->block_size,
                                             .policy = options->policy,
                                             .policy_options = options->policy_options};
    /* More blocks than the trace has different ones are never used. */
    int32_t num_blocks =
        options->capacity < trace->num_nodes ? options->capacity : trace->num_nodes;
    enum imbrex_status status;

    if (cache == NULL) {
        return error_out_of_memory(err, "a replayed cache", sizeof(*cache));
    }
    cache->base = (struct sim_store){
        .functions = &cache_functions, .trace = trace, .capacity = options->capacity};
    cache->hints = options->hints;
    cache->context_size = context_size_of(trace);
    cache->live = calloc(num_requests, sizeof(*cache->live));
    if (options->is_live) {
        cache->base.users = calloc((size_t)trace->num_nodes + 1, sizeof(int32_t));
    }
    if (cache->live == NULL || (options->is_live && cache->base.users == NULL)) {
        status = error_out_of_memory(err, "a replayed cache", num_requests * sizeof(void *));
        goto fail;
    }
    num_blocks = num_blocks > 0 ? num_blocks : 1;
    if (options->tier != NULL) {
        TRY_OR_FAIL(sim_tier_create(trace, options->tier, num_blocks, &cache->tier, err));
        cache_options.forgets = sim_tier_forgets;
        cache_options.user = cache->tier;
    }
    TRY_OR_FAIL(kv_pool_create(num_blocks, &cache->pool, err));
    TRY_OR_FAIL(kv_cache_create(&cache_options, &cache->pool, &cache->cache, err));
    if (cache->tier != NULL) {
        sim_tier_attach(cache->tier, cache->cache, &cache->pool);
    }
    *store = &cache->base;
    return IMBREX_STATUS_OK;
fail:
    cache_destroy(&cache->base);
    return status;
}

size_t sim_cache_state_bytes(const struct sim_store *store)
{
    return ((const struct sim_cache *)store)->state_bytes;
}

bool sim_cache_read_tier(const struct sim_store *store, struct sim_tier_metrics *metrics)
{
    const struct sim_tier *tier = ((const struct sim_cache *)store)->tier;
    if (tier != NULL) {
        sim_tier_read_metrics(tier, metrics);
    }
    return tier != NULL;
}

bool sim_cache_check(const struct sim_store *store)
{
    const struct sim_cache *cache = (const struct sim_cache *)store;
    return kv_cache_check(cache->cache) && (cache->tier == NULL || sim_tier_check(cache->tier));
}
