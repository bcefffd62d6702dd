/* SPDX-License-Identifier: Apache-2.0 */
/* The executor of predictions over a cache, a pool and a host tier, with a policy that predicts
 * what the test says. */
#include "engine/prefix_prefetch.h"

#include <string.h>

#include "tests/base/fixture.h"
#include "tests/test.h"

#define FOLDER TEST_BUILD_DIR "/tests/kv-prefetch"

enum {
    BLOCK_BYTES = 4096,
    NUM_BLOCKS = 8,
    NUM_SLOTS = 16,
    DEPTH = 4,
    NUM_PATHS = 3,
    BLOCK_NS = 1000000, /* as long as ten fit the planner's horizon */
};

struct prompt {
    struct kv_request kv;
    struct kv_key keys[DEPTH];
    int32_t ids[DEPTH * KV_BLOCK_SIZE];
    struct kv_want wants[DEPTH];
    int32_t blocks[DEPTH];
};

static struct {
    uint64_t hash;
    double value, victim_value;
    int32_t num_told;
} told;

static int32_t predict(struct kv_policy *policy, struct kv_prediction *predictions,
                       int32_t max_predictions, int64_t now_ns)
{
    (void)policy, (void)max_predictions, (void)now_ns;
    predictions[0] = (struct kv_prediction){.key_hash = told.hash, .value = told.value};
    return told.num_told;
}

static double value(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    (void)policy, (void)block_idx, (void)now_ns;
    return told.victim_value;
}

struct world {
    struct device *device;
    struct kv_folder folder;
    unsigned char *blocks;
    struct kv_pool pool;
    struct prefix_cache cache;
    struct kv_policy_functions functions;
    struct kv_tiers *tiers;
    struct prefix_prefetch *prefetch;
    struct prompt prompts[NUM_PATHS];
};

static void on_forget(void *user, const struct kv_key *key, const int32_t *token_ids,
                      int32_t block_idx)
{
    struct world *world = user;
    prefix_prefetch_forget(world->prefetch, key, token_ids, block_idx);
    kv_tiers_demote(world->tiers, key, token_ids, block_idx);
}

