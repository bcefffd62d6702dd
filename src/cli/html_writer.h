/* SPDX-License-Identifier: Apache-2.0 */
/* Writing HTML. Markup and text are written by different functions, so that what comes from a user
 * or a file never becomes markup. Failures stay in the stream: ask ferror() at the end. */
#ifndef IMBREX_CLI_HTML_WRITER_H
#define IMBREX_CLI_HTML_WRITER_H

#include <stdio.h>

/* The program's own markup. A %s takes the program's own words only. */
void html_markup(FILE *file, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Any bytes, for an element's text or an attribute in double quotes. What is no UTF-8 or a control
 * character becomes U+FFFD. */
void html_text(FILE *file, const char *text);

#endif
