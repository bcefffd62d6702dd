/* SPDX-License-Identifier: Apache-2.0 */
/* All bookkeeping is the user's thread's; what workers do says kv_disk_job.h.
 *
 * A put that is packed first gets its place only when it is known how much it takes:
 *
 *   waits for a buffer -> packed by a worker -> waits for a place -> written by the writer
 *
 * kv_disk_poll moves it from one to the next.
 *
 * Of larger folders the oldest segment is cleaned before its room is needed: what was got since it
 * was written is moved to the segment that puts go to, all else is dropped, then the file goes.
 * Where that is not done in time, the oldest segment goes as it is. */
#include "kv/kv_disk.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv_codec.h"
#include "kv/kv_disk_job.h"
#include "kv/kv_table.h"

#define DEFAULT_SEGMENT_BYTES ((size_t)32 << 20)
#define MAX_BLOCKS (1 << 22) /* what a table of them costs is still small beside the disk */
#define FINISH_WAIT_NS INT64_C(1000000000)
/* A disk that had no room for a segment is asked again so many puts later. */
#define NUM_REFUSALS 256
/* Jobs that puts and gets leave to others: a put may need a segment, and that one the place of
 * another. */
#define NUM_SERVICE_JOBS 4
#define NUM_JOBS (KV_DISK_MAX_JOBS + NUM_SERVICE_JOBS)
/* As many reads at once as a disk needs to be busy; with rings the kernel does several of each. */
#define DEFAULT_READERS 8
#define MAX_RING_READERS 4
/* Reads of one ring: the next one is under way while the last one's blocks are looked at. More of
 * them are smaller, since less waits that could be put together. */
#define RING_DEPTH 2
/* With fewer segments, one that is empty ahead of time is too much of the whole. */
#define MIN_CLEANED_SEGMENTS 8

/* Jobs in the order in which they came. */
struct job_queue {
    int32_t items[NUM_JOBS]; /* [num_items] from first on, around */
    int32_t first, num_items;
};

struct segment {
    uint32_t number;
    int32_t num_taken;  /* places that puts were given */
    int32_t num_valid;  /* of these, those that can be found */
    int32_t num_jobs;   /* that name it */
    uint32_t next_page; /* that a put gets */
    uint64_t last_use;
    bool is_used; /* else the place is free */
    bool is_dead; /* could not be created: goes with its last job */
};

/* A file that counts, but has nothing for us. */
struct foreign_segment {
    uint32_t number;
    int64_t num_bytes;
};

struct kv_disk {
    struct kv_disk_options options;
    struct kv_io *io;
    struct kv_disk_job jobs[NUM_JOBS];
    int32_t free_jobs[NUM_JOBS]; /* [num_free_jobs] stack */
    int32_t num_free_jobs;
    struct job_queue to_pack, to_place, refused; /* puts that no worker has */

    struct kv_disk_work work;                       /* that the workers see */
    bool has_packed;                                /* some blocks are, or will be */
    int32_t free_buffers[KV_DISK_WORK_MAX_BUFFERS]; /* [num_free_buffers] stack */
    int32_t num_free_buffers;

    struct segment *segments; /* [max_segments] */
    int32_t max_segments;
    int32_t current;                  /* that puts go to; -1: none */
    struct kv_key *keys;              /* [max_segments * num_slots] */
    struct kv_segment_entry *entries; /* the same; those in the table count */
    bool *was_got;                    /* the same: since it was written there */
    int32_t cleaned;                  /* the segment that is; -1: none */
    int32_t clean_next, num_kept;     /* its slots before are done; blocks that are moved */
    bool is_closing;
    struct kv_table table;
    struct foreign_segment *foreign; /* [num_foreign], the oldest first; those from first_foreign on
                                      * are there */
    int32_t num_foreign, first_foreign;
    uint32_t *strange; /* [metrics.num_strange] numbers of files that are not ours to touch */
    uint32_t next_number;
    uint64_t num_uses;
    int32_t num_refusals; /* puts that are refused before the disk is asked again */
    struct kv_disk_metrics metrics;
};

