"""Start-up check that bytes come back as they went, on the device at hand.

The expected bytes are read and written through `PagedKV.segments`, one page at a time,
not through the grouped views the engines use, so an error in either shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from elora_connector.errors import UnsupportedError
from elora_connector.transfer.base import ChunkCopy, CopyEngine, Ticket
from elora_connector.transfer.host_buffer import HostBuffer
from elora_connector.transfer.paged_kv import PagedKV

SEED = 20260


def round_trip(
    engine: CopyEngine,
    paged: PagedKV,
    host: HostBuffer,
    blocks: Sequence[int] | None = None,
    slot: int = 0,
) -> None:
    """Store blocks, wipe them, load all and then part of them; compare every byte.

    Args:
        engine: over `paged` and `host`.
        paged: its `blocks` are overwritten and restored.
        host: `slot` must be free; its content is lost.
        blocks: unused block ids, by default the last two (one, if a chunk is one block).
        slot: a free slot.

    Raises:
        UnsupportedError: a copy failed or bytes differ; names the step.
    """
    if blocks is None:
        blocks = range(paged.num_blocks)[-2:]
    ids = tuple(blocks)[: engine.blocks_per_chunk]
    saved = _read(paged, ids)
    try:
        _check(engine, paged, host, ChunkCopy(slot, ids))
    finally:
        _write(paged, ids, saved)


def _check(engine: CopyEngine, paged: PagedKV, host: HostBuffer, whole: ChunkCopy) -> None:
    expected = _noise(len(whole.blocks), paged.block_bytes)
    blank = np.bitwise_not(expected)
    # Freed memory may still hold the bytes of an earlier test.
    stored = host.slot(whole.slot)[: expected.size].numpy().reshape(expected.shape)
    stored[:] = blank
    _write(paged, whole.blocks, expected)
    _finish("store", engine.store([whole]))
    _same("store", stored, expected)

    _write(paged, whole.blocks, blank)
    _finish("load", engine.load([whole]))
    _same("load", _read(paged, whole.blocks), expected)

    _write(paged, whole.blocks, blank)
    part = ChunkCopy(whole.slot, whole.blocks[1:], first=1)
    ticket = engine.load_ordered([part])
    # Read before waiting: the read itself must be ordered after the copy.
    loaded = _read(paged, whole.blocks)
    _finish("partial load", ticket)
    _same("partial load", loaded, np.concatenate([blank[:1], expected[1:]]))


def _noise(count: int, block_bytes: int) -> np.ndarray:
    generator = np.random.default_rng(SEED)
    return np.frombuffer(generator.bytes(count * block_bytes), np.uint8).reshape(count, -1)


def _read(paged: PagedKV, ids: Sequence[int]) -> np.ndarray:
    """Blocks as uint8 `[n, block_bytes]` in slot layout."""
    rows = [torch.cat([segment.pages[i] for segment in paged.segments]).cpu() for i in ids]
    return torch.stack(rows).numpy()


def _write(paged: PagedKV, ids: Sequence[int], content: np.ndarray) -> None:
    for i, row in zip(ids, content, strict=True):
        offset = 0
        for segment in paged.segments:
            page = np.array(row[offset : offset + segment.page_bytes])
            segment.pages[i].copy_(torch.from_numpy(page))
            offset += segment.page_bytes


def _finish(step: str, ticket: Ticket) -> None:
    ticket.wait()
    if ticket.error is not None:
        raise UnsupportedError(f"copy self test: {step} failed: {ticket.error}") from ticket.error


def _same(step: str, found: np.ndarray, expected: np.ndarray) -> None:
    wrong = int(np.count_nonzero(found != expected))
    if wrong:
        raise UnsupportedError(
            f"copy self test: {wrong} of {expected.size} bytes differ after {step}"
        )
