/* SPDX-License-Identifier: Apache-2.0 */
/* Texts and the ids that other people's tokenizers made of them: Hugging Face's for Qwen2.5, for
 * stories260K, for qwen2-tiny-4m and for small tokenizers of each kind, and llama.cpp's test cases.
 * Every id must be equal, also where the vocabulary comes as GGUF metadata. */
#include "golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf.h"
#include "model/tokenizer.h"

#define CASES "tests/golden/tokenizers/"

static struct imbrex_tokenizer *open_tokenizer(const char *path)
{
    struct imbrex_error err;
    struct imbrex_tokenizer *tokenizer = NULL;
    golden_check(imbrex_tokenizer_open(path, &tokenizer, &err), &err);
    return tokenizer;
}

/* Qwen2.5's tokenizer as tests/golden/make_qwen2_5_tokenizer.py wrote it. */
static struct imbrex_tokenizer *open_qwen2_5(void)
{
    return open_tokenizer(TEST_BUILD_DIR "/fixtures/qwen2.5");
}

static void check_ids(const struct imbrex_tokenizer *tokenizer, const char *name, const char *text,
                      size_t text_bytes, unsigned flags, const int32_t *expected,
                      size_t num_expected)
{
    struct imbrex_error err;
    int32_t *ids = NULL;
    size_t num_ids = 0;
    golden_check(imbrex_tokenize(tokenizer, text, text_bytes, flags, &ids, &num_ids, &err), &err);
    for (size_t i = 0; i < num_ids && i < num_expected; i++) {
        if (ids[i] != expected[i]) {
            fail_msg("%s: \"%.200s\": id %zu: expected %d, found %d", name, text, i, expected[i],
                     ids[i]);
        }
    }
    if (num_ids != num_expected) {
        fail_msg("%s: \"%.200s\": expected %zu ids, found %zu", name, text, num_expected, num_ids);
    }
    imbrex_free(ids);
}

/* Decodes the ids as a whole and one by one. */
static void check_text(const struct imbrex_tokenizer *tokenizer, const char *name,
                       const int32_t *ids, size_t num_ids, bool skip_special, const char *expected,
                       size_t expected_bytes)
{
    struct imbrex_error err;
    char *text = NULL;
    size_t text_bytes = 0;
    golden_check(imbrex_detokenize(tokenizer, ids, num_ids, skip_special, &text, &text_bytes, &err),
                 &err);
    if (text_bytes != expected_bytes || memcmp(text, expected, text_bytes) != 0) {
        fail_msg("%s: expected \"%.200s\", found \"%.200s\"", name, expected, text);
    }
    struct detokenizer detokenizer;
    detokenizer_init(&detokenizer, tokenizer, skip_special);
    char *piece = malloc(detokenizer_max_bytes(tokenizer));
    assert_non_null(piece);
    size_t at = 0;
    for (size_t i = 0; i <= num_ids; i++) {
        size_t piece_bytes = i < num_ids ? detokenizer_push(&detokenizer, ids[i], piece)
                                         : detokenizer_flush(&detokenizer, piece);
        assert_true(piece_bytes <= text_bytes - at);
        assert_memory_equal(piece, text + at, piece_bytes);
        at += piece_bytes;
    }
    assert_int_equal(at, text_bytes);
    free(piece);
    imbrex_free(text);
}

/* Runs the cases of a file with one JSON object a line: text, ids, and decoded where decoding does
 * not give the text back. Returns their number. */
static size_t check_jsonl(const struct imbrex_tokenizer *tokenizer, const char *path,
                          unsigned flags, bool skip_special)
{
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    char *line = NULL;
    size_t max_bytes = 0, num_cases = 0;
    ssize_t line_bytes;
    while ((line_bytes = getline(&line, &max_bytes, file)) > 0) {
        json_error_t json_error;
        json_t *object = json_loadb(line, (size_t)line_bytes, JSON_ALLOW_NUL, &json_error);
        assert_non_null(object);
        const json_t *text = json_object_get(object, "text");
        const json_t *decoded = json_object_get(object, "decoded");
        decoded = decoded == NULL ? text : decoded;
        int32_t num_ids;
        int32_t *ids = golden_ids(json_object_get(object, "ids"), &num_ids);
        char name[64];
        snprintf(name, sizeof(name), "case %zu", ++num_cases);
        check_ids(tokenizer, name, json_string_value(text), json_string_length(text), flags, ids,
                  (size_t)num_ids);
        check_text(tokenizer, name, ids, (size_t)num_ids, skip_special, json_string_value(decoded),
                   json_string_length(decoded));
        free(ids);
        json_decref(object);
    }
    free(line);
    fclose(file);
    return num_cases;
}

