"""Vocabulary shared by every layer: tiers, residency, identities, keys."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes: SHA-256 chain over namespace, adapter identity, salt and tokens."""

DIGEST_BYTES = 32


class Tier(enum.IntEnum):
    """Where bytes are; towards the GPU is a swap-in, away from it a swap-out."""

    GPU = 0
    HOST = 1
    REMOTE = 2


class Residency(enum.IntEnum):
    """State of one node's bytes in one tier.  PENDING bytes are never read (I5)."""

    ABSENT = 0
    PENDING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class Identity:
    """Which weights produced a piece of KV: a name plus the SHA-256 of the content.

    The name alone is not an identity (weights change under a name), the digest
    alone would be (two names of one file could share), but the name lets an
    operator list and purge by adapter.
    """

    name: str
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"digest must be {DIGEST_BYTES} bytes, got {len(self.digest)}")

    def __str__(self) -> str:
        return f"{self.name}@{self.digest.hex()[:12]}"


BASE = Identity("base", bytes(DIGEST_BYTES))
"""The base model, which is always resident; its weights are in the namespace."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Which part of the KV a worker holds; never a DP or global rank."""

    tp: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"
