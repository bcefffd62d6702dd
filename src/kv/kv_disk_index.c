/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_disk_index.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BLOCKS (1 << 22) /* what a table of them costs is still small beside the disk */

/* ---- create and destroy ---------------------------------------------------------------------- */

enum imbrex_status kv_disk_index_create(const struct kv_segment_layout *layout, size_t max_bytes,
                                        struct kv_disk_index *index, struct imbrex_error *err)
{
    size_t num_segments = max_bytes / (size_t)kv_segment_file_bytes(layout);
    size_t max_segments = (size_t)(MAX_BLOCKS / layout->num_slots);
    num_segments = num_segments < max_segments ? num_segments : max_segments;
    size_t num_blocks = num_segments * (size_t)layout->num_slots;
    struct kv_disk_index created = {
        .layout = *layout,
        .max_bytes = (int64_t)max_bytes,
        .segments = calloc(num_segments, sizeof(*created.segments)),
        .max_segments = (int32_t)num_segments,
        .current = -1,
        .keys = calloc(num_blocks, sizeof(*created.keys)),
        .entries = calloc(num_blocks, sizeof(*created.entries)),
        .was_got = calloc(num_blocks, sizeof(*created.was_got)),
    };
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (created.segments == NULL || created.keys == NULL || created.entries == NULL ||
        created.was_got == NULL) {
        status = error_out_of_memory(err, "the disk tier's index",
                                     num_blocks * sizeof(*created.entries));
    } else {
        status = kv_table_create((int32_t)num_blocks, created.keys, &created.table, err);
    }
    if (status != IMBREX_STATUS_OK) {
        kv_disk_index_destroy(&created);
        return status;
    }
    *index = created;
    return IMBREX_STATUS_OK;
}

void kv_disk_index_destroy(struct kv_disk_index *index)
{
    kv_table_destroy(&index->table);
    free(index->segments);
    free(index->keys);
    free(index->entries);
    free(index->was_got);
    free(index->foreign);
    free(index->strange);
    *index = (struct kv_disk_index){0};
}

/* ---- blocks ---------------------------------------------------------------------------------- */

int32_t kv_disk_index_find(const struct kv_disk_index *index, const struct kv_key *key,
                           const int32_t *token_ids)
{
    int32_t block = kv_table_find(&index->table, key);
    if (block != -1 && memcmp(index->entries[block].token_ids, token_ids,
                              sizeof(index->entries[block].token_ids)) != 0) {
        return -1;
    }
    return block;
}

bool kv_disk_index_has(const struct kv_disk_index *index, int32_t block)
{
    return kv_table_find(&index->table, &index->keys[block]) == block;
}

void kv_disk_index_add(struct kv_disk_index *index, int32_t segment_idx, int32_t slot_idx,
                       const struct kv_segment_entry *entry)
{
    int32_t block = kv_disk_index_slot(index, segment_idx, slot_idx);
    index->keys[block] = entry->key;
    index->entries[block] = *entry;
    index->was_got[block] = false;
    kv_table_add(&index->table, block);
    index->segments[segment_idx].num_valid++;
}

void kv_disk_index_drop(struct kv_disk_index *index, int32_t block)
{
    kv_table_remove(&index->table, block);
    index->segments[block / index->layout.num_slots].num_valid--;
}

/* ---- segments -------------------------------------------------------------------------------- */

int32_t kv_disk_index_free_place(const struct kv_disk_index *index)
{
    for (int32_t i = 0; i < index->max_segments; i++) {
        if (!index->segments[i].is_used) {
            return i;
        }
    }
    return -1;
}

bool kv_disk_index_is_taken(const struct kv_disk_index *index, uint32_t number)
{
    for (int64_t i = 0; i < index->metrics.num_strange; i++) {
        if (index->strange[i] == number) {
            return true;
        }
    }
    for (int32_t i = index->first_foreign; i < index->num_foreign; i++) {
        if (index->foreign[i].number == number) {
            return true;
        }
    }
    for (int32_t i = 0; i < index->max_segments; i++) {
        if (index->segments[i].is_used && index->segments[i].number == number) {
            return true;
        }
    }
    return false;
}

struct kv_disk_segment *kv_disk_index_begin(struct kv_disk_index *index, int32_t segment_idx,
                                            uint32_t number, int32_t num_blocks)
{
    struct kv_segment_layout layout = kv_segment_with_blocks(&index->layout, num_blocks);
    struct kv_disk_segment *segment = &index->segments[segment_idx];
    *segment = (struct kv_disk_segment){.number = number,
                                        .num_blocks = num_blocks,
                                        .next_page = kv_segment_first_page(&layout),
                                        .is_used = true};
    index->current = segment_idx;
    index->metrics.num_bytes += kv_segment_file_bytes(&layout);
    index->metrics.num_segments++;
    return segment;
}

