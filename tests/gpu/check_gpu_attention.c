/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on mma.sync, of single tokens and of any number, on a GPU against an fp64 softmax on
 * the host: sequences of mixed lengths in shuffled blocks, prompts cut anywhere, windows, groups of
 * heads of many sizes. Slots of the cache that hold no key are NaN. With --bench, times per call
 * from graphs of calls that read more than the L2 cache holds; with --bench-steps, of attention
 * among the other kernels of a step. Skipped where there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/cuda/backend_cuda.h"
#include "tests/gpu/gpu_session.h"

#define CANARY 0xcaca
#define CANARY_ELEMENTS 512
#define POISON 0x7fc0 /* NaN */
#define BLOCK 16
#define MAX_SEQS 400
#define NUM_LAYERS 2
#define LAYER_IDX 1

static uint64_t random_state = 1;

static uint32_t random_below(uint32_t bound)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 32) * bound >> 32);
}

/* Of about a normal distribution, in bf16. */
static uint16_t random_element(float scale)
{
    float sum = 0.0f;
    for (int i = 0; i < 3; i++) {
        sum += (float)random_below(1u << 24) * 0x1p-23f - 1.0f;
    }
    return bf16_from_float(scale * sum);
}

static CUdeviceptr allocate(size_t num_bytes)
{
    CUdeviceptr memory;
    require(GPU_CALL(&gpu, mem_alloc, &memory, num_bytes), "memory of the GPU");
    return memory;
}

static CUdeviceptr upload(const void *from, size_t num_bytes)
{
    CUdeviceptr memory = allocate(num_bytes);
    require(copied_to_gpu(memory, from, num_bytes), "copy to the GPU");
    return memory;
}

static void *zeroed(size_t count_of, size_t element_bytes)
{
    void *memory = calloc(count_of, element_bytes);
    require(memory != NULL, "memory");
    return memory;
}

/* ---- a step ---- */

struct shape {
    int32_t num_heads, num_kv_heads, head_dim, window;
    float q_scale;
};

/* What a sequence brings into the step: its last num_queries of num_keys positions. */
struct sequence {
    int32_t num_queries, num_keys;
};

struct step {
    struct shape shape;
    int32_t num_seqs, num_tokens, num_unowned, max_blocks, num_blocks;
    struct sequence seqs[MAX_SEQS];
    struct kv_view kv; /* of the GPU */
    unsigned char *blocks;
    size_t blocks_bytes;
    uint16_t *qkv, *d; /* d with canaries around it */
    int32_t *tables, *positions, *query_begin, *seq_lens, *seq_idx;
    size_t d_elements;
    CUdeviceptr gpu_qkv, gpu_d, gpu_tables, gpu_positions, gpu_query_begin, gpu_seq_lens,
        gpu_seq_idx;
};

typedef void attend_fn(struct backend_cuda *cuda, const struct attend_params *params);

static int32_t qkv_width(const struct shape *shape)
{
    return (shape->num_heads + 2 * shape->num_kv_heads) * shape->head_dim;
}

static int32_t d_width(const struct shape *shape)
{
    return shape->num_heads * shape->head_dim;
}

/* The keys of one head in a block, or its values. */
static uint16_t *plane_at(const struct step *step, int32_t block, int32_t kv_head, bool is_value)
{
    const struct shape *shape = &step->shape;
    size_t head_elements = (size_t)BLOCK * (size_t)shape->head_dim;
    size_t plane = (size_t)(2 * LAYER_IDX + (is_value ? 1 : 0)) * (size_t)shape->num_kv_heads +
                   (size_t)kv_head;
    return (uint16_t *)(void *)(step->blocks + (size_t)block * step->kv.block_bytes) +
           plane * head_elements;
}

static uint16_t *element_at(const struct step *step, int32_t seq, int32_t key, int32_t kv_head,
                            bool is_value)
{
    int32_t block = step->tables[seq * step->max_blocks + key / BLOCK];
    return plane_at(step, block, kv_head, is_value) + key % BLOCK * step->shape.head_dim;
}