static int32_t slot_of(const struct kv_disk *disk, int32_t segment_idx, int32_t slot_idx)
{
    return segment_idx * disk->work.layout.num_slots + slot_idx;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static void queue_append(struct kv_disk *disk, struct job_queue *queue,
                         const struct kv_disk_job *job)
{
    queue->items[(queue->first + queue->num_items) % NUM_JOBS] = (int32_t)(job - disk->jobs);
    queue->num_items++;
}

static struct kv_disk_job *queue_take(struct kv_disk *disk, struct job_queue *queue)
{
    struct kv_disk_job *job = &disk->jobs[queue->items[queue->first]];
    queue->first = (queue->first + 1) % NUM_JOBS;
    queue->num_items--;
    return job;
}

static void set_segment(struct kv_disk *disk, struct kv_disk_job *job, int32_t segment_idx)
{
    job->segment_idx = segment_idx;
    job->number = disk->segments[segment_idx].number;
    disk->segments[segment_idx].num_jobs++;
}

/* Without a segment. */
static struct kv_disk_job *take_job(struct kv_disk *disk, enum kv_disk_job_kind kind)
{
    assert(disk->num_free_jobs > 0);
    disk->num_free_jobs--;
    struct kv_disk_job *job = &disk->jobs[disk->free_jobs[disk->num_free_jobs]];
    *job = (struct kv_disk_job){
        .io = {.run = kv_disk_job_run,
               .end = kv_disk_job_end,
               .kind = kind == KV_DISK_JOB_GET    ? KV_IO_READ
                       : kind == KV_DISK_JOB_PACK ? KV_IO_PACK
                                                  : KV_IO_WRITE},
        .kind = kind,
        .work = &disk->work,
        .segment_idx = -1,
        .from_idx = -1,
        .buffer_idx = -1,
    };
    return job;
}

static void release_buffer(struct kv_disk *disk, struct kv_disk_job *job)
{
    if (job->buffer_idx >= 0) {
        disk->free_buffers[disk->num_free_buffers] = job->buffer_idx;
        disk->num_free_buffers++;
        job->buffer_idx = -1;
    }
}

static void release_job(struct kv_disk *disk, struct kv_disk_job *job)
{
    if (job->segment_idx >= 0) {
        struct segment *segment = &disk->segments[job->segment_idx];
        segment->num_jobs--;
        if (segment->is_dead && segment->num_jobs == 0) {
            *segment = (struct segment){0};
        }
    }
    if (job->from_idx >= 0) {
        disk->segments[job->from_idx].num_jobs--;
    }
    release_buffer(disk, job);
    job->kind = KV_DISK_JOB_FREE;
    disk->free_jobs[disk->num_free_jobs] = (int32_t)(job - disk->jobs);
    disk->num_free_jobs++;
}

bool kv_disk_is_ready(const struct kv_disk *disk)
{
    return disk->num_free_jobs > NUM_SERVICE_JOBS;
}

int32_t kv_disk_num_jobs(const struct kv_disk *disk)
{
    return NUM_JOBS - disk->num_free_jobs;
}

/* ---- segments come and go -------------------------------------------------------------------- */

/* While the tier is opened there are no workers, and nobody waits. */
static void remove_file(struct kv_disk *disk, uint32_t number)
{
    if (disk->io != NULL) {
        struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_REMOVE);
        job->number = number;
        kv_io_submit(disk->io, &job->io);
        return;
    }
    char path[KV_DISK_WORK_PATH_BYTES];
    const struct kv_files *files = disk->work.files;
    if (kv_disk_work_path(&disk->work, number, false, path) != 0 ||
        files->remove(files->user, path) != 0) {
        disk->metrics.num_remove_faults++;
    }
}

static void drop_block(struct kv_disk *disk, int32_t segment_idx, int32_t block)
{
    kv_table_remove(&disk->table, block);
    disk->segments[segment_idx].num_valid--;
}

static void add_block(struct kv_disk *disk, int32_t segment_idx, int32_t slot_idx,
                      const struct kv_segment_entry *entry)
{
    int32_t block = slot_of(disk, segment_idx, slot_idx);
    disk->keys[block] = entry->key;
    disk->entries[block] = *entry;
    disk->was_got[block] = false;
    kv_table_add(&disk->table, block);
    disk->segments[segment_idx].num_valid++;
}

/* The place becomes free, the file goes. Nothing of it is in the table any more. */
static void remove_segment(struct kv_disk *disk, int32_t segment_idx)
{
    struct segment *segment = &disk->segments[segment_idx];
    assert(segment->num_valid == 0 && segment->num_jobs == 0);
    disk->metrics.num_bytes -= kv_segment_file_bytes(&disk->work.layout);
    disk->metrics.num_segments--;
    remove_file(disk, segment->number);
    *segment = (struct segment){0};
    if (segment_idx == disk->cleaned) {
        disk->cleaned = -1;
    }
}

/* Which of the segments goes next; -1: none may. */
static int32_t find_oldest(const struct kv_disk *disk)
{
    int32_t oldest = -1;
    for (int32_t i = 0; i < disk->max_segments; i++) {
        const struct segment *segment = &disk->segments[i];
        if (segment->is_used && i != disk->current && segment->num_jobs == 0 &&
            (oldest == -1 || segment->last_use < disk->segments[oldest].last_use)) {
            oldest = i;
        }
    }
    return oldest;
}

