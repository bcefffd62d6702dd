/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's part of imbrex_ops.h: checks what a caller gives, brings rows of bf16 to fp32 and back
 * where the ops want them, and runs these. Rows pass through in chunks, so that the fp32 copies
 * stay in cache and memory does not grow with num_tokens. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/thread_pool.h"
#include "imbrex_ops.h"
#include "ops/ops.h"

/* Each chunk reads all weights: enough rows that this costs little beside the arithmetic. */
#define CHUNK_TOKENS 256

struct imbrex_cpu {
    struct ops *ops;
};

enum imbrex_status imbrex_cpu_open(int32_t num_threads, struct imbrex_cpu **cpu,
                                   struct imbrex_error *err)
{
    if (num_threads < 0 || num_threads > THREAD_POOL_MAX_THREADS) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "num_threads",
                               ": expected 0 to %d, found %d", THREAD_POOL_MAX_THREADS,
                               (int)num_threads);
    }
    struct imbrex_cpu *opened = calloc(1, sizeof(*opened));
    if (opened == NULL) {
        return error_out_of_memory(err, "CPU", sizeof(*opened));
    }
    enum imbrex_status status = ops_create(num_threads == 0 ? thread_pool_num_cpus() : num_threads,
                                           IMBREX_CPU_ALL, NULL, 0, &opened->ops, err);
    if (status != IMBREX_STATUS_OK) {
        free(opened);
        return status;
    }
    *cpu = opened;
    return IMBREX_STATUS_OK;
}

void imbrex_cpu_close(struct imbrex_cpu *cpu)
{
    if (cpu != NULL) {
        ops_destroy(cpu->ops);
        free(cpu);
    }
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* A matrix of rows as a caller describes it. */
struct rows {
    const char *name;
    const void *elements;
    int64_t stride; /* elements; 0 until resolved */
    int32_t num_rows, width;
    int32_t dtype; /* of enum imbrex_dtype */
};

static size_t dtype_bytes(int32_t dtype)
{
    return dtype == IMBREX_DTYPE_BF16 ? sizeof(uint16_t) : sizeof(float);
}

static enum imbrex_status check_count(const char *name, int32_t count, int32_t least,
                                      struct imbrex_error *err)
{
    return count >= least
               ? IMBREX_STATUS_OK
               : error_set(err, IMBREX_STATUS_INVALID_ARGUMENT, "%s: expected %d or more, found %d",
                           name, (int)least, (int)count);
}

static enum imbrex_status check_dtype(const char *name, int32_t dtype, struct imbrex_error *err)
{
    return dtype == IMBREX_DTYPE_F32 || dtype == IMBREX_DTYPE_BF16
               ? IMBREX_STATUS_OK
               : error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                           "%s: expected one of enum imbrex_dtype, found %d", name, (int)dtype);
}

/* Bytes from the first element to the last; false if that does not fit. */
static bool rows_bytes(const struct rows *rows, size_t *num_bytes)
{
    size_t elements;
    return size_mul((size_t)(rows->num_rows - 1), (size_t)rows->stride, &elements) &&
           size_add(elements, (size_t)rows->width, &elements) &&
           size_mul(elements, dtype_bytes(rows->dtype), num_bytes) &&
           *num_bytes <= UINTPTR_MAX - (uintptr_t)rows->elements;
}

/* Of a matrix of at least one row. Sets the stride that 0 stands for. */
static enum imbrex_status check_rows(struct rows *rows, struct imbrex_error *err)
{
    size_t alignment = dtype_bytes(rows->dtype), num_bytes;
    if (rows->elements == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT, "%s: expected a pointer, found NULL",
                         rows->name);
    }
    if ((uintptr_t)rows->elements % alignment != 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: expected an address that is a multiple of %d, found %p", rows->name,
                         (int)alignment, rows->elements);
    }
    rows->stride = rows->stride == 0 ? rows->width : rows->stride;
    if (rows->stride < rows->width) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: stride: expected %d or more, found %lld", rows->name,
                         (int)rows->width, (long long)rows->stride);
    }
    if (!rows_bytes(rows, &num_bytes)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "%s: %d rows %lld elements apart are more than there are addresses",
                         rows->name, (int)rows->num_rows, (long long)rows->stride);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_apart(const struct rows *d, const struct rows *input,
                                      struct imbrex_error *err)
{
    size_t d_bytes = 0, input_bytes = 0;
    (void)rows_bytes(d, &d_bytes);
    (void)rows_bytes(input, &input_bytes);
    uintptr_t d_begin = (uintptr_t)d->elements, input_begin = (uintptr_t)input->elements;
    return d_begin + d_bytes <= input_begin || input_begin + input_bytes <= d_begin
               ? IMBREX_STATUS_OK
               : error_set(err, IMBREX_STATUS_INVALID_ARGUMENT, "d: overlaps %s", input->name);
}

