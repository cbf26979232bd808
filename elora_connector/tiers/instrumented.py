"""Timing and outcome of every call, as a wrapper: the tiers have no metric lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from elora_connector.tiers.base import (
    Health,
    Item,
    LookupResult,
    RemoteTier,
    Result,
    ValueSpec,
)

Observe = Callable[[str, Result | LookupResult, float], None]
"""Called with the operation, its result and its duration in seconds, on the I/O thread."""


class InstrumentedTier:
    """Same interface as `inner`; `observe` sees leading, read_into, write and refresh.

    The values of a batch are seen one by one, each with the time that its result was
    waited for, so that the seconds of a batch add up to its duration.
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

    def read_many(self, items: Iterable[Item]) -> Iterator[Result]:
        return self._each("read_into", self._inner.read_many(items))

    def write_many(self, items: Iterable[Item]) -> Iterator[Result]:
        return self._each("write", self._inner.write_many(items))

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

    def _each(self, op: str, results: Iterator[Result]) -> Iterator[Result]:
        start = self._clock()
        for result in results:
            self._observe(op, result, self._clock() - start)
            yield result
            start = self._clock()
