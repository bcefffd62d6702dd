/* SPDX-License-Identifier: Apache-2.0 */
/* The cost of a plan is made of two times that overlap. One is what the SMs take: tiles are dealt
 * out in waves, so a product whose tiles fill a last wave badly pays for a whole one; this is what
 * decides below about 1024 rows. The other is what the memory takes to bring weights and
 * activations and to take the result. */
#include "ops/cuda/tile_choice.h"

#include <inttypes.h>
#include <math.h>

#include "ops/cuda/kernels/gemm_swiglu_params.h"

/* What an SM multiplies in a clock: pairs of bf16. */
#define MACS_PER_CLOCK 2048.0
#define BF16_BYTES 2

#define MAX_CLUSTER 4
#define MAX_BLOCKS INT32_MAX

/* Clocks that a schedule takes beside its products. */
struct schedule_cost {
    double rate;         /* of MACS_PER_CLOCK, in the main loop */
    double k_block;      /* of a step along k */
    double tile;         /* of a tile: its first loads, and what no other tile hides */
    double tile_element; /* of each of its results, the same */
    double end_element;  /* of each result of the last tile, which no other hides */
};

/* Fitted by tools/fit_tile_costs.py to what one H200 took (imbrex bench ops --plans all,
 * 2026-11-29): gemm_swiglu in 42 cells, gemm in 21, every variant that is not hopeless in three
 * clusters. Fitted are the differences between plans of a cell, so the clock drops out, and
 * CLOCK_MHZ only sets the scale. The chosen plan took 0.6 % (gemm: 1.0 %) longer in geometric mean
 * than the best of its cell, of which the repetition of a measurement is a good part. */
static const struct schedule_cost schedule_costs[] = {
    [TILE_SCHEDULE_pingpong] = {.rate = 0.941,
                                .k_block = 11.6,
                                .tile = 1030.0,
                                .end_element = 0.309},
    [TILE_SCHEDULE_cooperative] = {.rate = 0.919, .tile = 117.0, .tile_element = 0.297},
    /* As pingpong. Its tiles are never chosen by cost, but ordered among themselves. */
    [TILE_SCHEDULE_gate_first] = {.rate = 0.941,
                                  .k_block = 11.6,
                                  .tile = 1030.0,
                                  .end_element = 0.309},
};

#define CLOCK_MHZ 1700.0
#define ONE_WARPGROUP_ROWS 64
#define ONE_WARPGROUP_CLOCKS 30.0 /* of a step along k of a tile that is no higher than that */
#define FEED_BYTES_PER_CLOCK 72.2 /* from L2 into one SM while all load */
#define SHARED_LOAD_SHARE 0.90    /* of a load that the tiles of a cluster share */
/* Of gate_first, which loads more than it multiplies: orders its tiles as 7B, M 2048 and 512, and
 * 72B, M 1024 did, 64x384 before 128x192 and both in clusters along m first. */
#define GATE_FIRST_SHARED_WEIGHTS 0.60
#define CLUSTER_TILE_CLOCKS 200.0 /* of a tile, for each other tile in its cluster */
#define CLUSTER_LAUNCH_CLOCKS 2300.0
#define MEMORY_BYTES_PER_CLOCK 3870.0
#define LAUNCH_CLOCKS 25800.0
/* Two limits that overlap but for the beginning and the end of each: the norm of this exponent. */
#define OVERLAP_EXPONENT 6.4

/* The portable kernels, of each step of 16 along k; fitted by hand to what one H200 took for the
 * gate and up of Qwen2.5 0.5B and 7B (imbrex bench ops --portable --plans all). Others multiply at
 * other rates, but what orders the tiles is how these clocks stand to each other. */
#define PORTABLE_STEP_K 16
#define PORTABLE_STEP_CLOCKS 40.0
#define PORTABLE_MACS_PER_CLOCK 906.0
/* Of a tile while no other is on the SM: 8 warps are enough to keep it busy. */
#define PORTABLE_ALONE 1.2
#define PORTABLE_ALONE_CLOCKS 30.0
/* Of each result; twice where no other tile on the SM hides it. */
#define PORTABLE_ELEMENT_CLOCKS 0.18
#define PORTABLE_SHARED_THREADS 128 /* a thread block of more has the SM for itself */
/* Sizes are counted up to the next tile and stage in 32 bits. */
#define PORTABLE_MAX_SIDE (INT32_MAX - 1024)

