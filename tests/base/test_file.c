/* SPDX-License-Identifier: Apache-2.0 */
#include "base/file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/asset.h"
#include "tests/base/fixture.h"
#include "tests/test.h"

#define MAX_BYTES 1000

/* Both ways of opening refuse the path alike, and leave the result alone. */
static void expect_refused(const char *path, enum imbrex_status expected, const char *fragments)
{
    struct imbrex_error err = {0};
    struct file file, untouched;
    memset(&file, 0x5a, sizeof(file));
    memset(&untouched, 0x5a, sizeof(untouched));
    expect_error(file_map(path, &file, &err), expected, &err, fragments);
    assert_memory_equal(&file, &untouched, sizeof(file));
    err = (struct imbrex_error){0};
    expect_error(file_read(path, MAX_BYTES, &file, &err), expected, &err, fragments);
    assert_memory_equal(&file, &untouched, sizeof(file));
    assert_int_equal(file_map(path, &file, NULL), expected);
}

/* Catches bytes lost or added, a path that is not a copy, a close that leaves pointers. */
static void test_bytes_of_a_file(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES], given[FIXTURE_PATH_BYTES];
    unsigned char bytes[MAX_BYTES];
    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (unsigned char)(i * 7);
    }
    fixture_write(fixture_path(path, "file-bytes"), bytes, sizeof(bytes));
    for (int is_map = 0; is_map < 2; is_map++) {
        struct file file = {0};
        strcpy(given, path);
        assert_int_equal(is_map ? file_map(given, &file, NULL)
                                : file_read(given, MAX_BYTES, &file, NULL),
                         IMBREX_STATUS_OK);
        memset(given, 'x', strlen(given));
        assert_int_equal(file.num_bytes, sizeof(bytes));
        assert_memory_equal(file.bytes, bytes, sizeof(bytes));
        assert_string_equal(file.path, path);
        assert_int_equal(file.storage, is_map ? FILE_STORAGE_MAPPED : FILE_STORAGE_HEAP);
        file_close(&file);
        assert_null(file.bytes);
        assert_null(file.path);
        file_close(&file);
    }
}

/* Catches a limit that is off by one. */
static void test_read_limit(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    struct file file = {0};
    fixture_write(fixture_path(path, "file-limit"), "0123456789", 10);
    assert_int_equal(file_read(path, 10, &file, NULL), IMBREX_STATUS_OK);
    file_close(&file);
    expect_error(file_read(path, 9, &file, &err), IMBREX_STATUS_FORMAT, &err,
                 "file-limit|at most 9 bytes|found 10");
    assert_null(file.bytes);
    expect_error(file_read(ASSET_DEFAULT_MODEL "/config.json", 9, &file, &err),
                 IMBREX_STATUS_FORMAT, &err, "config.json|at most 9 bytes");
    assert_null(file.bytes);
}

/* Catches "not found" told for what is there, and the reverse. */
static void test_missing(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES], below[FIXTURE_PATH_BYTES + 8];
    fixture_path(path, "file-missing");
    expect_refused(path, IMBREX_STATUS_NOT_FOUND, "file-missing|No such file");
    assert_false(file_exists(path));
    fixture_write(path, "x", 1);
    assert_true(file_exists(path));
    assert_false(file_is_folder(path));
    snprintf(below, sizeof(below), "%s/below", path);
    expect_refused(below, IMBREX_STATUS_NOT_FOUND, "file-missing/below|Not a directory");
    assert_false(file_exists(below));
    expect_refused("", IMBREX_STATUS_NOT_FOUND, "No such file");
}

/* Catches a link followed in one place, not in another: Hugging Face's cache is made of links. */
static void test_links(void **state)
{
    (void)state;
    char target[FIXTURE_PATH_BYTES], path[FIXTURE_PATH_BYTES];
    struct file file = {0};
    fixture_path(target, "file-link-target");
    fixture_path(path, "file-link");
    assert_int_equal(symlink("file-link-target", path), 0);
    assert_true(file_exists(path));
    expect_refused(path, IMBREX_STATUS_NOT_FOUND, "file-link");
    fixture_write(target, "abc", 3);
    assert_int_equal(file_map(path, &file, NULL), IMBREX_STATUS_OK);
    assert_memory_equal(file.bytes, "abc", 3);
    file_close(&file);

    fixture_path(path, "file-link-loop");
    assert_int_equal(symlink("file-link-loop", path), 0);
    expect_refused(path, IMBREX_STATUS_IO, "file-link-loop");
}

