"""The replay engine on traces small enough to follow by hand, and its books on random ones."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import pytest

from elora_connector.core.leaves import LeafTable
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import ChunkKey, Identity, Tier
from elora_connector.errors import ConfigError, InvariantError
from elora_connector.simulator.build import build
from elora_connector.simulator.engine import Replay
from elora_connector.simulator.engine_model import EngineModel, StepTime, engine_model
from elora_connector.simulator.models import MACHINES
from elora_connector.simulator.policies import KvFirst, WholeBranch, scoring_with
from elora_connector.simulator.record import Record
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.sweep import TTFT_LIMIT_S, mean_rate, peak_rate, run_case
from elora_connector.simulator.systems import SYSTEMS, System, system_named
from elora_connector.simulator.wires import Clock, Wire

CHUNK = 16
TOKEN = 1000
"""Bytes of KV of one token in the tiny engine."""
BLOCK = CHUNK * TOKEN
ADAPTER = 4 * BLOCK


def tiny(blocks: int, *, host_chunks: int = 0, adapters: int = 0, **changes: object) -> EngineModel:
    """An engine with room for so many blocks of KV, chunks and adapters."""
    model = EngineModel(
        params=1e9,
        attention_flops=1e5,
        kv_token_bytes=TOKEN,
        adapter_bytes=ADAPTER,
        pool_bytes=blocks * BLOCK,
        host_bytes=max(1, host_chunks) * BLOCK + adapters * ADAPTER,
        link_per_s=1e8,
        max_batch=4,
        max_tokens=64,
    )
    return replace(model, **changes)  # type: ignore[arg-type]


def label(text: str) -> int:
    """The same number in every process."""
    return zlib.crc32(text.encode())


def prompt(name: str, at: float, adapter: str = "", *, chunks: int = 2, session: int = 0):
    """A prompt of `chunks` chunks and one token, with an answer of one token."""
    labels = tuple(label(f"{adapter}/{name}/{i}") for i in range(chunks))
    return SimRequest(at, adapter, session, 0, 0.0, labels, chunks * CHUNK + 1, 1)


def one_after_the_other(names: str, adapter: str = "") -> Trace:
    requests = [prompt(n, 10.0 * i, adapter, session=i) for i, n in enumerate(names)]
    return Trace("by hand", CHUNK, requests)


def gpu_only(policy: str) -> System:
    settings = {"lmcache.cache_policy": policy}
    return System("t", "t", host=False, joined=False, touch_at_end=True, settings=settings)


def run(system: System, machine: EngineModel, trace: Trace, **options: object) -> Record:
    # Otherwise no store would have room in pools this small.
    settings = {"elora.store_block_share": 1.0}
    parts = build(system, machine, trace, lora_share=0.5, settings=settings)
    return Replay(trace, parts, checks=True, **options).run()  # type: ignore[arg-type]


# ---- by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "names", "chunks"),
    [
        # Six blocks; each request needs three and leaves two.  C takes one from the victim.
        ("LRU", "ABACAB", 2 + 2 + 1),  # B lost its second chunk
        ("LRU", "AABBCA", 2 + 2 + 1),  # A was used longer ago than B
        ("LFU", "AAABCA", 2 + 2 + 2),  # A was used more often
        ("FIFO", "ABAACA", 2 + 2 + 1),  # A came first, whatever happened since
        ("MRU", "ABCA", 2),  # B was used last
        ("ELORA", "AAABCA", 2 + 2 + 2),
    ],
)
def test_hits_of_each_policy_on_one_gpu(policy: str, names: str, chunks: int) -> None:
    record = run(gpu_only(policy), tiny(6), one_after_the_other(names))
    assert record.parts.kv.hits == {"gpu": chunks * CHUNK, "host": 0}
    assert record.computed == len(names) * (2 * CHUNK + 1) - chunks * CHUNK


@pytest.mark.parametrize(("policy", "chunks"), [("LRU", 0), ("BFS", 1)])
def test_whole_branches_go_by_the_last_use_of_their_adapter(policy: str, chunks: int) -> None:
    # Two slots and six blocks.  C takes one from A; D takes two: the rest of A and one of B
    # by age, but both of B as y was used longer ago than x.
    order = [("A", "x"), ("B", "y"), ("C", "x"), ("D", "y"), ("A", "x")]
    trace = Trace("t", CHUNK, [prompt(n, 10.0 * i, a, session=i) for i, (n, a) in enumerate(order)])
    system = replace(SYSTEMS["vllm"], blocking=False)
    if policy == "BFS":
        system = replace(system, scoring=scoring_with(WholeBranch))
    parts = build(system, tiny(14, adapters=4), trace, lora_share=0.58)
    record = Replay(trace, parts, checks=True).run()
    assert record.parts.kv.hits == {"gpu": chunks * CHUNK, "host": 0}


def test_kv_goes_before_any_adapter() -> None:
    tree = DependencyTree(chunk_nbytes=1)
    adapter = tree.adapter(Identity("x", bytes(32)), 0.0, 1)
    tree.set_ready(adapter, Tier.HOST)
    chunk = tree.add(adapter, ChunkKey(b"k"), 5.0)
    table = LeafTable(Tier.HOST)
    table.fill([adapter, chunk])
    scores = KvFirst(tree).scores(table, 9.0)
    assert scores[1] < scores[0]


def test_what_the_gpu_lost_comes_from_the_host_tier() -> None:
    # Three blocks: nothing of the request before survives, but host memory holds it all.
    record = run(SYSTEMS["elora"], tiny(3, host_chunks=8), one_after_the_other("ABAB"))
    assert record.parts.kv.hits == {"gpu": 0, "host": 4 * CHUNK}
    assert record.parts.to_gpu.moved == 4 * BLOCK
    assert record.parts.to_host.moved == 4 * BLOCK


def test_the_host_tier_evicts_leaves_only() -> None:
    # Five chunks for A, B and then C: one of A's has to go, and that is its second.
    record = run(SYSTEMS["lru"], tiny(3, host_chunks=5), one_after_the_other("ABCA"))
    assert record.parts.kv.hits == {"gpu": 0, "host": CHUNK}


def test_the_adapter_part_of_a_cold_request_is_its_transfer() -> None:
    trace = Trace("t", CHUNK, [prompt("A", 1.0, "x")])
    machine = tiny(16, host_chunks=8, adapters=8)
    seconds = machine.link_overhead_s + machine.adapter_overhead_s + ADAPTER / 1e8
    for name in ("elora", "vllm", "elora-pool", "s-lora"):
        record = run(SYSTEMS[name], machine, trace)
        (ended,) = record.ended
        assert ended.adapter == pytest.approx(seconds), name
        assert (ended.queue, ended.kv) == (pytest.approx(0.0), pytest.approx(0.0)), name
        assert record.parts.adapters is not None
        assert record.parts.adapters.loads == 1
        assert record.parts.to_gpu.moved == ADAPTER


def test_kv_of_an_adapter_without_a_slot_is_reused_first_and_else_hit_again() -> None:
    # One slot.  x's two blocks are dormant while y has it; y needs three of the eight.
    machine = tiny(12, host_chunks=0, adapters=4)
    order = [("A", "x"), ("B", "y"), ("A", "x")]
    trace = Trace("t", CHUNK, [prompt(n, 10.0 * i, a, session=i) for i, (n, a) in enumerate(order)])
    parts = build(SYSTEMS["elora"], machine, trace, lora_share=0.34)
    record = Replay(trace, parts, checks=True).run()
    assert parts.adapters is not None
    assert parts.adapters.loads == 3
    assert record.parts.kv.hits["gpu"] == 2 * CHUNK


def test_requests_that_wait_for_a_slot_are_overtaken() -> None:
    # One slot, held by a long answer of x: y waits, x's second request does not.
    machine = tiny(40, adapters=4)
    requests = [
        replace(prompt("A", 0.0, "x", session=1), output_tokens=200),
        prompt("B", 0.1, "y", session=2),
        prompt("C", 0.2, "x", session=3),
    ]
    trace = Trace("t", CHUNK, requests)
    parts = build(SYSTEMS["vllm"], machine, trace, lora_share=0.1)
    record = Replay(trace, parts, checks=True).run()
    assert [ended.arrived for ended in record.ended] == [0.2, 0.0, 0.1]
    waited = record.ended[-1]
    assert waited.queue > 0.4
    assert waited.ttft == pytest.approx(waited.queue + waited.adapter + waited.kv + waited.prefill)


def test_the_next_turn_comes_after_the_answer_and_the_thinking() -> None:
    first = replace(prompt("A", 0.0, session=7), output_tokens=5)
    second = replace(prompt("A", 0.5, session=7), turn=1, think_s=3.0)
    record = run(SYSTEMS["elora"], tiny(8, host_chunks=8), Trace("t", CHUNK, [first, second]))
    one, two = record.ended
    assert two.arrived == pytest.approx(one.arrived + one.ttft + 4 * one.tpot + 3.0)


def test_the_link_serves_demand_first_and_in_order() -> None:
    clock, done = Clock(), []
    wire = Wire(clock, per_s=100.0, overhead_s=1.0)

    def note(name: str):
        return lambda now, seconds: done.append((name, now, seconds))

    assert wire.send(100, note("first"), demand=False) == 2.0
    assert wire.send(100, note("later"), demand=False) == 4.0
    assert wire.send(300, note("urgent")) == 6.0
    clock.advance(100.0)
    assert done == [("first", 2.0, 2.0), ("urgent", 6.0, 4.0), ("later", 8.0, 2.0)]
    assert (wire.asked, wire.moved, wire.under_way) == (500, 500, 0)


def test_a_request_larger_than_memory_is_refused_and_the_rest_go_on() -> None:
    trace = Trace("t", CHUNK, [prompt("A", 0.0, chunks=9), prompt("B", 1.0, session=1)])
    record = run(gpu_only("LRU"), tiny(6), trace)
    assert (record.refused, len(record.ended)) == (1, 1)


def test_an_unknown_system_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="there are: elora"):
        system_named("nonsense")


# ---- step time ------------------------------------------------------------------------------


def test_step_time_is_within_an_eighth_of_the_published_profile() -> None:
    """CodeLlama-34B, tensor parallel 4 on H100, linear layers: milliseconds by tokens."""
    published = {1: 7.1, 64: 7.6, 256: 10.0, 512: 16.9, 1024: 30.1, 2048: 55.5, 4096: 112.0}
    model = engine_model(MACHINES["codellama-34b"], 64)
    for tokens, ms in published.items():
        assert model.step_s(tokens, 0.0, 0) * 1000 == pytest.approx(ms, rel=0.12), tokens


def test_decoding_reads_memory_and_prefill_multiplies() -> None:
    step = StepTime(floor_s=0.0, peak_flops=100.0, mfu=0.5, bytes_per_s=10.0)
    assert step.seconds(flops=50.0, nbytes=100.0) == 10.0
    assert step.seconds(flops=1000.0, nbytes=100.0) == 20.0


# ---- books ----------------------------------------------------------------------------------


def random_trace(seed: int, count: int = 40, adapters: int = 5) -> Trace:
    """Conversations over a few adapters, each with a system prompt of its own."""
    rng = random.Random(seed)
    requests: list[SimRequest] = []
    at = 0.0
    while len(requests) < count:
        at += rng.expovariate(20.0)
        adapter = rng.choice(["", *(f"a{i}" for i in range(adapters) for _ in range(adapters - i))])
        history, labels = 2 * CHUNK, [label(f"{adapter}/{i}") for i in range(2)]
        for turn in range(rng.randint(1, 4)):
            asked, answer = history + rng.randint(1, 40), rng.randint(1, 12)
            history = asked + answer
            while len(labels) < history // CHUNK:
                labels.append(rng.getrandbits(60))
            known = tuple(labels[: history // CHUNK])
            think = rng.uniform(0.0, 0.1)
            requests.append(
                SimRequest(at, adapter, len(requests) - turn, turn, think, known, asked, answer)
            )
    return Trace(f"seed {seed}", CHUNK, requests)


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_byte_block_or_token_is_lost(name: str) -> None:
    trace = random_trace(seed=1, count=25)
    machine = tiny(40, host_chunks=30, adapters=6)
    record = run(SYSTEMS[name], machine, trace)
    summary = record.summary()
    assert summary["requests"] == len(trace.requests)
    for ended in record.ended:
        parts = (ended.queue, ended.adapter, ended.kv, ended.prefill)
        assert sum(parts) == pytest.approx(ended.ttft)
        assert min(parts) > -1e-9, ended
    again = run(SYSTEMS[name], machine, trace).summary()
    assert again == summary


def test_invalid_kv_is_zero_with_the_rule_and_not_without() -> None:
    trace = random_trace(seed=2, count=120)
    shares = {}
    for name in ("elora-pool", "elora", "vllm"):
        parts = build(SYSTEMS[name], tiny(40, host_chunks=30, adapters=6), trace, lora_share=0.3)
        replay = Replay(trace, parts, invalid_every_s=0.01)
        shares[name] = replay.run()
    for record in shares.values():
        assert record.invalid.chunks > 100
    pool, ours, vllm = (shares[n].invalid for n in ("elora-pool", "elora", "vllm"))
    assert (pool.adapter_absent, pool.cut_off, pool.in_the_way) == (0, 0, 0)
    assert ours.in_the_way == 0
    assert vllm.in_the_way > 0


def test_short_memory_preempts_and_the_books_still_hold() -> None:
    trace = Trace(
        "t",
        CHUNK,
        [replace(prompt(n, 0.0, session=i), output_tokens=60) for i, n in enumerate("ABCD")],
    )
    record = run(gpu_only("LRU"), tiny(12), trace)
    assert record.preemptions > 0
    assert record.parts.kv.lost > 0
    assert len(record.ended) == 4


def test_the_audit_sees_a_lost_byte() -> None:
    trace = one_after_the_other("AB")
    parts = build(gpu_only("LRU"), tiny(6), trace)
    parts.area.private += 1
    with pytest.raises(InvariantError, match="I4"):
        Replay(trace, parts, checks=True).run()


@pytest.mark.parametrize(("seed", "chunks", "sync_ms"), [(0, 200, 5.0), (1, 30, 0.0)])
def test_nobody_runs_before_its_adapter_is_there(seed: int, chunks: int, sync_ms: float) -> None:
    """Six slots for twelve adapters on a slow link: some are asked for while they come back."""
    trace = random_trace(seed, count=150, adapters=12)
    machine = tiny(60, host_chunks=chunks, adapters=13, link_per_s=1e6)
    settings = {"elora.store_block_share": 1.0, "elora.sync_load_ms": sync_ms}
    parts = build(SYSTEMS["elora"], machine, trace, lora_share=0.4, settings=settings)
    record = Replay(trace, parts).run()
    assert len(record.ended) == len(trace.requests)
    assert parts.adapters is not None
    assert parts.adapters.loads > 12


def test_the_peak_is_the_last_rate_that_is_served() -> None:
    trace = random_trace(seed=3, count=60)
    slow = tiny(60, adapters=6, params=2e11, max_batch=2)
    system = SYSTEMS["vllm"]
    peak = peak_rate(trace, system, slow, lora_share=0.4)
    assert 0.0 < peak < 64 * mean_rate(trace)

    def ttft(rate: float) -> float:
        found = run_case(trace, system, slow, rate=rate, lora_share=0.4)
        return float(found["ttft_s"]["mean"])

    assert ttft(peak) < TTFT_LIMIT_S <= ttft(1.06 * peak)
