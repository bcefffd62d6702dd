/* SPDX-License-Identifier: Apache-2.0 */
/* Segments of the disk tier, and packed blocks. The first byte says what is made right again, so
 * that more than checksums is seen: the header, the checksums of entries. What a scan lets pass can
 * be read; a block that is taken for whole has the bytes that its checksum is of; unpacking writes
 * nothing but the block. */
#include <stdlib.h>
#include <string.h>

#include "kv/kv_codec.h"
#include "kv/kv_segment.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

enum { BLOCK_BYTES = 8192, NUM_BLOCKS = 2, GUARD_BYTES = 64 };
enum { KEEP_HEADER = 1, SEAL_ENTRIES = 2, UNPACK_ALONE = 4 };

static const struct kv_key owner = {{1, 2, 3, 4}};

/* A file system of one file. */
struct memory_file {
    unsigned char bytes[64 << 10];
    size_t num_bytes;
};

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static int memory_open(void *user, const char *path, int flags, unsigned mode)
{
    (void)user, (void)path, (void)flags, (void)mode;
    return 3;
}

static void memory_close(void *user, int fd)
{
    (void)user, (void)fd;
}

static int64_t memory_read(void *user, int fd, void *bytes, size_t num_bytes, int64_t offset)
{
    const struct memory_file *file = user;
    (void)fd;
    require(offset >= 0);
    if ((uint64_t)offset >= file->num_bytes) {
        return 0;
    }
    size_t num_left = file->num_bytes - (size_t)offset;
    num_bytes = num_bytes < num_left ? num_bytes : num_left;
    memcpy(bytes, file->bytes + offset, num_bytes);
    return (int64_t)num_bytes;
}

static int64_t memory_write(void *user, int fd, const void *bytes, size_t num_bytes, int64_t offset)
{
    struct memory_file *file = user;
    (void)fd;
    require(offset >= 0 && (size_t)offset + num_bytes <= file->num_bytes);
    memcpy(file->bytes + offset, bytes, num_bytes);
    return (int64_t)num_bytes;
}

static void memory_prefer_direct(void *user, int fd, int64_t offset, size_t num_bytes)
{
    (void)user, (void)fd, (void)offset, (void)num_bytes;
}

static int memory_resize(void *user, int fd, int64_t num_bytes)
{
    struct memory_file *file = user;
    (void)fd;
    require((size_t)num_bytes <= sizeof(file->bytes));
    file->num_bytes = (size_t)num_bytes;
    return 0;
}

static int64_t memory_size(void *user, int fd)
{
    (void)fd;
    return (int64_t)((struct memory_file *)user)->num_bytes;
}

static int memory_rename(void *user, const char *from, const char *to)
{
    (void)user, (void)from, (void)to;
    return 0;
}

static int memory_remove(void *user, const char *path)
{
    (void)user, (void)path;
    return 0;
}

static void unpack(struct kv_codec *codec, const void *packed, size_t num_bytes)
{
    static unsigned char block[BLOCK_BYTES + GUARD_BYTES];
    memset(block + BLOCK_BYTES, 0x5a, GUARD_BYTES);
    /* Just as long as it says, so that a read beyond it is seen. */
    void *copy = malloc(num_bytes > 0 ? num_bytes : 1);
    require(copy != NULL);
    memcpy(copy, packed, num_bytes);
    (void)kv_codec_unpack(codec, copy, num_bytes, block);
    free(copy);
    for (int32_t i = 0; i < GUARD_BYTES; i++) {
        require(block[BLOCK_BYTES + i] == 0x5a);
    }
}

static void read_all(const struct kv_files *files, const struct kv_segment_layout *layout,
                     const struct kv_segment_entry *entries, struct kv_codec *codec)
{
    static _Alignas(4096) unsigned char block[BLOCK_BYTES];
    for (int32_t i = 0; i < layout->num_slots; i++) {
        if (entries[i].stored_bytes == 0) {
            continue;
        }
        require(entries[i].stored_bytes <= BLOCK_BYTES);
        /* The scan has seen that the file has it. */
        require(kv_segment_read(files, "segment", &entries[i], block) == 0);
        if (kv_segment_is_intact(&entries[i], block)) {
            struct kv_segment_entry sealed = entries[i];
            kv_segment_seal(&sealed, block);
            require(memcmp(&sealed, &entries[i], sizeof(sealed)) == 0);
        }
        unpack(codec, block, entries[i].stored_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    static struct memory_file file;
    const struct kv_files files = {.user = &file,
                                   .open = memory_open,
                                   .close = memory_close,
                                   .read = memory_read,
                                   .write = memory_write,
                                   .prefer_direct = memory_prefer_direct,
                                   .resize = memory_resize,
                                   .size = memory_size,
                                   .rename = memory_rename,
                                   .remove = memory_remove};
    struct kv_segment_layout layout =
        kv_segment_layout(BLOCK_BYTES, NUM_BLOCKS * BLOCK_BYTES, &owner);
    struct kv_segment_entry entries[2 * NUM_BLOCKS];
    struct kv_codec *codec = NULL;
    struct kv_segment_contents contents;
    if (num_bytes < 1 || num_bytes > sizeof(file.bytes)) {
        return 0;
    }
    if (kv_codec_create(BLOCK_BYTES, &codec, NULL) != IMBREX_STATUS_OK) {
        return 0;
    }
    if ((bytes[0] & UNPACK_ALONE) != 0) {
        unpack(codec, bytes + 1, num_bytes - 1);
        kv_codec_destroy(codec);
        return 0;
    }
    require(kv_segment_create(&files, "segment", &layout) == 0);
    size_t begin = (bytes[0] & KEEP_HEADER) != 0 ? 4096 : 0;
    size_t room = sizeof(file.bytes) - begin;
    size_t num_copied = num_bytes - 1 < room ? num_bytes - 1 : room;
    memcpy(file.bytes + begin, bytes + 1, num_copied);
    file.num_bytes = begin + num_copied;
    for (int32_t i = 0; (bytes[0] & SEAL_ENTRIES) != 0 && i < layout.num_slots; i++) {
        struct kv_segment_entry entry;
        memcpy(&entry, file.bytes + 4096 + i * sizeof(entry), sizeof(entry));
        kv_segment_reseal(&entry);
        memcpy(file.bytes + 4096 + i * sizeof(entry), &entry, sizeof(entry));
    }
    if (kv_segment_scan(&files, "segment", &layout, entries, &contents) == 0 &&
        contents.kind == KV_SEGMENT_OURS) {
        require(contents.num_broken >= 0 && contents.num_broken <= layout.num_slots);
        require(contents.num_blocks >= 1 && contents.num_blocks <= layout.num_blocks);
        read_all(&files, &layout, entries, codec);
    }
    kv_codec_destroy(codec);
    return 0;
}
