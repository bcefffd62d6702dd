/* SPDX-License-Identifier: Apache-2.0 */
/* The products of many tokens on a GPU against fp64 on the host: each stage from what the device
 * had before it, so that a bound holds a stage's own roundings alone. Skipped where there is none.
 * --bench: the time of each part of a layer beside that of its GEMM; --sweep: of the plans that the
 * projections could take. With a number every number-th variant only. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/cuda/backend_cuda.h"
#include "ops/dtype.h"
#include "tests/gpu/gpu_session.h"

#define POISON 0xca
#define CANARY_BYTES 1024
#define SCRATCH_BYTES ((size_t)192 << 20)

static CUdeviceptr scratch;

static int32_t random_below(int32_t limit)
{
    return (int32_t)(random_bits() % (uint32_t)limit);
}

/* ---- memory on both sides ---- */

/* num_bytes between canaries. */
struct buffer {
    unsigned char *host; /* the bytes; canaries around them */
    CUdeviceptr base, whole;
    size_t num_bytes;
};

static void buffer_upload(const struct buffer *buffer)
{
    require(copied_to_gpu(buffer->whole, buffer->host - CANARY_BYTES,
                          buffer->num_bytes + 2 * CANARY_BYTES),
            "copy to the GPU");
}

/* Whether the canaries are alive. */
static bool buffer_download(const struct buffer *buffer)
{
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, buffer->host - CANARY_BYTES, buffer->whole,
                         buffer->num_bytes + 2 * CANARY_BYTES),
            "copy from the GPU");
    bool is_alive = true;
    for (size_t i = 0; i < CANARY_BYTES; i++) {
        is_alive &= buffer->host[buffer->num_bytes + i] == POISON &&
                    buffer->host[(ptrdiff_t)i - CANARY_BYTES] == POISON;
    }
    return is_alive;
}

static void buffer_poison(const struct buffer *buffer)
{
    memset(buffer->host, POISON, buffer->num_bytes);
    buffer_upload(buffer);
}

static struct buffer buffer_create(size_t num_bytes)
{
    struct buffer buffer = {.num_bytes = num_bytes};
    unsigned char *whole = malloc(num_bytes + 2 * CANARY_BYTES);
    require(whole != NULL, "memory");
    memset(whole, POISON, num_bytes + 2 * CANARY_BYTES);
    buffer.host = whole + CANARY_BYTES;
    require(GPU_CALL(&gpu, mem_alloc, &buffer.whole, num_bytes + 2 * CANARY_BYTES),
            "memory of the GPU");
    buffer.base = buffer.whole + CANARY_BYTES;
    buffer_upload(&buffer);
    return buffer;
}

static void buffer_destroy(struct buffer *buffer)
{
    if (buffer->host != NULL) {
        free(buffer->host - CANARY_BYTES);
        (void)gpu.mem_free(buffer->whole);
        buffer->host = NULL;
    }
}

static struct buffer random_bf16(int64_t num_elements, double scale)
{
    struct buffer buffer = buffer_create((size_t)num_elements * 2);
    for (int64_t i = 0; i < num_elements; i++) {
        ((uint16_t *)(void *)buffer.host)[i] = bf16_from_float((float)(scale * random_normal()));
    }
    buffer_upload(&buffer);
    return buffer;
}

static struct buffer random_f32(int64_t num_elements, double scale)
{
    struct buffer buffer = buffer_create((size_t)num_elements * 4);
    for (int64_t i = 0; i < num_elements; i++) {
        ((float *)(void *)buffer.host)[i] = (float)(scale * random_normal());
    }
    buffer_upload(&buffer);
    return buffer;
}

static double bf16_at(const struct buffer *buffer, int64_t i)
{
    return (double)bf16_to_float(((const uint16_t *)(const void *)buffer->host)[i]);
}

static double f32_at(const struct buffer *buffer, int64_t i)
{
    return (double)((const float *)(const void *)buffer->host)[i];
}

static const float *f32_base(const struct buffer *buffer)
{
    return buffer->base == 0 ? NULL : (const float *)buffer->base;
}

/* Of all backends, beside what they are created with. */
static uint32_t all_ablations;

static struct backend_cuda *backend_create(bool is_invariant, uint32_t ablations)
{
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16,
                                           .batch_invariant = is_invariant,
                                           .ablations = ablations | all_ablations};
    struct backend_shape shape = {.hidden_size = 64,
                                  .intermediate_size = 64,
                                  .num_heads = 1,
                                  .num_kv_heads = 1,
                                  .head_dim = 64};
    struct backend *backend = NULL;
    require(backend_cuda_create_on(device, &options, &shape, (void *)scratch, SCRATCH_BYTES,
                                   &backend, NULL) == IMBREX_STATUS_OK,
            "backend");
    backend->functions->begin(backend, gpu.stream);
    return (struct backend_cuda *)(void *)backend;
}

static void backend_finish(struct backend_cuda *cuda, const char *what)
{
    bool is_ok = cuda->backend.functions->end(&cuda->backend) == IMBREX_STATUS_OK;
    if (!is_ok) {
        printf("%s: %s\n", what, cuda->error.message);
    }
    require(is_ok, what);
    cuda->backend.functions->destroy(&cuda->backend);
}

/* ---- references ---- */

/* What fp32 sums that a tensor core truncates may lose, for a sum of magnitudes of 1. */
static double sum_step(int64_t k)
{
    return ((double)k / 16.0 + 16.0) * 0x1p-22;
}

