/* SPDX-License-Identifier: Apache-2.0 */
/* Looks the driver's calls up and says in plain words why they cannot be used. */
#include "ops/cuda/driver.h"

#include <dlfcn.h>
#include <string.h>

#include "base/symbol.h"
#include "ops/device.h"

#define DRIVER_LIBRARY "libcuda.so.1"

#define DRIVER_TEXT_OF(text) #text
#define DRIVER_TEXT(call) DRIVER_TEXT_OF(call)

struct driver_call {
    const char *symbol; /* as it stands in libcuda */
    size_t offset;      /* into struct driver */
};

static const struct driver_call driver_calls[] = {
#define DRIVER_ROW(field, call) {DRIVER_TEXT(call), offsetof(struct driver, field)},
    DRIVER_CALL_LIST(DRIVER_ROW)
#undef DRIVER_ROW
};

enum imbrex_status driver_check(const struct driver *driver, CUresult result, const char *call,
                                struct imbrex_error *err)
{
    if (result == CUDA_SUCCESS) {
        return IMBREX_STATUS_OK;
    }
    const char *name = NULL, *text = NULL;
    if (driver->get_error_name(result, &name) != CUDA_SUCCESS || name == NULL) {
        name = "unknown error";
    }
    if (driver->get_error_string(result, &text) != CUDA_SUCCESS || text == NULL) {
        text = "the driver has no text for it";
    }
    enum imbrex_status status =
        result == CUDA_ERROR_OUT_OF_MEMORY ? IMBREX_STATUS_OUT_OF_MEMORY : IMBREX_STATUS_DEVICE;
    return error_set(err, status, "CUDA: %s: %s (%d): %s", call, name, (int)result, text);
}

enum imbrex_status driver_init(struct driver *driver, struct imbrex_error *err)
{
    TRY(DRIVER_CALL(driver, err, driver_get_version, &driver->version));
    if (driver->version < DRIVER_MIN_VERSION) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "CUDA: expected a driver for CUDA %d.%d or newer (release %d or later), "
                         "found one for CUDA %d.%d",
                         DRIVER_MIN_VERSION / 1000, DRIVER_MIN_VERSION % 1000 / 10,
                         DRIVER_MIN_RELEASE, driver->version / 1000, driver->version % 1000 / 10);
    }
    CUresult result = driver->init(0);
    if (result == CUDA_ERROR_NO_DEVICE) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "CUDA: there is a driver, but it finds no GPU");
    }
    return driver_check(driver, result, "init", err);
}

enum imbrex_status driver_open(struct driver *driver, struct imbrex_error *err)
{
    struct driver opened = {.library = dlopen(DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL)};
    enum imbrex_status status;

    if (opened.library == NULL) {
        const char *reason = dlerror();
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "CUDA: no driver: expected one of release %d or later, found: %s",
                         DRIVER_MIN_RELEASE,
                         reason != NULL ? reason : DRIVER_LIBRARY " cannot be opened");
    }
    for (size_t i = 0; i < sizeof(driver_calls) / sizeof(driver_calls[0]); i++) {
        if (!symbol_find(opened.library, driver_calls[i].symbol,
                         (unsigned char *)&opened + driver_calls[i].offset)) {
            status = error_set(err, IMBREX_STATUS_UNSUPPORTED,
                               "CUDA: " DRIVER_LIBRARY " has no %s: expected the driver of release "
                               "%d or later",
                               driver_calls[i].symbol, DRIVER_MIN_RELEASE);
            goto fail;
        }
    }
    TRY_OR_FAIL(driver_init(&opened, err));
    *driver = opened;
    return IMBREX_STATUS_OK;

fail:
    driver_close(&opened);
    return status;
}

bool device_cuda_is_present(void)
{
    void *library = dlopen(DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    __typeof__(cuInit) *init = NULL;
    bool is_present =
        library != NULL && symbol_find(library, "cuInit", &init) && init(0) != CUDA_ERROR_NO_DEVICE;

    if (library != NULL) {
        dlclose(library);
    }
    return is_present;
}

void driver_close(struct driver *driver)
{
    if (driver->library != NULL) {
        dlclose(driver->library);
    }
    *driver = (struct driver){0};
}
