/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files that are written: their bytes, and what is left when writing fails. */
#include "model/gguf_writer.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/base/fixture.h"
#include "tests/test.h"

static void check(enum imbrex_status status, const struct imbrex_error *err)
{
    if (status != IMBREX_STATUS_OK) {
        fail_msg("%s", err->message);
    }
}

static bool exists(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0;
}

static const char *partial_of(const char *path)
{
    static char partial[FIXTURE_PATH_BYTES + 16];
    snprintf(partial, sizeof(partial), "%s.partial", path);
    return partial;
}

static const float matrix[2][3] = {{1.0f, 2.0f, 3.0f}, {4.0f, 5.0f, 6.0f}};
static const float vector[9] = {9.0f};

static void write_all(const char *path, bool overwrite)
{
    struct imbrex_error err = {0};
    struct gguf_writer writer = {0};
    check(gguf_writer_open(path, overwrite, &writer, &err), &err);
    check(gguf_writer_put_string(&writer, "general.architecture", "llama", &err), &err);
    check(gguf_writer_put_uint32(&writer, "number", 7, &err), &err);
    check(gguf_writer_put_float32(&writer, "real", 0.5f, &err), &err);
    check(gguf_writer_put_bool(&writer, "flag", true, &err), &err);
    check(gguf_writer_begin_array(&writer, "texts", GGUF_TYPE_STRING, 2, &err), &err);
    check(gguf_writer_append_string(&writer, "a\0b", 3, &err), &err);
    check(gguf_writer_append_string(&writer, "", 0, &err), &err);
    check(gguf_writer_begin_array(&writer, "integers", GGUF_TYPE_INT32, 2, &err), &err);
    check(gguf_writer_append_int32(&writer, -3, &err), &err);
    check(gguf_writer_append_int32(&writer, 4, &err), &err);
    check(gguf_writer_begin_array(&writer, "reals", GGUF_TYPE_FLOAT32, 1, &err), &err);
    check(gguf_writer_append_float32(&writer, -2.5f, &err), &err);
    check(gguf_writer_add_tensor(&writer, "matrix", 2, (const int64_t[]){2, 3}, DTYPE_F32, &err),
          &err);
    check(gguf_writer_add_tensor(&writer, "vector", 1, (const int64_t[]){9}, DTYPE_F32, &err),
          &err);
    check(gguf_writer_begin_tensors(&writer, &err), &err);
    check(gguf_writer_write(&writer, matrix, 4, &err), &err);
    check(gguf_writer_write(&writer, (const char *)matrix + 4, sizeof(matrix) - 4, &err), &err);
    check(gguf_writer_end_tensor(&writer, &err), &err);
    assert_false(!overwrite && exists(path)); /* not before it is whole */
    assert_true(exists(partial_of(path)));
    check(gguf_writer_write(&writer, vector, sizeof(vector), &err), &err);
    check(gguf_writer_end_tensor(&writer, &err), &err);
    check(gguf_writer_commit(&writer, &err), &err);
    gguf_writer_abandon(&writer);
    assert_false(exists(partial_of(path)));
}

