"""An order on its way through a worker: background part, then the places it was granted."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from elora_connector.integration.vllm.adapter_loader import LoadInfo
from elora_connector.integration.vllm.adapter_messages import AdapterOrder, Grant, Placing


class Stage(enum.Enum):
    """How far the background part of an order is."""

    QUEUED = "queued"
    """An earlier order for the same adapter comes first."""
    WORKING = "working"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Pending:
    """`model` was read for the order, or `kept` confirms the weights that are loaded."""

    order: AdapterOrder
    stage: Stage = Stage.QUEUED
    future: Future[Any] | None = None
    model: Any | None = None
    kept: LoadInfo | None = None
    seconds: float = 0.0
    read: bool = False
    activation_s: float = 0.0

    @property
    def touched(self) -> frozenset[int]:
        """Adapters whose places change only in the sequence of orders."""
        order = self.order
        if order.placing is not Placing.NOW:
            return frozenset((order.lora_id,))
        return frozenset((order.lora_id, *order.evict, *order.displace))

    @property
    def in_hand(self) -> bool:
        """Read, and waiting for nothing but a grant."""
        return self.stage is Stage.READY and self.order.placing is Placing.ON_GRANT

    def grant(self, grant: Grant) -> None:
        """The scheduler says who makes room."""
        self.order = replace(
            self.order,
            activate=grant.activate,
            evict=grant.evict,
            displace=grant.displace,
            placing=Placing.NOW,
        )

    def collect(self) -> bool:
        """Move a finished background result into the order, or raise its error."""
        if self.stage is not Stage.WORKING:
            return self.stage is Stage.READY
        if self.future is None or not self.future.done():
            return False
        found, seconds = self.future.result()
        self.seconds += seconds
        self.stage = Stage.READY
        if isinstance(found, LoadInfo):
            self.kept = found
        else:
            self.model, self.read = found, True
        return True
