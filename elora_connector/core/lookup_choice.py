"""Wait or not: a look-up that takes longer than its reply is worth is not waited for.

With a store 20 ms away every prompt that nobody has seen would begin 20 ms later.  So what
look-ups found, and how long they took, is measured; a request waits for its reply only
where the time that it can be expected to save is longer.  Replies that nobody waited for
are measured like the others, so hits are noticed when they begin.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from elora_connector.core.load_choice import PROBE_S, Choice
from elora_connector.core.rates import ENOUGH, KEEP, Rates

FREE_S: Final = 2e-3
"""A look-up this short is always waited for: nobody can tell it from a step."""
_KEEP_S: Final = 0.8
"""Weight of the round trips before, at every new one: a changed network shows in a few."""
_SHARED: Final = 2.0
"""Replies to all adapters count for a single one like this many of its own."""
_ADAPTERS: Final = 1024


class _Found:
    """What the last ten or so look-ups found, discounted; starts with one that found all."""

    __slots__ = ("hits", "share", "total")

    def __init__(self, total: float, hits: float, share: float) -> None:
        self.total = total
        self.hits = hits
        """Look-ups that found something."""
        self.share = share
        """Sum over these of the share that was found."""

    def add(self, share: float) -> None:
        self.total = KEEP * self.total + 1.0
        self.hits = KEEP * self.hits + (share > 0)
        self.share = KEEP * self.share + share

    @property
    def likely(self) -> float:
        """How likely the next one finds something."""
        return self.hits / self.total

    @property
    def depth(self) -> float:
        """The share of the missing chunks that is found where anything is."""
        return min(1.0, self.share / self.hits) if self.hits > 0 else 0.0


class LookupChoice:
    """Compares the seconds that a reply can be expected to save with those it takes.

    Saved is what `LoadChoice` would allow the load to take, `margin` times recomputing,
    less what it takes.  Until round trips and prefill were measured every look-up is
    waited for.

    Args:
        margin: as for `LoadChoice`; infinite: always wait.
    """

    def __init__(self, rates: Rates, margin: float) -> None:
        self._rates = rates
        self._margin = margin
        self._round_trip_s = 0.0
        self._replies = 0
        self._all = _Found(1.0, 1.0, 1.0)
        self._found: OrderedDict[Hashable, _Found] = OrderedDict()
        self._probed = -math.inf

    @property
    def round_trip_s(self) -> float:
        """Mean seconds from a question to its reply, of late."""
        return self._round_trip_s

    def likely(self, adapter: Hashable) -> tuple[float, float]:
        """(chance that a look-up finds anything, share of the chunks it then finds)."""
        shared, own = self._all, self._found.get(adapter)
        if own is None:
            return shared.likely, shared.depth
        chance = (own.hits + _SHARED * shared.likely) / (own.total + _SHARED)
        return chance, own.depth or shared.depth

    def replied(self, adapter: Hashable, asked: int, found: int, seconds: float) -> None:
        """The store answered: of `asked` chunks it has the first `found`."""
        if not asked > 0 or not seconds >= 0:
            return
        keep = _KEEP_S if self._replies else 0.0
        self._replies += 1
        self._round_trip_s = keep * self._round_trip_s + (1 - keep) * seconds
        share = min(1.0, max(0, found) / asked)
        self._all.add(share)
        if adapter not in self._found:
            self._found[adapter] = _Found(0.0, 0.0, 0.0)
        self._found[adapter].add(share)
        self._found.move_to_end(adapter)
        if len(self._found) > _ADAPTERS:
            self._found.popitem(last=False)

    def choose(
        self,
        adapter: Hashable,
        tokens: int,
        values: int,
        value_bytes: int,
        *,
        queued: int,
        waited_s: float,
        now: float,
    ) -> Choice:
        """For a reply that is not there yet and could save up to `tokens` tokens.

        Args:
            values: remote values in which these tokens would be, of `value_bytes` bytes.
            queued: values that others are waiting for.
            waited_s: seconds since the store was asked.

        Returns:
            LOAD: wait for the reply; PROBE: wait, to see whether it pays again; RECOMPUTE.
        """
        if self._replies < ENOUGH or not self._rates.prefill.measured or math.isinf(self._margin):
            return Choice.LOAD
        # One that is overdue may come at any moment or, as likely, much later.
        overdue = waited_s >= self._round_trip_s
        cost_s = self._round_trip_s - (0.0 if overdue else waited_s)
        worth_s = self._worth_s(adapter, tokens, values, value_bytes, queued)
        if cost_s <= FREE_S or cost_s <= worth_s:
            return Choice.LOAD
        if 0 <= now - self._probed < PROBE_S:
            return Choice.RECOMPUTE
        self._probed = now
        return Choice.PROBE

    def _worth_s(
        self, adapter: Hashable, tokens: int, values: int, value_bytes: int, queued: int
    ) -> float:
        rates = self._rates
        chance, depth = self.likely(adapter)
        found = math.ceil(depth * values)
        load_s = rates.load_s(found * value_bytes) if rates.host_to_gpu.measured else 0.0
        if rates.remote_to_host.measured:
            load_s += rates.fetch_s(value_bytes, found, queued)
        return chance * (self._margin * rates.recompute_s(depth * tokens) - load_s)
