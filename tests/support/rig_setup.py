"""What the scheduler rig is made of: vLLM's configuration, variants, requests, the oracle."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from elora_connector import plugin
from tests.support.rig_bytes import next_token, prefix_kv
from tests.support.tiny import Shape, make_model

BLOCK = 4
CHUNK = 8
STEP_S = 2.0**-6
"""Seconds that the rig's clock advances with every step: no rounding in sums."""
ADAPTERS = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Variant:
    """Which scheduler, and how it tells the workers of resumed requests."""

    name: str
    scheduler: type[Scheduler]
    resumed_as_new: bool


VARIANTS = (
    Variant("sync", Scheduler, False),
    Variant("sync-v2", Scheduler, True),
    Variant("async", AsyncScheduler, False),
    Variant("async-v2", AsyncScheduler, True),
)
SYNC = VARIANTS[0]
ASYNC = VARIANTS[2]


def oracle(prompt: Sequence[int], weights: str, count: int) -> list[int]:
    """The first `count` tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(prefix_kv(tokens, weights, 0)[-1]))
    return tokens[len(prompt) :]


def id_of(adapter: str) -> int:
    return ADAPTERS.index(adapter) + 1


def path_of(adapter: str) -> str:
    return f"/adapters/{adapter}"


def lora_request(
    adapter: str, load_inplace: bool = False, lora_id: int | None = None
) -> LoRARequest:
    return LoRARequest(
        adapter, lora_id or id_of(adapter), path_of(adapter), load_inplace=load_inplace
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    """Deterministic tokens."""
    return [100 + (seed * 7919 + i * i * 31 + i) % 300 for i in range(length)]


@cache
def _model() -> Path:
    shape = Shape(
        layers=1, hidden=32, heads=1, kv_heads=1, head_dim=32, intermediate=32, max_positions=256
    )
    return make_model(mkdtemp(prefix="elora-rig-"), shape=shape)


@lru_cache(maxsize=32)
def engine_config(max_loras: int, max_cpu_loras: int | None, seqs: int, tokens: int) -> Any:
    return EngineArgs(
        model=str(_model()),
        enable_lora=True,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        max_lora_rank=8,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        kv_cache_memory_bytes=1 << 20,
        skip_tokenizer_init=True,
    ).create_engine_config()


@cache
def grammar() -> Any:
    return StructuredOutputManager(engine_config(2, 3, 4, 32))


def cache_config_of(num_blocks: int) -> KVCacheConfig:
    """One layer with `BLOCK` tokens a block and 8 bytes a token."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def adapted(
    config: Any, variant: Variant, ranks: int, num_blocks: int, prefix_caching: bool
) -> Any:
    config = copy.deepcopy(config)
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.enable_prefix_caching = prefix_caching
    config.parallel_config.tensor_parallel_size = ranks
    config.scheduler_config.async_scheduling = variant.scheduler is AsyncScheduler
    return config


def transfer_config(extra: Mapping[str, Any]) -> Any:
    return KVTransferConfig(
        kv_connector=plugin.CONNECTOR,
        kv_role="kv_both",
        kv_connector_extra_config=dict(extra),
    )
