/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kv/policy_world.h"

#include <string.h>

#include "tests/test.h"

uint32_t world_random(uint32_t *state, uint32_t limit)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % limit;
}

void world_init(struct world *world, const char *policy, int32_t num_blocks,
                const struct kv_policy_options *options)
{
    struct imbrex_error err;
    const struct kv_cache_options cache_options = {
        .max_requests = WORLD_MAX_REQUESTS + 1,
        .block_size = 512,
        .policy = policy,
        .policy_options = options != NULL ? *options : kv_policy_options_default(),
    };
    memset(world, 0, sizeof(*world));
    assert_int_equal(kv_pool_create(num_blocks, &world->pool, &err), IMBREX_STATUS_OK);
    assert_int_equal(kv_cache_create(&cache_options, &world->pool, &world->cache, &err),
                     IMBREX_STATUS_OK);
}

void world_deinit(struct world *world)
{
    kv_cache_destroy(world->cache);
    kv_pool_destroy(&world->pool);
}

static void fill_keys(const int32_t *path, int32_t num_blocks, struct kv_key *keys)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int32_t i = 0; i < num_blocks; i++) {
        hash = (hash ^ (uint64_t)path[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 31;
        keys[i] = (struct kv_key){{hash, ~hash, 1, 2}};
    }
}

void world_arrive(struct world *world, int32_t slot, const int32_t *path, int32_t num_blocks,
                  const struct kv_fingerprint *fingerprint)
{
    struct world_request *asked = &world->requests[slot];
    assert_true(num_blocks <= WORLD_MAX_PATH && !asked->is_waiting && !asked->is_running);
    fill_keys(path, num_blocks, asked->keys);
    asked->request = (struct kv_request){
        .keys = asked->keys,
        .wants = asked->wants,
        .num_keys = num_blocks,
        .order = ++world->num_arrivals,
        .blocks = asked->blocks,
    };
    if (fingerprint != NULL) {
        asked->request.fingerprint = *fingerprint;
    }
    assert_int_equal(kv_cache_arrive(world->cache, &asked->request, world->now_ns),
                     IMBREX_STATUS_OK);
    asked->is_waiting = true;
}

int32_t world_run(struct world *world, int32_t slot)
{
    struct world_request *asked = &world->requests[slot];
    kv_cache_admit(world->cache, &asked->request, asked->request.num_keys, false, world->now_ns);
    int32_t num_hits = asked->request.num_blocks;
    for (int32_t i = num_hits; i < asked->request.num_keys; i++) {
        int32_t block_idx;
        assert_int_equal(kv_pool_acquire(&world->pool, &block_idx), IMBREX_STATUS_OK);
        kv_cache_insert(world->cache, &asked->request, &asked->keys[i], NULL, block_idx,
                        world->now_ns);
    }
    asked->is_waiting = false;
    asked->is_running = true;
    return num_hits;
}

void world_end(struct world *world, int32_t slot)
{
    struct world_request *asked = &world->requests[slot];
    kv_cache_finish(world->cache, &asked->request, world->now_ns);
    for (int32_t i = asked->request.num_blocks - 1; i >= 0; i--) {
        kv_pool_release(&world->pool, asked->blocks[i]);
    }
    asked->is_running = false;
}

void world_leave(struct world *world, int32_t slot)
{
    kv_cache_leave(world->cache, &world->requests[slot].request, world->now_ns);
    world->requests[slot].is_waiting = false;
}

bool world_promote(struct world *world, int32_t slot)
{
    const struct world_request *asked = &world->requests[slot];
    int32_t i = kv_cache_match(world->cache, &asked->request, asked->request.num_keys), block_idx;
    if (i == asked->request.num_keys) {
        return false;
    }
    assert_int_equal(kv_pool_acquire(&world->pool, &block_idx), IMBREX_STATUS_OK);
    if (kv_cache_promote(world->cache, &asked->keys[i], i > 0 ? &asked->keys[i - 1] : NULL, NULL,
                         block_idx, world->now_ns)) {
        return true;
    }
    kv_pool_release(&world->pool, block_idx);
    return false;
}

int32_t world_use(struct world *world, const int32_t *path, int32_t num_blocks,
                  const struct kv_fingerprint *fingerprint)
{
    world_arrive(world, 0, path, num_blocks, fingerprint);
    int32_t num_hits = world_run(world, 0);
    world_end(world, 0);
    return num_hits;
}

int32_t world_resident(struct world *world, const int32_t *path, int32_t num_blocks)
{
    struct kv_key keys[WORLD_MAX_PATH];
    fill_keys(path, num_blocks, keys);
    const struct kv_request asked = {.keys = keys, .num_keys = num_blocks};
    return kv_cache_match(world->cache, &asked, num_blocks);
}