/* One segment less. False if none may go. */
static bool evict(struct kv_disk *disk)
{
    if (disk->first_foreign < disk->num_foreign) {
        const struct foreign_segment *foreign = &disk->foreign[disk->first_foreign];
        disk->metrics.num_bytes -= foreign->num_bytes;
        disk->metrics.num_foreign_bytes -= foreign->num_bytes;
        remove_file(disk, foreign->number);
        disk->first_foreign++;
        return true;
    }
    int32_t oldest = find_oldest(disk);
    if (oldest == -1) {
        return false;
    }
    struct segment *segment = &disk->segments[oldest];
    for (int32_t i = 0; i < segment->num_taken; i++) {
        int32_t block = slot_of(disk, oldest, i);
        if (kv_table_find(&disk->table, &disk->keys[block]) == block) {
            drop_block(disk, oldest, block);
            disk->metrics.num_evicted++;
        }
    }
    remove_segment(disk, oldest);
    return true;
}

static int32_t find_free_place(const struct kv_disk *disk)
{
    for (int32_t i = 0; i < disk->max_segments; i++) {
        if (!disk->segments[i].is_used) {
            return i;
        }
    }
    return -1;
}

/* Whether a file has that number, as far as is known. */
static bool is_number_taken(const struct kv_disk *disk, uint32_t number)
{
    for (int64_t i = 0; i < disk->metrics.num_strange; i++) {
        if (disk->strange[i] == number) {
            return true;
        }
    }
    for (int32_t i = disk->first_foreign; i < disk->num_foreign; i++) {
        if (disk->foreign[i].number == number) {
            return true;
        }
    }
    for (int32_t i = 0; i < disk->max_segments; i++) {
        if (disk->segments[i].is_used && disk->segments[i].number == number) {
            return true;
        }
    }
    return false;
}

/* A segment for the next puts. */
static bool begin_segment(struct kv_disk *disk)
{
    int64_t file_bytes = kv_segment_file_bytes(&disk->work.layout);
    int32_t place;
    if (disk->num_refusals > 0) {
        disk->num_refusals--;
        disk->metrics.num_left_out++;
        return false;
    }
    /* Each round takes a job, and so does what follows. */
    while ((place = find_free_place(disk)) == -1 ||
           disk->metrics.num_bytes + file_bytes > (int64_t)disk->options.max_bytes) {
        if (disk->num_free_jobs < 2 || !evict(disk)) {
            return false;
        }
    }
    if (disk->num_free_jobs == 0) {
        return false;
    }
    while (is_number_taken(disk, disk->next_number)) {
        disk->next_number++;
    }
    disk->segments[place] = (struct segment){.number = disk->next_number,
                                             .next_page = kv_segment_first_page(&disk->work.layout),
                                             .is_used = true};
    disk->next_number++;
    disk->current = place;
    disk->metrics.num_bytes += file_bytes;
    disk->metrics.num_segments++;
    struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_CREATE);
    set_segment(disk, job, place);
    kv_io_submit(disk->io, &job->io);
    return true;
}

/* ---- put, get -------------------------------------------------------------------------------- */

/* -1: not there. */
static int32_t find(const struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids)
{
    int32_t block = kv_table_find(&disk->table, key);
    if (block != -1 && memcmp(disk->entries[block].token_ids, token_ids,
                              sizeof(disk->entries[block].token_ids)) != 0) {
        return -1;
    }
    return block;
}

bool kv_disk_has(const struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids)
{
    return find(disk, key, token_ids) != -1;
}

static uint32_t end_page(const struct kv_disk *disk)
{
    return kv_segment_num_pages((size_t)kv_segment_file_bytes(&disk->work.layout));
}

/* Whether the segment that puts go to takes one more. */
static bool has_place(const struct kv_disk *disk, size_t stored_bytes)
{
    if (disk->current == -1) {
        return false;
    }
    const struct segment *current = &disk->segments[disk->current];
    return current->num_taken < disk->work.layout.num_slots &&
           end_page(disk) - current->next_page >= kv_segment_num_pages(stored_bytes);
}

/* Gives a put or a move the next place and hands it to the writer. */
static void take_place(struct kv_disk *disk, struct kv_disk_job *job)
{
    struct segment *segment = &disk->segments[disk->current];
    set_segment(disk, job, disk->current);
    job->slot_idx = segment->num_taken;
    job->entry.first_page = segment->next_page;
    segment->num_taken++;
    segment->next_page += kv_segment_num_pages(job->entry.stored_bytes);
    segment->last_use = ++disk->num_uses;
    kv_io_submit(disk->io, &job->io);
}

/* False: there is no place for it. */
static bool place(struct kv_disk *disk, struct kv_disk_job *job)
{
    if (!has_place(disk, job->entry.stored_bytes)) {
        disk->current = -1;
        if (!begin_segment(disk)) {
            disk->metrics.num_refused++;
            return false;
        }
    }
    take_place(disk, job);
    return true;
}

