/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

#define IDS(...) ((const int32_t[]){__VA_ARGS__, -1})
#define END FIXTURE_BYTES_END
#define TOOL FIXTURE_BYTES_TOOL

/* In `marked` a user's parts stand between { and }. Encodes the text without these marks; fails
 * unless the ids are the expected ones, up to -1. */
static void expect(const struct imbrex_tokenizer *tokenizer, const char *marked,
                   const int32_t *expected)
{
    char text[4096];
    struct text_span inputs[64];
    size_t text_bytes = 0, num_inputs = 0;
    for (const char *at = marked; *at != '\0'; at++) {
        if (*at == '{') {
            inputs[num_inputs].begin = text_bytes;
        } else if (*at == '}') {
            inputs[num_inputs++].end = text_bytes;
        } else {
            text[text_bytes++] = *at;
        }
    }
    struct imbrex_error err;
    int32_t *ids;
    size_t num_ids;
    if (tokenizer_encode_guarded(tokenizer, text, text_bytes, inputs, num_inputs, &ids, &num_ids,
                                 &err) != IMBREX_STATUS_OK) {
        fail_msg("\"%s\": %s", marked, err.message);
    }
    size_t i = 0;
    for (; expected[i] != -1; i++) {
        if (i >= num_ids || ids[i] != expected[i]) {
            fail_msg("\"%s\": id %zu: expected %d, found %d", marked, i, expected[i],
                     i < num_ids ? ids[i] : -1);
        }
    }
    assert_int_equal(num_ids, i);
    imbrex_free(ids);
}

/* Catches a user's special token that counts, a template's that does not, and one that is half a
 * user's: at its begin, at its end, or with a user's byte in its middle. */
