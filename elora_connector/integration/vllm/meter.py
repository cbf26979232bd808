"""From steps and reports to rates and demand: what the cost model rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, Final

from elora_connector.assembly import Scoring
from elora_connector.integration.vllm.adapter_messages import AdapterReport
from elora_connector.integration.vllm.metadata import StepMetadata, WorkerReport
from elora_connector.integration.vllm.requests import RequestTracker

_PROMPT_TOKENS: Final = 16
"""Fewer in one step for one request is decoding (with or without drafts) or a tail."""
_PREFILL_TOKENS: Final = 32
_PREFILL_SHARE: Final = 0.8


class Meter:
    """Watches steps go out and reports come back.

    A step lasts from when it was scheduled, or the step before it ended, whichever is
    later, until its report: so neither idle time nor steps scheduled ahead of their
    turn are counted.
    """

    def __init__(self, scoring: Scoring, trackers: Mapping[str, RequestTracker]) -> None:
        self._rates = scoring.rates
        self._demand = scoring.demand
        self._trackers = trackers
        self._prefills: dict[int, tuple[int, float]] = {}
        self._number = 0
        self._ended_at = 0.0

    def scheduled(self, step: StepMetadata, scheduler_output: Any, now: float) -> None:
        """A step is described: note its batch; give it a number that comes back."""
        self._number += 1
        step.number = self._number
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return
        adapters: Counter[Hashable] = Counter()
        prompt = 0
        for request_id, tokens in scheduled.items():
            tracker = self._trackers.get(request_id)
            if tracker is not None and tracker.lora_id is not None:
                adapters[tracker.lora_id] += 1
            if tokens >= _PROMPT_TOKENS:
                prompt += tokens
        self._demand.note(now, adapters, len(scheduled))
        total = sum(scheduled.values())
        # A step that waits for copies lasts longer than its tokens take.
        if total >= _PREFILL_TOKENS and prompt >= _PREFILL_SHARE * total and not step.loads:
            self._prefills[step.number] = (total, now)

    def reported(self, report: WorkerReport, now: float) -> None:
        """Workers' reports of one step."""
        for part in report.ranks.values():
            for move, nbytes, seconds in part.moves:
                self._rates.link(move).add(nbytes, seconds)
            if part.adapters is not None:
                self._adapters(part.adapters)
        number = min((part.step for part in report.ranks.values()), default=0)
        prefill = self._prefills.pop(number, None)
        if prefill is not None:
            tokens, since = prefill
            self._rates.prefill.add(tokens, now - max(since, self._ended_at))
        for older in [n for n in self._prefills if n < number]:
            del self._prefills[older]
        self._ended_at = now

    def _adapters(self, report: AdapterReport) -> None:
        names = {state.lora_id: state.name for state in report.states}
        for result in report.results:
            name = names.get(result.lora_id)
            if name is not None:
                if result.read:
                    load_s = result.seconds - result.activation_s
                    self._rates.adapter_load.add(name, load_s)
                self._rates.adapter_activation.add(name, result.activation_s)
