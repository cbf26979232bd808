"""Namespace: the digest of everything that makes two engines' KV interchangeable.

Taken from the *resolved* model configuration, after overrides, and from the weights
themselves.  What is in doubt goes in: a needless miss is cheap, a wrong hit is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from elora_connector.core.keys import digest_fields, namespace_digest

_PIECE = 8 << 20
_READERS = 4
_HUB_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# Where the model lies and which library wrote its configuration say nothing about its KV.
_NOT_IDENTITY = frozenset({"_name_or_path", "transformers_version", "name_or_path"})


def model_fields(vllm_config: Any) -> dict[str, Any]:
    """The resolved model configuration, as far as it can change KV."""
    model = vllm_config.model_config
    hf = model.hf_config.to_dict()
    return {
        "hf_config": _plain({k: v for k, v in hf.items() if k not in _NOT_IDENTITY}),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "revision": str(model.revision),
        # Some rope kinds choose their factors by the longest sequence that is allowed.
        "max_model_len": model.max_model_len if _scaled_rope(hf) else None,
        "load_format": str(vllm_config.load_config.load_format),
    }


def _scaled_rope(hf: Mapping[str, Any]) -> bool:
    """Does any layer kind use another rope than the plain one?"""
    settings = [hf.get("rope_scaling"), hf.get("rope_parameters")]
    text = _plain([setting for setting in settings if setting])
    kinds = re.findall(r'"(?:rope_)?type": "([^"]*)"', text)
    return any(kind != "default" for kind in kinds)


def _plain(value: Any) -> str:
    """A canonical text of nested settings; objects by their own text."""
    return json.dumps(value, sort_keys=True, default=str)


def compute_namespace(
    vllm_config: Any,
    layout: Mapping[str, Any],
    *,
    weights: bytes,
    mac_key_id: str,
) -> bytes:
    """32 bytes over model, weights, KV layout, parallel sizes and MAC key.

    Args:
        layout: block and chunk size, KV dtype, layers, heads, head size, device ...
        weights: from `weight_digest`, or of an explicit `model_id`.
    """
    parallel = vllm_config.parallel_config
    return namespace_digest(
        {
            "schema": 1,
            "weights": weights,
            "mac_key": mac_key_id,
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            **{f"model.{key}": value for key, value in model_fields(vllm_config).items()},
            **{f"kv.{key}": value for key, value in layout.items()},
        }
    )


def explicit_weights(model_id: str) -> bytes:
    """Stand-in for the weight digest where the operator names the model's version."""
    return digest_fields("elora.model_id", [model_id])


def weight_digest(model_dir: Path) -> bytes | None:
    """Digest of the weight files in a local directory; None if there are none.

    Hub caches name files by content hash, which is taken as it is.  Other files are read
    in full (XXH3, several at a time): models that differ in a few rows only do exist.
    The digest is remembered until a file's size, inode or times change.
    """
    files = sorted(_weight_files(model_dir), key=lambda path: path.name)
    if not files:
        return None
    return _digest_of(tuple((path, *_stat_key(path)) for path in files))


@lru_cache(maxsize=8)
def _digest_of(files: tuple[tuple[Any, ...], ...]) -> bytes:
    paths: list[Path] = [entry[0] for entry in files]
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(_file_digest, paths))
    names = [path.name for path in paths]
    return digest_fields("elora.weights", [names, digests])


def _stat_key(path: Path) -> tuple[str, int, int, int, int, int]:
    real = path.resolve()
    stat = real.stat()
    times = (stat.st_mtime_ns, stat.st_ctime_ns)
    return (str(real), stat.st_dev, stat.st_ino, stat.st_size, *times)


def _weight_files(model_dir: Path) -> list[Path]:
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"):
        files = list(model_dir.glob(pattern))
        if files:
            return files
    return []


def has_weights(model_dir: Path) -> bool:
    """Are there files that `weight_digest` would read?  Reads none of them."""
    return bool(_weight_files(model_dir))


def _file_digest(path: Path) -> bytes:
    real = path.resolve()
    if path.is_symlink() and _HUB_BLOB.fullmatch(real.name):
        return real.name.encode()
    digest = xxhash.xxh3_128()
    with real.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.digest()
