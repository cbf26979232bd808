"""Which requests of a trace are turns of one conversation, found by their prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from elora_connector.simulator.labels import ChainLabels
from elora_connector.simulator.traces.base import RawTrace, TraceRow


def find_sessions(raw: RawTrace) -> list[int]:
    """A session number for each row.

    Rows that name their session keep it.  Of the others, a row continues the latest
    earlier one all of whose full blocks it begins with and which it is longer than.  The
    first block alone says nothing: in Mooncake's conversations it is the same system
    prompt for everybody.
    """
    named: dict[str, int] = {}
    tails: dict[int, int] = {}
    chains = ChainLabels()
    found: list[int] = []
    count = 0
    for index, row in enumerate(raw.rows):
        # Chained, so that an id means its whole prefix even where the trace's own do not.
        chain = [] if row.session is not None else chains.of(row.adapter or "", row.blocks or ())
        if row.session is not None:
            number = named.setdefault(row.session, count)
        else:
            known = _continued(raw.rows, index, chain, tails, found)
            number = count if known is None else known
            full = row.input_tokens // raw.block_tokens if chain else 0
            if 2 <= full <= len(chain):
                tails[chain[full - 1]] = index
        count = max(count, number + 1)
        found.append(number)
    return found


def _continued(
    rows: Sequence[TraceRow],
    index: int,
    chain: list[int],
    tails: dict[int, int],
    found: list[int],
) -> int | None:
    """The session that a row goes on with; its tail is used up, a second child is a branch."""
    for item in reversed(chain):
        if item in tails:
            if rows[tails[item]].input_tokens < rows[index].input_tokens:
                return found[tails.pop(item)]
            return None
    return None
