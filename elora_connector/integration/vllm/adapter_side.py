"""Adapters on the scheduler side: who passes the gate, and what happens when weights change.

Three duties besides the gate itself: a request whose adapter cannot be had ends with a
message; a request that ran across a change of weights is *tainted* (nothing of it is
stored, its blocks are kept out of vLLM's prefix cache); cached GPU blocks of replaced
weights are un-hashed before anybody can hit them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from elora_connector.assembly import AdapterParts
from elora_connector.core.adapter_nodes import check_nodes
from elora_connector.core.types import BASE, Identity
from elora_connector.integration.vllm.adapter_stats import AdapterStats
from elora_connector.integration.vllm.adapters_ahead import AdaptersAhead
from elora_connector.integration.vllm.block_pool import PoolView, disguise
from elora_connector.integration.vllm.compat import CLIENT_ERROR, SERVER_BUSY
from elora_connector.integration.vllm.gate import AdapterGate, Passage
from elora_connector.integration.vllm.metadata import StepMetadata, WorkerReport
from elora_connector.integration.vllm.requests import RequestTracker
from elora_connector.manager import Manager
from elora_connector.metrics import Recorder

logger = logging.getLogger("vllm.elora_connector")


class AdapterSide:
    """What the scheduler side does about adapters; one per engine with LoRA.

    Args:
        trackers: all live requests, kept by the scheduler side.
        ranks: workers that report.
        deadline_s: longest wait of a request for its adapter.
        ahead: bring adapters closer ahead of need.

    Attributes:
        pool: vLLM's block pool, once it is bound.
    """

    def __init__(
        self,
        parts: AdapterParts,
        manager: Manager,
        trackers: Mapping[str, RequestTracker],
        recorder: Recorder,
        *,
        ranks: int,
        deadline_s: float,
        ahead: bool,
    ) -> None:
        self.ledger = ledger = parts.ledger
        self.nodes = parts.nodes
        self._manager = manager
        self.pool: PoolView | None = None
        self._trackers = trackers
        self._recorder = recorder
        self._gate = AdapterGate(ledger, ranks, deadline_s, self._count_deferral)
        self._stats = AdapterStats(parts, manager.tree, recorder)
        self._ahead: AdaptersAhead | None = None
        if ahead:
            self._ahead = AdaptersAhead(
                parts,
                recorder,
                known=self._gate.can_load,
                waits=self._anybody_waits,
                patience_s=deadline_s,
            )
        self._tainted: set[RequestTracker] = set()
        self._lifted: set[RequestTracker] = set()
        self._failed: dict[str, str] = {}
        self._restart: list[str] = []

    # ---- requests ------------------------------------------------------------------

    def arrived(self, tracker: RequestTracker, now: float) -> None:
        """Start loading the request's adapter, or looking at its files, at once."""
        self.nodes.now = now
        if tracker.lora_id is not None:
            if self._ahead is not None:
                self._ahead.used(tracker.lora_id)
            self._gate.arrived(tracker)

    def identity(self, tracker: RequestTracker) -> Identity | None:
        """Whose KV the request may use; None while its weights are not known."""
        return BASE if tracker.lora_id is None else self.ledger.identity(tracker.lora_id)

    def passes(self, tracker: RequestTracker, now: float) -> bool:
        """May KV of this request be surfaced in this schedule()?  Base always may."""
        if tracker.lora_id is None:
            return True
        if tracker.id in self._failed:
            return False
        self.nodes.now = now
        passage, reason = self._gate.ask(tracker, now)
        if passage is Passage.FAIL:
            self._fail(tracker, SERVER_BUSY + reason, "adapter_deadline")
            return False
        return self._settle_skip(tracker, passage is Passage.OPEN)

    def admitted(self, tracker: RequestTracker, now: float) -> None:
        """The request got its blocks: bind it to the weights that are loaded now."""
        if tracker.lora_id is not None:
            self.ledger.scheduled(tracker.id, tracker.lora_id)
            self.nodes.touch(tracker.lora_id, now)
            tracker.load = self.ledger.load(tracker.lora_id)

    def got_blocks(self, tracker: RequestTracker, block_ids: list[int]) -> None:
        """Note whose KV will be in these GPU blocks."""
        if self.pool is not None:
            self.pool.own(tracker.name, block_ids)

    def preempted(self, tracker: RequestTracker) -> None:
        """Its KV is gone, so it mixes nothing any more."""
        self._tainted.discard(tracker)
        tracker.tainted = False

    def may_store(self, tracker: RequestTracker) -> bool:
        """False while the weights behind the request's KV are in doubt."""
        if tracker.tainted:
            return False
        return tracker.lora_id is None or self.ledger.verified(tracker.lora_id)

    def may_publish(self, lora_id: int | None, identity: Identity) -> bool:
        """Is the adapter there, and do its blocks in vLLM's cache have these weights?"""
        if lora_id is None:
            return True
        return (
            self.ledger.resident(lora_id)
            and self.ledger.identity(lora_id) == identity
            and self._gate.cached_as(identity)
        )

    def finished(self, tracker: RequestTracker) -> None:
        """The request ended, in any state."""
        self._failed.pop(tracker.id, None)
        self._tainted.discard(tracker)
        self._lifted.discard(tracker)
        if tracker.lora_id is not None:
            self.ledger.finished(tracker.id, tracker.lora_id)
            if not tracker.admitted and tracker.lora_id not in self._live_ids():
                self.ledger.cancel(tracker.lora_id)
        if tracker.tainted:
            self._unhash(tracker)

    def taint(self, tracker: RequestTracker) -> None:
        """Its KV is from more than one set of weights from now on."""
        tracker.tainted = True
        self._tainted.add(tracker)
        disguise(tracker.request)
        self._unhash(tracker)
        self._restart.append(tracker.id)

    def take_restarts(self) -> list[str]:
        """Requests that, if they only wait for a load yet, should begin anew.

        Their KV is of the old weights and their first forward would use the new ones.
        """
        restart, self._restart = self._restart, []
        return restart

    def take_failed(self) -> list[tuple[str, str]]:
        """(request id, message with HTTP status) of requests to end with an error."""
        failed, self._failed = self._failed, {}
        return [(rid, message) for rid, message in failed.items() if rid in self._trackers]

    # ---- steps ---------------------------------------------------------------------

    def before_step(self) -> None:
        """After vLLM scheduled, before the step is described."""
        for name, digest in self._gate.take_turns().items():
            for tracker in self._trackers.values():
                bound = tracker.identity
                if tracker.admitted and bound and bound.name == name and bound.digest != digest:
                    self.taint(tracker)
            self._drop(name)

    def fill(self, step: StepMetadata, now: float) -> None:
        """Orders for the workers; then what must be done in every step."""
        self.nodes.now = now
        if self._ahead is not None:
            self._ahead.step(now)
        self._stats.step(now)
        step.orders = self._gate.take_orders(self._live_ids)
        step.grants = tuple(self.ledger.orders.take_grants())
        ahead = None if self._ahead is None else self._ahead.current
        self._stats.shipped(step.orders, step.grants, ahead)
        step.cancelled = tuple(self.ledger.orders.take_cancelled())
        step.rpcs = self.ledger.rpcs
        step.protected = frozenset(self.ledger.taken())
        self._restore_skips()
        for tracker in self._tainted:
            self._unhash(tracker)  # nobody can hit them: make them the first to be reused

    def on_report(self, report: WorkerReport, now: float) -> None:
        """Take in what the ranks say of their adapters."""
        self.nodes.now = now
        outcome = self._gate.report(
            {rank: (part.rpcs, part.adapters) for rank, part in report.ranks.items()}
        )
        if outcome.tainted or outcome.failures:
            for tracker in list(self._trackers.values()):
                if tracker.lora_id in outcome.tainted and tracker.admitted:
                    self.taint(tracker)
                if tracker.lora_id in outcome.failures and not tracker.admitted:
                    self._fail_waiting(tracker, outcome.failures[tracker.lora_id])
        for name in outcome.changed:
            self._drop(name)
        self._manager.trim(now)  # weights are measured once they are loaded

    def check(self) -> None:
        """The nodes are where the ledger says; raises InvariantError."""
        check_nodes(self._manager.tree, self.ledger, self.nodes)

    def before_rpc(self, target: Any) -> frozenset[int]:
        """vLLM is about to add, pin or remove an adapter past the scheduler.

        Returns:
            Adapters that are in use or held, which the call may not take out.
        """
        if isinstance(target, int):
            self._gate.rpc(None, target)
            if self._ahead is not None:
                self._ahead.removed(target)
        else:
            self._gate.rpc(target, target.lora_int_id)
        return frozenset(self.ledger.taken())

    def _anybody_waits(self) -> bool:
        return any(t.lora_id is not None and not t.admitted for t in self._trackers.values())

    def _live_ids(self) -> set[int]:
        return {t.lora_id for t in self._trackers.values() if t.lora_id is not None}

    # ---- inside ----------------------------------------------------------------------

    def _settle_skip(self, tracker: RequestTracker, is_open: bool) -> bool:
        """`skip_reading_prefix_cache` overrides "ask again", so it is lifted while waiting.

        It is put back between steps: at the next ask vLLM then reads no cache.
        """
        request = tracker.request
        if not request.skip_reading_prefix_cache:
            return is_open and not tracker.restore_skip
        if not is_open:
            request.skip_reading_prefix_cache = False
            tracker.restore_skip = True
            self._lifted.add(tracker)
        return is_open

    def _restore_skips(self) -> None:
        for tracker in list(self._lifted):
            if tracker.lora_id is not None and self.ledger.resident(tracker.lora_id):
                tracker.request.skip_reading_prefix_cache = True
                tracker.restore_skip = False
                self._lifted.discard(tracker)

    def _fail_waiting(self, tracker: RequestTracker, error: str) -> None:
        """An adapter's order failed: only requests that need its result end with it."""
        assert tracker.lora_id is not None
        if tracker.checks_adapter or not self.ledger.usable(tracker.lora_id):
            self._fail(tracker, CLIENT_ERROR + error, "adapter_load")

    def _fail(self, tracker: RequestTracker, message: str, reason: str) -> None:
        self._failed[tracker.id] = message
        self._recorder.add("failed_requests", 1, reason)
        logger.warning("request %s: %s", tracker.id, message)

    def _count_deferral(self, reason: str) -> None:
        self._recorder.add("deferrals", 1, reason)

    def _drop(self, name: str) -> None:
        if self.pool is not None:
            self._recorder.add("unhashed_blocks", self.pool.drop(name))

    def _unhash(self, tracker: RequestTracker) -> None:
        if self.pool is not None:
            self._recorder.add("unhashed_blocks", self.pool.unhash(tracker.blocks))
