"""A real Redis that is shared, slow, full, dead, silent or lies.

Case numbers: shared list of public reports.  "Forgetting" the host tier makes the remote
tier the only source of a hit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elora_connector.tiers.base import Item, LookupResult
from elora_connector.tiers.redis import RedisTier
from tests.support.engine import Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.proxy import SlowProxy, blackhole_port
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel, make_model

pytestmark = [pytest.mark.engine, pytest.mark.redis]

LENGTH = 200
HIT = 192
ROOT = Path(__file__).resolve().parents[2]
FOUR_SLOTS_GB = 4 * 64 * 4096 / 1024**3


def size_gb(directory: Path) -> float:
    """Bytes of an adapter's files, as the settings count memory."""
    return sum(file.stat().st_size for file in directory.iterdir()) / 1024**3


"""Host memory of four chunks: 4 KiB of KV a token."""


def remote(url: str, **more: Any) -> dict[str, Any]:
    """Settings with a remote tier; short timeouts, for servers that do not answer."""
    return {
        "lmcache.remote_url": url,
        "elora.remote.operation_timeout_ms": 300,
        "elora.remote.connect_timeout_ms": 300,
        "elora.shutdown_flush_s": 0.5,
        **more,
    }


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Redis keys in the order in which they are written: a prompt's chunks root first."""
    keys: list[str] = []
    write_many = RedisTier.write_many

    def spy(self: RedisTier, items: Iterable[Item]) -> Any:
        return write_many(self, map(noted, items))

    def noted(item: Item) -> Item:
        keys.append(item[0].key)
        return item

    monkeypatch.setattr(RedisTier, "write_many", spy)
    return keys


@pytest.fixture(scope="class")
def live(tiny: TinyModel, class_store: RedisServer) -> Iterator[Engine]:
    with engine(tiny.model, {"lmcache.remote_url": class_store.url}) as made:
        yield made


def check(live: Engine, oracle: Oracle, text: list[int], adapter: Any, cached: int) -> None:
    path = None if adapter is None else adapter.lora_path
    answer = live.ask(text, adapter)
    assert (answer.tokens, answer.cached) == (oracle(text, path), cached)


def flip(value: bytes) -> bytes:
    return value[:-1000] + bytes([value[-1000] ^ 1]) + value[-999:]


def no_magic(value: bytes) -> bytes:
    return b"\0" * 16 + value[16:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "bit_rot": flip,
    "truncated": lambda value: value[:-1],
    "header_only": lambda value: value[:100],
    "too_long": lambda value: value + b"\0",
    "empty": lambda value: b"",
    "no_magic": no_magic,
}
RESTORED = {"bit_rot", "truncated", "too_long"}
"""These still claim our key, so they are deleted and a sound value takes their place."""


