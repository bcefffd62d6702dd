/* SPDX-License-Identifier: Apache-2.0 */
/* A prompt is measured from its submission to its first token, which is when its logits are known;
 * generating, over whole steps: from the first step that all sequences have a token of. The context
 * of a test with a depth comes out of the prefix cache, so that a repetition does not compute it
 * again; each sequence has its own. */
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

#define WARMUP_STEPS_GPU 8 /* a graph is captured when its batch is first met */

const char *speed_test_name(const struct speed_test *test, char name[SPEED_TEST_NAME_BYTES])
{
    char batch[24] = "", depth[24] = "";

    if (test->batch > 1) {
        snprintf(batch, sizeof(batch), " x%" PRId32, test->batch);
    }
    if (test->depth > 0) {
        snprintf(depth, sizeof(depth), " @ d%" PRId32, test->depth);
    }
    snprintf(name, SPEED_TEST_NAME_BYTES, "%s%" PRId32 "%s%s", test->is_prompt ? "pp" : "tg",
             test->num_tokens, batch, depth);
    return name;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

/* Tokens that the first of several sequences may generate until the last one does. What the prefix
 * cache has not, a block at most, is read in steps that all of them share; and in one step only as
 * many begin as it may take contexts of out of the cache, one at least. */
static int32_t lead_tokens(const struct speed_test *test, int32_t max_step_tokens)
{
    const int64_t block_tokens = 16;
    int64_t step_tokens = max_step_tokens > 2 * test->batch ? max_step_tokens - test->batch : 1;

    if (test->is_prompt || test->batch == 1) {
        return 0;
    }
    int64_t num_cached = (int64_t)IMBREX_STEP_CACHED_TOKENS * max_step_tokens;
    int64_t num_begin = test->depth == 0            ? test->batch
                        : num_cached >= test->depth ? num_cached / test->depth
                                                    : 1;
    return (int32_t)(test->batch * block_tokens / step_tokens + 3 +
                     (test->batch + num_begin - 1) / num_begin);
}

static int32_t num_prompt_tokens(const struct speed_test *test)
{
    /* A generated token needs one before it. */
    return test->depth + (test->is_prompt ? test->num_tokens : test->depth == 0);
}

/* The first one's time does not count. */
static int32_t num_output_tokens(const struct speed_test *test, int32_t max_step_tokens)
{
    return test->is_prompt ? 1 : test->num_tokens + 1 + lead_tokens(test, max_step_tokens);
}

int32_t speed_context_tokens(const struct speed_test *test, int32_t max_step_tokens)
{
    return num_prompt_tokens(test) + num_output_tokens(test, max_step_tokens);
}

int64_t speed_kv_tokens(const struct speed_test *test, int32_t max_step_tokens)
{
    int64_t context = speed_context_tokens(test, max_step_tokens);
    /* Two blocks for what is cut at their edges. */
    return test->batch * (2 * context - test->depth + (test->batch > 1 ? 32 : 0));
}

/* ---- work ------------------------------------------------------------------------------------ */

static bool is_embedding(const struct imbrex_tensor_info *tensor)
{
    return strcmp(tensor->name, "model.embed_tokens.weight") == 0 ||
           strcmp(tensor->name, "token_embd.weight") == 0;
}

/* The table that is no lm_head too is not read, but for a row of each token; false: there is none.
 */
static bool find_unread(const struct imbrex_model *model, const struct imbrex_model_info *info,
                        struct imbrex_tensor_info *tensor)
{
    for (int32_t i = 0; i < imbrex_model_num_tensors(model) && !info->tied; i++) {
        if (imbrex_model_tensor(model, i, tensor) == IMBREX_STATUS_OK && is_embedding(tensor)) {
            return true;
        }
    }
    return false;
}

static bool is_on_gpu(const struct imbrex_memory_plan *plan)
{
    return strcmp(plan->device, "cpu") != 0;
}

static double element_bytes(const struct imbrex_memory_plan *plan)
{
    return strcmp(plan->compute, "BF16") == 0 ? 2.0 : 4.0;
}

/* Of weights, in a step. A GPU has copies of its own, all of one type. */
static double step_weight_bytes(const struct imbrex_model *model,
                                const struct imbrex_model_info *info,
                                const struct imbrex_memory_plan *plan)
{
    struct imbrex_tensor_info table;
    bool has_unread = find_unread(model, info, &table);

    if (!is_on_gpu(plan)) {
        return (double)(info->weight_bytes - (has_unread ? table.num_bytes : 0));
    }
    double num_unread = has_unread ? (double)info->vocab_size * info->hidden_size : 0.0;
    return ((double)info->num_parameters - num_unread) * element_bytes(plan);
}

/* K and V of a token in one layer. */
static double kv_layer_bytes(const struct imbrex_model_info *info,
                             const struct imbrex_memory_plan *plan)
{
    return (double)plan->kv_token_bytes / info->num_layers;
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

struct speed_work speed_work_of(const struct imbrex_model *model,
                                const struct imbrex_memory_plan *plan,
                                const struct speed_test *test, double depth)
{
    struct imbrex_model_info info;
    double count = test->num_tokens, batch = test->batch;

    imbrex_model_describe(model, &info);
    double q_size = (double)info.num_heads * info.head_dim;
    double kv_size = (double)info.num_kv_heads * info.head_dim;
    double layer_weights =
        info.hidden_size * (2.0 * q_size + 2.0 * kv_size + 3.0 * info.intermediate_size);
    double num_full = info.num_layers - info.num_sliding_layers;
    double keys = num_full * num_keys(depth, count, 0) +
                  info.num_sliding_layers * num_keys(depth, count, info.sliding_window);
    double num_logit_rows = test->is_prompt ? 1.0 : count;

    return (struct speed_work){
        .flops = batch * (2.0 * count * info.num_layers * layer_weights + 4.0 * q_size * keys +
                          2.0 * num_logit_rows * info.hidden_size * info.vocab_size),
        .bytes = count * step_weight_bytes(model, &info, plan) +
                 batch * keys * kv_layer_bytes(&info, plan),
    };
}

/* ---- samples --------------------------------------------------------------------------------- */

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void speed_random_ids(uint64_t *state, int32_t vocab_size, int32_t *token_ids, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        /* Source: PCG, M. O'Neill 2014; its multiplier, the high bits of each state. */
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        token_ids[i] = (int32_t)((*state >> 33) % (uint64_t)vocab_size);
    }
}

/* One request and when its tokens came. */
struct sequence {
    int32_t *prompt_ids; /* [num_prompt_tokens of the test], the prefix in front */
    struct imbrex_request *request;
    int64_t *token_ns; /* [num_token_ns] room for all; NULL: only the first counts */
    int64_t first_ns;
    int32_t num_token_ns, num_tokens, num_cached_tokens;
    struct gpu_meter *meter; /* asked with each token, or NULL */
};

/* What all samples of a test work on. */
struct speed_runner {
    const struct speed_settings *settings;
    const struct speed_test *test;
    struct sequence *sequences; /* [test->batch] */
    int64_t *token_ns;          /* [num_output], of the first sequence */
    int32_t num_output;
    uint64_t random_state;
};

static bool note_token(void *user, const struct imbrex_token_event *event)
{
    struct sequence *sequence = user;

    if (event->token_id >= 0) {
        int64_t now = now_ns();
        sequence->first_ns = sequence->num_tokens == 0 ? now : sequence->first_ns;
        if (sequence->num_tokens < sequence->num_token_ns) {
            sequence->token_ns[sequence->num_tokens] = now;
        }
        sequence->num_tokens++;
    }
#if IMBREX_CUDA
    if (sequence->meter != NULL) {
        gpu_meter_sample(sequence->meter);
    }
#endif
    return signals_interrupt() == 0;
}

static enum imbrex_status submit(const struct speed_runner *runner, struct imbrex_engine *engine,
                                 int32_t num_prompt_ids, int32_t num_output,
                                 struct sequence *sequence, struct imbrex_error *err)
{
    struct imbrex_request_options options = imbrex_request_options_default(runner->settings->model);

    sequence->num_tokens = 0;
    options.prompt_ids = sequence->prompt_ids;
    options.num_prompt_ids = num_prompt_ids;
    options.max_tokens = num_output;
    options.temperature = 0.0f;
    options.repetition_penalty = 1.0f;
    options.ignore_eos = true;
    options.no_text = true;
    options.callback = note_token;
    options.user = sequence;
    return imbrex_request_submit(engine, &options, &sequence->request, err);
}

/* Submits all sequences, waits for them, and tells when that began. */
static int run_requests(const struct speed_runner *runner, struct imbrex_engine *engine,
                        int32_t num_prompt_ids, int32_t num_output, int64_t *begin_ns)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct imbrex_request_metrics metrics;
    enum imbrex_status status = IMBREX_STATUS_OK;
    int32_t batch = runner->test->batch;

    *begin_ns = now_ns();
    for (int32_t i = 0; i < batch && status == IMBREX_STATUS_OK; i++) {
        status = submit(runner, engine, num_prompt_ids, num_output, &runner->sequences[i], &err);
    }
    for (int32_t i = 0; i < batch && status == IMBREX_STATUS_OK; i++) {
        status = imbrex_request_wait(runner->sequences[i].request, &err);
    }
    for (int32_t i = 0; i < batch; i++) {
        struct sequence *sequence = &runner->sequences[i];
        if (status == IMBREX_STATUS_OK) {
            imbrex_request_read_metrics(sequence->request, &metrics);
            sequence->num_cached_tokens = metrics.num_cached_tokens;
        }
        imbrex_request_destroy(sequence->request);
        sequence->request = NULL;
    }
    return status == IMBREX_STATUS_OK ? EXIT_CODE_OK : output_library_error(&err);
}

