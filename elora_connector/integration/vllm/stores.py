"""Which chunks of which request are stored in this step, and how workers are told."""

from __future__ import annotations

from collections.abc import Sequence

from elora_connector.core.types import ChunkKey
from elora_connector.integration.vllm.block_pool import PoolView
from elora_connector.integration.vllm.geometry import Geometry
from elora_connector.integration.vllm.metadata import (
    FetchItem,
    FetchOrder,
    RemoteChunk,
    StoreItem,
    StoreOrder,
)
from elora_connector.integration.vllm.requests import RequestTracker
from elora_connector.manager import Job, Manager
from elora_connector.metrics import Recorder


class StorePlanner:
    """Plans the stores of one step; the caller decides whether a request may store.

    Args:
        decode: store generated tokens too (`save_decode_cache`).
        remote: chunks also go to the remote tier.

    Attributes:
        pool: vLLM's block pool, once it is bound; blocks stay pinned until copied.
        namespace: of the chunk keys in use.
    """

    def __init__(
        self,
        manager: Manager,
        geometry: Geometry,
        recorder: Recorder,
        *,
        decode: bool,
        remote: bool,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._recorder = recorder
        self._decode = decode
        self._remote = remote
        self.pool: PoolView | None = None
        self.namespace = b""

    def full_chunks(self, tracker: RequestTracker, scheduled: int) -> int:
        """Chunks whose KV is complete after a forward over `scheduled` more tokens.

        Known tokens only: a draft or a placeholder may still turn out otherwise.
        """
        request = tracker.request
        done = min(request.num_computed_tokens + scheduled, request.num_tokens)
        if not self._decode:
            done = min(done, request.num_prompt_tokens)
        return int(done // self._geometry.chunk_size)

    def due(self, tracker: RequestTracker, scheduled: int) -> bool:
        """Is there a chunk that was not planned before?  Cheap: asked for every request."""
        end = tracker.request.num_computed_tokens + scheduled
        if end < (tracker.next_store + 1) * self._geometry.chunk_size:
            return False
        return self.full_chunks(tracker, scheduled) > tracker.next_store

    def plan(
        self, tracker: RequestTracker, scheduled: int, root: bytes, now: float
    ) -> StoreOrder | None:
        """Reserve slots, pin blocks, and spell out the order; None if nothing is to do.

        Chunks that would pin too many blocks now are planned in a later step.
        """
        identity = tracker.identity
        assert identity is not None
        chunks = self.full_chunks(tracker, scheduled)
        keys = tracker.keys_upto(root, self._geometry.chunk_size, chunks)
        room = len(keys)
        if self.pool is not None:
            room = self.pool.pin_room // self._geometry.blocks_per_chunk
        if not room:
            return None
        put_from = tracker.remote_known if self._remote else None
        plan = self._manager.begin_store(
            tracker.id, identity, keys, now, put_from=put_from, limit=room
        )
        tracker.next_store = plan.until
        if plan.dropped:
            self._recorder.add("stores_dropped", plan.dropped, "host_full")
        return None if plan.job is None else self._order(tracker, plan.job, keys, root)

    def ended(self, tracker: RequestTracker) -> None:
        """The request gives its blocks back: what no step had room for is not stored."""
        left = self.full_chunks(tracker, 0) - tracker.next_store
        if left > 0:
            self._recorder.add("stores_dropped", left, "pool_share")

    def _order(
        self, tracker: RequestTracker, job: Job, keys: list[ChunkKey], root: bytes
    ) -> StoreOrder:
        until = len(keys) * self._geometry.chunk_size
        items = []
        for item in job.items:
            copy = self._geometry.copy(tracker.blocks, item.index, item.ref.slot, 0, until)
            remote = (
                _remote_chunk(self.namespace, job, item.index, keys, root) if item.put else None
            )
            items.append(StoreItem(item.ref, copy, remote))
        if self.pool is not None:
            self.pool.pin(job.id, [block for item in items for block in item.copy.blocks])
        return StoreOrder(job.id, tuple(items), tracker.lora_id, tracker.load)


def fetch_order(namespace: bytes, job: Job, keys: Sequence[ChunkKey], root: bytes) -> FetchOrder:
    """A fetch job as the workers need it; `keys` are the request's, from its first chunk."""
    items = (
        FetchItem(item.ref, _remote_chunk(namespace, job, item.index, keys, root))
        for item in job.items
    )
    return FetchOrder(job.id, tuple(items))


def _remote_chunk(
    namespace: bytes, job: Job, index: int, keys: Sequence[ChunkKey], root: bytes
) -> RemoteChunk:
    parent = keys[index - 1] if index else root
    return RemoteChunk(namespace, job.identity, keys[index], parent)
