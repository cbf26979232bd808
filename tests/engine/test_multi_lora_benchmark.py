"""A miniature of the multi-LoRA benchmark, by its own code: answers and counts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.serving import report
from benchmarks.serving.engine import Server
from benchmarks.serving.load import LOADS, Request, prompt_of, turns_of
from benchmarks.serving.systems import CHUNK, SYSTEMS, TOKEN_BYTES
from tests.support.oracle import Oracle
from tests.support.tiny import TinyModel

pytestmark = pytest.mark.engine

LOAD = LOADS["chat"].scaled(
    adapters=4,
    requests=8,
    turns=(2, 4),
    user=(8, 24),
    open_conversations=4,
    drift=3,
    pause=4,
    window=1,
    gpu_blocks=13,
    max_model_len=320,
    host_gb=0.05,
    host_adapters=4,
)
SEED = 3


@dataclass
class Played:
    requests: list[Request]
    told: list[dict[str, Any]]
    rounds: list[dict[str, Any]]


@pytest.fixture(scope="module")
def played(tiny: TinyModel, oracle: Oracle) -> Played:
    """Two rounds on an engine with one adapter slot and a pool for one long prompt."""
    paths = [str(path) for path in tiny.adapters.values()]
    requests = _requests(oracle, paths)
    server = Server(SYSTEMS["elora"].engine(tiny.model, LOAD, 1, {}), paths)
    try:
        rounds = [
            server.run([r.question() for r in part], LOAD.window, LOAD.pause, salted=False)
            for part in (requests[: LOAD.requests], requests[LOAD.requests :])
        ]
    finally:
        server.close()
    return Played(requests, [told for one in rounds for told in one["requests"]], rounds)


def _requests(oracle: Oracle, paths: list[str]) -> list[Request]:
    turns = turns_of(LOAD, SEED, 2 * LOAD.requests)
    made: list[Request] = []
    for at, turn in enumerate(turns):
        prompt = prompt_of(LOAD, turns[: at + 1], [r.right for r in made])
        right = oracle(prompt, paths[turn.adapter], LOAD.answer)
        made.append(Request(turn.conversation, turn.adapter, tuple(prompt), right))
    return made


def test_no_answer_is_wrong(played: Played) -> None:
    assert [told["tokens"] for told in played.told] == [r.right for r in played.requests]


def test_counts_are_exact(played: Played) -> None:
    counts = [one["counts"] for one in played.rounds]
    prompts = sum(len(r.prompt) for r in played.requests)
    cached = sum(told["local"] + told["external"] for told in played.told)
    answers = len(played.requests) * (LOAD.answer - 1)
    assert sum(c["scheduled"] for c in counts) == prompts - cached + answers
    # One request at a time is one in every step, and its first step gives a token.
    assert sum(c["batched"] for c in counts) == sum(c["steps"] for c in counts)
    assert sum(c["mixed"] for c in counts) == 0
    assert {told["steps"] for told in played.told} == {1}
    # One slot and one request at a time: every change of adapter is an activation.
    adapters = [r.adapter for r in played.requests]
    changes = 1 + sum(a != b for a, b in itertools.pairwise(adapters))
    assert sum(c["activations"] for c in counts) == changes
    # All fit into vLLM's host cache: each is read once.
    assert sum(c["loads"] for c in counts) == len(set(adapters))


def test_an_adapter_that_had_the_slot_before_comes_back_at_once(played: Played) -> None:
    known: set[int] = set()
    for request, told in zip(played.requests, played.told, strict=True):
        if request.adapter in known:
            assert told["deferrals"] == 0
        known.add(request.adapter)


def test_a_later_turn_is_served_from_a_cache(played: Played) -> None:
    seen: dict[int, int] = {}
    for request, told in zip(played.requests, played.told, strict=True):
        known = seen.get(request.conversation)
        if known is not None:
            assert told["local"] + told["external"] >= known // CHUNK * CHUNK
        seen[request.conversation] = len(request.prompt)
    # The pool is too small to keep them all, so the host tier had to serve some.
    assert sum(told["external"] for told in played.told) > 0


def test_the_report_adds_up(played: Played) -> None:
    for one, start in zip(played.rounds, (0, LOAD.requests), strict=True):
        for told, request in zip(one["requests"], played.requests[start:], strict=False):
            told["wrong"] = tuple(told["tokens"]) != request.right
            told["prompt"] = len(request.prompt)
    rounds = dict.fromkeys(("vllm", "elora"), played.rounds)
    found = report.summary(rounds, adapter_bytes=1 << 20)["elora"]
    assert found["wrong"] == 0
    assert found["ttft_ratio"] == [1.0, 1.0, 1.0]
    cached = found["cached_local"] + found["cached_external"]
    assert found["prefill_tokens"] == found["prompt_tokens"] - cached
    assert found["kv_in_mb"] == found["cached_external"] * TOKEN_BYTES / (1 << 20)
    assert 0 < found["invalid_kv"] < 1
    assert found["misplaced_kv"] <= found["invalid_kv"]
