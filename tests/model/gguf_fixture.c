/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/model/gguf_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

static void append(struct gguf_fixture *fixture, const void *bytes, size_t num_bytes)
{
    assert_true(num_bytes <= sizeof(fixture->bytes) - fixture->num_bytes);
    memcpy(fixture->bytes + fixture->num_bytes, bytes, num_bytes);
    fixture->num_bytes += num_bytes;
}

void gguf_fixture_integer(struct gguf_fixture *fixture, uint64_t value, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes; i++) {
        unsigned char byte = (unsigned char)(value >> (8 * i));
        append(fixture, &byte, 1);
    }
}

void gguf_fixture_text(struct gguf_fixture *fixture, const char *text)
{
    gguf_fixture_integer(fixture, strlen(text), 8);
    append(fixture, text, strlen(text));
}

void gguf_fixture_begin(struct gguf_fixture *fixture, uint32_t version, uint64_t num_tensors,
                        uint64_t num_values)
{
    fixture->num_bytes = 0;
    append(fixture, "GGUF", 4);
    gguf_fixture_integer(fixture, version, 4);
    gguf_fixture_integer(fixture, num_tensors, 8);
    gguf_fixture_integer(fixture, num_values, 8);
}

void gguf_fixture_key(struct gguf_fixture *fixture, const char *key, uint32_t type)
{
    gguf_fixture_text(fixture, key);
    gguf_fixture_integer(fixture, type, 4);
}

void gguf_fixture_uint32(struct gguf_fixture *fixture, const char *key, uint32_t value)
{
    gguf_fixture_key(fixture, key, 4);
    gguf_fixture_integer(fixture, value, 4);
}

void gguf_fixture_float32(struct gguf_fixture *fixture, const char *key, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    gguf_fixture_key(fixture, key, 6);
    gguf_fixture_integer(fixture, bits, 4);
}

void gguf_fixture_string(struct gguf_fixture *fixture, const char *key, const char *value)
{
    gguf_fixture_key(fixture, key, 8);
    gguf_fixture_text(fixture, value);
}

void gguf_fixture_tensor(struct gguf_fixture *fixture, const char *name, uint32_t num_dims,
                         const uint64_t *extents, uint32_t type, uint64_t offset)
{
    gguf_fixture_text(fixture, name);
    gguf_fixture_integer(fixture, num_dims, 4);
    for (uint32_t i = num_dims; i-- > 0;) {
        gguf_fixture_integer(fixture, extents[i], 8);
    }
    gguf_fixture_integer(fixture, type, 4);
    gguf_fixture_integer(fixture, offset, 8);
}

void gguf_fixture_elements(struct gguf_fixture *fixture, size_t num_bytes)
{
    while (fixture->num_bytes % 32 != 0) {
        gguf_fixture_integer(fixture, 0, 1);
    }
    for (size_t i = 0; i < num_bytes; i++) {
        gguf_fixture_integer(fixture, i, 1);
    }
}

unsigned char *gguf_fixture_copy(const struct gguf_fixture *fixture)
{
    unsigned char *copy = malloc(fixture->num_bytes);
    assert_non_null(copy);
    memcpy(copy, fixture->bytes, fixture->num_bytes);
    return copy;
}

void gguf_fixture_llama(struct gguf_fixture *fixture, const char *architecture, uint64_t num_more,
                        gguf_fixture_fn *more)
{
    static const struct {
        const char *name;
        uint64_t rows, columns; /* columns 0: a vector */
    } tensors[] = {
        {"token_embd.weight", 8, 32},      {"output_norm.weight", 32, 0},
        {"blk.0.attn_norm.weight", 32, 0}, {"blk.0.ffn_norm.weight", 32, 0},
        {"blk.0.attn_q.weight", 32, 32},   {"blk.0.attn_k.weight", 16, 32},
        {"blk.0.attn_v.weight", 16, 32},   {"blk.0.attn_output.weight", 32, 32},
        {"blk.0.ffn_gate.weight", 64, 32}, {"blk.0.ffn_up.weight", 64, 32},
        {"blk.0.ffn_down.weight", 32, 64},
    };
    static const struct {
        const char *suffix;
        uint32_t value;
    } values[] = {
        {"block_count", 1},          {"embedding_length", 32},       {"feed_forward_length", 64},
        {"attention.head_count", 2}, {"attention.head_count_kv", 1}, {"context_length", 128},
    };
    const size_t num_tensors = sizeof(tensors) / sizeof(tensors[0]);
    const size_t num_values = sizeof(values) / sizeof(values[0]);
    char key[64];
    uint64_t offset = 0;
    gguf_fixture_begin(fixture, 3, num_tensors, num_values + 2 + num_more);
    gguf_fixture_string(fixture, "general.architecture", architecture);
    for (size_t i = 0; i < num_values; i++) {
        snprintf(key, sizeof(key), "%s.%s", architecture, values[i].suffix);
        gguf_fixture_uint32(fixture, key, values[i].value);
    }
    snprintf(key, sizeof(key), "%s.attention.layer_norm_rms_epsilon", architecture);
    gguf_fixture_float32(fixture, key, 1e-5f);
    if (more != NULL) {
        more(fixture);
    }
    for (size_t i = 0; i < num_tensors; i++) {
        const uint64_t extents[] = {tensors[i].rows, tensors[i].columns};
        uint64_t columns = tensors[i].columns > 0 ? tensors[i].columns : 1;
        gguf_fixture_tensor(fixture, tensors[i].name, tensors[i].columns > 0 ? 2 : 1, extents, 0,
                            offset);
        offset += 4 * tensors[i].rows * columns;
    }
    gguf_fixture_elements(fixture, offset);
}
