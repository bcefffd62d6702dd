/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/attention_bed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/ref/ref_kernels.h"

#define POISON 0x7fc0 /* NaN */

static uint64_t random_state = 1;

uint32_t random_below(uint32_t bound)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 32) * bound >> 32);
}

uint16_t random_element(float scale)
{
    float sum = 0.0f;
    for (int i = 0; i < 3; i++) {
        sum += (float)random_below(1u << 24) * 0x1p-23f - 1.0f;
    }
    return bf16_from_float(scale * sum);
}

CUdeviceptr allocate(size_t num_bytes)
{
    CUdeviceptr memory;
    require(GPU_CALL(&gpu, mem_alloc, &memory, num_bytes), "memory of the GPU");
    return memory;
}

CUdeviceptr upload(const void *from, size_t num_bytes)
{
    CUdeviceptr memory = allocate(num_bytes);
    require(copied_to_gpu(memory, from, num_bytes), "copy to the GPU");
    return memory;
}

void *zeroed(size_t count_of, size_t element_bytes)
{
    void *memory = calloc(count_of, element_bytes);
    require(memory != NULL, "memory");
    return memory;
}

/* ---- a step ---- */

int32_t qkv_width(const struct shape *shape)
{
    return (shape->num_heads + 2 * shape->num_kv_heads) * shape->head_dim;
}

int32_t d_width(const struct shape *shape)
{
    return shape->num_heads * shape->head_dim;
}

