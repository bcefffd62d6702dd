/* SPDX-License-Identifier: Apache-2.0 */
/* A prompt is measured from its submission to its first token, which is when its logits are known;
 * generating, from the first token of a request to its last. The context of a test with a depth
 * comes out of the prefix cache, so that a repetition does not compute it again. */
#include "cli/speed_run.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/signals.h"

const char *speed_test_name(const struct speed_test *test, char name[SPEED_TEST_NAME_BYTES])
{
    int length = snprintf(name, SPEED_TEST_NAME_BYTES, "%s%" PRId32, test->is_prompt ? "pp" : "tg",
                          test->num_tokens);

    if (test->depth > 0) {
        snprintf(name + length, SPEED_TEST_NAME_BYTES - (size_t)length, " @ d%" PRId32,
                 test->depth);
    }
    return name;
}

/* ---- work ------------------------------------------------------------------------------------ */

static bool is_embedding(const struct imbrex_tensor_info *tensor)
{
    return strcmp(tensor->name, "model.embed_tokens.weight") == 0 ||
           strcmp(tensor->name, "token_embd.weight") == 0;
}

/* A table that is no lm_head too is not read: but for a row of each token. */
static size_t unread_bytes(const struct imbrex_model *model, const struct imbrex_model_info *info)
{
    struct imbrex_tensor_info tensor;

    for (int32_t i = 0; i < imbrex_model_num_tensors(model) && !info->tied; i++) {
        if (imbrex_model_tensor(model, i, &tensor) == IMBREX_STATUS_OK && is_embedding(&tensor)) {
            return tensor.num_bytes;
        }
    }
    return 0;
}

/* Keys that `count` tokens from position `first` on attend to, in all. */
static double num_keys(double first, double count, int32_t window)
{
    double all = count * first + count * (count + 1.0) / 2.0;
    double sliding = 0.0;

    if (window == 0 || first + count <= window) {
        return all;
    }
    for (double i = 1.0; i <= count; i += 1.0) {
        sliding += fmin(first + i, window);
    }
    return sliding;
}

struct speed_work speed_work_of(const struct imbrex_model *model, const struct speed_test *test)
{
    struct imbrex_model_info info;
    double count = test->num_tokens, depth = test->depth;

    imbrex_model_describe(model, &info);
    double q_size = (double)info.num_heads * info.head_dim;
    double kv_size = (double)info.num_kv_heads * info.head_dim;
    double layer_weights =
        info.hidden_size * (2.0 * q_size + 2.0 * kv_size + 3.0 * info.intermediate_size);
    double num_full = info.num_layers - info.num_sliding_layers;
    double keys = num_full * num_keys(depth, count, 0) +
                  info.num_sliding_layers * num_keys(depth, count, info.sliding_window);
    double num_logit_rows = test->is_prompt ? 1.0 : count;
    double kv_layer_bytes = (double)info.kv_bytes_per_token / info.num_layers;

    return (struct speed_work){
        .flops = 2.0 * count * info.num_layers * layer_weights + 4.0 * q_size * keys +
                 2.0 * num_logit_rows * info.hidden_size * info.vocab_size,
        .bytes = count * (double)(info.weight_bytes - unread_bytes(model, &info)) +
                 keys * kv_layer_bytes,
    };
}

/* ---- samples --------------------------------------------------------------------------------- */

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void speed_random_ids(uint64_t *state, int32_t vocab_size, int32_t *token_ids, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        /* Source: PCG, M. O'Neill 2014; its multiplier, the high bits of each state. */
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        token_ids[i] = (int32_t)((*state >> 33) % (uint64_t)vocab_size);
    }
}

struct token_times {
    int64_t first_ns, last_ns;
    int32_t num_tokens;
};

static bool note_token(void *user, const struct imbrex_token_event *event)
{
    struct token_times *times = user;

    if (event->token_id >= 0) {
        times->last_ns = now_ns();
        times->first_ns = times->num_tokens == 0 ? times->last_ns : times->first_ns;
        times->num_tokens++;
    }
    return signals_interrupt() == 0;
}

