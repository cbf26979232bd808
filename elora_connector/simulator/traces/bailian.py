"""Alibaba's Qwen-Bailian traces: one JSON object per request, one id per 16 tokens.

Fields: chat_id, parent_chat_id (-1 at a first turn), timestamp in s, input_length,
output_length, type, turn, hash_ids.
"""

from __future__ import annotations

from typing import Any

from elora_connector.simulator.traces.base import Format, RawTrace, TraceRow
from elora_connector.simulator.traces.collect import Collector
from elora_connector.simulator.traces.fields import block_ids, member, number, seconds, tokens
from elora_connector.simulator.traces.source import Lines, json_object

BLOCK_TOKENS = 16


def _read(lines: Lines) -> RawTrace:
    rows = Collector(lines)
    sessions: dict[int, str] = {}
    for text in lines:
        row = json_object(lines, text)
        input_tokens = tokens(lines, "input_length", member(lines, row, "input_length"))
        ids = member(lines, row, "hash_ids")
        rows.add(
            TraceRow(
                at=seconds(lines, "timestamp", member(lines, row, "timestamp")),
                input_tokens=input_tokens,
                output_tokens=tokens(lines, "output_length", member(lines, row, "output_length")),
                session=_session(lines, row, sessions),
                blocks=block_ids(lines, "hash_ids", ids, -(-input_tokens // BLOCK_TOKENS)),
            )
        )
    return rows.done("bailian", BLOCK_TOKENS)


def _session(lines: Lines, row: dict[str, Any], sessions: dict[int, str]) -> str:
    chat = _chat(lines, row, "chat_id")
    parent = _chat(lines, row, "parent_chat_id")
    # A parent from before the trace began is not there; its children start anew.
    sessions[chat] = sessions.get(parent, str(chat))
    return sessions[chat]


def _chat(lines: Lines, row: dict[str, Any], name: str) -> int:
    return int(number(lines, name, member(lines, row, name)))


BAILIAN = Format("bailian", lambda first: first.startswith("{") and '"chat_id"' in first, _read)
