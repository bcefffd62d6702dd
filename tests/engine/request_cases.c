/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/engine/request_cases.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

#define MAX_STEPS 1000000 /* everybody's turn comes */

uint32_t request_case_random(uint64_t *state, uint32_t bound)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % bound);
}

static void *allocate(size_t num_bytes)
{
    void *memory = calloc(num_bytes == 0 ? 1 : num_bytes, 1);
    assert_non_null(memory);
    return memory;
}

void request_case_init(struct request_case *request_case, const struct imbrex_model *model,
                       const struct request_case_limits *limits, uint64_t *state)
{
    struct imbrex_model_info description;
    *request_case = (struct request_case){.options = imbrex_request_options_default(model)};
    struct imbrex_request_options *options = &request_case->options;
    imbrex_model_describe(model, &description);
    const struct imbrex_tokenizer *tokenizer = imbrex_model_tokenizer(model);
    uint32_t num_ids = (uint32_t)(tokenizer == NULL ? description.vocab_size
                                                    : imbrex_tokenizer_vocab_size(tokenizer));

    options->num_prompt_ids = 1 + (int32_t)request_case_random(state, (uint32_t)limits->max_prompt);
    request_case->prompt_ids = allocate((size_t)options->num_prompt_ids * sizeof(int32_t));
    for (int32_t i = 0; i < options->num_prompt_ids; i++) {
        request_case->prompt_ids[i] = (int32_t)request_case_random(state, num_ids);
    }
    options->prompt_ids = request_case->prompt_ids;
    options->max_tokens = 1 + (int32_t)request_case_random(state, (uint32_t)limits->max_output);
    options->min_tokens = (int32_t)request_case_random(state, 4);
    options->seed = request_case_random(state, 1000);
    options->priority = (int32_t)request_case_random(state, 5) - 2;
    options->ignore_eos = request_case_random(state, 2) == 0;
    options->num_logprobs = (int32_t)request_case_random(state, 4) - 1;
    options->num_prompt_logprobs = request_case_random(state, 4) == 0 ? 1 : -1;
    options->temperature = 0.0f;
    if (request_case_random(state, 2) == 0) {
        options->temperature = 0.5f + (float)request_case_random(state, 10) / 10.0f;
        options->top_k = request_case_random(state, 2) == 0 ? 40 : 0;
        options->top_p = request_case_random(state, 2) == 0 ? 0.9f : 1.0f;
        options->min_p = request_case_random(state, 3) == 0 ? 0.05f : 0.0f;
        options->num_choices =
            1 + (int32_t)request_case_random(state, (uint32_t)limits->max_choices);
    }
    if (request_case_random(state, 3) == 0) {
        options->repetition_penalty = 1.1f;
        options->frequency_penalty = 0.3f;
        options->presence_penalty = -0.2f;
    }
    if (request_case_random(state, 3) == 0) {
        for (uint32_t i = 0; i < 3; i++) {
            request_case->bias[i].token_id = (int32_t)(i * 7 + request_case_random(state, 7));
            request_case->bias[i].bias = (float)request_case_random(state, 9) - 4.0f;
        }
        options->logit_bias = request_case->bias;
        options->num_logit_bias = 3;
    }
    if (request_case_random(state, 3) == 0 && tokenizer != NULL) {
        request_case->stop[0] = "e";
        request_case->stop[1] = " the";
        options->stop = request_case->stop + request_case_random(state, 2);
        options->num_stop = 1;
    }
    if (limits->has_cancels && request_case_random(state, 8) == 0) {
        request_case->cancel_after = 1 + (int32_t)request_case_random(state, 10);
    }
    for (int32_t i = 0; i < REQUEST_CASE_MAX_CHOICES; i++) {
        struct choice_record *choices[] = {&request_case->alone.choices[i],
                                           &request_case->mixed.choices[i]};
        for (int32_t j = 0; j < 2 && i < options->num_choices; j++) {
            choices[j]->token_ids = allocate((size_t)options->max_tokens * sizeof(int32_t));
            choices[j]->logprobs = allocate((size_t)options->max_tokens * sizeof(float));
        }
    }
}

