"""Which GPU blocks vLLM reuses first: un-hashed, dormant, then what is worth least."""

from __future__ import annotations

from typing import Any

import pytest

from elora_connector.errors import InvariantError
from elora_connector.integration.vllm.gpu_chunks import ChunkRows
from tests.support.scheduler_rig import SYNC, VARIANTS, Rig, prompt

DOC = 33  # eight full blocks and a token


def ask(rig: Rig, adapter: str | None, seed: int, length: int = DOC) -> int:
    """Tokens of document `seed` that need not be computed."""
    (answer,) = rig.run(rig.submit(adapter, prompt(length, seed), 1))
    rig.settle()
    rig.check()
    return answer.hit


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_dormant_blocks_are_hits_until_their_memory_is_needed(variant: Any) -> None:
    rig = Rig(variant, max_loras=1, num_blocks=40, host_slots=1, remote=False)
    assert ask(rig, "a", 1) == 0
    assert ask(rig, "b", 2) == 0
    assert rig.gpu.dormant() == 8, "a lost its slot"
    assert ask(rig, "a", 1) == 32
    assert rig.gpu.dormant() == 8, "b lost its slot"
    rig.gpu.taken.clear()
    # 39 blocks, 16 of them cached; every request takes 9 and gives one back empty.
    for seed in (3, 4, 5):
        ask(rig, "a", seed)
    assert rig.gpu.taken == {"un-hashed": 25, "dormant": 2}, "b's went, none of a's"
    assert ask(rig, "a", 1) == 32


def test_base_blocks_are_never_dormant() -> None:
    rig = Rig(max_loras=1, num_blocks=40, host_slots=1, remote=False)
    ask(rig, None, 1)
    ask(rig, "a", 2)
    ask(rig, "b", 3)
    assert rig.gpu.dormant() == 8
    for seed in (4, 5):
        ask(rig, "b", seed)
    assert rig.gpu.dormant() == 6, "two of a's were needed"
    assert ask(rig, None, 1) == 32


def test_a_hole_in_the_free_list_is_filled_first() -> None:
    rig = Rig(num_blocks=40, host_slots=1, remote=False)
    for seed in (1, 2, 3, 4):
        ask(rig, "a", seed)
    pool = rig.scheduler.kv_cache_manager.block_pool
    table = rig.side.gpu.table
    holes = {b.block_id for b in pool.free_block_queue.get_all_free_blocks()[-3:]}
    before = table.empty
    pool.evict_blocks(holes)
    rig.check()
    assert table.empty == before + 3
    assert {b.block_id for b in pool.get_new_blocks(3)} == holes


class Favour:
    """Chunks are worth what a test says, others nothing."""

    def __init__(self, worth: dict[int, float]) -> None:
        self.worth = worth

    def scores(self, table: Any, now: float) -> Any:
        return table.last * 0 + [self.worth.get(id(node), 0.0) for node in table.nodes]


def favour(rig: Rig, first: int, worth: float) -> None:
    """Score of all chunks stored after the `first` oldest ones."""
    policy = rig.side.manager.policy
    if not isinstance(policy, Favour):
        policy = rig.side.manager._room._chunks.policy = Favour({})
    for node in list(rig.side.manager.tree.chunks)[first:]:
        policy.worth.setdefault(id(node), worth)


def test_the_lowest_score_goes_first_and_children_before_parents() -> None:
    rig = Rig(num_blocks=40, remote=False)
    # 39 blocks; with every document 8 are cached, and 9 are needed for a moment.
    for seed, worth in ((1, 5.0), (2, 1.0), (3, 3.0), (4, 9.0), (5, 9.0)):
        known = len(rig.side.manager.tree)
        ask(rig, "a", seed)
        favour(rig, known, worth)
    assert cached(rig, 1) == cached(rig, 3) == 8
    assert cached(rig, 2) == 6, "the last two blocks of the document worth least"
    ask(rig, "a", 6)
    assert (cached(rig, 1), cached(rig, 2), cached(rig, 3)) == (8, 0, 6)


def cached(rig: Rig, seed: int, adapter: str = "a", length: int = DOC) -> int:
    """Leading blocks of a document that vLLM's prefix cache has."""
    request = rig.submit(adapter, prompt(length, seed), 1)
    pool = rig.scheduler.kv_cache_manager.block_pool
    hashes = rig.scheduler.requests[request].block_hashes
    rig.abort(request)
    found = [pool.get_cached_block(one, [0]) is not None for one in hashes]
    return found.index(False) if False in found else len(found)


