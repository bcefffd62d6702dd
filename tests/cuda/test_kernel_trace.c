/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/cuda/kernel_trace.h"

#include <string.h>

#include "tests/test.h"

#define MAX_EVENTS 6

/* Two CTAs: of the first, consumer 0 computes Swish while consumer 1 is in its gate loop for half
 * of the time; a clock is half a nanosecond. The second does nothing but begin and end. */
static struct gate_first_track tracks[2][GATE_FIRST_TRACKS];
static struct gate_first_event events[2][GATE_FIRST_TRACKS][MAX_EVENTS];

static void set_event(int track, int idx, uint64_t clock, enum gate_first_stage stage)
{
    events[0][track][idx] = (struct gate_first_event){clock, stage, 7};
}

static struct kernel_trace make_trace(void)
{
    memset(tracks, 0, sizeof(tracks));
    memset(events, 0, sizeof(events));
    for (int cta = 0; cta < 2; cta++) {
        for (int track = 0; track < GATE_FIRST_TRACKS; track++) {
            /* SMs count from numbers of their own. */
            uint64_t clock = 5000 + 100000 * (uint64_t)cta;
            tracks[cta][track] =
                (struct gate_first_track){.begin_ns = 1000000 + 500 * (uint64_t)cta,
                                          .end_ns = 1010000,
                                          .begin_clock = clock,
                                          .end_clock = clock + 20000 - 1000 * (uint64_t)cta,
                                          .sm = cta == 0 ? 17 : 3};
        }
    }
    set_event(0, 0, 5000, GATE_FIRST_STAGE_gate);
    set_event(0, 1, 9000, GATE_FIRST_STAGE_swish);
    set_event(0, 2, 13000, GATE_FIRST_STAGE_wait_for_up);
    tracks[0][0].num_events = 3;
    set_event(1, 0, 5000, GATE_FIRST_STAGE_wait_for_gate);
    set_event(1, 1, 11000, GATE_FIRST_STAGE_gate);
    tracks[0][1].num_events = 2;
    return (struct kernel_trace){&tracks[0][0], &events[0][0][0], 2, MAX_EVENTS};
}

static const json_t *find_event(const json_t *json, const char *phase, const char *name, int tid)
{
    size_t i;
    const json_t *event;
    json_array_foreach(json_object_get(json, "traceEvents"), i, event)
    {
        if (strcmp(json_string_value(json_object_get(event, "ph")), phase) == 0 &&
            strcmp(json_string_value(json_object_get(event, "name")), name) == 0 &&
            json_integer_value(json_object_get(event, "tid")) == tid) {
            return event;
        }
    }
    fail_msg("no event \"%s\" of thread %d", name, tid);
    return NULL;
}

static double number(const json_t *event, const char *key)
{
    return json_number_value(json_object_get(event, key));
}

/* Catches stages on the wrong SM or warpgroup, clocks taken for nanoseconds, and an end that is not
 * where the next stage begins. */
static void test_chrome_trace(void **state)
{
    (void)state;
    struct kernel_trace trace = make_trace();
    json_t *json = kernel_trace_json(&trace, "a_kernel");
    assert_non_null(json);
    /* A process and three threads are named for each CTA; 5 stages. */
    assert_int_equal(json_array_size(json_object_get(json, "traceEvents")), 2 * 4 + 5);
    const json_t *swish = find_event(json, "X", "swish", 0);
    assert_float_equal(number(swish, "ts"), 2.0, 1e-9);
    assert_float_equal(number(swish, "dur"), 2.0, 1e-9);
    assert_int_equal(json_integer_value(json_object_get(swish, "pid")), 17);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(swish, "args"), "block")),
                     7);
    const json_t *last = find_event(json, "X", "gate k-loop", 1);
    assert_float_equal(number(last, "ts"), 3.0, 1e-9);
    assert_float_equal(number(last, "dur"), 7.0, 1e-9);
    const json_t *process = find_event(json, "M", "process_name", 0);
    assert_string_equal(
        json_string_value(json_object_get(json_object_get(process, "args"), "name")), "SM 17");
    (void)find_event(json, "M", "thread_name", 2);
    assert_string_equal(
        json_string_value(json_object_get(json_object_get(json, "otherData"), "kernel")),
        "a_kernel");
    json_decref(json);
}

/* Catches a share that counts the other consumer's waiting as cover, and means over events instead
 * of over those of a stage. */
static void test_figures(void **state)
{
    (void)state;
    struct kernel_trace trace = make_trace();
    struct kernel_trace_figures figures = kernel_trace_figures(&trace);
    assert_float_equal(figures.hidden_share, 0.5, 1e-9);
    assert_float_equal(figures.total_us, 10.0, 1e-9);
    assert_float_equal(figures.stage_us[GATE_FIRST_STAGE_gate], (2.0 + 7.0) / 2.0, 1e-9);
    assert_float_equal(figures.stage_us[GATE_FIRST_STAGE_swish], 2.0, 1e-9);
    assert_float_equal(figures.stage_us[GATE_FIRST_STAGE_up], 0.0, 1e-9);
    assert_int_equal(figures.num_lost, 0);
}

/* Catches reading beyond the events that were kept, and a last one that is given the end of those
 * that were lost. */
static void test_lost_events(void **state)
{
    (void)state;
    struct kernel_trace trace = make_trace();
    tracks[0][0].num_events = MAX_EVENTS + 4;
    for (int i = 3; i < MAX_EVENTS; i++) {
        set_event(0, i, 14000, GATE_FIRST_STAGE_up);
    }
    assert_int_equal(kernel_trace_figures(&trace).num_lost, 4);
    json_t *json = kernel_trace_json(&trace, "a_kernel");
    assert_non_null(json);
    assert_int_equal(json_array_size(json_object_get(json, "traceEvents")), 2 * 4 + MAX_EVENTS + 2);
    assert_float_equal(number(find_event(json, "X", "up k-loop", 0), "dur"), 0.0, 1e-9);
    json_decref(json);
}

/* Catches a division by the length of a track that has none. */
static void test_empty_track(void **state)
{
    (void)state;
    struct gate_first_track still[GATE_FIRST_TRACKS] = {
        {.begin_ns = 5, .end_ns = 5, .begin_clock = 9, .end_clock = 9, .num_events = 1},
        {.begin_ns = 5, .end_ns = 5, .begin_clock = 9, .end_clock = 9},
        {.begin_ns = 5, .end_ns = 5, .begin_clock = 9, .end_clock = 9}};
    struct gate_first_event one[GATE_FIRST_TRACKS] = {{9, GATE_FIRST_STAGE_swish, 0}};
    struct kernel_trace trace = {still, one, 1, 1};
    struct kernel_trace_figures figures = kernel_trace_figures(&trace);
    assert_true(figures.hidden_share == 0.0 && figures.total_us == 0.0);
}

int run_kernel_trace_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chrome_trace),
        cmocka_unit_test(test_figures),
        cmocka_unit_test(test_lost_events),
        cmocka_unit_test(test_empty_track),
    };
    return cmocka_run_group_tests_name("kernel_trace", tests, NULL, NULL);
}
