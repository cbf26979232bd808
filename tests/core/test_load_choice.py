"""Load or recompute: nothing is refused unmeasured, hysteresis, probes."""

from __future__ import annotations

import math

import pytest

from elora_connector.core.load_choice import PROBE_S, Choice, LoadChoice
from elora_connector.core.rates import Link, Rates

LOAD, RECOMPUTE, PROBE = Choice


def measured(link: Link, amount: float, seconds: float, times: int = 60) -> None:
    for _ in range(times):
        link.add(amount, seconds)


def rates(
    host_s: float | None = None, remote_s: float | None = None, prefill: bool = True
) -> Rates:
    """Recomputing 100 tokens takes 1 s; loading their 1000 bytes, or fetching, as given."""
    found = Rates(lanes=1)
    found.host_to_gpu = Link(1e12)
    found.remote_to_host = Link(1e12)
    if prefill:
        measured(found.prefill, 100, 1.0)
    if host_s is not None:
        measured(found.host_to_gpu, 1000, host_s)
    if remote_s is not None:
        measured(found.remote_to_host, 1000, remote_s)
    return found


def test_nothing_is_refused_before_both_sides_were_measured() -> None:
    slow = LoadChoice(rates(host_s=1e6, remote_s=1e6, prefill=False), 2.0)
    assert slow.from_host(100, 1000, 0.0) is LOAD
    assert slow.from_remote(100, 1, 1000, 0, 0.0) is LOAD
    unknown = rates()
    unknown.host_to_gpu = Link(1e-6)
    unknown.remote_to_host = Link(1e-6)
    assert LoadChoice(unknown, 2.0).from_host(100, 1000, 0.0) is LOAD
    assert LoadChoice(unknown, 2.0).from_remote(100, 1, 1000, 0, 0.0) is LOAD


@pytest.mark.parametrize(("host_s", "choice"), [(1.9, LOAD), (2.1, RECOMPUTE)])
def test_margin(host_s: float, choice: Choice) -> None:
    assert LoadChoice(rates(host_s=host_s), 2.0).from_host(100, 1000, 0.0) is choice


def test_host_and_remote_are_judged_apart() -> None:
    choice = LoadChoice(rates(host_s=0.5, remote_s=5.0), 2.0)
    assert choice.from_remote(100, 1, 1000, 0, 0.0) is RECOMPUTE
    assert choice.from_host(100, 1000, 0.0) is LOAD


def test_a_fetch_is_loaded_afterwards_too() -> None:
    choice = LoadChoice(rates(host_s=1.2, remote_s=1.2), 2.0)
    assert choice.from_remote(100, 1, 1000, 0, 0.0) is RECOMPUTE


def test_queue_before_a_fetch_counts() -> None:
    choice = LoadChoice(rates(host_s=0.01, remote_s=0.5), 2.0)
    assert choice.from_remote(100, 1, 1000, 2, 0.0) is LOAD
    assert choice.from_remote(100, 1, 1000, 4, 0.0) is RECOMPUTE


def test_hysteresis() -> None:
    known = rates(host_s=2.1)
    choice = LoadChoice(known, 2.0)
    assert choice.from_host(100, 1000, 0.0) is RECOMPUTE
    measured(known.host_to_gpu, 1000, 1.5)
    assert choice.from_host(100, 1000, 0.0) is RECOMPUTE, "faster, but not faster than computing"
    measured(known.host_to_gpu, 1000, 0.9)
    assert choice.from_host(100, 1000, 0.0) is LOAD
    measured(known.host_to_gpu, 1000, 1.5)
    assert choice.from_host(100, 1000, 0.0) is LOAD, "slower, but not by the margin"


def test_one_probe_in_a_while() -> None:
    choice = LoadChoice(rates(host_s=10.0), 2.0)
    answers = [choice.from_host(100, 1000, now) for now in (0.0, 1.0, PROBE_S, PROBE_S + 1)]
    assert answers == [RECOMPUTE, RECOMPUTE, PROBE, RECOMPUTE]
    assert choice.from_host(100, 1000, 2 * PROBE_S) is PROBE


def test_switched_off() -> None:
    assert LoadChoice(rates(host_s=1e6), math.inf).from_host(100, 1000, 0.0) is LOAD


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan])
def test_bad_margin(margin: float) -> None:
    with pytest.raises(ValueError, match="margin"):
        LoadChoice(Rates(), margin)
