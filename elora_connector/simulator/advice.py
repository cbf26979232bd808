"""Advice in words: share one instance or split, what to keep where, what is worth loading.

The limits are rules of thumb, named here so that they can be argued with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from elora_connector.simulator.models import GB
from elora_connector.simulator.shares import Shares
from elora_connector.simulator.sizing import Sizing

OWN_INSTANCE: Final = 0.6
"""An adapter that needs more of an instance's throughput than this gets one of its own."""
HARDLY_HELPS: Final = 0.25
"""Below this hit rate prefix caching hardly changes the time to the first token."""
SMALL_PART: Final = 0.2
"""Adapters that take no more of the pool than this leave the KV alone."""
NEARLY_ALL: Final = 0.9
"""Of what a cache without limit would hit."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of the whole deployment.

    Attributes:
        prefill_tokens_s: tokens of prompts per second.
        link_bytes_s: between host memory and GPU, all ranks together.
    """

    prefill_tokens_s: float
    link_bytes_s: float


@dataclass(frozen=True)
class Case:
    """What advice is given on.

    Attributes:
        hit_rate: that can be expected, None where the room is not known; unlimited: of a
            cache without limit.
        rate: requests per second, if known; prompt_tokens likewise.
    """

    sizing: Sizing
    shares: Shares
    hit_rate: float | None
    unlimited: float
    speeds: Speeds
    rate: float | None = None
    prompt_tokens: float | None = None

    @property
    def hottest(self) -> float:
        return float(self.shares.max())

    @property
    def break_even_bytes_s(self) -> float:
        """Below this bandwidth loading KV takes longer than computing it."""
        return self.sizing.machine.break_even_bytes_s(self.speeds.prefill_tokens_s)

    @property
    def prefill_need(self) -> float | None:
        """Share of the prefill throughput that all requests need together."""
        if self.rate is None or self.prompt_tokens is None:
            return None
        hits = self.unlimited if self.hit_rate is None else self.hit_rate
        computed = self.rate * self.prompt_tokens * (1.0 - hits)
        return computed / self.speeds.prefill_tokens_s


def advise(case: Case) -> list[str]:
    """One sentence or two on each question that the figures answer."""
    if case.sizing.machine.pool_bytes == 0:
        return [_no_pool(case)]
    return [*_one_or_many(case), *_adapters(case), *_hits(case), *_loading(case)]


def _no_pool(case: Case) -> str:
    machine = case.sizing.machine
    return (
        f"The weights ({machine.model.weights_bytes / GB:.1f} GB) do not fit on "
        f"{machine.gpus} x {machine.gpu.memory_bytes / GB:.0f} GB: use more or larger GPUs."
    )


def _one_or_many(case: Case) -> Iterator[str]:
    sizing, need = case.sizing, case.prefill_need
    weights = sizing.machine.model.weights_bytes
    if sizing.adapters < 2:
        return
    apart = f"{sizing.adapters} instances would hold the weights {sizing.adapters} times"
    apart += f" ({sizing.adapters * weights / GB:.0f} GB instead of {weights / GB:.0f})"
    if need is None:
        yield (
            f"Share one instance unless one adapter alone needs more than {OWN_INSTANCE:.0%} of "
            f"its throughput: {apart}. Give --rate and --prompt-tokens to have that computed."
        )
        return
    hottest = need * case.hottest
    if hottest > OWN_INSTANCE:
        yield (
            f"Split: prefill of the hottest adapter alone needs {hottest:.0%} of the throughput "
            f"(more than {OWN_INSTANCE:.0%}). Give it an instance of its own, let the others "
            "share one."
        )
    elif need > 1:
        yield (
            f"More replicas: prefill needs {need:.0%} of the throughput, but no adapter more than "
            f"{hottest:.0%}. Replicas that share a store, with sessions kept on one of them, "
            "serve all adapters better than an instance for each."
        )
    else:
        yield (
            f"Share one instance: prefill needs {need:.0%} of the throughput, the hottest adapter "
            f"{hottest:.0%}; {apart}."
        )


def _adapters(case: Case) -> Iterator[str]:
    sizing, room, link = case.sizing, case.sizing.gpu, case.speeds.link_bytes_s
    if not sizing.adapters:
        return
    part = room.adapters_kept * sizing.adapter_bytes / room.nbytes
    if room.adapters_kept < sizing.adapters:
        yield (
            f"Not all adapters stay on the GPU: {room.adapters_kept} of {sizing.adapters} "
            f"({part:.0%} of the pool). The others are loaded when asked for, "
            f"{sizing.adapter_bytes / link * 1e3:.1f} ms each at "
            f"{link / GB:.0f} GB/s; only requests of resident adapters run together."
        )
    elif part > SMALL_PART:
        yield (
            f"All adapters fit on the GPU, but take {part:.0%} of the pool from KV: "
            "fewer slots (--slots) or a smaller rank leave room for prefixes."
        )
    else:
        yield f"All adapters fit on the GPU ({part:.1%} of the pool)."
    if sizing.host.adapters_kept < sizing.adapters:
        yield (
            f"Host memory keeps {sizing.host.adapters_kept} of {sizing.adapters} adapters without "
            "giving them more than half of it; the others are read from disk."
        )


def _hits(case: Case) -> Iterator[str]:
    if case.unlimited < HARDLY_HELPS:
        yield (
            f"At most {case.unlimited:.0%} can hit, with any memory: below {HARDLY_HELPS:.0%} "
            "prefix caching hardly helps the time to the first token. Longer shared prefixes or "
            "sessions kept on one instance would."
        )
    elif case.hit_rate is None:
        yield (
            f"{case.unlimited:.0%} can be expected where all prefixes fit. Give --prompt-tokens "
            "(or --capacity) for the memory that there is."
        )
    elif case.hit_rate < NEARLY_ALL * case.unlimited:
        low = " and below what helps" if case.hit_rate < HARDLY_HELPS else ""
        yield (
            f"{case.hit_rate:.0%} is expected of {case.unlimited:.0%} that could hit{low}: more "
            "room (host memory, a shared store) is worth having."
        )
    else:
        yield f"{case.hit_rate:.0%} is expected; more memory would hardly add to it."


def _loading(case: Case) -> Iterator[str]:
    link, needed = case.speeds.link_bytes_s, case.break_even_bytes_s
    if link > needed:
        yield (
            f"Loading KV is faster than computing it ({link / GB:.1f} GB/s against "
            f"a break-even of {needed / GB:.1f}); so is a store that delivers more than that."
        )
    else:
        yield (
            f"Computing KV is faster than loading it ({link / GB:.1f} GB/s against a "
            f"break-even of {needed / GB:.1f}): host memory helps only when the GPU is busy."
        )
