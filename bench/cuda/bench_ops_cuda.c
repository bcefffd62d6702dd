/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench ops on a GPU: each contestant of a cell is proved, captured into a graph of calls on
 * rotating inputs, and replayed in turn with the others. A graph hides what the host takes, turns
 * hide what the clock does. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench/cuda/bench_cell.h"
#include "bench/cuda/bench_gate_first.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/tuned_path.h"

#define MAX_REPLAY_CALLS 2000
#define NUM_CHECKED 4096  /* results of a contestant */
#define CHECK_COUNTERS 4  /* 3 counts, and the worst error */
#define HIDDEN_SHARES 16  /* that many pairs are summed up to */
#define BURST_PAIR_MS 9.0 /* of all contestants; single calls may be longer */
#define SUSTAINED_WARM_MS 3000.0

/* gate_first is always measured, whether it would be chosen or not. */
enum bench_schedule { SCHEDULE_PINGPONG, SCHEDULE_COOPERATIVE, SCHEDULE_GATE_FIRST, NUM_SCHEDULES };

static void rest(long num_ns)
{
    struct timespec time = {.tv_sec = num_ns / 1000000000, .tv_nsec = num_ns % 1000000000};
    (void)nanosleep(&time, NULL);
}

/* ---- inputs ---- */

