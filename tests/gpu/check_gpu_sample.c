/* SPDX-License-Identifier: Apache-2.0 */
/* The history and the sampler on a GPU against the host's: the same ids for the same logits.
 * Skipped where there is no GPU. With a number as its argument, that many times; 0: some, for tools
 * that make kernels slow. --bench times it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "base/memory.h"
#include "ops/cuda/backend_cuda.h"
#include "tests/gpu/gpu_session.h"

#define CANARY 0xca
#define CANARY_BYTES 256
#define HISTORY_STRIDE 1200
#define NUM_SLOTS 24
#define MAX_BIAS 4096
#define HOST_THREADS 8

static struct ops *ops; /* of the reference */

static void *allocate(size_t num_bytes)
{
    void *memory = aligned_alloc(ARENA_ALIGNMENT,
                                 (num_bytes + ARENA_ALIGNMENT) / ARENA_ALIGNMENT * ARENA_ALIGNMENT);
    require(memory != NULL, "memory");
    return memory;
}

/* ---- random numbers -------------------------------------------------------------------------- */

static uint32_t random_below(uint32_t end)
{
    return (uint32_t)((uint64_t)random_bits() * end >> 31);
}

static float random_fraction(void)
{
    return (float)random_below(1 << 24) * 0x1p-24f;
}

static float random_float(void)
{
    float radius = sqrtf(-2.0f * logf(random_fraction() + 0x1p-25f));
    return radius * cosf(6.2831853f * random_fraction());
}

static bool one_in(uint32_t chances)
{
    return random_below(chances) == 0;
}

/* ---- memory of the GPU ----------------------------------------------------------------------- */

/* num_bytes between canaries, poisoned. */
struct buffer {
    CUdeviceptr whole, base;
    size_t num_bytes;
};

static struct buffer buffer_create(size_t num_bytes)
{
    struct buffer buffer = {.num_bytes = num_bytes};
    size_t whole_bytes = num_bytes + 2 * CANARY_BYTES;
    require(GPU_CALL(&gpu, mem_alloc, &buffer.whole, whole_bytes) &&
                GPU_CALL(&gpu, memset_d8_async, buffer.whole, CANARY, whole_bytes, gpu.stream) &&
                GPU_CALL(&gpu, stream_synchronize, gpu.stream),
            "memory of the GPU");
    buffer.base = buffer.whole + CANARY_BYTES;
    return buffer;
}

static struct buffer buffer_upload(const void *source, size_t num_bytes)
{
    struct buffer buffer = buffer_create(num_bytes);
    require(num_bytes == 0 || copied_to_gpu(buffer.base, source, num_bytes), "copy to the GPU");
    return buffer;
}

/* Whether the canaries are whole. */
static bool buffer_download(const struct buffer *buffer, void *to)
{
    unsigned char canaries[2][CANARY_BYTES];
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, canaries[0], buffer->whole, CANARY_BYTES) &&
                GPU_CALL(&gpu, memcpy_dtoh, canaries[1], buffer->base + buffer->num_bytes,
                         CANARY_BYTES) &&
                (buffer->num_bytes == 0 ||
                 GPU_CALL(&gpu, memcpy_dtoh, to, buffer->base, buffer->num_bytes)),
            "copy from the GPU");
    for (int i = 0; i < CANARY_BYTES; i++) {
        if (canaries[0][i] != CANARY || canaries[1][i] != CANARY) {
            return false;
        }
    }
    return true;
}

static void buffer_destroy(struct buffer *buffer)
{
    (void)gpu.mem_free(buffer->whole);
}

/* ---- the backend ----------------------------------------------------------------------------- */

struct sampler {
    struct backend *backend;
    struct buffer scratch;
};

static uint32_t ablations; /* of all samplers */

static struct sampler sampler_create(int32_t vocab_size, int32_t max_samples)
{
    struct backend_shape shape = {.hidden_size = 64,
                                  .intermediate_size = 64,
                                  .vocab_size = vocab_size,
                                  .num_heads = 1,
                                  .num_kv_heads = 1,
                                  .head_dim = 64,
                                  .max_tokens = 64,
                                  .max_seqs = 64,
                                  .max_logit_rows = 64,
                                  .max_samples = max_samples,
                                  .context_size = HISTORY_STRIDE,
                                  .activation_dtype = DTYPE_BF16};
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16, .ablations = ablations};
    struct sampler sampler;
    struct imbrex_error err = {0};
    size_t num_bytes = cuda_sample_scratch_bytes(&shape);
    sampler.scratch = buffer_create(num_bytes);
    require(backend_cuda_create_on(device, &options, &shape, (void *)sampler.scratch.base,
                                   num_bytes, &sampler.backend, &err) == IMBREX_STATUS_OK,
            "backend");
    return sampler;
}

