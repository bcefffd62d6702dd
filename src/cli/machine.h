/* SPDX-License-Identifier: Apache-2.0 */
/* Where a measurement was made: without that, figures mean little. */
#ifndef IMBREX_CLI_MACHINE_H
#define IMBREX_CLI_MACHINE_H

#include <stdint.h>

#define MACHINE_CPU_NAME_BYTES 128

struct machine {
    char cpu_name[MACHINE_CPU_NAME_BYTES]; /* as the kernel tells it, or "unknown" */
    int32_t num_cpus;                      /* that this process may run on */
    const char *version;                   /* of the library */
    const char *commit;                    /* of the tree the program was built from, or NULL */
};

void machine_describe(struct machine *machine);

#endif
