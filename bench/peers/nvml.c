/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/peers/nvml.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/symbol.h"

/* Declarations of our own, after NVML's reference manual; 0 is success everywhere. */
enum { NVML_CLOCK_SM_ID = 1, NVML_TEMPERATURE_GPU_ID = 0 };

#define NVML_CALL_LIST(X)                                                                       \
    X(init, nvmlInit_v2, (void))                                                                \
    X(shutdown, nvmlShutdown, (void))                                                           \
    X(by_pci_bus_id, nvmlDeviceGetHandleByPciBusId_v2, (const char *id, void **device))         \
    X(clock, nvmlDeviceGetClockInfo, (void *device, int type, unsigned int *clock_mhz))         \
    X(power, nvmlDeviceGetPowerUsage, (void *device, unsigned int *milliwatts))                 \
    X(energy, nvmlDeviceGetTotalEnergyConsumption,                                              \
      (void *device, unsigned long long *millijoules))                                          \
    X(temperature, nvmlDeviceGetTemperature, (void *device, int sensor, unsigned int *celsius)) \
    X(driver, nvmlSystemGetDriverVersion, (char *text, unsigned int num_bytes))

struct nvml {
    void *library, *device;
    bool is_initialized;
#define NVML_FIELD(field, symbol, arguments) int(*field) arguments;
    NVML_CALL_LIST(NVML_FIELD)
#undef NVML_FIELD
};

struct nvml *nvml_open(const char *pci_bus_id)
{
    struct nvml *nvml = calloc(1, sizeof(*nvml));
    if (nvml == NULL) {
        return NULL;
    }
    nvml->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    bool is_complete = nvml->library != NULL;
#define NVML_FIND(field, symbol, arguments) \
    is_complete = is_complete && symbol_find(nvml->library, #symbol, &nvml->field);
    NVML_CALL_LIST(NVML_FIND)
#undef NVML_FIND
    nvml->is_initialized = is_complete && nvml->init() == 0;
    if (!nvml->is_initialized || nvml->by_pci_bus_id(pci_bus_id, &nvml->device) != 0) {
        nvml_close(nvml);
        return NULL;
    }
    return nvml;
}

void nvml_close(struct nvml *nvml)
{
    if (nvml == NULL) {
        return;
    }
    if (nvml->is_initialized) {
        (void)nvml->shutdown();
    }
    if (nvml->library != NULL) {
        dlclose(nvml->library);
    }
    free(nvml);
}

bool nvml_sm_clock_mhz(struct nvml *nvml, double *clock_mhz)
{
    unsigned int found = 0;
    if (nvml == NULL || nvml->clock(nvml->device, NVML_CLOCK_SM_ID, &found) != 0) {
        return false;
    }
    *clock_mhz = found;
    return true;
}

bool nvml_power_watts(struct nvml *nvml, double *watts)
{
    unsigned int milliwatts = 0;
    if (nvml == NULL || nvml->power(nvml->device, &milliwatts) != 0) {
        return false;
    }
    *watts = milliwatts * 1e-3;
    return true;
}

bool nvml_energy_joules(struct nvml *nvml, double *joules)
{
    unsigned long long millijoules = 0;
    if (nvml == NULL || nvml->energy(nvml->device, &millijoules) != 0) {
        return false;
    }
    *joules = (double)millijoules * 1e-3;
    return true;
}

bool nvml_temperature_celsius(struct nvml *nvml, double *celsius)
{
    unsigned int found = 0;
    if (nvml == NULL || nvml->temperature(nvml->device, NVML_TEMPERATURE_GPU_ID, &found) != 0) {
        return false;
    }
    *celsius = found;
    return true;
}

bool nvml_driver_release(struct nvml *nvml, char text[NVML_TEXT_BYTES])
{
    return nvml != NULL && nvml->driver(text, NVML_TEXT_BYTES) == 0;
}
