/* SPDX-License-Identifier: Apache-2.0 */
/* Planning and creating an engine, one step of a sequence, scoring. */
#include "engine/engine.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "base/thread_pool.h"

#define DEFAULT_CONTEXT_SIZE 4096
#define DEFAULT_MAX_STEP_TOKENS 128
#define MAX_CONTEXT_SIZE (1 << 24)   /* tokens; int32 slots with room to spare */
#define MAX_STEP_TOKENS (1 << 16)    /* tokens; more only costs memory */
#define MAX_LOGITS_BYTES (64u << 20) /* scoring keeps the logits of as many rows as fit */

struct imbrex_engine_options imbrex_engine_options_default(void)
{
    return (struct imbrex_engine_options){.cpu_features = IMBREX_CPU_ALL};
}

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static enum imbrex_status check_range(const char *field, int32_t value, int32_t max,
                                      struct imbrex_error *err)
{
    if (value < 0 || value > max) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected a number in [0, %d], found %d", field, max, value);
    }
    return IMBREX_STATUS_OK;
}

/* The one statement of what lies in the arena. With arena->base NULL it measures. */
static void take_arena(struct arena *arena, const struct imbrex_model *model,
                       const struct imbrex_memory_plan *plan, struct imbrex_engine *engine)
{
    const struct model_config *config = &model->config;
    size_t step_tokens = (size_t)plan->max_step_tokens;
    size_t row_bytes = (size_t)config->vocab_size * sizeof(float);
    int32_t max_rows = row_bytes >= MAX_LOGITS_BYTES ? 1 : (int32_t)(MAX_LOGITS_BYTES / row_bytes);
    struct step_arrays *step = &engine->step;

    forward_buffers_take(arena, config, plan->max_step_tokens,
                         min_int32(max_rows, plan->max_step_tokens), plan->context_size,
                         &engine->buffers);
    step->token_ids = arena_take(arena, step_tokens, sizeof(int32_t));
    step->positions = arena_take(arena, step_tokens, sizeof(int32_t));
    step->slot_mapping = arena_take(arena, step_tokens, sizeof(int32_t));
    step->seq_idx = arena_take(arena, step_tokens, sizeof(int32_t));
    step->block_table = arena_take(arena, (size_t)plan->kv_num_blocks, sizeof(int32_t));
    sampler_take(arena, config->vocab_size, &engine->sampler);
    size_t token_bytes = ops_scratch_token_bytes(model->weights.max_quantized_columns);
    if (token_bytes > 0) {
        engine->ops_scratch = arena_take(arena, step_tokens, token_bytes);
        engine->ops_scratch_bytes = step_tokens * token_bytes;
    }
}

enum imbrex_status imbrex_engine_plan(const struct imbrex_model *model,
                                      const struct imbrex_engine_options *options,
                                      struct imbrex_memory_plan *plan, struct imbrex_error *err)
{
    const struct model_config *config = &model->config;
    struct imbrex_engine_options defaults = imbrex_engine_options_default();
    if (options == NULL) {
        options = &defaults;
    }
    TRY(check_range("num_threads", options->num_threads, THREAD_POOL_MAX_THREADS, err));
    TRY(check_range("context_size", options->context_size, MAX_CONTEXT_SIZE, err));
    TRY(check_range("max_step_tokens", options->max_step_tokens, MAX_STEP_TOKENS, err));

    struct imbrex_memory_plan planned = {
        .weight_bytes = model->weights.num_bytes,
        .converted_bytes = model->weights.num_converted * sizeof(float),
        .kv_block_size = KV_BLOCK_SIZE,
        .context_size = options->context_size,
        .max_step_tokens = options->max_step_tokens,
        .num_threads = options->num_threads,
        .kernels = ops_kernels_name_for(options->cpu_features),
    };
    if (planned.num_threads == 0) {
        planned.num_threads = thread_pool_num_cpus();
    }
    if (planned.context_size == 0) {
        planned.context_size = min_int32(config->max_position_embeddings, DEFAULT_CONTEXT_SIZE);
    }
    if (planned.max_step_tokens == 0) {
        planned.max_step_tokens = DEFAULT_MAX_STEP_TOKENS;
    }
    planned.max_step_tokens = min_int32(planned.max_step_tokens, planned.context_size);
    planned.kv_num_blocks = (planned.context_size + KV_BLOCK_SIZE - 1) / KV_BLOCK_SIZE;

