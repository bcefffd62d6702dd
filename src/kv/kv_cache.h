/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix cache: full blocks of finished work stay, found again by their key, until their room
 * is needed. A tree over the blocks of a pool: a node is a block, its parent the block before it.
 *
 *   pool:   free + used + cached = total; used: some request holds it; cached: in the tree, idle
 *   tree:   key -> block; parent, first child, siblings; all nodes of a path in use are in use
 *   queue:  the keys that waiting requests want, each with its waiters in order
 *   policy: which idle block goes next
 *
 * A request's life: arrive (its keys are known) -> admit (what is there is its to use) -> insert
 * for each block that has become full -> finish, then its owner releases the blocks, tails first.
 * Who uses or pins a block of the tree uses or pins all before it: so of an idle block all
 * descendants are idle, and every idle block can be forgotten.
 * One thread uses a cache; times are the caller's. */
#ifndef IMBREX_KV_KV_CACHE_H
#define IMBREX_KV_KV_CACHE_H

#include "kv/kv_key.h"
#include "kv/kv_policy.h"
#include "kv/kv_pool.h"

struct kv_cache_options {
    int32_t max_requests; /* that wait or run at once */
    int32_t block_size;   /* tokens, for policies and metrics */
    /* Token ids of each block are kept and compared on a hit; a block whose ids differ is a miss
     * and counted. The replayer has no ids. */
    bool has_token_ids;
    /* A block is about to be forgotten; it still has its contents, which a slower tier may take.
     * token_ids: [block_size], NULL if the cache has none. Of the cache only questions may be asked
     * from here. NULL: nobody wants to know. */
    void (*forgets)(void *user, const struct kv_key *key, const int32_t *token_ids,
                    int32_t block_idx);
    void *user;
    const char *policy;
    struct kv_policy_options policy_options; /* sizes are filled in by the cache */
};

/* One waiter for one key; lies in the request. */
struct kv_want {
    struct kv_request *request;
    struct kv_want *previous, *next; /* ring of the waiters of the key, nearest first */
    struct kv_want *chain;           /* of the nearest: that of another key */
    uint32_t hash;
    int32_t block_idx; /* of the nearest: that has the key; -1: not resident */
};

/* A request as the cache knows it; lies in its owner's memory until finish or leave. */
struct kv_request {
    const struct kv_key *keys; /* [num_keys] of the full blocks of its prompt */
    const int32_t *token_ids;  /* [num_keys * block_size], if the cache compares them; else NULL */
    struct kv_want *wants;     /* [num_keys], written by the cache */
    int32_t num_keys;
    int64_t order; /* its place in the queue: smaller is sooner; unique */
    struct kv_fingerprint fingerprint;

    /* Written by the cache. A waiting request's blocks are those that were there when it came. */
    int32_t request_idx;
    int32_t *blocks; /* the owner's, room for num_keys and for every block that is inserted:
                      * resident blocks of its path */
    int32_t num_blocks;
    int64_t arrival_ns, admission_ns;
    bool is_waiting;
    bool is_cut; /* a block of it is not in the tree, so nothing after it is: a key collided */
};

struct kv_cache_metrics {
    uint64_t num_queried, num_hit; /* prompt blocks of admitted requests; found */
    /* Collisions: a key that was there with other token ids, or behind another block. */
    uint64_t num_inserted, num_duplicates, num_evicted, num_collisions;
    uint64_t num_promoted; /* brought up from a slower tier */
    int64_t num_cached, num_used, num_free;
};

struct kv_cache;

/* The cache takes the pool's idle blocks over: from now on the pool asks it for room. The pool
 * outlives the cache. */
enum imbrex_status kv_cache_create(const struct kv_cache_options *options, struct kv_pool *pool,
                                   struct kv_cache **cache, struct imbrex_error *err);
void kv_cache_destroy(struct kv_cache *cache);

/* The request joins the queue. CAPACITY beyond max_requests. */
enum imbrex_status kv_cache_arrive(struct kv_cache *cache, struct kv_request *request,
                                   int64_t now_ns);
