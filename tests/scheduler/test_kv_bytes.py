"""Metrics of chunks: bytes by tier and direction, and chunks that were stranded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scheduler_rig import SYNC, VARIANTS, Rig, prompt

DOC = 33  # four chunks and a token


def ask(rig: Rig, seed: int) -> None:
    """A request that finds nothing in the GPU, up to the end of what it stores."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})
    rig.run(rig.submit(None, prompt(DOC, seed), 1))
    rig.settle()


def chunks(rig: Rig) -> dict[tuple[str, str], float]:
    """What moved so far, in chunks."""
    one = rig.side.geometry.chunk_bytes
    ways = ("in", "gpu"), ("in", "host"), ("out", "host"), ("in", "remote")
    return {way: rig.total("swap_bytes", *way, "kv") / one for way in ways}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_of_a_chunk_is_counted_once(variant: Any, ranks: int) -> None:
    rig = Rig(variant, 1, ranks, {"elora.prefetch": False}, num_blocks=40, host_slots=4)
    steps = [
        (1, {"gpu": 0, "host": 4, "out": 0, "remote": 4}),  # computed, stored, written
        (1, {"gpu": 4, "host": 4, "out": 0, "remote": 4}),  # loaded from the host
        (2, {"gpu": 4, "host": 8, "out": 4, "remote": 8}),  # another takes all of the host
        (1, {"gpu": 6, "host": 12, "out": 8, "remote": 8}),  # two fetched and loaded, two computed
    ]
    for seed, moved in steps:
        ask(rig, seed)
        assert chunks(rig) == {
            ("in", "gpu"): moved["gpu"],
            ("in", "host"): moved["host"],
            ("out", "host"): moved["out"],
            ("in", "remote"): moved["remote"],
        }
    rig.drain()


def test_prefetched_and_failed_copies() -> None:
    rig = Rig(SYNC, settings={"elora.sync_load_ms": 0}, num_blocks=40, remote=False)
    ask(rig, 1)
    pool = rig.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash is not None})
    rig.run(rig.submit(None, prompt(2, 9), 1))
    rig.settle()
    assert rig.total("prefetched_blocks") == 8
    assert chunks(rig)["in", "gpu"] == 4
    rig.fail_loads = 1.0
    ask(rig, 1)
    assert chunks(rig)["in", "gpu"] == 4
    assert rig.total("load_failures") == 1, "one failed copy is enough: then it is computed"
    rig.fail_loads = 0.0
    ask(rig, 1)
    assert chunks(rig)["in", "gpu"] == 8
    rig.drain()


def test_stranded_chunks_are_a_level() -> None:
    settings = {"elora.dependency_rule": False, "lmcache.cache_policy": "FIFO"}
    rig = Rig(SYNC, settings=settings, num_blocks=40, host_slots=6, remote=False)
    key = rig.side.recorder.key("stranded_chunks", "host")
    ask(rig, 1)
    assert rig.side.recorder.gauges[key] == 0
    ask(rig, 2)  # in place of the first two chunks of the first
    rig.step(800)
    assert rig.side.recorder.gauges[key] == 2
    rig.drain()
