/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks packed for the disk, without loss. Keys and values are numbers whose sign and exponent
 * repeat and whose last bits are noise: the bytes of all numbers are parted by their place in the
 * number, and each part is compressed by itself with zstd, or kept as it is where that gains
 * nothing. How many bytes a number has is not asked: now and then all ways are tried, and the best
 * one is gone on with.
 *
 *   uint32_t           parts, 1, 2 or 4
 *   uint32_t [parts]   bytes of each; as many as it had: it is not compressed
 *   ...                the parts
 *
 * One thread at a time uses a codec. */
#ifndef IMBREX_KV_KV_CODEC_H
#define IMBREX_KV_KV_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define KV_CODEC_DEFAULT_LEVEL 1
#define KV_CODEC_MAX_LEVEL 19

struct kv_codec;

/* False in a build without libzstd. */
bool kv_codec_is_available(void);

/* block_bytes is a multiple of 4. All memory is taken here. UNSUPPORTED without libzstd,
 * OUT_OF_MEMORY. */
enum imbrex_status kv_codec_create(size_t block_bytes, struct kv_codec **codec,
                                   struct imbrex_error *err);
/* NULL does nothing. */
void kv_codec_destroy(struct kv_codec *codec);

/* Takes the memory that packing with the level, in [1, KV_CODEC_MAX_LEVEL], needs; unpacking does
 * not. */
enum imbrex_status kv_codec_prepare_pack(struct kv_codec *codec, int32_t level,
                                         struct imbrex_error *err);
/* From now on numbers have so many bytes, 1, 2 or 4; 0: they are found out. */
void kv_codec_set_parts(struct kv_codec *codec, int32_t num_parts);
/* Into `packed`, which has room for block_bytes. The bytes that it takes there; 0: no less than
 * max_bytes, which is at most block_bytes. */
size_t kv_codec_pack(struct kv_codec *codec, const void *block, void *packed, size_t max_bytes);
/* Whatever the bytes are, nothing beyond them is read and nothing beyond the block written. False:
 * they are not what a block was packed into. May not overlap. */
bool kv_codec_unpack(struct kv_codec *codec, const void *packed, size_t num_bytes, void *block);

#endif
