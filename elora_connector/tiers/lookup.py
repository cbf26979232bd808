"""Existence look-ups and TTL refreshes of the scheduler side, on threads of its own.

Replies are a few bytes, but a slow store must not slow the scheduler's loop.  Nor the
requests: a store that does not answer look-ups in time is not asked on anybody's behalf
until it has answered one in time again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from elora_connector.core.keys import RemoteKeys
from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.tiers.base import (
    Health,
    LookupResult,
    Outcome,
    RemoteTier,
    refresh_interval_s,
)
from elora_connector.tiers.breaker import CircuitBreaker

_THREADS = 2
_REFRESHES_REMEMBERED = 100_000
_REFUSING = frozenset({Health.OPEN, Health.HALF_OPEN})


@dataclass(frozen=True, slots=True)
class Reply:
    """What the store said, and how many seconds after it was asked."""

    result: LookupResult
    seconds: float


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question under way; see `RemoteLookup.poll`.

    Attributes:
        ticket: of the breaker that opens when it is late.
        asked_at, late_at: seconds on the clock of `RemoteLookup`.
    """

    reply: Future[Reply]
    ticket: int
    asked_at: float
    late_at: float

    def cancel(self) -> bool:
        """Nobody waits for it any more; others stand in line behind it.

        Returns:
            Will there be no reply?  Not so where the store was asked already.
        """
        return self.reply.cancel()


class RemoteLookup:
    """Asks the remote tier for whole chunks: every rank's part must exist.

    Args:
        tier: the store; owned by this object.
        ranks: all ranks of this engine.
        ttl_s: lifetime of a value; None when values do not expire.
        timeout_s: a look-up that takes longer is late.
        refused: told the reason whenever a look-up was answered without asking the store.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tier: RemoteTier,
        ranks: Sequence[Rank],
        ttl_s: float | None,
        *,
        timeout_s: float = 1.0,
        refused: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self._ranks = tuple(ranks)
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._refused = refused
        self._clock = clock
        self._pace = CircuitBreaker(clock=self._now)
        self._refreshed: dict[ChunkKey, float] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="elora-lookup")

    @property
    def degraded(self) -> bool:
        """Whether some or all requests do without the store at the moment."""
        return self._pace.state is not Health.CLOSED or self.tier.health() is not Health.CLOSED

    def submit(self, names: RemoteKeys, identity: Identity, keys: Sequence[ChunkKey]) -> Lookup:
        """How many leading chunks of `keys` exist on every rank; one round trip.

        Answered at once where the store is known to be down or slow.
        """
        asked_at = self._now()
        late_at = asked_at + self._timeout_s

        def ask() -> LookupResult:
            groups = [[names.of(k, identity, r) for r in self._ranks] for k in keys]
            return self.tier.leading(groups)

        if self.tier.health() in _REFUSING:
            return self._refuse("breaker")
        ticket = self._pace.admit()
        if ticket is not None:
            reply = self._pool.submit(self._timely, ticket, asked_at, late_at, ask)
            return Lookup(reply, ticket, asked_at, late_at)
        if self._pace.begin_probe():
            self._pool.submit(self._trial, late_at, ask)
        return self._refuse("slow")

    def poll(self, lookup: Lookup) -> LookupResult | None:
        """The reply, or None: ask again.  A late one is not waited for any longer."""
        if lookup.reply.done():
            return lookup.reply.result().result
        if self._now() < lookup.late_at:
            return None
        self._pace.failed(lookup.ticket)
        lookup.cancel()
        return self._refuse("slow").reply.result().result

    def waited_s(self, lookup: Lookup) -> float:
        """Seconds since the store was asked."""
        return self._now() - lookup.asked_at

    def refresh(
        self, names: RemoteKeys, identity: Identity, keys: Sequence[ChunkKey], now: float
    ) -> None:
        """Restart the TTL of chunks that are in use, root first, in one round trip.

        A path is refreshed once per `refresh_interval_s`, and with each chunk all that it
        hangs on: a parent must not go before its child.

        Args:
            keys: chunks from the root on.
            now: in seconds.
        """
        if self._ttl_s is None:
            return
        age = refresh_interval_s(self._ttl_s)
        due = [i for i, k in enumerate(keys) if now - self._refreshed.get(k, -age) >= age]
        if not due:
            return
        if len(self._refreshed) > _REFRESHES_REMEMBERED:
            self._refreshed = {k: t for k, t in self._refreshed.items() if now - t < age}
        path = keys[: due[-1] + 1]
        self._refreshed.update((k, now) for k in path)
        wanted = [names.of(k, identity, r) for k in path for r in self._ranks]
        self._pool.submit(self.tier.refresh, wanted)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.tier.close()

    def _now(self) -> float:
        return self._clock()

    def _timely(
        self, ticket: int, asked_at: float, late_at: float, ask: Callable[[], LookupResult]
    ) -> Reply:
        found = ask()
        now = self._now()
        if now < late_at:
            self._pace.succeeded(ticket)
        else:
            self._pace.failed(ticket)
        return Reply(found, now - asked_at)

    def _trial(self, late_at: float, ask: Callable[[], LookupResult]) -> None:
        """A question of a request that does not wait for it: is the store quick again?"""
        alive = False
        try:
            alive = ask().outcome is Outcome.OK and self._now() < late_at
        finally:
            self._pace.end_probe(alive)

    def _refuse(self, reason: str) -> Lookup:
        self._refused(reason)
        reply: Future[Reply] = Future()
        reply.set_result(Reply(LookupResult(Outcome.ERROR, reason=reason), 0.0))
        return Lookup(reply, 0, 0.0, 0.0)
