/* SPDX-License-Identifier: Apache-2.0 */
/* All bookkeeping is the user's thread's; a worker knows its job alone, and opens a segment by its
 * name for each, so that nothing has to be closed when a segment goes. */
#include "kv/kv_disk.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv_io.h"
#include "kv/kv_segment.h"
#include "kv/kv_table.h"

#define DEFAULT_SEGMENT_BYTES ((size_t)32 << 20)
#define MAX_BLOCKS (1 << 22) /* what a table of them costs is still small beside the disk */
#define MAX_PATH_BYTES 4096
/* A disk that had no room for a segment is asked again so many puts later. */
#define NUM_REFUSALS 256
/* A put may need a segment, and that one the place of another. */
#define MIN_FREE_JOBS 3

enum job_kind { JOB_FREE = 0, JOB_PUT, JOB_GET, JOB_CREATE, JOB_REMOVE };

struct disk_job {
    struct kv_io_job io; /* first */
    enum job_kind kind;
    const struct kv_disk *disk;
    uint32_t number; /* of the segment */
    int32_t segment_idx, slot_idx;
    struct kv_segment_entry entry; /* of a get as it was found, of a put sealed by the worker */
    void *block;
    int32_t tag;
    int failure; /* 0 or -errno */
};

struct segment {
    uint32_t number;
    int32_t num_taken; /* places that puts were given */
    int32_t num_valid; /* of these, those that can be found */
    int32_t num_jobs;  /* that name it */
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
    struct kv_segment_layout layout;
    struct kv_io *io;
    struct disk_job jobs[KV_DISK_MAX_JOBS];
    int32_t free_jobs[KV_DISK_MAX_JOBS]; /* [num_free_jobs] stack */
    int32_t num_free_jobs;

    struct segment *segments; /* [max_segments] */
    int32_t max_segments;
    int32_t current;                  /* that puts go to; -1: none */
    struct kv_key *keys;              /* [max_segments * num_slots] */
    struct kv_segment_entry *entries; /* the same; those in the table count */
    struct kv_table table;
    struct foreign_segment *foreign; /* [num_foreign], the oldest first; those from first_foreign on
                                      * are there */
    int32_t num_foreign, first_foreign;
    uint32_t next_number;
    uint64_t num_uses;
    int32_t num_refusals; /* puts that are refused before the disk is asked again */
    struct kv_disk_metrics metrics;
};

static int32_t slot_of(const struct kv_disk *disk, int32_t segment_idx, int32_t slot_idx)
{
    return segment_idx * disk->layout.num_slots + slot_idx;
}

static int segment_path(const struct kv_disk *disk, uint32_t number, char path[MAX_PATH_BYTES])
{
    char name[KV_SEGMENT_NAME_BYTES];
    kv_segment_name(number, name);
    int length = snprintf(path, MAX_PATH_BYTES, "%s/%s", disk->options.folder->path, name);
    return length >= 0 && length < MAX_PATH_BYTES ? 0 : -ENAMETOOLONG;
}

/* ---- on a worker ----------------------------------------------------------------------------- */

