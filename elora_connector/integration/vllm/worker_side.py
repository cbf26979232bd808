"""Worker side of the connector: moves bytes and adapters exactly as ordered.

One per rank.  Every method runs on vLLM's model thread, in this order within a step:
`begin_step`, (vLLM activates adapters), `load_now` before the forward or after it,
`store` after it, `end_step`, `take_report`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from elora_connector.config import EloraConfig
from elora_connector.core.keys import KEY_SCHEMA, RemoteKeys
from elora_connector.core.rates import Move
from elora_connector.core.types import Rank
from elora_connector.errors import UnsupportedError
from elora_connector.integration.vllm.adapter_messages import AdapterReport
from elora_connector.integration.vllm.adapters import AdapterAgent
from elora_connector.integration.vllm.geometry import Geometry
from elora_connector.integration.vllm.metadata import (
    LoadOrder,
    PrefetchOrder,
    RankReport,
    RemoteChunk,
    StepMetadata,
    StoreOrder,
    WorkerReport,
)
from elora_connector.metrics import Recorder
from elora_connector.tiers.base import RemoteTier, ValueSpec
from elora_connector.tiers.remote_io import RemoteIO, Value
from elora_connector.transfer import HostBuffer, PagedKV, Ticket, copy_engine_for, round_trip

logger = logging.getLogger("vllm.elora_connector")

_IDLE_NAP_S = 0.0005


class WorkerSide:
    """Host buffer, copy engine, remote I/O and adapter agent of one rank.

    Args:
        slots: host slots, the same number on every rank.
        rank: this worker's part, and its place in the list of all parts.
        dtype: of the KV cache, as vLLM names it.
        agent: None without LoRA.
    """

    def __init__(
        self,
        config: EloraConfig,
        geometry: Geometry,
        slots: int,
        rank: tuple[Rank, int],
        *,
        dtype: str,
        remote: RemoteTier | None,
        agent: AdapterAgent | None,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._slots = slots
        self._rank, self._rank_index = rank
        self._dtype = dtype
        self._remote_tier = remote
        self._agent = agent
        self.recorder = recorder
        self._report = RankReport()
        self._step = StepMetadata()
        self._stores: list[tuple[StoreOrder, Ticket]] = []
        self._loads: list[tuple[LoadOrder, Ticket]] = []
        self._prefetches: list[tuple[PrefetchOrder, Ticket]] = []
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        self._names: dict[bytes, RemoteKeys] = {}
        self._reported_rpcs = -1
        self._io: RemoteIO | None = None
        self._closed = False

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM's paged KV is there: allocate the host tier and prove the layout.

        Raises:
            UnsupportedError: a layout that cannot be copied safely.
        """
        paged = PagedKV.from_tensors(
            kv_caches, self._geometry.num_blocks, self._block_dim(kv_caches)
        )
        if paged.block_bytes != self._geometry.block_bytes:
            raise UnsupportedError(
                f"vLLM's KV blocks take {paged.block_bytes} bytes here, its configuration says "
                f"{self._geometry.block_bytes}; this KV layout is not supported"
            )
        pin = paged.device.type == "cuda"
        self._host = HostBuffer(self._slots, self._geometry.chunk_bytes, pin)
        self._engine = copy_engine_for(paged, self._host)
        round_trip(self._engine, paged, self._host)
        if not pin:
            self._host.populate()
        layout = hashlib.sha256(paged.layout.encode()).hexdigest()[:16]
        self._value_dtype = f"{self._dtype}/{layout}"
        self._shape = (len(paged.segments), self._geometry.blocks_per_chunk, paged.block_bytes)
        if self._remote_tier is not None:
            threads = self._config.remote.io_threads
            self._io = RemoteIO(self._remote_tier, self._host.view, threads)

    def _block_dim(self, kv_caches: Mapping[str, Any]) -> int | None:
        """0 where vLLM puts blocks first (its own layouts since 0.24), else to be found out."""
        tensors = [t for t in kv_caches.values() if isinstance(t, torch.Tensor)]
        first = all(t.shape[0] % self._geometry.num_blocks == 0 for t in tensors)
        return 0 if first and len(tensors) == len(kv_caches) else None

    # ---- one step --------------------------------------------------------------------

    def begin_step(self, step: StepMetadata) -> None:
        """Before vLLM looks at the batch: adapter orders and reads from the remote tier."""
        self._step = step
        if step.drain:
            for _, ticket in (*self._stores, *self._prefetches):
                ticket.wait()
        if self._agent is not None:
            self._agent.cancel(step.cancelled)
            self._agent.submit(step.orders, step.protected, step.grants)
        for fetch in step.fetches:
            assert self._io is not None
            self._io.read(
                fetch.job_id, [Value(item.ref, self._spec(item.remote)) for item in fetch.items]
            )

    def load(self) -> None:
        """Host -> GPU copies; those the forward waits for are enqueued before it."""
        for order in self._step.loads:
            submit = self._engine.load_ordered if order.ordered else self._engine.load
            self._loads.append((order, submit(order.copies)))
        self._step.loads = []
        for prefetch in self._step.prefetches:
            self._prefetches.append((prefetch, self._engine.load(prefetch.copies)))
        self._step.prefetches = []

    def store(self) -> None:
        """GPU -> host copies of blocks that this step's forward completes."""
        for order in self._step.stores:
            if self._same_weights(order):
                self._stores.append((order, self._engine.store([i.copy for i in order.items])))
            else:
                self._end_store(order, 0)
        self._step.stores = []

    def end_step(self) -> set[str]:
        """After the forward: adapters, finished copies.

        Returns:
            Requests whose asynchronous load ended.
        """
        if self._agent is not None:
            self._agent.advance(frozenset())
        self._stores = [entry for entry in self._stores if not self._poll_store(*entry)]
        self._loads = [entry for entry in self._loads if not self._poll_load(*entry)]
        self._prefetches = [entry for entry in self._prefetches if not self._poll_prefetch(*entry)]
        if self._io is not None:
            self._report.fetches.extend(self._io.take_reads())
            self._report.puts.extend(self._io.take_writes())
            for nbytes, seconds in self._io.take_read_times():
                self._report.moves.append((Move.REMOTE_TO_HOST, nbytes, seconds))
        if self._step.idle and self._waiting_for_background():
            time.sleep(_IDLE_NAP_S)  # an in-process engine would spin and starve our threads
        received, self._received = self._received, set()
        return received

    def take_invalid_blocks(self) -> set[int]:
        """GPU blocks whose load failed; vLLM recomputes them."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> WorkerReport:
        """What this rank finished since its last report."""
        report, self._report = self._report, RankReport()
        report.rpcs, report.step = self._step.rpcs, self._step.number
        report.adapters = self._adapter_report(report.rpcs)
        return WorkerReport({self._rank_index: report})

    def shutdown(self) -> None:
        """Flush the write-behind queue within its limit, then let go of everything."""
        if self._closed:
            return
        self._closed = True
        if self._io is not None:
            left = self._io.close(self._config.shutdown_flush_s)
            if left:
                logger.warning("%d chunks were not written to the remote tier in time", left)
        if self._agent is not None:
            self._agent.close()
        if hasattr(self, "_engine"):
            self._engine.close()
            self._host.close()

    # ---- inside ------------------------------------------------------------------------

    def _adapter_report(self, rpcs: int) -> AdapterReport | None:
        if self._agent is None:
            return None
        report = self._agent.report()
        for result in report.results:
            self.recorder.add("adapter_loads", 1, "ok" if result.ok else "failed")
            self.recorder.add("adapter_load_seconds", result.seconds)
        for event, count in self._agent.take_counts().items():
            if event == "read":
                self.recorder.add("adapter_reads", count)
            else:
                self.recorder.add("adapter_rechecks", count, event)
        if not report.changed and rpcs == self._reported_rpcs:
            return None
        self._reported_rpcs = rpcs
        return report

    def _same_weights(self, order: StoreOrder) -> bool:
        """Do the loaded weights still come from the load these blocks were planned with?"""
        if order.lora_id is None:
            return True
        if self._agent is None or len(order.load) <= self._rank_index:
            return False
        return self._agent.load_seq(order.lora_id) == order.load[self._rank_index]

    def _poll_store(self, order: StoreOrder, ticket: Ticket) -> bool:
        if not ticket.done():
            return False
        if ticket.error is not None:
            logger.error("storing KV failed: %s", ticket.error)
        self._measure(Move.GPU_TO_HOST, ticket)
        self._end_store(order, 0 if ticket.error else len(order.items))
        return True

    def _end_store(self, order: StoreOrder, ok_items: int) -> None:
        self._report.stores.append((order.job_id, ok_items))
        puts = [item for item in order.items if item.remote is not None]
        if self._io is None or not puts:
            return
        if not ok_items:
            self._io.refuse([item.ref for item in puts])
            return
        self._io.write([Value(i.ref, self._spec(i.remote)) for i in puts if i.remote])

    def _poll_load(self, order: LoadOrder, ticket: Ticket) -> bool:
        if not ticket.done():
            return False
        self._measure(Move.HOST_TO_GPU, ticket)
        ok = len(order.copies)
        if ticket.error is not None:
            logger.error("loading KV failed, it is recomputed: %s", ticket.error)
            self._invalid.update(block for copy in order.copies for block in copy.blocks)
            ok = 0
        self._report.loads.append((order.job_id, ok))
        if not order.ordered:
            self._received.add(order.request_id)
        return True

    def _poll_prefetch(self, order: PrefetchOrder, ticket: Ticket) -> bool:
        if not ticket.done():
            return False
        self._measure(Move.HOST_TO_GPU, ticket)
        if ticket.error is not None:
            logger.error("prefetching KV failed: %s", ticket.error)
        self._report.prefetches.append((order.job_id, 0 if ticket.error else len(order.copies)))
        return True

    def _measure(self, move: Move, ticket: Ticket) -> None:
        self.recorder.add("bytes", ticket.nbytes, move.value)
        self.recorder.add("seconds", ticket.seconds, move.value)
        if ticket.error is None:
            self._report.moves.append((move, ticket.nbytes, ticket.seconds))

    def _waiting_for_background(self) -> bool:
        reading = self._io is not None and self._io.busy
        loading = self._agent is not None and bool(self._step.protected)
        return reading or loading or bool(self._loads or self._prefetches)

    def _spec(self, chunk: RemoteChunk) -> ValueSpec:
        names = self._names.get(chunk.namespace)
        if names is None:
            names = self._names[chunk.namespace] = RemoteKeys(KEY_SCHEMA, chunk.namespace)
        return ValueSpec(
            key=names.of(chunk.chunk, chunk.identity, self._rank),
            namespace=chunk.namespace,
            identity=chunk.identity,
            chunk=chunk.chunk,
            parent=chunk.parent,
            rank=self._rank,
            dtype=self._value_dtype,
            shape=self._shape,
            nbytes=self._geometry.chunk_bytes,
        )


def rank_of(parallel_config: Any) -> tuple[Rank, int]:
    """(tp, pp) of the calling worker, and its index among tp x pp ranks."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp = get_tp_group().rank_in_group, get_pp_group().rank_in_group
    return Rank(tp, pp), pp * parallel_config.tensor_parallel_size + tp


def all_ranks(parallel_config: Any) -> list[Rank]:
    """Every rank of one engine, in the order of `rank_of`'s index."""
    return [
        Rank(tp, pp)
        for pp in range(parallel_config.pipeline_parallel_size)
        for tp in range(parallel_config.tensor_parallel_size)
    ]


def kv_dtype(vllm_config: Any) -> str:
    """Name of the KV cache's data type."""
    name = vllm_config.cache_config.cache_dtype
    dtype: torch.dtype = vllm_config.model_config.dtype
    return str(dtype).removeprefix("torch.") if name == "auto" else str(name)
