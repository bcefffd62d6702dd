/* SPDX-License-Identifier: Apache-2.0 */
#include "model/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/base/fixture.h"
#include "tests/model/safetensors_fixture.h"
#include "tests/test.h"

#define PATH "m/f.safetensors"

/* Catches a wrong offset, shape, type or order of names. The header's odd length also makes every
 * tensor unaligned. */
static void test_tensors_of_a_file(void **state)
{
    (void)state;
    struct safetensors parsed = {0};
    struct imbrex_error err = {0};
    size_t num_bytes;
    unsigned char *bytes = fixture_safetensors(
        "{\"z\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[16,28]},"
        "\"__metadata__\":{\"format\":\"pt\"},"
        "\"a\":{\"data_offsets\":[0,16],\"shape\":[4,1],\"dtype\":\"F32\",\"more\":[1]},"
        "\"scalar\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[28,30]},"
        "\"none\":{\"dtype\":\"F64\",\"shape\":[3,0,9223372036854775807],"
        "\"data_offsets\":[16,16]},"
        "\"eight\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,2],\"data_offsets\":[30,32]}} ",
        32, &num_bytes);
    const unsigned char *data = bytes + num_bytes - 32;
    assert_int_equal(safetensors_parse(PATH, bytes, num_bytes, &parsed, &err), IMBREX_STATUS_OK);
    static const struct {
        const char *name, *dtype_name;
        size_t begin, num_bytes;
        enum dtype dtype;
        int32_t num_dims;
        int64_t last_extent;
    } rows[] = {
        {"a", "F32", 0, 16, DTYPE_F32, 2, 1},
        {"eight", "U8", 30, 2, DTYPE_COUNT, 8, 2},
        {"none", "F64", 16, 0, DTYPE_COUNT, 3, INT64_MAX},
        {"scalar", "F16", 28, 2, DTYPE_F16, 0, 0},
        {"z", "BF16", 16, 12, DTYPE_BF16, 2, 3},
    };
    assert_int_equal(parsed.num_tensors, sizeof(rows) / sizeof(rows[0]));
    for (int32_t i = 0; i < parsed.num_tensors; i++) {
        const struct checkpoint_tensor *tensor = &parsed.tensors[i];
        assert_string_equal(tensor->name, rows[i].name);
        assert_string_equal(tensor->dtype_name, rows[i].dtype_name);
        assert_string_equal(tensor->file, PATH);
        assert_int_equal(tensor->dtype, rows[i].dtype);
        assert_int_equal(tensor->num_dims, rows[i].num_dims);
        assert_ptr_equal(tensor->elements, data + rows[i].begin);
        assert_int_equal(tensor->num_bytes, rows[i].num_bytes);
        if (tensor->num_dims > 0) {
            assert_int_equal(tensor->shape[tensor->num_dims - 1], rows[i].last_extent);
        }
    }
    safetensors_release(&parsed);
    assert_null(parsed.tensors);
    safetensors_release(&parsed);
    free(bytes);
}

/* Catches a type of the format with a wrong size, or one that kernels would take for another. */
static void test_all_dtypes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        size_t num_bytes;
        enum dtype dtype;
    } rows[] = {
        {"BOOL", 1, DTYPE_COUNT},    {"U8", 1, DTYPE_COUNT},      {"I8", 1, DTYPE_COUNT},
        {"F8_E5M2", 1, DTYPE_COUNT}, {"F8_E4M3", 1, DTYPE_COUNT}, {"I16", 2, DTYPE_COUNT},
        {"U16", 2, DTYPE_COUNT},     {"F16", 2, DTYPE_F16},       {"BF16", 2, DTYPE_BF16},
        {"I32", 4, DTYPE_COUNT},     {"U32", 4, DTYPE_COUNT},     {"F32", 4, DTYPE_F32},
        {"F64", 8, DTYPE_COUNT},     {"I64", 8, DTYPE_COUNT},     {"U64", 8, DTYPE_COUNT},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char header[128];
        size_t num_bytes;
        struct safetensors parsed = {0};
        snprintf(header, sizeof(header),
                 "{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%zu]}}", rows[i].name,
                 3 * rows[i].num_bytes);
        unsigned char *bytes = fixture_safetensors(header, 3 * rows[i].num_bytes, &num_bytes);
        assert_int_equal(safetensors_parse(PATH, bytes, num_bytes, &parsed, NULL), 0);
        assert_int_equal(parsed.tensors[0].dtype, rows[i].dtype);
        safetensors_release(&parsed);
        free(bytes);
    }
}

