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
