"""How long a request may be told to ask again, and for what."""

from __future__ import annotations

import pytest

from elora_connector.core.node import NodeKind
from elora_connector.core.types import Tier
from tests.support.faulty_tier import FaultyTier
from tests.support.scheduler_rig import STEP_S, SYNC, VARIANTS, Rig, Variant, prompt

DELAYS = (0, 1, 2)
LENGTH = 33
"""Four chunks and the token that has to be computed."""


def warm(rig: Rig, *adapters: str | None) -> None:
    """Make adapters resident, so that only KV is waited for."""
    for adapter in adapters:
        rig.run(rig.submit(adapter, prompt(2, 99)))


def filled(adapter: str | None, length: int = LENGTH, ranks: int = 1) -> FaultyTier:
    """A store that another instance has put a prompt's KV into."""
    rig = Rig(SYNC, ranks=ranks)
    rig.run(rig.submit(adapter, prompt(length)))
    rig.drain()
    assert rig.tier is not None
    return rig.tier


def lookups(rig: Rig) -> int:
    assert rig.tier is not None
    return sum(operation == "leading" for operation, _ in rig.tier.calls)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("adapter", [None, "a"])
def test_host_hit_of_a_resident_adapter_never_waits(
    variant: Variant, delay: int, adapter: str | None
) -> None:
    rig = Rig(variant, delay, ranks=2, prefix_caching=False)
    rig.run(rig.submit(adapter, prompt(LENGTH)))
    rig.settle()
    before = lookups(rig)
    (answer,) = rig.run(rig.submit(adapter, prompt(LENGTH)))
    assert answer.deferrals == 0
    assert answer.started == answer.arrived
    assert answer.hit == 32
    assert lookups(rig) == before, "no look-up when the host tier covers the prompt"
    rig.drain()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_an_adapter_that_comes_back_to_its_slot_costs_no_step(variant: Variant, delay: int) -> None:
    """As in plain vLLM: its weights are placed in the step that runs its request."""
    rig = Rig(variant, delay, ranks=2, max_loras=1, max_cpu_loras=2, remote=False)
    for adapter in ("a", "b", "a", "b"):
        rig.run(rig.submit(adapter, prompt(LENGTH)))
        rig.settle()
    for adapter in ("a", "b", "a"):
        (answer,) = rig.run(rig.submit(adapter, prompt(LENGTH)))
        assert (answer.deferrals, answer.started) == (0, answer.arrived)
        assert answer.hit == 32, "its KV waited in the host tier or dormant"
    rig.drain()


def steps_of(*, connector: bool) -> list[int]:
    """Steps from arrival to first token of requests that share one slot."""
    rig = Rig(SYNC, connector=connector, max_loras=1, max_cpu_loras=2, remote=False)
    for adapter in ("a", "b", "a"):
        rig.run(rig.submit(adapter, prompt(9)))
    asked = [rig.submit(adapter, prompt(9, 1), max_tokens=3) for adapter in "aabbaba"]
    rig.run()
    rig.drain()
    return [int(rig.answers[rid].started) - rig.answers[rid].arrived for rid in asked]


def test_turns_in_one_slot_are_those_of_plain_vllm() -> None:
    assert steps_of(connector=True) == steps_of(connector=False)


def test_no_lookup_when_local_hits_cover_the_prompt() -> None:
    rig = Rig(SYNC, host_slots=1)
    rig.run(rig.submit("a", prompt(LENGTH)))
    rig.settle()
    rig.side.manager.reset()
    before = lookups(rig)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert (answer.hit, answer.deferrals) == (32, 0)
    assert lookups(rig) == before


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("lookup_steps", [0, 1])
def test_remote_miss_waits_at_most_one_step(delay: int, lookup_steps: int) -> None:
    rig = Rig(SYNC, delay, delays={"lookup": lookup_steps})
    warm(rig, "a")
    rig.step(3)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.deferrals <= 1
    assert answer.started is not None
    assert answer.started - answer.arrived <= 1


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("fetch_steps", [0, 3])
def test_remote_hit_waits_two_steps_and_the_transfer(
    variant: Variant, delay: int, fetch_steps: int
) -> None:
    store = filled("a")
    rig = Rig(variant, delay, store=store, delays={"fetch": fetch_steps, "lookup": 1})
    warm(rig, "a")
    rig.step(3)
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.hit == 32
    # Reports come `delay` steps late, which counts as transfer.
    assert answer.deferrals <= 2 + fetch_steps + delay
    rig.drain()


