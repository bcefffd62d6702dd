/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_host.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum imbrex_status kv_host_create(struct device *device, int32_t num_slots, size_t block_bytes,
                                  struct kv_host *host, struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t count = (size_t)num_slots;
    struct kv_host created = {.block_bytes = block_bytes,
                              .num_slots = num_slots,
                              .empty = BLOCK_LIST_EMPTY,
                              .used = BLOCK_LIST_EMPTY};
    assert(num_slots >= 1);
    created.slots = calloc(count, sizeof(*created.slots));
    created.keys = calloc(count, sizeof(*created.keys));
    created.links.previous = calloc(count, sizeof(*created.links.previous));
    created.links.next = calloc(count, sizeof(*created.links.next));
    if (created.slots == NULL || created.keys == NULL || created.links.previous == NULL ||
        created.links.next == NULL) {
        status = error_out_of_memory(err, "the host tier's slots", count * sizeof(*created.slots));
        goto fail;
    }
    TRY_OR_FAIL(kv_table_create(num_slots, created.keys, &created.table, err));
    TRY_OR_FAIL(
        pinned_region_map(device, "the host tier", count, block_bytes, 0, &created.memory, err));
    for (int32_t i = 0; i < num_slots; i++) {
        block_list_append(&created.empty, created.links, i);
    }
    *host = created;
    return IMBREX_STATUS_OK;
fail:
    kv_host_destroy(&created);
    return status;
}

void kv_host_destroy(struct kv_host *host)
{
    pinned_region_unmap(&host->memory);
    kv_table_destroy(&host->table);
    free(host->slots);
    free(host->keys);
    free(host->links.previous);
    free(host->links.next);
    *host = (struct kv_host){0};
}

int32_t kv_host_find(const struct kv_host *host, const struct kv_key *key, const int32_t *token_ids)
{
    int32_t slot_idx = kv_table_find(&host->table, key);
    if (slot_idx != -1 && memcmp(host->slots[slot_idx].token_ids, token_ids,
                                 sizeof(host->slots[slot_idx].token_ids)) != 0) {
        return -1;
    }
    return slot_idx;
}

int32_t kv_host_begin(struct kv_host *host, const struct kv_key *key, const int32_t *token_ids)
{
    int32_t slot_idx = host->empty.first;
    assert(kv_table_find(&host->table, key) == -1);
    if (slot_idx == -1) {
        return -1;
    }
    struct kv_host_slot *slot = &host->slots[slot_idx];
    block_list_remove(&host->empty, host->links, slot_idx);
    block_list_append(&host->used, host->links, slot_idx);
    slot->state = KV_HOST_FILLING;
    memcpy(slot->token_ids, token_ids, sizeof(slot->token_ids));
    host->keys[slot_idx] = *key;
    kv_table_add(&host->table, slot_idx);
    return slot_idx;
}

static void make_empty(struct kv_host *host, int32_t slot_idx)
{
    assert(host->slots[slot_idx].num_holds == 0);
    kv_table_remove(&host->table, slot_idx);
    block_list_remove(&host->used, host->links, slot_idx);
    block_list_append(&host->empty, host->links, slot_idx);
    host->slots[slot_idx].state = KV_HOST_EMPTY;
}

void kv_host_end(struct kv_host *host, int32_t slot_idx, bool is_good)
{
    assert(host->slots[slot_idx].state == KV_HOST_FILLING);
    if (is_good) {
        host->slots[slot_idx].state = KV_HOST_READY;
    } else {
        make_empty(host, slot_idx);
    }
}

void kv_host_evict(struct kv_host *host, int32_t slot_idx)
{
    assert(host->slots[slot_idx].state == KV_HOST_READY);
    make_empty(host, slot_idx);
}

void kv_host_hold(struct kv_host *host, int32_t slot_idx)
{
    assert(host->slots[slot_idx].state == KV_HOST_READY);
    host->slots[slot_idx].num_holds++;
}

void kv_host_release(struct kv_host *host, int32_t slot_idx)
{
    assert(host->slots[slot_idx].num_holds > 0);
    host->slots[slot_idx].num_holds--;
}

void kv_host_touch(struct kv_host *host, int32_t slot_idx)
{
    block_list_remove(&host->used, host->links, slot_idx);
    block_list_append(&host->used, host->links, slot_idx);
}

void kv_host_yield(struct kv_host *host, int32_t slot_idx)
{
    block_list_remove(&host->used, host->links, slot_idx);
    block_list_prepend(&host->used, host->links, slot_idx);
}

bool kv_host_check(const struct kv_host *host)
{
    int32_t num_used = 0;
    for (int32_t i = host->used.first; i != -1; i = host->links.next[i]) {
        const struct kv_host_slot *slot = &host->slots[i];
        if (num_used == host->num_slots || slot->state == KV_HOST_EMPTY || slot->num_holds < 0 ||
            (slot->state == KV_HOST_FILLING && slot->num_holds > 0) ||
            kv_table_find(&host->table, &host->keys[i]) != i) {
            return false;
        }
        num_used++;
    }
    return num_used == host->used.num_members && num_used == host->table.num_entries &&
           num_used + host->empty.num_members == host->num_slots;
}
