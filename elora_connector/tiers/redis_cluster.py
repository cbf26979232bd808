"""The remote tier over a Redis Cluster: every key at its node, all nodes as one store.

Each node is a `RedisTier` with its own connections and breaker, so a dead node costs the
chunks in its slots and nothing else.  Keys of one chunk share a hash tag, hence a slot
and a node; a prompt's chunks spread over all nodes, which are asked at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, Final, TypeVar

from elora_connector.errors import ConfigError
from elora_connector.tiers.after_fork import begin_anew
from elora_connector.tiers.base import Health, Item, LookupResult, Outcome, Result, ValueSpec
from elora_connector.tiers.redis import RedisTier
from elora_connector.tiers.redis_failure import StoreError
from elora_connector.tiers.redis_nodes import ClusterNodes
from elora_connector.tiers.redis_url import SeveralUrl, Topology, topology_of

_HOPS: Final = 4
"""Redirects followed for one call; during a fail-over two nodes may name each other."""

_FAN: Final = 8
_ROUND: Final = 32
"""Values of one batch that are asked for at a time, over all nodes."""

R = TypeVar("R")


def redis_tier(url: str, **options: Any) -> RedisTier | ClusterTier:
    """The tier for any URL of `redis_url`; `options` as in `RedisTier`.

    Raises:
        ConfigError: as from the tiers.
    """
    kind = ClusterTier if topology_of(url) is Topology.CLUSTER else RedisTier
    return kind(url, **options)


class ClusterTier:
    """Chunk values in a Redis Cluster; see `RemoteTier` for the contract.

    Args:
        url: redis-cluster:// or rediss-cluster://, with some of the nodes.
        fail_open: start without the cluster and wait for it in the background; else raise.
        connect_timeout_s: one bound over finding the nodes, also in the constructor.
        options: as in `RedisTier`, for every node.

    Raises:
        ConfigError: the settings cannot be used, or the cluster cannot while not `fail_open`.
    """

    def __init__(
        self, url: str, *, fail_open: bool = True, connect_timeout_s: float = 1.0, **options: Any
    ) -> None:
        options["connect_timeout_s"] = connect_timeout_s
        self._nodes = ClusterNodes(SeveralUrl.parse(url), connect_timeout_s, options)
        self._begin()
        begin_anew(self._begin)
        try:
            self._nodes.renew(0)
        except StoreError as failure:
            if not fail_open:
                self.close()
                raise ConfigError(f"remote tier {self._nodes.label}: {failure}") from None
            self._nodes.note(failure)
            self._nodes.watch()

    def __repr__(self) -> str:
        return f"ClusterTier({self._nodes.label}, {self.health().value})"

    def leading(self, groups: Sequence[Sequence[str]]) -> LookupResult:
        return self._leading(list(takewhile(len, groups)), _HOPS)

    def read_into(self, spec: ValueSpec, dest: memoryview) -> Result:
        return self._at_node(spec.key, lambda tier: tier.read_into(spec, dest))

    def write(self, spec: ValueSpec, payload: memoryview) -> Result:
        return self._at_node(spec.key, lambda tier: tier.write(spec, payload))

    def read_many(self, items: Iterable[Item]) -> Iterator[Result]:
        """As the contract says, in rounds: each asks its nodes at the same time."""
        source = iter(items)
        while turn := list(islice(source, _ROUND)):
            yield from self._read_round(turn)

    def write_many(self, items: Iterable[Item]) -> Iterator[Result]:
        """One after the other: nodes do not wait for each other, but a child must for its
        parent, which is at another node as often as not."""
        for spec, payload in items:
            yield self.write(spec, payload)

    def refresh(self, keys: Sequence[str]) -> Result:
        """As the contract says, in one round trip to each node.

        Keys of a slot that is just moving between nodes are left as they are.
        """
        seen = self._nodes.version
        ends = self._refresh(keys)
        moved = next((end for end in ends if end.reason == "moved"), None)
        if moved is not None and self._renewed(seen, moved.instead):
            ends = self._refresh(keys)
        failed = [end for end in ends if not end.ok and end.reason != "ask"]
        return failed[0] if failed else Result(Outcome.OK)

    def health(self) -> Health:
        """PARTIAL while only some of the nodes that have slots answer."""
        return self._nodes.health()

    def close(self) -> None:
        self._nodes.close()

    # ---- one key --------------------------------------------------------------------

    def _at_node(self, key: str, call: Callable[[RedisTier], Result]) -> Result:
        tier = self._nodes.serving(key)
        if tier is None:
            return Result(Outcome.ERROR, self._why_nobody())
        end = call(tier)
        for _ in range(_HOPS):
            if not end.instead:
                break
            if end.reason == "moved":
                end = call(self._nodes.moved(key, end.instead))
            else:
                end = call(self._nodes.taking_over(end.instead))
        return end

    def _why_nobody(self) -> str:
        if self._nodes.closed:
            return "closed"
        return "cluster" if self._nodes.version else "breaker"

    # ---- many keys ------------------------------------------------------------------

    def _leading(self, groups: list[Sequence[str]], hops: int) -> LookupResult:
        seen = self._nodes.version
        parts = self._parts([group[0] for group in groups])
        ends = self._each(
            [
                partial(self._leading_at, tier, [groups[i] for i in part])
                for tier, part in parts.items()
            ]
        )
        moved = next((end for end in ends if end.reason == "moved"), None)
        if moved is not None and hops and self._renewed(seen, moved.instead):
            return self._leading(groups, hops - 1)
        return _shortest(list(parts.values()), ends, len(groups))

    def _leading_at(self, tier: RedisTier | None, groups: list[Sequence[str]]) -> LookupResult:
        """At one node.  Groups that it sends elsewhere are found by halving."""
        if tier is None:
            return LookupResult(Outcome.ERROR, reason=self._why_nobody())
        end = tier.leading(groups)
        if end.reason not in {"ask", "cluster"}:
            return end
        if len(groups) == 1:
            return self._nodes.taking_over(end.instead).leading(groups) if end.instead else end
        half = len(groups) // 2
        first = self._leading_at(tier, groups[:half])
        if first.count < half:
            return first
        second = self._leading_at(tier, groups[half:])
        return replace(second, count=half + second.count)

    def _read_round(self, items: list[Item]) -> list[Result]:
        parts = self._parts([spec.key for spec, _ in items])
        ends = self._each(
            [partial(self._read_at, tier, [items[i] for i in part]) for tier, part in parts.items()]
        )
        found = dict(zip(chain(*parts.values()), chain(*ends), strict=True))
        return [found[i] for i in range(len(items))]

    def _read_at(self, tier: RedisTier | None, items: list[Item]) -> list[Result]:
        if tier is None:
            return [Result(Outcome.ERROR, self._why_nobody())] * len(items)
        ends = zip(items, tier.read_many(items), strict=True)
        return [self.read_into(*item) if end.instead else end for item, end in ends]

    def _refresh(self, keys: Sequence[str]) -> list[Result]:
        parts = self._parts(keys)
        return self._each(
            [
                partial(self._refresh_at, tier, [keys[i] for i in part])
                for tier, part in parts.items()
            ]
        )

    def _refresh_at(self, tier: RedisTier | None, keys: list[str]) -> Result:
        return Result(Outcome.ERROR, self._why_nobody()) if tier is None else tier.refresh(keys)

    def _parts(self, keys: Sequence[str]) -> dict[RedisTier | None, list[int]]:
        """Positions of the keys of each node, in order."""
        parts: dict[RedisTier | None, list[int]] = {}
        for position, key in enumerate(keys):
            parts.setdefault(self._nodes.serving(key), []).append(position)
        return parts

    def _each(self, calls: list[Callable[[], R]]) -> list[R]:
        """All at once, on this thread where it is only one."""
        if len(calls) == 1 or self._nodes.closed:
            return [call() for call in calls]
        futures = [self._fan.submit(call) for call in calls]
        return [future.result() for future in futures]

    def _renewed(self, seen: int, first: str) -> bool:
        """After a redirect of many keys: the whole map, since it is not known which moved."""
        self._nodes.watch()
        try:
            self._nodes.renew(seen, first)
        except StoreError as failure:
            self._nodes.note(failure)
            return False
        return True

    def _begin(self) -> None:
        self._fan = ThreadPoolExecutor(_FAN, thread_name_prefix="elora-cluster")


def _shortest(parts: list[list[int]], ends: list[LookupResult], total: int) -> LookupResult:
    """The run of groups that exist, given how far it goes at each node."""
    until = LookupResult(Outcome.OK, total)
    for part, end in zip(parts, ends, strict=True):
        if end.count < len(part) and part[end.count] < until.count:
            until = replace(end, count=part[end.count])
    return until
