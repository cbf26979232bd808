"""Numbered lines of a file, plain or gzip, and the one way to complain about them."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn

from elora_connector.errors import TraceError

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_LINE = 16 << 20
"""Bytes; a longer line is no trace, and reading on could fill the memory."""


class Lines:
    """Iterates over (number, text) of the lines that are not blank.

    Raises:
        TraceError: the file cannot be opened, is cut off, damaged or not UTF-8 text.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = fspath(path)
        self.number = 0

    def fail(self, message: str, line: int | None = None) -> NoReturn:
        """Complain about the line that was read last, or another one."""
        raise TraceError(self.path, self.number if line is None else line, message) from None

    def __iter__(self) -> Iterator[str]:
        self.number = 0
        for raw in self._raw():
            self.number += 1
            text = self._text(raw)
            if text:
                yield text

    def first(self) -> str:
        """The first line that is not blank; "" where there is none."""
        return next(iter(self), "")

    def _text(self, raw: bytes) -> str:
        if len(raw) > _MAX_LINE:
            self.fail(f"the line is longer than {_MAX_LINE >> 20} MiB")
        if b"\0" in raw:
            self.fail("binary data, expected text")
        try:
            text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"not UTF-8 text ({error.reason} at byte {error.start})")
        return text.strip()

    def _raw(self) -> Iterator[bytes]:
        try:
            with self._open() as stream:
                while raw := stream.readline(_MAX_LINE + 1):
                    yield raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.fail(f"damaged or truncated gzip after this line: {error}")
        except OSError as error:
            self.fail(error.strerror or str(error))

    def _open(self) -> gzip.GzipFile | BufferedReader:
        path = Path(self.path)
        with path.open("rb") as stream:
            packed = stream.read(2) == _GZIP_MAGIC
        return gzip.open(path, "rb") if packed else path.open("rb")


def csv_rows(lines: Lines, *required: str) -> Iterator[dict[str, str]]:
    """The rows of a table whose first line names its columns.

    Raises:
        TraceError: a required column is missing, or a row has too few or too many cells.
    """
    header: list[str] = []
    for text in lines:
        cells = [cell.strip() for cell in _cells(lines, text)]
        if not header:
            header = cells
            missing = [name for name in required if name not in header]
            if missing:
                lines.fail(f"no column {', '.join(missing)}; found {', '.join(header)[:200]}")
            continue
        if len(cells) != len(header):
            lines.fail(f"expected {len(header)} cells, found {len(cells)}")
        yield dict(zip(header, cells, strict=True))


def _cells(lines: Lines, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except (csv.Error, StopIteration) as error:
        lines.fail(f"not a line of a table: {error}")


def json_value(lines: Lines, text: str) -> Any:
    """The value that one line holds."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        lines.fail(f"not valid JSON: {error}")


def json_object(lines: Lines, text: str) -> dict[str, Any]:
    """The object that one line holds."""
    value = json_value(lines, text)
    if not isinstance(value, dict):
        lines.fail(f"expected a JSON object, found {type(value).__name__}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
