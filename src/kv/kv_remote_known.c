/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_remote_known.h"

#include <assert.h>
#include <stdlib.h>

enum imbrex_status kv_remote_known_create(int32_t max_entries, struct kv_remote_known *known,
                                          struct imbrex_error *err)
{
    size_t count = (size_t)max_entries;
    struct kv_remote_known created = {.max_entries = max_entries,
                                      .keys = calloc(count, sizeof(*created.keys)),
                                      .entries = calloc(count, sizeof(*created.entries))};
    enum imbrex_status status;
    if (created.keys == NULL || created.entries == NULL) {
        status = error_out_of_memory(err, "the remote tier's answers",
                                     count * (sizeof(*created.keys) + sizeof(*created.entries)));
        goto fail;
    }
    TRY_OR_FAIL(kv_table_create(max_entries, created.keys, &created.table, err));
    *known = created;
    return IMBREX_STATUS_OK;
fail:
    kv_remote_known_destroy(&created);
    return status;
}

void kv_remote_known_destroy(struct kv_remote_known *known)
{
    kv_table_destroy(&known->table);
    free(known->keys);
    free(known->entries);
    *known = (struct kv_remote_known){0};
}

bool kv_remote_known_find(const struct kv_remote_known *known, const struct kv_key *key,
                          int64_t now_ns, enum kv_remote_state *state)
{
    int32_t idx = kv_table_find(&known->table, key);
    if (idx == -1) {
        return false;
    }
    const struct kv_remote_known_entry *entry = &known->entries[idx];
    *state = entry->state;
    return entry->state == KV_REMOTE_ASKED || now_ns < entry->until_ns;
}

static void drop(struct kv_remote_known *known, int32_t idx)
{
    kv_table_remove(&known->table, idx);
    known->num_asked -= known->entries[idx].state == KV_REMOTE_ASKED;
    known->entries[idx] = (struct kv_remote_known_entry){0};
}

static int32_t take_place(struct kv_remote_known *known)
{
    int32_t idx;
    assert(known->num_asked <= known->max_entries / 2);
    do {
        idx = known->next;
        known->next = (known->next + 1) % known->max_entries;
    } while (known->entries[idx].is_used && known->entries[idx].state == KV_REMOTE_ASKED);
    if (known->entries[idx].is_used) {
        drop(known, idx);
    }
    return idx;
}

void kv_remote_known_note(struct kv_remote_known *known, const struct kv_key *key,
                          enum kv_remote_state state, int64_t until_ns)
{
    int32_t idx = kv_table_find(&known->table, key);
    if (idx == -1) {
        idx = take_place(known);
        known->keys[idx] = *key;
        kv_table_add(&known->table, idx);
    } else {
        known->num_asked -= known->entries[idx].state == KV_REMOTE_ASKED;
    }
    known->num_asked += state == KV_REMOTE_ASKED;
    known->entries[idx] =
        (struct kv_remote_known_entry){.state = state, .is_used = true, .until_ns = until_ns};
}

void kv_remote_known_forget(struct kv_remote_known *known, const struct kv_key *key)
{
    int32_t idx = kv_table_find(&known->table, key);
    if (idx != -1) {
        drop(known, idx);
    }
}

bool kv_remote_known_check(const struct kv_remote_known *known)
{
    int32_t num_used = 0, num_asked = 0;
    for (int32_t i = 0; i < known->max_entries; i++) {
        const struct kv_remote_known_entry *entry = &known->entries[i];
        if (!entry->is_used) {
            continue;
        }
        if (kv_table_find(&known->table, &known->keys[i]) != i) {
            return false;
        }
        num_used++;
        num_asked += entry->state == KV_REMOTE_ASKED;
    }
    return num_used == known->table.num_entries && num_asked == known->num_asked;
}
