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
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv_codec.h"
#include "kv/kv_disk_index.h"
#include "kv/kv_disk_job.h"
#include "kv/kv_disk_room.h"
#include "kv/kv_disk_scan.h"

#define DEFAULT_SEGMENT_BYTES ((size_t)32 << 20)
#define FINISH_WAIT_NS INT64_C(1000000000)
/* A disk that had no room for a segment is asked again so many puts later. */
#define NUM_REFUSALS 256
/* Of a put whose file is removed each time. */
#define MAX_TRIES 3
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

    struct kv_disk_index index;
    struct kv_disk_room room;
    int32_t cleaned;              /* the segment that is; -1: none */
    int32_t clean_next, num_kept; /* its slots before are done; blocks that are moved */
    bool is_closing;
    int32_t num_refusals; /* puts that are refused before the disk is asked again */
};

/* ---- jobs ------------------------------------------------------------------------------------ */

static void queue_append(struct kv_disk *disk, struct job_queue *queue,
                         const struct kv_disk_job *job)
{
    queue->items[(queue->first + queue->num_items) % NUM_JOBS] = (int32_t)(job - disk->jobs);
    queue->num_items++;
}

static void queue_prepend(struct kv_disk *disk, struct job_queue *queue,
                          const struct kv_disk_job *job)
{
    queue->first = (queue->first + NUM_JOBS - 1) % NUM_JOBS;
    queue->items[queue->first] = (int32_t)(job - disk->jobs);
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
    job->number = disk->index.segments[segment_idx].number;
    disk->index.segments[segment_idx].num_jobs++;
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

static void leave_segment(struct kv_disk *disk, struct kv_disk_job *job)
{
    if (job->segment_idx >= 0) {
        kv_disk_index_leave(&disk->index, job->segment_idx);
        job->segment_idx = -1;
    }
}

static void release_job(struct kv_disk *disk, struct kv_disk_job *job)
{
    leave_segment(disk, job);
    if (job->from_idx >= 0) {
        kv_disk_index_leave(&disk->index, job->from_idx);
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

static void remove_file(struct kv_disk *disk, uint32_t number)
{
    struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_REMOVE);
    job->number = number;
    kv_io_submit(disk->io, &job->io);
}

/* One segment less. False if none may go. */
static bool evict(struct kv_disk *disk)
{
    uint32_t number;
    int32_t segment_idx;
    if (!kv_disk_index_evict(&disk->index, &number, &segment_idx)) {
        return false;
    }
    if (segment_idx != -1 && segment_idx == disk->cleaned) {
        disk->cleaned = -1;
    }
    remove_file(disk, number);
    return true;
}

/* What cannot be made now is not asked for again at once. */
static void give_up(struct kv_disk *disk, int failure)
{
    disk->index.metrics.num_segment_faults++;
    disk->index.metrics.segment_failure = failure;
    disk->num_refusals = NUM_REFUSALS;
}

/* Whether a segment may go when a job has ended. */
static bool is_any_busy(const struct kv_disk_index *index)
{
    for (int32_t i = 0; i < index->max_segments; i++) {
        if (index->segments[i].num_jobs > 0) {
            return true;
        }
    }
    return false;
}

/* What became of a put that needs a place. */
enum placing { PLACED, REFUSED, WAITS /* for a job to end */ };

/* Whether there is a place and room for a segment; for both, others go. */
static enum placing make_room(struct kv_disk *disk, int32_t *place)
{
    struct kv_disk_index *index = &disk->index;
    int64_t file_bytes = kv_segment_file_bytes(&disk->room.layout);
    /* Each round takes a job, and so does what follows. */
    while ((*place = kv_disk_index_free_place(index)) == -1 ||
           index->metrics.num_bytes + file_bytes > disk->room.max_bytes) {
        if (disk->num_free_jobs < 2) {
            return WAITS;
        }
        if (!evict(disk)) {
            return is_any_busy(index) ? WAITS : REFUSED;
        }
    }
    return disk->num_free_jobs > 0 ? PLACED : WAITS;
}

/* A segment for the next puts. */
static enum placing begin_segment(struct kv_disk *disk)
{
    struct kv_disk_index *index = &disk->index;
    int32_t place;
    if (disk->num_refusals > 0) {
        disk->num_refusals--;
        index->metrics.num_left_out++;
        return REFUSED;
    }
    enum placing room = make_room(disk, &place);
    if (room != PLACED) {
        if (room == REFUSED) {
            index->metrics.num_left_out += disk->room.max_bytes < index->max_bytes;
            kv_disk_room_begun(&disk->room);
        }
        return room;
    }
    while (kv_disk_index_is_taken(index, index->next_number)) {
        index->next_number++;
    }
    (void)kv_disk_index_begin(index, place, index->next_number, disk->room.layout.num_blocks);
    index->next_number++;
    struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_CREATE);
    set_segment(disk, job, place);
    job->num_blocks = disk->room.layout.num_blocks;
    job->num_full = disk->room.num_full;
    kv_io_submit(disk->io, &job->io);
    kv_disk_room_begun(&disk->room);
    return PLACED;
}

/* ---- put, get -------------------------------------------------------------------------------- */

bool kv_disk_has(const struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids)
{
    return kv_disk_index_find(&disk->index, key, token_ids) != -1;
}

/* Whether the segment that puts go to takes one more. */
static bool has_place(const struct kv_disk *disk, size_t stored_bytes)
{
    return disk->index.current != -1 &&
           kv_disk_index_has_place(&disk->index, disk->index.current, stored_bytes);
}

/* Gives a put or a move the next place and hands it to the writer. */
static void take_place(struct kv_disk *disk, struct kv_disk_job *job)
{
    struct kv_disk_segment *segment = &disk->index.segments[disk->index.current];
    set_segment(disk, job, disk->index.current);
    job->slot_idx = segment->num_taken;
    job->entry.first_page = segment->next_page;
    segment->num_taken++;
    segment->next_page += kv_segment_num_pages(job->entry.stored_bytes);
    segment->last_use = ++disk->index.num_uses;
    job->num_full = disk->room.num_full;
    kv_io_submit(disk->io, &job->io);
}

/* One that waits has its place in the queue. */
static enum placing place(struct kv_disk *disk, struct kv_disk_job *job)
{
    enum placing placing = PLACED;
    if (!has_place(disk, job->entry.stored_bytes)) {
        disk->index.current = -1;
        placing = begin_segment(disk);
    }
    if (placing == PLACED) {
        take_place(disk, job);
    } else if (placing == WAITS) {
        queue_prepend(disk, &disk->to_place, job);
    } else {
        disk->index.metrics.num_refused++;
    }
    return placing;
}

/* Whether the room of the oldest segment will be needed soon. */
static bool must_clean(const struct kv_disk *disk)
{
    const struct kv_disk_index *index = &disk->index;
    if (index->metrics.num_segments < MIN_CLEANED_SEGMENTS || disk->is_closing ||
        index->current == -1 || index->first_foreign < index->num_foreign) {
        return false;
    }
    const struct kv_disk_segment *current = &index->segments[index->current];
    struct kv_segment_layout layout = kv_segment_with_blocks(&index->layout, current->num_blocks);
    uint32_t first_page = kv_segment_first_page(&layout);
    uint32_t end_page = kv_segment_num_pages((size_t)kv_segment_file_bytes(&layout));
    bool is_half_full = current->next_page - first_page >= (end_page - first_page) / 2;
    int64_t next_bytes = index->metrics.num_bytes + kv_segment_file_bytes(&disk->room.layout);
    return is_half_full && (index->metrics.num_segments == index->max_segments ||
                            next_bytes > disk->room.max_bytes);
}

/* At most a quarter of a segment is kept, so that puts always get on. */
static bool is_kept(const struct kv_disk *disk, int32_t block)
{
    return disk->index.was_got[block] && has_place(disk, disk->index.entries[block].stored_bytes) &&
           disk->num_kept < (disk->index.segments[disk->index.current].num_blocks + 3) / 4;
}

static void clean_some(struct kv_disk *disk)
{
    if (disk->cleaned == -1 && must_clean(disk)) {
        disk->cleaned = kv_disk_index_oldest(&disk->index);
        disk->clean_next = 0;
        disk->num_kept = 0;
    }
    if (disk->cleaned == -1) {
        return;
    }
    const struct kv_disk_segment *segment = &disk->index.segments[disk->cleaned];
    for (; disk->clean_next < segment->num_taken; disk->clean_next++) {
        int32_t block = kv_disk_index_slot(&disk->index, disk->cleaned, disk->clean_next);
        if (!kv_disk_index_has(&disk->index, block)) {
            continue;
        }
        if (!is_kept(disk, block)) {
            kv_disk_index_drop(&disk->index, block);
            disk->index.metrics.num_evicted++;
            continue;
        }
        /* Nothing moves to a file that the disk may have no room for. */
        if (!kv_disk_is_ready(disk) || !disk->index.segments[disk->index.current].is_made) {
            return;
        }
        struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_MOVE);
        job->entry = disk->index.entries[block];
        job->from_idx = disk->cleaned;
        job->from_number = segment->number;
        job->from_page = job->entry.first_page;
        job->from_slot_idx = disk->clean_next;
        disk->index.segments[disk->cleaned].num_jobs++;
        disk->num_kept++;
        take_place(disk, job);
    }
    if (segment->num_jobs == 0 && disk->num_free_jobs > 0) {
        uint32_t number = segment->number;
        kv_disk_index_remove(&disk->index, disk->cleaned);
        disk->cleaned = -1;
        remove_file(disk, number);
    }
}

