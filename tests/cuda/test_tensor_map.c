/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/tensor_map.h"

#include <string.h>

#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

static struct tensor_map_key key_of(uint64_t base)
{
    struct tensor_map_key key;
    memset(&key, 0, sizeof(key));
    key.base = base;
    key.rank = 2;
    key.dims[0] = 128;
    key.dims[1] = 64;
    key.strides[0] = 256;
    key.box[0] = 64;
    key.box[1] = 64;
    return key;
}

static const CUtensorMap *find_or_add(struct tensor_map_cache *cache,
                                      const struct tensor_map_key *key)
{
    struct driver driver = fake_table();
    const CUtensorMap *map = tensor_map_find(cache, key);
    if (map == NULL) {
        assert_int_equal(tensor_map_add(cache, &driver, key, &map, NULL), IMBREX_STATUS_OK);
    }
    return map;
}

/* Catches a descriptor that is found for a matrix which differs in one field only. */
static void test_every_field_counts(void **state)
{
    (void)state;
    struct tensor_map_cache cache = {0};
    fake_reset();
    assert_int_equal(tensor_map_cache_init(64, &cache, NULL), IMBREX_STATUS_OK);
    struct tensor_map_key key = key_of(4096);
    const CUtensorMap *first = find_or_add(&cache, &key);
    assert_int_equal(first->opaque[0], 4096);
    assert_ptr_equal(tensor_map_find(&cache, &key), first);
    for (size_t i = 0; i < sizeof(struct tensor_map_key); i += 4) {
        struct tensor_map_key other = key;
        ((unsigned char *)&other)[i] ^= 16;
        assert_null(tensor_map_find(&cache, &other));
    }
    assert_int_equal(fake.num_encoded, 1);
    tensor_map_cache_deinit(&cache);
}

/* Catches a cache that grows, and one that drops what was used last. */
static void test_memory_is_bounded(void **state)
{
    (void)state;
    struct tensor_map_cache cache = {0};
    fake_reset();
    assert_int_equal(tensor_map_cache_init(64, &cache, NULL), IMBREX_STATUS_OK);
    assert_true(cache.num_sets * TENSOR_MAP_WAYS >= 64);
    size_t num_bytes = cache.region.num_bytes;
    struct tensor_map_key kept = key_of(1 << 20);
    for (uint64_t i = 0; i < 10000; i++) {
        struct tensor_map_key key = key_of((2 + i) << 20);
        const CUtensorMap *map = find_or_add(&cache, &key);
        assert_int_equal(map->opaque[0], key.base);
        map = find_or_add(&cache, &kept);
        assert_int_equal(map->opaque[0], kept.base);
    }
    assert_int_equal(cache.region.num_bytes, num_bytes);
    /* Asked for after every other one, it was never the one to go. */
    assert_int_equal(fake.num_encoded, 10001);
    tensor_map_cache_deinit(&cache);
}

/* Catches a hash that puts the matrices of a model, which differ in few bits, into few sets. */
static void test_matrices_of_a_model_fit(void **state)
{
    (void)state;
    struct tensor_map_cache cache = {0};
    fake_reset();
    assert_int_equal(tensor_map_cache_init(1024, &cache, NULL), IMBREX_STATUS_OK);
    for (int round = 0; round < 3; round++) {
        for (uint64_t layer = 0; layer < 80; layer++) {
            for (uint64_t matrix = 0; matrix < 6; matrix++) {
                struct tensor_map_key key =
                    key_of((layer * 6 + matrix) * (UINT64_C(8192) * 29568 * 2));
                key.dims[0] += 64 * matrix;
                (void)find_or_add(&cache, &key);
            }
        }
    }
    /* 480 in 1024 places: hardly any has to be encoded again. */
    assert_in_range(fake.num_encoded, 480, 480 + 24);
    tensor_map_cache_deinit(&cache);
}

/* Catches a place that is taken although the driver refused the descriptor. */
static void test_refused_descriptor_is_not_kept(void **state)
{
    (void)state;
    struct tensor_map_cache cache = {0};
    struct imbrex_error err = {0};
    const CUtensorMap *map = NULL;
    fake_reset();
    assert_int_equal(tensor_map_cache_init(8, &cache, NULL), IMBREX_STATUS_OK);
    struct tensor_map_key key = key_of(4096);
    struct driver driver = fake_table();
    fake.fail_at = 1;
    assert_int_equal(tensor_map_add(&cache, &driver, &key, &map, &err), IMBREX_STATUS_DEVICE);
    assert_null(map);
    assert_null(tensor_map_find(&cache, &key));
    assert_non_null(find_or_add(&cache, &key));
    tensor_map_cache_deinit(&cache);
}

int run_tensor_map_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_field_counts),
        cmocka_unit_test(test_memory_is_bounded),
        cmocka_unit_test(test_matrices_of_a_model_fit),
        cmocka_unit_test(test_refused_descriptor_is_not_kept),
    };
    return cmocka_run_group_tests_name("tensor_map", tests, NULL, NULL);
}
