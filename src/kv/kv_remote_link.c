/* SPDX-License-Identifier: Apache-2.0 */
/* hiredis writes commands as bytes and reads answers from them. The socket is opened, read and
 * written here: hiredis aborts where it has no memory for a connection (0.14, alloc.c) and lets a
 * server that is gone raise SIGPIPE; and so what an answer may take is limited while it arrives,
 * and a block goes from the receive buffer to its place without another copy. */
#include "kv/kv_remote_link.h"

#include <assert.h>
#include <errno.h>
#include <hiredis/hiredis.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RECEIVE_BYTES ((size_t)256 << 10)
/* One call of work leaves the thread to others after so much. */
#define MAX_RECEIVED_AT_ONCE ((size_t)8 << 20)

#if HIREDIS_MAJOR >= 1
typedef size_t array_length;
#else
typedef int array_length;
#endif

struct kv_remote_link {
    struct kv_remote_link_options options;
    enum kv_remote_link_state state;
    int fd; /* -1: none */
    struct addrinfo *addresses;
    const struct addrinfo *next_address; /* to be tried if this one fails */
    redisReader *reader;                 /* NULL: none */
    redisReplyObjectFunctions functions;
    unsigned char *received; /* [RECEIVE_BYTES] */
    char *unsent;            /* [first_unsent, num_unsent) of max_unsent bytes */
    size_t first_unsent, num_unsent, max_unsent;
    int32_t num_greetings; /* answers to come before it is UP */
    int64_t num_due;       /* answers to come */
    int64_t since_ns;      /* of the wait for what is due: its beginning or the last answer */
    int64_t now_ns;
    bool is_answered;  /* something in the last feed was an answer */
    bool is_explained; /* why the last feed ends the link is in failure */
    bool is_hung_up;   /* the server closed it */
    bool is_overrun;   /* an answer was longer than any may be */
    char failure[KV_REMOTE_FAILURE_BYTES];
};

/* ---- down ------------------------------------------------------------------------------------ */

void kv_remote_link_note(struct kv_remote_link *link, const char *why, const char *bytes,
                         size_t num_bytes)
{
    size_t room = sizeof(link->failure) - 1, length = strlen(why);
    length = length < room ? length : room;
    memcpy(link->failure, why, length);
    for (size_t i = 0; i < num_bytes && length < room; i++) {
        bool is_plain = bytes[i] >= ' ' && bytes[i] <= '~';
        link->failure[length] = is_plain ? bytes[i] : '?';
        length++;
    }
    link->failure[length] = '\0';
    link->is_explained = true;
}

static void close_socket(struct kv_remote_link *link)
{
    if (link->fd >= 0) {
        (void)close(link->fd);
        link->fd = -1;
    }
}

static void close_link(struct kv_remote_link *link)
{
    close_socket(link);
    if (link->addresses != NULL) {
        freeaddrinfo(link->addresses);
        link->addresses = NULL;
    }
    if (link->reader != NULL) {
        redisReaderFree(link->reader);
        link->reader = NULL;
    }
    link->state = KV_REMOTE_LINK_DOWN;
    link->first_unsent = 0;
    link->num_unsent = 0;
    link->num_greetings = 0;
    link->num_due = 0;
}

void kv_remote_link_drop(struct kv_remote_link *link, const char *why)
{
    kv_remote_link_note(link, why, NULL, 0);
    close_link(link);
}

static void drop_for_system(struct kv_remote_link *link, const char *what, int error)
{
    const char *text = system_error_text(error);
    kv_remote_link_note(link, what, text, strlen(text));
    close_link(link);
}

/* ---- answers --------------------------------------------------------------------------------- */

/* An error answer to the greeting ends the link; its text says why. */
static bool take_greeting(struct kv_remote_link *link, const struct kv_remote_answer *answer)
{
    if (answer->kind != KV_REMOTE_ANSWER_STATUS) {
        bool is_error = answer->kind == KV_REMOTE_ANSWER_ERROR;
        kv_remote_link_note(link, is_error ? "the server says: " : "it is no Redis server",
                            is_error ? answer->bytes : NULL, is_error ? answer->num_bytes : 0);
        return false;
    }
    link->num_greetings--;
    if (link->num_greetings == 0) {
        link->state = KV_REMOTE_LINK_UP;
    }
    return true;
}

