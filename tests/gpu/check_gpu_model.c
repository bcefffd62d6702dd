/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models on a GPU without the engine: golden texts, fp64 and the host's backend as
 * references, steps of several sequences. Skipped where there is no GPU. With arguments only the
 * checks that they name: stories, qwen, random. --write FOLDER, an existing one, leaves the random
 * models there with their fp64 logits, for compare_logits.py. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "model/forward.h"
#include "model/model.h"
#include "model/weights_place.h"
#include "ops/cuda/backend_cuda.h"
#include "tests/golden/forward_fp64.h"
#include "tests/golden/golden.h"

#define STORIES "tests/golden/stories260K"
#define QWEN "tests/golden/qwen2-tiny-4m"
#define BLOCK_SIZE 16
#define MAX_SEQS 4
#define SEQ_BLOCKS 33
#define MAX_POSITIONS (SEQ_BLOCKS * BLOCK_SIZE)
#define MAX_TOKENS 512
#define HOST_THREADS 8
/* In bytes of the cache that nobody wrote: large numbers, whose weight shows. */
#define STALE_BYTE 0x47

/* Of the host's fp32 backend, relative to the largest logit. */
#define FP32_ERROR 2e-5
/* Gap of the two best logits in fp64 below which bf16 may choose another id. */
#define BF16_GAP 0.15
#define BF16_NLL 0.005
/* Largest error of bf16, relative to the largest logit; of the random models, 1.5 times that of
 * transformers as compare_logits.py gives it. */
#define BF16_ERROR 0.03
#define BF16_RANDOM_ERROR 0.021

static struct device *gpu, *cpu;

static void tell(bool is_right, const char *what)
{
    if (is_right) {
        num_passed++;
    } else {
        num_failed++;
    }
    printf("%s: %s\n", is_right ? "passed" : "FAILED", what);
}

/* ---- a model on one backend ---- */

/* What a step is told, one after the other in one array. */
struct step_arrays {
    int32_t *token_ids, *positions, *slots, *seq_idx, *query_begin, *seq_lens, *tables, *rows;
};

struct runner {
    const struct imbrex_model *model;
    struct device *device;
    struct backend *backend;
    const struct weights *weights; /* addresses of the device */
    struct placed_weights placed;  /* of a GPU */
    void *memory;                  /* of the device, like the cache */
    struct forward_buffers buffers;
    struct kv_view kv;
    struct step_arrays host, told; /* one array each, on the host and on the device */
    size_t arrays_bytes;
    void *scratch;
    size_t scratch_bytes;
    int32_t num_blocks;
    struct device_event *event;
    struct forward_batch batch; /* of the step that runs */
    int32_t num_rows;
};

static void *runner_alloc(const struct runner *runner, size_t num_bytes)
{
    struct imbrex_error err = {0};
    void *memory = NULL;
    golden_check(device_alloc(runner->device, "memory", num_bytes, &memory, &err), &err);
    return memory;
}

static void runner_check(const struct runner *runner, enum imbrex_status status)
{
    if (status != IMBREX_STATUS_OK && !runner->backend->is_host) {
        const struct backend_cuda *cuda =
            (const struct backend_cuda *)(const void *)runner->backend;
        printf("%s: %s\n", imbrex_status_name(status), cuda->error.message);
    }
    require(status == IMBREX_STATUS_OK, "step");
}

/* Until all that the device was given is done. */
static void runner_wait(struct runner *runner)
{
    runner_check(runner, device_event_record(runner->device, runner->event, DEVICE_STREAM_STEP));
    runner_check(runner, device_event_synchronize(runner->device, runner->event));
}

static void runner_copy(struct runner *runner, void *destination, const void *source,
                        size_t num_bytes)
{
    const struct device_copy copy = {destination, source, num_bytes};
    require(device_copy_batch_async(runner->device, DEVICE_STREAM_STEP, &copy, 1) ==
                IMBREX_STATUS_OK,
            "copy");
    runner_wait(runner);
}

static void runner_fill(struct runner *runner, void *memory, size_t num_bytes, int value)
{
    void *bytes = malloc(num_bytes);
    require(bytes != NULL, "memory");
    memset(bytes, value, num_bytes);
    runner_copy(runner, memory, bytes, num_bytes);
    free(bytes);
}

static void take_arrays(struct arena *arena, struct step_arrays *arrays)
{
    arrays->token_ids = arena_take(arena, MAX_TOKENS, sizeof(int32_t));
    arrays->positions = arena_take(arena, MAX_TOKENS, sizeof(int32_t));
    arrays->slots = arena_take(arena, MAX_TOKENS, sizeof(int32_t));
    arrays->seq_idx = arena_take(arena, MAX_TOKENS, sizeof(int32_t));
    arrays->rows = arena_take(arena, MAX_TOKENS, sizeof(int32_t));
    arrays->query_begin = arena_take(arena, MAX_SEQS + 1, sizeof(int32_t));
    arrays->seq_lens = arena_take(arena, MAX_SEQS, sizeof(int32_t));
    arrays->tables = arena_take(arena, (size_t)MAX_SEQS * SEQ_BLOCKS, sizeof(int32_t));
}

