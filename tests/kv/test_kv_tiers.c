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
#include "kv/prefetch_plan.h"
#include "ops/fake/device_fake.h"
#include "tests/base/fixture.h"
#include "tests/kv/fake_redis.h"
#include "tests/kv/faulty_files.h"
#include "tests/kv/tiers_set_up.h"
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
    bool has_disk, writes_through;
    struct prompt *waiting[MAX_WAITING]; /* [num_waiting] in order */
    int32_t num_waiting;
    int64_t now_ns;
    uint64_t random;
    int64_t num_found, num_computed, num_cancelled;
    uint64_t num_damaged, num_written; /* of all tiers, one after another */
    int64_t num_remote;                /* blocks that came from there */
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
        if (world->writes_through) {
            (void)kv_tiers_write_through(world->tiers, &prompt->keys[i],
                                         prompt->ids + i * KV_BLOCK_SIZE, prompt->blocks[i]);
        }
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
    assert_int_equal(kv_folder_open(FOLDER, &world->folder, &err), IMBREX_STATUS_OK);
    const struct tiers_set_up set_up = {.device = world->device,
                                        .blocks = world->blocks,
                                        .block_bytes = BLOCK_BYTES,
                                        .num_slots = NUM_SLOTS,
                                        .folder = world->has_disk ? &world->folder : NULL,
                                        .files = &world->faulty,
                                        .segment_blocks = 8,
                                        .num_segments = 6,
                                        .redis = world->redis,
                                        .log = log};
    assert_int_equal(tiers_set_up(&set_up, &world->tiers, &err), IMBREX_STATUS_OK);
}

/* Adds what these tiers have seen to what those before them had. */
static void count_faults(struct world *world)
{
    struct kv_tiers_metrics metrics;
    kv_tiers_read_metrics(world->tiers, &metrics);
    world->num_damaged += metrics.disk.num_damaged + metrics.remote.num_damaged;
    world->num_remote += (int64_t)metrics.num_promoted[KV_TIER_REMOTE];
    world->num_written += metrics.num_written;
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

/* Returns how many blocks came back damaged: a walk may by chance meet none. */
static int64_t walk(uint64_t seed, bool has_faults)
{
    struct world world = {.random = seed};
    int32_t num_lines = 0, num_restarts = 0;
    const struct log log = {.write = count_lines, .user = &num_lines};
    void *blocks;
    bool has_remote = seed >= FIRST_SEED_WITH_REMOTE;
    world.has_disk = !has_remote || seed % 2 == 1;
    world.writes_through = seed % 3 != 0;
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
        /* A full disk makes the folder smaller; other failures leave its size. */
        world.faulty.failure = seed % 2 == 0 ? ENOSPC : EIO;
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
    assert_true(world.num_damaged == 0 || has_faults);
    assert_int_equal(world.num_written > 0, world.writes_through);
    /* One line a minute at most, each tier has its own minute, and the last word at its end; and
     * one of a full disk. */
    assert_true(num_lines <= 3 * num_restarts + 2 + world.now_ns / 60000000000);
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
    return world.num_damaged;
}

/* Catches: a block that is read before its copy is done, or written before it was copied down; a
 * promotion into a block that somebody has; a request that waits for ever; a load that goes on for
 * nobody. */
static void test_walk(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        (void)walk(seed, false);
    }
}

/* The same over a disk, copies and calls that fail. Catches: a damaged, unread or uncopied block
 * that is used, a failure that holds a slot, a pin or a request for ever, a log that is filled. */
static void test_walk_with_faults(void **state)
{
    (void)state;
    int64_t num_damaged = 0;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        num_damaged += walk(seed, true);
    }
    assert_true(num_damaged > 0);
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

/* ---- moves alone ----------------------------------------------------------------------------- */

/* Tiers of RAM, or with a disk too, and blocks of a device to which they move. */
struct bed {
    struct kv_folder folder;
    struct faulty_files faulty; /* of the disk */
    struct device *device;
    struct device_event *event;
    struct kv_tiers *tiers;
    unsigned char *blocks;
    int32_t ids[KV_BLOCK_SIZE];
};

