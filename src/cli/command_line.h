/* SPDX-License-Identifier: Apache-2.0 */
/* Command lines that reports name, for whoever wants the same figures again. */
#ifndef IMBREX_CLI_COMMAND_LINE_H
#define IMBREX_CLI_COMMAND_LINE_H

#include <stdio.h>

#include "cli/options.h"

/* " --name value", the value as a shell takes it. Nothing for NULL. */
void command_line_add_text(FILE *file, const char *name, const char *value);
/* Nothing if it was not given. */
void command_line_add_real(FILE *file, const char *name, const struct option_real *real);

#endif
