/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_tier.h"

#include <stdlib.h>
#include <string.h>

#include "sim/sim_cache.h"
#include "tests/sim/sim_fixture.h"
#include "tests/test.h"

#define SECOND INT64_C(1000000000)

/* A block a second. */
static const struct sim_service service = {
    .num_slots = 64, .prefill_tokens_per_s = 512, .decode_s_per_token = 0.1};

struct result {
    struct sim_tier_metrics metrics;
    int64_t num_hits;
    float ttft_s[256]; /* in the order of admission */
};

static void record_timeline(const struct sim_trace *trace, int32_t capacity,
                            struct sim_timeline *timeline)
{
    struct sim_store *store = NULL;
    struct sim_outcome outcome;
    struct imbrex_error err = {0};

    assert_int_equal(sim_lru_create(trace, capacity, &store, &err), IMBREX_STATUS_OK);
    assert_int_equal(sim_service_run(&service, store, NULL, NULL, timeline, &outcome, &err),
                     IMBREX_STATUS_OK);
    sim_outcome_free(&outcome);
    sim_store_destroy(store);
}

/* On the timeline, or live if it is NULL. */
static struct result replay(const struct sim_trace *trace, const char *policy, int32_t capacity,
                            const struct sim_timeline *timeline,
                            const struct sim_tier_options *tier)
{
    struct sim_cache_options options = {
        .policy = policy,
        .policy_options = kv_policy_options_default(),
        .capacity = capacity,
        .max_requests = timeline != NULL ? timeline->max_live : trace->num_requests,
        .is_live = timeline == NULL,
        .tier = tier,
    };
    struct sim_store *store = NULL;
    struct sim_outcome outcome;
    struct imbrex_error err = {0};
    struct result result;

    assert_int_equal(sim_cache_create(trace, &options, &store, &err), IMBREX_STATUS_OK);
    assert_int_equal(
        timeline != NULL
            ? sim_timeline_replay(timeline, &service, store, NULL, NULL, &outcome, &err)
            : sim_service_run(&service, store, NULL, NULL, NULL, &outcome, &err),
        IMBREX_STATUS_OK);
    assert_true(sim_cache_check(store));
    assert_int_equal(sim_cache_read_tier(store, &result.metrics), tier != NULL);
    result.num_hits = sim_fixture_hits(&outcome);
    assert_true(outcome.num_scored <= (int64_t)(sizeof(result.ttft_s) / sizeof(float)));
    memcpy(result.ttft_s, outcome.ttft_s, (size_t)outcome.num_scored * sizeof(float));
    sim_outcome_free(&outcome);
    sim_store_destroy(store);
    return result;
}

/* Room for 4 blocks. 1 and 2 are forgotten, then D waits for them from 20.5 until C ends:
 *
 *   A    0    1 2         computed 0-2
 *   B   10    3 4 5       2 goes
 *   C   20    6 7         1 and 5 go; computed 20-22, ends at 22.1
 *   D   20.5  1 2 8       needs three, beside C's two: admitted at 22.1
 *   E   40    3 4         is alone: admitted at once
 *
 * Catches: a queue that is not looked at, moves that overlap or take no time, a block that is there
 * before its move has ended, moves that are not taken back when their request runs, what is used,
 * wasted, late and unforeseen in each other's place. */
