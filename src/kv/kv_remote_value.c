/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 as in kv_key.c, for the same reasons. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "kv/kv_remote_value.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if IMBREX_HAS_ZSTD
#include <zstd.h>
#endif

#define XXH_INLINE_ALL
#include <xxhash.h>

#define BYTE_ORDER_MARK UINT32_C(0x01020304)
#define HMAC_BLOCK_BYTES 64

static const char magic[8] = {'i', 'm', 'b', 'r', 'e', 'x', 'R', 'V'};

struct kv_remote_codec {
    struct kv_remote_codec_options options;
    unsigned char secret[32];
    unsigned char *value; /* [max_bytes] the one that was made last */
    size_t max_bytes;
#if IMBREX_HAS_ZSTD
    ZSTD_CCtx *compressor; /* NULL: level 0 */
    ZSTD_DCtx *decompressor;
#endif
};

/* ---- checksums ------------------------------------------------------------------------------- */

static uint64_t header_checksum(const struct kv_remote_header *header)
{
    return XXH3_64bits(header, offsetof(struct kv_remote_header, checksum));
}

static XXH128_hash_t payload_checksum(const struct kv_remote_header *header,
                                      const unsigned char *payload, size_t num_bytes)
{
    uint64_t seed = XXH3_64bits(header, offsetof(struct kv_remote_header, payload_checksum));
    return XXH3_128bits_withSeed(payload, num_bytes, seed);
}

/* HMAC-SHA-256 (RFC 2104) of the header up to its MAC and the payload. */
static void make_mac(const struct kv_remote_codec *codec, const struct kv_remote_header *header,
                     const unsigned char *payload, size_t num_bytes, unsigned char mac[32])
{
    unsigned char inner_key[HMAC_BLOCK_BYTES], outer_key[HMAC_BLOCK_BYTES];
    SHA256_CTX context;
    for (size_t i = 0; i < HMAC_BLOCK_BYTES; i++) {
        unsigned char byte = i < sizeof(codec->secret) ? codec->secret[i] : 0;
        inner_key[i] = byte ^ 0x36;
        outer_key[i] = byte ^ 0x5c;
    }
    SHA256_Init(&context);
    SHA256_Update(&context, inner_key, sizeof(inner_key));
    SHA256_Update(&context, header, offsetof(struct kv_remote_header, mac));
    SHA256_Update(&context, payload, num_bytes);
    SHA256_Final(mac, &context);
    SHA256_Init(&context);
    SHA256_Update(&context, outer_key, sizeof(outer_key));
    SHA256_Update(&context, mac, 32);
    SHA256_Final(mac, &context);
}

void kv_remote_value_seal(const struct kv_remote_codec *codec, unsigned char *value,
                          size_t num_bytes)
{
    struct kv_remote_header header;
    const unsigned char *payload = value + sizeof(header);
    size_t payload_bytes = num_bytes - sizeof(header);
    memcpy(&header, value, sizeof(header));
    XXH128_hash_t checksum = payload_checksum(&header, payload, payload_bytes);
    header.payload_checksum[0] = checksum.low64;
    header.payload_checksum[1] = checksum.high64;
    memset(header.mac, 0, sizeof(header.mac));
    if (codec->options.secret != NULL) {
        make_mac(codec, &header, payload, payload_bytes, header.mac);
    }
    header.checksum = header_checksum(&header);
    memcpy(value, &header, sizeof(header));
}

/* ---- make ------------------------------------------------------------------------------------ */

/* Writes the payload behind the header's place. */
static enum kv_remote_packing pack(struct kv_remote_codec *codec, const void *block,
                                   size_t *payload_bytes)
{
    unsigned char *payload = codec->value + sizeof(struct kv_remote_header);
    size_t block_bytes = codec->options.block_bytes;
#if IMBREX_HAS_ZSTD
    if (codec->compressor != NULL) {
        size_t num_bytes = ZSTD_compressCCtx(codec->compressor, payload,
                                             codec->max_bytes - sizeof(struct kv_remote_header),
                                             block, block_bytes, codec->options.zstd_level);
        if (!ZSTD_isError(num_bytes) && num_bytes < block_bytes) {
            *payload_bytes = num_bytes;
            return KV_REMOTE_ZSTD;
        }
    }
#endif
    memcpy(payload, block, block_bytes);
    *payload_bytes = block_bytes;
    return KV_REMOTE_AS_IS;
}

static struct kv_remote_header make_header(const struct kv_remote_codec *codec,
                                           const struct kv_key *key, const int32_t *token_ids)
{
    struct kv_remote_header header = {.byte_order = BYTE_ORDER_MARK,
                                      .version = KV_REMOTE_VERSION,
                                      .block_size = KV_BLOCK_SIZE,
                                      .block_bytes = codec->options.block_bytes,
                                      .owner = codec->options.owner,
                                      .key = *key};
    memcpy(header.magic, magic, sizeof(magic));
    memcpy(header.token_ids, token_ids, sizeof(header.token_ids));
    return header;
}

