/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_io.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "kv/kv_ring.h"

#define MAX_RING_DEPTH 64
#define MAX_GROUP_JOBS 64
#define PAGE_BYTES 4096

struct job_list {
    struct kv_io_job *first, *last;
};

/* Reads of one file that follow each other. */
struct read_group {
    struct kv_io_job *jobs[MAX_GROUP_JOBS]; /* [num_jobs] */
    struct iovec parts[MAX_GROUP_JOBS];     /* the same */
    size_t num_bytes;
    int32_t num_jobs;
    int fd;
    bool is_under_way; /* the ring has it */
};

struct worker {
    struct kv_io *io;
    enum kv_io_kind kind;
    int32_t idx;               /* of its kind */
    struct kv_ring *ring;      /* of a reader; NULL: none */
    struct read_group *groups; /* of a reader: [ring_depth], or one */
    pthread_t thread;
};

struct kv_io {
    struct kv_io_options options;
    struct read_group *groups; /* of all readers */
    int ring_failure;
    pthread_mutex_t lock;                      /* of all below but the workers */
    pthread_cond_t has_jobs[KV_IO_KIND_COUNT]; /* by kind */
    pthread_cond_t has_done;                   /* on the monotonic clock */
    struct job_list waiting[KV_IO_KIND_COUNT]; /* by kind */
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

/* ---- on a worker ----------------------------------------------------------------------------- */

static void put_done(struct kv_io *io, struct kv_io_job *job)
{
    pthread_mutex_lock(&io->lock);
    list_append(&io->done, job);
    pthread_cond_signal(&io->has_done);
    pthread_mutex_unlock(&io->lock);
}

/* The next job of the worker's kind, waiting for one if it must. NULL: there is none. */
static struct kv_io_job *take_job(struct worker *worker, bool must_wait)
{
    struct kv_io *io = worker->io;
    struct kv_io_job *job;
    pthread_mutex_lock(&io->lock);
    while ((job = list_take(&io->waiting[worker->kind])) == NULL && must_wait && !io->is_stopping) {
        pthread_cond_wait(&io->has_jobs[worker->kind], &io->lock);
    }
    pthread_mutex_unlock(&io->lock);
    return job;
}

static void end_read(struct worker *worker, struct kv_io_job *job, int failure)
{
    job->end(job, failure, worker->idx);
    put_done(worker->io, job);
}

/* The next reads, waiting for one if it must, and their file. False: there are none, or none is
 * left since the file could not be opened. */
static bool begin_group(struct worker *worker, struct read_group *group, bool must_wait)
{
    struct kv_io *io = worker->io;
    const struct kv_files *files = io->options.files;
    struct job_list *waiting = &io->waiting[KV_IO_READ];
    struct kv_io_job *job = take_job(worker, must_wait);
    bool is_aligned = true;
    group->num_jobs = 0;
    group->num_bytes = 0;
    if (job == NULL) {
        return false;
    }
    const struct kv_io_read first = job->read;
    pthread_mutex_lock(&io->lock);
    while (job != NULL) {
        const struct kv_io_read *read = &job->read;
        group->jobs[group->num_jobs] = job;
        group->parts[group->num_jobs] =
            (struct iovec){.iov_base = read->bytes, .iov_len = read->num_bytes};
        group->num_jobs++;
        group->num_bytes += read->num_bytes;
        is_aligned &= (uintptr_t)read->bytes % PAGE_BYTES == 0;
        const struct kv_io_job *next = waiting->first;
        bool follows = next != NULL && next->read.file == first.file &&
                       next->read.offset == first.offset + (int64_t)group->num_bytes &&
                       group->num_bytes + next->read.num_bytes <= KV_IO_GROUP_BYTES &&
                       group->num_jobs < MAX_GROUP_JOBS;
        job = follows ? list_take(waiting) : NULL;
    }
    pthread_mutex_unlock(&io->lock);
    group->fd = io->options.open(io->options.user, first.file);
    for (int32_t i = 0; group->fd < 0 && i < group->num_jobs; i++) {
        end_read(worker, group->jobs[i], group->fd);
    }
    if (group->fd >= 0 && is_aligned) {
        files->prefer_direct(files->user, group->fd, first.offset, group->num_bytes);
    }
    return group->fd >= 0;
}

/* Of a single read the first num_read bytes are there: what is missing is read now. Of several, all
 * are, or each is read by itself, so that one that fails costs no other. */
static void end_group(struct worker *worker, struct read_group *group, int64_t num_read)
{
    const struct kv_files *files = worker->io->options.files;
    bool is_retried = num_read >= 0 || group->num_jobs > 1 || num_read == -EINTR ||
                      num_read == -EAGAIN || num_read == -EINVAL || num_read == -ECANCELED;
    int64_t num_there = group->num_jobs == 1 && num_read > 0 ? num_read : 0;
    for (int32_t i = 0; i < group->num_jobs; i++) {
        const struct kv_io_read *read = &group->jobs[i]->read;
        int failure = 0;
        if (!is_retried) {
            failure = (int)num_read;
        } else if (num_read != (int64_t)group->num_bytes) {
            failure =
                kv_files_read_all(files, group->fd, (unsigned char *)read->bytes + num_there,
                                  read->num_bytes - (size_t)num_there, read->offset + num_there);
        }
        end_read(worker, group->jobs[i], failure);
    }
    files->close(files->user, group->fd);
}

static void read_group(struct worker *worker, struct read_group *group)
{
    const struct kv_files *files = worker->io->options.files;
    int64_t num_read = 0;
    if (group->num_jobs > 1) {
        num_read = files->read_parts(files->user, group->fd, group->parts, group->num_jobs,
                                     group->jobs[0]->read.offset);
    }
    end_group(worker, group, num_read);
}

/* What the ring says of a group. */
static void end_ring_read(struct worker *worker, struct read_group *group, int64_t num_read)
{
    const struct kv_files *files = worker->io->options.files;
    group->is_under_way = false;
    if (files->settle != NULL && group->num_jobs == 1) {
        num_read = files->settle(files->user, group->parts[0].iov_base, num_read);
    }
    for (int32_t i = 0; files->settle != NULL && group->num_jobs > 1 && i < group->num_jobs; i++) {
        int64_t part_bytes = (int64_t)group->parts[i].iov_len;
        if (files->settle(files->user, group->parts[i].iov_base, part_bytes) != part_bytes) {
            num_read = 0;
        }
    }
    end_group(worker, group, num_read);
}

/* The kernel takes no more: what it has it still does, the last num_left groups of given[num_given]
 * it does not have. */
static void leave_ring(struct worker *worker, struct read_group **given, int32_t num_given,
                       int32_t num_left, int32_t num_under_way)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    struct read_group *group;
    int64_t num_read;
    for (int32_t i = num_given - num_left; i < num_given; i++) {
        given[i]->is_under_way = false;
        read_group(worker, given[i]);
        num_under_way--;
    }
    while (num_under_way > 0) {
        if ((group = kv_ring_take(worker->ring, &num_read)) != NULL) {
            end_ring_read(worker, group, num_read);
            num_under_way--;
        } else {
            (void)nanosleep(&pause, NULL);
        }
    }
    kv_ring_destroy(worker->ring);
    worker->ring = NULL;
}