static struct kv_key bed_key(struct bed *bed, int32_t key_idx)
{
    bed->ids[0] = key_idx;
    return (struct kv_key){{(uint64_t)key_idx + 1, 2, 3, 4}};
}

static unsigned char *bed_block(const struct bed *bed, int32_t block_idx)
{
    return bed->blocks + (size_t)block_idx * BLOCK_BYTES;
}

static void bed_demote(struct bed *bed, int32_t key_idx, int32_t block_idx)
{
    struct kv_key key = bed_key(bed, key_idx);
    kv_tiers_demote(bed->tiers, &key, bed->ids, block_idx);
}

static bool bed_promote(struct bed *bed, int32_t key_idx, int32_t block_idx)
{
    struct kv_key key = bed_key(bed, key_idx);
    assert_int_equal(kv_tiers_look(bed->tiers, &key, bed->ids), KV_PLACE_HOST);
    return kv_tiers_promote(bed->tiers, &key, NULL, bed->ids, block_idx);
}

/* Blocks [0, num_filled) hold their numbers, and go down under keys of the same numbers. */
static void bed_open(struct bed *bed, uint64_t seed, int32_t num_blocks, int32_t num_filled,
                     bool has_disk)
{
    struct kv_tiers_metrics metrics;
    static const struct log log;
    void *blocks;
    *bed = (struct bed){.folder = {.lock_fd = -1}};
    if (has_disk) {
        fixture_empty_folder(FOLDER);
        assert_int_equal(kv_folder_open(FOLDER, &bed->folder, NULL), IMBREX_STATUS_OK);
    }
    faulty_files_init(&bed->faulty);
    const struct kv_disk_options disk = {.folder = &bed->folder,
                                         .block_bytes = BLOCK_BYTES,
                                         .max_bytes = (size_t)64 << 20,
                                         .files = &bed->faulty.files};
    assert_int_equal(device_fake_create(seed, &bed->device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(device_event_create(bed->device, &bed->event, NULL), IMBREX_STATUS_OK);
    assert_int_equal(
        device_alloc(bed->device, "blocks", (size_t)num_blocks * BLOCK_BYTES, &blocks, NULL),
        IMBREX_STATUS_OK);
    bed->blocks = blocks;
    const struct kv_tiers_options options = {.device = bed->device,
                                             .blocks = bed->blocks,
                                             .block_bytes = BLOCK_BYTES,
                                             .host_bytes = (size_t)num_blocks * BLOCK_BYTES,
                                             .disk = has_disk ? &disk : NULL,
                                             .log = &log};
    assert_int_equal(kv_tiers_create(&options, &bed->tiers, NULL), IMBREX_STATUS_OK);
    for (int32_t i = 0; i < num_filled; i++) {
        memset(bed_block(bed, i), i % 251, BLOCK_BYTES);
        bed_demote(bed, i, i);
    }
    assert_int_equal(kv_tiers_start(bed->tiers), IMBREX_STATUS_OK);
    do {
        kv_tiers_update(bed->tiers, 0);
        kv_tiers_read_metrics(bed->tiers, &metrics);
    } while (metrics.num_demoted < (uint64_t)num_filled);
}

static void bed_close(struct bed *bed)
{
    kv_tiers_destroy(bed->tiers);
    if (bed->folder.path != NULL) {
        kv_folder_close(&bed->folder);
        fixture_empty_folder(FOLDER);
    }
    device_event_destroy(bed->device, bed->event);
    device_free(bed->device, bed->blocks);
    device_destroy(bed->device);
}

/* Promotions until `num_blocks` are told; returns how many of them were good. */
static int32_t bed_wait(struct bed *bed, int32_t num_blocks)
{
    struct kv_promotion promotion;
    int32_t num_good = 0;
    for (int32_t num_told = 0; num_told < num_blocks;) {
        kv_tiers_wait(bed->tiers, 1000000);
        while (kv_tiers_poll(bed->tiers, &promotion)) {
            num_told++;
            num_good += promotion.is_good;
        }
    }
    return num_good;
}

/* A disk that takes nothing at the end. Catches: blocks of which nobody says that they are lost; an
 * end that is never reached. */
static void test_refused_at_end(void **state)
{
    enum { NUM = 200 };
    struct bed bed;
    struct kv_tiers_metrics metrics;
    (void)state;
    bed_open(&bed, 3, NUM, 0, true);
    bed.faulty.failure = EACCES;
    bed.faulty.resize_every = 1;
    kv_tiers_begin_flush(bed.tiers);
    for (int32_t i = 0; i < NUM; i++) {
        bed_demote(&bed, i, i);
    }
    kv_tiers_end_flush(bed.tiers);
    kv_tiers_read_metrics(bed.tiers, &metrics);
    assert_int_equal(metrics.disk.num_left_out, NUM);
    assert_false(kv_tiers_is_writing(bed.tiers));
    assert_true(kv_tiers_check(bed.tiers));
    bed_close(&bed);
}

/* Catches: a look whose promotions end with the first batch of them, so that a link waits for the
 * next step; one more than is taken that is half taken. */
static void test_many_at_once(void **state)
{
    enum { NUM = 1100, LEAST = 1000 };
    struct bed bed;
    int32_t num_promoted = 0;
    (void)state;
    bed_open(&bed, 5, NUM, NUM, false);
    while (num_promoted < NUM && kv_tiers_can_promote(bed.tiers)) {
        assert_true(bed_promote(&bed, NUM - 1 - num_promoted, num_promoted));
        num_promoted++;
    }
    assert_in_range(num_promoted, LEAST, NUM - 1);
    assert_false(bed_promote(&bed, 0, num_promoted));
    assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
    assert_int_equal(bed_wait(&bed, num_promoted), num_promoted);
    assert_false(kv_tiers_is_promoting(bed.tiers));
    assert_true(kv_tiers_can_promote(bed.tiers));
    for (int32_t i = 0; i < NUM; i++) {
        int32_t key_idx = i < num_promoted ? NUM - 1 - i : i;
        assert_int_equal(bed_block(&bed, i)[0], key_idx % 251);
        assert_int_equal(bed_block(&bed, i)[BLOCK_BYTES - 1], key_idx % 251);
    }
    assert_true(kv_tiers_check(bed.tiers));
    bed_close(&bed);
}

enum { NUM_EXCHANGED = 24, FIRST_EXCHANGED = 30 };

static enum imbrex_status write_blocks(void *arg, void *stream_handle)
{
    (void)stream_handle;
    memset(arg, 0xee, (size_t)NUM_EXCHANGED * BLOCK_BYTES);
    return IMBREX_STATUS_OK;
}

/* Blocks go down and others are to come up in their place, behind a copy up that has failed: then
 * nothing holds the copies down any more but that the next step waits for them. Catches a step that
 * does not. */
static void test_failed_exchange(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct bed bed;
        bool is_done;
        bed_open(&bed, seed, 64, NUM_EXCHANGED + 1, false);
        device_fake_fail(bed.device, DEVICE_FAKE_FAULT_COPY, 1, IMBREX_STATUS_IO);
        assert_true(bed_promote(&bed, NUM_EXCHANGED, 60));
        assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
        while (device_fake_num_pending(bed.device) > 0) { /* it fails, and nobody is told */
            assert_int_equal(device_event_query(bed.device, bed.event, &is_done), IMBREX_STATUS_OK);
        }
        unsigned char *exchanged = bed_block(&bed, FIRST_EXCHANGED);
        memset(exchanged, 77, (size_t)NUM_EXCHANGED * BLOCK_BYTES);
        for (int32_t i = 0; i < NUM_EXCHANGED; i++) {
            bed_demote(&bed, 100 + i, FIRST_EXCHANGED + i);
            assert_true(bed_promote(&bed, i, FIRST_EXCHANGED + i));
        }
        assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
        assert_int_equal(bed_wait(&bed, 1 + NUM_EXCHANGED), 0);
        /* The blocks are free: a step has them. */
        assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
        assert_int_equal(device_run_async(bed.device, DEVICE_STREAM_STEP, write_blocks, exchanged),
                         IMBREX_STATUS_OK);
        assert_int_equal(device_event_record(bed.device, bed.event, DEVICE_STREAM_STEP),
                         IMBREX_STATUS_OK);
        assert_int_equal(device_event_synchronize(bed.device, bed.event), IMBREX_STATUS_OK);
        assert_int_equal(device_event_record(bed.device, bed.event, DEVICE_STREAM_KV_OUT),
                         IMBREX_STATUS_OK);
        assert_int_equal(device_event_synchronize(bed.device, bed.event), IMBREX_STATUS_OK);
        kv_tiers_update(bed.tiers, 0);
        for (int32_t i = 0; i < NUM_EXCHANGED; i++) {
            assert_true(bed_promote(&bed, 100 + i, i));
        }
        assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
        assert_int_equal(bed_wait(&bed, NUM_EXCHANGED), NUM_EXCHANGED);
        for (int32_t i = 0; i < NUM_EXCHANGED * BLOCK_BYTES; i++) {
            assert_int_equal(bed.blocks[i], 77);
        }
        bed_close(&bed);
    }
}

/* A step writes over NUM_EXCHANGED blocks, or over none, and is waited for. */
static void bed_step(struct bed *bed, unsigned char *blocks)
{
    assert_int_equal(kv_tiers_start(bed->tiers), IMBREX_STATUS_OK);
    if (blocks != NULL) {
        assert_int_equal(device_run_async(bed->device, DEVICE_STREAM_STEP, write_blocks, blocks),
                         IMBREX_STATUS_OK);
    }
    assert_int_equal(device_event_record(bed->device, bed->event, DEVICE_STREAM_STEP),
                     IMBREX_STATUS_OK);
    assert_int_equal(device_event_synchronize(bed->device, bed->event), IMBREX_STATUS_OK);
}

/* Blocks that stay are copied down, and some of them go before that is done. Catches: a step that
 * waits for copies from blocks that stay; one that writes over a block that has gone while it is
 * still being copied; a block that is copied twice, or that the disk has not got. */
static void test_write_through(void **state)
{
    int32_t num_overtaken = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct bed bed;
        struct kv_tiers_metrics metrics;
        bool goes = seed % 2 == 0;
        bed_open(&bed, seed, 64, 0, true);
        for (int32_t i = 0; i < NUM_EXCHANGED; i++) {
            struct kv_key key = bed_key(&bed, i);
            memset(bed_block(&bed, i), 10 + i, BLOCK_BYTES);
            assert_true(kv_tiers_write_through(bed.tiers, &key, bed.ids, i));
        }
        assert_true(kv_tiers_check(bed.tiers));
        bed_step(&bed, NULL);
        num_overtaken += device_fake_num_pending(bed.device) > 0;
        for (int32_t i = 0; goes && i < NUM_EXCHANGED; i++) {
            bed_demote(&bed, i, i);
        }
        bed_step(&bed, goes ? bed.blocks : NULL);
        while (kv_tiers_is_writing(bed.tiers) || kv_tiers_is_moving(bed.tiers)) {
            kv_tiers_wait(bed.tiers, 1000000);
            kv_tiers_update(bed.tiers, 0);
        }
        for (int32_t i = 0; !goes && i < NUM_EXCHANGED; i++) {
            bed_demote(&bed, i, i);
        }
        bed_step(&bed, bed.blocks);
        assert_false(kv_tiers_is_moving(bed.tiers));
        kv_tiers_end_flush(bed.tiers);
        kv_tiers_read_metrics(bed.tiers, &metrics);
        assert_int_equal(metrics.num_written + metrics.num_demoted, NUM_EXCHANGED);
        assert_int_equal(metrics.disk.num_blocks, NUM_EXCHANGED);
        assert_true(goes || metrics.num_demoted == 0);
        for (int32_t i = 0; i < NUM_EXCHANGED; i++) {
            assert_true(bed_promote(&bed, i, FIRST_EXCHANGED + i));
        }
        assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
        assert_int_equal(bed_wait(&bed, NUM_EXCHANGED), NUM_EXCHANGED);
        for (int32_t i = 0; i < NUM_EXCHANGED; i++) {
            assert_int_equal(bed_block(&bed, FIRST_EXCHANGED + i)[0], 10 + i);
            assert_int_equal(bed_block(&bed, FIRST_EXCHANGED + i)[BLOCK_BYTES - 1], 10 + i);
        }
        assert_true(kv_tiers_check(bed.tiers));
        bed_close(&bed);
    }
    assert_true(num_overtaken > 0);
}

