"""LMCache's Redis connectors as peers of the Redis benchmark.

They run as in LMCache: on an event loop in a thread of its own, chunks in the memory of
a `LocalCPUBackend`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from benchmarks.redis_peers import Laps, Slots, batches

_TOKENS, _HEADS, _HEAD_SIZE = 256, 4, 64
_LAYER_BYTES = 2 * _TOKENS * _HEADS * _HEAD_SIZE * 2


class LMCache:
    """One connector.

    Args:
        scheme: redis or resp.
        batched: through `batched_put` and `batched_get` where the connector has them; else
            all of a batch at once with `asyncio.gather`, which is what LMCache then does.
    """

    def __init__(self, port: int, nbytes: int, scheme: str, *, batched: bool) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=_TOKENS,
            local_cpu=False,
            max_local_cpu_size=0.5,
            extra_config={"save_chunk_meta": scheme != "resp"},
        )
        shape = (nbytes // _LAYER_BYTES, 2, _TOKENS, _HEADS, _HEAD_SIZE)
        metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=_TOKENS)
        self._cpu = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._batched = batched
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def connect() -> Any:
            url = f"{scheme}://127.0.0.1:{port}"
            return CreateConnector(url, self._loop, self._cpu, config, metadata)

        self._connector = self._run(connect())
        self._objects: list[Any] = []
        self._held: deque[Any] = deque()

    def put(self, keys: Sequence[str], slots: Slots) -> list[float]:
        self._prepare(slots)
        return self._run(self._put_batches(keys) if self._batched else self._put_each(keys))

    def get(self, keys: Sequence[str], slots: Slots) -> list[float]:
        return self._run(self._get_batches(keys, slots) if self._batched else self._get_each(keys))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _prepare(self, slots: Slots) -> None:
        """Chunks in LMCache's own memory, which is where it sends from."""
        connector = self._connector.getWrappedConnector()
        while len(self._objects) < len(slots):
            made = self._cpu.allocate(
                connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt
            )
            memoryview(made.byte_array).cast("B")[:] = slots[len(self._objects)]
            self._objects.append(made)

    async def _put_each(self, keys: Sequence[str]) -> list[float]:
        laps = Laps()
        for position, key in enumerate(keys):
            await self._connector.put(_key(key), self._object(position))
            laps.lap()
        return laps.seconds

    async def _put_batches(self, keys: Sequence[str]) -> list[float]:
        laps, connector = Laps(), self._connector
        for batch in batches(keys, self._views()):
            names = [_key(key) for key in batch]
            objects = [self._object(position) for position in range(len(batch))]
            if connector.support_batched_put():
                await connector.batched_put(names, objects)
            else:
                await _gather(connector.put, names, objects)
            laps.lap(len(batch))
        return laps.seconds

    async def _get_each(self, keys: Sequence[str]) -> list[float]:
        laps = Laps()
        for key in keys:
            self._hold([await self._connector.get(_key(key))])
            laps.lap()
        return laps.seconds

    async def _get_batches(self, keys: Sequence[str], slots: Slots) -> list[float]:
        laps, connector = Laps(), self._connector
        for batch in batches(keys, slots):
            names = [_key(key) for key in batch]
            if connector.support_batched_get():
                self._hold(await connector.batched_get(names))
            else:
                self._hold(await _gather(connector.get, names))
            laps.lap(len(batch))
        return laps.seconds

    def _hold(self, objects: Sequence[Any]) -> None:
        """Keep what was read for a while, as a request does until it is on the GPU."""
        if None in objects:
            raise RuntimeError("LMCache missed a chunk that was stored")
        self._held.extend(objects)
        self._release(len(self._objects))

    def _release(self, keep: int) -> None:
        while len(self._held) > keep:
            self._held.popleft().ref_count_down()

    def _object(self, position: int) -> Any:
        made = self._objects[position % len(self._objects)]
        made.ref_count_up()  # the connector gives one back
        return made

    def _views(self) -> Slots:
        return [memoryview(made.byte_array).cast("B") for made in self._objects]


async def _gather(call: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(*row) for row in zip(*columns, strict=True))))


def _key(name: str) -> CacheEngineKey:
    return CacheEngineKey("m", 1, 0, int(name.rsplit(":", 1)[1]), torch.bfloat16)
