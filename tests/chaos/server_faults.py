"""The server dies, stops, forgets, refuses, is full, or demotes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from tests.chaos.world import Fault, Strike, World, lose


@contextmanager
def killed(world: World) -> Iterator[Strike]:
    """kill -9; it comes back with an empty data set when the fault is over."""
    errors = world.errors()
    world.store.kill()
    try:
        yield Strike(lambda: errors("connection") > 0)
    finally:
        world.store.start()


@contextmanager
def restarted(world: World) -> Iterator[Strike]:
    """kill -9 and back at once, empty, again and again while requests are under way."""
    lost = []

    def turn() -> None:
        if not lost or world.rng.random() < 0.01:
            with world.admin() as admin:
                before = admin.dbsize()
            world.store.restart()
            lost.append(before)

    turn()
    yield Strike(lambda: sum(lost) > 0, turn)


@contextmanager
def stopped(world: World) -> Iterator[Strike]:
    """SIGSTOP, then SIGCONT: connections stay, answers do not come."""
    errors = world.errors()
    world.store.pause()
    try:
        yield Strike(lambda: errors("timeout") > 0)
    finally:
        world.store.resume()


@contextmanager
def hiccups(world: World) -> Iterator[Strike]:
    """CLIENT PAUSE for less than a timeout: slow, not down."""
    with world.admin() as admin:
        pauses = []

        def turn() -> None:
            if world.rng.random() < 0.1:
                admin.execute_command("CLIENT", "PAUSE", 60)
                pauses.append(1)

        yield Strike(lambda: len(pauses) > 2, turn)


@contextmanager
def flushed(world: World) -> Iterator[Strike]:
    """FLUSHALL at any moment, also between a look-up and its read."""
    lost = []
    with world.admin() as admin:

        def turn() -> None:
            if not lost or world.rng.random() < 0.02:
                lost.append(admin.dbsize())
                admin.flushall()

        turn()
        yield Strike(lambda: sum(lost) > 0, turn)


@contextmanager
def holes(world: World) -> Iterator[Strike]:
    """Keys go one by one, as an evicting Redis would: parents before children too."""
    lost = []
    with world.admin() as admin:

        def turn() -> None:
            if world.rng.random() < 0.05:
                lost.append(lose(world, admin, 0.1))

        yield Strike(lambda: sum(lost) > 0, turn)


@contextmanager
def evicting(world: World) -> Iterator[Strike]:
    """maxmemory below what is there, with allkeys-lru."""
    with world.admin() as admin, _limit(admin, "allkeys-lru", 0.6):
        before = admin.info("stats")["evicted_keys"]
        yield Strike(lambda: admin.info("stats")["evicted_keys"] > before)


@contextmanager
def full(world: World) -> Iterator[Strike]:
    """maxmemory below what is there, with noeviction: writes are refused, reads are not."""
    errors = world.errors()
    with world.admin() as admin:
        lose(world, admin, 0.5)
        with _limit(admin, "noeviction", 0.5):
            yield Strike(lambda: errors("oom") > 0)


@contextmanager
def read_only(world: World) -> Iterator[Strike]:
    """It was made a replica of a primary that nobody reaches."""
    errors = world.errors()
    with world.admin() as admin:
        lose(world, admin, 0.5)
        admin.execute_command("REPLICAOF", "127.0.0.1", 1)
        try:
            yield Strike(lambda: errors("readonly") > 0)
        finally:
            admin.execute_command("REPLICAOF", "NO", "ONE")


@contextmanager
def no_client_slot(world: World) -> Iterator[Strike]:
    """maxclients reached: connections are ended, new ones refused."""
    with world.admin() as admin:
        limit = admin.config_get("maxclients")["maxclients"]
        before = admin.info("stats")["rejected_connections"]
        admin.config_set("maxclients", 1)
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        try:
            yield Strike(lambda: admin.info("stats")["rejected_connections"] > before)
        finally:
            admin.config_set("maxclients", limit)


@contextmanager
def disconnected(world: World) -> Iterator[Strike]:
    """CLIENT KILL at any moment."""
    ended = []
    with world.admin() as admin:

        def turn() -> None:
            if world.rng.random() < 0.1:
                ended.append(
                    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                )

        yield Strike(lambda: sum(ended) > 2, turn)


@contextmanager
def _limit(admin: redis.Redis, policy: str, share: float) -> Iterator[None]:
    used = admin.info("memory")["used_memory"]
    admin.config_set("maxmemory-policy", policy)
    admin.config_set("maxmemory", int(share * used))
    try:
        yield
    finally:
        admin.config_set("maxmemory", 0)


SERVER: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        killed,
        restarted,
        stopped,
        hiccups,
        flushed,
        holes,
        evicting,
        full,
        read_only,
        no_client_slot,
        disconnected,
    )
}
