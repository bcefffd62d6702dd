/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_remote.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kv/kv_fault_log.h"
#include "kv/kv_remote_known.h"
#include "kv/kv_remote_link.h"
#include "kv/kv_remote_worker.h"

#define MAX_JOBS (KV_REMOTE_MAX_ASKS + KV_REMOTE_MAX_GETS + KV_REMOTE_MAX_PUTS)
/* 4 MB of memory; an answer that was pushed out is asked for again. */
#define MAX_KNOWN 32768
/* Another engine may put a block at any time, and the server forget one. */
#define ABSENT_NS INT64_C(5000000000)
#define THERE_NS INT64_C(60000000000)

struct kv_remote {
    struct kv_remote_url url;
    struct kv_remote_worker *worker;
    struct kv_remote_job *jobs; /* [MAX_JOBS] */
    struct kv_remote_job_list free_jobs;
    int32_t num_jobs[KV_REMOTE_NUM_JOB_KINDS]; /* that poll has not given back */
    struct kv_remote_known known;
    int64_t now_ns; /* of the last poll */
    struct kv_remote_metrics metrics;
    struct kv_fault_log told;
};

/* ---- jobs ------------------------------------------------------------------------------------ */

static void submit(struct kv_remote *remote, enum kv_remote_job_kind kind, const struct kv_key *key,
                   const int32_t *token_ids, void *block, int32_t tag, bool is_missing)
{
    struct kv_remote_job *job = kv_remote_job_take(&remote->free_jobs);
    assert(job != NULL);
    *job = (struct kv_remote_job){
        .kind = kind, .key = *key, .block = block, .tag = tag, .is_missing = is_missing};
    if (token_ids != NULL) {
        memcpy(job->token_ids, token_ids, sizeof(job->token_ids));
    }
    remote->num_jobs[kind]++;
    kv_remote_worker_submit(remote->worker, job);
}

static void release_job(struct kv_remote *remote, struct kv_remote_job *job)
{
    remote->num_jobs[job->kind]--;
    kv_remote_job_append(&remote->free_jobs, job);
}

enum kv_remote_state kv_remote_look(struct kv_remote *remote, const struct kv_key *key)
{
    enum kv_remote_state state;
    if (!kv_remote_worker_is_up(remote->worker)) {
        return KV_REMOTE_ABSENT;
    }
    if (kv_remote_known_find(&remote->known, key, remote->now_ns, &state)) {
        return state;
    }
    if (remote->num_jobs[KV_REMOTE_JOB_ASK] == KV_REMOTE_MAX_ASKS) {
        return KV_REMOTE_ABSENT;
    }
    kv_remote_known_note(&remote->known, key, KV_REMOTE_ASKED, 0);
    remote->metrics.num_asked++;
    submit(remote, KV_REMOTE_JOB_ASK, key, NULL, NULL, 0, false);
    return KV_REMOTE_ASKED;
}

bool kv_remote_has(const struct kv_remote *remote, const struct kv_key *key)
{
    enum kv_remote_state state;
    return kv_remote_known_find(&remote->known, key, remote->now_ns, &state) &&
           state == KV_REMOTE_THERE;
}

bool kv_remote_is_taking(const struct kv_remote *remote)
{
    return kv_remote_worker_is_up(remote->worker) &&
           !kv_remote_worker_is_paused(remote->worker, remote->now_ns);
}

bool kv_remote_can_put(const struct kv_remote *remote)
{
    return remote->num_jobs[KV_REMOTE_JOB_PUT] < KV_REMOTE_MAX_PUTS;
}

bool kv_remote_can_get(const struct kv_remote *remote)
{
    return remote->num_jobs[KV_REMOTE_JOB_GET] < KV_REMOTE_MAX_GETS;
}

bool kv_remote_put(struct kv_remote *remote, const struct kv_key *key, const int32_t *token_ids,
                   const void *block, int32_t tag)
{
    enum kv_remote_state state;
    if (!kv_remote_can_put(remote) || !kv_remote_is_taking(remote)) {
        remote->metrics.num_refused++;
        return false;
    }
    bool is_missing = kv_remote_known_find(&remote->known, key, remote->now_ns, &state) &&
                      state == KV_REMOTE_ABSENT;
    /* A put reads it only. */
    submit(remote, KV_REMOTE_JOB_PUT, key, token_ids, (void *)(uintptr_t)block, tag, is_missing);
    return true;
}

bool kv_remote_get(struct kv_remote *remote, const struct kv_key *key, const int32_t *token_ids,
                   void *block, int32_t tag)
{
    if (!kv_remote_can_get(remote) || !kv_remote_worker_is_up(remote->worker)) {
        return false;
    }
    submit(remote, KV_REMOTE_JOB_GET, key, token_ids, block, tag, false);
    return true;
}

