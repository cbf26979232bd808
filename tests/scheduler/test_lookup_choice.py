"""Whether a request waits for its look-up depends on what look-ups cost and find."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.scheduler.test_deferral import LENGTH, filled, lookups, warm
from tests.scheduler.test_load_or_recompute import learn
from tests.support.faulty_tier import FaultyTier
from tests.support.scheduler_rig import STEP_S, SYNC, VARIANTS, Rig, Variant, prompt

DOCUMENTS = 24
NEAR, FAR = 0, 3
"""Steps until a reply: the far store answers after two steps of the clock, 31 ms."""


@pytest.fixture(scope="module")
def full() -> FaultyTier:
    """What another instance has written."""
    rig = Rig(SYNC)
    for seed in range(DOCUMENTS):
        rig.run(rig.submit("a", prompt(LENGTH, seed)))
    rig.drain()
    assert rig.tier is not None
    return rig.tier


def make(store: FaultyTier | None, steps: int, token_s: float, **settings: object) -> Rig:
    """`token_s`: what computing a token takes by what was measured before."""
    rig = Rig(
        SYNC,
        store=FaultyTier() if store is None else store,
        delays={"lookup": steps},
        settings=settings,
        host_slots=64,
        prefix_caching=False,
    )
    learn(rig.side._rates.prefill, 32, 32 * token_s)
    rig.side._meter._prefills = NOTHING  # only bytes are moved here: steps take no time
    warm(rig, "a")
    return rig


class _Nothing(dict):  # type: ignore[type-arg]
    def __setitem__(self, *_: object) -> None:
        pass


NOTHING = _Nothing()


def ask(rig: Rig, seed: int) -> tuple[int, int]:
    """(tokens that were not computed, times the request was told to ask again).

    It stores nothing: here a store is asked when its reply comes, so it would find that.
    """
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH, seed), params={"elora.store": False}))
    rig.settle()
    rig.step(4)  # the reply that nobody waited for
    return answer.hit, answer.deferrals


def test_a_near_store_is_waited_for_although_it_never_has_anything() -> None:
    rig = make(None, NEAR, 0.0001)
    for seed in range(DOCUMENTS):
        ask(rig, seed)
    assert rig.total("load_or_recompute", "lookup") == 0, "the reply was there at the first ask"
    rig.delays.steps["lookup"] = 1  # it comes with the next step, in less than a tick
    assert [ask(rig, 100 + seed) for seed in range(8)] == [(0, 1)] * 8
    assert rig.total("load_or_recompute", "lookup", "load") == 8
    assert lookups(rig) == DOCUMENTS + 8
    rig.drain()


def test_a_far_store_that_never_has_anything_is_not_waited_for() -> None:
    rig = make(None, FAR, 0.001)
    waits = [ask(rig, seed)[1] for seed in range(DOCUMENTS)]
    assert waits == [3] * 4 + [0] * (DOCUMENTS - 4), "three to measure it, and the first probe"
    assert lookups(rig) == DOCUMENTS, "all are still asked about"
    assert rig.total("load_or_recompute", "lookup", "load") == 3
    assert rig.total("load_or_recompute", "lookup", "probe") == 1
    assert rig.total("load_or_recompute", "lookup", "recompute") == DOCUMENTS - 4
    rig.drain()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_it_takes_no_step_from_anybody(variant: Variant) -> None:
    """As without a remote tier."""
    taken = []
    for remote in (True, False):
        rig = Rig(variant, remote=remote, delays={"lookup": FAR}, prefix_caching=False)
        warm(rig, "a")
        if remote:
            waits = rig.side._remote._worth._waits
            learn(rig.side._rates.prefill, 32, 0.032)
            for _ in range(60):
                waits.replied("another", 4, 0, 0.02)
            waits._probed = rig.now
        start = rig.steps
        requests = [rig.submit("a", prompt(LENGTH, seed)) for seed in range(6)]
        answers = rig.run(*requests)
        rig.drain()
        taken.append([(a.started - start, a.deferrals) for a in answers if a.started is not None])
    assert taken[0] == taken[1]
    assert len(taken[0]) == 6


def test_a_far_store_with_hits_on_long_prompts_goes_on_being_waited_for(full: FaultyTier) -> None:
    rig = make(full, FAR, 0.01)
    answers = [ask(rig, seed) for seed in range(DOCUMENTS)]
    assert {hit for hit, _ in answers} == {32}
    assert {waits for _, waits in answers} == {4}, "three for the reply, one for the fetch"
    assert rig.total("load_or_recompute", "lookup", "load") == DOCUMENTS
    rig.drain()


def test_and_not_on_prompts_that_are_computed_sooner(full: FaultyTier) -> None:
    rig = make(full, FAR, 0.0001)
    answers = [ask(rig, seed) for seed in range(8)]
    assert answers == [(32, 4)] * 4 + [(0, 0)] * 4, "three to measure it, and the first probe"
    rig.drain()


def test_hits_return_when_the_store_is_filled_again(full: FaultyTier) -> None:
    """FLUSHALL, many misses, and another instance writes it all again."""
    rig = make(full, FAR, 0.01)
    assert rig.tier is not None
    assert ask(rig, 0)[0] == 32
    entries = dict(rig.tier._entries)
    rig.tier._entries.clear()
    missed = [ask(rig, 1000 + seed) for seed in range(40)]
    assert missed[-1] == (0, 0), "given up"
    rig.tier._entries.update(entries)
    found = [ask(rig, 1 + seed) for seed in range(4)]
    assert found[0] == (0, 0)
    assert found[-1] == (32, 4)
    rig.drain()


def test_what_a_late_reply_saw_is_not_written_again() -> None:
    """Nobody waited, but the reply is there before the prompt is computed."""
    rig = make(filled("a", 129), FAR, 0.0001)
    for seed in range(1, 5):
        ask(rig, seed)
    assert rig.tier is not None
    rig.tier.calls.clear()
    (answer,) = rig.run(rig.submit("a", prompt(129)))
    assert (answer.hit, answer.deferrals) == (0, 0)
    rig.settle()
    written = [keys for operation, keys in rig.tier.calls if operation == "write"]
    assert len(written) == 12, "the reply came before the last of four steps"
    rig.drain()


def test_a_reply_that_comes_while_the_request_cannot_run_is_used(full: FaultyTier) -> None:
    """Decided not to wait, but there was no room for it, and then the reply was there."""
    rig = make(full, FAR, 0.0001)
    for seed in range(4):
        ask(rig, seed)
    blocker = rig.submit("a", prompt(240, 5000), max_tokens=8)  # 60 of 63 blocks
    rig.step(8)
    request = rig.submit("a", prompt(LENGTH, 9), params={"elora.store": False})
    rig.run(blocker, request)
    answer = rig.answers[request]
    assert answer.asked[0] == (0, False), "computed, if only there had been room"
    assert answer.hit == 32
    rig.drain()


def test_switched_off_all_wait_for_ever() -> None:
    rig = make(None, FAR, 0.0001, **{"elora.load_or_recompute.enabled": False})
    assert {ask(rig, seed) for seed in range(DOCUMENTS)} == {(0, 3)}
    assert rig.side._remote._worth._waits.round_trip_s == pytest.approx(2 * STEP_S)
    rig.drain()


def test_look_ups_that_nobody_waits_for_do_not_pile_up() -> None:
    """The store is asked by few threads; a request that waits must not stand behind others."""
    rig = make(None, FAR, 0.0001)
    for seed in range(4):
        ask(rig, seed)
    pool = _Stuck()
    rig.side._remote.lookup._pool = pool
    for seed in range(6):
        rig.submit("a", prompt(9, 100 + seed), max_tokens=20)
    rig.step(4)
    assert len(rig.scheduler.running) == 4
    cancelled = [future.cancelled() for future in pool.asked]
    assert cancelled == [True, True, False, False, False, False], "six are open, then five"
    rig.run()


class _Stuck:
    """Threads that never come round to it."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def submit(self, call: Callable[..., Any], *_: object) -> Future[Any]:
        future: Future[Any] = Future()
        if call.__name__ == "_timely":  # no refresh
            self.asked.append(future)
        return future

    def shutdown(self, **_: object) -> None:
        for future in self.asked:
            future.cancel()