const unsigned char *kv_remote_value_make(struct kv_remote_codec *codec, const struct kv_key *key,
                                          const int32_t *token_ids, const void *block,
                                          size_t *num_bytes)
{
    size_t payload_bytes;
    struct kv_remote_header header = make_header(codec, key, token_ids);
    header.packing = (uint32_t)pack(codec, block, &payload_bytes);
    header.payload_bytes = payload_bytes;
    memcpy(codec->value, &header, sizeof(header));
    *num_bytes = sizeof(header) + payload_bytes;
    kv_remote_value_seal(codec, codec->value, *num_bytes);
    return codec->value;
}

/* ---- open ------------------------------------------------------------------------------------ */

static bool unpack(struct kv_remote_codec *codec, enum kv_remote_packing packing,
                   const unsigned char *payload, size_t num_bytes, void *block)
{
    size_t block_bytes = codec->options.block_bytes;
    if (packing == KV_REMOTE_AS_IS) {
        if (num_bytes == block_bytes) {
            memcpy(block, payload, block_bytes);
        }
        return num_bytes == block_bytes;
    }
#if IMBREX_HAS_ZSTD
    /* An error is a number larger than any block. */
    return packing == KV_REMOTE_ZSTD && ZSTD_decompressDCtx(codec->decompressor, block, block_bytes,
                                                            payload, num_bytes) == block_bytes;
#else
    return false;
#endif
}

bool kv_remote_value_open(struct kv_remote_codec *codec, const struct kv_key *key,
                          const int32_t *token_ids, const unsigned char *value, size_t num_bytes,
                          void *block)
{
    struct kv_remote_header header, expected = make_header(codec, key, token_ids);
    unsigned char mac[32];
    if (num_bytes < sizeof(header)) {
        return false;
    }
    memcpy(&header, value, sizeof(header));
    const unsigned char *payload = value + sizeof(header);
    size_t payload_bytes = num_bytes - sizeof(header);
    expected.packing = header.packing;
    expected.payload_bytes = payload_bytes;
    if (memcmp(&header, &expected, offsetof(struct kv_remote_header, payload_checksum)) != 0 ||
        header.checksum != header_checksum(&header)) {
        return false;
    }
    XXH128_hash_t checksum = payload_checksum(&header, payload, payload_bytes);
    if (checksum.low64 != header.payload_checksum[0] ||
        checksum.high64 != header.payload_checksum[1]) {
        return false;
    }
    if (codec->options.secret != NULL) {
        make_mac(codec, &header, payload, payload_bytes, mac);
        if (CRYPTO_memcmp(mac, header.mac, sizeof(mac)) != 0) {
            return false;
        }
    }
    return unpack(codec, (enum kv_remote_packing)header.packing, payload, payload_bytes, block);
}

/* ---- create and destroy ---------------------------------------------------------------------- */

size_t kv_remote_value_max_bytes(const struct kv_remote_codec *codec)
{
    return codec->max_bytes;
}

/* The most that a payload may take; a frame that is no shorter than its block is not kept. */
static size_t max_payload_bytes(size_t block_bytes)
{
#if IMBREX_HAS_ZSTD
    return ZSTD_compressBound(block_bytes);
#else
    return block_bytes;
#endif
}

enum imbrex_status kv_remote_codec_create(const struct kv_remote_codec_options *options,
                                          struct kv_remote_codec **codec, struct imbrex_error *err)
{
    struct kv_remote_codec *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the remote tier's values", sizeof(*created));
    }
    created->options = *options;
    if (options->secret != NULL) {
        memcpy(created->secret, options->secret, sizeof(created->secret));
        created->options.secret = created->secret;
    }
    created->max_bytes = sizeof(struct kv_remote_header) + max_payload_bytes(options->block_bytes);
    created->value = malloc(created->max_bytes);
    bool is_good = created->value != NULL;
#if IMBREX_HAS_ZSTD
    created->compressor = options->zstd_level > 0 ? ZSTD_createCCtx() : NULL;
    created->decompressor = ZSTD_createDCtx();
    is_good = is_good && created->decompressor != NULL &&
              (created->compressor != NULL || options->zstd_level == 0);
#endif
    if (!is_good) {
        size_t num_bytes = created->max_bytes;
        kv_remote_codec_destroy(created);
        return error_out_of_memory(err, "the remote tier's values", num_bytes);
    }
    *codec = created;
    return IMBREX_STATUS_OK;
}

void kv_remote_codec_destroy(struct kv_remote_codec *codec)
{
    if (codec == NULL) {
        return;
    }
#if IMBREX_HAS_ZSTD
    ZSTD_freeCCtx(codec->compressor);
    ZSTD_freeDCtx(codec->decompressor);
#endif
    free(codec->value);
    OPENSSL_cleanse(codec->secret, sizeof(codec->secret));
    free(codec);
}
