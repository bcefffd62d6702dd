/* SPDX-License-Identifier: Apache-2.0 */
/* Requests on the built-in model, one at a time: how they begin and every way they end; scoring;
 * the engine's options. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "tests/test.h"

#define BOS 1

struct fixture {
    struct imbrex_model *model;
    struct imbrex_engine *engine;
};

static int set_up(void **state)
{
    static struct fixture fixture;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = 100;
    options.max_step_tokens = 16;
    options.num_threads = 2;
    *state = &fixture;
    return imbrex_model_open(NULL, NULL, &fixture.model, NULL) != IMBREX_STATUS_OK ||
           imbrex_engine_create(fixture.model, &options, &fixture.engine, NULL) != IMBREX_STATUS_OK;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    imbrex_engine_destroy(fixture->engine);
    imbrex_model_close(fixture->model);
    return 0;
}

struct record {
    struct imbrex_request *request;
    int32_t token_ids[512];
    int32_t num_tokens;
    int32_t num_ends;
    int32_t stop_after;   /* returns false at this token; 0: never */
    int32_t cancel_after; /* cancels at this token; 0: never */
    enum imbrex_finish_reason reason;
    char text[4096];
    size_t num_bytes;
};

static bool on_token(void *user, const struct imbrex_token_event *event)
{
    struct record *record = user;
    assert_int_equal(record->num_ends, 0);
    assert_true(record->num_bytes + event->text_bytes < sizeof(record->text));
    memcpy(record->text + record->num_bytes, event->text, event->text_bytes);
    record->num_bytes += event->text_bytes;
    if (event->finish_reason != IMBREX_FINISH_REASON_NONE) {
        assert_int_equal(event->token_id, -1);
        record->num_ends++;
        record->reason = event->finish_reason;
        return true;
    }
    record->token_ids[record->num_tokens++] = event->token_id;
    if (record->num_tokens == record->cancel_after) {
        imbrex_request_cancel(record->request);
    }
    return record->num_tokens != record->stop_after;
}

static struct imbrex_request_options from_bos(const struct fixture *fixture)
{
    static const int32_t bos = BOS;
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    options.prompt_ids = &bos;
    options.num_prompt_ids = 1;
    return options;
}

