"""Copies against a naive oracle, byte by byte, on generated layouts and batches."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elora_connector.errors import InvariantError, UnsupportedError
from elora_connector.transfer import cuda as cuda_module
from elora_connector.transfer import torch_copy
from elora_connector.transfer.base import ChunkCopy, CopyEngine, Ticket, block_ids
from elora_connector.transfer.cuda import CudaCopyEngine, batches, copy_engine_for
from elora_connector.transfer.host_buffer import HostBuffer
from elora_connector.transfer.paged_kv import PagedKV
from elora_connector.transfer.torch_copy import CpuCopyEngine, runs

BLOCKS, PER_CHUNK, SLOTS = 11, 3, 4

LAYOUTS = ("separate", "by_layer", "by_block", "padded", "keys_values", "mixed_pages")


@dataclass
class Rig:
    """Paged KV, host buffer and, per layer, the tensor `[num_blocks, page_bytes]` to expect."""

    paged: PagedKV
    host: HostBuffer
    pages: list[torch.Tensor]
    everything: list[torch.Tensor]

    def block(self, i: int) -> bytes:
        return b"".join(bytes(page[i].tolist()) for page in self.pages)

    def slot(self, i: int) -> bytes:
        return bytes(self.host.view(i))

    def snapshot(self) -> list[bytes]:
        """All paged memory, padding included, then all slots."""
        paged = [tensor.numpy().tobytes() for tensor in self.everything]
        return [*paged, self.host.tensor.numpy().tobytes()]


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def make_rig(layout: str, page: int, layers: int, seed: int) -> Rig:
    storages: list[torch.Tensor]
    if layout == "separate":
        storages = [noise(seed + i, BLOCKS, page) for i in range(layers)]
        pages = storages
    elif layout == "by_layer":
        storages = [noise(seed, layers, BLOCKS, page)]
        pages = list(storages[0])
    elif layout == "by_block":
        storages = [noise(seed, BLOCKS, layers, page)]
        pages = [storages[0][:, i] for i in range(layers)]
    elif layout == "padded":
        storages = [noise(seed, layers, BLOCKS, page + 3)]
        pages = [storages[0][i, :, :page] for i in range(layers)]
    elif layout == "keys_values":
        storages = [noise(seed, layers, 2, BLOCKS, page)]
        pages = list(storages[0].flatten(0, 1))
    else:
        storages = [noise(seed + i, BLOCKS, page + i) for i in range(layers)]
        pages = storages
    tensors = list(storages[0]) if layout == "keys_values" else pages
    kv_caches = {f"layer{i}": tensor for i, tensor in enumerate(tensors)}
    # Pages may be as long as the pool is: only the caller knows which is which.
    paged = PagedKV.from_tensors(kv_caches, BLOCKS, 1 if layout == "keys_values" else 0)
    host = HostBuffer(SLOTS, PER_CHUNK * paged.block_bytes, pin=False)
    host.tensor.copy_(noise(seed + 99, SLOTS, host.chunk_bytes))
    return Rig(paged, host, pages, storages)


class FakeStream:
    """Runs work at once and writes down who waited for whom."""

    log: list[str]

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        names = ("stores", "loads", "ordered")
        self.name = names[FakeStream.made % 3]
        FakeStream.made += 1
        self.priority = priority

    made = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def wait_stream(self, other: FakeStream) -> None:
        FakeStream.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        FakeStream.log.append(f"CPU waits for {self.name}")


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True
        FakeStream.log.append("event")

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded

    def elapsed_time(self, end: FakeEvent) -> float:
        return 2.0


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Let `CudaCopyEngine` run on CPU tensors: all of its own code, none of the device's."""
    FakeStream.log, FakeStream.made = [], 0
    compute = FakeStream()
    compute.name = "compute"
    FakeStream.made = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "Event", FakeEvent)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device: compute)
        patch.setattr(
            CudaCopyEngine,
            "_device_ids",
            lambda self, group: torch.tensor(block_ids(group)),
        )
        # Small enough that batches split and groups hold several chunks.
        patch.setattr(cuda_module, "STAGING_BYTES", 4 * 40)
        yield


@contextlib.contextmanager
def no_patches() -> Iterator[None]:
    yield


ENGINES = {"cpu": (no_patches, CpuCopyEngine), "cuda": (fake_cuda, CudaCopyEngine)}


