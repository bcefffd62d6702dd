/* SPDX-License-Identifier: Apache-2.0 */
/* Pool, cache and tiers together, on a device whose copies come late, over a disk that fails: what
 * a request finds is what was computed for it, and every request gets there. */
#include "kv/kv_tiers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv_cache.h"
#include "kv/kv_remote_link.h"
#include "ops/fake/device_fake.h"
#include "tests/base/fixture.h"
#include "tests/kv/fake_redis.h"
#include "tests/kv/faulty_files.h"
#include "tests/test.h"

#define FOLDER TEST_BUILD_DIR "/tests/kv-tiers-walk"

enum {
    BLOCK_BYTES = 4096,
    DEPTH = 6,
    NUM_PATHS = 64, /* they part at every depth */
    NUM_BLOCKS = 30,
    NUM_SLOTS = 12,
    MAX_WAITING = 4,
    NUM_STEPS = TEST_SANITIZED ? 3000 : 30000,
    MAX_STEPS_OF_REQUEST = 2000,
    FIRST_SEED_WITH_REMOTE = 100, /* from there on odd ones have a disk too */
    FAULT_STEPS = 100,            /* a remote server does wrong in one way */
    NUM_REMOTE_STEPS = TEST_SANITIZED ? 2000 : 5000,
};

/* One prompt of DEPTH blocks. */
struct prompt {
    struct kv_request kv;
    struct kv_key keys[DEPTH];
    int32_t ids[DEPTH * KV_BLOCK_SIZE];
    struct kv_want wants[DEPTH];
    int32_t blocks[DEPTH];
    int32_t path, num_steps, patience;
    bool is_loading;
};

struct world {
    struct device *device;
    struct device_event *event;
    unsigned char *blocks;
    struct kv_pool pool;
    struct kv_cache *cache;
    struct kv_folder folder;
    struct kv_tiers *tiers;
    struct faulty_files faulty;
    struct fake_redis *redis; /* NULL: no remote tier */
    bool has_disk;
    struct prompt *waiting[MAX_WAITING]; /* [num_waiting] in order */
    int32_t num_waiting;
    int64_t now_ns;
    uint64_t random;
    int64_t num_found, num_computed, num_cancelled;
    uint64_t num_damaged; /* of all tiers, one after another */
    int64_t num_remote;   /* blocks that came from there */
};

static uint32_t random_below(struct world *world, uint32_t bound)
{
    world->random = world->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((world->random >> 33) % bound);
}

/* Block `depth` of a path: a number for what it and all before it hold. */
static int32_t node_of(int32_t path, int32_t depth)
{
    return (depth << 8) | (path >> (DEPTH - 1 - depth));
}

static unsigned char byte_of(int32_t node, int32_t at)
{
    return (unsigned char)((uint32_t)(node * 2654435761u + (uint32_t)at * 40503u) >> 13);
}

/* ---- the step: what a device does with blocks ------------------------------------------------ */

struct step_work {
    struct world *world;
    const struct prompt *prompt;
    int32_t num_cached;
};

/* Reads what was found, writes what was not. */
static enum imbrex_status compute(void *arg, void *stream_handle)
{
    const struct step_work *work = arg;
    (void)stream_handle;
    for (int32_t i = 0; i < DEPTH; i++) {
        unsigned char *block = work->world->blocks + (size_t)work->prompt->blocks[i] * BLOCK_BYTES;
        int32_t node = node_of(work->prompt->path, i);
        for (int32_t at = 0; at < BLOCK_BYTES; at += 16) {
            if (i < work->num_cached) {
                assert_int_equal(block[at], byte_of(node, at));
            }
            block[at] = byte_of(node, at);
        }
    }
    return IMBREX_STATUS_OK;
}

/* ---- requests -------------------------------------------------------------------------------- */

