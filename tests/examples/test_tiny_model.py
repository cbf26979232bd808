"""The tiny model: same bytes every time, a tokenizer that round-trips, PEFT's format."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from examples.tiny_model import (
    ADAPTERS,
    Shape,
    TinyModel,
    make_adapter,
    make_model,
    make_tiny_model,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def _digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_two_directories_get_the_same_bytes(tiny: TinyModel, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    assert _digests(tmp_path) == _digests(tiny.model.parent)


def test_a_second_call_keeps_the_files(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path)
    weights = made.model / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert make_tiny_model(tmp_path) == made
    assert weights.stat().st_mtime_ns == before


def test_an_interrupted_run_is_made_again(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path)
    (tmp_path / "tiny_model.json").unlink()
    (made.model / "config.json").write_text("{}")
    make_tiny_model(tmp_path)
    assert json.loads((made.model / "config.json").read_text())["model_type"] == "llama"


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(tiny: TinyModel, text: str) -> None:
    # The names of special tokens inside a text are special tokens, as in any tokenizer.
    text = text.replace("<", "(")
    tokenizer = Tokenizer.from_file(str(tiny.model / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_token_id_has_a_token(tiny: TinyModel) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == Shape().vocab
    assert all(tokenizer.id_to_token(i) is not None for i in range(Shape().vocab))


def test_adapters_have_pefts_names_and_shapes(tiny: TinyModel) -> None:
    shape = Shape()
    assert set(tiny.adapters) == set(ADAPTERS)
    for path in tiny.adapters.values():
        config = json.loads((path / "adapter_config.json").read_text())
        weights = load_file(path / "adapter_model.safetensors")
        assert len(weights) == shape.layers * len(config["target_modules"]) * 2
        for name, tensor in weights.items():
            *_, projection, matrix, _ = name.split(".")
            out, fan_in = shape.projection(projection)
            expected = (config["r"], fan_in) if matrix == "lora_A" else (out, config["r"])
            assert tensor.shape == expected, name


def test_adapters_differ(tiny: TinyModel) -> None:
    files = [path / "adapter_model.safetensors" for path in tiny.adapters.values()]
    assert len({file.read_bytes() for file in files}) == len(files)


def test_options_reach_the_files(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", rope_theta=500.0, shape=Shape(layers=2))
    config = json.loads((model / "config.json").read_text())
    assert (config["rope_theta"], config["num_hidden_layers"]) == (500.0, 2)
    adapter = make_adapter(tmp_path / "a", 1, rank=16, targets=("q_proj",), shape=Shape(layers=2))
    weights = load_file(adapter / "adapter_model.safetensors")
    assert len(weights) == 4
    assert {tensor.shape for tensor in weights.values()} == {(16, 256), (256, 16)}
