/* SPDX-License-Identifier: Apache-2.0 */
/* A chat template parsed and rendered with every single request for memory refused in turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "fault.h"
#include "jinja/jinja.h"

/* A bit of everything that takes memory: long strings, lists, dicts, generators, macros, loops. */
static const char source[] =
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{% set big = 'ab' * 300000 %}{% set ns = namespace(s='', l=[]) %}"
    "{% for i in range(500) if i is odd %}{% set ns.s = ns.s ~ i ~ big[:i] %}"
    "{% set ns.l = ns.l + [{'k': i, 'v': loop.length}] %}{% endfor %}"
    "{{ ns.s|upper|length }}{{ ns.l|map(attribute='k')|select('gt', 300)|list|tojson }}"
    "{{ ns.l|sort(attribute='k', reverse=true)|map('tojson')|join('\\n')|indent }}"
    "{{ m(1, 2, 3, z=big|length) }}{{ messages|tojson(indent=2) }}{{ big|replace('a', 'c')|length "
    "}}";

struct life {
    const json_t *variables;
    size_t num_bytes; /* of what was rendered */
};

static enum imbrex_status live(void *arg)
{
    struct life *life = arg;
    struct jinja_template *template = NULL;
    struct jinja_output output = {0};
    struct imbrex_error err = {.message = ""};
    enum imbrex_status status = jinja_template_parse("t", source, strlen(source), &template, &err);
    if (status == IMBREX_STATUS_OK) {
        status = jinja_template_render(template, life->variables, NULL, &output, &err);
    }
    assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
    life->num_bytes = output.num_bytes;
    jinja_output_release(&output);
    jinja_template_destroy(template);
    return status;
}

static void fail_each(bool is_lasting)
{
    json_t *variables = json_pack("{s:[{s:s, s:s}]}", "messages", "role", "user", "content", "hi");
    struct life whole = {variables, 0}, last = {variables, 0};
    assert_int_equal(live(&whole), IMBREX_STATUS_OK);
    assert_true(
        fault_each_call(FAULT_MEMORY, is_lasting, IMBREX_STATUS_OUT_OF_MEMORY, live, &last) > 20);
    assert_int_equal(last.num_bytes, whole.num_bytes);
    json_decref(variables);
}

/* Catches: an unchecked allocation, a leak on a failure path, lack of memory taken for a limit. */
static void test_each_allocation(void **state)
{
    (void)state;
    fail_each(false);
}

/* Catches: error paths that themselves need memory. */
static void test_all_allocations_from_each(void **state)
{
    (void)state;
    fail_each(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation),
        cmocka_unit_test(test_all_allocations_from_each),
    };
    return cmocka_run_group_tests_name("fault_jinja", tests, NULL, NULL);
}
