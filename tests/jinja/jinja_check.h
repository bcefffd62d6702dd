/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of chat templates share: a template and its variables as text, and what must come
 * of them. */
#ifndef IMBREX_TESTS_JINJA_CHECK_H
#define IMBREX_TESTS_JINJA_CHECK_H

#include "jinja/jinja.h"
#include "tests/test.h"

/* Parses and renders; options NULL for the defaults, err may be NULL. Templates are named "t". */
enum imbrex_status jinja_check_run(const char *source, const char *variables,
                                   const struct jinja_options *options, struct jinja_output *output,
                                   struct imbrex_error *err);

/* Fails the test unless the template prints this. */
void jinja_check_text(const char *source, const char *variables, const char *expected);
/* The same with input in [brackets]. */
void jinja_check_marks(const char *source, const char *variables, const char *expected);
/* Fails the test unless the template ends with this status and message. */
void jinja_check_error(const char *source, const char *variables,
                       const struct jinja_options *options, enum imbrex_status expected_status,
                       const char *expected_message);

#endif