/* Slots are full of what nothing below has as yet, or of what it has. Catches: blocks that stay
 * pushing out others' only copies; more of RAM taken for them than they need. */
static void test_write_through_room(void **state)
{
    enum { NUM = 32 };
    struct bed bed;
    struct kv_tiers_metrics metrics;
    (void)state;
    bed_open(&bed, 3, NUM, NUM - 1, true);
    while (kv_tiers_is_writing(bed.tiers)) {
        kv_tiers_update(bed.tiers, 0);
    }
    /* One slot is empty; of those that the disk has, the oldest one goes, and then the same one. */
    for (int32_t i = 0; i < 2 * NUM; i++) {
        struct kv_key key = bed_key(&bed, 100 + i);
        assert_true(kv_tiers_write_through(bed.tiers, &key, bed.ids, i % NUM));
        assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
        do {
            kv_tiers_update(bed.tiers, 0);
        } while (kv_tiers_is_writing(bed.tiers) || kv_tiers_is_moving(bed.tiers));
    }
    for (int32_t i = 1; i < NUM - 1; i++) {
        struct kv_key key = bed_key(&bed, i);
        assert_int_equal(kv_tiers_look(bed.tiers, &key, bed.ids), KV_PLACE_HOST);
    }
    kv_tiers_read_metrics(bed.tiers, &metrics);
    assert_int_equal(metrics.num_written, 2 * NUM);
    assert_int_equal(metrics.num_lost, 0);
    bed_close(&bed);

    bed_open(&bed, 4, NUM, NUM, false);
    struct kv_key key = bed_key(&bed, 100);
    assert_true(kv_tiers_write_through(bed.tiers, &key, bed.ids, 0)); /* there is nothing below */
    assert_int_equal(kv_tiers_look(bed.tiers, &key, bed.ids), KV_PLACE_NONE);
    bed_close(&bed);
}

