/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_codec.h"

#if IMBREX_HAS_ZSTD

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <zstd.h>

#define MAX_PARTS 4
#define TRY_EVERY 512 /* blocks: trying costs three times as much */

struct kv_codec {
    size_t block_bytes;
    int32_t num_parts; /* of what is packed */
    bool is_fixed;     /* they were set */
    uint64_t num_packed;
    ZSTD_CCtx *packer; /* NULL: prepare was not called */
    ZSTD_DCtx *unpacker;
    unsigned char *part;    /* [block_bytes] one part at a time */
    unsigned char *attempt; /* [attempt_bytes] what zstd makes of it, were it more */
    size_t attempt_bytes;
};

bool kv_codec_is_available(void)
{
    return true;
}

enum imbrex_status kv_codec_create(size_t block_bytes, struct kv_codec **codec,
                                   struct imbrex_error *err)
{
    struct kv_codec *created = calloc(1, sizeof(*created));
    assert(block_bytes > 0 && block_bytes % MAX_PARTS == 0);
    if (created != NULL) {
        created->block_bytes = block_bytes;
        created->unpacker = ZSTD_createDCtx();
        created->part = malloc(block_bytes);
    }
    if (created == NULL || created->unpacker == NULL || created->part == NULL) {
        kv_codec_destroy(created);
        return error_out_of_memory(err, "the disk tier's codec", block_bytes);
    }
    *codec = created;
    return IMBREX_STATUS_OK;
}

void kv_codec_destroy(struct kv_codec *codec)
{
    if (codec != NULL) {
        (void)ZSTD_freeCCtx(codec->packer);
        (void)ZSTD_freeDCtx(codec->unpacker);
        free(codec->part);
        free(codec->attempt);
        free(codec);
    }
}

enum imbrex_status kv_codec_prepare_pack(struct kv_codec *codec, int32_t level,
                                         struct imbrex_error *err)
{
    assert(level >= 1 && level <= KV_CODEC_MAX_LEVEL);
    codec->attempt_bytes = ZSTD_compressBound(codec->block_bytes);
    codec->attempt = malloc(codec->attempt_bytes);
    codec->packer = ZSTD_createCCtx();
    /* What this call takes, later ones find. */
    if (codec->attempt == NULL || codec->packer == NULL ||
        ZSTD_isError(ZSTD_CCtx_setParameter(codec->packer, ZSTD_c_compressionLevel, level)) ||
        ZSTD_isError(ZSTD_compress2(codec->packer, codec->attempt, codec->attempt_bytes,
                                    memset(codec->part, 0, codec->block_bytes),
                                    codec->block_bytes))) {
        return error_out_of_memory(err, "the disk tier's codec", codec->attempt_bytes);
    }
    return IMBREX_STATUS_OK;
}

void kv_codec_set_parts(struct kv_codec *codec, int32_t num_parts)
{
    assert(num_parts == 0 || num_parts == 1 || num_parts == 2 || num_parts == MAX_PARTS);
    codec->num_parts = num_parts;
    codec->is_fixed = num_parts > 0;
    codec->num_packed = 0;
}

/* Byte i of each number of `block`. */
static void gather(const unsigned char *block, size_t part_bytes, int32_t num_parts, int32_t i,
                   unsigned char *part)
{
    for (size_t j = 0; j < part_bytes; j++) {
        part[j] = block[j * (size_t)num_parts + (size_t)i];
    }
}

static void scatter(const unsigned char *part, size_t part_bytes, int32_t num_parts, int32_t i,
                    unsigned char *block)
{
    for (size_t j = 0; j < part_bytes; j++) {
        block[j * (size_t)num_parts + (size_t)i] = part[j];
    }
}