static struct kv_row row_at(const struct step *step, int32_t seq, int32_t key, int32_t kv_head,
                            bool is_value)
{
    const struct kv_view *kv = &step->host_kv;
    int32_t block = step->tables[seq * step->max_blocks + key / BLOCK];
    unsigned char *head = is_value ? kv_view_values(kv, block, LAYER_IDX, kv_head)
                                   : kv_view_keys(kv, block, LAYER_IDX, kv_head);
    return kv_view_row(kv, head, key % BLOCK);
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

/* A cache of NaN. */
static void make_cache(struct step *step, enum kv_dtype dtype)
{
    struct kv_view *kv = &step->host_kv;
    *kv = (struct kv_view){.dtype = dtype,
                           .num_layers = NUM_LAYERS,
                           .num_kv_heads = step->shape.num_kv_heads,
                           .block_size = BLOCK,
                           .head_dim = step->shape.head_dim};
    kv->block_bytes = (kv_view_layer_offset(kv, NUM_LAYERS) + 4095) / 4096 * 4096;
    size_t num_bytes = (size_t)step->num_blocks * kv->block_bytes;
    kv->blocks = zeroed(num_bytes, 1);
    memset(kv->blocks, 0xff, num_bytes);
}

/* Under a window, what no token sees any more may have been overwritten. */
static int32_t first_stored(const struct step *step, int32_t seq)
{
    int32_t first = step->seqs[seq].num_keys - step->seqs[seq].num_queries + 1 - step->shape.window;
    return step->shape.window > 0 && !step->has_all_keys && first > 0 ? first : 0;
}

/* Random rows, or those of another step, rounded. */
static void fill_cache(struct step *step, const struct step *other)
{
    const struct shape *shape = &step->shape;
    float row[256];
    for (int32_t i = 0; i < step->num_seqs; i++) {
        for (int32_t key = first_stored(step, i); key < step->seqs[i].num_keys; key++) {
            for (int32_t j = 0; j < 2 * shape->num_kv_heads; j++) {
                int32_t head = j / 2;
                bool is_value = j % 2 != 0;
                if (other != NULL) {
                    ref_kv_load(other->host_kv.dtype, row_at(other, i, key, head, is_value),
                                shape->head_dim, row);
                }
                /* Groups of several sizes, so that a scale in another's place shows. */
                for (int32_t k = 0; k < shape->head_dim && other == NULL; k++) {
                    row[k] = bf16_to_float(random_element(k / 32 % 2 == 0 ? 1.0f : 0.5f));
                }
                ref_kv_store(step->host_kv.dtype, row, shape->head_dim,
                             row_at(step, i, key, head, is_value));
            }
        }
    }
}

/* All that the GPU needs of a step. */
static void upload_step(struct step *step)
{
    size_t tokens = (size_t)step->num_tokens, seqs = (size_t)step->num_seqs;
    step->kv = step->host_kv;
    step->kv.blocks = (unsigned char *)upload(step->host_kv.blocks,
                                              (size_t)step->num_blocks * step->host_kv.block_bytes);
    step->gpu_qkv = upload(step->qkv, step->qkv_elements * 2);
    step->gpu_d = allocate(step->d_elements * 2);
    step->gpu_tables = upload(step->tables, seqs * (size_t)step->max_blocks * sizeof(int32_t));
    step->gpu_positions = upload(step->positions, tokens * sizeof(int32_t));
    step->gpu_query_begin = upload(step->query_begin, (seqs + 1) * sizeof(int32_t));
    step->gpu_seq_lens = upload(step->seq_lens, seqs * sizeof(int32_t));
    step->gpu_seq_idx = upload(step->seq_idx, tokens * sizeof(int32_t));
}

struct step *step_create(const struct shape *shape, enum kv_dtype dtype,
                         const struct sequence *seqs, int32_t num_seqs, int32_t num_unowned,
                         bool has_all_keys)
{
    struct step *step = zeroed(1, sizeof(*step));
    step->shape = *shape;
    step->num_seqs = num_seqs;
    step->has_all_keys = has_all_keys;
    memcpy(step->seqs, seqs, (size_t)num_seqs * sizeof(*seqs));
    place_blocks(step);
    make_cache(step, dtype);
    fill_cache(step, NULL);
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
    step->qkv_elements = tokens * (size_t)qkv_width(shape);
    step->qkv = zeroed(step->qkv_elements, 2);
    for (size_t i = 0; i < step->qkv_elements; i++) {
        bool is_q = i % (size_t)qkv_width(shape) < (size_t)d_width(shape);
        step->qkv[i] = is_q ? random_element(shape->q_scale) : POISON;
    }
    step->d_elements = tokens * (size_t)d_width(shape) + 2 * CANARY_ELEMENTS;
    step->d = zeroed(step->d_elements, 2);
    upload_step(step);
    return step;
}

static void *copy_of(const void *from, size_t num_bytes)
{
    void *copy = zeroed(num_bytes, 1);
    memcpy(copy, from, num_bytes);
    return copy;
}

struct step *step_rounded(const struct step *step)
{
    struct step *rounded = copy_of(step, sizeof(*step));
    size_t tokens = (size_t)step->num_tokens, seqs = (size_t)step->num_seqs;
    rounded->qkv = copy_of(step->qkv, step->qkv_elements * 2);
    rounded->d = zeroed(step->d_elements, 2);
    rounded->tables = copy_of(step->tables, seqs * (size_t)step->max_blocks * sizeof(int32_t));
    rounded->positions = copy_of(step->positions, tokens * sizeof(int32_t));
    rounded->query_begin = copy_of(step->query_begin, (seqs + 1) * sizeof(int32_t));
    rounded->seq_lens = copy_of(step->seq_lens, seqs * sizeof(int32_t));
    rounded->seq_idx = copy_of(step->seq_idx, tokens * sizeof(int32_t));
    make_cache(rounded, KV_DTYPE_BF16);
    fill_cache(rounded, step);
    upload_step(rounded);
    return rounded;
}

void step_destroy(struct step *step)
{
    const CUdeviceptr buffers[] = {
        (CUdeviceptr)step->kv.blocks, step->gpu_qkv,         step->gpu_d,        step->gpu_tables,
        step->gpu_positions,          step->gpu_query_begin, step->gpu_seq_lens, step->gpu_seq_idx};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(step->host_kv.blocks);
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

struct attend_params params_of(const struct step *step, int32_t first, int32_t num_seqs)
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

struct bed bed_create(const struct shape *shape, enum kv_dtype dtype, int32_t max_seqs,
                      int32_t context_size, uint32_t ablations)
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
                                .activation_dtype = DTYPE_BF16,
                                .kv_dtype = dtype};
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

void bed_destroy(struct bed *bed)
{
    backend_destroy(bed->backend);
    (void)gpu.mem_free(bed->scratch);
}

void poison_result(struct step *step)
{
    require(GPU_CALL(&gpu, memset_d8_async, step->gpu_d, CANARY & 0xff, step->d_elements * 2,
                     gpu.stream),
            "poison");
}

bool call(struct bed *bed, attend_fn *attend, const struct attend_params *params)
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

void download_result(struct step *step)
{
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, step->d, step->gpu_d, step->d_elements * 2),
            "copy from the GPU");
}

