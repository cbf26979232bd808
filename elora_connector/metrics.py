"""Every metric of the package, in one place: name, kind, labels, meaning.

Real code calls `Recorder.add` / `Recorder.set` with one of these names; how they reach
Prometheus is the integration's business.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Any

_SEPARATOR = "\x1f"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` without prefix and without ``_total``; `labels` in the order of `add`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help_text, labels)


METRICS: tuple[Metric, ...] = (
    _counter("lookup_tokens", "Prompt tokens looked up", "adapter"),
    _counter("hit_tokens", "Tokens served from a tier", "tier", "adapter"),
    _counter("miss_tokens", "Looked-up tokens that no tier had", "adapter"),
    _counter("bytes", "Bytes moved by one rank", "direction"),
    _counter("seconds", "Seconds spent moving bytes by one rank", "direction"),
    _counter("chunks_stored", "Chunks that became ready in the host tier"),
    _counter("stores_dropped", "Chunks not stored", "reason"),
    _counter("evictions", "Chunks evicted from a tier", "tier"),
    _counter("deferrals", "Times a request was told to ask again", "reason"),
    _counter("load_or_recompute", "Decisions for requests with KV in a tier", "source", "choice"),
    _counter("bypassed_requests", "Requests whose KV is not looked up or stored", "reason"),
    _counter("failed_requests", "Requests ended with an error by the gate", "reason"),
    _counter("remote_waits", "Events of waiting for the remote tier", "event"),
    _counter("remote_operations", "Operations on the remote tier", "operation", "outcome"),
    _counter("remote_errors", "Remote operations that failed, or bytes refused", "reason"),
    _counter("unhashed_blocks", "Cached GPU blocks dropped after an adapter changed"),
    _counter("prefetched_blocks", "GPU blocks filled from the host tier before anybody asked"),
    _counter("prefetched_blocks_hit", "Prefetched GPU blocks that a request then hit"),
    _counter(
        "swap_bytes",
        "Bytes of one rank that came into a tier or went out of it",
        "direction",
        "tier",
        "kind",
    ),
    _counter("victims_ordered", "Cached GPU blocks put in front of vLLM's free list"),
    _counter("adapter_loads", "Adapter orders finished by one rank", "outcome"),
    _counter("adapter_swap_ins", "Orders to bring an adapter into a tier", "tier", "cause"),
    _counter("adapter_prefetches", "Adapters brought into a tier that nobody waited for", "tier"),
    _counter("adapter_prefetches_used", "Prefetched adapters that were asked for while there"),
    _counter(
        "lora_demand_seconds",
        "Time with (met) or without (short) 0.95 of the adapters that batches need on the GPU",
        "state",
    ),
    _counter("adapter_reads", "Adapters read from their files by one rank"),
    _counter(
        "adapter_rechecks", "Second looks at the files of a loaded adapter by one rank", "outcome"
    ),
    _counter("adapter_load_seconds", "Seconds spent loading adapters by one rank"),
    _counter("load_failures", "Loads into the GPU that failed and were recomputed"),
    _counter("stale_reports", "Worker reports about unknown jobs, ignored"),
    _counter("invariant_failures", "Resets after a broken invariant"),
    _gauge("host_chunks", "Chunks resident in the host tier"),
    _gauge("stranded_chunks", "Chunks of a tier behind a gap: no look-up reaches them", "tier"),
    _gauge("host_capacity_chunks", "Slots of the host tier"),
    _gauge("resident_adapters", "Adapters with resident weights", "tier"),
    _gauge("lora_now", "Adapters in GPU slots (NowLoRA)"),
    _gauge("lora_low", "Adapters that the batches of the last seconds need (Low_lora)"),
    _gauge("utilisation", "Used share of the host budget, and of GPU slots", "tier", "kind"),
    _gauge("eval", "Quantiles of the policy's score over adapters and leaves", "tier", "quantile"),
    _gauge("dormant_blocks", "Free GPU blocks with KV of adapters that are in no GPU slot"),
    _gauge(
        "invalid_kv_ratio",
        "Dormant blocks (all, or those that would be reused after a valid one) of cached ones",
        "kind",
    ),
    _gauge("remote_degraded", "1 while the remote tier is not answering"),
)

BY_NAME = {metric.name: metric for metric in METRICS}


class Recorder:
    """Collects increments and levels until they are taken; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, float] = {}
        self._changed: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        """Current levels; keys as `key` makes them."""
        self.totals: dict[str, float] = {}
        """Counters since the start, for tests and logs; keys as `key` makes them."""

    def add(self, name: str, value: float = 1.0, *labels: str) -> None:
        """Count; `labels` in the order of the metric's definition."""
        key = self.key(name, *labels)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0.0) + value
            self.totals[key] = self.totals.get(key, 0.0) + value

    def set(self, name: str, value: float, *labels: str) -> None:
        """Note a level."""
        key = self.key(name, *labels)
        with self._lock:
            if self.gauges.get(key) != value:
                self.gauges[key] = self._changed[key] = value

    def take(self) -> dict[str, Any]:
        """Counters since the last call and levels that changed: plain dictionaries."""
        with self._lock:
            taken = {"counters": self._counters, "gauges": self._changed}
            self._counters, self._changed = {}, {}
        return taken

    def total(self, name: str, *labels: str) -> float:
        """Sum over all label values that begin with `labels`."""
        prefix = self.key(name, *labels) if labels else name
        with self._lock:
            return sum(
                value
                for key, value in self.totals.items()
                if key == prefix or key.startswith(prefix + _SEPARATOR)
            )

    @staticmethod
    def key(name: str, *labels: str) -> str:
        if name not in BY_NAME:
            raise KeyError(f"unknown metric {name!r}")
        return _SEPARATOR.join((name, *labels))


def split_key(key: str) -> tuple[Metric, tuple[str, ...]]:
    """The metric and label values of a key made by `Recorder.key`."""
    name, *labels = key.split(_SEPARATOR)
    return BY_NAME[name], tuple(labels)
