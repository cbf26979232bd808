"""Mooncake's traces (FAST'25): `{"timestamp": ms, "input_length", "output_length", "hash_ids"}`.

Also the short form of the same, `[ms, input, output, [ids]]`.  One id stands for 512 tokens
of the prompt and is equal where the whole prefix is.
"""

from __future__ import annotations

from typing import Any

from elora_connector.simulator.traces.base import Format, RawTrace, TraceRow
from elora_connector.simulator.traces.collect import Collector
from elora_connector.simulator.traces.fields import block_ids, member, seconds, tokens
from elora_connector.simulator.traces.source import Lines, json_value

BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def _read(lines: Lines) -> RawTrace:
    rows = Collector(lines)
    for text in lines:
        at, prompt, answer, ids = _values(lines, json_value(lines, text))
        input_tokens = tokens(lines, "input_length", prompt)
        rows.add(
            TraceRow(
                at=seconds(lines, "timestamp", at) / 1000,
                input_tokens=input_tokens,
                output_tokens=tokens(lines, "output_length", answer),
                blocks=block_ids(lines, "hash_ids", ids, -(-input_tokens // BLOCK_TOKENS)),
            )
        )
    return rows.done("mooncake", BLOCK_TOKENS)


def _values(lines: Lines, value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [member(lines, value, name) for name in _FIELDS]
    if not isinstance(value, list) or len(value) != len(_FIELDS):
        lines.fail(f"expected an object with {', '.join(_FIELDS)}, or a list of the four")
    return value


def _sniff(first: str) -> bool:
    is_object = '"hash_ids"' in first and '"chat_id"' not in first
    return first.startswith("[") or (first.startswith("{") and is_object)


MOONCAKE = Format("mooncake", _sniff, _read)
