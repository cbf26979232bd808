"""Writers leave a full store alone for a while; readers do not notice (case 16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elora_connector.tiers.base import Health, Item, Outcome, RemoteTier, Result
from elora_connector.tiers.breaker import CircuitBreaker
from elora_connector.tiers.redis_cluster import redis_tier
from elora_connector.tiers.write_backoff import REFUSALS, WriteBackoff
from tests.support.faulty_tier import FaultyTier
from tests.support.redis_server import RedisServer
from tests.tiers.values import make_spec, payload_of

SPECS = [make_spec(i) for i in range(10)]
DONE, PAUSED = Result(Outcome.OK, nbytes=512), Result(Outcome.ERROR, "paused")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> Callable[[], CircuitBreaker]:
    """1, 2, 4, 4 ... seconds, exactly."""
    return lambda: CircuitBreaker(first_backoff_s=1.0, max_backoff_s=4.0, jitter=0.0, clock=clock)


def items(specs: list[Any]) -> Iterator[Item]:
    for spec in specs:
        yield spec, memoryview(payload_of(spec))


def write(tier: RemoteTier, *indices: int) -> list[Result]:
    return list(tier.write_many(items([SPECS[i] for i in indices])))


def writes(store: FaultyTier) -> int:
    return sum(operation == "write" for operation, _ in store.calls)


@pytest.mark.parametrize("reason", sorted(REFUSALS))
def test_refused_writes_pause_and_one_tries_again(
    clock: Clock, pauses: Callable[[], CircuitBreaker], reason: str
) -> None:
    store = FaultyTier()
    tier = WriteBackoff(store, pauses)
    assert write(tier, 0) == [DONE]
    refused = Result(Outcome.ERROR, reason)
    store.hook = lambda operation, _: reason if operation == "write" else None
    assert write(tier, 1, 2, 3) == [refused, PAUSED, PAUSED]
    assert tier.write(SPECS[4], memoryview(payload_of(SPECS[4]))) == PAUSED
    assert writes(store) == 2, "no byte is sent during the pause"
    for pause, until in ((1.0, 1.0), (2.0, 3.0), (4.0, 7.0), (4.0, 11.0)):
        clock.now = until - 0.001
        assert write(tier, 5) == [PAUSED]
        clock.now = until
        before = writes(store)
        assert write(tier, 5, 6) == [refused, PAUSED], f"after {pause} s"
        assert writes(store) == before + 1
    store.hook = None
    clock.now += 4.0
    assert write(tier, 5, 6, 7) == [DONE, DONE, DONE]
    store.hook = lambda operation, _: reason if operation == "write" else None
    assert write(tier, 8) == [refused]
    clock.now += 1.0
    assert write(tier, 8) == [refused], "after a success the first pause is short again"


def test_reads_lookups_and_refreshes_go_on(pauses: Callable[[], CircuitBreaker]) -> None:
    store = FaultyTier()
    tier = WriteBackoff(store, pauses)
    assert write(tier, 0) == [DONE]
    store.hook = lambda operation, _: "oom" if operation == "write" else None
    assert [r.reason for r in write(tier, 1, 2)] == ["oom", "paused"]
    dest = bytearray(512)
    assert tier.read_into(SPECS[0], memoryview(dest)).ok
    assert [r.outcome for r in tier.read_many(items(SPECS[:2]))] == [Outcome.OK, Outcome.MISS]
    assert tier.leading([[SPECS[0].key], [SPECS[1].key]]).count == 1
    assert tier.refresh([SPECS[0].key]).ok
    assert tier.health() is Health.CLOSED


@pytest.mark.parametrize("reason", ["connection", "timeout", "breaker", "busy"])
def test_other_failures_are_the_breakers_business(
    pauses: Callable[[], CircuitBreaker], reason: str
) -> None:
    tier = WriteBackoff(FaultyTier(hook=lambda *_: reason), pauses)
    assert [r.reason for r in write(tier, 0, 1, 2)] == [reason] * 3


def test_a_batch_that_is_given_up_ends(pauses: Callable[[], CircuitBreaker]) -> None:
    store = FaultyTier()
    batch = WriteBackoff(store, pauses).write_many(items(SPECS))
    assert next(batch) == DONE
    batch.close()  # type: ignore[attr-defined]
    assert writes(store) == 1


def test_values_that_another_instance_wrote_are_refreshed(
    pauses: Callable[[], CircuitBreaker],
) -> None:
    """They count as stored, so they must not expire before children written now."""
    store = FaultyTier()
    other, tier = FaultyTier(store=store), WriteBackoff(store, pauses)
    assert write(other, 0, 1, 3) == [DONE] * 3
    assert [r.reason for r in write(tier, 0, 1, 2, 3)] == ["exists", "exists", "", "exists"]
    refreshed = [keys for operation, keys in store.calls if operation == "refresh"]
    assert refreshed == [tuple(SPECS[i].key for i in (0, 1, 3))]


@pytest.mark.redis
def test_case_16_a_full_redis_is_left_alone(
    clock: Clock, pauses: Callable[[], CircuitBreaker]
) -> None:
    specs = [make_spec(i, nbytes=200_000) for i in range(40)]
    with RedisServer(maxmemory="4mb", policy="noeviction") as full:
        inner = redis_tier(full.url, ttl_s=60)
        tier = WriteBackoff(inner, pauses)
        ends = [r.reason for r in tier.write_many(items(specs))]
        room = ends.index("oom")
        assert 0 < room < 20
        # What was on its way when the first refusal came was refused too, all else was not sent.
        refused = ends.count("oom")
        assert ends == [""] * room + ["oom"] * refused + ["paused"] * (40 - room - refused)
        assert 1 <= refused <= 8
        with full.client() as admin:
            assert admin.dbsize() == room
            received = admin.info("stats")["total_net_input_bytes"]
            assert all(r == PAUSED for r in tier.write_many(items(specs[room:])))
            assert admin.info("stats")["total_net_input_bytes"] - received < 1000
            for spec in specs[:room]:
                assert tier.read_into(spec, memoryview(bytearray(spec.nbytes))).ok
            admin.flushall()
        clock.now += 1.0
        assert [r.reason for r in tier.write_many(items(specs[:3]))] == [""] * 3
        tier.close()
