"""Sizes that scheduler and workers derive from the same vLLM configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elora_connector.transfer.base import ChunkCopy


@dataclass(frozen=True, slots=True)
class Geometry:
    """`block_bytes`, and so a host slot, are per rank; sizes are in tokens."""

    block_size: int
    chunk_size: int
    block_bytes: int
    num_blocks: int

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_size // self.block_size

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_chunk

    def copy(
        self, blocks: Sequence[int], index: int, slot: int, start: int, until: int
    ) -> ChunkCopy:
        """The part of chunk `index` between tokens `start` and `until`.

        Args:
            blocks: the request's block table.
            start, until: multiples of the block size; blocks before `start` stay untouched.
        """
        per_chunk = self.blocks_per_chunk
        first = max(index * per_chunk, start // self.block_size)
        last = min((index + 1) * per_chunk, until // self.block_size)
        return ChunkCopy(slot, tuple(blocks[first:last]), first - index * per_chunk)
