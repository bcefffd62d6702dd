/* SPDX-License-Identifier: Apache-2.0 */
/* Statements, loops and macros. Scopes as Jinja has them: the body of a for, with, macro, call,
 * filter or block set is a scope of its own, that of an if is not. */
#include <string.h>

#include "jinja/jinja_render.h"

struct jinja_loop {
    const struct jinja_node *node;
    struct jinja_scope *outer;
    struct jinja_iterator iterator;
    int64_t index0; /* of the current item; -1 before the first */
    int64_t depth0;
    bool is_filtered; /* what the iterator gives has passed the condition */
    bool has_length;
    size_t length;
    struct jinja_value before, current, after; /* `after` is MISSING unless it was looked at */
    struct jinja_list *last_changed;           /* arguments of the last call of changed() */
};

struct jinja_macro {
    const struct jinja_node *node;
    struct jinja_scope *outer;
};

/* ---- assignment ------------------------------------------------------------------------------ */

static enum imbrex_status assign(struct jinja_render *render, const struct jinja_node *target,
                                 struct jinja_value value);

static enum imbrex_status unpack(struct jinja_render *render, const struct jinja_node *target,
                                 const struct jinja_value *value)
{
    struct jinja_iterator iterator;
    struct jinja_value item;
    bool has_item;
    size_t num_items = 0;
    TRY(jinja_iterate(render, value, &iterator));
    for (const struct jinja_node *name = target->first; name != NULL; name = name->next) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "not enough values to unpack (expected %zu, got %zu)",
                              target->num_children, num_items);
        }
        num_items++;
        TRY(assign(render, name, item));
    }
    TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
    if (has_item) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "too many values to unpack (expected %zu)",
                          target->num_children);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status assign(struct jinja_render *render, const struct jinja_node *target,
                                 struct jinja_value value)
{
    if (target->kind == JINJA_NODE_NAME) {
        return jinja_bind(render, target->name_id, value);
    }
    if (target->kind == JINJA_NODE_TUPLE) {
        TRY(jinja_enter(render));
        TRY(unpack(render, target, &value));
        jinja_leave(render);
        return IMBREX_STATUS_OK;
    }
    struct jinja_value object = jinja_lookup(render, target->name_id);
    if (object.kind != JINJA_NAMESPACE) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "cannot assign attribute on non-namespace object");
    }
    return jinja_dict_set(render, object.as.dict, jinja_string_value(target->text), value);
}

/* Runs a body and takes what it prints as a string. */
static enum imbrex_status capture(struct jinja_render *render, const struct jinja_node *body,
                                  const struct jinja_string **string)
{
    struct jinja_text *outer_output = render->output;
    struct jinja_text text = {0};
    render->output = &text;
    TRY(jinja_execute(render, body));
    render->output = outer_output;
    return jinja_text_finish(render, &text, string);
}

/* The same in a scope of its own, with filters applied unless they are NULL. */
static enum imbrex_status capture_block(struct jinja_render *render, const struct jinja_node *node,
                                        struct jinja_value *value)
{
    struct jinja_scope *outer = render->scope;
    const struct jinja_string *string;
    TRY(jinja_scope_push(render, outer));
    TRY(capture(render, node->body, &string));
    *value = jinja_string_value(string);
    if (node->b != NULL && render->signal == JINJA_SIGNAL_NONE) {
        render->block_text = string;
        TRY(jinja_evaluate(render, node->b, value));
    }
    render->scope = outer;
    return IMBREX_STATUS_OK;
}

/* ---- loops ----------------------------------------------------------------------------------- */

/* The next item that the loop's condition lets through. */
static enum imbrex_status loop_fetch(struct jinja_render *render, struct jinja_loop *loop,
                                     struct jinja_value *item, bool *has_item)
{
    struct jinja_scope *scope = render->scope;
    for (;;) {
        TRY(jinja_iterator_next(render, &loop->iterator, item, has_item));
        if (!*has_item || loop->node->c == NULL || loop->is_filtered) {
            return IMBREX_STATUS_OK;
        }
        struct jinja_value condition;
        TRY(jinja_scope_push(render, loop->outer));
        TRY(assign(render, loop->node->a, *item));
        TRY(jinja_evaluate(render, loop->node->c, &condition));
        render->scope = scope;
        if (jinja_truth(&condition)) {
            return IMBREX_STATUS_OK;
        }
    }
}