static void test_guarded_special_tokens(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    const int32_t *plain = IDS('<', '|', 'e', 'n', 'd', '|', '>');
    expect(tokenizer, "<|end|>", IDS(END));
    expect(tokenizer, "{<|end|>}", plain);
    expect(tokenizer, "<|end|>{<|end|>}<|end|>", IDS(END, '<', '|', 'e', 'n', 'd', '|', '>', END));
    expect(tokenizer, "{<}|end|>", plain);
    expect(tokenizer, "<|end|{>}", plain);
    expect(tokenizer, "<|e{n}d|>", plain);
    expect(tokenizer, "{<|end|}>", plain);
    expect(tokenizer, "{a}<|end|>{b}", IDS('a', END, 'b'));
    expect(tokenizer, "<{a}|end|><|end|>", IDS('<', 'a', '|', 'e', 'n', 'd', '|', '>', END));
    expect(tokenizer, "{<|end|>}{<|end|>}",
           IDS('<', '|', 'e', 'n', 'd', '|', '>', '<', '|', 'e', 'n', 'd', '|', '>'));
    expect(tokenizer, "", IDS(-1));
    expect(tokenizer, "{}<|end|>{}", IDS(END));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches text that is split or merged differently where a user's part begins, and tokens that are
 * not special but are missed in it. */
static void test_guarded_is_one_text(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    expect(tokenizer, "he{llo}", IDS(259));
    expect(tokenizer, "{hel}lo", IDS(259));
    expect(tokenizer, "a {h}i", IDS('a', 260, 'i'));
    expect(tokenizer, "{<tool>}<to{ol>}", IDS(TOOL, TOOL));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a longer special token that a user finishes and that hides a shorter one of the template,
 * or a token that is not special. */
static void test_guarded_longest_token(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    int32_t ab = tokenizer_fixture_add_added(root, "<ab", true, false);
    int32_t abcd = tokenizer_fixture_add_added(root, "<abcd", true, false);
    int32_t abce = tokenizer_fixture_add_added(root, "<abce", false, false);
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, "<abcd", IDS(abcd));
    expect(tokenizer, "<ab{cd}", IDS(ab, 'c', 'd'));
    expect(tokenizer, "<ab{ce}", IDS(abce));
    expect(tokenizer, "<a{bcd}", IDS('<', 'a', 'b', 'c', 'd'));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches positions that normalisation moved: special tokens that are found after it, beside text
 * that it shortens, lengthens or reorders. */
static void test_guarded_normalized_tokens(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    int32_t word = tokenizer_fixture_add_added(root, "<w>", true, true);
    json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", "NFC"));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    assert_int_equal(tokenizer->num_normalizer_steps, 1);
    assert_int_equal(tokenizer->normalized_added.num_tokens, 1);
    expect(tokenizer, "<w>{<w>}", IDS(word, '<', 'w', '>'));
    /* e and an acute accent become one character of two bytes, twice before the token. */
    expect(tokenizer,
           "{e\xcc\x81"
           "e\xcc\x81<w>}<w>{e\xcc\x81}<w>",
           IDS(0xc3, 0xa9, 0xc3, 0xa9, '<', 'w', '>', word, 0xc3, 0xa9, word));
    /* The user's accent composes with the template's text, and its own token stays text. */
    expect(tokenizer, "<w>e{\xcc\x81<w>}<w>", IDS(word, 0xc3, 0xa9, '<', 'w', '>', word));
    /* U+0958 becomes two characters. */
    expect(tokenizer, "<w>{\xe0\xa5\x98<w>}<w>{\xe0\xa5\x98}",
           IDS(word, 0xe0, 0xa4, 0x95, 0xe0, 0xa4, 0xbc, '<', 'w', '>', word, 0xe0, 0xa4, 0x95,
               0xe0, 0xa4, 0xbc));
    /* U+0338 takes the '>' of the template's token with it, as it does for Hugging Face. */
    expect(tokenizer, "<w>{\xcc\xb8}<w>", IDS('<', 'w', 0xe2, 0x89, 0xaf, word));
    expect(tokenizer, "<w{>}{\xc3\xa9}<w>", IDS('<', 'w', '>', 0xc3, 0xa9, word));
    imbrex_tokenizer_close(tokenizer);
}

/* Maps the parts between { and } of a text through the steps; fails unless they stand where they do
 * in `expected`, which is the text after normalisation, marked likewise. */
static void expect_mapped(const struct normalizer_step *steps, size_t num_steps, const char *marked,
                          const char *expected)
{
    char text[256], found[256];
    struct text_span inputs[16];
    size_t text_bytes = 0, num_inputs = 0, found_bytes = 0, normalized_bytes;
    struct byte_buffer buffers[2] = {{0}};
    const char *normalized;
    struct imbrex_error err;
    for (const char *at = marked; *at != '\0'; at++) {
        if (*at == '{') {
            inputs[num_inputs].begin = text_bytes;
        } else if (*at == '}') {
            inputs[num_inputs++].end = text_bytes;
        } else {
            text[text_bytes++] = *at;
        }
    }
    assert_int_equal(normalizer_run(steps, num_steps, text, text_bytes, buffers, &normalized,
                                    &normalized_bytes, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(
        normalizer_map_inputs(steps, num_steps, text, text_bytes, inputs, num_inputs, &err),
        IMBREX_STATUS_OK);
    for (size_t at = 0, i = 0; at <= normalized_bytes; at++) {
        while (i < num_inputs && inputs[i].end == at && inputs[i].begin < at) {
            found[found_bytes++] = '}';
            i++;
        }
        if (i < num_inputs && inputs[i].begin == at) {
            found[found_bytes++] = '{';
        }
        while (i < num_inputs && inputs[i].begin == at && inputs[i].end == at) {
            found[found_bytes++] = '}';
            i++;
        }
        if (at < normalized_bytes) {
            found[found_bytes++] = normalized[at];
        }
    }
    found[found_bytes] = '\0';
    assert_string_equal(found, expected);
    free(buffers[0].bytes);
    free(buffers[1].bytes);
}

/* Catches positions that a step of normalisation moved otherwise than the text: patterns before,
 * in, after and across a user's part, text put in front, white space taken off. */
static void test_guarded_map_inputs(void **state)
{
    (void)state;
    const struct normalizer_step spaces = {.kind = NORMALIZER_REPLACE,
                                           .pattern = " ",
                                           .pattern_bytes = 1,
                                           .content = "___",
                                           .content_bytes = 3};
    const struct normalizer_step shorter = {.kind = NORMALIZER_REPLACE,
                                            .pattern = "abc",
                                            .pattern_bytes = 3,
                                            .content = "z",
                                            .content_bytes = 1};
    const struct normalizer_step before = {
        .kind = NORMALIZER_PREPEND, .content = "##", .content_bytes = 2};
    const struct normalizer_step strip = {
        .kind = NORMALIZER_STRIP, .strips_left = true, .strips_right = true};
    const struct normalizer_step form = {.kind = NORMALIZER_FORM, .form = UNICODE_FORM_NFC};
    expect_mapped(&spaces, 1, " a{ b }c{d} {e}", "___a{___b___}c{d}___{e}");
    expect_mapped(&spaces, 1, "{a}b", "{a}b");
    expect_mapped(&spaces, 1, "{ } {x}", "{___}___{x}");
    expect_mapped(&shorter, 1, "abc{x}abc{abc}", "z{x}z{z}");
    expect_mapped(&shorter, 1, "xab{c}y{a}bc", "x{z}y{z}");
    expect_mapped(&shorter, 1, "a{b}cabc{x}", "{z}z{x}");
    expect_mapped(&before, 1, "a{b}", "##a{b}");
    expect_mapped(&strip, 1, "  a{b } ", "a{b}");
    expect_mapped(&strip, 1, "{  a}b{ }", "{a}b{}");
    expect_mapped(&form, 1, "e{\xcc\x81x}y{z}", "{\xc3\xa9x}y{z}");
    const struct normalizer_step all[] = {strip, before, shorter, spaces, form};
    expect_mapped(all, 5, " abc{ e\xcc\x81 }abc {x}", "##z{___\xc3\xa9___}z___{x}");
}

/* Catches positions that are off where the tokenizer marks spaces. */
static void test_guarded_chars(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_chars());
    expect(tokenizer, "<s>{a<s>}<s>", IDS(1, 263, 3 + '<', 3 + 's', 3 + '>', 1));
    expect(tokenizer, "{ a }<s>{a}</s>", IDS(259, 263, 259, 1, 263, 2));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches ordinary text that merges into a special token: it is refused rather than passed on. */
static void test_guarded_merged_special(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_chars();
    int32_t id = tokenizer_fixture_add_added(root, "ab", true, false);
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    struct imbrex_error err;
    const struct text_span inputs[] = {{0, 3}};
    int32_t *ids = NULL;
    size_t num_ids;
    expect(tokenizer, "ab", IDS(id));
    expect_error(tokenizer_encode_guarded(tokenizer, "bab", 3, inputs, 1, &ids, &num_ids, &err),
                 IMBREX_STATUS_UNSUPPORTED, &err, "merges|special token");
    assert_null(ids);
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a difference on random texts: with no parts marked the ids are those of PARSE_SPECIAL;
 * all of it marked, those without; and marks in any place change nothing but special tokens. */
static void test_guarded_random(void **state)
{
    (void)state;
    static const char *const pieces[] = {"<|end|>",  "<|en",     "d|>", "hello", " h",
                                         "<tool>",   "<w>",      "<",   "w>",    "e",
                                         "\xcc\x81", "\xc3\xa9", ">",   "\n"};
    json_t *root = tokenizer_fixture_bytes();
    int32_t word = tokenizer_fixture_add_added(root, "<w>", true, true);
    json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", "NFC"));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    uint64_t random_state = 7;
    for (int round = 0; round < 3000; round++) {
        char text[512];
        size_t text_bytes = 0, num_inputs = 0;
        struct text_span inputs[16];
        unsigned num_pieces = fixture_random(&random_state) % 16;
        for (unsigned i = 0; i < num_pieces; i++) {
            const char *piece = pieces[fixture_random(&random_state) % 14];
            size_t begin = text_bytes;
            memcpy(text + text_bytes, piece, strlen(piece));
            text_bytes += strlen(piece);
            if (fixture_random(&random_state) % 2 == 0) {
                inputs[num_inputs++] = (struct text_span){begin, text_bytes};
            }
        }
        struct imbrex_error err;
        struct text_span whole = {0, text_bytes};
        int32_t *ids, *expected;
        size_t num_ids, num_expected;
        assert_int_equal(
            tokenizer_encode_guarded(tokenizer, text, text_bytes, NULL, 0, &ids, &num_ids, &err),
            IMBREX_STATUS_OK);
        expected = fixture_tokenize(tokenizer, IMBREX_TOKENIZE_PARSE_SPECIAL, text, text_bytes,
                                    &num_expected);
        assert_int_equal(num_ids, num_expected);
        assert_memory_equal(ids, expected, num_ids * sizeof(*ids));
        imbrex_free(ids);
        imbrex_free(expected);

        assert_int_equal(
            tokenizer_encode_guarded(tokenizer, text, text_bytes, &whole, 1, &ids, &num_ids, &err),
            IMBREX_STATUS_OK);
        expected = fixture_tokenize(tokenizer, 0, text, text_bytes, &num_expected);
        assert_int_equal(num_ids, num_expected);
        assert_memory_equal(ids, expected, num_ids * sizeof(*ids));
        imbrex_free(ids);
        imbrex_free(expected);

        assert_int_equal(tokenizer_encode_guarded(tokenizer, text, text_bytes, inputs, num_inputs,
                                                  &ids, &num_ids, &err),
                         IMBREX_STATUS_OK);
        size_t num_special = 0, max_special = 0;
        for (size_t i = 0; i < num_ids; i++) {
            num_special += ids[i] == END || ids[i] == word;
        }
        /* As many as the parts that are nobody's spell, neighbours taken together. */
        for (size_t i = 0, at = 0; i <= num_inputs; i++) {
            size_t end = i < num_inputs ? inputs[i].begin : text_bytes;
            size_t num_part;
            int32_t *part = fixture_tokenize(tokenizer, IMBREX_TOKENIZE_PARSE_SPECIAL, text + at,
                                             end - at, &num_part);
            for (size_t j = 0; j < num_part; j++) {
                max_special += part[j] == END || part[j] == word;
            }
            imbrex_free(part);
            at = i < num_inputs ? inputs[i].end : at;
        }
        assert_true(num_special <= max_special);
        size_t decoded_bytes;
        char *decoded = fixture_detokenize(tokenizer, ids, num_ids, false, &decoded_bytes);
        int32_t *again = fixture_tokenize(tokenizer, 0, text, text_bytes, &num_expected);
        size_t plain_bytes;
        char *plain = fixture_detokenize(tokenizer, again, num_expected, false, &plain_bytes);
        assert_int_equal(decoded_bytes, plain_bytes);
        assert_memory_equal(decoded, plain, plain_bytes);
        imbrex_free(decoded);
        imbrex_free(plain);
        imbrex_free(again);
        imbrex_free(ids);
    }
    imbrex_tokenizer_close(tokenizer);
}

int run_tokenizer_guarded_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_guarded_special_tokens),
        cmocka_unit_test(test_guarded_is_one_text),
        cmocka_unit_test(test_guarded_longest_token),
        cmocka_unit_test(test_guarded_normalized_tokens),
        cmocka_unit_test(test_guarded_map_inputs),
        cmocka_unit_test(test_guarded_chars),
        cmocka_unit_test(test_guarded_merged_special),
        cmocka_unit_test(test_guarded_random),
    };
    return cmocka_run_group_tests_name("tokenizer_guarded", tests, NULL, NULL);
}
