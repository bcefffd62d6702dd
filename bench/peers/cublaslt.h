/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLASLt as a peer to measure against, opened at run time: neither the library nor the program
 * links it. Only what a product of row-major matrices needs. */
#ifndef IMBREX_BENCH_PEERS_CUBLASLT_H
#define IMBREX_BENCH_PEERS_CUBLASLT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CUBLASLT_MAX_ALGORITHMS 16

struct cublaslt;

/* `path` NULL: libcublasLt.so.13 where the loader finds it, then in /usr/local/cuda. The current
 * context is used. Reported on failure. */
bool cublaslt_open(const char *path, struct cublaslt **lt);
void cublaslt_close(struct cublaslt *lt);
/* 130100 is 13.1.0. */
size_t cublaslt_version(const struct cublaslt *lt);

enum cublaslt_type { CUBLASLT_TYPE_F32 = 0, CUBLASLT_TYPE_BF16 = 14 };

/* D[m, n] = A[m, k] · B[n, k]ᵀ, rows without gaps, fp32 accumulation; and the algorithms that the
 * library's heuristic proposes, its favourite first. */
struct cublaslt_product;
bool cublaslt_product_create(struct cublaslt *lt, int64_t m, int64_t n, int64_t k,
                             enum cublaslt_type input, enum cublaslt_type output,
                             size_t workspace_bytes, struct cublaslt_product **product);
void cublaslt_product_destroy(struct cublaslt_product *product);
int cublaslt_product_num_algorithms(const struct cublaslt_product *product);
/* Asynchronous on the stream; may be captured. */
bool cublaslt_product_run(struct cublaslt_product *product, int algorithm_idx, const void *a,
                          const void *b, void *d, void *workspace, void *stream);

#endif
