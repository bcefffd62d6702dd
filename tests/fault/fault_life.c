/* SPDX-License-Identifier: Apache-2.0 */
/* The whole life of a request with every single request for memory, threads and files refused
 * in turn: the right status, nothing leaked, and the engine goes on afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fault.h"
#include "imbrex.h"

#define NUM_TOKENS 8
#define MODEL_ON_DISK "models/stories260K"

static const int32_t story[NUM_TOKENS] = {403, 407, 261, 378, 432, 383, 286, 261};

struct record {
    int32_t token_ids[NUM_TOKENS + 1];
    int32_t num_tokens;
    int64_t num_calls_before; /* memory requests when the previous token came */
    int64_t num_steady_calls; /* memory requests between the first and the last token */
};

static bool on_token(void *user, const struct imbrex_token_event *event)
{
    struct record *record = user;
    int64_t num_calls = fault_num_calls(FAULT_MEMORY);
    if (event->choice_idx == 0 && event->finish_reason == IMBREX_FINISH_REASON_NONE) {
        if (record->num_tokens > 0) {
            record->num_steady_calls += num_calls - record->num_calls_before;
        }
        record->num_calls_before = num_calls;
        record->token_ids[record->num_tokens++] = event->token_id;
    }
    return true;
}

static enum imbrex_status hold_conversation(const struct imbrex_model *model)
{
    struct imbrex_error err;
    struct imbrex_chat_options options = imbrex_chat_options_default();
    int32_t *token_ids = NULL, end_id;
    size_t num_tokens = 0, text_bytes;
    char *text = NULL;
    options.chat_template = "llama3";
    enum imbrex_status status =
        imbrex_chat_tokenize(model, "[{\"role\": \"user\", \"content\": \"Hello\"}]", &options,
                             &token_ids, &num_tokens, &text, &text_bytes, &err);
    imbrex_free(token_ids);
    imbrex_free(text);
    return status == IMBREX_STATUS_OK ? imbrex_chat_end_token(model, &options, &end_id, &err)
                                      : status;
}

static enum imbrex_status generate(struct imbrex_model *model, struct imbrex_engine *engine,
                                   struct record *record)
{
    struct imbrex_error err;
    struct imbrex_request *request = NULL;
    struct imbrex_request_options options = imbrex_request_options_default(model);
    const char *const stops[] = {"never to be seen"};
    int32_t *prompt_ids = NULL;
    size_t num_prompt_ids = 0;
    char *text = NULL;
    size_t text_bytes;
    enum imbrex_status status;

    *record = (struct record){0};
    status = hold_conversation(model);
    if (status != IMBREX_STATUS_OK) {
        return status;
    }
    status = imbrex_tokenize(imbrex_model_tokenizer(model), "", 0, IMBREX_TOKENIZE_ADD_SPECIAL,
                             &prompt_ids, &num_prompt_ids, &err);
    if (status != IMBREX_STATUS_OK) {
        return status;
    }
    options.prompt_ids = prompt_ids;
    options.num_prompt_ids = (int32_t)num_prompt_ids;
    options.max_tokens = NUM_TOKENS;
    options.stop = stops;
    options.num_stop = 1;
    options.num_choices = 2;
    options.num_logprobs = 2;
    options.num_prompt_logprobs = 1;
    options.callback = on_token;
    options.user = record;
    status = imbrex_request_submit(engine, &options, &request, &err);
    imbrex_free(prompt_ids);
    if (status != IMBREX_STATUS_OK) {
        return status;
    }
    status = imbrex_request_wait(request, &err);
    imbrex_request_destroy(request);
    if (status != IMBREX_STATUS_OK) {
        return status;
    }
    status = imbrex_detokenize(imbrex_model_tokenizer(model), record->token_ids,
                               (size_t)record->num_tokens, true, &text, &text_bytes, &err);
    imbrex_free(text);
    return status;
}

