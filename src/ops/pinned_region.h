/* SPDX-License-Identifier: Apache-2.0 */
/* A large piece of host memory that a device copies from and to at its full speed. Pages have to be
 * there before a device can lock them, and filling them is most of the time that locking takes: so
 * several threads touch them, on the device's NUMA node where the system lets us choose, while the
 * calling one registers what is touched, chunk by chunk.
 *
 *   threads   | touch chunk 0 | touch chunk 1 | touch chunk 2 |
 *   caller                    | register 0    | register 1    | register 2 |
 *
 * Chunks, because one registration of hundreds of GiB is refused; each is a whole number of the
 * units that are copied, since a copy may not cross from one registration into the next. On a
 * device that has done all work when a call returns nothing is touched: pages come when they are
 * used. */
#ifndef IMBREX_OPS_PINNED_REGION_H
#define IMBREX_OPS_PINNED_REGION_H

#include "base/memory.h"
#include "ops/device.h"

struct pinned_region {
    unsigned char *base; /* zeroed memory; NULL: nothing */
    size_t num_bytes;    /* whole units, and whole pages */
    struct memory_region memory;
    struct device *device; /* outlives the region */
    size_t chunk_bytes;    /* of each registration but the last, which may be smaller */
    int32_t num_registered, num_chunks;
    int32_t num_threads; /* that touched it, the calling one included; 0: nobody did */
    int32_t node;        /* whose memory it prefers; -1: the system chose */
};

/* num_units >= 1 units of unit_bytes, whole pages of 4 KiB; `what` names the region in the error.
 * chunk_bytes: of one registration, roughly; 0: 256 MiB. OUT_OF_MEMORY, or what registering gives:
 * nothing is left registered then. */
enum imbrex_status pinned_region_map(struct device *device, const char *what, size_t num_units,
                                     size_t unit_bytes, size_t chunk_bytes,
                                     struct pinned_region *region, struct imbrex_error *err);
/* Safe on a zeroed struct. Nothing may be copied any more. */
void pinned_region_unmap(struct pinned_region *region);

#endif
