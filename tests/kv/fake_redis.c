/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kv/fake_redis.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/test.h"

enum { MAX_CLIENTS = 16, MAX_VALUES = 8192, MAX_PARTS = 8, LAST_BYTES = 256 };

struct bytes {
    char *bytes;
    size_t num_bytes, max_bytes;
};

struct client {
    int fd; /* -1: none */
    bool is_silent;
    struct bytes in, out;
};

struct value {
    char key[160];
    struct bytes bytes;
    bool is_list; /* instead */
};

struct part {
    const char *bytes;
    size_t num_bytes;
};

struct fake_redis {
    pthread_mutex_t lock; /* of all below that both threads touch */
    pthread_t thread;
    int listen_fd;
    int wake_fds[2];
    int32_t port;
    bool is_ending, is_stopped, is_greeted_with_error;
    enum fake_redis_fault fault;
    int32_t every, num_moves;
    char error[128];
    int32_t counts[128];
    char last[128][LAST_BYTES];
    struct value *values; /* [MAX_VALUES] */
    int32_t num_values;
    struct client clients[MAX_CLIENTS];
};

/* ---- bytes ----------------------------------------------------------------------------------- */

static void add(struct bytes *to, const void *bytes, size_t num_bytes)
{
    if (to->num_bytes + num_bytes > to->max_bytes) {
        to->max_bytes = 2 * (to->num_bytes + num_bytes);
        to->bytes = realloc(to->bytes, to->max_bytes);
        assert_non_null(to->bytes);
    }
    if (num_bytes > 0) {
        memcpy(to->bytes + to->num_bytes, bytes, num_bytes);
    }
    to->num_bytes += num_bytes;
}

static void add_text(struct bytes *to, const char *text)
{
    add(to, text, strlen(text));
}

static void drop_front(struct bytes *from, size_t num_bytes)
{
    from->num_bytes -= num_bytes;
    memmove(from->bytes, from->bytes + num_bytes, from->num_bytes);
}

static void add_value(struct bytes *to, const char *bytes, size_t num_bytes)
{
    char head[32];
    (void)snprintf(head, sizeof(head), "$%zu\r\n", num_bytes);
    add_text(to, head);
    add(to, bytes, num_bytes);
    add_text(to, "\r\n");
}

/* ---- commands -------------------------------------------------------------------------------- */

static void close_client(struct client *client)
{
    (void)close(client->fd);
    free(client->in.bytes);
    free(client->out.bytes);
    *client = (struct client){.fd = -1};
}

/* By which commands are counted: S is SET's alone. */
static char letter_of(const struct part *command)
{
    static const char strlen_name[] = "STRLEN";
    bool is_strlen = command->num_bytes == strlen(strlen_name) &&
                     memcmp(command->bytes, strlen_name, command->num_bytes) == 0;
    return is_strlen ? 'L' : command->bytes[0];
}

static void add_wrong_type(struct client *client)
{
    add_text(&client->out,
             "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n");
}

static struct value *find(struct fake_redis *redis, const struct part *key)
{
    for (int32_t i = 0; i < redis->num_values; i++) {
        if (strlen(redis->values[i].key) == key->num_bytes &&
            memcmp(redis->values[i].key, key->bytes, key->num_bytes) == 0) {
            return &redis->values[i];
        }
    }
    return NULL;
}

static void set(struct fake_redis *redis, const struct part *parts)
{
    struct value *value = find(redis, &parts[1]);
    if (value == NULL) {
        assert_true(redis->num_values < MAX_VALUES && parts[1].num_bytes < sizeof(value->key));
        value = &redis->values[redis->num_values++];
        memcpy(value->key, parts[1].bytes, parts[1].num_bytes);
        value->key[parts[1].num_bytes] = '\0';
    }
    value->bytes.num_bytes = 0;
    value->is_list = false;
    add(&value->bytes, parts[2].bytes, parts[2].num_bytes);
}

