/* SPDX-License-Identifier: Apache-2.0 */
/* The tiers below the KV cache, with every single request for memory, threads and files refused in
 * turn: the right status, nothing leaked, the folder free again, no block that is not the one that
 * was put there; and no memory at all once they are created. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fault.h"
#include "kv/kv_codec.h"
#include "kv/kv_tiers.h"
#include "kv_block.h"

#define FOLDER TEST_BUILD_DIR "/tests/fault-kv-tiers"

enum { NUM_BLOCKS = 40, SLOTS = 4, WAIT_NS = 1000000000 };

/* How the disk tier is opened. A ring that is refused memory is done without. */
static bool forbids_ring;
static int32_t zstd_level;

static enum imbrex_status open_tiers(struct device *device, unsigned char *blocks,
                                     struct kv_folder *folder, struct kv_tiers **tiers)
{
    struct imbrex_error err = {0};
    static const struct log log;
    const struct kv_disk_options disk = {
        .folder = folder,
        .owner = {{1, 2, 3, 4}},
        .block_bytes = BLOCK_BYTES,
        .max_bytes = 64 * kv_disk_min_bytes(BLOCK_BYTES, SLOTS * BLOCK_BYTES),
        .segment_bytes = SLOTS * BLOCK_BYTES,
        .num_readers = 1,
        .zstd_level = zstd_level,
        .forbids_ring = forbids_ring,
    };
    enum imbrex_status status = kv_folder_open(FOLDER, folder, &err);
    if (status == IMBREX_STATUS_OK) {
        status = kv_tiers_create(&(struct kv_tiers_options){.device = device,
                                                            .blocks = blocks,
                                                            .block_bytes = BLOCK_BYTES,
                                                            .host_bytes = 10 * BLOCK_BYTES,
                                                            .disk = &disk,
                                                            .log = &log},
                                 tiers, &err);
    }
    assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
    return status;
}

/* All blocks go down; what does not is lost. */
static void put_all(struct kv_tiers *tiers, unsigned char *blocks)
{
    struct kv_key key;
    int32_t ids[KV_BLOCK_SIZE];
    kv_tiers_begin_flush(tiers);
    for (int32_t i = 0; i < NUM_BLOCKS; i++) {
        make_block(i, &key, ids, blocks + (size_t)i * BLOCK_BYTES);
        kv_tiers_demote(tiers, &key, ids, i);
        assert_int_equal(kv_tiers_start(tiers), IMBREX_STATUS_OK);
        kv_tiers_update(tiers, i);
    }
    kv_tiers_end_flush(tiers);
    assert_true(kv_tiers_check(tiers));
}

/* Brings one block up. False if it is not there, or could not be read. */
static bool get(struct kv_tiers *tiers, const unsigned char *blocks, int32_t i)
{
    struct kv_key key;
    int32_t ids[KV_BLOCK_SIZE];
    unsigned char expected[BLOCK_BYTES];
    struct kv_promotion promotion;
    make_block(i, &key, ids, expected);
    for (;;) {
        kv_tiers_begin_look(tiers);
        enum kv_place place = kv_tiers_look(tiers, &key, ids);
        if (place == KV_PLACE_NONE) {
            return false;
        }
        if (place == KV_PLACE_DISK) {
            assert_true(kv_tiers_fetch(tiers, &key, ids));
        } else if (place == KV_PLACE_HOST) {
            assert_true(kv_tiers_promote(tiers, &key, NULL, ids, i));
        }
        kv_tiers_end_look(tiers);
        assert_int_equal(kv_tiers_start(tiers), IMBREX_STATUS_OK);
        if (kv_tiers_poll(tiers, &promotion)) {
            assert_int_equal(promotion.block_idx, i);
            assert_true(promotion.is_good);
            assert_memory_equal(blocks + (size_t)i * BLOCK_BYTES, expected, BLOCK_BYTES);
            return true;
        }
        kv_tiers_wait(tiers, WAIT_NS);
        kv_tiers_update(tiers, 0);
    }
}

/* Down, over a restart, up again. num_got: blocks that came back. */
static enum imbrex_status live(struct device *device, unsigned char *blocks, int32_t *num_got)
{
    struct kv_folder folder = {.lock_fd = -1};
    struct kv_tiers *tiers = NULL;
    *num_got = 0;
    enum imbrex_status status = open_tiers(device, blocks, &folder, &tiers);
    if (status == IMBREX_STATUS_OK) {
        int64_t num_calls = fault_num_calls(FAULT_MEMORY);
        put_all(tiers, blocks);
        assert_int_equal(fault_num_calls(FAULT_MEMORY), num_calls);
    }
    kv_tiers_destroy(tiers);
    kv_folder_close(&folder);
    if (status != IMBREX_STATUS_OK) {
        return status;
    }
    tiers = NULL;
    status = open_tiers(device, blocks, &folder, &tiers);
    if (status == IMBREX_STATUS_OK) {
        int64_t num_calls = fault_num_calls(FAULT_MEMORY);
        memset(blocks, 0, (size_t)NUM_BLOCKS * BLOCK_BYTES);
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            *num_got += get(tiers, blocks, i);
        }
        assert_true(kv_tiers_check(tiers));
        assert_int_equal(fault_num_calls(FAULT_MEMORY), num_calls);
    }
    kv_tiers_destroy(tiers);
    kv_folder_close(&folder);
    return status;
}

static void empty_folder(void)
{
    char path[512];
    for (int32_t i = 0; i < 32; i++) {
        (void)snprintf(path, sizeof(path), "%s/%08x.imbrex-kv", FOLDER, (unsigned)i);
        (void)remove(path);
    }
}

/* What was lost was lost; the folder is as good as before. */
static enum imbrex_status live_over_folder(void *device, bool is_again, bool *is_whole)
{
    static _Alignas(4096) unsigned char blocks[NUM_BLOCKS * BLOCK_BYTES];
    int32_t num_got;
    if (!is_again) {
        empty_folder();
    }
    enum imbrex_status status = live(device, blocks, &num_got);
    *is_whole = num_got == NUM_BLOCKS;
    return status;
}

static void fail_each(enum fault_kind kind, enum imbrex_status expected)
{
    struct device *device;
    assert_int_equal(device_cpu_create(&device, NULL), IMBREX_STATUS_OK);
    assert_true(fault_each_call_of_kept(kind, kind == FAULT_MEMORY && forbids_ring, expected,
                                        live_over_folder, device) >= 20);
    device_destroy(device);
}

/* Catches: an allocation that is not checked or not freed, a lock that stays, a move that
 * allocates. */
static void test_memory(void **state)
{
    (void)state;
    forbids_ring = true;
    fail_each(FAULT_MEMORY, IMBREX_STATUS_OUT_OF_MEMORY);
    zstd_level = kv_codec_is_available();
    fail_each(FAULT_MEMORY, IMBREX_STATUS_OUT_OF_MEMORY);
    zstd_level = 0;
    forbids_ring = false;
    fail_each(FAULT_MEMORY, IMBREX_STATUS_OUT_OF_MEMORY);
}

/* Catches: a file that cannot be opened and is taken for read, or a folder of no use then. */
static void test_files(void **state)
{
    (void)state;
    fail_each(FAULT_FILE, IMBREX_STATUS_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests_name("fault_kv_tiers", tests, NULL, NULL);
}