/* Clusters that are tried. */
static const struct {
    int32_t m, n;
} cluster_shapes[] = {{1, 1}, {2, 1}, {1, 2}};

/* Rows of A that a group of tiles walks over before it goes on to the next weights, so that both
 * stay in L2. */
#define GROUP_ROWS 1024

static int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* How many tiles can make up n exactly when some of them are a piece narrower: from *least, nearly
 * all wide, to *most, nearly all narrow. */
static void tile_count_range(const struct kernel_variant *kernel,
                             const struct tile_problem *problem, int64_t *least, int64_t *most)
{
    int64_t num_pieces = divide_up(problem->columns, tile_piece_columns(kernel));
    int64_t wide_pieces = kernel->block_n / TILE_PIECE_ROWS;
    *least = divide_up(num_pieces, wide_pieces);
    *most = num_pieces / (wide_pieces - 1);
}

struct tile_grid tile_grid_of(const struct tile_machine *machine,
                              const struct tile_problem *problem, const struct tile_plan *plan)
{
    const struct kernel_variant *kernel = kernel_table_at(plan->kernel_idx);
    int64_t num_pieces = divide_up(problem->columns, tile_piece_columns(kernel));
    int64_t wide_pieces = kernel->block_n / TILE_PIECE_ROWS;
    struct tile_grid grid = {
        .num_blocks_m = divide_up(problem->m, (int64_t)kernel->block_m * plan->cluster_m),
        .num_clusters = machine->num_sms / (plan->cluster_m * plan->cluster_n),
    };
    if (plan->num_tiles_n == 0) {
        grid.num_tiles_n = divide_up(problem->columns, tile_columns(kernel));
        grid.num_wide = grid.num_tiles_n;
    } else {
        grid.num_tiles_n = plan->num_tiles_n;
        grid.num_wide = num_pieces - grid.num_tiles_n * (wide_pieces - 1);
    }
    grid.num_blocks_n = divide_up(grid.num_tiles_n, plan->cluster_n);
    int64_t num_blocks = grid.num_blocks_m * grid.num_blocks_n;
    if (grid.num_clusters > num_blocks) {
        grid.num_clusters = num_blocks;
    }
    grid.num_waves = grid.num_clusters == 0 ? 0 : divide_up(num_blocks, grid.num_clusters);
    return grid;
}

static bool is_cluster_size(int32_t size)
{
    return size == 1 || size == 2 || size == 4;
}

/* Numbers that are wrong for any problem. */
static enum imbrex_status check_numbers(const struct tile_plan *plan, struct imbrex_error *err)
{
    if (plan->kernel_idx < 0 || plan->kernel_idx >= kernel_table_count()) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "plan: variant: expected one of the op's, found none of this number");
    }
    if (!is_cluster_size(plan->cluster_m) || !is_cluster_size(plan->cluster_n) ||
        plan->cluster_m * plan->cluster_n > MAX_CLUSTER) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "plan: cluster: expected sides of 1, 2 or 4 and at most %d tiles, found "
                         "%d x %d",
                         MAX_CLUSTER, (int)plan->cluster_m, (int)plan->cluster_n);
    }
    if (plan->group_m < 1) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "plan: group_m: expected at least 1, found %d", (int)plan->group_m);
    }
    return IMBREX_STATUS_OK;
}

/* What the two kinds of kernels ask for: the copy engine, or the absence of clusters. */
static enum imbrex_status check_kind(const struct tile_machine *machine,
                                     const struct kernel_variant *kernel,
                                     const struct tile_problem *problem,
                                     const struct tile_plan *plan, struct imbrex_error *err)
{
    if (!kernel->is_portable) {
        if (machine->is_portable) {
            return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: needs compute capability 9.0, whose matrix instructions no other "
                             "has, and a device that was not opened for portable kernels",
                             kernel->name);
        }
        /* Measured on an H200: of a row whose end lies inside a piece the copy engine overwrites
         * what follows, up to the end of the piece. Reading, it fills up with zeros from the end of
         * the row on. */
        if (problem->columns % TILE_STORE_COLUMNS != 0) {
            return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: expected a multiple of %d as n, because the copy engine stores "
                             "whole pieces of 16 bytes, found %d",
                             kernel->name, TILE_STORE_COLUMNS, (int)problem->columns);
        }
        return IMBREX_STATUS_OK;
    }
    if (plan->cluster_m != 1 || plan->cluster_n != 1 || plan->num_tiles_n != 0) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: has no clusters, which need compute capability 9.0, and tiles of "
                         "one width: expected clusters of 1 x 1 and num_tiles_n 0, found %d x %d "
                         "and %d",
                         kernel->name, (int)plan->cluster_m, (int)plan->cluster_n,
                         (int)plan->num_tiles_n);
    }
    if (problem->m > PORTABLE_MAX_SIDE || problem->columns > PORTABLE_MAX_SIDE ||
        problem->k > PORTABLE_MAX_SIDE) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: expected sides of at most %d, found m %d, n %d, k %d", kernel->name,
                         PORTABLE_MAX_SIDE, (int)problem->m, (int)problem->columns,
                         (int)problem->k);
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status tile_check(const struct tile_machine *machine,
                              const struct tile_problem *problem, const struct tile_plan *plan,
                              struct imbrex_error *err)
{
    TRY(check_numbers(plan, err));
    const struct kernel_variant *kernel = kernel_table_at(plan->kernel_idx);