/* a [., k] and b [., k] in double; *size: sum of magnitudes. */
static double dot(const double *a, const double *b, int64_t k, double *size)
{
    double sum = 0.0, magnitudes = 0.0;
    for (int64_t i = 0; i < k; i++) {
        double product = a[i] * b[i];
        sum += product;
        magnitudes += fabs(product);
    }
    *size = magnitudes;
    return sum;
}

static double *widened(const struct buffer *buffer, int64_t num_elements)
{
    double *wide = malloc((size_t)num_elements * sizeof(double));
    require(wide != NULL, "memory");
    for (int64_t i = 0; i < num_elements; i++) {
        wide[i] = bf16_at(buffer, i);
    }
    return wide;
}

/* Rows that are looked at: all, or so many that the reference takes no minutes. */
static bool is_looked_at(int64_t row, int64_t num_rows, int64_t work_of_row)
{
    int64_t step = num_rows * work_of_row / 40000000 + 1;
    return step == 1 || row == num_rows - 1 || (row * 7 + 3) % step == 0;
}

/* The worst of all elements that were compared: found - expected in units of its bound. */
struct verdict {
    double worst;
    int64_t row, column;
    double found, expected;
};

static void compare(struct verdict *verdict, int64_t row, int64_t column, double found,
                    double expected, double bound)
{
    double share = fabs(found - expected) / bound;
    if (!(share <= verdict->worst)) {
        *verdict = (struct verdict){share, row, column, found, expected};
    }
}

static void conclude(const struct verdict *verdict, bool is_alive, const char *what)
{
    char text[300];
    snprintf(text, sizeof(text), "%s: [%d, %d] is %g, expected %g, %.2f of the bound%s", what,
             (int)verdict->row, (int)verdict->column, verdict->found, verdict->expected,
             verdict->worst, is_alive ? "" : "; a canary was overwritten");
    count(is_alive && verdict->worst <= 1.0, text);
}

/* normed against hidden; rows NULL: all, in order. */
static void check_norm(const struct buffer *normed, const struct buffer *hidden,
                       const int32_t *rows, const struct buffer *weight, int64_t num_rows,
                       int64_t width, double eps, bool is_alive, const char *what)
{
    struct verdict verdict = {0};
    char text[200];
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t from = (rows == NULL ? row : rows[row]) * width;
        double sum = 0.0;
        for (int64_t i = 0; i < width; i++) {
            sum += f32_at(hidden, from + i) * f32_at(hidden, from + i);
        }
        double scale = 1.0 / sqrt(sum / (double)width + eps);
        for (int64_t i = 0; i < width; i++) {
            double expected = f32_at(hidden, from + i) * scale * f32_at(weight, i);
            compare(&verdict, row, i, bf16_at(normed, row * width + i), expected,
                    fabs(expected) * (0x1p-8 + 0x1p-18) + 1e-37);
        }
    }
    snprintf(text, sizeof(text), "%s, norm", what);
    conclude(&verdict, is_alive, text);
}

/* ---- the residual GEMM by itself ---- */

struct product_case {
    int64_t m, n, k;
    struct buffer a, b, bias, d;
    double *expected, *bound, *before;
};

static struct product_case product_create(int64_t m, int64_t n, int64_t k)
{
    struct product_case product = {.m = m, .n = n, .k = k};
    product.a = random_bf16(m * k, 1.0);
    product.b = random_bf16(n * k, 1.0 / sqrt((double)k));
    product.bias = random_f32(n, 1.0);
    product.d = random_f32(m * n, 1.0);
    double *a = widened(&product.a, m * k), *b = widened(&product.b, n * k);
    product.expected = malloc((size_t)(m * n) * sizeof(double));
    product.bound = malloc((size_t)(m * n) * sizeof(double));
    product.before = malloc((size_t)(m * n) * sizeof(double));
    require(product.expected != NULL && product.bound != NULL && product.before != NULL, "memory");
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double size, before = f32_at(&product.d, i * n + j);
            double value = dot(a + i * k, b + j * k, k, &size) + f32_at(&product.bias, j);
            product.before[i * n + j] = before;
            product.expected[i * n + j] = value;
            product.bound[i * n + j] =
                sum_step(k) * (size + fabs(value)) + (fabs(before) + fabs(value) + size) * 0x1p-22;
        }
    }
    free(a);
    free(b);
    return product;
}

static void product_destroy(struct product_case *product)
{
    buffer_destroy(&product->a);
    buffer_destroy(&product->b);
    buffer_destroy(&product->bias);
    buffer_destroy(&product->d);
    free(product->expected);
    free(product->bound);
    free(product->before);
}

static void check_product(struct product_case *product, bool adds, const struct residual_plan *plan,
                          const char *name)
{
    struct backend_cuda *cuda = backend_create(false, 0);
    struct residual_product told = {.a = (const void *)product->a.base,
                                    .b = (const void *)product->b.base,
                                    .bias = f32_base(&product->bias),
                                    .d = (float *)product->d.base,
                                    .m = (int32_t)product->m,
                                    .n = (int32_t)product->n,
                                    .k = (int32_t)product->k,
                                    .adds = adds};
    struct verdict verdict = {0};
    int64_t num_elements = product->m * product->n;
    for (int64_t i = 0; i < num_elements; i++) {
        ((float *)(void *)product->d.host)[i] = adds ? (float)product->before[i] : NAN;
    }
    buffer_upload(&product->d);
    /* Parts of an earlier product must not pass for this one's. */
    require(GPU_CALL(&gpu, memset_d8_async, scratch, 0xff, (size_t)8 << 20, gpu.stream), "poison");
    cuda_gemm_residual(cuda, &told, plan);
    backend_finish(cuda, name);
    bool is_alive = buffer_download(&product->d);
    for (int64_t i = 0; i < num_elements; i++) {
        compare(&verdict, i / product->n, i % product->n, f32_at(&product->d, i),
                product->expected[i] + (adds ? product->before[i] : 0.0), product->bound[i]);
    }
    conclude(&verdict, is_alive, name);
}

