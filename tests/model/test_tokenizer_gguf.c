/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf.h"
#include "model/tokenizer_internal.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

#define IDS(...) ((const int32_t[]){__VA_ARGS__, -1})
#define PARSE IMBREX_TOKENIZE_PARSE_SPECIAL
#define ADD IMBREX_TOKENIZE_ADD_SPECIAL
#define MAX_TOKENS 320
#define MAX_VALUES 16

/* Metadata as a test makes it, before it is read. */
struct metadata {
    struct gguf_value values[MAX_VALUES];
    struct gguf gguf;
    char texts[MAX_TOKENS][16];
    struct gguf_string tokens[MAX_TOKENS], merges[16];
    int32_t types[MAX_TOKENS];
    float scores[MAX_TOKENS];
    size_t num_tokens, num_merges;
    struct gguf_string model, pre;
    int32_t bos_id, eos_id;
    unsigned char flags[4];
    size_t num_flags;
};

static struct gguf_string string(const char *text)
{
    return (struct gguf_string){.bytes = text, .num_bytes = strlen(text)};
}

static struct gguf_value *add_value(struct metadata *metadata, const char *key, enum gguf_type type,
                                    const void *bytes)
{
    assert_true(metadata->gguf.num_values < MAX_VALUES);
    struct gguf_value *value = &metadata->values[metadata->gguf.num_values++];
    *value = (struct gguf_value){
        .key = string(key), .type = type, .element_type = type, .num_elements = 1, .bytes = bytes};
    return value;
}

static void add_array(struct metadata *metadata, const char *key, enum gguf_type type,
                      const void *elements, size_t num_elements)
{
    struct gguf_value *value = add_value(metadata, key, GGUF_TYPE_ARRAY, elements);
    value->element_type = type;
    value->num_elements = num_elements;
    if (type == GGUF_TYPE_STRING) {
        value->strings = (struct gguf_string *)elements;
    }
}

static void add_string(struct metadata *metadata, const char *key, struct gguf_string *text)
{
    add_value(metadata, key, GGUF_TYPE_STRING, NULL)->strings = text;
}

static void add_flag(struct metadata *metadata, const char *key, bool flag)
{
    unsigned char *byte = &metadata->flags[metadata->num_flags++];
    *byte = flag;
    add_value(metadata, key, GGUF_TYPE_BOOL, byte);
}

static int32_t add_token(struct metadata *metadata, const char *text, int32_t type, float score)
{
    size_t id = metadata->num_tokens++;
    assert_true(id < MAX_TOKENS);
    snprintf(metadata->texts[id], sizeof(metadata->texts[id]), "%s", text);
    metadata->tokens[id] = string(metadata->texts[id]);
    metadata->types[id] = type;
    metadata->scores[id] = score;
    return (int32_t)id;
}

static void add_merge(struct metadata *metadata, const char *line)
{
    metadata->merges[metadata->num_merges++] = string(line);
}

static int compare_keys(const void *a, const void *b)
{
    const struct gguf_value *left = a, *right = b;
    size_t shared =
        left->key.num_bytes < right->key.num_bytes ? left->key.num_bytes : right->key.num_bytes;
    int order = memcmp(left->key.bytes, right->key.bytes, shared);
    return order != 0 ? order
                      : (left->key.num_bytes > right->key.num_bytes) -
                            (left->key.num_bytes < right->key.num_bytes);
}

/* The vocabulary as it stands, read. */
static enum imbrex_status read_metadata(struct metadata *metadata,
                                        struct imbrex_tokenizer **tokenizer,
                                        struct imbrex_error *err)
{
    add_string(metadata, "tokenizer.ggml.model", &metadata->model);
    if (metadata->pre.bytes != NULL) {
        add_string(metadata, "tokenizer.ggml.pre", &metadata->pre);
        add_array(metadata, "tokenizer.ggml.merges", GGUF_TYPE_STRING, metadata->merges,
                  metadata->num_merges);
    } else {
        add_array(metadata, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, metadata->scores,
                  metadata->num_tokens);
    }
    add_array(metadata, "tokenizer.ggml.tokens", GGUF_TYPE_STRING, metadata->tokens,
              metadata->num_tokens);
    add_array(metadata, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, metadata->types,
              metadata->num_tokens);
    add_value(metadata, "tokenizer.ggml.bos_token_id", GGUF_TYPE_INT32, &metadata->bos_id);
    add_value(metadata, "tokenizer.ggml.eos_token_id", GGUF_TYPE_INT32, &metadata->eos_id);
    qsort(metadata->values, metadata->gguf.num_values, sizeof(metadata->values[0]), compare_keys);
    metadata->gguf.path = "t.gguf";
    metadata->gguf.values = metadata->values;
    enum imbrex_status status = tokenizer_from_gguf(&metadata->gguf, tokenizer, err);
    /* Whatever is needed later must have been copied. */
    memset(metadata, 0xee, sizeof(*metadata));
    free(metadata);
    return status;
}

