/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex tune on a GPU. The best of a hundred plans that were measured once owes most of its lead
 * to chance, so there are three rounds: all plans in a few runs, the best of them in more, and the
 * winner alone beside the library's choice, in runs that decided nothing before. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench/cuda/bench_cell.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/progress_bar.h"
#include "cli/signals.h"
#include "cli/tune.h"
#include "cli/tuned_path.h"

static const struct {
    int num_plans; /* that run, the library's choice among them; 0: all */
    int num_pairs;
    double replay_ms;
} rounds[] = {{0, 5, 1.0}, {8, 11, 2.0}, {2, 25, 2.0}};
enum { NUM_ROUNDS = sizeof(rounds) / sizeof(rounds[0]) };

/* A whole run. */
struct tuning {
    const struct tune_settings *settings;
    struct bench_ops_settings measure; /* what bench.settings points to */
    struct bench_ops_cells cells;      /* likewise: SwiGLU, and no list */
    struct bench bench;
    struct imbrex_tune_key key;
    struct imbrex_tune_table *table;
    char path[4096];
    bool has_bar;
    int64_t begin_ns;
    struct imbrex_kernel_shape filled; /* whose weights are in memory */
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static struct imbrex_kernel_shape shape_of(const struct tune_item *item)
{
    bool is_swiglu = item->op == IMBREX_KERNEL_OP_GEMM_SWIGLU;
    return (struct imbrex_kernel_shape){
        .op = item->op,
        .m = item->m,
        .n = is_swiglu ? item->shape.intermediate_size : item->shape.hidden_size,
        .k = is_swiglu ? item->shape.hidden_size : item->shape.intermediate_size,
    };
}

static void item_name(const struct tune_item *item, char name[96])
{
    snprintf(name, 96, "%s %s m %" PRId32, bench_op_name((enum bench_op)item->op), item->shape.name,
             item->m);
}

/* ---- one product ---- */

static void init_cell(struct tuning *tuning, const struct tune_item *item, struct bench_cell *cell)
{
    tuning->measure.op.value = item->op;
    bench_cell_init(&tuning->bench, &item->shape, item->m, cell);
    cell->product_stride = 0; /* nobody here has products apart */
}

static int compare_contestants(const void *a, const void *b)
{
    double x = ((const struct contestant *)a)->over_chosen.median;
    double y = ((const struct contestant *)b)->over_chosen.median;
    return (x > y) - (x < y);
}

/* All rounds; afterwards contestants[0] is the library's choice, and [1], if there is one, the best
 * of the others. */
static bool run_rounds(struct tuning *tuning, struct bench_cell *cell)
{
    for (int i = 0; i < NUM_ROUNDS; i++) {
        tuning->measure.num_pairs.value = rounds[i].num_pairs;
        tuning->measure.replay_ms.value = rounds[i].replay_ms;
        if (i > 0) {
            /* They carry no memory between rounds. */
            bench_cell_release(&tuning->bench, cell);
            qsort(&cell->contestants[1], (size_t)cell->num_contestants - 1,
                  sizeof(cell->contestants[0]), compare_contestants);
            if (cell->num_contestants > rounds[i].num_plans) {
                cell->num_contestants = rounds[i].num_plans;
            }
        }
        if (!bench_time_contestants(&tuning->bench, cell)) {
            return false;
        }
    }
    return true;
}

/* False: the run is at its end. *is_measured is false if the library's own choice is wrong, which
 * was reported. */
static bool measure_item(struct tuning *tuning, const struct tune_item *item,
                         struct bench_cell *cell, struct imbrex_tune_row *row, bool *is_measured,
                         bool *all_right)
{
    struct imbrex_kernel_shape shape = shape_of(item);
    struct bench *bench = &tuning->bench;
    char chosen[sizeof(cell->contestants[0].name)];

    init_cell(tuning, item, cell);
    *is_measured = false;
    if (tuning->filled.op != shape.op || tuning->filled.n != shape.n ||
        tuning->filled.k != shape.k) {
        if (!bench_fill_weights(bench, cell)) {
            return false;
        }
        tuning->filled = shape;
    }
    if (!bench_add_plans(bench, cell)) {
        return false;
    }
    memcpy(chosen, cell->contestants[0].name, sizeof(chosen));
    if (!bench_check_contestants(bench, cell, all_right) ||
        strcmp(cell->contestants[0].name, chosen) != 0) {
        return true;
    }
    if (!run_rounds(tuning, cell)) {
        return false;
    }
    const struct contestant *best = &cell->contestants[cell->num_contestants > 1 ? 1 : 0];
    *row = (struct imbrex_tune_row){.shape = shape, .plan = best->plan};
    imbrex_tune_judge(best->us, cell->contestants[0].us, rounds[NUM_ROUNDS - 1].num_pairs, row);
    *is_measured = true;
    return true;
}

static void print_row(const struct tune_item *item, const struct imbrex_tune_row *row,
                      const struct bench_cell *cell)
{
    char name[96];
    item_name(item, name);
    if (row->is_faster) {
        output_printf("%-32s %9.2f us, chosen before: %9.2f us, gain %.4f: %s\n", name, row->us,
                      row->default_us, row->gain, cell->contestants[1].name);
    } else {
        output_printf("%-32s %9.2f us, the choice stays: %s\n", name, row->default_us,
                      cell->contestants[0].name);
    }
    (void)output_flush();
}

/* ---- all of them ---- */

/* Measures an item, keeps it and writes the table. */
static int keep_item(struct tuning *tuning, const struct tune_item *item, struct bench_cell *cell,
                     bool *all_right)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct imbrex_tune_row row;
    bool is_measured = false;
    int exit_code = EXIT_CODE_OK;