/* All that the device has beside weights and cache. */
static void take_memory(struct arena *arena, const struct forward_limits *limits,
                        struct runner *runner)
{
    runner->scratch = arena_take(arena, runner->scratch_bytes, 1);
    take_arrays(arena, &runner->told);
    forward_buffers_take(arena, &runner->model->config, limits, &runner->buffers);
}

static enum imbrex_status fill_positions(void *arg, void *stream_handle)
{
    struct runner *runner = arg;
    backend_begin(runner->backend, stream_handle);
    forward_extend_positions(&runner->model->config, runner->weights, runner->backend,
                             &runner->buffers, MAX_POSITIONS);
    return backend_end(runner->backend);
}

static enum imbrex_status run_batch(void *arg, void *stream_handle)
{
    struct runner *runner = arg;
    backend_begin(runner->backend, stream_handle);
    forward_run(&runner->model->config, runner->weights, runner->backend, &runner->kv,
                &runner->batch, &runner->buffers);
    forward_logits(&runner->model->config, runner->weights, runner->backend, runner->told.rows,
                   runner->num_rows, &runner->buffers);
    return backend_end(runner->backend);
}

static void runner_give(struct runner *runner, device_work_fn *work)
{
    runner_check(runner, device_run_async(runner->device, DEVICE_STREAM_STEP, work, runner));
    runner_wait(runner);
}

/* options NULL: the host's reference backend. */
static struct runner *runner_create(const struct imbrex_model *model,
                                    const struct backend_cuda_options *options)
{
    struct imbrex_error err = {0};
    const struct model_config *config = &model->config;
    struct runner *runner = calloc(1, sizeof(*runner));
    require(runner != NULL, "memory");
    enum dtype dtype = options == NULL ? DTYPE_F32 : options->activation_dtype;
    struct forward_limits limits = {.max_tokens = MAX_TOKENS,
                                    .max_logit_rows = MAX_TOKENS,
                                    .max_positions = MAX_POSITIONS,
                                    .activation_dtype = dtype};
    struct backend_shape shape = {.hidden_size = config->hidden_size,
                                  .intermediate_size = config->intermediate_size,
                                  .vocab_size = config->vocab_size,
                                  .num_heads = config->num_heads,
                                  .num_kv_heads = config->num_kv_heads,
                                  .head_dim = config->head_dim,
                                  .max_tokens = MAX_TOKENS,
                                  .max_seqs = MAX_SEQS,
                                  .max_logit_rows = MAX_TOKENS,
                                  .max_samples = MAX_SEQS,
                                  .context_size = MAX_POSITIONS,
                                  .activation_dtype = dtype};
    runner->model = model;
    runner->device = options == NULL ? cpu : gpu;
    runner->weights = &model->weights;
    golden_check(device_event_create(runner->device, &runner->event, &err), &err);
    if (options != NULL) {
        runner->scratch_bytes = backend_cuda_scratch_bytes(&shape);
        golden_check(
            weights_place(model, gpu, dtype, HOST_THREADS, NULL, NULL, &runner->placed, &err),
            &err);
        runner->weights = &runner->placed.weights;
    }
    struct arena arena = {0};
    take_memory(&arena, &limits, runner);
    runner->memory = runner_alloc(runner, arena.num_used);
    size_t memory_bytes = arena.num_used;
    arena = (struct arena){.base = runner->memory};
    take_memory(&arena, &limits, runner);
    if (options == NULL) {
        golden_check(backend_cpu_create(HOST_THREADS, 0, NULL, 0, &runner->backend, &err), &err);
    } else {
        golden_check(backend_cuda_create(gpu, options, &shape, runner->scratch,
                                         runner->scratch_bytes, &runner->backend, &err),
                     &err);
    }
    /* NaN in all but the scratch, which is zeroed as the engine's. */
    runner_fill(runner, (unsigned char *)runner->memory + runner->scratch_bytes,
                memory_bytes - runner->scratch_bytes, 0xff);
    arena = (struct arena){0};
    take_arrays(&arena, &runner->host);
    runner->arrays_bytes = arena.num_used;
    arena = (struct arena){.base = calloc(1, runner->arrays_bytes)};
    require(arena.base != NULL, "memory");
    take_arrays(&arena, &runner->host);

    runner->num_blocks = MAX_SEQS * SEQ_BLOCKS + 1;
    size_t used_bytes = 2 * (size_t)config->num_layers * (size_t)config->num_kv_heads * BLOCK_SIZE *
                        (size_t)config->head_dim * dtype_block_bytes(dtype);
    runner->kv = (struct kv_view){.block_bytes = (used_bytes + 4095) / 4096 * 4096,
                                  .dtype = kv_dtype_of(dtype),
                                  .num_layers = config->num_layers,
                                  .num_kv_heads = config->num_kv_heads,
                                  .block_size = BLOCK_SIZE,
                                  .head_dim = config->head_dim};
    size_t kv_bytes = (size_t)runner->num_blocks * runner->kv.block_bytes;
    runner->kv.blocks = runner_alloc(runner, kv_bytes);
    runner_fill(runner, runner->kv.blocks, kv_bytes, STALE_BYTE);
    runner_give(runner, fill_positions);
    return runner;
}

