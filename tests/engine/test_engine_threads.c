/* SPDX-License-Identifier: Apache-2.0 */
/* Engines and threads: with a thread of its own, with none, several at once. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "tests/test.h"

#define BOS 1
#define NUM_THREADS 16
#define NUM_ROUNDS (TEST_SANITIZED ? 3 : 10)
#define NUM_TOKENS 8
#define NUM_OPENS (TEST_SANITIZED ? 50 : 1000)

static const int32_t story[NUM_TOKENS] = {403, 407, 261, 378, 432, 383, 286, 261};

static int set_up(void **state)
{
    return imbrex_model_open(NULL, NULL, (struct imbrex_model **)state, NULL) != IMBREX_STATUS_OK;
}

static int tear_down(void **state)
{
    imbrex_model_close(*state);
    return 0;
}

static struct imbrex_engine *create_engine(struct imbrex_model *model, int32_t num_threads,
                                           int32_t max_waiting)
{
    struct imbrex_engine *engine;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = 64;
    options.kv_cache_tokens = 256;
    options.num_threads = num_threads;
    options.max_waiting = max_waiting;
    assert_int_equal(imbrex_engine_create(model, &options, &engine, NULL), IMBREX_STATUS_OK);
    return engine;
}

struct heard {
    int32_t token_ids[NUM_TOKENS];
    int32_t num_tokens, num_ends;
};

static bool hear(void *user, const struct imbrex_token_event *event)
{
    struct heard *heard = user;
    if (event->finish_reason == IMBREX_FINISH_REASON_NONE) {
        if (heard->num_tokens < NUM_TOKENS) {
            heard->token_ids[heard->num_tokens] = event->token_id;
        }
        heard->num_tokens++;
    } else {
        heard->num_ends++;
    }
    return true;
}

struct user {
    struct imbrex_model *model;
    struct imbrex_engine *engine;
    int32_t user_idx, num_bad;
};

/* Every thread waits, polls or leaves early, in turns; all ask for the same story. */
static void *use_engine(void *arg)
{
    struct user *user = arg;
    static const int32_t bos = BOS;
    for (int32_t round = 0; round < NUM_ROUNDS; round++) {
        struct imbrex_request_options options = imbrex_request_options_default(user->model);
        struct imbrex_request *request;
        struct heard heard = {0};
        int32_t kind = (user->user_idx + round) % 3;
        options.prompt_ids = &bos;
        options.num_prompt_ids = 1;
        options.max_tokens = NUM_TOKENS;
        if (kind != 1) {
            options.callback = hear;
            options.user = &heard;
        }
        if (imbrex_request_submit(user->engine, &options, &request, NULL) != IMBREX_STATUS_OK) {
            user->num_bad++;
            continue;
        }
        if (kind == 0) {
            user->num_bad += imbrex_request_wait(request, NULL) != IMBREX_STATUS_OK;
        }
        for (bool has_event = kind == 1; has_event;) {
            struct imbrex_token_event event;
            user->num_bad +=
                imbrex_request_poll(request, -1, &has_event, &event, NULL) != IMBREX_STATUS_OK;
            if (has_event) {
                hear(&heard, &event);
            }
        }
        imbrex_request_destroy(request);
        user->num_bad += heard.num_ends != 1;
        if (kind != 2) {
            user->num_bad += heard.num_tokens != NUM_TOKENS ||
                             memcmp(heard.token_ids, story, sizeof(story)) != 0;
        }
    }
    return NULL;
}

static void use_from_threads(struct imbrex_model *model, struct imbrex_engine *const *engines,
                             int32_t num_engines)
{
    pthread_t threads[NUM_THREADS];
    struct user users[NUM_THREADS];
    for (int32_t i = 0; i < NUM_THREADS; i++) {
        users[i] = (struct user){model, engines[i % num_engines], i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, use_engine, &users[i]), 0);
    }
    for (int32_t i = 0; i < NUM_THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(users[i].num_bad, 0);
    }
    for (int32_t i = 0; i < num_engines; i++) {
        struct imbrex_engine_metrics metrics;
        imbrex_engine_read_metrics(engines[i], &metrics);
        assert_int_equal(metrics.num_submitted, NUM_THREADS * NUM_ROUNDS / num_engines);
        assert_int_equal(metrics.kv_num_free, metrics.kv_num_blocks);
    }
}

