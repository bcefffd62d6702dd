/* SPDX-License-Identifier: Apache-2.0 */
/* Rows in memory, and their file. Kernels go by name, so that a file outlives a change of the list;
 * whatever a file says goes through tile_check, here and again for the problem at hand. */
#include "ops/cuda/tune_table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file_writer.h"
#include "base/json.h"
#include "ops/cuda/gemm_launch.h"

#define FORMAT_NAME "imbrex tuned plans"
#define FORMAT_VERSION 1
#define MAX_ROWS 16384
#define MAX_FILE_BYTES ((size_t)16 << 20)
#define LEAST_GAIN 1.002
#define FEW_PAIRS 10 /* of fewer, all have to be won */
#define MAX_US 1e12

struct imbrex_tune_table {
    struct imbrex_tune_key key;
    struct imbrex_tune_row *rows; /* [capacity] */
    int32_t num_rows, capacity;
};

static const char *const op_names[] = {
    [IMBREX_KERNEL_OP_GEMM_SWIGLU] = "gemm_swiglu",
    [IMBREX_KERNEL_OP_GEMM] = "gemm",
};
#define NUM_OPS (int)(sizeof(op_names) / sizeof(op_names[0]))

/* ---- judgement ---- */

/* Without memory of its own: the value with as many below it as above. */
static double median(const double *values, const double *divisors, int32_t count)
{
    double middle[2] = {0.0, 0.0};
    for (int32_t i = 0; i < count; i++) {
        double value = values[i] / (divisors != NULL ? divisors[i] : 1.0);
        int32_t rank = 0;
        for (int32_t j = 0; j < count; j++) {
            double other = values[j] / (divisors != NULL ? divisors[j] : 1.0);
            rank += other < value || (other == value && j < i);
        }
        if (rank == (count - 1) / 2) {
            middle[0] = value;
        }
        if (rank == count / 2) {
            middle[1] = value;
        }
    }
    return (middle[0] + middle[1]) / 2.0;
}

void imbrex_tune_judge(const double *us, const double *default_us, int32_t num_pairs,
                       struct imbrex_tune_row *row)
{
    int32_t num_won = 0;
    for (int32_t i = 0; i < num_pairs; i++) {
        num_won += us[i] < default_us[i];
    }
    row->us = median(us, NULL, num_pairs);
    row->default_us = median(default_us, NULL, num_pairs);
    row->gain = median(default_us, us, num_pairs);
    row->is_faster = row->gain >= LEAST_GAIN &&
                     (num_pairs < FEW_PAIRS ? num_won == num_pairs : 5 * num_won >= 4 * num_pairs);
}

/* ---- rows ---- */

enum imbrex_status imbrex_tune_table_create(const struct imbrex_tune_key *key,
                                            struct imbrex_tune_table **table,
                                            struct imbrex_error *err)
{
    struct imbrex_tune_table *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "tuned plans", sizeof(*created));
    }
    created->key = *key;
    *table = created;
    return IMBREX_STATUS_OK;
}

void imbrex_tune_table_destroy(struct imbrex_tune_table *table)
{
    if (table != NULL) {
        free(table->rows);
        free(table);
    }
}

int32_t imbrex_tune_table_count(const struct imbrex_tune_table *table)
{
    return table->num_rows;
}

const struct imbrex_tune_row *imbrex_tune_table_at(const struct imbrex_tune_table *table,
                                                   int32_t row_idx)
{
    return &table->rows[row_idx];
}

int32_t tune_table_num_faster(const struct imbrex_tune_table *table)
{
    int32_t count = 0;
    for (int32_t i = 0; i < table->num_rows; i++) {
        count += table->rows[i].is_faster;
    }
    return count;
}

static int32_t find_row(const struct imbrex_tune_table *table,
                        const struct imbrex_kernel_shape *shape)
{
    for (int32_t i = 0; i < table->num_rows; i++) {
        const struct imbrex_kernel_shape *other = &table->rows[i].shape;
        if (other->op == shape->op && other->m == shape->m && other->n == shape->n &&
            other->k == shape->k && other->is_split == shape->is_split) {
            return i;
        }
    }
    return -1;
}

