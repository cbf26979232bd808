"""Where adapters are: GPU slots under the connector's ledger, or a pool shared with KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from elora_connector.assembly import Scoring
from elora_connector.core.adapter_nodes import AdapterNodes, check_nodes
from elora_connector.core.ledger import Acks, AdapterLedger, Gate, Grant, Loaded, Order, Placing
from elora_connector.core.types import Identity
from elora_connector.manager import Manager
from elora_connector.simulator.engine_model import EngineModel
from elora_connector.simulator.live import Live
from elora_connector.simulator.wires import Clock, Wire


class AdapterArea(Protocol):
    """Who may run, as far as adapters are concerned; base requests are never asked about.

    Attributes:
        loads: adapters brought to the GPU.
        stall_s: seconds that the next step has to wait for loads inside it.
        wake: called when an answer may have changed.
    """

    loads: int
    stall_s: float
    wake: Callable[[], None]

    def arrived(self, live: Live, now: float) -> None: ...

    def ask(self, live: Live, now: float) -> Gate:
        """READY holds the adapter until `admitted` or `finished`."""
        ...

    def admitted(self, live: Live, now: float) -> None: ...

    def finished(self, live: Live, now: float) -> None: ...

    def ship(self, now: float) -> bool:
        """Once a step, and whenever the engine is idle.  False: there was nothing to do."""
        ...

    def on_gpu(self, identity: Identity) -> bool:
        """Are the weights in GPU memory?"""
        ...

    def count(self) -> int:
        """Adapters in GPU memory, or on their way there."""
        ...

    def check(self) -> None: ...


@dataclass(slots=True)
class _Work:
    """One order, as a worker sees it."""

    seq: int
    lora_id: int
    granted: bool
    activate: bool
    read: bool = False


@dataclass(frozen=True, slots=True)
class SlotParts:
    """What a `SlotArea` drives.

    Attributes:
        nodes: None where adapters are no nodes of the tree: then the ledger takes the least
            recently used.
        manager: of the host tier; None without one.
    """

    ledger: AdapterLedger
    nodes: AdapterNodes | None
    manager: Manager | None
    scoring: Scoring


class SlotArea:
    """GPU slots and vLLM's host cache, as the connector's ledger says; plays the workers.

    Args:
        parts: of the connector.
        link: to the GPU.
        adapters: lora id -> identity, of the whole trace, the most used first.
        warm: how many of them are in host memory at the start.
        blocking: a request whose adapter is not in a slot has the step wait for it.
    """

    def __init__(
        self,
        parts: SlotParts,
        clock: Clock,
        machine: EngineModel,
        link: Wire,
        adapters: Mapping[int, Identity],
        *,
        warm: int,
        blocking: bool,
    ) -> None:
        self.ledger = parts.ledger
        self.nodes = parts.nodes
        self.loads = 0
        self.stall_s = 0.0
        self.wake: Callable[[], None] = nothing
        self._clock = clock
        self._link = link
        self._machine = machine
        self._disk = Wire(clock, machine.read_per_s, 0.0)
        self._manager = parts.manager
        self._scoring = parts.scoring
        self._identities = dict(adapters)
        self._ids = {identity: lora_id for lora_id, identity in adapters.items()}
        self._blocking = blocking
        self._loaded: dict[int, Loaded] = {}
        self._open: dict[int, _Work] = {}
        self._in_step: set[int] = set()
        self._upto = 0
        for lora_id in list(adapters)[:warm]:
            self._loaded[lora_id] = self._state(lora_id, in_slot=False)
        self._report(0.0)

    # ---- requests --------------------------------------------------------------------

    def arrived(self, live: Live, now: float) -> None:
        lora_id = _lora_id(live)
        self._time(now)
        self.ledger.register(lora_id, live.identity.name)
        if not self._blocking:
            self.ledger.read_ahead(lora_id)

    def ask(self, live: Live, now: float) -> Gate:
        self._time(now)
        lora_id = _lora_id(live)
        gate = self.ledger.admit(live.id, lora_id, now)
        if gate is Gate.READY and not self.ledger.resident(lora_id):
            self._in_step.add(lora_id)  # the ledger knows that ranks place it before the forward
            self.ship(now)
            if not self.ledger.resident(lora_id):
                return Gate.LOADING  # it was ordered before, and is on the link
        while gate is Gate.LOADING and self._blocking and self.ship(now):
            gate = self.ledger.admit(live.id, lora_id, now)
        return gate

    def admitted(self, live: Live, now: float) -> None:
        self._time(now)
        lora_id = _lora_id(live)
        self.ledger.scheduled(live.id, lora_id)
        if self.nodes is not None:
            self.nodes.touch(lora_id, now)

    def finished(self, live: Live, now: float) -> None:
        self._time(now)
        self.ledger.finished(live.id, _lora_id(live))

    def ship(self, now: float) -> bool:
        self._time(now)
        orders, grants = self.ledger.orders.take_orders(), self.ledger.orders.take_grants()
        cancelled = self.ledger.orders.take_cancelled()
        for order in orders:
            self._obey(order)
        for grant in grants:
            self._granted(grant)
        for seq in cancelled:
            self._open.pop(seq, None)
        if orders or cancelled:
            self._report(now)
        return bool(orders or grants)

    def on_gpu(self, identity: Identity) -> bool:
        lora_id = self._ids.get(identity)
        return lora_id is not None and self.ledger.resident(lora_id)

    def count(self) -> int:
        return self.ledger.slots - self.ledger.places.free_slots

    def check(self) -> None:
        if self.nodes is not None and self._manager is not None:
            check_nodes(self._manager.tree, self.ledger, self.nodes)

    # ---- workers -----------------------------------------------------------------------

    def _time(self, now: float) -> None:
        if self.nodes is not None:
            self.nodes.now = now

    def _obey(self, order: Order) -> None:
        self._upto = order.seq
        self._leave(order.evict, order.displace)
        if order.lora_id is None:
            return
        granted = order.placing is Placing.NOW
        work = _Work(order.seq, order.lora_id, granted, order.activate)
        self._open[work.seq] = work
        if work.lora_id in self._loaded:
            self._read(work, self._clock.now, 0.0)
        else:
            self._move(self._disk, partial(self._read, work), in_step=self._blocking)

    def _granted(self, grant: Grant) -> None:
        work = self._open[grant.seq]
        self._leave(grant.evict, grant.displace)
        work.granted, work.activate = True, grant.activate
        if work.read:
            self._place(work)

    def _leave(self, evict: tuple[int, ...], displace: tuple[int, ...]) -> None:
        for lora_id in evict:
            self._loaded.pop(lora_id, None)
        for lora_id in displace:
            if lora_id in self._loaded:
                self._loaded[lora_id] = self._state(lora_id, in_slot=False)

    def _read(self, work: _Work, now: float, seconds: float) -> None:
        if work.seq not in self._open:
            return
        work.read = True
        self._scoring.rates.adapter_load.add(self._name(work), seconds)
        if work.granted:
            self._place(work)
        elif seconds:
            self._report(now)

    def _place(self, work: _Work) -> None:
        if work.activate:
            in_step = self._blocking or work.lora_id in self._in_step
            self._move(self._link, partial(self._placed, work), in_step=in_step)
        else:
            self._placed(work, self._clock.now, 0.0)

    def _placed(self, work: _Work, now: float, seconds: float) -> None:
        if self._open.pop(work.seq, None) is None:
            return
        self._in_step.discard(work.lora_id)
        in_slot = work.activate or (
            work.lora_id in self._loaded and self._loaded[work.lora_id].in_slot
        )
        self._loaded[work.lora_id] = self._state(work.lora_id, in_slot=in_slot)
        self.loads += work.activate
        self._scoring.rates.adapter_activation.add(self._name(work), seconds)
        self._report(now)

    def _report(self, now: float) -> None:
        self._time(now)
        read = frozenset(seq for seq, work in self._open.items() if work.read)
        acks = Acks(self._upto, frozenset(self._open), read)
        self.ledger.on_report(acks, self.ledger.rpcs, self._loaded)
        if self.nodes is not None and self._manager is not None:
            self._manager.trim(now)
        self.wake()

    def _move(self, wire: Wire, done: Callable[[float, float], None], *, in_step: bool) -> None:
        """One adapter over a wire: beside the engine, or the step waits for it."""
        nbytes, extra = self._machine.rank_adapter_bytes, self._machine.adapter_overhead_s
        if not in_step:
            wire.send(nbytes, done, extra_s=extra)
            return
        seconds = wire.pass_through(nbytes, extra)
        self.stall_s += seconds
        done(self._clock.now, seconds)

    def _name(self, work: _Work) -> str:
        return self._identities[work.lora_id].name

    def _state(self, lora_id: int, *, in_slot: bool) -> Loaded:
        identity = self._identities[lora_id]
        nbytes = self._machine.rank_adapter_bytes
        return Loaded(lora_id, identity.name, identity.digest, (1,), in_slot, False, nbytes)


def nothing() -> None:
    return


def _lora_id(live: Live) -> int:
    if live.lora_id is None:
        raise AssertionError("the base model is always there")
    return live.lora_id
