/* SPDX-License-Identifier: Apache-2.0 */
/* What the textbooks say of each policy, and what all of them owe the cache. */
#include <stdlib.h>
#include <string.h>

#include "kv/policy_predictive.h"
#include "kv/policy_seed.h"
#include "tests/kv/policy_world.h"
#include "tests/test.h"

#define SECOND INT64_C(1000000000)

static int32_t use_one(struct world *world, int32_t number)
{
    world->now_ns += SECOND / 10;
    return world_use(world, &number, 1, NULL);
}

static bool is_resident(struct world *world, int32_t number)
{
    return world_resident(world, &number, 1) == 1;
}

/* Catches: an lfu that counts nothing or forgets the frequent for the recent. */
static void test_lfu_keeps_the_frequent(void **state)
{
    (void)state;
    struct world world;
    world_init(&world, "lfu", 4, NULL);
    for (int32_t i = 0; i < 3; i++) {
        use_one(&world, 1);
        use_one(&world, 2);
    }
    for (int32_t number = 10; number < 30; number++) {
        use_one(&world, number);
    }
    assert_true(is_resident(&world, 1));
    assert_true(is_resident(&world, 2));
    assert_true(is_resident(&world, 29));
    assert_true(is_resident(&world, 28));
    assert_false(is_resident(&world, 27));
    world_deinit(&world);
}

/* Catches: uses of a forgotten block that count for the next one in its place. */
static void test_lfu_starts_anew(void **state)
{
    (void)state;
    struct world world;
    world_init(&world, "lfu", 2, NULL);
    for (int32_t i = 0; i < 5; i++) {
        use_one(&world, 1);
    }
    use_one(&world, 2); /* 1: five uses, 2: one */
    use_one(&world, 3); /* in the place of 2 */
    use_one(&world, 3);
    use_one(&world, 4); /* in the place of 3: two uses are fewer than five */
    assert_true(is_resident(&world, 1));
    assert_false(is_resident(&world, 3));
    world_deinit(&world);
}

/* Catches: an s3fifo whose main queue a scan can flush, or that keeps no keys of what left. */
static void test_s3fifo_demotes_quickly(void **state)
{
    (void)state;
    struct world world;
    world_init(&world, "s3fifo", 20, NULL);
    for (int32_t i = 0; i < 4; i++) {
        for (int32_t number = 1; number <= 10; number++) {
            use_one(&world, number);
        }
    }
    for (int32_t number = 100; number < 400; number++) {
        use_one(&world, number);
    }
    for (int32_t number = 1; number <= 10; number++) {
        assert_true(is_resident(&world, number));
    }
    /* 380 left the small queue a moment ago: back, it goes to the main one and outlives the
     * scan. */
    assert_false(is_resident(&world, 380));
    use_one(&world, 380);
    for (int32_t number = 400; number < 430; number++) {
        use_one(&world, number);
    }
    assert_true(is_resident(&world, 380));
    world_deinit(&world);
}

/* Catches: an arc that lets a scan flush what was used twice, or whose border never moves: under
 * loops just larger than the share of what was used once, it must grow that share and hit. */
static void test_arc_adapts(void **state)
{
    (void)state;
    struct world world;
    world_init(&world, "arc", 20, NULL);
    for (int32_t i = 0; i < 2; i++) {
        for (int32_t number = 1; number <= 10; number++) {
            use_one(&world, number);
        }
    }
    for (int32_t number = 100; number < 300; number++) {
        use_one(&world, number);
    }
    int32_t num_kept = 0;
    for (int32_t number = 1; number <= 10; number++) {
        num_kept += is_resident(&world, number);
    }
    assert_int_equal(num_kept, 10);
    /* New pairs at a distance of 14: found only if what was used once has more than 10 blocks. */
    int32_t num_late_hits = 0;
    for (int32_t i = 0; i < 600; i++) {
        use_one(&world, 1000 + i);
        if (i >= 14) {
            num_late_hits += use_one(&world, 1000 + i - 14) * (i > 500);
        }
    }
    assert_true(num_late_hits >= 60);
    world_deinit(&world);
}

