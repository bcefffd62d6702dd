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

static size_t table_bytes(int32_t num_slots)
{
    size_t num_bytes = (size_t)num_slots * sizeof(struct kv_segment_entry);
    return (num_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

int32_t kv_segment_num_slots(size_t block_bytes, size_t segment_bytes)
{
    size_t num_slots = segment_bytes / block_bytes;
    if (num_slots > KV_SEGMENT_MAX_SLOTS) {
        return KV_SEGMENT_MAX_SLOTS;
    }
    return num_slots > 0 ? (int32_t)num_slots : 1;
}

int64_t kv_segment_block_offset(const struct kv_segment_layout *layout, int32_t slot_idx)
{
    return (int64_t)(PAGE_BYTES + table_bytes(layout->num_slots)) +
           (int64_t)layout->block_bytes * slot_idx;
}

int64_t kv_segment_file_bytes(const struct kv_segment_layout *layout)
{
    return kv_segment_block_offset(layout, layout->num_slots);
}

static int64_t entry_offset(int32_t slot_idx)
{
    return (int64_t)PAGE_BYTES + (int64_t)sizeof(struct kv_segment_entry) * slot_idx;
}

/* ---- names ----------------------------------------------------------------------------------- */

void kv_segment_name(uint32_t number, char name[KV_SEGMENT_NAME_BYTES])
{
    (void)snprintf(name, KV_SEGMENT_NAME_BYTES, "%08x%s", (unsigned)number, extension);
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

static XXH128_hash_t block_checksum(const struct kv_segment_entry *entry, const void *block,
                                    size_t block_bytes)
{
    uint64_t seed = XXH3_64bits(entry, offsetof(struct kv_segment_entry, block_checksum));
    return XXH3_128bits_withSeed(block, block_bytes, seed);
}

void kv_segment_seal(struct kv_segment_entry *entry, const void *block, size_t block_bytes)
{
    XXH128_hash_t checksum = block_checksum(entry, block, block_bytes);
    entry->block_checksum[0] = checksum.low64;
    entry->block_checksum[1] = checksum.high64;
    entry->reserved = 0;
    entry->checksum = entry_checksum(entry);
}

bool kv_segment_is_intact(const struct kv_segment_entry *entry, const void *block,
                          size_t block_bytes)
{
    XXH128_hash_t checksum = block_checksum(entry, block, block_bytes);
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
    header.num_slots = (uint32_t)layout->num_slots;
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
    int failure = files->resize(files->user, fd, kv_segment_file_bytes(layout));
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

/* Leaves only entries that are valid and whose block lies inside the file. */
static void check_entries(const struct kv_segment_layout *layout, int64_t file_bytes,
                          struct kv_segment_entry *entries, int32_t *num_broken)
{
    for (int32_t i = 0; i < layout->num_slots; i++) {
        struct kv_segment_entry *entry = &entries[i];
        if (is_empty(entry)) {
            continue;
        }
        if (entry->checksum != entry_checksum(entry) ||
            kv_segment_block_offset(layout, i + 1) > file_bytes) {
            memset(entry, 0, sizeof(*entry));
            (*num_broken)++;
        }
    }
}

static int scan_open(const struct kv_files *files, int fd, const struct kv_segment_layout *layout,
                     enum kv_segment_kind *kind, struct kv_segment_entry *entries,
                     int64_t *num_bytes, int32_t *num_broken)
{
    struct kv_segment_header header;
    int64_t file_bytes = files->size(files->user, fd);
    if (file_bytes < 0) {
        return (int)file_bytes;
    }
    *num_bytes = file_bytes;
    int failure = kv_files_read_all(files, fd, &header, sizeof(header), 0);
    if (failure == -ENODATA || (failure == 0 && memcmp(header.magic, magic, sizeof(magic)) != 0)) {
        *kind = KV_SEGMENT_UNKNOWN;
        return 0;
    }
    if (failure != 0) {
        return failure;
    }
    struct kv_segment_header expected = make_header(layout);
    if (memcmp(&header, &expected, sizeof(header)) != 0) {
        *kind = KV_SEGMENT_FOREIGN;
        *num_broken += header.byte_order == BYTE_ORDER_MARK &&
                       header.version == KV_SEGMENT_VERSION &&
                       header.checksum != header_checksum(&header);
        return 0;
    }
    *kind = KV_SEGMENT_OURS;
    size_t wanted_bytes = (size_t)layout->num_slots * sizeof(*entries);
    memset(entries, 0, wanted_bytes);
    if (file_bytes < (int64_t)(PAGE_BYTES + wanted_bytes)) { /* cut off inside the table */
        (*num_broken)++;
        return 0;
    }
    failure = kv_files_read_all(files, fd, entries, wanted_bytes, (int64_t)PAGE_BYTES);
    if (failure == 0) {
        check_entries(layout, file_bytes, entries, num_broken);
    }
    return failure;
}

int kv_segment_scan(const struct kv_files *files, const char *path,
                    const struct kv_segment_layout *layout, enum kv_segment_kind *kind,
                    struct kv_segment_entry *entries, int64_t *num_bytes, int32_t *num_broken)
{
    *num_bytes = 0;
    *num_broken = 0;
    int fd = files->open(files->user, path, O_RDONLY, 0);
    if (fd < 0) {
        return fd;
    }
    int failure = scan_open(files, fd, layout, kind, entries, num_bytes, num_broken);
    files->close(files->user, fd);
    return failure;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

int kv_segment_write(const struct kv_files *files, const char *path,
                     const struct kv_segment_layout *layout, int32_t slot_idx,
                     const struct kv_segment_entry *entry, const void *block)
{
    int fd = files->open(files->user, path, O_WRONLY, 0);
    if (fd < 0) {
        return fd;
    }
    int failure = kv_files_write_all(files, fd, block, layout->block_bytes,
                                     kv_segment_block_offset(layout, slot_idx));
    if (failure == 0) {
        failure = kv_files_write_all(files, fd, entry, sizeof(*entry), entry_offset(slot_idx));
    }
    files->close(files->user, fd);
    return failure;
}

int kv_segment_read(const struct kv_files *files, const char *path,
                    const struct kv_segment_layout *layout, int32_t slot_idx, void *block)
{
    int fd = files->open(files->user, path, O_RDONLY, 0);
    if (fd < 0) {
        return fd;
    }
    int failure = kv_files_read_all(files, fd, block, layout->block_bytes,
                                    kv_segment_block_offset(layout, slot_idx));
    files->close(files->user, fd);
    return failure;
}
