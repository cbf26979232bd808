"""The one place where parts are put together; everything else is given its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elora_connector.config import EloraConfig
from elora_connector.core.adapter_nodes import AdapterNodes, LedgerAdapters
from elora_connector.core.cost_model import CostSettings, EloraPolicy, SwapOut, Terms
from elora_connector.core.demand import Demand
from elora_connector.core.host_room import HostRoom
from elora_connector.core.ledger import AdapterLedger, Level
from elora_connector.core.node import NodeKind
from elora_connector.core.policy import EvictionPolicy, policy_named
from elora_connector.core.rates import Rates
from elora_connector.core.tree import DependencyTree
from elora_connector.core.types import Rank, Tier
from elora_connector.core.victims import VictimQueue
from elora_connector.errors import ConfigError
from elora_connector.manager import Manager
from elora_connector.metrics import Recorder
from elora_connector.tiers.base import LookupResult, Outcome, RemoteTier, Result
from elora_connector.tiers.host import SlotPool
from elora_connector.tiers.instrumented import InstrumentedTier
from elora_connector.tiers.lookup import RemoteLookup
from elora_connector.tiers.redis_cluster import redis_tier
from elora_connector.tiers.write_backoff import WriteBackoff


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """vLLM's `max_loras`, and `max_cpu_loras` or None where only bytes are to bound it."""

    slots: int
    host_capacity: int | None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How candidates are ranked, and the measurements that this rests on.

    Attributes:
        policy: for everything that leaves a tier for good.
        exchange: for an adapter that gives its place to another one.
        rates, demand: to be fed by the scheduler side.
    """

    policy: EvictionPolicy
    exchange: EvictionPolicy
    rates: Rates
    demand: Demand


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """The ledger, its adapters as nodes of the tree, and the budget they share with KV."""

    ledger: AdapterLedger
    nodes: AdapterNodes
    room: HostRoom
    scoring: Scoring


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """What the scheduler side is built from; `adapters` is None without LoRA, `lookup`
    without a remote tier."""

    manager: Manager
    scoring: Scoring
    recorder: Recorder
    adapters: AdapterParts | None
    lookup: RemoteLookup | None
    ranks: int


def host_slots(config: EloraConfig, chunk_bytes: int) -> int:
    """Slots of one rank's host tier.

    Raises:
        ConfigError: not even one chunk fits.
    """
    slots = config.host_bytes // chunk_bytes
    if slots < 1:
        raise ConfigError(
            f"max_local_cpu_size = {config.max_local_cpu_size:g} GB holds no chunk: one chunk of "
            f"{config.chunk_size} tokens takes {chunk_bytes / 1024**3:.4f} GB on each rank"
        )
    return slots


def assemble_scheduler(
    config: EloraConfig,
    chunk_bytes: int,
    ranks: Sequence[Rank],
    lora: LoraLimits | None,
    remote: RemoteTier | None,
    recorder: Recorder,
    make_scoring: Callable[[EloraConfig, DependencyTree], Scoring] | None = None,
) -> SchedulerParts:
    """Tree, slots, manager, ledger and look-up of one engine's scheduler.

    Args:
        make_scoring: in place of `assemble_scoring`, for policies that no setting names.
    """
    slots = host_slots(config, chunk_bytes)
    tree = assemble_tree(config, chunk_bytes)
    scoring = (make_scoring or assemble_scoring)(config, tree)
    chunks = VictimQueue(tree, Tier.HOST, scoring.policy, kind=NodeKind.CHUNK)
    room = HostRoom(tree, chunks, config.host_bytes)
    put_limit = max(1, config.remote.write_queue_bytes // chunk_bytes)
    manager = Manager(
        tree,
        SlotPool(slots),
        room,
        ranks=len(ranks),
        pin_limit=max(1, int(config.pin_share * slots)),
        put_limit=put_limit if remote is not None else 0,
    )
    adapters = None
    if lora is not None:
        adapters = assemble_adapters(lora, Level(config.residency), manager, room, scoring)
    lookup = None
    if remote is not None:
        lookup = RemoteLookup(
            remote,
            ranks,
            config.remote.ttl_s,
            timeout_s=config.remote.lookup_timeout_ms / 1000,
            refused=partial(recorder.add, "remote_errors", 1),
        )
    return SchedulerParts(manager, scoring, recorder, adapters, lookup, len(ranks))


def assemble_adapters(
    lora: LoraLimits, level: Level, manager: Manager, room: HostRoom, scoring: Scoring
) -> AdapterParts:
    """Ledger and nodes, joined with each other and with the host budget."""
    ledger = AdapterLedger(lora.slots, lora.host_capacity, level)
    nodes = AdapterNodes(manager.tree, scoring.exchange)
    nodes.make_bytes, nodes.free_bytes = manager.make_bytes, lambda: room.free
    ledger.places.listener = nodes
    ledger.places.chooser = nodes
    room.adapters = LedgerAdapters(manager.tree, ledger, nodes)
    return AdapterParts(ledger, nodes, room, scoring)


def assemble_tree(config: EloraConfig, chunk_bytes: int) -> DependencyTree:
    """The tree with visits as the configured policy counts them."""
    if config.cache_policy != "ELORA":
        return DependencyTree(chunk_bytes, dependency_rule=config.dependency_rule)
    model = config.cost_model
    return DependencyTree(
        chunk_bytes,
        model.visit_decay_s,
        model.visit_prior,
        visit_turnovers=math.inf if model.visit_turnovers is None else model.visit_turnovers,
        dependency_rule=config.dependency_rule,
    )


def assemble_scoring(config: EloraConfig, tree: DependencyTree) -> Scoring:
    """The configured policy over `tree`."""
    rates, demand = Rates(lanes=config.remote.io_threads), Demand()
    if config.cache_policy != "ELORA":
        policy = policy_named(config.cache_policy.lower())
        return Scoring(policy, policy, rates, demand)
    model = config.cost_model
    settings = CostSettings(
        tau_s=model.tau_s,
        token_bytes=max(1, tree.chunk_nbytes) / config.chunk_size,
        terms=Terms(model.lora_term, model.cost_term, model.visit_term, model.recency_term),
        swap_out=SwapOut(model.swap_out),
    )
    elora = EloraPolicy(tree, rates, demand, settings)
    return Scoring(elora, elora.for_exchange(), rates, demand)


def remote_tier(config: EloraConfig, recorder: Recorder) -> RemoteTier | None:
    """The configured remote tier with its metrics, or None.

    Raises:
        ConfigError: the URL's scheme is not supported, or Redis is not reachable and
            `remote.fail_open` is off.
    """
    if config.remote_url is None:
        return None
    remote = config.remote
    inner = redis_tier(
        config.remote_url,
        ttl_s=remote.ttl_s,
        connect_timeout_s=remote.connect_timeout_ms / 1000,
        operation_timeout_s=remote.operation_timeout_ms / 1000,
        checksum=remote.checksum,
        mac_key=remote.mac_key,
        username=remote.username,
        password=remote.password,
        ssl_ca=_path(remote.ca_file),
        ssl_cert=_path(remote.cert_file),
        ssl_key=_path(remote.key_file),
        fail_open=remote.fail_open,
        max_connections=remote.io_threads + 2,
    )
    return InstrumentedTier(WriteBackoff(inner), _observer(recorder))


def _path(name: str | None) -> str | None:
    return None if name is None else str(Path(name).expanduser())


def _observer(recorder: Recorder) -> Callable[[str, Result | LookupResult, float], None]:
    def observe(operation: str, result: Result | LookupResult, seconds: float) -> None:
        recorder.add("remote_operations", 1, operation, result.outcome.value)
        if result.outcome in (Outcome.BAD, Outcome.ERROR):
            recorder.add("remote_errors", 1, result.reason)
        if isinstance(result, Result) and result.nbytes:
            direction = "remote_to_host" if operation == "read_into" else "host_to_remote"
            recorder.add("bytes", result.nbytes, direction)
            recorder.add("seconds", seconds, direction)

    return observe
