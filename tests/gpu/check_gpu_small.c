/* SPDX-License-Identifier: Apache-2.0 */
/* The products of few tokens on a GPU against fp64 on the host: every number of tokens at which
 * another kernel or another share of the work begins, odd sizes, the paged cache. Skipped where
 * there is no GPU. With --bench, the products of decode steps of whole models; with a number, every
 * number-th number of tokens only, for tools that make kernels slow. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "ops/cuda/backend_cuda.h"
#include "tests/gpu/gpu_session.h"

#define CANARY 0xca
#define CANARY_BYTES 256

#define SCRATCH_BYTES ((size_t)4 << 20)

typedef void call_fn(const void *params);

static struct backend *backend;

static void count_because(bool is_right, const char *what, const char *why)
{
    char line[512];
    (void)snprintf(line, sizeof(line), "%s: %s", what, why);
    count(is_right, line);
}

static uint32_t random_below(uint32_t limit)
{
    return random_bits() % limit;
}

/* ---- memory on both sides, canaries around the GPU's ---- */

struct memory {
    unsigned char *host;
    size_t num_bytes;
    CUdeviceptr buffer, base;
};

static void memory_upload(const struct memory *memory)
{
    require(copied_to_gpu(memory->base, memory->host, memory->num_bytes), "copy to the GPU");
}

static struct memory memory_create(size_t num_bytes)
{
    struct memory memory = {.host = malloc(num_bytes), .num_bytes = num_bytes};
    size_t whole_bytes = (num_bytes + 255) / 256 * 256 + 2 * CANARY_BYTES;
    require(memory.host != NULL, "memory");
    require(GPU_CALL(&gpu, mem_alloc, &memory.buffer, whole_bytes) &&
                GPU_CALL(&gpu, memset_d8_async, memory.buffer, CANARY, whole_bytes, gpu.stream) &&
                GPU_CALL(&gpu, stream_synchronize, gpu.stream),
            "memory of the GPU");
    memory.base = memory.buffer + CANARY_BYTES;
    memset(memory.host, CANARY, num_bytes);
    return memory;
}

/* What was written beside it is a failure. */
static void memory_download(const struct memory *memory, const char *what)
{
    unsigned char before[CANARY_BYTES], behind[CANARY_BYTES];
    bool is_intact = true;
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_dtoh, memory->host, memory->base, memory->num_bytes) &&
                GPU_CALL(&gpu, memcpy_dtoh, before, memory->buffer, CANARY_BYTES) &&
                GPU_CALL(&gpu, memcpy_dtoh, behind, memory->base + memory->num_bytes, CANARY_BYTES),
            "copy from the GPU");
    for (int i = 0; i < CANARY_BYTES; i++) {
        is_intact &= before[i] == CANARY && behind[i] == CANARY;
    }
    if (!is_intact) {
        count_because(false, what, "memory beside a result was written");
    }
}

static void memory_destroy(struct memory *memory)
{
    (void)gpu.mem_free(memory->buffer);
    free(memory->host);
}

static void memory_poison(const struct memory *memory)
{
    memset(memory->host, CANARY, memory->num_bytes);
    memory_upload(memory);
}

static struct memory bf16_create(int64_t num_elements, double scale)
{
    struct memory memory = memory_create((size_t)num_elements * 2);
    for (int64_t i = 0; i < num_elements; i++) {
        ((uint16_t *)(void *)memory.host)[i] = bf16_from_float((float)(scale * random_normal()));
    }
    memory_upload(&memory);
    return memory;
}

static struct memory f32_create(int64_t num_elements, double mean, double scale)
{
    struct memory memory = memory_create((size_t)num_elements * 4);
    for (int64_t i = 0; i < num_elements; i++) {
        ((float *)(void *)memory.host)[i] = (float)(mean + scale * random_normal());
    }
    memory_upload(&memory);
    return memory;
}

static float *f32_of(const struct memory *memory)
{
    return (float *)(void *)memory->host;
}

static uint16_t *bf16_of(const struct memory *memory)
{
    return (uint16_t *)(void *)memory->host;
}

static int32_t *i32_of(const struct memory *memory)
{
    return (int32_t *)(void *)memory->host;
}

static void *pointer_of(const struct memory *memory)
{
    return (void *)memory->base;
}

static struct weight_view view_of(const struct memory *memory, int64_t first_element)
{
    return (struct weight_view){(unsigned char *)pointer_of(memory) + first_element * 2,
                                DTYPE_BF16};
}

/* ---- the reference ---- */

/* The rows that a product takes: [m, k], rounded to bf16 as the kernels round them. */
static double *normed_rows(const struct memory *hidden, const struct memory *weight,
                           const int32_t *rows, int32_t m, int32_t k, double eps)
{
    double *normed = malloc((size_t)m * (size_t)k * sizeof(double));
    require(normed != NULL, "memory");
    for (int32_t i = 0; i < m; i++) {
        const float *row = f32_of(hidden) + (int64_t)(rows != NULL ? rows[i] : i) * k;
        double sum = 0.0;
        for (int32_t j = 0; j < k; j++) {
            sum += (double)row[j] * (double)row[j];
        }
        double scale = 1.0 / sqrt(sum / k + eps);
        for (int32_t j = 0; j < k; j++) {
            normed[(int64_t)i * k + j] = (double)bf16_to_float(
                bf16_from_float((float)((double)row[j] * scale * (double)f32_of(weight)[j])));
        }
    }
    return normed;
}

