/* SPDX-License-Identifier: Apache-2.0 */
/* The device of a GPU over a driver without one: what is taken is given back, whatever fails. */
#include "ops/cuda/device_cuda.h"

#include <string.h>

#include "ops/cuda/backend_cuda.h"
#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

#define PAGE_BYTES 4096
#define NUM_COPIES 150 /* more than one call of the driver takes */

static unsigned char page[PAGE_BYTES] __attribute__((aligned(PAGE_BYTES)));

static enum imbrex_status create(struct device **device, struct imbrex_error *err)
{
    struct driver driver = fake_table();
    return device_cuda_create_on(&driver, 0, device, err);
}

static struct device *create_good(void)
{
    struct device *device = NULL;
    fake_reset();
    assert_int_equal(create(&device, NULL), IMBREX_STATUS_OK);
    return device;
}

static void expect_nothing_held(void)
{
    assert_int_equal(fake.num_retained, 0);
    assert_int_equal(fake.num_pushed, 0);
    assert_int_equal(fake.num_allocated, 0);
    assert_int_equal(fake.num_registered, 0);
    assert_int_equal(fake.num_streams, 0);
    assert_int_equal(fake.num_events, 0);
    assert_int_equal(fake.num_graphs, 0);
    assert_int_equal(fake.num_execs, 0);
}

