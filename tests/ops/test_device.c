/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of device.h on every device, and what the fake one does to those who break them. */
#include "ops/device.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "ops/fake/device_fake.h"
#include "tests/test.h"

#define NUM_SEEDS 50 /* of the fake device; seed -1 stands for the CPU */
#define POISON_BYTE 0xa5

static struct device *create(int32_t seed)
{
    struct device *device = NULL;
    enum imbrex_status status = seed < 0 ? device_cpu_create(&device, NULL)
                                         : device_fake_create((uint64_t)seed, &device, NULL);
    assert_int_equal(status, IMBREX_STATUS_OK);
    return device;
}

static struct device_event *create_event(struct device *device)
{
    struct device_event *event = NULL;
    assert_int_equal(device_event_create(device, &event, NULL), IMBREX_STATUS_OK);
    return event;
}

static void copy(struct device *device, enum device_stream stream, void *destination,
                 const void *source, size_t num_bytes)
{
    assert_int_equal(device_copy_batch_async(device, stream,
                                             &(struct device_copy){.destination = destination,
                                                                   .source = source,
                                                                   .num_bytes = num_bytes},
                                             1),
                     IMBREX_STATUS_OK);
}

/* Work that writes its number behind those that ran before it. */
struct log_entry {
    int32_t *log; /* [0]: entries so far */
    int32_t number;
    enum imbrex_status status;
};

static enum imbrex_status append(void *arg, void *stream_handle)
{
    const struct log_entry *entry = arg;
    (void)stream_handle;
    entry->log[++entry->log[0]] = entry->number;
    return entry->status;
}

static void run(struct device *device, enum device_stream stream, struct log_entry *entry)
{
    assert_int_equal(device_run_async(device, stream, append, entry), IMBREX_STATUS_OK);
}

static void record(struct device *device, struct device_event *event, enum device_stream stream)
{
    assert_int_equal(device_event_record(device, event, stream), IMBREX_STATUS_OK);
}

/* Catches: memory that is not zeroed or aligned, zero bytes that fail, an error without the name of
 * what could not be had. */
static void test_alloc(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed <= 0; seed++) {
        struct device *device = create(seed);
        const size_t sizes[] = {1, 4096, 100001};
        unsigned char *pieces[3];
        for (int32_t i = 0; i < 3; i++) {
            void *memory = NULL;
            assert_int_equal(device_alloc(device, "a piece", sizes[i], &memory, NULL),
                             IMBREX_STATUS_OK);
            assert_int_equal((uintptr_t)memory % 4096, 0);
            pieces[i] = memory;
            for (size_t j = 0; j < sizes[i]; j++) {
                assert_int_equal(pieces[i][j], 0);
                pieces[i][j] = (unsigned char)(i + 1);
            }
        }
        for (int32_t i = 0; i < 3; i++) {
            assert_int_equal(pieces[i][0], i + 1);
            assert_int_equal(pieces[i][sizes[i] - 1], i + 1);
        }
        void *memory = pieces[0];
        assert_int_equal(device_alloc(device, "nothing", 0, &memory, NULL), IMBREX_STATUS_OK);
        assert_null(memory);
        device_free(device, memory);

        struct imbrex_error err;
        memory = pieces[0];
        assert_int_equal(device_alloc(device, "the moon", SIZE_MAX - 100, &memory, &err),
                         IMBREX_STATUS_OUT_OF_MEMORY);
        assert_non_null(strstr(err.message, "the moon"));
        assert_ptr_equal(memory, pieces[0]);
        for (int32_t i = 2; i >= 0; i--) {
            device_free(device, pieces[i]);
        }
        device_destroy(device);
    }
    device_destroy(NULL);
}

/* Catches: a name or a kind of device that misleads whoever asks, a registration that fails. */
static void test_description(void **state)
{
    (void)state;
    struct device *cpu = create(-1);
    struct device *fake = create(0);
    assert_string_equal(device_name(cpu), "cpu");
    assert_string_equal(device_name(fake), "fake");
    assert_false(device_is_async(cpu));
    assert_true(device_is_async(fake));
    struct memory_region region;
    assert_int_equal(memory_region_map("pages", 4096, &region, NULL), IMBREX_STATUS_OK);
    assert_int_equal(device_host_register(cpu, region.base, region.num_bytes, NULL),
                     IMBREX_STATUS_OK);
    device_host_unregister(cpu, region.base);
    device_host_unregister(cpu, NULL);
    memory_region_unmap(&region);
    device_destroy(cpu);
    device_destroy(fake);
}

