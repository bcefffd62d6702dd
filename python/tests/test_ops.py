# SPDX-License-Identifier: Apache-2.0
"""imbrex.ops on a CPU, and what needs no device: shapes, strides, refusals, tracing."""
import os

import pytest

import imbrex
from torch_cases import (assert_near, make_weights, make_x, needs_torch, reference, torch)

pytestmark = needs_torch
if torch is not None:
    from imbrex import ops
    DTYPES = [torch.float32, torch.bfloat16]
else:
    DTYPES = []


# Fault: a wrong product, or one in the wrong type, for a number of rows on either side of a chunk.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 33), (3, 5, 64), (257, 40), (64,)])
def test_swiglu(dtype, shape):
    x = make_x(*shape, dtype=dtype)
    gate, up = make_weights(shape[-1], 48, dtype)
    for y in (ops.swiglu(x, gate, up), ops.swiglu(x, gate_up=torch.cat([gate, up])),
              ops.swiglu(x, gate_up=torch.cat([up, gate]), up_first=True)):
        assert y.dtype == dtype and y.is_contiguous()
        assert_near(y, reference(x, gate, up), dtype)


# Fault: bf16 weights with fp32 activations are read as something else.
def test_mixed_types():
    x = make_x(7, 64, dtype=torch.float32)
    gate, up = make_weights(64, 48, torch.bfloat16)
    assert_near(ops.swiglu(x, gate, up), reference(x, gate, up), torch.float32)


SEMANTICS = [{"activation": "gelu"}, {"activation": "gelu_tanh"}, {"activation": "relu"},
             {"alpha": 1.702, "limit": 0.7, "up_offset": 1.0}, {"limit": 0.3}, {"alpha": 2.0}]


# Fault: an activation, a limit or an offset acts on the wrong side or is left out.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_semantics(dtype, semantics, has_bias):
    x = make_x(9, 32, dtype=dtype)
    gate, up = make_weights(32, 24, dtype)
    biases = {}
    if has_bias:
        biases = {"gate_bias": make_x(24, dtype=dtype, seed=5), "up_bias": make_x(24, dtype=dtype)}
    expected = reference(x, gate, up, **biases, **semantics)
    assert_near(ops.swiglu(x, gate, up, **biases, **semantics), expected, dtype)


