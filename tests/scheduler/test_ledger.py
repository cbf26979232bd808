"""Adapter slots: who waits for whom, and that nobody waits for ever."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from elora_connector.core.ledger import (
    Acks,
    AdapterLedger,
    Check,
    Gate,
    Grant,
    Loaded,
    Order,
    Placing,
)
from tests.support.rig_adapters import RigPool, digest_of
from tests.support.scheduler_rig import (
    STEP_S,
    SYNC,
    VARIANTS,
    Rig,
    Variant,
    path_of,
    prompt,
)

DELAYS = (0, 1, 2)


def activations(rig: Rig) -> int:
    """Loads that the first rank has made, of whatever kind."""
    return rig.ranks[0].adapters.loader.loads


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_one_slot_two_adapters_do_not_evict_each_other(variant: Variant, delay: int) -> None:
    rig = Rig(variant, delay, ranks=2, max_loras=1, max_cpu_loras=1, delays={"adapter": (1, 3)})
    first, second = rig.submit("a", prompt(12)), rig.submit("b", prompt(12))
    rig.run(limit=60)
    assert activations(rig) == 2, "each adapter is loaded once"
    assert rig.answers[first].started < rig.answers[second].started
    rig.drain()


@pytest.mark.parametrize("delay", DELAYS)
def test_one_slot_two_adapters_with_remote_hits(delay: int) -> None:
    """A second condition to wait for is what made naive rules swap for ever."""
    store = Rig(SYNC)
    for adapter in ("a", "b"):
        store.run(store.submit(adapter, prompt(33)))
    store.drain()
    rig = Rig(
        SYNC,
        delay,
        max_loras=1,
        max_cpu_loras=2,
        store=store.tier,
        delays={"fetch": 3, "adapter": 2, "lookup": 2},
    )
    rig.submit("a", prompt(33))
    rig.submit("b", prompt(33))
    answers = rig.run(limit=80)
    assert activations(rig) == 2
    assert [a.hit for a in answers] == [32, 32]
    rig.drain()


@pytest.mark.parametrize("delay", DELAYS)
def test_two_slots_three_adapters_in_turn(delay: int) -> None:
    rig = Rig(SYNC, delay, max_loras=2, max_cpu_loras=2, delays={"adapter": (0, 3)})
    for turn in range(4):
        for adapter in ("a", "b", "c"):
            rig.submit(adapter, prompt(9, turn))
    rig.run(limit=200)
    assert activations(rig) <= 12
    rig.drain()


def start_of_b(seed: int, load_steps: int, *, connector: bool) -> int | None:
    """Steps that B waits in a stream of A that never ends; None: it starves."""
    rig = Rig(
        SYNC,
        max_loras=1,
        max_cpu_loras=2,
        connector=connector,
        remote=False,
        delays={"adapter": load_steps},
    )
    rig.run(rig.submit("a", prompt(9)))
    b = ""
    stream = random.Random(seed)
    for turn in range(60):
        # Each A takes one or two steps; where stock leaves no gap, B starves there too.
        rig.submit("a", prompt(9, turn), max_tokens=stream.choice((1, 1, 1, 2)))
        if turn == 5:
            b = rig.submit("b", prompt(9))
        rig.step()
        if b and rig.answers[b].started is not None:
            return int(rig.answers[b].started) - rig.answers[b].arrived
    return None


@pytest.mark.parametrize("load_steps", [0, 1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_endless_stream_does_not_starve_another_adapter(seed: int, load_steps: int) -> None:
    """B starts no later than with stock vLLM, plus the steps its load takes.

    A goes on being served while B is read, so the grant waits for an A that began meanwhile.
    """
    stock = start_of_b(seed, load_steps, connector=False)
    ours = start_of_b(seed, load_steps, connector=True)
    assert stock is not None, "a stream without a gap says nothing"
    # Ordered in step n, read at the end of step n + load, granted in the next one, started
    # in the one after that.
    assert ours is not None
    assert ours <= stock + load_steps + 2, f"{ours} steps, stock {stock}"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_an_adapter_that_hangs_keeps_nobody_from_the_only_slot(variant: Variant) -> None:
    rig = Rig(variant, max_loras=1, max_cpu_loras=1, settings={"elora.adapter_deadline_s": 1.5})
    reads = [rank.adapters.agent._pool for rank in rig.ranks]
    submit = [pool.submit for pool in reads]

    def hang(pool: RigPool, call: Callable[[], Any]) -> Future[Any]:
        for cell in call.__closure__ or ():
            if getattr(cell.cell_contents, "name", "") == "b":
                return Future()
        return submit[reads.index(pool)](call)

    for pool in reads:
        pool.submit = functools.partial(hang, pool)
    rig.run(rig.submit("a", prompt(9)))
    bad = rig.submit("b", prompt(9))
    for turn in range(5):
        for adapter in ("a", "c"):
            (answer,) = rig.run(rig.submit(adapter, prompt(9, turn)), limit=8)
            assert answer.reason == "length"
    assert rig.answers[bad].reason is None, "it was to be waiting all the time"
    rig.run(limit=150)
    assert rig.answers[bad].reason == "error"
    assert "was not loaded within 1.5 s" in str(rig.answers[bad].message)
    rig.drain()


def test_base_requests_never_wait_for_adapters() -> None:
    rig = Rig(SYNC, max_loras=1, delays={"adapter": 50}, remote=False)
    rig.submit("a", prompt(9))
    rig.submit("b", prompt(9))
    base = rig.submit(None, prompt(9))
    (answer,) = rig.run(base, limit=5)
    assert answer.deferrals == 0
    assert answer.started == 0
    rig.drain()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("inplace", [False, True])
def test_rpc_while_an_order_is_in_flight(delay: int, inplace: bool) -> None:
    rig = Rig(SYNC, delay, ranks=2, max_loras=1, max_cpu_loras=1, delays={"adapter": (2, 4)})
    rig.submit("a", prompt(20))
    rig.step()
    rig.add_lora("b")  # takes the only place while A is being read
    rig.submit("b", prompt(20))
    rig.step()
    rig.change("a")
    rig.add_lora("a", load_inplace=inplace)
    rig.run(limit=100)
    assert all(a.reason == "length" for a in rig.answers.values())
    rig.drain()


@pytest.mark.parametrize("delay", DELAYS)
def test_rpc_replaces_weights_under_a_running_request(delay: int) -> None:
    rig = Rig(SYNC, delay, ranks=2)
    running = rig.submit("a", prompt(20), max_tokens=30)
    while not rig.answers[running].tokens:
        rig.step()
    old = rig.disk.read(path_of("a"))
    rig.change("a")
    rig.add_lora("a", load_inplace=True)
    later = rig.submit("a", prompt(20), max_tokens=4)
    rig.run()
    assert len(rig.answers[running].weights) == 2, "it ran across the change"
    assert rig.answers[later].weights == {rig.disk.read(path_of("a"))}
    rig.disk.put_back(path_of("a"), old)
    rig.add_lora("a", load_inplace=True)
    again = rig.submit("a", prompt(20), max_tokens=4)
    rig.run()
    assert rig.answers[again].weights == {old}
    rig.drain()


def test_failed_load_fails_only_its_requests() -> None:
    rig = Rig(SYNC, max_loras=1, max_cpu_loras=1, delays={"adapter": 2})
    rig.disk.remove(path_of("b"))
    bad = rig.submit("b", prompt(9))
    good = rig.submit("a", prompt(9))
    rig.run(limit=40)
    assert rig.answers[bad].reason == "error"
    assert "elora[400]" in str(rig.answers[bad].message)
    assert "'b'" in str(rig.answers[bad].message)
    assert rig.answers[good].reason == "length"
    rig.change("b")
    (answer,) = rig.run(rig.submit("b", prompt(9)), limit=40)
    assert answer.reason == "length", "mended files are read again"
    rig.drain()


def test_never_loaded_adapter_hits_the_deadline_once() -> None:
    rig = Rig(SYNC, settings={"elora.adapter_deadline_s": 20 * STEP_S}, delays={"adapter": 10_000})
    late = rig.submit("a", prompt(9))
    rig.run(late, limit=40)
    assert rig.answers[late].reason == "error"
    assert "elora[503]" in str(rig.answers[late].message)
    assert rig.answers[late].deferrals == 21, "20 steps after the first ask"
    assert not rig.ledger.taken(), "the hold goes with the request"


def test_files_that_change_between_two_ranks_are_read_again() -> None:
    rig = Rig(SYNC, ranks=2, delays={"adapter": (0, 0)})
    rig.submit("a", prompt(9))
    rank = rig.ranks[1].adapters
    load = rank.loader.load

    def changed_meanwhile(request: object, *, hash_again: bool) -> object:
        rig.change("a")
        rank.loader.load = load  # type: ignore[method-assign]
        return load(request, hash_again=hash_again)

    rank.loader.load = changed_meanwhile  # type: ignore[method-assign, assignment]
    (answer,) = rig.run(limit=20)
    assert answer.reason == "length", answer.message
    assert answer.weights == {rig.disk.read(path_of("a"))}
    rig.drain()


def test_machines_that_really_differ_refuse_the_adapter() -> None:
    rig = Rig(SYNC, ranks=2)
    other = type(rig.disk)()
    other.put_back(path_of("a"), "another machine's file")
    rig.ranks[1].adapters.loader._disk = other
    for _ in range(2):
        (answer,) = rig.run(rig.submit("a", prompt(9)), limit=20)
        assert answer.reason == "error"
        assert "differs between the workers' machines" in str(answer.message)
    rig.drain()


# ---- the ledger alone ------------------------------------------------------------------


@dataclass
class _Worker:
    """What the workers have, as the ledger's orders make it."""

    host: dict[int, int] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)
    seq: int = 0
    pending: dict[int, Order] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)