/* Every sequence in blocks of its own, in random order; entries behind a sequence's blocks name a
 * block of NaN. */
static void place_blocks(struct step *step)
{
    int32_t num_used = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        int32_t num_blocks = (step->seqs[i].num_keys + BLOCK - 1) / BLOCK;
        step->max_blocks = num_blocks > step->max_blocks ? num_blocks : step->max_blocks;
        num_used += num_blocks;
    }
    step->max_blocks += 3;
    step->num_blocks = num_used + 1;
    int32_t *order = zeroed((size_t)num_used + 1, sizeof(int32_t));
    for (int32_t i = 0; i < num_used; i++) {
        int32_t at = (int32_t)random_below((uint32_t)i + 1);
        order[i] = order[at];
        order[at] = i + 1;
    }
    step->tables = zeroed((size_t)(step->num_seqs * step->max_blocks), sizeof(int32_t));
    int32_t next = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        for (int32_t j = 0; j * BLOCK < step->seqs[i].num_keys; j++) {
            step->tables[i * step->max_blocks + j] = order[next++];
        }
    }
    free(order);
}

static void fill_cache(struct step *step)
{
    const struct shape *shape = &step->shape;
    size_t plane_bytes =
        (size_t)shape->num_kv_heads * BLOCK * (size_t)shape->head_dim * sizeof(uint16_t);
    step->kv = (struct kv_view){.block_bytes = (2 * NUM_LAYERS * plane_bytes + 4095) / 4096 * 4096,
                                .dtype = KV_DTYPE_BF16,
                                .num_layers = NUM_LAYERS,
                                .num_kv_heads = shape->num_kv_heads,
                                .block_size = BLOCK,
                                .head_dim = shape->head_dim};
    step->blocks_bytes = (size_t)step->num_blocks * step->kv.block_bytes;
    step->blocks = zeroed(step->blocks_bytes, 1);
    for (size_t i = 0; i < step->blocks_bytes / 2; i++) {
        ((uint16_t *)(void *)step->blocks)[i] = POISON;
    }
    for (int32_t i = 0; i < step->num_seqs; i++) {
        /* Under a window, what no token sees any more may have been overwritten. */
        int32_t first = step->seqs[i].num_keys - step->seqs[i].num_queries + 1 - shape->window;
        for (int32_t key = shape->window > 0 && first > 0 ? first : 0; key < step->seqs[i].num_keys;
             key++) {
            for (int32_t head = 0; head < shape->num_kv_heads; head++) {
                uint16_t *keys = element_at(step, i, key, head, false);
                uint16_t *values = element_at(step, i, key, head, true);
                for (int32_t j = 0; j < shape->head_dim; j++) {
                    keys[j] = random_element(1.0f);
                    values[j] = random_element(1.0f);
                }
            }
        }
    }
}