static void record_deinit(struct request_record *record)
{
    for (int32_t i = 0; i < REQUEST_CASE_MAX_CHOICES; i++) {
        free(record->choices[i].token_ids);
        free(record->choices[i].logprobs);
        free(record->choices[i].text);
    }
    free(record->prompt_logprobs);
}

void request_case_deinit(struct request_case *request_case)
{
    record_deinit(&request_case->alone);
    record_deinit(&request_case->mixed);
    free(request_case->prompt_ids);
}

void request_case_reset(struct request_case *request_case)
{
    struct request_record *record = &request_case->mixed;
    for (int32_t i = 0; i < REQUEST_CASE_MAX_CHOICES; i++) {
        struct choice_record *choice = &record->choices[i];
        free(choice->text);
        *choice =
            (struct choice_record){.token_ids = choice->token_ids, .logprobs = choice->logprobs};
    }
    free(record->prompt_logprobs);
    record->prompt_logprobs = NULL;
    record->num_ends = 0;
    record->has_last = false;
}

static void record_event(struct request_record *record, const struct imbrex_token_event *event)
{
    struct choice_record *choice = &record->choices[event->choice_idx];
    assert_int_equal(choice->reason, IMBREX_FINISH_REASON_NONE);
    assert_false(record->has_last);
    choice->text = realloc(choice->text, choice->text_bytes + event->text_bytes + 1);
    assert_non_null(choice->text);
    if (event->text_bytes > 0) {
        memcpy(choice->text + choice->text_bytes, event->text, event->text_bytes);
    }
    choice->text_bytes += event->text_bytes;
    record->has_last = event->is_last;
    if (event->finish_reason != IMBREX_FINISH_REASON_NONE) {
        assert_int_equal(event->token_id, -1);
        choice->reason = event->finish_reason;
        record->num_ends++;
        return;
    }
    assert_true(event->token_id >= 0);
    choice->token_ids[choice->num_tokens] = event->token_id;
    choice->logprobs[choice->num_tokens] = event->logprob;
    choice->num_tokens++;
    for (int32_t i = 0; i < event->num_top_logprobs; i++) {
        choice->top_sum +=
            (i + 1) * ((double)event->top_logprobs[i].logprob + event->top_logprobs[i].token_id);
    }
}

static bool take_mixed(void *user, const struct imbrex_token_event *event)
{
    struct request_case *request_case = user;
    record_event(&request_case->mixed, event);
    return request_case->cancel_after == 0 ||
           request_case->mixed.choices[0].num_tokens < request_case->cancel_after;
}

static bool take_alone(void *user, const struct imbrex_token_event *event)
{
    struct request_case *request_case = user;
    record_event(&request_case->alone, event);
    return true;
}

static void keep_rest(struct request_case *request_case, struct request_record *record,
                      struct imbrex_request *request)
{
    const float *logprobs;
    struct imbrex_request_metrics metrics;
    int32_t num_generated = 0;
    record->status = imbrex_request_wait(request, NULL);
    imbrex_request_read_metrics(request, &metrics);
    record->num_preemptions = metrics.num_preemptions;
    record->num_cached_tokens = metrics.num_cached_tokens;
    for (int32_t i = 0; i < request_case->options.num_choices; i++) {
        num_generated += record->choices[i].num_tokens;
    }
    assert_int_equal(metrics.num_generated_tokens, num_generated);
    assert_int_equal(metrics.finish_reason, record->choices[0].reason);
    if (imbrex_request_prompt_logprobs(request, &logprobs, NULL, NULL) == IMBREX_STATUS_OK) {
        size_t num_bytes = (size_t)request_case->options.num_prompt_ids * sizeof(float);
        record->prompt_logprobs = allocate(num_bytes);
        memcpy(record->prompt_logprobs, logprobs, num_bytes);
    }
    imbrex_request_destroy(request);
}

enum imbrex_status request_case_submit(struct request_case *request_case,
                                       struct imbrex_engine *engine)
{
    struct imbrex_request_options options = request_case->options;
    options.callback = take_mixed;
    options.user = request_case;
    return imbrex_request_submit(engine, &options, &request_case->request, NULL);
}

void request_case_finish(struct request_case *request_case)
{
    keep_rest(request_case, &request_case->mixed, request_case->request);
    request_case->request = NULL;
}

