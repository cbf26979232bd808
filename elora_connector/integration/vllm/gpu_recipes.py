"""What vLLM calls the blocks of a chunk: needed to put one into its prefix cache ourselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

from elora_connector.core.types import ChunkKey, Identity


@dataclass(frozen=True, slots=True)
class Recipe:
    """One chunk as vLLM names it.

    Attributes:
        identity: whose KV it is; vLLM's hashes know the adapter's name and path only.
        hashes: of its blocks, in token order.
        first: number of its first block in the request.
        events: KV events to publish, one a block; empty while nobody subscribed.
    """

    identity: Identity
    lora_id: int | None
    hashes: tuple[bytes, ...]
    first: int
    events: tuple[Any, ...]


class RecipeBook:
    """Recipes of the chunks seen last, at most `limit`.

    Args:
        pool: vLLM's BlockPool.
        blocks_per_chunk, block_size: as everywhere.
    """

    def __init__(self, pool: Any, blocks_per_chunk: int, block_size: int, limit: int) -> None:
        self._pool = pool
        self._per_chunk = blocks_per_chunk
        self._block_size = block_size
        self._limit = limit
        self._recipes: OrderedDict[ChunkKey, Recipe] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recipes)

    def get(self, key: ChunkKey) -> Recipe | None:
        """The chunk's recipe, if it is known."""
        return self._recipes.get(key)

    def note(self, request: Any, identity: Identity, keys: Sequence[ChunkKey], first: int) -> None:
        """Chunks ``keys[first:]`` of a request, whose vLLM hashes it carries."""
        lora = request.lora_request
        for index in range(first, len(keys)):
            start = index * self._per_chunk
            hashes = tuple(request.block_hashes[start : start + self._per_chunk])
            if len(hashes) < self._per_chunk:
                return
            self._recipes[keys[index]] = Recipe(
                identity,
                None if lora is None else lora.lora_int_id,
                hashes,
                start,
                self._events(request, start) if self._pool.enable_kv_cache_events else (),
            )
            self._recipes.move_to_end(keys[index])
        while len(self._recipes) > self._limit:
            self._recipes.popitem(last=False)

    def clear(self) -> None:
        self._recipes.clear()

    def cached(self, one: bytes) -> Any | None:
        """A block that vLLM's prefix cache has under this hash."""
        found = self._pool.get_cached_block(BlockHash(one), [0])
        return None if found is None else found[0]

    def register(self, recipe: Recipe, index: int, block: Any) -> bool:
        """Put block `index` of the chunk into vLLM's prefix cache and tell subscribers.

        Returns:
            False if vLLM has one already: then nothing was done.
        """
        one = recipe.hashes[index]
        if self.cached(one) is not None:
            return False
        tokens = (recipe.first + index + 1) * self._block_size
        named = make_block_hash_with_group_id(BlockHash(one), 0)
        self._pool._insert_block_hash(named, block, num_tokens=tokens)
        if recipe.events and self._pool.enable_kv_cache_events:
            self._pool.kv_event_queue.append(recipe.events[index])
        return True

    def _events(self, request: Any, first: int) -> tuple[Any, ...]:
        """The events that vLLM would publish for the blocks, one for each."""
        size, events, feature = self._block_size, [], 0
        for number in range(first, first + self._per_chunk):
            start = number * size
            extra, feature = generate_block_hash_extra_keys(request, start, start + size, feature)
            before = request.block_hashes[number - 1] if number else None
            events.append(
                self._pool._build_block_stored_event(
                    request,
                    block_hashes=[maybe_convert_block_hash(request.block_hashes[number])],
                    parent_block_hash=None if before is None else maybe_convert_block_hash(before),
                    start_token_idx=start,
                    end_token_idx=start + size,
                    block_size=size,
                    kv_cache_group_id=0,
                    extra_keys_list=[extra],
                )
            )
        return tuple(events)