/* Catches: work and copies of one stream that overtake each other: a value is copied through places
 * 0, 1, 2, ..., and between two copies work changes it. */
static void test_in_order(void **state)
{
    (void)state;
    enum { NUM_LINKS = 12 };
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        int32_t logs[NUM_LINKS + 1][NUM_LINKS + 2];
        struct log_entry entries[NUM_LINKS];
        memset(logs, 0, sizeof(logs));
        for (int32_t i = 0; i < NUM_LINKS; i++) {
            entries[i] = (struct log_entry){.log = logs[i], .number = i};
            run(device, DEVICE_STREAM_STEP, &entries[i]);
            copy(device, DEVICE_STREAM_STEP, logs[i + 1], logs[i], sizeof(logs[i]));
        }
        record(device, event, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        bool is_done = false;
        assert_int_equal(device_event_query(device, event, &is_done), IMBREX_STATUS_OK);
        assert_true(is_done);
        assert_int_equal(logs[NUM_LINKS][0], NUM_LINKS);
        for (int32_t i = 0; i < NUM_LINKS; i++) {
            assert_int_equal(logs[NUM_LINKS][i + 1], i);
        }
        device_event_destroy(device, event);
        device_destroy(device);
    }
}

/* Catches: a batch that loses, repeats or mixes up copies, whatever their order. */
static void test_copy_batch(void **state)
{
    (void)state;
    enum { NUM_COPIES = 9 };
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        int32_t from[NUM_COPIES], to[NUM_COPIES + 1];
        struct device_copy copies[NUM_COPIES];
        for (int32_t i = 0; i < NUM_COPIES; i++) {
            from[i] = 100 + i;
            copies[i] = (struct device_copy){.destination = &to[NUM_COPIES - 1 - i],
                                             .source = &from[i],
                                             .num_bytes = i == 3 ? 0 : sizeof(from[i])};
            to[i] = -1;
        }
        to[NUM_COPIES] = -1;
        assert_int_equal(device_copy_batch_async(device, DEVICE_STREAM_KV_IN, copies, NUM_COPIES),
                         IMBREX_STATUS_OK);
        assert_int_equal(device_copy_batch_async(device, DEVICE_STREAM_KV_IN, NULL, 0),
                         IMBREX_STATUS_OK);
        memset(copies, 0, sizeof(copies)); /* read during the call only */
        record(device, event, DEVICE_STREAM_KV_IN);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        for (int32_t i = 0; i < NUM_COPIES; i++) {
            assert_int_equal(to[NUM_COPIES - 1 - i], i == 3 ? -1 : 100 + i);
        }
        assert_int_equal(to[NUM_COPIES], -1);
        device_event_destroy(device, event);
        device_destroy(device);
    }
}

/* Order in which two pieces of work of two streams ran, the second of which was given last: "12" or
 * "21" as a number. */
static int32_t order_of_two(int32_t seed, bool has_wait)
{
    struct device *device = create(seed);
    struct device_event *events[2] = {create_event(device), create_event(device)};
    int32_t log[4] = {0};
    struct log_entry first = {.log = log, .number = 1};
    struct log_entry second = {.log = log, .number = 2};
    run(device, DEVICE_STREAM_KV_IN, &first);
    record(device, events[0], DEVICE_STREAM_KV_IN);
    if (has_wait) {
        assert_int_equal(device_event_wait(device, events[0], DEVICE_STREAM_STEP),
                         IMBREX_STATUS_OK);
    }
    run(device, DEVICE_STREAM_STEP, &second);
    record(device, events[1], DEVICE_STREAM_STEP);
    assert_int_equal(device_event_synchronize(device, events[1]), IMBREX_STATUS_OK);
    if (has_wait) {
        assert_int_equal(log[0], 2);
    }
    assert_int_equal(device_event_synchronize(device, events[0]), IMBREX_STATUS_OK);
    assert_int_equal(log[0], 2);
    device_event_destroy(device, events[1]);
    device_event_destroy(device, events[0]);
    device_destroy(device);
    return 10 * log[1] + log[2];
}