static void runner_destroy(struct runner *runner)
{
    backend_destroy(runner->backend);
    device_free(runner->device, runner->memory);
    device_free(runner->device, runner->kv.blocks);
    weights_place_release(runner->device, &runner->placed);
    device_event_destroy(runner->device, runner->event);
    free(runner->host.token_ids); /* the first: all of them */
    free(runner);
}

/* Tokens [begin, begin + num_tokens) of ids, the text of sequence `seq`. */
struct chunk {
    const int32_t *ids;
    int32_t seq, begin, num_tokens;
};

/* Blocks of all sequences, mixed up: 5 does not divide their number. */
static int32_t block_of(const struct runner *runner, int32_t seq, int32_t idx)
{
    return (seq * SEQ_BLOCKS + idx) * 5 % runner->num_blocks;
}

/* A sequence of the step is a chunk; a step that only decodes is padded as the engine does, to a
 * power of two. Logits of all tokens of chunks: [tokens, vocab_size]. */
static void run_step(struct runner *runner, const struct chunk *chunks, int32_t num_chunks,
                     float *logits)
{
    struct step_arrays *host = &runner->host, *told = &runner->told;
    int32_t token = 0, max_query = 0;
    for (int32_t i = 0; i < num_chunks; i++) {
        const struct chunk *chunk = &chunks[i];
        host->query_begin[i] = token;
        host->seq_lens[i] = chunk->begin + chunk->num_tokens;
        max_query = chunk->num_tokens > max_query ? chunk->num_tokens : max_query;
        for (int32_t j = 0; j < SEQ_BLOCKS; j++) {
            host->tables[i * SEQ_BLOCKS + j] = block_of(runner, chunk->seq, j);
        }
        for (int32_t j = 0; j < chunk->num_tokens; j++, token++) {
            int32_t position = chunk->begin + j;
            host->token_ids[token] = chunk->ids[position];
            host->positions[token] = position;
            host->slots[token] = block_of(runner, chunk->seq, position / BLOCK_SIZE) * BLOCK_SIZE +
                                 position % BLOCK_SIZE;
            host->seq_idx[token] = i;
            host->rows[token] = token;
        }
    }
    int32_t num_seqs = num_chunks, num_rows = token;
    for (; max_query == 1 && (num_seqs & (num_seqs - 1)) != 0; num_seqs++, token++) {
        host->query_begin[num_seqs] = token;
        host->seq_lens[num_seqs] = 1;
        memset(host->tables + num_seqs * SEQ_BLOCKS, 0, SEQ_BLOCKS * sizeof(int32_t));
        host->token_ids[token] = host->positions[token] = 0;
        host->slots[token] = -1;
        host->seq_idx[token] = num_seqs;
    }
    host->query_begin[num_seqs] = token;
    runner_copy(runner, told->token_ids, host->token_ids, runner->arrays_bytes);
    runner->num_rows = num_rows;
    runner->batch = (struct forward_batch){.token_ids = told->token_ids,
                                           .positions = told->positions,
                                           .slot_mapping = told->slots,
                                           .seq_idx = told->seq_idx,
                                           .query_begin = told->query_begin,
                                           .seq_lens = told->seq_lens,
                                           .block_tables = told->tables,
                                           .num_tokens = token,
                                           .num_seqs = num_seqs,
                                           .max_blocks = SEQ_BLOCKS,
                                           .max_query = max_query};
    runner_give(runner, run_batch);
    runner_copy(runner, logits, runner->buffers.logits,
                (size_t)num_rows * (size_t)runner->model->config.vocab_size * sizeof(float));
}

/* ---- texts and their references ---- */

struct text {
    int32_t *ids;
    int32_t num_ids, num_prompt;
    bool is_greedy; /* the ids behind the prompt are those with the largest logits */
    double *fp64;   /* [num_ids, vocab_size] */
    float *host;    /* likewise, of the host's backend */
};