static struct read_group *find_free_group(struct worker *worker)
{
    for (int32_t i = 0; i < worker->io->options.ring_depth; i++) {
        if (!worker->groups[i].is_under_way) {
            return &worker->groups[i];
        }
    }
    return NULL;
}

/* Until the end, or until the ring fails. */
static void work_with_ring(struct worker *worker)
{
    struct read_group *given[MAX_RING_DEPTH]; /* [num_given] since the last submit */
    struct read_group *group;
    int32_t num_under_way = 0, num_left = 0;
    int64_t num_read;
    for (;;) {
        int32_t num_given = 0;
        while ((group = find_free_group(worker)) != NULL) {
            if (begin_group(worker, group, num_under_way == 0)) {
                kv_ring_add(worker->ring, group->fd, group->parts, group->num_jobs,
                            group->jobs[0]->read.offset, group);
                group->is_under_way = true;
                given[num_given] = group;
                num_given++;
                num_under_way++;
            } else if (group->num_jobs == 0) {
                break;
            }
        }
        if (num_under_way == 0) {
            return;
        }
        if (kv_ring_submit(worker->ring, 1, &num_left) != 0) {
            leave_ring(worker, given, num_given, num_left, num_under_way);
            return;
        }
        while ((group = kv_ring_take(worker->ring, &num_read)) != NULL) {
            end_ring_read(worker, group, num_read);
            num_under_way--;
        }
    }
}

/* Until the end. */
static void read_alone(struct worker *worker)
{
    struct read_group *group = &worker->groups[0];
    do {
        if (begin_group(worker, group, true)) {
            read_group(worker, group);
        }
    } while (group->num_jobs > 0);
}

static void *work(void *arg)
{
    struct worker *worker = arg;
    struct kv_io_job *job;
    if (worker->kind == KV_IO_READ) {
        if (worker->ring != NULL) {
            work_with_ring(worker);
        }
        read_alone(worker);
        return NULL;
    }
    while ((job = take_job(worker, true)) != NULL) {
        job->run(job, worker->idx);
        put_done(worker->io, job);
    }
    return NULL;
}

/* ---- create and destroy ---------------------------------------------------------------------- */

static void destroy_locks(struct kv_io *io, int32_t num_conditions)
{
    pthread_cond_destroy(&io->has_done);
    for (int32_t i = 0; i < num_conditions; i++) {
        pthread_cond_destroy(&io->has_jobs[i]);
    }
}

