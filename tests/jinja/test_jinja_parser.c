/* SPDX-License-Identifier: Apache-2.0 */
/* What is refused before anything is rendered: bad syntax with its line, and what imbrex does not
 * have, by name. */
#include "jinja_check.h"

#include <stdlib.h>
#include <string.h>

struct error_case {
    const char *source;
    enum imbrex_status status;
    const char *message;
};

/* Catches: a message that names another place or thing than the one at fault. */
static void test_syntax(void **state)
{
    (void)state;
    static const struct error_case cases[] = {
        {"a\n{{ }}", IMBREX_STATUS_FORMAT, "t:2: expected an expression, found the end of a tag"},
        {"{{ x", IMBREX_STATUS_FORMAT, "t:1: expected '}}', found the end of the template"},
        {"{{ x y }}", IMBREX_STATUS_FORMAT, "t:1: expected '}}', found 'y'"},
        {"\n\n{% if x %}\na", IMBREX_STATUS_FORMAT,
         "t:4: expected the tag 'endif' of the block that begins in line 3, found the end of the "
         "template"},
        {"{% endif %}", IMBREX_STATUS_FORMAT, "t:1: the tag 'endif' does not belong here"},
        {"{{ (x] }}", IMBREX_STATUS_FORMAT, "t:1: ']' does not match an opening bracket"},
        {"{{ x) }}", IMBREX_STATUS_FORMAT, "t:1: ')' does not match an opening bracket"},
        {"{{ 'a }}", IMBREX_STATUS_FORMAT, "t:1: a string without its closing quote"},
        {"a\n{# b\n", IMBREX_STATUS_FORMAT, "t:2: a comment without its end"},
        {"{% raw %}\na", IMBREX_STATUS_FORMAT, "t:1: {% raw %} without its {% endraw %}"},
        {"{{ a ? b }}", IMBREX_STATUS_FORMAT, "t:1: unexpected character '?' in a tag"},
        {"{{ \xc3\xa9 }}", IMBREX_STATUS_FORMAT, "t:1: unexpected character '\xc3\xa9' in a tag"},
        {"{% for loop in x %}{% endfor %}", IMBREX_STATUS_FORMAT,
         "t:1: a for loop cannot assign to its special variable 'loop'"},
        {"{% set 1 = 2 %}", IMBREX_STATUS_FORMAT,
         "t:1: expected a name to assign to, found a value"},
        {"{% break %}", IMBREX_STATUS_FORMAT, "t:1: break outside of a loop"},
        {"{% for i in x %}{% macro m() %}{% continue %}{% endmacro %}{% endfor %}",
         IMBREX_STATUS_FORMAT, "t:1: continue outside of a loop"},
        {"{% macro m(a=1, b) %}{% endmacro %}", IMBREX_STATUS_FORMAT,
         "t:1: a parameter without a default behind one that has one"},
        {"{{ f(a=1, 2) }}", IMBREX_STATUS_FORMAT,
         "t:1: an argument stands behind one that must come later"},
        {"{{ '\\ud800' }}", IMBREX_STATUS_FORMAT, "t:1: the escape \\ud800 is not a character"},
        {"{{ x is string is string }}", IMBREX_STATUS_FORMAT,
         "t:1: expected an operator: tests cannot be chained, found 'is'"},
        {"\xff", IMBREX_STATUS_FORMAT, "t: byte 0 is not valid UTF-8"},
        {"{{ 9223372036854775808 }}", IMBREX_STATUS_CAPACITY,
         "t:1: the integer 9223372036854775808 does not fit 64 bits"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        jinja_check_error(cases[i].source, "{}", NULL, cases[i].status, cases[i].message);
    }
}

/* Catches: something unsupported that is only noticed when it is reached, or without its name. */
static void test_refused_by_name(void **state)
{
    (void)state;
    static const char *const tags[] = {"include", "import",     "from",  "extends", "block",
                                       "do",      "autoescape", "trans", "debug",   "print"};
    static const char *const filters[] = {"random",         "xmlattr",   "urlize",
                                          "urlencode",      "wordwrap",  "pprint",
                                          "filesizeformat", "striptags", "attr"};
    char source[128], message[128];
    for (size_t i = 0; i < sizeof(tags) / sizeof(tags[0]); i++) {
        snprintf(source, sizeof(source), "{%% if false %%}\n{%% %s 'x' %%}{%% endif %%}", tags[i]);
        snprintf(message, sizeof(message), "t:2: the tag '%s' is not supported", tags[i]);
        jinja_check_error(source, "{}", NULL, IMBREX_STATUS_UNSUPPORTED, message);
    }
    for (size_t i = 0; i < sizeof(filters) / sizeof(filters[0]); i++) {
        snprintf(source, sizeof(source), "\n\n{{ x|%s if false }}", filters[i]);
        snprintf(message, sizeof(message), "t:3: the filter '%s' is not supported", filters[i]);
        jinja_check_error(source, "{}", NULL, IMBREX_STATUS_UNSUPPORTED, message);
    }
    static const struct error_case cases[] = {
        {"{% nosuch %}", IMBREX_STATUS_UNSUPPORTED, "t:1: there is no tag 'nosuch'"},
        {"{{ x|nosuch }}", IMBREX_STATUS_UNSUPPORTED, "t:1: there is no filter 'nosuch'"},
        {"{{ x is nosuch }}", IMBREX_STATUS_UNSUPPORTED, "t:1: there is no test 'nosuch'"},
        {"{{ x|map('nosuch') }}", IMBREX_STATUS_UNSUPPORTED, "t:1: there is no filter 'nosuch'"},
        {"{{ x|selectattr('a', 'nosuch') }}", IMBREX_STATUS_UNSUPPORTED,
         "t:1: there is no test 'nosuch'"},
        {"{{ x|map('random') }}", IMBREX_STATUS_UNSUPPORTED,
         "t:1: the filter 'random' is not supported"},
        {"{{ '\\N{DASH}' }}", IMBREX_STATUS_UNSUPPORTED,
         "t:1: the escape \\N{...} is not supported"},
        {"{{ ''.format() }}", IMBREX_STATUS_UNSUPPORTED,
         "t:1: the method 'format' is not supported"},
        {"{{ lipsum() }}", IMBREX_STATUS_UNSUPPORTED,
         "t:1: the function 'lipsum' is not supported"},
        {"{{ '%b' % 1 }}", IMBREX_STATUS_UNSUPPORTED,
         "t:1: the format directive '%b' is not supported"},
        {"{{ strftime_now('%Q') }}", IMBREX_STATUS_UNSUPPORTED,
         "t:1: the date directive '%Q' is not supported"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        jinja_check_error(cases[i].source, "{}", NULL, cases[i].status, cases[i].message);
    }
}

/* Source of num_repeats times `open`, then `middle`, then as often `close`. */
static char *nest(const char *open, const char *middle, const char *close, size_t num_repeats)
{
    size_t open_bytes = strlen(open), close_bytes = strlen(close);
    char *source = malloc(num_repeats * (open_bytes + close_bytes) + strlen(middle) + 1);
    char *next = source;
    assert_non_null(source);
    for (size_t i = 0; i < num_repeats; i++, next += open_bytes) {
        memcpy(next, open, open_bytes);
    }
    memcpy(next, middle, strlen(middle));
    next += strlen(middle);
    for (size_t i = 0; i < num_repeats; i++, next += close_bytes) {
        memcpy(next, close, close_bytes);
    }
    *next = '\0';
    return source;
}

/* Catches: recursion of the parser without a limit, on every way down, and one so low that
 * templates in use would not pass. */
static void test_nesting(void **state)
{
    (void)state;
    static const struct {
        const char *before, *open, *middle, *close, *after;
    } cases[] = {
        {"{{ ", "(", "x", ")", " }}"},
        {"{{ ", "[", "x", "]", " }}"},
        {"{{ ", "not ", "x", "", " }}"},
        {"{{ ", "-", "x", "", " }}"},
        {"{{ ", "x[", "x", "]", " }}"},
        {"{{ ", "x if x else ", "x", "", " }}"},
        {"{{ ", "{1:", "x", "}", " }}"},
        {"{{ ", "x(", "x", ")", " }}"},
        {"", "{% if x %}", "x", "{% endif %}", ""},
        {"", "{% for i in x %}", "x", "{% endfor %}", ""},
        {"", "{% macro m() %}", "x", "{% endmacro %}", ""},
        {"{% set ", "(", "x", ",)", " = 1 %}"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (int is_deep = 0; is_deep < 2; is_deep++) {
            char *nested =
                nest(cases[i].open, cases[i].middle, cases[i].close, is_deep != 0 ? 20000 : 30);
            size_t num_bytes = strlen(nested) + 64;
            char *source = malloc(num_bytes);
            struct jinja_template *template = NULL;
            assert_non_null(source);
            snprintf(source, num_bytes, "%s%s%s", cases[i].before, nested, cases[i].after);
            enum imbrex_status status =
                jinja_template_parse("t", source, strlen(source), &template, NULL);
            assert_int_equal(status, is_deep != 0 ? IMBREX_STATUS_CAPACITY : IMBREX_STATUS_OK);
            jinja_template_destroy(template);
            free(source);
            free(nested);
        }
    }
}

/* Catches: memory of a parse that is not in proportion to the source, and a limit on it that a real
 * template of the same density would meet. */
static void test_dense_sources(void **state)
{
    (void)state;
    static const char *const pieces[] = {
        "{{x}}",  "{%if x%}{%endif%}", "{{x+x*x}}", "{#a#}",
        "a{{x}}", "{{[x,x,x]}}",       "{{x|e}}",   "{{x is odd}}"};
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        struct jinja_template *template = NULL;
        struct imbrex_error err = {.message = ""};
        char *source = nest(pieces[i], "", "", 20000);
        if (jinja_template_parse("t", source, strlen(source), &template, &err) !=
            IMBREX_STATUS_OK) {
            fail_msg("%s x 20000: %s", pieces[i], err.message);
        }
        jinja_template_destroy(template);
        free(source);
    }
    char *source = nest("a", "", "", JINJA_MAX_SOURCE_BYTES + 1);
    struct jinja_template *template = NULL;
    assert_int_equal(jinja_template_parse("t", source, JINJA_MAX_SOURCE_BYTES + 1, &template, NULL),
                     IMBREX_STATUS_CAPACITY);
    assert_null(template);
    free(source);
}

/* Catches: names compared one by one (a template of many names would take minutes). */
static void test_many_names(void **state)
{
    (void)state;
    struct jinja_template *template = NULL;
    size_t capacity = 50000 * 16, used = 0;
    char *source = malloc(capacity);
    assert_non_null(source);
    for (int i = 0; i < 50000; i++) {
        used += (size_t)snprintf(source + used, capacity - used, "{{n%d}}", i);
    }
    assert_int_equal(jinja_template_parse("t", source, used, &template, NULL), IMBREX_STATUS_OK);
    json_t *variables = json_pack("{s:s, s:i}", "n7", "seven", "n49999", 1);
    struct jinja_output output;
    assert_int_equal(jinja_template_render(template, variables, NULL, &output, NULL),
                     IMBREX_STATUS_OK);
    assert_string_equal(output.text, "seven1");
    jinja_output_release(&output);
    json_decref(variables);
    jinja_template_destroy(template);
    free(source);
}

int run_jinja_parser_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_syntax),     cmocka_unit_test(test_refused_by_name),
        cmocka_unit_test(test_nesting),    cmocka_unit_test(test_dense_sources),
        cmocka_unit_test(test_many_names),
    };
    return cmocka_run_group_tests_name("jinja_parser", tests, NULL, NULL);
}
