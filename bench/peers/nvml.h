/* SPDX-License-Identifier: Apache-2.0 */
/* What the GPU's management library tells while a benchmark runs: clock, power, energy. Opened at
 * run time; where it is missing, everything reads as unknown and nothing else changes. */
#ifndef IMBREX_BENCH_PEERS_NVML_H
#define IMBREX_BENCH_PEERS_NVML_H

#include <stdbool.h>

#define NVML_TEXT_BYTES 96

struct nvml; /* NULL is a library that is not there */

/* `pci_bus_id` as the driver writes it. NULL, without a message, if NVML cannot be used. */
struct nvml *nvml_open(const char *pci_bus_id);
void nvml_close(struct nvml *nvml);

/* False: unknown. */
bool nvml_sm_clock_mhz(struct nvml *nvml, double *clock_mhz);
bool nvml_power_watts(struct nvml *nvml, double *watts);
/* Since the driver was loaded; the counter moves every few tens of milliseconds. */
bool nvml_energy_joules(struct nvml *nvml, double *joules);
bool nvml_temperature_celsius(struct nvml *nvml, double *celsius);
bool nvml_driver_release(struct nvml *nvml, char text[NVML_TEXT_BYTES]);

#endif
