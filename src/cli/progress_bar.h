/* SPDX-License-Identifier: Apache-2.0 */
/* A line on standard error that shows how far something is. Whether there is to be one (a terminal,
 * no --quiet) is the caller's to know. */
#ifndef IMBREX_CLI_PROGRESS_BAR_H
#define IMBREX_CLI_PROGRESS_BAR_H

/* Draws over the line: `share` in [0, 1] of the bar, and a text behind it. */
void progress_bar_draw(double share, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Leaves the line empty. */
void progress_bar_clear(void);

#endif
