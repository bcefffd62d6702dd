/* SPDX-License-Identifier: Apache-2.0 */
#include "model/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/base/fixture.h"
#include "tests/model/gguf_fixture.h"
#include "tests/test.h"

#define PATH "m/f.gguf"

static struct gguf_fixture fixture;

static void expect_refused(enum imbrex_status expected, const char *fragments)
{
    struct imbrex_error err = {0};
    struct gguf gguf = {0};
    unsigned char *bytes = gguf_fixture_copy(&fixture);
    enum imbrex_status status = gguf_parse(PATH, bytes, fixture.num_bytes, &gguf, &err);
    expect_error(status, expected, &err, PATH ": ");
    expect_error(status, expected, &err, fragments);
    assert_null(gguf.values);
    free(bytes);
}

static void parse(unsigned char **bytes, struct gguf *gguf)
{
    struct imbrex_error err = {0};
    *bytes = gguf_fixture_copy(&fixture);
    if (gguf_parse(PATH, *bytes, fixture.num_bytes, gguf, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

/* ---- good files ------------------------------------------------------------------------------ */

static void put_numbers(void)
{
    static const struct {
        const char *key;
        uint32_t type;
        uint64_t bits;
        size_t num_bytes;
    } rows[] = {
        {"u8", 0, 200, 1},
        {"i8", 1, 0xfd, 1},
        {"u16", 2, 60000, 2},
        {"i16", 3, 0x8000, 2},
        {"u32", 4, 4000000000, 4},
        {"i32", 5, 0xffffffff, 4},
        {"f32", 6, 0x3fc00000, 4},
        {"bool", 7, 1, 1},
        {"u64", 10, UINT64_MAX, 8},
        {"i64", 11, (uint64_t)-5, 8},
        {"f64", 12, 0x3ff8000000000000, 8},
    };
    gguf_fixture_begin(&fixture, 2, 0, sizeof(rows) / sizeof(rows[0]));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        gguf_fixture_key(&fixture, rows[i].key, rows[i].type);
        gguf_fixture_integer(&fixture, rows[i].bits, rows[i].num_bytes);
    }
}

/* Catches a type of another width or sign. */
static void test_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        double value;
    } rows[] = {
        {"u8", 200},     {"i8", -3},   {"u16", 60000},
        {"i16", -32768}, {"u32", 4e9}, {"i32", -1},
        {"f32", 1.5},    {"bool", 1},  {"u64", 18446744073709551615.0},
        {"i64", -5},     {"f64", 1.5},
    };
    struct gguf gguf = {0};
    unsigned char *bytes;
    put_numbers();
    parse(&bytes, &gguf);
    assert_int_equal(gguf.version, 2);
    assert_int_equal(gguf.alignment, 32);
    assert_int_equal(gguf.num_values, sizeof(rows) / sizeof(rows[0]));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct gguf_value *value = gguf_find(&gguf, rows[i].key);
        assert_non_null(value);
        if (gguf_value_number(value, 0) != rows[i].value) {
            fail_msg("%s: expected %g, found %g", rows[i].key, rows[i].value,
                     gguf_value_number(value, 0));
        }
    }
    assert_null(gguf_find(&gguf, "u"));
    assert_null(gguf_find(&gguf, "u88"));
    gguf_release(&gguf);
    gguf_release(&gguf);
    free(bytes);
}

