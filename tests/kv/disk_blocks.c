/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kv/disk_blocks.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/kv/faulty_files.h"
#include "tests/test.h"

struct disk_way disk_way;

/* ---- a folder -------------------------------------------------------------------------------- */

void empty_folder(void)
{
    char path[512];
    DIR *folder = opendir(FOLDER);
    for (const struct dirent *item; folder != NULL && (item = readdir(folder)) != NULL;) {
        (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, item->d_name);
        if (item->d_name[0] != '.') {
            assert_int_equal(unlink(path), 0);
        }
    }
    if (folder != NULL) {
        (void)closedir(folder);
        assert_int_equal(rmdir(FOLDER), 0);
    }
}

void open_tier(struct tier *tier, const struct kv_files *files, int32_t max_segments)
{
    struct imbrex_error err = {0};
    if (kv_folder_open(FOLDER, &tier->folder, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    struct kv_disk_options options = {
        .folder = &tier->folder,
        .owner = owner,
        .block_bytes = BLOCK_BYTES,
        .max_bytes = kv_disk_min_bytes(BLOCK_BYTES, SEGMENT_BYTES) / 2 * (size_t)max_segments,
        .segment_bytes = SEGMENT_BYTES,
        .num_readers = 1,
        .zstd_level = disk_way.zstd_level,
        .forbids_ring = disk_way.forbids_ring,
        .files = files,
    };
    if (kv_disk_open(&options, &tier->disk, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

void close_tier(struct tier *tier)
{
    kv_disk_close(tier->disk);
    kv_folder_close(&tier->folder);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

struct kv_key key_of(int32_t i)
{
    return (struct kv_key){{(uint64_t)i * 0x9e3779b97f4a7c15u + 1, (uint64_t)i, 5, 7}};
}

void ids_of(int32_t i, int32_t ids[KV_BLOCK_SIZE])
{
    for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
        ids[j] = 100 * i + j;
    }
}

void fill(int32_t i, unsigned char block[BLOCK_BYTES])
{
    uint32_t random = (uint32_t)i * 2654435761u + 1;
    for (int32_t j = 0; j < BLOCK_BYTES; j++) {
        random = random * 1664525u + 1013904223u;
        block[j] = (unsigned char)(j % 2 == 0 ? random >> 24 : (uint32_t)i);
    }
}

static struct kv_disk_result await(struct kv_disk *disk)
{
    struct kv_disk_result result;
    while (!kv_disk_poll(disk, &result)) {
        kv_disk_wait(disk, WAIT_NS);
    }
    return result;
}

bool put(struct kv_disk *disk, int32_t i)
{
    unsigned char block[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    fill(i, block);
    ids_of(i, ids);
    if (!kv_disk_put(disk, &key, ids, block, i)) {
        return false;
    }
    struct kv_disk_result result = await(disk);
    assert_int_equal(result.tag, i);
    assert_false(result.is_get);
    assert_int_equal(kv_disk_has(disk, &key, ids), result.is_good);
    return result.is_good;
}

bool has(const struct kv_disk *disk, int32_t i)
{
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    ids_of(i, ids);
    return kv_disk_has(disk, &key, ids);
}

bool get(struct kv_disk *disk, int32_t i)
{
    _Alignas(4096) unsigned char block[BLOCK_BYTES], expected[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    ids_of(i, ids);
    if (!kv_disk_get(disk, &key, ids, block, i)) {
        return false;
    }
    struct kv_disk_result result = await(disk);
    assert_int_equal(result.tag, i);
    assert_true(result.is_get);
    if (result.is_good) {
        fill(i, expected);
        assert_memory_equal(block, expected, BLOCK_BYTES);
    } else {
        assert_false(kv_disk_has(disk, &key, ids));
    }
    return result.is_good;
}

struct kv_disk_metrics metrics_of(const struct kv_disk *disk)
{
    struct kv_disk_metrics metrics;
    kv_disk_read_metrics(disk, &metrics);
    return metrics;
}

/* ---- cuts ------------------------------------------------------------------------------------ */

void remove_segments(void)
{
    char path[512];
    DIR *folder = opendir(FOLDER);
    for (const struct dirent *item; folder != NULL && (item = readdir(folder)) != NULL;) {
        if (strchr("0123456789abcdef", item->d_name[0]) != NULL) {
            (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, item->d_name);
            assert_int_equal(unlink(path), 0);
        }
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
}

/* What a tier writes until it dies after num_bytes; returns how many blocks it knew to be there. */
static int32_t write_until(int64_t num_bytes, int32_t num_blocks, int64_t *num_written)
{
    struct tier tier;
    struct faulty_files faulty;
    int32_t num_put = 0;
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, 4);
    faulty.num_bytes_left = num_bytes;
    for (int32_t i = 0; i < num_blocks && put(tier.disk, i); i++) {
        num_put++;
    }
    close_tier(&tier);
    *num_written = faulty.num_bytes_written;
    return num_put;
}

void cut_anywhere(int32_t num_cuts, uint64_t seed)
{
    enum { NUM_BLOCKS = 6 };
    int64_t num_bytes = 0, num_written;
    uint64_t random = seed;
    int32_t num_seen[NUM_BLOCKS + 1] = {0};
    empty_folder();
    assert_int_equal(write_until(INT64_MAX, NUM_BLOCKS, &num_bytes), NUM_BLOCKS);
    for (int32_t cut = 0; cut < num_cuts; cut++) {
        struct tier tier;
        random = random * 6364136223846793005u + 1442695040888963407u;
        int64_t cut_at = 1 + (int64_t)((random >> 33) % (uint64_t)num_bytes);
        /* Every second one near an edge between two writes. */
        if (cut % 2 == 0) {
            cut_at = cut_at / BLOCK_BYTES * BLOCK_BYTES + (int64_t)((random >> 20) % 512);
            cut_at = cut_at < 1 ? 1 : cut_at;
        }
        remove_segments();
        int32_t num_put = write_until(cut_at, NUM_BLOCKS, &num_written);
        open_tier(&tier, NULL, 4);
        assert_true(kv_disk_check(tier.disk));
        assert_int_equal(metrics_of(tier.disk).num_blocks, num_put);
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            assert_int_equal(get(tier.disk, i), i < num_put);
        }
        assert_true(put(tier.disk, num_put));
        assert_true(get(tier.disk, num_put));
        num_seen[num_put]++;
        close_tier(&tier);
    }
    for (int32_t i = 0; i < NUM_BLOCKS; i++) {
        assert_true(num_seen[i] > 0);
    }
}

void cut_while_cleaned(int32_t num_cuts, uint64_t seed)
{
    enum { NUM_BLOCKS = 64, NUM_SEGMENTS = 8 };
    uint64_t random = seed;
    int64_t num_bytes = 0;
    int32_t num_moved = 0;
    empty_folder();
    for (int32_t cut = -1; cut < num_cuts; cut++) {
        struct tier tier;
        struct faulty_files faulty;
        bool is_known[NUM_BLOCKS];
        random = random * 6364136223846793005u + 1442695040888963407u;
        if (cut >= 0) {
            remove_segments();
        }
        faulty_files_init(&faulty);
        open_tier(&tier, &faulty.files, NUM_SEGMENTS);
        /* Behind the first segments, of which none is cleaned. */
        faulty.num_bytes_left =
            cut < 0 ? INT64_MAX
                    : num_bytes / 3 + (int64_t)((random >> 33) % (uint64_t)(num_bytes * 2 / 3));
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            if (!put(tier.disk, i)) {
                break;
            }
            if (i % 3 == 0) {
                (void)get(tier.disk, i);
            }
        }
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            is_known[i] = has(tier.disk, i);
        }
        num_moved += metrics_of(tier.disk).num_moved > 0;
        close_tier(&tier);
        num_bytes = cut < 0 ? faulty.num_bytes_written : num_bytes;
        /* With room, so that nothing goes before it is looked at. */
        open_tier(&tier, NULL, 2 * NUM_SEGMENTS);
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            assert_true(get(tier.disk, i) || !is_known[i]);
        }
        assert_true(put(tier.disk, NUM_BLOCKS));
        assert_true(get(tier.disk, NUM_BLOCKS));
        assert_true(kv_disk_check(tier.disk));
        close_tier(&tier);
    }
    assert_true(num_moved > num_cuts / 4);
}
