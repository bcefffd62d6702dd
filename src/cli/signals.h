/* SPDX-License-Identifier: Apache-2.0 */
/* Signals of the program: a clean end on Ctrl-C, and an error instead of a crash when a mapped
 * model file shrinks. Signal handlers reach only what is registered here. */
#ifndef IMBREX_CLI_SIGNALS_H
#define IMBREX_CLI_SIGNALS_H

#include <stdbool.h>

#include "imbrex.h"

/* Ignores SIGPIPE and SIGXFSZ (a failed write tells) and turns SIGBUS into an error line: one that
 * names the file and exit code 2, if it hit the registered model; else exit code 1. */
void signals_install(void);
/* The model whose mapped files SIGBUS may hit; NULL before it is closed. */
void signals_set_model(const struct imbrex_model *model);

/* From here on SIGINT, SIGTERM and SIGHUP cancel the registered request, but one that the program
 * was started to ignore is still ignored. A second one, or one without a request, ends the program
 * at once with 128 + its number. */
void signals_watch_interrupts(void);
/* Without a request the first signal ends the program, unless this is on: then it is only noted,
 * for work that asks signals_interrupt() and has something to clean up. */
void signals_note_interrupts(bool is_on);
/* Between hold and release these signals wait. Threads created meanwhile never receive them, so
 * that the handler runs on the main thread only, which is the one that destroys requests. */
void signals_hold_interrupts(void);
void signals_release_interrupts(void);
/* The request to cancel; NULL before it is destroyed. */
void signals_set_request(struct imbrex_request *request);
/* The number of the signal that cancelled or was noted, or 0. */
int signals_interrupt(void);
/* The same, and forgets it. */
int signals_take_interrupt(void);
/* Waits, with signals held, until the file can be read without waiting (true), or a signal was
 * noted (false); then they are held again. */
bool signals_wait_for_input(int fd);

#endif