/* Catches an integer that is cut, a float or boolean taken for one, a range that is not kept. */
static void test_typed_access(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct gguf gguf = {0};
    unsigned char *bytes;
    int32_t integer = 77;
    double number = 77;
    bool flag = false;
    struct gguf_string string;
    put_numbers();
    parse(&bytes, &gguf);
    assert_int_equal(gguf_get_int32(&gguf, "i64", -5, 0, &integer, &err), IMBREX_STATUS_OK);
    assert_int_equal(integer, -5);
    assert_int_equal(gguf_get_int32(&gguf, "u16", 60000, 60000, &integer, &err), 0);
    assert_int_equal(integer, 60000);
    expect_error(gguf_get_int32(&gguf, "u64", 0, INT32_MAX, &integer, &err), IMBREX_STATUS_FORMAT,
                 &err, PATH "|u64|in [0, 2147483647]|found 18446744073709551615");
    expect_error(gguf_get_int32(&gguf, "u32", INT32_MIN, INT32_MAX, &integer, &err),
                 IMBREX_STATUS_FORMAT, &err, "u32|found 4000000000");
    expect_error(gguf_get_int32(&gguf, "i8", 0, 9, &integer, &err), IMBREX_STATUS_FORMAT, &err,
                 "i8|found -3");
    expect_error(gguf_get_int32(&gguf, "f32", 0, 9, &integer, &err), IMBREX_STATUS_FORMAT, &err,
                 "f32|an integer|FLOAT32");
    expect_error(gguf_get_int32(&gguf, "bool", 0, 9, &integer, &err), IMBREX_STATUS_FORMAT, &err,
                 "bool|an integer|BOOL");
    expect_error(gguf_get_int32(&gguf, "none", 0, 9, &integer, &err), IMBREX_STATUS_NOT_FOUND, &err,
                 PATH "|none|no such key");
    assert_int_equal(integer, 60000);
    assert_int_equal(gguf_get_double(&gguf, "f64", &number, &err), IMBREX_STATUS_OK);
    assert_true(number == 1.5);
    assert_int_equal(gguf_get_double(&gguf, "u8", &number, &err), IMBREX_STATUS_OK);
    assert_true(number == 200);
    expect_error(gguf_get_double(&gguf, "bool", &number, &err), IMBREX_STATUS_FORMAT, &err,
                 "bool|a number|BOOL");
    assert_int_equal(gguf_get_bool(&gguf, "bool", &flag, &err), IMBREX_STATUS_OK);
    assert_true(flag);
    expect_error(gguf_get_bool(&gguf, "u8", &flag, &err), IMBREX_STATUS_FORMAT, &err,
                 "u8|a BOOL|UINT8");
    expect_error(gguf_get_string(&gguf, "u8", &string, &err), IMBREX_STATUS_FORMAT, &err,
                 "u8|a STRING|UINT8");
    gguf_release(&gguf);
    free(bytes);
}

/* Catches strings of one value taken for another's, and arrays whose end is elsewhere. */
static void test_strings_and_arrays(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct gguf gguf = {0};
    unsigned char *bytes;
    struct gguf_string string = {0};
    const struct gguf_string *strings = NULL;
    size_t num_strings = 0;
    gguf_fixture_begin(&fixture, 3, 0, 5);
    gguf_fixture_string(&fixture, "z", "last");
    gguf_fixture_key(&fixture, "list", 9);
    gguf_fixture_integer(&fixture, 8, 4);
    gguf_fixture_integer(&fixture, 3, 8);
    gguf_fixture_text(&fixture, "a");
    gguf_fixture_text(&fixture, "");
    gguf_fixture_text(&fixture, "ccc");
    gguf_fixture_key(&fixture, "numbers", 9);
    gguf_fixture_integer(&fixture, 3, 4);
    gguf_fixture_integer(&fixture, 2, 8);
    gguf_fixture_integer(&fixture, 0xfff9, 2);
    gguf_fixture_integer(&fixture, 9, 2);
    gguf_fixture_string(&fixture, "a", "");
    gguf_fixture_key(&fixture, "empty", 9);
    gguf_fixture_integer(&fixture, 8, 4);
    gguf_fixture_integer(&fixture, 0, 8);
    parse(&bytes, &gguf);
    assert_int_equal(gguf_get_string(&gguf, "z", &string, &err), IMBREX_STATUS_OK);
    assert_int_equal(string.num_bytes, 4);
    assert_memory_equal(string.bytes, "last", 4);
    assert_int_equal(gguf_get_string(&gguf, "a", &string, &err), IMBREX_STATUS_OK);
    assert_int_equal(string.num_bytes, 0);
    assert_int_equal(gguf_get_strings(&gguf, "list", &strings, &num_strings, &err), 0);
    assert_int_equal(num_strings, 3);
    assert_int_equal(strings[1].num_bytes, 0);
    assert_memory_equal(strings[2].bytes, "ccc", 3);
    assert_int_equal(gguf_get_strings(&gguf, "empty", &strings, &num_strings, &err), 0);
    assert_int_equal(num_strings, 0);
    expect_error(gguf_get_strings(&gguf, "z", &strings, &num_strings, &err), IMBREX_STATUS_FORMAT,
                 &err, "z|an array of STRING|found STRING");
    expect_error(gguf_get_strings(&gguf, "numbers", &strings, &num_strings, &err),
                 IMBREX_STATUS_FORMAT, &err, "numbers|an array of INT16");
    const struct gguf_value *numbers = gguf_find(&gguf, "numbers");
    assert_int_equal(numbers->num_elements, 2);
    assert_true(gguf_value_number(numbers, 0) == -7 && gguf_value_number(numbers, 1) == 9);
    assert_int_equal(gguf_value_bytes(numbers), 4);
    assert_int_equal(gguf_value_bytes(gguf_find(&gguf, "list")), 3 * 8 + 4);
    gguf_release(&gguf);
    free(bytes);
}