static enum imbrex_status live(const char *path, struct record *record)
{
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    struct imbrex_engine *engine = NULL;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.num_threads = 2;
    options.kv_host_bytes = 1 << 20;
    enum imbrex_status status = imbrex_model_open(path, NULL, &model, &err);
    if (status == IMBREX_STATUS_OK) {
        status = imbrex_engine_create(model, &options, &engine, &err);
    }
    /* Whoever fails says so in one line. */
    assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
    assert_null(strchr(err.message, '\n'));
    if (status == IMBREX_STATUS_OK) {
        status = generate(model, engine, record);
    }
    imbrex_engine_destroy(engine);
    imbrex_model_close(model);
    return status;
}

static enum imbrex_status live_on_disk(void *arg)
{
    struct record record;
    (void)arg;
    enum imbrex_status status = live(MODEL_ON_DISK, &record);
    if (status == IMBREX_STATUS_OK) {
        assert_memory_equal(record.token_ids, story, sizeof(story));
    }
    return status;
}

/* Catches: an unchecked allocation (crash), a leak on a failure path, a wrong status. */
static void test_each_allocation(void **state)
{
    (void)state;
    int64_t num_failed =
        fault_each_call(FAULT_MEMORY, false, IMBREX_STATUS_OUT_OF_MEMORY, live_on_disk, NULL);
    print_message("%ld allocations failed one by one\n", (long)num_failed);
    assert_true(num_failed > 20);
}

/* Catches: error paths that themselves need memory. */
static void test_all_allocations_from_each(void **state)
{
    (void)state;
    assert_true(
        fault_each_call(FAULT_MEMORY, true, IMBREX_STATUS_OUT_OF_MEMORY, live_on_disk, NULL) > 20);
}

/* Catches: an unchecked open or read. */
static void test_each_file_call(void **state)
{
    (void)state;
    assert_true(fault_each_call(FAULT_FILE, false, IMBREX_STATUS_IO, live_on_disk, NULL) >= 6);
}

/* Catches: a failed request that leaves the engine claimed, blocks acquired or text held. */
static void test_engine_survives(void **state)
{
    (void)state;
    struct imbrex_model *model = NULL;
    struct imbrex_engine *engine = NULL;
    struct record record;
    bool has_failed;
    int64_t fail_at = 1;
    assert_int_equal(imbrex_model_open(NULL, NULL, &model, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_engine_create(model, NULL, &engine, NULL), IMBREX_STATUS_OK);
    do {
        fault_arm(FAULT_MEMORY, fail_at, false);
        enum imbrex_status status = generate(model, engine, &record);
        has_failed = fault_disarm();
        assert_int_equal(status, has_failed ? IMBREX_STATUS_OUT_OF_MEMORY : IMBREX_STATUS_OK);
        assert_int_equal(generate(model, engine, &record), IMBREX_STATUS_OK);
        assert_int_equal(record.num_tokens, NUM_TOKENS);
        assert_memory_equal(record.token_ids, story, sizeof(story));
        fail_at++;
    } while (has_failed);
    assert_true(fail_at > 4);
    imbrex_engine_destroy(engine);
    imbrex_model_close(model);
}

/* Catches: an allocation, mapping or thread creation in a decode step. */
static void test_steady_step_allocates_nothing(void **state)
{
    (void)state;
    struct record record;
    assert_int_equal(live(NULL, &record), IMBREX_STATUS_OK);
    assert_int_equal(record.num_tokens, NUM_TOKENS);
    assert_true(record.num_calls_before > 0);
    assert_int_equal(record.num_steady_calls, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation),
        cmocka_unit_test(test_all_allocations_from_each),
        cmocka_unit_test(test_each_file_call),
        cmocka_unit_test(test_engine_survives),
        cmocka_unit_test(test_steady_step_allocates_nothing),
    };
    return cmocka_run_group_tests_name("fault_life", tests, NULL, NULL);
}
