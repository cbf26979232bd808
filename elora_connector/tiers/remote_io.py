"""Worker-side traffic with the remote tier: demand reads and write-behind.

Reads run on several threads, because a request waits for them.  Writes run on one, in
the order given, so that a parent is never later than its child; a write whose parent
could not be written is not tried.  Neither ever runs on vLLM's thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from elora_connector.tiers.base import Outcome, RemoteTier, Result, ValueSpec
from elora_connector.tiers.host import SlotRef

_UNWRITTEN_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class Value:
    """One rank's part of a chunk: what it is, and which use of which slot holds it."""

    ref: SlotRef
    spec: ValueSpec


@dataclass(slots=True)
class _Read:
    job_id: int
    results: list[bool | None]
    failed: threading.Event = field(default_factory=threading.Event)


class RemoteIO:
    """Moves values between host slots and the remote tier in the background.

    Args:
        tier: the store; closed with this object.
        view: slot number -> writable memory of that slot.
        threads: parallel reads.

    `take_reads` and `take_writes` report what ended since their last call.  A slot
    belongs to its job until then, and after `close` for ever.
    """

    def __init__(self, tier: RemoteTier, view: Callable[[int], memoryview], threads: int) -> None:
        self._tier = tier
        self._view = view
        self._lock = threading.Lock()
        self._ended_reads: list[tuple[int, int]] = []
        self._ended_writes: list[tuple[SlotRef, bool]] = []
        self._open_reads = 0
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="elora-read")
        self._writes: queue.SimpleQueue[Value | None] = queue.SimpleQueue()
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._pending_writes = 0
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._write_all, name="elora-write", daemon=True)
        self._writer.start()

    # ---- reads --------------------------------------------------------------------

    def read(self, job_id: int, values: Sequence[Value]) -> None:
        """Fill the slots, root first as far as threads allow; a failure ends the rest."""
        read = _Read(job_id, [None] * len(values))
        with self._lock:
            self._open_reads += 1
        for position, value in enumerate(values):
            self._readers.submit(self._read_one, read, position, value)

    def _read_one(self, read: _Read, position: int, value: Value) -> None:
        ok = False
        if not read.failed.is_set() and not self._stop.is_set():
            size = value.spec.nbytes
            ok = self._tier.read_into(value.spec, self._view(value.ref.slot)[:size]).ok
        if not ok:
            # Later chunks are useless without this one; earlier ones may still come in.
            read.failed.set()
        with self._lock:
            read.results[position] = ok
            if None in read.results:
                return
            good = read.results.index(False) if False in read.results else len(read.results)
            self._ended_reads.append((read.job_id, good))
            self._open_reads -= 1

    def take_reads(self) -> list[tuple[int, int]]:
        """(job id, leading good values) of ended reads."""
        with self._lock:
            ended, self._ended_reads = self._ended_reads, []
        return ended

    # ---- writes -------------------------------------------------------------------

    def write(self, values: Sequence[Value]) -> None:
        """Queue values whose slots are filled; bounded by the caller's budget."""
        with self._lock:
            self._pending_writes += len(values)
        for value in values:
            self._writes.put(value)

    def refuse(self, refs: Sequence[SlotRef]) -> None:
        """Report writes that will not be tried because their slots were never filled."""
        with self._lock:
            self._ended_writes.extend((ref, False) for ref in refs)

    def take_writes(self) -> list[tuple[SlotRef, bool]]:
        """(slot use, written) of ended writes."""
        with self._lock:
            ended, self._ended_writes = self._ended_writes, []
        return ended

    @property
    def busy(self) -> bool:
        """Something that a waiting request depends on is under way."""
        return self._open_reads > 0

    def _write_all(self) -> None:
        while (value := self._writes.get()) is not None:
            ok = not self._stop.is_set() and self._write_one(value.spec, value.ref.slot).ok
            with self._lock:
                self._ended_writes.append((value.ref, ok))
                self._pending_writes -= 1

    def _write_one(self, spec: ValueSpec, slot: int) -> Result:
        if spec.parent in self._unwritten:
            self._remember_unwritten(spec.chunk)
            return Result(Outcome.ERROR, "parent_missing")
        result = self._tier.write(spec, self._view(slot)[: spec.nbytes])
        if result.ok:
            self._unwritten.pop(spec.chunk, None)
        else:
            self._remember_unwritten(spec.chunk)
        return result

    def _remember_unwritten(self, chunk: bytes) -> None:
        self._unwritten[chunk] = None
        if len(self._unwritten) > _UNWRITTEN_REMEMBERED:
            self._unwritten.popitem(last=False)

    # ---- end ----------------------------------------------------------------------

    def flush(self, seconds: float) -> int:
        """Wait for queued writes; returns how many are left after `seconds`."""
        end = time.monotonic() + seconds
        while self._pending_writes and time.monotonic() < end:
            time.sleep(0.005)
        return self._pending_writes

    def close(self, flush_s: float) -> int:
        """Flush, then stop; returns how many writes were given up.  Idempotent."""
        left = self.flush(flush_s)
        self._stop.set()
        self._writes.put(None)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._tier.close()
        return left
