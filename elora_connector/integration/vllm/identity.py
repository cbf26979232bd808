"""Which weights an adapter directory holds: SHA-256 of its content, and when to trust a stat.

Standard library only.  The digest is what keys KV; the stat key only decides whether a
digest has to be computed again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them; it reads the first one only."""
EXTRA_FILES = ("new_embeddings.safetensors", "new_embeddings.bin", "new_embeddings.pt")

BUFFER_BYTES = 1 << 20
DOMAIN = b"elora-adapter-1"

FINE_MARGIN_NS = 50_000_000
COARSE_MARGIN_NS = 2_000_000_000

FileStat = tuple[str, int, int, int, int, int]
"""(real path, st_dev, st_ino, st_size, st_mtime_ns, st_ctime_ns)."""
StatKey = tuple[FileStat, ...]


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def adapter_files(path: Path) -> tuple[Path, ...]:
    """The files that decide what an adapter computes: config, weights, extra embeddings.

    Raises:
        FileNotFoundError: there is no config or no weight file.
    """
    config = path / CONFIG_FILE
    if not config.is_file():
        raise FileNotFoundError(f"there is no {CONFIG_FILE}")
    weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if weights is None:
        raise FileNotFoundError(f"there is no {WEIGHT_FILES[0]} (nor .bin, .pt)")
    extras = (path / name for name in EXTRA_FILES)
    return (config, weights, *(extra for extra in extras if extra.is_file()))


def stat_key(path: Path) -> StatKey:
    """One row per file that `adapter_files` finds; no file is opened.

    ctime is in it because size, mtime and inode can all be kept while content changes.

    Raises:
        OSError: a file is missing or cannot be looked at.
    """
    return tuple(_stat(file) for file in adapter_files(path))


def _stat(file: Path) -> FileStat:
    real = os.path.realpath(file)
    found = os.stat(real)
    return (
        real,
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def total_bytes(key: StatKey) -> int:
    """Size of all files of a stat key."""
    return sum(row[3] for row in key)


def is_settled(key: StatKey, now_ns: int) -> bool:
    """Would a write from `now_ns` (time.time_ns) on be sure to change the stat key?

    File systems stamp times with a granularity of milliseconds, some of whole seconds;
    within one grain of the last change a second change is invisible.
    """
    return all(now_ns - max(mtime, ctime) > _margin(ctime) for *_, mtime, ctime in key)


def _margin(ctime_ns: int) -> int:
    return COARSE_MARGIN_NS if ctime_ns % 1_000_000_000 == 0 else FINE_MARGIN_NS


def adapter_digest(
    path: Path, *, lora_dtype: str, target_modules: Sequence[str], variant: str = ""
) -> bytes:
    """SHA-256 (32 bytes) over the content of an adapter and how the engine applies it.

    Args:
        path: local directory in PEFT's format.
        lora_dtype: dtype the weights are converted to, e.g. "bfloat16".
        target_modules: the engine's LoRA target modules; empty means all.
        variant: anything else that changes how the same bytes are applied.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    _add_field(digest, b"domain", DOMAIN)
    _add_field(digest, b"lora_dtype", lora_dtype.encode())
    _add_field(digest, b"variant", variant.encode())
    for module in sorted(target_modules):
        _add_field(digest, b"target_module", module.encode())
    for file in adapter_files(path):
        _add_file(digest, file)
    return digest.digest()


def _add_field(digest: _Hash, tag: bytes, value: bytes) -> None:
    """Tag and lengths first: no two lists of fields are the same bytes."""
    digest.update(len(tag).to_bytes(8, "little") + tag)
    digest.update(len(value).to_bytes(8, "little") + value)


def _add_file(digest: _Hash, file: Path) -> None:
    """Name, length, content.

    Raises:
        OSError: the length did not hold, so the prefix would lie.
    """
    _add_field(digest, b"file", file.name.encode())
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    with open(file, "rb", buffering=0) as stream:
        expected = left = os.fstat(stream.fileno()).st_size
        digest.update(expected.to_bytes(8, "little"))
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            left -= count
    if left:
        raise OSError(f"{file.name} changed while it was read")


class DigestCache:
    """Digests by (stat key, variant), the most recently used `capacity` ones; thread-safe."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._digests: OrderedDict[tuple[StatKey, str], bytes] = OrderedDict()
        self._mutex = threading.Lock()

    def get(self, key: StatKey, variant: str = "") -> bytes | None:
        """The digest of files that look like this, if one was put."""
        with self._mutex:
            found = self._digests.get((key, variant))
            if found is not None:
                self._digests.move_to_end((key, variant))
            return found

    def put(self, key: StatKey, digest: bytes, variant: str = "") -> None:
        """Remember a digest; only for a key that was settled before hashing began."""
        with self._mutex:
            self._digests[key, variant] = digest
            self._digests.move_to_end((key, variant))
            while len(self._digests) > self._capacity:
                self._digests.popitem(last=False)

    def __len__(self) -> int:
        return len(self._digests)