static float *logits_create(const struct imbrex_model *model, int32_t num_rows)
{
    float *logits = malloc((size_t)num_rows * (size_t)model->config.vocab_size * sizeof(float));
    require(logits != NULL, "memory");
    return logits;
}

/* Takes over the ids. */
static struct text text_create(const struct imbrex_model *model, int32_t *ids, int32_t num_ids,
                               int32_t num_prompt, bool is_greedy)
{
    size_t vocab = (size_t)model->config.vocab_size;
    struct text text = {
        .ids = ids, .num_ids = num_ids, .num_prompt = num_prompt, .is_greedy = is_greedy};
    struct forward_fp64 reference;
    struct runner *runner = runner_create(model, NULL);
    text.fp64 = malloc((size_t)num_ids * vocab * sizeof(*text.fp64));
    text.host = logits_create(model, num_ids);
    require(text.fp64 != NULL && num_ids <= MAX_TOKENS, "memory");
    forward_fp64_init(&reference, model, num_ids);
    for (int32_t i = 0; i < num_ids; i++) {
        forward_fp64_push(&reference, ids[i]);
        memcpy(text.fp64 + (size_t)i * vocab, reference.logits, vocab * sizeof(double));
    }
    forward_fp64_deinit(&reference);
    run_step(runner, &(struct chunk){.ids = ids, .num_tokens = num_ids}, 1, text.host);
    runner_destroy(runner);
    return text;
}

static void text_destroy(struct text *text)
{
    free(text->ids);
    free(text->fp64);
    free(text->host);
}

static int32_t best_of(const float *logits, int32_t num_ids)
{
    int32_t best = 0;
    for (int32_t id = 1; id < num_ids; id++) {
        best = logits[id] > logits[best] ? id : best;
    }
    return best;
}

static double gap_of(const double *logits, int32_t num_ids)
{
    double best = -INFINITY, second = -INFINITY;
    for (int32_t id = 0; id < num_ids; id++) {
        if (logits[id] > best) {
            second = best;
            best = logits[id];
        } else if (logits[id] > second) {
            second = logits[id];
        }
    }
    return best - second;
}

/* What a run made of a text, summed up. */
struct outcome {
    int32_t num_differing, num_wrong; /* ids; those too far apart for rounding */
    double host_error;                /* largest, relative to the largest logit */
    double error, largest;            /* against fp64; of all logits */
    double square_error, square;
    double nll, fp64_nll;
    int64_t num_logits, num_tokens;
};

static void outcome_add(struct outcome *outcome, const struct imbrex_model *model,
                        const struct text *text, const float *logits, double gap)
{
    int32_t vocab = model->config.vocab_size;
    double host_error = 0.0, host_largest = 0.0;
    for (int32_t i = 0; i < text->num_ids; i++) {
        const float *found = logits + (int64_t)i * vocab, *host = text->host + (int64_t)i * vocab;
        const double *fp64 = text->fp64 + (int64_t)i * vocab;
        double total = 0.0, fp64_total = 0.0;
        for (int32_t id = 0; id < vocab; id++) {
            double error = fabs(found[id] - fp64[id]);
            /* Written so that NaN counts. */
            outcome->error = error <= outcome->error ? outcome->error : error;
            outcome->largest = fmax(outcome->largest, fabs(fp64[id]));
            outcome->square_error += error * error;
            outcome->square += fp64[id] * fp64[id];
            error = fabs(found[id] - host[id]);
            host_error = error <= host_error ? host_error : error;
            host_largest = fmax(host_largest, fabs(host[id]));
            total += exp((double)found[id]);
            fp64_total += exp(fp64[id]);
        }
        outcome->num_logits += vocab;
        if (i + 1 < text->num_ids) {
            int32_t next = text->ids[i + 1];
            outcome->nll += log(total) - (double)found[next];
            outcome->fp64_nll += log(fp64_total) - fp64[next];
            outcome->num_tokens++;
            if (text->is_greedy && i + 1 >= text->num_prompt && best_of(found, vocab) != next) {
                outcome->num_differing++;
                outcome->num_wrong += gap_of(fp64, vocab) >= gap ? 1 : 0;
            }
        }
    }
    host_error /= host_largest;
    outcome->host_error = host_error <= outcome->host_error ? outcome->host_error : host_error;
}

/* The prompt in one step, then id by id. */
static void run_text(struct runner *runner, const struct text *text, float *logits)
{
    int32_t vocab = runner->model->config.vocab_size;
    run_step(runner, &(struct chunk){.ids = text->ids, .num_tokens = text->num_prompt}, 1, logits);
    for (int32_t i = text->num_prompt; i < text->num_ids; i++) {
        run_step(runner, &(struct chunk){.ids = text->ids, .begin = i, .num_tokens = 1}, 1,
                 logits + (int64_t)i * vocab);
    }
}

