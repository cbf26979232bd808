"""LeafTable columns and back pointers; the policies that read them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.core.leaves import LeafTable, VisitClock
from elora_connector.core.node import NOT_LISTED, UNLISTED, AdapterNode, Node, Run
from elora_connector.core.policy import policy_named
from elora_connector.core.types import ChunkKey, Identity, Tier

ROOT = Node(ChunkKey(b""), None, Run(None, -1, 0, 0.0, 0.0))


def adapter(index: int) -> AdapterNode:
    return AdapterNode(
        Identity("a", bytes(32)),
        ROOT,
        index=index,
        always_resident=False,
        nbytes=5,
        seq=index,
        now=0.0,
        weight=0.0,
    )


def chunk(seq: int) -> Node:
    above = adapter(seq % 3)
    return Node(ChunkKey(bytes(32)), above, Run(above, seq, seq, float(seq), 100.0 - seq))


@given(st.lists(st.integers(0, 10**6), max_size=400), st.integers(0, 300))
def test_rows_stay_dense_and_linked(removals: list[int], size: int) -> None:
    table = LeafTable(Tier.HOST)
    expected = [chunk(i) for i in range(size)]
    for node in expected:
        table.add(node)
    for number in removals[:size]:
        gone = expected.pop(number % len(expected))
        table.remove(gone)
        assert gone.rows[Tier.HOST] == NOT_LISTED

    assert len(table) == len(expected)
    assert set(table.nodes) == set(expected)
    for row, node in enumerate(table.nodes):
        assert node.rows == (NOT_LISTED, row, NOT_LISTED)
        assert (table.last[row], table.nbytes[row]) == (node.last_use, node.nbytes)
        assert (table.seq[row], table.adapter[row]) == (node.seq, node.seq % 3)
        assert table.visits(0.0)[row] == node.weight
        assert not table.is_adapter[row]


def test_update_and_adapter_rows() -> None:
    table = LeafTable(Tier.GPU)
    weights, node = adapter(7), chunk(1)
    table.add(weights)
    table.add(node)
    node.run = node.run.used(50.0, 1.0)
    before = table.changes
    table.update(node)
    assert table.changes > before
    assert table.last.tolist() == [0.0, 50.0]
    assert table.visits(0.0).tolist() == [0.0, 100.0]
    assert table.is_adapter.tolist() == [True, False]
    assert table.adapter.tolist() == [7, 1]


def test_scratch_tables_do_not_link() -> None:
    table = LeafTable(Tier.HOST)
    node = chunk(4)
    table.fill([node])
    table.fill([chunk(3), node])
    assert table.seq.tolist() == [3, 4]
    assert node.rows is UNLISTED


def test_clear_unlists() -> None:
    table = LeafTable(Tier.HOST)
    node = chunk(4)
    table.add(node)
    table.clear()
    assert len(table) == 0
    assert node.rows is UNLISTED


def test_views_survive_growth() -> None:
    table = LeafTable(Tier.HOST)
    table.add(chunk(1))
    view = table.last
    for i in range(500):
        table.add(chunk(i))
    assert view.tolist() == [1.0]
    assert len(table.last) == 501


@pytest.mark.parametrize("decay", [0.0, -1.0, math.nan])
def test_bad_decay(decay: float) -> None:
    with pytest.raises(ValueError, match="decay_s"):
        VisitClock(decay)


@pytest.mark.parametrize(
    ("name", "order"),
    [("lru", [1, 2, 3]), ("fifo", [1, 2, 3]), ("mru", [3, 2, 1]), ("lfu", [3, 2, 1])],
)
def test_named_policies(name: str, order: list[int]) -> None:
    table = LeafTable(Tier.HOST)
    for seq in (2, 3, 1):
        table.add(chunk(seq))
    scores = policy_named(name).scores(table, 9.0)
    assert scores.dtype == np.float64
    assert [table.nodes[i].seq for i in np.argsort(scores)] == order


def test_unknown_policy_names_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"'LRU'; legal: fifo, lfu, lru, mru"):
        policy_named("LRU")


def test_visits_fade_with_turnovers_while_memory_is_short() -> None:
    """Half the memory replaced in 2 s, half-life half a turnover: 2 s instead of 100."""
    clock = VisitClock(100.0 / math.log(2), turnovers=0.5)
    weight = clock.gain(0.0)
    clock.turned_over(0.0, 10.0)
    before = weight * clock.scale(10.0)
    clock.turned_over(0.5, 12.0)
    assert before == pytest.approx(0.5**0.1)
    assert weight * clock.scale(12.0) == pytest.approx(0.5**0.12), "the past keeps its pace"
    assert weight * clock.scale(14.0) == pytest.approx(0.5**1.12)
    clock.turned_over(0.5, 4000.0)
    assert clock.decay_s == pytest.approx(100.0 / math.log(2)), "never slower than configured"


def test_bad_turnovers() -> None:
    with pytest.raises(ValueError, match="turnovers"):
        VisitClock(1.0, turnovers=0.0)
