/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

enum kind { BYTES, CHARS };

static json_t *fixture(enum kind kind)
{
    return kind == BYTES ? tokenizer_fixture_bytes() : tokenizer_fixture_chars();
}

/* The member of an object, or the element of an array whose index the name is. */
static json_t *member(json_t *value, const char *name)
{
    return json_is_array(value) ? json_array_get(value, strtoul(name, NULL, 10))
                                : json_object_get(value, name);
}

/* Sets the value at "model/vocab/a" to a JSON text, or deletes it (NULL). */
static void edit(json_t *root, const char *path, const char *text)
{
    char names[256];
    snprintf(names, sizeof(names), "%s", path);
    json_t *parent = root;
    char *name = names;
    for (char *slash; (slash = strchr(name, '/')) != NULL; name = slash + 1) {
        *slash = '\0';
        parent = member(parent, name);
        assert_non_null(parent);
    }
    if (text == NULL) {
        assert_int_equal(json_is_array(parent) ? json_array_remove(parent, strtoul(name, NULL, 10))
                                               : json_object_del(parent, name),
                         0);
        return;
    }
    json_error_t error;
    json_t *value = json_loads(text, JSON_DECODE_ANY, &error);
    assert_non_null(value);
    if (!json_is_array(parent)) {
        assert_int_equal(json_object_set_new(parent, name, value), 0);
    } else if (strcmp(name, "+") == 0) {
        assert_int_equal(json_array_append_new(parent, value), 0);
    } else {
        assert_int_equal(json_array_set_new(parent, strtoul(name, NULL, 10), value), 0);
    }
}

/* Parses, frees the document, and expects an error whose message has these parts. */
static void expect_refused(json_t *root, enum imbrex_status status, const char *fragments)
{
    char *text = json_dumps(root, JSON_COMPACT);
    struct imbrex_tokenizer *tokenizer = NULL;
    struct imbrex_error err = {0};
    assert_non_null(text);
    expect_error(tokenizer_parse("t/tokenizer.json", text, strlen(text), &tokenizer, &err), status,
                 &err, fragments);
    assert_null(tokenizer);
    free(text);
    json_decref(root);
}

#define NORMALIZER "normalizer/normalizers/"
#define PRE "pre_tokenizer/pretokenizers/"
#define DECODER "decoder/decoders/"
#define UNSUPPORTED IMBREX_STATUS_UNSUPPORTED
#define FORMAT IMBREX_STATUS_FORMAT

/* Catches a feature that is accepted although it changes ids or text, and a message that does not
 * name the field, what was expected and what was found. */
