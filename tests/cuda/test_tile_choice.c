/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/tile_choice.h"

#include <string.h>

#include "tests/test.h"

static const struct tile_machine h200 = {.num_sms = 132, .max_shared_bytes = 232448};

/* Number of the first kernel of a form and schedule; there are some. */
static int32_t find_kernel(enum tile_form form, enum tile_schedule schedule)
{
    for (int32_t i = 0; i < kernel_table_count(); i++) {
        if (kernel_table_at(i)->form == form && kernel_table_at(i)->schedule == schedule) {
            return i;
        }
    }
    fail_msg("no kernel of form %d, schedule %d", (int)form, (int)schedule);
    return -1;
}

static struct tile_plan plan_of(int32_t kernel_idx)
{
    return (struct tile_plan){
        .kernel_idx = kernel_idx, .cluster_m = 1, .cluster_n = 1, .group_m = 8};
}

static void expect(const struct tile_problem *problem, const struct tile_plan *plan,
                   enum imbrex_status status, const char *words)
{
    struct imbrex_error err = {0};
    assert_int_equal(tile_check(&h200, problem, plan, &err), status);
    if (words != NULL && strstr(err.message, words) == NULL) {
        fail_msg("expected \"%s\" in: %s", words, err.message);
    }
}

/* Catches numbers no launch may have that get through to it. */
static void test_plans_that_are_none(void **state)
{
    (void)state;
    struct tile_problem problem = {TILE_FORM_PAIR, 128, 4864, 896};
    int32_t pingpong = find_kernel(TILE_FORM_PAIR, TILE_SCHEDULE_pingpong);
    struct tile_plan plan = plan_of(pingpong);
    expect(&problem, &plan, IMBREX_STATUS_OK, NULL);

    plan.kernel_idx = -1;
    expect(&problem, &plan, IMBREX_STATUS_INVALID_ARGUMENT, "variant");
    plan.kernel_idx = kernel_table_count();
    expect(&problem, &plan, IMBREX_STATUS_INVALID_ARGUMENT, "variant");

    static const int32_t clusters[][2] = {{0, 1}, {1, 0}, {3, 1}, {1, 8}, {4, 2}, {-1, 1}};
    for (size_t i = 0; i < sizeof(clusters) / sizeof(clusters[0]); i++) {
        plan = plan_of(pingpong);
        plan.cluster_m = clusters[i][0];
        plan.cluster_n = clusters[i][1];
        expect(&problem, &plan, IMBREX_STATUS_INVALID_ARGUMENT, "cluster");
    }
    plan = plan_of(pingpong);
    plan.group_m = 0;
    expect(&problem, &plan, IMBREX_STATUS_INVALID_ARGUMENT, "group_m");

    /* 608 pieces of 8 columns: from all wide tiles to all narrow ones. */
    int64_t wide_pieces = kernel_table_at(pingpong)->block_n / 16;
    int32_t least = (int32_t)((608 + wide_pieces - 1) / wide_pieces);
    int32_t most = (int32_t)(608 / (wide_pieces - 1));
    plan = plan_of(pingpong);
    for (plan.num_tiles_n = least; plan.num_tiles_n <= most; plan.num_tiles_n++) {
        expect(&problem, &plan, IMBREX_STATUS_OK, NULL);
    }
    expect(&problem, &plan, IMBREX_STATUS_INVALID_ARGUMENT, "num_tiles_n");
    plan.num_tiles_n = least - 1;
    expect(&problem, &plan, IMBREX_STATUS_INVALID_ARGUMENT, "num_tiles_n");
    plan.num_tiles_n = -1;
    expect(&problem, &plan, IMBREX_STATUS_INVALID_ARGUMENT, "num_tiles_n");
}

