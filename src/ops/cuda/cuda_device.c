/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a GPU and loading kernels into it. */
#include "ops/cuda/cuda_device.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/line.h"

/* Layers of the largest models asked for (80) times the matrices of one (about 10). */
#define DEFAULT_MAX_TENSOR_MAPS 1024
#define MAX_TENSOR_MAPS (1 << 20)

/* sm_90a code runs on this one and on nothing else; the portable images from the other one on. */
#define HOPPER_CAPABILITY 90
#define LEAST_CAPABILITY 80

struct imbrex_device_options imbrex_device_options_default(void)
{
    return (struct imbrex_device_options){.max_tensor_maps = DEFAULT_MAX_TENSOR_MAPS,
                                          .overlap_launches = true};
}

static enum imbrex_status read_attribute(const struct driver *driver, CUdevice gpu,
                                         CUdevice_attribute attribute, int32_t *value,
                                         struct imbrex_error *err)
{
    int found = 0;
    TRY(DRIVER_CALL(driver, err, device_get_attribute, &found, attribute, gpu));
    *value = found;
    return IMBREX_STATUS_OK;
}

/* Finds the GPU and reads what it is; nothing has to be given back afterwards. */
static enum imbrex_status find_gpu(struct imbrex_device *device, int32_t device_idx,
                                   struct imbrex_error *err)
{
    const struct driver *driver = &device->driver;
    struct imbrex_device_info *description = &device->description;
    int num_gpus = 0;
    int32_t major = 0, minor = 0, l2_bytes = 0;

    TRY(DRIVER_CALL(driver, err, device_get_count, &num_gpus));
    if (num_gpus < 1) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "CUDA: there is a driver, but it finds no GPU");
    }
    if (device_idx < 0 || device_idx >= num_gpus) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND,
                         "device %d: expected a number from 0 to %d, this machine has %d GPU%s",
                         (int)device_idx, num_gpus - 1, num_gpus, line_plural((uint64_t)num_gpus));
    }
    TRY(DRIVER_CALL(driver, err, device_get, &device->gpu, device_idx));
    TRY(DRIVER_CALL(driver, err, device_get_name, description->name, (int)sizeof(description->name),
                    device->gpu));
    TRY(read_attribute(driver, device->gpu, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major,
                       err));
    TRY(read_attribute(driver, device->gpu, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor,
                       err));
    TRY(read_attribute(driver, device->gpu, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                       &description->num_sms, err));
    TRY(read_attribute(driver, device->gpu, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &l2_bytes, err));
    TRY(read_attribute(driver, device->gpu, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                       &device->max_shared_bytes, err));
    description->device_idx = device_idx;
    description->compute_capability = 10 * major + minor;
    description->driver_version = driver->version;
    description->l2_bytes = l2_bytes;
    if (description->compute_capability < LEAST_CAPABILITY) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "device %d: %s: expected compute capability 8.0 (Ampere) or newer, since "
                         "older ones multiply no bf16 matrices, found %d.%d",
                         (int)device_idx, description->name, (int)major, (int)minor);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_options(const struct imbrex_device_options *options,
                                        struct imbrex_error *err)
{
    if (options->max_tensor_maps < 1 || options->max_tensor_maps > MAX_TENSOR_MAPS) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "device options: max_tensor_maps: expected 1 to %d, found %d",
                         MAX_TENSOR_MAPS, (int)options->max_tensor_maps);
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status cuda_device_create(const struct driver *driver, int32_t device_idx,
                                      const struct imbrex_device_options *options,
                                      struct imbrex_device **device, struct imbrex_error *err)
{
    struct imbrex_device_options defaults = imbrex_device_options_default();
    struct imbrex_device *created = NULL;
    enum imbrex_status status;

