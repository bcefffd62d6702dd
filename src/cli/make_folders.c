/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/make_folders.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int make_folders(const char *folder, size_t *made_length)
{
    char path[PATH_MAX];
    size_t length = strlen(folder);
    bool has_made = false;

    if (length >= sizeof(path)) {
        return ENAMETOOLONG;
    }
    memcpy(path, folder, length + 1);
    for (size_t i = 1; i <= length; i++) {
        char end = path[i];
        if (end != '/' && end != '\0') {
            continue;
        }
        path[i] = '\0';
        if (mkdir(path, 0777) == 0) {
            if (made_length != NULL && !has_made) {
                *made_length = i;
            }
            has_made = true;
        } else if (errno != EEXIST) {
            return errno;
        }
        path[i] = end;
    }
    return 0;
}

void remove_folders(const char *folder, size_t made_length)
{
    char path[PATH_MAX];
    size_t length = strlen(folder);

    if (made_length == 0 || length >= sizeof(path)) {
        return;
    }
    memcpy(path, folder, length + 1);
    while (length >= made_length) {
        path[length] = '\0';
        (void)rmdir(path);
        do {
            length--;
        } while (length > 0 && path[length] != '/');
    }
}
