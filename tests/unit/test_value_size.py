"""`elora.remote.max_value_mb`: chunks above it are not shared, and the start says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elora_connector.config import load_config
from elora_connector.integration.vllm.build import _obstacle, values_fit
from elora_connector.integration.vllm.geometry import Geometry


def geometry(chunk_bytes: int) -> Geometry:
    return Geometry(block_size=16, chunk_size=64, block_bytes=chunk_bytes // 4, num_blocks=9)


@pytest.mark.parametrize(("chunk_bytes", "fits"), [(1 << 20, True), ((1 << 20) + 4, False)])
def test_the_limit_is_of_the_payload_of_one_rank(chunk_bytes: int, fits: bool) -> None:
    config = load_config({}, {"elora.remote.max_value_mb": 1, "lmcache.chunk_size": 64})
    assert values_fit(config, geometry(chunk_bytes)) is fits
    vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    said = _obstacle(config, vllm_config, geometry(chunk_bytes), weights=b"known")
    assert bool(said) is not fits
    assert fits or "more than elora.remote.max_value_mb = 1" in said


def test_weights_that_nobody_knows() -> None:
    vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    said = _obstacle(load_config({}, {}), vllm_config, geometry(4096), weights=None)
    assert "load_format dummy; elora.model_id names them" in said
