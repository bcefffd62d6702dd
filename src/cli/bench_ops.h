/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench ops: its settings, which cli/bench_ops.c reads, and what measures, which lies beside
 * the peers in bench/cuda. */
#ifndef IMBREX_CLI_BENCH_OPS_H
#define IMBREX_CLI_BENCH_OPS_H

#include "cli/options.h"
#include "imbrex_ops.h"

enum bench_plans {
    BENCH_PLANS_CHOSEN,    /* the library's choice, and the cost model's where that is another */
    BENCH_PLANS_SCHEDULES, /* and the best of each schedule, by the cost model */
    BENCH_PLANS_ALL,       /* and every variant that is not hopeless, in each cluster and walk */
};

enum bench_weights { BENCH_WEIGHTS_GATE_UP, BENCH_WEIGHTS_UP_GATE, BENCH_WEIGHTS_SEPARATE };

enum bench_clock {
    BENCH_CLOCK_WARM,      /* one cell after the other */
    BENCH_CLOCK_BURST,     /* each pair after a second of rest, at most 10 ms long */
    BENCH_CLOCK_SUSTAINED, /* after three seconds of work */
};

struct bench_ops_settings {
    const char *device, *shapes, *rows, *cublaslt, *output;
    struct option_integer op, plans, weights, clock, num_pairs, group_m;
    struct option_real replay_ms, energy_ms, near;
    bool numerics, no_overlap;
};

#define BENCH_MAX_SHAPES 32
#define BENCH_MAX_ROWS 32

/* An MLP of a model. */
struct bench_shape {
    char name[32];
    int32_t hidden_size, intermediate_size;
};

/* What the lists in the settings say. */
struct bench_ops_cells {
    int32_t device_idx;
    struct bench_shape shapes[BENCH_MAX_SHAPES];
    int num_shapes;
    int32_t rows[BENCH_MAX_ROWS]; /* M */
    int num_rows;
};

/* An exit code. Only in programs that were built with CUDA. */
int bench_ops_cuda(const struct bench_ops_settings *settings, const struct bench_ops_cells *cells);

#endif
