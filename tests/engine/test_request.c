/* SPDX-License-Identifier: Apache-2.0 */
/* Requests on the built-in model: what they refuse, what they tell the scheduler and the batch, and
 * what becomes of tokens that a test draws by hand. */
#include "engine/request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

#define BOS 1
#define EOS 2
#define BYTE_ID(byte) (3 + (byte)) /* of the tokenizer's byte fallback */
#define VOCAB_SIZE 512

struct fixture {
    struct imbrex_model *model;
    struct imbrex_tokenizer *tokenizer;
    struct request_limits limits;
    pthread_mutex_t lock;
};

static int set_up(void **state)
{
    static struct fixture fixture = {.limits = {.context_size = 100, .priority_step_ns = 1000000}};
    *state = &fixture;
    pthread_mutex_init(&fixture.lock, NULL);
    if (imbrex_model_open(NULL, NULL, &fixture.model, NULL) != IMBREX_STATUS_OK) {
        return 1;
    }
    fixture.tokenizer = fixture.model->tokenizer;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    imbrex_model_close(fixture->model);
    pthread_mutex_destroy(&fixture->lock);
    return 0;
}

static struct imbrex_request_options from_bos(const struct fixture *fixture)
{
    static const int32_t bos = BOS;
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    options.prompt_ids = &bos;
    options.num_prompt_ids = 1;
    return options;
}

static struct imbrex_request *create(const struct fixture *fixture,
                                     const struct imbrex_request_options *options)
{
    struct imbrex_error err;
    struct imbrex_request *request = NULL;
    if (request_create(fixture->model, &fixture->limits, options, &request, &err) !=
        IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    return request;
}

static void assert_refused(const struct fixture *fixture,
                           const struct imbrex_request_options *options,
                           enum imbrex_status expected, const char *message)
{
    struct imbrex_error err = {0};
    struct imbrex_request *request = NULL;
    enum imbrex_status status =
        request_create(fixture->model, &fixture->limits, options, &request, &err);
    if (status != expected || request != NULL || strstr(err.message, message) == NULL ||
        strstr(err.message, "expected") == NULL || strstr(err.message, "found") == NULL) {
        fail_msg("expected %s '%s', found %s '%s'", imbrex_status_name(expected), message,
                 imbrex_status_name(status), err.message);
    }
}

/* ---- options --------------------------------------------------------------------------------- */

/* Catches: numbers outside their documented range that are taken, NaN above all, and messages that
 * name another field. */
static void test_refused_numbers(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options;
#define REFUSE(field, value, message)                                                      \
    do {                                                                                   \
        options = from_bos(fixture);                                                       \
        options.field = (value);                                                           \
        assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT, #field message); \
    } while (0)
    REFUSE(temperature, -0.1f, ": expected a number in [0, 100], found -0.1");
    REFUSE(temperature, 100.1f, ": expected a number in [0, 100], found 100.1");
    REFUSE(temperature, NAN, ": ");
    REFUSE(temperature, INFINITY, ": ");
    REFUSE(top_k, -1, ": expected a number >= 0, found -1");
    REFUSE(top_p, 0.0f, ": expected a number in (0, 1], found 0");
    REFUSE(top_p, 1.01f, ": ");
    REFUSE(top_p, NAN, ": ");
    REFUSE(min_p, 1.0f, ": expected a number in [0, 1), found 1");
    REFUSE(min_p, -0.1f, ": ");
    REFUSE(min_p, NAN, ": ");
    REFUSE(repetition_penalty, 0.0f, ": expected a number in [0.01, 100], found 0");
    REFUSE(repetition_penalty, 1e-40f, ": expected a number in [0.01, 100], found ");
    REFUSE(repetition_penalty, 101.0f, ": ");
    REFUSE(repetition_penalty, NAN, ": ");
    REFUSE(frequency_penalty, 2.1f, ": expected a number in [-2, 2], found 2.1");
    REFUSE(frequency_penalty, -2.1f, ": ");
    REFUSE(frequency_penalty, NAN, ": ");
    REFUSE(presence_penalty, 2.1f, ": expected a number in [-2, 2], found 2.1");
    REFUSE(presence_penalty, -2.1f, ": ");
    REFUSE(presence_penalty, NAN, ": ");
    REFUSE(max_tokens, -2, ": expected a number >= 0, or -1 for none, found -2");
    REFUSE(min_tokens, -1, ": expected a number >= 0, found -1");
    REFUSE(num_choices, 0, ": expected a number in [1, 64], found 0");
    REFUSE(num_choices, 65, ": expected a number in [1, 64], found 65");
    REFUSE(num_logprobs, -2, ": expected a number in [-1, 20], found -2");
    REFUSE(num_logprobs, 21, ": expected a number in [-1, 20], found 21");
    REFUSE(num_prompt_logprobs, -2, ": ");
    REFUSE(num_prompt_logprobs, 21, ": expected a number in [-1, 20], found 21");
    REFUSE(priority, 1001, ": expected a number in [-1000, 1000], found 1001");
    REFUSE(priority, -1001, ": ");
    REFUSE(timeout_ns, -1, ": expected a number >= 0, found -1");
    REFUSE(turn, -1, ": expected a number >= 0, found -1");
    REFUSE(expected_return_ns, -1, ": expected a number >= 0, found -1");
#undef REFUSE
    options = from_bos(fixture);
    options.max_tokens = IMBREX_NO_TOKENS;
    options.num_choices = 2;
    assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT,
                   "num_choices: expected 1, since max_tokens is -1, found 2");
}

/* Catches: a key of the scheduler's order that overflows. */
static void test_priority_of_long_steps(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    struct request_limits saved = fixture->limits;
    fixture->limits.priority_step_ns = INT64_MAX / 2 / 5;
    options.priority = -5;
    request_free(create(fixture, &options));
    options.priority = 6;
    assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT,
                   "priority: expected a number in [-5, 5], found 6");
    fixture->limits = saved;
}

/* Catches: the ends of the documented ranges refused, and defaults that are not the documented
 * ones. */
