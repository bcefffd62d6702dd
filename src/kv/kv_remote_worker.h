/* SPDX-License-Identifier: Apache-2.0 */
/* The remote tier's thread: it has the connection and does jobs over it, many at once, in an order
 * that serves who waits. One other thread gives jobs and takes them back; a job and all it points
 * to are the worker's from submit until poll, or cancel, gives it back. */
#ifndef IMBREX_KV_KV_REMOTE_WORKER_H
#define IMBREX_KV_KV_REMOTE_WORKER_H

#include "kv/kv_pool.h"
#include "kv/kv_remote.h"

enum kv_remote_job_kind { KV_REMOTE_JOB_ASK, KV_REMOTE_JOB_GET, KV_REMOTE_JOB_PUT };
enum { KV_REMOTE_NUM_JOB_KINDS = 3 };

enum kv_remote_outcome {
    KV_REMOTE_DROPPED = 0, /* no answer came */
    KV_REMOTE_GOOD,
    KV_REMOTE_KNOWN, /* of a put: it was there */
    KV_REMOTE_MISSING,
    KV_REMOTE_DAMAGED,
    KV_REMOTE_ERROR,
};

struct kv_remote_job {
    struct kv_remote_job *next; /* whose list it is in */
    enum kv_remote_job_kind kind;
    enum kv_remote_outcome outcome;
    bool is_missing; /* of a put: the server does not have it, as far as is known */
    bool is_repair;  /* of a put: what the server had is no such block, and is written over */
    struct kv_key key;
    int32_t token_ids[KV_BLOCK_SIZE];
    void *block;
    int32_t tag;
};

struct kv_remote_job_list {
    struct kv_remote_job *first, *last;
};

void kv_remote_job_append(struct kv_remote_job_list *list, struct kv_remote_job *job);
/* NULL: it is empty. */
struct kv_remote_job *kv_remote_job_take(struct kv_remote_job_list *list);

struct kv_remote_worker;

/* All options are given; none is 0. Waits as kv_remote_open does. */
enum imbrex_status kv_remote_worker_create(const struct kv_remote_options *options,
                                           struct kv_remote_worker **worker,
                                           struct imbrex_error *err);
/* Forgets all jobs. NULL does nothing. */
void kv_remote_worker_destroy(struct kv_remote_worker *worker);

void kv_remote_worker_submit(struct kv_remote_worker *worker, struct kv_remote_job *job);
/* The get with that tag, if it has not begun; NULL: it has. */
struct kv_remote_job *kv_remote_worker_cancel(struct kv_remote_worker *worker, int32_t tag);
/* A job that is done, NULL: none is. */
struct kv_remote_job *kv_remote_worker_poll(struct kv_remote_worker *worker);
/* Waits until there is one, at most timeout_ns. */
void kv_remote_worker_wait(struct kv_remote_worker *worker, int64_t timeout_ns);

/* Whether the server is there. */
bool kv_remote_worker_is_up(const struct kv_remote_worker *worker);
/* Whether it takes blocks now, as far as is known. */
bool kv_remote_worker_is_paused(struct kv_remote_worker *worker, int64_t now_ns);
/* num_failures, put_bytes and got_bytes; failure: [KV_REMOTE_FAILURE_BYTES] what went wrong last.
 */
void kv_remote_worker_read(struct kv_remote_worker *worker, struct kv_remote_metrics *metrics,
                           char *failure);

#endif
