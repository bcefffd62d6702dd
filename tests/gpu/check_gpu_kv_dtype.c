/* SPDX-License-Identifier: Apache-2.0 */
/* A cache with scales on a GPU. What is stored: against the reference. What attention reads: the
 * same bits as from a bf16 cache that holds the rounded elements. Skipped where there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/cuda/backend_cuda.h"
#include "ops/ref/ref_kernels.h"
#include "tests/gpu/gpu_session.h"

#define BLOCK 16
#define NUM_LAYERS 2
#define LAYER_IDX 1
#define CANARY 0xca
#define MAX_HEAD_DIM 256
#define MAX_BLOCKS 300

struct shape {
    int32_t num_heads, num_kv_heads, head_dim;
};

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

static struct backend *create_backend(const struct shape *shape, enum kv_dtype dtype,
                                      uint32_t ablations)
{
    struct backend *backend;
    struct imbrex_error err = {0};
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16, .ablations = ablations};
    struct backend_shape all = {.hidden_size = 64,
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
        /* Some tokens are a thousand times larger, some groups zeros. */
        double size = i / width % 5 == 0 ? 1000.0 : i / 32 % 11 == 0 ? 0.0 : 1.0;
        qkv[i] = bf16_from_float((float)(random_normal() * size));
    }
    for (int32_t i = 0; i < NUM_TOKENS; i++) {
        slots[i] = i == 5 ? -1 : (i * 13 + 7) % (NUM_BLOCKS * BLOCK);
    }
    for (int32_t i = 0; i < head_dim; i++) {
        cos_sin[i] = i < head_dim / 2 ? 1.0f : 0.0f;
    }
    host.blocks = zeroed(cache_bytes, 1);
    memset(host.blocks, CANARY, cache_bytes);
    CUdeviceptr gpu_qkv = upload(qkv, (size_t)(NUM_TOKENS * width) * 2),
                gpu_positions = upload(positions, sizeof(positions)),
                gpu_slots = upload(slots, sizeof(slots)),
                gpu_cos_sin = upload(cos_sin, (size_t)head_dim * sizeof(float)),
                gpu_cache = upload(host.blocks, cache_bytes);
    kv.blocks = (unsigned char *)gpu_cache;
    struct backend *backend = create_backend(shape, dtype, ablations);
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
        int32_t block = slots[token] / BLOCK, kv_head = head % shape->num_kv_heads;
        unsigned char *at = head < shape->num_kv_heads
                                ? kv_view_keys(&host, block, LAYER_IDX, kv_head)
                                : kv_view_values(&host, block, LAYER_IDX, kv_head);
        struct kv_row row = kv_view_row(&host, at, slots[token] % BLOCK);
        char what[128];
        snprintf(what, sizeof(what), "%s, head_dim %d: token %d, head %d is stored",
                 kv_dtype_name(dtype), (int)head_dim, (int)token, (int)head);
        count(is_right_row(dtype, row, x, head_dim), what);
        memset(row.elements, CANARY, row_elements);
        memset(row.scales, CANARY, scale_bytes);
    }
    size_t num_changed = 0;
    for (size_t i = 0; i < cache_bytes; i++) {
        num_changed += host.blocks[i] != CANARY;
    }
    count(num_changed == 0, "kv_store: bytes beside the rows are as they were");
    const CUdeviceptr buffers[] = {gpu_qkv, gpu_positions, gpu_slots, gpu_cos_sin, gpu_cache};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(qkv);
    free(host.blocks);
}

/* ---- what attention reads ---- */

/* Sequences of num_keys, of which the last num_queries are queries. */
static const int32_t num_keys[] = {1, 33, 200, 1000, 64}, num_queries[] = {1, 33, 70, 1, 16};
#define NUM_SEQS 5

/* Fills both caches with the same numbers; rows that no sequence has are NaN in both. */
static void fill_caches(const struct kv_view *scaled, const struct kv_view *plain,
                        const int32_t *tables, int32_t max_blocks)
{
    float x[MAX_HEAD_DIM];
    memset(scaled->blocks, 0xff, MAX_BLOCKS * scaled->block_bytes);
    memset(plain->blocks, 0xff, MAX_BLOCKS * plain->block_bytes);
    for (int32_t seq = 0; seq < NUM_SEQS; seq++) {
        for (int32_t i = 0; i < num_keys[seq] * 2 * scaled->num_kv_heads; i++) {
            int32_t key = i / (2 * scaled->num_kv_heads), plane = i % 2;
            int32_t head = i / 2 % scaled->num_kv_heads;
            int32_t block = tables[seq * max_blocks + key / BLOCK];
            struct kv_row rows[2];
            const struct kv_view *views[2] = {scaled, plain};
            for (int32_t j = 0; j < 2; j++) {
                unsigned char *at = plane == 0 ? kv_view_keys(views[j], block, LAYER_IDX, head)
                                               : kv_view_values(views[j], block, LAYER_IDX, head);
                rows[j] = kv_view_row(views[j], at, key % BLOCK);
            }
            for (int32_t j = 0; j < scaled->head_dim; j++) {
                x[j] = (float)random_normal() * (j / 32 % 2 == 0 ? 1.0f : 0.1f);
            }
            ref_kv_store(scaled->dtype, x, scaled->head_dim, rows[0]);
            ref_kv_load(scaled->dtype, rows[0], scaled->head_dim, x);
            ref_kv_store(KV_DTYPE_BF16, x, plain->head_dim, rows[1]);
        }
    }
}

