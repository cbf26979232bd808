"""vLLM's real scheduler with the real connector, over workers that only move bytes.

No model, no thread, no clock: a step is one call, everything that takes time takes steps,
and a seed decides all of it.  See `rig_worker` for what is checked in every forward.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from elora_connector import plugin
from elora_connector.core.invariants import check_tree
from elora_connector.core.node import NodeKind
from elora_connector.core.types import Rank, Tier
from elora_connector.integration.vllm import build, worker_side
from elora_connector.integration.vllm.host_loras import UNBOUND, is_bounded
from elora_connector.metrics import Recorder
from tests.support.faulty_tier import FaultyTier
from tests.support.rig_adapters import Disk, RigAdapters, fulfil
from tests.support.rig_bytes import (
    TOKEN_BYTES,
    Delays,
    Events,
    Memory,
    RigEngine,
    RigIO,
    Sizes,
)
from tests.support.rig_gpu import GpuWatch
from tests.support.rig_setup import (
    ADAPTERS,
    ASYNC,
    BLOCK,
    CHUNK,
    STEP_S,
    SYNC,
    VARIANTS,
    Variant,
    adapted,
    cache_config_of,
    engine_config,
    grammar,
    id_of,
    lora_request,
    oracle,
    path_of,
    prompt,
    transfer_config,
)
from tests.support.rig_worker import RigRank, RigWorkerSide


@dataclass
class Answer:
    """What became of a request."""

    prompt: list[int]
    adapter: str | None
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    message: str | None = None
    asked: list[tuple[int | None, bool]] = field(default_factory=list)
    """The connector's answers to vLLM, in order."""
    arrived: int = 0
    started: int | None = None
    """Number of the first step that computed tokens of it."""
    hit: int = 0
    """Tokens computed elsewhere (cached or loaded) at that step."""
    weights: set[str] = field(default_factory=set)
    """Every content that its KV was computed with."""

    @property
    def deferrals(self) -> int:
        return sum(tokens is None for tokens, _ in self.asked)


class _LookupPool:
    """Answers the scheduler side's look-ups some steps later."""

    def __init__(self, events: Events, delays: Delays) -> None:
        self._events = events
        self._delays = delays

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        steps = self._delays.draw("lookup")
        if steps == 0:
            fulfil(future, lambda: call(*args))
            return future
        # As a thread that has begun: nobody can call it back.
        future.set_running_or_notify_cancel()
        self._events.after(steps - 1, lambda: future.set_result(call(*args)))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


