/* SPDX-License-Identifier: Apache-2.0 */
/* One prompt and its continuation: prefill in chunks, then one token a step. After creation a run
 * allocates nothing.
 *
 *   prompt ids -> [prefill chunk]* -> logits -> sampler -> id -> detokenizer -> stop strings
 *                                       ^                  |                        |
 *                                       +--- [decode step] +                      event
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/stop_matcher.h"

struct imbrex_generation {
    struct imbrex_engine *engine;
    int32_t *prompt_ids; /* [num_prompt_ids] */
    int32_t num_prompt_ids;
    int32_t max_tokens;     /* 0: no limit but the context */
    int32_t *end_token_ids; /* [num_end_token_ids] beside the model's */
    size_t num_end_token_ids;
    bool ignore_eos;
    bool has_run;
    struct sampler_options sampling;
    struct detokenizer detokenizer; /* unused when the model has no tokenizer */
    struct stop_matcher stop_matcher;
    char *prompt_piece; /* [detokenizer_max_bytes] where the prompt's text goes to be dropped */
    struct imbrex_generation_metrics metrics;
    atomic_bool is_cancelled;
};

#define FINISH_REASON_LIST(X)     \
    X(NONE, "none")               \
    X(EOS, "eos")                 \
    X(STOP_STRING, "stop_string") \
    X(LENGTH, "length")           \
    X(CONTEXT, "context")         \
    X(CANCELLED, "cancelled")     \
    X(ERROR, "error")

const char *imbrex_finish_reason_name(enum imbrex_finish_reason reason)
{
    switch (reason) {
#define FINISH_REASON_CASE(name, text) \
    case IMBREX_FINISH_REASON_##name:  \
        return text;
        FINISH_REASON_LIST(FINISH_REASON_CASE)
#undef FINISH_REASON_CASE
    }
    return "unknown";
}

