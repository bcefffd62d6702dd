/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/event_queue.h"

#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

/* xorshift64 */
static uint32_t random_below(uint64_t *random_state, uint32_t limit)
{
    *random_state ^= *random_state << 13;
    *random_state ^= *random_state >> 7;
    *random_state ^= *random_state << 17;
    return (uint32_t)(*random_state >> 32) % limit;
}

#define MAX_TEXT_BYTES 3000

/* An event whose contents follow from its number alone. */
struct numbered_event {
    struct imbrex_token_event event;
    struct imbrex_logprob top[IMBREX_MAX_LOGPROBS];
    char text[MAX_TEXT_BYTES];
};

static void make_event(uint64_t number, struct numbered_event *made)
{
    uint64_t random_state = number * 2654435761u + 88172645463325252u;
    bool is_long = random_below(&random_state, 50) == 0;
    uint32_t text_bytes = random_below(&random_state, is_long ? MAX_TEXT_BYTES : 12);
    int32_t num_top = (int32_t)random_below(&random_state, 3) == 0
                          ? (int32_t)random_below(&random_state, IMBREX_MAX_LOGPROBS + 1)
                          : 0;
    for (uint32_t i = 0; i < text_bytes; i++) {
        made->text[i] = (char)random_below(&random_state, 256);
    }
    for (int32_t i = 0; i < num_top; i++) {
        made->top[i] = (struct imbrex_logprob){
            .token_id = (int32_t)random_below(&random_state, 1000), .logprob = -(float)i};
    }
    made->event = (struct imbrex_token_event){
        .choice_idx = (int32_t)random_below(&random_state, 64),
        .token_id = (int32_t)number,
        .text = text_bytes > 0 ? made->text : NULL,
        .text_bytes = text_bytes,
        .is_last = random_below(&random_state, 2) == 0,
        .logprob = -0.5f * (float)random_below(&random_state, 20),
        .top_logprobs = num_top > 0 ? made->top : NULL,
        .num_top_logprobs = num_top,
    };
}

static void assert_is_event(const struct imbrex_token_event *event, uint64_t number)
{
    static struct numbered_event expected;
    make_event(number, &expected);
    assert_int_equal(event->choice_idx, expected.event.choice_idx);
    assert_int_equal(event->token_id, expected.event.token_id);
    assert_int_equal(event->text_bytes, expected.event.text_bytes);
    assert_int_equal(event->is_last, expected.event.is_last);
    assert_true(event->logprob == expected.event.logprob);
    assert_int_equal(event->num_top_logprobs, expected.event.num_top_logprobs);
    assert_non_null(event->text);
    assert_memory_equal(event->text, expected.text, expected.event.text_bytes);
    assert_int_equal(event->top_logprobs == NULL, expected.event.num_top_logprobs == 0);
    for (int32_t i = 0; i < event->num_top_logprobs; i++) {
        assert_int_equal(event->top_logprobs[i].token_id, expected.top[i].token_id);
        assert_true(event->top_logprobs[i].logprob == expected.top[i].logprob);
    }
}

#define NUM_STEPS 60000
#define NUM_RESERVED 7

/* Catches: events that come out of order, twice, cut, or with another's text or alternatives;
 * pointers that a later push makes invalid (under ASan); a reserve that pushes eat up; memory that
 * grows although no more is held. The plain list is the numbers [num_popped, num_pushed). */
static void test_random_walk(void **state)
{
    (void)state;
    static struct numbered_event made;
    struct event_queue queue = {0};
    struct imbrex_token_event taken;
    uint64_t num_pushed = 0, num_popped = 0, random_state = 12345;
    size_t max_live = 0;
    assert_true(event_queue_reserve(&queue, NUM_RESERVED, MAX_TEXT_BYTES));
    for (int32_t step = 0; step < NUM_STEPS; step++) {
        /* Phases that fill and phases that empty it, so that it wraps at many lengths. */
        uint32_t push_chance = step / 500 % 2 == 0 ? 60 : 40;
        if (random_below(&random_state, 100) < push_chance) {
            make_event(num_pushed, &made);
            assert_true(event_queue_push(&queue, &made.event));
            memset(&made, 0xee, sizeof(made));
            num_pushed++;
        } else if (!event_queue_is_empty(&queue)) {
            assert_true(event_queue_pop(&queue, &taken));
            num_popped++;
        }
        if (num_popped > 0) {
            assert_is_event(&taken, num_popped - 1);
        }
        size_t num_live = queue.end - queue.begin + queue.reserved_bytes;
        max_live = num_live > max_live ? num_live : max_live;
        assert_int_equal(event_queue_is_empty(&queue), num_pushed == num_popped);
        assert_true(num_live <= queue.capacity);
    }
    assert_true(num_popped > 10000);
    assert_true(queue.capacity <= 4 * max_live + MAX_TEXT_BYTES);

    unsigned char *bytes = queue.bytes;
    for (int32_t i = 0; i < NUM_RESERVED; i++) {
        const struct imbrex_token_event end = {
            .token_id = -1 - i, .text = made.text, .text_bytes = MAX_TEXT_BYTES};
        event_queue_push_reserved(&queue, &end);
    }
    assert_ptr_equal(queue.bytes, bytes);
    while (num_popped < num_pushed) {
        assert_true(event_queue_pop(&queue, &taken));
        assert_is_event(&taken, num_popped++);
    }
    for (int32_t i = 0; i < NUM_RESERVED; i++) {
        assert_true(event_queue_pop(&queue, &taken));
        assert_int_equal(taken.token_id, -1 - i);
    }
    assert_true(event_queue_is_empty(&queue));
    event_queue_deinit(&queue);
}

