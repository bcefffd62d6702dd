/* SPDX-License-Identifier: Apache-2.0 */
/* The files of the disk tier. A segment has room for a number of blocks that its header says:
 *
 *   0             header    what the file is and of whom; 4 KiB
 *   4096          entries   [num_slots] x 128 bytes, rounded up to 4 KiB
 *   blocks begin  blocks    num_blocks x block_bytes, a multiple of 4 KiB
 *
 * Segments of one folder may differ in num_blocks; num_slots is twice that.
 *
 * Blocks lie one behind the other, each from the beginning of a page on, as they are or packed
 * (kv_codec.h): so a segment has room for at least num_blocks of them, and places for twice as
 * many.
 *
 * A segment gets its name when its header is whole. A block is written before its entry, and no
 * place is written twice: so whatever is cut off leaves either a valid entry with its block or no
 * entry. What a power failure does to the order is found by the checksums. Numbers are those of the
 * machine; the header says which order its bytes have.
 *
 * Nothing that is read is trusted before its checksum: not a header, not an entry, not a block. */
#ifndef IMBREX_KV_KV_SEGMENT_H
#define IMBREX_KV_KV_SEGMENT_H

#include <stdbool.h>

#include "kv/kv_files.h"
#include "kv/kv_key.h"
#include "kv/kv_pool.h"

#define KV_SEGMENT_VERSION 2
#define KV_SEGMENT_MAX_BLOCKS 1024
#define KV_SEGMENT_NAME_BYTES 24 /* of "0123abcd.imbrex-kv" and what follows */

struct kv_segment_header {
    unsigned char magic[8]; /* "imbrexKV" */
    uint32_t byte_order;    /* 0x01020304 as its machine writes it */
    uint32_t version;
    uint32_t num_blocks;
    uint32_t block_size; /* tokens */
    uint64_t block_bytes;
    struct kv_key owner; /* whose blocks these are: kv_disk_options.owner */
    uint64_t checksum;   /* of all before it */
};

struct kv_segment_entry {
    struct kv_key key;
    int32_t token_ids[KV_BLOCK_SIZE];
    uint32_t first_page;        /* of the file, where the block begins */
    uint32_t stored_bytes;      /* of it there; block_bytes: it is not packed */
    uint64_t block_checksum[2]; /* of key, token ids and what lies there */
    uint64_t checksum;          /* of all before it, so that an empty place is not valid */
};
_Static_assert(sizeof(struct kv_segment_entry) == 128, "a page has whole entries");

struct kv_segment_layout {
    int32_t num_blocks; /* that there is room for if none is packed */
    int32_t num_slots;  /* 2 x num_blocks: entries */
    size_t block_bytes; /* at most UINT32_MAX */
    struct kv_key owner;
};

/* As many blocks as fit segment_bytes, at least one, at most KV_SEGMENT_MAX_BLOCKS. */
struct kv_segment_layout kv_segment_layout(size_t block_bytes, size_t segment_bytes,
                                           const struct kv_key *owner);
/* The same of a smaller segment, of num_blocks. */
struct kv_segment_layout kv_segment_with_blocks(const struct kv_segment_layout *layout,
                                                int32_t num_blocks);
/* The page of the file that the first block begins with. */
uint32_t kv_segment_first_page(const struct kv_segment_layout *layout);
int64_t kv_segment_file_bytes(const struct kv_segment_layout *layout);
/* Pages that so many bytes of a block take. */
uint32_t kv_segment_num_pages(size_t num_bytes);

/* is_partial: of one that is not finished. */
void kv_segment_name(uint32_t number, bool is_partial, char name[KV_SEGMENT_NAME_BYTES]);
/* False for a name that no segment has. *is_partial: it is one that was never finished. */
bool kv_segment_parse_name(const char *name, uint32_t *number, bool *is_partial);

/* Everything but the checksums of the entry is there. stored: [stored_bytes]. */
void kv_segment_seal(struct kv_segment_entry *entry, const void *stored);
/* The same for a block that is moved: first_page alone has changed. */
void kv_segment_reseal(struct kv_segment_entry *entry);
/* Whether `stored` is what the entry's key, ids and block checksum say. */
bool kv_segment_is_intact(const struct kv_segment_entry *entry, const void *stored);

/* Makes an empty segment and gives it its name. 0 or -errno; then there is no such file. */
int kv_segment_create(const struct kv_files *files, const char *path,
                      const struct kv_segment_layout *layout);

enum kv_segment_kind {
    KV_SEGMENT_OURS,
    KV_SEGMENT_FOREIGN, /* of another model, layout, version or secret; or its header is damaged */
    KV_SEGMENT_UNWRITTEN, /* nothing, or zeros where the header is to be */
    KV_SEGMENT_UNKNOWN,   /* no segment at all, or nobody can tell */
};

struct kv_segment_contents {
    enum kv_segment_kind kind;
    int32_t num_blocks; /* of ours: as its layout has them */
    int64_t num_bytes;  /* of the file */
    int32_t num_broken; /* entries that are neither valid nor empty, or whose block is cut off */
};

/* What a segment holds, as it is found after a restart: of that layout, or a smaller one.
 *   entries   [num_slots], written if it is ours: those that are not valid are zeroed; of the
 *             others, block and file fit each other
 *   contents  written, also after a failure
 * 0 or -errno. */
int kv_segment_scan(const struct kv_files *files, const char *path,
                    const struct kv_segment_layout *layout, struct kv_segment_entry *entries,
                    struct kv_segment_contents *contents);

/* A sealed entry and its block: `stored` has whole pages, the last one filled up. 0 or -errno. */
int kv_segment_write(const struct kv_files *files, const char *path, int32_t slot_idx,
                     const struct kv_segment_entry *entry, const void *stored);
/* Where in the file the block of an entry begins, and what its pages take. */
int64_t kv_segment_block_offset(const struct kv_segment_entry *entry);
size_t kv_segment_page_bytes(const struct kv_segment_entry *entry);
/* Its pages into `block`, which has room for them; not checked yet. 0 or -errno. */
int kv_segment_read(const struct kv_files *files, const char *path,
                    const struct kv_segment_entry *entry, void *block);

#endif
