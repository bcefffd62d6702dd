/* SPDX-License-Identifier: Apache-2.0 */
/* A cache with scales on a GPU. What is stored: against the reference. What attention of single
 * tokens makes of it: against an fp64 softmax; of many tokens and of any number: the same bits as
 * from a bf16 cache that holds the rounded elements, which have been checked against one. With a
 * number above 1, fewer of all. Skipped where there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/ref/ref_kernels.h"
#include "tests/gpu/attention_bed.h"

#define STORE_CANARY 0xca
#define MAX_HEAD_DIM 256

/* A backend that has no scratch memory. */
static struct backend *create_backend(const struct shape *shape, enum kv_dtype dtype,
                                      int32_t hidden_size, uint32_t ablations)
{
    struct backend *backend;
    struct imbrex_error err = {0};
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16, .ablations = ablations};
    struct backend_shape all = {.hidden_size = hidden_size,
                                .intermediate_size = 64,
                                .vocab_size = 64,
                                .num_heads = shape->num_heads,
                                .num_kv_heads = shape->num_kv_heads,
                                .head_dim = shape->head_dim,
                                .max_tokens = 512,
                                .max_seqs = 8,
                                .max_logit_rows = 1,
                                .max_samples = 1,
                                .context_size = 4096,
                                .activation_dtype = DTYPE_BF16,
                                .kv_dtype = dtype};
    require(backend_cuda_create_on(device, &options, &all, NULL, 0, &backend, &err) ==
                IMBREX_STATUS_OK,
            err.message);
    return backend;
}

static void finish(struct backend *backend, const char *what)
{
    if (backend_end(backend) != IMBREX_STATUS_OK) {
        printf("%s\n", ((struct backend_cuda *)(void *)backend)->error.message);
        count(false, what);
    }
    backend_destroy(backend);
}

static void download(void *to, CUdeviceptr from, size_t num_bytes)
{
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, to, from, num_bytes),
            "copy from the GPU");
}

/* Without blocks yet. */
static struct kv_view view_of(const struct shape *shape, enum kv_dtype dtype)
{
    struct kv_view kv = {.dtype = dtype,
                         .num_layers = NUM_LAYERS,
                         .num_kv_heads = shape->num_kv_heads,
                         .block_size = BLOCK,
                         .head_dim = shape->head_dim};
    kv.block_bytes = (kv_view_layer_offset(&kv, NUM_LAYERS) + 4095) / 4096 * 4096;
    return kv;
}

/* Where a token's k (heads below num_kv_heads) or v is in a cache on the host. */
static struct kv_row stored_row(const struct kv_view *host, int32_t slot, int32_t head)
{
    int32_t kv_head = head % host->num_kv_heads;
    unsigned char *at = head < host->num_kv_heads
                            ? kv_view_keys(host, slot / BLOCK, LAYER_IDX, kv_head)
                            : kv_view_values(host, slot / BLOCK, LAYER_IDX, kv_head);
    return kv_view_row(host, at, slot % BLOCK);
}

/* ---- what is stored ---- */

static double squared_error(enum kv_dtype dtype, struct kv_row row, const float *x,
                            int32_t head_dim)
{
    float found[MAX_HEAD_DIM];
    double sum = 0.0;
    ref_kv_load(dtype, row, head_dim, found);
    for (int32_t i = 0; i < head_dim; i++) {
        sum += ((double)found[i] - x[i]) * ((double)found[i] - x[i]);
    }
    return sum;
}

/* INT8 has the reference's bytes. Of FP8 two scales may be as good as each other but for the order
 * of a sum: the row must be as near as the reference's, and what its own scales make of it. */
static bool is_right_row(enum kv_dtype dtype, struct kv_row found, const float *x, int32_t head_dim)
{
    uint8_t elements[MAX_HEAD_DIM];
    uint16_t scales[MAX_HEAD_DIM / KV_GROUP_ELEMENTS];
    struct kv_row expected = {elements, scales};
    int32_t num_groups = kv_dtype_row_groups(dtype, head_dim);
    ref_kv_store(dtype, x, head_dim, expected);
    if (memcmp(found.elements, elements, (size_t)head_dim) == 0 &&
        memcmp(found.scales, scales, (size_t)num_groups * sizeof(uint16_t)) == 0) {
        return true;
    }
    for (int32_t i = 0; i < head_dim && dtype == KV_DTYPE_FP8; i++) {
        float scale = bf16_to_float(found.scales[i / KV_GROUP_ELEMENTS]);
        if (fp8_from_float(x[i] / scale) != found.elements[i]) {
            return false;
        }
    }
    return dtype == KV_DTYPE_FP8 && squared_error(dtype, found, x, head_dim) <=
                                        squared_error(dtype, expected, x, head_dim) * (1.0 + 1e-5);
}

