/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/model/tokenizer_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "tests/test.h"

static json_t *document(const char *text)
{
    json_error_t error;
    json_t *root = json_loads(text, 0, &error);
    if (root == NULL) {
        fail_msg("fixture, line %d: %s", error.line, error.text);
    }
    return root;
}

static json_t *vocab_of(json_t *root)
{
    return json_object_get(json_object_get(root, "model"), "vocab");
}

int32_t tokenizer_fixture_add_token(json_t *root, const char *token)
{
    json_t *vocab = vocab_of(root);
    int32_t id = (int32_t)json_object_size(vocab);
    assert_int_equal(json_object_set_new(vocab, token, json_integer(id)), 0);
    return id;
}

void tokenizer_fixture_add_merge(json_t *root, const char *left, const char *right)
{
    char merged[64];
    snprintf(merged, sizeof(merged), "%s%s", left, right);
    if (json_object_get(vocab_of(root), merged) == NULL) {
        tokenizer_fixture_add_token(root, merged);
    }
    json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    assert_int_equal(json_array_append_new(merges, json_pack("[ss]", left, right)), 0);
}

int32_t tokenizer_fixture_add_added(json_t *root, const char *content, bool special,
                                    bool normalized)
{
    const json_t *known = json_object_get(vocab_of(root), content);
    json_t *added = json_object_get(root, "added_tokens");
    int32_t id = (int32_t)json_object_size(vocab_of(root));
    for (size_t i = 0; i < json_array_size(added); i++) {
        json_int_t used = json_integer_value(json_object_get(json_array_get(added, i), "id"));
        id = used >= id ? (int32_t)used + 1 : id;
    }
    id = known == NULL ? id : (int32_t)json_integer_value(known);
    json_t *entry = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id, "content", content,
                              "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", normalized,
                              "special", special);
    assert_int_equal(json_array_append_new(added, entry), 0);
    return id;
}

