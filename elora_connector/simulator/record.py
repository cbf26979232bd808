"""What a replay measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from elora_connector.core.node import AdapterNode, Node
from elora_connector.core.types import Residency, Tier
from elora_connector.errors import InvariantError
from elora_connector.simulator.build import Parts
from elora_connector.simulator.live import Live

_NEAR: Final = 0.05
"""Now counts as Low where it is within this share of it."""
_PART_NAMES: Final = ("queue", "adapter", "kv", "prefill")


@dataclass(frozen=True, slots=True)
class Ended:
    """One request; seconds and tokens."""

    arrived: float
    ttft: float
    queue: float
    adapter: float
    kv: float
    prefill: float
    tpot: float
    """NaN for an answer of one token."""


@dataclass(slots=True)
class InvalidKv:
    """Chunks that lie in the GPU and that no request has, over all samples."""

    chunks: int = 0
    adapter_absent: int = 0
    cut_off: int = 0
    """The adapter or any chunk in front is absent: no look-up reaches it."""
    in_the_way: int = 0
    """Cut off, and yet not the first to be reused."""

    def sample(self, parts: Parts) -> None:
        """Look at every chunk once; parents stand before their children."""
        held = parts.area.held
        reached: set[Node] = set()
        for node in parts.tree.chunks:
            if node.state[Tier.GPU] is not Residency.READY:
                continue
            parent, adapter = node.parent, node.adapter
            valid = adapter is None or parts.on_gpu(adapter)
            if valid and (isinstance(parent, AdapterNode) or parent in reached):
                reached.add(node)
            if node not in held:
                self.chunks += 1
                self.adapter_absent += not valid
                self.cut_off += node not in reached
                self.in_the_way += node not in reached
        dormant = 0 if parts.area.dormant is None else len(parts.area.dormant)
        self.chunks += dormant
        self.adapter_absent += dormant
        self.cut_off += dormant

    def share(self, count: int) -> float:
        return count / self.chunks if self.chunks else 0.0


@dataclass(slots=True)
class Utilisation:
    """GPU memory over time, in byte-seconds."""

    seconds: float = 0.0
    running: float = 0.0
    history: float = 0.0
    adapters: float = 0.0
    busy_s: float = 0.0

    def shares(self, capacity: int) -> dict[str, float]:
        whole = max(self.seconds, 1e-9) * capacity
        shares = {
            "running_kv": self.running / whole,
            "history_kv": self.history / whole,
            "adapters": self.adapters / whole,
        }
        shares["free"] = 1.0 - sum(shares.values())
        return shares


@dataclass(slots=True)
class Record:
    """Counters of one replay.

    Attributes:
        computed: prompt tokens computed.
        decoded: tokens computed one by one, each to generate the next.
        refused: requests that fit into no memory.
    """

    parts: Parts
    invalid_every_s: float = 5.0
    ended: list[Ended] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed: int = 0
    decoded: int = 0
    steps: int = 0
    refused: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    near_low: float = 0.0
    watched_s: float = 0.0
    invalid: InvalidKv = field(default_factory=InvalidKv)
    used: Utilisation = field(default_factory=Utilisation)
    _sampled_at: float = 0.0

    def passed(self, start: float, end: float, *, busy: bool) -> None:
        """Time went by with the memory as it is."""
        parts, seconds = self.parts, end - start
        used = self.used
        used.seconds += seconds
        used.busy_s += seconds if busy else 0.0
        kv, running = parts.area.kv, parts.area.kv_in_use
        used.running += running * seconds
        used.history += (kv - running) * seconds
        if parts.adapters is not None:
            here = parts.adapters.count()
            used.adapters += here * parts.machine.rank_adapter_bytes * seconds
            low = parts.scoring.demand.low(end)
            if low > 0.0:
                self.watched_s += seconds
                self.near_low += seconds if abs(here - low) <= _NEAR * low else 0.0
        if end - self._sampled_at > self.invalid_every_s:
            self._sampled_at = end
            self.invalid.sample(parts)

    def end(self, live: Live, now: float) -> None:
        """A request has its answer."""
        first, admitted = live.first_token_at, live.admitted_at
        assert first is not None
        assert admitted is not None
        self.prompt_tokens += live.request.prompt_tokens
        self.output_tokens += live.generated
        ttft = first - live.arrived
        queue = admitted - live.arrived - live.adapter_s
        adapter = live.adapter_s + live.stall_s
        kv = max(0.0, live.started_at - admitted - live.stall_s)
        outputs = live.request.output_tokens - 1
        tpot = (now - first) / outputs if outputs > 0 else float("nan")
        prefill = ttft - queue - adapter - kv
        self.ended.append(Ended(live.arrived, ttft, queue, adapter, kv, prefill, tpot))

    def check(self) -> None:
        """Every token came from a tier or was computed.

        Raises:
            InvariantError: some were lost or made.
        """
        found = sum(self.parts.kv.hits.values()) + self.computed + self.decoded
        needed = self.prompt_tokens + self.output_tokens - len(self.ended) + self.parts.kv.lost
        if found != needed:
            raise InvariantError(f"{needed} tokens were needed, {found} found or computed")

    # ---- results ---------------------------------------------------------------------------

    def column(self, name: str) -> NDArray[np.float64]:
        """One field of all requests, in the order in which they ended."""
        return np.array([getattr(ended, name) for ended in self.ended], dtype=np.float64)

    def summary(self) -> dict[str, Any]:
        """All figures, as plain numbers; seconds, tokens, bytes of one rank."""
        ttft, tpot = self.column("ttft"), self.column("tpot")
        parts, invalid = self.parts, self.invalid
        reused = 0 if parts.area.dormant is None else parts.area.dormant.reused
        lookups = sum(parts.kv.hits.values()) + self.computed
        return {
            "requests": len(self.ended),
            "refused": self.refused,
            "seconds": self.seconds,
            "steps": self.steps,
            "ttft_s": _spread(ttft),
            "ttft_parts_s": {name: _mean(self.column(name)) for name in _PART_NAMES},
            "tpot_s": _spread(tpot[~np.isnan(tpot)]),
            "tokens": {
                "prompt": self.prompt_tokens,
                "output": self.output_tokens,
                "computed": self.computed,
                "lost_to_preemption": parts.kv.lost,
            },
            "hit_tokens": dict(parts.kv.hits),
            "hit_rate": (lookups - self.computed) / lookups if lookups else 0.0,
            "invalid_kv": {
                "adapter_absent": invalid.share(invalid.adapter_absent),
                "any_ancestor_absent": invalid.share(invalid.cut_off),
                "in_the_way": invalid.share(invalid.in_the_way),
            },
            "gpu_memory": self.used.shares(parts.machine.pool_bytes),
            "busy": self.used.busy_s / self.used.seconds if self.used.seconds else 0.0,
            "link_bytes": {"host_to_gpu": parts.to_gpu.moved, "gpu_to_host": parts.to_host.moved},
            "adapter_loads": 0 if parts.adapters is None else parts.adapters.loads,
            "evicted_chunks": {
                "gpu": parts.area.evicted + reused,
                "host": 0 if parts.manager is None else parts.manager.evictions,
            },
            "preemptions": self.preemptions,
            "now_near_low": self.near_low / self.watched_s if self.watched_s else 0.0,
        }


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0}
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"mean": _mean(values), "p50": float(p50), "p95": float(p95), "p99": float(p99)}