const struct imbrex_tune_row *imbrex_tune_table_find(const struct imbrex_tune_table *table,
                                                     const struct imbrex_kernel_shape *shape)
{
    int32_t row_idx = find_row(table, shape);
    return row_idx < 0 ? NULL : &table->rows[row_idx];
}

/* Whether the plan computes the shape on a GPU like the key's. Which kernels that one runs, the
 * device decides that looks a plan up. */
static enum imbrex_status check_row(const struct imbrex_tune_table *table,
                                    const struct imbrex_tune_row *row, struct imbrex_error *err)
{
    struct tile_machine machine = {.num_sms = table->key.num_sms, .max_shared_bytes = INT32_MAX};
    struct tile_problem problem;
    struct tile_plan tile;

    if (row->shape.is_split) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "shape: expected gate and up that are seen as one tensor, found others");
    }
    TRY(kernel_shape_problem(&row->shape, &problem, err));
    TRY(kernel_plan_tile(row->shape.op, &row->plan, &tile, err));
    machine.is_portable = kernel_table_at(tile.kernel_idx)->is_portable;
    return tile_check(&machine, &problem, &tile, err);
}

enum imbrex_status imbrex_tune_table_set(struct imbrex_tune_table *table,
                                         const struct imbrex_tune_row *row,
                                         struct imbrex_error *err)
{
    TRY(check_row(table, row, err));
    int32_t row_idx = find_row(table, &row->shape);
    if (row_idx >= 0) {
        table->rows[row_idx] = *row;
        return IMBREX_STATUS_OK;
    }
    if (table->num_rows == MAX_ROWS) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "tuned plans: expected at most %d shapes, found more", MAX_ROWS);
    }
    if (table->num_rows == table->capacity) {
        int32_t capacity = table->capacity == 0 ? 64 : 2 * table->capacity;
        size_t num_bytes = (size_t)capacity * sizeof(table->rows[0]);
        struct imbrex_tune_row *rows = realloc(table->rows, num_bytes);
        if (rows == NULL) {
            return error_out_of_memory(err, "tuned plans", num_bytes);
        }
        table->rows = rows;
        table->capacity = capacity;
    }
    table->rows[table->num_rows++] = *row;
    return IMBREX_STATUS_OK;
}

bool tune_table_find_plan(const struct imbrex_tune_table *table, const struct tile_machine *machine,
                          const struct tile_problem *problem, int32_t begin, int32_t end,
                          struct tile_plan *plan)
{
    const struct imbrex_tune_row *nearest = NULL;
    struct tile_problem measured;
    struct tile_plan tile;

    for (int32_t i = 0; table != NULL && i < table->num_rows; i++) {
        const struct imbrex_tune_row *row = &table->rows[i];
        if (kernel_shape_problem(&row->shape, &measured, NULL) == IMBREX_STATUS_OK &&
            measured.form == problem->form && measured.columns == problem->columns &&
            measured.k == problem->k && problem->m <= measured.m &&
            problem->m > measured.m - TILE_MEASURED_ROWS &&
            (nearest == NULL || row->shape.m < nearest->shape.m)) {
            nearest = row;
        }
    }
    if (nearest == NULL || !nearest->is_faster ||
        kernel_plan_tile(nearest->shape.op, &nearest->plan, &tile, NULL) != IMBREX_STATUS_OK ||
        tile.kernel_idx < begin || tile.kernel_idx >= end ||
        tile_check(machine, problem, &tile, NULL) != IMBREX_STATUS_OK) {
        return false;
    }
    *plan = tile;
    return true;
}

/* ---- file: writing ---- */

