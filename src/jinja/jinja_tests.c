/* SPDX-License-Identifier: Apache-2.0 */
/* What can stand behind `is`. */
#include <string.h>

#include "jinja/jinja_render.h"

enum kind_test {
    TEST_DEFINED,
    TEST_UNDEFINED,
    TEST_NONE,
    TEST_BOOLEAN,
    TEST_TRUE,
    TEST_FALSE,
    TEST_INTEGER,
    TEST_FLOAT,
    TEST_NUMBER,
    TEST_STRING,
    TEST_MAPPING,
    TEST_SEQUENCE,
    TEST_ITERABLE,
    TEST_CALLABLE,
    TEST_ESCAPED,
};

static bool is_sequence(const struct jinja_value *value)
{
    return value->kind == JINJA_UNDEFINED || value->kind == JINJA_STRING ||
           value->kind == JINJA_DICT || value->kind == JINJA_RANGE || jinja_is_sequence(value);
}

static bool is_callable(const struct jinja_value *value)
{
    return value->kind == JINJA_UNDEFINED || value->kind == JINJA_MACRO ||
           value->kind == JINJA_FUNCTION || value->kind == JINJA_METHOD ||
           value->kind == JINJA_JOINER || value->kind == JINJA_LOOP;
}

static enum imbrex_status test_kind(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    const struct jinja_value *value = &call->self;
    bool is_number =
        value->kind == JINJA_INT || value->kind == JINJA_FLOAT || value->kind == JINJA_BOOL;
    bool holds = false;
    (void)render;
    switch ((enum kind_test)call->entry->variant) {
    case TEST_DEFINED:
        holds = value->kind != JINJA_UNDEFINED;
        break;
    case TEST_UNDEFINED:
        holds = value->kind == JINJA_UNDEFINED;
        break;
    case TEST_NONE:
        holds = value->kind == JINJA_NONE;
        break;
    case TEST_BOOLEAN:
        holds = value->kind == JINJA_BOOL;
        break;
    case TEST_TRUE:
        holds = value->kind == JINJA_BOOL && value->as.boolean;
        break;
    case TEST_FALSE:
        holds = value->kind == JINJA_BOOL && !value->as.boolean;
        break;
    case TEST_INTEGER:
        holds = value->kind == JINJA_INT;
        break;
    case TEST_FLOAT:
        holds = value->kind == JINJA_FLOAT;
        break;
    case TEST_NUMBER:
        holds = is_number;
        break;
    case TEST_STRING:
        holds = value->kind == JINJA_STRING;
        break;
    case TEST_MAPPING:
        holds = value->kind == JINJA_DICT;
        break;
    case TEST_SEQUENCE:
        holds = is_sequence(value);
        break;
    case TEST_ITERABLE:
        holds = jinja_is_iterable(value);
        break;
    case TEST_CALLABLE:
        holds = is_callable(value);
        break;
    case TEST_ESCAPED:
        holds = value->kind == JINJA_STRING && value->as.string->is_markup;
        break;
    }
    *result = jinja_bool(holds);
    return IMBREX_STATUS_OK;
}

/* value % divisor == remainder */
static enum imbrex_status has_remainder(struct jinja_render *render,
                                        const struct jinja_value *value,
                                        const struct jinja_value *divisor, int64_t remainder,
                                        struct jinja_value *result)
{
    struct jinja_value found, expected = jinja_int(remainder);
    bool holds;
    TRY(jinja_arithmetic(render, JINJA_OP_MOD, value, divisor, &found));
    TRY(jinja_equal(render, &found, &expected, &holds));
    *result = jinja_bool(holds);
    return IMBREX_STATUS_OK;
}

/* odd and even; variant: the remainder by 2 */
static enum imbrex_status test_parity(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    struct jinja_value two = jinja_int(2);
    return has_remainder(render, &call->self, &two, call->entry->variant, result);
}

static enum imbrex_status test_divisibleby(struct jinja_render *render,
                                           const struct jinja_call *call,
                                           struct jinja_value *result)
{
    return has_remainder(render, &call->self, &call->args[0], 0, result);
}

