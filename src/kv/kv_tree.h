/* SPDX-License-Identifier: Apache-2.0 */
/* The blocks that the cache knows, as a tree: the parent of a block holds the tokens before it. By
 * block index; nothing is allocated for a node. */
#ifndef IMBREX_KV_KV_TREE_H
#define IMBREX_KV_KV_TREE_H

#include <stdbool.h>

#include "kv/kv_key.h"

struct kv_want;

struct kv_tree_node {
    int32_t parent;         /* -1: a head */
    int32_t first_child;    /* -1: a tail; of several the oldest */
    int32_t previous, next; /* ring of the children of one parent, by age; a head's own index */
    int32_t num_children;
    int32_t depth;           /* 0: a head */
    struct kv_want *nearest; /* of those that wait for its key; NULL: nobody */
};

struct kv_tree {
    struct kv_tree_node *nodes; /* [num_blocks] */
    struct kv_key *keys;        /* [num_blocks] */
    int32_t *token_ids;         /* [num_blocks, block_size], or NULL */
    int32_t num_blocks, block_size;
};

enum imbrex_status kv_tree_create(int32_t num_blocks, int32_t block_size, bool has_token_ids,
                                  struct kv_tree *tree, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void kv_tree_destroy(struct kv_tree *tree);
size_t kv_tree_bytes(const struct kv_tree *tree);

/* The block becomes the youngest child of its parent, or a head (-1). token_ids is read only if the
 * tree keeps them. */
void kv_tree_add(struct kv_tree *tree, int32_t block_idx, int32_t parent, const struct kv_key *key,
                 const int32_t *token_ids);
/* Of a block without children. */
void kv_tree_remove(struct kv_tree *tree, int32_t block_idx);

/* Whether the block, whose key is right, is the one that is meant. */
bool kv_tree_is_same(const struct kv_tree *tree, int32_t block_idx, int32_t parent,
                     const int32_t *token_ids);
/* The tail that is reached by going to the oldest child again and again. */
int32_t kv_tree_tail(const struct kv_tree *tree, int32_t block_idx);

/* True if the node and its children agree. */
bool kv_tree_check(const struct kv_tree *tree, int32_t block_idx);

#endif