static void sampler_destroy(struct sampler *sampler)
{
    backend_destroy(sampler->backend);
    buffer_destroy(&sampler->scratch);
}

static void sampler_run(struct sampler *sampler, const struct sample_params *params)
{
    backend_begin(sampler->backend, gpu.stream);
    backend_sample(sampler->backend, params);
    enum imbrex_status status = backend_end(sampler->backend);
    if (status != IMBREX_STATUS_OK) {
        printf("%s\n", ((struct backend_cuda *)(void *)sampler->backend)->error.message);
    }
    require(status == IMBREX_STATUS_OK, "launch");
}

/* ---- problems -------------------------------------------------------------------------------- */

enum logits_kind {
    LOGITS_NORMAL,
    LOGITS_FLAT,  /* all equal */
    LOGITS_TIED,  /* few different values, both zeros among them */
    LOGITS_SHARP, /* one far above */
    LOGITS_HUGE,
    LOGITS_BAD, /* one NaN or infinity */
    NUM_LOGITS_KINDS
};

static void fill_logits(float *logits, int32_t num_ids, int32_t vocab_size, enum logits_kind kind)
{
    static const float scales[] = {0.3f, 1.0f, 2.0f, 6.0f};
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    float scale = scales[random_below(4)];
    for (int32_t id = 0; id < vocab_size; id++) {
        float normal = scale * random_float();
        switch (kind) {
        case LOGITS_FLAT:
            logits[id] = scale;
            break;
        case LOGITS_TIED:
            logits[id] = rintf(normal * 4.0f) * 0.25f;
            break;
        case LOGITS_HUGE:
            logits[id] = normal * 1e30f;
            break;
        default:
            logits[id] = normal;
        }
        if (id >= num_ids) {
            logits[id] = bad[random_below(3)]; /* counts for nothing */
        }
    }
    int32_t special = (int32_t)random_below((uint32_t)num_ids);
    if (kind == LOGITS_SHARP) {
        logits[special] = 30.0f;
    } else if (kind == LOGITS_BAD) {
        logits[special] = bad[random_below(3)];
    }
}

struct problem {
    struct sample_params params; /* of the host */
    float *logits;
    struct sample_row *rows;
    struct imbrex_logit_bias *bias;
    int32_t *history;
    int32_t num_bias;
};

/* Some entries name an id twice, as the engine's own biases may. */
static void add_bias(struct problem *problem, struct sample_row *row)
{
    int32_t num_ids = problem->params.num_ids;
    int32_t wanted = one_in(8) ? 300 : 1 + (int32_t)random_below(12);
    bool forbids_all = num_ids <= 7 && one_in(3);
    wanted = forbids_all ? num_ids : wanted;
    if (problem->num_bias + wanted > MAX_BIAS) {
        return;
    }
    row->bias_begin = problem->num_bias;
    row->num_bias = wanted;
    for (int32_t i = 0; i < wanted; i++) {
        struct imbrex_logit_bias *entry = &problem->bias[problem->num_bias++];
        entry->token_id = (int32_t)random_below((uint32_t)problem->params.vocab_size);
        entry->bias = one_in(3) ? -INFINITY : 3.0f * random_float();
        if (one_in(200)) {
            entry->bias = one_in(2) ? 1e30f : 3e38f; /* the second overflows with huge logits */
        }
        if (i > 0 && one_in(4)) {
            entry->token_id = entry[-(int32_t)random_below((uint32_t)i) - 1].token_id;
        }
        if (forbids_all) {
            *entry = (struct imbrex_logit_bias){i, -INFINITY};
        }
    }
}

