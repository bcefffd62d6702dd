/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/tuned_path.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/make_folders.h"
#include "cli/output.h"

const char *tuned_default_folder(void)
{
    static char folder[PATH_MAX];
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = 0;

    /* A relative one is to be ignored, says the XDG base directory specification. */
    if (cache != NULL && cache[0] == '/') {
        length = snprintf(folder, sizeof(folder), "%s/imbrex/tune", cache);
    } else if (home != NULL && home[0] == '/') {
        length = snprintf(folder, sizeof(folder), "%s/.cache/imbrex/tune", home);
    }
    return length > 0 && (size_t)length < sizeof(folder) ? folder : NULL;
}

int tuned_choose(const char *command, const char *option, const char **path, bool *is_optional)
{
    if (option == NULL) {
        *path = tuned_default_folder();
        *is_optional = true;
        return EXIT_CODE_OK;
    }
    if (option[0] == '\0') {
        output_error("%s--tuned: expected a file, a folder or none, found \"\"", command);
        return EXIT_CODE_INPUT;
    }
    *path = strcmp(option, "none") == 0 ? NULL : option;
    *is_optional = false;
    return EXIT_CODE_OK;
}

int tuned_make_folder(const char *folder)
{
    int failure = make_folders(folder, NULL);

    if (failure != 0) {
        output_error("%s: cannot create: %s", folder, output_system_error(failure));
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}
