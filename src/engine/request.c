/* SPDX-License-Identifier: Apache-2.0 */
/* How a request comes into being: every option checked and copied, so that nothing after it checks.
 * What becomes of its tokens is in request_output.c. */
#include "engine/request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

#define MAX_SALT_BYTES ((size_t)256)

/* Far more than any logit needs, and far enough from overflow that the repetition penalty cannot
 * make it infinite. */
#define MAX_BIAS 1e30

_Static_assert(CONFIG_MAX_EOS_TOKENS + IMBREX_MAX_END_TOKENS + IMBREX_MAX_LOGIT_BIAS <=
                   BATCH_MAX_BIAS,
               "a sample row has room for the request's biases and all end tokens");

/* ---- options --------------------------------------------------------------------------------- */

/* Written so that NaN fails. */
static enum imbrex_status check_number(const char *field, float value, double min, double max,
                                       struct imbrex_error *err)
{
    if (!(value >= (float)min && value <= (float)max)) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field,
                               ": expected a number in [%g, %g], found %g", min, max,
                               (double)value);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_integer(const char *field, int32_t value, int32_t min, int32_t max,
                                        struct imbrex_error *err)
{
    if (value < min || value > max) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field,
                               ": expected a number in [%d, %d], found %d", min, max, value);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_not_negative(const char *field, int64_t value,
                                             struct imbrex_error *err)
{
    if (value < 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field,
                               ": expected a number >= 0, found %lld", (long long)value);
    }
    return IMBREX_STATUS_OK;
}

/* `unit` is what the array has: "ids". */
static enum imbrex_status check_array(const char *field, const char *unit, const void *elements,
                                      size_t num_elements, size_t max_elements,
                                      struct imbrex_error *err)
{
    if (num_elements > max_elements) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field,
                               ": expected at most %zu %s, found %zu", max_elements, unit,
                               num_elements);
    }
    if (num_elements > 0 && elements == NULL) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field,
                               ": expected %zu %s, found NULL", num_elements, unit);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_sampling(const struct imbrex_request_options *options,
                                         struct imbrex_error *err)
{
    TRY(check_number("temperature", options->temperature, 0.0, GENERATION_MAX_TEMPERATURE, err));
    TRY(check_not_negative("top_k", options->top_k, err));
    if (!(options->top_p > 0.0f && options->top_p <= 1.0f)) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "top_p",
                               ": expected a number in (0, 1], found %g", (double)options->top_p);
    }
    if (!(options->min_p >= 0.0f && options->min_p < 1.0f)) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "min_p",
                               ": expected a number in [0, 1), found %g", (double)options->min_p);
    }
    TRY(check_number("repetition_penalty", options->repetition_penalty,
                     GENERATION_MIN_REPETITION_PENALTY, GENERATION_MAX_REPETITION_PENALTY, err));
    TRY(check_number("frequency_penalty", options->frequency_penalty, -2.0, 2.0, err));
    return check_number("presence_penalty", options->presence_penalty, -2.0, 2.0, err);
}

static enum imbrex_status check_lengths(const struct imbrex_request_options *options,
                                        struct imbrex_error *err)
{
    if (options->max_tokens < 0 && options->max_tokens != IMBREX_NO_TOKENS) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "max_tokens",
                               ": expected a number >= 0, or %d for none, found %d",
                               IMBREX_NO_TOKENS, options->max_tokens);
    }
    TRY(check_not_negative("min_tokens", options->min_tokens, err));
    TRY(check_integer("num_choices", options->num_choices, 1, IMBREX_MAX_CHOICES, err));
    if (options->max_tokens == IMBREX_NO_TOKENS && options->num_choices != 1) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "num_choices",
                               ": expected 1, since max_tokens is %d, found %d", IMBREX_NO_TOKENS,
                               options->num_choices);
    }
    TRY(check_integer("num_logprobs", options->num_logprobs, -1, IMBREX_MAX_LOGPROBS, err));
    return check_integer("num_prompt_logprobs", options->num_prompt_logprobs, -1,
                         IMBREX_MAX_LOGPROBS, err);
}

static enum imbrex_status check_stop(const struct imbrex_model *model,
                                     const struct imbrex_request_options *options,
                                     struct imbrex_error *err)
{
    if (model->tokenizer == NULL && options->num_stop > 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "stop",
                               ": expected none, since %s has no tokenizer, found %zu", model->path,
                               options->num_stop);
    }
    if (options->no_text && options->num_stop > 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "stop",
                               ": expected none, since no_text is set, found %zu",
                               options->num_stop);
    }
    return check_array("stop", "strings", options->stop, options->num_stop, SIZE_MAX, err);
}