@dataclass
class _Step:
    """What one step's metadata says."""

    orders: list[Order]
    grants: list[Grant]
    cancelled: list[int]


class LedgerLife(RuleBasedStateMachine):
    """Requests, reports with any lag, failing loads and out-of-step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = AdapterLedger(2, 3)
        self.slotted: set[str] = set()
        self.worker = _Worker()
        self.hanging: set[int] = set()
        self.sent: list[_Step] = []
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.loads = 0
        self.count = 0
        self.now = 0.0
        self.rpcs = 0
        self.ticks = 0
        self.asked: dict[str, int] = {}
        """When a request came that wants its adapter's files looked at."""
        self.untold: set[int] = set()
        self.looked: dict[int | None, int] = {}
        """When the workers last looked at an adapter's files."""

    @initialize(size=st.sampled_from(((2, 3), (2, 2), (1, 1), (1, 3))))
    def start(self, size: tuple[int, int]) -> None:
        self.ledger = AdapterLedger(*size)
        self.ledger.slot_watch.add(self)

    def slot_taken(self, name: str) -> None:
        assert name not in self.slotted, "told twice"
        self.slotted.add(name)
        assert len(self.slotted) <= self.ledger.slots, "told before who leaves"

    def slot_left(self, name: str) -> None:
        self.slotted.remove(name)

    @rule(lora_id=st.integers(1, 5), check=st.sampled_from(Check))
    def arrive(self, lora_id: int, check: Check) -> None:
        self.count += 1
        self.waiting[f"r{self.count}"] = lora_id
        if check is not Check.NONE:
            self.ticks += 1
            self.asked[f"r{self.count}"] = self.ticks
        self.ledger.register(lora_id, f"n{lora_id}", check)
        self.ledger.read_ahead(lora_id)

    @precondition(lambda self: self.waiting)
    @rule()
    def ask_all(self) -> None:
        """One schedule(): every waiting request is asked, some get their blocks."""
        self.now += 1
        for request_id, lora_id in list(self.waiting.items()):
            before = self.ledger.taken()
            gate = self.ledger.admit(request_id, lora_id, self.now)
            if lora_id not in before and len(before) >= self.ledger.slots:
                assert gate in (Gate.NO_SLOT, Gate.SUSPENDED, Gate.LOADING)
                assert self.ledger.taken() <= before, "no slot, and held nevertheless"
            if gate is Gate.READY:
                assert self.ledger.identity(lora_id) is not None
                seen, asked = self.looked.get(lora_id, 0), self.asked.pop(request_id, 0)
                assert seen >= asked, "no look at the files since it came"
                self.ledger.scheduled(request_id, lora_id)
                self.running[request_id] = self.waiting.pop(request_id)
        self._send()

    def _send(self) -> None:
        ledger = self.ledger
        orders = [replace(order) for order in ledger.orders.take_orders()]
        self.sent.append(_Step(orders, ledger.orders.take_grants(), ledger.orders.take_cancelled()))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        request_id = sorted(self.waiting)[which % len(self.waiting)]
        lora_id = self.waiting.pop(request_id)
        self.ledger.finished(request_id, lora_id)
        if lora_id not in self.waiting.values():
            self.ledger.cancel(lora_id)

    @rule(lora_id=st.integers(1, 5))
    def hang(self, lora_id: int) -> None:
        """Its files do not answer until it is named again."""
        self.hanging ^= {lora_id}

    @rule(lora_id=st.integers(1, 5))
    def spare_places(self, lora_id: int) -> None:
        if self.ledger.places.get(lora_id) is not None:
            self.ledger.settle_in(lora_id)
            self.ledger.move_in(lora_id)

    @rule(lora_id=st.integers(1, 5))
    def memory_goes_to_kv(self, lora_id: int) -> None:
        entry = self.ledger.places.get(lora_id)
        if entry and self.ledger.places.may_leave_host(entry, self.ledger.taken()):
            self.ledger.evict([lora_id])
            assert self.ledger.identity(lora_id) is None

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        request_id = sorted(self.running)[which % len(self.running)]
        self.ledger.finished(request_id, self.running.pop(request_id))

    @precondition(lambda self: self.sent)
    @rule(fails=st.booleans(), late=st.booleans())
    def work_and_report(self, fails: bool, late: bool) -> None:
        """Workers carry out the oldest step's orders.

        Args:
            fails: nothing can be read.
            late: what became of them is told later.
        """
        step, worker = self.sent.pop(0), self.worker
        for seq in step.cancelled:
            worker.pending.pop(seq, None)
        for order in step.orders:
            worker.seq = order.seq
            worker.pending[order.seq] = order
        for grant in step.grants:
            if grant.seq in worker.pending:
                granted = worker.pending[grant.seq]
                granted.placing, granted.activate = Placing.NOW, grant.activate
                granted.evict, granted.displace = grant.evict, grant.displace
        for order in list(worker.pending.values()):
            if self._ends(order, fails):
                del worker.pending[order.seq]
        if not late:
            self._report()

    def _ends(self, order: Order, fails: bool) -> bool:
        """Work on an order; has it ended?"""
        lora_id, host = order.lora_id, self.worker.host
        if order.placing is Placing.NOW:
            self._obey(order, fails)
            return True
        if lora_id in self.hanging and (lora_id not in host or order.check):
            return False
        if order.seq not in self.worker.read:
            self._look(lora_id)
        if order.placing is Placing.ON_GRANT and not (fails and lora_id not in host):
            self.worker.read.add(order.seq)
            return False
        if order.placing is Placing.ON_GRANT:
            assert lora_id is not None
            self.ledger.failed(order.seq, lora_id)
        return True

    def _look(self, lora_id: int | None) -> None:
        self.ticks += 1
        self.looked[lora_id] = self.ticks
        if lora_id is not None:
            self.untold.add(lora_id)

    def _obey(self, order: Order, fails: bool) -> None:
        worker = self.worker
        assert set(self.running.values()).isdisjoint((*order.evict, *order.displace))
        in_hand = order.lora_id in worker.host or order.seq in worker.read
        if fails and not in_hand and order.lora_id is not None:
            return
        for gone in order.evict:
            worker.host.pop(gone, None)
            worker.slots.discard(gone)
        worker.slots.difference_update(order.displace)
        if order.lora_id is None:
            return
        if order.lora_id not in worker.host:
            self.loads += 1
            worker.host[order.lora_id] = self.loads
        if order.activate:
            worker.slots.add(order.lora_id)
        self._make_room(order.lora_id)

    def _make_room(self, keep: int) -> None:
        """Workers take a spare where a later order names it; the ledger counts it as gone."""
        entries = self.ledger.places
        for have, room, placed in (
            (self.worker.slots, self.ledger.slots, lambda e: e.in_slot),
            (set(self.worker.host), self.ledger.host_capacity, lambda e: e.in_host),
        ):
            if len(have) <= room:
                continue
            spare = [i for i in have if i != keep and not placed(entries[i])]
            spare = [i for i in spare if i not in self.ledger.in_use()]
            assert spare, f"an order finds no room among {have}"
            self.worker.slots.discard(spare[0])
            if have is not self.worker.slots:
                self.worker.host.pop(spare[0])

    @precondition(lambda self: not self.sent)
    @rule(lora_id=st.integers(1, 5))
    def removed_by_rpc(self, lora_id: int) -> None:
        self.rpcs += 1
        self.ledger.rpc_sent(lora_id, None)
        self.worker.host.pop(lora_id, None)
        self.worker.slots.discard(lora_id)
        assert self.ledger.suspended

    @precondition(lambda self: self.untold)
    @rule(check=st.sampled_from((Check.IF_CHANGED, Check.ALWAYS)))
    def arrive_after_a_look(self, check: Check) -> None:
        """The workers have looked at its files, and have not said so."""
        for lora_id in sorted(self.untold):
            self.arrive(lora_id, check)

    @rule()
    def _report(self) -> None:
        self.untold.clear()
        loaded = {
            lora_id: Loaded(
                lora_id,
                f"n{lora_id}",
                digest_of(f"n{lora_id}"),
                (load,),
                lora_id in self.worker.slots,
            )
            for lora_id, load in self.worker.host.items()
        }
        # The count is echoed from the step's metadata: only steps after the call show it.
        pending = frozenset(self.worker.pending)
        acks = Acks(self.worker.seq, pending, pending & self.worker.read)
        self.ledger.on_report(acks, self.rpcs, loaded)

    @invariant()
    def holds(self) -> None:
        assert len(self.ledger.taken()) <= self.ledger.slots
        in_slot, in_host = self.ledger.counts()
        assert in_slot <= self.ledger.slots
        assert self.ledger.host_capacity is not None
        assert in_host <= self.ledger.places.hosted <= self.ledger.host_capacity
        assert self.ledger.in_use() == set(self.running.values())
        assert self.slotted == {e.name for e in self.ledger.places if e.has_slot}
        assert self.slotted == self.ledger.slot_watch.names

    def teardown(self) -> None:
        """Whoever waits gets its turn when the others end, though others' files hang."""
        for request_id, lora_id in list(self.waiting.items()):
            if lora_id in self.hanging:
                self.ledger.finished(request_id, self.waiting.pop(request_id))
                self.ledger.cancel(lora_id)
        for _ in range(60):
            if not (self.waiting or self.running):
                break
            self.ask_all()
            while self.sent:
                self.work_and_report(False, False)
            for request_id in list(self.running):
                self.ledger.finished(request_id, self.running.pop(request_id))
        assert not self.waiting, f"starved: {self.waiting}"
        assert not self.ledger.taken()


