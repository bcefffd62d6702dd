/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu of weights that are not quantised: AVX2 and AVX-512 give the same bits,
 * for any number of rows and threads and each way to read weights for few rows, as
 * docs/kernels-cpu.md promises.
 *
 * Catches: an order of adding up that depends on the width of vectors, on tiles, panels or blocks,
 * such as even elements after odd ones or one chain instead of two, in one of the two, which is
 * within the bounds of check_linear and check_gemm_swiglu, whose reference adds up in another
 * order; a way that takes wrong rows or columns at the end of a unit, a segment or a block. Of
 * quantised weights, the ways of one path are compared. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/ops_loop.h"
#include "ops/quant.h"

#define EXIT_SKIPPED 77
#define MAX_ROWS 700
#define MAX_FEW_ROWS 8
/* Of one matrix in a case: enough for two chunks of rows and for several panels of columns. */
#define MAX_PRODUCTS ((int64_t)40 << 20)
#define MAX_WIDTH 4867
#define MAX_COLS 611

static const uint32_t level_features[] = {IMBREX_CPU_AVX2, IMBREX_CPU_AVX2 | IMBREX_CPU_AVX512};
static const uint32_t quant_features = IMBREX_CPU_AVX2 | IMBREX_CPU_AVX512 | IMBREX_CPU_AVX512_VNNI;
static const int32_t level_threads[] = {1, 3};
/* Each level with each number of threads and each way to read weights for few rows. */
enum { NUM_LEVELS = 2, LEVEL_OPS = 2 * FEW_WAY_COUNT, MAX_OPS = NUM_LEVELS * LEVEL_OPS };

/* Around the sizes of tiles, of few rows and of chunks; elements around steps and blocks of k;
 * columns around groups, halves of them, and panels. */
static const int32_t rows_list[] = {1,  2,  3,  4,  5,  6,   7,   8,       9,
                                    11, 13, 24, 25, 47, 101, 513, MAX_ROWS};
static const int32_t widths[] = {1, 7, 33, 64, 447, 449, 896, 1001, MAX_WIDTH};
static const int32_t cols_list[] = {5, 16, 23, 130, 259, MAX_COLS};
static const enum dtype dtypes[] = {DTYPE_BF16, DTYPE_F16, DTYPE_F32};

#define COUNT_OF(list) ((int32_t)(sizeof(list) / sizeof((list)[0])))

struct levels {
    struct ops *ops[MAX_OPS]; /* AVX2 with one thread first */
    int32_t num_ops;
    void *scratch; /* of ops, for activations of few rows in blocks */
    size_t scratch_bytes;
    float *a, *bias, *residual, *row;
    unsigned char *weights[2];
    float *d, *expected;
    int64_t num_passed, num_failed;
};

static bool has_features(uint32_t features)
{
    return cpu_features_detect(features) == features;
}

static uint32_t random_bits(void)
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* In [-1, 1), of any number of significant bits. */
static float random_float(void)
{
    return (float)(int32_t)random_bits() * 0x1p-31f;
}

static void fill_floats(float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        values[i] = random_float();
    }
}

static void fill_weights(unsigned char *weights, enum dtype dtype, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float value = random_float();
        if (dtype == DTYPE_F32) {
            memcpy(weights + 4 * i, &value, sizeof(value));
        } else {
            uint16_t bits = dtype == DTYPE_BF16 ? bf16_from_float(value) : f16_from_float(value);
            memcpy(weights + 2 * i, &bits, sizeof(bits));
        }
    }
}

static const enum dtype quant_dtypes[] = {DTYPE_Q8_0, DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0,
                                          DTYPE_Q5_1, DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K};
static const int32_t quant_widths[] = {32, 96, 256, 512, 896, 4864};
static const int32_t quant_rows_list[] = {1, 2, 8};

struct level_case {
    const char *op;
    enum dtype dtype;
    int32_t num_rows, width, num_cols;
};

