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
#include "kv_block.h"
#include "tests/kv/fake_redis.h"

enum { NUM_BLOCKS = 6, WAIT_NS = 1000000, MAX_WAITS = 10000 };

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

/* All blocks go there and come back. port: of the server. */
static enum imbrex_status live(void *port, bool is_again, bool *is_whole)
{
    int32_t num_got = 0;
    (void)is_again;
    const struct kv_remote_url url = {
        .host = "127.0.0.1", .port = *(const int32_t *)port, .zstd_level = IMBREX_HAS_ZSTD};
    const struct kv_remote_options options = {.url = &url,
                                              .owner = {{1, 2, 3, 4}},
                                              .block_bytes = BLOCK_BYTES,
                                              .min_retry_ms = 1,
                                              .max_retry_ms = 1};
    struct kv_remote *remote = NULL;
    struct imbrex_error err = {0};
    *is_whole = false;
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
            num_got++;
        }
        assert_true(kv_remote_check(remote));
    }
    kv_remote_close(remote);
    *is_whole = num_got == NUM_BLOCKS;
    return IMBREX_STATUS_OK;
}

/* Catches: an allocation that is not checked or not freed, in the tier or in what it asks of
 * hiredis and zstd; a job that has no end because there was no memory for its command. */
static void test_memory(void **state)
{
    (void)state;
    int32_t port;
    if (!kv_remote_link_is_built()) {
        skip();
    }
    pid_t server = start_server(&port);
    assert_true(fault_each_call_of_kept(FAULT_MEMORY, false, IMBREX_STATUS_OUT_OF_MEMORY, live,
                                        &port) >= 20);
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
