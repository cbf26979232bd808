"""Contract of the copy engines between paged KV and host slots.

Slot layout: a chunk is its blocks in token order, a block is its pages in
`PagedKV.segments` order.  Part of a chunk is therefore one contiguous run of bytes, so
a partial copy is as fast as a full one, and the layout does not depend on the device.

Four questions, answered once for every engine:

* Does a call change state?  `store` writes the named parts of host slots, the two loads
  write the named paged blocks; nothing else is touched.  A refused call writes nothing.
* When is the result safe to use?  When `Ticket.done()` and `Ticket.error is None`.  After
  `load_ordered` work enqueued later on the compute stream may use the blocks at once.
  Until a ticket is done its blocks and slots belong to the copy: neither may be reused.
* What on zero or too much?  No copies: a finished ticket of 0 bytes.  A slot, block or
  position out of range, or a destination named twice: a finished ticket with the error.
  Any number of batches may be in flight; those of one verb run in the order they were
  submitted, those of different verbs in any.
* Which thread calls it?  The thread that runs the model, all methods.  A `Ticket` may be
  asked from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from elora_connector.errors import InvariantError
from elora_connector.transfer.host_buffer import HostBuffer
from elora_connector.transfer.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """Part of one chunk: `blocks[j]` <-> block `first + j` of the chunk in `slot`."""

    slot: int
    blocks: tuple[int, ...]
    first: int = 0


class Ticket(ABC):
    """One submitted batch of copies.

    Attributes:
        nbytes: bytes the batch moves.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abstractmethod
    def done(self) -> bool:
        """Whether the copy ended, well or not; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until done; errors are in `error`, not raised."""

    @property
    @abstractmethod
    def error(self) -> Exception | None:
        """Why the copy failed: its destination is then garbage.  None while it runs."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Time the copy itself took, without queueing; 0.0 until done."""


class FinishedTicket(Ticket):
    """A batch that ended before the call returned."""

    def __init__(self, nbytes: int, seconds: float, error: Exception | None = None) -> None:
        super().__init__(nbytes)
        self._seconds = seconds
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def seconds(self) -> float:
        return self._seconds


class CopyEngine(ABC):
    """Copies between one rank's paged KV and its host buffer.

    Raises:
        InvariantError: a slot does not hold a whole number of blocks.
    """

    def __init__(self, paged: PagedKV, host: HostBuffer) -> None:
        if host.chunk_bytes % paged.block_bytes:
            raise InvariantError(
                f"slot of {host.chunk_bytes} bytes is no multiple of the "
                f"block size of {paged.block_bytes} bytes"
            )
        self.paged = paged
        self.host = host
        self.blocks_per_chunk = host.chunk_bytes // paged.block_bytes
        self._closed = False

    def store(self, copies: Sequence[ChunkCopy]) -> Ticket:
        """Copy blocks to slots, after everything already enqueued on the compute stream."""
        return self._refusal(copies, self._places(copies)) or self._store(copies)

    def load(self, copies: Sequence[ChunkCopy]) -> Ticket:
        """Copy slots to blocks in the background; nothing waits for it."""
        return self._refusal(copies, block_ids(copies)) or self._load(copies)

    def load_ordered(self, copies: Sequence[ChunkCopy]) -> Ticket:
        """Copy slots to blocks; later work on the compute stream waits, the CPU does not.

        Without a compute stream (CPU) the copy is done when the call returns.
        """
        return self._refusal(copies, block_ids(copies)) or self._load_ordered(copies)

    def close(self) -> None:
        """Wait for the copies in flight and release resources; idempotent.

        Later calls return a finished ticket with an error.
        """
        if not self._closed:
            self._closed = True
            self._close()

    @abstractmethod
    def _store(self, copies: Sequence[ChunkCopy]) -> Ticket:
        """`store` of valid, non-empty copies."""

    @abstractmethod
    def _load(self, copies: Sequence[ChunkCopy]) -> Ticket:
        """`load` of valid, non-empty copies."""

    @abstractmethod
    def _load_ordered(self, copies: Sequence[ChunkCopy]) -> Ticket:
        """`load_ordered` of valid, non-empty copies."""

    @abstractmethod
    def _close(self) -> None:
        """First call of `close`."""

    def _nbytes(self, copies: Sequence[ChunkCopy]) -> int:
        return sum(len(copy.blocks) for copy in copies) * self.paged.block_bytes

    def _place(self, copy: ChunkCopy) -> int:
        """Where a copy starts in the host buffer, counted in blocks."""
        return copy.slot * self.blocks_per_chunk + copy.first

    def _places(self, copies: Sequence[ChunkCopy]) -> list[int]:
        places: list[int] = []
        for copy in copies:
            place = self._place(copy)
            places.extend(range(place, place + len(copy.blocks)))
        return places

    def _refusal(self, copies: Sequence[ChunkCopy], destinations: list[int]) -> Ticket | None:
        """A finished ticket when there is nothing to do or the batch is not valid."""
        if self._closed:
            return FinishedTicket(0, 0.0, InvariantError("copy engine is closed"))
        for copy in copies:
            problem = self._problem(copy)
            if problem:
                return FinishedTicket(0, 0.0, InvariantError(f"{problem}: {copy}"))
        if len(set(destinations)) < len(destinations):
            return FinishedTicket(0, 0.0, InvariantError("a destination is named twice"))
        return None if destinations else FinishedTicket(0, 0.0)

    def _problem(self, copy: ChunkCopy) -> str:
        if not 0 <= copy.slot < self.host.slots:
            return f"slot out of range 0..{self.host.slots - 1}"
        if copy.first < 0 or copy.first + len(copy.blocks) > self.blocks_per_chunk:
            return f"position out of range 0..{self.blocks_per_chunk - 1}"
        # Out-of-range ids would read or write foreign memory, negative ones wrap round.
        if copy.blocks and not 0 <= min(copy.blocks) <= max(copy.blocks) < self.paged.num_blocks:
            return f"block out of range 0..{self.paged.num_blocks - 1}"
        return ""


def block_ids(copies: Sequence[ChunkCopy]) -> list[int]:
    """All paged blocks of a batch, in order."""
    return [block for copy in copies for block in copy.blocks]