static json_t *key_json(const struct imbrex_tune_key *key)
{
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:i, s:s}", "gpu", key->gpu, "num_sms",
                     (int)key->num_sms, "compute_capability", (int)key->compute_capability,
                     "max_clock_mhz", (int)key->max_clock_mhz, "power_limit_watts",
                     (int)key->power_limit_watts, "driver", key->driver, "cuda_driver",
                     (int)key->driver_version, "version", key->version);
}

static json_t *row_json(const struct imbrex_tune_row *row)
{
    struct imbrex_kernel_variant variant;
    if (imbrex_kernel_variant_describe(row->shape.op, row->plan.variant_idx, &variant, NULL) !=
        IMBREX_STATUS_OK) {
        return NULL;
    }
    return json_pack("{s:s, s:i, s:i, s:i, s:s, s:i, s:i, s:i, s:i, s:b, s:f, s:f, s:f}", "op",
                     op_names[row->shape.op], "m", (int)row->shape.m, "n", (int)row->shape.n, "k",
                     (int)row->shape.k, "kernel", variant.name, "cluster_m",
                     (int)row->plan.cluster_m, "cluster_n", (int)row->plan.cluster_n, "group_m",
                     (int)row->plan.group_m, "num_tiles_n", (int)row->plan.num_tiles_n, "is_faster",
                     row->is_faster, "us", row->us, "default_us", row->default_us, "gain",
                     row->gain);
}

/* NULL: out of memory. free() it. */
static char *table_text(const struct imbrex_tune_table *table)
{
    json_t *rows = json_array(), *key = key_json(&table->key);
    bool is_ok = rows != NULL && key != NULL;
    for (int32_t i = 0; is_ok && i < table->num_rows; i++) {
        is_ok = json_array_append_new(rows, row_json(&table->rows[i])) == 0;
    }
    json_t *root = is_ok ? json_pack("{s:s, s:i, s:O, s:O}", "format", FORMAT_NAME,
                                     "format_version", FORMAT_VERSION, "key", key, "plans", rows)
                         : NULL;
    json_decref(rows);
    json_decref(key);
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(6)) : NULL;
    json_decref(root);
    return text;
}

enum imbrex_status imbrex_tune_table_write(const struct imbrex_tune_table *table, const char *path,
                                           struct imbrex_error *err)
{
    struct file_writer writer = {0};
    enum imbrex_status status;
    char *text = table_text(table);

    if (text == NULL) {
        return error_out_of_memory(err, path, (size_t)table->num_rows * sizeof(table->rows[0]));
    }
    TRY_OR_FAIL(file_writer_open(path, true, &writer, err));
    TRY_OR_FAIL(file_writer_write(&writer, text, strlen(text), err));
    TRY_OR_FAIL(file_writer_write(&writer, "\n", 1, err));
    TRY_OR_FAIL(file_writer_commit(&writer, err));
fail:
    file_writer_abandon(&writer);
    free(text);
    return status;
}

/* ---- file: reading ---- */

static enum imbrex_status read_text(const char *path, const json_t *object, const char *field,
                                    char *text, size_t text_bytes, struct imbrex_error *err)
{
    const char *found = NULL;
    TRY(json_get_string(path, object, field, &found, err));
    if (strlen(found) >= text_bytes) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected at most %zu characters, found %zu", path, field,
                         text_bytes - 1, strlen(found));
    }
    memcpy(text, found, strlen(found) + 1);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_key(const char *path, const json_t *root,
                                   struct imbrex_tune_key *key, struct imbrex_error *err)
{
    const json_t *object = json_object_get(root, "key");
    struct imbrex_tune_key read = {.gpu = ""};
    const struct {
        const char *field;
        int32_t *value;
    } numbers[] = {{"num_sms", &read.num_sms},
                   {"compute_capability", &read.compute_capability},
                   {"max_clock_mhz", &read.max_clock_mhz},
                   {"power_limit_watts", &read.power_limit_watts},
                   {"cuda_driver", &read.driver_version}};

