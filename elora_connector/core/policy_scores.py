"""A policy's scores of any nodes, leaves or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from elora_connector.core.leaves import LeafTable
from elora_connector.core.node import Node
from elora_connector.core.policy import EvictionPolicy
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Tier

_AHEAD: Final = 32
"""Ancestors that are scored along with a node: a vector operation costs as much for one."""


class Scores:
    """Scores nodes by name, with the policy's one vectorised function."""

    def __init__(self, tree: DependencyTree, policy: EvictionPolicy, tier: Tier) -> None:
        self._policy = policy
        self._scratch = LeafTable(tier, tree.clock)

    def of(self, nodes: Sequence[Node], now: float) -> list[float]:
        """One score a node; NaN counts as +inf, which a policy gives to what must stay."""
        if not nodes:
            return []
        self._scratch.fill(nodes)
        scores = self._policy.scores(self._scratch, now).tolist()
        return [math.inf if math.isnan(score) else score for score in scores]


class ScoresOfNow:
    """Scores at one moment, each computed once; `now` is that moment, seconds."""

    def __init__(
        self, tree: DependencyTree, policy: EvictionPolicy, tier: Tier, now: float
    ) -> None:
        self._scores = Scores(tree, policy, tier)
        self._now = now
        self._known: dict[Node, float] = {}

    def of(self, node: Node) -> float:
        """Score of a chunk, and ahead of need of the chunks it stands on."""
        score = self._known.get(node)
        if score is None:
            run: list[Node] = []
            above: Node | None = node
            while above is not None and above.adapter is not above and len(run) < _AHEAD:
                run.append(above)
                above = above.parent
            self.add(run)
            score = self._known[node]
        return score

    def add(self, nodes: Sequence[Node]) -> None:
        """Score all of `nodes` at once."""
        self._known.update(zip(nodes, self._scores.of(nodes, self._now), strict=True))
