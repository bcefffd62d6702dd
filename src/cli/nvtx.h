/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a step as ranges that NVIDIA's profilers show (NVTX). */
#ifndef IMBREX_CLI_NVTX_H
#define IMBREX_CLI_NVTX_H

#include "imbrex.h"

/* Sets the options' range functions. Does nothing in a program built without the toolkit. */
void nvtx_open(struct imbrex_engine_options *options);

#endif
