/* SPDX-License-Identifier: Apache-2.0 */
/* The disk tier against the disk that it lies on.
 * usage: bench_kv_disk FOLDER MIB BLOCK_KIB ROUNDS JSON
 *
 * In each round, one after the other, on the same files and the same disk:
 *
 *   raw write   a new file, 1 MiB at a time by 8 threads, past the page cache
 *   tier put    the same bytes as blocks; also with the time until they are on the disk
 *   raw read    the segments that the puts made, 1 MiB at a time past the page cache: by 8 and by
 *               32 threads, and 32 at once by an io_uring where there is one
 *   tier get    all blocks in the order in which they were put, 48 at once, none of them in the
 *               page cache: with the ring where there is one, and with threads alone
 *   cached get  the same with all of them in the page cache
 *
 * All blocks that are got must be good, and are compared. Needs MIB twice on the disk and once in
 * RAM. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "cli/report_header.h"
#include "cli/spread.h"
#include "kv/kv_disk.h"
#include "kv/kv_pool.h"
#include "kv/kv_ring.h"

enum {
    PIECE_BYTES = 1 << 20,
    MAX_THREADS = 32,
    MAX_FILES = 4096,
    MAX_ROUNDS = 32,
    NUM_GETS = 48, /* as many as the engine asks for at once */
    WAIT_NS = 1000000000,
};

enum measure {
    RAW_WRITE,
    PUT,
    PUT_AND_SYNC,
    RAW_READ_8,
    RAW_READ_32,
    RAW_READ_RING,
    GET_RING,
    GET_THREADS,
    GET_CACHED,
    NUM_MEASURES,
};

static const char *const measure_names[NUM_MEASURES] = {
    "raw write, 8 threads", "tier put",
    "tier put and sync",    "raw read, 8 threads",
    "raw read, 32 threads", "raw read, io_uring 32",
    "tier get, io_uring",   "tier get, threads",
    "tier get, page cache",
};

/* Parts of files that are read or written 1 MiB at a time. */
struct raw {
    int fds[MAX_FILES]; /* [num_files] */
    size_t file_bytes[MAX_FILES];
    int32_t num_files;
    bool is_write;
    unsigned char *memory; /* [MAX_THREADS] x PIECE_BYTES */
    atomic_int_fast64_t next;
    int64_t num_pieces; /* of all files, each rounded down */
    atomic_bool has_failed;
};

struct bench {
    const char *folder;
    size_t block_bytes;
    int32_t num_blocks, num_rounds;
    struct memory_region blocks; /* that are put, then what is got */
    struct raw raw;
    double gb_per_s[NUM_MEASURES][MAX_ROUNDS];
    bool is_measured[NUM_MEASURES];
    int ring_failure;
};

static int fail(const char *what, const struct imbrex_error *err)
{
    fprintf(stderr, "bench_kv_disk: %s%s%s\n", what, err != NULL ? ": " : "",
            err != NULL ? err->message : "");
    return 1;
}

static double rate(size_t num_bytes, int64_t begin_ns)
{
    return (double)num_bytes / (double)(clock_now_ns() - begin_ns);
}

/* ---- raw ------------------------------------------------------------------------------------- */

/* Of the whole of files the piece number so much. */
struct place {
    int fd;
    int64_t offset;
};

static void locate(const struct raw *raw, int64_t piece, struct place *place)
{
    int32_t file = 0;
    while (piece >= (int64_t)(raw->file_bytes[file] / PIECE_BYTES)) {
        piece -= (int64_t)(raw->file_bytes[file] / PIECE_BYTES);
        file++;
    }
    place->fd = raw->fds[file];
    place->offset = piece * PIECE_BYTES;
}

struct raw_thread {
    struct raw *raw;
    unsigned char *buffer;
    pthread_t thread;
};

static void *move_pieces(void *arg)
{
    struct raw_thread *mine = arg;
    struct raw *raw = mine->raw;
    int64_t piece;
    while ((piece = raw->next++) < raw->num_pieces) {
        struct place place;
        locate(raw, piece, &place);
        ssize_t moved = raw->is_write ? pwrite(place.fd, mine->buffer, PIECE_BYTES, place.offset)
                                      : pread(place.fd, mine->buffer, PIECE_BYTES, place.offset);
        if (moved != PIECE_BYTES) {
            raw->has_failed = true;
            return NULL;
        }
    }
    return NULL;
}

