/* SPDX-License-Identifier: Apache-2.0 */
/* Between the two threads lie lists of jobs under one lock: those that wait, by kind, and those
 * that are done. What the worker has taken, and the connection, are its own. */
#include "kv/kv_remote_worker.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "kv/kv_remote_link.h"
#include "kv/kv_remote_value.h"

/* Values under way: several times what 10 Gbit/s and 1 ms hold, and soon over when the server is
 * asked for something nearer. */
#define MAX_FLIGHT_BYTES ((size_t)4 << 20)
#define MAX_UNSENT_BYTES ((size_t)64 << 10)
#define MAX_GETS_IN_A_ROW 4 /* while a put waits */
/* Of asks and gets: a server that answers nothing else is no use. */
#define MAX_ERRORS_IN_A_ROW 8
#define MIN_PAUSE_NS INT64_C(1000000000) /* of puts after one that was refused; doubles */
#define MAX_PAUSE_NS INT64_C(60000000000)
#define NS_PER_MS INT64_C(1000000)
#define KEY_TEXT_BYTES 128

struct kv_remote_worker {
    struct kv_remote_options options;
    struct kv_remote_url url;         /* options.url points here */
    char name_prefix[KEY_TEXT_BYTES]; /* of keys on the server */
    int wake_fd;                      /* -1: none */
    pthread_t thread;
    bool has_thread;

    pthread_mutex_t lock;    /* of what follows */
    pthread_cond_t has_done; /* on the monotonic clock */
    struct kv_remote_job_list waiting[KV_REMOTE_NUM_JOB_KINDS];
    struct kv_remote_job_list done;
    bool is_stopping;
    bool is_woken;  /* the worker has been told that there is something */
    bool has_tried; /* the first attempt to connect is over */
    uint64_t num_failures, put_bytes, got_bytes;
    int64_t paused_until_ns; /* puts */
    char failure[KV_REMOTE_FAILURE_BYTES];
    atomic_bool is_up; /* read without the lock */

    /* The worker's. */
    struct kv_remote_codec *codec;
    struct kv_remote_link *link;
    struct kv_remote_job_list flight; /* commands under way, in order */
    struct kv_remote_job_list ended;  /* not in `done` yet */
    size_t flight_bytes;              /* of values, as long as they may get */
    int32_t num_gets_in_a_row;
    int32_t num_errors_in_a_row, num_failures_in_a_row;
    int64_t retry_ns;    /* not before that; while the link is down */
    int64_t up_since_ns; /* 0: the link has not been up since it began */
    int64_t pause_ns;    /* the last one; 0: the last put was taken */
    bool is_begun;       /* the link is not down, or just was not */
    /* Not published yet. */
    int64_t new_pause_until_ns;
    uint64_t new_failures, new_put_bytes, new_got_bytes;
};

/* ---- lists ----------------------------------------------------------------------------------- */

void kv_remote_job_append(struct kv_remote_job_list *list, struct kv_remote_job *job)
{
    job->next = NULL;
    *(list->last != NULL ? &list->last->next : &list->first) = job;
    list->last = job;
}

static void list_prepend(struct kv_remote_job_list *list, struct kv_remote_job *job)
{
    job->next = list->first;
    list->first = job;
    list->last = list->last != NULL ? list->last : job;
}

struct kv_remote_job *kv_remote_job_take(struct kv_remote_job_list *list)
{
    struct kv_remote_job *job = list->first;
    if (job != NULL) {
        list->first = job->next;
        list->last = list->first != NULL ? list->last : NULL;
        job->next = NULL;
    }
    return job;
}

static void list_take_all(struct kv_remote_job_list *list, struct kv_remote_job_list *from,
                          enum kv_remote_outcome outcome)
{
    struct kv_remote_job *job;
    while ((job = kv_remote_job_take(from)) != NULL) {
        job->outcome = outcome;
        kv_remote_job_append(list, job);
    }
}