static struct step *step_create(const struct shape *shape, const struct sequence *seqs,
                                int32_t num_seqs, int32_t num_unowned)
{
    struct step *step = zeroed(1, sizeof(*step));
    step->shape = *shape;
    step->num_seqs = num_seqs;
    step->num_unowned = num_unowned;
    memcpy(step->seqs, seqs, (size_t)num_seqs * sizeof(*seqs));
    place_blocks(step);
    fill_cache(step);
    step->query_begin = zeroed((size_t)num_seqs + 1, sizeof(int32_t));
    step->seq_lens = zeroed((size_t)num_seqs, sizeof(int32_t));
    for (int32_t i = 0; i < num_seqs; i++) {
        step->query_begin[i] = step->num_tokens;
        step->seq_lens[i] = seqs[i].num_keys;
        step->num_tokens += seqs[i].num_queries;
    }
    step->query_begin[num_seqs] = step->num_tokens;
    step->num_tokens += num_unowned;
    size_t tokens = (size_t)step->num_tokens;
    step->positions = zeroed(tokens, sizeof(int32_t));
    step->seq_idx = zeroed(tokens, sizeof(int32_t));
    for (int32_t i = 0; i < num_seqs; i++) {
        for (int32_t j = 0; j < seqs[i].num_queries; j++) {
            step->positions[step->query_begin[i] + j] = seqs[i].num_keys - seqs[i].num_queries + j;
            step->seq_idx[step->query_begin[i] + j] = i;
        }
    }
    size_t qkv_elements = tokens * (size_t)qkv_width(shape);
    step->qkv = zeroed(qkv_elements, 2);
    for (size_t i = 0; i < qkv_elements; i++) {
        bool is_q = i % (size_t)qkv_width(shape) < (size_t)d_width(shape);
        step->qkv[i] = is_q ? random_element(shape->q_scale) : POISON;
    }
    step->d_elements = tokens * (size_t)d_width(shape) + 2 * CANARY_ELEMENTS;
    step->d = zeroed(step->d_elements, 2);
    step->kv.blocks = (unsigned char *)upload(step->blocks, step->blocks_bytes);
    step->gpu_qkv = upload(step->qkv, qkv_elements * 2);
    step->gpu_d = allocate(step->d_elements * 2);
    step->gpu_tables =
        upload(step->tables, (size_t)(num_seqs * step->max_blocks) * sizeof(int32_t));
    step->gpu_positions = upload(step->positions, tokens * sizeof(int32_t));
    step->gpu_query_begin = upload(step->query_begin, ((size_t)num_seqs + 1) * sizeof(int32_t));
    step->gpu_seq_lens = upload(step->seq_lens, (size_t)num_seqs * sizeof(int32_t));
    step->gpu_seq_idx = upload(step->seq_idx, tokens * sizeof(int32_t));
    return step;
}

static void step_destroy(struct step *step)
{
    const CUdeviceptr buffers[] = {
        (CUdeviceptr)step->kv.blocks, step->gpu_qkv,         step->gpu_d,        step->gpu_tables,
        step->gpu_positions,          step->gpu_query_begin, step->gpu_seq_lens, step->gpu_seq_idx};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(step->blocks);
    free(step->qkv);
    free(step->d);
    free(step->tables);
    free(step->positions);
    free(step->query_begin);
    free(step->seq_lens);
    free(step->seq_idx);
    free(step);
}

/* ---- calls ---- */

/* Sequences [first, first + num_seqs) of a step; the unowned tokens only where all are asked for.
 * */
static struct attend_params params_of(const struct step *step, int32_t first, int32_t num_seqs)
{
    int32_t max_query = 0;
    for (int32_t i = first; i < first + num_seqs; i++) {
        max_query = step->seqs[i].num_queries > max_query ? step->seqs[i].num_queries : max_query;
    }
    return (struct attend_params){
        .qkv = (const void *)step->gpu_qkv,
        .d = (void *)(step->gpu_d + CANARY_ELEMENTS * 2),
        .kv = step->kv,
        .block_tables = (const int32_t *)step->gpu_tables + first * step->max_blocks,
        .seq_idx = (const int32_t *)step->gpu_seq_idx,
        .positions = (const int32_t *)step->gpu_positions,
        .query_begin = (const int32_t *)step->gpu_query_begin + first,
        .seq_lens = (const int32_t *)step->gpu_seq_lens + first,
        .layer_idx = LAYER_IDX,
        .num_tokens = step->num_tokens,
        .num_seqs = num_seqs,
        .num_heads = step->shape.num_heads,
        .max_blocks = step->max_blocks,
        .max_query = max_query,
        .window = step->shape.window,
        .scale = 1.0f / sqrtf((float)step->shape.head_dim),
    };
}

struct bed {
    struct backend *backend;
    CUdeviceptr scratch;
};

/* For a shape of any problem here. */
static uint32_t ablations; /* of all backends */

