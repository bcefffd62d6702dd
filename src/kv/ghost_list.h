/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of evicted blocks in the order of their eviction, at most so many; the oldest goes first. */
#ifndef IMBREX_KV_GHOST_LIST_H
#define IMBREX_KV_GHOST_LIST_H

#include "kv/block_list.h"
#include "kv/key_table.h"

struct ghost_list {
    struct key_table table; /* key -> entry */
    struct block_links links;
    struct block_list used, unused;
    uint64_t *keys; /* [max_ghosts] */
    int32_t max_ghosts;
};

enum imbrex_status ghost_list_init(int32_t max_ghosts, struct ghost_list *ghosts,
                                   struct imbrex_error *err);
void ghost_list_deinit(struct ghost_list *ghosts);
size_t ghost_list_bytes(const struct ghost_list *ghosts);

/* The newest from now on. */
void ghost_list_add(struct ghost_list *ghosts, uint64_t key);
/* True if it was there; then it is gone. */
bool ghost_list_take(struct ghost_list *ghosts, uint64_t key);
/* Forgets the oldest until at most num_ghosts are left. */
void ghost_list_shrink(struct ghost_list *ghosts, int32_t num_ghosts);

static inline int32_t ghost_list_count(const struct ghost_list *ghosts)
{
    return ghosts->used.num_members;
}

#endif
