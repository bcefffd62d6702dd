/* SPDX-License-Identifier: Apache-2.0 */
/* Each rule of the prefix cache by hand, then a random walk of pool, tree and policy beside a naive
 * model: a list of the paths that are resident. */
#include "kv/kv_cache.h"

#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

enum { BLOCK_SIZE = 2, MAX_PATH = 8, MAX_BLOCKS = 16, MAX_EVENTS = 200 };

/* ---- a stage for the tests by hand ----------------------------------------------------------- */

/* A request whose blocks are named by letters: "abc" has three. */
struct actor {
    struct kv_request request;
    const char *path;
    struct kv_key keys[MAX_PATH];
    int32_t token_ids[MAX_PATH * BLOCK_SIZE];
    struct kv_want wants[MAX_PATH];
    int32_t blocks[MAX_PATH];
    int32_t private_blocks[MAX_PATH], num_private;
};

struct stage {
    struct kv_pool pool;
    struct kv_cache *cache;
    const struct kv_policy_functions *lru;
    struct kv_policy_functions
        functions;           /* what the cache calls: lru, and what a test puts there */
    struct kv_key forgotten; /* the last one */
    int32_t num_forgotten;
};

static struct kv_key key_of(const char *path, int32_t num_letters)
{
    struct kv_key key = {{1, 2, 3, 4}};
    for (int32_t i = 0; i < num_letters; i++) {
        key.words[0] = (key.words[0] ^ (uint64_t)path[i]) * UINT64_C(0x100000001b3);
        key.words[3] += key.words[0];
    }
    return key;
}

static void prepare(struct actor *actor, const char *path, int64_t order)
{
    *actor = (struct actor){.path = path};
    actor->request = (struct kv_request){
        .keys = actor->keys,
        .token_ids = actor->token_ids,
        .wants = actor->wants,
        .blocks = actor->blocks,
        .num_keys = (int32_t)strlen(path),
        .order = order,
    };
    for (int32_t i = 0; path[i] != '\0'; i++) {
        actor->keys[i] = key_of(path, i + 1);
        for (int32_t j = 0; j < BLOCK_SIZE; j++) {
            actor->token_ids[i * BLOCK_SIZE + j] = path[i] + 1000 * j;
        }
    }
}

/* The block is still what it was. */
static void note_forgotten(void *user, const struct kv_key *key, const int32_t *token_ids,
                           int32_t block_idx)
{
    struct stage *stage = user;
    assert_int_equal(kv_cache_key_hash(stage->cache, block_idx), key->words[0]);
    assert_int_equal(token_ids[1], token_ids[0] + 1000);
    assert_true(kv_cache_is_idle(stage->cache, block_idx));
    stage->forgotten = *key;
    stage->num_forgotten++;
}

static void set_up(struct stage *stage, int32_t num_blocks, int32_t max_requests)
{
    struct imbrex_error err;
    const struct kv_cache_options options = {
        .max_requests = max_requests,
        .block_size = BLOCK_SIZE,
        .has_token_ids = true,
        .forgets = note_forgotten,
        .user = stage,
        .policy = "lru",
        .policy_options = kv_policy_options_default(),
    };
    *stage = (struct stage){0};
    assert_int_equal(kv_pool_create(num_blocks, &stage->pool, &err), IMBREX_STATUS_OK);
    assert_int_equal(kv_cache_create(&options, &stage->pool, &stage->cache, &err),
                     IMBREX_STATUS_OK);
    struct kv_policy *policy = kv_cache_policy(stage->cache);
    stage->lru = policy->functions;
    stage->functions = *stage->lru;
    policy->functions = &stage->functions;
}

static void tear_down(struct stage *stage)
{
    assert_true(kv_cache_check(stage->cache));
    kv_cache_destroy(stage->cache);
    assert_true(kv_pool_check(&stage->pool));
    assert_null(stage->pool.keeper.user);
    kv_pool_destroy(&stage->pool);
}

static void arrive(struct stage *stage, struct actor *actor, const char *path, int64_t order)
{
    prepare(actor, path, order);
    assert_int_equal(kv_cache_arrive(stage->cache, &actor->request, order), IMBREX_STATUS_OK);
}

/* Computes and inserts what of its path is not there. */
static void fill(struct stage *stage, struct actor *actor)
{
    struct kv_request *request = &actor->request;
    for (int32_t i = request->num_blocks; i < request->num_keys; i++) {
        int32_t block_idx;
        assert_int_equal(kv_pool_acquire(&stage->pool, &block_idx), IMBREX_STATUS_OK);
        int32_t got = kv_cache_insert(stage->cache, request, &actor->keys[i],
                                      &actor->token_ids[i * BLOCK_SIZE], block_idx, 0);
        if (request->is_cut) {
            assert_int_equal(got, block_idx);
            actor->private_blocks[actor->num_private++] = got;
        }
    }
}

static void finish(struct stage *stage, struct actor *actor)
{
    kv_cache_finish(stage->cache, &actor->request, 0);
    while (actor->num_private > 0) {
        kv_pool_release(&stage->pool, actor->private_blocks[--actor->num_private]);
    }
    for (int32_t i = actor->request.num_blocks - 1; i >= 0; i--) {
        kv_pool_release(&stage->pool, actor->blocks[i]);
    }
    assert_true(kv_cache_check(stage->cache));
}

static void admit(struct stage *stage, struct actor *actor)
{
    kv_cache_admit(stage->cache, &actor->request, actor->request.num_keys, false, 0);
}

/* From arrival to end. */
static void run(struct stage *stage, const char *path)
{
    struct actor actor;
    arrive(stage, &actor, path, 0);
    admit(stage, &actor);
    fill(stage, &actor);
    finish(stage, &actor);
}

static int32_t match(const struct stage *stage, const char *path)
{
    struct actor actor;
    prepare(&actor, path, 0);
    return kv_cache_match(stage->cache, &actor.request, MAX_PATH);
}

static struct kv_cache_metrics metrics_of(const struct stage *stage)
{
    struct kv_cache_metrics metrics;
    kv_cache_read_metrics(stage->cache, &metrics);
    return metrics;
}

/* ---- by hand --------------------------------------------------------------------------------- */

/* Catches: blocks that are lost with their request, a hit that has no user, hits that are not
 * counted, or more blocks than asked for. */