def test_remote_hit_behind_a_host_hit_fetches_only_the_rest() -> None:
    store = filled("a")
    rig = Rig(SYNC, store=store, prefix_caching=False)
    rig.run(rig.submit("a", prompt(17)))
    rig.settle()
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.hit == 32
    io = rig.ranks[0].side._io
    assert sorted(io.reads.values()) == [1, 1, 1, 1], "every chunk was read once"
    rig.drain()


# ---- deadline --------------------------------------------------------------------------


def test_deadline_is_absolute_and_never_restarted() -> None:
    """Whatever it waits for, and however often vLLM asks: one deadline from the first ask."""
    store = filled("a")
    rig = Rig(
        SYNC,
        settings={"elora.fetch_deadline_ms": 10 * STEP_S * 1000},
        store=store,
        delays={"lookup": 6, "fetch": 10_000},
    )
    warm(rig, "a")
    request = rig.submit("a", prompt(LENGTH))
    rig.run(request, limit=30)
    answer = rig.answers[request]
    assert answer.started is not None
    assert answer.started - answer.arrived == 10
    assert answer.hit == 0
    assert answer.deferrals == 10
    assert rig.total("remote_waits", "deadline") == 1


def test_deadline_ends_the_wait_not_the_job() -> None:
    store = filled("a")
    rig = Rig(
        SYNC,
        settings={"elora.fetch_deadline_ms": 5 * STEP_S * 1000},
        store=store,
        delays={"fetch": 20},
    )
    warm(rig, "a")
    used = rig.side.manager.slots.used
    rig.run(rig.submit("a", prompt(LENGTH)))
    manager = rig.side.manager
    assert manager.open_jobs >= 1
    assert manager.pinned_by_waiters == 0
    assert manager.slots.used >= used + 4, "the slots stay with the job"
    rig.delays.steps["fetch"] = 0
    rig.settle()
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.deferrals == 0, "what came late serves the next request"
    rig.drain()


def test_deadline_does_not_run_before_vllm_asks() -> None:
    store = filled("a")
    rig = Rig(
        SYNC,
        settings={"elora.fetch_deadline_ms": 5 * STEP_S * 1000},
        store=store,
        max_num_seqs=1,
        prefix_caching=False,
    )
    warm(rig, "a")
    rig.submit("a", prompt(3, 7), max_tokens=20)
    waiting = rig.submit("a", prompt(LENGTH))
    rig.run(limit=60)
    assert rig.answers[waiting].hit == 32, "twenty steps in the queue are not its wait"


# ---- sharing ---------------------------------------------------------------------------


@pytest.mark.parametrize("delay", DELAYS)
def test_one_fetch_per_chunk(delay: int) -> None:
    store = filled("a", ranks=2)
    rig = Rig(SYNC, delay, ranks=2, store=store, delays={"fetch": (1, 4), "lookup": (0, 2)})
    warm(rig, "a")
    rig.step(4)
    requests = [rig.submit("a", [*prompt(LENGTH), 7 + i], max_tokens=3) for i in range(4)]
    answers = rig.run(*requests)
    assert [a.hit for a in answers] == [32] * 4
    for rank in rig.ranks:
        assert set(rank.side._io.reads.values()) == {1}
    rig.drain()


