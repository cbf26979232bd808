"""Eviction without the dependency rule: stranding, and why Eval alone does not strand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.core.cost_model import CostSettings, EloraPolicy
from elora_connector.core.demand import Demand
from elora_connector.core.host_room import HostRoom
from elora_connector.core.invariants import check_tree
from elora_connector.core.node import AdapterNode, Node, NodeKind
from elora_connector.core.policy import MRU
from elora_connector.core.rates import Rates
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import BASE, ChunkKey, Tier
from elora_connector.core.victims import VictimQueue
from elora_connector.errors import InvariantError
from elora_connector.manager import Manager
from elora_connector.tiers.host import SlotPool

HOST = Tier.HOST


def key(*path: int) -> ChunkKey:
    return ChunkKey(bytes(path).ljust(32, b"\xff"))


def put(tree: DependencyTree, parent: Node, number: int, now: float) -> Node:
    node = tree.add(parent, key(number // 256, number % 256), now)
    tree.set_pending(node, HOST, slot=number)
    tree.set_ready(node, HOST)
    return node


def chain(tree: DependencyTree, length: int) -> tuple[AdapterNode, list[Node]]:
    adapter = tree.adapter(BASE, 0.0)
    nodes: list[Node] = []
    for i in range(length):
        nodes.append(put(tree, nodes[-1] if nodes else adapter, i, 0.0))
    return adapter, nodes


def test_a_gap_strands_what_is_behind_it_until_it_is_filled() -> None:
    tree = DependencyTree(1, dependency_rule=False)
    _, nodes = chain(tree, 4)
    keys = [node.key for node in nodes]
    tree.set_absent(nodes[1], HOST)
    check_tree(tree)
    assert tree.match(keys, HOST) == 1
    assert tree.stranded(HOST) == 2
    assert tree.find(keys[1]) is nodes[1], "it has children, so it stays in the tree"
    tree.set_pending(nodes[1], HOST, slot=99)
    assert tree.match(keys, HOST) == 1
    tree.set_ready(nodes[1], HOST)
    check_tree(tree)
    assert (tree.match(keys, HOST), tree.stranded(HOST)) == (4, 0)


def test_every_ready_node_that_is_not_pinned_is_a_candidate() -> None:
    tree = DependencyTree(1, dependency_rule=False)
    _, nodes = chain(tree, 3)
    tree.pin(nodes[1])
    assert set(tree.leaves[HOST].nodes) == {nodes[0], nodes[2]}
    check_tree(tree)
    queue = VictimQueue(tree, HOST, MRU())
    assert queue.select_count(3, 1.0) == []
    tree.unpin(nodes[1])
    assert sorted(n.seq for n in queue.select_count(3, 1.0)) == [n.seq for n in nodes]


def test_with_the_rule_nothing_is_stranded_and_inner_nodes_stay() -> None:
    tree = DependencyTree(1)
    _, nodes = chain(tree, 3)
    assert tree.leaves[HOST].nodes == [nodes[2]]
    assert tree.stranded(HOST) == 0
    with pytest.raises(InvariantError, match="I1"):
        tree.set_absent(nodes[1], HOST)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.booleans(), st.integers(0, 60)), max_size=40),
    st.integers(0, 400),
)
def test_monotone_statistics_never_strand(steps: list[tuple[int, bool, int]], later: int) -> None:
    """Whole paths are touched, and no newborn outranks its parent: Eval falls along a path."""
    tree = DependencyTree(1 << 20, visit_decay_s=30.0, visit_prior=1.0, dependency_rule=False)
    nodes: list[Node] = [tree.adapter(BASE, 0.0)]
    now = 0.0
    for which, grow, more in steps:
        now += more
        node = nodes[which % len(nodes)]
        tree.touch(path_to(node), now)
        if grow:
            nodes.append(put(tree, node, len(nodes), now))
    policy = EloraPolicy(tree, Rates(), Demand(), CostSettings(token_bytes=4096.0))
    now += later
    victims = VictimQueue(tree, HOST, policy).select_count(len(tree), now)
    assert len(victims) == len(tree)
    for victim in victims:
        tree.set_absent(victim, HOST)
        assert tree.stranded(HOST) == 0
    check_tree(tree)


def path_to(node: Node) -> list[Node]:
    path: list[Node] = []
    here: Node | None = node
    while here is not None and here.adapter is not None:
        path.append(here)
        here = here.parent
    return path[::-1]


def test_statistics_that_do_not_flow_up_do_strand() -> None:
    """The other half of the property: it is the statistics that protect, not luck."""
    tree = DependencyTree(1 << 20, visit_prior=1.0, dependency_rule=False)
    _, nodes = chain(tree, 4)
    tree.touch(nodes[2:], 10.0)
    policy = EloraPolicy(tree, Rates(), Demand(), CostSettings(token_bytes=4096.0))
    queue = VictimQueue(tree, HOST, policy, kind=NodeKind.CHUNK)
    for victim in queue.select_count(2, 10.0):
        tree.set_absent(victim, HOST)
    assert tree.stranded(HOST) == 2


@pytest.mark.parametrize("number", range(6))
def test_stores_and_loads_stay_right_without_the_rule(number: int) -> None:
    """A policy that tears holes; what is surfaced is always a gapless READY prefix."""
    print(f"seed {number}")
    rng = random.Random(number)
    tree = DependencyTree(1, dependency_rule=False)
    manager = Manager(
        tree,
        SlotPool(6),
        HostRoom(tree, VictimQueue(tree, HOST, MRU(), kind=NodeKind.CHUNK), budget=6),
        ranks=1,
        pin_limit=4,
        put_limit=0,
    )
    stranded = 0
    paths = [[key(p, i) for i in range(5)] for p in range(4)]
    running: list[tuple[int, int]] = []
    for step in range(200):
        now = float(step)
        keys = rng.choice(paths)[: rng.randint(1, 5)]
        hit = manager.host_prefix(keys)
        for one in keys[:hit]:
            node = tree.find(one)
            assert node is not None
            assert node.ready(HOST)
        if hit and rng.random() < 0.5:
            job = manager.begin_load("r", BASE, keys[:hit], rng.randrange(hit), now)
            running.append((job.id, len(job.items)))
        else:
            plan = manager.begin_store("r", BASE, keys, now, put_from=None, limit=5)
            if plan.job is not None:
                running.append((plan.job.id, len(plan.job.items)))
        while running and rng.random() < 0.6:
            job_id, items = running.pop(rng.randrange(len(running)))
            manager.finish(job_id, 0, rng.choice([items, items, rng.randint(0, items)]))
        check_tree(tree)
        manager.check()
        stranded = max(stranded, tree.stranded(HOST))
    for job_id, items in running:
        manager.finish(job_id, 0, items)
    manager.check()
    assert tree.pinned == 0
    assert stranded > 0, "the test must have met what it is about"
