"""Expected prefix-cache hit rates for many adapters that share nothing with each other.

Each request carries the prefix of its adapter, a fraction f of its prompt; the rest is new.
Requests are independent, adapter a has the share p_a, the cache is empty at first, and a
prefix fits or does not fit as a whole.  A rate counts tokens of prompts found in the cache.
docs/sizing.md derives every formula.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from elora_connector.simulator.lru_integral import feasible, lost_hits
from elora_connector.simulator.shares import Shares

_BISECTIONS: Final = 200
"""Halvings of a range of logarithms: more than a float64 can tell apart."""


def quoted(shares: Shares, fraction: float) -> float:
    """The widely quoted figure, f x the share of the hottest adapter.

    It is what one pinned prefix gives, so neither an upper nor a lower bound of a cache.
    """
    return pinned(shares, fraction, 1)


def infinite(shares: Shares, fraction: float, requests: float) -> float:
    """A cache that never evicts: every adapter misses once.

    f x (1 - (1/M) sum_a [1 - (1-p_a)^M]), which tends to f however many adapters there are.
    """
    return fraction * _mean_hits(shares, math.inf, requests)


def pinned(shares: Shares, fraction: float, capacity: int) -> float:
    """The prefixes of the `capacity` hottest adapters are always there: f x their shares.

    No other fixed choice of as many prefixes does better.
    """
    _check_capacity(capacity)
    hottest = np.sort(shares)[::-1][:capacity]
    return fraction * min(1.0, float(hottest.sum()))


def lru(shares: Shares, fraction: float, capacity: int, requests: float = math.inf) -> float:
    """Least recently used, with room for `capacity` prefixes.

    Exact up to 100 prefixes (`lru_integral`), and beyond what `lru_che` says.
    """
    if not feasible(shares, capacity) or capacity >= np.count_nonzero(shares):
        return lru_che(shares, fraction, capacity, requests)
    found = _mean_hits(shares, math.inf, requests) - lost_hits(shares, capacity, requests)
    return fraction * max(0.0, found)


def lru_che(shares: Shares, fraction: float, capacity: int, requests: float = math.inf) -> float:
    """Least recently used by Che's approximation.

    A prefix stays for as many requests T as it takes to see `capacity` other ones, the same
    T for all: sum_a [1 - (1-p_a)^T] = C; then f x sum_a p_a (1 - (1-p_a)^T).  In requests
    instead of seconds, so (1-p)^T where the literature has exp(-pT): that makes it exact for
    one slot (T = 1, sum p^2).  It is up to 0.034 too high for a few prefixes and skewed
    shares, and within 0.001 above 100 prefixes.  Of finitely many requests the first T find
    a cache that is still filling.
    """
    return fraction * _mean_hits(shares, characteristic_requests(shares, capacity), requests)


def idle(
    shares: Shares, fraction: float, idle_s: float, rate: float, requests: float = math.inf
) -> float:
    """No limit but time: a prefix goes when it was not used for `idle_s` seconds.

    Poisson arrivals, `rate` requests per second in all: f x sum_a p_a (1 - exp(-R p_a t)).
    """
    if not (idle_s >= 0 and rate >= 0):
        raise ValueError(f"need idle_s >= 0 and rate >= 0, got {idle_s} and {rate}")
    # 0 x inf: without arrivals in any finite time there is nothing to hit.
    window = idle_s * rate if idle_s and rate else 0.0
    if math.isinf(window):
        return infinite(shares, fraction, requests)
    steady = -np.expm1(-shares * window)
    return fraction * _mean_hits(shares, window, requests, steady)


def sticky(first_turns: float, share: float) -> float:
    """A `share` of all requests are later turns that find their whole session.

    h + (1-h) x H, where `first_turns` is H, the rate of the others by one of the above.
    """
    return share + (1.0 - share) * first_turns


def characteristic_requests(shares: Shares, capacity: int) -> float:
    """Che's T in requests; infinite where everything that is ever asked for fits."""
    _check_capacity(capacity)
    if capacity == 0:
        return 0.0
    if capacity >= np.count_nonzero(shares):
        return math.inf
    low = high = math.log(capacity)  # (1-p)^T >= 1 - pT for T >= 1, so T >= C
    while _distinct(shares, high) < capacity:
        # Rare adapters need a T that only a logarithm can hold.
        low, high = high, high + max(1.0, high - low) * 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _distinct(shares, middle) < capacity:
            low = middle
        else:
            high = middle
    return math.exp(low) if low < math.log(np.finfo(np.float64).max) else math.inf


def _distinct(shares: Shares, log_requests: float) -> float:
    """Expected number of adapters among e^log_requests requests."""
    with np.errstate(divide="ignore", over="ignore"):
        # ln(-ln(1-p)) + ln T, since T itself may not fit into a float.
        exponents = np.exp(np.log(-np.log1p(-shares)) + log_requests)
        return float(-np.expm1(-exponents).sum())


def _mean_hits(
    shares: Shares, window: float, requests: float, steady: Shares | None = None
) -> float:
    """Mean over `requests` requests of the chance that the adapter came before.

    Request k, from 0, hits if its adapter is among the min(k, window) requests before it.

    Args:
        steady: chance of each adapter once k has passed the window, if not 1-(1-p)^window.
    """
    if not requests >= 1:
        raise ValueError(f"need at least one request, got {requests}")
    if window == 0 or requests == 1:
        return 0.0
    if steady is None:
        steady = _seen(shares, window)
    warming = min(requests, math.floor(window) + 1.0) if math.isfinite(window) else requests
    later = float((shares * steady).sum())
    if math.isinf(requests):
        return min(1.0, later)
    # sum over k < K of p (1 - (1-p)^k) = pK - (1 - (1-p)^K)
    early = float((shares * warming - _seen(shares, warming)).sum()) / requests
    return min(1.0, max(0.0, early + later * (1.0 - warming / requests)))


def _seen(shares: Shares, requests: float) -> Shares:
    """1 - (1-p)^requests, exact for tiny p and huge numbers of requests."""
    if requests == 0:
        return np.zeros_like(shares)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = requests * np.log1p(-shares)
    # infinitely many requests for an adapter that nobody asks for: 0 x inf
    exponents[shares == 0] = 0.0
    return np.asarray(-np.expm1(exponents), np.float64)


def _check_capacity(capacity: int) -> None:
    if capacity < 0:
        raise ValueError(f"need a capacity >= 0, got {capacity}")
