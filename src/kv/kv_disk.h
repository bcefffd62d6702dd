/* SPDX-License-Identifier: Apache-2.0 */
/* The disk tier: blocks in segments (kv_segment.h) of a folder, found by their key, moved by its
 * own threads. One thread uses it; nothing waits for a disk but kv_disk_open, kv_disk_close and
 * kv_disk_wait.
 *
 *   put   the block is on its way; it can be found once poll has said that it is there
 *   get   the block is on its way; it is the block once poll has said so, garbage before
 *
 * A file or a folder that somebody removes costs the blocks that were in it. The folder is made
 * anew, unless another is in its place by then: as long as that is so, nothing is kept.
 *
 * What fails costs the block and nothing else: it is not found any more, counted, and its user
 * computes it again. Room is made by whole segments: the one that was used longest ago goes, those
 * of other owners first; of larger folders in the background, and blocks that were got since they
 * were written stay. A disk that is full before the folder has what it may have is a smaller folder
 * (kv_disk_room.h), and what was to be written then is written all the same. */
#ifndef IMBREX_KV_KV_DISK_H
#define IMBREX_KV_KV_DISK_H

#include "kv/kv_files.h"
#include "kv/kv_folder.h"
#include "kv/kv_key.h"
#include "kv/kv_segment.h"

/* Jobs under way at once, puts and gets together. */
#define KV_DISK_MAX_JOBS 64

struct kv_disk_options {
    struct kv_folder *folder; /* open as long as the tier is, and the tier's */
    /* Of whom the blocks are: differs wherever a block of one would be wrong for the other. */
    struct kv_key owner;
    size_t block_bytes;           /* a multiple of KV_BLOCK_ALIGNMENT */
    size_t max_bytes;             /* of all segments in the folder */
    size_t segment_bytes;         /* of one, at most, if a block fits; 0: 32 MiB */
    int32_t num_readers;          /* threads; 0: as many as serve a disk well */
    int32_t zstd_level;           /* that blocks are packed with (kv_codec.h); 0: as they are */
    bool forbids_ring;            /* reads are done by threads alone */
    const struct kv_files *files; /* NULL: the system's */
};

/* What became of a put or get. */
struct kv_disk_result {
    int32_t tag;
    bool is_get;
    bool is_good;
};

struct kv_disk_metrics {
    uint64_t num_put, num_got;   /* blocks that went there, that came back whole */
    uint64_t num_put_bytes;      /* that those that went there take */
    uint64_t num_refused;        /* puts without room, or after a failure to make any */
    uint64_t num_segment_faults; /* segments that could not be made, nor smaller ones */
    uint64_t num_full;           /* times that the disk was full: others go, or they get smaller */
    uint64_t num_left_out;       /* of the refused puts, those that such a failure cost */
    uint64_t num_remove_faults;  /* segments that could not be removed */
    uint64_t num_write_faults;   /* blocks not written: no room on the disk, or it failed */
    uint64_t num_read_faults;    /* blocks not read */
    uint64_t num_damaged;        /* blocks, entries and headers that are not what was written */
    uint64_t num_evicted;        /* blocks that went for others */
    uint64_t num_gone;           /* blocks whose files somebody removed */
    uint64_t num_folder_losses;  /* times that the folder was not there, or not ours, any more */
    uint64_t num_moved;          /* blocks that stayed when the rest of their segment went */
    int64_t num_blocks, num_segments, num_bytes; /* now; bytes with those of other owners */
    int64_t max_bytes;                           /* that all may take, if the disk has them */
    int64_t num_foreign_bytes;                   /* of other owners, now */
    int64_t needed_bytes; /* of a file that there was no room for and nothing to go for; 0: none */
    /* Files named like segments that are none: left alone. The first one's name, and errno, why it
     * cannot be read; 0: it has other contents. */
    int64_t num_strange;
    char strange_name[KV_SEGMENT_NAME_BYTES];
    int strange_failure;
    int segment_failure; /* errno of the last segment that could not be made or removed, */
    int write_failure;   /* of the last block that was not written, */
    int read_failure;    /* and not read */
    int folder_failure;  /* errno: why the folder could not be made anew; 0: it was */
    int ring_failure;    /* errno: why the kernel does not do reads on its own; 0: it does */
};

struct kv_disk;

/* The smallest max_bytes that there can be. */
size_t kv_disk_min_bytes(size_t block_bytes, size_t segment_bytes);

/* Reads what the folder has: headers and entries, no blocks. INVALID_ARGUMENT if max_bytes is too
 * small, UNSUPPORTED if blocks are to be packed and this build cannot, IO if the folder cannot be
 * read, OUT_OF_MEMORY. */
enum imbrex_status kv_disk_open(const struct kv_disk_options *options, struct kv_disk **disk,
                                struct imbrex_error *err);
/* Finishes all puts, gives up gets. NULL does nothing. */
void kv_disk_close(struct kv_disk *disk);

/* Whether the block can be got. token_ids: [KV_BLOCK_SIZE], compared. */
bool kv_disk_has(const struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids);

/* Whether a put or get would be taken as far as jobs go. */
bool kv_disk_is_ready(const struct kv_disk *disk);
/* Jobs that poll has not given back. */
int32_t kv_disk_num_jobs(const struct kv_disk *disk);

/* `block` [block_bytes] is the tier's to read, or to write, until poll gives the tag back; tags of
 * jobs under way are different. False: not taken. */
bool kv_disk_put(struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids,
                 const void *block, int32_t tag);
bool kv_disk_get(struct kv_disk *disk, const struct kv_key *key, const int32_t *token_ids,
                 void *block, int32_t tag);
/* Takes a get back that has not begun: poll will not name it. */
bool kv_disk_cancel_get(struct kv_disk *disk, int32_t tag);

/* The next result; false: there is none yet. */
bool kv_disk_poll(struct kv_disk *disk, struct kv_disk_result *result);
/* Waits for a job to be done, at most timeout_ns. Poll may still say that there is no result. */
void kv_disk_wait(struct kv_disk *disk, int64_t timeout_ns);

void kv_disk_read_metrics(const struct kv_disk *disk, struct kv_disk_metrics *metrics);
/* True if index and segments agree. For tests and idle moments. */
bool kv_disk_check(const struct kv_disk *disk);

#endif
