/* SPDX-License-Identifier: Apache-2.0 */
/* The prefill attention kernels on a GPU against an fp64 softmax on the host: sequences of all
 * kinds in one step, chunks of prompts, windows, group sizes, padding. Skipped without a GPU. With
 * --bench also times them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/cuda/backend_cuda.h"
#include "tests/gpu/gpu_session.h"

#define CANARY 0xcaca
#define CANARY_ELEMENTS 256
#define NAN_BITS 0x7fff
#define BLOCK_SIZE 16
#define MAX_SEQS 300
#define NO_BLOCK 0x7ffffff0 /* in a table, behind the blocks of its sequence */

static struct backend *backend;

static void *take(size_t num_bytes)
{
    void *memory = malloc(num_bytes > 0 ? num_bytes : 1);
    require(memory != NULL, "memory");
    return memory;
}

static CUdeviceptr take_on_gpu(size_t num_bytes)
{
    CUdeviceptr memory = 0;
    require(GPU_CALL(&gpu, mem_alloc, &memory, num_bytes > 0 ? num_bytes : 1), "memory of the GPU");
    return memory;
}

static CUdeviceptr upload(const void *memory, size_t num_bytes)
{
    CUdeviceptr copy = take_on_gpu(num_bytes);
    require(copied_to_gpu(copy, memory, num_bytes), "copy to the GPU");
    return copy;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* ---- a step and its reference ---- */

enum vector_kind { QUERY, KEY, VALUE };

/* A sequence of a step. What its tokens hold follows from `name` and their position: the same
 * prompt can be had in other company and in other pieces. */
struct sequence {
    int32_t name, num_tokens, num_keys; /* tokens of the step; keys after it */
};

struct step {
    int32_t head_dim, num_heads, num_kv_heads, num_layers, layer_idx, window, min_query;
    int32_t num_seqs, num_padding; /* rows behind the last sequence's */
    struct sequence seqs[MAX_SEQS];
    /* made by step_create */
    int32_t num_tokens, max_blocks, num_blocks, query_begin[MAX_SEQS + 1];
    size_t block_bytes, d_elements;
    float scale;
    uint16_t *d;
    CUdeviceptr qkv, cache, d_buffer, tables, positions, begins, lens, seq_idx;
};

/* About normal; queries with a deviation of 3, so that few keys make up a row and a wrong one
 * shows. */
static uint16_t element(enum vector_kind kind, int32_t name, int64_t position, int32_t head,
                        int32_t column)
{
    uint64_t bits = mix(mix(mix((uint64_t)kind * 1000003 + (uint64_t)name) + (uint64_t)position) +
                        (uint64_t)head * 4096 + (uint64_t)column);
    double sum = 0.0;
    for (int i = 0; i < 4; i++) {
        sum += (double)(bits >> 16 * i & 0xffff) * 0x1p-16 - 0.5;
    }
    return bf16_from_float((float)(sum * sqrt(3.0) * (kind == QUERY ? 3.0 : 1.0)));
}

static int32_t ceil_div(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

/* Blocks in an order that is no order; what no token has stored is NaN. */
static void fill_cache(struct step *step, int32_t *tables)
{
    size_t num_elements = step->block_bytes / 2 * (size_t)step->num_blocks;
    size_t plane_elements = (size_t)step->num_kv_heads * BLOCK_SIZE * (size_t)step->head_dim;
    uint16_t *cache = take(num_elements * 2);
    int32_t *order = take((size_t)step->num_blocks * sizeof(*order));
    int32_t num_used = 0;

    for (size_t i = 0; i < num_elements; i++) {
        cache[i] = NAN_BITS;
    }
    for (int32_t i = 0; i < step->num_blocks; i++) {
        int32_t other = (int32_t)(mix((uint64_t)i + 77) % (uint64_t)(i + 1));
        order[i] = order[other];
        order[other] = i;
    }
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const struct sequence *seq = &step->seqs[i];
        int32_t *table = tables + (size_t)i * (size_t)step->max_blocks;
        for (int32_t j = 0; j < step->max_blocks; j++) {
            table[j] = j < ceil_div(seq->num_keys, BLOCK_SIZE) ? order[num_used++] : NO_BLOCK;
        }
        for (int32_t position = 0; position < seq->num_keys; position++) {
            uint16_t *layer = cache +
                              (size_t)table[position / BLOCK_SIZE] * (step->block_bytes / 2) +
                              2 * (size_t)step->layer_idx * plane_elements;
            for (int32_t head = 0; head < step->num_kv_heads; head++) {
                uint16_t *key = layer + (size_t)(head * BLOCK_SIZE + position % BLOCK_SIZE) *
                                            (size_t)step->head_dim;
                for (int32_t column = 0; column < step->head_dim; column++) {
                    key[column] = element(KEY, seq->name, position, head, column);
                    key[plane_elements + (size_t)column] =
                        element(VALUE, seq->name, position, head, column);
                }
            }
        }
    }
    step->cache = upload(cache, num_elements * 2);
    free(cache);
    free(order);
}

static void step_create(struct step *step)
{
    int32_t lens[MAX_SEQS];
    size_t row_elements =
        (size_t)(step->num_heads + 2 * step->num_kv_heads) * (size_t)step->head_dim;

    step->scale = 1.0f / sqrtf((float)step->head_dim);
    step->num_tokens = 0;
    step->max_blocks = 1;
    step->num_blocks = 3;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        int32_t num_blocks = ceil_div(step->seqs[i].num_keys, BLOCK_SIZE);
        step->query_begin[i] = step->num_tokens;
        step->num_tokens += step->seqs[i].num_tokens;
        step->num_blocks += num_blocks;
        step->max_blocks = num_blocks > step->max_blocks ? num_blocks : step->max_blocks;
        lens[i] = step->seqs[i].num_keys;
    }
    step->query_begin[step->num_seqs] = step->num_tokens;
    step->num_tokens += step->num_padding;
    size_t block_bytes = 2 * (size_t)step->num_layers * (size_t)step->num_kv_heads * BLOCK_SIZE *
                         (size_t)step->head_dim * 2;
    step->block_bytes = (block_bytes + 4095) / 4096 * 4096;

    size_t num_rows = (size_t)step->num_tokens;
    uint16_t *qkv = take(num_rows * row_elements * 2);
    int32_t *positions = take(num_rows * sizeof(int32_t)),
            *seq_idx = take(num_rows * sizeof(int32_t));
    size_t num_entries = (size_t)step->num_seqs * (size_t)step->max_blocks;
    int32_t *tables = take(num_entries * sizeof(int32_t));
    for (size_t i = 0; i < num_rows * row_elements; i++) {
        qkv[i] = NAN_BITS;
    }
    memset(positions, 0, num_rows * sizeof(int32_t));
    memset(seq_idx, 0, num_rows * sizeof(int32_t));
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const struct sequence *seq = &step->seqs[i];
        for (int32_t j = 0; j < seq->num_tokens; j++) {
            int32_t token = step->query_begin[i] + j;
            positions[token] = seq->num_keys - seq->num_tokens + j;
            seq_idx[token] = i;
            uint16_t *row = qkv + (size_t)token * row_elements;
            for (int32_t k = 0; k < step->num_heads * step->head_dim; k++) {
                row[k] = element(QUERY, seq->name, positions[token], k / step->head_dim,
                                 k % step->head_dim);
            }
        }
    }
    fill_cache(step, tables);
    step->qkv = upload(qkv, num_rows * row_elements * 2);
    step->tables = upload(tables, num_entries * sizeof(int32_t));
    step->positions = upload(positions, num_rows * sizeof(int32_t));
    step->seq_idx = upload(seq_idx, num_rows * sizeof(int32_t));
    step->begins = upload(step->query_begin, (size_t)(step->num_seqs + 1) * sizeof(int32_t));
    step->lens = upload(lens, (size_t)step->num_seqs * sizeof(int32_t));
    step->d_elements = num_rows * (size_t)step->num_heads * (size_t)step->head_dim;
    step->d = take((step->d_elements + 2 * CANARY_ELEMENTS) * 2);
    step->d_buffer = take_on_gpu((step->d_elements + 2 * CANARY_ELEMENTS) * 2);
    free(qkv);
    free(positions);
    free(seq_idx);
    free(tables);
}