/* Whether the room of the oldest segment will be needed soon. */
static bool must_clean(const struct kv_disk *disk)
{
    if (disk->max_segments < MIN_CLEANED_SEGMENTS || disk->is_closing || disk->current == -1 ||
        disk->first_foreign < disk->num_foreign) {
        return false;
    }
    uint32_t first_page = kv_segment_first_page(&disk->work.layout);
    bool is_half_full =
        disk->segments[disk->current].next_page - first_page >= (end_page(disk) - first_page) / 2;
    int64_t next_bytes = disk->metrics.num_bytes + kv_segment_file_bytes(&disk->work.layout);
    return is_half_full && (disk->metrics.num_segments == disk->max_segments ||
                            next_bytes > (int64_t)disk->options.max_bytes);
}

/* At most a quarter of a segment is kept, so that puts always get on. */
static bool is_kept(const struct kv_disk *disk, int32_t block)
{
    return disk->was_got[block] && disk->num_kept < (disk->work.layout.num_blocks + 3) / 4 &&
           has_place(disk, disk->entries[block].stored_bytes);
}

static void clean_some(struct kv_disk *disk)
{
    if (disk->cleaned == -1 && must_clean(disk)) {
        disk->cleaned = find_oldest(disk);
        disk->clean_next = 0;
        disk->num_kept = 0;
    }
    if (disk->cleaned == -1) {
        return;
    }
    const struct segment *segment = &disk->segments[disk->cleaned];
    for (; disk->clean_next < segment->num_taken; disk->clean_next++) {
        int32_t block = slot_of(disk, disk->cleaned, disk->clean_next);
        if (kv_table_find(&disk->table, &disk->keys[block]) != block) {
            continue;
        }
        if (!is_kept(disk, block)) {
            drop_block(disk, disk->cleaned, block);
            disk->metrics.num_evicted++;
            continue;
        }
        if (!kv_disk_is_ready(disk)) {
            return;
        }
        struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_MOVE);
        job->entry = disk->entries[block];
        job->from_idx = disk->cleaned;
        job->from_number = segment->number;
        job->from_page = job->entry.first_page;
        job->from_slot_idx = disk->clean_next;
        disk->segments[disk->cleaned].num_jobs++;
        disk->num_kept++;
        take_place(disk, job);
    }
    if (segment->num_jobs == 0 && disk->num_free_jobs > 0) {
        remove_segment(disk, disk->cleaned);
    }
}

/* Moves puts on that wait for a buffer or for a place. */
static void move_puts(struct kv_disk *disk)
{
    /* With fewer free jobs a segment could not be made where it can be a moment later. */
    while (disk->to_place.num_items > 0 && disk->num_free_jobs >= 2) {
        struct kv_disk_job *job = queue_take(disk, &disk->to_place);
        if (!place(disk, job)) {
            queue_append(disk, &disk->refused, job);
        }
    }
    while (disk->to_pack.num_items > 0 && disk->num_free_buffers > 0) {
        struct kv_disk_job *job = queue_take(disk, &disk->to_pack);
        disk->num_free_buffers--;
        job->buffer_idx = disk->free_buffers[disk->num_free_buffers];
        kv_io_submit(disk->io, &job->io);
    }
}

bool kv_disk_put(struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids,
                 const void *block, int32_t tag)
{
    bool is_packed = disk->options.zstd_level > 0;
    if (!kv_disk_is_ready(disk)) {
        disk->metrics.num_refused++;
        return false;
    }
    struct kv_disk_job *job = take_job(disk, is_packed ? KV_DISK_JOB_PACK : KV_DISK_JOB_PUT);
    job->entry = (struct kv_segment_entry){.key = *key,
                                           .stored_bytes = (uint32_t)disk->work.layout.block_bytes};
    memcpy(job->entry.token_ids, token_ids, sizeof(job->entry.token_ids));
    job->block = (void *)(uintptr_t)block; /* a put reads it only */
    job->tag = tag;
    if (is_packed) {
        queue_append(disk, &disk->to_pack, job);
        move_puts(disk);
    } else if (!place(disk, job)) {
        release_job(disk, job);
        return false;
    }
    return true;
}

bool kv_disk_get(struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids,
                 void *block, int32_t tag)
{
    int32_t found = find(disk, key, token_ids);
    if (found == -1 || !kv_disk_is_ready(disk)) {
        return false;
    }
    int32_t segment_idx = found / disk->work.layout.num_slots;
    struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_GET);
    set_segment(disk, job, segment_idx);
    disk->segments[segment_idx].last_use = ++disk->num_uses;
    disk->was_got[found] = true;
    job->slot_idx = found % disk->work.layout.num_slots;
    job->entry = disk->entries[found];
    job->block = block;
    job->tag = tag;
    job->io.read = (struct kv_io_read){.file = job->number,
                                       .offset = kv_segment_block_offset(&job->entry),
                                       .bytes = block,
                                       .num_bytes = kv_segment_page_bytes(&job->entry)};
    kv_io_submit(disk->io, &job->io);
    return true;
}