/* Catches a limit of a kernel that is not looked at. */
static void test_limits(void **state)
{
    (void)state;
    int32_t pair = find_kernel(TILE_FORM_PAIR, TILE_SCHEDULE_pingpong);
    struct tile_plan plan = plan_of(pair);
    static const struct tile_problem empty[] = {
        {TILE_FORM_PAIR, 0, 8, 8}, {TILE_FORM_PAIR, 8, 0, 8}, {TILE_FORM_PAIR, 8, 8, -1}};
    for (size_t i = 0; i < sizeof(empty) / sizeof(empty[0]); i++) {
        expect(&empty[i], &plan, IMBREX_STATUS_INVALID_ARGUMENT, "shape");
    }
    struct tile_problem odd = {TILE_FORM_PAIR, 128, 4868, 896};
    expect(&odd, &plan, IMBREX_STATUS_UNSUPPORTED, "16 bytes");
    struct tile_problem split = {TILE_FORM_SPLIT, 128, 4864, 896};
    expect(&split, &plan, IMBREX_STATUS_UNSUPPORTED, "apart");
    plan = plan_of(find_kernel(TILE_FORM_SPLIT, TILE_SCHEDULE_pingpong));
    expect(&split, &plan, IMBREX_STATUS_OK, NULL);

    struct tile_problem huge = {TILE_FORM_SPLIT, INT32_MAX, INT32_MAX - 7, 64};
    expect(&huge, &plan, IMBREX_STATUS_UNSUPPORTED, "32 bits");

    struct imbrex_error err = {0};
    struct tile_machine small = {.num_sms = 132, .max_shared_bytes = 101376};
    assert_int_equal(tile_check(&small, &split, &plan, &err), IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "shared memory"));
    struct tile_machine narrow = {.num_sms = 1, .max_shared_bytes = 232448};
    plan.cluster_m = 2;
    assert_int_equal(tile_check(&narrow, &split, &plan, &err), IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "SMs"));
}

/* Catches a grid that leaves a part of the result out, or counts a wave too few. */
static void test_grid_covers_the_result(void **state)
{
    (void)state;
    static const int32_t sides[] = {1, 63, 64, 65, 127, 128, 129, 1000, 4097, 16384};
    static const int32_t clusters[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 1}};
    for (int32_t kernel_idx = 0; kernel_idx < kernel_table_count(); kernel_idx++) {
        const struct kernel_variant *kernel = kernel_table_at(kernel_idx);
        for (size_t i = 0; i < sizeof(sides) / sizeof(sides[0]); i++) {
            for (size_t j = 0; j < sizeof(clusters) / sizeof(clusters[0]); j++) {
                struct tile_problem problem = {kernel->form, sides[i], 8 * sides[i], 512};
                struct tile_plan plan = plan_of(kernel_idx);
                plan.cluster_m = clusters[j][0];
                plan.cluster_n = clusters[j][1];
                struct tile_grid grid = tile_grid_of(&h200, &problem, &plan);
                int64_t rows = grid.num_blocks_m * plan.cluster_m * kernel->block_m;
                int64_t columns = grid.num_blocks_n * plan.cluster_n * tile_columns(kernel);
                assert_true(rows >= problem.m && columns >= problem.columns);
                assert_true(rows - problem.m < plan.cluster_m * kernel->block_m);
                assert_true(columns - problem.columns < plan.cluster_n * tile_columns(kernel));
                assert_true(grid.num_clusters >= 1);
                assert_true(grid.num_clusters * plan.cluster_m * plan.cluster_n <= 132);
                int64_t num_blocks = grid.num_blocks_m * grid.num_blocks_n;
                assert_true(grid.num_clusters * grid.num_waves >= num_blocks);
                assert_true(grid.num_clusters * (grid.num_waves - 1) < num_blocks);
            }
        }
    }
}

/* Catches tiles of two widths that leave columns out, or compute some twice. */
static void test_two_widths_cover_exactly(void **state)
{
    (void)state;
    for (int32_t kernel_idx = 0; kernel_idx < kernel_table_count(); kernel_idx++) {
        const struct kernel_variant *kernel = kernel_table_at(kernel_idx);
        struct tile_problem problem = {kernel->form, 256, 4864, 896};
        int64_t wide = kernel->block_n / TILE_PIECE_ROWS;
        int64_t num_pieces = 4864 / tile_piece_columns(kernel);
        struct tile_plan plan = plan_of(kernel_idx);
        for (plan.num_tiles_n = 1; plan.num_tiles_n < 700; plan.num_tiles_n++) {
            if (tile_check(&h200, &problem, &plan, NULL) == IMBREX_STATUS_OK) {
                struct tile_grid grid = tile_grid_of(&h200, &problem, &plan);
                int64_t num_narrow = grid.num_tiles_n - grid.num_wide;
                assert_true(grid.num_wide >= 0 && num_narrow >= 0);
                assert_int_equal(grid.num_wide * wide + num_narrow * (wide - 1), num_pieces);
                assert_int_equal(grid.num_blocks_n, plan.num_tiles_n);
            }
        }
    }
}

