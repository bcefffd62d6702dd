/* SPDX-License-Identifier: Apache-2.0 */
/* The walk of tests/soak/soak_tiers.c, a small part of it. */
#include "tests/engine/tiers_walk.h"
#include "tests/test.h"

enum { NUM_WALKS = TEST_SANITIZED ? 8 : 40, LIFE_STEPS = 250, NUM_LIVES = 2 };

/* Catches: a block of other contents, in a wrong place or before it is there, in a step, a tier or
 * after a restart; a request that waits for ever, or nobody runs although somebody waits; a block,
 * a pin, a slot or a user that is not given back. */
static void test_walk(void **state)
{
    struct tiers_walk_totals totals = {0};
    (void)state;
    for (uint64_t seed = 1; seed <= NUM_WALKS; seed++) {
        tiers_walk(&(struct tiers_walk_options){.seed = seed,
                                                .num_lives = NUM_LIVES,
                                                .life_steps = LIFE_STEPS,
                                                .folder = TEST_BUILD_DIR "/tests/tiers-walk"},
                   &totals);
    }
    tiers_walk_print(&totals);
    /* The walk went where it was meant to go. */
    assert_true(totals.num_steps >= (int64_t)NUM_WALKS * NUM_LIVES * LIFE_STEPS);
    assert_true(totals.num_requests > totals.num_steps / 50);
    assert_true(totals.num_preemptions > 0 && totals.num_forks > 0 && totals.num_cancelled > 0);
    assert_true(totals.num_found[KV_TIER_HOST] > 0 && totals.num_copy_faults > 0);
    assert_true(totals.num_failed_steps > 0 && totals.num_ahead > 0);
    assert_true(totals.num_written > 0);
}

int run_tiers_walk_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_walk),
    };
    return cmocka_run_group_tests_name("tiers_walk", tests, NULL, NULL);
}