/* The answer to a command of a server that is well. */
static void answer(struct fake_redis *redis, struct client *client, const struct part *parts)
{
    const struct value *value;
    char length[32];
    switch (letter_of(&parts[0])) {
    case 'L':
        value = find(redis, &parts[1]);
        if (value != NULL && value->is_list) {
            add_wrong_type(client);
        } else {
            (void)snprintf(length, sizeof(length), ":%zu\r\n",
                           value != NULL ? value->bytes.num_bytes : 0);
            add_text(&client->out, length);
        }
        break;
    case 'G':
        value = find(redis, &parts[1]);
        if (value != NULL && value->is_list) {
            add_wrong_type(client);
        } else if (value == NULL) {
            add_text(&client->out, "$-1\r\n");
        } else {
            add_value(&client->out, value->bytes.bytes, value->bytes.num_bytes);
        }
        break;
    case 'S':
        if (strncmp(parts[0].bytes, "SET", 3) == 0) {
            set(redis, parts);
        }
        add_text(&client->out, "+OK\r\n");
        break;
    case 'P':
        add_text(&client->out, "+PONG\r\n");
        break;
    default:
        add_text(&client->out, "+OK\r\n");
    }
}

/* The value of a GET, done wrong. False: there is none to do wrong. */
static bool answer_wrong_value(struct fake_redis *redis, struct client *client,
                               const struct part *parts)
{
    struct value *value = find(redis, &parts[1]);
    if (parts[0].bytes[0] != 'G' || value == NULL) {
        return false;
    }
    size_t num_bytes = value->bytes.num_bytes;
    switch (redis->fault) {
    case FAKE_REDIS_OTHER_VALUE:
        value = &redis->values[(value - redis->values + 1) % redis->num_values];
        add_value(&client->out, value->bytes.bytes, value->bytes.num_bytes);
        return redis->num_values > 1;
    case FAKE_REDIS_CUT_VALUE:
        add_value(&client->out, value->bytes.bytes, (size_t)redis->num_moves * 7919 % num_bytes);
        return true;
    case FAKE_REDIS_FLIP_VALUE: {
        size_t at = (size_t)redis->num_moves * 7919 % num_bytes;
        value->bytes.bytes[at] ^= 4;
        add_value(&client->out, value->bytes.bytes, num_bytes);
        value->bytes.bytes[at] ^= 4;
        return true;
    }
    case FAKE_REDIS_EMPTY_VALUE:
        add_value(&client->out, "", 0);
        return true;
    default:
        add_text(&client->out, "$-1\r\n");
        return true;
    }
}

/* False: the connection is closed. */
static bool answer_wrongly(struct fake_redis *redis, struct client *client,
                           const struct part *parts)
{
    char letter = letter_of(&parts[0]);
    size_t num_bytes = client->out.num_bytes;
    switch (redis->fault) {
    case FAKE_REDIS_SILENT:
        client->is_silent = true;
        return true;
    case FAKE_REDIS_HANG_UP:
        return false;
    case FAKE_REDIS_HALF:
        answer(redis, client, parts);
        client->out.num_bytes = num_bytes + (client->out.num_bytes - num_bytes) / 2;
        (void)!send(client->fd, client->out.bytes, client->out.num_bytes, MSG_NOSIGNAL);
        return false;
    case FAKE_REDIS_GARBAGE:
        add_text(&client->out, "HTTP/1.1 400 Bad Request\r\n\r\n");
        return true;
    case FAKE_REDIS_WRONG_TYPE:
        add_text(&client->out, letter == 'L'   ? "$1\r\n1\r\n"
                               : letter == 'G' ? ":1\r\n"
                                               : "$-1\r\n");
        return true;
    case FAKE_REDIS_ARRAY:
        add_text(&client->out, "*1000000000\r\n:1\r\n");
        return true;
    case FAKE_REDIS_ENDLESS: {
        static const char zeros[65536];
        add_text(&client->out, "$1000000000\r\n");
        for (int32_t i = 0; i < 64; i++) {
            add(&client->out, zeros, sizeof(zeros));
        }
        return true;
    }
    case FAKE_REDIS_TWICE:
        answer(redis, client, parts);
        add_text(&client->out, ":1\r\n");
        return true;
    case FAKE_REDIS_OUT_OF_MEMORY:
        if (letter != 'S') {
            answer(redis, client, parts);
        } else {
            add_text(&client->out, "-OOM command not allowed when used memory > 'maxmemory'.\r\n");
        }
        return true;
    case FAKE_REDIS_ERROR:
        add_text(&client->out, redis->error);
        return true;
    default:
        if (!answer_wrong_value(redis, client, parts)) {
            client->out.num_bytes = num_bytes;
            answer(redis, client, parts);
        }
        return true;
    }
}

