"""The adapter agent on a real vLLM worker: loading, placing, refusing, reporting."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elora_connector import plugin
from elora_connector.integration.vllm import adapter_loader, compat, identity
from elora_connector.integration.vllm.adapters import (
    AdapterAgent,
    AdapterOrder,
    AdapterReport,
    AdapterState,
    Grant,
    OrderResult,
    Placing,
    Verify,
)
from tests.support.inproc import adapter, core, engine, generate, lora_manager
from tests.support.tiny import Shape, TinyModel, make_adapter, make_tiny_model

pytestmark = pytest.mark.engine

NONE: frozenset[int] = frozenset()
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> Iterator[Any]:
    plugin.register()
    with engine(tiny.model) as made:
        yield made


@pytest.fixture(scope="module")
def oracle(llm: Any, tiny: TinyModel) -> dict[str, tuple[int, ...]]:
    """Tokens of every adapter as plain vLLM computes them."""
    agent_free = lora_manager(llm)
    tokens = {
        name: generate(llm, [adapter(name, 900 + i, path)])[0]
        for i, (name, path) in enumerate(tiny.adapters.items())
    }
    agent_free.remove_all_adapters()
    assert len(set(tokens.values())) == len(tokens)
    return tokens


@pytest.fixture
def agent(llm: Any, oracle: dict[str, tuple[int, ...]]) -> Iterator[AdapterAgent]:
    made = AdapterAgent.attach()
    assert made is not None
    assert AdapterAgent.attach() is made
    yield made
    made.close()
    lora_manager(llm).remove_all_adapters()


class Reads:
    """Counts reads of weights; `hold` makes them wait."""

    def __init__(self, agent: AdapterAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        read = agent._loader._read

        def spy(request: Any) -> Any:
            self.names.append(request.lora_name)
            gate = self.gates.get(request.lora_name)
            if gate is not None:
                assert gate.wait(DEADLINE_S)
            return read(request)

        monkeypatch.setattr(agent._loader, "_read", spy)

    def hold(self, name: str) -> threading.Event:
        self.gates[name] = threading.Event()
        return self.gates[name]


@pytest.fixture
def reads(agent: AdapterAgent, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(agent, monkeypatch)


def order(seq: int, request: Any, **options: Any) -> AdapterOrder:
    return AdapterOrder(seq, request.lora_name, request.lora_int_id, request, **options)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.002)


def settle(agent: AdapterAgent, *orders: AdapterOrder) -> AdapterReport:
    """Submit, then step without a batch until everything is acknowledged."""
    agent.submit(orders, NONE)
    results: list[OrderResult] = []

    def done() -> bool:
        agent.advance(NONE)
        nonlocal report
        report = agent.report()
        results.extend(report.results)
        return report.acked_seq >= orders[-1].seq

    report = agent.report()
    until(done)
    return AdapterReport(
        report.acked_seq, report.rpc_seq, report.states, tuple(results), report.changed
    )


def background_done(agent: AdapterAgent) -> None:
    futures = [p.future for p in agent._pending.values() if p.future is not None]
    until(lambda: all(future.done() for future in futures))


def states(agent: AdapterAgent) -> dict[int, AdapterState]:
    return {state.lora_id: state for state in agent.report().states}


def copy_adapter(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    old = time.time() - 3600
    for file in target.iterdir():
        os.utime(file, (old, old))
    return target


def rewrite_in_place(target: Path, source: Path) -> None:
    """Other bytes in the same files: size, mtime and inode stay as they were."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        file = target / name
        before = file.stat()
        content = (source / name).read_bytes()
        assert len(content) == before.st_size
        with open(file, "r+b") as stream:
            stream.write(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )


def wait_settled(path: Path) -> None:
    until(lambda: identity.is_settled(identity.stat_key(path), time.time_ns()))


def digest_of(path: Path) -> bytes:
    return identity.adapter_digest(path, lora_dtype="float32", target_modules=())


# Loading


