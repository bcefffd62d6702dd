/* SPDX-License-Identifier: Apache-2.0 */
/* Large buffers come from mmap rather than malloc: they are zeroed, reserved without being
 * committed, and go back to the system as a whole. */
#include "base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGES_MIN_BYTES ((size_t)16 << 20)

enum imbrex_status memory_region_map(const char *what, size_t num_bytes,
                                     struct memory_region *region, struct imbrex_error *err)
{
    if (num_bytes == 0) {
        *region = (struct memory_region){0};
        return IMBREX_STATUS_OK;
    }
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t rounded_bytes;
    if (!size_add(num_bytes, page_bytes - 1, &rounded_bytes)) {
        return error_out_of_memory(err, what, num_bytes);
    }
    rounded_bytes -= rounded_bytes % page_bytes;
    /* NORESERVE: a KV cache sized for a long context may exceed the memory that a short one ever
     * touches. */
    void *base = mmap(NULL, rounded_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return error_out_of_memory(err, what, num_bytes);
    }
    if (rounded_bytes >= HUGE_PAGES_MIN_BYTES) {
        /* A wish only. Decode walks through the whole cache, at a place of many pages in each. */
        (void)madvise(base, rounded_bytes, MADV_HUGEPAGE);
    }
    *region = (struct memory_region){.base = base, .num_bytes = rounded_bytes};
    return IMBREX_STATUS_OK;
}

void memory_region_unmap(struct memory_region *region)
{
    if (region->base) {
        (void)munmap(region->base, region->num_bytes);
    }
    *region = (struct memory_region){0};
}

void *arena_take(struct arena *arena, size_t count, size_t element_bytes)
{
    size_t piece_bytes;
    size_t begin;
    size_t end;
    if (arena->overflowed || !size_mul(count, element_bytes, &piece_bytes) ||
        !size_add(arena->num_used, ARENA_ALIGNMENT - 1, &begin)) {
        arena->overflowed = true;
        return NULL;
    }
    begin -= begin % ARENA_ALIGNMENT;
    if (!size_add(begin, piece_bytes, &end)) {
        arena->overflowed = true;
        return NULL;
    }
    arena->num_used = end;
    return arena->base ? arena->base + begin : NULL;
}