/* Tokens in slots far apart, one of them in none, with k as it is (positions that turn by nothing).
 * Catches rows in the wrong place, scales of other groups, and writes beside the rows. */
static void check_store(const struct shape *shape, enum kv_dtype dtype, uint32_t ablations)
{
    enum { NUM_TOKENS = 37, NUM_BLOCKS = 20 };
    int32_t head_dim = shape->head_dim;
    int32_t width = (shape->num_heads + 2 * shape->num_kv_heads) * head_dim;
    struct kv_view kv = view_of(shape, dtype), host = kv;
    size_t cache_bytes = NUM_BLOCKS * kv.block_bytes;
    uint16_t *qkv = zeroed((size_t)(NUM_TOKENS * width), 2);
    int32_t positions[NUM_TOKENS] = {0}, slots[NUM_TOKENS];
    float cos_sin[MAX_HEAD_DIM];
    for (int32_t i = 0; i < NUM_TOKENS * width; i++) {
        /* Some tokens are a thousand times larger, some groups zeros. None of these is -0: turned
         * by nothing it becomes 0, and the code of a zero has a sign. */
        double size = i / width % 5 == 0 ? 1000.0 : 1.0;
        qkv[i] = i / width % 5 != 0 && i / 32 % 11 == 0
                     ? 0
                     : bf16_from_float((float)(random_normal() * size));
    }
    for (int32_t i = 0; i < NUM_TOKENS; i++) {
        slots[i] = i == 5 ? -1 : (i * 13 + 7) % (NUM_BLOCKS * BLOCK);
    }
    for (int32_t i = 0; i < head_dim; i++) {
        cos_sin[i] = i < head_dim / 2 ? 1.0f : 0.0f;
    }
    host.blocks = zeroed(cache_bytes, 1);
    memset(host.blocks, STORE_CANARY, cache_bytes);
    CUdeviceptr gpu_qkv = upload(qkv, (size_t)(NUM_TOKENS * width) * 2),
                gpu_positions = upload(positions, sizeof(positions)),
                gpu_slots = upload(slots, sizeof(slots)),
                gpu_cos_sin = upload(cos_sin, (size_t)head_dim * sizeof(float)),
                gpu_cache = upload(host.blocks, cache_bytes);
    kv.blocks = (unsigned char *)gpu_cache;
    struct backend *backend = create_backend(shape, dtype, 64, ablations);
    const struct qkv_params params = {.cos_sin = (const float *)gpu_cos_sin,
                                      .positions = (const int32_t *)gpu_positions,
                                      .slot_mapping = (const int32_t *)gpu_slots,
                                      .kv = kv,
                                      .qkv = (void *)gpu_qkv,
                                      .layer_idx = LAYER_IDX,
                                      .num_tokens = NUM_TOKENS,
                                      .num_heads = shape->num_heads};
    backend_begin(backend, gpu.stream);
    cuda_rope_kv((struct backend_cuda *)(void *)backend, &params);
    finish(backend, "kv_store: launch");
    download(host.blocks, gpu_cache, cache_bytes);

    size_t row_elements = (size_t)head_dim;
    size_t scale_bytes = (size_t)kv_dtype_row_groups(dtype, head_dim) * sizeof(uint16_t);
    for (int32_t i = 0; i < NUM_TOKENS * 2 * shape->num_kv_heads; i++) {
        int32_t token = i / (2 * shape->num_kv_heads), head = i % (2 * shape->num_kv_heads);
        if (slots[token] < 0) {
            continue;
        }
        float x[MAX_HEAD_DIM];
        for (int32_t j = 0; j < head_dim; j++) {
            x[j] = bf16_to_float(qkv[token * width + (shape->num_heads + head) * head_dim + j]);
        }
        struct kv_row row = stored_row(&host, slots[token], head);
        char what[128];
        snprintf(what, sizeof(what), "%s, head_dim %d: token %d, head %d is stored",
                 kv_dtype_name(dtype), (int)head_dim, (int)token, (int)head);
        count(is_right_row(dtype, row, x, head_dim), what);
        memset(row.elements, STORE_CANARY, row_elements);
        memset(row.scales, STORE_CANARY, scale_bytes);
    }
    size_t num_changed = 0;
    for (size_t i = 0; i < cache_bytes; i++) {
        num_changed += host.blocks[i] != STORE_CANARY;
    }
    count(num_changed == 0, "kv_store: bytes beside the rows are as they were");
    const CUdeviceptr buffers[] = {gpu_qkv, gpu_positions, gpu_slots, gpu_cos_sin, gpu_cache};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(qkv);
    free(host.blocks);
}

