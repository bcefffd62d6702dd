/* SPDX-License-Identifier: Apache-2.0 */
/* How long it takes until host memory is ready for a device's copies.
 * usage: bench_kv_pin DEVICE GIBIBYTES ROUNDS JSON
 *
 * Three ways, one after the other in each round:
 *
 *   whole    one registration of pages that nobody has touched
 *   1 thread touched and registered in chunks, by one thread that may use one CPU
 *   chunks   as the host tier does it
 *
 * Each is copied to the device and back, a block from either side of every chunk's edge, and
 * compared, before its time counts. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/report_header.h"
#include "cli/spread.h"
#include "ops/pinned_region.h"

enum { BLOCK_BYTES = 448 << 10, MAX_ROUNDS = 32, NUM_WAYS = 3 };

enum way { WAY_WHOLE, WAY_ONE_THREAD, WAY_CHUNKS };

static const char *const way_names[NUM_WAYS] = {"whole", "1 thread", "chunks"};

struct bench {
    struct device *device;
    struct device_event *event;
    unsigned char *block; /* of the device */
    size_t num_blocks;
    int32_t num_rounds;
    double seconds[NUM_WAYS][MAX_ROUNDS];
    double unmap_seconds[NUM_WAYS][MAX_ROUNDS];
    struct pinned_region last; /* what the last of `chunks` was */
};

static int fail(const char *what, const struct imbrex_error *err)
{
    fprintf(stderr, "bench_kv_pin: %s%s%s\n", what, err != NULL ? ": " : "",
            err != NULL ? err->message : "");
    return 1;
}

static bool copy(struct bench *bench, void *to, const void *from)
{
    const struct device_copy copies[] = {
        {.destination = to, .source = from, .num_bytes = BLOCK_BYTES}};
    return device_copy_batch_async(bench->device, DEVICE_STREAM_KV_IN, copies, 1) ==
               IMBREX_STATUS_OK &&
           device_event_record(bench->device, bench->event, DEVICE_STREAM_KV_IN) ==
               IMBREX_STATUS_OK &&
           device_event_synchronize(bench->device, bench->event) == IMBREX_STATUS_OK;
}

/* Block `to` gets what block `from` has, by way of the device. */
static bool check_blocks(struct bench *bench, unsigned char *base, size_t from, size_t to)
{
    unsigned char *source = base + from * BLOCK_BYTES, *destination = base + to * BLOCK_BYTES;
    for (size_t i = 0; i < BLOCK_BYTES; i++) {
        source[i] = (unsigned char)(from * 7 + i * 13 + i / 256);
    }
    return copy(bench, bench->block, source) && copy(bench, destination, bench->block) &&
           memcmp(source, destination, BLOCK_BYTES) == 0;
}

static bool check(struct bench *bench, unsigned char *base, size_t chunk_bytes)
{
    size_t num_per_chunk = chunk_bytes / BLOCK_BYTES;
    for (size_t edge = num_per_chunk; edge < bench->num_blocks; edge += num_per_chunk) {
        if (!check_blocks(bench, base, edge - 1, edge)) {
            return false;
        }
    }
    return check_blocks(bench, base, bench->num_blocks - 1, 0);
}

/* By the bytes that every CPU may be told of one. */
static bool run_on(const cpu_set_t *cpus)
{
    return sched_setaffinity(0, sizeof(*cpus), cpus) == 0;
}

static int run_whole(struct bench *bench, int32_t round, struct imbrex_error *err)
{
    struct memory_region region;
    int64_t begin_ns = clock_now_ns();
    if (memory_region_map("bench", bench->num_blocks * BLOCK_BYTES, &region, err) !=
            IMBREX_STATUS_OK ||
        device_host_register(bench->device, region.base, region.num_bytes, err) !=
            IMBREX_STATUS_OK) {
        return fail("one registration", err);
    }
    bench->seconds[WAY_WHOLE][round] = (double)(clock_now_ns() - begin_ns) / 1e9;
    bool is_good = check(bench, region.base, region.num_bytes);
    begin_ns = clock_now_ns();
    device_host_unregister(bench->device, region.base);
    memory_region_unmap(&region);
    bench->unmap_seconds[WAY_WHOLE][round] = (double)(clock_now_ns() - begin_ns) / 1e9;
    return is_good ? 0 : fail("one registration: a block came back changed", NULL);
}