/* Catches a kernel that is wrong in a tail of rows, columns or k, under a cluster, with tiles of
 * two widths, or in a split of k. */
static void check_variants(int variant_step)
{
    static const int32_t clusters[][2] = {{1, 1}, {2, 1}, {1, 2}, {4, 1}, {2, 2}, {1, 4}};
    static const int64_t sides[][3] = {{129, 264, 328}, {300, 520, 136}, {64, 1000, 64}};
    struct backend_cuda *cuda = backend_create(false, 0);
    for (size_t i = 0; i < sizeof(sides) / sizeof(sides[0]); i++) {
        struct product_case product = product_create(sides[i][0], sides[i][1], sides[i][2]);
        struct residual_product told = {.m = (int32_t)product.m,
                                        .n = (int32_t)product.n,
                                        .k = (int32_t)product.k,
                                        .adds = true};
        for (int32_t variant = 0; variant < gemm_residual_num_variants(); variant += variant_step) {
            for (int32_t splits = 1; splits <= 3; splits++) {
                struct residual_plan plan;
                double cost_us;
                for (size_t j = 0; j < sizeof(clusters) / sizeof(clusters[0]); j++) {
                    if (!gemm_residual_plan(cuda, &told, variant, splits, &plan, &cost_us)) {
                        continue;
                    }
                    int32_t cluster_m = clusters[j][0];
                    plan.tile.cluster_m = cluster_m;
                    plan.tile.cluster_n = clusters[j][1];
                    plan.tile.group_m = 1 + (int32_t)j % 3;
                    plan.tiles_of_split =
                        (plan.tiles_of_split + cluster_m - 1) / cluster_m * cluster_m;
                    if (j % 2 == 0) {
                        plan.tile.num_tiles_n = 0;
                    }
                    char name[200];
                    snprintf(name, sizeof(name),
                             "m %d, n %d, k %d, variant %d, %d splits, cluster %dx%d, tiles %d",
                             (int)product.m, (int)product.n, (int)product.k, (int)variant,
                             (int)splits, (int)cluster_m, (int)clusters[j][1],
                             (int)plan.tile.num_tiles_n);
                    check_product(&product, splits > 1 || j % 2 == 1, &plan, name);
                }
            }
        }
        product_destroy(&product);
    }
    backend_finish(cuda, "variants");
}

/* Catches a choice that no kernel is made for, and one that splits and forgets a part. */
static void check_chosen(void)
{
    static const int64_t sides[][3] = {{1, 64, 64},      {65, 896, 4864}, {100, 896, 896},
                                       {257, 192, 1088}, {7, 8, 200},     {513, 128, 192}};
    for (size_t i = 0; i < sizeof(sides) / sizeof(sides[0]); i++) {
        struct product_case product = product_create(sides[i][0], sides[i][1], sides[i][2]);
        char name[100];
        for (int adds = 0; adds < 2; adds++) {
            snprintf(name, sizeof(name), "m %d, n %d, k %d, chosen, adds %d", (int)product.m,
                     (int)product.n, (int)product.k, adds);
            check_product(&product, adds != 0, NULL, name);
        }
        product_destroy(&product);
    }
}

/* ---- qkv ---- */

struct qkv_case {
    int32_t num_tokens, hidden_size, num_heads, num_kv_heads, head_dim;
    bool is_interleaved, has_bias, has_norm;
};

#define CASE_LAYERS 3
#define CASE_LAYER 1
#define CASE_BLOCK_SIZE 16
#define CASE_POSITIONS 512

struct qkv_memory {
    struct buffer hidden, norm, weight, bias, q_norm, k_norm, cos_sin, positions, slots, normed,
        qkv, cache;
    size_t block_bytes;
    int32_t num_blocks;
    struct qkv_params params;
};

static struct qkv_memory qkv_create(const struct qkv_case *c)
{
    struct qkv_memory m = {0};
    int32_t width = (c->num_heads + 2 * c->num_kv_heads) * c->head_dim;
    int32_t kv_bytes = c->num_kv_heads * CASE_BLOCK_SIZE * c->head_dim * 2;
    m.num_blocks = c->num_tokens / CASE_BLOCK_SIZE + 3;
    m.block_bytes = ((size_t)CASE_LAYERS * 2 * (size_t)kv_bytes + 4095) / 4096 * 4096;
    m.hidden = random_f32((int64_t)c->num_tokens * c->hidden_size, 3.0);
    m.norm = random_f32(c->hidden_size, 1.0);
    m.weight = random_bf16((int64_t)width * c->hidden_size, 1.0 / sqrt(c->hidden_size));
    if (c->has_bias) {
        m.bias = random_f32(width, 1.0);
    }
    if (c->has_norm) {
        m.q_norm = random_f32(c->head_dim, 1.0);
        m.k_norm = random_f32(c->head_dim, 1.0);
    }
    m.cos_sin = random_f32((int64_t)CASE_POSITIONS * c->head_dim, 0.7);
    m.positions = buffer_create((size_t)c->num_tokens * 4);
    m.slots = buffer_create((size_t)c->num_tokens * 4);
    int32_t *positions = (int32_t *)(void *)m.positions.host;
    int32_t *slots = (int32_t *)(void *)m.slots.host;
    /* Slots of shuffled blocks, each once; some tokens are padding. */
    int32_t num_slots = m.num_blocks * CASE_BLOCK_SIZE;
    int32_t *order = malloc((size_t)num_slots * sizeof(int32_t));
    require(order != NULL, "memory");
    for (int32_t i = 0; i < num_slots; i++) {
        order[i] = i;
    }
    for (int32_t i = num_slots - 1; i > 0; i--) {
        int32_t j = random_below(i + 1), held = order[i];
        order[i] = order[j];
        order[j] = held;
    }
    for (int32_t i = 0; i < c->num_tokens; i++) {
        positions[i] = random_below(CASE_POSITIONS);
        slots[i] = i % 11 == 5 ? -1 : order[i];
    }
    free(order);
    buffer_upload(&m.positions);
    buffer_upload(&m.slots);
    m.normed = buffer_create((size_t)c->num_tokens * (size_t)c->hidden_size * 2);
    m.qkv = buffer_create((size_t)c->num_tokens * (size_t)width * 2);
    m.cache = buffer_create((size_t)m.num_blocks * m.block_bytes);

