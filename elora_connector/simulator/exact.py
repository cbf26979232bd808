"""Hits counted one by one: what the closed forms of `bounds` are expected values of.

Each request is over before the next one begins.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from elora_connector.simulator.requests import SimRequest, Trace

# ---- a sequence of adapters: one prefix each, which is there or not --------------------


def hits_infinite(adapters: Sequence[Hashable]) -> int:
    """Requests whose adapter came before."""
    return len(adapters) - len(set(adapters))


def hits_pinned(adapters: Sequence[Hashable], pinned: Iterable[Hashable]) -> int:
    """Requests for a pinned adapter, whose prefix is there from the start."""
    chosen = set(pinned)
    return sum(adapter in chosen for adapter in adapters)


def hottest(adapters: Sequence[Hashable], count: int) -> list[Hashable]:
    """The adapters with most requests: the best ones to pin."""
    return [adapter for adapter, _ in Counter(adapters).most_common(count)]


def hits_lru(adapters: Sequence[Hashable], capacity: int) -> int:
    """Hits of an LRU with room for `capacity` prefixes, empty at first."""
    cache: OrderedDict[Hashable, None] = OrderedDict()
    hits = 0
    for adapter in adapters:
        hits += adapter in cache
        cache[adapter] = None
        cache.move_to_end(adapter)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def hits_idle(adapters: Sequence[Hashable], times: Sequence[float], idle_s: float) -> int:
    """Requests at most `idle_s` seconds after the last one of the same adapter."""
    last: dict[Hashable, float] = {}
    hits = 0
    for adapter, now in zip(adapters, times, strict=True):
        hits += adapter in last and now - last[adapter] <= idle_s
        last[adapter] = now
    return hits


# ---- a trace: chunks in chains ---------------------------------------------------------


class Scope(enum.Enum):
    """Who shares the capacity."""

    SHARED = "shared"
    PER_ADAPTER = "per_adapter"
    """Each adapter has an equal part for itself, as with one instance for each."""


@dataclass(slots=True)
class Found:
    """What one replay found.

    Attributes:
        prompt_tokens, hit_tokens: of all requests; a hit is a leading run of full chunks.
        prompt_chunks: full chunks that could have hit.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prompt_chunks: int = 0
    hit_chunks: int = 0
    hit_tokens: int = 0

    @property
    def rate(self) -> float:
        """Share of the prompt tokens that hit."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Cache:
    """Chunks in the order of their last use, a parent always after its children.

    So what goes first is a leaf, and what is left is always whole prefixes.

    Args:
        capacity: chunks; None for no limit.
        idle_s: seconds without use after which a chunk is gone; None for never.
    """

    def __init__(self, capacity: int | None, idle_s: float | None) -> None:
        self._capacity = capacity
        self._idle_s = idle_s
        self._used: OrderedDict[tuple[str, int], float] = OrderedDict()

    def leading(self, request: SimRequest, count: int) -> int:
        """How many of the first `count` chunks are here without a gap."""
        for index, label in enumerate(request.labels[:count]):
            used = self._used.get((request.adapter, label))
            if used is None or self._gone(used, request.at):
                return index
        return count

    def _gone(self, used: float, now: float) -> bool:
        return self._idle_s is not None and now - used > self._idle_s

    def keep(self, request: SimRequest, count: int) -> None:
        """The first `count` chunks are here now, or as many of them as there is room for."""
        kept = count if self._capacity is None else min(count, self._capacity)
        for label in reversed(request.labels[:kept]):
            key = request.adapter, label
            self._used[key] = request.at
            self._used.move_to_end(key)
        while self._capacity is not None and len(self._used) > self._capacity:
            self._used.popitem(last=False)


def hittable_chunks(request: SimRequest, chunk_tokens: int) -> int:
    """Full chunks before the last token of the prompt, which vLLM always computes."""
    return min(len(request.labels), max(0, request.prompt_tokens - 1) // chunk_tokens)


def kept_chunks(request: SimRequest, chunk_tokens: int) -> int:
    """Full chunks of prompt and answer before the last token, whose KV is never computed."""
    known = request.prompt_tokens + request.output_tokens
    return min(len(request.labels), max(0, known - 1) // chunk_tokens)


def replay_trace(
    trace: Trace,
    capacity: int | None = None,
    *,
    scope: Scope = Scope.SHARED,
    idle_s: float | None = None,
) -> Found:
    """Hits of a cache of `capacity` chunks (None: no limit) under LRU, in the order of `at`.

    Args:
        idle_s: chunks not used for that long are gone as well.
    """
    if scope is Scope.PER_ADAPTER and capacity is not None:
        capacity //= max(1, len({request.adapter for request in trace.requests}))
    caches: dict[str, _Cache] = {}
    found = Found()
    for request in trace.requests:
        whose = request.adapter if scope is Scope.PER_ADAPTER else ""
        cache = caches.setdefault(whose, _Cache(capacity, idle_s))
        count = hittable_chunks(request, trace.chunk_tokens)
        hits = cache.leading(request, count)
        found.requests += 1
        found.prompt_tokens += request.prompt_tokens
        found.prompt_chunks += count
        found.hit_chunks += hits
        found.hit_tokens += hits * trace.chunk_tokens
        cache.keep(request, kept_chunks(request, trace.chunk_tokens))
    return found