static struct bed bed_create(const struct shape *shape, int32_t max_seqs, int32_t context_size)
{
    struct bed bed;
    struct imbrex_error err = {0};
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16, .ablations = ablations};
    struct backend_shape all = {.hidden_size = 64,
                                .intermediate_size = 64,
                                .vocab_size = 64,
                                .num_heads = shape->num_heads,
                                .num_kv_heads = shape->num_kv_heads,
                                .head_dim = shape->head_dim,
                                .max_tokens = 8192,
                                .max_seqs = max_seqs,
                                .max_logit_rows = 1,
                                .max_samples = 1,
                                .context_size = context_size,
                                .activation_dtype = DTYPE_BF16};
    size_t num_bytes = cuda_decode_attention_scratch_bytes(&all);
    bed.scratch = allocate(num_bytes + 256);
    /* Of no use to a kernel that relies on what it left there. */
    require(GPU_CALL(&gpu, memset_d8_async, bed.scratch, 0xff, num_bytes + 256, gpu.stream),
            "scratch");
    require(backend_cuda_create_on(device, &options, &all, (void *)bed.scratch, num_bytes,
                                   &bed.backend, &err) == IMBREX_STATUS_OK,
            err.message);
    return bed;
}

static void bed_destroy(struct bed *bed)
{
    backend_destroy(bed->backend);
    (void)gpu.mem_free(bed->scratch);
}

static void poison_result(struct step *step)
{
    require(GPU_CALL(&gpu, memset_d8_async, step->gpu_d, CANARY & 0xff, step->d_elements * 2,
                     gpu.stream),
            "poison");
}

static bool call(struct bed *bed, attend_fn *attend, const struct attend_params *params)
{
    struct backend_cuda *cuda = (struct backend_cuda *)(void *)bed->backend;
    backend_begin(bed->backend, gpu.stream);
    attend(cuda, params);
    enum imbrex_status status = backend_end(bed->backend);
    if (status != IMBREX_STATUS_OK) {
        printf("%s\n", cuda->error.message);
    }
    return status == IMBREX_STATUS_OK;
}

static void download_result(struct step *step)
{
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, step->d, step->gpu_d, step->d_elements * 2),
            "copy from the GPU");
}

/* ---- the reference ---- */

/* What one head of one token must be, and within which bound: weights and the result are rounded to
 * bf16, the rest is fp32. */
static void reference(const struct step *step, int32_t seq, int32_t token, int32_t head,
                      double *expected, double *bound)
{
    const struct shape *shape = &step->shape;
    int32_t kv_head = head / (shape->num_heads / shape->num_kv_heads);
    const uint16_t *q = step->qkv + (int64_t)token * qkv_width(shape) + head * shape->head_dim;
    int32_t num_keys = step->positions[token] + 1;
    int32_t first = shape->window > 0 && num_keys > shape->window ? num_keys - shape->window : 0;
    double *weights = zeroed((size_t)num_keys, sizeof(double));
    double wide_q[256], largest = -INFINITY, total = 0.0;
    for (int32_t j = 0; j < shape->head_dim; j++) {
        wide_q[j] = bf16_to_float(q[j]);
        expected[j] = bound[j] = 0.0;
    }
    for (int32_t key = first; key < num_keys; key++) {
        const uint16_t *keys = element_at(step, seq, key, kv_head, false);
        double sum = 0.0;
        for (int32_t j = 0; j < shape->head_dim; j++) {
            sum += wide_q[j] * (double)bf16_to_float(keys[j]);
        }
        weights[key] = sum / sqrt(shape->head_dim);
        largest = weights[key] > largest ? weights[key] : largest;
    }
    for (int32_t key = first; key < num_keys; key++) {
        const uint16_t *values = element_at(step, seq, key, kv_head, true);
        double weight = exp(weights[key] - largest);
        total += weight;
        for (int32_t j = 0; j < shape->head_dim; j++) {
            double value = bf16_to_float(values[j]);
            expected[j] += weight * value;
            bound[j] += weight * fabs(value);
        }
    }
    for (int32_t j = 0; j < shape->head_dim; j++) {
        expected[j] /= total;
        bound[j] = (0x1p-8 + 1e-4) * (bound[j] / total + fabs(expected[j])) + 1e-30;
    }
    free(weights);
}

