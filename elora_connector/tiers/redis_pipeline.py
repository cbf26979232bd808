"""Many exchanges over one link, several of them on their way at once.

The link is in one of two states whenever a result is given out: it will carry the
replies to exactly what was sent, or it has been dropped.  What was on its way over a
dropped link is sent once more, one at a time, over a new one: GET changes nothing, and
SET NX of a value that did arrive finds it there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from elora_connector.errors import CodecError
from elora_connector.tiers.base import Outcome, Result
from elora_connector.tiers.redis_failure import LinkClosedError, ReplyError, StoreError, explain
from elora_connector.tiers.redis_link import Link
from elora_connector.tiers.redis_pool import LinkPool
from elora_connector.tiers.redis_values import Exchange


@dataclass(frozen=True, slots=True)
class Window:
    """Bounds of what is on its way over one link; one value may always be."""

    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Guard:
    """Who is told how the store behaves, and may forbid to use it.

    Attributes:
        admit: a ticket for one exchange, or why it must not be tried.
        succeeded: the store answered an exchange as it should.
        failed: an exchange failed for good.
        led_astray: whether a failure shows that a new link would lead to another server.
    """

    admit: Callable[[], int | StoreError]
    succeeded: Callable[[int], None]
    failed: Callable[[int, StoreError], None]
    led_astray: Callable[[StoreError], bool]


@dataclass(frozen=True, slots=True)
class _Sent:
    exchange: Exchange
    ticket: int
    link: Link


@dataclass(frozen=True, slots=True)
class _Failed:
    """Failed so far: `failure` says why."""

    exchange: Exchange
    ticket: int
    failure: StoreError


@dataclass(slots=True)
class Pipeline:
    """One batch; used by one thread.

    Attributes:
        todo: taken from only while there is room; a result among the exchanges comes out
            in its turn.
        turn_s: bound over each result from the moment it is asked for, opening a link aside.
        damaged: keys of refused values that claim to be ours, to be deleted.
    """

    pool: LinkPool
    guard: Guard
    todo: Iterator[Exchange | Result]
    window: Window
    turn_s: float
    damaged: list[str] = field(default_factory=list)
    _way: deque[_Sent | _Failed | Result] = field(default_factory=deque)
    _lane: AbstractContextManager[Link] | None = None
    _link: Link | None = None

    def results(self) -> Iterator[Result]:
        """One result per exchange, in order."""
        try:
            while True:
                self._arm()
                self._fill()
                if not self._way:
                    return
                yield self._land(self._way.popleft())
        finally:
            self._drop()

    # ---- sending ----------------------------------------------------------------------

    def _fill(self) -> None:
        while self._has_room() and (step := next(self.todo, None)) is not None:
            self._way.append(step if isinstance(step, Result) else self._launch(step))

    def _has_room(self) -> bool:
        if not self._way:
            return True
        if len(self._way) >= self.window.count:
            return False
        ahead = 0
        for step in self._way:
            if not isinstance(step, _Sent) or step.link is not self._link:
                # What is sent again must not stand behind others.
                return False
            ahead += step.exchange.spec.nbytes
        return ahead < self.window.nbytes

    def _launch(self, exchange: Exchange) -> _Sent | _Failed | Result:
        ticket = self.guard.admit()
        if isinstance(ticket, StoreError):
            return Result(Outcome.ERROR, ticket.reason)
        try:
            link = self._open()
            exchange.send(link)
        except Exception as error:  # noqa: BLE001 - the contract: a failing store is data
            self._drop()
            return _Failed(exchange, ticket, explain(error))
        return _Sent(exchange, ticket, link)

    # ---- receiving --------------------------------------------------------------------

    def _land(self, step: _Sent | _Failed | Result) -> Result:
        if isinstance(step, _Sent) and step.link is not self._link:
            return self._again(step.exchange)
        end = self._outcome(step)
        if isinstance(end, Result):
            return end
        if isinstance(end.failure, LinkClosedError):
            return self._again(end.exchange)
        if self.guard.led_astray(end.failure):
            self._drop()
            self.pool.drop_idle()
            return self._again(end.exchange)
        return self._give_up(end)

    def _again(self, exchange: Exchange) -> Result:
        """Once more, with nothing else on the link."""
        end = self._outcome(self._launch(exchange))
        return end if isinstance(end, Result) else self._give_up(end)

    def _outcome(self, step: _Sent | _Failed | Result) -> Result | _Failed:
        if not isinstance(step, _Sent):
            return step
        try:
            result = step.exchange.receive(step.link)
        except CodecError as error:
            if error.ours:
                self.damaged.append(step.exchange.spec.key)
            result = Result(Outcome.BAD, error.reason)
        except Exception as error:  # noqa: BLE001 - the contract: a failing store is data
            if not isinstance(error, ReplyError):
                self._drop()
            return _Failed(step.exchange, step.ticket, explain(error))
        if step.link.torn:
            self._drop()
        self.guard.succeeded(step.ticket)
        return result

    def _give_up(self, end: _Failed) -> Result:
        self.guard.failed(end.ticket, end.failure)
        return Result(Outcome.ERROR, end.failure.reason, instead=end.failure.instead)

    # ---- the link ---------------------------------------------------------------------

    def _open(self) -> Link:
        if self._link is None:
            lane = self.pool.link()
            self._link = lane.__enter__()
            self._lane = lane
            self._arm()
        return self._link

    def _arm(self) -> None:
        if self._link is not None:
            self._link.expire_at(time.monotonic() + self.turn_s)

    def _drop(self) -> None:
        """Back to the pool, which keeps it only if nothing is on its way over it."""
        lane, self._lane, self._link = self._lane, None, None
        if lane is not None:
            lane.__exit__(None, None, None)
