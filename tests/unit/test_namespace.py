"""The namespace tells apart whatever could make two engines' KV differ."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from elora_connector.integration.vllm.namespace import (
    compute_namespace,
    has_weights,
    weight_digest,
)


def model_dir(path: Path, **tensors: np.ndarray) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def test_one_changed_row_changes_the_digest(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((4096, 64), dtype=np.float32)
    digests = {weight_digest(model_dir(tmp_path / "m0", table=table))}
    for row in (0, 1000, 4095):
        changed = table.copy()
        changed[row] = -changed[row]
        digests.add(weight_digest(model_dir(tmp_path / f"m{row + 1}", table=changed)))
    assert len(digests) == 4


def test_the_same_content_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    table = np.ones((8, 8), dtype=np.float32)
    one, two = (model_dir(tmp_path / name, table=table) for name in ("one", "two"))
    assert weight_digest(one) == weight_digest(two)


def test_weights_replaced_in_one_process_are_noticed(tmp_path: Path) -> None:
    here = model_dir(tmp_path / "m", table=np.ones((8, 8), dtype=np.float32))
    before = weight_digest(here)
    assert weight_digest(here) == before
    model_dir(here, table=np.zeros((8, 8), dtype=np.float32))
    assert weight_digest(here) != before


def test_no_weights(tmp_path: Path) -> None:
    assert weight_digest(tmp_path) is None
    assert not has_weights(tmp_path)


def config(max_model_len: int, rope: dict[str, Any] | None, **changes: Any) -> Any:
    hf = {"hidden_size": 8, "_name_or_path": "anywhere", "rope_parameters": rope}
    model = {
        "hf_config": SimpleNamespace(to_dict=lambda: hf),
        "dtype": "bfloat16",
        "quantization": None,
        "revision": None,
        "max_model_len": max_model_len,
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )


def namespace(vllm_config: Any, **layout: Any) -> bytes:
    return compute_namespace(vllm_config, layout, weights=bytes(32), mac_key_id="")


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 512}


@pytest.mark.parametrize("rope", [LONG, {"full": LONG, "sliding": PLAIN}])
def test_a_scaled_rope_depends_on_the_longest_sequence(rope: dict[str, Any]) -> None:
    assert namespace(config(512, rope)) != namespace(config(1024, rope))


@pytest.mark.parametrize("rope", [PLAIN, None])
def test_a_plain_rope_does_not(rope: dict[str, Any] | None) -> None:
    assert namespace(config(512, rope)) == namespace(config(1024, rope))


def test_other_differences() -> None:
    base = namespace(config(512, PLAIN), block_size=32)
    others = [
        namespace(config(512, {**PLAIN, "rope_theta": 5e5}), block_size=32),
        namespace(config(512, PLAIN, dtype="float16"), block_size=32),
        namespace(config(512, PLAIN, quantization="fp8"), block_size=32),
        namespace(config(512, PLAIN), block_size=64),
        compute_namespace(
            config(512, PLAIN), {"block_size": 32}, weights=bytes([1]) * 32, mac_key_id=""
        ),
        compute_namespace(
            config(512, PLAIN), {"block_size": 32}, weights=bytes(32), mac_key_id="k"
        ),
    ]
    assert len({base, *others}) == 1 + len(others)
