"""Settings and per-request switches, each proved by what is stored and what is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elora_connector.integration.vllm.compat import CLIENT_ERROR
from tests.support.adapter_dir import AdapterDir
from tests.support.engine import Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = pytest.mark.engine

LENGTH = 200
HIT = 192


def params(**switches: bool) -> dict[str, Any]:
    """SamplingParams fields with `kv_transfer_params`; underscores stand for dots."""
    named = {name.replace("__", "."): value for name, value in switches.items()}
    return {"extra_args": {"kv_transfer_params": named}}


@pytest.fixture(scope="class")
def live(tiny: TinyModel) -> Iterator[Engine]:
    """Host tier only; every load is asynchronous; loads under 100 tokens are not made."""
    settings = {"elora.sync_load_ms": 0, "lmcache.min_retrieve_tokens": 100}
    with engine(tiny.model, settings) as made:
        yield made


class TestOneEngine:
    def test_asynchronous_loads_bring_the_same_tokens(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loads: list[Any] = []
        submit = live.worker._engine.load
        monkeypatch.setattr(
            live.worker._engine, "load", lambda copies: loads.append(copies) or submit(copies)
        )
        civil = lora("civil", 1, tiny.adapters["civil"])
        texts = [prompt(400 + i, LENGTH) for i in range(4)]
        wants = [oracle(text, civil.lora_path) for text in texts]
        for cached in (0, HIT):
            answers = live.ask_all([(text, civil) for text in texts])
            assert [(a.tokens, a.cached) for a in answers] == [(want, cached) for want in wants]
        assert len(loads) == 4
        assert live.total("hit_tokens", "host", "civil") == 4 * HIT
        assert live.total("load_failures") == 0

    def test_an_aborted_asynchronous_load_leaves_nothing_behind(
        self, live: Engine, oracle: Oracle
    ) -> None:
        text = prompt(405, LENGTH)
        live.ask(text)
        for _ in range(3):
            waiting = live.submit(text)
            live.run(steps=1)
            live.abort(waiting)
            assert live.run() == {}
        live.assert_at_rest()
        answer = live.ask(text)
        assert (answer.tokens, answer.cached) == (oracle(text), HIT)

    def test_min_retrieve_tokens(self, live: Engine, oracle: Oracle) -> None:
        for length, cached in ((100, 0), (170, 128)):
            text = prompt(410 + length, length)
            live.ask(text)
            again = live.ask(text)
            assert (again.tokens, again.cached) == (oracle(text), cached)

    @pytest.mark.parametrize(
        "switches",
        [{"elora__store": False}, {"lmcache__skip_save": True}],
        ids=lambda s: next(iter(s)),
    )
    def test_a_request_may_refuse_to_be_stored(
        self, live: Engine, oracle: Oracle, switches: dict[str, bool]
    ) -> None:
        text = prompt(420 + len(switches) + len(next(iter(switches))), LENGTH)
        seen = live.mark()
        live.ask(text, **params(**switches))
        assert seen("chunks_stored") == 0
        for cached in (0, HIT):
            answer = live.ask(text)
            assert (answer.tokens, answer.cached) == (oracle(text), cached)
        # What others stored is still there for it.
        assert live.ask(text, **params(**switches)).cached == HIT

    def test_a_request_may_refuse_to_retrieve(self, live: Engine, oracle: Oracle) -> None:
        text = prompt(450, LENGTH)
        first = live.ask(text, **params(elora__retrieve=False))
        assert first.cached == 0
        seen = live.mark()
        refused = live.ask(text, **params(elora__retrieve=False))
        assert (refused.tokens, refused.cached) == (oracle(text), 0)
        assert seen("lookup_tokens") == seen("chunks_stored") == 0
        assert live.ask(text, **params(elora__retrieve=True)).cached == HIT

    def test_prompt_logprobs_read_no_cache_but_fill_it(self, live: Engine, oracle: Oracle) -> None:
        text = prompt(460, LENGTH)
        seen = live.mark()
        for _ in range(2):
            answer = live.ask(text, prompt_logprobs=1)
            assert (answer.tokens, answer.cached) == (oracle(text), 0)
        assert seen("chunks_stored") == 3
        assert seen("hit_tokens") == 0
        assert live.ask(text).cached == HIT

    def test_prompt_logprobs_with_an_unloaded_adapter(
        self, live: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        text = prompt(461, LENGTH)
        tax = lora("tax-late", 41, tiny.adapters["tax"])
        assert 41 not in live.llm.llm_engine.list_loras()
        answer = live.ask(text, tax, prompt_logprobs=1)
        assert (answer.tokens, answer.cached) == (oracle(text, tax.lora_path), 0)
        live.llm.llm_engine.remove_lora(41)
        again = live.ask(text, tax, prompt_logprobs=1)
        assert (again.tokens, again.cached) == (oracle(text, tax.lora_path), 0)
        assert live.ask(text, tax).cached == HIT

    def test_prompt_logprobs_with_a_corrupt_adapter_fail_alone(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path
    ) -> None:
        text = prompt(462, LENGTH)
        folder = AdapterDir(tmp_path / "a", tiny.adapters["legal"])
        folder.damage()
        good = lora("civil", 1, tiny.adapters["civil"])
        bad, fine = live.ask_all(
            [(text, lora("corrupt", 42, folder.path)), (text, good)], prompt_logprobs=1
        )
        assert (bad.tokens, bad.finish_reason) == ((), "error")
        assert str(bad.stop_reason).startswith(CLIENT_ERROR)
        assert (fine.tokens, fine.cached) == (oracle(text, good.lora_path), 0)
        assert live.ask(text, good).cached == HIT

    def test_reset_of_the_host_tier(self, live: Engine, oracle: Oracle) -> None:
        text = prompt(470, LENGTH)
        live.ask(text)
        assert live.ask(text).cached == HIT
        assert live.llm.reset_prefix_cache(reset_connector=True)
        for cached in (0, HIT):
            answer = live.ask(text)
            assert (answer.tokens, answer.cached) == (oracle(text), cached)


def test_reset_while_a_request_runs_stores_nothing_of_it(tiny: TinyModel, oracle: Oracle) -> None:
    text = prompt(471, LENGTH)
    with engine(tiny.model, enable_prefix_caching=True) as live:
        running = live.submit(text, n=100)
        assert not live.run(steps=10)
        live.side.reset()
        seen = live.mark()
        answer = live.run()[running]
        assert answer.tokens == oracle(text, n=100)
        assert seen("chunks_stored") == 0
        assert live.gauge("host_chunks") == 0
        follow = [*text, *answer.tokens]
        first = live.ask(follow)
        assert (first.tokens, first.cached) == (oracle(follow), 0)
        assert live.ask(follow).cached == 288


@pytest.mark.parametrize(("decode", "cached"), [(True, 192), (False, 128)])
def test_save_decode_cache_over_two_turns(
    tiny: TinyModel, oracle: Oracle, decode: bool, cached: int
) -> None:
    text = prompt(480, 150)
    legal = lora("legal", 2, tiny.adapters["legal"])
    with engine(tiny.model, {"lmcache.save_decode_cache": decode}) as live:
        seen = live.mark()
        turn = live.ask(text, legal, n=80)
        assert turn.tokens == oracle(text, legal.lora_path, 80)
        assert seen("chunks_stored") == cached // 64
        follow = [*text, *turn.tokens, *prompt(481, 20)]
        answer = live.ask(follow, legal)
        assert (answer.tokens, answer.cached) == (oracle(follow, legal.lora_path), cached)


@pytest.mark.redis
def test_a_producer_stores_and_a_consumer_retrieves(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    text, other = prompt(490, LENGTH), prompt(491, LENGTH)
    civil = lora("civil", 1, tiny.adapters["civil"])
    want = oracle(text, civil.lora_path)
    settings = {"lmcache.remote_url": store.url}
    with engine(tiny.model, settings, role="kv_producer") as live:
        for _ in range(2):
            answer = live.ask(text, civil)
            assert (answer.tokens, answer.cached) == (want, 0)
        assert live.total("chunks_stored") == 3
        assert live.total("hit_tokens") == live.total("lookup_tokens") == 0
        live.settle()
    with store.client() as client:
        assert client.dbsize() == 3
    with engine(tiny.model, settings, role="kv_consumer") as live:
        for tier in ("remote", "host"):
            answer = live.ask(text, civil)
            assert (answer.tokens, answer.cached) == (want, HIT)
            assert live.total("hit_tokens", tier, "civil") == HIT
        for _ in range(2):
            answer = live.ask(other, civil)
            assert (answer.tokens, answer.cached) == (oracle(other, civil.lora_path), 0)
        assert live.total("chunks_stored") == 0
        live.settle()
    with store.client() as client:
        assert client.dbsize() == 3


@pytest.mark.redis
@pytest.mark.parametrize(("mode", "cached"), [("new_epoch", 0), ("keep", HIT)])
def test_reset_and_the_remote_tier(
    tiny: TinyModel, oracle: Oracle, store: RedisServer, mode: str, cached: int
) -> None:
    text = prompt(495, LENGTH)
    settings = {"lmcache.remote_url": store.url, "elora.reset_remote": mode}
    with engine(tiny.model, settings) as live:
        live.ask(text)
        live.settle()
        assert live.llm.reset_prefix_cache(reset_connector=True)
        answer = live.ask(text)
        assert (answer.tokens, answer.cached) == (oracle(text), cached)
        assert live.total("hit_tokens", "remote", "base") == cached
        live.settle()
        with store.client() as client:
            assert client.dbsize() == (3 if cached else 6)
        # What was stored after the reset is used again.
        live.forget_host()
        assert live.ask(text).cached == HIT