/* What a planner with half the link uses of it in half a second of steps, each of a millisecond. */
static double use_link(struct bed *bed, struct prefetch_planner *planner, int64_t *now_ns)
{
    enum { NUM_KEYS = 500, NUM_TIMED_STEPS = 500 };
    int64_t begin_ns = device_fake_time(bed->device, DEVICE_STREAM_KV_IN), next = 0;
    for (int32_t i = 0; i < NUM_TIMED_STEPS; i++, *now_ns += 1000000) {
        int32_t num_promoted = 0, num_steps = 1;
        prefetch_set_block_ns(planner, 2 * kv_tiers_block_ns(bed->tiers));
        for (;; num_promoted++, next++) {
            struct prefetch_step step;
            struct kv_key key = bed_key(bed, (int32_t)(next % NUM_KEYS));
            const struct prefetch_request request = {
                .needed_ns = INT64_MAX, .keys = &key.words[0], .num_keys = 1};
            assert_int_equal(
                prefetch_plan(planner, *now_ns, &request, 1, NULL, 0, 1, &step, 1, &num_steps),
                IMBREX_STATUS_OK);
            if (num_steps == 0) {
                break;
            }
            prefetch_used(planner, key.words[0]);
            assert_true(bed_promote(bed, (int32_t)(next % NUM_KEYS), num_promoted));
        }
        assert_int_equal(kv_tiers_start(bed->tiers), IMBREX_STATUS_OK);
        assert_int_equal(bed_wait(bed, num_promoted), num_promoted);
    }
    return (double)(device_fake_time(bed->device, DEVICE_STREAM_KV_IN) - begin_ns) /
           ((double)NUM_TIMED_STEPS * 1e6);
}

