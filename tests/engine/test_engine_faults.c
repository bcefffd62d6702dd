/* SPDX-License-Identifier: Apache-2.0 */
/* An engine on a device that fails: what fails takes its own requests with it and nothing else. */
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "ops/fake/device_fake.h"
#include "tests/test.h"

#define BOS 1
#define NUM_TOKENS 8
#define NUM_REQUESTS 6

static const int32_t story[NUM_TOKENS] = {403, 407, 261, 378, 432, 383, 286, 261};

struct heard {
    int32_t token_ids[NUM_TOKENS];
    int32_t num_tokens, num_ends;
    enum imbrex_finish_reason reason;
};

static bool hear(void *user, const struct imbrex_token_event *event)
{
    struct heard *heard = user;
    if (event->finish_reason == IMBREX_FINISH_REASON_NONE) {
        assert_true(heard->num_tokens < NUM_TOKENS);
        heard->token_ids[heard->num_tokens++] = event->token_id;
    } else {
        heard->num_ends++;
        heard->reason = event->finish_reason;
    }
    return true;
}

struct fixture {
    struct imbrex_model *model;
    struct device *device;
    struct imbrex_engine *engine;
};

static struct fixture open_fixture(uint64_t seed)
{
    struct fixture fixture;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = 64;
    options.kv_cache_tokens = 256;
    options.num_threads = 1;
    assert_int_equal(device_fake_create(seed, &fixture.device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_model_open(NULL, NULL, &fixture.model, NULL), IMBREX_STATUS_OK);
    assert_int_equal(
        engine_create_on(fixture.model, &options, fixture.device, &fixture.engine, NULL),
        IMBREX_STATUS_OK);
    return fixture;
}

static void close_fixture(struct fixture *fixture)
{
    imbrex_engine_destroy(fixture->engine);
    imbrex_model_close(fixture->model);
    device_destroy(fixture->device);
}

static struct imbrex_request *submit(const struct fixture *fixture, struct heard *heard)
{
    static const int32_t bos = BOS;
    struct imbrex_request *request;
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    options.prompt_ids = &bos;
    options.num_prompt_ids = 1;
    options.max_tokens = NUM_TOKENS;
    options.callback = hear;
    options.user = heard;
    assert_int_equal(imbrex_request_submit(fixture->engine, &options, &request, NULL),
                     IMBREX_STATUS_OK);
    return request;
}

static void check_all_free(const struct fixture *fixture)
{
    assert_true(scheduler_is_idle(&fixture->engine->scheduler));
    assert_true(scheduler_check(&fixture->engine->scheduler));
    assert_int_equal(kv_pool_num_available(&fixture->engine->kv_pool),
                     fixture->engine->kv_pool.num_blocks);
}

/* Catches: a token that is wrong after a failure, a request that never ends, blocks that a failed
 * step keeps, an engine that does not go on. Each kind of fault at each of its first places, while
 * requests come in one by one. */
static void test_passing_faults(void **state)
{
    (void)state;
    for (int32_t kind = 0; kind < DEVICE_FAKE_FAULT_COUNT; kind++) {
        for (int64_t countdown = 1; countdown <= NUM_TOKENS; countdown++) {
            struct fixture fixture = open_fixture((uint64_t)countdown);
            struct heard heard[NUM_REQUESTS] = {{.num_tokens = 0}}, after = {.num_tokens = 0};
            struct imbrex_request *requests[NUM_REQUESTS];
            int32_t num_failed = 0;
            bool has_work;
            device_fake_fail(fixture.device, (enum device_fake_fault)kind, countdown,
                             IMBREX_STATUS_OUT_OF_MEMORY);
            for (int32_t i = 0; i < NUM_REQUESTS; i++) {
                requests[i] = submit(&fixture, &heard[i]);
                assert_int_equal(imbrex_engine_step(fixture.engine, &has_work, NULL),
                                 IMBREX_STATUS_OK);
            }
            for (int32_t i = 0; i < NUM_REQUESTS; i++) {
                struct imbrex_error err;
                enum imbrex_status status = imbrex_request_wait(requests[i], &err);
                assert_int_equal(heard[i].num_ends, 1);
                assert_memory_equal(heard[i].token_ids, story,
                                    (size_t)heard[i].num_tokens * sizeof(int32_t));
                if (status == IMBREX_STATUS_OK) {
                    assert_int_equal(heard[i].num_tokens, NUM_TOKENS);
                } else {
                    assert_int_equal(status, IMBREX_STATUS_OUT_OF_MEMORY);
                    assert_int_equal(heard[i].reason, IMBREX_FINISH_REASON_ERROR);
                    assert_non_null(strstr(err.message, "fake device"));
                    num_failed++;
                }
                imbrex_request_destroy(requests[i]);
            }
            assert_true(num_failed > 0);
            check_all_free(&fixture);
            struct imbrex_request *request = submit(&fixture, &after);
            assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
            assert_memory_equal(after.token_ids, story, sizeof(story));
            imbrex_request_destroy(request);
            close_fixture(&fixture);
        }
    }
}

/* Catches: an engine on a dead device that goes on, hangs, or takes requests it can never serve. */
static void test_sticky_faults(void **state)
{
    (void)state;
    for (int32_t kind = 0; kind < DEVICE_FAKE_FAULT_COUNT; kind++) {
        for (int64_t countdown = 1; countdown < NUM_TOKENS; countdown++) {
            struct fixture fixture = open_fixture((uint64_t)countdown);
            struct heard heard[NUM_REQUESTS] = {{.num_tokens = 0}};
            struct imbrex_request *requests[NUM_REQUESTS], *refused = NULL;
            struct imbrex_error err;
            bool has_work;
            device_fake_fail(fixture.device, (enum device_fake_fault)kind, countdown,
                             IMBREX_STATUS_DEVICE);
            for (int32_t i = 0; i < NUM_REQUESTS; i++) {
                requests[i] = submit(&fixture, &heard[i]);
            }
            for (int32_t i = 0; i < NUM_REQUESTS; i++) {
                assert_int_equal(imbrex_request_wait(requests[i], &err), IMBREX_STATUS_DEVICE);
                assert_non_null(strstr(err.message, "takes no more requests"));
                assert_int_equal(heard[i].num_ends, 1);
                assert_memory_equal(heard[i].token_ids, story,
                                    (size_t)heard[i].num_tokens * sizeof(int32_t));
            }
            check_all_free(&fixture);
            struct imbrex_request_options options = imbrex_request_options_default(fixture.model);
            options.prompt_ids = story;
            options.num_prompt_ids = 1;
            assert_int_equal(imbrex_request_submit(fixture.engine, &options, &refused, &err),
                             IMBREX_STATUS_DEVICE);
            assert_null(refused);
            assert_int_equal(imbrex_engine_step(fixture.engine, &has_work, &err),
                             IMBREX_STATUS_DEVICE);
            assert_false(has_work);
            for (int32_t i = 0; i < NUM_REQUESTS; i++) {
                imbrex_request_destroy(requests[i]);
            }
            close_fixture(&fixture);
        }
    }
}

int run_engine_faults_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_passing_faults),
        cmocka_unit_test(test_sticky_faults),
    };
    return cmocka_run_group_tests_name("engine_faults", tests, NULL, NULL);
}
