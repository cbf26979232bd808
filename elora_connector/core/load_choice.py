"""Load or recompute: KV that arrives later than the GPU could compute it is not worth moving.

The paper has no such test, and below a few GB/s loading is the slower of the two.
"""

from __future__ import annotations

import enum
import math
from typing import Final

from elora_connector.core.rates import Rates

PROBE_S: Final = 10.0
"""One load in this time goes ahead although it looks too slow: speeds change, and what
is never tried is never measured again."""


class Source(enum.Enum):
    """Where the KV would come from."""

    HOST = "host"
    REMOTE = "remote"
    LOOKUP = "lookup"
    """Not known yet: the remote tier was asked and has not answered."""


class Choice(enum.Enum):
    LOAD = "load"
    RECOMPUTE = "recompute"
    PROBE = "probe"
    """Loaded only to measure it again."""


class LoadChoice:
    """Compares measured seconds, with hysteresis.

    Until loads and prefill were both measured everything is loaded.  A source is given
    up when it is more than `margin` times slower than recomputing, and taken up again
    once it is no slower.

    Args:
        margin: infinite: always load; below 1: load only what is that much faster.
    """

    def __init__(self, rates: Rates, margin: float) -> None:
        if not margin > 0:
            raise ValueError(f"margin must be positive, got {margin}")
        self._rates = rates
        self._margin = margin
        self._probed: dict[Source, float] = {}
        """Sources that were given up -> when they were last tried."""

    def from_host(self, tokens: int, nbytes: int, now: float) -> Choice:
        """For `tokens` tokens with `nbytes` bytes of KV on one rank, in the host tier."""
        if not self._rates.host_to_gpu.measured:
            return Choice.LOAD
        return self._choose(Source.HOST, tokens, self._rates.load_s(nbytes), now)

    def from_remote(
        self, tokens: int, values: int, value_bytes: int, queued: int, now: float
    ) -> Choice:
        """For `tokens` tokens in `values` remote values, behind `queued` that are on their way."""
        rates = self._rates
        if not rates.remote_to_host.measured:
            return Choice.LOAD
        seconds = rates.fetch_s(value_bytes, values, queued) + rates.load_s(values * value_bytes)
        return self._choose(Source.REMOTE, tokens, seconds, now)

    def _choose(self, source: Source, tokens: int, seconds: float, now: float) -> Choice:
        if not self._rates.prefill.measured or math.isinf(self._margin):
            return Choice.LOAD
        recompute = self._rates.recompute_s(tokens)
        given_up = source in self._probed
        if seconds <= (min(1.0, self._margin) if given_up else self._margin) * recompute:
            self._probed.pop(source, None)
            return Choice.LOAD
        if not given_up:
            self._probed[source] = now
        elif not 0 <= now - self._probed[source] < PROBE_S:
            self._probed[source] = now
            return Choice.PROBE
        return Choice.RECOMPUTE