static void fill_row(struct problem *problem, struct sample_row *row, int32_t row_idx)
{
    static const float temperatures[] = {0.0f, 1e-3f, 0.25f, 0.8f, 1.0f, 1.0f, 2.0f, 100.0f};
    static const float top_ps[] = {1e-6f, 0.1f, 0.5f, 0.9f, 0.95f, 0.9999f};
    static const float min_ps[] = {1e-6f, 0.05f, 0.3f, 0.99f};
    static const float penalties[] = {1e-3f, 0.7f, 1.1f, 2.0f};
    const struct sample_params *params = &problem->params;
    uint32_t num_ids = (uint32_t)params->num_ids;
    *row = (struct sample_row){
        .logits_row =
            params->logits_row_begin + (int32_t)random_below((uint32_t)params->num_logits_rows),
        .target_id = -1,
        .choice_idx = (int32_t)random_below(5),
        .num_logprobs = -1,
        .temperature = temperatures[random_below(8)],
        .top_p = 1.0f,
        .repetition_penalty = 1.0f,
        .seed_low = random_below(1u << 31),
        .seed_high = random_below(1u << 31),
    };
    /* What a row stores no other row reads. */
    if (row_idx < NUM_SLOTS / 2) {
        row->slot = row_idx;
        row->is_stored = one_in(3);
    } else {
        row->slot = NUM_SLOTS / 2 + (int32_t)random_below(NUM_SLOTS / 2);
    }
    row->num_tokens = 1 + (int32_t)random_below(one_in(3) ? HISTORY_STRIDE : 60);
    row->num_prompt_tokens = (int32_t)random_below((uint32_t)row->num_tokens + 2);
    if (one_in(3)) {
        row->top_k = 1 + (int32_t)random_below(one_in(3) ? num_ids + 10 : 60);
    }
    if (one_in(3)) {
        row->top_p = top_ps[random_below(6)];
    }
    if (one_in(4)) {
        row->min_p = min_ps[random_below(4)];
    }
    if (one_in(4)) {
        row->repetition_penalty = penalties[random_below(4)];
    }
    if (one_in(4)) {
        row->frequency_penalty = 2.0f * random_fraction() - 1.0f;
    }
    if (one_in(4)) {
        row->presence_penalty = 2.0f * random_fraction() - 1.0f;
    }
    if (one_in(4)) {
        add_bias(problem, row);
    }
    if (one_in(3)) {
        row->num_logprobs = (int32_t)random_below((uint32_t)params->max_logprobs + 1);
    }
    if (one_in(6)) {
        row->target_id = (int32_t)random_below((uint32_t)params->vocab_size);
    }
}

static struct problem problem_create(int32_t vocab_size, int32_t num_ids, int32_t num_logits_rows,
                                     int32_t num_rows, int32_t max_logprobs)
{
    struct problem problem = {.params = {.logits_row_begin = 7,
                                         .num_logits_rows = num_logits_rows,
                                         .num_rows = num_rows,
                                         .vocab_size = vocab_size,
                                         .num_ids = num_ids,
                                         .max_logprobs = max_logprobs}};
    struct sample_params *params = &problem.params;
    size_t num_logits = (size_t)num_logits_rows * (size_t)vocab_size;
    problem.logits = allocate(num_logits * sizeof(float));
    problem.rows = allocate((size_t)num_rows * sizeof(*problem.rows));
    problem.bias = allocate(MAX_BIAS * sizeof(*problem.bias));
    problem.history = allocate((size_t)NUM_SLOTS * HISTORY_STRIDE * sizeof(int32_t));
    for (int32_t i = 0; i < NUM_SLOTS * HISTORY_STRIDE; i++) {
        uint32_t few = vocab_size > 40 ? 40 : (uint32_t)vocab_size; /* many occur often */
        problem.history[i] = (int32_t)random_below(one_in(2) ? few : (uint32_t)vocab_size);
    }
    for (int32_t i = 0; i < num_logits_rows; i++) {
        enum logits_kind kind = one_in(2) ? LOGITS_NORMAL : random_below(NUM_LOGITS_KINDS);
        fill_logits(problem.logits + (int64_t)i * vocab_size, num_ids, vocab_size, kind);
    }
    memset(problem.bias, 0, MAX_BIAS * sizeof(*problem.bias));
    for (int32_t i = 0; i < num_rows; i++) {
        fill_row(&problem, &problem.rows[i], i);
    }
    params->logits = problem.logits;
    params->rows = problem.rows;
    params->bias = problem.bias;
    params->history = (struct token_history){problem.history, HISTORY_STRIDE};
    return problem;
}

