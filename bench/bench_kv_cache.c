/* SPDX-License-Identifier: Apache-2.0 */
/* What the prefix cache costs, on one core. usage: bench_kv_cache
 *
 * Blocks of 16 tokens, a pool of 65,536, prompts of 4,096 tokens whose first half is one of 64
 * conversations' and whose second half is new, under each policy in turn. Prints for each block of
 * a prompt what hashing costs; what arrival, lookup, insertion and end cost together, with the
 * policy and with the evictions that a full pool asks for, hashing excluded and included; and what
 * it takes to make room for 1,000 blocks. The median and the 90th percentile of all requests. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "kv/kv_cache.h"

enum {
    NUM_BLOCKS = 65536,
    PROMPT_BLOCKS = 256,
    SHARED_BLOCKS = PROMPT_BLOCKS / 2,
    NUM_CONVERSATIONS = 64,
    NUM_WAITING = 32,
    NUM_REQUESTS = 1500,
    NUM_WARM = 600, /* by then the pool is full */
    NUM_ROOMS = 40,
    ROOM_BLOCKS = 1000,
};

struct bench_request {
    struct kv_request request;
    struct kv_key keys[PROMPT_BLOCKS];
    int32_t token_ids[PROMPT_BLOCKS * KV_BLOCK_SIZE];
    struct kv_want wants[PROMPT_BLOCKS];
    int32_t blocks[PROMPT_BLOCKS];
};

struct bench {
    struct kv_pool pool;
    struct kv_cache *cache;
    struct kv_hasher *hasher;
    struct kv_key root;
    struct bench_request *requests; /* [NUM_WAITING] a ring */
    uint32_t random;
};

static uint32_t next_random(struct bench *bench)
{
    bench->random = bench->random * 1664525u + 1013904223u;
    return bench->random >> 8;
}

