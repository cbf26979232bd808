"""Fitted speeds: what comes out of what was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.core.rates import ENOUGH, Link, Mean, Rates


def test_start_values_until_enough_was_measured() -> None:
    link = Link(100.0, 0.5)
    for _ in range(ENOUGH - 1):
        link.add(10, 1.0)
    assert not link.measured
    assert link.seconds(10) == 0.6
    link.add(10, 1.0)
    assert link.measured
    assert link.seconds(10) == pytest.approx(1.0)


def test_overhead_and_speed_are_told_apart() -> None:
    link = Link(1.0)
    for i in range(30):
        amount = 1000 * (1 + i % 4)
        link.add(amount, 0.25 + amount / 2000)
    assert link.overhead_s == pytest.approx(0.25)
    assert link.per_s == pytest.approx(2000)
    assert link.seconds(10_000) == pytest.approx(5.25)


def test_one_size_keeps_the_overhead() -> None:
    link = Link(1.0, 0.25)
    for _ in range(10):
        link.add(100, 1.25)
    assert link.overhead_s == pytest.approx(0.25)
    assert link.per_s == pytest.approx(100)


def test_new_speeds_replace_old_ones() -> None:
    link = Link(1.0)
    for _ in range(20):
        link.add(100, 1.0)
    for _ in range(60):
        link.add(100, 0.01)
    assert link.seconds(100) == pytest.approx(0.01, rel=0.2)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=ENOUGH, max_size=30))
def test_noise_never_makes_nonsense(samples: list[tuple[float, float]]) -> None:
    link = Link(8e9, 50e-6)
    for amount, seconds in samples:
        link.add(amount, seconds)
    assert 0 < link.per_s < math.inf
    assert 0 <= link.overhead_s < math.inf


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (-1, 1.0), (5, 0.0), (5, math.nan)])
def test_samples_that_say_nothing(amount: float, seconds: float) -> None:
    link = Link(8.0)
    link.add(amount, seconds)
    assert link.samples == 0


@pytest.mark.parametrize(("per_s", "overhead"), [(0, 0), (math.nan, 0), (1, -1), (1, math.nan)])
def test_bad_start_values(per_s: float, overhead: float) -> None:
    with pytest.raises(ValueError, match="per_s"):
        Link(per_s, overhead)


def test_adapters_that_were_never_measured_take_the_mean() -> None:
    mean = Mean(9.0)
    assert mean.of("a") == 9.0
    mean.add("a", 1.0)
    assert (mean.of("a"), mean.of("b")) == (1.0, 1.0)
    mean.add("b", 2.0)
    assert (mean.of("b"), mean.of("a")) == (2.0, 1.0)
    assert mean.overall == pytest.approx(0.9 * 1.0 + 0.1 * 2.0)
    assert mean.of("c") == mean.overall
    mean.add("b", 0.0)
    assert mean.changes == 2


def test_estimates() -> None:
    rates = Rates(lanes=4)
    rates.remote_to_host = Link(100.0, 1.0)
    assert rates.fetch_s(100) == 2.0
    assert rates.fetch_s(100, values=4) == 2.0
    assert rates.fetch_s(100, values=5) == 4.0
    assert rates.fetch_s(100, values=5, queued=4) == 6.0
    assert rates.fetch_s(100, values=0) == 0.0
    assert rates.recompute_s(10_000) == 2.0
    assert rates.load_s(8e9) == pytest.approx(1.00005)
