/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_key.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

static struct kv_identity identity_of(void)
{
    struct kv_identity identity = {
        .model_id = "model",
        .layout = "f32 16",
    };
    for (int32_t i = 0; i < 32; i++) {
        identity.secret[i] = (unsigned char)i;
        identity.weight_digest[i] = (unsigned char)(255 - i);
    }
    return identity;
}

static void assert_key(const struct kv_key *key, const char *expected)
{
    char text[65];
    unsigned char bytes[32];
    memcpy(bytes, key->words, sizeof(bytes));
    for (int32_t i = 0; i < 32; i++) {
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    }
    assert_string_equal(text, expected);
}

/* Catches: a key that is not the documented hash: keys outlive the process, so they may not change
 * with compiler, machine or version. The expected ones are from Python's hashlib. */
static void test_known_keys(void **state)
{
    (void)state;
    struct kv_hasher *hasher;
    struct imbrex_error err;
    struct kv_identity identity = identity_of();
    struct kv_key root, keys[3];
    int32_t token_ids[60];
    assert_int_equal(kv_hasher_create(&hasher, &err), IMBREX_STATUS_OK);
    for (int32_t i = 0; i < 60; i++) {
        token_ids[i] = i * 70001;
    }
    kv_hasher_root(hasher, &identity, "tenant", 6, &root);
    assert_key(&root, "a77817d49978623251dcd98ce3c0f4b1feb6b6e9a4172c51c32ee0902e500aa1");
    kv_hasher_blocks(hasher, &root, token_ids, 20, 3, keys);
    assert_key(&keys[0], "3a9d6abe0777b567fa5a3618dbf06b983159a4abcab290ccdbe6ca48b87120c7");
    assert_key(&keys[2], "5a7045f491d51df6fb46e82f8c20a648a1838522022b0cd8eddd916070a8253d");
    identity.adapter = "lora";
    kv_hasher_root(hasher, &identity, NULL, 0, &root);
    assert_key(&root, "213cc60d0b405f41933aedf5333f45d7b03c69861203e811ca448ef2d2b21bfc");
    kv_hasher_destroy(hasher);
    kv_hasher_destroy(NULL);
}

/* Catches: a field that is left out, or two fields whose border can move: blocks of another model,
 * weight file, adapter, layout, tenant or process would be found. */
static void test_every_field_counts(void **state)
{
    (void)state;
    enum { NUM_ROOTS = 11 };
    struct kv_hasher *hasher;
    struct imbrex_error err;
    struct kv_key roots[NUM_ROOTS];
    assert_int_equal(kv_hasher_create(&hasher, &err), IMBREX_STATUS_OK);
    for (int32_t i = 0; i < NUM_ROOTS; i++) {
        struct kv_identity identity = identity_of();
        const char *salt = "salt";
        size_t salt_bytes = 4;
        switch (i) {
        case 1:
            identity.secret[31] ^= 1;
            break;
        case 2:
            identity.model_id = "mode";
            break;
        case 3:
            identity.weight_digest[31] ^= 1;
            break;
        case 4:
            identity.adapter = "";
            break;
        case 5:
            identity.adapter = "lora";
            break;
        case 6:
            identity.layout = "f32 8";
            break;
        case 7:
            salt = "sale";
            break;
        case 8:
            salt_bytes = 3;
            break;
        case 9:
            salt_bytes = 0;
            break;
        case 10: /* the border moves */
            identity.model_id = "mod";
            identity.layout = "elf32 16";
            break;
        default:
            break;
        }
        kv_hasher_root(hasher, &identity, salt, salt_bytes, &roots[i]);
        for (int32_t j = 0; j < i; j++) {
            assert_false(kv_key_equal(&roots[i], &roots[j]));
        }
    }
    kv_hasher_destroy(hasher);
}

/* Catches: a block's key that does not depend on each of its ids, on the blocks before it, or that
 * depends on what comes after it or on how many are asked for at once. */
static void test_chain(void **state)
{
    (void)state;
    enum { BLOCK_SIZE = 16, NUM_BLOCKS = 3 };
    struct kv_hasher *hasher;
    struct imbrex_error err;
    struct kv_key root = {{1, 2, 3, 4}}, keys[NUM_BLOCKS], others[NUM_BLOCKS];
    int32_t token_ids[BLOCK_SIZE * NUM_BLOCKS] = {0};
    assert_int_equal(kv_hasher_create(&hasher, &err), IMBREX_STATUS_OK);
    kv_hasher_blocks(hasher, &root, token_ids, BLOCK_SIZE, NUM_BLOCKS, keys);
    for (int32_t i = 0; i < BLOCK_SIZE * NUM_BLOCKS; i++) {
        token_ids[i] = 1 << (i % 31);
        kv_hasher_blocks(hasher, &root, token_ids, BLOCK_SIZE, NUM_BLOCKS, others);
        for (int32_t j = 0; j < NUM_BLOCKS; j++) {
            assert_int_equal(kv_key_equal(&keys[j], &others[j]), j < i / BLOCK_SIZE);
        }
        token_ids[i] = 0;
    }
    for (int32_t j = 0; j < NUM_BLOCKS; j++) {
        kv_hasher_blocks(hasher, j == 0 ? &root : &others[j - 1], &token_ids[j * BLOCK_SIZE],
                         BLOCK_SIZE, 1, &others[j]);
        assert_true(kv_key_equal(&keys[j], &others[j]));
    }
    root.words[3]++;
    kv_hasher_blocks(hasher, &root, token_ids, BLOCK_SIZE, NUM_BLOCKS, others);
    assert_false(kv_key_equal(&keys[0], &others[0]));
    kv_hasher_destroy(hasher);
}

/* Catches: a secret that is the same each time, or in part. */
static void test_secret(void **state)
{
    (void)state;
    struct imbrex_error err;
    unsigned char secrets[2][32] = {{0}};
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(kv_random_secret(secrets[i], &err), IMBREX_STATUS_OK);
    }
    for (int32_t i = 0; i < 32; i += 8) {
        assert_true(memcmp(&secrets[0][i], &secrets[1][i], 8) != 0);
    }
}

int run_kv_key_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_keys),
        cmocka_unit_test(test_every_field_counts),
        cmocka_unit_test(test_chain),
        cmocka_unit_test(test_secret),
    };
    return cmocka_run_group_tests_name("kv_key", tests, NULL, NULL);
}