bool kv_disk_cancel_get(struct kv_disk *disk, int32_t tag)
{
    for (int32_t i = 0; i < NUM_JOBS; i++) {
        struct kv_disk_job *job = &disk->jobs[i];
        if (job->kind == KV_DISK_JOB_GET && job->tag == tag) {
            if (!kv_io_cancel(disk->io, &job->io)) {
                return false;
            }
            release_job(disk, job);
            return true;
        }
    }
    return false;
}

/* ---- results --------------------------------------------------------------------------------- */

static void count_write_failure(struct kv_disk *disk, const struct kv_disk_job *job)
{
    if (job->failure == -ENOENT && disk->segments[job->segment_idx].is_dead) {
        disk->metrics.num_left_out++;
    } else {
        disk->metrics.num_write_faults++;
        disk->metrics.write_failure = -job->failure;
    }
}

static void end_put(struct kv_disk *disk, const struct kv_disk_job *job)
{
    if (job->failure != 0) {
        count_write_failure(disk, job);
        return;
    }
    disk->metrics.num_put++;
    disk->metrics.num_put_bytes += job->entry.stored_bytes;
    if (kv_table_find(&disk->table, &job->entry.key) == -1) {
        add_block(disk, job->segment_idx, job->slot_idx, &job->entry);
    }
}

static void count_read_failure(struct kv_disk *disk, int failure)
{
    if (failure == -EBADMSG || failure == -ENODATA) {
        disk->metrics.num_damaged++;
    } else {
        disk->metrics.num_read_faults++;
        disk->metrics.read_failure = -failure;
    }
}

static void end_get(struct kv_disk *disk, const struct kv_disk_job *job)
{
    if (job->failure == 0) {
        disk->metrics.num_got++;
        return;
    }
    int32_t block = slot_of(disk, job->segment_idx, job->slot_idx);
    if (kv_table_find(&disk->table, &job->entry.key) == block) {
        drop_block(disk, job->segment_idx, block);
    }
    count_read_failure(disk, job->failure);
}

/* Before, the block is found where it was; afterwards in its new place, or nowhere. */
static void end_move(struct kv_disk *disk, const struct kv_disk_job *job)
{
    int32_t from = slot_of(disk, job->from_idx, job->from_slot_idx);
    if (kv_table_find(&disk->table, &job->entry.key) != from) {
        return; /* damaged, as a get has found meanwhile */
    }
    drop_block(disk, job->from_idx, from);
    if (job->failure == 0) {
        add_block(disk, job->segment_idx, job->slot_idx, &job->entry);
        disk->metrics.num_moved++;
    } else if (job->is_sealed) {
        count_write_failure(disk, job);
    } else {
        count_read_failure(disk, job->failure);
    }
}

static void end_create(struct kv_disk *disk, const struct kv_disk_job *job)
{
    if (job->failure == 0) {
        return;
    }
    disk->segments[job->segment_idx].is_dead = true;
    disk->metrics.num_bytes -= kv_segment_file_bytes(&disk->work.layout);
    disk->metrics.num_segments--;
    disk->metrics.num_segment_faults++;
    disk->metrics.segment_failure = -job->failure;
    disk->num_refusals = NUM_REFUSALS;
    if (disk->current == job->segment_idx) {
        disk->current = -1;
    }
}

static void end_job(struct kv_disk *disk, struct kv_disk_job *job)
{
    switch (job->kind) {
    case KV_DISK_JOB_PUT:
        end_put(disk, job);
        break;
    case KV_DISK_JOB_GET:
        end_get(disk, job);
        break;
    case KV_DISK_JOB_CREATE:
        end_create(disk, job);
        break;
    case KV_DISK_JOB_MOVE:
        end_move(disk, job);
        break;
    case KV_DISK_JOB_REMOVE:
        if (job->failure != 0) {
            disk->metrics.num_remove_faults++;
            disk->metrics.segment_failure = -job->failure;
        }
        break;
    case KV_DISK_JOB_PACK:
    case KV_DISK_JOB_FREE:
        break;
    }
}

/* The writer's turn comes next. */
static void end_pack(struct kv_disk *disk, struct kv_disk_job *job)
{
    job->kind = KV_DISK_JOB_PUT;
    job->io.kind = KV_IO_WRITE;
    if (job->entry.stored_bytes == disk->work.layout.block_bytes) {
        release_buffer(disk, job);
    }
    queue_append(disk, &disk->to_place, job);
}