/* ---- answers --------------------------------------------------------------------------------- */

static void end_job(struct kv_remote_worker *worker, struct kv_remote_job *job,
                    enum kv_remote_outcome outcome)
{
    job->outcome = outcome;
    kv_remote_job_append(&worker->ended, job);
}

static bool has_value_to_set(const struct kv_remote_job *job)
{
    return job->kind == KV_REMOTE_JOB_PUT && job->is_missing;
}

static bool has_value(const struct kv_remote_job *job)
{
    return job->kind == KV_REMOTE_JOB_GET || has_value_to_set(job);
}

/* A put of which it is known by now that it is to be written. */
static void put_after_all(struct kv_remote_worker *worker, struct kv_remote_job *job)
{
    job->is_missing = true;
    pthread_mutex_lock(&worker->lock);
    list_prepend(&worker->waiting[KV_REMOTE_JOB_PUT], job);
    pthread_mutex_unlock(&worker->lock);
}

/* Something that was asked for came: the server is well. */
static void note_success(struct kv_remote_worker *worker)
{
    worker->num_errors_in_a_row = 0;
    worker->num_failures_in_a_row = 0;
}

/* Under the key is something else: the value that nobody can use costs its own key and no more. */
static void take_foreign(struct kv_remote_worker *worker, struct kv_remote_job *job,
                         const char *what)
{
    note_success(worker);
    kv_remote_link_note(worker->link, "under a block's key is ", what, strlen(what));
    if (job->kind != KV_REMOTE_JOB_PUT) {
        end_job(worker, job, KV_REMOTE_DAMAGED);
        return;
    }
    job->is_repair = true;
    put_after_all(worker, job);
}

static void take_error(struct kv_remote_worker *worker, struct kv_remote_job *job,
                       const struct kv_remote_answer *answer)
{
    static const char wrong_type[] = "WRONGTYPE";
    if (!has_value_to_set(job) && answer->num_bytes >= strlen(wrong_type) &&
        memcmp(answer->bytes, wrong_type, strlen(wrong_type)) == 0) {
        take_foreign(worker, job, "what is no string");
        return;
    }
    kv_remote_link_note(worker->link, "the server says: ", answer->bytes, answer->num_bytes);
    if (job->kind == KV_REMOTE_JOB_PUT) {
        /* Out of memory, read only, not allowed: reading may go on. */
        int64_t pause_ns = worker->pause_ns == 0 ? MIN_PAUSE_NS : 2 * worker->pause_ns;
        worker->pause_ns = pause_ns < MAX_PAUSE_NS ? pause_ns : MAX_PAUSE_NS;
        worker->new_pause_until_ns = clock_now_ns() + worker->pause_ns;
    } else {
        worker->num_errors_in_a_row++;
    }
    end_job(worker, job, KV_REMOTE_ERROR);
}

/* False: no GET has that answer. */
static bool take_value(struct kv_remote_worker *worker, struct kv_remote_job *job,
                       const struct kv_remote_answer *answer)
{
    if (answer->kind == KV_REMOTE_ANSWER_NIL) {
        note_success(worker);
        end_job(worker, job, KV_REMOTE_MISSING);
        return true;
    }
    if (answer->kind != KV_REMOTE_ANSWER_BYTES) {
        return false;
    }
    worker->new_got_bytes += answer->num_bytes;
    if (kv_remote_value_open(worker->codec, &job->key, job->token_ids,
                             (const unsigned char *)answer->bytes, answer->num_bytes, job->block)) {
        note_success(worker);
        end_job(worker, job, KV_REMOTE_GOOD);
    } else {
        worker->num_errors_in_a_row++;
        kv_remote_link_note(worker->link, "under a block's key is a value that is not what was put",
                            NULL, 0);
        end_job(worker, job, KV_REMOTE_DAMAGED);
    }
    return true;
}