/* Catches extents in the file's order, offsets counted from elsewhere, bytes by another block, and
 * a type without kernels that is taken for one with. */
static void test_tensors(void **state)
{
    (void)state;
    struct gguf gguf = {0};
    unsigned char *bytes;
    gguf_fixture_begin(&fixture, 3, 5, 1);
    gguf_fixture_uint32(&fixture, "general.alignment", 8);
    gguf_fixture_tensor(&fixture, "z", 2, (const uint64_t[]){2, 3}, 0, 40);
    gguf_fixture_tensor(&fixture, "q", 3, (const uint64_t[]){2, 1, 64}, 8, 64);
    gguf_fixture_tensor(&fixture, "q3", 2, (const uint64_t[]){1, 256}, 11, 200);
    gguf_fixture_tensor(&fixture, "scalar", 0, NULL, 1, 0);
    gguf_fixture_tensor(&fixture, "none", 2, (const uint64_t[]){0, 1ull << 62}, 0, 40);
    while (fixture.num_bytes % 8 != 0) {
        gguf_fixture_integer(&fixture, 0, 1);
    }
    size_t begin = fixture.num_bytes;
    for (size_t i = 0; i < 200; i++) {
        gguf_fixture_integer(&fixture, i, 1);
    }
    parse(&bytes, &gguf);
    assert_int_equal(gguf.alignment, 8);
    assert_int_equal(gguf.num_tensors, 5);
    const struct gguf_tensor *z = gguf_find_tensor(&gguf, "z");
    assert_int_equal(z->num_dims, 2);
    assert_int_equal(z->shape[0], 2);
    assert_int_equal(z->shape[1], 3);
    assert_int_equal(z->num_bytes, 24);
    assert_ptr_equal(z->elements, bytes + begin + 40);
    const struct gguf_tensor *q = gguf_find_tensor(&gguf, "q");
    assert_int_equal(q->dtype, DTYPE_Q8_0);
    assert_int_equal(q->shape[2], 64);
    assert_int_equal(q->num_bytes, 4 * 34);
    const struct gguf_tensor *q3 = gguf_find_tensor(&gguf, "q3");
    assert_int_equal(q3->dtype, DTYPE_COUNT);
    assert_int_equal(q3->num_bytes, 0);
    assert_string_equal(gguf_tensor_type_name(q3->type_id), "Q3_K");
    assert_int_equal(gguf_find_tensor(&gguf, "scalar")->num_bytes, 2);
    assert_int_equal(gguf_find_tensor(&gguf, "none")->num_bytes, 0);
    assert_null(gguf_find_tensor(&gguf, "zz"));
    gguf_release(&gguf);
    free(bytes);
}

