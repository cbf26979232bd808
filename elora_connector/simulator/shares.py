"""How requests spread over adapters: shares that sum to 1."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elora_connector.errors import EloraError

Shares = NDArray[np.float64]
"""Shape [adapters]: the probability that a request is for each of them; sums to 1."""


class SharesError(EloraError):
    """Shares that cannot be read or do not make a distribution."""


def uniform(adapters: int) -> Shares:
    """Every adapter gets as many requests."""
    return zipf(adapters, 0.0)


def zipf(adapters: int, s: float) -> Shares:
    """The i-th adapter, from 1, gets a share that is proportional to i^-s."""
    if adapters < 1:
        raise SharesError(f"need at least one adapter, got {adapters}")
    if not (s >= 0 and math.isfinite(s)):
        raise SharesError(f"Zipf's exponent must be a number >= 0, got {s}")
    # As a logarithm: a large s makes small shares 0, never an error.
    weights = np.exp(-s * np.log(np.arange(1, adapters + 1, dtype=np.float64)))
    return normalised(weights)


def normalised(weights: Iterable[float]) -> Shares:
    """Shares from weights, for example counts of requests.

    Raises:
        SharesError: none, a negative or infinite one, or all are zero.
    """
    values = np.asarray(list(weights), np.float64)
    if not len(values) or not np.all(np.isfinite(values)) or np.any(values < 0):
        raise SharesError("weights must be numbers >= 0, and at least one")
    largest = values.max()
    if not largest:
        raise SharesError("all weights are 0")
    # By the largest first, so that huge weights do not overflow in the sum.
    values = values / largest
    return np.asarray(values / values.sum(), np.float64)


class NamedShares(NamedTuple):
    names: list[str]
    shares: Shares


def read_shares(path: Path) -> NamedShares:
    """Shares from a file of weights (shares, percentages, counts of requests).

    Either a JSON object `{"name": weight}`, or one adapter a line: `weight` or
    `name weight` (a comma or blanks between); blank lines and `#` comments are skipped.

    Raises:
        SharesError: names the file, and the line where there is one.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise SharesError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SharesError(f"{path}: not a text file") from None
    pairs = _from_json(path, text) if text.lstrip().startswith("{") else _from_lines(path, text)
    if not pairs:
        raise SharesError(f"{path}: no adapter in it")
    try:
        return NamedShares([name for name, _ in pairs], normalised(w for _, w in pairs))
    except SharesError as error:
        raise SharesError(f"{path}: {error}") from None


def _from_json(path: Path, text: str) -> list[tuple[str, float]]:
    try:
        found = json.loads(text)
    except ValueError:
        raise SharesError(f"{path}: not valid JSON") from None
    for name, weight in found.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise SharesError(f"{path}: weight of {name!r} is not a number")
    return [(name, float(weight)) for name, weight in found.items()]


def _from_lines(path: Path, text: str) -> list[tuple[str, float]]:
    pairs: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        name = words[0] if len(words) > 1 else f"adapter-{len(pairs)}"
        if len(words) > 2 or name in pairs:
            problem = f"{name!r} again" if name in pairs else "expected `weight` or `name weight`"
            raise SharesError(f"{path}, line {number}: {problem}")
        pairs[name] = _weight(words[-1], f"{path}, line {number}")
    return list(pairs.items())


def _weight(word: str, place: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        weight = math.nan
    if not (weight >= 0 and math.isfinite(weight)):
        raise SharesError(f"{place}: expected a weight >= 0, got {word!r}")
    return weight