/* Catches a choice that is not legal, is of another form, or changes from one call to the next. */
static void test_choice_is_legal(void **state)
{
    (void)state;
    static const int32_t rows[] = {1, 7, 64, 128, 200, 512, 1024, 4096, 16384};
    static const int32_t columns[] = {8, 104, 4864, 29568, 53248};
    static const enum tile_form forms[] = {TILE_FORM_PAIR, TILE_FORM_SPLIT, TILE_FORM_PLAIN,
                                           TILE_FORM_GENERAL_PAIR, TILE_FORM_GENERAL_SPLIT};
    for (size_t f = 0; f < sizeof(forms) / sizeof(forms[0]); f++) {
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            for (size_t j = 0; j < sizeof(columns) / sizeof(columns[0]); j++) {
                struct tile_problem problem = {forms[f], rows[i], columns[j], 896};
                struct tile_plan plan, again;
                assert_int_equal(tile_choose(&h200, &problem, 0, kernel_table_count(), &plan, NULL),
                                 IMBREX_STATUS_OK);
                assert_int_equal(tile_check(&h200, &problem, &plan, NULL), IMBREX_STATUS_OK);
                assert_int_equal(kernel_table_at(plan.kernel_idx)->form, forms[f]);
                assert_int_equal(
                    tile_choose(&h200, &problem, 0, kernel_table_count(), &again, NULL),
                    IMBREX_STATUS_OK);
                assert_memory_equal(&plan, &again, sizeof(plan));
            }
        }
    }
}

/* Catches a choice that takes a dearer plan than one it saw: it must not lose against any single
 * kernel. */
static void test_choice_is_the_cheapest(void **state)
{
    (void)state;
    static const struct tile_problem problems[] = {{TILE_FORM_PAIR, 128, 4864, 896},
                                                   {TILE_FORM_PAIR, 1024, 18944, 3584},
                                                   {TILE_FORM_PAIR, 8192, 29568, 8192},
                                                   {TILE_FORM_PLAIN, 512, 8192, 29568}};
    for (size_t p = 0; p < sizeof(problems) / sizeof(problems[0]); p++) {
        struct tile_plan chosen;
        assert_int_equal(tile_choose(&h200, &problems[p], 0, kernel_table_count(), &chosen, NULL),
                         IMBREX_STATUS_OK);
        double least_us = tile_cost_us(&h200, &problems[p], &chosen);
        assert_true(least_us > 0.0);
        for (int32_t i = 0; i < kernel_table_count(); i++) {
            struct tile_plan single;
            if (kernel_table_at(i)->form != problems[p].form) {
                continue;
            }
            assert_int_equal(tile_choose(&h200, &problems[p], i, i + 1, &single, NULL),
                             IMBREX_STATUS_OK);
            assert_int_equal(single.kernel_idx, i);
            assert_true(tile_cost_us(&h200, &problems[p], &single) >= least_us);
        }
    }
}

/* Catches gate_first being refused for a layout that it can take, taken for a product that has no
 * gate, chosen although nobody measured it, or not chosen although somebody did. */
