/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench ops on a CPU: in each cell, an op of a model at a number of rows, every kernel path
 * is proved against the reference and then timed in turns with the others. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>

#include "base/thread_pool.h"
#include "bench/cpu/cpu_cell.h"
#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "cli/roofs.h"
#include "cli/signals.h"
#include "cli/spread.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/dot_few.h"
#include "ops/few_ways.h"
#include "ops/ops_loop.h"

#define MAX_CONTESTANTS (CONTESTANT_COUNT * CPU_NUM_PATHS)
#define SAMPLE_US 2000.0    /* calls of a sample take that long together, if one does not */
#define CELL_SECONDS 10.0   /* then pairs end early, but not before MIN_PAIRS */
#define MIN_PAIRS 3         /* fewer have no median */
#define MAX_REF_FLOPS 100e6 /* the reference takes a second for ten times as many */
#define MAX_ERROR 1e-4      /* of a path against the reference, relative to the largest result */
#define MEMORY_SHARE 0.5    /* of the machine's: a cell that needs more is left out */

/* An op as it is, the MLP as two products and a pass, an op by one of the ways to read weights. */
enum contestant_kind {
    CONTESTANT_OP,
    CONTESTANT_UNFUSED,
    CONTESTANT_STREAMS,
    CONTESTANT_ORDERED,
    CONTESTANT_COUNT
};
static const char *const contestant_names[CONTESTANT_COUNT] = {"op", "unfused", "streams",
                                                               "ordered"};

struct contestant {
    const struct cpu_path *path;
    struct ops *ops;
    enum contestant_kind kind;
    double error;
    int32_t num_calls; /* in a sample */
    double *us;        /* [num_pairs], of a call */
};

/* What the machine could do when a pair was run. */
struct pair_rates {
    double memory, arithmetic; /* bytes/s, operations/s */
};

struct ops_bench {
    const struct bench_ops_settings *settings;
    const struct bench_ops_cells *cells;
    struct ops *ops[CPU_NUM_PATHS]; /* NULL: not asked for, or not of this machine */
    struct ops *reference;
    void *scratch; /* shared: one of them works at a time */
    int32_t num_threads, max_rows;
    struct roofs *roofs;      /* NULL: not to be measured */
    struct pair_rates *rates; /* [num_pairs] */
    double *ratios;           /* [num_pairs] */
    double *us;               /* [MAX_CONTESTANTS * num_pairs] */
    json_t *rows, *skipped;
};

/* ---- figures --------------------------------------------------------------------------------- */

static double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

/* ---- roofs ----------------------------------------------------------------------------------- */

/* Products with quantised weights are sums of integers. */
static enum roof_kind arithmetic_of(const struct cpu_cell *cell)
{
    bool is_integer = cpu_op_has_weights(cell->op) && dtype_is_quantized(cell->dtype);
    return is_integer && roof_instructions(NULL, ROOF_KIND_INT8) != NULL ? ROOF_KIND_INT8
                                                                         : ROOF_KIND_FP32;
}

/* Its name in tables; of ops that the rate of memory does not bound, which no roof here does. */
static const char *bound_name(enum roof_kind bound)
{
    return bound == ROOF_KIND_COUNT ? "cache" : roof_kind_name(bound);
}

/* The least time of a call at these rates, and by which of them; 0 if they were not measured, or
 * bound it not (*bound is ROOF_KIND_COUNT then). */
static double least_us(const struct cpu_cell *cell, const struct pair_rates *rates,
                       enum roof_kind *bound)
{
    double compute_us = 0.0, memory_us = 0.0;
    if (!cpu_op_reads_memory(cell->op)) {
        *bound = ROOF_KIND_COUNT;
        return 0.0;
    }
    if (rates->arithmetic > 0.0 && rates->memory > 0.0) {
        compute_us = cpu_cell_flops(cell) * 1e6 / rates->arithmetic;
        memory_us = cpu_cell_num_bytes(cell) * 1e6 / rates->memory;
    }
    *bound = memory_us > compute_us ? ROOF_KIND_READ : arithmetic_of(cell);
    return fmax(memory_us, compute_us);
}

static struct pair_rates measure_roofs(struct ops_bench *bench, const struct cpu_cell *cell)
{
    return (struct pair_rates){.memory = roofs_measure(bench->roofs, ROOF_KIND_READ),
                               .arithmetic = roofs_measure(bench->roofs, arithmetic_of(cell))};
}

