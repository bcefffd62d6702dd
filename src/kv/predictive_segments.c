/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/predictive_segments.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

/* There are many ghosts, and of each only its return is urgent: their time is counted every so many
 * calls. */
enum { GHOST_PERIOD = 4 };

/* Of a cache of no block; each block adds some, up to max_ghosts. */
enum { MIN_GHOSTS = 4096, GHOSTS_PER_BLOCK = 4 };

enum imbrex_status segments_init(int32_t num_blocks, struct predictive_table *table,
                                 struct segments *segments, struct imbrex_error *err)
{
    struct segments created = {
        .live = BLOCK_LIST_EMPTY,
        .ghosts = BLOCK_LIST_EMPTY,
        .unused = BLOCK_LIST_EMPTY,
        .table = table,
        .num_blocks = num_blocks,
    };
    int32_t max_ghosts = (int32_t)table->knobs.max_ghosts;
    created.max_ghosts = num_blocks < (max_ghosts - MIN_GHOSTS) / GHOSTS_PER_BLOCK
                             ? MIN_GHOSTS + GHOSTS_PER_BLOCK * num_blocks
                             : max_ghosts;
    /* A live segment has a block, so there is always one unused if no ghost is too many. */
    created.num_segments = num_blocks + created.max_ghosts + 1;
    size_t num = (size_t)created.num_segments;

    TRY(key_table_init(2 * created.num_segments, &created.keys, err));
    created.segments = calloc(num, sizeof(*created.segments));
    created.links.previous = calloc(num, sizeof(*created.links.previous));
    created.links.next = calloc(num, sizeof(*created.links.next));
    created.block_links.previous =
        calloc((size_t)num_blocks, sizeof(*created.block_links.previous));
    created.block_links.next = calloc((size_t)num_blocks, sizeof(*created.block_links.next));
    created.segment_of = calloc((size_t)num_blocks, sizeof(*created.segment_of));
    created.is_awaiting = calloc((size_t)num_blocks, sizeof(*created.is_awaiting));
    if (created.segments == NULL || created.links.previous == NULL || created.links.next == NULL ||
        created.block_links.previous == NULL || created.block_links.next == NULL ||
        created.segment_of == NULL || created.is_awaiting == NULL) {
        segments_deinit(&created);
        return error_out_of_memory(err, "segments of KV blocks", num * sizeof(*created.segments));
    }
    for (int32_t i = 0; i < created.num_segments; i++) {
        block_list_append(&created.unused, created.links, i);
    }
    for (int32_t i = 0; i < num_blocks; i++) {
        created.segment_of[i] = -1;
    }
    *segments = created;
    return IMBREX_STATUS_OK;
}

void segments_deinit(struct segments *segments)
{
    key_table_deinit(&segments->keys);
    free(segments->segments);
    free(segments->links.previous);
    free(segments->links.next);
    free(segments->block_links.previous);
    free(segments->block_links.next);
    free(segments->segment_of);
    free(segments->is_awaiting);
    *segments = (struct segments){
        .live = BLOCK_LIST_EMPTY, .ghosts = BLOCK_LIST_EMPTY, .unused = BLOCK_LIST_EMPTY};
}

size_t segments_bytes(const struct segments *segments)
{
    return (size_t)segments->num_segments * (sizeof(*segments->segments) + 2 * sizeof(int32_t)) +
           (size_t)segments->num_blocks * (3 * sizeof(int32_t) + sizeof(bool)) +
           key_table_bytes(&segments->keys);
}

static void expose(struct segments *segments, struct segment *segment, int64_t now_ns)
{
    if (now_ns > segment->exposed_until_ns) {
        predictive_table_expose(segments->table, segment->cell_idx,
                                segment->exposed_until_ns - segment->end_ns,
                                now_ns - segment->end_ns, segment->weight * segment->num_awaiting);
        segment->exposed_until_ns = now_ns;
    }
}

/* A later segment may have taken the key over. */
static void forget_key(struct segments *segments, int32_t segment_idx, uint64_t key)
{
    if (key_table_find(&segments->keys, key) == segment_idx) {
        key_table_remove(&segments->keys, key);
    }
}

static void forget_keys(struct segments *segments, int32_t segment_idx)
{
    struct segment *segment = &segments->segments[segment_idx];
    if (segment->has_tail_key) {
        forget_key(segments, segment_idx, segment->tail_key);
    }
    if (segment->has_head_key) {
        forget_key(segments, segment_idx, segment->head_key);
    }
    segment->has_tail_key = false;
    segment->has_head_key = false;
}

static void drop_ghost(struct segments *segments, int32_t segment_idx)
{
    forget_keys(segments, segment_idx);
    block_list_remove(&segments->ghosts, segments->links, segment_idx);
    block_list_append(&segments->unused, segments->links, segment_idx);
}

