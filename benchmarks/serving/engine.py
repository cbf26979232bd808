"""Runs one round of a load on an in-process engine and says what happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.serving.probe import Probe, Seen, adapter_counts

IDLE_S = 0.001
"""As vLLM's own engine process sleeps after a step without tokens."""
DRAIN_S = 1.0


class Server:
    """One engine with its probe; `adapters` are directories, numbered from 1 in vLLM."""

    def __init__(self, args: Mapping[str, Any], adapters: Sequence[str]) -> None:
        adapter_counts()
        from vllm import LLM

        self._llm = LLM(**args)
        self.engine = self._llm.llm_engine
        self.probe = Probe(self._llm)
        self._adapters = list(adapters)
        self._round = 0

    def run(
        self, requests: Sequence[Mapping[str, Any]], window: int, pause: int, *, salted: bool
    ) -> dict[str, Any]:
        """All requests in their order, at most `window` at a time; never two of one conversation.

        Args:
            pause: after so many requests everything is finished before the next.
            salted: give every adapter its cache salt (for caches that do not know adapters).

        Returns: requests (one dictionary each, in order), counts, seconds.
        """
        self._round += 1
        self.probe.take()
        self.probe.requests = {}
        answers: dict[str, tuple[int, ...]] = {}
        start = time.perf_counter()
        waiting = deque(enumerate(requests))
        going: dict[str, int] = {}
        while waiting or going:
            while waiting and self._may_start(waiting[0], going, window, pause):
                number, request = waiting.popleft()
                going[self._submit(number, request, salted=salted)] = request["conversation"]
            for name, tokens in self._step():
                del going[name]
                answers[name] = tokens
            if not going:
                self.drain()
        seconds = time.perf_counter() - start
        return {
            "requests": [self._told(n, answers) for n in range(len(requests))],
            "counts": {**self.probe.take(), "stored_bytes": self._stored_bytes()},
            "seconds": seconds,
        }

    def drain(self) -> None:
        """Step as vLLM's engine process does without requests: while a connector wants to."""
        end = time.perf_counter() + DRAIN_S
        while self.probe.scheduler.has_requests() and time.perf_counter() < end:
            self._step()

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _stored_bytes(self) -> float:
        """Bytes of KV that our connector has copied to host memory so far; 0 for others."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        worker = getattr(connector, "elora_worker_side", None)
        return 0.0 if worker is None else float(worker.recorder.total("bytes", "gpu_to_host"))

    def _may_start(
        self, first: tuple[int, Mapping[str, Any]], going: dict[str, int], window: int, pause: int
    ) -> bool:
        number, request = first
        if number % pause == 0 and going:
            return False
        return len(going) < window and request["conversation"] not in going.values()

    def _submit(self, number: int, request: Mapping[str, Any], *, salted: bool) -> str:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        adapter = request["adapter"]
        prompt: dict[str, Any] = {"prompt_token_ids": list(request["prompt"])}
        if salted:
            prompt["cache_salt"] = f"adapter-{adapter}"
        name = self._name(number)
        self.probe.requests[name] = Seen(time.perf_counter())
        self.engine.add_request(
            name,
            prompt,
            SamplingParams(temperature=0, max_tokens=request["n"], ignore_eos=True),
            lora_request=LoRARequest(f"adapter-{adapter}", adapter + 1, self._adapters[adapter]),
        )
        return name

    def _name(self, number: int) -> str:
        return f"round{self._round}.{number}"

    def _step(self) -> list[tuple[str, tuple[int, ...]]]:
        """One engine step; the answers that it finished."""
        finished = []
        for output in self.engine.step():
            seen = self.probe.requests[output.request_id]
            tokens = output.outputs[0].token_ids
            if not seen.first_token and (tokens or output.finished):
                seen.first_token = time.perf_counter()
            if output.finished:
                finished.append((output.request_id, tuple(tokens)))
        if self.probe.idle:
            time.sleep(IDLE_S)
        return finished

    def _told(self, number: int, answers: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        name = self._name(number)
        seen = self.probe.requests[name]
        return {
            "tokens": answers[name],
            "ttft": seen.first_token - seen.submitted,
            "wait": (seen.scheduled or seen.first_token) - seen.submitted,
            "local": seen.local,
            "external": seen.external,
            "deferrals": seen.deferrals,
            "steps": seen.steps,
        }