static void test_hit(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor;
    set_up(&stage, 8, 2);
    run(&stage, "abc");
    assert_int_equal(stage.pool.num_cached, 3);
    assert_int_equal(kv_pool_num_available(&stage.pool), 8);
    assert_int_equal(match(&stage, "abd"), 2);
    assert_int_equal(match(&stage, "bc"), 0);

    arrive(&stage, &actor, "abcd", 5);
    assert_int_equal(actor.request.num_blocks, 3);
    kv_cache_admit(stage.cache, &actor.request, 2, false, 6);
    assert_int_equal(actor.request.num_blocks, 2);
    assert_int_equal(actor.request.arrival_ns, 5);
    assert_int_equal(actor.request.admission_ns, 6);
    assert_int_equal(stage.pool.num_cached, 1);
    assert_false(kv_cache_is_idle(stage.cache, actor.blocks[1]));
    assert_int_equal(stage.pool.num_users[actor.blocks[1]], 1);
    struct kv_cache_metrics metrics = metrics_of(&stage);
    assert_int_equal(metrics.num_queried, 3 + 4);
    assert_int_equal(metrics.num_hit, 2);
    assert_int_equal(metrics.num_inserted, 3);
    assert_int_equal(metrics.num_free, 5);
    assert_int_equal(metrics.num_used, 2);
    assert_int_equal(metrics.num_cached, 1);
    finish(&stage, &actor);
    tear_down(&stage);
}

/* Catches: more evicted than is lacking, heads before tails, a head that goes although another
 * branch needs it, the newest before the oldest. */
static void test_shortfall(void **state)
{
    (void)state;
    struct stage stage;
    int32_t block_idx;
    set_up(&stage, 8, 1);
    run(&stage, "abc");
    run(&stage, "xy");
    run(&stage, "abd");
    kv_cache_make_room(stage.cache, 2, 0);
    assert_int_equal(metrics_of(&stage).num_evicted, 0);
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(kv_pool_acquire(&stage.pool, &block_idx), IMBREX_STATUS_OK);
    }
    assert_int_equal(metrics_of(&stage).num_evicted, 0);
    /* The oldest tail is c: its path was used again, but not c. */
    assert_int_equal(kv_pool_acquire(&stage.pool, &block_idx), IMBREX_STATUS_OK);
    assert_int_equal(metrics_of(&stage).num_evicted, 1);
    assert_int_equal(match(&stage, "abc"), 2);
    assert_int_equal(match(&stage, "abd"), 3);
    assert_int_equal(match(&stage, "xy"), 2);
    kv_cache_make_room(stage.cache, 1, 0);
    assert_int_equal(match(&stage, "xy"), 1);
    kv_cache_make_room(stage.cache, 3, 0);
    assert_int_equal(match(&stage, "xy"), 0);
    assert_int_equal(match(&stage, "abd"), 2);
    assert_int_equal(stage.pool.num_free, 3);
    kv_cache_clear(stage.cache, 0);
    assert_int_equal(stage.pool.num_free, 8 - 3);
    assert_int_equal(metrics_of(&stage).num_evicted, 6);
    tear_down(&stage);
}

static int32_t chosen_victim(struct kv_policy *policy, int64_t now_ns)
{
    (void)policy;
    return (int32_t)now_ns;
}

/* Catches: a victim with descendants that goes before them, an eviction that leaves the victim's
 * subtree, that takes the other branches too without asking, or that goes on from a block which is
 * another one by now. */
static void test_victim_with_descendants(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor;
    set_up(&stage, 9, 1);
    run(&stage, "abcd");
    run(&stage, "abe");
    run(&stage, "xy");
    arrive(&stage, &actor, "ab", 0);
    kv_cache_leave(stage.cache, &actor.request, 0);
    stage.functions.victim = chosen_victim;
    /* The time is the policy's answer here. */
    kv_cache_make_room(stage.cache, 3, actor.blocks[0]);
    assert_int_equal(stage.pool.num_free, 3);
    assert_int_equal(match(&stage, "abcd"), 3); /* of the two branches the older one's tail */
    kv_cache_make_room(stage.cache, 4, actor.blocks[1]);
    assert_int_equal(match(&stage, "abcd"), 2);
    assert_int_equal(match(&stage, "abe"), 3);
    run(&stage, "abf");
    assert_int_equal(stage.pool.num_free, 3);
    kv_cache_make_room(stage.cache, 6, actor.blocks[1]);
    assert_int_equal(match(&stage, "abe"), 1);
    assert_int_equal(match(&stage, "xy"), 2);
    assert_int_equal(stage.pool.num_free, 6);
    kv_cache_make_room(stage.cache, 7, actor.blocks[0]);
    assert_int_equal(match(&stage, "a"), 0);
    stage.functions.victim = stage.lru->victim;
    tear_down(&stage);
}

/* Catches: a block in use or pinned that goes, and an acquire that waits for room that never
 * comes. */
static void test_busy_and_pinned(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor;
    int32_t blocks[4];
    set_up(&stage, 4, 2);
    run(&stage, "abc");
    arrive(&stage, &actor, "ab", 0);
    admit(&stage, &actor);
    kv_pool_pin(&stage.pool, actor.blocks[0]);
    kv_pool_pin(&stage.pool, actor.blocks[1]);
    finish(&stage, &actor);
    assert_int_equal(stage.pool.num_pinned, 2);
    assert_int_equal(stage.pool.num_cached, 1);
    assert_int_equal(kv_pool_acquire(&stage.pool, &blocks[0]), IMBREX_STATUS_OK);
    assert_int_equal(kv_pool_acquire(&stage.pool, &blocks[1]), IMBREX_STATUS_OK);
    assert_int_equal(kv_pool_acquire(&stage.pool, &blocks[2]), IMBREX_STATUS_CAPACITY);
    assert_int_equal(match(&stage, "abc"), 2);
    kv_cache_clear(stage.cache, 0);
    assert_int_equal(match(&stage, "abc"), 2);
    assert_true(kv_cache_check(stage.cache));
    kv_pool_unpin(&stage.pool, actor.blocks[1]);
    assert_int_equal(stage.pool.num_cached, 1);
    assert_int_equal(kv_pool_acquire(&stage.pool, &blocks[2]), IMBREX_STATUS_OK);
    assert_int_equal(blocks[2], actor.blocks[1]);
    assert_int_equal(match(&stage, "abc"), 1);
    kv_pool_unpin(&stage.pool, actor.blocks[0]);
    tear_down(&stage);
}

/* Catches: two blocks with one key, a duplicate that keeps its user or loses its pin, a block whose
 * user is counted twice because two choices of a request insert it. */