static size_t pack_parts(struct kv_codec *codec, const void *block, int32_t num_parts, void *packed,
                         size_t max_bytes)
{
    uint32_t head[1 + MAX_PARTS] = {(uint32_t)num_parts};
    unsigned char *next = packed;
    size_t head_bytes = (1 + (size_t)num_parts) * sizeof(head[0]), num_bytes = head_bytes;
    size_t part_bytes = codec->block_bytes / (size_t)num_parts;
    for (int32_t i = 0; i < num_parts; i++) {
        const unsigned char *part = block;
        if (num_parts > 1) {
            gather(block, part_bytes, num_parts, i, codec->part);
            part = codec->part;
        }
        size_t stored_bytes =
            ZSTD_compress2(codec->packer, codec->attempt, codec->attempt_bytes, part, part_bytes);
        if (!ZSTD_isError(stored_bytes) && stored_bytes < part_bytes) {
            part = codec->attempt;
        } else {
            stored_bytes = part_bytes;
        }
        if (num_bytes + stored_bytes >= max_bytes) {
            return 0;
        }
        memcpy(next + num_bytes, part, stored_bytes);
        num_bytes += stored_bytes;
        head[1 + i] = (uint32_t)stored_bytes;
    }
    memcpy(packed, head, head_bytes);
    return num_bytes;
}

size_t kv_codec_pack(struct kv_codec *codec, const void *block, void *packed, size_t max_bytes)
{
    assert(codec->packer != NULL && max_bytes <= codec->block_bytes);
    if (!codec->is_fixed && codec->num_packed % TRY_EVERY == 0) {
        size_t least = max_bytes;
        codec->num_parts = 1;
        for (int32_t num_parts = 1; num_parts <= MAX_PARTS; num_parts *= 2) {
            size_t num_bytes = pack_parts(codec, block, num_parts, packed, least);
            if (num_bytes > 0) {
                codec->num_parts = num_parts;
                least = num_bytes;
            }
        }
    }
    codec->num_packed++;
    return pack_parts(codec, block, codec->num_parts, packed, max_bytes);
}

bool kv_codec_unpack(struct kv_codec *codec, const void *packed, size_t num_bytes, void *block)
{
    uint32_t num_parts, lengths[MAX_PARTS];
    const unsigned char *next = packed;
    if (num_bytes < sizeof(num_parts)) {
        return false;
    }
    memcpy(&num_parts, next, sizeof(num_parts));
    if ((num_parts != 1 && num_parts != 2 && num_parts != 4) ||
        num_bytes < (1 + (size_t)num_parts) * sizeof(num_parts)) {
        return false;
    }
    memcpy(lengths, next + sizeof(num_parts), num_parts * sizeof(lengths[0]));
    next += (1 + (size_t)num_parts) * sizeof(num_parts);
    num_bytes -= (1 + (size_t)num_parts) * sizeof(num_parts);
    size_t part_bytes = codec->block_bytes / num_parts;
    for (uint32_t i = 0; i < num_parts; i++) {
        const unsigned char *part = next;
        if (lengths[i] > num_bytes || lengths[i] > part_bytes) {
            return false;
        }
        if (lengths[i] < part_bytes) {
            unsigned char *unpacked = num_parts > 1 ? codec->part : block;
            if (ZSTD_decompressDCtx(codec->unpacker, unpacked, part_bytes, part, lengths[i]) !=
                part_bytes) {
                return false;
            }
            part = unpacked;
        }
        if (num_parts > 1) {
            scatter(part, part_bytes, (int32_t)num_parts, (int32_t)i, block);
        } else if (part != block) {
            memcpy(block, part, part_bytes);
        }
        next += lengths[i];
        num_bytes -= lengths[i];
    }
    return num_bytes == 0;
}

#else

bool kv_codec_is_available(void)
{
    return false;
}

enum imbrex_status kv_codec_create(size_t block_bytes, struct kv_codec **codec,
                                   struct imbrex_error *err)
{
    (void)block_bytes, (void)codec;
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "the disk tier: expected a build with libzstd, found one without");
}

void kv_codec_destroy(struct kv_codec *codec)
{
    (void)codec;
}

enum imbrex_status kv_codec_prepare_pack(struct kv_codec *codec, int32_t level,
                                         struct imbrex_error *err)
{
    (void)level;
    return kv_codec_create(0, &codec, err);
}

void kv_codec_set_parts(struct kv_codec *codec, int32_t num_parts)
{
    (void)codec, (void)num_parts;
}

size_t kv_codec_pack(struct kv_codec *codec, const void *block, void *packed, size_t max_bytes)
{
    (void)codec, (void)block, (void)packed, (void)max_bytes;
    return 0;
}

bool kv_codec_unpack(struct kv_codec *codec, const void *packed, size_t num_bytes, void *block)
{
    (void)codec, (void)packed, (void)num_bytes, (void)block;
    return false;
}

#endif