static bool run_threads(struct raw *raw, int32_t num_threads, double *gb_per_s)
{
    struct raw_thread threads[MAX_THREADS];
    int64_t begin_ns = clock_now_ns();
    raw->next = 0;
    for (int32_t i = 0; i < num_threads; i++) {
        threads[i].raw = raw;
        threads[i].buffer = raw->memory + (size_t)i * PIECE_BYTES;
        if (pthread_create(&threads[i].thread, NULL, move_pieces, &threads[i]) != 0) {
            return false;
        }
    }
    for (int32_t i = 0; i < num_threads; i++) {
        pthread_join(threads[i].thread, NULL);
    }
    *gb_per_s = rate((size_t)raw->num_pieces * PIECE_BYTES, begin_ns);
    return !raw->has_failed;
}

static bool run_ring(struct raw *raw, double *gb_per_s)
{
    struct kv_ring *ring;
    int64_t begin_ns = clock_now_ns(), num_given = 0, num_done = 0, num_read;
    void *free_buffers[MAX_THREADS];
    struct iovec parts[MAX_THREADS];
    int32_t num_free = MAX_THREADS, num_left;
    bool is_good = true;
    if (kv_ring_create(MAX_THREADS, &ring) != 0) {
        return false;
    }
    for (int32_t i = 0; i < MAX_THREADS; i++) {
        free_buffers[i] = raw->memory + (size_t)i * PIECE_BYTES;
    }
    while (is_good && num_done < raw->num_pieces) {
        while (num_free > 0 && num_given < raw->num_pieces) {
            struct place place;
            locate(raw, num_given, &place);
            num_free--;
            struct iovec *part =
                &parts[((unsigned char *)free_buffers[num_free] - raw->memory) / PIECE_BYTES];
            *part = (struct iovec){.iov_base = free_buffers[num_free], .iov_len = PIECE_BYTES};
            kv_ring_add(ring, place.fd, part, 1, place.offset, part->iov_base);
            num_given++;
        }
        is_good = kv_ring_submit(ring, 1, &num_left) == 0;
        void *buffer;
        while ((buffer = kv_ring_take(ring, &num_read)) != NULL) {
            is_good &= num_read == PIECE_BYTES;
            free_buffers[num_free] = buffer;
            num_free++;
            num_done++;
        }
    }
    *gb_per_s = rate((size_t)raw->num_pieces * PIECE_BYTES, begin_ns);
    kv_ring_destroy(ring);
    return is_good;
}

static void count_pieces(struct raw *raw)
{
    raw->num_pieces = 0;
    for (int32_t i = 0; i < raw->num_files; i++) {
        raw->num_pieces += (int64_t)(raw->file_bytes[i] / PIECE_BYTES);
    }
}

static void close_files(struct raw *raw)
{
    for (int32_t i = 0; i < raw->num_files; i++) {
        (void)close(raw->fds[i]);
    }
    raw->num_files = 0;
}

static bool raw_write(struct bench *bench, double *gb_per_s)
{
    char path[4096];
    struct raw *raw = &bench->raw;
    size_t num_bytes = (size_t)bench->num_blocks * bench->block_bytes;
    (void)snprintf(path, sizeof(path), "%s/raw", bench->folder);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    if (fd < 0 || fallocate(fd, 0, 0, (off_t)num_bytes) != 0) {
        return false;
    }
    raw->fds[0] = fd;
    raw->file_bytes[0] = num_bytes;
    raw->num_files = 1;
    raw->is_write = true;
    count_pieces(raw);
    bool is_good = run_threads(raw, 8, gb_per_s);
    close_files(raw);
    raw->is_write = false;
    return unlink(path) == 0 && is_good;
}

/* ---- the tier's files ------------------------------------------------------------------------ */

enum of_segments { DROP, CACHE, OPEN, REMOVE, SYNC };

