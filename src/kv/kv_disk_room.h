/* SPDX-License-Identifier: Apache-2.0 */
/* What the file system has room for, where that is less than the folder may have: learned from what
 * it refuses, and tried again now and then. Segments become smaller before one goes for another, so
 * that what goes is no more than a quarter of what there is. */
#ifndef IMBREX_KV_KV_DISK_ROOM_H
#define IMBREX_KV_KV_DISK_ROOM_H

#include <stdbool.h>

#include "kv/kv_segment.h"

struct kv_disk_room {
    struct kv_segment_layout layout; /* of the next segment */
    int32_t max_blocks;              /* of one */
    int64_t folder_bytes;            /* that all segments may take */
    int64_t max_bytes;               /* that they may take now */
    int32_t num_until_retry;         /* segments, while that or a segment is less */
    int32_t num_tries;               /* before it is given up */
    uint32_t num_full;               /* how often the file system was full */
};

/* layout: of the largest segment. */
void kv_disk_room_init(struct kv_disk_room *room, const struct kv_segment_layout *layout,
                       int64_t folder_bytes);

/* Whether `failure`, 0 or -errno, says that a file system, or the share of it that one may have, is
 * full, or that files may not be so large. */
bool kv_disk_is_full(int failure);
/* A segment of failed_bytes did not fit beside those of num_bytes. num_known: num_full when it was
 * given to the disk; what was given before is no news. False: it has been tried long enough with
 * less, or there is nothing to give up: what is known is forgotten, and the caller tries again
 * later. */
bool kv_disk_room_shrink(struct kv_disk_room *room, int64_t num_bytes, int64_t failed_bytes,
                         uint32_t num_known);
/* A segment has been begun, or refused: with the next one more may be tried. */
void kv_disk_room_begun(struct kv_disk_room *room);
/* A block has been written. */
void kv_disk_room_written(struct kv_disk_room *room);

/* What a segment of one block takes. */
int64_t kv_disk_room_min_bytes(const struct kv_disk_room *room);

#endif
