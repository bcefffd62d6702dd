/* SPDX-License-Identifier: Apache-2.0 */
/* A prefix cache under a policy, for tests: requests are paths of numbers, each number a block. */
#ifndef IMBREX_TESTS_KV_POLICY_WORLD_H
#define IMBREX_TESTS_KV_POLICY_WORLD_H

#include "kv/kv_cache.h"

enum { WORLD_MAX_PATH = 64, WORLD_MAX_REQUESTS = 16 };

struct world_request {
    struct kv_request request;
    struct kv_key keys[WORLD_MAX_PATH];
    struct kv_want wants[WORLD_MAX_PATH];
    int32_t blocks[WORLD_MAX_PATH];
    bool is_waiting, is_running;
};

struct world {
    struct kv_pool pool;
    struct kv_cache *cache;
    struct world_request requests[WORLD_MAX_REQUESTS];
    int64_t now_ns, num_arrivals;
};

void world_init(struct world *world, const char *policy, int32_t num_blocks,
                const struct kv_policy_options *options);
void world_deinit(struct world *world);

/* Request `slot` asks for the path [num_blocks]; NULL: a fingerprint of zeros. */
void world_arrive(struct world *world, int32_t slot, const int32_t *path, int32_t num_blocks,
                  const struct kv_fingerprint *fingerprint);
/* It runs: returns its hits. Needs room for what it lacks. */
int32_t world_run(struct world *world, int32_t slot);
void world_end(struct world *world, int32_t slot);
void world_leave(struct world *world, int32_t slot);
/* The first missing block of the waiting request comes up from a slower tier. False: nothing is
 * missing, or the block before it made room for it. */
bool world_promote(struct world *world, int32_t slot);
/* All of it, in slot 0. */
int32_t world_use(struct world *world, const int32_t *path, int32_t num_blocks,
                  const struct kv_fingerprint *fingerprint);
/* Blocks of the path that are there, from the head on. */
int32_t world_resident(struct world *world, const int32_t *path, int32_t num_blocks);

/* Numbers that look random and are the same everywhere. */
uint32_t world_random(uint32_t *state, uint32_t limit);

#endif
