/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_disk_room.h"

#include <errno.h>

/* Segments that are begun before more is tried: a try costs a call of the writer. */
#define NUM_UNTIL_RETRY 8
/* Segments that go one behind the other, and the disk is as full as before: somebody else takes the
 * room. */
#define MAX_TRIES 4
/* A segment is no larger than this part of all. */
#define MIN_SEGMENTS 4

static void set_blocks(struct kv_disk_room *room, int32_t num_blocks)
{
    room->layout = kv_segment_with_blocks(&room->layout, num_blocks);
}

static void forget(struct kv_disk_room *room)
{
    set_blocks(room, room->max_blocks);
    room->max_bytes = room->folder_bytes;
    room->num_tries = MAX_TRIES;
}

void kv_disk_room_init(struct kv_disk_room *room, const struct kv_segment_layout *layout,
                       int64_t folder_bytes)
{
    *room = (struct kv_disk_room){
        .layout = *layout, .max_blocks = layout->num_blocks, .folder_bytes = folder_bytes};
    forget(room);
}

bool kv_disk_is_full(int failure)
{
    return failure == -ENOSPC || failure == -EDQUOT || failure == -EFBIG;
}

bool kv_disk_room_shrink(struct kv_disk_room *room, int64_t num_bytes, int64_t failed_bytes,
                         uint32_t num_known)
{
    int64_t max_bytes = num_bytes + failed_bytes - 1;
    if (num_known != room->num_full) {
        return true;
    }
    room->max_bytes = max_bytes < room->max_bytes ? max_bytes : room->max_bytes;
    room->num_full++;
    room->num_until_retry = NUM_UNTIL_RETRY;
    if (room->layout.num_blocks > 1 &&
        MIN_SEGMENTS * kv_segment_file_bytes(&room->layout) > num_bytes) {
        set_blocks(room, room->layout.num_blocks / 2);
        return true;
    }
    if (num_bytes == 0 || room->num_tries == 0) {
        forget(room);
        return false;
    }
    room->num_tries--;
    return true;
}

void kv_disk_room_begun(struct kv_disk_room *room)
{
    if (room->max_bytes == room->folder_bytes && room->layout.num_blocks == room->max_blocks) {
        return;
    }
    room->num_until_retry--;
    if (room->num_until_retry == 0) {
        room->num_until_retry = NUM_UNTIL_RETRY;
        int32_t num_blocks = room->layout.num_blocks * 2;
        room->max_bytes = room->folder_bytes;
        set_blocks(room, num_blocks < room->max_blocks ? num_blocks : room->max_blocks);
    }
}

void kv_disk_room_written(struct kv_disk_room *room)
{
    room->num_tries = MAX_TRIES;
}

int64_t kv_disk_room_min_bytes(const struct kv_disk_room *room)
{
    struct kv_segment_layout smallest = kv_segment_with_blocks(&room->layout, 1);
    return kv_segment_file_bytes(&smallest);
}
