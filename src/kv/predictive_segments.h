/* SPDX-License-Identifier: Apache-2.0 */
/* The units in which `predictive` decides: blocks whose last user is one request, parted into the
 * head where prompts part, what was seen before, and what was new. A segment gives blocks away from
 * its head on, to requests that extend it, and loses them from its tail on, to eviction.
 *
 *   live    has resident blocks
 *   ghost   has none, but might have been asked for: its time without return still counts, or a
 *           class whose blocks are evicted early would look as if nothing of it ever came back
 *
 * A block awaits its return from its request's end on until a request comes for it. */
#ifndef IMBREX_KV_PREDICTIVE_SEGMENTS_H
#define IMBREX_KV_PREDICTIVE_SEGMENTS_H

#include "kv/block_list.h"
#include "kv/key_table.h"
#include "kv/predictive_table.h"

struct segment {
    struct block_list blocks; /* resident, in the order of the path */
    int32_t cell_idx;
    int64_t end_ns, exposed_until_ns;
    double weight;                    /* of one block */
    int32_t num_awaiting, num_ghosts; /* await their return; of these, not resident */
    /* Keys by which a ghost is found again: of the block that went first, and of the last one. */
    uint64_t tail_key, head_key;
    bool has_tail_key, has_head_key;
    bool is_live;
    uint64_t live_order; /* grows along the list of live ones */
    /* Its index: a line over its age in ns, good until then and for that renewal of the table. */
    double index, index_slope;
    int64_t index_until_ns;
    uint32_t index_renewal;
};

struct segments {
    struct segment *segments; /* [num_segments] */
    struct block_links links; /* of segments */
    struct block_list live, ghosts, unused;
    struct block_links block_links; /* [num_blocks] of blocks in their segment */
    int32_t *segment_of;            /* [num_blocks]; -1: none */
    bool *is_awaiting;              /* [num_blocks] */
    struct key_table keys;          /* of ghosts -> segment */
    struct predictive_table *table; /* the owner's */
    int32_t num_blocks, num_segments, max_ghosts;
    uint64_t num_lives;       /* times that one became live */
    int32_t num_until_ghosts; /* calls of segments_expose */
    bool ignores_ghosts;      /* what is evicted awaits nothing */
};

enum imbrex_status segments_init(int32_t num_blocks, struct predictive_table *table,
                                 struct segments *segments, struct imbrex_error *err);
void segments_deinit(struct segments *segments);
size_t segments_bytes(const struct segments *segments);

/* The blocks [num_blocks] of a path, at least one, become a segment of their own. */
void segments_add(struct segments *segments, const int32_t *blocks, int32_t num_blocks,
                  int32_t cell_idx, int64_t now_ns);
/* A request has come for the block. */
void segments_return(struct segments *segments, int32_t block_idx, int64_t now_ns);
/* The block leaves its segment, if it is in one. */
void segments_remove(struct segments *segments, int32_t block_idx, int64_t now_ns);
/* The same; its segment remembers it under its key. */
void segments_evict(struct segments *segments, int32_t block_idx, uint64_t key);
/* A block that was evicted is resident again and nobody has asked for it: it takes its place behind
 * its parent, or in the segment that remembers its key, and goes on awaiting its return. What
 * nobody remembers becomes a segment of its own that tells nothing. parent_idx: -1, a head. */
void segments_promote(struct segments *segments, int32_t block_idx, int32_t parent_idx,
                      uint64_t key, int64_t now_ns);
/* True if the key is a ghost's. must_return: a request has come for it. */
bool segments_find_ghost(struct segments *segments, uint64_t key, bool must_return, int64_t now_ns);
/* Counts time without returns until now; now and then that of ghosts too, and drops those that are
 * too old. */
void segments_expose(struct segments *segments, int64_t now_ns);
/* True if lists, counts and links agree; for tests. */
bool segments_check(const struct segments *segments);

#endif