class TestDamagedValues:
    """Each test has prompts of its own; the damage is in the first or second chunk."""

    @pytest.mark.parametrize("at", [0, 1])
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_case_18_damaged_values_are_refused(
        self,
        live: Engine,
        tiny: TinyModel,
        oracle: Oracle,
        class_store: RedisServer,
        written: list[str],
        damage: str,
        at: int,
    ) -> None:
        text = prompt(600 + 2 * list(DAMAGE).index(damage) + at, LENGTH)
        tax = lora("tax", 3, tiny.adapters["tax"])
        check(live, oracle, text, tax, 0)
        live.forget_host()
        with class_store.client() as client:
            sound = client.get(written[at])
            client.set(written[at], DAMAGE[damage](sound))
            seen, work = live.mark(), live.mark_worker()
            check(live, oracle, text, tax, 64 * at)
            assert seen("hit_tokens", "remote", "tax") == 64 * at
            assert work("remote_operations", "read_into", "bad") == 1
            assert work("remote_errors") == 1
            if damage in RESTORED:
                live.forget_host()
                assert client.get(written[at]) == sound, "no sound value was written again"
                check(live, oracle, text, tax, HIT)

    def test_case_18_another_adapters_value_under_this_key(
        self,
        live: Engine,
        tiny: TinyModel,
        oracle: Oracle,
        class_store: RedisServer,
        written: list[str],
    ) -> None:
        text = prompt(630, LENGTH)
        civil, legal = (lora(n, i, tiny.adapters[n]) for i, n in ((1, "civil"), (2, "legal")))
        check(live, oracle, text, civil, 0)
        live.settle()
        check(live, oracle, text, legal, 0)
        live.forget_host()
        with class_store.client() as client:
            for mine, other in zip(written[3:], written[:3], strict=True):
                client.set(mine, client.get(other))
        work = live.mark_worker()
        check(live, oracle, text, legal, 0)
        assert work("remote_operations", "read_into", "bad") >= 1
        check(live, oracle, text, civil, HIT)

    def test_case_18_chunks_of_one_prompt_swapped(
        self,
        live: Engine,
        oracle: Oracle,
        class_store: RedisServer,
        written: list[str],
    ) -> None:
        text = prompt(631, LENGTH)
        check(live, oracle, text, None, 0)
        live.forget_host()
        with class_store.client() as client:
            second, third = client.get(written[1]), client.get(written[2])
            client.set(written[1], third)
            client.set(written[2], second)
        check(live, oracle, text, None, 64)

    def test_case_16_a_hole_truncates_and_is_filled_again(
        self,
        live: Engine,
        oracle: Oracle,
        class_store: RedisServer,
        written: list[str],
    ) -> None:
        text = prompt(632, LENGTH)
        check(live, oracle, text, None, 0)
        live.forget_host()
        with class_store.client() as client:
            client.delete(written[1])
        check(live, oracle, text, None, 64)
        live.forget_host()
        check(live, oracle, text, None, HIT)

    @pytest.mark.parametrize(("gone", "cached"), [([0, 1, 2], 0), ([1], 64), ([2], 128)])
    def test_case_17_gone_between_lookup_and_load(
        self,
        live: Engine,
        tiny: TinyModel,
        oracle: Oracle,
        class_store: RedisServer,
        written: list[str],
        monkeypatch: pytest.MonkeyPatch,
        gone: list[int],
        cached: int,
    ) -> None:
        text = prompt(640 + cached, LENGTH)
        civil = lora("civil", 1, tiny.adapters["civil"])
        check(live, oracle, text, civil, 0)
        live.forget_host()
        leading = RedisTier.leading
        found: list[LookupResult] = []

        def then_gone(self: RedisTier, groups: Sequence[Sequence[str]]) -> LookupResult:
            found.append(leading(self, groups))
            with class_store.client() as client:
                client.delete(*(written[i] for i in gone))
            return found[-1]

        with monkeypatch.context() as patch:
            patch.setattr(RedisTier, "leading", then_gone)
            check(live, oracle, text, civil, cached)
        assert [result.count for result in found] == [3]
        # The recomputed chunks are in Redis again.
        live.forget_host()
        check(live, oracle, text, civil, HIT)


def test_case_16_redis_that_evicts_or_refuses(
    tiny: TinyModel, oracle: Oracle, written: list[str]
) -> None:
    texts = [prompt(650 + i, LENGTH) for i in range(8)]
    civil = lora("civil", 1, tiny.adapters["civil"])
    for policy in ("allkeys-lru", "noeviction"):
        with (
            RedisServer(maxmemory="5mb", policy=policy) as server,
            engine(tiny.model, remote(server.url)) as live,
        ):
            for text in texts:
                check(live, oracle, text, civil, 0)
            live.forget_host()
            with server.client() as client:
                evicted = client.info("stats")["evicted_keys"]
                assert 0 < client.dbsize() < 3 * len(texts)
            refused = live.worker_total("remote_errors", "oom")
            assert (evicted > 0, refused > 0) == (policy != "noeviction", policy == "noeviction")
            hits = []
            # The newest first: in the old order each write would evict what is asked next.
            for text in reversed(texts):
                answer = live.ask(text, civil)
                assert answer.tokens == oracle(text, civil.lora_path)
                hits.append(answer.cached)
            assert set(hits) <= {0, 64, 128, HIT}
            assert 0 < sum(hits) < HIT * len(texts)


