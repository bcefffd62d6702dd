/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/model/safetensors_fixture.h"

#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

unsigned char *fixture_safetensors(const char *header, size_t data_bytes, size_t *num_bytes)
{
    size_t header_bytes = strlen(header);
    unsigned char *bytes = malloc(8 + header_bytes + data_bytes);
    assert_non_null(bytes);
    for (size_t i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(header_bytes >> (8 * i));
    }
    memcpy(bytes + 8, header, header_bytes);
    for (size_t i = 0; i < data_bytes; i++) {
        bytes[8 + header_bytes + i] = (unsigned char)i;
    }
    *num_bytes = 8 + header_bytes + data_bytes;
    return bytes;
}