static void test_parse_refuses_by_name(void **state)
{
    (void)state;
    static const struct {
        enum kind kind;
        const char *path, *value;
        enum imbrex_status status;
        const char *fragments;
    } cases[] = {
        {BYTES, "version", "\"2.0\"", UNSUPPORTED, "t/tokenizer.json: version: |\"1.0\"|\"2.0\""},
        /* normalizer */
        {BYTES, "normalizer", "{\"type\": \"Lowercase\"}", UNSUPPORTED,
         "normalizer.type|\"NFC\"|found \"Lowercase\""},
        {BYTES, "normalizer", "{\"type\": \"Prepend\"}", UNSUPPORTED,
         "normalizer.prepend|a string|found nothing"},
        {BYTES, "normalizer", "[]", FORMAT, "normalizer: |an object or null|an array"},
        {BYTES, "normalizer", "{\"type\": \"Sequence\"}", FORMAT,
         "normalizer.normalizers|an array|found nothing"},
        {BYTES, "normalizer", "{\"type\": \"Strip\", \"strip_left\": 1}", FORMAT,
         "normalizer: strip_left|found 1"},
        {CHARS, NORMALIZER "0", "{\"type\": \"Precompiled\"}", UNSUPPORTED,
         "normalizer.normalizers[0].type|found \"Precompiled\""},
        {CHARS, NORMALIZER "1/pattern/String", "\"\"", UNSUPPORTED,
         "normalizer.normalizers[1].pattern.String|1 to 63 bytes|found \"\""},
        {CHARS, NORMALIZER "1/pattern", "{\"Regex\": \" \"}", UNSUPPORTED,
         "normalizers[1].pattern.String|found nothing"},
        {CHARS, NORMALIZER "1/content", "7", UNSUPPORTED, "normalizers[1].content|found 7"},
        {CHARS, NORMALIZER "+", "null", UNSUPPORTED,
         "normalizer.normalizers[2].type|found nothing"},
        /* pre_tokenizer */
        {BYTES, "pre_tokenizer", "{\"type\": \"BertPreTokenizer\"}", UNSUPPORTED,
         "pre_tokenizer.type|found \"BertPreTokenizer\""},
        {BYTES, "pre_tokenizer", "\"x\"", UNSUPPORTED, "pre_tokenizer.type|found nothing"},
        {BYTES, "pre_tokenizer/pretokenizers", "{}", FORMAT, "pretokenizers|an array|an object"},
        {BYTES, PRE "+", "{\"type\": \"Digits\"}", UNSUPPORTED,
         "pretokenizers[2].type|nothing behind \"ByteLevel\"|\"Digits\""},
        {BYTES, PRE "0/type", "\"Punctuation\"", UNSUPPORTED,
         "pretokenizers[0].type|\"Split\"|\"Punctuation\""},
        {BYTES, PRE "0/pattern/Regex", "\"\\\\w+\"", UNSUPPORTED,
         "pretokenizers[0].pattern.Regex|an escape that the two read differently|\"\\w+\""},
        {BYTES, PRE "0/pattern/Regex", "\"(\"", UNSUPPORTED,
         "pretokenizers[0].pattern.Regex|a group without an end"},
        {BYTES, PRE "0/pattern/Regex", "7", FORMAT, "pattern.Regex|a string|found 7"},
        {BYTES, PRE "0/pattern", "{\"String\": \"\"}", UNSUPPORTED, "pattern.String|found \"\""},
        {BYTES, PRE "0/pattern", "{}", UNSUPPORTED, "pattern.String|found nothing"},
        {BYTES, PRE "0/behavior", "\"Shuffled\"", UNSUPPORTED, "[0].behavior|found \"Shuffled\""},
        {BYTES, PRE "0/invert", "1", FORMAT, "[0]: invert|found 1"},
        {BYTES, PRE "1/type", "\"UnicodeScripts\"", UNSUPPORTED,
         "[1].type|\"ByteLevel\"|\"UnicodeScripts\""},
        {BYTES, PRE "1/add_prefix_space", "\"x\"", FORMAT, "[1]: add_prefix_space|a string"},
        {BYTES, PRE "1", "{\"type\": \"Metaspace\", \"replacement\": \"__\"}", UNSUPPORTED,
         "[1].replacement|one character|\"__\""},
        {BYTES, PRE "1",
         "{\"type\": \"Metaspace\", \"replacement\": \"_\", \"prepend_scheme\": \"last\"}",
         UNSUPPORTED, "[1].prepend_scheme|\"first\"|found \"last\""},
        {BYTES, PRE "1",
         "{\"type\": \"Metaspace\", \"replacement\": \"_\", \"add_prefix_space\": false}",
         UNSUPPORTED, "[1].prepend_scheme|\"never\"|found nothing"},
        {CHARS, "pre_tokenizer",
         "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Digits\"},"
         " {\"type\": \"Digits\"}, {\"type\": \"Digits\"}, {\"type\": \"Digits\"},"
         " {\"type\": \"Digits\"}, {\"type\": \"Digits\"}, {\"type\": \"Digits\"},"
         " {\"type\": \"Digits\"}, {\"type\": \"Digits\"}]}",
         UNSUPPORTED, "pretokenizers[8]|at most 8 steps"},
        /* decoder */
        {BYTES, "decoder", "null", UNSUPPORTED, "decoder.type|\"ByteLevel\"|found nothing"},
        {BYTES, "decoder/type", "\"WordPiece\"", UNSUPPORTED, "decoder.type|found \"WordPiece\""},
        {CHARS, DECODER "+", "{\"type\": \"Fuse\"}", UNSUPPORTED,
         "decoder.decoders[4].type|in this order|\"Fuse\""},
        {CHARS, DECODER "1/type", "\"Strip\"", UNSUPPORTED,
         "decoder.decoders[1].type|\"ByteFallback\"|\"Strip\""},
        {CHARS, DECODER "2/type", "\"Replace\"", UNSUPPORTED, "decoders[2].type|\"Replace\""},
        {CHARS, DECODER "0/pattern", "{\"Regex\": \"x\"}", UNSUPPORTED,
         "decoders[0].pattern.String|found nothing"},
        {CHARS, DECODER "3/content", "\"x\"", UNSUPPORTED, "decoders[3].content|found \"x\""},
        {CHARS, DECODER "3/start", "-1", UNSUPPORTED, "decoders[3].start|[0, 1024]|found -1"},
        {CHARS, DECODER "3/stop", "1", UNSUPPORTED, "decoders[3].stop|expected 0, found 1"},
        /* post_processor */
        {BYTES, "post_processor", "{\"type\": \"BertProcessing\"}", UNSUPPORTED,
         "post_processor.type|found \"BertProcessing\""},
        {BYTES, "post_processor", "{\"type\": \"RobertaProcessing\"}", UNSUPPORTED,
         "post_processor.type|found \"RobertaProcessing\""},
        {BYTES, "post_processor",
         "{\"type\": \"Sequence\", \"processors\": [{\"type\": \"BertProcessing\"}]}", UNSUPPORTED,
         "post_processor.processors[0].type|found \"BertProcessing\""},
        {CHARS, "post_processor/single", "\"$A\"", UNSUPPORTED, "post_processor.single|an array"},
        {CHARS, "post_processor/single/1", NULL, UNSUPPORTED, "Sequence \"A\"|special tokens only"},
        {CHARS, "post_processor/single/+", "{\"Sequence\": {\"id\": \"A\"}}", UNSUPPORTED,
         "post_processor.single[2]|once"},
        {CHARS, "post_processor/single/+", "{\"Sequence\": {\"id\": \"B\"}}", UNSUPPORTED,
         "post_processor.single[2]"},
        {CHARS, "post_processor/single/+", "7", UNSUPPORTED, "post_processor.single[2]"},
        {CHARS, "post_processor/single/0/SpecialToken/id", "7", FORMAT,
         "SpecialToken.id|a string|found 7"},
        {CHARS, "post_processor/single/0/SpecialToken/id", "\"<x>\"", FORMAT,
         "special_tokens|\"<x>\"|`ids`|found nothing"},
        {CHARS, "post_processor/special_tokens/<s>/ids/0", "264", FORMAT,
         "special_tokens: ids|found 264"},
        {CHARS, "post_processor/special_tokens/<s>/ids/0", "-1", FORMAT, "ids|found -1"},
        {CHARS, "post_processor/special_tokens/<s>/ids/0", "\"1\"", FORMAT, "ids|found \"1\""},
        /* model */
        {BYTES, "model", NULL, FORMAT, "model: |an object|found nothing"},
        {BYTES, "model/type", "\"Unigram\"", UNSUPPORTED, "model.type|\"BPE\"|found \"Unigram\""},
        {BYTES, "model/dropout", "0.1", UNSUPPORTED, "model.dropout|null|found 0.1"},
        {BYTES, "model/continuing_subword_prefix", "\"##\"", UNSUPPORTED,
         "model.continuing_subword_prefix|null or \"\"|found \"##\""},
        {BYTES, "model/end_of_word_suffix", "\"</w>\"", UNSUPPORTED, "model.end_of_word_suffix"},
        {BYTES, "model/ignore_merges", "1", FORMAT, "model: ignore_merges|true or false|found 1"},
        {CHARS, "model/byte_fallback", "\"x\"", FORMAT, "model: byte_fallback|a string"},
        {CHARS, "model/fuse_unk", "0", FORMAT, "model: fuse_unk|found 0"},
        {BYTES, "model/vocab", "[]", FORMAT, "model.vocab|an object|an array"},
        {BYTES, "model/vocab/!", "-1", FORMAT, "model.vocab: \"!\"|an id in [0, 16777216)"},
        {BYTES, "model/vocab/!", "16777216", FORMAT, "model.vocab: \"!\"|another number"},
        {BYTES, "model/vocab/!", "1.0", FORMAT, "model.vocab: \"!\"|a real number"},
        {BYTES, "model/vocab/!", "34", FORMAT, "id 34|one token|\"!\""},
        {BYTES, "model/vocab/!", NULL, UNSUPPORTED, "model.vocab|every byte|0x21 (\"!\")|lost"},
        {CHARS, "model/vocab/<0x0A>", NULL, UNSUPPORTED, "model.vocab|every byte|0x0a|\"<0x0A>\""},
        {BYTES, "model/vocab/!", "66593", FORMAT, "below 66588 for 263 tokens|found 66593|empty"},
        {BYTES, "model/merges", "{}", FORMAT, "model.merges|an array|an object"},
        {BYTES, "model/merges/1", "\"l  l\"", FORMAT, "model.merges[1]|left right|\"l  l\""},
        {BYTES, "model/merges/1", "\"ll\"", FORMAT, "model.merges[1]|left right|\"ll\""},
        {BYTES, "model/merges/1", "[\"l\"]", FORMAT, "model.merges[1]|left right|an array"},
        {BYTES, "model/merges/1", "[\"l\", 1]", FORMAT, "model.merges[1]|left right|an array"},
        {BYTES, "model/merges/1", "[\"l\", \"xx\"]", FORMAT, "model.merges[1]|found \"xx\""},
        {BYTES, "model/merges/1", "\"xx l\"", FORMAT, "model.merges[1]|found \"xx\""},
        {BYTES, "model/merges/1", "[\"l\", \"h\"]", FORMAT, "model.merges[1]|found \"lh\""},
        /* added tokens */
        {BYTES, "added_tokens", "{}", FORMAT, "added_tokens: |an array|an object"},
        {BYTES, "added_tokens/1/id", "\"262\"", FORMAT, "added_tokens[1].id|found \"262\""},
        {BYTES, "added_tokens/1/id", "16777216", FORMAT, "added_tokens[1].id|found 16777216"},
        {BYTES, "added_tokens/1", "7", FORMAT, "added_tokens[1].id|found nothing"},
        {BYTES, "added_tokens/1/id", "33", FORMAT, "id 33|\"!\"|\"<tool>\""},
        {BYTES, "added_tokens/1/id", "261", FORMAT, "id 261|\"<|\"<tool>\""},
        {BYTES, "added_tokens/1/content", "\"!\"", FORMAT, "[1] (\"!\"): id|expected 33|found 262"},
        {BYTES, "added_tokens/1/content", "\"\"", FORMAT, "added_tokens[1]: content|found 0"},
        {BYTES, "added_tokens/1/content", "null", FORMAT, "added_tokens[1]: content|a string"},
        {BYTES, "added_tokens/1/lstrip", "1", FORMAT, "added_tokens[1]: lstrip|found 1"},
        {BYTES, "added_tokens/1/special", "1", FORMAT, "added_tokens[1]: special|found 1"},
        {BYTES, "added_tokens/+", "{\"id\": 262, \"content\": \"<tool>\"}", FORMAT,
         "added_tokens|each content once|\"<tool>\"|262"},
        {BYTES, "pre_tokenizer", "null", UNSUPPORTED,
         "pre_tokenizer: expected|\"ByteLevel\"|found null"},
        {BYTES, PRE "1", NULL, UNSUPPORTED, "pre_tokenizer: expected|\"ByteLevel\""},
        {BYTES, "model/vocab/\xc3\xbf", NULL, 0, NULL}, /* byte 0xff: no text has it */
        {BYTES, "model/ignore_merges", "true", 0, NULL},
        {BYTES, PRE "0/behavior", "\"Removed\"", 0, NULL},
        {BYTES, PRE "1/use_regex", NULL, 0, NULL},
        {BYTES, "post_processor", "{\"type\": \"Sequence\", \"processors\": []}", 0, NULL},
        {CHARS, "added_tokens/1/normalized", "true", 0, NULL},
        {CHARS, "model/unk_token", "\"<x>\"", 0, NULL},
        {CHARS, "model/dropout", "0.0", 0, NULL},
        {CHARS, DECODER "3", NULL, 0, NULL},
        {CHARS, "post_processor", "null", 0, NULL},
        {BYTES, "truncation", "{\"max_length\": 8}", 0, NULL},
        {BYTES, "added_tokens", NULL, 0, NULL},
        {BYTES, "model/byte_fallback", "true", 0, NULL},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        json_t *root = fixture(cases[i].kind);
        edit(root, cases[i].path, cases[i].value);
        if (cases[i].fragments == NULL) {
            /* What changes nothing is taken. */
            imbrex_tokenizer_close(tokenizer_fixture_open(root));
        } else {
            expect_refused(root, cases[i].status, cases[i].fragments);
        }
    }
}

