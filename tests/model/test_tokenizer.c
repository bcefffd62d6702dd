/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

#define IDS(...) ((const int32_t[]){__VA_ARGS__, -1})
#define PARSE IMBREX_TOKENIZE_PARSE_SPECIAL
#define ADD IMBREX_TOKENIZE_ADD_SPECIAL

static void expect(const struct imbrex_tokenizer *tokenizer, unsigned flags, const char *text,
                   const int32_t *ids)
{
    expect_ids(tokenizer, flags, text, strlen(text), ids);
}

/* Catches merges over the edge of a word, in the wrong order, or none at all. */
static void test_tokenize_merges_words(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    expect(tokenizer, 0, "hello", IDS(259));
    expect(tokenizer, 0, "hello hello", IDS(259, 32, 259)); /* "h e" comes before "G h" */
    expect(tokenizer, 0, " hi", IDS(260, 'i'));
    expect(tokenizer, 0, "h1e", IDS('h', '1', 'e'));
    expect(tokenizer, 0, "lll", IDS(257, 'l'));
    expect(tokenizer, 0, "\xc3\xa9", IDS(0xc3, 0xa9));
    expect(tokenizer, 0, "", IDS(-1));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches merges that are only understood in one of the two ways they are written. */
static void test_tokenize_merges_as_strings(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    json_array_set_new(merges, 0, json_string("h e"));
    json_array_set_new(merges, 4, json_string("\xc4\xa0 h"));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, 0, "hello hi", IDS(259, 260, 'i'));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches special tokens of a user's text that become ids unasked, tokens that are not special and
 * are missed, and a begin of one that swallows what follows. */
static void test_tokenize_special_tokens(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    expect(tokenizer, PARSE, "a<|end|>b", IDS('a', FIXTURE_BYTES_END, 'b'));
    expect(tokenizer, PARSE, "<|end|><|end|>", IDS(FIXTURE_BYTES_END, FIXTURE_BYTES_END));
    expect(tokenizer, 0, "<|end|>", IDS('<', '|', 'e', 'n', 'd', '|', '>'));
    expect(tokenizer, 0, "a<tool>", IDS('a', FIXTURE_BYTES_TOOL));
    expect(tokenizer, PARSE, "<|end<|end|>", IDS('<', '|', 'e', 'n', 'd', FIXTURE_BYTES_END));
    expect(tokenizer, PARSE, "<|end|", IDS('<', '|', 'e', 'n', 'd', '|'));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a shorter token that wins over a longer one, and one that is found inside the text of a
 * special token that is not parsed: all of that is text, as in Hugging Face's tokenizers. */
static void test_tokenize_longest_added_token(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    int32_t ab = tokenizer_fixture_add_added(root, "<ab", false, false);
    int32_t abcd = tokenizer_fixture_add_added(root, "<abcd", true, false);
    int32_t abx = tokenizer_fixture_add_added(root, "<abx", false, false);
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, PARSE, "<abcd", IDS(abcd));
    expect(tokenizer, 0, "<abcd", IDS('<', 'a', 'b', 'c', 'd'));
    expect(tokenizer, PARSE, "<abc", IDS(ab, 'c'));
    expect(tokenizer, PARSE, "<abx<ab", IDS(abx, ab));
    expect(tokenizer, PARSE, "<a", IDS('<', 'a'));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches an added token that is looked for on the wrong side of normalisation. */
static void test_tokenize_normalized_added_token(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    int32_t normalized = tokenizer_fixture_add_added(root, "e\xcc\x81z", false, true);
    int32_t raw = tokenizer_fixture_add_added(root, "e\xcc\x81r", false, false);
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, 0, "e\xcc\x81z", IDS(normalized));
    expect(tokenizer, 0, "\xc3\xa9z", IDS(normalized));
    expect(tokenizer, 0, "e\xcc\x81r", IDS(raw));
    expect(tokenizer, 0, "\xc3\xa9r", IDS(0xc3, 0xa9, 'r'));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches white space beside a token that is not taken along, or taken without being asked, and a
 * token found within a word although it must stand alone. */
static void test_tokenize_added_token_conditions(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    int32_t left = tokenizer_fixture_add_added(root, "<l>", false, false);
    int32_t right = tokenizer_fixture_add_added(root, "<r>", false, false);
    int32_t alone = tokenizer_fixture_add_added(root, "xy", false, false);
    json_t *added = json_object_get(root, "added_tokens");
    json_object_set_new(json_array_get(added, 2), "lstrip", json_true());
    json_object_set_new(json_array_get(added, 3), "rstrip", json_true());
    json_object_set_new(json_array_get(added, 4), "single_word", json_true());
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, 0, "a \xe3\x80\x80<l> b", IDS('a', left, ' ', 'b'));
    expect(tokenizer, 0, "a <r>\n\n b", IDS('a', ' ', right, 'b'));
    expect(tokenizer, 0, "<r>  <l>", IDS(right, left));
    expect(tokenizer, 0, "  <l>  <l>", IDS(left, left));
    expect(tokenizer, 0, "xy", IDS(alone));
    expect(tokenizer, 0, "-xy\xe2\x80\x94", IDS('-', alone, 0xe2, 0x80, 0x94));
    expect(tokenizer, 0, "_xy", IDS('_', 'x', 'y'));
    expect(tokenizer, 0, "xy1", IDS('x', 'y', '1'));
    expect(tokenizer, 0, "\xc3\xa9xy", IDS(0xc3, 0xa9, 'x', 'y'));
    expect(tokenizer, 0, "xyxy", IDS('x', 'y', 'x', 'y'));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a word that is a token and is merged nevertheless, and tokens found in longer words. */
static void test_tokenize_ignores_merges(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    json_object_set_new(json_object_get(root, "model"), "ignore_merges", json_true());
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), "world",
                        json_integer(300));
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"),
                        "\xc4\xa0\xc3\x83\xc2\xa9", json_integer(301));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, 0, "world", IDS(300));
    expect(tokenizer, 0, " \xc3\xa9", IDS(301));
    expect(tokenizer, 0, "worldh", IDS('w', 'o', 'r', 'l', 'd', 'h'));
    expect(tokenizer, 0, "hello", IDS(259));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches text that is not normalised, or not between special tokens. */