/* Catches: a gdsf without cost (of equal uses the deep block is dearer to compute again, so the
 * short paths go) or without age (what was used often long ago never goes). */
static void test_gdsf_costs_and_ages(void **state)
{
    (void)state;
    struct world world;
    int32_t path[40];
    for (int32_t i = 0; i < 40; i++) {
        path[i] = 500 + i;
    }
    world_init(&world, "gdsf", 60, NULL);
    for (int32_t i = 0; i < 3; i++) {
        world_use(&world, path, 40, NULL);
    }
    for (int32_t number = 1; number <= 40; number++) {
        use_one(&world, number);
    }
    assert_int_equal(world_resident(&world, path, 40), 40);
    for (int32_t i = 0; i < 400; i++) {
        for (int32_t number = 0; number < 4; number++) {
            use_one(&world, 1000 + 4 * i + number);
        }
    }
    assert_true(world_resident(&world, path, 40) < 40);
    world_deinit(&world);
}

/* Catches: a queue policy that forgets what is wanted, the near before the far, or protects for
 * ever what a request wanted that gave up. */
static void test_queue_protects_the_nearest(void **state)
{
    (void)state;
    static const char *const names[] = {"queue", "predictive"};
    for (size_t p = 0; p < 2; p++) {
        struct world world;
        world_init(&world, names[p], 6, NULL);
        for (int32_t number = 1; number <= 6; number++) {
            use_one(&world, number);
        }
        for (int32_t number = 1; number <= 4; number++) { /* 1 nearest, 4 farthest */
            world_arrive(&world, number, &number, 1, NULL);
        }
        use_one(&world, 7);
        use_one(&world, 8);
        use_one(&world, 9);
        for (int32_t number = 1; number <= 4; number++) {
            assert_true(is_resident(&world, number));
        }
        /* Three that run at once need one block of what is wanted: that of the farthest. */
        for (int32_t slot = 10; slot < 13; slot++) {
            int32_t number = 20 + slot;
            world_arrive(&world, slot, &number, 1, NULL);
            world_run(&world, slot);
        }
        assert_true(is_resident(&world, 3));
        assert_false(is_resident(&world, 4));
        for (int32_t slot = 10; slot < 13; slot++) {
            world_end(&world, slot);
        }
        world_leave(&world, 1);
        for (int32_t number = 50; number < 60; number++) {
            use_one(&world, number);
        }
        assert_false(is_resident(&world, 1));
        assert_true(is_resident(&world, 2));
        assert_true(is_resident(&world, 3));
        for (int32_t slot = 2; slot <= 4; slot++) {
            world_leave(&world, slot);
        }
        world_deinit(&world);
    }
}

/* Catches: a seed whose table of n-grams does not learn which pattern follows. */
static void test_seed_prefetch_list(void **state)
{
    (void)state;
    struct world world;
    struct kv_fingerprint fingerprints[3] = {{.turn = 1}, {.turn = 2}, {.turn = 5}};
    int32_t patterns[SEED_NUM_PREFETCH];
    world_init(&world, "seed", 8, NULL);
    assert_int_equal(kv_policy_seed_prefetch(kv_cache_policy(world.cache), patterns), 0);
    for (int32_t i = 0; i < 30; i++) {
        int32_t number = 7;
        world_use(&world, &number, 1, &fingerprints[i % 3]);
    }
    assert_int_equal(kv_policy_seed_prefetch(kv_cache_policy(world.cache), patterns), 1);
    fingerprints[0].prefix_class = world.requests[0].keys[0].words[0];
    assert_int_equal(patterns[0], kv_policy_seed_pattern(&fingerprints[0]));
    world_deinit(&world);
}

/* ---- what all owe ---------------------------------------------------------------------------- */