json_t *tokenizer_fixture_bytes(void)
{
    json_t *root = document(
        "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [],"
        " \"normalizer\": {\"type\": \"NFC\"},"
        " \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": ["
        "  {\"type\": \"Split\", \"pattern\": {}, \"behavior\": \"Isolated\", \"invert\": false},"
        "  {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}]},"
        " \"post_processor\": {\"type\": \"ByteLevel\"}, \"decoder\": {\"type\": \"ByteLevel\"},"
        " \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null,"
        "  \"continuing_subword_prefix\": \"\", \"end_of_word_suffix\": null,"
        "  \"vocab\": {}, \"merges\": []}}");
    json_t *steps = json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers");
    json_object_set_new(json_object_get(json_array_get(steps, 0), "pattern"), "Regex",
                        json_string(word_pattern_text(WORD_PATTERN_QWEN2)));
    /* The alphabet in the order of the bytes, so that a byte is its own id here. */
    uint32_t next_char = 0x100;
    for (uint32_t byte = 0; byte < 256; byte++) {
        bool is_printable =
            (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad && byte <= 0xff);
        char token[UTF8_MAX_BYTES + 1];
        token[utf8_write(is_printable ? byte : next_char++, token)] = '\0';
        tokenizer_fixture_add_token(root, token);
    }
    tokenizer_fixture_add_merge(root, "h", "e");
    tokenizer_fixture_add_merge(root, "l", "l");
    tokenizer_fixture_add_merge(root, "he", "ll");
    tokenizer_fixture_add_merge(root, "hell", "o");
    tokenizer_fixture_add_merge(root, "\xc4\xa0", "h"); /* U+0120 stands for the space */
    assert_int_equal(tokenizer_fixture_add_added(root, "<|end|>", true, false), FIXTURE_BYTES_END);
    assert_int_equal(tokenizer_fixture_add_added(root, "<tool>", false, false), FIXTURE_BYTES_TOOL);
    return root;
}

json_t *tokenizer_fixture_chars(void)
{
    json_t *root = document(
        "{\"version\": \"1.0\", \"added_tokens\": [],"
        " \"normalizer\": {\"type\": \"Sequence\", \"normalizers\": ["
        "  {\"type\": \"Prepend\", \"prepend\": \"\\u2581\"},"
        "  {\"type\": \"Replace\", \"pattern\": {\"String\": \" \"}, \"content\": \"\\u2581\"}]},"
        " \"pre_tokenizer\": null,"
        " \"post_processor\": {\"type\": \"TemplateProcessing\","
        "  \"single\": [{\"SpecialToken\": {\"id\": \"<s>\", \"type_id\": 0}},"
        "   {\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}],"
        "  \"special_tokens\": {\"<s>\": {\"id\": \"<s>\", \"ids\": [1], \"tokens\": [\"<s>\"]}}},"
        " \"decoder\": {\"type\": \"Sequence\", \"decoders\": ["
        "  {\"type\": \"Replace\", \"pattern\": {\"String\": \"\\u2581\"}, \"content\": \" \"},"
        "  {\"type\": \"ByteFallback\"}, {\"type\": \"Fuse\"},"
        "  {\"type\": \"Strip\", \"content\": \" \", \"start\": 1, \"stop\": 0}]},"
        " \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": \"<unk>\","
        "  \"fuse_unk\": true, \"byte_fallback\": true, \"ignore_merges\": false,"
        "  \"vocab\": {\"<unk>\": 0, \"<s>\": 1, \"</s>\": 2}, \"merges\": []}}");
    for (unsigned byte = 0; byte < 256; byte++) {
        char token[8];
        snprintf(token, sizeof(token), "<0x%02X>", byte);
        tokenizer_fixture_add_token(root, token);
    }
    tokenizer_fixture_add_token(root, SPACE_MARK);
    tokenizer_fixture_add_token(root, "a");
    tokenizer_fixture_add_token(root, "b");
    tokenizer_fixture_add_merge(root, "a", "b");
    tokenizer_fixture_add_merge(root, SPACE_MARK, "a");
    tokenizer_fixture_add_added(root, "<unk>", true, false);
    tokenizer_fixture_add_added(root, "<s>", true, false);
    tokenizer_fixture_add_added(root, "</s>", true, false);
    return root;
}

struct imbrex_tokenizer *tokenizer_fixture_open(json_t *root)
{
    struct imbrex_tokenizer *tokenizer = NULL;
    struct imbrex_error err;
    char *text = json_dumps(root, JSON_COMPACT);
    assert_non_null(text);
    if (tokenizer_parse("fixture.json", text, strlen(text), &tokenizer, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    free(text);
    json_decref(root);
    return tokenizer;
}

struct imbrex_tokenizer *tokenizer_fixture_open_path(const char *path)
{
    struct imbrex_tokenizer *tokenizer = NULL;
    struct imbrex_error err;
    if (imbrex_tokenizer_open(path, &tokenizer, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    return tokenizer;
}

int32_t *fixture_tokenize(const struct imbrex_tokenizer *tokenizer, unsigned flags,
                          const char *text, size_t text_bytes, size_t *num_ids)
{
    int32_t *ids = NULL;
    struct imbrex_error err;
    if (imbrex_tokenize(tokenizer, text, text_bytes, flags, &ids, num_ids, &err) !=
        IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    assert_non_null(ids);
    return ids;
}

char *fixture_detokenize(const struct imbrex_tokenizer *tokenizer, const int32_t *ids,
                         size_t num_ids, bool skip_special, size_t *text_bytes)
{
    char *text = NULL;
    struct imbrex_error err;
    if (imbrex_detokenize(tokenizer, ids, num_ids, skip_special, &text, text_bytes, &err) !=
        IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    assert_non_null(text);
    assert_int_equal(text[*text_bytes], '\0');
    return text;
}

void expect_ids(const struct imbrex_tokenizer *tokenizer, unsigned flags, const char *text,
                size_t text_bytes, const int32_t *expected)
{
    size_t num_ids;
    int32_t *ids = fixture_tokenize(tokenizer, flags, text, text_bytes, &num_ids);
    for (size_t i = 0; i < num_ids; i++) {
        if (ids[i] != expected[i]) {
            fail_msg("\"%s\": id %zu: expected %d, found %d", text, i, expected[i], ids[i]);
        }
    }
    if (expected[num_ids] != -1) {
        fail_msg("\"%s\": expected more ids than %zu", text, num_ids);
    }
    imbrex_free(ids);
}

uint32_t fixture_random(uint64_t *random_state)
{
    *random_state = *random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*random_state >> 33);
}