struct sample {
    int64_t ns;
    double step_ns; /* the median one; 0 of a prompt */
    double depth;   /* mean context of the sequences where it begins */
};

/* The first token of the first sequence that comes when all have one; -1: there is none. */
static int32_t find_first_step(const struct speed_runner *runner)
{
    const struct sequence *first = &runner->sequences[0];
    int64_t all_ns = 0;

    for (int32_t i = 0; i < runner->test->batch; i++) {
        all_ns = runner->sequences[i].first_ns > all_ns ? runner->sequences[i].first_ns : all_ns;
    }
    for (int32_t i = 0; i < first->num_tokens; i++) {
        if (first->token_ns[i] >= all_ns) {
            return i;
        }
    }
    return -1;
}

/* From the times of the tokens to those of the steps. What was asked for was measured: a prefix
 * that is computed again takes steps in which not all sequences generate. */
static int read_steps(const struct speed_runner *runner, struct sample *sample)
{
    const struct speed_test *test = runner->test;
    const int64_t *token_ns = runner->token_ns;
    int32_t first = find_first_step(runner);
    int32_t found = first < 0 ? 0 : runner->sequences[0].num_tokens - first - 1;
    double *steps = calloc((size_t)test->num_tokens, sizeof(*steps));

    if (steps == NULL) {
        return output_out_of_memory();
    }
    if (found < test->num_tokens) {
        output_error("bench model: expected %" PRId32 " steps in which %" PRId32
                     " sequences generate together, found %" PRId32,
                     test->num_tokens, test->batch, found);
        free(steps);
        return EXIT_CODE_FAILURE;
    }
    for (int32_t i = 0; i < test->num_tokens; i++) {
        steps[i] = (double)(token_ns[first + i + 1] - token_ns[first + i]);
    }
    sample->ns = token_ns[first + test->num_tokens] - token_ns[first];
    /* They began evenly. */
    sample->depth = test->depth + first / 2.0;
    sample->step_ns = spread_quantile(steps, test->num_tokens, 0.5);
    free(steps);
    return EXIT_CODE_OK;
}

