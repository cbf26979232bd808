"""Replays of adapters and of traces: hits counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elora_connector.simulator import exact
from elora_connector.simulator.exact import Scope, replay_trace
from elora_connector.simulator.requests import SimRequest, Trace

CHUNK = 4


def request(
    labels: Sequence[int], adapter: str = "a", at: float = 0.0, prompt: int | None = None
) -> SimRequest:
    """By default the prompt ends one token behind its last chunk, and there is no answer."""
    prompt = len(labels) * CHUNK + 1 if prompt is None else prompt
    return SimRequest(at, adapter, 0, 0, 0.0, tuple(labels), prompt, 1)


def trace(*requests: SimRequest) -> Trace:
    return Trace("by hand", CHUNK, requests)


def test_a_sequence_by_hand() -> None:
    sequence = list("abacabca")
    assert exact.hits_infinite(sequence) == 5
    #                                      a b a c a b c a
    assert exact.hits_lru(sequence, 1) == 0
    assert exact.hits_lru(sequence, 2) == 2  # ..x.x...
    assert exact.hits_lru(sequence, 3) == 5  # ..x.xxxx
    assert exact.hottest(sequence, 1) == ["a"]
    assert exact.hits_pinned(sequence, ["a", "c"]) == 6
    times = [0, 1, 2, 3, 4, 5, 6, 9.5]
    assert exact.hits_idle(sequence, times, 2) == 2
    assert exact.hits_idle(sequence, times, 3) == 3
    assert exact.hits_idle(sequence, times, 6) == 5


def test_a_hit_is_a_leading_run_of_full_chunks() -> None:
    found = replay_trace(trace(request([1, 2, 3]), request([1, 2, 9]), request([7, 2, 3])))
    assert (found.requests, found.prompt_chunks, found.hit_chunks) == (3, 9, 2)
    assert (found.hit_tokens, found.prompt_tokens) == (8, 39)
    assert found.rate == 8 / 39


def test_the_last_token_is_always_computed() -> None:
    # Two full chunks and nothing behind them: the second is not asked for.
    found = replay_trace(trace(request([1, 2], prompt=8), request([1, 2], prompt=8)))
    assert (found.prompt_chunks, found.hit_chunks) == (2, 1)


def test_answers_are_kept_for_the_next_turn() -> None:
    first = request([1, 2, 3], prompt=5)
    found = replay_trace(trace(first, request([1, 2, 3, 4])))
    # 5 + 1 tokens: one chunk.
    assert (found.prompt_chunks, found.hit_chunks) == (1 + 4, 1)
    long = replace(first, output_tokens=8)
    assert replay_trace(trace(long, request([1, 2, 3, 4]))).hit_chunks == 3
    # The KV of an answer's last token is never computed.
    short = replace(first, output_tokens=7)
    assert replay_trace(trace(short, request([1, 2, 3, 4]))).hit_chunks == 2


def test_no_adapter_hits_the_kv_of_another() -> None:
    assert replay_trace(trace(request([1, 2]), request([1, 2], "b"))).hit_chunks == 0
    assert replay_trace(trace(request([1, 2], ""), request([1, 2], "a"))).hit_chunks == 0


def test_leaves_go_first() -> None:
    a, b = request([1, 2, 3]), request([8, 9])
    # Room for four: of the older request its deepest chunk goes.
    assert replay_trace(trace(a, b, a), 4).hit_chunks == 2
    assert replay_trace(trace(a, b, a), 5).hit_chunks == 3
    # A request that is larger than the cache leaves its beginning.
    assert replay_trace(trace(a, a), 2).hit_chunks == 2
    assert replay_trace(trace(a, a), 0).hit_chunks == 0


def test_shared_or_apart() -> None:
    busy = [request([n, n + 1]) for n in range(10, 30, 2)]
    quiet = request([1, 2], "b")
    mixed = trace(quiet, *busy, quiet)
    assert replay_trace(mixed, 8).hit_chunks == 0
    assert replay_trace(mixed, 8, scope=Scope.PER_ADAPTER).hit_chunks == 2
    same = trace(busy[0], busy[1], busy[0], quiet)
    assert replay_trace(same, 4).hit_chunks == 2
    assert replay_trace(same, 4, scope=Scope.PER_ADAPTER).hit_chunks == 0


def test_idle_chunks_are_gone() -> None:
    parts = request([1, 2], at=0), request([1, 5], at=10), request([1, 2], at=15)
    assert replay_trace(trace(*parts), idle_s=10).hit_chunks == 1 + 1
    assert replay_trace(trace(*parts), idle_s=15).hit_chunks == 1 + 2
    assert replay_trace(trace(*parts), idle_s=9).hit_chunks == 0 + 1


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(REQUESTS)
def test_more_room_never_hurts(parts: list[tuple[int, list[int]]]) -> None:
    made = [
        # Labels of a chain: a chunk's label stands for the whole path to it.
        request([hash(tuple(path[: n + 1])) for n in range(len(path))], f"a{adapter}", at=i)
        for i, (adapter, path) in enumerate(parts)
    ]
    hits = [replay_trace(trace(*made), capacity).hit_chunks for capacity in range(40)]
    assert hits == sorted(hits)
    assert hits[0] == 0
    infinite = replay_trace(trace(*made)).hit_chunks
    assert hits[-1] <= infinite == replay_trace(trace(*made), 125).hit_chunks
    assert replay_trace(trace(*made), idle_s=25).hit_chunks == infinite


def test_one_prefix_each_is_the_sequence_of_adapters() -> None:
    sequence = list("abacabcadbca")
    made = [request([ord(a)], a) for a in sequence]
    for capacity in range(5):
        found = replay_trace(trace(*made), capacity)
        assert found.hit_chunks == exact.hits_lru(sequence, capacity)
    assert replay_trace(trace(*made)).hit_chunks == exact.hits_infinite(sequence)


def test_an_empty_trace_has_no_rate() -> None:
    assert replay_trace(trace()).rate == pytest.approx(0)
