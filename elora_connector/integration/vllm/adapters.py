"""Adapters of one worker: loads, places and reports them as the scheduler side orders.

Reading and hashing happen on background threads; everything that changes vLLM's caches
happens on vLLM's main thread, at the start of a step (`submit`, `enter_step`) or after
its forward (`advance`).  An adapter of the running batch never loses its slot after the
forward, because vLLM computes logits with the slots of that batch afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from vllm.exceptions import LoRAAdapterNotFoundError

from elora_connector.integration.vllm.adapter_loader import (
    AdapterLoader,
    LoadInfo,
    cause_of,
    describe,
    load_info,
    request_source,
    stamp,
)
from elora_connector.integration.vllm.adapter_messages import (
    AdapterOrder,
    AdapterReport,
    AdapterState,
    Grant,
    OrderResult,
    Placing,
    Verify,
)
from elora_connector.integration.vllm.daemon_pool import DaemonPool
from elora_connector.integration.vllm.lora_caches import LoraCaches, NoRoomError
from elora_connector.integration.vllm.pending_orders import Pending, Stage

__all__ = [
    "AdapterAgent",
    "AdapterOrder",
    "AdapterReport",
    "AdapterState",
    "Grant",
    "OrderResult",
    "Placing",
    "Verify",
]

LOADER_THREADS = 8
"""Two would do for speed; the others are for adapters whose files hang."""


class AdapterAgent:
    """One per worker process with LoRA; made by `attach`.

    All methods run on vLLM's main thread.  None raises because of a bad adapter.
    """

    def __init__(self, loader: AdapterLoader, caches: LoraCaches, pool: DaemonPool) -> None:
        self._loader = loader
        self._caches = caches
        self._pool = pool
        self._pending: dict[int, Pending] = {}
        self._last_seq = 0
        self._results: list[OrderResult] = []
        self._protected: frozenset[int] = frozenset()
        self._batch: frozenset[int] = frozenset()
        self._entering: frozenset[int] | None = None
        self._rpc_seq = 0
        self._reported: AdapterReport | None = None
        """The last one that said something new, without results."""

    @classmethod
    def attach(cls) -> AdapterAgent | None:
        """The agent of this process's LoRA manager; None if it has none.

        Call it only where the engine has LoRA on: a manager of an engine that was shut
        down in this process may still be alive.

        Raises:
            UnsupportedError: the manager is not one we know how to drive.
        """
        from elora_connector.integration.vllm import lora_hooks

        return lora_hooks.attach_agent(cls)

    # The scheduler's orders

    def submit(
        self,
        orders: Iterable[AdapterOrder],
        protected: frozenset[int],
        grants: Iterable[Grant] = (),
    ) -> None:
        """Take orders and start their background part; at the start of every step.

        An order number seen before is ignored, and so is a grant for an order that is not
        here any more.  `protected` are the ids that only an order may take out, until the
        next call.
        """
        self.protect(protected)
        for order in orders:
            if order.seq > self._last_seq:
                self._last_seq = order.seq
                self._pending[order.seq] = Pending(order)
        for grant in grants:
            if grant.seq in self._pending:
                self._pending[grant.seq].grant(grant)
        self._start_heads()

    def cancel(self, seqs: Iterable[int]) -> None:
        """Forget orders that nobody waits for; one that was carried out stays so.

        Its background part, if it hangs, keeps its thread and nothing else.
        """
        for seq in seqs:
            pending = self._pending.pop(seq, None)
            if pending is not None and pending.future is not None:
                pending.future.cancel()

    def protect(self, protected: frozenset[int]) -> None:
        """Replace the set of ids that only an order may take out."""
        self._protected = protected

    def advance(self, batch_ids: frozenset[int]) -> None:
        """Carry out the orders whose background part is done; after the forward.

        Adapters of `batch_ids` keep weights and slot; such an order waits for a later step.
        """
        batch = self._batch | batch_ids
        self._batch = frozenset()
        self._sweep(batch, only=None)

    def report(self) -> AdapterReport:
        """What there is now; results are handed out once."""
        pinned = self._caches.pinned()
        states = tuple(
            AdapterState(
                lora_id,
                info.name,
                info.digest,
                info.load_seq,
                self._caches.is_active(lora_id),
                info.nbytes,
                lora_id in pinned,
            )
            for lora_id, model in sorted(self._caches.models().items())
            if (info := load_info(model)) is not None
        )
        results, self._results = tuple(self._results), []
        report = AdapterReport(
            self._last_seq,
            self._rpc_seq,
            states,
            results,
            False,
            tuple(self._pending),
            tuple(seq for seq, pending in self._pending.items() if pending.in_hand),
        )
        if results or replace(report, results=()) != self._reported:
            self._reported = replace(report, results=())
            return replace(report, changed=True)
        return report

    def take_counts(self) -> Mapping[str, int]:
        """See `AdapterLoader.take_counts`."""
        return self._loader.take_counts()

    def load_seq(self, lora_id: int) -> int | None:
        """Number of the load whose weights are registered under an id."""
        info = self._info(lora_id)
        return None if info is None else info.load_seq

    @property
    def slot_bytes(self) -> int:
        """Bytes of one GPU slot on this rank."""
        return self._caches.slot_bytes

    @property
    def batch_ids(self) -> frozenset[int]:
        """Adapters of the step that is running, as vLLM activated them."""
        return self._batch

    def close(self) -> None:
        """Stop the background threads without waiting, leave vLLM alone; idempotent."""
        from elora_connector.integration.vllm import lora_hooks

        lora_hooks.detach_agent(self)
        self._pending.clear()
        self._pool.close()

    # vLLM's own calls, by way of lora_hooks

    @property
    def in_step(self) -> bool:
        """Is vLLM activating the adapters of a batch right now?"""
        return self._entering is not None

    def enter_step(self, lora_ids: frozenset[int]) -> None:
        """vLLM is about to activate these: the moment to replace weights in use."""
        self._batch |= lora_ids
        self._sweep(lora_ids, only=lora_ids)
        self._entering = lora_ids

    def leave_step(self) -> None:
        """vLLM has activated the batch's adapters."""
        self._entering = None

    def count_rpc(self) -> None:
        """An add, remove or pin call was executed outside a step."""
        self._rpc_seq += 1

    def load_for_vllm(self, request: Any) -> Any:
        """Load at vLLM's request, on its main thread.

        In a step, what the background has read or is reading is used; a call from
        outside always reads and hashes.

        Raises:
            LoRAAdapterNotFoundError: it is missing (the server answers 404 to this one).
            Exception: see `AdapterLoader.load`.
        """
        if self.in_step:
            model = self._take_background(request)
            if model is not None:
                return model
        try:
            return self._loader.load(request, hash_again=not self.in_step)
        except FileNotFoundError as error:
            raise LoRAAdapterNotFoundError(request.lora_name, request.lora_path) from error

    def victim(self, candidates: Iterable[int], pinned: Iterable[int], what: str) -> int:
        """Which adapter vLLM must take out when `what` is full.

        Args:
            candidates: ids, least recently used first.

        Raises:
            NoRoomError: all of them are in use.
        """
        free = [lora_id for lora_id in candidates if lora_id not in set(pinned)]
        for kept in self._kept_sets():
            for lora_id in free:
                if lora_id not in kept:
                    return lora_id
        raise NoRoomError(
            f"no room for another adapter: all {what} hold adapters that are pinned, "
            "waited for or in use; raise --max-loras or --max-cpu-loras, or try again later"
        )

    def _kept_sets(self) -> list[frozenset[int]]:
        if self._entering is None:
            return [self._protected]
        # In a step failing would end the engine: protection yields, the batch never does.
        return [self._batch | self._protected, self._batch, self._entering]

    # Background part

    def _start_heads(self) -> None:
        """Start every order that is the first one for its adapter, if need be once more."""
        seen: set[int] = set()
        for pending in self._pending.values():
            lora_id = pending.order.lora_id
            if lora_id not in seen and (pending.stage is Stage.QUEUED or self._lost(pending)):
                self._start(pending)
            seen.add(lora_id)

    def _lost(self, pending: Pending) -> bool:
        """Did the weights that it found in host memory leave while it waits for its grant?"""
        lora_id = pending.order.lora_id
        return pending.in_hand and pending.model is None and self._caches.peek(lora_id) is None

    def _start(self, pending: Pending) -> None:
        order = pending.order
        info = self._info(order.lora_id)
        pending.model = pending.kept = None
        if order.request is None:
            pending.stage = Stage.READY
            return
        if info is not None and order.verify is Verify.NO and _is_same(info, order.request):
            pending.stage = Stage.READY
            return
        pending.stage = Stage.WORKING
        pending.future = self._pool.submit(lambda: self._work(order, info))

    def _work(self, order: AdapterOrder, info: LoadInfo | None) -> tuple[Any, float]:
        """On a background thread: a fresh stamp if the weights are right, else a model."""
        started = time.perf_counter()
        request: Any = order.request
        found: Any = None
        if info is not None:
            found = self._loader.recheck(request, info, order.verify)
        if found is None:
            # A recheck that found a difference has just hashed these files.
            hash_again = info is None and order.verify is Verify.ALWAYS
            found = self._loader.load(request, hash_again=hash_again)
        return found, time.perf_counter() - started

    def _take_background(self, request: Any) -> Any | None:
        """The model a background load has read or is reading for this request."""
        lora_id = request.lora_int_id
        head = next((p for p in self._pending.values() if p.order.lora_id == lora_id), None)
        if head is None or head.future is None:
            return None
        if head.future.cancel():
            head.stage, head.future = Stage.QUEUED, None
            return None
        wait((head.future,))
        try:
            head.collect()
        except Exception:  # noqa: BLE001  (comes with the order's result; loading raises it anew)
            return None
        usable = head.model is not None and self._loader.is_current(request, head.model)
        return head.model if usable else None

    # Placing

    def _sweep(self, batch: frozenset[int], only: frozenset[int] | None) -> None:
        """Finish what can be finished, in order among orders that touch the same adapters."""
        blocked: set[int] = set()
        finished: list[int] = []
        for seq, pending in self._pending.items():
            wanted = only is None or pending.order.lora_id in only
            free = wanted and blocked.isdisjoint(pending.touched)
            result = self._try_finish(pending, batch, only is not None) if free else None
            if result is None:
                blocked |= pending.touched
                continue
            finished.append(seq)
            self._results.append(result)
        # Only now: until here they are kept from being a victim of the others.
        for seq in finished:
            del self._pending[seq]
        self._start_heads()

    def _try_finish(
        self, pending: Pending, batch: frozenset[int], may_replace: bool
    ) -> OrderResult | None:
        """The result, or None if the order has to wait."""
        try:
            if not pending.collect() or pending.order.placing is Placing.ON_GRANT:
                return None
        except Exception as error:  # noqa: BLE001  (whatever it is, it is one adapter's fault)
            return _failed(pending, cause_of(error))
        try:
            if not self._place(pending, batch, may_replace):
                return None
        except Exception as error:  # noqa: BLE001  (the same)
            return _failed(pending, f"its weights do not fit the model ({error})")
        return OrderResult(
            pending.order.seq,
            pending.order.lora_id,
            True,
            seconds=pending.seconds,
            read=pending.read,
            activation_s=pending.activation_s,
        )

    def _place(self, pending: Pending, batch: frozenset[int], may_replace: bool) -> bool:
        """Change vLLM's caches as ordered; False, with nothing changed, if it must wait."""
        order = pending.order
        lora_id = order.lora_id
        if order.request is None:
            return self._evict(order, batch)
        current = self._caches.peek(lora_id)
        if order.placing is Placing.IN_PLACE and current is None:
            return True  # it has left meanwhile: nothing to look at again
        model = self._newer(pending.model, current)
        if model is None and load_info(current) is None:
            # Taken out behind the order's back since it was looked at.
            self._start(pending)
            return False
        if model is not None and current is not None and lora_id in batch and not may_replace:
            return False
        ordered = frozenset(p.order.lora_id for p in self._pending.values())
        room = self._caches.room_for(order, batch, batch | self._protected | ordered)
        if room is None:
            return False
        started = time.perf_counter()
        busy = model is not None or (order.activate and not self._caches.is_active(lora_id))
        for gone in room.evict:
            self._caches.remove(gone)
        for gone in room.displace:
            self._caches.deactivate(gone)
        self._put(pending, model, current)
        if busy:
            placing = time.perf_counter() - started
            pending.seconds += placing
            pending.activation_s = placing if order.activate else 0.0
        return True

    def _evict(self, order: AdapterOrder, batch: frozenset[int]) -> bool:
        """Only make room; what the operator pinned stays."""
        gone = [i for i in order.evict if i not in self._caches.pinned()]
        if not batch.isdisjoint(gone):
            return False
        for lora_id in gone:
            self._caches.remove(lora_id)
        return True

    def _put(self, pending: Pending, model: Any | None, current: Any | None) -> None:
        order = pending.order
        if model is not None:
            self._caches.install(model, activate=order.activate)
            return
        info = load_info(current)
        kept = pending.kept
        if kept is not None and info is not None and info.load_seq == kept.load_seq:
            stamp(current, kept)
        self._caches.use(order.lora_id, activate=order.activate)

    @staticmethod
    def _newer(model: Any | None, current: Any | None) -> Any | None:
        """`model` unless what is registered was read later (or is the same object)."""
        info, known = load_info(model), load_info(current)
        if info is None or (known is not None and known.load_seq >= info.load_seq):
            return None
        return model

    def _info(self, lora_id: int) -> LoadInfo | None:
        return load_info(self._caches.peek(lora_id))


def _failed(pending: Pending, cause: str) -> OrderResult:
    order: Any = pending.order
    message = describe(order.request, cause)
    return OrderResult(order.seq, order.lora_id, False, message, pending.seconds, pending.read)


def _is_same(info: LoadInfo, request: Any) -> bool:
    """Does a request mean the weights that were loaded, going by what it says?"""
    return info.name == request.lora_name and info.source == request_source(request)