static void test_accepted_numbers(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    assert_int_equal(options.num_choices, 1);
    assert_int_equal(options.num_logprobs, -1);
    assert_int_equal(options.num_prompt_logprobs, -1);
    assert_true(options.temperature == 0.0f && options.top_p == 1.0f && options.min_p == 0.0f &&
                options.repetition_penalty == 1.0f && options.frequency_penalty == 0.0f &&
                options.presence_penalty == 0.0f);
    assert_int_equal(options.max_tokens, 0);
    request_free(create(fixture, &options));
    options.temperature = 100.0f;
    options.top_k = INT32_MAX;
    options.min_p = 0.99f;
    options.top_p = 1e-9f;
    options.repetition_penalty = 0.01f;
    options.frequency_penalty = -2.0f;
    options.presence_penalty = 2.0f;
    options.max_tokens = INT32_MAX;
    options.min_tokens = INT32_MAX;
    options.num_choices = IMBREX_MAX_CHOICES;
    options.num_logprobs = IMBREX_MAX_LOGPROBS;
    options.num_prompt_logprobs = IMBREX_MAX_LOGPROBS;
    options.priority = -IMBREX_MAX_PRIORITY;
    options.timeout_ns = INT64_MAX;
    options.seed = UINT64_MAX;
    request_free(create(fixture, &options));
}

/* Catches: arrays that are too long, not there, or hold what they must not. */
static void test_refused_arrays(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options;
    const char *const stops[] = {"a", ""};
    const int32_t end_ids[] = {5, VOCAB_SIZE, -1};
    const unsigned char salt[257] = {0};
    static int32_t many_ids[IMBREX_MAX_END_TOKENS + 1];
    struct imbrex_logit_bias bias[IMBREX_MAX_LOGIT_BIAS + 1] = {{3, 1.0f}, {VOCAB_SIZE, 1.0f}};
#define REFUSE(array, elements, count_field, count, message)                               \
    do {                                                                                   \
        options = from_bos(fixture);                                                       \
        options.array = (elements);                                                        \
        options.count_field = (count);                                                     \
        assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT, #array message); \
    } while (0)
    REFUSE(stop, stops, num_stop, 2, "[1]: expected a text, found an empty one");
    REFUSE(stop, NULL, num_stop, 1, ": expected 1 strings, found NULL");
    REFUSE(end_token_ids, end_ids, num_end_token_ids, 2,
           "[1]: expected an id in [0, 512), found 5");
    REFUSE(end_token_ids, end_ids + 2, num_end_token_ids, 1, "[0]: expected an id");
    REFUSE(end_token_ids, NULL, num_end_token_ids, 1, ": expected 1 ids, found NULL");
    REFUSE(end_token_ids, many_ids, num_end_token_ids, 65, ": expected at most 64 ids, found 65");
    REFUSE(salt, salt, salt_bytes, 257, ": expected at most 256 bytes, found 257");
    REFUSE(salt, NULL, salt_bytes, 3, ": expected 3 bytes, found NULL");
    REFUSE(logit_bias, bias, num_logit_bias, 2, "[1].token_id: expected an id in [0, 512), found");
    REFUSE(logit_bias, bias, num_logit_bias, 1025, ": expected at most 1024 entries, found 1025");
    REFUSE(logit_bias, NULL, num_logit_bias, 1, ": expected 1 entries, found NULL");
    const float values[] = {NAN, INFINITY, 1.1e30f, -1.1e30f};
    for (int32_t i = 0; i < 4; i++) {
        bias[1] = (struct imbrex_logit_bias){4, values[i]};
        REFUSE(logit_bias, bias, num_logit_bias, 2,
               "[1].bias: expected a number in [-1e+30, 1e+30] or -inf, found ");
    }
    bias[1] = (struct imbrex_logit_bias){-1, 0.0f};
    REFUSE(logit_bias, bias, num_logit_bias, 2, "[1].token_id: ");
    bias[1] = (struct imbrex_logit_bias){4, -INFINITY};
    bias[2] = (struct imbrex_logit_bias){3, -INFINITY};
    REFUSE(logit_bias, bias, num_logit_bias, 3,
           ": expected ids that are all different, found 3 twice");
#undef REFUSE
    options = from_bos(fixture);
    options.stop = stops;
    options.num_stop = 1;
    options.no_text = true;
    assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT,
                   "stop: expected none, since no_text is set, found 1");
    options.no_text = false;
    fixture->model->tokenizer = NULL;
    assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT, "has no tokenizer, found 1");
    fixture->model->tokenizer = fixture->tokenizer;
}

/* Catches: a request that has nothing left to draw, at all or before min_tokens. */
static void test_all_ids_forbidden(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = from_bos(fixture);
    struct imbrex_logit_bias bias[VOCAB_SIZE];
    for (int32_t i = 0; i < VOCAB_SIZE; i++) {
        bias[i] = (struct imbrex_logit_bias){VOCAB_SIZE - 1 - i, -INFINITY};
    }
    options.logit_bias = bias;
    options.num_logit_bias = VOCAB_SIZE;
    assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT,
                   "logit_bias: expected at least 1 of 512 ids left to draw");
    /* Everything but an end token, which min_tokens forbids. */
    const int32_t end_id = 7;
    bias[VOCAB_SIZE - 1 - end_id].bias = 0.0f;
    options.end_token_ids = &end_id;
    options.num_end_token_ids = 1;
    request_free(create(fixture, &options));
    options.min_tokens = 1;
    assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT, "by min_tokens");
    options.ignore_eos = true;
    request_free(create(fixture, &options));
    /* An id forbidden twice counts once: 8 is left. */
    options.ignore_eos = false;
    bias[VOCAB_SIZE - 1 - end_id].bias = -INFINITY;
    bias[VOCAB_SIZE - 1 - 8].bias = 0.0f;
    request_free(create(fixture, &options));
}