/* Catches a value or tensor that is read as another one than was written. */
static void test_round_trip(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    struct gguf gguf = {0};
    size_t num_bytes;
    int32_t number = 0;
    const struct gguf_string *texts = NULL;
    size_t num_texts = 0;
    fixture_path(path, "written.gguf");
    write_all(path, false);
    char *bytes = fixture_read(path, &num_bytes);
    check(gguf_parse(path, (const unsigned char *)bytes, num_bytes, &gguf, &err), &err);
    assert_int_equal(gguf.version, 3);
    assert_int_equal(gguf.num_values, 7);
    check(gguf_get_int32(&gguf, "number", 0, 9, &number, &err), &err);
    assert_int_equal(number, 7);
    assert_true(gguf_value_number(gguf_find(&gguf, "real"), 0) == 0.5);
    assert_int_equal(gguf_find(&gguf, "flag")->type, GGUF_TYPE_BOOL);
    check(gguf_get_strings(&gguf, "texts", &texts, &num_texts, &err), &err);
    assert_int_equal(num_texts, 2);
    assert_int_equal(texts[0].num_bytes, 3);
    assert_memory_equal(texts[0].bytes, "a\0b", 3);
    assert_true(gguf_value_number(gguf_find(&gguf, "integers"), 0) == -3);
    assert_true(gguf_value_number(gguf_find(&gguf, "reals"), 0) == -2.5);
    const struct gguf_tensor *tensor = gguf_find_tensor(&gguf, "matrix");
    assert_int_equal(tensor->shape[0], 2);
    assert_int_equal(tensor->shape[1], 3);
    assert_memory_equal(tensor->elements, matrix, sizeof(matrix));
    assert_int_equal(((const char *)tensor->elements - bytes) % 32, 0);
    assert_memory_equal(gguf_find_tensor(&gguf, "vector")->elements, vector, sizeof(vector));
    /* Values of any kind as they are. */
    struct gguf_writer writer = {0};
    char copy_path[FIXTURE_PATH_BYTES];
    fixture_path(copy_path, "copied.gguf");
    check(gguf_writer_open(copy_path, false, &writer, &err), &err);
    for (uint64_t i = 0; i < gguf.num_values; i++) {
        check(gguf_writer_put_value(&writer, &gguf.values[i], &err), &err);
    }
    check(gguf_writer_begin_tensors(&writer, &err), &err);
    check(gguf_writer_commit(&writer, &err), &err);
    struct gguf copy = {0};
    char *copied = fixture_read(copy_path, &num_bytes);
    check(gguf_parse(copy_path, (const unsigned char *)copied, num_bytes, &copy, &err), &err);
    assert_int_equal(copy.num_values, gguf.num_values);
    for (uint64_t i = 0; i < gguf.num_values; i++) {
        size_t value_bytes = gguf_value_bytes(&gguf.values[i]);
        assert_int_equal(copy.values[i].type, gguf.values[i].type);
        assert_int_equal(gguf_value_bytes(&copy.values[i]), value_bytes);
        assert_memory_equal(copy.values[i].bytes, gguf.values[i].bytes, value_bytes);
    }
    gguf_release(&copy);
    gguf_release(&gguf);
    free(copied);
    free(bytes);
}

/* Catches a file that is replaced without being asked for, a path that is none, a second run that
 * writes into the file of the first or deletes it, and a killed run that is in the way of the next.
 */
static void test_existing(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES], folder[FIXTURE_PATH_BYTES], missing[FIXTURE_PATH_BYTES + 32];
    struct imbrex_error err = {0};
    struct gguf_writer writer = {0}, other = {0};
    size_t num_bytes;
    fixture_path(path, "existing.gguf");
    fixture_write(path, "old", 3);
    expect_error(gguf_writer_open(path, false, &writer, &err), IMBREX_STATUS_INVALID_ARGUMENT, &err,
                 "existing.gguf|a new file|found a file");
    check(gguf_writer_open(path, true, &writer, &err), &err);
    gguf_writer_abandon(&writer);
    char *kept = fixture_read(path, &num_bytes);
    assert_string_equal(kept, "old");
    free(kept);
    /* What a killed run left. */
    fixture_write(partial_of(path), "half", 4);
    check(unlink(path) == 0 ? IMBREX_STATUS_OK : IMBREX_STATUS_IO, &err);
    write_all(path, false);
    assert_true(exists(path));
    check(gguf_writer_open(path, true, &writer, &err), &err);
    expect_error(gguf_writer_open(path, true, &other, &err), IMBREX_STATUS_INVALID_ARGUMENT, &err,
                 "existing.gguf.partial|another run writes it");
    assert_true(exists(partial_of(path)));
    /* Somebody else's file has taken its place: it gets neither the name nor deleted. */
    check(gguf_writer_begin_tensors(&writer, &err), &err);
    check(unlink(partial_of(path)) == 0 ? IMBREX_STATUS_OK : IMBREX_STATUS_IO, &err);
    fixture_write(partial_of(path), "half", 4);
    expect_error(gguf_writer_commit(&writer, &err), IMBREX_STATUS_OUTPUT, &err,
                 "existing.gguf.partial|found another one");
    gguf_writer_abandon(&writer);
    assert_true(exists(partial_of(path)));
    check(unlink(partial_of(path)) == 0 ? IMBREX_STATUS_OK : IMBREX_STATUS_IO, &err);
    expect_error(gguf_writer_open("", true, &writer, &err), IMBREX_STATUS_INVALID_ARGUMENT, &err,
                 "path: expected the name of a new file");
    fixture_path(path, "dangling.gguf");
    check(symlink("nothing-there", path) == 0 ? IMBREX_STATUS_OK : IMBREX_STATUS_IO, &err);
    expect_error(gguf_writer_open(path, true, &writer, &err), IMBREX_STATUS_INVALID_ARGUMENT, &err,
                 "dangling.gguf|a symbolic link to nothing");
    fixture_folder(folder, "folder.gguf");
    expect_error(gguf_writer_open(folder, true, &writer, &err), IMBREX_STATUS_INVALID_ARGUMENT,
                 &err, "folder.gguf|found a folder");
    snprintf(missing, sizeof(missing), "%s/none/x.gguf", folder);
    expect_error(gguf_writer_open(missing, false, &writer, &err), IMBREX_STATUS_IO, &err,
                 "none/x.gguf: cannot create: No such file");
}