TestLedgerLife = LedgerLife.TestCase
TestLedgerLife.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
)


def _one(lora_id: int, load: int = 1, *, in_slot: bool = True) -> Mapping[int, Loaded]:
    state = Loaded(lora_id, f"n{lora_id}", digest_of(str(load)), (load,), in_slot)
    return {lora_id: state}


def test_distrust_asks_for_one_reread_at_a_time() -> None:
    ledger = AdapterLedger(1, 1)
    ledger.register(1, "n1")
    assert ledger.admit("r", 1, 0.0) is Gate.LOADING
    assert not ledger.distrust(1), "an order is under way, which may settle it"
    (order,) = ledger.orders.take_orders()
    ledger.on_report(Acks(order.seq), 0, {})
    assert ledger.distrust(1)
    assert not ledger.distrust(1), "asked for already"
    assert ledger.admit("r", 1, 0.0) is Gate.LOADING
    (again,) = ledger.orders.take_orders()
    assert again.check is Check.ALWAYS
    read_and_grant(ledger, "r", 1)
    ledger.on_report(Acks(again.seq), 0, _one(1))
    assert ledger.admit("r", 1, 0.0) is Gate.READY


def read_and_grant(ledger: AdapterLedger, request_id: str, lora_id: int) -> Grant:
    """The workers have read what was ordered last; its request is asked again."""
    seq = ledger.orders._seq
    held = {e.lora_id: e for e in ledger.places if e.in_host}
    there = {
        i: Loaded(i, e.name, e.digest or bytes(32), e.load, e.in_slot, e.pinned)
        for i, e in held.items()
    }
    ledger.on_report(Acks(seq, frozenset({seq}), frozenset({seq})), ledger.rpcs, there)
    assert ledger.admit(request_id, lora_id, 0.0) is Gate.LOADING
    (grant,) = ledger.orders.take_grants()
    assert grant.seq == seq
    return grant


