"""Azure's LLM inference traces: arrival times and lengths.

Two forms: as published (TIMESTAMP, ContextTokens, GeneratedTokens; a date with up to seven
digits of a second) and compact (t_s, input_tokens, output_tokens).
"""

from __future__ import annotations

import re
from datetime import datetime, timezone

from elora_connector.simulator.traces.base import Format, RawTrace, TraceRow
from elora_connector.simulator.traces.collect import Collector
from elora_connector.simulator.traces.fields import seconds, tokens
from elora_connector.simulator.traces.source import Lines, csv_rows

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)?")


def _read_published(lines: Lines) -> RawTrace:
    rows = Collector(lines)
    start: float | None = None
    for row in csv_rows(lines, "TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        at = _stamp(lines, row["TIMESTAMP"])
        start = at if start is None else start
        if at < start:
            lines.fail("times are not sorted: earlier than the first row")
        rows.add(
            TraceRow(
                at=round(at - start, 6),
                input_tokens=tokens(lines, "ContextTokens", row["ContextTokens"]),
                output_tokens=tokens(lines, "GeneratedTokens", row["GeneratedTokens"]),
            )
        )
    return rows.done("azure")


def _read_compact(lines: Lines) -> RawTrace:
    rows = Collector(lines)
    for row in csv_rows(lines, "t_s", "input_tokens", "output_tokens"):
        rows.add(
            TraceRow(
                at=seconds(lines, "t_s", row["t_s"]),
                input_tokens=tokens(lines, "input_tokens", row["input_tokens"]),
                output_tokens=tokens(lines, "output_tokens", row["output_tokens"]),
            )
        )
    return rows.done("azure-compact")


def _stamp(lines: Lines, text: str) -> float:
    """Seconds since 1970; a time without a zone is UTC."""
    match = _STAMP.fullmatch(text)
    if not match:
        lines.fail(f"TIMESTAMP: expected YYYY-MM-DD HH:MM:SS.FFFFFF, found {text[:60]!r}")
    whole, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z") else f"{zone[:3]}:{zone[-2:]}"
    try:
        moment = datetime.fromisoformat(whole + zone).astimezone(timezone.utc)
    except (ValueError, OverflowError) as error:
        lines.fail(f"TIMESTAMP: {text!r}: {error}")
    return moment.timestamp() + float(fraction or 0)


AZURE = Format("azure", lambda first: "ContextTokens" in first, _read_published)
AZURE_COMPACT = Format(
    "azure-compact", lambda first: first.startswith("t_s,input_tokens"), _read_compact
)
