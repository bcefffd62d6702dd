/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_tree.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum imbrex_status kv_tree_create(int32_t num_blocks, int32_t block_size, bool has_token_ids,
                                  struct kv_tree *tree, struct imbrex_error *err)
{
    struct kv_tree created = {.num_blocks = num_blocks, .block_size = block_size};
    created.nodes = calloc((size_t)num_blocks, sizeof(*created.nodes));
    created.keys = calloc((size_t)num_blocks, sizeof(*created.keys));
    if (has_token_ids) {
        created.token_ids =
            calloc((size_t)num_blocks, (size_t)block_size * sizeof(*created.token_ids));
    }
    if (created.nodes == NULL || created.keys == NULL ||
        (has_token_ids && created.token_ids == NULL)) {
        kv_tree_destroy(&created);
        return error_out_of_memory(err, "the tree of the prefix cache",
                                   (size_t)num_blocks * sizeof(*created.nodes));
    }
    *tree = created;
    return IMBREX_STATUS_OK;
}

void kv_tree_destroy(struct kv_tree *tree)
{
    free(tree->nodes);
    free(tree->keys);
    free(tree->token_ids);
    *tree = (struct kv_tree){0};
}

static size_t ids_bytes(const struct kv_tree *tree)
{
    return (size_t)tree->block_size * sizeof(*tree->token_ids);
}

size_t kv_tree_bytes(const struct kv_tree *tree)
{
    size_t block_bytes = sizeof(*tree->nodes) + sizeof(*tree->keys);
    block_bytes += tree->token_ids != NULL ? ids_bytes(tree) : 0;
    return (size_t)tree->num_blocks * block_bytes;
}

static int32_t *ids_of(const struct kv_tree *tree, int32_t block_idx)
{
    return tree->token_ids + (size_t)block_idx * (size_t)tree->block_size;
}

void kv_tree_add(struct kv_tree *tree, int32_t block_idx, int32_t parent, const struct kv_key *key,
                 const int32_t *token_ids)
{
    struct kv_tree_node *node = &tree->nodes[block_idx];
    *node = (struct kv_tree_node){
        .parent = parent,
        .first_child = -1,
        .previous = block_idx,
        .next = block_idx,
    };
    tree->keys[block_idx] = *key;
    if (tree->token_ids != NULL) {
        memcpy(ids_of(tree, block_idx), token_ids, ids_bytes(tree));
    }
    if (parent == -1) {
        return;
    }
    struct kv_tree_node *above = &tree->nodes[parent];
    node->depth = above->depth + 1;
    above->num_children++;
    if (above->first_child == -1) {
        above->first_child = block_idx;
        return;
    }
    node->next = above->first_child;
    node->previous = tree->nodes[node->next].previous;
    tree->nodes[node->previous].next = block_idx;
    tree->nodes[node->next].previous = block_idx;
}

void kv_tree_remove(struct kv_tree *tree, int32_t block_idx)
{
    const struct kv_tree_node *node = &tree->nodes[block_idx];
    assert(node->num_children == 0);
    if (node->parent != -1) {
        struct kv_tree_node *above = &tree->nodes[node->parent];
        above->num_children--;
        if (above->first_child == block_idx) {
            above->first_child = above->num_children > 0 ? node->next : -1;
        }
    }
    tree->nodes[node->previous].next = node->next;
    tree->nodes[node->next].previous = node->previous;
}

bool kv_tree_is_same(const struct kv_tree *tree, int32_t block_idx, int32_t parent,
                     const int32_t *token_ids)
{
    return tree->nodes[block_idx].parent == parent &&
           (tree->token_ids == NULL ||
            memcmp(ids_of(tree, block_idx), token_ids, ids_bytes(tree)) == 0);
}

int32_t kv_tree_tail(const struct kv_tree *tree, int32_t block_idx)
{
    while (tree->nodes[block_idx].first_child != -1) {
        block_idx = tree->nodes[block_idx].first_child;
    }
    return block_idx;
}

bool kv_tree_check(const struct kv_tree *tree, int32_t block_idx)
{
    const struct kv_tree_node *node = &tree->nodes[block_idx];
    if ((node->parent == -1) != (node->depth == 0) ||
        (node->num_children == 0) != (node->first_child == -1)) {
        return false;
    }
    int32_t child = node->first_child;
    for (int32_t i = 0; i < node->num_children; i++) {
        const struct kv_tree_node *below = &tree->nodes[child];
        if (below->parent != block_idx || below->depth != node->depth + 1 ||
            tree->nodes[below->next].previous != child) {
            return false;
        }
        child = below->next;
    }
    return child == node->first_child;
}