    const uint16_t *weight = (const uint16_t *)m.weight.base;
    const float *bias = f32_base(&m.bias);
    int32_t q_width = c->num_heads * c->head_dim, kv_width = c->num_kv_heads * c->head_dim;
    m.params = (struct qkv_params){
        .hidden = f32_base(&m.hidden),
        .norm = {f32_base(&m.norm), 1e-6f},
        .q_proj = {weight, DTYPE_BF16},
        .k_proj = {weight + (size_t)q_width * (size_t)c->hidden_size, DTYPE_BF16},
        .v_proj = {weight + (size_t)(q_width + kv_width) * (size_t)c->hidden_size, DTYPE_BF16},
        .q_bias = bias,
        .k_bias = bias == NULL ? NULL : bias + q_width,
        .v_bias = bias == NULL ? NULL : bias + q_width + kv_width,
        .q_norm = f32_base(&m.q_norm),
        .k_norm = f32_base(&m.k_norm),
        .cos_sin = f32_base(&m.cos_sin),
        .positions = (const int32_t *)m.positions.base,
        .slot_mapping = (const int32_t *)m.slots.base,
        .kv = {.blocks = (unsigned char *)m.cache.base,
               .block_bytes = m.block_bytes,
               .dtype = KV_DTYPE_BF16,
               .num_layers = CASE_LAYERS,
               .num_kv_heads = c->num_kv_heads,
               .block_size = CASE_BLOCK_SIZE,
               .head_dim = c->head_dim},
        .normed = (void *)m.normed.base,
        .qkv = (void *)m.qkv.base,
        .layer_idx = CASE_LAYER,
        .num_tokens = c->num_tokens,
        .hidden_size = c->hidden_size,
        .num_heads = c->num_heads,
        .head_norm_eps = 1e-5f,
        .is_interleaved = c->is_interleaved};
    return m;
}

static void qkv_destroy(struct qkv_memory *m)
{
    struct buffer *const buffers[] = {&m->hidden, &m->norm,   &m->weight,  &m->bias,
                                      &m->q_norm, &m->k_norm, &m->cos_sin, &m->positions,
                                      &m->slots,  &m->normed, &m->qkv,     &m->cache};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        buffer_destroy(buffers[i]);
    }
}

/* Element offset in the cache of row 0 of a head; v heads follow the k heads. */
static int64_t cache_place(const struct qkv_case *c, const struct qkv_memory *m, int32_t slot,
                           int32_t plane)
{
    int64_t head_elements = (int64_t)CASE_BLOCK_SIZE * c->head_dim;
    return slot / CASE_BLOCK_SIZE * (int64_t)(m->block_bytes / 2) +
           ((int64_t)2 * CASE_LAYER * c->num_kv_heads + plane) * head_elements +
           (int64_t)(slot % CASE_BLOCK_SIZE) * c->head_dim;
}

/* Heads of one token as fp64 has them: value and bound. */
static void reference_head(const struct qkv_case *c, const struct qkv_memory *m,
                           const double *normed, const double *weight, int64_t token, int32_t head,
                           double *value, double *bound)
{
    int32_t dim = c->head_dim, half = dim / 2;
    double before[512], error[512], sum = 0.0;
    bool is_q = head < c->num_heads, is_v = head >= c->num_heads + c->num_kv_heads;
    for (int32_t i = 0; i < dim; i++) {
        int64_t row = (int64_t)head * dim + i;
        double size;
        before[i] = dot(normed + token * c->hidden_size, weight + row * c->hidden_size,
                        c->hidden_size, &size);
        before[i] += c->has_bias ? f32_at(&m->bias, row) : 0.0;
        error[i] = sum_step(c->hidden_size) * (size + fabs(before[i])) + fabs(before[i]) * 0x1p-8;
        sum += before[i] * before[i];
    }
    if (c->has_norm && !is_v) {
        const struct buffer *norm = is_q ? &m->q_norm : &m->k_norm;
        double scale = 1.0 / sqrt(sum / dim + 1e-5);
        for (int32_t i = 0; i < dim; i++) {
            /* The norm of the rounded head differs by less than a rounding of each element. */
            before[i] *= scale * f32_at(norm, i);
            error[i] = error[i] * scale * fabs(f32_at(norm, i)) + fabs(before[i]) * 0x1p-8;
        }
    }
    for (int32_t i = 0; i < half && !is_v; i++) {
        int32_t low = c->is_interleaved ? 2 * i : i, high = c->is_interleaved ? low + 1 : i + half;
        int64_t row = (int64_t)((const int32_t *)(const void *)m->positions.host)[token] * dim;
        double cosine = f32_at(&m->cos_sin, row + i), sine = f32_at(&m->cos_sin, row + half + i);
        value[low] = before[low] * cosine - before[high] * sine;
        value[high] = before[high] * cosine + before[low] * sine;
        bound[low] = error[low] * fabs(cosine) + error[high] * fabs(sine);
        bound[high] = error[high] * fabs(cosine) + error[low] * fabs(sine);
    }
    for (int32_t i = 0; i < dim; i++) {
        if (is_v) {
            value[i] = before[i];
            bound[i] = error[i];
        } else {
            bound[i] += fabs(value[i]) * (0x1p-8 + 0x1p-18);
        }
        bound[i] += 1e-6;
    }
}