/* Its last resident block is gone. */
static void bury(struct segments *segments, int32_t segment_idx, int64_t now_ns)
{
    struct segment *segment = &segments->segments[segment_idx];

    segment->is_live = false;
    block_list_remove(&segments->live, segments->links, segment_idx);
    block_list_append(&segments->ghosts, segments->links, segment_idx);
    if (segment->num_awaiting == 0) {
        drop_ghost(segments, segment_idx);
    } else if (segments->ghosts.num_members > segments->max_ghosts) {
        expose(segments, &segments->segments[segments->ghosts.first], now_ns);
        drop_ghost(segments, segments->ghosts.first);
    }
}

/* Long segments count for more than short ones, but not for as much as they are longer: their
 * blocks return together. pow() is not the same on all machines. */
static double block_weight(const struct kv_predictive_knobs *knobs, int32_t num_blocks)
{
    if (knobs->length_discount == 0.5) {
        return 1.0 / sqrt((double)num_blocks);
    }
    return knobs->length_discount < 0.5 ? 1.0 : 1.0 / num_blocks;
}

void segments_add(struct segments *segments, const int32_t *blocks, int32_t num_blocks,
                  int32_t cell_idx, int64_t now_ns)
{
    for (int32_t i = 0; i < num_blocks; i++) {
        segments_remove(segments, blocks[i], now_ns);
    }
    int32_t segment_idx = segments->unused.first;
    assert(segment_idx >= 0);
    block_list_remove(&segments->unused, segments->links, segment_idx);
    block_list_append(&segments->live, segments->links, segment_idx);
    struct segment *segment = &segments->segments[segment_idx];
    *segment = (struct segment){
        .blocks = BLOCK_LIST_EMPTY,
        .cell_idx = cell_idx,
        .end_ns = now_ns,
        .exposed_until_ns = now_ns,
        .weight = block_weight(&segments->table->knobs, num_blocks),
        .num_awaiting = num_blocks,
        .is_live = true,
        .live_order = ++segments->num_lives,
    };
    for (int32_t i = 0; i < num_blocks; i++) {
        block_list_append(&segment->blocks, segments->block_links, blocks[i]);
        segments->segment_of[blocks[i]] = segment_idx;
        segments->is_awaiting[blocks[i]] = true;
    }
}

static void count_return(struct segments *segments, struct segment *segment, int32_t num_blocks,
                         int64_t now_ns)
{
    expose(segments, segment, now_ns);
    predictive_table_return(segments->table, segment->cell_idx, now_ns - segment->end_ns,
                            segment->weight * num_blocks);
    segment->num_awaiting -= num_blocks;
}

void segments_return(struct segments *segments, int32_t block_idx, int64_t now_ns)
{
    if (segments->is_awaiting[block_idx]) {
        segments->is_awaiting[block_idx] = false;
        count_return(segments, &segments->segments[segments->segment_of[block_idx]], 1, now_ns);
    }
}

void segments_remove(struct segments *segments, int32_t block_idx, int64_t now_ns)
{
    int32_t segment_idx = segments->segment_of[block_idx];
    if (segment_idx < 0) {
        return;
    }
    struct segment *segment = &segments->segments[segment_idx];
    block_list_remove(&segment->blocks, segments->block_links, block_idx);
    segments->segment_of[block_idx] = -1;
    if (segments->is_awaiting[block_idx]) {
        expose(segments, segment, now_ns);
        segments->is_awaiting[block_idx] = false;
        segment->num_awaiting--;
    }
    if (segment->blocks.first < 0) {
        bury(segments, segment_idx, now_ns);
    }
}

void segments_evict(struct segments *segments, int32_t block_idx, uint64_t key)
{
    int32_t segment_idx = segments->segment_of[block_idx];
    if (segment_idx < 0) {
        return;
    }
    struct segment *segment = &segments->segments[segment_idx];
    block_list_remove(&segment->blocks, segments->block_links, block_idx);
    segments->segment_of[block_idx] = -1;
    if (segments->is_awaiting[block_idx] && segments->ignores_ghosts) {
        segments->is_awaiting[block_idx] = false;
        segment->num_awaiting--;
    } else if (segments->is_awaiting[block_idx]) {
        segments->is_awaiting[block_idx] = false;
        segment->num_ghosts++;
        if (!segment->has_tail_key) {
            segment->tail_key = key;
            segment->has_tail_key = key_table_put(&segments->keys, key, segment_idx);
        } else if (segment->blocks.first < 0) {
            segment->head_key = key;
            segment->has_head_key = key_table_put(&segments->keys, key, segment_idx);
        }
    }
    if (segment->blocks.first < 0) {
        bury(segments, segment_idx, segment->exposed_until_ns);
    }
}