static void test_tokenize_applies_nfc(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    expect(tokenizer, PARSE, "e\xcc\x81<|end|>e\xcc\x81",
           IDS(0xc3, 0xa9, FIXTURE_BYTES_END, 0xc3, 0xa9));
    imbrex_tokenizer_close(tokenizer);
    json_t *root = tokenizer_fixture_bytes();
    json_object_set_new(root, "normalizer", json_null());
    tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, 0, "e\xcc\x81", IDS('e', 0xcc, 0x81));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a lost NUL, and bytes that are no UTF-8 read as something else than U+FFFD each. */
static void test_tokenize_any_bytes(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    expect_ids(tokenizer, 0, "a\0b", 3, IDS('a', 0, 'b'));
    expect(tokenizer, 0, "a\xff", IDS('a', 0xef, 0xbf, 0xbd));
    expect(tokenizer, 0,
           "\xe2\x82"
           "1",
           IDS(0xef, 0xbf, 0xbd, '1'));
    expect(tokenizer, 0, "1\xf0\x9f\x98", IDS('1', 0xef, 0xbf, 0xbd));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches the SentencePiece steps: the mark in front of each piece between special tokens, bytes
 * for characters without a token, the template around the whole. */
static void test_tokenize_characters(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_chars());
    expect(tokenizer, 0, "ab", IDS(259, 262)); /* "a b" comes before U+2581 "a" */
    expect(tokenizer, 0, "a", IDS(263));
    expect(tokenizer, 0, "a a", IDS(263, 263));
    expect(tokenizer, 0, " a", IDS(259, 263));
    expect(tokenizer, PARSE, "a<s>b", IDS(263, 1, 259, 261));
    expect(tokenizer, ADD, "a", IDS(1, 263));
    expect(tokenizer, ADD, "", IDS(1));
    expect(tokenizer, 0, "\xe6\x97\xa5", IDS(259, 3 + 0xe6, 3 + 0x97, 3 + 0xa5));
    expect(tokenizer, 0, "\xe2\x96\x81", IDS(259, 259));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches unknown characters that vanish, and runs of them that are fused or not against the file's
 * wish. */
static void test_tokenize_unknown_characters(void **state)
{
    (void)state;
    for (int fuse_unk = 0; fuse_unk < 2; fuse_unk++) {
        json_t *root = tokenizer_fixture_chars();
        json_object_set_new(json_object_get(root, "model"), "byte_fallback", json_false());
        json_object_set_new(json_object_get(root, "model"), "fuse_unk", json_boolean(fuse_unk));
        struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
        expect(tokenizer, 0, "xyb", fuse_unk ? IDS(259, 0, 261) : IDS(259, 0, 0, 261));
        expect(tokenizer, 0, "x x", IDS(259, 0, 259, 0));
        imbrex_tokenizer_close(tokenizer);
    }
}

/* Catches a text cut at U+2581 although a merge reaches over it. */
static void test_tokenize_merges_over_spaces(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_chars();
    tokenizer_fixture_add_merge(root, "b", SPACE_MARK);
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, 0, "b b", IDS(259, 264, 261));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a template that is applied unasked, without its end, or twice. */
static void test_tokenize_template(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_chars();
    json_t *processor = json_object_get(root, "post_processor");
    json_array_append_new(json_object_get(processor, "single"),
                          json_pack("{s:{s:s}}", "SpecialToken", "id", "</s>"));
    json_object_set_new(json_object_get(processor, "special_tokens"), "</s>",
                        json_pack("{s:[i,i]}", "ids", 2, 0));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect(tokenizer, 0, "a", IDS(263));
    expect(tokenizer, ADD, "a", IDS(1, 263, 2, 0));
    expect(tokenizer, ADD, "", IDS(1, 2, 0));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches arguments that are not checked. */
static void test_tokenize_arguments(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    int32_t *ids = NULL;
    size_t num_ids = 77;
    struct imbrex_error err;
    expect_error(imbrex_tokenize(tokenizer, "a", 1, 4, &ids, &num_ids, &err),
                 IMBREX_STATUS_INVALID_ARGUMENT, &err, "flags|0x3|0x4");
    expect_error(imbrex_tokenize(tokenizer, NULL, 1, 0, &ids, &num_ids, &err),
                 IMBREX_STATUS_INVALID_ARGUMENT, &err, "text|NULL");
    /* What imbrex_model_tokenizer gives for a model that has none. */
    expect_error(imbrex_tokenize(NULL, "a", 1, 0, &ids, &num_ids, &err),
                 IMBREX_STATUS_INVALID_ARGUMENT, &err, "tokenizer: expected one|NULL");
    char *text = NULL;
    expect_error(imbrex_detokenize(NULL, (int32_t[]){0}, 1, false, &text, &num_ids, &err),
                 IMBREX_STATUS_INVALID_ARGUMENT, &err, "tokenizer: expected one|NULL");
    assert_null(text);
    assert_null(ids);
    assert_int_equal(num_ids, 77);
    expect_ids(tokenizer, 0, NULL, 0, IDS(-1));
    imbrex_tokenizer_close(tokenizer);
}

/* Encodes a text of a million bytes and more, and checks that the ids say it again, if so asked. */
static void check_huge(const struct imbrex_tokenizer *tokenizer, const char *text, size_t num_bytes,
                       bool is_faithful)
{
    size_t num_ids, found_bytes;
    int32_t *ids = fixture_tokenize(tokenizer, 0, text, num_bytes, &num_ids);
    char *found = fixture_detokenize(tokenizer, ids, num_ids, false, &found_bytes);
    if (is_faithful) {
        assert_int_equal(found_bytes, num_bytes);
        assert_memory_equal(found, text, num_bytes);
    }
    imbrex_free(ids);
    imbrex_free(found);
}

/* Catches quadratic time, which would hang here: one word of a million letters, of mixed letters,
 * of spaces, of line breaks, of marks, of openings of special tokens; with every kind of
 * tokenizer. */
static void test_tokenize_huge_words(void **state)
{
    (void)state;
    const size_t num_bytes = TEST_SANITIZED ? 1 << 16 : 1 << 20;
    struct imbrex_tokenizer *tokenizers[] = {
        tokenizer_fixture_open_path("tests/golden/qwen2-tiny-4m"),
        tokenizer_fixture_open_path("builtin:stories260K"),
        tokenizer_fixture_open_path("tests/golden/tokenizers/gpt2"),
        tokenizer_fixture_open_path("tests/golden/tokenizers/llama3"),
        tokenizer_fixture_open_path("tests/golden/tokenizers/tekken"),
        tokenizer_fixture_open_path("tests/golden/tokenizers/metaspace"),
        tokenizer_fixture_open_path("tests/golden/tokenizers/smollm"),
    };
    /* The last two normalise, or put a space in front. */
    const size_t num_faithful = 5;
    static const char *const units[] = {
        "a", " ", "\n", "the quick", "\xcc\xa3", "<|im_start|", " \n", "\xe6\x97\xa5", "'", "1"};
    char *text = malloc(num_bytes);
    assert_non_null(text);
    for (size_t t = 0; t < sizeof(tokenizers) / sizeof(tokenizers[0]); t++) {
        for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
            size_t unit_bytes = strlen(units[i]);
            size_t num_units = num_bytes / unit_bytes;
            for (size_t j = 0; j < num_units; j++) {
                memcpy(text + j * unit_bytes, units[i], unit_bytes);
            }
            check_huge(tokenizers[t], text, num_units * unit_bytes, t < num_faithful);
        }
        uint64_t random_state = 3;
        for (size_t i = 0; i < num_bytes; i++) {
            text[i] = "etaoinshrdlu"[fixture_random(&random_state) % 12];
        }
        check_huge(tokenizers[t], text, num_bytes, t < num_faithful);
        imbrex_tokenizer_close(tokenizers[t]);
    }
    free(text);
}

/* Catches answers about ids that are out of range, unassigned, special or not. */
static void test_tokenizer_queries(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    json_t *added = json_object_get(root, "added_tokens");
    json_object_set_new(json_array_get(added, 1), "id", json_integer(300));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    size_t num_bytes = 77;
    assert_int_equal(imbrex_tokenizer_vocab_size(tokenizer), 301);
    assert_true(imbrex_token_is_special(tokenizer, FIXTURE_BYTES_END));
    assert_false(imbrex_token_is_special(tokenizer, 300));
    assert_false(imbrex_token_is_special(tokenizer, -1));
    assert_false(imbrex_token_is_special(tokenizer, 301));
    assert_null(imbrex_token_bytes(tokenizer, -1, &num_bytes));
    assert_null(imbrex_token_bytes(tokenizer, 301, &num_bytes));
    assert_null(imbrex_token_bytes(tokenizer, 299, &num_bytes));
    assert_int_equal(num_bytes, 77);
    assert_memory_equal(imbrex_token_bytes(tokenizer, 260, &num_bytes), " h", 2);
    assert_int_equal(num_bytes, 2);
    assert_memory_equal(imbrex_token_bytes(tokenizer, 0xff, &num_bytes), "\xff", 1);
    assert_int_equal(num_bytes, 1);
    assert_memory_equal(imbrex_token_bytes(tokenizer, 300, &num_bytes), "<tool>", 6);
    assert_int_equal(tokenizer_max_token_bytes(tokenizer), 7);
    imbrex_tokenizer_close(tokenizer);
    imbrex_tokenizer_close(NULL);
}

/* Catches a path that is taken in one of its forms only, and an error that names no file. */
static void test_tokenizer_open_paths(void **state)
{
    (void)state;
    static const char *const paths[] = {"models/stories260K", "models/stories260K/tokenizer.json",
                                        "builtin:stories260K",
                                        "builtin:stories260K/tokenizer.json"};
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open_path(paths[i]);
        assert_int_equal(imbrex_tokenizer_vocab_size(tokenizer), 512);
        imbrex_tokenizer_close(tokenizer);
    }
    struct imbrex_tokenizer *tokenizer = NULL;
    struct imbrex_error err;
    expect_error(imbrex_tokenizer_open("tests/nowhere", &tokenizer, &err), IMBREX_STATUS_NOT_FOUND,
                 &err, "tests/nowhere");
    expect_error(imbrex_tokenizer_open("tests/model", &tokenizer, &err), IMBREX_STATUS_NOT_FOUND,
                 &err, "tests/model/tokenizer.json");
    expect_error(imbrex_tokenizer_open("models/stories260K/model.safetensors", &tokenizer, &err),
                 IMBREX_STATUS_FORMAT, &err, "model.safetensors");
    expect_error(imbrex_tokenizer_open(NULL, &tokenizer, &err), IMBREX_STATUS_INVALID_ARGUMENT,
                 &err, "path");
    assert_null(tokenizer);
}

