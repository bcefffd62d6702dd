# SPDX-License-Identifier: Apache-2.0
"""The fused kernels as PyTorch operators.

    y = imbrex.ops.swiglu(x, gate, up)        silu(x @ gate.T) * (x @ up.T), neither product stored
    y = imbrex.ops.linear(x, weight, bias)    x @ weight.T + bias
    f = imbrex.ops.PreparedSwiglu(gate, up)   f(x): the same, for less of the host's time

They take bf16 tensors on a GPU of compute capability 8.0 or later, on the current stream of the
tensor's device, and bf16 or fp32 tensors on a CPU. They may be captured into CUDA graphs, stand in
torch.compile(fullgraph=True) and have no backward. Tensors are taken with the strides that they
have as long as elements of a row follow each other (the GPU wants 16-byte aligned rows too); what
would need a copy is refused with the reason.

Threads: any; calls for one device take turns for the few microseconds of a launch. Failures of the
library are imbrex.Error; tensors that do not fit together are ValueError or TypeError.
"""
from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
from ctypes import byref, c_void_p
from typing import Any, Optional, Sequence

import torch

from . import _abi
from ._abi import ACTIVATIONS, ROUNDINGS
from ._library import check, library
from .errors import Error, Status

__all__ = ["ACTIVATIONS", "ROUNDINGS", "Plan", "PreparedSwiglu", "choose_plan", "linear", "swiglu",
           "variants"]

_ops = {"swiglu": _abi.OP_GEMM_SWIGLU, "linear": _abi.OP_GEMM}
_dtypes = {torch.float32: _abi.DTYPE_F32, torch.bfloat16: _abi.DTYPE_BF16}


# ---- devices ----------------------------------------------------------------------------------


class _Handle:
    """An open device or CPU and the lock of who uses it."""

    def __init__(self, pointer: c_void_p) -> None:
        self.pointer = pointer
        self.lock = threading.Lock()


class _Device(_Handle):
    """What a launch on a GPU is told, written under the lock and used again: a call in a model
    finds neither its code nor its data in the caches, so each object it does without counts."""

    def __init__(self, pointer: c_void_p) -> None:
        super().__init__(pointer)
        self.err = _abi.Error()
        self.err_ref = byref(self.err)
        self.swiglu = _abi.GemmSwigluParams()
        self.swiglu_ref = byref(self.swiglu)
        self.call_swiglu = library().imbrex_gemm_swiglu
        # Of the fields that hardly ever change: what they hold now.
        self.semantics: tuple[Any, ...] = (0, 0, 0.0, 0.0, 0.0, 0)
        self.gemm = _abi.GemmParams()
        self.gemm_ref = byref(self.gemm)
        self.call_gemm = library().imbrex_gemm


_open_lock = threading.Lock()
_devices: dict[int, _Device] = {}
_cpus: dict[int, _Handle] = {}  # by number of threads


def _device(device_idx: int) -> _Device:
    """Opened at first use and kept: graphs that hold its launches may be replayed until the end."""
    handle = _devices.get(device_idx)
    if handle is None:
        with _open_lock:
            handle = _devices.get(device_idx)
            if handle is None:
                pointer = c_void_p()
                err = _abi.Error()
                check(library().imbrex_device_open(device_idx, None, byref(pointer), byref(err)),
                      err)
                handle = _devices[device_idx] = _Device(pointer)
    return handle


def _cpu() -> _Handle:
    """With as many threads as PyTorch uses now."""
    num_threads = torch.get_num_threads()
    with _open_lock:
        handle = _cpus.get(num_threads)
        if handle is None:
            pointer = c_void_p()
            err = _abi.Error()
            check(library().imbrex_cpu_open(num_threads, byref(pointer), byref(err)), err)
            handle = _cpus[num_threads] = _Handle(pointer)
        return handle


def _forget() -> None:
    """In a forked child: threads and CUDA contexts of its parent are not there."""
    global _open_lock
    _open_lock = threading.Lock()
    _devices.clear()
    _cpus.clear()


os.register_at_fork(after_in_child=_forget)


# ---- plans ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """A kernel and how it is launched; `struct imbrex_kernel_plan` with the variant's name."""

    variant: int
    name: str
    schedule: str
    block_m: int
    block_n: int
    cluster_m: int
    cluster_n: int
    group_m: int
    num_tiles_n: int
    expected_us: float

    def as_list(self) -> list[int]:
        return [self.variant, self.cluster_m, self.cluster_n, self.group_m, self.num_tiles_n]


