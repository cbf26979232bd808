"""Values of a line, checked: each failure says which field, what was expected and found."""

from __future__ import annotations

import math
from typing import Any

from elora_connector.simulator.traces.source import Lines

MAX_TOKENS = 1 << 24
"""Of one prompt or answer.  No model reads more, and a slip of the pen must not cost
gigabytes of labels."""
_MAX_SECONDS = 1e12


def number(lines: Lines, name: str, value: Any) -> float:
    """A finite number, from a cell or a JSON value."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        lines.fail(f"{name}: expected a number, found {_shown(value)}")
    try:
        made = float(value)
    except (ValueError, OverflowError):
        lines.fail(f"{name}: expected a number, found {_shown(value)}")
    if not math.isfinite(made):
        lines.fail(f"{name}: expected a finite number, found {_shown(value)}")
    return made


def seconds(lines: Lines, name: str, value: Any) -> float:
    """A time or duration, >= 0."""
    made = number(lines, name, value)
    if made < 0:
        lines.fail(f"{name}: {_shown(value)} is negative")
    if made > _MAX_SECONDS:
        lines.fail(f"{name}: {_shown(value)} is too large")
    return made


def tokens(lines: Lines, name: str, value: Any) -> int:
    """A whole number of tokens, >= 0."""
    made = number(lines, name, value)
    if made < 0:
        lines.fail(f"{name}: {_shown(value)} is negative")
    if made != int(made):
        lines.fail(f"{name}: expected a whole number, found {_shown(value)}")
    if made > MAX_TOKENS:
        lines.fail(f"{name}: {_shown(value)} is more than {MAX_TOKENS} tokens")
    return int(made)


def block_ids(lines: Lines, name: str, value: Any, most: int) -> tuple[int, ...]:
    """Ids of at most `most` blocks; ids are whole numbers of 64 bits, signed or not."""
    if not isinstance(value, list):
        lines.fail(f"{name}: expected a list of whole numbers, found {_shown(value)}")
    if len(value) > most:
        lines.fail(f"{name}: {len(value)} ids, but the tokens fill only {most} blocks")
    for item in value:
        if type(item) is not int or not -(1 << 63) <= item < 1 << 64:
            lines.fail(f"{name}: expected whole numbers of 64 bits, found {_shown(item)}")
    return tuple(value)


def text(lines: Lines, name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        lines.fail(f"{name}: expected a string, found {_shown(value)}")
    return value


def member(lines: Lines, row: dict[str, Any], name: str) -> Any:
    """The value under `name`, which must be there."""
    if name not in row:
        found = ", ".join(map(str, row))[:200] or "nothing"
        lines.fail(f"no field {name}; found {found}")
    return row[name]


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
