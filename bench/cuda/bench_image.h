/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_BENCH_CUDA_BENCH_IMAGE_H
#define IMBREX_BENCH_CUDA_BENCH_IMAGE_H

/* The fatbin of bench_kernels.cu. Static storage. */
const void *bench_image(void);
/* That of gate_first_kernels.cu. */
const void *bench_gate_first_image(void);
/* The commit that the program was built from, "-dirty" behind it if files had changed. */
const char *bench_commit(void);

#endif
