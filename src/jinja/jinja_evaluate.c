/* SPDX-License-Identifier: Apache-2.0 */
/* Expressions to values. Every node costs a step and a level of depth. */
#include <string.h>

#include "jinja/jinja_render.h"

static enum imbrex_status evaluate_name(struct jinja_render *render, const struct jinja_node *node,
                                        struct jinja_value *value)
{
    *value = jinja_lookup(render, node->name_id);
    if (value->kind != JINJA_MISSING) {
        return IMBREX_STATUS_OK;
    }
    return jinja_undefined_new(render, &(struct jinja_undefined){.name = node->text}, value);
}

static enum imbrex_status evaluate_items(struct jinja_render *render, const struct jinja_node *node,
                                         struct jinja_value *value)
{
    struct jinja_list *list;
    TRY(jinja_list_new(render,
                       node->kind == JINJA_NODE_TUPLE ? JINJA_FLAVOR_TUPLE : JINJA_FLAVOR_LIST,
                       node->num_children, &list));
    for (const struct jinja_node *item = node->first; item != NULL; item = item->next) {
        struct jinja_value item_value;
        TRY(jinja_evaluate(render, item, &item_value));
        TRY(jinja_list_append(render, list, item_value));
    }
    *value = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status evaluate_dict(struct jinja_render *render, const struct jinja_node *node,
                                        struct jinja_value *value)
{
    struct jinja_dict *dict;
    TRY(jinja_dict_new(render, node->num_children, &dict));
    for (const struct jinja_node *pair = node->first; pair != NULL; pair = pair->next) {
        struct jinja_value key, item;
        TRY(jinja_evaluate(render, pair->a, &key));
        TRY(jinja_evaluate(render, pair->b, &item));
        TRY(jinja_dict_set(render, dict, key, item));
    }
    *value = jinja_dict_value(dict);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status evaluate_concat(struct jinja_render *render,
                                          const struct jinja_node *node, struct jinja_value *value)
{
    struct jinja_text text = {0};
    const struct jinja_string *string;
    for (const struct jinja_node *item = node->first; item != NULL; item = item->next) {
        TRY(jinja_evaluate(render, item, value));
        TRY(jinja_append_value(render, &text, value));
    }
    TRY(jinja_text_finish(render, &text, &string));
    *value = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status compare(struct jinja_render *render, enum jinja_operator op,
                                  const struct jinja_value *left, const struct jinja_value *right,
                                  bool *holds)
{
    static const char *const symbols[] = {"<", "<=", ">", ">="};
    int order;
    switch (op) {
    case JINJA_OP_EQ:
        return jinja_equal(render, left, right, holds);
    case JINJA_OP_NE:
        TRY(jinja_equal(render, left, right, holds));
        *holds = !*holds;
        return IMBREX_STATUS_OK;
    case JINJA_OP_IN:
        return jinja_contains(render, right, left, holds);
    case JINJA_OP_NOT_IN:
        TRY(jinja_contains(render, right, left, holds));
        *holds = !*holds;
        return IMBREX_STATUS_OK;
    default:
        TRY(jinja_order(render, left, right, symbols[op - JINJA_OP_LT], &order));
        *holds = op == JINJA_OP_LT   ? order < 0
                 : op == JINJA_OP_LE ? order <= 0
                 : op == JINJA_OP_GT ? order > 0
                                     : order >= 0;
        return IMBREX_STATUS_OK;
    }
}

static enum imbrex_status evaluate_compare(struct jinja_render *render,
                                           const struct jinja_node *node, struct jinja_value *value)
{
    struct jinja_value left, right;
    bool holds = true;
    TRY(jinja_evaluate(render, node->a, &left));
    for (const struct jinja_node *operand = node->first; holds && operand != NULL;
         operand = operand->next) {
        TRY(jinja_evaluate(render, operand->a, &right));
        TRY(compare(render, operand->op, &left, &right, &holds));
        left = right;
    }
    *value = jinja_bool(holds);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status evaluate_sign(struct jinja_render *render, const struct jinja_node *node,
                                        struct jinja_value *value)
{
    bool is_negative = node->kind == JINJA_NODE_NEGATE;
    int64_t integer;
    TRY(jinja_evaluate(render, node->a, value));
    if (jinja_as_int(value, &integer)) {
        if (is_negative && __builtin_sub_overflow(0, integer, &integer)) {
            return jinja_fail(render, IMBREX_STATUS_CAPACITY, "an integer beyond 64 bits");
        }
        *value = jinja_int(integer);
        return IMBREX_STATUS_OK;
    }
    if (value->kind == JINJA_FLOAT) {
        value->as.real = is_negative ? -value->as.real : value->as.real;
        return IMBREX_STATUS_OK;
    }
    if (value->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, value->as.undefined);
    }
    return jinja_fail(render, IMBREX_STATUS_FORMAT, "bad operand type for unary %c: '%s'",
                      is_negative ? '-' : '+', jinja_type_name(value));
}

static enum imbrex_status evaluate_item(struct jinja_render *render, const struct jinja_node *node,
                                        struct jinja_value *value)
{
    struct jinja_value object, key;
    TRY(jinja_evaluate(render, node->a, &object));
    if (node->b->kind != JINJA_NODE_SLICE) {
        TRY(jinja_evaluate(render, node->b, &key));
        return jinja_get_item(render, &object, &key, value);
    }
    struct jinja_value bounds[3];
    const struct jinja_node *parts[3] = {node->b->a, node->b->b, node->b->c};
    for (int i = 0; i < 3; i++) {
        bounds[i] = jinja_none();
        if (parts[i] != NULL) {
            TRY(jinja_evaluate(render, parts[i], &bounds[i]));
        }
    }
    return jinja_get_slice(render, &object, bounds, value);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Named arguments, as many as there will be in the end. */
struct named_list {
    struct jinja_named *named;
    size_t num_named, capacity;
};

static enum imbrex_status named_append(struct jinja_render *render, struct named_list *list,
                                       const struct jinja_string *name, struct jinja_value value)
{
    for (size_t i = 0; i < list->num_named; i++) {
        TRY(jinja_charge(render, 1));
        if (jinja_string_equal(list->named[i].name, name)) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "got multiple values for keyword argument '%.*s'",
                              (int)(name->num_bytes < 60 ? name->num_bytes : 60), name->bytes);
        }
    }
    if (list->num_named == list->capacity) {
        size_t capacity = list->capacity < 4 ? 4 : list->capacity * 2;
        struct jinja_named *named;
        TRY(jinja_take(render, capacity, sizeof(*named), &named));
        if (list->num_named != 0) {
            memcpy(named, list->named, list->num_named * sizeof(*named));
        }
        list->named = named;
        list->capacity = capacity;
    }
    list->named[list->num_named++] = (struct jinja_named){.name = name, .value = value};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status append_star(struct jinja_render *render, const struct jinja_value *value,
                                      struct jinja_list *positional)
{
    struct jinja_iterator iterator;
    struct jinja_value item;
    bool has_item;
    TRY(jinja_iterate(render, value, &iterator));
    for (;;) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            return IMBREX_STATUS_OK;
        }
        TRY(jinja_list_append(render, positional, item));
    }
}

static enum imbrex_status append_star_star(struct jinja_render *render,
                                           const struct jinja_value *value,
                                           struct named_list *named)
{
    if (value->kind != JINJA_DICT) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "argument after ** must be a dict, not %s",
                          jinja_type_name(value));
    }
    for (size_t i = 0; i < value->as.dict->num_entries; i++) {
        const struct jinja_entry *entry = &value->as.dict->entries[i];
        if (entry->key.kind != JINJA_STRING) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT, "keywords must be strings");
        }
        TRY(named_append(render, named, entry->key.as.string, entry->value));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status evaluate_args(struct jinja_render *render, const struct jinja_node *node,
                                        const struct jinja_value *caller, struct jinja_args *args)
{
    static const struct jinja_string caller_name = {
        .bytes = "caller", .num_bytes = 6, .num_chars = 6};
    struct named_list named = {0};
    *args = (struct jinja_args){0};
    if (node->first == NULL && caller == NULL) {
        return IMBREX_STATUS_OK;
    }
    struct jinja_list *positional;
    TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, node->num_children, &positional));
    for (const struct jinja_node *argument = node->first; argument != NULL;
         argument = argument->next) {
        struct jinja_value value;
        bool is_marked = argument->kind == JINJA_NODE_KEYWORD ||
                         argument->kind == JINJA_NODE_STAR ||
                         argument->kind == JINJA_NODE_STAR_STAR;
        TRY(jinja_evaluate(render, is_marked ? argument->a : argument, &value));
        switch (argument->kind) {
        case JINJA_NODE_KEYWORD:
            TRY(named_append(render, &named, argument->text, value));
            break;
        case JINJA_NODE_STAR:
            TRY(append_star(render, &value, positional));
            break;
        case JINJA_NODE_STAR_STAR:
            TRY(append_star_star(render, &value, &named));
            break;
        default:
            TRY(jinja_list_append(render, positional, value));
            break;
        }
    }
    if (caller != NULL) {
        TRY(named_append(render, &named, &caller_name, *caller));
    }
    *args = (struct jinja_args){.positional = positional->items,
                                .num_positional = positional->num_items,
                                .named = named.named,
                                .num_named = named.num_named};
    return IMBREX_STATUS_OK;
}

