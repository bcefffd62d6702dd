/* SPDX-License-Identifier: Apache-2.0 */
/* What ops that live outside of ops.c need of it. */
#ifndef IMBREX_OPS_OPS_LOOP_H
#define IMBREX_OPS_OPS_LOOP_H

#include "base/thread_pool.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/ops.h"

const struct cpu_kernels *ops_kernels(const struct ops *ops);

/* Calls fn over pieces of [0, count), on one thread alone if `count` items of this many flops are
 * not worth sharing. */
void ops_run_loop(struct ops *ops, thread_pool_fn *fn, void *arg, int64_t count, double item_flops);

/* Reads weights for few rows in this way from now on, for tests and measurements. With
 * FEW_WAY_COUNT, as at the beginning, each shape finds its own in its first calls (few_ways.h). */
void ops_set_few_way(struct ops *ops, enum few_way way);

#endif
