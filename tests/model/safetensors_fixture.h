/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_TESTS_MODEL_SAFETENSORS_FIXTURE_H
#define IMBREX_TESTS_MODEL_SAFETENSORS_FIXTURE_H

#include <stddef.h>

/* A safetensors file: the length of the header, the header, data_bytes bytes counting up from 0.
 * Allocated to exactly its size, so that a sanitizer sees a read behind it; the caller frees it. */
unsigned char *fixture_safetensors(const char *header, size_t data_bytes, size_t *num_bytes);

#endif