/* Catches any difference from Hugging Face's tokenizers on Qwen2.5's vocabulary: splitting, NFC,
 * merge order, special tokens, decoding; 929 cases of four kinds. */
static void test_qwen2_5_as_hugging_face(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = open_qwen2_5();
    assert_int_equal(imbrex_tokenizer_vocab_size(tokenizer), 151665);
    assert_int_equal(check_jsonl(tokenizer, CASES "qwen2.5/cases.jsonl",
                                 IMBREX_TOKENIZE_PARSE_SPECIAL | IMBREX_TOKENIZE_ADD_SPECIAL,
                                 false),
                     929);
    imbrex_tokenizer_close(tokenizer);
}

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size_t num_bytes = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(num_bytes + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, num_bytes, file), num_bytes);
    text[num_bytes] = '\0';
    fclose(file);
    return text;
}

/* Catches differences on llama.cpp's own collection of troublesome texts (46 cases). Texts are
 * separated by a line; the ids of each are a line. */
static void test_qwen2_5_on_llama_cpp_cases(void **state)
{
    (void)state;
    static const char separator[] = "\n__ggml_vocab_test__\n";
    struct imbrex_tokenizer *tokenizer = open_qwen2_5();
    char *texts = read_text(CASES "llama.cpp/ggml-vocab-qwen2.gguf.inp");
    char *lines = read_text(CASES "llama.cpp/ggml-vocab-qwen2.gguf.out");
    size_t num_cases = 0;
    char *text = texts, *line = lines;
    for (char *end; (end = strstr(text, separator)) != NULL; text = end + strlen(separator)) {
        int32_t ids[512];
        size_t num_ids = 0;
        char *line_end = strchr(line, '\n');
        assert_non_null(line_end);
        *line_end = '\0';
        for (char *at = line; *at != '\0';) {
            assert_true(num_ids < 512);
            char *next;
            ids[num_ids++] = (int32_t)strtol(at, &next, 10);
            assert_ptr_not_equal(next, at);
            at = next;
        }
        *end = '\0';
        char name[64];
        snprintf(name, sizeof(name), "case %zu", ++num_cases);
        check_ids(tokenizer, name, text, strlen(text), 0, ids, num_ids);
        line = line_end + 1;
    }
    assert_int_equal(num_cases, 46);
    free(texts);
    free(lines);
    imbrex_tokenizer_close(tokenizer);
}

/* Catches differences in the SentencePiece kind: the space in front, byte fallback, BOS, and the
 * space that decoding drops (60 cases). */
static void test_stories260k_as_hugging_face(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = open_tokenizer("builtin:stories260K");
    assert_int_equal(imbrex_tokenizer_vocab_size(tokenizer), 512);
    assert_int_equal(check_jsonl(tokenizer, CASES "stories260K/cases.jsonl",
                                 IMBREX_TOKENIZE_PARSE_SPECIAL | IMBREX_TOKENIZE_ADD_SPECIAL, true),
                     60);
    imbrex_tokenizer_close(tokenizer);
}

/* Catches a reader that only takes merges written "a b": this file has them as pairs. */
static void test_qwen2_tiny_prompts(void **state)
{
    (void)state;
    struct imbrex_tokenizer *tokenizer = open_tokenizer("tests/golden/qwen2-tiny-4m");
    json_t *golden = golden_read_json("tests/golden/qwen2-tiny-4m/golden.json");
    const json_t *prompts = json_object_get(golden, "prompts");
    assert_int_equal(json_array_size(prompts), 5);
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        const json_t *prompt = json_object_get(json_array_get(prompts, i), "prompt");
        int32_t num_ids;
        int32_t *ids =
            golden_ids(json_object_get(json_array_get(prompts, i), "prompt_ids"), &num_ids);
        assert_true(json_is_string(prompt));
        check_ids(tokenizer, "prompt", json_string_value(prompt), json_string_length(prompt),
                  IMBREX_TOKENIZE_ADD_SPECIAL, ids, (size_t)num_ids);
        check_text(tokenizer, "prompt", ids, (size_t)num_ids, true, json_string_value(prompt),
                   json_string_length(prompt));
        free(ids);
    }
    json_decref(golden);
    imbrex_tokenizer_close(tokenizer);
}

/* Catches any difference from Hugging Face's tokenizers in what the small tokenizers have: GPT-2's
 * and Llama-3's patterns, ignore_merges, added tokens that take white space along or stand alone,
 * Prepend and Metaspace, byte fallback and unknown characters, the normalization forms, digits,
 * other regular expressions and every behaviour of Split; and in decoding each. */
