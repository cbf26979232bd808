"""Statistics of measurements that were taken in pairs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 2000


def interval(ratios: Sequence[float], rng: random.Random) -> tuple[float, float, float]:
    """Median of paired ratios with its 95 % bootstrap interval."""
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return statistics.median(ratios), low, high


def ratio_of_sums(
    first: Sequence[float], second: Sequence[float], rng: random.Random
) -> tuple[float, float, float]:
    """sum(first) / sum(second) with its 95 % bootstrap interval over the pairs."""

    def ratio(chosen: Sequence[int]) -> float:
        return sum(first[i] for i in chosen) / sum(second[i] for i in chosen)

    places = range(len(first))
    found = sorted(ratio(rng.choices(places, k=len(places))) for _ in range(RESAMPLES))
    return ratio(places), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES) - 1]
