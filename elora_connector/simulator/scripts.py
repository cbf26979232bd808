"""What the sessions of a workload say: lengths of turns and pauses between them.

No text, only tokens.  Drawn from the packaged traces, so that what belongs together (a
turn's tokens and the pause before it, a prompt and its answer) stays together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from elora_connector.simulator import samples
from elora_connector.simulator.sessions import find_sessions
from elora_connector.simulator.traces.servegen import QUANTILES, ClientLengths
from elora_connector.simulator.traces.taskmaster import Dialogue

CHAT_SHARED_TOKENS = 512
"""Mooncake's conversations all begin with one block of this size: the system prompt."""
ANSWER_TOKENS_PER_S = 50.0
"""Assumed speed of Mooncake's answers: a user's pause is the time between two turns without
the time that the answer took."""
AGENT_THINK_S = 5.0
"""Assumed mean pause of an agent's user (no trace tells); exponential."""
TRANSLATION_SPREAD = 0.25
"""Assumed: ln(tokens of the translation / tokens of the source) is normal with mean 0 and
this standard deviation."""
TRANSLATION_TOKENS = 600
"""Only clients whose longest prompts (5 %) exceed the shortest by less translate sentences."""


class Turn(NamedTuple):
    """New tokens of the user, tokens of the answer, and the pause before the turn in s."""

    user_tokens: int
    answer_tokens: int
    think_s: float


class Script(NamedTuple):
    """A session: what its adapter shares with all sessions, then the turns."""

    shared_tokens: int
    turns: tuple[Turn, ...]


def chat(rng: np.random.Generator, adapters: list[int]) -> list[Script]:
    """First prompts and all answers from Azure's conversations; what users add in later
    turns, their pauses and the number of turns from Mooncake's conversations."""
    rows = samples.azure("conv").rows
    chats = _conversations()
    firsts = rng.integers(len(rows), size=len(adapters)).tolist()
    chosen = rng.integers(len(chats), size=len(adapters)).tolist()
    made: list[Script] = []
    for first, number in zip(firsts, chosen, strict=True):
        later = chats[number]
        answers = rng.integers(len(rows), size=len(later)).tolist()
        turns = [Turn(rows[first].input_tokens, rows[first].output_tokens, 0.0)]
        turns += [
            Turn(said, rows[answer].output_tokens, pause)
            for (said, pause), answer in zip(later, answers, strict=True)
        ]
        made.append(Script(CHAT_SHARED_TOKENS, tuple(turns)))
    return made


def translation(rng: np.random.Generator, adapters: list[int]) -> list[Script]:
    """One turn.  Each adapter is one of ServeGen's clients: its shortest prompts (5 %) are
    its instruction, what a prompt has beyond them is the text, a few sentences; a
    translation is about as long as its source."""
    known = _translators()
    where = rng.uniform(size=len(adapters))
    ratio = rng.lognormal(0.0, TRANSLATION_SPREAD, len(adapters))
    made: list[Script] = []
    for adapter, place, factor in zip(adapters, where, ratio, strict=True):
        client = known[adapter % len(known)]
        source = _source_tokens(client, float(place))
        answer = max(1, round(source * float(factor)))
        made.append(Script(client.prompt[0], (Turn(source, answer, 0.0),)))
    return made


def agent(rng: np.random.Generator, adapters: list[int]) -> list[Script]:
    """Taskmaster's dialogues: a scenario for each adapter, its instruction shared by all."""
    scenarios = _scenarios()
    where = rng.uniform(size=len(adapters)).tolist()
    made: list[Script] = []
    for adapter, place in zip(adapters, where, strict=True):
        dialogues = scenarios[adapter % len(scenarios)]
        dialogue = dialogues[int(place * len(dialogues))]
        said = dialogue.exchanges
        pauses = [0.0, *rng.exponential(AGENT_THINK_S, len(said) - 1).tolist()]
        turns = [
            Turn(user, answer, think) for (user, answer), think in zip(said, pauses, strict=True)
        ]
        made.append(Script(dialogue.instruction, tuple(turns)))
    return made


def fitting(script: Script, max_tokens: int) -> Script:
    """`script` without the turns that would take it beyond `max_tokens`.

    The first turn stays, cut to fit.
    """
    first = script.turns[0]
    shared = min(script.shared_tokens, max_tokens // 4)
    answer = min(first.answer_tokens, max_tokens // 4)
    first = Turn(min(first.user_tokens, max_tokens - shared - answer), answer, 0.0)
    turns, total = [first], shared + first.user_tokens + answer
    for turn in script.turns[1:]:
        total += turn.user_tokens + turn.answer_tokens
        if total > max_tokens:
            break
        turns.append(turn)
    return Script(shared, tuple(turns))


def chat_turns() -> float:
    """Mean number of turns of `chat`."""
    return 1.0 + sum(map(len, _conversations())) / len(_conversations())


def agent_turns() -> float:
    """Mean number of turns of `agent`, all dialogues alike."""
    lengths = [len(dialogue.exchanges) for found in _scenarios() for dialogue in found]
    return sum(lengths) / len(lengths)


@lru_cache
def _conversations() -> tuple[tuple[tuple[int, float], ...], ...]:
    """For each conversation of Mooncake (user tokens, pause) of the turns after the first."""
    raw = samples.mooncake("conversation")
    found: dict[int, list[tuple[int, float]]] = {}
    last: dict[int, int] = {}
    for index, (row, session) in enumerate(zip(raw.rows, find_sessions(raw), strict=True)):
        later = found.setdefault(session, [])
        if session in last:
            before = raw.rows[last[session]]
            said = row.input_tokens - before.input_tokens - before.output_tokens
            pause = row.at - before.at - before.output_tokens / ANSWER_TOKENS_PER_S
            later.append((max(1, said), round(max(0.0, pause), 3)))
        last[session] = index
    return tuple(map(tuple, found.values()))


@lru_cache
def _scenarios() -> tuple[tuple[Dialogue, ...], ...]:
    """The dialogues with an answer, by scenario."""
    found: dict[int, list[Dialogue]] = {}
    for dialogue in samples.dialogues():
        if dialogue.exchanges:
            found.setdefault(dialogue.scenario, []).append(dialogue)
    return tuple(tuple(found[scenario]) for scenario in sorted(found))


@lru_cache
def _translators() -> tuple[ClientLengths, ...]:
    """The clients whose prompts vary by no more than a few sentences."""
    known = samples.client_lengths("mid")
    return tuple(c for c in known if 8 <= c.prompt[-1] - c.prompt[0] <= TRANSLATION_TOKENS)


def _source_tokens(client: ClientLengths, place: float) -> int:
    """The text of a prompt at a quantile, linear between the known ones."""
    prompt = float(np.interp(place, QUANTILES, client.prompt))
    return max(1, round(prompt) - client.prompt[0])
