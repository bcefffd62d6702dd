/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

/* XXH3 reads 20 GB/s and more from memory, several times what a disk gives, and is not meant
 * against forgery: who can write the folder can do worse. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#define PAGE_BYTES ((size_t)KV_BLOCK_ALIGNMENT)
#define BYTE_ORDER_MARK UINT32_C(0x01020304)

static const char magic[8] = {'i', 'm', 'b', 'r', 'e', 'x', 'K', 'V'};
static const char extension[] = ".imbrex-kv";
static const char partial_extension[] = ".part";

/* ---- layout ---------------------------------------------------------------------------------- */

struct kv_segment_layout kv_segment_layout(size_t block_bytes, size_t segment_bytes,
                                           const struct kv_key *owner)
{
    size_t num_blocks = segment_bytes / block_bytes;
    if (num_blocks > KV_SEGMENT_MAX_BLOCKS) {
        num_blocks = KV_SEGMENT_MAX_BLOCKS;
    }
    num_blocks = num_blocks > 0 ? num_blocks : 1;
    return (struct kv_segment_layout){.num_blocks = (int32_t)num_blocks,
                                      .num_slots = 2 * (int32_t)num_blocks,
                                      .block_bytes = block_bytes,
                                      .owner = *owner};
}

struct kv_segment_layout kv_segment_with_blocks(const struct kv_segment_layout *layout,
                                                int32_t num_blocks)
{
    struct kv_segment_layout smaller = *layout;
    smaller.num_blocks = num_blocks;
    smaller.num_slots = 2 * num_blocks;
    return smaller;
}

uint32_t kv_segment_num_pages(size_t num_bytes)
{
    return (uint32_t)((num_bytes + PAGE_BYTES - 1) / PAGE_BYTES);
}

uint32_t kv_segment_first_page(const struct kv_segment_layout *layout)
{
    return 1 + kv_segment_num_pages((size_t)layout->num_slots * sizeof(struct kv_segment_entry));
}

int64_t kv_segment_file_bytes(const struct kv_segment_layout *layout)
{
    return (int64_t)PAGE_BYTES * kv_segment_first_page(layout) +
           (int64_t)layout->block_bytes * layout->num_blocks;
}

int64_t kv_segment_block_offset(const struct kv_segment_entry *entry)
{
    return (int64_t)PAGE_BYTES * entry->first_page;
}

size_t kv_segment_page_bytes(const struct kv_segment_entry *entry)
{
    return PAGE_BYTES * kv_segment_num_pages(entry->stored_bytes);
}

static int64_t entry_offset(int32_t slot_idx)
{
    return (int64_t)PAGE_BYTES + (int64_t)sizeof(struct kv_segment_entry) * slot_idx;
}

/* ---- names ----------------------------------------------------------------------------------- */

void kv_segment_name(uint32_t number, bool is_partial, char name[KV_SEGMENT_NAME_BYTES])
{
    (void)snprintf(name, KV_SEGMENT_NAME_BYTES, "%08x%s%s", (unsigned)number, extension,
                   is_partial ? partial_extension : "");
}

bool kv_segment_parse_name(const char *name, uint32_t *number, bool *is_partial)
{
    uint32_t parsed = 0;
    for (int32_t i = 0; i < 8; i++) {
        const char *digits = "0123456789abcdef";
        const char *digit = name[i] != '\0' ? strchr(digits, name[i]) : NULL;
        if (digit == NULL) {
            return false;
        }
        parsed = parsed * 16 + (uint32_t)(digit - digits);
    }
    if (strncmp(name + 8, extension, strlen(extension)) != 0) {
        return false;
    }
    const char *rest = name + 8 + strlen(extension);
    if (*rest != '\0' && strcmp(rest, partial_extension) != 0) {
        return false;
    }
    *number = parsed;
    *is_partial = *rest != '\0';
    return true;
}

/* ---- checksums ------------------------------------------------------------------------------- */

static uint64_t entry_checksum(const struct kv_segment_entry *entry)
{
    return XXH3_64bits(entry, offsetof(struct kv_segment_entry, checksum));
}

static uint64_t header_checksum(const struct kv_segment_header *header)
{
    return XXH3_64bits(header, offsetof(struct kv_segment_header, checksum));
}

