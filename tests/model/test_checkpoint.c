/* SPDX-License-Identifier: Apache-2.0 */
#include "model/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/asset.h"
#include "tests/base/fixture.h"
#include "tests/model/safetensors_fixture.h"
#include "tests/test.h"

#define SINGLE "model.safetensors"
#define INDEX "model.safetensors.index.json"
#define SHARD_1 "model-00001-of-00002.safetensors"
#define SHARD_2 "model-00002-of-00002.safetensors"

/* A file with tensors of one F32 each; names are separated by spaces. */
static void write_tensors(const char *folder, const char *file, const char *names)
{
    char header[1024] = "{", list[256];
    size_t num_tensors = 0, num_bytes;
    strcpy(list, names);
    for (char *name = strtok(list, " "); name != NULL; name = strtok(NULL, " ")) {
        size_t length = strlen(header);
        snprintf(header + length, sizeof(header) - length,
                 "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
                 num_tensors > 0 ? "," : "", name, 4 * num_tensors, 4 * num_tensors + 4);
        num_tensors++;
    }
    strcat(header, "}");
    unsigned char *bytes = fixture_safetensors(header, 4 * num_tensors, &num_bytes);
    fixture_write_in(folder, file, bytes, num_bytes);
    free(bytes);
}

static void expect_refused(const char *folder, enum imbrex_status expected, const char *fragments)
{
    struct imbrex_error err = {0};
    struct checkpoint checkpoint, untouched;
    memset(&checkpoint, 0x5a, sizeof(checkpoint));
    memset(&untouched, 0x5a, sizeof(untouched));
    expect_error(checkpoint_open(folder, &checkpoint, &err), expected, &err, fragments);
    assert_memory_equal(&checkpoint, &untouched, sizeof(checkpoint));
}