struct mode {
    const char *name;
    struct backend_cuda_options options;
};

static const struct mode modes[] = {
    {"fp32", {.activation_dtype = DTYPE_F32}},
    {"bf16", {.activation_dtype = DTYPE_BF16}},
    {"bf16, invariant", {.activation_dtype = DTYPE_BF16, .batch_invariant = true}},
    {"fp32, portable", {.activation_dtype = DTYPE_F32, .ablations = IMBREX_ABLATE_HOPPER}},
    {"bf16, portable", {.activation_dtype = DTYPE_BF16, .ablations = IMBREX_ABLATE_HOPPER}},
    {"bf16, invariant, portable",
     {.activation_dtype = DTYPE_BF16, .batch_invariant = true, .ablations = IMBREX_ABLATE_HOPPER}},
};

/* Catches any error of a kernel or of what it is told. */
static void check_texts(const struct imbrex_model *model, const char *name,
                        const struct text *texts, int32_t num_texts, double bf16_error)
{
    char what[300];
    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
        bool is_fp32 = modes[i].options.activation_dtype == DTYPE_F32;
        struct outcome outcome = {0};
        struct runner *runner = runner_create(model, &modes[i].options);
        for (int32_t j = 0; j < num_texts; j++) {
            float *logits = logits_create(model, texts[j].num_ids);
            run_text(runner, &texts[j], logits);
            outcome_add(&outcome, model, &texts[j], logits, is_fp32 ? 0.0 : BF16_GAP);
            free(logits);
        }
        runner_destroy(runner);
        double nll_error = fabs(outcome.nll / outcome.fp64_nll - 1.0);
        double error = outcome.error / outcome.largest;
        snprintf(what, sizeof(what),
                 "%s, %s: %d ids differ, %d of them wrongly; against the host %.2g, against fp64 "
                 "%.2g of %.1f (rms %.2g); nll %.5f, fp64 %.5f",
                 name, modes[i].name, (int)outcome.num_differing, (int)outcome.num_wrong,
                 outcome.host_error, error, outcome.largest,
                 sqrt(outcome.square_error / outcome.square),
                 outcome.nll / (double)outcome.num_tokens,
                 outcome.fp64_nll / (double)outcome.num_tokens);
        tell(outcome.num_wrong == 0 && nll_error <= BF16_NLL &&
                 (is_fp32 ? outcome.host_error <= FP32_ERROR : error <= bf16_error),
             what);
    }
}

/* Four texts of these lengths, in steps that mix them. */
static const int32_t mixed_lengths[MAX_SEQS] = {150, 37, 20, 90};
static const struct chunk mixed_chunks[][MAX_SEQS] = {
    {{.seq = 0, .begin = 0, .num_tokens = 40}, {.seq = 1, .begin = 0, .num_tokens = 33}},
    {{.seq = 1, .begin = 33, .num_tokens = 1},
     {.seq = 0, .begin = 40, .num_tokens = 70},
     {.seq = 2, .begin = 0, .num_tokens = 17}},
    {{.seq = 0, .begin = 110, .num_tokens = 39},
     {.seq = 1, .begin = 34, .num_tokens = 1},
     {.seq = 2, .begin = 17, .num_tokens = 1},
     {.seq = 3, .begin = 0, .num_tokens = 64}},
    {{.seq = 3, .begin = 64, .num_tokens = 1},
     {.seq = 2, .begin = 18, .num_tokens = 1},
     {.seq = 1, .begin = 35, .num_tokens = 1},
     {.seq = 0, .begin = 149, .num_tokens = 1}},
    {{.seq = 2, .begin = 19, .num_tokens = 1},
     {.seq = 1, .begin = 36, .num_tokens = 1},
     {.seq = 3, .begin = 65, .num_tokens = 1}},
    {{.seq = 3, .begin = 66, .num_tokens = 24}},
};

/* Catches rows that depend on their neighbours or on how a prompt was cut; where they may by
 * rounding, ones that depend on more than that. */
