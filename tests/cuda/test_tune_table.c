/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/tune_table.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ops/cuda/cuda_device.h"
#include "ops/cuda/device_cuda.h"
#include "ops/cuda/gemm_launch.h"
#include "tests/base/fixture.h"
#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

#define MAX_LINES 8

static int num_lines;
static char lines[MAX_LINES][512];

static void keep_line(void *user, enum imbrex_log_level level, const char *message)
{
    (void)user;
    assert_int_equal(level, IMBREX_LOG_LEVEL_WARNING);
    assert_true(num_lines < MAX_LINES);
    snprintf(lines[num_lines++], sizeof(lines[0]), "%s", message);
}

static enum imbrex_status open_tuned(const char *path, bool is_optional,
                                     struct imbrex_device **device, struct imbrex_error *err)
{
    struct imbrex_device_options options = imbrex_device_options_default();
    struct driver driver;
    fake_reset();
    fake_add_range((const void *)0x10000000, 0x50000000, CU_MEMORYTYPE_DEVICE, 0);
    driver = fake_table();
    options.tuned = path;
    options.tuned_is_optional = is_optional;
    options.log = keep_line;
    num_lines = 0;
    return cuda_device_create(&driver, 0, &options, device, err);
}

static struct imbrex_tune_key read_key(void)
{
    struct imbrex_device *device = NULL;
    struct imbrex_tune_key key;
    assert_int_equal(open_tuned(NULL, false, &device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_tune_key_read(device, &key, NULL), IMBREX_STATUS_OK);
    imbrex_device_close(device);
    return key;
}

/* The first variant of a kind, which there is. */
static int32_t find_variant(enum imbrex_kernel_op op, bool is_portable)
{
    struct imbrex_kernel_variant variant;
    int32_t variant_idx = -1;
    do {
        assert_int_equal(imbrex_kernel_variant_describe(op, ++variant_idx, &variant, NULL),
                         IMBREX_STATUS_OK);
    } while (variant.is_portable != is_portable);
    return variant_idx;
}

/* A plan that neither table nor model chooses: with a walk of 3. */
static struct imbrex_tune_row row_of(enum imbrex_kernel_op op, int32_t m, bool is_faster)
{
    return (struct imbrex_tune_row){
        .shape = {.op = op, .m = m, .n = 4864, .k = 896},
        .plan = {.variant_idx = find_variant(op, false),
                 .cluster_m = 1,
                 .cluster_n = 2,
                 .group_m = 3},
        .us = 10.5,
        .default_us = 11.25,
        .gain = 1.07,
        .is_faster = is_faster,
    };
}

static struct imbrex_tune_table *table_of(const struct imbrex_tune_key *key,
                                          const struct imbrex_tune_row *rows, int count)
{
    struct imbrex_tune_table *table = NULL;
    assert_int_equal(imbrex_tune_table_create(key, &table, NULL), IMBREX_STATUS_OK);
    for (int i = 0; i < count; i++) {
        assert_int_equal(imbrex_tune_table_set(table, &rows[i], NULL), IMBREX_STATUS_OK);
    }
    return table;
}

static void write_rows(const char *path, const struct imbrex_tune_key *key,
                       const struct imbrex_tune_row *rows, int count)
{
    struct imbrex_tune_table *table = table_of(key, rows, count);
    assert_int_equal(imbrex_tune_table_write(table, path, NULL), IMBREX_STATUS_OK);
    imbrex_tune_table_destroy(table);
}

/* ---- the file ---- */

/* Catches what was measured being lost or changed between two runs, so that the second one cannot
 * go on, or a row found for another shape. */
static void test_rows_outlive_a_run(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row rows[] = {row_of(IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, true),
                                     row_of(IMBREX_KERNEL_OP_GEMM, 512, false)};
    struct imbrex_tune_table *table = NULL;

    write_rows(fixture_path(path, "rows.json"), &key, rows, 2);
    assert_int_equal(imbrex_tune_table_open(path, &key, &table, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_tune_table_count(table), 2);
    assert_int_equal(tune_table_num_faster(table), 1);
    for (int i = 0; i < 2; i++) {
        const struct imbrex_tune_row *row = imbrex_tune_table_find(table, &rows[i].shape);
        assert_non_null(row);
        assert_ptr_equal(row, imbrex_tune_table_at(table, i));
        assert_memory_equal(&row->plan, &rows[i].plan, sizeof(row->plan));
        assert_int_equal(row->is_faster, rows[i].is_faster);
        assert_true(row->us == 10.5 && row->default_us == 11.25 && row->gain == 1.07);
    }
    struct imbrex_kernel_shape others[] = {rows[0].shape, rows[0].shape, rows[0].shape,
                                           rows[0].shape};
    others[0].m++;
    others[1].n += 8;
    others[2].k++;
    others[3].is_split = true;
    for (int i = 0; i < 4; i++) {
        assert_null(imbrex_tune_table_find(table, &others[i]));
    }

    rows[0].is_faster = false;
    assert_int_equal(imbrex_tune_table_set(table, &rows[0], NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_tune_table_count(table), 2);
    assert_int_equal(tune_table_num_faster(table), 0);
    imbrex_tune_table_destroy(table);
}

/* Catches a row of a plan that no launch may have, or for weights whose form is not looked up. */
static void test_rows_are_checked(void **state)
{
    (void)state;
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row good = row_of(IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, true);
    struct imbrex_tune_row bad[] = {good, good, good, good, good, good};
    struct imbrex_tune_table *table = table_of(&key, NULL, 0);
    bad[0].plan.variant_idx = 9999;
    bad[1].plan.cluster_m = 3;
    bad[2].plan.group_m = 0;
    bad[3].plan.num_tiles_n = 1;
    bad[4].shape.n = 4860;
    bad[5].shape.is_split = true;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_not_equal(imbrex_tune_table_set(table, &bad[i], NULL), IMBREX_STATUS_OK);
    }
    assert_int_equal(imbrex_tune_table_count(table), 0);
    imbrex_tune_table_destroy(table);
}

/* Catches half a table left by a full disk, or what was there before being lost with it. */
static void test_full_disk(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row row = row_of(IMBREX_KERNEL_OP_GEMM, 128, true);
    struct rlimit before;

    write_rows(fixture_path(path, "full-tuned.json"), &key, &row, 1);
    struct imbrex_tune_table *table = table_of(&key, &row, 1);
    for (int32_t m = 256; m < 4096; m += 64) {
        row.shape.m = m;
        assert_int_equal(imbrex_tune_table_set(table, &row, NULL), IMBREX_STATUS_OK);
    }
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    struct rlimit limit = {.rlim_cur = 6000, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    enum imbrex_status status = imbrex_tune_table_write(table, path, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    expect_error(status, IMBREX_STATUS_OUTPUT, &err, "full-tuned.json: cannot write");
    imbrex_tune_table_destroy(table);

    assert_int_equal(imbrex_tune_table_open(path, &key, &table, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_tune_table_count(table), 1);
    imbrex_tune_table_destroy(table);
}

/* Catches a table that cannot be written and is not told as such. */
static void test_places_that_take_no_file(void **state)
{
    (void)state;
    char folder[FIXTURE_PATH_BYTES], path[FIXTURE_PATH_BYTES + 16];
    struct imbrex_error err = {0};
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_table *table = table_of(&key, NULL, 0);

    fixture_folder(folder, "closed-folder");
    expect_error(imbrex_tune_table_write(table, folder, &err), IMBREX_STATUS_INVALID_ARGUMENT, &err,
                 "closed-folder|a folder");
    snprintf(path, sizeof(path), "%s/none/t.json", folder);
    expect_error(imbrex_tune_table_write(table, path, &err), IMBREX_STATUS_IO, &err,
                 "t.json: cannot create: No such file");
    if (geteuid() != 0) {
        snprintf(path, sizeof(path), "%s/t.json", folder);
        assert_int_equal(chmod(folder, 0500), 0);
        expect_error(imbrex_tune_table_write(table, path, &err), IMBREX_STATUS_IO, &err,
                     "t.json: cannot create: Permission denied");
        assert_int_equal(chmod(folder, 0700), 0);
    }
    imbrex_tune_table_destroy(table);
}

/* ---- the key ---- */

/* Catches a table that was measured on something else being used, or refused without a word, or
 * with one that does not say what differs. */
static void test_other_keys(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row row = row_of(IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, true);
    struct imbrex_tune_key others[8];
    static const char *const words[] = {
        "GPU",         "driver", "version of imbrex", "number of SMs", "compute capability",
        "CUDA driver", "clock",  "power limit"};
    for (int i = 0; i < 8; i++) {
        others[i] = key;
    }
    strcpy(others[0].gpu, "Fake GPU 00");
    strcpy(others[1].driver, "1.2.3");
    strcpy(others[2].version, "0.0.0-other");
    others[3].num_sms--;
    others[4].compute_capability = 91;
    others[5].driver_version++;
    others[6].max_clock_mhz++;
    others[7].power_limit_watts++;
    fixture_path(path, "other-key.json");
    for (int i = 0; i < 8; i++) {
        struct imbrex_error err = {0};
        struct imbrex_tune_table *table = NULL;
        struct imbrex_device *device = NULL;
        struct imbrex_device_info description;
        write_rows(path, &others[i], &row, 1);
        expect_error(imbrex_tune_table_open(path, &key, &table, &err), IMBREX_STATUS_UNSUPPORTED,
                     &err, words[i]);
        assert_null(table);
        for (int is_optional = 0; is_optional < 2; is_optional++) {
            assert_int_equal(open_tuned(path, is_optional == 1, &device, &err), IMBREX_STATUS_OK);
            assert_int_equal(num_lines, 1);
            assert_non_null(strstr(lines[0], words[i]));
            assert_non_null(strstr(lines[0], "imbrex tune"));
            imbrex_device_describe(device, &description);
            assert_null(description.tuned);
            assert_int_equal(description.num_tuned, 0);
            imbrex_device_close(device);
        }
    }
}

/* Catches names of cards that are no names of files, or cards that share one. */
static void test_file_names(void **state)
{
    (void)state;
    struct imbrex_tune_key key = {
        .gpu = "NVIDIA H200", .num_sms = 132, .max_clock_mhz = 1980, .power_limit_watts = 700};
    char name[IMBREX_TUNE_NAME_BYTES];
    imbrex_tune_file_name(&key, name);
    assert_string_equal(name, "nvidia-h200-132sm-1980mhz-700w.json");
    strcpy(key.gpu, "../NVIDIA/H100 80GB (HBM3)");
    imbrex_tune_file_name(&key, name);
    assert_string_equal(name, "nvidia-h100-80gb-hbm3-132sm-1980mhz-700w.json");
    memset(key.gpu, 'x', sizeof(key.gpu) - 1);
    imbrex_tune_file_name(&key, name);
    assert_non_null(strstr(name, "-132sm-1980mhz-700w.json"));
}

/* ---- choices ---- */

static struct imbrex_kernel_plan chosen(const struct imbrex_device *device,
                                        enum imbrex_kernel_op op, int32_t m, int32_t n, int32_t k)
{
    struct imbrex_kernel_shape shape = {.op = op, .m = m, .n = n, .k = k};
    struct imbrex_kernel_plan plan;
    assert_int_equal(imbrex_kernel_choose(device, &shape, IMBREX_KERNEL_ANY_VARIANT, &plan, NULL),
                     IMBREX_STATUS_OK);
    return plan;
}

static bool is_tuned(const struct imbrex_kernel_plan *plan, const struct imbrex_tune_row *row)
{
    return plan->variant_idx == row->plan.variant_idx && plan->cluster_n == row->plan.cluster_n &&
           plan->group_m == row->plan.group_m;
}

/* Catches a tuned plan that does not go before the library's own choice, in what is told and in
 * what is launched, or that is taken for another shape, op or number of tiles; and one that was not
 * faster and is taken all the same. */
static void test_tuned_plans_come_first(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_tune_key key = read_key();
    const enum imbrex_kernel_op swiglu = IMBREX_KERNEL_OP_GEMM_SWIGLU;
    struct imbrex_tune_row rows[] = {row_of(swiglu, 512, true), row_of(swiglu, 480, false),
                                     row_of(IMBREX_KERNEL_OP_GEMM, 1024, true)};
    struct imbrex_device *device = NULL;
    struct imbrex_device_info description;

    write_rows(fixture_path(path, "first.json"), &key, rows, 3);
    assert_int_equal(open_tuned(path, false, &device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(num_lines, 0);
    imbrex_device_describe(device, &description);
    assert_string_equal(description.tuned, path);
    assert_int_equal(description.num_tuned, 2);
    static const struct {
        enum imbrex_kernel_op op;
        int32_t m, n, k;
        int row; /* -1: none */
    } cases[] = {
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, 4864, 896, 0},
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 481, 4864, 896, 0},
        /* Two rows would do: that of fewer tokens is nearer. */
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 480, 4864, 896, -1},
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 450, 4864, 896, -1},
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 513, 4864, 896, -1},
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, 4872, 896, -1},
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, 4864, 904, -1},
        {IMBREX_KERNEL_OP_GEMM_SWIGLU, 1024, 4864, 896, -1},
        {IMBREX_KERNEL_OP_GEMM, 1024, 4864, 896, 2},
        {IMBREX_KERNEL_OP_GEMM, 512, 4864, 896, -1},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct imbrex_kernel_plan plan =
            chosen(device, cases[i].op, cases[i].m, cases[i].n, cases[i].k);
        for (int row = 0; row < 3; row++) {
            if (rows[row].shape.op == cases[i].op) {
                assert_int_equal(is_tuned(&plan, &rows[row]),
                                 cases[i].row == row || (row == 1 && cases[i].row == 0));
            }
        }
    }