static void test_duplicates(void **state)
{
    (void)state;
    struct stage stage;
    struct actor first, second;
    set_up(&stage, 8, 2);
    arrive(&stage, &first, "ab", 0);
    arrive(&stage, &second, "ab", 1);
    admit(&stage, &first);
    admit(&stage, &second);
    fill(&stage, &first);
    int32_t block_idx;
    assert_int_equal(kv_pool_acquire(&stage.pool, &block_idx), IMBREX_STATUS_OK);
    kv_pool_pin(&stage.pool, block_idx);
    assert_int_equal(kv_cache_insert(stage.cache, &second.request, &second.keys[0],
                                     second.token_ids, block_idx, 0),
                     first.blocks[0]);
    assert_int_equal(stage.pool.num_users[first.blocks[0]], 2);
    assert_int_equal(stage.pool.num_users[block_idx], 0);
    assert_int_equal(stage.pool.num_free, 8 - 3);
    kv_pool_unpin(&stage.pool, block_idx);
    assert_int_equal(stage.pool.num_free, 8 - 2);
    assert_int_equal(metrics_of(&stage).num_duplicates, 1);

    kv_pool_retain(&stage.pool, first.blocks[1]);
    assert_int_equal(kv_cache_insert(stage.cache, &second.request, &second.keys[1],
                                     &second.token_ids[BLOCK_SIZE], first.blocks[1], 0),
                     first.blocks[1]);
    assert_int_equal(stage.pool.num_users[first.blocks[1]], 2);
    assert_int_equal(metrics_of(&stage).num_duplicates, 1);
    finish(&stage, &first);
    assert_int_equal(stage.pool.num_cached, 0);
    finish(&stage, &second);
    assert_int_equal(stage.pool.num_cached, 2);

    /* A duplicate of an idle block uses it. */
    arrive(&stage, &first, "ab", 2);
    kv_cache_admit(stage.cache, &first.request, 0, false, 0);
    fill(&stage, &first);
    assert_int_equal(stage.pool.num_cached, 0);
    assert_int_equal(stage.pool.num_free, 6);
    finish(&stage, &first);
    tear_down(&stage);
}

/* Catches: a hit on a block whose key is right and whose tokens are not, or which lies behind other
 * tokens; a collision that is not counted; blocks in the tree behind one that is not. */
static void test_collision(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor;
    set_up(&stage, 12, 2);
    run(&stage, "abc");
    arrive(&stage, &actor, "axcd", 0);
    kv_cache_leave(stage.cache, &actor.request, 0);
    for (int32_t i = 1; i < 3; i++) {
        actor.keys[i] = key_of("abc", i + 1);
    }
    assert_int_equal(kv_cache_match(stage.cache, &actor.request, 4), 1);
    assert_int_equal(metrics_of(&stage).num_collisions, 0);
    assert_int_equal(kv_cache_arrive(stage.cache, &actor.request, 0), IMBREX_STATUS_OK);
    admit(&stage, &actor);
    assert_int_equal(actor.request.num_blocks, 1);
    assert_int_equal(metrics_of(&stage).num_collisions, 1);
    fill(&stage, &actor);
    assert_int_equal(actor.num_private, 3);
    assert_int_equal(metrics_of(&stage).num_collisions, 2);
    finish(&stage, &actor);
    assert_int_equal(stage.pool.num_cached, 3);
    assert_int_equal(stage.pool.num_free, 12 - 3);

    /* The right ids under the right key, but behind another block. */
    prepare(&actor, "xb", 0);
    actor.keys[1] = key_of("ab", 2);
    assert_int_equal(kv_cache_arrive(stage.cache, &actor.request, 0), IMBREX_STATUS_OK);
    admit(&stage, &actor);
    fill(&stage, &actor);
    assert_int_equal(actor.num_private, 1);
    assert_int_equal(metrics_of(&stage).num_collisions, 3);
    finish(&stage, &actor);
    assert_int_equal(match(&stage, "abc"), 3);
    tear_down(&stage);
}

/* Catches: a queue that is not in order, that keeps who has left or was admitted, or that does not
 * know the blocks which come and go. */
static void test_wanted(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actors[5];
    set_up(&stage, 8, 5);
    run(&stage, "ab");
    arrive(&stage, &actors[0], "abc", 30);
    int32_t head = actors[0].blocks[0], tail = actors[0].blocks[1];
    assert_int_equal(kv_cache_wanted(stage.cache, head), 30);
    arrive(&stage, &actors[1], "a", 50);
    arrive(&stage, &actors[2], "ab", 40); /* between them */
    arrive(&stage, &actors[3], "a", 20);  /* before all, as one that was preempted */
    assert_int_equal(kv_cache_wanted(stage.cache, head), 20);
    assert_int_equal(kv_cache_wanted(stage.cache, tail), 30);
    assert_true(kv_cache_check(stage.cache));
    kv_cache_leave(stage.cache, &actors[3].request, 0);
    assert_int_equal(kv_cache_wanted(stage.cache, head), 30);
    /* A block that came while somebody waits for it. */
    arrive(&stage, &actors[4], "abcd", 60);
    admit(&stage, &actors[4]);
    fill(&stage, &actors[4]);
    assert_int_equal(kv_cache_wanted(stage.cache, actors[4].blocks[2]), 30);
    assert_int_equal(kv_cache_wanted(stage.cache, actors[4].blocks[3]), INT64_MAX);
    finish(&stage, &actors[4]);
    /* One that went and came again, and may lie elsewhere. */
    kv_cache_clear(stage.cache, 0);
    assert_true(kv_cache_check(stage.cache));
    run(&stage, "xy");
    run(&stage, "abc");
    arrive(&stage, &actors[4], "abc", 70);
    assert_int_equal(kv_cache_wanted(stage.cache, actors[4].blocks[2]), 30);
    admit(&stage, &actors[0]);
    assert_int_equal(kv_cache_wanted(stage.cache, actors[4].blocks[2]), 70);
    assert_int_equal(kv_cache_wanted(stage.cache, actors[4].blocks[1]), 40);
    kv_cache_leave(stage.cache, &actors[2].request, 0);
    assert_int_equal(kv_cache_wanted(stage.cache, actors[4].blocks[0]), 50);
    kv_cache_leave(stage.cache, &actors[1].request, 0);
    kv_cache_leave(stage.cache, &actors[4].request, 0);
    assert_int_equal(kv_cache_wanted(stage.cache, actors[0].blocks[0]), INT64_MAX);
    finish(&stage, &actors[0]);
    tear_down(&stage);
}

/* Catches: a preempted request that does not find its own blocks again, or counts as hits what it
 * had computed itself; a request index that is never given again. */
static void test_preemption(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor, other;
    set_up(&stage, 8, 1);
    arrive(&stage, &actor, "abcd", 0);
    assert_int_equal(kv_cache_arrive(stage.cache, &other.request, 0), IMBREX_STATUS_CAPACITY);
    admit(&stage, &actor);
    fill(&stage, &actor);
    finish(&stage, &actor);
    assert_int_equal(kv_cache_arrive(stage.cache, &actor.request, 1), IMBREX_STATUS_OK);
    kv_cache_admit(stage.cache, &actor.request, 4, true, 2);
    assert_int_equal(actor.request.num_blocks, 4);
    assert_int_equal(metrics_of(&stage).num_queried, 4);
    assert_int_equal(metrics_of(&stage).num_hit, 0);
    finish(&stage, &actor);
    tear_down(&stage);
}

