"""What a reader of traces gives back, whatever the file looked like.

A reader changes no state and may be called from any thread.  Nothing is returned before
the whole file was read and found good: a bad line gives one `TraceError` with its number,
and no row at all.  Zero rows is an error too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elora_connector.simulator.traces.source import Lines


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request as a trace tells of it; what the trace does not know is None.

    Args:
        at: arrival in s; rows are in this order.
        input_tokens: prompt, >= 1.
        output_tokens: answer, >= 1.
        adapter: its name, "" is the base model.
        session: equal for all turns of one conversation.
        think_s: pause of the user before this turn.
        shared_tokens: leading tokens that all requests of the adapter have in common.
        blocks: one id per block of `RawTrace.block_tokens` tokens, the last one perhaps
            part of a block; two requests share a prefix as far as their ids are equal.
    """

    at: float
    input_tokens: int
    output_tokens: int
    adapter: str | None = None
    session: str | None = None
    think_s: float = 0.0
    shared_tokens: int = 0
    blocks: tuple[int, ...] | None = None


class RawTrace(NamedTuple):
    """All rows of a file.

    Args:
        block_tokens: what one id of `TraceRow.blocks` stands for; 0 where there are none.
        covers_answer: the ids cover prompt and answer, else the prompt alone.
        skipped: rows left out because they have no prompt or no answer (failed requests).
    """

    name: str
    format: str
    rows: Sequence[TraceRow]
    block_tokens: int = 0
    covers_answer: bool = False
    skipped: int = 0


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Args:
        name: what the user calls it.
        sniff: whether the first line that is not blank looks like it.
        read: the rows of a file, without its name.
    """

    name: str
    sniff: Callable[[str], bool]
    read: Callable[[Lines], RawTrace]