    struct imbrex_kernel_plan untuned, single;
    assert_int_equal(
        imbrex_kernel_choose(device, &rows[0].shape, IMBREX_KERNEL_ANY_UNTUNED, &untuned, NULL),
        IMBREX_STATUS_OK);
    assert_false(is_tuned(&untuned, &rows[0]));
    assert_int_equal(imbrex_kernel_choose(device, &rows[0].shape, -3, &single, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);

    struct imbrex_kernel_variant variant;
    struct imbrex_gemm_params params = {.a = (const void *)0x10000000,
                                        .b = (const void *)0x20000000,
                                        .d = (void *)0x40000000,
                                        .num_tokens = 1024,
                                        .in_features = 896,
                                        .out_features = 4864};
    assert_int_equal(imbrex_gemm(device, &params, NULL, NULL, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_kernel_variant_describe(IMBREX_KERNEL_OP_GEMM, rows[2].plan.variant_idx,
                                                    &variant, NULL),
                     IMBREX_STATUS_OK);
    assert_string_equal(fake.kernel, variant.name);
    assert_int_equal(fake.params.group_m, 3);
    imbrex_device_close(device);
}

/* Catches a plan of kernels that the device does not run being taken from a table, and one of those
 * that it runs being refused. */
static void test_portable_plans(void **state)
{
    (void)state;
    struct imbrex_tune_row rows[] = {row_of(IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, true),
                                     row_of(IMBREX_KERNEL_OP_GEMM_SWIGLU, 1024, true)};
    struct imbrex_device *device = NULL;
    struct imbrex_tune_key key;

    rows[1].plan.variant_idx = find_variant(IMBREX_KERNEL_OP_GEMM_SWIGLU, true);
    rows[1].plan.cluster_n = 1;
    fake_reset();
    fake.compute_major = 8;
    struct driver driver = fake_table();
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_tune_key_read(device, &key, NULL), IMBREX_STATUS_OK);
    device->tuned = table_of(&key, rows, 2);
    struct imbrex_kernel_plan plan = chosen(device, IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, 4864, 896);
    assert_false(is_tuned(&plan, &rows[0]));
    plan = chosen(device, IMBREX_KERNEL_OP_GEMM_SWIGLU, 1024, 4864, 896);
    assert_true(is_tuned(&plan, &rows[1]));
    imbrex_device_close(device);
}

/* Catches the file of a card that is not found in its folder, a folder that is required to be
 * there, and a file that is required and may be missing. */
static void test_folders(void **state)
{
    (void)state;
    char folder[FIXTURE_PATH_BYTES], name[IMBREX_TUNE_NAME_BYTES];
    char path[FIXTURE_PATH_BYTES + IMBREX_TUNE_NAME_BYTES], none[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row row = row_of(IMBREX_KERNEL_OP_GEMM, 512, true);
    struct imbrex_device *device = NULL;
    struct imbrex_device_info description;

    fixture_folder(folder, "tuned-folder");
    fixture_path(none, "no-tuned-folder");
    const char *const empty[] = {folder, none};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(open_tuned(empty[i], true, &device, NULL), IMBREX_STATUS_OK);
        assert_int_equal(num_lines, 0);
        imbrex_device_describe(device, &description);
        assert_null(description.tuned);
        imbrex_device_close(device);
        device = NULL;
        expect_error(open_tuned(empty[i], false, &device, &err), IMBREX_STATUS_NOT_FOUND, &err,
                     i == 0 ? "tuned-folder/fake-gpu-0-132sm" : "no-tuned-folder");
        assert_null(device);
        assert_int_equal(fake.num_retained, 0);
    }
    imbrex_tune_file_name(&key, name);
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    write_rows(path, &key, &row, 1);
    assert_int_equal(open_tuned(folder, true, &device, NULL), IMBREX_STATUS_OK);
    imbrex_device_describe(device, &description);
    assert_string_equal(description.tuned, path);
    imbrex_device_close(device);
}

/* ---- files that are no tables ---- */

/* Catches a file that is no table being used, or ending the program; or the message without the
 * field. With `words` NULL the file is good. */
static void expect_file(const char *path, const char *text, const char *words)
{
    struct imbrex_error err = {0};
    struct imbrex_device *device = NULL;
    fixture_write(path, text, strlen(text));
    enum imbrex_status status = open_tuned(path, false, &device, &err);
    if (words == NULL) {
        assert_int_equal(status, IMBREX_STATUS_OK);
        imbrex_device_close(device);
        return;
    }
    expect_error(status, IMBREX_STATUS_FORMAT, &err, words);
    assert_int_equal(open_tuned(path, true, &device, &err), IMBREX_STATUS_OK);
    assert_int_equal(num_lines, 1);
    imbrex_device_close(device);
}

/* The text with `from`, which is there, replaced once. */
static char *replaced(const char *text, const char *from, const char *to)
{
    const char *at = strstr(text, from);
    char *made = malloc(strlen(text) + strlen(to) + 1);
    assert_true(at != NULL && made != NULL);
    sprintf(made, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return made;
}

static void test_files_that_are_no_tables(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES], *text;
    size_t num_bytes;
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row row = row_of(IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, true);
    static const struct {
        const char *from, *to, *words;
    } cases[] = {
        {"imbrex tuned plans", "imbrex tuned plans", NULL},
        {"imbrex tuned plans", "imbrex kv blocks", "bad-table.json|format|imbrex kv blocks"},
        {"\"format\":", "\"formats\":", "format|nothing"},
        {"\"key\": {", "\"key\": 7, \"old\": {", "key|an object|an integer"},
        {"\"num_sms\": 132", "\"num_sms\": -132", "num_sms|-132"},
        {"\"num_sms\": 132", "\"num_sms\": 1e9", "num_sms"},
        {"\"gpu\": \"", "\"gpu\": 7, \"old\": \"", "gpu|string|7"},
        {"\"plans\": [", "\"plans\": 3, \"old\": [", "plans|an array|an integer"},
        {"\"plans\": [", "\"plans\": [[], ", "plans[0]|an object|an array"},
        {"\"op\": \"gemm_swiglu\"", "\"op\": \"gemv\"", "plans[0]|op|gemv"},
        {"\"kernel\": \"", "\"kernel\": \"x", "plans[0]|kernel|xgemm_swiglu"},
        {"\"m\": 512", "\"m\": 0", "plans[0]|m|0"},
        {"\"m\": 512", "\"m\": 99999999999", "plans[0]|m|99999999999"},
        {"\"n\": 4864", "\"n\": 4860", "plans[0]|multiple of 8"},
        {"\"k\": 896", "\"k\": \"896\"", "plans[0]|k|a string"},
        {"\"cluster_m\": 1", "\"cluster_m\": 3", "plans[0]|cluster"},
        {"\"group_m\": 3", "\"group_m\": 0", "plans[0]|group_m"},
        {"\"num_tiles_n\": 0", "\"num_tiles_n\": 2000000000", "plans[0]|num_tiles_n|2000000000"},
        {"\"is_faster\": true", "\"is_faster\": 1", "plans[0]|is_faster|true or false"},
        {"\"us\": 10.5", "\"us\": -10.5", "plans[0]|us|-10.5"},
        {"{\n", "[", "bad-table.json"},
    };

    write_rows(fixture_path(path, "bad-table.json"), &key, &row, 1);
    text = fixture_read(path, &num_bytes);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *changed = replaced(text, cases[i].from, cases[i].to);
        expect_file(path, changed, cases[i].words);
        free(changed);
    }
    expect_file(path, "{}", "format|nothing");
    for (size_t length = 1; length + 2 < num_bytes; length += num_bytes / 37) {
        char *cut = strndup(text, length);
        assert_non_null(cut);
        expect_file(path, cut, "bad-table.json");
        free(cut);
    }
    free(text);
}

