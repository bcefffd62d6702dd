/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates against Jinja2: the renders of ten checkpoints' templates, the cases for each
 * feature of the language, and what of a render counts as user input. Origin of the data:
 * tests/golden/chat-templates/README.md. */
#include <stdlib.h>
#include <string.h>

#include "golden.h"
#include "jinja/jinja.h"

#define FOLDER "tests/golden/chat-templates/"
#define NOW 1767225600 /* 2026-01-01 00:00 */
#define NUM_RENDERS 520
#define NUM_TEMPLATES 10
/* What the renders were made with in place of Granite's format for dates: see README.md. */
#define DATE_ASKED "'%B %d, %Y'"
#define DATE_MADE "'%d %b %Y'"

/* Parses a template file, dates as above. */
static struct jinja_template *open_template(const char *name)
{
    char path[256], *source = malloc(JINJA_MAX_SOURCE_BYTES);
    struct jinja_template *template = NULL;
    struct imbrex_error err;
    snprintf(path, sizeof(path), FOLDER "%s", name);
    FILE *file = fopen(path, "rb");
    assert_non_null(source);
    assert_non_null(file);
    size_t num_bytes = fread(source, 1, JINJA_MAX_SOURCE_BYTES, file);
    fclose(file);
    char *date = memmem(source, num_bytes, DATE_ASKED, strlen(DATE_ASKED));
    if (date != NULL) {
        size_t rest = num_bytes - (size_t)(date - source) - strlen(DATE_ASKED);
        memmove(date + strlen(DATE_MADE), date + strlen(DATE_ASKED), rest);
        memcpy(date, DATE_MADE, strlen(DATE_MADE));
        num_bytes -= strlen(DATE_ASKED) - strlen(DATE_MADE);
    }
    golden_check(jinja_template_parse(name, source, num_bytes, &template, &err), &err);
    free(source);
    return template;
}

static json_t *make_variables(const json_t *golden, const char *conversation, bool with_tools,
                              bool add_generation_prompt)
{
    const json_t *messages =
        json_object_get(json_object_get(golden, "conversations"), conversation);
    json_t *variables =
        json_pack("{s:O, s:b, s:O, s:O}", "messages", messages, "add_generation_prompt",
                  add_generation_prompt, "bos_token", json_object_get(golden, "bos_token"),
                  "eos_token", json_object_get(golden, "eos_token"));
    assert_non_null(variables);
    json_object_set_new(variables, "tools",
                        with_tools ? json_incref(json_object_get(golden, "tools")) : json_null());
    return variables;
}

static struct jinja_options golden_options(void)
{
    struct jinja_options options = jinja_options_default();
    options.now = NOW;
    return options;
}

/* "TypeError: message" as imbrex has it: a status, and the message at the end of its own. */
static void check_error(const char *what, enum imbrex_status status, const char *found,
                        const char *expected)
{
    const char *message = strstr(expected, ": ") + 2;
    bool is_raised = strncmp(expected, "TemplateError: ", 15) == 0;
    enum imbrex_status expected_status =
        is_raised ? IMBREX_STATUS_INVALID_ARGUMENT : IMBREX_STATUS_FORMAT;
    size_t found_bytes = strlen(found), message_bytes = strlen(message);
    if (status != expected_status || found_bytes < message_bytes ||
        strcmp(found + found_bytes - message_bytes, message) != 0) {
        fail_msg("%s: expected %s, found %s: %s", what, expected, imbrex_status_name(status),
                 found);
    }
}