/* Its place is not in it: a block that is moved keeps it. */
static XXH128_hash_t block_checksum(const struct kv_segment_entry *entry, const void *stored)
{
    uint64_t seed = XXH3_64bits(entry, offsetof(struct kv_segment_entry, first_page));
    return XXH3_128bits_withSeed(stored, entry->stored_bytes, seed);
}

void kv_segment_reseal(struct kv_segment_entry *entry)
{
    entry->checksum = entry_checksum(entry);
}

void kv_segment_seal(struct kv_segment_entry *entry, const void *stored)
{
    XXH128_hash_t checksum = block_checksum(entry, stored);
    entry->block_checksum[0] = checksum.low64;
    entry->block_checksum[1] = checksum.high64;
    kv_segment_reseal(entry);
}

bool kv_segment_is_intact(const struct kv_segment_entry *entry, const void *stored)
{
    XXH128_hash_t checksum = block_checksum(entry, stored);
    return checksum.low64 == entry->block_checksum[0] &&
           checksum.high64 == entry->block_checksum[1];
}

/* ---- create and scan ------------------------------------------------------------------------- */

static struct kv_segment_header make_header(const struct kv_segment_layout *layout)
{
    struct kv_segment_header header;
    memset(&header, 0, sizeof(header)); /* padding too: it is in the checksum */
    memcpy(header.magic, magic, sizeof(magic));
    header.byte_order = BYTE_ORDER_MARK;
    header.version = KV_SEGMENT_VERSION;
    header.num_blocks = (uint32_t)layout->num_blocks;
    header.block_size = KV_BLOCK_SIZE;
    header.block_bytes = layout->block_bytes;
    header.owner = layout->owner;
    header.checksum = header_checksum(&header);
    return header;
}

int kv_segment_create(const struct kv_files *files, const char *path,
                      const struct kv_segment_layout *layout)
{
    char partial_path[4096];
    struct kv_segment_header header = make_header(layout);
    int length = snprintf(partial_path, sizeof(partial_path), "%s%s", path, partial_extension);
    if (length < 0 || (size_t)length >= sizeof(partial_path)) {
        return -ENAMETOOLONG;
    }
    int fd = files->open(files->user, partial_path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0) {
        return fd;
    }
    int failure;
    do {
        failure = files->resize(files->user, fd, kv_segment_file_bytes(layout));
    } while (failure == -EINTR);
    if (failure == 0) {
        failure = kv_files_write_all(files, fd, &header, sizeof(header), 0);
    }
    files->close(files->user, fd);
    if (failure == 0) {
        failure = files->rename(files->user, partial_path, path);
    }
    if (failure != 0) {
        (void)files->remove(files->user, partial_path);
    }
    return failure;
}

static bool is_empty(const struct kv_segment_entry *entry)
{
    static const struct kv_segment_entry zero;
    return memcmp(entry, &zero, sizeof(zero)) == 0;
}

static bool is_valid(const struct kv_segment_layout *layout, int64_t file_bytes,
                     const struct kv_segment_entry *entry)
{
    int64_t end = kv_segment_block_offset(entry) + (int64_t)kv_segment_page_bytes(entry);
    return entry->checksum == entry_checksum(entry) && entry->stored_bytes > 0 &&
           entry->stored_bytes <= layout->block_bytes &&
           entry->first_page >= kv_segment_first_page(layout) && end <= file_bytes &&
           end <= kv_segment_file_bytes(layout);
}

/* Leaves only entries that are valid and whose block lies inside the file. */
static void check_entries(const struct kv_segment_layout *layout, int64_t file_bytes,
                          struct kv_segment_entry *entries, int32_t *num_broken)
{
    for (int32_t i = 0; i < layout->num_slots; i++) {
        struct kv_segment_entry *entry = &entries[i];
        if (is_empty(entry)) {
            continue;
        }
        if (!is_valid(layout, file_bytes, entry)) {
            memset(entry, 0, sizeof(*entry));
            (*num_broken)++;
        }
    }
}

/* Whether the header is ours, of a segment that is no larger than the layout's. */
static bool is_ours(const struct kv_segment_header *header, const struct kv_segment_layout *layout)
{
    if (header->num_blocks < 1 || header->num_blocks > (uint32_t)layout->num_blocks) {
        return false;
    }
    struct kv_segment_layout own = kv_segment_with_blocks(layout, (int32_t)header->num_blocks);
    struct kv_segment_header expected = make_header(&own);
    return memcmp(header, &expected, sizeof(expected)) == 0;
}

