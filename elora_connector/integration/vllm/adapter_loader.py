"""Read an adapter once: weights, digest and file state that are sure to belong together.

Used from background threads and from vLLM's own loading path alike; holds no adapter
itself.  What is known about a load is stamped on vLLM's model object, so it lives and
dies with the weights and cannot disagree with vLLM's caches.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from elora_connector.integration.vllm.adapter_messages import Verify
from elora_connector.integration.vllm.identity import (
    CONFIG_FILE,
    DigestCache,
    StatKey,
    adapter_digest,
    is_settled,
    stat_key,
)

ATTEMPTS = 3
MAX_CAUSE_CHARS = 400
_STAMP = "elora_load"


@dataclass(frozen=True, slots=True)
class LoadInfo:
    """Where loaded weights come from.

    `settled` says that `stat` is a safe witness: no write after the load can leave it
    unchanged.  `nbytes` is what the weights take in host memory.
    """

    name: str
    source: str
    digest: bytes
    load_seq: int
    stat: StatKey
    settled: bool
    nbytes: int


def load_info(model: Any) -> LoadInfo | None:
    """The stamp of a vLLM LoRA model; None for models we did not load (warm-up dummies)."""
    found = getattr(model, _STAMP, None)
    return found if isinstance(found, LoadInfo) else None


def stamp(model: Any, info: LoadInfo) -> None:
    """Write the stamp."""
    setattr(model, _STAMP, info)


def weight_bytes(model: Any) -> int:
    """Bytes of the tensors of a vLLM LoRA model that was not registered yet."""
    tensors = {
        id(tensor): tensor
        for layer in model.loras.values()
        for weights in (layer.lora_a, layer.lora_b)
        for tensor in (weights if isinstance(weights, list) else [weights])
        if tensor is not None
    }
    return sum(int(tensor.nbytes) for tensor in tensors.values())


def variant_of(request: LoRARequest) -> str:
    """What a request says about applying the same bytes differently."""
    return "3d" if request.is_3d_lora_weight else ""


def request_source(request: LoRARequest) -> str:
    """Path and variant as the request gives them: a change means other weights."""
    return f"{variant_of(request)}:{request.lora_path}"


class AdapterLoader:
    """Loads adapters through vLLM's own reader, with identity.

    Changes no vLLM state.  Thread-safe; callers serialise loads of one id.
    """

    def __init__(
        self,
        read: Callable[[LoRARequest], Any],
        *,
        lora_dtype: str,
        target_modules: Sequence[str],
    ) -> None:
        self._read = read
        self._lora_dtype = lora_dtype
        self._target_modules = tuple(target_modules)
        self._digests = DigestCache()
        self._next_seq = itertools.count(1)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> Mapping[str, int]:
        """Since the last call: "read", and "unchanged" or "changed" of second looks."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def _count(self, event: str) -> None:
        with self._lock:
            self._counts[event] += 1

    def load(self, request: LoRARequest, *, hash_again: bool) -> Any:
        """Read one adapter and stamp the model.

        Args:
            hash_again: compute the digest even for files that look familiar.

        Returns:
            vLLM's `LoRAModel`, in no cache yet.

        Raises:
            Exception: missing, damaged, refused by vLLM, or never at rest; `describe` it.
        """
        if getattr(request, "tensorizer_config_dict", None):
            raise ValueError("adapters in tensorizer format have no identity and are refused")
        for _ in range(ATTEMPTS):
            self._count("read")
            model = self._attempt(request, hash_again)
            if model is not None:
                return model
        raise ValueError("its adapter files keep changing")

    def recheck(self, request: LoRARequest, info: LoadInfo, verify: Verify) -> LoadInfo | None:
        """Is what was loaded still what the files hold?

        Returns:
            the stamp, brought up to date, or None if the adapter must be loaded again.

        Raises:
            OSError: the files are gone or cannot be read.
        """
        found = self._recheck(request, info, verify)
        self._count("changed" if found is None else "unchanged")
        return found

    def _recheck(self, request: LoRARequest, info: LoadInfo, verify: Verify) -> LoadInfo | None:
        path, stat = self._stat(request)
        settled = is_settled(stat, time.time_ns())
        same_source = info.source == request_source(request)
        untouched = stat == info.stat and info.settled and same_source
        if untouched and verify is not Verify.ALWAYS:
            return replace(info, name=request.lora_name)
        digest = self._digest(request, path, stat, settled, hash_again=True)
        if digest != info.digest or self._stat(request)[1] != stat:
            return None
        return replace(
            info,
            name=request.lora_name,
            source=request_source(request),
            stat=stat,
            settled=settled,
        )

    def is_current(self, request: LoRARequest, model: Any) -> bool:
        """May a model loaded in the background be used now?  False if the files changed."""
        info = load_info(model)
        if info is None or info.source != request_source(request):
            return False
        try:
            return self._stat(request)[1] == info.stat
        except OSError:
            return False

    def _attempt(self, request: LoRARequest, hash_again: bool) -> Any | None:
        """One read; None if the files changed meanwhile."""
        # Numbered before the first look: a later number has seen newer content.
        seq = next(self._next_seq)
        path, stat = self._stat(request)
        settled = is_settled(stat, time.time_ns())
        try:
            digest = self._digest(request, path, stat, settled, hash_again)
            model = self._read(request)
        except Exception:
            if self._stat(request)[1] == stat:
                raise
            return None  # half-written files: the change explains the error
        if self._stat(request)[1] != stat:
            return None
        if not settled and self._hash(request, path) != digest:
            return None
        source = request_source(request)
        nbytes = weight_bytes(model)
        stamp(model, LoadInfo(request.lora_name, source, digest, seq, stat, settled, nbytes))
        return model

    def _stat(self, request: LoRARequest) -> tuple[Path, StatKey]:
        path = Path(get_adapter_absolute_path(request.lora_path))
        return path, stat_key(path)

    def _digest(
        self, request: LoRARequest, path: Path, stat: StatKey, settled: bool, hash_again: bool
    ) -> bytes:
        variant = variant_of(request)
        known = None if hash_again or not settled else self._digests.get(stat, variant)
        if known is not None:
            return known
        digest = self._hash(request, path)
        if settled:
            self._digests.put(stat, digest, variant)
        return digest

    def _hash(self, request: LoRARequest, path: Path) -> bytes:
        return adapter_digest(
            path,
            lora_dtype=self._lora_dtype,
            target_modules=self._target_modules,
            variant=variant_of(request),
        )


def describe(request: LoRARequest, cause: str) -> str:
    """One sentence: which adapter, what is wrong, where."""
    words = " ".join(cause.split())[:MAX_CAUSE_CHARS].rstrip(".")
    return f"adapter {request.lora_name!r}: {words} (path {request.lora_path})"


def cause_of(error: BaseException) -> str:
    """An error of a load in plain words."""
    if isinstance(error, LoRAAdapterNotFoundError):
        return "there are no adapter files"
    if isinstance(error, json.JSONDecodeError):
        return f"{CONFIG_FILE} is not valid JSON ({error.msg}, line {error.lineno})"
    if isinstance(error, PermissionError):
        return "its files may not be read (permission denied)"
    if type(error).__name__ == "SafetensorError":
        return f"the weight file is damaged ({error})"
    return str(error) or type(error).__name__