    if (problem->m < 1 || problem->columns < 1 || problem->k < 1) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "shape: expected sides of at least 1, found m %d, n %d, k %d",
                         (int)problem->m, (int)problem->columns, (int)problem->k);
    }
    if (!kernel_serves(kernel, problem->form)) {
        static const char *const forms[] = {
            [TILE_FORM_PAIR] = "one view of gate and up",
            [TILE_FORM_SPLIT] = "gate and up apart",
            [TILE_FORM_PLAIN] = "one matrix of weights",
            [TILE_FORM_GENERAL_PAIR] = "one view of gate and up for any gating",
            [TILE_FORM_GENERAL_SPLIT] = "gate and up apart for any gating",
        };
        return error_set(err, IMBREX_STATUS_UNSUPPORTED, "%s: reads %s, the shape has %s",
                         kernel->name, forms[kernel->form], forms[problem->form]);
    }
    TRY(check_kind(machine, kernel, problem, plan, err));
    if (kernel->shared_bytes > machine->max_shared_bytes) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: its %d stages take %d bytes of shared memory, a thread block of this "
                         "GPU has %d",
                         kernel->name, (int)kernel->num_stages, (int)kernel->shared_bytes,
                         (int)machine->max_shared_bytes);
    }
    if (machine->num_sms < plan->cluster_m * plan->cluster_n) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: a cluster of %d x %d tiles needs as many SMs, this GPU has %d",
                         kernel->name, (int)plan->cluster_m, (int)plan->cluster_n,
                         (int)machine->num_sms);
    }
    if (plan->num_tiles_n != 0 && tile_form_is_general(kernel->form)) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: has tiles of one width alone: expected 0 as num_tiles_n, found %d",
                         kernel->name, (int)plan->num_tiles_n);
    }
    int64_t least_tiles, most_tiles;
    tile_count_range(kernel, problem, &least_tiles, &most_tiles);
    if (plan->num_tiles_n != 0 &&
        (plan->num_tiles_n < least_tiles || plan->num_tiles_n > most_tiles)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "plan: num_tiles_n: expected 0, or %" PRId64 " to %" PRId64
                         " tiles that %s makes %d or %d rows of weights wide, found %d",
                         least_tiles, most_tiles, kernel->name,
                         (int)(kernel->block_n - TILE_PIECE_ROWS), (int)kernel->block_n,
                         (int)plan->num_tiles_n);
    }
    struct tile_grid grid = tile_grid_of(machine, problem, plan);
    if (grid.num_blocks_m * grid.num_blocks_n > MAX_BLOCKS) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: counts tiles in 32 bits, m %d and n %d make %" PRId64, kernel->name,
                         (int)problem->m, (int)problem->columns,
                         grid.num_blocks_m * grid.num_blocks_n);
    }
    return IMBREX_STATUS_OK;
}

static double overlapped(double a, double b)
{
    return pow(pow(a, OVERLAP_EXPONENT) + pow(b, OVERLAP_EXPONENT), 1.0 / OVERLAP_EXPONENT);
}

/* Clocks of a step of GEMM_TILE_BLOCK_K: its products, over its loads, which narrower tiles have as
 * many of; gate_first takes it in two, gate and up, and loads A for each. */