static void problem_destroy(struct problem *problem)
{
    free(problem->logits);
    free(problem->rows);
    free(problem->bias);
    free(problem->history);
}

/* ---- what came of it ------------------------------------------------------------------------- */

struct outcome {
    struct sample_result *results;
    struct imbrex_logprob *top;
    int32_t *history;
    size_t results_bytes, top_bytes, history_bytes;
    bool is_clean; /* nothing beside them was written */
};

static struct outcome outcome_create(const struct problem *problem, int32_t num_rows)
{
    struct outcome outcome = {.is_clean = true};
    outcome.results_bytes = (size_t)num_rows * sizeof(*outcome.results);
    outcome.top_bytes =
        (size_t)num_rows * (size_t)problem->params.max_logprobs * sizeof(*outcome.top);
    outcome.history_bytes = (size_t)NUM_SLOTS * HISTORY_STRIDE * sizeof(int32_t);
    outcome.results = allocate(outcome.results_bytes);
    outcome.top = allocate(outcome.top_bytes);
    outcome.history = allocate(outcome.history_bytes);
    memset(outcome.results, CANARY, outcome.results_bytes);
    memset(outcome.top, CANARY, outcome.top_bytes);
    memcpy(outcome.history, problem->history, outcome.history_bytes);
    return outcome;
}

static void outcome_destroy(struct outcome *outcome)
{
    free(outcome->results);
    free(outcome->top);
    free(outcome->history);
}

static struct outcome run_host(const struct problem *problem)
{
    struct outcome outcome = outcome_create(problem, problem->params.num_rows);
    struct sample_params params = problem->params;
    params.results = outcome.results;
    params.top_logprobs = outcome.top;
    params.history.token_ids = outcome.history;
    params.scratch = allocate(sample_scratch_bytes(params.vocab_size, HOST_THREADS));
    ops_sample(ops, &params);
    free(params.scratch);
    return outcome;
}

/* The rows of the device: all of the problem's, or the one named. */
static struct outcome run_device(const struct problem *problem, const struct sample_row *rows,
                                 int32_t num_rows)
{
    struct outcome outcome = outcome_create(problem, num_rows);
    struct sample_params params = problem->params;
    struct sampler sampler = sampler_create(params.vocab_size, num_rows);
    size_t num_logits = (size_t)params.num_logits_rows * (size_t)params.vocab_size;
    struct buffer logits = buffer_upload(problem->logits, num_logits * sizeof(float));
    struct buffer device_rows = buffer_upload(rows, (size_t)num_rows * sizeof(*rows));
    struct buffer bias = buffer_upload(problem->bias, MAX_BIAS * sizeof(*problem->bias));
    struct buffer history = buffer_upload(problem->history, outcome.history_bytes);
    struct buffer results = buffer_create(outcome.results_bytes);
    struct buffer top = buffer_create(outcome.top_bytes);
    params.logits = (const float *)logits.base;
    params.rows = (const struct sample_row *)device_rows.base;
    params.bias = (const struct imbrex_logit_bias *)bias.base;
    params.history.token_ids = (int32_t *)history.base;
    params.results = (struct sample_result *)results.base;
    params.top_logprobs = (struct imbrex_logprob *)top.base;
    params.num_rows = num_rows;
    sampler_run(&sampler, &params);
    void *same = allocate(num_logits * sizeof(float));
    outcome.is_clean =
        buffer_download(&results, outcome.results) && buffer_download(&top, outcome.top) &&
        buffer_download(&history, outcome.history) && buffer_download(&logits, same) &&
        memcmp(same, problem->logits, num_logits * sizeof(float)) == 0;
    free(same);
    struct buffer *buffers[] = {&logits, &device_rows, &bias, &history, &results, &top};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        buffer_destroy(buffers[i]);
    }
    sampler_destroy(&sampler);
    return outcome;
}

static bool is_near(float found, float expected)
{
    return found == expected || fabsf(found - expected) <= 1e-5f * fmaxf(1.0f, fabsf(expected));
}