static void step_destroy(struct step *step)
{
    const CUdeviceptr buffers[] = {step->qkv,       step->cache,  step->d_buffer, step->tables,
                                   step->positions, step->begins, step->lens,     step->seq_idx};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(step->d);
}

static struct attend_params step_params(const struct step *step)
{
    int32_t max_query = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        max_query = step->seqs[i].num_tokens > max_query ? step->seqs[i].num_tokens : max_query;
    }
    return (struct attend_params){
        .qkv = (const void *)step->qkv,
        .d = (void *)(step->d_buffer + CANARY_ELEMENTS * 2),
        .kv = {.blocks = (unsigned char *)step->cache,
               .block_bytes = step->block_bytes,
               .dtype = KV_DTYPE_BF16,
               .num_layers = step->num_layers,
               .num_kv_heads = step->num_kv_heads,
               .block_size = BLOCK_SIZE,
               .head_dim = step->head_dim},
        .block_tables = (const int32_t *)step->tables,
        .seq_idx = (const int32_t *)step->seq_idx,
        .positions = (const int32_t *)step->positions,
        .query_begin = (const int32_t *)step->begins,
        .seq_lens = (const int32_t *)step->lens,
        .layer_idx = step->layer_idx,
        .num_tokens = step->num_tokens,
        .num_seqs = step->num_seqs,
        .num_heads = step->num_heads,
        .max_blocks = step->max_blocks,
        .max_query = max_query,
        .window = step->window,
        .scale = step->scale,
    };
}