static void arrive(struct world *world)
{
    struct prompt *prompt = calloc(1, sizeof(*prompt));
    assert_non_null(prompt);
    prompt->path = (int32_t)random_below(world, NUM_PATHS);
    prompt->patience = random_below(world, 4) == 0 ? 1 : INT32_MAX;
    for (int32_t i = 0; i < DEPTH; i++) {
        int32_t node = node_of(prompt->path, i);
        prompt->keys[i] = (struct kv_key){{(uint64_t)node * 0x9e3779b97f4a7c15u, 3, 5, 7}};
        for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
            prompt->ids[i * KV_BLOCK_SIZE + j] = node + j;
        }
    }
    prompt->kv = (struct kv_request){.keys = prompt->keys,
                                     .token_ids = prompt->ids,
                                     .wants = prompt->wants,
                                     .blocks = prompt->blocks,
                                     .num_keys = DEPTH,
                                     .order = world->now_ns};
    assert_int_equal(kv_cache_arrive(world->cache, &prompt->kv, world->now_ns), IMBREX_STATUS_OK);
    world->waiting[world->num_waiting++] = prompt;
}

static struct prompt *take_waiting(struct world *world, int32_t idx)
{
    struct prompt *prompt = world->waiting[idx];
    world->num_waiting--;
    for (int32_t i = idx; i < world->num_waiting; i++) {
        world->waiting[i] = world->waiting[i + 1];
    }
    return prompt;
}

static void take_promotions(struct world *world)
{
    struct kv_promotion promotion;
    while (kv_tiers_poll(world->tiers, &promotion)) {
        kv_pool_retain(&world->pool, promotion.block_idx);
        if (!promotion.is_good ||
            !kv_cache_promote(world->cache, &promotion.key,
                              promotion.has_parent ? &promotion.parent_key : NULL,
                              promotion.token_ids, promotion.block_idx, world->now_ns)) {
            kv_pool_release(&world->pool, promotion.block_idx);
        }
        kv_pool_unpin(&world->pool, promotion.block_idx);
    }
}

static bool promote(struct world *world, const struct prompt *prompt, int32_t i)
{
    int32_t block_idx;
    if (kv_pool_num_available(&world->pool) <= DEPTH ||
        kv_pool_acquire(&world->pool, &block_idx) != IMBREX_STATUS_OK) {
        return false;
    }
    kv_pool_pin(&world->pool, block_idx);
    kv_pool_release(&world->pool, block_idx);
    if (!kv_tiers_promote(world->tiers, &prompt->keys[i], i > 0 ? &prompt->keys[i - 1] : NULL,
                          prompt->ids + i * KV_BLOCK_SIZE, block_idx)) {
        kv_pool_unpin(&world->pool, block_idx);
        return false;
    }
    return true;
}

static void look(struct world *world)
{
    kv_tiers_begin_look(world->tiers);
    for (int32_t i = 0; i < world->num_waiting; i++) {
        struct prompt *prompt = world->waiting[i];
        bool is_chained = true;
        int32_t first = kv_cache_match(world->cache, &prompt->kv, DEPTH);
        prompt->is_loading = false;
        for (int32_t j = first; j < DEPTH; j++) {
            const int32_t *ids = prompt->ids + j * KV_BLOCK_SIZE;
            enum kv_place place = kv_tiers_look(world->tiers, &prompt->keys[j], ids);
            bool is_coming = place == KV_PLACE_COMING || place == KV_PLACE_MOVING;
            if (place == KV_PLACE_NONE) {
                break;
            }
            is_coming |= place == KV_PLACE_ASKED;
            if (place == KV_PLACE_DISK || place == KV_PLACE_REMOTE) {
                is_coming = kv_tiers_fetch(world->tiers, &prompt->keys[j], ids);
            } else if (place == KV_PLACE_HOST && is_chained) {
                is_coming = promote(world, prompt, j);
            }
            is_chained =
                is_chained && (place == KV_PLACE_MOVING || (place == KV_PLACE_HOST && is_coming));
            prompt->is_loading |= j == first && is_coming;
        }
    }
    kv_tiers_end_look(world->tiers);
}

