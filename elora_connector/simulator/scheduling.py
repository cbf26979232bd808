"""Who computes how many tokens in a step: vLLM's continuous batching, reduced to its rules."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from elora_connector.core.ledger import Gate
from elora_connector.simulator.build import Parts
from elora_connector.simulator.lines import WaitingLine
from elora_connector.simulator.live import Live, Stage


@dataclass(slots=True)
class Batch:
    """What one step computes.

    Attributes:
        tokens: by request.
        prompt: tokens of prompts among them.
        pairs: tokens attended to, summed over all tokens.
        context: tokens whose KV is read.
        loads_until: when the loads that the step waits for have ended.
        stall_s: seconds that it waits for adapters.
    """

    tokens: dict[Live, int] = field(default_factory=dict)
    prompt: int = 0
    pairs: float = 0.0
    context: int = 0
    loads_until: float = 0.0
    stall_s: float = 0.0

    def add(self, live: Live, tokens: int) -> None:
        """`tokens` more tokens of a request that has `live.computed` already."""
        self.tokens[live] = tokens
        self.context += live.computed + tokens
        self.pairs += tokens * (live.computed + 0.5 * tokens)
        if live.generated == 0 or tokens > 1:
            self.prompt += tokens


class Scheduler:
    """Running requests first, then waiting ones in their order, under a token budget.

    Attributes:
        running, loading: admitted requests; those whose KV is still on its way.
        look: may a waiting request be admitted that could not be a moment ago?
        preemptions: requests that lost their blocks to others.
    """

    def __init__(self, parts: Parts) -> None:
        self.running: list[Live] = []
        self.loading: list[Live] = []
        self.waiting = WaitingLine()
        self.per_adapter: Counter[Hashable] = Counter()
        self.look = True
        self.preemptions = 0
        self._parts = parts
        self._loaded: list[Live] = []
        self._waits: dict[int, float] = {}
        """Adapters that are being loaded for somebody -> since when."""
        self._waited: dict[int, tuple[float, float]] = {}
        """Last such wait of each adapter."""
        parts.kv.wake = self._load_ended
        if parts.adapters is not None:
            parts.adapters.wake = self._changed

    def schedule(self, now: float) -> Batch:
        """The next step's batch; empty if nothing can be computed now."""
        batch = Batch()
        budget = self._parts.machine.max_tokens
        budget, preempted = self._serve(batch, budget, now)
        if not preempted:
            budget = self._start_loaded(batch, budget, now)
            if self.look and len(self.waiting):
                self._admit(batch, budget, now)
        adapters = self._parts.adapters
        if adapters is not None:
            adapters.ship(now)
            batch.stall_s, adapters.stall_s = adapters.stall_s, 0.0
        return batch

    def arrive(self, live: Live) -> None:
        """A request came in."""
        self.waiting.add(live)
        self.look = True

    def end(self, live: Live, now: float) -> None:
        """A request has its answer."""
        self.running.remove(live)
        self._leave(live)
        self._parts.kv.ended(live, now)
        if live.lora_id is not None and self._parts.adapters is not None:
            self._parts.adapters.finished(live, now)
        self.look = True

    # ---- running requests ----------------------------------------------------------------

    def _serve(self, batch: Batch, budget: int, now: float) -> tuple[int, bool]:
        """Tokens for running requests; True if one of them lost its blocks."""
        preempted = False
        for live in list(self.running):
            if budget <= 0:
                break
            if live.stage is not Stage.RUNNING:
                continue  # preempted a moment ago
            tokens = min(live.wanted, budget)
            while not self._parts.kv.reserve(live, live.computed + tokens, now):
                preempted = True
                if not self._preempt(batch, keep=live):
                    break
            if live.stage is Stage.RUNNING:
                batch.add(live, tokens)
                budget -= tokens
        return budget, preempted

    def _preempt(self, batch: Batch, keep: Live) -> bool:
        """The last admitted one gives its blocks back; False: that was `keep` itself."""
        victim = self.running.pop()
        if victim in batch.tokens:
            raise AssertionError("a request that has its tokens stands before the last one")
        self._leave(victim)
        self._parts.kv.preempted(victim)
        victim.stage = Stage.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.put_back(victim)
        self.look = True
        return victim is not keep

    # ---- waiting requests ----------------------------------------------------------------

    def _start_loaded(self, batch: Batch, budget: int, now: float) -> int:
        left: list[Live] = []
        for live in self._loaded:
            if budget > 0:
                budget -= self._enter(batch, live, budget, now)
            else:
                left.append(live)
        self._loaded = left
        return budget

    def _admit(self, batch: Batch, budget: int, now: float) -> None:
        self.look = False
        heads = self.waiting.heads()
        while heads:
            if budget <= 0 or self._admitted >= self._parts.machine.max_batch:
                self.look = True
                return
            _, live = heads[0]
            if not self._passes(live, now):
                heapq.heappop(heads)
                continue
            local, external = self._parts.kv.promise(live, now)
            first = 0 if external else min(budget, live.known_tokens - local)
            if not self._parts.kv.admit(live, local, external, now, first):
                return  # as vLLM: nobody overtakes a request that has no room
            follower = self.waiting.pop(live)
            if follower is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (follower.order, follower))
            budget -= self._admit_one(batch, live, budget, now)

    @property
    def _admitted(self) -> int:
        return len(self.running) + len(self.loading)

    def _passes(self, live: Live, now: float) -> bool:
        adapters, lora_id = self._parts.adapters, live.lora_id
        if lora_id is None or adapters is None:
            return True
        stall = adapters.stall_s
        gate = adapters.ask(live, now)
        live.stall_s = adapters.stall_s - stall
        if gate is Gate.LOADING:
            self._waits.setdefault(lora_id, now)
        elif gate is Gate.READY and lora_id in self._waits:
            self._waited[lora_id] = self._waits.pop(lora_id), now
        return gate is Gate.READY

    def _admit_one(self, batch: Batch, live: Live, budget: int, now: float) -> int:
        if live.lora_id is not None:
            if self._parts.adapters is not None:
                self._parts.adapters.admitted(live, now)
            self.per_adapter[live.lora_id] += 1
            since, until = self._waited.get(live.lora_id, (now, now))
            if live.admitted_at is None:
                live.adapter_s += max(0.0, until - max(since, live.arrived))
        if live.admitted_at is None:
            live.admitted_at = now
        if live.load_in_step:
            batch.loads_until = max(batch.loads_until, live.load_until)
            return self._enter(batch, live, budget, live.load_until)
        live.stage = Stage.LOADING
        self.loading.append(live)
        return 0

    def _enter(self, batch: Batch, live: Live, budget: int, since: float) -> int:
        """Join the batch with as many tokens as there are blocks for."""
        tokens = min(live.wanted, budget)
        if live.stage is Stage.LOADING:
            self.loading.remove(live)
        live.stage = Stage.RUNNING
        if live.first_token_at is None and not live.preemptions:
            live.started_at = max(since, live.load_until)
        self.running.append(live)
        if not self._parts.kv.reserve(live, live.computed + tokens, since):
            return 0  # in a later step, when it may take blocks from others
        batch.add(live, tokens)
        return tokens

    # ---- what others report ----------------------------------------------------------------

    def _load_ended(self, live: Live, now: float) -> None:
        if live.stage is Stage.LOADING:
            live.load_until = now
            self._loaded.append(live)

    def _changed(self) -> None:
        self.look = True

    def _leave(self, live: Live) -> None:
        if live.lora_id is not None:
            self.per_adapter[live.lora_id] -= 1
            if not self.per_adapter[live.lora_id]:
                del self.per_adapter[live.lora_id]
