"""Two engines write the same chunks at once; one is killed while it stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import redis

from elora_connector.core.keys import root_key
from elora_connector.core.types import Identity
from elora_connector.tiers.codec import parse_header
from tests.chaos.instance import CHUNK_BYTES
from tests.chaos.load import HUNG_S, WrongError
from tests.chaos.world import Fault, Strike, World, keys

TOGETHER = 8
WRITTEN = 5 * CHUNK_BYTES
"""After about so much the engine is killed inside a value."""


@contextmanager
def twins(world: World) -> Iterator[Strike]:
    """Both compute the same prompts, which neither has, and store them.

    Struck when the server refused a SET because the other engine's was first.  Tried again
    where that did not come about: a writer may still stand back from an earlier refusal.
    """
    twice = []
    with world.admin() as admin:

        def turn() -> None:
            if not sum(twice):
                twice.append(_write_twice(world, admin))

        turn()
        yield Strike(lambda: sum(twice) > 0, turn)


@contextmanager
def killed_engine(world: World) -> Iterator[Strike]:
    """kill -9 of the second engine inside a value; then the first one reads what it left."""
    questions = world.rng.sample(list(world.pool), TOGETHER)
    with world.admin() as admin:
        _begin_anew(world, admin)
        with world.second_net.weather(hold=WRITTEN):
            world.second.start(questions)
            _await(lambda: _half_a_value(admin))
            world.second.kill()
        world.second = world.new_second()
        left = keys(admin)
        _check_left(admin, left)
        hits = world.live.mark()
        world.load.ask(questions)
        read = hits("hit_tokens", "remote")
        world.met("tokens read that a killed engine had written", read)
        yield Strike(lambda: read > 0)


def _write_twice(world: World, admin: redis.Redis) -> int:
    """How many chunks were written by both engines."""
    questions = world.rng.sample(list(world.pool), TOGETHER)
    _begin_anew(world, admin)
    with world.second_net.weather(latency_ms=30), world.net.weather(latency_ms=30):
        world.second.start(questions)
        world.load.ask(questions)
        world.second.wait()
    world.live.settle()
    sets = admin.info("commandstats").get("cmdstat_set", {}).get("calls", 0)
    twice = int(sets - admin.dbsize())
    world.met("chunks written by both engines", twice)
    return twice


def _begin_anew(world: World, admin: redis.Redis) -> None:
    """Neither this engine nor Redis has anything; the second one forgets when it starts."""
    world.load.forget()
    admin.flushall()
    admin.config_resetstat()


def _half_a_value(admin: redis.Redis) -> bool:
    """Has the server a part of a command, and waits for the rest?"""
    return any(
        client["name"] == "elora" and int(client["qbuf"]) > 4096 for client in admin.client_list()
    )


def _await(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HUNG_S
    while not condition():
        if time.monotonic() > end:
            raise WrongError("the second engine stored nothing")
        time.sleep(0.002)


def _check_left(admin: redis.Redis, left: Sequence[bytes]) -> None:
    """Whole values only, and no chunk without its parent."""
    headers = [parse_header(admin.getrange(key, 0, 1023)) for key in left]
    there = {header.chunk for header in headers}
    for key, header in zip(left, headers, strict=True):
        identity = Identity(header.name.decode(), header.digest)
        root = root_key(header.namespace, identity, None)
        if header.parent not in there and header.parent != root:
            raise WrongError(f"{key!r} was written before its parent")
        if admin.strlen(key) != 1024 + header.nbytes:
            raise WrongError(f"{key!r} holds a part of a value")


ENGINES: dict[str, Fault] = {"twins": twins, "killed_engine": killed_engine}