bool kv_disk_poll(struct kv_disk *disk, struct kv_disk_result *result)
{
    for (;;) {
        move_puts(disk);
        if (disk->refused.num_items > 0) {
            struct kv_disk_job *job = queue_take(disk, &disk->refused);
            *result = (struct kv_disk_result){.tag = job->tag};
            release_job(disk, job);
            return true;
        }
        clean_some(disk);
        struct kv_disk_job *job = (struct kv_disk_job *)kv_io_poll(disk->io);
        if (job == NULL) {
            return false;
        }
        if (job->kind == KV_DISK_JOB_PACK) {
            end_pack(disk, job);
            continue;
        }
        bool is_block = job->kind == KV_DISK_JOB_PUT || job->kind == KV_DISK_JOB_GET;
        *result = (struct kv_disk_result){
            .tag = job->tag, .is_get = job->kind == KV_DISK_JOB_GET, .is_good = job->failure == 0};
        end_job(disk, job);
        release_job(disk, job);
        if (is_block) {
            move_puts(disk);
            return true;
        }
    }
}

void kv_disk_wait(struct kv_disk *disk, int64_t timeout_ns)
{
    kv_io_wait(disk->io, timeout_ns);
}

/* ---- open ------------------------------------------------------------------------------------ */

/* A file that is named like a segment, or like one that was never finished. */
struct listed {
    uint32_t number;
    bool is_partial;
};

/* Those in the folder, in no order. */
static enum imbrex_status list_segments(const struct kv_disk *disk, struct listed **files,
                                        int32_t *num_files, struct imbrex_error *err)
{
    const char *folder_path = disk->work.folder;
    struct listed *listed = NULL;
    int32_t num_listed = 0, max_listed = 0;
    DIR *folder = opendir(folder_path);
    if (folder == NULL) {
        return error_set(err, IMBREX_STATUS_IO, "KV folder %.200s: it cannot be read: %s",
                         folder_path, system_error_text(errno));
    }
    for (const struct dirent *item; (item = readdir(folder)) != NULL;) {
        struct listed found;
        if (!kv_segment_parse_name(item->d_name, &found.number, &found.is_partial)) {
            continue;
        }
        if (num_listed == max_listed) {
            max_listed = max_listed == 0 ? 64 : 2 * max_listed;
            struct listed *grown = realloc(listed, (size_t)max_listed * sizeof(*grown));
            if (grown == NULL) {
                free(listed);
                (void)closedir(folder);
                return error_out_of_memory(err, "the list of KV segments",
                                           (size_t)max_listed * sizeof(*grown));
            }
            listed = grown;
        }
        listed[num_listed] = found;
        num_listed++;
    }
    (void)closedir(folder);
    *files = listed;
    *num_files = num_listed;
    return IMBREX_STATUS_OK;
}

static int compare_listed(const void *a, const void *b)
{
    const struct listed *x = a, *y = b;
    if (x->number != y->number) {
        return x->number < y->number ? -1 : 1;
    }
    return x->is_partial - y->is_partial;
}

/* Takes a segment of ours into the index: what it has can be found, what it has not can be filled.
 */
static void adopt(struct kv_disk *disk, uint32_t number, const struct kv_segment_entry *entries)
{
    static const struct kv_segment_entry empty;
    int32_t place;
    while ((place = find_free_place(disk)) == -1) {
        (void)evict(disk);
    }
    struct segment *segment = &disk->segments[place];
    *segment = (struct segment){.number = number,
                                .next_page = kv_segment_first_page(&disk->work.layout),
                                .last_use = ++disk->num_uses,
                                .is_used = true};
    disk->current = place;
    disk->metrics.num_bytes += kv_segment_file_bytes(&disk->work.layout);
    disk->metrics.num_segments++;
    for (int32_t i = 0; i < disk->work.layout.num_slots; i++) {
        if (memcmp(&entries[i], &empty, sizeof(empty)) == 0) {
            continue;
        }
        segment->num_taken = i + 1;
        uint32_t end_page = entries[i].first_page + kv_segment_num_pages(entries[i].stored_bytes);
        segment->next_page = end_page > segment->next_page ? end_page : segment->next_page;
        bool is_packed = entries[i].stored_bytes < disk->work.layout.block_bytes;
        if (is_packed && !kv_codec_is_available()) {
            continue;
        }
        disk->has_packed |= is_packed;
        /* Moved, and the process ended before the older segment went: that one goes first. */
        int32_t older = kv_table_find(&disk->table, &entries[i].key);
        if (older != -1) {
            drop_block(disk, older / disk->work.layout.num_slots, older);
        }
        add_block(disk, place, i, &entries[i]);
    }
}

/* Not ours to touch: whatever it is, it stays. */
static void note_strange(struct kv_disk *disk, const struct listed *file, int failure)
{
    if (disk->metrics.num_strange == 0) {
        kv_segment_name(file->number, file->is_partial, disk->metrics.strange_name);
        disk->metrics.strange_failure = -failure;
    }
    disk->strange[disk->metrics.num_strange] = file->number;
    disk->metrics.num_strange++;
}

