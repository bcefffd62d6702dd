/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_service.h"

#include <stdlib.h>
#include <string.h>

#include "sim/sim_cache.h"
#include "tests/sim/sim_fixture.h"
#include "tests/test.h"

/* A block a second; no decoding to speak of unless a test has some. */
static const struct sim_service slow_service = {
    .num_slots = 64, .prefill_tokens_per_s = 512, .decode_s_per_token = 0.1};

static void run_lru(const struct sim_trace *trace, const struct sim_service *service,
                    int32_t capacity, struct sim_timeline *timeline, struct sim_outcome *outcome)
{
    struct sim_store *store = NULL;
    struct imbrex_error err = {0};

    assert_int_equal(sim_lru_create(trace, capacity, &store, &err), IMBREX_STATUS_OK);
    assert_int_equal(sim_service_run(service, store, NULL, NULL, timeline, outcome, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(store->num_used, 0);
    sim_store_destroy(store);
}

/* Blocks that MIN finds on the timeline of lru. */
static int64_t min_hits(const struct sim_trace *trace, const struct sim_service *service,
                        int32_t capacity, const struct sim_timeline *timeline)
{
    struct sim_store *store = NULL;
    struct sim_outcome outcome;
    struct imbrex_error err = {0};

    assert_int_equal(sim_min_create(trace, capacity, timeline, &store, &err), IMBREX_STATUS_OK);
    assert_int_equal(sim_timeline_replay(timeline, service, store, NULL, NULL, &outcome, &err),
                     IMBREX_STATUS_OK);
    int64_t num_hits = sim_fixture_hits(&outcome);
    sim_outcome_free(&outcome);
    sim_store_destroy(store);
    return num_hits;
}

static void assert_near(double value, double expected)
{
    if (!(value > expected - 1e-5 && value < expected + 1e-5)) {
        fail_msg("expected %g, found %g", expected, value);
    }
}

/* Catches: a prefill that overlaps another, hits that cost time, a wait that is not counted in
 * TTFT, a queue that counts who just arrived. */
static void test_times(void **state)
{
    (void)state;
    static struct sim_text text;
    struct sim_trace trace;
    struct sim_outcome outcome;
    struct sim_service service = slow_service;

    text.num_bytes = 0;
    sim_text_add_request(&text, 0, 10, (const int32_t[]){1, 2}, 2);
    sim_text_add_request(&text, 500, 10, (const int32_t[]){3, 4}, 2);
    sim_text_add_request(&text, 1000, 10, (const int32_t[]){1, 2}, 2);
    sim_fixture_read(text.bytes, &trace);

    /* 0: prefill 0-2. 1: admitted at 2, prefill 2-4. 2: admitted at 4, all of it is there. */
    run_lru(&trace, &service, 100, NULL, &outcome);
    assert_int_equal(outcome.num_scored, 3);
    assert_near((double)outcome.ttft_s[0], 2);
    assert_near((double)outcome.ttft_s[1], 3.5);
    assert_near((double)outcome.ttft_s[2], 3);
    assert_near(outcome.mean_queue, 1.0 / 3);
    assert_int_equal(sim_fixture_hits(&outcome), 2);
    sim_outcome_free(&outcome);

    /* One slot: the next is admitted when the last one ends, at 2 + 1 and 5 + 1. */
    service.num_slots = 1;
    run_lru(&trace, &service, 100, NULL, &outcome);
    assert_near((double)outcome.ttft_s[1], 4.5);
    assert_near((double)outcome.ttft_s[2], 5);
    sim_outcome_free(&outcome);

    /* Room for three blocks: the second waits until the first one's are idle, at 3, and its two
     * push one of them out. */
    service.num_slots = 64;
    run_lru(&trace, &service, 3, NULL, &outcome);
    assert_near((double)outcome.ttft_s[1], 4.5);
    assert_int_equal(sim_fixture_hits(&outcome), 1);
    sim_outcome_free(&outcome);

    /* Only the last third is scored, but all are learned from. */
    service.warm = 0.67;
    run_lru(&trace, &service, 100, NULL, &outcome);
    assert_int_equal(outcome.num_scored, 1);
    assert_int_equal(outcome.num_tokens, 1024);
    assert_int_equal(outcome.num_hit_tokens, 1024);
    assert_int_equal(outcome.num_accesses, 6);
    assert_near(outcome.mean_queue, 1);
    sim_outcome_free(&outcome);
    sim_trace_free(&trace);
}

/* Catches: a session whose next turn does not wait for the last one's end. */
static void test_closed_loop(void **state)
{
    (void)state;
    struct sim_trace trace;
    struct sim_timeline timeline;
    struct sim_outcome outcome;

    sim_fixture_read("{\"block_size\": 512, \"requests\": [{\"t\": 0, \"in\": 512, \"out\": 10, "
                     "\"hash_ids\": [1], \"api_time\": 1}, {\"t\": 9, \"in\": 1024, \"out\": 10, "
                     "\"hash_ids\": [1, 2], \"think_time\": 8}]}",
                     &trace);
    run_lru(&trace, &slow_service, 100, &timeline, &outcome);
    /* Prefill 1 s, decode 1 s, think 8 s. */
    assert_int_equal(timeline.num_events, 6);
    assert_int_equal(timeline.events[3].kind, SIM_EVENT_ARRIVE);
    assert_int_equal(timeline.events[3].time_ns - timeline.events[0].time_ns, 10000000000);
    assert_int_equal(timeline.max_live, 1);
    assert_int_equal(sim_fixture_hits(&outcome), 1);
    sim_timeline_free(&timeline);
    sim_outcome_free(&outcome);
    sim_trace_free(&trace);
}

/* Catches: an lru that forgets heads before tails or the wrong end of its list; a MIN that evicts
 * what is used next. */
static void test_hits_by_hand(void **state)
{
    (void)state;
    static const struct by_hand {
        int32_t paths[8][4]; /* from 1 on, ended by 0 */
        int32_t capacity, lru, min;
    } cases[] = {
        /* One block each in a cycle: lru never finds one. MIN keeps 1 over 2, then 3. */
        {{{1}, {2}, {3}, {1}, {2}, {3}}, 2, 0, 2},
        /* 3 pushes out the tail 2, not the head 1, which the last two find. */
        {{{1, 2}, {1, 3}, {1, 2}}, 2, 2, 2},
        {{{1, 2}, {1, 3}, {1, 2}}, 3, 3, 3},
        /* A scan of 5 6 7 8: lru loses all of 1 2 3; MIN lets each of the scan go for the next. */
        {{{1, 2, 3}, {5}, {6}, {7}, {8}, {1, 2, 3}}, 4, 0, 3},
        /* 5 pushes out 2 under lru, and 4, which never returns, under MIN. */
        {{{1, 2}, {4}, {5}, {1, 2}, {5}}, 3, 2, 3},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        static struct sim_text text;
        struct sim_trace trace;
        struct sim_timeline timeline;
        struct sim_outcome outcome;
        text.num_bytes = 0;
        for (int32_t k = 0; k < 8 && cases[i].paths[k][0] > 0; k++) {
            int32_t num_ids = 0;
            while (num_ids < 4 && cases[i].paths[k][num_ids] > 0) {
                num_ids++;
            }
            sim_text_add_request(&text, 100000 * (int64_t)k, 1, cases[i].paths[k], num_ids);
        }
        sim_fixture_read(text.bytes, &trace);
        run_lru(&trace, &slow_service, cases[i].capacity, &timeline, &outcome);
        assert_int_equal(sim_fixture_hits(&outcome), cases[i].lru);
        assert_int_equal(min_hits(&trace, &slow_service, cases[i].capacity, &timeline),
                         cases[i].min);
        sim_timeline_free(&timeline);
        sim_outcome_free(&outcome);
        sim_trace_free(&trace);
    }
}

/* Eight blocks in a tree; a request's prompt ends at one of them. */
static const int32_t parents[8] = {-1, 0, 1, 0, -1, 4, 4, 6};

static uint32_t path_of(int32_t node)
{
    uint32_t path = 0;
    for (; node >= 0; node = parents[node]) {
        path |= 1u << node;
    }
    return path;
}

static bool is_closed(uint32_t nodes)
{
    for (int32_t i = 0; i < 8; i++) {
        if (nodes >> i & 1 && parents[i] >= 0 && !(nodes >> parents[i] & 1)) {
            return false;
        }
    }
    return true;
}

/* The most hits that any choice gives, by trying all sets that may stay after each request. */
static int32_t most_hits(const int32_t *ends, int32_t num_requests, int32_t capacity,
                         uint32_t resident)
{
    if (num_requests == 0) {
        return 0;
    }
    uint32_t path = path_of(ends[0]), others = resident & ~path;
    int32_t best = 0, num_hits = __builtin_popcount(path & resident);
    for (uint32_t kept = others;; kept = (kept - 1) & others) {
        if (__builtin_popcount(kept | path) <= capacity && is_closed(kept | path)) {
            int32_t rest = most_hits(ends + 1, num_requests - 1, capacity, kept | path);
            best = rest > best ? rest : best;
        }
        if (kept == 0) {
            break;
        }
    }
    return num_hits + best;
}

static uint32_t next_random(uint32_t *random)
{
    *random = *random * 1664525u + 1013904223u;
    return *random >> 8;
}

/* Catches: a MIN that is not the optimum. */
static void test_min_is_optimal(void **state)
{
    (void)state;
    uint32_t random = 11;

    for (int32_t round = 0; round < 300; round++) {
        static struct sim_text text;
        struct sim_trace trace;
        struct sim_timeline timeline;
        struct sim_outcome outcome;
        int32_t ends[7], capacity = 3 + (int32_t)(next_random(&random) % 3);
        text.num_bytes = 0;
        for (int32_t k = 0; k < 7; k++) {
            int32_t ids[8], num_ids = 0, reversed[8];
            ends[k] = (int32_t)(next_random(&random) % 8);
            for (int32_t node = ends[k]; node >= 0; node = parents[node]) {
                reversed[num_ids++] = node;
            }
            for (int32_t i = 0; i < num_ids; i++) {
                ids[i] = reversed[num_ids - 1 - i];
            }
            sim_text_add_request(&text, 100000 * (int64_t)k, 1, ids, num_ids);
        }
        sim_fixture_read(text.bytes, &trace);
        run_lru(&trace, &slow_service, capacity, &timeline, &outcome);
        assert_int_equal(min_hits(&trace, &slow_service, capacity, &timeline),
                         most_hits(ends, 7, capacity, 0));
        sim_timeline_free(&timeline);
        sim_outcome_free(&outcome);
        sim_trace_free(&trace);
    }
}

/* Conversations that grow, of which many run at once and some begin alike. */
static void make_conversations(uint32_t *random, struct sim_trace *trace)
{
    static struct sim_text text;
    int32_t lengths[12] = {0};

    text.num_bytes = 0;
    for (int32_t k = 0; k < 300; k++) {
        int32_t conversation = (int32_t)(next_random(random) % 12), ids[40];
        if (lengths[conversation] == 0 || lengths[conversation] > 12) {
            lengths[conversation] = 2;
        }
        lengths[conversation] += (int32_t)(next_random(random) % 3);
        for (int32_t i = 0; i < lengths[conversation]; i++) {
            ids[i] = i < 2 ? conversation % 3 : 100 * (conversation + 1) + i;
        }
        sim_text_add_request(&text, k * 1000, (int32_t)(next_random(random) % 40), ids,
                             lengths[conversation]);
    }
    sim_fixture_read(text.bytes, trace);
}

/* Catches: an engine's lru that differs from the plain one, a policy that finds more than MIN or
 * MIN more than the infinite cache, a cache that disagrees with itself after a replay, a live run
 * that differs from the recorded one where the decisions are the same. */
static void test_policies_between(void **state)
{
    (void)state;
    const struct sim_service service = {
        .num_slots = 8, .prefill_tokens_per_s = 2048, .decode_s_per_token = 0.1};
    uint32_t random = 5;

    for (int32_t round = 0; round < 6; round++) {
        struct sim_trace trace;
        struct sim_timeline timeline;
        struct sim_outcome outcome, infinite;
        struct imbrex_error err = {0};
        struct sim_store *store = NULL;
        int32_t capacity = 20 + 15 * round;
        make_conversations(&random, &trace);
        run_lru(&trace, &service, capacity, &timeline, &outcome);
        int64_t lru = sim_fixture_hits(&outcome);
        int64_t min = min_hits(&trace, &service, capacity, &timeline);
        assert_true(timeline.max_live > 1);
        assert_true(lru < min || capacity > 60);

        assert_int_equal(sim_lru_create(&trace, INT32_MAX, &store, &err), IMBREX_STATUS_OK);
        assert_int_equal(
            sim_timeline_replay(&timeline, &service, store, NULL, NULL, &infinite, &err),
            IMBREX_STATUS_OK);
        assert_true(sim_fixture_hits(&infinite) >= min);
        assert_int_equal(store->num_evicted, 0);
        sim_outcome_free(&infinite);
        sim_store_destroy(store);

        for (int32_t i = 0; kv_policy_name(i) != NULL; i++) {
            struct sim_outcome found;
            struct sim_cache_options options = {.policy = kv_policy_name(i),
                                                .policy_options = kv_policy_options_default(),
                                                .capacity = capacity,
                                                .max_requests = timeline.max_live};
            assert_int_equal(sim_cache_create(&trace, &options, &store, &err), IMBREX_STATUS_OK);
            assert_int_equal(
                sim_timeline_replay(&timeline, &service, store, NULL, NULL, &found, &err),
                IMBREX_STATUS_OK);
            assert_true(sim_cache_check(store));
            assert_true(sim_cache_state_bytes(store) > 0);
            assert_true(sim_fixture_hits(&found) <= min);
            if (i == 0) {
                assert_int_equal(sim_fixture_hits(&found), lru);
            }
            sim_outcome_free(&found);
            sim_store_destroy(store);

            options.is_live = true;
            options.max_requests = trace.num_requests;
            assert_int_equal(sim_cache_create(&trace, &options, &store, &err), IMBREX_STATUS_OK);
            assert_int_equal(sim_service_run(&service, store, NULL, NULL, NULL, &found, &err),
                             IMBREX_STATUS_OK);
            assert_true(sim_cache_check(store));
            assert_int_equal(store->num_used, 0);
            if (i == 0) {
                assert_int_equal(sim_fixture_hits(&found), lru);
                assert_near(found.mean_queue, outcome.mean_queue);
            }
            sim_outcome_free(&found);
            sim_store_destroy(store);
        }
        sim_timeline_free(&timeline);
        sim_outcome_free(&outcome);
        sim_trace_free(&trace);
    }
}

/* Catches: a prompt longer than the cache that never runs, or takes blocks that are not there. */
static void test_prompt_beyond_capacity(void **state)
{
    (void)state;
    static struct sim_text text;
    struct sim_trace trace;
    struct sim_timeline timeline;
    struct sim_outcome outcome;

    text.num_bytes = 0;
    sim_text_add_request(&text, 0, 1, (const int32_t[]){1, 2, 3, 4, 5}, 5);
    sim_text_add_request(&text, 100000, 1, (const int32_t[]){1, 2, 3, 4, 5}, 5);
    sim_fixture_read(text.bytes, &trace);
    run_lru(&trace, &slow_service, 3, &timeline, &outcome);
    assert_int_equal(sim_fixture_hits(&outcome), 3);
    assert_near((double)outcome.ttft_s[1], 2);
    assert_int_equal(min_hits(&trace, &slow_service, 3, &timeline), 3);
    sim_timeline_free(&timeline);
    sim_outcome_free(&outcome);
    sim_trace_free(&trace);
}

/* Catches: hints that do not tell who returns, or are wrong more or less often than asked. */
static void test_hints(void **state)
{
    (void)state;
    static struct sim_text text;
    struct sim_trace trace;
    struct sim_hints hints;
    struct imbrex_error err = {0};
    int32_t num_wrong = 0;

    text.num_bytes = 0;
    for (int32_t i = 0; i < 200; i++) {
        int32_t ids[3] = {i, 0, 1};
        /* Even ones come back after 400 s, with a block more. */
        sim_text_add_request(&text, 1000 * (int64_t)i, 1, ids, 2);
        if (i % 2 == 0) {
            sim_text_add_request(&text, 1000 * (int64_t)i + 400000, 1, ids, 3);
        }
    }
    sim_fixture_read(text.bytes, &trace);
    for (int32_t is_wrong = 0; is_wrong < 2; is_wrong++) {
        assert_int_equal(sim_hints_create(&trace, is_wrong ? 0.2 : 0, 3, &hints, &err),
                         IMBREX_STATUS_OK);
        for (int32_t i = 0; i < 200; i++) {
            struct kv_fingerprint fingerprint = {.turn = 0};
            sim_hints_fill(&hints, i, &fingerprint);
            assert_true(fingerprint.is_session_end == (fingerprint.expected_return_ns == 0));
            assert_true(fingerprint.is_session_end ||
                        fingerprint.expected_return_ns == 400000000000);
            num_wrong += fingerprint.is_session_end == (i % 2 == 0);
        }
        if (!is_wrong) {
            assert_int_equal(num_wrong, 0);
        }
        sim_hints_destroy(&hints);
    }
    assert_in_range(num_wrong, 20, 60);
    sim_trace_free(&trace);
}

int run_sim_service_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_times),
        cmocka_unit_test(test_closed_loop),
        cmocka_unit_test(test_hits_by_hand),
        cmocka_unit_test(test_min_is_optimal),
        cmocka_unit_test(test_policies_between),
        cmocka_unit_test(test_prompt_beyond_capacity),
        cmocka_unit_test(test_hints),
    };
    return cmocka_run_group_tests_name("sim_service", tests, NULL, NULL);
}
