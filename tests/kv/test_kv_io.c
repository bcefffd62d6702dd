/* SPDX-License-Identifier: Apache-2.0 */
/* Reads that are put together: each gets its own bytes, or its own failure. */
#include "kv/kv_io.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"

#define PATH TEST_BUILD_DIR "/tests/kv-io"

enum { PAGE_BYTES = 4096, NUM_READS = 12, WAIT_NS = 1000000000 };

struct reading {
    struct kv_io_job io; /* first */
    int failure, num_ends;
};

/* The file, which cannot be opened before the gate is open: what is submitted meanwhile waits. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool is_open;
    int failure; /* of opening from then on */
    int32_t num_opens;
};

static int open_file(void *user, uint32_t file)
{
    struct gate *gate = user;
    assert_int_equal(file, 7);
    pthread_mutex_lock(&gate->lock);
    while (!gate->is_open) {
        pthread_cond_wait(&gate->opened, &gate->lock);
    }
    gate->num_opens++;
    int failure = gate->num_opens > 1 ? gate->failure : 0;
    pthread_mutex_unlock(&gate->lock);
    return failure != 0 ? failure : kv_files_system.open(NULL, PATH, O_RDONLY, 0);
}

static void end_reading(struct kv_io_job *job, int failure, int32_t worker_idx)
{
    struct reading *reading = (struct reading *)job;
    assert_int_equal(worker_idx, 0);
    reading->failure = failure;
    reading->num_ends++;
}

static void write_pages(int32_t num_pages)
{
    unsigned char page[PAGE_BYTES];
    FILE *file = fopen(PATH, "w");
    assert_non_null(file);
    for (int32_t i = 0; i < num_pages; i++) {
        memset(page, i + 1, sizeof(page));
        assert_int_equal(fwrite(page, 1, sizeof(page), file), sizeof(page));
    }
    assert_int_equal(fclose(file), 0);
}

/* Pages first, first + 1, ... but the last read, which is of page 0. Returns how often the file was
 * opened. */
static int32_t read_pages(int32_t ring_depth, int failure, struct reading readings[NUM_READS],
                          unsigned char pages[NUM_READS][PAGE_BYTES])
{
    struct kv_io *io;
    struct gate gate = {
        .lock = PTHREAD_MUTEX_INITIALIZER, .opened = PTHREAD_COND_INITIALIZER, .failure = failure};
    const struct kv_io_options options = {.num_workers = {[KV_IO_READ] = 1, [KV_IO_WRITE] = 1},
                                          .num_ring_readers = 1,
                                          .ring_depth = ring_depth,
                                          .files = &kv_files_system,
                                          .open = open_file,
                                          .user = &gate};
    memset(pages, 0xee, (size_t)NUM_READS * PAGE_BYTES);
    assert_int_equal(kv_io_create(&options, &io, NULL), IMBREX_STATUS_OK);
    for (int32_t i = 0; i < NUM_READS; i++) {
        int64_t page = i < NUM_READS - 1 ? i + 1 : 0;
        readings[i] = (struct reading){.io = {.kind = KV_IO_READ,
                                              .end = end_reading,
                                              .read = {.file = 7,
                                                       .offset = PAGE_BYTES * page,
                                                       .bytes = pages[i],
                                                       .num_bytes = PAGE_BYTES}}};
        kv_io_submit(io, &readings[i].io);
    }
    pthread_mutex_lock(&gate.lock);
    gate.is_open = true;
    pthread_cond_broadcast(&gate.opened);
    pthread_mutex_unlock(&gate.lock);
    for (int32_t i = 0; i < NUM_READS;) {
        if (kv_io_poll(io) != NULL) {
            i++;
        } else {
            kv_io_wait(io, WAIT_NS);
        }
    }
    kv_io_destroy(io);
    for (int32_t i = 0; i < NUM_READS; i++) {
        assert_int_equal(readings[i].num_ends, 1);
    }
    return gate.num_opens;
}

static void expect_page(const unsigned char page[PAGE_BYTES], int32_t number)
{
    for (int32_t i = 0; i < PAGE_BYTES; i++) {
        assert_int_equal(page[i], number + 1);
    }
}

/* Catches: reads that wait and are not put together, one that is though it does not follow, bytes
 * in another read's buffer. */
static void test_together(void **state)
{
    (void)state;
    static struct reading readings[NUM_READS];
    static _Alignas(PAGE_BYTES) unsigned char pages[NUM_READS][PAGE_BYTES];
    write_pages(NUM_READS);
    for (int32_t ring_depth = 0; ring_depth <= 2; ring_depth++) {
        int32_t num_opens = read_pages(ring_depth, 0, readings, pages);
        for (int32_t i = 0; i < NUM_READS; i++) {
            assert_int_equal(readings[i].failure, 0);
            expect_page(pages[i], i < NUM_READS - 1 ? i + 1 : 0);
        }
        /* The reader may have taken the first ones before the others came. */
        assert_true(num_opens <= 4);
    }
}

/* Catches: a file that ends too early and takes the reads before its end with it; a file that
 * cannot be opened and takes more with it than those that needed it, or is not told of. */
static void test_failures(void **state)
{
    (void)state;
    static struct reading readings[NUM_READS];
    static _Alignas(PAGE_BYTES) unsigned char pages[NUM_READS][PAGE_BYTES];
    for (int32_t ring_depth = 0; ring_depth <= 2; ring_depth++) {
        write_pages(6);
        (void)read_pages(ring_depth, 0, readings, pages);
        for (int32_t i = 0; i < NUM_READS - 1; i++) {
            assert_int_equal(readings[i].failure, i + 1 < 6 ? 0 : -ENODATA);
            if (i + 1 < 6) {
                expect_page(pages[i], i + 1);
            }
        }
        assert_int_equal(readings[NUM_READS - 1].failure, 0);
        write_pages(NUM_READS);
        (void)read_pages(ring_depth, -EMFILE, readings, pages);
        assert_int_equal(readings[0].failure, 0);
        assert_int_equal(readings[NUM_READS - 1].failure, -EMFILE);
    }
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(PATH);
}

int run_kv_io_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_together),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests_name("kv_io", tests, NULL, remove_file);
}
