"""Our recorder's values on vLLM's own metrics road: workers, scheduler, Prometheus, log.

vLLM folds the dictionaries of ranks and of the scheduler side together and hands them to
the API server, which owns the Prometheus objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from elora_connector.metrics import METRICS, Kind, Recorder, split_key

_PREFIX = "vllm:elora_"


@dataclass
class EloraStats(KVConnectorStats):
    """`data` = {"counters": {key: sum}, "gauges": {key: last value}}."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counters = dict(self.data.get("counters", {}))
        for key, value in other.data.get("counters", {}).items():
            counters[key] = counters.get(key, 0.0) + value
        gauges = {**self.data.get("gauges", {}), **other.data.get("gauges", {})}
        return EloraStats(data={"counters": counters, "gauges": gauges})

    def reduce(self) -> dict[str, int | float]:
        """Short form for vLLM's periodic log line."""
        short: dict[str, int | float] = {}
        for key, value in self.data.get("counters", {}).items():
            metric, _ = split_key(key)
            short[metric.name] = round(short.get(metric.name, 0) + value, 3)
        return short

    def is_empty(self) -> bool:
        return not self.data.get("counters") and not self.data.get("gauges")


def stats_of(recorder: Recorder) -> EloraStats | None:
    """What was counted since the last call; None when there is nothing to tell."""
    taken = EloraStats(data=recorder.take())
    return None if taken.is_empty() else taken


class EloraPromMetrics(KVConnectorPromMetrics):
    """Prometheus side, in the API server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {}
        for metric in METRICS:
            names = [*labelnames, *metric.labels]
            if metric.kind is Kind.COUNTER:
                family = self._counter_cls(_PREFIX + metric.name, metric.help, labelnames=names)
            else:
                family = self._gauge_cls(
                    _PREFIX + metric.name,
                    metric.help,
                    labelnames=names,
                    multiprocess_mode="mostrecent",
                )
            self._families[metric.name] = family

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's dictionary."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.get("counters", {}).items():
            metric, labels = split_key(key)
            self._families[metric.name].labels(*engine, *labels).inc(value)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            metric, labels = split_key(key)
            self._families[metric.name].labels(*engine, *labels).set(value)
