"""The one place where chunks change state: lookup, begin, finish over tree and slots.

Every move is a *job*: `begin_*` reserves slots, marks nodes PENDING and pins what
must stay; `finish` (all ranks reported) publishes the bytes or rolls the tree back
(I6).  Nothing is indexed before its bytes are there, and a slot is reused only after
every job that touches it has ended, whatever became of its node meanwhile (a reset,
an abort or a deadline ends the wait, never the job).

Called by the scheduler thread only; no I/O, no clock (`now` is an argument, seconds).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from elora_connector.core.host_room import HostRoom, split
from elora_connector.core.node import AdapterNode, Node, NodeKind
from elora_connector.core.policy import EvictionPolicy
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import ChunkKey, Identity, Residency, Tier
from elora_connector.errors import InvariantError
from elora_connector.tiers.host import SlotPool, SlotRef


class JobKind(enum.Enum):
    STORE = "store"
    """GPU blocks -> host slots."""
    FETCH = "fetch"
    """Remote -> host slots."""
    LOAD = "load"
    """Host slots -> GPU blocks of a request."""
    PREFETCH = "prefetch"
    """Host slots -> GPU blocks that no request has."""


_HOLDS_ADAPTER = frozenset({JobKind.STORE, JobKind.LOAD})
"""A prefetch does not: nobody asked for it, so it must not keep another adapter waiting."""


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk of a job; `index` is its position in the request, in chunks."""

    index: int
    node: Node
    ref: SlotRef
    put: bool = False
    """STORE only: the worker also writes it to the remote tier afterwards."""

    @property
    def key(self) -> ChunkKey:
        return self.node.key


@dataclass(slots=True)
class Job:
    """A plan being executed by all ranks."""

    id: int
    kind: JobKind
    identity: Identity
    items: tuple[Item, ...]
    request_id: str
    adapter: AdapterNode
    """Pinned while a copy to or from a request's GPU blocks is under way."""
    done_ranks: set[int] = field(default_factory=set)
    ok_items: int = 0


@dataclass(slots=True)
class _Put:
    """A write to the remote tier that still reads its slot on some rank."""

    item: Item
    done_ranks: set[int] = field(default_factory=set)
    ok: bool = True


@dataclass(frozen=True, slots=True)
class StorePlan:
    """`until`: chunks below it need no more planning; `dropped`: no room was found."""

    job: Job | None
    until: int
    dropped: int = 0


