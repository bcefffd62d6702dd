/* SPDX-License-Identifier: Apache-2.0 */
#include "golden.h"

#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

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

bool golden_has_path(int32_t path)
{
    uint32_t features = cpu_paths[path].features;
    return cpu_features_detect(features) == features;
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
    struct imbrex_request *request = NULL;
    struct imbrex_request_options options = imbrex_request_options_default(model);
    struct collected collected = {.token_ids = token_ids};
    options.prompt_ids = prompt_ids;
    options.num_prompt_ids = num_prompt_ids;
    options.max_tokens = max_tokens;
    options.temperature = 0.0f;
    options.ignore_eos = true;
    options.callback = collect;
    options.user = &collected;
    golden_check(imbrex_request_submit(engine, &options, &request, &err), &err);
    golden_check(imbrex_request_wait(request, &err), &err);
    imbrex_request_destroy(request);
    return collected.num_tokens;
}

/* The forward pass alone, as the engine would run it: the last one made is kept, for its logits. */
struct forward_alone {
    struct backend *backend;
    struct memory_region kv_region, region;
    struct forward_buffers buffers;
};

static struct forward_alone kept;

/* Of the path that the engine runs on. */
static uint32_t features_of(const struct imbrex_memory_plan *plan)
{
    for (int path = 0; path < CPU_NUM_PATHS; path++) {
        if (strcmp(plan->kernels, cpu_paths[path].name) == 0) {
            return cpu_paths[path].features;
        }
    }
    fail_msg("the engine's kernels are \"%s\"", plan->kernels);
    return 0;
}

static void take_buffers(struct arena *arena, const struct imbrex_model *model,
                         const struct imbrex_memory_plan *plan, struct forward_alone *alone,
                         void **scratch, size_t *scratch_bytes)
{
    size_t token_bytes = ops_scratch_token_bytes(model->weights.max_quantized_columns) +
                         ops_bf16_token_bytes(features_of(plan), model->weights.max_bf16_columns);
    forward_buffers_take(arena, &model->config,
                         &(struct forward_limits){.max_tokens = plan->max_step_tokens,
                                                  .max_logit_rows = 1,
                                                  .max_positions = plan->context_size,
                                                  .activation_dtype = DTYPE_F32},
                         &alone->buffers);
    *scratch_bytes = (size_t)plan->max_step_tokens * token_bytes;
    *scratch = arena_take(arena, *scratch_bytes, 1);
}

static void forget_forward(void)
{
    backend_destroy(kept.backend);
    memory_region_unmap(&kept.kv_region);
    memory_region_unmap(&kept.region);
    kept = (struct forward_alone){0};
}

const float *golden_logits(struct imbrex_engine *engine, const int32_t *token_ids,
                           int32_t num_tokens)
{
    struct imbrex_error err;
    struct imbrex_model *model = engine->model;
    const struct model_config *config = &model->config;
    struct imbrex_memory_plan plan;
    void *scratch;
    size_t scratch_bytes;
    struct arena arena = {0};

    imbrex_engine_memory_plan(engine, &plan);
    forget_forward();
    take_buffers(&arena, model, &plan, &kept, &scratch, &scratch_bytes);
    golden_check(memory_region_map("activations", arena.num_used, &kept.region, &err), &err);
    arena = (struct arena){.base = kept.region.base};
    take_buffers(&arena, model, &plan, &kept, &scratch, &scratch_bytes);
    golden_check(memory_region_map("the KV cache", plan.kv_bytes, &kept.kv_region, &err), &err);
    golden_check(backend_cpu_create(plan.num_threads, features_of(&plan), scratch, scratch_bytes,
                                    &kept.backend, &err),
                 &err);
    golden_check(model_fill(model, &err), &err);
    struct kv_view kv = {.blocks = kept.kv_region.base,
                         .block_bytes = plan.kv_bytes / (size_t)plan.kv_num_blocks,
                         .num_layers = config->num_layers,
                         .num_kv_heads = config->num_kv_heads,
                         .block_size = plan.kv_block_size,
                         .head_dim = config->head_dim};

    int32_t *positions = malloc((size_t)num_tokens * sizeof(*positions));
    int32_t *zeros = calloc((size_t)num_tokens, sizeof(*zeros));
    int32_t *blocks = malloc((size_t)plan.kv_num_blocks * sizeof(*blocks));
    assert_true(positions != NULL && zeros != NULL && blocks != NULL);
    for (int32_t i = 0; i < num_tokens; i++) {
        positions[i] = i;
    }
    for (int32_t i = 0; i < plan.kv_num_blocks; i++) {
        blocks[i] = i;
    }
    int32_t num_step = 0;
    for (int32_t begin = 0; begin < num_tokens; begin += num_step) {
        num_step =
            num_tokens - begin < plan.max_step_tokens ? num_tokens - begin : plan.max_step_tokens;
        forward_run(config, &model->weights, kept.backend, &kv,
                    &(struct forward_batch){.token_ids = token_ids + begin,
                                            .positions = positions + begin,
                                            .slot_mapping = positions + begin,
                                            .seq_idx = zeros,
                                            .block_tables = blocks,
                                            .num_tokens = num_step,
                                            .max_blocks = plan.kv_num_blocks},
                    &kept.buffers);
    }
    int32_t last = num_step - 1;
    forward_logits(config, &model->weights, kept.backend, &last, 1, &kept.buffers);
    free(positions);
    free(zeros);
    free(blocks);
    return kept.buffers.logits;
}

void golden_expect_bit_equal(struct imbrex_model *model, const int32_t *token_ids,
                             int32_t num_tokens, int32_t num_paths)
{
    static const int32_t thread_counts[] = {1, 2, 5};
    static const int32_t chunks[] = {1, 7, 128};
    size_t row_bytes = (size_t)model->config.vocab_size * sizeof(float);
    float *expected = malloc(row_bytes);
    assert_non_null(expected);
    for (int32_t path = 0; path < num_paths; path++) {
        for (size_t i = 0; i < 3 && golden_has_path(path); i++) {
            struct imbrex_error err;
            struct imbrex_engine *engine = NULL;
            struct imbrex_engine_options options = imbrex_engine_options_default();
            options.cpu_features = cpu_paths[path].features;
            options.num_threads = thread_counts[i];
            options.max_step_tokens = chunks[i];
            golden_check(imbrex_engine_create(model, &options, &engine, &err), &err);
            const float *logits = golden_logits(engine, token_ids, num_tokens);
            if (i == 0) {
                memcpy(expected, logits, row_bytes);
            }
            assert_memory_equal(logits, expected, row_bytes);
            imbrex_engine_destroy(engine);
        }
    }
    free(expected);
}
