"""The traces that come with the package; data/README.md names their sources and licences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path

from elora_connector.simulator.traces.base import RawTrace, TraceRow
from elora_connector.simulator.traces.collect import Collector
from elora_connector.simulator.traces.fields import number, seconds, tokens
from elora_connector.simulator.traces.mooncake import BLOCK_TOKENS
from elora_connector.simulator.traces.servegen import (
    ClientLengths,
    ClientWindow,
    read_lengths,
    read_rates,
)
from elora_connector.simulator.traces.source import Lines, csv_rows
from elora_connector.simulator.traces.taskmaster import Dialogue, read_dialogues

MOONCAKE = ("conversation", "synthetic")
AZURE = ("conv", "code")
SERVEGEN = ("large", "mid", "small")


@contextmanager
def sample_file(name: str) -> Iterator[Path]:
    """The path of one packaged file."""
    with as_file(files(__package__) / "data" / name) as path:
        yield path


@lru_cache
def mooncake(name: str) -> RawTrace:
    """One of `MOONCAKE`, whole."""
    with sample_file(f"mooncake_{name}.csv.gz") as path:
        return _mooncake(Lines(path))._replace(name=f"mooncake-{name}")


@lru_cache
def azure(name: str) -> RawTrace:
    """One of `AZURE`: arrivals and lengths, no prefixes; conversations of the first 1,800 s."""
    from elora_connector.simulator.traces import read_rows

    with sample_file(f"azure_{name}.csv.gz") as path:
        return read_rows(path, "azure-compact")._replace(name=f"azure-{name}")


@lru_cache
def client_windows(name: str) -> tuple[ClientWindow, ...]:
    """One of `SERVEGEN`: 24 h in windows of 600 s."""
    with sample_file(f"servegen_{name}_rates.csv.gz") as path:
        return read_rates(path)


@lru_cache
def client_lengths(name: str) -> tuple[ClientLengths, ...]:
    """One of `SERVEGEN`: the clients whose lengths are known."""
    with sample_file(f"servegen_{name}_clients.csv.gz") as path:
        return read_lengths(path)


@lru_cache
def dialogues() -> tuple[Dialogue, ...]:
    """Taskmaster-4's dialogues."""
    with sample_file("taskmaster.jsonl.gz") as path:
        return read_dialogues(path)


def _mooncake(lines: Lines) -> RawTrace:
    """Undo the packing of scripts/thin_traces.py: each block knows the one before it."""
    rows = Collector(lines)
    parents: list[int] = []
    for row in csv_rows(lines, "t_ms", "input_tokens", "output_tokens", "shared"):
        shared = int(number(lines, "shared", row["shared"]))
        if not -1 <= shared < len(parents):
            lines.fail(f"shared: no block {shared} so far")
        prompt = tokens(lines, "input_tokens", row["input_tokens"])
        ids = _walk(parents, shared)
        before = ids[-1] if ids else -1
        for _ in range(len(ids), -(-prompt // BLOCK_TOKENS)):
            parents.append(before)
            before = len(parents) - 1
            ids.append(before)
        answer = tokens(lines, "output_tokens", row["output_tokens"])
        at = seconds(lines, "t_ms", row["t_ms"]) / 1000
        rows.add(TraceRow(at, prompt, answer, blocks=tuple(ids)))
    return rows.done("mooncake", BLOCK_TOKENS)


def _walk(parents: list[int], block: int) -> list[int]:
    """The ids from the first block to `block`."""
    ids: list[int] = []
    while block >= 0:
        ids.append(block)
        block = parents[block]
    ids.reverse()
    return ids