static void check_mixed(const struct imbrex_model *model, const char *name, const int32_t *ids)
{
    char what[300];
    size_t row_bytes = (size_t)model->config.vocab_size * sizeof(float);
    int64_t vocab = model->config.vocab_size;
    float *alone[MAX_SEQS], *mixed = logits_create(model, MAX_TOKENS);
    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
        const struct backend_cuda_options *options = &modes[i].options;
        bool is_same_bits = options->batch_invariant || options->activation_dtype == DTYPE_F32;
        int32_t num_rows = 0, num_differing = 0;
        double error = 0.0, largest = 0.0;
        struct runner *runner = runner_create(model, options);
        for (int32_t seq = 0; seq < MAX_SEQS; seq++) {
            alone[seq] = logits_create(model, mixed_lengths[seq]);
            run_step(runner, &(struct chunk){.ids = ids + seq, .num_tokens = mixed_lengths[seq]}, 1,
                     alone[seq]);
        }
        for (size_t j = 0; j < sizeof(mixed_chunks) / sizeof(mixed_chunks[0]); j++) {
            struct chunk chunks[MAX_SEQS];
            int32_t num_chunks = 0, row = 0;
            for (; num_chunks < MAX_SEQS && mixed_chunks[j][num_chunks].num_tokens > 0;
                 num_chunks++) {
                chunks[num_chunks] = mixed_chunks[j][num_chunks];
                chunks[num_chunks].ids = ids + chunks[num_chunks].seq;
            }
            run_step(runner, chunks, num_chunks, mixed);
            for (int32_t k = 0; k < num_chunks; k++) {
                for (int32_t token = 0; token < chunks[k].num_tokens; token++, row++) {
                    const float *expected =
                        alone[chunks[k].seq] + (chunks[k].begin + token) * vocab;
                    const float *found = mixed + row * vocab;
                    num_differing += memcmp(expected, found, row_bytes) != 0 ? 1 : 0;
                    for (int64_t id = 0; id < vocab; id++) {
                        double difference = fabs((double)found[id] - (double)expected[id]);
                        error = difference <= error ? error : difference;
                        largest = fmax(largest, fabs((double)expected[id]));
                    }
                }
            }
            num_rows += row;
        }
        snprintf(what, sizeof(what),
                 "%s, %s: %d of %d rows of mixed steps differ from those alone, by %.2g of %.1f",
                 name, modes[i].name, (int)num_differing, (int)num_rows, error / largest, largest);
        tell(is_same_bits ? num_differing == 0 : error <= BF16_ERROR * largest, what);
        for (int32_t seq = 0; seq < MAX_SEQS; seq++) {
            free(alone[seq]);
        }
        runner_destroy(runner);
    }
    free(mixed);
}

/* prompt and continuation as one array. */
static int32_t *join_ids(const json_t *prompt, const json_t *rest, int32_t *num_prompt,
                         int32_t *num_ids)
{
    int32_t num_rest;
    int32_t *ids = golden_ids(prompt, num_prompt), *rest_ids = golden_ids(rest, &num_rest);
    *num_ids = *num_prompt + num_rest;
    ids = realloc(ids, (size_t)*num_ids * sizeof(*ids));
    require(ids != NULL, "memory");
    memcpy(ids + *num_prompt, rest_ids, (size_t)num_rest * sizeof(*ids));
    free(rest_ids);
    return ids;
}

static void check_stories(void)
{
    static const char *const paths[] = {"builtin:stories260K", STORIES};
    json_t *root = golden_read_json(STORIES "/greedy_golden.json");
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        struct imbrex_model *model = golden_open(paths[i]);
        int32_t num_ids, num_prompt;
        int32_t *ids = join_ids(json_object_get(root, "prompt_ids"), json_object_get(root, "ids"),
                                &num_prompt, &num_ids);
        struct text text = text_create(model, ids, num_ids, num_prompt, true);
        check_texts(model, paths[i], &text, 1, BF16_ERROR);
        check_mixed(model, paths[i], text.ids);
        text_destroy(&text);
        imbrex_model_close(model);
    }
    json_decref(root);
}

#define QWEN_PROMPTS 5
#define QWEN_ROW 300 /* ids of the validation set that are scored */

static void check_qwen(void)
{
    json_t *root = golden_read_json(QWEN "/golden.json");
    json_t *prompts = json_object_get(root, "prompts");
    json_t *row = golden_read_json(QWEN "/val_ids.json");
    struct imbrex_model *model = golden_open(QWEN);
    struct text texts[QWEN_PROMPTS], validation;
    int32_t num_row_ids;
    int32_t *row_ids = golden_ids(row, &num_row_ids);
    require(json_array_size(prompts) == QWEN_PROMPTS && num_row_ids >= QWEN_ROW, "golden files");
    for (size_t i = 0; i < QWEN_PROMPTS; i++) {
        json_t *prompt = json_array_get(prompts, i);
        int32_t num_ids, num_prompt;
        int32_t *ids = join_ids(json_object_get(prompt, "prompt_ids"),
                                json_object_get(prompt, "fp32_greedy_ids"), &num_prompt, &num_ids);
        texts[i] = text_create(model, ids, num_ids, num_prompt, true);
    }
    check_texts(model, QWEN, texts, QWEN_PROMPTS, BF16_ERROR);
    check_mixed(model, QWEN, row_ids);
    validation = text_create(model, row_ids, QWEN_ROW, QWEN_ROW, false);
    check_texts(model, "validation ids", &validation, 1, BF16_ERROR);
    text_destroy(&validation);
    for (size_t i = 0; i < QWEN_PROMPTS; i++) {
        text_destroy(&texts[i]);
    }
    imbrex_model_close(model);
    json_decref(root);
    json_decref(row);
}

