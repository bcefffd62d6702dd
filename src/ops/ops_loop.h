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

#endif
