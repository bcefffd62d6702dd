/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that is freed all at once: syntax trees, and the values of one render. */
#ifndef IMBREX_JINJA_JINJA_POOL_H
#define IMBREX_JINJA_JINJA_POOL_H

#include <stdbool.h>
#include <stddef.h>

struct jinja_pool_chunk;

struct jinja_pool {
    struct jinja_pool_chunk *chunks; /* the newest first */
    unsigned char *next, *end;       /* what is left of the newest small chunk */
    size_t num_bytes;                /* taken from the system, <= max_bytes */
    size_t max_bytes;
    bool is_full; /* the last failure was max_bytes, not the system */
};

void jinja_pool_init(struct jinja_pool *pool, size_t max_bytes);
void jinja_pool_deinit(struct jinja_pool *pool);

/* num_bytes of memory aligned for any value, not initialised; NULL if there is none. */
void *jinja_pool_take(struct jinja_pool *pool, size_t num_bytes);

#endif
