"""From vLLM's configuration to the two sides; refuses what was never tested."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elora_connector.assembly import LoraLimits, assemble_scheduler, host_slots, remote_tier
from elora_connector.config import (
    EloraConfig,
    adapter_budget,
    available_memory_bytes,
    budget_line,
    check_chunk_size,
    check_files,
    load_config,
    memory_budget,
)
from elora_connector.config.model import MB
from elora_connector.core.keys import NAMESPACE_HEX
from elora_connector.errors import UnsupportedError
from elora_connector.integration.vllm import compat
from elora_connector.integration.vllm.adapters import AdapterAgent
from elora_connector.integration.vllm.geometry import Geometry
from elora_connector.integration.vllm.host_loras import is_bounded
from elora_connector.integration.vllm.namespace import (
    compute_namespace,
    explicit_weights,
    has_weights,
    weight_digest,
)
from elora_connector.integration.vllm.scheduler_side import SchedulerSide
from elora_connector.integration.vllm.worker_side import (
    WorkerSide,
    all_ranks,
    kv_dtype,
    rank_of,
)
from elora_connector.metrics import Recorder
from elora_connector.tiers.codec import mac_key_id

logger = logging.getLogger("vllm.elora_connector")

_PLAIN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


def build_scheduler_side(vllm_config: Any, kv_cache_config: Any) -> SchedulerSide:
    """The scheduler process's half, or one clear error."""
    config = _common_checks(vllm_config, kv_cache_config)
    _log_once(config, vllm_config)
    # Read by vLLM's scheduler right after this constructor; "fail" is vLLM's default.
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    geometry = geometry_of(config, vllm_config, kv_cache_config)
    weights = weights_of(config, vllm_config)
    recorder = Recorder()
    remote = None
    if config.remote_url is not None:
        obstacle = _obstacle(config, vllm_config, geometry, weights)
        if obstacle:
            logger.warning("%s: the remote tier is off", obstacle)
        else:
            remote = remote_tier(config, recorder)
    ranks = all_ranks(vllm_config.parallel_config)
    lora = vllm_config.lora_config
    limits = None
    if lora is not None:
        limits = LoraLimits(lora.max_loras, lora.max_cpu_loras if is_bounded(lora) else None)
    parts = assemble_scheduler(config, geometry.chunk_bytes, ranks, limits, remote, recorder)
    transfer = vllm_config.kv_transfer_config
    known = weights or os.urandom(32)
    namespace = namespace_of(config, vllm_config, kv_cache_config, geometry, known)
    logger.info("namespace %s", namespace.hex()[:NAMESPACE_HEX])
    return SchedulerSide(
        config,
        geometry,
        parts,
        namespace,
        producer=transfer.is_kv_producer,
        consumer=transfer.is_kv_consumer,
    )


def build_worker_side(vllm_config: Any, kv_cache_config: Any) -> WorkerSide:
    """One rank's half."""
    config = _common_checks(vllm_config, kv_cache_config)
    geometry = geometry_of(config, vllm_config, kv_cache_config)
    recorder = Recorder()
    shared = _weights_known(config, vllm_config) and values_fit(config, geometry)
    return WorkerSide(
        config,
        geometry,
        host_slots(config, geometry.chunk_bytes),
        rank_of(vllm_config.parallel_config),
        dtype=kv_dtype(vllm_config),
        remote=remote_tier(config, recorder) if shared else None,
        agent=None if vllm_config.lora_config is None else _agent(config, vllm_config.lora_config),
        recorder=recorder,
    )


def _agent(config: EloraConfig, lora: Any) -> AdapterAgent | None:
    agent = AdapterAgent.attach()
    if agent is not None:
        most = lora.max_cpu_loras if is_bounded(lora) else None
        for line in adapter_budget(config, lora.max_loras, most, agent.slot_bytes):
            logger.warning("%s", line)
    return agent


def geometry_of(config: EloraConfig, vllm_config: Any, kv_cache_config: Any) -> Geometry:
    """Sizes of blocks and chunks on one rank.

    Raises:
        ConfigError: chunk_size is not a multiple of vLLM's block size.
    """
    num_blocks, block_size, block_bytes, _ = compat.chunk_geometry(vllm_config, kv_cache_config)
    check_chunk_size(config.chunk_size, block_size)
    return Geometry(block_size, config.chunk_size, block_bytes, num_blocks)


def _obstacle(
    config: EloraConfig, vllm_config: Any, geometry: Geometry, weights: bytes | None
) -> str:
    """Why KV cannot be shared through a remote tier; empty if it can."""
    if weights is None:
        load_format = vllm_config.load_config.load_format
        return (
            f"the model's weights cannot be identified (load_format {load_format}; "
            "elora.model_id names them)"
        )
    if not values_fit(config, geometry):
        return (
            f"a chunk of {config.chunk_size} tokens takes {geometry.chunk_bytes / MB:.1f} MB on "
            f"each rank, more than elora.remote.max_value_mb = {config.remote.max_value_mb}"
        )
    return ""