def test_a_joiner_that_wants_more_fetches_the_rest() -> None:
    store = filled("a")
    rig = Rig(SYNC, store=store, delays={"fetch": 4}, prefix_caching=False)
    warm(rig, "a")
    short = rig.submit("a", prompt(17))
    rig.step()
    long = rig.submit("a", prompt(LENGTH))
    answers = rig.run(short, long)
    assert [a.hit for a in answers] == [16, 32]
    assert set(rig.ranks[0].side._io.reads.values()) == {1}
    assert rig.total("remote_waits", "joined") >= 1
    rig.drain()


def test_the_first_waiter_goes_and_the_joiner_still_gets_it() -> None:
    store = filled("a")
    rig = Rig(SYNC, store=store, delays={"fetch": 5})
    warm(rig, "a")
    first, second = rig.submit("a", prompt(LENGTH)), rig.submit("a", prompt(LENGTH))
    rig.step(3)
    rig.abort(first)
    (answer,) = rig.run(second)
    assert answer.hit == 32
    assert set(rig.ranks[0].side._io.reads.values()) == {1}
    rig.drain()


# ---- pins ------------------------------------------------------------------------------


def test_waiting_requests_pin_at_most_their_share() -> None:
    rigs = Rig(SYNC)
    for document in range(4):
        rigs.run(rigs.submit("a", prompt(LENGTH, document)))
    rigs.drain()
    rig = Rig(SYNC, store=rigs.tier, host_slots=8, delays={"fetch": 6})
    warm(rig, "a")
    requests = [rig.submit("a", prompt(LENGTH, document)) for document in range(4)]
    most = 0
    for _ in range(40):
        rig.step()
        most = max(most, rig.side.manager.pinned_by_waiters)
    assert most == 4, "half of eight slots"
    rig.run(*requests)
    assert rig.total("remote_waits", "no_room") >= 1
    rig.drain()


@pytest.mark.parametrize("delay", DELAYS)
def test_a_thousand_cancels_during_lookup_leave_no_pin(delay: int) -> None:
    """LMCache #1034, vLLM #44100: an abort before allocation must give everything back."""
    store = filled("a")
    rig = Rig(
        SYNC,
        delay,
        store=store,
        host_slots=4,
        delays={"lookup": (0, 4), "fetch": (0, 6), "store": (0, 3)},
    )
    warm(rig, "a")
    for number in range(1000):
        request = rig.submit("a", prompt(LENGTH + number % 5, number % 3))
        if number % 4 == 0:
            rig.step()
        if rig.answers[request].reason is None:
            rig.abort(request)
    rig.settle()
    manager = rig.side.manager
    assert manager.pinned_by_waiters == 0
    assert manager.tree.pinned == 0
    assert manager.slots.used == manager.tree.num_resident(Tier.HOST, NodeKind.CHUNK) <= 4
    assert manager.open_jobs == 0
    (answer,) = rig.run(rig.submit("a", prompt(17)))
    assert answer.reason == "length"
    rig.drain()


# ---- faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("delay", DELAYS)
def test_hit_at_lookup_gone_at_fetch_is_a_shorter_hit(delay: int) -> None:
    store = filled("a")
    rig = Rig(SYNC, delay, store=store, delays={"fetch": 2})
    warm(rig, "a")
    request = rig.submit("a", prompt(LENGTH))
    rig.step(2)
    rig.tier.drop(list(rig.tier._entries)[2])
    (answer,) = rig.run(request)
    assert answer.reason == "length"
    assert answer.hit == 16, "the chunks before the hole"
    rig.drain()


def test_a_dead_store_costs_one_step() -> None:
    rig = Rig(SYNC)
    warm(rig, "a")
    rig.tier.down = True
    (answer,) = rig.run(rig.submit("a", prompt(LENGTH)))
    assert answer.deferrals <= 1
    assert answer.hit == 0
    rig.tier.down = False
    rig.drain()