bool kv_remote_cancel_get(struct kv_remote *remote, int32_t tag)
{
    struct kv_remote_job *job = kv_remote_worker_cancel(remote->worker, tag);
    if (job != NULL) {
        release_job(remote, job);
    }
    return job != NULL;
}

/* ---- results --------------------------------------------------------------------------------- */

/* What the outcome says about the key from now on. */
static void note_outcome(struct kv_remote *remote, const struct kv_remote_job *job)
{
    switch (job->outcome) {
    case KV_REMOTE_GOOD:
    case KV_REMOTE_KNOWN:
        kv_remote_known_note(&remote->known, &job->key, KV_REMOTE_THERE, remote->now_ns + THERE_NS);
        break;
    case KV_REMOTE_DAMAGED:
        /* Until it has been computed and put again, over what is there. */
        kv_remote_known_note(&remote->known, &job->key, KV_REMOTE_ABSENT, INT64_MAX);
        break;
    case KV_REMOTE_MISSING:
    case KV_REMOTE_ERROR:
        kv_remote_known_note(&remote->known, &job->key, KV_REMOTE_ABSENT,
                             remote->now_ns + ABSENT_NS);
        break;
    case KV_REMOTE_DROPPED:
        kv_remote_known_forget(&remote->known, &job->key);
        break;
    }
}

static void count(struct kv_remote_metrics *metrics, const struct kv_remote_job *job)
{
    metrics->num_damaged += job->is_repair || job->outcome == KV_REMOTE_DAMAGED;
    if (job->kind == KV_REMOTE_JOB_ASK) {
        return;
    }
    switch (job->outcome) {
    case KV_REMOTE_GOOD:
        metrics->num_put += job->kind == KV_REMOTE_JOB_PUT;
        metrics->num_got += job->kind == KV_REMOTE_JOB_GET;
        break;
    case KV_REMOTE_KNOWN:
        metrics->num_known++;
        break;
    case KV_REMOTE_MISSING:
        metrics->num_gone++;
        break;
    case KV_REMOTE_DAMAGED:
        break;
    case KV_REMOTE_ERROR:
        metrics->num_errors++;
        metrics->num_put_errors += job->kind == KV_REMOTE_JOB_PUT;
        break;
    case KV_REMOTE_DROPPED:
        metrics->num_dropped++;
        metrics->num_put_dropped += job->kind == KV_REMOTE_JOB_PUT;
        break;
    }
}

bool kv_remote_poll(struct kv_remote *remote, struct kv_remote_result *result)
{
    remote->now_ns = clock_now_ns();
    for (;;) {
        struct kv_remote_job *job = kv_remote_worker_poll(remote->worker);
        if (job == NULL) {
            return false;
        }
        bool is_ask = job->kind == KV_REMOTE_JOB_ASK;
        *result = (struct kv_remote_result){
            .tag = job->tag,
            .is_get = job->kind == KV_REMOTE_JOB_GET,
            .is_good = job->outcome == KV_REMOTE_GOOD || job->outcome == KV_REMOTE_KNOWN,
        };
        note_outcome(remote, job);
        count(&remote->metrics, job);
        release_job(remote, job);
        if (!is_ask) {
            return true;
        }
    }
}

void kv_remote_wait(struct kv_remote *remote, int64_t timeout_ns)
{
    kv_remote_worker_wait(remote->worker, timeout_ns);
}

int32_t kv_remote_num_puts(const struct kv_remote *remote)
{
    return remote->num_jobs[KV_REMOTE_JOB_PUT];
}

int32_t kv_remote_num_gets(const struct kv_remote *remote)
{
    return remote->num_jobs[KV_REMOTE_JOB_GET];
}

int32_t kv_remote_num_asks(const struct kv_remote *remote)
{
    return remote->num_jobs[KV_REMOTE_JOB_ASK];
}

/* ---- open and close -------------------------------------------------------------------------- */

enum imbrex_status kv_remote_read_url(const char *text, struct kv_remote_url *url,
                                      struct imbrex_error *err)
{
    struct kv_remote_url parsed;
    TRY(kv_remote_url_parse(text, &parsed, err));
    if (!kv_remote_link_is_built()) {
        return error_set_field(err, IMBREX_STATUS_UNSUPPORTED, "kv_remote_url",
                               ": expected a build with hiredis (libhiredis-dev), found one "
                               "without");
    }
    *url = parsed;
    return IMBREX_STATUS_OK;
}

static int32_t or_default(int32_t given, int32_t otherwise)
{
    return given > 0 ? given : otherwise;
}