void request_case_run_alone(struct request_case *request_case, struct imbrex_engine *engine)
{
    struct imbrex_request_options options = request_case->options;
    struct imbrex_request *request;
    struct imbrex_error err;
    options.callback = take_alone;
    options.user = request_case;
    if (imbrex_request_submit(engine, &options, &request, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    keep_rest(request_case, &request_case->alone, request);
}

void request_case_allow_ties(struct request_case *request_case, float tie_gap)
{
    struct imbrex_request_options *options = &request_case->options;
    request_case->tie_gap = tie_gap;
    options->temperature = 0.0f;
    options->repetition_penalty = 1.0f;
    options->frequency_penalty = 0.0f;
    options->presence_penalty = 0.0f;
    options->num_logit_bias = 0;
    options->num_logprobs = options->num_logprobs < 0 ? 0 : options->num_logprobs;
}

/* The first token that is not that of the text alone; num_tokens of the shorter text: none. */
static int32_t find_parting(const struct choice_record *expected, const struct choice_record *found)
{
    int32_t i = 0;
    while (i < found->num_tokens && i < expected->num_tokens &&
           found->token_ids[i] == expected->token_ids[i]) {
        i++;
    }
    return i;
}

bool request_case_has_tie(const struct request_case *request_case)
{
    for (int32_t i = 0; i < request_case->options.num_choices; i++) {
        const struct choice_record *expected = &request_case->alone.choices[i];
        if (find_parting(expected, &request_case->mixed.choices[i]) < expected->num_tokens) {
            return true;
        }
    }
    return false;
}

int32_t request_case_gaps(const struct request_case *request_case, float *gaps)
{
    int32_t num_gaps = 0;
    for (int32_t i = 0; i < request_case->options.num_choices; i++) {
        const struct choice_record *expected = &request_case->alone.choices[i];
        const struct choice_record *found = &request_case->mixed.choices[i];
        int32_t parting = find_parting(expected, found);
        for (int32_t j = 0; j <= parting && j < found->num_tokens && j < expected->num_tokens;
             j++) {
            gaps[num_gaps] = fabsf(found->logprobs[j] - expected->logprobs[j]);
            num_gaps++;
        }
    }
    return num_gaps;
}

/* The same ids until two of them are as good as each other, and nearly the same logprobs. */
static void compare_nearly(const struct request_case *request_case, int32_t case_idx)
{
    for (int32_t i = 0; i < request_case->options.num_choices; i++) {
        const struct choice_record *expected = &request_case->alone.choices[i];
        const struct choice_record *found = &request_case->mixed.choices[i];
        int32_t parting = find_parting(expected, found);
        bool has_parted = parting < found->num_tokens && parting < expected->num_tokens;
        for (int32_t j = 0; j < parting + has_parted; j++) {
            float difference = found->logprobs[j] - expected->logprobs[j];
            /* Not true of NaN either. */
            if (!(difference <= request_case->tie_gap && difference >= -request_case->tie_gap)) {
                fail_msg("case %d choice %d token %d: alone %d at %g, mixed %d at %g", case_idx, i,
                         j, expected->token_ids[j], (double)expected->logprobs[j],
                         found->token_ids[j], (double)found->logprobs[j]);
            }
        }
        if (!has_parted &&
            (found->num_tokens != expected->num_tokens || found->reason != expected->reason)) {
            fail_msg("case %d choice %d: alone %d tokens (%s), mixed %d (%s)", case_idx, i,
                     expected->num_tokens, imbrex_finish_reason_name(expected->reason),
                     found->num_tokens, imbrex_finish_reason_name(found->reason));
        }
    }
}

void request_case_compare(const struct request_case *request_case, int32_t case_idx)
{
    const struct request_record *alone = &request_case->alone, *mixed = &request_case->mixed;
    bool has_cancelled = false;
    assert_int_equal(mixed->status, IMBREX_STATUS_OK);
    assert_int_equal(mixed->num_ends, request_case->options.num_choices);
    assert_true(mixed->has_last);
    if (request_case->tie_gap > 0.0f) {
        compare_nearly(request_case, case_idx);
        return;
    }
    for (int32_t i = 0; i < request_case->options.num_choices; i++) {
        const struct choice_record *expected = &alone->choices[i], *found = &mixed->choices[i];
        bool is_cancelled = found->reason == IMBREX_FINISH_REASON_CANCELLED;
        has_cancelled |= is_cancelled;
        if (found->num_tokens > expected->num_tokens ||
            (!is_cancelled && found->num_tokens != expected->num_tokens)) {
            fail_msg("case %d choice %d: alone %d tokens (%s), mixed %d (%s)", case_idx, i,
                     expected->num_tokens, imbrex_finish_reason_name(expected->reason),
                     found->num_tokens, imbrex_finish_reason_name(found->reason));
        }
        for (int32_t j = 0; j < found->num_tokens; j++) {
            if (found->token_ids[j] != expected->token_ids[j]) {
                fail_msg("case %d choice %d token %d of %d (prompt %d, preempted %d times): alone "
                         "%d, mixed %d",
                         case_idx, i, j, found->num_tokens, request_case->options.num_prompt_ids,
                         mixed->num_preemptions, expected->token_ids[j], found->token_ids[j]);
            }
        }
        if (found->num_tokens > 0) {
            assert_memory_equal(found->logprobs, expected->logprobs,
                                (size_t)found->num_tokens * sizeof(float));
        }
        if (!is_cancelled) {
            assert_int_equal(found->reason, expected->reason);
            assert_int_equal(found->text_bytes, expected->text_bytes);
            if (found->text_bytes > 0) {
                assert_memory_equal(found->text, expected->text, found->text_bytes);
            }
            assert_true(found->top_sum == expected->top_sum);
        }
    }
    if (!has_cancelled) {
        assert_int_equal(mixed->prompt_logprobs == NULL, alone->prompt_logprobs == NULL);
        if (mixed->prompt_logprobs != NULL) {
            assert_memory_equal(mixed->prompt_logprobs, alone->prompt_logprobs,
                                (size_t)request_case->options.num_prompt_ids * sizeof(float));
        }
    }
}

void request_cases_begin_alike(struct request_case *cases, int32_t num_cases,
                               const struct imbrex_model *model, struct imbrex_engine *engine,
                               uint64_t seed)
{
    int32_t prefixes[3][REQUEST_CASE_MAX_PROMPT];
    for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0][0]); i++) {
        prefixes[i / REQUEST_CASE_MAX_PROMPT][i % REQUEST_CASE_MAX_PROMPT] =
            (int32_t)request_case_random(&seed, 500) + 3;
    }
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_init(&cases[i], model,
                          &(struct request_case_limits){REQUEST_CASE_MAX_PROMPT, 40, 3, false},
                          &seed);
        int32_t num_ids = cases[i].options.num_prompt_ids;
        int32_t num_shared = (int32_t)request_case_random(&seed, (uint32_t)num_ids + 1);
        const int32_t *prefix = prefixes[request_case_random(&seed, 3)];
        memcpy(cases[i].prompt_ids, prefix, (size_t)num_shared * sizeof(*prefix));
        request_case_run_alone(&cases[i], engine);
    }
}