class Manager:
    """Tree + slots + jobs.

    Args:
        tree: the dependency tree; this object is its only writer.
        slots: host slots of one rank (all ranks mirror each other).
        room: the host tier's budget, and what leaves it.
        ranks: how many ranks must report before a job has ended.
        pin_limit: most slots that waiting requests may pin at a time.
        put_limit: most chunks whose remote write may be under way at a time.
    """

    def __init__(
        self,
        tree: DependencyTree,
        slots: SlotPool,
        room: HostRoom,
        *,
        ranks: int,
        pin_limit: int,
        put_limit: int,
    ) -> None:
        self.tree = tree
        self.slots = slots
        self._room = room
        self._ranks = ranks
        self._pin_limit = pin_limit
        self._put_limit = put_limit
        self._jobs: dict[int, Job] = {}
        self._next_job = 1
        self._fetching: dict[ChunkKey, int] = {}
        self._puts: dict[SlotRef, _Put] = {}
        self._busy: Counter[SlotRef] = Counter()
        self._orphans: set[SlotRef] = set()
        self._late: dict[ChunkKey, list[Job]] = {}
        self._waiting: dict[str, list[Node]] = {}
        self._wait_pins: Counter[ChunkKey] = Counter()
        self.evictions = 0
        self.moved: Counter[tuple[str, Tier]] = Counter()
        """Bytes of one rank that came "in" to a tier or went "out", until somebody takes them."""
        self.stale_reports = 0

    @property
    def policy(self) -> EvictionPolicy:
        """What chunks are worth, in every tier."""
        return self._room.policy

    # ---- look-up (no state change) ----------------------------------------------

    def host_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks are READY in the host tier."""
        return self.tree.match(keys, Tier.HOST)

    def fetch_jobs(self, keys: Iterable[ChunkKey]) -> set[int]:
        """Jobs that are bringing any of these chunks in from the remote tier."""
        return {self._fetching[key] for key in keys if key in self._fetching}

    def job_open(self, job_id: int) -> bool:
        return job_id in self._jobs

    @property
    def open_jobs(self) -> int:
        return len(self._jobs)

    @property
    def chunks_on_the_way(self) -> int:
        """Chunks that fetches under way are bringing in."""
        return len(self._fetching)

    @property
    def open_puts(self) -> int:
        return len(self._puts)

    @property
    def pinned_by_waiters(self) -> int:
        return len(self._wait_pins)

    # ---- store: GPU -> host (-> remote) ------------------------------------------

    def begin_store(
        self,
        request_id: str,
        identity: Identity,
        keys: Sequence[ChunkKey],
        now: float,
        *,
        put_from: int | None,
        limit: int,
    ) -> StorePlan:
        """Reserve slots for those of `keys` that the host tier lacks.

        Stops after `limit` chunks and at a chunk that a fetch is bringing in (both are
        planned again later), and drops the rest when no room can be made.

        Args:
            keys: all full chunks of the request so far, from its first.
            put_from: chunks from this index on also go to the remote tier; None: never.
            limit: most chunks to reserve.
        """
        parent: Node = self.tree.adapter(identity, now)
        self.tree.touch([parent, *self.tree.nodes(keys)], now)
        items: list[Item] = []
        for index, key in enumerate(keys):
            node = self.tree.find(key)
            if node is not None and node.resident(Tier.HOST):
                if key in self._fetching:
                    return StorePlan(self._open(JobKind.STORE, identity, items, request_id), index)
            else:
                if len(items) == limit:
                    return StorePlan(self._open(JobKind.STORE, identity, items, request_id), index)
                if not self._make_room(1, parent, now):
                    job = self._open(JobKind.STORE, identity, items, request_id)
                    return StorePlan(job, len(keys), dropped=len(keys) - index)
                put = put_from is not None and index >= put_from and self._may_put()
                # Looked up or made only now: making room may have pruned it.
                items.append(self._reserve(index, self.tree.add(parent, key, now), put))
                node = items[-1].node
            parent = node
        return StorePlan(self._open(JobKind.STORE, identity, items, request_id), len(keys))

    # ---- fetch: remote -> host ----------------------------------------------------

    def begin_fetch(
        self,
        request_id: str,
        identity: Identity,
        keys: Sequence[ChunkKey],
        first: int,
        now: float,
    ) -> Job | None:
        """Reserve and pin slots for ``keys[first:]``, which the remote tier has.

        ``keys[:first]`` are READY in the host tier.  As many leading chunks as fit
        (pin limit, evictable slots) are taken; None if not even one does.
        """
        parent: Node | None = self.tree.adapter(identity, now)
        if first > 0:
            parent = self.tree.find(keys[first - 1])
        if parent is None or not self._attachable(parent):
            return None
        items: list[Item] = []
        for index in range(first, len(keys)):
            node = self.tree.find(keys[index])
            if node is not None and node.resident(Tier.HOST):
                break  # on its way from a GPU: a plain miss for now
            if len(self._wait_pins) >= self._pin_limit or not self._make_room(1, parent, now):
                break
            item = self._reserve(index, self.tree.add(parent, keys[index], now), put=False)
            self.tree.set_ready(item.node, Tier.REMOTE)
            self._hold(request_id, item.node)
            items.append(item)
            parent = item.node
        job = self._open(JobKind.FETCH, identity, items, request_id)
        if job is not None:
            self._fetching.update((item.key, job.id) for item in items)
        return job

    def join(self, request_id: str, keys: Iterable[ChunkKey]) -> None:
        """Pin chunks that another request's fetch is bringing in (one fetch a chunk)."""
        for key in keys:
            node = self.tree.find(key)
            if node is not None and key in self._fetching:
                self._hold(request_id, node)

    def release(self, request_id: str) -> None:
        """The wait is over (scheduled, aborted, past its deadline); jobs go on."""
        for node in self._waiting.pop(request_id, ()):
            self._wait_pins[node.key] -= 1
            if not self._wait_pins[node.key]:
                del self._wait_pins[node.key]
            self.tree.unpin(node)

    # ---- load: host -> GPU --------------------------------------------------------

    def begin_load(
        self,
        request_id: str,
        identity: Identity,
        keys: Sequence[ChunkKey],
        first: int,
        now: float,
    ) -> Job:
        """Pin ``keys[first:]``, all READY in the host tier, for a copy to the GPU."""
        adapter = self.tree.adapter(identity, now)
        self.tree.touch([adapter, *self.tree.nodes(keys)], now)
        items = []
        for index in range(first, len(keys)):
            node = self.tree.find(keys[index])
            if node is None or not node.ready(Tier.HOST):
                raise InvariantError(f"I5: chunk {index} of {request_id} is not ready to load")
            self.tree.pin(node)
            ref = SlotRef(node.slot, node.generation)
            self._busy[ref] += 1
            items.append(Item(index, node, ref))
        job = self._open(JobKind.LOAD, identity, items, request_id)
        if job is None:
            raise InvariantError(f"nothing to load for {request_id}")
        return job

    def begin_prefetch(self, identity: Identity, nodes: Sequence[Node]) -> Job:
        """Pin `nodes`, all READY in the host tier, for a copy to the GPU; no visit of them."""
        items = []
        for index, node in enumerate(nodes):
            if not node.ready(Tier.HOST):
                raise InvariantError(f"I5: {node!r} is not ready to be prefetched")
            self.tree.pin(node)
            ref = SlotRef(node.slot, node.generation)
            self._busy[ref] += 1
            items.append(Item(index, node, ref))
        job = self._open(JobKind.PREFETCH, identity, items, "")
        if job is None:
            raise InvariantError("nothing to prefetch")
        return job

    @property
    def demanded(self) -> bool:
        """A request waits for bytes of a job under way."""
        return any(job.kind in (JobKind.FETCH, JobKind.LOAD) for job in self._jobs.values())

    # ---- reports ------------------------------------------------------------------

    def finish(self, job_id: int, rank: int, ok_items: int) -> Job | None:
        """One rank ended its part; `ok_items` leading chunks are good.

        Returns:
            The job once all ranks have ended it, else None.  A report about an unknown
            job is counted and ignored.
        """
        job = self._jobs.get(job_id)
        if job is None or rank in job.done_ranks:
            self.stale_reports += 1
            return None
        job.ok_items = min(job.ok_items, ok_items)
        job.done_ranks.add(rank)
        if len(job.done_ranks) < self._ranks:
            return None
        del self._jobs[job_id]
        self._end(job)
        return job

    def put_finished(self, ref: SlotRef, rank: int, ok: bool) -> None:
        """One rank ended its write of a slot to the remote tier."""
        put = self._puts.get(ref)
        if put is None or rank in put.done_ranks:
            self.stale_reports += 1
            return
        put.ok &= ok
        put.done_ranks.add(rank)
        if len(put.done_ranks) < self._ranks:
            return
        del self._puts[ref]
        if self._mine(put.item):
            self.tree.unpin(put.item.node)
            if put.ok and put.item.node.ready(Tier.HOST):
                self.tree.set_ready(put.item.node, Tier.REMOTE)
        if put.ok:
            self.moved["in", Tier.REMOTE] += put.item.node.nbytes
        self._idle(ref)

    def reset(self) -> int:
        """Forget every chunk; slots of jobs under way come back when those end.

        Returns:
            How many chunks were READY in the host tier.
        """
        forgotten = 0
        for node in list(self.tree.chunks):
            if node.resident(Tier.HOST):
                forgotten += node.ready(Tier.HOST)
                self._free(SlotRef(node.slot, node.generation))
        self.tree.drop_chunks()
        self._fetching.clear()
        self._waiting.clear()
        self._wait_pins.clear()
        late = [job for jobs in self._late.values() for job in jobs]
        self._late.clear()
        for job in late:
            self._publish(job)
        return forgotten

    # ---- inside: reserving ----------------------------------------------------------

    def _attachable(self, parent: Node) -> bool:
        """I1: a chunk may enter the host tier only below a chunk that is there."""
        return parent.kind is NodeKind.ADAPTER or parent.resident(Tier.HOST)

    def _may_put(self) -> bool:
        return len(self._puts) < self._put_limit

    def _make_room(self, count: int, parent: Node, now: float) -> bool:
        """Free slots for `count` chunks below `parent`, which itself must stay."""
        self.tree.pin(parent)
        try:
            victims = self._room.for_chunks(count, self.slots.free, now)
        finally:
            self.tree.unpin(parent)
        if victims is None:
            return False
        if victims:
            share = len(victims) / max(1, self.tree.num_resident(Tier.HOST, NodeKind.CHUNK))
            self.tree.clock.turned_over(share, now)
        adapters = self._evict_chunks(victims, keep=parent.adapter)
        if adapters:
            self._room.adapters.evict(adapters)
        return self.slots.free >= count

    def make_bytes(
        self, nbytes: int, spare: Sequence[AdapterNode], now: float
    ) -> list[AdapterNode] | None:
        """Let `nbytes` of adapter weights into the host budget; chunks leave at once.

        Returns:
            Those of `spare` that have to leave too; None: there is no way, nothing changed.
        """
        victims = self._room.for_bytes(nbytes, spare, now)
        return None if victims is None else self._evict_chunks(victims, keep=None)

    def trim(self, now: float) -> None:
        """Back into the budget, as far as possible, after weights turned out larger."""
        while victims := self._room.overdrawn(now):
            adapters = self._evict_chunks(victims, keep=None)
            if adapters:
                self._room.adapters.evict(adapters)

    def _evict_chunks(self, victims: Sequence[Node], keep: AdapterNode | None) -> list[AdapterNode]:
        """Evict a plan's chunks, and return its adapters."""
        chunks, adapters = split(victims)
        for node in chunks:
            self._evict(node, keep)
        return adapters

    def _evict(self, node: Node, keep: AdapterNode | None) -> None:
        """`keep`: the adapter that room is made for; others leave with their last chunk."""
        ref = SlotRef(node.slot, node.generation)
        adapter = node.adapter
        self.tree.set_absent(node, Tier.REMOTE)  # remote-only nodes are not kept
        self.tree.set_absent(node, Tier.HOST)
        self._free(ref)
        self.evictions += 1
        self.moved["out", Tier.HOST] += node.nbytes
        if adapter is not None and adapter is not keep:
            self.tree.forget_if_unused(adapter)

    def _reserve(self, index: int, node: Node, put: bool) -> Item:
        ref = self.slots.take()
        self.tree.set_pending(node, Tier.HOST, slot=ref.slot, generation=ref.generation)
        self._busy[ref] += 1
        item = Item(index, node, ref, put)
        if put:
            self.tree.pin(node)
            self._puts[ref] = _Put(item)
            self._busy[ref] += 1
        return item

    def _open(
        self, kind: JobKind, identity: Identity, items: Sequence[Item], request_id: str
    ) -> Job | None:
        if not items:
            return None
        adapter = items[0].node.adapter
        if adapter is None:
            raise InvariantError(f"I1: {items[0].node!r} has no adapter")
        job = Job(
            self._next_job, kind, identity, tuple(items), request_id, adapter, ok_items=len(items)
        )
        if kind in _HOLDS_ADAPTER:
            self.tree.pin(adapter)
        self._next_job += 1
        self._jobs[job.id] = job
        return job

    def _hold(self, request_id: str, node: Node) -> None:
        held = self._waiting.setdefault(request_id, [])
        if node not in held:
            self.tree.pin(node)
            self._wait_pins[node.key] += 1
            held.append(node)

    # ---- inside: ending -------------------------------------------------------------

    def _end(self, job: Job) -> None:
        if job.kind in _HOLDS_ADAPTER:
            self.tree.unpin(job.adapter)
        if job.kind in (JobKind.LOAD, JobKind.PREFETCH):
            good = job.items[: job.ok_items]
            self.moved["in", Tier.GPU] += sum(item.node.nbytes for item in good)
            for item in job.items:
                if self._mine(item):
                    self.tree.unpin(item.node)
                self._idle(item.ref)
            return
        for item in job.items:
            if self._fetching.get(item.key) == job.id:
                del self._fetching[item.key]
        self._publish(job)

    def _publish(self, job: Job) -> None:
        """Make good chunks READY root first, roll the others back (I6)."""
        first = job.items[0].node
        parent = first.parent
        if (
            self._mine(job.items[0])
            and parent is not None
            and parent.state[Tier.HOST] is Residency.PENDING
            and parent.kind is NodeKind.CHUNK
        ):
            self._late.setdefault(parent.key, []).append(job)  # its parent's job ends later
            return
        for position, item in enumerate(job.items):
            if not self._mine(item):
                pass  # rolled back with an ancestor, or forgotten by a reset
            elif position < job.ok_items:
                self.tree.set_ready(item.node, Tier.HOST)
                self.moved["in", Tier.HOST] += item.node.nbytes
            else:
                self._roll_back(item.node)
            self._idle(item.ref)
            for late in self._late.pop(item.key, ()):
                self._publish(late)

    def _roll_back(self, node: Node) -> None:
        below = self.tree.descendants(node) if self.tree.dependency_rule else []
        for child in [*below, node]:
            if not child.resident(Tier.HOST):
                continue
            ref = SlotRef(child.slot, child.generation)
            self._drop_pins(child, ref)
            self.tree.set_absent(child, Tier.REMOTE)
            self.tree.set_absent(child, Tier.HOST)
            self._fetching.pop(child.key, None)
            self._free(ref)

    def _drop_pins(self, node: Node, ref: SlotRef) -> None:
        """Pins of a node that leaves the tree: waiters and its own write."""
        for held in self._waiting.values():
            if node in held:
                held.remove(node)
                self.tree.unpin(node)
        self._wait_pins.pop(node.key, None)
        if ref in self._puts:
            self.tree.unpin(node)

    def _mine(self, item: Item) -> bool:
        """Is the item's node still in the tree and still this very use of the slot?"""
        node = self.tree.find(item.key)
        return (
            node is item.node
            and node.slot == item.ref.slot
            and node.generation == item.ref.generation
        )

    def _free(self, ref: SlotRef) -> None:
        if self._busy[ref]:
            self._orphans.add(ref)
        else:
            del self._busy[ref]
            self.slots.give_back(ref)

    def _idle(self, ref: SlotRef) -> None:
        """One job or write stopped touching the slot."""
        self._busy[ref] -= 1
        if self._busy[ref]:
            return
        del self._busy[ref]
        if ref in self._orphans:
            self._orphans.discard(ref)
            self.slots.give_back(ref)

    # ---- checks ---------------------------------------------------------------------

    def check(self) -> None:
        """Slots are owned exactly by nodes and by jobs under way (tests, `check_invariants`)."""
        owned = set(self._owned())
        in_use = {ref for ref in self._busy if self._busy[ref]}
        if len(owned | self._orphans) != self.slots.used or owned & self._orphans:
            raise InvariantError(
                f"I4: {self.slots.used} slots in use, {len(owned)} owned, "
                f"{len(self._orphans)} orphaned"
            )
        if not self._orphans <= in_use:
            raise InvariantError("I4: an idle slot was not given back")
        for ref in owned | self._orphans:
            if not self.slots.current(ref):
                raise InvariantError(f"I5: slot {ref.slot} has another owner")
        pinned = Counter(j.adapter for j in self._jobs.values() if j.kind in _HOLDS_ADAPTER)
        for adapter, jobs in pinned.items():
            if adapter.attached and adapter.pins < jobs:
                raise InvariantError(f"I2: {adapter!r} has {jobs} copies under way")

    def _owned(self) -> Iterator[SlotRef]:
        for node in self.tree.chunks:
            if node.resident(Tier.HOST):
                yield SlotRef(node.slot, node.generation)
