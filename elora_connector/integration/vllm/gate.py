"""The gate: no KV of an adapter is surfaced before its weights are resident and known.

Joins the pure `AdapterLedger` with vLLM's world: LoRA requests, worker reports of
several ranks, calls that go past the scheduler, and the rule that one adapter *name*
has one content in the GPU prefix cache at a time (vLLM hashes names, not contents).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from elora_connector.core.adapter_orders import Acks, Check, Gate, Loaded, Order
from elora_connector.core.ledger import AdapterLedger
from elora_connector.core.types import Identity
from elora_connector.integration.vllm.adapter_messages import AdapterOrder, AdapterReport, Verify
from elora_connector.integration.vllm.requests import RequestTracker

_IDLE_ENTRIES_KEPT = 4096
_VERIFY = {Check.NONE: Verify.NO, Check.IF_CHANGED: Verify.IF_CHANGED, Check.ALWAYS: Verify.ALWAYS}


class Passage(enum.Enum):
    """What the scheduler does with a request now."""

    OPEN = "open"
    WAIT = "wait"
    FAIL = "fail"


@dataclass(slots=True)
class ReportOutcome:
    """What a round of adapter reports changed.

    `changed`: names whose cached GPU blocks must go.  `tainted`: ids whose running
    requests mix two loads.  `failures`: id -> message, for the requests that wait.
    """

    changed: set[str] = field(default_factory=set)
    tainted: set[int] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)


class AdapterGate:
    """One per scheduler; None of its methods does I/O.

    Args:
        ledger: slot bookkeeping.
        ranks: how many workers report.
        deadline_s: how long a request may wait for its adapter to load.
        count: called with (counter suffix, reason) for refusals and deferrals.
    """

    def __init__(
        self,
        ledger: AdapterLedger,
        ranks: int,
        deadline_s: float,
        count: Callable[[str], None],
    ) -> None:
        self.ledger = ledger
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._count = count
        self._requests: dict[int, Any] = {}
        self._reports: dict[int, AdapterReport] = {}
        self._rank_rpcs: dict[int, int] = {}
        self._loads: dict[int, Loaded] = {}
        self._cached: dict[str, bytes] = {}
        """Digest of each name whose blocks may be in the GPU prefix cache."""
        self._turning: dict[str, bytes] = {}
        self._disputed: set[int] = set()
        """Ids that the ranks have different contents of, being read again."""

    # ---- requests ---------------------------------------------------------------

    def can_load(self, lora_id: int) -> bool:
        """Was a request for this id ever seen, so that it is known where its files are?"""
        return lora_id in self._requests

    def arrived(self, tracker: RequestTracker) -> None:
        """A LoRA request came in: start reading, and looking at changed files, at once."""
        lora = tracker.request.lora_request
        self._requests[lora.lora_int_id] = lora
        tracker.checks_adapter = bool(lora.load_inplace)
        check = Check.IF_CHANGED if lora.load_inplace else Check.NONE
        self.ledger.register(lora.lora_int_id, lora.lora_name, check)
        self.ledger.read_ahead(lora.lora_int_id)

    def ask(self, tracker: RequestTracker, now: float) -> tuple[Passage, str]:
        """May a LoRA request's KV be surfaced now?  With the reason when not (idempotent)."""
        assert tracker.lora_id is not None
        gate = self.ledger.admit(tracker.id, tracker.lora_id, now)
        if gate is Gate.READY:
            tracker.adapter_since = None
            return self._ask_name(tracker)
        self._count(gate.value)
        if gate is Gate.PINNED:
            return Passage.FAIL, (
                f"adapter '{tracker.name}' cannot get a GPU slot: all {self.ledger.slots} "
                "(--max-loras) hold pinned adapters"
            )
        if gate in (Gate.LOADING, Gate.SUSPENDED):
            return self._ask_clock(tracker, now)
        tracker.adapter_since = None
        return Passage.WAIT, gate.value

    def _ask_name(self, tracker: RequestTracker) -> tuple[Passage, str]:
        assert tracker.lora_id is not None
        identity = self.ledger.identity(tracker.lora_id)
        assert identity is not None
        cached = self._cached.setdefault(identity.name, identity.digest)
        if cached == identity.digest:
            return Passage.OPEN, ""
        # vLLM may just have matched blocks of the other content; they go before it asks again.
        self._turning[identity.name] = identity.digest
        self._count("content_changed")
        return Passage.WAIT, "content_changed"

    def _ask_clock(self, tracker: RequestTracker, now: float) -> tuple[Passage, str]:
        if tracker.adapter_since is None:
            tracker.adapter_since = now
        if now - tracker.adapter_since < self._deadline_s:
            return Passage.WAIT, "loading"
        return Passage.FAIL, (
            f"adapter '{tracker.name}' was not loaded within {self._deadline_s:g} s "
            "(elora.adapter_deadline_s)"
        )

    def cached_as(self, identity: Identity) -> bool:
        """May blocks of this content be in the GPU prefix cache under its name?"""
        if identity.name in self._turning:
            return False
        return self._cached.setdefault(identity.name, identity.digest) == identity.digest

    def take_turns(self) -> dict[str, bytes]:
        """Names whose cached blocks must be dropped before this step ends."""
        turning, self._turning = self._turning, {}
        self._cached.update(turning)
        return turning

    # ---- orders and reports --------------------------------------------------------

    def take_orders(self, live: Callable[[], Container[int]]) -> tuple[AdapterOrder, ...]:
        """Orders for this step's metadata; `live`: ids that requests name."""
        for lora_id in self.ledger.forget_idle(_IDLE_ENTRIES_KEPT, live):
            self._requests.pop(lora_id, None)
        return tuple(self._spell_out(order) for order in self.ledger.orders.take_orders())

    def _spell_out(self, order: Order) -> AdapterOrder:
        lora = None if order.lora_id is None else self._requests[order.lora_id]
        return AdapterOrder(
            seq=order.seq,
            name="" if lora is None else lora.lora_name,
            lora_id=order.lora_id or 0,
            request=lora,
            evict=order.evict,
            displace=order.displace,
            activate=order.activate,
            verify=_VERIFY[order.check],
            placing=order.placing,
        )

    def rpc(self, lora_request: Any | None, lora_id: int) -> None:
        """vLLM is about to add, remove or pin an adapter on its own."""
        if lora_request is not None:
            self._requests[lora_id] = lora_request
        self.ledger.rpc_sent(lora_id, None if lora_request is None else lora_request.lora_name)

    def report(self, reports: Mapping[int, tuple[int, AdapterReport | None]]) -> ReportOutcome:
        """Take in this step's (echoed rpc count, adapter report) of each rank."""
        outcome = ReportOutcome()
        news = False
        for rank, (rpcs, report) in reports.items():
            news |= report is not None or self._rank_rpcs.get(rank, 0) != rpcs
            self._rank_rpcs[rank] = rpcs
            if report is not None:
                self._reports[rank] = report
                self._note_failures(report, outcome)
        if news and len(self._reports) == self._ranks == len(self._rank_rpcs):
            self._agree(outcome)
        return outcome

    def _note_failures(self, report: AdapterReport, outcome: ReportOutcome) -> None:
        for result in report.results:
            if not result.ok:
                self.ledger.failed(result.seq, result.lora_id)
                outcome.failures.setdefault(result.lora_id, result.error)

    def _agree(self, outcome: ReportOutcome) -> None:
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        loaded, differing = _compare(reports)
        users = self.ledger.in_use()
        for lora_id, now in loaded.items():
            before = self._loads.get(lora_id)
            if before is not None and before.load == now.load:
                continue
            # Weights were written under requests that may have been running,
            mixed = before is not None and lora_id in users
            if mixed:
                outcome.tainted.add(lora_id)
            # also under one that ended in that very step, and is no user any more.
            for name in {now.name, now.name if before is None else before.name}:
                if mixed or self._cached.get(name, now.digest) != now.digest:
                    self._doubt(name, outcome)
        outcome.tainted.update(users & differing.keys())
        for lora_id, name in differing.items():
            before = self._loads.get(lora_id)
            self._doubt(name, outcome)
            self._doubt(name if before is None else before.name, outcome)
        # Ranks reload at different steps: what users began with is remembered meanwhile.
        self._loads = {i: load for i, load in self._loads.items() if i in users} | loaded
        self.ledger.on_report(_acks(reports), min(self._rank_rpcs.values()), loaded)
        self._settle_disputes(differing, outcome)

    def _doubt(self, name: str, outcome: ReportOutcome) -> None:
        """Cached blocks of a name may be of several contents."""
        outcome.changed.add(name)
        self._cached.pop(name, None)

    def _settle_disputes(self, differing: Mapping[int, str], outcome: ReportOutcome) -> None:
        """Files that changed between two ranks' reads are read again before anybody fails."""
        self._disputed &= differing.keys()
        for lora_id, name in differing.items():
            if not self.ledger.distrust(lora_id):
                continue
            if lora_id in self._disputed:
                outcome.failures[lora_id] = (
                    f"adapter '{name}' differs between the workers' machines"
                )
            self._disputed ^= {lora_id}


def _acks(reports: list[AdapterReport]) -> Acks:
    """An order has ended when it has on every rank, and is read when no rank still reads."""
    still_open = frozenset(seq for report in reports for seq in report.open)
    reading = {seq for report in reports for seq in set(report.open).difference(report.read)}
    upto = min(report.last_seq for report in reports)
    return Acks(upto, still_open, frozenset(s for s in still_open - reading if s <= upto))


def _compare(reports: list[AdapterReport]) -> tuple[dict[int, Loaded], dict[int, str]]:
    """Adapters that every rank has: with one content, and (id -> name) with several."""
    states = [{state.lora_id: state for state in report.states} for report in reports]
    loaded: dict[int, Loaded] = {}
    differing: dict[int, str] = {}
    for lora_id in set.intersection(*(set(by_id) for by_id in states)):
        every = [by_id[lora_id] for by_id in states]
        if len({state.digest for state in every}) > 1:
            differing[lora_id] = every[0].name
            continue
        loaded[lora_id] = Loaded(
            lora_id,
            every[0].name,
            every[0].digest,
            tuple(state.load_seq for state in every),
            all(state.in_slot for state in every),
            any(state.pinned for state in every),
            max(state.nbytes for state in every),
        )
    return loaded, differing