static void test_small_tokenizers_as_hugging_face(void **state)
{
    (void)state;
    static const char *const names[] = {
        "gpt2", "llama3", "llama2", "mistral", "metaspace", "smollm", "tekken", "mixed",
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[128];
        snprintf(path, sizeof(path), CASES "%s", names[i]);
        struct imbrex_tokenizer *tokenizer = open_tokenizer(path);
        snprintf(path, sizeof(path), CASES "%s/cases.jsonl", names[i]);
        assert_int_equal(check_jsonl(tokenizer, path,
                                     IMBREX_TOKENIZE_PARSE_SPECIAL | IMBREX_TOKENIZE_ADD_SPECIAL,
                                     true),
                         250);
        imbrex_tokenizer_close(tokenizer);
    }
}

/* ---- GGUF ----------------------------------------------------------------------------------- */

/* Writes the metadata of a GGUF file. */
struct metadata {
    FILE *stream;
    char *bytes;
    size_t num_bytes;
    uint64_t num_values;
};

static void put_integer(struct metadata *metadata, uint64_t value, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes; i++) {
        putc((int)(value >> 8 * i & 0xff), metadata->stream);
    }
}

static void put_string(struct metadata *metadata, const char *text)
{
    put_integer(metadata, strlen(text), 8);
    fputs(text, metadata->stream);
}

static void put_key(struct metadata *metadata, const char *key, enum gguf_type type)
{
    put_string(metadata, key);
    put_integer(metadata, type, 4);
    metadata->num_values++;
}

static void put_array(struct metadata *metadata, const char *key, enum gguf_type element_type,
                      size_t num_elements)
{
    put_key(metadata, key, GGUF_TYPE_ARRAY);
    put_integer(metadata, element_type, 4);
    put_integer(metadata, num_elements, 8);
}

/* What tokenizer.json says of each id. */
struct vocab {
    size_t num_tokens;
    const char **texts;
    int32_t *types;
};

static struct vocab read_vocab(const json_t *root)
{
    const json_t *added = json_object_get(root, "added_tokens");
    json_t *model_vocab = json_object_get(json_object_get(root, "model"), "vocab");
    size_t max_tokens = json_object_size(model_vocab) + json_array_size(added);
    struct vocab vocab = {
        .texts = calloc(max_tokens, sizeof(*vocab.texts)),
        .types = calloc(max_tokens, sizeof(*vocab.types)),
    };
    assert_non_null(vocab.texts);
    assert_non_null(vocab.types);
    const char *text;
    json_t *id;
    json_object_foreach(model_vocab, text, id)
    {
        size_t at = (size_t)json_integer_value(id);
        vocab.texts[at] = text;
        vocab.types[at] = strncmp(text, "<0x", 3) == 0 ? 6 : 1;
        vocab.num_tokens = at >= vocab.num_tokens ? at + 1 : vocab.num_tokens;
    }
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *token = json_array_get(added, i);
        size_t at = (size_t)json_integer_value(json_object_get(token, "id"));
        vocab.texts[at] = json_string_value(json_object_get(token, "content"));
        vocab.types[at] = json_is_true(json_object_get(token, "special")) ? 3 : 4;
        vocab.num_tokens = at >= vocab.num_tokens ? at + 1 : vocab.num_tokens;
    }
    assert_true(vocab.num_tokens <= max_tokens);
    return vocab;
}

static void put_merges(struct metadata *metadata, const json_t *merges)
{
    put_array(metadata, "tokenizer.ggml.merges", GGUF_TYPE_STRING, json_array_size(merges));
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const json_t *merge = json_array_get(merges, i);
        char line[1024];
        if (json_is_array(merge)) {
            snprintf(line, sizeof(line), "%s %s", json_string_value(json_array_get(merge, 0)),
                     json_string_value(json_array_get(merge, 1)));
        } else {
            snprintf(line, sizeof(line), "%s", json_string_value(merge));
        }
        put_string(metadata, line);
    }
}

/* The vocabulary of a tokenizer.json as the metadata of a GGUF file has it. With `pre` NULL it is
 * SentencePiece's, in which the ids are in the order of the scores. */
