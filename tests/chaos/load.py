"""Random load on one live engine: every answer is checked, none may take for ever."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.questions import TOKENS, Question
from tests.support.engine import Engine, lora

RUNNING = 6
"""Requests under way at a time."""
HUNG_S = 60.0
"""A request that takes longer is counted as hung: far beyond every deadline of ours, and
far enough for a busy machine."""
RECENT = 24
"""Prompts that are likely to be asked again soon; more than the host tier holds."""


class WrongError(AssertionError):
    """An answer differs from plain vLLM's, or never came."""


@dataclass
class _Sent:
    question: Question
    length: int
    at: float


@dataclass
class Load:
    """Drives an engine step by step.

    Attributes:
        live: the engine.
        adapters: name -> directory.
        pool: what can be asked.
        mood: what `seconds` are filed under, for example "good" or a fault's name.
        seconds: latencies of finished requests.
    """

    live: Engine
    adapters: dict[str, Path]
    pool: Sequence[Question]
    rng: random.Random
    mood: str = "good"
    seconds: dict[str, list[float]] = field(default_factory=dict)
    done: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self._ids = {name: number for number, name in enumerate(self.adapters, 1)}
        self._sent: dict[str, _Sent] = {}
        self._recent: deque[Question] = deque(maxlen=RECENT)

    # ---- random requests -----------------------------------------------------------

    def turn(self) -> None:
        """One engine step with as many random requests under way as may be."""
        while len(self._sent) < RUNNING:
            self._send(self._choose())
        if self.rng.random() < 0.01:
            self._cancel()
        self._step()

    def drain(self) -> None:
        """Step until nothing is under way."""
        while self._sent:
            self._step()

    def forget(self) -> None:
        """Finish what is under way, then empty host tier and prefix cache."""
        self.drain()
        self.live.forget_host()
        self.live.forget_gpu()

    def ask(self, questions: Sequence[Question]) -> None:
        """Ask these, all at once as far as vLLM takes them."""
        self.drain()
        for question in questions:
            self._send(question)
        self.drain()

    # ---- inside ----------------------------------------------------------------------

    def _choose(self) -> Question:
        if self._recent and self.rng.random() < 0.6:
            return self.rng.choice(self._recent)
        self._recent.append(self.rng.choice(self.pool))
        return self._recent[-1]

    def _send(self, question: Question) -> None:
        length = self.rng.randint(1, TOKENS)
        name = question.adapter
        adapter = None if name is None else lora(name, self._ids[name], self.adapters[name])
        request = self.live.submit(question.prompt, adapter, length)
        self._sent[request] = _Sent(question, length, time.monotonic())

    def _cancel(self) -> None:
        request = self.rng.choice(sorted(self._sent))
        self.live.abort(request)
        del self._sent[request]
        self.cancelled += 1

    def _step(self) -> None:
        with _bounded(f"a step takes more than {HUNG_S:.0f} s ({self.mood})"):
            outputs = self.live.llm.llm_engine.step()
        for output in outputs:
            if output.finished and output.request_id in self._sent:
                self._check(self._sent.pop(output.request_id), output.outputs[0])
        oldest = min((sent.at for sent in self._sent.values()), default=time.monotonic())
        if time.monotonic() - oldest > HUNG_S:
            raise WrongError(f"a request has taken more than {HUNG_S:.0f} s ({self.mood})")

    def _check(self, sent: _Sent, completion: Any) -> None:
        self.done += 1
        self.seconds.setdefault(self.mood, []).append(time.monotonic() - sent.at)
        got, want = tuple(completion.token_ids), sent.question.answer[: sent.length]
        if got != want:
            raise WrongError(
                f"wrong tokens ({self.mood}): {got}, plain vLLM says {want} "
                f"({completion.finish_reason}) for {sent.question}"
            )


@contextmanager
def _bounded(complaint: str) -> Iterator[None]:
    """Main thread only: also a step that never returns fails the run."""

    def hung(*_: object) -> None:
        raise WrongError(complaint)

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, HUNG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def totals(live: Engine) -> Counter[str]:
    """Counters of both sides of the connector, by metric and labels joined with spaces."""
    found: Counter[str] = Counter()
    for recorder in (live.side.recorder, live.worker.recorder):
        for key, value in dict(recorder.totals).items():
            found[key.replace("\x1f", " ")] += round(value)
    return found