/* Catches: a fake whose streams never overtake each other, which would hide every forgotten event;
 * and event_wait that does not hold a stream back. */
static void test_streams(void **state)
{
    (void)state;
    int32_t num_overtaken = 0;
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        assert_int_equal(order_of_two(seed, true), 12);
        num_overtaken += order_of_two(seed, false) == 21;
    }
    assert_in_range(num_overtaken, 1, NUM_SEEDS - 1);
}

/* Catches: an event_wait that follows the event to a later record, or forgets it there: the stream
 * waits for the place where the event was. */
static void test_wait_keeps_its_place(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        int32_t log[5] = {0};
        struct log_entry entries[3];
        for (int32_t i = 0; i < 3; i++) {
            entries[i] = (struct log_entry){.log = log, .number = i};
        }
        run(device, DEVICE_STREAM_KV_OUT, &entries[0]);
        record(device, event, DEVICE_STREAM_KV_OUT);
        assert_int_equal(device_event_wait(device, event, DEVICE_STREAM_KV_MANAGE),
                         IMBREX_STATUS_OK);
        record(device, event, DEVICE_STREAM_PREFILL); /* done at once: nothing was given there */
        run(device, DEVICE_STREAM_KV_MANAGE, &entries[1]);
        record(device, event, DEVICE_STREAM_KV_MANAGE);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        assert_int_equal(log[0], 2);
        assert_int_equal(log[1], 0);
        assert_int_equal(log[2], 1);
        device_event_destroy(device, event);
        device_destroy(device);
    }
}

/* Catches: an event that was never recorded and is not done, or that holds a stream for ever. */
static void test_event_without_record(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed < 3; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        struct device_event *recorded = create_event(device);
        bool is_done = false;
        assert_int_equal(device_event_query(device, event, &is_done), IMBREX_STATUS_OK);
        assert_true(is_done);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        assert_int_equal(device_event_wait(device, event, DEVICE_STREAM_STEP), IMBREX_STATUS_OK);
        record(device, recorded, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, recorded), IMBREX_STATUS_OK);
        device_event_destroy(device, event);
        device_event_destroy(device, recorded);
        device_destroy(device);
    }
}

/* Catches: a destination that holds the right bytes before its event on the fake device, so that
 * reading too early would be seen by nobody: until then it is poison, to the byte. */
static void test_poison(void **state)
{
    (void)state;
    int32_t num_poisoned = 0;
    for (int32_t seed = 0; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        unsigned char source[64], destination[66];
        memset(source, 7, sizeof(source));
        memset(destination, 7, sizeof(destination));
        copy(device, DEVICE_STREAM_STEP, destination + 1, source, sizeof(source));
        record(device, event, DEVICE_STREAM_STEP);
        bool is_done = false;
        while (!is_done) {
            if (device_fake_num_pending(device) > 0) {
                for (size_t i = 1; i < 65; i++) {
                    assert_int_equal(destination[i], POISON_BYTE);
                }
                num_poisoned++;
            }
            assert_int_equal(device_event_query(device, event, &is_done), IMBREX_STATUS_OK);
        }
        for (size_t i = 0; i < sizeof(destination); i++) {
            assert_int_equal(destination[i], 7);
        }
        device_event_destroy(device, event);
        device_destroy(device);
    }
    assert_true(num_poisoned > 0);
}

/* Catches: poison that hits what an earlier item of the stream still reads: B goes to C before A
 * goes to B, in host memory and on the device. */
static void test_poison_in_order(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        int32_t host[3];
        void *on_device;
        assert_int_equal(device_alloc(device, "ints", sizeof(host), &on_device, NULL),
                         IMBREX_STATUS_OK);
        int32_t *const places[2] = {host, on_device};
        for (int32_t i = 0; i < 2; i++) {
            int32_t *ints = places[i];
            for (int32_t j = 0; j < 3; j++) {
                ints[j] = 10 + j;
            }
            copy(device, DEVICE_STREAM_STEP, &ints[2], &ints[1], sizeof(*ints));
            copy(device, DEVICE_STREAM_STEP, &ints[1], &ints[0], sizeof(*ints));
            record(device, event, DEVICE_STREAM_STEP);
            assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
            assert_int_equal(ints[0], 10);
            assert_int_equal(ints[1], 10);
            assert_int_equal(ints[2], 11);
        }
        device_free(device, on_device);
        device_event_destroy(device, event);
        device_destroy(device);
    }
}