static enum imbrex_status test_compare(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    static const char *const symbols[] = {"<", "<=", ">", ">="};
    enum jinja_operator op = (enum jinja_operator)call->entry->variant;
    bool holds;
    int order;
    if (op == JINJA_OP_EQ || op == JINJA_OP_NE) {
        TRY(jinja_equal(render, &call->self, &call->args[0], &holds));
        *result = jinja_bool(holds == (op == JINJA_OP_EQ));
        return IMBREX_STATUS_OK;
    }
    TRY(jinja_order(render, &call->self, &call->args[0], symbols[op - JINJA_OP_LT], &order));
    *result = jinja_bool(op == JINJA_OP_LT   ? order < 0
                         : op == JINJA_OP_LE ? order <= 0
                         : op == JINJA_OP_GT ? order > 0
                                             : order >= 0);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status test_in(struct jinja_render *render, const struct jinja_call *call,
                                  struct jinja_value *result)
{
    bool holds;
    TRY(jinja_contains(render, &call->args[0], &call->self, &holds));
    *result = jinja_bool(holds);
    return IMBREX_STATUS_OK;
}

/* Identity; numbers and strings, which Python may or may not share, are the same if they are equal
 * and of one type. */
static enum imbrex_status test_sameas(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    const struct jinja_value *a = &call->self, *b = &call->args[0];
    bool holds = a->kind == b->kind;
    if (holds && (a->kind == JINJA_LIST || a->kind == JINJA_DICT)) {
        holds = a->as.dict == b->as.dict;
    } else if (holds) {
        TRY(jinja_equal(render, a, b, &holds));
    }
    *result = jinja_bool(holds);
    return IMBREX_STATUS_OK;
}

/* lower and upper; variant: is_upper */
static enum imbrex_status test_case(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    const struct jinja_string *string;
    TRY(jinja_to_string(render, &call->self, &string));
    TRY(jinja_charge_bytes(render, string->num_bytes));
    *result = jinja_bool(jinja_string_has_case(string, call->entry->variant != 0));
    return IMBREX_STATUS_OK;
}

/* filter and test: whether there is one of the name; variant: is_test */
static enum imbrex_status test_entry(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    const struct jinja_string *name;
    TRY(jinja_to_string(render, &call->self, &name));
    const struct jinja_entry_point *entry = call->entry->variant != 0
                                                ? jinja_test_find(name->bytes, name->num_bytes)
                                                : jinja_filter_find(name->bytes, name->num_bytes);
    *result = jinja_bool(entry != NULL && entry->function != NULL);
    return IMBREX_STATUS_OK;
}

static const struct jinja_entry_point tests[] = {
    {"!=", test_compare, "other", 1, JINJA_OP_NE, false},
    {"<", test_compare, "other", 1, JINJA_OP_LT, false},
    {"<=", test_compare, "other", 1, JINJA_OP_LE, false},
    {"==", test_compare, "other", 1, JINJA_OP_EQ, false},
    {">", test_compare, "other", 1, JINJA_OP_GT, false},
    {">=", test_compare, "other", 1, JINJA_OP_GE, false},
    {"boolean", test_kind, "", 0, TEST_BOOLEAN, false},
    {"callable", test_kind, "", 0, TEST_CALLABLE, false},
    {"defined", test_kind, "", 0, TEST_DEFINED, false},
    {"divisibleby", test_divisibleby, "num", 1, 0, false},
    {"eq", test_compare, "other", 1, JINJA_OP_EQ, false},
    {"equalto", test_compare, "other", 1, JINJA_OP_EQ, false},
    {"escaped", test_kind, "", 0, TEST_ESCAPED, false},
    {"even", test_parity, "", 0, 0, false},
    {"false", test_kind, "", 0, TEST_FALSE, false},
    {"filter", test_entry, "", 0, 0, false},
    {"float", test_kind, "", 0, TEST_FLOAT, false},
    {"ge", test_compare, "other", 1, JINJA_OP_GE, false},
    {"greaterthan", test_compare, "other", 1, JINJA_OP_GT, false},
    {"gt", test_compare, "other", 1, JINJA_OP_GT, false},
    {"in", test_in, "seq", 1, 0, false},
    {"integer", test_kind, "", 0, TEST_INTEGER, false},
    {"iterable", test_kind, "", 0, TEST_ITERABLE, false},
    {"le", test_compare, "other", 1, JINJA_OP_LE, false},
    {"lessthan", test_compare, "other", 1, JINJA_OP_LT, false},
    {"lower", test_case, "", 0, 0, false},
    {"lt", test_compare, "other", 1, JINJA_OP_LT, false},
    {"mapping", test_kind, "", 0, TEST_MAPPING, false},
    {"ne", test_compare, "other", 1, JINJA_OP_NE, false},
    {"none", test_kind, "", 0, TEST_NONE, false},
    {"number", test_kind, "", 0, TEST_NUMBER, false},
    {"odd", test_parity, "", 0, 1, false},
    {"sameas", test_sameas, "other", 1, 0, false},
    {"sequence", test_kind, "", 0, TEST_SEQUENCE, false},
    {"string", test_kind, "", 0, TEST_STRING, false},
    {"test", test_entry, "", 0, 1, false},
    {"true", test_kind, "", 0, TEST_TRUE, false},
    {"undefined", test_kind, "", 0, TEST_UNDEFINED, false},
    {"upper", test_case, "", 0, 1, false},
};

const struct jinja_entry_point *jinja_test_find(const char *name, size_t num_bytes)
{
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        if (strlen(tests[i].name) == num_bytes && memcmp(tests[i].name, name, num_bytes) == 0) {
            return &tests[i];
        }
    }
    return NULL;
}
