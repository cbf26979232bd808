"""A `MemoryTier` that fails on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elora_connector.tiers.base import Health, LookupResult, Outcome, Result, ValueSpec
from elora_connector.tiers.memory import MemoryTier

Hook = Callable[[str, tuple[str, ...]], str | None]
"""Given the operation and its keys, the reason to fail with, or None to go on.

It may also block (a slow store), raise, or change the store before the call goes on.
"""


class FaultyTier(MemoryTier):
    """`hook` is consulted before each operation and may be replaced at any time."""

    def __init__(self, *, hook: Hook | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hook = hook
        self.down = False
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def leading(self, groups: Sequence[Sequence[str]]) -> LookupResult:
        reason = self._consult("leading", *(key for group in groups for key in group))
        return (
            super().leading(groups)
            if reason is None
            else LookupResult(Outcome.ERROR, reason=reason)
        )

    def read_into(self, spec: ValueSpec, dest: memoryview) -> Result:
        reason = self._consult("read_into", spec.key)
        return super().read_into(spec, dest) if reason is None else Result(Outcome.ERROR, reason)

    def write(self, spec: ValueSpec, payload: memoryview) -> Result:
        reason = self._consult("write", spec.key)
        return super().write(spec, payload) if reason is None else Result(Outcome.ERROR, reason)

    def refresh(self, keys: Sequence[str]) -> Result:
        reason = self._consult("refresh", *keys)
        return super().refresh(keys) if reason is None else Result(Outcome.ERROR, reason)

    def health(self) -> Health:
        return Health.OPEN if self.down else Health.CLOSED

    def raw(self, key: str) -> bytes | None:
        """The stored value, header included."""
        with self._lock:
            return self._live(key)

    def put_raw(self, key: str, value: bytes) -> None:
        """Store any bytes, as another program or a broken disk would."""
        with self._lock:
            self._entries[key] = self._entry(value)

    def drop(self, key: str) -> None:
        """Evict, as a full Redis would."""
        with self._lock:
            self._entries.pop(key, None)

    def _consult(self, operation: str, *keys: str) -> str | None:
        self.calls.append((operation, keys))
        if self.down:
            return "connection"
        return None if self.hook is None else self.hook(operation, keys)