/* Submits with the record as its user; fails the test if that is refused. */
static void submit(struct fixture *fixture, const struct imbrex_request_options *options,
                   struct record *record)
{
    struct imbrex_error err;
    struct imbrex_request_options submitted = *options;
    submitted.callback = on_token;
    submitted.user = record;
    if (imbrex_request_submit(fixture->engine, &submitted, &record->request, &err) !=
        IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

/* Runs to the end; checks that there is one end, that the metrics agree and all blocks are back. */
static void run(struct fixture *fixture, const struct imbrex_request_options *options,
                struct record *record)
{
    struct imbrex_error err;
    struct imbrex_request_metrics metrics;
    submit(fixture, options, record);
    if (imbrex_request_wait(record->request, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    imbrex_request_read_metrics(record->request, &metrics);
    assert_int_equal(record->num_ends, 1);
    assert_int_equal(metrics.finish_reason, record->reason);
    assert_int_equal(metrics.num_generated_tokens, record->num_tokens);
    assert_int_equal(metrics.num_prompt_tokens, options->num_prompt_ids);
    assert_true(metrics.ttft_ns >= metrics.prefill_ns);
    assert_int_equal(kv_pool_num_available(&fixture->engine->kv_pool),
                     fixture->engine->kv_pool.num_blocks);
    assert_true(kv_pool_check(&fixture->engine->kv_pool));
    imbrex_request_destroy(record->request);
    record->text[record->num_bytes] = '\0';
}

/* Catches: a limit that is off by one. */
static void test_max_tokens(void **state)
{
    for (int32_t max_tokens = 1; max_tokens < 4; max_tokens++) {
        struct record record = {0};
        struct imbrex_request_options options = from_bos(*state);
        options.max_tokens = max_tokens;
        run(*state, &options, &record);
        assert_int_equal(record.reason, IMBREX_FINISH_REASON_LENGTH);
        assert_int_equal(record.num_tokens, max_tokens);
    }
}

/* Catches: a step beyond the context (a write outside the KV cache), or an end too early: prompt
 * and continuation together fill it exactly. */
static void test_context_full(void **state)
{
    int32_t prompt[99];
    for (int32_t i = 0; i < 99; i++) {
        prompt[i] = i == 0 ? BOS : 400 + i % 7;
    }
    for (int32_t num_prompt_ids = 97; num_prompt_ids <= 99; num_prompt_ids++) {
        struct record record = {0};
        struct imbrex_request_options options = from_bos(*state);
        options.prompt_ids = prompt;
        options.num_prompt_ids = num_prompt_ids;
        options.ignore_eos = true;
        run(*state, &options, &record);
        assert_int_equal(record.reason, IMBREX_FINISH_REASON_CONTEXT);
        assert_int_equal(record.num_tokens, 100 - num_prompt_ids);
    }
}

/* Catches: an end token that does not end, or ends although it should be ignored. The greedy story
 * has no end within the context, so the second token of the story is declared one. */
static void test_end_token(void **state)
{
    struct fixture *fixture = *state;
    struct record free_run = {0};
    struct record ended = {0};
    struct record ignored = {0};
    struct imbrex_request_options options = from_bos(fixture);
    struct generation_config saved = fixture->model->generation_config;
    options.max_tokens = 5;
    run(fixture, &options, &free_run);
    fixture->model->generation_config.num_eos_token_ids = 2;
    fixture->model->generation_config.eos_token_ids[1] = free_run.token_ids[1];
    run(fixture, &options, &ended);
    options.ignore_eos = true;
    run(fixture, &options, &ignored);
    fixture->model->generation_config = saved;
    assert_int_equal(ended.reason, IMBREX_FINISH_REASON_EOS);
    assert_int_equal(ended.num_tokens, 2);
    assert_int_equal(ignored.reason, IMBREX_FINISH_REASON_LENGTH);
    assert_int_equal(ignored.num_tokens, 5);
}

/* Catches: end tokens of the caller that do not end, end one token late, are kept as a pointer
 * only, or end although they should be ignored. */
static void test_end_token_of_the_caller(void **state)
{
    struct fixture *fixture = *state;
    struct record free_run = {0};
    struct record ended = {0};
    struct record ignored = {0};
    struct imbrex_request_options options = from_bos(fixture);
    options.max_tokens = 5;
    run(fixture, &options, &free_run);
    int32_t end_ids[] = {511, free_run.token_ids[2]};
    options.end_token_ids = end_ids;
    options.num_end_token_ids = 2;
    submit(fixture, &options, &ended);
    end_ids[1] = 510;
    assert_int_equal(imbrex_request_wait(ended.request, NULL), IMBREX_STATUS_OK);
    imbrex_request_destroy(ended.request);
    assert_int_equal(ended.reason, IMBREX_FINISH_REASON_EOS);
    assert_int_equal(ended.num_tokens, 3);
    end_ids[1] = free_run.token_ids[2];
    options.ignore_eos = true;
    run(fixture, &options, &ignored);
    assert_int_equal(ignored.num_tokens, 5);
}

/* Catches: stop strings that leak, also at the very end, and text that is lost before them. */
static void test_stop_string(void **state)
{
    struct record free_run = {0};
    struct imbrex_request_options options = from_bos(*state);
    options.max_tokens = 40;
    run(*state, &options, &free_run);
    assert_int_equal(strncmp(free_run.text, "Once upon a time, there was", 27), 0);

    struct record stopped = {0};
    const char *const stops[] = {"never seen", "time, th"};
    options.stop = stops;
    options.num_stop = 2;
    run(*state, &options, &stopped);
    assert_int_equal(stopped.reason, IMBREX_FINISH_REASON_STOP_STRING);
    assert_string_equal(stopped.text, "Once upon a ");

    /* "th" could still become "thyme" when the tokens run out. */
    struct record held = {0};
    const char *const longer[] = {"there was a thyme"};
    options.stop = longer;
    options.num_stop = 1;
    run(*state, &options, &held);
    assert_int_equal(held.reason, IMBREX_FINISH_REASON_LENGTH);
    assert_string_equal(held.text, free_run.text);
}

/* Catches: a cancel that is lost, before the run, inside it, or by the callback's answer. */
static void test_cancel(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    struct record by_answer = {.stop_after = 3};
    struct record inside = {.cancel_after = 4};
    run(fixture, &options, &by_answer);
    assert_int_equal(by_answer.reason, IMBREX_FINISH_REASON_CANCELLED);
    assert_int_equal(by_answer.num_tokens, 3);
    run(fixture, &options, &inside);
    assert_int_equal(inside.reason, IMBREX_FINISH_REASON_CANCELLED);
    assert_int_equal(inside.num_tokens, 4);

    struct record before = {0};
    submit(fixture, &options, &before);
    imbrex_request_cancel(before.request);
    assert_int_equal(imbrex_request_wait(before.request, NULL), IMBREX_STATUS_OK);
    assert_int_equal(before.reason, IMBREX_FINISH_REASON_CANCELLED);
    assert_int_equal(before.num_tokens, 0);
    imbrex_request_destroy(before.request);
}

static void *cancel_from_thread(void *argument)
{
    imbrex_request_cancel(argument);
    return NULL;
}

/* Catches: a data race between a run and a cancel from another thread (under TSan). */
static void test_cancel_from_another_thread(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    struct record record = {0};
    pthread_t thread;
    options.ignore_eos = true;
    submit(fixture, &options, &record);
    assert_int_equal(pthread_create(&thread, NULL, cancel_from_thread, record.request), 0);
    assert_int_equal(imbrex_request_wait(record.request, NULL), IMBREX_STATUS_OK);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(record.reason == IMBREX_FINISH_REASON_CANCELLED ||
                record.reason == IMBREX_FINISH_REASON_CONTEXT);
    imbrex_request_destroy(record.request);
}

static bool step_again(void *user, const struct imbrex_token_event *event)
{
    struct fixture *fixture = user;
    struct imbrex_error err = {0};
    bool has_work;
    (void)event;
    assert_int_equal(imbrex_engine_step(fixture->engine, &has_work, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "no other thread"));
    return true;
}

/* Catches: two threads, or a callback, inside one step. */
static void test_step_inside_a_step(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request *request;
    struct imbrex_request_options options = from_bos(fixture);
    options.max_tokens = 2;
    options.callback = step_again;
    options.user = fixture;
    assert_int_equal(imbrex_request_submit(fixture->engine, &options, &request, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
    imbrex_request_destroy(request);
}

/* Catches: a request destroyed while it runs whose blocks or slot stay away, or that is freed under
 * the engine. */
static void test_destroy_while_running(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    struct record record = {0};
    bool has_work;
    submit(fixture, &options, &record);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(imbrex_engine_step(fixture->engine, &has_work, NULL), IMBREX_STATUS_OK);
        assert_true(has_work);
    }
    imbrex_request_destroy(record.request);
    assert_int_equal(record.reason, IMBREX_FINISH_REASON_CANCELLED);
    assert_int_equal(record.num_tokens, 3);
    assert_int_equal(kv_pool_num_available(&fixture->engine->kv_pool),
                     fixture->engine->kv_pool.num_blocks);
    assert_int_equal(imbrex_engine_step(fixture->engine, &has_work, NULL), IMBREX_STATUS_OK);
    assert_false(has_work);
}

/* Catches: events that are lost or out of order when they are polled, text that is not the
 * callback's, a poll that waits although it should not. */
static void test_poll(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    struct imbrex_request *request;
    struct imbrex_token_event event;
    struct record called = {0}, polled = {0};
    bool has_event;
    options.max_tokens = 30;
    run(fixture, &options, &called);
    assert_int_equal(imbrex_request_submit(fixture->engine, &options, &request, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(imbrex_request_poll(request, 0, &has_event, &event, NULL), IMBREX_STATUS_OK);
    assert_false(has_event);
    for (;;) {
        assert_int_equal(imbrex_request_poll(request, -1, &has_event, &event, NULL),
                         IMBREX_STATUS_OK);
        if (!has_event) {
            break;
        }
        on_token(&polled, &event);
        assert_int_equal(event.is_last, polled.num_ends == 1);
    }
    assert_int_equal(polled.num_ends, 1);
    assert_int_equal(polled.num_tokens, called.num_tokens);
    assert_memory_equal(polled.token_ids, called.token_ids, sizeof(called.token_ids));
    assert_int_equal(polled.num_bytes, called.num_bytes);
    assert_memory_equal(polled.text, called.text, called.num_bytes);
    imbrex_request_destroy(request);
}

/* Catches: a queue without an end, and a place in it that a request keeps after it ran. */
static void test_queue_is_full(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine;
    struct imbrex_error err;
    struct imbrex_engine_metrics metrics;
    struct imbrex_engine_options engine_options = imbrex_engine_options_default();
    struct imbrex_request_options options = from_bos(fixture);
    struct imbrex_request *requests[3];
    engine_options.max_waiting = 2;
    options.max_tokens = 3;
    assert_int_equal(imbrex_engine_create(fixture->model, &engine_options, &engine, NULL),
                     IMBREX_STATUS_OK);
    for (int32_t round = 0; round < 3; round++) {
        requests[2] = NULL;
        assert_int_equal(imbrex_request_submit(engine, &options, &requests[0], NULL), 0);
        assert_int_equal(imbrex_request_submit(engine, &options, &requests[1], NULL), 0);
        assert_int_equal(imbrex_request_submit(engine, &options, &requests[2], &err),
                         IMBREX_STATUS_CAPACITY);
        assert_non_null(strstr(err.message, "fewer than 2 waiting requests, found 2"));
        assert_null(requests[2]);
        if (round == 1) {
            imbrex_request_cancel(requests[0]);
        }
        imbrex_request_destroy(requests[0]);
        imbrex_request_destroy(requests[1]);
    }
    imbrex_engine_read_metrics(engine, &metrics);
    assert_int_equal(metrics.num_submitted, 6);
    assert_int_equal(metrics.num_rejected, 3);
    imbrex_engine_destroy(engine);
}

/* Catches: a deadline that nobody looks at, for requests that run and for those that wait. */
static void test_deadline(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    struct record late = {0}, after = {0};
    options.timeout_ns = 1;
    options.ignore_eos = true;
    run(fixture, &options, &late);
    assert_int_equal(late.reason, IMBREX_FINISH_REASON_DEADLINE);
    options.timeout_ns = INT64_MAX;
    options.max_tokens = 2;
    run(fixture, &options, &after);
    assert_int_equal(after.reason, IMBREX_FINISH_REASON_LENGTH);
}

/* Catches: logits with NaN that are sampled from. A norm weight of NaN makes all of them NaN. The
 * engine must be usable again afterwards. */
static void test_non_finite_logits(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_error err;
    struct imbrex_request_options options = from_bos(fixture);
    struct record record = {0};
    float *norm = (float *)fixture->model->weights.norm;
    float saved = norm[0];
    norm[0] = NAN;
    submit(fixture, &options, &record);
    assert_int_equal(imbrex_request_wait(record.request, &err), IMBREX_STATUS_FORMAT);
    norm[0] = saved;
    assert_non_null(strstr(err.message, "the weights give logits that are not finite"));
    assert_non_null(strstr(err.message, "position 0"));
    assert_int_equal(record.reason, IMBREX_FINISH_REASON_ERROR);
    assert_int_equal(record.num_tokens, 0);
    imbrex_request_destroy(record.request);

    struct record after = {0};
    options.max_tokens = 3;
    run(fixture, &options, &after);
    assert_int_equal(after.token_ids[0], 403);
}

/* Catches: a sampled text that another run before it changes, or a seed without effect. */
static void test_seed(void **state)
{
    struct record first = {0};
    struct record again = {0};
    struct record other = {0};
    struct imbrex_request_options options = from_bos(*state);
    options.temperature = 1.0f;
    options.repetition_penalty = 1.2f;
    options.max_tokens = 40;
    options.seed = 11;
    run(*state, &options, &first);
    options.seed = 12;
    run(*state, &options, &other);
    options.seed = 11;
    run(*state, &options, &again);
    assert_int_equal(again.num_tokens, first.num_tokens);
    assert_memory_equal(again.token_ids, first.token_ids, sizeof(first.token_ids));
    assert_memory_not_equal(other.token_ids, first.token_ids, sizeof(first.token_ids));
}

/* Catches: a continuation whose first space is lost as if a text began there. */
static void test_continuation_keeps_its_space(void **state)
{
    struct fixture *fixture = *state;
    struct record record = {0};
    struct imbrex_error err;
    struct imbrex_request_options options = from_bos(fixture);
    int32_t *ids = NULL;
    size_t num_ids;
    const char *prompt = "Once upon a";
    assert_int_equal(imbrex_tokenize(imbrex_model_tokenizer(fixture->model), prompt, strlen(prompt),
                                     IMBREX_TOKENIZE_ADD_SPECIAL, &ids, &num_ids, &err),
                     IMBREX_STATUS_OK);
    options.prompt_ids = ids;
    options.num_prompt_ids = (int32_t)num_ids;
    options.max_tokens = 2;
    run(fixture, &options, &record);
    assert_string_equal(record.text, " time,");
    imbrex_free(ids);
}

struct ranges {
    int32_t depth, num_steps, num_forwards;
    bool has_negative, is_forward_outside;
};

static void begin_range(void *user, const char *name)
{
    struct ranges *ranges = user;
    bool is_step = strcmp(name, "step") == 0;
    ranges->num_steps += is_step;
    ranges->num_forwards += strcmp(name, "forward") == 0;
    ranges->is_forward_outside |= !is_step && ranges->depth == 0;
    ranges->depth++;
}

static void end_range(void *user)
{
    struct ranges *ranges = user;
    ranges->depth--;
    ranges->has_negative |= ranges->depth < 0;
}

/* Catches: ranges that a tracer cannot nest, or that it is never told of. */
static void test_ranges(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine;
    struct imbrex_request *request;
    struct ranges ranges = {0};
    struct imbrex_engine_options engine_options = imbrex_engine_options_default();
    struct imbrex_request_options options = from_bos(fixture);
    engine_options.range_begin = begin_range;
    engine_options.range_end = end_range;
    engine_options.range_user = &ranges;
    options.max_tokens = 4;
    assert_int_equal(imbrex_engine_create(fixture->model, &engine_options, &engine, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(imbrex_request_submit(engine, &options, &request, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
    imbrex_request_destroy(request);
    imbrex_engine_destroy(engine);
    assert_int_equal(ranges.depth, 0);
    assert_false(ranges.has_negative);
    assert_false(ranges.is_forward_outside);
    assert_int_equal(ranges.num_steps, 4);
    assert_true(ranges.num_forwards >= ranges.num_steps);
}

/* Catches: bad ranges of engine options taken, or named badly. */
static void test_engine_options(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine = NULL;
    struct imbrex_memory_plan plan;
    struct imbrex_error err;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.num_threads = -1;
    assert_int_equal(imbrex_engine_create(fixture->model, &options, &engine, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "num_threads"));
    options = imbrex_engine_options_default();
    options.context_size = INT32_MAX;
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &plan, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "context_size"));
    assert_null(engine);

    /* A plan is what create then does, and covers at least what its parts need. */
    struct imbrex_memory_plan created;
    options = imbrex_engine_options_default();
    options.cpu_features = 0;
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &plan, &err), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_engine_create(fixture->model, &options, &engine, &err),
                     IMBREX_STATUS_OK);
    imbrex_engine_memory_plan(engine, &created);
    assert_int_equal(plan.weight_bytes, created.weight_bytes);
    assert_int_equal(plan.converted_bytes, created.converted_bytes);
    assert_int_equal(plan.kv_bytes, created.kv_bytes);
    assert_int_equal(plan.activation_bytes, created.activation_bytes);
    assert_int_equal(plan.kv_block_size, created.kv_block_size);
    assert_int_equal(plan.kv_num_blocks, created.kv_num_blocks);
    assert_int_equal(plan.context_size, created.context_size);
    assert_int_equal(plan.max_step_tokens, created.max_step_tokens);
    assert_int_equal(plan.num_threads, created.num_threads);
    assert_string_equal(plan.kernels, "ref");
    assert_int_equal(plan.context_size, 512);
    assert_true(plan.kv_bytes >= (size_t)512 * 2 * 5 * 4 * 8 * sizeof(float));
    imbrex_engine_destroy(engine);
}

/* Catches: a device or a way to compute that is taken although nothing can do it, or is refused
 * without its name; a plan for a GPU that needs one to be there, or forgets the weights' copy. */
static void test_devices(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine = NULL;
    struct imbrex_memory_plan cpu, cuda, exact;
    struct imbrex_error err;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.device = "gpu";
    assert_int_equal(imbrex_engine_create(fixture->model, &options, &engine, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "\"gpu\""));
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &cpu, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    options.device = "cuda:1000";
    assert_int_not_equal(imbrex_engine_create(fixture->model, &options, &engine, &err),
                         IMBREX_STATUS_OK);
    options.device = "cpu";
    options.compute = IMBREX_COMPUTE_BF16;
    assert_int_equal(imbrex_engine_create(fixture->model, &options, &engine, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "BF16"));
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &cpu, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_null(engine);

    options.compute = IMBREX_COMPUTE_AUTO;
    options.context_size = 512;
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &cpu, &err), IMBREX_STATUS_OK);
    options.device = "cuda:3";
    options.kv_cache_tokens = 4096;
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &cuda, &err), IMBREX_STATUS_OK);
    options.compute = IMBREX_COMPUTE_F32;
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &exact, &err), IMBREX_STATUS_OK);
    assert_string_equal(cpu.device, "cpu");
    assert_string_equal(cpu.compute, "F32");
    assert_int_equal(cpu.device_weight_bytes, 0);
    assert_int_equal(cpu.max_step_tokens, 128);
    assert_string_equal(cuda.device, "cuda");
    assert_int_equal(cuda.device_idx, 3);
    assert_string_equal(cuda.compute, "BF16");
    assert_string_equal(exact.compute, "F32");
    assert_int_equal(cuda.max_step_tokens, 4096);
    assert_true(cuda.device_weight_bytes > 0);
    assert_true(exact.device_weight_bytes > cuda.device_weight_bytes);
    assert_true(exact.kv_bytes > cuda.kv_bytes);
    assert_true(exact.activation_bytes > cuda.activation_bytes);

    options = imbrex_engine_options_default();
    options.device = "auto";
    assert_int_equal(imbrex_engine_create(fixture->model, &options, &engine, &err),
                     IMBREX_STATUS_OK);
    imbrex_engine_destroy(engine);
}

/* Catches: scores that depend on the chunk, and bad ids or lengths taken. */
static void test_score(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_error err;
    int32_t ids[100];
    double nll[99], part[39];
    for (int32_t i = 0; i < 100; i++) {
        ids[i] = (i * 53) % 500 + 3;
    }
    assert_int_equal(imbrex_engine_score(fixture->engine, ids, 100, nll, &err), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_engine_score(fixture->engine, ids, 40, part, &err), IMBREX_STATUS_OK);
    assert_memory_equal(nll, part, sizeof(part));
    for (int32_t i = 0; i < 99; i++) {
        assert_true(nll[i] > 0.0);
    }
    assert_int_equal(imbrex_engine_score(fixture->engine, ids, 1, nll, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(imbrex_engine_score(fixture->engine, ids, 101, nll, &err),
                     IMBREX_STATUS_CAPACITY);
    assert_non_null(strstr(err.message, "at most 100"));
    ids[7] = 512;
    assert_int_equal(imbrex_engine_score(fixture->engine, ids, 100, nll, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "token_ids[7]"));
}

/* Catches: a logit of -infinity, which leaves the likelihood of every other id finite. The sign of
 * the hidden state is not known, so one of the two makes it. */
static void test_score_non_finite(void **state)
{
    struct fixture *fixture = *state;
    const int32_t ids[] = {BOS, 403};
    const uint16_t infinities[] = {0x7c00, 0xfc00};
    const struct model_config *config = &fixture->model->config;
    struct weight_view *lm_head = &fixture->model->weights.lm_head, saved = *lm_head;
    size_t num_bytes = (size_t)config->vocab_size * (size_t)config->hidden_size * sizeof(uint16_t);
    uint16_t *elements = malloc(num_bytes);
    assert_non_null(elements);
    assert_int_equal(saved.dtype, DTYPE_F16);
    for (int i = 0; i < 2; i++) {
        struct imbrex_error err;
        double nll;
        memcpy(elements, saved.elements, num_bytes);
        elements[9 * config->hidden_size] = infinities[i];
        lm_head->elements = elements;
        enum imbrex_status status = imbrex_engine_score(fixture->engine, ids, 2, &nll, &err);
        *lm_head = saved;
        assert_int_equal(status, IMBREX_STATUS_FORMAT);
        assert_non_null(strstr(err.message, "the weights give logits that are not finite"));
        assert_non_null(strstr(err.message, "position 0"));
    }
    free(elements);
}

int run_engine_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_max_tokens),
        cmocka_unit_test(test_context_full),
        cmocka_unit_test(test_end_token),
        cmocka_unit_test(test_end_token_of_the_caller),
        cmocka_unit_test(test_stop_string),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_cancel_from_another_thread),
        cmocka_unit_test(test_step_inside_a_step),
        cmocka_unit_test(test_destroy_while_running),
        cmocka_unit_test(test_poll),
        cmocka_unit_test(test_queue_is_full),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_non_finite_logits),
        cmocka_unit_test(test_seed),
        cmocka_unit_test(test_continuation_keeps_its_space),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_engine_options),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_score),
        cmocka_unit_test(test_score_non_finite),
    };
    return cmocka_run_group_tests_name("engine", tests, set_up, tear_down);
}