    if (!measure_item(tuning, item, cell, &row, &is_measured, all_right)) {
        exit_code = EXIT_CODE_FAILURE;
    }
    if (exit_code == EXIT_CODE_OK && is_measured) {
        if (imbrex_tune_table_set(tuning->table, &row, &err) != IMBREX_STATUS_OK ||
            imbrex_tune_table_write(tuning->table, tuning->path, &err) != IMBREX_STATUS_OK) {
            exit_code = output_library_error(&err);
        } else {
            if (tuning->has_bar) {
                progress_bar_clear();
            }
            print_row(item, &row, cell);
        }
    }
    bench_cell_release(&tuning->bench, cell);
    return exit_code;
}

static bool is_pending(const struct tuning *tuning, const struct tune_item *item)
{
    struct imbrex_kernel_shape shape = shape_of(item);
    return imbrex_tune_table_find(tuning->table, &shape) == NULL;
}

static int count_pending(const struct tuning *tuning, const struct tune_list *list)
{
    int count = 0;
    for (int i = 0; i < list->count; i++) {
        count += is_pending(tuning, &list->items[i]);
    }
    return count;
}

static double elapsed_seconds(const struct tuning *tuning)
{
    return (double)(now_ns() - tuning->begin_ns) * 1e-9;
}

static bool is_out_of_time(const struct tuning *tuning)
{
    return tuning->settings->seconds.given &&
           elapsed_seconds(tuning) >= tuning->settings->seconds.value;
}

static int measure_all(struct tuning *tuning, const struct tune_list *list, int num_pending)
{
    struct bench_cell *cell = malloc(sizeof(*cell));
    int exit_code = EXIT_CODE_OK, num_done = 0;
    bool all_right = true;

    if (cell == NULL) {
        return output_out_of_memory();
    }
    for (int i = 0; exit_code == EXIT_CODE_OK && i < list->count; i++) {
        const struct tune_item *item = &list->items[i];
        char name[96];
        if (!is_pending(tuning, item)) {
            continue;
        }
        if (signals_interrupt() != 0 || is_out_of_time(tuning)) {
            break;
        }
        if (tuning->has_bar) {
            item_name(item, name);
            progress_bar_draw((double)num_done / num_pending, "%d of %d products, %s", num_done,
                              num_pending, name);
        }
        exit_code = keep_item(tuning, item, cell, &all_right);
        num_done++;
    }
    free(cell);
    if (tuning->has_bar) {
        progress_bar_clear();
    }
    if (exit_code == EXIT_CODE_OK && !all_right) {
        exit_code = EXIT_CODE_FAILURE;
    }
    return exit_code;
}

