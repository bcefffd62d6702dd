/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "model/unicode_kind.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

/* The words of a text, separated by '|'; a text has no '|' of its own. */
static void expect_words_of(enum word_pattern pattern, const char *expected)
{
    char text[256], found[512];
    size_t text_bytes = 0, found_bytes = 0;
    for (const char *at = expected; *at != '\0'; at++) {
        if (*at != '|') {
            text[text_bytes++] = *at;
        }
    }
    for (size_t at = 0; at < text_bytes;) {
        size_t word_bytes = word_next(pattern, text + at, text_bytes - at);
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

static void expect_words(const char *expected)
{
    expect_words_of(WORD_PATTERN_QWEN2, expected);
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

/* Catches what GPT-2's pattern has otherwise: contractions in lower case only, one space and
 * nothing else before letters and numbers, numbers of any length, line breaks as other white
 * space. */
static void test_split_gpt2_by_hand(void **state)
{
    (void)state;
    static const char *const cases[] = {
        "don|'t| I|'ll",
        "DON|'|T",
        "x|'|\xc5\xbf",
        "Hello| world",
        "_|a|___|b",
        " (|a",
        "\t|x| y",
        "123|abc| 456",
        "a|  | 123",
        "\xc2\xbd\xe2\x85\xa7\xd9\xa3",
        " !?|1",
        ".|\n|x",
        ".|\r\n",
        "a|\n|\n|b",
        "a|  \n |\t|b",
        "a|  | b",
        " \n",
        "'s|ize",
        "\xe3\x80\x80|a",
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_words_of(WORD_PATTERN_GPT2, cases[i]);
    }
}

/* Catches numbers that are not cut after three digits from the left. */
static void test_split_llama3_by_hand(void **state)
{
    (void)state;
    static const char *const cases[] = {
        "1",        "12",       "123",   "123|4", "123|456|78",
        "a|123|b",  " |123|4",  "x|'LL", "1|.|5", "\xd9\xa3\xd9\xa3\xd9\xa3|\xd9\xa3",
        "(a|!\n|b", "a|\n\n|b",
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_words_of(WORD_PATTERN_LLAMA3, cases[i]);
    }
}

/* Catches a pattern that is not known by its text, and a text that is taken for another one. */
static void test_split_finds_patterns(void **state)
{
    (void)state;
    enum word_pattern pattern;
    for (int i = 0; i < NUM_WORD_PATTERNS; i++) {
        assert_true(word_pattern_find(word_pattern_text((enum word_pattern)i), &pattern));
        assert_int_equal(pattern, i);
    }
    assert_false(word_pattern_find("\\s+", &pattern));
    assert_false(word_pattern_find("", &pattern));
}

/* Catches a character in the wrong table, with utf8proc as the witness for what it knows: letters,
 * numbers, marks and white space of Unicode 15. */
static void test_unicode_kinds(void **state)
{
    (void)state;
    bool is_newer = atoi(utf8proc_unicode_version()) > 16;
    for (uint32_t c = 0; c < 0x110000; c++) {
        utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
        if (category == UTF8PROC_CATEGORY_CN || category == UTF8PROC_CATEGORY_CS ||
            (is_newer && unicode_kind(c) == UNICODE_OTHER)) {
            continue;
        }
        bool is_letter = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
        bool is_mark = category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME;
        bool is_number = category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
        bool is_space = category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
                        category == UTF8PROC_CATEGORY_ZP || (c >= 9 && c <= 13) || c == 0x85;
        if ((unicode_kind(c) == UNICODE_LETTER) != is_letter || unicode_is_number(c) != is_number ||
            unicode_is_space(c) != is_space ||
            ((is_letter || is_mark || category == UTF8PROC_CATEGORY_ND) && !unicode_is_word(c))) {
            fail_msg("U+%04X: category %d, kind %d", c, category, unicode_kind(c));
        }
    }
    assert_true(unicode_is_word('_') && unicode_is_word(0x24b6) && unicode_is_word(0x200d));
    assert_false(unicode_is_word('-') || unicode_is_word(0xbd) || unicode_is_word(0x1f600));
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
            for (int pattern = 0; pattern < NUM_WORD_PATTERNS; pattern++) {
                size_t at = 0;
                while (at < end - begin) {
                    at += word_next((enum word_pattern)pattern, copy + at, end - begin - at);
                }
                assert_int_equal(at, end - begin);
            }
            free(copy);
        }
    }
}

int run_tokenizer_split_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_by_hand),
        cmocka_unit_test(test_split_gpt2_by_hand),
        cmocka_unit_test(test_split_llama3_by_hand),
        cmocka_unit_test(test_split_finds_patterns),
        cmocka_unit_test(test_unicode_kinds),
        cmocka_unit_test(test_split_newer_unicode),
        cmocka_unit_test(test_split_ends_with_the_text),
    };
    return cmocka_run_group_tests_name("tokenizer_split", tests, NULL, NULL);
}
