/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 from libcrypto. Its EVP interface would take the providers of the whole library into a
 * program that is linked statically, and look an algorithm up at run time, which can fail; the
 * functions of SHA-256 itself take in little more than the compression function, cannot fail, and
 * use the processor's SHA instructions all the same. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "kv/kv_key.h"

#include <assert.h>
#include <errno.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct kv_hasher {
    SHA256_CTX context;
    int32_t num_weak_bits; /* 0: keys are whole */
};

/* Types of the fields of a root. */
enum field {
    FIELD_SECRET = 1,
    FIELD_MODEL_ID = 2,
    FIELD_WEIGHT_DIGEST = 3,
    FIELD_ADAPTER = 4,
    FIELD_LAYOUT = 5,
    FIELD_SALT = 6,
};

enum imbrex_status kv_hasher_create(struct kv_hasher **hasher, struct imbrex_error *err)
{
    struct kv_hasher *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the hasher of block keys", sizeof(*created));
    }
    *hasher = created;
    return IMBREX_STATUS_OK;
}

void kv_hasher_weaken(struct kv_hasher *hasher, int32_t num_weak_bits)
{
    assert(num_weak_bits >= 0 && num_weak_bits < 64);
    hasher->num_weak_bits = num_weak_bits;
}

void kv_hasher_destroy(struct kv_hasher *hasher)
{
    free(hasher);
}

static void finish(struct kv_hasher *hasher, struct kv_key *key)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256_Final(digest, &hasher->context);
    _Static_assert(sizeof(digest) == sizeof(key->words), "a key is a SHA-256");
    memcpy(key->words, digest, sizeof(key->words));
}

/* One byte of type, eight of length (little-endian), the bytes: no two lists of fields have the
 * same image. */
static void add_field(struct kv_hasher *hasher, enum field field, const void *bytes,
                      size_t num_bytes)
{
    unsigned char head[9] = {(unsigned char)field};
    for (size_t i = 0; i < 8; i++) {
        head[1 + i] = (unsigned char)((uint64_t)num_bytes >> (8 * i));
    }
    SHA256_Update(&hasher->context, head, sizeof(head));
    if (num_bytes > 0) {
        SHA256_Update(&hasher->context, bytes, num_bytes);
    }
}

static void add_text(struct kv_hasher *hasher, enum field field, const char *text)
{
    add_field(hasher, field, text, strlen(text));
}

void kv_hasher_root(struct kv_hasher *hasher, const struct kv_identity *identity, const void *salt,
                    size_t salt_bytes, struct kv_key *root)
{
    SHA256_Init(&hasher->context);
    add_field(hasher, FIELD_SECRET, identity->secret, sizeof(identity->secret));
    add_text(hasher, FIELD_MODEL_ID, identity->model_id);
    add_field(hasher, FIELD_WEIGHT_DIGEST, identity->weight_digest,
              sizeof(identity->weight_digest));
    /* No adapter is not the same as one without a name. */
    if (identity->adapter != NULL) {
        add_text(hasher, FIELD_ADAPTER, identity->adapter);
    }
    add_text(hasher, FIELD_LAYOUT, identity->layout);
    add_field(hasher, FIELD_SALT, salt, salt_bytes);
    finish(hasher, root);
}

/* Ids as bytes, the lowest first on every machine. */
static void add_token_ids(struct kv_hasher *hasher, const int32_t *token_ids, int32_t num_tokens)
{
    enum { MAX_IDS = 16 };
    unsigned char bytes[4 * MAX_IDS];
    while (num_tokens > 0) {
        int32_t num_ids = num_tokens < MAX_IDS ? num_tokens : MAX_IDS;
        for (int32_t i = 0; i < num_ids; i++) {
            uint32_t id = (uint32_t)token_ids[i];
            bytes[4 * i] = (unsigned char)id;
            bytes[4 * i + 1] = (unsigned char)(id >> 8);
            bytes[4 * i + 2] = (unsigned char)(id >> 16);
            bytes[4 * i + 3] = (unsigned char)(id >> 24);
        }
        SHA256_Update(&hasher->context, bytes, 4 * (size_t)num_ids);
        token_ids += num_ids;
        num_tokens -= num_ids;
    }
}

void kv_hasher_blocks(struct kv_hasher *hasher, const struct kv_key *previous,
                      const int32_t *token_ids, int32_t block_size, int32_t num_blocks,
                      struct kv_key *keys)
{
    for (int32_t i = 0; i < num_blocks; i++) {
        SHA256_Init(&hasher->context);
        SHA256_Update(&hasher->context, previous->words, sizeof(previous->words));
        add_token_ids(hasher, token_ids + (size_t)i * (size_t)block_size, block_size);
        finish(hasher, &keys[i]);
        if (hasher->num_weak_bits > 0) {
            uint64_t mask = (UINT64_C(1) << hasher->num_weak_bits) - 1;
            keys[i] = (struct kv_key){{keys[i].words[0] & mask, 0, 0, 0}};
        }
        previous = &keys[i];
    }
}

enum imbrex_status kv_random_secret(unsigned char secret[32], struct imbrex_error *err)
{
    unsigned char bytes[32];
    size_t num_bytes = 0;
    while (num_bytes < sizeof(bytes)) {
        ssize_t num_read = getrandom(bytes + num_bytes, sizeof(bytes) - num_bytes, 0);
        if (num_read < 0 && errno != EINTR) {
            return error_set(err, IMBREX_STATUS_IO, "secret of block keys: no random bytes: %s",
                             system_error_text(errno));
        }
        num_bytes += num_read > 0 ? (size_t)num_read : 0;
    }
    memcpy(secret, bytes, sizeof(bytes));
    return IMBREX_STATUS_OK;
}
