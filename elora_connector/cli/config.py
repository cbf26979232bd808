"""`elora config`: the resolved configuration and where each value came from."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from elora_connector.cli import PROBLEM, options
from elora_connector.cli.output import note, printable, reporting, show, table
from elora_connector.cli.store import check_address
from elora_connector.config import SETTINGS, EloraConfig, check_files
from elora_connector.errors import ConfigError


def config(
    file: Annotated[
        Path | None,
        typer.Argument(help="Configuration file; else the one that ELORA_CONFIG_FILE names."),
    ] = None,
    extra: options.Extra = None,
    as_json: options.Json = False,
) -> None:
    """Show the resolved configuration and where each value came from.

    Checks what vLLM's start checks and fails with the same messages. A file that is not
    there, as on another machine than the one that is configured, fails only after the values
    were shown. Secrets are not shown.
    """
    with reporting(as_json, config_is_usage=False):
        resolved = options.resolve(file, extra=extra)
        missing = _missing_file(resolved)
        if not missing:
            check_address(resolved)
        rows = [_row(key, resolved) for key in SETTINGS]
        for warning in resolved.warnings:
            note(f"warning: {printable(warning)}")
        data: dict[str, Any] = {"settings": {row.pop("key"): row for row in map(dict, rows)}}
        data["warnings"] = list(resolved.warnings)
        data |= {"error": missing} if missing else {}
        show(as_json, data, lambda console: _render(console, rows))
    if missing:
        note(f"error: {printable(missing)}")
        raise typer.Exit(PROBLEM)


def _missing_file(resolved: EloraConfig) -> str:
    """What the start would say of a file that cannot be read; empty if all can."""
    try:
        check_files(resolved)
    except ConfigError as error:
        return str(error)
    return ""


def _row(key: str, resolved: EloraConfig) -> dict[str, Any]:
    setting = SETTINGS[key]
    value = attrgetter(setting.path)(resolved)
    shown = setting.show(value)
    plain = isinstance(value, bool | int | float | None) and shown != "***"
    return {
        "key": key,
        "value": value if plain else shown,
        "unit": setting.unit.split(" ")[0],
        "origin": resolved.origin(key),
    }


def _render(console: Console, rows: list[dict[str, Any]]) -> None:
    columns = {"setting": "left", "value": "left", "unit": "left", "from": "left"}
    cells = [
        (row["key"], printable(_text(row["value"])), row["unit"], printable(row["origin"]))
        for row in rows
    ]
    console.print(table(columns, cells))


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
