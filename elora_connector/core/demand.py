"""How many adapters the batches need at a time: Low_lora of the paper (Eq. 3)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

WINDOW_S: Final = 5.0
_BUCKETS: Final = 50


def expected_adapters(probabilities: Iterable[float], batch_size: float) -> float:
    """Eq. 3: how many different adapters a batch is expected to hold.

    Args:
        probabilities: prob_i, chance that one request of a batch uses adapter i.
        batch_size: BS, requests in a batch; below one nothing is expected.
    """
    if not batch_size > 0:
        return 0.0
    return math.fsum(1.0 - math.pow(1.0 - min(1.0, max(0.0, p)), batch_size) for p in probabilities)


@dataclass(slots=True)
class _Bucket:
    number: int
    steps: int = 0
    requests: int = 0
    by_adapter: dict[Hashable, int] = field(default_factory=dict)


class Demand:
    """Batches of the last `window_s` seconds, counted in slices of a fiftieth of it.

    Requests of the base model count for the size of a batch but need no adapter.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        if not window_s > 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self._slice_s = window_s / _BUCKETS
        self._buckets: deque[_Bucket] = deque()
        self._steps = 0
        self._requests = 0
        self._by_adapter: dict[Hashable, int] = {}
        self._low: float | None = 0.0

    def note(self, now: float, adapters: Mapping[Hashable, int], requests: int) -> None:
        """One batch was scheduled.

        Args:
            adapters: requests of the batch by adapter, without the base model's.
            requests: all requests of the batch.
        """
        if requests <= 0:
            return
        bucket = self._bucket(now)
        bucket.steps += 1
        bucket.requests += requests
        self._steps += 1
        self._requests += requests
        for adapter, count in adapters.items():
            bucket.by_adapter[adapter] = bucket.by_adapter.get(adapter, 0) + count
            self._by_adapter[adapter] = self._by_adapter.get(adapter, 0) + count
        self._low = None

    def low(self, now: float) -> float:
        """Low_lora; 0 when no batch ran in the window."""
        self._expire(now)
        if self._low is None:
            total = self._requests
            shares = (count / total for count in self._by_adapter.values())
            self._low = expected_adapters(shares, self.batch_size(now))
        return self._low

    def batch_size(self, now: float) -> float:
        """BS: mean number of requests in a batch; 0 when no batch ran in the window."""
        self._expire(now)
        return self._requests / self._steps if self._steps else 0.0

    def _bucket(self, now: float) -> _Bucket:
        self._expire(now)
        number = int(now // self._slice_s)
        # A clock that went back goes on in the newest slice.
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]

    def _expire(self, now: float) -> None:
        oldest = int(now // self._slice_s) - _BUCKETS
        while self._buckets and self._buckets[0].number <= oldest:
            gone = self._buckets.popleft()
            self._steps -= gone.steps
            self._requests -= gone.requests
            for adapter, count in gone.by_adapter.items():
                self._by_adapter[adapter] -= count
                if not self._by_adapter[adapter]:
                    del self._by_adapter[adapter]
            self._low = None
