/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_levels.h"

#include <assert.h>
#include <stdlib.h>

#include "kv/block_list.h"

#define NOT_THERE (-1)
/* Absurd rates end here, far from overflow. */
#define LAST_NS (INT64_MAX / 4)

struct level {
    struct sim_level_options options;
    int64_t *ready_ns; /* [num_nodes] can be read from then on; NOT_THERE */
    struct block_links links;
    struct block_list list; /* the least recently used first */
    /* What the next tier does not have and is not being given, the oldest first. */
    struct block_links unsaved_links;
    struct block_list unsaved;
    bool *is_unsaved;                 /* [num_nodes] */
    int64_t up_free_ns, down_free_ns; /* the link's */
    struct sim_level_metrics metrics;
};

struct sim_levels {
    struct level levels[SIM_MAX_LEVELS]; /* [num_levels] the nearest first */
    int32_t num_levels, num_nodes;
    int8_t *origins; /* [num_nodes] the level it was raised from */
};

static enum imbrex_status init_level(int32_t num_nodes, const struct sim_level_options *options,
                                     struct level *level, struct imbrex_error *err)
{
    size_t count = (size_t)num_nodes;

    assert(options->capacity >= 1 && options->up_block_ns >= 0 && options->down_block_ns >= 0 &&
           options->latency_ns >= 0);
    level->options = *options;
    level->list = BLOCK_LIST_EMPTY;
    level->unsaved = BLOCK_LIST_EMPTY;
    level->ready_ns = malloc(count * sizeof(*level->ready_ns));
    level->links.previous = malloc(count * sizeof(*level->links.previous));
    level->links.next = malloc(count * sizeof(*level->links.next));
    level->unsaved_links.previous = malloc(count * sizeof(*level->unsaved_links.previous));
    level->unsaved_links.next = malloc(count * sizeof(*level->unsaved_links.next));
    level->is_unsaved = calloc(count, sizeof(*level->is_unsaved));
    if (level->ready_ns == NULL || level->links.previous == NULL || level->links.next == NULL ||
        level->unsaved_links.previous == NULL || level->unsaved_links.next == NULL ||
        level->is_unsaved == NULL) {
        return error_out_of_memory(err, "a slower tier", count * sizeof(*level->ready_ns));
    }
    for (size_t i = 0; i < count; i++) {
        level->ready_ns[i] = NOT_THERE;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_levels_create(int32_t num_nodes, const struct sim_level_options *options,
                                     int32_t num_levels, struct sim_levels **levels,
                                     struct imbrex_error *err)
{
    struct sim_levels *created = calloc(1, sizeof(*created));
    enum imbrex_status status = IMBREX_STATUS_OK;

    assert(num_levels >= 1 && num_levels <= SIM_MAX_LEVELS && num_nodes >= 1);
    if (created == NULL) {
        return error_out_of_memory(err, "slower tiers", sizeof(*created));
    }
    created->num_levels = num_levels;
    created->num_nodes = num_nodes;
    created->origins = calloc((size_t)num_nodes, sizeof(*created->origins));
    if (created->origins == NULL) {
        status = error_out_of_memory(err, "slower tiers", (size_t)num_nodes);
    }
    for (int32_t i = 0; i < num_levels && status == IMBREX_STATUS_OK; i++) {
        status = init_level(num_nodes, &options[i], &created->levels[i], err);
    }
    if (status != IMBREX_STATUS_OK) {
        sim_levels_destroy(created);
        return status;
    }
    *levels = created;
    return IMBREX_STATUS_OK;
}

void sim_levels_destroy(struct sim_levels *levels)
{
    if (levels != NULL) {
        for (int32_t i = 0; i < levels->num_levels; i++) {
            free(levels->levels[i].ready_ns);
            free(levels->levels[i].links.previous);
            free(levels->levels[i].links.next);
            free(levels->levels[i].unsaved_links.previous);
            free(levels->levels[i].unsaved_links.next);
            free(levels->levels[i].is_unsaved);
        }
        free(levels->origins);
        free(levels);
    }
}

/* ---- contents -------------------------------------------------------------------------------- */

static bool has(const struct level *level, int32_t node)
{
    return level->ready_ns[node] != NOT_THERE;
}

static void touch(struct level *level, int32_t node)
{
    block_list_remove(&level->list, level->links, node);
    block_list_append(&level->list, level->links, node);
}

static void forget_unsaved(struct level *level, int32_t node)
{
    block_list_remove(&level->unsaved, level->unsaved_links, node);
    level->is_unsaved[node] = false;
}

/* The tier has it; the next one is to have it too. */
static void note_unsaved(struct sim_levels *levels, int32_t level_idx, int32_t node)
{
    struct level *level = &levels->levels[level_idx];

    if (level_idx + 1 < levels->num_levels && !level->is_unsaved[node] &&
        !has(&levels->levels[level_idx + 1], node)) {
        block_list_append(&level->unsaved, level->unsaved_links, node);
        level->is_unsaved[node] = true;
    }
}

/* The least recently used block goes. */
static void evict(struct sim_levels *levels, int32_t level_idx)
{
    struct level *level = &levels->levels[level_idx];
    int32_t node = level->list.first;

    block_list_remove(&level->list, level->links, node);
    level->ready_ns[node] = NOT_THERE;
    if (level->is_unsaved[node]) {
        forget_unsaved(level, node);
        level->metrics.num_lost++;
    }
    if (level_idx == 0) {
        levels->origins[node] = 0;
    }
}

static void add(struct sim_levels *levels, int32_t level_idx, int32_t node, int64_t ready_ns)
{
    struct level *level = &levels->levels[level_idx];

    if (level->list.num_members == level->options.capacity) {
        evict(levels, level_idx);
    }
    level->ready_ns[node] = ready_ns;
    block_list_append(&level->list, level->links, node);
    note_unsaved(levels, level_idx, node);
}

int32_t sim_levels_find(const struct sim_levels *levels, int32_t node)
{
    for (int32_t i = 0; i < levels->num_levels; i++) {
        if (has(&levels->levels[i], node)) {
            return i;
        }
    }
    return -1;
}

bool sim_levels_is_near(const struct sim_levels *levels, int32_t node, int64_t now_ns)
{
    const struct level *level = &levels->levels[0];
    return has(level, node) && level->ready_ns[node] <= now_ns;
}

/* ---- moves ----------------------------------------------------------------------------------- */

static int64_t later_of(int64_t a_ns, int64_t b_ns)
{
    return a_ns > b_ns ? a_ns : b_ns;
}

static int64_t later_by(int64_t time_ns, int64_t wait_ns)
{
    return time_ns < LAST_NS - wait_ns ? time_ns + wait_ns : LAST_NS;
}

/* Begins what can begin by now of the writes of one tier to the next. */
static void save(struct sim_levels *levels, int32_t level_idx, int64_t now_ns)
{
    struct level *level = &levels->levels[level_idx], *next = &levels->levels[level_idx + 1];

    while (level->unsaved.first >= 0) {
        int32_t node = level->unsaved.first;
        int64_t begin_ns = later_of(level->ready_ns[node], next->down_free_ns);
        if (begin_ns > now_ns) {
            return;
        }
        forget_unsaved(level, node);
        next->down_free_ns = later_by(begin_ns, next->options.down_block_ns);
        next->metrics.num_down++;
        add(levels, level_idx + 1, node, next->down_free_ns);
    }
}

void sim_levels_advance(struct sim_levels *levels, int64_t now_ns)
{
    for (int32_t i = 0; i + 1 < levels->num_levels; i++) {
        save(levels, i, now_ns);
    }
}

int64_t sim_levels_put(struct sim_levels *levels, int32_t node, int64_t now_ns)
{
    struct level *level = &levels->levels[0];

    /* What is copied on from now on does not go for it. */
    sim_levels_advance(levels, now_ns);
    if (has(level, node)) {
        touch(level, node);
        note_unsaved(levels, 0, node);
        return now_ns;
    }
    level->down_free_ns =
        later_by(later_of(now_ns, level->down_free_ns), level->options.down_block_ns);
    level->metrics.num_down++;
    add(levels, 0, node, level->down_free_ns);
    return level->down_free_ns;
}

/* The read of a tier into the one above it, of a block that is there from then on. */
static int64_t read_end(const struct level *level, int64_t ready_ns)
{
    return later_by(later_of(ready_ns, level->up_free_ns),
                    level->options.up_block_ns + level->options.latency_ns);
}

int64_t sim_levels_raise_end(const struct sim_levels *levels, int32_t node, int64_t now_ns)
{
    int32_t found = sim_levels_find(levels, node);
    int64_t end_ns = now_ns;

    assert(found >= 0);
    end_ns = later_of(end_ns, levels->levels[found].ready_ns[node]);
    for (int32_t i = found; i > 0; i--) {
        end_ns = read_end(&levels->levels[i], end_ns);
    }
    return end_ns;
}

int64_t sim_levels_raise(struct sim_levels *levels, int32_t node, int64_t now_ns)
{
    int32_t found = sim_levels_find(levels, node);
    int64_t end_ns = now_ns;

    assert(found >= 0);
    end_ns = later_of(end_ns, levels->levels[found].ready_ns[node]);
    for (int32_t i = found; i > 0; i--) {
        struct level *level = &levels->levels[i];
        end_ns = read_end(level, end_ns);
        level->up_free_ns = end_ns - level->options.latency_ns;
        level->metrics.num_up++;
        touch(level, node);
        add(levels, i - 1, node, end_ns);
    }
    if (found > 0) {
        levels->origins[node] = (int8_t)found;
    }
    return end_ns;
}

int32_t sim_levels_origin(const struct sim_levels *levels, int32_t node)
{
    return levels->origins[node];
}

int64_t sim_levels_free_ns(const struct sim_levels *levels)
{
    return levels->levels[0].up_free_ns;
}

void sim_levels_load(struct sim_levels *levels, int32_t node, int64_t end_ns)
{
    struct level *level = &levels->levels[0];

    level->up_free_ns = later_of(level->up_free_ns, end_ns - level->options.latency_ns);
    level->metrics.num_up++;
    levels->origins[node] = 0;
    if (has(level, node)) {
        touch(level, node);
    }
}

void sim_levels_read_metrics(const struct sim_levels *levels, int32_t level_idx,
                             struct sim_level_metrics *metrics)
{
    *metrics = levels->levels[level_idx].metrics;
}

bool sim_levels_check(const struct sim_levels *levels)
{
    for (int32_t i = 0; i < levels->num_levels; i++) {
        const struct level *level = &levels->levels[i];
        int32_t num_listed = 0, num_there = 0;
        for (int32_t node = level->list.first; node >= 0; node = level->links.next[node]) {
            num_listed++;
            if (num_listed > level->list.num_members || !has(level, node)) {
                return false;
            }
        }
        for (int32_t node = 0; node < levels->num_nodes; node++) {
            num_there += has(level, node);
            if (level->is_unsaved[node] && (!has(level, node) || i + 1 == levels->num_levels ||
                                            has(&levels->levels[i + 1], node))) {
                return false;
            }
            if (levels->origins[node] < 0 || levels->origins[node] >= levels->num_levels) {
                return false;
            }
        }
        if (num_listed != level->list.num_members || num_there != num_listed ||
            num_listed > level->options.capacity) {
            return false;
        }
    }
    return true;
}
