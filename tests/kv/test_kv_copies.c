/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between slots and blocks, on a device whose streams overtake each other. */
#include "kv/kv_copies.h"

#include <string.h>

#include "ops/fake/device_fake.h"
#include "tests/test.h"

enum { BLOCK_BYTES = 4096, NUM_BLOCKS = 150, NUM_SEEDS = TEST_SANITIZED ? 5 : 40 };

struct world {
    struct device *device;
    unsigned char *blocks;
    struct kv_host host; /* of which only the memory is used */
    struct kv_copies *copies;
};

static void create(struct world *world, uint64_t seed)
{
    void *blocks;
    *world = (struct world){.device = NULL};
    assert_int_equal(device_fake_create(seed, &world->device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(
        device_alloc(world->device, "blocks", (size_t)NUM_BLOCKS * BLOCK_BYTES, &blocks, NULL),
        IMBREX_STATUS_OK);
    world->blocks = blocks;
    assert_int_equal(kv_host_create(world->device, NUM_BLOCKS, BLOCK_BYTES, &world->host, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(
        kv_copies_create(world->device, world->blocks, &world->host, &world->copies, NULL),
        IMBREX_STATUS_OK);
    for (int32_t i = 0; i < NUM_BLOCKS; i++) {
        memset(world->blocks + (size_t)i * BLOCK_BYTES, i + 1, BLOCK_BYTES);
        memset(kv_host_block(&world->host, i), 0, BLOCK_BYTES);
    }
}

static void destroy(struct world *world)
{
    kv_copies_destroy(world->copies);
    kv_host_destroy(&world->host);
    device_free(world->device, world->blocks);
    device_destroy(world->device);
}

static bool is_slot(const struct world *world, int32_t slot_idx, int32_t byte)
{
    const unsigned char *slot = kv_host_block(&world->host, slot_idx);
    return slot[0] == byte && slot[BLOCK_BYTES - 1] == byte;
}

/* A step that writes over all blocks. */
static enum imbrex_status write_over(void *arg, void *stream_handle)
{
    const struct world *world = arg;
    (void)stream_handle;
    memset(world->blocks, 0xee, (size_t)NUM_BLOCKS * BLOCK_BYTES);
    return IMBREX_STATUS_OK;
}

/* Several batches out, and a step behind them. Catches: a step that does not wait for one of them;
 * copies that come back before they are done, in another order, twice or never; a batch without
 * copies that is taken for one. */
static void test_out(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= NUM_SEEDS; seed++) {
        struct world world;
        struct kv_copy copy;
        bool is_good;
        create(&world, seed);
        assert_true(kv_copies_make_room(world.copies));
        assert_int_equal(kv_copies_start(world.copies), IMBREX_STATUS_OK);
        assert_false(kv_copies_take_out(world.copies, true, &copy, &is_good));
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            assert_true(kv_copies_make_room(world.copies));
            kv_copies_add_out(world.copies, NUM_BLOCKS - 1 - i, i, false);
        }
        assert_int_equal(kv_copies_start(world.copies), IMBREX_STATUS_OK);
        assert_int_equal(device_run_async(world.device, DEVICE_STREAM_STEP, write_over, &world),
                         IMBREX_STATUS_OK);
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            assert_true(kv_copies_is_under_way(world.copies, KV_DIRECTION_OUT));
            assert_true(kv_copies_take_out(world.copies, true, &copy, &is_good));
            assert_true(is_good);
            assert_int_equal(copy.block_idx, i);
            assert_int_equal(copy.slot_idx, NUM_BLOCKS - 1 - i);
            assert_true(is_slot(&world, copy.slot_idx, (i + 1) & 0xff));
        }
        assert_false(kv_copies_take_out(world.copies, true, &copy, &is_good));
        destroy(&world);
    }
}

/* A block that goes out and another that comes in to its place at once. Catches: a copy in that
 * does not wait for the copy out of what it is written over. */
static void test_exchange(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= NUM_SEEDS; seed++) {
        struct world world;
        struct kv_copy copy;
        bool is_sliced, is_good;
        enum { NUM_EXCHANGED = 70 }; /* more than a batch */
        create(&world, seed);
        for (int32_t i = 0; i < NUM_EXCHANGED; i++) {
            memset(kv_host_block(&world.host, NUM_EXCHANGED + i), 200 - i, BLOCK_BYTES);
            assert_true(kv_copies_make_room(world.copies));
            kv_copies_add_out(world.copies, i, i, false);
            const struct kv_copy in = {
                .slot_idx = NUM_EXCHANGED + i, .block_idx = i, .from = KV_TIER_DISK};
            assert_true(kv_copies_can_add_in(world.copies));
            assert_true(kv_copies_add_in(world.copies, &in));
        }
        assert_int_equal(kv_copies_num_in(world.copies), NUM_EXCHANGED);
        assert_int_equal(kv_copies_start(world.copies), IMBREX_STATUS_OK);
        for (int32_t i = 0; i < NUM_EXCHANGED;) {
            if (!kv_copies_take_in(world.copies, &copy, &is_sliced, &is_good)) {
                kv_copies_wait(world.copies, KV_DIRECTION_IN);
                continue;
            }
            assert_true(is_good && !is_sliced);
            assert_int_equal(copy.block_idx, i);
            assert_int_equal(copy.from, KV_TIER_DISK);
            assert_int_equal(world.blocks[(size_t)i * BLOCK_BYTES], 200 - i);
            i++;
        }
        for (int32_t i = 0; i < NUM_EXCHANGED; i++) {
            assert_true(kv_copies_take_out(world.copies, true, &copy, &is_good));
            assert_true(is_good && is_slot(&world, i, i + 1));
        }
        destroy(&world);
    }
}

/* What the device refuses. Catches: a copy that was not done and comes back as if it were; one
 * after it that is lost with it. */
static void test_faults(void **state)
{
    (void)state;
    struct world world;
    struct kv_copy copy;
    bool is_good;
    create(&world, 7);
    device_fake_fail(world.device, DEVICE_FAKE_FAULT_COPY, 1, IMBREX_STATUS_IO);
    assert_true(kv_copies_make_room(world.copies));
    kv_copies_add_out(world.copies, 0, 0, false);
    assert_int_equal(kv_copies_start(world.copies), IMBREX_STATUS_OK);
    assert_true(kv_copies_take_out(world.copies, true, &copy, &is_good));
    assert_false(is_good);
    assert_true(kv_copies_make_room(world.copies));
    kv_copies_add_out(world.copies, 1, 1, false);
    assert_int_equal(kv_copies_start(world.copies), IMBREX_STATUS_OK);
    assert_true(kv_copies_take_out(world.copies, true, &copy, &is_good));
    assert_true(is_good && is_slot(&world, 1, 2));
    destroy(&world);
}

int run_kv_copies_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_out),
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests_name("kv_copies", tests, NULL, NULL);
}
