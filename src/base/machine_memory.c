/* SPDX-License-Identifier: Apache-2.0 */
#include "base/machine_memory.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MAX_PATH_BYTES 4096
#define MAX_LINE_BYTES 4096

static FILE *open_below(const char *root, const char *path)
{
    char joined[MAX_PATH_BYTES];
    int length = snprintf(joined, sizeof(joined), "%s%s", root, path);
    return length >= 0 && (size_t)length < sizeof(joined) ? fopen(joined, "re") : NULL;
}

static size_t at_most(size_t bytes, uint64_t limit)
{
    return limit < bytes ? (size_t)limit : bytes;
}

/* SIZE_MAX: not told. */
static size_t read_available(const char *root)
{
    char line[MAX_LINE_BYTES];
    uint64_t kibibytes;
    size_t found = SIZE_MAX;
    FILE *file = open_below(root, "/proc/meminfo");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kibibytes) == 1 &&
            kibibytes <= SIZE_MAX / 1024) {
            found = (size_t)kibibytes * 1024;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return found;
}

/* "max", and what no machine has, are no limits. */
static size_t read_limit(const char *root, const char *path)
{
    uint64_t limit;
    size_t found = SIZE_MAX;
    FILE *file = open_below(root, path);
    if (file != NULL) {
        found = fscanf(file, "%" SCNu64, &limit) == 1 ? at_most(SIZE_MAX, limit) : SIZE_MAX;
        (void)fclose(file);
    }
    return found;
}

/* The least limit of a group and those that it is in. In a container the group's path may be the
 * host's, of which only the end, or nothing, is there: what is not there has no limit. */
static size_t read_group(const char *root, const char *mount, char *group, const char *name)
{
    char path[MAX_PATH_BYTES];
    size_t least = SIZE_MAX;
    for (;;) {
        int length = snprintf(path, sizeof(path), "%s%s/%s", mount, group, name);
        if (length >= 0 && (size_t)length < sizeof(path)) {
            least = at_most(least, read_limit(root, path));
        }
        char *slash = strrchr(group, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

/* Lines are "number:controllers:/path"; of version 2 there is one, without controllers. */
static size_t read_groups(const char *root)
{
    char line[MAX_LINE_BYTES];
    size_t least = SIZE_MAX;
    FILE *file = open_below(root, "/proc/self/cgroup");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        if (controllers[1] == '\0') {
            least = at_most(least, read_group(root, "/sys/fs/cgroup", group, "memory.max"));
        } else if (strstr(controllers + 1, "memory") != NULL) {
            least = at_most(
                least, read_group(root, "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return least;
}

size_t machine_memory_bytes(const char *root)
{
    return at_most(read_available(root), read_groups(root));
}
