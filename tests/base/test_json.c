/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/base/fixture.h"
#include "tests/test.h"

static json_t *parse(const char *text)
{
    struct imbrex_error err = {0};
    json_t *root = NULL;
    /* A copy of exactly these bytes, so that a sanitizer sees a read behind them. */
    size_t num_bytes = strlen(text);
    char *bytes = malloc(num_bytes + 1);
    assert_non_null(bytes);
    char *exact = realloc(memcpy(bytes, text, num_bytes), num_bytes > 0 ? num_bytes : 1);
    assert_non_null(exact);
    if (json_parse_object("f.json", exact, num_bytes, &root, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s: %s", text, err.message);
    }
    free(exact);
    return root;
}

/* Catches a value that the parser changes; jansson's own reading is the judge. */
static void test_same_as_jansson(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "{}",
        " \t\r\n{ \"a\" : [ ] , \"b\" : { } }\n",
        "{\"a\":[1,-1,0,-0,9223372036854775807,-9223372036854775808]}",
        "{\"a\":[0.1,1e-06,1E+2,-0.0,1.0,2.5e3,1e308,5e-324,1e-400,0.30000000000000004]}",
        "{\"a\":[179769313486231570000000000000000000000e270,123456789.123456789]}",
        "{\"a\":[true,false,null,\"\",\"x\"]}",
        "{\"a\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC\\ud83d\\ude00\"}",
        "{\"\":1,\"\\u00e9\":2,\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\":3,\"\x7f\":4}",
        "{\"a\":{\"b\":{\"a\":{\"b\":[[[{\"a\":[]}]]]}}}}",
    };
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        json_error_t error;
        json_t *expected = json_loads(texts[i], 0, &error), *root = parse(texts[i]);
        assert_non_null(expected);
        if (!json_equal(root, expected)) {
            fail_msg("%s: read differently", texts[i]);
        }
        json_decref(root);
        json_decref(expected);
    }
}

/* Catches integers beyond 64 bits that wrap or are refused: Python writes such. */
static void test_large_integers_become_real(void **state)
{
    (void)state;
    json_t *root = parse("{\"a\":9223372036854775808,\"b\":-9223372036854775809,"
                         "\"c\":1000000000000000019884624838656}");
    assert_true(json_real_value(json_object_get(root, "a")) == 9223372036854775808.0);
    assert_true(json_real_value(json_object_get(root, "b")) == -9223372036854775809.0);
    assert_true(json_real_value(json_object_get(root, "c")) == 1e30);
    json_decref(root);
}

/* Catches text that is no JSON and passes, and messages without a place. */
static void test_syntax_errors(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"", "line 1, column 1|expected a JSON value|end of the data"},
        {"GGUF\x03", "line 1, column 1|found 'G'"},
        {"{", "line 1, column 2|key in double quotes|end of the data"},
        {"{\"a\"", "expected ':'"},
        {"{\"a\":", "a JSON value|end of the data"},
        {"{\"a\":1", "',' or '}'|end of the data"},
        {"{\"a\":1,}", "key in double quotes|found '}'"},
        {"{\n  \"a\": 1,\n  b}", "line 3, column 3|found 'b'"},
        {"{\"\xc3\xa9\":x}", "line 1, column 6|found 'x'"},
        {"{\"a\":[1,]}", "a JSON value|found ']'"},
        {"{\"a\":[1 2]}", "',' or ']'|found '2'"},
        {"{\"a\":1}x", "expected the end of the data|found 'x'"},
        {"{\"a\":01}", "',' or '}'|found '1'"},
        {"{\"a\":-}", "a digit"},
        {"{\"a\":1.}", "a digit"},
        {"{\"a\":1e}", "a digit"},
        {"{\"a\":+1}", "a JSON value|found '+'"},
        {"{\"a\":NaN}", "a JSON value|found 'N'"},
        {"{\"a\":-Infinity}", "a digit|found 'I'"},
        {"{\"a\":1e309}", "column 6|fits double precision"},
        {"{\"a\":-1e999999999999}", "fits double precision"},
        {"{\"a\":tru}", "a JSON value"},
        {"{\"a\":\"x", "rest of a string|end of the data"},
        {"{\"a\":\"x\ny\"}", "rest of a string|byte 0x0a"},
        {"{\"a\":\"\\x\"}", "an escape sequence|found 'x'"},
        {"{\"a\":\"\\", "an escape sequence|end of the data"},
        {"{\"a\":\"\\u12g4\"}", "four hexadecimal digits|found 'g'"},
        {"{\"a\":\"\\u0000\"}", "other than U+0000"},
        {"{\"a\":\"\\ud800\"}", "pair of surrogates"},
        {"{\"a\":\"\\ud800\\u0041\"}", "pair of surrogates"},
        {"{\"a\":\"\\udc00\\ud800\"}", "pair of surrogates"},
        {"{\"a\":\"\xff\"}", "valid UTF-8|byte 0xff"},
        {"{\"a\":\"\xc3\"}", "valid UTF-8"},
        {"{\"a\":\"\xed\xa0\x80\"}", "valid UTF-8"},
        {"{\"a\":1,\"b\":2,\"a\":3}", "column 14|every key once|\"a\" again"},
        {"{\"a\":1,\"\\u0061\":3}", "every key once"},
        {"[1]", "expected a JSON object|found an array"},
        {"null", "expected a JSON object|found null"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct imbrex_error err = {0};
        json_t *root = NULL;
        enum imbrex_status status =
            json_parse_object("f.json", rows[i][0], strlen(rows[i][0]), &root, &err);
        expect_error(status, IMBREX_STATUS_FORMAT, &err, "f.json: ");
        expect_error(status, IMBREX_STATUS_FORMAT, &err, rows[i][1]);
        assert_null(root);
    }
}

