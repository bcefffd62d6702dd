# SPDX-License-Identifier: Apache-2.0
"""imbrex: an LLM inference engine in C, from Python.

    import imbrex

    with imbrex.Engine() as engine:  # the built-in model; or a folder, or a GGUF file
        for token in engine.generate("Once upon a time", max_tokens=40):
            print(token.text, end="", flush=True)

`imbrex.ops` has the fused kernels as PyTorch operators and `imbrex.integrations.hf` puts them into
Hugging Face models; both need PyTorch and are imported by name. Everything else needs Python alone.
"""
from ._library import load
from .engine import Engine, Generation, Model, ModelInfo, Result, Sampling, Choice, Token
from .errors import Error, Status

__version__ = "0.1.0"

__all__ = ["Choice", "Engine", "Error", "Generation", "Model", "ModelInfo", "Result", "Sampling",
           "Status", "Token", "load", "__version__"]
