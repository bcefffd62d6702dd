/* SPDX-License-Identifier: Apache-2.0 */
/* A set-associative table: bounded, no chains, and the entry that goes is the one that this set has
 * not needed for longest. Models ask for the same few hundred matrices in the same order, so what
 * matters is that all of them fit; a colder policy would not be seen. */
#include "ops/cuda/tensor_map.h"

#include <string.h>

/* Padding would be compared too, and it is not set by assignments to fields. */
_Static_assert(sizeof(struct tensor_map_key) == 8 + 8 * TENSOR_MAP_MAX_RANK +
                                                    8 * (TENSOR_MAP_MAX_RANK - 1) +
                                                    4 * TENSOR_MAP_MAX_RANK + 16,
               "struct tensor_map_key must have no padding");

enum imbrex_status tensor_map_cache_init(int32_t max_maps, struct tensor_map_cache *cache,
                                         struct imbrex_error *err)
{
    uint32_t num_sets = 1;
    while ((int64_t)num_sets * TENSOR_MAP_WAYS < 2 * (int64_t)max_maps) {
        num_sets *= 2;
    }
    struct tensor_map_cache created = {.num_sets = num_sets};
    TRY(memory_region_map("tensor maps",
                          (size_t)num_sets * TENSOR_MAP_WAYS * sizeof(struct tensor_map_entry),
                          &created.region, err));
    *cache = created;
    return IMBREX_STATUS_OK;
}

void tensor_map_cache_deinit(struct tensor_map_cache *cache)
{
    memory_region_unmap(&cache->region);
    *cache = (struct tensor_map_cache){0};
}

static struct tensor_map_entry *find_set(const struct tensor_map_cache *cache,
                                         const struct tensor_map_key *key)
{
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof(*key); i += sizeof(uint32_t)) {
        uint32_t word;
        memcpy(&word, bytes + i, sizeof(word));
        /* Odd multiplier: Knuth, The Art of Computer Programming, volume 2, section 3.3.4. */
        hash = (hash ^ word) * 6364136223846793005u;
        hash ^= hash >> 29;
    }
    struct tensor_map_entry *entries = (struct tensor_map_entry *)(void *)cache->region.base;
    return entries + (size_t)((hash >> 32) & (cache->num_sets - 1)) * TENSOR_MAP_WAYS;
}

const CUtensorMap *tensor_map_find(struct tensor_map_cache *cache, const struct tensor_map_key *key)
{
    struct tensor_map_entry *set = find_set(cache, key);
    for (int way = 0; way < TENSOR_MAP_WAYS; way++) {
        if (set[way].last_use != 0 && memcmp(&set[way].key, key, sizeof(*key)) == 0) {
            set[way].last_use = ++cache->num_uses;
            return &set[way].map;
        }
    }
    return NULL;
}

enum imbrex_status tensor_map_add(struct tensor_map_cache *cache, const struct driver *driver,
                                  const struct tensor_map_key *key, const CUtensorMap **map,
                                  struct imbrex_error *err)
{
    static const cuuint32_t element_strides[TENSOR_MAP_MAX_RANK] = {1, 1, 1, 1};
    struct tensor_map_entry *set = find_set(cache, key), *oldest = set;
    CUtensorMap encoded = {.opaque = {0}};

    if (key->rank != 0) {
        TRY(DRIVER_CALL(
            driver, err, tensor_map_encode_tiled, &encoded,
            key->is_f32 != 0 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            key->rank, (void *)(uintptr_t)key->base, key->dims, key->strides, key->box,
            element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)key->swizzle,
            (CUtensorMapL2promotion)key->l2_promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    }
    for (int way = 1; way < TENSOR_MAP_WAYS; way++) {
        if (set[way].last_use < oldest->last_use) {
            oldest = &set[way];
        }
    }
    oldest->key = *key;
    oldest->map = encoded;
    oldest->last_use = ++cache->num_uses;
    cache->num_encoded++;
    *map = &oldest->map;
    return IMBREX_STATUS_OK;
}