/* The best of a cell's pairs: what the machine can do, rather than what it did at a time. */
static struct pair_rates best_rates(const struct ops_bench *bench, int32_t num_pairs)
{
    struct pair_rates best = {0.0, 0.0};
    for (int32_t pair = 0; pair < num_pairs; pair++) {
        best.memory = fmax(best.memory, bench->rates[pair].memory);
        best.arithmetic = fmax(best.arithmetic, bench->rates[pair].arithmetic);
    }
    return best;
}

/* ---- a cell ---------------------------------------------------------------------------------- */

static void cell_name(const struct cpu_cell *cell, char name[96])
{
    snprintf(name, 96, "%s %s %s m %d", bench_op_name(cell->op), cell->shape->name,
             cpu_op_has_weights(cell->op) ? dtype_name(cell->dtype) : "F32", (int)cell->num_rows);
}

static enum few_way few_way_of(enum contestant_kind kind)
{
    return kind == CONTESTANT_STREAMS   ? FEW_WAY_STREAMS
           : kind == CONTESTANT_ORDERED ? FEW_WAY_ORDERED
                                        : FEW_WAY_COUNT;
}

/* Whether an op may read weights in several ways. */
static bool has_ways(const struct contestant *contestant, const struct cpu_cell *cell)
{
    const struct cpu_kernels *kernels = ops_kernels(contestant->ops);
    return cpu_op_has_weights(cell->op) &&
           (dtype_is_quantized(cell->dtype)
                ? cell->num_rows == 1 && kernels->has_quant_ways
                : cell->num_rows <= FEW_MAX_ROWS && kernels->has_few_ways);
}

/* A sample of a contestant: the time of a call, microseconds. */
static double time_calls(struct cpu_cell *cell, const struct contestant *contestant,
                         int32_t num_calls, int32_t *copy_idx)
{
    ops_set_few_way(contestant->ops, few_way_of(contestant->kind));
    double begin = now_us();
    for (int32_t i = 0; i < num_calls; i++) {
        *copy_idx = (*copy_idx + 1) % cell->num_copies;
        cpu_cell_call(cell, contestant->ops, contestant->kind == CONTESTANT_UNFUSED, *copy_idx);
    }
    return (now_us() - begin) / num_calls;
}

/* Who is there: each path, for the MLP its unfused pair too, and the ways if they are asked for. */
static int32_t choose_contestants(struct ops_bench *bench, const struct cpu_cell *cell,
                                  struct contestant contestants[MAX_CONTESTANTS])
{
    int32_t count = 0;
    bool only_ref = bench->settings->cpu.value == 0;
    for (int path = CPU_NUM_PATHS - 1; path >= 0; path--) {
        bool is_slow = path == 0 && cpu_cell_flops(cell) > MAX_REF_FLOPS && !only_ref;
        for (int kind = 0; kind < CONTESTANT_COUNT && bench->ops[path] != NULL && !is_slow;
             kind++) {
            struct contestant contestant = {.path = &cpu_paths[path],
                                            .ops = bench->ops[path],
                                            .kind = (enum contestant_kind)kind,
                                            .us = bench->us + (int64_t)count *
                                                                  bench->settings->num_pairs.value};
            bool is_there = kind == CONTESTANT_UNFUSED ? cell->op == BENCH_OP_GEMM_SWIGLU
                            : kind == CONTESTANT_OP
                                ? true
                                : bench->settings->ways && has_ways(&contestant, cell);
            if (is_there) {
                contestants[count++] = contestant;
            }
        }
    }
    return count;
}

static int check_contestants(struct ops_bench *bench, struct cpu_cell *cell,
                             struct contestant *contestants, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        struct contestant *contestant = &contestants[i];
        char name[96];
        ops_set_few_way(contestant->ops, few_way_of(contestant->kind));
        bool is_written =
            cpu_cell_check(cell, contestant->ops, bench->reference,
                           contestant->kind == CONTESTANT_UNFUSED, &contestant->error);
        if (!is_written || !(contestant->error <= MAX_ERROR)) {
            cell_name(cell, name);
            output_error("bench ops: %s: %s (%s) is wrong: %s, the largest difference is %g of "
                         "the largest result, expected at most %g; not timed",
                         name, contestant->path->name, contestant_names[contestant->kind],
                         is_written ? "all results are there" : "not all results are written",
                         contestant->error, MAX_ERROR);
            return EXIT_CODE_FAILURE;
        }
    }
    return EXIT_CODE_OK;
}