/* False: no STRLEN has that answer. */
static bool take_length(struct kv_remote_worker *worker, struct kv_remote_job *job,
                        const struct kv_remote_answer *answer)
{
    char what[64];
    size_t max_bytes = kv_remote_value_max_bytes(worker->codec);
    if (answer->kind != KV_REMOTE_ANSWER_NUMBER || answer->number < 0) {
        return false;
    }
    bool is_there = answer->number > 0;
    if (is_there && (answer->number <= (long long)sizeof(struct kv_remote_header) ||
                     answer->number > (long long)max_bytes)) {
        (void)snprintf(what, sizeof(what), "a value of %lld bytes, a block's has %zu at most",
                       answer->number, max_bytes);
        take_foreign(worker, job, what);
        return true;
    }
    note_success(worker);
    if (job->kind == KV_REMOTE_JOB_ASK) {
        end_job(worker, job, is_there ? KV_REMOTE_GOOD : KV_REMOTE_MISSING);
    } else if (is_there) {
        end_job(worker, job, KV_REMOTE_KNOWN);
    } else {
        put_after_all(worker, job);
    }
    return true;
}

static bool on_answer(void *user, const struct kv_remote_answer *answer)
{
    struct kv_remote_worker *worker = user;
    struct kv_remote_job *job = kv_remote_job_take(&worker->flight);
    bool is_possible = true;
    assert(job != NULL);
    if (has_value(job)) {
        worker->flight_bytes -= kv_remote_value_max_bytes(worker->codec);
    }
    if (answer->kind == KV_REMOTE_ANSWER_ERROR) {
        take_error(worker, job, answer);
    } else if (job->kind == KV_REMOTE_JOB_GET) {
        is_possible = take_value(worker, job, answer);
    } else if (!has_value(job)) {
        is_possible = take_length(worker, job, answer);
    } else if (answer->kind == KV_REMOTE_ANSWER_STATUS) {
        note_success(worker);
        worker->pause_ns = 0;
        end_job(worker, job, KV_REMOTE_GOOD);
    } else {
        is_possible = false;
    }
    if (!is_possible) {
        end_job(worker, job, KV_REMOTE_DROPPED);
    }
    return is_possible;
}

/* ---- commands -------------------------------------------------------------------------------- */

static void key_text(const struct kv_remote_worker *worker, const struct kv_key *key,
                     char text[KEY_TEXT_BYTES])
{
    const unsigned char *bytes = (const unsigned char *)key->words;
    size_t length = strlen(worker->name_prefix);
    memcpy(text, worker->name_prefix, length);
    for (size_t i = 0; i < sizeof(key->words); i++) {
        (void)snprintf(text + length + 2 * i, 3, "%02x", bytes[i]);
    }
}

static struct kv_remote_part text_part(const char *text)
{
    return (struct kv_remote_part){.bytes = text, .num_bytes = strlen(text)};
}

static void give(struct kv_remote_worker *worker, struct kv_remote_job *job, int64_t now_ns)
{
    char name[KEY_TEXT_BYTES], ttl[16];
    struct kv_remote_part parts[KV_REMOTE_MAX_PARTS];
    int32_t num_parts = 2;
    key_text(worker, &job->key, name);
    parts[1] = text_part(name);
    if (job->kind == KV_REMOTE_JOB_GET) {
        parts[0] = text_part("GET");
    } else if (!has_value(job)) {
        /* A string that is not there has length 0, as one that is of no use. */
        parts[0] = text_part("STRLEN");
    } else {
        size_t num_bytes;
        parts[0] = text_part("SET");
        parts[2].bytes =
            kv_remote_value_make(worker->codec, &job->key, job->token_ids, job->block, &num_bytes);
        parts[2].num_bytes = num_bytes;
        worker->new_put_bytes += num_bytes;
        (void)snprintf(ttl, sizeof(ttl), "%" PRId32, worker->options.url->ttl_s);
        parts[3] = text_part("EX");
        parts[4] = text_part(ttl);
        num_parts = 5;
    }
    if (has_value(job)) {
        worker->flight_bytes += kv_remote_value_max_bytes(worker->codec);
    }
    kv_remote_job_append(&worker->flight, job);
    kv_remote_link_send(worker->link, parts, num_parts, now_ns);
}

