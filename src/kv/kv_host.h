/* SPDX-License-Identifier: Apache-2.0 */
/* The host tier: slots of one block each in RAM, found by key, the least recently used one first
 * to go. It knows places; who moves what is kv_tiers.h's.
 *
 *   EMPTY    nothing is in it
 *   FILLING  something is being copied or read into it; it can be found, not used yet
 *   READY    its block can be copied from
 *
 * A slot that is held (something reads it) or FILLING does not go. */
#ifndef IMBREX_KV_KV_HOST_H
#define IMBREX_KV_KV_HOST_H

#include <stdbool.h>

#include "kv/block_list.h"
#include "kv/kv_pool.h"
#include "kv/kv_table.h"
#include "ops/pinned_region.h"

enum kv_host_state { KV_HOST_EMPTY = 0, KV_HOST_FILLING, KV_HOST_READY };

struct kv_host_slot {
    enum kv_host_state state;
    int32_t num_holds;
    int32_t token_ids[KV_BLOCK_SIZE];
};

struct kv_host {
    struct pinned_region memory; /* [num_slots] x block_bytes */
    size_t block_bytes;
    int32_t num_slots;
    struct kv_host_slot *slots; /* [num_slots] */
    struct kv_key *keys;        /* [num_slots] */
    struct kv_table table;      /* key -> slot, of those that are not empty */
    struct block_links links;   /* of both lists */
    struct block_list empty;
    struct block_list used; /* the least recently used one first */
};

/* num_slots >= 1; block_bytes is a multiple of KV_BLOCK_ALIGNMENT. The device, which outlives the
 * tier, knows its memory from then on. */
enum imbrex_status kv_host_create(struct device *device, int32_t num_slots, size_t block_bytes,
                                  struct kv_host *host, struct imbrex_error *err);
/* Safe on a zeroed struct. No copies may be under way. */
void kv_host_destroy(struct kv_host *host);

static inline unsigned char *kv_host_block(const struct kv_host *host, int32_t slot_idx)
{
    return host->memory.base + (size_t)slot_idx * host->block_bytes;
}

/* The slot of the block, FILLING or READY; -1: none. */
int32_t kv_host_find(const struct kv_host *host, const struct kv_key *key,
                     const int32_t *token_ids);
/* An empty slot becomes FILLING under the key, which no other slot has. -1: none is empty. */
int32_t kv_host_begin(struct kv_host *host, const struct kv_key *key, const int32_t *token_ids);
/* FILLING to READY, or to EMPTY if what was to come did not. */
void kv_host_end(struct kv_host *host, int32_t slot_idx, bool is_good);
/* A READY slot that is not held becomes EMPTY. */
void kv_host_evict(struct kv_host *host, int32_t slot_idx);

void kv_host_hold(struct kv_host *host, int32_t slot_idx);
void kv_host_release(struct kv_host *host, int32_t slot_idx);
/* It was used just now. */
void kv_host_touch(struct kv_host *host, int32_t slot_idx);
/* It goes before all others. */
void kv_host_yield(struct kv_host *host, int32_t slot_idx);

/* True if lists, table and states agree. For tests and idle moments. */
bool kv_host_check(const struct kv_host *host);

#endif
