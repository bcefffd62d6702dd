/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix cache with each of its policies, and the hasher of its keys, with every single request
 * for memory refused in turn: the right status, nothing leaked, the results untouched, the pool as
 * it was; and no request at all once they are created. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "fault.h"
#include "kv/kv_cache.h"

enum { BLOCK_SIZE = 4, NUM_KEYS = 5, NUM_BLOCKS = 7, NUM_REQUESTS = 2 };

struct life_request {
    struct kv_request request;
    struct kv_key keys[NUM_KEYS];
    int32_t token_ids[NUM_KEYS * BLOCK_SIZE];
    struct kv_want wants[NUM_KEYS];
    int32_t blocks[NUM_KEYS];
};

/* Requests that share what comes first, one after the other, in a pool that is too small for all
 * they leave behind. */
static void run(struct kv_cache *cache, struct kv_pool *pool, struct kv_hasher *hasher)
{
    const struct kv_identity identity = {.model_id = "model", .layout = "layout"};
    struct kv_key root;
    kv_hasher_root(hasher, &identity, "salt", 4, &root);
    for (int32_t i = 0; i < 20; i++) {
        struct life_request life;
        memset(&life, 0, sizeof(life));
        for (int32_t j = 0; j < NUM_KEYS * BLOCK_SIZE; j++) {
            life.token_ids[j] = j / (3 + i % 4) + (j > 2 * BLOCK_SIZE ? i % 5 : 0);
        }
        kv_hasher_blocks(hasher, &root, life.token_ids, BLOCK_SIZE, NUM_KEYS, life.keys);
        life.request = (struct kv_request){
            .keys = life.keys,
            .token_ids = life.token_ids,
            .wants = life.wants,
            .blocks = life.blocks,
            .num_keys = NUM_KEYS,
            .order = i,
        };
        struct kv_request *request = &life.request;
        assert_int_equal(kv_cache_arrive(cache, request, 10 * i), IMBREX_STATUS_OK);
        kv_cache_admit(cache, request, NUM_KEYS - 1, false, 10 * i + 1);
        while (request->num_blocks < NUM_KEYS) {
            int32_t block_idx, key_idx = request->num_blocks;
            assert_int_equal(kv_pool_acquire(pool, &block_idx), IMBREX_STATUS_OK);
            kv_cache_insert(cache, request, &life.keys[key_idx],
                            &life.token_ids[key_idx * BLOCK_SIZE], block_idx, 10 * i + 2);
        }
        kv_cache_finish(cache, request, 10 * i + 3);
        for (int32_t j = NUM_KEYS - 1; j >= 0; j--) {
            kv_pool_release(pool, life.blocks[j]);
        }
        assert_true(kv_cache_check(cache));
    }
}

/* arg: the name of the policy. */
static enum imbrex_status live(void *arg)
{
    const char *policy = arg;
    const struct kv_cache_options options = {
        .max_requests = NUM_REQUESTS,
        .block_size = BLOCK_SIZE,
        .has_token_ids = true,
        .policy = policy,
        .policy_options = kv_policy_options_default(),
    };
    struct kv_pool pool = {0};
    struct kv_cache *cache = NULL;
    struct kv_hasher *hasher = NULL;
    struct imbrex_error err = {0};
    enum imbrex_status status = kv_pool_create(NUM_BLOCKS, &pool, &err);
    if (status != IMBREX_STATUS_OK) {
        goto end;
    }
    status = kv_cache_create(&options, &pool, &cache, &err);
    if (status != IMBREX_STATUS_OK) {
        assert_null(cache);
        assert_null(pool.keeper.user);
        goto end;
    }
    status = kv_hasher_create(&hasher, &err);
    if (status != IMBREX_STATUS_OK) {
        assert_null(hasher);
        goto end;
    }
    int64_t num_calls = fault_num_calls(FAULT_MEMORY);
    run(cache, &pool, hasher);
    assert_int_equal(fault_num_calls(FAULT_MEMORY), num_calls);
    struct kv_cache_metrics metrics;
    kv_cache_read_metrics(cache, &metrics);
    assert_true(metrics.num_hit > 0 && metrics.num_evicted > 0);
end:
    assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
    kv_hasher_destroy(hasher);
    kv_cache_destroy(cache);
    kv_pool_destroy(&pool);
    return status;
}

/* Catches: an allocation that is not checked or not freed, a lookup, insertion, eviction or event
 * that allocates. */
static void test_memory(void **state)
{
    (void)state;
    for (int32_t i = 0; kv_policy_name(i) != NULL; i++) {
        assert_true(fault_each_call(FAULT_MEMORY, false, IMBREX_STATUS_OUT_OF_MEMORY, live,
                                    (void *)(uintptr_t)kv_policy_name(i)) >= 13);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests_name("fault_kv_cache", tests, NULL, NULL);
}
