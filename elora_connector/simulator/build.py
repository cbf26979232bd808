"""Puts a system together from the connector's own parts and fake copies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from elora_connector.assembly import (
    LoraLimits,
    Scoring,
    assemble_scheduler,
    assemble_scoring,
    assemble_tree,
)
from elora_connector.config import EloraConfig, load_config
from elora_connector.core.adapter_nodes import AdapterNodes
from elora_connector.core.keys import digest_fields
from elora_connector.core.ledger import AdapterLedger
from elora_connector.core.load_choice import LoadChoice
from elora_connector.core.node import AdapterNode, NodeKind
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Identity, Rank, Tier
from elora_connector.core.victims import VictimQueue
from elora_connector.errors import ConfigError
from elora_connector.manager import Manager
from elora_connector.metrics import Recorder
from elora_connector.simulator.adapter_areas import AdapterArea, SlotArea, SlotParts
from elora_connector.simulator.dormant import DormantKv
from elora_connector.simulator.engine_model import EngineModel
from elora_connector.simulator.gpu import GpuArea
from elora_connector.simulator.kv import KvRules, KvSide
from elora_connector.simulator.pool_area import PoolArea
from elora_connector.simulator.requests import Trace
from elora_connector.simulator.systems import System
from elora_connector.simulator.wires import Clock, Wire

BLOCK_TOKENS: Final = 16
"""vLLM's block."""
GIB: Final = 1024**3
_WARM_SHARE: Final = 0.5
"""Most of the host memory that adapters fill before the first request."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One system, ready to be driven."""

    system: System
    machine: EngineModel
    clock: Clock
    tree: DependencyTree
    scoring: Scoring
    area: GpuArea
    kv: KvSide
    adapters: AdapterArea | None
    manager: Manager | None
    to_gpu: Wire
    to_host: Wire
    identities: Mapping[int, Identity]
    lora_ids: Mapping[str, int]

    def on_gpu(self, adapter: AdapterNode) -> bool:
        """Are these weights in GPU memory?"""
        if adapter.always_resident:
            return True
        return self.adapters is not None and self.adapters.on_gpu(adapter.identity)


@dataclass(frozen=True, slots=True)
class _Core:
    """What `assembly` makes."""

    config: EloraConfig
    tree: DependencyTree
    scoring: Scoring
    manager: Manager | None
    ledger: AdapterLedger | None
    nodes: AdapterNodes | None


@dataclass(frozen=True, slots=True)
class _Host:
    """LoRA slots, adapters in host memory, and bytes of it for the connector's budget."""

    slots: int
    adapters: int
    nbytes: int

    def ledger(self) -> AdapterLedger | None:
        """A ledger that takes the least recently used; None without slots."""
        return AdapterLedger(self.slots, self.adapters) if self.slots else None


