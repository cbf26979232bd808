"""Workloads: labels, sessions, pace, popularity."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elora_connector.errors import ConfigError
from elora_connector.simulator import labels as label_module
from elora_connector.simulator.arrivals import (
    Clients,
    _gaps,
    _window,
    clients,
    from_clients,
    weibull_shape,
)
from elora_connector.simulator.from_rows import to_trace
from elora_connector.simulator.labels import ChainLabels, SessionLabels, mix, mix_each, per_chunk
from elora_connector.simulator.popularity import popularity
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.scripts import Script, Turn, fitting
from elora_connector.simulator.sessions import find_sessions
from elora_connector.simulator.shares import zipf
from elora_connector.simulator.trace_stats import describe
from elora_connector.simulator.traces import RawTrace, TraceRow, read_rows, write_trace
from elora_connector.simulator.workloads import WORKLOADS, Demand, _repeated, make_workload

SMALL = Demand(adapters=20, rate=2.0, requests=1500, seed=3)


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: make_workload(name, SMALL) for name in WORKLOADS}


def check_labels(trace: Trace) -> None:
    """Equal label = equal whole prefix, of one adapter; one label per full chunk."""
    parent: dict[int, tuple[str, int]] = {}
    for request in trace.requests:
        before = 0
        tokens = request.prompt_tokens + request.output_tokens
        assert len(request.labels) == tokens // trace.chunk_tokens
        for label in request.labels:
            assert 0 <= label < 1 << 64
            assert parent.setdefault(label, (request.adapter, before)) == (request.adapter, before)
            before = label


def check_sessions(trace: Trace) -> None:
    """Turns are numbered, stay with their adapter and begin with what was said before."""
    last: dict[int, SimRequest] = {}
    for request in trace.requests:
        before = last.get(request.session)
        assert request.turn == (before.turn + 1 if before else 0)
        if before:
            assert request.adapter == before.adapter
            assert request.at >= before.at
            full = before.prompt_tokens // trace.chunk_tokens
            assert request.labels[:full] == before.labels[:full]
        last[request.session] = request


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload(traces: dict[str, Trace], name: str) -> None:
    trace = traces[name]
    assert (trace.name, trace.chunk_tokens, len(trace.requests)) == (name, 256, 1500)
    at = [request.at for request in trace.requests]
    assert at == sorted(at)
    assert abs(at[-1] - 750.0) < 1.0
    assert len({request.adapter for request in trace.requests}) > 10
    assert all(r.prompt_tokens > 0 and r.output_tokens > 0 for r in trace.requests)
    check_labels(trace)
    check_sessions(trace)
    assert make_workload(name, SMALL) == trace
    assert make_workload(name, replace(SMALL, seed=4)) != trace


@pytest.mark.parametrize("name", ["chat", "translation", "agent"])
def test_history_grows_by_prompt_and_answer(traces: dict[str, Trace], name: str) -> None:
    trace = traces[name]
    last: dict[int, SimRequest] = {}
    followed = 0
    for request in trace.requests:
        before = last.get(request.session)
        if before:
            followed += 1
            assert request.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert request.labels[: len(before.labels)] == before.labels
            assert request.at == pytest.approx(before.at + request.think_s, abs=2e-6)
        last[request.session] = request
    assert (followed > 0) == (name != "translation")


@pytest.mark.parametrize("name", ["chat", "translation", "agent"])
def test_adapters_share_their_own_prefix(name: str) -> None:
    trace = make_workload(name, replace(SMALL, chunk_tokens=16))
    firsts: dict[str, set[int]] = defaultdict(set)
    for request in trace.requests:
        firsts[request.adapter].add(request.labels[0] if request.labels else -1)
    shared = [len(labels) == 1 for labels in firsts.values()]
    # Some of Taskmaster's scenarios have no instruction, which leaves nothing to share.
    assert sum(shared) > (len(shared) // 2 if name == "agent" else len(shared) - 1)


FIGURES = {
    # sessions, mean tokens of prompts and answers, hit share of a cache without limits
    "chat": (1156, 2130, 219, 0.396),
    "translation": (1500, 371, 66, 0.480),
    "agent": (806, 587, 15, 0.706),
    "mooncake": (1193, 13988, 352, 0.277),
    "azure-chat": (1500, 1067, 257, 0.0),
    "azure-code": (1500, 2076, 27, 0.0),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_figures_of_the_workloads(traces: dict[str, Trace], name: str) -> None:
    found = describe(traces[name])
    tokens = round(found.prompt.mean), round(found.output.mean)
    assert (found.sessions, *tokens, round(found.hit_share, 3)) == FIGURES[name]


def test_popularity_follows_the_shares() -> None:
    trace = make_workload("translation", Demand(1000, 5.0, 10_000, popularity="zipf:1", seed=1))
    counts = Counter(request.adapter for request in trace.requests)
    shares = zipf(1000, 1.0)
    for number in (0, 1, 2, 9):
        expected = 10_000 * shares[number]
        assert abs(counts[f"adapter-{number:03d}"] - expected) < 4 * expected**0.5
    even = make_workload("translation", Demand(2000, 5.0, 10_000, popularity="random", seed=1))
    spread = Counter(request.adapter for request in even.requests)
    assert len(spread) > 1970
    assert max(spread.values()) < 20
    each = make_workload("translation", Demand(2000, 5.0, 2000, popularity="distinct", seed=1))
    assert len({request.adapter for request in each.requests}) == 2000


def test_replayed_traces_follow_the_shares_too() -> None:
    trace = make_workload("azure-chat", Demand(4, 5.0, 10_000, popularity="zipf:1", seed=2))
    counts = Counter(request.adapter for request in trace.requests)
    for number, share in enumerate(zipf(4, 1.0)):
        assert abs(counts[f"adapter-{number:03d}"] / 10_000 - share) < 0.02


@pytest.mark.parametrize(("source", "count"), [("large", 20), ("mid", 50), ("small", 100)])
def test_client_rates(source: str, count: int) -> None:
    table = clients(source, count)
    mean = table.rate.mean(axis=1)
    assert mean.sum() == pytest.approx(1.0)
    assert list(mean) == sorted(mean, reverse=True)
    assert mean.min() > 0
    arrivals = from_clients(source, count, 40_000, 5.0, np.random.default_rng(5))
    assert list(arrivals.at) == sorted(arrivals.at)
    assert len(arrivals.at) == len(arrivals.adapter) == 40_000
    assert 40_000 / arrivals.at[-1] == pytest.approx(5.0, rel=0.25)


def moved(counts: np.ndarray) -> float:
    """Mean share of requests that move to other adapters from window to window.

    Args:
        counts: shape (adapters, windows).
    """
    shares = counts / counts.sum(axis=0)
    return float(abs(np.diff(shares, axis=1)).sum(axis=0).mean() / 2)


@pytest.mark.parametrize(
    ("source", "published"), [("large", 0.121), ("mid", 0.133), ("small", 0.054)]
)
def test_popularity_drifts_as_it_was_measured(source: str, published: float) -> None:
    assert moved(clients(source, 50).rate) == pytest.approx(published, rel=0.1)


def test_drawn_arrivals_drift_too() -> None:
    arrivals = from_clients("large", 50, 30_000, 5.0, np.random.default_rng(5))
    window = (arrivals.at // 600).astype(int)
    counts = [np.bincount(arrivals.adapter[window == w], minlength=50) for w in range(8)]
    assert 0.05 < moved(np.array(counts).T) < 0.4


@pytest.mark.parametrize("weibull", [False, True])
@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gaps_have_mean_one_and_the_measured_burstiness(cv: float, weibull: bool) -> None:
    gaps = _gaps(cv, weibull, 200_000, np.random.default_rng(3))
    assert gaps.mean() == pytest.approx(1.0, rel=0.03)
    assert gaps.std() == pytest.approx(cv, rel=0.08)


def test_a_steady_client_keeps_its_rate_across_windows() -> None:
    """A gap that a window's end cuts goes on in the next one, at that window's rate."""
    table = Clients(np.array([[1.0, 3.0]]), np.full((1, 2), 0.1), np.zeros((1, 2), bool))
    rng, ahead = np.random.default_rng(1), 0.5
    counts = []
    for window in range(200):
        found, ahead = _window(table, 0, window, 0.005, ahead, rng)
        assert all(0 <= at < 600 for at in found)
        counts.append(len(found))
    # 0.005 and 0.015 requests/s: 3 and 9 in a window, spread very evenly.
    assert abs(sum(counts[0::2]) - 300) <= 10
    assert abs(sum(counts[1::2]) - 900) <= 10
    assert set(counts[0::2]) <= {2, 3, 4}


def test_a_quiet_client_comes_after_many_windows() -> None:
    table = Clients(np.array([[1.0]]), np.full((1, 1), 0.1), np.zeros((1, 1), bool))
    rng, ahead, count = np.random.default_rng(1), 0.5, 0
    for window in range(400):
        found, ahead = _window(table, 0, window, 0.2 / 600, ahead, rng)
        count += len(found)
    assert abs(count - 80) <= 5


@pytest.mark.parametrize("cv", [0.2, 1.0, 3.0, 12.0])
def test_weibull_gaps_have_the_measured_burstiness(cv: float) -> None:
    from math import gamma

    shape = weibull_shape(cv)
    first, second = gamma(1 + 1 / shape), gamma(1 + 2 / shape)
    assert (second / first**2 - 1) ** 0.5 == pytest.approx(cv, rel=1e-6)


def test_both_forms_of_the_mix_agree() -> None:
    rng = random.Random(1)
    pairs = [(rng.getrandbits(64), rng.getrandbits(64)) for _ in range(200)]
    parents, values = (np.array(side, dtype=np.uint64) for side in zip(*pairs, strict=True))
    assert mix_each(parents, values).tolist() == [mix(*pair) for pair in pairs]


def test_chains() -> None:
    chains = ChainLabels()
    a = chains.of("a", (0, 1, 2))
    assert chains.of("a", (0, 1, 2, 3))[:3] == a
    assert len({*a, *chains.of("a", (1, 1, 2)), *chains.of("b", (0, 1, 2))}) == 9
    assert chains.of("a", (0, 1, 2)) == ChainLabels().of("a", (0, 1, 2))
    assert label_module.seed_of("a", "bc") != label_module.seed_of("ab", "c")


@pytest.mark.parametrize(("block", "chunk"), [(512, 512), (512, 256), (16, 256), (512, 300)])
def test_labels_of_chunks_follow_those_of_blocks(block: int, chunk: int) -> None:
    """Against the definition: a chunk is equal exactly if the block in which it ends is."""
    rng = random.Random(7)
    chains = ChainLabels()
    parents: dict[int, int] = {}
    for _ in range(40):
        ids = [rng.randrange(2) for _ in range(2048 // block)]
        found = per_chunk(chains.of("a", ids), block, chunk, len(ids) * block // chunk)
        assert len(found) == len(ids) * block // chunk
        before = 0
        for number, label in enumerate(found):
            known = tuple(ids[: ((number + 1) * chunk - 1) // block + 1])
            key = hash((number, known))
            assert parents.setdefault(label, key) == key
            assert parents.setdefault(key, label) == label
            before = label
        assert before == found[-1]


def test_positions_in_a_session() -> None:
    made = SessionLabels(10)
    first = made.of("a", 1, 55, shared_tokens=25)
    assert len(first) == 5
    assert made.of("a", 1, 123, 25)[:5] == first
    assert made.of("a", 2, 55, 25)[:2] == first[:2]
    assert set(made.of("a", 2, 55, 25)[2:]).isdisjoint(first)
    assert set(made.of("b", 1, 55, 25)).isdisjoint(first)
    # The same session behind a prefix of another length is another text.
    assert set(made.of("a", 1, 55, 5)).isdisjoint(first)
    assert made.of("a", 1, 9, 25) == ()
    assert made.of("a", 1, 25, 55) == made.of("a", 9, 25, 55)


def row(at: float, tokens: int, *blocks: int, answer: int = 1) -> TraceRow:
    return TraceRow(at, tokens, answer, blocks=blocks)


def test_sessions_are_found_by_their_prefixes() -> None:
    raw = RawTrace(
        "x",
        "mooncake",
        (
            row(0, 1100, 0, 1, 2, answer=300),  # a
            row(1, 1030, 0, 7, 8),  # b
            row(2, 1600, 0, 1, 3, 4),  # goes on with a
            row(3, 1700, 0, 1, 3, 5),  # its first three blocks are a's: goes on
            row(4, 1600, 0, 1, 6, 9),  # a has gone on already: a branch
            row(5, 600, 0, 10),  # shares only the system prompt
            row(6, 1200, 0, 10, 11),  # so short a beginning says nothing
        ),
        512,
    )
    assert find_sessions(raw) == [0, 1, 0, 0, 2, 3, 4]
    trace = to_trace(raw, 512)
    # The answer of turn 0 ends in what turn 1 has as its third block.
    assert trace.requests[0].labels == trace.requests[2].labels[:2]
    assert trace.requests[0].prompt_tokens + trace.requests[0].output_tokens == 1400
    fine = to_trace(raw, 128)
    assert fine.requests[0].labels[:10] == fine.requests[2].labels[:10]


def test_no_session_goes_from_one_adapter_to_another() -> None:
    turns = [(0, "a", 1100), (1, "b", 1300), (2, "a", 1300)]
    rows = tuple(TraceRow(at, n, 1, adapter=name, blocks=(0, 1)) for at, name, n in turns)
    assert find_sessions(RawTrace("made", "elora", rows, 512, covers_answer=True)) == [0, 1, 0]


def test_a_turn_that_goes_on_from_something_else_lends_no_prefix() -> None:
    """A session may be edited: its next prompt does not begin with the one before."""
    rows = (
        TraceRow(0, 1024, 512, session="s", blocks=(0, 1)),
        TraceRow(9, 2048, 1, session="s", blocks=(0, 2, 3, 4)),
    )
    first, edited = to_trace(RawTrace("made", "bailian", rows, 512), 512).requests
    assert len(first.labels) == 3
    assert first.labels[0] == edited.labels[0]
    assert set(first.labels[1:]).isdisjoint(edited.labels)


def test_an_unknown_answer_is_no_block_of_the_trace() -> None:
    # The answer of row 1 is not in the trace; block 1 behind the same prompt is another text.
    rows = (row(0, 512, 9), row(1, 512, 7, answer=600), row(2, 1100, 7, 1, 3))
    first, other = to_trace(RawTrace("made", "mooncake", rows, 512), 512).requests[1:]
    assert first.labels[0] == other.labels[0]
    assert first.labels[1] != other.labels[1]


def test_sticky_and_random_adapters(traces: dict[str, Trace]) -> None:
    rows = tuple(row(i, 2048, 0, i // 50, i + 100, i + 5000) for i in range(1000))
    raw = RawTrace("x", "mooncake", rows, 512)
    groups = {
        sticky: Counter(
            (request.labels[1], request.adapter)
            for request in to_trace(raw, 512, popularity("uniform", 5), sticky=sticky).requests
        )
        for sticky in (True, False)
    }
    assert len(groups[True]) == 20
    assert len(groups[False]) == 100


def test_repeated_traces_are_strangers() -> None:
    trace = make_workload("azure-code", Demand(5, 10.0, 9_000))
    assert [r.prompt_tokens for r in trace.requests[8_819:]] == [
        r.prompt_tokens for r in trace.requests[:181]
    ]
    rows = _repeated([row(0, 1024, 0, 1), row(1, 1024, 0, 2)], 5)
    assert [r.blocks for r in rows] == [(0, 1), (0, 2), (3, 4), (3, 5), (6, 7)]
    assert [r.at for r in rows] == [0.0, 1.0, 1.5, 2.5, 3.0]


def test_workloads_survive_our_format(traces: dict[str, Trace], tmp_path: Path) -> None:
    for name in ("chat", "mooncake"):
        path = tmp_path / f"{name}.jsonl.gz"
        write_trace(traces[name], path)
        back = to_trace(read_rows(path), 256)
        check_labels(back)
        mine, theirs = describe(traces[name]), describe(back)
        assert mine == theirs


def test_a_duration_instead_of_a_number() -> None:
    trace = make_workload("agent", Demand(10, 4.0, duration_s=300))
    assert len(trace.requests) == 1200


def test_sessions_end_before_the_context_does() -> None:
    script = Script(100, (Turn(50, 20, 0), Turn(500, 20, 1), Turn(500, 20, 1)))
    assert fitting(script, 1024) == Script(100, script.turns[:2])
    assert fitting(Script(900, (Turn(900, 900, 0),)), 1024) == Script(256, (Turn(512, 256, 0),))
    trace = make_workload("chat", replace(SMALL, max_tokens=2048))
    assert max(r.prompt_tokens + r.output_tokens for r in trace.requests) <= 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapters": 0}, "adapters: expected 1 to"),
        ({"adapters": 10_001}, "adapters: expected 1 to 10000"),
        ({"adapters": 1_000_001, "popularity": "uniform"}, "adapters: expected 1 to 1e\\+06"),
        ({"rate": 0.0}, "rate: expected"),
        ({"rate": float("nan")}, "rate: expected"),
        ({"requests": 0}, "requests: expected 1 to"),
        ({"requests": None}, "either a number of requests or a duration"),
        ({"duration_s": 5.0}, "either a number of requests or a duration"),
        ({"requests": None, "duration_s": 1e300}, "requests: expected 1 to"),
        ({"chunk_tokens": 0}, "chunk_tokens: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"popularity": "zipf:x"}, "popularity: expected one of"),
        ({"popularity": "servegen:huge"}, "popularity: expected one of"),
    ],
)
def test_bad_demands(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_workload("chat", replace(SMALL, **change))  # type: ignore[arg-type]


def test_an_unknown_workload() -> None:
    with pytest.raises(ConfigError, match="expected one of chat, translation, agent"):
        make_workload("poetry", SMALL)
