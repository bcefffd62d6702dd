/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

/* The words of a text, separated by '|'; a text has no '|' of its own. */
static void expect_words(const char *expected)
{
    char text[256], found[512];
    size_t text_bytes = 0, found_bytes = 0;
    for (const char *at = expected; *at != '\0'; at++) {
        if (*at != '|') {
            text[text_bytes++] = *at;
        }
    }
    for (size_t at = 0; at < text_bytes;) {
        size_t word_bytes = qwen2_split_next(text + at, text_bytes - at);
        assert_true(word_bytes >= 1 && word_bytes <= text_bytes - at);
        if (at > 0) {
            found[found_bytes++] = '|';
        }
        memcpy(found + found_bytes, text + at, word_bytes);
        found_bytes += word_bytes;
        at += word_bytes;
    }
    found[found_bytes] = '\0';
    assert_string_equal(found, expected);
}

/* Catches an alternative of the pattern that is missing, out of order or too greedy. Each text is
 * derived from the pattern by hand. */
static void test_split_by_hand(void **state)
{
    (void)state;
    static const char *const cases[] = {
        /* contractions, in either case, only where they begin */
        "don|'t",
        "DON|'T",
        "I|'ve|'re|'ll|'d|'m|'s",
        "x|'LL|'Ve|'rE",
        "'s|ize",
        "a| '|s",
        "''|s",
        "'x",
        "x|'l",
        "x|'",
        "'r|1",
        /* a long s, U+017F, is an s in either case; the dotless i is nothing */
        "x|'\xc5\xbf|t",
        "x|'\xc4\xb1t",
        /* letters with at most one character before them */
        "Hello| world",
        "_a|___|b",
        "(a|((|b",
        "\tx|\t|\tx",
        "\xe2\x80\x94x",
        "a|-b|-c",
        /* numbers one by one, nothing before them */
        "1|2|3|a|4",
        " |1| |2",
        "a|1|b",
        "\xc2\xbd|\xe2\x85\xa7|\xd9\xa3",
        /* punctuation with one space before it and line breaks behind it */
        " !?!!",
        "a| ...\n\n|b",
        "x|.\r\n|\ty",
        "...\n|1",
        " | !!",
        "\t|!",
        "!| ",
        /* white space: up to the last line break, all but the last before more, all at the end */
        "a|  \n \n|  | b",
        "a|  ",
        "a|  | b",
        "a| |\t|1",
        "a|\n|b",
        "a|\r\n\r\n|b",
        " \n",
        "   ",
        "\n|  | x",
        "\xe3\x80\x80|\xe3\x80\x80"
        "a",
        "a|\xc2\xa0|\xc2\xa0"
        "b",
        "a|\xc2\x85\xc2\x85\n",
        /* marks are no letters: they end a word and join punctuation */
        "e|\xcc\x81!",
        "\xe4\xb8\xad\xe6\x96\x87|\xef\xbc\x8c\xe4\xb8\xad",
        "\xf0\x9f\x98\x80\xf0\x9f\x98\x80|a",
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_words(cases[i]);
    }
}

/* Catches categories that depend on the age of utf8proc's tables: a letter and a digit of Unicode
 * 16, and a letter of Unicode 15.1. */
static void test_split_newer_unicode(void **state)
{
    (void)state;
    expect_words("a\xe1\xb2\x89");
    expect_words("a|\xf0\x90\xb5\x80|\xf0\x90\xb5\x81");
    expect_words("a\xf0\xae\xaf\xb0");
}

/* Catches a read past the end: each character of a text ends exactly where the memory does. */
static void test_split_ends_with_the_text(void **state)
{
    (void)state;
    static const char text[] = "'\xc5\xbf\xe3\x80\x80\xf0\x9f\x98\x80 \xc3\xa9\r\n 'll 've";
    for (size_t begin = 0; begin < sizeof(text) - 1; begin++) {
        for (size_t end = begin + 1; end < sizeof(text); end++) {
            if (utf8_valid_prefix(text + begin, end - begin) < end - begin) {
                continue;
            }
            char *copy = malloc(end - begin);
            assert_non_null(copy);
            memcpy(copy, text + begin, end - begin);
            size_t at = 0;
            while (at < end - begin) {
                at += qwen2_split_next(copy + at, end - begin - at);
            }
            assert_int_equal(at, end - begin);
            free(copy);
        }
    }
}

int run_tokenizer_split_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_by_hand),
        cmocka_unit_test(test_split_newer_unicode),
        cmocka_unit_test(test_split_ends_with_the_text),
    };
    return cmocka_run_group_tests_name("tokenizer_split", tests, NULL, NULL);
}
