"""The figures of one question side by side."""

from __future__ import annotations

import pytest

from elora_connector.simulator import bounds, figures
from elora_connector.simulator.figures import (
    Figure,
    Load,
    closed_forms,
    counted,
    expected,
    measured,
    trace_adapters,
    trace_shares,
    usable_fraction,
)
from elora_connector.simulator.models import LLAMA3_8B, Machine
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.shares import zipf
from elora_connector.simulator.sizing import Sizing

SHARES = zipf(16, 1)


def sizing(adapters: int = 16, slots: int | None = None) -> Sizing:
    return Sizing(Machine(LLAMA3_8B), adapters, 16, slots=slots, chunk_tokens=256)


def by_name(made: list[Figure]) -> dict[tuple[str, str], Figure]:
    named = {(figure.cache, figure.where): figure for figure in made}
    assert len(named) == len(made)
    return named


def test_closed_forms_of_a_given_room() -> None:
    load = Load(0.85, 5000, capacity=4, idle_s=60, rate=0.5)
    made = by_name(closed_forms(load, SHARES, sizing(slots=3)))
    rates = {name: figure.rate for name, figure in made.items()}
    assert rates == {
        (figures.QUOTED, ""): bounds.quoted(SHARES, 0.85),
        (figures.UNLIMITED, ""): bounds.infinite(SHARES, 0.85, 5000),
        (figures.PINNED, ""): bounds.pinned(SHARES, 0.85, 4),
        (figures.LRU, ""): bounds.lru(SHARES, 0.85, 4, 5000),
        (figures.LRU_CHE, ""): bounds.lru_che(SHARES, 0.85, 4, 5000),
        (figures.IDLE, ""): bounds.idle(SHARES, 0.85, 60, 0.5, 5000),
        (figures.SLOTS, "gpu"): bounds.lru(SHARES, 1.0, 3, 5000),
    }
    assert made[figures.LRU, ""].room == 4
    assert made[figures.SLOTS, "gpu"].room == 3
    assert made[figures.QUOTED, ""].sticky is None


def test_room_by_memory_and_whole_chunks() -> None:
    load = Load(0.85, 5000, prompt_tokens=2048)
    # 0.85 x 2048 = 1740.8: six chunks of 256.
    assert usable_fraction(load, sizing()) == 1536 / 2048
    made = by_name(closed_forms(load, SHARES, sizing()))
    assert made[figures.LRU, "gpu"].room == sizing().gpu.tokens_left // 1536
    assert made[figures.LRU, "host"].room == sizing().host.tokens_left // 1536
    assert made[figures.UNLIMITED, ""].rate == bounds.infinite(SHARES, 0.75, 5000)
    # The widely quoted figure stays what is quoted.
    assert made[figures.QUOTED, ""].rate == bounds.quoted(SHARES, 0.85)
    # A prompt that is shared whole still computes its last token.
    assert usable_fraction(Load(1.0, prompt_tokens=512), sizing()) == 0.5
    assert usable_fraction(Load(1.0, prompt_tokens=513), sizing()) == 512 / 513
    short = closed_forms(Load(0.85, prompt_tokens=200), SHARES, sizing())
    assert {figure.cache for figure in short} == {figures.QUOTED, figures.UNLIMITED, figures.SLOTS}
    assert by_name(short)[figures.UNLIMITED, ""].rate == 0


def test_later_turns() -> None:
    load = Load(0.85, 1000, capacity=2, sticky=0.75)
    made = by_name(closed_forms(load, SHARES, sizing()))
    lru = made[figures.LRU, ""]
    assert lru.rate == bounds.lru(SHARES, 0.85, 2, 250)
    assert lru.sticky == pytest.approx(0.75 + 0.25 * lru.rate)
    assert expected(list(made.values())) == (lru.sticky, made[figures.UNLIMITED, ""].sticky)


def test_what_to_plan_with() -> None:
    assert expected(closed_forms(Load(), SHARES, sizing()))[0] is None
    made = [
        Figure(figures.UNLIMITED, "", None, 0.8),
        Figure(figures.LRU, "gpu", 5, 0.6),
        Figure(figures.LRU, "host", 3, 0.4),
    ]
    assert expected(made) == (0.6, 0.8)


def request(at: float, adapter: str, *labels: int) -> SimRequest:
    return SimRequest(at, adapter, 0, 0, 0.0, labels, len(labels) * 256 + 1, 1)


TRACE = Trace(
    "small",
    256,
    [
        request(0, "b", 1, 2),
        request(1, "a", 1, 2, 3),
        request(2, "b", 1, 2),
        request(5, "a", 1, 2, 9),
        request(6, "a", 1, 2, 3),
        request(10, "", 7),
    ],
)
TOKENS = 14 * 256 + 6


def test_counted_in_a_trace() -> None:
    assert trace_shares(TRACE) == pytest.approx([1 / 2, 1 / 3, 1 / 6])
    assert trace_adapters(TRACE) == 2
    made = by_name(counted(Load(capacity=6, idle_s=2), TRACE, sizing(2, slots=1)))
    rates = {name: figure.rate for name, figure in made.items()}
    # b: both; a: 1, 2; then 1, 2, 3.
    unlimited = 7 * 256 / TOKENS
    assert rates == pytest.approx(
        {
            (figures.QUOTED, ""): unlimited / 2,
            (figures.UNLIMITED, ""): unlimited,
            (figures.LRU, ""): unlimited,
            # Two chunks for each of the three.
            (figures.LRU_SPLIT, ""): 6 * 256 / TOKENS,
            # a is back after 4 s, then after 1 s: its chunk 3 is gone.
            (figures.IDLE, ""): 4 * 256 / TOKENS,
            # One slot, base requests not counted: b a b a a.
            (figures.SLOTS, "gpu"): 1 / 5,
        }
    )
    large = by_name(counted(Load(), TRACE, sizing(2)))
    assert large[figures.LRU, "gpu"].room == sizing(2).gpu.tokens_left // 256
    assert large[figures.LRU, "host"].rate == unlimited


def test_the_load_of_a_trace() -> None:
    load = measured(Load(), TRACE)
    assert (load.requests, load.rate, load.prompt_tokens) == (6, 0.6, round(TOKENS / 6))
    assert measured(Load(rate=2.0), TRACE).rate == 2.0
    assert measured(Load(), Trace("one", 256, TRACE.requests[:1])).rate is None
    base = Trace("base", 256, TRACE.requests[-1:])
    made = {figure.cache for figure in counted(Load(), base, sizing(0))}
    assert figures.SLOTS not in made