def test_messages_survive_pickle(tiny: TinyModel) -> None:
    message = order(3, adapter("civil", 1, tiny.adapters["civil"]), evict=(2,))
    assert pickle.loads(pickle.dumps(message)) == message
    report = AdapterReport(3, 1, (AdapterState(1, "civil", bytes(32), 1, True),), (), True)
    assert pickle.loads(pickle.dumps(report)) == report


def test_background_load_is_committed_after_the_forward(
    llm: Any, agent: AdapterAgent, tiny: TinyModel, oracle: dict[str, tuple[int, ...]]
) -> None:
    civil = adapter("civil", 1, tiny.adapters["civil"])
    agent.submit([order(1, civil)], NONE)
    background_done(agent)
    assert lora_manager(llm).list_adapters() == set()
    assert agent.report().acked_seq == 0

    agent.advance(NONE)
    report = agent.report()
    assert report.acked_seq == 1
    assert report.changed
    (state,) = report.states
    assert (state.lora_id, state.name, state.in_slot) == (1, "civil", True)
    assert state.digest == digest_of(tiny.adapters["civil"])
    assert state.nbytes > 10_000
    (result,) = report.results
    assert (result.seq, result.ok, result.error) == (1, True, "")
    assert result.seconds > 0
    assert agent.load_seq(1) == state.load_seq

    again = agent.report()
    assert not again.changed
    assert again.results == ()
    assert generate(llm, [civil]) == [oracle["civil"]]


def test_a_right_model_finishes_at_once(agent: AdapterAgent, tiny: TinyModel, reads: Reads) -> None:
    civil = adapter("civil", 1, tiny.adapters["civil"])
    settle(agent, order(1, civil, activate=False))
    assert not states(agent)[1].in_slot
    agent.submit([order(2, civil)], NONE)
    agent.advance(NONE)
    assert agent.report().acked_seq == 2
    assert states(agent)[1].in_slot
    agent.submit([order(3, civil), order(3, civil)], NONE)
    agent.advance(NONE)
    (result,) = agent.report().results
    assert result == OrderResult(3, 1, True, "", 0.0)
    assert reads.names == ["civil"]