/* Catches a file with changed bytes that ends the program, or whose plans pass for ones that a
 * launch may have and are not. */
static void test_changed_bytes(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES], *text;
    size_t num_bytes;
    uint32_t random = 1;
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row rows[] = {row_of(IMBREX_KERNEL_OP_GEMM_SWIGLU, 512, true),
                                     row_of(IMBREX_KERNEL_OP_GEMM, 1024, true)};
    struct tile_machine machine = {.num_sms = key.num_sms, .max_shared_bytes = INT32_MAX};
    int num_accepted = 0;

    write_rows(fixture_path(path, "changed.json"), &key, rows, 2);
    text = fixture_read(path, &num_bytes);
    for (int i = 0; i < 1000; i++) {
        struct imbrex_tune_table *table = NULL;
        char *changed = malloc(num_bytes);
        assert_non_null(changed);
        memcpy(changed, text, num_bytes);
        for (int j = 0; j < 1 + i % 3; j++) {
            static const char bytes[] = "0123456789-.eE\"{}[]:, tfn\\";
            random = random * 1664525u + 1013904223u;
            size_t at = (random >> 8) % num_bytes;
            random = random * 1664525u + 1013904223u;
            changed[at] = bytes[(random >> 8) % (sizeof(bytes) - 1)];
        }
        fixture_write(path, changed, num_bytes);
        if (imbrex_tune_table_open(path, &key, &table, NULL) == IMBREX_STATUS_OK) {
            num_accepted++;
            for (int32_t r = 0; r < imbrex_tune_table_count(table); r++) {
                const struct imbrex_tune_row *row = imbrex_tune_table_at(table, r);
                struct tile_problem problem;
                struct tile_plan tile;
                assert_int_equal(kernel_shape_problem(&row->shape, &problem, NULL),
                                 IMBREX_STATUS_OK);
                assert_int_equal(kernel_plan_tile(row->shape.op, &row->plan, &tile, NULL),
                                 IMBREX_STATUS_OK);
                assert_int_equal(tile_check(&machine, &problem, &tile, NULL), IMBREX_STATUS_OK);
            }
        }
        imbrex_tune_table_destroy(table);
        free(changed);
    }
    assert_true(num_accepted > 0);
    free(text);
}

