/* SPDX-License-Identifier: Apache-2.0 */
/* Threads meet at one word, the gate: a count of the workers inside the loop, an open bit, and the
 * loop's epoch.
 *
 *   caller   writes the loop, opens the gate (epoch + 1), takes pieces, closes it, waits for the
 *            count to be 0
 *   worker   enters an open gate of an epoch it has not seen, takes pieces, leaves
 *
 * Workers that come late find the gate closed and stay out, so a loop never waits for a thread that
 * the system has not scheduled: with more threads than CPUs the caller still gets on. The loop's
 * fields are only written while the gate is closed with nobody inside. */
#include "base/thread_pool.h"

#include <assert.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"

/* So that `next` past the end cannot overflow. */
#define MAX_COUNT (INT64_MAX / (2 * THREAD_POOL_MAX_THREADS))
/* Longer than a piece of an op with few rows, some 30 us, for which a thread may have to wait: with
 * 20 us a token of Qwen2.5-0.5B slept 30 times on two threads, and waking a halted CPU of a virtual
 * machine takes as long again. */
#define SPIN_NS 100000
#define PAUSES_PER_CLOCK_READ 32      /* about 1 us: a pause is 20 to 150 cycles */
#define WORKER_STACK_BYTES (1u << 20) /* kernels keep tiles of up to some 32 KiB on the stack */

#define GATE_COUNT_MASK 0x7fffu
#define GATE_OPEN 0x8000u
#define GATE_EPOCH_ONE 0x10000u
#define GATE_EPOCH_MASK 0xffff0000u

struct worker {
    struct thread_pool *pool;
    pthread_t thread;
    int32_t thread_idx;
};

struct thread_pool {
    int32_t num_threads;
    int64_t spin_ns; /* 0 with more threads than CPUs: spinning would only keep others from work */

    thread_pool_fn *fn;
    void *arg;
    int64_t count, grain;

    /* Each on a cache line of its own: `next` is hammered by those who work, `gate` is watched by
     * those who wait. */
    unsigned char padding_before_next[64];
    _Atomic int64_t next; /* first index nobody has taken */
    unsigned char padding_before_gate[64];
    _Atomic uint32_t gate;           /* futex of the workers */
    _Atomic uint32_t caller_waiting; /* futex of the caller: 1 while it sleeps or is about to */
    _Atomic int32_t num_sleeping;    /* workers that sleep or are about to */
    _Atomic bool stopping;
    unsigned char padding_after_gate[64];

    struct worker workers[]; /* [num_threads - 1] */
};

/* Sleeps while *word == expected. May also return early: callers check their condition again. */
static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, (uint32_t *)(void *)word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int32_t max_threads)
{
    syscall(SYS_futex, (uint32_t *)(void *)word, FUTEX_WAKE_PRIVATE, max_threads, NULL, NULL, 0);
}

static void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

/* When a wait that spins must end: the clock is read only now and then. */
struct spin {
    int64_t end_ns;
    int32_t num_pauses;
};

/* Whether to look again; false once the time is used up. */
static bool spin_more(struct spin *spin, int64_t spin_ns)
{
    if (spin_ns == 0) {
        return false;
    }
    if (spin->num_pauses % PAUSES_PER_CLOCK_READ == 0) {
        int64_t now_ns = clock_now_ns();
        if (spin->num_pauses == 0) {
            spin->end_ns = now_ns + spin_ns;
        } else if (now_ns >= spin->end_ns) {
            return false;
        }
    }
    spin->num_pauses++;
    cpu_pause();
    return true;
}

static void run_pieces(struct thread_pool *pool, int32_t thread_idx)
{
    int64_t count = pool->count, grain = pool->grain;
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&pool->next, grain, memory_order_relaxed);
        if (begin >= count) {
            return;
        }
        int64_t end = count - begin < grain ? count : begin + grain;
        pool->fn(pool->arg, begin, end, thread_idx);
    }
}

/* A gate value this worker can enter, given the epoch of the loop it was in last. */
static bool gate_is_new(uint32_t gate, uint32_t seen_epoch)
{
    return (gate & GATE_OPEN) != 0 && (gate & GATE_EPOCH_MASK) != seen_epoch;
}