struct number {
    double value, bound;
};

/* Row of A (doubles) and row `column` of B. The bound is what fp32 sums that a tensor core
 * truncates may lose, and that three elements of A may have been rounded to the other side, their
 * fp32 value being another than fp64's. */
static struct number dot(const double *a, const struct memory *weights, int64_t column, int32_t k,
                         bool is_normed)
{
    struct number sum = {0.0, 0.0};
    double size = 0.0, most = 0.0;
    for (int32_t i = 0; i < k; i++) {
        double product = a[i] * (double)bf16_to_float(bf16_of(weights)[column * k + i]);
        sum.value += product;
        size += fabs(product);
        most = fmax(most, fabs(product));
    }
    sum.bound = ((double)k / 16.0 + 16.0) * 0x1p-22 * size + (is_normed ? 3 * 0x1p-7 * most : 0.0);
    return sum;
}

struct verdict {
    bool is_right;
    char why[200];
};

static void judge(struct verdict *verdict, const char *place, int64_t row, int64_t column,
                  double found, struct number expected)
{
    if (verdict->is_right && !(fabs(found - expected.value) <= expected.bound)) {
        verdict->is_right = false;
        snprintf(verdict->why, sizeof(verdict->why), "%s[%d, %d] is %g, expected %g within %g",
                 place, (int)row, (int)column, found, expected.value, expected.bound);
    }
}

static struct number rounded(struct number exact)
{
    exact.bound += fabs(exact.value) * 0x1p-8 + 1e-37;
    return exact;
}

/* ---- the calls ---- */

static void run(call_fn *call, const void *params, const char *what)
{
    backend_begin(backend, gpu.stream);
    call(params);
    enum imbrex_status status = backend_end(backend);
    if (status != IMBREX_STATUS_OK) {
        printf("%s\n", ((struct backend_cuda *)(void *)backend)->error.message);
    }
    require(status == IMBREX_STATUS_OK, what);
}

static void call_project(const void *params)
{
    cuda_small_project((struct backend_cuda *)(void *)backend, params);
}

static void call_mlp(const void *params)
{
    cuda_small_mlp((struct backend_cuda *)(void *)backend, params);
}

static void call_unfused_mlp(const void *params)
{
    struct backend_cuda *cuda = (struct backend_cuda *)(void *)backend;
    cuda->options.ablations = IMBREX_ABLATE_MLP;
    cuda_small_mlp(cuda, params);
    cuda->options.ablations = 0;
}

static void call_logits(const void *params)
{
    cuda_small_logits((struct backend_cuda *)(void *)backend, params);
}

static void call_qkv(const void *params)
{
    cuda_small_qkv((struct backend_cuda *)(void *)backend, params);
}

/* Runs it again and compares: catches sums whose order depends on the run. */
static void check_again(void (*call)(const void *params), const void *params,
                        const struct memory *result, const struct memory *input, const char *what)
{
    unsigned char *first = malloc(result->num_bytes);
    require(first != NULL, "memory");
    memcpy(first, result->host, result->num_bytes);
    if (input != NULL) {
        memcpy(result->host, input->host, result->num_bytes);
        memory_upload(result);
    } else {
        memory_poison(result);
    }
    run(call, params, what);
    memory_download(result, what);
    count_because(memcmp(first, result->host, result->num_bytes) == 0, what, "two runs differ");
    free(first);
}

/* hidden += a · Wᵀ + bias */
static void check_project(int32_t m, int32_t n, int32_t k, bool has_bias)
{
    struct memory a = bf16_create((int64_t)m * k, 1.0);
    struct memory weight = bf16_create((int64_t)n * k, 1.0 / sqrt((double)k));
    struct memory bias = f32_create(n, 0.0, 1.0);
    struct memory before = f32_create((int64_t)m * n, 0.0, 1.0);
    struct memory hidden = memory_create((size_t)m * (size_t)n * 4);
    struct project_params params = {.a = pointer_of(&a),
                                    .weight = view_of(&weight, 0),
                                    .bias = has_bias ? pointer_of(&bias) : NULL,
                                    .hidden = pointer_of(&hidden),
                                    .num_tokens = m,
                                    .in_features = k,
                                    .hidden_size = n};
    struct verdict verdict = {.is_right = true};
    double *row = malloc((size_t)k * sizeof(double));
    char what[100];

    require(row != NULL, "memory");
    snprintf(what, sizeof(what), "project, m %d, n %d, k %d", (int)m, (int)n, (int)k);
    memcpy(hidden.host, before.host, hidden.num_bytes);
    memory_upload(&hidden);
    run(call_project, &params, what);
    memory_download(&hidden, what);
    for (int32_t i = 0; i < m; i++) {
        for (int32_t j = 0; j < k; j++) {
            row[j] = (double)bf16_to_float(bf16_of(&a)[(int64_t)i * k + j]);
        }
        for (int32_t j = 0; j < n; j++) {
            int64_t at = (int64_t)i * n + j;
            struct number expected = dot(row, &weight, j, k, false);
            expected.value +=
                (double)f32_of(&before)[at] + (has_bias ? (double)f32_of(&bias)[j] : 0.0);
            expected.bound += 0x1p-21 * (fabs(expected.value) + 4.0);
            judge(&verdict, "hidden", i, j, (double)f32_of(&hidden)[at], expected);
        }
    }
    count_because(verdict.is_right, what, verdict.why);
    check_again(call_project, &params, &hidden, &before, what);
    free(row);
    memory_destroy(&a);
    memory_destroy(&weight);
    memory_destroy(&bias);
    memory_destroy(&before);
    memory_destroy(&hidden);
}