@contextlib.contextmanager
def running(kind: str, rig: Rig) -> Iterator[CopyEngine]:
    surroundings, make = ENGINES[kind]
    with surroundings():
        engine = make(rig.paged, rig.host)
        try:
            yield engine
        finally:
            engine.close()


@st.composite
def copy_batches(draw: st.DrawFn) -> list[ChunkCopy]:
    """Valid batches: distinct slots and distinct blocks, full and partial chunks."""
    blocks = draw(st.permutations(range(BLOCKS)))
    slots = draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS))
    copies = []
    for slot in slots:
        first = draw(st.integers(0, PER_CHUNK))
        count = draw(st.integers(0, min(PER_CHUNK - first, len(blocks))))
        chosen, blocks = blocks[:count], blocks[count:]
        if draw(st.booleans()):
            chosen = sorted(chosen)
        copies.append(ChunkCopy(slot, tuple(chosen), first))
    return copies


def expected_after_store(rig: Rig, copies: Sequence[ChunkCopy]) -> list[bytes]:
    size = rig.paged.block_bytes
    slots = [bytearray(rig.slot(i)) for i in range(SLOTS)]
    for copy in copies:
        for j, block in enumerate(copy.blocks):
            at = (copy.first + j) * size
            slots[copy.slot][at : at + size] = rig.block(block)
    return [*rig.snapshot()[:-1], b"".join(slots)]


def expected_after_load(rig: Rig, copies: Sequence[ChunkCopy]) -> list[bytes]:
    """Write the blocks one element at a time, take a snapshot, and undo it."""
    before = [tensor.clone() for tensor in rig.everything]
    for copy in copies:
        for j, block in enumerate(copy.blocks):
            at = (copy.first + j) * rig.paged.block_bytes
            for page in rig.pages:
                for k in range(page.shape[1]):
                    page[block, k] = rig.slot(copy.slot)[at + k]
                at += page.shape[1]
    after = rig.snapshot()
    for tensor, content in zip(rig.everything, before, strict=True):
        tensor.copy_(content)
    return after


@pytest.mark.parametrize("kind", ENGINES)
@settings(deadline=None, max_examples=60)
@given(
    layout=st.sampled_from(LAYOUTS),
    page=st.integers(1, 17),
    layers=st.integers(1, 3),
    seed=st.integers(0, 1000),
    copies=copy_batches(),
)
def test_store_moves_exactly_the_named_bytes(
    kind: str, layout: str, page: int, layers: int, seed: int, copies: list[ChunkCopy]
) -> None:
    rig = make_rig(layout, page, layers, seed)
    expected = expected_after_store(rig, copies)
    with running(kind, rig) as engine:
        ticket = engine.store(copies)
        ticket.wait()
        assert ticket.done()
        assert ticket.error is None
        assert ticket.nbytes == sum(len(c.blocks) for c in copies) * rig.paged.block_bytes
    assert rig.snapshot() == expected


@pytest.mark.parametrize("verb", ["load", "load_ordered"])
@pytest.mark.parametrize("kind", ENGINES)
@settings(deadline=None, max_examples=60)
@given(
    layout=st.sampled_from(LAYOUTS),
    page=st.integers(1, 17),
    layers=st.integers(1, 3),
    seed=st.integers(0, 1000),
    copies=copy_batches(),
)
def test_load_moves_exactly_the_named_bytes(
    kind: str, verb: str, layout: str, page: int, layers: int, seed: int, copies: list[ChunkCopy]
) -> None:
    rig = make_rig(layout, page, layers, seed)
    expected = expected_after_load(rig, copies)
    with running(kind, rig) as engine:
        ticket: Ticket = getattr(engine, verb)(copies)
        ticket.wait()
        assert ticket.done()
        assert ticket.error is None
    assert rig.snapshot() == expected


BAD_BATCHES = {
    "slot too large": [ChunkCopy(SLOTS, (1,))],
    "negative slot": [ChunkCopy(-1, (1,))],
    "block too large": [ChunkCopy(0, (BLOCKS,))],
    "negative block": [ChunkCopy(0, (-1,))],
    "too many blocks": [ChunkCopy(0, tuple(range(PER_CHUNK + 1)))],
    "past the end": [ChunkCopy(0, (1, 2), first=PER_CHUNK - 1)],
    "negative position": [ChunkCopy(0, (1,), first=-1)],
    "good then bad": [ChunkCopy(0, (1,)), ChunkCopy(1, (BLOCKS,))],
}


