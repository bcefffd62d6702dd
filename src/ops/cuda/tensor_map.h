/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of matrices for the tensor memory accelerator (TMA), kept so that a launch encodes
 * none that an earlier one did. A descriptor holds an address, a shape and strides, nothing that
 * changes with the memory's contents: one that is kept stays right for as long as it is found, also
 * when the memory was freed and given out again. */
#ifndef IMBREX_OPS_CUDA_TENSOR_MAP_H
#define IMBREX_OPS_CUDA_TENSOR_MAP_H

#include <stdint.h>

#include "base/memory.h"
#include "ops/cuda/driver.h"

#define TENSOR_MAP_MAX_RANK 4
#define TENSOR_MAP_WAYS 8 /* places that one matrix may be kept in */

/* All that a descriptor is made of, the innermost dimension first. Compared byte by byte: start
 * from a zeroed struct. */
struct tensor_map_key {
    uint64_t base;                             /* device address, a multiple of 16 */
    uint64_t dims[TENSOR_MAP_MAX_RANK];        /* elements */
    uint64_t strides[TENSOR_MAP_MAX_RANK - 1]; /* bytes, of dimension 1 and up; multiples of 16 */
    uint32_t box[TENSOR_MAP_MAX_RANK];         /* elements that one copy moves */
    uint32_t rank; /* 0: nothing is encoded, being kept means that the memory was looked at */
    uint32_t swizzle, l2_promotion; /* CUtensorMapSwizzle, CUtensorMapL2promotion */
    uint32_t is_f32;                /* 1: elements are fp32; 0: bf16 */
};

struct tensor_map_entry {
    CUtensorMap map;
    uint64_t last_use; /* 0: free */
    struct tensor_map_key key;
};

/* Sets of TENSOR_MAP_WAYS entries; a key belongs to one set, in which the entry unused for longest
 * makes room. */
struct tensor_map_cache {
    struct memory_region region; /* of entries */
    uint32_t num_sets;           /* a power of two */
    uint64_t num_uses, num_encoded;
};

/* Twice the places that max_maps take, so that hardly a set is asked for more than it has. */
enum imbrex_status tensor_map_cache_init(int32_t max_maps, struct tensor_map_cache *cache,
                                         struct imbrex_error *err);
/* Safe on a zeroed struct. */
void tensor_map_cache_deinit(struct tensor_map_cache *cache);
/* A view, valid until the next add, or NULL. */
const CUtensorMap *tensor_map_find(struct tensor_map_cache *cache,
                                   const struct tensor_map_key *key);
/* Encodes a descriptor that was not found and keeps it. DEVICE if the driver refuses it; then the
 * cache is unchanged. */
enum imbrex_status tensor_map_add(struct tensor_map_cache *cache, const struct driver *driver,
                                  const struct tensor_map_key *key, const CUtensorMap **map,
                                  struct imbrex_error *err);

#endif
