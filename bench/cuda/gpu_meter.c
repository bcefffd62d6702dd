/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/gpu_meter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench/cuda/gpu.h"
#include "bench/peers/nvml.h"
#include "cli/command.h"
#include "cli/output.h"
#include "imbrex_ops.h"

#define READ_BYTES (UINT64_C(4) << 30)
/* The fastest of 1 to 64 blocks of 256 to 1024 threads on an H200. */
#define READ_BLOCKS_PER_SM 64
#define READ_THREADS 1024
/* Source: the data sheet of the H100 and H200 SXM, dense bf16. */
#define NOMINAL_FLOPS 989.4e12
#define SAMPLE_NS 20000000

struct gpu_meter {
    struct gpu gpu;
    struct nvml *nvml;
    struct gpu_description description;
    CUdeviceptr memory; /* READ_BYTES, and a word for the sum behind them */
    CUevent begin, end;
    bool has_joules;
    double joules;    /* of gpu_meter_begin */
    int64_t begin_ns; /* likewise */
    double clock_sum;
    int num_clocks;
    int64_t sampled_ns;
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int describe(struct gpu_meter *meter, int32_t device_idx)
{
    struct imbrex_device *device = NULL;
    struct imbrex_device_info opened;
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    if (imbrex_device_open(device_idx, NULL, &device, &err) != IMBREX_STATUS_OK) {
        struct imbrex_error named = err;
        (void)snprintf(named.message, sizeof(named.message), "--device cuda:%d: %.*s",
                       (int)device_idx, (int)sizeof(named.message) - 32, err.message);
        return output_library_error(&named);
    }
    imbrex_device_describe(device, &opened);
    imbrex_device_close(device);
    meter->description = (struct gpu_description){
        .device_idx = device_idx, .num_sms = opened.num_sms, .nominal_flops = NOMINAL_FLOPS};
    snprintf(meter->description.name, sizeof(meter->description.name), "%s", opened.name);
    return EXIT_CODE_OK;
}

static bool prepare(struct gpu_meter *meter)
{
    struct gpu *gpu = &meter->gpu;
    char release[NVML_TEXT_BYTES] = "";

    meter->nvml = nvml_open(gpu->pci_bus_id);
    (void)nvml_driver_release(meter->nvml, release);
    snprintf(meter->description.driver, sizeof(meter->description.driver), "%s", release);
    return GPU_CALL(gpu, mem_alloc, &meter->memory, READ_BYTES + sizeof(uint32_t)) &&
           GPU_CALL(gpu, memset_d8_async, meter->memory, 0x5a, READ_BYTES + sizeof(uint32_t),
                    gpu->stream) &&
           GPU_CALL(gpu, stream_synchronize, gpu->stream) &&
           GPU_CALL(gpu, event_create, &meter->begin, CU_EVENT_DEFAULT) &&
           GPU_CALL(gpu, event_create, &meter->end, CU_EVENT_DEFAULT);
}

int gpu_meter_open(int32_t device_idx, struct gpu_meter **meter)
{
    struct gpu_meter *opened = calloc(1, sizeof(*opened));

    if (opened == NULL) {
        return output_out_of_memory();
    }
    int exit_code = describe(opened, device_idx);
    if (exit_code == EXIT_CODE_OK && (!gpu_open(device_idx, &opened->gpu) || !prepare(opened))) {
        exit_code = EXIT_CODE_FAILURE;
    }
    if (exit_code != EXIT_CODE_OK) {
        gpu_meter_close(opened);
        return exit_code;
    }
    *meter = opened;
    return EXIT_CODE_OK;
}

void gpu_meter_close(struct gpu_meter *meter)
{
    if (meter == NULL) {
        return;
    }
    if (meter->begin != NULL) {
        (void)meter->gpu.event_destroy(meter->begin);
    }
    if (meter->end != NULL) {
        (void)meter->gpu.event_destroy(meter->end);
    }
    if (meter->memory != 0) {
        (void)meter->gpu.mem_free(meter->memory);
    }
    nvml_close(meter->nvml);
    gpu_close(&meter->gpu);
    free(meter);
}

void gpu_meter_describe(const struct gpu_meter *meter, struct gpu_description *description)
{
    *description = meter->description;
}

double gpu_meter_read_rate(struct gpu_meter *meter)
{
    struct gpu *gpu = &meter->gpu;
    CUdeviceptr sum = meter->memory + READ_BYTES;
    uint64_t count = READ_BYTES / 16;
    void *arguments[] = {&meter->memory, &count, &sum};
    float ms = 0.0f;

    bool is_ok =
        GPU_CALL(gpu, ctx_set_current, gpu->context) &&
        GPU_CALL(gpu, event_record, meter->begin, gpu->stream) &&
        gpu_launch(gpu, "bench_read", (int64_t)READ_BLOCKS_PER_SM * meter->description.num_sms,
                   READ_THREADS, arguments) &&
        GPU_CALL(gpu, event_record, meter->end, gpu->stream) &&
        GPU_CALL(gpu, event_synchronize, meter->end) &&
        GPU_CALL(gpu, event_elapsed_time, &ms, meter->begin, meter->end);
    return is_ok && ms > 0.0f ? (double)READ_BYTES / (ms * 1e-3) : 0.0;
}

size_t gpu_meter_free_bytes(struct gpu_meter *meter)
{
    size_t free_bytes = 0, all_bytes = 0;
    struct gpu *gpu = &meter->gpu;

    return GPU_CALL(gpu, ctx_set_current, gpu->context) &&
                   GPU_CALL(gpu, mem_get_info, &free_bytes, &all_bytes)
               ? free_bytes
               : 0;
}

void gpu_meter_begin(struct gpu_meter *meter)
{
    meter->clock_sum = 0.0;
    meter->num_clocks = 0;
    meter->sampled_ns = 0;
    meter->begin_ns = now_ns();
    meter->has_joules = nvml_energy_joules(meter->nvml, &meter->joules);
}

void gpu_meter_sample(struct gpu_meter *meter)
{
    double found = 0.0;
    int64_t now = now_ns();

    if (now - meter->sampled_ns < SAMPLE_NS) {
        return;
    }
    meter->sampled_ns = now;
    if (nvml_sm_clock_mhz(meter->nvml, &found)) {
        meter->clock_sum += found;
        meter->num_clocks++;
    }
}

void gpu_meter_end(struct gpu_meter *meter, struct gpu_reading *reading)
{
    double joules = 0.0, seconds = (double)(now_ns() - meter->begin_ns) * 1e-9;

    meter->has_joules = nvml_energy_joules(meter->nvml, &joules) && meter->has_joules;
    reading->joules = meter->has_joules ? joules - meter->joules : -1.0;
    reading->sm_clock_mhz = meter->num_clocks > 0 ? meter->clock_sum / meter->num_clocks : -1.0;
    reading->watts = meter->has_joules ? reading->joules / seconds : -1.0;
}
