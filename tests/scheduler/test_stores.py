"""Stores: which tokens, how long blocks stay pinned, what late and stale reports do."""

from __future__ import annotations

from typing import Any

import pytest

from elora_connector.core.node import NodeKind
from elora_connector.core.types import Tier
from elora_connector.integration.vllm.metadata import RankReport, WorkerReport
from elora_connector.tiers.host import SlotRef
from tests.support.scheduler_rig import (
    ASYNC,
    BLOCK,
    CHUNK,
    SYNC,
    VARIANTS,
    Rig,
    Variant,
    oracle,
    prompt,
)

DELAYS = (0, 1, 2)


def stored(rig: Rig) -> int:
    return rig.side.manager.tree.num_resident(Tier.HOST, NodeKind.CHUNK)


def planned_chunks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(chunks planned for a request, tokens that were known then), as it goes."""
    seen: list[tuple[int, int]] = []
    begin = rig.side.manager.begin_store

    def spy(request_id: str, identity: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        request = rig.scheduler.requests[request_id]
        seen.append((len(keys), request.num_tokens))
        return begin(request_id, identity, keys, *args, **kwargs)

    monkeypatch.setattr(rig.side.manager, "begin_store", spy)
    return seen


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_only_known_tokens_are_stored(
    variant: Variant, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Async scheduling computes placeholders, whose tokens are not known yet."""
    rig = Rig(variant, delay)
    seen = planned_chunks(rig, monkeypatch)
    request = rig.submit("a", prompt(13), max_tokens=28)
    (answer,) = rig.run(request)
    assert seen
    assert all(chunks * CHUNK <= known for chunks, known in seen)
    rig.settle()
    # Its last token's KV was never computed; all full chunks before it are kept.
    assert stored(rig) in ((13 + 27) // CHUNK, (13 + 27) // CHUNK - 1)
    rig.scheduler.reset_prefix_cache()
    again = rig.submit("a", [*answer.prompt, *answer.tokens], max_tokens=2)
    (follow_up,) = rig.run(again)
    assert follow_up.hit >= stored(rig) * CHUNK - CHUNK
    rig.drain()


def test_generated_tokens_are_not_stored_when_switched_off() -> None:
    rig = Rig(SYNC, settings={"lmcache.save_decode_cache": False})
    rig.run(rig.submit("a", prompt(17), max_tokens=20))
    rig.settle()
    assert stored(rig) == 2


def test_a_request_that_says_no_is_not_stored() -> None:
    rig = Rig(SYNC)
    rig.run(rig.submit("a", prompt(17), params={"elora.store": False}))
    rig.settle()
    assert stored(rig) == 0


# ---- pins ------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", DELAYS)
def test_blocks_stay_pinned_until_they_are_copied(delay: int) -> None:
    """A tiny pool under traffic: every copied byte is compared by the rig."""
    rig = Rig(
        SYNC,
        delay,
        num_blocks=20,
        settings={"elora.store_block_share": 0.5},
        delays={"store": (2, 5)},
    )
    for turn in range(12):
        rig.submit("ab"[turn % 2], prompt(20, turn), max_tokens=2)
    rig.run(limit=400)
    rig.drain()


def test_pending_push_work_is_exactly_the_pinned_blocks() -> None:
    rig = Rig(SYNC, delays={"store": 4, "put": 30})
    rig.run(rig.submit("a", prompt(17)))
    connector = rig.scheduler.connector
    assert rig.side.manager.open_jobs == 1
    assert connector.has_pending_push_work()
    for _ in range(20):
        rig.step()
        assert connector.has_pending_push_work() == (rig.side.pool.pinned > 0)
        if not rig.side.manager.open_jobs:
            break
    assert rig.side.manager.open_puts == 2, "the remote write goes on"
    assert not connector.has_pending_push_work(), "which keeps nothing of the GPU"
    rig.drain()


def test_stores_pin_a_bounded_share_and_count_the_rest() -> None:
    rig = Rig(
        SYNC,
        num_blocks=40,
        settings={"elora.store_block_share": 0.2},
        delays={"store": 12},
        max_tokens_per_step=64,
    )
    most = 0
    for document in range(4):
        rig.submit(None, prompt(17, document))
    for _ in range(12):
        rig.step()
        most = max(most, rig.side.pool.pinned)
    assert 0 < most <= 8
    assert rig.total("stores_dropped", "pool_share") > 0
    rig.drain()


def test_no_room_in_the_host_tier_drops_with_a_counter() -> None:
    rig = Rig(SYNC, host_slots=2, delays={"put": 40})
    rig.run(rig.submit(None, prompt(33)))
    assert rig.total("stores_dropped", "host_full") == 2, "slots with a write under way stay"
    rig.drain()


# ---- pending, late, stale --------------------------------------------------------------


def test_a_chunk_on_its_way_from_a_gpu_is_a_plain_miss() -> None:
    rig = Rig(SYNC, delays={"store": 30}, prefix_caching=False)
    rig.run(rig.submit("a", prompt(33)))
    (answer,) = rig.run(rig.submit("a", prompt(33)))
    assert answer.hit == 0
    assert answer.deferrals <= 1, "nobody waits for a store"
    rig.drain()


@pytest.mark.parametrize("delay", DELAYS)
def test_parents_that_arrive_after_their_children(delay: int) -> None:
    """Two jobs of one prompt may end in any order, also differently on every rank."""
    rig = Rig(SYNC, delay, ranks=3, max_tokens_per_step=CHUNK, delays={"store": 9})
    request = rig.submit("a", prompt(25))
    while rig.side.manager.open_jobs < 1:
        rig.step()
    rig.delays.steps["store"] = 0
    rig.run(request)
    early = rig.side.manager
    assert early.host_prefix([n.key for n in early.tree.chunks]) == 0, "no child alone"
    rig.settle()
    assert stored(rig) == 3
    assert all(node.ready(Tier.HOST) for node in early.tree.chunks)
    rig.drain()


def test_stale_reports_are_counted_and_ignored() -> None:
    rig = Rig(SYNC)
    rig.run(rig.submit("a", prompt(17)))
    rig.settle()
    manager = rig.side.manager
    node = next(manager.tree.chunks)
    before = manager.stale_reports
    old = SlotRef(node.slot, node.generation)
    report = WorkerReport(
        {0: RankReport(stores=[(1, 0)], fetches=[(777, 3)], loads=[(778, 1)], puts=[(old, False)])}
    )
    rig.side.on_report(report)
    assert manager.stale_reports == before + 4
    assert stored(rig) == 2
    rig.drain()


def test_the_same_rank_reporting_twice_does_not_end_a_job() -> None:
    rig = Rig(SYNC, ranks=2, delays={"store": 20})
    rig.run(rig.submit("a", prompt(17)))
    (job_id,) = rig.side.manager._jobs
    for _ in range(2):
        rig.side.on_report(WorkerReport({0: RankReport(stores=[(job_id, 2)])}))
    assert rig.side.manager.job_open(job_id)
    assert rig.side.manager.stale_reports == 1


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("variant", [SYNC, ASYNC], ids=lambda v: v.name)
def test_reset_during_stores_gives_slots_back_only_when_they_end(
    variant: Variant, delay: int
) -> None:
    rig = Rig(variant, delay, ranks=2, delays={"store": (4, 8), "put": (2, 6)}, host_slots=6)
    rig.run(rig.submit("a", prompt(25)))
    manager = rig.side.manager
    assert manager.open_jobs
    rig.scheduler.reset_connector_cache()
    assert stored(rig) == 0
    assert manager.slots.used == 3, "workers still write there"
    (answer,) = rig.run(rig.submit("a", prompt(25)))
    assert answer.reason == "length"
    rig.settle()
    rig.drain()


def test_reset_turns_the_remote_tier_over() -> None:
    rig = Rig(SYNC, prefix_caching=False)
    rig.run(rig.submit("a", prompt(33)))
    rig.settle()
    rig.scheduler.reset_connector_cache()
    (answer,) = rig.run(rig.submit("a", prompt(33)))
    assert answer.hit == 0, "weights may have changed in ways nobody can see"
    rig.drain()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_preempted_requests_load_what_they_stored(variant: Variant) -> None:
    rig = Rig(variant, num_blocks=16, max_num_seqs=3)
    requests = [rig.submit("a", prompt(9, i), max_tokens=20) for i in range(3)]
    rig.run(limit=200)
    preempted = [r for r in requests if len(rig.answers[r].asked) > 1]
    assert preempted, "the pool was meant to be too small"
    for request in requests:
        answer = rig.answers[request]
        assert answer.tokens == oracle(answer.prompt, *answer.weights, 20)
    rig.drain()


def test_blocks_of_the_rig_are_what_vllm_thinks() -> None:
    rig = Rig(SYNC)
    assert rig.side.geometry.block_size == BLOCK
    assert rig.side.geometry.chunk_bytes == rig.ranks[0].memory.sizes.chunk_bytes


def test_chunks_of_a_request_that_begins_anew_have_the_new_content_in_their_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It retrieves nothing, so its keys are not asked for when it waits again."""
    rig = Rig(SYNC, remote=False)
    seen: dict[bytes, set[bytes]] = {}
    begin = rig.side.manager.begin_store

    def spy(request_id: str, identity: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        seen.setdefault(identity.digest, set()).update(keys)
        return begin(request_id, identity, keys, *args, **kwargs)

    monkeypatch.setattr(rig.side.manager, "begin_store", spy)
    request = rig.submit("a", prompt(17), max_tokens=20, params={"elora.retrieve": False})
    while len(rig.answers[request].tokens) < 3:
        rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.change("a")
    rig.add_lora("a", load_inplace=True)
    rig.run(request)
    old, new = seen.values()
    assert not old & new
    rig.drain()
