"""A request while it is in the simulated engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from elora_connector.core.node import Node
from elora_connector.core.types import ChunkKey, Identity
from elora_connector.simulator.requests import SimRequest


class Stage(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """Admitted; its KV is on its way to the GPU."""
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Live:
    """State of one request; times in seconds of virtual time.

    Attributes:
        order: place in the line; a preempted request keeps its own.
        lora_id: None for the base model.
        keys: of all full chunks of prompt and answer.
        computed: tokens whose KV is in the GPU.
        nodes: chunks of it that are in the GPU, from the first, held by it.
        shared: how many of them are in the tree's account and not in its own.
        blocks: GPU blocks that it has, those of shared chunks among them.
        next_store: chunks below it were planned to be stored.
        local, loaded: tokens that were in the GPU or came from the host tier, at admission.
        load_until, load_in_step: when its load will have ended; does the step wait for it?
        admitted_at, started_at: when it first got blocks; when its KV was there as well.
        adapter_s: seconds that it waited for a load of its adapter before it was admitted.
        stall_s: seconds that its first step waited for such a load.
    """

    request: SimRequest
    order: int
    arrived: float
    identity: Identity
    lora_id: int | None
    keys: list[ChunkKey]
    stage: Stage = Stage.WAITING
    computed: int = 0
    generated: int = 0
    nodes: list[Node] = field(default_factory=list)
    shared: int = 0
    blocks: int = 0
    next_store: int = 0
    local: int = 0
    loaded: int = 0
    preemptions: int = 0
    load_until: float = 0.0
    load_in_step: bool = False
    admitted_at: float | None = None
    started_at: float = 0.0
    adapter_s: float = 0.0
    stall_s: float = 0.0
    first_token_at: float | None = None
    done_at: float = 0.0

    @property
    def id(self) -> str:
        """As the manager and the ledger know it."""
        return str(self.order)

    @property
    def known_tokens(self) -> int:
        """Prompt and what was generated so far."""
        return self.request.prompt_tokens + self.generated

    @property
    def wanted(self) -> int:
        """Tokens still to be computed before the next one can be generated."""
        return self.known_tokens - self.computed