/* Catches a device that leaks, or opens half, when a call of the driver fails while its table is
 * read. */
static void test_failing_driver(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row row = row_of(IMBREX_KERNEL_OP_GEMM, 512, true);
    enum imbrex_status status = IMBREX_STATUS_DEVICE;
    int num_failures = 0;

    write_rows(fixture_path(path, "failing.json"), &key, &row, 1);
    for (int fail_at = 1; status != IMBREX_STATUS_OK; fail_at++) {
        struct imbrex_device *device = NULL;
        struct imbrex_device_options options = imbrex_device_options_default();
        fake_reset();
        struct driver driver = fake_table();
        fake.fail_at = fail_at;
        options.tuned = path;
        status = cuda_device_create(&driver, 0, &options, &device, NULL);
        num_failures += status != IMBREX_STATUS_OK;
        assert_int_equal(device != NULL, status == IMBREX_STATUS_OK);
        imbrex_device_close(device);
        assert_int_equal(fake.num_retained, 0);
    }
    assert_true(num_failures > 4);
}

/* Catches an engine's device that does not get its table, or goes on with one that was asked for
 * and is none. */
static void test_device_of_an_engine(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES], bad[FIXTURE_PATH_BYTES];
    struct imbrex_tune_key key = read_key();
    struct imbrex_tune_row row = row_of(IMBREX_KERNEL_OP_GEMM, 512, true);
    struct imbrex_error err = {0};
    const struct log log = {.write = keep_line};
    struct device_choice choice = {.tuned = bad};
    struct device *device = NULL;

    write_rows(fixture_path(path, "engine.json"), &key, &row, 1);
    fixture_write(fixture_path(bad, "engine-bad.json"), "{}", 2);
    fake_reset();
    struct driver driver = fake_table();
    num_lines = 0;
    assert_int_equal(device_cuda_create_on(&driver, 0, &device, &err), IMBREX_STATUS_OK);
    expect_error(device_cuda_tune(device, &choice, &log, &err), IMBREX_STATUS_FORMAT, &err,
                 "engine-bad.json");
    assert_int_equal(num_lines, 0);
    choice.tuned_is_optional = true;
    assert_int_equal(device_cuda_tune(device, &choice, &log, &err), IMBREX_STATUS_OK);
    assert_int_equal(num_lines, 1);
    assert_null(device_cuda_kernels(device)->tuned);
    choice.tuned = path;
    assert_int_equal(device_cuda_tune(device, &choice, &log, &err), IMBREX_STATUS_OK);
    assert_int_equal(num_lines, 1);
    assert_int_equal(device_cuda_kernels(device)->description.num_tuned, 1);
    device_destroy(device);
}