static bool fill(struct bench *bench, CUdeviceptr base, uint64_t num_bytes, float scale,
                 uint32_t seed)
{
    uint64_t count = num_bytes / 2;
    void *arguments[] = {&base, &count, &scale, &seed};
    return gpu_launch(&bench->gpu, "bench_fill", 8 * (int64_t)bench->description.num_sms, 256,
                      arguments);
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

void bench_pools_include(struct bench *bench, const struct bench_cell *cell)
{
    struct bench_pools *pools = &bench->pools;
    uint64_t num_sets = (uint64_t)cell->num_sets;
    pools->a_bytes = max_u64(pools->a_bytes, num_sets * cell->a_stride);
    pools->weights_bytes = max_u64(pools->weights_bytes, num_sets * cell->weights_stride);
    pools->d_bytes = max_u64(pools->d_bytes, num_sets * cell->d_stride);
    pools->product_bytes = max_u64(pools->product_bytes, num_sets * cell->product_stride);
    pools->biases_bytes = max_u64(pools->biases_bytes, 2 * (uint64_t)cell->n * sizeof(float));
}

bool bench_pools_allocate(struct bench *bench)
{
    struct bench_pools *pools = &bench->pools;
    struct gpu *gpu = &bench->gpu;
    bool has_streams = (bench->settings->baselines.value & BENCH_BASELINES_STREAMS) != 0;
    uint64_t num_workspaces = has_streams ? (uint64_t)bench->settings->num_streams.value : 1;
    return GPU_CALL(gpu, mem_alloc, &pools->a, pools->a_bytes) &&
           GPU_CALL(gpu, mem_alloc, &pools->weights, pools->weights_bytes) &&
           GPU_CALL(gpu, mem_alloc, &pools->d, pools->d_bytes) &&
           (pools->product_bytes == 0 ||
            GPU_CALL(gpu, mem_alloc, &pools->product, pools->product_bytes)) &&
           GPU_CALL(gpu, mem_alloc, &pools->workspace, num_workspaces * BENCH_WORKSPACE_BYTES) &&
           GPU_CALL(gpu, mem_alloc, &pools->counts, CHECK_COUNTERS * sizeof(uint32_t)) &&
           GPU_CALL(gpu, mem_alloc, &pools->biases, pools->biases_bytes) &&
           /* A float of two normal bf16 is as good as normal. */
           fill(bench, pools->biases, pools->biases_bytes, 1.0f, 3) &&
           fill(bench, pools->a, pools->a_bytes, 1.0f, 1);
}

/* Room for the largest of all cells. */
static bool allocate_pools(struct bench *bench, const struct bench_ops_cells *cells)
{
    for (int i = 0; i < cells->num_shapes; i++) {
        for (int j = 0; j < cells->num_rows; j++) {
            struct bench_cell *cell = malloc(sizeof(*cell));
            if (cell == NULL) {
                (void)output_out_of_memory();
                return false;
            }
            bench_cell_init(bench, &cells->shapes[i], cells->rows[j], cell);
            bench_pools_include(bench, cell);
            free(cell);
        }
    }
    return bench_pools_allocate(bench);
}

bool bench_fill_weights(struct bench *bench, const struct bench_cell *cell)
{
    return fill(bench, bench->pools.weights, bench->pools.weights_bytes,
                1.0f / sqrtf((float)cell->k), 7) &&
           GPU_CALL(&bench->gpu, stream_synchronize, bench->gpu.stream);
}

void bench_pools_free(struct bench *bench)
{
    const CUdeviceptr pools[] = {bench->pools.a,       bench->pools.weights,   bench->pools.d,
                                 bench->pools.product, bench->pools.workspace, bench->pools.counts,
                                 bench->pools.biases};
    for (size_t i = 0; i < sizeof(pools) / sizeof(pools[0]); i++) {
        if (pools[i] != 0) {
            (void)bench->gpu.mem_free(pools[i]);
        }
    }
}

/* ---- proof ---- */

/* Of a bare product of gate and up, all columns are checked as one plain product. */
static bool check_contestant(struct bench *bench, struct bench_cell *cell,
                             struct contestant *contestant)
{
    struct gpu *gpu = &bench->gpu;
    struct bench_operands operands = bench_cell_operands(bench, cell, 0,
                                                         contestant->kind == CONTESTANT_OURS ||
                                                             contestant->kind == CONTESTANT_SWISH);
    bool is_without_swish =
        contestant->kind == CONTESTANT_SWISH &&
        (contestant->swish == BENCH_SWISH_REMOVED || contestant->swish == BENCH_SWISH_HELD);
    bool is_product = contestant->kind == CONTESTANT_GEMM && cell->product_stride != 0;
    CUdeviceptr d = is_product ? operands.product : operands.d;
    CUdeviceptr up = is_product ? 0 : operands.up;
    int32_t n = (int32_t)(is_product ? cell->weight_rows : cell->n), k = (int32_t)cell->k;
    uint64_t count = (uint64_t)cell->m * (uint64_t)n;
    bool is_ours = contestant->kind == CONTESTANT_OURS;
    bool is_unfused = bench->settings->rounding.value == IMBREX_ROUNDING_MATCH_UNFUSED;
    bool has_products = contestant->kind == CONTESTANT_UNFUSED || contestant_is_sliced(contestant);
    uint32_t seed = 12345, roundings = is_unfused ? 3 : has_products ? 2 : 1;
    CUdeviceptr gate_bias = is_ours && bench->settings->bias ? bench->pools.biases : 0;
    CUdeviceptr up_bias = gate_bias != 0 ? gate_bias + (uint64_t)cell->n * sizeof(float) : 0;
    int32_t interleave = is_ours ? (int32_t)bench->settings->interleave.value : 0;
    struct imbrex_gating gating = bench->cells->gatings[contestant->gating_idx].gating;
    CUdeviceptr worst = bench->pools.counts + 3 * sizeof(uint32_t);
    void *check_arguments[] = {
        &operands.a, &operands.gate,       &up,    &d,         &cell->m, &n,          &k,     &seed,
        &roundings,  &bench->pools.counts, &worst, &gate_bias, &up_bias, &interleave, &gating};
    void *poison_arguments[] = {&d, &count, &bench->pools.counts};
    uint32_t counts[CHECK_COUNTERS];
    float worst_error;

    if (!GPU_CALL(gpu, memset_d8_async, d, 0xff, count * 2, gpu->stream) ||
        !GPU_CALL(gpu, memset_d8_async, bench->pools.counts, 0, sizeof(counts), gpu->stream) ||
        !bench_cell_call(bench, cell, contestant, 0) ||
        !gpu_launch(gpu, "bench_count_poison", 8 * (int64_t)bench->description.num_sms, 256,
                    poison_arguments) ||
        !gpu_launch(gpu, "bench_check", NUM_CHECKED, 32, check_arguments) ||
        !GPU_CALL(gpu, stream_synchronize, gpu->stream) ||
        !GPU_CALL(gpu, memcpy_dtoh, counts, bench->pools.counts, sizeof(counts))) {
        output_error("bench ops: %s: m %d: %s could not be checked", cell->shape->name,
                     (int)cell->m, contestant->name);
        return false;
    }
    memcpy(&worst_error, &counts[3], sizeof(worst_error));
    contestant->worst_error = worst_error;
    contestant->beyond_ulp = (double)counts[2] / NUM_CHECKED;
    /* A kernel without Swish that computes SwiGLU is not what it says. */
    if (counts[0] != 0 || (counts[1] != 0) != is_without_swish) {
        output_error("bench ops: %s: m %d: %s is wrong: %u results of %llu not written, %u of %d "
                     "checked ones beyond their bound, the worst %g times; not timed",
                     cell->shape->name, (int)cell->m, contestant->name, counts[0],
                     (unsigned long long)count, counts[1], NUM_CHECKED, (double)worst_error);
        return false;
    }
    return true;
}

/* ---- replays ---- */

static bool capture(struct bench *bench, struct bench_cell *cell, struct contestant *contestant)
{
    struct gpu *gpu = &bench->gpu;
    CUgraph graph = NULL;
    bool is_ok =
        GPU_CALL(gpu, stream_begin_capture, gpu->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (int i = 0; is_ok && i < contestant->num_calls; i++) {
        is_ok = bench_cell_call(bench, cell, contestant, i % cell->num_sets);
    }
    is_ok = GPU_CALL(gpu, stream_end_capture, gpu->stream, &graph) && is_ok;
    is_ok = is_ok && GPU_CALL(gpu, graph_instantiate, &contestant->replay, graph, 0);
    if (graph != NULL) {
        (void)gpu->graph_destroy(graph);
    }
    return is_ok;
}

static void drop_replay(struct bench *bench, struct contestant *contestant)
{
    if (contestant->replay != NULL) {
        (void)bench->gpu.graph_exec_destroy(contestant->replay);
        contestant->replay = NULL;
    }
}

/* Time between two events, microseconds. */
static bool elapsed_us(struct bench *bench, CUevent begin, CUevent end, double *us)
{
    float ms = 0.0f;
    if (!GPU_CALL(&bench->gpu, event_synchronize, end) ||
        !GPU_CALL(&bench->gpu, event_elapsed_time, &ms, begin, end)) {
        return false;
    }
    *us = ms * 1e3;
    return true;
}

/* Times single calls: a first idea of a call's time, and everything that is loaded late is loaded.
 * */
static bool estimate_us(struct bench *bench, struct bench_cell *cell,
                        const struct contestant *contestant, CUevent begin, CUevent end,
                        double *call_us)
{
    enum { NUM_CALLS = 4 };
    bool is_ok = bench_cell_call(bench, cell, contestant, 0) &&
                 GPU_CALL(&bench->gpu, event_record, begin, bench->gpu.stream);
    for (int i = 0; is_ok && i < NUM_CALLS; i++) {
        is_ok = bench_cell_call(bench, cell, contestant, i % cell->num_sets);
    }
    is_ok = is_ok && GPU_CALL(&bench->gpu, event_record, end, bench->gpu.stream) &&
            elapsed_us(bench, begin, end, call_us);
    *call_us /= NUM_CALLS;
    return is_ok;
}

static bool prepare_replay(struct bench *bench, struct bench_cell *cell,
                           struct contestant *contestant, double replay_us, CUevent begin,
                           CUevent end)
{
    double call_us = 0.0;
    if (!estimate_us(bench, cell, contestant, begin, end, &call_us)) {
        return false;
    }
    double num_calls = replay_us / (call_us > 0.1 ? call_us : 0.1);
    contestant->num_calls = num_calls < 1.0                ? 1
                            : num_calls > MAX_REPLAY_CALLS ? MAX_REPLAY_CALLS
                                                           : (int)num_calls;
    return capture(bench, cell, contestant);
}

/* The fastest of the algorithms that cuBLASLt proposes: its own order is off by up to 14 %. */
static bool choose_algorithm(struct bench *bench, struct bench_cell *cell,
                             enum contestant_kind kind, const struct cublaslt_product *product,
                             CUevent begin, CUevent end)
{
    int num_algorithms = cublaslt_product_num_algorithms(product), best_idx = 0;
    double best_us = INFINITY;

    for (int i = 0; i < num_algorithms; i++) {
        struct contestant gemm = {.kind = kind, .name = "an algorithm of cuBLASLt"};
        cell->algorithm_idx[kind] = i;
        bool is_ok = prepare_replay(bench, cell, &gemm, 1000.0, begin, end);
        for (int j = 0; is_ok && j < 3; j++) {
            double us = 0.0;
            is_ok = GPU_CALL(&bench->gpu, event_record, begin, bench->gpu.stream) &&
                    GPU_CALL(&bench->gpu, graph_launch, gemm.replay, bench->gpu.stream) &&
                    GPU_CALL(&bench->gpu, event_record, end, bench->gpu.stream) &&
                    elapsed_us(bench, begin, end, &us);
            if (is_ok && us / gemm.num_calls < best_us) {
                best_us = us / gemm.num_calls;
                best_idx = i;
            }
        }
        drop_replay(bench, &gemm);
        if (!is_ok) {
            return false;
        }
    }
    cell->algorithm_idx[kind] = best_idx;
    return true;
}

/* ---- contestants ---- */

static struct contestant *add_contestant(struct bench_cell *cell, enum contestant_kind kind,
                                         const char *name)
{
    if (cell->num_contestants == BENCH_MAX_CONTESTANTS) {
        return NULL;
    }
    struct contestant *contestant = &cell->contestants[cell->num_contestants++];
    *contestant = (struct contestant){.kind = kind};
    snprintf(contestant->name, sizeof(contestant->name), "%s", name);
    return contestant;
}

/* A plan that is there already is not measured twice. */
static void add_gated_plan(const struct bench *bench, struct bench_cell *cell,
                           const struct imbrex_kernel_plan *plan, int gating_idx)
{
    enum imbrex_kernel_op op = (enum imbrex_kernel_op)bench->settings->op.value;
    struct imbrex_kernel_variant variant;

    for (int i = 0; i < cell->num_contestants; i++) {
        const struct contestant *other = &cell->contestants[i];
        if (other->kind == CONTESTANT_OURS && other->gating_idx == gating_idx &&
            other->plan.variant_idx == plan->variant_idx &&
            other->plan.cluster_m == plan->cluster_m && other->plan.cluster_n == plan->cluster_n &&
            other->plan.num_tiles_n == plan->num_tiles_n && other->plan.group_m == plan->group_m) {
            return;
        }
    }
    if (imbrex_kernel_variant_describe(op, plan->variant_idx, &variant, NULL) != IMBREX_STATUS_OK) {
        return;
    }
    struct contestant *contestant = add_contestant(cell, CONTESTANT_OURS, "");
    if (contestant == NULL) {
        return;
    }
    contestant->plan = *plan;
    contestant->gating_idx = gating_idx;
    if (bench->settings->group_m.given) {
        contestant->plan.group_m = (int32_t)bench->settings->group_m.value;
    }
    plan = &contestant->plan;
    bool is_named = bench->cells->num_gatings > 1 || bench_is_general(bench, gating_idx);
    snprintf(contestant->name, sizeof(contestant->name),
             "%s%s%s %dx%d cluster %dx%d group %d%s%.0d",
             is_named ? bench->cells->gatings[gating_idx].name : "", is_named ? " " : "",
             variant.schedule, (int)variant.block_m, (int)variant.block_n, (int)plan->cluster_m,
             (int)plan->cluster_n, (int)plan->group_m, plan->num_tiles_n != 0 ? " tiles " : "",
             (int)plan->num_tiles_n);
}

static void add_plan(const struct bench *bench, struct bench_cell *cell,
                     const struct imbrex_kernel_plan *plan)
{
    add_gated_plan(bench, cell, plan, 0);
}

static struct imbrex_kernel_shape shape_of(const struct bench *bench, const struct bench_cell *cell)
{
    return (struct imbrex_kernel_shape){
        .op = (enum imbrex_kernel_op)bench->settings->op.value,
        .m = (int32_t)cell->m,
        .n = (int32_t)cell->n,
        .k = (int32_t)cell->k,
        .is_general =
            bench->settings->op.value == IMBREX_KERNEL_OP_GEMM_SWIGLU && bench_is_general(bench, 0),
    };
}

/* The plan in each cluster, and in walks over one, two and four times as many rows. */
static void add_clusters(const struct bench *bench, struct bench_cell *cell,
                         const struct imbrex_kernel_shape *shape, struct imbrex_kernel_plan plan)
{
    static const int32_t clusters[][2] = {{1, 1}, {2, 1}, {1, 2}};
    int32_t group_rows = plan.group_m * plan.cluster_m, num_tiles_n = plan.num_tiles_n;
    plan.expected_us = 0.0; /* told of the plan that was chosen alone */
    struct imbrex_kernel_variant variant;

    if (imbrex_kernel_variant_describe(shape->op, plan.variant_idx, &variant, NULL) !=
        IMBREX_STATUS_OK) {
        return;
    }
    for (size_t i = 0; i < sizeof(clusters) / sizeof(clusters[0]); i++) {
        for (int32_t walk = 1; walk <= 4; walk *= 2) {
            if (walk > 1 && walk * group_rows / 2 * variant.block_m >= shape->m) {
                break;
            }
            for (int width = 0; width < 2; width++) {
                plan.cluster_m = clusters[i][0];
                plan.cluster_n = clusters[i][1];
                plan.group_m = walk * group_rows / plan.cluster_m;
                plan.num_tiles_n = width == 0 ? num_tiles_n : 0;
                if (imbrex_kernel_check(bench->device, shape, &plan, NULL) == IMBREX_STATUS_OK) {
                    add_plan(bench, cell, &plan);
                }
            }
        }
    }
}

static enum bench_schedule schedule_of(const struct imbrex_kernel_variant *variant)
{
    return strcmp(variant->schedule, "gate_first") == 0 ? SCHEDULE_GATE_FIRST
           : strcmp(variant->schedule, "pingpong") == 0 ? SCHEDULE_PINGPONG
                                                        : SCHEDULE_COOPERATIVE;
}

bool bench_add_plans(struct bench *bench, struct bench_cell *cell)
{
    struct imbrex_kernel_shape shape = shape_of(bench, cell);
    struct imbrex_kernel_plan plan, untuned, best[NUM_SCHEDULES];
    double least_us = INFINITY;
    struct imbrex_error err = {0};
    bool has_best[NUM_SCHEDULES] = {false};

    if (imbrex_kernel_choose(bench->device, &shape, IMBREX_KERNEL_ANY_VARIANT, &plan, &err) !=
        IMBREX_STATUS_OK) {
        (void)output_library_error(&err);
        return false;
    }
    add_plan(bench, cell, &plan);
    if (bench->description.tuned != NULL &&
        imbrex_kernel_choose(bench->device, &shape, IMBREX_KERNEL_ANY_UNTUNED, &untuned, NULL) ==
            IMBREX_STATUS_OK) {
        add_plan(bench, cell, &untuned);
    }
    if (bench->settings->plans.value != BENCH_PLANS_CHOSEN) {
        plan.expected_us = plan.num_tiles_n == 0 ? plan.expected_us : 0.0;
        plan.num_tiles_n = 0;
        add_plan(bench, cell, &plan);
    }
    /* Asked for one variant the library has nothing but its cost model to go by. */
    for (int32_t i = 0; i < imbrex_kernel_num_variants(shape.op); i++) {
        struct imbrex_kernel_variant variant;
        if (imbrex_kernel_choose(bench->device, &shape, i, &plan, NULL) != IMBREX_STATUS_OK ||
            imbrex_kernel_variant_describe(shape.op, i, &variant, NULL) != IMBREX_STATUS_OK ||
            variant.is_portable != bench->is_portable) {
            continue;
        }
        enum bench_schedule schedule = schedule_of(&variant);
        if (!has_best[schedule] || plan.expected_us < best[schedule].expected_us) {
            best[schedule] = plan;
            has_best[schedule] = true;
        }
        least_us = fmin(least_us, plan.expected_us);
    }
    for (int i = 0; i < NUM_SCHEDULES; i++) {
        if (has_best[i] &&
            (i == SCHEDULE_GATE_FIRST || bench->settings->plans.value != BENCH_PLANS_CHOSEN ||
             best[i].expected_us <= least_us)) {
            add_plan(bench, cell, &best[i]);
        }
    }
    for (int32_t i = 0; bench->settings->plans.value == BENCH_PLANS_ALL &&
                        i < imbrex_kernel_num_variants(shape.op);
         i++) {
        struct imbrex_kernel_variant variant;
        if (imbrex_kernel_choose(bench->device, &shape, i, &plan, NULL) == IMBREX_STATUS_OK &&
            imbrex_kernel_variant_describe(shape.op, i, &variant, NULL) == IMBREX_STATUS_OK &&
            variant.is_portable == bench->is_portable &&
            plan.expected_us < bench->settings->near.value * least_us) {
            add_clusters(bench, cell, &shape, plan);
        }
    }
    for (int i = 1; i < bench->cells->num_gatings; i++) {
        shape.is_general = bench_is_general(bench, i);
        if (imbrex_kernel_choose(bench->device, &shape, IMBREX_KERNEL_ANY_VARIANT, &plan, &err) !=
            IMBREX_STATUS_OK) {
            (void)output_library_error(&err);
            return false;
        }
        add_gated_plan(bench, cell, &plan, i);
    }
    return true;
}

/* One plan with all that may become of its Swish. */
static bool add_swish(struct bench *bench, struct bench_cell *cell)
{
    static const char *const names[BENCH_NUM_SWISH] = {
        [BENCH_SWISH_HIDDEN] = "hidden",
        [BENCH_SWISH_SERIALISED] = "serialised",
        [BENCH_SWISH_REMOVED] = "removed",
        [BENCH_SWISH_HELD] = "removed, turn held",
    };
    struct imbrex_kernel_plan plan = {0};

    if (!bench_gate_first_plan(bench, cell, &plan)) {
        return false;
    }
    add_plan(bench, cell, &plan);
    const struct contestant ours = cell->contestants[0];
    cell->num_contestants = 0;
    for (int i = 0; i < BENCH_NUM_SWISH; i++) {
        struct contestant *contestant = add_contestant(cell, CONTESTANT_SWISH, "");
        contestant->plan = ours.plan;
        contestant->swish = (enum bench_swish)i;
        snprintf(contestant->name, sizeof(contestant->name), "%.80s, swish %s", ours.name,
                 names[i]);
    }
    return true;
}

/* ---- measurement ---- */

/* What NVML says while events are waited for. */
struct sampler {
    double clock_sum, watts_sum;
    int num_clocks, num_watts;
};

static bool wait_for_event(struct bench *bench, CUevent event, struct sampler *sampler)
{
    CUresult result;
    while ((result = bench->gpu.event_query(event)) == CUDA_ERROR_NOT_READY) {
        double clock_mhz, watts;
        if (nvml_sm_clock_mhz(bench->nvml, &clock_mhz)) {
            sampler->clock_sum += clock_mhz;
            sampler->num_clocks++;
        }
        if (nvml_power_watts(bench->nvml, &watts)) {
            sampler->watts_sum += watts;
            sampler->num_watts++;
        }
        rest(500000);
    }
    return gpu_check(&bench->gpu, result, "event_query");
}

static int greatest_common_divisor(int a, int b)
{
    return b == 0 ? a : greatest_common_divisor(b, a % b);
}

/* In each pair another one goes first, and after another one: what ran before leaves its heat and
 * its part of the L2 cache behind. */
static int contestant_at(const struct bench_cell *cell, int pair_idx, int turn)
{
    int count = cell->num_contestants;
    int step = 1 + pair_idx * 7 % count;
    while (greatest_common_divisor(step, count) != 1) {
        step++;
    }
    return (int)(((int64_t)turn * step + pair_idx) % count);
}

/* events: [num_contestants + 1] */
static bool enqueue_pair(struct bench *bench, struct bench_cell *cell, int pair_idx,
                         const CUevent *events)
{
    struct gpu *gpu = &bench->gpu;
    bool is_ok = GPU_CALL(gpu, event_record, events[0], gpu->stream);
    for (int turn = 0; is_ok && turn < cell->num_contestants; turn++) {
        struct contestant *contestant = &cell->contestants[contestant_at(cell, pair_idx, turn)];
        is_ok = GPU_CALL(gpu, graph_launch, contestant->replay, gpu->stream) &&
                GPU_CALL(gpu, event_record, events[turn + 1], gpu->stream);
    }
    return is_ok;
}

static bool collect_pair(struct bench *bench, struct bench_cell *cell, int pair_idx,
                         const CUevent *events)
{
    for (int turn = 0; turn < cell->num_contestants; turn++) {
        struct contestant *contestant = &cell->contestants[contestant_at(cell, pair_idx, turn)];
        double us = 0.0;
        if (!elapsed_us(bench, events[turn], events[turn + 1], &us)) {
            return false;
        }
        contestant->us[pair_idx] = us / contestant->num_calls;
    }
    return true;
}

/* Replays everybody until the GPU has worked for num_ms; the replays are not timed. */
static bool warm_up(struct bench *bench, struct bench_cell *cell, double num_ms, CUevent event)
{
    struct sampler ignored = {0};
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        for (int i = 0; i < cell->num_contestants; i++) {
            if (!GPU_CALL(&bench->gpu, graph_launch, cell->contestants[i].replay,
                          bench->gpu.stream)) {
                return false;
            }
        }
        if (!GPU_CALL(&bench->gpu, event_record, event, bench->gpu.stream) ||
            !wait_for_event(bench, event, &ignored)) {
            return false;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begin.tv_sec) * 1e3 +
                 (double)(now.tv_nsec - begin.tv_nsec) * 1e-6 <
             num_ms);
    return true;
}

/* events: [num_pairs, num_contestants + 1] */
static bool run_pairs(struct bench *bench, struct bench_cell *cell, int num_pairs,
                      const CUevent *events)
{
    int stride = cell->num_contestants + 1;
    bool is_burst = bench->settings->clock.value == BENCH_CLOCK_BURST;
    bool is_sustained = bench->settings->clock.value == BENCH_CLOCK_SUSTAINED;
    struct sampler sampler = {0};

    if (!warm_up(bench, cell, is_sustained ? SUSTAINED_WARM_MS : 0.0, events[0])) {
        return false;
    }
    for (int i = 0; i < num_pairs; i++) {
        const CUevent *own = events + (size_t)i * (size_t)stride;
        if (is_burst) {
            /* The first work after a rest takes longer: it is nobody's time. */
            rest((long)(bench->settings->rest_ms.value * 1e6));
            if (!GPU_CALL(&bench->gpu, graph_launch, cell->contestants[0].replay,
                          bench->gpu.stream)) {
                return false;
            }
        }
        if (!enqueue_pair(bench, cell, i, own) ||
            (is_burst && !wait_for_event(bench, own[stride - 1], &sampler))) {
            return false;
        }
    }
    if (!wait_for_event(bench, events[(size_t)num_pairs * (size_t)stride - 1], &sampler)) {
        return false;
    }
    for (int i = 0; i < num_pairs; i++) {
        if (!collect_pair(bench, cell, i, events + (size_t)i * (size_t)stride)) {
            return false;
        }
    }
    cell->has_clock = sampler.num_clocks > 0;
    cell->has_watts = sampler.num_watts > 0;
    cell->clock_mhz = cell->has_clock ? sampler.clock_sum / sampler.num_clocks : 0.0;
    cell->watts = cell->has_watts ? sampler.watts_sum / sampler.num_watts : 0.0;
    return true;
}

/* Each contestant alone, with the energy counter read before and after. */
static bool measure_energy(struct bench *bench, struct bench_cell *cell, CUevent event)
{
    for (int i = 0; i < cell->num_contestants; i++) {
        struct contestant *contestant = &cell->contestants[i];
        struct sampler sampler = {0};
        double before = 0.0, after = 0.0;
        double replay_ms = contestant->time_us.median * contestant->num_calls * 1e-3;
        int num_replays = (int)ceil(bench->settings->energy_ms.value / replay_ms);
        if (!nvml_energy_joules(bench->nvml, &before)) {
            return true;
        }
        for (int j = 0; j < num_replays; j++) {
            if (!GPU_CALL(&bench->gpu, graph_launch, contestant->replay, bench->gpu.stream)) {
                return false;
            }
        }
        if (!GPU_CALL(&bench->gpu, event_record, event, bench->gpu.stream) ||
            !wait_for_event(bench, event, &sampler)) {
            return false;
        }
        if (nvml_energy_joules(bench->nvml, &after) && sampler.num_watts > 0) {
            contestant->has_energy = true;
            contestant->joules = (after - before) / ((double)num_replays * contestant->num_calls);
            contestant->energy_watts = sampler.watts_sum / sampler.num_watts;
            contestant->energy_clock_mhz =
                sampler.num_clocks > 0 ? sampler.clock_sum / sampler.num_clocks : 0.0;
        }
    }
    return true;
}

static double sum_of(const double *values, int count)
{
    double sum = 0.0;
    for (int i = 0; i < count; i++) {
        sum += values[i];
    }
    return sum;
}

/* Of contestants that are all of enum bench_swish, in its order. values: [num_pairs]. One pair's
 * times differ by as much as Swish takes: many pairs are summed up to HIDDEN_SHARES shares. */
static void find_hidden_share(struct bench_cell *cell, double *values, int num_pairs)
{
    const struct contestant *of = cell->contestants;
    cell->has_hidden_share =
        cell->num_contestants == BENCH_NUM_SWISH && of[0].kind == CONTESTANT_SWISH;
    if (!cell->has_hidden_share) {
        return;
    }
    int pairs = num_pairs < 2 * HIDDEN_SHARES ? 1 : num_pairs / HIDDEN_SHARES;
    int num_shares = num_pairs / pairs;
    for (int is_of_swish = 0; is_of_swish < 2; is_of_swish++) {
        for (int i = 0; i < num_shares; i++) {
            double us[BENCH_NUM_SWISH];
            for (int j = 0; j < BENCH_NUM_SWISH; j++) {
                us[j] = sum_of(of[j].us + (size_t)i * (size_t)pairs, pairs);
            }
            double seen_us = us[BENCH_SWISH_HIDDEN] - us[BENCH_SWISH_REMOVED];
            double whole_us = us[BENCH_SWISH_SERIALISED] -
                              us[is_of_swish != 0 ? BENCH_SWISH_HELD : BENCH_SWISH_REMOVED];
            values[i] = 1.0 - seen_us / whole_us;
        }
        *(is_of_swish != 0 ? &cell->hidden_share_of_swish : &cell->hidden_share) =
            spread_of(values, num_shares);
    }
    cell->pairs_of_share = pairs;
}

/* From the times of the pairs to what is told of them. */
static bool summarize(struct bench_cell *cell, int num_pairs)
{
    const struct contestant *gemm = NULL;
    double *ratios = malloc((size_t)num_pairs * sizeof(ratios[0]));
    if (ratios == NULL) {
        (void)output_out_of_memory();
        return false;
    }
    for (int i = 0; i < cell->num_contestants; i++) {
        if (cell->contestants[i].kind == CONTESTANT_GEMM) {
            gemm = &cell->contestants[i];
        }
    }
    for (int i = 0; gemm != NULL && i < cell->num_contestants; i++) {
        struct contestant *contestant = &cell->contestants[i];
        for (int j = 0; j < num_pairs; j++) {
            ratios[j] = gemm->us[j] / contestant->us[j];
        }
        contestant->gain = spread_of(ratios, num_pairs);
    }
    for (int i = 0; i < cell->num_contestants; i++) {
        struct contestant *contestant = &cell->contestants[i];
        for (int j = 0; j < num_pairs; j++) {
            ratios[j] = contestant->us[j] / cell->contestants[0].us[j];
        }
        contestant->over_chosen = spread_of(ratios, num_pairs);
    }
    find_hidden_share(cell, ratios, num_pairs);
    free(ratios);
    for (int i = 0; i < cell->num_contestants; i++) {
        struct contestant *contestant = &cell->contestants[i];
        contestant->time_us = spread_of(contestant->us, num_pairs);
    }
    return true;
}

bool bench_time_contestants(struct bench *bench, struct bench_cell *cell)
{
    int num_pairs = (int)bench->settings->num_pairs.value;
    size_t num_events = (size_t)num_pairs * ((size_t)cell->num_contestants + 1);
    CUevent *events = calloc(num_events, sizeof(CUevent));
    bool is_ok = events != NULL;

    for (int i = 0; is_ok && i < cell->num_contestants; i++) {
        cell->contestants[i].us = calloc((size_t)num_pairs, sizeof(double));
        is_ok = cell->contestants[i].us != NULL;
    }
    if (!is_ok) {
        (void)output_out_of_memory();
    }
    for (size_t i = 0; is_ok && i < num_events; i++) {
        is_ok = GPU_CALL(&bench->gpu, event_create, &events[i], CU_EVENT_DEFAULT);
    }
    double replay_ms = bench->settings->replay_ms.value;
    if (bench->settings->clock.value == BENCH_CLOCK_BURST) {
        replay_ms = fmin(replay_ms, BURST_PAIR_MS / cell->num_contestants);
    }
    for (int i = 0; is_ok && i < cell->num_contestants; i++) {
        is_ok = prepare_replay(bench, cell, &cell->contestants[i], replay_ms * 1e3, events[0],
                               events[1]);
    }
    is_ok = is_ok && run_pairs(bench, cell, num_pairs, events) && summarize(cell, num_pairs);
    if (is_ok && bench->settings->energy_ms.value > 0.0) {
        is_ok = measure_energy(bench, cell, events[0]);
    }
    for (size_t i = 0; events != NULL && i < num_events; i++) {
        if (events[i] != NULL) {
            (void)bench->gpu.event_destroy(events[i]);
        }
    }
    free(events);
    return is_ok;
}

void bench_cell_release(struct bench *bench, struct bench_cell *cell)
{
    for (int i = 0; i < cell->num_contestants; i++) {
        drop_replay(bench, &cell->contestants[i]);
        free(cell->contestants[i].us);
        cell->contestants[i].us = NULL;
    }
    cublaslt_product_destroy(cell->gemm);
    cublaslt_product_destroy(cell->slice_gemm);
    cell->gemm = cell->slice_gemm = NULL;
}

static bool has_baseline(const struct bench *bench, const struct bench_cell *cell,
                         enum bench_baselines baseline)
{
    return cell->slice_width > 0 && (bench->settings->baselines.value & (int64_t)baseline) != 0;
}

static bool prepare_baselines(struct bench *bench, struct bench_cell *cell, CUevent begin,
                              CUevent end)
{
    static const struct {
        enum bench_baselines baseline;
        enum contestant_kind kind;
    } kinds[] = {{BENCH_BASELINES_HEURISTIC, CONTESTANT_HEURISTIC},
                 {BENCH_BASELINES_STREAMS, CONTESTANT_STREAMS}};
    char name[64];

    if (cell->slice_width == 0) {
        return true;
    }
    bool is_ok =
        cublaslt_product_create(bench->lt, cell->m, cell->slice_width, cell->k, CUBLASLT_TYPE_BF16,
                                CUBLASLT_TYPE_BF16, BENCH_WORKSPACE_BYTES, &cell->slice_gemm);
    for (size_t i = 0; is_ok && i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (has_baseline(bench, cell, kinds[i].baseline)) {
            is_ok = choose_algorithm(bench, cell, kinds[i].kind, cell->slice_gemm, begin, end);
            snprintf(name, sizeof(name), "%s: %d slices of %d",
                     kinds[i].kind == CONTESTANT_STREAMS ? "streams" : "heuristic",
                     (int)cell->num_slices, (int)cell->slice_width);
            (void)add_contestant(cell, kinds[i].kind, name);
        }
    }
    return is_ok;
}

static bool prepare_peers(struct bench *bench, struct bench_cell *cell)
{
    CUevent events[2] = {NULL, NULL};
    bool is_ok =
        cublaslt_product_create(bench->lt, cell->m, cell->weight_rows, cell->k, CUBLASLT_TYPE_BF16,
                                CUBLASLT_TYPE_BF16, BENCH_WORKSPACE_BYTES, &cell->gemm) &&
        GPU_CALL(&bench->gpu, event_create, &events[0], CU_EVENT_DEFAULT) &&
        GPU_CALL(&bench->gpu, event_create, &events[1], CU_EVENT_DEFAULT) &&
        choose_algorithm(bench, cell, CONTESTANT_GEMM, cell->gemm, events[0], events[1]);
    if (is_ok) {
        (void)add_contestant(cell, CONTESTANT_GEMM, "cuBLASLt");
        if (cell->product_stride != 0) {
            (void)add_contestant(cell, CONTESTANT_UNFUSED, "cuBLASLt + activation");
        }
    }
    is_ok = is_ok && prepare_baselines(bench, cell, events[0], events[1]);
    for (int i = 0; i < 2; i++) {
        if (events[i] != NULL) {
            (void)bench->gpu.event_destroy(events[i]);
        }
    }
    return is_ok;
}

/* Contestants that are wrong are left out of the race, and make the run a failure. */
bool bench_check_contestants(struct bench *bench, struct bench_cell *cell, bool *all_right)
{
    int num_right = 0;
    for (int i = 0; i < cell->num_contestants; i++) {
        if (check_contestant(bench, cell, &cell->contestants[i])) {
            cell->contestants[num_right++] = cell->contestants[i];
        } else {
            *all_right = false;
        }
    }
    cell->num_contestants = num_right;
    return num_right > 0;
}

static bool measure_cell(struct bench *bench, struct bench_cell *cell, struct bench_report *report,
                         bool *all_right)
{
    bool is_ok = bench->settings->hidden_share
                     ? add_swish(bench, cell)
                     : bench_add_plans(bench, cell) && prepare_peers(bench, cell);
    return is_ok && bench_check_contestants(bench, cell, all_right) &&
           bench_time_contestants(bench, cell) && bench_report_add(report, bench, cell);
}

static int measure(struct bench *bench, const struct bench_ops_cells *cells)
{
    struct bench_report *report = bench_report_create(bench);
    struct bench_cell *cell = malloc(sizeof(*cell));
    bool is_ok = report != NULL && cell != NULL, all_right = true;

    for (int i = 0; is_ok && i < cells->num_shapes; i++) {
        for (int j = 0; is_ok && j < cells->num_rows; j++) {
            bench_cell_init(bench, &cells->shapes[i], cells->rows[j], cell);
            /* Whole before the first call, which is told that weights are settled. */
            is_ok = j > 0 || bench_fill_weights(bench, cell);
            if (is_ok && bench->settings->numerics) {
                is_ok = bench_numerics(bench, cell);
            } else if (is_ok && bench->settings->trace != NULL) {
                is_ok = bench_gate_first_trace(bench, cell, bench->settings->trace);
            } else if (is_ok) {
                is_ok = measure_cell(bench, cell, report, &all_right);
            }
            bench_cell_release(bench, cell);
        }
    }
    int exit_code = EXIT_CODE_FAILURE;
    if (is_ok) {
        exit_code = bench_report_finish(report, bench);
    }
    bench_report_destroy(report);
    free(cell);
    return all_right ? exit_code : EXIT_CODE_FAILURE;
}

int bench_ops_cuda(const struct bench_ops_settings *settings, const struct bench_ops_cells *cells)
{
    struct bench bench = {.settings = settings, .cells = cells};
    struct imbrex_device_options options = imbrex_device_options_default();
    struct imbrex_error err = {0};
    int exit_code = EXIT_CODE_FAILURE;

    options.overlap_launches = !settings->no_overlap;
    options.portable_kernels = settings->portable;
    /* Every plan of a sweep has boxes of its own. */
    options.max_tensor_maps = 16384;
    options.log = output_log;
    exit_code =
        tuned_choose("bench ops: ", settings->tuned, &options.tuned, &options.tuned_is_optional);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    exit_code = EXIT_CODE_FAILURE;
    if (imbrex_device_open(cells->device_idx, &options, &bench.device, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    imbrex_device_describe(bench.device, &bench.description);
    bench.is_portable = settings->portable || bench.description.compute_capability != 90;
    if (gpu_open(cells->device_idx, &bench.gpu)) {
        bench.nvml = nvml_open(bench.gpu.pci_bus_id);
        bool has_gate_first =
            (!settings->hidden_share && settings->trace == NULL) || bench_gate_first_open(&bench);
        if (has_gate_first && cublaslt_open(settings->cublaslt, &bench.lt) &&
            allocate_pools(&bench, cells) && bench_streams_create(&bench)) {
            exit_code = measure(&bench, cells);
        }
        bench_streams_destroy(&bench);
        bench_pools_free(&bench);
        bench_gate_first_close(&bench);
        cublaslt_close(bench.lt);
        nvml_close(bench.nvml);
        gpu_close(&bench.gpu);
    }
    imbrex_device_close(bench.device);
    return exit_code;
}
