"""Two tensor-parallel ranks: READY and residency need both, and both evict alike.

One engine for all tests: with two worker processes it takes ten times as long to start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_dir import AdapterDir
from tests.support.engine import Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.redis_server import RedisServer
from tests.support.tiny import TinyModel

pytestmark = [pytest.mark.engine, pytest.mark.redis]

LENGTH = 200
HIT = 192
CHUNKS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as made:
        yield made


@pytest.fixture(scope="module")
def live(tiny: TinyModel, server: RedisServer) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's CPU workers want a core each, named rank by rank.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with engine(
            tiny.model,
            {"lmcache.remote_url": server.url},
            tensor_parallel_size=2,
            max_loras=1,
            max_cpu_loras=2,
        ) as made:
            yield made


def adapters(tiny: TinyModel) -> list[Any]:
    return [None, *(lora(n, i + 1, tiny.adapters[n]) for i, n in enumerate(tiny.adapters))]


def test_adapters_in_turn_hit_their_own_kv(live: Engine, tiny: TinyModel, oracle: Oracle) -> None:
    """Four adapters, one slot, two places in host memory: every turn evicts one on each rank."""
    text = prompt(700, LENGTH)
    for cached in (0, HIT, HIT):
        for adapter in adapters(tiny):
            path = None if adapter is None else adapter.lora_path
            answer = live.ask(text, adapter)
            assert (answer.tokens, answer.cached) == (oracle(text, path), cached)
        live.settle()
    states = live.llm.collective_rpc(_resident)
    assert states[0] == states[1]
    assert len(states[0]) == 2


def test_each_rank_reads_its_own_half_from_redis(
    live: Engine, tiny: TinyModel, oracle: Oracle, server: RedisServer
) -> None:
    text = prompt(701, LENGTH)
    civil = lora("civil", 1, tiny.adapters["civil"])
    before = _keys(server)
    live.ask(text, civil)
    live.forget_host()
    written = _keys(server) - before
    assert Counter(key.rsplit(b":", 1)[1] for key in written) == {
        b"tp0pp0": CHUNKS,
        b"tp1pp0": CHUNKS,
    }
    seen = live.mark()
    answer = live.ask(text, civil)
    assert (answer.tokens, answer.cached) == (oracle(text, civil.lora_path), HIT)
    assert seen("hit_tokens", "remote", "civil") == HIT


@pytest.mark.parametrize("rank", [b"tp0pp0", b"tp1pp0"])
def test_half_a_chunk_is_no_chunk(
    live: Engine, tiny: TinyModel, oracle: Oracle, server: RedisServer, rank: bytes
) -> None:
    """One rank's part of one chunk is gone, or spoilt: the prefix ends before that chunk."""
    text = prompt(702 + (rank == b"tp1pp0"), LENGTH)
    legal = lora("legal", 2, tiny.adapters["legal"])
    before = _keys(server)
    live.ask(text, legal)
    live.forget_host()
    written = _keys(server) - before
    (victim,) = (k for k in written if k.endswith(rank) and _depth(server, k, written) == 1)
    with server.client() as client:
        sound = client.get(victim)
        client.delete(victim)
        answer = live.ask(text, legal)
        assert (answer.tokens, answer.cached) == (oracle(text, legal.lora_path), 64)
        live.forget_host()
        client.set(victim, sound[:-1] + bytes([sound[-1] ^ 1]))
        answer = live.ask(text, legal)
        assert (answer.tokens, answer.cached) == (oracle(text, legal.lora_path), 64)
        live.forget_host()
        answer = live.ask(text, legal)
        assert (answer.tokens, answer.cached) == (oracle(text, legal.lora_path), HIT)


def test_an_in_place_reload_reaches_both_ranks(
    live: Engine, tiny: TinyModel, oracle: Oracle
) -> None:
    text = prompt(704, LENGTH)
    old, new = (tiny.adapters[name] for name in ("tax", "patent"))
    for path, inplace, cached in ((old, False, 0), (old, False, HIT), (new, True, 0)):
        answer = live.ask(text, lora("moving", 9, path, load_inplace=inplace))
        assert (answer.tokens, answer.cached) == (oracle(text, path), cached)
    answer = live.ask(text, lora("moving", 9, old, load_inplace=True))
    assert (answer.tokens, answer.cached) == (oracle(text, old), HIT)


def test_ranks_that_read_different_weights_refuse_the_adapter(
    live: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path
) -> None:
    """Two machines with different files under one path; only that adapter's requests fail."""
    text = prompt(705, LENGTH)
    path = AdapterDir(tmp_path / "new", tiny.adapters["civil"]).path  # never hashed before
    live.llm.collective_rpc(_misread)
    answer = live.ask(text, lora("torn", 20, path))
    assert (answer.tokens, answer.finish_reason) == ((), "error")
    assert "differs between the workers' machines" in str(answer.stop_reason)
    assert live.ask(text).tokens == oracle(text)
    live.llm.collective_rpc(_read_right)
    answer = live.ask(text, lora("whole", 21, path))
    assert (answer.tokens, answer.cached) == (oracle(text, tiny.adapters["civil"]), 0)


def _misread(worker: Any) -> None:
    """Makes rank 1 hash something else than rank 0."""
    from elora_connector.integration.vllm import adapter_loader

    if worker.rank == 1:
        honest = adapter_loader.adapter_digest
        adapter_loader.adapter_digest = lambda *args, **more: honest(*args, **more)[::-1]
        adapter_loader.honest_digest = honest


def _read_right(worker: Any) -> None:
    from elora_connector.integration.vllm import adapter_loader

    if worker.rank == 1:
        adapter_loader.adapter_digest = adapter_loader.honest_digest


def _resident(worker: Any) -> list[int]:
    manager = worker.model_runner.lora_manager
    return sorted(manager.list_adapters())


def _keys(server: RedisServer) -> set[bytes]:
    with server.client() as client:
        return set(client.scan_iter(count=1000))


def _depth(server: RedisServer, key: bytes, written: set[bytes]) -> int:
    """Chunks above this one among those written."""
    with server.client() as client:
        headers = {k: client.getrange(k, 0, 511) for k in written if k.endswith(key[-6:])}
    chunk = {bytes.fromhex(k.split(b"{")[1].split(b"}")[0].decode()): k for k in headers}
    depth, current = 0, key
    while True:
        parents = [c for c in chunk if c in headers[current] and chunk[c] != current]
        if not parents:
            return depth
        depth, current = depth + 1, chunk[parents[0]]