/* In one kernel, as `plan` says; NULL: as the backend does it. */
static void check_qkv(const struct qkv_case *c, const struct qkv_plan *plan, const char *name)
{
    struct qkv_memory m = qkv_create(c);
    int32_t num_all_heads = c->num_heads + 2 * c->num_kv_heads;
    int64_t width = (int64_t)num_all_heads * c->head_dim;
    int64_t work = width * c->hidden_size;
    char what[200];
    snprintf(what, sizeof(what), "qkv: %d tokens, %d, %d + %d heads of %d%s%s%s%s",
             (int)c->num_tokens, (int)c->hidden_size, (int)c->num_heads, (int)c->num_kv_heads,
             (int)c->head_dim, c->is_interleaved ? ", interleaved" : "",
             c->has_bias ? ", bias" : "", c->has_norm ? ", norms" : "", name);

    struct backend_cuda *cuda = backend_create(false, 0);
    if (plan == NULL) {
        cuda_large_qkv(cuda, &m.params);
    } else {
        cuda_rmsnorm(cuda, m.params.hidden, NULL, &m.params.norm, m.params.normed, c->num_tokens,
                     c->hidden_size);
        cuda_gemm_qkv(cuda, &m.params, plan);
    }
    backend_finish(cuda, what);
    bool is_alive = buffer_download(&m.normed);
    check_norm(&m.normed, &m.hidden, NULL, &m.norm, c->num_tokens, c->hidden_size, 1e-6, is_alive,
               what);

    double *normed = widened(&m.normed, (int64_t)c->num_tokens * c->hidden_size);
    double *weight = widened(&m.weight, work);
    double value[512], bound[512];
    struct verdict verdict = {0};
    is_alive = buffer_download(&m.qkv);
    is_alive = buffer_download(&m.cache) && is_alive;
    const int32_t *slots = (const int32_t *)(const void *)m.slots.host;
    unsigned char *is_written = calloc(m.cache.num_bytes, 1);
    require(is_written != NULL, "memory");
    for (int64_t token = 0; token < c->num_tokens; token++) {
        for (int32_t head = c->num_heads; slots[token] >= 0 && head < num_all_heads; head++) {
            memset(is_written + 2 * cache_place(c, &m, slots[token], head - c->num_heads), 1,
                   (size_t)c->head_dim * 2);
        }
        for (int32_t head = 0; is_looked_at(token, c->num_tokens, work) && head < num_all_heads;
             head++) {
            bool is_q = head < c->num_heads;
            if (!is_q && slots[token] < 0) {
                continue;
            }
            reference_head(c, &m, normed, weight, token, head, value, bound);
            int64_t place = is_q ? 0 : cache_place(c, &m, slots[token], head - c->num_heads);
            for (int32_t i = 0; i < c->head_dim; i++) {
                int64_t column = (int64_t)head * c->head_dim + i;
                compare(&verdict, token, column,
                        is_q ? bf16_at(&m.qkv, token * width + column)
                             : bf16_at(&m.cache, place + i),
                        value[i], bound[i]);
            }
        }
    }
    for (size_t i = 0; i < m.cache.num_bytes; i++) {
        is_alive &= is_written[i] != 0 || m.cache.host[i] == POISON;
    }
    conclude(&verdict, is_alive, what);
    free(is_written);
    free(normed);
    free(weight);
    qkv_destroy(&m);
}

/* Catches heads that are mixed up, pairs that are not those of the model, slots of another layer or
 * block, padding that is stored, a sum over lanes that have no elements (head_dim 96 and 80). */