/* False if one of them could not be treated so. */
static bool treat_segments(struct bench *bench, enum of_segments what)
{
    char path[4096];
    DIR *folder = opendir(bench->folder);
    bool is_good = folder != NULL;
    for (const struct dirent *item; is_good && (item = readdir(folder)) != NULL;) {
        if (strstr(item->d_name, ".imbrex-kv") == NULL) {
            continue;
        }
        (void)snprintf(path, sizeof(path), "%s/%s", bench->folder, item->d_name);
        if (what == REMOVE) {
            is_good = unlink(path) == 0;
            continue;
        }
        int fd = open(path, what == OPEN ? O_RDONLY | O_DIRECT : O_RDWR);
        off_t num_bytes = fd >= 0 ? lseek(fd, 0, SEEK_END) : -1;
        is_good = num_bytes >= 0;
        if (is_good && what == OPEN) {
            is_good = bench->raw.num_files < MAX_FILES;
            if (is_good) {
                bench->raw.fds[bench->raw.num_files] = fd;
                bench->raw.file_bytes[bench->raw.num_files] = (size_t)num_bytes;
                bench->raw.num_files++;
                continue;
            }
        }
        if (is_good && (what == DROP || what == SYNC)) {
            is_good = fdatasync(fd) == 0;
        }
        if (is_good && what == DROP) {
            is_good = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0;
        }
        for (off_t at = 0; is_good && what == CACHE && at < num_bytes; at += PIECE_BYTES) {
            is_good = pread(fd, bench->raw.memory, PIECE_BYTES, at) >= 0;
        }
        (void)close(fd);
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
    return is_good;
}

/* ---- the tier -------------------------------------------------------------------------------- */

static void name_block(int32_t i, struct kv_key *key, int32_t ids[KV_BLOCK_SIZE])
{
    *key = (struct kv_key){{(uint64_t)i * 0x9e3779b97f4a7c15u + 1, (uint64_t)i, 5, 7}};
    for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
        ids[j] = 16 * i + j;
    }
}

