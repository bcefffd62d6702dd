# SPDX-License-Identifier: Apache-2.0
"""The fused MLP in Hugging Face models.

    report = imbrex.integrations.hf.patch(model)
    print(report)
    ...
    imbrex.integrations.hf.unpatch(model)

`patch` replaces the forward of the MLPs of Qwen2, Qwen3, Llama and Mistral models: gate_proj,
up_proj and the activation become one `imbrex.ops.swiglu`, down_proj stays. Weights are neither
copied nor moved, state_dict() is the same, and torch.compile(model) works as before. For inference:
under torch.no_grad() or torch.inference_mode().
"""
from __future__ import annotations

import dataclasses
from typing import Any, Optional

import torch

from .. import ops

__all__ = ["PatchReport", "is_patched", "patch", "unpatch"]

# Modules with gate_proj, up_proj, down_proj and act_fn, and the forward
# down_proj(act_fn(gate_proj(x)) * up_proj(x)).
_MLP_CLASSES = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}

# Class of act_fn: name in imbrex.ops.ACTIVATIONS.
_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu", "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
}


@dataclasses.dataclass
class PatchReport:
    """patched: names of the modules whose forward is fused now, those that were before among them.
    skipped: (name, reason) of MLPs that were left as they are."""

    patched: list[str] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.patched)} MLPs patched, {len(self.skipped)} left as they are"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped:
            reasons.setdefault(reason, []).append(name)
        lines += [f"  {reason}: {names[0]}" +
                  (f" and {len(names) - 1} more" if len(names) > 1 else "")
                  for reason, names in reasons.items()]
        return "\n".join(lines)


class _Fused:
    """First base of a patched module's class."""

    _imbrex_activation: str
    _imbrex_rounding: str
    _imbrex_min_elements: int  # of x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.numel() < self._imbrex_min_elements:
            return super().forward(x)  # type: ignore
        if torch.compiler.is_compiling():
            return self._forward_of_graph(x)
        # Dictionaries, not attributes: those of a module cost the host more than the launch.
        modules = self._modules  # type: ignore
        gate, up = modules["gate_proj"]._parameters, modules["up_proj"]._parameters
        if gate.get("bias") is not None or up.get("bias") is not None:
            return self._forward_of_graph(x)
        prepared = self.__dict__.get("_imbrex_prepared")
        if (prepared is None or prepared.gate is not gate.get("weight") or
                prepared.up is not up.get("weight")):
            prepared = self.__dict__["_imbrex_prepared"] = ops.PreparedSwiglu(
                self.gate_proj.weight, self.up_proj.weight,  # type: ignore
                activation=self._imbrex_activation, rounding=self._imbrex_rounding)
        return modules["down_proj"](prepared(x))  # type: ignore

    def _forward_of_graph(self, x: torch.Tensor) -> torch.Tensor:
        """The same as an operator that a compiler sees."""
        gate, up = self.gate_proj, self.up_proj  # type: ignore
        gated = ops.swiglu(x, gate.weight, up.weight, gate_bias=gate.bias, up_bias=up.bias,
                           activation=self._imbrex_activation, rounding=self._imbrex_rounding)
        return self.down_proj(gated)  # type: ignore

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no name to be found by: copies and pickles make it anew.
        state = {name: value for name, value in vars(self).items() if name != "_imbrex_prepared"}
        return _new_fused, (type(self).__mro__[2],), state


def _set_options(module: Any, rounding: str, min_tokens: int) -> None:
    module._imbrex_rounding = rounding
    module._imbrex_min_elements = min_tokens * module.gate_proj.in_features
    vars(module).pop("_imbrex_prepared", None)


_fused_classes: dict[type, type] = {}


def _fused_class(base: type) -> type:
    fused = _fused_classes.get(base)
    if fused is None:
        # The name stays, as reports of modules and tracers show it.
        fused = type(base.__name__, (_Fused, base), {"__module__": base.__module__,
                                                      "__qualname__": base.__qualname__})
        _fused_classes[base] = fused
    return fused


def _new_fused(base: type) -> Any:
    fused: Any = _fused_class(base)
    return fused.__new__(fused)


