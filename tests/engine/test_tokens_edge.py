"""How many tokens are promised, and what is left behind, at the edges.

Case numbers: shared list of public reports.  Blocks are 32 tokens, chunks 64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elora_connector.tiers.redis import RedisTier
from tests.support.engine import DEFAULTS, Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.proxy import SlowProxy
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = pytest.mark.engine

MODEL_LENGTH = DEFAULTS["max_model_len"]
FOUR_SLOTS_GB = 4 * 64 * 4096 / 1024**3
"""Host memory of four chunks: 4 KiB of KV a token."""


@pytest.fixture(scope="class")
def live(tiny: TinyModel) -> Iterator[Engine]:
    with engine(tiny.model) as made:
        yield made


@pytest.fixture(scope="class")
def caching(tiny: TinyModel) -> Iterator[Engine]:
    with engine(tiny.model, enable_prefix_caching=True) as made:
        yield made


class TestWithoutPrefixCache:
    @pytest.mark.parametrize(
        ("length", "stored", "cached"),
        [
            (1, 0, 0),
            (40, 0, 0),
            (63, 1, 0),
            (64, 1, 32),
            (65, 1, 64),
            (127, 2, 64),
            (128, 2, 96),
            (129, 2, 128),
            (192, 3, 160),
            (200, 3, 192),
        ],
    )
    def test_case_22_one_token_is_always_computed(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, length: int, stored: int, cached: int
    ) -> None:
        text = prompt(500 + length, length)
        tax = lora("tax", 3, tiny.adapters["tax"])
        want = oracle(text, tax.lora_path, 2)
        seen = live.mark()
        first = live.ask(text, tax, n=2)
        assert (first.tokens, first.cached) == (want, 0)
        assert seen("chunks_stored") == stored
        again = live.ask(text, tax, n=2)
        assert (again.tokens, again.cached) == (want, cached)
        assert seen("hit_tokens") == seen("hit_tokens", "host", "tax") == cached
        assert seen("chunks_stored") == stored, "a hit was stored again"

    def test_case_22_a_longer_prompt_hits_the_common_chunks(
        self, live: Engine, oracle: Oracle
    ) -> None:
        text = prompt(510, 250)
        assert live.ask(text[:150]).cached == 0
        longer = live.ask(text)
        assert (longer.tokens, longer.cached) == (oracle(text), 128)
        other = [*text[:100], *prompt(511, 100)]
        forked = live.ask(other)
        assert (forked.tokens, forked.cached) == (oracle(other), 64)

    @pytest.mark.parametrize("length", [MODEL_LENGTH, MODEL_LENGTH + 1, 5000])
    def test_a_prompt_longer_than_the_model_is_vllms_error_and_costs_nothing(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, length: int
    ) -> None:
        text, tax = prompt(515, 200), lora("tax", 3, tiny.adapters["tax"])
        want = oracle(text, tax.lora_path)
        live.ask(text, tax)
        chunks = live.side.manager.slots.used
        seen = live.mark()
        running = live.submit(text, tax)
        with pytest.raises(Exception, match=rf"maximum (model|context) length .*{MODEL_LENGTH}"):
            live.submit(prompt(516, length), tax)
        # Its neighbour in the queue is served, from the host tier as before.
        answer = live.run()[running]
        assert (answer.tokens, answer.cached) == (want, 192)
        assert (seen("lookup_tokens", "tax"), seen("hit_tokens", "host", "tax")) == (200, 192)
        assert seen("failed_requests") == seen("bypassed_requests") == seen("evictions") == 0
        assert live.side.manager.slots.used == chunks
        live.assert_at_rest()

    def test_the_longest_prompt_of_the_model_is_served_and_stored(
        self, live: Engine, oracle: Oracle
    ) -> None:
        text = prompt(517, MODEL_LENGTH - 1)
        want = oracle(text, n=1)
        assert [live.ask(text, n=1).cached, live.ask(text, n=1).cached] == [0, 960]
        assert live.ask(text, n=1).tokens == want


class TestWithPrefixCache:
    def test_case_22_a_local_prefix_that_ends_inside_a_chunk(
        self, caching: Engine, tiny: TinyModel, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = prompt(520, 200)
        civil = lora("civil", 1, tiny.adapters["civil"])
        loads: list[Any] = []
        submit = caching.worker._engine.load_ordered
        monkeypatch.setattr(
            caching.worker._engine,
            "load_ordered",
            lambda copies: loads.extend(copies) or submit(copies),
        )
        caching.ask(text, civil)
        caching.forget_gpu()
        short = caching.ask(text[:100], civil)
        assert (short.tokens, short.cached) == (oracle(text[:100], civil.lora_path), 64)
        on_gpu = {block for copy in loads for block in copy.blocks}
        assert len(on_gpu) == 2
        loads.clear()
        seen = caching.mark()
        # The GPU has three blocks (96 tokens): the second chunk's first half.
        answer = caching.ask(text, civil)
        assert (answer.tokens, answer.cached) == (oracle(text, civil.lora_path), 192)
        assert seen("hit_tokens", "gpu") == 96
        assert seen("hit_tokens", "host") == 96
        assert [len(copy.blocks) for copy in loads] == [1, 2]
        assert not on_gpu & {block for copy in loads for block in copy.blocks}

    def test_case_22_exactly_k_chunks_with_everything_on_the_gpu(
        self, caching: Engine, oracle: Oracle
    ) -> None:
        text = prompt(521, 128)
        want = oracle(text)
        assert caching.ask(text).tokens == want
        seen = caching.mark()
        warm = caching.ask(text)
        assert (warm.tokens, warm.cached) == (want, 96)
        assert (seen("hit_tokens", "gpu"), seen("hit_tokens", "host")) == (96, 0)
        caching.forget_gpu()
        cold = caching.ask(text)
        assert (cold.tokens, cold.cached) == (want, 96)
        assert (seen("hit_tokens", "gpu"), seen("hit_tokens", "host")) == (96, 96)


@pytest.mark.redis
@pytest.mark.parametrize(
    ("caching", "remote"), [(False, True), (True, False)], ids=["redis", "prefix_cache"]
)
def test_case_21_preempted_requests_come_back_from_the_host_tier(
    tiny: TinyModel,
    oracle: Oracle,
    store: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    caching: bool,
    remote: bool,
) -> None:
    texts = [prompt(530 + i, 180) for i in range(4)]
    legal = lora("legal", 2, tiny.adapters["legal"])
    with engine(
        tiny.model,
        {"lmcache.remote_url": store.url} if remote else None,
        num_gpu_blocks_override=24,
        max_model_len=512,
        enable_prefix_caching=caching,
    ) as live:
        promised: list[tuple[int, int | None]] = []
        match = live.side.match

        def spy(request: Any, local: int) -> tuple[int | None, bool]:
            tokens, beside = match(request, local)
            if request.num_preemptions:
                promised.append((request.num_tokens, tokens))
            return tokens, beside

        monkeypatch.setattr(live.side, "match", spy)
        answers = live.ask_all([(text, legal) for text in texts], n=100)
        assert [a.tokens for a in answers] == [oracle(t, legal.lora_path, 100) for t in texts]
        assert promised, "nothing was preempted"
        assert all(tokens is None or 0 <= tokens < known for known, tokens in promised)
        assert any(tokens for _, tokens in promised), "nothing was loaded again"
        assert live.total("hit_tokens", "host", "legal") > 0
        assert live.total("hit_tokens", "remote") == 0, "nothing was in Redis before"
        assert live.total("load_failures") == live.total("stores_dropped") == 0


@pytest.mark.redis
def test_case_23_a_thousand_cancels_during_lookup(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    text = prompt(540, 200)
    civil = lora("civil", 1, tiny.adapters["civil"])
    want = oracle(text, civil.lora_path)
    with SlowProxy(store.port) as proxy:
        settings = {
            "lmcache.remote_url": proxy.url,
            "lmcache.blocking_timeout_secs": 60,
            "elora.remote.operation_timeout_ms": 30_000,
            "elora.fetch_deadline_ms": 20_000,
        }
        with engine(tiny.model, settings) as live:
            assert live.ask(text, civil).tokens == want
            live.forget_host()
            proxy.latency_ms = 100.0
            seen = live.mark()
            for _ in range(20):
                waiting = [live.submit(text, civil) for _ in range(50)]
                live.run(steps=2)
                live.abort(*waiting)
                assert live.run() == {}
                assert live.side.manager.pinned_by_waiters == 0
            assert seen("lookup_tokens") == seen("hit_tokens") == 0
            live.assert_at_rest()
            # The next request does not stand in line behind a thousand dead look-ups.
            answer = live.ask(text, civil)
            assert (answer.tokens, answer.cached) == (want, 192)
            # On a slow machine a fetch that was begun for a cancelled one has ended by now.
            hits = {tier: seen("hit_tokens", tier, "civil") for tier in ("remote", "host")}
            assert sorted(hits.values()) == [0, 192]


@pytest.mark.redis
def test_case_23_a_store_without_room_is_dropped_and_counted(
    tiny: TinyModel, oracle: Oracle, store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, other = prompt(550, 260), prompt(551, 200)
    settings = {
        "lmcache.remote_url": store.url,
        "lmcache.max_local_cpu_size": FOUR_SLOTS_GB,
        "elora.pin_share": 1.0,
    }
    with engine(tiny.model, settings) as live:
        assert live.ask(waited).tokens == oracle(waited)
        live.forget_host()
        go = threading.Event()
        read_many = RedisTier.read_many

        def slow(self: RedisTier, items: Any) -> Any:
            assert go.wait(60)
            return read_many(self, items)

        monkeypatch.setattr(RedisTier, "read_many", slow)
        fetching = live.submit(waited)
        for _ in range(2000):
            live.run(steps=1)
            if live.side.manager.pinned_by_waiters == 4:
                break
        assert live.side.manager.pinned_by_waiters == 4
        seen = live.mark()
        stored = live.submit(other)
        finished: dict[str, Any] = {}
        while stored not in finished:
            finished |= live.run(steps=1)
        assert finished[stored].tokens == oracle(other)
        assert seen("stores_dropped", "host_full") == 3
        assert seen("chunks_stored") == 0
        go.set()
        finished |= live.run()
        assert (finished[fetching].tokens, finished[fetching].cached) == (oracle(waited), 256)
        assert live.side.manager.pinned_by_waiters == 0
        assert seen("hit_tokens", "remote", "base") == 256
        # With the pins gone there is room again.
        assert live.ask(other).tokens == oracle(other)
        assert seen("chunks_stored") == 3
        assert live.ask(other).cached == 192
