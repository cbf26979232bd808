"""Existence look-ups and TTL refreshes of the scheduler side, on a thread of its own.

Replies are a few bytes, but a slow store must not slow the scheduler's loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from elora_connector.core.keys import RemoteKeys
from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.tiers.base import LookupResult, RemoteTier, refresh_interval_s

_THREADS = 2
_REFRESHES_REMEMBERED = 100_000


class RemoteLookup:
    """Asks the remote tier for whole chunks: every rank's part must exist.

    Args:
        tier: the store; owned by this object.
        ranks: all ranks of this engine.
        ttl_s: lifetime of a value; None when values do not expire.
    """

    def __init__(self, tier: RemoteTier, ranks: Sequence[Rank], ttl_s: float | None) -> None:
        self.tier = tier
        self._ranks = tuple(ranks)
        self._ttl_s = ttl_s
        self._refreshed: dict[ChunkKey, float] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="elora-lookup")

    def submit(
        self, names: RemoteKeys, identity: Identity, keys: Sequence[ChunkKey]
    ) -> Future[LookupResult]:
        """How many leading chunks of `keys` exist on every rank; one round trip."""
        ranks = self._ranks

        def ask() -> LookupResult:
            return self.tier.leading([[names.of(k, identity, r) for r in ranks] for k in keys])

        return self._pool.submit(ask)

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
