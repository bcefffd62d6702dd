/* SPDX-License-Identifier: Apache-2.0 */
/* From the shared options to what the library takes. */
#include "cli/engine_settings.h"

#include <string.h>

#include "cli/command.h"
#include "cli/output.h"

const struct option_choice engine_cpu_choices[] = {
    {"auto", IMBREX_CPU_ALL},
    {"avx2", IMBREX_CPU_AVX2},
    {"ref", 0},
    {NULL, 0},
};

struct imbrex_engine_options engine_settings_to_options(const struct engine_settings *settings,
                                                        int32_t context_size)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();

    options.num_threads = (int32_t)settings->threads.value;
    options.cpu_features = (uint32_t)settings->cpu.value;
    options.context_size =
        settings->ctx_size.given ? (int32_t)settings->ctx_size.value : context_size;
    return options;
}

int engine_settings_check(const struct engine_settings *settings,
                          const struct imbrex_memory_plan *plan)
{
    if (settings->cpu.value == IMBREX_CPU_AVX2 && strcmp(plan->kernels, "avx2") != 0) {
        output_error("--cpu avx2: expected a machine with AVX2, FMA and F16C, found one whose best "
                     "kernels are \"%s\"",
                     plan->kernels);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}
