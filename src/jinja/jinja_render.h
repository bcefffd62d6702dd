/* SPDX-License-Identifier: Apache-2.0 */
/* One render in progress: its limits, memory and scopes, and the calls that templates can make. */
#ifndef IMBREX_JINJA_JINJA_RENDER_H
#define IMBREX_JINJA_JINJA_RENDER_H

#include "jinja/jinja.h"
#include "jinja/jinja_syntax.h"
#include "jinja/jinja_value.h"

/* The variables of a block, a loop's iteration or a macro's call. */
struct jinja_scope {
    struct jinja_scope *outer;
    struct jinja_binding *bindings;
    int32_t num_bindings, capacity;
};

struct jinja_render {
    const struct jinja_template *template;
    struct jinja_options options;
    struct imbrex_error *err;
    struct jinja_pool pool;
    size_t num_steps;
    int32_t depth;
    int32_t line; /* of the node under evaluation */
    struct jinja_scope *scope;
    struct jinja_value *globals;           /* [num_names] of the template, MISSING if not given */
    struct jinja_text *output;             /* where statements print to */
    const struct jinja_text *final_output; /* the one whose size is limited */
    const struct jinja_string *block_text; /* what a filter without input is applied to */
    enum { JINJA_SIGNAL_NONE, JINJA_SIGNAL_BREAK, JINJA_SIGNAL_CONTINUE } signal;
};

