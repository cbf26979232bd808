"""Requests whose right answers are known: a fixed pool, asked again and again.

Plain vLLM answers each question once; greedy answers do not change, so ten thousand
requests are checked against a pool of a few hundred.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.oracle import Oracle

MODEL_LENGTH = 512
TOKENS = 4
"""Most tokens asked for."""


@dataclass(frozen=True)
class Question:
    """Tokens of a prompt, the adapter's name (None: base model), and the right answer."""

    prompt: tuple[int, ...]
    adapter: str | None
    answer: tuple[int, ...]


def make_questions(
    oracle: Oracle, adapters: dict[str, Path], conversations: int, seed: int
) -> list[Question]:
    """Conversations of two turns over shared documents, each on one adapter."""
    rng = random.Random(seed)
    documents = [_words(rng, rng.randint(60, 200)) for _ in range(max(2, conversations // 8))]
    return list(_converse(oracle, adapters, documents, conversations, rng))


def _converse(
    oracle: Oracle,
    adapters: dict[str, Path],
    documents: Sequence[list[int]],
    conversations: int,
    rng: random.Random,
) -> Iterator[Question]:
    for _ in range(conversations):
        adapter = rng.choice([None, *adapters])
        path = None if adapter is None else adapters[adapter]
        text = [*rng.choice(documents), *_words(rng, rng.choice([1, 5, 33]))]
        for _ in range(2):
            answer = oracle(text, path, TOKENS)
            yield Question(tuple(text), adapter, answer)
            text = [*text, *answer, *_words(rng, rng.choice([4, 40]))]


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(8, 500) for _ in range(count)]
