"""Orders of the adapter ledger: numbered, shipped, granted, withdrawn, acknowledged."""

from __future__ import annotations

from collections.abc import Collection

from elora_connector.core.adapter_orders import Acks, Check, Grant, Order, Placing
from elora_connector.core.adapter_places import AdapterPlaces, Entry, Victims

NOBODY = Victims()


class OrderBook:
    """What the workers are to be told, and what they have not ended yet.

    Args:
        places: change with every order and grant, and their listeners hear of it.
    """

    def __init__(self, places: AdapterPlaces) -> None:
        self._places = places
        self._cancelled: list[int] = []
        self._outbox: list[Order] = []
        self._grants: list[Grant] = []
        self._open: dict[int, Order] = {}
        self._seq = 0

    @property
    def open(self) -> Collection[Order]:
        """Orders that have not ended."""
        return self._open.values()

    @property
    def reading(self) -> int:
        """Orders that read, or have read and wait for a place."""
        return sum(order.placing is Placing.ON_GRANT for order in self._open.values())

    # ---- orders --------------------------------------------------------------------

    def order(
        self,
        entry: Entry,
        placing: Placing,
        victims: Victims = NOBODY,
        *,
        activate: bool = False,
        read: bool = False,
    ) -> None:
        """A new order for `entry`; `read`: every rank has the weights, nothing is checked."""
        self._seq += 1
        entry.order = Order(
            self._seq,
            entry.lora_id,
            Check.NONE if read else entry.check,
            placing,
            activate,
            victims.evict,
            victims.displace,
            read,
        )
        self._ship(entry.order)
        self._places.moved(entry)

    def evict(self, lora_ids: tuple[int, ...]) -> None:
        """A new order that only makes room."""
        self._seq += 1
        self._ship(Order(self._seq, None, evict=lora_ids, read=True))

    def grant(
        self, entry: Entry, order: Order, victims: Victims = NOBODY, *, activate: bool
    ) -> None:
        """Give an order its places, or more of them while no worker knows of it."""
        order.placing = Placing.NOW
        order.activate = activate
        order.evict = (*order.evict, *victims.evict)
        order.displace = (*order.displace, *victims.displace)
        if order not in self._outbox:
            self._drop_grant(order.seq)
            self._grants.append(Grant(order.seq, activate, order.evict, order.displace))
        self._places.mark_gone(order)
        self._places.moved(entry)

    def withdraw(self, entry: Entry, order: Order) -> None:
        """Nobody wants it any more; what it put out stays where the next report says."""
        entry.order = None
        self._open.pop(order.seq, None)
        self._drop_grant(order.seq)
        if order in self._outbox:
            self._outbox.remove(order)
        else:
            self._cancelled.append(order.seq)
        self._places.moved(entry)

    def strengthen(self, order: Order, check: Check) -> None:
        """Let a worker look harder, if it was not told to look yet.

        One that was may have looked already, before the files changed: another look follows.
        """
        if order in self._outbox:
            order.check = max(order.check, check)
        else:
            order.outrun = True

    def is_shipped(self, order: Order) -> bool:
        """Have the workers been told all of it?"""
        return order not in self._outbox and all(g.seq != order.seq for g in self._grants)

    def end(self, acks: Acks) -> list[Entry]:
        """Take in acknowledgements; entries whose order has ended, well or badly."""
        ended = []
        for entry in self._places:
            order = entry.order
            if order is None:
                continue
            if order.placing is Placing.ON_GRANT:
                order.read = order.seq in acks.read  # what was found there may have left since
            if acks.ended(order.seq):
                # Also after a failed re-check: the old weights are there, and usable.
                entry.order = None
                if order.check >= entry.check and not order.outrun:
                    entry.check = Check.NONE
                ended.append(entry)
        self._open = {seq: order for seq, order in self._open.items() if not acks.ended(seq)}
        return ended

    # ---- shipping ------------------------------------------------------------------

    def take_orders(self) -> list[Order]:
        """Orders to ship with this step's metadata, oldest first."""
        orders, self._outbox = self._outbox, []
        return orders

    def take_grants(self) -> list[Grant]:
        """Places for orders shipped before, to ship with this step's metadata."""
        grants, self._grants = self._grants, []
        return grants

    def take_cancelled(self) -> list[int]:
        """Numbers of withdrawn orders, to ship with this step's metadata."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def _ship(self, order: Order) -> None:
        self._outbox.append(order)
        self._open[order.seq] = order
        self._places.mark_gone(order)

    def _drop_grant(self, seq: int) -> None:
        self._grants = [grant for grant in self._grants if grant.seq != seq]
