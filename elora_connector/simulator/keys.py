"""Chunk keys of a replay: cheap, and never equal for two adapters."""

from __future__ import annotations

from collections.abc import Sequence

from elora_connector.core.types import ChunkKey

_BASE = (0).to_bytes(4, "little")


def chunk_keys(lora_id: int | None, labels: Sequence[int]) -> list[ChunkKey]:
    """One key of 12 bytes a label."""
    adapter = _BASE if lora_id is None else lora_id.to_bytes(4, "little")
    return [ChunkKey(adapter + (label % 2**64).to_bytes(8, "little")) for label in labels]
