# SPDX-License-Identifier: Apache-2.0
"""What the tests of the PyTorch side share. PyTorch is optional: without it they are skipped, each
one counted."""
import pytest

try:
    import torch
except ImportError:
    torch = None

try:
    import transformers
except ImportError:
    transformers = None

HAS_GPU = torch is not None and torch.cuda.is_available() and \
    torch.cuda.get_device_capability() == (9, 0)

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
needs_transformers = pytest.mark.skipif(torch is None or transformers is None,
                                        reason="PyTorch or transformers is not installed")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no Hopper GPU that PyTorch can use here")
needs_two_gpus = pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2,
                                    reason="no two GPUs that PyTorch can use here")


def make_weights(hidden, intermediate, dtype, device="cpu", seed=1):
    """gate and up, N(0, 1 / hidden)."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    both = torch.randn(2 * intermediate, hidden, generator=generator) / hidden ** 0.5
    both = both.to(device=device, dtype=dtype)
    return both[:intermediate], both[intermediate:]


def make_x(*shape, dtype, device="cpu", seed=2, scale=1.0):
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)


def act(value, activation, alpha):
    """By its formula, in fp64."""
    if activation == "silu":
        return value / (1.0 + torch.exp(-alpha * value))
    if activation == "relu":
        return value.clamp(min=0.0)
    if activation == "gelu":
        return value * (1.0 + torch.erf(value / 2.0 ** 0.5)) / 2.0
    inner = (2.0 / torch.pi) ** 0.5 * (value + 0.044715 * value ** 3)
    return value * (1.0 + torch.tanh(inner)) / 2.0


def reference(x, gate, up, gate_bias=None, up_bias=None, activation="silu", alpha=1.0, limit=0.0,
              up_offset=0.0):
    """swiglu in fp64, unrounded, on the CPU."""
    x, gate, up = (tensor.detach().cpu().double() for tensor in (x, gate, up))
    gated, upped = x @ gate.T, x @ up.T
    if gate_bias is not None:
        gated = gated + gate_bias.cpu().double()
    if up_bias is not None:
        upped = upped + up_bias.cpu().double()
    if limit:
        gated, upped = gated.clamp(max=limit), upped.clamp(-limit, limit)
    return act(gated, activation, alpha) * (upped + up_offset)


def assert_near(found, expected, dtype):
    """fp32 products of up to some thousand terms, and one rounding."""
    bound = 2.0 ** -8 if dtype == torch.bfloat16 else 1e-5
    assert found.shape == expected.shape
    assert bool(torch.isfinite(found).all())
    error = (found.detach().cpu().double() - expected).abs() / (1.0 + expected.abs())
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= bound, f"largest error {worst}"