static void test_by_hand(void **state)
{
    (void)state;
    static struct sim_text text;
    struct sim_trace trace;
    struct sim_timeline timeline;
    struct sim_tier_options tier = {.levels = {{.capacity = INT32_MAX, .up_block_ns = SECOND / 4}},
                                    .num_levels = 1,
                                    .predicts = true};

    text.num_bytes = 0;
    sim_text_add_request(&text, 0, 1, (const int32_t[]){1, 2}, 2);
    sim_text_add_request(&text, 10000, 1, (const int32_t[]){3, 4, 5}, 3);
    sim_text_add_request(&text, 20000, 1, (const int32_t[]){6, 7}, 2);
    sim_text_add_request(&text, 20500, 1, (const int32_t[]){1, 2, 8}, 3);
    sim_text_add_request(&text, 40000, 1, (const int32_t[]){3, 4}, 2);
    sim_fixture_read(text.bytes, &trace);
    record_timeline(&trace, 4, &timeline);
    assert_int_equal(replay(&trace, "lru", 4, &timeline, NULL).num_hits, 0);

    /* 20.5-20.75: 1 in the place of 4; 20.75-21: 2 in the place of 3. */
    struct result result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_int_equal(result.num_hits, 2);
    assert_int_equal(result.metrics.num_planned, 2);
    assert_int_equal(result.metrics.num_used, 2);
    assert_int_equal(result.metrics.num_wasted, 0);
    assert_int_equal(result.metrics.num_cancelled, 0);
    assert_int_equal(result.metrics.num_late, 0);
    assert_int_equal(result.metrics.num_unforeseen, 2);

    /* 20.5-21.7: 1, in time. 21.7-22.9: 2 has begun and is computed meanwhile. */
    tier.levels[0].up_block_ns = SECOND / 10 * 12;
    result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_int_equal(result.num_hits, 1);
    assert_int_equal(result.metrics.num_planned, 2);
    assert_int_equal(result.metrics.num_used, 1);
    assert_int_equal(result.metrics.num_wasted, 1);
    assert_int_equal(result.metrics.num_cancelled, 0);
    assert_int_equal(result.metrics.num_late, 1);

    /* 20.5-22.5: 1, too late, for nobody knew. 22.5-24.5: 2 is taken back. */
    tier.levels[0].up_block_ns = 2 * SECOND;
    result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_int_equal(result.num_hits, 0);
    assert_int_equal(result.metrics.num_planned, 2);
    assert_int_equal(result.metrics.num_used, 0);
    assert_int_equal(result.metrics.num_wasted, 1);
    assert_int_equal(result.metrics.num_cancelled, 1);
    assert_int_equal(result.metrics.num_late, 2);
    assert_int_equal(result.metrics.num_unforeseen, 2);

    /* From the last request on nothing was planned. */
    tier.first_scored = 4;
    result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_int_equal(result.metrics.num_planned, 0);
    assert_int_equal(result.metrics.num_late, 0);
    assert_int_equal(result.metrics.num_unforeseen, 2);
    sim_timeline_free(&timeline);
    sim_trace_free(&trace);
}

#define assert_seconds(found, expected) \
    assert_int_equal((int64_t)((double)(found)*1e4 + 0.5), (int64_t)((expected)*1e4 + 0.5))

/* The trace of test_by_hand, where requests may wait for what lies below.
 *
 * Catches: blocks that need no computing and are computed, or the other way round; a request that
 * does not wait for its blocks, or for longer than computing them would have taken since it came; a
 * latency that is forgotten, or is the whole link's; moves under way that are asked for again; a
 * prefill that begins before what goes for it has been copied down. */
static void test_waits_by_hand(void **state)
{
    (void)state;
    static struct sim_text text;
    struct sim_trace trace;
    struct sim_timeline timeline;
    struct sim_tier_options tier = {
        .levels = {{.capacity = INT32_MAX, .up_block_ns = SECOND / 4, .latency_ns = SECOND / 20}},
        .num_levels = 1,
        .waits = true,
        .compute_block_ns = SECOND,
    };

    text.num_bytes = 0;
    sim_text_add_request(&text, 0, 1, (const int32_t[]){1, 2}, 2);
    sim_text_add_request(&text, 10000, 1, (const int32_t[]){3, 4, 5}, 3);
    sim_text_add_request(&text, 20000, 1, (const int32_t[]){6, 7}, 2);
    sim_text_add_request(&text, 20500, 1, (const int32_t[]){1, 2, 8}, 3);
    sim_text_add_request(&text, 40000, 1, (const int32_t[]){3, 4}, 2);
    sim_fixture_read(text.bytes, &trace);
    record_timeline(&trace, 4, &timeline);

    /* D: as before. E: 3 at 40.25, 4 at 40.5, each .05 later. */
    struct result result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_int_equal(result.num_hits, 4);
    assert_int_equal(result.metrics.num_planned, 2);
    assert_int_equal(result.metrics.num_used, 2);
    assert_int_equal(result.metrics.num_kept, 0);
    assert_int_equal(result.metrics.num_from[0], 4);
    assert_int_equal(result.metrics.num_late + result.metrics.num_unforeseen, 0);
    assert_int_equal(result.metrics.levels[0].num_up, 4);
    assert_int_equal(result.metrics.held_ns, SECOND / 20 * 11);
    assert_seconds(result.ttft_s[3], 1.6 + 1);
    assert_seconds(result.ttft_s[4], 0.55);

    /* D waits until 22.5, two seconds from 20.5 on: 1 is there 0.05 later. E waits its two seconds,
     * for 3 would be there 0.05 after them. */
    tier.levels[0].up_block_ns = 2 * SECOND;
    result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_int_equal(result.num_hits, 0);
    assert_int_equal(result.metrics.num_late, 2);
    assert_int_equal(result.metrics.num_unforeseen, 2);
    assert_seconds(result.ttft_s[3], 2 + 3);
    assert_seconds(result.ttft_s[4], 2 + 2);

    /* Without the latency D waits 0.4 s for 1, whose move is under way, and computes 2. */
    tier.levels[0].latency_ns = 0;
    result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_int_equal(result.metrics.num_late, 1);
    assert_seconds(result.ttft_s[3], 2 + 2);
    assert_int_equal(result.metrics.num_from[0], 2);
    assert_seconds(result.ttft_s[4], 2 + 1);

    /* B and C take the places of one and of two blocks. */
    tier.levels[0].down_block_ns = SECOND / 10 * 3;
    result = replay(&trace, "lru", 4, &timeline, &tier);
    assert_seconds(result.ttft_s[0], 2);
    assert_seconds(result.ttft_s[1], 3.3);
    assert_seconds(result.ttft_s[2], 2.6);
    sim_timeline_free(&timeline);
    sim_trace_free(&trace);
}