static enum imbrex_status check_end_tokens(const struct imbrex_model *model,
                                           const struct imbrex_request_options *options,
                                           struct imbrex_error *err)
{
    TRY(check_array("end_token_ids", "ids", options->end_token_ids, options->num_end_token_ids,
                    IMBREX_MAX_END_TOKENS, err));
    for (size_t i = 0; i < options->num_end_token_ids; i++) {
        int32_t token_id = options->end_token_ids[i];
        if (token_id < 0 || token_id >= model->config.vocab_size) {
            return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "end_token_ids",
                                   "[%zu]: expected an id in [0, %d), found %d", i,
                                   model->config.vocab_size, token_id);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_bias(const struct imbrex_model *model,
                                     const struct imbrex_request_options *options,
                                     struct imbrex_error *err)
{
    TRY(check_array("logit_bias", "entries", options->logit_bias, options->num_logit_bias,
                    IMBREX_MAX_LOGIT_BIAS, err));
    for (size_t i = 0; i < options->num_logit_bias; i++) {
        int32_t token_id = options->logit_bias[i].token_id;
        float bias = options->logit_bias[i].bias;
        if (token_id < 0 || token_id >= model->config.vocab_size) {
            return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "logit_bias",
                                   "[%zu].token_id: expected an id in [0, %d), found %d", i,
                                   model->config.vocab_size, token_id);
        }
        if (!(bias == -INFINITY || (bias >= (float)-MAX_BIAS && bias <= (float)MAX_BIAS))) {
            return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "logit_bias",
                                   "[%zu].bias: expected a number in [%g, %g] or -inf, found "
                                   "%g",
                                   i, -MAX_BIAS, MAX_BIAS, (double)bias);
        }
    }
    return IMBREX_STATUS_OK;
}

/* The key of the scheduler's order is the arrival less this many steps: half of what an int64_t
 * holds is left to the arrival. */
static enum imbrex_status check_priority(const struct request_limits *limits,
                                         const struct imbrex_request_options *options,
                                         struct imbrex_error *err)
{
    int64_t max_priority = IMBREX_MAX_PRIORITY;
    if (limits->priority_step_ns > INT64_MAX / 2 / max_priority) {
        max_priority = INT64_MAX / 2 / limits->priority_step_ns;
    }
    return check_integer("priority", options->priority, (int32_t)-max_priority,
                         (int32_t)max_priority, err);
}

static enum imbrex_status check_options(const struct imbrex_model *model,
                                        const struct request_limits *limits,
                                        const struct imbrex_request_options *options,
                                        struct imbrex_error *err)
{
    TRY(check_sampling(options, err));
    TRY(check_lengths(options, err));
    TRY(check_bias(model, options, err));
    TRY(check_stop(model, options, err));
    TRY(check_end_tokens(model, options, err));
    TRY(check_priority(limits, options, err));
    TRY(check_not_negative("timeout_ns", options->timeout_ns, err));
    TRY(check_not_negative("turn", options->turn, err));
    TRY(check_not_negative("expected_return_ns", options->expected_return_ns, err));
    return check_array("salt", "bytes", options->salt, options->salt_bytes, MAX_SALT_BYTES, err);
}

/* ---- prompt ---------------------------------------------------------------------------------- */

static enum imbrex_status check_prompt_source(const struct imbrex_model *model,
                                              const struct imbrex_request_options *options,
                                              struct imbrex_error *err)
{
    const unsigned known_flags = IMBREX_TOKENIZE_ADD_SPECIAL | IMBREX_TOKENIZE_PARSE_SPECIAL;
    bool has_ids = options->prompt_ids != NULL || options->num_prompt_ids != 0;
    bool has_text = options->prompt_text != NULL || options->prompt_text_bytes != 0;
    if (has_ids == has_text) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "prompt: expected one of prompt_ids and prompt_text, found %s",
                         has_ids ? "both" : "none");
    }
    if (has_ids) {
        if (options->num_prompt_ids < 1 || options->prompt_ids == NULL) {
            return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                             "prompt: expected at least 1 token id, found %d",
                             options->prompt_ids == NULL ? 0 : options->num_prompt_ids);
        }
        return IMBREX_STATUS_OK;
    }
    if (model->tokenizer == NULL) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "prompt_text",
                               ": expected prompt_ids instead, since %s has no tokenizer, "
                               "found %zu bytes",
                               model->path, options->prompt_text_bytes);
    }
    if ((options->prompt_text_flags & ~known_flags) != 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "prompt_text_flags",
                               ": expected bits of 0x%x, found 0x%x", known_flags,
                               options->prompt_text_flags);
    }
    return check_array("prompt_text", "bytes", options->prompt_text, options->prompt_text_bytes,
                       SIZE_MAX, err);
}