    if (options == NULL) {
        options = &defaults;
    }
    TRY(check_options(options, err));
    created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "device", sizeof(*created));
    }
    created->driver = *driver;
    size_t functions_bytes = (size_t)kernel_table_count() * sizeof(created->functions[0]);
    created->functions = calloc(1, functions_bytes);
    if (created->functions == NULL) {
        status = error_out_of_memory(err, "device: kernels", functions_bytes);
        goto fail;
    }
    TRY_OR_FAIL(tensor_map_cache_init(options->max_tensor_maps, &created->maps, err));
    TRY_OR_FAIL(find_gpu(created, device_idx, err));
    created->only_portable =
        options->portable_kernels || created->description.compute_capability != HOPPER_CAPABILITY;
    created->is_portable = created->only_portable;
    /* Portable kernels do not wait for the one ahead of them. */
    created->overlap_launches = options->overlap_launches && !created->is_portable;
    TRY_OR_FAIL(tune_load(created, options->tuned, options->tuned_is_optional,
                          &(struct log){options->log, options->log_user}, err));
    TRY_OR_FAIL(
        DRIVER_CALL(driver, err, device_primary_ctx_retain, &created->context, created->gpu));
    *device = created;
    return IMBREX_STATUS_OK;

fail:
    imbrex_tune_table_destroy(created->tuned);
    free(created->tuned_path);
    tensor_map_cache_deinit(&created->maps);
    free(created->functions);
    free(created);
    return status;
}

enum imbrex_status imbrex_device_open(int32_t device_idx,
                                      const struct imbrex_device_options *options,
                                      struct imbrex_device **device, struct imbrex_error *err)
{
    struct driver driver = {0};

    TRY(driver_open(&driver, err));
    enum imbrex_status status = cuda_device_create(&driver, device_idx, options, device, err);
    if (status != IMBREX_STATUS_OK) {
        driver_close(&driver);
    }
    return status;
}

void imbrex_device_close(struct imbrex_device *device)
{
    if (device == NULL) {
        return;
    }
    /* Whoever closes a device that has failed can do nothing about another failure. */
    for (int i = 0; i < 2 * KERNEL_IMAGE_COUNT; i++) {
        CUlibrary library = device->libraries[i % 2][i / 2];
        if (library != NULL) {
            (void)device->driver.library_unload(library);
        }
    }
    (void)device->driver.device_primary_ctx_release(device->gpu);
    tensor_map_cache_deinit(&device->maps);
    driver_close(&device->driver);
    imbrex_tune_table_destroy(device->tuned);
    free(device->tuned_path);
    free(device->functions);
    free(device);
}

void imbrex_device_describe(const struct imbrex_device *device, struct imbrex_device_info *info)
{
    *info = device->description;
}

enum imbrex_status cuda_device_enter(struct imbrex_device *device, struct imbrex_error *err)
{
    return DRIVER_CALL(&device->driver, err, ctx_push_current, device->context);
}

enum imbrex_status cuda_device_leave(struct imbrex_device *device, enum imbrex_status status,
                                     struct imbrex_error *err)
{
    CUcontext left = NULL;
    CUresult result = device->driver.ctx_pop_current(&left);
    return status != IMBREX_STATUS_OK
               ? status
               : driver_check(&device->driver, result, "ctx_pop_current", err);
}

/* Portable images are compiled by the driver, unless they hold machine code for the GPU or the
 * driver's own cache does. */
static enum imbrex_status load_image(struct imbrex_device *device, enum kernel_image image,
                                     bool is_portable, struct imbrex_error *err)
{
    size_t num_bytes = 0;
    const unsigned char *bytes = kernel_image_bytes(image, is_portable, &num_bytes);
    /* The image stays where it is: no need for the driver's copy. */
    CUlibraryOption option = CU_LIBRARY_BINARY_IS_PRESERVED;
    void *option_value = NULL;
    CUlibrary library = NULL;
    if (bytes == NULL) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "kernels %s: made for compute capability %s, which this device does not "
                         "have or was told not to use",
                         kernel_image_name(image), is_portable ? "9.0" : "8.0 and newer");
    }
    int64_t begin_ns = clock_now_ns();
    CUresult result =
        device->driver.library_load_data(&library, bytes, NULL, NULL, 0, &option, &option_value, 1);
    if (result != CUDA_SUCCESS) {
        enum imbrex_status status =
            driver_check(&device->driver, result, kernel_image_name(image), err);
        return status;
    }
    device->libraries[is_portable][image] = library;
    device->description.kernel_load_ns += clock_now_ns() - begin_ns;
    device->description.kernel_image_bytes += (int64_t)num_bytes;
    return IMBREX_STATUS_OK;
}

