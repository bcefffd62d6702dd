/* SPDX-License-Identifier: Apache-2.0 */
/* What a table of tuned plans is for, and giving a device the one that is. */
#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/symbol.h"
#include "ops/cuda/cuda_device.h"
#include "ops/cuda/tune_table.h"

/* ---- key ---- */

/* NVML's declarations, after its reference manual; 0 is success everywhere. */
enum { NVML_CLOCK_SM = 1 };
#define NVML_CALL_LIST(X)                                                                  \
    X(init, nvmlInit_v2, (void))                                                           \
    X(shutdown, nvmlShutdown, (void))                                                      \
    X(by_pci_bus_id, nvmlDeviceGetHandleByPciBusId_v2, (const char *id, void **device))    \
    X(driver_release, nvmlSystemGetDriverVersion, (char *text, unsigned int num_bytes))    \
    X(power_limit, nvmlDeviceGetPowerManagementLimit, (void *device, unsigned int *limit)) \
    X(max_clock, nvmlDeviceGetMaxClockInfo, (void *device, int type, unsigned int *clock_mhz))

struct nvml_calls {
#define NVML_FIELD(field, symbol, arguments) int(*field) arguments;
    NVML_CALL_LIST(NVML_FIELD)
#undef NVML_FIELD
};

static void ask_nvml(const struct nvml_calls *nvml, const char *pci_bus_id,
                     struct imbrex_tune_key *key)
{
    void *device = NULL;
    unsigned int milliwatts = 0, clock_mhz = 0;

    if (nvml->driver_release(key->driver, (unsigned int)sizeof(key->driver)) != 0) {
        key->driver[0] = '\0';
    }
    if (nvml->by_pci_bus_id(pci_bus_id, &device) != 0) {
        return;
    }
    if (nvml->power_limit(device, &milliwatts) == 0) {
        key->power_limit_watts = (int32_t)((milliwatts + 500) / 1000);
    }
    if (nvml->max_clock(device, NVML_CLOCK_SM, &clock_mhz) == 0 && clock_mhz > 0) {
        key->max_clock_mhz = (int32_t)clock_mhz;
    }
}

/* Leaves what it does not tell as it is. */
static void read_nvml(const char *pci_bus_id, struct imbrex_tune_key *key)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    struct nvml_calls nvml;
    bool is_complete = library != NULL;
#define NVML_FIND(field, symbol, arguments) \
    is_complete = is_complete && symbol_find(library, #symbol, &nvml.field);
    NVML_CALL_LIST(NVML_FIND)
#undef NVML_FIND
    if (is_complete && nvml.init() == 0) {
        ask_nvml(&nvml, pci_bus_id, key);
        (void)nvml.shutdown();
    }
    if (library != NULL) {
        (void)dlclose(library);
    }
}

enum imbrex_status imbrex_tune_key_read(struct imbrex_device *device, struct imbrex_tune_key *key,
                                        struct imbrex_error *err)
{
    static const CUdevice_attribute attributes[] = {
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID};
    enum { NUM_ATTRIBUTES = sizeof(attributes) / sizeof(attributes[0]) };
    const struct imbrex_device_info *description = &device->description;
    struct imbrex_tune_key read = {.num_sms = description->num_sms,
                                   .compute_capability = description->compute_capability,
                                   .driver_version = description->driver_version};
    int values[NUM_ATTRIBUTES] = {0};
    char pci_bus_id[48];

    for (size_t i = 0; i < NUM_ATTRIBUTES; i++) {
        TRY(DRIVER_CALL(&device->driver, err, device_get_attribute, &values[i], attributes[i],
                        device->gpu));
    }
    snprintf(read.gpu, sizeof(read.gpu), "%s", description->name);
    snprintf(read.version, sizeof(read.version), "%s", imbrex_version());
    read.max_clock_mhz = values[0] / 1000;
    snprintf(pci_bus_id, sizeof(pci_bus_id), "%08x:%02x:%02x.0", (unsigned int)values[1],
             (unsigned int)values[2], (unsigned int)values[3]);
    read_nvml(pci_bus_id, &read);
    *key = read;
    return IMBREX_STATUS_OK;
}

/* Letters and digits of the card's name, in lower case, with a dash for what is between. */
void imbrex_tune_file_name(const struct imbrex_tune_key *key, char name[IMBREX_TUNE_NAME_BYTES])
{
    char card[sizeof(key->gpu)];
    size_t length = 0;

    for (const char *c = key->gpu; *c != '\0'; c++) {
        if (isalnum((unsigned char)*c)) {
            card[length++] = (char)tolower((unsigned char)*c);
        } else if (length > 0 && card[length - 1] != '-') {
            card[length++] = '-';
        }
    }
    while (length > 0 && card[length - 1] == '-') {
        length--;
    }
    snprintf(name, IMBREX_TUNE_NAME_BYTES, "%.*s-%dsm-%dmhz-%dw.json", (int)length, card,
             (int)key->num_sms, (int)key->max_clock_mhz, (int)key->power_limit_watts);
}

/* ---- loading ---- */

/* The file that `path` means. NULL in *file: nothing is there, and nobody minds. */
static enum imbrex_status find_file(const struct imbrex_tune_key *key, const char *path,
                                    bool is_optional, char **file, struct imbrex_error *err)
{
    char name[IMBREX_TUNE_NAME_BYTES];
    char *found = NULL;

    if (file_is_folder(path)) {
        imbrex_tune_file_name(key, name);
        TRY(file_join(path, name, &found, err));
    } else {
        found = strdup(path);
        if (found == NULL) {
            return error_out_of_memory(err, "tuned plans", strlen(path) + 1);
        }
    }
    if (is_optional && !file_exists(found)) {
        free(found);
        found = NULL;
    }
    *file = found;
    return IMBREX_STATUS_OK;
}

enum imbrex_status tune_load(struct imbrex_device *device, const char *path, bool is_optional,
                             const struct log *log, struct imbrex_error *err)
{
    struct imbrex_tune_key key;
    struct imbrex_tune_table *table = NULL;
    struct imbrex_error reason = {.message = ""};
    char *file = NULL;

    if (path == NULL || (is_optional && !file_exists(path))) {
        return IMBREX_STATUS_OK;
    }
    TRY(imbrex_tune_key_read(device, &key, err));
    TRY(find_file(&key, path, is_optional, &file, err));
    if (file == NULL) {
        return IMBREX_STATUS_OK;
    }
    enum imbrex_status status = imbrex_tune_table_open(file, &key, &table, &reason);
    if (status == IMBREX_STATUS_OK) {
        device->tuned = table;
        device->tuned_path = file;
        device->description.tuned = file;
        device->description.num_tuned = tune_table_num_faster(table);
        return IMBREX_STATUS_OK;
    }
    free(file);
    if (status == IMBREX_STATUS_UNSUPPORTED ||
        (is_optional && status != IMBREX_STATUS_OUT_OF_MEMORY)) {
        log_write(log, IMBREX_LOG_LEVEL_WARNING, "not used: %s; imbrex tune makes new ones",
                  reason.message);
        return IMBREX_STATUS_OK;
    }
    return error_set(err, status, "%s", reason.message);
}
