/* SPDX-License-Identifier: Apache-2.0 */
#include "jinja_check.h"

#include <stdlib.h>
#include <string.h>

enum imbrex_status jinja_check_run(const char *source, const char *variables,
                                   const struct jinja_options *options, struct jinja_output *output,
                                   struct imbrex_error *err)
{
    struct jinja_template *template;
    json_error_t json_error;
    json_t *root = json_loads(variables, JSON_ALLOW_NUL, &json_error);
    if (root == NULL) {
        fail_msg("%s: %s", variables, json_error.text);
    }
    enum imbrex_status status = jinja_template_parse("t", source, strlen(source), &template, err);
    if (status == IMBREX_STATUS_OK) {
        status = jinja_template_render(template, root, options, output, err);
        jinja_template_destroy(template);
    }
    json_decref(root);
    return status;
}

static struct jinja_output render(const char *source, const char *variables)
{
    struct jinja_output output;
    struct imbrex_error err;
    if (jinja_check_run(source, variables, NULL, &output, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s: %s", source, err.message);
    }
    return output;
}

void jinja_check_text(const char *source, const char *variables, const char *expected)
{
    struct jinja_output output = render(source, variables);
    if (strlen(expected) != output.num_bytes || strcmp(output.text, expected) != 0) {
        fail_msg("%s\nexpected: %s\nfound:    %s", source, expected, output.text);
    }
    jinja_output_release(&output);
}

void jinja_check_marks(const char *source, const char *variables, const char *expected)
{
    struct jinja_output output = render(source, variables);
    char *marked = malloc(output.num_bytes + 2 * output.num_spans + 1);
    size_t used = 0, end = 0;
    assert_non_null(marked);
    for (size_t i = 0; i < output.num_spans; i++) {
        const struct jinja_span *span = &output.spans[i];
        assert_int_equal(span->begin, end);
        assert_true(span->end > span->begin);
        marked[used] = '[';
        used += span->is_input;
        memcpy(marked + used, output.text + span->begin, span->end - span->begin);
        used += span->end - span->begin;
        marked[used] = ']';
        used += span->is_input;
        end = span->end;
    }
    assert_int_equal(end, output.num_bytes);
    marked[used] = '\0';
    if (strcmp(marked, expected) != 0) {
        fail_msg("%s\nexpected: %s\nfound:    %s", source, expected, marked);
    }
    free(marked);
    jinja_output_release(&output);
}

void jinja_check_error(const char *source, const char *variables,
                       const struct jinja_options *options, enum imbrex_status expected_status,
                       const char *expected_message)
{
    struct jinja_output output = {0};
    struct imbrex_error err = {.message = ""};
    enum imbrex_status status = jinja_check_run(source, variables, options, &output, &err);
    if (status != expected_status || strcmp(err.message, expected_message) != 0) {
        fail_msg("%.200s\nexpected: %s %s\nfound:    %s %s", source,
                 imbrex_status_name(expected_status), expected_message, imbrex_status_name(status),
                 err.message);
    }
    assert_null(output.text);
}