/* In turns: pairs begin with different ones and go through them in both directions, so that nobody
 * always comes after the same one. Returns the pairs. */
static int32_t time_contestants(struct ops_bench *bench, struct cpu_cell *cell,
                                struct contestant *contestants, int32_t count)
{
    int32_t copy_idx = 0, pair = 0;
    for (int32_t i = 0; i < count; i++) {
        /* Until the ops have chosen among their ways. */
        if (has_ways(&contestants[i], cell)) {
            (void)time_calls(cell, &contestants[i], FEW_WAY_COUNT * FEW_WAY_TRIALS, &copy_idx);
        }
        double once_us = time_calls(cell, &contestants[i], 1, &copy_idx);
        contestants[i].num_calls = (int32_t)fmin(fmax(SAMPLE_US / once_us, 1.0), 1e5);
    }
    double begin = now_us();
    for (; pair < bench->settings->num_pairs.value && signals_interrupt() == 0; pair++) {
        if (pair >= MIN_PAIRS && now_us() - begin > CELL_SECONDS * 1e6) {
            break;
        }
        if (bench->roofs != NULL) {
            bench->rates[pair] = measure_roofs(bench, cell);
        }
        for (int32_t i = 0; i < count; i++) {
            int32_t turn = pair % 2 == 0 ? i : count - 1 - i;
            struct contestant *contestant = &contestants[(turn + pair / 2) % count];
            contestant->us[pair] = time_calls(cell, contestant, contestant->num_calls, &copy_idx);
        }
    }
    return pair;
}

/* ---- report ---------------------------------------------------------------------------------- */

static json_t *spread_json(const struct spread *spread)
{
    return json_pack("{s:f, s:f, s:f}", "median", spread->median, "p10", spread->p10, "p90",
                     spread->p90);
}

/* The time of the unfused pair by that of the fused op of the same path, pair by pair; before the
 * samples are sorted. */
static bool unfused_ratio(struct ops_bench *bench, const struct contestant *contestants,
                          int32_t count, int32_t idx, int32_t num_pairs, struct spread *ratio)
{
    if (idx + 1 >= count || contestants[idx + 1].kind != CONTESTANT_UNFUSED) {
        return false;
    }
    for (int32_t pair = 0; pair < num_pairs; pair++) {
        bench->ratios[pair] = contestants[idx + 1].us[pair] / contestants[idx].us[pair];
    }
    *ratio = spread_of(bench->ratios, num_pairs);
    return true;
}

/* Percent of the roof, pair by pair; before the samples are sorted. */
static struct spread roof_share(struct ops_bench *bench, const struct cpu_cell *cell,
                                const struct contestant *contestant, int32_t num_pairs)
{
    enum roof_kind bound;
    for (int32_t pair = 0; pair < num_pairs; pair++) {
        bench->ratios[pair] =
            100.0 * least_us(cell, &bench->rates[pair], &bound) / contestant->us[pair];
    }
    return spread_of(bench->ratios, num_pairs);
}

struct figures {
    struct spread us, percent, ratio;
    bool has_ratio;
};

static json_t *contestant_json(const struct cpu_cell *cell, const struct contestant *contestant,
                               const struct figures *figures)
{
    /* Both products, which the fused op never stores. */
    json_int_t temporary_bytes =
        contestant->kind == CONTESTANT_UNFUSED
            ? 2 * (json_int_t)cell->num_rows * cell->out_features * (json_int_t)sizeof(float)
            : 0;
    json_t *entry = json_pack("{s:s, s:s, s:i, s:o, s:f, s:f, s:o, s:I, s:f}", "path",
                              contestant->path->name, "kind", contestant_names[contestant->kind],
                              "calls", (int)contestant->num_calls, "us", spread_json(&figures->us),
                              "gflops", cpu_cell_flops(cell) / figures->us.median * 1e-3,
                              "gbytes_per_s", cpu_cell_num_bytes(cell) / figures->us.median * 1e-3,
                              "percent_of_roof", spread_json(&figures->percent), "temporary_bytes",
                              temporary_bytes, "error", contestant->error);
    if (figures->has_ratio &&
        json_object_set_new(entry, "unfused_over_fused", spread_json(&figures->ratio)) != 0) {
        json_decref(entry);
        return NULL;
    }
    return entry;
}

