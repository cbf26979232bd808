"""`elora trace`: make, convert and describe request traces for the simulator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from elora_connector.cli import options
from elora_connector.cli.output import UsageError, printable, reporting, show, table
from elora_connector.simulator.from_rows import to_trace
from elora_connector.simulator.popularity import KINDS, popularity
from elora_connector.simulator.requests import Trace
from elora_connector.simulator.trace_stats import TraceStats, describe
from elora_connector.simulator.traces import FORMATS, RawTrace, read_rows, write_trace
from elora_connector.simulator.workloads import POPULARITY, WORKLOADS, Demand, make_workload

trace = typer.Typer(
    name="trace",
    help="Make, convert and describe request traces for the simulator (docs/traces.md).",
    no_args_is_help=True,
)

_SHOWN_ADAPTERS = 10

Seed = Annotated[int, typer.Option("--seed", help="Equal seeds give equal traces.")]
Chunk = Annotated[int, typer.Option("--chunk", help="Tokens of a chunk, as chunk_size.")]
Kind = Annotated[
    str | None,
    typer.Option("--format", help=f"{', '.join(FORMATS)}; else by the first line."),
]
Adapters = Annotated[
    int | None,
    typer.Option("--adapters", help="Give requests without an adapter one of so many."),
]
Popularity = Annotated[str, typer.Option("--popularity", help=f"Of adapters: {KINDS}.")]
PerRequest = Annotated[
    bool,
    typer.Option("--per-request", help="Draw an adapter per request, not per conversation."),
]


@trace.command()
def make(  # noqa: PLR0913, PLR0917 - one per option
    out: Annotated[Path, typer.Argument(help="File to write; gzip if it ends in .gz.")],
    workload: Annotated[str, typer.Option("--workload", help=", ".join(WORKLOADS))] = "chat",
    adapters: Annotated[int, typer.Option("--adapters", help="Number of adapters.")] = 50,
    rate: Annotated[float, typer.Option("--rate", help="Requests/s, on average.")] = 2.0,
    requests: Annotated[
        int | None, typer.Option("--requests", help="How many; else 10,000.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", help="Seconds, instead of --requests.")
    ] = None,
    seed: Seed = 0,
    chunk: Chunk = 256,
    kind: Annotated[str, typer.Option("--popularity", help=f"{POPULARITY}.")] = "servegen",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Prompt and answer together.")
    ] = 131_072,
    as_json: options.Json = False,
) -> None:
    """Write a trace of one of the built-in workloads."""
    with reporting(as_json):
        if requests is None and duration is None:
            requests = 10_000
        demand = Demand(adapters, rate, requests, duration, seed, chunk, kind, max_tokens)
        made = make_workload(workload, demand)
        _write(made, out)
        _show(as_json, made, {"file": str(out)})


@trace.command()
def convert(  # noqa: PLR0913, PLR0917 - one per option
    source: Annotated[Path, typer.Argument(help="Trace to read, plain or gzip.")],
    out: Annotated[Path, typer.Argument(help="File to write; gzip if it ends in .gz.")],
    form: Kind = None,
    adapters: Adapters = None,
    kind: Popularity = "skewed",
    per_request: PerRequest = False,
    seed: Seed = 0,
    chunk: Chunk = 256,
    as_json: options.Json = False,
) -> None:
    """Write another trace in our own format, with an adapter for each request."""
    with reporting(as_json):
        raw = _read(source, form)
        made = _requests(raw, adapters, kind, seed, chunk, per_request)
        _write(made, out)
        _show(as_json, made, {"file": str(out), "format": raw.format, "skipped": raw.skipped})


@trace.command()
def stats(
    file: Annotated[Path, typer.Argument(help="Trace to read, plain or gzip.")],
    form: Kind = None,
    adapters: Adapters = None,
    kind: Popularity = "skewed",
    per_request: PerRequest = False,
    seed: Seed = 0,
    chunk: Annotated[
        int | None, typer.Option("--chunk", help="Tokens of a chunk; else the file's, or 256.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Describe a trace: pace, bursts, lengths, reuse, adapters."""
    with reporting(as_json):
        raw = _read(file, form)
        own = raw.block_tokens if raw.format == "elora" else 0
        size = (own or 256) if chunk is None else chunk
        made = _requests(raw, adapters, kind, seed, size, per_request)
        _show(as_json, made, {"format": raw.format, "skipped": raw.skipped})


def _read(path: Path, form: str | None) -> RawTrace:
    if form is not None and form not in FORMATS:
        raise UsageError(f"--format: expected one of {', '.join(FORMATS)}; found {form!r}")
    return read_rows(path, form)


def _requests(
    raw: RawTrace, adapters: int | None, kind: str, seed: int, chunk: int, per_request: bool
) -> Trace:
    if not 1 <= chunk <= 1 << 20:
        raise UsageError(f"--chunk: expected 1 to {1 << 20}, found {chunk}")
    if seed < 0:
        raise UsageError(f"--seed: expected at least 0, found {seed}")
    chosen = None if adapters is None else popularity(kind, adapters)
    return to_trace(raw, chunk, chosen, seed=seed, sticky=not per_request)


def _write(made: Trace, out: Path) -> None:
    try:
        write_trace(made, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None


def _show(as_json: bool, made: Trace, more: dict[str, Any]) -> None:
    found = describe(made)
    data = {"name": made.name, "chunk_tokens": made.chunk_tokens, **more, **_data(found)}
    show(as_json, data, lambda console: _render(console, made, found, more))


def _data(found: TraceStats) -> dict[str, Any]:
    data = found._asdict()
    data["prompt"], data["output"] = found.prompt._asdict(), found.output._asdict()
    return {name: _rounded(value) for name, value in data.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _render(console: Console, made: Trace, found: TraceStats, more: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [(name, printable(str(value))) for name, value in more.items()]
    rows += [
        ("name", printable(made.name)),
        ("chunk", f"{made.chunk_tokens} tokens"),
        ("requests", f"{found.requests:,}"),
        ("sessions", f"{found.sessions:,}"),
        ("span", f"{found.span_s:,.1f} s"),
        ("rate", f"{found.rate:.3f} requests/s, at most {found.peak_rate} in one second"),
        ("CV of the gaps", f"{found.gap_cv:.2f} (Poisson: 1)"),
        ("index of dispersion", f"{found.dispersion:.2f} per second (Poisson: 1)"),
        ("prompt tokens", _lengths(*found.prompt)),
        ("answer tokens", _lengths(*found.output)),
        ("hit share", f"{found.hit_share:.1%} of prompt tokens, cache without limits"),
        ("adapters", _adapters(found.adapter_shares)),
    ]
    console.print(table({"": "left", " ": "left"}, rows))
    shares = list(found.adapter_shares.items())[:_SHOWN_ADAPTERS]
    cells = [(printable(name) or "(base model)", f"{share:.1%}") for name, share in shares]
    console.print()
    console.print(table({"most popular adapters": "left", "share": "right"}, cells))


def _lengths(p50: float, p95: float, mean: float) -> str:
    return f"median {p50:,.0f}, 95 % below {p95:,.0f}, mean {mean:,.0f}"


def _adapters(shares: dict[str, float]) -> str:
    """How many, and how many they would be if all were equally popular."""
    entropy = -sum(share * math.log(share) for share in shares.values())
    return f"{len(shares):,} asked for, as uneven as {math.exp(entropy):,.1f} equal ones"
