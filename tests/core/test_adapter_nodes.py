"""Adapters as nodes: residency and bytes follow the ledger, scores choose who leaves."""

from __future__ import annotations

import numpy as np
import pytest

from elora_connector.core.adapter_nodes import AdapterNodes, LedgerAdapters, check_nodes
from elora_connector.core.host_room import HostRoom
from elora_connector.core.invariants import check_tree
from elora_connector.core.leaves import FloatArray, LeafTable
from elora_connector.core.ledger import Acks, AdapterLedger, Gate, Loaded
from elora_connector.core.node import AdapterNode, Node, NodeKind
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import ChunkKey, Identity, Residency, Tier
from elora_connector.core.victims import VictimQueue
from elora_connector.errors import InvariantError

GPU, HOST = Tier.GPU, Tier.HOST
ABSENT, PENDING, READY = Residency.ABSENT, Residency.PENDING, Residency.READY
CHUNK = 10


class Worth:
    """Scores by hand: adapters by name, chunks by the last byte of their key."""

    def __init__(self, **adapters: float) -> None:
        self.adapters = adapters

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        return np.array([self._of(node) for node in table.nodes], dtype=np.float64)

    def _of(self, node: Node) -> float:
        if isinstance(node, AdapterNode):
            return self.adapters.get(node.identity.name, 100.0)
        return float(node.key[-1])


def digest(lora_id: int, content: int = 0) -> bytes:
    return bytes([lora_id, content]) * 16


class House:
    """A ledger with its nodes over a tree, and a host budget."""

    def __init__(
        self, slots: int = 1, host: int | None = 3, budget: int = 1000, **worth: float
    ) -> None:
        self.tree = DependencyTree(CHUNK)
        worths = Worth(**worth)
        self.ledger = AdapterLedger(slots, host)
        self.nodes = AdapterNodes(self.tree, worths)
        self.ledger.places.listener = self.ledger.places.chooser = self.nodes
        self.room = HostRoom(
            self.tree, VictimQueue(self.tree, HOST, worths, kind=NodeKind.CHUNK), budget
        )
        self.room.adapters = LedgerAdapters(self.tree, self.ledger, self.nodes)
        self.gone: list[Node] = []
        self.nodes.make_bytes = self.make_bytes
        self.there: dict[int, Loaded] = {}
        self.seq = 0

    def make_bytes(self, nbytes: int, spare: object, now: float) -> list[AdapterNode] | None:
        plan = self.room.for_bytes(nbytes, spare, now)  # type: ignore[arg-type]
        if plan is None:
            return None
        self.gone += plan
        for node in plan:
            if node.kind is NodeKind.CHUNK:
                self.tree.set_absent(node, HOST)
        return [node for node in plan if isinstance(node, AdapterNode)]

    def put(self, lora_id: int, *, slot: bool = False, nbytes: int = 40, content: int = 0) -> None:
        """The workers report this adapter from now on."""
        name = f"a{lora_id}"
        self.there[lora_id] = Loaded(
            lora_id, name, digest(lora_id, content), (1,), slot, nbytes=nbytes
        )
        self.report()

    def report(self, **acks: frozenset[int]) -> None:
        self.ledger.on_report(Acks(self.seq, **acks), 0, self.there)
        self.check()

    def node(self, lora_id: int) -> AdapterNode:
        node = self.nodes.node(lora_id)
        assert node is not None
        return node

    def state(self, lora_id: int) -> tuple[Residency, Residency]:
        node = self.node(lora_id)
        return node.state[GPU], node.state[HOST]

    def want(self, lora_id: int) -> None:
        """A request asks, the weights are read, it asks again."""
        self.ledger.register(lora_id, f"a{lora_id}")
        assert self.ledger.admit(f"r{lora_id}", lora_id, 0.0) is Gate.LOADING
        orders = self.ledger.orders.take_orders()
        self.seq = max([self.seq, *(order.seq for order in orders)])
        if orders and not orders[-1].granted:
            only = frozenset({orders[-1].seq})
            self.report(open=only, read=only)
            self.ledger.admit(f"r{lora_id}", lora_id, 0.0)
        self.check()

    def chunk(self, lora_id: int, worth: int, parent: Node | None = None) -> Node:
        """A READY chunk of an adapter in the host tier."""
        above = parent or self.node(lora_id)
        node = self.tree.add(above, ChunkKey(bytes([lora_id]) * 31 + bytes([worth])), 0.0)
        self.tree.set_pending(node, HOST, slot=lora_id * 1000 + worth, generation=1)
        self.tree.set_ready(node, HOST)
        return node

    def check(self) -> None:
        check_tree(self.tree)
        check_nodes(self.tree, self.ledger, self.nodes)


