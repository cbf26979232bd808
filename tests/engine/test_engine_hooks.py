"""Hooks around vLLM's engine: adapter RPCs, failed requests, messages to clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from elora_connector.integration.vllm import compat, engine_hooks
from elora_connector.integration.vllm.adapters import AdapterAgent
from tests.support.inproc import PROMPT, adapter, core, engine, generate
from tests.support.tiny import TinyModel, make_tiny_model

pytestmark = pytest.mark.engine

MESSAGE = compat.CLIENT_ERROR + "adapter 'bad': it never works"
CONNECTOR = {
    "kv_connector": "FailingConnector",
    "kv_connector_module_path": "tests.support.failing_connector",
    "kv_role": "kv_both",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> Iterator[Any]:
    compat.install()
    with engine(tiny.model, kv_transfer_config=CONNECTOR) as made:
        yield made


@pytest.fixture
def side(llm: Any) -> Any:
    found = engine_hooks.side_of(core(llm).scheduler)
    assert found is not None
    return found


def test_a_failed_request_alone_in_the_engine_gets_its_message(llm: Any, tiny: TinyModel) -> None:
    bad = adapter("bad", 7, tiny.adapters["civil"])
    (output,) = llm.generate(
        [PROMPT], SamplingParams(max_tokens=3), lora_request=[bad], use_tqdm=False
    )
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("error", MESSAGE)
    assert completion.token_ids == []
    assert core(llm).scheduler.requests == {}


def test_only_the_failed_request_ends(llm: Any, tiny: TinyModel) -> None:
    civil = adapter("civil", 1, tiny.adapters["civil"])
    alone = generate(llm, [civil])
    bad = adapter("bad", 7, tiny.adapters["civil"])
    assert generate(llm, [bad, civil, bad]) == [(), *alone, ()]


def test_adapter_calls_are_announced(llm: Any, tiny: TinyModel, side: Any) -> None:
    side.calls.clear()
    civil = adapter("civil", 1, tiny.adapters["civil"])
    assert core(llm).add_lora(civil) is True
    core(llm).pin_lora(1)
    core(llm).remove_lora(1)
    with pytest.raises(ValueError, match="not registered"):
        core(llm).pin_lora(1)
    assert side.calls == [
        ("before", "add_lora", civil),
        ("after", "add_lora", civil, True),
        ("before", "pin_lora", 1),
        ("after", "pin_lora", 1, True),
        ("before", "remove_lora", 1),
        ("after", "remove_lora", 1, True),
        ("before", "pin_lora", 1),
        ("after", "pin_lora", 1, False),
    ]


def test_adapter_calls_carry_what_they_may_not_take(llm: Any, tiny: TinyModel, side: Any) -> None:
    agent = AdapterAgent.attach()
    assert agent is not None
    path = tiny.adapters["civil"]
    for i in (1, 2):
        core(llm).add_lora(adapter(f"a{i}", i, path))
    side.protected = frozenset({1, 2})
    core(llm).add_lora(adapter("a3", 3, path))
    side.protected = frozenset({2})
    core(llm).add_lora(adapter("a4", 4, path))
    assert [s.lora_id for s in agent.report().states if s.in_slot] == [2, 4]
    side.protected = None
    agent.close()
    for i in (1, 2, 3, 4):
        core(llm).remove_lora(i)


def test_rpc_arguments_are_still_decoded(llm: Any) -> None:
    """The engine process converts arguments by the wrapped method's signature."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCoreProc

    (converted,) = EngineCoreProc._convert_msgspec_args(
        core(llm).add_lora, (["civil", 1, "/nowhere"],)
    )
    assert isinstance(converted, LoRARequest)


# The process that talks to clients


def processor() -> OutputProcessor:
    return OutputProcessor(tokenizer=None, log_stats=False)


def request(name: str, n: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        external_req_id=f"{name}-external",
        prompt_token_ids=[5, 6, 7],
        mm_features=None,
        sampling_params=SamplingParams(detokenize=False, n=n, output_kind=RequestOutputKind.DELTA),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def failed(name: str, message: str = MESSAGE) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=name,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        stop_reason=message,
    )


def queue(name: str) -> RequestOutputCollector:
    return RequestOutputCollector(RequestOutputKind.DELTA, name)


@pytest.fixture(autouse=True)
def installed() -> None:
    compat.install()


