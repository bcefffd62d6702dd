/* SPDX-License-Identifier: Apache-2.0 */
/* Renders as a whole: errors with their line, limits against hostile templates, what the caller
 * passes and gets. The language itself is tested by tests/golden/golden_chat_templates.c. */
#include "jinja_check.h"

#include <stdlib.h>
#include <string.h>

struct error_case {
    const char *source;
    enum imbrex_status status;
    const char *message;
};

/* Catches: an error with the wrong line, another status than promised, or a message that does not
 * say what Python would. */
static void test_errors(void **state)
{
    (void)state;
    static const struct error_case cases[] = {
        {"a\n{{ raise_exception('no ' ~ x) }}", IMBREX_STATUS_INVALID_ARGUMENT, "t:2: no 5"},
        {"{{ 1 }}\n{{ x + 'a' }}", IMBREX_STATUS_FORMAT,
         "t:2: unsupported operand type(s) for +: 'int' and 'str'"},
        {"{{ 'a' + d }}", IMBREX_STATUS_FORMAT,
         "t:1: can only concatenate str (not \"dict\") to str"},
        {"{{ nope.a }}", IMBREX_STATUS_FORMAT, "t:1: 'nope' is undefined"},
        {"{{ d.a.b }}", IMBREX_STATUS_FORMAT, "t:1: 'dict object' has no attribute 'a'"},
        {"{{ d['a'].b }}", IMBREX_STATUS_FORMAT, "t:1: 'dict object' has no attribute 'a'"},
        {"{{ l[9].b }}", IMBREX_STATUS_FORMAT, "t:1: list object has no element 9"},
        {"{{ none.a.b }}", IMBREX_STATUS_FORMAT, "t:1: 'None' has no attribute 'a'"},
        {"{{ nope() }}", IMBREX_STATUS_FORMAT, "t:1: 'nope' is undefined"},
        {"{{ x() }}", IMBREX_STATUS_FORMAT, "t:1: 'int' object is not callable"},
        {"{{ l.append(1) }}", IMBREX_STATUS_FORMAT,
         "t:1: access to attribute 'append' of 'list' object is unsafe."},
        {"{% for a, b in l %}{% endfor %}", IMBREX_STATUS_FORMAT,
         "t:1: 'int' object is not iterable"},
        {"{% for a, b in [l] %}{% endfor %}", IMBREX_STATUS_FORMAT,
         "t:1: too many values to unpack (expected 2)"},
        {"{{ 1 // 0 }}", IMBREX_STATUS_FORMAT, "t:1: division by zero"},
        {"{{ l|join(',', foo=1) }}", IMBREX_STATUS_FORMAT,
         "t:1: the filter 'join' got an unexpected keyword argument 'foo'"},
        {"{{ l|replace('a') }}", IMBREX_STATUS_FORMAT,
         "t:1: the filter 'replace' misses a required argument (old,new,count)"},
        {"{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", IMBREX_STATUS_FORMAT,
         "t:1: macro 'm' takes not more than 1 argument(s)"},
        {"{{ l|map('abs')|list + d|items|list + (l|map('first')|list) }}", IMBREX_STATUS_FORMAT,
         "t:1: 'int' object is not iterable"},
        {"{{ (d, 1)|tojson }}{{ range(2)|tojson }}", IMBREX_STATUS_FORMAT,
         "t:1: Object of type range is not JSON serializable"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        jinja_check_error(cases[i].source, "{\"x\": 5, \"d\": {}, \"l\": [3, 1, 2]}", NULL,
                          cases[i].status, cases[i].message);
    }
}

/* Catches: an error that is kept for a generator nobody reads, but reported anyway, or lost when
 * somebody does. */
static void test_lazy_errors(void **state)
{
    (void)state;
    struct imbrex_error err = {.status = IMBREX_STATUS_OK, .message = "untouched"};
    struct jinja_output output;
    assert_int_equal(jinja_check_run("{% set g = [1, 'a', 2]|map('abs') %}{{ g|first }}", "{}",
                                     NULL, &output, &err),
                     IMBREX_STATUS_OK);
    assert_string_equal(output.text, "1");
    assert_string_equal(err.message, "untouched");
    jinja_output_release(&output);
    jinja_check_error("{% set g = [1, 'a', 2]|map('abs') %}\n{{ g|list }}", "{}", NULL,
                      IMBREX_STATUS_FORMAT, "t:1: the filter 'abs' expects a number, found str");
    assert_int_equal(jinja_check_run("{{ ['a']|map('abs')|list }}", "{}", NULL, &output, NULL),
                     IMBREX_STATUS_FORMAT);
}

/* Catches: templates that take minutes or gigabytes, or overflow the stack. Every one must end with
 * CAPACITY under the default limits. Left out under ThreadSanitizer, where 50 million steps take
 * minutes and no second thread is there to race with. */
static void test_bombs(void **state)
{
    (void)state;
#if defined(__SANITIZE_THREAD__)
    skip();
#endif
    static const char *const sources[] = {
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% macro m() %}{% call m() %}{% endcall %}{{ caller }}{% endmacro %}{{ m() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ range(-9223372036854775807, 9223372036854775807)|list }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 100000000000 }}",
        "{{ [0] * 100000000000 }}",
        "{{ 'a'|center(99999999999) }}",
        "{{ 'a'.ljust(9223372036854775807) }}",
        "{{ ''|indent(9223372036854775807, true) }}",
        "{{ [1]|tojson(indent=9223372036854775807) }}",
        "{{ '%9999999999d' % 5 }}",
        "{{ '%.9999999999f' % 5 }}",
        "{{ 10**10**10**10 }}",
        "{{ 9999999999 * 9999999999 }}",
        "{{ -9223372036854775807 - 2 }}",
        "{{ ('a' * 9999)|replace('', 'b' * 9999) }}",
        "{{ ('a\n' * 9999)|indent(99999) }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}"
        "{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
        "{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=[], m=[]) %}{% for i in range(9999) %}"
        "{% set ns.l = [ns.l] %}{% set ns.m = [ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
        "{% set ns = namespace(l=[], m=[]) %}{% for i in range(9999) %}"
        "{% set ns.l = [ns.l] %}{% set ns.m = [ns.m] %}{% endfor %}{{ ns.l < ns.m }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
        "{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l|tojson }}",
        "{% set ns = namespace() %}{% set ns.s = ns %}{{ ns }}",
        "{% for i in [[]] recursive %}{{ loop([[]]) }}{% endfor %}",
        "{% set ns = namespace(n=[1]) %}{% for i in ns.n recursive %}{{ loop(ns.n) }}{% endfor %}",
        "{{ 1" /* and more, below */,
        "{{ ('ab' * 100000).rfind('ba' * 40000 ~ 'c') }}{{ ('a' * 200000).rfind('a' * 100000) }}"
        "{% for i in range(9999) %}{{ ('a' * 200000).rfind('a' * 100000) }}{% endfor %}",
        "{% for i in range(99999) %}{{ ('a' * 99999).count('a') }}{% endfor %}",
        "{{ range(99999)|slice(9999999999)|list }}",
    };
    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
        struct jinja_output output;
        struct imbrex_error err = {.message = ""};
        char *source = strdup(sources[i]);
        if (strcmp(source, "{{ 1") == 0) { /* deep on the left: the parser does not recurse */
            free(source);
            source = malloc(50000);
            assert_non_null(source);
            memcpy(source, "{{ 1", 5);
            for (size_t j = 4; j < 40000; j += 2) {
                strcpy(source + j, "+1");
            }
            strcpy(source + 40000, " }}");
        }
        enum imbrex_status status = jinja_check_run(source, "{}", NULL, &output, &err);
        if (status != IMBREX_STATUS_CAPACITY) {
            fail_msg("%.100s: expected CAPACITY, found %s %s", source, imbrex_status_name(status),
                     err.message);
        }
        free(source);
    }
}

