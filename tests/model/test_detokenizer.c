/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

/* The text of the ids, as a whole; checks on the way that the stream gives the same, in pieces that
 * are whole characters. The list ends with -1. The caller frees the text. */
static char *decode_both_ways(const struct imbrex_tokenizer *tokenizer, const int32_t *ids,
                              size_t num_ids, bool skip_special)
{
    size_t text_bytes;
    char *text = fixture_detokenize(tokenizer, ids, num_ids, skip_special, &text_bytes);
    assert_int_equal(utf8_valid_prefix(text, text_bytes), text_bytes);

    struct detokenizer detokenizer;
    detokenizer_init(&detokenizer, tokenizer, skip_special);
    size_t at = 0;
    for (size_t i = 0; i <= num_ids; i++) {
        /* Exactly as long as promised, so that a sanitizer sees a write behind it. */
        char *piece = malloc(detokenizer_max_bytes(tokenizer));
        assert_non_null(piece);
        size_t piece_bytes = i < num_ids ? detokenizer_push(&detokenizer, ids[i], piece)
                                         : detokenizer_flush(&detokenizer, piece);
        assert_true(piece_bytes <= text_bytes - at);
        assert_memory_equal(piece, text + at, piece_bytes);
        assert_int_equal(utf8_valid_prefix(piece, piece_bytes), piece_bytes);
        at += piece_bytes;
        free(piece);
    }
    assert_int_equal(at, text_bytes);
    return text;
}

static void expect_text(const struct imbrex_tokenizer *tokenizer, bool skip_special,
                        const int32_t *ids, const char *expected)
{
    size_t num_ids = 0;
    while (ids[num_ids] != -1) {
        num_ids++;
    }
    char *text = decode_both_ways(tokenizer, ids, num_ids, skip_special);
    assert_string_equal(text, expected);
    imbrex_free(text);
}

#define IDS(...) ((const int32_t[]){__VA_ARGS__, -1})

/* Catches half a character that leaves the stream, too many or too few U+FFFD, and characters that
 * are not put together over several tokens. Byte tokens: the id is the byte. */
static void test_detokenizer_bytes(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    expect_text(tokenizer, false, IDS(259, 32, 0xe6, 0x97, 0xa5), "hello \xe6\x97\xa5");
    expect_text(tokenizer, false, IDS(0xf0, 0x9f, 0x98, 0x80, 33), "\xf0\x9f\x98\x80!");
    expect_text(tokenizer, false, IDS(0xf0, 0x9f, 0x98), "\xef\xbf\xbd");
    expect_text(tokenizer, false, IDS(0xf0, 0x9f, 'x'), "\xef\xbf\xbdx");
    expect_text(tokenizer, false, IDS(0xf0, 0x9f, 0xf0, 0x9f, 0x98, 0x80),
                "\xef\xbf\xbd\xf0\x9f\x98\x80");
    expect_text(tokenizer, false, IDS(0xff, 0x80, 'x'), "\xef\xbf\xbd\xef\xbf\xbdx");
    expect_text(tokenizer, false, IDS(0xe2, 0x82, 258), "\xef\xbf\xbdhell");
    /* The first space of a text is its own here. */
    expect_text(tokenizer, false, IDS(260, 'i'), " hi");
    imbrex_tokenizer_close(tokenizer);
}

/* Catches special tokens that are shown or hidden against the caller's wish, a character that a
 * hidden one does not keep apart, and one that a visible one does. */
static void test_detokenizer_special_tokens(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    const int32_t *ids = IDS('a', FIXTURE_BYTES_END, FIXTURE_BYTES_TOOL, 'b');
    expect_text(tokenizer, true, ids, "a<tool>b");
    expect_text(tokenizer, false, ids, "a<|end|><tool>b");
    ids = IDS(0xc3, FIXTURE_BYTES_END, 0xa9);
    expect_text(tokenizer, true, ids, "\xc3\xa9");
    expect_text(tokenizer, false, ids, "\xef\xbf\xbd<|end|>\xef\xbf\xbd");
    imbrex_tokenizer_close(tokenizer);
}

/* Catches the space in front of a SentencePiece text: dropped once, only at the very start, also
 * when special tokens come first and are hidden, never behind something visible. The expected texts
 * are Hugging Face's. */
static void test_detokenizer_leading_space(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_chars());
    expect_text(tokenizer, true, IDS(263, 263), "a a");
    expect_text(tokenizer, true, IDS(1, 263), "a");
    expect_text(tokenizer, false, IDS(1, 263), "<s> a");
    expect_text(tokenizer, true, IDS(1, 259, 263), " a");
    expect_text(tokenizer, true, IDS(259), "");
    expect_text(tokenizer, true, IDS(259, 1, 259), " ");
    expect_text(tokenizer, true, IDS(3 + ' '), "");
    expect_text(tokenizer, true, IDS(3 + 0xe6, 259), "\xef\xbf\xbd ");
    expect_text(tokenizer, true, IDS(3 + 0xe6, 1, 3 + 0x97, 3 + 0xa5), "\xe6\x97\xa5");
    expect_text(tokenizer, true, IDS(261, 259), "b ");
    imbrex_tokenizer_close(tokenizer);
}

