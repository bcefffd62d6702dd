/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/model.h"
#include "tests/base/fixture.h"
#include "tests/model/tokenizer_fixture.h"
#include "tests/test.h"

#define CONFIG "tokenizer_config.json"
#define HELLO "[{\"role\": \"user\", \"content\": \"hello\"}]"

/* A model as far as conversations know one, over a folder that a test fills. */
struct fixture {
    struct imbrex_model model;
    char path[FIXTURE_PATH_BYTES];
};

static int open_fixture(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    assert_non_null(fixture);
    fixture->model.path = fixture->path;
    fixture_folder(fixture->path, "chat");
    fixture->model.tokenizer = tokenizer_fixture_open(tokenizer_fixture_bytes());
    *state = fixture;
    return 0;
}

static int close_fixture(void **state)
{
    struct fixture *fixture = *state;
    chat_source_release(&fixture->model);
    imbrex_tokenizer_close(fixture->model.tokenizer);
    free(fixture);
    return 0;
}

/* Reads the folder again. */
static void reread(struct fixture *fixture)
{
    struct imbrex_error err;
    chat_source_release(&fixture->model);
    if (chat_source_read(&fixture->model, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

/* Fails unless the conversation gives the text, or the error that holds the fragments. */
static void expect_text(struct fixture *fixture, const char *messages,
                        const struct imbrex_chat_options *options, const char *expected)
{
    struct imbrex_error err;
    int32_t *ids;
    size_t num_ids, text_bytes;
    char *text;
    if (imbrex_chat_tokenize(&fixture->model, messages, options, &ids, &num_ids, &text, &text_bytes,
                             &err) != IMBREX_STATUS_OK) {
        fail_msg("expected \"%s\", found: %s", expected, err.message);
    }
    assert_string_equal(text, expected);
    assert_int_equal(text_bytes, strlen(expected));
    imbrex_free(ids);
    imbrex_free(text);
}

static void expect_refusal(struct fixture *fixture, const char *messages,
                           const struct imbrex_chat_options *options, enum imbrex_status expected,
                           const char *fragments)
{
    struct imbrex_error err;
    int32_t *ids = NULL;
    size_t num_ids = 7;
    char *text = NULL;
    expect_error(
        imbrex_chat_tokenize(&fixture->model, messages, options, &ids, &num_ids, &text, NULL, &err),
        expected, &err, fragments);
    assert_null(ids);
    assert_null(text);
    assert_int_equal(num_ids, 7);
}

static void expect_unreadable(struct fixture *fixture, const char *fragments)
{
    struct imbrex_error err;
    chat_source_release(&fixture->model);
    expect_error(chat_source_read(&fixture->model, &err), IMBREX_STATUS_FORMAT, &err, fragments);
    assert_null(fixture->model.chat_template);
    assert_null(fixture->model.chat_source.special_tokens);
}

/* Catches a template that is not found in its file, or read from the wrong one of two. */
static void test_sources(void **state)
{
    struct fixture *fixture = *state;
    reread(fixture);
    expect_refusal(fixture, HELLO, NULL, IMBREX_STATUS_NOT_FOUND,
                   "/chat: |chat_template.jinja|tokenizer_config.json|GGUF|found none");
    fixture_write_text(fixture->path, CONFIG, "{\"chat_template\": null}");
    reread(fixture);
    expect_refusal(fixture, HELLO, NULL, IMBREX_STATUS_NOT_FOUND, "found none");
    fixture_write_text(fixture->path, CONFIG, "{\"chat_template\": \"config\"}");
    reread(fixture);
    expect_text(fixture, HELLO, NULL, "config");
    fixture_write_text(fixture->path, "chat_template.jinja", "file\n");
    reread(fixture);
    expect_text(fixture, HELLO, NULL, "file");
}

/* Catches the wrong one of several named templates, with tools and without. */
static void test_named_templates(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options with_tools = imbrex_chat_options_default();
    with_tools.tools_json = "[]";
    fixture_write_text(fixture->path, CONFIG,
                       "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"rag\"},"
                       "{\"name\": \"default\", \"template\": \"default\"},"
                       "{\"name\": \"tool_use\", \"template\": \"tools\"}]}");
    reread(fixture);
    expect_text(fixture, HELLO, NULL, "default");
    expect_text(fixture, HELLO, &with_tools, "tools");
    fixture_write_text(fixture->path, CONFIG,
                       "{\"chat_template\": [{\"name\": \"default\", \"template\": \"default\"}]}");
    reread(fixture);
    expect_text(fixture, HELLO, &with_tools, "default");
    fixture_write_text(fixture->path, CONFIG,
                       "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"tools\"}]}");
    reread(fixture);
    expect_refusal(fixture, HELLO, NULL, IMBREX_STATUS_NOT_FOUND, "found none");
    expect_text(fixture, HELLO, &with_tools, "tools");
}

/* Catches the file of the template for tools being passed over. */
static void test_tool_template_file(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options with_tools = imbrex_chat_options_default();
    char folder[FIXTURE_PATH_BYTES];
    with_tools.tools_json = "[]";
    fixture_write_text(fixture->path, "chat_template.jinja", "file");
    fixture_folder(folder, "chat/additional_chat_templates");
    fixture_write_text(folder, "tool_use.jinja", "tools");
    reread(fixture);
    fixture_folder(folder, "chat/additional_chat_templates");
    assert_int_equal(rmdir(folder), 0);
    expect_text(fixture, HELLO, NULL, "file");
    expect_text(fixture, HELLO, &with_tools, "tools");
}

/* Catches damaged files that are taken for something, and messages that do not name the place. */
static void test_damaged_files(void **state)
{
    struct fixture *fixture = *state;
    static const char *const rows[][2] = {
        {"{\"chat_template\": 5}", "chat_template: expected a string or a list|found an integer"},
        {"{\"chat_template\": {\"default\": \"x\"}}", "chat_template: |found an object"},
        {"{\"chat_template\": [\"x\"]}", "chat_template[0].name: expected a string"},
        {"{\"chat_template\": [{\"name\": 1, \"template\": \"x\"}]}",
         "chat_template[0].name: expected a string, found an integer"},
        {"{\"chat_template\": [{\"name\": \"rag\"}, {\"name\": \"default\"}]}",
         "chat_template[1].template: expected a string, found nothing"},
        {"{\"chat_template\": [{\"name\": \"default\", \"template\": \"x\"}, "
         "{\"name\": \"default\", \"template\": \"y\"}]}",
         "chat_template[1].name: |once|\"default\""},
        {"{\"bos_token\": [\"<s>\"]}", "bos_token: expected a string or an object|an array"},
        {"{\"eos_token\": {\"text\": \"</s>\"}}", "eos_token: |found as its content nothing"},
        {"{\"pad_token\": 0}", "pad_token: |found an integer"},
        {"[]", "expected a JSON object, found an array"},
        {"{\"a\": ", "line 1, column 7"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        fixture_write_text(fixture->path, CONFIG, rows[i][0]);
        expect_unreadable(fixture, "/chat/tokenizer_config.json: ");
        expect_unreadable(fixture, rows[i][1]);
    }
    fixture_write_text(fixture->path, CONFIG, "{\"chat_template\": \"config\"}");
    fixture_write_text(fixture->path, "chat_template.jinja", "caf\xe9");
    expect_unreadable(fixture, "/chat/chat_template.jinja: |UTF-8");
    fixture_write_in(fixture->path, "chat_template.jinja", "a\0b", 3);
    expect_unreadable(fixture, "/chat/chat_template.jinja: |UTF-8");
    fixture_write_text(fixture->path, "chat_template.jinja", "");
    expect_unreadable(fixture, "/chat/chat_template.jinja");
}

/* Catches special tokens that do not reach the template, in each of the ways they are written. */
static void test_special_tokens(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options options = imbrex_chat_options_default();
    int32_t eos_ids[] = {FIXTURE_BYTES_END};
    options.chat_template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}";
    fixture_write_text(fixture->path, CONFIG,
                       "{\"bos_token\": {\"content\": \"<b>\", \"special\": true}, "
                       "\"eos_token\": \"<e>\", \"unk_token\": null}");
    reread(fixture);
    expect_text(fixture, HELLO, &options, "<b>|<e>|False");

    /* What a file says about one token says that there are no others. */
    fixture_write_text(fixture->path, CONFIG, "{\"eos_token\": \"<e>\"}");
    fixture->model.generation_config.num_eos_token_ids = 1;
    fixture->model.generation_config.eos_token_ids[0] = eos_ids[0];
    reread(fixture);
    expect_text(fixture, HELLO, &options, "|<e>|False");

    /* Without the file the tokenizer knows. */
    fixture_folder(fixture->path, "chat");
    reread(fixture);
    expect_text(fixture, HELLO, &options, "|<|end|>|False");
    imbrex_tokenizer_close(fixture->model.tokenizer);
    fixture->model.tokenizer = tokenizer_fixture_open(tokenizer_fixture_chars());
    fixture->model.generation_config.num_eos_token_ids = 0;
    expect_text(fixture, HELLO, &options, "<s>||False");
}

/* Catches variables that differ from Hugging Face's: none for what is not given. */
static void test_variables(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options options = imbrex_chat_options_default();
    options.chat_template = "{{ tools }} {{ documents }} {{ add_generation_prompt }} "
                            "{{ messages | length }} {{ messages[0].extra | default(0) | tojson }}";
    expect_text(fixture, HELLO, &options, "None None True 1 0");
    options.add_generation_prompt = false;
    options.tools_json = "[1, {\"a\": 2}]";
    expect_text(fixture, "[{\"role\": \"r\", \"extra\": [1.0, \"\\u00e9\"]}]", &options,
                "[1, {'a': 2}] None False 1 [1.0, \"\xc3\xa9\"]");
    options.chat_template = "{{ strftime_now('%Y-%m-%d %H:%M') }}";
    options.now = 1767225600 + 90 * 60;
    expect_text(fixture, HELLO, &options, "2026-01-01 01:30");
}

/* Catches conversations that are not one, and refusals that do not say where. */
static void test_bad_conversations(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options options = imbrex_chat_options_default();
    static const struct {
        const char *messages;
        enum imbrex_status status;
        const char *fragments;
    } rows[] = {
        {NULL, IMBREX_STATUS_INVALID_ARGUMENT, "messages: expected a JSON array, found NULL"},
        {"", IMBREX_STATUS_FORMAT, "messages: line 1, column 1"},
        {"{}", IMBREX_STATUS_FORMAT, "messages: expected a JSON array, found an object"},
        {"[]", IMBREX_STATUS_INVALID_ARGUMENT, "messages: expected at least one message"},
        {"[{\"role\": \"user\"}, 5]", IMBREX_STATUS_FORMAT,
         "messages[1]: expected an object, found an integer"},
        {"[{}]", IMBREX_STATUS_FORMAT, "messages[0].role: expected a string, found nothing"},
        {"[{\"role\": null}]", IMBREX_STATUS_FORMAT, "messages[0].role: |found null"},
        {"[{\"role\": \"a\\u0000\"}]", IMBREX_STATUS_FORMAT, "messages: line 1, column"},
    };
    options.chat_template = "x";
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        expect_refusal(fixture, rows[i].messages, &options, rows[i].status, rows[i].fragments);
    }
    options.tools_json = "{}";
    expect_refusal(fixture, HELLO, &options, IMBREX_STATUS_FORMAT,
                   "tools: expected a JSON array, found an object");
    options.tools_json = NULL;
    struct imbrex_tokenizer *tokenizer = fixture->model.tokenizer;
    fixture->model.tokenizer = NULL;
    expect_refusal(fixture, HELLO, &options, IMBREX_STATUS_NOT_FOUND, "/chat: |tokenizer");
    fixture->model.tokenizer = tokenizer;
}

/* Catches messages about a template that do not say which, and a template's own refusal taken for a
 * defect. */
static void test_bad_templates(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options options = imbrex_chat_options_default();
    options.chat_template = "{% if %}";
    expect_refusal(fixture, HELLO, &options, IMBREX_STATUS_FORMAT, "chat_template:1: ");
    options.chat_template_name = "/m/my.jinja";
    options.chat_template = "\n{{ raise_exception('no such role') }}";
    expect_refusal(fixture, HELLO, &options, IMBREX_STATUS_INVALID_ARGUMENT,
                   "/m/my.jinja:2: |no such role");
    fixture_write_text(fixture->path, CONFIG, "{\"chat_template\": \"{{ messages + 1 }}\"}");
    reread(fixture);
    expect_refusal(fixture, HELLO, NULL, IMBREX_STATUS_FORMAT,
                   "/chat/tokenizer_config.json: chat_template:1: ");
    fixture_write_text(fixture->path, "chat_template.jinja", "{{ nothing.at_all }}");
    reread(fixture);
    expect_refusal(fixture, HELLO, NULL, IMBREX_STATUS_FORMAT, "/chat/chat_template.jinja:1: ");
}

/* Catches an error in the two templates that come with imbrex. */
static void test_builtin_templates(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options options = imbrex_chat_options_default();
    static const char conversation[] =
        "[{\"role\": \"system\", \"content\": \" Be brief. \"},"
        " {\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"},"
        "                                {\"type\": \"text\", \"text\": \"b\\n\"}]},"
        " {\"role\": \"assistant\", \"content\": null}]";
    options.chat_template = "chatml";
    expect_text(fixture, conversation, &options,
                "<|im_start|>system\n Be brief. <|im_end|>\n"
                "<|im_start|>user\nab\n<|im_end|>\n"
                "<|im_start|>assistant\n<|im_end|>\n"
                "<|im_start|>assistant\n");
    options.chat_template = "llama3";
    expect_text(fixture, conversation, &options,
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nab<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n");
    options.add_generation_prompt = false;
    expect_text(fixture, HELLO, &options,
                "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>");
    options.tools_json = "[{}]";
    expect_refusal(fixture, HELLO, &options, IMBREX_STATUS_INVALID_ARGUMENT, "llama3|tools");
    options.chat_template = "chatml";
    expect_refusal(fixture, HELLO, &options, IMBREX_STATUS_INVALID_ARGUMENT, "chatml|tools");
    options.tools_json = NULL;
    expect_refusal(fixture, "[{\"role\": \"user\", \"content\": [{\"type\": \"image\"}]}]",
                   &options, IMBREX_STATUS_INVALID_ARGUMENT, "chatml|texts only");
}

/* Catches ids in which the template's special tokens are text, or a message's are not, and a begin
 * token that the tokenizer adds to the template's. */
static void test_ids(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_chat_options options = imbrex_chat_options_default();
    struct imbrex_error err;
    const int32_t expected[] = {FIXTURE_BYTES_END, 'i', '<', '|', 'e', 'n', 'd', '|', '>', 'u',
                                FIXTURE_BYTES_END};
    int32_t *ids;
    size_t num_ids;
    options.chat_template = "<|end|>{% for m in messages %}{{ m.content ~ m.role }}{% endfor %}"
                            "<|end|>";
    assert_int_equal(imbrex_chat_tokenize(&fixture->model,
                                          "[{\"role\": \"u\", \"content\": \"i<|end|>\"}]",
                                          &options, &ids, &num_ids, NULL, NULL, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(num_ids, sizeof(expected) / sizeof(expected[0]));
    assert_memory_equal(ids, expected, sizeof(expected));
    imbrex_free(ids);

    const int32_t begin[] = {1, 263};
    imbrex_tokenizer_close(fixture->model.tokenizer);
    fixture->model.tokenizer = tokenizer_fixture_open(tokenizer_fixture_chars());
    options.chat_template = "{{ bos_token }}a";
    assert_int_equal(
        imbrex_chat_tokenize(&fixture->model, HELLO, &options, &ids, &num_ids, NULL, NULL, &err),
        IMBREX_STATUS_OK);
    assert_int_equal(num_ids, 2);
    assert_memory_equal(ids, begin, sizeof(begin));
    imbrex_free(ids);
}

static int32_t end_token(struct fixture *fixture, const char *source)
{
    struct imbrex_chat_options options = imbrex_chat_options_default();
    struct imbrex_error err;
    int32_t token_id = -2;
    options.chat_template = source;
    if (imbrex_chat_end_token(&fixture->model, &options, &token_id, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s: %s", source, err.message);
    }
    return token_id;
}

/* Catches the wrong token at the end of a reply, and a template without one that is refused. */
static void test_end_token(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_error err;
    int32_t token_id = -2;
    const int32_t end = FIXTURE_BYTES_END;
#define REPLY "{{ messages[-1].content }}"
    assert_int_equal(end_token(fixture, REPLY "<|end|>\n"), end);
    assert_int_equal(end_token(fixture, "<|end|>" REPLY " \n<|end|>"), end);
    assert_int_equal(end_token(fixture, REPLY "<|end|>{{ messages[0].content }}"), end);
    assert_int_equal(end_token(fixture, "<|end|>" REPLY), -1);
    assert_int_equal(end_token(fixture, REPLY "<tool><|end|>"), -1);
    assert_int_equal(end_token(fixture, REPLY "x<|end|>"), -1);
    assert_int_equal(end_token(fixture, "<|end|>"), -1);
    assert_int_equal(end_token(fixture, "{{ raise_exception('not this') }}"), -1);
    assert_int_equal(end_token(fixture, "{{ 1 if add_generation_prompt else " /* not asked for */
                                        "messages[-1].content ~ '<|end|>' }}"),
                     end);
    expect_error(imbrex_chat_end_token(&fixture->model, NULL, &token_id, &err),
                 IMBREX_STATUS_NOT_FOUND, &err, "found none");
    assert_int_equal(token_id, -2);
}

int run_chat_template_tests(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        TEST(test_sources),
        TEST(test_named_templates),
        TEST(test_tool_template_file),
        TEST(test_damaged_files),
        TEST(test_special_tokens),
        TEST(test_variables),
        TEST(test_bad_conversations),
        TEST(test_bad_templates),
        TEST(test_builtin_templates),
        TEST(test_ids),
        TEST(test_end_token),
    };
    return cmocka_run_group_tests_name("chat_template", tests, NULL, NULL);
}