# Fault: match_unfused rounds elsewhere than PyTorch's separate operations do.
def test_match_unfused():
    x = make_x(65, 64, dtype=torch.bfloat16, scale=3.0)
    gate, up = make_weights(64, 48, torch.bfloat16)
    separate = torch.nn.functional.silu(ops.linear(x, gate)) * ops.linear(x, up)
    assert torch.equal(ops.swiglu(x, gate, up, rounding="match_unfused"), separate)
    assert not torch.equal(ops.swiglu(x, gate, up), separate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(dtype):
    """Fault: a wrong product, or a bias that is added after the rounding."""
    x = make_x(5, 33, dtype=dtype)
    weight, _ = make_weights(33, 29, dtype)
    bias = make_x(29, dtype=dtype, seed=4)
    assert_near(ops.linear(x, weight), x.double() @ weight.double().T, dtype)
    assert_near(ops.linear(x, weight, bias),
                x.double() @ weight.double().T + bias.double(), dtype)


# Fault: a tensor with other strides is read as if it were contiguous.
@pytest.mark.parametrize("view", [
    lambda x: x[:, :, :32], lambda x: x[1:2, 2:, 8:40], lambda x: x[:, 1:2], lambda x: x[2, 3],
    lambda x: x[:, ::2], lambda x: x[:, 0], lambda x: x.transpose(0, 1)[:1], lambda x: x[:0],
])
def test_strides(view):
    x = view(make_x(4, 6, 64, dtype=torch.float32))
    gate, up = make_weights(x.shape[-1], 24, torch.float32)
    try:
        y = ops.swiglu(x, gate, up)
    except ValueError as error:
        pytest.fail(str(error))
    assert_near(y, reference(x, gate, up), torch.float32)


# Fault: what does not fit is read past its end, or refused without saying what is wrong.
@pytest.mark.parametrize("call, error, message", [
    (lambda x, g, u: ops.swiglu(x.mT, g[:, :5], u[:, :5]), ValueError, "do not follow each other"),
    (lambda x, g, u: ops.swiglu(x.expand(3, 5, 64).transpose(0, 1), g, u), ValueError,
     "one distance"),
    (lambda x, g, u: ops.swiglu(x[:1].expand(5, 64), g, u), ValueError, "rows overlap"),
    (lambda x, g, u: ops.swiglu(x.half(), g, u), TypeError, "torch.float16"),
    (lambda x, g, u: ops.swiglu(x, g, u.bfloat16()), TypeError, "up: expected torch.float32"),
    (lambda x, g, u: ops.swiglu(x, g, u[:5]), ValueError, "up: expected shape"),
    (lambda x, g, u: ops.swiglu(x, g[:, :9], u[:, :9]), ValueError, "gate: expected shape [*, 64]"),
    (lambda x, g, u: ops.swiglu(x, g[0], u[0]), ValueError, "two dimensions"),
    (lambda x, g, u: ops.swiglu(x, g), ValueError, "expected both"),
    (lambda x, g, u: ops.swiglu(x, g, u, gate_up=g), ValueError, "instead of"),
    (lambda x, g, u: ops.swiglu(x, gate_up=g[:7]), ValueError, "even"),
    (lambda x, g, u: ops.swiglu(x, gate_up=g, interleave_rows=3), ValueError, "0, 1 or 8"),
    (lambda x, g, u: ops.swiglu(x, gate_up=g, interleave_rows=1), ValueError, "on a CPU"),
    (lambda x, g, u: ops.swiglu(x, g.T.contiguous().T, u), ValueError, "gate: expected rows"),
    (lambda x, g, u: ops.swiglu(x, g, u, gate_bias=x[0]), ValueError, "gate_bias: expected shape"),
    (lambda x, g, u: ops.swiglu(x, g, u, activation="tanh"), ValueError, "activation"),
    (lambda x, g, u: ops.swiglu(x, g, u, rounding="none"), ValueError, "rounding"),
    (lambda x, g, u: ops.swiglu(x, g.to("meta"), u), ValueError, "gate: expected it on cpu"),
    (lambda x, g, u: ops.linear(x, g[:, :3]), ValueError, "weight: expected shape"),
    (lambda x, g, u: ops.linear(x, g, g[0, :3]), ValueError, "bias: expected shape"),
])
def test_refusals(call, error, message):
    x = make_x(5, 64, dtype=torch.float32)
    gate, up = make_weights(64, 24, torch.float32)
    with pytest.raises(error) as caught:
        call(x, gate, up)
    assert message in str(caught.value)


# Fault: training goes on with a gradient that silently misses a part.
def test_no_gradient():
    x = make_x(5, 64, dtype=torch.float32).requires_grad_()
    gate, up = make_weights(64, 24, torch.float32)
    with pytest.raises(NotImplementedError, match="no_grad"):
        ops.swiglu(x, gate, up)
    with pytest.raises(NotImplementedError, match="no_grad"):
        ops.linear(x, gate)
    with torch.no_grad():
        assert not ops.swiglu(x, gate, up).requires_grad


# Fault: the operator's schema, its fake kernel and its real one disagree; PyTorch's own check.
def test_opcheck():
    x = make_x(3, 5, 64, dtype=torch.float32)
    gate, up = make_weights(64, 24, torch.float32)
    bias = make_x(24, dtype=torch.float32)
    torch.library.opcheck(torch.ops.imbrex.swiglu,
                          (x, gate, up, bias, None, 0, 0, 1.0, 0.0, 0.0, 0, False, []))
    torch.library.opcheck(torch.ops.imbrex.linear, (x, gate, bias, False, []))


# Fault: what listens to operators (a mode, a profiler, vmap) does not see them, or gets a result
# that was computed behind its back.
def test_seen_by_the_dispatcher():
    from torch.utils._python_dispatch import TorchDispatchMode
    x = make_x(5, 64, dtype=torch.float32)
    gate, up = make_weights(64, 24, torch.float32)
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        ops.swiglu(x, gate, up)
        ops.linear(x, gate)
    assert [name for name in seen if "imbrex" in name] == ["imbrex.swiglu.default",
                                                           "imbrex.linear.default"]
    with torch.profiler.profile() as profile:
        ops.swiglu(x, gate, up)
    assert "imbrex::swiglu" in {event.key for event in profile.key_averages()}
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (x, gate, up)]
        assert ops.swiglu(*fake).shape == (5, 24)
    assert_near(torch.vmap(lambda row: ops.swiglu(row, gate, up))(x), reference(x, gate, up),
                torch.float32)


# Fault: a graph break, or one compiled graph for each number of tokens.
def test_compile():
    gate, up = make_weights(64, 24, torch.float32)
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def forward(x):
        return ops.swiglu(x * 2, gate_up=torch.cat([gate, up])) + 1

    counts = []
    for num_tokens in (3, 7, 11):
        x = make_x(num_tokens, 64, dtype=torch.float32)
        assert_near(forward(x) - 1, reference(x * 2, gate, up), torch.float32)
        counts.append(counter.frame_count)
    assert counts[0] > 0 and counts == counts[:1] * 3


# Fault: a forked worker waits for threads that its parent has.
def test_fork():
    x = make_x(300, 64, dtype=torch.float32)
    gate, up = make_weights(64, 24, torch.float32)
    expected = ops.swiglu(x, gate, up)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(ops.swiglu(x, gate, up), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


# Fault: asking for a GPU's plan without one is a crash.
def test_no_device():
    with pytest.raises(imbrex.Error) as caught:
        ops.choose_plan(128, 896, 4864, device=10 ** 6)
    assert caught.value.status in (imbrex.Status.UNSUPPORTED, imbrex.Status.NOT_FOUND)
    for one in ops.variants():
        assert one["schedule"] and one["block_m"] > 0