/* d = silu(gate) * up */
static void check_mlp(int32_t m, int32_t intermediate, int32_t k, bool has_bias, call_fn *call)
{
    bool is_unfused = call == call_unfused_mlp;
    struct memory hidden = f32_create((int64_t)m * k, 0.1, 3.0);
    struct memory norm = f32_create(k, 1.0, 0.3);
    struct memory weight = bf16_create(2 * (int64_t)intermediate * k, 1.0 / sqrt((double)k));
    struct memory bias = f32_create(2 * (int64_t)intermediate, 0.0, 1.0);
    struct memory normed = memory_create((size_t)m * (size_t)k * 2);
    struct memory d = memory_create((size_t)m * (size_t)intermediate * 2);
    float *bias_base = has_bias ? pointer_of(&bias) : NULL;
    struct mlp_params params = {.hidden = pointer_of(&hidden),
                                .norm = {pointer_of(&norm), 1e-6f},
                                .gate = view_of(&weight, 0),
                                .up = view_of(&weight, (int64_t)intermediate * k),
                                .gate_bias = bias_base,
                                .up_bias = has_bias ? bias_base + intermediate : NULL,
                                .normed = pointer_of(&normed),
                                .d = pointer_of(&d),
                                .num_tokens = m,
                                .hidden_size = k,
                                .intermediate_size = intermediate};
    struct verdict verdict = {.is_right = true};
    double *rows = normed_rows(&hidden, &norm, NULL, m, k, 1e-6);
    char what[100];

    snprintf(what, sizeof(what), "mlp%s, m %d, n %d, k %d", is_unfused ? " unfused" : "", (int)m,
             (int)intermediate, (int)k);
    memory_poison(&d);
    run(call, &params, what);
    memory_download(&d, what);
    memory_download(&normed, what);
    for (int32_t i = 0; i < m; i++) {
        for (int32_t j = 0; j < intermediate; j++) {
            struct number gate = dot(rows + (int64_t)i * k, &weight, j, k, true);
            struct number up = dot(rows + (int64_t)i * k, &weight, intermediate + j, k, true);
            if (is_unfused) { /* rounded on their way */
                gate.bound += 0x1p-8 * fabs(gate.value);
                up.bound += 0x1p-8 * fabs(up.value);
            }
            if (has_bias) {
                gate.value += (double)f32_of(&bias)[j];
                up.value += (double)f32_of(&bias)[intermediate + j];
            }
            double silu = gate.value / (1.0 + exp(-gate.value));
            /* |silu'| <= 1.1 */
            struct number expected = {silu * up.value, 1.1 * gate.bound * fabs(up.value) +
                                                           fabs(silu) * up.bound +
                                                           1.1 * gate.bound * up.bound};
            expected.bound += fabs(expected.value) * 0x1p-18;
            judge(&verdict, "d", i, j,
                  (double)bf16_to_float(bf16_of(&d)[(int64_t)i * intermediate + j]),
                  rounded(expected));
        }
    }
    count_because(verdict.is_right, what, verdict.why);
    check_again(call, &params, &d, NULL, what);

    /* Catches rows that depend on those beside them. */
    if (m > 1) {
        uint16_t *last = malloc((size_t)intermediate * 2);
        int64_t last_at = (int64_t)(m - 1) * intermediate;
        require(last != NULL, "memory");
        memcpy(last, bf16_of(&d) + last_at, (size_t)intermediate * 2);
        for (int64_t i = 0; i < (int64_t)(m - 1) * k; i++) {
            f32_of(&hidden)[i] = (float)(100.0 * random_normal());
        }
        memory_upload(&hidden);
        memory_poison(&d);
        run(call, &params, what);
        memory_download(&d, what);
        count_because(memcmp(last, bf16_of(&d) + last_at, (size_t)intermediate * 2) == 0, what,
                      "a row depends on the others");
        free(last);
    }
    free(rows);
    memory_destroy(&hidden);
    memory_destroy(&norm);
    memory_destroy(&weight);
    memory_destroy(&bias);
    memory_destroy(&normed);
    memory_destroy(&d);
}