/* Moves puts on that wait for a buffer or for a place. */
static void move_puts(struct kv_disk *disk)
{
    enum placing placing = PLACED;
    while (disk->to_place.num_items > 0 && placing != WAITS) {
        struct kv_disk_job *job = queue_take(disk, &disk->to_place);
        placing = place(disk, job);
        if (placing == REFUSED) {
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
        disk->index.metrics.num_refused++;
        return false;
    }
    struct kv_disk_job *job = take_job(disk, is_packed ? KV_DISK_JOB_PACK : KV_DISK_JOB_PUT);
    job->entry = (struct kv_segment_entry){
        .key = *key, .stored_bytes = (uint32_t)disk->index.layout.block_bytes};
    memcpy(job->entry.token_ids, token_ids, sizeof(job->entry.token_ids));
    job->block = (void *)(uintptr_t)block; /* a put reads it only */
    job->tag = tag;
    if (is_packed) {
        queue_append(disk, &disk->to_pack, job);
        move_puts(disk);
    } else if (disk->to_place.num_items > 0) {
        queue_append(disk, &disk->to_place, job); /* behind those that came before */
    } else if (place(disk, job) == REFUSED) {
        release_job(disk, job);
        return false;
    }
    return true;
}

bool kv_disk_get(struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids,
                 void *block, int32_t tag)
{
    int32_t found = kv_disk_index_find(&disk->index, key, token_ids);
    if (found == -1 || !kv_disk_is_ready(disk)) {
        return false;
    }
    int32_t segment_idx = found / disk->index.layout.num_slots;
    struct kv_disk_job *job = take_job(disk, KV_DISK_JOB_GET);
    set_segment(disk, job, segment_idx);
    disk->index.segments[segment_idx].last_use = ++disk->index.num_uses;
    disk->index.was_got[found] = true;
    job->slot_idx = found % disk->index.layout.num_slots;
    job->entry = disk->index.entries[found];
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
    if (job->found_folder == KV_DISK_FOLDER_REFUSED ||
        (job->failure == -ENOENT && disk->index.segments[job->segment_idx].is_dead)) {
        disk->index.metrics.num_left_out++;
    } else {
        disk->index.metrics.num_write_faults++;
        disk->index.metrics.write_failure = -job->failure;
    }
}

/* Somebody has removed the segment's file. */
static void lose_segment(struct kv_disk *disk, int32_t segment_idx)
{
    disk->index.segments[segment_idx].is_passed_on = true;
    kv_disk_index_lose(&disk->index, segment_idx);
    if (disk->cleaned == segment_idx) {
        disk->cleaned = -1;
    }
}

/* The folder was not what the writer had left. What is made after that is in the new one. */
static void end_folder(struct kv_disk *disk, const struct kv_disk_job *job)
{
    struct kv_disk_index *index = &disk->index;
    bool is_refused = job->found_folder == KV_DISK_FOLDER_REFUSED;
    if (is_refused && disk->num_refusals > 0) {
        return; /* as is known, and what was on its way shows once more */
    }
    index->metrics.num_folder_losses++;
    index->metrics.folder_failure = is_refused ? -job->failure : 0;
    for (int32_t i = 0; i < index->max_segments && job->found_folder != KV_DISK_FOLDER_KEPT; i++) {
        if (index->segments[i].is_made && !index->segments[i].is_dead) {
            lose_segment(disk, i);
        }
    }
    if (is_refused) {
        give_up(disk, -job->failure);
    }
}

/* The disk had no room for a segment, or for a block of one where it says so late. False: nor will
 * it have any for now. */
static bool note_full(struct kv_disk *disk, const struct kv_disk_job *job, int64_t other_bytes)
{
    int64_t file_bytes = kv_disk_index_file_bytes(&disk->index, job->segment_idx);
    disk->index.metrics.segment_failure = -job->failure;
    if (kv_disk_room_shrink(&disk->room, other_bytes, file_bytes, job->num_full)) {
        return true;
    }
    disk->index.metrics.needed_bytes = kv_disk_room_min_bytes(&disk->room);
    give_up(disk, -job->failure);
    return false;
}

/* Whether a put that failed is to be tried in another place: the disk was full, and something may
 * go for it, or somebody removed the file. */
static bool is_retried(struct kv_disk *disk, struct kv_disk_job *job)
{
    if (job->kind != KV_DISK_JOB_PUT || job->failure == 0) {
        return false;
    }
    const struct kv_disk_segment *segment = &disk->index.segments[job->segment_idx];
    if (job->failure == -ENOENT && !segment->is_dead) {
        lose_segment(disk, job->segment_idx);
        job->num_tries++;
    }
    if (segment->is_dead) {
        return segment->is_passed_on && job->failure == -ENOENT && job->num_tries < MAX_TRIES;
    }
    if (!kv_disk_is_full(job->failure)) {
        return false;
    }
    if (disk->index.current == job->segment_idx) {
        disk->index.current = -1;
    }
    int64_t file_bytes = kv_disk_index_file_bytes(&disk->index, job->segment_idx);
    return note_full(disk, job, disk->index.metrics.num_bytes - file_bytes);
}

static void end_put(struct kv_disk *disk, struct kv_disk_job *job)
{
    /* Written, and the file was removed before this was looked at. */
    if (job->failure == 0 && disk->index.segments[job->segment_idx].is_dead) {
        job->failure = -ENOENT;
    }
    if (job->failure != 0) {
        count_write_failure(disk, job);
        return;
    }
    kv_disk_room_written(&disk->room);
    disk->index.metrics.num_put++;
    disk->index.metrics.num_put_bytes += job->entry.stored_bytes;
    if (kv_table_find(&disk->index.table, &job->entry.key) == -1) {
        kv_disk_index_add(&disk->index, job->segment_idx, job->slot_idx, &job->entry);
    }
}

static void count_read_failure(struct kv_disk *disk, int failure)
{
    if (failure == -EBADMSG || failure == -ENODATA) {
        disk->index.metrics.num_damaged++;
    } else {
        disk->index.metrics.num_read_faults++;
        disk->index.metrics.read_failure = -failure;
    }
}

static void end_get(struct kv_disk *disk, const struct kv_disk_job *job)
{
    if (job->failure == 0) {
        disk->index.metrics.num_got++;
        return;
    }
    bool is_dead = disk->index.segments[job->segment_idx].is_dead;
    if (job->failure == -ENOENT && !is_dead) {
        lose_segment(disk, job->segment_idx);
        return;
    }
    int32_t block = kv_disk_index_slot(&disk->index, job->segment_idx, job->slot_idx);
    if (!is_dead && kv_table_find(&disk->index.table, &job->entry.key) == block) {
        kv_disk_index_drop(&disk->index, block);
    }
    if (job->failure != -ENOENT || !is_dead) {
        count_read_failure(disk, job->failure);
    }
}

/* Before, the block is found where it was; afterwards in its new place, or nowhere. */
static void end_move(struct kv_disk *disk, struct kv_disk_job *job)
{
    struct kv_disk_index *index = &disk->index;
    int32_t from = kv_disk_index_slot(index, job->from_idx, job->from_slot_idx);
    int32_t gone_idx = job->is_sealed ? job->segment_idx : job->from_idx;
    if (job->failure == -ENOENT && !index->segments[gone_idx].is_dead) {
        lose_segment(disk, gone_idx);
    }
    if (job->failure == 0 && index->segments[job->segment_idx].is_dead) {
        job->failure = -ENOENT;
    }
    if (kv_table_find(&index->table, &job->entry.key) != from) {
        return; /* damaged, as a get has found meanwhile, or its file is gone */
    }
    kv_disk_index_drop(index, from);
    if (job->failure == 0) {
        kv_disk_index_add(index, job->segment_idx, job->slot_idx, &job->entry);
        index->metrics.num_moved++;
    } else if (job->is_sealed || job->found_folder == KV_DISK_FOLDER_REFUSED) {
        count_write_failure(disk, job);
    } else {
        count_read_failure(disk, job->failure);
    }
}

static void end_create(struct kv_disk *disk, const struct kv_disk_job *job)
{
    struct kv_disk_segment *segment = &disk->index.segments[job->segment_idx];
    segment->is_made = job->failure == 0;
    if (segment->is_made) {
        return;
    }
    segment->is_passed_on = kv_disk_is_full(job->failure);
    kv_disk_index_lose(&disk->index, job->segment_idx);
    if (segment->is_passed_on) {
        (void)note_full(disk, job, disk->index.metrics.num_bytes);
    } else if (job->found_folder != KV_DISK_FOLDER_REFUSED) {
        give_up(disk, -job->failure);
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
        /* Of a folder that is somebody else's nothing has to be removed. */
        if (job->failure != 0 && job->failure != -ENOENT &&
            job->found_folder != KV_DISK_FOLDER_REFUSED) {
            disk->index.metrics.num_remove_faults++;
            disk->index.metrics.segment_failure = -job->failure;
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
    if (job->entry.stored_bytes == disk->index.layout.block_bytes) {
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
        if (job->found_folder != KV_DISK_FOLDER_OURS) {
            end_folder(disk, job);
        }
        if (is_retried(disk, job)) {
            leave_segment(disk, job);
            queue_append(disk, &disk->to_place, job);
            continue;
        }
        bool is_block = job->kind == KV_DISK_JOB_PUT || job->kind == KV_DISK_JOB_GET;
        end_job(disk, job);
        *result = (struct kv_disk_result){
            .tag = job->tag, .is_get = job->kind == KV_DISK_JOB_GET, .is_good = job->failure == 0};
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

size_t kv_disk_min_bytes(size_t block_bytes, size_t segment_bytes)
{
    static const struct kv_key nobody;
    struct kv_segment_layout layout = kv_segment_layout(
        block_bytes, segment_bytes != 0 ? segment_bytes : DEFAULT_SEGMENT_BYTES, &nobody);
    return 2 * (size_t)kv_segment_file_bytes(&layout);
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
    disk->index.metrics.ring_failure = -kv_io_ring_failure(disk->io);
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
    created->work.folder = options->folder;
    created->work.num_readers = options->num_readers > 0 ? options->num_readers : DEFAULT_READERS;
    created->work.layout = kv_segment_layout(options->block_bytes,
                                             options->segment_bytes != 0 ? options->segment_bytes
                                                                         : DEFAULT_SEGMENT_BYTES,
                                             &options->owner);
    created->cleaned = -1;
    for (int32_t i = 0; i < NUM_JOBS; i++) {
        created->free_jobs[i] = NUM_JOBS - 1 - i;
    }
    created->num_free_jobs = NUM_JOBS;
    TRY_OR_FAIL(
        kv_disk_index_create(&created->work.layout, options->max_bytes, &created->index, err));
    kv_disk_room_init(&created->room, &created->work.layout, created->index.max_bytes);
    TRY_OR_FAIL(kv_disk_scan(&created->work, &created->index, &created->has_packed, err));
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
    kv_disk_index_destroy(&disk->index);
    free(disk);
}

/* ---- questions ------------------------------------------------------------------------------- */

void kv_disk_read_metrics(const struct kv_disk *disk, struct kv_disk_metrics *metrics)
{
    *metrics = disk->index.metrics;
    metrics->num_blocks = disk->index.table.num_entries;
    metrics->num_full = disk->room.num_full;
    metrics->max_bytes = disk->index.max_bytes;
}

bool kv_disk_check(const struct kv_disk *disk)
{
    return kv_disk_index_check(&disk->index);
}
