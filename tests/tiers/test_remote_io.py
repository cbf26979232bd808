"""Background traffic: what is reported, in which order, and who goes first."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elora_connector.tiers.base import ValueSpec
from elora_connector.tiers.host import SlotRef
from elora_connector.tiers.remote_io import RemoteIO, Value
from tests.support.faulty_tier import FaultyTier, Hook
from tests.tiers.values import NBYTES, eventually, make_spec, payload_of

SLOTS = 32
WAIT_S = 30.0
FOREVER_S = 600.0


class Rig:
    """A `RemoteIO` over a faulty store, with slots as plain memory."""

    def __init__(self, hook: Hook | None, threads: int, **kwargs: Any) -> None:
        self.tier = FaultyTier(hook=hook)
        self.memory = [bytearray(NBYTES) for _ in range(SLOTS)]
        self.io = RemoteIO(self.tier, lambda slot: memoryview(self.memory[slot]), threads, **kwargs)
        self._reads: list[tuple[int, int]] = []
        self._writes: list[tuple[SlotRef, bool]] = []

    def values(self, *indices: int) -> list[Value]:
        """Chunk i lives in slot i."""
        return [Value(SlotRef(i, 1), make_spec(i)) for i in indices]

    def store(self, *indices: int) -> None:
        for i in indices:
            self.tier.hook, hook = None, self.tier.hook
            assert self.tier.write(make_spec(i), memoryview(payload_of(make_spec(i)))).ok
            self.tier.hook = hook

    def fill(self, *indices: int) -> None:
        for i in indices:
            self.memory[i][:] = payload_of(make_spec(i))

    def reads(self, count: int) -> list[tuple[int, int]]:
        assert eventually(lambda: self._take() and len(self._reads) >= count, WAIT_S)
        return self._reads

    def writes(self, count: int) -> dict[int, bool]:
        assert eventually(lambda: self._take() and len(self._writes) >= count, WAIT_S)
        assert len({ref.slot for ref, _ in self._writes}) == len(self._writes) == count
        return {ref.slot: ok for ref, ok in self._writes}

    def _take(self) -> bool:
        self._reads += self.io.take_reads()
        self._writes += self.io.take_writes()
        return True


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def rig(hook: Hook | None = None, threads: int = 3, **kwargs: Any) -> Rig:
        made.append(Rig(hook, threads, **kwargs))
        return made[-1]

    yield rig
    for each in made:
        each.io.close(0)


def failing(operation: str, *specs: ValueSpec) -> Hook:
    keys = {spec.key for spec in specs}
    return lambda op, asked: "oom" if op == operation and keys & set(asked) else None


@pytest.mark.parametrize("threads", [1, 3, 40])
def test_a_read_fills_every_slot(make: Callable[..., Rig], threads: int) -> None:
    rig = make(threads=threads)
    rig.store(*range(20))
    rig.io.read(7, rig.values(*range(20)))
    assert rig.reads(1) == [(7, 20)]
    assert rig.memory[:20] == [payload_of(make_spec(i)) for i in range(20)]
    assert not rig.io.busy
    read = [keys for op, keys in rig.tier.calls if op == "read_into"]
    assert sorted(read) == sorted((make_spec(i).key,) for i in range(20))


def test_a_failure_ends_the_rest_of_its_job(make: Callable[..., Rig]) -> None:
    rig = make(failing("read_into", make_spec(4)), threads=1)
    rig.store(*range(10))
    rig.io.read(1, rig.values(*range(10)))
    rig.io.read(2, rig.values(5, 6))
    assert rig.reads(2) == [(1, 4), (2, 2)]
    asked = [keys[0] for op, keys in rig.tier.calls if op == "read_into"]
    assert asked == [make_spec(i).key for i in (0, 1, 2, 3, 4, 5, 6)]


def test_good_values_count_up_to_the_first_bad_one(make: Callable[..., Rig]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(20):
        rig = make(threads=4)
        there = [draw.random() < 0.9 for _ in range(20)]
        rig.store(*(i for i in range(20) if there[i]))
        rig.io.read(3, rig.values(*range(20)))
        assert rig.reads(1) == [(3, [*there, False].index(False))]


def test_nothing_to_read_ends_at_once(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.io.read(5, [])
    assert rig.io.take_reads() == [(5, 0)]


def test_a_store_that_raises_costs_the_job_and_no_more(make: Callable[..., Rig]) -> None:
    def broken(op: str, keys: tuple[str, ...]) -> str | None:
        if keys == (make_spec(2).key,):
            raise RuntimeError("a defect of a store")
        return None

    rig = make(broken, threads=2)
    rig.store(*range(6))
    rig.io.read(1, rig.values(0, 1, 2, 3))
    assert rig.reads(1)[0][1] <= 2
    rig.io.read(2, rig.values(4, 5))
    assert rig.reads(2)[1] == (2, 2)


def test_writes_are_sent_in_order_and_reported(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fill(*range(12))
    rig.io.write(rig.values(*range(8)))
    rig.io.write(rig.values(*range(8, 12)))
    rig.io.refuse([SlotRef(20, 1)])
    assert rig.writes(13) == dict.fromkeys(range(12), True) | {20: False}
    written = [keys[0] for op, keys in rig.tier.calls if op == "write"]
    assert written == [make_spec(i).key for i in range(12)]
    assert rig.tier.raw(make_spec(11).key) is not None


def test_nothing_is_written_below_a_hole(make: Callable[..., Rig]) -> None:
    """Chunk i is the parent of chunk i + 1."""
    rig = make(failing("write", make_spec(2)))
    rig.fill(*range(6))
    rig.io.write(rig.values(*range(5)))
    assert rig.writes(5) == {0: True, 1: True, 2: False, 3: False, 4: False}
    written = [keys[0] for op, keys in rig.tier.calls if op == "write"]
    assert written == [make_spec(i).key for i in (0, 1, 2)]
    rig.tier.hook = None
    rig.io.write([Value(SlotRef(i + 10, 1), make_spec(i)) for i in (2, 3)])
    assert rig.writes(7)[13], "once the parent is there its children are written again"


def test_a_value_sent_behind_a_parent_that_fails_does_not_count(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a pipeline: all are sent before the first answer is known."""
    rig = make(failing("write", make_spec(1)))
    one_by_one = rig.tier.write_many
    monkeypatch.setattr(rig.tier, "write_many", lambda items: one_by_one(list(items)))
    gate = threading.Event()
    hook = rig.tier.hook

    def gated(op: str, keys: tuple[str, ...]) -> str | None:
        assert gate.wait(WAIT_S)
        return hook(op, keys) if hook else None

    rig.tier.hook = gated
    rig.fill(*range(5))
    rig.io.write(rig.values(9))  # holds the writer until the others are queued together
    rig.io.write(rig.values(0, 1, 2, 3))
    gate.set()
    assert rig.writes(5) == {9: True, 0: True, 1: False, 2: False, 3: False}
    assert rig.tier.raw(make_spec(3).key) is not None, "it was sent"