/* What loading a kernel needs of the tables. */
struct kernel_symbol {
    const char *name;
    enum kernel_image image;
    bool is_portable;
    size_t params_bytes;
    int32_t shared_bytes; /* the most that it is launched with */
};

/* A kernel takes one argument, its params struct. Host and kernel must mean the same one: they
 * would not if they had been built by different toolkits. */
static enum imbrex_status check_params(const struct imbrex_device *device, CUkernel kernel,
                                       const struct kernel_symbol *symbol, struct imbrex_error *err)
{
    const struct driver *driver = &device->driver;
    size_t offset = 0, num_bytes = 0;

    TRY(DRIVER_CALL(driver, err, kernel_get_param_info, kernel, 0, &offset, &num_bytes));
    if (num_bytes != symbol->params_bytes) {
        return error_set(err, IMBREX_STATUS_INTERNAL,
                         "kernel %s: expected params of %zu bytes, found %zu", symbol->name,
                         symbol->params_bytes, num_bytes);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status load_function(struct imbrex_device *device,
                                        const struct kernel_symbol *symbol, CUfunction *loaded,
                                        struct imbrex_error *err)
{
    const struct driver *driver = &device->driver;
    CUkernel kernel = NULL;
    CUfunction function = NULL;

    CUlibrary *library = &device->libraries[symbol->is_portable][symbol->image];
    if (*library == NULL) {
        TRY(load_image(device, symbol->image, symbol->is_portable, err));
    }
    int64_t begin_ns = clock_now_ns();
    TRY(DRIVER_CALL(driver, err, library_get_kernel, &kernel, *library, symbol->name));
    TRY(check_params(device, kernel, symbol, err));
    TRY(DRIVER_CALL(driver, err, kernel_set_attribute,
                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, symbol->shared_bytes, kernel,
                    device->gpu));
    TRY(DRIVER_CALL(driver, err, kernel_get_function, &function, kernel));
    device->description.kernel_load_ns += clock_now_ns() - begin_ns;
    *loaded = function;
    return IMBREX_STATUS_OK;
}

/* Loads where `loaded` holds none yet. */
static enum imbrex_status find_function(struct imbrex_device *device,
                                        const struct kernel_symbol *symbol, CUfunction *loaded,
                                        CUfunction *function, struct imbrex_error *err)
{
    if (*loaded == NULL) {
        /* A thread that captures a stream may be forbidden what loading does; none of it belongs
         * into the graph. */
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        TRY(DRIVER_CALL(&device->driver, err, thread_exchange_stream_capture_mode, &mode));
        enum imbrex_status status = load_function(device, symbol, loaded, err);
        CUresult result = device->driver.thread_exchange_stream_capture_mode(&mode);
        TRY(status);
        TRY(driver_check(&device->driver, result, "thread_exchange_stream_capture_mode", err));
    }
    *function = *loaded;
    return IMBREX_STATUS_OK;
}

enum imbrex_status cuda_device_function(struct imbrex_device *device, int32_t kernel_idx,
                                        CUfunction *function, struct imbrex_error *err)
{
    const struct kernel_variant *variant = kernel_table_at(kernel_idx);
    const struct kernel_symbol symbol = {.name = variant->name,
                                         .image = variant->image,
                                         .is_portable = variant->is_portable,
                                         .params_bytes = variant->params_bytes,
                                         .shared_bytes = variant->shared_bytes};
    return find_function(device, &symbol, &device->functions[kernel_idx], function, err);
}

enum imbrex_status cuda_device_op_function(struct imbrex_device *device, enum op_kernel kernel,
                                           CUfunction *function, struct imbrex_error *err)
{
    const struct op_kernel_row *row = op_kernel_at(kernel);
    const struct kernel_symbol symbol = {
        .name = row->name,
        .image = row->image,
        .is_portable = device->is_portable,
        .params_bytes = row->params_bytes,
        .shared_bytes =
            op_kernel_shared_bytes(kernel, device->is_portable, device->max_shared_bytes)};
    return find_function(device, &symbol, &device->op_functions[device->is_portable][kernel],
                         function, err);
}
