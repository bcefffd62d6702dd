/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_wanted.h"

#include <assert.h>
#include <stdlib.h>

#include "kv/kv_table.h"

enum imbrex_status kv_wanted_create(int32_t num_blocks, struct kv_wanted *wanted,
                                    struct imbrex_error *err)
{
    struct kv_wanted created = {.mask = kv_table_mask(num_blocks)};
    created.chains = calloc((size_t)created.mask + 1, sizeof(*created.chains));
    if (created.chains == NULL) {
        return error_out_of_memory(err, "the table of wanted blocks",
                                   ((size_t)created.mask + 1) * sizeof(*created.chains));
    }
    *wanted = created;
    return IMBREX_STATUS_OK;
}

void kv_wanted_destroy(struct kv_wanted *wanted)
{
    free(wanted->chains);
    *wanted = (struct kv_wanted){0};
}

static const struct kv_key *key_of(const struct kv_want *want)
{
    return &want->request->keys[want - want->request->wants];
}

struct kv_want *kv_wanted_find(const struct kv_wanted *wanted, const struct kv_key *key)
{
    uint32_t hash = kv_key_mix(key);
    struct kv_want *want = wanted->chains[hash & wanted->mask];
    while (want != NULL && (want->hash != hash || !kv_key_equal(key_of(want), key))) {
        want = want->chain;
    }
    return want;
}

/* Where the chain's pointer to this nearest waiter lies. */
static struct kv_want **find_link(const struct kv_wanted *wanted, const struct kv_want *want)
{
    struct kv_want **link = &wanted->chains[want->hash & wanted->mask];
    while (*link != want) {
        assert(*link != NULL);
        link = &(*link)->chain;
    }
    return link;
}

/* The key's new nearest waiter, or the same key's next one, gets what the old one knew. */
static void take_over(const struct kv_wanted *wanted, struct kv_want *from, struct kv_want *want)
{
    *find_link(wanted, from) = want;
    want->chain = from->chain;
    want->block_idx = from->block_idx;
    from->block_idx = -1;
}

struct kv_want *kv_wanted_add(struct kv_wanted *wanted, struct kv_request *request, int32_t key_idx)
{
    struct kv_want *want = &request->wants[key_idx];
    struct kv_want *nearest = kv_wanted_find(wanted, &request->keys[key_idx]);
    *want = (struct kv_want){
        .request = request,
        .previous = want,
        .next = want,
        .hash = kv_key_mix(&request->keys[key_idx]),
        .block_idx = -1,
    };
    wanted->num_wants++;
    if (nearest == NULL) {
        want->chain = wanted->chains[want->hash & wanted->mask];
        wanted->chains[want->hash & wanted->mask] = want;
        return want;
    }
    bool is_nearest = request->order < nearest->request->order;
    /* Those that come are mostly the last: the place is looked for from the end of the ring. */
    struct kv_want *before = nearest->previous;
    while (!is_nearest && before->request->order > request->order) {
        before = before->previous;
    }
    want->previous = before;
    want->next = before->next;
    before->next->previous = want;
    before->next = want;
    if (is_nearest) {
        take_over(wanted, nearest, want);
        return want;
    }
    return nearest;
}

struct kv_want *kv_wanted_remove(struct kv_wanted *wanted, struct kv_want *want)
{
    struct kv_want *next = want->next == want ? NULL : want->next;
    struct kv_want *nearest = kv_wanted_find(wanted, key_of(want));
    if (nearest == want) {
        if (next != NULL) {
            take_over(wanted, want, next);
        } else {
            *find_link(wanted, want) = want->chain;
        }
        nearest = next;
    }
    want->previous->next = want->next;
    want->next->previous = want->previous;
    wanted->num_wants--;
    return nearest;
}

bool kv_wanted_check(const struct kv_wanted *wanted)
{
    int64_t num_seen = 0;
    for (size_t i = 0; i <= wanted->mask; i++) {
        for (const struct kv_want *nearest = wanted->chains[i]; nearest != NULL;
             nearest = nearest->chain) {
            if (kv_wanted_find(wanted, key_of(nearest)) != nearest) {
                return false;
            }
            const struct kv_want *want = nearest;
            do {
                num_seen++;
                if (num_seen > wanted->num_wants || want->next->previous != want ||
                    (want != nearest && want->block_idx != -1) || !want->request->is_waiting ||
                    want->hash != kv_key_mix(key_of(want)) ||
                    !kv_key_equal(key_of(want), key_of(nearest)) ||
                    (want->next != nearest && want->request->order > want->next->request->order)) {
                    return false;
                }
                want = want->next;
            } while (want != nearest);
        }
    }
    return num_seen == wanted->num_wants;
}
