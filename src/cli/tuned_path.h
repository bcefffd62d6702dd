/* SPDX-License-Identifier: Apache-2.0 */
/* Where tables of tuned plans lie: the library reads no environment, the program does. */
#ifndef IMBREX_CLI_TUNED_PATH_H
#define IMBREX_CLI_TUNED_PATH_H

#include <stdbool.h>
#include <stddef.h>

/* Help of the option --tuned, which all commands that use a GPU have. */
#define TUNED_HELP \
    "on a GPU, the plans of imbrex tune: its file, a folder with a file for each card, or none"
#define TUNED_DEFAULT_TEXT "$XDG_CACHE_HOME/imbrex/tune, where it is there"

/* "$XDG_CACHE_HOME/imbrex/tune", or "$HOME/.cache/imbrex/tune". NULL if neither is an absolute
 * path, or it is too long. Static storage: the environment stays what it is. */
const char *tuned_default_folder(void);
/* What --tuned means, where NULL is not given: *path for the library, NULL for none, and whether it
 * may be missing. Returns an exit code. */
int tuned_choose(const char *command, const char *option, const char **path, bool *is_optional);
/* Makes the folders of a path that are not there. Returns an exit code. */
int tuned_make_folder(const char *folder);

#endif
