"""Pinned adapters, withdrawn orders and forgotten entries of the slot ledger."""

from __future__ import annotations

import pytest

from elora_connector.core.ledger import Acks, AdapterLedger, Check, Gate, Grant, Loaded, Placing


def loaded(
    lora_id: int, *, pinned: bool = False, in_slot: bool = True, content: int = 0
) -> dict[int, Loaded]:
    digest = bytes([lora_id, content]) * 16
    return {lora_id: Loaded(lora_id, f"a{lora_id}", digest, (lora_id,), in_slot, pinned)}


def ledger_with(*lora_ids: int, slots: int = 1, host: int = 2) -> AdapterLedger:
    ledger = AdapterLedger(slots, host)
    for lora_id in lora_ids:
        ledger.register(lora_id, f"a{lora_id}")
    return ledger


def in_hand(
    ledger: AdapterLedger, request_id: str, lora_id: int, there: dict[int, Loaded]
) -> Grant:
    """The first ask orders the read; it is reported as done, and the second one grants."""
    assert ledger.admit(request_id, lora_id, 0.0) is Gate.LOADING
    (order,) = ledger.orders.take_orders()
    assert (order.evict, order.displace, order.activate) == ((), (), False)
    only = frozenset({order.seq})
    ledger.on_report(Acks(order.seq, only, only), 0, there)
    assert ledger.admit(request_id, lora_id, 0.0) is Gate.LOADING
    (grant,) = ledger.orders.take_grants()
    return grant


def test_a_full_house_of_pinned_adapters_is_said_at_once() -> None:
    ledger = ledger_with(1, 2)
    ledger.on_report(Acks(0), 0, loaded(1, pinned=True))
    assert ledger.admit("r2", 2, 0.0) is Gate.PINNED
    assert ledger.orders.take_orders() == []
    assert ledger.admit("r1", 1, 0.0) is Gate.READY


def test_a_pinned_adapter_is_nobodys_victim() -> None:
    ledger = ledger_with(1, 2, 3, slots=2, host=2)
    there = {**loaded(1, pinned=True), **loaded(2)}
    ledger.on_report(Acks(0), 0, there)
    assert in_hand(ledger, "r3", 3, there).evict == (2,)
    assert ledger.admit("r1", 1, 0.0) is Gate.READY
    assert ledger.admit("r2", 2, 0.0) is Gate.LOADING
    assert ledger.taken() == {1, 3}


def ledger_that_displaced(first: dict[int, Loaded]) -> AdapterLedger:
    """Adapter 1 as in `first`, then without a slot, which adapter 2 has."""
    ledger = ledger_with(1, 2)
    ledger.on_report(Acks(0), 0, first)
    ledger.on_report(Acks(0), 0, {**loaded(1, in_slot=False), **loaded(2)})
    return ledger


def test_weights_that_were_in_a_slot_before_enter_with_the_step_of_their_order() -> None:
    ledger = ledger_that_displaced(loaded(1))
    assert ledger.admit("r1", 1, 0.0) is Gate.READY
    assert not ledger.resident(1), "no rank has said so yet"
    assert not ledger.resident(2)
    assert ledger.identity(1) is not None
    (order,) = ledger.orders.take_orders()
    assert (order.placing, order.activate, order.displace) == (Placing.NOW, True, (2,))
    ledger.scheduled("r1", 1)
    assert ledger.admit("later", 1, 0.0) is Gate.READY, "also once it was shipped"
    assert ledger.orders.take_orders() == []
    assert ledger.admit("r2", 2, 0.0) is Gate.NO_SLOT


@pytest.mark.parametrize("before", [loaded(1, in_slot=False), loaded(1, content=9)])
def test_weights_that_no_slot_has_held_wait_for_the_answer(before: dict[int, Loaded]) -> None:
    """They may not fit the model, and no batch may depend on them then."""
    ledger = ledger_that_displaced(before)
    assert ledger.admit("r1", 1, 0.0) is Gate.LOADING
    (order,) = ledger.orders.take_orders()
    assert (order.placing, order.displace) == (Placing.NOW, (2,))
    ledger.on_report(Acks(order.seq), 0, {**loaded(1), **loaded(2, in_slot=False)})
    assert ledger.admit("r1", 1, 0.0) is Gate.READY


