/* SPDX-License-Identifier: Apache-2.0 */
/* A whole replay with every single request for memory, and every reading of a file, refused in
 * turn: the right status, nothing leaked, no result. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "fault.h"
#include "imbrex_kv.h"

static enum imbrex_status replay(bool is_live, bool has_tiers)
{
    static const char *const traces[] = {
        "tests/sim/traces/weka_excerpt.jsonl",
#if IMBREX_HAS_ZSTD
        "tests/sim/traces/mooncake_excerpt.jsonl.zst",
#else
        "tests/sim/traces/mooncake_excerpt.jsonl",
#endif
    };
    static const char *const policies[] = {"lru", "predictive"};
    static const int64_t capacities[] = {200000};
    static const struct imbrex_kv_sim_tier tiers[] = {
        {.capacity_tokens = 300000, .tokens_per_s = 400000},
        {.capacity_tokens = 900000, .tokens_per_s = 100000, .latency_s = 0.001},
    };
    struct imbrex_kv_sim_options options = imbrex_kv_sim_options_default();
    struct imbrex_kv_sim_result *result = NULL;
    struct imbrex_error err = {0};

    options.traces = traces;
    options.num_traces = 2;
    options.policies = policies;
    options.num_policies = 2;
    options.capacities = capacities;
    options.num_capacities = 1;
    options.prefill_tokens_per_s = 50000;
    options.hint_error = 0.1;
    options.is_live = is_live;
    options.has_prefetch = true;
    options.tiers = has_tiers ? tiers : NULL;
    options.num_tiers = has_tiers ? 2 : 0;
    enum imbrex_status status = imbrex_kv_sim_run(&options, &result, &err);
    assert_true(status == IMBREX_STATUS_OK || (result == NULL && strlen(err.message) > 0));
    imbrex_free(result);
    return status;
}

static void fail_each(enum fault_kind kind, bool is_live, bool has_tiers,
                      enum imbrex_status expected)
{
    for (int64_t num_failed = 0;; num_failed++) {
        int64_t num_live = fault_num_live();
        fault_arm(kind, num_failed + 1, false);
        enum imbrex_status status = replay(is_live, has_tiers);
        bool has_failed = fault_disarm();
        assert_int_equal(fault_num_live(), num_live);
        if (!has_failed) {
            assert_int_equal(status, IMBREX_STATUS_OK);
            assert_true(num_failed > 0);
            return;
        }
        /* To give back what an array has too much may fail. */
        assert_true(status == expected || status == IMBREX_STATUS_OK);
    }
}

/* Catches: an allocation of readers, timelines, stores, tiers or hints that is not checked or not
 * freed. */
static void test_memory(void **state)
{
    (void)state;
    fail_each(FAULT_MEMORY, false, false, IMBREX_STATUS_OUT_OF_MEMORY);
    fail_each(FAULT_MEMORY, true, true, IMBREX_STATUS_OUT_OF_MEMORY);
}

/* Catches: a reading that fails and passes for the end of the file. */
static void test_files(void **state)
{
    (void)state;
    fail_each(FAULT_FILE, false, false, IMBREX_STATUS_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