/* Catches: a block from a slower tier that stands where its parent is not, or twice; that is busy,
 * is not found, or is not known to who waits for it; a hook that does not hear what goes, or hears
 * it when it is gone; an announced victim that is not the one which goes. */
static void test_promote(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor;
    int32_t block_idx;
    set_up(&stage, 4, 2);
    run(&stage, "abc");
    assert_int_equal(stage.num_forgotten, 0);
    kv_cache_make_room(stage.cache, 3, 0);
    assert_int_equal(stage.num_forgotten, 2);
    const struct kv_key forgotten = key_of("ab", 2);
    assert_true(kv_key_equal(&stage.forgotten, &forgotten));
    arrive(&stage, &actor, "abc", 5);

    assert_int_equal(kv_pool_acquire(&stage.pool, &block_idx), IMBREX_STATUS_OK);
    assert_false(kv_cache_promote(stage.cache, &actor.keys[2], &actor.keys[1],
                                  &actor.token_ids[2 * BLOCK_SIZE], block_idx, 0));
    assert_false(
        kv_cache_promote(stage.cache, &actor.keys[0], NULL, actor.token_ids, block_idx, 0));
    assert_int_equal(stage.pool.num_users[block_idx], 1);
    assert_true(kv_cache_promote(stage.cache, &actor.keys[1], &actor.keys[0],
                                 &actor.token_ids[BLOCK_SIZE], block_idx, 0));
    assert_true(kv_cache_is_idle(stage.cache, block_idx));
    assert_int_equal(kv_cache_wanted(stage.cache, block_idx), 5);
    assert_int_equal(match(&stage, "abc"), 2);
    assert_true(kv_cache_check(stage.cache));
    assert_int_equal(kv_cache_next_victim(stage.cache, 0), block_idx);
    assert_int_equal(metrics_of(&stage).num_promoted, 1);
    assert_int_equal(metrics_of(&stage).num_inserted, 3);
    admit(&stage, &actor);
    assert_int_equal(actor.request.num_blocks, 2);
    assert_int_equal(kv_cache_next_victim(stage.cache, 0), -1);
    fill(&stage, &actor);
    finish(&stage, &actor);
    assert_int_equal(stage.num_forgotten, 2);
    tear_down(&stage);
}

/* Catches: a block that came up under a request and stands where its parent is not, or twice, that
 * is not in use, is not the request's, or counts as computed. */
static void test_promote_for(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor, other;
    int32_t blocks[2];
    set_up(&stage, 6, 3);
    run(&stage, "a");
    arrive(&stage, &actor, "abcd", 0);
    arrive(&stage, &other, "abc", 1);
    admit(&stage, &actor);
    assert_int_equal(actor.request.num_blocks, 1);
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(kv_pool_acquire(&stage.pool, &blocks[i]), IMBREX_STATUS_OK);
    }
    assert_true(kv_cache_promote_for(stage.cache, &actor.request, &actor.keys[1],
                                     &actor.token_ids[BLOCK_SIZE], blocks[0], false, 0));
    assert_false(kv_cache_promote_for(stage.cache, &actor.request, &actor.keys[1],
                                      &actor.token_ids[BLOCK_SIZE], blocks[1], false, 0));
    assert_true(kv_cache_promote_for(stage.cache, &actor.request, &actor.keys[2],
                                     &actor.token_ids[2 * BLOCK_SIZE], blocks[1], true, 0));
    assert_true(kv_cache_check(stage.cache));
    assert_int_equal(actor.request.num_blocks, 3);
    assert_int_equal(actor.blocks[2], blocks[1]);
    assert_int_equal(kv_cache_parent(stage.cache, blocks[1]), blocks[0]);
    assert_int_equal(kv_cache_wanted(stage.cache, blocks[1]), 1);
    assert_int_equal(stage.pool.num_users[blocks[0]], 1);
    assert_int_equal(metrics_of(&stage).num_promoted, 2);
    assert_int_equal(metrics_of(&stage).num_hit, 2); /* "a" and what is not recomputed */
    admit(&stage, &other);
    assert_int_equal(other.request.num_blocks, 3);
    fill(&stage, &actor);
    assert_int_equal(metrics_of(&stage).num_inserted, 2);
    finish(&stage, &other);
    finish(&stage, &actor);
    assert_int_equal(match(&stage, "abcd"), 4);
    tear_down(&stage);
}

/* ---- what the policy hears ------------------------------------------------------------------- */

/* The policy's pointer leads to its cache and to nothing of the test's, so what is heard lies in
 * what the fingerprint's session names. */
static char heard[MAX_EVENTS];

static void hear(const char *event)
{
    assert_true(strlen(heard) + strlen(event) < sizeof(heard));
    strcat(heard, event);
}

static void hear_arrive(struct kv_policy *policy, const struct kv_policy_request *request,
                        int64_t now_ns)
{
    (void)policy;
    (void)now_ns;
    char text[] = "arrive?/? ";
    text[6] = (char)('0' + request->num_blocks);
    text[8] = (char)('0' + request->num_path_blocks);
    hear(text);
    assert_int_equal(request->admission_ns, -1);
}

static void hear_miss(struct kv_policy *policy, uint64_t key_hash, int64_t now_ns)
{
    (void)policy;
    (void)now_ns;
    hear(key_hash == key_of("abc", 3).words[0] ? "miss-c " : "miss ");
}

static void hear_admit(struct kv_policy *policy, const struct kv_policy_request *request,
                       int64_t now_ns)
{
    (void)now_ns;
    hear("admit ");
    for (int32_t i = 0; i < request->num_blocks; i++) {
        assert_false(kv_cache_is_idle(policy->cache, request->blocks[i]));
        assert_int_equal(kv_cache_wanted(policy->cache, request->blocks[i]), INT64_MAX);
    }
}

static void hear_finish(struct kv_policy *policy, const struct kv_policy_request *request,
                        int64_t now_ns)
{
    (void)policy;
    (void)request;
    (void)now_ns;
    hear("finish ");
}

static void hear_block(const struct kv_policy *policy, const char *event, int32_t block_idx)
{
    char depth[] = "? ";
    depth[0] = (char)('0' + kv_cache_depth(policy->cache, block_idx));
    hear(event);
    hear(depth);
}

static void hear_insert(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                        int64_t now_ns)
{
    (void)request_idx;
    (void)now_ns;
    hear_block(policy, "insert", block_idx);
    assert_false(kv_cache_is_idle(policy->cache, block_idx));
}