static json_t *row_json(const struct cpu_cell *cell, const struct pair_rates *best,
                        int32_t num_pairs)
{
    enum roof_kind bound;
    double roof_us = least_us(cell, best, &bound);
    return json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:f, s:f, s:i, s:s, s:f, s:{s:f, s:f}, s:[]}",
                     "op", bench_op_name(cell->op), "shape", cell->shape->name, "dtype",
                     cpu_op_has_weights(cell->op) ? dtype_name(cell->dtype) : "F32", "m",
                     (int)cell->num_rows, "in_features", (int)cell->in_features, "out_features",
                     (int)cell->out_features, "flops", cpu_cell_flops(cell), "bytes",
                     cpu_cell_num_bytes(cell), "pairs", (int)num_pairs, "bound_by",
                     bound_name(bound), "roof_us", roof_us, "best_rates", "read", best->memory,
                     roof_kind_name(arithmetic_of(cell)), best->arithmetic, "contestants");
}

static void print_contestant(const struct cpu_cell *cell, const struct contestant *contestant,
                             const struct figures *figures, enum roof_kind bound)
{
    char ratio_text[16] = "", percent_text[16] = "-";
    if (figures->percent.median > 0.0) {
        snprintf(percent_text, sizeof(percent_text), "%.1f", figures->percent.median);
    }
    if (figures->has_ratio) {
        snprintf(ratio_text, sizeof(ratio_text), "  %.3f", figures->ratio.median);
    }
    output_printf("%-11s %-9s %-5s %6d  %-7s%-8s %11.1f %11.1f %8.1f %8.2f %6s %-5s%s\n",
                  bench_op_name(cell->op), cell->shape->name,
                  cpu_op_has_weights(cell->op) ? dtype_name(cell->dtype) : "F32",
                  (int)cell->num_rows, contestant->path->name,
                  contestant->kind == CONTESTANT_OP ? "" : contestant_names[contestant->kind],
                  figures->us.median, figures->us.p90,
                  cpu_cell_flops(cell) / figures->us.median * 1e-3,
                  cpu_cell_num_bytes(cell) / figures->us.median * 1e-3, percent_text,
                  bound_name(bound), ratio_text);
}

static int add_row(struct ops_bench *bench, const struct cpu_cell *cell,
                   struct contestant *contestants, int32_t count, int32_t num_pairs)
{
    struct pair_rates best = best_rates(bench, num_pairs);
    json_t *row = row_json(cell, &best, num_pairs);
    bool is_ok = row != NULL;
    enum roof_kind bound;

    (void)least_us(cell, &best, &bound);
    for (int32_t i = 0; i < count && is_ok; i++) {
        struct figures figures = {.percent = roof_share(bench, cell, &contestants[i], num_pairs)};
        figures.has_ratio = unfused_ratio(bench, contestants, count, i, num_pairs, &figures.ratio);
        figures.us = spread_of(contestants[i].us, num_pairs);
        is_ok = json_array_append_new(json_object_get(row, "contestants"),
                                      contestant_json(cell, &contestants[i], &figures)) == 0;
        print_contestant(cell, &contestants[i], &figures, bound);
    }
    (void)output_flush();
    if (!is_ok || json_array_append(bench->rows, row) != 0) {
        (void)output_out_of_memory();
        is_ok = false;
    }
    json_decref(row);
    return is_ok ? EXIT_CODE_OK : EXIT_CODE_FAILURE;
}

static int skip(struct ops_bench *bench, enum bench_op op, const struct bench_shape *shape,
                enum dtype dtype, const char *reason)
{
    json_t *entry = json_pack("{s:s, s:s, s:s, s:s}", "op", bench_op_name(op), "shape", shape->name,
                              "dtype", dtype_name(dtype), "reason", reason);
    output_printf("%-11s %-9s %-5s left out: %s\n", bench_op_name(op), shape->name,
                  dtype_name(dtype), reason);
    if (json_array_append_new(bench->skipped, entry) != 0) {
        return output_out_of_memory();
    }
    return EXIT_CODE_OK;
}

/* ---- the run --------------------------------------------------------------------------------- */

static int measure_rows(struct ops_bench *bench, struct cpu_cell *cell, int32_t num_rows)
{
    struct contestant contestants[MAX_CONTESTANTS];

    cpu_cell_set_rows(cell, num_rows);
    int32_t count = choose_contestants(bench, cell, contestants);
    int exit_code = check_contestants(bench, cell, contestants, count);
    if (exit_code != EXIT_CODE_OK || count == 0) {
        return exit_code;
    }
    int32_t num_pairs = time_contestants(bench, cell, contestants, count);
    return num_pairs > 0 ? add_row(bench, cell, contestants, count, num_pairs) : EXIT_CODE_OK;
}