/* Catches: options that are kept as pointers into the caller's memory. */
static void test_options_are_copied(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    int32_t prompt[] = {BOS, 403, 407}, end_ids[] = {9};
    char salt[] = "salt", stop[] = "stop";
    const char *stops[] = {stop};
    struct imbrex_logit_bias bias[] = {{8, 2.0f}, {5, -1.0f}};
    options.prompt_ids = prompt;
    options.num_prompt_ids = 3;
    options.end_token_ids = end_ids;
    options.num_end_token_ids = 1;
    options.salt = salt;
    options.salt_bytes = 4;
    options.stop = stops;
    options.num_stop = 1;
    options.logit_bias = bias;
    options.num_logit_bias = 2;
    struct imbrex_request *request = create(fixture, &options);
    memset(prompt, 0, sizeof(prompt));
    memset(end_ids, 0, sizeof(end_ids));
    memset(salt, 0, sizeof(salt));
    memset(stop, 'x', 4);
    memset(bias, 0, sizeof(bias));
    assert_int_equal(request->prompt_ids[1], 403);
    assert_int_equal(request->prompt_ids[2], 407);
    assert_true(request_is_end_token(request, 9));
    assert_int_equal(request->salt_bytes, 4);
    assert_memory_equal(request->salt, "salt", 4);
    assert_memory_equal(request->choices[0].stop_matcher.strings[0], "stop", 4);
    assert_int_equal(request->num_bias, 2);
    assert_int_equal(request->bias[0].token_id, 5);
    assert_true(request->bias[0].bias == -1.0f);
    assert_int_equal(request->bias[1].token_id, 8);
    assert_true(request->bias[1].bias == 2.0f);
    request_free(request);
    request_free(NULL);
}

/* ---- prompt ---------------------------------------------------------------------------------- */

/* Catches: a text that becomes other ids than imbrex_tokenize gives, and flags that are dropped. */
static void test_prompt_text(void **state)
{
    struct fixture *fixture = *state;
    static const char text[] = "Once <s>\0 upon";
    for (unsigned flags = 0; flags < 4; flags++) {
        struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
        int32_t *ids = NULL;
        size_t num_ids;
        assert_int_equal(imbrex_tokenize(fixture->tokenizer, text, sizeof(text) - 1, flags, &ids,
                                         &num_ids, NULL),
                         IMBREX_STATUS_OK);
        options.prompt_text = text;
        options.prompt_text_bytes = sizeof(text) - 1;
        options.prompt_text_flags = flags;
        struct imbrex_request *request = create(fixture, &options);
        assert_int_equal(request->num_prompt_ids, num_ids);
        assert_int_equal(request->metrics.num_prompt_tokens, num_ids);
        assert_memory_equal(request->prompt_ids, ids, num_ids * sizeof(int32_t));
        request_free(request);
        imbrex_free(ids);
    }
    /* The begin token alone is a prompt. */
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    options.prompt_text = "";
    options.prompt_text_flags = IMBREX_TOKENIZE_ADD_SPECIAL;
    struct imbrex_request *request = create(fixture, &options);
    assert_int_equal(request->num_prompt_ids, 1);
    assert_int_equal(request->prompt_ids[0], BOS);
    request_free(request);
}

/* Catches: prompts taken that are two, none, empty, or hold ids without a row of weights. */
static void test_refused_prompts(void **state)
{
    struct fixture *fixture = *state;
    const int32_t beyond[] = {BOS, VOCAB_SIZE}, negative[] = {BOS, -1};
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    const struct imbrex_request_options nothing = options;
    const enum imbrex_status invalid = IMBREX_STATUS_INVALID_ARGUMENT;
    assert_refused(fixture, &options, invalid, "one of prompt_ids and prompt_text, found none");
    options = from_bos(fixture);
    options.prompt_text = "";
    assert_refused(fixture, &options, invalid, "one of prompt_ids and prompt_text, found both");
    options = from_bos(fixture);
    options.prompt_text_bytes = 3;
    assert_refused(fixture, &options, invalid, "found both");
    options = from_bos(fixture);
    options.num_prompt_ids = 0;
    assert_refused(fixture, &options, invalid, "prompt: expected at least 1 token id, found 0");
    options.num_prompt_ids = -3;
    assert_refused(fixture, &options, invalid, "prompt: expected at least 1 token id, found -3");
    options.num_prompt_ids = 3;
    options.prompt_ids = NULL;
    assert_refused(fixture, &options, invalid, "prompt: expected at least 1 token id, found 0");
    options.prompt_ids = beyond;
    options.num_prompt_ids = 2;
    assert_refused(fixture, &options, invalid,
                   "prompt_ids[1]: expected an id in [0, 512), found 5");
    options.prompt_ids = negative;
    assert_refused(fixture, &options, invalid,
                   "prompt_ids[1]: expected an id in [0, 512), found -1");

    options = nothing;
    options.prompt_text = "";
    assert_refused(fixture, &options, invalid,
                   "prompt: expected at least one token, found an empty text, and the tokenizer of "
                   "builtin:stories260K adds no begin token");
    options.prompt_text = NULL;
    options.prompt_text_bytes = 3;
    assert_refused(fixture, &options, invalid, "prompt_text: expected 3 bytes, found NULL");
    options.prompt_text = "abc";
    options.prompt_text_flags = 8;
    assert_refused(fixture, &options, invalid,
                   "prompt_text_flags: expected bits of 0x3, found 0x8");
    options.prompt_text_flags = 0;
    fixture->model->tokenizer = NULL;
    assert_refused(fixture, &options, invalid, "prompt_text: expected prompt_ids instead, since ");
    fixture->model->tokenizer = fixture->tokenizer;
}

