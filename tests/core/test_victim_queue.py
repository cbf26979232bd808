"""VictimQueue against the plain greedy search, and its promises one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.core.invariants import check_tree
from elora_connector.core.leaves import FloatArray, LeafTable
from elora_connector.core.node import AdapterNode, Node, NodeKind
from elora_connector.core.policy import FIFO, LFU, LRU, MRU, EvictionPolicy
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import ChunkKey, Identity, Tier
from elora_connector.core.victims import VictimQueue

HOST = Tier.HOST


class Scattered:
    """No order that follows the tree, ties, and some nodes that may never go."""

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        scores = (table.seq * 7 % 5).astype(np.float64)
        scores[table.seq % 11 == 3] = np.inf
        scores[table.seq % 13 == 4] = np.nan
        return scores


POLICIES: list[EvictionPolicy] = [LRU(), MRU(), FIFO(), LFU(), Scattered()]


@dataclass(frozen=True)
class Shape:
    """A tree to draw: parents by index, who is touched when, sizes and pins."""

    parents: list[int]
    touches: list[tuple[int, int]]
    sizes: list[int]
    pins: set[int]


SHAPES = st.builds(
    Shape,
    parents=st.lists(st.integers(0, 10**6), max_size=30),
    touches=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3)), max_size=20),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    pins=st.sets(st.integers(0, 30), max_size=3),
)


def build(shape: Shape) -> tuple[DependencyTree, float]:
    """All nodes READY in the host tier, adapters too; returns the tree and the last time."""
    tree = DependencyTree()
    nodes: list[Node] = [tree.adapter(Identity(f"a{i}", bytes([i]) * 32), 0.0) for i in range(3)]
    for adapter in nodes:
        tree.resize(adapter, 4)
        tree.set_ready(adapter, HOST)
    for i, parent in enumerate(shape.parents):
        size = shape.sizes[i % len(shape.sizes)]
        node = tree.add(nodes[parent % len(nodes)], ChunkKey(b"%032d" % i), 0.0, nbytes=size)
        tree.set_pending(node, HOST, slot=i)
        tree.set_ready(node, HOST)
        nodes.append(node)
    now = 0.0
    for which, step in shape.touches:
        now += step
        tree.touch(path_to(nodes[which % len(nodes)]), now)
    for pin in shape.pins:
        if pin < len(nodes):
            tree.pin(nodes[pin])
    return tree, now


def path_to(node: Node) -> list[Node]:
    path: list[Node] = []
    here: Node | None = node
    while here is not None and here.adapter is not None:
        path.append(here)
        here = here.parent
    return path[::-1]


def score_one(policy: EvictionPolicy, tree: DependencyTree, node: Node, now: float) -> float:
    table = LeafTable(HOST, tree.clock)
    table.fill([node])
    return float(policy.scores(table, now)[0])


def greedy(
    tree: DependencyTree,
    policy: EvictionPolicy,
    need: int,
    weigh: Callable[[Node], int],
    now: float,
    exclude: frozenset[Node] = frozenset(),
    kind: NodeKind | None = None,
) -> list[Node]:
    """The oracle: look at every node for every victim."""
    nodes = [*tree.adapters, *tree.chunks]
    scores = {node: score_one(policy, tree, node, now) for node in nodes}
    chosen: list[Node] = []
    while sum(map(weigh, chosen)) < need:
        leaves = [
            node
            for node in nodes
            if node.ready(HOST)
            and not node.pins
            and node not in chosen
            and node not in exclude
            and kind in (None, node.kind)
            and scores[node] < math.inf
            and all(c in chosen or not c.resident(HOST) for c in node.children.values())
        ]
        if not leaves:
            return []
        chosen.append(min(leaves, key=lambda node: (scores[node], node.seq)))
    return chosen


def weight_of(unit: str) -> Callable[[Node], int]:
    return (lambda node: 1) if unit == "count" else (lambda node: node.nbytes)


def select(
    queue: VictimQueue, unit: str, need: int, now: float, exclude: frozenset[Node] = frozenset()
) -> list[Node]:
    act = queue.select_count if unit == "count" else queue.select_bytes
    return act(need, now, exclude=exclude)


UNIT = st.sampled_from(["count", "bytes"])
POLICY = st.sampled_from(POLICIES)
K = st.sampled_from([1, 2, 5, 1024])
KIND = st.sampled_from([None, *NodeKind])


@given(SHAPES, POLICY, K, UNIT, st.integers(1, 40), KIND, st.sets(st.integers(0, 32), max_size=3))
def test_fresh_queue_is_the_greedy_search(
    shape: Shape,
    policy: EvictionPolicy,
    k: int,
    unit: str,
    need: int,
    kind: NodeKind | None,
    excluded: set[int],
) -> None:
    tree, now = build(shape)
    exclude = frozenset(n for n in (*tree.adapters, *tree.chunks) if n.seq in excluded)
    queue = VictimQueue(tree, HOST, policy, k=k, kind=kind)
    expected = greedy(tree, policy, need, weight_of(unit), now, exclude, kind)
    assert select(queue, unit, need, now, exclude) == expected
    check_tree(tree)


@given(SHAPES, POLICY, K, UNIT, st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12))
def test_evicting_bit_by_bit_is_the_greedy_search(
    shape: Shape, policy: EvictionPolicy, k: int, unit: str, rounds: list[tuple[int, bool]]
) -> None:
    """No scores are older than the facts here, so age must not show; nor a dropped selection."""
    tree, now = build(shape)
    queue = VictimQueue(tree, HOST, policy, k=k, max_age=math.inf)
    for need, evict in rounds:
        expected = greedy(tree, policy, need, weight_of(unit), now)
        victims = select(queue, unit, need, now)
        assert victims == expected
        if evict:
            for victim in victims:
                tree.set_absent(victim, HOST)
            check_tree(tree)


@given(
    SHAPES,
    POLICY,
    K,
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 10**6), st.integers(1, 5)), max_size=25),
)
def test_stale_queue_gives_valid_orders_and_all_there_is(
    shape: Shape, policy: EvictionPolicy, k: int, steps: list[tuple[int, int, int]]
) -> None:
    """Whatever happens in between: what is given is evictable in order, and [] is honest."""
    tree, now = build(shape)
    queue = VictimQueue(tree, HOST, policy, k=k, max_age=1.5)
    for action, which, count in steps:
        now += 0.25
        nodes = [*tree.adapters, *tree.chunks]
        node = nodes[which % len(nodes)]
        if action == 0:
            tree.touch(path_to(node), now)
        elif action == 1 and not node.pins:
            tree.pin(node)
        elif action == 2 and node.pins:
            tree.unpin(node)
        elif action == 3 and node.ready(HOST):
            child = tree.add(node, ChunkKey(b"n%031d" % round(now * 4)), now, nbytes=1)
            tree.set_pending(child, HOST, slot=10**6 + round(now * 4))
            if which % 2:
                tree.set_ready(child, HOST)
        else:
            victims = queue.select_count(count, now)
            available = greedy(tree, policy, count, weight_of("count"), now)
            assert len(victims) == len(available)
            if action > 4:
                for victim in victims:
                    assert victim.rows[HOST] >= 0
                    tree.set_absent(victim, HOST)
        check_tree(tree)


def flat(count: int, nbytes: int = 10) -> tuple[DependencyTree, AdapterNode, list[Node]]:
    """`count` unrelated chunks in the host tier, last used at 0, 1, 2 ..."""
    tree = DependencyTree(chunk_nbytes=nbytes)
    adapter = tree.adapter(Identity("a", bytes(32)), 0.0)
    nodes = []
    for i in range(count):
        node = tree.add(adapter, ChunkKey(b"%032d" % i), float(i))
        tree.set_pending(node, HOST, slot=i)
        tree.set_ready(node, HOST)
        nodes.append(node)
    return tree, adapter, nodes


def test_all_or_nothing() -> None:
    tree, _, nodes = flat(4)
    queue = VictimQueue(tree, HOST, LRU())
    assert queue.select_bytes(41, 9.0) == []
    assert queue.select_count(5, 9.0) == []
    assert queue.select_bytes(40, 9.0) == nodes
    assert queue.select_bytes(31, 9.0) == nodes
    assert queue.select_bytes(30, 9.0) == nodes[:3]
    tree.pin(nodes[3])
    assert queue.select_bytes(31, 9.0) == []
    assert len(tree.leaves[HOST]) == 3


@pytest.mark.parametrize("need", [0, -1])
def test_nothing_needed_is_nothing_chosen(need: int) -> None:
    tree, _, _ = flat(2)
    queue = VictimQueue(tree, HOST, LRU())
    assert queue.select_bytes(need, 0.0) == queue.select_count(need, 0.0) == []
    assert queue.refreshes == 0


def test_scored_only_when_used_up_or_old() -> None:
    tree, _, nodes = flat(100)
    queue = VictimQueue(tree, HOST, LRU(), k=10, max_age=0.1)
    for node in nodes[:10]:
        assert queue.select_count(1, 200.0) == [node]
        tree.set_absent(node, HOST)
    assert queue.refreshes == 1
    assert queue.select_count(1, 200.0) == [nodes[10]]
    assert queue.refreshes == 2
    assert queue.select_count(1, 200.09) == [nodes[10]]
    assert queue.refreshes == 2
    assert queue.select_count(1, 200.2) == [nodes[10]]
    assert queue.refreshes == 3
    assert queue.select_count(1, 100.0) == [nodes[10]]  # a clock that went back
    assert queue.refreshes == 4


def test_a_touched_victim_is_spared() -> None:
    tree, adapter, nodes = flat(5)
    queue = VictimQueue(tree, HOST, LRU(), max_age=10.0)
    assert queue.select_count(1, 6.0) == [nodes[0]]
    tree.touch([adapter, nodes[0]], 6.0)
    assert queue.select_count(1, 6.0) == [nodes[1]]
    assert queue.select_count(5, 6.0) == [*nodes[1:], nodes[0]]


def test_a_touched_parent_is_found_again() -> None:
    tree, adapter, nodes = flat(1)
    child = tree.add(nodes[0], ChunkKey(b"c" * 32), 1.0)
    tree.set_pending(child, HOST, slot=99)
    tree.set_ready(child, HOST)
    queue = VictimQueue(tree, HOST, LRU(), max_age=10.0)
    assert queue.select_count(2, 2.0) == [child, nodes[0]]
    tree.touch([adapter, nodes[0]], 2.0)
    assert queue.select_count(2, 2.0) == [child, nodes[0]]
    assert queue.refreshes == 1


@pytest.mark.parametrize("k", [1, 1024])
def test_a_long_run_ties_and_goes_from_its_end(k: int) -> None:
    """Longer than what is scored ahead at once, chosen several times without an eviction."""
    tree, _, (first,) = flat(1)
    nodes = [first]
    for i in range(100):
        nodes.append(tree.add(nodes[-1], ChunkKey(b"%032d" % (1000 + i)), 1.0))
        tree.set_pending(nodes[-1], HOST, slot=1000 + i)
        tree.set_ready(nodes[-1], HOST)
    assert len({node.run for node in nodes[1:]}) == 1
    queue = VictimQueue(tree, HOST, MRU(), k=k, max_age=10.0)
    for count in (1, 40, 60, 80, 100):
        assert queue.select_count(count, 2.0) == nodes[: -count - 1 : -1]
    for node in reversed(nodes[60:]):
        tree.set_absent(node, HOST)
    assert queue.select_count(60, 2.0) == nodes[59::-1]
    check_tree(tree)


def test_pending_children_hold_their_parent() -> None:
    tree, _, nodes = flat(2)
    child = tree.add(nodes[0], ChunkKey(b"c" * 32), 1.0)
    tree.set_pending(child, HOST, slot=99)
    queue = VictimQueue(tree, HOST, LRU())
    assert queue.select_count(1, 2.0) == [nodes[1]]
    assert queue.select_count(2, 2.0) == []


def two_chains() -> tuple[DependencyTree, AdapterNode, list[Node]]:
    """Two parents with one child each; the nodes in the order in which they go."""
    tree = DependencyTree(chunk_nbytes=1)
    adapter = tree.adapter(Identity("a", bytes(32)), 0.0)
    nodes: list[Node] = []
    for i, (above, last) in enumerate([(None, 2.0), (None, 3.0), (0, 0.0), (1, 1.0)]):
        parent = adapter if above is None else nodes[above]
        nodes.append(tree.add(parent, ChunkKey(b"%032d" % i), last))
        tree.set_pending(nodes[i], HOST, slot=i)
        tree.set_ready(nodes[i], HOST)
    return tree, adapter, [nodes[2], nodes[3], nodes[0], nodes[1]]


def test_a_parent_touched_below_another_in_the_heap_is_found_again() -> None:
    tree, adapter, order = two_chains()
    queue = VictimQueue(tree, HOST, LRU(), max_age=math.inf)
    assert queue.select_count(4, 4.0) == order
    tree.set_absent(order[0], HOST)
    tree.touch([adapter, order[3]], 5.0)
    assert queue.select_count(3, 5.0) == order[1:]
    assert queue.refreshes == 1


def test_a_parent_left_in_the_heap_is_chosen_once() -> None:
    tree, adapter, order = two_chains()
    pinned = tree.add(adapter, ChunkKey(b"p" * 32), 0.0)
    tree.set_pending(pinned, HOST, slot=9)
    tree.pin(pinned)
    queue = VictimQueue(tree, HOST, LRU(), max_age=math.inf)
    assert queue.select_count(4, 4.0) == order
    tree.set_absent(order[0], HOST)
    assert queue.select_count(4, 4.0) == []
    assert queue.select_count(3, 4.0) == order[1:]


def test_a_resized_node_is_scored_again() -> None:
    class SmallFirst:
        def scores(self, table: LeafTable, now: float) -> FloatArray:
            return table.nbytes.astype(np.float64)

    tree, _, nodes = flat(3)
    for size, node in enumerate(nodes, start=1):
        tree.resize(node, size)
    queue = VictimQueue(tree, HOST, SmallFirst(), max_age=math.inf)
    assert queue.select_count(1, 0.0) == [nodes[0]]
    tree.resize(nodes[0], 9)
    assert queue.select_count(1, 0.0) == [nodes[1]]
    assert queue.select_count(3, 0.0) == [nodes[1], nodes[2], nodes[0]]


def test_leaves_cut_off_by_k_come_before_a_warmer_parent() -> None:
    tree, _, nodes = flat(3)
    child = tree.add(nodes[2], ChunkKey(b"c" * 32), -1.0)
    tree.set_pending(child, HOST, slot=99)
    tree.set_ready(child, HOST)
    queue = VictimQueue(tree, HOST, LRU(), k=1)
    assert queue.select_bytes(40, 9.0) == [child, *nodes]


def test_parents_in_the_heap_do_not_outlive_a_reset() -> None:
    tree, _, nodes = flat(1)
    child = tree.add(nodes[0], ChunkKey(b"c" * 32), 1.0)
    tree.set_pending(child, HOST, slot=99)
    tree.set_ready(child, HOST)
    queue = VictimQueue(tree, HOST, LRU(), max_age=math.inf)
    tree.set_absent(queue.select_count(2, 2.0)[0], HOST)
    tree.reset()
    again = tree.add(tree.adapter(Identity("b", bytes(32)), 2.0), ChunkKey(b"d" * 32), 2.0)
    tree.set_pending(again, HOST, slot=1)
    tree.set_ready(again, HOST)
    assert queue.select_count(1, 2.0) == [again]


def test_reset_empties_the_queue() -> None:
    tree, _, nodes = flat(3)
    child = tree.add(nodes[0], ChunkKey(b"c" * 32), 1.0)
    tree.set_pending(child, HOST, slot=99)
    tree.set_ready(child, HOST)
    queue = VictimQueue(tree, HOST, LRU(), max_age=math.inf)
    assert len(queue.select_count(4, 2.0)) == 4
    tree.reset()
    again = tree.add(tree.adapter(Identity("b", bytes(32)), 2.0), ChunkKey(b"d" * 32), 2.0)
    tree.set_pending(again, HOST, slot=1)
    tree.set_ready(again, HOST)
    assert queue.select_count(1, 2.0) == [again]


def test_ties_at_the_border_go_to_the_oldest() -> None:
    tree, adapter, nodes = flat(50)
    tree.touch([adapter, *nodes], 60.0)
    queue = VictimQueue(tree, HOST, LRU(), k=3)
    assert queue.select_count(3, 61.0) == nodes[:3]


def test_bad_k() -> None:
    with pytest.raises(ValueError, match="k must be positive"):
        VictimQueue(DependencyTree(), HOST, LRU(), k=0)