    struct arena arena = {0};
    struct imbrex_engine measured = {0};
    size_t block_bytes;
    take_arena(&arena, model, &planned, &measured);
    planned.activation_bytes = arena.num_used;
    if (arena.overflowed ||
        !kv_block_bytes(config->num_layers, config->num_kv_heads, config->head_dim, &block_bytes) ||
        !size_mul(block_bytes, (size_t)planned.kv_num_blocks, &planned.kv_bytes)) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "%s: a context of %d tokens needs more memory than can be addressed",
                         model->path, planned.context_size);
    }
    *plan = planned;
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_engine_create(struct imbrex_model *model,
                                        const struct imbrex_engine_options *options,
                                        struct imbrex_engine **engine, struct imbrex_error *err)
{
    const struct model_config *config = &model->config;
    uint32_t cpu_features = options == NULL ? IMBREX_CPU_ALL : options->cpu_features;
    enum imbrex_status status;
    struct imbrex_engine *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the engine", sizeof(*created));
    }
    created->model = model;
    atomic_init(&created->is_busy, false);
    TRY_OR_FAIL(imbrex_engine_plan(model, options, &created->plan, err));
    TRY_OR_FAIL(model_fill(model, err));
    TRY_OR_FAIL(memory_region_map("activations", created->plan.activation_bytes,
                                  &created->arena_region, err));
    struct arena arena = {.base = created->arena_region.base};
    take_arena(&arena, model, &created->plan, created);
    TRY_OR_FAIL(kv_pool_create(config->num_layers, config->num_kv_heads, config->head_dim,
                               created->plan.kv_num_blocks, &created->kv_pool, err));
    TRY_OR_FAIL(ops_create(created->plan.num_threads, cpu_features, created->ops_scratch,
                           created->ops_scratch_bytes, &created->ops, err));
    if (created->plan.context_size > config->max_position_embeddings) {
        log_write(&model->log, IMBREX_LOG_LEVEL_WARNING,
                  "context of %d tokens is longer than the %d that %s was made for: text beyond "
                  "them may degrade",
                  created->plan.context_size, config->max_position_embeddings, model->path);
    }
    *engine = created;
    return IMBREX_STATUS_OK;
fail:
    imbrex_engine_destroy(created);
    return status;
}

void imbrex_engine_destroy(struct imbrex_engine *engine)
{
    if (engine == NULL) {
        return;
    }
    ops_destroy(engine->ops);
    kv_pool_destroy(&engine->kv_pool);
    memory_region_unmap(&engine->arena_region);
    free(engine);
}

void imbrex_engine_memory_plan(const struct imbrex_engine *engine, struct imbrex_memory_plan *plan)
{
    *plan = engine->plan;
}

enum imbrex_status engine_begin(struct imbrex_engine *engine, struct imbrex_error *err)
{
    if (atomic_exchange(&engine->is_busy, true)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "the engine runs another sequence: expected one at a time");
    }
    engine->num_blocks = 0;
    engine->num_tokens = 0;
    return IMBREX_STATUS_OK;
}

void engine_end(struct imbrex_engine *engine)
{
    for (int32_t i = 0; i < engine->num_blocks; i++) {
        kv_pool_release(&engine->kv_pool, engine->step.block_table[i]);
    }
    engine->num_blocks = 0;
    engine->num_tokens = 0;
    atomic_store(&engine->is_busy, false);
}