static void expect_opens(const char *folder, struct checkpoint *checkpoint)
{
    struct imbrex_error err = {0};
    if (checkpoint_open(folder, checkpoint, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

/* Catches a built-in model that takes another way than files, or a search that misses an end. */
static void test_builtin(void **state)
{
    (void)state;
    struct checkpoint checkpoint = {0};
    expect_opens(ASSET_DEFAULT_MODEL, &checkpoint);
    assert_int_equal(checkpoint.num_files, 1);
    assert_int_equal(checkpoint.num_tensors, 47);
    for (int32_t i = 0; i < checkpoint.num_tensors; i++) {
        const char *name = checkpoint.tensors[i]->name;
        assert_ptr_equal(checkpoint_find(&checkpoint, name), checkpoint.tensors[i]);
        assert_true(i == 0 || strcmp(checkpoint.tensors[i - 1]->name, name) < 0);
    }
    assert_null(checkpoint_find(&checkpoint, ""));
    assert_null(checkpoint_find(&checkpoint, "lm_head.weight"));
    assert_null(checkpoint_find(&checkpoint, "model.norm.weight2"));
    checkpoint_close(&checkpoint);
    assert_null(checkpoint.files);
    checkpoint_close(&checkpoint);
    assert_null(checkpoint_find(&checkpoint, "model.norm.weight"));
}

/* Catches an address put down to the wrong file, or to one that ends just before it. */
static void test_file_at(void **state)
{
    (void)state;
    char folder[FIXTURE_PATH_BYTES];
    struct checkpoint checkpoint = {0};
    fixture_folder(folder, "checkpoint-file-at");
    write_tensors(folder, SHARD_1, "a");
    write_tensors(folder, SHARD_2, "b");
    fixture_write_text(folder, INDEX,
                       "{\"weight_map\":{\"a\":\"" SHARD_1 "\",\"b\":\"" SHARD_2 "\"}}");
    expect_opens(folder, &checkpoint);
    assert_int_equal(checkpoint.num_files, 2);
    for (int32_t i = 0; i < 2; i++) {
        const struct file *file = &checkpoint.files[i];
        assert_ptr_equal(checkpoint_file_at(&checkpoint, file->bytes), file->path);
        assert_ptr_equal(checkpoint_file_at(&checkpoint, file->bytes + file->num_bytes - 1),
                         file->path);
        assert_ptr_not_equal(checkpoint_file_at(&checkpoint, file->bytes + file->num_bytes),
                             file->path);
    }
    assert_null(checkpoint_file_at(&checkpoint, NULL));
    assert_null(checkpoint_file_at(&checkpoint, &checkpoint));
    checkpoint_close(&checkpoint);
}

/* Catches shards that are not merged by name, are opened twice, or lose their file. */
static void test_shards(void **state)
{
    (void)state;
    char folder[FIXTURE_PATH_BYTES];
    struct checkpoint checkpoint = {0};
    fixture_folder(folder, "checkpoint-shards");
    write_tensors(folder, SHARD_1, "d a");
    write_tensors(folder, SHARD_2, "c b unlisted");
    fixture_write_text(folder, INDEX,
                       "{\"metadata\":{\"total_size\":20},\"weight_map\":{\"a\":\"" SHARD_1
                       "\",\"b\":\"" SHARD_2 "\",\"c\":\"" SHARD_2 "\",\"d\":\"" SHARD_1 "\"}}");
    expect_opens(folder, &checkpoint);
    assert_int_equal(checkpoint.num_files, 2);
    assert_int_equal(checkpoint.num_tensors, 5);
    static const char *const names[] = {"a", "b", "c", "d", "unlisted"};
    for (size_t i = 0; i < 5; i++) {
        assert_string_equal(checkpoint.tensors[i]->name, names[i]);
    }
    assert_non_null(strstr(checkpoint_find(&checkpoint, "a")->file, SHARD_1));
    assert_non_null(strstr(checkpoint_find(&checkpoint, "b")->file, SHARD_2));
    assert_ptr_not_equal(checkpoint_find(&checkpoint, "c")->elements,
                         checkpoint_find(&checkpoint, "b")->elements);
    checkpoint_close(&checkpoint);
}

/* Catches an index that is preferred to the single file, against Hugging Face's order. */
static void test_single_file_comes_first(void **state)
{
    (void)state;
    char folder[FIXTURE_PATH_BYTES];
    struct checkpoint checkpoint = {0};
    fixture_folder(folder, "checkpoint-both");
    write_tensors(folder, SINGLE, "whole");
    fixture_write_text(folder, INDEX, "not even JSON");
    expect_opens(folder, &checkpoint);
    assert_int_equal(checkpoint.num_tensors, 1);
    assert_non_null(checkpoint_find(&checkpoint, "whole"));
    checkpoint_close(&checkpoint);
}

/* Catches each disagreement of index and shards that goes unnoticed, and a name that leaves the
 * folder. */
static void test_bad_index(void **state)
{
    (void)state;
    static const struct {
        const char *index;
        enum imbrex_status status;
        const char *fragments;
    } rows[] = {
        {"{", IMBREX_STATUS_FORMAT, INDEX ": line 1, column 2"},
        {"{}", IMBREX_STATUS_FORMAT, INDEX ": weight_map: expected an object|found nothing"},
        {"{\"weight_map\":{}}", IMBREX_STATUS_FORMAT, "weight_map|found an empty one"},
        {"{\"weight_map\":[]}", IMBREX_STATUS_FORMAT, "weight_map|found an array"},
        {"{\"weight_map\":{\"a\":1}}", IMBREX_STATUS_FORMAT,
         "weight_map: a: expected the name of a file in the folder, found an integer"},
        {"{\"weight_map\":{\"a\":\"../" SHARD_1 "\"}}", IMBREX_STATUS_FORMAT,
         "weight_map: a: expected the name of a file in the folder, found ../"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", IMBREX_STATUS_FORMAT, "found /etc/passwd"},
        {"{\"weight_map\":{\"a\":\"..\"}}", IMBREX_STATUS_FORMAT, "weight_map: a|found .."},
        {"{\"weight_map\":{\"a\":\".\"}}", IMBREX_STATUS_FORMAT, "weight_map: a|found ."},
        {"{\"weight_map\":{\"a\":\"\"}}", IMBREX_STATUS_FORMAT, "weight_map: a|name of a file"},
        {"{\"weight_map\":{\"a\":\"" SHARD_1 "\",\"z\":\"lost.safetensors\"}}",
         IMBREX_STATUS_NOT_FOUND,
         INDEX ": weight_map: z: expected the shard lost.safetensors|found no such file"},
        {"{\"weight_map\":{\"a\":\"" SHARD_1 "\",\"b\":\"" SHARD_1 "\"}}", IMBREX_STATUS_FORMAT,
         "weight_map: b: expected in " SHARD_1 ", found in no shard"},
        {"{\"weight_map\":{\"a\":\"" SHARD_2 "\",\"d\":\"" SHARD_1 "\"}}", IMBREX_STATUS_FORMAT,
         "weight_map: a: expected in " SHARD_2 ", found in " SHARD_1},
        {"{\"weight_map\":{\"a\":\"" SHARD_1 "\",\"b\":\"twice.safetensors\"}}",
         IMBREX_STATUS_FORMAT, SHARD_1 ": a: expected in one shard, found in twice.safetensors"},
        {"{\"weight_map\":{\"a\":\"folder\"}}", IMBREX_STATUS_FORMAT, "folder|found a folder"},
        {"{\"weight_map\":{\"a\":\"cut.safetensors\"}}", IMBREX_STATUS_FORMAT,
         "cut.safetensors: header length"},
    };
    char folder[FIXTURE_PATH_BYTES], below[FIXTURE_PATH_BYTES + 8];
    snprintf(below, sizeof(below), "%s/folder", fixture_folder(folder, "checkpoint-bad-index"));
    assert_int_equal(mkdir(below, 0777), 0);
    write_tensors(folder, SHARD_1, "a d");
    write_tensors(folder, SHARD_2, "b c");
    write_tensors(folder, "twice.safetensors", "b a");
    fixture_write_text(folder, "cut.safetensors", "\x40");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        fixture_write_text(folder, INDEX, rows[i].index);
        expect_refused(folder, rows[i].status, rows[i].fragments);
    }
}

/* Catches weights of another format, or none, reported as a missing file without saying which. */
static void test_other_weights(void **state)
{
    (void)state;
    char folder[FIXTURE_PATH_BYTES];
    fixture_folder(folder, "checkpoint-other");
    expect_refused(folder, IMBREX_STATUS_NOT_FOUND,
                   "checkpoint-other: expected " SINGLE " or " INDEX ", found no weights");
    fixture_write_text(folder, "pytorch_model.bin", "x");
    expect_refused(folder, IMBREX_STATUS_UNSUPPORTED,
                   "expected " SINGLE "|found pytorch_model.bin");
    fixture_write_text(folder, "model-q4.gguf", "x");
    expect_refused(folder, IMBREX_STATUS_UNSUPPORTED, "expected " SINGLE "|found model-q4.gguf");
    fixture_write_text(folder, SINGLE, "");
    expect_refused(folder, IMBREX_STATUS_FORMAT, SINGLE "|found an empty file");
    write_tensors(folder, SINGLE, "");
    expect_refused(folder, IMBREX_STATUS_FORMAT, SINGLE ": expected tensors, found none");
}

static void expect_no_model(const char *path, enum imbrex_status expected, const char *fragments)
{
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    expect_error(imbrex_model_open(path, NULL, &model, &err), expected, &err, fragments);
    assert_null(model);
}

/* Catches a path that cannot be looked at, or is neither folder nor file, called "a file". */
static void test_no_checkpoint(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES], name[300];
    memset(name, 'n', sizeof(name));
    name[sizeof(name) - 1] = '\0';
    expect_no_model(fixture_path(path, "checkpoint-nothing"), IMBREX_STATUS_NOT_FOUND,
                    "checkpoint-nothing: expected a folder|found nothing at this path");
    assert_int_equal(symlink("checkpoint-nothing", path), 0);
    expect_no_model(path, IMBREX_STATUS_IO, "checkpoint-nothing: |found: Too many levels");
    assert_int_equal(unlink(path), 0);
    fixture_write(path, "x", 1);
    expect_no_model(path, IMBREX_STATUS_FORMAT, "checkpoint-nothing: expected a GGUF file");
    expect_no_model(name, IMBREX_STATUS_IO, "nnn: |found: File name too long");
    expect_no_model("/dev/null", IMBREX_STATUS_FORMAT, "/dev/null: |found a character device");
    expect_no_model("builtin:other", IMBREX_STATUS_NOT_FOUND, "builtin:other: |no such model");
}

/* Catches a tokenizer.json that is a folder looked into, which names a file nobody meant. */
static void test_tokenizer_is_a_folder(void **state)
{
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors"};
    char folder[FIXTURE_PATH_BYTES], path[FIXTURE_PATH_BYTES + 32], source[64];
    fixture_folder(folder, "checkpoint-tokenizer");
    for (size_t i = 0; i < 2; i++) {
        size_t num_bytes;
        snprintf(source, sizeof(source), "models/stories260K/%s", names[i]);
        char *bytes = fixture_read(source, &num_bytes);
        fixture_write_in(folder, names[i], bytes, num_bytes);
        free(bytes);
    }
    snprintf(path, sizeof(path), "%s/tokenizer.json", folder);
    assert_int_equal(mkdir(path, 0777), 0);
    expect_no_model(folder, IMBREX_STATUS_FORMAT,
                    "checkpoint-tokenizer/tokenizer.json: expected a regular file, found a folder");
    assert_int_equal(rmdir(path), 0);
}

int run_checkpoint_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_builtin),       cmocka_unit_test(test_file_at),
        cmocka_unit_test(test_shards),        cmocka_unit_test(test_single_file_comes_first),
        cmocka_unit_test(test_bad_index),     cmocka_unit_test(test_other_weights),
        cmocka_unit_test(test_no_checkpoint), cmocka_unit_test(test_tokenizer_is_a_folder),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
}