def variants(op: str = "swiglu") -> list[dict[str, Any]]:
    """The compiled GPU kernels of an op ("swiglu" or "linear"), the fields of
    `struct imbrex_kernel_variant`; empty in a library without GPU kernels."""
    lib = library()
    found = []
    for idx in range(lib.imbrex_kernel_num_variants(_ops[op])):
        variant = _abi.KernelVariant()
        err = _abi.Error()
        check(lib.imbrex_kernel_variant_describe(_ops[op], idx, byref(variant), byref(err)), err)
        found.append(_abi.values(variant))
    return found


def choose_plan(num_tokens: int, in_features: int, out_features: int, *, op: str = "swiglu",
                schedule: Optional[str] = None, variant: Optional[int] = None,
                is_split: bool = False, is_general: bool = False,
                device: int = 0) -> Plan:
    """The plan that is expected to be the fastest, of all kernels, of one schedule or of one
    variant; for the `plan` of swiglu and linear.

    out_features: of swiglu, intermediate_size. is_split, is_general: see
        `struct imbrex_kernel_shape`.
    Raises Error: UNSUPPORTED if no kernel can.
    """
    lib = library()
    handle = _device(device)
    listed = variants(op)
    shape = _abi.KernelShape(_ops[op], num_tokens, out_features, in_features, is_split, is_general)
    if variant is not None:
        candidates = [variant]
    elif schedule is not None:
        candidates = [idx for idx, one in enumerate(listed) if one["schedule"] == schedule]
        if not candidates:
            raise Error(Status.UNSUPPORTED, f"schedule: no kernel has {schedule!r}; there are: " +
                        ", ".join(sorted({one["schedule"] for one in listed})))
    else:
        candidates = [_abi.ANY_VARIANT]
    best: Optional[_abi.KernelPlan] = None
    failure: Optional[Error] = None
    for candidate in candidates:
        plan = _abi.KernelPlan()
        err = _abi.Error()
        with handle.lock:
            status = lib.imbrex_kernel_choose(handle.pointer, byref(shape), candidate, byref(plan),
                                              byref(err))
        try:
            check(status, err)
        except Error as error:
            failure = error
            continue
        if best is None or plan.expected_us < best.expected_us:
            best = plan
    if best is None:
        assert failure is not None
        raise failure
    one = listed[best.variant_idx]
    return Plan(best.variant_idx, one["name"], one["schedule"], one["block_m"], one["block_n"],
                best.cluster_m, best.cluster_n, best.group_m, best.num_tiles_n, best.expected_us)


def _plan_ref(plan: Sequence[int]) -> Any:
    """What a launch is given; None: the library chooses."""
    if not plan:
        return None
    if len(plan) != 5:
        raise ValueError(f"plan: expected 5 numbers, see Plan.as_list, found {len(plan)}")
    return byref(_abi.KernelPlan(*plan))


# The stream that PyTorch's own kernels would go to, as a number.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device_idx: torch.cuda.current_stream(device_idx).cuda_stream)


# ---- tensors ----------------------------------------------------------------------------------


def _rows(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """(number of rows, elements from one row to the next) of a tensor seen as a matrix. 0 is no
    distance: one row, or rows without a gap."""
    width = tensor.shape[-1]
    num_rows = tensor.numel() // width if width else 0
    if num_rows > 0x7FFFFFFF or width > 0x7FFFFFFF:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} has more than 2^31 - 1 rows or "
                         "columns")
    if tensor.is_contiguous() or num_rows == 0:
        return num_rows, 0
    problem: Optional[str] = None
    stride: Optional[int] = None
    length = 1
    if width > 1 and tensor.stride(-1) != 1:
        problem = "elements of a row do not follow each other"
    elif num_rows > 1:
        # One distance must lead from each row to the next across all outer dimensions.
        for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1])):
            if size == 1:
                continue
            if stride is None:
                stride, length = step, size
            elif step != stride * length:
                problem = "rows are not at one distance"
                break
            else:
                length *= size
        if problem is None and stride is not None and stride < width:
            problem = "rows overlap"
    if problem is not None:
        raise ValueError(f"{name}: {problem}: shape {tuple(tensor.shape)}, strides "
                         f"{tuple(tensor.stride())}; call .contiguous()")
    return num_rows, stride or 0