static bool is_owned(const struct step *step, int32_t token, bool single_only)
{
    int32_t seq = step->seq_idx[token];
    return token < step->query_begin[step->num_seqs] &&
           (!single_only || step->seqs[seq].num_queries == 1);
}

/* Nothing beside the result was written, and everything of it. */
static bool surroundings_are_right(const struct step *step, bool single_only, char *why,
                                   size_t why_bytes)
{
    int64_t width = d_width(&step->shape);
    for (size_t i = 0; i < step->d_elements; i++) {
        int64_t at = (int64_t)i - CANARY_ELEMENTS;
        bool is_inside = at >= 0 && at < step->num_tokens * width &&
                         is_owned(step, (int32_t)(at / width), single_only);
        float found = bf16_to_float(step->d[i]);
        if (is_inside ? !isfinite(found) : step->d[i] != CANARY) {
            snprintf(why, why_bytes, "element %lld of %d a row is %g (%s)", (long long)at,
                     (int)width, (double)found, is_inside ? "written" : "not to be written");
            return false;
        }
    }
    return true;
}

/* Of about num_checked heads of tokens, spread over the step. */
static bool result_is_right(const struct step *step, bool single_only, int32_t num_checked,
                            char *why, size_t why_bytes)
{
    const struct shape *shape = &step->shape;
    int64_t num_rows = (int64_t)step->query_begin[step->num_seqs] * shape->num_heads;
    double expected[256], bound[256], error_squares = 0.0, bound_squares = 0.0;
    for (int64_t i = 0; i < num_checked; i++) {
        int64_t row = num_rows <= num_checked ? i : (int64_t)random_below((uint32_t)num_rows);
        if (row >= num_rows) {
            break;
        }
        int32_t token = (int32_t)(row / shape->num_heads), head = (int32_t)(row % shape->num_heads);
        if (!is_owned(step, token, single_only)) {
            continue;
        }
        reference(step, step->seq_idx[token], token, head, expected, bound);
        for (int32_t j = 0; j < shape->head_dim; j++) {
            double found = bf16_to_float(step->d[CANARY_ELEMENTS + row * shape->head_dim + j]);
            double error = found - expected[j];
            error_squares += error * error;
            bound_squares += bound[j] * bound[j];
            if (!(fabs(error) <= bound[j])) {
                snprintf(why, why_bytes,
                         "token %d of sequence %d, head %d, column %d: %g, "
                         "expected %g within %g",
                         (int)token, (int)step->seq_idx[token], (int)head, (int)j, found,
                         expected[j], bound[j]);
                return false;
            }
        }
    }
    if (error_squares > 0.16 * bound_squares) {
        snprintf(why, why_bytes, "all together: error %g of the bound",
                 sqrt(error_squares / bound_squares));
        return false;
    }
    return true;
}

/* ---- checks ---- */

/* Catches wrong results, writes beside them, and results that change from run to run or with the
 * sequences beside them. */
