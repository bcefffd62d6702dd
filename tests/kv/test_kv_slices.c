/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks that come up in slices, on a device whose streams overtake each other: behind the event of
 * a slice all blocks have it, whatever else is under way. */
#include <stdlib.h>
#include <string.h>

#include "kv/kv_tiers.h"
#include "ops/fake/device_fake.h"
#include "tests/test.h"

enum {
    BLOCK_BYTES = 8192,
    NUM_BLOCKS = 200,
    NUM_SEEDS = TEST_SANITIZED ? 10 : 60,
};

static const size_t ends[] = {1024, 5120, BLOCK_BYTES};

struct world {
    struct device *device;
    struct device_event *event;
    unsigned char *blocks;
    struct kv_tiers *tiers;
    struct log log;
};

/* What a step does between two waits: reads the slices that are there. */
struct reading {
    const struct world *world;
    int32_t num_blocks;
    int32_t first_block;
    size_t begin, end;
    bool is_right; /* written */
};

static unsigned char byte_of(int32_t key_idx, size_t at)
{
    return (unsigned char)(((uint32_t)key_idx * 2654435761u + (uint32_t)at * 40503u) >> 13);
}

static struct kv_key key_of(int32_t key_idx)
{
    return (struct kv_key){{(uint64_t)(key_idx + 1) * 0x9e3779b97f4a7c15u, 1, 2, 3}};
}

static void ids_of(int32_t key_idx, int32_t ids[KV_BLOCK_SIZE])
{
    for (int32_t i = 0; i < KV_BLOCK_SIZE; i++) {
        ids[i] = key_idx * KV_BLOCK_SIZE + i;
    }
}

