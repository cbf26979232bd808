"""DependencyTree: single rules, and a stateful comparison with a naive model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elora_connector.core.invariants import check_tree
from elora_connector.core.node import NO_SLOT, TIERS, AdapterNode, Node, NodeKind
from elora_connector.core.policy import LRU
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import BASE, ChunkKey, Identity, Residency, Tier
from elora_connector.core.victims import VictimQueue
from elora_connector.errors import InvariantError

GPU, HOST, REMOTE = TIERS
ABSENT, PENDING, READY = Residency


def key_of(*path: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(repr(path).encode()).digest())


def identity_of(number: int) -> Identity:
    return BASE if number == 0 else Identity(f"a{number}", bytes([number]) * 32)


def chain(tree: DependencyTree, adapter: AdapterNode, length: int, now: float = 0.0) -> list[Node]:
    """A run of chunks that are READY in the host tier."""
    nodes: list[Node] = []
    for i in range(length):
        parent = nodes[-1] if nodes else adapter
        node = tree.add(parent, key_of(adapter.index, i), now)
        tree.set_pending(node, HOST, slot=adapter.index * 1000 + i, generation=1)
        nodes.append(node)
    for node in nodes:
        tree.set_ready(node, HOST)
    return nodes


@pytest.fixture
def tree() -> DependencyTree:
    return DependencyTree(chunk_nbytes=10)


@pytest.fixture
def adapter(tree: DependencyTree) -> AdapterNode:
    return tree.adapter(identity_of(1), 0.0)


class TestStructure:
    def test_adapter_is_made_once(self, tree: DependencyTree) -> None:
        assert tree.find_adapter(identity_of(1)) is None
        node = tree.adapter(identity_of(1), 5.0, nbytes=7)
        assert tree.adapter(identity_of(1), 6.0, nbytes=9) is node
        assert (node.nbytes, node.last_use, node.kind) == (7, 5.0, NodeKind.ADAPTER)
        assert tree.find_adapter(identity_of(1)) is node

    def test_same_name_other_content_is_another_adapter(self, tree: DependencyTree) -> None:
        one = tree.adapter(Identity("a", bytes(32)), 0.0)
        other = tree.adapter(Identity("a", b"x" * 32), 0.0)
        assert one is not other
        assert one.index != other.index

    def test_adapter_index_is_not_reused(self, tree: DependencyTree) -> None:
        first = tree.adapter(identity_of(1), 0.0)
        tree.forget_adapter(first)
        assert tree.adapter(identity_of(1), 0.0).index != first.index

    def test_add_is_idempotent(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        node = tree.add(adapter, key_of(1), 0.0)
        assert tree.add(adapter, key_of(1), 9.0) is node
        assert len(tree) == 1

    def test_add_under_another_parent(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        first = tree.add(adapter, key_of(1), 0.0)
        tree.add(first, key_of(2), 0.0)
        other = tree.adapter(identity_of(2), 0.0)
        for parent in (adapter, other):
            with pytest.raises(InvariantError, match="another parent"):
                tree.add(parent, key_of(2), 0.0)

    def test_detached_nodes_are_refused(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        node = chain(tree, adapter, 1)[0]
        tree.set_absent(node, HOST)
        assert not node.attached
        for act in (
            lambda: tree.add(node, key_of(5), 0.0),
            lambda: tree.set_pending(node, HOST),
            lambda: tree.set_ready(node, REMOTE),
            lambda: tree.set_absent(node, HOST),
            lambda: tree.pin(node),
            lambda: tree.resize(node, 3),
        ):
            with pytest.raises(InvariantError, match="not in the tree"):
                act()
        with pytest.raises(InvariantError, match="not in the tree"):
            tree.add(tree.root, key_of(5), 0.0)
        check_tree(tree)

    def test_descendants_are_children_first(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        nodes = chain(tree, adapter, 3)
        fork = tree.add(nodes[0], key_of(77), 0.0)
        tree.set_ready(fork, REMOTE)
        below = tree.descendants(adapter)
        assert set(below) == {*nodes, fork}
        for node in below:
            assert node.parent is not None
            assert node.parent is adapter or below.index(node) < below.index(node.parent)
        for node in below:
            for tier in TIERS:
                if node.attached:
                    tree.set_absent(node, tier)
        assert len(tree) == 0
        check_tree(tree)

    def test_forget_needs_an_unused_adapter(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        nodes = chain(tree, adapter, 1)
        with pytest.raises(InvariantError, match="in use"):
            tree.forget_adapter(adapter)
        tree.set_absent(nodes[0], HOST)
        tree.set_ready(adapter, GPU)
        with pytest.raises(InvariantError, match="in use"):
            tree.forget_adapter(adapter)
        tree.set_absent(adapter, GPU)
        tree.pin(adapter)
        with pytest.raises(InvariantError, match="in use"):
            tree.forget_adapter(adapter)
        tree.unpin(adapter)
        tree.forget_adapter(adapter)
        assert tree.find_adapter(adapter.identity) is None
        assert not adapter.attached


class TestResidency:
    def test_match_counts_ready_from_the_first(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        nodes = chain(tree, adapter, 4)
        keys = [node.key for node in nodes]
        pending = tree.add(nodes[-1], key_of(50), 0.0)
        tree.set_pending(pending, HOST)
        keys += [pending.key, key_of(51)]
        assert tree.match(keys, HOST) == 4
        assert tree.match(keys, GPU) == 0
        assert tree.match([key_of(51), *keys], HOST) == 0
        assert tree.match([], HOST) == 0
        assert tree.nodes(keys) == [*nodes, pending]

    def test_remote_hole_ends_the_match(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        nodes = chain(tree, adapter, 3)
        tree.set_ready(nodes[0], REMOTE)
        tree.set_ready(nodes[2], REMOTE)
        assert tree.match([n.key for n in nodes], REMOTE) == 1
        check_tree(tree)

    @pytest.mark.parametrize("tier", [GPU, HOST])
    def test_child_needs_its_parent(
        self, tree: DependencyTree, adapter: AdapterNode, tier: Tier
    ) -> None:
        tree.set_ready(adapter, GPU)
        parent = tree.add(adapter, key_of(1), 0.0)
        child = tree.add(parent, key_of(1, 1), 0.0)
        with pytest.raises(InvariantError, match="I1"):
            tree.set_pending(child, tier)
        tree.set_pending(parent, tier)
        tree.set_pending(child, tier)
        with pytest.raises(InvariantError, match="I1"):
            tree.set_ready(child, tier)
        with pytest.raises(InvariantError, match="I1"):
            tree.set_absent(parent, tier)
        tree.set_ready(parent, tier)
        tree.set_ready(child, tier)
        check_tree(tree)

    def test_gpu_chunk_needs_its_adapter_in_a_slot(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        chunk = tree.add(adapter, key_of(1), 0.0)
        with pytest.raises(InvariantError, match="I1"):
            tree.set_ready(chunk, GPU)
        tree.set_pending(adapter, GPU)
        with pytest.raises(InvariantError, match="I1"):
            tree.set_ready(chunk, GPU)
        tree.set_ready(adapter, GPU)
        tree.set_ready(chunk, GPU)
        with pytest.raises(InvariantError, match="I1"):
            tree.set_absent(adapter, GPU)
        tree.set_absent(chunk, GPU)
        tree.set_absent(adapter, GPU)
        check_tree(tree)

    def test_base_is_always_there(self, tree: DependencyTree) -> None:
        chunk = tree.add(tree.adapter(BASE, 0.0), key_of(1), 0.0)
        tree.set_ready(chunk, GPU)
        check_tree(tree)

    def test_host_chunk_outlives_its_adapters_weights(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        tree.set_ready(adapter, HOST)
        nodes = chain(tree, adapter, 1)
        assert tree.leaves[HOST].nodes == nodes
        tree.set_absent(adapter, HOST)
        check_tree(tree)
        assert tree.match([nodes[0].key], HOST) == 1

    def test_forbidden_transitions(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        node = tree.add(adapter, key_of(1), 0.0)
        with pytest.raises(InvariantError, match="not prepared"):
            tree.set_ready(node, HOST)
        with pytest.raises(ValueError, match="slot"):
            tree.set_pending(node, REMOTE, slot=3)
        tree.set_pending(node, HOST, slot=3, generation=8)
        with pytest.raises(InvariantError, match="I5"):
            tree.set_pending(node, HOST, slot=4)
        tree.set_ready(node, HOST)
        with pytest.raises(InvariantError, match="I5"):
            tree.set_pending(node, HOST, slot=4)
        assert (node.slot, node.generation) == (3, 8)
        tree.set_ready(node, HOST)
        tree.set_absent(node, GPU)
        check_tree(tree)

    def test_rollback_leaves_the_tree_as_before(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        nodes = chain(tree, adapter, 2)
        first = tree.add(nodes[-1], key_of(60), 1.0)
        tree.set_pending(first, HOST, slot=60)
        second = tree.add(first, key_of(61), 1.0)
        tree.set_pending(second, HOST, slot=61)
        tree.pin(second)
        for node in (second, first):
            tree.set_absent(node, HOST)
        assert first.attached  # the pinned child holds it
        tree.unpin(second)
        assert list(tree.chunks) == nodes
        assert tree.leaves[HOST].nodes == [nodes[-1]]
        assert tree.used_bytes(HOST) == 20
        check_tree(tree)

    def test_usage_by_kind(self, tree: DependencyTree) -> None:
        adapter = tree.adapter(identity_of(1), 0.0, nbytes=500)
        tree.set_pending(adapter, HOST)
        chain(tree, adapter, 3)
        assert tree.used_bytes(HOST) == 530
        assert tree.used_bytes(HOST, NodeKind.ADAPTER) == 500
        assert tree.num_resident(HOST) == 4
        assert tree.num_resident(HOST, NodeKind.CHUNK) == 3
        tree.resize(adapter, 700)
        assert tree.used_bytes(HOST, NodeKind.ADAPTER) == 700
        assert tree.used_bytes(GPU) == 0
        check_tree(tree, {HOST: 730})
        with pytest.raises(InvariantError, match="I4"):
            check_tree(tree, {HOST: 729})

    def test_reset_detaches_what_jobs_hold(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        nodes = chain(tree, adapter, 3)
        tree.pin(nodes[0])
        tree.reset()
        assert (len(tree), tree.pinned, tree.used_bytes(HOST)) == (0, 0, 0)
        assert list(tree.adapters) == []
        assert not nodes[0].attached
        tree.unpin(nodes[0])
        with pytest.raises(InvariantError):
            tree.set_absent(nodes[2], HOST)
        check_tree(tree)
        chain(tree, tree.adapter(identity_of(1), 0.0), 3)
        check_tree(tree)


class TestPinsAndUse:
    def test_pinned_nodes_are_no_candidates(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        leaf = chain(tree, adapter, 2)[-1]
        tree.pin(leaf)
        tree.pin(leaf)
        assert len(tree.leaves[HOST]) == 0
        with pytest.raises(InvariantError, match="I2"):
            tree.set_absent(leaf, HOST)
        tree.unpin(leaf)
        assert len(tree.leaves[HOST]) == 0
        assert tree.pinned == 1
        tree.unpin(leaf)
        assert tree.leaves[HOST].nodes == [leaf]
        assert tree.pinned == 0
        with pytest.raises(InvariantError, match="I2"):
            tree.unpin(leaf)
        check_tree(tree)

    def test_a_pin_keeps_an_absent_node(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        node = tree.add(adapter, key_of(1), 0.0)
        tree.pin(node)
        assert tree.prune(node) == 0
        tree.unpin(node)
        assert len(tree) == 0

    def test_prune_takes_empty_parents(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        first = tree.add(adapter, key_of(1), 0.0)
        second = tree.add(first, key_of(2), 0.0)
        assert tree.prune(first) == 0
        assert tree.prune(second) == 2
        assert adapter.attached
        assert not adapter.children

    def test_touch_reaches_the_tables(self, tree: DependencyTree, adapter: AdapterNode) -> None:
        nodes = chain(tree, adapter, 3)
        tree.touch([adapter, *nodes], 42.0)
        tree.touch([adapter, *nodes[:2]], 43.0)
        assert tree.leaves[HOST].last.tolist() == [42.0]
        assert [tree.visits(node, 43.0) for node in nodes] == [2.0, 2.0, 1.0]
        assert [node.last_use for node in nodes] == [43.0, 43.0, 42.0]
        check_tree(tree)

    def test_what_is_made_and_used_together_is_kept_once(
        self, tree: DependencyTree, adapter: AdapterNode
    ) -> None:
        nodes = chain(tree, adapter, 6)
        assert len({node.run for node in nodes}) == 1
        tree.touch([adapter, *nodes[:4]], 1.0)
        tree.touch([adapter, *nodes], 2.0)
        assert [node.run for node in nodes] == [nodes[0].run] * 4 + [nodes[5].run] * 2
        assert [tree.visits(node, 2.0) for node in nodes] == [2.0] * 4 + [1.0] * 2
        fork = tree.add(nodes[2], key_of(7, 7), 2.0)
        tree.pin(fork)
        assert fork.seq > nodes[5].seq == nodes[0].seq
        check_tree(tree)

    def test_without_the_rule_every_chunk_has_its_own_number(self) -> None:
        tree = DependencyTree(10, dependency_rule=False)
        nodes = chain(tree, tree.adapter(identity_of(1), 0.0), 3)
        assert len({node.seq for node in nodes}) == 3
        check_tree(tree)

    @given(
        st.lists(st.floats(0, 500), min_size=1, max_size=8),
        st.sampled_from([0.5, 10.0, 600.0, math.inf]),
        st.sampled_from([0.0, 1.7e9]),
    )
    def test_decayed_visits(self, gaps: list[float], decay: float, start: float) -> None:
        tree = DependencyTree(visit_decay_s=decay)
        adapter = tree.adapter(identity_of(1), start)
        chunk = chain(tree, adapter, 1, start)[0]
        now, times = start, []
        for gap in gaps:
            now += gap
            times.append(now)
            tree.touch([adapter, chunk], now)
            expected = sum(math.exp(-(now - then) / decay) for then in times)
            for node in (adapter, chunk):
                assert tree.visits(node, now) == pytest.approx(expected, rel=1e-6)
            assert tree.leaves[HOST].visits(now).tolist() == [tree.visits(chunk, now)]
            check_tree(tree)

    def test_rows_that_are_not_touched_follow_a_new_base(self) -> None:
        tree = DependencyTree(visit_decay_s=1.0)
        adapter = tree.adapter(identity_of(1), 0.0)
        other = tree.adapter(identity_of(2), 0.0)
        chunk = chain(tree, adapter, 1)[0]
        tree.touch([adapter, chunk], 60.0)
        tree.touch([other], 65.0)
        assert tree.clock.base == 65.0
        assert tree.visits(chunk, 65.0) == pytest.approx(math.exp(-5.0))
        assert tree.leaves[HOST].visits(65.0).tolist() == [tree.visits(chunk, 65.0)]
        check_tree(tree)

    def test_a_clock_that_goes_back_is_survived(self) -> None:
        tree = DependencyTree(visit_decay_s=1.0)
        adapter = tree.adapter(identity_of(1), 1e9)
        tree.touch([adapter], 1e9)
        tree.touch([adapter], 0.0)
        assert tree.visits(adapter, 0.0) == 2.0


@dataclass
class ModelNode:
    """What the model knows of a node; structure is in its path."""

    nbytes: int
    state: dict[Tier, Residency] = field(default_factory=lambda: dict.fromkeys(TIERS, ABSENT))
    pins: int = 0
    last: float = 0.0
    visits: int = 0


class Model:
    """The same rules, searched for from scratch over paths: (adapter, chunk, chunk ...)."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, ...], ModelNode] = {}

    def children(self, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [p for p in self.nodes if p[:-1] == path]

    def resident_children(self, path: tuple[int, ...], tier: Tier) -> int:
        return sum(self.nodes[p].state[tier] is not ABSENT for p in self.children(path))

    def may_rise(self, path: tuple[int, ...], tier: Tier, state: Residency) -> bool:
        if tier is REMOTE or len(path) == 1:
            return True
        if len(path) == 2 and (tier is HOST or path[0] == 0):
            return True
        return self.nodes[path[:-1]].state[tier] >= state

    def may_leave(self, path: tuple[int, ...], tier: Tier) -> bool:
        node = self.nodes[path]
        if node.state[tier] is ABSENT:
            return True
        if tier is HOST and len(path) > 1 and node.pins and node.state[tier] is READY:
            return False
        tied = tier is not REMOTE and (len(path) > 1 or (tier is GPU and path[0] != 0))
        return not (tied and self.resident_children(path, tier))

    def leaves(self, tier: Tier) -> set[tuple[int, ...]]:
        return {
            path
            for path, node in self.nodes.items()
            if node.state[tier] is READY
            and not node.pins
            and not self.resident_children(path, tier)
        }

    def prune(self) -> None:
        while True:
            unused = [
                path
                for path, node in self.nodes.items()
                if len(path) > 1
                and not node.pins
                and not self.children(path)
                and all(state is ABSENT for state in node.state.values())
            ]
            if not unused:
                return
            for path in unused:
                del self.nodes[path]


TIER = st.sampled_from(TIERS)
PICK = st.integers(0, 10**6)


class TreeMachine(RuleBasedStateMachine):
    """Random calls, legal or not; the tree must agree with the model after each."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = DependencyTree(chunk_nbytes=3)
        self.model = Model()
        self.now = 0.0
        self.slot = 0
        self.queues = [VictimQueue(self.tree, tier, LRU(), k=2) for tier in TIERS]

    def pick(self, number: int) -> tuple[int, ...]:
        paths = sorted(self.model.nodes)
        return paths[number % len(paths)]

    def node(self, path: tuple[int, ...]) -> Node:
        found: Node | None
        if len(path) == 1:
            found = self.tree.find_adapter(identity_of(path[0]))
        else:
            found = self.tree.find(key_of(*path))
        assert found is not None
        return found

    def expect(
        self, legal: bool, act: Callable[..., object], *args: object, **kwargs: object
    ) -> None:
        if legal:
            act(*args, **kwargs)
        else:
            with pytest.raises(InvariantError):
                act(*args, **kwargs)

    @rule(number=st.integers(0, 2), nbytes=st.integers(0, 9))
    def adapter(self, number: int, nbytes: int) -> None:
        self.tree.adapter(identity_of(number), self.now, nbytes=nbytes)
        self.model.nodes.setdefault((number,), ModelNode(nbytes, last=self.now))

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK, label=st.integers(0, 1), tier=TIER)
    def prepare(self, where: int, label: int, tier: Tier) -> None:
        parent = self.pick(where)
        path = (*parent, label)
        node = self.tree.add(self.node(parent), key_of(*path), self.now)
        known = self.model.nodes.setdefault(path, ModelNode(3, last=self.now))
        self.slot += 1
        legal = known.state[tier] is ABSENT and self.model.may_rise(path, tier, PENDING)
        slot = {"slot": self.slot} if tier is HOST else {}
        self.expect(legal, self.tree.set_pending, node, tier, **slot)
        if legal:
            known.state[tier] = PENDING
        self.tree.prune(node)
        self.model.prune()

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK, tier=TIER)
    def publish(self, where: int, tier: Tier) -> None:
        path = self.pick(where)
        known = self.model.nodes[path]
        unprepared = tier is HOST and len(path) > 1 and known.state[tier] is ABSENT
        legal = known.state[tier] is READY or (
            self.model.may_rise(path, tier, READY) and not unprepared
        )
        self.expect(legal, self.tree.set_ready, self.node(path), tier)
        if legal:
            known.state[tier] = READY

    @precondition(lambda self: self.model.nodes)
    @rule(tier=TIER)
    def publish_all(self, tier: Tier) -> None:
        for path in sorted(self.model.nodes):
            known = self.model.nodes[path]
            if known.state[tier] is PENDING and self.model.may_rise(path, tier, READY):
                self.tree.set_ready(self.node(path), tier)
                known.state[tier] = READY

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK, tier=TIER)
    def withdraw(self, where: int, tier: Tier) -> None:
        path = self.pick(where)
        legal = self.model.may_leave(path, tier)
        self.expect(legal, self.tree.set_absent, self.node(path), tier)
        if legal:
            self.model.nodes[path].state[tier] = ABSENT
            self.model.prune()

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK)
    def pin(self, where: int) -> None:
        path = self.pick(where)
        self.tree.pin(self.node(path))
        self.model.nodes[path].pins += 1

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK)
    def unpin(self, where: int) -> None:
        path = self.pick(where)
        known = self.model.nodes[path]
        self.expect(known.pins > 0, self.tree.unpin, self.node(path))
        known.pins = max(0, known.pins - 1)
        self.model.prune()

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK, step=st.sampled_from([0.0, 0.01, 1.0]))
    def touch(self, where: int, step: float) -> None:
        self.now += step
        path = self.pick(where)
        prefixes = [path[: i + 1] for i in range(len(path))]
        self.tree.touch([self.node(p) for p in prefixes], self.now)
        for prefix in prefixes:
            self.model.nodes[prefix].last = self.now
            self.model.nodes[prefix].visits += 1

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK, nbytes=st.integers(0, 9))
    def resize(self, where: int, nbytes: int) -> None:
        path = self.pick(where)
        self.tree.resize(self.node(path), nbytes)
        self.model.nodes[path].nbytes = nbytes

    @precondition(lambda self: self.model.nodes)
    @rule(where=PICK)
    def forget(self, where: int) -> None:
        path = self.pick(where)[:1]
        known = self.model.nodes[path]
        unused = all(state is ABSENT for state in known.state.values())
        legal = unused and not known.pins and not self.model.children(path)
        self.expect(legal, self.tree.forget_adapter, self.node(path))
        if legal:
            del self.model.nodes[path]

    @rule(tier=TIER, count=st.integers(1, 4), step=st.sampled_from([0.0, 0.2]))
    def evict(self, tier: Tier, count: int, step: float) -> None:
        self.now += step
        victims = self.queues[tier].select_count(count, self.now)
        assert len(victims) in (0, count)
        paths = {self.node(path): path for path in self.model.nodes}
        for victim in victims:
            path = paths[victim]
            assert path in self.model.leaves(tier)
            self.tree.set_absent(victim, tier)
            self.model.nodes[path].state[tier] = ABSENT
            self.model.prune()

    @precondition(lambda self: len(self.model.nodes) > 6)
    @rule()
    def reset(self) -> None:
        self.tree.reset()
        self.model.nodes.clear()

    @invariant()
    def tree_is_sound(self) -> None:
        check_tree(self.tree)

    @invariant()
    def tree_is_the_model(self) -> None:
        nodes = self.model.nodes
        assert len(self.tree) == sum(len(path) > 1 for path in nodes)
        assert sum(1 for _ in self.tree.adapters) == sum(len(path) == 1 for path in nodes)
        assert self.tree.pinned == sum(known.pins > 0 for known in nodes.values())
        for path, known in nodes.items():
            node = self.node(path)
            facts = (node.state, node.pins, node.nbytes, node.last_use, node.weight)
            expected = (tuple(known.state[t] for t in TIERS), known.pins, known.nbytes)
            assert facts == (*expected, known.last, known.visits)
            assert (node.slot != NO_SLOT) == (len(path) > 1 and known.state[HOST] is not ABSENT)
        for tier in TIERS:
            listed = {self.node(path) for path in self.model.leaves(tier)}
            assert set(self.tree.leaves[tier].nodes) == listed
            used = [n.nbytes for n in nodes.values() if n.state[tier] is not ABSENT]
            assert self.tree.used_bytes(tier) == sum(used)

    @invariant()
    def match_is_the_model(self) -> None:
        for path in self.model.nodes:
            keys = [key_of(*path[: i + 1]) for i in range(1, len(path))]
            for tier in TIERS:
                ready = [self.model.nodes[path[: i + 1]].state[tier] for i in range(1, len(path))]
                expected = next((i for i, s in enumerate(ready) if s is not READY), len(ready))
                assert self.tree.match(keys, tier) == expected


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=80, stateful_step_count=40)