static void check_render(const json_t *golden, const json_t *render,
                         const struct jinja_template *template)
{
    struct jinja_options options = golden_options();
    struct jinja_output output = {0};
    struct imbrex_error err = {.message = ""};
    char what[256];
    const char *conversation = json_string_value(json_object_get(render, "case"));
    bool with_tools = json_is_true(json_object_get(render, "tools"));
    bool with_prompt = json_is_true(json_object_get(render, "add_generation_prompt"));
    json_t *variables = make_variables(golden, conversation, with_tools, with_prompt);
    snprintf(what, sizeof(what), "%s, %s, tools %d, prompt %d",
             json_string_value(json_object_get(render, "template")), conversation, with_tools,
             with_prompt);
    enum imbrex_status status = jinja_template_render(template, variables, &options, &output, &err);
    const json_t *expected = json_object_get(render, "expected");
    if (expected == NULL) {
        check_error(what, status, err.message, json_string_value(json_object_get(render, "error")));
    } else if (status != IMBREX_STATUS_OK) {
        fail_msg("%s: %s", what, err.message);
    } else if (output.num_bytes != json_string_length(expected) ||
               memcmp(output.text, json_string_value(expected), output.num_bytes) != 0) {
        fail_msg("%s: expected\n%s\nfound\n%s", what, json_string_value(expected), output.text);
    }
    jinja_output_release(&output);
    json_decref(variables);
}

/* Catches: any difference from Jinja2 in the templates that people have, text or error. */
static void test_renders(void **state)
{
    (void)state;
    json_t *golden = golden_read_json(FOLDER "golden_renders.json");
    const json_t *renders = json_object_get(golden, "renders");
    const char *name = "";
    struct jinja_template *template = NULL;
    assert_int_equal(json_array_size(renders), NUM_RENDERS);
    for (size_t i = 0; i < NUM_RENDERS; i++) {
        const json_t *render = json_array_get(renders, i);
        const char *render_name = json_string_value(json_object_get(render, "template"));
        if (strcmp(name, render_name) != 0) { /* they come template by template */
            jinja_template_destroy(template);
            template = open_template(render_name);
            name = render_name;
        }
        check_render(golden, render, template);
    }
    jinja_template_destroy(template);
    json_decref(golden);
}

/* Whether all of text[begin, end) is input, none of it, or some. */
static int input_part(const struct jinja_output *output, size_t begin, size_t end)
{
    size_t num_input = 0;
    for (size_t i = 0; i < output->num_spans; i++) {
        const struct jinja_span *span = &output->spans[i];
        size_t from = span->begin > begin ? span->begin : begin;
        size_t to = span->end < end ? span->end : end;
        num_input += span->is_input && from < to ? to - from : 0;
    }
    return num_input == end - begin ? 1 : num_input == 0 ? 0 : -1;
}

/* Every place where a special token's text stands: input exactly inside of the user's content. */
static size_t check_specials(const char *name, const struct jinja_output *output,
                             const char *content, size_t content_begin)
{
    static const char *const specials[] = {"<|im_end|>", "<|im_start|>", "</s>", "<s>"};
    size_t content_end = content_begin + strlen(content), num_outside = 0;
    for (size_t i = 0; i < sizeof(specials) / sizeof(specials[0]); i++) {
        const char *place = output->text;
        while ((place = strstr(place, specials[i])) != NULL) {
            size_t begin = (size_t)(place - output->text), end = begin + strlen(specials[i]);
            bool is_inside = begin >= content_begin && end <= content_end;
            if (input_part(output, begin, end) != is_inside) {
                fail_msg("%s: %s at %zu: expected it to be %s", name, specials[i], begin,
                         is_inside ? "input" : "the template's");
            }
            num_outside += !is_inside;
            place++;
        }
    }
    return num_outside;
}

/* Catches: user text that could become a special token, and a template's own token that could not:
 * the content of the conversation `specials` is input as a whole and nothing around it is. */
