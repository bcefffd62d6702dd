/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kv/redis_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/test.h"

enum { MAX_TRIES = 1000, TRY_US = 20000 };

bool redis_server_is_there(void)
{
    return system("command -v redis-server >/dev/null 2>&1") == 0;
}

static int connect_to(int32_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

/* One that nobody has just now. */
static int32_t find_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof(address);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &length), 0);
    (void)close(fd);
    return ntohs(address.sin_port);
}

static void await(const struct redis_server *server)
{
    for (int32_t i = 0; i < MAX_TRIES; i++) {
        char answer[8];
        int fd = connect_to(server->port);
        assert_int_equal(waitpid(server->pid, NULL, WNOHANG), 0);
        if (fd >= 0) {
            bool is_there = send(fd, "PING\r\n", 6, MSG_NOSIGNAL) == 6 &&
                            recv(fd, answer, sizeof(answer), 0) > 0;
            (void)close(fd);
            if (is_there) {
                return;
            }
        }
        (void)usleep(TRY_US);
    }
    fail_msg("redis-server on port %d does not answer", server->port);
}

static void start(struct redis_server *server, const char *password, const char *max_memory)
{
    char port[16];
    (void)snprintf(port, sizeof(port), "%d", (int)server->port);
    server->pid = fork();
    assert_true(server->pid >= 0);
    if (server->pid == 0) {
        int null_fd = open("/dev/null", O_RDWR);
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)dup2(null_fd, STDOUT_FILENO);
        (void)dup2(null_fd, STDERR_FILENO);
        (void)execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1",
                     "--save", "", "--appendonly", "no", "--dir", TEST_BUILD_DIR "/tests",
                     "--maxmemory", max_memory != NULL ? max_memory : "0", "--requirepass",
                     password != NULL ? password : "", (char *)NULL);
        _exit(127);
    }
    await(server);
}

void redis_server_start(struct redis_server *server, const char *password, const char *max_memory)
{
    *server = (struct redis_server){.port = find_port()};
    start(server, password, max_memory);
}

void redis_server_restart(struct redis_server *server)
{
    start(server, NULL, NULL);
}

void redis_server_kill(struct redis_server *server)
{
    assert_int_equal(kill(server->pid, SIGKILL), 0);
    assert_int_equal(waitpid(server->pid, NULL, 0), server->pid);
    server->pid = 0;
}

void redis_server_freeze(const struct redis_server *server, bool is_frozen)
{
    assert_int_equal(kill(server->pid, is_frozen ? SIGSTOP : SIGCONT), 0);
}