/* Catches: a limit that is not the one asked for. */
static void test_limits(void **state)
{
    (void)state;
    struct jinja_options options = jinja_options_default();
    struct jinja_output output;
    options.max_output_bytes = 10;
    assert_int_equal(jinja_check_run("{{ 'a' * 10 }}", "{}", &options, &output, NULL),
                     IMBREX_STATUS_OK);
    jinja_output_release(&output);
    jinja_check_error("{{ 'a' * 11 }}", "{}", &options, IMBREX_STATUS_CAPACITY,
                      "t:1: the output is longer than 10 bytes");
    jinja_check_error("aaaaaaaaaaa", "{}", &options, IMBREX_STATUS_CAPACITY,
                      "t:1: the output is longer than 10 bytes");

    options = jinja_options_default();
    options.max_steps = 1000;
    assert_int_equal(jinja_check_run("{% for i in range(50) %}{{ i }}{% endfor %}", "{}", &options,
                                     &output, NULL),
                     IMBREX_STATUS_OK);
    jinja_output_release(&output);
    jinja_check_error("{% for i in range(500) %}\n{{ i }}{% endfor %}", "{}", &options,
                      IMBREX_STATUS_CAPACITY, "t:2: more than 1000 steps");

    options = jinja_options_default();
    options.max_depth = 20;
    jinja_check_error("{{ [[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]] }}", "{}", &options,
                      IMBREX_STATUS_CAPACITY, "t:1: nested deeper than 20");
    jinja_check_error("{{ a }}", "{\"a\": [[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]}", &options,
                      IMBREX_STATUS_CAPACITY, "t:1: nested deeper than 20");
    options.max_depth = JINJA_MAX_DEPTH + 1;
    assert_int_equal(jinja_check_run("a", "{}", &options, &output, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);

    options = jinja_options_default();
    options.max_memory_bytes = 100000;
    jinja_check_error("{{ ('a' * 60000)|upper }}", "{}", &options, IMBREX_STATUS_CAPACITY,
                      "t:1: the values need more than 100000 bytes");
}

/* Catches: a stack overflow at the largest depth that may be asked for. */
static void test_greatest_depth(void **state)
{
    (void)state;
    static const char *const sources[] = {
        "{% macro m(n) %}{% if true %}{{ m(n + 1)|upper|trim }}{% endif %}{% endmacro %}{{ m(0) }}",
        "{% macro m(n) %}{% for i in [1] %}{% filter upper %}{{ [m(n)] }}{% endfilter %}{% endfor "
        "%}"
        "{% endmacro %}{{ m(0) }}",
        "{% macro m(n) %}{{ [1]|map('replace', '1', m(n))|list }}{% endmacro %}{{ m(0) }}",
    };
    struct jinja_options options = jinja_options_default();
    options.max_depth = JINJA_MAX_DEPTH;
    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++) {
        jinja_check_error(sources[i], "{}", &options, IMBREX_STATUS_CAPACITY,
                          "t:1: nested deeper than 1000");
    }
}