static void launch(const struct attend_params *params, int32_t min_query)
{
    backend_begin(backend, gpu.stream);
    cuda_prefill_attend((struct backend_cuda *)(void *)backend, params, min_query);
    enum imbrex_status status = backend_end(backend);
    if (status != IMBREX_STATUS_OK) {
        printf("%s\n", ((struct backend_cuda *)(void *)backend)->error.message);
    }
    require(status == IMBREX_STATUS_OK, "launch");
}

/* Leaves d in step->d, canaries included. */
static void step_run(struct step *step)
{
    struct attend_params params = step_params(step);
    size_t num_elements = step->d_elements + 2 * CANARY_ELEMENTS;
    for (size_t i = 0; i < num_elements; i++) {
        step->d[i] = CANARY;
    }
    require(copied_to_gpu(step->d_buffer, step->d, num_elements * 2), "copy");
    launch(&params, step->min_query);
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, step->d, step->d_buffer, num_elements * 2),
            "run");
}

static uint16_t *step_row(const struct step *step, int32_t token, int32_t head)
{
    return step->d + CANARY_ELEMENTS +
           ((size_t)token * (size_t)step->num_heads + (size_t)head) * (size_t)step->head_dim;
}

/* Keys and values of one kv head of a sequence, widened. */
struct reference {
    double *keys, *values, *weights;
};

/* d of one head of a token in fp64, and for each element what rounding may make of it: half an ulp
 * of the result, half an ulp of each weight, scores and exponentials in fp32. */
static void reference_row(const struct step *step, const struct sequence *seq, int32_t position,
                          int32_t head, struct reference *memory, double *expected, double *bound)
{
    int32_t first =
        step->window > 0 && position + 1 > step->window ? position + 1 - step->window : 0;
    double largest = -INFINITY, total = 0.0;
    double query[128];
    for (int32_t i = 0; i < step->head_dim; i++) {
        query[i] = (double)bf16_to_float(element(QUERY, seq->name, position, head, i));
        expected[i] = bound[i] = 0.0;
    }
    for (int32_t key = first; key <= position; key++) {
        const double *keys = memory->keys + (size_t)key * (size_t)step->head_dim;
        double sum = 0.0;
        for (int32_t i = 0; i < step->head_dim; i++) {
            sum += query[i] * keys[i];
        }
        memory->weights[key] = sum * (double)step->scale;
        largest = memory->weights[key] > largest ? memory->weights[key] : largest;
    }
    for (int32_t key = first; key <= position; key++) {
        const double *values = memory->values + (size_t)key * (size_t)step->head_dim;
        double weight = exp(memory->weights[key] - largest);
        total += weight;
        for (int32_t i = 0; i < step->head_dim; i++) {
            expected[i] += weight * values[i];
            bound[i] += weight * fabs(values[i]);
        }
    }
    for (int32_t i = 0; i < step->head_dim; i++) {
        expected[i] /= total;
        bound[i] = bound[i] / total * (0x1p-8 + 0x1p-12) + fabs(expected[i]) * 0x1p-8 + 1e-30;
    }
}

