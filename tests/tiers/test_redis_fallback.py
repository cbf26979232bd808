"""With a redis-py that works in another way the tier does too, only slower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.connection import AbstractConnection, Connection

from elora_connector.tiers import redis_dial
from elora_connector.tiers.base import Health, Outcome
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.codec import HEADER_BYTES
from elora_connector.tiers.redis import RedisTier
from elora_connector.tiers.redis_link import Link
from elora_connector.tiers.redis_plain import PlainLink
from tests.support.fake_redis import FakeRedis
from tests.support.proxy import SlowProxy
from tests.support.redis_server import RedisServer
from tests.tiers.values import eventually, make_spec, payload_of

pytestmark = pytest.mark.redis

SPEC = make_spec(nbytes=100_000)
PAYLOAD = payload_of(SPEC)
Connect = Callable[..., RedisTier]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[RedisTier] = []

    def make(url: str, **kwargs: Any) -> RedisTier:
        options: dict[str, Any] = {
            "ttl_s": 60,
            "connect_timeout_s": 20.0,
            "operation_timeout_s": 20.0,
            "breaker": lambda **more: CircuitBreaker(first_backoff_s=0.02, **more),
        }
        made.append(RedisTier(url, **(options | kwargs)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def tested_anew() -> Iterator[None]:
    redis_dial.inside_is_known.cache_clear()
    yield
    redis_dial.inside_is_known.cache_clear()


def read(tier: RedisTier) -> tuple[Outcome, str]:
    dest = bytearray(SPEC.nbytes)
    result = tier.read_into(SPEC, memoryview(dest))
    assert result.ok == (dest == PAYLOAD)
    return result.outcome, result.reason


def write(tier: RedisTier) -> bool:
    return tier.write(SPEC, memoryview(PAYLOAD)).ok


def kinds(tier: RedisTier) -> set[type[Link]]:
    return {type(link) for link in tier._pool._idle}


def test_the_installed_redis_py_is_known(
    shared_server: RedisServer, connect: Connect, tested_anew: None
) -> None:
    assert redis_dial.inside_is_known()
    assert kinds(connect(shared_server.url)) == {Link}


def _connects_by_itself(self: Connection, *_: Any, **__: Any) -> None:
    """A redis-py that has renamed `_connect`, and calls the new one."""
    self._sock = Connection._connect(self)  # type: ignore[no-untyped-call]
    self.on_connect()  # type: ignore[no-untyped-call]


def _needs_more(self: Connection, *_: Any, **__: Any) -> Any:
    """A redis-py that wants of its socket what a `Link` does not have."""
    raise AttributeError("no attribute 'something_new'")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [("connect", _connects_by_itself), ("on_connect_check_health", _needs_more)],
)
def test_one_warning_where_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tested_anew: None,
    name: str,
    replacement: Any,
) -> None:
    monkeypatch.setattr(AbstractConnection, name, replacement)
    assert not redis_dial.inside_is_known()
    assert not redis_dial.inside_is_known()
    (record,) = [r for r in caplog.records if r.name == redis_dial.__name__]
    assert record.levelno == logging.WARNING
    assert "slower" in record.getMessage()


def test_a_tier_over_a_renamed_inside_works(
    monkeypatch: pytest.MonkeyPatch,
    shared_server: RedisServer,
    connect: Connect,
    tested_anew: None,
) -> None:
    monkeypatch.setattr(AbstractConnection, "connect", _connects_by_itself)
    tier = connect(shared_server.url)
    assert kinds(tier) == {PlainLink}
    assert write(tier)
    assert read(tier) == (Outcome.OK, "")
    with shared_server.client() as admin:
        admin.flushall()


@pytest.mark.parametrize(
    ("reply", "outcome", "reason"),
    [
        (b"-MOVED 42 127.0.0.1:7001\r\n", Outcome.ERROR, "moved"),
        (b"-ASK 42 127.0.0.1:7001\r\n", Outcome.ERROR, "ask"),
        (b"-TRYAGAIN Multiple keys request\r\n", Outcome.ERROR, "cluster"),
        (b"-CLUSTERDOWN Hash slot not served\r\n", Outcome.ERROR, "cluster"),
        (b"-READONLY You can't write against a replica.\r\n", Outcome.ERROR, "readonly"),
        (b"-OOM command not allowed.\r\n", Outcome.ERROR, "oom"),
        (b"-NOPERM no permissions\r\n", Outcome.ERROR, "auth"),
        (b"-NOAUTH Authentication required.\r\n", Outcome.ERROR, "auth"),
        (b"-LOADING Redis is loading\r\n", Outcome.ERROR, "loading"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", Outcome.ERROR, "loading"),
        (b"-WRONGTYPE Operation against a key\r\n", Outcome.BAD, "magic"),
        (b"-ERR whatever\r\n", Outcome.ERROR, "reply"),
        (b"*1\r\n:1\r\n", Outcome.ERROR, "reply"),
    ],
)
def test_replies_mean_the_same(
    fall_back: None, connect: Connect, reply: bytes, outcome: Outcome, reason: str
) -> None:
    with FakeRedis(lambda _: reply) as fake:
        assert read(connect(fake.url)) == (outcome, reason)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"-MOVED 42 127.0.0.1:7001\r\n", "moved"),
        (b"-ASK 42 127.0.0.1:7001\r\n", "ask"),
        (b"-READONLY You can't write against a replica.\r\n", "readonly"),
        (b"-OOM command not allowed.\r\n", "oom"),
        (b"-LOADING Redis is loading\r\n", "loading"),
    ],
)
@pytest.mark.parametrize("path", ["data path", "public methods"])
def test_replies_to_a_write_and_a_look_up(
    connect: Connect, request: pytest.FixtureRequest, path: str, reply: bytes, reason: str
) -> None:
    if path == "public methods":
        request.getfixturevalue("fall_back")
    with FakeRedis(lambda _: reply) as fake:
        end = connect(fake.url).write(SPEC, memoryview(PAYLOAD))
        assert (end.outcome, end.reason) == (Outcome.ERROR, reason)
        found = connect(fake.url).leading([[SPEC.key]])
        assert (found.outcome, found.reason, found.count) == (Outcome.ERROR, reason, 0)
        there = "127.0.0.1:7001" if reason in {"moved", "ask"} else ""
        assert end.instead == found.instead == there


def test_no_more_is_asked_for_than_the_value_may_have(
    fall_back: None, shared_server: RedisServer, connect: Connect
) -> None:
    tier = connect(shared_server.url)
    assert write(tier)
    with shared_server.client() as admin:
        admin.append(SPEC.key, b"x" * 1_000_000)
        before = admin.info("stats")["total_net_output_bytes"]
        assert read(tier) == (Outcome.BAD, "length")
        sent = admin.info("stats")["total_net_output_bytes"] - before
        # The value, and what INFO itself says.
        assert sent < HEADER_BYTES + SPEC.nbytes + 20_000
        admin.flushall()


@pytest.mark.parametrize("cut", [0, 500, 50_000])
def test_a_cut_connection_is_replaced(
    fall_back: None, shared_server: RedisServer, connect: Connect, cut: int
) -> None:
    assert write(connect(shared_server.url))
    greeting = len(b"+OK\r\n+PONG\r\n")
    with SlowProxy(shared_server.port, cut_after=greeting + cut) as proxy:
        tier = connect(proxy.url)
        proxy.cut_after = None
        assert read(tier) == (Outcome.OK, "")
        assert tier.health() is Health.CLOSED
    with shared_server.client() as admin:
        admin.flushall()


def test_a_silent_server_costs_a_timeout_and_comes_back(
    fall_back: None, server: RedisServer, connect: Connect
) -> None:
    tier = connect(server.url, connect_timeout_s=0.5, operation_timeout_s=0.5)
    assert eventually(lambda: write(tier))
    server.pause()
    assert read(tier) == (Outcome.ERROR, "timeout")
    assert read(tier) == (Outcome.ERROR, "breaker")
    server.resume()
    assert eventually(lambda: read(tier) == (Outcome.OK, ""))