struct request_shape {
    const int32_t *prompt_ids; /* [num_prompt_ids] */
    int32_t num_prompt_ids, num_output_tokens;
};

/* Submits, waits, and tells when it began and its tokens came. */
static int run_request(const struct speed_settings *settings, const struct request_shape *shape,
                       int64_t *begin_ns, struct token_times *times, int32_t *num_cached_tokens)
{
    struct imbrex_request_options options = imbrex_request_options_default(settings->model);
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct imbrex_request_metrics metrics;
    struct imbrex_request *request = NULL;

    *times = (struct token_times){.num_tokens = 0};
    options.prompt_ids = shape->prompt_ids;
    options.num_prompt_ids = shape->num_prompt_ids;
    options.max_tokens = shape->num_output_tokens;
    options.temperature = 0.0f;
    options.repetition_penalty = 1.0f;
    options.ignore_eos = true;
    options.no_text = true;
    options.callback = note_token;
    options.user = times;
    *begin_ns = now_ns();
    enum imbrex_status status = imbrex_request_submit(settings->engine, &options, &request, &err);
    if (status == IMBREX_STATUS_OK) {
        status = imbrex_request_wait(request, &err);
        imbrex_request_read_metrics(request, &metrics);
        *num_cached_tokens = metrics.num_cached_tokens;
    }
    imbrex_request_destroy(request);
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}

/* What was asked for was measured: a prefix that was computed again would make it slower. */
static int check_request(const struct request_shape *shape, const struct token_times *times,
                         int32_t num_cached_tokens, int32_t least_cached_tokens)
{
    if (signals_interrupt() != 0) {
        return EXIT_CODE_OK;
    }
    if (times->num_tokens != shape->num_output_tokens || num_cached_tokens < least_cached_tokens) {
        output_error("bench model: expected %" PRId32 " tokens behind %" PRId32
                     " cached ones, found %" PRId32 " behind %" PRId32,
                     shape->num_output_tokens, least_cached_tokens, times->num_tokens,
                     num_cached_tokens);
        return EXIT_CODE_FAILURE;
    }
    return EXIT_CODE_OK;
}

/* One sample of `test`; *ids has room for depth and prompt, the prefix in front. */
static int take_sample(const struct speed_settings *settings, const struct speed_test *test,
                       uint64_t *random_state, int32_t *ids, int64_t *sample_ns)
{
    struct token_times times;
    int64_t begin_ns;
    int32_t num_cached_tokens = 0;
    /* A generated token needs one before it. */
    int32_t num_prompt_ids = test->depth + (test->is_prompt ? test->num_tokens : test->depth == 0);
    struct request_shape shape = {ids, num_prompt_ids, test->is_prompt ? 1 : test->num_tokens + 1};

    speed_random_ids(random_state, settings->vocab_size, ids + test->depth,
                     num_prompt_ids - test->depth);
    int exit_code = run_request(settings, &shape, &begin_ns, &times, &num_cached_tokens);
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            check_request(&shape, &times, num_cached_tokens, test->is_prompt ? test->depth : 0);
    }
    *sample_ns = test->is_prompt ? times.first_ns - begin_ns : times.last_ns - times.first_ns;
    return exit_code;
}

/* The prefix into the cache, and a short test that nobody looks at. */
static int prepare(const struct speed_settings *settings, const struct speed_test *test,
                   uint64_t *random_state, int32_t *ids)
{
    struct speed_test warmup = *test;
    struct token_times times;
    int64_t ignored_ns;
    int32_t ignored;
    int exit_code = EXIT_CODE_OK;

    if (test->depth > 0) {
        struct request_shape prefix = {ids, test->depth, 1};
        exit_code = run_request(settings, &prefix, &ignored_ns, &times, &ignored);
    }
    if (exit_code != EXIT_CODE_OK || !settings->has_warmup || signals_interrupt() != 0) {
        return exit_code;
    }
    warmup.num_tokens = test->is_prompt ? test->num_tokens : 1;
    return take_sample(settings, &warmup, random_state, ids, &ignored_ns);
}