/* The next job to be given, NULL: none, or none yet. Asks are small and somebody waits for them;
 * puts get their turn. Under the lock. */
static struct kv_remote_job *take_order(struct kv_remote_worker *worker)
{
    struct kv_remote_job_list *gets = &worker->waiting[KV_REMOTE_JOB_GET],
                              *puts = &worker->waiting[KV_REMOTE_JOB_PUT];
    struct kv_remote_job *job = kv_remote_job_take(&worker->waiting[KV_REMOTE_JOB_ASK]);
    if (job != NULL) {
        return job;
    }
    bool takes_put = puts->first != NULL &&
                     (gets->first == NULL || worker->num_gets_in_a_row >= MAX_GETS_IN_A_ROW);
    struct kv_remote_job_list *list = takes_put ? puts : gets;
    if (list->first == NULL || kv_remote_link_num_unsent(worker->link) > MAX_UNSENT_BYTES) {
        return NULL;
    }
    if (has_value(list->first) && worker->flight_bytes > 0 &&
        worker->flight_bytes + kv_remote_value_max_bytes(worker->codec) > MAX_FLIGHT_BYTES) {
        return NULL;
    }
    worker->num_gets_in_a_row = takes_put ? 0 : worker->num_gets_in_a_row + 1;
    return kv_remote_job_take(list);
}

static void give_orders(struct kv_remote_worker *worker, int64_t now_ns)
{
    while (kv_remote_link_state(worker->link) == KV_REMOTE_LINK_UP) {
        pthread_mutex_lock(&worker->lock);
        struct kv_remote_job *job = take_order(worker);
        pthread_mutex_unlock(&worker->lock);
        if (job == NULL) {
            return;
        }
        give(worker, job, now_ns);
    }
}

/* ---- the connection -------------------------------------------------------------------------- */

/* The link is down and was not: what was under way is lost, and when to try again is settled. */
static void note_down(struct kv_remote_worker *worker, int64_t now_ns)
{
    bool was_idle = worker->up_since_ns != 0 && worker->flight.first == NULL &&
                    kv_remote_link_is_hung_up(worker->link);
    int64_t min_ns = worker->options.min_retry_ms * NS_PER_MS;
    int64_t max_ns = worker->options.max_retry_ms * NS_PER_MS;
    if (worker->up_since_ns != 0 && now_ns - worker->up_since_ns >= max_ns) {
        worker->num_failures_in_a_row = 0;
    }
    /* A server that closes what is idle has not failed. */
    if (was_idle && worker->num_failures_in_a_row == 0) {
        worker->retry_ns = now_ns;
    } else {
        int64_t wait_ns = min_ns;
        for (int32_t i = 0; i < worker->num_failures_in_a_row && wait_ns < max_ns; i++) {
            wait_ns *= 2;
        }
        worker->retry_ns = now_ns + (wait_ns < max_ns ? wait_ns : max_ns);
        worker->new_failures++;
    }
    if (worker->num_failures_in_a_row < INT32_MAX) {
        worker->num_failures_in_a_row++;
    }
    /* What is too long is so the next time, too. */
    if (kv_remote_link_is_overrun(worker->link) && worker->flight.first != NULL &&
        worker->flight.first->kind == KV_REMOTE_JOB_GET) {
        end_job(worker, kv_remote_job_take(&worker->flight), KV_REMOTE_DAMAGED);
    }
    list_take_all(&worker->ended, &worker->flight, KV_REMOTE_DROPPED);
    worker->flight_bytes = 0;
    worker->num_errors_in_a_row = 0;
    worker->up_since_ns = 0;
    worker->is_begun = false;
}