/* Waits for a gate to enter; false when the pool stops. The epoch has 16 bits: a worker that sleeps
 * through exactly 65,536 loops takes the next one for its last and stays out of that one loop. */
static bool worker_wait(struct thread_pool *pool, uint32_t seen_epoch)
{
    struct spin spin = {0};
    for (;;) {
        uint32_t gate = atomic_load_explicit(&pool->gate, memory_order_relaxed);
        if (gate_is_new(gate, seen_epoch)) {
            return true;
        }
        if (atomic_load_explicit(&pool->stopping, memory_order_acquire)) {
            return false;
        }
        if (!spin_more(&spin, pool->spin_ns)) {
            break;
        }
    }
    /* Sequentially consistent, as in wake_workers: either the caller sees this worker counted, or
     * this worker sees the caller's gate. */
    atomic_fetch_add(&pool->num_sleeping, 1);
    bool entered = true;
    for (;;) {
        uint32_t gate = atomic_load(&pool->gate);
        if (gate_is_new(gate, seen_epoch)) {
            break;
        }
        if (atomic_load(&pool->stopping)) {
            entered = false;
            break;
        }
        futex_wait(&pool->gate, gate);
    }
    atomic_fetch_sub(&pool->num_sleeping, 1);
    return entered;
}

static void *worker_main(void *arg)
{
    struct worker *worker = arg;
    struct thread_pool *pool = worker->pool;
    uint32_t seen_epoch = 0;
    while (worker_wait(pool, seen_epoch)) {
        uint32_t gate = atomic_load_explicit(&pool->gate, memory_order_relaxed);
        /* Acquire: the caller's writes of the loop become visible with its open gate. */
        if (!gate_is_new(gate, seen_epoch) ||
            !atomic_compare_exchange_strong_explicit(&pool->gate, &gate, gate + 1,
                                                     memory_order_acquire, memory_order_relaxed)) {
            continue;
        }
        seen_epoch = gate & GATE_EPOCH_MASK;
        run_pieces(pool, worker->thread_idx);
        gate = atomic_fetch_sub(&pool->gate, 1) - 1;
        if ((gate & (GATE_OPEN | GATE_COUNT_MASK)) == 0 &&
            atomic_exchange(&pool->caller_waiting, 0) == 1) {
            futex_wake(&pool->caller_waiting, 1);
        }
    }
    return NULL;
}

static void wake_workers(struct thread_pool *pool, int64_t max_workers)
{
    int32_t num_sleeping = atomic_load(&pool->num_sleeping);
    if (num_sleeping > 0) {
        futex_wake(&pool->gate, max_workers < num_sleeping ? (int32_t)max_workers : num_sleeping);
    }
}

static void stop_workers(struct thread_pool *pool, int32_t num_workers)
{
    atomic_store(&pool->stopping, true);
    /* A changed gate, still closed: a worker about to sleep on the old value does not. */
    atomic_fetch_add(&pool->gate, GATE_EPOCH_ONE);
    futex_wake(&pool->gate, INT_MAX);
    for (int32_t worker_idx = 0; worker_idx < num_workers; worker_idx++) {
        pthread_join(pool->workers[worker_idx].thread, NULL);
    }
}

/* Starts the workers with all signals blocked but those that a thread's own fault raises, so that a
 * program's handlers run on its own threads. Returns the number started and the last error. */
static int32_t start_workers(struct thread_pool *pool, int32_t num_workers, int *error_code)
{
    static const int fault_signals[] = {SIGBUS,  SIGSEGV, SIGFPE, SIGILL,
                                        SIGTRAP, SIGABRT, SIGSYS, SIGPROF};
    pthread_attr_t attr;
    sigset_t blocked, previous;
    *error_code = pthread_attr_init(&attr);
    if (*error_code != 0) {
        return 0;
    }
    pthread_attr_setstacksize(&attr, WORKER_STACK_BYTES);
    sigfillset(&blocked);
    for (size_t idx = 0; idx < sizeof(fault_signals) / sizeof(fault_signals[0]); idx++) {
        sigdelset(&blocked, fault_signals[idx]);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &previous);
    int32_t num_started = 0;
    while (num_started < num_workers) {
        struct worker *worker = &pool->workers[num_started];
        worker->pool = pool;
        worker->thread_idx = num_started + 1;
        *error_code = pthread_create(&worker->thread, &attr, worker_main, worker);
        if (*error_code != 0) {
            break;
        }
        num_started++;
    }
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
    pthread_attr_destroy(&attr);
    return num_started;
}

