"""Weights change under a name: on request, by RPC, unseen, or while a request runs.

Everything runs with vLLM's prefix cache off (hits must be ours) and on (it hashes adapter
names, so stale blocks must be dropped).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.adapter_dir import AdapterDir
from tests.support.engine import Engine, engine, lora, prompt
from tests.support.oracle import Oracle
from tests.support.tiny import TinyModel

pytestmark = pytest.mark.engine

LENGTH = 200
HIT = 192


@pytest.fixture(scope="module", params=[False, True], ids=["prefix_off", "prefix_on"])
def live(request: pytest.FixtureRequest, tiny: TinyModel) -> Iterator[Engine]:
    with engine(tiny.model, enable_prefix_caching=request.param) as made:
        yield made


@pytest.fixture
def folder(tiny: TinyModel, tmp_path: Path) -> AdapterDir:
    return AdapterDir(tmp_path / "adapter", tiny.adapters["civil"])


def check(
    live: Engine, oracle: Oracle, text: list[int], request: object, path: Path, cached: int
) -> None:
    answer = live.ask(text, request)
    assert (answer.tokens, answer.cached) == (oracle(text, path), cached)


@pytest.mark.parametrize("by", ["request", "rpc"])
def test_a_long_decode_that_spans_an_inplace_reload_leaves_no_mixed_kv(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir, by: str
) -> None:
    number = {"request": 1, "rpc": 2}[by]
    text = prompt(300 + number, 150)
    name = f"decode-{by}"
    running = live.submit(text, lora(name, number, folder.path), n=120)
    live.decode(25)
    folder.put(tiny.adapters["legal"])
    reload = lora(name, number, folder.path, load_inplace=True)
    if by == "rpc":
        assert live.llm.llm_engine.add_lora(reload)
    else:
        live.submit(prompt(399, 40), reload, n=1)
    mixed = live.run()[running].tokens
    pure = oracle(text, tiny.adapters["civil"], 120)
    assert mixed != pure, "the reload came too late to be seen by the running request"
    assert mixed[:20] == pure[:20]

    follow = [*text, *mixed]
    seen = live.mark()
    for cached in (0, 256):
        check(live, oracle, follow, lora(name, number, folder.path), tiny.adapters["legal"], cached)
    assert seen("hit_tokens") == 256

    # KV from before the reload is right for the old weights, mixed KV for none.
    folder.put(tiny.adapters["civil"])
    check(live, oracle, follow, reload, tiny.adapters["civil"], 128)


def test_files_replaced_with_size_mtime_and_inode_kept(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir
) -> None:
    text = prompt(310, LENGTH)
    civil, legal = tiny.adapters["civil"], tiny.adapters["legal"]
    ordinary, inplace = (lora("unseen", 11, folder.path, load_inplace=f) for f in (False, True))
    check(live, oracle, text, ordinary, civil, 0)
    folder.put_unseen(legal)
    # Nobody asked for a look at the files: the loaded weights go on, as in plain vLLM.
    check(live, oracle, text, ordinary, civil, HIT)
    check(live, oracle, text, inplace, legal, 0)
    check(live, oracle, text, ordinary, legal, HIT)


def test_an_inplace_request_without_a_change_keeps_its_kv(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir
) -> None:
    text = prompt(311, LENGTH)
    inplace = lora("same", 12, folder.path, load_inplace=True)
    seen = live.mark()
    for cached in (0, HIT, HIT):
        check(live, oracle, text, inplace, tiny.adapters["civil"], cached)
    folder.put(tiny.adapters["civil"])
    check(live, oracle, text, inplace, tiny.adapters["civil"], HIT)
    assert seen("hit_tokens") == 3 * HIT


def test_add_lora_in_place_between_requests(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir
) -> None:
    text = prompt(312, LENGTH)
    civil, legal = tiny.adapters["civil"], tiny.adapters["legal"]
    ordinary, inplace = (lora("rpc", 13, folder.path, load_inplace=f) for f in (False, True))
    check(live, oracle, text, ordinary, civil, 0)
    check(live, oracle, text, ordinary, civil, HIT)
    folder.put(legal)
    assert live.llm.llm_engine.add_lora(inplace)
    assert live.ledger.identity(13) is None, "believed before a worker reported"
    check(live, oracle, text, ordinary, legal, 0)
    check(live, oracle, text, ordinary, legal, HIT)
    folder.put(civil)
    assert live.llm.llm_engine.add_lora(inplace)
    check(live, oracle, text, ordinary, civil, HIT)


def test_a_failed_add_lora_in_place_leaves_the_old_weights_and_kv(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir
) -> None:
    text = prompt(313, LENGTH)
    request = lora("broken", 14, folder.path)
    check(live, oracle, text, request, tiny.adapters["civil"], 0)
    folder.damage()
    with pytest.raises(Exception, match=r"(?i)safetensor|header|broken"):
        live.llm.llm_engine.add_lora(lora("broken", 14, folder.path, load_inplace=True))
    check(live, oracle, text, request, tiny.adapters["civil"], HIT)


def test_host_eviction_then_changed_files_then_an_ordinary_load(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir
) -> None:
    text = prompt(314, LENGTH)
    civil, legal = tiny.adapters["civil"], tiny.adapters["legal"]
    request = lora("evicted", 15, folder.path)
    check(live, oracle, text, request, civil, 0)
    for number, name in enumerate(("legal", "tax", "patent"), start=16):
        live.ask(prompt(number, 40), lora(f"other-{name}", number, tiny.adapters[name]), n=1)
    assert 15 not in live.llm.llm_engine.list_loras()
    folder.put_unseen(legal)
    check(live, oracle, text, request, legal, 0)
    check(live, oracle, text, request, legal, HIT)


def test_unload_then_changed_files_then_an_ordinary_load(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir
) -> None:
    text = prompt(315, LENGTH)
    civil, legal = tiny.adapters["civil"], tiny.adapters["legal"]
    request = lora("unloaded", 20, folder.path)
    check(live, oracle, text, request, civil, 0)
    assert live.llm.llm_engine.remove_lora(20)
    folder.put(legal)
    check(live, oracle, text, request, legal, 0)
    assert live.llm.llm_engine.remove_lora(20)
    folder.put(civil)
    check(live, oracle, text, request, civil, HIT)


def test_a_reload_while_requests_of_both_contents_wait(
    live: Engine, tiny: TinyModel, oracle: Oracle, folder: AdapterDir
) -> None:
    """All requests queued after the reload get the new weights, none a mixture."""
    texts = [prompt(320 + i, LENGTH) for i in range(4)]
    ordinary, inplace = (lora("queue", 21, folder.path, load_inplace=f) for f in (False, True))
    for text in texts:
        check(live, oracle, text, ordinary, tiny.adapters["civil"], 0)
    folder.put(tiny.adapters["legal"])
    seen = live.mark()
    answers = live.ask_all([(texts[0], inplace), *((text, ordinary) for text in texts[1:])])
    assert answers[0].tokens == oracle(texts[0], tiny.adapters["legal"])
    assert answers[0].cached == 0
    for text, answer in zip(texts[1:], answers[1:], strict=True):
        wants = {oracle(text, tiny.adapters[kind]) for kind in ("civil", "legal")}
        assert answer.tokens in wants
    # Whatever was stored meanwhile is stored under what it was computed with.
    for text in texts:
        answer = live.ask(text, ordinary)
        assert answer.tokens == oracle(text, tiny.adapters["legal"])
    assert seen("hit_tokens") > 0