/* entries: [num_slots], written. */
static void scan_file(struct kv_disk *disk, const struct listed *file,
                      struct kv_segment_entry *entries)
{
    const struct kv_files *files = disk->work.files;
    char path[KV_DISK_WORK_PATH_BYTES];
    enum kv_segment_kind kind = KV_SEGMENT_UNKNOWN;
    int64_t num_bytes = 0;
    int32_t num_broken = 0;
    int failure = kv_disk_work_path(&disk->work, file->number, file->is_partial, path);
    if (failure == 0) {
        failure = kv_segment_scan(files, path, &disk->work.layout, &kind, entries, &num_bytes,
                                  &num_broken);
    }
    /* What ended before it had its name. */
    if (file->is_partial && kind != KV_SEGMENT_UNKNOWN) {
        (void)files->remove(files->user, path);
        return;
    }
    disk->next_number = file->number + 1;
    if (kind == KV_SEGMENT_UNKNOWN || kind == KV_SEGMENT_UNWRITTEN) {
        note_strange(disk, file, failure);
        return;
    }
    disk->metrics.num_damaged += (uint64_t)num_broken;
    if (failure == 0 && kind == KV_SEGMENT_OURS) {
        adopt(disk, file->number, entries);
        return;
    }
    if (failure != 0) {
        disk->metrics.num_read_faults++;
        disk->metrics.read_failure = -failure;
    }
    disk->foreign[disk->num_foreign] =
        (struct foreign_segment){.number = file->number, .num_bytes = num_bytes};
    disk->num_foreign++;
    disk->metrics.num_bytes += num_bytes;
    disk->metrics.num_foreign_bytes += num_bytes;
}

static enum imbrex_status scan(struct kv_disk *disk, struct imbrex_error *err)
{
    struct listed *files = NULL;
    int32_t num_files = 0;
    size_t table_bytes = (size_t)disk->work.layout.num_slots * sizeof(struct kv_segment_entry);
    TRY(list_segments(disk, &files, &num_files, err));
    struct kv_segment_entry *entries = malloc(table_bytes);
    disk->foreign = calloc((size_t)num_files + 1, sizeof(*disk->foreign));
    disk->strange = calloc((size_t)num_files + 1, sizeof(*disk->strange));
    if (entries == NULL || disk->foreign == NULL || disk->strange == NULL) {
        free(files);
        free(entries);
        return error_out_of_memory(err, "the disk tier's index", table_bytes);
    }
    if (num_files > 0) {
        qsort(files, (size_t)num_files, sizeof(*files), compare_listed);
    }
    for (int32_t i = 0; i < num_files; i++) {
        scan_file(disk, &files[i], entries);
    }
    free(files);
    free(entries);
    while (disk->metrics.num_bytes > (int64_t)disk->options.max_bytes && evict(disk)) {
    }
    return IMBREX_STATUS_OK;
}

size_t kv_disk_min_bytes(size_t block_bytes, size_t segment_bytes)
{
    static const struct kv_key nobody;
    struct kv_segment_layout layout = kv_segment_layout(
        block_bytes, segment_bytes != 0 ? segment_bytes : DEFAULT_SEGMENT_BYTES, &nobody);
    return 2 * (size_t)kv_segment_file_bytes(&layout);
}

static enum imbrex_status create_index(struct kv_disk *disk, struct imbrex_error *err)
{
    size_t num_blocks = (size_t)disk->max_segments * (size_t)disk->work.layout.num_slots;
    disk->segments = calloc((size_t)disk->max_segments, sizeof(*disk->segments));
    disk->keys = calloc(num_blocks, sizeof(*disk->keys));
    disk->entries = calloc(num_blocks, sizeof(*disk->entries));
    disk->was_got = calloc(num_blocks, sizeof(*disk->was_got));
    if (disk->segments == NULL || disk->keys == NULL || disk->entries == NULL ||
        disk->was_got == NULL) {
        return error_out_of_memory(err, "the disk tier's index",
                                   num_blocks * sizeof(*disk->entries));
    }
    return kv_table_create((int32_t)num_blocks, disk->keys, &disk->table, err);
}

static enum imbrex_status create_io(struct kv_disk *disk, struct imbrex_error *err)
{
    const struct kv_io_options options = {
        .num_workers = {[KV_IO_READ] = disk->work.num_readers,
                        [KV_IO_WRITE] = 1,
                        [KV_IO_PACK] = disk->options.zstd_level > 0 ? KV_DISK_WORK_NUM_PACKERS : 0},
        .num_ring_readers =
            disk->work.num_readers < MAX_RING_READERS ? disk->work.num_readers : MAX_RING_READERS,
        .ring_depth = disk->options.forbids_ring ? 0 : RING_DEPTH,
        .files = disk->work.files,
        .open = kv_disk_work_open,
        .user = &disk->work};
    TRY(kv_io_create(&options, &disk->io, err));
    disk->metrics.ring_failure = -kv_io_ring_failure(disk->io);
    return IMBREX_STATUS_OK;
}

