"""Policies for comparison that the connector does not ship, on the core's own interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from elora_connector.assembly import Scoring
from elora_connector.config import EloraConfig
from elora_connector.core.demand import Demand
from elora_connector.core.leaves import FloatArray, LeafTable
from elora_connector.core.policy import EvictionPolicy
from elora_connector.core.rates import Rates
from elora_connector.core.tree import DependencyTree

_LATER: Final = 1e9
"""Seconds; adds to a time so that it comes after every other one."""


class KvFirst:
    """All KV before any adapter, least recently used first within both."""

    def __init__(self, tree: DependencyTree) -> None:
        pass

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        return table.last + _LATER * table.is_adapter


class WholeBranch:
    """The branch of the adapter that was used longest ago goes first, as a whole.

    The paper calls this BFS.  Within a branch leaves go before what they stand on, older
    ones first.
    """

    def __init__(self, tree: DependencyTree) -> None:
        self._tree = tree

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        adapters = list(self._tree.adapters)
        last = np.zeros(max((a.index for a in adapters), default=-1) + 2)
        for adapter in adapters:
            last[adapter.index] = adapter.last_use
        branch: FloatArray = last[np.minimum(table.adapter, len(last) - 1)]
        return branch


def scoring_with(
    make: Callable[[DependencyTree], EvictionPolicy],
) -> Callable[[EloraConfig, DependencyTree], Scoring]:
    """In place of `assembly.assemble_scoring`: one policy for every choice."""

    def scoring(config: EloraConfig, tree: DependencyTree) -> Scoring:
        policy = make(tree)
        return Scoring(policy, policy, Rates(lanes=config.remote.io_threads), Demand())

    return scoring
