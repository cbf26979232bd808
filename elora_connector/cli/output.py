"""What a command prints: one result on stdout, everything else on stderr.

Names that come out of a store are written by strangers.  They are shown with everything
that is not printable escaped, and never parsed as markup.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elora_connector.cli import PROBLEM, USAGE
from elora_connector.errors import ConfigError, TraceError
from elora_connector.tiers.redis_failure import StoreError, explain

_PIPE_WIDTH = 200
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class UsageError(Exception):
    """The command line asks for something that cannot be meant."""


def console(*, stderr: bool = False) -> Console:
    """A console that takes text as it is; made anew, because tests replace the streams."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(
        file=stream, markup=False, highlight=False, emoji=False, width=width, soft_wrap=True
    )


def note(text: str) -> None:
    """One line for people, on stderr."""
    console(stderr=True).print(Text(text))


def printable(text: str) -> str:
    """`text` with control, format and other unprintable characters as escapes; reversible."""
    shown = text.replace("\\", "\\\\")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def human_bytes(size: float) -> str:
    """A size with a binary unit."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError(size)


def human_seconds(seconds: float | None) -> str:
    """A duration in its two largest units; None is for ever."""
    if seconds is None:
        return "none"
    whole = round(seconds)
    for unit, size, below in (("d", 86400, "h"), ("h", 3600, "m"), ("m", 60, "s")):
        if whole >= size:
            rest = whole % size // {"h": 3600, "m": 60, "s": 1}[below]
            return f"{whole // size}{unit}{rest}{below}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"


def table(columns: Mapping[str, str], rows: Sequence[Sequence[object]], title: str = "") -> Table:
    """A table of plain text.

    Args:
        columns: title -> "left" or "right".
    """
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name, side in columns.items():
        made.add_column(Text(name), justify="right" if side == "right" else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def show(as_json: bool, data: Mapping[str, Any], render: Callable[[Console], None]) -> None:
    """Print the result in the form that was asked for."""
    if as_json:
        # ASCII only: the terminal never sees a character that a stranger chose.
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        render(console())


@contextmanager
def reporting(as_json: bool, *, config_is_usage: bool = True) -> Iterator[None]:
    """Turn what may go wrong into one message and the right exit code.

    Args:
        config_is_usage: a bad configuration is bad usage; False where checking it is the task.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    try:
        yield
    except (UsageError, ConfigError) as error:
        problem = isinstance(error, ConfigError) and not config_is_usage
        _fail(as_json, str(error), PROBLEM if problem else USAGE)
    except (StoreError, RedisError) as error:
        # redis-py's own texts may quote a login.
        failure = explain(error)
        _fail(as_json, f"{failure} [{failure.reason}]", PROBLEM)
    except TraceError as error:
        _fail(as_json, str(error), PROBLEM)
    except KeyboardInterrupt:
        _fail(as_json, "interrupted", PROBLEM)


def _fail(as_json: bool, message: str, code: int) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"error": message}) + "\n")
    note(f"error: {printable(message)}")
    raise typer.Exit(code) from None


@contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Whatever writes to stdout meanwhile, in Python or C, writes to stderr."""
    sys.stdout.flush()
    saved_stream, sys.stdout = sys.stdout, sys.stderr
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 1)
        os.close(saved)
        sys.stdout = saved_stream
