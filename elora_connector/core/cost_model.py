"""ELORA's cost model: what a node is worth in a tier (paper section V, Eq. 3-6).

    ln Eval = ln(min(1, Now / Low)) + ln cost + ln visit - softplus(t / tau)

The logarithm, because the literal form is exactly 0 in float32 for everything that was
not used for 17 tau, and then orders nothing.  docs/cost_model.md explains every symbol.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from elora_connector.core.demand import Demand
from elora_connector.core.leaves import NO_COPY, FloatArray, LeafTable
from elora_connector.core.node import AdapterNode, Node, NodeKind
from elora_connector.core.rates import Rates
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Tier

_LEAST: Final = 1e-30
"""Stands for zero under a logarithm: the lowest factor, yet finite."""


class SwapOut(enum.Enum):
    """How LoRA_Eval (Eq. 4) counts the adapters when one is about to be swapped out."""

    KEPT = "kept"
    """As if it stayed, and none goes while Now <= ceil(Low)."""
    LITERAL = "literal"
    """Without it, as "after the swap" says; no floor."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Which factors of Eq. 6 are in use; one that is off counts as 1."""

    lora: bool = True
    cost: bool = True
    visit: bool = True
    recency: bool = True


@dataclass(frozen=True, slots=True)
class CostSettings:
    """Parameters of the formula.

    Attributes:
        tau_s: unit of idle time, seconds.
        token_bytes: bytes of KV of one token on one rank, to price a recomputation.
    """

    tau_s: float = 60.0
    token_bytes: float = 1.0
    terms: Terms = field(default_factory=Terms)
    swap_out: SwapOut = SwapOut.KEPT

    def __post_init__(self) -> None:
        if not self.tau_s > 0 or not self.token_bytes > 0:
            raise ValueError(f"need tau_s > 0 and token_bytes > 0, got {self}")


@dataclass(frozen=True, slots=True)
class _AdapterCosts:
    """Seconds by `AdapterNode.index`; the last entry stands for adapters not known yet."""

    load: FloatArray
    activation: FloatArray
    reload: FloatArray
    """Zero where the weights are in host memory."""
    version: tuple[int, int, int]


