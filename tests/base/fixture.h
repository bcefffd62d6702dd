/* SPDX-License-Identifier: Apache-2.0 */
/* What tests of files and refusals share: a scratch folder, and a check of an error as a whole. */
#ifndef IMBREX_TESTS_BASE_FIXTURE_H
#define IMBREX_TESTS_BASE_FIXTURE_H

#include <stddef.h>

#include "imbrex.h"

#define FIXTURE_PATH_BYTES 512

/* Writes the path of an entry of the scratch folder, which is made if need be; nothing stands at
 * the path afterwards (a folder must be empty for that). Returns `path`. */
const char *fixture_path(char path[FIXTURE_PATH_BYTES], const char *name);
/* The same, with an empty folder at the path: files of an earlier run are deleted. */
const char *fixture_folder(char path[FIXTURE_PATH_BYTES], const char *name);
/* Deletes the files of a folder, wherever it is; does nothing if there is none. */
void fixture_empty_folder(const char *path);
/* Writes a file. */
void fixture_write(const char *path, const void *bytes, size_t num_bytes);
void fixture_write_in(const char *folder, const char *name, const void *bytes, size_t num_bytes);
void fixture_write_text(const char *folder, const char *name, const char *text);
/* A file as a whole, with a NUL behind it; the caller frees it. */
char *fixture_read(const char *path, size_t *num_bytes);

/* Fails unless `status` is `expected`, stands in err too, and the message is one line that holds
 * every one of the fragments, separated by '|' ("config.json|head_dim|found 7"). */
void expect_error(enum imbrex_status status, enum imbrex_status expected,
                  const struct imbrex_error *err, const char *fragments);

#endif
