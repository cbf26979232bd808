"""Labels: 64-bit numbers that are equal where the whole prefix of one adapter is equal.

Everything starts from a seed made of the adapter's name, so labels of two adapters never
meet (but for chance, 2**-64 per pair).  Two ways to make them: along a chain of block ids,
where a trace has them, and by position in a session, where history only ever grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_SHARED = "shared"


def seed_of(*names: str | int) -> int:
    """A 64-bit number for a tuple of names; ("a", "bc") and ("ab", "c") differ."""
    text = "".join(f"{len(str(name))}:{name}" for name in names)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mix(parent: int, value: int) -> int:
    """One link of a chain (the finaliser of splitmix64 over both numbers)."""
    x = (parent + _STEP * ((value & _MASK) + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix_each(
    parents: NDArray[np.uint64] | np.uint64, values: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """`mix` of many pairs at once."""
    with np.errstate(over="ignore"):
        x = parents + np.uint64(_STEP) * (values + np.uint64(1))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


class ChainLabels:
    """Labels along chains of block ids; a chain that was seen before costs a look-up."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], int] = {}

    def of(self, adapter: str, ids: Iterable[int]) -> list[int]:
        """One label per id, each for the prefix up to and with its block."""
        links = self._links
        label = seed_of(adapter)
        found: list[int] = []
        for item in ids:
            key = (label, item)
            if key not in links:
                links[key] = mix(label, item)
            label = links[key]
            found.append(label)
        return found


def per_chunk(
    blocks: list[int], block_tokens: int, chunk_tokens: int, chunks: int
) -> tuple[int, ...]:
    """Labels of chunks from those of blocks of another size.

    A chunk takes the label of the block in which it ends, with its own number: it is equal
    where that block is equal.  Chunks that part only after the chunk but inside the block
    count as different, since the trace cannot tell.

    Args:
        blocks: labels of the blocks; must reach the end of the last chunk.
        chunks: how many.
    """
    if block_tokens == chunk_tokens:
        return tuple(blocks[:chunks])
    numbers = np.arange(chunks, dtype=np.int64)
    last_block = ((numbers + 1) * chunk_tokens - 1) // block_tokens
    known = np.array(blocks, dtype=np.uint64)[last_block]
    return tuple(mix_each(known, numbers.astype(np.uint64)).tolist())


class SessionLabels:
    """Labels of sessions whose history only grows, after a prefix that the adapter shares."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._made: dict[tuple[str, int, str | int], tuple[int, ...]] = {}

    def of(
        self, adapter: str, session: str | int, tokens: int, shared_tokens: int = 0
    ) -> tuple[int, ...]:
        """Labels of the full chunks in the first `tokens` tokens of a session.

        Args:
            shared_tokens: how many of them are the same for all requests of the adapter.
        """
        chunks = tokens // self._chunk_tokens
        shared = shared_tokens // self._chunk_tokens
        key = (adapter, shared, session)
        known = self._made.get(key, ())
        if len(known) < chunks:
            # Doubling keeps the work linear over the turns of a long session.
            known = self._make(key, max(chunks, 2 * len(known)))
            self._made[key] = known
        return known[:chunks]

    @staticmethod
    def _make(key: tuple[str, int, str | int], chunks: int) -> tuple[int, ...]:
        adapter, shared, session = key
        numbers = np.arange(chunks, dtype=np.uint64)
        common = mix_each(np.uint64(seed_of(adapter, _SHARED)), numbers[:shared])
        # Behind prefixes of different lengths the same session's text is another prefix.
        own = np.uint64(seed_of(adapter, session, shared))
        return (*common.tolist(), *mix_each(own, numbers[shared:]).tolist())
