/* SPDX-License-Identifier: Apache-2.0 */
/* The keys that waiting requests want. Every waiter of a key is a struct kv_want in its request's
 * memory; of each key the nearest one hangs in a chained table, the others in a ring behind it. So
 * the queue takes whatever number of keys without an allocation; only the chains get longer. */
#ifndef IMBREX_KV_KV_WANTED_H
#define IMBREX_KV_KV_WANTED_H

#include "kv/kv_cache.h"

struct kv_wanted {
    struct kv_want **chains; /* [mask + 1] the nearest waiters of the keys that fall there */
    uint32_t mask;
    int64_t num_wants;
};

/* num_blocks sizes the table. */
enum imbrex_status kv_wanted_create(int32_t num_blocks, struct kv_wanted *wanted,
                                    struct imbrex_error *err);
/* Safe on a zeroed struct. */
void kv_wanted_destroy(struct kv_wanted *wanted);

/* The nearest waiter of the key, NULL: nobody waits for it. */
struct kv_want *kv_wanted_find(const struct kv_wanted *wanted, const struct kv_key *key);

/* The request waits for its key_idx'th key. Returns the key's nearest waiter, old or new; a new one
 * has taken its predecessor's block over. */
struct kv_want *kv_wanted_add(struct kv_wanted *wanted, struct kv_request *request,
                              int32_t key_idx);
/* It waits no longer. Returns who is the nearest waiter of the key now, with the block of the one
 * before; NULL: nobody. */
struct kv_want *kv_wanted_remove(struct kv_wanted *wanted, struct kv_want *want);

/* True if chains and rings are in order and hold num_wants waiters. */
bool kv_wanted_check(const struct kv_wanted *wanted);

#endif