static void hear_hit(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                     int64_t now_ns)
{
    (void)request_idx;
    (void)now_ns;
    hear_block(policy, "hit", block_idx);
}

static void hear_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    (void)now_ns;
    hear_block(policy, "idle", block_idx);
    assert_true(kv_cache_is_idle(policy->cache, block_idx));
}

static void hear_busy(struct kv_policy *policy, int32_t block_idx)
{
    hear_block(policy, "busy", block_idx);
}

static void hear_evict(struct kv_policy *policy, int32_t block_idx)
{
    hear_block(policy, "evict", block_idx);
}

/* Catches: an event that is missing, comes twice or in another order: in the wrong order heads
 * would go before tails. */
static void test_events(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor;
    set_up(&stage, 3, 1);
    run(&stage, "ab");
    stage.functions.arrive = hear_arrive;
    stage.functions.miss = hear_miss;
    stage.functions.admit = hear_admit;
    stage.functions.finish = hear_finish;
    stage.functions.leave = hear_finish;
    stage.functions.insert = hear_insert;
    stage.functions.hit = hear_hit;
    stage.functions.idle = hear_idle;
    stage.functions.busy = hear_busy;
    stage.functions.evict = hear_evict;
    stage.functions.victim = chosen_victim;
    heard[0] = '\0';
    arrive(&stage, &actor, "abc", 0);
    assert_int_equal(actor.request.fingerprint.prefix_class, key_of("a", 1).words[0]);
    assert_string_equal(heard, "arrive2/3 miss-c ");
    heard[0] = '\0';
    admit(&stage, &actor);
    fill(&stage, &actor);
    finish(&stage, &actor);
    assert_string_equal(heard, "hit0 busy0 hit1 busy1 admit insert2 finish idle2 idle1 idle0 ");
    heard[0] = '\0';
    kv_cache_make_room(stage.cache, 2, actor.blocks[1]);
    assert_string_equal(heard, "evict2 evict1 ");
    heard[0] = '\0';
    arrive(&stage, &actor, "a", 0);
    kv_cache_leave(stage.cache, &actor.request, 0);
    assert_string_equal(heard, "arrive1/1 finish ");
    tear_down(&stage);
}

/* Catches: a check that sees nothing. */
static void test_check_sees_damage(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor, waiting[2];
    set_up(&stage, 6, 3);
    arrive(&stage, &actor, "abc", 0);
    admit(&stage, &actor);
    fill(&stage, &actor);
    arrive(&stage, &waiting[0], "ab", 1);
    arrive(&stage, &waiting[1], "ab", 2);
    assert_true(kv_cache_check(stage.cache));
    waiting[0].request.order = 3; /* the queue is out of order */
    assert_false(kv_cache_check(stage.cache));
    waiting[0].request.order = 1;
    waiting[0].wants[1].block_idx = -1; /* a waiter that does not know its block */
    assert_false(kv_cache_check(stage.cache));
    waiting[0].wants[1].block_idx = actor.blocks[1];
    stage.pool.is_kept[actor.blocks[2]] = false; /* in the tree, but not kept */
    assert_false(kv_cache_check(stage.cache));
    stage.pool.is_kept[actor.blocks[2]] = true;
    assert_true(kv_cache_check(stage.cache));
    kv_pool_release(&stage.pool, actor.blocks[0]); /* a head before its tail */
    assert_false(kv_cache_check(stage.cache));
    kv_pool_retain(&stage.pool, actor.blocks[0]);
    assert_true(kv_cache_check(stage.cache));
    for (int32_t i = 0; i < 2; i++) {
        kv_cache_leave(stage.cache, &waiting[i].request, 0);
    }
    finish(&stage, &actor);
    tear_down(&stage);
}

/* Catches: a cache that leaves its blocks kept, or takes those in use away; a name that is not
 * there taken for another, and a message that does not say which there are. */
static void test_create_and_destroy(void **state)
{
    (void)state;
    struct stage stage;
    struct actor actor;
    struct imbrex_error err;
    set_up(&stage, 6, 3);
    run(&stage, "xy");
    arrive(&stage, &actor, "ab", 0);
    admit(&stage, &actor);
    fill(&stage, &actor);
    assert_true(kv_cache_state_bytes(stage.cache) > 6 * (sizeof(struct kv_key) + 8));
    kv_cache_destroy(stage.cache);
    assert_int_equal(stage.pool.num_free, 4);
    assert_int_equal(stage.pool.num_cached, 0);
    kv_pool_release(&stage.pool, actor.blocks[1]);
    kv_pool_release(&stage.pool, actor.blocks[0]);
    assert_int_equal(stage.pool.num_free, 6);
    assert_true(kv_pool_check(&stage.pool));

    const struct kv_cache_options options = {
        .max_requests = 1,
        .block_size = 1,
        .policy = "best",
    };
    struct kv_cache *cache = NULL;
    assert_int_equal(kv_cache_create(&options, &stage.pool, &cache, &err), IMBREX_STATUS_NOT_FOUND);
    assert_null(cache);
    assert_non_null(strstr(err.message, "expected one of lru"));
    assert_non_null(strstr(err.message, "'best'"));
    assert_null(stage.pool.keeper.user);
    assert_string_equal(kv_policy_name(0), "lru");
    assert_null(kv_policy_name(-1));
    assert_null(kv_policy_name(100));
    kv_cache_destroy(NULL);
    kv_policy_destroy(NULL);
    kv_pool_destroy(&stage.pool);
}

/* ---- the walk -------------------------------------------------------------------------------- */

enum {
    NUM_WALKS = TEST_SANITIZED ? 200 : 2000,
    WALK_STEPS = 500,
    MAX_LIVE = 6,
    MAX_PINS = 4,
    NO_BLOCK = -1,
};

/* A resident block in the model: everything before it, spelled out. */
struct resident {
    char path[MAX_PATH + 1];
    struct kv_key key;
    int32_t block_idx;
    bool is_idle;
    int64_t idle_since;
};

struct walk_request {
    struct actor actor;
    char path[MAX_PATH + 1]; /* prompt and output */
    bool is_live, has_run;
    int32_t open; /* a block that is not full yet */
};

/* Pinned blocks, tails first when they are unpinned. */
struct walk_pins {
    int32_t blocks[MAX_PATH];
    int32_t num_blocks;
};

struct walk {
    struct kv_pool pool;
    struct kv_cache *cache;
    struct kv_policy_functions functions;
    const struct kv_policy_functions *policy; /* before its functions were replaced */
    struct resident residents[MAX_BLOCKS];
    int32_t num_residents;
    struct walk_request requests[MAX_LIVE];
    struct walk_pins pins[MAX_PINS];
    uint32_t random;
    int64_t now, order;
    int32_t num_letters, max_prompt;
    bool is_weak, has_random_victims, is_lru;
    char victim_path[MAX_PATH + 1];
    int32_t num_evicted;
    struct kv_cache_metrics metrics;
    uint64_t num_seen_collisions; /* over all walks, so that they are known to happen */
};