static enum imbrex_status check_bias(const char *name, const float *bias, struct imbrex_error *err)
{
    return (uintptr_t)bias % sizeof(float) == 0
               ? IMBREX_STATUS_OK
               : error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                           "%s: expected an address that is a multiple of 4, found %p", name,
                           (const void *)bias);
}

static struct weight_view weights_of(const struct rows *rows)
{
    return (struct weight_view){
        .elements = rows->elements,
        .dtype = rows->dtype == IMBREX_DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32,
    };
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* Memory of one call: fp32 rows for what is bf16 or, if `packed`, has gaps between rows. */
struct chunk {
    float *a, *d; /* NULL: the caller's own rows are read or written */
};

static bool needs_copy(const struct rows *rows, bool packed)
{
    return rows->dtype == IMBREX_DTYPE_BF16 || (packed && rows->stride != rows->width);
}

static void chunk_free(struct chunk *chunk)
{
    free(chunk->a);
    free(chunk->d);
}

static enum imbrex_status chunk_allocate(const struct rows *a, const struct rows *d, bool packed,
                                         struct chunk *chunk, struct imbrex_error *err)
{
    size_t tokens = a->num_rows < CHUNK_TOKENS ? (size_t)a->num_rows : CHUNK_TOKENS;
    size_t a_bytes = tokens * (size_t)a->width * sizeof(float);
    size_t d_bytes = tokens * (size_t)d->width * sizeof(float);
    *chunk = (struct chunk){
        .a = needs_copy(a, packed) ? malloc(a_bytes) : NULL,
        .d = needs_copy(d, packed) ? malloc(d_bytes) : NULL,
    };
    if ((needs_copy(a, packed) && chunk->a == NULL) ||
        (needs_copy(d, packed) && chunk->d == NULL)) {
        chunk_free(chunk);
        return error_out_of_memory(err, "rows in fp32", a_bytes + d_bytes);
    }
    return IMBREX_STATUS_OK;
}

static const unsigned char *row_at(const struct rows *rows, int64_t row)
{
    return (const unsigned char *)rows->elements +
           (size_t)(row * rows->stride) * dtype_bytes(rows->dtype);
}

/* Rows [begin, begin + count) of a as fp32: the copy, or where they are. */
static const float *chunk_open(const struct chunk *chunk, const struct rows *a, int32_t begin,
                               int32_t count)
{
    if (chunk->a == NULL) {
        return (const float *)(const void *)row_at(a, begin);
    }
    for (int32_t row = 0; row < count; row++) {
        const void *from = row_at(a, (int64_t)begin + row);
        float *to = chunk->a + (int64_t)row * a->width;
        if (a->dtype == IMBREX_DTYPE_F32) {
            memcpy(to, from, (size_t)a->width * sizeof(float));
            continue;
        }
        const uint16_t *bits = from;
        for (int32_t i = 0; i < a->width; i++) {
            to[i] = bf16_to_float(bits[i]);
        }
    }
    return chunk->a;
}

/* Where rows from `begin` on of d are to be written. */
static float *chunk_target(const struct chunk *chunk, const struct rows *d, int32_t begin)
{
    return chunk->d != NULL ? chunk->d : (float *)(uintptr_t)row_at(d, begin);
}

static void chunk_close(const struct chunk *chunk, const struct rows *d, int32_t begin,
                        int32_t count)
{
    if (chunk->d == NULL) {
        return;
    }
    for (int32_t row = 0; row < count; row++) {
        const float *from = chunk->d + (int64_t)row * d->width;
        void *to = (void *)(uintptr_t)row_at(d, (int64_t)begin + row);
        if (d->dtype == IMBREX_DTYPE_F32) {
            memcpy(to, from, (size_t)d->width * sizeof(float));
            continue;
        }
        uint16_t *bits = to;
        for (int32_t i = 0; i < d->width; i++) {
            bits[i] = bf16_from_float(from[i]);
        }
    }
}

/* ---- ops ------------------------------------------------------------------------------------- */

enum imbrex_status imbrex_cpu_gemm_swiglu(struct imbrex_cpu *cpu,
                                          const struct imbrex_cpu_gemm_swiglu_params *params,
                                          struct imbrex_error *err)
{
    struct rows a = {
        "a", params->a, params->a_stride, params->num_tokens, params->hidden_size, params->dtype};
    struct rows d = {
        "d",          params->d, params->d_stride, params->num_tokens, params->intermediate_size,
        params->dtype};
    struct rows gate = {"gate",
                        params->gate,
                        0,
                        params->intermediate_size,
                        params->hidden_size,
                        params->weight_dtype};
    struct rows up = gate;
    struct chunk chunk;