static enum imbrex_status count_call(void *arg, void *stream_handle)
{
    int *count = arg;
    assert_non_null(stream_handle);
    (*count)++;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status refuse(void *arg, void *stream_handle)
{
    (void)arg, (void)stream_handle;
    return IMBREX_STATUS_UNSUPPORTED;
}

/* What a device holds in the middle of its life. */
struct holding {
    void *memory;
    struct device_event *event;
    struct device_graph *graph;
    bool is_registered;
};

static enum imbrex_status use(struct device *device, struct holding *holding,
                              struct imbrex_error *err)
{
    struct device_copy copies[NUM_COPIES];
    int count = 0;
    bool is_done = false;
    TRY(device_alloc(device, "the fake memory", 3 * PAGE_BYTES, &holding->memory, err));
    TRY(device_host_register(device, page, PAGE_BYTES, err));
    holding->is_registered = true;
    for (int i = 0; i < NUM_COPIES; i++) {
        copies[i] = (struct device_copy){.destination = (unsigned char *)holding->memory + i,
                                         .source = page + i,
                                         .num_bytes = 1};
    }
    TRY(device_copy_batch_async(device, DEVICE_STREAM_KV_IN, copies, NUM_COPIES));
    TRY(device_copy_batch_async(device, DEVICE_STREAM_STEP, copies, 1));
    TRY(device_run_async(device, DEVICE_STREAM_STEP, count_call, &count));
    assert_int_equal(count, 1);
    TRY(device_event_create_timed(device, &holding->event, err));
    TRY(device_event_record(device, holding->event, DEVICE_STREAM_STEP));
    TRY(device_event_wait(device, holding->event, DEVICE_STREAM_KV_OUT));
    TRY(device_event_query(device, holding->event, &is_done));
    assert_true(is_done);
    TRY(device_event_synchronize(device, holding->event));
    int64_t elapsed_ns = 0;
    TRY(device_event_elapsed(device, holding->event, holding->event, &elapsed_ns));
    assert_in_range(elapsed_ns, 99, 100 * 10000); /* the fake driver's first answer is 100 */
    TRY(device_graph_capture(device, count_call, &count, &holding->graph, err));
    assert_int_equal(count, 2);
    return device_graph_launch(device, DEVICE_STREAM_STEP, holding->graph);
}

static void give_back(struct device *device, struct holding *holding)
{
    device_graph_destroy(device, holding->graph);
    device_event_destroy(device, holding->event);
    if (holding->is_registered) {
        device_host_unregister(device, page);
    }
    device_free(device, holding->memory);
    device_destroy(device);
}

/* Catches: copies that are dropped at the edge of a batch, memory that is not zeroed or aligned. */
static void test_use(void **state)
{
    (void)state;
    struct holding holding = {.memory = NULL};
    struct device *device = create_good();
    for (int i = 0; i < PAGE_BYTES; i++) {
        page[i] = (unsigned char)(i % 251 + 1);
    }
    assert_int_equal(use(device, &holding, NULL), IMBREX_STATUS_OK);
    assert_int_equal((uintptr_t)holding.memory % PAGE_BYTES, 0);
    assert_memory_equal(holding.memory, page, NUM_COPIES);
    for (int i = NUM_COPIES; i < 3 * PAGE_BYTES; i++) {
        assert_int_equal(((unsigned char *)holding.memory)[i], 0);
    }
    assert_string_equal(device_name(device), "cuda");
    assert_true(device_is_async(device));
    give_back(device, &holding);
    expect_nothing_held();
}

/* Catches: anything kept when a call of the driver fails, a failure that is not told, a device that
 * goes on after one, a message without the driver's reason. */
static void test_each_call_fails(void **state)
{
    (void)state;
    for (int fail_at = 1;; fail_at++) {
        struct device *device = NULL;
        struct holding holding = {.memory = NULL};
        struct imbrex_error err = {.message = ""};
        fake_reset();
        fake.fail_at = fail_at;
        enum imbrex_status status = create(&device, &err);
        if (status != IMBREX_STATUS_OK) {
            assert_null(device);
            assert_non_null(strstr(err.message, "fake failure"));
        } else {
            status = use(device, &holding, &err);
            if (status == IMBREX_STATUS_DEVICE) {
                void *memory = NULL;
                assert_int_equal(device_alloc(device, "more", 1, &memory, &err),
                                 IMBREX_STATUS_DEVICE);
            }
            give_back(device, &holding);
        }
        expect_nothing_held();
        if (fake.failed_call == NULL) {
            assert_int_equal(status, IMBREX_STATUS_OK);
            assert_true(fail_at > 30);
            return;
        }
    }
}

/* Catches: a failure whose reason is lost by the time somebody asks. */
static void test_reason_is_kept(void **state)
{
    (void)state;
    struct device *device = create_good();
    struct imbrex_error err = {.message = ""};
    struct device_event *event = NULL;
    void *memory = NULL;
    assert_int_equal(device_event_create(device, &event, NULL), IMBREX_STATUS_OK);
    fake.fail_at = fake.num_calls + 2; /* behind the context's */
    assert_int_equal(device_event_synchronize(device, event), IMBREX_STATUS_DEVICE);
    assert_int_equal(device_alloc(device, "more", 1, &memory, &err), IMBREX_STATUS_DEVICE);
    assert_non_null(strstr(err.message, "event_synchronize"));
    assert_non_null(strstr(err.message, "CUDA_ERROR_LAUNCH_FAILED"));
    device_event_destroy(device, event);
    device_destroy(device);
    expect_nothing_held();
}

/* Catches: a message that does not name what was asked for and what there is; a device that is
 * unusable because one piece did not fit. */
static void test_out_of_memory(void **state)
{
    (void)state;
    struct device *device = create_good();
    struct imbrex_error err = {.message = ""};
    void *memory = NULL;
    fake.max_allocated = 4 << 20;
    assert_int_equal(device_alloc(device, "the KV cache", 5 << 20, &memory, &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    assert_string_equal(err.message, "the KV cache: expected 5242880 bytes of device memory, found "
                                     "1000 free of 2000");
    assert_int_equal(device_alloc(device, "all there is", SIZE_MAX, &memory, &err),
                     IMBREX_STATUS_OUT_OF_MEMORY);
    assert_int_equal(device_alloc(device, "less", 1 << 20, &memory, &err), IMBREX_STATUS_OK);
    device_free(device, memory);
    device_destroy(device);
    expect_nothing_held();
}

/* Catches: work whose failure is lost, or taken for the device's; a graph out of work that failed,
 * a capture that is not ended. */
static void test_work_fails(void **state)
{
    (void)state;
    struct device *device = create_good();
    struct device_graph *graph = NULL;
    struct imbrex_error err = {.message = ""};
    int count = 0;
    assert_int_equal(device_run_async(device, DEVICE_STREAM_STEP, refuse, NULL),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_int_equal(device_graph_capture(device, refuse, NULL, &graph, &err),
                     IMBREX_STATUS_UNSUPPORTED);
    assert_null(graph);
    assert_false(fake.is_capturing);
    assert_int_equal(device_run_async(device, DEVICE_STREAM_STEP, count_call, &count),
                     IMBREX_STATUS_OK);
    assert_int_equal(count, 1);
    device_destroy(device);
    expect_nothing_held();
}

static enum imbrex_status look_up(void *arg, void *stream_handle)
{
    struct backend *backend = arg;
    static int32_t anything[4];
    backend_begin(backend, stream_handle);
    backend_embedding(backend, &(struct embedding_params){.token_ids = anything,
                                                          .table = {anything, DTYPE_F32},
                                                          .num_tokens = 1,
                                                          .hidden_size = 1});
    return backend_end(backend);
}

/* Catches: a step whose kernel could not be launched, and nobody learns why: neither of a device
 * that is gone nor of one that goes on. */
static void test_backend_reason(void **state)
{
    static const struct {
        CUresult result;
        enum imbrex_status status;
        bool is_captured;
    } cases[] = {
        {CUDA_ERROR_LAUNCH_FAILED, IMBREX_STATUS_DEVICE, false},
        {CUDA_ERROR_LAUNCH_FAILED, IMBREX_STATUS_DEVICE, true},
        {CUDA_ERROR_OUT_OF_MEMORY, IMBREX_STATUS_OUT_OF_MEMORY, false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct device *device = create_good();
        struct backend *backend = NULL;
        struct device_graph *graph = NULL;
        struct imbrex_error err;
        const struct backend_cuda_options options = {.activation_dtype = DTYPE_F32};
        const struct backend_shape shape = {.activation_dtype = DTYPE_F32};
        fake.params_bytes = sizeof(struct embedding_kernel_params);
        assert_int_equal(backend_cuda_create(device, &options, &shape, NULL, 0, &backend, NULL),
                         IMBREX_STATUS_OK);
        assert_int_equal(device_run_async(device, DEVICE_STREAM_STEP, look_up, backend),
                         IMBREX_STATUS_OK);
        /* Behind entering the context, and beginning the capture. */
        fake.fail_at = fake.num_calls + (cases[i].is_captured ? 3 : 2);
        fake.fail_result = cases[i].result;
        assert_int_equal(cases[i].is_captured
                             ? device_graph_capture(device, look_up, backend, &graph, &err)
                             : device_run_async(device, DEVICE_STREAM_STEP, look_up, backend),
                         cases[i].status);
        assert_string_equal(fake.failed_call, "fake_launch_kernel_ex");
        assert_int_equal(device->has_failed, cases[i].status == IMBREX_STATUS_DEVICE);
        assert_int_equal(device->failure.status, cases[i].status);
        assert_non_null(strstr(device->failure.message, "launch_kernel_ex"));
        backend_destroy(backend);
        device_destroy(device);
        expect_nothing_held();
    }
}

/* Catches: a step's inputs and results that wait behind KV blocks for a copy engine, a kernel that
 * is sent to memory which it does not reach or to addresses that are no multiples of its words, a
 * copy by two ways at once, KV blocks that take SMs from the step. */
static void test_small_copies(void **state)
{
    enum { MANY = 1 << 20 };
    static unsigned char host[MANY + PAGE_BYTES] __attribute__((aligned(PAGE_BYTES)));
    const struct {
        enum device_stream stream;
        size_t host_offset, device_offset, num_bytes;
        bool is_up, is_unreached, is_kernel;
    } cases[] = {
        {DEVICE_STREAM_STEP, 0, 0, 1, true, false, true},
        {DEVICE_STREAM_STEP, 64, 4096, 4100, true, false, true},
        {DEVICE_STREAM_STEP, 64, 4096, MANY, false, false, true},
        {DEVICE_STREAM_STEP, 0, 0, MANY + 1, true, false, false},
        {DEVICE_STREAM_STEP, 8, 0, 64, true, false, false},
        {DEVICE_STREAM_STEP, 0, 8, 64, false, false, false},
        {DEVICE_STREAM_STEP, 0, 0, 64, true, true, false},
        {DEVICE_STREAM_KV_IN, 0, 0, 64, true, false, false},
        {DEVICE_STREAM_KV_OUT, 0, 0, 64, false, false, false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct device *device = NULL;
        void *memory = NULL;
        fake_reset();
        fake.reaches_host = !cases[i].is_unreached;
        assert_int_equal(create(&device, NULL), IMBREX_STATUS_OK);
        assert_int_equal(device_host_register(device, host, sizeof(host), NULL), IMBREX_STATUS_OK);
        assert_int_equal(device_alloc(device, "copies", 2 * MANY, &memory, NULL), IMBREX_STATUS_OK);
        unsigned char *there = (unsigned char *)memory + cases[i].device_offset;
        unsigned char *here = host + cases[i].host_offset;
        const struct device_copy copy = {.destination = cases[i].is_up ? there : here,
                                         .source = cases[i].is_up ? here : there,
                                         .num_bytes = cases[i].num_bytes};
        assert_int_equal(device_copy_batch_async(device, cases[i].stream, &copy, 1),
                         IMBREX_STATUS_OK);
        assert_int_equal(fake.num_launches, cases[i].is_kernel);
        assert_int_equal(fake.num_copies, !cases[i].is_kernel);
        if (cases[i].is_kernel) {
            struct host_copy_kernel_params params;
            memcpy(&params, &fake.params, sizeof(params));
            assert_string_equal(fake.kernel, "host_copy");
            assert_ptr_equal(params.d, copy.destination);
            assert_ptr_equal(params.a, copy.source);
            assert_int_equal(params.num_bytes, copy.num_bytes);
            assert_int_equal(fake.config.numAttrs, 0);
            size_t grid_bytes =
                (size_t)fake.config.gridDimX * HOST_COPY_THREADS * HOST_COPY_THREAD_BYTES;
            assert_true(grid_bytes >= copy.num_bytes && grid_bytes < copy.num_bytes + 4096);
        }
        /* From one place of the GPU's to another, and of memory that was given back. */
        const struct device_copy inside = {.destination = there, .source = there, .num_bytes = 16};
        assert_int_equal(device_copy_batch_async(device, DEVICE_STREAM_STEP, &inside, 1),
                         IMBREX_STATUS_OK);
        device_host_unregister(device, host);
        assert_int_equal(device_copy_batch_async(device, DEVICE_STREAM_STEP, &copy, 1),
                         IMBREX_STATUS_OK);
        assert_int_equal(fake.num_launches, cases[i].is_kernel);
        device_free(device, memory);
        device_destroy(device);
        expect_nothing_held();
    }
}

int run_device_cuda_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_use),
        cmocka_unit_test(test_small_copies),
        cmocka_unit_test(test_each_call_fails),
        cmocka_unit_test(test_reason_is_kept),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_work_fails),
        cmocka_unit_test(test_backend_reason),
    };
    return cmocka_run_group_tests_name("device_cuda", tests, NULL, NULL);
}