/* Catches unknown characters that would vanish: without bytes to spell them there must be a token
 * for them. */
static void test_parse_needs_an_unknown_token(void **state)
{
    (void)state;
    static const char *const tokens[] = {"null", "\"<x>\"", "7"};
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        json_t *root = tokenizer_fixture_chars();
        edit(root, "model/byte_fallback", "false");
        edit(root, "model/unk_token", tokens[i]);
        expect_refused(root, UNSUPPORTED, "model.unk_token|without byte_fallback");
    }
}

/* Catches a message that is lost, cut in the middle of a character or not one line when a file has
 * long and strange strings. */
static void test_parse_messages_stay_readable(void **state)
{
    (void)state;
    for (size_t shift = 0; shift < 4; shift++) {
        char text[1024] = "\"";
        for (size_t i = 0; i < 200; i++) {
            strcat(text, i < shift ? "x" : i % 5 == 0 ? "\\n" : "\xe6\x97\xa5");
        }
        strcat(text, "\"");
        json_t *root = tokenizer_fixture_bytes();
        edit(root, "model/type", text);
        expect_refused(root, UNSUPPORTED, "t/tokenizer.json: model.type: expected \"BPE\", found");
    }
}

/* Catches a crash, a leak or a tokenizer that does not work (under sanitizers): files with random
 * bytes changed, removed or doubled are refused with a reason or serve. */