static enum imbrex_status loop_peek(struct jinja_render *render, struct jinja_loop *loop,
                                    bool *has_item)
{
    *has_item = true;
    if (loop->after.kind == JINJA_MISSING) {
        struct jinja_value item;
        TRY(loop_fetch(render, loop, &item, has_item));
        if (*has_item) {
            loop->after = item;
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status loop_advance(struct jinja_render *render, struct jinja_loop *loop,
                                       bool *has_item)
{
    TRY(loop_peek(render, loop, has_item));
    if (*has_item) {
        loop->index0++;
        loop->before = loop->current;
        loop->current = loop->after;
        loop->after = jinja_missing();
    }
    return IMBREX_STATUS_OK;
}

int64_t jinja_loop_index0(const struct jinja_loop *loop)
{
    return loop->index0;
}

enum imbrex_status jinja_loop_length(struct jinja_render *render, struct jinja_loop *loop,
                                     size_t *length)
{
    if (!loop->has_length) {
        if (loop->node->c == NULL && !jinja_is_generator(&loop->iterator.source)) {
            TRY(jinja_length(render, &loop->iterator.source, &loop->length));
        } else { /* reads the rest in advance to count it */
            struct jinja_list *rest;
            struct jinja_value item;
            bool has_item;
            TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 0, &rest));
            for (;;) {
                TRY(loop_fetch(render, loop, &item, &has_item));
                if (!has_item) {
                    break;
                }
                TRY(jinja_list_append(render, rest, item));
            }
            loop->length =
                rest->num_items + (size_t)(loop->index0 + 1) + (loop->after.kind != JINJA_MISSING);
            loop->iterator = (struct jinja_iterator){.source = jinja_list_value(rest)};
            loop->is_filtered = true;
        }
        loop->has_length = true;
    }
    *length = loop->length;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_loop_attribute(struct jinja_render *render, struct jinja_loop *loop,
                                        const struct jinja_string *name, struct jinja_value *value)
{
    static const struct jinja_string no_previous = {
        .bytes = "there is no previous item", .num_bytes = 25, .num_chars = 25};
    static const struct jinja_string no_next = {
        .bytes = "there is no next item", .num_bytes = 21, .num_chars = 21};
    size_t length;
    bool has_next;
    *value = jinja_missing();
    if (jinja_string_is(name, "index0")) {
        *value = jinja_int(loop->index0);
    } else if (jinja_string_is(name, "index")) {
        *value = jinja_int(loop->index0 + 1);
    } else if (jinja_string_is(name, "first")) {
        *value = jinja_bool(loop->index0 == 0);
    } else if (jinja_string_is(name, "depth0")) {
        *value = jinja_int(loop->depth0);
    } else if (jinja_string_is(name, "depth")) {
        *value = jinja_int(loop->depth0 + 1);
    } else if (jinja_string_is(name, "last")) {
        TRY(loop_peek(render, loop, &has_next));
        *value = jinja_bool(!has_next);
    } else if (jinja_string_is(name, "length")) {
        TRY(jinja_loop_length(render, loop, &length));
        *value = jinja_int((int64_t)length);
    } else if (jinja_string_is(name, "revindex") || jinja_string_is(name, "revindex0")) {
        TRY(jinja_loop_length(render, loop, &length));
        *value = jinja_int((int64_t)length - loop->index0 - (name->num_bytes == 9));
    } else if (jinja_string_is(name, "previtem")) {
        if (loop->index0 == 0) {
            return jinja_undefined_new(render, &(struct jinja_undefined){.hint = &no_previous},
                                       value);
        }
        *value = loop->before;
    } else if (jinja_string_is(name, "nextitem")) {
        TRY(loop_peek(render, loop, &has_next));
        if (!has_next) {
            return jinja_undefined_new(render, &(struct jinja_undefined){.hint = &no_next}, value);
        }
        *value = loop->after;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status method_cycle(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    size_t num_items = call->all->num_positional;
    if (num_items == 0 || call->all->num_named != 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "no items for cycling given");
    }
    *result = call->all->positional[(size_t)call->self.as.loop->index0 % num_items];
    return IMBREX_STATUS_OK;
}

static enum imbrex_status method_changed(struct jinja_render *render, const struct jinja_call *call,
                                         struct jinja_value *result)
{
    struct jinja_loop *loop = call->self.as.loop;
    struct jinja_list *values;
    bool is_equal = false;
    if (call->all->num_named != 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "loop.changed takes no named arguments");
    }
    TRY(jinja_list_new(render, JINJA_FLAVOR_TUPLE, 0, &values));
    values->items = call->all->positional;
    values->num_items = values->capacity = call->all->num_positional;
    if (loop->last_changed != NULL) {
        struct jinja_value before = jinja_list_value(loop->last_changed);
        struct jinja_value now = jinja_list_value(values);
        TRY(jinja_equal(render, &before, &now, &is_equal));
    }
    if (!is_equal) {
        loop->last_changed = values;
    }
    *result = jinja_bool(!is_equal);
    return IMBREX_STATUS_OK;
}

const struct jinja_entry_point *jinja_loop_method(const struct jinja_string *name)
{
    static const struct jinja_entry_point methods[] = {
        {.name = "cycle", .function = method_cycle, .params = "*"},
        {.name = "changed", .function = method_changed, .params = "*"},
    };
    for (size_t i = 0; i < sizeof(methods) / sizeof(methods[0]); i++) {
        if (jinja_string_is(name, methods[i].name)) {
            return &methods[i];
        }
    }
    return NULL;
}

static enum imbrex_status run_iteration(struct jinja_render *render, struct jinja_loop *loop)
{
    int32_t loop_name_id = render->template->special_ids[JINJA_SPECIAL_LOOP];
    TRY(jinja_scope_push(render, loop->outer));
    if (loop_name_id >= 0) {
        TRY(jinja_bind(render, loop_name_id,
                       (struct jinja_value){.kind = JINJA_LOOP, .as.loop = loop}));
    }
    TRY(assign(render, loop->node->a, loop->current));
    return jinja_execute(render, loop->node->body);
}

static enum imbrex_status run_loop(struct jinja_render *render, const struct jinja_node *node,
                                   struct jinja_scope *outer, const struct jinja_value *iterable,
                                   int64_t depth0)
{
    struct jinja_scope *scope = render->scope;
    struct jinja_loop *loop;
    bool has_item;
    TRY(jinja_take(render, 1, sizeof(*loop), &loop));
    *loop = (struct jinja_loop){.node = node, .outer = outer, .index0 = -1, .depth0 = depth0};
    TRY(jinja_iterate(render, iterable, &loop->iterator));
    for (;;) {
        TRY(loop_advance(render, loop, &has_item));
        if (!has_item) {
            break;
        }
        TRY(run_iteration(render, loop));
        bool is_broken = render->signal == JINJA_SIGNAL_BREAK;
        render->signal = JINJA_SIGNAL_NONE;
        if (is_broken) {
            break;
        }
    }
    if (loop->index0 < 0 && node->else_body != NULL) {
        TRY(jinja_scope_push(render, outer));
        TRY(jinja_execute(render, node->else_body));
    }
    render->scope = scope;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_loop_call(struct jinja_render *render, struct jinja_loop *loop,
                                   const struct jinja_args *args, struct jinja_value *result)
{
    struct jinja_text *outer_output = render->output;
    struct jinja_text text = {0};
    const struct jinja_string *string;
    if (!loop->node->flag) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "the loop must have the 'recursive' marker to be called recursively");
    }
    if (args->num_positional != 1 || args->num_named != 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "loop() takes one argument");
    }
    TRY(jinja_enter(render));
    render->output = &text;
    TRY(run_loop(render, loop->node, loop->outer, &args->positional[0], loop->depth0 + 1));
    render->output = outer_output;
    jinja_leave(render);
    TRY(jinja_text_finish(render, &text, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

/* ---- macros ---------------------------------------------------------------------------------- */

const struct jinja_string *jinja_macro_name(const struct jinja_macro *macro)
{
    return macro->node->text;
}

static enum imbrex_status macro_new(struct jinja_render *render, const struct jinja_node *node,
                                    struct jinja_value *value)
{
    struct jinja_macro *macro;
    TRY(jinja_take(render, 1, sizeof(*macro), &macro));
    *macro = (struct jinja_macro){.node = node, .outer = render->scope};
    *value = (struct jinja_value){.kind = JINJA_MACRO, .as.macro = macro};
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_macro_attribute(struct jinja_render *render,
                                         const struct jinja_macro *macro,
                                         const struct jinja_string *name, struct jinja_value *value)
{
    const struct jinja_node *node = macro->node;
    *value = jinja_missing();
    if (jinja_string_is(name, "name")) {
        *value = node->text == NULL ? jinja_none() : jinja_string_value(node->text);
    } else if (jinja_string_is(name, "catch_kwargs")) {
        *value = jinja_bool(node->uses_kwargs);
    } else if (jinja_string_is(name, "catch_varargs")) {
        *value = jinja_bool(node->uses_varargs);
    } else if (jinja_string_is(name, "caller")) {
        *value = jinja_bool(node->uses_caller);
    } else if (jinja_string_is(name, "arguments")) {
        struct jinja_list *list;
        TRY(jinja_list_new(render, JINJA_FLAVOR_TUPLE, node->num_children, &list));
        for (const struct jinja_node *param = node->first; param != NULL; param = param->next) {
            TRY(jinja_list_append(render, list, jinja_string_value(param->text)));
        }
        *value = jinja_list_value(list);
    }
    return IMBREX_STATUS_OK;
}

/* The named argument, or NULL; marks it as used. */
static const struct jinja_value *named_find(const struct jinja_args *args, bool *used,
                                            const struct jinja_string *name)
{
    for (size_t i = 0; i < args->num_named; i++) {
        if (!used[i] && jinja_string_equal(args->named[i].name, name)) {
            used[i] = true;
            return &args->named[i].value;
        }
    }
    return NULL;
}

/* Binds a variable that the macro uses without declaring it. */
static enum imbrex_status bind_special(struct jinja_render *render, enum jinja_special special,
                                       struct jinja_value value)
{
    int32_t name_id = render->template->special_ids[special];
    return name_id < 0 ? IMBREX_STATUS_OK : jinja_bind(render, name_id, value);
}

static enum imbrex_status bind_caller(struct jinja_render *render, const struct jinja_node *node,
                                      const struct jinja_args *args, bool *used)
{
    static const struct jinja_string name = {.bytes = "caller", .num_bytes = 6, .num_chars = 6};
    static const struct jinja_string hint = {
        .bytes = "No caller defined", .num_bytes = 17, .num_chars = 17};
    if (!node->uses_caller || node->has_caller_param) {
        return IMBREX_STATUS_OK;
    }
    const struct jinja_value *caller = named_find(args, used, &name);
    struct jinja_value value;
    if (caller != NULL) {
        value = *caller;
    } else {
        TRY(jinja_undefined_new(render, &(struct jinja_undefined){.hint = &hint}, &value));
    }
    return bind_special(render, JINJA_SPECIAL_CALLER, value);
}

/* What neither a parameter nor `caller` took, into kwargs and varargs, or it is an error. */
static enum imbrex_status bind_rest(struct jinja_render *render, const struct jinja_node *node,
                                    const struct jinja_args *args, const bool *used)
{
    const struct jinja_string *macro_name = node->text != NULL ? node->text : &jinja_string_empty;
    struct jinja_dict *kwargs;
    TRY(jinja_dict_new(render, 0, &kwargs));
    for (size_t i = 0; i < args->num_named; i++) {
        if (used[i]) {
            continue;
        }
        const struct jinja_string *name = args->named[i].name;
        if (!node->uses_kwargs) {
            return jinja_fail(
                render, IMBREX_STATUS_FORMAT, "macro '%.*s' takes no keyword argument '%.*s'",
                (int)(macro_name->num_bytes < 60 ? macro_name->num_bytes : 60), macro_name->bytes,
                (int)(name->num_bytes < 60 ? name->num_bytes : 60), name->bytes);
        }
        TRY(jinja_dict_set(render, kwargs, jinja_string_value(name), args->named[i].value));
    }
    if (node->uses_kwargs) {
        TRY(bind_special(render, JINJA_SPECIAL_KWARGS, jinja_dict_value(kwargs)));
    }
    struct jinja_list *varargs;
    TRY(jinja_list_new(render, JINJA_FLAVOR_TUPLE, 0, &varargs));
    for (size_t i = node->num_children; i < args->num_positional; i++) {
        if (!node->uses_varargs) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "macro '%.*s' takes not more than %zu argument(s)",
                              (int)(macro_name->num_bytes < 60 ? macro_name->num_bytes : 60),
                              macro_name->bytes, node->num_children);
        }
        TRY(jinja_list_append(render, varargs, args->positional[i]));
    }
    if (node->uses_varargs) {
        TRY(bind_special(render, JINJA_SPECIAL_VARARGS, jinja_list_value(varargs)));
    }
    return IMBREX_STATUS_OK;
}

/* Binds the parameters that were given, then the defaults of the others, which may use them. */
static enum imbrex_status bind_params(struct jinja_render *render, const struct jinja_node *node,
                                      const struct jinja_args *args, bool *used)
{
    size_t position = 0;
    for (const struct jinja_node *param = node->first; param != NULL; param = param->next) {
        if (position < args->num_positional) {
            TRY(jinja_bind(render, param->name_id, args->positional[position++]));
            continue;
        }
        const struct jinja_value *named = named_find(args, used, param->text);
        if (named != NULL) {
            TRY(jinja_bind(render, param->name_id, *named));
        } else {
            TRY(jinja_bind(render, param->name_id, jinja_missing()));
        }
    }
    TRY(bind_caller(render, node, args, used));
    TRY(bind_rest(render, node, args, used));
    for (const struct jinja_node *param = node->first; param != NULL; param = param->next) {
        struct jinja_value value = jinja_lookup(render, param->name_id);
        if (value.kind != JINJA_MISSING) {
            continue;
        }
        if (param->a != NULL) {
            TRY(jinja_evaluate(render, param->a, &value));
        } else {
            struct jinja_text text = {0};
            struct jinja_undefined undefined = {.name = param->text};
            TRY(jinja_text_append(render, &text, "parameter '", 11, false));
            TRY(jinja_text_append_string(render, &text, param->text));
            TRY(jinja_text_append(render, &text, "' was not provided", 18, false));
            TRY(jinja_text_finish(render, &text, &undefined.hint));
            TRY(jinja_undefined_new(render, &undefined, &value));
        }
        TRY(jinja_bind(render, param->name_id, value));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_macro_call(struct jinja_render *render, const struct jinja_macro *macro,
                                    const struct jinja_args *args, struct jinja_value *result)
{
    struct jinja_scope *scope = render->scope;
    const struct jinja_string *string;
    bool *used;
    TRY(jinja_enter(render));
    TRY(jinja_take(render, args->num_named, sizeof(*used), &used));
    memset(used, 0, args->num_named * sizeof(*used));
    TRY(jinja_scope_push(render, macro->outer));
    TRY(bind_params(render, macro->node, args, used));
    TRY(capture(render, macro->node->body, &string));
    render->scope = scope;
    jinja_leave(render);
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

/* ---- statements ------------------------------------------------------------------------------ */

static enum imbrex_status execute_if(struct jinja_render *render, const struct jinja_node *node)
{
    for (; node != NULL; node = node->b) {
        struct jinja_value condition;
        TRY(jinja_evaluate(render, node->a, &condition));
        if (jinja_truth(&condition)) {
            return jinja_execute(render, node->body);
        }
        if (node->b == NULL) {
            return jinja_execute(render, node->else_body);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status execute_with(struct jinja_render *render, const struct jinja_node *node)
{
    struct jinja_scope *outer = render->scope, *inner;
    TRY(jinja_scope_push(render, outer));
    inner = render->scope;
    for (const struct jinja_node *pair = node->first; pair != NULL; pair = pair->next) {
        struct jinja_value value;
        render->scope = outer;
        TRY(jinja_evaluate(render, pair->b, &value));
        render->scope = inner;
        TRY(assign(render, pair->a, value));
    }
    TRY(jinja_execute(render, node->body));
    render->scope = outer;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status execute_call_block(struct jinja_render *render,
                                             const struct jinja_node *node)
{
    struct jinja_value caller, value;
    TRY(macro_new(render, node->b, &caller));
    TRY(jinja_evaluate_call(render, node->a, &caller, &value));
    return jinja_append_value(render, render->output, &value);
}

static enum imbrex_status execute_statement(struct jinja_render *render,
                                            const struct jinja_node *node)
{
    struct jinja_scope *outer = render->scope;
    struct jinja_value value;
    switch (node->kind) {
    case JINJA_NODE_DATA:
        return jinja_text_append_string(render, render->output, node->text);
    case JINJA_NODE_PRINT:
        TRY(jinja_evaluate(render, node->a, &value));
        return jinja_append_value(render, render->output, &value);
    case JINJA_NODE_IF:
        return execute_if(render, node);
    case JINJA_NODE_FOR:
        TRY(jinja_evaluate(render, node->b, &value));
        return run_loop(render, node, outer, &value, 0);
    case JINJA_NODE_SET:
        TRY(jinja_evaluate(render, node->b, &value));
        return assign(render, node->a, value);
    case JINJA_NODE_SET_BLOCK:
        TRY(capture_block(render, node, &value));
        return render->signal == JINJA_SIGNAL_NONE ? assign(render, node->a, value)
                                                   : IMBREX_STATUS_OK;
    case JINJA_NODE_FILTER_BLOCK:
        TRY(capture_block(render, node, &value));
        return render->signal == JINJA_SIGNAL_NONE
                   ? jinja_append_value(render, render->output, &value)
                   : IMBREX_STATUS_OK;
    case JINJA_NODE_MACRO:
        TRY(macro_new(render, node, &value));
        return jinja_bind(render, node->name_id, value);
    case JINJA_NODE_CALL_BLOCK:
        return execute_call_block(render, node);
    case JINJA_NODE_WITH:
        return execute_with(render, node);
    case JINJA_NODE_SCOPE:
        TRY(jinja_scope_push(render, outer));
        TRY(jinja_execute(render, node->body));
        render->scope = outer;
        return IMBREX_STATUS_OK;
    case JINJA_NODE_BREAK:
        render->signal = JINJA_SIGNAL_BREAK;
        return IMBREX_STATUS_OK;
    case JINJA_NODE_CONTINUE:
        render->signal = JINJA_SIGNAL_CONTINUE;
        return IMBREX_STATUS_OK;
    default:
        return jinja_fail(render, IMBREX_STATUS_INTERNAL, "not a statement");
    }
}

enum imbrex_status jinja_execute(struct jinja_render *render, const struct jinja_node *body)
{
    TRY(jinja_enter(render));
    for (; body != NULL && render->signal == JINJA_SIGNAL_NONE; body = body->next) {
        render->line = body->line;
        TRY(jinja_charge(render, 1));
        TRY(execute_statement(render, body));
    }
    jinja_leave(render);
    return IMBREX_STATUS_OK;
}
