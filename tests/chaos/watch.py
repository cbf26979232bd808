"""What must not grow: memory, descriptors, threads and connections of the engine asked."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.instance import CONNECTIONS
from tests.chaos.world import World

_LIBC = ctypes.CDLL(None)
PAGE = os.sysconf("SC_PAGE_SIZE")
GROWTH = 0.03
"""Resident memory may differ by this much between the second and the last quarter."""


@dataclass(frozen=True)
class Sample:
    """Bytes, descriptors, threads of this process; clients that the server counts."""

    rss: int
    descriptors: int
    threads: int
    clients: int


@dataclass
class Watch:
    """Samples, one after each fault is over."""

    samples: list[Sample] = field(default_factory=list)

    def look(self, world: World) -> None:
        gc.collect()
        _LIBC.malloc_trim(0)  # pages that hold nothing, after the test's own large values
        with open("/proc/self/statm") as statm:
            rss = int(statm.read().split()[1]) * PAGE
        with world.admin() as admin:
            clients = admin.info("clients")["connected_clients"] - 1
        descriptors = len(os.listdir("/proc/self/fd"))
        self.samples.append(Sample(rss, descriptors, threading.active_count(), clients))

    def most(self, what: str) -> int:
        return max(getattr(sample, what) for sample in self.samples)

    def quarters(self, what: str) -> tuple[float, float]:
        """Medians of the second quarter, when pools and threads have filled, and the last."""
        values = [getattr(sample, what) for sample in self.samples]
        part = max(1, len(values) // 4)
        return statistics.median(values[part : 2 * part]), statistics.median(values[-part:])

    def check(self, engines: int = 2) -> None:
        """Raise where something grew."""
        bounds: dict[str, Callable[[float], float]] = {
            "rss": lambda early: early * (1 + GROWTH),
            "descriptors": lambda early: early + CONNECTIONS,
            "threads": lambda early: early + 4,
        }
        for what, bound in bounds.items():
            early, late = self.quarters(what)
            assert late <= bound(early), f"{what} grew from {early} to {late}"
        assert self.most("clients") <= engines * CONNECTIONS