static void run_case(struct levels *levels, const struct level_case *x, struct ops *ops, float *d)
{
    struct weight_view weights[2];
    for (int i = 0; i < 2; i++) {
        weights[i] = (struct weight_view){.elements = levels->weights[i], .dtype = x->dtype};
    }
    if (strcmp(x->op, "linear") == 0) {
        struct linear_params params = {.a = levels->a,
                                       .weight = weights[0],
                                       .bias = levels->bias,
                                       .residual = levels->residual,
                                       .d = d,
                                       .a_stride = x->width,
                                       .d_stride = x->num_cols,
                                       .num_tokens = x->num_rows,
                                       .in_features = x->width,
                                       .out_features = x->num_cols};
        ops_linear(ops, &params, 1);
        return;
    }
    struct gemm_swiglu_params params = {.a = levels->a,
                                        .gate = weights[0],
                                        .up = weights[1],
                                        .gate_bias = levels->bias,
                                        .up_bias = levels->bias,
                                        .d = d,
                                        .num_tokens = x->num_rows,
                                        .hidden_size = x->width,
                                        .intermediate_size = x->num_cols};
    ops_gemm_swiglu(ops, &params);
}

static bool compare(const struct levels *levels, const struct level_case *x, int32_t ops_idx)
{
    for (int64_t i = 0; i < (int64_t)x->num_rows * x->num_cols; i++) {
        uint32_t found, expected;
        memcpy(&found, &levels->d[i], sizeof(found));
        memcpy(&expected, &levels->expected[i], sizeof(expected));
        if (found != expected) {
            printf("FAILED: %s %s, %" PRId32 " rows, %" PRId32 " elements, %" PRId32
                   " columns, %s with %" PRId32 " threads: row %" PRId64 ", column %" PRId64
                   ": expected the bits of the first %08" PRIx32 " (%.9g), found %08" PRIx32
                   " (%.9g)\n",
                   x->op, dtype_name(x->dtype), x->num_rows, x->width, x->num_cols,
                   ops_kernels_name(levels->ops[ops_idx]), ops_num_threads(levels->ops[ops_idx]),
                   i / x->num_cols, i % x->num_cols, expected, (double)levels->expected[i], found,
                   (double)levels->d[i]);
            return false;
        }
    }
    return true;
}

static void check_case(struct levels *levels, const struct level_case *x)
{
    bool is_same = true;
    for (int32_t i = 0; i < levels->num_ops && is_same; i++) {
        float *d = i == 0 ? levels->expected : levels->d;
        memset(d, 0xff, (size_t)x->num_rows * (size_t)x->num_cols * sizeof(float));
        run_case(levels, x, levels->ops[i], d);
        is_same = i == 0 || compare(levels, x, i);
    }
    levels->num_passed += is_same;
    levels->num_failed += !is_same;
}

/* With as many rows as MAX_PRODUCTS allows. */
static void check_shape(struct levels *levels, enum dtype dtype, int32_t width, int32_t num_cols)
{
    for (int i = 0; i < 2; i++) {
        fill_weights(levels->weights[i], dtype, (int64_t)width * num_cols);
    }
    for (int32_t i = 0; i < COUNT_OF(rows_list); i++) {
        struct level_case x = {"linear", dtype, rows_list[i], width, num_cols};
        if ((int64_t)x.num_rows * width * num_cols <= MAX_PRODUCTS) {
            check_case(levels, &x);
            x.op = "gemm_swiglu";
            check_case(levels, &x);
        }
    }
}