enum imbrex_status engine_step(struct imbrex_engine *engine, const int32_t *token_ids,
                               int32_t num_tokens, struct imbrex_error *err)
{
    struct step_arrays *step = &engine->step;
    const struct imbrex_model *model = engine->model;
    assert(num_tokens <= engine->plan.max_step_tokens);
    assert(engine->num_tokens + num_tokens <= engine->plan.context_size);

    for (int32_t i = 0; i < num_tokens; i++) {
        int32_t position = engine->num_tokens + i;
        int32_t block = position / KV_BLOCK_SIZE;
        if (block == engine->num_blocks) {
            enum imbrex_status status =
                kv_pool_acquire(&engine->kv_pool, &step->block_table[block]);
            if (status != IMBREX_STATUS_OK) {
                return error_set(err, status,
                                 "KV cache: expected a free block, found all %d in use",
                                 engine->kv_pool.num_blocks);
            }
            engine->num_blocks++;
        }
        step->token_ids[i] = token_ids[i];
        step->positions[i] = position;
        step->slot_mapping[i] = step->block_table[block] * KV_BLOCK_SIZE + position % KV_BLOCK_SIZE;
        step->seq_idx[i] = 0;
    }
    forward_run(&model->config, &model->weights, engine->ops, &engine->kv_pool.view,
                &(struct forward_batch){.token_ids = step->token_ids,
                                        .positions = step->positions,
                                        .slot_mapping = step->slot_mapping,
                                        .seq_idx = step->seq_idx,
                                        .block_tables = step->block_table,
                                        .num_tokens = num_tokens,
                                        .max_blocks = engine->plan.kv_num_blocks},
                &engine->buffers);
    engine->num_tokens += num_tokens;
    return IMBREX_STATUS_OK;
}

enum imbrex_status engine_bad_logits(const struct imbrex_engine *engine, int32_t position,
                                     struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_FORMAT,
                     "%s: the weights give logits that are not finite (position %d)",
                     engine->model->path, position);
}

/* -log softmax(logits)[token_id], in double; NaN if one of the logits is not finite. */
static double negative_log_likelihood(const float *logits, int32_t vocab_size, int32_t token_id)
{
    double max_logit = -INFINITY;
    for (int32_t i = 0; i < vocab_size; i++) {
        if (!isfinite(logits[i])) {
            return NAN;
        }
        max_logit = fmax(max_logit, logits[i]);
    }
    double sum = 0.0;
    for (int32_t i = 0; i < vocab_size; i++) {
        sum += exp(logits[i] - max_logit);
    }
    return max_logit + log(sum) - logits[token_id];
}

static enum imbrex_status score_sequence(struct imbrex_engine *engine, const int32_t *token_ids,
                                         int32_t num_tokens, double *nll, struct imbrex_error *err)
{
    const struct imbrex_model *model = engine->model;
    int32_t vocab_size = model->config.vocab_size;
    int32_t num_inputs = num_tokens - 1; /* the last id is predicted, never read */

    for (int32_t begin = 0; begin < num_inputs; begin += engine->plan.max_step_tokens) {
        int32_t num_step = min_int32(num_inputs - begin, engine->plan.max_step_tokens);
        TRY(engine_step(engine, token_ids + begin, num_step, err));
        for (int32_t row = 0; row < num_step; row += engine->buffers.max_logit_rows) {
            int32_t num_rows = min_int32(num_step - row, engine->buffers.max_logit_rows);
            forward_logits(&model->config, &model->weights, engine->ops, row, num_rows,
                           &engine->buffers);
            for (int32_t i = 0; i < num_rows; i++) {
                int32_t position = begin + row + i;
                const float *logits = engine->buffers.logits + (int64_t)i * vocab_size;
                nll[position] =
                    negative_log_likelihood(logits, vocab_size, token_ids[position + 1]);
                if (!isfinite(nll[position])) {
                    return engine_bad_logits(engine, position, err);
                }
            }
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_engine_score(struct imbrex_engine *engine, const int32_t *token_ids,
                                       int32_t num_tokens, double *nll, struct imbrex_error *err)
{
    if (num_tokens < 2) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "score: expected at least 2 token ids, found %d", num_tokens);
    }
    if (num_tokens > engine->plan.context_size) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "score: expected at most %d token ids (context size), found %d",
                         engine->plan.context_size, num_tokens);
    }
    for (int32_t i = 0; i < num_tokens; i++) {
        if (token_ids[i] < 0 || token_ids[i] >= engine->model->config.vocab_size) {
            return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                             "score: token_ids[%d]: expected an id in [0, %d), found %d", i,
                             engine->model->config.vocab_size, token_ids[i]);
        }
    }
    TRY(engine_begin(engine, err));
    enum imbrex_status status = score_sequence(engine, token_ids, num_tokens, nll, err);
    engine_end(engine);
    return status;
}
