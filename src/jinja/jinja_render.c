/* SPDX-License-Identifier: Apache-2.0 */
/* Renders from begin to end: variables in, limits kept, text and spans out. */
#include "jinja/jinja_render.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

struct jinja_options jinja_options_default(void)
{
    static const char *const input_names[] = {"messages", "tools", "documents"};
    return (struct jinja_options){.input_names = input_names,
                                  .num_input_names = 3,
                                  .max_steps = 50 * 1000 * 1000,
                                  .max_output_bytes = (size_t)64 << 20,
                                  .max_memory_bytes = (size_t)256 << 20,
                                  .max_depth = 500};
}

enum imbrex_status jinja_fail(struct jinja_render *render, enum imbrex_status status,
                              const char *format, ...)
{
    char message[IMBREX_ERROR_MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return error_set(render->err, status, "%s:%d: %s", render->template->name, render->line,
                     message);
}

enum imbrex_status jinja_take(struct jinja_render *render, size_t count, size_t element_bytes,
                              void *memory_out)
{
    size_t num_bytes;
    if (!size_mul(count, element_bytes, &num_bytes)) {
        num_bytes = SIZE_MAX;
    }
    void *memory = jinja_pool_take(&render->pool, num_bytes);
    memcpy(memory_out, &memory, sizeof(memory));
    if (memory != NULL) {
        return IMBREX_STATUS_OK;
    }
    if (render->pool.is_full) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY, "the values need more than %zu bytes",
                          render->options.max_memory_bytes);
    }
    return error_out_of_memory(render->err, "the values of a chat template", num_bytes);
}

enum imbrex_status jinja_charge(struct jinja_render *render, size_t num_steps)
{
    if (num_steps > render->options.max_steps - render->num_steps) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY, "more than %zu steps",
                          render->options.max_steps);
    }
    render->num_steps += num_steps;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_charge_bytes(struct jinja_render *render, size_t num_bytes)
{
    return jinja_charge(render, num_bytes / 32);
}

enum imbrex_status jinja_enter(struct jinja_render *render)
{
    if (render->depth >= render->options.max_depth) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY, "nested deeper than %d",
                          render->options.max_depth);
    }
    render->depth++;
    return jinja_charge(render, 1);
}

/* ---- variables ------------------------------------------------------------------------------- */

struct jinja_binding {
    int32_t name_id;
    struct jinja_value value;
};

enum imbrex_status jinja_scope_push(struct jinja_render *render, struct jinja_scope *outer)
{
    struct jinja_scope *scope;
    TRY(jinja_take(render, 1, sizeof(*scope), &scope));
    *scope = (struct jinja_scope){.outer = outer};
    render->scope = scope;
    return IMBREX_STATUS_OK;
}

static struct jinja_value *scope_find(const struct jinja_scope *scope, int32_t name_id)
{
    for (int32_t i = 0; i < scope->num_bindings; i++) {
        if (scope->bindings[i].name_id == name_id) {
            return &scope->bindings[i].value;
        }
    }
    return NULL;
}

struct jinja_value jinja_lookup(const struct jinja_render *render, int32_t name_id)
{
    for (const struct jinja_scope *scope = render->scope; scope != NULL; scope = scope->outer) {
        const struct jinja_value *found = scope_find(scope, name_id);
        if (found != NULL) {
            return *found;
        }
    }
    return render->globals[name_id];
}

enum imbrex_status jinja_bind(struct jinja_render *render, int32_t name_id,
                              struct jinja_value value)
{
    struct jinja_scope *scope = render->scope;
    if (scope == NULL) { /* the template's own scope: nothing is looked up behind it */
        render->globals[name_id] = value;
        return IMBREX_STATUS_OK;
    }
    struct jinja_value *found = scope_find(scope, name_id);
    if (found != NULL) {
        *found = value;
        return IMBREX_STATUS_OK;
    }
    if (scope->num_bindings == scope->capacity) {
        int32_t capacity = scope->capacity < 4 ? 4 : scope->capacity * 2;
        struct jinja_binding *bindings;
        TRY(jinja_take(render, (size_t)capacity, sizeof(*bindings), &bindings));
        if (scope->num_bindings != 0) {
            memcpy(bindings, scope->bindings,
                   (size_t)scope->num_bindings * sizeof(*scope->bindings));
        }
        scope->bindings = bindings;
        scope->capacity = capacity;
    }
    scope->bindings[scope->num_bindings++] =
        (struct jinja_binding){.name_id = name_id, .value = value};
    return IMBREX_STATUS_OK;
}

