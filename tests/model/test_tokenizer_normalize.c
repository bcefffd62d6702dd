/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

/* A form of a text, with a NUL behind it; the caller frees it. */
static char *to_form(enum unicode_form form, const char *text, size_t num_bytes,
                     size_t *result_bytes)
{
    struct byte_buffer buffer = {0};
    struct imbrex_error err;
    assert_int_equal(unicode_form_append(form, text, num_bytes, &buffer, &err), IMBREX_STATUS_OK);
    assert_int_equal(byte_buffer_append(&buffer, "", 1, &err), IMBREX_STATUS_OK);
    *result_bytes = buffer.num_bytes - 1;
    return buffer.bytes;
}

static char *nfc(const char *text, size_t num_bytes, size_t *result_bytes)
{
    return to_form(UNICODE_FORM_NFC, text, num_bytes, result_bytes);
}

/* Catches a step of the algorithm that is missing: decomposition, order, composition, Hangul,
 * characters that are excluded from composition. Source: UAX #15, figures 3 to 6. */
static void test_nfc_known_texts(void **state)
{
    (void)state;
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"plain", "plain"},
        {"e\xcc\x81", "\xc3\xa9"},
        {"cafe\xcc\x81 e\xcc\x81", "caf\xc3\xa9 \xc3\xa9"},
        {"\xe2\x84\xab", "\xc3\x85"},                             /* Angstrom sign */
        {"\xe2\x84\xa6", "\xce\xa9"},                             /* Ohm sign */
        {"s\xcc\xa3\xcc\x87", "\xe1\xb9\xa9"},                    /* dot below, dot above */
        {"s\xcc\x87\xcc\xa3", "\xe1\xb9\xa9"},                    /* the other order */
        {"\xe1\xb8\x8b\xcc\xa3", "\xe1\xb8\x8d\xcc\x87"},         /* d with dot above, dot below */
        {"\xef\xac\x81", "\xef\xac\x81"},                         /* fi ligature stays */
        {"2\xe2\x81\xb5", "2\xe2\x81\xb5"},                       /* superscript stays */
        {"\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", "\xed\x95\x9c"}, /* three jamo */
        {"\xea\xb0\x80\xe1\x86\xa8", "\xea\xb0\x81"},             /* syllable and final */
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"},             /* excluded from composition */
        {"\xe3\x82\xab\xe3\x82\x99", "\xe3\x82\xac"},             /* kana and voiced mark */
        {"\xf0\x9d\x85\xa0", "\xf0\x9d\x85\x98\xf0\x9d\x85\xa5\xf0\x9d\x85\xae"},
        {"\xcc\x81"
         "e",
         "\xcc\x81"
         "e"}, /* a mark with nothing before it */
        {"a\xcc\x81\xcc\x81", "\xc3\xa1\xcc\x81"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t num_bytes;
        char *found = nfc(cases[i].text, strlen(cases[i].text), &num_bytes);
        assert_string_equal(found, cases[i].expected);
        assert_int_equal(num_bytes, strlen(cases[i].expected));
        free(found);
    }
}

/* Catches a text cut where a form joins, and a character passed over that it changes: random texts
 * of characters that combine, against utf8proc's own forms. */