/* False if the operating system has none left; then nothing is left to destroy. */
static bool init_locks(struct kv_io *io)
{
    pthread_condattr_t attributes;
    int32_t num_conditions = 0;
    if (pthread_condattr_init(&attributes) != 0) {
        return false;
    }
    bool is_good = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
                   pthread_cond_init(&io->has_done, &attributes) == 0;
    pthread_condattr_destroy(&attributes);
    if (!is_good) {
        return false;
    }
    while (num_conditions < KV_IO_KIND_COUNT &&
           pthread_cond_init(&io->has_jobs[num_conditions], NULL) == 0) {
        num_conditions++;
    }
    if (num_conditions < KV_IO_KIND_COUNT || pthread_mutex_init(&io->lock, NULL) != 0) {
        destroy_locks(io, num_conditions);
        return false;
    }
    return true;
}

/* All readers have a ring, or none: what one is refused, the next one is too. */
static void create_rings(struct kv_io *io, struct worker *workers, int32_t num_readers)
{
    io->ring_failure = io->options.ring_depth > 0 ? 0 : -ENOTSUP;
    for (int32_t i = 0; i < num_readers && io->ring_failure == 0; i++) {
        io->ring_failure = kv_ring_create(io->options.ring_depth, &workers[i].ring);
    }
    for (int32_t i = 0; i < num_readers && io->ring_failure != 0; i++) {
        kv_ring_destroy(workers[i].ring);
        workers[i].ring = NULL;
    }
}

enum imbrex_status kv_io_create(const struct kv_io_options *options, struct kv_io **io,
                                struct imbrex_error *err)
{
    int32_t nums[KV_IO_KIND_COUNT];
    memcpy(nums, options->num_workers, sizeof(nums));
    int32_t num_workers = nums[KV_IO_READ] + nums[KV_IO_WRITE] + nums[KV_IO_PACK];
    struct kv_io *created = calloc(1, sizeof(*created));
    struct worker *workers = calloc((size_t)num_workers, sizeof(*workers));
    int32_t num_groups = options->ring_depth > 0 ? options->ring_depth : 1; /* of a reader */
    struct read_group *groups = calloc((size_t)(num_groups * nums[KV_IO_READ]), sizeof(*groups));
    assert(nums[KV_IO_READ] >= 1 && nums[KV_IO_WRITE] == 1);
    assert(options->num_ring_readers >= 1 && options->num_ring_readers <= nums[KV_IO_READ]);
    assert(options->ring_depth <= MAX_RING_DEPTH);
    if (created == NULL || workers == NULL || groups == NULL) {
        free(created);
        free(workers);
        free(groups);
        return error_out_of_memory(err, "the disk tier's threads",
                                   (size_t)num_workers * sizeof(*workers));
    }
    if (!init_locks(created)) {
        free(created);
        free(workers);
        free(groups);
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "the disk tier's lock: expected the operating system to give one, found "
                         "none left");
    }
    created->options = *options;
    created->groups = groups;
    created->workers = workers;
    create_rings(created, workers, options->num_ring_readers);
    if (created->ring_failure == 0) {
        num_workers -= nums[KV_IO_READ] - options->num_ring_readers;
        nums[KV_IO_READ] = options->num_ring_readers;
    }
    for (int32_t kind = 0, i = 0; kind < KV_IO_KIND_COUNT; kind++) {
        for (int32_t idx = 0; idx < nums[kind]; idx++, i++) {
            workers[i].io = created;
            workers[i].kind = (enum kv_io_kind)kind;
            workers[i].idx = idx;
            workers[i].groups = kind == KV_IO_READ ? &groups[idx * num_groups] : NULL;
        }
    }
    for (int32_t i = 0; i < num_workers; i++) {
        int failure = pthread_create(&workers[i].thread, NULL, work, &workers[i]);
        if (failure != 0) {
            for (int32_t j = i; j < num_workers; j++) {
                kv_ring_destroy(workers[j].ring);
            }
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
    for (int32_t kind = 0; kind < KV_IO_KIND_COUNT; kind++) {
        pthread_cond_broadcast(&io->has_jobs[kind]);
    }
    pthread_mutex_unlock(&io->lock);
    for (int32_t i = 0; i < io->num_workers; i++) {
        pthread_join(io->workers[i].thread, NULL);
        kv_ring_destroy(io->workers[i].ring);
    }
    pthread_mutex_destroy(&io->lock);
    destroy_locks(io, KV_IO_KIND_COUNT);
    free(io->workers);
    free(io->groups);
    free(io);
}

int kv_io_ring_failure(const struct kv_io *io)
{
    return io->ring_failure;
}

/* ---- the user's thread ----------------------------------------------------------------------- */

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