/* Catches an id that stands for another type in the file than here. */
static void test_tensor_types(void **state)
{
    (void)state;
    static const struct {
        enum dtype dtype;
        uint32_t id;
    } rows[] = {
        {DTYPE_F32, 0},   {DTYPE_F16, 1},   {DTYPE_Q4_0, 2},  {DTYPE_Q4_1, 3},
        {DTYPE_Q5_0, 6},  {DTYPE_Q5_1, 7},  {DTYPE_Q8_0, 8},  {DTYPE_Q4_K, 12},
        {DTYPE_Q5_K, 13}, {DTYPE_Q6_K, 14}, {DTYPE_BF16, 30},
    };
    assert_int_equal(sizeof(rows) / sizeof(rows[0]), DTYPE_COUNT);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(gguf_tensor_type_id(rows[i].dtype), rows[i].id);
    }
    assert_string_equal(gguf_tensor_type_name(23), "IQ4_XS");
    assert_string_equal(gguf_tensor_type_name(39), "MXFP4");
    assert_string_equal(gguf_tensor_type_name(UINT32_MAX), "an unknown type");
}

/* ---- hostile files --------------------------------------------------------------------------- */

/* Catches an end of the file that is not seen in some place: every prefix of a good file is
 * refused, and under a sanitizer reads nothing behind it. */
static void test_every_prefix(void **state)
{
    (void)state;
    struct gguf_fixture whole;
    gguf_fixture_llama(&whole, "llama", 0, NULL);
    /* Past the headers one byte a kilobyte is enough: only lengths are compared there. */
    for (size_t num_bytes = 0; num_bytes < whole.num_bytes;
         num_bytes += num_bytes < 1400 ? 1 : 1021) {
        struct imbrex_error err = {0};
        struct gguf gguf = {0};
        unsigned char *bytes = malloc(num_bytes + (num_bytes == 0));
        assert_non_null(bytes);
        memcpy(bytes, whole.bytes, num_bytes);
        if (gguf_parse(PATH, bytes, num_bytes, &gguf, &err) != IMBREX_STATUS_FORMAT) {
            fail_msg("%zu bytes: expected FORMAT, found another status", num_bytes);
        }
        free(bytes);
    }
}

/* Catches a file of another version or byte order that is read as if it were ours. */
static void test_versions(void **state)
{
    (void)state;
    gguf_fixture_begin(&fixture, 3, 0, 0);
    fixture.bytes[3] = 'f';
    expect_refused(IMBREX_STATUS_FORMAT, "a GGUF file");
    gguf_fixture_begin(&fixture, 1, 0, 0);
    expect_refused(IMBREX_STATUS_UNSUPPORTED, "version|2 or 3|found 1");
    gguf_fixture_begin(&fixture, 4, 0, 0);
    expect_refused(IMBREX_STATUS_UNSUPPORTED, "version|2 or 3|found 4");
    gguf_fixture_begin(&fixture, 0x03000000, 0, 0);
    expect_refused(IMBREX_STATUS_UNSUPPORTED, "version|little-endian|big-endian");
}

/* Catches memory or time asked for by a number in the file rather than by its bytes. */
static void test_counts(void **state)
{
    (void)state;
    gguf_fixture_begin(&fixture, 3, 0, 1000000000);
    gguf_fixture_uint32(&fixture, "a", 1);
    expect_refused(IMBREX_STATUS_FORMAT, "number of metadata keys|at most 1 |found 1000000000");
    gguf_fixture_begin(&fixture, 3, 0, UINT64_MAX);
    expect_refused(IMBREX_STATUS_FORMAT, "number of metadata keys|found 18446744073709551615");
    gguf_fixture_begin(&fixture, 3, 1ull << 61, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "number of tensors|at most 0 |found 2305843009213693952");
}

static void put_array(uint32_t element_type, uint64_t num_elements)
{
    gguf_fixture_begin(&fixture, 3, 0, 1);
    gguf_fixture_key(&fixture, "list", 9);
    gguf_fixture_integer(&fixture, element_type, 4);
    gguf_fixture_integer(&fixture, num_elements, 8);
}

