/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/block_heap.h"

#include <stdlib.h>

enum imbrex_status block_heap_init(int32_t num_blocks, struct block_heap *heap,
                                   struct imbrex_error *err)
{
    struct block_heap created = {.num_blocks = num_blocks};
    size_t num = (size_t)num_blocks;

    created.blocks = calloc(num, sizeof(*created.blocks));
    created.place = calloc(num, sizeof(*created.place));
    created.key = calloc(num, sizeof(*created.key));
    if (created.blocks == NULL || created.place == NULL || created.key == NULL) {
        block_heap_deinit(&created);
        return error_out_of_memory(err, "an order of KV blocks", num * sizeof(*created.key));
    }
    for (int32_t block_idx = 0; block_idx < num_blocks; block_idx++) {
        created.place[block_idx] = -1;
    }
    *heap = created;
    return IMBREX_STATUS_OK;
}

void block_heap_deinit(struct block_heap *heap)
{
    free(heap->blocks);
    free(heap->place);
    free(heap->key);
    *heap = (struct block_heap){0};
}

size_t block_heap_bytes(const struct block_heap *heap)
{
    return (size_t)heap->num_blocks *
           (sizeof(*heap->blocks) + sizeof(*heap->place) + sizeof(*heap->key));
}

static void rise(struct block_heap *heap, int32_t place, int32_t block_idx)
{
    uint64_t key = heap->key[block_idx];
    while (place > 0) {
        int32_t above = (place - 1) / 2;
        int32_t other = heap->blocks[above];
        if (heap->key[other] <= key) {
            break;
        }
        heap->blocks[place] = other;
        heap->place[other] = place;
        place = above;
    }
    heap->blocks[place] = block_idx;
    heap->place[block_idx] = place;
}

static void sink(struct block_heap *heap, int32_t place, int32_t block_idx)
{
    uint64_t key = heap->key[block_idx];
    for (;;) {
        int32_t below = 2 * place + 1;
        if (below >= heap->num_members) {
            break;
        }
        if (below + 1 < heap->num_members &&
            heap->key[heap->blocks[below + 1]] < heap->key[heap->blocks[below]]) {
            below++;
        }
        int32_t other = heap->blocks[below];
        if (heap->key[other] >= key) {
            break;
        }
        heap->blocks[place] = other;
        heap->place[other] = place;
        place = below;
    }
    heap->blocks[place] = block_idx;
    heap->place[block_idx] = place;
}

void block_heap_put(struct block_heap *heap, int32_t block_idx, uint64_t key)
{
    int32_t place = heap->place[block_idx];
    if (place < 0) {
        heap->key[block_idx] = key;
        rise(heap, heap->num_members++, block_idx);
        return;
    }
    uint64_t old_key = heap->key[block_idx];
    heap->key[block_idx] = key;
    if (key < old_key) {
        rise(heap, place, block_idx);
    } else {
        sink(heap, place, block_idx);
    }
}

void block_heap_remove(struct block_heap *heap, int32_t block_idx)
{
    int32_t place = heap->place[block_idx];
    if (place < 0) {
        return;
    }
    heap->place[block_idx] = -1;
    heap->num_members--;
    if (place == heap->num_members) {
        return;
    }
    int32_t last = heap->blocks[heap->num_members];
    if (heap->key[last] < heap->key[block_idx]) {
        rise(heap, place, last);
    } else {
        sink(heap, place, last);
    }
}

void block_heap_clear(struct block_heap *heap)
{
    for (int32_t i = 0; i < heap->num_members; i++) {
        heap->place[heap->blocks[i]] = -1;
    }
    heap->num_members = 0;
}
