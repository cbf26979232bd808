"""Taskmaster-4 dialogues in their compact form: `[scenario, instruction, [turns]]`.

Numbers of tokens only: what the user says is positive, what the assistant says negative.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple

from elora_connector.simulator.traces.fields import number, tokens
from elora_connector.simulator.traces.source import Lines, json_value


class Dialogue(NamedTuple):
    """One conversation.

    Args:
        scenario: what it is about.
        instruction: tokens of the scenario's instruction.
        turns: tokens, > 0 said by the user, < 0 by the assistant.
    """

    scenario: int
    instruction: int
    turns: tuple[int, ...]

    @property
    def exchanges(self) -> list[tuple[int, int]]:
        """(tokens of the user, tokens of the answer); what stays unanswered is left out."""
        found: list[tuple[int, int]] = []
        said = 0
        for turn in self.turns:
            if turn > 0:
                said += turn
            elif said and turn:
                found.append((said, -turn))
                said = 0
        return found


def read_dialogues(path: str | PathLike[str]) -> tuple[Dialogue, ...]:
    """All dialogues of a file.

    Raises:
        TraceError: names the line that is wrong.
    """
    lines = Lines(path)
    found = tuple(_dialogue(lines, json_value(lines, text)) for text in lines)
    if not found:
        lines.fail("no dialogues in this file", line=0)
    return found


def _dialogue(lines: Lines, value: Any) -> Dialogue:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], list):
        lines.fail("expected [scenario, instruction tokens, [tokens of each turn]]")
    for turn in value[2]:
        tokens(lines, "turn", abs(number(lines, "turn", turn)))
    return Dialogue(
        tokens(lines, "scenario", value[0]),
        tokens(lines, "instruction", value[1]),
        tuple(int(turn) for turn in value[2]),
    )