/* ---- the product ahead of it ---- */

static CUdeviceptr upload_random(size_t num_elements, float scale)
{
    uint16_t *elements = zeroed(num_elements, 2);
    for (size_t i = 0; i < num_elements; i++) {
        elements[i] = random_element(scale);
    }
    CUdeviceptr memory = upload(elements, num_elements * 2);
    free(elements);
    return memory;
}

static CUdeviceptr upload_floats(size_t num_elements)
{
    float *elements = zeroed(num_elements, sizeof(float));
    for (size_t i = 0; i < num_elements; i++) {
        elements[i] = (float)random_normal();
    }
    CUdeviceptr memory = upload(elements, num_elements * sizeof(float));
    free(elements);
    return memory;
}

typedef void qkv_fn(struct backend_cuda *cuda, const struct qkv_params *params);

/* The product leaves k and v where kv_store finds them: what is stored must be what stands there,
 * and that, where no head is normalised, what a bf16 cache gets. Catches rows that are stored
 * before they are there, not turned, or in bf16's places. */
static void check_qkv(qkv_fn *qkv_of, const struct shape *shape, enum kv_dtype dtype,
                      int32_t num_tokens, bool has_norms)
{
    enum { HIDDEN = 256, NUM_BLOCKS = 20, MAX_TOKENS = 300 };
    int32_t head_dim = shape->head_dim, width = qkv_width(shape);
    int32_t positions[MAX_TOKENS], slots[MAX_TOKENS];
    for (int32_t i = 0; i < num_tokens; i++) {
        positions[i] = i * 3;
        slots[i] = i == 2 ? -1 : (i * 13 + 7) % (NUM_BLOCKS * BLOCK);
    }
    CUdeviceptr hidden = upload_floats((size_t)(num_tokens * HIDDEN)),
                norm_weight = upload_floats(HIDDEN), biases = upload_floats((size_t)width),
                head_norm = upload_floats((size_t)head_dim),
                cos_sin = upload_floats((size_t)(3 * MAX_TOKENS * head_dim)),
                weights = upload_random((size_t)(width * HIDDEN), 0.1f),
                gpu_positions = upload(positions, sizeof(positions)),
                gpu_slots = upload(slots, sizeof(slots)),
                normed = allocate((size_t)(num_tokens * HIDDEN) * 2),
                qkv = allocate((size_t)(num_tokens * width) * 2);
    const uint16_t *q_proj = (const uint16_t *)weights;
    const uint16_t *k_proj = q_proj + (size_t)(shape->num_heads * head_dim) * HIDDEN;
    const float *q_bias = (const float *)biases, *norm = has_norms ? (float *)head_norm : NULL;
    const enum kv_dtype dtypes[2] = {dtype, KV_DTYPE_BF16};
    struct kv_view hosts[2];
    uint16_t *kept = zeroed((size_t)(num_tokens * width), 2);
    for (int i = 0; i < 2; i++) {
        hosts[i] = view_of(shape, dtypes[i]);
        size_t cache_bytes = NUM_BLOCKS * hosts[i].block_bytes;
        struct kv_view kv = hosts[i];
        CUdeviceptr cache = allocate(cache_bytes);
        require(GPU_CALL(&gpu, memset_d8_async, cache, STORE_CANARY, cache_bytes, gpu.stream),
                "poison");
        kv.blocks = (unsigned char *)cache;
        struct backend *backend = create_backend(shape, dtypes[i], HIDDEN, 0);
        const struct qkv_params params = {
            .hidden = (const float *)hidden,
            .norm = {(const float *)norm_weight, 1e-6f},
            .q_proj = {q_proj, DTYPE_BF16},
            .k_proj = {k_proj, DTYPE_BF16},
            .v_proj = {k_proj + (size_t)(shape->num_kv_heads * head_dim) * HIDDEN, DTYPE_BF16},
            .q_bias = q_bias,
            .k_bias = q_bias + shape->num_heads * head_dim,
            .v_bias = q_bias + (shape->num_heads + shape->num_kv_heads) * head_dim,
            .q_norm = norm,
            .k_norm = norm,
            .head_norm_eps = 1e-6f,
            .cos_sin = (const float *)cos_sin,
            .positions = (const int32_t *)gpu_positions,
            .slot_mapping = (const int32_t *)gpu_slots,
            .kv = kv,
            .normed = (void *)normed,
            .qkv = (void *)qkv,
            .layer_idx = LAYER_IDX,
            .num_tokens = num_tokens,
            .hidden_size = HIDDEN,
            .num_heads = shape->num_heads};
        backend_begin(backend, gpu.stream);
        qkv_of((struct backend_cuda *)(void *)backend, &params);
        finish(backend, "qkv: launch");
        hosts[i].blocks = zeroed(cache_bytes, 1);
        download(hosts[i].blocks, cache, cache_bytes);
        if (i == 0) {
            download(kept, qkv, (size_t)(num_tokens * width) * 2);
        }
        (void)gpu.mem_free(cache);
    }
    bool is_stored = true, is_kept = true;
    for (int32_t i = 0; i < num_tokens * 2 * shape->num_kv_heads; i++) {
        int32_t token = i / (2 * shape->num_kv_heads), head = i % (2 * shape->num_kv_heads);
        const uint16_t *row = kept + token * width + (shape->num_heads + head) * head_dim;
        float x[MAX_HEAD_DIM];
        for (int32_t j = 0; j < head_dim; j++) {
            x[j] = bf16_to_float(row[j]);
        }
        if (slots[token] >= 0) {
            is_stored &=
                is_right_row(dtype, stored_row(&hosts[0], slots[token], head), x, head_dim);
            is_kept &= has_norms || memcmp(stored_row(&hosts[1], slots[token], head).elements, row,
                                           (size_t)head_dim * 2) == 0;
        }
    }
    char what[128];
    snprintf(what, sizeof(what), "qkv, %s, %d tokens, %d/%d heads of %d%s", kv_dtype_name(dtype),
             (int)num_tokens, (int)shape->num_heads, (int)shape->num_kv_heads, (int)head_dim,
             has_norms ? ", normalised" : "");
    count(is_stored, what);
    count(is_kept, what);
    const CUdeviceptr buffers[] = {hidden,  norm_weight, biases, head_norm, cos_sin,
                                   weights, gpu_slots,   normed, qkv,       gpu_positions};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(hosts[0].blocks);
    free(hosts[1].blocks);
    free(kept);
}

