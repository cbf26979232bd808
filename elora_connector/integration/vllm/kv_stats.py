"""Counters and levels about chunks; looks, and changes nothing."""

from __future__ import annotations

from typing import Final

from elora_connector.core.types import Tier
from elora_connector.manager import Manager
from elora_connector.metrics import Recorder

_EVERY_S: Final = 10.0
"""Between counts of stranded chunks, which walk the whole tree."""
_TIERS: Final = (Tier.GPU, Tier.HOST)


class KvStats:
    """One per scheduler side."""

    def __init__(self, manager: Manager, recorder: Recorder) -> None:
        self._manager = manager
        self._recorder = recorder
        self._evictions_seen = 0
        self._counted = -_EVERY_S

    def step(self, now: float) -> None:
        """After the reports of a step were taken in."""
        record, manager = self._recorder, self._manager
        record.set("host_chunks", manager.slots.used)
        record.set("host_capacity_chunks", manager.slots.capacity)
        if manager.evictions > self._evictions_seen:
            record.add("evictions", manager.evictions - self._evictions_seen, "host")
            self._evictions_seen = manager.evictions
        for (direction, tier), nbytes in manager.moved.items():
            record.add("swap_bytes", nbytes, direction, tier.name.lower(), "kv")
        manager.moved.clear()
        if not manager.tree.dependency_rule and now - self._counted >= _EVERY_S:
            self._counted = now
            for tier in _TIERS:
                record.set("stranded_chunks", manager.tree.stranded(tier), tier.name.lower())