@pytest.mark.parametrize("verb", ["store", "load", "load_ordered"])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_refused_batch_writes_nothing(kind: str, verb: str, name: str) -> None:
    rig = make_rig("by_layer", 6, 2, seed=1)
    before = rig.snapshot()
    with running(kind, rig) as engine:
        ticket: Ticket = getattr(engine, verb)(BAD_BATCHES[name])
        assert ticket.done()
        assert isinstance(ticket.error, InvariantError)
        assert ticket.nbytes == 0
    assert rig.snapshot() == before


@pytest.mark.parametrize(
    ("verb", "copies"),
    [
        ("store", [ChunkCopy(1, (1, 2)), ChunkCopy(1, (3,), first=1)]),
        ("load", [ChunkCopy(1, (1, 1))]),
        ("load_ordered", [ChunkCopy(1, (1,)), ChunkCopy(2, (1,))]),
    ],
)
def test_a_destination_named_twice_is_refused(verb: str, copies: list[ChunkCopy]) -> None:
    rig = make_rig("by_layer", 6, 2, seed=1)
    before = rig.snapshot()
    with running("cpu", rig) as engine:
        assert isinstance(getattr(engine, verb)(copies).error, InvariantError)
    assert rig.snapshot() == before


def test_one_source_may_be_copied_to_several_places() -> None:
    rig = make_rig("by_layer", 6, 2, seed=1)
    with running("cpu", rig) as engine:
        assert engine.store([ChunkCopy(1, (4,)), ChunkCopy(2, (4,))]).error is None
        assert engine.load_ordered([ChunkCopy(1, (5,)), ChunkCopy(1, (6,))]).error is None
    assert rig.block(5) == rig.block(6) == rig.block(4)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_closed_engine_refuses(kind: str) -> None:
    rig = make_rig("by_layer", 6, 2, seed=1)
    with running(kind, rig) as engine:
        engine.close()
        ticket = engine.load([ChunkCopy(0, (1,))])
        assert ticket.done()
        assert isinstance(ticket.error, InvariantError)