def test_a_check_does_not_take_back_an_activation_under_way() -> None:
    ledger = AdapterLedger(2, 3)
    ledger.register(1, "n1")
    ledger.admit("r", 1, 0.0)
    ledger.orders.take_orders()
    assert read_and_grant(ledger, "r", 1).activate
    ledger.finished("r", 1)
    ledger.register(1, "n1", Check.IF_CHANGED)
    assert ledger.orders.take_orders() == [], "it ends first, then its files are looked at"
    assert ledger.slot_watch.names == {"n1"}, "its slot would be given away twice"
    ledger.on_report(Acks(1), 0, _one(1))
    assert ledger.identity(1) is None
    assert ledger.admit("again", 1, 0.0) is Gate.LOADING
    (check,) = ledger.orders.take_orders()
    assert (check.placing, check.check) == (Placing.IN_PLACE, Check.IF_CHANGED)


def _read_for_the_first_time(ledger: AdapterLedger) -> Order:
    """A re-check was asked for before the weights left; they are being read again."""
    ledger.register(1, "n1")
    ledger.places[1].check = Check.IF_CHANGED
    assert ledger.admit("r", 1, 0.0) is Gate.LOADING
    (order,) = ledger.orders.take_orders()
    assert (order.placing, order.check) == (Placing.ON_GRANT, Check.IF_CHANGED)
    return order