static void put_vocab(struct metadata *metadata, const char *path, const char *pre, int32_t bos_id)
{
    json_t *root = golden_read_json(path);
    struct vocab vocab = read_vocab(root);
    put_key(metadata, "tokenizer.ggml.model", GGUF_TYPE_STRING);
    put_string(metadata, pre == NULL ? "llama" : "gpt2");
    put_array(metadata, "tokenizer.ggml.tokens", GGUF_TYPE_STRING, vocab.num_tokens);
    for (size_t i = 0; i < vocab.num_tokens; i++) {
        assert_non_null(vocab.texts[i]);
        put_string(metadata, vocab.texts[i]);
    }
    put_array(metadata, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, vocab.num_tokens);
    for (size_t i = 0; i < vocab.num_tokens; i++) {
        put_integer(metadata, (uint64_t)vocab.types[i], 4);
    }
    if (pre == NULL) {
        put_array(metadata, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, vocab.num_tokens);
        for (size_t i = 0; i < vocab.num_tokens; i++) {
            float score = -(float)i;
            uint32_t bits;
            memcpy(&bits, &score, sizeof(bits));
            put_integer(metadata, bits, 4);
        }
    } else {
        put_key(metadata, "tokenizer.ggml.pre", GGUF_TYPE_STRING);
        put_string(metadata, pre);
        put_merges(metadata, json_object_get(json_object_get(root, "model"), "merges"));
        put_key(metadata, "tokenizer.ggml.add_bos_token", GGUF_TYPE_BOOL);
        put_integer(metadata, bos_id >= 0, 1);
    }
    if (bos_id >= 0) {
        put_key(metadata, "tokenizer.ggml.bos_token_id", GGUF_TYPE_UINT32);
        put_integer(metadata, (uint64_t)bos_id, 4);
    }
    free(vocab.texts);
    free(vocab.types);
    json_decref(root);
}

static struct imbrex_tokenizer *open_as_gguf(const char *path, const char *pre, int32_t bos_id)
{
    struct metadata metadata = {0};
    metadata.stream = open_memstream(&metadata.bytes, &metadata.num_bytes);
    assert_non_null(metadata.stream);
    fputs("GGUF", metadata.stream);
    put_integer(&metadata, 3, 4);
    put_integer(&metadata, 0, 8);
    put_integer(&metadata, 0, 8);
    put_vocab(&metadata, path, pre, bos_id);
    assert_int_equal(fclose(metadata.stream), 0);
    /* The number of values comes before them. */
    metadata.bytes[16] = (char)metadata.num_values;

    struct gguf gguf = {0};
    struct imbrex_error err;
    struct imbrex_tokenizer *tokenizer = NULL;
    golden_check(gguf_parse("test.gguf", (const unsigned char *)metadata.bytes, metadata.num_bytes,
                            &gguf, &err),
                 &err);
    golden_check(tokenizer_from_gguf(&gguf, &tokenizer, &err), &err);
    gguf_release(&gguf);
    free(metadata.bytes);
    return tokenizer;
}

/* Catches merges that are not those of the scores, and special tokens, byte tokens or steps that
 * GGUF only implies and that are not as in tokenizer.json: the same cases must pass. */
static void test_gguf_vocabularies(void **state)
{
    (void)state;
    static const struct {
        const char *path, *cases, *pre;
        int32_t bos_id;
        bool skip_special;
        size_t num_cases;
    } files[] = {
        {"models/stories260K/tokenizer.json", CASES "stories260K/cases.jsonl", NULL, 1, true, 60},
        {CASES "llama3/tokenizer.json", CASES "llama3/cases.jsonl", "llama-bpe", 1000, true, 250},
        {CASES "tekken/tokenizer.json", CASES "tekken/cases.jsonl", "tekken", -1, true, 250},
        {TEST_BUILD_DIR "/fixtures/qwen2.5/tokenizer.json", CASES "qwen2.5/cases.jsonl", "qwen2",
         -1, false, 929},
    };
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        struct imbrex_tokenizer *tokenizer =
            open_as_gguf(files[i].path, files[i].pre, files[i].bos_id);
        assert_int_equal(check_jsonl(tokenizer, files[i].cases,
                                     IMBREX_TOKENIZE_PARSE_SPECIAL | IMBREX_TOKENIZE_ADD_SPECIAL,
                                     files[i].skip_special),
                         files[i].num_cases);
        imbrex_tokenizer_close(tokenizer);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_qwen2_5_as_hugging_face),
        cmocka_unit_test(test_qwen2_5_on_llama_cpp_cases),
        cmocka_unit_test(test_stories260k_as_hugging_face),
        cmocka_unit_test(test_qwen2_tiny_prompts),
        cmocka_unit_test(test_small_tokenizers_as_hugging_face),
        cmocka_unit_test(test_gguf_vocabularies),
    };
    return cmocka_run_group_tests_name("golden tokenizer", tests, NULL, NULL);
}
