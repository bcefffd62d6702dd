# SPDX-License-Identifier: Apache-2.0
"""What imbrex.ops tells the library for tensors on a GPU: the library is a stand-in that writes
down what it gets, the tensors lie on the CPU."""
import ctypes

import pytest

import imbrex
from torch_cases import needs_torch, torch

pytestmark = needs_torch
if torch is not None:
    from imbrex import _abi, ops
    BF16 = torch.bfloat16
DEVICE_IDX = -1  # what a tensor on the CPU says


class Library:
    """Keeps the fields of each call; fails if it is told to."""

    def __init__(self):
        self.calls = []
        self.failure = None

    def launch(self, pointer, params, plan, stream, err):
        assert pointer == 77
        called = _abi.values(params._obj)
        if "gating" in called:
            called["gating"] = _abi.values(called["gating"])
        chosen = None if plan is None else _abi.values(plan._obj)
        self.calls.append({**called, "plan": chosen, "stream": stream})
        if self.failure:
            err._obj.message = self.failure
            return int(imbrex.Status.UNSUPPORTED)
        return 0

    imbrex_gemm_swiglu = imbrex_gemm = launch


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(ops, "library", lambda: made)
    monkeypatch.setattr(ops, "_current_stream", lambda device_idx: 1234)
    monkeypatch.setattr(ops, "_devices", {DEVICE_IDX: ops._Device(77)})
    return made


def swiglu(x, gate, up, gate_bias=None, up_bias=None, interleave_rows=0, activation=0, alpha=1.0,
           limit=0.0, up_offset=0.0, rounding=0, weights_settled=False, plan=()):
    return ops._swiglu_cuda(x, gate, up, gate_bias, up_bias, interleave_rows, activation, alpha,
                            limit, up_offset, rounding, weights_settled, plan)


# Fault: an address, a stride or a size of one operand stands in another one's field.
def test_swiglu(library):
    x = torch.zeros(3, 4, 96, dtype=BF16)[:, :, 16:80]
    weights = torch.zeros(100, 72, dtype=BF16)
    gate, up = weights[:40, :64], weights[50:90, 8:]
    y = swiglu(x, gate, up, weights_settled=True)
    assert y.shape == (3, 4, 40) and y.dtype == BF16
    assert library.calls == [{
        "a": x.data_ptr(), "gate": gate.data_ptr(), "up": up.data_ptr(), "d": y.data_ptr(),
        "a_stride": 96, "gate_stride": 72, "up_stride": 72, "d_stride": 0, "num_tokens": 12,
        "hidden_size": 64, "intermediate_size": 40, "weights_settled": True,
        "interleave_rows": 0, "gate_bias": None, "up_bias": None, "interleave_biases": 0,
        "rounding": 0, "gating": {"activation": 0, "alpha": 1.0, "limit": 0.0, "up_offset": 0.0},
        "plan": None, "stream": 1234}]


# Fault: what one call set is left for the next, since the struct is used again.
def test_nothing_is_left(library):
    x, weight = torch.zeros(5, 64, dtype=BF16), torch.zeros(80, 64, dtype=BF16)
    plain = (x, weight[:40], weight[40:])
    bias = torch.arange(40, dtype=BF16)
    swiglu(*plain)
    swiglu(torch.zeros(7, 96, dtype=BF16)[:, :64], *plain[1:], gate_bias=bias, up_bias=bias,
           activation=2, alpha=1.5, limit=7.0, up_offset=1.0, rounding=1, weights_settled=True,
           plan=[3, 2, 1, 8, 0])
    swiglu(x, weight, weight[8:], interleave_rows=8)
    swiglu(*plain)
    first, second, third, last = library.calls
    for call in (first, last):
        call.pop("d")
    assert first == last
    assert second["gating"] == {"activation": 2, "alpha": 1.5, "limit": 7.0, "up_offset": 1.0}
    assert (second["rounding"], second["a_stride"], second["weights_settled"]) == (1, 96, True)
    assert second["gate_bias"] and second["up_bias"] and not last["gate_bias"]
    assert [second["plan"][name] for name in ("variant_idx", "cluster_m", "cluster_n", "group_m",
                                              "num_tiles_n")] == [3, 2, 1, 8, 0]
    assert (third["interleave_rows"], third["intermediate_size"]) == (8, 40)
    assert third["up"] - third["gate"] == 8 * 64 * 2


