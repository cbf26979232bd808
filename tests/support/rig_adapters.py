"""Adapters of the scheduler rig: vLLM's own caches and our own agent, without weights.

The "files" of an adapter are one word, its content; loading takes steps, not threads.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm.lora.model_manager import AdapterLRUCache
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from elora_connector.integration.vllm import lora_hooks
from elora_connector.integration.vllm.adapter_loader import (
    LoadInfo,
    load_info,
    request_source,
    stamp,
)
from elora_connector.integration.vllm.adapter_messages import Verify
from elora_connector.integration.vllm.adapters import AdapterAgent
from elora_connector.integration.vllm.lora_caches import LoraCaches
from tests.support.rig_bytes import Delays, Events


class Disk:
    """Adapter "files": path -> content.  A path that is not there cannot be loaded.

    `nbytes`: size of every adapter's weights.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._content: dict[str, str] = {}
        self._version = itertools.count(1)

    def put(self, path: str) -> str:
        """New content that nothing had before."""
        self._content[path] = f"{path}#{next(self._version)}"
        return self._content[path]

    def put_back(self, path: str, content: str) -> None:
        self._content[path] = content

    def remove(self, path: str) -> None:
        self._content.pop(path, None)

    def read(self, path: str) -> str:
        if path not in self._content:
            raise FileNotFoundError(path)
        return self._content[path]


def digest_of(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


class RigLoader:
    """`AdapterLoader` on a `Disk`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._next_seq = itertools.count(1)
        self.loads = 0

    def load(self, request: Any, *, hash_again: bool) -> Any:
        content = self._disk.read(request.lora_path)
        self.loads += 1
        model = SimpleNamespace(id=request.lora_int_id, content=content)
        info = LoadInfo(
            request.lora_name,
            request_source(request),
            digest_of(content),
            next(self._next_seq),
            (),
            True,
            self._disk.nbytes,
        )
        stamp(model, info)
        return model

    def take_counts(self) -> dict[str, int]:
        return {}

    def recheck(self, request: Any, info: LoadInfo, verify: Verify) -> LoadInfo | None:
        if digest_of(self._disk.read(request.lora_path)) != info.digest:
            return None
        return replace(info, name=request.lora_name, source=request_source(request))

    def is_current(self, request: Any, model: Any) -> bool:
        info = load_info(model)
        try:
            content = self._disk.read(request.lora_path)
        except FileNotFoundError:
            return False
        return (
            info is not None
            and info.source == request_source(request)
            and info.digest == digest_of(content)
        )


class RigPool:
    """Runs what it is given some steps later."""

    def __init__(self, events: Events, delays: Delays) -> None:
        self._events = events
        self._delays = delays

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._events.after(self._delays.draw("adapter"), lambda: fulfil(future, call))
        return future

    def close(self) -> None:
        pass


def fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    """Run `call` now, unless nobody wants its result any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001  (handed to whoever asks for the result)
        future.set_exception(error)


class _Models(lora_hooks.EloraLoRAModelManager):
    """vLLM's adapter caches over a model without layers."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=capacity)
        self._registered_adapters = AdapterLRUCache(capacity, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(slots, self._deactivate_adapter)
        self.lora_index_to_id = [None] * slots
        self.modules = {}

    def _add_adapter(self, lora: Any) -> None:
        self._registered_adapters[lora.id] = lora


class _WorkerManager(LRUCacheWorkerLoRAManager):
    def __init__(self, models: _Models, loader: RigLoader) -> None:
        self._adapter_manager = models
        self._rig_loader = loader

    def _load_adapter(self, lora_request: Any) -> Any:
        if lora_hooks.agent_of(self) is None:
            return self._rig_loader.load(lora_request, hash_again=False)
        return super()._load_adapter(lora_request)


class RigAdapters:
    """Adapters of one rank.

    Args:
        agent: attach ours; otherwise vLLM loads on demand, as it does without us.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        disk: Disk,
        events: Events,
        delays: Delays,
        *,
        agent: bool,
    ) -> None:
        self._models = _Models(slots, capacity)
        self.loader = RigLoader(disk)
        self.manager = _WorkerManager(self._models, self.loader)
        self.agent: AdapterAgent | None = None
        if agent:
            caches = LoraCaches(self._models)
            pool: Any = RigPool(events, delays)
            loader: Any = self.loader
            self.agent = AdapterAgent(loader, caches, pool)
            setattr(self.manager, lora_hooks._AGENT, self.agent)
            self._models.elora_agent = self.agent

    def in_slot(self, lora_id: int) -> bool:
        return lora_id in self._models._active_adapters

    def registered(self) -> set[int]:
        return set(self._models._registered_adapters.cache)

    def weights(self, lora_id: int) -> str | None:
        """Content of the weights registered under an id."""
        model = self._models._registered_adapters.cache.get(lora_id)
        return None if model is None else model.content

    def apply(self, requests: set[Any]) -> None:
        """What vLLM does at the start of a step with the adapters of its batch."""
        self.manager._apply_adapters(requests)
        assert all(self.in_slot(r.lora_int_id) for r in requests)
        assert sum(i is not None for i in self._models.lora_index_to_id) == len(
            self._models._active_adapters
        )
