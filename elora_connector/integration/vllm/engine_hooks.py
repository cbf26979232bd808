"""Hooks into vLLM's engine process and into the process that talks to clients.

* `EngineCore.add_lora`, `remove_lora`, `pin_lora` tell our scheduler side, so that an
  adapter's epoch is raised before the next schedule().
* `Scheduler.set_pause_state` stops prefetching while the engine is paused.
* `Scheduler.update_from_output` fails the requests our scheduler side gave up on.
* `OutputProcessor.process_outputs` turns such a failure into an HTTP error with our
  message; for `LLM()` it is `finish_reason="error"` with the message as `stop_reason`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any, Literal, Protocol

from vllm.exceptions import GracefulHTTPError
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import EMPTY_CPU_TENSOR, OutputProcessor
from vllm.v1.request import RequestStatus

from elora_connector.integration.vllm.compat import parse_failure
from elora_connector.integration.vllm.lora_hooks import protect_on_worker
from elora_connector.integration.vllm.patching import wrap

RpcKind = Literal["add_lora", "remove_lora", "pin_lora"]
RPC_KINDS: tuple[RpcKind, ...] = ("add_lora", "remove_lora", "pin_lora")

SIDE_ATTRIBUTE = "elora_scheduler_side"


class SchedulerSide(Protocol):
    """What these hooks ask of our scheduler side; all calls on the scheduler's thread."""

    def before_adapter_rpc(self, kind: RpcKind, target: Any) -> frozenset[int] | None:
        """An adapter RPC is about to run; `target` is the LoRARequest or the id.

        Returns:
            ids that it may not take out (running or waited-for adapters), or None to
            leave the workers with those of the last step.
        """
        ...

    def after_adapter_rpc(self, kind: RpcKind, target: Any, ok: bool) -> None:
        """It ran; `ok` is False if it raised (which fails the RPC, not the engine)."""
        ...

    def release_blocks(self) -> None:
        """Give back every GPU block that a store under way has pinned."""
        ...

    def set_paused(self, paused: bool) -> None:
        """vLLM stops or goes on scheduling new requests."""
        ...

    def take_restarts(self) -> Iterable[str]:
        """Requests whose KV, if it is still being loaded, belongs to replaced weights."""
        ...

    def take_failed_requests(self) -> Iterable[tuple[str, str]]:
        """Requests to fail now, with a message that starts with a prefix of `compat`."""
        ...


def install() -> None:
    """Apply the hooks to vLLM's classes; idempotent."""
    for kind in RPC_KINDS:
        wrap(EngineCore, kind, functools.partial(_adapter_rpc, kind))
    wrap(Scheduler, "update_from_output", _update_from_output)
    wrap(Scheduler, "reset_prefix_cache", _reset_prefix_cache)
    wrap(Scheduler, "set_pause_state", _set_pause_state)
    wrap(OutputProcessor, "process_outputs", _process_outputs)


def side_of(scheduler: Any) -> SchedulerSide | None:
    """Our scheduler side, if this scheduler runs our connector."""
    connector = getattr(scheduler, "connector", None)
    return getattr(connector, SIDE_ATTRIBUTE, None)


def _adapter_rpc(kind: RpcKind, original: Any, engine: Any, target: Any) -> Any:
    side = side_of(engine.scheduler)
    if side is None:
        return original(engine, target)
    protected = side.before_adapter_rpc(kind, target)
    if protected is not None:
        engine.model_executor.collective_rpc(protect_on_worker, args=(protected,))
    ok = False
    try:
        result = original(engine, target)
        ok = True
        return result
    finally:
        side.after_adapter_rpc(kind, target, ok)


def _update_from_output(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = original(scheduler, *args, **kwargs)
    side = side_of(scheduler)
    if side is not None:
        for request_id in side.take_restarts():
            _begin_anew(scheduler, request_id)
        for request_id, message in side.take_failed_requests():
            _fail_request(scheduler, outputs, request_id, message)
    return outputs


def _begin_anew(scheduler: Any, request_id: str) -> None:
    """Let vLLM treat the load a request waits for as failed from its first token on."""
    request = scheduler.requests.get(request_id)
    if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)


def _reset_prefix_cache(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """A reset fails, or raises, while anybody holds a block; our copies can do without."""
    side = side_of(scheduler)
    if side is not None:
        side.release_blocks()
    return original(scheduler, *args, **kwargs)


def _set_pause_state(original: Any, scheduler: Any, pause_state: PauseState) -> Any:
    side = side_of(scheduler)
    if side is not None:
        side.set_paused(pause_state != PauseState.UNPAUSED)
    return original(scheduler, pause_state)


def _fail_request(scheduler: Any, outputs: Any, request_id: str, message: str) -> None:
    """End one request; its client hears of it even if the step had no output."""
    for request in scheduler.finish_requests([request_id], RequestStatus.FINISHED_ERROR):
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=message,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        mine = outputs.get(request.client_index)
        if mine is None:
            outputs[request.client_index] = EngineCoreOutputs(outputs=[output])
        else:
            mine.outputs.append(output)


def _process_outputs(
    original: Any, processor: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any
) -> Any:
    parents: set[str] = set()
    for output, state, status, text in _failures(processor, engine_core_outputs):
        # A failed streaming-input session takes no further chunk.
        state.streaming_input = False
        if state.detokenizer is None:
            # A pooling request: without a tensor vLLM takes it for a text request.
            output.pooling_output = EMPTY_CPU_TENSOR
        if state.queue is not None:
            # First: the collector lets no later output replace an exception, and the
            # original does all the book-keeping of a finished request.
            state.queue.put(GracefulHTTPError(text, status))
            if state.parent_req is not None:
                parents.add(state.parent_req.request_id)
    result = original(processor, engine_core_outputs, *args, **kwargs)
    if parents:
        # Nobody reads the other samples of a request whose generator has raised.
        result.reqs_to_abort += processor.abort_requests(parents, internal=True)
    return result


def _failures(processor: Any, outputs: Any) -> Iterator[tuple[Any, Any, HTTPStatus, str]]:
    for output in outputs:
        if output.finish_reason != FinishReason.ERROR:
            continue
        failure = parse_failure(output.stop_reason)
        state = processor.request_states.get(output.request_id)
        if failure is not None and state is not None:
            yield output, state, *failure
