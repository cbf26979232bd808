"""Contract of a remote tier: a store of whole chunk values under string keys.

Four questions, answered once for every implementation:

* Does a call change state?  Reads and `leading` do not; the others do.
* When is the result safe to use?  A read is OK only after header, length,
  checksum and (if configured) MAC agreed; before that the destination must be
  treated as garbage.
* What on zero or too much?  Empty input gives an empty result without I/O; a
  value larger than its destination is BAD, never a partial read.
* Which thread calls it?  I/O threads only, several at once; never vLLM's own.

A failing store is data, not an exception: every call returns a result whose
`outcome` says what happened, within the configured deadlines.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elora_connector.core.types import ChunkKey, Identity, Rank


class Outcome(enum.Enum):
    """How one remote operation ended."""

    OK = "ok"
    MISS = "miss"
    BAD = "bad"
    """The bytes are not the value asked for (`reason` says why); never used."""
    ERROR = "error"
    """The store did not answer, answered with an error, or the breaker is open."""


class Health(enum.Enum):
    """State of the circuit breaker in front of a store."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    PARTIAL = "partial"
    """Of several servers some do not answer; calls that need those are refused."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """What a value must claim to be before its payload is looked at.

    `nbytes` is the payload size; `shape` and `dtype` describe one rank's chunk.
    """

    key: str
    namespace: bytes
    identity: Identity
    chunk: ChunkKey
    parent: bytes
    rank: Rank
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


Item = tuple[ValueSpec, memoryview]
"""A value and its payload's place: the source of a write, the destination of a read."""


@dataclass(frozen=True, slots=True)
class Result:
    """End of one operation: outcome, a stable `reason` word for metrics, bytes moved.

    `instead`: ``host:port`` where a node of a cluster says that the key is.
    """

    outcome: Outcome
    reason: str = ""
    nbytes: int = 0
    instead: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`count`: how many of the given groups exist in full, counted from the first.

    `instead`: as in `Result`.
    """

    outcome: Outcome
    count: int = 0
    reason: str = ""
    instead: str = ""


def refresh_interval_s(ttl_s: float) -> float:
    """How long a key that is in use goes without a refresh."""
    return ttl_s / 4


def refreshed_ttl_s(ttl_s: float) -> int:
    """Seconds that a refreshed key lives.

    Longer than a written one by the time that may pass until the next refresh: so a
    parent in use always has at least the life before it that a new child is given.
    """
    return math.ceil(ttl_s + refresh_interval_s(ttl_s))


@runtime_checkable
class RemoteTier(Protocol):
    """A store shared by several vLLM instances."""

    def leading(self, groups: Sequence[Sequence[str]]) -> LookupResult:
        """Count the leading groups (one chunk's keys over all ranks) that exist.

        One round trip for the whole prompt.  A hole ends the count.
        """
        ...

    def read_into(self, spec: ValueSpec, dest: memoryview) -> Result:
        """Read and verify one value; `dest` is a writable view of `spec.nbytes` bytes."""
        ...

    def write(self, spec: ValueSpec, payload: memoryview) -> Result:
        """Store one value with the configured TTL unless the key exists (both are OK)."""
        ...

    def read_many(self, items: Iterable[Item]) -> Iterator[Result]:
        """`read_into` for many: a result for each item, in order, as soon as it is known.

        Several values are on their way at once, within a bound of count and bytes.  An
        item is taken from `items` only when there is room, so ending the iterable ends
        the batch; taking one must not block.  A value that fails does not stop those
        behind it.  Closing the iterator gives up what is on its way.
        """
        ...

    def write_many(self, items: Iterable[Item]) -> Iterator[Result]:
        """`write` for many, as `read_many`.

        Values are sent in order, but one may be stored although one before it failed.
        """
        ...

    def refresh(self, keys: Sequence[str]) -> Result:
        """Restart the TTL of keys that are in use, root first, in one round trip.

        They live for `refreshed_ttl_s` from now on.
        """
        ...

    def health(self) -> Health:
        """State of the breaker, without I/O."""
        ...

    def close(self) -> None:
        """Drop connections and stop background threads; idempotent."""
        ...