/* Block i of the first tier holds key i; all of them go down. */
static void create(struct world *world, uint64_t seed)
{
    struct imbrex_error err;
    void *blocks;
    *world = (struct world){.log = {NULL, NULL}};
    assert_int_equal(device_fake_create(seed, &world->device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(device_event_create(world->device, &world->event, NULL), IMBREX_STATUS_OK);
    assert_int_equal(
        device_alloc(world->device, "blocks", (size_t)NUM_BLOCKS * BLOCK_BYTES, &blocks, NULL),
        IMBREX_STATUS_OK);
    world->blocks = blocks;
    assert_int_equal(
        kv_tiers_create(&(struct kv_tiers_options){.device = world->device,
                                                   .blocks = world->blocks,
                                                   .block_bytes = BLOCK_BYTES,
                                                   .host_bytes = (size_t)NUM_BLOCKS * BLOCK_BYTES,
                                                   .log = &world->log},
                        &world->tiers, &err),
        IMBREX_STATUS_OK);
    assert_false(kv_tiers_can_slice(world->tiers));
    kv_tiers_set_slices(world->tiers, ends, 3);
    for (int32_t i = 0; i < NUM_BLOCKS; i++) {
        struct kv_key key = key_of(i);
        int32_t ids[KV_BLOCK_SIZE];
        ids_of(i, ids);
        for (size_t at = 0; at < BLOCK_BYTES; at++) {
            world->blocks[(size_t)i * BLOCK_BYTES + at] = byte_of(i, at);
        }
        kv_tiers_demote(world->tiers, &key, ids, i);
    }
    assert_int_equal(kv_tiers_start(world->tiers), IMBREX_STATUS_OK);
    assert_int_equal(device_event_record(world->device, world->event, DEVICE_STREAM_KV_OUT),
                     IMBREX_STATUS_OK);
    assert_int_equal(device_event_synchronize(world->device, world->event), IMBREX_STATUS_OK);
    kv_tiers_update(world->tiers, 0);
    memset(world->blocks, 0, (size_t)NUM_BLOCKS * BLOCK_BYTES);
}

static void destroy(struct world *world)
{
    kv_tiers_destroy(world->tiers);
    device_event_destroy(world->device, world->event);
    device_free(world->device, world->blocks);
    device_destroy(world->device);
}

static bool promote(struct world *world, int32_t key_idx, int32_t block_idx, bool is_sliced)
{
    struct kv_key key = key_of(key_idx);
    int32_t ids[KV_BLOCK_SIZE];
    ids_of(key_idx, ids);
    assert_int_equal(kv_tiers_look(world->tiers, &key, ids), KV_PLACE_HOST);
    return is_sliced ? kv_tiers_promote_sliced(world->tiers, &key, NULL, ids, block_idx)
                     : kv_tiers_promote(world->tiers, &key, NULL, ids, block_idx);
}

static enum imbrex_status read_slices(void *arg, void *stream_handle)
{
    struct reading *reading = arg;
    (void)stream_handle;
    reading->is_right = true;
    for (int32_t i = 0; i < reading->num_blocks; i++) {
        int32_t key_idx = reading->first_block + i;
        const unsigned char *block = reading->world->blocks + (size_t)key_idx * BLOCK_BYTES;
        for (size_t at = reading->begin; at < reading->end; at++) {
            reading->is_right &= block[at] == byte_of(key_idx, at);
        }
    }
    return IMBREX_STATUS_OK;
}

/* What poll gives back, in order: whole batches. Returns how many were not good. */
static int32_t poll_all(struct world *world, int32_t first_key, int32_t num_keys,
                        int32_t first_sliced)
{
    struct kv_promotion promotion;
    int32_t num_bad = 0;
    for (int32_t i = first_key; i < first_key + num_keys; i++) {
        while (!kv_tiers_poll(world->tiers, &promotion)) {
            kv_tiers_wait(world->tiers, 1000000);
        }
        struct kv_key key = key_of(i);
        assert_true(kv_key_equal(&promotion.key, &key));
        assert_int_equal(promotion.block_idx, i);
        assert_int_equal(promotion.is_sliced, i >= first_sliced);
        num_bad += !promotion.is_good;
    }
    assert_false(kv_tiers_poll(world->tiers, &promotion));
    return num_bad;
}

/* Plain ones, then sliced ones behind them, more than one call of the device takes. Catches: an
 * event that does not stand behind its slice of every block, a slice that is left out or copied to
 * another place, promotions told before their last slice is there. */
static void test_slices(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        struct world world;
        struct reading readings[3];
        struct device_event *events[KV_TIERS_MAX_SLICES];
        int32_t num_plain = (int32_t)(seed % 3) * 5, num_sliced = 1 + (int32_t)(seed * 7 % 150);
        create(&world, seed);
        assert_true(kv_tiers_can_slice(world.tiers));
        assert_int_equal(kv_tiers_slice_events(world.tiers, events), 0);
        for (int32_t i = 0; i < num_plain + num_sliced; i++) {
            assert_true(promote(&world, i, i, i >= num_plain));
        }
        assert_int_equal(kv_tiers_num_promoting(world.tiers), num_plain + num_sliced);
        assert_int_equal(kv_tiers_slice_events(world.tiers, events), 0);
        assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
        assert_int_equal(kv_tiers_slice_events(world.tiers, events), 3);
        for (int32_t i = 0; i < 3; i++) {
            readings[i] = (struct reading){.world = &world,
                                           .num_blocks = num_sliced,
                                           .first_block = num_plain,
                                           .begin = i > 0 ? ends[i - 1] : 0,
                                           .end = ends[i]};
            assert_int_equal(device_event_wait(world.device, events[i], DEVICE_STREAM_STEP),
                             IMBREX_STATUS_OK);
            assert_int_equal(
                device_run_async(world.device, DEVICE_STREAM_STEP, read_slices, &readings[i]),
                IMBREX_STATUS_OK);
        }
        assert_int_equal(device_event_record(world.device, world.event, DEVICE_STREAM_STEP),
                         IMBREX_STATUS_OK);
        assert_int_equal(device_event_synchronize(world.device, world.event), IMBREX_STATUS_OK);
        for (int32_t i = 0; i < 3; i++) {
            assert_true(readings[i].is_right);
        }
        assert_int_equal(poll_all(&world, 0, num_plain + num_sliced, num_plain), 0);
        assert_int_equal(kv_tiers_num_promoting(world.tiers), 0);
        destroy(&world);
    }
}

/* Catches: two starts that share the events, a plain promotion that joins a sliced batch or closes
 * the way for all others. */
static void test_one_at_a_time(void **state)
{
    (void)state;
    struct world world;
    struct device_event *events[KV_TIERS_MAX_SLICES];
    static const bool are_sliced[] = {true, true, false, false, true};
    create(&world, 7);
    assert_true(promote(&world, 0, 0, true));
    assert_false(kv_tiers_can_slice(world.tiers));
    assert_true(promote(&world, 1, 1, true)); /* the same start */
    assert_true(kv_tiers_can_promote(world.tiers));
    assert_true(promote(&world, 2, 2, false));
    assert_false(promote(&world, 3, 3, true)); /* something else comes between */
    assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
    assert_false(promote(&world, 3, 3, true));
    assert_true(promote(&world, 3, 3, false));
    assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
    assert_int_equal(kv_tiers_slice_events(world.tiers, events), 3);
    struct kv_promotion promotion;
    for (int32_t i = 0; i < 5; i++) {
        if (i == 4) {
            assert_true(promote(&world, 4, 4, true));
            assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
        }
        while (!kv_tiers_poll(world.tiers, &promotion)) {
            kv_tiers_wait(world.tiers, 1000000);
        }
        assert_int_equal(promotion.block_idx, i);
        assert_int_equal(promotion.is_sliced, are_sliced[i]);
        assert_true(promotion.is_good);
        assert_int_equal(kv_tiers_can_slice(world.tiers), i >= 1);
        assert_int_equal(kv_tiers_slice_events(world.tiers, events), i >= 1 ? 0 : 3);
    }
    destroy(&world);
}

/* Every copy and every call of a load fails in turn. Catches: one whose failure is not told of all
 * its blocks, or is told of the next load too; a slot that stays held. */
static void test_faults(void **state)
{
    (void)state;
    for (int32_t countdown = 1; countdown <= 3 * 10; countdown++) {
        for (int32_t is_call = 0; is_call < 2; is_call++) {
            struct world world;
            create(&world, (uint64_t)countdown);
            for (int32_t i = 0; i < 10; i++) {
                assert_true(promote(&world, i, i, true));
            }
            device_fake_aim(world.device, DEVICE_STREAM_KV_IN);
            device_fake_fail(world.device,
                             is_call != 0 ? DEVICE_FAKE_FAULT_CALL : DEVICE_FAKE_FAULT_COPY,
                             countdown, IMBREX_STATUS_IO);
            assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
            /* The first call only says where failures begin to count; then there are three of
             * copies and three of events. */
            bool is_hit = is_call == 0 || (countdown >= 2 && countdown <= 7);
            assert_int_equal(poll_all(&world, 0, 10, 0), is_hit ? 10 : 0);
            device_fake_fail(world.device, DEVICE_FAKE_FAULT_CALL, 0, IMBREX_STATUS_OK);
            for (int32_t i = 0; i < 10; i++) {
                assert_true(promote(&world, i, i, true));
            }
            assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
            assert_int_equal(poll_all(&world, 0, 10, 0), 0);
            assert_true(kv_tiers_check(world.tiers));
            destroy(&world);
        }
    }
}

int run_kv_slices_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_one_at_a_time),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests_name("kv_slices", tests, NULL, NULL);
}
