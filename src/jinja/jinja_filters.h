/* SPDX-License-Identifier: Apache-2.0 */
/* The filters of the two files that implement them, by what they are applied to. */
#ifndef IMBREX_JINJA_JINJA_FILTERS_H
#define IMBREX_JINJA_JINJA_FILTERS_H

#include "jinja/jinja_render.h"

/* Tables end with an entry without a name. */
extern const struct jinja_entry_point jinja_sequence_filters[];
extern const struct jinja_entry_point jinja_scalar_filters[];

/* Arguments: an int or bool; `absent` if it was not given or is none. */
enum imbrex_status jinja_filter_int(struct jinja_render *render, const struct jinja_call *call,
                                    int arg_idx, int64_t absent, int64_t *integer);
enum imbrex_status jinja_filter_fail(struct jinja_render *render, const struct jinja_call *call,
                                     const char *expected, const struct jinja_value *found);
static inline bool jinja_is_given(const struct jinja_value *arg)
{
    return arg->kind != JINJA_MISSING;
}

#endif
