"""ServeGen's clients in their compact form: rate and burstiness in each window of 600 s.

rates:   rank, t_s, rate (requests/s), cv (of the gaps), dist (G gamma, W Weibull)
clients: rank, client, in_p5 ... in_p95, out_p5 ... out_p95 (tokens; empty where unknown)
"""

from __future__ import annotations

from os import PathLike
from typing import NamedTuple

from elora_connector.simulator.traces.fields import number, seconds, tokens
from elora_connector.simulator.traces.source import Lines, csv_rows

WINDOW_S = 600.0
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SUFFIXES = ("p5", "p25", "p50", "p75", "p95")
_KINDS = ("G", "W")


class ClientWindow(NamedTuple):
    """What one client did in one window.

    Args:
        rank: 0 is the busiest client.
        start: of the window, in s.
        rate: requests/s.
        cv: coefficient of variation of the gaps between requests.
        kind: "G" or "W", the family that fits the gaps best.
    """

    rank: int
    start: float
    rate: float
    cv: float
    kind: str


class ClientLengths(NamedTuple):
    """Tokens of a client's prompts and answers at `QUANTILES`."""

    rank: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def read_rates(path: str | PathLike[str]) -> tuple[ClientWindow, ...]:
    """All windows of all clients, sorted by rank and time.

    Raises:
        TraceError: names the line that is wrong.
    """
    lines = Lines(path)
    found: list[ClientWindow] = []
    for row in csv_rows(lines, "rank", "t_s", "rate", "cv", "dist"):
        made = ClientWindow(
            tokens(lines, "rank", row["rank"]),
            seconds(lines, "t_s", row["t_s"]),
            seconds(lines, "rate", row["rate"]),
            seconds(lines, "cv", row["cv"]),
            row["dist"],
        )
        if made.kind not in _KINDS:
            lines.fail(f"dist: expected one of {', '.join(_KINDS)}, found {made.kind[:20]!r}")
        if found and made[:2] <= found[-1][:2]:
            lines.fail("windows are not sorted by rank and time")
        found.append(made)
    if not found:
        lines.fail("no windows in this file", line=0)
    return tuple(found)


def read_lengths(path: str | PathLike[str]) -> tuple[ClientLengths, ...]:
    """The clients whose lengths are known.

    Raises:
        TraceError: names the line that is wrong.
    """
    lines = Lines(path)
    columns = [f"{side}_{suffix}" for side in ("in", "out") for suffix in _SUFFIXES]
    found: list[ClientLengths] = []
    for row in csv_rows(lines, "rank", *columns):
        if not row["in_p5"]:
            continue
        values = [round(number(lines, name, row[name])) for name in columns]
        prompt, answer = tuple(values[:5]), tuple(values[5:])
        if min(values) < 0 or list(prompt) != sorted(prompt) or list(answer) != sorted(answer):
            lines.fail("quantiles must be >= 0 and rise")
        found.append(ClientLengths(tokens(lines, "rank", row["rank"]), prompt, answer))
    if not found:
        lines.fail("no lengths in this file", line=0)
    return tuple(found)