static enum imbrex_status check_sampling(const struct imbrex_generation_options *options,
                                         struct imbrex_error *err)
{
    /* Written so that NaN fails every one of them. */
    if (!(options->temperature >= 0.0f &&
          options->temperature <= (float)GENERATION_MAX_TEMPERATURE)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "temperature: expected a number in [0, %g], found %g",
                         GENERATION_MAX_TEMPERATURE, options->temperature);
    }
    if (options->top_k < 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "top_k: expected a number >= 0, found %d", options->top_k);
    }
    if (!(options->top_p > 0.0f && options->top_p <= 1.0f)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "top_p: expected a number in (0, 1], found %g", options->top_p);
    }
    if (!(options->min_p >= 0.0f && options->min_p < 1.0f)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "min_p: expected a number in [0, 1), found %g", options->min_p);
    }
    if (!(options->repetition_penalty >= (float)GENERATION_MIN_REPETITION_PENALTY &&
          options->repetition_penalty <= (float)GENERATION_MAX_REPETITION_PENALTY)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "repetition_penalty: expected a number in [%g, %g], found %g",
                         GENERATION_MIN_REPETITION_PENALTY, GENERATION_MAX_REPETITION_PENALTY,
                         options->repetition_penalty);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_prompt(const struct imbrex_engine *engine,
                                       const struct imbrex_generation_options *options,
                                       struct imbrex_error *err)
{
    if (options->num_prompt_ids < 1 || options->prompt_ids == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "prompt: expected at least 1 token id, found %d",
                         options->prompt_ids == NULL ? 0 : options->num_prompt_ids);
    }
    if (options->max_tokens < 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "max_tokens: expected a number >= 0, found %d", options->max_tokens);
    }
    /* One position at least must be left for an answer. */
    if (options->num_prompt_ids >= engine->plan.context_size) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "prompt: expected at most %d tokens (context size %d, 1 left to "
                         "generate), found %d",
                         engine->plan.context_size - 1, engine->plan.context_size,
                         options->num_prompt_ids);
    }
    for (int32_t i = 0; i < options->num_prompt_ids; i++) {
        int32_t token_id = options->prompt_ids[i];
        if (token_id < 0 || token_id >= engine->model->config.vocab_size) {
            return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                             "prompt_ids[%d]: expected an id in [0, %d), found %d", i,
                             engine->model->config.vocab_size, token_id);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status copy_end_tokens(const struct imbrex_generation_options *options,
                                          struct imbrex_generation *generation,
                                          struct imbrex_error *err)
{
    size_t num_bytes;
    if (options->num_end_token_ids == 0) {
        return IMBREX_STATUS_OK;
    }
    if (!size_mul(options->num_end_token_ids, sizeof(int32_t), &num_bytes)) {
        return error_out_of_memory(err, "end tokens", SIZE_MAX);
    }
    generation->end_token_ids = malloc(num_bytes);
    if (generation->end_token_ids == NULL) {
        return error_out_of_memory(err, "end tokens", num_bytes);
    }
    memcpy(generation->end_token_ids, options->end_token_ids, num_bytes);
    generation->num_end_token_ids = options->num_end_token_ids;
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_generation_create(struct imbrex_engine *engine,
                                            const struct imbrex_generation_options *options,
                                            struct imbrex_generation **generation,
                                            struct imbrex_error *err)
{
    const struct imbrex_tokenizer *tokenizer = engine->model->tokenizer;
    size_t max_piece_bytes = tokenizer == NULL ? 1 : detokenizer_max_bytes(tokenizer);
    enum imbrex_status status;

    TRY(check_sampling(options, err));
    TRY(check_prompt(engine, options, err));
    if (tokenizer == NULL && options->num_stop > 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "stop: expected none, since %s has no tokenizer, found %zu",
                         engine->model->path, options->num_stop);
    }

    size_t prompt_bytes = (size_t)options->num_prompt_ids * sizeof(int32_t);
    struct imbrex_generation *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the generation", sizeof(*created));
    }
    created->engine = engine;
    created->num_prompt_ids = options->num_prompt_ids;
    created->max_tokens = options->max_tokens;
    created->ignore_eos = options->ignore_eos;
    created->sampling = (struct sampler_options){.temperature = options->temperature,
                                                 .top_k = options->top_k,
                                                 .top_p = options->top_p,
                                                 .min_p = options->min_p,
                                                 .repetition_penalty = options->repetition_penalty,
                                                 .seed = options->seed};
    created->metrics.num_prompt_tokens = options->num_prompt_ids;
    atomic_init(&created->is_cancelled, false);
    created->prompt_ids = malloc(prompt_bytes);
    created->prompt_piece = malloc(max_piece_bytes);
    if (created->prompt_ids == NULL || created->prompt_piece == NULL) {
        status = error_out_of_memory(err, "the prompt", prompt_bytes);
        goto fail;
    }
    memcpy(created->prompt_ids, options->prompt_ids, prompt_bytes);
    TRY_OR_FAIL(copy_end_tokens(options, created, err));
    /* Twice: the bytes of a token and, at the end, those the detokenizer still held. */
    TRY_OR_FAIL(stop_matcher_create(options->stop, options->num_stop, 2 * max_piece_bytes,
                                    &created->stop_matcher, err));
    if (tokenizer != NULL) {
        detokenizer_init(&created->detokenizer, tokenizer, true);
    }
    *generation = created;
    return IMBREX_STATUS_OK;
fail:
    imbrex_generation_destroy(created);
    return status;
}

void imbrex_generation_destroy(struct imbrex_generation *generation)
{
    if (generation == NULL) {
        return;
    }
    stop_matcher_destroy(&generation->stop_matcher);
    free(generation->prompt_piece);
    free(generation->prompt_ids);
    free(generation->end_token_ids);
    free(generation);
}

void imbrex_generation_cancel(struct imbrex_generation *generation)
{
    atomic_store(&generation->is_cancelled, true);
}

