/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a step as ranges that NVIDIA's profilers show (NVTX). */
#ifndef IMBREX_CLI_NVTX_H
#define IMBREX_CLI_NVTX_H

#include <stdbool.h>

#include "imbrex.h"

/* Sets the options' range functions; false in a program built without the toolkit. */
bool nvtx_open(struct imbrex_engine_options *options);

#endif
