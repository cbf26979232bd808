"""`check_tree`: recompute what the tree keeps, from nothing but nodes and parents.

Linear in the tree; for tests, and for a look at a tree in production.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from elora_connector.core.leaves import next_copy
from elora_connector.core.node import (
    NO_SLOT,
    NOT_LISTED,
    PINS,
    TIERS,
    UNLISTED,
    AdapterNode,
    Node,
    NodeKind,
)
from elora_connector.core.tree import DependencyTree, needs_parent, needs_to_stay
from elora_connector.core.types import Residency, Tier
from elora_connector.errors import InvariantError


def check_tree(tree: DependencyTree, budgets: Mapping[Tier, int] | None = None) -> None:
    """Raise unless every invariant visible in the tree holds between two calls.

    Args:
        tree: what to check; not changed.
        budgets: bytes per tier that usage may not pass; tiers not named are not bounded.

    Raises:
        InvariantError: the message starts with the invariant (I1 ... I5).
    """
    nodes: list[Node] = [*tree.adapters, *tree.chunks]
    _check_shape(tree, nodes)
    for node in nodes:
        _check_node(node, tree.dependency_rule)
    _check_children(tree, nodes)
    _check_tables(tree, nodes)
    _check_usage(tree, nodes, budgets or {})
    _check_slots(tree)


def _demand(holds: bool, invariant: str, message: str) -> None:
    if not holds:
        raise InvariantError(f"{invariant}: {message}")


def _check_shape(tree: DependencyTree, nodes: list[Node]) -> None:
    """Indexes, child maps and parent pointers tell one story, and nothing else is reachable."""
    for adapter in tree.adapters:
        _demand(tree.find_adapter(adapter.identity) is adapter, "I1", f"{adapter!r} misfiled")
        _demand(adapter.parent is tree.root, "I1", f"{adapter!r} is not below the root")
        _demand(adapter.adapter is adapter, "I1", f"{adapter!r} is not its own adapter")
    for node in tree.chunks:
        parent = node.parent
        _demand(tree.find(node.key) is node, "I1", f"{node!r} misfiled")
        _demand(
            parent is not None and parent.children.get(node.key) is node,
            "I1",
            f"{node!r} is not a child of its parent {parent!r}",
        )
        _demand(
            parent is not None and parent.adapter is node.adapter,
            "I1",
            f"{node!r} is below another adapter than its parent",
        )
    reached = {below for adapter in tree.adapters for below in tree.descendants(adapter)}
    _demand(reached == set(tree.chunks), "I1", "chunks reachable from adapters are not the index")
    _check_numbers(tree, nodes)


def _check_numbers(tree: DependencyTree, nodes: list[Node]) -> None:
    """Chunks with one creation number are a chain; or two leaves could tie."""
    lowest = {node.seq: node for node in nodes}
    above: set[Node] = set()
    for low in lowest.values():
        node = low.parent
        while node is not None and node.seq == low.seq:
            above.add(node)
            node = node.parent
    _demand(
        len(lowest) + len(above) == len(nodes), "I1", "creation numbers repeat beside each other"
    )
    _demand(tree.dependency_rule or not above, "I1", "creation numbers repeat without the rule")


def _check_node(node: Node, dependency_rule: bool) -> None:
    used = node.pins or node.has_children or any(map(node.resident, TIERS))
    _demand(
        bool(used) or isinstance(node, AdapterNode), "I6", f"{node!r} is unused and was not pruned"
    )
    _demand(node.pins >= 0, "I2", f"{node!r} has a negative pin count")
    parent = node.parent
    for tier in TIERS:
        if dependency_rule and parent is not None and needs_parent(node, tier):
            _demand(
                parent.state[tier] >= node.state[tier],
                "I1",
                f"{node!r} is further in {tier.name} than its parent {parent!r}",
            )


def _check_children(tree: DependencyTree, nodes: list[Node]) -> None:
    rule = tree.dependency_rule
    counts = {node: [0] * len(TIERS) for node in (tree.root, *nodes)}
    for node in nodes:
        if node.parent is None:
            continue
        for tier in TIERS:
            counts[node.parent][tier] += node.resident(tier)
    for node, expected in counts.items():
        _demand(
            node.counts[:PINS] == tuple(expected),
            "I3",
            f"{node!r} counts resident children {node.counts[:PINS]}, has {expected}",
        )
        for tier in TIERS:
            stays = rule and node is not tree.root and needs_to_stay(node, tier)
            orphaned = stays and expected[tier]
            _demand(
                not orphaned or node.resident(tier),
                "I1",
                f"{node!r} is absent from {tier.name} but has resident children there",
            )


def _check_tables(tree: DependencyTree, nodes: list[Node]) -> None:
    known = set(nodes)
    for tier in TIERS:
        for row, node in enumerate(tree.leaves[tier].nodes):
            _demand(node in known, "I3", f"{node!r} left the tree but is listed in {tier.name}")
            _demand(node.rows[tier] == row, "I3", f"{node!r} points to another row than {row}")
            _demand(not node.pins, "I2", f"{node!r} is pinned and listed in {tier.name}")
            _demand(node.ready(tier), "I2", f"{node!r} is not READY and listed in {tier.name}")
        for node in nodes:
            free = node.ready(tier) and not node.pins
            leaf = free and not (tree.dependency_rule and node.counts[tier])
            _demand(
                leaf == (node.rows[tier] != NOT_LISTED),
                "I3",
                f"{node!r} is {'' if leaf else 'no '}leaf of {tier.name}, row {node.rows[tier]}",
            )
    for node in nodes:
        shared = node.rows is UNLISTED or node.rows != UNLISTED
        _demand(shared, "I3", f"{node!r} is in no table and does not say so as others do")
    for tier in TIERS:
        visits = tree.leaves[tier].visits(0.0)
        for row, visited in enumerate(visits.tolist()):
            _check_row(tree, tier, row, visited)


def _check_row(tree: DependencyTree, tier: Tier, row: int, visits: float) -> None:
    table = tree.leaves[tier]
    node = table.nodes[row]
    columns = (
        table.last[row],
        visits,
        table.nbytes[row],
        table.seq[row],
        table.adapter[row],
        table.is_adapter[row],
        table.copy[row],
    )
    facts = (
        node.last_use,
        tree.visits(node, 0.0),
        node.nbytes,
        node.seq,
        node.adapter.index if node.adapter else -1,
        node.kind is NodeKind.ADAPTER,
        next_copy(node, tier),
    )
    _demand(columns == facts, "I3", f"{node!r} is listed in {tier.name} with {columns}: {facts}")


def _check_usage(tree: DependencyTree, nodes: list[Node], budgets: Mapping[Tier, int]) -> None:
    for tier in TIERS:
        for kind in NodeKind:
            sizes = [n.nbytes for n in nodes if n.kind is kind and n.resident(tier)]
            used, count = tree.used_bytes(tier, kind), tree.num_resident(tier, kind)
            _demand(
                (used, count) == (sum(sizes), len(sizes)),
                "I4",
                f"{tier.name} says {used} bytes in {count} {kind.name.lower()} nodes, "
                f"has {sum(sizes)} in {len(sizes)}",
            )
        budget = budgets.get(tier)
        if budget is not None:
            used = tree.used_bytes(tier)
            _demand(used <= budget, "I4", f"{tier.name} uses {used} of {budget} bytes")
    pinned = sum(1 for node in nodes if node.pins)
    _demand(tree.pinned == pinned, "I2", f"{pinned} nodes are pinned, tree says {tree.pinned}")


def _check_slots(tree: DependencyTree) -> None:
    """Two chunks in one host slot would read each other's bytes."""
    for node in tree.chunks:
        _demand(
            node.slot == NO_SLOT or node.state[Tier.HOST] is not Residency.ABSENT,
            "I5",
            f"{node!r} keeps slot {node.slot} although absent from HOST",
        )
    slots = Counter(node.slot for node in tree.chunks if node.slot != NO_SLOT)
    for slot, count in slots.items():
        _demand(count == 1, "I5", f"{count} chunks share host slot {slot}")