/* Catches: a limit that is off by one, and an end that is put down to the wrong limit. */
static void test_lengths(void **state)
{
    struct fixture *fixture = *state;
    int32_t prompt[101];
    static char text[400];
    for (int32_t i = 0; i < 101; i++) {
        prompt[i] = BOS;
    }
    static const struct {
        int32_t num_prompt_ids, max_tokens, max_output;
        bool is_context_limit;
    } rows[] = {
        {1, 0, 99, true},   {1, 1, 1, false},    {1, 98, 98, false},        {1, 99, 99, false},
        {1, 100, 99, true}, {99, 0, 1, true},    {99, 1, 1, false},         {99, 2, 1, true},
        {2, -1, 0, false},  {100, -1, 0, false}, {50, INT32_MAX, 50, true},
    };
    struct imbrex_request_options options = imbrex_request_options_default(fixture->model);
    options.prompt_ids = prompt;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        options.num_prompt_ids = rows[i].num_prompt_ids;
        options.max_tokens = rows[i].max_tokens;
        struct imbrex_request *request = create(fixture, &options);
        const struct sequence *sequence = &request->choices[0].sequence;
        assert_int_equal(request->max_output, rows[i].max_output);
        assert_int_equal(request->is_context_limit, rows[i].is_context_limit);
        assert_int_equal(sequence->max_tokens, rows[i].num_prompt_ids + rows[i].max_output);
        assert_int_equal(sequence->num_draws, rows[i].max_tokens == IMBREX_NO_TOKENS ? 0 : 1);
        request_free(request);
    }
    options.max_tokens = 1;
    options.num_prompt_ids = 100;
    assert_refused(fixture, &options, IMBREX_STATUS_CAPACITY,
                   "prompt: expected at most 99 tokens (context size 100, 1 left to generate), "
                   "found 100");
    options.max_tokens = IMBREX_NO_TOKENS;
    options.num_prompt_ids = 101;
    assert_refused(fixture, &options, IMBREX_STATUS_CAPACITY,
                   "prompt: expected at most 100 tokens (context size), found 101");
    options.num_prompt_ids = 1;
    assert_refused(fixture, &options, IMBREX_STATUS_INVALID_ARGUMENT,
                   "prompt: expected at least 2 token ids, since max_tokens is -1, found 1");
    memset(text, '\n', sizeof(text));
    options = imbrex_request_options_default(fixture->model);
    options.prompt_text = text;
    options.prompt_text_bytes = sizeof(text);
    assert_refused(fixture, &options, IMBREX_STATUS_CAPACITY, "prompt: expected at most 99 tokens");
}

/* ---- what the scheduler and the batch see ---------------------------------------------------- */

/* Catches: choices that are not what the scheduler must fork them from, or share their room. */
static void test_sequences(void **state)
{
    struct fixture *fixture = *state;
    const int32_t prompt[] = {BOS, 403, 407};
    struct imbrex_request_options options = from_bos(fixture);
    options.prompt_ids = prompt;
    options.num_prompt_ids = 3;
    options.num_choices = 3;
    options.max_tokens = 4;
    options.priority = 17;
    options.num_prompt_logprobs = 0;
    struct imbrex_request *request = create(fixture, &options);
    assert_int_equal(request->num_left, 3);
    assert_int_equal(request->num_started, 0);
    for (int32_t i = 0; i < 3; i++) {
        struct request_choice *choice = &request->choices[i];
        assert_ptr_equal(choice->request, request);
        assert_ptr_equal(choice->sequence.owner, choice);
        assert_int_equal(choice->choice_idx, i);
        assert_int_equal(choice->sequence.state, SEQUENCE_STATE_NEW);
        assert_int_equal(choice->sequence.priority, 17);
        assert_int_equal(choice->sequence.num_prompt_tokens, 3);
        assert_int_equal(choice->sequence.max_tokens, 7);
        assert_int_equal(choice->sequence.num_draws, i == 0 ? 3 : 1);
        assert_int_equal(choice->sequence.score_begin, i == 0 ? 0 : INT32_MAX);
        for (int32_t j = 0; j < 4; j++) {
            choice->output_ids[j] = 4 * i + j;
        }
    }
    for (int32_t i = 0; i < 12; i++) {
        assert_int_equal(request->choices[i / 4].output_ids[i % 4], i);
    }
    request_free(request);
    options.num_prompt_logprobs = -1;
    request = create(fixture, &options);
    assert_int_equal(request->choices[0].sequence.score_begin, INT32_MAX);
    request_free(request);
}

static enum imbrex_finish_reason take(struct fixture *fixture, struct request_choice *choice,
                                      int32_t token_id)
{
    const struct sample_result result = {.token_id = token_id};
    return request_take_token(choice, &result, NULL, 1, &fixture->lock);
}

/* Catches: ids of another choice or position, and an id made up for a token that only the device
 * knows. */
static void test_source_token_ids(void **state)
{
    struct fixture *fixture = *state;
    const int32_t prompt[] = {BOS, 403, 407};
    struct imbrex_request_options options = from_bos(fixture);
    options.prompt_ids = prompt;
    options.num_prompt_ids = 3;
    options.num_choices = 2;
    struct imbrex_request *request = create(fixture, &options);
    take(fixture, &request->choices[0], 410);
    take(fixture, &request->choices[1], 411);
    take(fixture, &request->choices[1], 412);
    static const int32_t expected[2][6] = {{BOS, 403, 407, 410, -1, -1},
                                           {BOS, 403, 407, 411, 412, -1}};
    for (int32_t i = 0; i < 2; i++) {
        for (int32_t position = 0; position < 6; position++) {
            assert_int_equal(request_batch_source.token_id(&request->choices[i].sequence, position),
                             expected[i][position]);
        }
    }
    request_free(request);
}

static struct sample_row ask(const struct request_choice *choice, int32_t position,
                             int32_t num_tokens, int32_t draw_idx, int32_t target_id,
                             struct imbrex_logit_bias *bias)
{
    const struct step_row row = {.position = position, .num_tokens = num_tokens};
    struct sample_row sample_row = {.logits_row = 31,
                                    .slot = 32,
                                    .num_tokens = 33,
                                    .num_prompt_tokens = 34,
                                    .target_id = target_id,
                                    .bias_begin = 35,
                                    .choice_idx = -99,
                                    .num_bias = -99};
    request_batch_source.sample_row(&choice->sequence, &row, draw_idx, &sample_row, bias);
    assert_int_equal(sample_row.logits_row, 31);
    assert_int_equal(sample_row.slot, 32);
    assert_int_equal(sample_row.num_tokens, 33);
    assert_int_equal(sample_row.num_prompt_tokens, 34);
    assert_int_equal(sample_row.target_id, target_id);
    assert_int_equal(sample_row.bias_begin, 35);
    return sample_row;
}

/* Catches: an option that does not reach the sampler, draws of several choices that share a stream
 * or a row of the history, and penalties or biases on a prompt's logprobs. */