/* The first one runs, if there is room, and ends at once. */
static void run_first(struct world *world)
{
    struct step_work work = {.world = world};
    if (world->num_waiting == 0 || kv_pool_num_available(&world->pool) < DEPTH ||
        (world->waiting[0]->is_loading &&
         world->waiting[0]->num_steps < world->waiting[0]->patience)) {
        return;
    }
    struct prompt *prompt = take_waiting(world, 0);
    kv_cache_admit(world->cache, &prompt->kv, DEPTH, false, world->now_ns);
    work.prompt = prompt;
    work.num_cached = prompt->kv.num_blocks;
    for (int32_t i = prompt->kv.num_blocks; i < DEPTH; i++) {
        assert_int_equal(kv_pool_acquire(&world->pool, &prompt->blocks[i]), IMBREX_STATUS_OK);
    }
    assert_int_equal(kv_tiers_start(world->tiers), IMBREX_STATUS_OK);
    assert_int_equal(device_run_async(world->device, DEVICE_STREAM_STEP, compute, &work),
                     IMBREX_STATUS_OK);
    assert_int_equal(device_event_record(world->device, world->event, DEVICE_STREAM_STEP),
                     IMBREX_STATUS_OK);
    assert_int_equal(device_event_synchronize(world->device, world->event), IMBREX_STATUS_OK);
    world->num_found += work.num_cached;
    world->num_computed += DEPTH - work.num_cached;
    for (int32_t i = work.num_cached; i < DEPTH; i++) {
        (void)kv_cache_insert(world->cache, &prompt->kv, &prompt->keys[i],
                              prompt->ids + i * KV_BLOCK_SIZE, prompt->blocks[i], world->now_ns);
    }
    kv_cache_finish(world->cache, &prompt->kv, world->now_ns);
    for (int32_t i = DEPTH - 1; i >= 0; i--) {
        kv_pool_release(&world->pool, prompt->blocks[i]);
    }
    free(prompt);
}

static void on_forget(void *user, const struct kv_key *key, const int32_t *token_ids,
                      int32_t block_idx)
{
    struct world *world = user;
    kv_tiers_demote(world->tiers, key, token_ids, block_idx);
}

/* ---- the world ------------------------------------------------------------------------------- */

static void count_lines(void *user, enum imbrex_log_level level, const char *message)
{
    int32_t *num_lines = user;
    (void)level;
    if (strstr(message, "KV remote 127.0.0.1") == NULL) {
        /* Without a disk there is no folder to name. */
        assert_true(strstr(message, FOLDER) != NULL || strncmp(message, "KV tiers: ", 10) == 0);
        (*num_lines)++;
    }
}

static void open_tiers(struct world *world, const struct log *log)
{
    struct imbrex_error err;
    struct kv_remote_url url = {.host = "127.0.0.1"};
    assert_int_equal(kv_folder_open(FOLDER, &world->folder, &err), IMBREX_STATUS_OK);
    if (world->redis != NULL) {
        url.port = fake_redis_port(world->redis);
    }
    const struct kv_remote_options remote = {
        .url = &url,
        .owner = {{1, 2, 3, 4}},
        .block_bytes = BLOCK_BYTES,
        .answer_timeout_ms = TEST_SANITIZED ? 200 : 20,
        .min_retry_ms = 1,
        .max_retry_ms = 4,
    };
    const struct kv_disk_options disk = {
        .folder = &world->folder,
        .owner = {{1, 2, 3, 4}},
        .block_bytes = BLOCK_BYTES,
        .max_bytes = 3 * kv_disk_min_bytes(BLOCK_BYTES, 8 * BLOCK_BYTES),
        .segment_bytes = 8 * BLOCK_BYTES,
        .num_readers = 2,
        .files = &world->faulty.files,
    };
    const struct kv_tiers_options options = {.device = world->device,
                                             .blocks = world->blocks,
                                             .block_bytes = BLOCK_BYTES,
                                             .host_bytes = NUM_SLOTS * BLOCK_BYTES,
                                             .disk = world->has_disk ? &disk : NULL,
                                             .remote = world->redis != NULL ? &remote : NULL,
                                             .log = log};
    assert_int_equal(kv_tiers_create(&options, &world->tiers, &err), IMBREX_STATUS_OK);
}

