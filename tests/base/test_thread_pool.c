/* SPDX-License-Identifier: Apache-2.0 */
#include "base/thread_pool.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define UNDER_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define UNDER_SANITIZER 1
#endif

#define MAX_COUNT 12345
#define MAX_TEST_THREADS 5

/* Asserts must stay on the test's own thread: pieces only count what they see. */
struct marks {
    _Atomic uint8_t visits[MAX_COUNT];
    _Atomic int32_t in_use[MAX_TEST_THREADS];
    _Atomic int32_t num_overlaps, num_bad_pieces, num_bad_threads, num_pieces;
    int64_t count, grain;
    int32_t num_threads;
};

static struct thread_pool *create(int32_t num_threads)
{
    struct thread_pool *pool = NULL;
    struct imbrex_error err = {0};
    assert_int_equal(thread_pool_create(num_threads, &pool, &err), IMBREX_STATUS_OK);
    assert_non_null(pool);
    assert_int_equal(thread_pool_num_threads(pool), num_threads);
    return pool;
}

static void mark_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    struct marks *marks = arg;
    marks->num_pieces++;
    if (thread_idx < 0 || thread_idx >= marks->num_threads) {
        marks->num_bad_threads++;
        return;
    }
    marks->num_overlaps += atomic_exchange(&marks->in_use[thread_idx], 1);
    if (begin < 0 || begin >= end || end > marks->count ||
        (end != marks->count && (end - begin) % marks->grain != 0)) {
        marks->num_bad_pieces++;
        return;
    }
    for (int64_t idx = begin; idx < end; idx++) {
        marks->visits[idx]++;
    }
    marks->in_use[thread_idx] = 0;
}

/* Catches an index left out or done twice, a piece of a wrong length, and two pieces that run at
 * the same time with one thread_idx. */
static void test_thread_pool_covers_exactly_once(void **state)
{
    (void)state;
    static const int32_t threads[] = {1, 2, 5};
    static const int64_t counts[] = {0, 1, 2, 7, 64, 1000, MAX_COUNT};
    static const int64_t grains[] = {1, 3, 64, 1000, 1 << 20};
    static struct marks marks;
    for (size_t thread = 0; thread < 3; thread++) {
        struct thread_pool *pool = create(threads[thread]);
        for (size_t idx = 0; idx < 7 * 5; idx++) {
            memset(&marks, 0, sizeof(marks));
            marks.count = counts[idx % 7];
            marks.grain = grains[idx / 7];
            marks.num_threads = threads[thread];
            thread_pool_run(pool, marks.count, marks.grain, mark_piece, &marks);
            assert_int_equal(marks.num_bad_pieces, 0);
            assert_int_equal(marks.num_bad_threads, 0);
            assert_int_equal(marks.num_overlaps, 0);
            for (int64_t at = 0; at < MAX_COUNT; at++) {
                if (marks.visits[at] != (at < marks.count)) {
                    fail_msg("%d threads, count %d, grain %d: index %d visited %d times",
                             threads[thread], (int)marks.count, (int)marks.grain, (int)at,
                             marks.visits[at]);
                }
            }
        }
        thread_pool_destroy(pool);
    }
}

struct alone {
    pthread_t thread;
    int32_t num_calls, thread_idx;
    int64_t begin, end;
};

static void note_call(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    struct alone *alone = arg;
    alone->thread = pthread_self();
    alone->num_calls++;
    alone->thread_idx = thread_idx;
    alone->begin = begin;
    alone->end = end;
}

/* Catches a small loop that is sent to another thread. */
static void test_thread_pool_one_piece_stays_here(void **state)
{
    (void)state;
    struct thread_pool *pool = create(2);
    for (int64_t count = 1; count <= 64; count++) {
        struct alone alone = {0};
        thread_pool_run(pool, count, 64, note_call, &alone);
        assert_int_equal(alone.num_calls, 1);
        assert_int_equal(alone.thread_idx, 0);
        assert_int_equal(alone.begin, 0);
        assert_int_equal(alone.end, count);
        assert_true(pthread_equal(alone.thread, pthread_self()));
    }
    thread_pool_destroy(pool);
}

struct sums {
    int64_t values[64]; /* plain memory: what makes it visible is the pool */
    int64_t added;
};

