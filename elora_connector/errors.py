"""The exception tree of the package.

A remote failure is never an exception that reaches vLLM: it is a miss with a
counter.  What is left falls into three kinds: the user's settings are wrong
(`ConfigError`), the surroundings cannot be worked with (`UnsupportedError`), or
we broke our own rules (`InvariantError`).
"""

from __future__ import annotations

import os


class EloraError(Exception):
    """Base of every error raised by this package."""


class ConfigError(EloraError):
    """A setting is missing, unknown or contradicts another one.

    The message names the key, the value and what would be accepted.
    """


class UnsupportedError(EloraError):
    """vLLM, the model or the device cannot be served safely; refused at start."""


class InvariantError(EloraError):
    """An internal rule (I1-I7, see docs/architecture.md) does not hold.

    Raised in tests; in production the tier is reset and the event is counted.
    """


class CodecError(EloraError):
    """Bytes read from a store are not the value that was asked for.

    Args:
        reason: short, stable word used as a metric label.
        message: what was expected and what was found.
        ours: the value claims our own key and schema, so deleting it is safe.
    """

    def __init__(self, reason: str, message: str, *, ours: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.ours = ours


class TraceError(EloraError):
    """A request trace cannot be read; names the file, the line and what is wrong there.

    Args:
        path: the file.
        line: counted from 1; 0 where the file as a whole is meant.
        message: what was expected and what was found.
    """

    def __init__(self, path: str | os.PathLike[str], line: int, message: str) -> None:
        place = f"{os.fspath(path)}:{line}" if line else os.fspath(path)
        super().__init__(f"{place}: {message}")
        self.line = line