static void check_logits(int32_t m, int32_t vocab, int32_t k)
{
    enum { STEP_TOKENS = 70 };
    struct memory hidden = f32_create((int64_t)STEP_TOKENS * k, 0.0, 0.01);
    struct memory norm = f32_create(k, 1.0, 0.3);
    struct memory weight = bf16_create((int64_t)vocab * k, 1.0 / sqrt((double)k));
    struct memory row_ids = memory_create((size_t)m * 4);
    struct memory normed = memory_create((size_t)m * (size_t)k * 2);
    struct memory logits = memory_create((size_t)m * (size_t)vocab * 4);
    for (int32_t i = 0; i < m; i++) {
        i32_of(&row_ids)[i] = (int32_t)random_below(STEP_TOKENS);
    }
    memory_upload(&row_ids);
    struct logits_params params = {.hidden = pointer_of(&hidden),
                                   .rows = pointer_of(&row_ids),
                                   .norm = {pointer_of(&norm), 1e-5f},
                                   .weight = view_of(&weight, 0),
                                   .normed = pointer_of(&normed),
                                   .logits = pointer_of(&logits),
                                   .num_rows = m,
                                   .hidden_size = k,
                                   .vocab_size = vocab};
    struct verdict verdict = {.is_right = true};
    double *rows = normed_rows(&hidden, &norm, i32_of(&row_ids), m, k, 1e-5f);
    char what[100];

    snprintf(what, sizeof(what), "logits, m %d, n %d, k %d", (int)m, (int)vocab, (int)k);
    memory_poison(&logits);
    run(call_logits, &params, what);
    memory_download(&logits, what);
    for (int32_t i = 0; i < m; i++) {
        for (int32_t j = 0; j < vocab; j++) {
            struct number expected = dot(rows + (int64_t)i * k, &weight, j, k, true);
            expected.bound += 1e-37;
            judge(&verdict, "logits", i, j, (double)f32_of(&logits)[(int64_t)i * vocab + j],
                  expected);
        }
    }
    count_because(verdict.is_right, what, verdict.why);
    check_again(call_logits, &params, &logits, NULL, what);
    free(rows);
    memory_destroy(&hidden);
    memory_destroy(&norm);
    memory_destroy(&weight);
    memory_destroy(&row_ids);
    memory_destroy(&normed);
    memory_destroy(&logits);
}

struct qkv_case {
    int32_t m, k, num_heads, num_kv_heads, head_dim;
    bool has_bias, has_head_norms, is_interleaved;
};

enum { NUM_LAYERS = 3, LAYER = 1, NUM_BLOCKS = 9, BLOCK_SIZE = 16, NUM_POSITIONS = 300 };

/* A head of one token as it should be: [head_dim]. */
static void reference_head(const struct qkv_case *c, struct number *head, const float *norm,
                           const float *cos_sin)
{
    int32_t half = c->head_dim / 2;
    if (norm != NULL) {
        double sum = 0.0;
        for (int32_t i = 0; i < c->head_dim; i++) {
            sum += head[i].value * head[i].value;
        }
        double scale = 1.0 / sqrt(sum / c->head_dim + 1e-6);
        for (int32_t i = 0; i < c->head_dim; i++) {
            /* A kernel may round the head before it normalises it. */
            head[i].bound = scale * fabs((double)norm[i]) *
                            (2 * head[i].bound + 2 * 0x1p-8 * fabs(head[i].value));
            head[i].value *= scale * (double)norm[i];
        }
    }
    for (int32_t i = 0; cos_sin != NULL && i < half; i++) {
        struct number *low = head + (c->is_interleaved ? 2 * i : i);
        struct number *high = low + (c->is_interleaved ? 1 : half);
        double cosine = (double)cos_sin[i], sine = (double)cos_sin[half + i];
        struct number x = *low, y = *high;
        low->value = x.value * cosine - y.value * sine;
        high->value = y.value * cosine + x.value * sine;
        low->bound = x.bound * fabs(cosine) + y.bound * fabs(sine) +
                     0x1p-22 * (fabs(x.value) + fabs(y.value));
        high->bound = y.bound * fabs(cosine) + x.bound * fabs(sine) +
                      0x1p-22 * (fabs(x.value) + fabs(y.value));
    }
}

/* Catches tokens stored in another place than their slot's, heads and layers mistaken for each
 * other, rotation with another position, partner or sign. */
