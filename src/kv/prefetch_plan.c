/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/prefetch_plan.h"

#include <assert.h>
#include <stdlib.h>

#include "kv/block_list.h"
#include "kv/key_table.h"

struct tracked {
    uint64_t key;
    int64_t begin_ns;
    int32_t request_idx;
    bool is_predicted;
};

struct prefetch_planner {
    struct prefetch_options options;
    struct key_table table;  /* key -> tracked */
    struct tracked *tracked; /* [max_tracked] */
    struct block_links links;
    struct block_list used, unused; /* used: in the order of their moves */
    int64_t busy_until_ns;          /* the end of the last planned move */
    int32_t credit;                 /* blocks that predictions may cost */
    int64_t renewed_ns;             /* credit has come back for the time until then */
    int64_t renewal_blocks;         /* moves of the link for one block of credit */
    struct prefetch_metrics metrics;
};

enum imbrex_status prefetch_planner_create(const struct prefetch_options *options,
                                           struct prefetch_planner **planner,
                                           struct imbrex_error *err)
{
    assert(options->block_ns > 0 && options->horizon_ns >= 0 && options->max_tracked >= 1);
    enum imbrex_status status;
    size_t num = (size_t)options->max_tracked;
    struct prefetch_planner *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the prefetch planner", sizeof(*created));
    }
    created->options = *options;
    created->used = BLOCK_LIST_EMPTY;
    created->unused = BLOCK_LIST_EMPTY;
    created->credit = PREFETCH_CREDIT_BLOCKS;
    created->renewal_blocks = PREFETCH_RENEWAL_BLOCKS;
    TRY_OR_FAIL(key_table_init(options->max_tracked, &created->table, err));
    created->tracked = calloc(num, sizeof(*created->tracked));
    created->links.previous = calloc(num, sizeof(*created->links.previous));
    created->links.next = calloc(num, sizeof(*created->links.next));
    if (created->tracked == NULL || created->links.previous == NULL ||
        created->links.next == NULL) {
        status = error_out_of_memory(err, "the prefetch planner", num * sizeof(*created->tracked));
        goto fail;
    }
    for (int32_t i = 0; i < options->max_tracked; i++) {
        block_list_append(&created->unused, created->links, i);
    }
    *planner = created;
    return IMBREX_STATUS_OK;

fail:
    prefetch_planner_destroy(created);
    return status;
}

void prefetch_planner_destroy(struct prefetch_planner *planner)
{
    if (planner != NULL) {
        key_table_deinit(&planner->table);
        free(planner->tracked);
        free(planner->links.previous);
        free(planner->links.next);
        free(planner);
    }
}

void prefetch_set_block_ns(struct prefetch_planner *planner, int64_t block_ns)
{
    assert(block_ns > 0);
    planner->options.block_ns = block_ns;
}

static bool are_ordered(const struct prefetch_request *requests, int32_t num_requests,
                        const struct prefetch_victim *victims, int32_t num_victims)
{
    for (int32_t i = 1; i < num_requests; i++) {
        if (requests[i].place < requests[i - 1].place ||
            (requests[i].place == INT64_MAX && requests[i - 1].place == INT64_MAX &&
             requests[i].value > requests[i - 1].value)) {
            return false;
        }
    }
    for (int32_t i = 1; i < num_victims; i++) {
        if (victims[i].place > victims[i - 1].place ||
            (victims[i].place == INT64_MAX && victims[i].value < victims[i - 1].value)) {
            return false;
        }
    }
    return true;
}

/* Victims are farthest first: where one may not go for a request, none behind it may. */
static bool may_go(const struct prefetch_victim *victim, const struct prefetch_request *request)
{
    if (request->place == INT64_MAX) {
        return victim->place == INT64_MAX && victim->value < request->value;
    }
    return victim->place > request->place;
}

static void add_credit(struct prefetch_planner *planner, int64_t num_blocks)
{
    int64_t credit = planner->credit + num_blocks;
    planner->credit = credit < PREFETCH_CREDIT_BLOCKS ? (int32_t)credit : PREFETCH_CREDIT_BLOCKS;
}

static void renew_credit(struct prefetch_planner *planner, int64_t now_ns)
{
    int64_t renewal_ns = planner->renewal_blocks * planner->options.block_ns;
    int64_t num_renewed = (now_ns - planner->renewed_ns) / renewal_ns;
    if (num_renewed > 0) {
        add_credit(planner, num_renewed);
        planner->renewed_ns += num_renewed * renewal_ns;
    }
}

static void track(struct prefetch_planner *planner, const struct prefetch_step *step,
                  bool is_predicted)
{
    int32_t i = planner->unused.first;
    block_list_remove(&planner->unused, planner->links, i);
    block_list_append(&planner->used, planner->links, i);
    planner->tracked[i] = (struct tracked){.key = step->key,
                                           .begin_ns = step->begin_ns,
                                           .request_idx = step->request_idx,
                                           .is_predicted = is_predicted};
    planner->credit -= is_predicted;
    (void)key_table_put(&planner->table, step->key, i);
    planner->busy_until_ns = step->end_ns;
    planner->metrics.num_planned++;
    planner->metrics.num_predicted += is_predicted;
}