static void check_attention(const struct shape *shape, enum kv_dtype dtype, int32_t window,
                            uint32_t ablations)
{
    enum { TABLE_BLOCKS = 64 };
    struct kv_view views[2] = {view_of(shape, dtype), view_of(shape, KV_DTYPE_BF16)};
    int32_t tables[NUM_SEQS * TABLE_BLOCKS] = {0}, query_begin[NUM_SEQS + 1] = {0}, next = 0;
    int32_t positions[512], num_tokens = 0;
    for (int32_t seq = 0; seq < NUM_SEQS; seq++) {
        for (int32_t i = 0; i * BLOCK < num_keys[seq]; i++) {
            tables[seq * TABLE_BLOCKS + i] = 1 + next++ * 7 % (MAX_BLOCKS - 1);
        }
        for (int32_t i = 0; i < num_queries[seq]; i++) {
            positions[num_tokens++] = num_keys[seq] - num_queries[seq] + i;
        }
        query_begin[seq + 1] = num_tokens;
    }
    int32_t width = (shape->num_heads + 2 * shape->num_kv_heads) * shape->head_dim;
    size_t d_bytes = (size_t)(num_tokens * shape->num_heads * shape->head_dim) * 2;
    uint16_t *qkv = zeroed((size_t)(num_tokens * width), 2);
    for (int32_t i = 0; i < num_tokens * width; i++) {
        qkv[i] = bf16_from_float((float)random_normal());
    }
    for (int i = 0; i < 2; i++) {
        views[i].blocks = zeroed(MAX_BLOCKS, views[i].block_bytes);
    }
    fill_caches(&views[0], &views[1], tables, TABLE_BLOCKS);
    CUdeviceptr gpu_qkv = upload(qkv, (size_t)(num_tokens * width) * 2),
                gpu_tables = upload(tables, sizeof(tables)),
                gpu_begin = upload(query_begin, sizeof(query_begin)),
                gpu_positions = upload(positions, sizeof(positions)),
                gpu_lens = upload(num_keys, sizeof(num_keys)), gpu_d = allocate(d_bytes);
    unsigned char *results[2];
    for (int i = 0; i < 2; i++) {
        CUdeviceptr cache = upload(views[i].blocks, MAX_BLOCKS * views[i].block_bytes);
        free(views[i].blocks);
        views[i].blocks = (unsigned char *)cache;
        struct backend *backend = create_backend(shape, views[i].dtype, ablations);
        const struct attend_params params = {.qkv = (const void *)gpu_qkv,
                                             .d = (void *)gpu_d,
                                             .kv = views[i],
                                             .block_tables = (const int32_t *)gpu_tables,
                                             .positions = (const int32_t *)gpu_positions,
                                             .query_begin = (const int32_t *)gpu_begin,
                                             .seq_lens = (const int32_t *)gpu_lens,
                                             .layer_idx = LAYER_IDX,
                                             .num_tokens = num_tokens,
                                             .num_seqs = NUM_SEQS,
                                             .num_heads = shape->num_heads,
                                             .max_blocks = TABLE_BLOCKS,
                                             .max_query = 70,
                                             .window = window,
                                             .scale = 1.0f / sqrtf((float)shape->head_dim)};
        require(GPU_CALL(&gpu, memset_d8_async, gpu_d, CANARY, d_bytes, gpu.stream), "poison");
        backend_begin(backend, gpu.stream);
        cuda_tensor_attend((struct backend_cuda *)(void *)backend, &params);
        finish(backend, "attention: launch");
        results[i] = zeroed(d_bytes, 1);
        download(results[i], gpu_d, d_bytes);
        (void)gpu.mem_free(cache);
    }
    size_t num_unknown = 0;
    for (size_t i = 0; i < d_bytes / 2; i++) {
        float value = bf16_to_float(((const uint16_t *)(void *)results[1])[i]);
        num_unknown += !(fabsf(value) < 10.0f);
    }
    char what[128];
    snprintf(what, sizeof(what), "%s, %d/%d heads of %d, window %d: attention as of a bf16 cache",
             kv_dtype_name(dtype), (int)shape->num_heads, (int)shape->num_kv_heads,
             (int)shape->head_dim, (int)window);
    count(num_unknown == 0, "attention of a bf16 cache: numbers of a size that can be");
    count(memcmp(results[0], results[1], d_bytes) == 0, what);
    const CUdeviceptr buffers[] = {gpu_qkv, gpu_tables, gpu_begin, gpu_positions, gpu_lens, gpu_d};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(results[0]);
    free(results[1]);
    free(qkv);
}

int main(void)
{
    static const struct shape shapes[] = {{6, 2, 32},  {14, 2, 64}, {12, 2, 128}, {8, 4, 80},
                                          {4, 4, 96},  {2, 1, 160}, {2, 1, 192},  {8, 1, 256},
                                          {16, 8, 64}, {4, 2, 16},  {4, 1, 112}};
    static const uint32_t ablations[] = {0, IMBREX_ABLATE_HOPPER};
    int exit_code = 0;
    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    for (size_t i = 0; i < 2 * 2 * sizeof(shapes) / sizeof(shapes[0]); i++) {
        const struct shape *shape = &shapes[i / 4];
        enum kv_dtype dtype = i / 2 % 2 == 0 ? KV_DTYPE_INT8 : KV_DTYPE_FP8;
        check_store(shape, dtype, ablations[i % 2]);
        check_attention(shape, dtype, 0, ablations[i % 2]);
        check_attention(shape, dtype, 50, ablations[i % 2]);
    }
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