static void check_qkvs(void)
{
    static const struct qkv_case cases[] = {
        {77, 64, 2, 1, 32, false, false, false},   {300, 896, 14, 2, 64, false, true, false},
        {130, 256, 4, 2, 128, false, false, true}, {129, 128, 4, 4, 16, true, true, false},
        {65, 192, 2, 1, 96, true, false, true},    {66, 320, 4, 1, 80, false, true, true},
        {97, 192, 8, 2, 24, false, true, true},    {97, 64, 8, 8, 8, true, false, true},
        {70, 512, 2, 1, 256, true, true, true},    {1, 4160, 1, 1, 64, false, true, false},
        {3, 1536, 12, 2, 128, false, true, false}, {80, 2112, 1, 1, 64, false, true, false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        check_qkv(&cases[i], NULL, "");
    }
}

/* Catches a kernel that rotates or stores other heads than its tile holds; tails and clusters. */
static void check_qkv_variants(int variant_step)
{
    static const int32_t clusters[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {1, 4}};
    static const struct qkv_case cases[] = {{150, 192, 3, 2, 64, false, true, false},
                                            {270, 64, 6, 1, 64, true, false, true},
                                            {139, 128, 4, 1, 128, false, true, true},
                                            {65, 320, 3, 3, 128, true, true, false}};
    struct backend_cuda *cuda = backend_create(false, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct qkv_case *c = &cases[i];
        struct qkv_params shape = {.kv = {.num_kv_heads = c->num_kv_heads, .head_dim = c->head_dim},
                                   .num_tokens = c->num_tokens,
                                   .hidden_size = c->hidden_size,
                                   .num_heads = c->num_heads};
        for (int32_t variant = 0; variant < gemm_qkv_num_variants(); variant += variant_step) {
            for (size_t j = 0; j < sizeof(clusters) / sizeof(clusters[0]); j++) {
                struct qkv_plan plan;
                double cost_us;
                char name[80];
                if (gemm_qkv_plan(cuda, &shape, variant, &plan, &cost_us)) {
                    plan.tile.cluster_m = clusters[j][0];
                    plan.tile.cluster_n = clusters[j][1];
                    snprintf(name, sizeof(name), ", variant %d, cluster %dx%d", (int)variant,
                             (int)clusters[j][0], (int)clusters[j][1]);
                    check_qkv(c, &plan, name);
                }
            }
        }
    }
    backend_finish(cuda, "variants of qkv");
}

/* ---- mlp ---- */

static void check_mlp(int32_t num_tokens, int32_t hidden_size, int32_t width, bool has_bias,
                      uint32_t ablations)
{
    struct buffer hidden = random_f32((int64_t)num_tokens * hidden_size, 3.0);
    struct buffer norm = random_f32(hidden_size, 1.0);
    struct buffer weights =
        random_bf16((int64_t)2 * width * hidden_size, 1.0 / sqrt((double)hidden_size));
    struct buffer biases = {0};
    struct buffer normed = buffer_create((size_t)num_tokens * (size_t)hidden_size * 2);
    struct buffer d = buffer_create((size_t)num_tokens * (size_t)width * 2);
    if (has_bias) {
        biases = random_f32((int64_t)2 * width, 1.0);
    }
    const uint16_t *gate = (const uint16_t *)weights.base;
    const float *bias = f32_base(&biases);
    struct mlp_params params = {.hidden = f32_base(&hidden),
                                .norm = {f32_base(&norm), 1e-6f},
                                .gate = {gate, DTYPE_BF16},
                                .up = {gate + (size_t)width * (size_t)hidden_size, DTYPE_BF16},
                                .gate_bias = bias,
                                .up_bias = bias == NULL ? NULL : bias + width,
                                .normed = (void *)normed.base,
                                .d = (void *)d.base,
                                .num_tokens = num_tokens,
                                .hidden_size = hidden_size,
                                .intermediate_size = width};
    char what[120];
    snprintf(what, sizeof(what), "mlp: %d tokens, %d, %d%s%s", (int)num_tokens, (int)hidden_size,
             (int)width, has_bias ? ", biases" : "", ablations != 0 ? ", unfused" : "");
    struct backend_cuda *cuda = backend_create(false, ablations);
    cuda_large_mlp(cuda, &params);
    backend_finish(cuda, what);
    bool is_alive = buffer_download(&normed);
    check_norm(&normed, &hidden, NULL, &norm, num_tokens, hidden_size, 1e-6, is_alive, what);

    is_alive = buffer_download(&d);
    double *a = widened(&normed, (int64_t)num_tokens * hidden_size);
    double *b = widened(&weights, (int64_t)2 * width * hidden_size);
    double step = sum_step(hidden_size);
    /* Unfused products are rounded on their way. */
    double rounding = has_bias || ablations != 0 ? 0x1p-8 : 0.0;
    struct verdict verdict = {0};
    for (int64_t i = 0; i < num_tokens; i++) {
        for (int64_t j = 0;
             is_looked_at(i, num_tokens, (int64_t)2 * width * hidden_size) && j < width; j++) {
            double gate_size, up_size;
            double g = dot(a + i * hidden_size, b + j * hidden_size, hidden_size, &gate_size);
            double u =
                dot(a + i * hidden_size, b + (width + j) * hidden_size, hidden_size, &up_size);
            double gate_error = step * gate_size + rounding * fabs(g);
            double up_error = step * up_size + rounding * fabs(u);
            g += has_bias ? f32_at(&biases, j) : 0.0;
            u += has_bias ? f32_at(&biases, width + j) : 0.0;
            double silu = g / (1.0 + exp(-g));
            double bound = fabs(silu * u) * (0x1p-8 + 0x1p-18) + 1.1 * gate_error * fabs(u) +
                           fabs(silu) * up_error + 1.1 * gate_error * up_error + 1e-37;
            compare(&verdict, i, j, bf16_at(&d, i * width + j), silu * u, bound);
        }
    }
    conclude(&verdict, is_alive, what);
    free(a);
    free(b);
    buffer_destroy(&hidden);
    buffer_destroy(&norm);
    buffer_destroy(&weights);
    buffer_destroy(&biases);
    buffer_destroy(&normed);
    buffer_destroy(&d);
}

/* Catches gate and up in each other's place, a bias of the other, chunks of the unfused path that
 * overlap or leave rows out. */
static void check_mlps(void)
{
    check_mlp(100, 128, 192, false, 0);
    check_mlp(300, 896, 4864, false, 0);
    check_mlp(70, 192, 320, true, 0);
    check_mlp(70, 192, 320, false, IMBREX_ABLATE_MLP);
    check_mlp(2100, 64, 64, true, IMBREX_ABLATE_MLP);
    check_mlp(1, 64, 128, false, 0);
}

/* ---- logits ---- */

static void check_logit(int32_t num_rows, int32_t hidden_size, int32_t vocab_size)
{
    int32_t num_tokens = num_rows + 50;
    struct buffer hidden = random_f32((int64_t)num_tokens * hidden_size, 3.0);
    struct buffer norm = random_f32(hidden_size, 1.0);
    struct buffer weight =
        random_bf16((int64_t)vocab_size * hidden_size, 1.0 / sqrt((double)hidden_size));
    struct buffer rows = buffer_create((size_t)num_rows * 4);
    struct buffer normed = buffer_create((size_t)num_rows * (size_t)hidden_size * 2);
    struct buffer logits = buffer_create((size_t)num_rows * (size_t)vocab_size * 4);
    int32_t *host_rows = (int32_t *)(void *)rows.host;
    for (int32_t i = 0; i < num_rows; i++) {
        host_rows[i] = random_below(num_tokens);
    }
    buffer_upload(&rows);
    struct logits_params params = {.hidden = f32_base(&hidden),
                                   .rows = (const int32_t *)rows.base,
                                   .norm = {f32_base(&norm), 1e-6f},
                                   .weight = {(const void *)weight.base, DTYPE_BF16},
                                   .normed = (void *)normed.base,
                                   .logits = (float *)logits.base,
                                   .num_rows = num_rows,
                                   .hidden_size = hidden_size,
                                   .vocab_size = vocab_size};
    char what[100];
    snprintf(what, sizeof(what), "logits: %d rows, %d, %d", (int)num_rows, (int)hidden_size,
             (int)vocab_size);
    struct backend_cuda *cuda = backend_create(false, 0);
    cuda_large_logits(cuda, &params);
    backend_finish(cuda, what);
    bool is_alive = buffer_download(&normed);
    check_norm(&normed, &hidden, host_rows, &norm, num_rows, hidden_size, 1e-6, is_alive, what);
    is_alive = buffer_download(&logits);
    double *a = widened(&normed, (int64_t)num_rows * hidden_size);
    double *b = widened(&weight, (int64_t)vocab_size * hidden_size);
    struct verdict verdict = {0};
    for (int64_t i = 0; i < num_rows; i++) {
        for (int64_t j = 0;
             is_looked_at(i, num_rows, (int64_t)vocab_size * hidden_size) && j < vocab_size; j++) {
            double size;
            double expected = dot(a + i * hidden_size, b + j * hidden_size, hidden_size, &size);
            compare(&verdict, i, j, f32_at(&logits, i * vocab_size + j), expected,
                    sum_step(hidden_size) * (size + fabs(expected)));
        }
    }
    conclude(&verdict, is_alive, what);
    free(a);
    free(b);
    buffer_destroy(&hidden);
    buffer_destroy(&norm);
    buffer_destroy(&weight);
    buffer_destroy(&rows);
    buffer_destroy(&normed);
    buffer_destroy(&logits);
}

/* ---- bits ---- */

/* One layer's calls over rows [first, first + num_rows) of a step. */
struct layer_case {
    struct qkv_memory qkv;
    struct buffer attention, o_weight, d_weight, o_bias, mlp, mlp_weight, lm_head, logits, rows;
    struct qkv_case c;
    int32_t width, vocab_size;
};

static void run_layer(struct layer_case *layer, bool is_invariant, int32_t first, int32_t num_rows)
{
    const struct qkv_case *c = &layer->c;
    struct backend_cuda *cuda = backend_create(is_invariant, 0);
    int32_t all_width = (c->num_heads + 2 * c->num_kv_heads) * c->head_dim;
    int32_t q_width = c->num_heads * c->head_dim;
    size_t row = (size_t)first, hidden_size = (size_t)c->hidden_size, width = (size_t)layer->width;
    struct qkv_params qkv = layer->qkv.params;
    float *hidden = (float *)layer->qkv.hidden.base + row * hidden_size;
    const uint16_t *gate = (const uint16_t *)layer->mlp_weight.base;
    uint16_t *normed = (uint16_t *)layer->qkv.normed.base + row * hidden_size;

    qkv.hidden = hidden;
    qkv.positions += row;
    qkv.slot_mapping += row;
    qkv.normed = normed;
    qkv.qkv = (uint16_t *)layer->qkv.qkv.base + row * (size_t)all_width;
    qkv.num_tokens = num_rows;
    cuda_large_qkv(cuda, &qkv);
    cuda_large_project(cuda,
                       &(struct project_params){
                           .a = (const uint16_t *)layer->attention.base + row * (size_t)q_width,
                           .weight = {(const void *)layer->o_weight.base, DTYPE_BF16},
                           .bias = f32_base(&layer->o_bias),
                           .hidden = hidden,
                           .num_tokens = num_rows,
                           .in_features = q_width,
                           .hidden_size = c->hidden_size});
    cuda_large_mlp(cuda, &(struct mlp_params){.hidden = hidden,
                                              .norm = qkv.norm,
                                              .gate = {gate, DTYPE_BF16},
                                              .up = {gate + width * hidden_size, DTYPE_BF16},
                                              .normed = normed,
                                              .d = (uint16_t *)layer->mlp.base + row * width,
                                              .num_tokens = num_rows,
                                              .hidden_size = c->hidden_size,
                                              .intermediate_size = layer->width});
    cuda_large_project(
        cuda, &(struct project_params){.a = (const uint16_t *)layer->mlp.base + row * width,
                                       .weight = {(const void *)layer->d_weight.base, DTYPE_BF16},
                                       .hidden = hidden,
                                       .num_tokens = num_rows,
                                       .in_features = layer->width,
                                       .hidden_size = c->hidden_size});
    cuda_large_logits(cuda,
                      &(struct logits_params){
                          .hidden = (const float *)layer->qkv.hidden.base,
                          .rows = (const int32_t *)layer->rows.base + row,
                          .norm = qkv.norm,
                          .weight = {(const void *)layer->lm_head.base, DTYPE_BF16},
                          .normed = normed,
                          .logits = (float *)layer->logits.base + row * (size_t)layer->vocab_size,
                          .num_rows = num_rows,
                          .hidden_size = c->hidden_size,
                          .vocab_size = layer->vocab_size});
    backend_finish(cuda, "layer");
}

/* What a layer wrote, one after another; the caller's. */
static unsigned char *layer_results(struct layer_case *layer, size_t *num_bytes)
{
    struct buffer *const buffers[] = {&layer->qkv.hidden, &layer->qkv.cache, &layer->mlp,
                                      &layer->logits};
    *num_bytes = 0;
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        *num_bytes += buffers[i]->num_bytes;
    }
    unsigned char *all = malloc(*num_bytes), *next = all;
    require(all != NULL, "memory");
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)buffer_download(buffers[i]);
        memcpy(next, buffers[i]->host, buffers[i]->num_bytes);
        next += buffers[i]->num_bytes;
    }
    return all;
}