/* Index of a parameter in "a,b,c", or -1. */
static int32_t param_find(const char *params, const struct jinja_string *name)
{
    for (int32_t i = 0; *params != '\0'; i++) {
        size_t length = strcspn(params, ",");
        if (length == name->num_bytes && memcmp(params, name->bytes, length) == 0) {
            return i;
        }
        params += length + (params[length] == ',');
    }
    return -1;
}

static int32_t param_count(const char *params)
{
    int32_t num_params = *params != '\0';
    for (; *params != '\0'; params++) {
        num_params += *params == ',';
    }
    return num_params;
}

/* The call of a filter that returns a generator: an error becomes the generator's. */
static enum imbrex_status call_lazily(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    struct imbrex_error *err = render->err, failure = {.message = ""};
    int32_t depth = render->depth;
    *result = jinja_missing();
    render->err = &failure;
    enum imbrex_status status = call->entry->function(render, call, result);
    render->err = err;
    if (status == IMBREX_STATUS_OK) {
        return status;
    }
    if (status != IMBREX_STATUS_FORMAT) {
        return error_set(err, status, "%s", failure.message);
    }
    render->depth = depth;
    if (result->kind == JINJA_MISSING) {
        TRY(jinja_list_new(render, JINJA_FLAVOR_GENERATOR, 0, &result->as.list));
        result->kind = JINJA_LIST;
    }
    size_t num_bytes = strlen(failure.message);
    char *message;
    TRY(jinja_take(render, num_bytes + 1, 1, &message));
    memcpy(message, failure.message, num_bytes + 1);
    return jinja_string_new(render, message, num_bytes, false, &result->as.list->failure);
}

