"""Hooks into vLLM's worker-side LoRA managers.

All of them do exactly what vLLM does until an `AdapterAgent` is attached to the manager,
so installing this package changes nothing for users of another connector.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from typing import Any

import msgspec
import torch
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from elora_connector.errors import UnsupportedError
from elora_connector.integration.vllm import cpu_lora_fix
from elora_connector.integration.vllm.adapter_loader import AdapterLoader
from elora_connector.integration.vllm.adapters import LOADER_THREADS, AdapterAgent
from elora_connector.integration.vllm.compat import check_live
from elora_connector.integration.vllm.daemon_pool import DaemonPool
from elora_connector.integration.vllm.host_loras import UNBOUND, is_bounded
from elora_connector.integration.vllm.lora_caches import LoraCaches, NoRoomError
from elora_connector.integration.vllm.patching import original_of, wrap

logger = logging.getLogger(__name__)

_AGENT = "elora_agent"
_current: weakref.ref[Any] | None = None


class EloraLoRAModelManager(LRUCacheLoRAModelManager):
    """vLLM's adapter caches with our choice of victim: never one that is needed."""

    elora_agent: AdapterAgent | None = None
    elora_capacity: int | None = None

    @property
    def capacity(self) -> int:
        """Most adapters in the host cache; without the user's bound it is ours to govern."""
        return int(self.elora_capacity or super().capacity)

    def activate_adapter(self, lora_id: int) -> bool:
        """Put an adapter into a GPU slot; raises NoRoomError if none may be freed."""
        active = self._active_adapters
        if (
            self.elora_agent is not None
            and lora_id not in active
            and len(active) >= self.lora_slots
        ):
            active.pop(self.elora_agent.victim(active.order, active.pinned_items, "GPU slots"))
        return bool(super().activate_adapter(lora_id))

    def remove_oldest_adapter(self) -> bool:
        """Evict from the host cache; raises NoRoomError if nothing may go."""
        hosted = self._registered_adapters
        if self.elora_agent is None or not len(hosted):
            return bool(super().remove_oldest_adapter())
        places = "places of the host cache"
        hosted.pop(self.elora_agent.victim(hosted.order, hosted.pinned_items, places))
        return True


def install() -> None:
    """Apply the hooks to vLLM's classes; idempotent."""
    if LRUCacheWorkerLoRAManager._manager_cls is LRUCacheLoRAModelManager:
        LRUCacheWorkerLoRAManager._manager_cls = EloraLoRAModelManager
    wrap(LRUCacheWorkerLoRAManager, "create_lora_manager", _create_lora_manager)
    wrap(LRUCacheWorkerLoRAManager, "_apply_adapters", _apply_adapters)
    wrap(LRUCacheWorkerLoRAManager, "add_adapter", _add_adapter)
    wrap(WorkerLoRAManager, "_load_adapter", _load_adapter)
    wrap(WorkerLoRAManager, "remove_adapter", _remove_adapter)
    wrap(WorkerLoRAManager, "pin_adapter", _pin_adapter)


def attach_agent(kind: type[AdapterAgent]) -> AdapterAgent | None:
    """See `AdapterAgent.attach`; the agent lives as long as vLLM's manager."""
    install()
    manager = _current_manager()
    if manager is None:
        return None
    found = agent_of(manager)
    if found is not None:
        return found
    check_live(manager)
    models = manager._adapter_manager
    check_live(models)
    _take_over(models)
    caches = LoraCaches(models)
    if not is_bounded(manager.lora_config):
        models.elora_capacity = UNBOUND
        caches.resize()
    agent = kind(_loader_for(manager), caches, _pool_for(manager))
    setattr(manager, _AGENT, agent)
    models.elora_agent = agent
    cpu_lora_fix.install()
    return agent


def detach_agent(agent: AdapterAgent) -> None:
    """Give the manager back to vLLM's own behaviour."""
    manager = _current_manager()
    if manager is not None and agent_of(manager) is agent:
        models = manager._adapter_manager
        setattr(manager, _AGENT, None)
        models.elora_agent = models.elora_capacity = None
        LoraCaches(models).resize()


def agent_of(manager: Any) -> AdapterAgent | None:
    """The agent attached to a worker LoRA manager."""
    return getattr(manager, _AGENT, None)


def protect_on_worker(_worker: Any, protected: frozenset[int]) -> None:
    """Run on every rank by the engine, just before it passes on an adapter RPC."""
    manager = _current_manager()
    agent = None if manager is None else agent_of(manager)
    if agent is not None:
        agent.protect(protected)