static void add_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    struct sums *sums = arg;
    (void)thread_idx;
    for (int64_t idx = begin; idx < end; idx++) {
        sums->values[idx] += sums->added;
    }
}

/* Catches a loop that returns before its pieces are done, a lost or doubled wake-up (it hangs), and
 * under ThreadSanitizer a missing happens-before between caller and workers in either direction. */
static void test_thread_pool_many_tiny_loops(void **state)
{
    (void)state;
    static const int32_t threads[] = {2, 5};
    static const int64_t num_loops[] = {100000, 20000};
    for (size_t thread = 0; thread < 2; thread++) {
        struct thread_pool *pool = create(threads[thread]);
        struct sums sums = {{0}, 0};
        int64_t total = 0;
        for (int64_t loop = 0; loop < num_loops[thread]; loop++) {
            sums.added = loop % 3;
            total += sums.added;
            thread_pool_run(pool, 64, 1 + loop % 63, add_piece, &sums);
            if (sums.values[loop % 64] != total) {
                fail_msg("loop %d: %d instead of %d", (int)loop, (int)sums.values[loop % 64],
                         (int)total);
            }
        }
        for (int64_t idx = 0; idx < 64; idx++) {
            assert_int_equal(sums.values[idx], total);
        }
        thread_pool_destroy(pool);
    }
}

/* Catches a worker that is not told to stop, or is told before it can hear (either hangs), and
 * under AddressSanitizer one that outlives the pool. */
static void test_thread_pool_create_and_destroy(void **state)
{
    (void)state;
    for (int32_t round = 0; round < 1000; round++) {
        struct thread_pool *pool = create(1 + round % 4);
        if (round % 2 == 0) {
            struct sums sums = {{0}, 1};
            thread_pool_run(pool, 64, 4, add_piece, &sums);
            assert_int_equal(sums.values[63], 1);
        }
        thread_pool_destroy(pool);
    }
    thread_pool_destroy(NULL);
}

#define MAX_YIELDS 20000000

struct meeting {
    _Atomic int32_t num_arrived, thread_bits, num_sigint_open, num_sigbus_blocked;
};

/* Waits, not for ever, until both pieces run at the same time. */
static void meet_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    struct meeting *meeting = arg;
    sigset_t blocked;
    (void)begin;
    (void)end;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    if (thread_idx != 0) {
        meeting->num_sigint_open += !sigismember(&blocked, SIGINT);
        meeting->num_sigbus_blocked += sigismember(&blocked, SIGBUS);
    }
    meeting->thread_bits |= 1 << thread_idx;
    meeting->num_arrived++;
    for (int32_t yields = 0; yields < MAX_YIELDS && meeting->num_arrived < 2; yields++) {
        sched_yield();
    }
}

/* Catches a pool whose workers never take part, or no longer do once they have slept; two threads
 * that share a thread_idx; and a worker that would run the program's handler for Ctrl-C, or not run
 * the one for its own bus error. */
static void test_thread_pool_workers_take_part(void **state)
{
    (void)state;
    struct thread_pool *pool = create(2);
    for (int32_t round = 0; round < 100; round++) {
        struct meeting meeting = {0};
        thread_pool_run(pool, 2, 1, meet_piece, &meeting);
        assert_int_equal(meeting.num_arrived, 2);
        assert_int_equal(meeting.thread_bits, 3);
        assert_int_equal(meeting.num_sigint_open, 0);
        assert_int_equal(meeting.num_sigbus_blocked, 0);
    }
    thread_pool_destroy(pool);
}

/* Threads of this process, other than the caller, that are running; *num_threads counts all. */
static int32_t num_running_threads(int32_t *num_threads)
{
    int32_t num_running = 0;
    *num_threads = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *task = readdir(tasks); task != NULL; task = readdir(tasks)) {
        char path[300], stat[512];
        if (task->d_name[0] == '.') {
            continue;
        }
        snprintf(path, sizeof(path), "/proc/self/task/%s/stat", task->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t num_bytes = fd < 0 ? 0 : read(fd, stat, sizeof(stat) - 1);
        if (fd >= 0) {
            close(fd);
        }
        stat[num_bytes < 0 ? 0 : num_bytes] = '\0';
        const char *name_end = strrchr(stat, ')'); /* "id (name) state ..." */
        (*num_threads)++;
        num_running += name_end != NULL && name_end[2] == 'R';
    }
    closedir(tasks);
    return num_running - 1; /* the caller, who reads this */
}

