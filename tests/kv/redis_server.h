/* SPDX-License-Identifier: Apache-2.0 */
/* Debian's redis-server as a child of a test, on a free port of 127.0.0.1, with nothing on disk. */
#ifndef IMBREX_TESTS_REDIS_SERVER_H
#define IMBREX_TESTS_REDIS_SERVER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct redis_server {
    pid_t pid;
    int32_t port;
};

/* Whether there is one; a test without it is skipped. */
bool redis_server_is_there(void);
/* password: NULL: none; max_memory: such as "2mb", NULL: no limit. It answers when this returns. */
void redis_server_start(struct redis_server *server, const char *password, const char *max_memory);
/* On the port that it had. */
void redis_server_restart(struct redis_server *server);
/* SIGKILL. */
void redis_server_kill(struct redis_server *server);
/* SIGSTOP and SIGCONT. */
void redis_server_freeze(const struct redis_server *server, bool is_frozen);

#endif
