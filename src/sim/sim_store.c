/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_store.h"

bool sim_store_has_room(const struct sim_store *store, int32_t request_idx)
{
    const int32_t *path = sim_trace_path(store->trace, request_idx);
    int32_t low = 0, high = sim_store_num_blocks(store, request_idx);
    int64_t num_new = high;

    /* The first block that nobody uses: behind it nobody uses any. */
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (store->users[path[middle]] > 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    num_new -= low;
    return store->num_used + num_new <= store->capacity;
}

void sim_store_destroy(struct sim_store *store)
{
    if (store != NULL) {
        store->functions->destroy(store);
    }
}
