/* SPDX-License-Identifier: Apache-2.0 */
/* Belady's MIN on a recorded timeline. Of the idle blocks the one goes first whose next admission
 * is farthest; blocks that are never used again before all others. The next use of a block is
 * never later than that of the blocks behind it, so that with ties broken by depth, tails first,
 * what stays is closed under prefixes. New blocks are in use when they come and take part like all
 * others once they are idle: one that is not worth its room is the next to go (bypass). */
#include <stdlib.h>

#include "sim/sim_service.h"

#define ABSENT (-1)
#define DEAD INT32_MAX

struct idle_block {
    int32_t next_use, depth; /* depth: blocks before it in its path */
    int32_t node;
};

struct sim_min {
    struct sim_store base;
    /* base.users: ABSENT, users if more than 0, or of an idle block -2 - its place in the heap;
     * (0 does not occur between events). */
    int32_t *next_uses; /* [num_accesses] number of the next admission that uses the block, DEAD */
    int32_t *node_next; /* [num_nodes] of a block in use: what its last admission says */
    struct idle_block *heap; /* [num_idle] farthest first */
    int32_t num_idle, num_resident;
};

static bool goes_before(const struct idle_block *a, const struct idle_block *b)
{
    if (a->next_use != b->next_use) {
        return a->next_use > b->next_use;
    }
    return a->depth != b->depth ? a->depth > b->depth : a->node < b->node;
}

static void place(struct sim_min *min, int32_t at, struct idle_block block)
{
    min->heap[at] = block;
    min->base.users[block.node] = -2 - at;
}

static void sift_up(struct sim_min *min, int32_t at, struct idle_block block)
{
    while (at > 0 && goes_before(&block, &min->heap[(at - 1) / 2])) {
        place(min, at, min->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    place(min, at, block);
}

static void sift_down(struct sim_min *min, int32_t at, struct idle_block block)
{
    for (int64_t child = 2 * (int64_t)at + 1; child < min->num_idle; child = 2 * (int64_t)at + 1) {
        if (child + 1 < min->num_idle && goes_before(&min->heap[child + 1], &min->heap[child])) {
            child++;
        }
        if (!goes_before(&min->heap[child], &block)) {
            break;
        }
        place(min, at, min->heap[child]);
        at = (int32_t)child;
    }
    place(min, at, block);
}

static void remove_idle(struct sim_min *min, int32_t node)
{
    int32_t at = -2 - min->base.users[node];
    struct idle_block last = min->heap[--min->num_idle];

    if (at == min->num_idle) {
        return;
    }
    if (at > 0 && goes_before(&last, &min->heap[(at - 1) / 2])) {
        sift_up(min, at, last);
    } else {
        sift_down(min, at, last);
    }
}

static enum imbrex_status min_admit(struct sim_store *store, int32_t request_idx, int64_t now_ns,
                                    struct sim_found *found, struct imbrex_error *err)
{
    struct sim_min *min = (struct sim_min *)store;
    const struct sim_trace *trace = store->trace;
    const int32_t *path = sim_trace_path(trace, request_idx);
    const int32_t *next_uses = min->next_uses + trace->requests[request_idx].first_access;
    int32_t num_blocks = sim_store_num_blocks(store, request_idx), i = 0;

    (void)now_ns;
    (void)err;
    for (; i < num_blocks && store->users[path[i]] != ABSENT; i++) {
        if (store->users[path[i]] < 0) {
            remove_idle(min, path[i]);
            store->users[path[i]] = 0;
            store->num_used++;
        }
        store->users[path[i]]++;
        min->node_next[path[i]] = next_uses[i];
    }
    *found = (struct sim_found){.num_hits = i};
    for (; i < num_blocks; i++) {
        if (min->num_resident == store->capacity) {
            int32_t victim = min->heap[0].node;
            remove_idle(min, victim);
            store->users[victim] = ABSENT;
            store->num_evicted++;
            min->num_resident--;
        }
        store->users[path[i]] = 1;
        min->node_next[path[i]] = next_uses[i];
        store->num_used++;
        min->num_resident++;
    }
    return IMBREX_STATUS_OK;
}

static void min_finish(struct sim_store *store, int32_t request_idx, int64_t now_ns)
{
    struct sim_min *min = (struct sim_min *)store;
    const int32_t *path = sim_trace_path(store->trace, request_idx);

    (void)now_ns;
    for (int32_t i = sim_store_num_blocks(store, request_idx) - 1; i >= 0; i--) {
        if (--store->users[path[i]] == 0) {
            store->num_used--;
            sift_up(min, min->num_idle++,
                    (struct idle_block){
                        .next_use = min->node_next[path[i]], .depth = i, .node = path[i]});
        }
    }
}

static void min_destroy(struct sim_store *store)
{
    struct sim_min *min = (struct sim_min *)store;

    free(store->users);
    free(min->next_uses);
    free(min->node_next);
    free(min->heap);
    free(min);
}

static const struct sim_store_functions min_functions = {
    .destroy = min_destroy,
    .admit = min_admit,
    .finish = min_finish,
};

/* Backwards through the admissions; node_next holds what was seen last of each block. */
static void find_next_uses(struct sim_min *min, const struct sim_timeline *timeline)
{
    const struct sim_trace *trace = min->base.trace;
    int32_t admission = trace->num_requests;

    for (int32_t i = 0; i < trace->num_nodes; i++) {
        min->node_next[i] = DEAD;
        min->base.users[i] = ABSENT;
    }
    for (int64_t at = timeline->num_events - 1; at >= 0; at--) {
        const struct sim_event *event = &timeline->events[at];
        if (event->kind != SIM_EVENT_ADMIT) {
            continue;
        }
        const int32_t *path = sim_trace_path(trace, event->request_idx);
        int32_t *next_uses = min->next_uses + trace->requests[event->request_idx].first_access;
        int32_t num_blocks = sim_store_num_blocks(&min->base, event->request_idx);
        admission--;
        for (int32_t i = 0; i < num_blocks; i++) {
            next_uses[i] = min->node_next[path[i]];
            min->node_next[path[i]] = admission;
        }
    }
}

enum imbrex_status sim_min_create(const struct sim_trace *trace, int32_t capacity,
                                  const struct sim_timeline *timeline, struct sim_store **store,
                                  struct imbrex_error *err)
{
    struct sim_min *min = calloc(1, sizeof(*min));
    size_t num_nodes = (size_t)trace->num_nodes, num_accesses = (size_t)trace->num_accesses;
    size_t num_places = num_nodes < (size_t)capacity ? num_nodes : (size_t)capacity;

    if (min == NULL) {
        return error_out_of_memory(err, "MIN", sizeof(*min));
    }
    min->base =
        (struct sim_store){.functions = &min_functions, .trace = trace, .capacity = capacity};
    min->base.users = malloc((num_nodes + 1) * sizeof(int32_t));
    min->node_next = malloc((num_nodes + 1) * sizeof(int32_t));
    min->next_uses = malloc((num_accesses + 1) * sizeof(int32_t));
    min->heap = malloc((num_places + 1) * sizeof(*min->heap));
    if (min->base.users == NULL || min->node_next == NULL || min->next_uses == NULL ||
        min->heap == NULL) {
        min_destroy(&min->base);
        return error_out_of_memory(err, "MIN", (2 * num_nodes + num_accesses) * sizeof(int32_t));
    }
    find_next_uses(min, timeline);
    *store = &min->base;
    return IMBREX_STATUS_OK;
}
