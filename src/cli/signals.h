/* SPDX-License-Identifier: Apache-2.0 */
/* Signals of the program: a clean end on Ctrl-C, and an error instead of a crash when a mapped
 * model file shrinks. Signal handlers reach only what is registered here. */
#ifndef IMBREX_CLI_SIGNALS_H
#define IMBREX_CLI_SIGNALS_H

#include "imbrex.h"

/* Ignores SIGPIPE (a failed write tells) and turns SIGBUS into an error line that names the file
 * and exit code 2. `model_name` must live until the end; it is named while no model is
 * registered. */
void signals_install(const char *model_name);
/* The model whose mapped files SIGBUS may hit; NULL before it is closed. */
void signals_set_model(const struct imbrex_model *model);

/* From here on SIGINT and SIGTERM cancel the registered generation. A second one, or one without a
 * generation, ends the program at once with 128 + its number. */
void signals_watch_interrupts(void);
/* Between hold and release both signals wait. Threads created meanwhile never receive them, so that
 * the handler runs on the main thread only, which is the one that destroys generations. */
void signals_hold_interrupts(void);
void signals_release_interrupts(void);
/* The generation to cancel; NULL before it is destroyed. */
void signals_set_generation(struct imbrex_generation *generation);
/* The number of the signal that cancelled, or 0. */
int signals_interrupt(void);

#endif
