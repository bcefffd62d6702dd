/* SPDX-License-Identifier: Apache-2.0 */
/* Engines whose keys and values are kept in each type: the same bits alone and among others, and
 * through RAM and a disk, and no block of one type in an engine of another. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "ops/fake/device_fake.h"
#include "tests/base/fixture.h"
#include "tests/engine/request_cases.h"

#define FOLDER TEST_BUILD_DIR "/tests/kv-dtype"
#define NUM_CASES (TEST_SANITIZED ? 6 : 24)
#define CONTEXT_SIZE 352
#define DISK_BYTES ((size_t)256 << 20)

struct fixture {
    struct imbrex_model *model;
    char warning[512]; /* the last one */
};

static void note_log(void *user, enum imbrex_log_level level, const char *message)
{
    struct fixture *fixture = user;
    if (level == IMBREX_LOG_LEVEL_WARNING) {
        (void)snprintf(fixture->warning, sizeof(fixture->warning), "%s", message);
    }
}

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    if (fixture == NULL) {
        return 1;
    }
    const struct imbrex_model_options options = {.log = note_log, .log_user = fixture};
    *state = fixture;
    return imbrex_model_open(NULL, &options, &fixture->model, NULL) == IMBREX_STATUS_OK ? 0 : 1;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    imbrex_model_close(fixture->model);
    free(fixture);
    return 0;
}

struct setting {
    enum imbrex_kv_dtype kv_dtype;
    int32_t num_contexts, max_step_tokens;
    uint32_t cpu_features;
    bool has_disk;
};

static struct imbrex_engine *create_engine(const struct fixture *fixture,
                                           const struct setting *setting, struct device *device)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = setting->num_contexts * CONTEXT_SIZE;
    options.max_running = 8;
    options.max_step_tokens = setting->max_step_tokens;
    options.num_threads = 2;
    options.kv_dtype = setting->kv_dtype;
    options.cpu_features = setting->cpu_features;
    options.kv_disk_path = setting->has_disk ? FOLDER : NULL;
    options.kv_disk_bytes = setting->has_disk ? DISK_BYTES : 0;
    return request_cases_engine(fixture->model, &options, device);
}

/* Catches: a token whose stored bits depend on the tokens beside it, on how its prompt is cut, on
 * the block it is in, or on a copy of a block down and up that leaves its scales behind. */
static void test_mixed(void **state)
{
    const struct fixture *fixture = *state;
    for (int dtype = IMBREX_KV_DTYPE_FP32; dtype <= IMBREX_KV_DTYPE_FP8; dtype++) {
        struct request_case cases[NUM_CASES];
        struct imbrex_engine_metrics metrics;
        struct device *device;
        struct setting setting = {.kv_dtype = (enum imbrex_kv_dtype)dtype,
                                  .num_contexts = 4,
                                  .max_step_tokens = 128,
                                  .cpu_features = IMBREX_CPU_ALL};
        struct imbrex_engine *engine = create_engine(fixture, &setting, NULL);
        request_cases_begin_alike(cases, NUM_CASES, fixture->model, engine, 11);
        imbrex_engine_destroy(engine);

        setting.max_step_tokens = 40;
        engine = create_engine(fixture, &setting, NULL);
        (void)request_cases_run(cases, NUM_CASES, engine, NULL);
        imbrex_engine_destroy(engine);

        fixture_empty_folder(FOLDER);
        setting.has_disk = true;
        setting.num_contexts = 2;
        for (int round = 0; round < 2; round++) {
            assert_int_equal(device_fake_create((uint64_t)round + 1, &device, NULL),
                             IMBREX_STATUS_OK);
            engine = create_engine(fixture, &setting, device);
            (void)request_cases_run(cases, NUM_CASES, engine, NULL);
            imbrex_engine_read_metrics(engine, &metrics);
            assert_int_equal(metrics.num_kv_faults, 0);
            imbrex_engine_destroy(engine);
            device_destroy(device);
        }
        assert_true(metrics.num_disk_tokens > 0);
        request_cases_deinit(cases, NUM_CASES);
    }
    fixture_empty_folder(FOLDER);
}

struct text {
    int32_t token_ids[16];
    int32_t num_tokens;
};

static bool append_token(void *user, const struct imbrex_token_event *event)
{
    struct text *text = user;
    if (event->token_id >= 0) {
        assert_true(text->num_tokens < 16);
        text->token_ids[text->num_tokens++] = event->token_id;
    }
    return true;
}

