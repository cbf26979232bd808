"""Waiting for a look-up: never given up unmeasured, given up for nothing, taken up again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.core.load_choice import PROBE_S, Choice
from elora_connector.core.lookup_choice import FREE_S, LookupChoice
from elora_connector.core.rates import ENOUGH, Rates

LOAD, RECOMPUTE, PROBE = Choice
TOKENS, VALUES, BYTES = 1000, 10, 1000
"""The prompt asked about: a second of prefill, in ten values."""


def rates(fetch_s: float | None = None) -> Rates:
    """`fetch_s`: seconds that one value takes from the store."""
    found = Rates(lanes=1)
    for _ in range(60):
        found.prefill.add(TOKENS, 1.0)
        if fetch_s is not None:
            found.remote_to_host.add(BYTES, fetch_s)
    return found


def choose(choice: LookupChoice, now: float = 1e6, **more: float) -> Choice:
    facts = {"queued": 0, "waited_s": 0.0} | more
    tokens = int(facts.pop("tokens", TOKENS))
    adapter = facts.pop("adapter", "a")
    return choice.choose(adapter, tokens, VALUES, BYTES, now=now, **facts)  # type: ignore[arg-type]


def replied(choice: LookupChoice, found: int, times: int = 1, seconds: float = 0.02) -> None:
    for _ in range(times):
        choice.replied("a", VALUES, found, seconds)


def given_up(seconds: float = 0.02, **more: float) -> LookupChoice:
    """After many look-ups that found nothing; its probe of this time is over."""
    choice = LookupChoice(rates(), 2.0)
    replied(choice, 0, 60, seconds)
    choose(choice, now=1e6, **more)
    return choice


def test_the_first_ones_are_waited_for_however_slow() -> None:
    choice = LookupChoice(rates(), 2.0)
    for _ in range(ENOUGH):
        assert choose(choice) is LOAD
        replied(choice, 0, seconds=1e3)
    assert choose(choice) is PROBE


def test_all_are_waited_for_until_prefill_was_measured() -> None:
    unknown = Rates()
    choice = LookupChoice(unknown, 2.0)
    replied(choice, 0, 60, seconds=1e3)
    assert choose(choice) is LOAD


def test_switched_off() -> None:
    choice = LookupChoice(rates(), math.inf)
    replied(choice, 0, 60, seconds=1e3)
    assert choose(choice) is LOAD


def test_a_quick_store_is_waited_for_although_nothing_is_ever_found() -> None:
    choice = LookupChoice(rates(), 2.0)
    replied(choice, 0, 500, FREE_S)
    assert choose(choice) is LOAD
    replied(choice, 0, 500, 1.01 * FREE_S)
    assert choose(choice) is not LOAD


def test_nothing_found_at_20_ms_is_not_waited_for() -> None:
    choice = LookupChoice(rates(), 2.0)
    waits = 0
    while choose(choice) is LOAD:
        replied(choice, 0)
        waits += 1
    # Worth 2 s at most, so at a chance of 0.01.  Of all look-ups 0.9^11 = 0.31 of 7.2 found
    # something, of this adapter's none of 6.9, which count with two of the former.
    assert waits == 11


@pytest.mark.parametrize(("found", "answer"), [(10, LOAD), (1, LOAD), (0, RECOMPUTE)])
def test_hits_on_a_long_prompt_are_waited_for_at_20_ms(found: int, answer: Choice) -> None:
    choice = given_up()
    replied(choice, found, 60)
    assert choose(choice) is answer


def test_hits_on_a_short_prompt_are_not() -> None:
    choice = LookupChoice(rates(), 2.0)
    replied(choice, VALUES, 60)
    choose(choice, tokens=9)
    assert choose(choice, tokens=9) is RECOMPUTE, "20 ms for twice 9 ms"
    assert choose(choice, tokens=11) is LOAD


def test_hits_that_load_slower_than_they_are_computed_are_not() -> None:
    for fetch_s, answer in ((0.19, LOAD), (0.21, RECOMPUTE)):
        choice = LookupChoice(rates(fetch_s), 2.0)
        replied(choice, VALUES, 60)
        choose(choice)
        assert choose(choice) is answer, "ten values in twice the second of recomputing"
    choice = LookupChoice(rates(0.15), 2.0)
    replied(choice, VALUES, 60)
    choose(choice, queued=5)
    assert choose(choice, queued=5) is RECOMPUTE, "others come first"


def test_chance_and_depth_are_told_apart() -> None:
    """One in two finds all, or all find half: both save as much, but values cost loads."""
    one, all_ = LookupChoice(rates(), 2.0), LookupChoice(rates(), 2.0)
    for _ in range(100):
        replied(one, VALUES)
        replied(one, 0)
        replied(all_, VALUES // 2, 2)
    chance, depth = one.likely("a")
    assert chance == pytest.approx(0.47, abs=0.005), "the last one was a miss"
    assert depth == pytest.approx(1.0)
    assert all_.likely("a") == pytest.approx((1.0, 0.5))


def test_who_waited_already_waits_for_the_rest_only() -> None:
    choice = given_up()
    assert choose(choice, waited_s=0.0179) is RECOMPUTE
    assert choose(choice, waited_s=0.0181) is LOAD
    assert choose(choice, waited_s=0.03) is RECOMPUTE, "overdue: nobody knows how long"


def test_adapters_are_judged_apart_and_new_ones_like_all() -> None:
    choice = LookupChoice(rates(), 2.0)
    for _ in range(60):
        choice.replied("hits", VALUES, VALUES, 0.02)
    for _ in range(60):
        choice.replied("misses", VALUES, 0, 0.02)
    choose(choice, adapter="misses")  # type: ignore[arg-type]
    answers = [choose(choice, adapter=a) for a in ("hits", "misses", "new")]  # type: ignore[arg-type]
    assert answers == [LOAD, RECOMPUTE, RECOMPUTE]


def test_few_hits_are_enough_to_wait_again() -> None:
    choice = given_up()
    replies = 0
    while choose(choice) is RECOMPUTE:
        replied(choice, VALUES)
        replies += 1
    assert replies == 1, "a tenth of two seconds is more than 20 ms"


def test_a_store_that_is_quick_again_is_waited_for_again() -> None:
    choice = given_up()
    replies = 0
    while choose(choice) is RECOMPUTE:
        replied(choice, 0, seconds=2e-4)
        replies += 1
    assert replies == 11


def test_one_probe_in_a_while() -> None:
    choice = LookupChoice(rates(), 2.0)
    replied(choice, 0, 60)
    answers = [choose(choice, now) for now in (0.0, 1.0, PROBE_S, PROBE_S + 1)]
    assert answers == [PROBE, RECOMPUTE, PROBE, RECOMPUTE]


def test_memory_is_bounded() -> None:
    choice = LookupChoice(rates(), 2.0)
    for i in range(5000):
        choice.replied(i, VALUES, 0, 0.02)
    assert len(choice._found) == 1024
    assert 4999 in choice._found


@pytest.mark.parametrize(("asked", "seconds"), [(0, 1.0), (-1, 1.0), (5, -1.0), (5, math.nan)])
def test_replies_that_say_nothing(asked: int, seconds: float) -> None:
    choice = LookupChoice(rates(), 2.0)
    choice.replied("a", asked, 0, seconds)
    assert choice.round_trip_s == 0.0
    assert choice.likely("a") == (1.0, 1.0)


REPLIES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, VALUES), st.floats(0, 10)), max_size=80
)


@given(REPLIES, st.floats(0, 20), st.floats(0.1, 10))
def test_whatever_was_seen_numbers_stay_numbers(
    replies: list[tuple[str, int, float]], waited_s: float, margin: float
) -> None:
    choice = LookupChoice(rates(0.01), margin)
    for adapter, found, seconds in replies:
        choice.replied(adapter, VALUES, found, seconds)
    chance, depth = choice.likely("a")
    assert 0 <= chance <= 1
    assert 0 <= depth <= 1
    assert choose(choice, waited_s=waited_s) in Choice


@given(REPLIES)
def test_whatever_was_seen_hits_are_waited_for_again(
    replies: list[tuple[str, int, float]],
) -> None:
    """No history keeps it from noticing that the store is near and full again."""
    choice = LookupChoice(rates(), 2.0)
    for adapter, found, seconds in replies:
        choice.replied(adapter, VALUES, found, seconds)
    replied(choice, VALUES, 30)
    choose(choice)
    assert choose(choice) is LOAD


@given(REPLIES)
def test_whatever_was_seen_misses_end_the_waiting(replies: list[tuple[str, int, float]]) -> None:
    choice = LookupChoice(rates(), 2.0)
    for adapter, found, seconds in replies:
        choice.replied(adapter, VALUES, found, seconds)
    replied(choice, 0, 60)
    choose(choice)
    assert choose(choice) is RECOMPUTE