/* Catches: a fake that reads the source when the copy is given: who overwrites it before the event
 * would be right by luck. */
static void test_source_is_read_late(void **state)
{
    (void)state;
    int32_t num_late = 0;
    for (int32_t seed = 0; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        int32_t source = 1, destination = 0;
        copy(device, DEVICE_STREAM_STEP, &destination, &source, sizeof(source));
        source = 2;
        record(device, event, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        num_late += destination == 2;
        device_event_destroy(device, event);
        device_destroy(device);
    }
    assert_in_range(num_late, NUM_SEEDS / 2, NUM_SEEDS);
}

/* Catches: the same seed that gives another run, so that a failure could not be looked at again. */
static void test_same_seed(void **state)
{
    (void)state;
    int32_t num_different = 0;
    for (int32_t seed = 0; seed < NUM_SEEDS; seed++) {
        int64_t pending[2][20];
        for (int32_t pass = 0; pass < 3; pass++) {
            struct device *device = create(pass < 2 ? seed : seed + NUM_SEEDS);
            struct device_event *event = create_event(device);
            int64_t *counts = pending[pass > 0];
            int32_t log[22] = {0};
            struct log_entry entry = {.log = log};
            for (int32_t i = 0; i < 20; i++) {
                run(device, (enum device_stream)(i % DEVICE_STREAM_COUNT), &entry);
                counts[i] = device_fake_num_pending(device);
            }
            for (int32_t stream = 0; stream < DEVICE_STREAM_COUNT; stream++) {
                record(device, event, (enum device_stream)stream);
                assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
            }
            assert_int_equal(log[0], 20);
            device_event_destroy(device, event);
            device_destroy(device);
            if (pass == 1) {
                assert_memory_equal(pending[0], pending[1], sizeof(pending[0]));
            }
        }
        num_different += memcmp(pending[0], pending[1], sizeof(pending[0])) != 0;
    }
    assert_true(num_different > 0);
}

/* Catches: failed work that nobody is told of, that is told twice, by an event before it or of
 * another stream; a stream that goes on before the host was told, or does not afterwards. */
static void test_failed_work(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *before = create_event(device);
        struct device_event *behind = create_event(device);
        struct device_event *beside = create_event(device);
        int32_t log[8] = {0};
        struct log_entry good = {.log = log, .number = 1};
        struct log_entry bad = {.log = log, .number = 2, .status = IMBREX_STATUS_CAPACITY};
        struct log_entry worse = {.log = log, .number = 3, .status = IMBREX_STATUS_INTERNAL};
        run(device, DEVICE_STREAM_STEP, &good);
        record(device, before, DEVICE_STREAM_STEP);
        run(device, DEVICE_STREAM_STEP, &bad);
        run(device, DEVICE_STREAM_STEP, &worse);
        run(device, DEVICE_STREAM_STEP, &good);
        record(device, behind, DEVICE_STREAM_STEP);
        record(device, beside, DEVICE_STREAM_PREFILL);
        if (seed < 0) {
            int32_t source = 1, destination = 2;
            copy(device, DEVICE_STREAM_STEP, &destination, &source, sizeof(source));
            assert_int_equal(destination, 2);
        }
        assert_int_equal(device_event_synchronize(device, behind), IMBREX_STATUS_CAPACITY);
        bool is_done = false;
        assert_int_equal(device_event_query(device, behind, &is_done), IMBREX_STATUS_CAPACITY);
        assert_true(is_done);
        assert_int_equal(device_event_synchronize(device, before), IMBREX_STATUS_OK);
        assert_int_equal(device_event_synchronize(device, beside), IMBREX_STATUS_OK);
        assert_int_equal(log[0], 2);

        record(device, behind, DEVICE_STREAM_STEP);
        run(device, DEVICE_STREAM_STEP, &good);
        record(device, behind, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, behind), IMBREX_STATUS_OK);
        assert_int_equal(log[0], 3);
        /* `before` was recorded before the failure and is recorded again only now; a new event
         * knows nothing of what was before it. */
        struct device_event *created_now = create_event(device);
        record(device, before, DEVICE_STREAM_STEP);
        record(device, created_now, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, before), IMBREX_STATUS_CAPACITY);
        assert_int_equal(device_event_synchronize(device, created_now), IMBREX_STATUS_OK);
        device_event_destroy(device, beside);
        device_event_destroy(device, created_now);
        device_event_destroy(device, before);
        device_event_destroy(device, behind);
        device_destroy(device);
    }
}

