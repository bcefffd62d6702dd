/* SPDX-License-Identifier: Apache-2.0 */
/* How arrays of vectors become registers, for the kernels of every instruction set. */
#ifndef IMBREX_OPS_CPU_VEC_UNROLL_H
#define IMBREX_OPS_CPU_VEC_UNROLL_H

#define VEC_INLINE static inline __attribute__((always_inline))

/* Unrolls the next loop, whose trip count is a constant of at most 24, so that arrays of vectors
 * become registers. Not under sanitizers, whose checks would be unrolled too: a file of
 * tiles took half a minute to compile. */
#if defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define VEC_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define VEC_UNROLL _Pragma("clang loop unroll(full)")
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define VEC_UNROLL _Pragma("GCC unroll 1")
#else
#define VEC_UNROLL _Pragma("GCC unroll 24")
#endif

#endif
