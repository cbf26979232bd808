"""Which node of a Redis Cluster serves which keys."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from elora_connector.tiers.redis_failure import StoreError
from elora_connector.tiers.redis_pool import Endpoint
from elora_connector.tiers.redis_url import Address

Range = tuple[int, int, Address]
"""First and last slot, and the primary that serves them."""

_SLOTS: Final = int(REDIS_CLUSTER_HASH_SLOTS)


class SlotMap:
    """Slot -> primary.  Any thread may read while another replaces it."""

    def __init__(self) -> None:
        self._owners: list[Address | None] = [None] * _SLOTS
        self.version = 0
        """Grows with every `replace`; 0: nothing is known yet."""

    def owner(self, key: str) -> Address | None:
        return self._owners[_slot(key)]

    def owners(self) -> set[Address]:
        return {owner for owner in set(self._owners) if owner is not None}

    def learn(self, key: str, owner: Address) -> None:
        """One slot moved; the others are as before."""
        self._owners[_slot(key)] = owner

    def replace(self, ranges: Iterable[Range]) -> None:
        owners: list[Address | None] = [None] * _SLOTS
        for first, last, owner in ranges:
            owners[first : last + 1] = [owner] * (last + 1 - first)
        self._owners = owners
        self.version += 1


def read_ranges(nodes: Sequence[tuple[Address, Endpoint]], deadline: float) -> list[Range]:
    """Ask one node after the other; each gets an equal share of what time is left.

    Args:
        nodes: whom to ask, the likeliest to answer first.
        deadline: in `time.monotonic` seconds.

    Raises:
        StoreError: none of them knows a cluster that serves anything.
    """
    failure = StoreError("connection", "no node was asked", down=True)
    for position, (address, endpoint) in enumerate(nodes):
        now = time.monotonic()
        try:
            rows = endpoint.ask(
                now + (deadline - now) / (len(nodes) - position), "CLUSTER", "SLOTS"
            )
            return _ranges(rows, address)
        except StoreError as error:
            failure = error
    raise failure


def _ranges(rows: Any, asked: Address) -> list[Range]:
    try:
        ranges = [_range(row, asked) for row in rows]
    except (TypeError, ValueError, IndexError):
        raise StoreError("reply", "the cluster's slots are not readable", down=True) from None
    if not ranges:
        raise StoreError("cluster", "the Redis Cluster has no slots assigned", down=True)
    return ranges


def _range(row: Any, asked: Address) -> Range:
    first, last, primary = int(row[0]), int(row[1]), row[2]
    if not 0 <= first <= last < _SLOTS:
        raise ValueError
    host = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
    # A node that does not know its own name means "where you reached me".
    return first, last, (host or asked[0], int(primary[1]))


def _slot(key: str) -> int:
    return int(key_slot(key.encode("utf-8", "surrogatepass")))