enum imbrex_status kv_disk_open(const struct kv_disk_options *options, struct kv_disk **disk,
                                struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t min_bytes = kv_disk_min_bytes(options->block_bytes, options->segment_bytes);
    assert(options->block_bytes > 0 && options->block_bytes % KV_BLOCK_ALIGNMENT == 0);
    assert(options->block_bytes <= UINT32_MAX && options->num_readers <= KV_DISK_WORK_MAX_READERS);
    if (options->max_bytes < min_bytes) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_disk_bytes",
                               ": expected at least %zu, two segments of blocks of %zu "
                               "bytes, found %zu",
                               min_bytes, options->block_bytes, options->max_bytes);
    }
    struct kv_disk *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the disk tier", sizeof(*created));
    }
    created->options = *options;
    created->work.files = options->files != NULL ? options->files : &kv_files_system;
    created->work.folder = options->folder->path;
    created->work.num_readers = options->num_readers > 0 ? options->num_readers : DEFAULT_READERS;
    created->work.layout = kv_segment_layout(options->block_bytes,
                                             options->segment_bytes != 0 ? options->segment_bytes
                                                                         : DEFAULT_SEGMENT_BYTES,
                                             &options->owner);
    size_t num_segments = options->max_bytes / (min_bytes / 2);
    size_t max_segments = (size_t)(MAX_BLOCKS / created->work.layout.num_slots);
    created->max_segments = (int32_t)(num_segments < max_segments ? num_segments : max_segments);
    created->current = -1;
    created->cleaned = -1;
    for (int32_t i = 0; i < NUM_JOBS; i++) {
        created->free_jobs[i] = NUM_JOBS - 1 - i;
    }
    created->num_free_jobs = NUM_JOBS;
    TRY_OR_FAIL(create_index(created, err));
    TRY_OR_FAIL(scan(created, err));
    TRY_OR_FAIL(kv_disk_work_create(&created->work, options->zstd_level, created->has_packed, err));
    for (int32_t i = 0; i < created->work.num_buffers; i++) {
        created->free_buffers[i] = i;
    }
    created->num_free_buffers = created->work.num_buffers;
    TRY_OR_FAIL(create_io(created, err));
    *disk = created;
    return IMBREX_STATUS_OK;
fail:
    kv_disk_close(created);
    return status;
}

/* Gets that have not begun are given up; all else is brought to its end. */
static void finish_jobs(struct kv_disk *disk)
{
    struct kv_disk_result ignored;
    disk->is_closing = true;
    for (int32_t i = 0; i < NUM_JOBS; i++) {
        if (disk->jobs[i].kind == KV_DISK_JOB_GET && kv_io_cancel(disk->io, &disk->jobs[i].io)) {
            release_job(disk, &disk->jobs[i]);
        }
    }
    while (kv_disk_num_jobs(disk) > 0) {
        if (!kv_disk_poll(disk, &ignored) && kv_disk_num_jobs(disk) > 0) {
            kv_disk_wait(disk, FINISH_WAIT_NS);
        }
    }
}

void kv_disk_close(struct kv_disk *disk)
{
    if (disk == NULL) {
        return;
    }
    if (disk->io != NULL) {
        finish_jobs(disk);
    }
    kv_io_destroy(disk->io);
    kv_disk_work_destroy(&disk->work);
    kv_table_destroy(&disk->table);
    free(disk->segments);
    free(disk->keys);
    free(disk->entries);
    free(disk->was_got);
    free(disk->foreign);
    free(disk->strange);
    free(disk);
}

/* ---- questions ------------------------------------------------------------------------------- */

void kv_disk_read_metrics(const struct kv_disk *disk, struct kv_disk_metrics *metrics)
{
    *metrics = disk->metrics;
    metrics->num_blocks = disk->table.num_entries;
}

bool kv_disk_check(const struct kv_disk *disk)
{
    int64_t num_valid = 0, num_segments = 0, num_bytes = 0;
    for (int32_t i = 0; i < disk->max_segments; i++) {
        const struct segment *segment = &disk->segments[i];
        int32_t num_found = 0;
        if (!segment->is_used) {
            continue;
        }
        for (int32_t j = 0; j < segment->num_taken; j++) {
            int32_t block = slot_of(disk, i, j);
            num_found += kv_table_find(&disk->table, &disk->keys[block]) == block;
        }
        if (num_found != segment->num_valid || segment->num_taken > disk->work.layout.num_slots) {
            return false;
        }
        num_valid += num_found;
        num_segments += !segment->is_dead;
    }
    for (int32_t i = disk->first_foreign; i < disk->num_foreign; i++) {
        num_bytes += disk->foreign[i].num_bytes;
    }
    num_bytes += num_segments * kv_segment_file_bytes(&disk->work.layout);
    return num_valid == disk->table.num_entries && num_segments == disk->metrics.num_segments &&
           num_bytes == disk->metrics.num_bytes && num_bytes <= (int64_t)disk->options.max_bytes;
}