/* Adds what these tiers have seen to what those before them had. */
static void count_faults(struct world *world)
{
    struct kv_tiers_metrics metrics;
    kv_tiers_read_metrics(world->tiers, &metrics);
    world->num_damaged += metrics.disk.num_damaged + metrics.remote.num_damaged;
    world->num_remote += (int64_t)metrics.num_promoted[KV_TIER_REMOTE];
}

/* Everything in the first tier goes down; then a restart. */
static void restart(struct world *world, const struct log *log)
{
    while (kv_tiers_is_promoting(world->tiers)) {
        kv_tiers_wait(world->tiers, 1000000);
        take_promotions(world);
    }
    kv_tiers_begin_flush(world->tiers);
    kv_cache_clear(world->cache, world->now_ns);
    kv_tiers_end_flush(world->tiers);
    count_faults(world);
    kv_tiers_destroy(world->tiers);
    kv_folder_close(&world->folder);
    open_tiers(world, log);
}

static void walk(uint64_t seed, bool has_faults)
{
    struct world world = {.random = seed};
    int32_t num_lines = 0, num_restarts = 0;
    const struct log log = {.write = count_lines, .user = &num_lines};
    void *blocks;
    bool has_remote = seed >= FIRST_SEED_WITH_REMOTE;
    world.has_disk = !has_remote || seed % 2 == 1;
    world.redis = has_remote ? fake_redis_create() : NULL;
    faulty_files_init(&world.faulty);
    assert_int_equal(device_fake_create(seed, &world.device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(device_event_create(world.device, &world.event, NULL), IMBREX_STATUS_OK);
    assert_int_equal(
        device_alloc(world.device, "blocks", (size_t)NUM_BLOCKS * BLOCK_BYTES, &blocks, NULL),
        IMBREX_STATUS_OK);
    world.blocks = blocks;
    assert_int_equal(kv_pool_create(NUM_BLOCKS, &world.pool, NULL), IMBREX_STATUS_OK);
    open_tiers(&world, &log);
    const struct kv_cache_options cache_options = {.max_requests = MAX_WAITING + 1,
                                                   .block_size = KV_BLOCK_SIZE,
                                                   .has_token_ids = true,
                                                   .forgets = on_forget,
                                                   .user = &world,
                                                   .policy = seed % 2 == 0 ? "lru" : "predictive",
                                                   .policy_options = kv_policy_options_default()};
    assert_int_equal(kv_cache_create(&cache_options, &world.pool, &world.cache, NULL),
                     IMBREX_STATUS_OK);
    if (has_faults) {
        world.faulty.read_every = 13;
        world.faulty.write_every = 17;
        world.faulty.flip_every = 11;
        world.faulty.resize_every = 7;
        world.faulty.failure = ENOSPC;
    }
    for (int32_t step = 0; step < (has_remote ? NUM_REMOTE_STEPS : NUM_STEPS); step++) {
        world.now_ns += 1 + (int64_t)random_below(&world, 100000);
        kv_tiers_update(world.tiers, world.now_ns);
        take_promotions(&world);
        if (world.num_waiting < MAX_WAITING && random_below(&world, 2) == 0) {
            arrive(&world);
        }
        if (world.num_waiting > 0 && random_below(&world, 20) == 0) {
            int32_t idx = (int32_t)random_below(&world, (uint32_t)world.num_waiting);
            struct prompt *prompt = take_waiting(&world, idx);
            kv_cache_leave(world.cache, &prompt->kv, world.now_ns);
            free(prompt);
            world.num_cancelled++;
        }
        if (has_faults && random_below(&world, 50) == 0) {
            device_fake_fail(world.device, DEVICE_FAKE_FAULT_COPY,
                             1 + (int64_t)random_below(&world, 3), IMBREX_STATUS_IO);
        }
        if (has_faults && random_below(&world, 50) == 0) {
            device_fake_fail(world.device, DEVICE_FAKE_FAULT_CALL,
                             1 + (int64_t)random_below(&world, 8), IMBREX_STATUS_IO);
        }
        if (has_remote && has_faults && step % FAULT_STEPS == 0) {
            int32_t fault = step / FAULT_STEPS % FAKE_REDIS_NUM_FAULTS;
            fake_redis_set_error(world.redis, "LOADING", false);
            fake_redis_set_fault(world.redis, (enum fake_redis_fault)fault, 5);
        }
        look(&world);
        assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
        device_fake_fail(world.device, DEVICE_FAKE_FAULT_CALL, 0, IMBREX_STATUS_OK);
        take_promotions(&world);
        run_first(&world);
        if (random_below(&world, 100) == 0) {
            kv_cache_make_room(world.cache, (int32_t)random_below(&world, NUM_BLOCKS),
                               world.now_ns);
            assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
        }
        if (random_below(&world, 3000) == 0) {
            restart(&world, &log);
            num_restarts++;
        }
        assert_true(kv_tiers_check(world.tiers));
        assert_true(kv_cache_check(world.cache));
        for (int32_t i = 0; i < world.num_waiting; i++) {
            world.waiting[i]->num_steps++;
            /* Whatever moves, and fails, the first one's turn comes. */
            assert_true(world.waiting[i]->num_steps < MAX_STEPS_OF_REQUEST);
        }
        if (world.num_waiting > 0 && world.waiting[0]->is_loading) {
            kv_tiers_wait(world.tiers, 1000000);
        }
    }
    count_faults(&world);
    assert_true(world.num_found > 1000 && world.num_computed > 100 && world.num_cancelled > 10);
    assert_true(num_restarts > 0 || TEST_SANITIZED || has_remote);
    assert_int_equal(num_lines > 0, has_faults);
    assert_int_equal(world.num_remote > 0, has_remote);
    assert_int_equal(world.num_damaged > 0, has_faults);
    /* One line a minute at most, each tier has its own minute, and the last word at its end. */
    assert_true(num_lines <= 2 * num_restarts + 1 + world.now_ns / 60000000000);
    while (world.num_waiting > 0) {
        struct prompt *prompt = take_waiting(&world, 0);
        kv_cache_leave(world.cache, &prompt->kv, world.now_ns);
        free(prompt);
    }
    restart(&world, &log);
    kv_tiers_destroy(world.tiers);
    kv_folder_close(&world.folder);
    kv_cache_destroy(world.cache);
    assert_int_equal(world.pool.num_free, NUM_BLOCKS);
    kv_pool_destroy(&world.pool);
    device_free(world.device, blocks);
    device_event_destroy(world.device, world.event);
    device_destroy(world.device);
    if (world.redis != NULL) {
        fake_redis_destroy(world.redis);
    }
    fixture_empty_folder(FOLDER);
}

/* Catches: a block that is read before its copy is done, or written before it was copied down; a
 * promotion into a block that somebody has; a request that waits for ever; a load that goes on for
 * nobody. */
static void test_walk(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        walk(seed, false);
    }
}

/* The same over a disk, copies and calls that fail. Catches: a damaged, unread or uncopied block
 * that is used, a failure that holds a slot, a pin or a request for ever, a log that is filled. */
static void test_walk_with_faults(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        walk(seed, true);
    }
}

/* The same with a server below, beside a disk and alone, that is well, and that does wrong in every
 * way. Catches: a slot that is filled by one and forgotten by the other, a request that waits for
 * an answer that does not come, a block of the server that is not what was sent. */
static void test_walk_with_remote(void **state)
{
    (void)state;
    if (!kv_remote_link_is_built()) {
        skip();
    }
    for (uint64_t seed = FIRST_SEED_WITH_REMOTE; seed < FIRST_SEED_WITH_REMOTE + 2; seed++) {
        walk(seed, false);
        walk(seed, true);
    }
}

int run_kv_tiers_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_walk),
        cmocka_unit_test(test_walk_with_faults),
        cmocka_unit_test(test_walk_with_remote),
    };
    return cmocka_run_group_tests_name("kv_tiers", tests, NULL, NULL);
}
