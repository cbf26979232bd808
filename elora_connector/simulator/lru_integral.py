"""The expected misses that an LRU adds, without Che's approximation.

Requests as Poisson arrivals, one per unit of time.  A request finds the prefix of its
adapter, last used t ago, unless C or more other adapters came in between:

    lost = integral of sum_a p_a^2 exp(-p_a t) P(N_a(t) >= C) dt

N_a(t) counts the other adapters that came in a time t: a sum of independent yes/no with
chances 1 - exp(-p_j t), whose distribution is built up adapter by adapter.  For independent
requests the result is exact but for the step of the integration, which costs less than 1e-9.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from elora_connector.simulator.shares import Shares

_STEP: Final = 0.1
"""Of ln t.  The trapezoidal rule converges exponentially for integrands like this one."""
_LARGEST: Final = 100
"""Prefixes; with more the integrand gets too steep for the step, and Che's approximation
is within 0.001 anyway."""
_LOW: Final = math.log(1e-5)
"""Before this time fewer than 1e-10 of all adapters came twice."""
_RARE: Final = 1e-12
"""All adapters with a smaller share than this over their number add less than this."""
_WORK: Final = 2_000_000
"""Steps above which it takes longer than a user waits (about 2 s)."""


def feasible(shares: Shares, capacity: int) -> bool:
    """Whether `lost_hits` has an answer for so many adapters and prefixes."""
    return 2 <= capacity <= _LARGEST and len(shares) * (capacity + 20) <= _WORK


def lost_hits(shares: Shares, capacity: int, requests: float = math.inf) -> float:
    """Share of requests that hit an infinite cache but not an LRU of `capacity` prefixes.

    Args:
        requests: the mean is over this many, from an empty cache: a pair of requests that
            are t apart is seen (1 - t/M) times as often as in the long run.
    """
    often = shares[shares > _RARE / len(shares)]
    times = np.exp(np.arange(_LOW, math.log(40.0 / float(often.min())) + _STEP, _STEP))
    lost = _lost_density(often, capacity, times)
    seen = np.ones_like(times) if math.isinf(requests) else np.maximum(0, 1 - times / requests)
    return float((lost * seen * times).sum() * _STEP)


def _lost_density(shares: Shares, capacity: int, times: Shares) -> NDArray[np.float64]:
    """sum_a p_a^2 exp(-p_a t) P(N_a(t) >= C), of shape [times]."""
    # few[n]: chance that n adapters of those looked at came; found[n]: the same without
    # adapter a, times a's weight, summed over a.
    few = np.zeros((capacity, len(times)))
    few[0] = 1.0
    found = np.zeros_like(few)
    total = np.zeros_like(times)
    for share in shares:
        absent = np.exp(-share * times)
        weight = share * share * absent
        came = 1.0 - absent
        found[1:] = found[1:] * absent + found[:-1] * came + weight * few[1:]
        found[0] = found[0] * absent + weight * few[0]
        few[1:] = few[1:] * absent + few[:-1] * came
        few[0] *= absent
        total += weight
    return np.asarray(np.maximum(total - found.sum(axis=0), 0.0), np.float64)