/* Catches workers that spin for ever: after a loop all of them come to rest. */
static void test_thread_pool_idle_workers_sleep(void **state)
{
    (void)state;
    struct thread_pool *pool = create(2);
    struct sums sums = {{0}, 1};
    thread_pool_run(pool, 64, 1, add_piece, &sums);
    int32_t num_threads = 0, num_running = 1;
    for (int32_t look = 0; look < 20000 && num_running > 0; look++) {
        num_running = num_running_threads(&num_threads);
        sched_yield();
    }
    assert_true(num_threads >= 2);
    assert_int_equal(num_running, 0);
    thread_pool_destroy(pool);
}

/* Catches a bad count that is taken or crashes, and an output written on failure. */
static void test_thread_pool_refuses_counts(void **state)
{
    (void)state;
    static const int32_t bad[] = {0, -1, INT32_MIN, 1025, INT32_MAX};
    for (size_t idx = 0; idx < sizeof(bad) / sizeof(bad[0]); idx++) {
        struct thread_pool *pool = (struct thread_pool *)(uintptr_t)1;
        struct imbrex_error err = {0};
        assert_int_equal(thread_pool_create(bad[idx], &pool, &err), IMBREX_STATUS_INVALID_ARGUMENT);
        assert_int_equal((uintptr_t)pool, 1);
        assert_non_null(strstr(err.message, "[1, 1024]"));
    }
}

#ifndef UNDER_SANITIZER
/* In a child with little address space left: 0, or the number of what went wrong. */
static int fail_to_start(void)
{
    struct thread_pool *pool = NULL;
    struct imbrex_error err = {0};
    /* A unit test has less than half of it by now; 1,023 stacks of 1 MiB do not fit. */
    struct rlimit limit = {(rlim_t)512 << 20, (rlim_t)512 << 20};
    if (setrlimit(RLIMIT_AS, &limit) != 0) {
        return 1;
    }
    if (thread_pool_create(1024, &pool, &err) != IMBREX_STATUS_OUT_OF_MEMORY || pool != NULL) {
        return 2;
    }
    if (strstr(err.message, "of 1024") == NULL) {
        return 3;
    }
    int32_t num_threads = 0;
    num_running_threads(&num_threads);
    if (num_threads != 1) {
        return 4;
    }
    return thread_pool_create(2, &pool, &err) == IMBREX_STATUS_OK ? 0 : 5;
}
#endif

/* Catches threads left running, and a leak or a crash, when the system has no more threads. */
static void test_thread_pool_start_fails(void **state)
{
    (void)state;
#ifdef UNDER_SANITIZER
    skip(); /* their shadow memory needs more address space than the limit leaves */
#else
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(fail_to_start());
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
#endif
}

/* Catches a count of the machine's CPUs where the thread may use fewer. */
static void test_thread_pool_counts_allowed_cpus(void **state)
{
    (void)state;
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof(all), &all) != 0) {
        skip(); /* more CPUs than cpu_set_t names */
    }
    assert_int_equal(thread_pool_num_cpus(), CPU_COUNT(&all));
    CPU_ZERO(&one);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &all)) {
        cpu++;
    }
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
    int32_t num_cpus = thread_pool_num_cpus();
    assert_int_equal(sched_setaffinity(0, sizeof(all), &all), 0);
    assert_int_equal(num_cpus, 1);
}

int run_thread_pool_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_thread_pool_covers_exactly_once),
        cmocka_unit_test(test_thread_pool_one_piece_stays_here),
        cmocka_unit_test(test_thread_pool_many_tiny_loops),
        cmocka_unit_test(test_thread_pool_create_and_destroy),
        cmocka_unit_test(test_thread_pool_workers_take_part),
        cmocka_unit_test(test_thread_pool_idle_workers_sleep),
        cmocka_unit_test(test_thread_pool_refuses_counts),
        cmocka_unit_test(test_thread_pool_start_fails),
        cmocka_unit_test(test_thread_pool_counts_allowed_cpus),
    };
    return cmocka_run_group_tests_name("thread_pool", tests, NULL, NULL);
}