/* Of row row_idx of the problem. */
static bool is_same(const struct problem *problem, const struct sample_row *row,
                    const struct sample_result *found, const struct imbrex_logprob *found_top,
                    const struct sample_result *expected, const struct imbrex_logprob *expected_top)
{
    bool same = found->token_id == expected->token_id;
    if (same && expected->token_id >= 0) {
        same = found->num_top == expected->num_top;
        same = same && (row->num_logprobs < 0 || is_near(found->logprob, expected->logprob));
        for (int32_t i = 0; same && i < expected->num_top; i++) {
            same = found_top[i].token_id == expected_top[i].token_id &&
                   is_near(found_top[i].logprob, expected_top[i].logprob);
        }
        for (int32_t i = expected->num_top; same && i < problem->params.max_logprobs; i++) {
            same = memcmp(&found_top[i], &expected_top[i], sizeof(*found_top)) == 0;
        }
    }
    return same;
}

static void describe(const struct problem *problem, const struct sample_row *row,
                     const struct sample_result *found, const struct sample_result *expected,
                     char *text, size_t text_bytes)
{
    snprintf(text, text_bytes,
             "vocab %d of %d: logits row %d T %g k %d p %g min_p %g rep %g freq %g pres %g bias %d "
             "tokens %d/%d logprobs %d target %d: found %d %.7g %d, expected %d %.7g %d",
             (int)problem->params.num_ids, (int)problem->params.vocab_size, (int)row->logits_row,
             (double)row->temperature, (int)row->top_k, (double)row->top_p, (double)row->min_p,
             (double)row->repetition_penalty, (double)row->frequency_penalty,
             (double)row->presence_penalty, (int)row->num_bias, (int)row->num_prompt_tokens,
             (int)row->num_tokens, (int)row->num_logprobs, (int)row->target_id,
             (int)found->token_id, (double)found->logprob, (int)found->num_top,
             (int)expected->token_id, (double)expected->logprob, (int)expected->num_top);
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* Catches a device that draws another id than the host, in any mixture of options, beside padding;
 * a result that depends on the run or on the other rows. */
static void check_mixture(int32_t vocab_size, int32_t num_ids, int32_t num_logits_rows,
                          int32_t num_rows, int32_t max_logprobs)
{
    char text[500];
    struct problem problem =
        problem_create(vocab_size, num_ids, num_logits_rows, num_rows, max_logprobs);
    int32_t num_padding = 0, num_device_rows = 0;
    struct sample_row *device_rows = allocate((size_t)num_rows * 2 * sizeof(*device_rows));
    int32_t *device_idx = allocate((size_t)num_rows * sizeof(*device_idx));
    for (int32_t i = 0; i < num_rows; i++) {
        if (one_in(10)) {
            device_rows[num_device_rows] = problem.rows[i];
            device_rows[num_device_rows++].logits_row = -1 - (int32_t)random_below(3);
            num_padding++;
        }
        device_idx[i] = num_device_rows;
        device_rows[num_device_rows++] = problem.rows[i];
    }
    struct outcome expected = run_host(&problem);
    struct outcome found = run_device(&problem, device_rows, num_device_rows);
    struct outcome again = run_device(&problem, device_rows, num_device_rows);
    snprintf(text, sizeof(text), "vocab %d: something else was written", (int)vocab_size);
    count(found.is_clean, text);
    for (int32_t i = 0; i < num_rows; i++) {
        const struct sample_result *result = &found.results[device_idx[i]];
        describe(&problem, &problem.rows[i], result, &expected.results[i], text, sizeof(text));
        count(is_same(&problem, &problem.rows[i], result,
                      found.top + (int64_t)device_idx[i] * max_logprobs, &expected.results[i],
                      expected.top + (int64_t)i * max_logprobs),
              text);
    }
    int32_t num_untouched = 0;
    for (int32_t i = 0; i < num_device_rows; i++) {
        unsigned char poison[sizeof(struct sample_result)];
        memset(poison, CANARY, sizeof(poison));
        num_untouched += memcmp(&found.results[i], poison, sizeof(poison)) == 0;
    }
    snprintf(text, sizeof(text), "vocab %d: padding", (int)vocab_size);
    count(num_untouched == num_padding, text);
    snprintf(text, sizeof(text), "vocab %d: history", (int)vocab_size);
    count(memcmp(found.history, expected.history, expected.history_bytes) == 0, text);
    snprintf(text, sizeof(text), "vocab %d: two runs differ", (int)vocab_size);
    count(memcmp(found.results, again.results, found.results_bytes) == 0 &&
              memcmp(found.top, again.top, found.top_bytes) == 0 &&
              memcmp(found.history, again.history, found.history_bytes) == 0,
          text);
    for (int32_t i = 0; i < num_rows; i += 1 + num_rows / 8) {
        struct outcome alone = run_device(&problem, &problem.rows[i], 1);
        snprintf(text, sizeof(text), "vocab %d: a row depends on others", (int)vocab_size);
        count(memcmp(alone.results, &found.results[device_idx[i]], sizeof(*alone.results)) == 0,
              text);
        outcome_destroy(&alone);
    }
    outcome_destroy(&expected);
    outcome_destroy(&found);
    outcome_destroy(&again);
    free(device_rows);
    free(device_idx);
    problem_destroy(&problem);
}

/* Catches ids that are stored at another place than their own, or padding that is stored. */
static void check_history(int32_t num_tokens)
{
    size_t ids_bytes = (size_t)num_tokens * sizeof(int32_t);
    size_t history_bytes = (size_t)NUM_SLOTS * HISTORY_STRIDE * sizeof(int32_t);
    int32_t *token_ids = allocate(ids_bytes), *slots = allocate(ids_bytes);
    int32_t *positions = allocate(ids_bytes), *expected = allocate(ids_bytes);
    int32_t *found = allocate(ids_bytes), *kept = allocate(history_bytes);
    int32_t *found_kept = allocate(history_bytes);
    for (int32_t i = 0; i < NUM_SLOTS * HISTORY_STRIDE; i++) {
        kept[i] = (int32_t)random_below(1000);
    }
    struct buffer history = buffer_upload(kept, history_bytes);
    for (int32_t i = 0; i < num_tokens; i++) {
        /* A place each, in no order. */
        int32_t place = (int32_t)((int64_t)i * 7919 % (NUM_SLOTS * HISTORY_STRIDE));
        slots[i] = one_in(10) ? -1 : place / HISTORY_STRIDE;
        positions[i] = place % HISTORY_STRIDE;
        token_ids[i] = one_in(2) ? -1 : (int32_t)random_below(1000);
        expected[i] = token_ids[i];
        if (slots[i] < 0) {
            expected[i] = 0;
        } else if (token_ids[i] >= 0) {
            kept[place] = token_ids[i];
        } else {
            expected[i] = kept[place];
        }
    }
    struct buffer device_ids = buffer_upload(token_ids, ids_bytes);
    struct buffer device_slots = buffer_upload(slots, ids_bytes);
    struct buffer device_positions = buffer_upload(positions, ids_bytes);
    struct buffer d = buffer_create(ids_bytes);
    struct sampler sampler = sampler_create(64, 1);
    backend_begin(sampler.backend, gpu.stream);
    backend_history(sampler.backend, &(struct history_params){
                                         .token_ids = (const int32_t *)device_ids.base,
                                         .slots = (const int32_t *)device_slots.base,
                                         .positions = (const int32_t *)device_positions.base,
                                         .history = {(int32_t *)history.base, HISTORY_STRIDE},
                                         .d = (int32_t *)d.base,
                                         .num_tokens = num_tokens,
                                     });
    require(backend_end(sampler.backend) == IMBREX_STATUS_OK, "launch");
    bool is_right = buffer_download(&d, found) && buffer_download(&history, found_kept) &&
                    memcmp(found, expected, ids_bytes) == 0 &&
                    memcmp(found_kept, kept, history_bytes) == 0;
    count(is_right, "history");
    sampler_destroy(&sampler);
    struct buffer *buffers[] = {&history, &device_ids, &device_slots, &device_positions, &d};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        buffer_destroy(buffers[i]);
    }
    int32_t *arrays[] = {token_ids, slots, positions, expected, found, kept, found_kept};
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        free(arrays[i]);
    }
}

