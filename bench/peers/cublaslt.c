/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLASLt speaks of column-major matrices. A row-major D[m, n] is its transpose in column-major,
 * so Dᵀ[n, m] = B[n, k] · Aᵀ[k, m]: B comes first and is transposed, since its rows are contiguous.
 * */
#include "bench/peers/cublaslt.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/symbol.h"
#include "cli/output.h"

/* Declarations of our own, after cublasLt.h of CUDA 13: the structs are opaque blocks of that size.
 * */
typedef int cublaslt_status; /* 0: success */
struct cublaslt_algorithm {
    uint64_t words[8];
};
struct cublaslt_proposal {
    struct cublaslt_algorithm algorithm;
    size_t workspace_bytes;
    cublaslt_status status;
    float num_waves;
    int reserved[4];
};

enum {
    CUBLASLT_COMPUTE_32F = 68,
    CUBLASLT_DESC_TRANSPOSE_A = 3,
    CUBLASLT_PREFERENCE_WORKSPACE_BYTES = 1,
    CUBLASLT_TRANSPOSE = 1,
};

/* X(field, symbol, result, arguments) */
#define CUBLASLT_CALL_LIST(X)                                                                     \
    X(create, cublasLtCreate, (void **handle))                                                    \
    X(destroy, cublasLtDestroy, (void *handle))                                                   \
    X(desc_create, cublasLtMatmulDescCreate, (void **desc, int compute_type, int scale_type))     \
    X(desc_destroy, cublasLtMatmulDescDestroy, (void *desc))                                      \
    X(desc_set, cublasLtMatmulDescSetAttribute,                                                   \
      (void *desc, int attribute, const void *value, size_t num_bytes))                           \
    X(layout_create, cublasLtMatrixLayoutCreate,                                                  \
      (void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride))                 \
    X(layout_destroy, cublasLtMatrixLayoutDestroy, (void *layout))                                \
    X(preference_create, cublasLtMatmulPreferenceCreate, (void **preference))                     \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy, (void *preference))                    \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute,                                       \
      (void *preference, int attribute, const void *value, size_t num_bytes))                     \
    X(propose, cublasLtMatmulAlgoGetHeuristic,                                                    \
      (void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,            \
       int max_proposals, struct cublaslt_proposal *proposals, int *num_proposals))               \
    X(matmul, cublasLtMatmul,                                                                     \
      (void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b, \
       void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,  \
       const struct cublaslt_algorithm *algorithm, void *workspace, size_t workspace_bytes,       \
       void *stream))

struct cublaslt {
    void *library;
    void *handle;
    size_t (*get_version)(void);
#define CUBLASLT_FIELD(field, symbol, arguments) cublaslt_status(*field) arguments;
    CUBLASLT_CALL_LIST(CUBLASLT_FIELD)
#undef CUBLASLT_FIELD
};

struct cublaslt_product {
    struct cublaslt *lt;
    void *desc, *a, *b, *d;
    size_t workspace_bytes;
    struct cublaslt_proposal proposals[CUBLASLT_MAX_ALGORITHMS];
    int num_proposals;
};

static bool check(cublaslt_status status, const char *call)
{
    if (status != 0) {
        output_error("%s: status %d", call, status);
    }
    return status == 0;
}

static bool find_symbol(void *library, const char *name, void *function)
{
    bool is_found = symbol_find(library, name, function);
    if (!is_found) {
        output_error("cublasLt: no %s in the library", name);
    }
    return is_found;
}

