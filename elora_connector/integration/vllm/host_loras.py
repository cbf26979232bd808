"""Did the user bound vLLM's host adapter cache (`--max-cpu-loras`)?

vLLM writes `max_loras` into its configuration where nothing was said, so the answer has to
be noted while its arguments are still there.  The note travels to the workers with the
configuration; without it the bound counts as the user's.
"""

from __future__ import annotations

from typing import Any

from vllm.engine.arg_utils import EngineArgs

from elora_connector.integration.vllm.patching import wrap

_MARK = "elora_host_loras_unset"
UNBOUND = 1 << 30
"""Adapters in the host cache where only bytes count."""


def install() -> None:
    """Apply the hook to vLLM's class; idempotent."""
    wrap(EngineArgs, "create_engine_config", _create_engine_config)


def is_bounded(lora_config: Any) -> bool:
    """Is `max_cpu_loras` an upper bound that the user set?"""
    return not getattr(lora_config, _MARK, False)


def _create_engine_config(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    config = original(engine_args, *args, **kwargs)
    if config.lora_config is not None and not engine_args.max_cpu_loras:
        setattr(config.lora_config, _MARK, True)
    return config
