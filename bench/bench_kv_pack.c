/* SPDX-License-Identifier: Apache-2.0 */
/* How much smaller the disk tier's codec makes the blocks of a real model, and how fast.
 * usage: bench_kv_pack FOLDER NAME AS JSON
 *
 * FOLDER: of a disk tier that has blocks which are not packed, as `imbrex run --kv-disk` leaves
 * it.
 * NAME: what they are of, for the report. AS: "stored", or "bf16": the blocks have 32-bit numbers,
 * and are rounded first to what an engine that keeps bf16 has. Each way unpacks to what it packed
 * before it counts. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "cli/report_header.h"
#include "kv/kv_codec.h"
#include "kv/kv_segment.h"

enum { MAX_BLOCKS = 2000 };

struct blocks {
    struct memory_region memory;
    size_t block_bytes; /* 0: none yet */
    int32_t num_blocks;
};

static int fail(const char *what)
{
    fprintf(stderr, "bench_kv_pack: %s\n", what);
    return 1;
}

static bool read_segment(const char *path, struct blocks *blocks)
{
    struct kv_segment_header header;
    struct kv_segment_contents contents;
    int fd = kv_files_system.open(NULL, path, O_RDONLY, 0);
    if (fd < 0 || kv_files_read_all(&kv_files_system, fd, &header, sizeof(header), 0) != 0) {
        return false;
    }
    (void)close(fd);
    if (blocks->block_bytes == 0) {
        blocks->block_bytes = header.block_bytes;
        if (memory_region_map("blocks", MAX_BLOCKS * blocks->block_bytes, &blocks->memory, NULL) !=
            IMBREX_STATUS_OK) {
            return false;
        }
    }
    struct kv_segment_layout layout = kv_segment_layout(
        header.block_bytes, header.block_bytes * header.num_blocks, &header.owner);
    struct kv_segment_entry *entries = calloc((size_t)layout.num_slots, sizeof(*entries));
    bool is_good = header.block_bytes == blocks->block_bytes && entries != NULL &&
                   kv_segment_scan(&kv_files_system, path, &layout, entries, &contents) == 0 &&
                   contents.kind == KV_SEGMENT_OURS;
    for (int32_t i = 0; is_good && i < layout.num_slots; i++) {
        unsigned char *block =
            blocks->memory.base + (size_t)blocks->num_blocks * blocks->block_bytes;
        if (entries[i].stored_bytes == blocks->block_bytes && blocks->num_blocks < MAX_BLOCKS) {
            is_good = kv_segment_read(&kv_files_system, path, &entries[i], block) == 0 &&
                      kv_segment_is_intact(&entries[i], block);
            blocks->num_blocks++;
        }
    }
    free(entries);
    return is_good;
}