static bool is_input_name(const struct jinja_options *options, const char *name)
{
    for (size_t i = 0; i < options->num_input_names; i++) {
        if (strcmp(options->input_names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

/* Values for all names of the template that the variables have, or that are Jinja's functions. */
static enum imbrex_status load_globals(struct jinja_render *render, const json_t *variables)
{
    const struct jinja_template *template = render->template;
    TRY(jinja_take(render, (size_t) template->num_names, sizeof(*render->globals),
                   &render->globals));
    for (int32_t i = 0; i < template->num_names; i++) {
        const struct jinja_string *name = template->names[i];
        char key[256];
        render->globals[i] = jinja_missing();
        const struct jinja_function *function = jinja_function_find(name->bytes, name->num_bytes);
        if (function != NULL) {
            render->globals[i] =
                (struct jinja_value){.kind = JINJA_FUNCTION, .as.function = function};
        }
        if (name->num_bytes >= sizeof(key)) {
            continue;
        }
        memcpy(key, name->bytes, name->num_bytes);
        key[name->num_bytes] = '\0';
        const json_t *variable = json_object_get(variables, key);
        if (variable != NULL) {
            bool is_input = is_input_name(&render->options, key);
            TRY(jinja_value_from_json(render, variable, is_input, &render->globals[i]));
        }
    }
    return IMBREX_STATUS_OK;
}

/* ---- output ---------------------------------------------------------------------------------- */

static enum imbrex_status copy_output(struct jinja_render *render, const struct jinja_text *text,
                                      struct jinja_output *output)
{
    size_t span_bytes = text->num_runs * sizeof(struct jinja_span);
    char *bytes = malloc(text->num_bytes + 1);
    struct jinja_span *spans = malloc(span_bytes + (span_bytes == 0));
    if (bytes == NULL || spans == NULL) {
        free(bytes);
        free(spans);
        return error_out_of_memory(render->err, "a rendered chat template",
                                   text->num_bytes + span_bytes);
    }
    if (text->num_bytes != 0) {
        memcpy(bytes, text->bytes, text->num_bytes);
    }
    bytes[text->num_bytes] = '\0';
    for (size_t i = 0; i < text->num_runs; i++) {
        spans[i] = (struct jinja_span){.begin = i == 0 ? 0 : text->runs[i - 1].end,
                                       .end = text->runs[i].end,
                                       .is_input = text->runs[i].is_input};
    }
    *output = (struct jinja_output){
        .text = bytes, .num_bytes = text->num_bytes, .spans = spans, .num_spans = text->num_runs};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status render_all(struct jinja_render *render, const json_t *variables,
                                     struct jinja_output *output)
{
    struct jinja_text text = {0};
    TRY(load_globals(render, variables));
    render->output = &text;
    render->final_output = &text;
    TRY(jinja_execute(render, render->template->body));
    return copy_output(render, &text, output);
}

enum imbrex_status jinja_template_render(const struct jinja_template *template,
                                         const json_t *variables,
                                         const struct jinja_options *options,
                                         struct jinja_output *output, struct imbrex_error *err)
{
    if (template == NULL || output == NULL || !json_is_object(variables)) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "jinja_template_render: an argument is NULL, or not a JSON object");
    }
    struct jinja_render render = {.template = template, .err = err, .line = 1};
    render.options = options != NULL ? *options : jinja_options_default();
    if (render.options.max_depth < 1 || render.options.max_depth > JINJA_MAX_DEPTH) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "jinja_template_render: a depth of %d, not in [1, %d]",
                         render.options.max_depth, JINJA_MAX_DEPTH);
    }
    jinja_pool_init(&render.pool, render.options.max_memory_bytes);
    enum imbrex_status status = render_all(&render, variables, output);
    jinja_pool_deinit(&render.pool);
    return status;
}

void jinja_output_release(struct jinja_output *output)
{
    if (output != NULL) {
        free(output->text);
        free(output->spans);
        *output = (struct jinja_output){0};
    }
}