/* Catches: a stream that an old failure, told once more, sets going before the new one is told. */
static void test_failures_are_told_apart(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *first = create_event(device);
        struct device_event *second = create_event(device);
        int32_t log[8] = {0};
        struct log_entry good = {.log = log, .number = 1};
        struct log_entry bad = {.log = log, .number = 2, .status = IMBREX_STATUS_CAPACITY};
        struct log_entry worse = {.log = log, .number = 3, .status = IMBREX_STATUS_INTERNAL};
        run(device, DEVICE_STREAM_STEP, &bad);
        record(device, first, DEVICE_STREAM_STEP);
        record(device, second, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, first), IMBREX_STATUS_CAPACITY);
        run(device, DEVICE_STREAM_STEP, &worse);
        assert_int_equal(device_event_synchronize(device, first), IMBREX_STATUS_CAPACITY);
        assert_int_equal(device_event_synchronize(device, second), IMBREX_STATUS_CAPACITY);
        run(device, DEVICE_STREAM_STEP, &good);
        record(device, second, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, second), IMBREX_STATUS_INTERNAL);
        assert_int_equal(log[0], 2);
        device_event_destroy(device, first);
        device_event_destroy(device, second);
        device_destroy(device);
    }
}

/* Catches: faults of the fake that come at another time than asked for, more than once, or that do
 * the work all the same. */
static void test_faults(void **state)
{
    (void)state;
    for (int32_t seed = 0; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        int32_t log[8] = {0};
        struct log_entry entry = {.log = log, .number = 1};
        int32_t source = 1, copied[3] = {0};

        device_fake_fail(device, DEVICE_FAKE_FAULT_CALL, 2, IMBREX_STATUS_OUT_OF_MEMORY);
        run(device, DEVICE_STREAM_STEP, &entry);
        assert_int_equal(device_run_async(device, DEVICE_STREAM_STEP, append, &entry),
                         IMBREX_STATUS_OUT_OF_MEMORY);
        run(device, DEVICE_STREAM_STEP, &entry);
        record(device, event, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        assert_int_equal(log[0], 2);

        device_fake_fail(device, DEVICE_FAKE_FAULT_WORK, 3, IMBREX_STATUS_INTERNAL);
        for (int32_t i = 0; i < 4; i++) {
            run(device, DEVICE_STREAM_STEP, &entry);
        }
        record(device, event, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_INTERNAL);
        assert_int_equal(log[0], 4);

        device_fake_fail(device, DEVICE_FAKE_FAULT_COPY, 2, IMBREX_STATUS_IO);
        for (int32_t i = 0; i < 3; i++) {
            copy(device, DEVICE_STREAM_STEP, &copied[i], &source, sizeof(source));
        }
        record(device, event, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_IO);
        assert_int_equal(copied[0], 1);
        assert_int_equal((uint32_t)copied[1], 0xa5a5a5a5u);
        assert_int_equal((uint32_t)copied[2], 0xa5a5a5a5u);

        device_fake_fail(device, DEVICE_FAKE_FAULT_WORK, 1, IMBREX_STATUS_INTERNAL);
        device_fake_fail(device, DEVICE_FAKE_FAULT_WORK, 0, IMBREX_STATUS_OK);
        run(device, DEVICE_STREAM_STEP, &entry);
        record(device, event, DEVICE_STREAM_STEP);
        assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        assert_int_equal(log[0], 5);
        device_event_destroy(device, event);
        device_destroy(device);
    }
}

static void expect_failed(struct device *device, struct device_event *event)
{
    struct imbrex_error err;
    int32_t source = 1, destination = 2;
    void *memory = &source;
    bool is_done = false;
    assert_int_equal(device_event_query(device, event, &is_done), IMBREX_STATUS_DEVICE);
    assert_true(is_done);
    assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_DEVICE);
    assert_int_equal(device_event_record(device, event, DEVICE_STREAM_STEP), IMBREX_STATUS_DEVICE);
    assert_int_equal(device_event_wait(device, event, DEVICE_STREAM_STEP), IMBREX_STATUS_DEVICE);
    assert_int_equal(
        device_copy_batch_async(device, DEVICE_STREAM_STEP,
                                &(struct device_copy){&destination, &source, sizeof(source)}, 1),
        IMBREX_STATUS_DEVICE);
    assert_int_equal(destination, 2);
    assert_int_equal(device_alloc(device, "x", 1, &memory, &err), IMBREX_STATUS_DEVICE);
    assert_ptr_equal(memory, &source);
    assert_int_equal(err.status, IMBREX_STATUS_DEVICE);
    assert_non_null(strstr(err.message, device_name(device)));
}

