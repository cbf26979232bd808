"""Worker-side traffic with the remote tier: demand reads and write-behind.

Reads run on several threads, because a request waits for them; the threads share the
values of one job and each keeps several on their way.  Writes run on one, in the order
given, so that a parent is never later than its child.  They stand back while reads are
open, but not for ever.  Neither ever runs on vLLM's thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elora_connector.tiers.base import Item, RemoteTier, ValueSpec
from elora_connector.tiers.host import SlotRef

_UNWRITTEN_REMEMBERED = 65_536
_TIMES_KEPT = 32
_PATIENCE_S = 0.05
"""Writes let reads go first for this long, then one value is written in between."""


@dataclass(frozen=True, slots=True)
class Value:
    """One rank's part of a chunk: what it is, and which use of which slot holds it."""

    ref: SlotRef
    spec: ValueSpec


class _ReadJob:
    """The values of one job, shared by the threads that read them; they hold its lock."""

    def __init__(self, job_id: int, values: Sequence[Value], shares: int) -> None:
        self.id = job_id
        self._values = values
        self._results = [False] * len(values)
        self._next = 0
        self._open_shares = shares

    def take(self) -> int | None:
        """The next position to read; None when there is none, or it would be useless."""
        if self._next >= len(self._values):
            return None
        self._next += 1
        return self._next - 1

    def __getitem__(self, position: int) -> Value:
        return self._values[position]

    def end(self, position: int, ok: bool) -> None:
        self._results[position] = ok
        if not ok:
            # Later chunks are useless without this one; earlier ones may still come in.
            self._next = len(self._values)

    def end_share(self) -> int | None:
        """Leading good values once the last thread is done, else None."""
        self._open_shares -= 1
        if self._open_shares:
            return None
        return [*self._results, False].index(False)


class RemoteIO:
    """Moves values between host slots and the remote tier in the background.

    Args:
        tier: the store; closed with this object.
        view: slot number -> writable memory of that slot.
        threads: parallel reads.
        patience_s: how long writes wait for open reads.

    `take_reads` and `take_writes` report what ended since their last call.  A slot
    belongs to its job until then, and after `close` for ever.
    """

    def __init__(
        self,
        tier: RemoteTier,
        view: Callable[[int], memoryview],
        threads: int,
        *,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._tier = tier
        self._view = view
        self._threads = threads
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._no_reads = threading.Condition(self._lock)
        self._ended_reads: list[tuple[int, int]] = []
        self._ended_writes: list[tuple[SlotRef, bool]] = []
        self._read_times: list[tuple[int, float]] = []
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
        shares = min(self._threads, len(values))
        if not shares:
            with self._lock:
                self._ended_reads.append((job_id, 0))
            return
        job = _ReadJob(job_id, values, shares)
        with self._lock:
            self._open_reads += 1
        for _ in range(shares):
            self._readers.submit(self._read_share, job)

    def _read_share(self, job: _ReadJob) -> None:
        taken: deque[int] = deque()
        try:
            since = time.perf_counter()
            for result in self._tier.read_many(self._to_read(job, taken)):
                now = time.perf_counter()
                with self._lock:
                    job.end(taken.popleft(), result.ok)
                    if result.ok and len(self._read_times) < _TIMES_KEPT:
                        self._read_times.append((result.nbytes, now - since))
                since = now
        finally:
            self._end_share(job, taken)

    def _to_read(self, job: _ReadJob, taken: deque[int]) -> Iterator[Item]:
        while not self._stop.is_set():
            with self._lock:
                position = job.take()
            if position is None:
                return
            taken.append(position)
            value = job[position]
            yield value.spec, self._view(value.ref.slot)[: value.spec.nbytes]

    def _end_share(self, job: _ReadJob, unfinished: deque[int]) -> None:
        with self._lock:
            for position in unfinished:
                job.end(position, False)
            good = job.end_share()
            if good is None:
                return
            self._ended_reads.append((job.id, good))
            self._open_reads -= 1
            if not self._open_reads:
                self._no_reads.notify_all()

    def take_read_times(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of values that came in well; some, when there were many.

        The seconds are those since the value before on the same thread: several are on
        their way at once.
        """
        with self._lock:
            times, self._read_times = self._read_times, []
        return times

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
        value = self._writes.get()
        while value is not None:
            self._let_reads_pass()
            taken: deque[Value] = deque()
            try:
                for result in self._tier.write_many(self._to_write(value, taken)):
                    self._end_write(taken.popleft(), result.ok)
            finally:
                while taken:
                    self._end_write(taken.popleft(), False)
            value = self._writes.get()

    def _let_reads_pass(self) -> None:
        with self._no_reads:
            self._no_reads.wait_for(
                lambda: not self._open_reads or self._stop.is_set(), self._patience_s
            )

    def _to_write(self, value: Value | None, taken: deque[Value]) -> Iterator[Item]:
        """`value` and what is queued behind it, until a read begins."""
        while value is not None:
            if self._stop.is_set() or value.spec.parent in self._unwritten:
                self._end_write(value, False)
            else:
                taken.append(value)
                yield value.spec, self._view(value.ref.slot)[: value.spec.nbytes]
            value = None if self._open_reads else self._next_queued()

    def _next_queued(self) -> Value | None:
        try:
            value = self._writes.get_nowait()
        except queue.Empty:
            return None
        if value is None:
            self._writes.put(None)  # the end is `_write_all`'s to see
        return value

    def _end_write(self, value: Value, ok: bool) -> None:
        """A value sent behind its parent was in vain if the parent could not be stored."""
        spec = value.spec
        ok = ok and spec.parent not in self._unwritten
        if ok:
            self._unwritten.pop(spec.chunk, None)
        else:
            self._remember_unwritten(spec.chunk)
        with self._lock:
            self._ended_writes.append((value.ref, ok))
            self._pending_writes -= 1

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
        with self._no_reads:
            self._no_reads.notify_all()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._tier.close()
        return left
