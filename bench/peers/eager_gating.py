#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How many results of imbrex_gemm_swiglu, rounded as unfused, have the bits of eager PyTorch: two
linear layers in bf16 (cuBLAS), then one operation after the other.

usage: eager_gating.py LIBIMBREX_SO [TOKENS HIDDEN_SIZE INTERMEDIATE_SIZE]

Also the activation alone, on every bf16 gate that is a number, where no order of sums differs."""
import ctypes
import sys

import torch
import torch.nn.functional as F

SILU, GELU, GELU_TANH, RELU = range(4)
MATCH_UNFUSED = 1


class Gating(ctypes.Structure):
    _fields_ = [("activation", ctypes.c_int), ("alpha", ctypes.c_float), ("limit", ctypes.c_float),
                ("up_offset", ctypes.c_float)]


class GemmSwiglu(ctypes.Structure):
    _fields_ = ([(name, ctypes.c_void_p) for name in ("a", "gate", "up", "d")] +
                [(name, ctypes.c_int64)
                 for name in ("a_stride", "gate_stride", "up_stride", "d_stride")] +
                [(name, ctypes.c_int32)
                 for name in ("num_tokens", "hidden_size", "intermediate_size")] +
                [("weights_settled", ctypes.c_bool), ("interleave_rows", ctypes.c_int32),
                 ("gate_bias", ctypes.c_void_p), ("up_bias", ctypes.c_void_p),
                 ("interleave_biases", ctypes.c_int32), ("rounding", ctypes.c_int),
                 ("gating", Gating)])


class GatedActivation(ctypes.Structure):
    _fields_ = ([(name, ctypes.c_void_p) for name in ("gate", "up", "d")] +
                [(name, ctypes.c_int64) for name in ("gate_stride", "up_stride", "d_stride")] +
                [("num_tokens", ctypes.c_int32), ("intermediate_size", ctypes.c_int32),
                 ("rounding", ctypes.c_int), ("gating", Gating)])


class Error(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int), ("message", ctypes.c_char * 512)]


CASES = [("silu", Gating(SILU, 0, 0, 0)), ("gelu", Gating(GELU, 0, 0, 0)),
         ("gelu-tanh", Gating(GELU_TANH, 0, 0, 0)), ("relu", Gating(RELU, 0, 0, 0)),
         ("gpt-oss", Gating(SILU, 1.702, 7.0, 1.0))]


def eager(gating, gate, up):
    if gating.limit != 0:
        gate = gate.clamp(max=gating.limit)
        up = up.clamp(min=-gating.limit, max=gating.limit)
    if gating.activation == SILU and gating.alpha != 0:
        gate = gate * torch.sigmoid(gating.alpha * gate)
    elif gating.activation == SILU:
        gate = F.silu(gate)
    elif gating.activation == RELU:
        gate = F.relu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if gating.activation == GELU_TANH else "none")
    return gate * (up + gating.up_offset if gating.up_offset != 0 else up)


class Imbrex:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.device = ctypes.c_void_p()
        self.call("imbrex_device_open", 0, None, ctypes.byref(self.device))

    def call(self, name, *arguments):
        error = Error()
        if getattr(self.library, name)(*arguments, ctypes.byref(error)) != 0:
            sys.exit(f"{name}: {error.message.decode()}")

    def stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def gemm_swiglu(self, gating, x, gate, up, interleave, biases):
        tokens, hidden_size = x.shape
        d = torch.empty(tokens, gate.shape[0], dtype=torch.bfloat16, device="cuda")
        params = GemmSwiglu(a=x.data_ptr(), gate=gate.data_ptr(), up=up.data_ptr(),
                            d=d.data_ptr(), num_tokens=tokens, hidden_size=hidden_size,
                            intermediate_size=gate.shape[0], interleave_rows=interleave,
                            gate_bias=biases[0].data_ptr(), up_bias=biases[1].data_ptr(),
                            rounding=MATCH_UNFUSED, gating=gating)
        self.call("imbrex_gemm_swiglu", self.device, ctypes.byref(params), None, self.stream())
        return d

    def gated_activation(self, gating, gate, up):
        d = torch.empty_like(gate)
        params = GatedActivation(gate=gate.data_ptr(), up=up.data_ptr(), d=d.data_ptr(),
                                 num_tokens=gate.shape[0], intermediate_size=gate.shape[1],
                                 rounding=MATCH_UNFUSED, gating=gating)
        self.call("imbrex_gated_activation", self.device, ctypes.byref(params), self.stream())
        return d


def share_equal(x, y):
    is_equal = (x == y) | (x.isnan() & y.isnan())
    return 100.0 * is_equal.float().mean(dtype=torch.float64).item()


def main():
    sizes = [int(word) for word in sys.argv[2:]] or [2048, 3584, 18944]
    if len(sys.argv) < 2 or len(sizes) != 3:
        sys.exit(__doc__)
    imbrex = Imbrex(sys.argv[1])
    tokens, hidden_size, intermediate_size = sizes
    torch.manual_seed(1)
    x = torch.randn(tokens, hidden_size, device="cuda").bfloat16()
    both = (torch.randn(2, intermediate_size, hidden_size, device="cuda") /
            hidden_size ** 0.5).bfloat16()
    biases = torch.randn(2, intermediate_size, device="cuda").bfloat16()
    biases_wide = biases.float()
    products = [F.linear(x, both[i], biases[i]) for i in range(2)]
    by_one = torch.stack((both[0], both[1]), dim=1).reshape(2 * intermediate_size, hidden_size)
    every = torch.arange(65536, dtype=torch.int32, device="cuda").short().view(torch.bfloat16)
    every = every.reshape(256, 256)

    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, M {tokens}, "
          f"K {hidden_size}, I {intermediate_size}, biases")
    for name, gating in CASES:
        expected = eager(gating, *products)
        found = imbrex.gemm_swiglu(gating, x, both[0], both[1], 0, biases_wide)
        again = imbrex.gemm_swiglu(gating, x, both[0], both[1], 0, biases_wide)
        # Rows that take turns: what a Linear of a stacked weight holds.
        found_by_one = imbrex.gemm_swiglu(gating, x, by_one[::2], by_one[1::2], 1, biases_wide)
        activated = imbrex.gated_activation(gating, *products)
        alone = [share_equal(imbrex.gated_activation(gating, every, torch.full_like(every, up)),
                             eager(gating, every, torch.full_like(every, up)))
                 for up in (1.0, -0.37)]
        print(f"{name:10} {share_equal(found, expected):9.5f} % of all results equal; of the "
              f"activation behind PyTorch's own products {share_equal(activated, expected):9.5f} "
              f"%; of every bf16 as gate {min(alone):9.5f} %; by 1 "
              f"{'the same' if torch.equal(found, found_by_one) else 'OTHER'}, twice "
              f"{'the same' if torch.equal(found, again) else 'OTHER'}")


if __name__ == "__main__":
    main()
