"""Options that several commands have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from elora_connector.cli.output import UsageError
from elora_connector.config import SETTINGS, EloraConfig, load_config

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, for programs.")
]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", help="Configuration file; else ELORA_CONFIG_FILE."),
]
Extra: TypeAlias = Annotated[
    str | None,
    typer.Option("--extra", help="vLLM's kv_connector_extra_config, as a JSON object."),
]
StoreUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The store; else remote_url of the configuration. Others on this machine can see "
        "a password given here: better name a variable, ELORA_REMOTE_PASSWORD_ENV.",
    ),
]
Adapter: TypeAlias = Annotated[
    str | None,
    typer.Option("--adapter", help="Only this adapter: NAME, or NAME@FINGERPRINT for one version."),
]
Namespace: TypeAlias = Annotated[
    str | None,
    typer.Option("--namespace", help="Only this namespace: its hex digits or the first of them."),
]


def resolve(
    config_file: Path | None = None, url: str | None = None, extra: str | None = None
) -> EloraConfig:
    """The configuration as vLLM's processes would see it, with the options on top.

    Raises:
        ConfigError: as at start.
        UsageError: `extra` is not a JSON object.
    """
    entries = _entries(extra)
    if url is not None:
        # Parsed here for the sake of the message: it names the option.
        SETTINGS["remote_url"].parse(url, "--url")
        entries["lmcache.remote_url"] = url
    env = dict(os.environ)
    if config_file is not None:
        env["ELORA_CONFIG_FILE"] = str(config_file)
    return load_config(env, entries)


def _entries(extra: str | None) -> dict[str, Any]:
    if extra is None:
        return {}
    try:
        entries = json.loads(extra)
    except ValueError:
        raise UsageError("--extra is not valid JSON") from None
    if not isinstance(entries, dict):
        raise UsageError("--extra is not a JSON object")
    return entries
