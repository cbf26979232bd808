"""Adapter identity: what changes it, and when a stat may be trusted."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.integration.vllm import identity
from elora_connector.integration.vllm.identity import (
    DigestCache,
    adapter_digest,
    adapter_files,
    is_settled,
    stat_key,
    total_bytes,
)

CONFIG = b'{"r": 8}'
WEIGHTS = b"w" * 3000


def make(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    files = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}
    return make(tmp_path / "adapter", files)


def digest(path: Path, dtype: str = "float32", modules: tuple[str, ...] = ()) -> bytes:
    return adapter_digest(path, lora_dtype=dtype, target_modules=modules)


def test_digest_is_32_bytes_and_independent_of_the_path(adapter: Path, tmp_path: Path) -> None:
    files = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}
    copy = make(tmp_path / "copy", files | {"README.md": b"not read"})
    assert len(digest(adapter)) == 32
    assert digest(adapter) == digest(copy)


@pytest.mark.parametrize(
    "files",
    [
        {"adapter_config.json": b'{"r": 4}'},
        {"adapter_model.safetensors": WEIGHTS[:-1] + b"x"},
        {"adapter_model.safetensors": WEIGHTS + b"w"},
        {"new_embeddings.safetensors": b""},
    ],
    ids=["config", "weights", "length", "embeddings"],
)
def test_digest_depends_on_every_file(adapter: Path, files: dict[str, bytes]) -> None:
    before = digest(adapter)
    make(adapter, files)
    assert digest(adapter) != before


def test_digest_depends_on_how_the_engine_applies_it(adapter: Path) -> None:
    plain = digest(adapter)
    assert digest(adapter, dtype="bfloat16") != plain
    assert digest(adapter, modules=("q_proj",)) != plain
    both = ("q_proj", "v_proj")
    assert digest(adapter, modules=both) == digest(adapter, modules=both[::-1])
    assert digest(adapter, modules=("q_proj", "v")) != digest(adapter, modules=("q_projv",))
    variant = adapter_digest(adapter, lora_dtype="float32", target_modules=(), variant="3d")
    assert variant != plain


def test_digest_streams_more_than_one_buffer(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digest(adapter)
    monkeypatch.setattr(identity, "BUFFER_BYTES", 7)
    assert digest(adapter) == whole


@given(split=st.integers(0, len(CONFIG + WEIGHTS)))
def test_bytes_moved_between_files_change_the_digest(split: int) -> None:
    everything = CONFIG + WEIGHTS
    with tempfile.TemporaryDirectory() as name:
        files = {
            "adapter_config.json": everything[:split],
            "adapter_model.safetensors": everything[split:],
        }
        moved = digest(make(Path(name) / "moved", files))
        files = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}
        plain = digest(make(Path(name) / "plain", files))
    assert (moved == plain) == (split == len(CONFIG))


def test_only_the_weight_file_that_vllm_reads_counts(adapter: Path) -> None:
    before, key = digest(adapter), stat_key(adapter)
    make(adapter, {"adapter_model.bin": b"ignored beside safetensors"})
    assert digest(adapter) == before
    assert stat_key(adapter) == key
    (adapter / "adapter_model.safetensors").unlink()
    assert adapter_files(adapter)[1].name == "adapter_model.bin"
    assert digest(adapter) != before
    assert stat_key(adapter) != key


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_file_is_named(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        stat_key(adapter)
    with pytest.raises(FileNotFoundError, match=name):
        digest(adapter)


def test_stat_key_sees_a_write_that_keeps_size_mtime_and_inode(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    before, key = weights.stat(), stat_key(adapter)
    while weights.stat().st_ctime_ns == before.st_ctime_ns:
        with open(weights, "r+b") as stream:
            stream.write(b"x")
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )
    assert stat_key(adapter) != key
    assert total_bytes(key) == len(CONFIG) + len(WEIGHTS)


def test_stat_key_follows_links(adapter: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(adapter)
    assert stat_key(link) == stat_key(adapter)


def test_a_growing_file_is_an_error(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def short(fd: int) -> os.stat_result:
        values = list(real(fd))
        values[6] -= 1
        return os.stat_result(values)

    monkeypatch.setattr(identity.os, "fstat", short)
    with pytest.raises(OSError, match="changed while it was read"):
        digest(adapter)


def test_settled_needs_more_than_one_grain_of_the_clock() -> None:
    second = 1_000_000_000
    fine, coarse = 7 * second + 1, 7 * second

    def row(time_ns: int) -> tuple[str, int, int, int, int, int]:
        return ("f", 1, 1, 1, time_ns, time_ns)

    assert not is_settled((row(fine),), fine + 1_000_000)
    assert is_settled((row(fine),), fine + 100_000_000)
    assert not is_settled((row(coarse),), coarse + 100_000_000)
    assert is_settled((row(coarse),), coarse + 3 * second)
    assert not is_settled((row(fine), row(fine + second)), fine + second)
    # A clock of the file server that is ahead never counts as settled.
    assert not is_settled((row(fine + second),), fine)


def test_digest_cache_keeps_the_most_recent() -> None:
    cache = DigestCache(capacity=2)
    keys = [(("f", 1, i, 1, 1, 1),) for i in range(3)]
    for number, key in enumerate(keys[:2]):
        cache.put(key, bytes([number]) * 32)
    assert cache.get(keys[0]) == bytes(32)
    cache.put(keys[2], b"\2" * 32)
    assert len(cache) == 2
    assert cache.get(keys[1]) is None
    assert cache.get(keys[0]) == bytes(32)
    assert cache.get(keys[0], variant="3d") is None