/* ---- figures --------------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof(*values), compare_doubles);
    return count % 2 == 1 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2.0;
}

static double rate_of(const struct speed_result *result, int32_t sample, double amount)
{
    return amount * 1e9 / (double)result->samples_ns[sample];
}

static int summarize(struct speed_result *result)
{
    int32_t count = result->num_samples;
    double *rates = calloc((size_t)(count > 0 ? count : 1), sizeof(*rates));
    double sum = 0.0, squares = 0.0;

    if (rates == NULL) {
        output_error("out of memory");
        return EXIT_CODE_FAILURE;
    }
    for (int32_t i = 0; i < count; i++) {
        rates[i] = rate_of(result, i, result->test.num_tokens);
        sum += rates[i];
    }
    result->mean_rate = count > 0 ? sum / count : 0.0;
    for (int32_t i = 0; i < count; i++) {
        squares += (rates[i] - result->mean_rate) * (rates[i] - result->mean_rate);
    }
    result->rate_deviation = count > 1 ? sqrt(squares / (count - 1)) : 0.0;
    result->median_rate = count > 0 ? median_of(rates, count) : 0.0;
    double amount = result->test.is_prompt ? result->work.flops : result->work.bytes;
    for (int32_t i = 0; i < count; i++) {
        double roof = result->roof_rates[i];
        rates[i] = roof > 0.0 ? 100.0 * rate_of(result, i, amount) / roof : 0.0;
    }
    result->roof_percent = count > 0 ? median_of(rates, count) : 0.0;
    free(rates);
    return EXIT_CODE_OK;
}

/* The best of two: a neighbour of the machine lowers one rather than both. */
static double measure_roof(const struct speed_settings *settings, enum roof_kind kind)
{
    double first = 0.0, second = 0.0;

    if (settings->roofs != NULL) {
        first = roofs_measure(settings->roofs, kind);
        second = roofs_measure(settings->roofs, kind);
    }
    return fmax(first, second);
}

int speed_run(const struct speed_settings *settings, const struct speed_test *test,
              struct speed_result *result)
{
    struct imbrex_memory_plan plan;
    size_t num_samples = (size_t)settings->num_samples;
    size_t num_ids = (size_t)test->depth + (size_t)test->num_tokens + 1;
    int32_t *ids = calloc(num_ids, sizeof(*ids));
    uint64_t random_state = 1;

    imbrex_engine_memory_plan(settings->engine, &plan);
    *result = (struct speed_result){
        .test = *test,
        .num_threads = plan.num_threads,
        .kernels = plan.kernels,
        .samples_ns = calloc(num_samples, sizeof(*result->samples_ns)),
        .roof_rates = calloc(num_samples, sizeof(*result->roof_rates)),
        .roof = test->is_prompt ? settings->prompt_roof : ROOF_KIND_READ,
        .work = speed_work_of(settings->model, test),
    };
    if (ids == NULL || result->samples_ns == NULL || result->roof_rates == NULL) {
        output_error("out of memory");
        free(ids);
        return EXIT_CODE_FAILURE;
    }
    memcpy(ids, settings->prefix_ids, (size_t)test->depth * sizeof(*ids));
    int exit_code = prepare(settings, test, &random_state, ids);
    while (exit_code == EXIT_CODE_OK && result->num_samples < settings->num_samples &&
           signals_interrupt() == 0) {
        int32_t sample = result->num_samples;
        result->roof_rates[sample] = measure_roof(settings, result->roof);
        exit_code = take_sample(settings, test, &random_state, ids, &result->samples_ns[sample]);
        result->num_samples += exit_code == EXIT_CODE_OK && signals_interrupt() == 0;
    }
    free(ids);
    return exit_code == EXIT_CODE_OK ? summarize(result) : exit_code;
}

void speed_result_release(struct speed_result *result)
{
    free(result->samples_ns);
    free(result->roof_rates);
    *result = (struct speed_result){.num_samples = 0};
}
