"""How many adapters, tokens and shared prefixes a deployment has room for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from elora_connector.simulator.models import ALL_LINEAR, Machine

MOST_FOR_ADAPTERS = 0.5
"""Share of a memory that adapters take at most, where nobody said how many to keep there."""


@dataclass(frozen=True, slots=True)
class Room:
    """One memory, over all ranks together.

    Attributes:
        adapters_alone, tokens_alone: that fit if nothing else is there.
        adapters_kept: adapters that stay there; tokens_left: of KV, beside them.
    """

    nbytes: int
    adapters_alone: int
    tokens_alone: int
    adapters_kept: int
    tokens_left: int


@dataclass(frozen=True)
class Sizing:
    """A deployment and the adapters it is to serve.

    Attributes:
        slots: adapters on the GPU (vLLM's max_loras); None for all, or as many as half of
            the pool holds.
        chunk_tokens: KV is kept in whole chunks.
    """

    machine: Machine
    adapters: int
    rank: int
    modules: Collection[str] = ALL_LINEAR
    slots: int | None = None
    chunk_tokens: int = 256

    @cached_property
    def adapter_bytes(self) -> int:
        return self.machine.model.lora_bytes(self.rank, self.modules)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.machine.model.kv_bytes_per_token

    @cached_property
    def gpu(self) -> Room:
        return self._room(self.machine.pool_bytes, self.slots)

    @cached_property
    def host(self) -> Room:
        """Host memory, which holds what the GPU holds and more."""
        return self._room(self.machine.host_bytes, None)

    def _room(self, nbytes: int, wanted: int | None) -> Room:
        alone = nbytes // self.adapter_bytes
        most = int(nbytes * MOST_FOR_ADAPTERS) // self.adapter_bytes
        kept = min(self.adapters, most) if wanted is None else min(wanted, alone)
        left = nbytes - kept * self.adapter_bytes
        return Room(nbytes, alone, self._tokens(nbytes), kept, self._tokens(left))

    def _tokens(self, nbytes: int) -> int:
        return nbytes // self.chunk_bytes * self.chunk_tokens

    def whole_chunks(self, prefix_tokens: int) -> int:
        """Tokens of a shared prefix that can hit."""
        return prefix_tokens // self.chunk_tokens * self.chunk_tokens

    def prefixes(self, room: Room, prefix_tokens: int) -> int:
        """Prefixes of that length that fit beside the adapters; 0 if shorter than a chunk."""
        usable = self.whole_chunks(prefix_tokens)
        return room.tokens_left // usable if usable else 0
