"""What `elora bound` prints: hit rates, memory and advice, as tables or for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from elora_connector.cli.output import human_bytes, printable, table
from elora_connector.simulator import figures
from elora_connector.simulator.advice import Case
from elora_connector.simulator.figures import Figure, Load, usable_fraction
from elora_connector.simulator.models import GB
from elora_connector.simulator.sizing import Room, Sizing

_MEANING: Final = {
    figures.QUOTED: "what one pinned prefix gives",
    figures.UNLIMITED: "only what comes for the first time misses",
    figures.PINNED: "always there; the best fixed choice",
    figures.LRU: "least recently used goes",
    figures.LRU_CHE: "",
    figures.LRU_SPLIT: "an equal part for each adapter",
    figures.IDLE: "what was not used for a while goes",
    figures.SLOTS: "request finds its adapter in a slot",
}
_WHERE: Final = {"gpu": "GPU", "host": "host memory", "": ""}


@dataclass(frozen=True)
class Answer:
    """All that is printed.

    Attributes:
        load: as asked for, or as the trace has it.
        trace: its name; None for closed forms.
    """

    load: Load
    case: Case
    rates: Sequence[Figure]
    advice: Sequence[str]
    trace: str | None = None

    @property
    def sizing(self) -> Sizing:
        return self.case.sizing

    @property
    def usable(self) -> float | None:
        return None if self.trace is not None else usable_fraction(self.load, self.sizing)


def data(answer: Answer) -> dict[str, Any]:
    """The answer for programs: fractions, bytes, tokens and seconds."""
    sizing, load = answer.sizing, answer.load
    model = sizing.machine.model
    return {
        "adapters": len(answer.case.shares),
        "hottest_share": float(answer.case.shares.max()),
        "trace": answer.trace,
        "requests": load.requests,
        "shared_fraction": None if answer.trace is not None else load.fraction,
        "usable_fraction": answer.usable,
        "hit_rates": [asdict(figure) for figure in answer.rates],
        "memory": {
            "model": model.name,
            "parameters": model.parameters,
            "weights_bytes": model.weights_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "adapter_bytes": sizing.adapter_bytes,
            "rank": sizing.rank,
            "modules": sorted(sizing.modules),
            "chunk_tokens": sizing.chunk_tokens,
            "chunk_bytes": sizing.chunk_bytes,
            "gpu": asdict(sizing.gpu),
            "host": asdict(sizing.host),
            "prefill_tokens_s": answer.case.speeds.prefill_tokens_s,
            "link_bytes_s": answer.case.speeds.link_bytes_s,
            "break_even_bytes_s": answer.case.break_even_bytes_s,
        },
        "advice": list(answer.advice),
    }


def render(console: Console, answer: Answer) -> None:
    """The answer for people."""
    console.print(printable(_headline(answer)))
    console.print(_rates(answer))
    console.print(_why_no_bound(answer))
    console.print(f"\n{_facts(answer)}")
    console.print(_rooms(answer.sizing))
    console.print()
    for sentence in answer.advice:
        console.print(f"- {sentence}")


def _headline(answer: Answer) -> str:
    count, hottest = len(answer.case.shares), float(answer.case.shares.max())
    adapters = f"{_counted(count, 'adapter')}, the hottest {_percent(hottest)}"
    if answer.trace is not None:
        return (
            f"{answer.trace}: {_counted(answer.load.requests, 'request')}, {adapters}, "
            f"chunks of {answer.sizing.chunk_tokens} tokens"
        )
    shared = f"{_percent(answer.load.fraction)} of a prompt shared"
    if answer.load.prompt_tokens is not None and answer.usable is not None:
        shared += (
            f", {_percent(answer.usable)} in whole chunks of {answer.sizing.chunk_tokens} "
            f"(prompts of {answer.load.prompt_tokens} tokens)"
        )
    return f"{adapters}; {shared}; {_counted(answer.load.requests, 'request')}"


def _why_no_bound(answer: Answer) -> str:
    whole = answer.load.fraction if answer.trace is None else answer.rates[1].rate
    return (
        f"The widely quoted figure is {whole:.2f} x the hottest share. It is no bound: a cache "
        "with room for more prefixes hits more, an LRU with room for one may hit less."
    )


def _rates(answer: Answer) -> Any:
    unit = "chunks" if answer.trace is not None else "prefixes"
    columns = {"cache": "left", "where": "left", unit: "right", "hit rate": "right"}
    sticky = answer.load.sticky > 0 and answer.trace is None
    if sticky:
        columns["with later turns"] = "right"
    columns[""] = "left"
    rows = []
    for figure in answer.rates:
        if figure.cache == figures.LRU_CHE:
            continue
        cells = [figure.cache, _WHERE[figure.where], _room(figure), _percent(figure.rate)]
        if sticky:
            cells.append("-" if figure.sticky is None else _percent(figure.sticky))
        rows.append([*cells, _MEANING[figure.cache]])
    return table(columns, rows)


def _room(figure: Figure) -> str:
    return "-" if figure.room is None else str(figure.room)


def _facts(answer: Answer) -> str:
    sizing, case = answer.sizing, answer.case
    model, machine = sizing.machine.model, sizing.machine
    weights = (
        f"{printable(model.name)}: {model.parameters / 1e9:.2f} B parameters, "
        f"{model.weights_bytes / GB:.1f} GB of weights on {machine.gpus} x "
        f"{machine.gpu.memory_bytes / GB:.0f} GB"
    )
    sizes = (
        f"adapter: {sizing.adapter_bytes / 1e6:.1f} MB (rank {sizing.rank}, "
        f"{len(set(sizing.modules))} modules); KV: {human_bytes(model.kv_bytes_per_token)} a "
        f"token, {sizing.chunk_bytes / 1e6:.1f} MB a chunk of {sizing.chunk_tokens}"
    )
    speeds = (
        f"break-even: loading KV beats computing it above {case.break_even_bytes_s / GB:.1f} GB/s "
        f"(prefill of {case.speeds.prefill_tokens_s:.0f} tokens/s)"
    )
    return "\n".join((weights, sizes, speeds))


def _rooms(sizing: Sizing) -> Any:
    columns = {"memory": "left", "GB": "right", "adapters alone": "right"}
    columns |= {"tokens alone": "right", "adapters kept": "right", "tokens beside them": "right"}
    rows = [("GPU", *_cells(sizing.gpu)), ("host memory", *_cells(sizing.host))]
    return table(columns, rows)


def _cells(room: Room) -> list[str]:
    numbers = (room.adapters_alone, room.tokens_alone, room.adapters_kept, room.tokens_left)
    return [f"{room.nbytes / GB:.1f}", *map(str, numbers)]


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _counted(number: float, what: str) -> str:
    return f"{number:.0f} {what}{'' if number == 1 else 's'}"
