"""What is slower to load than to compute is not promised and not fetched."""

from __future__ import annotations

import pytest

from elora_connector.core.rates import Link
from tests.scheduler.test_deferral import LENGTH, filled, warm
from tests.support.rig_setup import CHUNK
from tests.support.scheduler_rig import SYNC, Rig, prompt

TOKENS_PER_S = 1000.0
CHUNK_BYTES = 8 * CHUNK


def learn(link: Link, amount: float, seconds: float) -> None:
    for _ in range(60):
        link.add(amount, seconds)


def with_speeds(rig: Rig, host_s: float, remote_s: float) -> Rig:
    """Seconds to load, and to fetch, one chunk of eight tokens, which is computed in 8 ms."""
    rates = rig.side._rates
    learn(rates.prefill, 32, 32 / TOKENS_PER_S)
    learn(rates.host_to_gpu, CHUNK_BYTES, host_s)
    learn(rates.remote_to_host, CHUNK_BYTES, remote_s)
    return rig


def in_host_tier(**settings: object) -> Rig:
    rig = Rig(SYNC, prefix_caching=False, settings=settings, remote=False)
    rig.run(rig.submit("a", prompt(LENGTH)))
    rig.settle()
    return rig


@pytest.mark.parametrize(("host_s", "hit"), [(0.015, 32), (0.017, 0)])
def test_a_slow_host_load_is_not_promised(host_s: float, hit: int) -> None:
    rig = with_speeds(in_host_tier(), host_s, 1.0)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.hit == hit
    assert rig.total("load_or_recompute", "host", "load" if hit else "recompute") == 1
    assert rig.total("load_or_recompute") == 1
    rig.drain()


def test_switched_off_or_with_a_wider_margin_it_is() -> None:
    for settings in (
        {"elora.load_or_recompute.enabled": False},
        {"elora.load_or_recompute.margin": 10.0},
    ):
        rig = with_speeds(in_host_tier(**settings), 0.03, 1.0)
        (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
        assert answer.hit == 32


@pytest.mark.parametrize(("remote_s", "hit"), [(0.012, 32), (0.5, 0)])
def test_a_slow_fetch_is_not_started(remote_s: float, hit: int) -> None:
    rig = Rig(SYNC, store=filled("a"), settings={"elora.remote.io_threads": 1})
    with_speeds(rig, 1e-4, remote_s)
    warm(rig, "a")
    rig.step(3)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.hit == hit
    assert rig.total("load_or_recompute", "remote", "load" if hit else "recompute") == 1
    assert sum(rig.ranks[0].side._io.reads.values()) == hit // CHUNK
    assert rig.total("remote_waits", "not_worth") == (not hit)
    rig.drain()


def test_the_same_chunks_are_not_written_again() -> None:
    """Recomputed because the store is slow, not because it lost them."""
    store = filled("a")
    rig = with_speeds(Rig(SYNC, store=store), 1e-4, 9.0)
    warm(rig, "a")
    rig.run(rig.submit("a", prompt(LENGTH)))
    rig.drain()
    assert rig.tier is not None
    assert not [keys for operation, keys in rig.tier.calls if operation == "write"]


def test_slow_or_not_nothing_is_refused_unmeasured() -> None:
    rig = in_host_tier()
    rig.side._rates.host_to_gpu = Link(1e-9)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.hit == 32


def test_min_retrieve_tokens_holds_before_a_fetch() -> None:
    """32 tokens can be had: with 33 wanted nothing is looked up or fetched."""
    for least, reads in ((32, 4), (33, 0)):
        rig = Rig(SYNC, store=filled("a"), settings={"lmcache.min_retrieve_tokens": least})
        warm(rig, "a")
        rig.step(3)
        (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
        assert (answer.hit, answer.deferrals == 0) == (8 * reads, not reads)
        assert sum(rig.ranks[0].side._io.reads.values()) == reads
        rig.drain()


def test_min_retrieve_tokens_counts_what_the_store_really_has() -> None:
    store = filled("a", 17)
    rig = Rig(SYNC, store=store, settings={"lmcache.min_retrieve_tokens": 24})
    warm(rig, "a")
    rig.step(3)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.hit == 0
    assert not rig.ranks[0].side._io.reads
    rig.drain()


@pytest.mark.parametrize("delay", [1, 2])
def test_prefill_is_measured_from_step_to_step_without_idle_time(delay: int) -> None:
    rig = Rig(SYNC, delay, remote=False, prefix_caching=False)
    warm(rig, "a")
    for i in range(6):
        rig.run(rig.submit("a", prompt(65, 10 + i), max_tokens=1))
        rig.now += 100.0  # nobody computes anything meanwhile
    prefill = rig.side._rates.prefill
    assert prefill.measured
    # Full steps of 32 tokens, one every 1/64 s; their reports come `delay` steps later.
    assert 32 * 64 / (delay + 1) <= prefill.per_s <= 32 * 64


def test_demand_follows_the_batches() -> None:
    rig = Rig(SYNC, remote=False)
    demand = rig.side._meter._demand
    assert demand.low(rig.now) == 0.0
    rig.run(rig.submit("a", prompt(9)), rig.submit("b", prompt(9)))
    assert 1.0 < demand.low(rig.now) <= 2.0
    rig.now += 6.0
    assert demand.low(rig.now) == 0.0
