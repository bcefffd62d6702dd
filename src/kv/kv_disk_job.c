/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_disk_job.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

/* Buffers of packed blocks: as many as fit the bytes, within bounds. */
#define BUFFERS_BYTES ((size_t)32 << 20)
#define MIN_BUFFERS 2

int kv_disk_work_path(const struct kv_disk_work *work, uint32_t number, bool is_partial,
                      char path[KV_DISK_WORK_PATH_BYTES])
{
    char name[KV_SEGMENT_NAME_BYTES];
    kv_segment_name(number, is_partial, name);
    int length = snprintf(path, KV_DISK_WORK_PATH_BYTES, "%s/%s", work->folder->path, name);
    return length >= 0 && length < KV_DISK_WORK_PATH_BYTES ? 0 : -ENAMETOOLONG;
}

int kv_disk_work_open(void *user, uint32_t number)
{
    const struct kv_disk_work *work = user;
    char path[KV_DISK_WORK_PATH_BYTES];
    int failure = kv_disk_work_path(work, number, false, path);
    return failure == 0 ? work->files->open(work->files->user, path, O_RDONLY, 0) : failure;
}

static unsigned char *buffer_at(const struct kv_disk_work *work, int32_t buffer_idx)
{
    return work->buffers.base + (size_t)buffer_idx * work->layout.block_bytes;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

/* What is not smaller by a page at least stays as it is. */
static void pack(struct kv_disk_job *job, int32_t worker_idx)
{
    const struct kv_disk_work *work = job->work;
    unsigned char *buffer = buffer_at(work, job->buffer_idx);
    size_t max_bytes = work->layout.block_bytes - KV_BLOCK_ALIGNMENT + 1;
    size_t num_bytes = kv_codec_pack(work->packers[worker_idx], job->block, buffer, max_bytes);
    const unsigned char *stored = job->block;
    if (num_bytes > 0) {
        size_t rest = (KV_BLOCK_ALIGNMENT - num_bytes % KV_BLOCK_ALIGNMENT) % KV_BLOCK_ALIGNMENT;
        memset(buffer + num_bytes, 0, rest);
        job->entry.stored_bytes = (uint32_t)num_bytes;
        stored = buffer;
    }
    kv_segment_seal(&job->entry, stored);
    job->is_sealed = true;
}

static int write_block(struct kv_disk_job *job, const char *path)
{
    const struct kv_disk_work *work = job->work;
    const void *stored = job->buffer_idx >= 0 ? buffer_at(work, job->buffer_idx) : job->block;
    if (job->is_sealed) {
        kv_segment_reseal(&job->entry);
    } else {
        kv_segment_seal(&job->entry, stored);
    }
    return kv_segment_write(work->files, path, job->slot_idx, &job->entry, stored);
}

/* As it lies there, packed or not. */
static int move_block(struct kv_disk_job *job, const char *path)
{
    const struct kv_disk_work *work = job->work;
    const struct kv_files *files = work->files;
    unsigned char *buffer = buffer_at(work, work->num_buffers + work->num_readers);
    struct kv_segment_entry from = job->entry;
    from.first_page = job->from_page;
    char from_path[KV_DISK_WORK_PATH_BYTES];
    int failure = kv_disk_work_path(work, job->from_number, false, from_path);
    if (failure == 0) {
        failure = kv_segment_read(files, from_path, &from, buffer);
    }
    if (failure == 0 && !kv_segment_is_intact(&from, buffer)) {
        failure = -EBADMSG;
    }
    if (failure == 0) {
        job->is_sealed = true;
        kv_segment_reseal(&job->entry);
        failure = kv_segment_write(files, path, job->slot_idx, &job->entry, buffer);
    }
    return failure;
}

/* Nothing is written to, or removed from, a folder that is somebody else's by now. */
static int keep_folder(struct kv_disk_job *job)
{
    struct kv_folder *folder = job->work->folder;
    bool is_empty;
    job->found_folder = KV_DISK_FOLDER_OURS;
    if (kv_folder_is_ours(folder)) {
        return 0;
    }
    int failure = kv_folder_retake(folder, &is_empty);
    job->found_folder = failure != 0 ? KV_DISK_FOLDER_REFUSED
                        : is_empty   ? KV_DISK_FOLDER_NEW
                                     : KV_DISK_FOLDER_KEPT;
    return failure;
}

void kv_disk_job_run(struct kv_io_job *io_job, int32_t worker_idx)
{
    struct kv_disk_job *job = (struct kv_disk_job *)io_job;
    const struct kv_disk_work *work = job->work;
    const struct kv_files *files = work->files;
    struct kv_segment_layout layout;
    char path[KV_DISK_WORK_PATH_BYTES];
    if (job->kind == KV_DISK_JOB_PACK) {
        pack(job, worker_idx);
        return;
    }
    job->failure = keep_folder(job);
    if (job->failure == 0) {
        job->failure = kv_disk_work_path(work, job->number, false, path);
    }
    if (job->failure != 0) {
        return;
    }
    switch (job->kind) {
    case KV_DISK_JOB_PUT:
        job->failure = write_block(job, path);
        break;
    case KV_DISK_JOB_CREATE:
        layout = kv_segment_with_blocks(&work->layout, job->num_blocks);
        job->failure = kv_segment_create(files, path, &layout);
        break;
    case KV_DISK_JOB_REMOVE:
        job->failure = files->remove(files->user, path);
        break;
    case KV_DISK_JOB_MOVE:
        job->failure = move_block(job, path);
        break;
    case KV_DISK_JOB_GET:
    case KV_DISK_JOB_PACK:
    case KV_DISK_JOB_FREE:
        break;
    }
}

/* The block has been read to where it shall be, packed or not. */
static int unpack(const struct kv_disk_job *job, int32_t worker_idx)
{
    const struct kv_disk_work *work = job->work;
    uint32_t stored_bytes = job->entry.stored_bytes;
    if (!kv_segment_is_intact(&job->entry, job->block)) {
        return -EBADMSG;
    }
    if (stored_bytes == work->layout.block_bytes) {
        return 0;
    }
    unsigned char *packed = buffer_at(work, work->num_buffers + worker_idx);
    memcpy(packed, job->block, stored_bytes);
    return kv_codec_unpack(work->unpackers[worker_idx], packed, stored_bytes, job->block)
               ? 0
               : -EBADMSG;
}

void kv_disk_job_end(struct kv_io_job *io_job, int failure, int32_t worker_idx)
{
    struct kv_disk_job *job = (struct kv_disk_job *)io_job;
    job->failure = failure == 0 ? unpack(job, worker_idx) : failure;
}

/* ---- create and destroy ---------------------------------------------------------------------- */

/* What packing and unpacking need, if anything is packed. */
static enum imbrex_status create_codecs(struct kv_disk_work *work, int32_t zstd_level,
                                        bool has_packed, struct imbrex_error *err)
{
    size_t block_bytes = work->layout.block_bytes;
    bool packs = zstd_level > 0;
    for (int32_t i = 0; (packs || has_packed) && i < work->num_readers; i++) {
        TRY(kv_codec_create(block_bytes, &work->unpackers[i], err));
    }
    for (int32_t i = 0; packs && i < KV_DISK_WORK_NUM_PACKERS; i++) {
        TRY(kv_codec_create(block_bytes, &work->packers[i], err));
        TRY(kv_codec_prepare_pack(work->packers[i], zstd_level, err));
    }
    return IMBREX_STATUS_OK;
}

/* Address space that is taken up as far as it is used. */
static enum imbrex_status create_buffers(struct kv_disk_work *work, struct imbrex_error *err)
{
    size_t block_bytes = work->layout.block_bytes;
    size_t num_buffers = BUFFERS_BYTES / block_bytes;
    num_buffers = num_buffers > MIN_BUFFERS ? num_buffers : MIN_BUFFERS;
    work->num_buffers =
        (int32_t)(num_buffers < KV_DISK_WORK_MAX_BUFFERS ? num_buffers : KV_DISK_WORK_MAX_BUFFERS);
    return memory_region_map("the disk tier's buffers",
                             (size_t)(work->num_buffers + work->num_readers + 1) * block_bytes,
                             &work->buffers, err);
}

enum imbrex_status kv_disk_work_create(struct kv_disk_work *work, int32_t zstd_level,
                                       bool has_packed, struct imbrex_error *err)
{
    TRY(create_codecs(work, zstd_level, has_packed, err));
    return create_buffers(work, err);
}

void kv_disk_work_destroy(struct kv_disk_work *work)
{
    for (int32_t i = 0; i < KV_DISK_WORK_MAX_READERS; i++) {
        kv_codec_destroy(work->unpackers[i]);
    }
    for (int32_t i = 0; i < KV_DISK_WORK_NUM_PACKERS; i++) {
        kv_codec_destroy(work->packers[i]);
    }
    memory_region_unmap(&work->buffers);
}