enum imbrex_status jinja_call_native(struct jinja_render *render, const char *what,
                                     const struct jinja_entry_point *entry,
                                     const struct jinja_value *self, const struct jinja_args *args,
                                     struct jinja_value *result)
{
    struct jinja_call call = {.entry = entry, .self = *self, .all = args};
    if (entry->function == NULL) {
        return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED, "the %s '%s' is not supported", what,
                          entry->name);
    }
    if (strcmp(entry->params, "*") == 0) {
        return entry->is_lazy ? call_lazily(render, &call, result)
                              : entry->function(render, &call, result);
    }
    int32_t num_params = param_count(entry->params);
    if (args->num_positional > (size_t)num_params) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "the %s '%s' takes at most %d arguments (%zu given)", what, entry->name,
                          num_params, args->num_positional);
    }
    for (size_t i = 0; i < args->num_positional; i++) {
        call.args[i] = args->positional[i];
    }
    for (size_t i = 0; i < args->num_named; i++) {
        const struct jinja_string *name = args->named[i].name;
        int32_t param = param_find(entry->params, name);
        if (param < 0 || call.args[param].kind != JINJA_MISSING) {
            return jinja_fail(
                render, IMBREX_STATUS_FORMAT, "the %s '%s' got %s '%.*s'", what, entry->name,
                param < 0 ? "an unexpected keyword argument" : "multiple values for argument",
                (int)(name->num_bytes < 60 ? name->num_bytes : 60), name->bytes);
        }
        call.args[param] = args->named[i].value;
    }
    for (int32_t i = 0; i < entry->num_required; i++) {
        if (call.args[i].kind == JINJA_MISSING) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "the %s '%s' misses a required argument (%s)", what, entry->name,
                              entry->params);
        }
    }
    return entry->is_lazy ? call_lazily(render, &call, result)
                          : entry->function(render, &call, result);
}

static enum imbrex_status call_joiner(struct jinja_render *render, struct jinja_joiner *joiner,
                                      const struct jinja_args *args, struct jinja_value *result)
{
    if (args->num_positional + args->num_named != 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "a joiner takes no arguments");
    }
    *result = joiner->was_used ? joiner->separator : jinja_string_value(&jinja_string_empty);
    joiner->was_used = true;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_call_value(struct jinja_render *render, const struct jinja_value *callee,
                                    const struct jinja_args *args, struct jinja_value *result)
{
    struct jinja_value none = jinja_none();
    switch (callee->kind) {
    case JINJA_FUNCTION:
        return jinja_call_native(render, "function", &callee->as.function->entry, &none, args,
                                 result);
    case JINJA_METHOD:
        return jinja_call_native(render, "method", callee->as.method->entry,
                                 &callee->as.method->self, args, result);
    case JINJA_MACRO:
        return jinja_macro_call(render, callee->as.macro, args, result);
    case JINJA_LOOP:
        return jinja_loop_call(render, callee->as.loop, args, result);
    case JINJA_JOINER:
        return call_joiner(render, callee->as.joiner, args, result);
    case JINJA_UNDEFINED:
        return jinja_undefined_fail(render, callee->as.undefined);
    default:
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "'%s' object is not callable",
                          jinja_type_name(callee));
    }
}