static int compare(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

static void print_sorted(const char *name, int64_t *values_ns, int32_t num_values, double per,
                         const char *unit)
{
    qsort(values_ns, (size_t)num_values, sizeof(*values_ns), compare);
    printf("  %s %7.1f %7.1f %s", name, (double)values_ns[num_values / 2] / per,
           (double)values_ns[num_values / 10 * 9] / per, unit);
}

/* Returns what the hashing took. */
static int64_t arrive(struct bench *bench, struct bench_request *arriving, int64_t order)
{
    uint32_t conversation = next_random(bench) % NUM_CONVERSATIONS;
    for (int32_t i = 0; i < PROMPT_BLOCKS * KV_BLOCK_SIZE; i++) {
        arriving->token_ids[i] = i < SHARED_BLOCKS * KV_BLOCK_SIZE
                                     ? (int32_t)conversation * 7 + i
                                     : (int32_t)(next_random(bench) % 150000);
    }
    arriving->request = (struct kv_request){
        .keys = arriving->keys,
        .token_ids = arriving->token_ids,
        .wants = arriving->wants,
        .blocks = arriving->blocks,
        .num_keys = PROMPT_BLOCKS,
        .order = order,
        .fingerprint = {.num_prompt_tokens = PROMPT_BLOCKS * KV_BLOCK_SIZE,
                        .last_gap_ns = -1,
                        .finish = KV_FINISH_STOP},
    };
    int64_t begin_ns = clock_now_ns();
    kv_hasher_blocks(bench->hasher, &bench->root, arriving->token_ids, KV_BLOCK_SIZE, PROMPT_BLOCKS,
                     arriving->keys);
    return clock_now_ns() - begin_ns;
}

/* From admission to end. */
static bool serve(struct bench *bench, struct bench_request *served, int64_t now_ns)
{
    struct kv_request *request = &served->request;
    kv_cache_admit(bench->cache, request, PROMPT_BLOCKS - 1, false, now_ns);
    while (request->num_blocks < PROMPT_BLOCKS) {
        int32_t i = request->num_blocks, block_idx;
        if (kv_pool_acquire(&bench->pool, &block_idx) != IMBREX_STATUS_OK) {
            return false;
        }
        kv_cache_insert(bench->cache, request, &served->keys[i],
                        &served->token_ids[i * KV_BLOCK_SIZE], block_idx, now_ns);
    }
    kv_cache_finish(bench->cache, request, now_ns);
    for (int32_t i = request->num_blocks - 1; i >= 0; i--) {
        kv_pool_release(&bench->pool, served->blocks[i]);
    }
    return true;
}

static bool run(struct bench *bench, const char *policy)
{
    static int64_t hash_ns[NUM_REQUESTS], cache_ns[NUM_REQUESTS], all_ns[NUM_REQUESTS];
    static int64_t room_ns[NUM_ROOMS];
    int32_t num_timed = 0;
    bool is_right = true;
    for (int32_t i = 0; is_right && i < NUM_REQUESTS + NUM_WAITING; i++) {
        struct bench_request *request = &bench->requests[i % NUM_WAITING];
        int64_t served_ns = 0, now_ns = (int64_t)i * 1000000000;
        if (i >= NUM_WAITING) {
            int64_t begin_ns = clock_now_ns();
            is_right = serve(bench, request, now_ns);
            served_ns = clock_now_ns() - begin_ns;
        }
        int64_t hashed_ns = arrive(bench, request, i);
        int64_t begin_ns = clock_now_ns();
        is_right = kv_cache_arrive(bench->cache, &request->request, now_ns) == IMBREX_STATUS_OK &&
                   is_right;
        served_ns += clock_now_ns() - begin_ns;
        if (i >= NUM_WARM + NUM_WAITING) {
            hash_ns[num_timed] = hashed_ns;
            cache_ns[num_timed] = served_ns;
            all_ns[num_timed] = hashed_ns + served_ns;
            num_timed++;
        }
    }
    struct kv_cache_metrics metrics;
    kv_cache_read_metrics(bench->cache, &metrics);
    is_right = is_right && metrics.num_evicted > 0 && metrics.num_collisions == 0 &&
               kv_cache_check(bench->cache);
    for (int32_t i = 0; i < NUM_ROOMS; i++) {
        int32_t wanted = bench->pool.num_free + ROOM_BLOCKS;
        int64_t begin_ns = clock_now_ns();
        kv_cache_make_room(bench->cache, wanted, (int64_t)NUM_REQUESTS * 1000000000);
        room_ns[i] = clock_now_ns() - begin_ns;
        is_right = is_right && bench->pool.num_free == wanted;
    }
    for (int32_t i = 0; i < NUM_WAITING; i++) {
        kv_cache_leave(bench->cache, &bench->requests[i].request, 0);
    }
    is_right = is_right && kv_cache_check(bench->cache);
    printf("%-12s", policy);
    print_sorted("hash", hash_ns, num_timed, PROMPT_BLOCKS, "ns");
    print_sorted("cache", cache_ns, num_timed, PROMPT_BLOCKS, "ns");
    print_sorted("both", all_ns, num_timed, PROMPT_BLOCKS, "ns");
    print_sorted("1,000 evicted", room_ns, NUM_ROOMS, 1e3, "us");
    printf("  hits %4.1f %%\n", 100.0 * (double)metrics.num_hit / (double)metrics.num_queried);
    return is_right;
}

static bool bench_policy(struct bench *bench, const char *policy)
{
    const struct kv_identity identity = {.model_id = "bench", .layout = "bench"};
    const struct kv_cache_options options = {
        .max_requests = 2 * NUM_WAITING,
        .block_size = KV_BLOCK_SIZE,
        .has_token_ids = true,
        .policy = policy,
        .policy_options = kv_policy_options_default(),
    };
    struct imbrex_error err;
    bool is_right = false;
    *bench = (struct bench){.random = 1, .requests = bench->requests};
    if (kv_pool_create(NUM_BLOCKS, &bench->pool, &err) != IMBREX_STATUS_OK ||
        kv_cache_create(&options, &bench->pool, &bench->cache, &err) != IMBREX_STATUS_OK ||
        kv_hasher_create(&bench->hasher, &err) != IMBREX_STATUS_OK) {
        fprintf(stderr, "bench_kv_cache: %s\n", err.message);
    } else {
        kv_hasher_root(bench->hasher, &identity, NULL, 0, &bench->root);
        is_right = run(bench, policy);
    }
    kv_hasher_destroy(bench->hasher);
    kv_cache_destroy(bench->cache);
    kv_pool_destroy(&bench->pool);
    return is_right;
}

int main(void)
{
    struct bench bench = {.requests = calloc(NUM_WAITING, sizeof(*bench.requests))};
    bool is_right = bench.requests != NULL;
    printf("kv cache: median and p90, for each block of 16 tokens\n");
    for (int32_t i = 0; is_right && kv_policy_name(i) != NULL; i++) {
        is_right = bench_policy(&bench, kv_policy_name(i));
    }
    free(bench.requests);
    if (!is_right) {
        fprintf(stderr, "bench_kv_cache: failed\n");
    }
    return is_right ? 0 : 1;
}