static void test_source_sample_rows(void **state)
{
    struct fixture *fixture = *state;
    const int32_t prompt[] = {BOS, 403, 407};
    struct imbrex_logit_bias bias[BATCH_MAX_BIAS];
    const struct imbrex_logit_bias wanted[] = {{8, 2.0f}};
    struct imbrex_request_options options = from_bos(fixture);
    options.prompt_ids = prompt;
    options.num_prompt_ids = 3;
    options.num_choices = 3;
    options.temperature = 0.5f;
    options.top_k = 6;
    options.top_p = 0.75f;
    options.min_p = 0.125f;
    options.repetition_penalty = 1.5f;
    options.frequency_penalty = 0.25f;
    options.presence_penalty = -0.5f;
    options.seed = 0x0123456789abcdefu;
    options.num_logprobs = 4;
    options.num_prompt_logprobs = 2;
    options.logit_bias = wanted;
    options.num_logit_bias = 1;
    struct imbrex_request *request = create(fixture, &options);
    for (int32_t draw_idx = 0; draw_idx < 3; draw_idx++) {
        struct sample_row row = ask(&request->choices[0], 0, 3, draw_idx, -1, bias);
        assert_int_equal(row.choice_idx, draw_idx);
        assert_int_equal(row.is_stored, draw_idx == 0);
        assert_int_equal(row.num_logprobs, 4);
        assert_int_equal(row.num_bias, 1);
        assert_int_equal(bias[0].token_id, 8);
        assert_true(bias[0].bias == 2.0f);
        assert_true(row.temperature == 0.5f && row.top_k == 6 && row.top_p == 0.75f &&
                    row.min_p == 0.125f && row.repetition_penalty == 1.5f &&
                    row.frequency_penalty == 0.25f && row.presence_penalty == -0.5f);
        assert_int_equal(row.seed_low, 0x89abcdefu);
        assert_int_equal(row.seed_high, 0x01234567u);
    }
    struct sample_row row = ask(&request->choices[2], 3, 1, 0, -1, bias);
    assert_int_equal(row.choice_idx, 2);
    assert_int_equal(row.is_stored, 1);
    row = ask(&request->choices[0], 0, 3, 0, 403, bias);
    assert_int_equal(row.num_logprobs, 2);
    assert_int_equal(row.num_bias, 0);
    assert_int_equal(row.is_stored, 0);
    request_free(request);
}

/* Catches: end tokens that are forbidden one token too long or too short, that are counted by what
 * the host knows instead of by position, or that are forbidden although they would not end it. */
static void test_min_tokens(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_logit_bias bias[BATCH_MAX_BIAS];
    const struct imbrex_logit_bias wanted[] = {{8, 2.0f}};
    const int32_t end_ids[] = {9, 9, EOS};
    struct imbrex_request_options options = from_bos(fixture);
    options.logit_bias = wanted;
    options.num_logit_bias = 1;
    options.end_token_ids = end_ids;
    options.num_end_token_ids = 3;
    options.min_tokens = 2;
    struct imbrex_request *request = create(fixture, &options);
    const struct request_choice *choice = &request->choices[0];
    int32_t num_ends = request->num_end_bias;
    assert_int_equal(num_ends, request->num_end_token_ids);
    int32_t num_nines = 0;
    for (int32_t i = 0; i < num_ends; i++) {
        num_nines += request->end_token_ids[i] == 9;
    }
    assert_int_equal(num_nines, 1);
    assert_int_equal(ask(choice, 0, 1, 0, -1, bias).num_bias, 1 + num_ends);
    for (int32_t i = 0; i < num_ends; i++) {
        assert_int_equal(bias[1 + i].token_id, request->end_token_ids[i]);
        assert_true(bias[1 + i].bias == -INFINITY);
    }
    assert_int_equal(ask(choice, 1, 1, 0, -1, bias).num_bias, 1 + num_ends);
    assert_int_equal(ask(choice, 2, 1, 0, -1, bias).num_bias, 1);
    /* Computed again after a preemption: the same draw. */
    assert_int_equal(ask(choice, 0, 2, 0, -1, bias).num_bias, 1 + num_ends);
    assert_int_equal(ask(choice, 0, 3, 0, -1, bias).num_bias, 1);
    request_free(request);
    options.ignore_eos = true;
    request = create(fixture, &options);
    assert_int_equal(request->num_end_token_ids, 0);
    assert_int_equal(ask(&request->choices[0], 0, 1, 0, -1, bias).num_bias, 1);
    request_free(request);
}

/* ---- tokens and events ----------------------------------------------------------------------- */

struct record {
    int32_t token_ids[128];
    char text[4096];
    size_t num_bytes;
    int32_t num_tokens, num_ends, num_last;
    int32_t stop_after; /* answers false at this token; 0: never */
    enum imbrex_finish_reason reason;
    const struct imbrex_request *request;
};

static bool note(struct record *record, const struct imbrex_token_event *event)
{
    assert_int_equal(record->num_last, 0);
    assert_true(record->num_bytes + event->text_bytes < sizeof(record->text));
    memcpy(record->text + record->num_bytes, event->text, event->text_bytes);
    record->num_bytes += event->text_bytes;
    record->num_last += event->is_last;
    if (event->finish_reason != IMBREX_FINISH_REASON_NONE) {
        assert_int_equal(event->token_id, -1);
        record->num_ends++;
        record->reason = event->finish_reason;
        return true;
    }
    record->token_ids[record->num_tokens++] = event->token_id;
    return record->num_tokens != record->stop_after;
}

static bool on_token(void *user, const struct imbrex_token_event *event)
{
    struct record *record = user;
    if (record->request != NULL && event->finish_reason == IMBREX_FINISH_REASON_NONE) {
        assert_int_equal(record->request->metrics.num_generated_tokens, record->num_tokens + 1);
    }
    return note(record, event);
}

/* Gives the ids to choice 0 until it ends, or they do, then ends it. */
static void feed(struct fixture *fixture, const struct imbrex_request_options *options,
                 const int32_t *token_ids, int32_t num_tokens, struct record *record)
{
    struct imbrex_request_options with_callback = *options;
    with_callback.callback = on_token;
    with_callback.user = record;
    struct imbrex_request *request = create(fixture, &with_callback);
    enum imbrex_finish_reason reason = IMBREX_FINISH_REASON_NONE;
    record->request = request;
    for (int32_t i = 0; i < num_tokens && reason == IMBREX_FINISH_REASON_NONE; i++) {
        reason = take(fixture, &request->choices[0], token_ids[i]);
    }
    if (reason == IMBREX_FINISH_REASON_NONE) {
        reason = IMBREX_FINISH_REASON_DEADLINE;
    }
    request_end_choice(&request->choices[0], reason, 2, &fixture->lock);
    assert_int_equal(record->num_ends, 1);
    assert_int_equal(record->num_last, 1);
    assert_int_equal(request->metrics.finish_reason, record->reason);
    assert_int_equal(request->metrics.num_generated_tokens, record->num_tokens);
    assert_int_equal(request->choices[0].finish_reason, record->reason);
    assert_int_equal(request->num_left, 0);
    assert_true(event_queue_is_empty(&request->events));
    request_free(request);
    record->request = NULL;
    record->text[record->num_bytes] = '\0';
}

