# SPDX-License-Identifier: Apache-2.0
"""Failures of the library as exceptions."""
from __future__ import annotations

import enum

__all__ = ["Error", "Status"]


class Status(enum.IntEnum):
    """The status codes of imbrex.h."""

    OK = 0
    INVALID_ARGUMENT = 1
    OUT_OF_MEMORY = 2
    IO = 3
    FORMAT = 4
    UNSUPPORTED = 5
    NOT_FOUND = 6
    CAPACITY = 7
    CANCELLED = 8
    DEVICE = 9
    INTERNAL = 10
    OUTPUT = 11


class Error(Exception):
    """A call failed.

    status: what kind of failure, a member of Status (an int that is none of them, should a newer
        library know more).
    message: one line that names the parameter or file, what was expected and what was found.
    """

    def __init__(self, status: int, message: str) -> None:
        try:
            self.status: int = Status(status)
            name = self.status.name
        except ValueError:
            self.status = status
            name = f"status {status}"
        self.message = message
        super().__init__(f"{name}: {message}")