/* scale: how often; 0: little, for compute-sanitizer memcheck; -1: least, for its racecheck, which
 * takes seconds for a launch. */
static void run_all(int scale)
{
    check_history(1);
    if (scale < 0) {
        check_mixture(7, 7, 1, 1, 3);
        check_mixture(515, 509, 1, 2, 5);
        return;
    }
    check_history(1000);
    if (scale == 0) {
        check_mixture(9, 5, 9, 40, 3);
        check_mixture(515, 509, 12, 60, 20);
        check_mixture(32000, 32000, 4, 40, 20);
    }
    for (int i = 0; i < 4 * scale; i++) {
        check_mixture(2, 2, 5, 60, 20);
        check_mixture(7, 7, 9, 120, 20);
        check_mixture(9, 5, 9, 60, 3);
        check_mixture(512, 512, 12, 150, 20);
        check_mixture(515, 509, 12, 60, 5);
        check_mixture(32000, 32000, 12, 120, 20);
    }
    for (int i = 0; i < scale; i++) {
        check_mixture(50257, 50257, 8, 60, 20);
        check_mixture(151936, 151936, 12, 160, 20);
        check_mixture(151936, 151665, 6, 60, 20);
        check_mixture(400000, 399999, 4, 70, 20); /* larger than shared memory */
    }
}