/* The functions of a policy have no pointer to a test's own. */
static struct walk *walking;

static int32_t draw(struct walk *walk, int32_t limit)
{
    walk->random = walk->random * 1664525u + 1013904223u;
    return (int32_t)((uint64_t)walk->random * (uint64_t)limit >> 32);
}

static struct kv_key walk_key(const struct walk *walk, const char *path, int32_t num_letters)
{
    struct kv_key key = key_of(path, num_letters);
    if (walk->is_weak) {
        key = (struct kv_key){{key.words[0] >> 32 & 15, 0, 0, 0}};
    }
    return key;
}

static struct resident *find_block(struct walk *walk, int32_t block_idx)
{
    for (int32_t i = 0; i < walk->num_residents; i++) {
        if (walk->residents[i].block_idx == block_idx) {
            return &walk->residents[i];
        }
    }
    return NULL;
}

static struct resident *find_path(struct walk *walk, const char *path, int32_t num_letters)
{
    for (int32_t i = 0; i < walk->num_residents; i++) {
        const char *resident = walk->residents[i].path;
        if ((int32_t)strlen(resident) == num_letters &&
            strncmp(resident, path, (size_t)num_letters) == 0) {
            return &walk->residents[i];
        }
    }
    return NULL;
}

static struct resident *find_key(struct walk *walk, struct kv_key key)
{
    for (int32_t i = 0; i < walk->num_residents; i++) {
        if (kv_key_equal(&walk->residents[i].key, &key)) {
            return &walk->residents[i];
        }
    }
    return NULL;
}

static bool is_below(const struct resident *resident, const char *path)
{
    return strncmp(resident->path, path, strlen(path)) == 0;
}

static void walk_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct resident *resident = find_block(walking, block_idx);
    assert_non_null(resident);
    assert_false(resident->is_idle);
    resident->is_idle = true;
    resident->idle_since = walking->now++;
    if (walking->policy->idle != NULL) {
        walking->policy->idle(policy, block_idx, now_ns);
    }
}

static void walk_busy(struct kv_policy *policy, int32_t block_idx)
{
    struct resident *resident = find_block(walking, block_idx);
    assert_non_null(resident);
    assert_true(resident->is_idle);
    resident->is_idle = false;
    if (walking->policy->busy != NULL) {
        walking->policy->busy(policy, block_idx);
    }
}

static int32_t walk_victim(struct kv_policy *policy, int64_t now_ns)
{
    int32_t block_idx = walking->policy->victim(policy, now_ns);
    assert_true(block_idx >= 0 && block_idx < walking->pool.num_blocks);
    assert_non_null(find_block(walking, block_idx));
    assert_true(find_block(walking, block_idx)->is_idle);
    if (walking->has_random_victims) {
        /* Mostly the one that was named before, so that the cache goes on where it stopped. */
        const struct resident *last =
            find_path(walking, walking->victim_path, (int32_t)strlen(walking->victim_path));
        if (last != NULL && last->is_idle && draw(walking, 4) > 0) {
            block_idx = last->block_idx;
        } else {
            do {
                block_idx = walking->residents[draw(walking, walking->num_residents)].block_idx;
            } while (!find_block(walking, block_idx)->is_idle);
        }
    }
    strcpy(walking->victim_path, find_block(walking, block_idx)->path);
    return block_idx;
}

static void walk_evict(struct kv_policy *policy, int32_t block_idx)
{
    struct resident *resident = find_block(walking, block_idx);
    assert_non_null(resident);
    assert_true(resident->is_idle);
    assert_true(is_below(resident, walking->victim_path));
    for (int32_t i = 0; i < walking->num_residents; i++) {
        const struct resident *other = &walking->residents[i];
        assert_true(other == resident || !is_below(other, resident->path));
        assert_true(walking->has_random_victims || !walking->is_lru || !other->is_idle ||
                    other->idle_since >= resident->idle_since);
    }
    *resident = walking->residents[--walking->num_residents];
    walking->num_evicted++;
    walking->metrics.num_evicted++;
    if (walking->policy->evict != NULL) {
        walking->policy->evict(policy, block_idx);
    }
}

static bool is_wanted_by(const struct walk_request *request, struct kv_key key)
{
    for (int32_t i = 0; i < request->actor.request.num_keys; i++) {
        if (kv_key_equal(&request->actor.keys[i], &key)) {
            return true;
        }
    }
    return false;
}

static int32_t count_matching(struct walk *walk, const struct walk_request *request)
{
    int32_t num_blocks = 0;
    while (num_blocks < request->actor.request.num_keys &&
           find_path(walk, request->path, num_blocks + 1) != NULL) {
        num_blocks++;
    }
    return num_blocks;
}

