"""Put a function around a method of somebody else's class, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "elora_wrapped"
_originals: dict[tuple[type, str], Callable[..., Any]] = {}


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, self, ...)`; a second call does nothing.

    `functools.wraps` matters: vLLM reads the signature of its RPC methods to decode
    their arguments.
    """
    original = owner.__dict__[name]
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    mark(wrapper)
    _originals[owner, name] = original
    setattr(owner, name, wrapper)


def original_of(owner: type, name: str) -> Callable[..., Any]:
    """The method that `wrap` put its function around."""
    return _originals[owner, name]


def mark(function: Any) -> None:
    """Let `is_wrapped` recognise a function that replaces another one."""
    setattr(function, _MARK, True)


def is_wrapped(function: Any) -> bool:
    """Is it one of our replacements?"""
    return bool(getattr(function, _MARK, False))
