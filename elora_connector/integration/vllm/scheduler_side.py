"""Scheduler side of the connector: decides, plans, promises; moves no bytes.

Lives in vLLM's EngineCore process; every method is called by its one scheduler thread.
See docs/architecture.md for the walk of a request through it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from elora_connector.assembly import SchedulerParts
from elora_connector.config import EloraConfig
from elora_connector.core.invariants import check_tree
from elora_connector.core.keys import KEY_SCHEMA, RemoteKeys, digest_fields, root_key
from elora_connector.core.types import BASE, ChunkKey, Identity
from elora_connector.errors import InvariantError
from elora_connector.integration.vllm.adapter_side import AdapterSide
from elora_connector.integration.vllm.block_pool import PoolView, disguise
from elora_connector.integration.vllm.fetching import RemoteWaits
from elora_connector.integration.vllm.geometry import Geometry
from elora_connector.integration.vllm.gpu_prefetch import Prefetcher, make_prefetcher
from elora_connector.integration.vllm.gpu_view import GpuView
from elora_connector.integration.vllm.kv_stats import KvStats
from elora_connector.integration.vllm.metadata import (
    LoadOrder,
    RankReport,
    StepMetadata,
    StoreOrder,
    WorkerReport,
)
from elora_connector.integration.vllm.meter import Meter
from elora_connector.integration.vllm.requests import (
    RemoteWait,
    RequestTracker,
    bypass_reason,
    switch,
)
from elora_connector.integration.vllm.retrieval import Retrieval
from elora_connector.integration.vllm.stores import StorePlanner, fetch_order
from elora_connector.manager import Job, JobKind

logger = logging.getLogger("vllm.elora_connector")


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
        self.gpu: GpuView | None = None
        self.prefetch: Prefetcher | None = None
        self._stores = producer and config.store
        self._retrieves = consumer and config.retrieve
        self._clock = clock
        self._trackers: dict[str, RequestTracker] = {}
        self._adapters: AdapterSide | None = None
        if parts.adapters is not None:
            self._adapters = AdapterSide(
                parts.adapters,
                self.manager,
                self._trackers,
                self.recorder,
                ranks=parts.ranks,
                deadline_s=config.adapter_deadline_s,
                ahead=config.adapter_prefetch,
            )
        self._rates = parts.scoring.rates
        self._meter = Meter(parts.scoring, self._trackers)
        self._retrieval = Retrieval(config, geometry, self.manager, self._rates)
        self._remote: RemoteWaits | None = None
        if parts.lookup is not None:
            deadline_s = config.fetch_deadline_ms / 1000
            self._remote = RemoteWaits(
                self.manager, parts.lookup, deadline_s, self._retrieval, self._count_wait
            )
        self._loads: list[LoadOrder] = []
        self._kv_stats = KvStats(self.manager, self.recorder)
        self._drain = False
        self._planner = StorePlanner(
            self.manager,
            geometry,
            self.recorder,
            decode=config.save_decode_cache,
            remote=self._remote is not None,
        )
        self._enter_namespace(namespace)

    def bind_pool(self, pool: Any) -> None:
        """vLLM hands over its BlockPool once, before the first request."""
        self.pool = PoolView(pool, self.config.store_block_share)
        self._planner.pool = self.pool
        if self._adapters is not None:
            self._adapters.pool = self.pool
        if pool.enable_caching:
            self.gpu = GpuView(
                pool,
                self.pool,
                self.manager,
                None if self._adapters is None else self._adapters.ledger,
                self.recorder,
                blocks_per_chunk=self.geometry.blocks_per_chunk,
                checks=self.config.check_invariants,
            )
            if self.config.prefetch and self._stores and self._retrieves:
                self.prefetch = make_prefetcher(
                    self.gpu,
                    self._may_publish,
                    self.config,
                    self.geometry,
                    job_bytes=int(self._rates.host_to_gpu.per_s * self.config.sync_load_ms / 1000),
                )

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
        if self._adapters is not None:
            self._adapters.arrived(tracker, self._clock())
        self._look_ahead(tracker)

    def _look_ahead(self, tracker: RequestTracker) -> None:
        identity = self._identity(tracker)
        if self._remote is None or identity is None or not self._may_retrieve(tracker):
            return
        keys = self._keys(tracker, identity)
        request, chunk = tracker.request, self.geometry.chunk_size
        usable = min(len(keys) * chunk, request.num_tokens - 1) // self.geometry.block_size
        if self.pool is not None and self.pool.has_prefix(request, usable):
            return  # vLLM has it all; if it is gone by then, the first ask looks it up
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
        if self._adapters is not None and not self._adapters.passes(tracker, now):
            return None, False
        try:
            return self._promise(tracker, local, now)
        except InvariantError as error:
            self._recover(error)
            tracker.promised = (local, 0)
            return 0, False

    def _promise(self, tracker: RequestTracker, local: int, now: float) -> tuple[int | None, bool]:
        identity = self._identity(tracker)
        if identity is None or not self._may_retrieve(tracker):
            tracker.promised = (local, 0)
            return 0, False
        keys = self._keys(tracker, identity)
        tracker.local = local
        if self._waits_for_remote(tracker, identity, keys, now):
            self.recorder.add("deferrals", 1, "remote")
            return None, False
        covered = self.manager.host_prefix(keys) * self.geometry.chunk_size
        hit = min(covered, self._retrieval.usable(tracker)) - local
        if not self._retrieval.load(tracker, hit, now):
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
        known = len(tracker.blocks)
        if not tracker.admitted:
            self._admit(tracker, now)
        tracker.blocks = list(block_ids)
        if self._adapters is not None:
            self._adapters.got_blocks(tracker, tracker.blocks)
        if self.gpu is not None:
            self._note_hits(tracker, known, self.gpu)
        if external > 0:
            self._plan_load(tracker, external, now)
        self.manager.release(tracker.id)

    def finished(self, request: Any) -> None:
        """The request ended or was aborted, in any state."""
        tracker = self._trackers.pop(request.request_id, None)
        if tracker is None:
            return
        self.manager.release(tracker.id)
        if self._remote is not None:
            self._remote.forget(tracker)
        if tracker.admitted:
            self._note_chunks(tracker, 0)
            if self._may_store(tracker):
                self._planner.ended(tracker)
        if self._adapters is not None:
            self._adapters.finished(tracker)

    def take_failed_requests(self) -> list[tuple[str, str]]:
        """(request id, message with status prefix) of requests to end with an error."""
        return [] if self._adapters is None else self._adapters.take_failed()

    def take_restarts(self) -> list[str]:
        """Requests to begin anew if they are still waiting for an asynchronous load."""
        return [] if self._adapters is None else self._adapters.take_restarts()

    # ---- steps ---------------------------------------------------------------------

    def build_step(self, scheduler_output: Any) -> StepMetadata:
        """Everything the workers have to do in this step."""
        now = self._clock()
        step = StepMetadata(idle=not scheduler_output.num_scheduled_tokens, drain=self._drain)
        self._drain = False
        if self._adapters is not None:
            self._adapters.before_step()
        self._grow_tables(scheduler_output.scheduled_cached_reqs)
        if self._remote is not None:
            self._remote.learn()
        self._plan_stores(scheduler_output, step, now)
        step.loads, self._loads = self._loads, []
        self._meter.scheduled(step, scheduler_output, now)
        if self._remote is not None:
            step.fetches = [
                fetch_order(self._namespace, *started) for started in self._remote.take_started()
            ]
        if self._adapters is not None:
            self._adapters.fill(step, now)
        if self.prefetch is not None:
            self._prefetch(self.prefetch, step, len(scheduler_output.num_scheduled_tokens), now)
        if self.gpu is not None:
            self.gpu.before_step(now, len(scheduler_output.num_scheduled_tokens) + 1)
        if self.config.check_invariants:
            self._check()
        return step

    def on_report(self, report: WorkerReport) -> None:
        """Workers' reports of one step, any number of steps old."""
        self._meter.reported(report, self._clock())
        try:
            for rank, part in sorted(report.ranks.items()):
                self._end_jobs(rank, part)
        except InvariantError as error:
            self._recover(error)
        if self._adapters is not None:
            self._adapters.on_report(report, self._clock())
        if self.gpu is not None:
            self.gpu.after_step()
        self._gauge()

    @property
    def has_pinned_blocks(self) -> bool:
        """True exactly while a store or a prefetch keeps GPU blocks from vLLM."""
        if self.prefetch is not None and self.prefetch.open:
            return True
        return self.pool is not None and self.pool.pinned > 0

    @property
    def has_pending_work(self) -> bool:
        """Must the engine go on stepping although it has no request?"""
        if self.prefetch is not None and self.prefetch.wants_step:
            return True
        return self.has_pinned_blocks

    def set_paused(self, paused: bool) -> None:
        """vLLM stops or goes on scheduling new requests."""
        if self.prefetch is not None:
            self.prefetch.paused = paused

    def reset(self) -> str:
        """vLLM's `reset_cache`: weights may have changed in ways we cannot see.

        Returns:
            What was done, in words.
        """
        forgotten = self._forget_chunks()
        for tracker in self._trackers.values():
            if tracker.admitted:
                self._taint(tracker)
        done = f"host tier emptied ({forgotten} chunks)"
        if self.config.reset_remote == "keep":
            return done + "; remote tier kept (elora.reset_remote: keep)"
        fresh = digest_fields("elora.reset", [self._namespace, secrets.token_bytes(16)])
        self._enter_namespace(fresh)
        return done + "; this process now uses remote keys of its own, others keep theirs"

    def before_adapter_rpc(self, kind: str, target: Any) -> frozenset[int] | None:
        """`EngineCore.add_lora`, `remove_lora` or `pin_lora` is about to run.

        Returns:
            Adapters that it may not take out.
        """
        return None if self._adapters is None else self._adapters.before_rpc(target)

    def after_adapter_rpc(self, kind: str, target: Any, ok: bool) -> None:
        """Nothing to do: the workers' next report tells what became of it."""

    def shutdown(self) -> None:
        if self._remote is not None:
            self._remote.close()

    # ---- inside: matching ------------------------------------------------------------

    def _enter_namespace(self, namespace: bytes) -> None:
        self._namespace = namespace
        self._names = RemoteKeys(KEY_SCHEMA, namespace)
        self._planner.namespace = namespace

    def _identity(self, tracker: RequestTracker) -> Identity | None:
        if self._adapters is not None:
            return self._adapters.identity(tracker)
        return BASE if tracker.lora_id is None else None

    def _root(self, tracker: RequestTracker, identity: Identity | None = None) -> bytes:
        bound = identity or tracker.identity
        assert bound is not None
        return root_key(self._namespace, bound, tracker.request.cache_salt or None)

    def _keys(self, tracker: RequestTracker, identity: Identity) -> list[ChunkKey]:
        return tracker.prompt_keys(self._root(tracker, identity), self.geometry.chunk_size)

    def _may_retrieve(self, tracker: RequestTracker) -> bool:
        return (
            tracker.retrieves
            and not tracker.bypass
            and not tracker.restore_skip
            and not tracker.request.skip_reading_prefix_cache
        )

    def _waits_for_remote(
        self,
        tracker: RequestTracker,
        identity: Identity,
        keys: list[ChunkKey],
        now: float,
    ) -> bool:
        """No look-up when local hits cover (nearly) all that could be used."""
        if self._remote is None or not self._retrieval.enough(tracker, len(keys)):
            return False
        return self._remote.must_wait(tracker, self._names, identity, keys, now)

    def _fits_in_step(self, tokens: int) -> bool:
        """Is the load short enough for the forward to wait for it?"""
        nbytes = tokens // self.geometry.block_size * self.geometry.block_bytes
        return self._rates.load_s(nbytes) * 1000 <= self.config.sync_load_ms

    # ---- inside: admission -----------------------------------------------------------

    def _admit(self, tracker: RequestTracker, now: float) -> None:
        tracker.admitted = True
        tracker.tainted = False
        tracker.next_store = 0
        tracker.identity = self._identity(tracker)
        if self._adapters is not None:
            self._adapters.admitted(tracker, now)
        self._count_lookup(tracker)

    def _back_to_waiting(self, tracker: RequestTracker) -> None:
        """It was preempted: its KV is gone, it is bound to nothing any more."""
        tracker.admitted = False
        if self._adapters is not None:
            self._adapters.preempted(tracker)
        tracker.tainted = False
        tracker.blocks, tracker.gpu_chunks = [], 0
        tracker.wait, tracker.lookup, tracker.fetch_from = RemoteWait.NOT_ASKED, None, None
        tracker.host_before = None
        tracker.jobs, tracker.choices = set(), {}

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
        for choice in tracker.choices.items():
            self.recorder.add("load_or_recompute", 1, *choice)

    def _plan_load(self, tracker: RequestTracker, external: int, now: float) -> None:
        identity = tracker.identity
        if identity is None:
            raise InvariantError(f"{tracker.id} was promised KV of an unknown adapter")
        local, chunk = tracker.promised[0], self.geometry.chunk_size
        until = local + external
        keys = self._keys(tracker, identity)[: -(-until // chunk)]
        job = self.manager.begin_load(tracker.id, identity, keys, local // chunk, now)
        copies = tuple(
            self.geometry.copy(tracker.blocks, item.index, item.ref.slot, local, until)
            for item in job.items
        )
        self._loads.append(LoadOrder(job.id, tracker.id, copies, tracker.load_ordered))
        if self._remote is not None:
            self._remote.lookup.refresh(self._names, identity, keys, now)

    # ---- inside: stores --------------------------------------------------------------

    def _note_hits(self, tracker: RequestTracker, known: int, gpu: GpuView) -> None:
        """Which chunks the blocks hold that vLLM had, and those that are about to be loaded."""
        local, external = tracker.promised
        gpu.given(tracker, known or local // self.geometry.block_size)
        if not known:
            gpu.hit(tracker, local // self.geometry.block_size)
        hits = (local + external) // self.geometry.chunk_size
        if hits and tracker.identity is not None and not tracker.bypass:
            gpu.complete(tracker, self._keys(tracker, tracker.identity)[:hits])

    def _grow_tables(self, cached: Any) -> None:
        """New blocks of running requests; resumed ones came through `allocated`."""
        resumed = cached.resumed_req_ids
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracker = self._trackers.get(request_id)
            if new_blocks is None or tracker is None or request_id in resumed:
                continue
            tracker.blocks.extend(new_blocks[0])
            if self._adapters is not None:
                self._adapters.got_blocks(tracker, new_blocks[0])
            if self.gpu is not None:
                self.gpu.given(tracker, len(tracker.blocks) - len(new_blocks[0]))

    def _plan_stores(self, scheduler_output: Any, step: StepMetadata, now: float) -> None:
        if not self._stores:
            return
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is None or not self._planner.due(tracker, scheduled):
                continue
            if self._may_store(tracker):
                self._note_chunks(tracker, scheduled)
                try:
                    order = self._planner.plan(tracker, scheduled, self._root(tracker), now)
                except InvariantError as error:
                    self._recover(error)
                    return
                if order is not None:
                    step.stores.append(order)
                    self._keep_ancestors(tracker, order, now)

    def _keep_ancestors(self, tracker: RequestTracker, order: StoreOrder, now: float) -> None:
        """What new remote chunks hang on must live as long; GPU hits alone do not refresh it."""
        new = next((item.remote.chunk for item in order.items if item.remote is not None), None)
        if self._remote is None or new is None or tracker.identity is None:
            return
        keys = self._keys(tracker, tracker.identity)
        self._remote.lookup.refresh(self._names, tracker.identity, keys[: keys.index(new)], now)

    def _note_chunks(self, tracker: RequestTracker, scheduled: int) -> None:
        """Which chunks the request's blocks hold, all it has computed by the end of the step."""
        if self.gpu is None or tracker.identity is None or tracker.bypass or tracker.tainted:
            return
        chunks = self._planner.full_chunks(tracker, scheduled)
        if chunks > tracker.gpu_chunks:
            size = self.geometry.chunk_size
            self.gpu.complete(tracker, tracker.keys_upto(self._root(tracker), size, chunks))

    def _prefetch(self, prefetch: Prefetcher, step: StepMetadata, running: int, now: float) -> None:
        """Demand comes first: nothing is prefetched while a request waits for anything."""
        if self.manager.demanded or any(not t.admitted for t in self._trackers.values()):
            return
        order = prefetch.plan(now, idle=step.idle, running=running)
        if order is not None:
            step.prefetches.append(order)

    def _may_publish(self, lora_id: int | None, identity: Identity) -> bool:
        if self._adapters is None:
            return lora_id is None
        return self._adapters.may_publish(lora_id, identity)

    def _may_store(self, tracker: RequestTracker) -> bool:
        if not tracker.stores or tracker.bypass or tracker.tainted or tracker.identity is None:
            return False
        return self._adapters is None or self._adapters.may_store(tracker)

    # ---- inside: reports ---------------------------------------------------------------

    def _end_jobs(self, rank: int, part: RankReport) -> None:
        for job_id, ok in (*part.stores, *part.fetches, *part.loads, *part.prefetches):
            job = self.manager.finish(job_id, rank, ok)
            if job is not None and job.kind is JobKind.STORE:
                if self.pool is not None:
                    self.pool.unpin(job_id)
                self.recorder.add("chunks_stored", job.ok_items)
            elif job is not None and job.kind is JobKind.PREFETCH and self.prefetch is not None:
                self.prefetch.ended(job)
            elif job is not None and job.kind is JobKind.LOAD and job.ok_items < len(job.items):
                self._load_failed(job)
        for ref, ok_put in part.puts:
            self.manager.put_finished(ref, rank, ok_put)

    def _load_failed(self, job: Job) -> None:
        """vLLM asks again for this request: what fails once more would keep it for ever."""
        self.recorder.add("load_failures")
        tracker = self._trackers.get(job.request_id)
        if tracker is not None:
            tracker.retrieves = False

    def _taint(self, tracker: RequestTracker) -> None:
        if self._adapters is not None:
            self._adapters.taint(tracker)
        else:
            tracker.tainted = True
            disguise(tracker.request)

    def _count_wait(self, event: str) -> None:
        self.recorder.add("remote_waits", 1, event)

    def _gauge(self) -> None:
        record = self.recorder
        self._kv_stats.step(self._clock())
        if self._adapters is not None:
            in_slot, in_host = self._adapters.ledger.counts()
            record.set("resident_adapters", in_slot, "gpu")
            record.set("resident_adapters", in_host, "host")
        if self._remote is not None:
            record.set("remote_degraded", float(self._remote.lookup.degraded))

    def release_blocks(self) -> None:
        """Give vLLM back every block that a store still reads or a prefetch still writes.

        The workers finish those copies before their next forward, so neither a copy nor
        a block can be overwritten.
        """
        if self.prefetch is not None and self.prefetch.abandon():
            self._drain = True
        if self.has_pinned_blocks and self.pool is not None:
            self.pool.unpin_all()
            self._drain = True

    def _recover(self, error: InvariantError) -> None:
        """A rule of ours was broken: tell it where asked to, else start the tier anew."""
        if self.config.check_invariants:
            raise error
        logger.error("invariant broken, the host tier is emptied: %s", error, exc_info=error)
        self.recorder.add("invariant_failures")
        self.release_blocks()
        self._forget_chunks()

    def _forget_chunks(self) -> int:
        for tracker in self._trackers.values():
            tracker.wait, tracker.lookup, tracker.jobs = RemoteWait.NOT_ASKED, None, set()
            tracker.remote_known, tracker.fetch_from = 0, None
        if self.prefetch is not None:
            self.prefetch.distrust()
        return self.manager.reset()

    def _check(self) -> None:
        check_tree(self.manager.tree)
        self.manager.check()
        if self._adapters is not None:
            self._adapters.check()
        if self.gpu is not None:
            self.gpu.check()