/* Catches: a race between submitters and the engine's thread, a wake-up that is lost (the test
 * would hang), a request freed while it is in use. Under TSan above all. */
static void test_own_thread(void **state)
{
    struct imbrex_engine *engine = create_engine(*state, 1, 0);
    struct imbrex_error err;
    assert_int_equal(imbrex_engine_start(engine, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_engine_start(engine, &err), IMBREX_STATUS_INVALID_ARGUMENT);
    use_from_threads(*state, &engine, 1);
    imbrex_engine_stop(engine);
    imbrex_engine_stop(engine);
    /* Without its thread it runs on those that wait. */
    struct user user = {*state, engine, 0, 0};
    use_engine(&user);
    assert_int_equal(user.num_bad, 0);
    imbrex_engine_destroy(engine);
}

/* Catches: waiters that do not take over when the one that ran the engine leaves. */
static void test_waiters_run_it(void **state)
{
    struct imbrex_engine *engine = create_engine(*state, 2, 0);
    use_from_threads(*state, &engine, 1);
    imbrex_engine_destroy(engine);
}

static void *toggle(void *arg)
{
    struct imbrex_engine *engine = arg;
    for (int32_t round = 0; round < 4 * NUM_ROUNDS; round++) {
        enum imbrex_status status = imbrex_engine_start(engine, NULL);
        if (status != IMBREX_STATUS_OK && status != IMBREX_STATUS_INVALID_ARGUMENT) {
            return engine;
        }
        imbrex_engine_stop(engine);
    }
    return NULL;
}

/* Catches: a start that waits for a thread which another start has made, a stop whose thread a
 * start overwrites (the test would hang), requests that are lost between two threads. */
static void test_start_and_stop_from_threads(void **state)
{
    struct imbrex_engine *engine = create_engine(*state, 1, 0);
    pthread_t threads[4];
    for (int32_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, toggle, engine), 0);
    }
    use_from_threads(*state, &engine, 1);
    for (int32_t i = 0; i < 4; i++) {
        void *result;
        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_null(result);
    }
    imbrex_engine_destroy(engine);
}

struct inside {
    struct imbrex_engine *engine;
    struct imbrex_request *request;
};