static enum imbrex_status check_prompt_length(const struct imbrex_model *model,
                                              const struct request_limits *limits, bool has_output,
                                              size_t num_prompt_ids, struct imbrex_error *err)
{
    size_t context_size = (size_t)limits->context_size;
    if (num_prompt_ids == 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "prompt: expected at least one token, found an empty text, and the "
                         "tokenizer of %s adds no begin token",
                         model->path);
    }
    if (has_output && num_prompt_ids >= context_size) {
        /* One position at least must be left for an answer. */
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "prompt: expected at most %zu tokens (context size %zu, 1 left to "
                         "generate), found %zu",
                         context_size - 1, context_size, num_prompt_ids);
    }
    if (!has_output && num_prompt_ids > context_size) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "prompt: expected at most %zu tokens (context size), found %zu",
                         context_size, num_prompt_ids);
    }
    if (!has_output && num_prompt_ids < 2) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "prompt: expected at least 2 token ids, since max_tokens is %d, found %zu",
                         IMBREX_NO_TOKENS, num_prompt_ids);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status take_prompt_ids(struct imbrex_request *request,
                                          const struct imbrex_request_options *options,
                                          struct imbrex_error *err)
{
    size_t num_bytes = (size_t)options->num_prompt_ids * sizeof(int32_t);
    request->prompt_ids = malloc(num_bytes);
    if (request->prompt_ids == NULL) {
        return error_out_of_memory(err, "the prompt", num_bytes);
    }
    memcpy(request->prompt_ids, options->prompt_ids, num_bytes);
    for (int32_t i = 0; i < options->num_prompt_ids; i++) {
        int32_t token_id = request->prompt_ids[i];
        if (token_id < 0 || token_id >= request->model->config.vocab_size) {
            return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "prompt_ids",
                                   "[%d]: expected an id in [0, %d), found %d", i,
                                   request->model->config.vocab_size, token_id);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status take_prompt(struct imbrex_request *request,
                                      const struct request_limits *limits,
                                      const struct imbrex_request_options *options,
                                      struct imbrex_error *err)
{
    const struct imbrex_model *model = request->model;
    bool has_output = options->max_tokens != IMBREX_NO_TOKENS;
    size_t num_ids = (size_t)options->num_prompt_ids;
    if (options->prompt_ids != NULL) {
        /* Before anything of that size is copied. */
        TRY(check_prompt_length(model, limits, has_output, num_ids, err));
        TRY(take_prompt_ids(request, options, err));
    } else {
        TRY(imbrex_tokenize(model->tokenizer, options->prompt_text, options->prompt_text_bytes,
                            options->prompt_text_flags, &request->prompt_ids, &num_ids, err));
        TRY(check_prompt_length(model, limits, has_output, num_ids, err));
    }
    request->num_prompt_ids = (int32_t)num_ids;
    request->metrics.num_prompt_tokens = request->num_prompt_ids;
    if (has_output) {
        int32_t num_left = limits->context_size - request->num_prompt_ids;
        request->is_context_limit = options->max_tokens == 0 || options->max_tokens > num_left;
        request->max_output = request->is_context_limit ? num_left : options->max_tokens;
    }
    return IMBREX_STATUS_OK;
}

/* ---- end tokens and biases ------------------------------------------------------------------- */

/* Ids that can be drawn: those that have both a row of weights and a text. */
static int32_t num_drawable_ids(const struct imbrex_model *model)
{
    return model->tokenizer == NULL ? model->config.vocab_size
                                    : imbrex_tokenizer_vocab_size(model->tokenizer);
}

static void add_end_token(struct imbrex_request *request, int32_t token_id)
{
    if (token_id >= 0 && token_id < num_drawable_ids(request->model) &&
        !request_is_end_token(request, token_id)) {
        request->end_token_ids[request->num_end_token_ids++] = token_id;
    }
}

static enum imbrex_status take_end_tokens(struct imbrex_request *request,
                                          const struct imbrex_request_options *options,
                                          struct imbrex_error *err)
{
    struct imbrex_model_info description;
    imbrex_model_describe(request->model, &description);
    size_t max_ids = (size_t)description.num_eos_token_ids + options->num_end_token_ids;
    if (options->ignore_eos || max_ids == 0) {
        return IMBREX_STATUS_OK;
    }
    request->end_token_ids = malloc(max_ids * sizeof(int32_t));
    if (request->end_token_ids == NULL) {
        return error_out_of_memory(err, "end tokens", max_ids * sizeof(int32_t));
    }
    for (int32_t i = 0; i < description.num_eos_token_ids; i++) {
        add_end_token(request, description.eos_token_ids[i]);
    }
    for (size_t i = 0; i < options->num_end_token_ids; i++) {
        add_end_token(request, options->end_token_ids[i]);
    }
    return IMBREX_STATUS_OK;
}

static int compare_bias(const void *left, const void *right)
{
    int32_t a = ((const struct imbrex_logit_bias *)left)->token_id;
    int32_t b = ((const struct imbrex_logit_bias *)right)->token_id;
    return (a > b) - (a < b);
}

/* A draw needs an id that is not forbidden, also as long as no end token may come. */
static enum imbrex_status check_bias_leaves_ids(const struct imbrex_request *request,
                                                struct imbrex_error *err)
{
    int32_t num_ids = num_drawable_ids(request->model);
    int32_t num_forbidden = 0;
    for (int32_t i = 0; i < request->num_bias; i++) {
        const struct imbrex_logit_bias *entry = &request->bias[i];
        num_forbidden += entry->token_id < num_ids && entry->bias == -INFINITY;
    }
    for (int32_t i = 0; i < request->num_end_bias; i++) {
        const struct imbrex_logit_bias *entry = &request->bias[request->num_bias + i];
        const struct imbrex_logit_bias *other =
            bsearch(entry, request->bias, (size_t)request->num_bias, sizeof(*entry), compare_bias);
        num_forbidden += other == NULL || other->bias != -INFINITY;
    }
    if (num_forbidden >= num_ids) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "logit_bias",
                               ": expected at least 1 of %d ids left to draw, found all "
                               "forbidden%s",
                               num_ids,
                               request->num_end_bias > 0 ? " (end tokens by min_tokens)" : "");
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status take_bias(struct imbrex_request *request,
                                    const struct imbrex_request_options *options,
                                    struct imbrex_error *err)
{
    size_t num_end_bias = options->min_tokens > 0 ? (size_t)request->num_end_token_ids : 0;
    size_t num_bytes = (options->num_logit_bias + num_end_bias) * sizeof(*request->bias);
    if (num_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    request->bias = malloc(num_bytes);
    if (request->bias == NULL) {
        return error_out_of_memory(err, "logit_bias", num_bytes);
    }
    if (options->num_logit_bias > 0) {
        memcpy(request->bias, options->logit_bias,
               options->num_logit_bias * sizeof(*request->bias));
        qsort(request->bias, options->num_logit_bias, sizeof(*request->bias), compare_bias);
    }
    request->num_bias = (int32_t)options->num_logit_bias;
    for (int32_t i = 1; i < request->num_bias; i++) {
        if (request->bias[i].token_id == request->bias[i - 1].token_id) {
            return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "logit_bias",
                                   ": expected ids that are all different, found %d twice",
                                   request->bias[i].token_id);
        }
    }
    for (size_t i = 0; i < num_end_bias; i++) {
        request->bias[options->num_logit_bias + i] =
            (struct imbrex_logit_bias){.token_id = request->end_token_ids[i], .bias = -INFINITY};
    }
    request->num_end_bias = (int32_t)num_end_bias;
    return check_bias_leaves_ids(request, err);
}

/* ---- request --------------------------------------------------------------------------------- */

static enum imbrex_status take_salt(struct imbrex_request *request,
                                    const struct imbrex_request_options *options,
                                    struct imbrex_error *err)
{
    if (options->salt_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    request->salt = malloc(options->salt_bytes);
    if (request->salt == NULL) {
        return error_out_of_memory(err, "the salt", options->salt_bytes);
    }
    memcpy(request->salt, options->salt, options->salt_bytes);
    request->salt_bytes = options->salt_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_prefix(struct imbrex_request *request,
                                        const struct request_limits *limits,
                                        const struct imbrex_request_options *options,
                                        struct imbrex_error *err)
{
    if (limits->identity == NULL) {
        return IMBREX_STATUS_OK;
    }
    const struct request_prefix_options prefix_options = {
        .identity = limits->identity,
        .salt = request->salt,
        .salt_bytes = request->salt_bytes,
        .prompt_ids = request->prompt_ids,
        .num_prompt_ids = request->num_prompt_ids,
        .max_tokens = request->num_prompt_ids + request->max_output,
    };
    TRY(request_prefix_create(&prefix_options, &request->prefix, err));
    request->prefix.kv.fingerprint = (struct kv_fingerprint){
        .num_prompt_tokens = request->num_prompt_ids,
        .last_gap_ns = -1,
        .context_size = limits->context_size,
        .temperature = options->temperature,
        .session = options->session,
        .turn = options->turn,
        .tenant = options->tenant,
        .expected_return_ns = options->expected_return_ns,
        .is_session_end = options->is_session_end,
    };
    return IMBREX_STATUS_OK;
}

/* Everything says "none" until the results come: row 0 always does. */
static enum imbrex_status create_prompt_logprobs(struct imbrex_request *request,
                                                 struct imbrex_error *err)
{
    size_t num_rows = (size_t)request->num_prompt_ids;
    if (request->num_prompt_logprobs < 0) {
        return IMBREX_STATUS_OK;
    }
    request->has_prompt_logprobs = num_rows == 1;
    request->prompt_logprobs = calloc(num_rows, sizeof(*request->prompt_logprobs));
    if (request->prompt_logprobs == NULL) {
        return error_out_of_memory(err, "prompt logprobs",
                                   num_rows * sizeof(*request->prompt_logprobs));
    }
    if (request->num_prompt_logprobs == 0) {
        return IMBREX_STATUS_OK;
    }
    size_t num_entries = num_rows * (size_t)request->num_prompt_logprobs;
    request->top_prompt_logprobs = calloc(num_entries, sizeof(*request->top_prompt_logprobs));
    if (request->top_prompt_logprobs == NULL) {
        return error_out_of_memory(err, "prompt logprobs",
                                   num_entries * sizeof(*request->top_prompt_logprobs));
    }
    for (size_t i = 0; i < num_entries; i++) {
        request->top_prompt_logprobs[i].token_id = -1;
    }
    return IMBREX_STATUS_OK;
}

static void init_sequence(const struct imbrex_request *request, int32_t priority, bool has_output,
                          struct request_choice *choice)
{
    bool is_first = choice->choice_idx == 0;
    choice->sequence = (struct sequence){
        .owner = choice,
        .deadline_ns = INT64_MAX,
        .priority = priority,
        .max_tokens = request->num_prompt_ids + request->max_output,
        .num_draws = !has_output ? 0
                     : is_first  ? request->num_choices
                                 : 1,
        .score_begin = is_first && request->num_prompt_logprobs >= 0 ? 0 : INT32_MAX,
        .num_prompt_tokens = request->num_prompt_ids,
        .slot = -1,
    };
}

/* The prompt goes through the detokenizer too, its text unused: whether the continuation begins
 * with a space, or inside a character, depends on what came before. */
static enum imbrex_status create_text_output(struct imbrex_request *request,
                                             const struct imbrex_request_options *options,
                                             struct imbrex_error *err)
{
    const struct imbrex_tokenizer *tokenizer = request->model->tokenizer;
    int32_t num_ids = num_drawable_ids(request->model);
    struct request_choice *first = &request->choices[0];
    size_t max_piece_bytes = detokenizer_max_bytes(tokenizer);
    for (int32_t i = 0; i < request->num_choices; i++) {
        /* Twice: the bytes of a token and, at the end, those the detokenizer still held, if the
         * token's event could not be kept. */
        TRY(stop_matcher_create(options->stop, options->num_stop, 2 * max_piece_bytes,
                                &request->choices[i].stop_matcher, err));
    }
    detokenizer_init(&first->detokenizer, tokenizer, true);
    for (int32_t i = 0; i < request->num_prompt_ids; i++) {
        if (request->prompt_ids[i] < num_ids) {
            (void)detokenizer_push(&first->detokenizer, request->prompt_ids[i],
                                   stop_matcher_piece(&first->stop_matcher));
        }
    }
    for (int32_t i = 1; i < request->num_choices; i++) {
        request->choices[i].detokenizer = first->detokenizer;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_choices(struct imbrex_request *request,
                                         const struct imbrex_request_options *options,
                                         struct imbrex_error *err)
{
    size_t num_choices = (size_t)request->num_choices;
    size_t num_output_ids = num_choices * (size_t)request->max_output;
    size_t num_bytes;
    if (!size_mul(num_output_ids + 1, sizeof(int32_t), &num_bytes)) {
        return error_out_of_memory(err, "output ids", SIZE_MAX);
    }
    request->choices = calloc(num_choices, sizeof(*request->choices));
    if (request->choices == NULL) {
        return error_out_of_memory(err, "choices", num_choices * sizeof(*request->choices));
    }
    /* One piece for all: choice 0 owns it. */
    int32_t *output_ids = malloc(num_bytes);
    if (output_ids == NULL) {
        return error_out_of_memory(err, "output ids", num_bytes);
    }
    for (int32_t i = 0; i < request->num_choices; i++) {
        struct request_choice *choice = &request->choices[i];
        choice->request = request;
        choice->choice_idx = i;
        choice->output_ids = output_ids + (size_t)i * (size_t)request->max_output;
        init_sequence(request, options->priority, options->max_tokens != IMBREX_NO_TOKENS, choice);
    }
    return request->has_text ? create_text_output(request, options, err) : IMBREX_STATUS_OK;
}

static enum imbrex_status reserve_ends(struct imbrex_request *request, struct imbrex_error *err)
{
    /* What a matcher can hold is what an end can have to say. */
    size_t text_bytes = request->choices[0].stop_matcher.capacity;
    if (request->callback == NULL &&
        !event_queue_reserve(&request->events, request->num_choices, text_bytes)) {
        return error_out_of_memory(err, "events", (size_t)request->num_choices * text_bytes);
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status request_create(const struct imbrex_model *model,
                                  const struct request_limits *limits,
                                  const struct imbrex_request_options *options,
                                  struct imbrex_request **request, struct imbrex_error *err)
{
    enum imbrex_status status;

    TRY(check_options(model, limits, options, err));
    TRY(check_prompt_source(model, options, err));
    struct imbrex_request *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the request", sizeof(*created));
    }
    created->model = model;
    created->min_tokens = options->min_tokens;
    created->num_choices = options->num_choices;
    created->num_left = options->num_choices;
    created->has_text = model->tokenizer != NULL && !options->no_text;
    created->ignore_eos = options->ignore_eos;
    created->num_prompt_logprobs = options->num_prompt_logprobs;
    created->callback = options->callback;
    created->user = options->user;
    created->sampling = (struct sample_row){
        .target_id = -1,
        .num_logprobs = options->num_logprobs,
        .temperature = options->temperature,
        .top_k = options->top_k,
        .top_p = options->top_p,
        .min_p = options->min_p,
        .repetition_penalty = options->repetition_penalty,
        .frequency_penalty = options->frequency_penalty,
        .presence_penalty = options->presence_penalty,
        .seed_low = (uint32_t)options->seed,
        .seed_high = (uint32_t)(options->seed >> 32),
    };
    atomic_init(&created->is_cancelled, false);
    TRY_OR_FAIL(take_prompt(created, limits, options, err));
    TRY_OR_FAIL(take_end_tokens(created, options, err));
    TRY_OR_FAIL(take_bias(created, options, err));
    TRY_OR_FAIL(take_salt(created, options, err));
    TRY_OR_FAIL(create_prefix(created, limits, options, err));
    TRY_OR_FAIL(create_prompt_logprobs(created, err));
    TRY_OR_FAIL(create_choices(created, options, err));
    TRY_OR_FAIL(reserve_ends(created, err));
    *request = created;
    return IMBREX_STATUS_OK;
fail:
    request_free(created);
    return status;
}

void request_free(struct imbrex_request *request)
{
    if (request == NULL) {
        return;
    }
    if (request->choices != NULL) {
        for (int32_t i = 0; i < request->num_choices; i++) {
            stop_matcher_destroy(&request->choices[i].stop_matcher);
        }
        free(request->choices[0].output_ids);
    }
    event_queue_deinit(&request->events);
    free(request->choices);
    free(request->prompt_logprobs);
    free(request->top_prompt_logprobs);
    free(request->salt);
    request_prefix_destroy(&request->prefix);
    free(request->bias);
    free(request->end_token_ids);
    free(request->prompt_ids);
    free(request);
}