static void check_step(attend_fn *attend, bool single_only, const struct shape *shape,
                       const struct sequence *seqs, int32_t num_seqs, int32_t num_checked,
                       const char *name)
{
    char why[200] = "", what[400];
    int32_t context_size = 16;
    for (int32_t i = 0; i < num_seqs; i++) {
        context_size = seqs[i].num_keys > context_size ? seqs[i].num_keys : context_size;
    }
    struct step *step = step_create(shape, seqs, num_seqs, 5);
    struct bed bed = bed_create(shape, num_seqs, context_size + 3 * BLOCK);
    struct attend_params params = params_of(step, 0, num_seqs);

    poison_result(step);
    bool is_right = call(&bed, attend, &params);
    download_result(step);
    is_right = is_right && surroundings_are_right(step, single_only, why, sizeof(why)) &&
               result_is_right(step, single_only, num_checked, why, sizeof(why));
    snprintf(what, sizeof(what), "%s, heads %d/%d x %d, window %d: %s", name, (int)shape->num_heads,
             (int)shape->num_kv_heads, (int)shape->head_dim, (int)shape->window, why);
    count(is_right, what);

    uint16_t *first = zeroed(step->d_elements, 2);
    memcpy(first, step->d, step->d_elements * 2);
    poison_result(step);
    bool is_same = call(&bed, attend, &params);
    download_result(step);
    snprintf(what, sizeof(what), "%s, heads %d/%d x %d, window %d: same bits again", name,
             (int)shape->num_heads, (int)shape->num_kv_heads, (int)shape->head_dim,
             (int)shape->window);
    count(is_same && memcmp(first, step->d, step->d_elements * 2) == 0, what);

    poison_result(step);
    for (int32_t i = 0; i < num_seqs && is_same; i++) {
        params = params_of(step, i, 1);
        is_same = call(&bed, attend, &params);
    }
    download_result(step);
    snprintf(what, sizeof(what), "%s, heads %d/%d x %d, window %d: same bits alone", name,
             (int)shape->num_heads, (int)shape->num_kv_heads, (int)shape->head_dim,
             (int)shape->window);
    count(is_same && memcmp(first, step->d, step->d_elements * 2) == 0, what);
    free(first);
    bed_destroy(&bed);
    step_destroy(step);
}

static const struct sequence mixed[] = {{1, 1},    {37, 37},  {1, 17},    {5, 133}, {1, 512},
                                        {64, 200}, {1, 1000}, {130, 130}, {0, 7},   {1, 16},
                                        {1, 33},   {2, 65},   {1, 128}};

static void check_tensor(size_t shape_step)
{
    static const struct sequence chunks[] = {{300, 300}, {1, 5000}, {257, 2057}, {1, 1}, {1, 64}};
    static const struct shape shapes[] = {
        {14, 2, 64, 0, 1.0f},  {28, 4, 128, 0, 2.0f},  {12, 2, 128, 0, 1.0f}, {4, 4, 16, 0, 2.0f},
        {5, 1, 48, 0, 1.0f},   {3, 1, 96, 0, 1.0f},    {6, 3, 80, 0, 2.0f},   {2, 1, 112, 0, 1.0f},
        {8, 2, 144, 0, 1.0f},  {2, 2, 192, 0, 1.0f},   {8, 1, 256, 0, 2.0f},  {4, 2, 240, 0, 1.0f},
        {40, 2, 64, 0, 1.0f},  {14, 2, 64, 100, 1.0f}, {8, 1, 128, 17, 1.0f}, {6, 2, 32, 1, 1.0f},
        {4, 1, 256, 40, 1.0f}, {130, 1, 16, 0, 1.0f},  {8, 8, 128, 64, 1.0f},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += shape_step) {
        check_step(cuda_tensor_attend, false, &shapes[i], mixed, sizeof(mixed) / sizeof(mixed[0]),
                   1500, "tensor, mixed");
    }
    for (size_t i = 0; i < 3; i += shape_step) {
        check_step(cuda_tensor_attend, false, &shapes[i], chunks,
                   sizeof(chunks) / sizeof(chunks[0]), 300, "tensor, chunks");
    }
}

