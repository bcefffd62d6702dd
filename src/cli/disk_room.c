/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/disk_room.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "cli/engine_settings.h"
#include "cli/output.h"

#define STAT_BLOCK_BYTES 512 /* of st_blocks */

/* What the files of a folder take; 0: none is there. */
static uint64_t taken_bytes(const char *folder)
{
    uint64_t num_bytes = 0;
    DIR *entries = opendir(folder);

    if (entries == NULL) {
        return 0;
    }
    for (const struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        struct stat status;
        if (fstatat(dirfd(entries), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(status.st_mode)) {
            num_bytes += (uint64_t)status.st_blocks * STAT_BLOCK_BYTES;
        }
    }
    (void)closedir(entries);
    return num_bytes;
}

/* Of the folder, or the nearest one above it that is there. */
static int read_disk(const char *folder, struct statvfs *disk)
{
    char path[ENGINE_MAX_PATH_BYTES];

    (void)snprintf(path, sizeof(path), "%s", folder);
    while (statvfs(path, disk) != 0) {
        char *slash = strrchr(path, '/');
        if (errno != ENOENT || strcmp(path, ".") == 0 || strcmp(path, "/") == 0) {
            return -1;
        }
        if (slash == NULL) {
            (void)snprintf(path, sizeof(path), ".");
        } else {
            slash[slash == path] = '\0';
        }
    }
    return 0;
}

void disk_room_warn(const char *option, const char *folder, size_t max_bytes)
{
    struct statvfs disk;
    char wanted[SIZE_TEXT_BYTES], found[SIZE_TEXT_BYTES];

    /* Without blocks: no file system for files, such as /proc. */
    if (read_disk(folder, &disk) != 0 || disk.f_blocks == 0) {
        return;
    }
    uint64_t room = (uint64_t)disk.f_bavail * disk.f_frsize + taken_bytes(folder);
    if (room < max_bytes) {
        output_warning("--%s: %s may take %s, but its disk has room for %s: not all blocks "
                       "will be kept",
                       option, folder, output_format_size(wanted, max_bytes),
                       output_format_size(found, (size_t)room));
    }
}
