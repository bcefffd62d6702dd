/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_io.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"

struct job_list {
    struct kv_io_job *first, *last;
};

struct worker {
    struct kv_io *io;
    enum kv_io_kind kind;
    pthread_t thread;
};

struct kv_io {
    pthread_mutex_t lock;       /* of all below but the workers */
    pthread_cond_t has_jobs[2]; /* by kind */
    pthread_cond_t has_done;    /* on the monotonic clock */
    struct job_list waiting[2]; /* by kind */
    struct job_list done;
    bool is_stopping;
    struct worker *workers; /* [num_workers] that run */
    int32_t num_workers;
};

static void list_append(struct job_list *list, struct kv_io_job *job)
{
    job->next = NULL;
    *(list->last != NULL ? &list->last->next : &list->first) = job;
    list->last = job;
}

static struct kv_io_job *list_take(struct job_list *list)
{
    struct kv_io_job *job = list->first;
    if (job != NULL) {
        list->first = job->next;
        list->last = list->first != NULL ? list->last : NULL;
        job->next = NULL;
    }
    return job;
}

static void *work(void *arg)
{
    struct worker *worker = arg;
    struct kv_io *io = worker->io;
    pthread_mutex_lock(&io->lock);
    for (;;) {
        struct kv_io_job *job = list_take(&io->waiting[worker->kind]);
        if (job != NULL) {
            pthread_mutex_unlock(&io->lock);
            job->run(job);
            pthread_mutex_lock(&io->lock);
            list_append(&io->done, job);
            pthread_cond_signal(&io->has_done);
        } else if (io->is_stopping) {
            break;
        } else {
            pthread_cond_wait(&io->has_jobs[worker->kind], &io->lock);
        }
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

/* False if the operating system has none left; then nothing is left to destroy. */
static bool init_locks(struct kv_io *io)
{
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0) {
        return false;
    }
    bool is_good = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
                   pthread_cond_init(&io->has_done, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    if (!is_good) {
        return false;
    }
    if (pthread_cond_init(&io->has_jobs[0], NULL) != 0) {
        pthread_cond_destroy(&io->has_done);
        return false;
    }
    if (pthread_cond_init(&io->has_jobs[1], NULL) != 0) {
        pthread_cond_destroy(&io->has_jobs[0]);
        pthread_cond_destroy(&io->has_done);
        return false;
    }
    if (pthread_mutex_init(&io->lock, NULL) != 0) {
        pthread_cond_destroy(&io->has_jobs[1]);
        pthread_cond_destroy(&io->has_jobs[0]);
        pthread_cond_destroy(&io->has_done);
        return false;
    }
    return true;
}

enum imbrex_status kv_io_create(int32_t num_readers, struct kv_io **io, struct imbrex_error *err)
{
    size_t num_workers = (size_t)num_readers + 1;
    struct kv_io *created = calloc(1, sizeof(*created));
    struct worker *workers = calloc(num_workers, sizeof(*workers));
    assert(num_readers >= 1);
    if (created == NULL || workers == NULL) {
        free(created);
        free(workers);
        return error_out_of_memory(err, "the disk tier's threads", num_workers * sizeof(*workers));
    }
    if (!init_locks(created)) {
        free(created);
        free(workers);
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "the disk tier's lock: expected the operating system to give one, found "
                         "none left");
    }
    created->workers = workers;
    for (size_t i = 0; i < num_workers; i++) {
        workers[i] = (struct worker){.io = created, .kind = i == 0 ? KV_IO_WRITE : KV_IO_READ};
        int failure = pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        if (failure != 0) {
            kv_io_destroy(created);
            return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "the disk tier's threads: %s",
                             system_error_text(failure));
        }
        created->num_workers++;
    }
    *io = created;
    return IMBREX_STATUS_OK;
}

void kv_io_destroy(struct kv_io *io)
{
    if (io == NULL) {
        return;
    }
    pthread_mutex_lock(&io->lock);
    io->is_stopping = true;
    pthread_cond_broadcast(&io->has_jobs[0]);
    pthread_cond_broadcast(&io->has_jobs[1]);
    pthread_mutex_unlock(&io->lock);
    for (int32_t i = 0; i < io->num_workers; i++) {
        pthread_join(io->workers[i].thread, NULL);
    }
    pthread_mutex_destroy(&io->lock);
    pthread_cond_destroy(&io->has_jobs[0]);
    pthread_cond_destroy(&io->has_jobs[1]);
    pthread_cond_destroy(&io->has_done);
    free(io->workers);
    free(io);
}

void kv_io_submit(struct kv_io *io, struct kv_io_job *job)
{
    pthread_mutex_lock(&io->lock);
    list_append(&io->waiting[job->kind], job);
    pthread_cond_signal(&io->has_jobs[job->kind]);
    pthread_mutex_unlock(&io->lock);
}

bool kv_io_cancel(struct kv_io *io, struct kv_io_job *job)
{
    bool is_found = false;
    pthread_mutex_lock(&io->lock);
    struct job_list kept = {NULL, NULL};
    struct kv_io_job *waiting;
    while ((waiting = list_take(&io->waiting[job->kind])) != NULL) {
        if (waiting == job) {
            is_found = true;
        } else {
            list_append(&kept, waiting);
        }
    }
    io->waiting[job->kind] = kept;
    pthread_mutex_unlock(&io->lock);
    return is_found;
}

struct kv_io_job *kv_io_poll(struct kv_io *io)
{
    pthread_mutex_lock(&io->lock);
    struct kv_io_job *job = list_take(&io->done);
    pthread_mutex_unlock(&io->lock);
    return job;
}

void kv_io_wait(struct kv_io *io, int64_t timeout_ns)
{
    int64_t until_ns = clock_now_ns() + timeout_ns;
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                                   .tv_nsec = (long)(until_ns % 1000000000)};
    pthread_mutex_lock(&io->lock);
    while (io->done.first == NULL &&
           pthread_cond_timedwait(&io->has_done, &io->lock, &until) == 0) {
    }
    pthread_mutex_unlock(&io->lock);
}