/* Memory for the largest of what is to be measured. */
static bool allocate(struct tuning *tuning, const struct tune_list *list)
{
    struct bench_cell *cell = malloc(sizeof(*cell));
    if (cell == NULL) {
        (void)output_out_of_memory();
        return false;
    }
    for (int i = 0; i < list->count; i++) {
        if (is_pending(tuning, &list->items[i])) {
            init_cell(tuning, &list->items[i], cell);
            bench_pools_include(&tuning->bench, cell);
        }
    }
    free(cell);
    return bench_pools_allocate(&tuning->bench);
}

static void print_summary(const struct tuning *tuning, const struct tune_list *list)
{
    int num_faster = 0, num_left = count_pending(tuning, list);
    for (int i = 0; i < list->count; i++) {
        struct imbrex_kernel_shape shape = shape_of(&list->items[i]);
        const struct imbrex_tune_row *row = imbrex_tune_table_find(tuning->table, &shape);
        num_faster += row != NULL && row->is_faster;
    }
    output_printf("%d of %d products measured, %d with a plan that is faster than the library's "
                  "choice; %.1f s\n",
                  list->count - num_left, list->count, num_faster, elapsed_seconds(tuning));
    if (num_left > 0) {
        output_printf("%s; %d are left: the same command goes on with them\n",
                      signals_interrupt() != 0 ? "ended by a signal"
                      : is_out_of_time(tuning) ? "--seconds are over"
                                               : "not all could be measured",
                      num_left);
    }
}

/* ---- table ---- */

static int choose_path(struct tuning *tuning)
{
    char name[IMBREX_TUNE_NAME_BYTES];
    const char *folder = tuned_default_folder();
    int length;

    if (tuning->settings->output != NULL) {
        length = snprintf(tuning->path, sizeof(tuning->path), "%s", tuning->settings->output);
    } else if (folder != NULL) {
        imbrex_tune_file_name(&tuning->key, name);
        length = snprintf(tuning->path, sizeof(tuning->path), "%s/%s", folder, name);
    } else {
        output_error("tune: expected HOME or XDG_CACHE_HOME to be an absolute path, or -o FILE, "
                     "found none of them");
        return EXIT_CODE_INPUT;
    }
    if ((size_t)length >= sizeof(tuning->path)) {
        output_error("%.100s...: expected a path of at most %zu bytes, found %d", tuning->path,
                     sizeof(tuning->path) - 1, length);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

/* What an earlier run has, if it is of this card, driver and version. */
static int open_table(struct tuning *tuning)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    enum imbrex_status status = IMBREX_STATUS_NOT_FOUND;

    if (!tuning->settings->again) {
        status = imbrex_tune_table_open(tuning->path, &tuning->key, &tuning->table, &err);
    }
    if (status == IMBREX_STATUS_OK) {
        return EXIT_CODE_OK;
    }
    if (status == IMBREX_STATUS_UNSUPPORTED) {
        output_warning("all is measured anew: %s", err.message);
    } else if (status != IMBREX_STATUS_NOT_FOUND) {
        struct imbrex_error named = err;
        snprintf(named.message, sizeof(named.message), "%.*s; --again replaces it",
                 (int)sizeof(named.message) - 32, err.message);
        return output_library_error(&named);
    }
    return imbrex_tune_table_create(&tuning->key, &tuning->table, &err) == IMBREX_STATUS_OK
               ? EXIT_CODE_OK
               : output_library_error(&err);
}

/* Before time is spent on what cannot be kept. */
static int write_table(struct tuning *tuning)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    int exit_code = EXIT_CODE_OK;

    if (tuning->settings->output == NULL) {
        exit_code = tuned_make_folder(tuned_default_folder());
    }
    if (exit_code == EXIT_CODE_OK &&
        imbrex_tune_table_write(tuning->table, tuning->path, &err) != IMBREX_STATUS_OK) {
        exit_code = output_library_error(&err);
    }
    return exit_code;
}