static void test_forms_equal_utf8proc(void **state)
{
    (void)state;
    static const uint32_t ranges[][2] = {
        {0x41, 0x5a},     {0xc0, 0x17f},      {0x300, 0x36f},     {0x370, 0x3ff},
        {0x400, 0x4ff},   {0x590, 0x5ff},     {0x900, 0x97f},     {0xd00, 0xd7f},
        {0xf71, 0xf84},   {0x1100, 0x1112},   {0x1161, 0x1175},   {0x11a8, 0x11c2},
        {0x1e00, 0x1fff}, {0x2000, 0x206f},   {0x3040, 0x30ff},   {0xac00, 0xac40},
        {0xf900, 0xfaff}, {0x4e00, 0x4e20},   {0x2f800, 0x2f820}, {0xfb00, 0xfdff},
        {0xff00, 0xffef}, {0x1d400, 0x1d7ff},
    };
    static const struct {
        enum unicode_form form;
        utf8proc_uint8_t *(*witness)(const utf8proc_uint8_t *text);
    } forms[] = {{UNICODE_FORM_NFC, utf8proc_NFC},
                 {UNICODE_FORM_NFD, utf8proc_NFD},
                 {UNICODE_FORM_NFKC, utf8proc_NFKC},
                 {UNICODE_FORM_NFKD, utf8proc_NFKD}};
    uint64_t random_state = 1;
    for (int round = 0; round < 10000; round++) {
        char text[32 * UTF8_MAX_BYTES + 1];
        size_t num_bytes = 0, num_characters = 1 + fixture_random(&random_state) % 12;
        for (size_t i = 0; i < num_characters; i++) {
            size_t range = fixture_random(&random_state) % (sizeof(ranges) / sizeof(ranges[0]));
            range = fixture_random(&random_state) % 3 == 0 ? 2 : range; /* marks, often */
            uint32_t width = ranges[range][1] - ranges[range][0] + 1;
            num_bytes += utf8_write(ranges[range][0] + fixture_random(&random_state) % width,
                                    text + num_bytes);
        }
        text[num_bytes] = '\0';
        for (size_t i = 0; i < 4; i++) {
            size_t found_bytes;
            char *found = to_form(forms[i].form, text, num_bytes, &found_bytes);
            utf8proc_uint8_t *expected = forms[i].witness((const utf8proc_uint8_t *)text);
            assert_non_null(expected);
            assert_string_equal(found, (const char *)expected);
            assert_true(!unicode_form_is_inert(forms[i].form, text, num_bytes) ||
                        strcmp(text, found) == 0);
            free(expected);
            free(found);
        }
    }
}

/* Catches a character in the list of inert ones that is not: each must be its own NFC, no mark, and
 * never be the second of two that compose (all those that stand behind the first in a canonical
 * decomposition, and the jamo after the first). */
static void test_nfc_inert_characters(void **state)
{
    (void)state;
    unsigned char *is_second = calloc(0x110000, 1);
    assert_non_null(is_second);
    for (utf8proc_int32_t c = 0; c < 0x110000; c++) {
        utf8proc_int32_t parts[16];
        int boundary_state = 0;
        if (!utf8proc_codepoint_valid(c)) {
            continue;
        }
        utf8proc_ssize_t num_parts =
            utf8proc_decompose_char(c, parts, 16, UTF8PROC_DECOMPOSE, &boundary_state);
        for (utf8proc_ssize_t i = 1; i < num_parts; i++) {
            is_second[parts[i]] = 1;
        }
    }
    size_t num_inert = 0;
    for (uint32_t c = 1; c < 0x110000; c++) {
        char text[UTF8_MAX_BYTES + 1];
        if (!utf8proc_codepoint_valid((utf8proc_int32_t)c)) {
            continue;
        }
        size_t num_bytes = utf8_write(c, text);
        text[num_bytes] = '\0';
        if (!unicode_form_is_inert(UNICODE_FORM_NFC, text, num_bytes)) {
            continue;
        }
        num_inert++;
        utf8proc_uint8_t *expected = utf8proc_NFC((const utf8proc_uint8_t *)text);
        assert_non_null(expected);
        if (is_second[c] || strcmp((const char *)expected, text) != 0 ||
            utf8proc_get_property((utf8proc_int32_t)c)->combining_class != 0) {
            fail_msg("U+%04X is not inert", c);
        }
        free(expected);
    }
    assert_true(num_inert > 80000);
    free(is_second);
}

/* Catches quadratic ordering, which would hang here: a million marks of two classes in turns. */
static void test_nfc_many_marks(void **state)
{
    (void)state;
    const size_t num_marks = 1 << 19;
    char *text = malloc(1 + 4 * num_marks);
    assert_non_null(text);
    text[0] = 'q';
    for (size_t i = 0; i < num_marks; i++) {
        memcpy(text + 1 + 4 * i, "\xcc\x81\xcc\xa3", 4); /* class 230, class 220 */
    }
    size_t num_bytes;
    char *found = nfc(text, 1 + 4 * num_marks, &num_bytes);
    assert_int_equal(num_bytes, 1 + 4 * num_marks);
    for (size_t i = 0; i < 2 * num_marks; i++) {
        assert_memory_equal(found + 1 + 2 * i, i < num_marks ? "\xcc\xa3" : "\xcc\x81", 2);
    }
    free(found);
    free(text);
}

