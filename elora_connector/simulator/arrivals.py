"""When sessions begin, and which adapter each asks for.

Two kinds of traffic.  ServeGen's clients stand for adapters: each has its own rate, which
drifts from window to window, and its own burstiness; the gaps between its requests are
drawn from the gamma or Weibull family that was found to fit.  Or one Poisson stream, whose
sessions draw their adapter from fixed shares.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elora_connector.simulator.popularity import Popularity, adapter_names
from elora_connector.simulator.samples import client_windows
from elora_connector.simulator.traces.servegen import WINDOW_S

Floats = NDArray[np.float64]

MAX_CV = 12.0
"""Burstiness is cut here (98 % of all windows lie below): above it, one window holds a single
burst or nothing, and the rate that was asked for means little."""
_MIN_CV = 0.1
_LEAST_SHARE = 5e-4
_TAIL_SLOPE = 1.2
_ROLL = 17


class Arrivals(NamedTuple):
    """Beginnings of sessions, in order of time: seconds, and numbers of adapters."""

    at: Floats
    adapter: NDArray[np.int64]


class Clients(NamedTuple):
    """Rate, burstiness and family (Weibull: True) of each adapter in each window.

    All have the shape (adapters, windows); rates add up to 1 on average over the windows.
    """

    rate: Floats
    cv: Floats
    weibull: NDArray[np.bool_]


@lru_cache
def clients(source: str, count: int) -> Clients:
    """`count` adapters, the busiest first, from the ServeGen sample `source`.

    Clients with less than 0.05 % of all requests are left out.  Where more adapters are
    wanted than remain, the pattern of a client is used again, moved in time, at a rate
    that goes on as Zipf's law with the measured slope of 1.2.
    """
    rate, cv, weibull = _table(source)
    mean = rate.mean(axis=1)
    order = np.argsort(-mean, kind="stable")
    order = order[mean[order] >= _LEAST_SHARE * mean.sum()]
    real = len(order)
    rows = [order[number % real] for number in range(count)]
    turns = [_ROLL * (number // real) for number in range(count)]
    made = [
        np.stack([np.roll(table[row], turn) for row, turn in zip(rows, turns, strict=True)])
        for table in (rate, cv, weibull)
    ]
    last = mean[order[-1]]
    for number in range(real, count):
        wanted = last * (real / (number + 1)) ** _TAIL_SLOPE
        made[0][number] *= wanted / mean[rows[number]]
    return Clients(made[0] / made[0].mean(axis=1).sum(), made[1], made[2])


def client_popularity(source: str, count: int) -> Popularity:
    """The mean shares of `clients`, for traffic that has no clients of its own."""
    return Popularity(adapter_names(count), clients(source, count).rate.mean(axis=1))


def from_clients(
    source: str, adapters: int, sessions: int, rate: float, rng: np.random.Generator
) -> Arrivals:
    """`sessions` arrivals of ServeGen's clients, about `rate` of them per second.

    The first window is drawn, so that seeds differ in who is busy and when.
    """
    table = clients(source, adapters)
    windows = table.rate.shape[1]
    first = int(rng.integers(windows))
    covered = first + np.arange(math.ceil(sessions / rate / WINDOW_S))
    scale = rate / table.rate[:, covered % windows].sum(axis=0).mean()
    times: list[Floats] = [np.empty(0)] * adapters
    ahead = rng.uniform(size=adapters)
    count = window = 0
    while count < sessions:
        for number in range(adapters):
            found, ahead[number] = _window(table, number, first + window, scale, ahead[number], rng)
            if len(found):
                times[number] = np.concatenate((times[number], found + window * WINDOW_S))
                count += len(found)
        window += 1
    at = np.concatenate(times)
    who = np.repeat(np.arange(adapters, dtype=np.int64), [len(part) for part in times])
    order = np.argsort(at, kind="stable")[:sessions]
    return Arrivals(at[order], who[order])


def _window(
    table: Clients,
    number: int,
    window: int,
    scale: float,
    ahead: float,
    rng: np.random.Generator,
) -> tuple[Floats, float]:
    """Arrivals of one adapter in one window, in s from its beginning.

    Args:
        ahead: what is left of the gap in which the window begins, in mean gaps, so that a
            rate may change in the middle of a gap.

    Returns:
        Times, and what is left of the last gap.
    """
    column = window % table.rate.shape[1]
    expected = float(table.rate[number, column]) * scale * WINDOW_S
    if expected <= ahead:
        return np.empty(0), ahead - expected
    cv = min(max(float(table.cv[number, column]), _MIN_CV), MAX_CV)
    at = np.array([ahead])
    while at[-1] < expected:
        more = _gaps(cv, bool(table.weibull[number, column]), int(expected - at[-1]) + 16, rng)
        at = np.concatenate((at, at[-1] + np.cumsum(more)))
    inside = int(np.searchsorted(at, expected))
    return at[:inside] * (WINDOW_S / expected), float(at[inside] - expected)


def _gaps(cv: float, weibull: bool, count: int, rng: np.random.Generator) -> Floats:
    """Gaps of mean 1 with the given coefficient of variation."""
    if not weibull:
        return rng.gamma(cv**-2, cv**2, count)
    shape = weibull_shape(cv)
    return rng.weibull(shape, count) / math.gamma(1 + 1 / shape)


@lru_cache(maxsize=4096)
def weibull_shape(cv: float) -> float:
    """The shape whose coefficient of variation is `cv`, by bisection."""
    low, high = 0.1, 20.0
    for _ in range(60):
        shape = math.sqrt(low * high)
        # ln(1 + cv^2) = ln Gamma(1 + 2/k) - 2 ln Gamma(1 + 1/k), falling in k
        found = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
        low, high = (shape, high) if found > math.log1p(cv * cv) else (low, shape)
    return math.sqrt(low * high)


def _table(source: str) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """(rate, cv, weibull) as measured, shape (clients, windows); no row, no requests."""
    found = client_windows(source)
    shape = (
        1 + max(window.rank for window in found),
        1 + int(max(window.start for window in found) // WINDOW_S),
    )
    rate, cv, weibull = np.zeros(shape), np.ones(shape), np.zeros(shape, dtype=np.bool_)
    for window in found:
        place = window.rank, int(window.start // WINDOW_S)
        rate[place], cv[place], weibull[place] = window.rate, window.cv, window.kind == "W"
    return rate, cv, weibull


def from_shares(
    popularity: Popularity, sessions: int, rate: float, rng: np.random.Generator
) -> Arrivals:
    """`sessions` Poisson arrivals, `rate` per second, whose adapters are drawn from shares."""
    at = np.cumsum(rng.exponential(1 / rate, sessions))
    return Arrivals(at, popularity.draw(rng, sessions))