static void work_on_link(struct kv_remote_worker *worker, short revents, int64_t now_ns)
{
    struct kv_remote_link *link = worker->link;
    if (!worker->is_begun && now_ns >= worker->retry_ns) {
        worker->is_begun = true;
        kv_remote_link_begin(link, now_ns);
    } else if (worker->is_begun) {
        kv_remote_link_work(link, revents, now_ns);
    }
    if (worker->num_errors_in_a_row >= MAX_ERRORS_IN_A_ROW &&
        kv_remote_link_state(link) == KV_REMOTE_LINK_UP) {
        kv_remote_link_drop(link, "only errors come, or values that are not what was put");
    }
    if (kv_remote_link_state(link) == KV_REMOTE_LINK_UP && worker->up_since_ns == 0) {
        worker->up_since_ns = now_ns;
    }
}

/* Tells the user's thread what has happened. False: it wants an end. */
static bool publish(struct kv_remote_worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    enum kv_remote_link_state state = kv_remote_link_state(worker->link);
    bool is_up = state == KV_REMOTE_LINK_UP, is_going_on = !worker->is_stopping;
    atomic_store(&worker->is_up, is_up);
    if (!is_up) {
        for (int32_t kind = 0; kind < KV_REMOTE_NUM_JOB_KINDS; kind++) {
            list_take_all(&worker->ended, &worker->waiting[kind], KV_REMOTE_DROPPED);
        }
    }
    bool is_news = worker->ended.first != NULL || !worker->has_tried;
    struct kv_remote_job *job;
    while ((job = kv_remote_job_take(&worker->ended)) != NULL) {
        kv_remote_job_append(&worker->done, job);
    }
    worker->has_tried |= is_up || (worker->new_failures > 0 && !worker->is_begun);
    worker->num_failures += worker->new_failures;
    worker->put_bytes += worker->new_put_bytes;
    worker->got_bytes += worker->new_got_bytes;
    worker->new_failures = 0;
    worker->new_put_bytes = 0;
    worker->new_got_bytes = 0;
    worker->paused_until_ns = worker->new_pause_until_ns;
    memcpy(worker->failure, kv_remote_link_failure(worker->link), sizeof(worker->failure));
    if (is_news) {
        pthread_cond_signal(&worker->has_done);
    }
    pthread_mutex_unlock(&worker->lock);
    return is_going_on;
}

/* Waits for the socket, for orders, or until something is due. Returns what the socket has. */
static short wait_for_work(struct kv_remote_worker *worker, int64_t now_ns)
{
    struct pollfd polled[2] = {{.fd = worker->wake_fd, .events = POLLIN}};
    int64_t due_ns = worker->is_begun ? kv_remote_link_deadline_ns(worker->link) : worker->retry_ns;
    int timeout_ms = -1;
    uint64_t count;
    polled[1].fd = kv_remote_link_fd(worker->link, &polled[1].events);
    if (due_ns != INT64_MAX) {
        int64_t wait_ms = due_ns > now_ns ? (due_ns - now_ns) / NS_PER_MS + 1 : 0;
        timeout_ms = wait_ms < INT_MAX ? (int)wait_ms : INT_MAX;
    }
    bool has_events = poll(polled, 2, timeout_ms) > 0;
    if (has_events && polled[0].revents != 0) {
        /* What it counts does not matter. */
        (void)!read(worker->wake_fd, &count, sizeof(count));
    }
    /* Before orders are taken: one that comes meanwhile wakes it again. */
    pthread_mutex_lock(&worker->lock);
    worker->is_woken = false;
    pthread_mutex_unlock(&worker->lock);
    return has_events ? polled[1].revents : 0;
}