/* ---- times ----------------------------------------------------------------------------------- */

enum { BENCH_VOCAB = 151936, BENCH_ROWS = 512, BENCH_REPLAYS = 15 };

static int compare_floats(const void *left, const void *right)
{
    float a = *(const float *)left, b = *(const float *)right;
    return (a > b) - (a < b);
}

/* Median microseconds of a call, of calls in a graph that take other logits each time. */
static double time_calls(struct sampler *sampler, const struct sample_params *params,
                         int32_t num_calls)
{
    CUgraph graph = NULL;
    CUgraphExec replay = NULL;
    CUevent begin = NULL, end = NULL;
    float times[BENCH_REPLAYS];
    bool is_ok = GPU_CALL(&gpu, event_create, &begin, 0) && GPU_CALL(&gpu, event_create, &end, 0) &&
                 GPU_CALL(&gpu, stream_begin_capture, gpu.stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    struct sample_params call = *params;
    for (int32_t i = 0; i < num_calls; i++) {
        int64_t first = (int64_t)i * params->num_rows % (BENCH_ROWS - params->num_rows + 1);
        call.logits = params->logits + first * BENCH_VOCAB;
        sampler_run(sampler, &call);
    }
    is_ok = GPU_CALL(&gpu, stream_end_capture, gpu.stream, &graph) && is_ok &&
            GPU_CALL(&gpu, graph_instantiate, &replay, graph, 0);
    for (int i = 0; is_ok && i < BENCH_REPLAYS; i++) {
        is_ok = GPU_CALL(&gpu, event_record, begin, gpu.stream) &&
                GPU_CALL(&gpu, graph_launch, replay, gpu.stream) &&
                GPU_CALL(&gpu, event_record, end, gpu.stream) &&
                GPU_CALL(&gpu, event_synchronize, end) &&
                GPU_CALL(&gpu, event_elapsed_time, &times[i], begin, end);
    }
    require(is_ok, "bench");
    (void)gpu.graph_exec_destroy(replay);
    (void)gpu.graph_destroy(graph);
    (void)gpu.event_destroy(begin);
    (void)gpu.event_destroy(end);
    qsort(times, BENCH_REPLAYS, sizeof(times[0]), compare_floats);
    return (double)times[BENCH_REPLAYS / 2] * 1e3 / num_calls;
}

static void bench(void)
{
    static const struct {
        const char *name;
        struct sample_row row;
    } cases[] = {
        {"greedy", {.top_p = 1.0f, .num_logprobs = -1}},
        {"greedy, 5 logprobs", {.top_p = 1.0f, .num_logprobs = 5}},
        {"T 0.8", {.temperature = 0.8f, .top_p = 1.0f, .num_logprobs = -1}},
        {"T 0.8 k 50", {.temperature = 0.8f, .top_p = 1.0f, .top_k = 50, .num_logprobs = -1}},
        {"T 0.8 k 50 p 0.95",
         {.temperature = 0.8f, .top_p = 0.95f, .top_k = 50, .num_logprobs = -1}},
        {"T 0.8 p 0.95", {.temperature = 0.8f, .top_p = 0.95f, .num_logprobs = -1}},
        {"T 0.8 min_p 0.05",
         {.temperature = 0.8f, .top_p = 1.0f, .min_p = 0.05f, .num_logprobs = -1}},
        {"T 0.8 k 50 repetition 1.1",
         {.temperature = 0.8f,
          .top_p = 1.0f,
          .top_k = 50,
          .repetition_penalty = 1.1f,
          .num_logprobs = -1}},
    };
    static const int32_t counts[] = {1, 32, 128};
    struct sampler sampler = sampler_create(BENCH_VOCAB, 128);
    size_t logits_bytes = (size_t)BENCH_ROWS * BENCH_VOCAB * sizeof(float);
    float *logits = allocate(logits_bytes);
    /* As a model's: a few ids above the others. */
    for (int32_t i = 0; i < BENCH_ROWS; i++) {
        for (int32_t id = 0; id < BENCH_VOCAB; id++) {
            logits[(int64_t)i * BENCH_VOCAB + id] =
                i < 4 ? 2.0f * random_float()
                      : logits[(int64_t)(i % 4) * BENCH_VOCAB + (id + 1000 * i) % BENCH_VOCAB];
        }
        for (int j = 0; j < 40; j++) {
            logits[(int64_t)i * BENCH_VOCAB + (int32_t)random_below(BENCH_VOCAB)] =
                10.0f + 5.0f * random_fraction();
        }
    }
    struct buffer device_logits = buffer_upload(logits, logits_bytes);
    free(logits);
    int32_t *tokens = allocate(128 * HISTORY_STRIDE * sizeof(int32_t));
    for (int32_t i = 0; i < 128 * HISTORY_STRIDE; i++) {
        tokens[i] = (int32_t)random_below(BENCH_VOCAB);
    }
    struct buffer history = buffer_upload(tokens, 128 * HISTORY_STRIDE * sizeof(int32_t));
    free(tokens);
    struct buffer results = buffer_create(128 * sizeof(struct sample_result));
    struct buffer top = buffer_create(128 * 20 * sizeof(struct imbrex_logprob));
    printf("vocab %d, 1000 tokens: microseconds a call, beside one reading of the logits at 4.5 "
           "TB/s\n",
           BENCH_VOCAB);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (size_t j = 0; j < sizeof(counts) / sizeof(counts[0]); j++) {
            int32_t num_rows = counts[j];
            struct sample_row rows[128];
            for (int32_t k = 0; k < num_rows; k++) {
                rows[k] = cases[i].row;
                rows[k].logits_row = k;
                rows[k].slot = k;
                rows[k].num_tokens = 1000;
                rows[k].num_prompt_tokens = 500;
                rows[k].target_id = -1;
                rows[k].seed_low = (uint32_t)k;
                if (rows[k].repetition_penalty == 0.0f) {
                    rows[k].repetition_penalty = 1.0f;
                }
            }
            struct buffer device_rows =
                buffer_upload(rows, (size_t)num_rows * sizeof(struct sample_row));
            struct sample_params params = {
                .logits = (const float *)device_logits.base,
                .rows = (const struct sample_row *)device_rows.base,
                .history = {(int32_t *)history.base, HISTORY_STRIDE},
                .results = (struct sample_result *)results.base,
                .top_logprobs = (struct imbrex_logprob *)top.base,
                .num_logits_rows = num_rows,
                .num_rows = num_rows,
                .vocab_size = BENCH_VOCAB,
                .num_ids = BENCH_VOCAB,
                .max_logprobs = 20,
            };
            double floor_us = (double)num_rows * BENCH_VOCAB * sizeof(float) / 4.5e6;
            int32_t num_calls = num_rows == 1 ? 400 : 20;
            printf("%-26s rows %3d: %7.2f  (%.2f)\n", cases[i].name, (int)num_rows,
                   time_calls(&sampler, &params, num_calls), floor_us);
            buffer_destroy(&device_rows);
        }
    }
    struct buffer *buffers[] = {&device_logits, &history, &results, &top};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        buffer_destroy(buffers[i]);
    }
    sampler_destroy(&sampler);
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    int exit_code = 0;
    bool is_bench = argc > 1 && strcmp(argv[1], "--bench") == 0;
    int scale = argc > 1 && !is_bench ? atoi(argv[1]) : 1;

    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    require(ops_create(HOST_THREADS, UINT32_MAX, NULL, 0, &ops, &err) == IMBREX_STATUS_OK, "ops");
    run_all(scale);
    /* Catches: what comes out otherwise where a row is one thread block. */
    ablations = IMBREX_ABLATE_HOPPER;
    run_all(scale);
    ablations = 0;
    if (is_bench && num_failed == 0) {
        bench();
    }
    ops_destroy(ops);
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