static int read_prompt(const struct speed_runner *runner, int64_t begin_ns, struct sample *sample)
{
    const struct speed_test *test = runner->test;
    const struct sequence *sequence = &runner->sequences[0];

    if (sequence->num_tokens != 1 || sequence->num_cached_tokens < test->depth) {
        output_error("bench model: expected 1 token behind %" PRId32 " cached ones, found %" PRId32
                     " behind %" PRId32,
                     test->depth, sequence->num_tokens, sequence->num_cached_tokens);
        return EXIT_CODE_FAILURE;
    }
    *sample = (struct sample){.ns = sequence->first_ns - begin_ns, .depth = test->depth};
    return EXIT_CODE_OK;
}

/* One sample of the test on an engine, with fresh ids behind the prefix. */
static int take_sample(struct speed_runner *runner, struct imbrex_engine *engine,
                       struct sample *sample)
{
    const struct speed_test *test = runner->test;
    int32_t num_prompt_ids = num_prompt_tokens(test);
    int64_t begin_ns;

    for (int32_t i = 0; i < test->batch; i++) {
        speed_random_ids(&runner->random_state, runner->settings->vocab_size,
                         runner->sequences[i].prompt_ids + test->depth,
                         num_prompt_ids - test->depth);
    }
    *sample = (struct sample){.ns = 1};
    int exit_code = run_requests(runner, engine, num_prompt_ids, runner->num_output, &begin_ns);
    if (exit_code != EXIT_CODE_OK || signals_interrupt() != 0) {
        return exit_code;
    }
    return test->is_prompt ? read_prompt(runner, begin_ns, sample) : read_steps(runner, sample);
}