static void run_job(struct kv_io_job *io_job)
{
    struct disk_job *job = (struct disk_job *)io_job;
    const struct kv_disk *disk = job->disk;
    const struct kv_files *files = disk->options.files;
    size_t block_bytes = disk->layout.block_bytes;
    char path[MAX_PATH_BYTES];
    job->failure = segment_path(disk, job->number, path);
    if (job->failure != 0) {
        return;
    }
    switch (job->kind) {
    case JOB_PUT:
        kv_segment_seal(&job->entry, job->block, block_bytes);
        job->failure =
            kv_segment_write(files, path, &disk->layout, job->slot_idx, &job->entry, job->block);
        break;
    case JOB_GET:
        job->failure = kv_segment_read(files, path, &disk->layout, job->slot_idx, job->block);
        if (job->failure == 0 && !kv_segment_is_intact(&job->entry, job->block, block_bytes)) {
            job->failure = -EBADMSG;
        }
        break;
    case JOB_CREATE:
        job->failure = kv_segment_create(files, path, &disk->layout);
        break;
    case JOB_REMOVE:
        job->failure = files->remove(files->user, path);
        break;
    case JOB_FREE:
        break;
    }
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static struct disk_job *take_job(struct kv_disk *disk, enum job_kind kind, int32_t segment_idx,
                                 uint32_t number)
{
    assert(disk->num_free_jobs > 0);
    disk->num_free_jobs--;
    struct disk_job *job = &disk->jobs[disk->free_jobs[disk->num_free_jobs]];
    *job = (struct disk_job){
        .io = {.run = run_job, .kind = kind == JOB_GET ? KV_IO_READ : KV_IO_WRITE},
        .kind = kind,
        .disk = disk,
        .number = number,
        .segment_idx = segment_idx,
    };
    if (segment_idx >= 0) {
        disk->segments[segment_idx].num_jobs++;
    }
    return job;
}

static void release_job(struct kv_disk *disk, struct disk_job *job)
{
    if (job->segment_idx >= 0) {
        struct segment *segment = &disk->segments[job->segment_idx];
        segment->num_jobs--;
        if (segment->is_dead && segment->num_jobs == 0) {
            *segment = (struct segment){0};
        }
    }
    job->kind = JOB_FREE;
    disk->free_jobs[disk->num_free_jobs] = (int32_t)(job - disk->jobs);
    disk->num_free_jobs++;
}

bool kv_disk_is_ready(const struct kv_disk *disk)
{
    return disk->num_free_jobs >= MIN_FREE_JOBS;
}

int32_t kv_disk_num_jobs(const struct kv_disk *disk)
{
    return KV_DISK_MAX_JOBS - disk->num_free_jobs;
}

/* ---- segments come and go -------------------------------------------------------------------- */

/* While the tier is opened there are no workers, and nobody waits. */
static void remove_file(struct kv_disk *disk, uint32_t number)
{
    if (disk->io != NULL) {
        kv_io_submit(disk->io, &take_job(disk, JOB_REMOVE, -1, number)->io);
        return;
    }
    char path[MAX_PATH_BYTES];
    const struct kv_files *files = disk->options.files;
    if (segment_path(disk, number, path) != 0 || files->remove(files->user, path) != 0) {
        disk->metrics.num_write_faults++;
    }
}

static void drop_block(struct kv_disk *disk, int32_t segment_idx, int32_t block)
{
    kv_table_remove(&disk->table, block);
    disk->segments[segment_idx].num_valid--;
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
    disk->metrics.num_bytes -= kv_segment_file_bytes(&disk->layout);
    disk->metrics.num_segments--;
    remove_file(disk, segment->number);
    *segment = (struct segment){0};
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

/* A segment for the next puts. Leaves at least one free job if it succeeds. */
static bool begin_segment(struct kv_disk *disk)
{
    int64_t file_bytes = kv_segment_file_bytes(&disk->layout);
    int32_t place;
    if (disk->num_refusals > 0) {
        disk->num_refusals--;
        return false;
    }
    /* Each round takes a job, and so do what follows and the put. */
    while ((place = find_free_place(disk)) == -1 ||
           disk->metrics.num_bytes + file_bytes > (int64_t)disk->options.max_bytes) {
        if (disk->num_free_jobs < MIN_FREE_JOBS || !evict(disk)) {
            return false;
        }
    }
    if (disk->num_free_jobs < 2) {
        return false;
    }
    disk->segments[place] = (struct segment){.number = disk->next_number, .is_used = true};
    disk->next_number++;
    disk->current = place;
    disk->metrics.num_bytes += file_bytes;
    disk->metrics.num_segments++;
    kv_io_submit(disk->io, &take_job(disk, JOB_CREATE, place, disk->segments[place].number)->io);
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

bool kv_disk_put(struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids,
                 const void *block, int32_t tag)
{
    if (disk->current >= 0 && disk->segments[disk->current].num_taken == disk->layout.num_slots) {
        disk->current = -1;
    }
    if (disk->num_free_jobs == 0 || (disk->current == -1 && !begin_segment(disk))) {
        disk->metrics.num_refused++;
        return false;
    }
    struct segment *segment = &disk->segments[disk->current];
    struct disk_job *job = take_job(disk, JOB_PUT, disk->current, segment->number);
    job->slot_idx = segment->num_taken;
    segment->num_taken++;
    segment->last_use = ++disk->num_uses;
    job->entry = (struct kv_segment_entry){.key = *key};
    memcpy(job->entry.token_ids, token_ids, sizeof(job->entry.token_ids));
    job->block = (void *)(uintptr_t)block; /* a put reads it only */
    job->tag = tag;
    kv_io_submit(disk->io, &job->io);
    return true;
}

bool kv_disk_get(struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids,
                 void *block, int32_t tag)
{
    int32_t found = find(disk, key, token_ids);
    if (found == -1 || disk->num_free_jobs == 0) {
        return false;
    }
    int32_t segment_idx = found / disk->layout.num_slots;
    struct segment *segment = &disk->segments[segment_idx];
    struct disk_job *job = take_job(disk, JOB_GET, segment_idx, segment->number);
    segment->last_use = ++disk->num_uses;
    job->slot_idx = found % disk->layout.num_slots;
    job->entry = disk->entries[found];
    job->block = block;
    job->tag = tag;
    kv_io_submit(disk->io, &job->io);
    return true;
}

bool kv_disk_cancel_get(struct kv_disk *disk, int32_t tag)
{
    for (int32_t i = 0; i < KV_DISK_MAX_JOBS; i++) {
        struct disk_job *job = &disk->jobs[i];
        if (job->kind == JOB_GET && job->tag == tag) {
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

static void end_put(struct kv_disk *disk, const struct disk_job *job)
{
    if (job->failure != 0) {
        disk->metrics.num_write_faults++;
        /* Of a segment that could not be made, why is known. */
        if (job->failure != -ENOENT || !disk->segments[job->segment_idx].is_dead) {
            disk->metrics.last_failure = -job->failure;
        }
        return;
    }
    int32_t block = slot_of(disk, job->segment_idx, job->slot_idx);
    disk->metrics.num_put++;
    if (kv_table_find(&disk->table, &job->entry.key) == -1) {
        disk->keys[block] = job->entry.key;
        disk->entries[block] = job->entry;
        kv_table_add(&disk->table, block);
        disk->segments[job->segment_idx].num_valid++;
    }
}

static void end_get(struct kv_disk *disk, const struct disk_job *job)
{
    if (job->failure == 0) {
        disk->metrics.num_got++;
        return;
    }
    int32_t block = slot_of(disk, job->segment_idx, job->slot_idx);
    if (kv_table_find(&disk->table, &job->entry.key) == block) {
        drop_block(disk, job->segment_idx, block);
    }
    if (job->failure == -EBADMSG || job->failure == -ENODATA) {
        disk->metrics.num_damaged++;
    } else {
        disk->metrics.num_read_faults++;
        disk->metrics.last_failure = -job->failure;
    }
}

static void end_create(struct kv_disk *disk, const struct disk_job *job)
{
    if (job->failure == 0) {
        return;
    }
    disk->segments[job->segment_idx].is_dead = true;
    disk->metrics.num_bytes -= kv_segment_file_bytes(&disk->layout);
    disk->metrics.num_segments--;
    disk->metrics.num_segment_faults++;
    disk->metrics.last_failure = -job->failure;
    disk->num_refusals = NUM_REFUSALS;
    if (disk->current == job->segment_idx) {
        disk->current = -1;
    }
}

bool kv_disk_poll(struct kv_disk *disk, struct kv_disk_result *result)
{
    struct kv_io_job *io_job;
    while ((io_job = kv_io_poll(disk->io)) != NULL) {
        struct disk_job *job = (struct disk_job *)io_job;
        bool is_block = job->kind == JOB_PUT || job->kind == JOB_GET;
        *result = (struct kv_disk_result){
            .tag = job->tag, .is_get = job->kind == JOB_GET, .is_good = job->failure == 0};
        if (job->kind == JOB_PUT) {
            end_put(disk, job);
        } else if (job->kind == JOB_GET) {
            end_get(disk, job);
        } else if (job->kind == JOB_CREATE) {
            end_create(disk, job);
        } else if (job->failure != 0) {
            disk->metrics.num_write_faults++;
            disk->metrics.last_failure = -job->failure;
        }
        release_job(disk, job);
        if (is_block) {
            return true;
        }
    }
    return false;
}

void kv_disk_wait(struct kv_disk *disk, int64_t timeout_ns)
{
    kv_io_wait(disk->io, timeout_ns);
}

/* ---- open ------------------------------------------------------------------------------------ */

/* Names in the folder, sorted by number. What was never finished is removed. */
static enum imbrex_status list_segments(const struct kv_disk *disk, uint32_t **numbers,
                                        int32_t *num_numbers, struct imbrex_error *err)
{
    const char *folder_path = disk->options.folder->path;
    const struct kv_files *files = disk->options.files;
    uint32_t *listed = NULL;
    int32_t num_listed = 0, max_listed = 0;
    DIR *folder = opendir(folder_path);
    if (folder == NULL) {
        return error_set(err, IMBREX_STATUS_IO, "KV folder %.200s: it cannot be read: %s",
                         folder_path, system_error_text(errno));
    }
    for (const struct dirent *item; (item = readdir(folder)) != NULL;) {
        uint32_t number;
        bool is_partial;
        char path[MAX_PATH_BYTES];
        if (!kv_segment_parse_name(item->d_name, &number, &is_partial)) {
            continue;
        }
        if (is_partial) {
            if (snprintf(path, sizeof(path), "%s/%s", folder_path, item->d_name) <
                (int)sizeof(path)) {
                (void)files->remove(files->user, path);
            }
            continue;
        }
        if (num_listed == max_listed) {
            max_listed = max_listed == 0 ? 64 : 2 * max_listed;
            uint32_t *grown = realloc(listed, (size_t)max_listed * sizeof(*grown));
            if (grown == NULL) {
                free(listed);
                (void)closedir(folder);
                return error_out_of_memory(err, "the list of KV segments",
                                           (size_t)max_listed * sizeof(*grown));
            }
            listed = grown;
        }
        listed[num_listed] = number;
        num_listed++;
    }
    (void)closedir(folder);
    *numbers = listed;
    *num_numbers = num_listed;
    return IMBREX_STATUS_OK;
}

static int compare_numbers(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
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
    *segment = (struct segment){.number = number, .last_use = ++disk->num_uses, .is_used = true};
    disk->current = place;
    disk->metrics.num_bytes += kv_segment_file_bytes(&disk->layout);
    disk->metrics.num_segments++;
    for (int32_t i = 0; i < disk->layout.num_slots; i++) {
        int32_t block = slot_of(disk, place, i);
        if (memcmp(&entries[i], &empty, sizeof(empty)) == 0) {
            continue;
        }
        segment->num_taken = i + 1;
        if (kv_table_find(&disk->table, &entries[i].key) == -1) {
            disk->keys[block] = entries[i].key;
            disk->entries[block] = entries[i];
            kv_table_add(&disk->table, block);
            segment->num_valid++;
        }
    }
}

static enum imbrex_status scan(struct kv_disk *disk, struct imbrex_error *err)
{
    uint32_t *numbers = NULL;
    int32_t num_numbers = 0;
    size_t table_bytes = (size_t)disk->layout.num_slots * sizeof(struct kv_segment_entry);
    TRY(list_segments(disk, &numbers, &num_numbers, err));
    struct kv_segment_entry *entries = malloc(table_bytes);
    disk->foreign = calloc((size_t)num_numbers + 1, sizeof(*disk->foreign));
    if (entries == NULL || disk->foreign == NULL) {
        free(numbers);
        free(entries);
        return error_out_of_memory(err, "the disk tier's index", table_bytes);
    }
    if (num_numbers > 0) {
        qsort(numbers, (size_t)num_numbers, sizeof(*numbers), compare_numbers);
    }
    for (int32_t i = 0; i < num_numbers; i++) {
        char path[MAX_PATH_BYTES];
        enum kv_segment_kind kind = KV_SEGMENT_FOREIGN;
        int64_t num_bytes = 0;
        int32_t num_broken = 0;
        int failure = segment_path(disk, numbers[i], path);
        if (failure == 0) {
            failure = kv_segment_scan(disk->options.files, path, &disk->layout, &kind, entries,
                                      &num_bytes, &num_broken);
        }
        disk->next_number = numbers[i] + 1;
        disk->metrics.num_damaged += (uint64_t)num_broken;
        if (failure != 0) {
            disk->metrics.num_read_faults++;
            disk->metrics.last_failure = -failure;
        } else if (kind == KV_SEGMENT_OURS) {
            adopt(disk, numbers[i], entries);
        }
        if (failure != 0 || kind == KV_SEGMENT_FOREIGN) {
            disk->foreign[disk->num_foreign] =
                (struct foreign_segment){.number = numbers[i], .num_bytes = num_bytes};
            disk->num_foreign++;
            disk->metrics.num_bytes += num_bytes;
            disk->metrics.num_foreign_bytes += num_bytes;
        }
    }
    free(numbers);
    free(entries);
    while (disk->metrics.num_bytes > (int64_t)disk->options.max_bytes && evict(disk)) {
    }
    return IMBREX_STATUS_OK;
}

size_t kv_disk_min_bytes(size_t block_bytes, size_t segment_bytes)
{
    const struct kv_segment_layout layout = {
        .num_slots = kv_segment_num_slots(block_bytes, segment_bytes != 0 ? segment_bytes
                                                                          : DEFAULT_SEGMENT_BYTES),
        .block_bytes = block_bytes};
    return 2 * (size_t)kv_segment_file_bytes(&layout);
}

static enum imbrex_status create_index(struct kv_disk *disk, struct imbrex_error *err)
{
    size_t num_blocks = (size_t)disk->max_segments * (size_t)disk->layout.num_slots;
    disk->segments = calloc((size_t)disk->max_segments, sizeof(*disk->segments));
    disk->keys = calloc(num_blocks, sizeof(*disk->keys));
    disk->entries = calloc(num_blocks, sizeof(*disk->entries));
    if (disk->segments == NULL || disk->keys == NULL || disk->entries == NULL) {
        return error_out_of_memory(err, "the disk tier's index",
                                   num_blocks * sizeof(*disk->entries));
    }
    return kv_table_create((int32_t)num_blocks, disk->keys, &disk->table, err);
}

enum imbrex_status kv_disk_open(const struct kv_disk_options *options, struct kv_disk **disk,
                                struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t min_bytes = kv_disk_min_bytes(options->block_bytes, options->segment_bytes);
    assert(options->block_bytes > 0 && options->block_bytes % KV_BLOCK_ALIGNMENT == 0);
    if (options->max_bytes < min_bytes) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "kv_disk_bytes: expected at least %zu, two segments of blocks of %zu "
                         "bytes, found %zu",
                         min_bytes, options->block_bytes, options->max_bytes);
    }
    struct kv_disk *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the disk tier", sizeof(*created));
    }
    created->options = *options;
    if (options->files == NULL) {
        created->options.files = &kv_files_system;
    }
    created->layout = (struct kv_segment_layout){
        .num_slots = kv_segment_num_slots(options->block_bytes, options->segment_bytes != 0
                                                                    ? options->segment_bytes
                                                                    : DEFAULT_SEGMENT_BYTES),
        .block_bytes = options->block_bytes,
        .owner = options->owner};
    size_t num_segments = options->max_bytes / (min_bytes / 2);
    size_t max_segments = (size_t)(MAX_BLOCKS / created->layout.num_slots);
    created->max_segments = (int32_t)(num_segments < max_segments ? num_segments : max_segments);
    created->current = -1;
    for (int32_t i = 0; i < KV_DISK_MAX_JOBS; i++) {
        created->free_jobs[i] = KV_DISK_MAX_JOBS - 1 - i;
    }
    created->num_free_jobs = KV_DISK_MAX_JOBS;
    TRY_OR_FAIL(create_index(created, err));
    TRY_OR_FAIL(scan(created, err));
    TRY_OR_FAIL(kv_io_create(options->num_readers, &created->io, err));
    *disk = created;
    return IMBREX_STATUS_OK;
fail:
    kv_disk_close(created);
    return status;
}

void kv_disk_close(struct kv_disk *disk)
{
    if (disk == NULL) {
        return;
    }
    for (int32_t i = 0; disk->io != NULL && i < KV_DISK_MAX_JOBS; i++) {
        if (disk->jobs[i].kind == JOB_GET) {
            (void)kv_io_cancel(disk->io, &disk->jobs[i].io);
        }
    }
    kv_io_destroy(disk->io);
    kv_table_destroy(&disk->table);
    free(disk->segments);
    free(disk->keys);
    free(disk->entries);
    free(disk->foreign);
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
        if (num_found != segment->num_valid || segment->num_taken > disk->layout.num_slots) {
            return false;
        }
        num_valid += num_found;
        num_segments += !segment->is_dead;
    }
    for (int32_t i = disk->first_foreign; i < disk->num_foreign; i++) {
        num_bytes += disk->foreign[i].num_bytes;
    }
    num_bytes += num_segments * kv_segment_file_bytes(&disk->layout);
    return num_valid == disk->table.num_entries && num_segments == disk->metrics.num_segments &&
           num_bytes == disk->metrics.num_bytes && num_bytes <= (int64_t)disk->options.max_bytes;
}