/* num_slots: of the host tier. */
static void open_world_over(struct world *world, int32_t percent, int32_t num_slots,
                            int32_t max_known, bool has_disk)
{
    static const struct log log = {0};
    void *blocks;
    *world = (struct world){.cache.now_ns = 1, .folder.lock_fd = -1};
    const struct kv_disk_options disk = {.folder = &world->folder,
                                         .block_bytes = BLOCK_BYTES,
                                         .max_bytes = kv_disk_min_bytes(BLOCK_BYTES, 0)};
    if (has_disk) {
        fixture_empty_folder(FOLDER);
        assert_int_equal(kv_folder_open(FOLDER, &world->folder, NULL), IMBREX_STATUS_OK);
    }
    told.num_told = 0;
    assert_int_equal(device_cpu_create(&world->device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(
        device_alloc(world->device, "blocks", (size_t)NUM_BLOCKS * BLOCK_BYTES, &blocks, NULL),
        IMBREX_STATUS_OK);
    world->blocks = blocks;
    assert_int_equal(kv_pool_create(NUM_BLOCKS, &world->pool, NULL), IMBREX_STATUS_OK);
    const struct kv_tiers_options tiers_options = {.device = world->device,
                                                   .blocks = world->blocks,
                                                   .block_bytes = BLOCK_BYTES,
                                                   .host_bytes = (size_t)num_slots * BLOCK_BYTES,
                                                   .disk = has_disk ? &disk : NULL,
                                                   .log = &log};
    assert_int_equal(kv_tiers_create(&tiers_options, &world->tiers, NULL), IMBREX_STATUS_OK);
    const struct kv_cache_options cache_options = {.max_requests = 4,
                                                   .block_size = KV_BLOCK_SIZE,
                                                   .has_token_ids = true,
                                                   .forgets = on_forget,
                                                   .user = world,
                                                   .policy = "lru",
                                                   .policy_options = kv_policy_options_default()};
    world->cache.pool = &world->pool;
    assert_int_equal(kv_cache_create(&cache_options, &world->pool, &world->cache.cache, NULL),
                     IMBREX_STATUS_OK);
    struct kv_policy *policy = kv_cache_policy(world->cache.cache);
    world->functions = *policy->functions;
    world->functions.predict = predict;
    world->functions.value = value;
    policy->functions = &world->functions;
    const struct prefix_prefetch_options options = {
        .num_blocks = NUM_BLOCKS, .max_known = max_known, .block_ns = BLOCK_NS, .percent = percent};
    assert_int_equal(
        prefix_prefetch_create(&options, &world->cache, world->tiers, &world->prefetch, NULL),
        IMBREX_STATUS_OK);
    for (int32_t path = 0; path < NUM_PATHS; path++) {
        struct prompt *prompt = &world->prompts[path];
        for (int32_t i = 0; i < DEPTH; i++) {
            prompt->keys[i] = (struct kv_key){{(uint64_t)(path * 100 + i + 1), 1, 2, 3}};
            for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
                prompt->ids[i * KV_BLOCK_SIZE + j] = path * 1000 + i * KV_BLOCK_SIZE + j;
            }
        }
    }
}

static void open_world(struct world *world, int32_t percent)
{
    open_world_over(world, percent, NUM_SLOTS, 16, false);
}

static void close_world(struct world *world)
{
    assert_true(kv_cache_check(world->cache.cache));
    assert_true(kv_tiers_check(world->tiers));
    prefix_prefetch_destroy(world->prefetch);
    world->prefetch = NULL;
    kv_cache_clear(world->cache.cache, world->cache.now_ns);
    assert_int_equal(world->pool.num_free, NUM_BLOCKS);
    kv_tiers_destroy(world->tiers);
    kv_folder_close(&world->folder);
    fixture_empty_folder(FOLDER);
    kv_cache_destroy(world->cache.cache);
    kv_pool_destroy(&world->pool);
    device_free(world->device, world->blocks);
    device_destroy(world->device);
}

static unsigned char byte_of(int32_t path, int32_t i)
{
    return (unsigned char)(path * 16 + i + 1);
}

/* A request of the path comes, finds what is there, which is checked, computes the rest and ends.
 * Returns how many blocks it found. */
static int32_t run_path(struct world *world, int32_t path)
{
    struct prompt *prompt = &world->prompts[path];
    struct kv_cache *cache = world->cache.cache;
    int64_t now_ns = world->cache.now_ns;
    prompt->kv = (struct kv_request){.keys = prompt->keys,
                                     .token_ids = prompt->ids,
                                     .wants = prompt->wants,
                                     .blocks = prompt->blocks,
                                     .num_keys = DEPTH,
                                     .order = now_ns};
    assert_int_equal(kv_cache_arrive(cache, &prompt->kv, now_ns), IMBREX_STATUS_OK);
    kv_cache_admit(cache, &prompt->kv, DEPTH, false, now_ns);
    int32_t num_found = prompt->kv.num_blocks;
    for (int32_t i = 0; i < num_found; i++) {
        prefix_prefetch_used(world->prefetch, prompt->blocks[i]);
        const unsigned char *block = world->blocks + (size_t)prompt->blocks[i] * BLOCK_BYTES;
        assert_int_equal(block[0], byte_of(path, i));
        assert_int_equal(block[BLOCK_BYTES - 1], byte_of(path, i));
    }
    for (int32_t i = num_found; i < DEPTH; i++) {
        int32_t block_idx;
        assert_int_equal(kv_pool_acquire(&world->pool, &block_idx), IMBREX_STATUS_OK);
        assert_int_equal(kv_tiers_start(world->tiers), IMBREX_STATUS_OK);
        memset(world->blocks + (size_t)block_idx * BLOCK_BYTES, byte_of(path, i), BLOCK_BYTES);
        assert_int_equal(kv_cache_insert(cache, &prompt->kv, &prompt->keys[i],
                                         prompt->ids + i * KV_BLOCK_SIZE, block_idx, now_ns),
                         block_idx);
    }
    kv_cache_finish(cache, &prompt->kv, now_ns);
    for (int32_t i = DEPTH - 1; i >= 0; i--) {
        kv_pool_release(&world->pool, prompt->blocks[i]);
    }
    return num_found;
}

/* One look; returns how many blocks came up by it. */
static int32_t look(struct world *world)
{
    struct kv_promotion promotion;
    int32_t num_up = 0;
    assert_int_equal(kv_tiers_start(world->tiers), IMBREX_STATUS_OK); /* what went down */
    kv_tiers_update(world->tiers, world->cache.now_ns);
    kv_tiers_begin_look(world->tiers);
    prefix_prefetch_look(world->prefetch);
    kv_tiers_end_look(world->tiers);
    assert_int_equal(kv_tiers_start(world->tiers), IMBREX_STATUS_OK);
    while (kv_tiers_poll(world->tiers, &promotion)) {
        int32_t block_idx = promotion.block_idx;
        kv_pool_retain(&world->pool, block_idx);
        bool is_kept = promotion.is_good &&
                       kv_cache_promote(world->cache.cache, &promotion.key,
                                        promotion.has_parent ? &promotion.parent_key : NULL,
                                        promotion.token_ids, block_idx, world->cache.now_ns);
        prefix_prefetch_promoted(world->prefetch, &promotion.key, block_idx, is_kept);
        if (!is_kept) {
            kv_pool_release(&world->pool, block_idx);
        }
        kv_pool_unpin(&world->pool, block_idx);
        num_up += is_kept;
    }
    return num_up;
}

/* Later than all predictions and moves before. */
static void expect(struct world *world, int32_t path, int32_t depth, double path_value)
{
    world->cache.now_ns += INT64_C(2000000000);
    told.hash = world->prompts[path].keys[depth].words[0];
    told.value = path_value;
    told.num_told = 1;
}

static struct prefetch_metrics metrics_of(const struct world *world)
{
    struct prefetch_metrics metrics;
    prefix_prefetch_read_metrics(world->prefetch, &metrics);
    return metrics;
}

/* Catches: a predicted path that comes up with other contents, out of order or not at all; blocks
 * that are brought up twice; uses that are not counted. */
static void test_free_blocks(void **state)
{
    (void)state;
    struct world world;
    open_world(&world, 100);
    assert_int_equal(run_path(&world, 0), 0);
    assert_int_equal(look(&world), 0); /* all is there, and nothing is expected */
    kv_cache_clear(world.cache.cache, world.cache.now_ns);
    expect(&world, 0, DEPTH - 1, 1);
    assert_int_equal(look(&world), DEPTH);
    assert_int_equal(look(&world), 0);
    assert_int_equal(run_path(&world, 0), DEPTH);
    assert_int_equal(metrics_of(&world).num_planned, DEPTH);
    assert_int_equal(metrics_of(&world).num_used, DEPTH);
    assert_int_equal(metrics_of(&world).num_wasted, 0);
    close_world(&world);
}

/* Catches: blocks behind the predicted one; a path whose beginning is still there; a key that never
 * went down. */
static void test_parts(void **state)
{
    (void)state;
    struct world world;
    open_world(&world, 100);
    assert_int_equal(run_path(&world, 0), 0);
    kv_cache_make_room(world.cache.cache, NUM_BLOCKS - 2, world.cache.now_ns);
    expect(&world, 0, 2, 1);
    assert_int_equal(look(&world), 1); /* the third; the fourth was not named */
    told.hash = 12345;
    expect(&world, 1, 0, 1);
    assert_int_equal(look(&world), 0);
    assert_int_equal(run_path(&world, 0), 3);
    close_world(&world);
}

/* Catches: a prediction that takes the place of blocks worth as much, or nearly; one that is
 * worth more and gets none; waste that is not counted. */
static void test_victims(void **state)
{
    (void)state;
    struct world world;
    open_world(&world, 100);
    for (int32_t path = 0; path < NUM_PATHS; path++) {
        assert_int_equal(run_path(&world, path), 0);
    }
    assert_int_equal(world.pool.num_free, 0); /* paths 1 and 2 are there, 0 is below */
    told.victim_value = 1;
    expect(&world, 0, DEPTH - 1, 4); /* the margin */
    assert_int_equal(look(&world), 0);
    expect(&world, 0, DEPTH - 1, 4.1);
    assert_int_equal(look(&world), DEPTH);
    assert_int_equal(run_path(&world, 2), DEPTH); /* the least recently used one had gone */
    kv_cache_clear(world.cache.cache, world.cache.now_ns);
    assert_int_equal(metrics_of(&world).num_wasted, DEPTH);
    assert_int_equal(metrics_of(&world).num_used, 0);
    told.num_told = 0;
    close_world(&world);
}

/* Catches: a prediction of little worth that takes the last free block, for which the next request
 * makes room by something of more; one of more worth that is refused it, or makes room that it does
 * not need. */
static void test_last_free_block(void **state)
{
    (void)state;
    struct world world;
    open_world(&world, 100);
    assert_int_equal(run_path(&world, 2), 0);
    kv_cache_clear(world.cache.cache, world.cache.now_ns);
    assert_int_equal(run_path(&world, 0), 0);
    assert_int_equal(run_path(&world, 1), 0);
    kv_cache_make_room(world.cache.cache, 1, world.cache.now_ns); /* the end of path 0 goes */
    told.victim_value = 1;
    expect(&world, 2, DEPTH - 1, 4);
    assert_int_equal(look(&world), 0);
    assert_int_equal(world.pool.num_free, 1);
    expect(&world, 2, DEPTH - 1, 4.1);
    assert_int_equal(look(&world), DEPTH); /* for the free block and the rest of path 0 */
    assert_int_equal(world.pool.num_free, 0);
    assert_int_equal(run_path(&world, 1), DEPTH);
    assert_int_equal(run_path(&world, 2), DEPTH);
    told.num_told = 0;
    close_world(&world);
}

/* One block is remembered. Catches: what goes for a block remembered in that one's place while it
 * is still needed, so that another block comes up, or half of one. */
static void test_forgotten_meanwhile(void **state)
{
    (void)state;
    struct world world;
    open_world_over(&world, 100, NUM_SLOTS, 1, false);
    assert_int_equal(run_path(&world, 0), 0);
    kv_cache_clear(world.cache.cache, world.cache.now_ns); /* its head last */
    assert_int_equal(run_path(&world, 1), 0);
    assert_int_equal(run_path(&world, 2), 0);
    assert_int_equal(world.pool.num_free, 0);
    told.victim_value = 1;
    expect(&world, 0, 0, 5);
    assert_int_equal(look(&world), 1);
    assert_int_equal(run_path(&world, 0), 1);
    told.num_told = 0;
    close_world(&world);
}

/* Catches: moves beyond the share of the link: at 10 % of it one of these blocks takes as long as
 * the planner looks ahead. */
static void test_budget(void **state)
{
    (void)state;
    struct world world;
    open_world(&world, 10);
    assert_int_equal(run_path(&world, 0), 0);
    kv_cache_clear(world.cache.cache, world.cache.now_ns);
    expect(&world, 0, DEPTH - 1, 1);
    assert_int_equal(look(&world), 2); /* one now, one at the end of the horizon */
    assert_int_equal(look(&world), 0);
    world.cache.now_ns += 10 * BLOCK_NS;
    assert_int_equal(look(&world), 1);
    close_world(&world);
}

/* An idle engine looks when the next look is due. Catches: one that polls, that looks for ever,
 * that looks again too late to go on with what it has begun, or never. */
static void test_idle(void **state)
{
    (void)state;
    struct world world;
    int32_t num_looks = 0;
    open_world(&world, 10);
    assert_int_equal(prefix_prefetch_due_ns(NULL), INT64_MAX);
    assert_int_equal(look(&world), 0);
    assert_int_equal(prefix_prefetch_due_ns(world.prefetch), INT64_MAX); /* nothing is below */
    assert_int_equal(run_path(&world, 0), 0);
    kv_cache_clear(world.cache.cache, world.cache.now_ns);
    expect(&world, 0, DEPTH - 1, 1);
    for (int32_t num_up = 0; num_up < DEPTH; num_looks++) {
        num_up += look(&world);
        assert_true(num_looks < 2 * DEPTH);
        world.cache.now_ns = prefix_prefetch_due_ns(world.prefetch);
    }
    told.num_told = 0;
    int64_t begin_ns = world.cache.now_ns;
    for (num_looks = 0; world.cache.now_ns != INT64_MAX; num_looks++) {
        assert_true(num_looks < 100);
        assert_int_equal(look(&world), 0);
        int64_t due_ns = prefix_prefetch_due_ns(world.prefetch);
        assert_true(due_ns - world.cache.now_ns >= PREFETCH_PREDICTION_LIFE_NS);
        world.cache.now_ns = due_ns;
        begin_ns = due_ns != INT64_MAX ? due_ns : begin_ns;
    }
    assert_in_range(num_looks, 10, 40);
    world.cache.now_ns = begin_ns;
    close_world(&world);
}

/* What the first tier has no room for comes to RAM all the same. Catches: blocks of a disk that
 * stay there because something else may not come up, more of them than RAM should have, so that
 * they push each other out for ever, and one that is not promoted once it may be. */
static void test_fetch(void **state)
{
    (void)state;
    struct world world;
    open_world_over(&world, 100, KV_TIERS_MIN_SLOTS, 16, true);
    for (int32_t round = 0; round < 2; round++) {
        for (int32_t path = 0; path < NUM_PATHS; path++) {
            (void)run_path(&world, path);
            assert_int_equal(kv_tiers_start(world.tiers), IMBREX_STATUS_OK);
            kv_tiers_begin_flush(world.tiers);
            kv_cache_clear(world.cache.cache, world.cache.now_ns);
            kv_tiers_end_flush(world.tiers);
        }
    }
    const struct prompt *prompt = &world.prompts[0];
    kv_tiers_begin_look(world.tiers);
    assert_int_equal(kv_tiers_look(world.tiers, &prompt->keys[0], prompt->ids), KV_PLACE_DISK);
    kv_tiers_end_look(world.tiers);
    (void)run_path(&world, 1);
    (void)run_path(&world, 2);
    told.victim_value = 1;
    expect(&world, 0, DEPTH - 1, 1);
    for (bool is_moving = true; is_moving;) {
        assert_int_equal(look(&world), 0);
        is_moving = kv_tiers_is_moving(world.tiers);
        kv_tiers_wait(world.tiers, 1000000);
        world.cache.now_ns += 1000;
    }
    /* As many as half of RAM: all of them. */
    kv_tiers_begin_look(world.tiers);
    for (int32_t i = 0; i < DEPTH; i++) {
        assert_int_equal(
            kv_tiers_look(world.tiers, &prompt->keys[i], prompt->ids + i * KV_BLOCK_SIZE),
            KV_PLACE_HOST);
    }
    kv_tiers_end_look(world.tiers);
    assert_int_equal(metrics_of(&world).num_planned, 0);
    assert_true(prefix_prefetch_due_ns(world.prefetch) >=
                world.cache.now_ns - 1000 + PREFETCH_PREDICTION_LIFE_NS);
    expect(&world, 0, DEPTH - 1, 5);
    assert_int_equal(look(&world), DEPTH);
    assert_int_equal(run_path(&world, 0), DEPTH);
    told.num_told = 0;
    close_world(&world);
}

int run_prefix_prefetch_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_free_blocks),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_victims),
        cmocka_unit_test(test_forgotten_meanwhile),
        cmocka_unit_test(test_last_free_block),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_idle),
        cmocka_unit_test(test_fetch),
    };
    return cmocka_run_group_tests_name("prefix_prefetch", tests, NULL, NULL);
}