/* ---- what attention reads ---- */

static void attend_prefill(struct backend_cuda *cuda, const struct attend_params *params)
{
    cuda_prefill_attend(cuda, params, 1);
}

/* As a step of a model has it: whichever kernels it chooses. */
static void attend_chosen(struct backend_cuda *cuda, const struct attend_params *params)
{
    backend_attend(&cuda->backend, params);
}

/* Kernels of prompts count on keys ahead of a window to be numbers, as an engine leaves them.
 * Catches elements that are not what their codes and scales say, those of other rows or heads, keys
 * that nobody stored, and bits that depend on the sequences beside. */
static void check_as_rounded(attend_fn *attend, const struct shape *shape, enum kv_dtype dtype,
                             const struct sequence *seqs, int32_t num_seqs, uint32_t ablations,
                             const char *name)
{
    char why[200] = "", what[400];
    struct step *step = step_create(shape, dtype, seqs, num_seqs, 3, attend == attend_prefill);
    struct step *rounded = step_rounded(step);
    struct bed bed = bed_create(shape, dtype, num_seqs, 8192, ablations);
    struct bed rounded_bed = bed_create(shape, KV_DTYPE_BF16, num_seqs, 8192, ablations);
    struct attend_params params = params_of(step, 0, num_seqs);
    struct attend_params rounded_params = params_of(rounded, 0, num_seqs);
    poison_result(step);
    poison_result(rounded);
    bool is_run = call(&bed, attend, &params) && call(&rounded_bed, attend, &rounded_params);
    download_result(step);
    download_result(rounded);
    bool is_right = is_run && surroundings_are_right(rounded, false, why, sizeof(why)) &&
                    result_is_right(rounded, false, 300, why, sizeof(why));
    snprintf(what, sizeof(what), "%s, %s, heads %d/%d x %d, window %d", name, kv_dtype_name(dtype),
             (int)shape->num_heads, (int)shape->num_kv_heads, (int)shape->head_dim,
             (int)shape->window);
    size_t what_bytes = strlen(what);
    snprintf(what + what_bytes, sizeof(what) - what_bytes, ": of bf16: %s", why);
    count(is_right, what);
    snprintf(what + what_bytes, sizeof(what) - what_bytes, ": as of a bf16 cache");
    count(memcmp(step->d, rounded->d, step->d_elements * 2) == 0, what);

    poison_result(step);
    for (int32_t i = 0; i < num_seqs && is_run; i++) {
        params = params_of(step, i, 1);
        is_run = call(&bed, attend, &params);
    }
    download_result(step);
    snprintf(what + what_bytes, sizeof(what) - what_bytes, ": same bits alone");
    count(is_run && memcmp(step->d, rounded->d, step->d_elements * 2) == 0, what);
    bed_destroy(&bed);
    bed_destroy(&rounded_bed);
    step_destroy(step);
    step_destroy(rounded);
}