void imbrex_generation_read_metrics(const struct imbrex_generation *generation,
                                    struct imbrex_generation_metrics *metrics)
{
    *metrics = generation->metrics;
}

/* Ids the sampler may pick: those that have both a row of weights and a text. */
static int32_t num_sampled_ids(const struct imbrex_model *model)
{
    return model->tokenizer == NULL ? model->config.vocab_size
                                    : imbrex_tokenizer_vocab_size(model->tokenizer);
}

static bool is_end_token(const struct imbrex_generation *generation, int32_t token_id)
{
    const struct imbrex_model *model = generation->engine->model;
    struct imbrex_model_info description;
    imbrex_model_describe(model, &description);
    for (int32_t i = 0; i < description.num_eos_token_ids; i++) {
        if (description.eos_token_ids[i] == token_id) {
            return true;
        }
    }
    for (size_t i = 0; i < generation->num_end_token_ids; i++) {
        if (generation->end_token_ids[i] == token_id) {
            return true;
        }
    }
    return false;
}

/* The prompt goes through the detokenizer too, its text unused: whether the continuation begins
 * with a space, or inside a character, depends on what came before. */
static void take_prompt(struct imbrex_generation *generation)
{
    struct imbrex_engine *engine = generation->engine;
    sampler_reset(&engine->sampler);
    for (int32_t i = 0; i < generation->num_prompt_ids; i++) {
        int32_t token_id = generation->prompt_ids[i];
        sampler_note(&engine->sampler, token_id);
        if (engine->model->tokenizer != NULL && token_id < num_sampled_ids(engine->model)) {
            detokenizer_push(&generation->detokenizer, token_id, generation->prompt_piece);
        }
    }
}

/* Leaves the logits of the prompt's last token, unless cancelled. */
static enum imbrex_status prefill(struct imbrex_generation *generation, struct imbrex_error *err)
{
    struct imbrex_engine *engine = generation->engine;
    int32_t num_step = 0;
    for (int32_t begin = 0; begin < generation->num_prompt_ids; begin += num_step) {
        if (atomic_load(&generation->is_cancelled)) {
            return IMBREX_STATUS_OK;
        }
        num_step = generation->num_prompt_ids - begin;
        if (num_step > engine->plan.max_step_tokens) {
            num_step = engine->plan.max_step_tokens;
        }
        TRY(engine_step(engine, generation->prompt_ids + begin, num_step, err));
    }
    forward_logits(&engine->model->config, &engine->model->weights, engine->ops, num_step - 1, 1,
                   &engine->buffers);
    return IMBREX_STATUS_OK;
}

/* Gives the callback one token with the text it releases. Returns why the generation ends here, or
 * NONE. */
static enum imbrex_finish_reason emit_token(struct imbrex_generation *generation, int32_t token_id,
                                            imbrex_token_fn *callback, void *user)
{
    struct stop_matcher *matcher = &generation->stop_matcher;
    size_t num_ready = 0;
    bool is_stopped = false;
    if (generation->engine->model->tokenizer != NULL) {
        size_t num_bytes =
            detokenizer_push(&generation->detokenizer, token_id, stop_matcher_piece(matcher));
        is_stopped = stop_matcher_push(matcher, num_bytes, false, &num_ready);
    }
    struct imbrex_token_event event = {
        .token_id = token_id, .text = matcher->text, .text_bytes = num_ready};
    bool goes_on = callback == NULL || callback(user, &event);
    stop_matcher_drop(matcher, num_ready);
    if (is_stopped) {
        return IMBREX_FINISH_REASON_STOP_STRING;
    }
    return goes_on ? IMBREX_FINISH_REASON_NONE : IMBREX_FINISH_REASON_CANCELLED;
}