/* Catches any sequence of ids that streams to another text than it decodes to as a whole. */
static void test_detokenizer_streams_what_it_decodes(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizers[] = {
        tokenizer_fixture_open(tokenizer_fixture_bytes()),
        tokenizer_fixture_open(tokenizer_fixture_chars()),
        tokenizer_fixture_open_path("builtin:stories260K"),
        tokenizer_fixture_open_path("tests/golden/qwen2-tiny-4m"),
        tokenizer_fixture_open_path("tests/golden/tokenizers/mistral"),
        tokenizer_fixture_open_path("tests/golden/tokenizers/metaspace"),
    };
    uint64_t random_state = 11;
    for (size_t t = 0; t < sizeof(tokenizers) / sizeof(tokenizers[0]); t++) {
        uint32_t vocab_size = (uint32_t)imbrex_tokenizer_vocab_size(tokenizers[t]);
        for (int round = 0; round < 500; round++) {
            int32_t ids[64];
            size_t num_ids = fixture_random(&random_state) % 64;
            for (size_t i = 0; i < num_ids; i++) {
                /* Bytes of characters, mostly: their ids are below 260 where there are any. */
                bool is_any = fixture_random(&random_state) % 4 == 0;
                uint32_t low = is_any ? 0 : 128, high = is_any ? vocab_size : 260;
                ids[i] = (int32_t)(low + fixture_random(&random_state) % (high - low));
            }
            imbrex_free(decode_both_ways(tokenizers[t], ids, num_ids, round % 2 == 0));
        }
        imbrex_tokenizer_close(tokenizers[t]);
    }
}

/* Catches ids that index outside the tables, and results that are written on failure. */
static void test_detokenize_refuses_other_ids(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    static const int32_t outside[] = {-1, INT32_MIN, FIXTURE_BYTES_TOOL + 1, INT32_MAX};
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++) {
        int32_t ids[] = {'a', outside[i]};
        char *text = NULL;
        size_t text_bytes = 77;
        struct imbrex_error err;
        expect_error(imbrex_detokenize(tokenizer, ids, 2, true, &text, &text_bytes, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT, &err, "token id 1|[0, 263)");
        assert_null(text);
        assert_int_equal(text_bytes, 77);
    }
    imbrex_tokenizer_close(tokenizer);
}

/* Catches an added token whose letters are taken for bytes ("\u00e9" stands for byte 0xe9 in the
 * alphabet), and ids without a token that stop a text. */
static void test_detokenizer_added_tokens_and_gaps(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_bytes();
    int32_t id = tokenizer_fixture_add_added(root, "caf\xc3\xa9", false, false);
    json_t *added = json_object_get(root, "added_tokens");
    json_object_set_new(json_array_get(added, 2), "id", json_integer(id + 10));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    assert_int_equal(imbrex_tokenizer_vocab_size(tokenizer), id + 11);
    expect_text(tokenizer, false, IDS(id + 10, id, 'x'), "caf\xc3\xa9x");
    imbrex_tokenizer_close(tokenizer);
}

/* Catches marks that the first token keeps (decoder Metaspace), that later ones lose, or a first
 * token that is not the first because a special one before it was passed over. */
static void test_detokenizer_metaspace(void **state)
{
    (void)state;
    for (int prepends = 0; prepends < 2; prepends++) {
        json_t *root = tokenizer_fixture_chars();
        json_object_set_new(root, "decoder",
                            json_pack("{s:s, s:s, s:s}", "type", "Metaspace", "replacement",
                                      SPACE_MARK, "prepend_scheme", prepends ? "always" : "never"));
        tokenizer_fixture_add_merge(root, SPACE_MARK, SPACE_MARK);
        struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
        expect_text(tokenizer, true, IDS(264, 264, 263), prepends ? "   a" : "     a");
        expect_text(tokenizer, true, IDS(1, 263, 263), prepends ? "a a" : " a a");
        expect_text(tokenizer, false, IDS(1, 263), "<s> a");
        expect_text(tokenizer, false, IDS(3 + 'x', 259), "<0x78> "); /* no ByteFallback */
        imbrex_tokenizer_close(tokenizer);
    }
}

/* Catches spaces that are stripped in the middle, or fewer or more than the decoder says. */
static void test_detokenizer_strips_more(void **state)
{
    (void)state;
    json_t *root = tokenizer_fixture_chars();
    json_t *steps = json_object_get(json_object_get(root, "decoder"), "decoders");
    json_object_set_new(json_array_get(steps, 3), "start", json_integer(3));
    struct imbrex_tokenizer *tokenizer = tokenizer_fixture_open(root);
    expect_text(tokenizer, true, IDS(259, 259, 259, 259, 263), "  a");
    expect_text(tokenizer, true, IDS(259, 260, 259, 259), "a  ");
    expect_text(tokenizer, true, IDS(3 + 0xff, 259), "\xef\xbf\xbd ");
    imbrex_tokenizer_close(tokenizer);
}

int run_detokenizer_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_detokenizer_bytes),
        cmocka_unit_test(test_detokenizer_special_tokens),
        cmocka_unit_test(test_detokenizer_leading_space),
        cmocka_unit_test(test_detokenizer_streams_what_it_decodes),
        cmocka_unit_test(test_detokenize_refuses_other_ids),
        cmocka_unit_test(test_detokenizer_added_tokens_and_gaps),
        cmocka_unit_test(test_detokenizer_metaspace),
        cmocka_unit_test(test_detokenizer_strips_more),
    };
    return cmocka_run_group_tests_name("detokenizer", tests, NULL, NULL);
}