static void test_parse_damaged_files(void **state)
{
    (void)state;
    uint64_t random_state = 5;
    size_t num_parsed = 0;
    for (int kind = 0; kind < 2; kind++) {
        json_t *root = fixture(kind == 0 ? BYTES : CHARS);
        char *whole = json_dumps(root, JSON_COMPACT);
        assert_non_null(whole);
        size_t whole_bytes = strlen(whole);
        for (int round = 0; round < 1500; round++) {
            char *text = malloc(whole_bytes);
            assert_non_null(text);
            memcpy(text, whole, whole_bytes);
            size_t num_bytes = whole_bytes;
            for (uint32_t i = fixture_random(&random_state) % 3 + 1; i > 0; i--) {
                size_t at = fixture_random(&random_state) % num_bytes;
                size_t length = fixture_random(&random_state) % 8 + 1;
                length = length < num_bytes - at ? length : num_bytes - at;
                switch (fixture_random(&random_state) % 4) {
                case 0:
                    text[at] = "0123456789\",:{}[]tfn"[fixture_random(&random_state) % 20];
                    break;
                case 1:
                    text[at] = (char)(text[at] ^ 1 << fixture_random(&random_state) % 7);
                    break;
                case 2:
                    memmove(text + at, text + at + length, num_bytes - at - length);
                    num_bytes -= length;
                    break;
                default:
                    memmove(text + at,
                            text + fixture_random(&random_state) % (num_bytes - length + 1),
                            length);
                    break;
                }
            }
            struct imbrex_tokenizer *tokenizer = NULL;
            struct imbrex_error err = {0};
            enum imbrex_status status = tokenizer_parse("t", text, num_bytes, &tokenizer, &err);
            free(text);
            if (status != IMBREX_STATUS_OK) {
                assert_int_equal(err.status, status);
                assert_true(status == FORMAT || status == UNSUPPORTED);
                assert_true(strlen(err.message) > 3);
                assert_null(tokenizer);
                continue;
            }
            num_parsed++;
            size_t num_ids, text_bytes;
            int32_t *ids = fixture_tokenize(tokenizer, 3, "hello ab <s>\xe6\x97\xa5", 15, &num_ids);
            char *again = fixture_detokenize(tokenizer, ids, num_ids, false, &text_bytes);
            assert_int_equal(utf8_valid_prefix(again, text_bytes), text_bytes);
            imbrex_free(ids);
            imbrex_free(again);
            imbrex_tokenizer_close(tokenizer);
        }
        free(whole);
        json_decref(root);
    }
    /* The damage is small enough for some to pass, so the second half is tested as well. */
    assert_true(num_parsed > 20);
}

int run_tokenizer_parse_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse_refuses_by_name),
        cmocka_unit_test(test_parse_needs_an_unknown_token),
        cmocka_unit_test(test_parse_messages_stay_readable),
        cmocka_unit_test(test_parse_damaged_files),
    };
    return cmocka_run_group_tests_name("tokenizer_parse", tests, NULL, NULL);
}
