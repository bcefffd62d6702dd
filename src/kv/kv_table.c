/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_table.h"

#include <assert.h>
#include <stdlib.h>

uint32_t kv_table_mask(int32_t count)
{
    uint32_t mask = 1;
    while (mask < 2 * (uint32_t)count) {
        mask *= 2;
    }
    return mask - 1;
}

enum imbrex_status kv_table_create(int32_t max_entries, const struct kv_key *keys,
                                   struct kv_table *table, struct imbrex_error *err)
{
    struct kv_table created = {.keys = keys, .mask = kv_table_mask(max_entries)};
    size_t num_slots = (size_t)created.mask + 1;
    created.slots = malloc(num_slots * sizeof(*created.slots));
    if (created.slots == NULL) {
        return error_out_of_memory(err, "the prefix cache's table",
                                   num_slots * sizeof(*created.slots));
    }
    for (size_t i = 0; i < num_slots; i++) {
        created.slots[i] = (struct kv_table_slot){.block_idx = -1};
    }
    *table = created;
    return IMBREX_STATUS_OK;
}

void kv_table_destroy(struct kv_table *table)
{
    free(table->slots);
    *table = (struct kv_table){0};
}

int32_t kv_table_find(const struct kv_table *table, const struct kv_key *key)
{
    uint32_t hash = kv_key_mix(key);
    for (uint32_t i = hash & table->mask;; i = (i + 1) & table->mask) {
        const struct kv_table_slot *slot = &table->slots[i];
        if (slot->block_idx == -1 ||
            (slot->hash == hash && kv_key_equal(&table->keys[slot->block_idx], key))) {
            return slot->block_idx;
        }
    }
}

void kv_table_add(struct kv_table *table, int32_t block_idx)
{
    uint32_t hash = kv_key_mix(&table->keys[block_idx]);
    uint32_t i = hash & table->mask;
    assert((uint32_t)table->num_entries < table->mask);
    while (table->slots[i].block_idx != -1) {
        i = (i + 1) & table->mask;
    }
    table->slots[i] = (struct kv_table_slot){.hash = hash, .block_idx = block_idx};
    table->num_entries++;
}

void kv_table_remove(struct kv_table *table, int32_t block_idx)
{
    uint32_t i = kv_key_mix(&table->keys[block_idx]) & table->mask;
    while (table->slots[i].block_idx != block_idx) {
        assert(table->slots[i].block_idx != -1);
        i = (i + 1) & table->mask;
    }
    /* What follows moves into the gap unless the gap lies before the place it was meant for. */
    for (uint32_t next = (i + 1) & table->mask; table->slots[next].block_idx != -1;
         next = (next + 1) & table->mask) {
        uint32_t num_from_home = (next - table->slots[next].hash) & table->mask;
        uint32_t num_from_gap = (next - i) & table->mask;
        if (num_from_home >= num_from_gap) {
            table->slots[i] = table->slots[next];
            i = next;
        }
    }
    table->slots[i].block_idx = -1;
    table->num_entries--;
}
