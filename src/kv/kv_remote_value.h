/* SPDX-License-Identifier: Apache-2.0 */
/* One block as a value of the remote tier:
 *
 *   0     header    224 bytes: whose block it is, which one, how it is packed
 *   224   payload   the block's bytes, as they are or as one zstd frame
 *
 * Numbers are those of the machine that wrote it; the header says which order its bytes have.
 * Nothing of a value is trusted before its checksums, and with a secret before its MAC: it may come
 * from another version, from another key, from a server that cut it off, or from anybody. Checksums
 * find accidents; against somebody who may write to the server only the MAC helps. */
#ifndef IMBREX_KV_KV_REMOTE_VALUE_H
#define IMBREX_KV_KV_REMOTE_VALUE_H

#include <stdbool.h>

#include "kv/kv_key.h"
#include "kv/kv_pool.h"

#define KV_REMOTE_VERSION 1

enum kv_remote_packing { KV_REMOTE_AS_IS = 0, KV_REMOTE_ZSTD = 1 };

struct kv_remote_header {
    unsigned char magic[8]; /* "imbrexRV" */
    uint32_t byte_order;    /* 0x01020304 as its machine writes it */
    uint32_t version;
    uint32_t block_size; /* tokens */
    uint32_t packing;    /* enum kv_remote_packing */
    uint64_t block_bytes;
    uint64_t payload_bytes;
    struct kv_key owner;
    struct kv_key key;
    int32_t token_ids[KV_BLOCK_SIZE];
    uint64_t payload_checksum[2]; /* XXH3 of all before it and the payload */
    unsigned char mac[32]; /* HMAC-SHA-256 of the same, keyed by the secret; 0: there is none */
    uint64_t checksum;     /* XXH3 of all before it */
};
_Static_assert(sizeof(struct kv_remote_header) == 224, "a header has no padding");

struct kv_remote_codec_options {
    struct kv_key owner; /* differs wherever a block of one would be wrong for the other */
    size_t block_bytes;
    const unsigned char *secret; /* [32], copied; NULL: no MAC is made, none is asked for */
    int32_t zstd_level;          /* 0: blocks are packed as they are; read are both */
};

/* Makes and reads values; one thread at a time. */
struct kv_remote_codec;

enum imbrex_status kv_remote_codec_create(const struct kv_remote_codec_options *options,
                                          struct kv_remote_codec **codec, struct imbrex_error *err);
/* NULL does nothing. */
void kv_remote_codec_destroy(struct kv_remote_codec *codec);

/* No value that this codec makes or takes is longer. */
size_t kv_remote_value_max_bytes(const struct kv_remote_codec *codec);

/* The value of a block [block_bytes]; a view, valid until the next call. */
const unsigned char *kv_remote_value_make(struct kv_remote_codec *codec, const struct kv_key *key,
                                          const int32_t *token_ids, const void *block,
                                          size_t *num_bytes);
/* Writes checksums and MAC of a value whose other fields are there, num_bytes with its payload. */
void kv_remote_value_seal(const struct kv_remote_codec *codec, unsigned char *value,
                          size_t num_bytes);
/* Whether these bytes are the block of that key and those ids; then it is written to block
 * [block_bytes], which else may be garbage. The value may lie anywhere. */
bool kv_remote_value_open(struct kv_remote_codec *codec, const struct kv_key *key,
                          const int32_t *token_ids, const unsigned char *value, size_t num_bytes,
                          void *block);

#endif
