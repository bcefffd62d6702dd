/* SPDX-License-Identifier: Apache-2.0 */
/* The remote tier over a server that is well, in a process of its own, with every single request
 * for memory and threads refused in turn: the right status, nothing leaked, no block that is not
 * the one that was put there. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "fault.h"
#include "kv/kv_pool.h"
#include "kv/kv_remote.h"
#include "kv/kv_remote_link.h"
#include "tests/kv/fake_redis.h"

enum { BLOCK_BYTES = 4096, NUM_BLOCKS = 6, WAIT_NS = 1000000, MAX_WAITS = 10000 };

static pid_t start_server(int32_t *port)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        int32_t found = fake_redis_port(fake_redis_create());
        (void)!write(fds[1], &found, sizeof(found));
        for (;;) {
            (void)pause();
        }
    }
    assert_int_equal(read(fds[0], port, sizeof(*port)), sizeof(*port));
    (void)close(fds[0]);
    (void)close(fds[1]);
    return pid;
}

static void make_block(int32_t i, struct kv_key *key, int32_t ids[KV_BLOCK_SIZE],
                       unsigned char contents[BLOCK_BYTES])
{
    *key = (struct kv_key){{(uint64_t)i + 1, 7, 8, 9}};
    for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
        ids[j] = i + j;
    }
    for (int32_t j = 0; j < BLOCK_BYTES; j++) {
        contents[j] = (unsigned char)(i * 31 + j * 7 + j / 256);
    }
}

static bool await(struct kv_remote *remote)
{
    struct kv_remote_result result;
    for (int32_t i = 0; i < MAX_WAITS; i++) {
        if (kv_remote_poll(remote, &result)) {
            return result.is_good;
        }
        kv_remote_wait(remote, WAIT_NS);
    }
    fail_msg("%s", "a job has no end");
    return false;
}

/* All blocks go there and come back. num_got: those that did. */
static enum imbrex_status live(int32_t port, int32_t *num_got)
{
    const struct kv_remote_url url = {
        .host = "127.0.0.1", .port = port, .zstd_level = IMBREX_HAS_ZSTD};
    const struct kv_remote_options options = {.url = &url,
                                              .owner = {{1, 2, 3, 4}},
                                              .block_bytes = BLOCK_BYTES,
                                              .min_retry_ms = 1,
                                              .max_retry_ms = 1};
    struct kv_remote *remote = NULL;
    struct imbrex_error err = {0};
    *num_got = 0;
    enum imbrex_status status = kv_remote_open(&options, &remote, &err);
    if (status != IMBREX_STATUS_OK) {
        assert_true(strlen(err.message) > 0);
        return status;
    }
    for (int32_t i = 0; i < 2 * NUM_BLOCKS; i++) {
        struct kv_key key;
        int32_t ids[KV_BLOCK_SIZE];
        unsigned char contents[BLOCK_BYTES], found[BLOCK_BYTES];
        make_block(i % NUM_BLOCKS, &key, ids, contents);
        if (i < NUM_BLOCKS) {
            if (kv_remote_put(remote, &key, ids, contents, i)) {
                (void)await(remote);
            }
        } else if (kv_remote_get(remote, &key, ids, found, i) && await(remote)) {
            assert_memory_equal(found, contents, BLOCK_BYTES);
            (*num_got)++;
        }
        assert_true(kv_remote_check(remote));
    }
    kv_remote_close(remote);
    return IMBREX_STATUS_OK;
}

/* Catches: an allocation that is not checked or not freed, in the tier or in what it asks of
 * hiredis and zstd; a job that has no end because there was no memory for its command. */
static void test_memory(void **state)
{
    (void)state;
    int32_t port, num_got;
    if (!kv_remote_link_is_built()) {
        skip();
    }
    pid_t server = start_server(&port);
    for (int64_t num_failed = 0;; num_failed++) {
        int64_t num_live = fault_num_live();
        fault_arm(FAULT_MEMORY, num_failed + 1, false);
        enum imbrex_status status = live(port, &num_got);
        bool has_failed = fault_disarm();
        if (fault_num_live() != num_live) {
            fail_msg("call %ld failing: %ld allocations leaked", (long)num_failed + 1,
                     (long)(fault_num_live() - num_live));
        }
        if (!has_failed) {
            assert_int_equal(status, IMBREX_STATUS_OK);
            assert_int_equal(num_got, NUM_BLOCKS);
            assert_true(num_failed >= 20);
            break;
        }
        assert_true(status == IMBREX_STATUS_OK || status == IMBREX_STATUS_OUT_OF_MEMORY);
        assert_int_equal(live(port, &num_got), IMBREX_STATUS_OK);
        assert_int_equal(num_got, NUM_BLOCKS);
    }
    assert_int_equal(kill(server, SIGKILL), 0);
    assert_int_equal(waitpid(server, NULL, 0), server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests_name("fault_kv_remote", tests, NULL, NULL);
}
