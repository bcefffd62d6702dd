/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench: what measures. Each of its commands is a file of its own and one line below. */
#include "cli/command.h"

static const struct command *const bench_commands[] = {
    &bench_engine, &bench_kv, &bench_model, &bench_ops, NULL,
};

const struct command command_bench = {
    .name = "bench",
    .synopsis = "COMMAND [MODEL] [options]",
    .summary = "measure speed",
    .description = "Measures how fast this machine is with a model, or with the kernels alone.",
    .examples = "  imbrex bench engine --requests 32 --concurrency 4\n"
                "  imbrex bench kv --sessions 32 --policy lru,lfu,predictive\n"
                "  imbrex bench model random:qwen2.5-0.5b -p 512 -n 128 -t 1,2\n"
                "  imbrex bench ops --op gemm_swiglu --m 128,4096\n"
                "  imbrex help bench engine\n",
    .subcommands = bench_commands,
};