static void *tokenize_often(void *tokenizer)
{
    for (int i = 0; i < 50; i++) {
        expect(tokenizer, PARSE, "hello e\xcc\x81<|end|> hello",
               IDS(259, 32, 0xc3, 0xa9, FIXTURE_BYTES_END, 32, 259));
    }
    return NULL;
}

static void run_in_threads(void *(*run)(void *), struct imbrex_tokenizer *tokenizer)
{
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, run, tokenizer), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    imbrex_tokenizer_close(tokenizer);
}

static void *match_often(void *tokenizer)
{
    for (int i = 0; i < 50; i++) {
        expect(tokenizer, 0, "hellohelloX h", IDS('h', 300, 'o', 'h', 300, 'o', 'X', 260));
    }
    return NULL;
}

/* Catches hidden state in a tokenizer that threads share (under ThreadSanitizer), also in the
 * expression that it matches with. */
static void test_tokenizer_is_shared(void **state)
{
    (void)state;
    run_in_threads(tokenize_often, tokenizer_fixture_open(tokenizer_fixture_bytes()));
    json_t *root = tokenizer_fixture_bytes();
    json_t *steps = json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers");
    json_object_set_new(json_object_get(json_array_get(steps, 0), "pattern"), "Regex",
                        json_string("e?ll"));
    json_array_append_new(json_object_get(json_object_get(root, "model"), "merges"),
                          json_pack("[ss]", "e", "ll"));
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), "ell",
                        json_integer(300));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    run_in_threads(match_often, tokenizer);
}

int run_tokenizer_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokenize_merges_words),
        cmocka_unit_test(test_tokenize_merges_as_strings),
        cmocka_unit_test(test_tokenize_special_tokens),
        cmocka_unit_test(test_tokenize_longest_added_token),
        cmocka_unit_test(test_tokenize_normalized_added_token),
        cmocka_unit_test(test_tokenize_added_token_conditions),
        cmocka_unit_test(test_tokenize_ignores_merges),
        cmocka_unit_test(test_tokenize_applies_nfc),
        cmocka_unit_test(test_tokenize_any_bytes),
        cmocka_unit_test(test_tokenize_characters),
        cmocka_unit_test(test_tokenize_unknown_characters),
        cmocka_unit_test(test_tokenize_merges_over_spaces),
        cmocka_unit_test(test_tokenize_template),
        cmocka_unit_test(test_tokenize_arguments),
        cmocka_unit_test(test_tokenize_huge_words),
        cmocka_unit_test(test_tokenizer_queries),
        cmocka_unit_test(test_tokenizer_open_paths),
        cmocka_unit_test(test_tokenizer_is_shared),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