static void note(struct fake_redis *redis, const struct part *parts, int32_t num_parts)
{
    char letter = letter_of(&parts[0]);

    char *last = redis->last[letter & 127];
    size_t length = 0;
    redis->counts[letter & 127]++;
    for (int32_t i = 0; i < num_parts && length + 2 < LAST_BYTES; i++) {
        /* What is in a value is of no interest. */
        if (letter == 'S' && i == 2) {
            continue;
        }
        length += (size_t)snprintf(last + length, LAST_BYTES - length, "%s%.*s", i > 0 ? " " : "",
                                   (int)parts[i].num_bytes, parts[i].bytes);
    }
}

/* False: the connection is closed. */
static bool run_command(struct fake_redis *redis, struct client *client, const struct part *parts,
                        int32_t num_parts)
{
    char letter = letter_of(&parts[0]);
    bool is_move = letter == 'L' || letter == 'G' || strncmp(parts[0].bytes, "SET", 3) == 0;
    note(redis, parts, num_parts);
    if (client->is_silent) {
        return true;
    }
    if (!is_move) {
        if (redis->is_greeted_with_error) {
            add_text(&client->out, redis->error);
        } else {
            answer(redis, client, parts);
        }
        return true;
    }
    redis->num_moves++;
    if (redis->fault == FAKE_REDIS_WELL || redis->num_moves % redis->every != 0) {
        answer(redis, client, parts);
        return true;
    }
    return answer_wrongly(redis, client, parts);
}

/* A number behind `mark` at *at, moved behind its line. False: it is not all there. */
static bool read_number(const struct bytes *in, size_t *at, char mark, size_t *number)
{
    const char *end = memchr(in->bytes + *at, '\n', in->num_bytes - *at);
    if (end == NULL) {
        return false;
    }
    assert_int_equal(in->bytes[*at], mark);
    *number = (size_t)strtoul(in->bytes + *at + 1, NULL, 10);
    *at = (size_t)(end - in->bytes) + 1;
    return true;
}

