"""Every metric is defined once: vLLM's server does not start with a name given twice."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge

from elora_connector.metrics import METRICS, Kind, Metric, Recorder, split_key


def test_names_are_unique() -> None:
    counts = Counter(metric.name for metric in METRICS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_prometheus_takes_them_all() -> None:
    registry = CollectorRegistry()
    for metric in METRICS:
        kind = PrometheusCounter if metric.kind is Kind.COUNTER else PrometheusGauge
        kind(metric.name, metric.help, labelnames=metric.labels, registry=registry)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_key_is_split_into_what_it_was_made_of(metric: Metric) -> None:
    labels = tuple(f"value of {label}" for label in metric.labels)
    assert split_key(Recorder.key(metric.name, *labels)) == (metric, labels)
