/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/ghost_list.h"

#include <stdlib.h>

enum imbrex_status ghost_list_init(int32_t max_ghosts, struct ghost_list *ghosts,
                                   struct imbrex_error *err)
{
    struct ghost_list created = {
        .used = BLOCK_LIST_EMPTY, .unused = BLOCK_LIST_EMPTY, .max_ghosts = max_ghosts};
    size_t num = (size_t)max_ghosts;

    TRY(key_table_init(max_ghosts, &created.table, err));
    created.links.previous = calloc(num, sizeof(*created.links.previous));
    created.links.next = calloc(num, sizeof(*created.links.next));
    created.keys = calloc(num, sizeof(*created.keys));
    if (created.links.previous == NULL || created.links.next == NULL || created.keys == NULL) {
        ghost_list_deinit(&created);
        return error_out_of_memory(err, "keys of evicted KV blocks", num * sizeof(*created.keys));
    }
    for (int32_t i = 0; i < max_ghosts; i++) {
        block_list_append(&created.unused, created.links, i);
    }
    *ghosts = created;
    return IMBREX_STATUS_OK;
}

void ghost_list_deinit(struct ghost_list *ghosts)
{
    key_table_deinit(&ghosts->table);
    free(ghosts->links.previous);
    free(ghosts->links.next);
    free(ghosts->keys);
    *ghosts = (struct ghost_list){.used = BLOCK_LIST_EMPTY, .unused = BLOCK_LIST_EMPTY};
}

size_t ghost_list_bytes(const struct ghost_list *ghosts)
{
    return key_table_bytes(&ghosts->table) +
           (size_t)ghosts->max_ghosts * (2 * sizeof(int32_t) + sizeof(*ghosts->keys));
}

static void forget(struct ghost_list *ghosts, int32_t entry)
{
    key_table_remove(&ghosts->table, ghosts->keys[entry]);
    block_list_remove(&ghosts->used, ghosts->links, entry);
    block_list_append(&ghosts->unused, ghosts->links, entry);
}

void ghost_list_add(struct ghost_list *ghosts, uint64_t key)
{
    int32_t entry = key_table_find(&ghosts->table, key);
    if (entry >= 0) {
        forget(ghosts, entry);
    } else if (ghosts->unused.first < 0) {
        forget(ghosts, ghosts->used.first);
    }
    entry = ghosts->unused.first;
    block_list_remove(&ghosts->unused, ghosts->links, entry);
    block_list_append(&ghosts->used, ghosts->links, entry);
    ghosts->keys[entry] = key;
    (void)key_table_put(&ghosts->table, key, entry);
}

bool ghost_list_take(struct ghost_list *ghosts, uint64_t key)
{
    int32_t entry = key_table_find(&ghosts->table, key);
    if (entry < 0) {
        return false;
    }
    forget(ghosts, entry);
    return true;
}

void ghost_list_shrink(struct ghost_list *ghosts, int32_t num_ghosts)
{
    while (ghosts->used.num_members > num_ghosts) {
        forget(ghosts, ghosts->used.first);
    }
}