static int run_chunks(struct bench *bench, enum way way, int32_t round, struct imbrex_error *err)
{
    struct pinned_region region;
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof(all), &all) != 0) {
        return fail("the CPUs cannot be read", NULL);
    }
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0 && cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &all)) {
            CPU_SET(cpu, &one);
        }
    }
    if (!run_on(way == WAY_ONE_THREAD ? &one : &all)) {
        return fail("the CPUs cannot be chosen", NULL);
    }
    int64_t begin_ns = clock_now_ns();
    enum imbrex_status status =
        pinned_region_map(bench->device, "bench", bench->num_blocks, BLOCK_BYTES, 0, &region, err);
    bench->seconds[way][round] = (double)(clock_now_ns() - begin_ns) / 1e9;
    (void)run_on(&all);
    if (status != IMBREX_STATUS_OK) {
        return fail("chunks", err);
    }
    bench->last = region;
    bool is_good = check(bench, region.base, region.chunk_bytes);
    begin_ns = clock_now_ns();
    pinned_region_unmap(&region);
    bench->unmap_seconds[way][round] = (double)(clock_now_ns() - begin_ns) / 1e9;
    return is_good ? 0 : fail("chunks: a block came back changed", NULL);
}

static int report(const struct bench *bench, const char *path, FILE *file)
{
    json_t *root = report_header("kv_pin");
    json_t *rows = json_array();
    double num_bytes = (double)bench->num_blocks * BLOCK_BYTES;
    for (int32_t way = 0; way < NUM_WAYS; way++) {
        json_t *seconds = json_array();
        for (int32_t i = 0; i < bench->num_rounds; i++) {
            (void)json_array_append_new(seconds, json_real(bench->seconds[way][i]));
        }
        double taken = spread_quantile(bench->seconds[way], bench->num_rounds, 0.5);
        printf("%-8s %7.3f s until ready, %6.2f GB/s; %7.3f s to give back\n", way_names[way],
               taken, num_bytes / taken / 1e9,
               spread_quantile(bench->unmap_seconds[way], bench->num_rounds, 0.5));
        (void)json_array_append_new(
            rows, json_pack("{s:s, s:f, s:f, s:f, s:o}", "way", way_names[way], "median_s", taken,
                            "gb_per_s", num_bytes / taken / 1e9, "median_unmap_s",
                            spread_quantile(bench->unmap_seconds[way], bench->num_rounds, 0.5),
                            "seconds", seconds));
    }
    printf("%d threads, %d chunks, NUMA node %d\n", (int)bench->last.num_threads,
           (int)bench->last.num_chunks, (int)bench->last.node);
    (void)json_object_set_new(root, "device", json_string(device_name(bench->device)));
    (void)json_object_set_new(root, "bytes", json_integer((json_int_t)num_bytes));
    (void)json_object_set_new(root, "threads", json_integer(bench->last.num_threads));
    (void)json_object_set_new(root, "chunks", json_integer(bench->last.num_chunks));
    (void)json_object_set_new(root, "numa_node", json_integer(bench->last.node));
    (void)json_object_set_new(root, "rows", rows);
    int exit_code = report_write(path, file, root);
    json_decref(root);
    return exit_code;
}

int main(int argc, char **argv)
{
    struct imbrex_error err = {0};
    struct bench bench = {0};
    struct device_choice choice, opened;
    static const struct log log;
    FILE *file;
    void *block = NULL;
    if (argc != 5 || atoi(argv[2]) < 1 || atoi(argv[3]) < 1 || atoi(argv[3]) > MAX_ROUNDS) {
        fprintf(stderr, "usage: bench_kv_pin DEVICE GIBIBYTES ROUNDS JSON\n");
        return 2;
    }
    bench.num_blocks = ((size_t)atoi(argv[2]) << 30) / BLOCK_BYTES;
    bench.num_rounds = atoi(argv[3]);
    if (report_open(argv[4], &file) != 0) {
        return 1;
    }
    if (device_parse(argv[1], &choice, &err) != IMBREX_STATUS_OK ||
        device_open(&choice, &log, &bench.device, &opened, &err) != IMBREX_STATUS_OK ||
        device_alloc(bench.device, "a block", BLOCK_BYTES, &block, &err) != IMBREX_STATUS_OK ||
        device_event_create(bench.device, &bench.event, &err) != IMBREX_STATUS_OK) {
        return fail("the device", &err);
    }
    bench.block = block;
    for (int32_t round = 0; round < bench.num_rounds; round++) {
        if (run_whole(&bench, round, &err) != 0 ||
            run_chunks(&bench, WAY_ONE_THREAD, round, &err) != 0 ||
            run_chunks(&bench, WAY_CHUNKS, round, &err) != 0) {
            return 1;
        }
    }
    int exit_code = report(&bench, argv[4], file);
    fclose(file);
    device_event_destroy(bench.device, bench.event);
    device_free(bench.device, block);
    device_destroy(bench.device);
    return exit_code;
}
