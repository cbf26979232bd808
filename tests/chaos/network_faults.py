"""The way to the server is slow, narrow, cut, or changes what it carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.chaos.world import Fault, Strike, World


def _weather(counter: str, least: int, **faults: Any) -> Fault:
    """Struck once the proxy counted it that often."""

    @contextmanager
    def fault(world: World) -> Iterator[Strike]:
        before = world.net.counts()[counter]
        with world.net.weather(**faults):
            yield Strike(lambda: world.net.counts()[counter] - before >= least)

    return fault


@contextmanager
def _timing_out(world: World, fault: AbstractContextManager[Strike]) -> Iterator[Strike]:
    """A network so bad that operations run out of time."""
    errors = world.errors()
    with fault as strike:
        yield Strike(lambda: strike.struck() and errors("timeout") > 0)


def _with_timeouts(fault: Fault) -> Fault:
    return lambda world: _timing_out(world, fault(world))


NETWORK: dict[str, Fault] = {
    "late_20_ms": _weather("delayed", 10, latency_ms=20),
    "late_300_ms": _with_timeouts(_weather("delayed", 1, latency_ms=300)),
    "narrow": _weather("throttled", 10, bytes_per_s=2_000_000),
    "trickle": _with_timeouts(_weather("throttled", 1, bytes_per_s=50_000)),
    "cut_in_value": _weather("cut", 2, cut=0.3),
    "flipped_on_the_wire": _weather("flipped", 3, flip=0.3),
    "garbled": _weather("garbled", 3, garble=0.3),
    "repeated": _weather("repeated", 3, repeat=0.3),
    "blackhole": _with_timeouts(_weather("swallowed", 1, blackhole=True)),
    "refusing": _weather("refused", 1, refuse=True, cut=0.5),
}