def _bias(bias: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """As the kernels take it."""
    return None if bias is None else bias.to(torch.float32).contiguous()


def _address(tensor: Optional[torch.Tensor]) -> Optional[int]:
    return None if tensor is None else tensor.data_ptr()


def _check_shapes(x: torch.Tensor, weights: dict[str, torch.Tensor], out_features: int,
                  biases: dict[str, Optional[torch.Tensor]]) -> None:
    if x.dim() < 1:
        raise ValueError("x: expected at least one dimension, found none")
    for name, weight in weights.items():
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(f"{name}: expected shape [*, {x.shape[-1]}] for x of shape "
                             f"{tuple(x.shape)}, found {tuple(weight.shape)}")
    for name, tensor in (*weights.items(), *biases.items()):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: expected it on {x.device} like x, found it on "
                             f"{tensor.device}")
    for name, bias in biases.items():
        if bias is not None and (bias.dim() != 1 or bias.shape[0] != out_features):
            raise ValueError(f"{name}: expected shape [{out_features}], found "
                             f"{tuple(bias.shape)}")


def _check_dtypes(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
    """CUDA: bf16 all; CPU: bf16 or fp32, weights all the same."""
    allowed = (torch.bfloat16,) if x.is_cuda else tuple(_dtypes)
    for name, tensor in (("x", x), *weights.items()):
        if tensor.dtype not in allowed:
            expected = " or ".join(str(dtype) for dtype in allowed)
            raise TypeError(f"{name}: expected {expected} on {x.device.type}, found "
                            f"{tensor.dtype}")
    first = next(iter(weights.values())).dtype
    for name, weight in weights.items():
        if weight.dtype != first:
            raise TypeError(f"{name}: expected {first} like the other weights, found "
                            f"{weight.dtype}")


def _intermediate_size(gate: torch.Tensor, up: torch.Tensor, interleave_rows: int) -> int:
    if interleave_rows == 0:
        if gate.shape != up.shape:
            raise ValueError(f"up: expected shape {tuple(gate.shape)} like gate, found "
                             f"{tuple(up.shape)}")
        return gate.shape[0]
    return (min(gate.shape[0], up.shape[0]) + interleave_rows) // 2


# ---- kernels ----------------------------------------------------------------------------------

_SWIGLU = ("swiglu(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, "
           "int interleave_rows, int activation, float alpha, float limit, float up_offset, "
           "int rounding, bool weights_settled, int[] plan) -> Tensor")
_LINEAR = ("linear(Tensor x, Tensor weight, Tensor? bias, bool weights_settled, int[] plan) "
           "-> Tensor")

_library = torch.library.Library("imbrex", "DEF")
_tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
_library.define(_SWIGLU, tags=_tags)
_library.define(_LINEAR, tags=_tags)


def _check_swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                  gate_bias: Optional[torch.Tensor], up_bias: Optional[torch.Tensor],
                  interleave_rows: int) -> int:
    """intermediate_size of operands that fit together."""
    shape = gate.shape
    if (gate_bias is None and up_bias is None and interleave_rows == 0 and len(shape) == 2 and
            shape == up.shape and x.dim() > 0 and shape[1] == x.shape[-1] and
            x.dtype == gate.dtype == up.dtype == torch.bfloat16 and
            x.get_device() == gate.get_device() == up.get_device()):
        return shape[0]
    if gate.dim() != 2 or up.dim() != 2:
        raise ValueError(f"gate, up: expected two dimensions, found {gate.dim()} and {up.dim()}")
    size = _intermediate_size(gate, up, interleave_rows)
    weights = {"gate": gate, "up": up}
    _check_shapes(x, weights, size, {"gate_bias": gate_bias, "up_bias": up_bias})
    _check_dtypes(x, weights)
    return size


def _swiglu_fake(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                 gate_bias: Optional[torch.Tensor], up_bias: Optional[torch.Tensor],
                 interleave_rows: int, *_rest: Any) -> torch.Tensor:
    size = _check_swiglu(x, gate, up, gate_bias, up_bias, interleave_rows)
    return x.new_empty((*x.shape[:-1], size))