/* The prefixes into the cache, and a short test that nobody looks at. */
static int prepare(struct speed_runner *runner, struct imbrex_engine *engine)
{
    const struct speed_test *test = runner->test;
    struct speed_runner warmup = *runner;
    struct speed_test short_test = *test;
    struct sample ignored;
    int64_t ignored_ns;
    int exit_code = EXIT_CODE_OK;

    if (test->depth > 0) {
        exit_code = run_requests(runner, engine, test->depth, 1, &ignored_ns);
    }
    if (exit_code != EXIT_CODE_OK || !runner->settings->has_warmup || signals_interrupt() != 0) {
        return exit_code;
    }
    if (!test->is_prompt) {
        int32_t num_steps = is_on_gpu(runner->settings->plan) ? WARMUP_STEPS_GPU : 1;
        short_test.num_tokens = test->num_tokens < num_steps ? test->num_tokens : num_steps;
        warmup.num_output = num_output_tokens(&short_test, runner->settings->plan->max_step_tokens);
    }
    warmup.test = &short_test;
    exit_code = take_sample(&warmup, engine, &ignored);
    runner->random_state = warmup.random_state;
    return exit_code;
}

static void release_runner(struct speed_runner *runner)
{
    if (runner->sequences != NULL) {
        free(runner->sequences[0].prompt_ids);
    }
    free(runner->sequences);
    free(runner->token_ns);
}

static int create_runner(const struct speed_settings *settings, const struct speed_test *test,
                         struct speed_runner *runner)
{
    size_t num_ids = (size_t)num_prompt_tokens(test), batch = (size_t)test->batch;

    *runner = (struct speed_runner){
        .settings = settings,
        .test = test,
        .sequences = calloc(batch, sizeof(*runner->sequences)),
        .num_output = num_output_tokens(test, settings->plan->max_step_tokens),
        .random_state = 1,
    };
    runner->token_ns = calloc((size_t)runner->num_output, sizeof(*runner->token_ns));
    if (runner->sequences != NULL) {
        runner->sequences[0].prompt_ids = calloc(batch * num_ids, sizeof(int32_t));
    }
    if (runner->token_ns == NULL || runner->sequences == NULL ||
        runner->sequences[0].prompt_ids == NULL) {
        (void)output_out_of_memory();
        release_runner(runner);
        return EXIT_CODE_FAILURE;
    }
    runner->sequences[0].token_ns = runner->token_ns;
    runner->sequences[0].num_token_ns = runner->num_output;
    for (size_t i = 0; i < batch; i++) {
        runner->sequences[i].prompt_ids = runner->sequences[0].prompt_ids + i * num_ids;
        memcpy(runner->sequences[i].prompt_ids,
               settings->prefix_ids + i * (size_t)settings->prefix_stride,
               (size_t)test->depth * sizeof(int32_t));
    }
    return EXIT_CODE_OK;
}

/* ---- figures --------------------------------------------------------------------------------- */