void request_cases_deinit(struct request_case *cases, int32_t num_cases)
{
    for (int32_t i = 0; i < num_cases; i++) {
        request_case_deinit(&cases[i]);
    }
}

struct imbrex_engine *request_cases_engine(struct imbrex_model *model,
                                           const struct imbrex_engine_options *options,
                                           struct device *device)
{
    struct imbrex_engine *engine;
    struct imbrex_error err;
    if (engine_create_on(model, options, device, &engine, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    engine->tiers.patience_ns = INT64_MAX;
    return engine;
}

void request_cases_check(const struct imbrex_engine *engine)
{
    assert_true(scheduler_check(&engine->scheduler));
    assert_true(kv_pool_check(&engine->kv_pool));
    assert_true(engine->prefix.cache == NULL || kv_cache_check(engine->prefix.cache));
    assert_true(engine->tiers.tiers == NULL || kv_tiers_check(engine->tiers.tiers));
}

static void submit_again(struct request_case *request_case, struct imbrex_engine *engine)
{
    request_case_reset(request_case);
    assert_int_equal(request_case_submit(request_case, engine), IMBREX_STATUS_OK);
}

int32_t request_cases_run(struct request_case *cases, int32_t num_cases,
                          struct imbrex_engine *engine, const struct request_round *round)
{
    const struct request_round plain = {0};
    bool has_work = true;
    int32_t num_submitted = 0, num_failed = 0;
    round = round == NULL ? &plain : round;
    int32_t num_at_once = round->num_at_once == 0 ? 2 : round->num_at_once;
    for (int32_t step = 1; has_work || num_submitted < num_cases; step++) {
        assert_true(step < MAX_STEPS);
        bool is_idle = (step - 1) % (round->num_idle_steps + 1) != 0;
        for (int32_t i = 0; !is_idle && i < num_at_once && num_submitted < num_cases; i++) {
            submit_again(&cases[num_submitted++], engine);
        }
        if (round->before_step != NULL) {
            round->before_step(round->user, engine, step, num_submitted);
        }
        assert_int_equal(imbrex_engine_step(engine, &has_work, NULL), IMBREX_STATUS_OK);
        request_cases_check(engine);
        if (round->after_step != NULL) {
            round->after_step(round->user, engine, step, num_submitted);
        }
    }
    for (int32_t i = 0; i < num_cases; i++) {
        if (round->before_finish != NULL) {
            round->before_finish(round->user, &cases[i]);
        }
        request_case_finish(&cases[i]);
        if (round->may_fail && cases[i].mixed.status != IMBREX_STATUS_OK) {
            num_failed++;
        } else {
            request_case_compare(&cases[i], i);
        }
    }
    return num_failed;
}

void case_bed_open(struct case_bed *bed, const struct imbrex_model_options *options,
                   int32_t num_cases, int32_t context_size, uint64_t seed)
{
    struct imbrex_error err;
    struct imbrex_engine_options of_engine = imbrex_engine_options_default();
    assert_true(num_cases <= CASE_BED_MAX_CASES);
    *bed = (struct case_bed){.num_cases = num_cases};
    if (imbrex_model_open(NULL, options, &bed->model, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    of_engine.context_size = context_size;
    of_engine.kv_cache_tokens = 4 * context_size;
    of_engine.num_threads = 1;
    struct imbrex_engine *engine = request_cases_engine(bed->model, &of_engine, NULL);
    request_cases_begin_alike(bed->cases, num_cases, bed->model, engine, seed);
    imbrex_engine_destroy(engine);
}

void case_bed_close(struct case_bed *bed)
{
    request_cases_deinit(bed->cases, bed->num_cases);
    imbrex_model_close(bed->model);
}

void plain_prompt_fill(int32_t ids[PLAIN_PROMPT_TOKENS])
{
    for (int32_t i = 0; i < PLAIN_PROMPT_TOKENS; i++) {
        ids[i] = 3 + 7 * i % 450;
    }
}

struct imbrex_request *plain_prompt_submit(struct imbrex_engine *engine, const int32_t *ids,
                                           int32_t num_ids, int32_t max_tokens, const char *salt)
{
    struct imbrex_request_options options = imbrex_request_options_default(engine->model);
    struct imbrex_request *request;
    options.prompt_ids = ids;
    options.num_prompt_ids = num_ids;
    options.max_tokens = max_tokens;
    options.ignore_eos = true;
    options.temperature = 0.0f;
    options.salt = salt;
    options.salt_bytes = salt != NULL ? strlen(salt) : 0;
    assert_int_equal(imbrex_request_submit(engine, &options, &request, NULL), IMBREX_STATUS_OK);
    return request;
}

struct imbrex_request_metrics plain_prompt_end(struct imbrex_request *request)
{
    struct imbrex_request_metrics metrics;
    assert_int_equal(imbrex_request_wait(request, NULL), IMBREX_STATUS_OK);
    imbrex_request_read_metrics(request, &metrics);
    imbrex_request_destroy(request);
    return metrics;
}

struct imbrex_request_metrics plain_prompt_run(struct imbrex_engine *engine, const int32_t *ids,
                                               int32_t num_ids)
{
    return plain_prompt_end(plain_prompt_submit(engine, ids, num_ids, 1, NULL));
}
