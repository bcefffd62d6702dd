/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/few_ways.h"

#include <stddef.h>

static void begin_trials(struct few_shape *shape)
{
    shape->num_trials = shape->num_calls = 0;
    for (int way = 0; way < FEW_WAY_COUNT; way++) {
        shape->best_ns[way] = INT64_MAX;
    }
}

static struct few_shape *find_shape(struct few_ways *ways, int32_t num_rows, int64_t num_bytes)
{
    for (int32_t idx = 0; idx < ways->num_shapes; idx++) {
        struct few_shape *shape = &ways->shapes[idx];
        if (shape->num_rows == num_rows && shape->num_bytes == num_bytes) {
            return shape;
        }
    }
    if (ways->num_shapes == FEW_WAY_MAX_SHAPES) {
        return NULL;
    }
    struct few_shape *shape = &ways->shapes[ways->num_shapes++];
    *shape = (struct few_shape){.num_bytes = num_bytes, .num_rows = num_rows};
    begin_trials(shape);
    return shape;
}

static enum few_way fastest_way(const struct few_shape *shape)
{
    int best = 0;
    for (int way = 1; way < FEW_WAY_COUNT; way++) {
        best = shape->best_ns[way] < shape->best_ns[best] ? way : best;
    }
    return (enum few_way)best;
}

enum few_way few_ways_take(struct few_ways *ways, int32_t num_rows, int64_t num_bytes,
                           struct few_shape **trial)
{
    *trial = NULL;
    if (ways->the_only != FEW_WAY_COUNT) {
        return ways->the_only;
    }
    struct few_shape *shape =
        num_bytes < FEW_WAY_MIN_BYTES ? NULL : find_shape(ways, num_rows, num_bytes);
    if (shape == NULL) {
        return (enum few_way)0;
    }
    if (shape->num_trials == FEW_WAY_TRIALS * FEW_WAY_COUNT) {
        if (shape->num_calls++ < FEW_WAY_CALLS) {
            return fastest_way(shape);
        }
        begin_trials(shape);
    }
    *trial = shape;
    return (enum few_way)(shape->num_trials % FEW_WAY_COUNT);
}

void few_ways_note(struct few_shape *trial, enum few_way way, int64_t ns)
{
    trial->num_trials++;
    trial->best_ns[way] = ns < trial->best_ns[way] ? ns : trial->best_ns[way];
}
