"""What the faults of a chaos run act on, and how a fault says that it struck."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import redis

from tests.chaos.instance import Instance, Kind
from tests.chaos.load import Load
from tests.chaos.questions import Question
from tests.support.bad_network import BadNetwork
from tests.support.engine import Engine
from tests.support.redis_server import RedisServer


@dataclass
class World:
    """One engine that is asked, a second one, one Redis, a proxy before each engine.

    Attributes:
        net, second_net: the proxies.
        new_second: starts another second engine, which takes its time.
        seen: what else the report tells.
    """

    store: RedisServer
    net: BadNetwork
    second_net: BadNetwork
    live: Engine
    load: Load
    pool: Sequence[Question]
    rng: random.Random
    kind: Kind
    second: Instance
    new_second: Callable[[], Instance]
    seen: dict[str, int] = field(default_factory=dict)

    def end(self) -> None:
        """Leave no second engine behind."""
        self.second.kill()

    def errors(self) -> Callable[..., int]:
        """Remote errors from now on, of both sides; `(*reasons)` or all."""
        marks = (self.live.mark(), self.live.mark_worker())

        def since(*reasons: str) -> int:
            if not reasons:
                return sum(mark("remote_errors") for mark in marks)
            return sum(mark("remote_errors", reason) for mark in marks for reason in reasons)

        return since

    def met(self, what: str, times: int = 1) -> None:
        """Note something that the report tells."""
        self.seen[what] = self.seen.get(what, 0) + times

    @contextmanager
    def admin(self) -> Iterator[redis.Redis]:
        """A connection of one's own, past the proxies."""
        with self.store.client(socket_timeout=30) as client:
            yield client


@dataclass
class Strike:
    """A fault in effect.

    Attributes:
        struck: has it had an effect yet?
        turn: called after every engine step.
    """

    struck: Callable[[], bool]
    turn: Callable[[], None] = lambda: None


Fault = Callable[[World], AbstractContextManager[Strike]]
"""Entered: it begins; left: it is over and nothing of it remains but lost data."""


def keys(admin: redis.Redis) -> list[bytes]:
    """Our keys, in a stable order."""
    return sorted(admin.scan_iter(match="elora:*", count=1000))


def sample(world: World, admin: redis.Redis, share: float) -> list[bytes]:
    """A part of our keys, at random, at least two if there are."""
    found = keys(admin)
    return world.rng.sample(found, min(len(found), max(2, int(share * len(found)))))


def lose(world: World, admin: redis.Redis, share: float) -> int:
    """Delete a part of our keys; returns how many."""
    gone = sample(world, admin, share)
    return int(admin.delete(*gone)) if gone else 0