/* The first tokens behind a prompt of 100; returns how many of those the KV folder had. */
static int32_t generate(struct imbrex_engine *engine, struct text *text)
{
    int32_t ids[100];
    struct imbrex_request_options options = imbrex_request_options_default(engine->model);
    struct imbrex_request *request;
    struct imbrex_request_metrics metrics;
    for (int32_t i = 0; i < 100; i++) {
        ids[i] = 3 + 7 * i % 450;
    }
    *text = (struct text){.num_tokens = 0};
    options.prompt_ids = ids;
    options.num_prompt_ids = 100;
    options.max_tokens = 8;
    options.ignore_eos = true;
    options.temperature = 0.0f;
    options.callback = append_token;
    options.user = text;
    assert_int_equal(imbrex_request_submit(engine, &options, &request, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
    imbrex_request_read_metrics(request, &metrics);
    imbrex_request_destroy(request);
    assert_int_equal(text->num_tokens, 8);
    return metrics.num_disk_tokens;
}

/* Catches: a block of one type that is taken for another's although the tokens are the same, one
 * that its own type does not find again, and a folder of which nobody says that it is of no use. */
static void test_folder(void **state)
{
    struct fixture *fixture = *state;
    enum { NUM_DTYPES = IMBREX_KV_DTYPE_FP8 };
    struct text first[NUM_DTYPES], again;
    fixture_empty_folder(FOLDER);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < NUM_DTYPES; i++) {
            const struct setting setting = {.kv_dtype = (enum imbrex_kv_dtype)(i + 1),
                                            .num_contexts = 1,
                                            .cpu_features = IMBREX_CPU_ALL,
                                            .has_disk = true};
            fixture->warning[0] = '\0';
            struct imbrex_engine *engine = create_engine(fixture, &setting, NULL);
            /* Not where its own are there too: those share a folder. */
            bool is_of_no_use = round == 0 && i > 0;
            assert_int_equal(strstr(fixture->warning, "blocks of another model, KV type") != NULL,
                             is_of_no_use);
            assert_int_equal(generate(engine, round == 0 ? &first[i] : &again),
                             round == 0 ? 0 : 96);
            imbrex_engine_destroy(engine);
            if (round == 1) {
                assert_memory_equal(&first[i], &again, sizeof(again));
            }
        }
    }
    fixture_empty_folder(FOLDER);
}

/* Catches: a size that does not follow the type, a type that is not told or not refused, and one
 * that AUTO is not. */
static void test_plan(void **state)
{
    const struct fixture *fixture = *state;
    static const char *const names[] = {"fp32", "fp32", "fp16", "bf16", "int8", "fp8"};
    /* 5 layers, K and V, 4 heads of 8: one group of them each. */
    static const size_t token_bytes[] = {1280, 1280, 640, 640, 400, 400};
    struct imbrex_engine_options options = imbrex_engine_options_default();
    struct imbrex_memory_plan plan;
    struct imbrex_error err;
    for (int dtype = 0; dtype <= IMBREX_KV_DTYPE_FP8; dtype++) {
        options.kv_dtype = (enum imbrex_kv_dtype)dtype;
        assert_int_equal(imbrex_engine_plan(fixture->model, &options, &plan, &err),
                         IMBREX_STATUS_OK);
        assert_string_equal(plan.kv_dtype, names[dtype]);
        assert_int_equal(plan.kv_token_bytes, token_bytes[dtype]);
        size_t block_bytes = (token_bytes[dtype] * KV_BLOCK_SIZE + 4095) / 4096 * 4096;
        assert_int_equal(plan.kv_bytes, (size_t)plan.kv_num_blocks * block_bytes);
    }
    options.kv_dtype = (enum imbrex_kv_dtype)(IMBREX_KV_DTYPE_FP8 + 1);
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &plan, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_dtype: expected"));
    options.kv_dtype = IMBREX_KV_DTYPE_FP16;
    options.device = "cuda";
    assert_int_equal(imbrex_engine_plan(fixture->model, &options, &plan, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "kv_dtype: expected bf16"));
    assert_non_null(strstr(err.message, "found fp16"));
}

int run_engine_kv_dtype_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_plan),
    };
    return cmocka_run_group_tests_name("engine_kv_dtype", tests, set_up, tear_down);
}
