# SPDX-License-Identifier: Apache-2.0
"""imbrex.integrations.hf on small random models, on a CPU."""
import copy
import io

import pytest

from torch_cases import needs_gpu, needs_transformers, torch, transformers

pytestmark = needs_transformers
if torch is not None and transformers is not None:
    from imbrex.integrations import hf

FAMILIES = ["Qwen2", "Qwen3", "Llama", "Mistral"]


def make_model(family="Qwen2", **changes):
    torch.manual_seed(1)
    options = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=100,
                   max_position_embeddings=64)
    config = getattr(transformers, family + "Config")(**{**options, **changes})
    return getattr(transformers, family + "ForCausalLM")(config).eval()


def logits(model):
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        return model(ids).logits


# Fault: the patched model computes something else, has other weights, or does not come back.
@pytest.mark.parametrize("family", FAMILIES)
def test_patch(family):
    model = make_model(family)
    before = logits(model)
    state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    report = hf.patch(model)
    assert report.patched == ["model.layers.0.mlp", "model.layers.1.mlp"] and not report.skipped
    assert hf.is_patched(model)
    after = logits(model)
    assert not torch.equal(after, before)  # by another kernel: else nothing was patched
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == state
    assert type(model.model.layers[0].mlp).__name__ == family + "MLP"
    assert hf.patch(model).patched == report.patched
    assert hf.unpatch(model) == 2 and hf.unpatch(model) == 0
    assert not hf.is_patched(model)
    assert torch.equal(logits(model), before)


# Fault: biases or another activation are dropped on the way.
@pytest.mark.parametrize("changes", [{"mlp_bias": True}, {"hidden_act": "gelu"},
                                     {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "relu"}])
def test_variants(changes):
    model = make_model("Llama", **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    before = logits(model)
    assert len(hf.patch(model).patched) == 2
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


# Fault: match_unfused in bf16 is not what the unpatched model computes between its products.
def test_rounding():
    model = make_model().bfloat16()
    mlp = model.model.layers[0].mlp
    x = torch.randn(9, 64).bfloat16()
    with torch.no_grad():
        hf.patch(model, rounding="match_unfused")
        gate, up = (torch.ops.imbrex.linear(x, linear.weight, None, False, [])
                    for linear in (mlp.gate_proj, mlp.up_proj))
        assert torch.equal(mlp(x), mlp.down_proj(torch.nn.functional.silu(gate) * up))
        hf.patch(model, rounding="exact")
        assert not torch.equal(mlp(x), mlp.down_proj(torch.nn.functional.silu(gate) * up))
    with pytest.raises(ValueError, match="rounding"):
        hf.patch(model, rounding="other")


class OtherLinear(torch.nn.Linear if torch is not None else object):
    """Stands for a quantised or adapted one."""


# Fault: an MLP that computes something else is taken for a plain one, or is left without a word.
@pytest.mark.parametrize("change, reason", [
    (lambda mlp: setattr(mlp, "gate_proj", OtherLinear(64, 96, bias=False)), "OtherLinear"),
    (lambda mlp: setattr(mlp, "act_fn", torch.nn.Tanh()), "Tanh"),
    (lambda mlp: mlp.up_proj.register_forward_hook(lambda *_: None), "up_proj has hooks"),
    (lambda mlp: setattr(mlp, "forward", lambda x: x), "its forward is replaced"),
    (lambda mlp: mlp.half(), "torch.float16"),
    (lambda mlp: setattr(mlp, "up_proj", torch.nn.Linear(64, 48, bias=False)), "differ in shape"),
    (lambda mlp: setattr(mlp.gate_proj, "weight", torch.nn.Parameter(
        torch.randn(64, 96).T)), "not contiguous"),
])
def test_left_alone(change, reason):
    model = make_model()
    change(model.model.layers[1].mlp)
    report = hf.patch(model)
    assert report.patched == ["model.layers.0.mlp"]
    assert [name for name, _ in report.skipped] == ["model.layers.1.mlp"]
    assert reason in report.skipped[0][1]
    assert reason in str(report) and "1 MLPs patched, 1 left" in str(report)


# Fault: a class derived from an MLP, whose forward may be its own, is patched over.
def test_derived_class():
    model = make_model()
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("MyMLP", (type(mlp),), {"forward": lambda self, x: x})
    assert "MyMLP" in hf.patch(model).skipped[0][1]


# Fault: a patched model cannot be copied or saved, or its copy shares weights with it.
def test_copies():
    model = make_model()
    hf.patch(model)
    expected = logits(model)
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    for one in (copied, loaded):
        assert hf.is_patched(one) and torch.equal(logits(one), expected)
        assert hf.unpatch(one) == 2


# Fault: weights that took the place of others after the first call are passed by.
def test_new_weights():
    model = make_model()
    mlp = model.model.layers[0].mlp
    x = torch.randn(9, 64)
    changes = [lambda: setattr(mlp.gate_proj, "weight", torch.nn.Parameter(torch.randn(96, 64))),
               lambda: setattr(mlp, "up_proj", torch.nn.Linear(64, 96, bias=False)),
               lambda: setattr(mlp, "up_proj", torch.nn.Linear(64, 96)),
               lambda: setattr(mlp.gate_proj, "bias", torch.nn.Parameter(torch.randn(96))),
               lambda: setattr(mlp.gate_proj.weight, "data", torch.randn(96, 64)),
               lambda: mlp.gate_proj.weight.data.normal_()]
    with torch.no_grad():
        for change in changes:
            hf.patch(model)
            before = mlp(x)
            change()
            after = mlp(x)
            hf.unpatch(model)
            torch.testing.assert_close(after, mlp(x), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(after, before)


# Fault: training goes on without the MLPs' gradients.
def test_no_gradient():
    model = make_model()
    hf.patch(model)
    with pytest.raises(NotImplementedError, match="no_grad"):
        model(torch.arange(7).reshape(1, 7))


# Fault: a compiled model breaks at the operator, or goes on with the old forward.
def test_compile():
    model = make_model()
    before = logits(model)
    hf.patch(model)
    expected = logits(model)
    seen = []

    def backend(graph, _inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(logits(compiled), expected, rtol=1e-5, atol=1e-6)
    assert sum("imbrex.swiglu" in name for name in seen) == 2
    hf.unpatch(model)
    torch.testing.assert_close(logits(compiled), before, rtol=1e-5, atol=1e-6)


# Fault: on a GPU few tokens do not take the MLP's own forward, many do not take the fused one, or
# the compiled model goes the wrong way for one of them.
@needs_gpu
def test_min_tokens():
    model = make_model("Qwen2", hidden_size=256, intermediate_size=512).cuda().bfloat16()
    mlp = model.model.layers[0].mlp
    few, many = (torch.randn(1, count, 256, device="cuda", dtype=torch.bfloat16)
                 for count in (15, 16))
    with torch.inference_mode():
        expected = mlp(few), mlp(many)
        hf.patch(model)
        compiled = torch.compile(mlp, dynamic=True, fullgraph=True)
        assert torch.equal(mlp(few), expected[0])
        assert not torch.equal(mlp(many), expected[1])
        for x, found in ((few, compiled(few)), (many, compiled(many)), (many, mlp(many))):
            torch.testing.assert_close(found, expected[0 if x is few else 1], rtol=0.05, atol=0.02)
        hf.patch(model, min_tokens=0)
        assert not torch.equal(mlp(few), expected[0])
