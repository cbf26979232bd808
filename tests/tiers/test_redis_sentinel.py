"""Sentinel names the primary: a real fail-over is misses, then hits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elora_connector.errors import ConfigError
from elora_connector.tiers.base import Health, Outcome
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.redis import RedisTier
from tests.support.proxy import blackhole_port
from tests.support.redis_groups import SentinelServers
from tests.support.redis_server import RedisServer, find_redis_server, free_port
from tests.tiers.values import eventually, make_spec, payload_of

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(find_redis_server() is None, reason="no redis-server here"),
]

SPEC, OTHER = make_spec(0), make_spec(1)
PASSWORD = "s3cr3t-Pa55!"
Connect = Callable[..., RedisTier]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[RedisTier] = []

    def quick(**kwargs: Any) -> CircuitBreaker:
        return CircuitBreaker(first_backoff_s=0.02, max_backoff_s=0.1, **kwargs)

    def make(url: str, **kwargs: Any) -> RedisTier:
        options = {"ttl_s": 60, "connect_timeout_s": 20.0, "operation_timeout_s": 20.0}
        made.append(RedisTier(url, **(options | {"breaker": quick} | kwargs)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def put(tier: RedisTier, spec: Any = SPEC) -> tuple[Outcome, str]:
    end = tier.write(spec, memoryview(payload_of(spec)))
    return end.outcome, end.reason


def read(tier: RedisTier, spec: Any = SPEC) -> tuple[Outcome, str]:
    dest = bytearray(spec.nbytes)
    end = tier.read_into(spec, memoryview(dest))
    assert end.ok == (dest == payload_of(spec))
    return end.outcome, end.reason


def test_a_fail_over_is_misses_then_hits(connect: Connect) -> None:
    with SentinelServers() as servers:
        tier = connect(servers.url, fail_open=False)
        assert put(tier) == (Outcome.OK, "")
        with servers.primary.client() as client:
            assert client.execute_command("WAIT", 1, 5000) == 1
        servers.primary.kill()
        assert read(tier) == (Outcome.ERROR, "connection")
        assert read(tier) == put(tier, OTHER) == (Outcome.ERROR, "breaker")
        assert eventually(lambda: tier.health() is Health.CLOSED)
        assert servers.named() == servers.replica.port
        assert read(tier) == (Outcome.OK, ""), "the replica has it"
        assert put(tier, OTHER) == (Outcome.OK, "")

        # The old primary comes back as a replica, and a Sentinel less changes nothing.
        servers.primary.start()
        servers.sentinel.kill()
        assert read(tier) == read(tier, OTHER) == (Outcome.OK, "")
        assert tier.health() is Health.CLOSED


def test_a_planned_fail_over_costs_at_most_some_misses(connect: Connect) -> None:
    with SentinelServers() as servers:
        tier = connect(servers.url)
        assert put(tier) == (Outcome.OK, "")
        with servers.primary.client() as client:
            assert client.execute_command("WAIT", 1, 5000) == 1
        servers.fail_over()
        seen = set()

        def at_the_new_one() -> bool:
            spec = make_spec(len(seen) + 1)
            seen.add(put(tier, spec))
            with servers.replica.client() as client:
                return bool(client.exists(spec.key)) and servers.named() == servers.replica.port

        assert eventually(at_the_new_one)
        assert {reason for _, reason in seen} <= {"", "exists", "readonly", "connection", "breaker"}
        assert eventually(lambda: read(tier) == (Outcome.OK, ""))


@pytest.mark.parametrize("kind", ["data path", "public methods"])
def test_a_write_that_a_former_primary_refuses_goes_to_the_new_one(
    connect: Connect, server: RedisServer, request: pytest.FixtureRequest, kind: str
) -> None:
    """Its connections are still open, so only READONLY tells; nothing is lost but a moment."""
    if kind == "public methods":
        request.getfixturevalue("fall_back")
    with SentinelServers() as servers:
        tier = connect(servers.url, fail_open=False)
        assert put(tier) == (Outcome.OK, "")
        with servers.sentinel.client() as client:
            client.sentinel_remove(servers.service)
            client.sentinel_monitor(servers.service, "127.0.0.1", server.port, 1)
        with servers.primary.client() as client:
            client.replicaof("127.0.0.1", server.port)  # type: ignore[no-untyped-call]
        assert put(tier, OTHER) == (Outcome.OK, "")
        assert tier.health() is Health.CLOSED
        with servers.primary.client() as client:
            assert client.info("errorstats")["errorstat_READONLY"]["count"] == 1
    with server.client() as client:
        assert client.keys() == [OTHER.key.encode()]


def test_sentinels_that_do_not_answer_cost_their_share_once(connect: Connect) -> None:
    with SentinelServers() as servers, blackhole_port() as silent:
        url = servers.url.replace("//", f"//127.0.0.1:{free_port()},127.0.0.1:{silent},")
        tier = connect(url, connect_timeout_s=1.5, fail_open=False)
        assert put(tier) == (Outcome.OK, "")
        assert next(s.label for s in tier._endpoint._sentinels).endswith(  # type: ignore[attr-defined]
            f":{servers.sentinel.port}/0"
        )
        with servers.primary.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert read(tier) == (Outcome.OK, "")


def test_what_is_wrong_is_said_at_start(connect: Connect) -> None:
    with SentinelServers(requirepass=PASSWORD) as servers:
        plain = servers.url
        with pytest.raises(ConfigError, match="requires a login"):
            connect(plain, fail_open=False)
        login = f"{plain}?sentinel_password={PASSWORD}"
        tier = connect(login, fail_open=False)
        assert put(tier) == (Outcome.OK, "")
        assert PASSWORD not in repr(tier)
        with pytest.raises(ConfigError, match="know no service 'other'"):
            connect(login.replace("/kv", "/other"), fail_open=False)
    with pytest.raises(ConfigError, match=r"[Rr]efused"):
        connect(plain, fail_open=False)


def test_login_and_database_are_the_servers(connect: Connect, server: RedisServer) -> None:
    """What stands in the URL is for the servers; the Sentinel here would refuse a login."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "elora", "on", f">{PASSWORD}", "~*", "+@all")
    with SentinelServers() as servers:
        with servers.sentinel.client() as client:
            client.sentinel_remove(servers.service)
            client.sentinel_monitor(servers.service, "127.0.0.1", server.port, 1)
        url = servers.url.replace("//", f"//elora:{PASSWORD}@")
        tier = connect(f"{url}/3", fail_open=False)
        assert put(tier) == (Outcome.OK, "")
    with server.client(db=3) as client:
        assert client.dbsize() == 1
        assert {row["user"] for row in client.client_list()} == {"default", "elora"}
