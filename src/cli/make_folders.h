/* SPDX-License-Identifier: Apache-2.0 */
/* Folders with those around them, made where they are missing and taken back. */
#ifndef IMBREX_CLI_MAKE_FOLDERS_H
#define IMBREX_CLI_MAKE_FOLDERS_H

#include <stddef.h>

/* *made_length: bytes of the front of `folder` that name the outermost one that was made; as it was
 * if all were there. NULL: nobody asks. Returns 0, or the errno of what could not be made. */
int make_folders(const char *folder, size_t *made_length);
/* Removes the folder and those around it down to made_length bytes, the innermost first; 0: none.
 * What somebody else has put something into stays. */
void remove_folders(const char *folder, size_t made_length);

#endif