def _swiglu_cuda(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                 gate_bias: Optional[torch.Tensor], up_bias: Optional[torch.Tensor],
                 interleave_rows: int, activation: int, alpha: float, limit: float,
                 up_offset: float, rounding: int, weights_settled: bool,
                 plan: Sequence[int]) -> torch.Tensor:
    size = _check_swiglu(x, gate, up, gate_bias, up_bias, interleave_rows)
    d = x.new_empty((*x.shape[:-1], size))
    num_tokens, a_stride = _rows("x", x)
    if num_tokens == 0 or size == 0:
        return d
    gate_stride, up_stride = _rows("gate", gate)[1], _rows("up", up)[1]
    gate_bias, up_bias = _bias(gate_bias), _bias(up_bias)
    device_idx = x.get_device()
    handle = _device(device_idx)
    semantics = (interleave_rows, activation, alpha, limit, up_offset, rounding)
    params = handle.swiglu
    with handle.lock:
        if semantics != handle.semantics:
            params.interleave_rows, params.rounding = interleave_rows, rounding
            params.gating = _abi.Gating(activation, alpha, limit, up_offset)
            handle.semantics = semantics
        params.a, params.a_stride = x.data_ptr(), a_stride
        params.gate, params.gate_stride = gate.data_ptr(), gate_stride
        params.up, params.up_stride = up.data_ptr(), up_stride
        params.gate_bias, params.up_bias = _address(gate_bias), _address(up_bias)
        params.d = d.data_ptr()
        params.num_tokens, params.hidden_size = num_tokens, x.shape[-1]
        params.intermediate_size, params.weights_settled = size, weights_settled
        status = handle.call_swiglu(handle.pointer, handle.swiglu_ref, _plan_ref(plan),
                                    _current_stream(device_idx), handle.err_ref)
        if status:
            check(status, handle.err)
    return d


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: int, alpha: float, limit: float,
           up_offset: float) -> torch.Tensor:
    """What stands behind the two products, operation by operation in the tensors' type."""
    if limit:
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
    name = ACTIVATIONS[activation]
    if name == "silu":
        gate = (torch.nn.functional.silu(gate) if alpha in (0.0, 1.0)
                else gate * torch.sigmoid(alpha * gate))
    elif name == "relu":
        gate = torch.relu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none")
    if up_offset:
        up = up + up_offset
    return gate * up


def _swiglu_cpu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor,
                gate_bias: Optional[torch.Tensor], up_bias: Optional[torch.Tensor],
                interleave_rows: int, activation: int, alpha: float, limit: float,
                up_offset: float, rounding: int, weights_settled: bool,
                plan: Sequence[int]) -> torch.Tensor:
    size = _check_swiglu(x, gate, up, gate_bias, up_bias, interleave_rows)
    if interleave_rows:
        raise ValueError("interleave_rows: expected 0 for tensors on a CPU, found "
                         f"{interleave_rows}")
    is_plain = (ACTIVATIONS[activation] == "silu" and alpha in (0.0, 1.0) and not limit and
                not up_offset)
    if not is_plain or (ROUNDINGS[rounding] == "match_unfused" and x.dtype == torch.bfloat16):
        # The products alone, in fp32 unless each step is to be rounded.
        a = x if ROUNDINGS[rounding] == "match_unfused" else x.to(torch.float32)
        gated = _gated(_linear_cpu(a, gate, gate_bias, False, ()),
                       _linear_cpu(a, up, up_bias, False, ()), activation, alpha, limit, up_offset)
        return gated.to(x.dtype)
    d = x.new_empty((*x.shape[:-1], size))
    num_tokens, a_stride = _rows("x", x)
    if num_tokens == 0 or size == 0:
        return d
    gate_bias, up_bias = _bias(gate_bias), _bias(up_bias)
    params = _abi.CpuGemmSwigluParams(
        a=x.data_ptr(), gate=_packed("gate", gate), up=_packed("up", up),
        gate_bias=_address(gate_bias), up_bias=_address(up_bias), d=d.data_ptr(),
        a_stride=a_stride, d_stride=0, num_tokens=num_tokens, hidden_size=x.shape[-1],
        intermediate_size=size, dtype=_dtypes[x.dtype], weight_dtype=_dtypes[gate.dtype])
    _run_cpu(library().imbrex_cpu_gemm_swiglu, params)
    return d


