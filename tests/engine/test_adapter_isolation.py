"""No request gets KV that another adapter, content, name or salt made.

Case numbers: shared list of public reports.  Chunks are 64 tokens: a prompt of 200 tokens has
three, of which 192 tokens can be a hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from elora_connector.core.keys import RemoteKeyParts, RemoteKeys
from tests.support.adapter_dir import AdapterDir
from tests.support.engine import CHUNK, Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = [pytest.mark.engine, pytest.mark.redis]

LENGTH = 200
HIT = 192

AWKWARD = (
    "team@prod",
    "team%40prod",
    "team:prod",
    "team/../prod",
    "{team}",
    "team*",
    "team prod",
    "équipe-契約-🔑",
    "n" * 300,
    "n" * 299 + "m",
)


@pytest.fixture(scope="class")
def live(tiny: TinyModel, class_store: RedisServer) -> Iterator[Engine]:
    """Host and remote tier, prefix caching off: every hit is ours."""
    with engine(tiny.model, {"lmcache.remote_url": class_store.url}) as made:
        yield made


@pytest.fixture(scope="class")
def caching(tiny: TinyModel) -> Iterator[Engine]:
    """Host tier and vLLM's own prefix cache, which hashes names, not content."""
    with engine(tiny.model, enable_prefix_caching=True) as made:
        yield made


def stored(server: RedisServer) -> dict[str, RemoteKeyParts]:
    """Every key in Redis with its parts; all must be valid."""
    with server.client() as client:
        keys = [key.decode("ascii") for key in client.scan_iter(count=1000)]
    parts = {key: RemoteKeys.parse(key) for key in keys}
    assert None not in parts.values(), [key for key, part in parts.items() if part is None]
    return {key: part for key, part in parts.items() if part is not None}


def raw_dump(server: RedisServer) -> bytes:
    """All keys and values, one after the other."""
    with server.client() as client:
        return b"\0".join(key + b"\0" + client.get(key) for key in client.scan_iter(count=1000))