/* The object that hiredis passes around is the link itself; NULL ends the link. */
static void *take_answer(const redisReadTask *task, const struct kv_remote_answer *answer)
{
    struct kv_remote_link *link = task->privdata;
    if (task->parent != NULL || link->num_due == 0) {
        kv_remote_link_note(link, "an answer came that nothing had asked for", NULL, 0);
        return NULL;
    }
    link->num_due--;
    link->is_answered = true;
    if (link->num_greetings > 0) {
        return take_greeting(link, answer) ? link : NULL;
    }
    bool is_good = link->options.on_answer(link->options.user, answer);
    link->is_explained = false;
    if (!is_good) {
        kv_remote_link_note(link, "an answer came that no command has", NULL, 0);
        return NULL;
    }
    return link;
}

static void *take_bytes(const redisReadTask *task, char *bytes, size_t num_bytes)
{
    struct kv_remote_answer answer = {.bytes = bytes, .num_bytes = num_bytes};
    answer.kind = task->type == REDIS_REPLY_ERROR    ? KV_REMOTE_ANSWER_ERROR
                  : task->type == REDIS_REPLY_STATUS ? KV_REMOTE_ANSWER_STATUS
                                                     : KV_REMOTE_ANSWER_BYTES;
    return take_answer(task, &answer);
}

static void *take_number(const redisReadTask *task, long long number)
{
    return take_answer(
        task, &(struct kv_remote_answer){.kind = KV_REMOTE_ANSWER_NUMBER, .number = number});
}

static void *take_nil(const redisReadTask *task)
{
    return take_answer(task, &(struct kv_remote_answer){.kind = KV_REMOTE_ANSWER_NIL});
}

/* No command has one for an answer; refused before anything is allocated for it. */
static void *refuse_array(const redisReadTask *task, array_length num_elements)
{
    (void)num_elements;
    kv_remote_link_note(task->privdata, "an answer came that no command has", NULL, 0);
    return NULL;
}

static void forget_object(void *object)
{
    (void)object;
}

/* Gives hiredis what came. False: the link is to go, and says why. */
static bool parse(struct kv_remote_link *link, size_t num_received)
{
    redisReader *reader = link->reader;
    void *object;
    link->is_explained = false;
    link->is_answered = false;
    if (redisReaderFeed(reader, (const char *)link->received, num_received) != REDIS_OK) {
        kv_remote_link_note(link, "no memory for what it sent", NULL, 0);
        return false;
    }
    do {
        object = NULL;
        if (redisReaderGetReply(reader, &object) != REDIS_OK) {
            if (!link->is_explained) {
                kv_remote_link_note(link, "no RESP: ", reader->errstr, strlen(reader->errstr));
            }
            return false;
        }
    } while (object == link);
    if (object != NULL) { /* a type that hiredis knows and no function was given for */
        kv_remote_link_note(link, "an answer came that no command has", NULL, 0);
        return false;
    }
    if (reader->len - reader->pos > link->options.max_answer_bytes + RECEIVE_BYTES) {
        kv_remote_link_note(link, "an answer is longer than a block can be", NULL, 0);
        link->is_overrun = true;
        return false;
    }
    if (link->is_answered) {
        link->since_ns = link->now_ns;
    }
    return true;
}

static void receive(struct kv_remote_link *link)
{
    for (size_t num_total = 0; num_total < MAX_RECEIVED_AT_ONCE;) {
        ssize_t num_received = recv(link->fd, link->received, RECEIVE_BYTES, 0);
        if (num_received < 0 && errno == EINTR) {
            continue;
        }
        if (num_received < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                drop_for_system(link, "it cannot be read: ", errno);
            }
            return;
        }
        if (num_received == 0) {
            kv_remote_link_drop(link, "the server closed the connection");
            link->is_hung_up = true;
            return;
        }
        if (!parse(link, (size_t)num_received)) {
            close_link(link);
            return;
        }
        num_total += (size_t)num_received;
        if ((size_t)num_received < RECEIVE_BYTES) {
            return;
        }
    }
}

/* ---- commands -------------------------------------------------------------------------------- */

static void send_some(struct kv_remote_link *link)
{
    while (link->first_unsent < link->num_unsent) {
        ssize_t num_sent = send(link->fd, link->unsent + link->first_unsent,
                                link->num_unsent - link->first_unsent, MSG_NOSIGNAL);
        if (num_sent < 0 && errno == EINTR) {
            continue;
        }
        if (num_sent < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                drop_for_system(link, "it cannot be written: ", errno);
            }
            return;
        }
        link->first_unsent += (size_t)num_sent;
    }
    link->first_unsent = 0;
    link->num_unsent = 0;
}

