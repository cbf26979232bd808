"""Bytes of the scheduler rig's fake workers: what KV must hold, where it is, who touches it.

The KV of one token is 8 bytes that depend on the weights, the rank and every token
before it, so a block of another adapter, another prompt or another rank, a block that
was overwritten or never filled, is always told apart from the right one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

from elora_connector.tiers.base import RemoteTier
from elora_connector.tiers.host import SlotRef
from elora_connector.tiers.remote_io import Value
from elora_connector.transfer.base import ChunkCopy, Ticket

TOKEN_BYTES = 8


class WrongBytesError(AssertionError):
    """A byte or a place was not what a request may rely on."""


@lru_cache(maxsize=1 << 18)
def token_kv(before: bytes, token: int, weights: str, rank: int) -> bytes:
    """KV of one token after the KV `before` of the token in front of it."""
    text = f"{token}|{weights}|{rank}|".encode() + before
    return blake2b(text, digest_size=TOKEN_BYTES).digest()


def prefix_kv(tokens: Sequence[int], weights: str, rank: int) -> list[bytes]:
    """KV of all `tokens`, computed with one set of weights."""
    kv: list[bytes] = []
    before = b""
    for token in tokens:
        before = token_kv(before, token, weights, rank)
        kv.append(before)
    return kv


def next_token(kv: bytes) -> int:
    """The token that follows; depends on everything before it."""
    return 10 + int.from_bytes(kv[:4], "little") % 80


class Delays:
    """How many steps things take; a number or an inclusive range for each kind.

    0 is the end of the step in which it began.
    """

    KINDS = ("adapter", "fetch", "load", "lookup", "ordered", "put", "store")

    def __init__(self, seed: int, **steps: int | tuple[int, int]) -> None:
        unknown = set(steps) - set(self.KINDS)
        assert not unknown, f"unknown delays {unknown}"
        self._random = random.Random(seed)
        self.steps: dict[str, int | tuple[int, int]] = dict.fromkeys(self.KINDS, 0) | steps

    def draw(self, kind: str) -> int:
        steps = self.steps[kind]
        return steps if isinstance(steps, int) else self._random.randint(*steps)


class Events:
    """Things that happen a number of steps later, in the order they were planned."""

    def __init__(self) -> None:
        self._step = 0
        self._planned: list[tuple[int, Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._planned)

    def after(self, steps: int, action: Callable[[], None]) -> None:
        self._planned.append((self._step + steps, action))

    def end_step(self) -> None:
        due = [action for step, action in self._planned if step <= self._step]
        self._planned = [entry for entry in self._planned if entry[0] > self._step]
        self._step += 1
        for action in due:
            action()


@dataclass(frozen=True)
class Sizes:
    """Bytes and blocks of one rank."""

    num_blocks: int
    block_size: int
    blocks_per_chunk: int
    slots: int

    @property
    def block_bytes(self) -> int:
        return self.block_size * TOKEN_BYTES

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_chunk


@dataclass
class Memory:
    """Paged KV and host slots of one rank, with a record of who is using each slot."""

    sizes: Sizes
    gpu: bytearray = field(init=False)
    host: bytearray = field(init=False)
    generation: dict[int, int] = field(default_factory=dict)
    readers: Counter[int] = field(default_factory=Counter)
    writers: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.gpu = bytearray(b"\xee" * self.sizes.num_blocks * self.sizes.block_bytes)
        self.host = bytearray(b"\xdd" * self.sizes.slots * self.sizes.chunk_bytes)

    def block(self, block: int) -> memoryview:
        size = self.sizes.block_bytes
        return memoryview(self.gpu)[block * size : (block + 1) * size]

    def slot(self, slot: int) -> memoryview:
        size = self.sizes.chunk_bytes
        return memoryview(self.host)[slot * size : (slot + 1) * size]

    def part(self, copy: ChunkCopy) -> memoryview:
        """The bytes of a slot that a copy covers."""
        size = self.sizes.block_bytes
        return self.slot(copy.slot)[copy.first * size : (copy.first + len(copy.blocks)) * size]

    def own(self, ref: SlotRef) -> None:
        """A job that will fill the slot has arrived: nobody of an earlier use may be left."""
        if self.generation.get(ref.slot, 0) >= ref.generation:
            raise WrongBytesError(f"slot {ref.slot} goes back from {self.generation} to {ref}")
        self._idle(ref.slot)
        self.generation[ref.slot] = ref.generation

    def owned(self, ref: SlotRef) -> None:
        if self.generation.get(ref.slot) != ref.generation:
            raise WrongBytesError(
                f"{ref} is used while generation {self.generation.get(ref.slot)} owns"
            )

    def begin_write(self, slot: int) -> None:
        self._idle(slot)
        self.writers[slot] += 1

    def end_write(self, slot: int) -> None:
        self.writers[slot] -= 1

    def begin_read(self, slot: int) -> None:
        if self.writers[slot]:
            raise WrongBytesError(f"host slot {slot} is read while it is being written")
        self.readers[slot] += 1

    def end_read(self, slot: int) -> None:
        self.readers[slot] -= 1

    def _idle(self, slot: int) -> None:
        if self.readers[slot] or self.writers[slot]:
            raise WrongBytesError(
                f"host slot {slot} is written while {self.readers[slot]} readers and "
                f"{self.writers[slot]} writers are at it"
            )


class _LaterTicket(Ticket):
    """A copy that is made when it ends: `move` returns why it failed, or None."""

    def __init__(self, nbytes: int, move: Callable[[], Exception | None]) -> None:
        super().__init__(nbytes)
        self.ended = False
        self.failure: Exception | None = None
        self._move = move

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        if not self.ended:
            self.failure = self._move()
            self.ended = True

    @property
    def error(self) -> Exception | None:
        return self.failure if self.ended else None

    @property
    def seconds(self) -> float:
        return 0.0


class RigEngine:
    """Copies between GPU and host, some steps after they were asked for.

    Args:
        in_use: is a GPU block referenced by anybody?  Asked when a copy writes one.
        fails: asked once per asynchronous load; true lets it fail.
    """

    def __init__(
        self,
        memory: Memory,
        events: Events,
        delays: Delays,
        in_use: Callable[[int], bool],
        fails: Callable[[], bool],
    ) -> None:
        self._memory = memory
        self._events = events
        self._delays = delays
        self._in_use = in_use
        self._fails = fails
        self.draining = False
        """Blocks of abandoned copies may still be written: nobody can have used them yet."""

    def load_ordered(self, copies: Sequence[ChunkCopy]) -> Ticket:
        """The forward sees it at once; that it has ended may be noticed later."""
        self._begin_read(copies)
        for copy in copies:
            self._to_gpu(copy)
        return self._later("ordered", copies, lambda: self._end_read(copies))

    def load(self, copies: Sequence[ChunkCopy]) -> Ticket:
        self._begin_read(copies)

        def move() -> Exception | None:
            failed = self._fails()
            for copy in () if failed else copies:
                self._to_gpu(copy)
            self._end_read(copies)
            return RuntimeError("the copy failed") if failed else None

        return self._later("load", copies, move)

    def store(self, copies: Sequence[ChunkCopy]) -> Ticket:
        seen = self._blocks(copies)
        for copy in copies:
            self._memory.begin_write(copy.slot)

        def move() -> None:
            if self._blocks(copies) != seen:
                raise WrongBytesError(
                    f"blocks were written while a store was reading them: {copies}"
                )
            for copy in copies:
                self._to_host(copy)
                self._memory.end_write(copy.slot)

        return self._later("store", copies, move)

    def close(self) -> None:
        pass

    def _later(
        self, kind: str, copies: Sequence[ChunkCopy], move: Callable[[], Exception | None]
    ) -> Ticket:
        if not copies:
            raise WrongBytesError("an empty batch was ordered")
        size = self._memory.sizes.block_bytes
        ticket = _LaterTicket(sum(len(copy.blocks) for copy in copies) * size, move)
        self._events.after(self._delays.draw(kind), ticket.wait)
        return ticket

    def _blocks(self, copies: Sequence[ChunkCopy]) -> list[bytes]:
        return [bytes(self._memory.block(b)) for copy in copies for b in copy.blocks]

    def _begin_read(self, copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            self._memory.begin_read(copy.slot)

    def _end_read(self, copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            self._memory.end_read(copy.slot)

    def _to_gpu(self, copy: ChunkCopy) -> None:
        size, part = self._memory.sizes.block_bytes, self._memory.part(copy)
        for index, block in enumerate(copy.blocks):
            if not block or not (self._in_use(block) or self.draining):
                raise WrongBytesError(f"a load wrote GPU block {block}, which belongs to nobody")
            self._memory.block(block)[:] = part[index * size : (index + 1) * size]

    def _to_host(self, copy: ChunkCopy) -> None:
        size, part = self._memory.sizes.block_bytes, self._memory.part(copy)
        for index, block in enumerate(copy.blocks):
            part[index * size : (index + 1) * size] = self._memory.block(block)


class RigIO:
    """Traffic with the remote tier in steps instead of threads; verbs as in `RemoteIO`."""

    busy = False

    def __init__(self, tier: RemoteTier, memory: Memory, events: Events, delays: Delays) -> None:
        self._tier = tier
        self._memory = memory
        self._events = events
        self._delays = delays
        self._ended_reads: list[tuple[int, int]] = []
        self._ended_writes: list[tuple[SlotRef, bool]] = []
        self._queue: list[Value] = []
        self._unwritten: set[bytes] = set()
        self.reads: Counter[bytes] = Counter()

    def read(self, job_id: int, values: Sequence[Value]) -> None:
        for value in values:
            self._memory.owned(value.ref)
            self._memory.begin_write(value.ref.slot)
        self._events.after(self._delays.draw("fetch"), lambda: self._arrive(job_id, values))

    def _arrive(self, job_id: int, values: Sequence[Value]) -> None:
        good, ok = 0, True
        for value in values:
            self._memory.owned(value.ref)
            self._memory.end_write(value.ref.slot)
            self.reads[value.spec.chunk] += 1
            ok = ok and self._tier.read_into(value.spec, self._memory.slot(value.ref.slot)).ok
            good += ok
        self._ended_reads.append((job_id, good))

    def write(self, values: Sequence[Value]) -> None:
        for value in values:
            self._memory.owned(value.ref)
            self._memory.begin_read(value.ref.slot)
            self._queue.append(value)
            self._events.after(self._delays.draw("put"), self._write_next)

    def _write_next(self) -> None:
        value = self._queue.pop(0)
        self._memory.owned(value.ref)
        self._memory.end_read(value.ref.slot)
        spec = value.spec
        ok = spec.parent not in self._unwritten
        ok = ok and self._tier.write(spec, self._memory.slot(value.ref.slot)).ok
        self._unwritten.discard(spec.chunk)
        if not ok:
            self._unwritten.add(spec.chunk)
        self._ended_writes.append((value.ref, ok))

    def refuse(self, refs: Sequence[SlotRef]) -> None:
        self._ended_writes.extend((ref, False) for ref in refs)

    def take_reads(self) -> list[tuple[int, int]]:
        ended, self._ended_reads = self._ended_reads, []
        return ended

    def take_writes(self) -> list[tuple[SlotRef, bool]]:
        ended, self._ended_writes = self._ended_writes, []
        return ended

    def take_read_times(self) -> list[tuple[int, float]]:
        return []

    def close(self, flush_s: float) -> int:
        return 0