/* Room for 3 blocks, for one in the first tier.
 *
 *   A    0    1 2
 *   B   10    3 4 5     2 goes, then 1, for which 2 goes from the first tier
 *   C   40    1 2       1: 40-40.25. 2: 40-40.5 to the first tier, there at 40.6; 40.6-40.85
 *
 * Catches: a second tier that is not read, or is read after the first; a link of the first tier
 * that moves what has not come; a block told of as from another tier than it lay in. */
static void test_two_tiers_by_hand(void **state)
{
    (void)state;
    static struct sim_text text;
    struct sim_trace trace;
    struct sim_timeline timeline;
    struct sim_tier_options tier = {
        .levels = {{.capacity = 1, .up_block_ns = SECOND / 4},
                   {.capacity = 9, .up_block_ns = SECOND / 2, .latency_ns = SECOND / 10}},
        .num_levels = 2,
        .waits = true,
        .compute_block_ns = SECOND,
    };

    text.num_bytes = 0;
    sim_text_add_request(&text, 0, 1, (const int32_t[]){1, 2}, 2);
    sim_text_add_request(&text, 10000, 1, (const int32_t[]){3, 4, 5}, 3);
    sim_text_add_request(&text, 40000, 1, (const int32_t[]){1, 2}, 2);
    sim_fixture_read(text.bytes, &trace);
    record_timeline(&trace, 3, &timeline);
    struct result result = replay(&trace, "lru", 3, &timeline, &tier);
    assert_int_equal(result.num_hits, 2);
    assert_int_equal(result.metrics.num_from[0], 1);
    assert_int_equal(result.metrics.num_from[1], 1);
    assert_int_equal(result.metrics.levels[1].num_up, 1);
    assert_int_equal(result.metrics.levels[0].num_up, 2);
    assert_seconds(result.ttft_s[2], 0.85);

    /* Writes take so long that 2 goes from the first tier before its own has begun, and so does 5
     * when C takes its place and that of 4. */
    tier.levels[1].down_block_ns = 100 * SECOND;
    tier.levels[0].down_block_ns = 1;
    result = replay(&trace, "lru", 3, &timeline, &tier);
    assert_int_equal(result.num_hits, 1);
    assert_int_equal(result.metrics.levels[0].num_lost, 2);
    assert_seconds(result.ttft_s[2], 0.25 + 1);
    sim_timeline_free(&timeline);
    sim_trace_free(&trace);
}

/* ---- what no plan may do --------------------------------------------------------------------- */

struct watcher {
    const struct sim_trace *trace;
    int64_t *arrivals_ns, *admissions_ns; /* [num_requests] of the timeline */
    int32_t *orders;
    int64_t block_ns, last_begin_ns;
    int64_t num_moves, num_victims, num_predicted;
};

static bool needs(const struct sim_trace *trace, int32_t request_idx, uint64_t key_hash)
{
    const int32_t *path = sim_trace_path(trace, request_idx);
    for (int32_t i = 0; i < trace->requests[request_idx].num_blocks; i++) {
        if (sim_node_key(path[i]).words[0] == key_hash) {
            return true;
        }
    }
    return false;
}

