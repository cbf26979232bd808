"""The load of the multi-LoRA benchmark: seeded, append-only, drifting."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.serving.load import LOADS, Load, prompt_of, system_prompt, turns_of

SEED = 7


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_seed_gives_the_same_turns_however_many_are_asked_for(load: Load) -> None:
    longer = turns_of(load, SEED, 120)
    assert turns_of(load, SEED, 40) == longer[:40]
    assert turns_of(load, SEED + 1, 120) != longer


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_conversation_only_grows_and_keeps_its_adapter(load: Load) -> None:
    turns = turns_of(load, SEED, 120)
    answers = [[1000 + at] * load.answer for at in range(len(turns))]
    last: dict[int, tuple[int, list[int]]] = {}
    lengths: Counter[int] = Counter()
    for at, turn in enumerate(turns):
        prompt = prompt_of(load, turns[: at + 1], answers[:at])
        before = last.get(turn.conversation)
        if before is None:
            assert prompt == [*system_prompt(load, turn.adapter), *turn.user]
        else:
            assert before[0] == turn.adapter
            assert prompt == [*before[1], *turn.user]
        last[turn.conversation] = (turn.adapter, prompt + answers[at])
        lengths[turn.conversation] += 1
        assert len(prompt) + load.answer <= load.max_model_len
    assert max(lengths.values()) <= load.turns[1]


def test_popularity_follows_zipf_and_drifts() -> None:
    load = Load("drift", "", turns=(1, 1), drift=500)
    turns = turns_of(load, SEED, 1000)
    before = Counter(turn.adapter for turn in turns[:500])
    after = Counter(turn.adapter for turn in turns[500:])
    assert before.most_common(1)[0][0] == 0
    assert after.most_common(1)[0][0] == 1
    # The most popular of eight has 1 / (1 + 1/2 + ... + 1/8) = 0.368 of all.
    assert 150 < before[0] < 220
