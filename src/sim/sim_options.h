/* SPDX-License-Identifier: Apache-2.0 */
/* What imbrex_kv_sim_run is asked for, before anything is read. */
#ifndef IMBREX_SIM_SIM_OPTIONS_H
#define IMBREX_SIM_SIM_OPTIONS_H

#include "base/status.h"
#include "imbrex_kv.h"

/* INVALID_ARGUMENT: names the option, what was expected and what was found. Names of policies are
 * not looked up. */
enum imbrex_status sim_options_check(const struct imbrex_kv_sim_options *options,
                                     struct imbrex_error *err);

/* That each capacity and tier holds a block of so many tokens. */
enum imbrex_status sim_options_check_block(const struct imbrex_kv_sim_options *options,
                                           int32_t block_size, struct imbrex_error *err);

#endif
