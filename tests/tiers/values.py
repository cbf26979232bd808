"""Small values, and a store of either kind, for the tests of the remote tier."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from elora_connector.core.types import ChunkKey, Identity, Rank
from elora_connector.tiers.base import RemoteTier, ValueSpec
from tests.support.faulty_tier import FaultyTier
from tests.support.redis_groups import ClusterServers
from tests.support.redis_server import RedisServer

NAMESPACE = hashlib.sha256(b"namespace").digest()
NBYTES = 512
FIRST_RANK = Rank()


def digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def make_spec(
    index: int = 0,
    *,
    name: str = "civil",
    content: str = "weights",
    namespace: bytes = NAMESPACE,
    rank: Rank = FIRST_RANK,
    nbytes: int = NBYTES,
    dtype: str = "bfloat16",
    shape: tuple[int, ...] | None = None,
) -> ValueSpec:
    chunk = ChunkKey(digest("chunk", index))
    return ValueSpec(
        key=f"elora:1:{namespace.hex()[:8]}:{{{chunk.hex()}}}:{name}:{rank}",
        namespace=namespace,
        identity=Identity(name, digest(content)),
        chunk=chunk,
        parent=digest("chunk", index - 1),
        rank=rank,
        dtype=dtype,
        shape=(2, nbytes // 4) if shape is None else shape,
        nbytes=nbytes,
    )


def payload_of(spec: ValueSpec, salt: int = 0) -> bytearray:
    """Bytes that differ from chunk to chunk."""
    block = hashlib.sha256(bytes(spec.chunk) + bytes([salt])).digest()
    return bytearray(block * (spec.nbytes // len(block) + 1))[: spec.nbytes]


class Store(Protocol):
    """A place for values with a side door."""

    def tier(self, **kwargs: Any) -> RemoteTier: ...
    def raw(self, key: str) -> bytes | None: ...
    def put_raw(self, key: str, value: bytes) -> None: ...
    def drop(self, key: str) -> None: ...
    def close(self) -> None: ...


class MemoryStore:
    def __init__(self) -> None:
        self._root = FaultyTier()
        self.raw = self._root.raw
        self.put_raw = self._root.put_raw
        self.drop = self._root.drop

    def tier(self, **kwargs: Any) -> RemoteTier:
        return FaultyTier(store=self._root, **kwargs)

    def close(self) -> None:
        self._root.close()


class RedisStore:
    """One server, or a cluster."""

    def __init__(self, servers: RedisServer | ClusterServers) -> None:
        self._client = servers.client()
        self._url = servers.url
        self._tiers: list[RemoteTier] = []

    def tier(self, **kwargs: Any) -> RemoteTier:
        from elora_connector.tiers.redis_cluster import redis_tier

        options = {"ttl_s": None, "connect_timeout_s": 20.0, "operation_timeout_s": 20.0} | kwargs
        self._tiers.append(redis_tier(self._url, **options))
        return self._tiers[-1]

    def raw(self, key: str) -> bytes | None:
        value = self._client.get(key)
        assert value is None or isinstance(value, bytes)
        return value

    def put_raw(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def drop(self, key: str) -> None:
        self._client.delete(key)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
        self._client.flushall()
        self._client.close()


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Wait for something another thread does; the bound only ends a failing test."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