/* Catches a length, type or count of a value that is believed, and keys that are there twice. */
static void test_values(void **state)
{
    (void)state;
    gguf_fixture_begin(&fixture, 3, 0, 1);
    gguf_fixture_integer(&fixture, UINT64_MAX, 8);
    gguf_fixture_integer(&fixture, 0, 8);
    expect_refused(IMBREX_STATUS_FORMAT, "metadata key|length|18446744073709551615 bytes");
    gguf_fixture_begin(&fixture, 3, 0, 1);
    gguf_fixture_uint32(&fixture, "", 1);
    expect_refused(IMBREX_STATUS_FORMAT, "metadata key|1 to 65535 bytes|found 0");
    gguf_fixture_begin(&fixture, 3, 0, 1);
    gguf_fixture_key(&fixture, "k", 13);
    gguf_fixture_integer(&fixture, 0, 8);
    expect_refused(IMBREX_STATUS_FORMAT, "k: type|[0, 12]|found 13");
    gguf_fixture_begin(&fixture, 3, 0, 1);
    gguf_fixture_key(&fixture, "k", 8);
    gguf_fixture_integer(&fixture, 1ull << 63, 8);
    expect_refused(IMBREX_STATUS_FORMAT, "k: string|9223372036854775808 bytes|found 0");
    gguf_fixture_begin(&fixture, 3, 0, 1);
    gguf_fixture_key(&fixture, "k", 7);
    gguf_fixture_integer(&fixture, 2, 1);
    expect_refused(IMBREX_STATUS_FORMAT, "k: |a BOOL of 0 or 1|found 2");
    put_array(9, 1);
    expect_refused(IMBREX_STATUS_UNSUPPORTED, "list|an array of arrays");
    put_array(8, 1ull << 60);
    expect_refused(IMBREX_STATUS_FORMAT, "list|at most 0 strings|found 1152921504606846976");
    put_array(12, (1ull << 61) + 1); /* times 8 is 8 in 64 bits */
    gguf_fixture_integer(&fixture, 0, 8);
    expect_refused(IMBREX_STATUS_FORMAT, "list|at most 1 elements of type FLOAT64");
    put_array(99, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "list: type of the elements|found 99");
    gguf_fixture_begin(&fixture, 3, 0, 3);
    gguf_fixture_uint32(&fixture, "twice", 1);
    gguf_fixture_uint32(&fixture, "once", 1);
    gguf_fixture_uint32(&fixture, "twice", 2);
    expect_refused(IMBREX_STATUS_FORMAT, "twice: |each key once");
}

/* Catches an alignment of zero (a division), of no power of two, or one that leaves the file. */
static void test_alignment(void **state)
{
    (void)state;
    static const uint32_t wrong[] = {0, 3, 48, UINT32_MAX, 0x80000000u};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        gguf_fixture_begin(&fixture, 3, 0, 1);
        gguf_fixture_uint32(&fixture, "general.alignment", wrong[i]);
        expect_refused(IMBREX_STATUS_FORMAT, "general.alignment");
    }
    gguf_fixture_begin(&fixture, 3, 1, 1);
    gguf_fixture_uint32(&fixture, "general.alignment", 1 << 30);
    gguf_fixture_tensor(&fixture, "t", 1, (const uint64_t[]){1}, 0, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "t: padding");
    gguf_fixture_begin(&fixture, 3, 1, 0);
    gguf_fixture_tensor(&fixture, "t", 1, (const uint64_t[]){1}, 0, 4);
    gguf_fixture_elements(&fixture, 64);
    expect_refused(IMBREX_STATUS_FORMAT, "t: offset|multiple of|32|found 4");
}

static void put_tensor(uint32_t num_dims, const uint64_t *extents, uint32_t type, uint64_t offset)
{
    gguf_fixture_begin(&fixture, 3, 1, 0);
    gguf_fixture_tensor(&fixture, "t", num_dims, extents, type, offset);
    gguf_fixture_elements(&fixture, 256);
}