/* Pool, tree and queue against what follows from the model by the slowest way. */
static void walk_verify(struct walk *walk)
{
    int32_t num_users[MAX_BLOCKS] = {0}, num_idle = 0, num_used = 0;
    for (int32_t r = 0; r < MAX_LIVE; r++) {
        const struct walk_request *request = &walk->requests[r];
        if (!request->is_live) {
            continue;
        }
        const struct kv_request *inner = &request->actor.request;
        if (inner->is_waiting) {
            assert_int_equal(kv_cache_match(walk->cache, inner, MAX_PATH),
                             count_matching(walk, request));
            continue;
        }
        for (int32_t i = 0; i < inner->num_blocks; i++) {
            num_users[inner->blocks[i]]++;
            const struct resident *resident = find_path(walk, request->path, i + 1);
            assert_non_null(resident);
            assert_int_equal(resident->block_idx, inner->blocks[i]);
        }
        for (int32_t i = 0; i < request->actor.num_private; i++) {
            num_users[request->actor.private_blocks[i]]++;
        }
        if (request->open != NO_BLOCK) {
            num_users[request->open]++;
        }
    }
    for (int32_t i = 0; i < walk->pool.num_blocks; i++) {
        assert_int_equal(walk->pool.num_users[i], num_users[i]);
    }
    for (int32_t p = 0; p < MAX_PINS; p++) {
        for (int32_t i = 0; i < walk->pins[p].num_blocks; i++) {
            num_users[walk->pins[p].blocks[i]]++;
        }
    }
    for (int32_t i = 0; i < walk->num_residents; i++) {
        const struct resident *resident = &walk->residents[i];
        int32_t depth = (int32_t)strlen(resident->path) - 1, num_children = 0;
        int64_t wanted = INT64_MAX;
        assert_int_equal(resident->is_idle, num_users[resident->block_idx] == 0);
        num_idle += resident->is_idle;
        for (int32_t r = 0; r < MAX_LIVE; r++) {
            const struct walk_request *request = &walk->requests[r];
            if (request->is_live && request->actor.request.is_waiting &&
                request->actor.request.order < wanted && is_wanted_by(request, resident->key)) {
                wanted = request->actor.request.order;
            }
        }
        for (int32_t j = 0; j < walk->num_residents; j++) {
            num_children += (int32_t)strlen(walk->residents[j].path) == depth + 2 &&
                            is_below(&walk->residents[j], resident->path);
        }
        const struct resident *parent = find_path(walk, resident->path, depth);
        assert_int_equal(kv_cache_depth(walk->cache, resident->block_idx), depth);
        assert_int_equal(kv_cache_parent(walk->cache, resident->block_idx),
                         parent != NULL ? parent->block_idx : -1);
        assert_int_equal(kv_cache_num_children(walk->cache, resident->block_idx), num_children);
        assert_true(kv_cache_wanted(walk->cache, resident->block_idx) == wanted);
    }
    for (int32_t i = 0; i < walk->pool.num_blocks; i++) {
        num_used += num_users[i] > 0;
    }
    struct kv_cache_metrics metrics;
    kv_cache_read_metrics(walk->cache, &metrics);
    walk->metrics.num_cached = num_idle;
    walk->metrics.num_used = num_used;
    walk->metrics.num_free = walk->pool.num_blocks - num_used - num_idle;
    assert_memory_equal(&metrics, &walk->metrics, sizeof(metrics));
    assert_true(kv_cache_check(walk->cache));
}

/* Another request, or none if all live. */
static void walk_arrive(struct walk *walk)
{
    struct walk_request *request = &walk->requests[draw(walk, MAX_LIVE)];
    if (request->is_live) {
        return;
    }
    int32_t num_letters = 1 + draw(walk, MAX_PATH);
    *request = (struct walk_request){.is_live = true, .open = NO_BLOCK};
    for (int32_t i = 0; i < num_letters; i++) {
        request->path[i] = (char)('a' + draw(walk, walk->num_letters));
    }
    int64_t order = 2 * walk->order + (draw(walk, 4) == 0 ? -2 * draw(walk, 5) - 1 : 0);
    walk->order++;
    prepare(&request->actor, request->path, order);
    for (int32_t i = 0; i < num_letters; i++) {
        request->actor.keys[i] = walk_key(walk, request->path, i + 1);
    }
    if (num_letters > walk->max_prompt) {
        request->actor.request.num_keys = walk->max_prompt;
    }
    /* Places in the queue are unique. */
    for (int32_t r = 0; r < MAX_LIVE; r++) {
        if (&walk->requests[r] != request && walk->requests[r].is_live &&
            walk->requests[r].actor.request.order == order) {
            request->is_live = false;
            return;
        }
    }
    assert_int_equal(kv_cache_arrive(walk->cache, &request->actor.request, walk->now),
                     IMBREX_STATUS_OK);
    assert_int_equal(request->actor.request.num_blocks, count_matching(walk, request));
}

static void walk_admit(struct walk *walk, struct walk_request *request)
{
    struct kv_request *inner = &request->actor.request;
    int32_t num_blocks = count_matching(walk, request);
    int32_t max_blocks = draw(walk, 3) == 0 ? draw(walk, MAX_PATH) : MAX_PATH;
    const struct resident *next =
        num_blocks < inner->num_keys ? find_key(walk, inner->keys[num_blocks]) : NULL;
    walk->metrics.num_collisions += next != NULL && num_blocks < max_blocks;
    num_blocks = num_blocks < max_blocks ? num_blocks : max_blocks;
    if (!request->has_run) {
        walk->metrics.num_queried += (uint64_t)inner->num_keys;
        walk->metrics.num_hit += (uint64_t)num_blocks;
    }
    kv_cache_admit(walk->cache, inner, max_blocks, request->has_run, walk->now);
    assert_int_equal(inner->num_blocks, num_blocks);
    request->has_run = true;
}

/* The next block of a request that runs: taken, or filled. */
static void walk_grow(struct walk *walk, struct walk_request *request)
{
    struct actor *actor = &request->actor;
    struct kv_request *inner = &actor->request;
    int32_t position = inner->num_blocks + actor->num_private;
    if (position == (int32_t)strlen(request->path)) {
        return;
    }
    if (request->open == NO_BLOCK) {
        int32_t num_available = kv_pool_num_available(&walk->pool);
        bool has_free = walk->pool.num_free > 0;
        walk->num_evicted = 0;
        enum imbrex_status status = kv_pool_acquire(&walk->pool, &request->open);
        assert_int_equal(status, num_available > 0 ? IMBREX_STATUS_OK : IMBREX_STATUS_CAPACITY);
        assert_int_equal(walk->num_evicted, !has_free && num_available > 0);
        return;
    }
    const struct kv_key *key = &actor->keys[position];
    const struct resident *existing = find_key(walk, *key);
    bool is_same = existing != NULL && existing == find_path(walk, request->path, position + 1);
    int32_t expected = request->open;
    for (int32_t p = 0; p < MAX_PINS && draw(walk, 4) == 0; p++) {
        if (walk->pins[p].num_blocks == 0 && is_same) { /* a step still reads the duplicate */
            kv_pool_pin(&walk->pool, request->open);
            walk->pins[p] = (struct walk_pins){.blocks = {request->open}, .num_blocks = 1};
            break;
        }
    }
    if (inner->is_cut) {
        actor->private_blocks[actor->num_private++] = request->open;
    } else if (existing == NULL) {
        struct resident *added = &walk->residents[walk->num_residents++];
        *added = (struct resident){.key = *key, .block_idx = request->open};
        memcpy(added->path, request->path, (size_t)position + 1);
        walk->metrics.num_inserted++;
    } else if (is_same) {
        expected = existing->block_idx;
        walk->metrics.num_duplicates++;
    } else {
        actor->private_blocks[actor->num_private++] = request->open;
        walk->metrics.num_collisions++;
    }
    assert_int_equal(kv_cache_insert(walk->cache, inner, key,
                                     &actor->token_ids[position * BLOCK_SIZE], request->open,
                                     walk->now),
                     expected);
    request->open = NO_BLOCK;
}

