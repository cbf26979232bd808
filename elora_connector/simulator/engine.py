"""Replay of a trace: an engine with continuous batching on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from elora_connector.core.types import BASE
from elora_connector.errors import InvariantError
from elora_connector.manager import Job
from elora_connector.simulator.audit import audit
from elora_connector.simulator.build import Parts
from elora_connector.simulator.keys import chunk_keys
from elora_connector.simulator.lines import Arrivals
from elora_connector.simulator.live import Live, Stage
from elora_connector.simulator.record import Record
from elora_connector.simulator.requests import SimRequest, Trace
from elora_connector.simulator.scheduling import Batch, Scheduler

_PREFILL_TOKENS: Final = 32
_PREFILL_SHARE: Final = 0.8
"""Which steps tell the speed of prefill, as the connector's meter has it."""
_POLL_S: Final = 0.05
_HOPELESS: Final = 20_000
"""Looks in a row at requests of which none can go on: a quarter of an hour."""


class Replay:
    """One trace on one system; to be used once.

    Args:
        parts: the system, from `build`.
        rate: factor on the speed of arrivals, not on the pace inside a session.
        checks: verify conservation and every invariant after each step (slow).
        invalid_every_s: how often invalid KV is looked for.
        progress: told how many requests have ended.
    """

    def __init__(
        self,
        trace: Trace,
        parts: Parts,
        *,
        rate: float = 1.0,
        checks: bool = False,
        invalid_every_s: float = 5.0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.parts = parts
        self.now = 0.0
        self.scheduler = Scheduler(parts)
        self.record = Record(parts, invalid_every_s)
        self._arrivals = Arrivals(trace.requests, rate)
        self._left = len(trace.requests)
        self._checks = checks
        self._progress = progress
        self._orders = 0

    def run(self) -> Record:
        """Replay all of it.

        Raises:
            InvariantError: something was lost or made (with `checks`), or nothing moves.
        """
        looks = 0
        while self._left:
            self.parts.clock.advance(self.now)
            self._take_arrivals()
            batch = self.scheduler.schedule(self.now)
            if batch.tokens:
                self._step(batch)
                looks = 0
            elif self._left:
                looks = looks + 1 if self._wait() else 0
                if looks > _HOPELESS:
                    raise InvariantError(f"{len(self.scheduler.waiting)} requests wait for ever")
            if self._checks:
                audit(self.parts, [*self.scheduler.running, *self.scheduler.loading])
        self.record.seconds = self.now
        self.record.preemptions = self.scheduler.preemptions
        self.record.check()
        return self.record

    # ---- arrivals ------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        for at, request in self._arrivals.take(self.now):
            live = self._new(at, request)
            whole = request.prompt_tokens + request.output_tokens
            if not self.parts.kv.fits(whole):
                self.record.refused += 1
                self._forget(request)
                continue
            self.scheduler.arrive(live)
            if live.lora_id is not None and self.parts.adapters is not None:
                self.parts.adapters.arrived(live, self.now)

    def _new(self, at: float, request: SimRequest) -> Live:
        self._orders += 1
        lora_id = self.parts.lora_ids.get(request.adapter)
        identity = BASE if lora_id is None else self.parts.identities[lora_id]
        keys = chunk_keys(lora_id, request.labels)
        return Live(request, self._orders, at, identity, lora_id, keys)

    def _forget(self, request: SimRequest) -> None:
        self._left -= 1
        self._arrivals.ended(request, self.now)
        if self._progress is not None:
            self._progress(1)

    def _wait(self) -> bool:
        """Nothing to compute: on to what happens next.  True if there is no telling what."""
        following = min(self.parts.clock.next, self._arrivals.next)
        unsure = len(self.scheduler.waiting) > 0 and following > self.now + _POLL_S
        if unsure:
            # Scores, floors and demand change with time alone.
            following = self.now + _POLL_S
            self.scheduler.look = True
        elif math.isinf(following):
            raise InvariantError("the trace has not ended, but nothing is left to do")
        self.record.passed(self.now, following, busy=False)
        self.now = following
        return unsure

    # ---- steps -----------------------------------------------------------------------------

    def _step(self, batch: Batch) -> None:
        parts, start = self.parts, self.now
        stores = self._plan_stores(batch)
        scheduler = self.scheduler
        parts.scoring.demand.note(start, scheduler.per_adapter, len(batch.tokens))
        total = sum(batch.tokens.values())
        begin = max(start + batch.stall_s, batch.loads_until)
        end = begin + parts.machine.step_s(total, batch.pairs, batch.context)
        if (
            total >= _PREFILL_TOKENS
            and batch.prompt >= _PREFILL_SHARE * total
            and not batch.loads_until
        ):
            parts.scoring.rates.prefill.add(total, end - start)
        self.record.passed(start, end, busy=True)
        parts.clock.advance(end)
        self.now = end
        self.record.steps += 1
        self._compute(batch)
        for job in stores:
            parts.kv.start_store(job)
        self._end_requests(batch)

    def _plan_stores(self, batch: Batch) -> list[Job]:
        kv, chunk = self.parts.kv, self.parts.kv.rules.chunk_tokens
        jobs = []
        for live, tokens in batch.tokens.items():
            if live.computed + tokens >= (live.next_store + 1) * chunk:
                job = kv.plan_store(live, tokens, self.now)
                if job is not None:
                    jobs.append(job)
        return jobs

    def _compute(self, batch: Batch) -> None:
        kv, record, now = self.parts.kv, self.record, self.now
        chunk = kv.rules.chunk_tokens
        for live, tokens in batch.tokens.items():
            before = live.computed
            live.computed = after = before + tokens
            if live.generated and tokens == 1 and not live.preemptions:
                record.decoded += 1
            else:
                record.computed += tokens
            if after // chunk > before // chunk or len(live.nodes) < before // chunk:
                kv.publish(live, now)
            if not live.wanted:
                live.generated += 1
                if live.first_token_at is None:
                    live.first_token_at = now

    def _end_requests(self, batch: Batch) -> None:
        for live in batch.tokens:
            if live.generated >= max(1, live.request.output_tokens):
                live.stage = Stage.DONE
                self.scheduler.end(live, self.now)
                self.record.end(live, self.now)
                self._forget(live.request)