def test_changed_files_replace_the_weights_in_place(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    oracle: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    x = adapter("x", 5, path)
    first = settle(agent, order(1, x)).states[0]
    assert generate(llm, [x]) == [oracle["civil"]]
    rewrite_in_place(path, tiny.adapters["legal"])

    settle(agent, order(2, x))
    assert states(agent)[5] == first

    second = settle(agent, order(3, x, activate=False, verify=Verify.IF_CHANGED)).states[0]
    assert second.in_slot, "what replaces an active adapter is active"
    assert second.digest == digest_of(tiny.adapters["legal"]) != first.digest
    assert second.load_seq > first.load_seq
    assert generate(llm, [x]) == [oracle["legal"]]


def test_unchanged_files_are_not_read_again(
    agent: AdapterAgent,
    tiny: TinyModel,
    reads: Reads,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    wait_settled(path)
    x = adapter("x", 5, path, load_inplace=True)
    settle(agent, order(1, x))
    hashed: list[Path] = []
    real = identity._add_file
    monkeypatch.setattr(
        identity, "_add_file", lambda digest, file: (hashed.append(file), real(digest, file))
    )

    settle(agent, order(2, x, verify=Verify.IF_CHANGED))
    assert hashed == []
    settle(agent, order(3, x, verify=Verify.ALWAYS))
    assert [file.name for file in hashed] == ["adapter_config.json", "adapter_model.safetensors"]
    assert reads.names == ["x"]

    # Touched, but the same content: hashed once, then known again.
    os.utime(path / "adapter_model.safetensors")
    wait_settled(path)
    hashed.clear()
    settle(agent, order(4, x, verify=Verify.IF_CHANGED))
    assert len(hashed) == 2
    settle(agent, order(5, x, verify=Verify.IF_CHANGED))
    assert len(hashed) == 2
    assert reads.names == ["x"]


def test_a_fresh_file_is_hashed_until_its_stat_can_be_trusted(
    agent: AdapterAgent, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    x = adapter("x", 5, tiny.adapters["civil"])
    monkeypatch.setattr(adapter_loader, "is_settled", lambda _key, _now: False)
    settle(agent, order(1, x))
    hashes: list[Path] = []
    real = agent._loader._hash
    monkeypatch.setattr(
        agent._loader, "_hash", lambda request, path: (hashes.append(path), real(request, path))[1]
    )
    settle(agent, order(2, x, verify=Verify.IF_CHANGED))
    assert len(hashes) == 1
    monkeypatch.setattr(adapter_loader, "is_settled", lambda _key, _now: True)
    settle(agent, order(3, x, verify=Verify.IF_CHANGED))
    settle(agent, order(4, x, verify=Verify.IF_CHANGED))
    assert len(hashes) == 2
    assert reads.names == ["x"]


def test_same_id_with_another_path_is_loaded_again(agent: AdapterAgent, tiny: TinyModel) -> None:
    settle(agent, order(1, adapter("x", 5, tiny.adapters["civil"])))
    settle(agent, order(2, adapter("x", 5, tiny.adapters["legal"])))
    assert states(agent)[5].digest == digest_of(tiny.adapters["legal"])


# Bad adapters


def oversized(path: Path, _: TinyModel) -> str:
    make_adapter(path, 7, rank=16)
    return "LoRA rank 16 is greater than max_lora_rank 8"


def missing(path: Path, _: TinyModel) -> str:
    return "there is no adapter_config.json"


def no_weights(path: Path, tiny: TinyModel) -> str:
    copy_adapter(tiny.adapters["civil"], path)
    (path / "adapter_model.safetensors").unlink()
    return "there is no adapter_model.safetensors"


def bad_json(path: Path, tiny: TinyModel) -> str:
    copy_adapter(tiny.adapters["civil"], path)
    (path / "adapter_config.json").write_text("{oops")
    return "adapter_config.json is not valid JSON"


def truncated(path: Path, tiny: TinyModel) -> str:
    copy_adapter(tiny.adapters["civil"], path)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return "the weight file is damaged"


def wrong_modules(path: Path, tiny: TinyModel) -> str:
    copy_adapter(tiny.adapters["civil"], path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    return "Adapter bias is not supported"


def too_wide(path: Path, _: TinyModel) -> str:
    make_adapter(path, 7, shape=Shape(hidden=512))
    return "its weights do not fit the model"


BAD = [oversized, missing, no_weights, bad_json, truncated, wrong_modules, too_wide]


@pytest.mark.parametrize("spoil", BAD)
def test_a_bad_adapter_is_a_result_not_an_exception(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    oracle: dict[str, tuple[int, ...]],
    tmp_path: Path,
    spoil: Callable[[Path, TinyModel], str],
) -> None:
    cause = spoil(tmp_path / "bad", tiny)
    bad = adapter("bad", 6, tmp_path / "bad")
    legal = adapter("legal", 2, tiny.adapters["legal"])
    report = settle(agent, order(1, bad), order(2, legal))
    failed, fine = sorted(report.results, key=lambda r: r.seq)
    assert not failed.ok
    assert failed.error.startswith("adapter 'bad': ")
    assert cause in failed.error
    assert failed.error.endswith(f"(path {tmp_path / 'bad'})")
    assert "\n" not in failed.error
    assert fine.ok
    assert set(states(agent)) == {2} == lora_manager(llm).list_adapters()
    assert None in lora_manager(llm)._adapter_manager.lora_index_to_id
    assert generate(llm, [legal]) == [oracle["legal"]]


@pytest.mark.parametrize("spoil", [truncated, too_wide])
def test_a_bad_reload_leaves_the_old_weights(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    oracle: dict[str, tuple[int, ...]],
    tmp_path: Path,
    spoil: Callable[[Path, TinyModel], str],
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    before = settle(agent, order(1, adapter("x", 5, path))).states
    shutil.rmtree(path)
    spoil(path, tiny)
    report = settle(agent, order(2, adapter("x", 5, path), verify=Verify.IF_CHANGED))
    assert not report.results[0].ok
    assert report.states == before
    assert generate(llm, [adapter("x", 5, path)]) == [oracle["civil"]]


def test_files_that_vanish_while_loading(
    agent: AdapterAgent, tiny: TinyModel, tmp_path: Path, reads: Reads
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    gate = reads.hold("x")
    agent.submit([order(1, adapter("x", 5, path))], NONE)
    until(lambda: reads.names == ["x"])
    shutil.rmtree(path)
    gate.set()
    background_done(agent)
    agent.advance(NONE)
    (result,) = agent.report().results
    assert not result.ok
    assert "there is no adapter_config.json" in result.error


def test_files_that_change_while_loading_are_read_again(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    oracle: dict[str, tuple[int, ...]],
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    read = agent._loader._read
    count = 0

    def racing(request: Any) -> Any:
        nonlocal count
        count += 1
        if count == 1:
            rewrite_in_place(path, tiny.adapters["legal"])
        return read(request)

    monkeypatch.setattr(agent._loader, "_read", racing)
    x = adapter("x", 5, path)
    report = settle(agent, order(1, x))
    assert count == 2
    assert report.states[0].digest == digest_of(tiny.adapters["legal"])
    assert generate(llm, [x]) == [oracle["legal"]]


def test_files_that_never_rest_are_refused(
    agent: AdapterAgent, tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    read = agent._loader._read
    other = ["legal", "civil"]

    def racing(request: Any) -> Any:
        rewrite_in_place(path, tiny.adapters[other[0]])
        other.reverse()
        return read(request)

    monkeypatch.setattr(agent._loader, "_read", racing)
    (result,) = settle(agent, order(1, adapter("x", 5, path))).results
    assert not result.ok
    assert "keep changing" in result.error


# Placing


def test_ordered_adapters_leave_and_others_stay(
    llm: Any, agent: AdapterAgent, tiny: TinyModel
) -> None:
    a, b, c = (adapter(n, i, p) for i, (n, p) in enumerate(tiny.adapters.items(), 1))
    settle(agent, order(1, a), order(2, b))
    settle(agent, order(3, c, displace=(2,)))
    assert {i: s.in_slot for i, s in states(agent).items()} == {1: True, 2: False, 3: True}
    d = adapter("again", 4, tiny.adapters["civil"])
    settle(agent, order(4, d, evict=(1,)))
    assert {i: s.in_slot for i, s in states(agent).items()} == {2: False, 3: True, 4: True}


def test_missing_room_takes_the_lru_and_never_a_protected_one(
    agent: AdapterAgent, tiny: TinyModel
) -> None:
    path = tiny.adapters["civil"]
    requests = {i: adapter(f"a{i}", i, path) for i in range(1, 6)}
    # One after the other: the order of commits is the order of use.
    settle(agent, order(1, requests[1]))
    settle(agent, order(2, requests[2]))

    agent.submit([order(3, requests[3])], frozenset({1}))
    background_done(agent)
    agent.advance(NONE)
    assert {i: s.in_slot for i, s in states(agent).items()} == {1: True, 2: False, 3: True}

    agent.submit([order(4, requests[4])], frozenset({1, 2, 3}))
    background_done(agent)
    agent.advance(NONE)
    assert set(states(agent)) == {1, 2, 3}
    assert agent.report().acked_seq == 3, "no room: it waits"
    agent.submit([], frozenset({1, 3}))
    agent.advance(NONE)
    assert agent.report().acked_seq == 3, "a host place came free, a slot did not"
    agent.submit([], frozenset({3}))
    agent.advance(NONE)
    assert agent.report().acked_seq == 4
    assert {i: s.in_slot for i, s in states(agent).items()} == {2: False, 3: True, 4: True}


@pytest.mark.parametrize("leaves", ["evict", "displace"])
def test_an_adapter_of_the_batch_is_not_taken_even_by_order(
    agent: AdapterAgent, tiny: TinyModel, leaves: str
) -> None:
    path = tiny.adapters["civil"]
    settle(agent, order(1, adapter("a", 1, path)), order(2, adapter("b", 2, path)))
    agent.submit([order(3, adapter("c", 3, path), **{leaves: (1,)})], NONE)
    background_done(agent)
    agent.advance(frozenset({1}))
    assert set(states(agent)) == {1, 2}
    assert states(agent)[1].in_slot
    agent.advance(frozenset({2}))
    report = agent.report()
    assert report.acked_seq == 3
    assert [s.lora_id for s in report.states if s.in_slot] == [2, 3]


def test_weights_of_the_batch_are_replaced_when_the_next_step_begins(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    oracle: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    x = adapter("x", 5, path)
    before = settle(agent, order(1, x)).states
    rewrite_in_place(path, tiny.adapters["legal"])
    agent.submit([order(2, x, verify=Verify.ALWAYS)], NONE)
    background_done(agent)
    agent.advance(frozenset({5}))
    assert agent.report().states == before
    assert generate(llm, [x]) == [oracle["legal"]]
    assert agent.report().acked_seq == 2


def test_a_slow_load_holds_up_only_what_depends_on_it(
    agent: AdapterAgent, tiny: TinyModel, reads: Reads
) -> None:
    path = tiny.adapters["civil"]
    gate = reads.hold("slow")
    agent.submit(
        [
            order(1, adapter("slow", 1, path), evict=(9,)),
            order(2, adapter("fast", 2, path)),
            order(3, adapter("later", 3, path), displace=(1,)),
        ],
        NONE,
    )
    until(lambda: bool(agent.advance(NONE) or 2 in states(agent)))
    until(lambda: agent._pending[3].future is not None and agent._pending[3].future.done())
    agent.advance(NONE)
    assert set(states(agent)) == {2}
    assert agent.report().acked_seq == 0
    gate.set()
    until(lambda: bool(agent.advance(NONE) or agent.report().acked_seq == 3))
    assert {i: s.in_slot for i, s in states(agent).items()} == {1: False, 2: True, 3: True}


def test_an_order_takes_no_place_before_its_grant(
    agent: AdapterAgent, tiny: TinyModel, reads: Reads
) -> None:
    path = tiny.adapters["civil"]
    settle(agent, order(1, adapter("a", 1, path)), order(2, adapter("b", 2, path)))
    gate = reads.hold("slow")
    slow = order(3, adapter("slow", 3, path), placing=Placing.ON_GRANT, activate=False)
    read = order(4, adapter("read", 4, path), placing=Placing.ON_GRANT, activate=False)
    agent.submit([slow, read], NONE)
    until(lambda: bool(agent.advance(NONE) or agent.report().read == (4,)))
    assert set(states(agent)) == {1, 2}
    report = agent.report()
    assert (report.last_seq, report.open, report.acked_seq) == (4, (3, 4), 2)
    agent.submit([], NONE, [Grant(4, True, (1,), ())])
    agent.advance(NONE)
    assert {i: s.in_slot for i, s in states(agent).items()} == {2: True, 4: True}
    assert agent.report().open == (3,), "an order that hangs holds up no other"
    assert sorted(reads.names) == ["a", "b", "read", "slow"]
    gate.set()
    until(lambda: bool(agent.advance(NONE) or agent.report().read == (3,)))
    agent.submit([], NONE, [Grant(3, True, (), (2,))])
    agent.advance(NONE)
    assert {i: s.in_slot for i, s in states(agent).items()} == {2: False, 3: True, 4: True}


def test_what_leaves_before_its_grant_is_read_again(
    agent: AdapterAgent, tiny: TinyModel, reads: Reads
) -> None:
    """An order finds its adapter in host memory, on its way out for an earlier one."""
    a, b = (adapter(name, i, tiny.adapters["civil"]) for i, name in ((1, "a"), (2, "b")))
    settle(agent, order(1, a))
    gate = reads.hold("a")
    again = order(3, a, placing=Placing.ON_GRANT, activate=False)
    agent.submit([order(2, b, evict=(1,)), again], NONE)
    assert agent.report().read == (3,), "it is there still"
    until(lambda: bool(agent.advance(NONE) or set(states(agent)) == {2}))
    assert agent.report().read == (), "its grant would wait for a read"
    gate.set()
    until(lambda: bool(agent.advance(NONE) or agent.report().read == (3,)))
    agent.submit([], NONE, [Grant(3, True, (), (2,))])
    agent.advance(NONE)
    assert {i: s.in_slot for i, s in states(agent).items()} == {1: True, 2: False}
    assert reads.names == ["a", "b", "a"]


def test_a_second_look_ends_quietly_when_the_adapter_has_left(
    agent: AdapterAgent, tiny: TinyModel, reads: Reads
) -> None:
    a = adapter("a", 1, tiny.adapters["civil"])
    settle(agent, order(1, a))
    look = order(2, a, verify=Verify.ALWAYS, placing=Placing.IN_PLACE, activate=False)
    out = AdapterOrder(3, "", 0, None, evict=(1,), activate=False)
    agent.submit([look, out], NONE)
    background_done(agent)
    agent.advance(frozenset({1}))
    assert set(states(agent)) == {1}, "the batch keeps its adapters"
    assert settle(agent, out).acked_seq == 3
    assert states(agent) == {}
    assert reads.names == ["a"]


def test_orders_for_one_adapter_are_loaded_one_after_the_other(
    agent: AdapterAgent, tiny: TinyModel, reads: Reads
) -> None:
    gate = reads.hold("x")
    agent.submit(
        [
            order(1, adapter("x", 5, tiny.adapters["civil"])),
            order(2, adapter("x", 5, tiny.adapters["legal"])),
        ],
        NONE,
    )
    until(lambda: reads.names == ["x"])
    assert agent._pending[2].future is None
    gate.set()
    until(lambda: bool(agent.advance(NONE) or agent.report().acked_seq == 2))
    assert reads.names == ["x", "x"]
    assert states(agent)[5].digest == digest_of(tiny.adapters["legal"])


def test_an_adapter_taken_out_behind_an_order_is_loaded_for_it(
    llm: Any, agent: AdapterAgent, tiny: TinyModel
) -> None:
    civil = adapter("civil", 1, tiny.adapters["civil"])
    settle(agent, order(1, civil))
    agent.submit([order(2, civil)], NONE)
    core(llm).remove_lora(1)
    until(lambda: bool(agent.advance(NONE) or agent.report().acked_seq == 2))
    assert states(agent)[1].in_slot


def test_a_pinned_adapter_stays_pinned_over_a_reload(
    llm: Any, agent: AdapterAgent, tiny: TinyModel, tmp_path: Path
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    settle(agent, order(1, adapter("x", 5, path)), order(2, adapter("b", 2, path)))
    core(llm).pin_lora(5)
    rewrite_in_place(path, tiny.adapters["legal"])
    settle(agent, order(3, adapter("x", 5, path), verify=Verify.ALWAYS))
    settle(agent, order(4, adapter("c", 3, path), displace=(5,)))
    assert {i: s.in_slot for i, s in states(agent).items()} == {2: False, 3: True, 5: True}


# vLLM's own path


def test_a_step_uses_what_the_background_has_read(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    reads: Reads,
    oracle: dict[str, tuple[int, ...]],
) -> None:
    civil = adapter("civil", 1, tiny.adapters["civil"])
    gate = reads.hold("civil")
    agent.submit([order(1, civil)], NONE)
    until(lambda: reads.names == ["civil"])
    threading.Timer(0.05, gate.set).start()
    assert generate(llm, [civil]) == [oracle["civil"]]
    agent.advance(NONE)
    assert reads.names == ["civil"]
    assert agent.report().acked_seq == 1
    assert states(agent)[1].digest == digest_of(tiny.adapters["civil"])


def test_a_background_load_of_other_files_is_not_used(
    agent: AdapterAgent, tiny: TinyModel, tmp_path: Path
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    x = adapter("x", 5, path)
    agent.submit([order(1, x)], NONE)
    background_done(agent)
    assert agent._take_background(x) is not None
    assert agent._take_background(adapter("x", 5, tiny.adapters["civil"])) is None
    rewrite_in_place(path, tiny.adapters["legal"])
    assert agent._take_background(x) is None


def test_load_inplace_in_a_step_reads_nothing(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    reads: Reads,
    oracle: dict[str, tuple[int, ...]],
) -> None:
    civil = adapter("civil", 1, tiny.adapters["civil"], load_inplace=True)
    for _ in range(2):
        assert generate(llm, [civil]) == [oracle["civil"]]
    assert reads.names == ["civil"]
    core(llm).add_lora(civil)
    assert reads.names == ["civil", "civil"]


def test_only_calls_outside_a_step_are_counted(
    llm: Any, agent: AdapterAgent, tiny: TinyModel
) -> None:
    civil = adapter("civil", 1, tiny.adapters["civil"])
    generate(llm, [civil])
    assert agent.report().rpc_seq == 0
    core(llm).add_lora(adapter("legal", 2, tiny.adapters["legal"]))
    core(llm).pin_lora(2)
    core(llm).remove_lora(2)
    assert agent.report().rpc_seq == 3
    with pytest.raises(ValueError, match="not registered"):
        core(llm).pin_lora(2)
    report = agent.report()
    assert (report.rpc_seq, report.changed) == (4, True)


def test_a_step_evicts_neither_its_batch_nor_the_protected(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    oracle: dict[str, tuple[int, ...]],
) -> None:
    a, b, c = (adapter(n, i, p) for i, (n, p) in enumerate(tiny.adapters.items(), 1))
    settle(agent, order(1, a), order(2, b))
    # 1 is the least recently used, but protected.
    agent.submit([], frozenset({1}))
    assert generate(llm, [c]) == [oracle["tax"]]
    assert {i: s.in_slot for i, s in states(agent).items()} == {1: True, 2: False, 3: True}
    # 1 is the least recently used again, but in the batch.
    agent.submit([], NONE)
    agent.advance(NONE)
    assert generate(llm, [a, b]) == [oracle["civil"], oracle["legal"]]
    assert {i: s.in_slot for i, s in states(agent).items()} == {1: True, 2: True, 3: False}


def test_a_step_that_finds_everything_protected_still_runs(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    oracle: dict[str, tuple[int, ...]],
) -> None:
    a, b, c = (adapter(n, i, p) for i, (n, p) in enumerate(tiny.adapters.items(), 1))
    d = adapter("again", 4, tiny.adapters["civil"])
    settle(agent, order(1, a), order(2, b), order(3, c, displace=(1,)))
    agent.submit([], frozenset({1, 2, 3}))
    assert generate(llm, [c, d]) == [oracle["tax"], oracle["civil"]]
    assert {i for i, s in states(agent).items() if s.in_slot} == {3, 4}


def test_an_rpc_never_takes_a_protected_adapter(
    llm: Any, agent: AdapterAgent, tiny: TinyModel
) -> None:
    path = tiny.adapters["civil"]
    settle(agent, order(1, adapter("a", 1, path)), order(2, adapter("b", 2, path)))
    agent.submit([], frozenset({1, 2}))
    assert core(llm).add_lora(adapter("c", 3, path)) is True
    assert {i: s.in_slot for i, s in states(agent).items()} == {1: True, 2: True, 3: False}
    with pytest.raises(RuntimeError, match="all GPU slots hold adapters"):
        core(llm).pin_lora(3)
    assert 3 not in lora_manager(llm)._adapter_manager._registered_adapters.pinned_items
    agent.submit([], frozenset({1, 2, 3}))
    assert core(llm).add_lora(adapter("d", 4, path)) is True
    assert set(states(agent)) == {1, 2, 3}
    agent.submit([], frozenset({2}))
    core(llm).add_lora(adapter("d", 4, path))
    assert {i: s.in_slot for i, s in states(agent).items()} == {2: True, 3: False, 4: True}


@pytest.mark.parametrize("spoil", [missing, truncated, too_wide])
def test_a_bad_adapter_fails_the_rpc_and_leaves_nothing(
    llm: Any,
    agent: AdapterAgent,
    tiny: TinyModel,
    oracle: dict[str, tuple[int, ...]],
    tmp_path: Path,
    spoil: Callable[[Path, TinyModel], str],
) -> None:
    from vllm.exceptions import LoRAAdapterNotFoundError

    spoil(tmp_path / "bad", tiny)
    expected = LoRAAdapterNotFoundError if spoil is missing else Exception
    with pytest.raises(expected):
        core(llm).add_lora(adapter("bad", 6, tmp_path / "bad"))
    assert lora_manager(llm).list_adapters() == set()
    assert 6 not in lora_manager(llm)._adapter_manager.lora_index_to_id
    civil = adapter("civil", 1, tiny.adapters["civil"])
    assert generate(llm, [civil]) == [oracle["civil"]]


def test_an_rpc_reload_beats_an_older_background_load(
    llm: Any, agent: AdapterAgent, tiny: TinyModel, tmp_path: Path
) -> None:
    path = copy_adapter(tiny.adapters["civil"], tmp_path / "x")
    x = adapter("x", 5, path, load_inplace=True)
    agent.submit([order(1, x)], NONE)
    background_done(agent)
    rewrite_in_place(path, tiny.adapters["legal"])
    core(llm).add_lora(x)
    newest = states(agent)[5]
    assert newest.digest == digest_of(tiny.adapters["legal"])
    agent.advance(NONE)
    assert agent.report().acked_seq == 1
    assert states(agent)[5] == newest


def test_without_an_agent_vllm_is_as_it_was(
    llm: Any, agent: AdapterAgent, tiny: TinyModel, oracle: dict[str, tuple[int, ...]]
) -> None:
    agent.close()
    agent.close()
    requests = [adapter(f"a{i}", i, tiny.adapters["civil"]) for i in range(1, 5)]
    for request in requests:
        core(llm).add_lora(request)
    models = lora_manager(llm)._adapter_manager
    assert list(models._registered_adapters.order) == [2, 3, 4]
    assert list(models._active_adapters.order) == [3, 4]
    assert generate(llm, requests[:1]) == [oracle["civil"]]


def test_plugin_and_table_fit_this_vllm(llm: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugin.register()
    assert plugin.plugin_loaded()
    assert compat.is_installed()
    compat.check_table()
    manager = lora_manager(llm)
    compat.check_live(manager, manager._adapter_manager)
    assert "EloraConnector" in KVConnectorFactory._registry


def test_a_manager_without_what_we_read_is_refused() -> None:
    lora_model_manager = type("LoRAModelManager", (), {"_active_adapters": None})
    with pytest.raises(compat.UnsupportedError) as caught:
        compat.check_live(lora_model_manager())
    assert "_registered_adapters" in str(caught.value)
    assert "_active_adapters" not in str(caught.value)


# One slot, one place in host memory


@pytest.fixture(scope="module")
def small(llm: Any, oracle: Any) -> None:
    """Orders the module's two engines: only one may live at a time."""


def test_one_slot_and_one_host_place(tiny: TinyModel, oracle: dict[str, tuple[int, ...]]) -> None:
    with engine(tiny.model, max_loras=1, max_cpu_loras=1) as llm:
        agent = AdapterAgent.attach()
        assert agent is not None
        names = list(tiny.adapters)
        requests = {n: adapter(n, i, p) for i, (n, p) in enumerate(tiny.adapters.items(), 1)}
        for seq in range(1, 7):
            name = names[seq % 3]
            gone = requests[names[(seq - 1) % 3]].lora_int_id
            report = settle(agent, order(seq, requests[name], evict=(gone,)))
            assert [s.name for s in report.states] == [name]
            assert report.states[0].in_slot
            assert generate(llm, [requests[name]]) == [oracle[name]]
        agent.submit([], frozenset({requests[name].lora_int_id}))
        other = requests[names[1]]
        assert core(llm).add_lora(other) is True
        assert [s.name for s in agent.report().states] == [name]
        agent.submit([], NONE)
        core(llm).add_lora(other)
        assert [s.name for s in agent.report().states] == [other.lora_name]
        agent.close()