/* ---- the reference ---- */

/* What one head of one token must be, and within which bound: weights, the values of a cache with
 * scales and the result are rounded to bf16, the rest is fp32. */
static void reference(const struct step *step, int32_t seq, int32_t token, int32_t head,
                      double *expected, double *bound)
{
    const struct shape *shape = &step->shape;
    int32_t kv_head = head / (shape->num_heads / shape->num_kv_heads);
    const uint16_t *q = step->qkv + (int64_t)token * qkv_width(shape) + head * shape->head_dim;
    int32_t num_keys = step->positions[token] + 1;
    int32_t first = shape->window > 0 && num_keys > shape->window ? num_keys - shape->window : 0;
    double *weights = zeroed((size_t)num_keys, sizeof(double));
    bool is_scaled = kv_dtype_has_scales(step->host_kv.dtype);
    float row[256];
    double wide_q[256], largest = -INFINITY, total = 0.0;
    for (int32_t j = 0; j < shape->head_dim; j++) {
        wide_q[j] = bf16_to_float(q[j]);
        expected[j] = bound[j] = 0.0;
    }
    for (int32_t key = first; key < num_keys; key++) {
        ref_kv_load(step->host_kv.dtype, row_at(step, seq, key, kv_head, false), shape->head_dim,
                    row);
        double sum = 0.0;
        for (int32_t j = 0; j < shape->head_dim; j++) {
            sum += wide_q[j] * (double)row[j];
        }
        weights[key] = sum / sqrt(shape->head_dim);
        largest = weights[key] > largest ? weights[key] : largest;
    }
    for (int32_t key = first; key < num_keys; key++) {
        ref_kv_load(step->host_kv.dtype, row_at(step, seq, key, kv_head, true), shape->head_dim,
                    row);
        double weight = exp(weights[key] - largest);
        total += weight;
        for (int32_t j = 0; j < shape->head_dim; j++) {
            double value = row[j];
            expected[j] += weight * value;
            bound[j] += weight * fabs(value);
        }
    }
    for (int32_t j = 0; j < shape->head_dim; j++) {
        expected[j] /= total;
        bound[j] = (is_scaled ? 2 : 1) * (0x1p-8 + 1e-4) * bound[j] / total +
                   (0x1p-8 + 1e-4) * fabs(expected[j]) + 1e-30;
    }
    free(weights);
}

static bool is_owned(const struct step *step, int32_t token, bool single_only)
{
    int32_t seq = step->seq_idx[token];
    return token < step->query_begin[step->num_seqs] &&
           (!single_only || step->seqs[seq].num_queries == 1);
}

bool surroundings_are_right(const struct step *step, bool single_only, char *why, size_t why_bytes)
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

bool result_is_right(const struct step *step, bool single_only, int32_t num_checked, char *why,
                     size_t why_bytes)
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

void check_step(attend_fn *attend, bool single_only, const struct shape *shape, enum kv_dtype dtype,
                const struct sequence *seqs, int32_t num_seqs, int32_t num_checked,
                uint32_t ablations, const char *name)
{
    char why[200] = "", what[400];
    int32_t context_size = 16;
    for (int32_t i = 0; i < num_seqs; i++) {
        context_size = seqs[i].num_keys > context_size ? seqs[i].num_keys : context_size;
    }
    struct step *step = step_create(shape, dtype, seqs, num_seqs, 5, false);
    struct bed bed = bed_create(shape, dtype, num_seqs, context_size + 3 * BLOCK, ablations);
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