def _packed(name: str, weight: torch.Tensor) -> int:
    if not weight.is_contiguous():
        raise ValueError(f"{name}: expected rows without gaps on a CPU, found strides "
                         f"{tuple(weight.stride())}; call .contiguous()")
    return weight.data_ptr()


def _run_cpu(function: Any, params: ctypes.Structure) -> None:
    handle = _cpu()
    err = _abi.Error()
    with handle.lock:
        status = function(handle.pointer, byref(params), byref(err))
    check(status, err)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor],
                 *_rest: Any) -> torch.Tensor:
    _check_shapes(x, {"weight": weight}, weight.shape[0], {"bias": bias})
    _check_dtypes(x, {"weight": weight})
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_cuda(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor],
                 weights_settled: bool, plan: Sequence[int]) -> torch.Tensor:
    d = _linear_fake(x, weight, bias)
    num_tokens, a_stride = _rows("x", x)
    if num_tokens == 0 or weight.shape[0] == 0:
        return d
    b_stride = _rows("weight", weight)[1]
    bias = _bias(bias)
    device_idx = x.get_device()
    handle = _device(device_idx)
    params = handle.gemm
    with handle.lock:
        params.a, params.a_stride = x.data_ptr(), a_stride
        params.b, params.b_stride = weight.data_ptr(), b_stride
        params.bias, params.d = _address(bias), d.data_ptr()
        params.num_tokens, params.in_features = num_tokens, x.shape[-1]
        params.out_features, params.weights_settled = weight.shape[0], weights_settled
        status = handle.call_gemm(handle.pointer, handle.gemm_ref, _plan_ref(plan),
                                  _current_stream(device_idx), handle.err_ref)
        if status:
            check(status, handle.err)
    return d


def _linear_cpu(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor],
                weights_settled: bool, plan: Sequence[int]) -> torch.Tensor:
    d = _linear_fake(x, weight, bias)
    num_tokens, a_stride = _rows("x", x)
    if num_tokens == 0 or weight.shape[0] == 0:
        return d
    bias = _bias(bias)
    params = _abi.CpuGemmParams(
        a=x.data_ptr(), b=_packed("weight", weight), bias=_address(bias), d=d.data_ptr(),
        a_stride=a_stride, d_stride=0, num_tokens=num_tokens, in_features=x.shape[-1],
        out_features=weight.shape[0], dtype=_dtypes[x.dtype], weight_dtype=_dtypes[weight.dtype])
    _run_cpu(library().imbrex_cpu_gemm, params)
    return d


for _name, _fake, _cuda, _on_cpu in (("swiglu", _swiglu_fake, _swiglu_cuda, _swiglu_cpu),
                                     ("linear", _linear_fake, _linear_cuda, _linear_cpu)):
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _on_cpu, "CPU")
    torch.library.register_fake(f"imbrex::{_name}", _fake, lib=_library)


# ---- what people call -------------------------------------------------------------------------

# A call through PyTorch's dispatcher to a kernel in Python takes longer than the rest of it: where
# nothing listens there (no tracing, no tensor class or mode of somebody's), it is left out.
try:
    _num_modes = torch._C._len_torch_dispatch_stack
    _is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    _tracing_state = torch._C._get_tracing_state
    _is_profiling = torch.autograd._profiler_enabled
    _can_ask = True
except AttributeError:  # a release that cannot tell
    _can_ask = False
_is_compiling = torch.compiler.is_compiling
_plain_types = (torch.Tensor, torch.nn.Parameter)
_kernels: dict[str, tuple[Any, Any, Any]] = {
    "swiglu": (_swiglu_cuda, _swiglu_cpu, torch.ops.imbrex.swiglu.default),
    "linear": (_linear_cuda, _linear_cpu, torch.ops.imbrex.linear.default),
}