class EloraPolicy:
    """Eval of every row of a LeafTable, as an `EvictionPolicy`.

    Args:
        tree: for facts about adapters; not changed.
        rates, demand: measured by the caller, read here.
        exchange: an adapter that leaves makes room for another one, so that their number
            stays what it is: no floor.
    """

    def __init__(
        self,
        tree: DependencyTree,
        rates: Rates,
        demand: Demand,
        settings: CostSettings,
        *,
        exchange: bool = False,
    ) -> None:
        self._tree = tree
        self._rates = rates
        self._demand = demand
        self._settings = settings
        self._exchange = exchange
        self._known: _AdapterCosts | None = None

    def for_exchange(self) -> EloraPolicy:
        """The same model for choosing the adapter that gives its place to another one."""
        return EloraPolicy(self._tree, self._rates, self._demand, self._settings, exchange=True)

    # ---- vectorised -----------------------------------------------------------------

    def scores(self, table: LeafTable, now: float) -> FloatArray:
        """ln Eval of shape [len(table)], a new array; +inf for an adapter at the floor."""
        terms = self._settings.terms
        total = np.zeros(len(table), np.float64)
        if terms.cost:
            total += np.log(np.maximum(self._costs(table), _LEAST))
        if terms.visit:
            total += np.log(np.maximum(table.visits(now), _LEAST))
        if terms.recency:
            idle = np.maximum(now - table.last, 0.0)
            idle /= self._settings.tau_s
            total -= idle + np.log1p(np.exp(-idle))
        if terms.lora:
            self._apply_lora(total, table, now)
        return total

    def _apply_lora(self, total: FloatArray, table: LeafTable, now: float) -> None:
        here = self._tree.num_resident(table.tier, NodeKind.ADAPTER)
        low = self._demand.low(now)
        total += _ln_share(here, low)
        if self._exchange:
            return
        if self._settings.swap_out is SwapOut.LITERAL:
            total[table.is_adapter] += _ln_share(here - 1, low) - _ln_share(here, low)
            return
        rows = np.flatnonzero(table.is_adapter)
        spare = max(0, here - _floor(low))
        if len(rows) > spare:
            # Together, too, the victims of one refresh must not go below the floor.
            order = np.lexsort((table.seq[rows], total[rows]))
            total[rows[order[spare:]]] = np.inf

    def _costs(self, table: LeafTable) -> FloatArray:
        """Seconds until a node that leaves the tier is back in it."""
        adapters = self._adapter_costs()
        index = np.minimum(table.adapter, len(adapters.load) - 1)
        costs = self._chunk_costs(table)
        if table.tier is Tier.HOST:
            costs += adapters.reload[index]
        rows = table.is_adapter
        if rows.any():
            of_adapters = adapters.load[index]
            if table.tier is Tier.GPU:
                of_adapters = adapters.activation[index] + adapters.reload[index]
            costs = np.where(rows, of_adapters, costs)
        return costs

    def _chunk_costs(self, table: LeafTable) -> FloatArray:
        rates = self._rates
        nbytes = table.nbytes.astype(np.float64)
        recompute = nbytes / (self._settings.token_bytes * rates.prefill.per_s)
        remote = rates.remote_to_host
        fetch = remote.overhead_s + nbytes / remote.per_s
        if table.tier is not Tier.GPU:
            return np.where(table.copy == NO_COPY, recompute, np.minimum(fetch, recompute))
        load = rates.host_to_gpu.overhead_s + nbytes / rates.host_to_gpu.per_s
        moved = np.where(table.copy == Tier.HOST, load, load + fetch)
        return np.where(table.copy == NO_COPY, recompute, np.minimum(moved, recompute))

    def _adapter_costs(self) -> _AdapterCosts:
        rates = self._rates
        version = (
            self._tree.adapter_changes,
            rates.adapter_load.changes,
            rates.adapter_activation.changes,
        )
        if self._known is None or self._known.version != version:
            self._known = self._collect(version)
        return self._known

    def _collect(self, version: tuple[int, int, int]) -> _AdapterCosts:
        rates = self._rates
        adapters = list(self._tree.adapters)
        size = max((a.index for a in adapters), default=-1) + 2
        load = np.full(size, rates.adapter_load.overall)
        activation = np.full(size, rates.adapter_activation.overall)
        reload = load.copy()
        for adapter in adapters:
            i, name = adapter.index, adapter.identity.name
            load[i] = rates.adapter_load.of(name)
            activation[i] = rates.adapter_activation.of(name)
            reload[i] = 0.0 if _in_host_memory(adapter) else load[i]
        return _AdapterCosts(load, activation, reload, version)

    # ---- one node, as the formula is written ----------------------------------------

    def eval_one(self, node: Node, tier: Tier, now: float) -> float:
        """ln Eval of one node: the oracle that `scores` is tested against."""
        settings = self._settings
        terms = settings.terms
        value = 0.0
        if terms.cost:
            value += math.log(max(self.cost_s(node, tier), _LEAST))
        if terms.visit:
            value += math.log(max(self._tree.visits(node, now), _LEAST))
        if terms.recency:
            idle = max(now - node.last_use, 0.0) / settings.tau_s
            value -= idle + math.log1p(math.exp(-idle))
        if terms.lora:
            value += self._ln_lora_one(node, tier, now)
        return value

    def _ln_lora_one(self, node: Node, tier: Tier, now: float) -> float:
        here = self._tree.num_resident(tier, NodeKind.ADAPTER)
        low = self._demand.low(now)
        if self._exchange or node.kind is NodeKind.CHUNK:
            return _ln_share(here, low)
        if self._settings.swap_out is SwapOut.LITERAL:
            return _ln_share(here - 1, low)
        return _ln_share(here, low) if here > _floor(low) else math.inf

    def cost_s(self, node: Node, tier: Tier) -> float:
        """Seconds until `node`, if it leaves `tier`, is back in it."""
        rates = self._rates
        adapter = node.adapter
        reload = 0.0
        if adapter is not None and not _in_host_memory(adapter):
            reload = rates.adapter_load.of(adapter.identity.name)
        if isinstance(node, AdapterNode):
            if tier is Tier.GPU:
                return rates.adapter_activation.of(node.identity.name) + reload
            return rates.adapter_load.of(node.identity.name)
        recompute = rates.recompute_s(node.nbytes / self._settings.token_bytes)
        extra = reload if tier is Tier.HOST else 0.0
        if tier is Tier.GPU and node.ready(Tier.HOST):
            return min(rates.load_s(node.nbytes), recompute)
        if tier is not Tier.REMOTE and node.ready(Tier.REMOTE):
            fetch = rates.fetch_s(node.nbytes)
            if tier is Tier.GPU:
                fetch += rates.load_s(node.nbytes)
            return min(fetch, recompute) + extra
        return recompute + extra


def _in_host_memory(adapter: AdapterNode) -> bool:
    return adapter.always_resident or adapter.ready(Tier.HOST) or adapter.ready(Tier.GPU)


def _ln_share(here: int, low: float) -> float:
    """ln(min(1, Now / Low)); no demand is met by any number of adapters."""
    if low <= 0.0 or here >= low:
        return 0.0
    return math.log(max(here / low, _LEAST))


def _floor(low: float) -> int:
    """ceil(Low), but not one more because of a rounding error."""
    return math.ceil(low - 1e-9)