@pytest.mark.parametrize(
    ("prefix", "status"),
    [
        (compat.CLIENT_ERROR, HTTPStatus.BAD_REQUEST),
        (compat.SERVER_BUSY, HTTPStatus.SERVICE_UNAVAILABLE),
    ],
)
def test_a_waiting_client_gets_an_http_error(prefix: str, status: HTTPStatus) -> None:
    async def run() -> None:
        outputs, mine, other = processor(), queue("a"), queue("b")
        outputs.add_request(request("a"), None, queue=mine)
        outputs.add_request(request("b"), None, queue=other)
        token = EngineCoreOutput(request_id="b", new_token_ids=[3])
        outputs.process_outputs([failed("a", prefix + "why: it\nfails"), token])
        with pytest.raises(GracefulHTTPError) as caught:
            await mine.get()
        assert caught.value.http_status == status
        assert str(caught.value) == "why: it\nfails"
        assert (await other.get()).outputs[0].token_ids == [3]
        assert set(outputs.request_states) == {"b"}

    asyncio.run(run())


def test_the_server_answers_with_our_message() -> None:
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    text = "adapter 'x': LoRA rank 16 is greater than max_lora_rank 8"
    answer = create_error_response(GracefulHTTPError(text, HTTPStatus.BAD_REQUEST)).error
    assert (answer.code, answer.message) == (400, text)


def test_other_errors_keep_their_way() -> None:
    async def run() -> None:
        outputs, mine = processor(), queue("a")
        outputs.add_request(request("a"), None, queue=mine)
        outputs.process_outputs([failed("a", "somebody else's reason")])
        output = await mine.get()
        assert output.outputs[0].finish_reason == "error"

    asyncio.run(run())


def test_the_other_samples_of_a_failed_request_are_aborted() -> None:
    async def run() -> None:
        outputs, mine = processor(), queue("p")
        parent = ParentRequest(request("p", n=3))
        for index in range(3):
            child, params = parent.get_child_info(index)
            part = request(child)
            part.external_req_id, part.sampling_params = "p-external", params
            outputs.add_request(part, None, parent, index, mine)
        result = outputs.process_outputs([failed("1_p")])
        with pytest.raises(GracefulHTTPError):
            await mine.get()
        assert sorted(result.reqs_to_abort) == ["0_p", "2_p"]
        assert outputs.request_states == {}
        assert outputs.parent_requests == {}
        assert dict(outputs.external_req_ids) == {}

    asyncio.run(run())


def test_a_failed_pooling_request_harms_nobody() -> None:
    async def run() -> None:
        from vllm import PoolingParams

        outputs, mine = processor(), queue("a")
        pooling = request("a")
        pooling.sampling_params, pooling.pooling_params = None, PoolingParams()
        outputs.add_request(pooling, None, queue=mine)
        outputs.process_outputs([failed("a")])
        with pytest.raises(GracefulHTTPError):
            await mine.get()

    asyncio.run(run())


# Versions and the table


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.31.0rc1", "0.32.0+cpu"])
def test_supported_versions(version: str) -> None:
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.28.3", "0.33.0", "1.0.0", "dev"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(compat.UnsupportedError) as caught:
        compat.check_version(version)
    assert version in str(caught.value)
    assert "0.29, 0.30, 0.31, 0.32" in str(caught.value)


def test_the_table_lists_every_mismatch_at_once() -> None:
    table = (
        compat.Use("vllm.v1.engine.core", "EngineCore.add_lora", "a", "b", ("self", "no_such")),
        compat.Use("vllm.v1.engine.core", "EngineCore.no_such_method", "why not", "wrapped"),
        compat.Use("vllm.no_such_module", "Thing", "a", "b"),
        compat.Use("vllm.v1.engine.core", "EngineCore.pin_lora", "a", "b", ("self", "lora_id")),
    )
    with pytest.raises(compat.UnsupportedError) as caught:
        compat.check_table(table)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[0].rpartition(":")[2] for line in lines] == [
        "EngineCore.add_lora",
        "EngineCore.no_such_method",
        "Thing",
    ]
    assert "no parameter no_such" in lines[0]
    assert "wrapped: why not" in lines[1]


def test_geometry_counts_all_layers(llm: Any) -> None:
    engine_core = core(llm)
    config = engine_core.scheduler.kv_cache_config
    geometry = compat.chunk_geometry(engine_core.vllm_config, config)
    # 4 layers, 2 KV heads of 64, K and V, float32.
    assert geometry == (config.num_blocks, 32, 4 * 32 * 2 * 64 * 2 * 4, 4)
    two = SimpleNamespace(kv_cache_groups=[*config.kv_cache_groups] * 2)
    with pytest.raises(compat.UnsupportedError, match="2 KV cache groups"):
        compat.chunk_geometry(engine_core.vllm_config, two)