class Rig:
    """One engine without a model.

    Args:
        delay: steps that a step's outputs and reports lag behind (batch queue depth - 1).
        settings: entries of `kv_connector_extra_config`.
        delays: see `Delays`.
        host_slots: chunks that fit into the host tier.
        adapter_chunks: size of every adapter's weights, in chunks.
        connector: False gives stock vLLM on the same workers.
        store: a tier whose values to share, as instances share Redis; None with `remote`
            gives this rig one of its own.
    """

    def __init__(
        self,
        variant: Variant = SYNC,
        delay: int = 0,
        ranks: int = 1,
        settings: Mapping[str, Any] | None = None,
        *,
        max_loras: int = 2,
        max_cpu_loras: int | None = 3,
        num_blocks: int = 64,
        prefix_caching: bool = True,
        seed: int = 0,
        delays: Mapping[str, int | tuple[int, int]] | None = None,
        host_slots: int = 32,
        adapter_chunks: float = 0,
        connector: bool = True,
        remote: bool = True,
        store: FaultyTier | None = None,
        max_num_seqs: int = 4,
        max_tokens_per_step: int = 32,
    ) -> None:
        plugin.register()
        self.variant = variant
        self.delay = delay
        self.random = random.Random(seed)
        self.delays = Delays(seed, **(delays or {}))
        self.now = 1000.0
        self.steps = 0
        self.disk = Disk(int(adapter_chunks * CHUNK * TOKEN_BYTES))
        for name in ADAPTERS:
            self.disk.put(path_of(name))
        self.tier = FaultyTier(store=store, clock=lambda: self.now) if remote else None
        self.answers: dict[str, Answer] = {}
        self.fail_loads = 0.0
        self.unguarded: set[int] = set()
        """Adapters that vLLM itself may have taken from under running requests."""
        self._events = Events()
        self._flying: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._counter = 0
        config = engine_config(max_loras, max_cpu_loras, max_num_seqs, max_tokens_per_step)
        self._config = adapted(config, variant, ranks, num_blocks, prefix_caching)
        sizes = Sizes(num_blocks, BLOCK, CHUNK // BLOCK, host_slots)
        if connector:
            extra = {
                "lmcache.chunk_size": CHUNK,
                "lmcache.max_local_cpu_size": host_slots * sizes.chunk_bytes / 2**30,
                "elora.check_invariants": True,
                "elora.model_id": "rig",
                "elora.sync_load_ms": 1000,
            }
            if remote:
                extra["lmcache.remote_url"] = "redis://rig"  # in whose place `tier` comes
            self._config.kv_transfer_config = transfer_config(extra | dict(settings or {}))
        self.scheduler = self._make_scheduler(num_blocks)
        self.gpu = GpuWatch(self.scheduler.kv_cache_manager.block_pool, self._slotted)
        self.side = self.scheduler.connector.elora_scheduler_side if connector else None
        if self.side is not None:
            self._take_over()
        self.ranks = [self._make_rank(index, sizes) for index in range(ranks)]
        self._aggregator = KVOutputAggregator(ranks)
        hash_fn = get_hash_fn_by_name(self._config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn)

    # ---- making it -------------------------------------------------------------------

    def _make_scheduler(self, num_blocks: int) -> Any:
        cache_config = cache_config_of(num_blocks)
        with patch.object(build, "remote_tier", lambda config, recorder: self.tier):
            scheduler = self.variant.scheduler(
                self._config,
                cache_config,
                grammar(),
                block_size=BLOCK,
            )
        scheduler.use_v2_model_runner = self.variant.resumed_as_new
        scheduler.defer_block_free |= self.delay > 0 and scheduler.connector is not None
        return scheduler

    def _take_over(self) -> None:
        """Clock and look-ups of the real scheduler side become ours."""
        self.side._clock = lambda: self.now
        if self.side._remote is not None:
            self.side._remote.lookup._pool = _LookupPool(self._events, self.delays)
            self.side._remote.lookup._clock = lambda: self.now
        connector, ask = self.scheduler.connector, self.side.match

        def match(request: Any, computed: int) -> tuple[int | None, bool]:
            answer = ask(request, computed)
            self.answers[request.request_id].asked.append(answer)
            return answer

        connector.get_num_new_matched_tokens = match

    def _make_rank(self, index: int, sizes: Sizes) -> RigRank:
        events = Events()
        memory = Memory(sizes)
        lora = self._config.lora_config
        adapters = RigAdapters(
            lora.max_loras,
            lora.max_cpu_loras if is_bounded(lora) else UNBOUND,
            self.disk,
            events,
            self.delays,
            agent=self.side is not None,
        )
        side = None if self.side is None else self._make_side(index, memory, events, adapters)
        return RigRank(
            index,
            memory,
            events,
            adapters,
            side,
            lambda lora_id: lora_id not in self.unguarded,
            lambda request_id: self.scheduler.requests[request_id].lora_request,
        )

    def _make_side(
        self, index: int, memory: Memory, events: Events, adapters: RigAdapters
    ) -> RigWorkerSide:
        worker_side._IDLE_NAP_S = 0.0
        pool = self.scheduler.kv_cache_manager.block_pool
        engine = RigEngine(
            memory,
            events,
            self.delays,
            in_use=lambda block: pool.blocks[block].ref_cnt > 0,
            fails=lambda: self.random.random() < self.fail_loads,
        )
        io = None if self.tier is None else RigIO(self.tier, memory, events, self.delays)
        return RigWorkerSide(
            memory,
            engine,
            io,
            config=self.side.config,
            geometry=self.side.geometry,
            slots=memory.sizes.slots,
            rank=(Rank(tp=index), index),
            dtype="float32",
            remote=self.tier,
            agent=adapters.agent,
            recorder=Recorder(),
        )

    # ---- what a client does ------------------------------------------------------------

    def submit(
        self,
        adapter: str | None,
        prompt: Sequence[int],
        max_tokens: int = 2,
        *,
        salt: str | None = None,
        load_inplace: bool = False,
        skip: bool = False,
        lora_id: int | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> str:
        """Queue a request; returns its id."""
        self._counter += 1
        request_id = f"r{self._counter}"
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(params)} if params else None,
            skip_reading_prefix_cache=True if skip else None,
        )
        lora = None if adapter is None else lora_request(adapter, load_inplace, lora_id)
        request = Request(
            request_id,
            list(prompt),
            sampling,
            None,
            arrival_time=self.now,
            lora_request=lora,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.answers[request_id] = Answer(list(prompt), adapter, arrived=self.steps)
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        answer = self.answers[request_id]
        answer.reason = answer.reason or "abort"

    def add_lora(
        self, adapter: str, *, load_inplace: bool = False, lora_id: int | None = None
    ) -> None:
        """`/v1/load_lora_adapter`: past the scheduler, between two steps."""
        self._rpc("add_lora", lora_request(adapter, load_inplace, lora_id))

    def remove_lora(self, adapter: str) -> None:
        self.unguarded.add(id_of(adapter))
        self._rpc("remove_lora", id_of(adapter))

    def change(self, adapter: str) -> str:
        """New files under an adapter's path, which nobody is told about."""
        return self.disk.put(path_of(adapter))

    def _rpc(self, kind: str, target: Any) -> None:
        managers = [rank.adapters.manager for rank in self.ranks]
        executor = SimpleNamespace(
            collective_rpc=self._protect,
            add_lora=lambda request: [m.add_adapter(request) for m in managers],
            remove_lora=lambda lora_id: [m.remove_adapter(lora_id) for m in managers],
        )
        engine = SimpleNamespace(scheduler=self.scheduler, model_executor=executor)
        getattr(EngineCore, kind)(engine, target)

    def _protect(self, method: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
        for rank in self.ranks:
            assert rank.adapters.agent is not None
            rank.adapters.agent.protect(*args)

    # ---- steps -------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        """Schedule and execute a step; take in the outputs of the one `delay` steps ago."""
        for _ in range(count):
            output = self.scheduler.schedule()
            self._note_starts(output)
            self._flying.append((output, self._execute(output)))
            if len(self._flying) > self.delay:
                self._take_in(*self._flying.popleft())
            self._events.end_step()
            self.steps += 1
            self.now += STEP_S

    def _note_starts(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            answer = self.answers[new.req_id]
            if answer.started is None:
                answer.started, answer.hit = self.steps, new.num_computed_tokens

    def _execute(self, output: Any) -> ModelRunnerOutput:
        results: list[ModelRunnerOutput | None] = []
        sampled: list[list[int]] | None = None
        for rank in self.ranks:
            result = rank.execute(output, sampled)
            sampled = result.sampled_token_ids
            results.append(result)
        for request_id, run in self.ranks[0].requests.items():
            self.answers[request_id].weights |= run.weights
        if self.side is None:
            return results[0]
        order = list(range(len(results)))
        self.random.shuffle(order)
        merged = self._aggregator.aggregate([results[i] for i in order], order.index(0))
        assert merged is not None
        return merged

    def _take_in(self, output: Any, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                answer = self.answers[one.request_id]
                answer.tokens.extend(one.new_token_ids)
                if one.finish_reason is not None:
                    answer.reason = str(one.finish_reason)
                    answer.message = one.stop_reason

    def run(self, *request_ids: str, limit: int = 300) -> list[Answer]:
        """Step until these requests (all, if none is named) are done."""
        wanted = request_ids or tuple(self.answers)
        for _ in range(limit):
            if all(self.answers[r].reason for r in wanted):
                return [self.answers[r] for r in wanted]
            self.step()
        waiting = {r: self.answers[r].asked[-3:] for r in wanted if not self.answers[r].reason}
        raise AssertionError(f"not done after {limit} steps: {waiting}")

    def settle(self, limit: int = 200) -> None:
        """Step until nothing is under way any more."""
        for _ in range(limit):
            if not self._busy():
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps: {self._busy()}")

    def _busy(self) -> list[str]:
        busy = [f"request {r}" for r in self.scheduler.requests]
        busy += ["a step in flight"] * any(o.num_scheduled_tokens for o, _ in self._flying)
        if self.side is None:
            return busy
        manager = self.side.manager
        busy += [f"{manager.open_jobs} jobs"] * bool(manager.open_jobs)
        busy += ["a prefetch is wanted"] * self.side.has_pending_work
        busy += [f"{manager.open_puts} writes"] * bool(manager.open_puts)
        for rank in self.ranks:
            busy += [f"events of rank {rank.index}"] * bool(len(rank.events))
        return busy

    def drain(self, limit: int = 600) -> None:
        """Everything ends and nothing is left behind."""
        self.run(limit=limit)
        self.settle()
        self.step(self.delay + 2)  # the last reports
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1, "GPU blocks leaked"
        assert not self.scheduler.has_requests()
        self.check_answers()
        if self.side is not None:
            self._check_drained()

    def _check_drained(self) -> None:
        manager = self.side.manager
        assert manager.open_jobs == manager.open_puts == manager.pinned_by_waiters == 0
        assert manager.tree.pinned == 0, "a pin is left"
        assert self.side.pool.pinned == 0
        assert manager.slots.used == manager.tree.num_resident(Tier.HOST, NodeKind.CHUNK), (
            "a host slot leaked"
        )
        used, budget = manager.tree.used_bytes(Tier.HOST), self.side.config.host_bytes
        # A slot's worth of adapters is there whatever the budget says.
        most = max(budget, self.ledger.slots * self.disk.nbytes)
        assert used <= most, f"I4: {used} of {budget} bytes"
        assert not self.side._trackers
        assert not self.ledger.taken(), "an adapter is held for nobody"
        self.check()

    # ---- looking -----------------------------------------------------------------------

    @property
    def ledger(self) -> Any:
        return self.side._adapters.ledger

    def _slotted(self) -> frozenset[str]:
        """Adapters in GPU slots: as the ledger counts, without connector as rank 0 has them."""
        if self.side is not None:
            return self.ledger.slot_watch.names
        return frozenset(n for n in ADAPTERS if self.ranks[0].adapters.in_slot(id_of(n)))

    def check_gpu(self) -> None:
        """I7, and our view of vLLM's block pool, by what was seen from outside."""
        view = self.side.gpu
        if view is None:
            return
        view.check()
        watch = self.gpu
        assert not watch.wrong, f"I7: {watch.wrong} takes before a worse block, {watch.taken}"
        assert not watch.misplaced(), "a dormant block stands behind a valid one"
        assert not watch.orphans, f"{watch.orphans} blocks lost their parent"
        names = ["", *self.side.pool.names]
        ours = {b: names[view.table.owner[b]] for b in watch.owners()}
        assert ours == watch.owners(), "a block has another owner than we think"

    def check(self) -> None:
        """Every invariant of the scheduler side."""
        self.check_gpu()
        manager = self.side.manager
        check_tree(manager.tree)
        manager.check()
        ledger = self.ledger
        self.side._adapters.check()
        assert len(ledger.taken()) <= ledger.slots
        in_slot, in_host = ledger.counts()
        assert in_slot <= ledger.slots, f"{in_slot} adapters in {ledger.slots} slots"
        most = ledger.host_capacity
        assert most is None or in_host <= most, f"{in_host} adapters of {most}"

    def total(self, name: str, *labels: str) -> float:
        """A counter of the scheduler side."""
        return float(self.side.recorder.total(name, *labels))

    def check_answers(self) -> None:
        """Whoever saw one set of weights answers as if it had been alone in the world."""
        for request_id, answer in self.answers.items():
            if len(answer.weights) == 1:
                (weights,) = answer.weights
                expected = oracle(answer.prompt, weights, len(answer.tokens))
                assert answer.tokens == expected, f"{request_id} answers {answer.tokens}"


__all__ = [
    "ADAPTERS",
    "ASYNC",
    "BLOCK",
    "CHUNK",
    "STEP_S",
    "SYNC",
    "VARIANTS",
    "Answer",
    "Rig",
    "Variant",
    "id_of",
    "oracle",
    "path_of",
    "prompt",
]