static double k_block_clocks(const struct kernel_variant *kernel, const struct tile_plan *plan,
                             int32_t width)
{
    const struct schedule_cost *schedule = &schedule_costs[kernel->schedule];
    bool is_gate_first = kernel->schedule == TILE_SCHEDULE_gate_first;
    double num_passes = is_gate_first ? 2.0 : 1.0;
    double step_clocks =
        schedule->k_block +
        (kernel->block_m <= ONE_WARPGROUP_ROWS && !is_gate_first ? ONE_WARPGROUP_CLOCKS : 0.0);
    double products =
        (double)kernel->block_m * width * GEMM_TILE_BLOCK_K / (MACS_PER_CLOCK * schedule->rate) +
        num_passes * step_clocks;
    double a_rows = num_passes * kernel->block_m * (plan->cluster_n > 1 ? SHARED_LOAD_SHARE : 1.0);
    double shared_weights = is_gate_first ? GATE_FIRST_SHARED_WEIGHTS : SHARED_LOAD_SHARE;
    double weight_rows = kernel->block_n * (plan->cluster_m > 1 ? shared_weights : 1.0);
    double loads = (a_rows + weight_rows) * GEMM_TILE_BLOCK_K * BF16_BYTES / FEED_BYTES_PER_CLOCK;
    return overlapped(products, loads);
}

/* Clocks of a tile of `width` rows of weights. */
static double tile_clocks(const struct kernel_variant *kernel, const struct tile_problem *problem,
                          const struct tile_plan *plan, int32_t width)
{
    const struct schedule_cost *schedule = &schedule_costs[kernel->schedule];
    double num_k_blocks = (double)divide_up(problem->k, GEMM_TILE_BLOCK_K);
    double num_neighbours = plan->cluster_m * plan->cluster_n - 1;
    double num_elements = (double)kernel->block_m * width * tile_columns(kernel) / kernel->block_n;
    return num_k_blocks * k_block_clocks(kernel, plan, width) + schedule->tile +
           schedule->tile_element * num_elements + CLUSTER_TILE_CLOCKS * num_neighbours;
}

/* Clocks in which the memory brings and takes what it has to. */
static double memory_clocks_of(const struct tile_problem *problem)
{
    double m = problem->m, columns = problem->columns, k = problem->k;
    double weight_rows = problem->form == TILE_FORM_PLAIN ? columns : 2.0 * columns;
    return (m * k + weight_rows * k + m * columns) * BF16_BYTES / MEMORY_BYTES_PER_CLOCK;
}

/* Tiles are dealt out as SMs become free, and those on one SM share it. */
static double portable_cost_us(const struct tile_machine *machine,
                               const struct tile_problem *problem, const struct tile_plan *plan,
                               const struct kernel_variant *kernel)
{
    struct tile_grid grid = tile_grid_of(machine, problem, plan);
    double num_steps = (double)divide_up(problem->k, PORTABLE_STEP_K);
    double step =
        (double)kernel->block_m * kernel->block_n * PORTABLE_STEP_K / PORTABLE_MACS_PER_CLOCK +
        PORTABLE_STEP_CLOCKS;
    double alone = PORTABLE_ALONE * step + PORTABLE_ALONE_CLOCKS;
    double end = PORTABLE_ELEMENT_CLOCKS * kernel->block_m * tile_columns(kernel);
    if (kernel->num_threads > PORTABLE_SHARED_THREADS) {
        alone = step;
        end *= 2.0;
    }
    double num_tiles = (double)divide_up(grid.num_blocks_m * grid.num_blocks_n, machine->num_sms);
    double clocks = num_steps * (alone + (num_tiles - 1.0) * step) + num_tiles * end;
    return (LAUNCH_CLOCKS + overlapped(clocks, memory_clocks_of(problem))) / CLOCK_MHZ;
}

double tile_cost_us(const struct tile_machine *machine, const struct tile_problem *problem,
                    const struct tile_plan *plan)
{
    const struct kernel_variant *kernel = kernel_table_at(plan->kernel_idx);
    if (kernel->is_portable) {
        return portable_cost_us(machine, problem, plan, kernel);
    }
    const struct schedule_cost *schedule = &schedule_costs[kernel->schedule];
    struct tile_grid grid = tile_grid_of(machine, problem, plan);
    double num_neighbours = plan->cluster_m * plan->cluster_n - 1;
    double num_elements = (double)kernel->block_m * tile_columns(kernel);
    double fixed_clocks = LAUNCH_CLOCKS + CLUSTER_LAUNCH_CLOCKS * num_neighbours +
                          schedule->end_element * num_elements;

    /* Wide tiles come first, so every SM gets about as many of them. */
    double wide = tile_clocks(kernel, problem, plan, kernel->block_n);
    double wave_clocks = (double)grid.num_waves * wide;
    if (grid.num_wide < grid.num_tiles_n) {
        double narrow = tile_clocks(kernel, problem, plan, kernel->block_n - TILE_PIECE_ROWS);
        int64_t num_wide_blocks = grid.num_blocks_m * divide_up(grid.num_wide, plan->cluster_n);
        int64_t num_wide_waves = divide_up(num_wide_blocks, grid.num_clusters);
        wave_clocks =
            (double)num_wide_waves * wide + (double)(grid.num_waves - num_wide_waves) * narrow;
    }

    return (fixed_clocks + overlapped(wave_clocks, memory_clocks_of(problem))) / CLOCK_MHZ;
}

