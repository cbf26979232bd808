"""Checks that need facts from outside the configuration: block size, memory, files."""

from __future__ import annotations

import os
from pathlib import Path

from elora_connector.config.model import GB, EloraConfig
from elora_connector.errors import ConfigError


def check_chunk_size(chunk_size: int, block_size: int) -> None:
    """A chunk is a whole number of blocks.

    Raises:
        ConfigError: it is not; the message names both and the nearest legal values.
    """
    if block_size < 1:
        raise ConfigError(f"vLLM's block size = {block_size}: expected at least 1")
    if chunk_size > 0 and chunk_size % block_size == 0:
        return
    below = max(chunk_size, 0) // block_size * block_size
    legal = f"{below} or {below + block_size}" if below else f"{block_size}"
    raise ConfigError(
        f"chunk_size = {chunk_size}: expected a multiple of vLLM's block size {block_size}; "
        f"nearest: {legal}"
    )


def budget_line(config: EloraConfig, ranks: int, free_bytes: int) -> str:
    """Host memory of all ranks and engines against what is free, for log and error."""
    total = ranks * config.engines * config.host_bytes
    return (
        f"{ranks} ranks x {config.engines} engines x max_local_cpu_size "
        f"{config.max_local_cpu_size:g} GB = {total / GB:.2f} GB of host memory, "
        f"{free_bytes / GB:.2f} GB free"
    )


def memory_budget(config: EloraConfig, ranks: int, free_bytes: int) -> int:
    """Bytes that all ranks of all engines on this host take together.

    Args:
        ranks: worker ranks of one engine on this host.
        free_bytes: see `available_memory_bytes`.

    Raises:
        ConfigError: it does not fit.
    """
    total = ranks * config.engines * config.host_bytes
    if total <= free_bytes:
        return total
    most = free_bytes / (ranks * config.engines) / GB
    raise ConfigError(
        f"{budget_line(config, ranks, free_bytes)}: expected it to fit; max_local_cpu_size "
        f"may be at most {int(most * 100) / 100:.2f}"
    )


def adapter_budget(
    config: EloraConfig, slots: int, host_capacity: int | None, adapter_bytes: int
) -> list[str]:
    """What to tell the user about adapters that may not fit into the host budget.

    Args:
        slots: `--max-loras`; so many adapters are kept in host memory in any case.
        host_capacity: `--max-cpu-loras`, or None where it was not set.
        adapter_bytes: of one adapter of the highest rank allowed (smaller ones take less).
    """
    budget, size = config.host_bytes, f"{adapter_bytes / GB:.3f} GB"
    room = f"max_local_cpu_size = {config.max_local_cpu_size:g} GB"
    told = []
    if slots * adapter_bytes > budget:
        told.append(
            f"{room} is less than the adapters of all GPU slots may take: --max-loras {slots} x "
            f"up to {size} (--max-lora-rank) = {slots * adapter_bytes / GB:.3f} GB on each rank. "
            "They are kept nevertheless, and no KV may fit into host memory beside them; raise "
            "max_local_cpu_size, or lower --max-loras or --max-lora-rank"
        )
    elif host_capacity is not None and host_capacity * adapter_bytes > budget:
        told.append(
            f"{room} holds {budget // adapter_bytes} adapters of {size}, so that "
            f"--max-cpu-loras {host_capacity} may not be reached: it is an upper bound"
        )
    return told


def check_files(config: EloraConfig) -> None:
    """Raise ConfigError if a TLS file cannot be read; fail_open would hide it later."""
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(config.remote, name)
        if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            origin = config.origin(f"remote.{name}")
            raise ConfigError(
                f"elora.remote.{name} = {path!r} (from {origin}): expected a readable file"
            )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory this process can still get: MemAvailable, or less where a cgroup limits it.

    Args:
        root: directory that holds `proc` and `sys`.
    """
    candidates = [_mem_available(root), *_cgroup_rooms(root)]
    return max(min(candidates), 0)


def _mem_available(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms(root: Path) -> list[int]:
    """What each limiting cgroup, from our own up to the root, still allows."""
    rooms = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, files = root / "sys/fs/cgroup", _V2_FILES
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", _V1_FILES
        else:
            continue
        inner = top / name.strip("/")
        for directory in [inner, *inner.parents]:
            rooms += _room(directory, *files)
            if directory == top:
                break
    return rooms


_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _room(directory: Path, limit_file: str, usage_file: str, cache_name: str) -> list[int]:
    """Limit minus use, in a list of one; empty where there is no limit."""
    limit, usage = _lines(directory / limit_file), _lines(directory / usage_file)
    if not limit or not usage or not limit[0].isdigit():
        return []
    # File pages that are not in use count as used but are given back on demand.
    stat = dict(line.split(" ", 1) for line in _lines(directory / "memory.stat") if " " in line)
    return [int(limit[0]) - int(usage[0]) + int(stat.get(cache_name, "0"))]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
