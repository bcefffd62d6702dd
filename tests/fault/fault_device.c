/* SPDX-License-Identifier: Apache-2.0 */
/* An engine on a device with memory of its own: every request for memory of its creation refused
 * in turn, and none wanted by a step that decodes, which is a graph there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine.h"
#include "fault.h"
#include "ops/fake/device_fake.h"

enum { NUM_TOKENS = 60, NUM_STEADY_TOKENS = 40 };

static enum imbrex_status create(struct imbrex_model *model, struct device **device,
                                 struct imbrex_engine **engine)
{
    struct imbrex_error err = {0};
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = 128;
    options.num_threads = 2;
    enum imbrex_status status = device_fake_create(1, device, &err);
    if (status == IMBREX_STATUS_OK) {
        status = engine_create_on(model, &options, *device, engine, &err);
    }
    assert_int_equal(status == IMBREX_STATUS_OK, strlen(err.message) == 0);
    return status;
}

/* Catches: an unchecked allocation on the way to an engine there: places of weights, pinned
 * buffers, their copies, threads; and what a failure leaves behind. */
static void test_each_allocation(void **state)
{
    (void)state;
    struct imbrex_model *model = NULL;
    bool has_failed = true;
    int64_t num_failed = 0;
    assert_int_equal(imbrex_model_open(NULL, NULL, &model, NULL), IMBREX_STATUS_OK);
    while (has_failed) {
        struct device *device = NULL;
        struct imbrex_engine *engine = NULL;
        int64_t num_live = fault_num_live();
        fault_arm(FAULT_MEMORY, num_failed + 1, false);
        enum imbrex_status status = create(model, &device, &engine);
        has_failed = fault_disarm();
        assert_int_equal(status, has_failed ? IMBREX_STATUS_OUT_OF_MEMORY : IMBREX_STATUS_OK);
        assert_int_equal(engine == NULL, has_failed);
        imbrex_engine_destroy(engine);
        device_destroy(device);
        assert_int_equal(fault_num_live(), num_live);
        num_failed += has_failed;
    }
    assert_true(num_failed > 20);
    imbrex_model_close(model);
}

struct record {
    int32_t num_tokens;
    int64_t num_calls; /* memory requests when the last but NUM_STEADY_TOKENS came */
};

static bool on_token(void *user, const struct imbrex_token_event *event)
{
    struct record *record = user;
    if (event->finish_reason == IMBREX_FINISH_REASON_NONE &&
        ++record->num_tokens == NUM_TOKENS - NUM_STEADY_TOKENS) {
        record->num_calls = fault_num_calls(FAULT_MEMORY);
    }
    return true;
}

/* Catches: an allocation in a decode step that is a graph, or in its launch. */
static void test_steady_step_allocates_nothing(void **state)
{
    (void)state;
    static const int32_t bos = 1;
    struct imbrex_model *model = NULL;
    struct device *device = NULL;
    struct imbrex_engine *engine = NULL;
    struct imbrex_request *request = NULL;
    struct record record = {0};
    assert_int_equal(imbrex_model_open(NULL, NULL, &model, NULL), IMBREX_STATUS_OK);
    assert_int_equal(create(model, &device, &engine), IMBREX_STATUS_OK);
    struct imbrex_request_options options = imbrex_request_options_default(model);
    options.prompt_ids = &bos;
    options.num_prompt_ids = 1;
    options.max_tokens = NUM_TOKENS;
    options.callback = on_token;
    options.user = &record;
    assert_int_equal(imbrex_request_submit(engine, &options, &request, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
    assert_int_equal(fault_num_calls(FAULT_MEMORY), record.num_calls);
    assert_int_equal(record.num_tokens, NUM_TOKENS);
    assert_true(device_fake_num_launches(device) >= NUM_STEADY_TOKENS);
    imbrex_request_destroy(request);
    imbrex_engine_destroy(engine);
    device_destroy(device);
    imbrex_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation),
        cmocka_unit_test(test_steady_step_allocates_nothing),
    };
    return cmocka_run_group_tests_name("fault_device", tests, NULL, NULL);
}