/* Narrower tiles, as many as the waves have room for that all wide ones take anyway. 0: no use. */
static int32_t choose_num_tiles_n(const struct tile_machine *machine,
                                  const struct tile_problem *problem, const struct tile_plan *plan)
{
    const struct kernel_variant *kernel = kernel_table_at(plan->kernel_idx);
    struct tile_grid grid = tile_grid_of(machine, problem, plan);
    int64_t least_tiles, most_tiles;
    tile_count_range(kernel, problem, &least_tiles, &most_tiles);
    int64_t num_clusters = machine->num_sms / (plan->cluster_m * plan->cluster_n);
    int64_t num_tiles =
        grid.num_waves * num_clusters / grid.num_blocks_m * (int64_t)plan->cluster_n;
    if (num_tiles > most_tiles) {
        num_tiles = most_tiles;
    }
    return num_tiles > grid.num_tiles_n ? (int32_t)num_tiles : 0;
}

static int32_t choose_group_m(const struct kernel_variant *kernel, int32_t cluster_m)
{
    int32_t group_m = GROUP_ROWS / (kernel->block_m * cluster_m);
    return group_m > 0 ? group_m : 1;
}

enum imbrex_status tile_choose(const struct tile_machine *machine,
                               const struct tile_problem *problem, int32_t begin, int32_t end,
                               struct tile_plan *plan, struct imbrex_error *err)
{
    struct imbrex_error reason;
    struct tile_plan best = {.kernel_idx = -1};
    double best_us = 0.0;
    enum imbrex_status status =
        error_set(&reason, IMBREX_STATUS_UNSUPPORTED, "no variant is made for this shape");

    for (int32_t kernel_idx = begin; kernel_idx < end; kernel_idx++) {
        const struct kernel_variant *kernel = kernel_table_at(kernel_idx);
        /* Not a reason to report, unless it is the only one. A GPU that has kernels of its own does
         * without the portable ones, unless they are asked for; gate_first runs where it is asked
         * for or was measured: by cost it always loses, since it reads A twice. */
        if (end - begin > 1 && (!kernel_serves(kernel, problem->form) ||
                                kernel->schedule == TILE_SCHEDULE_gate_first ||
                                kernel->is_portable != machine->is_portable)) {
            continue;
        }
        /* Each cluster with wide tiles alone, then with as many narrower ones as fit. */
        size_t num_clusters = sizeof(cluster_shapes) / sizeof(cluster_shapes[0]);
        for (size_t i = 0; i < (kernel->is_portable ? 1 : 2 * num_clusters); i++) {
            struct tile_plan candidate = {
                .kernel_idx = kernel_idx,
                .cluster_m = cluster_shapes[i / 2].m,
                .cluster_n = cluster_shapes[i / 2].n,
                .group_m = choose_group_m(kernel, cluster_shapes[i / 2].m),
            };
            enum imbrex_status checked = tile_check(machine, problem, &candidate, &reason);
            if (checked != IMBREX_STATUS_OK) {
                status = checked;
                continue;
            }
            if (i % 2 == 1 && tile_form_is_general(kernel->form)) {
                continue;
            }
            if (i % 2 == 1) {
                candidate.num_tiles_n = choose_num_tiles_n(machine, problem, &candidate);
            }
            double cost_us = tile_cost_us(machine, problem, &candidate);
            if (best.kernel_idx < 0 || cost_us < best_us) {
                best = candidate;
                best_us = cost_us;
            }
        }
    }
    if (best.kernel_idx < 0) {
        return error_set(err, status, "%s", reason.message);
    }
    *plan = best;
    return IMBREX_STATUS_OK;
}