/* ---- random models, also for other programs ---- */

/* A tensor of a safetensors file: bf16 as it is in the model, or fp32. */
struct stored_tensor {
    char name[96];
    const void *elements;
    enum dtype dtype;
    int64_t rows, columns; /* columns 0: a vector */
};

struct stored_tensors {
    struct stored_tensor list[64];
    int32_t count;
};

static void store_tensor(struct stored_tensors *tensors, const char *prefix, const char *name,
                         struct weight_view view, int64_t rows, int64_t columns)
{
    struct stored_tensor *tensor = &tensors->list[tensors->count++];
    require(tensors->count <= 64, "tensors");
    *tensor = (struct stored_tensor){
        .elements = view.elements, .dtype = view.dtype, .rows = rows, .columns = columns};
    snprintf(tensor->name, sizeof(tensor->name), "model.%s%s", prefix, name);
}

static struct stored_tensors list_tensors(const struct imbrex_model *model)
{
    const struct model_config *config = &model->config;
    const struct weights *weights = &model->weights;
    int64_t width = config->hidden_size, inner = config->intermediate_size;
    int64_t q_width = (int64_t)config->num_heads * config->head_dim;
    int64_t kv_width = (int64_t)config->num_kv_heads * config->head_dim;
    struct stored_tensors tensors = {.count = 0};
    require(weights->tied, "a tied model");
    store_tensor(&tensors, "", "embed_tokens.weight", weights->embed_tokens, config->vocab_size,
                 width);
    store_tensor(&tensors, "", "norm.weight", (struct weight_view){weights->norm, DTYPE_F32}, width,
                 0);
    for (int32_t i = 0; i < config->num_layers; i++) {
        const struct layer_weights *layer = &weights->layers[i];
        char prefix[32];
        const struct {
            const char *name;
            struct weight_view view;
            int64_t rows, columns;
        } list[] = {
            {"input_layernorm.weight", {layer->input_layernorm, DTYPE_F32}, width, 0},
            {"post_attention_layernorm.weight",
             {layer->post_attention_layernorm, DTYPE_F32},
             width,
             0},
            {"self_attn.q_proj.weight", layer->q_proj, q_width, width},
            {"self_attn.k_proj.weight", layer->k_proj, kv_width, width},
            {"self_attn.v_proj.weight", layer->v_proj, kv_width, width},
            {"self_attn.q_proj.bias", {layer->q_bias, DTYPE_F32}, q_width, 0},
            {"self_attn.k_proj.bias", {layer->k_bias, DTYPE_F32}, kv_width, 0},
            {"self_attn.v_proj.bias", {layer->v_bias, DTYPE_F32}, kv_width, 0},
            {"self_attn.o_proj.weight", layer->o_proj, width, q_width},
            {"mlp.gate_proj.weight", layer->gate_proj, inner, width},
            {"mlp.up_proj.weight", layer->up_proj, inner, width},
            {"mlp.down_proj.weight", layer->down_proj, width, inner},
        };
        snprintf(prefix, sizeof(prefix), "layers.%d.", (int)i);
        for (size_t j = 0; j < sizeof(list) / sizeof(list[0]); j++) {
            store_tensor(&tensors, prefix, list[j].name, list[j].view, list[j].rows,
                         list[j].columns);
        }
    }
    return tensors;
}

static size_t stored_bytes(const struct stored_tensor *tensor)
{
    return (size_t)tensor->rows * (size_t)(tensor->columns > 0 ? tensor->columns : 1) *
           dtype_block_bytes(tensor->dtype);
}

static json_t *describe_tensors(const struct stored_tensors *tensors)
{
    json_t *root = json_object();
    size_t begin = 0;
    for (int32_t i = 0; i < tensors->count; i++) {
        const struct stored_tensor *tensor = &tensors->list[i];
        json_t *shape = tensor->columns > 0 ? json_pack("[I, I]", (json_int_t)tensor->rows,
                                                        (json_int_t)tensor->columns)
                                            : json_pack("[I]", (json_int_t)tensor->rows);
        size_t end = begin + stored_bytes(tensor);
        json_object_set_new(root, tensor->name,
                            json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_name(tensor->dtype),
                                      "shape", shape, "data_offsets", (json_int_t)begin,
                                      (json_int_t)end));
        begin = end;
    }
    return root;
}

