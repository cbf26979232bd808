"""Is KV that lies in a tier worth bringing in for a request?"""

from __future__ import annotations

import math

from elora_connector.config import EloraConfig
from elora_connector.core.load_choice import Choice, LoadChoice, Source
from elora_connector.core.lookup_choice import LookupChoice
from elora_connector.core.rates import Rates
from elora_connector.core.types import Identity
from elora_connector.integration.vllm.geometry import Geometry
from elora_connector.integration.vllm.requests import RequestTracker
from elora_connector.manager import Manager


class Retrieval:
    """`min_retrieve_tokens` and load-or-recompute, for the host and the remote tier.

    Decisions are noted on the request and counted by the scheduler side once it is
    admitted, because vLLM may ask any number of times.
    """

    def __init__(
        self, config: EloraConfig, geometry: Geometry, manager: Manager, rates: Rates
    ) -> None:
        choice = config.load_or_recompute
        self._least = config.min_retrieve_tokens
        self._geometry = geometry
        self._manager = manager
        margin = choice.margin if choice.enabled else math.inf
        self._choice = LoadChoice(rates, margin)
        self._waits = LookupChoice(rates, margin)

    def usable(self, tracker: RequestTracker) -> int:
        """Most tokens that can come from anywhere: whole blocks, and one is computed."""
        block = self._geometry.block_size
        return int((tracker.request.num_tokens - 1) // block * block)

    def enough(self, tracker: RequestTracker, chunks: int) -> bool:
        """Would `chunks` leading chunks give `min_retrieve_tokens` beyond local hits?"""
        until = min(chunks * self._geometry.chunk_size, self.usable(tracker))
        return until - tracker.local >= max(1, self._least)

    def load(self, tracker: RequestTracker, tokens: int, now: float) -> bool:
        """Is a load of `tokens` tokens from the host tier worth it?"""
        if tokens < max(1, self._least):
            return False
        geometry = self._geometry
        nbytes = tokens // geometry.block_size * geometry.block_bytes
        return self._note(tracker, Source.HOST, self._choice.from_host(tokens, nbytes, now))

    def fetch(self, tracker: RequestTracker, host: int, until: int, now: float) -> bool:
        """Are chunks ``[host, until)``, which the remote tier has, worth fetching?"""
        if not self.enough(tracker, until):
            return False
        gained = self._gained(tracker, host, until)
        if gained <= 0:
            return False
        values, queued = until - host, self._manager.chunks_on_the_way
        choice = self._choice.from_remote(gained, values, self._geometry.chunk_bytes, queued, now)
        return self._note(tracker, Source.REMOTE, choice)

    def wait(
        self,
        tracker: RequestTracker,
        identity: Identity,
        missing: tuple[int, int],
        waited_s: float,
        now: float,
    ) -> bool:
        """Is a reply about the chunks in the range `missing` worth waiting for?

        Decided once: who began to wait goes on until the reply or a deadline.
        """
        decided = tracker.choices.get(Source.LOOKUP.value)
        if decided is not None:
            return decided != Choice.RECOMPUTE.value
        host, until = missing
        choice = self._waits.choose(
            identity,
            max(0, self._gained(tracker, host, until)),
            until - host,
            self._geometry.chunk_bytes,
            queued=self._manager.chunks_on_the_way,
            waited_s=waited_s,
            now=now,
        )
        return self._note(tracker, Source.LOOKUP, choice)

    def replied(self, identity: Identity, asked: int, found: int, seconds: float) -> None:
        """The remote tier has the first `found` of `asked` chunks, it said after `seconds`."""
        self._waits.replied(identity, asked, found, seconds)

    def _gained(self, tracker: RequestTracker, host: int, until: int) -> int:
        """Tokens that chunks ``[host, until)`` would save."""
        chunk = self._geometry.chunk_size
        return min(until * chunk, self.usable(tracker)) - max(host * chunk, tracker.local)

    @staticmethod
    def _note(tracker: RequestTracker, source: Source, choice: Choice) -> bool:
        tracker.choices[source.value] = choice.value
        return choice is not Choice.RECOMPUTE