/* Catches: an end that finds no room because the records before it were not moved together, or
 * because the room was counted in bytes of text alone. */
static void test_reserved_room(void **state)
{
    (void)state;
    static const char text[100] = "the whole of what is held back";
    struct event_queue queue = {0};
    struct imbrex_token_event taken;
    const struct imbrex_token_event end = {
        .token_id = -1, .text = text, .text_bytes = sizeof(text), .is_last = true};
    const struct imbrex_token_event token = {.token_id = 5, .text = "x", .text_bytes = 1};
    assert_true(event_queue_reserve(&queue, 2, sizeof(text)));
    assert_true(event_queue_reserve(&queue, 1, sizeof(text)));
    size_t capacity = queue.capacity;
    int32_t num_tokens = 0;
    while (queue.capacity == capacity) {
        assert_true(event_queue_push(&queue, &token));
        num_tokens++;
    }
    capacity = queue.capacity;
    size_t token_bytes = (queue.end - queue.begin) / (size_t)num_tokens;
    while (queue.end - queue.begin + queue.reserved_bytes + token_bytes <= capacity) {
        assert_true(event_queue_push(&queue, &token));
        num_tokens++;
    }
    /* As full as it gets without growing, with a hole at its begin and none at its end. */
    for (int32_t i = 0; i < 6; i++) {
        assert_true(event_queue_pop(&queue, &taken));
    }
    while (queue.capacity - queue.end >= token_bytes &&
           queue.end - queue.begin + queue.reserved_bytes + token_bytes <= capacity) {
        assert_true(event_queue_push(&queue, &token));
        num_tokens++;
    }
    num_tokens -= 6;
    assert_int_equal(queue.capacity, capacity);
    assert_true(queue.capacity - queue.end < queue.reserved_bytes);
    for (int32_t i = 0; i < 3; i++) {
        event_queue_push_reserved(&queue, &end);
    }
    assert_int_equal(queue.reserved_bytes, 0);
    assert_int_equal(queue.capacity, capacity);
    for (int32_t i = 0; i < num_tokens + 3; i++) {
        assert_true(event_queue_pop(&queue, &taken));
        assert_int_equal(taken.token_id, i < num_tokens ? 5 : -1);
    }
    assert_int_equal(taken.text_bytes, sizeof(text));
    assert_memory_equal(taken.text, text, sizeof(text));
    event_queue_deinit(&queue);
}

/* Catches: a size that overflows into a small allocation, and a refused event that leaves
 * traces. */
static void test_impossible_sizes(void **state)
{
    (void)state;
    struct event_queue queue = {0};
    struct imbrex_token_event event = {.token_id = 1, .text = "", .text_bytes = 0};
    assert_true(event_queue_push(&queue, &event));
    struct event_queue before = queue;
    for (size_t i = 0; i < 64; i++) {
        event.text_bytes = SIZE_MAX - i;
        assert_false(event_queue_push(&queue, &event));
        assert_false(event_queue_reserve(&queue, 1, SIZE_MAX - i));
    }
    assert_false(event_queue_reserve(&queue, INT32_MAX, SIZE_MAX / 2));
    assert_memory_equal(&queue, &before, sizeof(queue));
    assert_true(event_queue_pop(&queue, &event));
    assert_int_equal(event.token_id, 1);
    assert_true(event_queue_is_empty(&queue));
    event_queue_deinit(&queue);
    assert_true(event_queue_is_empty(&queue));
}

int run_event_queue_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_walk),
        cmocka_unit_test(test_reserved_room),
        cmocka_unit_test(test_impossible_sizes),
    };
    return cmocka_run_group_tests_name("event_queue", tests, NULL, NULL);
}
