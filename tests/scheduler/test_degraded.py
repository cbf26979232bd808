"""A remote tier that is down or slow takes no step from anybody (cases 13 and 14)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.faulty_tier import FaultyTier
from tests.support.scheduler_rig import CHUNK, STEP_S, SYNC, VARIANTS, Rig, Variant, prompt

LENGTH = 4 * CHUNK + 1
TIMEOUT = {"elora.remote.lookup_timeout_ms": 4 * STEP_S * 1000}


def steps_of(rig: Rig, seed: int) -> list[tuple[Any, ...]]:
    """What a random mix of requests costs: when each began and ended, and what it hit."""
    rng = random.Random(seed)
    ended: dict[str, int] = {}
    for turn in range(24):
        if turn < 16:
            length = rng.randrange(2, 40)
            rig.submit(rng.choice(["a", "b", None]), prompt(length, rng.randrange(4)))
        for _ in range(rng.randrange(3)):
            rig.step()
            ended |= {r: rig.steps for r, a in rig.answers.items() if a.reason and r not in ended}
    rig.run()
    rig.drain()
    return [
        (a.arrived, a.started, a.deferrals, a.hit, ended.get(r)) for r, a in rig.answers.items()
    ]


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_case_13_with_a_dead_store_every_request_takes_the_steps_it_takes_without(
    variant: Variant, delay: int
) -> None:
    seed = 7 + delay
    without = steps_of(Rig(variant, delay, remote=False, seed=seed), seed)
    rig = Rig(variant, delay, seed=seed)
    assert rig.tier is not None
    rig.tier.down = True
    assert steps_of(rig, seed) == without
    assert not [op for op, _ in rig.tier.calls if op in {"leading", "read_into"}]
    assert rig.total("remote_errors", "breaker") > 0
    assert rig.side.recorder.gauges["remote_degraded"] == 1


def filled() -> FaultyTier:
    rig = Rig(SYNC)
    for seed in range(8):
        rig.run(rig.submit("a", prompt(LENGTH, seed)))
    rig.drain()
    assert rig.tier is not None
    return rig.tier


def ask(rig: Rig, seed: int) -> tuple[int, int]:
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH, seed)))
    return answer.hit, answer.deferrals


def test_case_13_hits_return_without_a_restart() -> None:
    rig = Rig(SYNC, store=filled())
    assert rig.tier is not None
    rig.tier.down = True
    rig.run(rig.submit("a", prompt(2, 99)))
    assert ask(rig, 0) == (0, 0)
    rig.tier.down = False
    rig.step()
    assert rig.side.recorder.gauges["remote_degraded"] == 0
    assert ask(rig, 1)[0] == 4 * CHUNK
    rig.drain()


def test_a_late_look_up_is_waited_for_once() -> None:
    rig = Rig(SYNC, store=filled(), settings=TIMEOUT)
    rig.run(rig.submit("a", prompt(2, 99)))
    rig.delays.steps["lookup"] = 1000
    hit, deferrals = ask(rig, 0)
    assert (hit, deferrals) == (0, 4), "the first one meets the deadline"
    assert rig.total("remote_errors", "slow") == 1
    assert rig.side.recorder.gauges["remote_degraded"] == 1
    assert [ask(rig, seed) for seed in (1, 2, 3)] == [(0, 0)] * 3
    assert rig.total("remote_errors", "slow") == 4


def test_case_13_a_store_that_is_quick_again_is_used_again() -> None:
    rig = Rig(SYNC, store=filled(), settings=TIMEOUT)
    rig.run(rig.submit("a", prompt(2, 99)))
    rig.delays.steps["lookup"] = 8
    assert ask(rig, 0)[0] == 0
    rig.now += 0.25
    assert ask(rig, 1) == (0, 0), "its look-up is the trial, which nobody waits for"
    rig.step(10)
    assert rig.side.recorder.gauges["remote_degraded"] == 1, "which was late"
    rig.delays.steps["lookup"] = 0
    rig.now += 0.5
    assert ask(rig, 2) == (0, 0), "the next trial"
    rig.step()
    assert rig.side.recorder.gauges["remote_degraded"] == 0
    assert ask(rig, 3)[0] == 4 * CHUNK
    rig.drain()


def test_waiting_requests_all_go_on_when_one_look_up_is_late() -> None:
    rig = Rig(SYNC, store=filled(), settings=TIMEOUT)
    rig.run(rig.submit("a", prompt(2, 99)))
    rig.delays.steps["lookup"] = 1000
    requests = [rig.submit("a", prompt(LENGTH, seed)) for seed in range(4)]
    answers = rig.run(*requests)
    assert [a.hit for a in answers] == [0] * 4
    assert max(a.deferrals for a in answers) == 4