static unsigned char *block_at(const struct bench *bench, int32_t i)
{
    return bench->blocks.base + (size_t)i * bench->block_bytes;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void fill(const struct bench *bench, int32_t i, uint64_t *words)
{
    uint64_t state = (uint64_t)i + 1;
    for (size_t j = 0; j < bench->block_bytes / 8; j++) {
        words[j] = next_random(&state);
    }
}

static struct kv_disk *open_disk(struct bench *bench, struct kv_folder *folder, bool forbids_ring,
                                 struct imbrex_error *err)
{
    struct kv_disk *disk = NULL;
    const struct kv_disk_options options = {
        .folder = folder,
        .owner = {{1, 2, 3, 4}},
        .block_bytes = bench->block_bytes,
        .max_bytes = 2 * bench->blocks.num_bytes + kv_disk_min_bytes(bench->block_bytes, 0),
        .forbids_ring = forbids_ring,
    };
    if (kv_folder_open(bench->folder, folder, err) != IMBREX_STATUS_OK) {
        return NULL;
    }
    if (kv_disk_open(&options, &disk, err) != IMBREX_STATUS_OK) {
        kv_folder_close(folder);
    }
    return disk;
}

/* All blocks one way, as many at once as the tier takes, gets at most NUM_GETS. */
static bool move_all(struct bench *bench, struct kv_disk *disk, bool is_get)
{
    struct kv_disk_result result;
    struct kv_key key;
    int32_t ids[KV_BLOCK_SIZE], num_given = 0, num_done = 0;
    while (num_done < bench->num_blocks) {
        while (num_given < bench->num_blocks && kv_disk_is_ready(disk) &&
               (!is_get || num_given - num_done < NUM_GETS)) {
            name_block(num_given, &key, ids);
            if (!(is_get ? kv_disk_get(disk, &key, ids, block_at(bench, num_given), num_given)
                         : kv_disk_put(disk, &key, ids, block_at(bench, num_given), num_given))) {
                return false;
            }
            num_given++;
        }
        kv_disk_wait(disk, WAIT_NS);
        while (kv_disk_poll(disk, &result)) {
            if (!result.is_good) {
                return false;
            }
            num_done++;
        }
    }
    return true;
}

static int put_all(struct bench *bench, int32_t round, struct imbrex_error *err)
{
    struct kv_folder folder = {.lock_fd = -1};
    struct kv_disk *disk = open_disk(bench, &folder, false, err);
    if (disk == NULL) {
        return fail("the tier", err);
    }
    for (int32_t i = 0; i < bench->num_blocks; i++) {
        fill(bench, i, (uint64_t *)(void *)block_at(bench, i));
    }
    int64_t begin_ns = clock_now_ns();
    bool is_good = move_all(bench, disk, false);
    bench->gb_per_s[PUT][round] = rate(bench->blocks.num_bytes, begin_ns);
    is_good &= treat_segments(bench, SYNC);
    bench->gb_per_s[PUT_AND_SYNC][round] = rate(bench->blocks.num_bytes, begin_ns);
    kv_disk_close(disk);
    kv_folder_close(&folder);
    return is_good ? 0 : fail("a block was not put", NULL);
}

static int get_all(struct bench *bench, enum measure measure, int32_t round,
                   struct imbrex_error *err)
{
    struct kv_folder folder = {.lock_fd = -1};
    struct kv_disk_metrics metrics;
    struct kv_disk *disk = open_disk(bench, &folder, measure == GET_THREADS, err);
    uint64_t *expected = malloc(bench->block_bytes);
    if (disk == NULL || expected == NULL) {
        return fail("the tier", err);
    }
    kv_disk_read_metrics(disk, &metrics);
    if (measure == GET_RING && metrics.ring_failure != 0) {
        bench->ring_failure = metrics.ring_failure;
    }
    memset(bench->blocks.base, 0xa5, bench->blocks.num_bytes);
    if (!treat_segments(bench, measure == GET_CACHED ? CACHE : DROP)) {
        return fail("the page cache", NULL);
    }
    int64_t begin_ns = clock_now_ns();
    bool is_good = move_all(bench, disk, true);
    bench->gb_per_s[measure][round] = rate(bench->blocks.num_bytes, begin_ns);
    for (int32_t i = 0; is_good && i < bench->num_blocks; i++) {
        fill(bench, i, expected);
        is_good = memcmp(expected, block_at(bench, i), bench->block_bytes) == 0;
    }
    free(expected);
    kv_disk_close(disk);
    kv_folder_close(&folder);
    return is_good ? 0 : fail("a block did not come back as it was", NULL);
}

static int run_round(struct bench *bench, int32_t round, struct imbrex_error *err)
{
    double *raw_8 = &bench->gb_per_s[RAW_READ_8][round];
    if (!treat_segments(bench, REMOVE) || !raw_write(bench, &bench->gb_per_s[RAW_WRITE][round])) {
        return fail("raw write", NULL);
    }
    if (put_all(bench, round, err) != 0) {
        return 1;
    }
    if (!treat_segments(bench, DROP) || !treat_segments(bench, OPEN)) {
        return fail("the segments cannot be opened", NULL);
    }
    count_pieces(&bench->raw);
    bool has_ring = bench->ring_failure == 0;
    bool is_good = run_threads(&bench->raw, 8, raw_8) &&
                   run_threads(&bench->raw, 32, &bench->gb_per_s[RAW_READ_32][round]) &&
                   (!has_ring || run_ring(&bench->raw, &bench->gb_per_s[RAW_READ_RING][round]));
    close_files(&bench->raw);
    if (!is_good) {
        return fail("raw read", NULL);
    }
    if ((has_ring && get_all(bench, GET_RING, round, err) != 0) ||
        get_all(bench, GET_THREADS, round, err) != 0 ||
        get_all(bench, GET_CACHED, round, err) != 0) {
        return 1;
    }
    for (int32_t i = 0; i < NUM_MEASURES; i++) {
        bench->is_measured[i] = has_ring || (i != RAW_READ_RING && i != GET_RING);
    }
    return 0;
}

/* ---- report ---------------------------------------------------------------------------------- */

static double median(const struct bench *bench, enum measure measure)
{
    return spread_quantile(bench->gb_per_s[measure], bench->num_rounds, 0.5);
}

/* In each round against the fastest of the raw reads, or the raw write, of that round. */
static double median_share(const struct bench *bench, enum measure measure)
{
    double shares[MAX_ROUNDS];
    for (int32_t i = 0; i < bench->num_rounds; i++) {
        double raw = bench->gb_per_s[RAW_WRITE][i];
        for (int32_t other = RAW_READ_8; measure >= RAW_READ_8 && other <= RAW_READ_RING; other++) {
            double read = bench->gb_per_s[other][i];
            raw = other == RAW_READ_8 || read > raw ? read : raw;
        }
        shares[i] = bench->gb_per_s[measure][i] / raw;
    }
    return spread_quantile(shares, bench->num_rounds, 0.5);
}

static int report(const struct bench *bench, const char *path, FILE *file)
{
    json_t *root = report_header("kv_disk");
    json_t *rows = json_array();
    for (int32_t measure = 0; measure < NUM_MEASURES; measure++) {
        json_t *rates = json_array();
        if (!bench->is_measured[measure]) {
            json_decref(rates);
            continue;
        }
        for (int32_t i = 0; i < bench->num_rounds; i++) {
            (void)json_array_append_new(rates, json_real(bench->gb_per_s[measure][i]));
        }
        double middle = median(bench, measure), share = median_share(bench, measure);
        printf("%-24s %7.3f GB/s  %5.1f %% of raw\n", measure_names[measure], middle, 100 * share);
        (void)json_array_append_new(rows,
                                    json_pack("{s:s, s:f, s:f, s:o}", "what",
                                              measure_names[measure], "median_gb_per_s", middle,
                                              "median_share_of_raw", share, "gb_per_s", rates));
    }
    (void)json_object_set_new(root, "bytes", json_integer((json_int_t)bench->blocks.num_bytes));
    (void)json_object_set_new(root, "block_bytes", json_integer((json_int_t)bench->block_bytes));
    (void)json_object_set_new(
        root, "io_uring",
        json_string(bench->ring_failure == 0 ? "allowed" : system_error_text(bench->ring_failure)));
    (void)json_object_set_new(root, "rows", rows);
    int exit_code = report_write(path, file, root);
    json_decref(root);
    return exit_code;
}

int main(int argc, char **argv)
{
    static struct bench bench;
    struct memory_region memory;
    struct imbrex_error err = {0};
    FILE *file;
    int64_t mebibytes = argc == 6 ? atoll(argv[2]) : 0, kibibytes = argc == 6 ? atoll(argv[3]) : 0;
    bench.num_rounds = argc == 6 ? atoi(argv[4]) : 0;
    if (mebibytes < 64 || mebibytes > 1 << 20 || kibibytes < 4 || kibibytes % 4 != 0 ||
        kibibytes > 1 << 16 || bench.num_rounds < 1 || bench.num_rounds > MAX_ROUNDS) {
        fprintf(stderr,
                "usage: bench_kv_disk FOLDER MIB BLOCK_KIB ROUNDS JSON (MIB >= 64, a "
                "multiple of 4 KiB a block, at most %d rounds)\n",
                MAX_ROUNDS);
        return 2;
    }
    bench.folder = argv[1];
    bench.block_bytes = (size_t)kibibytes << 10;
    bench.num_blocks = (int32_t)((mebibytes << 20) / (kibibytes << 10));
    if (report_open(argv[5], &file) != 0) {
        return 1;
    }
    if (memory_region_map("blocks", (size_t)bench.num_blocks * bench.block_bytes, &bench.blocks,
                          &err) != IMBREX_STATUS_OK ||
        memory_region_map("buffers", (size_t)MAX_THREADS * PIECE_BYTES, &memory, &err) !=
            IMBREX_STATUS_OK) {
        return fail("memory", &err);
    }
    memset(memory.base, 1, memory.num_bytes);
    bench.raw.memory = memory.base;
    struct kv_folder folder;
    if (kv_folder_open(bench.folder, &folder, &err) != IMBREX_STATUS_OK) {
        return fail("the folder", &err);
    }
    kv_folder_close(&folder);
    for (int32_t round = 0; round < bench.num_rounds; round++) {
        if (run_round(&bench, round, &err) != 0) {
            return 1;
        }
    }
    int exit_code = report(&bench, argv[5], file);
    fclose(file);
    (void)treat_segments(&bench, REMOVE);
    return exit_code;
}