/* Every row_step-th token of each sequence, its last one, and all heads of these. */
static bool step_is_right(const struct step *step, int32_t row_step, char *why, size_t why_bytes)
{
    int32_t group_heads = step->num_heads / step->num_kv_heads;
    double expected[128], bound[128], worst = 0.0;

    for (int32_t s = 0; s < step->num_seqs; s++) {
        const struct sequence *seq = &step->seqs[s];
        size_t num_elements = (size_t)seq->num_keys * (size_t)step->head_dim;
        if (seq->num_tokens < step->min_query) {
            continue;
        }
        struct reference memory = {take(num_elements * sizeof(double)),
                                   take(num_elements * sizeof(double)),
                                   take((size_t)seq->num_keys * sizeof(double))};
        for (int32_t kv_head = 0; kv_head < step->num_kv_heads; kv_head++) {
            for (size_t i = 0; i < num_elements; i++) {
                int64_t position = (int64_t)(i / (size_t)step->head_dim);
                int32_t column = (int32_t)(i % (size_t)step->head_dim);
                memory.keys[i] =
                    (double)bf16_to_float(element(KEY, seq->name, position, kv_head, column));
                memory.values[i] =
                    (double)bf16_to_float(element(VALUE, seq->name, position, kv_head, column));
            }
            for (int32_t j = 0; j < seq->num_tokens; j++) {
                if (j % row_step != 0 && j != seq->num_tokens - 1) {
                    continue;
                }
                int32_t position = seq->num_keys - seq->num_tokens + j;
                for (int32_t head = kv_head * group_heads; head < (kv_head + 1) * group_heads;
                     head++) {
                    const uint16_t *row = step_row(step, step->query_begin[s] + j, head);
                    reference_row(step, seq, position, head, &memory, expected, bound);
                    for (int32_t i = 0; i < step->head_dim; i++) {
                        double error = fabs((double)bf16_to_float(row[i]) - expected[i]);
                        if (!(error <= bound[i])) {
                            snprintf(why, why_bytes,
                                     "sequence %d, position %d, head %d, column %d is %g, expected "
                                     "%g within %g",
                                     (int)s, (int)position, (int)head, (int)i,
                                     (double)bf16_to_float(row[i]), expected[i], bound[i]);
                            free(memory.keys);
                            free(memory.values);
                            free(memory.weights);
                            return false;
                        }
                        worst = error / bound[i] > worst ? error / bound[i] : worst;
                    }
                }
            }
        }
        free(memory.keys);
        free(memory.values);
        free(memory.weights);
    }
    snprintf(why, why_bytes, "largest error %.2f of its bound", worst);
    return true;
}

/* Whether everything beside the rows of the sequences that were asked for is as it was. */
static bool rest_is_untouched(const struct step *step)
{
    size_t row_elements = (size_t)step->num_heads * (size_t)step->head_dim;
    bool is_right = true;
    for (int32_t i = 0; i < CANARY_ELEMENTS; i++) {
        is_right = is_right && step->d[i] == CANARY &&
                   step->d[CANARY_ELEMENTS + step->d_elements + (size_t)i] == CANARY;
    }
    for (int32_t s = 0; s <= step->num_seqs; s++) {
        if (s < step->num_seqs && step->seqs[s].num_tokens >= step->min_query) {
            continue;
        }
        size_t begin = (size_t)step->query_begin[s] * row_elements;
        size_t end =
            s < step->num_seqs ? (size_t)step->query_begin[s + 1] * row_elements : step->d_elements;
        for (size_t i = begin; i < end; i++) {
            is_right = is_right && step->d[CANARY_ELEMENTS + i] == CANARY;
        }
    }
    return is_right;
}

/* ---- checks ---- */