static bool wait_inside(void *user, const struct imbrex_token_event *event)
{
    struct inside *inside = user;
    const int32_t ids[] = {BOS, 403};
    double nll;
    (void)event;
    imbrex_engine_stop(inside->engine);
    assert_int_equal(imbrex_engine_start(inside->engine, NULL), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(imbrex_request_wait(inside->request, NULL), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(imbrex_engine_score(inside->engine, ids, 2, &nll, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    return true;
}

/* Catches: a callback that waits for the thread it stands on. */
static void test_waiting_in_a_callback(void **state)
{
    static const int32_t bos = BOS;
    for (int32_t has_thread = 0; has_thread < 2; has_thread++) {
        struct inside inside = {.engine = create_engine(*state, 1, 0)};
        struct imbrex_request_options options = imbrex_request_options_default(*state);
        options.prompt_ids = &bos;
        options.num_prompt_ids = 1;
        options.max_tokens = 3;
        options.callback = wait_inside;
        options.user = &inside;
        assert_int_equal(imbrex_request_submit(inside.engine, &options, &inside.request, NULL),
                         IMBREX_STATUS_OK);
        if (has_thread == 1) {
            assert_int_equal(imbrex_engine_start(inside.engine, NULL), IMBREX_STATUS_OK);
        }
        assert_int_equal(imbrex_request_wait(inside.request, NULL), IMBREX_STATUS_OK);
        imbrex_request_destroy(inside.request);
        imbrex_engine_destroy(inside.engine);
    }
}

/* Catches: metrics that are written after the last event has been handed out. Under TSan above all.
 */
static void test_metrics_after_the_last_event(void **state)
{
    static const int32_t bos = BOS;
    struct imbrex_engine *engine = create_engine(*state, 1, 0);
    assert_int_equal(imbrex_engine_start(engine, NULL), IMBREX_STATUS_OK);
    for (int32_t round = 0; round < 20 * NUM_ROUNDS; round++) {
        struct imbrex_request_options options = imbrex_request_options_default(*state);
        struct imbrex_request *request;
        struct imbrex_request_metrics metrics;
        struct imbrex_token_event event = {0};
        options.prompt_ids = &bos;
        options.num_prompt_ids = 1;
        options.max_tokens = 2;
        assert_int_equal(imbrex_request_submit(engine, &options, &request, NULL), IMBREX_STATUS_OK);
        while (!event.is_last) {
            bool has_event;
            assert_int_equal(imbrex_request_poll(request, 0, &has_event, &event, NULL),
                             IMBREX_STATUS_OK);
            event.is_last = has_event && event.is_last;
        }
        imbrex_request_read_metrics(request, &metrics);
        assert_true(metrics.queue_ns >= 0 && metrics.prefill_ns > 0 && metrics.decode_ns > 0);
        assert_int_equal(metrics.finish_reason, IMBREX_FINISH_REASON_LENGTH);
        imbrex_request_destroy(request);
    }
    imbrex_engine_destroy(engine);
}

/* Catches: state that two engines of a model share. */
static void test_two_engines(void **state)
{
    struct imbrex_engine *engines[] = {create_engine(*state, 2, 0), create_engine(*state, 1, 0)};
    assert_int_equal(imbrex_engine_start(engines[0], NULL), IMBREX_STATUS_OK);
    use_from_threads(*state, engines, 2);
    imbrex_engine_destroy(engines[0]);
    imbrex_engine_destroy(engines[1]);
}

/* Catches: memory, threads or mappings that an engine leaves behind (address space or the sanitizer
 * would run out), also with requests that never ran. */
static void test_open_and_close(void **state)
{
    for (int32_t i = 0; i < NUM_OPENS; i++) {
        struct imbrex_model *model;
        struct imbrex_engine *engine;
        struct imbrex_request *request;
        struct imbrex_engine_options engine_options = imbrex_engine_options_default();
        static const int32_t bos = BOS;
        (void)state;
        engine_options.num_threads = 1 + i % 2;
        assert_int_equal(imbrex_model_open(NULL, NULL, &model, NULL), IMBREX_STATUS_OK);
        assert_int_equal(imbrex_engine_create(model, &engine_options, &engine, NULL),
                         IMBREX_STATUS_OK);
        struct imbrex_request_options options = imbrex_request_options_default(model);
        options.prompt_ids = &bos;
        options.num_prompt_ids = 1;
        options.max_tokens = 2;
        if (i % 3 == 0) {
            assert_int_equal(imbrex_engine_start(engine, NULL), IMBREX_STATUS_OK);
        }
        assert_int_equal(imbrex_request_submit(engine, &options, &request, NULL), IMBREX_STATUS_OK);
        if (i % 2 == 0) {
            assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
        }
        imbrex_request_destroy(request);
        imbrex_engine_destroy(engine);
        imbrex_model_close(model);
    }
}

int run_engine_threads_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_own_thread),
        cmocka_unit_test(test_waiters_run_it),
        cmocka_unit_test(test_start_and_stop_from_threads),
        cmocka_unit_test(test_waiting_in_a_callback),
        cmocka_unit_test(test_metrics_after_the_last_event),
        cmocka_unit_test(test_two_engines),
        cmocka_unit_test(test_open_and_close),
    };
    return cmocka_run_group_tests_name("engine_threads", tests, set_up, tear_down);
}
