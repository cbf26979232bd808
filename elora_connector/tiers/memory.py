"""A remote tier inside the process: the fake for tests, and the example to copy.

A new store needs what is here and no more: encode a header, keep header and payload
together under the key, and on the way back check before believing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from elora_connector.errors import CodecError
from elora_connector.tiers.base import (
    Health,
    Item,
    LookupResult,
    Outcome,
    Result,
    ValueSpec,
    refreshed_ttl_s,
)
from elora_connector.tiers.codec import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    verify_payload,
)


@dataclass(frozen=True, slots=True)
class _Entry:
    value: bytes
    expires_at: float


class MemoryTier:
    """Values in a dictionary; several instances may share one `store`, as engines share Redis.

    Args:
        ttl_s: seconds a value lives after it was written; None for ever.
        checksum: write and demand payload checksums.
        mac_key: secret that authenticates values, or None.
        clock: seconds, monotonic.
        store: an existing tier whose values to share.
    """

    def __init__(
        self,
        *,
        ttl_s: float | None = None,
        checksum: bool = True,
        mac_key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        store: MemoryTier | None = None,
    ) -> None:
        self._ttl_s = ttl_s
        self._checksum = checksum
        self._mac_key = mac_key
        self._clock = clock
        self._entries: dict[str, _Entry] = {} if store is None else store._entries
        self._lock: threading.Lock = threading.Lock() if store is None else store._lock
        self._closed = False

    def leading(self, groups: Sequence[Sequence[str]]) -> LookupResult:
        if self._closed:
            return LookupResult(Outcome.ERROR, reason="closed")
        count = 0
        with self._lock:
            for group in groups:
                if not group or any(self._live(key) is None for key in group):
                    break
                count += 1
        return LookupResult(Outcome.OK, count)

    def read_into(self, spec: ValueSpec, dest: memoryview) -> Result:
        if self._closed:
            return Result(Outcome.ERROR, "closed")
        if dest.nbytes != spec.nbytes:
            return Result(Outcome.BAD, "length")
        with self._lock:
            value = self._live(spec.key)
        if value is None:
            return Result(Outcome.MISS)
        try:
            header = decode_header(value, spec, total=len(value))
            dest.cast("B")[:] = value[HEADER_BYTES:]
            verify_payload(header, dest, self._mac_key, require_checksum=self._checksum)
        except CodecError as error:
            if error.ours:
                self._forget(spec.key, value)
            return Result(Outcome.BAD, error.reason)
        return Result(Outcome.OK, nbytes=spec.nbytes)

    def write(self, spec: ValueSpec, payload: memoryview) -> Result:
        if self._closed:
            return Result(Outcome.ERROR, "closed")
        if payload.nbytes != spec.nbytes:
            return Result(Outcome.BAD, "length")
        header = encode_header(spec, payload, self._mac_key, checksum=self._checksum)
        value = header + payload.tobytes()
        with self._lock:
            if self._live(spec.key) is not None:
                return Result(Outcome.OK, "exists")
            self._entries[spec.key] = self._entry(value)
        return Result(Outcome.OK, nbytes=spec.nbytes)

    def read_many(self, items: Iterable[Item]) -> Iterator[Result]:
        return (self.read_into(spec, dest) for spec, dest in items)

    def write_many(self, items: Iterable[Item]) -> Iterator[Result]:
        return (self.write(spec, payload) for spec, payload in items)

    def refresh(self, keys: Sequence[str]) -> Result:
        if self._closed:
            return Result(Outcome.ERROR, "closed")
        with self._lock:
            for key in keys:
                value = self._live(key)
                if value is not None:
                    self._entries[key] = self._entry(value, refreshed_ttl_s)
        return Result(Outcome.OK)

    def health(self) -> Health:
        return Health.CLOSED

    def close(self) -> None:
        self._closed = True

    def _live(self, key: str) -> bytes | None:
        """The value under `key`, dropped first if its time is over; the lock is held."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() >= entry.expires_at:
            del self._entries[key]
            return None
        return entry.value

    def _forget(self, key: str, value: bytes) -> None:
        """Drop bytes found bad, unless somebody has replaced them meanwhile."""
        with self._lock:
            if self._live(key) is value:
                del self._entries[key]

    def _entry(self, value: bytes, life_s: Callable[[float], float] = float) -> _Entry:
        return _Entry(value, inf if self._ttl_s is None else self._clock() + life_s(self._ttl_s))