static const struct sequence mixed[] = {{1, 1},    {37, 37},  {1, 17},    {5, 133}, {1, 512},
                                        {64, 200}, {1, 1000}, {130, 130}, {0, 7},   {1, 16},
                                        {1, 33},   {2, 65},   {1, 128}};
#define NUM_MIXED ((int32_t)(sizeof(mixed) / sizeof(mixed[0])))

static void check_tensor(enum kv_dtype dtype, uint32_t ablations, size_t shape_step)
{
    static const struct shape shapes[] = {
        {6, 2, 32, 0, 1.0f},  {14, 2, 64, 50, 1.0f}, {12, 2, 128, 0, 1.0f}, {8, 4, 80, 0, 1.0f},
        {4, 4, 96, 50, 1.0f}, {2, 1, 160, 0, 1.0f},  {2, 1, 192, 0, 1.0f},  {8, 1, 256, 50, 1.0f},
        {16, 8, 64, 0, 1.0f}, {4, 2, 16, 50, 1.0f},  {4, 1, 112, 0, 1.0f}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += shape_step) {
        check_as_rounded(cuda_tensor_attend, &shapes[i], dtype, mixed, NUM_MIXED, ablations,
                         "tensor");
    }
}

static void check_prefill(enum kv_dtype dtype, size_t shape_step)
{
    static const struct sequence chunks[] = {
        {300, 300}, {1, 5000}, {257, 2057}, {1, 1}, {512, 4608}};
    static const struct shape shapes[] = {
        {14, 2, 64, 0, 1.0f},   {28, 4, 128, 0, 2.0f},  {12, 2, 128, 0, 1.0f},
        {4, 4, 64, 0, 2.0f},    {9, 1, 128, 0, 1.0f},   {40, 2, 64, 0, 1.0f},
        {14, 2, 64, 100, 1.0f}, {8, 1, 128, 600, 1.0f}, {8, 8, 128, 17, 1.0f}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += shape_step) {
        check_as_rounded(attend_prefill, &shapes[i], dtype, mixed, NUM_MIXED, 0, "prefill, mixed");
        if (i % 2 == 0 && shape_step == 1) {
            check_as_rounded(attend_prefill, &shapes[i], dtype, chunks,
                             (int32_t)(sizeof(chunks) / sizeof(chunks[0])), 0, "prefill, chunks");
        }
    }
}

