"""A real cluster whose slots move and whose nodes die: misses, then hits, nothing worse."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.crc import key_slot

from elora_connector.core.types import Rank
from elora_connector.errors import ConfigError
from elora_connector.tiers.base import Health, LookupResult, Outcome, ValueSpec
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.redis_cluster import ClusterTier
from elora_connector.tiers.redis_slots import SlotMap
from tests.support.proxy import ScriptedServer
from tests.support.redis_groups import ClusterServers
from tests.support.redis_server import RedisServer, find_redis_server, free_port
from tests.tiers.values import eventually, make_spec, payload_of

pytestmark = pytest.mark.redis

SPECS = [make_spec(i) for i in range(24)]
KEYS = [spec.key for spec in SPECS]
PATH = [[key] for key in KEYS]

Connect = Callable[..., ClusterTier]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[ClusterTier] = []

    def quick(**kwargs: Any) -> CircuitBreaker:
        return CircuitBreaker(first_backoff_s=0.02, max_backoff_s=0.1, **kwargs)

    def make(url: str, **kwargs: Any) -> ClusterTier:
        options = {"ttl_s": 60, "connect_timeout_s": 20.0, "operation_timeout_s": 20.0}
        made.append(ClusterTier(url, **(options | {"breaker": quick} | kwargs)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def cluster(shared_cluster: ClusterServers) -> Iterator[ClusterServers]:
    yield shared_cluster
    with shared_cluster.client() as admin:
        admin.flushall()


@pytest.fixture(scope="module")
def breakable() -> Iterator[ClusterServers]:
    """Slots move and nodes die here; a test leaves it whole, but not as it was."""
    if find_redis_server() is None:
        pytest.skip("no redis-server here")
    with ClusterServers(replicas=1) as servers:
        yield servers


def put(tier: ClusterTier, spec: ValueSpec) -> bool:
    return tier.write(spec, memoryview(payload_of(spec))).ok


def read(tier: ClusterTier, spec: ValueSpec) -> tuple[Outcome, str]:
    dest = bytearray(spec.nbytes)
    result = tier.read_into(spec, memoryview(dest))
    assert result.ok == (dest == payload_of(spec))
    return result.outcome, result.reason


def hits(tier: ClusterTier, specs: list[ValueSpec]) -> bool:
    return all(read(tier, spec) == (Outcome.OK, "") for spec in specs)


def connections(servers: list[RedisServer]) -> list[int]:
    found = []
    for server in servers:
        with server.client() as client:
            names = [row["name"] for row in client.client_list()]
        found.append(names.count("elora"))
    return found


def test_values_spread_over_the_nodes_and_chunks_do_not(
    cluster: ClusterServers, connect: Connect
) -> None:
    """All ranks of a chunk are asked for in one command, which one slot must answer."""
    tier = connect(cluster.url)
    ranks = [Rank(i, 0) for i in range(4)]
    chunks = [[make_spec(i, rank=rank) for rank in ranks] for i in range(24)]
    assert all(put(tier, spec) for chunk in chunks for spec in chunk)
    sizes = []
    for node in cluster.primaries:
        with node.client() as client:
            sizes.append(client.dbsize())
            errors = client.info("errorstats")
            assert "errorstat_CROSSSLOT" not in errors
            assert "errorstat_MOVED" not in errors
    assert sum(sizes) == 96
    assert all(size > 0 and size % 4 == 0 for size in sizes)
    assert tier.leading([[spec.key for spec in chunk] for chunk in chunks]).count == 24


def test_a_hole_at_any_node_truncates(cluster: ClusterServers, connect: Connect) -> None:
    tier = connect(cluster.url)
    assert all(put(tier, spec) for spec in SPECS)
    with cluster.client() as admin:
        for hole in (23, 11, 5, 1, 0):
            admin.delete(KEYS[hole])
            assert tier.leading(PATH) == LookupResult(Outcome.OK, hole)


def test_a_refresh_is_one_round_trip_to_each_node_root_first(
    cluster: ClusterServers, connect: Connect
) -> None:
    assert all(put(connect(cluster.url, ttl_s=60), spec) for spec in SPECS)
    assert connect(cluster.url, ttl_s=3600).refresh([*KEYS, make_spec(99).key]).ok
    with cluster.client() as admin:
        assert {admin.ttl(key) for key in KEYS} == {4500}


def test_one_seed_is_enough(cluster: ClusterServers, connect: Connect) -> None:
    seed = cluster.primaries[1].port
    tier = connect(f"valkey-cluster://127.0.0.1:{free_port()},127.0.0.1:{seed}/0")
    assert all(put(tier, spec) for spec in SPECS)
    assert tier.leading(PATH).count == 24
    assert connections(cluster.primaries) == [1, 1, 1]


# Slots that move.


@pytest.mark.parametrize("commands_of_a_read", [1, 2])
def test_while_a_slot_moves_and_after(
    breakable: ClusterServers,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    commands_of_a_read: int,
) -> None:
    """Over both kinds of link; that with public methods only reads a value by two commands."""
    if commands_of_a_read == 2:
        request.getfixturevalue("fall_back")
    tier, stale = connect(breakable.url), connect(breakable.url)
    assert all(put(tier, spec) for spec in SPECS)
    assert stale.leading(PATH).count == 24
    here, gone, new = SPECS[7], make_spec(7, rank=Rank(1, 0)), make_spec(7, rank=Rank(2, 0))
    assert put(tier, gone)
    slot = key_slot(here.key.encode())
    source = breakable.primary_of(here.key)
    target = next(node for node in breakable.primaries if node is not source)
    breakable.begin_move(slot, source, target)
    breakable.move_key(gone.key, source, target)

    # Both halves are found, and what is new goes to where it will stay.
    assert read(tier, here) == read(tier, gone) == (Outcome.OK, "")
    assert read(tier, new) == (Outcome.MISS, "")
    assert put(tier, new)
    path = [*PATH[:7], [gone.key], [new.key], *PATH[7:]]
    assert tier.leading(path) == LookupResult(Outcome.OK, 26)
    assert tier.refresh([gone.key, here.key]).ok
    # A command for keys of both halves cannot be answered now: not there.
    assert tier.leading([PATH[0], [here.key, gone.key], PATH[1]]).count == 1

    breakable.move_key(here.key, source, target)
    breakable.end_move(slot, target)
    with source.client() as client:
        assert client.info("errorstats")["errorstat_ASK"]["count"] >= 4
        moved = client.info("errorstats").get("errorstat_MOVED", {"count": 0})["count"]
    assert stale.leading([*PATH[:7], [here.key, gone.key, new.key], *PATH[8:]]).count == 24
    assert read(tier, here) == read(tier, gone) == read(tier, new) == (Outcome.OK, "")
    with source.client() as client:
        # Each tier was told once (one by a look-up, one by a read) and has known it since.
        now = client.info("errorstats")["errorstat_MOVED"]["count"]
        assert now == moved + 1 + commands_of_a_read
    assert "[moved]" not in caplog.text
    assert "[ask]" not in caplog.text
    with breakable.client() as admin:
        admin.flushall()
    breakable.begin_move(slot, target, source)
    breakable.end_move(slot, source)


# Nodes that die.


def test_a_fail_over_is_misses_then_hits(
    breakable: ClusterServers, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    events: list[tuple[str, str]] = []
    tier = connect(breakable.url, on_event=lambda *event: events.append(event))
    assert all(put(tier, spec) for spec in SPECS)
    victim, replica = breakable.primaries[0], breakable.replicas[0]
    lost = [spec for spec in SPECS if breakable.primary_of(spec.key) is victim]
    kept = [spec for spec in SPECS if spec not in lost]
    assert lost
    assert kept
    with victim.client() as client:
        assert client.execute_command("WAIT", 1, 5000) == 1
    victim.kill()

    assert read(tier, lost[0]) == (Outcome.ERROR, "connection")
    assert tier.health() is Health.PARTIAL
    assert read(tier, lost[0]) == (Outcome.ERROR, "breaker")
    assert hits(tier, kept), "other nodes are not affected"
    first = SPECS.index(lost[0])
    assert tier.leading(PATH) == LookupResult(Outcome.ERROR, first, "breaker")
    assert tier.refresh([spec.key for spec in kept]).ok
    assert tier.refresh(KEYS).reason == "breaker"

    assert eventually(lambda: tier.health() is Health.CLOSED)
    assert hits(tier, SPECS), "the replica has them"
    assert tier.leading(PATH) == LookupResult(Outcome.OK, 24)
    assert connections([replica]) == [1]
    assert ("breaker", "open") in events
    assert {r.levelname for r in caplog.records if r.name.startswith("elora")} == {"WARNING"}

    victim.start()
    breakable.primaries[0], breakable.replicas[0] = replica, victim
    with breakable.client() as admin:
        admin.flushall()


def test_a_planned_fail_over_is_not_even_noticed(
    breakable: ClusterServers, connect: Connect
) -> None:
    tier = connect(breakable.url)
    assert all(put(tier, spec) for spec in SPECS)
    old, new = breakable.primaries[0], breakable.replicas[0]
    breakable.await_(lambda: replicates(new))
    with new.client() as client:
        client.execute_command("CLUSTER FAILOVER")
    breakable.await_(lambda: not replicates(new))
    assert hits(tier, SPECS)
    assert tier.leading(PATH) == LookupResult(Outcome.OK, 24)
    breakable.primaries[0], breakable.replicas[0] = new, old


def replicates(node: RedisServer) -> bool:
    with node.client() as client:
        return client.info("replication").get("master_link_status") == "up"


# Starts.


def test_the_whole_cluster_gone_and_a_start_without_it(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterServers(primaries=1) as small:
        old = connect(small.url)
        assert all(put(old, spec) for spec in SPECS)
        small.primaries[0].kill()
        assert read(old, SPECS[0]) == (Outcome.ERROR, "connection")
        with pytest.raises(ConfigError, match=r"redis-cluster://127\.0\.0\.1.*[Rr]efused"):
            connect(small.url, fail_open=False)
        caplog.clear()
        new = connect(small.url)
        assert len({record.getMessage() for record in caplog.records}) == 1
        for tier in (old, new):
            assert tier.health() is Health.OPEN
            assert {read(tier, spec) for spec in SPECS} == {(Outcome.ERROR, "breaker")}
            assert tier.leading(PATH) == LookupResult(Outcome.ERROR, 0, "breaker")
            assert tier.refresh(KEYS).reason == "breaker"
        small.primaries[0].start()
        for tier in (old, new):
            assert eventually(lambda tier=tier: put(tier, SPECS[0]))  # type: ignore[misc]
            assert read(tier, SPECS[0]) == (Outcome.OK, "")
            assert tier.health() is Health.CLOSED


def test_no_cluster_at_the_address(shared_server: RedisServer, connect: Connect) -> None:
    url = shared_server.url.replace("redis://", "redis-cluster://")
    with pytest.raises(ConfigError, match="is no node of a Redis Cluster"):
        connect(url, fail_open=False)
    with (
        ScriptedServer(b"*1\r\n*2\r\n:1\r\n:99999\r\n") as stub,
        pytest.raises(ConfigError, match="cluster"),
    ):
        connect(f"redis-cluster://127.0.0.1:{stub.port}", fail_open=False)


def test_a_node_taken_for_a_single_server(cluster: ClusterServers) -> None:
    """One clear reason instead of a store that never hits."""
    from elora_connector.tiers.redis import RedisTier

    tier = RedisTier(cluster.primaries[0].url, ttl_s=60)
    spec = next(s for s in SPECS if cluster.primary_of(s.key) is not cluster.primaries[0])
    assert tier.write(spec, memoryview(payload_of(spec))).reason == "moved"
    tier.close()


def test_a_forked_child_has_its_own_connections(cluster: ClusterServers, connect: Connect) -> None:
    tier = connect(cluster.url)
    assert all(put(tier, spec) for spec in SPECS)
    assert tier.leading(PATH).count == 24
    before = connections(cluster.primaries)
    with tier._nodes._lock, tier._nodes._reading:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if tier.leading(PATH).count == 24 and hits(tier, SPECS) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert hits(tier, SPECS)
    assert eventually(lambda: connections(cluster.primaries) == before)


def test_the_map_of_slots() -> None:
    slots = SlotMap()
    assert (slots.owner("a"), slots.owners(), slots.version) == (None, set(), 0)
    one, two = ("h1", 1), ("h2", 2)
    slots.replace([(0, 8191, one), (8192, 16382, two)])
    assert key_slot(b"{x}a") == 16287
    assert (slots.owner("{x}a"), slots.owner("{x}b"), slots.version) == (two, two, 1)
    slots.learn("{x}c", one)
    assert slots.owner("{x}a") == one
    assert slots.owners() == {one, two}
    slots.replace([(0, 16383, two)])
    assert (slots.owner("{x}a"), slots.owners(), slots.version) == (two, {two}, 2)
