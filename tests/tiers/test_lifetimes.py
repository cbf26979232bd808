"""Who outlives whom in the remote tier: a parent in use never goes before its child."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from elora_connector.core.keys import RemoteKeys
from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.tiers.base import refreshed_ttl_s
from elora_connector.tiers.lookup import RemoteLookup
from elora_connector.tiers.redis import RedisTier
from tests.support.faulty_tier import FaultyTier
from tests.support.proxy import SlowProxy
from tests.support.redis_server import RedisServer
from tests.tiers.values import NAMESPACE, digest, make_spec, payload_of

TTL = 400
NAMES = RemoteKeys(1, NAMESPACE)
CIVIL = Identity("civil", digest("weights"))
PATH = [ChunkKey(digest("chunk", i)) for i in range(6)]
RANKS = (Rank(0, 0), Rank(1, 0))


class AtOnce:
    """A pool whose one thread is the caller's."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future

    def shutdown(self, **_: Any) -> None:
        return


def looking(tier: Any, ttl_s: int | None = TTL) -> RemoteLookup:
    lookup = RemoteLookup(tier, RANKS, ttl_s)
    lookup._pool.shutdown()
    lookup._pool = AtOnce()  # type: ignore[assignment]
    return lookup


def refreshed(tier: FaultyTier) -> list[list[int]]:
    """Positions in the path of the chunks of each refresh; all ranks must be in it."""
    calls = []
    for operation, keys in tier.calls:
        assert operation == "refresh"
        names = {NAMES.of(c, CIVIL, r): (i, r) for i, c in enumerate(PATH) for r in RANKS}
        found = [names[key] for key in keys]
        assert found == [(i, r) for i in dict.fromkeys(i for i, _ in found) for r in RANKS]
        calls.append([i for i, _ in found][:: len(RANKS)])
    tier.calls.clear()
    return calls


def test_once_per_quarter_of_the_ttl_and_root_first() -> None:
    tier = FaultyTier()
    lookup = looking(tier)
    for now in (0.0, 1.0, 99.9):
        lookup.refresh(NAMES, CIVIL, PATH[:4], now)
    assert refreshed(tier) == [[0, 1, 2, 3]]
    lookup.refresh(NAMES, CIVIL, PATH[:4], 100.0)
    lookup.refresh(NAMES, CIVIL, PATH[:2], 199.9)
    assert refreshed(tier) == [[0, 1, 2, 3]]


def test_a_chunk_takes_all_that_it_hangs_on_along() -> None:
    tier = FaultyTier()
    lookup = looking(tier)
    lookup.refresh(NAMES, CIVIL, PATH[:2], 0.0)
    lookup.refresh(NAMES, CIVIL, PATH, 50.0)
    assert refreshed(tier) == [[0, 1], [0, 1, 2, 3, 4, 5]]
    lookup.refresh(NAMES, CIVIL, PATH, 149.9)
    assert refreshed(tier) == []


def test_without_a_ttl_nothing_is_refreshed() -> None:
    tier = FaultyTier()
    looking(tier, None).refresh(NAMES, CIVIL, PATH, 0.0)
    assert refreshed(tier) == []


@pytest.mark.redis
def test_no_child_outlives_its_parent(server: RedisServer) -> None:
    """A conversation that grows, chunk by chunk; what Redis says about each lifetime."""
    specs = [make_spec(i) for i in range(6)]
    keys = [spec.key for spec in specs]
    with SlowProxy(server.port) as proxy, server.client() as admin:
        tier = RedisTier(proxy.url, ttl_s=TTL)

        def put(*indices: int) -> None:
            values = [(specs[i], memoryview(payload_of(specs[i]))) for i in indices]
            assert all(result.ok for result in tier.write_many(values))

        def age(seconds: int) -> None:
            for key in admin.scan_iter():
                admin.pexpire(key, admin.pttl(key) - seconds * 1000)

        def lives() -> list[int]:
            found = [admin.ttl(key) for key in keys]
            return [ttl for ttl in found if ttl != -2]

        put(0, 1)
        assert lives() == [TTL, TTL]
        for child in (2, 3, 4, 5):
            age(TTL // 4 - 1)
            turns = proxy.turns
            assert tier.refresh(keys[:child]).ok  # as the scheduler does before each store
            assert proxy.turns - turns == 1
            age(TTL // 4 - 1)  # and at most this long ago
            put(child)
            found = lives()
            assert found == [refreshed_ttl_s(TTL) - TTL // 4 + 1] * child + [TTL]
            assert found == sorted(found, reverse=True)
        tier.close()


def test_a_refreshed_value_lives_a_quarter_longer() -> None:
    assert [refreshed_ttl_s(ttl) for ttl in (1, 2, 4, 400, 86400)] == [2, 3, 5, 500, 108000]