static bool append(struct kv_remote_link *link, const char *bytes, size_t num_bytes)
{
    if (link->first_unsent > 0) {
        link->num_unsent -= link->first_unsent;
        memmove(link->unsent, link->unsent + link->first_unsent, link->num_unsent);
        link->first_unsent = 0;
    }
    if (num_bytes > link->max_unsent - link->num_unsent) {
        size_t max_unsent = link->num_unsent + num_bytes;
        max_unsent += max_unsent / 2;
        char *grown = realloc(link->unsent, max_unsent);
        if (grown == NULL) {
            return false;
        }
        link->unsent = grown;
        link->max_unsent = max_unsent;
    }
    memcpy(link->unsent + link->num_unsent, bytes, num_bytes);
    link->num_unsent += num_bytes;
    return true;
}

void kv_remote_link_send(struct kv_remote_link *link, const struct kv_remote_part *parts,
                         int32_t num_parts, int64_t now_ns)
{
    const char *texts[KV_REMOTE_MAX_PARTS];
    size_t lengths[KV_REMOTE_MAX_PARTS];
    char *command = NULL;
    assert(num_parts <= KV_REMOTE_MAX_PARTS && link->reader != NULL);
    for (int32_t i = 0; i < num_parts; i++) {
        texts[i] = parts[i].bytes;
        lengths[i] = parts[i].num_bytes;
    }
    int64_t num_bytes = (int64_t)redisFormatCommandArgv(&command, num_parts, texts, lengths);
    bool is_good = num_bytes > 0 && append(link, command, (size_t)num_bytes);
    if (num_bytes > 0) {
        redisFreeCommand(command);
    }
    if (!is_good) {
        kv_remote_link_drop(link, "no memory for a command");
        return;
    }
    if (link->num_due == 0) {
        link->since_ns = now_ns;
    }
    link->num_due++;
}

size_t kv_remote_link_num_unsent(const struct kv_remote_link *link)
{
    return link->num_unsent - link->first_unsent;
}

/* ---- connect --------------------------------------------------------------------------------- */

static struct kv_remote_part text_part(const char *text)
{
    return (struct kv_remote_part){.bytes = text, .num_bytes = strlen(text)};
}

/* AUTH and SELECT if the address has them; PING finds a server that answers errors to all. */
static void greet(struct kv_remote_link *link)
{
    const struct kv_remote_url *url = link->options.url;
    char database[16];
    link->state = KV_REMOTE_LINK_GREETING;
    if (url->password[0] != '\0') {
        struct kv_remote_part parts[3] = {text_part("AUTH")};
        int32_t num_parts = 1;
        if (url->user[0] != '\0') {
            parts[num_parts++] = text_part(url->user);
        }
        parts[num_parts++] = text_part(url->password);
        link->num_greetings++;
        kv_remote_link_send(link, parts, num_parts, link->now_ns);
    }
    if (link->state == KV_REMOTE_LINK_GREETING && url->database != 0) {
        (void)snprintf(database, sizeof(database), "%" PRId32, url->database);
        const struct kv_remote_part parts[] = {text_part("SELECT"), text_part(database)};
        link->num_greetings++;
        kv_remote_link_send(link, parts, 2, link->now_ns);
    }
    if (link->state == KV_REMOTE_LINK_GREETING) {
        const struct kv_remote_part ping = text_part("PING");
        link->num_greetings++;
        kv_remote_link_send(link, &ping, 1, link->now_ns);
    }
}

static bool begin_connect(struct kv_remote_link *link, const struct addrinfo *address)
{
    const int one = 1;
    link->fd = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (link->fd < 0) {
        return false;
    }
    /* Commands are small and somebody waits for each. */
    (void)setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return connect(link->fd, address->ai_addr, address->ai_addrlen) == 0 || errno == EINPROGRESS;
}

/* The next of the host's addresses; DOWN if there is none left. error: of the one before. */
static void try_next_address(struct kv_remote_link *link, int error)
{
    while (link->next_address != NULL) {
        const struct addrinfo *address = link->next_address;
        link->next_address = address->ai_next;
        close_socket(link);
        if (begin_connect(link, address)) {
            link->state = KV_REMOTE_LINK_CONNECTING;
            return;
        }
        error = errno;
    }
    drop_for_system(link, "", error);
}

