"""Adapters in one pool with KV, as S-LoRA and the paper's ELORA have them.

vLLM allocates adapter slots statically, so the connector cannot do this; the tree, the
cost model and the victim queue are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from elora_connector.assembly import Scoring
from elora_connector.core.ledger import Gate
from elora_connector.core.node import AdapterNode, NodeKind
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Identity, Tier
from elora_connector.errors import InvariantError
from elora_connector.simulator.adapter_areas import nothing
from elora_connector.simulator.engine_model import EngineModel
from elora_connector.simulator.gpu import GpuArea
from elora_connector.simulator.live import Live
from elora_connector.simulator.wires import Wire


class PoolArea:
    """An `AdapterArea` without slots.  All weights stay in host memory.

    Args:
        adapters: all of the trace; their weights count against the host tier's budget.
        held_share: part of the pool that adapters of waiting requests may hold.
    """

    def __init__(
        self,
        tree: DependencyTree,
        area: GpuArea,
        machine: EngineModel,
        link: Wire,
        scoring: Scoring,
        adapters: Mapping[int, Identity],
        *,
        held_share: float = 0.5,
    ) -> None:
        self.loads = 0
        self.stall_s = 0.0
        self.wake: Callable[[], None] = nothing
        self._tree = tree
        self._area = area
        self._machine = machine
        self._link = link
        self._scoring = scoring
        self._held_share = held_share
        self._waiting: dict[int, AdapterNode] = {}
        """Requests that hold an adapter and are not admitted yet, by their order."""
        self._waiting_bytes = 0
        self._running: dict[int, AdapterNode] = {}
        for identity in adapters.values():
            node = tree.adapter(identity, 0.0, machine.rank_adapter_bytes)
            tree.keep(node)
            tree.set_ready(node, Tier.HOST)

    def arrived(self, live: Live, now: float) -> None:
        return

    def ask(self, live: Live, now: float) -> Gate:
        node = self._node(live, now)
        if node.ready(Tier.GPU):
            return Gate.READY if self._hold(live, node) else Gate.NO_SLOT
        if node.resident(Tier.GPU):
            return Gate.LOADING
        if not self._may_hold(node) or not self._area.make_room(node.nbytes, now, for_adapter=True):
            return Gate.NO_SLOT
        self._tree.set_pending(node, Tier.GPU)
        self._hold(live, node)
        extra = self._machine.adapter_overhead_s
        self._link.send(node.nbytes, partial(self._arrived, node), extra_s=extra)
        return Gate.LOADING

    def admitted(self, live: Live, now: float) -> None:
        node = self._waiting.pop(live.order, None)
        if node is not None:
            self._waiting_bytes -= node.nbytes
            self._running[live.order] = node
        self._tree.touch((self._running[live.order],), now)

    def finished(self, live: Live, now: float) -> None:
        node = self._waiting.pop(live.order, None)
        if node is not None:
            self._waiting_bytes -= node.nbytes
        else:
            node = self._running.pop(live.order)
        self._area.drop((node,))

    def ship(self, now: float) -> bool:
        return False

    def on_gpu(self, identity: Identity) -> bool:
        node = self._tree.find_adapter(identity)
        return node is not None and node.ready(Tier.GPU)

    def count(self) -> int:
        return self._tree.num_resident(Tier.GPU, NodeKind.ADAPTER)

    def held(self) -> list[AdapterNode]:
        """One entry for every request that needs its adapter in the pool."""
        return [*self._waiting.values(), *self._running.values()]

    def check(self) -> None:
        if self._waiting_bytes != sum(node.nbytes for node in self._waiting.values()):
            raise InvariantError("I4: bytes held by waiting requests do not add up")

    def _node(self, live: Live, now: float) -> AdapterNode:
        return self._tree.adapter(live.identity, now)

    def _may_hold(self, node: AdapterNode) -> bool:
        """Waiting requests must not take the room that admitted ones need to go on."""
        limit = self._held_share * self._area.capacity
        return not self._waiting or self._waiting_bytes + node.nbytes <= limit

    def _hold(self, live: Live, node: AdapterNode) -> bool:
        if live.order in self._waiting or live.order in self._running:
            return True
        if not self._may_hold(node):
            return False
        self._waiting[live.order] = node
        self._waiting_bytes += node.nbytes
        self._area.hold((node,))
        return True

    def _arrived(self, node: AdapterNode, now: float, seconds: float) -> None:
        self.loads += 1
        self._tree.set_ready(node, Tier.GPU)
        self._scoring.rates.adapter_activation.add(node.identity.name, seconds)
        self.wake()
