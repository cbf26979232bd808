"""The nodes of a Redis Cluster: one tier each, and a map that follows fail-overs."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

from elora_connector.tiers.after_fork import begin_anew
from elora_connector.tiers.base import Health
from elora_connector.tiers.redis import RedisTier
from elora_connector.tiers.redis_failure import StoreError
from elora_connector.tiers.redis_pool import AskingPool, Endpoint, LinkPool
from elora_connector.tiers.redis_slots import SlotMap, read_ranges
from elora_connector.tiers.redis_url import Address, SeveralUrl

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 5.0
_LOG_INTERVAL_S: Final = 60.0
_LOGIN: Final = ("username", "password", "ssl_ca", "ssl_cert", "ssl_key")


class NodeTier(RedisTier):
    """One node.  It is not contacted before it is needed: the map says that it is there."""

    def _first_contact(self, fail_open: bool) -> None:
        return

    def _note(self, failure: StoreError) -> None:
        """A redirect is no failure: whoever called goes there."""
        if not failure.instead:
            super()._note(failure)


class AskingTier(NodeTier):
    """A node while it takes over a slot: it must be told that we were sent to it."""

    _new_pool: ClassVar[type[LinkPool]] = AskingPool


class ClusterNodes:
    """Finds the node for a key.  All calls but `renew` and `close` are without I/O.

    A background thread reads the map anew from the moment that a node redirects or stops
    answering until all nodes with slots answer.

    Args:
        url: seeds, and the form of a node's own URL.
        timeout_s: bound over one reading of the map.
        options: of every node's `RedisTier`.
    """

    def __init__(self, url: SeveralUrl, timeout_s: float, options: dict[str, Any]) -> None:
        self.label = url.label
        self._url = url
        self._timeout_s = timeout_s
        self._tell: Callable[[str, str], None] = options.pop("on_event", None) or _nobody
        self._options = options
        self._login = [options.get(name) for name in _LOGIN]
        self._slots = SlotMap()
        self._nodes: dict[Address, RedisTier] = {}
        self._asking: dict[Address, RedisTier] = {}
        self._logged_at = float("-inf")
        self.closed = False
        self._begin()
        begin_anew(self._begin)
        for place in url.places:
            self._endpoint(place)  # refuses unusable options at start

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def version(self) -> int:
        """Changes with the map; 0 while there is none."""
        return self._slots.version

    def serving(self, key: str) -> RedisTier | None:
        """The node whose slot the key is in; None where nobody serves it."""
        owner = self._slots.owner(key)
        return None if owner is None else self._tier(self._nodes, NodeTier, owner)

    def moved(self, key: str, place: str) -> RedisTier:
        """A node said that `place` (``host:port``) serves the key from now on."""
        address = self._address(place)
        self._slots.learn(key, address)
        self.watch()
        return self._tier(self._nodes, NodeTier, address)

    def taking_over(self, place: str) -> RedisTier:
        """A node said that a key is at `place` already, if it is anywhere."""
        return self._tier(self._asking, AskingTier, self._address(place))

    def health(self) -> Health:
        owners = self._slots.owners()
        with self._lock:
            nodes = [self._nodes[owner] for owner in owners if owner in self._nodes]
        out = sum(node.health() is not Health.CLOSED for node in nodes)
        if not owners or out == len(owners):
            return Health.OPEN
        return Health.PARTIAL if out else Health.CLOSED

    def renew(self, seen: int, first: str = "") -> None:
        """Read the map, unless another thread did so since version `seen`.

        Args:
            first: ``host:port`` of a node to ask before all others.

        Raises:
            StoreError: nobody could tell.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._reading:
            if self.version == seen:
                self._slots.replace(read_ranges(self._to_ask(first), deadline))
        self._retire(self._slots.owners())

    def watch(self) -> None:
        """Have the map read in the background until all is well."""
        with self._lock:
            if self._watcher is None and not self.closed:
                self._watcher = threading.Thread(
                    target=self._watch, name="elora-redis-slots", daemon=True
                )
                self._watcher.start()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            watcher = self._watcher
        self._stop.set()
        self._retire(set())
        if watcher is not None:
            watcher.join(timeout=2 * self._timeout_s)

    def note(self, failure: StoreError) -> None:
        """Count and, once in a while, log that the map cannot be read."""
        self._tell("error", failure.reason)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning(
                "remote tier %s: %s [%s]; KV is recomputed meanwhile",
                self.label,
                failure,
                failure.reason,
            )

    # ---- inside ---------------------------------------------------------------------

    def _tier(
        self, tiers: dict[Address, RedisTier], kind: type[NodeTier], address: Address
    ) -> RedisTier:
        with self._lock:
            if address not in tiers:
                url = self._url.server(address)
                tiers[address] = kind(url, on_event=self._heard, **self._options)
                if self.closed:
                    tiers[address].close()
            return tiers[address]

    def _heard(self, event: str, detail: str) -> None:
        if (event, detail) == ("breaker", Health.OPEN.value):
            self.watch()
        self._tell(event, detail)

    def _address(self, place: str) -> Address:
        """``host:port`` or ``:port``; without a host it is the seed's, as for `Range`."""
        host, _, port = place.rpartition(":")
        return host.strip("[]") or self._url.places[0][0], int(port)

    def _to_ask(self, first: str) -> list[tuple[Address, Endpoint]]:
        wanted = [self._address(first)] if first else []
        with self._lock:
            well = [a for a, node in self._nodes.items() if node.health() is Health.CLOSED]
        addresses = dict.fromkeys([*wanted, *well[:3], *self._url.places, *well[3:]])
        return [(address, self._endpoint(address)) for address in addresses]

    def _endpoint(self, address: Address) -> Endpoint:
        return Endpoint(self._url.server(address), *self._login)

    def _retire(self, owners: set[Address]) -> None:
        """Close the tiers of nodes that have no slot any more."""
        with self._lock:
            gone = [self._nodes.pop(a) for a in set(self._nodes) - owners]
            gone += [self._asking.pop(a) for a in set(self._asking) - owners]
        for tier in gone:
            tier.close()

    def _watch(self) -> None:
        failures = 0
        while not self._stop.wait(_pause_s(failures)):
            failures = failures + 1 if not self._renewed() else 0
            with self._lock:
                if not failures and self._all_answer():
                    # Under the lock, as in `RedisTier`: nobody may find this thread alive
                    # and rely on it while it ends.
                    self._watcher = None
                    return

    def _renewed(self) -> bool:
        try:
            self.renew(self.version)
        except StoreError as failure:
            self.note(failure)
            return False
        return True

    def _all_answer(self) -> bool:
        return all(node.health() is Health.CLOSED for node in self._nodes.values())


def _pause_s(failures: int) -> float:
    """Doubling with every failure, and jittered: many engines follow one cluster."""
    pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0**failures)
    return pause * (0.5 + random.random() / 2)  # noqa: S311 - spreading load is no secret


def _nobody(event: str, detail: str) -> None:
    return
