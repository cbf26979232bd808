"""Counters and levels about adapters as nodes; looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from elora_connector.assembly import AdapterParts
from elora_connector.core.node import Node, NodeKind
from elora_connector.core.policy_scores import Scores
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Tier
from elora_connector.integration.vllm.adapter_messages import AdapterOrder, Grant, Placing
from elora_connector.metrics import Recorder

_EVERY_S: Final = 1.0
_LONGEST_GAP_S: Final = 1.0
"""Time between steps beyond this is idleness, which says nothing about demand."""
_ENOUGH: Final = 0.95
"""Share of Low_lora that counts as having enough adapters (paper, section VII)."""
_SAMPLE: Final = 512
QUANTILES: Final = (0.1, 0.5, 0.9)


class AdapterStats:
    """One per scheduler side with LoRA."""

    def __init__(self, parts: AdapterParts, tree: DependencyTree, recorder: Recorder) -> None:
        self._tree = tree
        self._ledger = parts.ledger
        self._nodes = parts.nodes
        self._demand = parts.scoring.demand
        self._budget = parts.room.budget
        policy = parts.scoring.policy
        self._scores = {tier: Scores(tree, policy, tier) for tier in (Tier.GPU, Tier.HOST)}
        self._recorder = recorder
        self._stepped: float | None = None
        self._looked = -_EVERY_S

    def shipped(
        self, orders: Iterable[AdapterOrder], grants: Iterable[Grant], ahead: int | None
    ) -> None:
        """Orders go out to the workers.

        Args:
            ahead: the adapter that is being brought closer although nobody waits for it.
        """
        for order in orders:
            cause = "cold" if order.lora_id != ahead else "prefetched"
            if order.placing is Placing.ON_GRANT:
                self._recorder.add("adapter_swap_ins", 1, "host", cause)
            elif order.activate:
                self._recorder.add("adapter_swap_ins", 1, "gpu", cause)
        for grant in grants:
            if grant.activate:  # what comes ahead of need is never granted a slot afterwards
                self._recorder.add("adapter_swap_ins", 1, "gpu", "cold")

    def step(self, now: float) -> None:
        """Once a step."""
        here, low = self._tree.num_resident(Tier.GPU, NodeKind.ADAPTER), self._demand.low(now)
        if self._stepped is not None and low > 0:
            state = "met" if here >= _ENOUGH * low else "short"
            passed = min(now - self._stepped, _LONGEST_GAP_S)
            self._recorder.add("lora_demand_seconds", passed, state)
        self._stepped = now
        if now - self._looked >= _EVERY_S:
            self._looked = now
            self._recorder.set("lora_now", here)
            self._recorder.set("lora_low", low)
            self._bytes()
            self._quantiles(now)

    def _bytes(self) -> None:
        for (direction, tier), nbytes in self._nodes.moved.items():
            self._recorder.add("swap_bytes", nbytes, direction, tier.name.lower(), "adapter")
        self._nodes.moved.clear()
        for kind in NodeKind:
            used = self._tree.used_bytes(Tier.HOST, kind) / self._budget
            self._recorder.set("utilisation", used, "host", _LABEL[kind])
        slots = self._tree.num_resident(Tier.GPU, NodeKind.ADAPTER) / self._ledger.slots
        self._recorder.set("utilisation", slots, "gpu", _LABEL[NodeKind.ADAPTER])

    def _quantiles(self, now: float) -> None:
        """Of all adapters in a tier and a sample of its leaves: cheap however large."""
        for tier, scores in self._scores.items():
            leaves = self._tree.leaves[tier].nodes
            sample: list[Node] = leaves[:: max(1, len(leaves) // _SAMPLE)]
            inner = [n for n in self._tree.adapters if n.ready(tier) and not n.rows[tier] >= 0]
            values = np.array(scores.of([*sample, *inner], now))
            values = values[np.isfinite(values)]
            if len(values):
                for q, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True):
                    self._recorder.set("eval", float(value), tier.name.lower(), f"{q:g}")


_LABEL: Final = {NodeKind.ADAPTER: "adapter", NodeKind.CHUNK: "kv"}