def build(
    system: System,
    machine: EngineModel,
    trace: Trace,
    *,
    lora_share: float = 0.2,
    settings: Mapping[str, Any] | None = None,
) -> Parts:
    """Put `system` together for a trace.

    Args:
        lora_share: part of the GPU pool that is LoRA slots, where there are slots.
        settings: of the connector, over the system's own; names as in vLLM's extra
            configuration.

    Raises:
        ConfigError: the pool or the host memory is too small for this system.
    """
    identities = _identities(trace)
    slots = 0 if system.unified else _slots(machine, len(identities), lora_share)
    capacity = machine.pool_bytes - slots * machine.rank_adapter_bytes
    warm = min(len(identities), int(_WARM_SHARE * machine.host_bytes // machine.rank_adapter_bytes))
    host = _Host(slots, max(slots, warm), machine.host_bytes)
    if not system.joined:
        # Adapters in host memory are nobody's account then, but they are there.
        host = _Host(slots, host.adapters, host.nbytes - host.adapters * machine.rank_adapter_bytes)
    core = _core(system, machine, trace, host, settings or {})
    clock = Clock()
    to_gpu = Wire(clock, machine.link_per_s, machine.link_overhead_s)
    to_host = Wire(clock, machine.link_per_s, machine.link_overhead_s)
    area = _area(system, core, capacity, identities)
    kv = KvSide(
        _rules(system, core.config, trace.chunk_tokens, capacity),
        core.tree,
        area,
        core.manager,
        core.scoring,
        _choice(core),
        to_gpu,
        to_host,
    )
    adapters: AdapterArea | None = None
    if identities and core.ledger is None:
        if len(identities) * machine.rank_adapter_bytes > machine.host_bytes:
            raise ConfigError(f"{len(identities)} adapters do not fit into host memory")
        adapters = PoolArea(core.tree, area, machine, to_gpu, core.scoring, identities)
    elif core.ledger is not None:
        slotted = SlotParts(core.ledger, core.nodes, core.manager, core.scoring)
        adapters = SlotArea(
            slotted, clock, machine, to_gpu, identities, warm=warm, blocking=system.blocking
        )
    return Parts(
        system=system,
        machine=machine,
        clock=clock,
        tree=core.tree,
        scoring=core.scoring,
        area=area,
        kv=kv,
        adapters=adapters,
        manager=core.manager,
        to_gpu=to_gpu,
        to_host=to_host,
        identities=identities,
        lora_ids={identity.name: lora_id for lora_id, identity in identities.items()},
    )


def _identities(trace: Trace) -> dict[int, Identity]:
    """Adapters of the trace, the most used first; ids from 1 on, as vLLM's."""
    uses = Counter(request.adapter for request in trace.requests if request.adapter)
    names = sorted(uses, key=lambda name: (-uses[name], name))
    return {
        lora_id: Identity(name, digest_fields("elora/simulator", [name]))
        for lora_id, name in enumerate(names, start=1)
    }


def _slots(machine: EngineModel, adapters: int, share: float) -> int:
    """LoRA slots; vLLM allocates them whether there are that many adapters or not."""
    if not adapters:
        return 0
    slots = int(share * machine.pool_bytes // machine.rank_adapter_bytes)
    if slots < 1 or not share < 1:
        raise ConfigError(f"a LoRA share of {share:g} leaves {slots} slots, and no room for KV")
    return slots


def _core(
    system: System, machine: EngineModel, trace: Trace, host: _Host, settings: Mapping[str, Any]
) -> _Core:
    chunk_bytes = machine.rank_kv_bytes(trace.chunk_tokens)
    entries = {
        "lmcache.chunk_size": trace.chunk_tokens,
        "lmcache.max_local_cpu_size": host.nbytes / GIB,
        **system.settings,
        **settings,
    }
    config = load_config({}, entries)
    make_scoring = system.scoring or assemble_scoring
    if not system.host:
        tree = assemble_tree(config, chunk_bytes)
        return _Core(config, tree, make_scoring(config, tree), None, host.ledger(), None)
    lora = LoraLimits(host.slots, None) if host.slots and system.joined else None
    made = assemble_scheduler(
        config, chunk_bytes, [Rank()], lora, None, Recorder(), make_scoring=make_scoring
    )
    tree, manager = made.manager.tree, made.manager
    if made.adapters is not None:
        parts = made.adapters
        return _Core(config, tree, made.scoring, manager, parts.ledger, parts.nodes)
    return _Core(config, tree, made.scoring, manager, host.ledger(), None)


def _area(
    system: System, core: _Core, capacity: int, identities: Mapping[int, Identity]
) -> GpuArea:
    if not system.unified:
        queue = VictimQueue(core.tree, Tier.GPU, core.scoring.policy, kind=NodeKind.CHUNK)
        dormant = None
        if core.ledger is not None and core.nodes is not None:
            dormant = DormantKv(core.tree, {i.name: i for i in identities.values()})
            core.ledger.slot_watch.add(dormant)
        return GpuArea(core.tree, queue, capacity, unified=False, dormant=dormant)
    return GpuArea(
        core.tree,
        VictimQueue(core.tree, Tier.GPU, core.scoring.policy),
        capacity,
        unified=True,
        exchange=VictimQueue(core.tree, Tier.GPU, core.scoring.exchange),
    )


def _rules(system: System, config: EloraConfig, chunk: int, capacity: int) -> KvRules:
    return KvRules(
        chunk_tokens=chunk,
        block_tokens=math.gcd(BLOCK_TOKENS, chunk),
        history=system.history,
        touch_at_end=system.touch_at_end,
        decode=config.save_decode_cache,
        min_retrieve=config.min_retrieve_tokens,
        sync_load_s=config.sync_load_ms / 1000,
        store_bytes=int(config.store_block_share * capacity),
    )


def _choice(core: _Core) -> LoadChoice:
    choice = core.config.load_or_recompute
    return LoadChoice(core.scoring.rates, choice.margin if choice.enabled else math.inf)
