/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex tune: what is to be measured, which cli/command_tune.c reads, and what measures, which
 * lies in bench/cuda. */
#ifndef IMBREX_CLI_TUNE_H
#define IMBREX_CLI_TUNE_H

#include "cli/bench_ops.h"
#include "cli/options.h"

enum tune_ops { TUNE_OPS_BOTH, TUNE_OPS_GEMM_SWIGLU, TUNE_OPS_GEMM };

struct tune_settings {
    const char *device, *shapes, *rows, *output;
    struct option_integer ops;  /* enum tune_ops */
    struct option_real seconds; /* 0: no limit */
    struct option_real near;    /* as bench_ops_settings */
    bool again, dry_run;
};

/* One product. Its sides are those of a model's MLP, so gemm has hidden_size columns. */
struct tune_item {
    enum imbrex_kernel_op op;
    struct bench_shape shape;
    int32_t m;
};

#define TUNE_MAX_ITEMS 8192
struct tune_list {
    struct tune_item *items; /* [capacity] */
    int count, capacity;
};

/* Measures what the table has not, and writes it after each product. An exit code. Only in
 * programs that were built with CUDA. */
int tune_cuda(const struct tune_settings *settings, int32_t device_idx,
              const struct tune_list *list);

#endif