static void *allocate(size_t count, size_t element_bytes)
{
    void *memory = aligned_alloc(64, (count * element_bytes + 63) / 64 * 64);
    if (memory == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return memory;
}

/* One more: threads in turns, for each of these the ways. */
static void create_ops(struct levels *levels, uint32_t features)
{
    struct imbrex_error err;
    int32_t idx = levels->num_ops++;
    if (ops_create(level_threads[idx / FEW_WAY_COUNT % 2], features, levels->scratch,
                   levels->scratch_bytes, &levels->ops[idx], &err) != IMBREX_STATUS_OK) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    ops_set_few_way(levels->ops[idx], (enum few_way)(idx % FEW_WAY_COUNT));
}

static void destroy_ops(struct levels *levels)
{
    while (levels->num_ops > 0) {
        ops_destroy(levels->ops[--levels->num_ops]);
    }
}

static void create(struct levels *levels)
{
    levels->scratch_bytes = ops_scratch_token_bytes(MAX_WIDTH) * MAX_FEW_ROWS;
    levels->scratch = allocate(levels->scratch_bytes, 1);
    for (int32_t level = 0; level < NUM_LEVELS; level++) {
        for (int32_t i = 0; i < LEVEL_OPS && has_features(level_features[level]); i++) {
            create_ops(levels, level_features[level]);
        }
    }
    levels->row = allocate(MAX_WIDTH, sizeof(float));
    levels->a = allocate((size_t)MAX_ROWS * MAX_WIDTH, sizeof(float));
    levels->bias = allocate(MAX_COLS, sizeof(float));
    levels->residual = allocate((size_t)MAX_ROWS * MAX_COLS, sizeof(float));
    levels->d = allocate((size_t)MAX_ROWS * MAX_COLS, sizeof(float));
    levels->expected = allocate((size_t)MAX_ROWS * MAX_COLS, sizeof(float));
    for (int i = 0; i < 2; i++) {
        levels->weights[i] = allocate((size_t)MAX_WIDTH * MAX_COLS, sizeof(float));
    }
    fill_floats(levels->a, (int64_t)MAX_ROWS * MAX_WIDTH);
    fill_floats(levels->bias, MAX_COLS);
    fill_floats(levels->residual, (int64_t)MAX_ROWS * MAX_COLS);
}

static void destroy(struct levels *levels)
{
    destroy_ops(levels);
    free(levels->scratch);
    free(levels->row);
    free(levels->a);
    free(levels->bias);
    free(levels->residual);
    free(levels->d);
    free(levels->expected);
    free(levels->weights[0]);
    free(levels->weights[1]);
}

/* Columns quantised one by one from random numbers. */
static void fill_quantised(struct levels *levels, enum dtype dtype, int32_t width, int32_t num_cols)
{
    const int64_t row_bytes = (int64_t)dtype_row_bytes(dtype, width);
    for (int i = 0; i < 2; i++) {
        for (int32_t col = 0; col < num_cols; col++) {
            fill_floats(levels->row, width);
            quant_quantize_row(dtype, levels->row, levels->weights[i] + col * row_bytes, width);
        }
    }
}

/* The ways to read quantised weights on the path that has several, any number of threads. */
static void check_quantised(struct levels *levels)
{
    if (!has_features(quant_features)) {
        return;
    }
    destroy_ops(levels);
    while (levels->num_ops < LEVEL_OPS) {
        create_ops(levels, quant_features);
    }
    for (int32_t dtype = 0; dtype < COUNT_OF(quant_dtypes); dtype++) {
        for (int32_t i = 0; i < COUNT_OF(quant_widths) * COUNT_OF(cols_list); i++) {
            int32_t width = quant_widths[i / COUNT_OF(cols_list)];
            int32_t num_cols = cols_list[i % COUNT_OF(cols_list)];
            if (width % dtype_block_elements(quant_dtypes[dtype]) != 0) {
                continue;
            }
            fill_quantised(levels, quant_dtypes[dtype], width, num_cols);
            for (int32_t rows = 0; rows < COUNT_OF(quant_rows_list); rows++) {
                struct level_case x = {"linear", quant_dtypes[dtype], quant_rows_list[rows], width,
                                       num_cols};
                check_case(levels, &x);
                x.op = "gemm_swiglu";
                check_case(levels, &x);
            }
        }
    }
}

int main(void)
{
    struct levels levels = {.num_ops = 0};
    if (!has_features(level_features[0])) {
        printf("skipped: this CPU or its system has no AVX2 and FMA\n");
        return EXIT_SKIPPED;
    }
    create(&levels);
    for (int32_t dtype = 0; dtype < COUNT_OF(dtypes); dtype++) {
        for (int32_t width = 0; width < COUNT_OF(widths); width++) {
            for (int32_t cols = 0; cols < COUNT_OF(cols_list); cols++) {
                check_shape(&levels, dtypes[dtype], widths[width], cols_list[cols]);
            }
        }
    }
    check_quantised(&levels);
    destroy(&levels);
    printf("%" PRId64 " passed, %" PRId64 " failed\n", levels.num_passed, levels.num_failed);
    return levels.num_failed == 0 ? 0 : 1;
}
