"""`elora simulate`: what this connector and others would do with some traffic, without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from elora_connector.cli.output import UsageError, console, reporting, table
from elora_connector.cli.simulate_png import draw
from elora_connector.errors import EloraError
from elora_connector.simulator.engine_model import EngineModel, engine_model
from elora_connector.simulator.from_rows import to_trace
from elora_connector.simulator.models import MACHINES
from elora_connector.simulator.popularity import popularity
from elora_connector.simulator.requests import Trace
from elora_connector.simulator.sweep import Case, cases, mean_of, peak_rate, run_case
from elora_connector.simulator.systems import SYSTEMS, system_named
from elora_connector.simulator.traces import read_rows
from elora_connector.simulator.workloads import POPULARITY, WORKLOADS, Demand, make_workload

_GB = 10**9


def simulate(  # noqa: PLR0913, PLR0917 - one parameter for each option
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Requests of a file; see docs/traces.md.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", help=f"One of {', '.join(WORKLOADS)}.")
    ] = None,
    adapters: Annotated[
        str, typer.Option("--adapters", help="Number of adapters, or several with commas.")
    ] = "50",
    distribution: Annotated[
        str, typer.Option("--distribution", help=f"Who is asked for: {POPULARITY}.")
    ] = "servegen",
    policy: Annotated[
        str, typer.Option("--policy", help=f"Some of {', '.join(SYSTEMS)}; or all.")
    ] = "vllm,s-lora,elora",
    rate: Annotated[
        str | None,
        typer.Option("--rate", help="Requests per second, or several; else 4, or the file's own."),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="Factors on GPU pool and host memory, with commas.")
    ] = "1",
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Length of a workload, or first of a file.")
    ] = 2000,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each case.")] = 1,
    model: Annotated[
        str, typer.Option("--model", help=", ".join(MACHINES) + ", on 1, 4 or 8 GPUs.")
    ] = "llama3-8b",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapters.")] = 32,
    lora_share: Annotated[
        float,
        typer.Option("--lora-share", min=0.001, max=0.999, help="Part of the pool for slots."),
    ] = 0.2,
    link: Annotated[
        float | None, typer.Option("--link", min=0.001, help="GB/s from host memory to each GPU.")
    ] = None,
    peak: Annotated[
        bool, typer.Option("--peak", help="Also find the highest rate with a mean TTFT < 0.5 s.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Everything as JSON, to a file or - for stdout.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Folder for charts; needs matplotlib.")
    ] = None,
) -> None:
    """Replay requests on a simulated engine, with the policy code that this connector ships.

    Times follow from a simple model of GPUs and links, so compare them with each other.
    """
    to_stdout = json_file == "-"
    with reporting(to_stdout):
        try:
            systems = [system_named(name) for name in _names(policy)]
            runs = _Runs(trace, workload, distribution, requests, _machine(model, rank, link))
            wanted = list(
                cases(
                    systems,
                    _numbers("--memory", memory),
                    [_whole(n) for n in _numbers("--adapters", adapters)],
                    runs.rates(rate),
                    seeds,
                )
            )
            with _progress(len(wanted) * requests) as advance:
                results = [runs.run(c, lora_share, peak, advance) for c in wanted]
        except EloraError as error:
            raise UsageError(str(error)) from None
        rows = _merged(results)
        if png is not None:
            draw(rows, png)
        data = {"trace": runs.title, "model": model, "rank": rank, "runs": results, "means": rows}
        if to_stdout:
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
            return
        if json_file is not None:
            _write(Path(json_file), data)
        _render(console(), runs.title, rows)


class _Runs:
    """Makes the trace of each case, once for those that share it."""

    def __init__(
        self,
        file: Path | None,
        workload: str | None,
        distribution: str,
        requests: int,
        machine: Callable[[float], EngineModel],
    ) -> None:
        if (file is None) == (workload is None):
            raise UsageError("give either --trace FILE or --workload NAME")
        self._file = file
        self._workload = workload or ""
        self._distribution = distribution
        self._requests = requests
        self._machine = machine
        self._last: tuple[tuple[int, int, float | None], Trace] | None = None
        self.title = str(file or workload)

    def rates(self, given: str | None) -> list[float | None]:
        if given is not None:
            return list(_numbers("--rate", given))
        return [None] if self._file is not None else [4.0]

    def run(
        self, case: Case, lora_share: float, peak: bool, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        trace = self._trace(case)
        machine = self._machine(case.memory)
        found = run_case(
            trace,
            case.system,
            machine,
            rate=case.rate if self._file is not None else None,
            lora_share=lora_share,
            progress=advance,
        )
        if peak:
            found["peak_rate"] = peak_rate(trace, case.system, machine, lora_share=lora_share)
        place = {"policy": case.system.name, "memory": case.memory, "adapters": case.adapters}
        return {**place, "rate": case.rate, "seed": case.seed, "result": found}

    def _trace(self, case: Case) -> Trace:
        key = (case.adapters, case.seed, None if self._file is not None else case.rate)
        if self._last is None or self._last[0] != key:
            self._last = key, self._make(case)
        return self._last[1]

    def _make(self, case: Case) -> Trace:
        if self._file is None:
            demand = Demand(
                adapters=case.adapters,
                rate=case.rate or 4.0,
                requests=self._requests,
                seed=case.seed,
                popularity=self._distribution,
            )
            return make_workload(self._workload, demand)
        raw = read_rows(self._file)
        spread = None
        if any(row.adapter is None for row in raw.rows):
            kind = "zipf:1.2" if self._distribution == "servegen" else self._distribution
            spread = popularity(kind, case.adapters)
        raw = raw._replace(rows=raw.rows[: self._requests])
        return to_trace(raw, 256, spread, seed=case.seed)


def _machine(model: str, rank: int, link: float | None) -> Callable[[float], EngineModel]:
    known = MACHINES.get(model.lower())
    if known is None:
        raise UsageError(f"--model {model}: expected one of {', '.join(MACHINES)}")
    per_s = None if link is None else link * _GB
    return lambda memory: engine_model(known, rank, memory=memory, link_per_s=per_s)


def _names(text: str) -> list[str]:
    return list(SYSTEMS) if text == "all" else [name.strip() for name in text.split(",")]


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers with commas") from None
    if not all(0 < number < float("inf") for number in numbers):
        raise UsageError(f"{option} {text}: expected numbers above zero")
    return numbers


def _whole(number: float) -> int:
    if number != int(number):
        raise UsageError(f"--adapters {number:g}: expected whole numbers")
    return int(number)


def _merged(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case, the mean over its seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in results:
        key = run["policy"], run["memory"], run["adapters"], run["rate"]
        groups.setdefault(key, []).append(run)
    rows = []
    for runs in groups.values():
        place = {k: runs[0][k] for k in ("policy", "memory", "adapters", "rate")}
        rows.append({**place, "seeds": len(runs), "result": mean_of([r["result"] for r in runs])})
    return rows


def _render(out: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    columns = {"policy": "left", "memory": "right", "adapters": "right", "rate": "right"}
    names = ("TTFT ms", "P95", "P99", "queue", "adapter", "KV", "prefill", "TPOT ms", "hits")
    columns |= dict.fromkeys((*names, "invalid KV", "loads", "computed"), "right")
    with_peak = any("peak_rate" in row["result"] for row in rows)
    if with_peak:
        columns["peak rate"] = "right"
    out.print(table(columns, [_cells(row, with_peak) for row in rows], title=title))
    for row in rows:
        if refused := row["result"]["refused"]:
            out.print(
                f"{row['policy']}, memory {row['memory']:g}: {refused:g} requests were longer than "
                "its GPU memory holds, and are in no figure"
            )


def _cells(row: dict[str, Any], with_peak: bool) -> list[str]:
    found = row["result"]
    ttft, parts = found["ttft_s"], found["ttft_parts_s"]
    seconds = [ttft["mean"], ttft["p95"], ttft["p99"], *parts.values(), found["tpot_s"]["mean"]]
    cells = [row["policy"], f"{row['memory']:g}", str(row["adapters"])]
    cells.append("own" if row["rate"] is None else f"{row['rate']:g}")
    cells += [f"{1000 * value:.1f}" for value in seconds]
    cells.append(f"{found['hit_rate']:.1%}")
    cells.append(f"{found['invalid_kv']['any_ancestor_absent']:.1%}")
    cells += [f"{found['adapter_loads']:.0f}", f"{found['tokens']['computed']:.0f}"]
    if with_peak:
        cells.append(f"{found['peak_rate']:.2f}")
    return cells


def _write(file: Path, data: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"--json {file}: {error.strerror}") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda count: progress.advance(task, count)