static void expect_bytes_refused(const unsigned char *bytes, size_t num_bytes,
                                 enum imbrex_status expected, const char *fragments)
{
    struct imbrex_error err = {0};
    struct safetensors parsed = {0};
    enum imbrex_status status = safetensors_parse(PATH, bytes, num_bytes, &parsed, &err);
    expect_error(status, expected, &err, PATH ": ");
    expect_error(status, expected, &err, fragments);
    assert_null(parsed.tensors);
    assert_null(parsed.header);
}

/* Catches a header length that is believed: 2^63 wraps, 2^64 - 8 points before the file. */
static void test_header_length(void **state)
{
    (void)state;
    static const struct {
        uint64_t length;
        const char *fragments;
    } rows[] = {
        {6, "header length: expected at most 5|found 6|truncated"},
        {100000000, "header length: expected at most 5|found 100000000"},
        {100000001, "header length: expected at most 100000000|found 100000001"},
        {UINT64_C(1) << 63, "found 9223372036854775808"},
        {(UINT64_C(1) << 63) - 1, "found 9223372036854775807"},
        {UINT64_MAX - 7, "found 18446744073709551608"},
        {UINT64_MAX, "found 18446744073709551615"},
    };
    unsigned char *file = malloc(13);
    assert_non_null(file);
    memcpy(file + 8, "{   }", 5);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (int b = 0; b < 8; b++) {
            file[b] = (unsigned char)(rows[i].length >> (8 * b));
        }
        expect_bytes_refused(file, 13, IMBREX_STATUS_FORMAT, rows[i].fragments);
    }
    for (size_t num_bytes = 1; num_bytes < 8; num_bytes++) {
        unsigned char *cut = malloc(num_bytes);
        assert_non_null(cut);
        memset(cut, 0, num_bytes);
        expect_bytes_refused(cut, num_bytes, IMBREX_STATUS_FORMAT,
                             "header length: expected 8 bytes");
        free(cut);
    }
    free(file);
}

#define TENSOR(fields) "{\"t\":{" fields "}}"
#define F32_2 "\"dtype\":\"F32\",\"shape\":[2],"