static bool read_folder(const char *path, struct blocks *blocks)
{
    char joined[4096];
    DIR *folder = opendir(path);
    bool is_good = folder != NULL;
    for (const struct dirent *item; is_good && (item = readdir(folder)) != NULL;) {
        if (strstr(item->d_name, ".imbrex-kv") != NULL) {
            (void)snprintf(joined, sizeof(joined), "%s/%s", path, item->d_name);
            is_good = read_segment(joined, blocks);
        }
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
    return is_good && blocks->num_blocks > 0;
}

/* To the nearest, ties to even. */
static void round_to_bf16(struct blocks *blocks)
{
    size_t num_numbers = (size_t)blocks->num_blocks * blocks->block_bytes / 4;
    for (size_t i = 0; i < num_numbers; i++) {
        uint32_t bits;
        memcpy(&bits, blocks->memory.base + 4 * i, sizeof(bits));
        bits += 0x7fff + ((bits >> 16) & 1);
        uint16_t rounded = (uint16_t)(bits >> 16);
        memcpy(blocks->memory.base + 2 * i, &rounded, sizeof(rounded));
    }
    blocks->block_bytes /= 2;
}

/* One row; NULL if a block did not come back as it was. */
static json_t *measure(const struct blocks *blocks, int32_t level, int32_t num_parts)
{
    struct kv_codec *codec = NULL;
    size_t block_bytes = blocks->block_bytes, num_stored = 0;
    unsigned char *packed = malloc(block_bytes), *unpacked = malloc(block_bytes);
    bool is_good = packed != NULL && unpacked != NULL &&
                   kv_codec_create(block_bytes, &codec, NULL) == IMBREX_STATUS_OK &&
                   kv_codec_prepare_pack(codec, level, NULL) == IMBREX_STATUS_OK;
    int64_t pack_ns = 0, unpack_ns = 0;
    if (is_good) {
        kv_codec_set_parts(codec, num_parts);
    }
    for (int32_t i = 0; is_good && i < blocks->num_blocks; i++) {
        const unsigned char *block = blocks->memory.base + (size_t)i * block_bytes;
        int64_t begin_ns = clock_now_ns();
        size_t num_bytes = kv_codec_pack(codec, block, packed, block_bytes);
        int64_t packed_ns = clock_now_ns();
        pack_ns += packed_ns - begin_ns;
        num_stored += num_bytes > 0 ? num_bytes : block_bytes;
        if (num_bytes > 0) {
            is_good = kv_codec_unpack(codec, packed, num_bytes, unpacked);
            unpack_ns += clock_now_ns() - packed_ns;
            is_good &= memcmp(block, unpacked, block_bytes) == 0;
        }
    }
    double num_bytes = (double)block_bytes * blocks->num_blocks;
    json_t *row = NULL;
    if (is_good) {
        printf("level %2d, numbers of %d bytes: %.3f of the size; %7.1f MB/s packed, %7.1f MB/s "
               "unpacked\n",
               (int)level, (int)num_parts, (double)num_stored / num_bytes,
               num_bytes / (double)pack_ns * 1e3, num_bytes / (double)unpack_ns * 1e3);
        row = json_pack("{s:i, s:i, s:f, s:f, s:f}", "level", (int)level, "number_bytes",
                        (int)num_parts, "stored_share", (double)num_stored / num_bytes,
                        "pack_mb_per_s", num_bytes / (double)pack_ns * 1e3, "unpack_mb_per_s",
                        unpack_ns > 0 ? num_bytes / (double)unpack_ns * 1e3 : 0.0);
    }
    kv_codec_destroy(codec);
    free(packed);
    free(unpacked);
    return row;
}

int main(int argc, char **argv)
{
    static const int32_t levels[] = {1, 3, 9, 19};
    struct blocks blocks = {.block_bytes = 0};
    FILE *file;
    if (argc != 5 || (strcmp(argv[3], "stored") != 0 && strcmp(argv[3], "bf16") != 0)) {
        fprintf(stderr, "usage: bench_kv_pack FOLDER NAME stored|bf16 JSON\n");
        return 2;
    }
    if (report_open(argv[4], &file) != 0) {
        return 1;
    }
    if (!kv_codec_is_available()) {
        return fail("this build has no zstd");
    }
    if (!read_folder(argv[1], &blocks)) {
        return fail("the folder has no blocks that are not packed, or cannot be read");
    }
    if (strcmp(argv[3], "bf16") == 0) {
        round_to_bf16(&blocks);
    }
    json_t *root = report_header("kv_pack"), *rows = json_array();
    printf("%s: %d blocks of %zu bytes\n", argv[2], (int)blocks.num_blocks, blocks.block_bytes);
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
        for (int32_t num_parts = 1; num_parts <= 4; num_parts *= 2) {
            json_t *row = measure(&blocks, levels[i], num_parts);
            if (row == NULL) {
                return fail("a block did not come back as it was");
            }
            (void)json_array_append_new(rows, row);
        }
    }
    (void)json_object_set_new(root, "blocks_of", json_string(argv[2]));
    (void)json_object_set_new(root, "as", json_string(argv[3]));
    (void)json_object_set_new(root, "block_bytes", json_integer((json_int_t)blocks.block_bytes));
    (void)json_object_set_new(root, "num_blocks", json_integer(blocks.num_blocks));
    (void)json_object_set_new(root, "rows", rows);
    int exit_code = report_write(argv[4], file, root);
    json_decref(root);
    fclose(file);
    memory_region_unmap(&blocks.memory);
    return exit_code;
}
