"""Copy engine for paged KV on a CUDA device, and the factory over device types.

Blocks are gathered on the device into a staging buffer and leave it by one DMA copy per
chunk (loads: the reverse).  The pages of a block are far too small for one DMA call each
from Python, while a gather should run near device memory speed, little next to the time
on the wire.  That is an estimate: `benchmarks/kv_copy.py --device cuda` measures it.
Each verb has its own stream, which keeps its staging buffer in order without events and
lets stores and loads use both directions of the bus at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from elora_connector.errors import UnsupportedError
from elora_connector.transfer.base import (
    ChunkCopy,
    CopyEngine,
    FinishedTicket,
    Ticket,
    block_ids,
)
from elora_connector.transfer.host_buffer import HostBuffer
from elora_connector.transfer.paged_kv import PagedKV, word_dtype
from elora_connector.transfer.torch_copy import CpuCopyEngine

STAGING_BYTES = 16 << 20
"""Least size of a staging buffer: small chunks then share one gather launch."""


class Staging:
    """Contiguous device memory for `capacity` blocks, in slot layout.

    Works on any device, so its index logic is tested without a GPU.
    """

    def __init__(self, paged: PagedKV, capacity: int) -> None:
        self.capacity = capacity
        self.blocks = torch.empty(
            (capacity, paged.block_bytes), dtype=torch.uint8, device=paged.device
        )
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for band in paged.bands:
            mine = band.in_slots(self.blocks)
            word = word_dtype(band.pages, mine)
            self._pairs.append((band.pages.view(word), mine.view(word)))

    def gather(self, ids: torch.Tensor) -> None:
        """Copy paged blocks `ids` (int64 `[n]`, on the device) to the first n places."""
        for pages, mine in self._pairs:
            torch.index_select(pages, 0, ids, out=mine[: len(ids)])

    def scatter(self, ids: torch.Tensor) -> None:
        """Copy the first n places to paged blocks `ids` (int64 `[n]`, on the device)."""
        for pages, mine in self._pairs:
            pages.index_copy_(0, ids, mine[: len(ids)])


def batches(copies: Sequence[ChunkCopy], capacity: int) -> Iterator[list[ChunkCopy]]:
    """Group copies in order so that each group's blocks fit into `capacity` places.

    A single copy is never larger: a staging buffer holds at least one chunk.
    """
    group: list[ChunkCopy] = []
    size = 0
    for copy in copies:
        if group and size + len(copy.blocks) > capacity:
            yield group
            group, size = [], 0
        group.append(copy)
        size += len(copy.blocks)
    if group:
        yield group


class CudaTicket(Ticket):
    """A batch enqueued on a copy stream; `begin` and `end` bracket it there."""

    def __init__(self, nbytes: int, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        super().__init__(nbytes)
        self._begin = begin
        self._end = end
        self._error: Exception | None = None

    def done(self) -> bool:
        if self._error is not None:
            return True
        try:
            return self._end.query()
        except RuntimeError as failure:
            self._error = failure
            return True

    def wait(self) -> None:
        try:
            self._end.synchronize()
        except RuntimeError as failure:
            self._error = failure

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def seconds(self) -> float:
        if not self.done() or self._error is not None:
            return 0.0
        return self._begin.elapsed_time(self._end) / 1e3


class Lane:
    """A stream with a staging buffer of its own; what is enqueued runs in order."""

    def __init__(self, paged: PagedKV, capacity: int, priority: int) -> None:
        self.staging = Staging(paged, capacity)
        self.stream = torch.cuda.Stream(paged.device, priority=priority)

    def places(self, group: Sequence[ChunkCopy]) -> Iterator[torch.Tensor]:
        """Yield each copy's part of the staging buffer, uint8 `[n, block_bytes]`."""
        at = 0
        for copy in group:
            yield self.staging.blocks[at : at + len(copy.blocks)]
            at += len(copy.blocks)


GroupFunction = Callable[[Lane, Sequence[ChunkCopy], torch.Tensor], None]


