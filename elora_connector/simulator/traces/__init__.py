"""Readers of request traces: Mooncake, BurstGPT, Azure, Bailian and our own JSON lines."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from elora_connector.errors import TraceError
from elora_connector.simulator.traces.azure import AZURE, AZURE_COMPACT
from elora_connector.simulator.traces.bailian import BAILIAN
from elora_connector.simulator.traces.base import Format, RawTrace, TraceRow
from elora_connector.simulator.traces.burstgpt import BURSTGPT
from elora_connector.simulator.traces.elora import ELORA, write_trace
from elora_connector.simulator.traces.mooncake import MOONCAKE
from elora_connector.simulator.traces.source import Lines

__all__ = ["FORMATS", "RawTrace", "TraceError", "TraceRow", "read_rows", "write_trace"]

FORMATS: dict[str, Format] = {
    form.name: form for form in (ELORA, MOONCAKE, BAILIAN, BURSTGPT, AZURE, AZURE_COMPACT)
}


def read_rows(path: str | PathLike[str], form: str | None = None) -> RawTrace:
    """The requests of a trace file.

    Args:
        path: plain or gzip.
        form: one of `FORMATS`; None looks at the first line.

    Raises:
        TraceError: the file or a line of it is bad; names the line.
    """
    lines = Lines(path)
    chosen = FORMATS[form] if form else _detect(lines)
    raw = chosen.read(lines)
    return raw if raw.name else raw._replace(name=Path(lines.path).name.split(".")[0])


def _detect(lines: Lines) -> Format:
    first = lines.first()
    if not first:
        lines.fail("the file is empty", line=0)
    found = next((form for form in FORMATS.values() if form.sniff(first)), None)
    if found is None:
        lines.fail(f"not a trace of a known format ({', '.join(FORMATS)})")
    return found