enum imbrex_status jinja_evaluate_call(struct jinja_render *render, const struct jinja_node *call,
                                       const struct jinja_value *caller, struct jinja_value *value)
{
    struct jinja_value callee;
    struct jinja_args args;
    TRY(jinja_evaluate(render, call->a, &callee));
    TRY(evaluate_args(render, call, caller, &args));
    render->line = call->line;
    return jinja_call_value(render, &callee, &args, value);
}

static enum imbrex_status evaluate_filter(struct jinja_render *render,
                                          const struct jinja_node *node, struct jinja_value *value)
{
    struct jinja_value self;
    struct jinja_args args;
    if (node->a == NULL) {
        self = jinja_string_value(render->block_text);
    } else {
        TRY(jinja_evaluate(render, node->a, &self));
    }
    TRY(evaluate_args(render, node, NULL, &args));
    render->line = node->line;
    return jinja_call_native(render, node->kind == JINJA_NODE_FILTER ? "filter" : "test",
                             node->entry, &self, &args, value);
}

/* ---- all ------------------------------------------------------------------------------------- */

static enum imbrex_status evaluate_choice(struct jinja_render *render,
                                          const struct jinja_node *node, struct jinja_value *value)
{
    static const struct jinja_string hint = {
        .bytes = "the inline if-expression evaluated to false and no else section was defined.",
        .num_bytes = 76,
        .num_chars = 76};
    TRY(jinja_evaluate(render, node->b, value));
    const struct jinja_node *chosen = jinja_truth(value) ? node->a : node->c;
    if (chosen != NULL) {
        return jinja_evaluate(render, chosen, value);
    }
    return jinja_undefined_new(render, &(struct jinja_undefined){.hint = &hint}, value);
}

static enum imbrex_status evaluate_binary(struct jinja_render *render,
                                          const struct jinja_node *node, struct jinja_value *value)
{
    struct jinja_value left, right;
    TRY(jinja_evaluate(render, node->a, &left));
    TRY(jinja_evaluate(render, node->b, &right));
    render->line = node->line;
    return jinja_arithmetic(render, node->op, &left, &right, value);
}

static enum imbrex_status evaluate_attribute(struct jinja_render *render,
                                             const struct jinja_node *node,
                                             struct jinja_value *value)
{
    struct jinja_value object;
    TRY(jinja_evaluate(render, node->a, &object));
    return jinja_get_attribute(render, &object, node->text, value);
}

enum imbrex_status jinja_evaluate(struct jinja_render *render, const struct jinja_node *node,
                                  struct jinja_value *value)
{
    TRY(jinja_enter(render));
    render->line = node->line;
    switch (node->kind) {
    case JINJA_NODE_CONST:
        *value = node->constant;
        break;
    case JINJA_NODE_NAME:
        TRY(evaluate_name(render, node, value));
        break;
    case JINJA_NODE_TUPLE:
    case JINJA_NODE_LIST:
        TRY(evaluate_items(render, node, value));
        break;
    case JINJA_NODE_DICT:
        TRY(evaluate_dict(render, node, value));
        break;
    case JINJA_NODE_IF_ELSE:
        TRY(evaluate_choice(render, node, value));
        break;
    case JINJA_NODE_AND:
    case JINJA_NODE_OR:
        TRY(jinja_evaluate(render, node->a, value));
        if (jinja_truth(value) == (node->kind == JINJA_NODE_AND)) {
            TRY(jinja_evaluate(render, node->b, value));
        }
        break;
    case JINJA_NODE_NOT:
        TRY(jinja_evaluate(render, node->a, value));
        *value = jinja_bool(!jinja_truth(value));
        break;
    case JINJA_NODE_NEGATE:
    case JINJA_NODE_PLUS:
        TRY(evaluate_sign(render, node, value));
        break;
    case JINJA_NODE_BINARY:
        TRY(evaluate_binary(render, node, value));
        break;
    case JINJA_NODE_CONCAT:
        TRY(evaluate_concat(render, node, value));
        break;
    case JINJA_NODE_COMPARE:
        TRY(evaluate_compare(render, node, value));
        break;
    case JINJA_NODE_ATTRIBUTE:
        TRY(evaluate_attribute(render, node, value));
        break;
    case JINJA_NODE_ITEM:
        TRY(evaluate_item(render, node, value));
        break;
    case JINJA_NODE_CALL:
        TRY(jinja_evaluate_call(render, node, NULL, value));
        break;
    case JINJA_NODE_FILTER:
    case JINJA_NODE_TEST:
        TRY(evaluate_filter(render, node, value));
        break;
    default:
        return jinja_fail(render, IMBREX_STATUS_INTERNAL, "not an expression");
    }
    jinja_leave(render);
    return IMBREX_STATUS_OK;
}
