# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that bench/paper.py measures beside imbrex: the fused product as a page of Triton
has it, and the activation that frameworks run behind a merged GEMM."""
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# (block_m, block_n, block_k, num_warps, num_stages); block_n counts pairs of gate and up.
FUSED_CONFIGS = [
    (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 5), (64, 64, 128, 4, 3),
]
GROUP_M = 8


@triton.jit
def _fused_kernel(a, gate, up, d, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """One tile: both products in two accumulators, then the activation."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    in_group = GROUP * tiles_n
    first_m = tile // in_group * GROUP
    rows = min(tiles_m - first_m, GROUP)
    row = (first_m + tile % in_group % rows) * BLOCK_M
    column = tile % in_group // rows * BLOCK_N
    gate_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, k, BLOCK_K):
        a_tile = a.load([row, begin])
        gate_sum = tl.dot(a_tile, gate.load([column, begin]).T, gate_sum)
        up_sum = tl.dot(a_tile, up.load([column, begin]).T, up_sum)
    result = gate_sum * tl.sigmoid(gate_sum) * up_sum
    d.store([row, column], result.to(tl.bfloat16))


def fused(x, gate, up, config, d=None):
    """silu(x @ gate.T) * (x @ up.T); bf16, contiguous."""
    block_m, block_n, block_k, num_warps, num_stages = config
    m, k = x.shape
    n = gate.shape[0]
    if d is None:
        d = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    _fused_kernel[grid](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(gate, [block_n, block_k]),
        TensorDescriptor.from_tensor(up, [block_n, block_k]),
        TensorDescriptor.from_tensor(d, [block_m, block_n]), m, n, k, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP_M, num_warps=num_warps,
        num_stages=num_stages)
    return d


@triton.jit
def _activation_kernel(products, d, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    gate = tl.load(products + row * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(products + row * 2 * n + n + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(d + row * n + column, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=inside)


def activation(products):
    """[m, 2 n], gate before up, to [m, n]: fp32 inside, one rounding."""
    m, n = products.shape[0], products.shape[1] // 2
    d = torch.empty((m, n), dtype=products.dtype, device=products.device)
    block = 1024
    _activation_kernel[(m, triton.cdiv(n, block))](products, d, n, BLOCK=block, num_warps=4)
    return d