enum imbrex_status thread_pool_create(int32_t num_threads, struct thread_pool **pool,
                                      struct imbrex_error *err)
{
    if (num_threads < 1 || num_threads > THREAD_POOL_MAX_THREADS) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "num_threads",
                               ": expected a number in [1, %d], found %d", THREAD_POOL_MAX_THREADS,
                               (int)num_threads);
    }
    int32_t num_workers = num_threads - 1;
    size_t num_bytes = sizeof(struct thread_pool) + (size_t)num_workers * sizeof(struct worker);
    struct thread_pool *created = calloc(1, num_bytes);
    if (created == NULL) {
        return error_out_of_memory(err, "thread pool", num_bytes);
    }
    created->num_threads = num_threads;
    created->spin_ns = num_threads > thread_pool_num_cpus() ? 0 : SPIN_NS;
    atomic_init(&created->next, 0);
    atomic_init(&created->gate, 0);
    atomic_init(&created->caller_waiting, 0);
    atomic_init(&created->num_sleeping, 0);
    atomic_init(&created->stopping, false);
    if (num_workers > 0) {
        int error_code = 0;
        int32_t num_started = start_workers(created, num_workers, &error_code);
        if (num_started < num_workers) {
            stop_workers(created, num_started);
            free(created);
            return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                             "thread pool: thread %d of %d could not be started: %s",
                             (int)(num_started + 2), (int)num_threads,
                             system_error_text(error_code));
        }
    }
    *pool = created;
    return IMBREX_STATUS_OK;
}

void thread_pool_destroy(struct thread_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    stop_workers(pool, pool->num_threads - 1);
    free(pool);
}

int32_t thread_pool_num_threads(const struct thread_pool *pool)
{
    return pool->num_threads;
}

/* Until every worker has left the closed gate. */
static void wait_for_workers(struct thread_pool *pool)
{
    struct spin spin = {0};
    /* Acquire, with the release of each worker's leave: their results are visible afterwards. */
    while ((atomic_load_explicit(&pool->gate, memory_order_acquire) & GATE_COUNT_MASK) != 0) {
        if (spin_more(&spin, pool->spin_ns)) {
            continue;
        }
        atomic_store(&pool->caller_waiting, 1);
        if ((atomic_load(&pool->gate) & GATE_COUNT_MASK) != 0) {
            futex_wait(&pool->caller_waiting, 1);
        }
        atomic_store(&pool->caller_waiting, 0);
    }
}

void thread_pool_run(struct thread_pool *pool, int64_t count, int64_t grain, thread_pool_fn *fn,
                     void *arg)
{
    assert(grain >= 1 && count <= MAX_COUNT);
    if (count <= 0) {
        return;
    }
    if (pool->num_threads == 1 || count <= grain) {
        fn(arg, 0, count, 0);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->count = count;
    pool->grain = grain;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_fetch_add(&pool->gate, GATE_EPOCH_ONE + GATE_OPEN);
    wake_workers(pool, (count - 1) / grain);
    run_pieces(pool, 0);
    atomic_fetch_sub(&pool->gate, GATE_OPEN);
    wait_for_workers(pool);
}

int32_t thread_pool_num_cpus(void)
{
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
        return CPU_COUNT(&cpus);
    }
    /* More CPUs than cpu_set_t has bits. */
    long num_online = sysconf(_SC_NPROCESSORS_ONLN);
    return num_online < 1                         ? 1
           : num_online > THREAD_POOL_MAX_THREADS ? THREAD_POOL_MAX_THREADS
                                                  : (int32_t)num_online;
}
