"""`elora doctor`: is everything there that serving with this configuration needs?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from elora_connector.cli import PROBLEM, options
from elora_connector.cli.checks import Check, Status, fail, ok, warn
from elora_connector.cli.machine import check_device, check_memory, check_plugin, check_vllm
from elora_connector.cli.output import (
    console,
    human_bytes,
    printable,
    reporting,
    show,
    stdout_kept_clean,
)
from elora_connector.cli.redis_checks import check_store
from elora_connector.cli.store import check_address
from elora_connector.config import EloraConfig, check_files
from elora_connector.errors import ConfigError, UnsupportedError

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: further arguments of vllm serve, for --model."),
    ] = None,
    config: options.ConfigFile = None,
    url: options.StoreUrl = None,
    extra: options.Extra = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Tell this model's namespace: a directory or a Hub name."),
    ] = None,
    no_write: Annotated[
        bool, typer.Option("--no-write", help="Write nothing to the store, so no throughput.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check vLLM, plugin, device, configuration, memory and store; say what to do.

    For the throughput it writes 8 MiB to the store and removes them. Exit code 1 if a
    check fails.
    """
    with reporting(as_json, config_is_usage=False):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        checks = []
        write = not no_write
        for check in _checks(config, url, extra, model, vllm_arguments or [], write=write):
            checks.append(check)
            if not as_json:
                _print(check)
        counts = Counter(check.status.value for check in checks)
        data = {
            "checks": [check.data() for check in checks],
            "ok": counts["ok"],
            "warn": counts["warn"],
            "fail": counts["fail"],
        }
        show(as_json, data, lambda console: console.print(_summary(counts)))
        if counts["fail"]:
            raise typer.Exit(PROBLEM)


def _checks(
    file: Path | None,
    url: str | None,
    extra: str | None,
    model: str | None,
    arguments: list[str],
    *,
    write: bool,
) -> Iterator[Check]:
    with stdout_kept_clean():
        of_vllm = [check_vllm(), check_plugin(), check_device()]
    yield from of_vllm
    try:
        resolved = options.resolve(file, url, extra)
        check_files(resolved)
        check_address(resolved)
    except ConfigError as error:
        yield fail("configuration", str(error), "elora config shows where values come from")
        return
    yield _configuration(resolved)
    ranks = 1
    if model is not None:
        with stdout_kept_clean():
            found, ranks = _model(resolved, ["--model", model, *arguments])
        yield found
    yield check_memory(resolved, ranks)
    if resolved.remote_url is None:
        yield ok("redis", "none configured: KV stays on this machine")
    else:
        yield from check_store(resolved, write=write)


def _configuration(resolved: EloraConfig) -> Check:
    changed = len(resolved.origins)
    if resolved.warnings:
        advice = "see docs/configuration.md"
        return warn("configuration", "; ".join(resolved.warnings), advice, changed=changed)
    return ok("configuration", f"valid, {changed} settings changed", changed=changed)


def _model(resolved: EloraConfig, arguments: list[str]) -> tuple[Check, int]:
    """The check, and the number of ranks that share this machine's memory."""
    try:
        from elora_connector.integration.vllm.fingerprint import fingerprint

        found = fingerprint(resolved, arguments)
    except (ConfigError, UnsupportedError) as error:
        return fail("model", str(error), "give vLLM's own arguments after --"), 1
    except ImportError as error:
        return fail("model", f"cannot import {error.name}", "see the check of vLLM"), 1
    text = (
        f"namespace {found.namespace}, {found.ranks} ranks, a chunk of {found.chunk_size} tokens "
        f"is {human_bytes(found.chunk_bytes)} on each"
    )
    facts = {
        "namespace": found.namespace,
        "certain": found.certain,
        "ranks": found.ranks,
        "block_size": found.block_size,
        "chunk_size": found.chunk_size,
        "chunk_bytes": found.chunk_bytes,
    }
    if found.chunk_bytes > resolved.remote.max_value_bytes:
        advice = "over elora.remote.max_value_mb: the remote tier would be off"
        return warn("model", text, advice, **facts), found.ranks
    if not found.certain:
        advice = (
            "the engine may choose another block size; it logs its namespace. Or: -- --block-size N"
        )
        return warn("model", text, advice, **facts), found.ranks
    return ok("model", text, **facts), found.ranks


def _print(check: Check) -> None:
    line = Text(f"{check.status.value:>4}", style=_STYLES[check.status])
    line.append(f"  {check.name}: ", style="bold").append(printable(check.detail), style="none")
    console().print(line)
    if check.advice:
        console().print(Text(f"      -> {printable(check.advice)}"))


def _summary(counts: Counter[str]) -> str:
    return f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures"