static struct imbrex_tokenizer *open_metadata(struct metadata *metadata)
{
    struct imbrex_tokenizer *tokenizer = NULL;
    struct imbrex_error err;
    if (read_metadata(metadata, &tokenizer, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    return tokenizer;
}

static void expect_refused(struct metadata *metadata, enum imbrex_status status,
                           const char *fragments)
{
    struct imbrex_tokenizer *tokenizer = NULL;
    struct imbrex_error err = {0};
    expect_error(read_metadata(metadata, &tokenizer, &err), status, &err, fragments);
    assert_null(tokenizer);
}

/* "<unk>" 0, "<s>" 1, "</s>" 2, bytes from 3, U+2581 259, a 260, b 261, c 262. */
static struct metadata *sentencepiece(void)
{
    struct metadata *metadata = calloc(1, sizeof(*metadata));
    assert_non_null(metadata);
    metadata->model = string("llama");
    metadata->bos_id = 1;
    metadata->eos_id = 2;
    add_token(metadata, "<unk>", 2, 0);
    add_token(metadata, "<s>", 3, 0);
    add_token(metadata, "</s>", 3, 0);
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        snprintf(text, sizeof(text), "<0x%02X>", byte);
        add_token(metadata, text, 6, 0);
    }
    add_token(metadata, SPACE_MARK, 1, -1000);
    add_token(metadata, "a", 1, -1001);
    add_token(metadata, "b", 1, -1002);
    add_token(metadata, "c", 1, -1003);
    return metadata;
}

/* The alphabet of bytes 0 to 255 by id, then "he" 256, "ll" 257. */
static struct metadata *byte_level(const char *pre)
{
    struct metadata *metadata = calloc(1, sizeof(*metadata));
    json_t *root = tokenizer_fixture_bytes();
    const char *text;
    json_t *id;
    assert_non_null(metadata);
    metadata->model = string("gpt2");
    metadata->pre = string(pre);
    metadata->num_tokens = 256;
    json_object_foreach(json_object_get(json_object_get(root, "model"), "vocab"), text, id)
    {
        size_t at = (size_t)json_integer_value(id);
        if (at < 256) {
            snprintf(metadata->texts[at], sizeof(metadata->texts[at]), "%s", text);
            metadata->tokens[at] = string(metadata->texts[at]);
            metadata->types[at] = 1;
        }
    }
    json_decref(root);
    add_token(metadata, "he", 1, 0);
    add_token(metadata, "ll", 1, 0);
    add_merge(metadata, "h e");
    add_merge(metadata, "l l");
    return metadata;
}

static void expect(const struct imbrex_tokenizer *tokenizer, unsigned flags, const char *text,
                   const int32_t *ids)
{
    expect_ids(tokenizer, flags, text, strlen(text), ids);
}

/* Catches merges in another order than that of the scores, or made with tokens that text must not
 * become: the longest is not the best, "bc" is lost to "ab". */
static void test_gguf_scores(void **state)
{
    (void)state;
    struct metadata *metadata = sentencepiece();
    int32_t bc = add_token(metadata, "bc", 1, -2);
    int32_t ab = add_token(metadata, "ab", 1, -1);
    int32_t abc = add_token(metadata, "abc", 1, -3);
    int32_t mark_a = add_token(metadata, SPACE_MARK "a", 1, -0.5f);
    int32_t cc = add_token(metadata, "cc", 3, 5); /* control: never merged to */
    struct imbrex_tokenizer *tokenizer = open_metadata(metadata);
    expect(tokenizer, 0, "babc", IDS(259, 261, abc));
    expect(tokenizer, 0, "abc", IDS(mark_a, bc));
    expect(tokenizer, 0, "bab", IDS(259, 261, ab));
    expect(tokenizer, 0, "bcc", IDS(259, bc, 262));
    expect(tokenizer, PARSE, "bcc", IDS(259, 261, cc));
    expect(tokenizer, ADD, "a", IDS(1, mark_a));
    expect(tokenizer, ADD | PARSE, "b</s>\xc3\xa9", IDS(1, 259, 261, 2, 259, 3 + 0xc3, 3 + 0xa9));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches equal scores that do not merge from the left (SentencePiece's order), which is not the
 * order in which the pairs are found. */
static void test_gguf_equal_scores(void **state)
{
    (void)state;
    struct metadata *metadata = sentencepiece();
    int32_t bc = add_token(metadata, "bc", 1, -1);
    int32_t cb = add_token(metadata, "cb", 1, -1);
    struct imbrex_tokenizer *tokenizer = open_metadata(metadata);
    expect(tokenizer, 0, "cbc", IDS(259, cb, 262));
    expect(tokenizer, 0, "bcb", IDS(259, bc, 261));
    imbrex_tokenizer_close(tokenizer);
}

/* Catches keys that are not heeded: no space in front (and none dropped in decoding), BOS and EOS
 * on demand. */
static void test_gguf_flags(void **state)
{
    (void)state;
    size_t num_bytes;
    struct imbrex_tokenizer *tokenizer = open_metadata(sentencepiece());
    char *text = fixture_detokenize(tokenizer, IDS(259, 260, 259, 261), 4, true, &num_bytes);
    assert_string_equal(text, "a b");
    imbrex_free(text);
    imbrex_tokenizer_close(tokenizer);

    struct metadata *metadata = sentencepiece();
    add_flag(metadata, "tokenizer.ggml.add_space_prefix", false);
    add_flag(metadata, "tokenizer.ggml.add_bos_token", false);
    add_flag(metadata, "tokenizer.ggml.add_eos_token", true);
    tokenizer = open_metadata(metadata);
    expect(tokenizer, ADD, "a b", IDS(260, 259, 261, 2));
    text = fixture_detokenize(tokenizer, IDS(259, 260, 259, 261), 4, true, &num_bytes);
    assert_string_equal(text, " a b");
    imbrex_free(text);
    imbrex_tokenizer_close(tokenizer);
}

/* Catches token types read as others: user-defined tokens are found but not special, unused ones
 * are no tokens, control tokens stand for their text. */
static void test_gguf_token_types(void **state)
{
    (void)state;
    struct metadata *metadata = byte_level("qwen2");
    int32_t user = add_token(metadata, "<tool>", 4, 0);
    int32_t unused = add_token(metadata, "[PAD259]", 5, 0);
    int32_t control = add_token(metadata, "<|\xc3\xa9|>", 3, 0);
    struct imbrex_tokenizer *tokenizer = open_metadata(metadata);
    size_t num_bytes;
    expect(tokenizer, 0, "<tool><|\xc3\xa9|>", IDS(user, '<', '|', 0xc3, 0xa9, '|', '>'));
    expect(tokenizer, PARSE, "hell<|\xc3\xa9|>", IDS(256, 257, control));
    assert_null(imbrex_token_bytes(tokenizer, unused, &num_bytes));
    assert_true(imbrex_token_is_special(tokenizer, control));
    assert_false(imbrex_token_is_special(tokenizer, user));
    assert_memory_equal(imbrex_token_bytes(tokenizer, control, &num_bytes), "<|\xc3\xa9|>", 6);
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a name that stands for another pattern, or for one with other steps around it. */
static void test_gguf_pre_tokenizers(void **state)
{
    (void)state;
    static const struct {
        const char *pre;
        const char *text;
        int32_t ids[8];
    } cases[] = {
        /* "e1" and "1e" would merge if numbers were not words of their own; NFC makes one letter */
        {"gpt-2", "e\xcc\x81", {'e', 0xcc, 0x81, -1}},
        {"qwen2", "e\xcc\x81", {0xc3, 0xa9, -1}},
        {"deepseek-r1-qwen", "e\xcc\x81", {0xc3, 0xa9, -1}},
        {"llama-bpe", "e\xcc\x81", {'e', 0xcc, 0x81, -1}},
        {"gpt-2", "1 2", {'1', 258, -1}},
        {"smollm", "1 2", {'1', ' ', '2', -1}},
        {"qwen2", "1 2", {'1', ' ', '2', -1}},
        {"gpt-2", "11", {259, -1}},
        {"llama3", "11", {259, -1}},
        {"llama3", "1111", {259, '1', '1', -1}},
        {"llama3", "(he", {260, -1}}, /* a word that no merge leads to */
        {"qwen2", "(he", {'(', 256, -1}},
        {"tekken", "11", {'1', '1', -1}},
        {"tekken", "heHe", {256, 'H', 'e', -1}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct metadata *metadata = byte_level(cases[i].pre);
        add_token(metadata,
                  "\xc4\xa0"
                  "2",
                  1, 0);
        add_token(metadata, "11", 1, 0);
        add_token(metadata, "(he", 1, 0);
        add_token(metadata, "eH", 1, 0);
        add_merge(metadata, "\xc4\xa0 2");
        add_merge(metadata, "1 1");
        add_merge(metadata, "e H");
        struct imbrex_tokenizer *tokenizer = open_metadata(metadata);
        expect(tokenizer, 0, cases[i].text, cases[i].ids);
        imbrex_tokenizer_close(tokenizer);
    }
}

/* Catches metadata that are read as something else than they are, or a refusal that does not say
 * which key is wrong. */
static void test_gguf_refusals(void **state)
{
    (void)state;
    struct metadata *metadata = sentencepiece();
    metadata->model = string("t5");
    expect_refused(metadata, IMBREX_STATUS_UNSUPPORTED,
                   "t.gguf: tokenizer.ggml.model: |\"llama\" or \"gpt2\"|\"t5\"");
    expect_refused(byte_level("default"), IMBREX_STATUS_UNSUPPORTED,
                   "tokenizer.ggml.pre: |gpt-2, smollm|llama-bpe|\"default\"");
    metadata = byte_level("qwen2");
    metadata->pre.bytes = NULL;
    expect_refused(metadata, IMBREX_STATUS_NOT_FOUND, "tokenizer.ggml.pre");
    metadata = sentencepiece();
    metadata->scores[260] = NAN;
    expect_refused(metadata, IMBREX_STATUS_FORMAT, "token 260|a score");
    metadata = sentencepiece();
    metadata->types[3 + 'x'] = 5;
    expect_refused(metadata, IMBREX_STATUS_UNSUPPORTED, "every byte|0x78|<0x78>");
    metadata = sentencepiece();
    metadata->bos_id = 263;
    expect_refused(metadata, IMBREX_STATUS_FORMAT, "tokenizer.ggml.bos_token_id");
    metadata = sentencepiece();
    add_token(metadata, "a", 1, 0);
    expect_refused(metadata, IMBREX_STATUS_UNSUPPORTED, "each text once|\"a\"|260|263");
    metadata = sentencepiece();
    metadata->num_tokens = 0;
    expect_refused(metadata, IMBREX_STATUS_FORMAT, "tokenizer.ggml.tokens|1 to 16777216|found 0");
    metadata = sentencepiece();
    add_flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", true);
    expect_refused(metadata, IMBREX_STATUS_UNSUPPORTED, "remove_extra_whitespaces|false");
    metadata = sentencepiece();
    add_value(metadata, "tokenizer.ggml.precompiled_charsmap", GGUF_TYPE_UINT8, "");
    expect_refused(metadata, IMBREX_STATUS_UNSUPPORTED, "precompiled_charsmap");
    static const char *const merges[] = {"", "h", "h ", " h", "xx h", "h l", "h e l"};
    for (size_t i = 0; i < sizeof(merges) / sizeof(merges[0]); i++) {
        metadata = byte_level("qwen2");
        add_merge(metadata, merges[i]);
        expect_refused(metadata, IMBREX_STATUS_FORMAT, "tokenizer.ggml.merges: 2|left right");
    }
}

int run_tokenizer_gguf_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_scores),         cmocka_unit_test(test_gguf_equal_scores),
        cmocka_unit_test(test_gguf_flags),          cmocka_unit_test(test_gguf_token_types),
        cmocka_unit_test(test_gguf_pre_tokenizers), cmocka_unit_test(test_gguf_refusals),
    };
    return cmocka_run_group_tests_name("tokenizer_gguf", tests, NULL, NULL);
}
