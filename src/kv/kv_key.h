/* SPDX-License-Identifier: Apache-2.0 */
/* The identity of a block: what it holds, and everything before it. Two blocks with equal keys hold
 * the same keys and values.
 *
 *   root    SHA-256(secret, model id, weight digest, adapter, layout, salt), each field with its
 *           type and length in front
 *   block   SHA-256(key of the block before, or the root; token ids of the block)
 *
 * The secret makes keys unpredictable for whoever chooses the tokens; where keys must outlive the
 * process, it comes from a file. */
#ifndef IMBREX_KV_KV_KEY_H
#define IMBREX_KV_KV_KEY_H

#include "base/status.h"

struct kv_key {
    uint64_t words[4];
};

static inline bool kv_key_equal(const struct kv_key *a, const struct kv_key *b)
{
    return a->words[0] == b->words[0] && a->words[1] == b->words[1] && a->words[2] == b->words[2] &&
           a->words[3] == b->words[3];
}

/* What all blocks of one root have in common. */
struct kv_identity {
    unsigned char secret[32];
    const char *model_id; /* NUL-terminated */
    unsigned char weight_digest[32];
    const char *adapter; /* NUL-terminated, NULL: none */
    const char *layout;  /* dtype, block size, order of dimensions; NUL-terminated */
    /* For tests: blocks' keys are cut to so many bits, so that different blocks collide. 0: none is
     * cut. */
    int32_t num_weak_bits;
};

/* Computes keys; one user at a time. Allocates at creation only. */
struct kv_hasher;
enum imbrex_status kv_hasher_create(struct kv_hasher **hasher, struct imbrex_error *err);
void kv_hasher_destroy(struct kv_hasher *hasher);
/* From now on it computes keys as kv_identity.num_weak_bits says. */
void kv_hasher_weaken(struct kv_hasher *hasher, int32_t num_weak_bits);

void kv_hasher_root(struct kv_hasher *hasher, const struct kv_identity *identity, const void *salt,
                    size_t salt_bytes, struct kv_key *root);
/* keys[i] of the full block token_ids[i * block_size, (i + 1) * block_size), num_blocks of them. */
void kv_hasher_blocks(struct kv_hasher *hasher, const struct kv_key *previous,
                      const int32_t *token_ids, int32_t block_size, int32_t num_blocks,
                      struct kv_key *keys);

/* 32 bytes that nobody can guess, from the operating system. IO. */
enum imbrex_status kv_random_secret(unsigned char secret[32], struct imbrex_error *err);

#endif
