"""Scheduler side of the connector: decides, plans, promises; moves no bytes.

Lives in vLLM's EngineCore process; every method is called by its one scheduler thread.
See docs/architecture.md for the walk of a request through it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elora_connector.assembly import SchedulerParts
from elora_connector.config import EloraConfig
from elora_connector.core.invariants import check_tree
from elora_connector.core.keys import RemoteKeys, digest_fields, root_key
from elora_connector.core.types import BASE, ChunkKey, Identity
from elora_connector.errors import InvariantError
from elora_connector.integration.vllm.block_pool import PoolView
from elora_connector.integration.vllm.compat import CLIENT_ERROR, SERVER_BUSY
from elora_connector.integration.vllm.fetching import RemoteWaits
from elora_connector.integration.vllm.gate import AdapterGate, Passage, ReportOutcome
from elora_connector.integration.vllm.metadata import (
    FetchItem,
    FetchOrder,
    LoadOrder,
    RankReport,
    RemoteChunk,
    StepMetadata,
    StoreItem,
    StoreOrder,
    WorkerReport,
)
from elora_connector.integration.vllm.requests import (
    RemoteWait,
    RequestTracker,
    bypass_reason,
    switch,
)
from elora_connector.manager import Job, JobKind
from elora_connector.tiers.base import Health
from elora_connector.transfer.base import ChunkCopy

logger = logging.getLogger("vllm.elora_connector")

KEY_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that scheduler and workers derive from the same vLLM configuration.

    `block_bytes` and so a host slot are per rank; tokens are per block and per chunk.
    """

    block_size: int
    chunk_size: int
    block_bytes: int
    num_blocks: int

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_size // self.block_size

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_chunk