def _looked_at_again(ledger: AdapterLedger) -> Order:
    ledger.on_report(Acks(0), 0, _one(1))
    ledger.register(1, "n1", Check.IF_CHANGED)
    (order,) = ledger.orders.take_orders()
    assert (order.placing, order.check) == (Placing.IN_PLACE, Check.IF_CHANGED)
    return order


@pytest.mark.parametrize("begin", [_read_for_the_first_time, _looked_at_again])
def test_a_look_from_before_a_request_came_does_not_count_for_it(
    begin: Callable[[AdapterLedger], Order],
) -> None:
    """The files may have changed between the workers' look and the request."""
    ledger = AdapterLedger(1, 1)
    order = begin(ledger)
    ledger.register(1, "n1", Check.IF_CHANGED)
    if order.placing is Placing.ON_GRANT:
        read_and_grant(ledger, "r", 1)
    ledger.on_report(Acks(order.seq), 0, _one(1))
    assert ledger.identity(1) is None
    assert ledger.admit("r", 1, 0.0) is Gate.LOADING
    (again,) = ledger.orders.take_orders()
    assert (again.placing, again.check) == (Placing.IN_PLACE, Check.IF_CHANGED)
    ledger.on_report(Acks(again.seq), 0, _one(1))
    assert ledger.admit("r", 1, 0.0) is Gate.READY


def test_what_a_call_threw_out_is_gone_also_under_an_open_order() -> None:
    ledger = AdapterLedger(2, 2)
    both = {**_one(1), **_one(2)}
    ledger.on_report(Acks(0), 0, both)
    for lora_id in (1, 2):
        ledger.register(lora_id, f"n{lora_id}", Check.IF_CHANGED)
    assert len(ledger.orders.take_orders()) == 2
    ledger.rpc_sent(3, "n3")
    ledger.on_report(Acks(2, frozenset({1, 2})), ledger.rpcs, {**_one(1), **_one(3)})
    assert ledger.counts() == (2, 2)


def test_two_ids_of_one_name_do_not_run_together() -> None:
    rig = Rig(SYNC, max_loras=2)
    rig.submit("a", prompt(20), max_tokens=6)
    rig.submit("a", prompt(20), max_tokens=6, lora_id=77)
    rig.submit("a", prompt(20), max_tokens=6)
    rig.run(limit=60)
    rig.drain()
