"""Manners of one writer among many, before a store of bounded size.

A store that is full, or may not be written, says so to every value that was sent in full.
So after such an answer writes pause, and a single one tries after the pause; reads go on.
A value that somebody else has written already is refreshed: it counts as stored, and must
not expire before the children that are written next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from elora_connector.tiers.base import (
    Health,
    Item,
    LookupResult,
    Outcome,
    RemoteTier,
    Result,
    ValueSpec,
)
from elora_connector.tiers.breaker import CircuitBreaker

REFUSALS: Final = frozenset({"oom", "readonly", "auth"})
"""Reasons of a failed write that the next write would meet too."""

_PAUSED: Final = Result(Outcome.ERROR, "paused")


def _pauses() -> CircuitBreaker:
    return CircuitBreaker(first_backoff_s=1.0, max_backoff_s=30.0)


class WriteBackoff:
    """Same interface as `inner`, which sees no write during a pause.

    Args:
        pauses: opened by a refused write; each refused trial doubles the pause.
    """

    def __init__(self, inner: RemoteTier, pauses: Callable[[], CircuitBreaker] = _pauses) -> None:
        self._inner = inner
        self._pauses = pauses()

    def __repr__(self) -> str:
        return f"WriteBackoff({self._inner!r})"

    def leading(self, groups: Sequence[Sequence[str]]) -> LookupResult:
        return self._inner.leading(groups)

    def read_into(self, spec: ValueSpec, dest: memoryview) -> Result:
        return self._inner.read_into(spec, dest)

    def read_many(self, items: Iterable[Item]) -> Iterator[Result]:
        return self._inner.read_many(items)

    def write(self, spec: ValueSpec, payload: memoryview) -> Result:
        (result,) = self.write_many([(spec, payload)])
        return result

    def write_many(self, items: Iterable[Item]) -> Iterator[Result]:
        source = iter(items)
        for item in source:
            ticket = self._pauses.admit()
            if ticket is not None:
                yield from self._batch(ticket, chain([item], self._until_paused(source)))
            elif self._pauses.begin_probe():
                yield self._trial(item)
            else:
                yield _PAUSED

    def refresh(self, keys: Sequence[str]) -> Result:
        return self._inner.refresh(keys)

    def health(self) -> Health:
        return self._inner.health()

    def close(self) -> None:
        self._inner.close()

    def _until_paused(self, source: Iterator[Item]) -> Iterator[Item]:
        while self._pauses.state is Health.CLOSED and (item := next(source, None)) is not None:
            yield item

    def _batch(self, ticket: int, items: Iterator[Item]) -> Iterator[Result]:
        sent: list[str] = []
        there: list[str] = []
        try:
            for position, result in enumerate(self._inner.write_many(_noting(items, sent))):
                if result.reason in REFUSALS:
                    self._pauses.failed(ticket)
                elif result.ok:
                    self._pauses.succeeded(ticket)
                if result.reason == "exists":
                    there.append(sent[position])
                yield result
        finally:
            if there:
                self._inner.refresh(there)

    def _trial(self, item: Item) -> Result:
        """One write decides whether the pause is over."""
        result = _PAUSED
        try:
            result = self._inner.write(*item)
        finally:
            self._pauses.end_probe(result.ok)
        return result


def _noting(items: Iterator[Item], keys: list[str]) -> Iterator[Item]:
    for spec, payload in items:
        keys.append(spec.key)
        yield spec, payload