/* Catches a NUL byte that ends the text early, inside or outside of strings. */
static void test_nul_bytes(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    json_t *root = NULL;
    expect_error(json_parse_object("f", "{}\0", 3, &root, &err), IMBREX_STATUS_FORMAT, &err,
                 "byte 0x00");
    expect_error(json_parse_object("f", "{\"a\0\":1}", 8, &root, &err), IMBREX_STATUS_FORMAT, &err,
                 "byte 0x00");
    assert_null(root);
}

static void nest(char *text, size_t depth)
{
    size_t length = (size_t)sprintf(text, "{\"a\":");
    memset(text + length, '[', depth - 1);
    memset(text + length + depth - 1, ']', depth - 1);
    strcpy(text + length + 2 * (depth - 1), "}");
}

/* Catches recursion without a bound: a stack overflow from a file of a few KiB. */
static void test_depth(void **state)
{
    (void)state;
    static char text[400000];
    struct imbrex_error err = {0};
    json_t *root = NULL;
    nest(text, 128);
    json_decref(parse(text));
    nest(text, 129);
    expect_error(json_parse_object("f", text, strlen(text), &root, &err), IMBREX_STATUS_FORMAT,
                 &err, "at most 128 levels");
    memset(text, '[', sizeof(text));
    expect_error(json_parse_object("f", text, sizeof(text), &root, &err), IMBREX_STATUS_FORMAT,
                 &err, "at most 128 levels");
    for (size_t i = 0; i + 5 <= sizeof(text); i += 5) {
        memcpy(text + i, "{\"a\":", 5);
    }
    expect_error(json_parse_object("f", text, sizeof(text), &root, &err), IMBREX_STATUS_FORMAT,
                 &err, "at most 128 levels");
}

/* Catches a digit buffer that overflows. */
static void test_long_numbers(void **state)
{
    (void)state;
    char text[1024];
    struct imbrex_error err = {0};
    json_t *root = NULL;
    int length = sprintf(text, "{\"a\":0.");
    memset(text + length, '1', 319);
    strcpy(text + length + 319, "e-2147483648}");
    json_decref(parse(text));
    memset(text + length, '1', 320);
    strcpy(text + length + 320, "}");
    expect_error(json_parse_object("f", text, strlen(text), &root, &err), IMBREX_STATUS_FORMAT,
                 &err, "at most 320 digits");
}

/* Catches a range off by one, a kind that passes as another, a result written on failure. */
static void test_required_fields(void **state)
{
    (void)state;
    json_t *root = parse("{\"i\":5,\"r\":5.5,\"s\":\"x\",\"t\":true,\"n\":null,"
                         "\"big\":4294967301,\"min\":-9223372036854775808}");
    struct imbrex_error err = {0};
    int32_t integer = 77;
    double real = 77;
    const char *string = "untouched";
    assert_int_equal(json_get_int32("f", root, "i", 5, 5, &integer, NULL), IMBREX_STATUS_OK);
    assert_int_equal(integer, 5);
    assert_int_equal(json_get_double("f", root, "i", 5, 5, &real, NULL), IMBREX_STATUS_OK);
    assert_true(real == 5);
    assert_int_equal(json_get_double("f", root, "r", 5.5, 5.5, &real, NULL), IMBREX_STATUS_OK);
    assert_true(real == 5.5);
    assert_int_equal(json_get_string("f", root, "s", &string, NULL), IMBREX_STATUS_OK);
    assert_string_equal(string, "x");

    static const char *const rows[][2] = {
        {"i", "f.json: i: expected an integer in [6, 9], found 5"},
        {"r", "f.json: r: expected an integer in [6, 9], found 5.5"},
        {"s", "f.json: s: expected an integer in [6, 9], found a string"},
        {"t", "found true"},
        {"n", "found null"},
        {"big", "found 4294967301"},
        {"min", "found -9223372036854775808"},
        {"absent", "f.json: absent: expected an integer in [6, 9], found nothing"},
    };
    integer = 77;
    real = 77;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        expect_error(json_get_int32("f.json", root, rows[i][0], 6, 9, &integer, &err),
                     IMBREX_STATUS_FORMAT, &err, rows[i][1]);
        assert_int_equal(integer, 77);
        expect_error(json_get_double("f.json", root, rows[i][0], 6, 9, &real, &err),
                     IMBREX_STATUS_FORMAT, &err, "expected a number in [6, 9], found ");
        assert_true(real == 77);
    }
    expect_error(json_get_string("f.json", root, "i", &string, &err), IMBREX_STATUS_FORMAT, &err,
                 "f.json: i: expected a string, found 5");
    expect_error(json_get_string("f.json", root, "absent", &string, &err), IMBREX_STATUS_FORMAT,
                 &err, "found nothing");
    json_decref(root);
}