static double rate_of(const struct speed_series *series, int32_t sample, double amount)
{
    return amount * 1e9 / (double)series->samples_ns[sample];
}

static void summarize_rates(const struct speed_result *result, struct speed_series *series,
                            double *values)
{
    int32_t count = result->num_samples;
    double sum = 0.0, squares = 0.0;

    for (int32_t i = 0; i < count; i++) {
        values[i] = rate_of(series, i, (double)result->test.num_tokens * result->test.batch);
        sum += values[i];
    }
    series->mean_rate = sum / count;
    for (int32_t i = 0; i < count; i++) {
        squares += (values[i] - series->mean_rate) * (values[i] - series->mean_rate);
    }
    series->rate_deviation = count > 1 ? sqrt(squares / (count - 1)) : 0.0;
    series->median_rate = spread_quantile(values, count, 0.5);
    memcpy(values, series->step_ns, (size_t)count * sizeof(*values));
    series->step_ms = spread_quantile(values, count, 0.5) * 1e-6;
    for (int32_t i = 0; i < count; i++) {
        values[i] = (double)series->samples_ns[i] / (double)result->series[0].samples_ns[i];
    }
    series->over_full = spread_of(values, count);
}

static int summarize(struct speed_result *result)
{
    int32_t count = result->num_samples;
    double *values = calloc((size_t)(count > 0 ? count : 1), sizeof(*values));

    if (values == NULL) {
        return output_out_of_memory();
    }
    for (int32_t i = 0; i < result->num_series && count > 0; i++) {
        summarize_rates(result, &result->series[i], values);
    }
    double amount = result->test.is_prompt ? result->work.flops : result->work.bytes;
    for (int32_t i = 0; i < count; i++) {
        double roof = result->roof_rates[i];
        values[i] = roof > 0.0 ? 100.0 * rate_of(&result->series[0], i, amount) / roof : 0.0;
    }
    result->roof_percent = count > 0 ? spread_quantile(values, count, 0.5) : 0.0;
    free(values);
    return EXIT_CODE_OK;
}

/* Of products a GPU's data sheet is the roof. */
static double measure_gpu_roof(const struct speed_settings *settings, enum roof_kind kind)
{
    double rate = 0.0;
#if IMBREX_CUDA
    struct gpu_description description;

    if (settings->has_gpu_roofs && kind != ROOF_KIND_READ) {
        gpu_meter_describe(settings->meter, &description);
        rate = description.nominal_flops;
    } else if (settings->has_gpu_roofs) {
        /* The first one brings the clock up. */
        for (int i = 0; i < 3; i++) {
            rate = fmax(rate, gpu_meter_read_rate(settings->meter));
        }
    }
#else
    (void)settings, (void)kind;
#endif
    return rate;
}

/* The best of two: a neighbour of the machine lowers one rather than both. */
static double measure_roof(const struct speed_settings *settings, enum roof_kind kind)
{
    double first = 0.0, second = 0.0;

    if (settings->meter != NULL) {
        return measure_gpu_roof(settings, kind);
    }
    if (settings->roofs != NULL) {
        first = roofs_measure(settings->roofs, kind);
        second = roofs_measure(settings->roofs, kind);
    }
    return fmax(first, second);
}

/* Repeats the test alone for a while, and reads the energy counter before and after. */
static int measure_energy(struct speed_runner *runner, struct speed_result *result)
{
    int exit_code = EXIT_CODE_OK;
#if IMBREX_CUDA
    struct gpu_meter *meter = runner->settings->meter;
    const struct speed_test *test = runner->test;
    struct sample ignored;
    int64_t begin_ns = now_ns();
    double num_tokens = 0.0;

    runner->sequences[0].meter = meter;
    gpu_meter_begin(meter);
    do {
        exit_code = take_sample(runner, runner->settings->engines[0].engine, &ignored);
        num_tokens +=
            (double)test->batch * (test->is_prompt ? test->num_tokens : (double)runner->num_output);
    } while (exit_code == EXIT_CODE_OK && signals_interrupt() == 0 &&
             (double)(now_ns() - begin_ns) < runner->settings->energy_ms * 1e6);
    gpu_meter_end(meter, &result->reading);
    runner->sequences[0].meter = NULL;
    result->has_reading = exit_code == EXIT_CODE_OK && signals_interrupt() == 0;
    result->joules_per_token =
        result->reading.joules > 0.0 ? result->reading.joules / num_tokens : -1.0;
#else
    (void)runner, (void)result;
#endif
    return exit_code;
}

