/* SPDX-License-Identifier: Apache-2.0 */
/* A disk tier in a folder of the tests, and blocks that say which they are. */
#ifndef IMBREX_TESTS_DISK_BLOCKS_H
#define IMBREX_TESTS_DISK_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "kv/kv_disk.h"
#include "kv/kv_pool.h"

#define FOLDER TEST_BUILD_DIR "/tests/kv-disk"

/* SLOTS blocks fit a segment if they are not packed. */
enum { BLOCK_BYTES = 16384, SLOTS = 4, SEGMENT_BYTES = SLOTS * BLOCK_BYTES, WAIT_NS = 1000000000 };

static const struct kv_key owner = {{1, 2, 3, 4}};

/* How tiers are opened from now on. */
struct disk_way {
    bool forbids_ring;
    int32_t zstd_level;
};
extern struct disk_way disk_way;

struct tier {
    struct kv_folder folder;
    struct kv_disk *disk;
};

void empty_folder(void);
/* The folder keeps its secret and its lock. */
void remove_segments(void);
void open_tier(struct tier *tier, const struct kv_files *files, int32_t max_segments);
void close_tier(struct tier *tier);

/* Block number i: its key, its ids, its contents, of which every second byte is noise. */
struct kv_key key_of(int32_t i);
void ids_of(int32_t i, int32_t ids[KV_BLOCK_SIZE]);
void fill(int32_t i, unsigned char block[BLOCK_BYTES]);

/* Whether the block was taken and is there now. */
bool put(struct kv_disk *disk, int32_t i);
bool has(const struct kv_disk *disk, int32_t i);
/* Whether the block came back; what comes back is the block. */
bool get(struct kv_disk *disk, int32_t i);
struct kv_disk_metrics metrics_of(const struct kv_disk *disk);

/* Writes that end at num_cuts random bytes, each followed by a restart: exactly the blocks whose
 * put was done are there, and the folder can be used. */
void cut_anywhere(int32_t num_cuts, uint64_t seed);
/* The same where the oldest segments are cleaned meanwhile: what the tier knew when it died is
 * there. */
void cut_while_cleaned(int32_t num_cuts, uint64_t seed);

#endif
