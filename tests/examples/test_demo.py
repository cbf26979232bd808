"""The demo's verdicts: it must fail when a row is wrong, and only then."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from examples.demo import Row, Stage, report
from examples.govon_pipeline import CALLS, QUESTIONS, Pipeline
from examples.servers import Answer
from examples.tiny_model import make_tiny_model


class FakeServer:
    """Answers with tokens that depend on model and prompt, or on the prompt alone."""

    def __init__(self, *, adapter_blind: bool = False, supplied: int = 0) -> None:
        self._blind = adapter_blind
        self._supplied = supplied
        self._hits = 0

    def complete(self, model: str, prompt: str) -> Answer:
        self._hits += self._supplied
        seen = prompt if self._blind else model + prompt
        return Answer(tuple(seen.encode()), len(prompt), self._supplied, 0.001)

    def external_hits(self) -> int:
        return self._hits


def rows_of(stage: Stage, server: FakeServer, truth: dict) -> list[Row]:
    return list(stage.run(server, truth))  # type: ignore[arg-type]


@pytest.fixture
def truth() -> dict[tuple[str, str], tuple[int, ...]]:
    known: dict[tuple[str, str], tuple[int, ...]] = {}
    rows_of(Stage("plain", ("parking",), False), FakeServer(), known)
    return known


def test_equal_tokens_with_hits_are_right(truth: dict) -> None:
    rows = rows_of(Stage("host", ("parking",), True), FakeServer(supplied=64), truth)
    assert [row.ok for row in rows] == [True] * 4
    assert report(Console(file=io.StringIO()), rows) == 0


def test_wrong_tokens_fail_the_demo(truth: dict) -> None:
    rows = rows_of(Stage("host", ("parking",), True), FakeServer(adapter_blind=True), truth)
    assert not any(row.equal or row.ok for row in rows)
    assert report(Console(file=io.StringIO()), rows) == 1


def test_right_tokens_without_reuse_fail_where_reuse_was_promised(truth: dict) -> None:
    rows = rows_of(Stage("host", ("parking",), True), FakeServer(), truth)
    assert all(row.equal and not row.ok for row in rows)


def test_reuse_where_nothing_was_stored_fails(truth: dict) -> None:
    rows = rows_of(Stage("cold", ("parking",), False), FakeServer(supplied=64), truth)
    assert all(row.equal and not row.ok for row in rows)


def test_expected_wrong_answers_are_named_and_do_not_fail() -> None:
    known: dict[tuple[str, str], tuple[int, ...]] = {}
    blind = FakeServer(adapter_blind=True)
    plain = rows_of(Stage("plain", ("parking",), False), FakeServer(), known)
    known[("base", next(iter(known))[1])] = tuple(next(iter(known))[1].encode())
    rows = rows_of(Stage("example", ("parking",), None, adapters_wrong=True), blind, known)
    assert [row.verdict for row in rows] == ["yes"] + ["WRONG (expected)"] * 3
    assert all(row.ok for row in plain + rows)


def test_an_adapter_that_is_unexpectedly_right_fails(truth: dict) -> None:
    stage = Stage("example", ("parking",), None, adapters_wrong=True)
    rows = rows_of(stage, FakeServer(), truth)
    assert [row.ok for row in rows] == [True, False, False, False]


def test_fixed_prompts_have_their_length_and_no_common_prefix(tmp_path) -> None:
    pipeline = Pipeline(make_tiny_model(tmp_path), offices=5)
    for call in CALLS:
        prompts = [pipeline.fixed_prompt(call, office) for office in range(5)]
        assert {len(prompt) for prompt in prompts} == {call.fixed_tokens}
        assert len({prompt[0] for prompt in prompts}) == 5


def test_questions_share_no_first_token(tmp_path) -> None:
    tokenizer = Tokenizer.from_file(str(make_tiny_model(tmp_path).model / "tokenizer.json"))
    firsts = [tokenizer.encode(question).ids[0] for question in QUESTIONS]
    assert len(set(firsts)) == len(QUESTIONS)