static void check_step(struct step *step, int32_t row_step, const char *name)
{
    char why[200] = "", what[400];
    size_t num_bytes = (step->d_elements + 2 * CANARY_ELEMENTS) * 2;

    step_run(step);
    uint16_t *first = take(num_bytes);
    memcpy(first, step->d, num_bytes);
    bool is_right = step_is_right(step, row_step, why, sizeof(why));
    snprintf(what, sizeof(what), "%s, head_dim %d, heads %d / %d, window %d, min_query %d: %s",
             name, (int)step->head_dim, (int)step->num_heads, (int)step->num_kv_heads,
             (int)step->window, (int)step->min_query, why);
    count(is_right, what);
    printf("%s\n", what);
    count(rest_is_untouched(step), "rows beside those asked for were written");
    step_run(step);
    count(memcmp(first, step->d, num_bytes) == 0, "two runs differ");
    free(first);
}

/* Catches wrong tails of rows and keys, prompts taken up in the middle, sequences that are to be
 * left alone, padding, layers and heads mixed up. */
static void check_mixed(int32_t head_dim)
{
    struct step step = {
        .head_dim = head_dim,
        .num_heads = 6,
        .num_kv_heads = 2,
        .num_layers = 3,
        .layer_idx = 1,
        .min_query = 2,
        .num_seqs = 9,
        .num_padding = 5,
        .seqs = {{1, 1, 400},
                 {2, 37, 37},
                 {3, 2, 130},
                 {4, 129, 129},
                 {5, 1, 1},
                 {6, 64, 200},
                 {7, 100, 611},
                 {8, 2, 2},
                 {9, 128, 256}},
    };
    step_create(&step);
    check_step(&step, 1, "mixed");
    step_destroy(&step);
    step.min_query = 1;
    step.layer_idx = 2;
    step_create(&step);
    check_step(&step, 1, "mixed");
    step_destroy(&step);
    for (int32_t window = 1; window < 400; window = window * 3 + 5) {
        step.window = window;
        step_create(&step);
        check_step(&step, 3, "mixed");
        step_destroy(&step);
    }
}

/* Catches rows that are taken apart wrongly into tokens and heads. */
static void check_groups(int32_t head_dim)
{
    static const int32_t groups[] = {1, 2, 4, 6, 7, 8, 16};
    for (size_t i = 0; i < sizeof(groups) / sizeof(groups[0]); i++) {
        struct step step = {
            .head_dim = head_dim,
            .num_heads = 2 * groups[i],
            .num_kv_heads = 2,
            .num_layers = 2,
            .layer_idx = 1,
            .min_query = 1,
            .num_seqs = 3,
            .seqs = {{1, 50, 170}, {2, 1, 77}, {3, 141, 301}},
        };
        step_create(&step);
        check_step(&step, 5, "groups");
        step_destroy(&step);
    }
}

/* Catches stages that are used again too soon and sums that lose what came first. */
static void check_long(int32_t head_dim)
{
    struct step step = {
        .head_dim = head_dim,
        .num_heads = 2,
        .num_kv_heads = 1,
        .num_layers = 1,
        .min_query = 1,
        .num_seqs = 2,
        .seqs = {{1, 3000, 3000}, {2, 200, 5001}},
    };
    step_create(&step);
    check_step(&step, 61, "long");
    step_destroy(&step);
}

/* Catches the search for a tile's sequence going wrong behind the first 32. */
static void check_many_sequences(int32_t head_dim)
{
    struct step step = {
        .head_dim = head_dim,
        .num_heads = 4,
        .num_kv_heads = 2,
        .num_layers = 1,
        .min_query = 2,
        .num_seqs = MAX_SEQS,
    };
    for (int32_t i = 0; i < step.num_seqs; i++) {
        int32_t num_tokens = i % 7 == 3 ? 70 : i % 3;
        step.seqs[i] = (struct sequence){i, num_tokens, num_tokens + i % 50 + 1};
    }
    step_create(&step);
    check_step(&step, 1, "many sequences");
    step_destroy(&step);
}

/* Catches bits that depend on the tokens beside one or on how its prompt was cut: a prompt as a
 * whole, then piece by piece in other company, before the later pieces are in the cache. */
