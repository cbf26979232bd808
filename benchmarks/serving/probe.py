"""Counts what an in-process vLLM engine does, the same way with every connector and without.

Uses vLLM's scheduler, block pool and LoRA manager only, never a connector's own counters.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Seen:
    """One request: seconds are points of `time.perf_counter`, tokens come from vLLM's stats.

    `steps`: engine steps that ran tokens, from its submission to its first token.
    """

    submitted: float
    scheduled: float = 0.0
    first_token: float = 0.0
    local: int = 0
    external: int = 0
    deferrals: int = 0
    steps: int = 0


class AdapterCounts:
    """Loads from disk and activations (writes of a GPU slot) in this process, for good."""

    def __init__(self) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.model_manager import LoRAModelManager

        self.loads = self.activations = 0
        load, activate = LoRAModel.from_local_checkpoint.__func__, LoRAModelManager.activate_adapter

        @functools.wraps(load)
        def counted_load(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self.loads += 1
            return load(kind, *args, **kwargs)

        @functools.wraps(activate)
        def counted_activation(manager: Any, lora_id: int) -> bool:
            done = bool(activate(manager, lora_id))
            self.activations += done
            return done

        LoRAModel.from_local_checkpoint = classmethod(counted_load)
        LoRAModelManager.activate_adapter = counted_activation


@functools.cache
def adapter_counts() -> AdapterCounts:
    """The one set of counters of this process; importing vLLM's LoRA code happens here."""
    return AdapterCounts()


class Probe:
    """Watches one engine; `requests` is filled by the driver, `counts` by the engine's steps.

    counts: scheduled (tokens of all steps), steps, empty_steps, batched (requests of all
    steps), mixed (steps with several adapters), samples; `invalid` and
    `misplaced` are sums over samples of shares of the cached blocks: blocks of adapters that
    are in no GPU slot, and those of them that vLLM would reuse after a valid one.
    `seconds` is the time spent in parts of the engine.
    """

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        worker = core.model_executor.driver_worker.worker
        self._slots = worker.model_runner.lora_manager._adapter_manager
        self.requests: dict[str, Seen] = {}
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._invalid = self._misplaced = 0.0
        self._owner: dict[bytes, int] = {}
        self._live: dict[str, Any] = {}
        self._scheduled = 0
        self._watch(core)

    def take(self) -> dict[str, Any]:
        """Everything counted since the last call."""
        adapters = adapter_counts()
        taken = {
            **self.counts,
            "loads": adapters.loads,
            "activations": adapters.activations,
            "invalid": self._invalid,
            "misplaced": self._misplaced,
            "seconds": dict(self.seconds),
        }
        adapters.loads = adapters.activations = 0
        self._invalid = self._misplaced = 0.0
        self.counts.clear()
        self.seconds.clear()
        return taken

    @property
    def idle(self) -> bool:
        """Did the last step run no token?"""
        return self._scheduled == 0

    def _watch(self, core: Any) -> None:
        scheduler = self.scheduler
        scheduler.add_request = _after(scheduler.add_request, self._on_add)
        scheduler.schedule = self._timed("schedule", scheduler.schedule, self._on_schedule)
        update = scheduler.update_from_output
        scheduler.update_from_output = self._timed("update", update, self._on_update)
        executor = core.model_executor
        executor.execute_model = self._timed("model", executor.execute_model)
        if scheduler.connector is not None:
            connector = scheduler.connector
            ask = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = _after(ask, self._on_match)

    def _timed(
        self, name: str, call: Callable[..., Any], then: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - start
            if then is not None:
                then(result, *args)
            return result

        return run

    def _on_add(self, _result: None, request: Any) -> None:
        self._live[request.request_id] = request

    def _on_match(self, result: tuple[int | None, bool], request: Any, *_: Any) -> None:
        seen = self._seen(request.request_id)
        if seen is not None and result[0] is None:
            seen.deferrals += 1

    def _on_schedule(self, output: Any, *_: Any) -> None:
        self._scheduled = output.total_num_scheduled_tokens
        self.counts["scheduled"] += self._scheduled
        self.counts["steps" if self._scheduled else "empty_steps"] += 1
        self.counts["batched"] += len(output.num_scheduled_tokens)
        self.counts["mixed"] += self._adapters_of(output.num_scheduled_tokens) > 1
        if self._scheduled:
            for seen in self.requests.values():
                seen.steps += not seen.first_token
        now = time.perf_counter()
        for request_id in output.num_scheduled_tokens:
            seen = self._seen(request_id)
            if seen is not None and not seen.scheduled:
                seen.scheduled = now

    def _adapters_of(self, request_ids: Iterable[str]) -> int:
        return len({self._live[request_id].lora_request for request_id in request_ids})

    def _on_update(self, result: Any, *_: Any) -> None:
        for outputs in result.values():
            for one in outputs.outputs:
                seen = self._seen(one.request_id)
                if seen is not None and one.prefill_stats is not None:
                    seen.local = one.prefill_stats.num_local_cached_tokens
                    seen.external = one.prefill_stats.num_external_cached_tokens
        if self._scheduled:
            self._sample()
        for request_id in [r for r in self._live if r not in self.scheduler.requests]:
            del self._live[request_id]

    def _seen(self, request_id: str) -> Seen | None:
        """vLLM appends a random suffix to the ids that it is given."""
        found = self.requests.get(request_id)
        return found or self.requests.get(request_id.rpartition("-")[0])

    # ---- invalid KV ---------------------------------------------------------------------

    def _sample(self) -> None:
        from vllm.v1.core.kv_cache_utils import get_block_hash

        for request in self._live.values():
            if request.lora_request is not None:
                adapter = request.lora_request.lora_int_id
                self._owner.update(dict.fromkeys(request.block_hashes, adapter))
        active = set(self._slots.lora_index_to_id)

        def valid(block: Any) -> bool:
            owner = self._owner.get(get_block_hash(block.block_hash))
            return owner is None or owner in active

        cached = [b for b in self._pool.blocks if b.block_hash is not None]
        if not cached:
            return
        self.counts["samples"] += 1
        self._invalid += sum(not valid(b) for b in cached) / len(cached)
        free = [valid(b) for b in _queue(self._pool) if b.block_hash is not None]
        behind = free[free.index(True) :].count(False) if True in free else 0
        self._misplaced += behind / len(cached)


def _after(call: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        then(result, *args, **kwargs)
        return result

    return run


def _queue(pool: Any) -> Iterator[Any]:
    """Free blocks in the order in which vLLM will use them."""
    block = pool.free_block_queue.fake_free_list_head.next_free_block
    while block is not None and block.next_free_block is not None:
        yield block
        block = block.next_free_block