/* Catches sums that depend on the run, on how many rows there are or on the rows beside them. */
static void check_same_bits(void)
{
    struct layer_case layer = {
        .c = {300, 896, 14, 2, 64, false, true, false}, .width = 4864, .vocab_size = 1000};
    const struct qkv_case *c = &layer.c;
    layer.qkv = qkv_create(c);
    layer.attention = random_bf16((int64_t)300 * 896, 1.0);
    layer.o_weight = random_bf16((int64_t)896 * 896, 1.0 / 30.0);
    layer.d_weight = random_bf16((int64_t)896 * 4864, 1.0 / 70.0);
    layer.o_bias = random_f32(896, 1.0);
    layer.mlp = buffer_create((size_t)300 * 4864 * 2);
    layer.mlp_weight = random_bf16((int64_t)2 * 4864 * 896, 1.0 / 30.0);
    layer.lm_head = random_bf16((int64_t)1000 * 896, 1.0 / 30.0);
    layer.logits = buffer_create((size_t)300 * 1000 * 4);
    layer.rows = buffer_create((size_t)300 * 4);
    for (int32_t i = 0; i < 300; i++) {
        ((int32_t *)(void *)layer.rows.host)[i] = i;
    }
    buffer_upload(&layer.rows);
    size_t hidden_bytes = layer.qkv.hidden.num_bytes, num_bytes;
    unsigned char *hidden = malloc(hidden_bytes);
    require(hidden != NULL, "memory");
    memcpy(hidden, layer.qkv.hidden.host, hidden_bytes);

    static const int32_t pieces[] = {1, 7, 64, 128, 100};
    for (int is_invariant = 0; is_invariant < 2; is_invariant++) {
        unsigned char *results[3];
        for (int run = 0; run < 3; run++) {
            memcpy(layer.qkv.hidden.host, hidden, hidden_bytes);
            buffer_upload(&layer.qkv.hidden);
            buffer_poison(&layer.qkv.cache);
            buffer_poison(&layer.mlp);
            buffer_poison(&layer.logits);
            int32_t row = 0;
            for (size_t i = 0; run == 2 && i < sizeof(pieces) / sizeof(pieces[0]); i++) {
                run_layer(&layer, is_invariant != 0, row, pieces[i]);
                row += pieces[i];
            }
            if (run < 2) {
                run_layer(&layer, is_invariant != 0, 0, 300);
            }
            results[run] = layer_results(&layer, &num_bytes);
        }
        count(memcmp(results[0], results[1], num_bytes) == 0,
              is_invariant != 0 ? "two invariant runs differ" : "two runs differ");
        if (is_invariant != 0) {
            count(memcmp(results[0], results[2], num_bytes) == 0,
                  "rows depend on the rows beside them");
        }
        for (int run = 0; run < 3; run++) {
            free(results[run]);
        }
    }
    free(hidden);
    qkv_destroy(&layer.qkv);
    struct buffer *const buffers[] = {&layer.attention, &layer.o_weight, &layer.d_weight,
                                      &layer.o_bias,    &layer.mlp,      &layer.mlp_weight,
                                      &layer.lm_head,   &layer.logits,   &layer.rows};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        buffer_destroy(buffers[i]);
    }
}

