"""check_tree must notice each kind of damage, and name the invariant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from elora_connector.core.invariants import check_tree
from elora_connector.core.node import (
    PINS,
    AdapterNode,
    Node,
    Run,
    place_of,
    with_count,
    with_row,
    with_state,
)
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import ChunkKey, Identity, Residency, Tier
from elora_connector.errors import InvariantError

GPU, HOST, REMOTE = Tier


@dataclass
class Scene:
    """adapter (in a GPU slot) -> top (gpu, host) -> leaf (host, remote); other: pinned."""

    tree: DependencyTree
    adapter: AdapterNode
    top: Node
    leaf: Node
    other: Node


@pytest.fixture
def scene() -> Scene:
    tree = DependencyTree(chunk_nbytes=10)
    adapter = tree.adapter(Identity("a", bytes(32)), 0.0, nbytes=100)
    tree.set_ready(adapter, GPU)
    top = tree.add(adapter, ChunkKey(b"t" * 32), 0.0)
    leaf = tree.add(top, ChunkKey(b"l" * 32), 0.0)
    other = tree.add(adapter, ChunkKey(b"o" * 32), 0.0)
    for slot, node in enumerate((top, leaf, other)):
        tree.set_pending(node, HOST, slot=slot)
        tree.set_ready(node, HOST)
    tree.set_ready(top, GPU)
    tree.set_ready(leaf, REMOTE)
    tree.pin(other)
    check_tree(tree, {GPU: 110, HOST: 30, REMOTE: 10})
    return Scene(tree, adapter, top, leaf, other)


def _lose_parent(s: Scene) -> None:
    s.leaf.parent = None


def _wrong_parent(s: Scene) -> None:
    s.leaf.parent = s.other


def _drop_from_children(s: Scene) -> None:
    s.top.disown_all()


def _drop_from_index(s: Scene) -> None:
    del s.tree._index[s.leaf.key]


def _other_adapter(s: Scene) -> None:
    other = s.tree.adapter(Identity("b", bytes(32)), 0.0)
    run = s.leaf.run
    s.leaf.run = Run(other, run.seq, run.nbytes, run.last_use, run.weight)


def _same_number_beside(s: Scene) -> None:
    s.other.run = s.leaf.run


def _same_number_without_the_rule(s: Scene) -> None:
    assert s.leaf.run is s.top.run
    s.tree.dependency_rule = False
    for node in (s.top, s.adapter):  # leaves too, now that nothing depends
        for tier in (GPU, HOST):
            if node.ready(tier) and node.rows[tier] < 0:
                s.tree.leaves[tier].add(node)


def _adapter_without_root(s: Scene) -> None:
    s.adapter.parent = s.top


def _parent_pending(s: Scene) -> None:
    s.top.state = with_state(s.top.state, HOST, Residency.PENDING)


def _chunk_without_slot_adapter(s: Scene) -> None:
    s.adapter.state = with_state(s.adapter.state, GPU, Residency.ABSENT)


def _listed_while_pinned(s: Scene) -> None:
    s.leaf.counts = with_count(s.leaf.counts, PINS, 1)


def _negative_pins(s: Scene) -> None:
    s.leaf.counts = with_count(s.leaf.counts, PINS, -1)


def _lost_leaf(s: Scene) -> None:
    s.tree.leaves[HOST].remove(s.leaf)


def _listed_inner(s: Scene) -> None:
    s.tree.leaves[HOST].add(s.top)


def _listed_pending(s: Scene) -> None:
    s.leaf.state = with_state(s.leaf.state, REMOTE, Residency.PENDING)


def _stale_row(s: Scene) -> None:
    s.leaf.run = s.leaf.run.used(77.0, 0.0)


def _wrong_row(s: Scene) -> None:
    s.leaf.rows = with_row(s.leaf.rows, HOST, 5)


def _wrong_listed(s: Scene) -> None:
    s.other.rows = tuple(row for row in s.other.rows)  # type: ignore[assignment]  # equal, not shared


def _detached_row(s: Scene) -> None:
    s.tree.leaves[HOST].add(Node(ChunkKey(b"x"), s.top, Run(s.adapter, 9, 1, 0.0, 0.0)))


def _wrong_count(s: Scene) -> None:
    s.top.counts = with_count(s.top.counts, HOST, 1)


def _wrong_root_count(s: Scene) -> None:
    s.tree.root.counts = with_count(s.tree.root.counts, GPU, -1)


def _wrong_bytes(s: Scene) -> None:
    s.other.run = s.other.run.resized(11)


def _wrong_pin_total(s: Scene) -> None:
    s.tree._pinned = 0


def _shared_slot(s: Scene) -> None:
    s.other.place = s.leaf.place


def _kept_slot(s: Scene) -> None:
    node = s.tree.add(s.adapter, ChunkKey(b"n" * 32), 0.0)
    s.tree.set_ready(node, REMOTE)
    node.place = place_of(9, 1)


def _leaked(s: Scene) -> None:
    s.tree.add(s.top, ChunkKey(b"n" * 32), 0.0)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_lose_parent, "I1"),
        (_wrong_parent, "I1"),
        (_drop_from_children, "I1"),
        (_drop_from_index, "I1"),
        (_other_adapter, "I1"),
        (_same_number_beside, "I1"),
        (_same_number_without_the_rule, "I1"),
        (_adapter_without_root, "I1"),
        (_parent_pending, "I1"),
        (_chunk_without_slot_adapter, "I1"),
        (_listed_while_pinned, "I2"),
        (_negative_pins, "I2"),
        (_listed_pending, "I2"),
        (_wrong_pin_total, "I2"),
        (_lost_leaf, "I3"),
        (_listed_inner, "I3"),
        (_stale_row, "I3"),
        (_wrong_row, "I3"),
        (_wrong_listed, "I3"),
        (_detached_row, "I3"),
        (_wrong_count, "I3"),
        (_wrong_root_count, "I3"),
        (_wrong_bytes, "I4"),
        (_shared_slot, "I5"),
        (_kept_slot, "I5"),
        (_leaked, "I6"),
    ],
)
def test_damage_is_noticed(scene: Scene, damage: Callable[[Scene], None], name: str) -> None:
    damage(scene)
    with pytest.raises(InvariantError, match=rf"^{name}:"):
        check_tree(scene.tree)


@pytest.mark.parametrize(("tier", "used"), [(GPU, 110), (HOST, 30), (REMOTE, 10)])
def test_budget(scene: Scene, tier: Tier, used: int) -> None:
    with pytest.raises(InvariantError, match=rf"^I4: {tier.name} uses {used}"):
        check_tree(scene.tree, {tier: used - 1})


def test_nodes_print_what_matters(scene: Scene) -> None:
    assert repr(scene.top) == f"<chunk {'74' * 6} gpu=READY host=READY remote=ABSENT pins=0>"
    assert repr(scene.adapter).startswith("<adapter a@000000000000 gpu=READY")
    assert repr(scene.tree.root).startswith("<root ")


def test_core_needs_numpy_alone() -> None:
    program = (
        "import sys\n"
        "from elora_connector.core import invariants, keys, victims\n"
        "found = set(sys.modules) & {'torch', 'vllm', 'redis', 'yaml', 'lmcache'}\n"
        "assert not found, found\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