def test_writes_stand_back_while_a_read_is_open(make: Callable[..., Rig]) -> None:
    reading, go = threading.Event(), threading.Event()
    early: list[str] = []

    def hook(op: str, keys: tuple[str, ...]) -> str | None:
        if op == "read_into":
            reading.set()
            assert go.wait(WAIT_S)
        elif op == "write" and not go.is_set():
            early.append(keys[0])
        return None

    rig = make(hook, patience_s=FOREVER_S)
    rig.store(9)
    rig.fill(0, 1)
    rig.io.read(1, rig.values(9))
    assert reading.wait(WAIT_S)
    rig.io.write(rig.values(0, 1))
    assert rig.io.busy
    go.set()
    assert rig.writes(2) == {0: True, 1: True}
    assert rig.reads(1) == [(1, 1)]
    assert early == []


def test_a_batch_of_writes_ends_when_a_read_begins(make: Callable[..., Rig]) -> None:
    writing, reading, go = threading.Event(), threading.Event(), threading.Event()
    before_go: list[str] = []

    def hook(op: str, keys: tuple[str, ...]) -> str | None:
        if op == "read_into":
            reading.set()
            assert go.wait(WAIT_S)
        elif op == "write":
            writing.set()
            assert reading.wait(WAIT_S)
            if not go.is_set():
                before_go.append(keys[0])
        return None

    rig = make(hook, patience_s=FOREVER_S)
    rig.store(9)
    rig.fill(0, 1, 2)
    rig.io.write(rig.values(0, 1, 2))
    assert writing.wait(WAIT_S)
    rig.io.read(1, rig.values(9))
    assert eventually(lambda: rig.io.take_writes() == [(SlotRef(0, 1), True)], WAIT_S)
    go.set()
    assert rig.writes(2) == {1: True, 2: True}
    assert before_go == [make_spec(0).key], "only the one that was on its way"


def test_writes_do_not_starve(make: Callable[..., Rig]) -> None:
    reading, go = threading.Event(), threading.Event()

    def hook(op: str, keys: tuple[str, ...]) -> str | None:
        if op == "read_into":
            reading.set()
            assert go.wait(WAIT_S)
        return None

    rig = make(hook, patience_s=0.0)
    rig.store(9)
    rig.fill(0, 1, 2)
    rig.io.read(1, rig.values(9))
    assert reading.wait(WAIT_S)
    rig.io.write(rig.values(0, 1, 2))
    assert rig.writes(3) == {0: True, 1: True, 2: True}
    assert rig.io.busy, "the read is still open"
    go.set()
    assert rig.reads(1) == [(1, 1)]


def test_closing_gives_up_what_is_queued(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fill(*range(4))
    started, go = threading.Event(), threading.Event()

    def hook(op: str, keys: tuple[str, ...]) -> str | None:
        started.set()
        assert go.wait(WAIT_S)
        return None

    rig.tier.hook = hook
    rig.io.write(rig.values(0, 1, 2, 3))
    assert started.wait(WAIT_S)
    assert rig.io.close(0.0) == 4
    go.set()
    rig.io._writer.join(WAIT_S)
    assert not rig.io._writer.is_alive()
    assert [op for op, _ in rig.tier.calls].count("write") == 1
