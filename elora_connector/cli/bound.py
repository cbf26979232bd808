"""`elora bound`: what hit rate to expect, how many adapters fit, one instance or several."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from elora_connector.cli import options
from elora_connector.cli.bound_report import Answer, data, render
from elora_connector.cli.output import UsageError, note, reporting, show
from elora_connector.errors import EloraError
from elora_connector.simulator.advice import Case, Speeds, advise
from elora_connector.simulator.figures import (
    Load,
    closed_forms,
    counted,
    expected,
    measured,
    trace_adapters,
    trace_shares,
)
from elora_connector.simulator.from_rows import to_trace
from elora_connector.simulator.models import (
    ALL_LINEAR,
    GB,
    MACHINES,
    Machine,
    model_from_config,
)
from elora_connector.simulator.popularity import Popularity
from elora_connector.simulator.requests import Trace
from elora_connector.simulator.shares import NamedShares, Shares, read_shares, zipf
from elora_connector.simulator.sizing import Sizing
from elora_connector.simulator.traces import read_rows


def bound(  # noqa: PLR0913, PLR0917 - one parameter for each option
    adapters: Annotated[
        int | None,
        typer.Option("--adapters", min=1, max=1_000_000, help="How many adapters there are."),
    ] = None,
    distribution: Annotated[
        str,
        typer.Option(
            "--distribution",
            help="How requests spread over them: uniform, zipf:S, or a FILE of weights "
            "(`weight` or `name weight` a line, or a JSON object).",
        ),
    ] = "uniform",
    shared_fraction: Annotated[
        float,
        typer.Option(
            "--shared-fraction", min=0, max=1, help="Part of a prompt that its adapter's share."
        ),
    ] = 0.85,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests until the cache is emptied.")
    ] = 10_000,
    capacity: Annotated[
        int | None,
        typer.Option(
            "--capacity", min=0, help="Prefixes that fit (chunks with --trace); else by memory."
        ),
    ] = None,
    idle_s: Annotated[
        float | None,
        typer.Option("--idle-s", min=0, help="Prefixes not used for so many seconds go."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0, max=1e6, help="Requests per second, all adapters."),
    ] = None,
    sticky: Annotated[
        float,
        typer.Option(
            "--sticky", min=0, max=1, help="Part of the requests that are later turns of a session."
        ),
    ] = 0.0,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, max=10**8, help="Length of a prompt.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Count the hits of these requests instead."),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", help=f"{', '.join(MACHINES)}, or a config.json (or its folder)."),
    ] = "llama3-8b",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapters.")] = 16,
    modules: Annotated[
        str, typer.Option("--modules", help="What they change: all, or names with commas.")
    ] = "all",
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots", min=1, help="Adapters on the GPU at once (vLLM's --max-loras); else all."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="GPUs of one instance; else 1, 4 or 8 by model."),
    ] = None,
    gpu_memory: Annotated[
        float, typer.Option("--gpu-memory", min=0, help="GB (10^9 bytes) of each GPU.")
    ] = 80.0,
    host_memory: Annotated[
        float, typer.Option("--host-memory", min=0, help="GB of host memory for KV and adapters.")
    ] = 256.0,
    link: Annotated[
        float | None,
        typer.Option("--link", min=0.001, help="GB/s from host memory, all GPUs; else 50 each."),
    ] = None,
    prefill_speed: Annotated[
        float | None,
        typer.Option(
            "--prefill-speed",
            min=0.001,
            help="Prompt tokens per second of the instance, measured; else from the GPUs' peak.",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=1, help="chunk_size of the connector.")
    ] = 256,
    as_json: options.Json = False,
) -> None:
    """Expected prefix-cache hit rate and memory for many adapters, beside the usual rules.

    Without a trace requests are independent and the prompts of an adapter begin with the same
    text. docs/sizing.md explains every figure.
    """
    with reporting(as_json):
        _finite(idle_s, rate, gpu_memory, host_memory, link, prefill_speed)
        if idle_s is not None and rate is None and trace is None:
            raise UsageError("--idle-s needs --rate")
        load = Load(shared_fraction, requests, capacity, idle_s, rate, sticky, prompt_tokens)
        try:
            machine = _machine(model, gpus, gpu_memory, host_memory)
            asked = _asked(adapters, distribution)
            found = None if trace is None else _trace(trace, chunk_tokens, asked)
            shares = _shares(asked) if found is None else trace_shares(found)
            number = len(shares) if found is None else trace_adapters(found)
            sizing = Sizing(machine, number, rank, _modules(modules), slots, chunk_tokens)
            speeds = _speeds(machine, link, prefill_speed)
            answer = _answer(load, shares, sizing, speeds, found)
        except EloraError as error:
            raise UsageError(str(error)) from None
        show(as_json, data(answer), lambda console: render(console, answer))


def _finite(*values: float | None) -> None:
    # The ranges of the options refuse nan, but not infinity.
    for value in values:
        if value is not None and not math.isfinite(value):
            raise UsageError(f"expected a number, got {value}")


def _machine(model: str, gpus: int | None, gpu_gb: float, host_gb: float) -> Machine:
    known = MACHINES.get(model.lower())
    if known is None:
        path = Path(model)
        if not path.exists():
            raise UsageError(f"--model {model}: expected {', '.join(MACHINES)} or a file")
        known = Machine(model_from_config(path))
    gpu = replace(known.gpu, memory_bytes=round(gpu_gb * GB))
    return replace(known, gpus=gpus or known.gpus, gpu=gpu, host_bytes=round(host_gb * GB))


def _asked(adapters: int | None, distribution: str) -> NamedShares | None:
    """The adapters that the options describe; None if they name none."""
    word, _, exponent = distribution.partition(":")
    if word in ("uniform", "zipf") and bool(exponent) == (word == "zipf"):
        if adapters is None:
            return None
        names = [f"adapter-{number}" for number in range(adapters)]
        return NamedShares(names, zipf(adapters, _exponent(exponent or "0")))
    if not Path(distribution).exists():
        raise UsageError(f"--distribution {distribution}: expected uniform, zipf:S or a file")
    found = read_shares(Path(distribution))
    if adapters not in (None, len(found.names)):
        raise UsageError(f"--adapters {adapters}, but {distribution} has {len(found.names)}")
    return found


def _exponent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--distribution zipf:{text}: {text!r} is not a number") from None


def _shares(asked: NamedShares | None) -> Shares:
    if asked is None:
        raise UsageError("how many adapters? --adapters N, --distribution FILE or --trace FILE")
    return asked.shares


def _trace(path: Path, chunk_tokens: int, asked: NamedShares | None) -> Trace:
    """The requests of a file; its adapters if it names them, else those of the options."""
    raw = read_rows(path)
    if asked is None and all(row.adapter is None for row in raw.rows):
        note(f"{path} names no adapters: all is the base model; --adapters N spreads it over N")
    spread = None if asked is None else Popularity(tuple(asked.names), asked.shares)
    return to_trace(raw, chunk_tokens, spread)


def _modules(text: str) -> tuple[str, ...]:
    return ALL_LINEAR if text == "all" else tuple(name.strip() for name in text.split(","))


def _speeds(machine: Machine, link: float | None, prefill: float | None) -> Speeds:
    return Speeds(
        prefill_tokens_s=machine.prefill_tokens_s if prefill is None else prefill,
        link_bytes_s=machine.link_bytes_s if link is None else link * GB,
    )


def _answer(
    load: Load, shares: Shares, sizing: Sizing, speeds: Speeds, trace: Trace | None
) -> Answer:
    if trace is None:
        rates = closed_forms(load, shares, sizing)
    else:
        rates, load = counted(load, trace, sizing), measured(load, trace)
    hit_rate, unlimited = expected(rates)
    case = Case(sizing, shares, hit_rate, unlimited, speeds, load.rate, load.prompt_tokens)
    return Answer(load, case, rates, advise(case), None if trace is None else trace.name)
