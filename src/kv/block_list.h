/* SPDX-License-Identifier: Apache-2.0 */
/* Doubly linked lists of small integers (blocks, segments) over two arrays. A member is in one list
 * of the same links at a time. */
#ifndef IMBREX_KV_BLOCK_LIST_H
#define IMBREX_KV_BLOCK_LIST_H

#include <stdint.h>

struct block_links {
    int32_t *previous, *next; /* [number of members] */
};

struct block_list {
    int32_t first, last; /* -1: empty */
    int32_t num_members;
};

#define BLOCK_LIST_EMPTY ((struct block_list){.first = -1, .last = -1})

static inline void block_list_append(struct block_list *list, struct block_links links, int32_t idx)
{
    links.previous[idx] = list->last;
    links.next[idx] = -1;
    if (list->last >= 0) {
        links.next[list->last] = idx;
    } else {
        list->first = idx;
    }
    list->last = idx;
    list->num_members++;
}

static inline void block_list_prepend(struct block_list *list, struct block_links links,
                                      int32_t idx)
{
    links.previous[idx] = -1;
    links.next[idx] = list->first;
    if (list->first >= 0) {
        links.previous[list->first] = idx;
    } else {
        list->last = idx;
    }
    list->first = idx;
    list->num_members++;
}

static inline void block_list_remove(struct block_list *list, struct block_links links, int32_t idx)
{
    int32_t previous = links.previous[idx], next = links.next[idx];
    if (previous >= 0) {
        links.next[previous] = next;
    } else {
        list->first = next;
    }
    if (next >= 0) {
        links.previous[next] = previous;
    } else {
        list->last = previous;
    }
    list->num_members--;
}

#endif
