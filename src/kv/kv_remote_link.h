/* SPDX-License-Identifier: Apache-2.0 */
/* One connection to a Redis or Valkey server, through hiredis: commands go out in order, answers
 * come in order, nothing blocks but the look-up of the host's name. What the server sends is not
 * trusted: an answer that is longer than any may be, nested, or no RESP ends the connection.
 *
 *   DOWN -> CONNECTING -> GREETING (AUTH, SELECT, PING) -> UP -> DOWN
 *
 * One thread uses it. */
#ifndef IMBREX_KV_KV_REMOTE_LINK_H
#define IMBREX_KV_KV_REMOTE_LINK_H

#include <stdbool.h>

#include "kv/kv_remote_url.h"

enum kv_remote_link_state {
    KV_REMOTE_LINK_DOWN = 0,
    KV_REMOTE_LINK_CONNECTING,
    KV_REMOTE_LINK_GREETING,
    KV_REMOTE_LINK_UP,
};

enum kv_remote_answer_kind {
    KV_REMOTE_ANSWER_NIL,
    KV_REMOTE_ANSWER_NUMBER,
    KV_REMOTE_ANSWER_BYTES,
    KV_REMOTE_ANSWER_STATUS,
    KV_REMOTE_ANSWER_ERROR,
};

struct kv_remote_answer {
    enum kv_remote_answer_kind kind;
    long long number;
    const char *bytes; /* [num_bytes] a view, valid during the call */
    size_t num_bytes;
};

struct kv_remote_link_options {
    const struct kv_remote_url *url; /* outlives the link */
    size_t max_answer_bytes;
    int64_t connect_timeout_ns; /* until it is UP */
    int64_t answer_timeout_ns;  /* from one answer to the next while one is due */
    /* The next answer of an UP link. False: no command can have that answer; the link goes DOWN. */
    bool (*on_answer)(void *user, const struct kv_remote_answer *answer);
    void *user;
};

struct kv_remote_part {
    const void *bytes;
    size_t num_bytes;
};

#define KV_REMOTE_MAX_PARTS 5
#define KV_REMOTE_FAILURE_BYTES 160

struct kv_remote_link;

/* Whether this build has hiredis. */
bool kv_remote_link_is_built(void);

/* UNSUPPORTED in a build without hiredis; OUT_OF_MEMORY. */
enum imbrex_status kv_remote_link_create(const struct kv_remote_link_options *options,
                                         struct kv_remote_link **link, struct imbrex_error *err);
/* NULL does nothing. */
void kv_remote_link_destroy(struct kv_remote_link *link);

/* A link that is DOWN begins to connect; if that fails at once, it is DOWN again. */
void kv_remote_link_begin(struct kv_remote_link *link, int64_t now_ns);
/* What a program should poll for; -1: nothing. */
int kv_remote_link_fd(const struct kv_remote_link *link, short *events);
/* When work has to be called though nothing has come; INT64_MAX: never. */
int64_t kv_remote_link_deadline_ns(const struct kv_remote_link *link);
/* Sends and receives what can be, answers included. revents: as poll said. */
void kv_remote_link_work(struct kv_remote_link *link, short revents, int64_t now_ns);
/* A command of an UP link, num_parts <= KV_REMOTE_MAX_PARTS; copied. */
void kv_remote_link_send(struct kv_remote_link *link, const struct kv_remote_part *parts,
                         int32_t num_parts, int64_t now_ns);
/* Bytes of commands that have not gone out. */
size_t kv_remote_link_num_unsent(const struct kv_remote_link *link);
void kv_remote_link_drop(struct kv_remote_link *link, const char *why);

/* Keeps `why` and what the server said, [num_bytes], as the failure: one printable line. */
void kv_remote_link_note(struct kv_remote_link *link, const char *why, const char *bytes,
                         size_t num_bytes);

enum kv_remote_link_state kv_remote_link_state(const struct kv_remote_link *link);
/* Whether it is DOWN because the server closed it. */
bool kv_remote_link_is_hung_up(const struct kv_remote_link *link);
/* Whether it is DOWN because the answer that was due next was longer than any may be. */
bool kv_remote_link_is_overrun(const struct kv_remote_link *link);
/* What was noted last, or why it went DOWN: one line. */
const char *kv_remote_link_failure(const struct kv_remote_link *link);

#endif