static FILE *open_file(const char *folder, const char *name, const char *file_name)
{
    char path[500];
    snprintf(path, sizeof(path), "%s/%s%s", folder, name, file_name);
    FILE *file = fopen(path, "wb");
    require(file != NULL, path);
    return file;
}

static void write_bytes(FILE *file, const void *bytes, size_t num_bytes)
{
    require(fwrite(bytes, 1, num_bytes, file) == num_bytes, "writing");
}

/* NAME.safetensors; NAME.json: the configuration, the ids; NAME.logits: those in fp64. */
static void write_model(const struct imbrex_model *model, const struct text *text,
                        const char *folder, const char *name)
{
    const struct model_config *config = &model->config;
    struct stored_tensors tensors = list_tensors(model);
    json_t *header = describe_tensors(&tensors);
    char *header_text = json_dumps(header, JSON_COMPACT);
    require(header_text != NULL, "memory");
    uint64_t header_bytes = strlen(header_text);
    FILE *file = open_file(folder, name, ".safetensors");
    write_bytes(file, &header_bytes, sizeof(header_bytes));
    write_bytes(file, header_text, (size_t)header_bytes);
    for (int32_t i = 0; i < tensors.count; i++) {
        write_bytes(file, tensors.list[i].elements, stored_bytes(&tensors.list[i]));
    }
    require(fclose(file) == 0, "writing");
    free(header_text);
    json_decref(header);

    json_t *ids = json_array();
    for (int32_t i = 0; i < text->num_ids; i++) {
        json_array_append_new(ids, json_integer(text->ids[i]));
    }
    json_t *described = json_pack(
        "{s:{s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f}, s:o}", "config", "hidden_size",
        config->hidden_size, "intermediate_size", config->intermediate_size, "num_hidden_layers",
        config->num_layers, "num_attention_heads", config->num_heads, "num_key_value_heads",
        config->num_kv_heads, "vocab_size", config->vocab_size, "rope_theta", config->rope_theta,
        "rms_norm_eps", config->rms_norm_eps, "ids", ids);
    file = open_file(folder, name, ".json");
    require(described != NULL && json_dumpf(described, file, JSON_INDENT(1)) == 0 &&
                fclose(file) == 0,
            "writing");
    json_decref(described);
    file = open_file(folder, name, ".logits");
    write_bytes(file, text->fp64,
                (size_t)text->num_ids * (size_t)config->vocab_size * sizeof(*text->fp64));
    require(fclose(file) == 0, "writing");
}

/* Shapes of published models with fewer layers and ids: their head_dims are those of the fast
 * kernels. */
static void check_random(const char *folder)
{
    enum { NUM_IDS = 72, NUM_PROMPT = 68, NUM_VOCAB = 4000 };
    static const char *const paths[] = {"random:qwen2.5-0.5b", "random:qwen2.5-1.5b"};
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        struct imbrex_error err = {0};
        struct imbrex_model *model = golden_open(paths[i]);
        int32_t *ids = malloc(MAX_TOKENS * sizeof(*ids));
        require(ids != NULL, "memory");
        golden_check(model_fill(model, &err), &err);
        model->config.num_layers = 2;
        model->config.vocab_size = NUM_VOCAB;
        for (int32_t j = 0; j < MAX_TOKENS; j++) {
            ids[j] = (j * 37 + j * j * 11) % NUM_VOCAB;
        }
        check_mixed(model, paths[i], ids);
        struct text text = text_create(model, ids, NUM_IDS, NUM_PROMPT, false);
        check_texts(model, paths[i], &text, 1, BF16_RANDOM_ERROR);
        if (folder != NULL) {
            write_model(model, &text, folder, strchr(paths[i], ':') + 1);
        }
        text_destroy(&text);
        imbrex_model_close(model);
    }
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    bool has_stories = argc < 2, has_qwen = argc < 2, has_random = argc < 2;
    const char *folder = NULL;
    for (int i = 1; i < argc; i++) {
        has_stories |= strcmp(argv[i], "stories") == 0;
        has_qwen |= strcmp(argv[i], "qwen") == 0;
        has_random |= strcmp(argv[i], "random") == 0;
        folder = strcmp(argv[i], "--write") == 0 ? argv[i + 1] : folder;
    }
    if (device_cuda_create(0, &gpu, &err) != IMBREX_STATUS_OK) {
        printf("%s\n", err.message);
        return err.status == IMBREX_STATUS_UNSUPPORTED ? SKIPPED : 1;
    }
    golden_check(device_cpu_create(&cpu, &err), &err);
    if (has_stories) {
        check_stories();
    }
    if (has_qwen) {
        check_qwen();
    }
    if (has_random) {
        check_random(folder);
    }
    device_destroy(gpu);
    device_destroy(cpu);
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed > 0 ? 1 : 0;
}

#else

int main(void)
{
    return check_absent();
}

#endif
