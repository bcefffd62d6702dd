/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/machine.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "imbrex.h"

/* The first "model name" of /proc/cpuinfo; other architectures than x86 may have none. */
static void read_cpu_name(char name[MACHINE_CPU_NAME_BYTES])
{
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "re");

    snprintf(name, MACHINE_CPU_NAME_BYTES, "unknown");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", strlen("model name")) == 0 && colon != NULL) {
            const char *begin = colon + 1 + strspn(colon + 1, " \t");
            snprintf(name, MACHINE_CPU_NAME_BYTES, "%.*s", (int)strcspn(begin, "\n"), begin);
            break;
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}

void machine_describe(struct machine *machine)
{
    cpu_set_t cpus;

    read_cpu_name(machine->cpu_name);
    machine->num_cpus = sched_getaffinity(0, sizeof(cpus), &cpus) == 0
                            ? CPU_COUNT(&cpus)
                            : (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    machine->version = imbrex_version();
#ifdef IMBREX_COMMIT
    machine->commit = IMBREX_COMMIT[0] != '\0' ? IMBREX_COMMIT : NULL;
#else
    machine->commit = NULL;
#endif
}
