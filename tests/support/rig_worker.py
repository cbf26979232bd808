"""One rank of the scheduler rig: the real `WorkerSide` over bytes, and a fake forward.

Follows the order of vLLM's model runners within a step.  Every request's KV is checked
in full before each of its forwards.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from elora_connector.integration.vllm.metadata import StepMetadata
from elora_connector.integration.vllm.worker_side import WorkerSide
from tests.support.rig_adapters import RigAdapters
from tests.support.rig_bytes import (
    TOKEN_BYTES,
    Events,
    Memory,
    WrongBytesError,
    next_token,
    prefix_kv,
    token_kv,
)

BASE_WEIGHTS = "base"


class RigWorkerSide(WorkerSide):
    """The real worker side; host buffer, copies and remote I/O are given to it."""

    def __init__(self, memory: Memory, engine: Any, io: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._memory = memory
        self._engine = engine
        self._io = io
        self._value_dtype = "rig"
        self._shape = (1, memory.sizes.blocks_per_chunk, memory.sizes.block_bytes)

    def begin_step(self, step: StepMetadata) -> None:
        for fetch in step.fetches:
            for item in fetch.items:
                self._memory.own(item.ref)
        self._engine.draining = step.drain
        super().begin_step(step)
        self._engine.draining = False

    def store(self) -> None:
        for order in self._step.stores:
            for item in order.items:
                self._memory.own(item.ref)
        super().store()


@dataclass
class Running:
    """A request in the worker's batch.

    `kv` is what its first tokens' KV has to be; None until its first forward.
    `weights`: every content that a part of its KV was computed with.
    """

    prompt: int
    tokens: list[int]
    blocks: list[int]
    lora: Any
    kv: list[bytes] | None = None
    weights: set[str] = field(default_factory=set)


class RigRank:
    """One worker.

    Args:
        side: None without a connector.
        gated: does the rule hold that a running request's adapter is in a slot?  Asked
            with the adapter's id; vLLM's own remove_lora may break it.
        lora_of: request id -> its LoRARequest or None.
    """

    def __init__(
        self,
        index: int,
        memory: Memory,
        events: Events,
        adapters: RigAdapters,
        side: RigWorkerSide | None,
        gated: Callable[[int], bool],
        lora_of: Callable[[str], Any],
    ) -> None:
        self.index = index
        self.memory = memory
        self.events = events
        self.adapters = adapters
        self.side = side
        self.gated = gated
        self.lora_of = lora_of
        self.requests: dict[str, Running] = {}
        self.loading: dict[str, str] = {}
        """Requests with a load ordered -> weights at that moment."""
        self.checked = 0
        """Tokens whose KV was compared."""

    # ---- one step ----------------------------------------------------------------------

    def execute(self, output: Any, sampled: list[list[int]] | None) -> ModelRunnerOutput:
        """Run one step; the result is what this rank's model runner returns.

        Args:
            sampled: tokens of rank 0, None on rank 0 itself.
        """
        if self.side is not None:
            # Over a pipe, as vLLM sends it: no rank sees another one's object.
            self._begin(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        self._update(output)
        batch = list(output.num_scheduled_tokens)
        if batch:
            self._enter(batch)
        if self.side is not None and output.has_sync_kv_loads:
            self.side.load()
        sampled = self._forward(output, sampled)
        result = ModelRunnerOutput(
            req_ids=batch,
            req_id_to_index={rid: i for i, rid in enumerate(batch)},
            sampled_token_ids=sampled,
        )
        if self.side is not None:
            result.kv_connector_output = self._end(output)
        else:
            self.events.end_step()
        return result

    def _begin(self, step: StepMetadata) -> None:
        assert self.side is not None
        for order in step.loads:
            if not order.ordered:
                self.loading[order.request_id] = self.weights_of(self.lora_of(order.request_id))
        self.side.begin_step(step)

    def _end(self, output: Any) -> KVConnectorOutput:
        side = self.side
        assert side is not None
        if not output.has_sync_kv_loads:
            side.load()
        side.store()
        self.events.end_step()
        received = side.end_step()
        invalid = side.take_invalid_blocks()
        return KVConnectorOutput(
            finished_recving=received or None,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=side.take_report(),
        )

    def _enter(self, batch: Sequence[str]) -> None:
        loras = {r.lora_int_id: r for rid in batch if (r := self.requests[rid].lora) is not None}
        if self.adapters.agent is not None:
            # What `apply` does first: orders are carried out; vLLM itself must place nothing.
            self.adapters.agent.enter_step(frozenset(loras))
        for lora_id in loras:
            if self.side is not None and self.gated(lora_id) and not self.adapters.in_slot(lora_id):
                raise WrongBytesError(f"rank {self.index}: adapter {lora_id} runs without a slot")
        self.adapters.apply(set(loras.values()))

    # ---- the batch ---------------------------------------------------------------------

    def _update(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
            self.loading.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.requests[new.req_id] = Running(
                len(new.prompt_token_ids), list(tokens), list(new.block_ids[0]), new.lora_request
            )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            run = self.requests[request_id]
            if request_id in cached.resumed_req_ids:
                run.tokens = list(cached.all_token_ids[request_id])
                run.blocks = list(cached.new_block_ids[i][0])
                run.kv = None
                run.weights = set()
                continue
            # A failed load makes vLLM drop tokens that were sampled from it.
            del run.tokens[run.prompt + cached.num_output_tokens[i] :]
            if cached.new_block_ids[i] is not None:
                run.blocks.extend(cached.new_block_ids[i][0])

    def _computed(self, output: Any) -> dict[str, int]:
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed | {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}

    def _forward(self, output: Any, sampled: list[list[int]] | None) -> list[list[int]]:
        computed = self._computed(output)
        scheduled = output.num_scheduled_tokens
        for request_id, count in scheduled.items():
            # In turn: vLLM lets a request hit blocks that an earlier one of its batch fills.
            self._check(request_id, computed[request_id])
            self._compute(request_id, computed[request_id], count)
        if sampled is None:
            sampled = [self._sample(rid, computed[rid] + n) for rid, n in scheduled.items()]
        for request_id, tokens in zip(scheduled, sampled, strict=True):
            self.requests[request_id].tokens.extend(tokens)
        return sampled

    def _check(self, request_id: str, computed: int) -> None:
        """KV of the tokens that vLLM takes as computed is exactly what it must be."""
        run = self.requests[request_id]
        if run.kv is None:
            self._adopt(request_id, run, computed)
        assert run.kv is not None
        del run.kv[computed:]
        if len(run.kv) < computed:
            raise WrongBytesError(f"{request_id} never computed tokens {len(run.kv)}..{computed}")
        wrong = self._first_difference(run, run.kv)
        if wrong is not None:
            raise WrongBytesError(
                f"rank {self.index}: {request_id} ({run.lora and run.lora.lora_name}, now "
                f"{self.weights_of(run.lora)}) sees wrong KV in block {run.blocks[wrong]}, number "
                f"{wrong} of its table, with {computed} tokens computed"
            )
        self.checked += computed

    def _adopt(self, request_id: str, run: Running, computed: int) -> None:
        """First forward: its prefix is of the weights of now, or of when its load began."""
        now = self.weights_of(run.lora)
        for weights in (self.loading.pop(request_id, now), now):
            run.kv = prefix_kv(run.tokens[:computed], weights, self.index)
            if self._first_difference(run, run.kv) is None:
                run.weights |= {weights} if computed else set()
                return

    def _first_difference(self, run: Running, kv: list[bytes]) -> int | None:
        """Number in its table of the first block that does not hold `kv`."""
        size = self.memory.sizes.block_size
        for start in range(0, len(kv), size):
            wanted = b"".join(kv[start : start + size])
            found = self.memory.block(run.blocks[start // size])[: len(wanted)]
            if found != wanted:
                return start // size
        return None

    def _compute(self, request_id: str, computed: int, count: int) -> None:
        run = self.requests[request_id]
        assert run.kv is not None
        now = self.weights_of(run.lora)
        run.weights.add(now)
        if len(run.tokens) < computed + count:
            raise WrongBytesError(f"{request_id}: {computed} + {count} tokens of {len(run.tokens)}")
        size = self.memory.sizes.block_size
        before = run.kv[-1] if run.kv else b""
        for position in range(computed, computed + count):
            before = token_kv(before, run.tokens[position], now, self.index)
            run.kv.append(before)
            block = run.blocks[position // size]
            if not block:
                raise WrongBytesError(f"{request_id} writes vLLM's null block")
            at = position % size * TOKEN_BYTES
            self.memory.block(block)[at : at + TOKEN_BYTES] = before

    def _sample(self, request_id: str, end: int) -> list[int]:
        run = self.requests[request_id]
        assert run.kv is not None
        if end < len(run.tokens):
            return []
        return [next_token(run.kv[-1])]

    def weights_of(self, lora: Any) -> str:
        if lora is None:
            return BASE_WEIGHTS
        return self.adapters.weights(lora.lora_int_id) or "nothing"