static int32_t tokenize(const struct fixture *fixture, const char *text, int32_t *token_ids)
{
    int32_t *ids = NULL;
    size_t num_ids;
    assert_int_equal(
        imbrex_tokenize(fixture->tokenizer, text, strlen(text), 0, &ids, &num_ids, NULL),
        IMBREX_STATUS_OK);
    assert_true(num_ids <= 90);
    memcpy(token_ids, ids, num_ids * sizeof(*ids));
    imbrex_free(ids);
    return (int32_t)num_ids;
}

/* Catches: text that is lost or doubled between events, and a first space that is dropped as if a
 * text began there. */
static void test_text(void **state)
{
    struct fixture *fixture = *state;
    int32_t ids[96];
    struct record from_begin = {0}, continued = {0};
    int32_t num_ids = tokenize(fixture, "Once upon a time, caf\xc3\xa9 \xe2\x82\xac", ids);
    struct imbrex_request_options options = from_bos(fixture);
    feed(fixture, &options, ids, num_ids, &from_begin);
    assert_string_equal(from_begin.text, "Once upon a time, caf\xc3\xa9 \xe2\x82\xac");
    assert_int_equal(from_begin.num_tokens, num_ids);
    assert_memory_equal(from_begin.token_ids, ids, (size_t)num_ids * sizeof(*ids));
    assert_int_equal(from_begin.reason, IMBREX_FINISH_REASON_DEADLINE);

    options = imbrex_request_options_default(fixture->model);
    options.prompt_text = "Once upon";
    options.prompt_text_bytes = 9;
    options.prompt_text_flags = IMBREX_TOKENIZE_ADD_SPECIAL;
    num_ids = tokenize(fixture, "a time", ids);
    feed(fixture, &options, ids, num_ids, &continued);
    assert_string_equal(continued.text, " a time");
}

/* Catches: choices whose detokenizers did not see the prompt, or share their state. */
static void test_text_of_choices(void **state)
{
    struct fixture *fixture = *state;
    /* The prompt ends inside the euro sign. */
    const int32_t prompt[] = {BOS, BYTE_ID(0xe2), BYTE_ID(0x82)};
    struct imbrex_request_options options = from_bos(fixture);
    struct imbrex_token_event event;
    options.prompt_ids = prompt;
    options.num_prompt_ids = 3;
    options.num_choices = 3;
    struct imbrex_request *request = create(fixture, &options);
    for (int32_t i = 2; i >= 0; i--) {
        assert_int_equal(take(fixture, &request->choices[i], BYTE_ID(0xaa + i)), 0);
        assert_true(event_queue_pop(&request->events, &event));
        assert_int_equal(event.choice_idx, i);
        assert_int_equal(event.token_id, BYTE_ID(0xaa + i));
        assert_int_equal(event.text_bytes, 3);
        const char expected[] = {'\xe2', '\x82', (char)(0xaa + i)};
        assert_memory_equal(event.text, expected, 3);
    }
    request_free(request);
}

/* Catches: stop strings that leak, also in part or at the very end, text that is lost before them,
 * and a stop that is taken for another reason. */
static void test_stop_strings(void **state)
{
    struct fixture *fixture = *state;
    int32_t ids[96];
    const char *const stops[] = {"never seen", "time, th"};
    struct record stopped = {0}, held = {0}, flushed = {0}, refused = {.stop_after = 1};
    struct imbrex_request_options options = from_bos(fixture);
    int32_t num_ids = tokenize(fixture, "Once upon a time, there was", ids);
    options.stop = stops;
    options.num_stop = 2;
    feed(fixture, &options, ids, num_ids, &stopped);
    assert_int_equal(stopped.reason, IMBREX_FINISH_REASON_STOP_STRING);
    assert_string_equal(stopped.text, "Once upon a ");

    /* "was" could still become "wasp" when the tokens run out. */
    const char *const longer[] = {"there wasp"};
    options.stop = longer;
    options.num_stop = 1;
    feed(fixture, &options, ids, num_ids, &held);
    assert_int_equal(held.reason, IMBREX_FINISH_REASON_DEADLINE);
    assert_string_equal(held.text, "Once upon a time, there was");

    /* Only the end makes U+FFFD of a cut character. */
    const char *const replacement[] = {"\xef\xbf\xbd"};
    const int32_t cut[] = {BYTE_ID('a'), BYTE_ID(0xe2)};
    options.stop = replacement;
    feed(fixture, &options, cut, 2, &flushed);
    assert_int_equal(flushed.reason, IMBREX_FINISH_REASON_STOP_STRING);
    assert_string_equal(flushed.text, "a");

    /* A stop string comes before the callback's answer, an end token and the last position. */
    const char *const letter[] = {"a"};
    const int32_t end_id = BYTE_ID('a');
    options.stop = letter;
    options.max_tokens = 1;
    options.end_token_ids = &end_id;
    options.num_end_token_ids = 1;
    feed(fixture, &options, &end_id, 1, &refused);
    assert_int_equal(refused.reason, IMBREX_FINISH_REASON_STOP_STRING);
    assert_string_equal(refused.text, "");
}

/* Catches: reasons in another order than CANCELLED, EOS, LENGTH or CONTEXT, an end token that does
 * not end, ends a token late or although it is ignored. */
