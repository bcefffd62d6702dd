/* SPDX-License-Identifier: Apache-2.0 */
/* Requests and their events while memory is short: nothing leaked, ends never lost, and no memory
 * wanted by a request with a callback once it exists. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/request.h"
#include "fault.h"

static const struct request_limits limits = {.context_size = 100, .priority_step_ns = 1000000};

struct fixture {
    struct imbrex_model *model;
    pthread_mutex_t lock;
};

static int set_up(void **state)
{
    static struct fixture fixture;
    *state = &fixture;
    pthread_mutex_init(&fixture.lock, NULL);
    return imbrex_model_open(NULL, NULL, &fixture.model, NULL) != IMBREX_STATUS_OK;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    imbrex_model_close(fixture->model);
    pthread_mutex_destroy(&fixture->lock);
    return 0;
}

/* One that needs all there is to need. */
static struct imbrex_request_options rich_options(const struct fixture *fixture)
{
    static const char *const stops[] = {"never to be seen", "nor this"};
    static const struct imbrex_logit_bias bias[] = {{9, 1.0f}, {8, -1.0f}};
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    options.prompt_text = "Once upon";
    options.prompt_text_bytes = 9;
    options.stop = stops;
    options.num_stop = 2;
    options.logit_bias = bias;
    options.num_logit_bias = 2;
    options.min_tokens = 1;
    options.num_choices = 3;
    options.num_logprobs = 2;
    options.num_prompt_logprobs = 2;
    options.salt = "salt";
    options.salt_bytes = 4;
    return options;
}

/* Catches: an unchecked allocation, a leak on a failure path, a wrong status. */
static void test_create(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = rich_options(fixture);
    int64_t fail_at = 1;
    bool has_failed;
    do {
        struct imbrex_error err = {0};
        struct imbrex_request *request = NULL;
        int64_t num_live = fault_num_live();
        fault_arm(FAULT_MEMORY, fail_at, false);
        enum imbrex_status status =
            request_create(fixture->model, &limits, &options, &request, &err);
        has_failed = fault_disarm();
        assert_int_equal(status, has_failed ? IMBREX_STATUS_OUT_OF_MEMORY : IMBREX_STATUS_OK);
        assert_int_equal(request == NULL, has_failed);
        assert_int_equal(strlen(err.message) > 0, has_failed);
        request_free(request);
        assert_int_equal(fault_num_live(), num_live);
        fail_at++;
    } while (has_failed);
    assert_true(fail_at > 15);
}

/* Catches: ends of choices that are lost with the event that found no memory, or the text before
 * them; a request that does not say why it ended. */
static void test_events_without_memory(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = rich_options(fixture);
    struct imbrex_request *request = NULL;
    struct imbrex_token_event event;
    const struct imbrex_logprob top[] = {{403, -1.0f}, {407, -2.0f}};
    /* "n" is held back: both stop strings begin with it. */
    const struct sample_result letter = {.token_id = 3 + 'x', .logprob = -1.0f, .num_top = 2};
    const struct sample_result held = {.token_id = 3 + 'n', .logprob = -1.0f, .num_top = 2};
    enum imbrex_finish_reason reason = IMBREX_FINISH_REASON_NONE;
    int32_t num_kept = 0;
    assert_int_equal(request_create(fixture->model, &limits, &options, &request, NULL),
                     IMBREX_STATUS_OK);
    fault_arm(FAULT_MEMORY, 1, true);
    (void)request_take_token(&request->choices[1], &held, top, 1, &fixture->lock);
    while (reason == IMBREX_FINISH_REASON_NONE) {
        reason = request_take_token(&request->choices[0], &letter, top, 1, &fixture->lock);
        num_kept += reason == IMBREX_FINISH_REASON_NONE;
    }
    assert_int_equal(reason, IMBREX_FINISH_REASON_ERROR);
    assert_int_equal(request->status, IMBREX_STATUS_OUT_OF_MEMORY);
    assert_int_equal(request->error.status, IMBREX_STATUS_OUT_OF_MEMORY);
    for (int32_t i = 0; i < 3; i++) {
        request_end_choice(&request->choices[i], IMBREX_FINISH_REASON_ERROR, 2, &fixture->lock);
    }
    /* Nor is an event lost that cannot be handed out yet. */
    assert_false(event_queue_pop(&request->events, &event));
    assert_true(fault_disarm());
    for (int32_t i = 0; i < num_kept + 1; i++) {
        assert_true(event_queue_pop(&request->events, &event));
        assert_int_equal(event.choice_idx, i == 0 ? 1 : 0);
        assert_int_equal(event.token_id, i == 0 ? held.token_id : letter.token_id);
        assert_int_equal(event.num_top_logprobs, 2);
    }
    static const char *const texts[] = {"x", "n", ""};
    for (int32_t i = 0; i < 3; i++) {
        assert_true(event_queue_pop(&request->events, &event));
        assert_int_equal(event.choice_idx, i);
        assert_int_equal(event.finish_reason, IMBREX_FINISH_REASON_ERROR);
        assert_int_equal(event.text_bytes, strlen(texts[i]));
        assert_memory_equal(event.text, texts[i], event.text_bytes);
        assert_int_equal(event.is_last, i == 2);
    }
    assert_true(event_queue_is_empty(&request->events));
    request_free(request);
}

static bool on_token(void *user, const struct imbrex_token_event *event)
{
    size_t *num_bytes = user;
    *num_bytes += event->text_bytes;
    return true;
}

/* Catches: an allocation for a token or an end whose event goes to a callback. */
static void test_callback_allocates_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = rich_options(fixture);
    struct imbrex_request *request = NULL;
    size_t num_bytes = 0;
    const struct imbrex_logprob top[] = {{403, -1.0f}, {407, -2.0f}};
    const struct sample_result result = {.token_id = 403, .logprob = -1.0f, .num_top = 2};
    options.callback = on_token;
    options.user = &num_bytes;
    assert_int_equal(request_create(fixture->model, &limits, &options, &request, NULL),
                     IMBREX_STATUS_OK);
    int64_t num_calls = fault_num_calls(FAULT_MEMORY);
    for (int32_t i = 0; i < 50; i++) {
        assert_int_equal(
            request_take_token(&request->choices[i % 3], &result, top, 1, &fixture->lock),
            IMBREX_FINISH_REASON_NONE);
    }
    for (int32_t i = 0; i < 3; i++) {
        request_end_choice(&request->choices[i], IMBREX_FINISH_REASON_EOS, 2, &fixture->lock);
    }
    assert_int_equal(fault_num_calls(FAULT_MEMORY), num_calls);
    assert_true(num_bytes > 50);
    request_free(request);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_events_without_memory),
        cmocka_unit_test(test_callback_allocates_nothing),
    };
    return cmocka_run_group_tests_name("fault_request", tests, set_up, tear_down);
}
