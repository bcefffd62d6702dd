/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of the public API that belong to no object. */
#include <stdlib.h>

#include "imbrex.h"

const char *imbrex_version(void)
{
    return IMBREX_VERSION;
}

void imbrex_free(void *memory)
{
    free(memory);
}
