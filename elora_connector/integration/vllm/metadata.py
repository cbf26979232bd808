"""What travels between the scheduler side and the workers, once a step each way.

Both directions are plain data.  A job is described once and by value, so that a
worker needs no state of the scheduler's to carry it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from elora_connector.core.adapter_orders import Grant
from elora_connector.core.rates import Move
from elora_connector.core.types import ChunkKey, Identity
from elora_connector.integration.vllm.adapter_messages import AdapterOrder, AdapterReport
from elora_connector.tiers.host import SlotRef
from elora_connector.transfer.base import ChunkCopy


@dataclass(frozen=True, slots=True)
class RemoteChunk:
    """Everything about a remote value that does not depend on the rank."""

    namespace: bytes
    identity: Identity
    chunk: ChunkKey
    parent: bytes


@dataclass(frozen=True, slots=True)
class StoreItem:
    """GPU blocks -> host slot; with `remote`, then host slot -> remote tier."""

    ref: SlotRef
    copy: ChunkCopy
    remote: RemoteChunk | None


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """`lora_id`, `load`: the weights these blocks were computed with, rank by rank.

    A worker whose loaded weights are of another load refuses the whole job: then the
    blocks may be a mixture.
    """

    job_id: int
    items: tuple[StoreItem, ...]
    lora_id: int | None
    load: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Host slots -> GPU blocks of one request."""

    job_id: int
    request_id: str
    copies: tuple[ChunkCopy, ...]
    ordered: bool
    """The step's forward waits for it; else it runs beside the forward and is reported."""


@dataclass(frozen=True, slots=True)
class PrefetchOrder:
    """Host slots -> GPU blocks that no request has; whole chunks."""

    job_id: int
    copies: tuple[ChunkCopy, ...]


@dataclass(frozen=True, slots=True)
class FetchItem:
    ref: SlotRef
    remote: RemoteChunk


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Remote values -> host slots, root first."""

    job_id: int
    items: tuple[FetchItem, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Orders of one step.

    `rpcs` is the scheduler's count of out-of-step adapter calls; workers echo it, which
    tells the scheduler whether a report was made before or after such a call.
    `idle`: no forward in this step.  `drain`: finish all stores and prefetches first.
    `number` rises with every step; workers echo it.
    `grants`: places for orders sent before.  `cancelled`: numbers of orders to forget.
    `protected`: adapters that no worker may evict on its own account.
    """

    number: int = 0
    rpcs: int = 0
    idle: bool = True
    drain: bool = False
    orders: tuple[AdapterOrder, ...] = ()
    grants: tuple[Grant, ...] = ()
    cancelled: tuple[int, ...] = ()
    protected: frozenset[int] = frozenset()
    stores: list[StoreOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    prefetches: list[PrefetchOrder] = field(default_factory=list)


@dataclass
class RankReport:
    """What one rank finished since its last report.

    `stores`, `fetches`, `loads`, `prefetches`: (job id, number of leading good items).
    `puts`: (slot use, written).  `step`: number of the step it was made after.
    `moves`: (direction, bytes, seconds) of single copies and remote values.
    """

    rpcs: int = 0
    step: int = 0
    stores: list[tuple[int, int]] = field(default_factory=list)
    fetches: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    prefetches: list[tuple[int, int]] = field(default_factory=list)
    puts: list[tuple[SlotRef, bool]] = field(default_factory=list)
    moves: list[tuple[Move, int, float]] = field(default_factory=list)
    adapters: AdapterReport | None = None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Reports of one step by rank; vLLM folds the ranks' objects into one."""

    ranks: dict[int, RankReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        return WorkerReport({**self.ranks, **other.ranks})