def _hooked(module: torch.nn.Module) -> bool:
    return any(getattr(module, name, None) for name in (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))


def _is_known(module: torch.nn.Module) -> bool:
    return any(base.__name__ in _MLP_CLASSES and base.__module__.startswith("transformers.")
               for base in type(module).__mro__)


def _problem(module: Any) -> Optional[str]:
    """Why a module cannot be patched."""
    if type(module).__name__ not in _MLP_CLASSES:
        return f"{type(module).__name__} may compute something else than the class it derives from"
    if "forward" in vars(module):
        return "its forward is replaced already (offloading hooks do that)"
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear: Any = getattr(module, name, None)
        kind = type(linear)
        if name != "down_proj":
            if kind is not torch.nn.Linear:
                return (f"{name} is no plain torch.nn.Linear but {kind.__module__}."
                        f"{kind.__qualname__} (quantised, adapted or sharded)")
            if type(linear.weight) is not torch.nn.Parameter:
                return f"{name}.weight is a {type(linear.weight).__name__}, not a plain parameter"
            if _hooked(linear) or "forward" in vars(linear):
                return f"{name} has hooks, which a fused product would pass by"
            if not linear.weight.is_contiguous():
                return f"{name}.weight is not contiguous"
            if linear.weight.dtype not in (torch.bfloat16, torch.float32):
                return (f"{name}.weight is {linear.weight.dtype}; expected torch.bfloat16, or "
                        "torch.float32 on a CPU")
            if linear.weight.is_cuda and linear.weight.dtype != torch.bfloat16:
                return f"{name}.weight is {linear.weight.dtype}; expected torch.bfloat16 on a GPU"
    if module.gate_proj.weight.shape != module.up_proj.weight.shape:
        return "gate_proj and up_proj differ in shape"
    if module.gate_proj.weight.is_cuda and (module.gate_proj.out_features % 8 or
                                            module.gate_proj.in_features % 8):
        return "hidden_size and intermediate_size must be multiples of 8 on a GPU"
    if type(module.act_fn).__name__ not in _ACTIVATIONS or _hooked(module.act_fn):
        return f"activation {type(module.act_fn).__name__} is not one that the kernels have"
    return None


def patch(model: torch.nn.Module, *, rounding: str = "exact",
          min_tokens: int = 16) -> PatchReport:
    """Fuses the MLPs of a model, in place. Doing it again changes nothing but the two options.

    min_tokens: on a GPU, an MLP of fewer tokens takes its own forward: there the product reads its
        weights at the memory's rate and there is hardly anything to fuse. 0: always fused.
    rounding: "exact": fp32 between the products and the one rounding of the result;
        "match_unfused": rounded as the separate operations round, for runs that must repeat those.
    Returns which modules were patched and why others were not; raises nothing for those.
    """
    if rounding not in ops.ROUNDINGS:
        raise ValueError(f"rounding: expected one of {', '.join(ops.ROUNDINGS)}, found "
                         f"{rounding!r}")
    report = PatchReport()
    for name, module in model.named_modules():
        if isinstance(module, _Fused):
            _set_options(module, rounding, min_tokens)
            report.patched.append(name)
            continue
        if not _is_known(module):
            continue
        reason = _problem(module)
        if reason is not None:
            report.skipped.append((name, reason))
            continue
        module.__class__ = _fused_class(type(module))
        module._imbrex_activation = _ACTIVATIONS[type(module.act_fn).__name__]
        _set_options(module, rounding, min_tokens)
        report.patched.append(name)
    return report


def unpatch(model: torch.nn.Module) -> int:
    """Gives the MLPs their own forward back. Returns how many were patched."""
    count = 0
    for module in model.modules():
        if isinstance(module, _Fused):
            del module._imbrex_activation, module._imbrex_rounding, module._imbrex_min_elements
            vars(module).pop("_imbrex_prepared", None)
            module.__class__ = type(module).__mro__[2]
            count += 1
    return count


def is_patched(module: torch.nn.Module) -> bool:
    """Whether any MLP in it is patched."""
    return any(isinstance(one, _Fused) for one in module.modules())