    up.name = "up";
    up.elements = params->up;
    TRY(check_count("num_tokens", params->num_tokens, 0, err));
    TRY(check_count("hidden_size", params->hidden_size, 1, err));
    TRY(check_count("intermediate_size", params->intermediate_size, 1, err));
    TRY(check_dtype("dtype", params->dtype, err));
    TRY(check_dtype("weight_dtype", params->weight_dtype, err));
    if (params->num_tokens == 0) {
        return IMBREX_STATUS_OK;
    }
    TRY(check_rows(&a, err));
    TRY(check_rows(&gate, err));
    TRY(check_rows(&up, err));
    TRY(check_rows(&d, err));
    TRY(check_apart(&d, &a, err));
    TRY(check_apart(&d, &gate, err));
    TRY(check_apart(&d, &up, err));
    TRY(check_bias("gate_bias", params->gate_bias, err));
    TRY(check_bias("up_bias", params->up_bias, err));
    TRY(chunk_allocate(&a, &d, true, &chunk, err));
    for (int32_t begin = 0; begin < a.num_rows; begin += CHUNK_TOKENS) {
        int32_t left = a.num_rows - begin;
        int32_t count = left < CHUNK_TOKENS ? left : CHUNK_TOKENS;
        const struct gemm_swiglu_params op = {
            .a = chunk_open(&chunk, &a, begin, count),
            .gate = weights_of(&gate),
            .up = weights_of(&up),
            .gate_bias = params->gate_bias,
            .up_bias = params->up_bias,
            .d = chunk_target(&chunk, &d, begin),
            .num_tokens = count,
            .hidden_size = params->hidden_size,
            .intermediate_size = params->intermediate_size,
        };
        ops_gemm_swiglu(cpu->ops, &op);
        chunk_close(&chunk, &d, begin, count);
    }
    chunk_free(&chunk);
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_cpu_gemm(struct imbrex_cpu *cpu,
                                   const struct imbrex_cpu_gemm_params *params,
                                   struct imbrex_error *err)
{
    struct rows a = {
        "a", params->a, params->a_stride, params->num_tokens, params->in_features, params->dtype};
    struct rows d = {
        "d", params->d, params->d_stride, params->num_tokens, params->out_features, params->dtype};
    struct rows b = {
        "b", params->b, 0, params->out_features, params->in_features, params->weight_dtype};
    struct chunk chunk;

    TRY(check_count("num_tokens", params->num_tokens, 0, err));
    TRY(check_count("in_features", params->in_features, 1, err));
    TRY(check_count("out_features", params->out_features, 1, err));
    TRY(check_dtype("dtype", params->dtype, err));
    TRY(check_dtype("weight_dtype", params->weight_dtype, err));
    if (params->num_tokens == 0) {
        return IMBREX_STATUS_OK;
    }
    TRY(check_rows(&a, err));
    TRY(check_rows(&b, err));
    TRY(check_rows(&d, err));
    TRY(check_apart(&d, &a, err));
    TRY(check_apart(&d, &b, err));
    TRY(check_bias("bias", params->bias, err));
    TRY(chunk_allocate(&a, &d, false, &chunk, err));
    for (int32_t begin = 0; begin < a.num_rows; begin += CHUNK_TOKENS) {
        int32_t left = a.num_rows - begin;
        int32_t count = left < CHUNK_TOKENS ? left : CHUNK_TOKENS;
        const struct linear_params op = {
            .a = chunk_open(&chunk, &a, begin, count),
            .weight = weights_of(&b),
            .bias = params->bias,
            .d = chunk_target(&chunk, &d, begin),
            .a_stride = chunk.a != NULL ? a.width : a.stride,
            .d_stride = chunk.d != NULL ? d.width : d.stride,
            .num_tokens = count,
            .in_features = params->in_features,
            .out_features = params->out_features,
        };
        ops_linear(cpu->ops, &op, 1);
        chunk_close(&chunk, &d, begin, count);
    }
    chunk_free(&chunk);
    return IMBREX_STATUS_OK;
}