/* Catches each rule of the format that is not enforced. The data is 16 bytes. */
static void test_bad_headers(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        enum imbrex_status status;
        const char *fragments;
    } rows[] = {
        {"", IMBREX_STATUS_FORMAT, "expected a JSON value"},
        {"[]", IMBREX_STATUS_FORMAT, "expected a JSON object, found an array"},
        {"{\"t\":1}", IMBREX_STATUS_FORMAT, "t: expected an object, found an integer"},
        {"{}", IMBREX_STATUS_FORMAT, "data: expected 0 bytes|found 16"},
        {"{\"__metadata__\":[]}", IMBREX_STATUS_FORMAT, "__metadata__: expected an object"},
        {"{\"__metadata__\":{\"a\":1}}", IMBREX_STATUS_FORMAT,
         "__metadata__: a: expected a string, found an integer"},
        {"{\"t\":{},\"t\":{}}", IMBREX_STATUS_FORMAT, "every key once"},
        {TENSOR("\"shape\":[4],\"data_offsets\":[0,16]"), IMBREX_STATUS_FORMAT,
         "t: dtype: expected a string, found nothing"},
        {TENSOR("\"dtype\":7,\"shape\":[4],\"data_offsets\":[0,16]"), IMBREX_STATUS_FORMAT,
         "t: dtype: expected a string, found an integer"},
        {TENSOR("\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,16]"),
         IMBREX_STATUS_UNSUPPORTED, "t: dtype: expected a type such as BF16|found \"F4\""},
        {TENSOR("\"dtype\":\"F32\",\"data_offsets\":[0,16]"), IMBREX_STATUS_FORMAT,
         "t: shape: expected an array, found nothing"},
        {TENSOR("\"dtype\":\"F32\",\"shape\":4,\"data_offsets\":[0,16]"), IMBREX_STATUS_FORMAT,
         "t: shape: expected an array, found an integer"},
        {TENSOR("\"dtype\":\"F32\",\"shape\":[4.0],\"data_offsets\":[0,16]"), IMBREX_STATUS_FORMAT,
         "t: shape: expected integers|found a real number"},
        {TENSOR("\"dtype\":\"F32\",\"shape\":[-4],\"data_offsets\":[0,16]"), IMBREX_STATUS_FORMAT,
         "t: shape: expected integers that are not negative, found a negative one"},
        {TENSOR("\"dtype\":\"F32\",\"shape\":[18446744073709551616],\"data_offsets\":[0,16]"),
         IMBREX_STATUS_FORMAT, "t: shape|found a real number"},
        {TENSOR("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,16]"),
         IMBREX_STATUS_FORMAT, "t: shape: expected at most 2^64 bytes, found more"},
        {TENSOR("\"dtype\":\"F32\",\"shape\":[4611686018427387908],\"data_offsets\":[0,16]"),
         IMBREX_STATUS_FORMAT, "t: shape: expected at most 2^64 bytes, found more (dimension 0)"},
        {TENSOR("\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,4],\"data_offsets\":[0,16]"),
         IMBREX_STATUS_UNSUPPORTED, "t: shape: expected at most 8 dimensions, found 9"},
        {TENSOR(F32_2 "\"x\":0"), IMBREX_STATUS_FORMAT,
         "t: data_offsets: expected an array of two integers, found nothing"},
        {TENSOR(F32_2 "\"data_offsets\":{}"), IMBREX_STATUS_FORMAT,
         "t: data_offsets: expected an array of two integers, found an object"},
        {TENSOR(F32_2 "\"data_offsets\":[0]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets|of another length"},
        {TENSOR(F32_2 "\"data_offsets\":[0,8,16]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets|of another length"},
        {TENSOR(F32_2 "\"data_offsets\":[-8,0]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets: expected integers that are not negative, found a negative one"},
        {TENSOR(F32_2 "\"data_offsets\":[0,\"8\"]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets|found a string"},
        {TENSOR(F32_2 "\"data_offsets\":[16,8]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets: expected begin <= end, found [16, 8]"},
        {TENSOR(F32_2 "\"data_offsets\":[9,17]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets: expected an end within the 16 bytes of data, found [9, 17]"},
        {TENSOR(F32_2 "\"data_offsets\":[9223372036854775799,9223372036854775807]"),
         IMBREX_STATUS_FORMAT, "t: data_offsets: expected an end within the 16 bytes"},
        {TENSOR(F32_2 "\"data_offsets\":[0,16]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets: expected 8 bytes by dtype and shape, found 16"},
        {TENSOR(F32_2 "\"data_offsets\":[0,8]"), IMBREX_STATUS_FORMAT,
         "data: expected 8 bytes, the end of the last tensor, found 16"},
        {TENSOR(F32_2 "\"data_offsets\":[8,16]"), IMBREX_STATUS_FORMAT,
         "t: data_offsets: expected begin 0|found 8 (hole)"},
        {"{\"t\":{" F32_2 "\"data_offsets\":[0,8]},\"u\":{" F32_2 "\"data_offsets\":[4,12]}}",
         IMBREX_STATUS_FORMAT, "u: data_offsets: expected begin 8|found 4 (overlap)"},
        {"{\"t\":{" F32_2 "\"data_offsets\":[0,8]},\"u\":{" F32_2 "\"data_offsets\":[0,8]}}",
         IMBREX_STATUS_FORMAT, "data_offsets: expected begin 8|found 0 (overlap)"},
        {"{\"t\":{" F32_2 "\"data_offsets\":[0,8]},\"u\":{\"dtype\":\"F32\",\"shape\":[0],"
         "\"data_offsets\":[4,4]},\"v\":{" F32_2 "\"data_offsets\":[8,16]}}",
         IMBREX_STATUS_FORMAT, "u: data_offsets: expected begin 8|found 4 (overlap)"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        size_t num_bytes;
        unsigned char *bytes = fixture_safetensors(rows[i].header, 16, &num_bytes);
        expect_bytes_refused(bytes, num_bytes, rows[i].status, rows[i].fragments);
        free(bytes);
    }
}

/* Catches a read behind a file that was cut anywhere, and a cut that goes unnoticed. */
static void test_every_truncation(void **state)
{
    (void)state;
    size_t num_bytes;
    char *whole = fixture_read("models/stories260K/model.safetensors", &num_bytes);
    struct safetensors parsed = {0};
    assert_int_equal(
        safetensors_parse(PATH, (const unsigned char *)whole, num_bytes, &parsed, NULL),
        IMBREX_STATUS_OK);
    assert_int_equal(parsed.num_tensors, 47);
    safetensors_release(&parsed);
    for (size_t cut = 0; cut < num_bytes; cut += cut < 64 || cut + 64 > num_bytes ? 1 : 997) {
        unsigned char *bytes = malloc(cut + (cut == 0));
        assert_non_null(bytes);
        memcpy(bytes, whole, cut);
        assert_int_equal(safetensors_parse(PATH, bytes, cut, &parsed, NULL), IMBREX_STATUS_FORMAT);
        free(bytes);
    }
    free(whole);
}

int run_safetensors_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensors_of_a_file), cmocka_unit_test(test_all_dtypes),
        cmocka_unit_test(test_header_length),     cmocka_unit_test(test_bad_headers),
        cmocka_unit_test(test_every_truncation),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