/* Catches: dates that are wrong by a day in leap years, before 1970 or at a century's end. */
static void test_dates(void **state)
{
    (void)state;
    static const struct {
        int64_t now;
        const char *format, *expected;
    } cases[] = {
        {0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001"},
        {1767225600, "%B %d, %Y", "January 01, 2026"},
        {1709164800, "%d %b %Y %a %j", "29 Feb 2024 Thu 060"},
        {1709251199, "%F %T %p %I", "2024-02-29 23:59:59 PM 11"},
        {951782400, "%F %u %w", "2000-02-29 2 2"},
        {4107542399, "%F %R", "2100-02-28 23:59"},
        {4107542400, "%F", "2100-03-01"},
        {-1, "%F %T", "1969-12-31 23:59:59"},
        {1735689599, "%j %y %D %-d %e %-m", "366 24 12/31/24 31 31 12"},
        {1736208000, "%-d %e|%d %%", "7  7|07 %"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct jinja_options options = jinja_options_default();
        struct jinja_output output;
        char source[128];
        options.now = cases[i].now;
        snprintf(source, sizeof(source), "{{ strftime_now('%s') }}", cases[i].format);
        assert_int_equal(jinja_check_run(source, "{}", &options, &output, NULL), IMBREX_STATUS_OK);
        assert_string_equal(output.text, cases[i].expected);
        jinja_output_release(&output);
    }
}

/* Catches: state that one render leaves behind for the next one of the same template. */
static void test_renders_are_independent(void **state)
{
    (void)state;
    static const char source[] = "{% set n = n + 1 %}{{ n }}{% set ns = namespace(a=n) %}"
                                 "{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}"
                                 "{{ ns.a }}{{ seen is defined }}{% set seen = true %}";
    struct jinja_template *template;
    json_t *variables = json_pack("{s:i}", "n", 1);
    assert_int_equal(jinja_template_parse("t", source, strlen(source), &template, NULL),
                     IMBREX_STATUS_OK);
    for (int i = 0; i < 3; i++) {
        struct jinja_output output;
        assert_int_equal(jinja_template_render(template, variables, NULL, &output, NULL),
                         IMBREX_STATUS_OK);
        assert_string_equal(output.text, "25False");
        jinja_output_release(&output);
    }
    json_decref(variables);
    jinja_template_destroy(template);
}

/* Catches: bytes of zero that end a text, in templates, variables and the output. */
static void test_zero_bytes(void **state)
{
    (void)state;
    static const char source[] = "a\0{{ x }}{{ x|length }}{{ x|upper|tojson }}";
    struct jinja_template *template;
    struct jinja_output output;
    json_t *variables = json_object();
    json_object_set_new(variables, "x", json_stringn("b\0c", 3));
    assert_int_equal(jinja_template_parse("t", source, sizeof(source) - 1, &template, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(jinja_template_render(template, variables, NULL, &output, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(output.num_bytes, 16);
    assert_memory_equal(output.text, "a\0b\0c3\"B\\u0000C\"", 17);
    jinja_output_release(&output);
    json_decref(variables);
    jinja_template_destroy(template);
}

/* Catches: results touched on failure, arguments not checked, an empty output without a text. */
static void test_contract(void **state)
{
    (void)state;
    struct jinja_template *template = NULL;
    struct jinja_output output = {.num_bytes = 7};
    json_t *array = json_array(), *object = json_object();
    assert_int_equal(jinja_template_parse("t", NULL, 0, &template, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(jinja_template_parse("t", "{{", 2, &template, NULL), IMBREX_STATUS_FORMAT);
    assert_null(template);
    assert_int_equal(jinja_template_parse("t", "", 0, &template, NULL), IMBREX_STATUS_OK);
    assert_int_equal(jinja_template_render(template, array, NULL, &output, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(jinja_template_render(template, NULL, NULL, &output, NULL),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(output.num_bytes, 7);
    assert_int_equal(jinja_template_render(template, object, NULL, &output, NULL),
                     IMBREX_STATUS_OK);
    assert_string_equal(output.text, "");
    assert_int_equal(output.num_spans, 0);
    jinja_output_release(&output);
    assert_null(output.text);
    jinja_output_release(&output);
    jinja_output_release(NULL);
    jinja_template_destroy(template);
    jinja_template_destroy(NULL);
    json_decref(array);
    json_decref(object);
}

/* Catches: keys chosen to collide, or merely many, that make a dict's look-ups walk it. */
static void test_large_dicts(void **state)
{
    (void)state;
    struct jinja_options options = jinja_options_default();
    struct jinja_template *template;
    struct jinja_output output;
    static const char source[] = "{{ d|length }}{{ d.k77777 }}{{ 'nope' in d }}"
                                 "{% for k, v in d|dictsort(by='value') %}{% if loop.last %}{{ k }}"
                                 "{% endif %}{% endfor %}";
    json_t *dict = json_object(), *variables = json_pack("{s:o}", "d", dict);
    for (int i = 0; i < 100000; i++) {
        char key[16];
        snprintf(key, sizeof(key), "k%d", i);
        json_object_set_new(dict, key, json_integer(i));
    }
    options.max_steps = 10 * 1000 * 1000;
    assert_int_equal(jinja_template_parse("t", source, strlen(source), &template, NULL),
                     IMBREX_STATUS_OK);
    assert_int_equal(jinja_template_render(template, variables, &options, &output, NULL),
                     IMBREX_STATUS_OK);
    assert_string_equal(output.text, "10000077777Falsek99999");
    jinja_output_release(&output);
    jinja_template_destroy(template);
    json_decref(variables);
}

int run_jinja_render_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_lazy_errors),
        cmocka_unit_test(test_bombs),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_greatest_depth),
        cmocka_unit_test(test_dates),
        cmocka_unit_test(test_renders_are_independent),
        cmocka_unit_test(test_zero_bytes),
        cmocka_unit_test(test_contract),
        cmocka_unit_test(test_large_dicts),
    };
    return cmocka_run_group_tests_name("jinja_render", tests, NULL, NULL);
}