/* ---- run ---- */

static void print_pending(const struct tuning *tuning, const struct tune_list *list)
{
    for (int i = 0; i < list->count; i++) {
        char name[96];
        if (is_pending(tuning, &list->items[i])) {
            item_name(&list->items[i], name);
            output_printf("%s\n", name);
        }
    }
}

static int measure_on_gpu(struct tuning *tuning, int32_t device_idx, const struct tune_list *list,
                          int num_pending)
{
    int exit_code = write_table(tuning);

    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (!gpu_open(device_idx, &tuning->bench.gpu)) {
        return EXIT_CODE_FAILURE;
    }
    exit_code = EXIT_CODE_FAILURE;
    if (allocate(tuning, list)) {
        signals_note_interrupts(true);
        signals_watch_interrupts();
        exit_code = measure_all(tuning, list, num_pending);
        signals_note_interrupts(false);
    }
    bench_pools_free(&tuning->bench);
    gpu_close(&tuning->bench.gpu);
    return exit_code;
}

static int tune_on(struct tuning *tuning, int32_t device_idx, const struct tune_list *list)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    int num_pending = 0, exit_code = EXIT_CODE_OK;

    imbrex_device_describe(tuning->bench.device, &tuning->bench.description);
    tuning->bench.is_portable = tuning->bench.description.compute_capability != 90;
    if (imbrex_tune_key_read(tuning->bench.device, &tuning->key, &err) != IMBREX_STATUS_OK) {
        return output_library_error(&err);
    }
    exit_code = choose_path(tuning);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = open_table(tuning);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    num_pending = count_pending(tuning, list);
    output_printf("%s, %d SMs, %d MHz, %d W, driver %s; table %s\n%d products, %d of them measured "
                  "before\n",
                  tuning->key.gpu, (int)tuning->key.num_sms, (int)tuning->key.max_clock_mhz,
                  (int)tuning->key.power_limit_watts,
                  tuning->key.driver[0] != '\0' ? tuning->key.driver : "unknown", tuning->path,
                  list->count, list->count - num_pending);
    (void)output_flush();
    if (tuning->settings->dry_run) {
        print_pending(tuning, list);
        return EXIT_CODE_OK;
    }
    if (num_pending > 0) {
        exit_code = measure_on_gpu(tuning, device_idx, list, num_pending);
    }
    print_summary(tuning, list);
    return exit_code == EXIT_CODE_OK && signals_interrupt() != 0
               ? EXIT_CODE_SIGNAL + signals_interrupt()
               : exit_code;
}

int tune_cuda(const struct tune_settings *settings, int32_t device_idx,
              const struct tune_list *list)
{
    struct imbrex_device_options options = imbrex_device_options_default();
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    struct tuning *tuning = calloc(1, sizeof(*tuning));

    if (tuning == NULL) {
        return output_out_of_memory();
    }
    tuning->settings = settings;
    tuning->measure.plans.value = BENCH_PLANS_ALL;
    tuning->measure.near = settings->near;
    tuning->bench.settings = &tuning->measure;
    tuning->cells.gatings[0] = (struct bench_gating){.name = "silu"};
    tuning->cells.num_gatings = 1;
    tuning->bench.cells = &tuning->cells;
    tuning->has_bar = isatty(STDERR_FILENO) == 1;
    tuning->begin_ns = now_ns();
    /* Every plan has boxes of its own. */
    options.max_tensor_maps = 16384;
    int exit_code = EXIT_CODE_OK;
    if (imbrex_device_open(device_idx, &options, &tuning->bench.device, &err) != IMBREX_STATUS_OK) {
        exit_code = output_library_error(&err);
    } else {
        exit_code = tune_on(tuning, device_idx, list);
        imbrex_tune_table_destroy(tuning->table);
        imbrex_device_close(tuning->bench.device);
    }
    free(tuning);
    return exit_code;
}