/* Runs what is whole. False: the connection is closed. */
static bool run_commands(struct fake_redis *redis, struct client *client)
{
    for (;;) {
        struct part parts[MAX_PARTS] = {{0}};
        size_t at = 0, num_parts = 0;
        if (client->in.num_bytes == 0 || !read_number(&client->in, &at, '*', &num_parts)) {
            return true;
        }
        assert_true(num_parts >= 1 && num_parts <= MAX_PARTS);
        for (size_t i = 0; i < num_parts; i++) {
            if (at >= client->in.num_bytes ||
                !read_number(&client->in, &at, '$', &parts[i].num_bytes) ||
                at + parts[i].num_bytes + 2 > client->in.num_bytes) {
                return true;
            }
            parts[i].bytes = client->in.bytes + at;
            at += parts[i].num_bytes + 2;
        }
        if (!run_command(redis, client, parts, (int32_t)num_parts)) {
            return false;
        }
        drop_front(&client->in, at);
    }
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void serve(struct fake_redis *redis, struct client *client, short revents)
{
    static const size_t room = 65536;
    if ((revents & ~POLLOUT) != 0) {
        add(&client->in, NULL, 0);
        if (client->in.num_bytes + room > client->in.max_bytes) {
            client->in.max_bytes = 2 * (client->in.num_bytes + room);
            client->in.bytes = realloc(client->in.bytes, client->in.max_bytes);
            assert_non_null(client->in.bytes);
        }
        ssize_t num_read =
            recv(client->fd, client->in.bytes + client->in.num_bytes, room, MSG_DONTWAIT);
        if (num_read == 0 || (num_read < 0 && errno != EAGAIN)) {
            close_client(client);
            return;
        }
        client->in.num_bytes += num_read > 0 ? (size_t)num_read : 0;
        if (!run_commands(redis, client)) {
            close_client(client);
            return;
        }
    }
    if (client->out.num_bytes > 0) {
        ssize_t num_sent =
            send(client->fd, client->out.bytes, client->out.num_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (num_sent < 0 && errno != EAGAIN) {
            close_client(client);
            return;
        }
        drop_front(&client->out, num_sent > 0 ? (size_t)num_sent : 0);
    }
}

static void accept_client(struct fake_redis *redis)
{
    int fd = accept(redis->listen_fd, NULL, NULL);
    for (int32_t i = 0; fd >= 0 && i < MAX_CLIENTS; i++) {
        if (redis->clients[i].fd == -1 && !redis->is_stopped) {
            redis->clients[i].fd = fd;
            redis->counts['C']++;
            return;
        }
    }
    if (fd >= 0) {
        (void)close(fd);
    }
}

static void *run(void *arg)
{
    struct fake_redis *redis = arg;
    for (;;) {
        struct pollfd polled[MAX_CLIENTS + 2] = {{.fd = redis->wake_fds[0], .events = POLLIN},
                                                 {.fd = redis->listen_fd, .events = POLLIN}};
        char byte;
        pthread_mutex_lock(&redis->lock);
        for (int32_t i = 0; i < MAX_CLIENTS; i++) {
            polled[2 + i].fd = redis->clients[i].fd;
            polled[2 + i].events =
                (short)(POLLIN | (redis->clients[i].out.num_bytes > 0 ? POLLOUT : 0));
        }
        pthread_mutex_unlock(&redis->lock);
        (void)poll(polled, MAX_CLIENTS + 2, -1);
        pthread_mutex_lock(&redis->lock);
        if (polled[0].revents != 0) {
            (void)!read(redis->wake_fds[0], &byte, 1);
        }
        if (redis->is_ending) {
            pthread_mutex_unlock(&redis->lock);
            return NULL;
        }
        for (int32_t i = 0; i < MAX_CLIENTS; i++) {
            struct client *client = &redis->clients[i];
            if (client->fd != -1 && client->fd == polled[2 + i].fd && polled[2 + i].revents != 0) {
                serve(redis, client, polled[2 + i].revents);
            }
        }
        if (polled[1].revents != 0) {
            accept_client(redis);
        }
        pthread_mutex_unlock(&redis->lock);
    }
}

static void wake(struct fake_redis *redis)
{
    assert_int_equal(write(redis->wake_fds[1], "", 1), 1);
}

/* ---- for tests ------------------------------------------------------------------------------- */

struct fake_redis *fake_redis_create(void)
{
    struct fake_redis *redis = calloc(1, sizeof(*redis));
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof(address);
    assert_non_null(redis);
    redis->values = calloc(MAX_VALUES, sizeof(*redis->values));
    assert_non_null(redis->values);
    for (int32_t i = 0; i < MAX_CLIENTS; i++) {
        redis->clients[i].fd = -1;
    }
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    redis->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(redis->listen_fd >= 0);
    assert_int_equal(bind(redis->listen_fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(redis->listen_fd, MAX_CLIENTS), 0);
    assert_int_equal(getsockname(redis->listen_fd, (struct sockaddr *)&address, &length), 0);
    redis->port = ntohs(address.sin_port);
    assert_int_equal(pipe(redis->wake_fds), 0);
    assert_int_equal(pthread_mutex_init(&redis->lock, NULL), 0);
    assert_int_equal(pthread_create(&redis->thread, NULL, run, redis), 0);
    return redis;
}

static void forget_values(struct fake_redis *redis)
{
    for (int32_t i = 0; i < redis->num_values; i++) {
        free(redis->values[i].bytes.bytes);
        redis->values[i] = (struct value){.is_list = false};
    }
    redis->num_values = 0;
}

void fake_redis_destroy(struct fake_redis *redis)
{
    pthread_mutex_lock(&redis->lock);
    redis->is_ending = true;
    pthread_mutex_unlock(&redis->lock);
    wake(redis);
    pthread_join(redis->thread, NULL);
    for (int32_t i = 0; i < MAX_CLIENTS; i++) {
        if (redis->clients[i].fd != -1) {
            close_client(&redis->clients[i]);
        }
    }
    forget_values(redis);
    (void)close(redis->listen_fd);
    (void)close(redis->wake_fds[0]);
    (void)close(redis->wake_fds[1]);
    pthread_mutex_destroy(&redis->lock);
    free(redis->values);
    free(redis);
}

int32_t fake_redis_port(const struct fake_redis *redis)
{
    return redis->port;
}

void fake_redis_set_fault(struct fake_redis *redis, enum fake_redis_fault fault, int32_t every)
{
    pthread_mutex_lock(&redis->lock);
    redis->fault = fault;
    redis->every = every;
    redis->num_moves = 0;
    pthread_mutex_unlock(&redis->lock);
}

void fake_redis_set_error(struct fake_redis *redis, const char *error, bool greeted)
{
    pthread_mutex_lock(&redis->lock);
    (void)snprintf(redis->error, sizeof(redis->error), "-%s\r\n", error);
    redis->is_greeted_with_error = greeted;
    pthread_mutex_unlock(&redis->lock);
}

void fake_redis_stop(struct fake_redis *redis, bool keeps)
{
    pthread_mutex_lock(&redis->lock);
    redis->is_stopped = true;
    for (int32_t i = 0; i < MAX_CLIENTS; i++) {
        if (redis->clients[i].fd != -1) {
            close_client(&redis->clients[i]);
        }
    }
    if (!keeps) {
        forget_values(redis);
    }
    pthread_mutex_unlock(&redis->lock);
    wake(redis);
}

void fake_redis_go_on(struct fake_redis *redis)
{
    pthread_mutex_lock(&redis->lock);
    redis->is_stopped = false;
    pthread_mutex_unlock(&redis->lock);
}

static void spoil(struct fake_redis *redis, size_t num_bytes, bool is_list)
{
    pthread_mutex_lock(&redis->lock);
    for (int32_t i = 0; i < redis->num_values; i++) {
        struct value *value = &redis->values[i];
        char *zeros = calloc(1, num_bytes + 1);
        assert_non_null(zeros);
        value->is_list = is_list;
        value->bytes.num_bytes = 0;
        add(&value->bytes, zeros, num_bytes);
        free(zeros);
    }
    pthread_mutex_unlock(&redis->lock);
}

void fake_redis_spoil(struct fake_redis *redis, size_t num_bytes)
{
    spoil(redis, num_bytes, false);
}

void fake_redis_spoil_with_lists(struct fake_redis *redis)
{
    spoil(redis, 0, true);
}

int32_t fake_redis_count(struct fake_redis *redis, char letter)
{
    pthread_mutex_lock(&redis->lock);
    int32_t count = redis->counts[(unsigned char)letter & 127];
    pthread_mutex_unlock(&redis->lock);
    return count;
}

void fake_redis_last(struct fake_redis *redis, char letter, char *text, size_t text_bytes)
{
    pthread_mutex_lock(&redis->lock);
    (void)snprintf(text, text_bytes, "%s", redis->last[(unsigned char)letter & 127]);
    pthread_mutex_unlock(&redis->lock);
}

int32_t fake_redis_num_values(struct fake_redis *redis)
{
    pthread_mutex_lock(&redis->lock);
    int32_t num_values = redis->num_values;
    pthread_mutex_unlock(&redis->lock);
    return num_values;
}