def test_case_13_redis_dies_and_comes_back(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    civil = lora("civil", 1, tiny.adapters["civil"])
    texts = [prompt(660 + i, LENGTH) for i in range(6)]
    with engine(tiny.model, remote(store.url)) as live:
        check(live, oracle, texts[0], civil, 0)
        live.forget_host()
        check(live, oracle, texts[0], civil, HIT)
        assert live.gauge("remote_degraded") == 0

        store.kill()
        live.forget_host()
        check(live, oracle, texts[0], civil, 0)
        live.settle()
        assert live.gauge("remote_degraded") == 1
        seen = live.mark()
        for text in texts[1:4]:
            check(live, oracle, text, civil, 0)
            check(live, oracle, text, civil, HIT)
        # Nobody tries the dead server again: each look-up is refused by the breaker.
        assert seen("remote_errors", "breaker") == seen("remote_errors") > 0

        store.start()
        live.until(live.remote_answers)
        check(live, oracle, texts[4], civil, 0)
        live.forget_host()
        check(live, oracle, texts[4], civil, HIT)
        live.step()
        assert live.gauge("remote_degraded") == 0
        assert live.total("hit_tokens", "remote", "civil") == 2 * HIT


def test_case_14_redis_stops_answering_and_goes_on(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    civil = lora("civil", 1, tiny.adapters["civil"])
    text = prompt(670, LENGTH)
    with engine(tiny.model, remote(store.url)) as live:
        check(live, oracle, text, civil, 0)
        live.forget_host()
        store.pause()
        check(live, oracle, text, civil, 0)
        assert live.total("remote_errors", "timeout") >= 1
        live.settle()
        assert live.gauge("remote_degraded") == 1
        live.forget_host()
        check(live, oracle, text, civil, 0)
        assert live.total("remote_errors", "breaker") >= 1
        store.resume()
        live.until(live.remote_answers)
        live.forget_host()
        check(live, oracle, text, civil, HIT)
        assert live.total("hit_tokens", "remote", "civil") == HIT


@pytest.mark.parametrize("kind", ["paused", "blackhole"])
def test_case_14_an_engine_starts_beside_a_silent_server(
    tiny: TinyModel, oracle: Oracle, store: RedisServer, kind: str
) -> None:
    text = prompt(671, LENGTH)
    with blackhole_port() as port:
        url = f"redis://127.0.0.1:{port}/0"
        if kind == "paused":
            store.pause()
            url = store.url
        with engine(tiny.model, remote(url)) as live:
            check(live, oracle, text, None, 0)
            check(live, oracle, text, None, HIT)
            assert live.gauge("remote_degraded") == 1
            assert live.total("hit_tokens", "remote") == 0
            if kind == "paused":
                store.resume()
                live.until(live.remote_answers)
                other = prompt(672, LENGTH)
                check(live, oracle, other, None, 0)
                live.forget_host()
                check(live, oracle, other, None, HIT)


def test_case_12_slow_redis_one_slot_and_aborts(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    names = ("civil", "legal", "tax")
    adapters = [lora(name, i, tiny.adapters[name]) for i, name in enumerate(names, 1)]
    texts = [prompt(680 + i, 100) for i in range(3)]
    with SlowProxy(store.port) as proxy:
        settings = {
            "lmcache.remote_url": proxy.url,
            "lmcache.blocking_timeout_secs": 60,
            "elora.remote.operation_timeout_ms": 30_000,
            "elora.remote.lookup_timeout_ms": 30_000,
        }
        sizes = {"max_num_seqs": 2, "max_loras": 1, "max_cpu_loras": 2}
        with engine(tiny.model, settings, **sizes) as live:
            for text in texts:
                for adapter in (*adapters, None):
                    live.ask(text, adapter)
            live.forget_host()
            proxy.latency_ms = 300.0
            seen = live.mark()
            wanted: dict[str, tuple[int, ...]] = {}
            doomed = []
            for round_, text in enumerate(texts):
                for adapter in (*adapters, None):
                    path = None if adapter is None else adapter.lora_path
                    wanted[live.submit(text, adapter)] = oracle(text, path)
                doomed.append(live.submit(prompt(690 + round_, 100), adapters[round_]))
            finished = live.run(steps=20)
            live.abort(*doomed[:2])
            finished |= live.run(steps=40)
            live.abort(doomed[2])
            finished |= live.run(seconds=120)
            assert {rid: finished[rid].tokens for rid in wanted} == wanted
            assert [finished[rid].cached for rid in wanted] == [64] * len(wanted)
            assert seen("hit_tokens", "remote") > 0
            assert seen("failed_requests") == 0


def test_case_12_a_loading_adapter_does_not_block_a_resident_one(
    tiny: TinyModel, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompt(695, LENGTH)
    civil, legal = (lora(n, i, tiny.adapters[n]) for i, n in ((1, "civil"), (2, "legal")))
    with engine(tiny.model) as live:
        check(live, oracle, text, civil, 0)
        go = threading.Event()
        loader = live.worker._agent._loader
        read = loader._read

        def slow(request: Any) -> Any:
            assert go.wait(60)
            return read(request)

        monkeypatch.setattr(loader, "_read", slow)
        loading = live.submit(text, legal)
        resident = live.submit(text, civil)
        finished: dict[str, Any] = {}
        while resident not in finished:
            finished |= live.run(steps=1)
        assert loading not in finished
        assert (finished[resident].tokens, finished[resident].cached) == (
            oracle(text, civil.lora_path),
            HIT,
        )
        go.set()
        finished |= live.run()
        assert (finished[loading].tokens, finished[loading].cached) == (
            oracle(text, legal.lora_path),
            0,
        )


def test_four_slots_slow_redis_and_a_short_deadline(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    texts = [prompt(700 + i, LENGTH + 64 * i) for i in range(3)]
    civil = lora("civil", 1, tiny.adapters["civil"])
    with SlowProxy(store.port, latency_ms=300.0) as proxy:
        settings = {
            "lmcache.remote_url": proxy.url,
            # The adapter's weights are in the same budget.
            "lmcache.max_local_cpu_size": FOUR_SLOTS_GB + size_gb(tiny.adapters["civil"]),
            "elora.fetch_deadline_ms": 50,
        }
        with engine(tiny.model, settings) as live:
            for _ in range(2):
                for text in texts:
                    answer = live.ask(text, civil)
                    assert answer.tokens == oracle(text, civil.lora_path)
                    assert answer.cached in (0, 64, 128, 192, 256)  # four slots of 64 tokens
            assert live.total("remote_waits", "deadline") >= 3
            assert live.total("hit_tokens", "remote") == 0
            assert live.total("evictions", "host") > 0
            live.settle(30)
            # With no write under way all slots can be reused; a host hit asks no Redis.
            live.ask(texts[0], civil)
            live.settle(30)
            check(live, oracle, texts[0], civil, HIT)


def test_a_fetch_that_outlives_its_deadline_serves_the_next_request(
    tiny: TinyModel, oracle: Oracle, store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompt(710, LENGTH)
    settings = {"lmcache.remote_url": store.url, "elora.fetch_deadline_ms": 1500}
    with engine(tiny.model, settings) as live:
        check(live, oracle, text, None, 0)
        live.forget_host()
        go = threading.Event()
        read_many = RedisTier.read_many

        def slow(self: RedisTier, items: Any) -> Any:
            assert go.wait(60)
            return read_many(self, items)

        monkeypatch.setattr(RedisTier, "read_many", slow)
        seen = live.mark()
        check(live, oracle, text, None, 0)
        assert seen("remote_waits", "deadline") == 1
        assert live.side.manager.open_jobs == 1
        assert live.side.manager.pinned_by_waiters == 0
        go.set()
        live.settle()
        check(live, oracle, text, None, HIT)
        assert seen("hit_tokens") == seen("hit_tokens", "host", "base") == HIT


def test_one_fetch_serves_all_requests_that_wait_for_it(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    text = prompt(711, LENGTH)
    legal = lora("legal", 2, tiny.adapters["legal"])
    with engine(tiny.model, {"lmcache.remote_url": store.url}) as live:
        check(live, oracle, text, legal, 0)
        live.forget_host()
        work = live.mark_worker()
        answers = live.ask_all([(text, legal)] * 4)
        want = oracle(text, legal.lora_path)
        assert [(a.tokens, a.cached) for a in answers] == [(want, HIT)] * 4
        assert work("remote_operations", "read_into") == 3


def test_case_24_a_restarted_instance_hits_and_builds_its_tree_lazily(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    texts = [prompt(720 + i, LENGTH) for i in range(3)]
    civil = lora("civil", 1, tiny.adapters["civil"])
    with engine(tiny.model, remote(store.url, **{"elora.shutdown_flush_s": 5})) as live:
        for text in texts:
            check(live, oracle, text, civil, 0)
    with engine(tiny.model, remote(store.url)) as live:
        assert not list(live.side.manager.tree.chunks)
        for count, text in enumerate(texts[:2], start=1):
            check(live, oracle, text, civil, HIT)
            assert len(list(live.side.manager.tree.chunks)) == 3 * count
        assert live.total("hit_tokens", "remote", "civil") == 2 * HIT
        live.settle()
        assert live.worker_total("remote_operations", "write") == 0


def _instance(model: str, adapter: str, url: str, text: list[int]) -> None:
    """The second instance of case 19; prints its answer as the last line."""
    with engine(model, {"lmcache.remote_url": url}) as live:
        answer = live.ask(text, lora("civil", 5, adapter))
        hits = live.total("hit_tokens", "remote", "civil")
    print(json.dumps([list(answer.tokens), answer.cached, hits, hash("elora")]))


def test_case_19_an_interpreter_with_another_hash_seed_hits(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    text = prompt(730, LENGTH)
    civil = lora("civil", 1, tiny.adapters["civil"])
    with engine(tiny.model, {"lmcache.remote_url": store.url}) as live:
        check(live, oracle, text, civil, 0)
    given = json.dumps([str(tiny.model), civil.lora_path, store.url, text])
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), given],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tokens, cached, hits, hashed = json.loads(done.stdout.splitlines()[-1])
    assert (tuple(tokens), cached, hits) == (oracle(text, civil.lora_path), HIT, HIT)
    assert hashed != hash("elora"), "both interpreters had one hash seed"


def test_case_20_incompatible_kv_is_never_shared(
    tiny: TinyModel, oracle: Oracle, store: RedisServer, tmp_path: Path
) -> None:
    text = prompt(740, LENGTH)
    civil = lora("civil", 1, tiny.adapters["civil"])
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    other = str(make_model(tmp_path / "other", seed=1))
    with engine(tiny.model, remote(store.url)) as live:
        check(live, oracle, text, civil, 0)
    variants: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        # (engine arguments, connector settings, what the oracle needs of them)
        ({"dtype": "bfloat16"}, {}, {"dtype": "bfloat16"}),
        ({"block_size": 64}, {}, {}),
        ({}, {"lmcache.chunk_size": 32}, {}),
        ({}, {"lmcache.chunk_size": 128}, {}),
        ({"hf_overrides": rope}, {}, {"hf_overrides": rope}),
        ({"model": other}, {}, {"model": other}),
    ]
    answers = set()
    for arguments, settings, asked in variants:
        model = arguments.pop("model", str(tiny.model))
        with engine(model, remote(store.url, **settings), **arguments) as live:
            answer = live.ask(text, civil)
            want = oracle(text, civil.lora_path, **asked)
            assert (answer.tokens, answer.cached) == (want, 0), (arguments, settings)
            assert live.total("hit_tokens") == 0
            answers.add(answer.tokens)
    assert len(answers) >= 3, "the variants were meant to answer differently"
    with engine(tiny.model, remote(store.url)) as live:
        check(live, oracle, text, civil, HIT)
        assert live.total("hit_tokens", "remote", "civil") == HIT


if __name__ == "__main__":
    _instance(*json.loads(sys.argv[1]))