static void forget(struct prefetch_planner *planner, int32_t i)
{
    key_table_remove(&planner->table, planner->tracked[i].key);
    block_list_remove(&planner->used, planner->links, i);
    block_list_append(&planner->unused, planner->links, i);
}

enum imbrex_status prefetch_plan(struct prefetch_planner *planner, int64_t now_ns,
                                 const struct prefetch_request *requests, int32_t num_requests,
                                 const struct prefetch_victim *victims, int32_t num_victims,
                                 int32_t num_free, struct prefetch_step *steps, int32_t max_steps,
                                 int32_t *num_steps)
{
    int32_t num_planned = 0, num_gone = 0;

    if (!are_ordered(requests, num_requests, victims, num_victims)) {
        return IMBREX_STATUS_INVALID_ARGUMENT;
    }
    renew_credit(planner, now_ns);
    for (int32_t i = 0; i < num_requests; i++) {
        const struct prefetch_request *request = &requests[i];
        bool is_predicted = request->place == INT64_MAX;
        for (int32_t k = 0; k < request->num_keys; k++) {
            if (key_table_find(&planner->table, request->keys[k]) >= 0) {
                continue;
            }
            int64_t begin_ns = planner->busy_until_ns > now_ns ? planner->busy_until_ns : now_ns;
            int64_t end_ns = begin_ns + planner->options.block_ns;
            if (end_ns > request->needed_ns) {
                planner->metrics.num_late += (uint64_t)(request->num_keys - k);
                break;
            }
            bool must_go = num_free == 0;
            if (num_planned == max_steps || planner->unused.first < 0 ||
                begin_ns - now_ns > planner->options.horizon_ns ||
                (is_predicted && planner->credit <= 0) ||
                (must_go && (num_gone == num_victims || !may_go(&victims[num_gone], request)))) {
                /* Nothing later is nearer or worth more. */
                *num_steps = num_planned;
                return IMBREX_STATUS_OK;
            }
            steps[num_planned] = (struct prefetch_step){
                .key = request->keys[k],
                .request_idx = request->request_idx,
                .victim_block = must_go ? victims[num_gone].block_idx : -1,
                .begin_ns = begin_ns,
                .end_ns = end_ns,
            };
            num_gone += must_go;
            num_free -= !must_go;
            track(planner, &steps[num_planned], is_predicted);
            num_planned++;
        }
    }
    *num_steps = num_planned;
    return IMBREX_STATUS_OK;
}

int32_t prefetch_cancel(struct prefetch_planner *planner, int32_t request_idx, int64_t now_ns,
                        uint64_t *keys)
{
    int32_t num_cancelled = 0, first = -1;
    /* Moves begin in the order in which they were planned: those that have not begun are last. */
    for (int32_t i = planner->used.last; i >= 0 && planner->tracked[i].begin_ns > now_ns;
         i = planner->links.previous[i]) {
        first = i;
    }
    for (int32_t i = first; i >= 0;) {
        int32_t next = planner->links.next[i];
        struct tracked *tracked = &planner->tracked[i];
        if (tracked->request_idx == request_idx) {
            keys[num_cancelled++] = tracked->key;
            add_credit(planner, tracked->is_predicted);
            forget(planner, i);
        }
        i = next;
    }
    planner->metrics.num_cancelled += (uint64_t)num_cancelled;
    if (num_cancelled == 0) {
        return 0;
    }
    /* The moves behind them stay where they are: their times were promised to the tiers. */
    int32_t last = planner->used.last;
    planner->busy_until_ns =
        last >= 0 ? planner->tracked[last].begin_ns + planner->options.block_ns : 0;
    return num_cancelled;
}

void prefetch_used(struct prefetch_planner *planner, uint64_t key)
{
    int32_t i = key_table_find(&planner->table, key);
    if (i >= 0) {
        planner->metrics.num_used++;
        if (planner->tracked[i].is_predicted) {
            planner->metrics.num_predicted_used++;
            add_credit(planner, PREFETCH_CREDIT_OF_USE);
            planner->renewal_blocks = PREFETCH_RENEWAL_BLOCKS;
        }
        forget(planner, i);
    }
}

void prefetch_lost(struct prefetch_planner *planner, uint64_t key)
{
    int32_t i = key_table_find(&planner->table, key);
    if (i >= 0) {
        planner->metrics.num_wasted++;
        if (planner->tracked[i].is_predicted && planner->credit <= 0 &&
            planner->renewal_blocks < PREFETCH_MAX_RENEWAL_BLOCKS) {
            planner->renewal_blocks *= 2;
        }
        forget(planner, i);
    }
}

void prefetch_read_metrics(const struct prefetch_planner *planner, struct prefetch_metrics *metrics)
{
    *metrics = planner->metrics;
}
