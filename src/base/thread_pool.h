/* SPDX-License-Identifier: Apache-2.0 */
/* A persistent pool for parallel loops. Workers spin for at most 100 us after a loop, then sleep on
 * a futex, so that the loops of a decode step follow each other without a system call and an idle
 * engine uses no CPU. */
#ifndef IMBREX_BASE_THREAD_POOL_H
#define IMBREX_BASE_THREAD_POOL_H

#include <stdint.h>

#include "base/status.h"

struct thread_pool;

/* Far below what the pool can count, far above any machine. */
#define THREAD_POOL_MAX_THREADS 1024

/* Works on [begin, end) of the loop. thread_idx in [0, num_threads) is unique among the calls that
 * run at the same time, for per-thread scratch. */
typedef void thread_pool_fn(void *arg, int64_t begin, int64_t end, int32_t thread_idx);

/* num_threads in [1, THREAD_POOL_MAX_THREADS] counts the thread that calls thread_pool_run, which
 * takes part. */
enum imbrex_status thread_pool_create(int32_t num_threads, struct thread_pool **pool,
                                      struct imbrex_error *err);
/* No loop may be running. NULL does nothing. */
void thread_pool_destroy(struct thread_pool *pool);
int32_t thread_pool_num_threads(const struct thread_pool *pool);

/* Calls fn over disjoint pieces that cover [0, count), each but the last a multiple of `grain` (>=
 * 1) long, and returns when all are done. Piece edges and their order are not fixed: results may
 * not depend on them. A loop of one piece runs on the calling thread alone. One loop at a time per
 * pool; fn may not call thread_pool_run on the same pool. */
void thread_pool_run(struct thread_pool *pool, int64_t count, int64_t grain, thread_pool_fn *fn,
                     void *arg);

/* CPUs that the calling thread may run on, in [1, THREAD_POOL_MAX_THREADS]. */
int32_t thread_pool_num_cpus(void);

#endif