static void check_qkv(const struct qkv_case *c)
{
    int32_t all_heads = c->num_heads + 2 * c->num_kv_heads, width = all_heads * c->head_dim;
    size_t head_elements = (size_t)BLOCK_SIZE * (size_t)c->head_dim;
    size_t block_bytes =
        ((size_t)NUM_LAYERS * 2 * (size_t)c->num_kv_heads * head_elements * 2 + 4095) / 4096 * 4096;
    struct memory hidden = f32_create((int64_t)c->m * c->k, 0.1, 2.0);
    struct memory norm = f32_create(c->k, 1.0, 0.3);
    struct memory weight = bf16_create((int64_t)width * c->k, 1.0 / sqrt((double)c->k));
    struct memory bias = f32_create(width, 0.0, 1.0);
    struct memory q_norm = f32_create(c->head_dim, 1.0, 0.3);
    struct memory k_norm = f32_create(c->head_dim, 1.0, 0.3);
    struct memory cos_sin = memory_create((size_t)NUM_POSITIONS * (size_t)c->head_dim * 4);
    struct memory positions = memory_create((size_t)c->m * 4);
    struct memory slots = memory_create((size_t)c->m * 4);
    struct memory cache = memory_create(NUM_BLOCKS * block_bytes);
    struct memory normed = memory_create((size_t)c->m * (size_t)c->k * 2);
    struct memory qkv = memory_create((size_t)c->m * (size_t)width * 2);
    int32_t half = c->head_dim / 2, q_width = c->num_heads * c->head_dim;
    int32_t kv_width = c->num_kv_heads * c->head_dim;
    for (int32_t i = 0; i < NUM_POSITIONS; i++) {
        for (int32_t j = 0; j < half; j++) {
            double angle = i * pow(10000.0, -(double)j / half);
            f32_of(&cos_sin)[i * c->head_dim + j] = (float)cos(angle);
            f32_of(&cos_sin)[i * c->head_dim + half + j] = (float)sin(angle);
        }
    }
    memory_upload(&cos_sin);
    for (int32_t i = 0; i < c->m; i++) {
        /* Steps without a common divisor with the number of slots: no slot twice. */
        i32_of(&slots)[i] = i % 5 == 3 ? -1 : (i * 35 + 11) % (NUM_BLOCKS * BLOCK_SIZE);
        i32_of(&positions)[i] = (int32_t)random_below(NUM_POSITIONS);
    }
    memory_upload(&slots);
    memory_upload(&positions);
    float *bias_base = c->has_bias ? pointer_of(&bias) : NULL;
    struct qkv_params params = {
        .hidden = pointer_of(&hidden),
        .norm = {pointer_of(&norm), 1e-6f},
        .q_proj = view_of(&weight, 0),
        .k_proj = view_of(&weight, (int64_t)q_width * c->k),
        .v_proj = view_of(&weight, (int64_t)(q_width + kv_width) * c->k),
        .q_bias = bias_base,
        .k_bias = c->has_bias ? bias_base + q_width : NULL,
        .v_bias = c->has_bias ? bias_base + q_width + kv_width : NULL,
        .q_norm = c->has_head_norms ? pointer_of(&q_norm) : NULL,
        .k_norm = c->has_head_norms ? pointer_of(&k_norm) : NULL,
        .cos_sin = pointer_of(&cos_sin),
        .positions = pointer_of(&positions),
        .slot_mapping = pointer_of(&slots),
        .kv = {.blocks = pointer_of(&cache),
               .block_bytes = block_bytes,
               .dtype = KV_DTYPE_BF16,
               .num_layers = NUM_LAYERS,
               .num_kv_heads = c->num_kv_heads,
               .block_size = BLOCK_SIZE,
               .head_dim = c->head_dim},
        .normed = pointer_of(&normed),
        .qkv = pointer_of(&qkv),
        .layer_idx = LAYER,
        .num_tokens = c->m,
        .hidden_size = c->k,
        .num_heads = c->num_heads,
        .head_norm_eps = 1e-6f,
        .is_interleaved = c->is_interleaved,
    };
    struct verdict verdict = {.is_right = true};
    double *rows = normed_rows(&hidden, &norm, NULL, c->m, c->k, 1e-6);
    struct number *head = malloc((size_t)c->head_dim * sizeof(*head));
    char what[160];

    require(head != NULL, "memory");
    snprintf(what, sizeof(what), "qkv, m %d, k %d, heads %d + 2 x %d of %d%s%s%s", (int)c->m,
             (int)c->k, (int)c->num_heads, (int)c->num_kv_heads, (int)c->head_dim,
             c->has_bias ? ", bias" : "", c->has_head_norms ? ", norms" : "",
             c->is_interleaved ? ", interleaved" : "");
    memory_poison(&cache);
    memory_poison(&qkv);
    run(call_qkv, &params, what);
    memory_download(&qkv, what);
    memory_download(&cache, what);
    for (int32_t i = 0; i < c->m; i++) {
        const float *angles = f32_of(&cos_sin) + i32_of(&positions)[i] * c->head_dim;
        int32_t slot = i32_of(&slots)[i];
        for (int32_t h = 0; h < all_heads; h++) {
            int32_t kv_head = h - c->num_heads;
            bool is_value = kv_head >= c->num_kv_heads;
            const struct memory *head_norm = kv_head < 0 ? &q_norm : &k_norm;
            for (int32_t j = 0; j < c->head_dim; j++) {
                int64_t column = (int64_t)h * c->head_dim + j;
                head[j] = dot(rows + (int64_t)i * c->k, &weight, column, c->k, true);
                head[j].value += c->has_bias ? (double)f32_of(&bias)[column] : 0.0;
            }
            reference_head(c, head, c->has_head_norms && !is_value ? f32_of(head_norm) : NULL,
                           is_value ? NULL : angles);
            uint16_t *found = bf16_of(&qkv) + ((int64_t)i * all_heads + h) * c->head_dim;
            if (kv_head >= 0) {
                size_t plane = (size_t)(kv_head + (LAYER * 2) * c->num_kv_heads);
                if (slot < 0) {
                    continue;
                }
                found =
                    (uint16_t *)(void *)(cache.host + (size_t)(slot / BLOCK_SIZE) * block_bytes) +
                    plane * head_elements + slot % BLOCK_SIZE * c->head_dim;
            }
            for (int32_t j = 0; j < c->head_dim; j++) {
                judge(&verdict,
                      kv_head < 0 ? "q"
                      : is_value  ? "v"
                                  : "k",
                      i, (int64_t)h * c->head_dim + j, (double)bf16_to_float(found[j]),
                      rounded(head[j]));
                if (kv_head >= 0) {
                    found[j] = CANARY * 0x101; /* what is left is what nobody may write */
                }
            }
        }
    }
    count_because(verdict.is_right, what, verdict.why);
    bool is_intact = true;
    for (size_t i = 0; i < cache.num_bytes; i++) {
        is_intact &= cache.host[i] == CANARY;
    }
    count_because(is_intact, what, "the cache was written beside the slots");

    /* Catches sums whose order depends on the run, in q and in the cache. */
    memory_download(&cache, what);
    check_again(call_qkv, &params, &cache, NULL, what);
    free(head);
    free(rows);
    struct memory *const all[] = {&hidden,  &norm,      &weight, &bias,  &q_norm, &k_norm,
                                  &cos_sin, &positions, &slots,  &cache, &normed, &qkv};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        memory_destroy(all[i]);
    }
}

