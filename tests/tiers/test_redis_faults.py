"""A Redis that dies, hangs, lies or is full costs hits, never a stall, a crash or wrong bytes."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elora_connector.errors import ConfigError
from elora_connector.tiers.base import Health, Outcome
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.codec import HEADER_BYTES
from elora_connector.tiers.redis import RedisTier
from tests.support.proxy import ScriptedServer, SlowProxy, blackhole_port
from tests.support.redis_server import RedisServer, free_port
from tests.tiers.values import eventually, make_spec, payload_of

pytestmark = pytest.mark.redis

SPEC = make_spec(nbytes=100_000)
PAYLOAD = bytes(payload_of(SPEC))
SHORT = {"connect_timeout_s": 0.5, "operation_timeout_s": 0.5}
HANG_S = 30.0
"""Not a timing check: a call that takes this long has lost its bound of under a second."""


class Events(list[tuple[str, str]]):
    def __call__(self, event: str, detail: str) -> None:
        self.append((event, detail))

    def of(self, event: str) -> list[str]:
        return [detail for kind, detail in self if kind == event]


def quick(**kwargs: Any) -> CircuitBreaker:
    return CircuitBreaker(first_backoff_s=0.02, max_backoff_s=0.1, **kwargs)


@pytest.fixture
def connect() -> Iterator[Callable[..., RedisTier]]:
    made: list[RedisTier] = []

    def make(url: str, **kwargs: Any) -> RedisTier:
        options = {"ttl_s": 60, "connect_timeout_s": 20.0, "operation_timeout_s": 20.0}
        made.append(RedisTier(url, **(options | {"breaker": quick} | kwargs)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def write(tier: RedisTier) -> Outcome:
    return tier.write(SPEC, memoryview(PAYLOAD)).outcome


def read(tier: RedisTier) -> tuple[Outcome, str]:
    dest = bytearray(SPEC.nbytes)
    result = tier.read_into(SPEC, memoryview(dest))
    assert result.ok == (bytes(dest) == PAYLOAD)
    return result.outcome, result.reason


def hits(tier: RedisTier) -> bool:
    return read(tier) == (Outcome.OK, "")


def calls(tier: RedisTier) -> set[tuple[Outcome, str]]:
    """Every operation once."""
    found = tier.leading([[SPEC.key]])
    stored = tier.write(SPEC, memoryview(PAYLOAD))
    kept = tier.refresh([SPEC.key])
    return {
        read(tier),
        (found.outcome, found.reason),
        (stored.outcome, stored.reason),
        (kept.outcome, kept.reason),
    }


# Case 13: the server dies.


def test_killed_and_restarted(server: RedisServer, connect: Callable[..., RedisTier]) -> None:
    events = Events()
    tier = connect(server.url, on_event=events)
    assert write(tier) is Outcome.OK
    server.kill()
    assert read(tier) == (Outcome.ERROR, "connection")
    assert tier.health() is not Health.CLOSED
    assert calls(tier) == {(Outcome.ERROR, "breaker")}
    server.start()
    assert eventually(lambda: tier.health() is Health.CLOSED)
    assert read(tier) == (Outcome.MISS, "")
    assert write(tier) is Outcome.OK
    assert hits(tier)
    states = events.of("breaker")
    assert (states[0], states[-2], states[-1]) == ("open", "half_open", "closed")
    assert "connection" in events.of("error")


def test_a_restart_between_two_calls_is_not_even_noticed(
    server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    events = Events()
    tier = connect(server.url, on_event=events)
    assert write(tier) is Outcome.OK
    server.restart()
    assert read(tier) == (Outcome.MISS, "")
    assert events == []


def test_dropped_idle_connections_are_replaced(
    server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    tier = connect(server.url)
    assert write(tier) is Outcome.OK
    with server.client() as admin:
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert hits(tier)


# Case 14: it accepts but does not answer.


def test_paused_server(server: RedisServer, connect: Callable[..., RedisTier]) -> None:
    tier = connect(server.url, **SHORT)
    assert eventually(lambda: write(tier) is Outcome.OK)
    server.pause()
    start = time.monotonic()
    assert read(tier) == (Outcome.ERROR, "timeout")
    for _ in range(50):
        assert calls(tier) == {(Outcome.ERROR, "breaker")}
    assert time.monotonic() - start < HANG_S
    server.resume()
    assert eventually(lambda: hits(tier))


def test_start_while_paused(server: RedisServer, connect: Callable[..., RedisTier]) -> None:
    server.pause()
    start = time.monotonic()
    tier = connect(server.url, connect_timeout_s=0.5, operation_timeout_s=300.0)
    assert time.monotonic() - start < HANG_S
    assert tier.health() is not Health.CLOSED
    server.resume()
    assert eventually(lambda: write(tier) is Outcome.OK)
    assert hits(tier)


def test_start_at_a_blackhole(connect: Callable[..., RedisTier]) -> None:
    with blackhole_port() as port:
        start = time.monotonic()
        tier = connect(f"redis://127.0.0.1:{port}/0", **SHORT)
        assert calls(tier) == {(Outcome.ERROR, "breaker")}
        with pytest.raises(ConfigError, match=r"no answer within the timeout"):
            connect(f"redis://127.0.0.1:{port}/0", fail_open=False, **SHORT)
        assert time.monotonic() - start < HANG_S


def test_start_before_the_server(server: RedisServer, connect: Callable[..., RedisTier]) -> None:
    server.kill()
    with pytest.raises(ConfigError, match=r"redis://127\.0\.0\.1.*[Rr]efused"):
        connect(server.url, fail_open=False)
    tier = connect(server.url)
    assert calls(tier) == {(Outcome.ERROR, "breaker")}
    server.start()
    assert eventually(lambda: write(tier) is Outcome.OK)


def test_the_deadline_bounds_a_trickle(
    shared_server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    with SlowProxy(shared_server.port) as proxy:
        tier = connect(proxy.url, **SHORT)
        assert eventually(lambda: write(tier) is Outcome.OK)
        # 100 bytes a second would take a quarter of an hour, and no single recv is slow.
        proxy.trickle, proxy.latency_ms = True, 10.0
        start = time.monotonic()
        assert read(tier) == (Outcome.ERROR, "timeout")
        assert time.monotonic() - start < HANG_S
    with shared_server.client() as admin:
        admin.flushall()


def test_silence_in_the_middle(
    shared_server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    with SlowProxy(shared_server.port) as proxy:
        tier = connect(proxy.url, **SHORT)
        assert eventually(lambda: write(tier) is Outcome.OK)
        proxy.blackhole = True
        assert read(tier) == (Outcome.ERROR, "timeout")
        proxy.blackhole = False
        assert eventually(lambda: hits(tier))


@pytest.mark.parametrize("cut", [0, 3, 500, HEADER_BYTES + 9, HEADER_BYTES + 50_000])
def test_cut_in_the_middle(
    shared_server: RedisServer, connect: Callable[..., RedisTier], cut: int
) -> None:
    with SlowProxy(shared_server.port) as proxy:
        direct, tier = connect(shared_server.url), connect(proxy.url)
        assert write(direct) is Outcome.OK
        with shared_server.client() as admin:
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        proxy.cut_after = len(b"+OK\r\n") + cut
        outcome, reason = read(tier)
        assert (outcome, reason) == (Outcome.ERROR, "connection")
        proxy.cut_after = None
        assert eventually(lambda: hits(tier))


def test_latency(shared_server: RedisServer, connect: Callable[..., RedisTier]) -> None:
    with SlowProxy(shared_server.port, latency_ms=300.0) as proxy:
        tier = connect(proxy.url, connect_timeout_s=60.0, operation_timeout_s=60.0)
        assert write(tier) is Outcome.OK
        assert hits(tier)
        assert proxy.connections == 1
        before = proxy.turns
        # Few enough for one TCP segment: the proxy counts answers between two of them as turns.
        groups = [[SPEC.key, SPEC.key]] + [[make_spec(i).key] for i in range(1, 100)]
        assert tier.leading(groups).count == 1
        assert proxy.turns - before == 1, "one round trip for the whole prompt"
        assert tier.refresh([key for group in groups for key in group]).ok
        assert proxy.turns - before == 2
    with shared_server.client() as admin:
        admin.flushall()


# Cases 16: the server is there but refuses.


def test_full_without_eviction(connect: Callable[..., RedisTier]) -> None:
    with RedisServer(maxmemory="4mb", policy="noeviction") as full:
        tier = connect(full.url)
        assert write(tier) is Outcome.OK
        results = [
            tier.write(spec, memoryview(payload_of(spec)))
            for spec in (make_spec(i, nbytes=200_000) for i in range(1, 40))
        ]
        assert {(r.outcome, r.reason) for r in results} == {
            (Outcome.OK, ""),
            (Outcome.ERROR, "oom"),
        }
        assert hits(tier), "reads go on"
        assert tier.health() is Health.CLOSED


def test_full_with_eviction_leaves_holes_and_no_errors(connect: Callable[..., RedisTier]) -> None:
    with RedisServer(maxmemory="6mb", policy="allkeys-lru") as small:
        tier = connect(small.url)
        specs = [make_spec(i, nbytes=200_000) for i in range(60)]
        assert all(tier.write(spec, memoryview(payload_of(spec))).ok for spec in specs)
        groups = [[spec.key] for spec in specs]
        alone = [tier.leading([group]).count for group in groups]
        assert 0 in alone
        assert tier.leading(groups).count == alone.index(0)
        for spec, there in zip(specs, alone, strict=True):
            result = tier.read_into(spec, memoryview(bytearray(spec.nbytes)))
            assert result.outcome is (Outcome.OK if there else Outcome.MISS)


def test_read_only_replica(server: RedisServer, connect: Callable[..., RedisTier]) -> None:
    tier = connect(server.url)
    assert write(tier) is Outcome.OK
    with server.client() as admin:
        admin.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
    assert tier.write(make_spec(1), memoryview(payload_of(make_spec(1)))).reason == "readonly"
    assert hits(tier)
    assert tier.health() is Health.CLOSED


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "loading"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "loading"),
        (b"-ERR max number of clients reached\r\n", "connection"),
        (b"-NOAUTH Authentication required.\r\n", "auth"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "reply"),
        (b"$5\r\nhello\r\n", "reply"),
        (b":many\r\n", "reply"),
        (b"x" * 100_000, "reply"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "tls"),
    ],
)
def test_servers_that_are_no_use(
    connect: Callable[..., RedisTier], answer: bytes, reason: str
) -> None:
    events = Events()
    with ScriptedServer(answer) as stub:
        tier = connect(f"redis://127.0.0.1:{stub.port}/0", on_event=events)
        assert set(events.of("error")) == {reason}
        assert calls(tier) == {(Outcome.ERROR, "breaker")}


@pytest.mark.parametrize(
    "answer", [b"$-2\r\n", b"$x\r\n", b"+QUEUED\r\n", b"*1\r\n:1\r\n", b"$3\r\nab"]
)
def test_nonsense_in_place_of_a_value(connect: Callable[..., RedisTier], answer: bytes) -> None:
    with ScriptedServer(b"+OK\r\n") as stub:
        tier = connect(f"redis://127.0.0.1:{stub.port}/0", operation_timeout_s=0.5)
        assert tier.health() is Health.CLOSED
        stub.answer = answer
        outcome, reason = read(tier)
        assert outcome in {Outcome.ERROR, Outcome.BAD}
        assert reason in {"reply", "timeout", "truncated", "magic"}


def test_an_announced_size_allocates_nothing(connect: Callable[..., RedisTier]) -> None:
    with ScriptedServer(b"+OK\r\n") as stub:
        tier = connect(f"redis://127.0.0.1:{stub.port}/0")
        stub.answer = b"$99999999999999\r\n" + b"x" * HEADER_BYTES
        assert read(tier) == (Outcome.BAD, "magic")


def test_a_key_of_another_type(
    shared_server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    tier = connect(shared_server.url)
    with shared_server.client() as admin:
        admin.flushall()
        admin.rpush(SPEC.key, "a")
        assert read(tier) == (Outcome.BAD, "magic")
        assert admin.type(SPEC.key) == b"list"
        admin.flushall()
    assert read(tier) == (Outcome.MISS, "")


def test_deletions_are_limited(
    shared_server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    events = Events()
    tier = connect(shared_server.url, delete_limit_per_minute=2, on_event=events)
    with shared_server.client() as admin:
        for _ in range(4):
            admin.flushall()
            assert write(tier) is Outcome.OK
            admin.setrange(SPEC.key, HEADER_BYTES + 5, b"\x00\x01\x02\x03")
            assert read(tier) == (Outcome.BAD, "checksum")
        assert admin.exists(SPEC.key) == 1
        admin.flushall()
    assert events.of("delete") == ["done", "done", "limited", "limited"]


# Threads, processes, closing.


def test_all_connections_in_use(
    shared_server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    tier = connect(shared_server.url, max_connections=1, operation_timeout_s=0.5)
    with tier._pool.link():
        assert read(tier) == (Outcome.ERROR, "busy")
    assert tier.health() is Health.CLOSED
    assert eventually(lambda: read(tier) == (Outcome.MISS, ""))


def test_connections_are_named_and_bounded(
    server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    tier = connect(server.url, max_connections=3)
    write(tier)
    threads = [threading.Thread(target=lambda: [read(tier) for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with server.client() as admin:
        names = [client["name"] for client in admin.client_list()]
    assert 1 <= names.count("elora") <= 3


def test_close_wakes_a_waiting_thread(
    server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    tier = connect(server.url, operation_timeout_s=600.0)
    server.pause()
    results: list[tuple[Outcome, str]] = []
    waiting = threading.Thread(target=lambda: results.append(read(tier)), daemon=True)
    waiting.start()
    assert eventually(lambda: bool(tier._pool._busy))
    tier.close()
    waiting.join(HANG_S)
    assert results
    assert results[0][0] is Outcome.ERROR


def test_close_ends_the_probe(connect: Callable[..., RedisTier]) -> None:
    tier = connect(f"redis://127.0.0.1:{free_port()}/0")
    prober = tier._prober
    assert prober is not None
    tier.close()
    assert not prober.is_alive()


def test_a_forked_child_has_its_own_connections(
    server: RedisServer, connect: Callable[..., RedisTier]
) -> None:
    tier = connect(server.url)
    assert write(tier) is Outcome.OK
    # Another thread of the parent may hold any lock at this moment.
    with tier._lock, tier._pool._lock, tier._breaker._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(int(HANG_S))
            os._exit(0 if all(hits(tier) for _ in range(3)) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert hits(tier)
    with server.client() as admin:
        names = [client["name"] for client in admin.client_list()]
    assert names.count("elora") == 1, "the parent's connection is still the one it had"


def test_one_log_line_per_cause(
    server: RedisServer, connect: Callable[..., RedisTier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tier = connect(server.url)
    server.kill()
    read(tier)
    assert eventually(lambda: tier._breaker._backoff >= 0.1)
    for _ in range(100):
        calls(tier)
    lines = [r for r in caplog.records if r.name.startswith("elora_connector")]
    assert len(lines) == 1
    assert "[connection]" in lines[0].getMessage()
    assert str(server.port) in lines[0].getMessage()
