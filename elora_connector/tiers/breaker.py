"""Circuit breaker: while a store is down nobody pays for finding out again.

Requests never probe.  One background thread asks `wait_s`, then `begin_probe`, then
reports with `end_probe`, so a request is either served by a store known to answer or
refused at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from elora_connector.tiers.base import Health


class CircuitBreaker:
    """Thread-safe; the callbacks run outside the lock, on the thread that caused the change.

    A call is admitted with a ticket.  A ticket is void once the breaker has opened, so
    that operations which began before an outage and end after it change nothing.

    Args:
        failures: consecutive failures that open it.
        first_backoff_s: pause before the first probe; it doubles with each failed probe
            and each relapse, and starts over when a request has succeeded.
        max_backoff_s: upper bound of the pause, before jitter.
        jitter: the pause is shortened by up to this fraction, so that many engines do
            not probe a recovering store at the same moment.
        clock: seconds, monotonic.
        uniform: random numbers in [0, 1).
        on_change: called with the new state.
    """

    def __init__(
        self,
        *,
        failures: int = 1,
        first_backoff_s: float = 0.25,
        max_backoff_s: float = 10.0,
        jitter: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
        on_change: Callable[[Health], None] = lambda _: None,
    ) -> None:
        self._limit = failures
        self._first = first_backoff_s
        self._max = max_backoff_s
        self._jitter = jitter
        self._clock = clock
        self._uniform = uniform
        self._on_change = on_change
        self._lock = threading.Lock()
        self._state = Health.CLOSED
        self._ticket = 1
        self._failures = 0
        self._backoff = first_backoff_s
        self._probe_at = 0.0

    @property
    def state(self) -> Health:
        return self._state

    def admit(self) -> int | None:
        """A ticket to be returned with the outcome, or None: do not even try."""
        with self._lock:
            return self._ticket if self._state is Health.CLOSED else None

    def succeeded(self, ticket: int) -> None:
        with self._lock:
            if self._valid(ticket):
                self._failures = 0
                self._backoff = self._first

    def failed(self, ticket: int) -> None:
        with self._lock:
            if not self._valid(ticket):
                return
            self._failures += 1
            if self._failures < self._limit:
                return
            self._open()
        self._on_change(Health.OPEN)

    def wait_s(self) -> float:
        """Seconds until a probe is due; 0 when it is, also when none is needed."""
        with self._lock:
            if self._state is not Health.OPEN:
                return 0.0
            return max(0.0, self._probe_at - self._clock())

    def begin_probe(self) -> bool:
        """Claim the one probe that is due; True obliges the caller to `end_probe`."""
        with self._lock:
            if self._state is not Health.OPEN or self._clock() < self._probe_at:
                return False
            self._state = Health.HALF_OPEN
        self._on_change(Health.HALF_OPEN)
        return True

    def end_probe(self, alive: bool) -> None:
        with self._lock:
            if self._state is not Health.HALF_OPEN:
                return
            if alive:
                self._state = Health.CLOSED
                self._failures = 0
            else:
                self._open()
            state = self._state
        self._on_change(state)

    def _valid(self, ticket: int) -> bool:
        return self._state is Health.CLOSED and ticket == self._ticket

    def _open(self) -> None:
        self._state = Health.OPEN
        self._ticket += 1
        pause = self._backoff * (1.0 - self._jitter * self._uniform())
        self._probe_at = self._clock() + pause
        self._backoff = min(self._max, self._backoff * 2.0)
