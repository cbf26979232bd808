"""A seeded schedule of faults over a running load, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.chaos.engine_faults import ENGINES
from tests.chaos.instance import Kind
from tests.chaos.load import HUNG_S, WrongError, percentile, totals
from tests.chaos.network_faults import NETWORK
from tests.chaos.server_faults import SERVER
from tests.chaos.value_faults import SIGNED, VALUES
from tests.chaos.watch import Watch
from tests.chaos.world import Fault, Strike, World

_GONE = ("killed", "stopped", "no_client_slot")
"""The server cannot be asked meanwhile, not even by the test."""
_CLOSED = (*_GONE, "full", "read_only", "evicting")
"""Values cannot be damaged meanwhile."""

PATIENCE = 400
"""Requests within which hits must come back after a fault."""

ATTEMPTS = 3
"""A fault that meets an engine that asks Redis for nothing just then gets another chance."""


@dataclass
class Run:
    """One piece: `requests` on one engine, with its figures.

    Attributes:
        world: what is acted on.
        requests: finished ones after which no further fault begins.
        least: fewest requests under a fault and between two.
        pairs: chance of a second fault at the same time.
    """

    world: World
    requests: int
    least: int
    pairs: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)
    good_hits: int = 0

    def play(self) -> None:
        """Faults until enough requests are done; at least every kind once."""
        self._requests(2 * self.least)
        for names in self._schedule():
            self._until_struck(names)
        for name in faults(self.world.kind):  # a companion hid it each time
            if not self.struck[name]:
                self._until_struck([name])
        self.world.load.drain()

    def figures(self) -> list[str]:
        """The report, a line each."""
        load, watch = self.world.load, self.watch
        good = load.seconds.get("good", [])
        bad = [s for mood, seconds in load.seconds.items() if mood != "good" for s in seconds]
        count = totals(self.world.live)
        hits = {tier: _sum(count, f"hit_tokens {tier}") for tier in ("gpu", "host", "remote")}
        refused = {k.split()[1]: n for k, n in count.items() if k.startswith("remote_errors ")}
        rss = [round(value / 2**20) for value in watch.quarters("rss")]
        lines = {
            "requests": f"{load.done} answered, {load.cancelled} cancelled, wrong 0, hung 0",
            "faults": f"{sum(self.struck.values())}: {_words(self.struck)}",
            "tokens from tiers": f"{_words(hits)}, from Redis in good phases {self.good_hits}",
            "remote errors": _words(refused),
            "two engines": _words(self.world.seen),
            "back after a fault": _spread(self.recovery_s),
            "latency, good": _spread(good),
            "latency, under fault": _spread(bad),
            "resident MiB": f"{rss[0]} -> {rss[1]}",
            "most": ", ".join(
                f"{what} {watch.most(what)}" for what in ("descriptors", "threads", "clients")
            ),
        }
        return [f"{name}: {line}" for name, line in lines.items()]

    # ---- inside ----------------------------------------------------------------------

    def _schedule(self) -> Iterator[list[str]]:
        """Every kind in random order, again and again; sometimes two at a time."""
        rng, first = self.world.rng, True
        while first or self.world.load.done < self.requests:
            deck = list(faults(self.world.kind))
            rng.shuffle(deck)
            for name in deck:
                if not first and self.world.load.done >= self.requests:
                    return
                names = [name]
                if name not in ENGINES and rng.random() < self.pairs:
                    names.append(rng.choice(_companions(name)))
                yield names
            first = False

    def _until_struck(self, names: Sequence[str]) -> None:
        for _ in range(ATTEMPTS):
            struck = self._fault(names)
            self._good()
            self.watch.look(self.world)
            if struck:
                return
        raise WrongError(f"the fault {names} never struck")

    def _fault(self, names: Sequence[str]) -> bool:
        """Requests under one fault or two; did they (two: or may they) feel it?"""
        known = faults(self.world.kind)
        load = self.world.load
        load.mood = "+".join(names)
        with ExitStack() as stack:
            strikes = [stack.enter_context(known[name](self.world)) for name in names]
            self._requests(self.least, strikes)
            felt = len(names) > 1 or self._strikes_in_time(strikes[0])  # one may hide another
            self.struck.update(n for n, s in zip(names, strikes, strict=True) if s.struck())
        start = time.monotonic()
        while not self.world.live.remote_answers():
            load.turn()
            if time.monotonic() - start > HUNG_S:
                raise WrongError(f"Redis is well for {HUNG_S:.0f} s, the connector is not")
        self.recovery_s.append(time.monotonic() - start)
        return felt

    def _strikes_in_time(self, strike: Strike) -> bool:
        begun = self.world.load.done
        while not strike.struck() and self.world.load.done - begun <= PATIENCE // ATTEMPTS:
            self._requests(2, [strike])
        return bool(strike.struck())

    def _good(self) -> None:
        """Requests without a fault; what Redis has must be used again."""
        load = self.world.load
        load.mood = "good"
        begun, hits = load.done, self.world.live.mark()
        while not hits("hit_tokens", "remote"):
            load.forget()
            self._requests(self.least)
            if load.done - begun > PATIENCE:
                raise WrongError("no hit from Redis since the last fault is over")
        self.good_hits += hits("hit_tokens", "remote")

    def _requests(self, count: int, strikes: Sequence[Strike] = ()) -> None:
        until = self.world.load.done + count
        while self.world.load.done < until:
            self.world.load.turn()
            for strike in strikes:
                strike.turn()


def faults(kind: Kind) -> dict[str, Fault]:
    """All kinds that an engine of this kind can be put to."""
    return {**SERVER, **NETWORK, **VALUES, **ENGINES, **(SIGNED if kind.signed else {})}


def _companions(name: str) -> list[str]:
    """What may strike at the same time: kinds of another group, on a server that is there."""
    groups = (SERVER, NETWORK, VALUES)
    others = [kind for group in groups if name not in group for kind in group]
    return [
        kind for kind in others if kind not in _GONE and not (name in _CLOSED and kind in VALUES)
    ]


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _sum(counts: Counter[str], prefix: str) -> int:
    return sum(n for key, n in counts.items() if key == prefix or key.startswith(prefix + " "))


def _spread(seconds: Sequence[float]) -> str:
    ms = [round(1000 * percentile(seconds, share)) for share in (0.5, 0.99, 1.0)]
    return f"p50 {ms[0]} ms, p99 {ms[1]} ms, most {ms[2]} ms"