def test_slots_must_hold_whole_blocks() -> None:
    paged = make_rig("by_layer", 6, 2, seed=1).paged
    with pytest.raises(InvariantError, match="no multiple"):
        CpuCopyEngine(paged, HostBuffer(2, paged.block_bytes + 1, pin=False))


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Background copies wait for the returned event."""
    gate = threading.Event()
    copy = CpuCopyEngine._to_blocks

    def wait_then_copy(self: CpuCopyEngine, copies: Sequence[ChunkCopy]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(30)
        copy(self, copies)

    monkeypatch.setattr(CpuCopyEngine, "_to_blocks", wait_then_copy)
    return gate


def test_background_loads_do_not_hold_up_the_caller(gated: threading.Event) -> None:
    rig = make_rig("by_layer", 6, 2, seed=1)
    before = rig.block(1)
    engine = CpuCopyEngine(rig.paged, rig.host)
    slow = engine.load([ChunkCopy(0, (1,))])
    assert not slow.done()
    assert slow.error is None
    assert slow.seconds == 0.0
    assert engine.load_ordered([ChunkCopy(1, (2,))]).done()
    assert engine.store([ChunkCopy(2, (3,))]).done()
    assert rig.block(1) == before
    gated.set()
    slow.wait()
    assert slow.done()
    assert slow.seconds > 0
    assert rig.block(1) == rig.slot(0)[: rig.paged.block_bytes]
    engine.close()


def test_close_waits_for_background_loads(gated: threading.Event) -> None:
    rig = make_rig("by_layer", 6, 2, seed=1)
    engine = CpuCopyEngine(rig.paged, rig.host)
    tickets = [engine.load([ChunkCopy(i, (i,))]) for i in range(3)]
    gated.set()
    engine.close()
    assert all(ticket.done() for ticket in tickets)
    assert rig.block(2) == rig.slot(2)[: rig.paged.block_bytes]


@pytest.mark.parametrize("verb", ["store", "load", "load_ordered"])
def test_a_failing_copy_is_an_error_of_its_ticket_only(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("by_layer", 6, 2, seed=1)
    engine = CpuCopyEngine(rig.paged, rig.host)

    def fail(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch_copy, "runs", fail)
        ticket: Ticket = getattr(engine, verb)([ChunkCopy(0, (1,))])
        ticket.wait()
    assert isinstance(ticket.error, MemoryError)
    again: Ticket = getattr(engine, verb)([ChunkCopy(0, (1,))])
    again.wait()
    assert again.error is None
    engine.close()


def test_streams_wait_for_the_model_and_the_model_for_ordered_loads_only() -> None:
    rig = make_rig("by_layer", 8, 2, seed=1)
    copies = [ChunkCopy(0, (1,))]
    wanted: list[tuple[Callable[[CopyEngine], Ticket], list[str]]] = [
        (lambda e: e.store(copies), ["stores waits for compute", "event", "event"]),
        (lambda e: e.load(copies), ["loads waits for compute", "event", "event"]),
        (
            lambda e: e.load_ordered(copies),
            ["ordered waits for compute", "event", "event", "compute waits for ordered"],
        ),
    ]
    with running("cuda", rig) as engine:
        for submit, log in wanted:
            FakeStream.log.clear()
            ticket = submit(engine)
            assert FakeStream.log == log
            assert ticket.seconds == 0.002


def test_a_failed_enqueue_ends_only_after_the_stream_is_empty() -> None:
    rig = make_rig("by_layer", 8, 2, seed=1)
    with running("cuda", rig) as engine, pytest.MonkeyPatch.context() as patch:

        def fail(self: CudaCopyEngine, group: Sequence[ChunkCopy]) -> torch.Tensor:
            raise RuntimeError("CUDA out of memory")

        patch.setattr(CudaCopyEngine, "_device_ids", fail)
        FakeStream.log.clear()
        ticket = engine.store([ChunkCopy(0, (1,))])
        assert isinstance(ticket.error, RuntimeError)
        assert FakeStream.log[-1] == "CPU waits for stores"


@given(st.lists(st.integers(0, 20), unique=True))
def test_runs_cover_the_blocks_in_order_and_are_maximal(blocks: list[int]) -> None:
    found = list(runs(blocks))
    assert [b + i for b, _, n in found for i in range(n)] == blocks
    assert [p for _, p, _ in found] == [sum(n for *_, n in found[:i]) for i in range(len(found))]
    assert all(a + n != b for (a, _, n), (b, _, _) in itertools.pairwise(found))


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(4, 9))
def test_batches_keep_order_and_fit(sizes: list[int], capacity: int) -> None:
    copies = [ChunkCopy(i, tuple(range(n))) for i, n in enumerate(sizes)]
    groups = list(batches(copies, capacity))
    assert [copy for group in groups for copy in group] == copies
    assert all(groups)
    assert all(sum(len(c.blocks) for c in group) <= capacity for group in groups)


def test_factory_goes_by_device() -> None:
    rig = make_rig("by_layer", 8, 2, seed=1)
    engine = copy_engine_for(rig.paged, rig.host)
    assert isinstance(engine, CpuCopyEngine)
    engine.close()
    meta = PagedKV.from_tensors({"l": torch.empty(BLOCKS, 4, device="meta")}, BLOCKS)
    with pytest.raises(UnsupportedError, match="meta"):
        copy_engine_for(meta, rig.host)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("verb", ["load", "load_ordered"])
@pytest.mark.parametrize("page", [7, 4096, 65536])
def test_cuda_round_trip(verb: str, page: int) -> None:
    layers = {f"l{i}": noise(i, 64, page).cuda() for i in range(3)}
    paged = PagedKV.from_tensors(layers, 64, 0)
    host = HostBuffer(4, 8 * paged.block_bytes, pin=True)
    engine = copy_engine_for(paged, host)
    ids = tuple(np.random.default_rng(3).permutation(64)[:32].tolist())
    copies = [ChunkCopy(i, ids[i * 8 : i * 8 + 8]) for i in range(4)]
    before = {name: layer.cpu() for name, layer in layers.items()}
    stored = engine.store(copies)
    stored.wait()
    assert stored.error is None
    for layer in layers.values():
        layer[list(ids)] = 0
    loaded: Ticket = getattr(engine, verb)(copies)
    if verb == "load":
        loaded.wait()
    for name, layer in layers.items():
        assert torch.equal(layer.cpu(), before[name])
    assert loaded.error is None
    engine.close()
    host.close()