class TestOneEngine:
    """Each test has prompts of its own."""

    def test_case_01_the_same_prompt_hits_only_under_its_own_adapter(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, class_store: RedisServer
    ) -> None:
        text = prompt(101, LENGTH)
        civil = lora("civil", 1, tiny.adapters["civil"])
        legal = lora("legal", 2, tiny.adapters["legal"])
        seen = live.mark()
        for adapter, cached in ((civil, 0), (legal, 0), (legal, HIT), (None, 0), (None, HIT)):
            answer = live.ask(text, adapter)
            path = adapter.lora_path if adapter is not None else None
            assert (answer.tokens, answer.cached) == (oracle(text, path), cached)
        assert seen("hit_tokens", "host", "legal") == seen("hit_tokens", "host", "base") == HIT
        assert seen("hit_tokens") == 2 * HIT
        live.settle()
        chunks: dict[str | None, set[bytes]] = {}
        for part in stored(class_store).values():
            chunks.setdefault(part.name, set()).add(part.chunk)
        assert {name: len(keys) for name, keys in chunks.items()} == {
            "civil": 3,
            "legal": 3,
            "base": 3,
        }
        assert len(set.union(*chunks.values())) == 9

    def test_case_02_one_name_for_two_paths_and_ids_shares_nothing(
        self, live: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        text = prompt(102, LENGTH)
        first = lora("shared-name", 21, tiny.adapters["civil"])
        second = lora("shared-name", 22, tiny.adapters["legal"])
        seen = live.mark()
        for adapter, cached in ((first, 0), (second, 0), (first, HIT), (second, HIT)):
            answer = live.ask(text, adapter)
            assert (answer.tokens, answer.cached) == (oracle(text, adapter.lora_path), cached)
        assert seen("hit_tokens", "host", "shared-name") == 2 * HIT

    def test_case_02_one_content_under_two_paths_and_ids_is_one_identity(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path
    ) -> None:
        text = prompt(103, LENGTH)
        copy = AdapterDir(tmp_path / "elsewhere", tiny.adapters["tax"])
        first = live.ask(text, lora("moved", 23, tiny.adapters["tax"]))
        second = live.ask(text, lora("moved", 24, copy.path))
        want = oracle(text, tiny.adapters["tax"])
        assert (first.tokens, first.cached) == (want, 0)
        assert (second.tokens, second.cached) == (want, HIT)

    def test_case_03_an_inplace_reload_misses_and_the_old_content_hits_again(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path
    ) -> None:
        reload_once(live, tiny, oracle, AdapterDir(tmp_path / "a", tiny.adapters["civil"]), 104)

    def test_case_05_a_salt_is_no_adapter(
        self, live: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        text = prompt(105, LENGTH)
        civil = lora("civil", 1, tiny.adapters["civil"])
        salted = live.ask(text, cache_salt="civil")
        assert (salted.tokens, salted.cached) == (oracle(text), 0)
        adapted = live.ask(text, civil)
        assert (adapted.tokens, adapted.cached) == (oracle(text, civil.lora_path), 0)
        assert live.ask(text, cache_salt="civil").cached == HIT
        assert live.ask(text).cached == 0

    def test_case_05_name_and_salt_do_not_run_together(
        self, live: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        text = prompt(106, LENGTH)
        path = tiny.adapters["civil"]
        want = oracle(text, path)
        seen = live.mark()
        for name, number, salt, cached in (
            ("a", 51, "bc", 0),
            ("ab", 52, "c", 0),
            ("abc", 53, None, 0),
            ("a", 51, "bc", HIT),
            ("ab", 52, "c", HIT),
        ):
            answer = live.ask(text, lora(name, number, path), cache_salt=salt)
            assert (answer.tokens, answer.cached) == (want, cached), (name, salt)
        assert seen("hit_tokens", "host") == 2 * HIT

    def test_case_06_salts_are_name_spaces_and_never_reach_redis(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, class_store: RedisServer
    ) -> None:
        text = prompt(107, LENGTH)
        tax = lora("tax", 3, tiny.adapters["tax"])
        want = oracle(text, tax.lora_path)
        before = len(stored(class_store))
        salts = ("salt-of-tenant-one", "salt-of-tenant-two", None)
        for cached in (0, HIT):
            for salt in salts:
                answer = live.ask(text, tax, cache_salt=salt)
                assert (answer.tokens, answer.cached) == (want, cached), salt
        live.settle()
        assert len(stored(class_store)) - before == 3 * 3
        live.forget_host()
        seen = live.mark()
        assert live.ask(text, tax, cache_salt=salts[0]).cached == HIT
        assert seen("hit_tokens", "remote", "tax") == HIT
        assert b"salt-of-tenant" not in raw_dump(class_store)

    def test_case_07_awkward_names_give_valid_separate_keys(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, class_store: RedisServer
    ) -> None:
        text = prompt(108, 150)
        path = tiny.adapters["patent"]
        want = oracle(text, path, 4)
        before = set(stored(class_store))
        for cached in (0, 2 * CHUNK):
            for number, name in enumerate(AWKWARD, start=70):
                answer = live.ask(text, lora(name, number, path), n=4)
                assert (answer.tokens, answer.cached) == (want, cached), name[:40]
        live.settle()
        parts = {key: part for key, part in stored(class_store).items() if key not in before}
        assert len(parts) == 2 * len(AWKWARD)
        names = {part.name for part in parts.values()}
        assert names >= {name for name in AWKWARD if len(name) < 40}
        assert len({part.tag for part in parts.values()}) == len(AWKWARD)
        slots = {key_slot(key.encode()) for key in parts}
        assert len(slots) > len(AWKWARD), "chunks share cluster slots"


def reload_once(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir, seed: int
) -> None:
    """Civil, reload as legal, reload as civil again: each content only hits its own KV."""
    text = prompt(seed, LENGTH)
    name = f"reloaded-{seed}"

    def ask(again: bool) -> Any:
        return live.ask(text, lora(name, seed, folder.path, load_inplace=again))

    civil, legal = (oracle(text, tiny.adapters[kind]) for kind in ("civil", "legal"))
    assert (ask(False).tokens, ask(False).cached) == (civil, HIT)
    folder.put(tiny.adapters["legal"])
    reloaded = ask(True)
    assert (reloaded.tokens, reloaded.cached) == (legal, 0)
    repeated = ask(False)
    assert (repeated.tokens, repeated.cached) == (legal, HIT)
    folder.put(tiny.adapters["civil"])
    back = ask(True)
    assert (back.tokens, back.cached) == (civil, HIT)


class TestPrefixCaching:
    def test_case_02_one_name_for_two_paths_shares_no_gpu_blocks(
        self, caching: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        text = prompt(112, LENGTH)
        first = lora("shared-name", 21, tiny.adapters["civil"])
        second = lora("shared-name", 22, tiny.adapters["legal"])
        seen = caching.mark()
        for adapter, cached in ((first, 0), (second, 0), (first, HIT), (first, HIT)):
            answer = caching.ask(text, adapter)
            assert (answer.tokens, answer.cached) == (oracle(text, adapter.lora_path), cached)
        # The third was loaded from the host tier, the fourth found the blocks on the GPU.
        assert seen("hit_tokens", "host") == seen("hit_tokens", "gpu") == HIT
        assert seen("unhashed_blocks") > 0

    def test_case_03_an_inplace_reload_serves_no_old_gpu_blocks(
        self, caching: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path
    ) -> None:
        seen = caching.mark()
        reload_once(caching, tiny, oracle, AdapterDir(tmp_path / "a", tiny.adapters["civil"]), 114)
        # The old content came back from the host tier, its GPU blocks were dropped.
        assert seen("hit_tokens", "host") == HIT
        assert seen("hit_tokens", "gpu") == 2 * HIT
        assert seen("unhashed_blocks") > 0


def test_case_04_load_order_and_ids_do_not_matter(
    tiny: TinyModel, oracle: Oracle, store: RedisServer
) -> None:
    text = prompt(120, LENGTH)
    settings = {"lmcache.remote_url": store.url}
    for order, cached, tier in (
        (("civil", "legal"), 0, "host"),
        (("legal", "civil"), HIT, "remote"),
    ):
        with engine(tiny.model, settings) as live:
            seen = live.mark()
            for number, name in enumerate(order, start=1):
                answer = live.ask(text, lora(name, number, tiny.adapters[name]))
                assert (answer.tokens, answer.cached) == (oracle(text, tiny.adapters[name]), cached)
            assert seen("hit_tokens") == seen("hit_tokens", tier) == 2 * cached