static void *work(void *arg)
{
    struct kv_remote_worker *worker = arg;
    short revents = 0;
    do {
        int64_t now_ns = clock_now_ns();
        work_on_link(worker, revents, now_ns);
        give_orders(worker, now_ns);
        if (kv_remote_link_state(worker->link) == KV_REMOTE_LINK_UP) {
            kv_remote_link_work(worker->link, 0, now_ns);
        }
        if (worker->is_begun && kv_remote_link_state(worker->link) == KV_REMOTE_LINK_DOWN) {
            note_down(worker, now_ns);
        }
        if (!publish(worker)) {
            break;
        }
        revents = wait_for_work(worker, clock_now_ns());
    } while (true);
    return NULL;
}

/* ---- jobs, for the other thread -------------------------------------------------------------- */

static void wake(struct kv_remote_worker *worker)
{
    const uint64_t one = 1;
    /* Full means that it is awake. */
    (void)!write(worker->wake_fd, &one, sizeof(one));
}

void kv_remote_worker_submit(struct kv_remote_worker *worker, struct kv_remote_job *job)
{
    pthread_mutex_lock(&worker->lock);
    bool must_wake = !worker->is_woken;
    kv_remote_job_append(&worker->waiting[job->kind], job);
    worker->is_woken = true;
    pthread_mutex_unlock(&worker->lock);
    if (must_wake) {
        wake(worker);
    }
}

struct kv_remote_job *kv_remote_worker_cancel(struct kv_remote_worker *worker, int32_t tag)
{
    struct kv_remote_job *found = NULL, *job;
    struct kv_remote_job_list kept = {NULL, NULL};
    pthread_mutex_lock(&worker->lock);
    while ((job = kv_remote_job_take(&worker->waiting[KV_REMOTE_JOB_GET])) != NULL) {
        if (job->tag == tag) {
            found = job;
        } else {
            kv_remote_job_append(&kept, job);
        }
    }
    worker->waiting[KV_REMOTE_JOB_GET] = kept;
    pthread_mutex_unlock(&worker->lock);
    return found;
}

struct kv_remote_job *kv_remote_worker_poll(struct kv_remote_worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    struct kv_remote_job *job = kv_remote_job_take(&worker->done);
    pthread_mutex_unlock(&worker->lock);
    return job;
}

/* Until a job is done, or *is_over if it is given. */
static void wait_for_done(struct kv_remote_worker *worker, int64_t timeout_ns, const bool *is_over)
{
    int64_t until_ns = clock_now_ns() + timeout_ns;
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                                   .tv_nsec = (long)(until_ns % 1000000000)};
    pthread_mutex_lock(&worker->lock);
    while (worker->done.first == NULL && (is_over == NULL || !*is_over) &&
           pthread_cond_timedwait(&worker->has_done, &worker->lock, &until) == 0) {
    }
    pthread_mutex_unlock(&worker->lock);
}

void kv_remote_worker_wait(struct kv_remote_worker *worker, int64_t timeout_ns)
{
    wait_for_done(worker, timeout_ns, NULL);
}

bool kv_remote_worker_is_up(const struct kv_remote_worker *worker)
{
    return atomic_load(&worker->is_up);
}

bool kv_remote_worker_is_paused(struct kv_remote_worker *worker, int64_t now_ns)
{
    pthread_mutex_lock(&worker->lock);
    bool is_paused = now_ns < worker->paused_until_ns;
    pthread_mutex_unlock(&worker->lock);
    return is_paused;
}

void kv_remote_worker_read(struct kv_remote_worker *worker, struct kv_remote_metrics *metrics,
                           char *failure)
{
    pthread_mutex_lock(&worker->lock);
    metrics->num_failures = worker->num_failures;
    metrics->put_bytes = worker->put_bytes;
    metrics->got_bytes = worker->got_bytes;
    memcpy(failure, worker->failure, sizeof(worker->failure));
    pthread_mutex_unlock(&worker->lock);
    metrics->is_up = kv_remote_worker_is_up(worker);
}