/* Catches a file that appeared while another was written being replaced. */
static void test_appeared(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    struct gguf_writer writer = {0};
    size_t num_bytes;
    fixture_path(path, "appeared.gguf");
    check(gguf_writer_open(path, false, &writer, &err), &err);
    check(gguf_writer_begin_tensors(&writer, &err), &err);
    fixture_write(path, "other", 5);
    expect_error(gguf_writer_commit(&writer, &err), IMBREX_STATUS_INVALID_ARGUMENT, &err,
                 "appeared.gguf|found a file there");
    gguf_writer_abandon(&writer);
    char *kept = fixture_read(path, &num_bytes);
    assert_string_equal(kept, "other");
    free(kept);
    assert_false(exists(partial_of(path)));
}

/* Catches half a file left by a full disk, which a limit on file sizes stands for. */
static void test_full_disk(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    struct gguf_writer writer = {0};
    struct rlimit before, limit;
    unsigned char bytes[4096] = {0};
    fixture_path(path, "full.gguf");
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = (struct rlimit){.rlim_cur = 6000, .rlim_max = before.rlim_max};
    check(gguf_writer_open(path, false, &writer, &err), &err);
    check(gguf_writer_add_tensor(&writer, "t", 1, (const int64_t[]){8192}, DTYPE_F32, &err), &err);
    check(gguf_writer_begin_tensors(&writer, &err), &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    enum imbrex_status status = IMBREX_STATUS_OK;
    for (int i = 0; i < 8 && status == IMBREX_STATUS_OK; i++) {
        status = gguf_writer_write(&writer, bytes, sizeof(bytes), &err);
    }
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    expect_error(status, IMBREX_STATUS_OUTPUT, &err, "full.gguf: cannot write: File too large");
    gguf_writer_abandon(&writer);
    assert_false(exists(path) || exists(partial_of(path)));
}

/* Catches a tensor that is written with fewer bytes than its header says. */
static void test_missing_bytes(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    struct gguf_writer writer = {0};
    fixture_path(path, "short.gguf");
    check(gguf_writer_open(path, false, &writer, &err), &err);
    check(gguf_writer_add_tensor(&writer, "t", 2, (const int64_t[]){2, 64}, DTYPE_Q8_0, &err),
          &err);
    check(gguf_writer_begin_tensors(&writer, &err), &err);
    check(gguf_writer_write(&writer, "x", 1, &err), &err);
    check(gguf_writer_end_tensor(&writer, &err), &err);
    expect_error(gguf_writer_commit(&writer, &err), IMBREX_STATUS_INTERNAL, &err,
                 "short.gguf: expected 160 bytes of tensors, found 32");
    gguf_writer_abandon(&writer);
    assert_false(exists(path) || exists(partial_of(path)));
}

int run_gguf_writer_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),    cmocka_unit_test(test_existing),
        cmocka_unit_test(test_appeared),      cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_missing_bytes),
    };
    return cmocka_run_group_tests_name("gguf_writer", tests, NULL, NULL);
}
