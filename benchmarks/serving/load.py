"""Seeded multi-LoRA loads: who asks what, in which order.

A load is a list of turns in a fixed virtual order.  Every adapter has a system prompt of
its own; a conversation only grows: the next turn's prompt holds all earlier texts and
answers.  Which adapters are popular follows Zipf's law and drifts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

TOKENS = (8, 500)
"""Token ids of the tiny model's vocabulary that are no special tokens."""


@dataclass(frozen=True)
class Load:
    """Shape of a load and the memory it is given; sizes in tokens, blocks or GB (1024^3 bytes).

    Attributes:
        requests: turns in one round.
        turns: fewest and most turns of a conversation.
        user: fewest and most tokens that a turn adds.
        open_conversations: conversations that go on at the same time.
        drift: after so many turns every adapter is one rank less popular, the last the most.
        pause: after so many turns everything is finished before the next one.
        window: requests in flight at most.
        gpu_blocks: blocks of vLLM's pool; host_gb: memory of the host tier;
        host_adapters: vLLM's `max_cpu_loras`.
    """

    name: str
    title: str
    adapters: int = 8
    requests: int = 12
    turns: tuple[int, int] = (3, 7)
    system: int = 128
    user: tuple[int, int] = (24, 64)
    answer: int = 8
    open_conversations: int = 20
    zipf: float = 1.0
    drift: int = 12
    pause: int = 12
    window: int = 3
    gpu_blocks: int = 48
    host_gb: float = 0.016
    host_adapters: int = 4
    max_model_len: int = 1024

    @property
    def traffic(self) -> str:
        """What decides about the requests, and nothing of the memory they are given."""
        left_out = {"name", "title", "requests", "gpu_blocks", "host_gb", "host_adapters"}
        return repr({k: v for k, v in asdict(self).items() if k not in left_out})

    def scaled(self, **changes: Any) -> Load:
        """The same load with other sizes."""
        return replace(self, **changes)


LOADS = {
    load.name: load
    for load in (
        Load("chat", "multi-turn chat, nothing fits"),
        Load("fits", "multi-turn chat, all fits in host memory", host_gb=0.25, host_adapters=8),
        Load(
            "agents",
            "agent-like: 16 adapters, long prompts, few turns",
            adapters=16,
            requests=8,
            turns=(1, 3),
            system=384,
            user=(64, 128),
            open_conversations=6,
            drift=5,
            pause=8,
            window=2,
            gpu_blocks=64,
            host_gb=0.02,
            host_adapters=6,
        ),
    )
}


@dataclass(frozen=True)
class Turn:
    """One request before its prompt is known: the tokens it adds to its conversation."""

    conversation: int
    adapter: int
    user: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One request with the answer that plain vLLM without any cache gives."""

    conversation: int
    adapter: int
    prompt: tuple[int, ...]
    right: tuple[int, ...]

    def question(self) -> dict[str, Any]:
        """What a child needs to know."""
        return {
            "conversation": self.conversation,
            "adapter": self.adapter,
            "prompt": self.prompt,
            "n": len(self.right),
        }


def turns_of(load: Load, seed: int, count: int) -> list[Turn]:
    """The first `count` turns in their virtual order; conversations go on across rounds."""
    rng = random.Random(f"{load.adapters} {load.system} {seed}")
    going: dict[int, tuple[int, int]] = {}  # conversation -> adapter, turns left
    made: list[Turn] = []
    conversations = 0
    while len(made) < count:
        if len(going) < load.open_conversations:
            conversation, conversations = conversations, conversations + 1
            going[conversation] = (_adapter(load, len(made), rng), rng.randint(*load.turns))
        else:
            conversation = rng.choice(list(going))
        adapter, left = going.pop(conversation)
        made.append(Turn(conversation, adapter, _words(rng, rng.randint(*load.user))))
        if left > 1:
            going[conversation] = (adapter, left - 1)
    return made


def prompt_of(load: Load, turns: Sequence[Turn], answers: Sequence[Sequence[int]]) -> list[int]:
    """The prompt of the last turn, given the answers of those before it."""
    last = turns[-1]
    prompt = list(system_prompt(load, last.adapter))
    for turn, answer in zip(turns, [*answers, ()], strict=True):
        if turn.conversation == last.conversation:
            prompt += [*turn.user, *answer]
    return prompt


def system_prompt(load: Load, adapter: int) -> tuple[int, ...]:
    """The shared first tokens of an adapter's conversations, the same in every round."""
    return _words(random.Random(f"{load.adapters} {load.system} {adapter}"), load.system)


def _adapter(load: Load, position: int, rng: random.Random) -> int:
    """Zipf over ranks; ranks move by one every `drift` turns."""
    shares = [(rank + 1) ** -load.zipf for rank in range(load.adapters)]
    (rank,) = rng.choices(range(load.adapters), shares)
    return (rank + position // load.drift) % load.adapters


def _words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(*TOKENS) for _ in range(count))