/* Catches null treated as a value, a default overwritten, a wrong kind that is skipped. */
static void test_optional_fields(void **state)
{
    (void)state;
    json_t *root = parse("{\"i\":5,\"r\":0.5,\"t\":true,\"f\":false,\"n\":null,\"s\":\"x\"}");
    struct imbrex_error err = {0};
    int32_t integer = 77;
    double real = 77;
    bool flag = true, found = true;
    assert_int_equal(json_get_optional_int32("f", root, "n", 0, 9, &integer, &found, NULL), 0);
    assert_int_equal(integer, 77);
    assert_false(found);
    assert_int_equal(json_get_optional_int32("f", root, "i", 0, 9, &integer, &found, NULL), 0);
    assert_int_equal(integer, 5);
    assert_true(found);
    assert_int_equal(json_get_optional_double("f", root, "absent", 0, 9, &real, &found, NULL), 0);
    assert_true(real == 77);
    assert_false(found);
    assert_int_equal(json_get_optional_double("f", root, "r", 0, 9, &real, NULL, NULL), 0);
    assert_true(real == 0.5);
    assert_int_equal(json_get_optional_bool("f", root, "n", &flag, NULL), 0);
    assert_true(flag);
    assert_int_equal(json_get_optional_bool("f", root, "f", &flag, NULL), 0);
    assert_false(flag);
    assert_int_equal(json_get_optional_bool("f", root, "t", &flag, NULL), 0);
    assert_true(flag);

    found = true;
    expect_error(json_get_optional_int32("f", root, "s", 0, 9, &integer, &found, &err),
                 IMBREX_STATUS_FORMAT, &err, "f: s: expected an integer|found a string");
    expect_error(json_get_optional_double("f", root, "i", 6, 9, &real, &found, &err),
                 IMBREX_STATUS_FORMAT, &err, "f: i: expected a number|found 5");
    expect_error(json_get_optional_bool("f", root, "i", &flag, &err), IMBREX_STATUS_FORMAT, &err,
                 "f: i: expected true or false, found 5");
    assert_int_equal(integer, 5);
    assert_true(real == 0.5);
    json_decref(root);
}

/* Catches a document cut by the limit that is parsed all the same. */
static void test_read_object(void **state)
{
    (void)state;
    char path[FIXTURE_PATH_BYTES];
    struct imbrex_error err = {0};
    json_t *root = NULL;
    fixture_write(fixture_path(path, "json-object"), "{\"a\":1} ", 8);
    assert_int_equal(json_read_object(path, 8, &root, NULL), IMBREX_STATUS_OK);
    assert_int_equal(json_integer_value(json_object_get(root, "a")), 1);
    json_decref(root);
    root = NULL;
    expect_error(json_read_object(path, 7, &root, &err), IMBREX_STATUS_FORMAT, &err,
                 "json-object|at most 7");
    expect_error(json_read_object("does/not/exist", 7, &root, &err), IMBREX_STATUS_NOT_FOUND, &err,
                 "does/not/exist");
    assert_null(root);
}

int run_json_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_as_jansson), cmocka_unit_test(test_large_integers_become_real),
        cmocka_unit_test(test_syntax_errors),   cmocka_unit_test(test_nul_bytes),
        cmocka_unit_test(test_depth),           cmocka_unit_test(test_long_numbers),
        cmocka_unit_test(test_required_fields), cmocka_unit_test(test_optional_fields),
        cmocka_unit_test(test_read_object),
    };
    return cmocka_run_group_tests_name("json", tests, NULL, NULL);
}