static void test_order_of_reasons(void **state)
{
    struct fixture *fixture = *state;
    const int32_t end_id = 9;
    const int32_t ids[] = {403, 407, 9};
    struct imbrex_request_options options = from_bos(fixture);
    options.end_token_ids = &end_id;
    options.num_end_token_ids = 1;
    options.max_tokens = 3;
    struct record cancelled = {.stop_after = 3}, ended = {0}, full = {0}, no_room = {0};
    feed(fixture, &options, ids, 3, &cancelled);
    assert_int_equal(cancelled.reason, IMBREX_FINISH_REASON_CANCELLED);
    feed(fixture, &options, ids, 3, &ended);
    assert_int_equal(ended.reason, IMBREX_FINISH_REASON_EOS);
    assert_int_equal(ended.num_tokens, 3);
    options.ignore_eos = true;
    feed(fixture, &options, ids, 3, &full);
    assert_int_equal(full.reason, IMBREX_FINISH_REASON_LENGTH);
    options.max_tokens = 4;
    fixture->limits.context_size = 4;
    feed(fixture, &options, ids, 3, &no_room);
    fixture->limits.context_size = 100;
    assert_int_equal(no_room.reason, IMBREX_FINISH_REASON_CONTEXT);
    assert_int_equal(no_room.num_tokens, 3);
}

/* Catches: the model's own end tokens forgotten, ids that cannot be drawn kept among them. */
static void test_end_tokens_of_the_model(void **state)
{
    struct fixture *fixture = *state;
    struct generation_config saved = fixture->model->generation_config;
    struct imbrex_request_options options = from_bos(fixture);
    fixture->model->generation_config.num_eos_token_ids = 3;
    fixture->model->generation_config.eos_token_ids[0] = EOS;
    fixture->model->generation_config.eos_token_ids[1] = VOCAB_SIZE + 5;
    fixture->model->generation_config.eos_token_ids[2] = 77;
    options.min_tokens = 1;
    struct imbrex_request *request = create(fixture, &options);
    fixture->model->generation_config = saved;
    assert_int_equal(request->num_end_token_ids, 2);
    assert_int_equal(request->num_end_bias, 2);
    assert_true(request_is_end_token(request, EOS));
    assert_true(request_is_end_token(request, 77));
    assert_false(request_is_end_token(request, VOCAB_SIZE + 5));
    assert_int_equal(take(fixture, &request->choices[0], 77), IMBREX_FINISH_REASON_EOS);
    request_free(request);
}

/* Catches: an answer of false that ends its own choice only, or is forgotten beside a stop
 * string. */
static void test_cancel_by_answer(void **state)
{
    struct fixture *fixture = *state;
    struct record record = {.stop_after = 1};
    const char *const stops[] = {"a"};
    struct imbrex_request_options options = from_bos(fixture);
    options.callback = on_token;
    options.user = &record;
    options.num_choices = 2;
    struct imbrex_request *request = create(fixture, &options);
    assert_int_equal(take(fixture, &request->choices[1], 403), IMBREX_FINISH_REASON_CANCELLED);
    assert_true(atomic_load(&request->is_cancelled));
    request_free(request);
    record = (struct record){.stop_after = 1};
    options.stop = stops;
    options.num_stop = 1;
    request = create(fixture, &options);
    assert_int_equal(take(fixture, &request->choices[1], BYTE_ID('a')),
                     IMBREX_FINISH_REASON_STOP_STRING);
    assert_true(atomic_load(&request->is_cancelled));
    request_free(request);
}

/* Catches: a last event that is announced too early, twice or never, ends under another choice's
 * number, and the reason of another choice in the metrics. */
static void test_last_event(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_token_event event;
    struct imbrex_request_options options = from_bos(fixture);
    options.num_choices = 3;
    struct imbrex_request *request = create(fixture, &options);
    static const int32_t order[] = {2, 0, 1};
    static const enum imbrex_finish_reason reasons[] = {
        IMBREX_FINISH_REASON_EOS, IMBREX_FINISH_REASON_CANCELLED, IMBREX_FINISH_REASON_LENGTH};
    for (int32_t i = 0; i < 3; i++) {
        request_end_choice(&request->choices[order[i]], reasons[i], 50 + i, &fixture->lock);
        assert_int_equal(request->num_left, 2 - i);
        assert_int_equal(request->end_ns, i == 2 ? 52 : 0);
    }
    for (int32_t i = 0; i < 3; i++) {
        assert_true(event_queue_pop(&request->events, &event));
        assert_int_equal(event.choice_idx, order[i]);
        assert_int_equal(event.token_id, -1);
        assert_int_equal(event.text_bytes, 0);
        assert_int_equal(event.finish_reason, reasons[i]);
        assert_int_equal(event.is_last, i == 2);
    }
    assert_true(event_queue_is_empty(&request->events));
    assert_int_equal(request->metrics.finish_reason, IMBREX_FINISH_REASON_CANCELLED);
    request_free(request);
}

/* Catches: an end that tells an error as if it were a stop string, or keeps held text back. */
static void test_end_by_error(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_token_event event;
    const char *const replacement[] = {"\xef\xbf\xbd"};
    struct imbrex_request_options options = from_bos(fixture);
    options.stop = replacement;
    options.num_stop = 1;
    struct imbrex_request *request = create(fixture, &options);
    take(fixture, &request->choices[0], BYTE_ID(0xe2));
    request_end_choice(&request->choices[0], IMBREX_FINISH_REASON_ERROR, 1, &fixture->lock);
    assert_true(event_queue_pop(&request->events, &event));
    assert_true(event_queue_pop(&request->events, &event));
    assert_int_equal(event.finish_reason, IMBREX_FINISH_REASON_ERROR);
    assert_int_equal(event.text_bytes, 0);
    request_free(request);
}

/* Catches: times and counts of one choice that are taken from another, and a time to the first
 * token that moves on. */
static void test_times(void **state)
{
    struct fixture *fixture = *state;
    const struct sample_result result = {.token_id = 403};
    struct imbrex_request_options options = from_bos(fixture);
    options.num_choices = 2;
    struct imbrex_request *request = create(fixture, &options);
    request->submit_ns = 1000;
    request_take_token(&request->choices[0], &result, NULL, 1500, &fixture->lock);
    request_take_token(&request->choices[1], &result, NULL, 1600, &fixture->lock);
    request_take_token(&request->choices[0], &result, NULL, 1700, &fixture->lock);
    assert_int_equal(request->first_token_ns, 1500);
    assert_int_equal(request->metrics.ttft_ns, 500);
    assert_int_equal(request->metrics.num_generated_tokens, 3);
    assert_int_equal(request->choices[0].last_token_ns, 1700);
    assert_int_equal(request->choices[1].last_token_ns, 1600);
    assert_int_equal(request->choices[0].num_output, 2);
    assert_int_equal(request->end_ns, 0);
    request_free(request);
}