/* A link as fast as was measured, then half as fast, since others use it too, then three times as
 * fast. Catches: a budget by what a block took when the engine began; a rate that is learned from
 * moves that had to wait for something else; one measurement that upsets it. */
static void test_share_of_link(void **state)
{
    static const double rates[] = {0.8, 1.6, 0.53};
    struct bed bed;
    struct prefetch_planner *planner;
    int64_t now_ns = 1, block_ns;
    (void)state;
    bed_open(&bed, 9, 600, 600, false);
    device_fake_set_rate(bed.device, DEVICE_STREAM_KV_IN, rates[0]);
    assert_int_equal(kv_tiers_block_ns(bed.tiers), 0);
    assert_int_equal(kv_tiers_measure(bed.tiers, 600, &block_ns), IMBREX_STATUS_OK);
    assert_in_range(block_ns, 0.99 * rates[0] * BLOCK_BYTES, 1.01 * rates[0] * BLOCK_BYTES);
    assert_int_equal(kv_tiers_block_ns(bed.tiers), block_ns);
    const struct prefetch_options options = {
        .block_ns = 2 * block_ns, .horizon_ns = 1000000, .max_tracked = 600};
    assert_int_equal(prefetch_planner_create(&options, &planner, NULL), IMBREX_STATUS_OK);
    for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
        device_fake_set_rate(bed.device, DEVICE_STREAM_KV_IN, rates[i]);
        (void)use_link(&bed, planner, &now_ns); /* learns */
        double share = use_link(&bed, planner, &now_ns);
        assert_true(share > 0.48 && share < 0.52);
        assert_in_range(kv_tiers_block_ns(bed.tiers), 0.98 * rates[i] * BLOCK_BYTES,
                        1.02 * rates[i] * BLOCK_BYTES);
    }
    /* One batch that took a hundred times as long moves it by a quarter at most. */
    block_ns = kv_tiers_block_ns(bed.tiers);
    device_fake_set_rate(bed.device, DEVICE_STREAM_KV_IN, 100 * rates[2]);
    for (int32_t i = 0; i < 128; i++) {
        assert_true(bed_promote(&bed, i, i));
    }
    assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
    assert_int_equal(bed_wait(&bed, 128), 128);
    assert_in_range(kv_tiers_block_ns(bed.tiers), block_ns + 1, block_ns + block_ns / 4);
    /* One that failed says nothing. */
    block_ns = kv_tiers_block_ns(bed.tiers);
    for (int32_t i = 0; i < 128; i++) {
        assert_true(bed_promote(&bed, i, i));
    }
    device_fake_fail(bed.device, DEVICE_FAKE_FAULT_COPY, 1, IMBREX_STATUS_IO);
    assert_int_equal(kv_tiers_start(bed.tiers), IMBREX_STATUS_OK);
    assert_int_equal(bed_wait(&bed, 128), 0);
    assert_int_equal(kv_tiers_block_ns(bed.tiers), block_ns);
    prefetch_planner_destroy(planner);
    bed_close(&bed);
}

int run_kv_tiers_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_at_end),
        cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_failed_exchange),
        cmocka_unit_test(test_write_through),
        cmocka_unit_test(test_write_through_room),
        cmocka_unit_test(test_share_of_link),
        cmocka_unit_test(test_walk),
        cmocka_unit_test(test_walk_with_faults),
        cmocka_unit_test(test_walk_with_remote),
    };
    return cmocka_run_group_tests_name("kv_tiers", tests, NULL, NULL);
}