def _is_unheard(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether nobody listens; the tensors are those whose classes might."""
    return (_can_ask and not _is_compiling() and type(x) in _plain_types and
            type(weight) in _plain_types and type(other) in _plain_types and _num_modes() == 0 and
            not _is_wrapped(x) and not _is_wrapped(weight) and _tracing_state() is None and
            not _is_profiling())


def _call(name: str, x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor,
          *arguments: Any) -> torch.Tensor:
    """Runs an operator."""
    on_cuda, on_cpu, dispatched = _kernels[name]
    if _is_unheard(x, weight, other):
        if x.is_cuda:
            return on_cuda(x, *arguments)
        if x.is_cpu:
            return on_cpu(x, *arguments)
    result: torch.Tensor = dispatched(x, *arguments)
    return result


def _refuse_grad(name: str, *tensors: Optional[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad
                                       for tensor in tensors):
        raise NotImplementedError(f"{name}: has no backward, and a tensor requires a gradient; "
                                  "call it under torch.no_grad() or torch.inference_mode()")


def _number_of(name: str, value: str, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, found {value!r}")
    return choices.index(value)


def swiglu(x: torch.Tensor, gate: Optional[torch.Tensor] = None, up: Optional[torch.Tensor] = None,
           *, gate_up: Optional[torch.Tensor] = None, up_first: bool = False,
           interleave_rows: int = 0, gate_bias: Optional[torch.Tensor] = None,
           up_bias: Optional[torch.Tensor] = None, activation: str = "silu", alpha: float = 1.0,
           limit: float = 0.0, up_offset: float = 0.0, rounding: str = "exact",
           weights_settled: bool = False, plan: Optional[Plan] = None) -> torch.Tensor:
    """act(x @ gate.T + gate_bias) * (x @ up.T + up_bias), in one kernel.

    x: [..., hidden_size]. Returns [..., intermediate_size] of x's dtype, contiguous.
    gate, up: [intermediate_size, hidden_size] each; or, instead of both,
    gate_up: [2 * intermediate_size, hidden_size], gate before up (up_first: the other way round);
        with interleave_rows = 1 or 8, that many rows of each take turns (GPU only).
    gate_bias, up_bias: [intermediate_size], used in fp32.
    activation: "silu" (with alpha: x * sigmoid(alpha * x)), "gelu", "gelu_tanh" or "relu".
    limit: the gate is clamped to at most that, up to within it on both sides; 0: not at all.
    up_offset: added to up. GPT-OSS has alpha=1.702, limit=7, up_offset=1, interleave_rows=1.
    rounding: "exact": fp32 to the end, rounded once; "match_unfused": rounded after each operation
        as a framework does on bf16 tensors.
    weights_settled: a promise that no unfinished work on the stream writes the weights, so that
        they may be read while it ends: up to a microsecond sooner.
    plan: of choose_plan; None: the one expected to be the fastest.

    Raises ValueError or TypeError for tensors that do not fit, NotImplementedError if a gradient is
    wanted, imbrex.Error: UNSUPPORTED with the limit that is in the way, DEVICE if the GPU failed.
    """
    if gate_up is not None:
        if gate is not None or up is not None:
            raise ValueError("gate_up: expected it instead of gate and up, found both")
        if gate_up.dim() != 2 or gate_up.shape[0] % 2:
            raise ValueError("gate_up: expected two dimensions, the first of them even, found "
                             f"shape {tuple(gate_up.shape)}")
        if interleave_rows not in (0, 1, 8) or (interleave_rows and
                                                gate_up.shape[0] % (2 * interleave_rows)):
            raise ValueError("interleave_rows: expected 0, 1 or 8, and whole pairs of so many "
                             f"rows, found {interleave_rows} for {gate_up.shape[0]} rows")
        first_rows = interleave_rows or gate_up.shape[0] // 2
        gate, up = (gate_up if interleave_rows else gate_up[:first_rows]), gate_up[first_rows:]
        if up_first:
            gate, up = up, gate
    elif gate is None or up is None:
        raise ValueError("gate, up: expected both, or gate_up, found neither")
    elif interleave_rows or up_first:
        raise ValueError("interleave_rows, up_first: expected only with gate_up")
    _refuse_grad("imbrex.ops.swiglu", x, gate, up, gate_bias, up_bias)
    return _call(
        "swiglu", x, gate, up, gate, up, gate_bias, up_bias, interleave_rows,
        _number_of("activation", activation, ACTIVATIONS), float(alpha), float(limit),
        float(up_offset), _number_of("rounding", rounding, ROUNDINGS), weights_settled,
        plan.as_list() if plan is not None else [])


class PreparedSwiglu:
    """`swiglu(x, gate, up)` of the same weights again and again, in all respects: what does not
    change from call to call is checked and written down once. For models that wait for the host.

    gate, up: [intermediate_size, hidden_size] each, kept; weights that have moved or changed their
        type since are noticed.
    activation, rounding: as of swiglu, which raises what is wrong with them at the first call.

    Threads: any.
    """

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, *, activation: str = "silu",
                 rounding: str = "exact") -> None:
        self.gate, self.up = gate, up
        self.activation, self.rounding = activation, rounding
        # Shape of the last x, and its sizes.
        self._last: tuple[Any, Any] = (None, None)
        # Of the weights that the params were written for; None: not for a direct launch.
        self._weights: Optional[tuple[Any, ...]] = None
        self._device_idx = -1
        self._params = _abi.GemmSwigluParams()
        self._params_ref = byref(self._params)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if (x.dtype is torch.bfloat16 and x.is_contiguous() and not torch.is_grad_enabled() and
                _is_unheard(x, self.gate, self.up)):
            sizes = self._sizes(x)
            if sizes is not None:
                return self._launch(x, *sizes)
        return swiglu(x, self.gate, self.up, activation=self.activation, rounding=self.rounding)

    def _sizes(self, x: torch.Tensor) -> Optional[tuple[tuple[int, ...], int]]:
        """Shape of the result and number of rows. None if weights and x cannot be launched as they
        are: swiglu says why."""
        gate, up = self.gate, self.up
        weights = (gate.data_ptr(), up.data_ptr(), gate.dtype, up.dtype, gate.shape)
        if ((weights != self._weights and not self._write(weights)) or
                x.get_device() != self._device_idx):
            return None
        shape, last = x.shape, self._last
        if shape != last[0]:
            num_rows = x.numel() // gate.shape[1]
            if not (shape and shape[-1] == gate.shape[1] and 0 < num_rows <= 0x7FFFFFFF):
                return None
            last = self._last = (shape, ((*shape[:-1], gate.shape[0]), num_rows))
        return last[1]

    def _write(self, weights: tuple[Any, ...]) -> bool:
        """The params of other weights than before."""
        gate, up = self.gate, self.up
        self._weights, self._last = None, (None, None)
        if not (_is_for_gpu(gate) and _is_for_gpu(up) and gate.get_device() == up.get_device() and
                gate.shape == up.shape and self.activation in ACTIVATIONS and
                self.rounding in ROUNDINGS):
            return False
        self._device_idx = gate.get_device()
        with _device(self._device_idx).lock:
            params = self._params
            params.gate, params.up = weights[:2]
            params.intermediate_size, params.hidden_size = gate.shape
            params.rounding = ROUNDINGS.index(self.rounding)
            params.gating = _abi.Gating(ACTIVATIONS.index(self.activation), 1.0, 0.0, 0.0)
        self._weights = weights
        return True

    def _launch(self, x: torch.Tensor, shape: tuple[int, ...], num_rows: int) -> torch.Tensor:
        d = x.new_empty(shape)
        device_idx, params = self._device_idx, self._params
        handle = _device(device_idx)
        with handle.lock:
            params.a, params.d, params.num_tokens = x.data_ptr(), d.data_ptr(), num_rows
            status = handle.call_swiglu(handle.pointer, self._params_ref, None,
                                        _current_stream(device_idx), handle.err_ref)
            if status:
                check(status, handle.err)
        return d


def _is_for_gpu(weight: torch.Tensor) -> bool:
    """Whether a launch takes it as it is."""
    return (weight.is_cuda and weight.dtype is torch.bfloat16 and weight.dim() == 2 and
            weight.is_contiguous() and 0 < weight.shape[0] <= 0x7FFFFFFF and
            0 < weight.shape[1] <= 0x7FFFFFFF)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None, *,
           weights_settled: bool = False, plan: Optional[Plan] = None) -> torch.Tensor:
    """x @ weight.T + bias, by the same kernels.

    x: [..., in_features]; weight: [out_features, in_features]; bias: [out_features], used in fp32.
    Returns [..., out_features] of x's dtype, contiguous. The rest is as for swiglu.
    """
    _refuse_grad("imbrex.ops.linear", x, weight, bias)
    return _call("linear", x, weight, weight, weight, bias, weights_settled,
                 plan.as_list() if plan is not None else [])
