"""Gathering rows: in order of time, without those that never ran."""

from __future__ import annotations

from elora_connector.simulator.traces.base import RawTrace, TraceRow
from elora_connector.simulator.traces.source import Lines


class Collector:
    """Rows of one file as they are read."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._rows: list[TraceRow] = []
        self._last = 0.0
        self._skipped = 0

    def add(self, row: TraceRow) -> None:
        """Take one row.

        Raises:
            TraceError: it arrives before the row above.
        """
        if row.at < self._last:
            self._lines.fail(f"times are not sorted: {row.at:.6f} s after {self._last:.6f} s")
        self._last = row.at
        if row.input_tokens and row.output_tokens:
            self._rows.append(row)
        else:
            self._skipped += 1

    def done(self, form: str, block_tokens: int = 0, *, covers_answer: bool = False) -> RawTrace:
        """All rows.

        Raises:
            TraceError: there are none.
        """
        if not self._rows:
            self._lines.fail("no requests in this file", line=0)
        return RawTrace("", form, tuple(self._rows), block_tokens, covers_answer, self._skipped)