static void check_all(size_t step)
{
    static const int32_t tokens[] = {1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 63, 64};
    static const struct qkv_case heads[] = {
        {0, 896, 14, 2, 64, true, false, false}, {0, 192, 4, 1, 128, true, false, true},
        {0, 64, 8, 2, 24, false, false, false},  {0, 320, 4, 4, 80, false, false, true},
        {0, 256, 4, 2, 32, true, true, false},   {0, 128, 2, 1, 128, false, true, true},
        {0, 1152, 2, 1, 256, true, true, false},
    };
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i += step) {
        int32_t m = tokens[i];
        check_project(m, 64, 64, true);
        check_project(m, 192, 960, false);
        check_project(m, 896, 320, true);
        check_project(m, 64, 18944, false);
        check_mlp(m, 64, 64, true, call_mlp);
        check_mlp(m, 320, 896, false, call_mlp);
        check_mlp(m, 1216, 192, true, call_mlp);
        check_mlp(m, 320, 896, true, call_unfused_mlp);
        check_logits(m, 1, 64);
        check_logits(m, 1003, 192);
        check_logits(m, 4099, 128);
        for (size_t j = 0; j < sizeof(heads) / sizeof(heads[0]); j++) {
            struct qkv_case c = heads[j];
            if (j == 0 && i % 3 != 0) {
                continue; /* slow on the host */
            }
            c.m = m;
            check_qkv(&c);
        }
    }
    /* More of k than registers keep of a row, and more rows than CTAs. */
    check_mlp(2, 4096, 4352, false, call_mlp);
    check_mlp(1, 64, 8192, false, call_mlp);
    check_mlp(12, 64, 8192, false, call_mlp);
    check_logits(1, 40000, 64);
}

/* ---- the products of a decode step ---- */

struct bench_model {
    const char *name;
    int32_t hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, num_layers;
};

enum { PART_QKV = 1, PART_O = 2, PART_MLP = 4, PART_DOWN = 8, PART_LOGITS = 16, PART_ALL = 31 };

struct bench_memory {
    CUdeviceptr weights, hidden, vectors, activations, integers, cache, logits;
};

