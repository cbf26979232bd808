"""In-process vLLM engines for tests: one at a time, with and without the connector.

Import this module before vLLM: it sets the environment that vLLM reads at import.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    VLLM_NO_USAGE_STATS="1",
)
# One thread: on a busy machine two of them spend ten times as long waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

BLOCK = 32
CHUNK = 64
DEFAULTS: Mapping[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
}
SETTINGS: Mapping[str, Any] = {
    "lmcache.chunk_size": CHUNK,
    "lmcache.max_local_cpu_size": 0.1,
    "elora.check_invariants": True,
    # KV that comes back to the GPU by itself would change which tier a hit is from;
    # tests of prefetch, random load and chaos switch it on.
    "elora.prefetch": False,
    # Tests assert hits; on a busy machine look-ups and loads may take long and must not be
    # given up.
    "elora.remote.lookup_timeout_ms": 10_000,
    "elora.load_or_recompute.enabled": False,
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request and what vLLM said about it."""

    tokens: tuple[int, ...]
    cached: int
    finish_reason: str | None
    stop_reason: int | str | None
    seconds: float


class Since:
    """What was counted since this object was made."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._before = dict(recorder.totals)

    def __call__(self, name: str, *labels: str) -> int:
        """Increase of a counter, summed over the labels that are not given."""
        now = self._recorder.total(name, *labels)
        key = self._recorder.key(name, *labels)
        before = sum(
            value
            for found, value in self._before.items()
            if found == key or found.startswith(key + "\x1f")
        )
        return round(now - before)


class Engine:
    """One live LLM; `ask` is synchronous, `side` is the connector's scheduler side."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._next_id = 0

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def side(self) -> Any:
        return self.scheduler.connector.elora_scheduler_side

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().elora_worker_side

    @property
    def ledger(self) -> Any:
        """The adapter slot ledger, None without LoRA."""
        adapters = self.side._adapters
        return None if adapters is None else adapters.ledger

    def total(self, name: str, *labels: str) -> float:
        """A counter of the scheduler side since the engine started."""
        return float(self.side.recorder.total(name, *labels))

    def worker_total(self, name: str, *labels: str) -> float:
        return float(self.worker.recorder.total(name, *labels))

    def gauge(self, name: str, *labels: str) -> float:
        """A level of the scheduler side, as last reported."""
        recorder = self.side.recorder
        return float(recorder.gauges[recorder.key(name, *labels)])

    def mark(self) -> Since:
        """Counters of the scheduler side from now on."""
        return Since(self.side.recorder)

    def mark_worker(self) -> Since:
        """Counters of the worker side from now on."""
        return Since(self.worker.recorder)

    def ask(self, prompt: Sequence[int], lora: Any = None, n: int = 8, **more: Any) -> Answer:
        """Tokens of one greedy request."""
        return self.ask_all([(prompt, lora)], n, **more)[0]

    def ask_all(
        self, requests: Sequence[tuple[Sequence[int], Any]], n: int = 8, **more: Any
    ) -> list[Answer]:
        """Several requests at once (batched by vLLM); keep base and LoRA apart on CPU.

        `more`: SamplingParams fields; `cache_salt` goes into the prompts.
        """
        from vllm import SamplingParams

        salt = more.pop("cache_salt", None)
        prompts = [
            {"prompt_token_ids": list(p), **({"cache_salt": salt} if salt else {})}
            for p, _ in requests
        ]
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)
        start = time.monotonic()
        outs = self.llm.generate(
            prompts, params, lora_request=[lora for _, lora in requests], use_tqdm=False
        )
        seconds = time.monotonic() - start
        return [_answer(out, seconds) for out in outs]

    def tiers(self) -> tuple[Any, ...]:
        """The remote tier's client in the scheduler and in the worker."""
        return self.side._remote.lookup.tier, self.worker._remote_tier

    def remote_answers(self) -> bool:
        """Do both clients believe that the store is well?"""
        from elora_connector.tiers.base import Health

        return all(tier.health() is Health.CLOSED for tier in self.tiers())

    # ---- requests that overlap ------------------------------------------------------

    def submit(self, prompt: Sequence[int], lora: Any = None, n: int = 8, **more: Any) -> str:
        """Queue one greedy request; returns its id.  See `run`."""
        from vllm import SamplingParams

        self._next_id += 1
        request_id = f"test-{self._next_id}"
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)
        self.llm.llm_engine.add_request(
            request_id, {"prompt_token_ids": list(prompt)}, params, lora_request=lora
        )
        return request_id

    def abort(self, *request_ids: str) -> None:
        """As when a client hangs up."""
        self.llm.llm_engine.abort_request(list(request_ids))

    def run(self, steps: int | None = None, seconds: float = 60.0) -> dict[str, Answer]:
        """Step until nothing is queued, or `steps` times; answers of what finished."""
        finished: dict[str, Answer] = {}
        start = time.monotonic()
        taken = 0
        while self.llm.llm_engine.has_unfinished_requests() and (steps is None or taken < steps):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = _answer(output, time.monotonic() - start)
            taken += 1
            assert time.monotonic() - start < seconds, "requests did not finish"
        return finished

    def decode(self, tokens: int) -> Any:
        """Step until the one running request has that many answer tokens; returns it."""
        while not self.scheduler.running or self.scheduler.running[0].num_output_tokens < tokens:
            assert not self.run(steps=1), "it ended first"
        return self.scheduler.running[0]

    # ---- between requests ---------------------------------------------------------------

    def settle(self, seconds: float = 10.0) -> None:
        """Step until no job is open and nothing waits to be written to the remote tier."""
        manager = self.side.manager
        self.until(lambda: not manager.open_jobs and not manager.open_puts, seconds)

    def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Step an engine without requests until something holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "gave up waiting"
            self.step()
            time.sleep(0.005)

    def forget_host(self) -> None:
        """Empty the host tier, and nothing else."""
        self.settle()
        self.side.manager.reset()

    def forget_gpu(self) -> None:
        """Empty vLLM's prefix cache, and nothing else."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def assert_at_rest(self) -> None:
        """No request, job, pin or slot is left behind, and the tree is sound."""
        from elora_connector.core.invariants import check_tree

        self.settle()
        side = self.side
        check_tree(side.manager.tree)
        side.manager.check()
        assert not side._trackers
        assert side.manager.pinned_by_waiters == 0
        assert side.pool.pinned == 0
        assert self.total("invariant_failures") == 0
        if self.ledger is not None:
            assert self.ledger.taken() == set()

    def step(self) -> None:
        """One engine step, also when vLLM has nothing to do."""
        output = self.scheduler.schedule()
        future = self.core.model_executor.execute_model(output, non_block=True)
        result = future.result()
        if result is None:
            result = self.core.model_executor.sample_tokens(None)
        self.scheduler.update_from_output(output, result)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _answer(output: Any, seconds: float) -> Answer:
    (completion,) = output.outputs
    return Answer(
        tuple(completion.token_ids),
        output.num_cached_tokens or 0,
        completion.finish_reason,
        completion.stop_reason,
        seconds,
    )


def lora(name: str, lora_id: int, path: Path | str, **more: Any) -> Any:
    """A LoRARequest."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, lora_id, str(path), **more)


def prompt(seed: int, length: int) -> list[int]:
    """Deterministic token ids inside the tiny model's vocabulary."""
    return [(seed * 131 + 7 * i * i + 3 * i + 1) % 490 + 8 for i in range(length)]


@contextlib.contextmanager
def engine(
    model: Path | str,
    settings: Mapping[str, Any] | None = None,
    *,
    connector: bool = True,
    role: str = "kv_both",
    **overrides: Any,
) -> Iterator[Engine]:
    """A live engine, the only one of its process: vLLM has one connector per process.

    `settings`: kv_connector_extra_config over `SETTINGS`.
    """
    from vllm import LLM
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    assert not has_kv_transfer_group(), "the engine before this one is still alive"

    args: dict[str, Any] = {**DEFAULTS, "model": str(model), **overrides}
    if connector:
        args["kv_transfer_config"] = {
            "kv_connector": "EloraConnector",
            "kv_role": role,
            "kv_connector_extra_config": {**SETTINGS, **(settings or {})},
        }
    live = Engine(LLM(**args))
    try:
        yield live
        if connector:
            live.assert_at_rest()
    finally:
        live.close()
