/* SPDX-License-Identifier: Apache-2.0 */
/* Which parts of a render are user input: here in [brackets]. The variable `messages` is input,
 * `bos` and `n` are not. */
#include "jinja_check.h"

#define VARIABLES                                                                             \
    "{\"messages\": [{\"role\": \"user\", \"content\": \" <s>\\u00c7a, va </s> \", \"n\": 5," \
    " \"tags\": [\"x\", \"y\"], \"extra\": {\"k\": \"v\", \"f\": 1.5}}], \"bos\": \"<s>\","   \
    " \"n\": 7}"
#define CONTENT "{% set c = messages[0].content %}"

struct mark_case {
    const char *source, *expected;
};

static void check_all(const struct mark_case *cases, size_t num_cases)
{
    for (size_t i = 0; i < num_cases; i++) {
        jinja_check_marks(cases[i].source, VARIABLES, cases[i].expected);
    }
}

#define CHECK_ALL(cases) check_all(cases, sizeof(cases) / sizeof((cases)[0]))

/* Catches: marks lost or spread when strings are joined. */
static void test_joining(void **state)
{
    (void)state;
    static const struct mark_case cases[] = {
        {"{{ bos }}{{ messages[0].role }}!", "<s>[user]!"},
        {"{{ bos + messages[0].role + '<s>' }}", "<s>[user]<s>"},
        {"{{ bos ~ messages[0].role ~ n ~ messages[0].n }}", "<s>[user]75"},
        {CONTENT "{{ c + c }}", "[ <s>Ça, va </s>  <s>Ça, va </s> ]"},
        {"{{ messages[0].tags|join('<s>') }}", "[x]<s>[y]"},
        {"{{ '-'.join(messages[0].tags) }}", "[x]-[y]"},
        {"{{ messages[0].role * 2 }}{{ '-' * 3 }}", "[useruser]---"},
        {"{% set a = messages[0].role ~ '|' %}{% set b = a ~ '1' %}{% set c = a ~ bos %}"
         "{{ a }},{{ b }},{{ c }}",
         "[user]|,[user]|1,[user]|<s>"},
        {"{% set a %}<{{ messages[0].role }}>{% endset %}{{ a }}", "<[user]>"},
        {"{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[0].role)|upper }}", "<[USER]>"},
        {"{% macro m() %}({{ caller() }}){% endmacro %}{% call m() %}{{ messages[0].role }}"
         "{% endcall %}",
         "([user])"},
        {"{{ '%s|%s'|format(bos, messages[0].role) }}", "<s>|[user]"},
        {"{{ '%6s|%.2s' % (messages[0].role, messages[0].role) }}", "  [user]|[us]"},
        {"{% filter upper %}a{{ messages[0].role }}{% endfilter %}", "A[USER]"},
    };
    CHECK_ALL(cases);
}

/* Catches: marks lost or shifted when strings are cut, trimmed or mapped character by character. */
static void test_parts(void **state)
{
    (void)state;
    static const struct mark_case cases[] = {
        {CONTENT "{{ c|trim }}", "[<s>Ça, va </s>]"},
        {CONTENT "{{ ('  ' ~ c ~ '. ')|trim }}", "[<s>Ça, va </s> ]."},
        {CONTENT "{{ c.strip().split(', ')[0] }}", "[<s>Ça]"},
        {CONTENT "{{ (bos ~ c)[2:6] }}", ">[ <s]"},
        {CONTENT "{{ (bos ~ c)[::-1] }}", "[ >s/< av ,aÇ>s< ]>s<"},
        {CONTENT "{{ (bos ~ c)[3] }}{{ (bos ~ c)[2] }}", "[ ]>"},
        {CONTENT "{{ (c ~ bos)|upper }}", "[ <S>ÇA, VA </S> ]<S>"},
        {"{{ ('straße' ~ messages[0].role)|upper }}", "STRASSE[USER]"},
        {"{{ ('a' ~ messages[0].role ~ 'b')|title }}", "A[user]b"},
        {"{% for x in bos ~ messages[0].role %}{{ x }}{% endfor %}", "<s>[user]"},
        {CONTENT "{{ c|replace('<s>', bos) }}", "[ ]<s>[Ça, va </s> ]"},
        {"{{ (messages[0].role ~ 'xux')|replace('u', '-') }}", "-[ser]x-x"},
        {"{{ ('x' ~ messages[0].role)|replace('', '.') }}", ".x.[u].[s].[e].[r]."},
        {CONTENT "{{ ('<' ~ c)|e }}", "&lt;[ &lt;s&gt;Ça, va &lt;/s&gt; ]"},
        {"{{ ('a\n' ~ messages[0].role)|indent(2, true) }}", "  a\n  [user]"},
        {"{{ messages[0].role|center(8) }}|", "  [user]  |"},
        {CONTENT "{{ (c ~ c ~ c ~ c)|truncate(6, true) }}", "[ <s]..."},
        {"{{ messages[0].role.partition('s')|join('|') }}", "[u]|[s]|[er]"},
        {CONTENT "{{ c.removeprefix(' <s>') }}", "[Ça, va </s> ]"},
    };
    CHECK_ALL(cases);
}

