/* SPDX-License-Identifier: Apache-2.0 */
/* One op on the shapes of a model: its memory, its calls, and the proof of a result. */
#ifndef IMBREX_BENCH_CPU_CPU_CELL_H
#define IMBREX_BENCH_CPU_CPU_CELL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli/bench_ops.h"
#include "ops/ops.h"

struct cpu_cell {
    enum bench_op op;
    const struct bench_shape *shape;
    enum dtype dtype;                  /* of the weights; F32 where there are none */
    int32_t max_rows;                  /* that there is room for */
    int32_t num_rows;                  /* M: tokens of a call */
    int32_t context;                   /* attention: keys of each sequence that decodes */
    int32_t in_features, out_features; /* K and N of products; widths of a row of a and d else */

    /* Copies that calls take turns in: a layer's weights, or its keys and values, come from memory,
     * because the other layers' were read since. */
    unsigned char *weights; /* [num_copies] x copy_bytes; gate and up, or q, k and v, in one */
    size_t copy_bytes, row_bytes;
    int32_t num_copies;

    float *a, *d;      /* [max_rows, in_features], [max_rows, out_features] */
    float *vector;     /* [max(in_features, out_features)]: biases, weights of a norm */
    float *products;   /* [2, max_rows, intermediate_size]: of the unfused pair; else NULL */
    struct kv_view kv; /* its layers are the copies */
    int32_t *positions, *seq_idx, *slots, *token_ids; /* [max_rows] */
    int32_t *block_tables;                            /* [sequences, max_blocks] */
    int32_t max_blocks;
    float *cos_sin; /* [max_rows or context, head_dim] */
};

/* Whether it has a matrix of weights, whose type matters. */
bool cpu_op_has_weights(enum bench_op op);
/* Whether a call reads what only memory has: the weights, or the keys and values of a context. The
 * others work on rows that the op before them has left in the caches, here as in a model. */
bool cpu_op_reads_memory(enum bench_op op);

/* NULL, or why there is no such cell: in static storage. */
const char *cpu_cell_refusal(enum bench_op op, const struct bench_shape *shape, enum dtype dtype);
/* Allocates and fills all of it. Returns an exit code; release in any case. */
int cpu_cell_init(struct cpu_cell *cell, enum bench_op op, const struct bench_shape *shape,
                  enum dtype dtype, int32_t max_rows);
void cpu_cell_release(struct cpu_cell *cell);
/* Tokens of the calls that follow, at most max_rows. */
void cpu_cell_set_rows(struct cpu_cell *cell, int32_t num_rows);

/* Bytes that the cell will take. */
size_t cpu_cell_bytes(enum bench_op op, const struct bench_shape *shape, enum dtype dtype,
                      int32_t max_rows);

/* Of one call: of products, and of what has to be read and written once. */
double cpu_cell_flops(const struct cpu_cell *cell);
double cpu_cell_num_bytes(const struct cpu_cell *cell);

/* One call. Unfused, for gemm_swiglu: both products into memory, then their activation. */
void cpu_cell_call(struct cpu_cell *cell, struct ops *ops, bool is_unfused, int32_t copy_idx);

/* Calls, then compares rows and columns at the beginning, in the middle and at the end with the
 * reference; *error is the largest difference, relative to the largest result. False if a result
 * was not written. */
bool cpu_cell_check(struct cpu_cell *cell, struct ops *ops, struct ops *reference, bool is_unfused,
                    double *error);

/* d = silu(gate) * up, over `count` elements. */
void silu_product(const float *gate, const float *up, float *d, int64_t count);
void silu_product_avx2(const float *gate, const float *up, float *d, int64_t count);

#endif