static double memory_limit(void)
{
    return MEMORY_SHARE * (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}

static int measure_op(struct ops_bench *bench, enum bench_op op, const struct bench_shape *shape,
                      enum dtype dtype)
{
    const struct bench_ops_cells *cells = bench->cells;
    const char *refusal = cpu_cell_refusal(op, shape, dtype);
    struct cpu_cell cell;

    if (refusal == NULL &&
        (double)cpu_cell_bytes(op, shape, dtype, bench->max_rows) > memory_limit()) {
        refusal = "it needs more than half of the machine's memory";
    }
    if (refusal != NULL) {
        return skip(bench, op, shape, dtype, refusal);
    }
    int exit_code = cpu_cell_init(&cell, op, shape, dtype, bench->max_rows);
    for (int i = 0; i < cells->num_rows && exit_code == EXIT_CODE_OK && signals_interrupt() == 0;
         i++) {
        exit_code = measure_rows(bench, &cell, cells->rows[i]);
    }
    cpu_cell_release(&cell);
    return exit_code;
}

static enum dtype dtype_of(const char *name)
{
    int dtype = 0;
    while (dtype < DTYPE_COUNT && strcasecmp(name, dtype_name((enum dtype)dtype)) != 0) {
        dtype++;
    }
    return (enum dtype)dtype;
}

bool bench_dtype_is_known(const char *name)
{
    return dtype_of(name) != DTYPE_COUNT;
}

static int measure_all(struct ops_bench *bench)
{
    static const enum bench_op ops[] = {
        BENCH_OP_EMBEDDING, BENCH_OP_RMSNORM,     BENCH_OP_QKV_PROJ,
        BENCH_OP_ROPE_KV,   BENCH_OP_ATTENTION,   BENCH_OP_O_PROJ,
        BENCH_OP_DOWN_PROJ, BENCH_OP_GEMM_SWIGLU, BENCH_OP_LM_HEAD,
    };
    const struct bench_ops_cells *cells = bench->cells;
    int exit_code = EXIT_CODE_OK;

    for (int shape = 0; shape < cells->num_shapes; shape++) {
        for (int i = 0; i < cells->num_dtypes; i++) {
            for (size_t op = 0; op < sizeof(ops) / sizeof(ops[0]) && exit_code == EXIT_CODE_OK &&
                                signals_interrupt() == 0;
                 op++) {
                bool is_wanted =
                    !bench->settings->op.given || bench->settings->op.value == (int64_t)ops[op];
                /* What has no weights is measured once. */
                if (is_wanted && (i == 0 || cpu_op_has_weights(ops[op]))) {
                    exit_code = measure_op(bench, ops[op], &cells->shapes[shape],
                                           dtype_of(cells->dtypes[i]));
                }
            }
        }
    }
    return exit_code;
}

/* Of all shapes: what a row of activations can have most. */
static size_t scratch_token_bytes(const struct bench_ops_cells *cells)
{
    int64_t widest = 0;
    for (int i = 0; i < cells->num_shapes; i++) {
        const struct bench_shape *shape = &cells->shapes[i];
        int64_t widths[] = {shape->hidden_size, shape->intermediate_size,
                            (int64_t)shape->num_heads * shape->head_dim};
        for (size_t j = 0; j < sizeof(widths) / sizeof(widths[0]); j++) {
            widest = widths[j] > widest ? widths[j] : widest;
        }
    }
    return ops_scratch_token_bytes(widest);
}

static int create_ops(struct ops_bench *bench, uint32_t features, struct ops **ops)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    size_t num_bytes = scratch_token_bytes(bench->cells) * (size_t)bench->max_rows;

    if (ops_create(bench->num_threads, features, bench->scratch, num_bytes, ops, &err) !=
        IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    return EXIT_CODE_OK;
}

static int create_paths(struct ops_bench *bench)
{
    int64_t wanted = bench->settings->cpu.value;
    int exit_code = create_ops(bench, 0, &bench->reference);
    const char *asked = "auto";
    bool has_any = false;

    /* What is expected of results does not hold for rounded activations. */
    for (int path = 0; path < CPU_NUM_FP32_PATHS && exit_code == EXIT_CODE_OK; path++) {
        uint32_t features = cpu_paths[path].features;
        bool is_there = cpu_features_detect(features) == features;
        if (is_there && (wanted == IMBREX_CPU_ALL || wanted == (int64_t)features)) {
            exit_code = create_ops(bench, features, &bench->ops[path]);
            has_any = true;
        }
    }
    if (exit_code == EXIT_CODE_OK && !has_any) {
        for (const struct option_choice *choice = engine_cpu_choices; choice->name != NULL;
             choice++) {
            asked = choice->value == wanted ? choice->name : asked;
        }
        output_error("bench ops: --cpu: expected kernels that this machine has and that keep "
                     "activations in fp32, of which the best are \"%s\", found \"%s\"",
                     ops_kernels_name_for(IMBREX_CPU_ALL), asked);
        exit_code = EXIT_CODE_INPUT;
    }
    return exit_code;
}

static int create(struct ops_bench *bench)
{
    const struct bench_ops_cells *cells = bench->cells;
    size_t num_pairs = (size_t)bench->settings->num_pairs.value;

    bench->num_threads = bench->settings->threads.given ? (int32_t)bench->settings->threads.value
                                                        : thread_pool_num_cpus();
    for (int i = 0; i < cells->num_rows; i++) {
        bench->max_rows = cells->rows[i] > bench->max_rows ? cells->rows[i] : bench->max_rows;
    }
    bench->scratch = malloc(scratch_token_bytes(cells) * (size_t)bench->max_rows);
    bench->rates = calloc(num_pairs, sizeof(*bench->rates));
    bench->ratios = calloc(num_pairs, sizeof(*bench->ratios));
    bench->us = calloc(MAX_CONTESTANTS * num_pairs, sizeof(*bench->us));
    bench->rows = json_array();
    bench->skipped = json_array();
    if (bench->scratch == NULL || bench->rates == NULL || bench->ratios == NULL ||
        bench->us == NULL || bench->rows == NULL || bench->skipped == NULL) {
        return output_out_of_memory();
    }
    int exit_code = create_paths(bench);
    return exit_code == EXIT_CODE_OK && !bench->settings->no_roofs
               ? roofs_create(bench->num_threads, &bench->roofs)
               : exit_code;
}

static void destroy(struct ops_bench *bench)
{
    for (int path = 0; path < CPU_NUM_PATHS; path++) {
        ops_destroy(bench->ops[path]);
    }
    ops_destroy(bench->reference);
    roofs_destroy(bench->roofs);
    free(bench->scratch);
    free(bench->rates);
    free(bench->ratios);
    free(bench->us);
    json_decref(bench->rows);
    json_decref(bench->skipped);
}

static int write_report(const struct ops_bench *bench, FILE *file)
{
    json_t *root = report_header("ops");
    int exit_code = EXIT_CODE_FAILURE;
    json_t *more = json_pack(
        "{s:s, s:i, s:I, s:b, s:O, s:O}", "device", "cpu", "threads", (int)bench->num_threads,
        "max_pairs", (json_int_t)bench->settings->num_pairs.value, "interrupted",
        signals_interrupt() != 0, "rows", bench->rows, "left_out", bench->skipped);

    if (root == NULL || more == NULL || json_object_update(root, more) != 0) {
        (void)output_out_of_memory();
    } else {
        exit_code = report_write(bench->settings->output, file, root);
    }
    json_decref(more);
    json_decref(root);
    return exit_code;
}

static int run_bench(struct ops_bench *bench, FILE *file)
{
    int exit_code = create(bench);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    signals_note_interrupts(true);
    signals_watch_interrupts();
    output_printf("%-11s %-9s %-5s %6s  %-15s %11s %11s %8s %8s %6s %-5s %s\n", "op", "shape",
                  "dtype", "m", "path", "us", "p90", "GFLOP/s", "GB/s", "%roof", "bound",
                  "unfused/fused");
    exit_code = measure_all(bench);
    if (exit_code == EXIT_CODE_OK && file != NULL) {
        exit_code = write_report(bench, file);
    }
    return exit_code == EXIT_CODE_OK && signals_interrupt() != 0
               ? EXIT_CODE_SIGNAL + signals_interrupt()
               : exit_code;
}

int bench_ops_cpu(const struct bench_ops_settings *settings, const struct bench_ops_cells *cells)
{
    struct ops_bench bench = {.settings = settings, .cells = cells};
    FILE *file = NULL;
    int exit_code = settings->output != NULL ? report_open(settings->output, &file) : EXIT_CODE_OK;

    if (exit_code == EXIT_CODE_OK) {
        exit_code = run_bench(&bench, file);
        destroy(&bench);
    }
    if (file != NULL) {
        fclose(file);
    }
    return exit_code;
}
