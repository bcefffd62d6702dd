/* SPDX-License-Identifier: Apache-2.0 */
#include "base/utf8.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

static bool is_scalar(uint32_t code_point)
{
    return code_point < 0x110000 && (code_point < 0xd800 || code_point > 0xdfff);
}

/* Catches a wrong length, bit or range edge for any of the 1,112,064 characters there are. */
static void test_utf8_every_character(void **state)
{
    (void)state;
    size_t num_characters = 0;
    for (uint32_t code_point = 0; code_point < 0x110000; code_point++) {
        if (!is_scalar(code_point)) {
            continue;
        }
        char text[UTF8_MAX_BYTES];
        size_t num_bytes = utf8_write(code_point, text);
        struct utf8_step step = utf8_next(text, num_bytes);
        if (step.code_point != code_point || step.num_bytes != num_bytes || !step.is_valid ||
            step.is_cut) {
            fail_msg("U+%04X: read as U+%04X, %d of %zu bytes", code_point, step.code_point,
                     step.num_bytes, num_bytes);
        }
        num_characters++;
    }
    assert_int_equal(num_characters, 1112064);
}

/* Catches a decoder that takes more than there are: all two-byte and three-byte texts give exactly
 * the characters of those lengths. */
static void test_utf8_nothing_else_is_valid(void **state)
{
    (void)state;
    size_t num_two = 0, num_three = 0;
    for (uint32_t value = 0; value < 0x1000000; value++) {
        char text[3] = {(char)(value >> 16), (char)(value >> 8), (char)value};
        struct utf8_step step = utf8_next(text, 3);
        num_three += step.is_valid && step.num_bytes == 3;
        num_two += step.is_valid && step.num_bytes == 2 && (value & 0xff) == 0;
    }
    assert_int_equal(num_two, 0x800 - 0x80);
    assert_int_equal(num_three, 0x10000 - 0x800 - 0x800);
}

/* Catches U+FFFD for too many or too few bytes: a maximal subpart is one step. The texts are those
 * of The Unicode Standard, tables 3-8 to 3-11, and the edges of overlong forms and surrogates. */
static void test_utf8_invalid_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        const char *steps; /* bytes of each step; a letter for a valid one: a is 1 byte */
    } cases[] = {
        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", "11111111a"},
        {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", "11111111a"},
        {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", "11111a11a"},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", "2132a"},
        {"\xc1\xbf\xe0\x9f\xbf\xf0\x8f\xbf\xbf", "111111111"},
        {"\xf4\x90\x80\x80\xf5\x80\xf8\xfe\xff", "111111111"},
        {"\xc2\x41\xe2\x82\x41\xf0\x9f\x98\x41", "1a2a3a"},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x80", "bcd1"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t num_bytes = strlen(cases[i].text), at = 0;
        for (const char *expected = cases[i].steps; *expected != '\0'; expected++) {
            assert_true(at < num_bytes);
            struct utf8_step step = utf8_next(cases[i].text + at, num_bytes - at);
            bool is_valid = *expected >= 'a';
            assert_int_equal(step.is_valid, is_valid);
            assert_int_equal(step.num_bytes, is_valid ? *expected - 'a' + 1 : *expected - '0');
            assert_int_equal(step.is_cut, 0);
            if (!is_valid) {
                assert_int_equal(step.code_point, UTF8_REPLACEMENT);
            }
            at += step.num_bytes;
        }
        assert_int_equal(at, num_bytes);
    }
}

/* Catches a read past the end, and a cut character that is taken for a broken one: what follows the
 * text in memory would complete it. */
static void test_utf8_cut_characters(void **state)
{
    (void)state;
    static const char *const characters[] = {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80",
                                             "\xe0\xa0\x80", "\xf4\x8f\xbf\xbf"};
    for (size_t i = 0; i < sizeof(characters) / sizeof(characters[0]); i++) {
        for (size_t num_bytes = 1; num_bytes < strlen(characters[i]); num_bytes++) {
            struct utf8_step step = utf8_next(characters[i], num_bytes);
            assert_int_equal(step.is_valid, 0);
            assert_int_equal(step.is_cut, 1);
            assert_int_equal(step.num_bytes, num_bytes);
        }
    }
    assert_int_equal(utf8_next("\xff", 1).is_cut, 0);
    assert_int_equal(utf8_next("\xed\xa0", 2).is_cut, 0);
}

/* Catches a prefix that is off by some bytes around the 8-byte words it is looked for in. */
static void test_utf8_prefixes(void **state)
{
    (void)state;
    for (size_t num_bytes = 0; num_bytes < 40; num_bytes++) {
        for (size_t position = 0; position <= num_bytes; position++) {
            char *text = malloc(num_bytes + 1);
            assert_non_null(text);
            memset(text, 'x', num_bytes);
            if (position < num_bytes) {
                text[position] = (char)0x80;
            }
            assert_int_equal(utf8_ascii_prefix(text, num_bytes), position);
            assert_int_equal(utf8_valid_prefix(text, num_bytes), position);
            if (position + 1 < num_bytes) {
                memcpy(text + position, "\xc3\xa9", 2);
                assert_int_equal(utf8_ascii_prefix(text, num_bytes), position);
                assert_int_equal(utf8_valid_prefix(text, num_bytes), num_bytes);
                assert_int_equal(utf8_valid_prefix(text, position + 1), position);
            }
            free(text);
        }
    }
}

int run_utf8_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8_every_character),
        cmocka_unit_test(test_utf8_nothing_else_is_valid),
        cmocka_unit_test(test_utf8_invalid_bytes),
        cmocka_unit_test(test_utf8_cut_characters),
        cmocka_unit_test(test_utf8_prefixes),
    };
    return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
