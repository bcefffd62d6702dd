# SPDX-License-Identifier: Apache-2.0
"""Finds libimbrex.so, loads it once, and gives its functions their types."""
from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Optional

from . import _abi
from .errors import Error, Status

__all__ = ["check", "library", "load"]

_here = os.path.dirname(os.path.abspath(__file__))
_lock = threading.Lock()
_loaded: Optional[ctypes.CDLL] = None


def _candidates() -> list[str]:
    return [
        os.path.join(_here, "lib", "libimbrex.so"),  # a wheel's own
        os.path.normpath(os.path.join(_here, "..", "..", "build", "libimbrex.so")),  # a checkout's
    ]


def load(path: Optional[str] = None) -> ctypes.CDLL:
    """Loads the library, once in a process.

    path: of libimbrex.so; None: the one beside the package, else that of the source tree which the
        package lies in. A second call returns what is loaded and must not name another file.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            if path is not None and os.path.realpath(path) != os.path.realpath(_loaded._name):
                raise Error(Status.INVALID_ARGUMENT,
                            f"library: {_loaded._name} is loaded already, found {path}")
            return _loaded
        paths = [path] if path is not None else _candidates()
        found = next((name for name in paths if os.path.exists(name)), None)
        if found is None:
            raise Error(Status.NOT_FOUND, "library: expected one of " + ", ".join(paths))
        try:
            loaded = ctypes.CDLL(found)
            for name, (result, arguments) in _abi.FUNCTIONS.items():
                function = getattr(loaded, name)
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise Error(Status.UNSUPPORTED, f"library: {found}: {error}") from error
        _loaded = loaded
        return loaded


def library() -> Any:
    """The loaded library."""
    return _loaded if _loaded is not None else load()


# What parameters are called that set fields of other names.
_PARAMETERS = {"prompt_ids": "prompt", "prompt_text": "prompt", "timeout_ns": "timeout"}


def check(status: int, err: _abi.Error) -> None:
    """Raises what a call reported, under the name of the parameter that it is about."""
    if status == Status.OK:
        return
    message = err.message.decode("utf-8", "replace")
    if err.field is not None:
        field = err.field.decode()
        message = _PARAMETERS.get(field, field) + message[len(field):]
    raise Error(status, message)
