"""Which adapter a session asks for: names, shares, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elora_connector.errors import ConfigError
from elora_connector.simulator.shares import zipf

KINDS = "uniform (or random), distinct, zipf:S with S >= 0 (skewed is zipf:1.2)"
_ALSO = {"random": "uniform", "skewed": "zipf:1.2"}
MAX_ADAPTERS = 1_000_000


@dataclass(frozen=True)
class Popularity:
    """Adapters and how often each is asked for.

    Args:
        shares: of sessions, sum 1, one per adapter.
        in_turn: every session takes the next adapter instead of a random one.
    """

    names: tuple[str, ...]
    shares: NDArray[np.float64]
    in_turn: bool = False

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Adapter numbers of `count` sessions."""
        if self.in_turn:
            return np.arange(count, dtype=np.int64) % len(self.names)
        return rng.choice(len(self.names), size=count, p=self.shares).astype(np.int64)


def adapter_names(count: int) -> tuple[str, ...]:
    """`count` names of equal length, in order of popularity.

    Raises:
        ConfigError: not between 1 and a million.
    """
    if not 1 <= count <= MAX_ADAPTERS:
        raise ConfigError(f"adapters: expected 1 to {MAX_ADAPTERS}, found {count}")
    width = max(3, len(str(count - 1)))
    return tuple(f"adapter-{number:0{width}d}" for number in range(count))


def popularity(kind: str, count: int) -> Popularity:
    """One of `KINDS` for `count` adapters.

    Raises:
        ConfigError: no such kind.
    """
    names = adapter_names(count)
    word, _, argument = _ALSO.get(kind, kind).partition(":")
    if word in ("uniform", "distinct") and not argument:
        return Popularity(names, np.full(count, 1.0 / count), in_turn=word == "distinct")
    if word == "zipf":
        return Popularity(names, zipf(count, _exponent(kind, argument)))
    raise ConfigError(f"popularity: expected one of {KINDS}; found {kind!r}")


def _exponent(kind: str, argument: str) -> float:
    try:
        exponent = float(argument)
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= 20:
        raise ConfigError(f"popularity: expected one of {KINDS}; found {kind!r}")
    return exponent
