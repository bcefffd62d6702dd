/* SPDX-License-Identifier: Apache-2.0 */
/* A server that speaks as much of Redis as the remote tier does, on a thread of this process, and
 * does wrong what it is told to do wrong. */
#ifndef IMBREX_TESTS_FAKE_REDIS_H
#define IMBREX_TESTS_FAKE_REDIS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum fake_redis_fault {
    FAKE_REDIS_WELL = 0,
    FAKE_REDIS_SILENT,        /* takes commands, answers none from then on */
    FAKE_REDIS_HANG_UP,       /* closes the connection instead of an answer */
    FAKE_REDIS_HALF,          /* closes it within an answer */
    FAKE_REDIS_GARBAGE,       /* bytes that are no RESP */
    FAKE_REDIS_WRONG_TYPE,    /* an answer of another command */
    FAKE_REDIS_ARRAY,         /* one that says it has a thousand million members */
    FAKE_REDIS_ENDLESS,       /* a value of a gigabyte begins */
    FAKE_REDIS_TWICE,         /* one answer too many */
    FAKE_REDIS_OTHER_VALUE,   /* of GET: the value of another key */
    FAKE_REDIS_CUT_VALUE,     /* of GET: the value without its end */
    FAKE_REDIS_FLIP_VALUE,    /* of GET: one bit is another */
    FAKE_REDIS_EMPTY_VALUE,   /* of GET: none, but a string */
    FAKE_REDIS_GONE,          /* of GET: nil */
    FAKE_REDIS_OUT_OF_MEMORY, /* of SET: -OOM */
    FAKE_REDIS_ERROR,         /* an error to every command, `error` */
    FAKE_REDIS_NUM_FAULTS,
};

struct fake_redis;

/* Listens on a free port of 127.0.0.1. */
struct fake_redis *fake_redis_create(void);
void fake_redis_destroy(struct fake_redis *redis);
int32_t fake_redis_port(const struct fake_redis *redis);

/* From now on each `every`-th command of those that move blocks is treated so. */
void fake_redis_set_fault(struct fake_redis *redis, enum fake_redis_fault fault, int32_t every);
/* The text of FAKE_REDIS_ERROR; greeted: PING, AUTH and SELECT get it too. */
void fake_redis_set_error(struct fake_redis *redis, const char *error, bool greeted);
/* Breaks all connections; takes no new ones until it goes on. Keeps what it has if it keeps. */
void fake_redis_stop(struct fake_redis *redis, bool keeps);
void fake_redis_go_on(struct fake_redis *redis);

/* Commands by their first letter: STR'L'EN, 'G'ET, 'S'ET, 'A'UTH, 'P'ING; connections: 'C'. */
int32_t fake_redis_count(struct fake_redis *redis, char letter);
/* Of the last command with that letter: its parts, one space between. */
void fake_redis_last(struct fake_redis *redis, char letter, char *text, size_t text_bytes);
int32_t fake_redis_num_values(struct fake_redis *redis);

/* Puts something else under all keys: so many zeros, or a list. */
void fake_redis_spoil(struct fake_redis *redis, size_t num_bytes);
void fake_redis_spoil_with_lists(struct fake_redis *redis);

#endif