static void watch(void *user, const struct sim_tier_move *move)
{
    struct watcher *watcher = user;
    const struct sim_trace *trace = watcher->trace;
    bool is_predicted = move->request_idx < 0;

    assert_true(move->begin_ns >= move->now_ns);
    assert_int_equal(move->end_ns - move->begin_ns, watcher->block_ns);
    assert_true(move->begin_ns - move->now_ns <= SIM_TIER_MAX_MOVES * watcher->block_ns);
    watcher->num_moves++;
    watcher->num_predicted += is_predicted;
    watcher->num_victims += move->has_victim;
    if (!is_predicted) {
        assert_true(watcher->arrivals_ns[move->request_idx] <= move->now_ns &&
                    move->now_ns < watcher->admissions_ns[move->request_idx]);
        assert_true(needs(trace, move->request_idx, sim_node_key(move->node).words[0]));
    }
    for (int32_t i = 0; i < trace->num_requests && move->has_victim; i++) {
        bool is_waiting =
            watcher->arrivals_ns[i] <= move->now_ns && move->now_ns < watcher->admissions_ns[i];
        if (is_waiting &&
            (is_predicted || watcher->orders[i] <= watcher->orders[move->request_idx]) &&
            needs(trace, i, move->victim_key_hash)) {
            fail_msg("a move for request %d takes what request %d waits for", move->request_idx, i);
        }
    }
}

static uint32_t draw(uint32_t *state, uint32_t limit)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % limit;
}

/* Conversations that come back, so many at once that some wait. */
static void make_conversations(uint32_t *random, struct sim_trace *trace)
{
    static struct sim_text text;
    enum { NUM_CONVERSATIONS = 12, NUM_REQUESTS = 160, MAX_BLOCKS = 24 };
    int32_t lengths[NUM_CONVERSATIONS] = {0};
    int64_t now_ms = 0;

    text.num_bytes = 0;
    for (int32_t i = 0; i < NUM_REQUESTS; i++) {
        int32_t ids[MAX_BLOCKS], conversation = (int32_t)draw(random, NUM_CONVERSATIONS);
        lengths[conversation] += 1 + (int32_t)draw(random, 3);
        if (lengths[conversation] > MAX_BLOCKS) {
            lengths[conversation] = 2;
        }
        for (int32_t k = 0; k < lengths[conversation]; k++) {
            ids[k] = k == 0 ? 0 : conversation * MAX_BLOCKS + k;
        }
        now_ms += draw(random, 4) == 0 ? 20000 : (int64_t)draw(random, 4000);
        sim_text_add_request(&text, now_ms, 1 + (int32_t)draw(random, 20), ids,
                             lengths[conversation]);
    }
    sim_fixture_read(text.bytes, trace);
}

static void read_times(const struct sim_timeline *timeline, struct watcher *watcher)
{
    int32_t num_arrived = 0;
    for (int64_t i = 0; i < timeline->num_events; i++) {
        const struct sim_event *event = &timeline->events[i];
        if (event->kind == SIM_EVENT_ARRIVE) {
            watcher->arrivals_ns[event->request_idx] = event->time_ns;
            watcher->orders[event->request_idx] = num_arrived++;
        } else if (event->kind == SIM_EVENT_ADMIT) {
            watcher->admissions_ns[event->request_idx] = event->time_ns;
        }
    }
}

/* Catches: a plan that takes what a nearer request, or for a prediction any, waits for; a move that
 * nobody needs; blocks that are lost from the count, or from the pool, when moves are given up;
 * policies whose predictions reach nobody; a tier that changes what is found without it. */
static void test_plans(void **state)
{
    (void)state;
    uint32_t random = 11;
    int64_t num_predicted = 0, num_victims = 0, num_won = 0;

    for (int32_t round = 0; round < (TEST_SANITIZED ? 3 : 12); round++) {
        struct sim_trace trace;
        struct sim_timeline timeline;
        int32_t capacity = 26 + (int32_t)draw(&random, 60);

        make_conversations(&random, &trace);
        record_timeline(&trace, capacity, &timeline);
        size_t num_requests = (size_t)trace.num_requests;
        struct watcher watcher = {
            .trace = &trace,
            .arrivals_ns = calloc(num_requests, sizeof(int64_t)),
            .admissions_ns = calloc(num_requests, sizeof(int64_t)),
            .orders = calloc(num_requests, sizeof(int32_t)),
            .block_ns = SECOND / (1 + draw(&random, 60)),
        };
        read_times(&timeline, &watcher);
        for (int32_t i = 0; kv_policy_name(i) != NULL; i++) {
            const char *policy = kv_policy_name(i);
            struct sim_tier_options tier = {
                .levels = {{.capacity = INT32_MAX, .up_block_ns = watcher.block_ns}},
                .num_levels = 1,
                .predicts = true,
                .sees_move = watch,
                .user = &watcher};
            bool predicts = strcmp(policy, "seed") == 0 || strcmp(policy, "predictive") == 0;
            int64_t num_alone = replay(&trace, policy, capacity, &timeline, NULL).num_hits;

            watcher.num_moves = watcher.num_predicted = 0;
            struct result result = replay(&trace, policy, capacity, &timeline, &tier);
            const struct sim_tier_metrics *metrics = &result.metrics;
            assert_int_equal(metrics->num_planned, watcher.num_moves);
            assert_in_range(metrics->num_planned - metrics->num_used - metrics->num_wasted -
                                metrics->num_cancelled,
                            0, capacity + SIM_TIER_MAX_MOVES);
            assert_true(metrics->num_used > 0);
            assert_true(predicts || watcher.num_predicted == 0);
            num_predicted += watcher.num_predicted;
            num_won += result.num_hits - num_alone;

            tier.sees_move = NULL;
            (void)replay(&trace, policy, capacity, NULL, &tier);
            assert_int_equal(replay(&trace, policy, capacity, &timeline, NULL).num_hits, num_alone);
        }
        num_victims += watcher.num_victims;
        free(watcher.arrivals_ns);
        free(watcher.admissions_ns);
        free(watcher.orders);
        sim_timeline_free(&timeline);
        sim_trace_free(&trace);
    }
    assert_true(num_predicted > 0 && num_victims > 0 && num_won > 0);
}

