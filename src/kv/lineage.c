/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/lineage.h"

#include <stdlib.h>

#include "kv/key_table.h"

enum {
    /* Blocks of a prompt that are remembered: the last one, and the one before it in case the end
     * of the conversation is edited. */
    NUM_MARKS = 2,
    /* Requests that may go on from one block: tries of an answer, not a common beginning. */
    MAX_SUCCESSORS = 3,
};

struct lineage_entry {
    uint64_t key, session;
    int64_t end_ns;
    int32_t turn;
    int32_t num_successors;
};

struct lineage {
    struct key_table table;
    struct lineage_entry *entries; /* [max_entries] ring */
    int32_t max_entries, num_entries, oldest;
};

enum imbrex_status lineage_create(int32_t max_entries, struct lineage **lineage,
                                  struct imbrex_error *err)
{
    struct lineage *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the table of sessions", sizeof(*created));
    }
    enum imbrex_status status = key_table_init(max_entries, &created->table, err);
    if (status != IMBREX_STATUS_OK) {
        free(created);
        return status;
    }
    created->max_entries = max_entries;
    created->entries = calloc((size_t)max_entries, sizeof(*created->entries));
    if (created->entries == NULL) {
        lineage_destroy(created);
        return error_out_of_memory(err, "the table of sessions",
                                   (size_t)max_entries * sizeof(*created->entries));
    }
    *lineage = created;
    return IMBREX_STATUS_OK;
}

void lineage_destroy(struct lineage *lineage)
{
    if (lineage != NULL) {
        key_table_deinit(&lineage->table);
        free(lineage->entries);
        free(lineage);
    }
}

size_t lineage_bytes(const struct lineage *lineage)
{
    return sizeof(*lineage) + key_table_bytes(&lineage->table) +
           (size_t)lineage->max_entries * sizeof(*lineage->entries);
}

void lineage_arrive(struct lineage *lineage, const struct kv_key *keys, int32_t num_keys,
                    int64_t now_ns, struct kv_fingerprint *fingerprint)
{
    if (fingerprint->turn != 0) {
        return;
    }
    fingerprint->turn = 1;
    fingerprint->last_gap_ns = -1;
    for (int32_t i = num_keys - 1; i >= 0; i--) {
        int32_t entry_idx = key_table_find(&lineage->table, keys[i].words[0]);
        if (entry_idx < 0) {
            continue;
        }
        struct lineage_entry *entry = &lineage->entries[entry_idx];
        if (entry->num_successors < MAX_SUCCESSORS) {
            entry->num_successors++;
            fingerprint->turn = entry->turn < INT32_MAX ? entry->turn + 1 : entry->turn;
            fingerprint->last_gap_ns = now_ns > entry->end_ns ? now_ns - entry->end_ns : 0;
            if (fingerprint->session == 0) {
                fingerprint->session = entry->session;
            }
        }
        break;
    }
    /* A session is named by where its first prompt ends. */
    if (fingerprint->session == 0 && num_keys > 0) {
        fingerprint->session = keys[num_keys - 1].words[0];
    }
}

static void mark(struct lineage *lineage, const struct lineage_entry *entry)
{
    int32_t entry_idx = key_table_find(&lineage->table, entry->key);
    if (entry_idx >= 0) {
        /* The same prompt once more: it keeps its successors, or a common beginning that is often
         * a whole prompt would never be known as one. */
        int32_t num_successors = lineage->entries[entry_idx].num_successors;
        lineage->entries[entry_idx] = *entry;
        lineage->entries[entry_idx].num_successors = num_successors;
        return;
    }
    if (lineage->num_entries < lineage->max_entries) {
        entry_idx = lineage->num_entries++;
    } else {
        entry_idx = lineage->oldest;
        lineage->oldest = (lineage->oldest + 1) % lineage->max_entries;
        key_table_remove(&lineage->table, lineage->entries[entry_idx].key);
    }
    lineage->entries[entry_idx] = *entry;
    (void)key_table_put(&lineage->table, entry->key, entry_idx);
}

void lineage_finish(struct lineage *lineage, const struct kv_key *keys, int32_t num_keys,
                    int64_t now_ns, const struct kv_fingerprint *fingerprint)
{
    for (int32_t i = 0; i < NUM_MARKS && num_keys - 1 - i >= num_keys / 2; i++) {
        const struct lineage_entry entry = {
            .key = keys[num_keys - 1 - i].words[0],
            .session = fingerprint->session,
            .end_ns = now_ns,
            .turn = fingerprint->turn,
        };
        mark(lineage, &entry);
    }
}