/* A text through the steps, with a NUL behind it; the caller frees it. */
static char *run_steps(const struct normalizer_step *steps, size_t num_steps, const char *text)
{
    struct byte_buffer buffers[2] = {{0}};
    struct imbrex_error err;
    const char *normalized;
    size_t num_bytes;
    if (normalizer_run(steps, num_steps, text, strlen(text), buffers, &normalized, &num_bytes,
                       &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    char *result = strndup(normalized, num_bytes);
    assert_non_null(result);
    free(buffers[0].bytes);
    free(buffers[1].bytes);
    return result;
}

/* Catches steps that run in another order, on the text as it was, over a text that is empty, or on
 * a buffer that the text still lies in. */
static void test_normalizer_steps(void **state)
{
    (void)state;
    const struct normalizer_step steps[] = {
        {.kind = NORMALIZER_STRIP, .strips_left = true, .strips_right = true},
        {.kind = NORMALIZER_REPLACE,
         .pattern = "aa",
         .pattern_bytes = 2,
         .content = "b",
         .content_bytes = 1},
        {.kind = NORMALIZER_REPLACE,
         .pattern = "b",
         .pattern_bytes = 1,
         .content = "<b>",
         .content_bytes = 3},
        {.kind = NORMALIZER_PREPEND, .content = ">", .content_bytes = 1},
        {.kind = NORMALIZER_FORM, .form = UNICODE_FORM_NFKC},
    };
    static const char *const cases[][2] = {
        {" \xe3\x80\x80 aaa\xc2\xa0\n", "><b>a"},
        {"aaaa", "><b><b>"},
        {"x", ">x"},
        {"", ""},
        {"  ", ""},
        {"\xef\xbc\xa1 b", ">A <b>"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *found = run_steps(steps, sizeof(steps) / sizeof(steps[0]), cases[i][0]);
        assert_string_equal(found, cases[i][1]);
        free(found);
    }
}

/* Catches a file that makes a short text fill the memory: eight steps, each of which makes the text
 * longer. */
static void test_normalizer_growth_is_bounded(void **state)
{
    (void)state;
    struct normalizer_step steps[TOKENIZER_MAX_STEPS];
    for (size_t i = 0; i < TOKENIZER_MAX_STEPS; i++) {
        steps[i] = (struct normalizer_step){.kind = NORMALIZER_REPLACE,
                                            .pattern = "a",
                                            .pattern_bytes = 1,
                                            .content_bytes = TOKENIZER_MAX_AFFIX_BYTES - 1};
        memset(steps[i].content, 'a', TOKENIZER_MAX_AFFIX_BYTES - 1);
    }
    struct byte_buffer buffers[2] = {{0}};
    struct imbrex_error err;
    const char *normalized = NULL;
    size_t num_bytes = 0;
    expect_error(normalizer_run(steps, TOKENIZER_MAX_STEPS, "aaaa", 4, buffers, &normalized,
                                &num_bytes, &err),
                 IMBREX_STATUS_CAPACITY, &err, "text|4352 bytes|normalizer");
    assert_null(normalized);
    free(buffers[0].bytes);
    free(buffers[1].bytes);
}

int run_tokenizer_normalize_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nfc_known_texts),
        cmocka_unit_test(test_forms_equal_utf8proc),
        cmocka_unit_test(test_nfc_inert_characters),
        cmocka_unit_test(test_nfc_many_marks),
        cmocka_unit_test(test_normalizer_steps),
        cmocka_unit_test(test_normalizer_growth_is_bounded),
    };
    return cmocka_run_group_tests_name("tokenizer_normalize", tests, NULL, NULL);
}