/* ---- create and destroy ---------------------------------------------------------------------- */

static enum imbrex_status start(struct kv_remote_worker *worker, struct imbrex_error *err)
{
    worker->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->wake_fd < 0) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "the remote tier's event: %s",
                         system_error_text(errno));
    }
    int failure = pthread_create(&worker->thread, NULL, work, worker);
    if (failure != 0) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "the remote tier's thread: %s",
                         system_error_text(failure));
    }
    worker->has_thread = true;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_parts(struct kv_remote_worker *worker, const unsigned char *secret,
                                       struct imbrex_error *err)
{
    const struct kv_remote_options *options = &worker->options;
    const unsigned char *owner = (const unsigned char *)options->owner.words;
    TRY(kv_remote_codec_create(
        &(struct kv_remote_codec_options){.owner = options->owner,
                                          .block_bytes = options->block_bytes,
                                          .secret = secret,
                                          .zstd_level = worker->url.zstd_level},
        &worker->codec, err));
    TRY(kv_remote_link_create(
        &(struct kv_remote_link_options){
            .url = &worker->url,
            .max_answer_bytes = kv_remote_value_max_bytes(worker->codec),
            .connect_timeout_ns = options->connect_timeout_ms * NS_PER_MS,
            .answer_timeout_ns = options->answer_timeout_ms * NS_PER_MS,
            .on_answer = on_answer,
            .user = worker},
        &worker->link, err));
    (void)snprintf(worker->name_prefix, sizeof(worker->name_prefix),
                   "imbrex-kv:%d:%02x%02x%02x%02x%02x%02x%02x%02x:", KV_REMOTE_VERSION, owner[0],
                   owner[1], owner[2], owner[3], owner[4], owner[5], owner[6], owner[7]);
    return IMBREX_STATUS_OK;
}

static bool init_locks(struct kv_remote_worker *worker)
{
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0) {
        return false;
    }
    bool is_good = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
                   pthread_cond_init(&worker->has_done, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    if (is_good && pthread_mutex_init(&worker->lock, NULL) != 0) {
        pthread_cond_destroy(&worker->has_done);
        is_good = false;
    }
    return is_good;
}

enum imbrex_status kv_remote_worker_create(const struct kv_remote_options *options,
                                           struct kv_remote_worker **worker,
                                           struct imbrex_error *err)
{
    enum imbrex_status status;
    struct kv_remote_worker *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the remote tier's thread", sizeof(*created));
    }
    created->options = *options;
    created->url = *options->url;
    created->options.url = &created->url;
    created->options.secret = NULL; /* the codec has a copy */
    created->wake_fd = -1;
    if (!init_locks(created)) {
        free(created);
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "the remote tier's lock: expected the operating system to give one, "
                         "found none left");
    }
    TRY_OR_FAIL(create_parts(created, options->secret, err));
    TRY_OR_FAIL(start(created, err));
    /* The look-up of a name may take longer: it goes on without us. */
    wait_for_done(created, 2 * options->connect_timeout_ms * NS_PER_MS, &created->has_tried);
    *worker = created;
    return IMBREX_STATUS_OK;
fail:
    kv_remote_worker_destroy(created);
    return status;
}

void kv_remote_worker_destroy(struct kv_remote_worker *worker)
{
    if (worker == NULL) {
        return;
    }
    if (worker->has_thread) {
        pthread_mutex_lock(&worker->lock);
        worker->is_stopping = true;
        pthread_mutex_unlock(&worker->lock);
        wake(worker);
        pthread_join(worker->thread, NULL);
    }
    if (worker->wake_fd >= 0) {
        (void)close(worker->wake_fd);
    }
    kv_remote_link_destroy(worker->link);
    kv_remote_codec_destroy(worker->codec);
    pthread_mutex_destroy(&worker->lock);
    pthread_cond_destroy(&worker->has_done);
    free(worker);
}
