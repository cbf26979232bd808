"""What a replay is fed with: requests of a trace, without any prompt text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a trace.

    Attributes:
        at: seconds from the start of the trace; the earliest time it can arrive.
        adapter: name of its adapter; "" is the base model.
        session: turns of one session run one after the other (closed loop).
        turn: 0, 1, ...
        think_s: turn k > 0 arrives at max(at, end of turn k-1 + think_s).
        labels: 64-bit chain hashes, one per full chunk of prompt and answer.  Equal labels
            mean equal whole prefixes of the same adapter.
        prompt_tokens, output_tokens: lengths.
    """

    at: float
    adapter: str
    session: int
    turn: int
    think_s: float
    labels: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


class Trace(NamedTuple):
    """Requests in the order of `at`; `chunk_tokens` is the length that a label stands for."""

    name: str
    chunk_tokens: int
    requests: Sequence[SimRequest]
