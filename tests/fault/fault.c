/* SPDX-License-Identifier: Apache-2.0 */
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static atomic_int_fast64_t num_calls[2];
static atomic_int_fast64_t num_live;
static atomic_int_fast64_t num_armed_calls;
static atomic_int_fast64_t fail_at; /* 0: disarmed */
static atomic_int armed_kind;
static atomic_bool is_lasting;
static atomic_bool has_failed;

void *__real_malloc(size_t num_bytes);
void *__real_calloc(size_t count, size_t num_bytes);
void *__real_realloc(void *memory, size_t num_bytes);
void __real_free(void *memory);
void *__real_mmap(void *address, size_t num_bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *address, size_t num_bytes);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __real_open(const char *path, int flags, ...);
ssize_t __real_read(int fd, void *buffer, size_t num_bytes);

void *__wrap_malloc(size_t num_bytes);
void *__wrap_calloc(size_t count, size_t num_bytes);
void *__wrap_realloc(void *memory, size_t num_bytes);
void __wrap_free(void *memory);
void *__wrap_mmap(void *address, size_t num_bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *address, size_t num_bytes);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument);
int __wrap_open(const char *path, int flags, ...);
ssize_t __wrap_read(int fd, void *buffer, size_t num_bytes);

void fault_arm(enum fault_kind kind, int64_t fail_at_call, bool lasting)
{
    has_failed = false;
    num_armed_calls = 0;
    armed_kind = kind;
    is_lasting = lasting;
    fail_at = fail_at_call;
}

bool fault_disarm(void)
{
    fail_at = 0;
    return has_failed;
}

int64_t fault_num_calls(enum fault_kind kind)
{
    return num_calls[kind];
}

int64_t fault_num_live(void)
{
    return num_live;
}

int64_t fault_each_call(enum fault_kind kind, bool lasting, enum imbrex_status expected,
                        fault_life *life, void *arg)
{
    for (int64_t num_failed = 0;; num_failed++) {
        int64_t num_live_before = fault_num_live();
        fault_arm(kind, num_failed + 1, lasting);
        enum imbrex_status status = life(arg);
        bool is_refused = fault_disarm();
        int64_t num_leaked = fault_num_live() - num_live_before;
        enum imbrex_status wanted = is_refused ? expected : IMBREX_STATUS_OK;
        if (num_leaked != 0 || status != wanted) {
            fail_msg("call %ld failing: expected %s, found %s, %ld allocations leaked",
                     (long)num_failed + 1, imbrex_status_name(wanted), imbrex_status_name(status),
                     (long)num_leaked);
        }
        if (!is_refused) {
            return num_failed;
        }
    }
}

int64_t fault_each_call_of_kept(enum fault_kind kind, bool must_end, enum imbrex_status expected,
                                fault_kept_life *life, void *arg)
{
    for (int64_t num_failed = 0;; num_failed++) {
        bool is_whole = false;
        int64_t num_live_before = fault_num_live();
        fault_arm(kind, num_failed + 1, false);
        enum imbrex_status status = life(arg, false, &is_whole);
        bool is_refused = fault_disarm();
        if (fault_num_live() != num_live_before) {
            fail_msg("call %ld failing: %ld allocations leaked", (long)num_failed + 1,
                     (long)(fault_num_live() - num_live_before));
        }
        if (!is_refused) {
            assert_int_equal(status, IMBREX_STATUS_OK);
            assert_true(is_whole);
            return num_failed;
        }
        if (must_end || status != IMBREX_STATUS_OK) {
            assert_int_equal(status, expected);
        }
        assert_int_equal(life(arg, true, &is_whole), IMBREX_STATUS_OK);
        assert_true(is_whole);
    }
}

/* Counts a call and says whether it must fail. */
static bool must_fail(enum fault_kind kind)
{
    num_calls[kind]++;
    if (fail_at == 0 || armed_kind != (int)kind) {
        return false;
    }
    int64_t call = ++num_armed_calls;
    if (call == fail_at || (is_lasting && call > fail_at)) {
        has_failed = true;
        return true;
    }
    return false;
}

static void *counted(void *memory)
{
    num_live += memory != NULL;
    return memory;
}

void *__wrap_malloc(size_t num_bytes)
{
    if (must_fail(FAULT_MEMORY)) {
        errno = ENOMEM;
        return NULL;
    }
    return counted(__real_malloc(num_bytes));
}

void *__wrap_calloc(size_t count, size_t num_bytes)
{
    if (must_fail(FAULT_MEMORY)) {
        errno = ENOMEM;
        return NULL;
    }
    return counted(__real_calloc(count, num_bytes));
}

void *__wrap_realloc(void *memory, size_t num_bytes)
{
    if (must_fail(FAULT_MEMORY)) {
        errno = ENOMEM;
        return NULL;
    }
    bool was_live = memory != NULL;
    void *moved = __real_realloc(memory, num_bytes);
    return was_live ? moved : counted(moved);
}

void __wrap_free(void *memory)
{
    num_live -= memory != NULL;
    __real_free(memory);
}

void *__wrap_mmap(void *address, size_t num_bytes, int protection, int flags, int fd, off_t offset)
{
    if (must_fail(FAULT_MEMORY)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void *mapped = __real_mmap(address, num_bytes, protection, flags, fd, offset);
    num_live += mapped != MAP_FAILED;
    return mapped;
}

int __wrap_munmap(void *address, size_t num_bytes)
{
    num_live--;
    return __real_munmap(address, num_bytes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument)
{
    if (must_fail(FAULT_MEMORY)) {
        return EAGAIN;
    }
    return __real_pthread_create(thread, attributes, start, argument);
}

int __wrap_open(const char *path, int flags, ...)
{
    mode_t mode = 0;
    if ((flags & O_CREAT) != 0) {
        va_list arguments;
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
    }
    if (must_fail(FAULT_FILE)) {
        errno = EMFILE;
        return -1;
    }
    return __real_open(path, flags, mode);
}

ssize_t __wrap_read(int fd, void *buffer, size_t num_bytes)
{
    if (must_fail(FAULT_FILE)) {
        errno = EIO;
        return -1;
    }
    return __real_read(fd, buffer, num_bytes);
}