def _current_manager() -> Any | None:
    manager = None if _current is None else _current()
    if manager is not None:
        return manager
    # Hooks that came too late (connector named by module path, no plugin) missed its birth.
    found = [obj for obj in gc.get_objects() if type(obj) is LRUCacheWorkerLoRAManager]
    if found:
        _remember(found[-1])
        return found[-1]
    return None


def _remember(manager: Any) -> None:
    global _current  # noqa: PLW0603  (one worker per process, as vLLM's own connector state)
    _current = weakref.ref(manager)


def _take_over(models: Any) -> None:
    """Make sure that the adapter caches choose victims our way."""
    if isinstance(models, EloraLoRAModelManager):
        return
    if type(models) is not LRUCacheLoRAModelManager:
        raise UnsupportedError(
            "elora: vLLM's LoRA model manager was replaced by "
            f"{type(models).__module__}.{type(models).__qualname__}; only "
            "LRUCacheLoRAModelManager can be driven"
        )
    models.__class__ = EloraLoRAModelManager


def _loader_for(manager: Any) -> AdapterLoader:
    config = manager.lora_config
    return AdapterLoader(
        functools.partial(original_of(WorkerLoRAManager, "_load_adapter"), manager),
        lora_dtype=str(config.lora_dtype).removeprefix("torch."),
        target_modules=tuple(config.target_modules or ()),
    )


def _pool_for(manager: Any) -> DaemonPool:
    device = torch.device(manager.device)
    # Pinning memory needs a context; without this a thread opens one on GPU 0.
    setup = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    return DaemonPool(LOADER_THREADS, "elora-adapter", setup)


def _create_lora_manager(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    model = original(manager, *args, **kwargs)
    _remember(manager)
    return model


def _load_adapter(original: Any, manager: Any, lora_request: Any) -> Any:
    agent = agent_of(manager)
    return original(manager, lora_request) if agent is None else agent.load_for_vllm(lora_request)


def _apply_adapters(original: Any, manager: Any, lora_requests: Any) -> Any:
    agent = agent_of(manager)
    if agent is None:
        return original(manager, lora_requests)
    agent.enter_step(frozenset(r.lora_int_id for r in lora_requests if r))
    try:
        return original(manager, lora_requests)
    finally:
        agent.leave_step()


def _add_adapter(original: Any, manager: Any, lora_request: Any) -> Any:
    agent = agent_of(manager)
    if agent is None:
        return original(manager, lora_request)
    if not agent.in_step:
        return _add_by_rpc(original, manager, agent, lora_request)
    if lora_request.load_inplace and lora_request.lora_int_id in manager.list_adapters():
        # The server leaves the flag on every later request: vLLM would read the files
        # at every step.  Whether they changed is for the scheduler's orders to find out.
        lora_request = msgspec.structs.replace(lora_request, load_inplace=False)
    return original(manager, lora_request)


def _add_by_rpc(original: Any, manager: Any, agent: AdapterAgent, lora_request: Any) -> Any:
    """vLLM's add, which loads, registers and activates; the first of these must succeed."""
    caches = LoraCaches(manager._adapter_manager)
    before = caches.peek(lora_request.lora_int_id)
    try:
        return original(manager, lora_request)
    except NoRoomError as error:
        # The adapter is good, and requests for it will be given a place in their turn.
        logger.info("elora: adapter %r is not kept resident: %s", lora_request.lora_name, error)
        return True
    except Exception:
        # vLLM leaves a half-written slot behind and would use it later.
        if caches.peek(lora_request.lora_int_id) is not before:
            caches.remove(lora_request.lora_int_id)
        raise
    finally:
        agent.count_rpc()


def _remove_adapter(original: Any, manager: Any, adapter_id: int) -> Any:
    agent = agent_of(manager)
    try:
        return original(manager, adapter_id)
    finally:
        if agent is not None and not agent.in_step:
            agent.count_rpc()


def _pin_adapter(original: Any, manager: Any, adapter_id: int) -> Any:
    agent = agent_of(manager)
    if agent is None:
        return original(manager, adapter_id)
    try:
        return original(manager, adapter_id)
    except NoRoomError:
        # vLLM pins in the host cache first; a pin that failed must not stay half done.
        LoraCaches(manager._adapter_manager).unpin(adapter_id)
        raise
    finally:
        agent.count_rpc()