/* Catches: a device that goes on after it failed, by a call, a copy, or what its work says; and one
 * that then cannot be taken down. */
static void test_device_failure_is_sticky(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        for (int32_t kind = 0; kind <= DEVICE_FAKE_FAULT_COUNT; kind++) {
            struct device *device = create(seed);
            struct device_event *event = create_event(device);
            void *memory;
            int32_t log[8] = {0}, source = 1, destination = 0;
            struct log_entry good = {.log = log, .number = 1};
            struct log_entry fatal = {.log = log, .number = 2, .status = IMBREX_STATUS_DEVICE};
            assert_int_equal(device_alloc(device, "x", 1, &memory, NULL), IMBREX_STATUS_OK);
            if (seed >= 0 && kind < DEVICE_FAKE_FAULT_COUNT) {
                device_fake_fail(device, (enum device_fake_fault)kind, 1, IMBREX_STATUS_DEVICE);
            } else if (kind < DEVICE_FAKE_FAULT_COUNT) {
                kind = DEVICE_FAKE_FAULT_COUNT; /* the CPU has only its work to fail it */
            }
            /* Calls fail from the one on that notices. */
            (void)device_copy_batch_async(
                device, DEVICE_STREAM_STEP,
                &(struct device_copy){&destination, &source, sizeof(source)}, 1);
            (void)device_run_async(device, DEVICE_STREAM_STEP, append,
                                   kind == DEVICE_FAKE_FAULT_COUNT ? &fatal : &good);
            (void)device_event_record(device, event, DEVICE_STREAM_STEP);
            assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_DEVICE);
            expect_failed(device, event);
            if (seed >= 0) {
                assert_int_equal(device_fake_num_pending(device), 0);
            }
            assert_int_equal(log[0], kind == DEVICE_FAKE_FAULT_COUNT);
            device_free(device, memory);
            device_event_destroy(device, event);
            device_destroy(device);
        }
    }
}

/* Catches: a capture that runs the work, a launch that does not see arg as it is by then, or that
 * is not in its stream's order. */
static void test_graph(void **state)
{
    (void)state;
    for (int32_t seed = -1; seed < NUM_SEEDS; seed++) {
        struct device *device = create(seed);
        struct device_event *event = create_event(device);
        struct device_graph *graph = NULL;
        int32_t log[8] = {0};
        struct log_entry entry = {.log = log, .number = 1};
        struct log_entry between = {.log = log, .number = 9};
        assert_int_equal(device_graph_capture(device, append, &entry, &graph, NULL),
                         IMBREX_STATUS_OK);
        assert_int_equal(log[0], 0);
        for (int32_t i = 0; i < 2; i++) {
            entry.number = 5 + i;
            assert_int_equal(device_graph_launch(device, DEVICE_STREAM_STEP, graph),
                             IMBREX_STATUS_OK);
            run(device, DEVICE_STREAM_STEP, &between);
            record(device, event, DEVICE_STREAM_STEP);
            assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_OK);
        }
        const int32_t expected[] = {4, 5, 9, 6, 9};
        assert_memory_equal(log, expected, sizeof(expected));
        device_graph_destroy(device, graph);
        device_graph_destroy(device, NULL);
        device_event_destroy(device, event);
        device_event_destroy(device, NULL);
        device_destroy(device);
    }
}

