"""The paper's workloads, made of the packaged traces: who asks, when, how much, what is shared.

Every workload gives each adapter a prefix that all its requests share, and sessions whose
history only grows.  Where each figure comes from stands with its function and in
docs/traces.md; what no trace tells is an assumption, and named as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elora_connector.errors import ConfigError
from elora_connector.simulator import samples, scripts
from elora_connector.simulator.arrivals import (
    Arrivals,
    client_popularity,
    from_clients,
    from_shares,
)
from elora_connector.simulator.from_rows import to_trace
from elora_connector.simulator.labels import SessionLabels
from elora_connector.simulator.popularity import (
    KINDS,
    MAX_ADAPTERS,
    Popularity,
    adapter_names,
    popularity,
)
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.scripts import Script
from elora_connector.simulator.traces.base import RawTrace, TraceRow

SERVEGEN = "servegen"
_SERVEGEN = {SERVEGEN: "", **{f"{SERVEGEN}:{name}": name for name in samples.SERVEGEN}}
POPULARITY = f"{', '.join(_SERVEGEN)}, {KINDS}"
MAX_REQUESTS = 5_000_000
MAX_CLIENTS = 10_000
"""With rates of their own; each has a row of all windows."""
_SPARE = 1.5
"""Sessions begin on after the last request that is kept, else the rate would fall off."""


@dataclass(frozen=True)
class Demand:
    """What is wanted of a workload.

    Args:
        adapters: number of adapters.
        rate: requests/s, on average.
        requests: how many; or
        duration_s: how long, in s.  Exactly one of the two.
        seed: equal seeds give equal traces.
        chunk_tokens: tokens that one label stands for.
        popularity: "servegen" (rates of real clients, with their drift and burstiness; the
            sample may be named, as in "servegen:small"), or one of `popularity.KINDS` with
            Poisson arrivals.
        max_tokens: prompt and answer together; a session ends before it would exceed them.

    Raises:
        ConfigError: a value is out of range.
    """

    adapters: int = 50
    rate: float = 2.0
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0
    chunk_tokens: int = 256
    popularity: str = SERVEGEN
    max_tokens: int = 131_072

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.duration_s is None):
            raise ConfigError("give either a number of requests or a duration")
        clients = self.popularity in _SERVEGEN
        _within("adapters", self.adapters, 1, MAX_CLIENTS if clients else MAX_ADAPTERS)
        _within("rate", self.rate, 1e-3, 1e6)
        _within("requests", self.count, 1, MAX_REQUESTS)
        _within("chunk_tokens", self.chunk_tokens, 1, 1 << 20)
        _within("max_tokens", self.max_tokens, 1024, 1 << 24)
        _within("seed", self.seed, 0, (1 << 63) - 1)

    @property
    def count(self) -> int:
        """How many requests are wanted."""
        if self.requests is not None:
            return self.requests
        return round(min((self.duration_s or 0.0) * self.rate, MAX_REQUESTS + 1.0))


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: expected {low:g} to {high:g}, found {value:g}")


class _Cast(NamedTuple):
    """The people of a workload.

    Args:
        source: the ServeGen sample that tells how busy adapters are.
        scripts: what sessions say, for a list of adapter numbers.
        turns: about how many turns a session has.
    """

    source: str
    scripts: Callable[[np.random.Generator, list[int]], list[Script]]
    turns: Callable[[], float]


_CASTS = {
    "chat": _Cast("large", scripts.chat, scripts.chat_turns),
    "translation": _Cast("mid", scripts.translation, lambda: 1.0),
    "agent": _Cast("mid", scripts.agent, scripts.agent_turns),
}
_REPLAYED: Mapping[str, Callable[[], RawTrace]] = {
    "mooncake": lambda: samples.mooncake("conversation"),
    "azure-chat": lambda: samples.azure("conv"),
    "azure-code": lambda: samples.azure("code"),
}
WORKLOADS = (*_CASTS, *_REPLAYED)


def make_workload(name: str, demand: Demand) -> Trace:
    """One of `WORKLOADS`.

    chat, translation, agent: synthetic sessions, see `scripts`.  mooncake: real
    conversations with their real prefix structure, azure-chat and azure-code: real arrivals
    and lengths without any reuse; their times are stretched to the wanted rate, and the
    trace starts again from the top where more requests are wanted than it has.

    Raises:
        ConfigError: no such workload.
    """
    if name in _CASTS:
        return _played(name, _CASTS[name], demand)
    if name in _REPLAYED:
        return _replayed(name, _REPLAYED[name](), demand)
    raise ConfigError(f"workload: expected one of {', '.join(WORKLOADS)}; found {name!r}")


def _played(name: str, cast: _Cast, demand: Demand) -> Trace:
    rng = np.random.default_rng(demand.seed)
    rate = demand.rate / cast.turns()
    sessions = math.ceil(demand.count * _SPARE / cast.turns())
    total = 0
    while total < demand.count:
        arrivals = _arrivals(cast, demand, sessions, rate, rng)
        played = [
            scripts.fitting(script, demand.max_tokens)
            for script in cast.scripts(rng, arrivals.adapter.tolist())
        ]
        total = sum(len(script.turns) for script in played)
        sessions *= 2
    return _write(name, demand, arrivals, played)


def _arrivals(
    cast: _Cast, demand: Demand, sessions: int, rate: float, rng: np.random.Generator
) -> Arrivals:
    if demand.popularity in _SERVEGEN:
        source = _SERVEGEN[demand.popularity] or cast.source
        return from_clients(source, demand.adapters, sessions, rate, rng)
    wanted = popularity(demand.popularity, demand.adapters)
    return from_shares(wanted, sessions, rate, rng)


def _write(name: str, demand: Demand, arrivals: Arrivals, played: list[Script]) -> Trace:
    """The first requests of all sessions, in order of time."""
    session = np.repeat(np.arange(len(played)), [len(script.turns) for script in played])
    turn = np.concatenate([np.arange(len(script.turns)) for script in played])
    pauses = [np.cumsum([turn.think_s for turn in script.turns]) for script in played]
    at = _paced(arrivals.at[session], np.concatenate(pauses), demand)
    order = np.argsort(at, kind="stable")[: demand.count]
    names = adapter_names(demand.adapters)
    labels = SessionLabels(demand.chunk_tokens)
    made: list[SimRequest] = []
    for index in order.tolist():
        number, place = int(session[index]), int(turn[index])
        script, adapter = played[number], names[arrivals.adapter[number]]
        now = script.turns[place]
        before = sum(t.user_tokens + t.answer_tokens for t in script.turns[:place])
        prompt = script.shared_tokens + before + now.user_tokens
        tokens = prompt + now.answer_tokens
        made.append(
            SimRequest(
                float(at[index]),
                adapter,
                number,
                place,
                now.think_s,
                labels.of(adapter, number, tokens, script.shared_tokens),
                prompt,
                now.answer_tokens,
            )
        )
    return Trace(name, demand.chunk_tokens, tuple(made))


def _paced(
    starts: NDArray[np.float64], pauses: NDArray[np.float64], demand: Demand
) -> NDArray[np.float64]:
    """Times of all turns, the beginnings stretched so that the last one wanted is on time.

    Bursts and later turns make a trace longer or shorter than requests / rate; pauses of
    users must not be stretched, so the right factor is found by repetition.
    """
    wanted = demand.count / demand.rate
    factor = 1.0
    for _ in range(30):
        last = float(np.partition(starts * factor + pauses, demand.count - 1)[demand.count - 1])
        if last <= 0 or abs(last / wanted - 1) < 1e-3:
            break
        factor *= min(max(wanted / last, 0.25), 4.0)
    at: NDArray[np.float64] = np.round(starts * factor + pauses, 6)
    return at


def _replayed(name: str, raw: RawTrace, demand: Demand) -> Trace:
    fitting = [r for r in raw.rows if r.input_tokens + r.output_tokens <= demand.max_tokens]
    if not fitting:
        raise ConfigError(f"max_tokens: no request of {name} fits {demand.max_tokens}")
    rows = _repeated(fitting, demand.count)
    stretch = demand.count / demand.rate / max(rows[-1].at, 1e-9)
    timed = [replace(row, at=round(row.at * stretch, 6)) for row in rows]
    adapters = _adapters(demand)
    raw = raw._replace(name=name, rows=timed)
    return to_trace(raw, demand.chunk_tokens, adapters, seed=demand.seed)


def _adapters(demand: Demand) -> Popularity:
    if demand.popularity in _SERVEGEN:
        return client_popularity(_SERVEGEN[demand.popularity] or "large", demand.adapters)
    return popularity(demand.popularity, demand.adapters)


def _repeated(rows: Sequence[TraceRow], count: int) -> list[TraceRow]:
    """`count` rows; after the last the first comes again, as a stranger with its own text."""
    span = rows[-1].at * (1 + 1 / len(rows))
    stride = 1 + max((max(row.blocks, default=0) for row in rows if row.blocks), default=0)
    made: list[TraceRow] = []
    for number in range(count):
        again, place = divmod(number, len(rows))
        row = rows[place]
        blocks = row.blocks and tuple(item + again * stride for item in row.blocks)
        made.append(replace(row, at=row.at + again * span, blocks=blocks))
    return made