static void walk_finish(struct walk *walk, struct walk_request *request, bool is_preempted)
{
    if (request->open != NO_BLOCK) {
        kv_pool_release(&walk->pool, request->open);
        request->open = NO_BLOCK;
    }
    kv_cache_finish(walk->cache, &request->actor.request, walk->now);
    while (request->actor.num_private > 0) {
        request->actor.num_private--;
        kv_pool_release(&walk->pool, request->actor.private_blocks[request->actor.num_private]);
    }
    for (int32_t i = request->actor.request.num_blocks - 1; i >= 0; i--) {
        kv_pool_release(&walk->pool, request->actor.blocks[i]);
    }
    request->is_live = is_preempted;
    if (is_preempted) {
        assert_int_equal(kv_cache_arrive(walk->cache, &request->actor.request, walk->now),
                         IMBREX_STATUS_OK);
    }
}

/* Pins what a request has, or unpins what was pinned. */
static void walk_pin(struct walk *walk, const struct walk_request *request)
{
    struct walk_pins *pins = &walk->pins[draw(walk, MAX_PINS)];
    if (pins->num_blocks > 0) {
        while (pins->num_blocks > 0) {
            pins->num_blocks--;
            kv_pool_unpin(&walk->pool, pins->blocks[pins->num_blocks]);
        }
    } else if (request->is_live && !request->actor.request.is_waiting) {
        for (int32_t i = 0; i < request->actor.request.num_blocks; i++) {
            kv_pool_pin(&walk->pool, request->actor.blocks[i]);
            pins->blocks[pins->num_blocks++] = request->actor.blocks[i];
        }
    }
}

static void walk_make_room(struct walk *walk)
{
    int32_t num_blocks = draw(walk, 10) == 0 ? walk->pool.num_blocks : draw(walk, 6);
    int32_t num_lacking = num_blocks - walk->pool.num_free;
    int32_t num_expected =
        num_lacking < walk->pool.num_cached ? num_lacking : walk->pool.num_cached;
    walk->num_evicted = 0;
    kv_cache_make_room(walk->cache, num_blocks, walk->now);
    assert_int_equal(walk->num_evicted, num_expected > 0 ? num_expected : 0);
}

static void walk_step(struct walk *walk)
{
    struct walk_request *request = &walk->requests[draw(walk, MAX_LIVE)];
    bool is_waiting = request->is_live && request->actor.request.is_waiting;
    bool is_running = request->is_live && !is_waiting;
    switch (draw(walk, 20)) {
    case 0:
    case 1:
    case 2:
    case 3:
        walk_arrive(walk);
        break;
    case 4:
    case 5:
    case 6:
        if (is_waiting) {
            walk_admit(walk, request);
        }
        break;
    case 7:
        if (is_waiting && draw(walk, 4) == 0) {
            kv_cache_leave(walk->cache, &request->actor.request, walk->now);
            request->is_live = false;
        }
        break;
    case 8:
    case 9:
        if (is_running) {
            walk_finish(walk, request, draw(walk, 4) == 0);
        }
        break;
    case 10:
        walk_pin(walk, request);
        break;
    case 11:
        if (draw(walk, 4) == 0) {
            walk_make_room(walk);
        }
        break;
    default:
        if (is_running) {
            walk_grow(walk, request);
        }
    }
}

static void run_walk(struct walk *walk, uint32_t seed)
{
    struct imbrex_error err;
    *walk = (struct walk){
        .random = seed * 2654435761u + 1,
        .num_seen_collisions = walk->num_seen_collisions,
    };
    walk->num_letters = 1 + draw(walk, 3);
    walk->max_prompt = 1 + draw(walk, MAX_PATH);
    walk->is_weak = draw(walk, 4) == 0;
    walk->has_random_victims = draw(walk, 2) == 0;
    int32_t num_policies = 0;
    while (kv_policy_name(num_policies) != NULL) {
        num_policies++;
    }
    /* Every second walk checks lru's order. */
    const char *policy_name = draw(walk, 2) == 0 ? "lru" : kv_policy_name(draw(walk, num_policies));
    walk->is_lru = strcmp(policy_name, "lru") == 0;
    const struct kv_cache_options options = {
        .max_requests = MAX_LIVE,
        .block_size = BLOCK_SIZE,
        .has_token_ids = true,
        .policy = policy_name,
        .policy_options = kv_policy_options_default(),
    };
    int32_t num_blocks = 1 + draw(walk, MAX_BLOCKS);
    assert_int_equal(kv_pool_create(num_blocks, &walk->pool, &err), IMBREX_STATUS_OK);
    assert_int_equal(kv_cache_create(&options, &walk->pool, &walk->cache, &err), IMBREX_STATUS_OK);
    struct kv_policy *policy = kv_cache_policy(walk->cache);
    walk->policy = policy->functions;
    walk->functions = *policy->functions;
    walk->functions.idle = walk_idle;
    walk->functions.busy = walk_busy;
    walk->functions.evict = walk_evict;
    walk->functions.victim = walk_victim;
    policy->functions = &walk->functions;
    walking = walk;
    for (int32_t step = 0; step < WALK_STEPS; step++) {
        walk->now++;
        walk_step(walk);
        walk_verify(walk);
    }
    for (int32_t r = 0; r < MAX_LIVE; r++) {
        struct walk_request *request = &walk->requests[r];
        if (request->is_live && request->actor.request.is_waiting) {
            kv_cache_leave(walk->cache, &request->actor.request, walk->now);
            request->is_live = false;
        } else if (request->is_live) {
            walk_finish(walk, request, false);
        }
    }
    walk_verify(walk);
    walk->num_seen_collisions += walk->metrics.num_collisions;
    kv_cache_destroy(walk->cache);
    assert_true(kv_pool_check(&walk->pool));
    kv_pool_destroy(&walk->pool);
}

/* Catches: whatever the tests by hand do not think of: a block that is lost, found under another
 * path, evicted while it is used or before its tail, one too many or too few; a queue that names
 * somebody else; a collision that passes for a hit. */
static void test_walk(void **state)
{
    (void)state;
    struct walk *walk = calloc(1, sizeof(*walk));
    assert_non_null(walk);
    for (uint32_t seed = 0; seed < NUM_WALKS; seed++) {
        run_walk(walk, seed);
    }
    assert_true(walk->num_seen_collisions > NUM_WALKS);
    free(walk);
}

int run_kv_cache_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hit),
        cmocka_unit_test(test_shortfall),
        cmocka_unit_test(test_victim_with_descendants),
        cmocka_unit_test(test_busy_and_pinned),
        cmocka_unit_test(test_duplicates),
        cmocka_unit_test(test_collision),
        cmocka_unit_test(test_wanted),
        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_promote),
        cmocka_unit_test(test_promote_for),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_check_sees_damage),
        cmocka_unit_test(test_create_and_destroy),
        cmocka_unit_test(test_walk),
    };
    return cmocka_run_group_tests_name("kv_cache", tests, NULL, NULL);
}