/* Catches extents whose product wraps, and tensors that end behind the file. */
static void test_shapes_and_places(void **state)
{
    (void)state;
    put_tensor(5, (const uint64_t[]){1, 1, 1, 1, 1}, 0, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "t: |at most 4 dimensions|found 5");
    put_tensor(1, (const uint64_t[]){UINT64_MAX}, 0, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "t: shape|18446744073709551615");
    put_tensor(3, (const uint64_t[]){1ull << 31, 1ull << 31, 4}, 0, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "t: shape|2^63");
    put_tensor(1, (const uint64_t[]){(1ull << 62) + 1}, 0, 0); /* times 4 is 4 in 64 bits */
    expect_refused(IMBREX_STATUS_FORMAT, "t: expected 18446744073709551615 bytes");
    put_tensor(2, (const uint64_t[]){2, 48}, 8, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "t: |multiple of 32|Q8_0|found 48");
    put_tensor(1, (const uint64_t[]){65}, 0, 0);
    expect_refused(IMBREX_STATUS_FORMAT, "t: expected 260 bytes at offset 0|256 bytes of tensors");
    put_tensor(1, (const uint64_t[]){1}, 0, UINT64_MAX - 31);
    expect_refused(IMBREX_STATUS_FORMAT, "t: expected 4 bytes at offset 18446744073709551584");
    put_tensor(1, (const uint64_t[]){1}, 77, 512);
    expect_refused(IMBREX_STATUS_FORMAT, "t: expected 0 bytes at offset 512");
}

static void put_two(const char *first, uint64_t first_offset, const char *second,
                    uint64_t second_offset)
{
    gguf_fixture_begin(&fixture, 3, 2, 0);
    gguf_fixture_tensor(&fixture, first, 1, (const uint64_t[]){9}, 0, first_offset);
    gguf_fixture_tensor(&fixture, second, 1, (const uint64_t[]){9}, 0, second_offset);
    gguf_fixture_elements(&fixture, 256);
}

/* Catches bytes that are read as two tensors, and names that are there twice. */
static void test_overlaps(void **state)
{
    (void)state;
    put_two("a", 0, "b", 32);
    expect_refused(IMBREX_STATUS_FORMAT, "b: |an overlap with a");
    put_two("a", 64, "b", 32);
    expect_refused(IMBREX_STATUS_FORMAT, "a: |an overlap with b");
    put_two("a", 0, "b", 0);
    expect_refused(IMBREX_STATUS_FORMAT, "an overlap with");
    put_two("a", 0, "a", 64);
    expect_refused(IMBREX_STATUS_FORMAT, "a: |each tensor once");
    put_two("a", 0, "", 64);
    expect_refused(IMBREX_STATUS_FORMAT, "tensor name|found 0");
}

/* Catches a sorting or a search that loses one of many keys or tensors, which come from the largest
 * to the smallest. */
static void test_many(void **state)
{
    (void)state;
    enum { NUM = 600 };
    struct gguf gguf = {0};
    unsigned char *bytes;
    char name[32];
    gguf_fixture_begin(&fixture, 3, NUM, NUM);
    for (int i = NUM; i-- > 0;) {
        snprintf(name, sizeof(name), "general.key.%05d", i);
        gguf_fixture_uint32(&fixture, name, (uint32_t)i);
    }
    for (int i = NUM; i-- > 0;) {
        snprintf(name, sizeof(name), "blk.weight.%05d", i);
        gguf_fixture_tensor(&fixture, name, 1, (const uint64_t[]){2}, 0, 32 * (uint64_t)i);
    }
    gguf_fixture_elements(&fixture, 32 * NUM);
    parse(&bytes, &gguf);
    for (int i = 0; i < NUM; i++) {
        snprintf(name, sizeof(name), "general.key.%05d", i);
        assert_true(gguf_value_number(gguf_find(&gguf, name), 0) == i);
        snprintf(name, sizeof(name), "blk.weight.%05d", i);
        assert_int_equal(gguf_find_tensor(&gguf, name)->elements[0], (unsigned char)(32 * i));
    }
    gguf_release(&gguf);
    free(bytes);
}

int run_gguf_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_typed_access),
        cmocka_unit_test(test_strings_and_arrays),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_tensor_types),
        cmocka_unit_test(test_every_prefix),
        cmocka_unit_test(test_versions),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_shapes_and_places),
        cmocka_unit_test(test_overlaps),
        cmocka_unit_test(test_many),
    };
    return cmocka_run_group_tests_name("gguf", tests, NULL, NULL);
}
