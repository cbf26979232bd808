"""Rows of a real trace made into requests that can be replayed."""

from __future__ import annotations

import numpy as np

from elora_connector.simulator.labels import ChainLabels, SessionLabels, per_chunk, seed_of
from elora_connector.simulator.popularity import Popularity
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.sessions import find_sessions
from elora_connector.simulator.traces.base import RawTrace, TraceRow

_UNKNOWN = "unknown"
"""Names ids of text that no other request has.  They are hashes, because labels keep 64 bits
of an id and the small numbers belong to the files."""


def to_trace(
    raw: RawTrace,
    chunk_tokens: int,
    adapters: Popularity | None = None,
    *,
    seed: int = 0,
    sticky: bool = True,
) -> Trace:
    """Requests with adapter, session, turn and labels.

    Args:
        adapters: for rows that name no adapter; None leaves them to the base model.
        sticky: all rows that share a conversation's beginning get one adapter, so that the
            prefixes they share are kept; else each row draws its own.

    The answer of a turn counts as part of the session's next prompt where that goes on from
    it, which is how a chat is continued; other answers are shared with nobody.
    """
    sessions = find_sessions(raw)
    names = _adapters(raw, sessions, adapters, np.random.default_rng(seed), sticky)
    contents = _contents(raw, sessions)
    chains, by_session = ChainLabels(), SessionLabels(chunk_tokens)
    turns: dict[int, int] = {}
    made: list[SimRequest] = []
    for row, session, name, ids in zip(raw.rows, sessions, names, contents, strict=True):
        tokens = row.input_tokens + row.output_tokens
        if ids is None:
            labels = by_session.of(name, session, tokens, row.shared_tokens)
        else:
            chain = chains.of(name, ids)
            labels = per_chunk(chain, raw.block_tokens, chunk_tokens, tokens // chunk_tokens)
        turn = turns.get(session, 0)
        turns[session] = turn + 1
        made.append(
            SimRequest(
                row.at,
                name,
                session,
                turn,
                row.think_s,
                labels,
                row.input_tokens,
                row.output_tokens,
            )
        )
    return Trace(raw.name, chunk_tokens, tuple(made))


def _adapters(
    raw: RawTrace,
    sessions: list[int],
    adapters: Popularity | None,
    rng: np.random.Generator,
    sticky: bool,
) -> list[str]:
    if adapters is None:
        return [row.adapter or "" for row in raw.rows]
    groups: dict[object, int] = {}
    numbers = [
        groups.setdefault(_group(row, session) if sticky else index, len(groups))
        for index, (row, session) in enumerate(zip(raw.rows, sessions, strict=True))
    ]
    drawn = adapters.draw(rng, len(groups)).tolist()
    return [
        adapters.names[drawn[number]] if row.adapter is None else row.adapter
        for row, number in zip(raw.rows, numbers, strict=True)
    ]


def _group(row: TraceRow, session: int) -> object:
    """What must stay with one adapter: all that shares two blocks, or a session."""
    if row.session is None and row.blocks is not None and len(row.blocks) > 1:
        return row.blocks[:2]
    return session


def _contents(raw: RawTrace, sessions: list[int]) -> list[tuple[int, ...] | None]:
    """Ids of the blocks of prompt and answer, as many as it takes to cover both."""
    later: dict[int, tuple[int, ...]] = {}
    found: list[tuple[int, ...] | None] = []
    for index in range(len(raw.rows) - 1, -1, -1):
        row, session = raw.rows[index], sessions[index]
        if row.blocks is None:
            found.append(None)
            continue
        ids = row.blocks
        if not raw.covers_answer:
            full = ids[: row.input_tokens // raw.block_tokens]
            following = later.get(session, ())
            # An unfinished block of this turn is the beginning of one of the next turn.
            ids = (
                following if len(following) > len(full) and following[: len(full)] == full else ids
            )
            later[session] = ids
        needed = -(-(row.input_tokens + row.output_tokens) // raw.block_tokens)
        found.append(ids[:needed] + (seed_of(_UNKNOWN, index),) * (needed - len(ids)))
    found.reverse()
    return found