enum imbrex_status kv_remote_open(const struct kv_remote_options *options,
                                  struct kv_remote **remote, struct imbrex_error *err)
{
    enum imbrex_status status;
    struct kv_remote_options settled = *options;
    struct kv_remote *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the remote tier", sizeof(*created));
    }
    created->url = *options->url;
    settled.connect_timeout_ms = or_default(options->connect_timeout_ms, 1000);
    settled.answer_timeout_ms = or_default(options->answer_timeout_ms, 2000);
    settled.min_retry_ms = or_default(options->min_retry_ms, 200);
    settled.max_retry_ms = or_default(options->max_retry_ms, 30000);
    created->jobs = calloc(MAX_JOBS, sizeof(*created->jobs));
    if (created->jobs == NULL) {
        status =
            error_out_of_memory(err, "the remote tier's jobs", MAX_JOBS * sizeof(*created->jobs));
        goto fail;
    }
    for (int32_t i = 0; i < MAX_JOBS; i++) {
        kv_remote_job_append(&created->free_jobs, &created->jobs[i]);
    }
    TRY_OR_FAIL(kv_remote_known_create(MAX_KNOWN, &created->known, err));
    TRY_OR_FAIL(kv_remote_worker_create(&settled, &created->worker, err));
    created->now_ns = clock_now_ns();
    *remote = created;
    return IMBREX_STATUS_OK;
fail:
    kv_remote_close(created);
    return status;
}

void kv_remote_close(struct kv_remote *remote)
{
    if (remote == NULL) {
        return;
    }
    kv_remote_worker_destroy(remote->worker);
    kv_remote_known_destroy(&remote->known);
    free(remote->jobs);
    free(remote);
}

/* ---- questions ------------------------------------------------------------------------------- */

void kv_remote_read_metrics(struct kv_remote *remote, struct kv_remote_metrics *metrics)
{
    char failure[KV_REMOTE_FAILURE_BYTES];
    *metrics = remote->metrics;
    kv_remote_worker_read(remote->worker, metrics, failure);
}

uint64_t kv_remote_num_faults(const struct kv_remote_metrics *metrics)
{
    return metrics->num_damaged + metrics->num_errors + metrics->num_dropped;
}

void kv_remote_log_faults(struct kv_remote *remote, const struct log *log, int64_t now_ns)
{
    struct kv_remote_metrics metrics = remote->metrics;
    struct kv_fault_text text = {.length = 0};
    char failure[KV_REMOTE_FAILURE_BYTES];
    kv_remote_worker_read(remote->worker, &metrics, failure);
    if (!kv_fault_log_is_due(&remote->told, kv_remote_num_faults(&metrics) + metrics.num_failures,
                             now_ns)) {
        return;
    }
    kv_fault_text_add(&text, metrics.num_dropped - metrics.num_put_dropped,
                      "block not answered for, computed again",
                      "blocks not answered for, computed again", "");
    kv_fault_text_add(&text, metrics.num_errors - metrics.num_put_errors,
                      "block refused, computed again", "blocks refused, computed again", "");
    kv_fault_text_add(&text, metrics.num_damaged,
                      "damaged value, computed again and then written over",
                      "damaged values, computed again and then written over", "");
    kv_fault_text_add(&text, metrics.num_put_errors, "block that it did not take",
                      "blocks that it did not take", "");
    kv_fault_text_add(&text, metrics.num_put_dropped, "block sent without an answer",
                      "blocks sent without an answer", "");
    kv_fault_text_add(&text, metrics.num_failures, "time no connection, or a broken one",
                      "times no connection, or a broken one", "");
    bool is_ipv6 = strchr(remote->url.host, ':') != NULL;
    log_write(log, IMBREX_LOG_LEVEL_WARNING,
              "KV remote %s%s%s:%" PRId32 "/%" PRId32 ": %s; it is %s; last: %s",
              is_ipv6 ? "[" : "", remote->url.host, is_ipv6 ? "]" : "", remote->url.port,
              remote->url.database, text.bytes,
              metrics.is_up ? "there now" : "not there now, and done without", failure);
}

bool kv_remote_check(const struct kv_remote *remote)
{
    int32_t num_free = 0;
    for (const struct kv_remote_job *job = remote->free_jobs.first; job != NULL; job = job->next) {
        if (num_free == MAX_JOBS) {
            return false;
        }
        num_free++;
    }
    return num_free + remote->num_jobs[KV_REMOTE_JOB_ASK] + remote->num_jobs[KV_REMOTE_JOB_GET] +
                   remote->num_jobs[KV_REMOTE_JOB_PUT] ==
               MAX_JOBS &&
           kv_remote_known_check(&remote->known);
}
