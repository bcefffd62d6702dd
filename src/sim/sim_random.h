/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers that look random and are the same everywhere: the finaliser of splitmix64 (Steele, Lea,
 * Flood, OOPSLA 2014), as a generator and as a hash. */
#ifndef IMBREX_SIM_SIM_RANDOM_H
#define IMBREX_SIM_SIM_RANDOM_H

#include <stdint.h>

static inline uint64_t sim_mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

/* In [0, 1). */
static inline double sim_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return (double)(sim_mix(*state) >> 11) * 0x1p-53;
}

#endif