def test_residency_and_bytes_follow_grant_and_report() -> None:
    house = House(slots=1, host=2)
    house.put(1, slot=True)
    house.put(2, nbytes=25)
    assert (house.state(1), house.state(2)) == ((READY, READY), (ABSENT, READY))
    assert house.tree.used_bytes(HOST, NodeKind.ADAPTER) == 65
    assert house.tree.used_bytes(GPU, NodeKind.ADAPTER) == 40
    house.want(2)
    assert (house.state(1), house.state(2)) == ((ABSENT, READY), (PENDING, READY))
    assert house.tree.used_bytes(GPU, NodeKind.ADAPTER) == 25
    house.put(1)
    house.put(2, slot=True, nbytes=25)
    assert (house.state(1), house.state(2)) == ((ABSENT, READY), (READY, READY))
    assert house.nodes.moved["in", GPU] == 65
    assert house.nodes.moved["out", GPU] == 40


def test_a_withdrawn_grant_leaves_the_tree_as_it_was() -> None:
    house = House(slots=1, host=1)
    house.put(2)
    del house.there[2]
    house.put(1, slot=True)
    house.want(2)
    assert (house.state(1), house.state(2)) == ((ABSENT, ABSENT), (PENDING, PENDING))
    house.ledger.finished("r2", 2)
    house.ledger.cancel(2)
    assert house.state(2) == (ABSENT, ABSENT)
    house.report()
    assert house.state(1) == (READY, READY)


def test_an_unknown_adapter_has_no_node_until_it_is_reported() -> None:
    house = House()
    house.want(1)
    assert list(house.tree.adapters) == []
    house.put(1, slot=True, nbytes=7)
    assert house.node(1).nbytes == 7


def test_other_content_under_an_id_is_another_node_and_kv_of_the_old_one_stays() -> None:
    house = House()
    house.put(1, slot=True)
    old = house.node(1)
    house.chunk(1, worth=5)
    house.put(1, slot=True, content=9, nbytes=50)
    assert house.node(1) is not old
    assert house.node(1).identity == Identity("a1", digest(1, 9))
    assert (old.state[GPU], old.state[HOST], old.children is None) == (ABSENT, ABSENT, False)
    assert house.tree.used_bytes(HOST) == 50 + CHUNK


def test_leaving_a_slot_takes_the_gpu_residency_of_its_chunks() -> None:
    house = House(slots=1, host=2)
    house.put(1, slot=True)
    house.put(2)
    chunk = house.chunk(1, worth=5)
    house.tree.set_ready(chunk, GPU)
    house.want(2)
    assert (chunk.state[GPU], chunk.state[HOST]) == (ABSENT, READY)


def test_dropping_chunks_keeps_the_adapters_where_they_are() -> None:
    house = House(slots=1, host=2)
    house.put(1, slot=True)
    chunk = house.chunk(1, worth=5)
    house.tree.pin(house.node(1))
    house.tree.adapter(Identity("nobody", bytes(32)), 0.0)
    house.tree.drop_chunks()
    house.check()
    assert house.state(1) == (READY, READY)
    assert (chunk.attached, len(house.tree), house.tree.pinned) == (False, 0, 1)
    assert [node.identity.name for node in house.tree.adapters] == ["a1"]
    assert house.tree.used_bytes(HOST) == 40


def test_the_lowest_score_leaves_the_slot_not_the_least_recent() -> None:
    house = House(slots=2, host=3, a1=9.0, a2=1.0, a3=5.0)
    house.put(1, slot=True)
    house.put(2, slot=True)
    house.put(3)
    house.want(3)
    assert (house.state(1)[0], house.state(2)[0]) == (READY, ABSENT)


def test_an_adapter_under_a_copy_of_its_kv_is_nobodys_victim() -> None:
    house = House(slots=1, host=2)
    house.put(1, slot=True)
    house.put(2)
    house.tree.pin(house.node(1))
    house.want(2)
    assert house.state(1)[0] is READY, "its copy is still under way"
    house.tree.unpin(house.node(1))
    assert house.ledger.admit("r2", 2, 0.0) is Gate.LOADING
    assert house.state(1)[0] is ABSENT


