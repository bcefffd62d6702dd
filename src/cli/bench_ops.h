/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench ops: its settings, which cli/bench_ops.c reads, and what measures, which lies beside
 * the peers in bench/cuda, and in bench/cpu. */
#ifndef IMBREX_CLI_BENCH_OPS_H
#define IMBREX_CLI_BENCH_OPS_H

#include "cli/options.h"
#include "imbrex_ops.h"

/* Ops of a layer, as the CPU has them; a GPU has gemm_swiglu and gemm. */
enum bench_op {
    BENCH_OP_GEMM_SWIGLU = IMBREX_KERNEL_OP_GEMM_SWIGLU,
    BENCH_OP_GEMM = IMBREX_KERNEL_OP_GEMM,
    BENCH_OP_EMBEDDING = 100,
    BENCH_OP_RMSNORM,
    BENCH_OP_QKV_PROJ,
    BENCH_OP_ROPE_KV,
    BENCH_OP_ATTENTION,
    BENCH_OP_O_PROJ,
    BENCH_OP_DOWN_PROJ,
    BENCH_OP_LM_HEAD,
};

enum bench_plans {
    BENCH_PLANS_CHOSEN,    /* the library's choice, and the cost model's where that is another */
    BENCH_PLANS_SCHEDULES, /* and the best of each schedule, by the cost model */
    BENCH_PLANS_ALL,       /* and every variant that is not hopeless, in each cluster and walk */
};

/* The rule of slices (imbrex_slice_width), of gemm_swiglu. */
enum bench_baselines {
    BENCH_BASELINES_NONE = 0,
    BENCH_BASELINES_HEURISTIC = 1, /* on one stream */
    BENCH_BASELINES_STREAMS = 2,   /* over several */
    BENCH_BASELINES_BOTH = 3,
};
#define BENCH_MAX_STREAMS 16

enum bench_weights { BENCH_WEIGHTS_GATE_UP, BENCH_WEIGHTS_UP_GATE, BENCH_WEIGHTS_SEPARATE };

enum bench_clock {
    BENCH_CLOCK_WARM,      /* one cell after the other */
    BENCH_CLOCK_BURST,     /* each pair after a rest and a call, at most 10 ms long */
    BENCH_CLOCK_SUSTAINED, /* after three seconds of work */
};

struct bench_ops_settings {
    const char *device, *shapes, *rows, *dtypes, *cublaslt, *output, *activations, *tuned, *trace;
    struct option_integer threads, cpu;
    struct option_integer op, plans, weights, clock, num_pairs, group_m, baselines, num_streams;
    struct option_real replay_ms, rest_ms, energy_ms, near;
    struct option_integer rounding, interleave; /* enum imbrex_rounding; rows */
    bool numerics, no_overlap, no_roofs, ways, portable, bias, hidden_share;
};

/* How gate and up become one result. */
struct bench_gating {
    const char *name; /* static storage */
    struct imbrex_gating gating;
};

#define BENCH_MAX_GATINGS 8
#define BENCH_MAX_SHAPES 32
#define BENCH_MAX_ROWS 32
#define BENCH_MAX_DTYPES 16

/* A model; of "HxI", its MLP alone: the other sizes are 0. */
struct bench_shape {
    char name[32];
    int32_t hidden_size, intermediate_size;
    int32_t num_heads, num_kv_heads, head_dim, vocab_size;
};

/* What the lists in the settings say. */
struct bench_ops_cells {
    int32_t device_idx;
    struct bench_shape shapes[BENCH_MAX_SHAPES];
    int num_shapes;
    int32_t rows[BENCH_MAX_ROWS]; /* M */
    int num_rows;
    char dtypes[BENCH_MAX_DTYPES][16];
    int num_dtypes;
    struct bench_gating gatings[BENCH_MAX_GATINGS];
    int num_gatings;
};

#define BENCH_MAX_SIDE (1 << 24) /* of a matrix */

/* An exit code. Only in programs that were built with CUDA. */
int bench_ops_cuda(const struct bench_ops_settings *settings, const struct bench_ops_cells *cells);

/* The kernels behind the CPU engine's ops, of which imbrex_ops.h says nothing: bench/cpu is linked
 * with the library, and this is what it shows. An exit code. */
IMBREX_API int bench_ops_cpu(const struct bench_ops_settings *settings,
                             const struct bench_ops_cells *cells);
/* Whether --dtype may name it. */
IMBREX_API bool bench_dtype_is_known(const char *name);
/* What a word of --shapes means, in at most BENCH_MAX_SHAPES of `shapes`: qwen2.5, one of its
 * models, or HxI. The number of shapes; 0: it is none of these. */
int bench_shapes_of_word(const char *word, struct bench_shape shapes[BENCH_MAX_SHAPES]);
/* "cuda" or "cuda:N"; NULL: "cuda". False for any other name. */
bool bench_parse_gpu(const char *name, int32_t *device_idx);
/* "gemm_swiglu": as --op has it. */
const char *bench_op_name(enum bench_op op);

#endif
