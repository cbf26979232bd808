"""Conservation: no byte, block or token is lost or made, and the core's invariants hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from elora_connector.core.invariants import check_tree
from elora_connector.core.node import Node
from elora_connector.core.types import Tier
from elora_connector.errors import InvariantError
from elora_connector.simulator.build import Parts
from elora_connector.simulator.live import Live
from elora_connector.simulator.pool_area import PoolArea


def audit(parts: Parts, admitted: Iterable[Live]) -> None:
    """Recount everything from the requests; for tests, linear in the tree.

    Args:
        admitted: requests that have GPU blocks.

    Raises:
        InvariantError: what does not add up.
    """
    check_tree(parts.tree)
    if parts.manager is not None:
        parts.manager.check()
    held: Counter[Node] = Counter()
    private = 0
    for live in admitted:
        _check_live(live, parts)
        held.update(live.nodes)
        private += parts.kv.private_bytes(live)
    for nodes in parts.kv.stores.values():
        held.update(nodes)
    if isinstance(parts.adapters, PoolArea):
        held.update(parts.adapters.held())
    parts.area.check(private, dict(held))
    if parts.adapters is not None:
        parts.adapters.check()
    for wire in (parts.to_gpu, parts.to_host):
        if wire.asked != wire.moved + wire.under_way:
            raise InvariantError(f"{wire.asked} bytes asked for, {wire.moved} moved")


def _check_live(live: Live, parts: Parts) -> None:
    rules = parts.kv.rules
    if live.computed > live.known_tokens:
        raise InvariantError(f"request {live.id} computed tokens that are not known yet")
    if live.computed > live.blocks * rules.block_tokens:
        raise InvariantError(f"request {live.id} has {live.computed} tokens in too few blocks")
    keys = [node.key for node in live.nodes]
    if keys != live.keys[: len(keys)]:
        raise InvariantError(f"request {live.id} holds chunks of another prefix")
    if not all(node.ready(Tier.GPU) for node in live.nodes):
        raise InvariantError(f"I1: a chunk of request {live.id} left under it")
