"""Adapters come, go, change, fail and take turns; their KV follows.

Case numbers: shared list of public reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elora_connector.integration.vllm import adapter_loader
from elora_connector.integration.vllm.compat import CLIENT_ERROR
from tests.support.adapter_dir import CONFIG, AdapterDir
from tests.support.engine import Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.tiny import TinyModel, make_adapter

pytestmark = pytest.mark.engine

LENGTH = 200
HIT = 192
FAULTS = ("missing", "corrupt", "no_json", "oversized", "vanished")


@pytest.fixture(scope="class")
def live(tiny: TinyModel) -> Iterator[Engine]:
    """One engine, host tier only; each test has prompts and adapter ids of its own."""
    with engine(tiny.model) as made:
        yield made


def nodes(live: Engine) -> int:
    return len(list(live.side.manager.tree.chunks))


class TestOneEngine:
    def test_case_08_unload_and_reload_keep_one_copy(
        self, live: Engine, tiny: TinyModel, oracle: Oracle
    ) -> None:
        text = prompt(201, LENGTH)
        civil = lora("civil", 1, tiny.adapters["civil"])
        want = oracle(text, civil.lora_path)
        assert live.ask(text, civil).tokens == want
        before = nodes(live)
        for _ in range(3):
            loads = live.mark_worker()
            assert live.llm.llm_engine.remove_lora(1)
            assert live.ledger.identity(1) is None
            live.step()
            assert live.ledger.identity(1) is None
            again = live.ask(text, civil)
            assert (again.tokens, again.cached) == (want, HIT)
            assert loads("adapter_loads", "ok") == 1
        assert nodes(live) == before

    def test_case_08_an_unloaded_adapter_without_files_gets_no_kv(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path
    ) -> None:
        text = prompt(202, LENGTH)
        folder = AdapterDir(tmp_path / "a", tiny.adapters["legal"])
        gone = lora("gone", 2, folder.path)
        want = oracle(text, tiny.adapters["legal"])
        assert live.ask(text, gone).tokens == want
        live.llm.llm_engine.remove_lora(2)
        folder.remove()
        seen = live.mark()
        assert live.ask(text, gone).finish_reason == "error"
        assert seen("hit_tokens") == seen("lookup_tokens") == 0
        folder.put(tiny.adapters["legal"])
        back = live.ask(text, gone)
        assert (back.tokens, back.cached) == (want, HIT)

    def test_case_09_weights_are_read_once_per_real_change(
        self,
        live: Engine,
        tiny: TinyModel,
        oracle: Oracle,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        text = prompt(203, LENGTH)
        folder = AdapterDir(tmp_path / "a", tiny.adapters["civil"])
        inplace = lora("inplace", 3, folder.path, load_inplace=True)
        loader = live.worker._agent._loader
        reads = counted(monkeypatch, loader, "_read")
        hashes = counted(monkeypatch, adapter_loader, "adapter_digest")
        for turn, kind in enumerate(("civil", "legal"), start=1):
            want = oracle(text, tiny.adapters[kind])
            for cached in (0, HIT, HIT):
                answer = live.ask(text, inplace)
                assert (answer.tokens, answer.cached) == (want, cached)
                assert (len(reads), len(hashes)) == (turn, turn)
            folder.put(tiny.adapters["legal"])

    @pytest.mark.parametrize("fault", FAULTS)
    def test_case_10_a_bad_adapter_fails_only_its_own_request(
        self, live: Engine, tiny: TinyModel, oracle: Oracle, tmp_path: Path, fault: str
    ) -> None:
        number = 210 + FAULTS.index(fault)
        text = prompt(number, LENGTH)
        good = lora("tax", 9, tiny.adapters["tax"])
        bad = lora(f"bad-{fault}", number, spoil(fault, tmp_path / "a", tiny, live, number))
        seen = live.mark()
        failed, fine, failed_too = live.ask_all([(text, bad), (text, good), (text, bad)])
        for answer in (failed, failed_too):
            assert (answer.tokens, answer.finish_reason) == ((), "error")
            assert str(answer.stop_reason).startswith(CLIENT_ERROR)
            assert f"bad-{fault}" in str(answer.stop_reason)
        assert (fine.tokens, fine.cached) == (oracle(text, good.lora_path), 0)
        assert fine.finish_reason == "length"
        again = live.ask(text, good)
        assert (again.tokens, again.cached) == (fine.tokens, HIT)
        assert seen("failed_requests", "adapter_load") == 2
        assert seen("chunks_stored") == 3
        assert seen("hit_tokens") == seen("hit_tokens", "host", "tax") == HIT


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Arguments of every call of a function from now on."""
    calls: list[Any] = []
    original: Callable[..., Any] = getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, spy)
    return calls


def spoil(fault: str, path: Path, tiny: TinyModel, live: Engine, number: int) -> Path:
    """An adapter directory that cannot be loaded."""
    if fault == "missing":
        return path
    if fault == "oversized":
        return make_adapter(path, number, rank=16)
    folder = AdapterDir(path, tiny.adapters["legal"])
    if fault == "corrupt":
        folder.damage()
    elif fault == "no_json":
        (path / CONFIG).write_text("{")
    else:
        # It worked, its KV is stored, then it was unloaded and its files went.
        request = lora(f"bad-{fault}", number, path)
        assert live.ask(prompt(number, LENGTH), request).finish_reason == "length"
        live.llm.llm_engine.remove_lora(number)
        folder.remove()
    return path


@pytest.mark.parametrize(
    ("host", "residency"), [(2, "gpu"), (None, "gpu"), (3, "host")], ids=["2", "default", "host"]
)
def test_case_11_more_adapters_than_places_take_turns(
    tiny: TinyModel, oracle: Oracle, host: int | None, residency: str
) -> None:
    text = prompt(220, LENGTH)
    adapters = [lora(name, i, path) for i, (name, path) in enumerate(tiny.adapters.items(), 1)]
    assert len(adapters) == 4
    settings = {"elora.residency": residency}
    with engine(tiny.model, settings, max_loras=1, max_cpu_loras=host) as live:
        places = host or 4  # where nothing is said, bytes bound them, and all four fit
        for cached in (0, HIT, HIT):
            for adapter in adapters:
                answer = live.ask(text, adapter)
                want = oracle(text, adapter.lora_path)
                assert (answer.tokens, answer.cached) == (want, cached)
                known = [a for a in adapters if live.ledger.identity(a.lora_int_id) is not None]
                assert adapter in known
                assert len(known) <= places
        assert live.gauge("resident_adapters", "gpu") == 1
        assert live.gauge("resident_adapters", "host") == places
        seen = live.mark()
        burst = live.ask_all([(text, adapter) for adapter in (*adapters, *adapters)])
        assert [a.cached for a in burst] == [HIT] * 8
        assert [a.tokens for a in burst] == [oracle(text, a.lora_path) for a in adapters] * 2
        assert seen("hit_tokens", "host") == 8 * HIT
        assert live.gauge("host_chunks") == 4 * 3
