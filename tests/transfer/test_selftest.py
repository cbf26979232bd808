"""The start-up check passes good engines, catches broken ones, and leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from elora_connector.errors import UnsupportedError
from elora_connector.transfer.base import ChunkCopy, FinishedTicket, Ticket
from elora_connector.transfer.host_buffer import HostBuffer
from elora_connector.transfer.paged_kv import PagedKV
from elora_connector.transfer.selftest import round_trip
from elora_connector.transfer.torch_copy import CpuCopyEngine


def parts(per_chunk: int = 3) -> tuple[PagedKV, HostBuffer, torch.Tensor]:
    storage = torch.arange(2 * 9 * 5, dtype=torch.uint8).view(2, 9, 5)
    paged = PagedKV.from_tensors({"a": storage[0], "b": storage[1]}, 9)
    return paged, HostBuffer(2, per_chunk * paged.block_bytes, pin=False), storage


class WrongOrder(CpuCopyEngine):
    """Loads the blocks of a chunk in reverse."""

    def _to_blocks(self, copies: Sequence[ChunkCopy]) -> None:
        super()._to_blocks([ChunkCopy(c.slot, c.blocks[::-1], c.first) for c in copies])


class WrongOrderTwice(WrongOrder):
    """Stores them in reverse too, so that a plain round trip looks right."""

    def _to_slots(self, copies: Sequence[ChunkCopy]) -> None:
        super()._to_slots([ChunkCopy(c.slot, c.blocks[::-1], c.first) for c in copies])


class IgnoresFirst(CpuCopyEngine):
    """Loads every part from the start of the chunk."""

    def _to_blocks(self, copies: Sequence[ChunkCopy]) -> None:
        super()._to_blocks([ChunkCopy(c.slot, c.blocks) for c in copies])


class LoadsNothing(CpuCopyEngine):
    """Claims success without copying."""

    def _to_blocks(self, copies: Sequence[ChunkCopy]) -> None:
        return


class StoresNothing(CpuCopyEngine):
    """Claims success without copying."""

    def _to_slots(self, copies: Sequence[ChunkCopy]) -> None:
        return


class LosesAByte(CpuCopyEngine):
    """Drops the last byte of the last block."""

    def _to_slots(self, copies: Sequence[ChunkCopy]) -> None:
        super()._to_slots(copies)
        for copy in copies:
            end = (copy.first + len(copy.blocks)) * self.paged.block_bytes
            self.host.slot(copy.slot)[end - 1] ^= 1


class Spills(CpuCopyEngine):
    """A partial load also writes the block before it."""

    def _to_blocks(self, copies: Sequence[ChunkCopy]) -> None:
        super()._to_blocks(copies)
        super()._to_blocks([ChunkCopy(c.slot, (c.blocks[0] - 1,)) for c in copies if c.first])


class Fails(CpuCopyEngine):
    """Reports an error."""

    def _load(self, copies: Sequence[ChunkCopy]) -> Ticket:
        return FinishedTicket(0, 0.0, RuntimeError("the wire broke"))


BROKEN = [
    WrongOrder,
    WrongOrderTwice,
    IgnoresFirst,
    LoadsNothing,
    StoresNothing,
    LosesAByte,
    Spills,
    Fails,
]


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_a_good_engine_passes_and_paged_kv_is_as_before(per_chunk: int) -> None:
    paged, host, storage = parts(per_chunk)
    before = storage.clone()
    engine = CpuCopyEngine(paged, host)
    round_trip(engine, paged, host)
    round_trip(engine, paged, host, blocks=(4, 2, 6), slot=1)
    engine.close()
    assert torch.equal(storage, before)


@pytest.mark.parametrize("make", BROKEN)
def test_a_broken_engine_is_refused_and_paged_kv_is_as_before(make: type[CpuCopyEngine]) -> None:
    paged, host, storage = parts()
    before = storage.clone()
    engine = make(paged, host)
    with pytest.raises(UnsupportedError, match="copy self test"):
        round_trip(engine, paged, host)
    engine.close()
    assert torch.equal(storage, before)


def test_only_the_given_blocks_and_slot_are_touched() -> None:
    paged, host, _ = parts()
    host.tensor.zero_()
    touched: list[ChunkCopy] = []

    class Watched(CpuCopyEngine):
        def _to_slots(self, copies: Sequence[ChunkCopy]) -> None:
            touched.extend(copies)
            super()._to_slots(copies)

        def _to_blocks(self, copies: Sequence[ChunkCopy]) -> None:
            touched.extend(copies)
            super()._to_blocks(copies)

    engine = Watched(paged, host)
    round_trip(engine, paged, host, blocks=(1, 5), slot=1)
    engine.close()
    assert {block for copy in touched for block in copy.blocks} == {1, 5}
    assert {copy.slot for copy in touched} == {1}
    assert host.slot(0).sum() == 0