static void check_pieces(int32_t head_dim, int32_t window)
{
    static const int32_t pieces[] = {100, 1, 27, 128, 1, 3, 200, 40};
    struct step whole = {
        .head_dim = head_dim,
        .num_heads = 7,
        .num_kv_heads = 1,
        .num_layers = 1,
        .min_query = 1,
        .window = window,
        .num_seqs = 1,
        .seqs = {{42, 500, 500}},
    };
    size_t row_bytes = (size_t)whole.num_heads * (size_t)head_dim * 2;
    bool is_same = true;
    int32_t position = 0;

    step_create(&whole);
    step_run(&whole);
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        struct step part = whole;
        int32_t place = (int32_t)i % 3;
        part.num_seqs = 3;
        for (int32_t j = 0; j < 3; j++) {
            part.seqs[j] = (struct sequence){j, 1 + 11 * (int32_t)i, 20 + 13 * (int32_t)i};
        }
        part.seqs[place] = (struct sequence){42, pieces[i], position + pieces[i]};
        step_create(&part);
        step_run(&part);
        is_same =
            is_same && memcmp(step_row(&part, part.query_begin[place], 0),
                              step_row(&whole, position, 0), row_bytes * (size_t)pieces[i]) == 0;
        step_destroy(&part);
        position += pieces[i];
    }
    count(position == 500 && is_same, "bits depend on how a prompt was cut");
    step_destroy(&whole);
}

/* ---- timing ---- */

#define NUM_BENCH_LAYERS 4

