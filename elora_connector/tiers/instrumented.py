"""Timing and outcome of every call, as a wrapper: the tiers have no metric lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from elora_connector.tiers.base import Health, LookupResult, RemoteTier, Result, ValueSpec

Observe = Callable[[str, Result | LookupResult, float], None]
"""Called with the operation, its result and its duration in seconds, on the I/O thread."""


class InstrumentedTier:
    """Same interface as `inner`; `observe` sees leading, read_into, write and refresh.

    `observe` must not raise and must not block, since an I/O thread waits for it.
    """

    def __init__(
        self,
        inner: RemoteTier,
        observe: Observe,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._inner = inner
        self._observe = observe
        self._clock = clock

    def leading(self, groups: Sequence[Sequence[str]]) -> LookupResult:
        start = self._clock()
        found = self._inner.leading(groups)
        self._observe("leading", found, self._clock() - start)
        return found

    def read_into(self, spec: ValueSpec, dest: memoryview) -> Result:
        return self._timed("read_into", lambda: self._inner.read_into(spec, dest))

    def write(self, spec: ValueSpec, payload: memoryview) -> Result:
        return self._timed("write", lambda: self._inner.write(spec, payload))

    def refresh(self, keys: Sequence[str]) -> Result:
        return self._timed("refresh", lambda: self._inner.refresh(keys))

    def health(self) -> Health:
        return self._inner.health()

    def close(self) -> None:
        self._inner.close()

    def _timed(self, op: str, call: Callable[[], Result]) -> Result:
        start = self._clock()
        result = call()
        self._observe(op, result, self._clock() - start)
        return result