static void test_specials(void **state)
{
    (void)state;
    json_t *golden = golden_read_json(FOLDER "golden_renders.json");
    const json_t *renders = json_object_get(golden, "renders");
    const char *name = "";
    size_t num_templates = 0, num_outside = 0;
    const json_t *message =
        json_array_get(json_object_get(json_object_get(golden, "conversations"), "specials"), 0);
    const char *content = json_string_value(json_object_get(message, "content"));
    for (size_t i = 0; i < NUM_RENDERS; i++) {
        const char *render_name =
            json_string_value(json_object_get(json_array_get(renders, i), "template"));
        if (strcmp(name, render_name) == 0) {
            continue;
        }
        name = render_name;
        num_templates++;
        struct jinja_template *template = open_template(name);
        for (int with_tools = 0; with_tools < 2; with_tools++) {
            struct jinja_options options = golden_options();
            struct jinja_output output;
            struct imbrex_error err;
            json_t *variables = make_variables(golden, "specials", with_tools != 0, true);
            golden_check(jinja_template_render(template, variables, &options, &output, &err), &err);
            const char *place = strstr(output.text, content);
            assert_non_null(place);
            size_t begin = (size_t)(place - output.text), end = begin + strlen(content);
            assert_int_equal(input_part(&output, begin, end), 1);
            if (begin > 0 && input_part(&output, begin - 1, begin) != 0) {
                fail_msg("%s: the byte before the content is input", name);
            }
            if (end < output.num_bytes && input_part(&output, end, end + 1) != 0) {
                fail_msg("%s: the byte behind the content is input", name);
            }
            num_outside += check_specials(name, &output, content, begin);
            jinja_output_release(&output);
            json_decref(variables);
        }
        jinja_template_destroy(template);
    }
    assert_int_equal(num_templates, NUM_TEMPLATES);
    assert_true(num_outside > NUM_TEMPLATES);
    json_decref(golden);
}

static enum imbrex_status render_source(const json_t *source, const json_t *variables,
                                        struct jinja_output *output, struct imbrex_error *err)
{
    struct jinja_template *template;
    struct jinja_options options = golden_options();
    enum imbrex_status status = jinja_template_parse("case", json_string_value(source),
                                                     json_string_length(source), &template, err);
    if (status == IMBREX_STATUS_OK) {
        status = jinja_template_render(template, variables, &options, output, err);
        jinja_template_destroy(template);
    }
    return status;
}

/* A case says either the text or the status that must come. */
static void check_case(const json_t *test_case, const json_t *variables)
{
    const json_t *source = json_object_get(test_case, "template");
    const json_t *text = json_object_get(test_case, "text");
    const json_t *expected = json_object_get(test_case, "status");
    struct jinja_output output = {0};
    struct imbrex_error err = {.message = ""};
    enum imbrex_status status = render_source(source, variables, &output, &err);
    if (text != NULL) {
        if (status != IMBREX_STATUS_OK) {
            fail_msg("%s\nexpected: %s\nfound: %s", json_string_value(source),
                     json_string_value(text), err.message);
        }
        if (output.num_bytes != json_string_length(text) ||
            memcmp(output.text, json_string_value(text), output.num_bytes) != 0) {
            fail_msg("%s\nexpected: %s\nfound:    %s", json_string_value(source),
                     json_string_value(text), output.text);
        }
    } else if (strcmp(imbrex_status_name(status), json_string_value(expected)) != 0) {
        fail_msg("%s\nexpected: %s\nfound: %s %s", json_string_value(source),
                 json_string_value(expected), imbrex_status_name(status), err.message);
    }
    jinja_output_release(&output);
}

static void check_cases(const char *section, size_t min_cases)
{
    json_t *document = golden_read_json(FOLDER "language_cases.json");
    const json_t *variables = json_object_get(document, "variables");
    const json_t *cases = json_object_get(document, section);
    assert_true(json_array_size(cases) >= min_cases);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        check_case(json_array_get(cases, i), variables);
    }
    json_decref(document);
}

/* Catches: a feature of the language that does something else than in Jinja2: white space, scopes,
 * loops, macros, operators, filters, tests, methods, printing, errors. */
static void test_language(void **state)
{
    (void)state;
    check_cases("cases", 1700);
}

/* Catches: a deliberate difference that changed unnoticed. */
static void test_differences(void **state)
{
    (void)state;
    check_cases("differences", 15);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_renders),
        cmocka_unit_test(test_specials),
        cmocka_unit_test(test_language),
        cmocka_unit_test(test_differences),
    };
    return cmocka_run_group_tests_name("chat_templates", tests, NULL, NULL);
}
