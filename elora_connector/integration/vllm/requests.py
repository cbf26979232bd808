"""What the scheduler side remembers of one request, and which kinds it serves."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elora_connector.core.keys import ChunkHasher, encode_fields
from elora_connector.core.types import ChunkKey, Identity
from elora_connector.tiers.lookup import Lookup


class RemoteWait(enum.Enum):
    """Where a request stands with the remote tier.

    Goes forward only, except LOOKED_UP <-> FETCHING when another request's fetch covers
    a part of what is wanted.
    """

    NOT_ASKED = "not_asked"
    LOOKUP = "lookup"
    LOOKED_UP = "looked_up"
    FETCHING = "fetching"
    OVER = "over"


logger = logging.getLogger("vllm.elora_connector")

_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(slots=True, eq=False)
class RequestTracker:
    """One live request.

    Attributes:
        request: vLLM's own object; token ids and computed counts are read from it.
        lora_id: None for the base model.
        bypass: reason why no KV of this request is looked up or stored; empty: served.
        identity, load: weights that the request is bound to while admitted.
        tainted: the weights changed while it ran; nothing of it is stored or cached.
        blocks: GPU block ids in token order, while admitted.
        next_store: chunks below it need no more store planning.
        promised: (locally cached tokens, tokens promised from the host tier).
        fetch_from, fetch_until: chunks of its own fetch; None and 0 before one was started.
        remote_known: chunks below it were seen in the remote tier by a look-up.
        deadline: absolute end of waiting for the remote tier, set at the first ask.
        adapter_since: since when it waits for its adapter to load, None while it does not.
        restore_skip: its `skip_reading_prefix_cache` is lifted while it waits.
        load_ordered: the promised load is short enough for the forward to wait for it.
        gpu_chunks: leading chunks whose GPU blocks are known to belong to them.
        host_before: chunks the host tier had when it began to wait for the remote one.
        local: tokens that vLLM had cached at its last ask.
        choices: load-or-recompute decisions by source, noted since it was last admitted.
        checks_adapter: it asked for a look at its adapter's files (`load_inplace`).
    """

    request: Any
    lora_id: int | None
    name: str
    bypass: str
    stores: bool
    retrieves: bool
    hasher: ChunkHasher | None = None
    root: bytes = b""
    identity: Identity | None = None
    load: tuple[int, ...] = ()
    admitted: bool = False
    tainted: bool = False
    blocks: list[int] = field(default_factory=list)
    next_store: int = 0
    promised: tuple[int, int] = (0, 0)
    wait: RemoteWait = RemoteWait.NOT_ASKED
    lookup: Lookup | None = None
    lookup_from: int = 0
    remote_known: int = 0
    fetch_from: int | None = None
    fetch_until: int = 0
    jobs: set[int] = field(default_factory=set)
    deadline: float | None = None
    adapter_since: float | None = None
    checks_adapter: bool = False
    restore_skip: bool = False
    load_ordered: bool = True
    host_before: int | None = None
    gpu_chunks: int = 0
    local: int = 0
    choices: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.request.request_id)

    def prompt_keys(self, root: bytes, chunk_size: int) -> list[ChunkKey]:
        """Keys of all full chunks of the tokens known now (incremental)."""
        return self._hash(root, chunk_size, self.request.all_token_ids)

    def keys_upto(self, root: bytes, chunk_size: int, chunks: int) -> list[ChunkKey]:
        """Keys of the first `chunks` chunks.

        Known ones serve only under the same root: a request that begins anew may do so
        under other weights.
        """
        if self.hasher is not None and self.root == root and len(self.hasher.keys) >= chunks:
            return self.hasher.keys[:chunks]
        return self._hash(root, chunk_size, self.request.all_token_ids)[:chunks]

    def _hash(self, root: bytes, chunk_size: int, tokens: Any) -> list[ChunkKey]:
        if self.hasher is None or self.root != root:
            self.hasher, self.root = ChunkHasher(root, chunk_size), root
        features = self.request.mm_features
        return self.hasher.extend(tokens, _multimodal_extras(features) if features else None)


def _multimodal_extras(features: Any) -> Any:
    """Chunk range -> bytes naming the multimodal inputs in it.

    Placeholder tokens are equal for every image, so the inputs' content ids and their
    offsets belong into the key of each chunk they touch.
    """

    def extras(start: int, end: int) -> bytes:
        inside = [
            (feature.identifier, feature.mm_position.offset - start)
            for feature in features
            if feature.mm_position.offset < end
            and feature.mm_position.offset + feature.mm_position.length > start
        ]
        return encode_fields("multimodal", inside) if inside else b""

    return extras


def bypass_reason(request: Any) -> str:
    """Why a request's KV cannot be described by (adapter, tokens); empty if it can.

    Unknown things are bypassed, never guessed at.
    """
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if request.pooling_params is not None:
        return "pooling"
    if getattr(request, "resumable", False):
        return "streaming_input"
    if any(token < 0 for token in request.prompt_token_ids[:1]):
        return "token_ids"
    return ""


def switch(request: Any, name: str) -> bool | None:
    """A boolean from the request's `kv_transfer_params`; None: absent or not a boolean.

    Clients send JSON, some of them booleans as words; what is neither is ignored, loudly.
    """
    params = request.kv_transfer_params
    value = params.get(name) if isinstance(params, Mapping) else None
    if value is None or isinstance(value, bool):
        return value
    known = _WORDS.get(str(value).strip().lower())
    if known is None:
        logger.warning("kv_transfer_params: %s = %r is not a boolean, ignored", name, value)
    return known
