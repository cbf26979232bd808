"""Virtual time, and links on which one transfer runs after the other."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[float], None]
"""Called with the time of the event, seconds."""


class Clock:
    """Events by time, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._asked = 0

    @property
    def next(self) -> float:
        """Time of the next event; inf if there is none."""
        return self._events[0][0] if self._events else math.inf

    def at(self, when: float, action: Action) -> None:
        """Call `action` at `when`, or now if that is past."""
        self._asked += 1
        heapq.heappush(self._events, (max(when, self.now), self._asked, action))

    def advance(self, until: float) -> None:
        """Let everything up to `until` happen, then it is `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action(self.now)
        self.now = max(self.now, until)


@dataclass(slots=True)
class _Transfer:
    nbytes: int
    seconds: float
    done: Callable[[float, float], None]


class Wire:
    """One direction of one link: first in, first out, demand before prefetch.

    Args:
        per_s: bytes a second.
        overhead_s: seconds of every transfer, whatever its size.

    Attributes:
        asked, moved: bytes handed over, and arrived.
        busy_s: seconds spent on what has arrived.
    """

    def __init__(self, clock: Clock, per_s: float, overhead_s: float) -> None:
        if not per_s > 0 or not overhead_s >= 0:
            raise ValueError(f"need per_s > 0 and overhead_s >= 0, got {per_s}, {overhead_s}")
        self.per_s = per_s
        self.overhead_s = overhead_s
        self.asked = 0
        self.moved = 0
        self.busy_s = 0.0
        self._clock = clock
        self._queues: tuple[deque[_Transfer], deque[_Transfer]] = (deque(), deque())
        self._current: _Transfer | None = None
        self._current_end = 0.0
        self._demand_s = 0.0

    @property
    def under_way(self) -> int:
        """Bytes that have not arrived yet."""
        waiting = sum(t.nbytes for queue in self._queues for t in queue)
        return waiting + (0 if self._current is None else self._current.nbytes)

    def send(
        self,
        nbytes: int,
        done: Callable[[float, float], None],
        *,
        extra_s: float = 0.0,
        demand: bool = True,
    ) -> float:
        """Queue a transfer.

        Args:
            done: called with (time, seconds the transfer itself took).
            extra_s: overhead beyond the wire's own.
            demand: something waits for it; goes before every transfer that is not.

        Returns:
            When it will have arrived if nothing more is asked for.
        """
        transfer = _Transfer(nbytes, self.overhead_s + extra_s + nbytes / self.per_s, done)
        self.asked += nbytes
        self._queues[0 if demand else 1].append(transfer)
        if demand:
            self._demand_s += transfer.seconds
        if self._current is None:
            self._start()
        ahead = 0.0 if demand else sum(t.seconds for t in self._queues[1])
        return self._current_end + self._demand_s + ahead

    def pass_through(self, nbytes: int, extra_s: float) -> float:
        """Account for a transfer that the engine itself waits for; its seconds."""
        seconds = self.overhead_s + extra_s + nbytes / self.per_s
        self.asked += nbytes
        self.moved += nbytes
        self.busy_s += seconds
        return seconds

    def _start(self) -> None:
        for urgent, queue in zip((True, False), self._queues, strict=True):
            if queue:
                self._current = queue.popleft()
                if urgent:
                    self._demand_s -= self._current.seconds
                self._current_end = self._clock.now + self._current.seconds
                self._clock.at(self._current_end, self._arrived)
                return

    def _arrived(self, now: float) -> None:
        transfer = self._current
        if transfer is None:
            raise AssertionError("a transfer arrived that was not under way")
        self._current = None
        self.moved += transfer.nbytes
        self.busy_s += transfer.seconds
        self._start()
        transfer.done(now, transfer.seconds)