def test_what_the_host_tier_does_not_hold_goes_last() -> None:
    rig = Rig(num_blocks=40, remote=False)
    rig.run(rig.submit("a", prompt(DOC, 1), 1, params={"elora.store": False}))
    for seed in (2, 3, 4, 5, 6):
        ask(rig, "a", seed)
    assert cached(rig, 1) == 8, "the oldest, but it would have to be computed again"
    assert (cached(rig, 2), cached(rig, 3)) == (0, 6)


def test_blocks_freed_after_their_parents_take_their_place_before_them() -> None:
    # The store of the last chunk outlives its request.
    rig = Rig(num_blocks=40, delays={"store": 6}, remote=False)
    rig.run(rig.submit("a", prompt(DOC, 1), 1))
    assert rig.side.pool.pinned
    ask(rig, "a", 2)
    order = [
        b.block_id
        for b in rig.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        if b.block_hash is not None
    ]
    parents = rig.side.gpu.table.parent
    for place, block in enumerate(order):
        assert not parents[block] or order.index(int(parents[block])) > place


def test_dormant_blocks_freed_meanwhile_go_before_valid_ones_in_front() -> None:
    rig = Rig(max_loras=1, num_blocks=40, host_slots=1, remote=False)
    ask(rig, "a", 1)
    pool = rig.scheduler.kv_cache_manager.block_pool
    held = [b for b in pool.free_block_queue.get_all_free_blocks() if b.block_hash is not None]
    pool.touch(held)
    ask(rig, "b", 2)
    rig.side.gpu.order.need(31)  # b's blocks stand in front
    pool.free_blocks(held)
    taken = pool.get_new_blocks(39 - 8)
    assert rig.gpu.taken["dormant"] == 8
    assert rig.gpu.wrong == 0
    pool.free_blocks(taken)


def test_prefix_caching_off_leaves_the_pool_alone() -> None:
    rig = Rig(prefix_caching=False)
    ask(rig, "a", 1)
    assert rig.side.gpu is None
    queue = rig.scheduler.kv_cache_manager.block_pool.free_block_queue
    assert type(queue).__name__ == "FreeKVCacheBlockQueue"


def test_the_checker_sees_a_dormant_block_behind_a_valid_one() -> None:
    rig = Rig(max_loras=1, num_blocks=40, host_slots=1, remote=False)
    ask(rig, "a", 1)
    ask(rig, "b", 2)
    view = rig.side.gpu
    view.order.need(39)
    view.check_order(39)
    queue = rig.scheduler.kv_cache_manager.block_pool.free_block_queue
    dormant = [b for b in queue.get_all_free_blocks() if rig.gpu.kind(b) == "dormant"]
    queue.remove(dormant[-1])
    queue.append_n([dormant[-1]])
    with pytest.raises(InvariantError, match="I7"):
        view.check_order(39)


def test_gauges_tell_dormant_blocks_and_none_misplaced() -> None:
    rig = Rig(SYNC, max_loras=1, num_blocks=40, host_slots=1, remote=False)
    ask(rig, "a", 1)
    ask(rig, "b", 2)
    rig.step(10)  # 0.16 s
    gauges = rig.side.recorder.gauges
    key = rig.side.recorder.key
    assert gauges["dormant_blocks"] == 8
    assert gauges[key("invalid_kv_ratio", "all")] == 0.5
    assert gauges[key("invalid_kv_ratio", "misplaced")] == 0


def test_rows_without_blocks_are_forgotten() -> None:
    import numpy as np

    rows = ChunkRows(limit=4)
    parent, block_rows = 0, []
    for name in (b"1", b"2", b"3"):
        parent = rows.row(name, parent)
    other = rows.row(b"4", 0)
    block_rows = np.array([0, parent, parent], dtype=np.int32)
    assert other == 4
    rows.compact(block_rows)
    assert [rows.find(name) for name in (b"1", b"2", b"3", b"4")] == [1, 2, 3, 0]
    assert block_rows.tolist() == [0, 3, 3]
    assert rows.parents == [0, 0, 1, 2]