/* Of ours: its entries; those that it has not are empty. */
static int read_entries(const struct kv_files *files, int fd,
                        const struct kv_segment_layout *layout, struct kv_segment_entry *entries,
                        struct kv_segment_contents *contents)
{
    struct kv_segment_layout own = kv_segment_with_blocks(layout, contents->num_blocks);
    size_t wanted_bytes = (size_t)own.num_slots * sizeof(*entries);
    memset(entries, 0, (size_t)layout->num_slots * sizeof(*entries));
    if (contents->num_bytes < (int64_t)(PAGE_BYTES + wanted_bytes)) { /* cut off inside the table */
        contents->num_broken++;
        return 0;
    }
    int failure = kv_files_read_all(files, fd, entries, wanted_bytes, (int64_t)PAGE_BYTES);
    if (failure == 0) {
        check_entries(&own, contents->num_bytes, entries, &contents->num_broken);
    }
    return failure;
}

static int scan_open(const struct kv_files *files, int fd, const struct kv_segment_layout *layout,
                     struct kv_segment_entry *entries, struct kv_segment_contents *contents)
{
    static const struct kv_segment_header unwritten;
    struct kv_segment_header header;
    int64_t file_bytes = files->size(files->user, fd);
    if (file_bytes < 0) {
        return (int)file_bytes;
    }
    contents->num_bytes = file_bytes;
    int failure = kv_files_read_all(files, fd, &header, sizeof(header), 0);
    if (file_bytes == 0 || (failure == 0 && memcmp(&header, &unwritten, sizeof(header)) == 0)) {
        contents->kind = KV_SEGMENT_UNWRITTEN;
        return 0;
    }
    if (failure == -ENODATA || (failure == 0 && memcmp(header.magic, magic, sizeof(magic)) != 0)) {
        return 0;
    }
    if (failure != 0) {
        return failure;
    }
    if (!is_ours(&header, layout)) {
        contents->kind = KV_SEGMENT_FOREIGN;
        contents->num_broken += header.byte_order == BYTE_ORDER_MARK &&
                                header.version == KV_SEGMENT_VERSION &&
                                header.checksum != header_checksum(&header);
        return 0;
    }
    contents->kind = KV_SEGMENT_OURS;
    contents->num_blocks = (int32_t)header.num_blocks;
    return read_entries(files, fd, layout, entries, contents);
}

int kv_segment_scan(const struct kv_files *files, const char *path,
                    const struct kv_segment_layout *layout, struct kv_segment_entry *entries,
                    struct kv_segment_contents *contents)
{
    *contents = (struct kv_segment_contents){.kind = KV_SEGMENT_UNKNOWN};
    int fd = files->open(files->user, path, O_RDONLY, 0);
    if (fd < 0) {
        return fd;
    }
    int failure = scan_open(files, fd, layout, entries, contents);
    files->close(files->user, fd);
    return failure;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

int kv_segment_write(const struct kv_files *files, const char *path, int32_t slot_idx,
                     const struct kv_segment_entry *entry, const void *stored)
{
    int fd = files->open(files->user, path, O_WRONLY, 0);
    if (fd < 0) {
        return fd;
    }
    int failure = kv_files_write_all(files, fd, stored, kv_segment_page_bytes(entry),
                                     kv_segment_block_offset(entry));
    if (failure == 0) {
        failure = kv_files_write_all(files, fd, entry, sizeof(*entry), entry_offset(slot_idx));
    }
    files->close(files->user, fd);
    return failure;
}

int kv_segment_read(const struct kv_files *files, const char *path,
                    const struct kv_segment_entry *entry, void *block)
{
    int64_t offset = kv_segment_block_offset(entry);
    size_t num_bytes = kv_segment_page_bytes(entry);
    int fd = files->open(files->user, path, O_RDONLY, 0);
    if (fd < 0) {
        return fd;
    }
    if ((uintptr_t)block % PAGE_BYTES == 0) {
        files->prefer_direct(files->user, fd, offset, num_bytes);
    }
    int failure = kv_files_read_all(files, fd, block, num_bytes, offset);
    files->close(files->user, fd);
    return failure;
}