static void test_gate_first(void **state)
{
    (void)state;
    struct tile_problem pair = {TILE_FORM_PAIR, 1024, 18944, 3584}, split = pair, plain = pair;
    int32_t kernel_idx = find_kernel(TILE_FORM_SPLIT, TILE_SCHEDULE_gate_first);
    const struct kernel_variant *kernel = kernel_table_at(kernel_idx);
    struct tile_plan plan = plan_of(kernel_idx);
    split.form = TILE_FORM_SPLIT;
    plain.form = TILE_FORM_PLAIN;
    expect(&pair, &plan, IMBREX_STATUS_OK, NULL);
    expect(&split, &plan, IMBREX_STATUS_OK, NULL);
    expect(&plain, &plan, IMBREX_STATUS_UNSUPPORTED, "gate and up apart");
    pair.columns += 4;
    expect(&pair, &plan, IMBREX_STATUS_UNSUPPORTED, "16 bytes");
    pair.columns -= 4;

    /* Alone it is chosen, and its walk is legal; among others never. */
    int32_t end = kernel_table_count();
    assert_int_equal(tile_choose(&h200, &pair, kernel_idx, kernel_idx + 1, &plan, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(plan.kernel_idx, kernel_idx);
    expect(&pair, &plan, IMBREX_STATUS_OK, NULL);
    assert_int_equal(tile_choose(&h200, &pair, 0, end, &plan, NULL), IMBREX_STATUS_OK);
    assert_int_not_equal(kernel_table_at(plan.kernel_idx)->schedule, TILE_SCHEDULE_gate_first);
    assert_int_equal(tile_choose(&h200, &split, 0, end, &plan, NULL), IMBREX_STATUS_OK);
    assert_int_not_equal(kernel_table_at(plan.kernel_idx)->schedule, TILE_SCHEDULE_gate_first);

    struct tile_measurement row = {.num_sms = 132,
                                   .problem = pair,
                                   .schedule = TILE_SCHEDULE_gate_first,
                                   .block_m = kernel->block_m,
                                   .block_n = kernel->block_n,
                                   .cluster_m = 1,
                                   .cluster_n = 2,
                                   .group_m = 4};
    assert_int_equal(tile_choose_measured(&h200, &pair, &row, 1, 0, end, &plan, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(plan.kernel_idx, kernel_idx);
    /* Rows of A twice: dearer than the same tile of gate and up at once. */
    for (int32_t i = 0; i < end; i++) {
        const struct kernel_variant *other = kernel_table_at(i);
        if (other->form == TILE_FORM_PAIR && other->schedule == TILE_SCHEDULE_pingpong &&
            other->block_m == kernel->block_m && other->block_n == kernel->block_n) {
            struct tile_plan at_once = plan_of(i), gate_first = plan_of(kernel_idx);
            assert_true(tile_cost_us(&h200, &pair, &at_once) <
                        tile_cost_us(&h200, &pair, &gate_first));
        }
    }
}

/* Catches a cost that does not see waves: 16 x 33 tiles are four full ones on 132 SMs, and one row
 * more makes a fifth. */
static void test_cost_counts_waves(void **state)
{
    (void)state;
    int32_t kernel_idx = find_kernel(TILE_FORM_PLAIN, TILE_SCHEDULE_pingpong);
    const struct kernel_variant *kernel = kernel_table_at(kernel_idx);
    struct tile_plan plan = plan_of(kernel_idx);
    struct tile_problem full = {TILE_FORM_PLAIN, 16 * kernel->block_m, 33 * kernel->block_n, 8192};
    struct tile_problem more = full;
    more.m++;
    assert_int_equal(tile_grid_of(&h200, &full, &plan).num_waves, 4);
    assert_int_equal(tile_grid_of(&h200, &more, &plan).num_waves, 5);
    assert_true(tile_cost_us(&h200, &more, &plan) > 1.2 * tile_cost_us(&h200, &full, &plan));
}

/* Catches a measured choice that is not taken, or is taken for another machine, form, shape or
 * number of tiles, or though it is not legal. */
static void test_measured_choice(void **state)
{
    (void)state;
    int32_t kernel_idx = find_kernel(TILE_FORM_PAIR, TILE_SCHEDULE_cooperative);
    const struct kernel_variant *kernel = kernel_table_at(kernel_idx);
    struct tile_measurement row = {.num_sms = 132,
                                   .problem = {TILE_FORM_PAIR, 1024, 18944, 3584},
                                   .schedule = kernel->schedule,
                                   .block_m = kernel->block_m,
                                   .block_n = kernel->block_n,
                                   .cluster_m = 1,
                                   .cluster_n = 2,
                                   .group_m = 3};
    int32_t end = kernel_table_count();
    struct tile_plan by_model, plan;
    assert_int_equal(tile_choose(&h200, &row.problem, 0, end, &by_model, NULL), IMBREX_STATUS_OK);
    assert_int_not_equal(by_model.kernel_idx, kernel_idx);

    static const int32_t taken[] = {1024, 1000, 961}, not_taken[] = {1025, 960, 512};
    struct tile_problem problem = row.problem;
    for (size_t i = 0; i < 3; i++) {
        problem.m = taken[i];
        assert_int_equal(tile_choose_measured(&h200, &problem, &row, 1, 0, end, &plan, NULL),
                         IMBREX_STATUS_OK);
        assert_int_equal(plan.kernel_idx, kernel_idx);
        assert_int_equal(plan.cluster_n, 2);
        assert_int_equal(plan.group_m, 3);
        problem.m = not_taken[i];
        assert_int_equal(tile_choose_measured(&h200, &problem, &row, 1, 0, end, &plan, NULL),
                         IMBREX_STATUS_OK);
        assert_int_equal(plan.group_m,
                         1024 / kernel_table_at(plan.kernel_idx)->block_m / plan.cluster_m);
    }

    struct tile_measurement others[] = {row, row, row, row, row, row};
    others[0].num_sms = 114;
    others[1].problem.form = TILE_FORM_SPLIT;
    others[2].problem.columns += 8;
    others[3].problem.k += 8;
    others[4].block_n = 8;
    others[5].num_tiles_n = 7;
    assert_int_equal(tile_choose_measured(&h200, &row.problem, others, 6, 0, end, &plan, NULL),
                     IMBREX_STATUS_OK);
    assert_memory_equal(&plan, &by_model, sizeof(plan));
}

/* Catches a row of the library's table that no kernel answers to, so that it is silently without
 * effect. */
static void test_measured_table(void **state)
{
    (void)state;
    size_t num_rows = 0;
    const struct tile_measurement *table = tile_measured_table(&num_rows);
    for (size_t i = 0; i < num_rows; i++) {
        struct tile_machine machine = {.num_sms = table[i].num_sms, .max_shared_bytes = 232448};
        struct tile_plan plan;
        assert_int_equal(tile_choose_measured(&machine, &table[i].problem, &table[i], 1, 0,
                                              kernel_table_count(), &plan, NULL),
                         IMBREX_STATUS_OK);
        const struct kernel_variant *kernel = kernel_table_at(plan.kernel_idx);
        assert_int_equal(kernel->schedule, table[i].schedule);
        assert_int_equal(kernel->block_m, table[i].block_m);
        assert_int_equal(kernel->block_n, table[i].block_n);
        assert_int_equal(plan.cluster_m, table[i].cluster_m);
        assert_int_equal(plan.cluster_n, table[i].cluster_n);
        assert_int_equal(plan.group_m, table[i].group_m);
        assert_int_equal(plan.num_tiles_n, table[i].num_tiles_n);
    }
}

/* Catches a failure without its reason, and a plan that is written on failure. */
static void test_no_choice(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct tile_plan plan = {.kernel_idx = 77};
    struct tile_problem odd = {TILE_FORM_PAIR, 128, 4868, 896};
    assert_int_equal(tile_choose(&h200, &odd, 0, kernel_table_count(), &plan, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_non_null(strstr(err.message, "16 bytes"));
    assert_int_equal(plan.kernel_idx, 77);
    assert_int_equal(tile_choose(&h200, &odd, 0, 0, &plan, &err), IMBREX_STATUS_UNSUPPORTED);
}

int run_tile_choice_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plans_that_are_none),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_grid_covers_the_result),
        cmocka_unit_test(test_two_widths_cover_exactly),
        cmocka_unit_test(test_choice_is_legal),
        cmocka_unit_test(test_choice_is_the_cheapest),
        cmocka_unit_test(test_gate_first),
        cmocka_unit_test(test_cost_counts_waves),
        cmocka_unit_test(test_measured_choice),
        cmocka_unit_test(test_measured_table),
        cmocka_unit_test(test_no_choice),
    };
    return cmocka_run_group_tests_name("tile_choice", tests, NULL, NULL);
}
