/* SPDX-License-Identifier: Apache-2.0 */
#include "golden.h"

#include <stdlib.h>

#include "engine/engine.h"

const uint32_t golden_paths[GOLDEN_NUM_PATHS] = {0, IMBREX_CPU_AVX2};

void golden_check(enum imbrex_status status, const struct imbrex_error *err)
{
    if (status != IMBREX_STATUS_OK) {
        fail_msg("%s: %s", imbrex_status_name(status), err->message);
    }
}

json_t *golden_read_json(const char *path)
{
    json_error_t json_error;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &json_error);
    if (root == NULL) {
        fail_msg("%s:%d: %s", path, json_error.line, json_error.text);
    }
    return root;
}

int32_t *golden_ids(const json_t *array, int32_t *num_ids)
{
    assert_true(json_is_array(array));
    size_t count = json_array_size(array);
    int32_t *ids = malloc((count + 1) * sizeof(*ids));
    assert_non_null(ids);
    for (size_t i = 0; i < count; i++) {
        assert_true(json_is_integer(json_array_get(array, i)));
        ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    }
    *num_ids = (int32_t)count;
    return ids;
}

struct imbrex_model *golden_open(const char *path)
{
    struct imbrex_error err;
    struct imbrex_model *model = NULL;
    golden_check(imbrex_model_open(path, NULL, &model, &err), &err);
    return model;
}

struct imbrex_engine *golden_engine(struct imbrex_model *model, uint32_t cpu_features,
                                    int32_t num_threads)
{
    struct imbrex_error err;
    struct imbrex_engine *engine = NULL;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.cpu_features = cpu_features;
    options.num_threads = num_threads;
    golden_check(imbrex_engine_create(model, &options, &engine, &err), &err);
    return engine;
}

struct collected {
    int32_t *token_ids;
    int32_t num_tokens;
};

static bool collect(void *user, const struct imbrex_token_event *event)
{
    struct collected *collected = user;
    if (event->finish_reason == IMBREX_FINISH_REASON_NONE) {
        collected->token_ids[collected->num_tokens++] = event->token_id;
    }
    return true;
}

int32_t golden_greedy(struct imbrex_engine *engine, struct imbrex_model *model,
                      const int32_t *prompt_ids, int32_t num_prompt_ids, int32_t max_tokens,
                      int32_t *token_ids)
{
    struct imbrex_error err;
    struct imbrex_generation *generation = NULL;
    struct imbrex_generation_options options = imbrex_generation_options_default(model);
    struct collected collected = {.token_ids = token_ids};
    options.prompt_ids = prompt_ids;
    options.num_prompt_ids = num_prompt_ids;
    options.max_tokens = max_tokens;
    options.temperature = 0.0f;
    options.ignore_eos = true;
    golden_check(imbrex_generation_create(engine, &options, &generation, &err), &err);
    golden_check(imbrex_generation_run(generation, collect, &collected, &err), &err);
    imbrex_generation_destroy(generation);
    return collected.num_tokens;
}

const float *golden_logits(struct imbrex_engine *engine, const int32_t *token_ids,
                           int32_t num_tokens)
{
    struct imbrex_error err;
    golden_check(engine_begin(engine, &err), &err);
    int32_t num_step = 0;
    for (int32_t begin = 0; begin < num_tokens; begin += num_step) {
        num_step = num_tokens - begin;
        if (num_step > engine->plan.max_step_tokens) {
            num_step = engine->plan.max_step_tokens;
        }
        golden_check(engine_step(engine, token_ids + begin, num_step, &err), &err);
    }
    forward_logits(&engine->model->config, &engine->model->weights, engine->ops, num_step - 1, 1,
                   &engine->buffers);
    engine_end(engine);
    return engine->buffers.logits;
}