/* Catches: punctuation of printed input that is taken for the template's, or the reverse. */
static void test_containers(void **state)
{
    (void)state;
    static const struct mark_case cases[] = {
        {"{{ messages[0].tags|tojson }}", "[[\"x\", \"y\"]]"},
        {"{{ messages[0].extra|tojson }};", "[{\"k\": \"v\", \"f\": 1.5}];"},
        {"{{ messages[0].extra }}", "[{'k': 'v', 'f': 1.5}]"},
        {"{{ {'a': messages[0].role, 'b': 1}|tojson }}", "{\"a\": [\"user\"], \"b\": 1}"},
        {"{{ (messages[0].role, bos) }}", "(['user'], '<s>')"},
        {"{{ ('a\"' ~ messages[0].role ~ '\"b')|tojson }}", "\"a\\\"[user]\\\"b\""},
        {"{{ messages[0].tags[1:]|tojson }}", "[[\"y\"]]"},
        {"{{ messages[0].extra.keys()|list }}", "[['k', 'f']]"},
        {"{{ messages[0].extra|items|list }}", "[[('k', 'v'), ('f', 1.5)]]"},
        {"{{ messages[0].extra|tojson(indent=1) }}", "[{\n \"k\": \"v\",\n \"f\": 1.5\n}]"},
        {"{{ messages|length }}{{ messages[0].n }}{{ n }}", "157"},
    };
    CHECK_ALL(cases);
}

/* Catches: marks that take part in comparisons, keys or tests. */
static void test_comparing(void **state)
{
    (void)state;
    jinja_check_text("{{ messages[0].role == 'user' }}{{ 'se' in messages[0].role }}"
                     "{{ {'user': 1}[messages[0].role] }}{{ messages[0].role in ['user'] }}"
                     "{{ messages[0].role < 'v' }}{{ messages[0].role is eq 'user' }}",
                     VARIABLES, "TrueTrue1TrueTrueTrue");
}

/* Catches: names that are not honoured: every variable input, or none. */
static void test_input_names(void **state)
{
    (void)state;
    static const char *const names[] = {"bos"};
    struct jinja_options options = jinja_options_default();
    struct jinja_output output;
    options.input_names = names;
    options.num_input_names = 1;
    assert_int_equal(
        jinja_check_run("{{ bos }}{{ messages[0].role }}", VARIABLES, &options, &output, NULL),
        IMBREX_STATUS_OK);
    assert_int_equal(output.num_spans, 2);
    assert_true(output.spans[0].is_input);
    assert_int_equal(output.spans[0].end, 3);
    assert_false(output.spans[1].is_input);
    jinja_output_release(&output);
    options.num_input_names = 0;
    assert_int_equal(
        jinja_check_run("{{ bos }}{{ messages[0].role }}", VARIABLES, &options, &output, NULL),
        IMBREX_STATUS_OK);
    assert_int_equal(output.num_spans, 1);
    assert_false(output.spans[0].is_input);
    jinja_output_release(&output);
}

/* Catches: a long string built piece by piece that is copied at every step (the step limit), or
 * whose older versions change when it grows. */
static void test_growing(void **state)
{
    (void)state;
    struct jinja_options options = jinja_options_default();
    struct jinja_output output;
    struct imbrex_error err;
    options.max_memory_bytes = 64 << 20;
    enum imbrex_status status =
        jinja_check_run("{% set ns = namespace(s='', first='') %}{% for i in range(40000) %}"
                        "{% set ns.s = ns.s + 'x' + messages[0].role %}"
                        "{% if loop.index == 10 %}{% set ns.first = ns.s %}{% endif %}{% endfor %}"
                        "{{ ns.first }}|{{ ns.s|length }}",
                        VARIABLES, &options, &output, &err);
    if (status != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    assert_string_equal(output.text, "xuserxuserxuserxuserxuserxuserxuserxuserxuserxuser|200000");
    assert_int_equal(output.num_spans, 21);
    jinja_output_release(&output);
}

int run_jinja_string_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_joining),     cmocka_unit_test(test_parts),
        cmocka_unit_test(test_containers),  cmocka_unit_test(test_comparing),
        cmocka_unit_test(test_input_names), cmocka_unit_test(test_growing),
    };
    return cmocka_run_group_tests_name("jinja_string", tests, NULL, NULL);
}
