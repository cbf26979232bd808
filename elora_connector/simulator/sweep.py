"""Runs over policies, memory sizes, adapters and rates, and the highest load that is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from elora_connector.simulator.build import build
from elora_connector.simulator.engine import Replay
from elora_connector.simulator.engine_model import EngineModel
from elora_connector.simulator.requests import Trace
from elora_connector.simulator.systems import System

TTFT_LIMIT_S: Final = 0.5
"""The paper's limit for a load that counts as served."""
_PRECISION: Final = 1.05
_DOUBLINGS: Final = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One run; `rate` in requests a second, None as the trace has it."""

    system: System
    memory: float
    adapters: int
    rate: float | None
    seed: int


def cases(
    systems: Sequence[System],
    memory: Sequence[float],
    adapters: Sequence[int],
    rates: Sequence[float | None],
    seeds: int,
) -> Iterator[Case]:
    """All combinations; those of one trace stand together."""
    for number, seed, rate, size, system in product(adapters, range(seeds), rates, memory, systems):
        yield Case(system, size, number, rate, seed)


def mean_rate(trace: Trace) -> float:
    """Requests a second of the trace itself."""
    span = trace.requests[-1].at - trace.requests[0].at
    return len(trace.requests) / span if span > 0 else 1.0


def run_case(
    trace: Trace,
    system: System,
    machine: EngineModel,
    *,
    rate: float | None,
    lora_share: float,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Replay a trace at `rate` requests a second; the summary of `Record`."""
    factor = 1.0 if rate is None else rate / mean_rate(trace)
    parts = build(system, machine, trace, lora_share=lora_share)
    return Replay(trace, parts, rate=factor, progress=progress).run().summary()


def peak_rate(trace: Trace, system: System, machine: EngineModel, *, lora_share: float) -> float:
    """Highest rate, within 5 %, whose mean TTFT is below `TTFT_LIMIT_S`; 0 if there is none.

    By bisection, from the trace's own rate up or down.
    """

    def served(rate: float) -> bool:
        found = run_case(trace, system, machine, rate=rate, lora_share=lora_share)
        return bool(found["ttft_s"]["mean"] < TTFT_LIMIT_S)

    low = high = mean_rate(trace)
    step = 2.0 if served(low) else 0.5
    for _ in range(_DOUBLINGS):
        low, high = high, high * step
        if served(high) == (step < 1.0):
            break
    else:
        return high if step > 1.0 else 0.0
    low, high = min(low, high), max(low, high)
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if served(middle) else (low, middle)
    return low


def mean_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Field by field the mean over runs that differ in nothing but their seed."""
    first = summaries[0]
    merged: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, Mapping):
            merged[key] = mean_of([summary[key] for summary in summaries])
        else:
            merged[key] = sum(summary[key] for summary in summaries) / len(summaries)
    return merged
