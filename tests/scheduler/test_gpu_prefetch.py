"""Idle prefetch on the real scheduler: local hits, never stale KV, never at anybody's cost."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.interface import PauseState

from tests.support.scheduler_rig import VARIANTS, Rig, prompt

DOC = 33  # eight full blocks, four chunks


def make(variant: Any = VARIANTS[0], delay: int = 0, ranks: int = 1, **options: Any) -> Rig:
    options = {"num_blocks": 40, "remote": False} | options
    return Rig(variant, delay, ranks, **options)


def ask(rig: Rig, adapter: str | None, seed: int = 1) -> Any:
    (answer,) = rig.run(rig.submit(adapter, prompt(DOC, seed), 1))
    return answer


def lose(rig: Rig) -> None:
    """Every cached GPU block loses its hash; the host tier keeps its chunks."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})


def wait_idle(rig: Rig) -> None:
    """What the engine does without requests: step as long as it is told to."""
    for _ in range(200):
        if not rig.scheduler.has_requests():
            return
        rig.step()
    raise AssertionError("the engine is kept stepping for ever")


def evicted(rig: Rig, adapter: str | None = "a") -> None:
    """A document is in the host tier, not in the GPU, and a request has just ended."""
    ask(rig, adapter)
    rig.settle()
    lose(rig)
    rig.run(rig.submit(adapter, prompt(2, 9), 1))


@pytest.mark.parametrize("adapter", [None, "a"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_next_request_is_a_local_hit(variant: Any, adapter: str | None) -> None:
    rig = make(variant, 1, 2, delays={"load": 2})
    evicted(rig, adapter)
    wait_idle(rig)
    assert rig.total("prefetched_blocks") == 8
    answer = ask(rig, adapter)
    assert answer.hit == 32
    assert answer.asked == [(0, False)], "nothing was left to load"
    assert rig.total("prefetched_blocks_hit") == 8
    rig.drain()


def test_another_adapter_does_not_hit_it() -> None:
    rig = make()
    evicted(rig)
    wait_idle(rig)
    assert ask(rig, "b").hit == 0
    rig.drain()


def test_off_it_is_off() -> None:
    rig = make(settings={"elora.prefetch": False})
    evicted(rig)
    wait_idle(rig)
    assert rig.total("prefetched_blocks") == 0
    assert ask(rig, "a").asked == [(32, False)]


def test_never_more_than_its_share() -> None:
    rig = make(settings={"elora.gpu_share": 0.1})  # 4 blocks
    evicted(rig)
    wait_idle(rig)
    assert rig.total("prefetched_blocks") == 4
    assert ask(rig, "a").asked[-1] == (16, False), "half of it had to be loaded"
    rig.drain()


def test_valid_blocks_are_never_given_up_for_it() -> None:
    rig = make(num_blocks=26, settings={"elora.gpu_share": 1.0})
    for seed in (1, 2, 3):
        ask(rig, "a", seed)
        rig.settle()
    rig.gpu.taken.clear()
    wait_idle(rig)
    assert rig.gpu.taken["valid"] == 0
    rig.drain()


def under_way(rig: Rig) -> Any:
    """A prefetch is being copied; returns its first block."""
    for _ in range(20):
        rig.step()
        if rig.side.prefetch.open:
            return rig.side.prefetch._task.blocks[0]
    raise AssertionError("nothing is prefetched")


@pytest.fixture
def flying() -> Rig:
    rig = make(delays={"load": 5})
    evicted(rig)
    under_way(rig)
    return rig


def test_nothing_is_a_hit_before_the_copy_is_confirmed(flying: Rig) -> None:
    request = flying.submit("a", prompt(DOC, 1), 1)
    (answer,) = flying.run(request)
    assert answer.asked == [(32, False)], "it loads for itself at once"
    flying.drain()
    assert flying.total("prefetched_blocks") < 8, "what the request brought is not doubled"


def test_changed_weights(flying: Rig) -> None:
    flying.change("a")
    request = flying.submit("a", prompt(DOC, 1), 1, load_inplace=True)
    flying.run(request)
    flying.drain()
    assert ask(flying, "a").hit == 32  # of the new weights: the rig compares bytes
    flying.drain()


def test_changed_weights_by_rpc(flying: Rig) -> None:
    flying.change("a")
    flying.add_lora("a", load_inplace=True)
    wait_idle(flying)
    assert flying.total("prefetched_blocks") == 0
    ask(flying, "a")
    flying.drain()


def test_the_adapter_is_displaced(flying: Rig) -> None:
    for name in ("b", "c"):
        flying.submit(name, prompt(5, 3), 1)
    flying.run()
    flying.settle()
    pool = flying.scheduler.kv_cache_manager.block_pool
    assert "a" not in flying.ledger.slot_watch.names
    assert not any(
        flying.gpu.name_of.get(b.block_hash[:32]) == "a" for b in pool.blocks if b.block_hash
    ), "published without its adapter"
    flying.drain()


def test_reset_of_the_prefix_cache_gets_its_blocks_at_once(flying: Rig) -> None:
    assert flying.scheduler.reset_prefix_cache()
    assert not flying.side.has_pinned_blocks
    ask(flying, None)
    wait_idle(flying)
    ask(flying, "a")
    flying.drain()


def test_reset_of_the_connector(flying: Rig) -> None:
    assert flying.scheduler.reset_connector_cache()
    wait_idle(flying)
    assert flying.total("prefetched_blocks") == 0
    assert ask(flying, "a").hit == 0
    flying.drain()


def test_a_failed_copy_is_not_published_and_not_tried_again() -> None:
    rig = make()
    evicted(rig)
    rig.fail_loads = 1.0
    wait_idle(rig)
    assert rig.total("prefetched_blocks") == 0
    rig.fail_loads = 0.0
    assert ask(rig, "a").asked == [(32, False)]
    rig.drain()


def test_pause() -> None:
    rig = make(delays={"load": 5}, settings={"elora.sync_load_ms": 0})  # one chunk a job
    evicted(rig)
    under_way(rig)
    rig.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    wait_idle(rig)
    assert rig.total("prefetched_blocks") == 2, "the chunk under way, no other one"
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    wait_idle(rig)
    assert rig.total("prefetched_blocks") == 8
    rig.drain()


def test_subscribers_are_told() -> None:
    rig = make()
    pool = rig.scheduler.kv_cache_manager.block_pool
    pool.enable_kv_cache_events = True
    ask(rig, "a")
    rig.settle()
    lose(rig)
    pool.kv_event_queue = stored = []
    pool.take_events = list
    rig.run(rig.submit("a", prompt(2, 9), 1))
    wait_idle(rig)
    stored = [event for event in stored if isinstance(event, BlockStored)]
    tokens = prompt(DOC, 1)
    assert [e.token_ids for e in stored] == [tokens[n : n + 4] for n in range(0, 32, 4)]
    assert stored[0].parent_block_hash is None
    assert [e.parent_block_hash for e in stored[1:]] == [e.block_hashes[0] for e in stored[:-1]]
    request = rig.submit("a", tokens, 1)
    named = rig.scheduler.requests[request].block_hashes
    assert [e.block_hashes for e in stored] == [[maybe_convert_block_hash(h)] for h in named]
    assert {e.lora_name for e in stored} == {"a"}
    rig.drain()
