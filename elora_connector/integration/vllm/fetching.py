"""Fetch before promise: what a waiting request has to do with the remote tier.

A remote hit first becomes a job that brings chunks into the host tier; meanwhile vLLM
is told "ask again" (`None`).  So a fault of the store never reaches vLLM's load path.
One absolute deadline per request ends the wait; the job goes on for whoever comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from elora_connector.core.keys import RemoteKeys
from elora_connector.core.types import ChunkKey, Identity
from elora_connector.integration.vllm.requests import RemoteWait, RequestTracker
from elora_connector.manager import Job, Manager
from elora_connector.tiers.base import Outcome
from elora_connector.tiers.lookup import Lookup, RemoteLookup

_BACKLOG: Final = 4
"""Open look-ups beyond which those that nobody waits for are taken back."""


class Worth(Protocol):
    """What pays; asked with measured times, never with guesses."""

    def wait(
        self,
        tracker: RequestTracker,
        identity: Identity,
        missing: tuple[int, int],
        waited_s: float,
        now: float,
    ) -> bool:
        """Wait for the reply about the chunks in the range `missing`?"""
        ...

    def fetch(self, tracker: RequestTracker, host: int, until: int, now: float) -> bool:
        """Fetch chunks ``[host, until)``, which the store has?"""
        ...

    def replied(self, identity: Identity, asked: int, found: int, seconds: float) -> None:
        """The store answered, whether or not somebody still waited for it."""
        ...


class RemoteWaits:
    """Drives each waiting request through look-up and fetch.

    Args:
        manager: reserves and pins.
        lookup: asks the store; owned by this object.
        deadline_s: longest wait of one request.
        worth: tells what is worth waiting for and fetching.
        count: called with the name of what happened.
    """

    def __init__(
        self,
        manager: Manager,
        lookup: RemoteLookup,
        deadline_s: float,
        worth: Worth,
        count: Callable[[str], None],
    ) -> None:
        self.lookup = lookup
        self._manager = manager
        self._deadline_s = deadline_s
        self._worth = worth
        self._count = count
        self._started: list[tuple[Job, list[ChunkKey], bytes]] = []
        self._open: list[tuple[RequestTracker, Lookup, Identity, int]] = []
        """Look-ups without a reply, those of requests that went on without it included."""

    def start_early(
        self, tracker: RequestTracker, names: RemoteKeys, identity: Identity, keys: list[ChunkKey]
    ) -> None:
        """Begin the look-up when the request arrives, so that the first ask finds a reply."""
        host = self._manager.host_prefix(keys)
        if host < len(keys) and not self._manager.fetch_jobs(keys[host : host + 1]):
            self._look_up(tracker, names, identity, keys, host)

    def must_wait(
        self,
        tracker: RequestTracker,
        names: RemoteKeys,
        identity: Identity,
        keys: list[ChunkKey],
        now: float,
    ) -> bool:
        """One ask of vLLM; True: not decided yet, ask again after the next step.

        `keys` are all full chunks of the request; some may be in the host tier.
        """
        self.learn()
        host = self._manager.host_prefix(keys)
        if tracker.wait is RemoteWait.OVER:
            return False
        if host == len(keys):
            return self._over(tracker)
        if tracker.deadline is None:
            tracker.deadline = now + self._deadline_s
        if now >= tracker.deadline:
            self._count("deadline")
            self.forget(tracker)
            self._manager.release(tracker.id)
            return self._over(tracker)
        if tracker.host_before is None:
            tracker.host_before = host
        return self._advance(tracker, names, identity, keys, host, now)

    def learn(self) -> None:
        """Take in the replies that have come, also those that nobody waits for any more."""
        waiting = []
        for entry in self._open:
            tracker, lookup, identity, asked = entry
            reply = lookup.reply
            if not reply.done():
                waiting.append(entry)
            elif not reply.cancelled() and reply.exception() is None:
                result = reply.result().result
                if tracker.lookup is lookup and result.count:
                    tracker.remote_known = tracker.lookup_from + result.count
                if result.outcome is Outcome.OK:
                    self._worth.replied(identity, asked, result.count, reply.result().seconds)
        self._open = waiting

    def forget(self, tracker: RequestTracker) -> None:
        """Nobody waits for this request's look-up any more; others stand in line behind it."""
        if tracker.lookup is not None:
            tracker.lookup.cancel()

    def take_started(self) -> list[tuple[Job, list[ChunkKey], bytes]]:
        """Fetch jobs to ship with this step, with their requests' keys and root key."""
        started, self._started = self._started, []
        return started

    def close(self) -> None:
        self.lookup.close()

    # ---- inside -----------------------------------------------------------------

    def _advance(
        self,
        tracker: RequestTracker,
        names: RemoteKeys,
        identity: Identity,
        keys: list[ChunkKey],
        host: int,
        now: float,
    ) -> bool:
        if tracker.wait is RemoteWait.NOT_ASKED:
            if self._join(tracker, keys, host):
                return True
            self._look_up(tracker, names, identity, keys, host)
        if tracker.wait is RemoteWait.LOOKUP and not self._reply(tracker):
            return self._is_patient(tracker, identity, (host, len(keys)), now)
        if tracker.wait is RemoteWait.FETCHING:
            if any(self._manager.job_open(job) for job in tracker.jobs):
                return True
            if tracker.lookup is None:  # it only joined: the rest is not known yet
                self._look_up(tracker, names, identity, keys, host)
                return self._is_patient(tracker, identity, (host, len(keys)), now)
            tracker.wait = RemoteWait.LOOKED_UP
        return self._fetch(tracker, identity, keys, host, now)

    def _fetch(
        self,
        tracker: RequestTracker,
        identity: Identity,
        keys: list[ChunkKey],
        host: int,
        now: float,
    ) -> bool:
        """Known how far the store goes: join or start the one fetch, or be done."""
        wanted = keys[: tracker.remote_known]
        if tracker.fetch_from is not None:
            if host < tracker.fetch_until:
                # Gone or refused since the look-up: to be written again, not taken as there.
                tracker.remote_known = host
            return self._over(tracker)
        if host >= len(wanted):
            return self._over(tracker)
        if self._join(tracker, wanted, host):
            return True
        if not self._worth.fetch(tracker, host, len(wanted), now):
            self._count("not_worth")
            return self._over(tracker)
        job = self._manager.begin_fetch(tracker.id, identity, wanted, host, now)
        if job is None:
            self._count("no_room")
            return self._over(tracker)
        self._started.append((job, list(keys), tracker.root))
        tracker.jobs = {job.id}
        tracker.wait = RemoteWait.FETCHING
        tracker.fetch_from = host
        tracker.fetch_until = host + len(job.items)
        return True

    def _join(self, tracker: RequestTracker, keys: Sequence[ChunkKey], host: int) -> bool:
        """Wait for chunks that another request's fetch is bringing in."""
        jobs = self._manager.fetch_jobs(keys[host : host + 1])
        if not jobs:
            return False
        self._manager.join(tracker.id, keys[host:])
        tracker.jobs = jobs
        tracker.wait = RemoteWait.FETCHING
        self._count("joined")
        return True

    def _look_up(
        self,
        tracker: RequestTracker,
        names: RemoteKeys,
        identity: Identity,
        keys: list[ChunkKey],
        host: int,
    ) -> None:
        tracker.lookup = self.lookup.submit(names, identity, keys[host:])
        tracker.lookup_from = host
        tracker.wait = RemoteWait.LOOKUP
        self._open.append((tracker, tracker.lookup, identity, len(keys) - host))

    def _reply(self, tracker: RequestTracker) -> bool:
        """Has the store answered?  Then note how far it goes."""
        assert tracker.lookup is not None
        result = self.lookup.poll(tracker.lookup)
        if result is None:
            return False
        tracker.remote_known = tracker.lookup_from + result.count if result.count else 0
        tracker.wait = RemoteWait.LOOKED_UP
        return True

    def _is_patient(
        self, tracker: RequestTracker, identity: Identity, missing: tuple[int, int], now: float
    ) -> bool:
        """No reply yet.  One that comes before the request is scheduled is used in any case."""
        assert tracker.lookup is not None
        waited_s = self.lookup.waited_s(tracker.lookup)
        if self._worth.wait(tracker, identity, missing, waited_s, now):
            return True
        # Its reply is learnt from, unless so many are open that others would wait for it.
        if len(self._open) > _BACKLOG and tracker.lookup.cancel():
            self._over(tracker)
        return False

    def _over(self, tracker: RequestTracker) -> bool:
        tracker.wait = RemoteWait.OVER
        return False