def values_fit(config: EloraConfig, geometry: Geometry) -> bool:
    """May values of this size be written and read?  All ranks come to the same answer."""
    return geometry.chunk_bytes <= config.remote.max_value_bytes


def namespace_of(
    config: EloraConfig,
    vllm_config: Any,
    kv_cache_config: Any,
    geometry: Geometry,
    weights: bytes,
) -> bytes:
    """Digest of all that makes KV interchangeable; `weights` from `weights_of`."""
    mac_key = config.remote.mac_key
    return compute_namespace(
        vllm_config,
        _layout(config, vllm_config, kv_cache_config, geometry),
        weights=weights,
        mac_key_id=mac_key_id(mac_key) if mac_key else "",
    )


def _common_checks(vllm_config: Any, kv_cache_config: Any) -> EloraConfig:
    if not compat.is_installed():
        raise UnsupportedError(
            "the elora plugin is not loaded, so adapters could change unseen: install "
            "elora_connector in vLLM's environment and, where VLLM_PLUGINS is set, add elora to it"
        )
    compat.check_version()
    for refuse in _REFUSALS:
        reason = refuse(vllm_config, kv_cache_config)
        if reason:
            raise UnsupportedError(reason)
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    config = load_config(os.environ, extra)
    check_files(config)
    return config


def _several_groups(vllm_config: Any, kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"models with {len(groups)} KV cache groups are not supported yet"
    spec = type(groups[0].kv_cache_spec).__name__
    if spec not in _PLAIN_SPECS:
        return f"KV caches of kind {spec} are not supported yet (full attention and MLA are)"
    return ""


def _context_parallel(vllm_config: Any, kv_cache_config: Any) -> str:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} > 1 is not supported yet"
    return ""


def _drafter(vllm_config: Any, kv_cache_config: Any) -> str:
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        return (
            f"speculative decoding with {speculative.method!r} keeps a drafter in the KV cache, "
            "which is not supported yet (ngram is)"
        )
    return ""


def _pipeline_with_lora(vllm_config: Any, kv_cache_config: Any) -> str:
    if (
        vllm_config.lora_config is not None
        and vllm_config.parallel_config.pipeline_parallel_size > 1
    ):
        return (
            "pipeline parallelism together with LoRA is not supported: vLLM skips the warm-up "
            "that allocates the later stages' inputs and fails at the first step"
        )
    return ""


_REFUSALS: tuple[Callable[[Any, Any], str], ...] = (
    _several_groups,
    _context_parallel,
    _drafter,
    _pipeline_with_lora,
)


def _layout(
    config: EloraConfig, vllm_config: Any, kv_cache_config: Any, geometry: Geometry
) -> dict[str, Any]:
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return {
        "dtype": kv_dtype(vllm_config),
        "spec": type(spec).__name__,
        "layers": len(kv_cache_config.kv_cache_groups[0].layer_names),
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "device": compat.device_type(),
        "block_size": geometry.block_size,
        "chunk_size": config.chunk_size,
        "block_bytes": geometry.block_bytes,
    }


def weights_of(config: EloraConfig, vllm_config: Any) -> bytes | None:
    """Which weights the model has; None when nobody can tell."""
    if config.model_id is not None:
        return explicit_weights(config.model_id)
    directory = _weights_dir(vllm_config)
    return None if directory is None else weight_digest(directory)


def _weights_known(config: EloraConfig, vllm_config: Any) -> bool:
    """`weights_of` is not None, without reading them."""
    if config.model_id is not None:
        return True
    directory = _weights_dir(vllm_config)
    return directory is not None and has_weights(directory)


def _weights_dir(vllm_config: Any) -> Path | None:
    if str(vllm_config.load_config.load_format).endswith("dummy"):
        return None
    model = vllm_config.model_config
    directory = Path(str(model.model))
    if directory.is_dir():
        return directory
    return _hub_snapshot(str(model.model), None if model.revision is None else str(model.revision))


def _hub_snapshot(model: str, revision: str | None) -> Path | None:
    """Where the Hub's cache holds the model that vLLM is about to load, without network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def _log_once(config: EloraConfig, vllm_config: Any) -> None:
    ranks = len(all_ranks(vllm_config.parallel_config))
    free = available_memory_bytes()
    memory_budget(config, ranks, free)
    for warning in config.warnings:
        logger.warning("%s", warning)
    logger.info("%s\n%s", config.describe(), budget_line(config, ranks, free))