/* It leaves the queue without having run. */
void kv_cache_leave(struct kv_cache *cache, struct kv_request *request, int64_t now_ns);

/* Blocks of its prompt that are resident, from the head on, at most max_blocks. Changes nothing. */
int32_t kv_cache_match(const struct kv_cache *cache, const struct kv_request *request,
                       int32_t max_blocks);

/* The request runs: of its prompt the first blocks that are resident, at most max_blocks, are its
 * to use, one user more each (kv_pool_retain); request->blocks[0, num_blocks) says which. It leaves
 * the queue. is_recomputed: it has been admitted before (and was preempted): the hits do not
 * count. */
void kv_cache_admit(struct kv_cache *cache, struct kv_request *request, int32_t max_blocks,
                    bool is_recomputed, int64_t now_ns);

/* A block of the request has become full: `key` of it and, with token ids, its ids. The block at
 * request->blocks[num_blocks - 1] is its parent. If the key is there already, that block is used
 * instead: it gets the user that block_idx loses (who pins block_idx keeps its contents), and
 * counts as hit. Returns the block that the request has now; it is a private one, not in the tree,
 * after a collision. */
int32_t kv_cache_insert(struct kv_cache *cache, struct kv_request *request,
                        const struct kv_key *key, const int32_t *token_ids, int32_t block_idx,
                        int64_t now_ns);

/* A block of a slower tier was brought up: block_idx, acquired by the caller for one user, holds
 * it, and becomes an idle block of the tree behind the block of parent_key (NULL: it is a head).
 * The caller's use has ended. False, and nothing has changed, if the key is there already or the
 * block before it no longer is. */
bool kv_cache_promote(struct kv_cache *cache, const struct kv_key *key,
                      const struct kv_key *parent_key, const int32_t *token_ids, int32_t block_idx,
                      int64_t now_ns);

/* The same for a block that came up after the request was admitted, which computes behind it
 * already: the block at request->blocks[num_blocks - 1] is its parent, block_idx keeps the
 * request's user, and counts as hit unless is_recomputed. False, and nothing has changed, if the
 * key is there already, or the request is cut: kv_cache_insert sees to it later. */
bool kv_cache_promote_for(struct kv_cache *cache, struct kv_request *request,
                          const struct kv_key *key, const int32_t *token_ids, int32_t block_idx,
                          bool is_recomputed, int64_t now_ns);

/* The request has ended, or was preempted (it arrives again then). Its owner releases the blocks
 * right after, tails first. */
void kv_cache_finish(struct kv_cache *cache, struct kv_request *request, int64_t now_ns);

/* Whether the block of that key is resident, in use or idle. */
bool kv_cache_has(const struct kv_cache *cache, const struct kv_key *key);
/* The key of a block of the cache, until it is forgotten. */
const struct kv_key *kv_cache_key(const struct kv_cache *cache, int32_t block_idx);

/* Its token ids, [block_size]; NULL: the cache has none. */
const int32_t *kv_cache_token_ids(const struct kv_cache *cache, int32_t block_idx);

/* The block that would be forgotten next. -1: none is idle. */
int32_t kv_cache_next_victim(struct kv_cache *cache, int64_t now_ns);
/* Forgets idle blocks until num_blocks are free in the pool, or none is left. */
void kv_cache_make_room(struct kv_cache *cache, int32_t num_blocks, int64_t now_ns);
/* Forgets everything idle. */
void kv_cache_clear(struct kv_cache *cache, int64_t now_ns);

void kv_cache_read_metrics(const struct kv_cache *cache, struct kv_cache_metrics *metrics);
struct kv_policy *kv_cache_policy(struct kv_cache *cache);
/* Tables and lists, without the policy's. */
size_t kv_cache_state_bytes(const struct kv_cache *cache);
/* True if tree, table, queue and pool agree. For tests and idle moments. */
bool kv_cache_check(const struct kv_cache *cache);

#endif