/* A step of a random life: requests over a tree of paths come, wait, run, end, give up. */
static int32_t step(struct world *world, uint32_t *random)
{
    int32_t slot = (int32_t)world_random(random, 8), num_hits = 0;
    struct world_request *asked = &world->requests[slot];
    world->now_ns += (int64_t)world_random(random, 1000) * SECOND / 100;
    if (asked->is_running) {
        world_end(world, slot);
    } else if (asked->is_waiting && world_random(random, 8) == 0) {
        world_leave(world, slot);
    } else if (asked->is_waiting) {
        num_hits = world_run(world, slot);
    } else {
        int32_t path[6], num_blocks = (int32_t)world_random(random, 7);
        for (int32_t i = 0; i < num_blocks; i++) {
            path[i] = (int32_t)world_random(random, i == 0 ? 3 : 4);
        }
        const struct kv_fingerprint fingerprint = {
            .turn = (int32_t)world_random(random, 4),
            .last_gap_ns = -1,
            .num_prompt_tokens = num_blocks * 512,
            .finish = (enum kv_finish)world_random(random, 5),
            .is_session_end = world_random(random, 5) == 0,
            .expected_return_ns = (int64_t)world_random(random, 400) * SECOND,
        };
        world_arrive(world, slot, path, num_blocks, &fingerprint);
    }
    return num_hits;
}

/* Now and then a block comes up from a slower tier, or the next victim goes. Catches: an announced
 * victim that is not the one which goes. */
static void meddle(struct world *world, uint32_t *random)
{
    int32_t slot = (int32_t)world_random(random, 8);
    if (world_random(random, 3) == 0 && world->requests[slot].is_waiting &&
        world->pool.num_free + world->pool.num_cached > 0) {
        (void)world_promote(world, slot);
    }
    if (world_random(random, 50) == 0 && world->pool.num_cached > 0) {
        int32_t victim = kv_cache_next_victim(world->cache, world->now_ns);
        assert_true(kv_cache_is_idle(world->cache, victim));
        kv_cache_make_room(world->cache, world->pool.num_free + 1, world->now_ns);
        assert_false(kv_cache_is_idle(world->cache, victim));
    }
}

/* Predictions of what is worth something; those of `predictive` in order, and none twice. */
static void look_at_predictions(struct world *world, int32_t *num_predictions)
{
    struct kv_prediction predictions[5];
    struct kv_policy *policy = kv_cache_policy(world->cache);
    if (policy->functions->predict == NULL) {
        return;
    }
    bool is_predictive = strcmp(policy->functions->name, "predictive") == 0;
    int32_t count = policy->functions->predict(policy, predictions, 5, world->now_ns);
    assert_in_range(count, 0, 5);
    *num_predictions += count;
    for (int32_t i = 0; i < count; i++) {
        assert_true(predictions[i].value > 0);
        for (int32_t k = 0; k < i && is_predictive; k++) {
            assert_true(predictions[k].value >= predictions[i].value);
            assert_true(predictions[k].key_hash != predictions[i].key_hash);
        }
    }
    int32_t victim = kv_cache_next_victim(world->cache, world->now_ns);
    assert_true(victim < 0 || policy->functions->value(policy, victim, world->now_ns) >= 0);
}

/* Catches: a policy that predicts and is said not to, or the other way, so that whoever asks for
 * prefetching is told what is not so; a name that is none and found. */
static void test_find(void **state)
{
    (void)state;
    bool predicts = true;
    for (int32_t p = 0; kv_policy_name(p) != NULL; p++) {
        static struct world world;
        struct kv_policy_options options = kv_policy_options_default();
        world_init(&world, kv_policy_name(p), 50, &options);
        const struct kv_policy_functions *functions = kv_cache_policy(world.cache)->functions;
        assert_true(kv_policy_find(kv_policy_name(p), &predicts));
        assert_int_equal(predicts, functions->predict != NULL && functions->value != NULL);
        assert_non_null(strstr(kv_policy_names(), kv_policy_name(p)));
        world_deinit(&world);
    }
    assert_false(kv_policy_find("best", NULL));
}