/* Catches a reader that hangs in open() or read(): nobody ever writes into this FIFO. */
static void test_fifo(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    assert_int_equal(mkfifo(fixture_path(path, "file-fifo"), 0600), 0);
    expect_refused(path, IMBREX_STATUS_FORMAT, "file-fifo|expected a regular file|found a FIFO");
}

/* Catches a folder, device, socket or empty file taken for data. */
static void test_other_types(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    fixture_folder(path, "file-folder");
    expect_refused(path, IMBREX_STATUS_FORMAT, "file-folder|regular file|found a folder");
    assert_true(file_is_folder(path));
    expect_refused("/dev/null", IMBREX_STATUS_FORMAT, "/dev/null|found a character device");
    fixture_write(fixture_path(path, "file-empty"), "", 0);
    expect_refused(path, IMBREX_STATUS_FORMAT, "file-empty|expected data|found an empty file");

    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_true(listener >= 0);
    fixture_path(path, "file-socket");
    if (strlen(path) >= sizeof(address.sun_path)) {
        close(listener);
        skip(); /* the build folder's path is too long for a socket's address */
    }
    strcpy(address.sun_path, path);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
    close(listener);
    expect_refused(path, IMBREX_STATUS_FORMAT, "file-socket|found a socket");
}

/* Catches embedded files that differ from the tree's, or are not aligned as promised. */
static void test_embedded(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json", "generation_config.json", "tokenizer.json",
                                        "tokenizer_config.json", "model.safetensors"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char source[FIXTURE_PATH_BYTES];
        char *path;
        size_t num_bytes;
        struct file mapped = {0}, read = {0};
        snprintf(source, sizeof(source), "models/stories260K/%s", names[i]);
        char *bytes = fixture_read(source, &num_bytes);
        assert_int_equal(file_join(ASSET_DEFAULT_MODEL, names[i], &path, NULL), IMBREX_STATUS_OK);
        assert_true(file_exists(path));
        assert_false(file_is_folder(path));
        assert_int_equal(file_map(path, &mapped, NULL), IMBREX_STATUS_OK);
        assert_int_equal(mapped.num_bytes, num_bytes);
        assert_memory_equal(mapped.bytes, bytes, num_bytes);
        assert_int_equal((uintptr_t)mapped.bytes % 16, 0);
        assert_string_equal(mapped.path, path);
        assert_int_equal(file_read(path, num_bytes, &read, NULL), IMBREX_STATUS_OK);
        assert_ptr_equal(read.bytes, mapped.bytes);
        file_close(&mapped);
        file_close(&read);
        free(path);
        free(bytes);
    }
}

/* Catches an unknown embedded name that is looked for on disk, or refused without saying why. */
static void test_embedded_names(void **state)
{
    (void)state;
    expect_refused("builtin:stories15M", IMBREX_STATUS_NOT_FOUND,
                   "builtin:stories15M|built-in model builtin:stories260K");
    expect_refused("builtin:stories260K/model.gguf", IMBREX_STATUS_NOT_FOUND, "model.gguf");
    expect_refused("builtin:stories260K", IMBREX_STATUS_FORMAT, "found a folder");
    assert_true(file_is_folder("builtin:stories260K"));
    assert_true(file_is_folder("builtin:stories260K/"));
    assert_false(file_is_folder("builtin:stories260KB"));
    assert_false(file_is_folder("builtin:"));
    assert_false(file_exists("builtin:stories260K/tokenizer"));
    assert_true(asset_is_path("builtin:"));
    assert_false(asset_is_path("./builtin:stories260K"));
}

/* Catches doubled or missing slashes. */
static void test_join(void **state)
{
    (void)state;
    static const char *const rows[][3] = {{"a", "b", "a/b"},
                                          {"a/", "b", "a/b"},
                                          {"/", "b", "/b"},
                                          {"", "b", "b"},
                                          {"builtin:m", "c.json", "builtin:m/c.json"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char *path;
        assert_int_equal(file_join(rows[i][0], rows[i][1], &path, NULL), IMBREX_STATUS_OK);
        assert_string_equal(path, rows[i][2]);
        free(path);
    }
}

int run_file_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes_of_a_file),
        cmocka_unit_test(test_read_limit),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_links),
        cmocka_unit_test(test_fifo),
        cmocka_unit_test(test_other_types),
        cmocka_unit_test(test_embedded),
        cmocka_unit_test(test_embedded_names),
        cmocka_unit_test(test_join),
    };
    return cmocka_run_group_tests_name("file", tests, NULL, NULL);
}