/* The roof, then all engines, each time another one first: what runs before leaves its heat
 * behind; then the roof again, whose mean is what the machine had meanwhile. */
static int take_samples(struct speed_runner *runner, struct speed_result *result)
{
    const struct speed_settings *settings = runner->settings;
    int32_t sample_idx = result->num_samples, num_engines = settings->num_engines;
    struct sample sample;
    int exit_code = EXIT_CODE_OK;

    double roof_before = measure_roof(settings, result->roof);
    result->roof_instructions = roof_instructions(settings->roofs, result->roof);
    for (int32_t turn = 0; turn < num_engines && exit_code == EXIT_CODE_OK; turn++) {
        int32_t i = (turn + sample_idx) % num_engines;
        exit_code = take_sample(runner, settings->engines[i].engine, &sample);
        result->series[i].samples_ns[sample_idx] = sample.ns;
        result->series[i].step_ns[sample_idx] = sample.step_ns;
        result->depth = sample.depth;
        if (signals_interrupt() != 0) {
            return exit_code;
        }
    }
    result->roof_rates[sample_idx] = (roof_before + measure_roof(settings, result->roof)) / 2.0;
    result->num_samples += exit_code == EXIT_CODE_OK;
    return exit_code;
}

static bool allocate_result(const struct speed_settings *settings, struct speed_result *result)
{
    size_t num_samples = (size_t)settings->num_samples;
    bool is_ok = true;

    result->roof_rates = calloc(num_samples, sizeof(*result->roof_rates));
    for (int32_t i = 0; i < settings->num_engines; i++) {
        struct speed_series *series = &result->series[i];
        series->samples_ns = calloc(num_samples, sizeof(*series->samples_ns));
        series->step_ns = calloc(num_samples, sizeof(*series->step_ns));
        is_ok = is_ok && series->samples_ns != NULL && series->step_ns != NULL;
    }
    return is_ok && result->roof_rates != NULL;
}

static int run_test(struct speed_runner *runner, struct speed_result *result)
{
    const struct speed_settings *settings = runner->settings;
    int exit_code = EXIT_CODE_OK;

    for (int32_t i = 0; i < settings->num_engines && exit_code == EXIT_CODE_OK; i++) {
        exit_code = prepare(runner, settings->engines[i].engine);
    }
    while (exit_code == EXIT_CODE_OK && result->num_samples < settings->num_samples &&
           signals_interrupt() == 0) {
        exit_code = take_samples(runner, result);
    }
    if (exit_code == EXIT_CODE_OK && settings->energy_ms > 0.0 && settings->meter != NULL &&
        signals_interrupt() == 0) {
        exit_code = measure_energy(runner, result);
    }
    return exit_code;
}

int speed_run(const struct speed_settings *settings, const struct speed_test *test,
              struct speed_result *result)
{
    struct speed_runner runner;

    *result = (struct speed_result){
        .test = *test,
        .num_threads = settings->plan->num_threads,
        .kernels = settings->plan->kernels,
        .num_series = settings->num_engines,
        .roof = test->is_prompt ? settings->prompt_roof : ROOF_KIND_READ,
        .joules_per_token = -1.0,
    };
    if (!allocate_result(settings, result)) {
        return output_out_of_memory();
    }
    int exit_code = create_runner(settings, test, &runner);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    exit_code = run_test(&runner, result);
    release_runner(&runner);
    result->work = speed_work_of(settings->model, settings->plan, test, result->depth);
    return exit_code == EXIT_CODE_OK ? summarize(result) : exit_code;
}

void speed_result_release(struct speed_result *result)
{
    for (int32_t i = 0; i < result->num_series; i++) {
        free(result->series[i].samples_ns);
        free(result->series[i].step_ns);
    }
    free(result->roof_rates);
    *result = (struct speed_result){.num_samples = 0};
}