/* Catches bits that depend on where a prompt was cut. */
static void check_tensor_cuts(void)
{
    static const struct shape shape = {14, 2, 64, 0, 1.0f};
    static const struct sequence whole = {400, 400};
    struct step *step = step_create(&shape, &whole, 1, 0);
    struct bed bed = bed_create(&shape, 4, 512);
    struct attend_params params = params_of(step, 0, 1);

    poison_result(step);
    bool is_same = call(&bed, cuda_tensor_attend, &params);
    download_result(step);
    uint16_t *first = zeroed(step->d_elements, 2);
    memcpy(first, step->d, step->d_elements * 2);
    poison_result(step);
    for (int32_t begin = 0, end; begin < 400 && is_same; begin = end) {
        end = begin + 1 + (int32_t)random_below(90);
        end = end < 400 ? end : 400;
        const int32_t query_begin[] = {begin, end};
        require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                    copied_to_gpu(step->gpu_query_begin, query_begin, sizeof(query_begin)) &&
                    copied_to_gpu(step->gpu_seq_lens, &end, sizeof(end)),
                "copy to the GPU");
        is_same = call(&bed, cuda_tensor_attend, &params);
    }
    download_result(step);
    count(is_same && memcmp(first, step->d, step->d_elements * 2) == 0,
          "tensor: same bits wherever a prompt is cut");
    free(first);
    bed_destroy(&bed);
    step_destroy(step);
}

static void check_decode(size_t shape_step)
{
    static const struct shape shapes[] = {
        {14, 2, 64, 0, 1.0f},    {28, 4, 128, 0, 2.0f},   {12, 2, 128, 0, 1.0f},
        {16, 2, 128, 0, 1.0f},   {4, 4, 64, 0, 2.0f},     {9, 1, 128, 0, 1.0f},
        {16, 1, 64, 0, 1.0f},    {24, 1, 128, 0, 1.0f},   {40, 2, 64, 0, 1.0f},
        {14, 2, 64, 100, 1.0f},  {28, 4, 128, 513, 1.0f}, {8, 1, 128, 1, 1.0f},
        {24, 2, 64, 4000, 1.0f},
    };
    struct sequence seqs[MAX_SEQS];
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += shape_step) {
        check_step(cuda_decode_attend, true, &shapes[i], mixed, sizeof(mixed) / sizeof(mixed[0]),
                   1500, "decode, mixed");
        static const int32_t edges[] = {1,   15,  16,  17,   31,   32,   33,   255,  256, 257,
                                        511, 512, 513, 1023, 1024, 1025, 2047, 2049, 5000};
        int32_t num_seqs = 0;
        for (size_t j = 0; j < sizeof(edges) / sizeof(edges[0]); j++) {
            seqs[num_seqs++] = (struct sequence){1, edges[j]};
        }
        for (int32_t j = 0; j < 12; j++) {
            seqs[num_seqs++] = (struct sequence){1, 1 + (int32_t)random_below(3000)};
        }
        check_step(cuda_decode_attend, true, &shapes[i], seqs, num_seqs, 300, "decode, lengths");
    }
    if (shape_step > 1) {
        return;
    }
    static const struct sequence far[] = {{1, 40000}, {1, 3}, {1, 17000}};
    check_step(cuda_decode_attend, true, &shapes[0], far, 3, 20, "decode, far");
    check_step(cuda_decode_attend, true, &shapes[1], far, 3, 20, "decode, far");
    for (int32_t j = 0; j < MAX_SEQS; j++) {
        seqs[j] = (struct sequence){1, 1 + (int32_t)random_below(90)};
    }
    check_step(cuda_decode_attend, true, &shapes[1], seqs, MAX_SEQS, 300, "decode, many");
}

#include "attention_bench.h"

static bool has_argument(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return true;
        }
    }
    return false;
}

int main(int argc, char **argv)
{
    int exit_code = 0;
    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    int shape_step = argc > 1 ? atoi(argv[1]) : 0;
    check_tensor(shape_step > 0 ? (size_t)shape_step : 1);
    check_tensor_cuts();
    /* As the driver compiles it for other GPUs than Hopper. */
    ablations = IMBREX_ABLATE_HOPPER;
    check_tensor(shape_step > 0 ? (size_t)shape_step : 1);
    check_tensor_cuts();
    ablations = 0;
    check_decode(shape_step > 0 ? (size_t)shape_step : 1);
    if (has_argument(argc, argv, "--bench")) {
        bench_all();
    }
    if (has_argument(argc, argv, "--bench-steps")) {
        bench_steps_all();
    }
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
