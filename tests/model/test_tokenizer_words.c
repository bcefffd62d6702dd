/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/test.h"

/* The pieces of a text, "|" between them, "!" before those at the start of the text. */
struct pieces {
    char text[512];
};

static enum imbrex_status add_piece(void *context, const char *text, size_t num_bytes,
                                    bool is_at_start)
{
    struct pieces *pieces = context;
    size_t length = strlen(pieces->text);
    assert_true(num_bytes > 0 && length + num_bytes + 3 < sizeof(pieces->text));
    snprintf(pieces->text + length, sizeof(pieces->text) - length, "%s%s%.*s",
             length > 0 ? "|" : "", is_at_start ? "!" : "", (int)num_bytes, text);
    return IMBREX_STATUS_OK;
}

static void expect_pieces(const struct pre_step *steps, size_t num_steps, const char *text,
                          const char *expected)
{
    struct pieces pieces = {""};
    struct pre_scratch scratch = {0};
    struct imbrex_error err;
    if (pre_tokenize(steps, num_steps, text, strlen(text), true, &scratch, add_piece, &pieces,
                     &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    pre_scratch_release(&scratch);
    assert_string_equal(pieces.text, expected);
}

static struct split_regex *compile(const char *expression)
{
    struct split_regex *regex = NULL;
    struct imbrex_error err;
    if (split_regex_create("t", "Regex", expression, &regex, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    return regex;
}

/* Catches a behaviour that joins to the wrong side, joins too much, or loses a piece; for each,
 * what Hugging Face's own documentation of SplitDelimiterBehavior has for this text. */
static void test_split_behaviors(void **state)
{
    (void)state;
    static const struct {
        enum split_behavior behavior;
        bool is_inverted;
        const char *expected;
    } cases[] = {
        {SPLIT_REMOVED, false, "!the|final|countdown"},
        {SPLIT_ISOLATED, false, "!the|-|final|-|-|countdown"},
        {SPLIT_MERGED_WITH_PREVIOUS, false, "!the-|final-|-|countdown"},
        {SPLIT_MERGED_WITH_NEXT, false, "!the|-final|-|-countdown"},
        {SPLIT_CONTIGUOUS, false, "!the|-|final|--|countdown"},
        {SPLIT_REMOVED, true, "-|-|-"},
        {SPLIT_ISOLATED, true, "!the|-|final|-|-|countdown"},
        {SPLIT_MERGED_WITH_PREVIOUS, true, "!the|-final|-|-countdown"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pre_step step = {
            .matcher = SPLIT_STRING,
            .behavior = cases[i].behavior,
            .is_inverted = cases[i].is_inverted,
            .text = "-",
            .text_bytes = 1,
        };
        expect_pieces(&step, 1, "the-final--countdown", cases[i].expected);
        step.matcher = SPLIT_REGEX;
        step.regex = compile("-");
        expect_pieces(&step, 1, "the-final--countdown", cases[i].expected);
        split_regex_destroy(step.regex);
    }
}

/* Catches steps that see the text instead of the pieces, and marks or spaces put where they are
 * not wanted. */
static void test_steps_in_a_row(void **state)
{
    (void)state;
    const struct pre_step metaspace[] = {
        {.kind = PRE_STEP_MARK_SPACES, .text = SPACE_MARK, .text_bytes = SPACE_MARK_BYTES},
        {.kind = PRE_STEP_PREFIX_MARK, .text = SPACE_MARK, .text_bytes = SPACE_MARK_BYTES},
        {.matcher = SPLIT_STRING,
         .behavior = SPLIT_MERGED_WITH_NEXT,
         .text = SPACE_MARK,
         .text_bytes = SPACE_MARK_BYTES},
    };
    expect_pieces(metaspace, 3, "a  b",
                  "!\xe2\x96\x81"
                  "a|\xe2\x96\x81|\xe2\x96\x81"
                  "b");
    expect_pieces(metaspace, 3, " a",
                  "!\xe2\x96\x81"
                  "a");
    expect_pieces(metaspace, 2, "a b",
                  "!\xe2\x96\x81"
                  "a\xe2\x96\x81"
                  "b");

    struct pre_step first[] = {
        {.matcher = SPLIT_NUMBERS},
        {.kind = PRE_STEP_PREFIX_MARK, .only_at_start = true, .text = "_", .text_bytes = 1},
    };
    expect_pieces(first, 2, "a1b", "!_a|1|b");
    expect_pieces(first, 2, "12", "!_1|2");
    first[0].behavior = SPLIT_CONTIGUOUS;
    expect_pieces(first, 2, "a12b", "!_a|12|b");

    const struct pre_step smollm[] = {
        {.matcher = SPLIT_NUMBERS},
        {.kind = PRE_STEP_PREFIX_SPACE, .text = " ", .text_bytes = 1},
        {.matcher = SPLIT_WORDS, .pattern = WORD_PATTERN_GPT2},
    };
    expect_pieces(smollm, 3, "a b1", "! a| b| 1");
    expect_pieces(NULL, 0, "as it is", "!as it is");
}

/* Catches a match of nothing that loops, or cuts where none is: right behind a match it counts for
 * nothing, elsewhere it cuts. */
static void test_empty_matches(void **state)
{
    (void)state;
    struct pre_step step = {.matcher = SPLIT_REGEX, .regex = compile("x*")};
    expect_pieces(&step, 1, "axxb\xc3\xa9", "!a|xx|b|\xc3\xa9");
    step.behavior = SPLIT_REMOVED;
    expect_pieces(&step, 1, "axxb", "!a|b");
    split_regex_destroy(step.regex);
    step.regex = compile("(?<=e)|(?=a)");
    step.behavior = SPLIT_ISOLATED;
    expect_pieces(&step, 1, "beat", "!be|at");
    split_regex_destroy(step.regex);
}

/* Catches an expression that means something else to PCRE2 than to Oniguruma. What is expected is
 * what Hugging Face's tokenizers do. */
static void test_regex_translation(void **state)
{
    (void)state;
    static const struct {
        const char *expression, *text, *expected;
    } cases[] = {
        {"\\p{N}{1,3}+", "12345678", "!12345678"}, /* not possessive: repeated */
        {"(?:ab|a){1,2}+b", "aababb", "!aababb"},
        {"a{2,3}+b", "aaaaab ab", "!aaaaab| ab"},
        {"\\s",
         "a\xe1\xa0\x8e"
         "b\xc2\x85",
         "!a\xe1\xa0\x8e"
         "b|\xc2\x85"}, /* U+180E is none */
        {"[^\\S ]", "a \t", "!a |\t"},
        {"\\v",
         "a\x0b"
         "b\x0c",
         "!a|\x0b|b\x0c"},
        {"^a", "a\na", "!a|\n|a"},
        {".", "a\nb", "!a|\n|b"},
        {"\\u0041", "aA", "!a|A"},
        {"\\x{4e2d}", "a\xe4\xb8\xad", "!a|\xe4\xb8\xad"},
        {"(?i:k)", "a\xe2\x84\xaaK", "!a|\xe2\x84\xaa|K"}, /* the Kelvin sign */
        {"(?i)a|b", "xAB", "!x|A|B"},
        {"\\p{Han}", "a\xe4\xb8\xad\xe3\x80\x82", "!a|\xe4\xb8\xad|\xe3\x80\x82"},
        {"\\p{L}",
         "1\xf0\x90\xb5\x8a"
         "2",
         "!1|\xf0\x90\xb5\x8a|2"}, /* of Unicode 16 */
        {"\\P{L}",
         "\xf0\x90\xb5\x8a"
         "2",
         "!\xf0\x90\xb5\x8a|2"},
        {"\\p{^L}", "a1", "!a|1"},
        {"\\d", "a\xd9\xa3\xc2\xbd", "!a|\xd9\xa3|\xc2\xbd"},
        {"a++b|a{2}", "aab aa", "!aab| |aa"},
        {"[a\\-\\]\\\\]", "b-]\\", "!b|-|]|\\"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pre_step step = {.matcher = SPLIT_REGEX, .regex = compile(cases[i].expression)};
        expect_pieces(&step, 1, cases[i].text, cases[i].expected);
        split_regex_destroy(step.regex);
    }
}

/* Catches a construct that is let through although the two engines read it differently. */
static void test_regex_refusals(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"", "1 to 4096 bytes, found 0"},
        {"\\w", "an escape that the two read differently"},
        {"\\bx", "an escape"},
        {"\\h", "an escape"},
        {"\\1", "an escape"},
        {"\\x80", "no code point"},
        {"\\x{110000}", "no code point"},
        {"\\ud800", "no code point"},
        {"\\pL", "without braces"},
        {"\\p{Greek}", "neither a general category nor Han"},
        {"\\p{C}", "neither a general category"},
        {"[[:alpha:]]", "a set within a set"},
        {"[a&&b]", "a set within a set"},
        {"[]a]", "a set within a set"},
        {"[a", "a set without an end"},
        {"[\\P{L}]", "a negated property in a set"},
        {"[\\s-a]", "a range from or to a set"},
        {"[a-\\s]", "a range from or to a set"},
        {"(?m:.)", "a group of this kind"},
        {"(?<n>a)", "a group of this kind"},
        {"a(?i)b", "a group of this kind"},
        {"(*UTF)a", "\"(*\""},
        {"a)", "without a group"},
        {"(a", "a group without an end"},
        {"a}", "a closing bracket"},
        {"a{,3}", "no interval"},
        {"a{1,1001}", "no interval"},
        {"a{600}b|a{401}", "too many repeats"},
        {"a{2}?", "behind an interval"},
        {"*a", "nothing to repeat"},
        {"a**", "nothing to repeat"},
        {"(?i:ss)", "fold to a single character"},
        {"(?i:s(?:t))", "fold to a single character"},
        {"(?i:\xc3\xa9)", "beyond ASCII"},
        {"(?i:[\xc3\xa9])", "beyond ASCII"},
        {"(?i:\\p{Lu})", "upper or lower case"},
        {"(?<=a*)b", "lookbehind"},
        {"[b-a]", "range out of order"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct split_regex *regex = NULL;
        struct imbrex_error err;
        char fragments[256];
        snprintf(fragments, sizeof(fragments), "t: Regex: |%s", cases[i][1]);
        expect_error(split_regex_create("t", "Regex", cases[i][0], &regex, &err),
                     IMBREX_STATUS_UNSUPPORTED, &err, fragments);
        assert_null(regex);
    }
    char deep[256];
    memset(deep, '(', 100);
    memset(deep + 100, ')', 100);
    deep[200] = '\0';
    struct split_regex *regex = NULL;
    struct imbrex_error err;
    expect_error(split_regex_create("t", "Regex", deep, &regex, &err), IMBREX_STATUS_UNSUPPORTED,
                 &err, "too many groups");
}

/* Adds up the bytes of the pieces. */
static enum imbrex_status count_piece(void *context, const char *text, size_t num_bytes,
                                      bool is_at_start)
{
    (void)text;
    (void)is_at_start;
    *(size_t *)context += num_bytes;
    return IMBREX_STATUS_OK;
}

/* Cuts num_units of `unit` in a row; the bytes of all pieces are in *num_bytes. */
static enum imbrex_status cut_repeated(const struct pre_step *steps, size_t num_steps,
                                       const char *unit, size_t num_units, size_t *num_bytes,
                                       struct imbrex_error *err)
{
    size_t unit_bytes = strlen(unit);
    struct pre_scratch scratch = {0};
    char *text = malloc(num_units * unit_bytes);
    assert_non_null(text);
    for (size_t i = 0; i < num_units; i++) {
        memcpy(text + i * unit_bytes, unit, unit_bytes);
    }
    *num_bytes = 0;
    enum imbrex_status status = pre_tokenize(steps, num_steps, text, num_units * unit_bytes, true,
                                             &scratch, count_piece, num_bytes, err);
    pre_scratch_release(&scratch);
    free(text);
    return status;
}

/* Catches an expression that takes exponential time in one match, or quadratic time because each of
 * many matches looks far ahead, which no limit of a match sees: through a set, a group, a repeat
 * that fails, from places where nothing matches. All must end with an error that says which
 * expression it was. */
static void test_regex_limits(void **state)
{
    (void)state;
    static const struct {
        const char *expression, *unit;
        size_t num_units;
    } cases[] = {
        /* The "b" that must come keeps PCRE2 from trying at all, unless there is one. */
        {"(?:a|a|a)*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaacb", 1},
        {"a(?=[^b]*)", "a", 20000},
        {"a(?=[^b]*c)", "a", 20000},
        {"a(?=\\p{L}{900,}c)", "a", 20000},
        {"(?=(?:x?[^b])*)a", "a", 20000},
        {"(?:a|a)+?b|(?=(?:aa)*c)a", "a", 20000},
        {"(?<=a)(?=a+\\z)", "a", 20000},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pre_step step = {.matcher = SPLIT_REGEX, .regex = compile(cases[i].expression)};
        struct imbrex_error err;
        char fragments[256];
        size_t num_bytes;
        snprintf(fragments, sizeof(fragments), "text: |\"%.10s|steps, found |%zu bytes",
                 cases[i].expression, cases[i].num_units * strlen(cases[i].unit));
        expect_error(cut_repeated(&step, 1, cases[i].unit, cases[i].num_units, &num_bytes, &err),
                     IMBREX_STATUS_CAPACITY, &err, fragments);
        split_regex_destroy(step.regex);
    }
}

/* Catches a budget that begins anew with each piece of a text: what one piece may take, a hundred
 * thousand may not. */
static void test_regex_limits_hold_for_the_text(void **state)
{
    (void)state;
    struct pre_step steps[] = {
        {.matcher = SPLIT_STRING, .behavior = SPLIT_REMOVED, .text = "-", .text_bytes = 1},
        {.matcher = SPLIT_REGEX, .regex = compile("(?:a|a)*b")},
    };
    struct imbrex_error err;
    size_t num_bytes;
    assert_int_equal(cut_repeated(steps, 2, "aaaaaaaaaaaaaaacb-", 1, &num_bytes, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(num_bytes, 17);
    expect_error(cut_repeated(steps, 2, "aaaaaaaaaaaaaaacb-", 100, &num_bytes, &err),
                 IMBREX_STATUS_CAPACITY, &err, "text: |\"(?:a|a)*b\"|steps, found 17 bytes");
    split_regex_destroy(steps[1].regex);
}

/* Catches limits that real expressions hit on long texts: those of Mistral's Tekken, of GPT-4 and
 * of DeepSeek-V3, on what makes them look back and ahead most. */
static void test_regex_limits_spare_real_expressions(void **state)
{
    (void)state;
    static const char *const expressions[] = {
        "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
        "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
        "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}+"
        "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    };
    static const char *const units[] = {"a",  "A",  " ",      "\n",        "7",   "!",       "'",
                                        " a", "aA", "    \n", "a\xcc\x81", "'Sx", "\t \r\n "};
    for (size_t i = 0; i < sizeof(expressions) / sizeof(expressions[0]); i++) {
        struct pre_step step = {.matcher = SPLIT_REGEX, .regex = compile(expressions[i])};
        for (size_t j = 0; j < sizeof(units) / sizeof(units[0]); j++) {
            size_t num_bytes;
            struct imbrex_error err;
            if (cut_repeated(&step, 1, units[j], 50000, &num_bytes, &err) != IMBREX_STATUS_OK) {
                fail_msg("%s", err.message);
            }
            assert_int_equal(num_bytes, 50000 * strlen(units[j]));
        }
        split_regex_destroy(step.regex);
    }
}

int run_tokenizer_words_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_behaviors),
        cmocka_unit_test(test_steps_in_a_row),
        cmocka_unit_test(test_empty_matches),
        cmocka_unit_test(test_regex_translation),
        cmocka_unit_test(test_regex_refusals),
        cmocka_unit_test(test_regex_limits),
        cmocka_unit_test(test_regex_limits_hold_for_the_text),
        cmocka_unit_test(test_regex_limits_spare_real_expressions),
    };
    return cmocka_run_group_tests_name("tokenizer_words", tests, NULL, NULL);
}
