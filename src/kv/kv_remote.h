/* SPDX-License-Identifier: Apache-2.0 */
/* The remote tier: blocks as values (kv_remote_value.h) of a Redis or Valkey server, which several
 * engines may share, moved by one thread over one connection (kv_remote_link.h). One thread uses
 * it; nothing waits for the server but kv_remote_open, kv_remote_close and kv_remote_wait.
 *
 *   look  what is known of a block; what is not known is asked for, and known a little later
 *   put   the block is on its way, unless the server has it
 *   get   the block is on its way; it is the block once poll has said so, garbage before
 *
 * Of what the server has, nobody here has a list: answers are remembered for a while in a table of
 * bounded size. What fails costs the block and nothing else: it counts as not there, and its user
 * computes it again. A server that does not answer, or answers errors only, is left alone for a
 * while, longer each time; until it is UP again nothing is asked for, and nobody waits. */
#ifndef IMBREX_KV_KV_REMOTE_H
#define IMBREX_KV_KV_REMOTE_H

#include "base/log.h"
#include "kv/kv_key.h"
#include "kv/kv_remote_url.h"

/* Under way at once. */
#define KV_REMOTE_MAX_GETS 32
#define KV_REMOTE_MAX_PUTS 32
#define KV_REMOTE_MAX_ASKS 1024

struct kv_remote_options {
    const struct kv_remote_url *url; /* copied */
    /* Of whom the blocks are: differs wherever a block of one would be wrong for the other. */
    struct kv_key owner;
    const unsigned char *secret; /* [32] that values are signed with, copied; NULL: they are not */
    size_t block_bytes;
    int32_t connect_timeout_ms, answer_timeout_ms; /* 0: 1000, 2000 */
    int32_t min_retry_ms, max_retry_ms;            /* after failures; 0: 200, 30000 */
};

enum kv_remote_state {
    KV_REMOTE_ABSENT, /* it is not there, or the server is not */
    KV_REMOTE_ASKED,
    KV_REMOTE_THERE,
};

/* What became of a put or get. */
struct kv_remote_result {
    int32_t tag;
    bool is_get;
    bool is_good;
};

struct kv_remote_metrics {
    uint64_t num_asked;        /* keys */
    uint64_t num_put, num_got; /* blocks that went there, that came back whole */
    uint64_t num_known;        /* puts of what was there already */
    uint64_t num_gone;         /* gets of what had been there */
    uint64_t num_refused;      /* puts not begun: the server is not there, or takes nothing now */
    /* Faults, by blocks. */
    uint64_t num_damaged; /* values under blocks' keys that are not what was put */
    uint64_t num_errors;  /* puts and gets that were answered with an error */
    uint64_t num_dropped; /* puts and gets that were not answered */
    uint64_t num_put_errors, num_put_dropped; /* of these, the puts */
    uint64_t num_failures;                    /* connections that could not be made, or broke */
    uint64_t put_bytes, got_bytes;            /* of values */
    bool is_up;
};

struct kv_remote;

/* kv_remote_url_parse, and UNSUPPORTED in a build without hiredis. */
enum imbrex_status kv_remote_read_url(const char *text, struct kv_remote_url *url,
                                      struct imbrex_error *err);

/* Waits for the first attempt to connect, connect_timeout_ms and the look-up of the name; that it
 * failed is no error. UNSUPPORTED in a build without hiredis, OUT_OF_MEMORY. */
enum imbrex_status kv_remote_open(const struct kv_remote_options *options,
                                  struct kv_remote **remote, struct imbrex_error *err);
/* Gives up what is under way. NULL does nothing. */
void kv_remote_close(struct kv_remote *remote);

/* What is known of the block, which is asked for if nothing is. */
enum kv_remote_state kv_remote_look(struct kv_remote *remote, const struct kv_key *key);

/* Whether the block is known to be there. Nothing is asked. */
bool kv_remote_has(const struct kv_remote *remote, const struct kv_key *key);
/* Whether the server is there and takes blocks, as far as is known. */
bool kv_remote_is_taking(const struct kv_remote *remote);

/* `block` [block_bytes] is the tier's to read, or to write, until poll gives the tag back; tags of
 * puts under way are different, and so are those of gets. token_ids: [KV_BLOCK_SIZE]. False: not
 * taken, too many are under way or the server is not there. */
bool kv_remote_put(struct kv_remote *remote, const struct kv_key *key, const int32_t *token_ids,
                   const void *block, int32_t tag);
bool kv_remote_get(struct kv_remote *remote, const struct kv_key *key, const int32_t *token_ids,
                   void *block, int32_t tag);
/* Whether one more would be taken as far as their number goes. */
bool kv_remote_can_put(const struct kv_remote *remote);
bool kv_remote_can_get(const struct kv_remote *remote);
/* Takes a get back that has not begun: poll will not name it. */
bool kv_remote_cancel_get(struct kv_remote *remote, int32_t tag);

/* The next result; false: there is none yet. */
bool kv_remote_poll(struct kv_remote *remote, struct kv_remote_result *result);
/* Waits for an answer, at most timeout_ns. Poll may still say that there is no result. */
void kv_remote_wait(struct kv_remote *remote, int64_t timeout_ns);
/* That poll has not given back; keys that are asked for. */
int32_t kv_remote_num_puts(const struct kv_remote *remote);
int32_t kv_remote_num_gets(const struct kv_remote *remote);
int32_t kv_remote_num_asks(const struct kv_remote *remote);

void kv_remote_read_metrics(struct kv_remote *remote, struct kv_remote_metrics *metrics);
uint64_t kv_remote_num_faults(const struct kv_remote_metrics *metrics);
/* Tells of faults since the last line, once a minute at most. */
void kv_remote_log_faults(struct kv_remote *remote, const struct log *log, int64_t now_ns);
/* True if the table of answers and the jobs agree. For tests and idle moments. */
bool kv_remote_check(const struct kv_remote *remote);

#endif