/* Catches, for every policy: a victim that is busy or unknown (the cache asserts), a list that
 * loses blocks (then none is left to go though some are idle), a state that grows, answers that
 * differ between two lives of the same events, blocks that come up from a slower tier and are taken
 * for returns or lost. */
static void test_random_lives(void **state)
{
    (void)state;
    for (int32_t p = 0; kv_policy_name(p) != NULL; p++) {
        for (int32_t switches = 0; switches < 64; switches++) {
            bool is_predictive = strcmp(kv_policy_name(p), "predictive") == 0;
            if (!is_predictive && switches > 0) {
                break;
            }
            struct kv_policy_options options = kv_policy_options_default();
            options.use_queue = (switches & 1) == 0;
            options.use_table = (switches & 2) == 0;
            options.use_guard = (switches & 4) == 0;
            options.use_hints = (switches & 8) == 0;
            options.use_lookahead = (switches & 16) == 0;
            options.use_ghosts = (switches & 32) == 0;
            static struct world worlds[2];
            uint32_t randoms[2] = {5, 5};
            for (int32_t w = 0; w < 2; w++) {
                world_init(&worlds[w], kv_policy_name(p), 50, &options);
            }
            struct kv_policy *policy = kv_cache_policy(worlds[0].cache);
            size_t state_bytes = policy->functions->state_bytes(policy);
            int32_t num_steps = is_predictive ? 2000 : 20000, num_predictions = 0;
            for (int32_t i = 0; i < num_steps; i++) {
                int32_t num_hits = step(&worlds[0], &randoms[0]);
                assert_int_equal(step(&worlds[1], &randoms[1]), num_hits);
                meddle(&worlds[0], &randoms[0]);
                meddle(&worlds[1], &randoms[1]);
                if (i % 64 == 0) {
                    assert_true(kv_cache_check(worlds[0].cache));
                    assert_true(!is_predictive || kv_policy_predictive_check(policy));
                    look_at_predictions(&worlds[0], &num_predictions);
                    look_at_predictions(&worlds[1], &num_predictions);
                }
            }
            struct kv_cache_metrics metrics[2];
            kv_cache_read_metrics(worlds[0].cache, &metrics[0]);
            kv_cache_read_metrics(worlds[1].cache, &metrics[1]);
            assert_int_equal(metrics[0].num_evicted, metrics[1].num_evicted);
            assert_true(metrics[0].num_evicted > 100 && metrics[0].num_hit > 100);
            assert_true(metrics[0].num_promoted > 100);
            assert_int_equal(metrics[0].num_promoted, metrics[1].num_promoted);
            assert_int_equal(num_predictions > 0, policy->functions->predict != NULL &&
                                                      options.use_table && options.use_ghosts);
            assert_int_equal(policy->functions->state_bytes(policy), state_bytes);
            for (int32_t w = 0; w < 2; w++) {
                kv_cache_clear(worlds[w].cache, worlds[w].now_ns);
                assert_int_equal(worlds[w].pool.num_cached, 0);
                assert_true(kv_cache_check(worlds[w].cache));
                world_deinit(&worlds[w]);
            }
        }
    }
}

int run_policies_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lfu_keeps_the_frequent),
        cmocka_unit_test(test_lfu_starts_anew),
        cmocka_unit_test(test_s3fifo_demotes_quickly),
        cmocka_unit_test(test_arc_adapts),
        cmocka_unit_test(test_gdsf_costs_and_ages),
        cmocka_unit_test(test_queue_protects_the_nearest),
        cmocka_unit_test(test_seed_prefetch_list),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_random_lives),
    };
    return cmocka_run_group_tests_name("policies", tests, NULL, NULL);
}