/* ---- judgement ---- */

/* Catches luck taken for speed, and speed for luck. */
static void test_judgement(void **state)
{
    (void)state;
    enum { NUM_PAIRS = 25 };
    double us[NUM_PAIRS], default_us[NUM_PAIRS];
    static const struct {
        double gain;
        int num_lost; /* pairs in which the plan takes twice as long */
        int num_pairs;
        bool is_faster;
    } cases[] = {
        {1.01, 0, NUM_PAIRS, true}, {1.01, 5, NUM_PAIRS, true},   {1.01, 6, NUM_PAIRS, false},
        {1.05, 12, 25, false},      {1.001, 0, NUM_PAIRS, false}, {1.0, 0, NUM_PAIRS, false},
        {0.9, 0, NUM_PAIRS, false}, {1.05, 0, 3, true},           {1.05, 1, 9, false},
        {1.05, 2, 10, true},        {1.05, 0, 1, true},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct imbrex_tune_row row = {.is_faster = false};
        for (int j = 0; j < cases[i].num_pairs; j++) {
            /* The clock drops by a third on the way: pairs, not times, are compared. */
            default_us[j] = j < cases[i].num_pairs / 2 ? 100.0 : 150.0;
            us[j] = default_us[j] / cases[i].gain * (j < cases[i].num_lost ? 2.0 : 1.0);
        }
        imbrex_tune_judge(us, default_us, cases[i].num_pairs, &row);
        if (row.is_faster != cases[i].is_faster) {
            fail_msg("case %zu: found faster: %d", i, row.is_faster);
        }
        if (2 * cases[i].num_lost < cases[i].num_pairs) {
            assert_true(row.gain > cases[i].gain - 1e-9 && row.gain < cases[i].gain + 1e-9);
        }
    }
    struct imbrex_tune_row row;
    imbrex_tune_judge((const double[]){4.0, 1.0, 2.0, 3.0}, (const double[]){9.0, 9.0, 5.0, 8.0}, 4,
                      &row);
    assert_true(row.us == 2.5 && row.default_us == 8.5);
}

int run_tune_table_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_outlive_a_run),
        cmocka_unit_test(test_rows_are_checked),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_places_that_take_no_file),
        cmocka_unit_test(test_other_keys),
        cmocka_unit_test(test_file_names),
        cmocka_unit_test(test_tuned_plans_come_first),
        cmocka_unit_test(test_portable_plans),
        cmocka_unit_test(test_folders),
        cmocka_unit_test(test_files_that_are_no_tables),
        cmocka_unit_test(test_changed_bytes),
        cmocka_unit_test(test_failing_driver),
        cmocka_unit_test(test_device_of_an_engine),
        cmocka_unit_test(test_judgement),
    };
    return cmocka_run_group_tests_name("tune_table", tests, NULL, NULL);
}
