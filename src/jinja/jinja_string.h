/* SPDX-License-Identifier: Apache-2.0 */
/* Strings that know which of their bytes came from user input. Immutable; each is a window onto
 * bytes and marks that others may share, so that slices cost nothing and a string that grows by
 * concatenation is copied rarely. */
#ifndef IMBREX_JINJA_JINJA_STRING_H
#define IMBREX_JINJA_JINJA_STRING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "jinja/jinja_pool.h"

struct jinja_render;

/* Bytes of the shared buffer up to `end` (from the run before) with the same mark. */
struct jinja_run {
    size_t end;
    bool is_input;
};

/* Text under construction. */
struct jinja_text {
    char *bytes;
    size_t num_bytes, capacity;
    size_t num_chars;
    struct jinja_run *runs;
    size_t num_runs, run_capacity;
};

struct jinja_string {
    const char *bytes; /* valid UTF-8 */
    size_t num_bytes, num_chars;
    size_t offset;                /* of bytes[0] in the shared buffer */
    const struct jinja_run *runs; /* the first ends behind `offset`; the last that matters reaches
                                     offset + num_bytes or goes beyond */
    struct jinja_text *growth;    /* the text that this string is the start of, or NULL */
    bool is_markup;               /* HTML that `escape` must leave alone */
};

extern const struct jinja_string jinja_string_empty;

/* A stretch of a string with one mark. */
struct jinja_part {
    size_t begin, end;
    bool is_input;
    size_t run_idx;
};

/* Walks the parts: start with {0}; false when there is no further one. */
bool jinja_string_next_part(const struct jinja_string *string, struct jinja_part *part);

/* True if the string is not empty and all of it is input. */
bool jinja_string_is_input(const struct jinja_string *string);

size_t jinja_count_chars(const char *bytes, size_t num_bytes);

/* *string becomes a view of bytes[num_bytes] with one mark. */
void jinja_string_view(const char *bytes, size_t num_bytes, bool is_input,
                       struct jinja_string *string);
/* The same in the render's memory, without copying the bytes, which must outlive it. */
enum imbrex_status jinja_string_new(struct jinja_render *render, const char *bytes,
                                    size_t num_bytes, bool is_input,
                                    const struct jinja_string **string);

/* The bytes [begin, end) of a string; both are edges of characters. */
enum imbrex_status jinja_string_cut(struct jinja_render *render, const struct jinja_string *string,
                                    size_t begin, size_t end, const struct jinja_string **cut);

/* Where the character with this index begins (num_bytes if there are not so many). */
size_t jinja_string_char_offset(const struct jinja_string *string, size_t char_idx);

enum imbrex_status jinja_string_concat(struct jinja_render *render, const struct jinja_string *left,
                                       const struct jinja_string *right,
                                       const struct jinja_string **sum);

bool jinja_string_equal(const struct jinja_string *a, const struct jinja_string *b);
bool jinja_string_is(const struct jinja_string *string, const char *text);
/* < 0, 0, > 0 in the order of code points. */
int jinja_string_compare(const struct jinja_string *a, const struct jinja_string *b);
/* Offset of `needle` at or after `from`, or SIZE_MAX. */
size_t jinja_string_find(const struct jinja_string *string, size_t from,
                         const struct jinja_string *needle);

enum imbrex_status jinja_text_append(struct jinja_render *render, struct jinja_text *text,
                                     const char *bytes, size_t num_bytes, bool is_input);
enum imbrex_status jinja_text_append_part(struct jinja_render *render, struct jinja_text *text,
                                          const struct jinja_string *string, size_t begin,
                                          size_t end);
enum imbrex_status jinja_text_append_string(struct jinja_render *render, struct jinja_text *text,
                                            const struct jinja_string *string);
/* string * count; refused at once if that does not fit the render's memory. */
enum imbrex_status jinja_text_append_repeated(struct jinja_render *render, struct jinja_text *text,
                                              const struct jinja_string *string, size_t count);
enum imbrex_status jinja_text_append_char(struct jinja_render *render, struct jinja_text *text,
                                          uint32_t code_point, bool is_input);
/* The text as a string; it may go on growing, the string stays as it is. */
enum imbrex_status jinja_text_finish(struct jinja_render *render, const struct jinja_text *text,
                                     const struct jinja_string **string);

/* str.isspace() of one character. */
bool jinja_is_space(uint32_t code_point);
/* Letters that have upper and lower case, or are one of them. */
bool jinja_is_cased(uint32_t code_point);

/* str.upper, lower, title and capitalize, and the filter `title`, whose words begin elsewhere. */
enum jinja_case {
    JINJA_CASE_UPPER,
    JINJA_CASE_LOWER,
    JINJA_CASE_TITLE,
    JINJA_CASE_CAPITALIZE,
    JINJA_CASE_WORDS,
};
enum imbrex_status jinja_string_recase(struct jinja_render *render,
                                       const struct jinja_string *string, enum jinja_case to,
                                       const struct jinja_string **recased);

/* str.strip(chars): chars NULL for white space. Sides: bit 0 left, bit 1 right. */
enum imbrex_status jinja_string_strip(struct jinja_render *render,
                                      const struct jinja_string *string,
                                      const struct jinja_string *chars, unsigned sides,
                                      const struct jinja_string **stripped);

/* str.replace(old, replacement, count); count < 0: all. */
enum imbrex_status jinja_string_replace(struct jinja_render *render,
                                        const struct jinja_string *string,
                                        const struct jinja_string *old,
                                        const struct jinja_string *replacement, int64_t count,
                                        const struct jinja_string **replaced);

/* Markup.escape: & < > ' " become entities. */
enum imbrex_status jinja_string_escape(struct jinja_render *render,
                                       const struct jinja_string *string,
                                       const struct jinja_string **escaped);

#endif