def test_an_adapter_that_is_being_displaced_does_not_enter_before_it_has_left() -> None:
    """Ranks never take a slot from the batch: the other grant would wait for its end."""
    ledger = ledger_with(1, 2, 3, slots=2, host=3)
    for away in (3, 1, 2):  # each has been in a slot; 3 and 1 are in one now
        there = {i: loaded(i, in_slot=i != away)[i] for i in (1, 2, 3)}
        ledger.on_report(Acks(0), 0, there)
    for lora_id in (3, 1, 2):
        ledger.places.touch(ledger.places[lora_id])
    assert ledger.admit("r2", 2, 0.0) is Gate.READY
    assert ledger.admit("r3", 3, 0.0) is Gate.LOADING
    first, second = ledger.orders.take_orders()
    assert (first.displace, second.displace) == ((3,), (1,))
    there = {i: loaded(i, in_slot=i != 1)[i] for i in (1, 2, 3)}
    ledger.on_report(Acks(second.seq), 0, there)
    assert ledger.admit("r3", 3, 0.0) is Gate.READY


def test_weights_in_doubt_do_not_enter_with_the_step_of_their_order() -> None:
    ledger = ledger_that_displaced(loaded(1))
    assert ledger.admit("r1", 1, 0.0) is Gate.READY
    ledger.register(1, "a1", Check.IF_CHANGED)
    assert ledger.admit("r1", 1, 0.0) is Gate.LOADING


def test_weights_that_a_rank_lost_again_are_granted_nothing() -> None:
    ledger = ledger_with(1)
    assert ledger.admit("r1", 1, 0.0) is Gate.LOADING
    (order,) = ledger.orders.take_orders()
    only = frozenset({order.seq})
    ledger.on_report(Acks(order.seq, only, only), 0, {})
    ledger.on_report(Acks(order.seq, only), 0, {})
    assert ledger.admit("r1", 1, 0.0) is Gate.LOADING
    assert ledger.orders.take_grants() == []
    assert not ledger.taken(), "it would keep others from the slot while it is read"
    ledger.on_report(Acks(order.seq, only, only), 0, {})
    assert ledger.admit("r1", 1, 0.0) is Gate.LOADING
    assert [grant.seq for grant in ledger.orders.take_grants()] == [order.seq]


def test_a_withdrawn_order_gives_the_places_back() -> None:
    ledger = ledger_with(1, 2)
    ledger.on_report(Acks(0), 0, loaded(1))
    grant = in_hand(ledger, "r2", 2, loaded(1))
    assert grant.displace == (1,)
    only = frozenset({grant.seq})
    ledger.on_report(Acks(grant.seq, only, only), 0, loaded(1))
    assert not ledger.resident(1)
    ledger.finished("r2", 2)
    ledger.cancel(2)
    assert ledger.orders.take_cancelled() == [grant.seq]
    ledger.on_report(Acks(grant.seq), 0, loaded(1))
    assert ledger.admit("r1", 1, 0.0) is Gate.READY


def test_an_order_that_was_not_shipped_is_simply_gone() -> None:
    ledger = ledger_with(1)
    ledger.admit("r1", 1, 0.0)
    ledger.finished("r1", 1)
    ledger.cancel(1)
    assert ledger.orders.take_orders() == []
    assert ledger.admit("again", 1, 0.0) is Gate.LOADING
    assert len(ledger.orders.take_orders()) == 1


def test_entries_of_waiting_requests_are_never_forgotten() -> None:
    ledger = ledger_with(*range(1, 11))
    assert ledger.forget_idle(20, lambda: {1}) == []
    assert ledger.forget_idle(5, lambda: {1, 2}) == [3, 4, 5, 6, 7]
    assert ledger.admit("r1", 1, 0.0) is Gate.LOADING


