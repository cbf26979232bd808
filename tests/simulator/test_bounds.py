"""Expected hit rates: against exact expected values, against replays, and at the edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elora_connector.simulator import bounds, exact
from elora_connector.simulator.shares import Shares, normalised, uniform, zipf

F = 0.85


def expected(shares: Shares, requests: int, hits: Callable[[Sequence[int]], int]) -> float:
    """The exact expected rate: every sequence of that length, weighted with its probability."""
    total = 0.0
    for sequence in itertools.product(range(len(shares)), repeat=requests):
        total += math.prod(shares[a] for a in sequence) * hits(sequence)
    return total / requests


def lru_by_states(shares: Shares, capacity: int) -> float:
    """Steady state of an LRU over all sets of adapters that it may hold (King 1971)."""
    adapters, weights = len(shares), {0: 1.0}
    for _ in range(capacity):
        larger: dict[int, float] = {}
        for held, weight in weights.items():
            rest = 1 - sum(shares[a] for a in range(adapters) if held >> a & 1)
            for a in range(adapters):
                if not held >> a & 1:
                    grown = held | 1 << a
                    larger[grown] = larger.get(grown, 0.0) + weight * shares[a] / rest
        weights = larger
    return sum(
        weight * sum(shares[a] for a in range(adapters) if held >> a & 1)
        for held, weight in weights.items()
    )


def test_the_widely_quoted_table_is_one_pinned_prefix() -> None:
    cases = [uniform(1), uniform(4), zipf(4, 1), uniform(16), zipf(16, 1)]
    figures = [round(bounds.quoted(shares, F), 2) for shares in cases]
    assert figures == [0.85, 0.21, 0.41, 0.05, 0.25]
    # With room for all of them the rate tends to f, for any number of adapters.
    assert [round(bounds.infinite(shares, F, 1e6), 3) for shares in cases] == [F] * 5


@pytest.mark.parametrize("shares", [uniform(3), zipf(3, 1), normalised([5, 0, 3])])
@pytest.mark.parametrize("requests", [1, 2, 5, 7])
def test_expected_values_of_all_sequences(shares: Shares, requests: int) -> None:
    infinite = expected(shares, requests, exact.hits_infinite)
    assert bounds.infinite(shares, 1, requests) == pytest.approx(infinite, abs=1e-12)
    for capacity in range(4):
        best = np.argsort(-shares)[:capacity].tolist()
        pinned = expected(shares, requests, lambda s, best=best: exact.hits_pinned(s, best))
        assert bounds.pinned(shares, 1, capacity) == pytest.approx(pinned, abs=1e-12)


@pytest.mark.parametrize("shares", [uniform(3), zipf(3, 1), zipf(3, 3), normalised([0.9, 0.1, 0])])
@pytest.mark.parametrize("requests", [1, 2, 5, 7])
def test_one_slot_is_exact(shares: Shares, requests: int) -> None:
    replayed = expected(shares, requests, lambda s: exact.hits_lru(s, 1))
    assert bounds.lru(shares, 1, 1, requests) == pytest.approx(replayed, abs=1e-12)
    # All but the first request hit with sum p^2, and that is all there is in the long run.
    squares = float((shares**2).sum())
    assert replayed == pytest.approx(squares * (requests - 1) / requests, abs=1e-12)
    assert bounds.lru(shares, 1, 1) == pytest.approx(squares, abs=1e-12)


@pytest.mark.parametrize("adapters", [2, 3, 5, 8, 11])
@pytest.mark.parametrize("s", [0, 0.5, 1, 1.5, 2, 4])
def test_lru_in_the_long_run(adapters: int, s: float) -> None:
    shares = zipf(adapters, s)
    for capacity in range(1, adapters):
        states = lru_by_states(shares, capacity)
        assert bounds.lru(shares, 1, capacity) == pytest.approx(states, abs=1e-9)
        assert bounds.lru_che(shares, 1, capacity) == pytest.approx(states, abs=0.034)


@pytest.mark.parametrize("s", [0, 0.7, 1, 1.5, 2, 4])
def test_beyond_a_hundred_prefixes_che_is_close(s: float) -> None:
    shares = zipf(1000, s)
    exact_one = bounds.lru(shares, 1, 100)
    assert bounds.lru_che(shares, 1, 100) == pytest.approx(exact_one, abs=0.001)
    assert bounds.lru(shares, 1, 101) == bounds.lru_che(shares, 1, 101)
    assert 0 <= bounds.lru(shares, 1, 101) - exact_one < 0.01


@pytest.mark.parametrize("adapters", [1, 4, 16, 100])
@pytest.mark.parametrize("s", [0, 1, 2])
@pytest.mark.parametrize(("requests", "runs"), [(100, 100), (5000, 8)])
def test_replays_agree(adapters: int, s: float, requests: int, runs: int) -> None:
    shares, seed = zipf(adapters, s), 7
    random = np.random.default_rng(seed)
    sequences = random.choice(adapters, p=shares, size=(runs, requests)).tolist()
    times = np.cumsum(random.exponential(0.5, size=(runs, requests)), axis=1).tolist()

    def mean(hits: Sequence[int]) -> float:
        return F * sum(hits) / (runs * requests)

    infinite = mean([exact.hits_infinite(one) for one in sequences])
    assert bounds.infinite(shares, F, requests) == pytest.approx(infinite, abs=0.01), seed
    for capacity in {1, 2, 3, adapters // 4, adapters // 2, adapters - 1, adapters} - {0}:
        lru = mean([exact.hits_lru(one, capacity) for one in sequences])
        assert bounds.lru(shares, F, capacity, requests) == pytest.approx(lru, abs=0.01), seed
        pinned = mean([exact.hits_pinned(one, range(capacity)) for one in sequences])
        assert bounds.pinned(shares, F, capacity) == pytest.approx(pinned, abs=0.01), seed
    for idle_s in (0, 0.5, 10, 300):
        pairs = zip(sequences, times, strict=True)
        idle = mean([exact.hits_idle(one, when, idle_s) for one, when in pairs])
        value = bounds.idle(shares, F, idle_s, 2.0, requests)
        assert value == pytest.approx(idle, abs=0.01), (seed, idle_s)


def test_sticky_sessions_are_replayed_turn_by_turn() -> None:
    # Later turns hit whole; the others are a sequence of their own.
    shares, share, turns = zipf(8, 1), 0.6, 20_000
    random = np.random.default_rng(3)
    first = random.random(turns) >= share
    sequence = random.choice(8, p=shares, size=int(first.sum())).tolist()
    hits = (turns - len(sequence)) + F * exact.hits_lru(sequence, 3)
    value = bounds.sticky(bounds.lru(shares, F, 3), share)
    assert value == pytest.approx(hits / turns, abs=0.01)


# ---- edges -----------------------------------------------------------------------------


def test_one_adapter() -> None:
    one = uniform(1)
    assert bounds.infinite(one, F, 10) == pytest.approx(F * 0.9, abs=1e-15)
    assert bounds.lru(one, F, 1, 10) == pytest.approx(F * 0.9, abs=1e-15)
    assert bounds.lru(one, F, 5) == F
    assert bounds.pinned(one, F, 3) == F
    assert bounds.idle(one, F, math.inf, 1.0) == F


def test_no_room_no_time_no_requests() -> None:
    shares = zipf(5, 1)
    assert bounds.lru(shares, F, 0) == bounds.lru_che(shares, F, 0, 50) == 0
    assert bounds.pinned(shares, F, 0) == 0
    assert bounds.idle(shares, F, 0, 3.0) == bounds.idle(shares, F, math.inf, 0) == 0
    for value in (bounds.infinite(shares, F, 1), bounds.lru(shares, F, 3, 1)):
        assert value == 0
    assert bounds.idle(shares, F, 9, 1.0, 1) == 0


def test_room_for_all_is_infinite() -> None:
    for shares in (zipf(5, 1), normalised([3, 0, 1, 0, 1])):
        for requests in (1, 7, 1e6, 1e18, math.inf):
            whole = bounds.infinite(shares, F, requests)
            assert bounds.lru(shares, F, 5, requests) == whole
            assert bounds.lru(shares, F, 99, requests) == whole
            forever = bounds.idle(shares, F, math.inf, 2.0, requests)
            assert forever == pytest.approx(whole, abs=1e-15)
    # Two of five are never asked for: room for three is room for all.
    assert bounds.lru(normalised([3, 0, 1, 0, 1]), F, 3) == F


@pytest.mark.parametrize("s", [0, 20, 700, 1e6])
def test_extreme_skew_and_numbers(s: float) -> None:
    shares = zipf(50, s)
    for requests in (1, 1e3, 1e18, math.inf):
        values = [bounds.infinite(shares, 1, requests)]
        values += [bounds.lru(shares, 1, c, requests) for c in (1, 2, 49)]
        values += [bounds.lru_che(shares, 1, c, requests) for c in (1, 2, 49)]
        assert all(0 <= value <= 1 for value in values), (s, values)
    assert bounds.infinite(shares, 1, 1e18) == pytest.approx(1, abs=1e-12)


def test_many_rare_adapters_keep_their_digits() -> None:
    # A million adapters, few requests: what hits is the chance of any repetition, M p / 2.
    value = bounds.infinite(uniform(10**6), 1, 100)
    assert value == pytest.approx(99 / 2 / 10**6, rel=1e-4)
    assert bounds.lru(uniform(10**6), 1, 1000) == pytest.approx(1e-3, rel=1e-6)


def test_nonsense_is_refused() -> None:
    shares = zipf(3, 1)
    for call in (
        lambda: bounds.pinned(shares, F, -1),
        lambda: bounds.lru(shares, F, -1),
        lambda: bounds.infinite(shares, F, 0),
        lambda: bounds.idle(shares, F, -1.0, 1.0),
        lambda: bounds.idle(shares, F, 1.0, math.nan),
    ):
        with pytest.raises(ValueError, match="need"):
            call()


# ---- properties ------------------------------------------------------------------------

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=12).filter(
    any
)
REQUESTS = st.one_of(st.integers(1, 10**9), st.just(math.inf))


@settings(max_examples=120, deadline=None)
@given(WEIGHTS, REQUESTS, st.floats(0, 1))
def test_order_of_the_figures(weights: list[float], requests: float, fraction: float) -> None:
    shares = normalised(weights)
    infinite = bounds.infinite(shares, fraction, requests)
    assert 0 <= infinite <= fraction
    for rate in (bounds.lru, bounds.lru_che):
        values = [rate(shares, fraction, c, requests) for c in range(len(shares) + 2)]
        assert values[0] == 0
        assert values[-1] == pytest.approx(infinite, abs=1e-9)
        for smaller, larger in itertools.pairwise(values):
            assert smaller <= larger + 1e-9
    for capacity in range(len(shares) + 1):
        # Among all choices for independent requests the fixed best one wins in the long run.
        lru = bounds.lru(shares, fraction, capacity)
        assert lru <= bounds.pinned(shares, fraction, capacity) + 1e-9
        assert bounds.pinned(shares, fraction, capacity) <= fraction


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=60), st.integers(0, 10))
def test_order_of_replays(adapters: list[int], capacity: int) -> None:
    infinite = exact.hits_infinite(adapters)
    lru = [exact.hits_lru(adapters, c) for c in range(capacity + 1)]
    assert lru == sorted(lru)
    assert lru[-1] <= infinite
    times = list(range(len(adapters)))
    idle = [exact.hits_idle(adapters, times, t) for t in (0, 1, 5, 60)]
    assert idle == sorted(idle)
    assert idle[-1] == infinite
    best = exact.hits_pinned(adapters, exact.hottest(adapters, 2))
    for pair in itertools.combinations(range(9), 2):
        assert exact.hits_pinned(adapters, pair) <= best