/* Catches: a block that is counted twice or not at all; a tier, or the order of moves, that is in
 * disorder after a walk with tiers that are small and slow, predictions and waits; figures that
 * differ from one replay to the next; requests that wait for ever. */
static void test_stacks(void **state)
{
    (void)state;
    uint32_t random = 29;
    int64_t num_from[2] = {0}, num_lost = 0, num_held_ns = 0;

    for (int32_t round = 0; round < (TEST_SANITIZED ? 3 : 12); round++) {
        struct sim_trace trace;
        struct sim_timeline timeline;
        int32_t capacity = 26 + (int32_t)draw(&random, 30);
        int64_t near_ns = SECOND / (1 + draw(&random, 40)),
                far_ns = SECOND / (1 + draw(&random, 9));
        struct sim_tier_options tier = {
            .levels = {{.capacity = 8 + (int32_t)draw(&random, 30),
                        .up_block_ns = near_ns,
                        .down_block_ns = near_ns / 4,
                        .latency_ns = (int64_t)draw(&random, 100) * 1000000},
                       {.capacity = 40 + (int32_t)draw(&random, 200),
                        .up_block_ns = far_ns,
                        .down_block_ns = far_ns,
                        .latency_ns = (int64_t)draw(&random, 900) * 1000000}},
            .waits = true,
            .compute_block_ns = SECOND,
        };

        make_conversations(&random, &trace);
        record_timeline(&trace, capacity, &timeline);
        for (int32_t i = 0; kv_policy_name(i) != NULL; i++) {
            tier.num_levels = 1 + i % 2;
            tier.predicts = draw(&random, 2) == 0;
            for (int32_t live = 0; live < 2; live++) {
                const struct sim_timeline *on = live == 0 ? &timeline : NULL;
                struct result result = replay(&trace, kv_policy_name(i), capacity, on, &tier);
                struct result again = replay(&trace, kv_policy_name(i), capacity, on, &tier);
                const struct sim_tier_metrics *metrics = &result.metrics;
                assert_memory_equal(metrics, &again.metrics, sizeof(*metrics));
                assert_int_equal(metrics->num_kept + metrics->num_from[0] + metrics->num_from[1],
                                 result.num_hits);
                assert_true(metrics->num_from[0] + metrics->num_from[1] <=
                            metrics->levels[0].num_up);
                assert_true(metrics->num_from[1] <= metrics->levels[1].num_up);
                assert_true(metrics->levels[1].num_down <= metrics->levels[0].num_down);
                num_from[0] += metrics->num_from[0];
                num_from[1] += metrics->num_from[1];
                num_lost += metrics->levels[0].num_lost;
                num_held_ns += metrics->held_ns;
            }
        }
        sim_timeline_free(&timeline);
        sim_trace_free(&trace);
    }
    assert_true(num_from[0] > 0 && num_from[1] > 0 && num_lost > 0 && num_held_ns > 0);
}

int run_sim_tier_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_waits_by_hand),
        cmocka_unit_test(test_two_tiers_by_hand),
        cmocka_unit_test(test_stacks),
        cmocka_unit_test(test_plans),
    };
    return cmocka_run_group_tests_name("sim_tier", tests, NULL, NULL);
}
