"""The hit rates of one question side by side: closed forms, or counted in a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from elora_connector.simulator import bounds, exact
from elora_connector.simulator.exact import Scope, replay_trace
from elora_connector.simulator.requests import Trace
from elora_connector.simulator.shares import Shares, normalised
from elora_connector.simulator.sizing import Sizing

QUOTED: Final = "widely quoted"
UNLIMITED: Final = "no limit"
PINNED: Final = "hottest pinned"
LRU: Final = "LRU"
LRU_CHE: Final = "LRU (Che)"
LRU_SPLIT: Final = "LRU, split by adapter"
IDLE: Final = "idle expiry"
SLOTS: Final = "adapter on the GPU"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for.

    Attributes:
        fraction: part of a prompt that all prompts of its adapter share.
        requests: M, until the cache is emptied.
        capacity: prefixes (chunks of a trace) that fit; None for what memory has room for.
        idle_s: seconds without use after which a prefix goes; None for never.
        rate: requests per second of all adapters.
        sticky: part of the requests that are later turns and find their session.
        prompt_tokens: length of a prompt; None where only fractions are known.
    """

    fraction: float = 0.85
    requests: float = 10_000
    capacity: int | None = None
    idle_s: float | None = None
    rate: float | None = None
    sticky: float = 0.0
    prompt_tokens: int | None = None

    @property
    def first_turns(self) -> float:
        """Requests that begin a session; at least one does."""
        return max(1.0, self.requests * (1.0 - self.sticky))


@dataclass(frozen=True, slots=True)
class Figure:
    """One hit rate.

    Attributes:
        cache: what is kept, one of the names above; where: the memory, empty for any.
        room: prefixes, chunks of a trace or adapters that it holds; None for no limit.
        rate: tokens that hit / tokens of prompts; of first turns, where there are later ones.
        sticky: the same with later turns, None where it means nothing.
    """

    cache: str
    where: str
    room: int | None
    rate: float
    sticky: float | None = None


def usable_fraction(load: Load, sizing: Sizing) -> float:
    """The part of a prompt that can hit: whole chunks, and never its last token."""
    if load.prompt_tokens is None:
        return load.fraction
    return _prefix_tokens(load, sizing) / load.prompt_tokens


def _prefix_tokens(load: Load, sizing: Sizing) -> int:
    tokens = load.prompt_tokens or 0
    return sizing.whole_chunks(min(round(load.fraction * tokens), tokens - 1))


def closed_forms(load: Load, shares: Shares, sizing: Sizing) -> list[Figure]:
    """Expected rates for independent requests; the widely quoted one first."""
    fraction, requests = usable_fraction(load, sizing), load.first_turns

    def figure(cache: str, where: str, room: int | None, rate: float) -> Figure:
        return Figure(cache, where, room, rate, bounds.sticky(rate, load.sticky))

    made = [
        Figure(QUOTED, "", 1, bounds.quoted(shares, load.fraction)),
        figure(UNLIMITED, "", None, bounds.infinite(shares, fraction, requests)),
    ]
    for where, room in _prefix_rooms(load, sizing):
        pinned = bounds.pinned(shares, fraction, room)
        made.append(figure(PINNED, where, room, pinned))
        made.append(figure(LRU, where, room, bounds.lru(shares, fraction, room, requests)))
        che = bounds.lru_che(shares, fraction, room, requests)
        made.append(figure(LRU_CHE, where, room, che))
    if load.idle_s is not None and load.rate is not None:
        rate = bounds.idle(shares, fraction, load.idle_s, load.rate, requests)
        made.append(figure(IDLE, "", None, rate))
    slots = sizing.gpu.adapters_kept
    made.append(Figure(SLOTS, "gpu", slots, bounds.lru(shares, 1.0, slots, load.requests)))
    return made


def _prefix_rooms(load: Load, sizing: Sizing) -> list[tuple[str, int]]:
    if load.capacity is not None:
        return [("", load.capacity)]
    prefix = _prefix_tokens(load, sizing) if load.prompt_tokens is not None else 0
    if not prefix:
        return []
    rooms = {"gpu": sizing.gpu, "host": sizing.host}
    return [(where, sizing.prefixes(room, prefix)) for where, room in rooms.items()]


def trace_shares(trace: Trace) -> Shares:
    """Shares of the adapters of a trace, the hottest first."""
    counts = Counter(request.adapter for request in trace.requests)
    return normalised(count for _, count in counts.most_common())


def measured(load: Load, trace: Trace) -> Load:
    """`load` with the requests, their rate and the mean prompt that the trace has."""
    requests = trace.requests
    span = requests[-1].at - requests[0].at
    prompts = sum(request.prompt_tokens for request in requests) / len(requests)
    return replace(
        load,
        requests=len(requests),
        rate=len(requests) / span if load.rate is None and span > 0 else load.rate,
        prompt_tokens=max(1, round(prompts)),
    )


def counted(load: Load, trace: Trace, sizing: Sizing) -> list[Figure]:
    """Rates of a trace, counted chunk by chunk; the widely quoted one first."""
    unlimited = replay_trace(trace).rate
    made = [
        Figure(QUOTED, "", None, unlimited * float(trace_shares(trace).max())),
        Figure(UNLIMITED, "", None, unlimited),
    ]
    rooms = {"": load.capacity}
    if load.capacity is None:
        chunks = trace.chunk_tokens
        rooms = {
            "gpu": sizing.gpu.tokens_left // chunks,
            "host": sizing.host.tokens_left // chunks,
        }
    for where, room in rooms.items():
        made.append(Figure(LRU, where, room, replay_trace(trace, room).rate))
        split = replay_trace(trace, room, scope=Scope.PER_ADAPTER).rate
        made.append(Figure(LRU_SPLIT, where, room, split))
    if load.idle_s is not None:
        made.append(Figure(IDLE, "", None, replay_trace(trace, idle_s=load.idle_s).rate))
    adapters, slots = _adapters(trace), sizing.gpu.adapters_kept
    if adapters:
        hits = exact.hits_lru(adapters, slots)
        made.append(Figure(SLOTS, "gpu", slots, hits / len(adapters)))
    return made


def _adapters(trace: Trace) -> list[str]:
    # The base model needs no slot.
    return [request.adapter for request in trace.requests if request.adapter]


def trace_adapters(trace: Trace) -> int:
    """Adapters in a trace, the base model not counted."""
    return len(set(_adapters(trace)))


def expected(figures: Sequence[Figure]) -> tuple[float | None, float]:
    """The rate to plan with (LRU, in the memory that gives most), and one without any limit.

    None where nobody said how many prefixes fit.
    """
    plan = [_all_turns(figure) for figure in figures if figure.cache == LRU]
    unlimited = next(figure for figure in figures if figure.cache == UNLIMITED)
    return max(plan, default=None), _all_turns(unlimited)


def _all_turns(figure: Figure) -> float:
    return figure.rate if figure.sticky is None else figure.sticky
