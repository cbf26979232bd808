"""What waiting and deciding cost: steps of deferral, and scheduler time per step.

Usage: python -m benchmarks.deferral [--json] [--repeat N] [--running 1 64 256]

Runs vLLM's real scheduler over workers that only move bytes (`tests.support`), so the
numbers say nothing about a model; they are the connector's own share.  Steps are exact,
microseconds are medians over N steps with the smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.scheduler_rig import SYNC, Rig, prompt

LENGTH = 33
FETCH_STEPS = 3


@dataclass(frozen=True)
class Wait:
    """How often a request of one kind was told to ask again."""

    kind: str
    deferrals: int
    transfer_steps: int
    hit_tokens: int


@dataclass(frozen=True)
class Cost:
    """Scheduler time of one step (schedule + update_from_output), microseconds."""

    running: int
    connector: bool
    steps: int
    median_us: float
    min_us: float
    max_us: float


def _ask(rig: Rig, kind: str, adapter: str | None, tokens: Sequence[int], transfer: int) -> Wait:
    request_id = rig.submit(adapter, tokens)
    (answer,) = rig.run(request_id)
    return Wait(kind, answer.deferrals, transfer, answer.hit)


def _warm(**options: Any) -> Rig:
    """A rig whose adapter is resident and whose tiers do not hold the prompt."""
    rig = Rig(SYNC, **options)
    rig.run(rig.submit("a", prompt(2, 99)))
    return rig


def waits() -> list[Wait]:
    """One request of every kind."""
    found = []
    rig = _warm()
    found.append(_ask(rig, "remote miss, reply before the ask", "a", prompt(LENGTH), 0))
    rig.settle()
    found.append(_ask(rig, "local hit", "a", prompt(LENGTH), 0))
    rig = _warm(delays={"lookup": 1})
    found.append(_ask(rig, "remote miss, reply one step later", "a", prompt(LENGTH), 0))
    rig = _warm(prefix_caching=False)
    rig.run(rig.submit("a", prompt(LENGTH)))
    rig.settle()
    found.append(_ask(rig, "host hit, resident adapter", "a", prompt(LENGTH), 0))
    store = rig.tier
    rig = _warm(store=store)
    found.append(_ask(rig, "remote hit, transfer within the step", "a", prompt(LENGTH), 0))
    rig = _warm(store=store, delays={"lookup": 1, "fetch": FETCH_STEPS})
    kind = f"remote hit, transfer of {FETCH_STEPS} steps"
    found.append(_ask(rig, kind, "a", prompt(LENGTH), FETCH_STEPS))
    rig = Rig(SYNC, max_loras=1, max_cpu_loras=2, remote=False)
    for adapter in ("a", "b", "a"):
        rig.run(rig.submit(adapter, prompt(2, 99)))
        rig.settle()
    found.append(_ask(rig, "adapter that comes back to its slot", "b", prompt(LENGTH), 0))
    rig = Rig(SYNC, delays={"adapter": 2})
    found.append(_ask(rig, "adapter to be loaded, 2 steps", "a", prompt(LENGTH), 2))
    return found


def costs_with(running: int, repeat: int) -> list[Cost]:
    """Decode steps of a full batch without and with the connector, in turn."""
    rigs = {connector: _full(running, repeat, connector) for connector in (False, True)}
    spent: dict[bool, list[float]] = {connector: [] for connector in rigs}
    for connector, rig in rigs.items():
        _time(rig.scheduler, spent[connector])
    for _ in range(repeat):
        for connector, rig in rigs.items():
            spent[connector].append(0.0)
            rig.step()
            assert len(rig.scheduler.running) == running
    return [_summary(running, connector, seconds) for connector, seconds in spent.items()]


def _summary(running: int, connector: bool, seconds: list[float]) -> Cost:
    us = [1e6 * one for one in seconds]
    return Cost(running, connector, len(us), statistics.median(us), min(us), max(us))


def _full(running: int, repeat: int, connector: bool) -> Rig:
    """A rig with a batch of requests that decode for `repeat` steps and more."""
    rig = Rig(
        SYNC,
        connector=connector,
        num_blocks=64 * running + 64,
        host_slots=32 * running + 16,
        max_num_seqs=running,
        max_tokens_per_step=max(64, 16 * running),
        settings={"elora.check_invariants": False},
    )
    for number in range(running):
        rig.submit((None, "a", "b")[number % 3], prompt(9, number), max_tokens=repeat + 20)
    while len(rig.scheduler.running) < running:
        rig.step()
    rig.step(4)
    return rig


def _time(scheduler: Any, spent: list[float]) -> None:
    """Add the time of both calls of a step to the last entry of `spent`."""

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            spent[-1] += time.perf_counter() - start
            return result

        return run

    scheduler.schedule = timed(scheduler.schedule)
    scheduler.update_from_output = timed(scheduler.update_from_output)


def _print(found: list[Wait], costs: list[Cost]) -> None:
    print(f"{'kind of request':42} {'deferrals':>9} {'transfer':>9} {'hit tokens':>11}")
    for wait in found:
        print(f"{wait.kind:42} {wait.deferrals:9} {wait.transfer_steps:9} {wait.hit_tokens:11}")
    print()
    print(f"{'running':>8} {'connector':>10} {'median us':>10} {'min':>8} {'max':>8} {'n':>5}")
    for one in costs:
        state = "on" if one.connector else "off"
        print(
            f"{one.running:8} {state:>10} {one.median_us:10.0f} {one.min_us:8.0f} "
            f"{one.max_us:8.0f} {one.steps:5}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--repeat", type=int, default=100, metavar="N", help="steps measured")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256])
    args = parser.parse_args()
    found = waits()
    costs = [one for running in args.running for one in costs_with(running, args.repeat)]
    if args.json:
        json.dump(
            {"waits": [asdict(w) for w in found], "costs": [asdict(c) for c in costs]},
            sys.stdout,
            indent=1,
        )
        print()
    else:
        _print(found, costs)


if __name__ == "__main__":
    main()