/* Catches: text made although nobody wants it, or by a model that has none. */
static void test_no_text(void **state)
{
    struct fixture *fixture = *state;
    const int32_t ids[] = {403, 407, BYTE_ID(0xe2)};
    struct record unwanted = {0}, impossible = {0};
    struct imbrex_request_options options = from_bos(fixture);
    options.no_text = true;
    options.max_tokens = 3;
    feed(fixture, &options, ids, 3, &unwanted);
    assert_string_equal(unwanted.text, "");
    assert_int_equal(unwanted.reason, IMBREX_FINISH_REASON_LENGTH);
    options.no_text = false;
    fixture->model->tokenizer = NULL;
    feed(fixture, &options, ids, 3, &impossible);
    fixture->model->tokenizer = fixture->tokenizer;
    assert_string_equal(impossible.text, "");
    assert_int_equal(impossible.num_tokens, 3);
}

/* ---- logprobs -------------------------------------------------------------------------------- */

/* Catches: logprobs that were not asked for, more alternatives than were, or none. */
static void test_logprobs(void **state)
{
    struct fixture *fixture = *state;
    const struct imbrex_logprob top[] = {{407, -0.25f}, {403, -1.5f}, {9, -3.0f}};
    const struct sample_result result = {.token_id = 403, .logprob = -1.5f, .num_top = 3};
    for (int32_t num_logprobs = -1; num_logprobs < 5; num_logprobs++) {
        struct imbrex_token_event event;
        struct imbrex_request_options options = from_bos(fixture);
        options.num_logprobs = num_logprobs;
        struct imbrex_request *request = create(fixture, &options);
        request_take_token(&request->choices[0], &result, top, 1, &fixture->lock);
        assert_true(event_queue_pop(&request->events, &event));
        int32_t expected = num_logprobs < 0 ? 0 : num_logprobs > 3 ? 3 : num_logprobs;
        assert_int_equal(event.num_top_logprobs, expected);
        assert_true(event.logprob == (num_logprobs < 0 ? 0.0f : -1.5f));
        for (int32_t i = 0; i < expected; i++) {
            assert_int_equal(event.top_logprobs[i].token_id, top[i].token_id);
            assert_true(event.top_logprobs[i].logprob == top[i].logprob);
        }
        request_free(request);
    }
}

/* Catches: logprobs of a chunk that land on other positions, rows of other widths than asked for,
 * and a prompt that is called complete too early or never. */
static void test_prompt_logprobs(void **state)
{
    struct fixture *fixture = *state;
    const int32_t prompt[] = {BOS, 403, 407, 9};
    struct imbrex_request_options options = from_bos(fixture);
    options.prompt_ids = prompt;
    options.num_prompt_ids = 4;
    options.num_prompt_logprobs = 2;
    options.max_tokens = IMBREX_NO_TOKENS;
    struct imbrex_request *request = create(fixture, &options);
    const struct sample_result results[] = {{403, -1.0f, 3}, {407, -2.0f, 1}, {9, -3.0f, 0}};
    const struct imbrex_logprob top[3][3] = {
        {{10, -0.1f}, {11, -0.2f}, {12, -0.3f}}, {{20, -0.4f}}, {{30, -0.5f}}};
    assert_false(request->has_prompt_logprobs);
    assert_true(request_take_prompt_logprobs(request, 1, results, top[0], 3, 2));
    assert_false(request->has_prompt_logprobs);
    assert_true(request_take_prompt_logprobs(request, 3, results + 2, top[2], 3, 1));
    assert_true(request->has_prompt_logprobs);
    static const float expected[] = {0.0f, -1.0f, -2.0f, -3.0f};
    static const int32_t expected_ids[] = {-1, -1, 10, 11, 20, -1, -1, -1};
    static const float expected_top[] = {0.0f, 0.0f, -0.1f, -0.2f, -0.4f, 0.0f, 0.0f, 0.0f};
    for (int32_t i = 0; i < 4; i++) {
        assert_true(request->prompt_logprobs[i] == expected[i]);
    }
    for (int32_t i = 0; i < 8; i++) {
        assert_int_equal(request->top_prompt_logprobs[i].token_id, expected_ids[i]);
        assert_true(request->top_prompt_logprobs[i].logprob == expected_top[i]);
    }
    request_free(request);

    const struct sample_result bad[] = {{403, -1.0f, 0}, {-1, 0.0f, 0}};
    options.num_prompt_logprobs = 0;
    request = create(fixture, &options);
    assert_null(request->top_prompt_logprobs);
    assert_false(request_take_prompt_logprobs(request, 1, bad, NULL, 0, 2));
    assert_false(request->has_prompt_logprobs);
    request_free(request);

    /* Nothing to wait for. */
    options = from_bos(fixture);
    options.num_prompt_logprobs = 0;
    request = create(fixture, &options);
    assert_true(request->has_prompt_logprobs);
    assert_true(request->prompt_logprobs[0] == 0.0f);
    request_free(request);
}

int run_request_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_numbers),   cmocka_unit_test(test_priority_of_long_steps),
        cmocka_unit_test(test_accepted_numbers),  cmocka_unit_test(test_refused_arrays),
        cmocka_unit_test(test_all_ids_forbidden), cmocka_unit_test(test_options_are_copied),
        cmocka_unit_test(test_prompt_text),       cmocka_unit_test(test_refused_prompts),
        cmocka_unit_test(test_lengths),           cmocka_unit_test(test_sequences),
        cmocka_unit_test(test_source_token_ids),  cmocka_unit_test(test_source_sample_rows),
        cmocka_unit_test(test_min_tokens),        cmocka_unit_test(test_text),
        cmocka_unit_test(test_text_of_choices),   cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_order_of_reasons),  cmocka_unit_test(test_end_tokens_of_the_model),
        cmocka_unit_test(test_cancel_by_answer),  cmocka_unit_test(test_last_event),
        cmocka_unit_test(test_end_by_error),      cmocka_unit_test(test_times),
        cmocka_unit_test(test_no_text),           cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_prompt_logprobs),
    };
    return cmocka_run_group_tests_name("request", tests, set_up, tear_down);
}