class SchedulerSide:
    """Everything the connector does in the scheduler process.

    Args:
        config: resolved settings.
        geometry: sizes of blocks and chunks.
        parts: tree, manager, ledger, recorder and look-up, from `assembly`.
        namespace: digest of everything that makes KV of two engines interchangeable.
        producer, consumer: from vLLM's `kv_role`.
        clock: seconds, monotonic.
    """

    elora_scheduler_side = True

    def __init__(
        self,
        config: EloraConfig,
        geometry: Geometry,
        parts: SchedulerParts,
        namespace: bytes,
        *,
        producer: bool = True,
        consumer: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.manager = parts.manager
        self.recorder = parts.recorder
        self.pool: PoolView | None = None
        self._stores = producer and config.store
        self._retrieves = consumer and config.retrieve
        self._clock = clock
        self._count_wait = lambda event: self.recorder.add("remote_waits", 1, event)
        self._gate: AdapterGate | None = None
        if parts.ledger is not None:
            count = lambda reason: self.recorder.add("deferrals", 1, reason)  # noqa: E731
            self._gate = AdapterGate(parts.ledger, parts.ranks, config.adapter_deadline_s, count)
        self._remote: RemoteWaits | None = None
        if parts.lookup is not None:
            deadline = config.fetch_deadline_ms / 1000
            self._remote = RemoteWaits(self.manager, parts.lookup, deadline, self._count_wait)
        self._trackers: dict[str, RequestTracker] = {}
        self._tainted: set[RequestTracker] = set()
        self._lifted: set[RequestTracker] = set()
        self._failed: dict[str, str] = {}
        self._loads: list[LoadOrder] = []
        self._load_rate = 8e9  # bytes a second until a load was measured
        self._evictions_seen = 0
        self._enter_namespace(namespace)

    def bind_pool(self, pool: Any) -> None:
        """vLLM hands over its BlockPool once, before the first request."""
        self.pool = PoolView(pool, self.config.store_block_share)

    # ---- requests ------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request was queued: start loading its adapter and looking up its prefix."""
        lora = request.lora_request
        stores = switch(request, "elora.store")
        if switch(request, "lmcache.skip_save"):
            stores = False
        tracker = RequestTracker(
            request=request,
            lora_id=None if lora is None else lora.lora_int_id,
            name="" if lora is None else lora.lora_name,
            bypass=bypass_reason(request),
            stores=self._stores and stores is not False,
            retrieves=self._retrieves and switch(request, "elora.retrieve") is not False,
        )
        self._trackers[tracker.id] = tracker
        if tracker.bypass:
            self.recorder.add("bypassed_requests", 1, tracker.bypass)
        if lora is not None and self._gate is not None:
            waiting = (t.lora_id for t in self._trackers.values() if t.lora_id is not None)
            self._gate.arrived(tracker, waiting)
        self._look_ahead(tracker)

    def _look_ahead(self, tracker: RequestTracker) -> None:
        identity = self._identity(tracker)
        if self._remote is None or identity is None or not self._may_retrieve(tracker):
            return
        keys = self._keys(tracker, identity)
        if keys:
            self._remote.start_early(tracker, self._names, identity, keys)

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """vLLM asks: how many tokens beyond its `local` cached ones can be loaded?

        Returns:
            (tokens, asynchronous); tokens is None when vLLM has to ask again later.
        """
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            self.on_new_request(request)
            tracker = self._trackers[request.request_id]
        if tracker.admitted:
            self._back_to_waiting(tracker)
        now = self._clock()
        if not self._pass_gate(tracker, now):
            tracker.deferrals += 1
            return None, False
        identity = self._identity(tracker)
        if identity is None or not self._may_retrieve(tracker):
            tracker.promised = (local, 0)
            return 0, False
        keys = self._keys(tracker, identity)
        usable = (request.num_tokens - 1) // self.geometry.block_size * self.geometry.block_size
        if self._wants_remote(local, usable, keys) and self._remote is not None:
            if self._remote.must_wait(tracker, self._names, identity, keys, now):
                tracker.deferrals += 1
                self.recorder.add("deferrals", 1, "remote")
                return None, False
        hit = min(self.manager.host_prefix(keys) * self.geometry.chunk_size, usable) - local
        if hit <= 0 or hit < self.config.min_retrieve_tokens:
            hit = 0
        tracker.promised = (local, hit)
        tracker.load_ordered = self._fits_in_step(hit)
        return hit, hit > 0 and not tracker.load_ordered

    def allocated(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """vLLM gave the request its blocks; plan the load that was promised.

        Called a second time with `external` 0 after an asynchronous load.
        """
        tracker = self._trackers[request.request_id]
        now = self._clock()
        if not tracker.admitted:
            self._admit(tracker)
        tracker.blocks = list(block_ids)
        if self.pool is not None and self._gate is not None:
            self.pool.own(tracker.name, block_ids)
        if external > 0:
            self._plan_load(tracker, external, now)
        self.manager.release(tracker.id)

    def finished(self, request: Any) -> None:
        """The request ended or was aborted, in any state."""
        tracker = self._trackers.pop(request.request_id, None)
        if tracker is None:
            return
        self.manager.release(tracker.id)
        self._failed.pop(tracker.id, None)
        self._tainted.discard(tracker)
        self._lifted.discard(tracker)
        if tracker.lora_id is not None and self._gate is not None:
            self._gate.ledger.finished(tracker.id, tracker.lora_id)
        if tracker.tainted and self.pool is not None:
            self.recorder.add("unhashed_blocks", self.pool.unhash(tracker.blocks))

    def take_failed_requests(self) -> list[tuple[str, str]]:
        """(request id, message with status prefix) of requests to end with an error."""
        failed, self._failed = self._failed, {}
        return [(rid, message) for rid, message in failed.items() if rid in self._trackers]

    # ---- steps ---------------------------------------------------------------------

    def build_step(self, scheduler_output: Any) -> StepMetadata:
        """Everything the workers have to do in this step."""
        now = self._clock()
        step = StepMetadata(idle=not scheduler_output.num_scheduled_tokens)
        self._drop_turned_names()
        self._grow_tables(scheduler_output.scheduled_cached_reqs)
        self._plan_stores(scheduler_output, step, now)
        self._keep_tainted_out()
        step.loads, self._loads = self._loads, []
        if self._remote is not None:
            step.fetches = [self._spell_fetch(*started) for started in self._remote.take_started()]
        if self._gate is not None:
            step.orders = self._gate.take_orders()
            step.rpcs = self._gate.ledger.rpcs
            step.protected = frozenset(self._gate.ledger.taken())
            self._restore_skips()
        if self.config.check_invariants:
            self._check()
        return step

    def on_report(self, report: WorkerReport) -> None:
        """Workers' reports of one step, any number of steps old."""
        now = self._clock()
        for rank, part in sorted(report.ranks.items()):
            self._end_jobs(rank, part, now)
        if self._gate is not None:
            parts = {rank: (part.rpcs, part.adapters) for rank, part in report.ranks.items()}
            self._apply(self._gate.report(parts))
        self._gauge()

    @property
    def has_pinned_blocks(self) -> bool:
        """True exactly while a store keeps GPU blocks from vLLM."""
        return self.pool is not None and self.pool.pinned > 0

    def reset(self) -> str:
        """vLLM's `reset_cache`: weights may have changed in ways we cannot see.

        Returns:
            What was done, in words.
        """
        forgotten = self.manager.reset()
        for tracker in self._trackers.values():
            tracker.wait, tracker.lookup, tracker.jobs = RemoteWait.NOT_ASKED, None, set()
            tracker.remote_known, tracker.fetch_from = 0, None
            if tracker.admitted:
                self._taint(tracker)
        done = f"host tier emptied ({forgotten} chunks)"
        if self.config.reset_remote == "keep":
            return done + "; remote tier kept (elora.reset_remote: keep)"
        fresh = digest_fields("elora.reset", [self._namespace, secrets.token_bytes(16)])
        self._enter_namespace(fresh)
        return done + "; this process now uses remote keys of its own, others keep theirs"

    def before_adapter_rpc(self, kind: str, target: Any) -> None:
        """`EngineCore.add_lora`, `remove_lora` or `pin_lora` is about to run."""
        if self._gate is None:
            return
        if isinstance(target, int):
            self._gate.rpc(None, target)
        else:
            self._gate.rpc(target, target.lora_int_id)

    def after_adapter_rpc(self, kind: str, target: Any, ok: bool) -> None:
        """Nothing to do: the workers' next report tells what became of it."""

    def shutdown(self) -> None:
        if self._remote is not None:
            self._remote.close()

    # ---- inside: matching ------------------------------------------------------------

    def _enter_namespace(self, namespace: bytes) -> None:
        self._namespace = namespace
        self._names = RemoteKeys(KEY_SCHEMA, namespace)

    def _identity(self, tracker: RequestTracker) -> Identity | None:
        if self._gate is not None:
            return self._gate.identity(tracker)
        return BASE if tracker.lora_id is None else None

    def _root(self, tracker: RequestTracker, identity: Identity) -> bytes:
        return root_key(self._namespace, identity, tracker.request.cache_salt or None)

    def _keys(self, tracker: RequestTracker, identity: Identity) -> list[ChunkKey]:
        return tracker.prompt_keys(self._root(tracker, identity), self.geometry.chunk_size)

    def _may_retrieve(self, tracker: RequestTracker) -> bool:
        return (
            tracker.retrieves
            and not tracker.bypass
            and not tracker.restore_skip
            and not tracker.request.skip_reading_prefix_cache
        )

    def _wants_remote(self, local: int, usable: int, keys: list[ChunkKey]) -> bool:
        """No look-up when local hits cover what could be used."""
        return bool(keys) and local < min(usable, len(keys) * self.geometry.chunk_size)

    def _fits_in_step(self, tokens: int) -> bool:
        """Is the load short enough for the forward to wait for it?"""
        nbytes = tokens // self.geometry.block_size * self.geometry.block_bytes
        return nbytes / self._load_rate * 1000 <= self.config.sync_load_ms

    def _pass_gate(self, tracker: RequestTracker, now: float) -> bool:
        if tracker.lora_id is None or self._gate is None:
            return True
        if tracker.id in self._failed:
            return False
        passage, reason = self._gate.ask(tracker, now)
        if passage is Passage.FAIL:
            self._fail(tracker, SERVER_BUSY + reason, "adapter_deadline")
            return False
        return self._settle_skip(tracker, passage is Passage.OPEN)

    def _settle_skip(self, tracker: RequestTracker, is_open: bool) -> bool:
        """`skip_reading_prefix_cache` overrides "ask again", so it is lifted while waiting.

        It is put back between steps: at the next ask vLLM then reads no cache.
        """
        request = tracker.request
        if request.skip_reading_prefix_cache:
            if not is_open:
                request.skip_reading_prefix_cache = False
                tracker.restore_skip = True
                self._lifted.add(tracker)
            return is_open
        return is_open and not tracker.restore_skip

    def _restore_skips(self) -> None:
        assert self._gate is not None
        for tracker in list(self._lifted):
            if tracker.lora_id is not None and self._gate.ledger.resident(tracker.lora_id):
                tracker.request.skip_reading_prefix_cache = True
                tracker.restore_skip = False
                self._lifted.discard(tracker)

    def _fail(self, tracker: RequestTracker, message: str, reason: str) -> None:
        self._failed[tracker.id] = message
        self.recorder.add("failed_requests", 1, reason)
        logger.warning("request %s: %s", tracker.id, message)

    # ---- inside: admission -----------------------------------------------------------

    def _admit(self, tracker: RequestTracker) -> None:
        tracker.admitted = True
        tracker.tainted = False
        tracker.next_store = 0
        tracker.identity = self._identity(tracker)
        if tracker.lora_id is not None and self._gate is not None:
            self._gate.ledger.scheduled(tracker.id, tracker.lora_id)
            tracker.load = self._gate.ledger.load(tracker.lora_id)
        self._count_lookup(tracker)

    def _back_to_waiting(self, tracker: RequestTracker) -> None:
        """It was preempted: its KV is gone, it is bound to nothing any more."""
        tracker.admitted = False
        self._tainted.discard(tracker)
        tracker.tainted = False
        tracker.blocks = []
        tracker.wait, tracker.lookup, tracker.fetch_from = RemoteWait.NOT_ASKED, None, None
        tracker.jobs = set()

    def _count_lookup(self, tracker: RequestTracker) -> None:
        if not self._may_retrieve(tracker):
            return
        local, hit = tracker.promised
        total = tracker.request.num_tokens
        name = tracker.name or "base"
        remote = 0
        if tracker.host_before is not None:
            before = max(local, tracker.host_before * self.geometry.chunk_size)
            remote = max(0, local + hit - before)
        self.recorder.add("lookup_tokens", total, name)
        for tier, tokens in (("gpu", local), ("host", hit - remote), ("remote", remote)):
            if tokens:
                self.recorder.add("hit_tokens", tokens, tier, name)
        self.recorder.add("miss_tokens", total - local - hit, name)

    def _plan_load(self, tracker: RequestTracker, external: int, now: float) -> None:
        identity = tracker.identity
        if identity is None:
            raise InvariantError(f"{tracker.id} was promised KV of an unknown adapter")
        local, chunk = tracker.promised[0], self.geometry.chunk_size
        until = local + external
        keys = self._keys(tracker, identity)[: -(-until // chunk)]
        job = self.manager.begin_load(tracker.id, identity, keys, local // chunk, now)
        copies = tuple(
            self._copy(tracker, item.index, item.ref.slot, local, until) for item in job.items
        )
        self._loads.append(LoadOrder(job.id, tracker.id, copies, tracker.load_ordered))
        if self._remote is not None:
            self._remote.lookup.refresh(self._names, identity, keys, now)

    def _copy(
        self, tracker: RequestTracker, index: int, slot: int, local: int, until: int
    ) -> ChunkCopy:
        """The blocks of chunk `index` between tokens `local` and `until`; never a local one."""
        per_chunk, size = self.geometry.blocks_per_chunk, self.geometry.block_size
        first = max(index * per_chunk, local // size)
        last = min((index + 1) * per_chunk, until // size)
        return ChunkCopy(slot, tuple(tracker.blocks[first:last]), first - index * per_chunk)

    # ---- inside: stores --------------------------------------------------------------

    def _grow_tables(self, cached: Any) -> None:
        """New blocks of running requests; resumed ones came through `allocated`."""
        resumed = cached.resumed_req_ids
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracker = self._trackers.get(request_id)
            if new_blocks is None or tracker is None or request_id in resumed:
                continue
            tracker.blocks.extend(new_blocks[0])
            if self.pool is not None and self._gate is not None:
                self.pool.own(tracker.name, new_blocks[0])

    def _plan_stores(self, scheduler_output: Any, step: StepMetadata, now: float) -> None:
        if not self._stores:
            return
        chunk = self.geometry.chunk_size
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is None:
                continue
            request = tracker.request
            # Known tokens only: a draft or placeholder may still turn out otherwise.
            done = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if not self.config.save_decode_cache:
                done = min(done, request.num_prompt_tokens)
            if done // chunk > tracker.next_store and self._may_store(tracker):
                self._plan_store(tracker, done // chunk, step, now)

    def _may_store(self, tracker: RequestTracker) -> bool:
        if not tracker.stores or tracker.bypass or tracker.tainted or tracker.identity is None:
            return False
        if tracker.lora_id is None or self._gate is None:
            return True
        return self._gate.ledger.verified(tracker.lora_id)

    def _plan_store(
        self, tracker: RequestTracker, chunks: int, step: StepMetadata, now: float
    ) -> None:
        identity = tracker.identity
        assert identity is not None
        root = self._root(tracker, identity)
        keys = tracker.keys_upto(root, self.geometry.chunk_size, chunks)
        per_chunk = self.geometry.blocks_per_chunk
        fresh = len(keys) - tracker.next_store
        if self.pool is not None and not self.pool.can_pin(fresh * per_chunk):
            self.recorder.add("stores_dropped", fresh, "pool_share")
            tracker.next_store = len(keys)
            return
        put_from = None if self._remote is None else tracker.remote_known
        plan = self.manager.begin_store(tracker.id, identity, keys, now, put_from=put_from)
        tracker.next_store = plan.until
        if plan.dropped:
            self.recorder.add("stores_dropped", plan.dropped, "host_full")
        if plan.job is not None:
            step.stores.append(self._spell_store(tracker, plan.job, keys, root))

    def _spell_store(
        self, tracker: RequestTracker, job: Job, keys: list[ChunkKey], root: bytes
    ) -> StoreOrder:
        until = len(keys) * self.geometry.chunk_size
        items = []
        for item in job.items:
            copy = self._copy(tracker, item.index, item.ref.slot, 0, until)
            remote = self._remote_chunk(job, item.index, keys, root) if item.put else None
            items.append(StoreItem(item.ref, copy, remote))
        if self.pool is not None:
            self.pool.pin(job.id, [b for item in items for b in item.copy.blocks])
        return StoreOrder(job.id, tuple(items), tracker.lora_id, tracker.load)

    def _spell_fetch(self, job: Job, keys: list[ChunkKey], root: bytes) -> FetchOrder:
        items = (
            FetchItem(item.ref, self._remote_chunk(job, item.index, keys, root))
            for item in job.items
        )
        return FetchOrder(job.id, tuple(items))

    def _remote_chunk(
        self, job: Job, index: int, keys: list[ChunkKey], root: bytes
    ) -> RemoteChunk:
        parent = keys[index - 1] if index else root
        return RemoteChunk(self._namespace, job.identity, keys[index], parent)

    # ---- inside: reports ---------------------------------------------------------------

    def _end_jobs(self, rank: int, part: RankReport, now: float) -> None:
        for job_id, ok in (*part.stores, *part.fetches, *part.loads):
            job = self.manager.finish(job_id, rank, ok)
            if job is not None and job.kind is JobKind.STORE:
                if self.pool is not None:
                    self.pool.unpin(job_id)
                self.recorder.add("chunks_stored", job.ok_items)
            elif job is not None and job.kind is JobKind.LOAD and job.ok_items < len(job.items):
                self.recorder.add("load_failures")
        for ref, ok_put in part.puts:
            self.manager.put_finished(ref, rank, ok_put)
        nbytes, seconds = part.load_rate
        if seconds > 0:
            self._load_rate += 0.3 * (nbytes / seconds - self._load_rate)

    def _apply(self, outcome: ReportOutcome) -> None:
        if not (outcome.tainted or outcome.failures or outcome.changed):
            return
        for tracker in list(self._trackers.values()):
            if tracker.lora_id in outcome.tainted and tracker.admitted:
                self._taint(tracker)
            if tracker.lora_id in outcome.failures and not tracker.admitted:
                self._fail_waiting(tracker, outcome.failures[tracker.lora_id])
        for name in outcome.changed:
            self._drop(name)

    def _fail_waiting(self, tracker: RequestTracker, error: str) -> None:
        """An adapter's order failed: only requests that need its result end with it."""
        assert self._gate is not None and tracker.lora_id is not None
        if tracker.checks_adapter or not self._gate.ledger.usable(tracker.lora_id):
            self._fail(tracker, CLIENT_ERROR + error, "adapter_load")

    def _taint(self, tracker: RequestTracker) -> None:
        tracker.tainted = True
        self._tainted.add(tracker)

    def _drop(self, name: str) -> None:
        if self.pool is not None:
            self.recorder.add("unhashed_blocks", self.pool.drop(name))

    def _drop_turned_names(self) -> None:
        if self._gate is None:
            return
        for name, digest in self._gate.take_turns().items():
            for tracker in self._trackers.values():
                bound = tracker.identity
                if tracker.admitted and bound and bound.name == name and bound.digest != digest:
                    self._taint(tracker)
            self._drop(name)

    def _keep_tainted_out(self) -> None:
        """vLLM goes on hashing blocks of running requests, in every schedule()."""
        if self.pool is not None:
            for tracker in self._tainted:
                self.recorder.add("unhashed_blocks", self.pool.unhash(tracker.blocks))

    def _gauge(self) -> None:
        record, manager = self.recorder, self.manager
        record.set("host_chunks", manager.slots.used)
        record.set("host_capacity_chunks", manager.slots.capacity)
        if manager.evictions > self._evictions_seen:
            record.add("evictions", manager.evictions - self._evictions_seen, "host")
            self._evictions_seen = manager.evictions
        if self._gate is not None:
            in_slot, in_host = self._gate.ledger.counts()
            record.set("resident_adapters", in_slot, "gpu")
            record.set("resident_adapters", in_host, "host")
        if self._remote is not None:
            degraded = self._remote.lookup.tier.health() is not Health.CLOSED
            record.set("remote_degraded", float(degraded))

    def _check(self) -> None:
        check_tree(self.manager.tree)
        self.manager.check()

