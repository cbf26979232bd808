"""Requests that have not arrived yet, and those that wait for their turn."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from elora_connector.simulator.live import Live
from elora_connector.simulator.requests import SimRequest


class Arrivals:
    """Open loop between sessions, closed loop inside one.

    Args:
        rate: factor on the speed of arrivals, not on the pace inside a session.
    """

    def __init__(self, requests: Sequence[SimRequest], rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"the rate must be positive, got {rate}")
        self._rate = rate
        self._later: dict[int, deque[SimRequest]] = {}
        self._due: list[tuple[float, int, SimRequest]] = []
        self._count = 0
        for request in requests:
            turns = self._later.setdefault(request.session, deque())
            turns.append(request)
        for turns in self._later.values():
            if len(turns) > 1:
                ordered = sorted(turns, key=lambda r: r.turn)
                turns.clear()
                turns.extend(ordered)
            first = turns.popleft()
            self._push(first.at / rate, first)

    @property
    def next(self) -> float:
        """When the next request arrives, as far as that is known; else inf."""
        return self._due[0][0] if self._due else math.inf

    def take(self, now: float) -> list[tuple[float, SimRequest]]:
        """Requests that have arrived by now, with their times."""
        arrived = []
        while self._due and self._due[0][0] <= now:
            at, _, request = heapq.heappop(self._due)
            arrived.append((at, request))
        return arrived

    def ended(self, request: SimRequest, now: float) -> None:
        """The next turn of its session comes after the user has thought."""
        turns = self._later[request.session]
        if turns:
            following = turns.popleft()
            self._push(max(following.at / self._rate, now + following.think_s), following)

    def _push(self, at: float, request: SimRequest) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, request))


class WaitingLine:
    """First come, first served, with a skip over adapters that cannot be had now.

    Requests of one adapter get the same answer, so only the first of each is asked.
    """

    def __init__(self) -> None:
        self._lines: dict[int | None, deque[Live]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, live: Live) -> None:
        """To the end."""
        self._lines.setdefault(live.lora_id, deque()).append(live)
        self._size += 1

    def put_back(self, live: Live) -> None:
        """A preempted request keeps its place."""
        line = self._lines.setdefault(live.lora_id, deque())
        place = 0
        while place < len(line) and line[place].order < live.order:
            place += 1
        line.insert(place, live)
        self._size += 1

    def heads(self) -> list[tuple[int, Live]]:
        """The first of every adapter, as a heap by order."""
        heads = [(line[0].order, line[0]) for line in self._lines.values()]
        heapq.heapify(heads)
        return heads

    def pop(self, live: Live) -> Live | None:
        """Take out the first of its adapter; returns who follows it."""
        line = self._lines[live.lora_id]
        if line.popleft() is not live:
            raise AssertionError("only the first of an adapter may leave the line")
        self._size -= 1
        if line:
            return line[0]
        del self._lines[live.lora_id]
        return None