/* Gives the callback the end, with the text that was held back, unless a stop string begins it. */
static void emit_end(struct imbrex_generation *generation, imbrex_token_fn *callback, void *user)
{
    struct stop_matcher *matcher = &generation->stop_matcher;
    enum imbrex_finish_reason reason = generation->metrics.finish_reason;
    size_t num_ready = 0;
    if (generation->engine->model->tokenizer != NULL &&
        reason != IMBREX_FINISH_REASON_STOP_STRING) {
        size_t num_bytes = detokenizer_flush(&generation->detokenizer, stop_matcher_piece(matcher));
        if (stop_matcher_push(matcher, num_bytes, true, &num_ready)) {
            generation->metrics.finish_reason = IMBREX_FINISH_REASON_STOP_STRING;
        }
    }
    if (callback != NULL) {
        struct imbrex_token_event event = {.token_id = -1,
                                           .text = matcher->text,
                                           .text_bytes = num_ready,
                                           .finish_reason = generation->metrics.finish_reason};
        callback(user, &event);
    }
}

/* Samples and steps until something ends it; sets the finish reason. */
static enum imbrex_status decode(struct imbrex_generation *generation, int64_t start_ns,
                                 imbrex_token_fn *callback, void *user, struct imbrex_error *err)
{
    struct imbrex_engine *engine = generation->engine;
    const struct imbrex_model *model = engine->model;
    struct imbrex_generation_metrics *metrics = &generation->metrics;
    int32_t num_ids = num_sampled_ids(model);

    while (!atomic_load(&generation->is_cancelled)) {
        int32_t token_id;
        if (!sampler_pick(&engine->sampler, &generation->sampling, engine->buffers.logits, num_ids,
                          engine->num_tokens, &token_id)) {
            return engine_bad_logits(engine, engine->num_tokens - 1, err);
        }
        sampler_note(&engine->sampler, token_id);
        metrics->num_generated_tokens++;
        if (metrics->num_generated_tokens == 1) {
            metrics->ttft_ns = clock_now_ns() - start_ns;
        }
        metrics->finish_reason = emit_token(generation, token_id, callback, user);
        if (metrics->finish_reason != IMBREX_FINISH_REASON_NONE) {
            return IMBREX_STATUS_OK;
        }
        if (!generation->ignore_eos && is_end_token(generation, token_id)) {
            metrics->finish_reason = IMBREX_FINISH_REASON_EOS;
            return IMBREX_STATUS_OK;
        }
        if (metrics->num_generated_tokens == generation->max_tokens) {
            metrics->finish_reason = IMBREX_FINISH_REASON_LENGTH;
            return IMBREX_STATUS_OK;
        }
        if (engine->num_tokens + 1 >= engine->plan.context_size) {
            metrics->finish_reason = IMBREX_FINISH_REASON_CONTEXT;
            return IMBREX_STATUS_OK;
        }
        TRY(engine_step(engine, &token_id, 1, err));
        forward_logits(&model->config, &model->weights, engine->ops, 0, 1, &engine->buffers);
    }
    metrics->finish_reason = IMBREX_FINISH_REASON_CANCELLED;
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_generation_run(struct imbrex_generation *generation,
                                         imbrex_token_fn *callback, void *user,
                                         struct imbrex_error *err)
{
    struct imbrex_generation_metrics *metrics = &generation->metrics;
    if (generation->has_run) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "the generation has run already: expected a new one");
    }
    TRY(engine_begin(generation->engine, err));
    generation->has_run = true;
    int64_t start_ns = clock_now_ns();
    take_prompt(generation);
    enum imbrex_status status = prefill(generation, err);
    int64_t prefilled_ns = clock_now_ns();
    metrics->prefill_ns = prefilled_ns - start_ns;
    if (status == IMBREX_STATUS_OK) {
        status = decode(generation, start_ns, callback, user, err);
    }
    metrics->decode_ns = clock_now_ns() - prefilled_ns;
    if (status != IMBREX_STATUS_OK) {
        metrics->finish_reason = IMBREX_FINISH_REASON_ERROR;
    }
    emit_end(generation, callback, user);
    engine_end(generation->engine);
    return status;
}