bool cublaslt_open(const char *path, struct cublaslt **lt)
{
    static const char *const usual_paths[] = {
        "libcublasLt.so.13",
        "/usr/local/cuda/lib64/libcublasLt.so.13",
    };
    struct cublaslt *opened = calloc(1, sizeof(*opened));
    if (opened == NULL) {
        (void)output_out_of_memory();
        return false;
    }
    for (size_t i = 0; path == NULL && opened->library == NULL && i < 2; i++) {
        opened->library = dlopen(usual_paths[i], RTLD_NOW | RTLD_LOCAL);
    }
    if (path != NULL) {
        opened->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (opened->library == NULL) {
        output_error("cublasLt: %s", dlerror());
        free(opened);
        return false;
    }
    bool is_complete = find_symbol(opened->library, "cublasLtGetVersion", &opened->get_version);
#define CUBLASLT_FIND(field, symbol, arguments) \
    is_complete = is_complete && find_symbol(opened->library, #symbol, &opened->field);
    CUBLASLT_CALL_LIST(CUBLASLT_FIND)
#undef CUBLASLT_FIND
    if (!is_complete || !check(opened->create(&opened->handle), "cublasLtCreate")) {
        cublaslt_close(opened);
        return false;
    }
    *lt = opened;
    return true;
}

void cublaslt_close(struct cublaslt *lt)
{
    if (lt == NULL) {
        return;
    }
    if (lt->handle != NULL) {
        (void)lt->destroy(lt->handle);
    }
    dlclose(lt->library);
    free(lt);
}

size_t cublaslt_version(const struct cublaslt *lt)
{
    return lt->get_version();
}

static bool propose(struct cublaslt_product *product)
{
    struct cublaslt *lt = product->lt;
    void *preference = NULL;
    if (!check(lt->preference_create(&preference), "cublasLtMatmulPreferenceCreate")) {
        return false;
    }
    bool is_ok =
        check(lt->preference_set(preference, CUBLASLT_PREFERENCE_WORKSPACE_BYTES,
                                 &product->workspace_bytes, sizeof(product->workspace_bytes)),
              "cublasLtMatmulPreferenceSetAttribute") &&
        check(lt->propose(lt->handle, product->desc, product->b, product->a, product->d, product->d,
                          preference, CUBLASLT_MAX_ALGORITHMS, product->proposals,
                          &product->num_proposals),
              "cublasLtMatmulAlgoGetHeuristic");
    (void)lt->preference_destroy(preference);
    if (is_ok && product->num_proposals == 0) {
        output_error("cublasLt: no algorithm for the product");
        return false;
    }
    return is_ok;
}

bool cublaslt_product_create(struct cublaslt *lt, int64_t m, int64_t n, int64_t k,
                             enum cublaslt_type input, enum cublaslt_type output,
                             size_t workspace_bytes, struct cublaslt_product **product)
{
    static const int32_t transpose = CUBLASLT_TRANSPOSE;
    struct cublaslt_product *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        (void)output_out_of_memory();
        return false;
    }
    created->lt = lt;
    created->workspace_bytes = workspace_bytes;
    bool is_ok =
        check(lt->desc_create(&created->desc, CUBLASLT_COMPUTE_32F, CUBLASLT_TYPE_F32),
              "cublasLtMatmulDescCreate") &&
        check(lt->desc_set(created->desc, CUBLASLT_DESC_TRANSPOSE_A, &transpose, sizeof(transpose)),
              "cublasLtMatmulDescSetAttribute") &&
        check(lt->layout_create(&created->b, (int)input, (uint64_t)k, (uint64_t)n, k),
              "cublasLtMatrixLayoutCreate") &&
        check(lt->layout_create(&created->a, (int)input, (uint64_t)k, (uint64_t)m, k),
              "cublasLtMatrixLayoutCreate") &&
        check(lt->layout_create(&created->d, (int)output, (uint64_t)n, (uint64_t)m, n),
              "cublasLtMatrixLayoutCreate") &&
        propose(created);
    if (!is_ok) {
        cublaslt_product_destroy(created);
        return false;
    }
    *product = created;
    return true;
}

void cublaslt_product_destroy(struct cublaslt_product *product)
{
    if (product == NULL) {
        return;
    }
    struct cublaslt *lt = product->lt;
    void *const layouts[] = {product->a, product->b, product->d};
    for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
        if (layouts[i] != NULL) {
            (void)lt->layout_destroy(layouts[i]);
        }
    }
    if (product->desc != NULL) {
        (void)lt->desc_destroy(product->desc);
    }
    free(product);
}

int cublaslt_product_num_algorithms(const struct cublaslt_product *product)
{
    return product->num_proposals;
}

bool cublaslt_product_run(struct cublaslt_product *product, int algorithm_idx, const void *a,
                          const void *b, void *d, void *workspace, void *stream)
{
    static const float one = 1.0f, zero = 0.0f;
    struct cublaslt *lt = product->lt;
    return check(lt->matmul(lt->handle, product->desc, &one, b, product->b, a, product->a, &zero, d,
                            product->d, d, product->d, &product->proposals[algorithm_idx].algorithm,
                            workspace, product->workspace_bytes, stream),
                 "cublasLtMatmul");
}