static void bench_step(const struct bench_model *model, const struct bench_memory *memory,
                       int32_t m, int parts)
{
    int64_t h = model->hidden, i = model->intermediate;
    int64_t width = (int64_t)(model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    int64_t q_width = (int64_t)model->num_heads * model->head_dim;
    int64_t kv_width = (int64_t)model->num_kv_heads * model->head_dim;
    const unsigned char *weights = (const unsigned char *)memory->weights;
    const float *vectors = (const float *)memory->vectors;
    unsigned char *activations = (unsigned char *)memory->activations;
    void *qkv = activations, *d = activations + (4 << 20), *normed = activations + (8 << 20);
    size_t block_bytes = (size_t)model->num_layers * 2 * 16 * (size_t)kv_width * 2;
    int32_t *positions = (int32_t *)memory->integers, *slots = positions + 64, *rows = slots + 64;
    struct norm_params norm = {vectors, 1e-6f};

    for (int32_t layer = 0; layer < model->num_layers; layer++) {
        const unsigned char *o = weights + width * h * 2;
        const unsigned char *gate = o + q_width * h * 2, *down = gate + 2 * i * h * 2;
        struct qkv_params qkv_params = {
            .hidden = (const float *)memory->hidden,
            .norm = norm,
            .q_proj = {weights, DTYPE_BF16},
            .q_bias = vectors,
            .k_bias = vectors + q_width,
            .v_bias = vectors + q_width + kv_width,
            .cos_sin = vectors,
            .positions = positions,
            .slot_mapping = slots,
            .kv = {.blocks = (unsigned char *)memory->cache,
                   .block_bytes = block_bytes,
                   .dtype = KV_DTYPE_BF16,
                   .num_layers = model->num_layers,
                   .num_kv_heads = model->num_kv_heads,
                   .block_size = 16,
                   .head_dim = model->head_dim},
            .normed = normed,
            .qkv = qkv,
            .layer_idx = layer,
            .num_tokens = m,
            .hidden_size = model->hidden,
            .num_heads = model->num_heads,
        };
        struct project_params o_params = {.a = qkv,
                                          .weight = {o, DTYPE_BF16},
                                          .hidden = (float *)memory->hidden,
                                          .num_tokens = m,
                                          .in_features = (int32_t)q_width,
                                          .hidden_size = model->hidden};
        struct mlp_params mlp_params = {.hidden = (const float *)memory->hidden,
                                        .norm = norm,
                                        .gate = {gate, DTYPE_BF16},
                                        .up = {gate + i * h * 2, DTYPE_BF16},
                                        .normed = normed,
                                        .d = d,
                                        .num_tokens = m,
                                        .hidden_size = model->hidden,
                                        .intermediate_size = model->intermediate};
        struct project_params down_params = {.a = d,
                                             .weight = {down, DTYPE_BF16},
                                             .hidden = (float *)memory->hidden,
                                             .num_tokens = m,
                                             .in_features = model->intermediate,
                                             .hidden_size = model->hidden};
        if (parts & PART_QKV) {
            call_qkv(&qkv_params);
        }
        if (parts & PART_O) {
            call_project(&o_params);
        }
        if (parts & PART_MLP) {
            call_mlp(&mlp_params);
        }
        if (parts & PART_DOWN) {
            call_project(&down_params);
        }
        weights = down + i * h * 2;
    }
    struct logits_params logits_params = {.hidden = (const float *)memory->hidden,
                                          .rows = rows,
                                          .norm = norm,
                                          .weight = {weights, DTYPE_BF16},
                                          .normed = normed,
                                          .logits = (float *)memory->logits,
                                          .num_rows = m,
                                          .hidden_size = model->hidden,
                                          .vocab_size = model->vocab};
    if (parts & PART_LOGITS) {
        call_logits(&logits_params);
    }
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

/* Milliseconds of a step, median of bursts of a few replays. */
static float bench_parts(const struct bench_model *model, const struct bench_memory *memory,
                         int32_t m, int parts)
{
    enum { BURSTS = 7, REPLAYS = 4 };
    CUgraph graph = NULL;
    CUgraphExec replay = NULL;
    CUevent begin = NULL, end = NULL;
    float times[BURSTS];

    require(GPU_CALL(&gpu, stream_begin_capture, gpu.stream, CU_STREAM_CAPTURE_MODE_GLOBAL),
            "capture");
    backend_begin(backend, gpu.stream);
    bench_step(model, memory, m, parts);
    require(backend_end(backend) == IMBREX_STATUS_OK &&
                GPU_CALL(&gpu, stream_end_capture, gpu.stream, &graph) &&
                GPU_CALL(&gpu, graph_instantiate, &replay, graph, 0) &&
                GPU_CALL(&gpu, event_create, &begin, 0) && GPU_CALL(&gpu, event_create, &end, 0) &&
                GPU_CALL(&gpu, graph_launch, replay, gpu.stream),
            "graph");
    for (int i = 0; i < BURSTS; i++) {
        bool is_ok = GPU_CALL(&gpu, event_record, begin, gpu.stream);
        for (int j = 0; j < REPLAYS; j++) {
            is_ok = is_ok && GPU_CALL(&gpu, graph_launch, replay, gpu.stream);
        }
        require(is_ok && GPU_CALL(&gpu, event_record, end, gpu.stream) &&
                    GPU_CALL(&gpu, event_synchronize, end) &&
                    GPU_CALL(&gpu, event_elapsed_time, &times[i], begin, end),
                "replay");
        times[i] /= REPLAYS;
    }
    (void)gpu.event_destroy(begin);
    (void)gpu.event_destroy(end);
    (void)gpu.graph_exec_destroy(replay);
    (void)gpu.graph_destroy(graph);
    qsort(times, BURSTS, sizeof(times[0]), compare_floats);
    return times[BURSTS / 2];
}

static void bench_memory_create(struct bench_memory *memory)
{
    uint64_t weight_count = (uint64_t)7400 << 20, vector_count = 1 << 20;
    float weight_scale = 0.02f, vector_scale = 1.0f;
    uint32_t seed = 1;
    size_t logits_bytes = (size_t)64 * 152064 * 4, hidden_bytes = (size_t)64 * 3584 * 4;
    int32_t integers[192];
    void *fill_weights[] = {&memory->weights, &weight_count, &weight_scale, &seed};
    void *fill_vectors[] = {&memory->vectors, &vector_count, &vector_scale, &seed};

    for (int32_t i = 0; i < 64; i++) {
        integers[i] = 0;
        integers[64 + i] = i;
        integers[128 + i] = i;
    }
    require(GPU_CALL(&gpu, mem_alloc, &memory->weights, weight_count * 2) &&
                GPU_CALL(&gpu, mem_alloc, &memory->vectors, vector_count * 4) &&
                GPU_CALL(&gpu, mem_alloc, &memory->hidden, hidden_bytes) &&
                GPU_CALL(&gpu, mem_alloc, &memory->activations, 16 << 20) &&
                GPU_CALL(&gpu, mem_alloc, &memory->integers, sizeof(integers)) &&
                GPU_CALL(&gpu, mem_alloc, &memory->cache, 64 << 20) &&
                GPU_CALL(&gpu, mem_alloc, &memory->logits, logits_bytes) &&
                gpu_launch(&gpu, "bench_fill", 1056, 256, fill_weights) &&
                gpu_launch(&gpu, "bench_fill", 1056, 256, fill_vectors) &&
                GPU_CALL(&gpu, memset_d8_async, memory->hidden, 0x3c, hidden_bytes, gpu.stream) &&
                GPU_CALL(&gpu, memset_d8_async, memory->activations, 0, 16 << 20, gpu.stream) &&
                copied_to_gpu(memory->integers, integers, sizeof(integers)) &&
                GPU_CALL(&gpu, stream_synchronize, gpu.stream),
            "memory of the benchmark");
}

static const struct bench_model bench_models[] = {
    {"0.5B", 896, 4864, 14, 2, 64, 151936, 24},
    {"1.5B", 1536, 8960, 12, 2, 128, 151936, 28},
    {"3B", 2048, 11008, 16, 2, 128, 151936, 36},
    {"7B", 3584, 18944, 28, 4, 128, 152064, 28},
};
enum { NUM_BENCH_MODELS = sizeof(bench_models) / sizeof(bench_models[0]) };

/* floor: the bytes of the weights at 4.5 TB/s. What a kernel costs is what the step is longer for
 * it. */
static void bench_model_tokens(const struct bench_model *model, const struct bench_memory *memory,
                               int32_t m)
{
    double h = model->hidden, head_dim = model->head_dim;
    double bytes[5] = {(model->num_heads + 2 * model->num_kv_heads) * head_dim * h * 2,
                       model->num_heads * head_dim * h * 2, 4.0 * model->intermediate * h,
                       2.0 * model->intermediate * h, 2.0 * model->vocab * h};
    double floor_ms = bytes[4] / 4.5e9;
    for (int i = 0; i < 4; i++) {
        floor_ms += model->num_layers * bytes[i] / 4.5e9;
    }
    double ms = (double)bench_parts(model, memory, m, PART_ALL);
    printf("%-6s %2d %7.3f %6.3f %5.1f   ", model->name, (int)m, ms, floor_ms,
           floor_ms / ms * 100.0);
    for (int i = 0; i < 5; i++) {
        double without = (double)bench_parts(model, memory, m, PART_ALL & ~(1 << i));
        printf(" %5.1f(%4.1f)", (ms - without) * 1e3 / (i < 4 ? model->num_layers : 1),
               bytes[i] / 4.5e6);
    }
    printf("\n");
    fflush(stdout);
}

static void bench_all(void)
{
    static const int32_t tokens[] = {1, 8, 32};
    struct bench_memory memory = {0};

    bench_memory_create(&memory);
    printf("model   m      ms  floor     %%   us of qkv      o    mlp   down logits (floors)\n");
    for (size_t i = 0; i < NUM_BENCH_MODELS; i++) {
        for (size_t j = 0; j < sizeof(tokens) / sizeof(tokens[0]); j++) {
            bench_model_tokens(&bench_models[i], &memory, tokens[j]);
        }
    }
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    int exit_code = 0;
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16};
    struct backend_shape shape = {.hidden_size = 64,
                                  .intermediate_size = 64,
                                  .vocab_size = 64,
                                  .num_heads = 1,
                                  .num_kv_heads = 1,
                                  .head_dim = 64,
                                  .activation_dtype = DTYPE_BF16};

    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    require(argc < 2 || argv[1][0] == '-' || atoi(argv[1]) > 0, "argument");
    CUdeviceptr scratch;
    require(GPU_CALL(&gpu, mem_alloc, &scratch, SCRATCH_BYTES), "scratch");
    bool is_bench = argc > 1 && strcmp(argv[1], "--bench") == 0;
    /* Then the kernels for other GPUs than Hopper, which have no clusters. */
    for (int is_portable = 0; is_portable < (is_bench ? 1 : 2); is_portable++) {
        options.ablations = is_portable != 0 ? IMBREX_ABLATE_HOPPER : 0;
        require(backend_cuda_create_on(device, &options, &shape, (void *)scratch, SCRATCH_BYTES,
                                       &backend, &err) == IMBREX_STATUS_OK,
                "backend");
        if (is_bench) {
            bench_all();
        } else {
            check_all(argc > 1 ? (size_t)strtoul(argv[1], NULL, 10) : 1);
        }
        backend_destroy(backend);
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