class CudaCopyEngine(CopyEngine):
    """One lane per verb.

    Ordered loads do not share the lane of background loads: the compute stream would wait
    for every background load submitted earlier.  Background lanes give way to the model.
    """

    def __init__(self, paged: PagedKV, host: HostBuffer) -> None:
        super().__init__(paged, host)
        self._slots = host.tensor.view(-1, paged.block_bytes)
        self._capacity = max(self.blocks_per_chunk, STAGING_BYTES // paged.block_bytes)
        lowest, highest = torch.cuda.Stream.priority_range()
        self._stores = Lane(paged, self._capacity, lowest)
        self._loads = Lane(paged, self._capacity, lowest)
        self._ordered = Lane(paged, self._capacity, highest)

    def _store(self, copies: Sequence[ChunkCopy]) -> Ticket:
        return self._enqueue(self._stores, copies, self._group_to_slots)

    def _load(self, copies: Sequence[ChunkCopy]) -> Ticket:
        return self._enqueue(self._loads, copies, self._group_to_blocks)

    def _load_ordered(self, copies: Sequence[ChunkCopy]) -> Ticket:
        ticket = self._enqueue(self._ordered, copies, self._group_to_blocks)
        self._compute().wait_stream(self._ordered.stream)
        return ticket

    def _enqueue(self, lane: Lane, copies: Sequence[ChunkCopy], enqueue: GroupFunction) -> Ticket:
        # A store reads what kernels on the compute stream still write; a load overwrites
        # blocks whose former owner's kernels may still be running there.
        lane.stream.wait_stream(self._compute())
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(lane.stream):
            begin.record()
            try:
                for group in batches(copies, self._capacity):
                    enqueue(lane, group, self._device_ids(group))
            except RuntimeError as failure:
                # Part of the batch may be under way; a done ticket frees its slots.
                lane.stream.synchronize()
                return FinishedTicket(self._nbytes(copies), 0.0, failure)
            end.record()
        return CudaTicket(self._nbytes(copies), begin, end)

    def _group_to_slots(self, lane: Lane, group: Sequence[ChunkCopy], ids: torch.Tensor) -> None:
        lane.staging.gather(ids)
        for copy, place in zip(group, lane.places(group), strict=True):
            self._part(copy).copy_(place, non_blocking=True)

    def _group_to_blocks(self, lane: Lane, group: Sequence[ChunkCopy], ids: torch.Tensor) -> None:
        for copy, place in zip(group, lane.places(group), strict=True):
            place.copy_(self._part(copy), non_blocking=True)
        lane.staging.scatter(ids)

    def _part(self, copy: ChunkCopy) -> torch.Tensor:
        """The bytes of one copy in its slot, uint8 `[n, block_bytes]`, contiguous."""
        place = self._place(copy)
        return self._slots[place : place + len(copy.blocks)]

    def _device_ids(self, group: Sequence[ChunkCopy]) -> torch.Tensor:
        # Pageable memory would make the CPU wait for the stream.
        host = torch.tensor(block_ids(group), dtype=torch.int64, pin_memory=True)
        return host.to(self.paged.device, non_blocking=True)

    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.paged.device)

    def _close(self) -> None:
        for lane in (self._stores, self._loads, self._ordered):
            lane.stream.synchronize()


def copy_engine_for(paged: PagedKV, host: HostBuffer) -> CopyEngine:
    """Return the engine for the device the paged KV lives on.

    Raises:
        UnsupportedError: neither CPU nor CUDA, or a CUDA device with pageable host memory.
    """
    if paged.device.type == "cpu":
        return CpuCopyEngine(paged, host)
    if paged.device.type == "cuda":
        if not host.pinned:
            # Copies of pageable memory block the CPU and may read the source late.
            raise UnsupportedError("the host buffer of a CUDA device must be pinned")
        return CudaCopyEngine(paged, host)
    raise UnsupportedError(f"no copy engine for KV caches on {paged.device}")