@pytest.mark.parametrize(
    ("worth", "chunks_gone", "adapters_gone"),
    [(50.0, [1, 2, 3, 4], []), (2.5, [1, 2], ["a2"]), (0.5, [], ["a2"])],
)
def test_chunk_or_adapter_goes_whichever_scores_lowest(
    worth: float, chunks_gone: list[int], adapters_gone: list[str]
) -> None:
    """40 bytes more: four chunks, or the idle adapter a2, or a mixture by score."""
    house = House(slots=1, host=None, budget=130, a1=60.0, a2=worth, a3=70.0)
    house.put(1, slot=True)
    house.put(2)
    for number in range(1, 6):
        house.chunk(1, worth=number)
    assert house.room.free == 0
    house.want(3)
    chunks = [node.key[-1] for node in house.gone if node.kind is NodeKind.CHUNK]
    names = [node.identity.name for node in house.gone if isinstance(node, AdapterNode)]
    assert (chunks, names) == (chunks_gone, adapters_gone)
    (grant,) = house.ledger.orders.take_grants()
    assert grant.evict == ((2,) if adapters_gone else ())
    assert house.state(2)[1] is (ABSENT if adapters_gone else READY)


def test_a_chunk_takes_an_idle_adapters_memory_but_never_a_slots_worth() -> None:
    house = House(slots=1, host=None, budget=100, a1=2.0, a2=1.0)
    house.put(1, slot=True)
    house.put(2)
    house.chunk(1, worth=50)
    house.chunk(1, worth=51)
    plan = house.room.for_chunks(1, 8, 0.0)
    assert plan == [house.node(2)]
    house.room.adapters.evict([house.node(2)])
    (order,) = house.ledger.orders.take_orders()
    assert (order.lora_id, order.evict) == (None, (2,))
    assert house.state(2) == (ABSENT, ABSENT)
    assert house.room.for_chunks(4, 8, 0.0) == []
    plan = house.room.for_chunks(5, 8, 0.0)
    assert plan is not None
    assert [node.key[-1] for node in plan] == [50]


def test_scores_a_moment_old_never_evict_what_is_needed_by_now() -> None:
    house = House(slots=1, host=None, budget=160, a1=9.0, a2=1.0, a3=2.0)
    house.put(1, slot=True)
    house.put(2)
    house.put(3)
    house.chunk(1, worth=50)
    house.chunk(1, worth=51)
    assert house.room.for_chunks(5, 9, 0.0) == [house.node(2)]
    assert house.room.for_chunks(9, 9, 0.0) == [house.node(2), house.node(3)]
    house.ledger.scheduled("r2", 2)
    assert house.room.for_chunks(5, 9, 0.05) == [house.node(3)]
    house.ledger.scheduled("r3", 3)
    plan = house.room.for_chunks(5, 9, 0.06)
    assert plan == [house.node(1)], "two others are needed, so this one is not among the last"


def test_all_of_the_room_or_nothing() -> None:
    house = House(slots=1, host=None, budget=60)
    house.put(1, slot=True)
    chunk = house.chunk(1, worth=5)
    assert house.room.for_bytes(31, [], 0.0) is None
    assert house.room.for_bytes(20, [], 0.0) == [chunk]
    assert house.room.for_bytes(10, [], 0.0) == []


def test_a_slots_worth_of_adapters_passes_the_budget_rather_than_waits() -> None:
    house = House(slots=2, host=None, budget=50)
    house.put(1, slot=True)
    house.want(2)
    (grant,) = house.ledger.orders.take_grants()
    assert grant.evict == ()
    house.put(2, slot=True)
    assert house.room.free == -30
    house.ledger.finished("r2", 2)
    house.want(3)
    (grant,) = house.ledger.orders.take_grants()
    assert grant.evict == (1,), "one goes for the third, although that leaves too little room"


def test_the_checker_sees_an_adapter_that_is_elsewhere() -> None:
    house = House()
    house.put(1, slot=True)
    house.tree.set_absent(house.node(1), GPU)
    with pytest.raises(InvariantError, match="is not where the ledger has it"):
        house.check()
    house = House()
    house.put(1, slot=True)
    house.tree.resize(house.node(1), 41)
    with pytest.raises(InvariantError, match="has 41 bytes, reported 40"):
        house.check()
