/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/column_ranges.h"

#include <assert.h>
#include <stddef.h>

/* Of what a range has left goes into a piece; smaller ones at the end let others help. */
#define TAKE_PARTS 4

static uint64_t pack(uint64_t first, uint64_t end)
{
    return first << 32 | end;
}

static uint64_t first_of(uint64_t left)
{
    return left >> 32;
}

static uint64_t end_of(uint64_t left)
{
    return left & UINT32_MAX;
}

static uint64_t num_units(uint64_t left)
{
    return end_of(left) - first_of(left);
}

void column_ranges_split(struct column_ranges *ranges)
{
    uint64_t all = (uint64_t)((ranges->count + ranges->unit - 1) / ranges->unit);
    uint64_t num_parts = (uint64_t)ranges->num_parts;
    assert(all <= UINT32_MAX && num_parts >= 1);
    for (uint64_t idx = 0; idx < (uint64_t)ranges->num_threads; idx++) {
        uint64_t left =
            idx < num_parts ? pack(all * idx / num_parts, all * (idx + 1) / num_parts) : 0;
        atomic_store_explicit(&ranges->ranges[idx].left, left, memory_order_relaxed);
    }
}

/* Units of a piece of that many columns or more. */
static uint64_t least_units(const struct column_ranges *ranges)
{
    int64_t least = (ranges->least + ranges->unit - 1) / ranges->unit;
    return least > 1 ? (uint64_t)least : 1;
}

static bool take_front(struct column_ranges *ranges, int32_t thread_idx, int64_t *begin,
                       int64_t *end)
{
    struct column_range *own = &ranges->ranges[thread_idx];
    uint64_t least = least_units(ranges), taken;
    uint64_t left = atomic_load_explicit(&own->left, memory_order_relaxed);
    do {
        if (num_units(left) == 0) {
            return false;
        }
        taken = num_units(left) / TAKE_PARTS;
        taken = taken < least ? least : taken;
        taken = taken > num_units(left) ? num_units(left) : taken;
    } while (!atomic_compare_exchange_weak_explicit(&own->left, &left,
                                                    pack(first_of(left) + taken, end_of(left)),
                                                    memory_order_relaxed, memory_order_relaxed));
    *begin = (int64_t)first_of(left) * ranges->unit;
    *end = *begin + (int64_t)taken * ranges->unit;
    *end = *end < ranges->count ? *end : ranges->count;
    return true;
}

/* Moves half of the longest other range, or a piece of at least the least size, into a thread's
 * own, which is empty. */
static bool take_over(struct column_ranges *ranges, int32_t thread_idx)
{
    uint64_t least = least_units(ranges);
    for (;;) {
        struct column_range *longest = NULL;
        uint64_t longest_left = 0;
        for (int32_t idx = 0; idx < ranges->num_threads; idx++) {
            uint64_t left = atomic_load_explicit(&ranges->ranges[idx].left, memory_order_relaxed);
            if (num_units(left) > num_units(longest_left)) {
                longest = &ranges->ranges[idx];
                longest_left = left;
            }
        }
        if (longest == NULL) {
            return false;
        }
        uint64_t moved = (num_units(longest_left) + 1) / 2;
        moved = moved < least ? least : moved;
        moved = moved > num_units(longest_left) ? num_units(longest_left) : moved;
        uint64_t edge = end_of(longest_left) - moved;
        if (atomic_compare_exchange_strong_explicit(&longest->left, &longest_left,
                                                    pack(first_of(longest_left), edge),
                                                    memory_order_relaxed, memory_order_relaxed)) {
            atomic_store_explicit(&ranges->ranges[thread_idx].left, pack(edge, edge + moved),
                                  memory_order_relaxed);
            return true;
        }
    }
}

bool column_ranges_take(struct column_ranges *ranges, int32_t thread_idx, int64_t *begin,
                        int64_t *end)
{
    while (!take_front(ranges, thread_idx, begin, end)) {
        if (!take_over(ranges, thread_idx)) {
            return false;
        }
    }
    return true;
}