/* The segment whose end the block was. -1: none is known. */
static int32_t find_home(const struct segments *segments, int32_t parent_idx, uint64_t key)
{
    int32_t segment_idx = parent_idx >= 0 ? segments->segment_of[parent_idx] : -1;
    if (segment_idx >= 0 && segments->segments[segment_idx].blocks.last == parent_idx &&
        segments->segments[segment_idx].num_ghosts > 0) {
        return segment_idx;
    }
    segment_idx = key_table_find(&segments->keys, key);
    return segment_idx >= 0 && !segments->segments[segment_idx].is_live &&
                   segments->segments[segment_idx].num_ghosts > 0
               ? segment_idx
               : -1;
}

void segments_promote(struct segments *segments, int32_t block_idx, int32_t parent_idx,
                      uint64_t key, int64_t now_ns)
{
    int32_t segment_idx = find_home(segments, parent_idx, key);
    if (segment_idx < 0) {
        segments_add(segments, &block_idx, 1, 0, now_ns);
        segment_idx = segments->segment_of[block_idx];
        segments->segments[segment_idx].num_awaiting = 0;
        segments->is_awaiting[block_idx] = false;
        return;
    }
    struct segment *segment = &segments->segments[segment_idx];
    if (!segment->is_live) {
        segment->is_live = true;
        segment->live_order = ++segments->num_lives;
        block_list_remove(&segments->ghosts, segments->links, segment_idx);
        block_list_append(&segments->live, segments->links, segment_idx);
    }
    block_list_append(&segment->blocks, segments->block_links, block_idx);
    segments->segment_of[block_idx] = segment_idx;
    segments->is_awaiting[block_idx] = true;
    segment->num_ghosts--;
    if (segment->has_head_key) {
        forget_key(segments, segment_idx, segment->head_key);
        segment->has_head_key = false;
    }
    if (segment->num_ghosts == 0) {
        forget_keys(segments, segment_idx);
    }
}

bool segments_find_ghost(struct segments *segments, uint64_t key, bool must_return, int64_t now_ns)
{
    int32_t segment_idx = key_table_find(&segments->keys, key);
    if (segment_idx < 0) {
        return false;
    }
    if (!must_return) {
        return true;
    }
    struct segment *segment = &segments->segments[segment_idx];
    /* Who comes for the tail comes for all before it; who comes for the head, for that at least. */
    bool is_tail = segment->has_tail_key && segment->tail_key == key;
    int32_t num_returned = is_tail || segment->num_ghosts == 0 ? segment->num_ghosts : 1;
    segment->num_ghosts -= num_returned;
    count_return(segments, segment, num_returned, now_ns);
    if (is_tail) {
        forget_keys(segments, segment_idx);
    } else {
        forget_key(segments, segment_idx, key);
        segment->has_head_key = false;
    }
    if (!segment->is_live && segment->num_awaiting == 0) {
        drop_ghost(segments, segment_idx);
    }
    return true;
}

void segments_expose(struct segments *segments, int64_t now_ns)
{
    for (int32_t i = segments->live.first; i >= 0; i = segments->links.next[i]) {
        expose(segments, &segments->segments[i], now_ns);
    }
    if (--segments->num_until_ghosts > 0) {
        return;
    }
    segments->num_until_ghosts = GHOST_PERIOD;
    double ghost_life_ns = segments->table->knobs.ghost_life_s * 1e9;
    for (int32_t i = segments->ghosts.first; i >= 0;) {
        int32_t next = segments->links.next[i];
        expose(segments, &segments->segments[i], now_ns);
        if ((double)(now_ns - segments->segments[i].end_ns) > ghost_life_ns) {
            drop_ghost(segments, i);
        }
        i = next;
    }
}

bool segments_check(const struct segments *segments)
{
    int32_t num_kept = 0;

    if (segments->live.num_members + segments->ghosts.num_members + segments->unused.num_members !=
            segments->num_segments ||
        segments->ghosts.num_members > segments->max_ghosts) {
        return false;
    }
    for (int32_t i = segments->live.first; i >= 0; i = segments->links.next[i]) {
        const struct segment *segment = &segments->segments[i];
        int32_t num_awaiting = segment->num_ghosts, num_members = 0;
        for (int32_t block_idx = segment->blocks.first; block_idx >= 0;
             block_idx = segments->block_links.next[block_idx]) {
            if (segments->segment_of[block_idx] != i) {
                return false;
            }
            num_awaiting += segments->is_awaiting[block_idx];
            num_members++;
        }
        if (!segment->is_live || num_members == 0 || num_members != segment->blocks.num_members ||
            num_awaiting != segment->num_awaiting) {
            return false;
        }
        num_kept += num_members;
    }
    for (int32_t i = segments->ghosts.first; i >= 0; i = segments->links.next[i]) {
        const struct segment *segment = &segments->segments[i];
        if (segment->is_live || segment->blocks.first >= 0 ||
            segment->num_awaiting != segment->num_ghosts) {
            return false;
        }
    }
    for (int32_t block_idx = 0; block_idx < segments->num_blocks; block_idx++) {
        num_kept -= segments->segment_of[block_idx] >= 0;
    }
    return num_kept == 0;
}
