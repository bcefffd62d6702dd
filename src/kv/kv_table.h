/* SPDX-License-Identifier: Apache-2.0 */
/* Block by key: open addressing, at most half full, linear probing, deletion by moving back, so
 * that it never fills up with what was deleted. The keys lie elsewhere, by block. */
#ifndef IMBREX_KV_KV_TABLE_H
#define IMBREX_KV_KV_TABLE_H

#include <stdbool.h>

#include "kv/kv_key.h"

struct kv_table_slot {
    uint32_t hash;
    int32_t block_idx; /* -1: empty */
};

struct kv_table {
    struct kv_table_slot *slots; /* [mask + 1] */
    const struct kv_key *keys;   /* by block, the owner's */
    uint32_t mask;
    int32_t num_entries;
};

/* For at most max_entries entries, none at first. */
enum imbrex_status kv_table_create(int32_t max_entries, const struct kv_key *keys,
                                   struct kv_table *table, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void kv_table_destroy(struct kv_table *table);

/* -1: not there. */
int32_t kv_table_find(const struct kv_table *table, const struct kv_key *key);
/* The block's key is in its place and not in the table yet. */
void kv_table_add(struct kv_table *table, int32_t block_idx);
void kv_table_remove(struct kv_table *table, int32_t block_idx);

/* Keys may be a caller's own numbers: their words are mixed before the low bits choose a place. */
static inline uint32_t kv_key_mix(const struct kv_key *key)
{
    uint64_t mixed = (key->words[0] ^ key->words[1] * UINT64_C(0x9e3779b97f4a7c15)) *
                     UINT64_C(0xff51afd7ed558ccd);
    return (uint32_t)(mixed >> 32);
}

/* The smallest power of two >= 2 * count, less one; count < 2^30. */
uint32_t kv_table_mask(int32_t count);

#endif
