/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/stop_matcher.h"

#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

/* Pushes `text` in pieces of piece_bytes; returns what was passed on, "|" appended at a stop. */
static char *run(const char *const *stops, size_t num_stops, const char *text, size_t piece_bytes)
{
    struct stop_matcher matcher;
    struct imbrex_error err;
    size_t num_bytes = strlen(text);
    char *out = calloc(num_bytes + 2, 1);
    size_t num_out = 0;
    assert_non_null(out);
    assert_int_equal(stop_matcher_create(stops, num_stops, piece_bytes, &matcher, &err),
                     IMBREX_STATUS_OK);
    for (size_t begin = 0; begin <= num_bytes; begin += piece_bytes) {
        size_t num_left = num_bytes - begin;
        size_t num_piece = num_left < piece_bytes ? num_left : piece_bytes;
        size_t num_ready;
        memcpy(stop_matcher_piece(&matcher), text + begin, num_piece);
        bool is_stop = stop_matcher_push(&matcher, num_piece, num_left < piece_bytes, &num_ready);
        memcpy(out + num_out, matcher.text, num_ready);
        num_out += num_ready;
        stop_matcher_drop(&matcher, num_ready);
        if (is_stop) {
            out[num_out] = '|';
            break;
        }
    }
    stop_matcher_destroy(&matcher);
    return out;
}

/* Catches: a stop string that leaks in part, is missed across pieces, or is cut at a later match
 * than the first; text that is lost because it looked like the start of one. */
static void test_cases(void **state)
{
    (void)state;
    const struct {
        const char *stops[3], *text, *expected;
    } cases[] = {
        {{"END"}, "one END two", "one |"},
        {{"END"}, "one EN two", "one EN two"},
        {{"END"}, "EENENDx", "EEN|"},
        {{"aab"}, "aaaab", "aa|"},
        {{"bcd", "abcdef"}, "xabcdz", "xa|"}, /* the longer one begins first but never ends */
        {{"abcdef", "bcd"}, "xabcdef", "x|"}, /* it does end, and begins first */
        {{"\n\n"}, "a\nb\n\nc", "a\nb|"},
        {{"\xc3\xa9"}, "caf\xc3\xa9", "caf|"},
        {{"x"}, "", ""},
        {{"x"}, "x", "|"},
        {{"abcdef", "bcd"}, "xabcd", "xa|"}, /* the longer one can no longer come */
        {{"long stop string"}, "long stop strin", "long stop strin"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t num_stops = 0;
        while (num_stops < 3 && cases[i].stops[num_stops] != NULL) {
            num_stops++;
        }
        for (size_t piece_bytes = 1; piece_bytes < 12; piece_bytes++) {
            char *found = run(cases[i].stops, num_stops, cases[i].text, piece_bytes);
            if (strcmp(found, cases[i].expected) != 0) {
                fail_msg("case %zu, pieces of %zu: expected '%s', found '%s'", i, piece_bytes,
                         cases[i].expected, found);
            }
            free(found);
        }
    }
}

/* Catches: text held back although no stop string can begin in it. */
static void test_releases_at_once(void **state)
{
    (void)state;
    const char *const stops[] = {"stop"};
    struct stop_matcher matcher;
    struct imbrex_error err;
    size_t num_ready;
    assert_int_equal(stop_matcher_create(stops, 1, 8, &matcher, &err), IMBREX_STATUS_OK);
    memcpy(stop_matcher_piece(&matcher), "abc st", 6);
    assert_false(stop_matcher_push(&matcher, 6, false, &num_ready));
    assert_int_equal(num_ready, 4);
    stop_matcher_drop(&matcher, num_ready);
    memcpy(stop_matcher_piece(&matcher), "a", 1);
    assert_false(stop_matcher_push(&matcher, 1, false, &num_ready));
    assert_int_equal(num_ready, 3);
    assert_memory_equal(matcher.text, "sta", 3);
    stop_matcher_destroy(&matcher);
}

/* Catches: an empty stop string accepted (it would end every generation at once). */
static void test_refuses_empty(void **state)
{
    (void)state;
    const char *const stops[] = {"a", ""};
    struct stop_matcher matcher;
    struct imbrex_error err;
    assert_int_equal(stop_matcher_create(stops, 2, 8, &matcher, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "stop[1]"));
}

int run_stop_matcher_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_releases_at_once),
        cmocka_unit_test(test_refuses_empty),
    };
    return cmocka_run_group_tests_name("stop_matcher", tests, NULL, NULL);
}
