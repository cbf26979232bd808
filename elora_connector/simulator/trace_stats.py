"""Figures that tell what a trace is like: pace, bursts, lengths, reuse, adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from elora_connector.simulator.requests import Trace


class Spread(NamedTuple):
    """Tokens of prompts or answers."""

    p50: float
    p95: float
    mean: float


class TraceStats(NamedTuple):
    """What `describe` finds.

    Args:
        span_s: time of the last request.
        rate: requests / span, in 1/s; 0 where all come at once.
        peak_rate: most requests in one second.
        gap_cv: coefficient of variation of the gaps between arrivals (Poisson: 1).
        dispersion: variance / mean of the arrivals per second (Poisson: 1).
        hit_share: prompt tokens that a cache without limits would hold, of prompt and
            answers, whole chunks only, if requests ran in the order of the trace.
        adapter_shares: of requests, the most popular adapter first.
    """

    requests: int
    sessions: int
    span_s: float
    rate: float
    peak_rate: int
    gap_cv: float
    dispersion: float
    prompt: Spread
    output: Spread
    hit_share: float
    adapter_shares: dict[str, float]


def describe(trace: Trace) -> TraceStats:
    """The figures of a trace that has at least one request."""
    requests = trace.requests
    at = [request.at for request in requests]
    counts = Counter(request.adapter for request in requests)
    span = at[-1]
    return TraceStats(
        requests=len(requests),
        sessions=len({request.session for request in requests}),
        span_s=span,
        rate=len(requests) / span if span > 0 else 0.0,
        peak_rate=int(per_second(at).max()),
        gap_cv=gap_cv(at),
        dispersion=dispersion(at),
        prompt=spread([request.prompt_tokens for request in requests]),
        output=spread([request.output_tokens for request in requests]),
        hit_share=hit_share(trace),
        adapter_shares={name: count / len(requests) for name, count in counts.most_common()},
    )


def per_second(at: Sequence[float]) -> np.ndarray:
    """Arrivals in each second from 0 to the last one; at most a day is counted one by one."""
    seconds = np.asarray(at).astype(np.int64)
    if seconds[-1] > 86_400 * 30:
        # Counting the empty seconds of years would fill the memory.
        return np.unique(seconds, return_counts=True)[1]
    return np.bincount(seconds)


def gap_cv(at: Sequence[float]) -> float:
    """Standard deviation / mean of the gaps between arrivals; 0 where there are none."""
    gaps = np.diff(np.asarray(at))
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.std()) / mean if mean > 0 else 0.0


def dispersion(at: Sequence[float]) -> float:
    """Variance / mean of the arrivals per second."""
    counts = per_second(at)
    return float(counts.var() / counts.mean())


def spread(tokens: ArrayLike) -> Spread:
    """Median, 95th percentile and mean."""
    values = np.asarray(tokens)
    p50, p95 = np.percentile(values, [50, 95])
    return Spread(float(p50), float(p95), float(values.mean()))


def hit_share(trace: Trace) -> float:
    """See `TraceStats`."""
    seen: set[int] = set()
    hit = total = 0
    for request in trace.requests:
        chunks = request.prompt_tokens // trace.chunk_tokens
        hit += leading(request.labels[:chunks], seen) * trace.chunk_tokens
        total += request.prompt_tokens
        seen.update(request.labels)
    return hit / total


def leading(labels: Iterable[int], seen: set[int]) -> int:
    """How many labels from the first on were seen."""
    count = 0
    for label in labels:
        if label not in seen:
            break
        count += 1
    return count