    if (!json_is_object(object)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: key: expected an object, found %s", path,
                         json_kind(object));
    }
    TRY(read_text(path, object, "gpu", read.gpu, sizeof(read.gpu), err));
    TRY(read_text(path, object, "driver", read.driver, sizeof(read.driver), err));
    TRY(read_text(path, object, "version", read.version, sizeof(read.version), err));
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        TRY(json_get_int32(path, object, numbers[i].field, 0, INT32_MAX, numbers[i].value, err));
    }
    *key = read;
    return IMBREX_STATUS_OK;
}

/* What differs, and from what. */
static enum imbrex_status refuse_key(const char *path, const char *what, const char *expected,
                                     const char *found, struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: tuned plans of another %s: expected \"%s\", found \"%s\"", path, what,
                     expected, found);
}

static enum imbrex_status check_key(const char *path, const struct imbrex_tune_key *expected,
                                    const struct imbrex_tune_key *found, struct imbrex_error *err)
{
    const struct {
        const char *what;
        const char *expected, *found;
    } texts[] = {{"GPU", expected->gpu, found->gpu},
                 {"driver", expected->driver, found->driver},
                 {"version of imbrex", expected->version, found->version}};
    const struct {
        const char *what;
        int32_t expected, found;
    } numbers[] = {
        {"number of SMs", expected->num_sms, found->num_sms},
        {"compute capability", expected->compute_capability, found->compute_capability},
        {"CUDA driver", expected->driver_version, found->driver_version},
        {"clock (MHz)", expected->max_clock_mhz, found->max_clock_mhz},
        {"power limit (W)", expected->power_limit_watts, found->power_limit_watts},
    };

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (strcmp(texts[i].expected, texts[i].found) != 0) {
            return refuse_key(path, texts[i].what, texts[i].expected, texts[i].found, err);
        }
    }
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        if (numbers[i].expected != numbers[i].found) {
            char wanted[16], got[16];
            snprintf(wanted, sizeof(wanted), "%" PRId32, numbers[i].expected);
            snprintf(got, sizeof(got), "%" PRId32, numbers[i].found);
            return refuse_key(path, numbers[i].what, wanted, got, err);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_op(const char *path, const json_t *object, enum imbrex_kernel_op *op,
                                  struct imbrex_error *err)
{
    const char *name = NULL;
    TRY(json_get_string(path, object, "op", &name, err));
    for (int i = 0; i < NUM_OPS; i++) {
        if (strcmp(name, op_names[i]) == 0) {
            *op = (enum imbrex_kernel_op)i;
            return IMBREX_STATUS_OK;
        }
    }
    return error_set(err, IMBREX_STATUS_FORMAT,
                     "%s: op: expected gemm_swiglu or gemm, found \"%.64s\"", path, name);
}

static enum imbrex_status read_variant(const char *path, const json_t *object,
                                       enum imbrex_kernel_op op, int32_t *variant_idx,
                                       struct imbrex_error *err)
{
    const char *name = NULL;
    struct imbrex_kernel_variant variant;
    TRY(json_get_string(path, object, "kernel", &name, err));
    for (int32_t i = 0; i < imbrex_kernel_num_variants(op); i++) {
        if (imbrex_kernel_variant_describe(op, i, &variant, NULL) == IMBREX_STATUS_OK &&
            strcmp(variant.name, name) == 0) {
            *variant_idx = i;
            return IMBREX_STATUS_OK;
        }
    }
    return error_set(err, IMBREX_STATUS_FORMAT, "%s: kernel: expected one of %s, found \"%.96s\"",
                     path, op_names[op], name);
}

/* `path` names file and row. */
static enum imbrex_status read_row(const char *path, const json_t *object,
                                   struct imbrex_tune_row *row, struct imbrex_error *err)
{
    struct imbrex_tune_row read = {.is_faster = false};
    const struct {
        const char *field;
        int32_t least;
        int32_t *value;
    } numbers[] = {
        {"m", 1, &read.shape.m},
        {"n", 1, &read.shape.n},
        {"k", 1, &read.shape.k},
        {"cluster_m", 1, &read.plan.cluster_m},
        {"cluster_n", 1, &read.plan.cluster_n},
        {"group_m", 1, &read.plan.group_m},
        {"num_tiles_n", 0, &read.plan.num_tiles_n},
    };

    if (!json_is_object(object)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: expected an object, found %s", path,
                         json_kind(object));
    }
    const json_t *is_faster = json_object_get(object, "is_faster");
    if (!json_is_boolean(is_faster)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: is_faster: expected true or false, found %s", path,
                         json_kind(is_faster));
    }
    read.is_faster = json_is_true(is_faster);
    TRY(read_op(path, object, &read.shape.op, err));
    TRY(read_variant(path, object, read.shape.op, &read.plan.variant_idx, err));
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        TRY(json_get_int32(path, object, numbers[i].field, numbers[i].least, INT32_MAX,
                           numbers[i].value, err));
    }
    TRY(json_get_double(path, object, "us", 0.0, MAX_US, &read.us, err));
    TRY(json_get_double(path, object, "default_us", 0.0, MAX_US, &read.default_us, err));
    TRY(json_get_double(path, object, "gain", 0.0, MAX_US, &read.gain, err));
    *row = read;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_rows(const char *path, const json_t *root,
                                    struct imbrex_tune_table *table, struct imbrex_error *err)
{
    const json_t *rows = json_object_get(root, "plans");
    if (!json_is_array(rows)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: plans: expected an array, found %s", path,
                         json_kind(rows));
    }
    for (size_t i = 0; i < json_array_size(rows); i++) {
        struct imbrex_error reason = {.message = ""};
        struct imbrex_tune_row row;
        char where[160];
        /* The end of a long path says more than its beginning. */
        size_t length = strlen(path);
        snprintf(where, sizeof(where), "%s%s: plans[%zu]", length > 120 ? "..." : "",
                 length > 120 ? path + length - 120 : path, i);
        TRY(read_row(where, json_array_get(rows, i), &row, err));
        enum imbrex_status status = imbrex_tune_table_set(table, &row, &reason);
        if (status != IMBREX_STATUS_OK) {
            return error_set(err,
                             status == IMBREX_STATUS_OUT_OF_MEMORY ? status : IMBREX_STATUS_FORMAT,
                             "%s: %s", where, reason.message);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_root(const char *path, const json_t *root,
                                    const struct imbrex_tune_key *key,
                                    struct imbrex_tune_table *table, struct imbrex_error *err)
{
    const char *format = NULL;
    int32_t version = 0;
    struct imbrex_tune_key found;

    TRY(json_get_string(path, root, "format", &format, err));
    if (strcmp(format, FORMAT_NAME) != 0) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: format: expected \"%s\", found \"%.64s\"",
                         path, FORMAT_NAME, format);
    }
    TRY(json_get_int32(path, root, "format_version", 1, INT32_MAX, &version, err));
    if (version != FORMAT_VERSION) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: tuned plans of another format: expected %d, found %d", path,
                         FORMAT_VERSION, (int)version);
    }
    TRY(read_key(path, root, &found, err));
    TRY(check_key(path, key, &found, err));
    return read_rows(path, root, table, err);
}

enum imbrex_status imbrex_tune_table_open(const char *path, const struct imbrex_tune_key *key,
                                          struct imbrex_tune_table **table,
                                          struct imbrex_error *err)
{
    struct imbrex_tune_table *opened = NULL;
    json_t *root = NULL;

    TRY(json_read_object(path, MAX_FILE_BYTES, &root, err));
    enum imbrex_status status = imbrex_tune_table_create(key, &opened, err);
    if (status == IMBREX_STATUS_OK) {
        status = read_root(path, root, key, opened, err);
    }
    json_decref(root);
    if (status != IMBREX_STATUS_OK) {
        imbrex_tune_table_destroy(opened);
        return status;
    }
    *table = opened;
    return IMBREX_STATUS_OK;
}
