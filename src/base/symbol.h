/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of libraries that are opened at run time. */
#ifndef IMBREX_BASE_SYMBOL_H
#define IMBREX_BASE_SYMBOL_H

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

/* Writes the function of that name to a pointer to functions, of which `function` is the address.
 * False, and nothing is written: the library has none. POSIX lets the object pointer of dlsym stand
 * for a function; ISO C has no cast for it. */
static inline bool symbol_find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    if (symbol != NULL) {
        memcpy(function, &symbol, sizeof(symbol));
    }
    return symbol != NULL;
}

#endif
