"""Charts of `elora simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from elora_connector.cli.output import UsageError

_CHARTS: Final[Mapping[str, tuple[str, Callable[[Mapping[str, Any]], float]]]] = {
    "ttft": ("mean TTFT, s", lambda found: float(found["ttft_s"]["mean"])),
    "ttft_p99": ("P99 TTFT, s", lambda found: float(found["ttft_s"]["p99"])),
    "tpot": ("mean TPOT, s", lambda found: float(found["tpot_s"]["mean"])),
    "hits": ("tokens that were not computed", lambda found: float(found["hit_rate"])),
}


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """One PNG for each figure: lines over what was swept, or bars if nothing was.

    Raises:
        UsageError: matplotlib is missing, or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install 'matplotlib>=3.7'") from None
    axis = next((a for a in ("rate", "memory", "adapters") if len({r[a] for r in rows}) > 1), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (title, value) in _CHARTS.items():
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            axes = figure.add_subplot()
            if axis is None:
                axes.bar([row["policy"] for row in rows], [value(row["result"]) for row in rows])
                axes.tick_params(axis="x", rotation=45)
            else:
                _lines(axes, rows, axis, value)
            axes.set_ylabel(title)
            figure.savefig(folder / f"{name}.png")
    except OSError as error:
        raise UsageError(f"--png {folder}: {error.strerror}") from None


def _lines(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    axis: str,
    value: Callable[[Mapping[str, Any]], float],
) -> None:
    others = [name for name in ("memory", "adapters") if name != axis]
    others = [name for name in others if len({row[name] for row in rows}) > 1]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = ", ".join([row["policy"], *(f"{name} {row[name]:g}" for name in others)])
        lines.setdefault(label, []).append((row[axis], value(row["result"])))
    for label, points in lines.items():
        points.sort()
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set_xlabel(axis)
    axes.legend()
