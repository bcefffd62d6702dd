/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates: the Jinja language as Hugging Face runs it (sandboxed and immutable,
 * trim_blocks, lstrip_blocks, break and continue, raise_exception, strftime_now, a tojson that
 * escapes no HTML). A template is parsed once and rendered many times, also by several threads at
 * once. A render knows of every byte it puts out whether it came from user input, so that a user's
 * text can never become a special token. Bounded in steps, depth, output and memory; nothing is
 * read but the arguments. */
#ifndef IMBREX_JINJA_JINJA_H
#define IMBREX_JINJA_JINJA_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct jinja_template;

/* Longest template, in bytes. */
#define JINJA_MAX_SOURCE_BYTES (1024 * 1024)
/* Deepest nesting of expressions and statements that can be asked for: a level costs about 1 KiB of
 * C stack. */
#define JINJA_MAX_DEPTH 1000

/* Parses UTF-8 source[num_bytes]. `name` is for messages, which begin "name:line: ".
 *   FORMAT        the source breaks Jinja's grammar
 *   UNSUPPORTED   it uses something that imbrex does not have: the message names it
 *   CAPACITY      too long or nested too deeply
 * The caller owns *template_out (jinja_template_destroy). */
enum imbrex_status jinja_template_parse(const char *name, const char *source, size_t num_bytes,
                                        struct jinja_template **template_out,
                                        struct imbrex_error *err);
void jinja_template_destroy(struct jinja_template *template);

struct jinja_options {
    /* Variables whose strings are user input, at any depth. Numbers carry no mark, except as a part
     * of an input list or object that is printed whole. */
    const char *const *input_names;
    size_t num_input_names;
    /* What strftime_now() shows: seconds since 1970-01-01 00:00 on the clock to be shown (for local
     * time the caller adds the offset). */
    int64_t now;
    size_t max_steps; /* nodes evaluated, and bytes and items moved (about 32 bytes a step) */
    size_t max_output_bytes;
    size_t max_memory_bytes; /* all values of a render, with their garbage, freed at its end */
    int32_t max_depth;       /* [1, JINJA_MAX_DEPTH] */
};

/* input_names {"messages", "tools", "documents"}, now 0, 50 million steps, 64 MiB of output, 256
 * MiB of memory, depth 500. */
struct jinja_options jinja_options_default(void);

/* text[begin, end) came from input variables (possibly cut, trimmed or upper-cased), or not. */
struct jinja_span {
    size_t begin, end;
    bool is_input;
};

struct jinja_output {
    char *text; /* [num_bytes], valid UTF-8, and a NUL behind it */
    size_t num_bytes;
    struct jinja_span *spans; /* cover the text in order; neighbours differ in is_input */
    size_t num_spans;
};

/* Renders with the members of `variables` (a JSON object) as the template's variables.
 *   INVALID_ARGUMENT  the template called raise_exception: the message ends with the template's own
 *   FORMAT            an operation failed that Python would refuse with these values, such as
 *                     adding a dict to a string or reading an attribute of an undefined value
 *   UNSUPPORTED       a method or a format directive that imbrex does not have
 *   CAPACITY          a limit of `options` (NULL: defaults) was reached
 * The caller owns *output (jinja_output_release). */
enum imbrex_status jinja_template_render(const struct jinja_template *template,
                                         const json_t *variables,
                                         const struct jinja_options *options,
                                         struct jinja_output *output, struct imbrex_error *err);
void jinja_output_release(struct jinja_output *output);

#endif
