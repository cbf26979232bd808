"""BurstGPT's tables: Timestamp in s, Request tokens, Response tokens, in newer files Session ID.

A failed request has no response tokens; such rows are left out and counted.
"""

from __future__ import annotations

from elora_connector.simulator.traces.base import Format, RawTrace, TraceRow
from elora_connector.simulator.traces.collect import Collector
from elora_connector.simulator.traces.fields import seconds, tokens
from elora_connector.simulator.traces.source import Lines, csv_rows


def _read(lines: Lines) -> RawTrace:
    rows = Collector(lines)
    for row in csv_rows(lines, "Timestamp", "Request tokens", "Response tokens"):
        rows.add(
            TraceRow(
                at=seconds(lines, "Timestamp", row["Timestamp"]),
                input_tokens=tokens(lines, "Request tokens", row["Request tokens"]),
                output_tokens=tokens(lines, "Response tokens", row["Response tokens"]),
                session=row.get("Session ID") or None,
            )
        )
    return rows.done("burstgpt")


BURSTGPT = Format("burstgpt", lambda first: "Request tokens" in first, _read)