class Told:
    """Everything a slot watch says, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def slot_taken(self, name: str) -> None:
        self.events.append(f"+{name}")

    def slot_left(self, name: str) -> None:
        self.events.append(f"-{name}")


def test_a_displaced_name_leaves_in_the_action_that_grants_its_slot() -> None:
    ledger = ledger_with(1, 2)
    ledger.on_report(Acks(0), 0, loaded(1))
    told = Told()
    ledger.slot_watch.add(told)
    assert told.events == ["+a1"], "what is there when it begins to listen"
    ledger.on_report(Acks(0), 0, {**loaded(1), **loaded(2, in_slot=False)})
    assert ledger.admit("r2", 2, 0.0) is Gate.LOADING
    assert told.events == ["+a1", "-a1", "+a2"]
    ledger.finished("r2", 2)
    ledger.cancel(2)
    assert told.events == ["+a1", "-a1", "+a2", "-a2"], "nobody waits for it any more"
    ledger.on_report(Acks(1), 0, loaded(1))
    assert told.events[4:] == ["+a1"], "the workers had not displaced it"


def test_two_ids_of_a_name_are_one_name_in_slots() -> None:
    ledger = AdapterLedger(2, 2)
    told = Told()
    ledger.slot_watch.add(told)
    digest = bytes(32)
    both = {i: Loaded(i, "same", digest, (i,), True) for i in (1, 2)}
    ledger.on_report(Acks(0), 0, both)
    ledger.on_report(Acks(0), 0, {2: both[2]})
    assert told.events == ["+same"]
    ledger.on_report(Acks(0), 0, {})
    assert told.events == ["+same", "-same"]


def test_files_that_hang_take_nothing_from_anyone() -> None:
    ledger = ledger_with(1, 2, 3)
    ledger.on_report(Acks(0), 0, loaded(1))
    assert ledger.admit("r2", 2, 0.0) is Gate.LOADING
    (hanging,) = ledger.orders.take_orders()
    assert ledger.taken() == set()
    assert ledger.admit("r1", 1, 0.0) is Gate.READY
    ledger.finished("r1", 1)
    # Another adapter comes and goes although the earlier order has not ended.
    assert ledger.admit("r3", 3, 0.0) is Gate.LOADING
    (order,) = ledger.orders.take_orders()
    both = frozenset({hanging.seq, order.seq})
    ledger.on_report(Acks(order.seq, both, frozenset({order.seq})), 0, loaded(1))
    assert ledger.admit("r3", 3, 0.0) is Gate.LOADING
    (grant,) = ledger.orders.take_grants()
    assert grant.displace == (1,)
    three = {**loaded(1, in_slot=False), **loaded(3)}
    ledger.on_report(Acks(order.seq, frozenset({hanging.seq})), 0, three)
    assert ledger.admit("r3", 3, 0.0) is Gate.READY


def test_a_read_that_failed_on_one_rank_is_withdrawn_on_all() -> None:
    ledger = ledger_with(1)
    ledger.admit("r1", 1, 0.0)
    (order,) = ledger.orders.take_orders()
    ledger.failed(order.seq, 1)
    assert ledger.orders.take_cancelled() == [order.seq]
    assert ledger.admit("r1", 1, 0.0) is Gate.LOADING
    assert len(ledger.orders.take_orders()) == 1, "the next ask reads again"


def test_memory_that_goes_to_kv_counts_as_gone_from_the_order_on() -> None:
    ledger = ledger_with(1, 2, slots=1, host=3)
    ledger.on_report(Acks(0), 0, {**loaded(1), **loaded(2, in_slot=False)})
    assert ledger.places.may_leave_host(ledger.places[2], ())
    assert not ledger.places.may_leave_host(ledger.places[2], {2})
    ledger.evict([2])
    (order,) = ledger.orders.take_orders()
    assert (order.lora_id, order.evict) == (None, (2,))
    ledger.on_report(Acks(0), 0, {**loaded(1), **loaded(2, in_slot=False)})
    assert ledger.counts() == (1, 1), "from the order on it counts as gone"
    ledger.on_report(Acks(order.seq), 0, loaded(1))
    assert ledger.counts() == (1, 1)