static void check_decode(enum kv_dtype dtype, size_t shape_step)
{
    static const struct shape shapes[] = {
        {14, 2, 64, 0, 1.0f},    {28, 4, 128, 0, 2.0f},  {12, 2, 128, 0, 1.0f},
        {4, 4, 64, 0, 2.0f},     {9, 1, 128, 0, 1.0f},   {16, 1, 64, 0, 1.0f},
        {24, 1, 128, 0, 1.0f},   {40, 2, 64, 0, 1.0f},   {14, 2, 64, 100, 1.0f},
        {28, 4, 128, 513, 1.0f}, {8, 1, 128, 1, 1.0f},   {24, 2, 64, 4000, 1.0f},
        {28, 4, 128, 0, 100.0f}, {14, 2, 64, 0, 0.001f},
    };
    static const int32_t edges[] = {1,   15,  16,  17,  31,  32,   33,   63,   64,   65,   255,
                                    256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2049, 5000};
    struct sequence seqs[MAX_SEQS];
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += shape_step) {
        check_step(cuda_decode_attend, true, &shapes[i], dtype, mixed, NUM_MIXED, 1000, 0,
                   dtype == KV_DTYPE_INT8 ? "decode int8, mixed" : "decode fp8, mixed");
        if (shape_step > 1) {
            continue;
        }
        int32_t num_seqs = 0;
        for (size_t j = 0; j < sizeof(edges) / sizeof(edges[0]); j++) {
            seqs[num_seqs++] = (struct sequence){1, edges[j]};
        }
        check_step(cuda_decode_attend, true, &shapes[i], dtype, seqs, num_seqs, 200, 0,
                   dtype == KV_DTYPE_INT8 ? "decode int8, lengths" : "decode fp8, lengths");
    }
    if (shape_step > 1) {
        return;
    }
    static const struct sequence far[] = {{1, 40000}, {1, 3}, {1, 17000}};
    check_step(cuda_decode_attend, true, &shapes[0], dtype, far, 3, 20, 0, "decode, far");
    for (int32_t j = 0; j < MAX_SEQS; j++) {
        seqs[j] = (struct sequence){1, 1 + (int32_t)random_below(90)};
    }
    check_step(cuda_decode_attend, true, &shapes[1], dtype, seqs, MAX_SEQS, 300, 0, "decode, many");
    /* Of prompts keys are rounded too, which small queries do not show. */
    static const struct shape chosen[] = {{14, 2, 64, 0, 0.1f}, {28, 4, 128, 0, 0.1f}};
    for (size_t i = 0; i < sizeof(chosen) / sizeof(chosen[0]); i++) {
        check_step(attend_chosen, false, &chosen[i], dtype, mixed, NUM_MIXED, 1000, 0, "chosen");
    }
}

int main(int argc, char **argv)
{
    static const struct shape stored[] = {
        {6, 2, 32, 0, 1.0f}, {14, 2, 64, 0, 1.0f}, {12, 2, 128, 0, 1.0f}, {8, 4, 80, 0, 1.0f},
        {4, 4, 96, 0, 1.0f}, {8, 1, 256, 0, 1.0f}, {4, 2, 16, 0, 1.0f},   {4, 1, 112, 0, 1.0f}};
    static const enum kv_dtype dtypes[] = {KV_DTYPE_INT8, KV_DTYPE_FP8};
    static const uint32_t ablations[] = {0, IMBREX_ABLATE_HOPPER};
    static const int32_t few[] = {1, 5, 12, 40, 64}, many[] = {1, 65, 128, 300};
    int exit_code = 0;
    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    /* Above 1, every so many-th shape and short sequences alone: for slow tools. */
    size_t shape_step = argc > 1 && atoi(argv[1]) > 1 ? (size_t)atoi(argv[1]) : 1;
    for (int i = 0; i < 2; i++) {
        for (size_t j = 0; j < 2 * sizeof(stored) / sizeof(stored[0]); j += shape_step) {
            check_store(&stored[j / 2], dtypes[i], ablations[j % 2]);
        }
        for (size_t j = 0; j < 4 * sizeof(few) / sizeof(few[0]); j += shape_step) {
            check_qkv(cuda_small_qkv, &stored[1 + j % 2], dtypes[i], few[j / 4], j / 2 % 2 != 0);
        }
        for (size_t j = 0; j < 4 * sizeof(many) / sizeof(many[0]); j += shape_step) {
            check_qkv(cuda_large_qkv, &stored[1 + j % 2], dtypes[i], many[j / 4], j / 2 % 2 != 0);
        }
        check_decode(dtypes[i], shape_step);
        check_prefill(dtypes[i], shape_step);
        check_tensor(dtypes[i], 0, shape_step);
        check_tensor(dtypes[i], IMBREX_ABLATE_HOPPER, shape_step);
    }
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