# Fault: biases are given in the type of the tensors, or freed before they are read.
def test_bias(library):
    x, weight = torch.zeros(5, 64, dtype=BF16), torch.zeros(40, 64, dtype=BF16)
    bias = torch.arange(40, dtype=torch.float32)
    ops._linear_cuda(x, weight, bias, True, ())
    call = library.calls[0]
    assert call["bias"] == bias.data_ptr()
    assert (call["in_features"], call["out_features"], call["num_tokens"]) == (64, 40, 5)
    assert (call["a_stride"], call["b_stride"], call["weights_settled"]) == (0, 0, True)
    seen = []
    real = library.launch

    def look(pointer, params, plan, stream, err):
        seen.extend((ctypes.c_float * 40).from_address(params._obj.bias))
        return real(pointer, params, plan, stream, err)

    ops._devices[DEVICE_IDX].call_gemm = look
    ops._linear_cuda(x, weight, bias.to(BF16), False, ())
    assert seen == list(range(40))


# Fault: a prepared launch tells the library something else than swiglu, or what an x before it had.
def test_prepared(library, monkeypatch):
    monkeypatch.setattr(ops, "_is_for_gpu", lambda weight: True)
    weights = torch.zeros(80, 64, dtype=BF16)
    gate, up = weights[:40], weights[40:]
    prepared = ops.PreparedSwiglu(gate, up, activation="gelu", rounding="match_unfused")
    with torch.no_grad():
        for shape in ((5, 64), (2, 3, 64), (64,), (5, 64)):
            x = torch.zeros(shape, dtype=BF16)
            found, expected = prepared(x), swiglu(x, gate, up, activation=1, rounding=1)
            assert found.shape == expected.shape and found.dtype == BF16
            call, wanted = library.calls[-2:]
            assert call.pop("d") == found.data_ptr() and wanted.pop("d") == expected.data_ptr()
            assert call == wanted
        library.failure = b"too wide"
        with pytest.raises(imbrex.Error, match="too wide"):
            prepared(x)


# Fault: weights are read where they were before they moved; what cannot be launched is launched.
def test_prepared_changes(library, monkeypatch):
    monkeypatch.setattr(ops, "_is_for_gpu", lambda weight: weight.dtype is BF16)
    gate = torch.nn.Parameter(torch.zeros(40, 64, dtype=BF16))
    up, x = torch.zeros(40, 64, dtype=BF16), torch.zeros(5, 64, dtype=BF16)
    prepared = ops.PreparedSwiglu(gate, up)
    with torch.no_grad():
        prepared(x)
        old = gate.data
        gate.data = torch.ones(40, 64, dtype=BF16)
        prepared(x)
        assert [call["gate"] for call in library.calls] == [old.data_ptr(), gate.data_ptr()]
        assert prepared(x[:0]).shape == (0, 40)
        with pytest.raises(ValueError, match="gate: expected shape"):
            prepared(x[:, :32].contiguous())
        gate.data = gate.data.float()
        with pytest.raises(TypeError, match="float32"):
            prepared(x)
    gate.data = old
    with pytest.raises(NotImplementedError, match="no_grad"):
        prepared(x)
    assert len(library.calls) == 2


# Fault: a failed launch is taken for done, holds the lock for ever, or has an old message.
def test_failure(library):
    x, weight = torch.zeros(5, 64, dtype=BF16), torch.zeros(40, 64, dtype=BF16)
    for message in (b"too wide", b"no"):
        library.failure = message
        for call in (lambda: swiglu(x, weight, weight), lambda: ops._linear_cuda(
                x, weight, None, False, ())):
            with pytest.raises(imbrex.Error) as caught:
                call()
            assert caught.value.message == message.decode()
            assert caught.value.status == imbrex.Status.UNSUPPORTED
    library.failure = None
    swiglu(x, weight, weight)
    with pytest.raises(ValueError, match="5 numbers"):
        swiglu(x, weight, weight, plan=[1])
    swiglu(x, weight, weight)


# Fault: nothing to do is a launch.
def test_empty(library):
    weight = torch.zeros(40, 64, dtype=BF16)
    assert swiglu(torch.zeros(0, 64, dtype=BF16), weight, weight).shape == (0, 40)
    assert ops._linear_cuda(torch.zeros(2, 0, 64, dtype=BF16), weight, None, False,
                            ()).shape == (2, 0, 40)
    assert library.calls == []
