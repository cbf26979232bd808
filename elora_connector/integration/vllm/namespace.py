"""Namespace: the digest of everything that makes two engines' KV interchangeable.

Taken from the *resolved* model configuration, after overrides, and from the weights
themselves.  What is in doubt goes in: a needless miss is cheap, a wrong hit is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elora_connector.core.keys import digest_fields, namespace_digest

_SAMPLE = 4096
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
        "max_model_len_scaling": str(getattr(model, "rope_scaling", None)),
        "load_format": str(vllm_config.load_config.load_format),
    }


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

    Hub caches name files by content hash, which is taken as it is.  Elsewhere the sizes,
    and of safetensors files the header and 4 KiB of every tensor, are hashed: a
    fine-tuned model differs in practically every tensor.
    """
    files = sorted(_weight_files(model_dir), key=lambda path: path.name)
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(digest_fields("elora.weights", [path.name, _file_digest(path)]))
    return digest.digest()


def _weight_files(model_dir: Path) -> Iterable[Path]:
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"):
        files = list(model_dir.glob(pattern))
        if files:
            return files
    return ()


def _file_digest(path: Path) -> bytes:
    real = path.resolve()
    if path.is_symlink() and _HUB_BLOB.fullmatch(real.name):
        return real.name.encode()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            return _safetensors_digest(file)
        return _sampled_digest(file, os.fstat(file.fileno()).st_size)


def _safetensors_digest(file: Any) -> bytes:
    (length,) = struct.unpack("<Q", file.read(8))
    header = file.read(length)
    digest = hashlib.sha256(header)
    for name, tensor in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        middle = begin + max(0, (end - begin - _SAMPLE) // 2)
        file.seek(8 + length + middle)
        digest.update(file.read(min(_SAMPLE, end - middle)))
    return digest.digest()


def _sampled_digest(file: Any, size: int) -> bytes:
    """Evenly spread samples of a file whose format is not read."""
    digest = hashlib.sha256(struct.pack("<Q", size))
    step = max(_SAMPLE, size // 1024)
    for offset in range(0, size, step):
        file.seek(offset)
        digest.update(file.read(_SAMPLE))
    return digest.digest()
