/* SPDX-License-Identifier: Apache-2.0 */
/* What the disk tier knows of its folder: which segments there are, which block lies where, what
 * goes first when room is needed. It touches no file, and one thread uses it, the disk tier's user;
 * kv_disk_scan.h fills it when the tier is opened. */
#ifndef IMBREX_KV_KV_DISK_INDEX_H
#define IMBREX_KV_KV_DISK_INDEX_H

#include "kv/kv_disk.h"
#include "kv/kv_segment.h"
#include "kv/kv_table.h"

struct kv_disk_segment {
    uint32_t number;
    int32_t num_blocks; /* that it has room for if none is packed */
    int32_t num_taken;  /* places that puts were given */
    int32_t num_valid;  /* of these, those that can be found */
    int32_t num_jobs;   /* that name it */
    uint32_t next_page; /* that a put gets */
    uint64_t last_use;
    bool is_used;      /* else the place is free */
    bool is_made;      /* its file is there */
    bool is_dead;      /* there is no such file: goes with its last job */
    bool is_passed_on; /* and puts to it go to another */
};

/* A file that counts, but has nothing for us. */
struct kv_disk_foreign {
    uint32_t number;
    int64_t num_bytes;
};

/* A block is named by its segment's place and its own in it: place * num_slots + slot_idx. */
struct kv_disk_index {
    struct kv_segment_layout layout;  /* of the largest segment */
    int64_t max_bytes;                /* of all segments */
    struct kv_disk_segment *segments; /* [max_segments] */
    int32_t max_segments;
    int32_t current;                  /* that puts go to; -1: none */
    struct kv_key *keys;              /* [max_segments * num_slots] */
    struct kv_segment_entry *entries; /* the same; those in the table count */
    bool *was_got;                    /* the same: since it was written there */
    struct kv_table table;
    struct kv_disk_foreign *foreign; /* [num_foreign], the oldest first; those from first_foreign on
                                      * are there */
    int32_t num_foreign, first_foreign;
    uint32_t *strange; /* [metrics.num_strange] numbers of files that are not ours to touch */
    uint32_t next_number;
    uint64_t num_uses;
    struct kv_disk_metrics metrics;
};

/* Empty. max_bytes: at least those of one segment. On failure there is nothing to destroy. */
enum imbrex_status kv_disk_index_create(const struct kv_segment_layout *layout, size_t max_bytes,
                                        struct kv_disk_index *index, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void kv_disk_index_destroy(struct kv_disk_index *index);

/* The block; -1: not there. token_ids: [KV_BLOCK_SIZE], compared. */
int32_t kv_disk_index_find(const struct kv_disk_index *index, const struct kv_key *key,
                           const int32_t *token_ids);
static inline int32_t kv_disk_index_slot(const struct kv_disk_index *index, int32_t segment_idx,
                                         int32_t slot_idx)
{
    return segment_idx * index->layout.num_slots + slot_idx;
}
/* Whether the block can be found: not dropped, and no other has its key. */
bool kv_disk_index_has(const struct kv_disk_index *index, int32_t block);
/* No block of that key can be found yet. */
void kv_disk_index_add(struct kv_disk_index *index, int32_t segment_idx, int32_t slot_idx,
                       const struct kv_segment_entry *entry);
/* It can be found. */
void kv_disk_index_drop(struct kv_disk_index *index, int32_t block);

/* A place for a segment; -1: none is free. */
int32_t kv_disk_index_free_place(const struct kv_disk_index *index);
/* Whether a file has that number, as far as is known. */
bool kv_disk_index_is_taken(const struct kv_disk_index *index, uint32_t number);
/* Puts go to a new segment at that free place, which counts from now on. num_blocks: at most the
 * layout's. */
struct kv_disk_segment *kv_disk_index_begin(struct kv_disk_index *index, int32_t segment_idx,
                                            uint32_t number, int32_t num_blocks);
/* What its file takes. */
int64_t kv_disk_index_file_bytes(const struct kv_disk_index *index, int32_t segment_idx);
/* Whether it takes a block of so many bytes. */
bool kv_disk_index_has_place(const struct kv_disk_index *index, int32_t segment_idx,
                             size_t stored_bytes);
/* Which of the segments goes next; -1: none may. */
int32_t kv_disk_index_oldest(const struct kv_disk_index *index);
/* Its file is not there, or is somebody else's: none of its blocks can be found any more, and it
 * does not count. The place becomes free when nothing names it. */
void kv_disk_index_lose(struct kv_disk_index *index, int32_t segment_idx);
/* A job names it no more. */
void kv_disk_index_leave(struct kv_disk_index *index, int32_t segment_idx);
/* The place becomes free. Nothing names it, and none of its blocks can be found. */
void kv_disk_index_remove(struct kv_disk_index *index, int32_t segment_idx);
/* One file less: that of another owner, or the oldest segment, which is told in *segment_idx, else
 * -1. False if none may go; the caller removes the file. */
bool kv_disk_index_evict(struct kv_disk_index *index, uint32_t *number, int32_t *segment_idx);

/* True if all parts agree. */
bool kv_disk_index_check(const struct kv_disk_index *index);

#endif