void kv_remote_link_begin(struct kv_remote_link *link, int64_t now_ns)
{
    const struct kv_remote_url *url = link->options.url;
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    char port[16];
    assert(link->state == KV_REMOTE_LINK_DOWN);
    link->now_ns = now_ns;
    link->since_ns = now_ns;
    link->is_hung_up = false;
    link->is_overrun = false;
    link->reader = redisReaderCreateWithFunctions(&link->functions);
    if (link->reader == NULL) {
        kv_remote_link_drop(link, "no memory for a connection");
        return;
    }
    link->reader->privdata = link;
    link->reader->maxbuf = 0; /* its buffer is as long as an answer, and stays */
    (void)snprintf(port, sizeof(port), "%" PRId32, url->port);
    int failure = getaddrinfo(url->host, port, &hints, &link->addresses);
    if (failure != 0) {
        link->addresses = NULL;
        kv_remote_link_drop(link, gai_strerror(failure));
        return;
    }
    link->next_address = link->addresses;
    try_next_address(link, 0);
}

static void end_connect(struct kv_remote_link *link)
{
    int error = 0;
    socklen_t length = sizeof(error);
    if (getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) {
        error = errno;
    }
    if (error != 0) {
        try_next_address(link, error);
        return;
    }
    greet(link);
}

/* ---- work ------------------------------------------------------------------------------------ */

int kv_remote_link_fd(const struct kv_remote_link *link, short *events)
{
    *events = POLLIN;
    if (link->state == KV_REMOTE_LINK_CONNECTING) {
        *events = POLLOUT;
    } else if (link->num_unsent > 0) {
        *events = POLLIN | POLLOUT;
    }
    return link->fd;
}

int64_t kv_remote_link_deadline_ns(const struct kv_remote_link *link)
{
    switch (link->state) {
    case KV_REMOTE_LINK_CONNECTING:
    case KV_REMOTE_LINK_GREETING:
        return link->since_ns + link->options.connect_timeout_ns;
    case KV_REMOTE_LINK_UP:
        return link->num_due > 0 ? link->since_ns + link->options.answer_timeout_ns : INT64_MAX;
    case KV_REMOTE_LINK_DOWN:
        break;
    }
    return INT64_MAX;
}

void kv_remote_link_work(struct kv_remote_link *link, short revents, int64_t now_ns)
{
    char why[64];
    link->now_ns = now_ns;
    if (link->state == KV_REMOTE_LINK_CONNECTING && revents != 0) {
        end_connect(link);
    } else if (link->state != KV_REMOTE_LINK_DOWN && (revents & ~POLLOUT) != 0) {
        receive(link);
    }
    if (link->state == KV_REMOTE_LINK_GREETING || link->state == KV_REMOTE_LINK_UP) {
        send_some(link);
    }
    if (now_ns >= kv_remote_link_deadline_ns(link)) {
        bool is_up = link->state == KV_REMOTE_LINK_UP;
        int64_t timeout_ns =
            is_up ? link->options.answer_timeout_ns : link->options.connect_timeout_ns;
        (void)snprintf(why, sizeof(why), "no answer for %" PRId64 " ms", timeout_ns / 1000000);
        kv_remote_link_drop(link, why);
    }
}

enum kv_remote_link_state kv_remote_link_state(const struct kv_remote_link *link)
{
    return link->state;
}

bool kv_remote_link_is_hung_up(const struct kv_remote_link *link)
{
    return link->is_hung_up;
}

bool kv_remote_link_is_overrun(const struct kv_remote_link *link)
{
    return link->is_overrun;
}

const char *kv_remote_link_failure(const struct kv_remote_link *link)
{
    return link->failure;
}

/* ---- create and destroy ---------------------------------------------------------------------- */

bool kv_remote_link_is_built(void)
{
    return true;
}

enum imbrex_status kv_remote_link_create(const struct kv_remote_link_options *options,
                                         struct kv_remote_link **link, struct imbrex_error *err)
{
    struct kv_remote_link *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the remote tier's connection", sizeof(*created));
    }
    created->options = *options;
    created->fd = -1;
    created->functions.createString = take_bytes;
    created->functions.createArray = refuse_array;
    created->functions.createInteger = take_number;
    created->functions.createNil = take_nil;
    created->functions.freeObject = forget_object;
    created->received = malloc(RECEIVE_BYTES);
    if (created->received == NULL) {
        kv_remote_link_destroy(created);
        return error_out_of_memory(err, "the remote tier's connection", RECEIVE_BYTES);
    }
    *link = created;
    return IMBREX_STATUS_OK;
}

void kv_remote_link_destroy(struct kv_remote_link *link)
{
    if (link == NULL) {
        return;
    }
    close_link(link);
    free(link->received);
    free(link->unsent);
    free(link);
}
