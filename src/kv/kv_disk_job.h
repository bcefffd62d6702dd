/* SPDX-License-Identifier: Apache-2.0 */
/* What the workers of the disk tier do: each knows its job and what all jobs share, and opens a
 * segment by its name for each, so that nothing has to be closed when a segment goes. Who gives
 * them jobs, and what becomes of those, is kv_disk.c's. */
#ifndef IMBREX_KV_KV_DISK_JOB_H
#define IMBREX_KV_KV_DISK_JOB_H

#include "base/memory.h"
#include "kv/kv_codec.h"
#include "kv/kv_folder.h"
#include "kv/kv_io.h"
#include "kv/kv_segment.h"

#define KV_DISK_WORK_PATH_BYTES 4096
#define KV_DISK_WORK_MAX_READERS 16
#define KV_DISK_WORK_NUM_PACKERS 2
#define KV_DISK_WORK_MAX_BUFFERS 16

/* Does not change while there are workers, but for the folder's lock, which is the writer's. */
struct kv_disk_work {
    const struct kv_files *files;
    struct kv_folder *folder;
    struct kv_segment_layout layout;
    int32_t num_readers;
    struct kv_codec *packers[KV_DISK_WORK_NUM_PACKERS];   /* NULL: nothing is packed */
    struct kv_codec *unpackers[KV_DISK_WORK_MAX_READERS]; /* of readers; NULL: nothing is packed */
    struct memory_region
        buffers;         /* [num_buffers] x block_bytes, one of each reader, the writer's */
    int32_t num_buffers; /* at most KV_DISK_WORK_MAX_BUFFERS */
};

enum kv_disk_job_kind {
    KV_DISK_JOB_FREE = 0,
    KV_DISK_JOB_PACK,   /* a block into a buffer, if it becomes smaller */
    KV_DISK_JOB_PUT,    /* a block, or its buffer, to its place */
    KV_DISK_JOB_GET,    /* from its place to a block, whole or with a failure */
    KV_DISK_JOB_CREATE, /* a segment */
    KV_DISK_JOB_REMOVE, /* a segment */
    KV_DISK_JOB_MOVE,   /* a block, as it lies there, to another segment */
};

/* What the writer found where the folder was to be, before it did the job. */
enum kv_disk_folder {
    KV_DISK_FOLDER_OURS = 0,
    KV_DISK_FOLDER_KEPT,    /* somebody removed its lock, no more */
    KV_DISK_FOLDER_NEW,     /* nothing: it has been made anew, and is empty */
    KV_DISK_FOLDER_REFUSED, /* another, or nothing can be made there: the job's failure says why */
};

struct kv_disk_job {
    struct kv_io_job io; /* first */
    enum kv_disk_job_kind kind;
    const struct kv_disk_work *work;
    uint32_t number;               /* of the segment */
    int32_t num_blocks;            /* of one that is created */
    uint32_t num_full;             /* kv_disk.c's: as kv_disk_room has it when the job is given */
    int32_t segment_idx, slot_idx; /* kv_disk.c's: the segment, or -1; the place in it */
    struct kv_segment_entry entry; /* of a get as it was found, of a put sealed by a worker */
    void *block;
    uint32_t from_number, from_page;  /* of a move: where the block is */
    int32_t from_idx, from_slot_idx;  /* kv_disk.c's: that segment, or -1; the place in it */
    int32_t buffer_idx;               /* of a put that is packed there; -1: none */
    enum kv_disk_folder found_folder; /* of the writer's jobs */
    int32_t num_tries;                /* kv_disk.c's: of a put that somebody removed the file of */
    bool is_sealed; /* but for its place; of a move: it has been read, and is whole */
    int32_t tag;
    int failure; /* 0 or -errno; -EBADMSG: the block is not what was written */
};

/* files, folder, layout and num_readers are set, all else is zeroed. zstd_level: 0: nothing will be
 * packed; has_packed: something is. On failure what was made is still to be destroyed. */
enum imbrex_status kv_disk_work_create(struct kv_disk_work *work, int32_t zstd_level,
                                       bool has_packed, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void kv_disk_work_destroy(struct kv_disk_work *work);

/* Of a segment; is_partial: of one that is not finished. 0 or -errno. */
int kv_disk_work_path(const struct kv_disk_work *work, uint32_t number, bool is_partial,
                      char path[KV_DISK_WORK_PATH_BYTES]);

/* kv_io_options.open; user: a struct kv_disk_work. */
int kv_disk_work_open(void *user, uint32_t number);

/* Of a struct kv_disk_job: kv_io_job.run and kv_io_job.end. */
void kv_disk_job_run(struct kv_io_job *io_job, int32_t worker_idx);
void kv_disk_job_end(struct kv_io_job *io_job, int failure, int32_t worker_idx);

#endif
