"""The systems that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elora_connector.assembly import Scoring
from elora_connector.config import EloraConfig
from elora_connector.core.tree import DependencyTree
from elora_connector.errors import ConfigError
from elora_connector.simulator.policies import KvFirst, WholeBranch, scoring_with


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve.

    Attributes:
        name: as the command line has it.
        title: in words.
        unified: adapters and KV share one pool; else adapters have slots.
        history: KV outlives its request in the GPU.
        host: KV also goes to host memory.
        joined: adapters are nodes of the tree, so that KV depends on them.
        blocking: a missing adapter is loaded inside the step.
        touch_at_end: KV counts as used when its request ends, as in vLLM's own cache.
        settings: of the connector, by their names in vLLM's extra configuration.
        scoring: in place of the configured policy.
    """

    name: str
    title: str
    unified: bool = False
    history: bool = True
    host: bool = True
    joined: bool = True
    blocking: bool = False
    touch_at_end: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    scoring: Callable[[EloraConfig, DependencyTree], Scoring] | None = None


_LRU: Final = {"lmcache.cache_policy": "LRU"}
_KV_FIRST: Final = scoring_with(KvFirst)
_WHOLE_BRANCH: Final = scoring_with(WholeBranch)
_VLLM: Final = {"lmcache.cache_policy": "LRU", "elora.dependency_rule": False}


def _without(term: str) -> dict[str, Any]:
    return {f"elora.cost_model.{term}_term": False}


_SYSTEMS: Final = (
    System("elora", "this connector"),
    System("lru", "this connector with LRU", settings=_LRU),
    System("lfu", "this connector with LFU", settings={"lmcache.cache_policy": "LFU"}),
    System("fifo", "this connector with FIFO", settings={"lmcache.cache_policy": "FIFO"}),
    System("no-rule", "without the dependency rule", settings={"elora.dependency_rule": False}),
    System("no-lora-term", "without Eq. 4", settings=_without("lora")),
    System("no-cost-term", "without cost", settings=_without("cost")),
    System("no-visit-term", "without visits", settings=_without("visit")),
    System("no-recency-term", "without recency", settings=_without("recency")),
    System("kv-first", "this connector, KV before adapters", settings=_LRU, scoring=_KV_FIRST),
    System("bfs", "this connector, whole branches", settings=_LRU, scoring=_WHOLE_BRANCH),
    System(
        "vllm",
        "vLLM, static LoRA area, LRU, no host tier for KV",
        host=False,
        joined=False,
        blocking=True,
        touch_at_end=True,
        settings=_VLLM,
    ),
    System(
        "vllm-host",
        "vLLM, static LoRA area, LRU, KV also in host memory",
        joined=False,
        blocking=True,
        touch_at_end=True,
        settings=_VLLM,
    ),
    System(
        "s-lora",
        "S-LoRA: one pool, adapters by LRU, no KV of ended requests",
        unified=True,
        history=False,
        host=False,
        settings=_LRU,
    ),
    System("elora-pool", "the paper's ELORA: one pool of adapters and KV", unified=True),
    System(
        "kv-first-pool",
        "the same pool, KV before adapters",
        unified=True,
        settings=_LRU,
        scoring=_KV_FIRST,
    ),
    System(
        "bfs-pool",
        "the same pool, whole branches",
        unified=True,
        settings=_LRU,
        scoring=_WHOLE_BRANCH,
    ),
    System(
        "lru-pool",
        "the same pool with LRU",
        unified=True,
        settings=_LRU,
    ),
)
SYSTEMS: Final[Mapping[str, System]] = {system.name: system for system in _SYSTEMS}


def system_named(name: str) -> System:
    """A system by its name.

    Raises:
        ConfigError: there is none; the message names all.
    """
    try:
        return SYSTEMS[name]
    except KeyError:
        legal = ", ".join(SYSTEMS)
        raise ConfigError(f"unknown policy {name!r}; there are: {legal}") from None
