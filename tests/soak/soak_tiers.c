/* SPDX-License-Identifier: Apache-2.0 */
/* A million steps of scheduler, pool, prefix cache and tiers (tests/engine/tiers_walk.h), with
 * allocations that fail. `soak_tiers [STEPS [SEED]]`: so many steps, walks from that seed on. A
 * walk that fails says its seed; `soak_tiers 1 SEED` repeats it, but for what threads do first.
 *
 * Catches: what test_tiers_walk.c catches, where it needs rare meetings of events, and memory that
 * is not given back. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "tests/engine/tiers_walk.h"
#include "tests/fault/fault.h"
#include "tests/test.h"

#define REPORT_STEPS 100000

static int64_t num_wanted = 1000000;
static uint64_t first_seed = 1;

static void fail_allocation(int64_t countdown)
{
    fault_arm(FAULT_MEMORY, countdown, false);
}

static void report(const struct tiers_walk_totals *totals, uint64_t seed, int64_t begin_ns)
{
    print_message("seeds %llu to %llu, %.0f s\n", (unsigned long long)first_seed,
                  (unsigned long long)seed, (double)(clock_now_ns() - begin_ns) * 1e-9);
    tiers_walk_print(totals);
}

static void test_soak(void **state)
{
    struct tiers_walk_totals totals = {0};
    int64_t begin_ns = clock_now_ns(), next_report = REPORT_STEPS;
    uint64_t seed = first_seed;
    (void)state;
    for (; totals.num_steps < num_wanted; seed++) {
        int64_t num_live = fault_num_live();
        tiers_walk(&(struct tiers_walk_options){.seed = seed,
                                                .num_lives = 3,
                                                .life_steps = 1000,
                                                .folder = TEST_BUILD_DIR "/tests/tiers-soak",
                                                .fail_allocation = fail_allocation,
                                                .stop_failing = fault_disarm},
                   &totals);
        if (fault_num_live() != num_live) {
            fail_msg("walk %llu: %lld allocations leaked", (unsigned long long)seed,
                     (long long)(fault_num_live() - num_live));
        }
        if (totals.num_steps >= next_report) {
            report(&totals, seed, begin_ns);
            next_report += REPORT_STEPS;
        }
    }
    report(&totals, seed - 1, begin_ns);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_soak)};
    num_wanted = argc > 1 ? atoll(argv[1]) : num_wanted;
    first_seed = argc > 2 ? (uint64_t)atoll(argv[2]) : first_seed;
    if (argc > 3 || num_wanted < 1 || first_seed < 1) {
        (void)fprintf(stderr, "soak_tiers: expected [STEPS [SEED]], each 1 or more\n");
        return 2;
    }
    return cmocka_run_group_tests_name("soak_tiers", tests, NULL, NULL);
}
