"""Pause, reset and shutdown never wait for Redis: stopped server, stores under way."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from elora_connector.core.node import NodeKind
from elora_connector.core.types import Tier
from tests.support.engine import Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = [pytest.mark.engine, pytest.mark.redis]

LENGTH = 200
BOUND_S = 1.0


@pytest.fixture
def stuck(tiny: TinyModel, store: RedisServer) -> Iterator[Engine]:
    """An engine whose Redis accepts and never answers while requests run."""
    settings = {"lmcache.remote_url": store.url, "elora.shutdown_flush_s": 0.2}
    with engine(tiny.model, settings, enable_prefix_caching=True) as live:
        live.ask(prompt(9, LENGTH))
        store.pause()
        try:
            yield live
        finally:
            store.resume()


def start(live: Engine, tiny: TinyModel, names: list[str]) -> None:
    """Queue requests and take a few steps, so that stores and writes are under way."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for index, name in enumerate(names):
        live.llm.llm_engine.add_request(
            name,
            {"prompt_token_ids": prompt(20 + index, LENGTH)},
            params,
            lora_request=lora("civil", 1, tiny.adapters["civil"]),
        )
    end = time.monotonic() + 30
    while live.total("chunks_stored") < 6:
        live.llm.llm_engine.step()
        assert time.monotonic() < end, "nothing was stored"


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_pause_ends_in_time_while_redis_hangs(
    stuck: Engine, tiny: TinyModel, oracle: Oracle, mode: str
) -> None:
    start(stuck, tiny, ["one", "two"])
    began = time.monotonic()
    stuck.core.pause_scheduler(mode=mode, clear_cache=mode == "keep")
    assert time.monotonic() - began < BOUND_S
    assert not stuck.side.has_pinned_blocks
    stuck.core.resume_scheduler()
    if mode == "abort":
        # In one process vLLM tells the core only; its front end would wait for ever.
        stuck.llm.llm_engine.abort_request(["one", "two"])
    answers = {}
    while stuck.scheduler.has_unfinished_requests():
        for out in stuck.llm.llm_engine.step():
            if out.finished:
                answers[out.request_id] = out.outputs[0]
    if mode == "keep":
        assert tuple(answers["one"].token_ids) == oracle(
            prompt(20, LENGTH), tiny.adapters["civil"], 40
        )
    after = stuck.ask(prompt(21, LENGTH), lora("civil", 1, tiny.adapters["civil"]))
    assert after.tokens == oracle(prompt(21, LENGTH), tiny.adapters["civil"])


def test_sleep_ends_in_time_while_redis_hangs(
    stuck: Engine, tiny: TinyModel, oracle: Oracle
) -> None:
    """Sleep clears the caches, since weights may be exchanged meanwhile."""
    start(stuck, tiny, ["one"])
    began = time.monotonic()
    stuck.core.sleep(level=1, mode="abort")
    assert time.monotonic() - began < BOUND_S
    assert stuck.side.manager.tree.num_resident(Tier.HOST, NodeKind.CHUNK) == 0
    stuck.core.wake_up()
    stuck.llm.llm_engine.abort_request(["one"])
    civil = lora("civil", 1, tiny.adapters["civil"])
    after = stuck.ask(prompt(20, LENGTH), civil)
    assert after.tokens == oracle(prompt(20, LENGTH), tiny.adapters["civil"])
    assert after.cached == 0


@pytest.mark.parametrize("running", [True, False])
def test_reset_ends_in_time_while_redis_hangs(
    stuck: Engine, tiny: TinyModel, oracle: Oracle, running: bool
) -> None:
    start(stuck, tiny, ["one"])
    if not running:
        stuck.llm.llm_engine.abort_request(["one"])
    began = time.monotonic()
    assert stuck.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
    assert time.monotonic() - began < BOUND_S
    assert stuck.side.manager.tree.num_resident(Tier.HOST, NodeKind.CHUNK) == 0
    while stuck.scheduler.has_unfinished_requests():
        stuck.llm.llm_engine.step()
    civil = lora("civil", 1, tiny.adapters["civil"])
    again = stuck.ask(prompt(20, LENGTH), civil)
    assert again.tokens == oracle(prompt(20, LENGTH), tiny.adapters["civil"])


def test_shutdown_is_bounded_while_redis_hangs(tiny: TinyModel, store: RedisServer) -> None:
    settings = {"lmcache.remote_url": store.url, "elora.shutdown_flush_s": 0.3}
    with engine(tiny.model, settings) as live:
        store.pause()
        live.ask(prompt(30, LENGTH))
        worker = live.worker
        began = time.monotonic()
        worker.shutdown()
        took = time.monotonic() - began
    store.resume()
    assert took < BOUND_S


def test_shutdown_flushes_what_waits(tiny: TinyModel, store: RedisServer) -> None:
    with engine(tiny.model, {"lmcache.remote_url": store.url}) as live:
        live.ask(prompt(31, LENGTH))
    with store.client() as client:
        assert client.dbsize() == LENGTH // 64
