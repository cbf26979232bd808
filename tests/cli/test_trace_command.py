"""`elora trace`: make, convert, stats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.filling import Ran

Elora = Callable[..., Ran]

AZURE = "t_s,input_tokens,output_tokens\n" + "".join(f"{i},{600 + i},10\n" for i in range(100))
OWN = (
    '{"format":"elora-trace","version":1,"name":"mine","chunk_tokens":64}\n'
    '{"at":0,"adapter":"a","session":0,"prompt_tokens":150,"output_tokens":60,"chunks":[0,1,2]}\n'
    '{"at":1,"adapter":"a","session":0,"prompt_tokens":220,"output_tokens":36,'
    '"chunks":[0,1,2,3]}\n'
    '{"at":2,"adapter":"b\\u001b[31m","session":1,"prompt_tokens":200,"output_tokens":1,'
    '"chunks":[0,1,2]}\n'
    '{"at":4,"adapter":"","session":2,"prompt_tokens":30,"output_tokens":1}\n'
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text(OWN)
    return path


def test_stats_of_a_known_trace(elora: Elora, own: Path) -> None:
    found = elora("trace", "stats", own, "--json").json
    assert found == {
        "name": "mine",
        "chunk_tokens": 64,
        "format": "elora",
        "skipped": 0,
        "requests": 4,
        "sessions": 3,
        "span_s": 4.0,
        "rate": 1.0,
        "peak_rate": 1,
        "gap_cv": 0.353553,
        "dispersion": 0.2,
        "prompt": {"p50": 175.0, "p95": 217.0, "mean": 150.0},
        "output": {"p50": 18.5, "p95": 56.4, "mean": 24.5},
        "hit_share": 0.32,  # three chunks of turn 1, of 600 prompt tokens
        "adapter_shares": {"a": 0.5, "b\x1b[31m": 0.25, "": 0.25},
    }


def test_stats_as_text(elora: Elora, own: Path) -> None:
    out = elora("trace", "stats", own).out
    assert "median 175, 95 % below 217, mean 150" in out
    assert "32.0% of prompt tokens" in out
    assert "\x1b[31m" not in out
    assert "b\\x1b[31m" in out
    assert "(base model)" in out


def test_make_and_read_back(elora: Elora, tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl.gz"
    arguments = ("--workload", "agent", "--adapters", 7, "--rate", 4, "--requests", 200)
    made = elora("trace", "make", *arguments, "--seed", 5, out, "--json")
    assert (made.code, made.json["requests"], made.json["file"]) == (0, 200, str(out))
    first = out.read_bytes()
    elora("trace", "make", *arguments, "--seed", 5, out)
    assert out.read_bytes() == first
    elora("trace", "make", *arguments, "--seed", 6, out)
    assert out.read_bytes() != first
    out.write_bytes(first)
    found = elora("trace", "stats", out, "--json").json
    assert {k: v for k, v in found.items() if k not in ("format", "skipped")} == {
        k: v for k, v in made.json.items() if k != "file"
    }
    header = json.loads(gzip.decompress(first).split(b"\n")[0])
    assert header == {"format": "elora-trace", "version": 1, "name": "agent", "chunk_tokens": 256}


def test_convert(elora: Elora, tmp_path: Path) -> None:
    source, out = tmp_path / "a.csv", tmp_path / "o.jsonl"
    source.write_text(AZURE)
    ran = elora("trace", "convert", "--format", "azure-compact", source, out, "--json")
    assert ran.json["adapter_shares"] == {"": 1.0}
    options: tuple[Any, ...] = ("--adapters", 4, "--popularity", "distinct", "--chunk", 128)
    ran = elora("trace", "convert", source, out, *options, "--json")
    assert ran.json["format"] == "azure-compact"
    assert set(ran.json["adapter_shares"].values()) == {0.25}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0]["chunk_tokens"] == 128
    assert rows[2] == {
        "at": 1.0,
        "adapter": "adapter-001",
        "session": 1,
        "prompt_tokens": 601,
        "output_tokens": 10,
        "chunks": [4, 5, 6, 7],
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("stats", "{bad}"), 1, "bad.csv:3: input_tokens: '-5' is negative"),
        (("convert", "{bad}", "{out}"), 1, "bad.csv:3: input_tokens"),
        (("stats", "{nowhere}"), 1, "No such file"),
        (("stats", "--format", "pdf", "{bad}"), 2, "--format: expected one of"),
        (("stats", "--chunk", "-1", "{good}"), 2, "--chunk: expected 1 to"),
        (("stats", "--adapters", "0", "{good}"), 2, "adapters: expected 1 to"),
        (("stats", "--adapters", "2", "--popularity", "x", "{good}"), 2, "popularity: expected"),
        (("make", "--workload", "poetry", "{out}"), 2, "workload: expected one of"),
        (("make", "--requests", "5", "--duration", "5", "{out}"), 2, "either a number"),
        (("make", "--requests", "5", "{nowhere}/x"), 2, "cannot write"),
    ],
)
def test_what_goes_wrong(
    elora: Elora, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "bad.csv").write_text("t_s,input_tokens,output_tokens\n0,1,1\n1,-5,1\n")
    (tmp_path / "good.csv").write_text(AZURE)
    names = {
        "bad": tmp_path / "bad.csv",
        "good": tmp_path / "good.csv",
        "out": tmp_path / "o.jsonl",
        "nowhere": tmp_path / "nowhere",
    }
    given = [argument.format(**names) for argument in arguments]
    ran = elora("trace", *given)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert message in elora("trace", *given, "--json").json["error"]
    assert not names["out"].exists()
