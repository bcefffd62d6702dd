/* SPDX-License-Identifier: Apache-2.0 */
#include "kv_block.h"

void make_block(int32_t i, struct kv_key *key, int32_t ids[KV_BLOCK_SIZE],
                unsigned char contents[BLOCK_BYTES])
{
    *key = (struct kv_key){{(uint64_t)i + 1, 7, 8, 9}};
    for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
        ids[j] = i + j;
    }
    for (int32_t j = 0; j < BLOCK_BYTES; j++) {
        contents[j] = (unsigned char)(i * 31 + j * 7 + j / 256);
    }
}