/* Catches: names taken that mean nothing, numbers that wrap around, a message that does not say
 * what was found. */
static void test_parse(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",        "gpu",     "CPU",   "cpu:0",           "cuda:",   "cuda:x",
        "cuda:-1", "cuda:1x", "cuda1", "cuda:2147483648", "cuda: 1", "autofocus"};
    const struct {
        const char *name;
        struct device_choice choice;
    } good[] = {{NULL, {.kind = DEVICE_KIND_CPU, .idx = 0}},
                {"cpu", {.kind = DEVICE_KIND_CPU, .idx = 0}},
                {"cuda", {.kind = DEVICE_KIND_CUDA, .idx = 0}},
                {"cuda:0", {.kind = DEVICE_KIND_CUDA, .idx = 0}},
                {"cuda:17", {.kind = DEVICE_KIND_CUDA, .idx = 17}},
                {"cuda:2147483647", {.kind = DEVICE_KIND_CUDA, .idx = INT32_MAX}},
                {"auto", {.kind = DEVICE_KIND_AUTO, .idx = 0}}};
    struct device_choice choice = {.kind = DEVICE_KIND_CUDA, .idx = 5};
    struct imbrex_error err;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(device_parse(bad[i], &choice, &err), IMBREX_STATUS_INVALID_ARGUMENT);
        assert_non_null(strstr(err.message, bad[i]));
        assert_int_equal(choice.idx, 5);
    }
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_int_equal(device_parse(good[i].name, &choice, &err), IMBREX_STATUS_OK);
        assert_int_equal(choice.kind, good[i].choice.kind);
        assert_int_equal(choice.idx, good[i].choice.idx);
    }
}

struct log_lines {
    int32_t count;
    char last[256];
};

static void keep_line(void *user, enum imbrex_log_level level, const char *message)
{
    struct log_lines *lines = user;
    (void)level;
    lines->count++;
    strncpy(lines->last, message, sizeof(lines->last) - 1);
}

/* Catches: an "auto" that fails where there is no GPU, says nothing, or says it without a reason; a
 * GPU that is not there and is opened. */
static void test_open(void **state)
{
    (void)state;
    struct log_lines lines = {0};
    const struct log log = {keep_line, &lines};
    struct device_choice opened = {0};
    struct device *device = NULL;
    struct imbrex_error err = {0};
    assert_int_equal(device_open(&(struct device_choice){.kind = DEVICE_KIND_AUTO}, &log, &device,
                                 &opened, &err),
                     IMBREX_STATUS_OK);
    if (opened.kind == DEVICE_KIND_CPU) {
        assert_int_equal(lines.count, 1);
        assert_non_null(strstr(lines.last, "the model runs on the CPU: "));
        assert_int_equal(lines.last[strlen(lines.last) - 1] == ' ', 0);
        assert_string_equal(device_name(device), "cpu");
    } else {
        assert_int_equal(lines.count, 0);
        assert_string_equal(device_name(device), "cuda");
    }
    device_destroy(device);
    device = NULL;
    assert_int_not_equal(device_open(&(struct device_choice){.kind = DEVICE_KIND_CUDA, .idx = 1000},
                                     &log, &device, &opened, &err),
                         IMBREX_STATUS_OK);
    assert_null(device);
    assert_true(strlen(err.message) > 0);
}

int run_device_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alloc),
        cmocka_unit_test(test_description),
        cmocka_unit_test(test_in_order),
        cmocka_unit_test(test_copy_batch),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_wait_keeps_its_place),
        cmocka_unit_test(test_event_without_record),
        cmocka_unit_test(test_poison),
        cmocka_unit_test(test_poison_in_order),
        cmocka_unit_test(test_source_is_read_late),
        cmocka_unit_test(test_same_seed),
        cmocka_unit_test(test_failed_work),
        cmocka_unit_test(test_failures_are_told_apart),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_device_failure_is_sticky),
        cmocka_unit_test(test_graph),
        cmocka_unit_test(test_parse),
        cmocka_unit_test(test_open),
    };
    return cmocka_run_group_tests_name("device", tests, NULL, NULL);
}
