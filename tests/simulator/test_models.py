"""Sizes: against the figures of the paper, published parameter counts and bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elora_connector.simulator.models import (
    ALL_LINEAR,
    ATTENTION,
    GB,
    LLAMA2_34B,
    LLAMA3_8B,
    LLAMA3_70B,
    MACHINES,
    Machine,
    Model,
    ModelError,
    model_from_config,
)

KIB = 1024
CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("model", "parameters", "kv", "r32", "r64"),
    [
        (LLAMA3_8B, 8_030_261_248, 128 * KIB, 168, 335),
        (LLAMA2_34B, 33_743_970_304, 192 * KIB, 436, 872),
        (LLAMA3_70B, 70_553_706_496, 320 * KIB, 828, 1656),
    ],
)
def test_sizes_of_the_paper(model: Model, parameters: int, kv: int, r32: int, r64: int) -> None:
    # The counts are those of the published checkpoints, norms included.
    assert model.parameters == parameters
    assert model.weights_bytes == 2 * parameters
    assert model.kv_bytes_per_token == kv
    assert model.lora_bytes(32) / 1e6 == pytest.approx(r32, abs=0.6)
    assert model.lora_bytes(64) / 1e6 == pytest.approx(r64, abs=1)


def test_adapter_bytes_by_module() -> None:
    # q and o: 16 x (4096 + 4096); k and v: 16 x (4096 + 1024); 32 layers, 2 bytes each.
    assert LLAMA3_8B.lora_bytes(16, ["q_proj"]) == 16 * 8192 * 32 * 2 == 8 * KIB * KIB
    assert LLAMA3_8B.lora_bytes(16, ["k_proj"]) == 16 * 5120 * 32 * 2
    assert LLAMA3_8B.lora_bytes(16, ATTENTION) == 16 * (2 * 8192 + 2 * 5120) * 32 * 2
    assert LLAMA3_8B.lora_bytes(16, ["gate_proj"]) == 16 * (4096 + 14336) * 32 * 2
    parts = sum(LLAMA3_8B.lora_bytes(16, [module]) for module in ALL_LINEAR)
    assert LLAMA3_8B.lora_bytes(16) == parts
    assert LLAMA3_8B.lora_bytes(16, ["q_proj", "q_proj"]) == LLAMA3_8B.lora_bytes(16, ["q_proj"])


@pytest.mark.parametrize(
    ("name", "low", "high", "slots", "break_even"),
    [
        ("llama3-8b", 50.5, 51.5, (30, 30), 4.0),
        ("llama2-34b", 200, 214, (45, 49), 5.8),
        ("llama3-70b", 395, 420, (47, 50), 9.2),
    ],
)
def test_set_ups_of_the_paper(
    name: str, low: float, high: float, slots: tuple[int, int], break_even: float
) -> None:
    machine = MACHINES[name]
    assert low <= machine.pool_bytes / GB <= high
    assert slots[0] <= machine.slots(64, 0.2) <= slots[1]
    assert machine.break_even_bytes_s() / GB == pytest.approx(break_even, abs=0.05)
    assert machine.break_even_bytes_s(1000) == 1000 * machine.model.kv_bytes_per_token


def test_attention_is_counted_pair_by_pair() -> None:
    pairs = sum(100 + i for i in range(1, 8))
    assert LLAMA3_8B.attention_flops(7, 100) == 4 * 32 * 32 * 128 * pairs
    assert LLAMA3_8B.attention_flops(0, 100) == 0
    assert LLAMA3_8B.linear_flops_per_token == 2 * LLAMA3_8B.linear_parameters
    # 32 layers of 218,103,808 linear weights.
    assert LLAMA3_8B.linear_parameters == 32 * 218_103_808


def test_a_model_that_does_not_fit_leaves_no_pool() -> None:
    assert Machine(LLAMA3_70B, gpus=1).pool_bytes == 0
    assert Machine(LLAMA3_70B, gpus=1).slots(64, 0.2) == 0


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    kept = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    file.write_text(json.dumps(kept))
    return file


def test_a_config_file_or_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path)
    for path in (file, tmp_path):
        model = model_from_config(path)
        assert model.parameters == LLAMA3_8B.parameters
        assert model.kv_bytes_per_token == LLAMA3_8B.kv_bytes_per_token
        assert model.lora_bytes(32) == LLAMA3_8B.lora_bytes(32)


def test_what_a_config_file_may_leave_out_or_add(tmp_path: Path) -> None:
    plain = model_from_config(write(tmp_path, num_key_value_heads=None, torch_dtype=None))
    assert (plain.kv_heads, plain.head_size, plain.dtype_bytes) == (32, 128, 2)
    tied = model_from_config(write(tmp_path, tie_word_embeddings=True))
    assert LLAMA3_8B.parameters - tied.parameters == 128256 * 4096
    wide = model_from_config(write(tmp_path, head_dim=256))
    assert wide.kv_bytes_per_token == 2 * LLAMA3_8B.kv_bytes_per_token
    assert model_from_config(write(tmp_path, torch_dtype="float32")).dtype_bytes == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a whole number >= 1, got None"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be a whole number >= 1, got '32'"),
        ({"num_key_value_heads": 5}, "heads a multiple of kv_heads"),
        ({"torch_dtype": "int3"}, "dtype 'int3': expected one of float32"),
        ({"num_local_experts": 8}, "num_local_experts means a mixture of experts"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
    ],
)
def test_bad_config_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_from_config(write(tmp_path, **changes))


def test_unreadable_config_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        model_from_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        model_from_config(file)
    file.write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        model_from_config(file)


def test_bad_ranks_modules_and_machines() -> None:
    with pytest.raises(ModelError, match="rank must be at least 1, got 0"):
        LLAMA3_8B.lora_bytes(0)
    with pytest.raises(ModelError, match="modules lm_head: expected some of q_proj"):
        LLAMA3_8B.lora_bytes(8, ["q_proj", "lm_head"])
    with pytest.raises(ModelError, match=r"modules \(none\)"):
        LLAMA3_8B.lora_bytes(8, [])
    with pytest.raises(ModelError, match="at least one GPU"):
        Machine(LLAMA3_8B, gpus=0)