/* Fails with "name:line: " before the message. */
enum imbrex_status jinja_fail(struct jinja_render *render, enum imbrex_status status,
                              const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Memory from the render's pool; OUT_OF_MEMORY or CAPACITY, and then NULL. */
enum imbrex_status jinja_take(struct jinja_render *render, size_t count, size_t element_bytes,
                              void *memory_out);
/* Counts steps; CAPACITY if there are none left. */
enum imbrex_status jinja_charge(struct jinja_render *render, size_t num_steps);
/* Steps for work over num_bytes. */
enum imbrex_status jinja_charge_bytes(struct jinja_render *render, size_t num_bytes);
/* Before and after a recursive call. */
enum imbrex_status jinja_enter(struct jinja_render *render);
static inline void jinja_leave(struct jinja_render *render)
{
    render->depth--;
}

enum imbrex_status jinja_undefined_new(struct jinja_render *render,
                                       const struct jinja_undefined *undefined,
                                       struct jinja_value *value);
/* The error for an operation on an undefined value. */
enum imbrex_status jinja_undefined_fail(struct jinja_render *render,
                                        const struct jinja_undefined *undefined);

struct jinja_named {
    const struct jinja_string *name;
    struct jinja_value value;
};

struct jinja_args {
    struct jinja_value *positional;
    size_t num_positional;
    struct jinja_named *named;
    size_t num_named;
};

#define JINJA_MAX_PARAMS 6

/* What filters, tests and methods get: the value they are applied to, and their arguments, sorted
 * into the parameters that the entry's `params` names (MISSING if not given). */
struct jinja_call {
    const struct jinja_entry_point *entry;
    struct jinja_value self;
    struct jinja_value args[JINJA_MAX_PARAMS];
    const struct jinja_args *all; /* for entries with `params` "*" */
};

typedef enum imbrex_status jinja_native_fn(struct jinja_render *render,
                                           const struct jinja_call *call,
                                           struct jinja_value *result);

/* A filter, test, method or global function. */
struct jinja_entry_point {
    const char *name;
    jinja_native_fn *function; /* NULL: known to Python or Jinja, and not supported here */
    const char *params;        /* "a,b,c"; "*" for entries that sort their arguments themselves */
    int32_t num_required;
    int32_t variant; /* for functions that serve several entries */
    bool is_lazy;    /* returns a generator, which shows an error only when it is read */
};

struct jinja_function {
    struct jinja_entry_point entry;
};

struct jinja_method {
    const struct jinja_entry_point *entry;
    struct jinja_value self;
};

/* NULL if there is no such. */
const struct jinja_entry_point *jinja_filter_find(const char *name, size_t num_bytes);
const struct jinja_entry_point *jinja_test_find(const char *name, size_t num_bytes);
const struct jinja_function *jinja_function_find(const char *name, size_t num_bytes);
const struct jinja_entry_point *jinja_method_find(const struct jinja_value *self,
                                                  const struct jinja_string *name);
/* True for methods that change their object, which the sandbox forbids. */
bool jinja_method_is_unsafe(const struct jinja_value *self, const struct jinja_string *name);

/* What methods and filters share. */
enum imbrex_status jinja_string_pad(struct jinja_render *render, const struct jinja_string *string,
                                    size_t num_before, size_t num_after,
                                    const struct jinja_string *fill,
                                    const struct jinja_string **padded);
enum imbrex_status jinja_split_lines(struct jinja_render *render, const struct jinja_string *string,
                                     bool keeps_ends, struct jinja_list **list);
/* islower() or isupper() */
bool jinja_string_has_case(const struct jinja_string *string, bool is_upper);
enum imbrex_status jinja_dict_view(struct jinja_render *render, const struct jinja_dict *dict,
                                   enum jinja_flavor flavor, struct jinja_value *view);

/* Sorts the arguments and calls; `what` ("filter", ...) is for messages. */
enum imbrex_status jinja_call_native(struct jinja_render *render, const char *what,
                                     const struct jinja_entry_point *entry,
                                     const struct jinja_value *self, const struct jinja_args *args,
                                     struct jinja_value *result);
/* value(args) of any value. */
enum imbrex_status jinja_call_value(struct jinja_render *render, const struct jinja_value *callee,
                                    const struct jinja_args *args, struct jinja_value *result);

/* object.name and object[key] as Jinja's sandbox resolves them. */
enum imbrex_status jinja_get_attribute(struct jinja_render *render,
                                       const struct jinja_value *object,
                                       const struct jinja_string *name, struct jinja_value *value);
enum imbrex_status jinja_get_item(struct jinja_render *render, const struct jinja_value *object,
                                  const struct jinja_value *key, struct jinja_value *value);
/* object[begin:end:step]; each is none or an int. */
enum imbrex_status jinja_get_slice(struct jinja_render *render, const struct jinja_value *object,
                                   const struct jinja_value bounds[3], struct jinja_value *value);

/* left op right for + - * / // % ** (enum jinja_operator). */
enum imbrex_status jinja_arithmetic(struct jinja_render *render, enum jinja_operator op,
                                    const struct jinja_value *left, const struct jinja_value *right,
                                    struct jinja_value *result);
/* The printf-like `format % values`; `values` is a tuple, a dict or one value. */
enum imbrex_status jinja_percent_format(struct jinja_render *render,
                                        const struct jinja_string *format,
                                        const struct jinja_value *values,
                                        struct jinja_value *result);

/* The value of an expression. */
enum imbrex_status jinja_evaluate(struct jinja_render *render, const struct jinja_node *node,
                                  struct jinja_value *value);
/* call->a(arguments), with `caller` as one argument more unless it is NULL. */
enum imbrex_status jinja_evaluate_call(struct jinja_render *render, const struct jinja_node *call,
                                       const struct jinja_value *caller, struct jinja_value *value);
/* Runs a list of statements. */
enum imbrex_status jinja_execute(struct jinja_render *render, const struct jinja_node *body);

/* MISSING if there is no such variable. */
struct jinja_value jinja_lookup(const struct jinja_render *render, int32_t name_id);
/* Sets a variable of the innermost scope. */
enum imbrex_status jinja_bind(struct jinja_render *render, int32_t name_id,
                              struct jinja_value value);
/* A new innermost scope inside of `outer`. */
enum imbrex_status jinja_scope_push(struct jinja_render *render, struct jinja_scope *outer);

/* The value `loop` */
enum imbrex_status jinja_loop_attribute(struct jinja_render *render, struct jinja_loop *loop,
                                        const struct jinja_string *name, struct jinja_value *value);
enum imbrex_status jinja_loop_length(struct jinja_render *render, struct jinja_loop *loop,
                                     size_t *length);
int64_t jinja_loop_index0(const struct jinja_loop *loop);
/* loop(iterable) of a recursive loop */
enum imbrex_status jinja_loop_call(struct jinja_render *render, struct jinja_loop *loop,
                                   const struct jinja_args *args, struct jinja_value *result);
/* Methods cycle and changed */
const struct jinja_entry_point *jinja_loop_method(const struct jinja_string *name);

/* Name of a macro, or NULL. */
const struct jinja_string *jinja_macro_name(const struct jinja_macro *macro);
enum imbrex_status jinja_macro_attribute(struct jinja_render *render,
                                         const struct jinja_macro *macro,
                                         const struct jinja_string *name,
                                         struct jinja_value *value);
enum imbrex_status jinja_macro_call(struct jinja_render *render, const struct jinja_macro *macro,
                                    const struct jinja_args *args, struct jinja_value *result);

#endif