int64_t kv_disk_index_file_bytes(const struct kv_disk_index *index, int32_t segment_idx)
{
    struct kv_segment_layout layout =
        kv_segment_with_blocks(&index->layout, index->segments[segment_idx].num_blocks);
    return kv_segment_file_bytes(&layout);
}

bool kv_disk_index_has_place(const struct kv_disk_index *index, int32_t segment_idx,
                             size_t stored_bytes)
{
    const struct kv_disk_segment *segment = &index->segments[segment_idx];
    uint32_t end_page = kv_segment_num_pages((size_t)kv_disk_index_file_bytes(index, segment_idx));
    return segment->num_taken < 2 * segment->num_blocks &&
           end_page - segment->next_page >= kv_segment_num_pages(stored_bytes);
}

int32_t kv_disk_index_oldest(const struct kv_disk_index *index)
{
    int32_t oldest = -1;
    for (int32_t i = 0; i < index->max_segments; i++) {
        const struct kv_disk_segment *segment = &index->segments[i];
        if (segment->is_used && i != index->current && segment->num_jobs == 0 &&
            (oldest == -1 || segment->last_use < index->segments[oldest].last_use)) {
            oldest = i;
        }
    }
    return oldest;
}

void kv_disk_index_remove(struct kv_disk_index *index, int32_t segment_idx)
{
    struct kv_disk_segment *segment = &index->segments[segment_idx];
    assert(segment->num_valid == 0 && segment->num_jobs == 0);
    index->metrics.num_bytes -= kv_disk_index_file_bytes(index, segment_idx);
    index->metrics.num_segments--;
    *segment = (struct kv_disk_segment){0};
}

static void drop_all(struct kv_disk_index *index, int32_t segment_idx, uint64_t *num_dropped)
{
    for (int32_t i = 0; i < index->segments[segment_idx].num_taken; i++) {
        int32_t block = kv_disk_index_slot(index, segment_idx, i);
        if (kv_disk_index_has(index, block)) {
            kv_disk_index_drop(index, block);
            (*num_dropped)++;
        }
    }
}

static void free_dead(struct kv_disk_segment *segment)
{
    if (segment->is_dead && segment->num_jobs == 0) {
        *segment = (struct kv_disk_segment){0};
    }
}

void kv_disk_index_lose(struct kv_disk_index *index, int32_t segment_idx)
{
    struct kv_disk_segment *segment = &index->segments[segment_idx];
    drop_all(index, segment_idx, &index->metrics.num_gone);
    index->metrics.num_bytes -= kv_disk_index_file_bytes(index, segment_idx);
    index->metrics.num_segments--;
    index->current = index->current == segment_idx ? -1 : index->current;
    segment->is_dead = true;
    free_dead(segment);
}

void kv_disk_index_leave(struct kv_disk_index *index, int32_t segment_idx)
{
    index->segments[segment_idx].num_jobs--;
    free_dead(&index->segments[segment_idx]);
}

bool kv_disk_index_evict(struct kv_disk_index *index, uint32_t *number, int32_t *segment_idx)
{
    *segment_idx = -1;
    if (index->first_foreign < index->num_foreign) {
        const struct kv_disk_foreign *foreign = &index->foreign[index->first_foreign];
        index->metrics.num_bytes -= foreign->num_bytes;
        index->metrics.num_foreign_bytes -= foreign->num_bytes;
        *number = foreign->number;
        index->first_foreign++;
        return true;
    }
    int32_t oldest = kv_disk_index_oldest(index);
    if (oldest == -1) {
        return false;
    }
    drop_all(index, oldest, &index->metrics.num_evicted);
    *number = index->segments[oldest].number;
    *segment_idx = oldest;
    kv_disk_index_remove(index, oldest);
    return true;
}

/* ---- check ----------------------------------------------------------------------------------- */

bool kv_disk_index_check(const struct kv_disk_index *index)
{
    int64_t num_valid = 0, num_segments = 0, num_bytes = 0;
    for (int32_t i = 0; i < index->max_segments; i++) {
        const struct kv_disk_segment *segment = &index->segments[i];
        int32_t num_found = 0;
        if (!segment->is_used) {
            continue;
        }
        for (int32_t j = 0; j < segment->num_taken; j++) {
            num_found += kv_disk_index_has(index, kv_disk_index_slot(index, i, j));
        }
        if (num_found != segment->num_valid || segment->num_taken > 2 * segment->num_blocks) {
            return false;
        }
        num_valid += num_found;
        num_segments += !segment->is_dead;
        num_bytes += segment->is_dead ? 0 : kv_disk_index_file_bytes(index, i);
    }
    for (int32_t i = index->first_foreign; i < index->num_foreign; i++) {
        num_bytes += index->foreign[i].num_bytes;
    }
    return num_valid == index->table.num_entries && num_segments == index->metrics.num_segments &&
           num_bytes == index->metrics.num_bytes && num_bytes <= index->max_bytes;
}
