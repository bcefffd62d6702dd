/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files piece by piece, right or wrong ones, without the code that they test. */
#ifndef IMBREX_TESTS_MODEL_GGUF_FIXTURE_H
#define IMBREX_TESTS_MODEL_GGUF_FIXTURE_H

#include <stddef.h>
#include <stdint.h>

#define GGUF_FIXTURE_BYTES (1 << 17)

struct gguf_fixture {
    unsigned char bytes[GGUF_FIXTURE_BYTES];
    size_t num_bytes;
};

/* Starts anew: magic, version, both counts. */
void gguf_fixture_begin(struct gguf_fixture *fixture, uint32_t version, uint64_t num_tensors,
                        uint64_t num_values);
/* Little-endian, num_bytes of it. */
void gguf_fixture_integer(struct gguf_fixture *fixture, uint64_t value, size_t num_bytes);
void gguf_fixture_text(struct gguf_fixture *fixture, const char *text);
/* A key and a type; the value must follow. */
void gguf_fixture_key(struct gguf_fixture *fixture, const char *key, uint32_t type);
void gguf_fixture_uint32(struct gguf_fixture *fixture, const char *key, uint32_t value);
void gguf_fixture_float32(struct gguf_fixture *fixture, const char *key, float value);
void gguf_fixture_string(struct gguf_fixture *fixture, const char *key, const char *value);
/* extents[num_dims], row-major. */
void gguf_fixture_tensor(struct gguf_fixture *fixture, const char *name, uint32_t num_dims,
                         const uint64_t *extents, uint32_t type, uint64_t offset);
/* Pads to 32 bytes, then num_bytes bytes counting up from 0. */
void gguf_fixture_elements(struct gguf_fixture *fixture, size_t num_bytes);
/* A copy of exactly the size, so that a sanitizer sees a read behind it; the caller frees it. */
unsigned char *gguf_fixture_copy(const struct gguf_fixture *fixture);

/* A llama of one layer that opens: hidden 32, two heads of 16, one of keys and values, intermediate
 * 64, 8 rows of vocabulary. All F32, elements counting up. No tokenizer. num_more values must be
 * put by `more` (may be NULL). */
typedef void gguf_fixture_fn(struct gguf_fixture *fixture);
void gguf_fixture_llama(struct gguf_fixture *fixture, const char *architecture, uint64_t num_more,
                        gguf_fixture_fn *more);

#endif
