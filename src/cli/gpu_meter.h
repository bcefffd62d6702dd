/* SPDX-License-Identifier: Apache-2.0 */
/* What a GPU can do at most, and what it says of itself while a model runs on it. The kernels and
 * NVML's door lie in bench/cuda and bench/peers, which are linked where there is a CUDA toolkit. */
#ifndef IMBREX_CLI_GPU_METER_H
#define IMBREX_CLI_GPU_METER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GPU_METER_TEXT_BYTES 128

struct gpu_meter;

struct gpu_description {
    char name[GPU_METER_TEXT_BYTES];
    char driver[GPU_METER_TEXT_BYTES]; /* its release, or "" */
    int32_t device_idx, num_sms;
    double nominal_flops; /* dense bf16, by the data sheet of Hopper's SXM modules */
};

/* From gpu_meter_begin to gpu_meter_end; a number below 0 is not known. */
struct gpu_reading {
    double joules, watts; /* watts: NVML's own are means over a second and more */
    double sm_clock_mhz;  /* mean of what gpu_meter_sample saw */
};

#if IMBREX_CUDA
/* Takes some GiB of the GPU's memory, to read. Returns an exit code. */
int gpu_meter_open(int32_t device_idx, struct gpu_meter **meter);
/* NULL does nothing. */
void gpu_meter_close(struct gpu_meter *meter);
void gpu_meter_describe(const struct gpu_meter *meter, struct gpu_description *description);
/* Bytes a second of a kernel that only reads, several times what the L2 cache holds: one pass of
 * about a millisecond. 0: it failed, and that was reported. */
double gpu_meter_read_rate(struct gpu_meter *meter);
/* Bytes that nobody has taken. */
size_t gpu_meter_free_bytes(struct gpu_meter *meter);

/* Around work of a second or so. In between, sample is called now and then: it looks at the clock
 * at most every 20 ms. The energy counter moves every few tens of milliseconds. */
void gpu_meter_begin(struct gpu_meter *meter);
void gpu_meter_sample(struct gpu_meter *meter);
void gpu_meter_end(struct gpu_meter *meter, struct gpu_reading *reading);
#endif

#endif
