"""Checks against block size, memory and files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elora_connector.config import (
    adapter_budget,
    available_memory_bytes,
    budget_line,
    check_chunk_size,
    check_files,
    load_config,
    memory_budget,
)
from elora_connector.errors import ConfigError

GB = 1024**3
KB = 1024


@pytest.mark.parametrize(
    ("chunk", "block", "nearest"),
    [
        (100, 16, "96 or 112"),
        (8, 16, "16"),
        (0, 16, "16"),
        (-4, 16, "16"),
        (257, 128, "256 or 384"),
    ],
)
def test_chunk_size_that_does_not_fit(chunk: int, block: int, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_chunk_size(chunk, block)
    assert str(caught.value) == (
        f"chunk_size = {chunk}: expected a multiple of vLLM's block size {block}; "
        f"nearest: {nearest}"
    )


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="block size = 0"):
        check_chunk_size(16, 0)


@given(st.integers(-1000, 5000), st.integers(1, 300))
def test_suggested_chunk_sizes_are_legal_and_nearest(chunk: int, block: int) -> None:
    try:
        check_chunk_size(chunk, block)
    except ConfigError as error:
        sizes = [int(word) for word in str(error).rsplit("nearest: ", 1)[1].split(" or ")]
        for size in sizes:
            check_chunk_size(size, block)
            assert abs(size - max(chunk, 0)) <= block
        assert min(sizes) <= chunk <= max(sizes) or sizes == [block]
    else:
        assert chunk > 0
        assert chunk % block == 0


def test_budget_that_fits() -> None:
    config = load_config({}, {"lmcache.max_local_cpu_size": 2, "elora.engines": 3})
    assert memory_budget(config, ranks=4, free_bytes=24 * GB) == 24 * GB
    assert budget_line(config, 4, 32 * GB) == (
        "4 ranks x 3 engines x max_local_cpu_size 2 GB = 24.00 GB of host memory, 32.00 GB free"
    )


def test_budget_that_does_not_fit() -> None:
    config = load_config({}, {"lmcache.max_local_cpu_size": 2.5, "elora.engines": 2})
    with pytest.raises(ConfigError) as caught:
        memory_budget(config, ranks=4, free_bytes=15 * GB)
    message = str(caught.value)
    for figure in ("4 ranks", "2 engines", "2.5 GB", "20.00 GB", "15.00 GB free", "at most 1.87"):
        assert figure in message
    smaller = dataclasses.replace(config, max_local_cpu_size=1.87)
    assert memory_budget(smaller, ranks=4, free_bytes=15 * GB) <= 15 * GB


def test_files_must_be_readable(tmp_path: Path) -> None:
    ca = tmp_path / "ca.crt"
    config = load_config({}, {"elora.remote.ca_file": str(ca)})
    with pytest.raises(ConfigError, match=r"elora.remote.ca_file = .*expected a readable file"):
        check_files(config)
    ca.write_text("x")
    check_files(config)
    check_files(load_config({}, {}))


# --- memory -------------------------------------------------------------------


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


_MEMINFO = "MemTotal:   9000 kB\nMemFree:   100 kB\nMemAvailable:    5000 kB\n"


def test_memory_of_this_machine() -> None:
    assert 0 < available_memory_bytes() < 1 << 60


def test_memory_without_a_limit(tmp_path: Path) -> None:
    _write(tmp_path, {"proc/meminfo": _MEMINFO, "proc/self/cgroup": "0::/a/b\n"})
    _write(tmp_path, {"sys/fs/cgroup/a/memory.max": "max\n"})
    assert available_memory_bytes(tmp_path) == 5000 * KB


def test_tightest_cgroup_above_counts(tmp_path: Path) -> None:
    """cgroup v2: the limit may sit on a parent; idle file pages are given back."""
    base = "sys/fs/cgroup"
    _write(tmp_path, {"proc/meminfo": _MEMINFO, "proc/self/cgroup": "0::/a/b\n"})
    _write(
        tmp_path,
        {
            f"{base}/a/memory.max": f"{3000 * KB}\n",
            f"{base}/a/memory.current": f"{2500 * KB}\n",
            f"{base}/a/memory.stat": f"anon 5\ninactive_file {500 * KB}\nfile 9\n",
            f"{base}/a/b/memory.max": f"{4000 * KB}\n",
            f"{base}/a/b/memory.current": "0\n",
        },
    )
    assert available_memory_bytes(tmp_path) == 1000 * KB


def test_limit_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup may be the host's and absent here: the root's limit counts."""
    _write(tmp_path, {"proc/meminfo": _MEMINFO, "proc/self/cgroup": "0::/host/only\n"})
    _write(
        tmp_path,
        {
            "sys/fs/cgroup/memory.max": f"{2000 * KB}",
            "sys/fs/cgroup/memory.current": f"{500 * KB}",
        },
    )
    assert available_memory_bytes(tmp_path) == 1500 * KB


def test_cgroup_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/x"
    _write(tmp_path, {"proc/meminfo": _MEMINFO, "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n"})
    _write(
        tmp_path,
        {
            f"{base}/memory.limit_in_bytes": f"{3000 * KB}",
            f"{base}/memory.usage_in_bytes": f"{1000 * KB}",
            f"{base}/memory.stat": f"total_inactive_file {100 * KB}",
        },
    )
    assert available_memory_bytes(tmp_path) == 2100 * KB


def test_nothing_left_is_zero(tmp_path: Path) -> None:
    _write(tmp_path, {"proc/meminfo": _MEMINFO, "proc/self/cgroup": "0::/\n"})
    _write(
        tmp_path,
        {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "2000"},
    )
    assert available_memory_bytes(tmp_path) == 0


def test_adapters_that_may_not_fit_are_explained() -> None:
    config = load_config({}, {"lmcache.max_local_cpu_size": 1.0})
    fits = (GB // 8, GB // 4)
    assert [adapter_budget(config, 4, None, size) for size in fits] == [[], []]
    assert adapter_budget(config, 4, 8, GB // 8) == []
    (line,) = adapter_budget(config, 4, 10, GB // 8)
    assert "max_local_cpu_size = 1 GB holds 8 adapters of 0.125 GB" in line
    assert "--max-cpu-loras 10 may not be reached" in line
    (line,) = adapter_budget(config, 5, 10, GB // 4)
    assert "--max-loras 5 x up to 0.250 GB (--max-lora-rank) = 1.250 GB on each rank" in line