/* Fills device memory with bits of random numbers, a piece of 64 MiB again and again. */
static void fill_random(CUdeviceptr memory, size_t num_bytes)
{
    size_t piece_elements = (size_t)1 << 25;
    uint16_t *piece = take(piece_elements * 2);
    for (size_t i = 0; i < piece_elements; i++) {
        piece[i] = element(KEY, 1, (int64_t)i, 0, 0);
    }
    for (size_t at = 0; at < num_bytes; at += piece_elements * 2) {
        size_t part = num_bytes - at < piece_elements * 2 ? num_bytes - at : piece_elements * 2;
        require(copied_to_gpu(memory + at, piece, part), "copy");
    }
    free(piece);
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The middle of several replays of a graph of `num_launches`, in microseconds a launch. */
static double time_launches(struct attend_params *params, int num_launches)
{
    enum { NUM_REPLAYS = 7 };
    CUgraph graph = NULL;
    CUgraphExec replay = NULL;
    CUevent begin = NULL, end = NULL;
    float times[NUM_REPLAYS];

    require(GPU_CALL(&gpu, event_create, &begin, 0) && GPU_CALL(&gpu, event_create, &end, 0) &&
                GPU_CALL(&gpu, stream_begin_capture, gpu.stream, CU_STREAM_CAPTURE_MODE_GLOBAL),
            "capture");
    for (int i = 0; i < num_launches; i++) {
        params->layer_idx = i % NUM_BENCH_LAYERS;
        launch(params, 2);
    }
    require(GPU_CALL(&gpu, stream_end_capture, gpu.stream, &graph) &&
                GPU_CALL(&gpu, graph_instantiate, &replay, graph, 0) &&
                GPU_CALL(&gpu, graph_launch, replay, gpu.stream),
            "graph");
    for (int i = 0; i < NUM_REPLAYS; i++) {
        require(GPU_CALL(&gpu, event_record, begin, gpu.stream) &&
                    GPU_CALL(&gpu, graph_launch, replay, gpu.stream) &&
                    GPU_CALL(&gpu, event_record, end, gpu.stream) &&
                    GPU_CALL(&gpu, event_synchronize, end) &&
                    GPU_CALL(&gpu, event_elapsed_time, &times[i], begin, end),
                "replay");
    }
    qsort(times, NUM_REPLAYS, sizeof(times[0]), compare_floats);
    (void)gpu.graph_exec_destroy(replay);
    (void)gpu.graph_destroy(graph);
    (void)gpu.event_destroy(begin);
    (void)gpu.event_destroy(end);
    return (double)times[NUM_REPLAYS / 2] * 1e3 / num_launches;
}

static void bench(int32_t head_dim, int32_t num_heads, int32_t num_kv_heads, int32_t num_tokens,
                  int32_t num_seqs)
{
    struct step step = {
        .head_dim = head_dim,
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .num_layers = NUM_BENCH_LAYERS,
        .num_seqs = num_seqs,
    };
    int32_t seq_tokens = num_tokens / num_seqs;
    size_t row_bytes = (size_t)(num_heads + 2 * num_kv_heads) * (size_t)head_dim * 2;
    int32_t *begins = take((size_t)(num_seqs + 1) * sizeof(int32_t));
    int32_t *lens = take((size_t)num_seqs * sizeof(int32_t));
    int32_t *positions = take((size_t)num_tokens * sizeof(int32_t));
    step.max_blocks = seq_tokens / BLOCK_SIZE;
    step.num_blocks = step.max_blocks * num_seqs;
    int32_t *tables = take((size_t)step.num_blocks * sizeof(int32_t));
    for (int32_t i = 0; i < step.num_blocks; i++) {
        int32_t other = (int32_t)(mix((uint64_t)i) % (uint64_t)(i + 1));
        tables[i] = tables[other];
        tables[other] = i;
    }
    for (int32_t i = 0; i < num_seqs; i++) {
        begins[i] = i * seq_tokens;
        lens[i] = seq_tokens;
    }
    begins[num_seqs] = num_tokens;
    for (int32_t i = 0; i < num_tokens; i++) {
        positions[i] = i % seq_tokens;
    }
    step.num_tokens = num_tokens;
    step.scale = 1.0f / sqrtf((float)head_dim);
    step.block_bytes =
        2 * NUM_BENCH_LAYERS * (size_t)num_kv_heads * BLOCK_SIZE * (size_t)head_dim * 2;
    step.begins = upload(begins, (size_t)(num_seqs + 1) * sizeof(int32_t));
    step.lens = upload(lens, (size_t)num_seqs * sizeof(int32_t));
    step.positions = upload(positions, (size_t)num_tokens * sizeof(int32_t));
    step.seq_idx = take_on_gpu(1);
    step.tables = upload(tables, (size_t)step.num_blocks * sizeof(int32_t));
    step.qkv = take_on_gpu((size_t)num_tokens * row_bytes);
    step.cache = take_on_gpu((size_t)step.num_blocks * step.block_bytes);
    step.d_buffer = take_on_gpu((size_t)num_tokens * row_bytes + 2 * CANARY_ELEMENTS * 2);
    fill_random(step.qkv, (size_t)num_tokens * row_bytes);
    fill_random(step.cache, (size_t)step.num_blocks * step.block_bytes);
    struct attend_params params = step_params(&step);
    params.max_query = seq_tokens;
    double flops = 2.0 * num_tokens * seq_tokens * num_heads * head_dim;
    int num_launches = (int)(2e13 / flops);
    num_launches = num_launches < 4 ? 4 : num_launches > 200 ? 200 : num_launches;
    double us = time_launches(&params, num_launches);
    printf("head_dim %3d, heads %2d / %d, %d x %5d tokens: %9.1f us, %6.1f TFLOP/s\n",
           (int)head_dim, (int)num_heads, (int)num_kv_heads, (int)num_seqs, (int)seq_tokens, us,
           flops / us * 1e-6);
    free(begins);
    free(lens);
    free(positions);
    free(tables);
    step_destroy(&step);
}

static void bench_all(void)
{
    static const int32_t shapes[][3] = {{128, 28, 4}, {64, 14, 2}, {128, 12, 2}};
    static const int32_t lengths[] = {2048, 16384, 32768};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        for (size_t j = 0; j < sizeof(lengths) / sizeof(lengths[0]); j++) {
            bench(shapes[i][0], shapes[i][1], shapes[i][2], lengths[j], 1);
        }
    }
    bench(128, 28, 4, 16384, 8);
    bench(64, 14, 2, 16384, 8);
}

static void run_checks(int32_t head_dim)
{
    check_mixed(head_dim);
    check_groups(head_dim);
    check_long(head_dim);
    check_many_sequences(head_dim);
    check_pieces(head_dim, 0);
    check_pieces(head_dim, 90);
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    int exit_code = 0;
    const struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16};
    const struct backend_shape shape = {.head_dim = 128};

    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    require(backend_cuda_create_on(device, &options, &shape, NULL, 0, &backend, &err) ==
                IMBREX_STATUS_OK,
            "backend");
    run_checks(128);
    run_checks(64);
    if (argc > 1 && strcmp(argv[1], "--bench") == 0 && num_failed == 0) {
        bench_all();
    }
    backend_destroy(backend);
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
