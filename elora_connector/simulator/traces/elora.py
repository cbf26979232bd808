"""Our own traces: JSON lines with the adapter and the prefix of each request.

docs/traces.md describes the format.  A first line with `"format": "elora-trace"` gives the
chunk size; it may be left out of a file that has no `chunks`.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.traces.base import Format, RawTrace, TraceRow
from elora_connector.simulator.traces.collect import Collector
from elora_connector.simulator.traces.fields import block_ids, member, seconds, text, tokens
from elora_connector.simulator.traces.source import Lines, json_object

FORMAT = "elora-trace"
VERSION = 1


def _read(lines: Lines) -> RawTrace:
    rows = Collector(lines)
    chunk_tokens, name = 0, ""
    for line in lines:
        row = json_object(lines, line)
        if "format" in row:
            chunk_tokens, name = _header(lines, row)
        else:
            rows.add(_row(lines, row, chunk_tokens))
    return rows.done("elora", chunk_tokens, covers_answer=True)._replace(name=name)


def _header(lines: Lines, row: dict[str, Any]) -> tuple[int, str]:
    if row["format"] != FORMAT or row.get("version") != VERSION:
        lines.fail(f'expected "format": "{FORMAT}" and "version": {VERSION}')
    if lines.number != 1:
        lines.fail("the header must be the first line")
    chunk_tokens = tokens(lines, "chunk_tokens", member(lines, row, "chunk_tokens"))
    if not chunk_tokens:
        lines.fail("chunk_tokens: expected at least 1")
    return chunk_tokens, text(lines, "name", row.get("name", ""))


def _row(lines: Lines, row: dict[str, Any], chunk_tokens: int) -> TraceRow:
    prompt = tokens(lines, "prompt_tokens", member(lines, row, "prompt_tokens"))
    answer = tokens(lines, "output_tokens", member(lines, row, "output_tokens"))
    blocks = None
    if row.get("chunks") is not None:
        if not chunk_tokens:
            lines.fail("chunks need a first line with chunk_tokens")
        most = (prompt + answer) // chunk_tokens
        blocks = block_ids(lines, "chunks", row["chunks"], most)
    adapter = row.get("adapter")
    return TraceRow(
        at=seconds(lines, "at", member(lines, row, "at")),
        input_tokens=prompt,
        output_tokens=answer,
        adapter=None if adapter is None else text(lines, "adapter", adapter),
        session=_session(lines, row.get("session")),
        think_s=seconds(lines, "think_s", row.get("think_s", 0)),
        shared_tokens=tokens(lines, "shared_tokens", row.get("shared_tokens", 0)),
        blocks=blocks,
    )


def _session(lines: Lines, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if type(value) is not int:
        lines.fail("session: expected a whole number or a string")
    return str(value)


def write_trace(trace: Trace, path: str | PathLike[str]) -> None:
    """Write `trace` as JSON lines, gzip where the name ends in .gz.

    Labels and sessions become small numbers in the order in which they appear, so that
    equal traces give equal bytes; what is read back has other labels, the same prefixes.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    with target.open("wb") as raw:
        if target.suffix != ".gz":
            raw.writelines(_lines(trace))
            return
        # No name and no time in the header: equal traces, equal bytes.
        with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed, io.BufferedWriter(packed) as out:
            out.writelines(_lines(trace))


def _lines(trace: Trace) -> Iterator[bytes]:
    header = {
        "format": FORMAT,
        "version": VERSION,
        "name": trace.name,
        "chunk_tokens": trace.chunk_tokens,
    }
    yield _line(header)
    labels: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for request in trace.requests:
        yield _line(_members(request, labels, sessions))


def _members(
    request: SimRequest, labels: dict[int, int], sessions: dict[int, int]
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "at": round(request.at, 6),
        "adapter": request.adapter,
        "session": sessions.setdefault(request.session, len(sessions)),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
    }
    if request.think_s:
        made["think_s"] = round(request.think_s, 6)
    made["chunks"] = [labels.setdefault(label, len(labels)) for label in request.labels]
    return made


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


ELORA = Format(
    "elora",
    lambda first: first.startswith("{") and (FORMAT in first or '"prompt_tokens"' in first),
    _read,
)
