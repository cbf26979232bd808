"""Adapters brought closer ahead of need: spare places only, demand first, counted."""

from __future__ import annotations

import pytest

from elora_connector.integration.vllm import adapters_ahead
from tests.support.scheduler_rig import SYNC, VARIANTS, Rig, Variant, id_of, prompt

MANY = 80
"""Steps in which looks for a candidate fall due: more than a second of the rig's clock."""


def serve(rig: Rig, *adapters: str, turn: int = 0) -> None:
    for adapter in adapters:
        rig.run(rig.submit(adapter, prompt(9, turn)))


def in_slots(rig: Rig) -> set[int]:
    return {entry.lora_id for entry in rig.ledger.places if entry.in_slot}


def in_host(rig: Rig) -> set[int]:
    return {entry.lora_id for entry in rig.ledger.places if entry.in_host}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_free_slot_gets_the_most_valuable_host_adapter(variant: Variant) -> None:
    # Scores of the cost model rest on measured seconds; least recently used is exact.
    settings = {"lmcache.cache_policy": "LRU"}
    rig = Rig(variant, 1, 2, settings, max_loras=2, max_cpu_loras=4)
    for _ in range(3):
        serve(rig, "a", "b")
    serve(rig, "c", "d", "a", "b")
    assert in_slots(rig) == {id_of("a"), id_of("b")}
    rig.remove_lora("a")
    rig.step(MANY)
    assert in_slots(rig) == {id_of("b"), id_of("d")}, "what the operator took out stays out"
    assert rig.total("adapter_prefetches", "gpu") == 1
    assert rig.total("adapter_swap_ins", "gpu", "prefetched") == 1
    cold = rig.total("adapter_swap_ins", "gpu", "cold")
    (answer,) = rig.run(rig.submit("d", prompt(9, 5)))
    assert answer.deferrals == 0, "it was there already"
    assert rig.total("adapter_prefetches_used") == 1
    assert rig.total("adapter_swap_ins", "gpu", "cold") == cold > 0
    rig.drain()


def test_weights_are_read_ahead_into_free_host_memory_only() -> None:
    rig = Rig(SYNC, max_loras=1, max_cpu_loras=2, remote=False)
    serve(rig, "a", "b", "c")
    assert len(in_host(rig)) == 2
    rig.step(MANY)
    assert rig.total("adapter_prefetches") == 0, "nothing is free, and nothing is evicted for it"
    before = in_host(rig)
    idle = next(i for i in before if i not in in_slots(rig))
    rig.remove_lora("abc"[idle - 1])
    rig.step(MANY)
    assert rig.total("adapter_prefetches", "host") == 1
    assert rig.total("adapter_swap_ins", "host", "prefetched") == 1
    assert rig.total("adapter_swap_ins", "host", "cold") == 3
    assert in_host(rig) == {1, 2, 3} - {idle}
    assert len(in_slots(rig)) == 1
    rig.drain()


def test_a_budget_that_is_well_used_gets_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(
        SYNC,
        settings={"elora.store": False},
        max_loras=1,
        max_cpu_loras=None,
        remote=False,
        host_slots=10,
        adapter_chunks=3,
    )
    serve(rig, "a", "b", "c", "d")
    assert len(in_host(rig)) == 3
    (out,) = {1, 2, 3, 4} - in_host(rig)
    rig.remove_lora("d")
    rig.step(MANY)
    assert rig.total("adapter_prefetches", "host") == 0, "9 of 10 would be in use"
    monkeypatch.setattr(adapters_ahead, "_FULL", 0.9)
    rig.step(MANY)
    assert rig.total("adapter_prefetches", "host") == 1
    assert out in in_host(rig)
    rig.drain()


def test_nothing_comes_ahead_while_somebody_waits_or_where_it_is_off() -> None:
    rig = Rig(SYNC, max_loras=2, max_cpu_loras=4, delays={"adapter": 200}, remote=False)
    off = Rig(
        SYNC, max_loras=2, max_cpu_loras=4, remote=False, settings={"elora.adapter_prefetch": False}
    )
    serve(off, "a", "b", "c")
    off.remove_lora("c")
    off.step(MANY)
    assert off.total("adapter_prefetches") == 0
    off.drain()
    slow = rig.delays.steps
    slow["adapter"] = 0
    serve(rig, "a", "b", "c")
    rig.remove_lora("c")
    slow["adapter"] = 200
    waiting = rig.submit("d", prompt(9))
    rig.step(MANY)
    assert rig.total("adapter_prefetches") == 0, "a request waits for its adapter"
    rig.abort(waiting)
    rig.step(MANY)
    assert rig.total("adapter_prefetches", "gpu") == 1
    rig.drain()


def test_bytes_and_levels_of_adapters_are_counted() -> None:
    rig = Rig(SYNC, max_loras=1, max_cpu_loras=2, adapter_chunks=1, remote=False)
    serve(rig, "a", "b", "a")
    rig.step(MANY)  # levels are taken once a second
    rig.step(MANY)
    size = rig.disk.nbytes
    assert rig.total("swap_bytes", "in", "host", "adapter") == 2 * size
    assert rig.total("swap_bytes", "in", "gpu", "adapter") == 3 * size
    assert rig.total("swap_bytes", "out", "gpu", "adapter") == 2 * size
    assert rig.total("adapter_swap_ins", "host") == 2
    assert rig.total("adapter_swap_ins", "gpu") == 3
    gauge = rig.side.recorder.gauges
    key = rig.side.recorder.key
    assert gauge[key("lora_now")] == 1
    # One request at a time needs one slot: short only while the first load of B is awaited,
    # which has no node before its content is known.
    met, short = (rig.total("lora_demand_seconds", state) for state in ("met", "short"))
    assert met > 10 * short > 0
    assert gauge[key("utilisation", "gpu", "adapter")] == 1
    assert gauge[key("utilisation", "host", "adapter")] == pytest.approx(2 / 32)
    low, high = (gauge[key("eval", "host", q)] for q in ("0.1", "0.9"))
    assert low <= high