#include "large_bench.h"

int main(int argc, char **argv)
{
    int exit_code = 0;
    bool is_bench = argc > 1 && strcmp(argv[1], "--bench") == 0;
    bool is_sweep = argc > 1 && strcmp(argv[1], "--sweep") == 0;
    int variant_step = argc > 1 && !is_bench && !is_sweep ? atoi(argv[1]) : 1;

    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    require(variant_step > 0, "argument");
    require(GPU_CALL(&gpu, mem_alloc, &scratch, SCRATCH_BYTES), "scratch");
    if (is_bench) {
        bench();
    } else if (is_sweep) {
        sweep_qkv();
        sweep();
    } else {
        check_variants(variant_step);
        check_chosen();
        check_qkvs();
        check_qkv_variants(variant_step);
        check_mlps();
        check_logit(70, 128, 1000);
        check_logit(1, 896, 4096);
        check_logit(130, 192, 10008);
        check_same_bits();
        /* The kernels for other GPUs than Hopper; they take any vocabulary. */
        all_ablations = IMBREX_ABLATE_HOPPER;
        check_chosen();
        check_qkvs();
        check_mlps();
        check_logit(70, 128, 1003);
        check_logit(1, 896, 4096);
        check_same_bits();
    }
    (void)gpu.mem_free(scratch);
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
